"""The loss on devices, by plain operations and by Triton's programs under its interpreter, against the plain reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_help import agree, close, normal, seeded

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from phalanx.kernels.device.cross_entropy import LossWork, device_cross_entropy
from phalanx.kernels.ops.cross_entropy import IGNORE, linear_cross_entropy
from phalanx.kernels.triton.tiles import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference from the plain version in fp64, relative to its largest element."""
PROGRAMS = pytest.mark.parametrize("programs", [True, False], ids=["programs", "operations"])


def _labels(tokens: int, vocab: int) -> torch.Tensor:
    labels = torch.randint(0, vocab, (tokens,), generator=seeded(7))
    labels[::5] = IGNORE
    return labels


@pytest.mark.core
@PROGRAMS
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "chunk"),
    [(0, 4, 6, None), (1, 4, 6, None), (11, 12, 70, 4), (12, 8, 33, 3), (3, 4, 4500, 2)],
)
def test_equals_its_reference(tokens: int, hidden: int, vocab: int, chunk: int | None, programs: bool) -> None:
    labels = _labels(tokens, vocab)
    how = LossWork(ignore=IGNORE, programs=programs, chunk=chunk)
    agree(
        lambda h, w: device_cross_entropy(h, w, labels, how).to(h.dtype),
        lambda h, w: linear_cross_entropy(h, w, labels, impl="reference"),
        [normal(tokens, hidden, scale=0.5), normal(vocab, hidden, seed=1, scale=0.5)],
        tolerance=TOLERANCE,
    )


