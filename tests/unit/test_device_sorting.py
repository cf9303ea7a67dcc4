"""The launches that sort routed pairs, under Triton's interpreter, against the plain sort."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from kernel_help import seeded

from phalanx.kernels.device import sorting
from phalanx.kernels.triton.tiles import is_interpreted
from phalanx.runtime.moe.dispatch import inverse_exact, sorted_keys

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")


@pytest.mark.parametrize(("size", "values"), [(1, 1), (7, 3), (900, 5), (300, 128), (257, 16), (65, 33)])
@pytest.mark.parametrize("drops", [False, True])
def test_equals_the_plain_sort(size: int, values: int, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several tiles in a program, and more programs than are added up at once."""
    monkeypatch.setattr(sorting, "TILE", 256)
    monkeypatch.setattr(sorting, "PROGRAMS", 11)
    monkeypatch.setattr(sorting, "SUMMED", 4)
    keys = torch.randint(0, values + drops, (size,), generator=seeded(size))
    got, want = sorting.sort_keys(keys, values, copies=3), sorted_keys(keys, values, impl="reference")
    placed = int(want.counts_E.sum())
    assert got.counts_E.dtype == want.counts_E.dtype and torch.equal(got.counts_E, want.counts_E)
    assert torch.equal(got.order_N[:placed], want.order_N[:placed])
    assert torch.equal(got.tokens_N[:placed], want.order_N[:placed] // 3)
    assert got.ends_E.dtype == torch.int32 and torch.equal(got.ends_E, want.counts_E.cumsum(0).to(torch.int32))
    assert torch.equal(got.places_N, inverse_exact(want.order_N[:placed], size))


def test_nothing_to_sort() -> None:
    got = sorting.sort_keys(torch.empty(0, dtype=torch.int64), 4)
    assert got.counts_E.tolist() == got.ends_E.tolist() == [0] * 4 and len(got.order_N) == len(got.places_N) == 0


@pytest.mark.parametrize(("sources", "groups"), [(1, 1), (1, 16), (3, 5), (40, 130)])
def test_ends_of_groups(sources: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of other groups and of what else is told lie around them."""
    monkeypatch.setattr(sorting, "SUMMED", 4)
    counts = torch.randint(0, 2**33 // (sources * groups), (sources, groups + 5), generator=seeded(groups)) // 8
    want = counts[:, 3 : 3 + groups].sum(0).cumsum(0).to(torch.int32)
    assert torch.equal(sorting.ends_of_groups(counts, 3, groups), want)


def test_groups_without_a_row_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, two beside each other and the last; the numbers of a group are no multiple of what programs take at once."""
    monkeypatch.setattr(sorting, "ZEROS", 16)
    monkeypatch.setattr(sorting, "PARTS", 2)
    ends = torch.tensor([0, 3, 3, 3, 7, 7], dtype=torch.int32)
    a, b = torch.ones(6, 7, 9, dtype=torch.bfloat16), torch.ones(6, 2, 3, dtype=torch.bfloat16)
    sorting.zero_empty_groups(ends, a, b)
    for x in (a, b):
        for group, written in enumerate((False, True, False, False, True, False)):
            assert bool((x[group] == (1 if written else 0)).all())