@PROGRAMS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shards_equal_the_whole(dtype: torch.dtype, programs: bool) -> None:
    ranks, tokens, hidden, rows = 3, 9, 8, 13
    labels = _labels(tokens, ranks * rows)
    labels[1:4] = torch.tensor([0, rows, ranks * rows - 1])
    h, w = normal(tokens, hidden, scale=0.5), normal(ranks * rows, hidden, seed=1, scale=0.5)
    told: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(ranks)}

    def of_rank(rank: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        first = rank * rows
        how = LossWork(ignore=IGNORE, first=first, gather=gather, programs=programs, chunk=4)
        own = [x.to(dtype).requires_grad_() for x in (h, w[first : first + rows])]
        loss = device_cross_entropy(*own, labels, how)  # type: ignore[call-arg]
        return loss.detach(), *torch.autograd.grad(loss / 7, own)

    def first_time(rank: int, x: torch.Tensor) -> torch.Tensor:
        told[rank].append(x.clone())
        return x.expand(ranks, *x.shape).contiguous()

    for rank in range(ranks):  # what a rank tells depends on no other rank: the first call hears it, the second has all
        of_rank(rank, partial(first_time, rank))
    found = []
    for rank in range(ranks):
        chunks = zip(*told.values(), strict=True)
        found.append(of_rank(rank, lambda _, chunks=chunks: torch.stack(next(chunks))))
    leaves = [h.clone().requires_grad_(), w.clone().requires_grad_()]
    want = linear_cross_entropy(*leaves, labels, impl="reference")  # type: ignore[call-arg]
    d_h, d_w = torch.autograd.grad(want / 7, leaves)
    assert all(torch.equal(loss, found[0][0]) for loss, _, _ in found)
    assert close(found[0][0], want.detach(), TOLERANCE[dtype])
    assert close(sum(d.double() for _, d, _ in found), d_h, 2 * TOLERANCE[dtype])
    assert close(torch.cat([d for _, _, d in found]), d_w, TOLERANCE[dtype])


@PROGRAMS
def test_extreme_logits(programs: bool) -> None:
    """Certainty, its opposite, and logits that are far from zero together."""
    how = LossWork(ignore=IGNORE, programs=programs)
    eye = torch.eye(2)
    assert device_cross_entropy(1e4 * eye, eye, torch.tensor([0, 0]), how).item() == pytest.approx(1e4)
    low = device_cross_entropy(-1e4 * torch.ones(1, 1), torch.ones(8, 1), torch.tensor([3]), how)
    assert low.item() == pytest.approx(torch.tensor(8.0).log().item(), rel=1e-3)
    nan = device_cross_entropy(torch.tensor([[torch.nan, 1.0]]), eye, torch.tensor([1]), how)
    assert nan.isnan()


@PROGRAMS
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("gather", [None, lambda own: own.unsqueeze(0)], ids=["whole", "shard"])
def test_what_is_not_predicted_has_no_part(
    gather: Callable[[torch.Tensor], torch.Tensor] | None, bad: float, programs: bool
) -> None:
    """Whatever its hidden state is: zero times infinity is NaN."""
    h, w, labels = normal(4, 3), normal(5, 3, seed=1), torch.tensor([2, IGNORE, 0, IGNORE])
    right = linear_cross_entropy(h, w, labels, impl="reference")
    h[1], h[3, 0] = bad, -bad
    h.requires_grad_()
    got = device_cross_entropy(h, w, labels, LossWork(ignore=IGNORE, gather=gather, programs=programs))
    (d_h,) = torch.autograd.grad(got, h)
    assert got.item() == pytest.approx(right.item())
    assert not d_h[1].any() and not d_h[3].any() and d_h[0].any()


@PROGRAMS
def test_a_shard_far_below_another(programs: bool) -> None:
    """Logits 0 here, and 1,000 on the other rank, which has the label or has not."""
    h = torch.ones(2, 1)
    other = torch.tensor([[[1000.0, 1.0, 0.0], [1000.0, 1.0, 1000.0]]])  # largest logit, sum, the label's logit
    how = LossWork(ignore=IGNORE, programs=programs, gather=lambda own: torch.cat([own.unsqueeze(0), other]))
    weight = torch.zeros(1, 1).requires_grad_()
    loss = device_cross_entropy(h, weight, torch.tensor([0, 1]), how)
    assert loss.item() == 1000.0
    assert torch.autograd.grad(loss, weight)[0].item() == -1.0


@PROGRAMS
def test_the_upstream_gradient_is_not_rounded(programs: bool) -> None:
    """1/1019 rounded to bf16 first would be off by 3e-3, the same way everywhere."""
    h, w = (x.to(torch.bfloat16).requires_grad_() for x in (normal(64, 16), normal(50, 16, seed=1)))
    loss = device_cross_entropy(h, w, _labels(64, 50), LossWork(ignore=IGNORE, programs=programs))
    assert loss.dtype == torch.float32 and loss.dim() == 0
    (one,) = torch.autograd.grad(loss, h, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss / 1019, h)
    exact = one.float() * torch.tensor(1 / 1019)
    cut = (exact.view(torch.int32) & -(2**16)).view(
        torch.float32
    )  # as Triton's interpreter rounds; a GPU to the nearest
    assert torch.equal(scaled, exact.to(torch.bfloat16)) or torch.equal(scaled.float(), cut)
    assert not scaled[::5].any(), "tokens without labels"


@PROGRAMS
def test_evaluation_writes_no_gradient(programs: bool) -> None:
    h, w, labels = normal(4, 3), normal(5, 3, seed=1), torch.tensor([0, 1, 2, IGNORE])
    with torch.no_grad():
        got = device_cross_entropy(h, w, labels, LossWork(ignore=IGNORE, programs=programs))
    assert got.item() == pytest.approx(linear_cross_entropy(h, w, labels, impl="reference").item())


@PROGRAMS
def test_each_product_is_shown_to_who_checks(programs: bool) -> None:
    seen = []
    h, w = normal(6, 4).requires_grad_(), normal(5, 4, seed=1).requires_grad_()
    how = LossWork(
        ignore=IGNORE,
        programs=programs,
        chunk=3,
        check=lambda place, product, factors: seen.append((place, torch.allclose(product, factors[0] @ factors[1]))),
    )
    device_cross_entropy(h, w, _labels(6, 5), how)
    a_chunk = ["logits forward", "logits input gradient"] + 2 * ["logits weight gradient"]
    assert seen == [(place, True) for place in 2 * a_chunk]
