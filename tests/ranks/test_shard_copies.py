"""ZeRO-1 with several holders of each shard: the bits of one holder and of whole state, copies equal to their owners, a commit that needs nobody."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exact_help import Ranks, Run, build, ended, shares

from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.state.shard_copies import ShardCopies
from phalanx.simulate.memory.memory import state_terms
from phalanx.train.step.transaction import commit_step, publish, reduce_step, train_step
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def left_out(rank: int) -> Any:
    """A planted fault: the first rank takes the gradient of a copy for zero."""
    sound = ShardCopies.wait
    return mock.patch.object(ShardCopies, "wait", lambda self: [x.zero_() if rank == 0 else x for x in sound(self)])


def apart() -> Any:
    """As over a transport with a reduce-scatter of its own: sums go to owners, and from them to the other keepers."""
    return mock.patch.object(Collectives, "scatters", lambda self, x: True)


def _kept(rank: int, cache: GroupCache, run: Run, ranks: Ranks, way: str) -> Any:
    """Figures of the steps, and everything that a rank keeps after them. `way`: whole, apart, or apart with the planted fault."""
    with ExitStack() as stack:
        if way != "whole":
            stack.enter_context(apart())
        if way == "faulty":
            stack.enter_context(left_out(rank))
        parts, figures = build(rank, cache, run, ranks), []
        for step in range(run.steps):
            r = train_step(parts, shares(parts, run, step), step=step, lr=3e-3)
            figures.append((r.loss, r.grad_norm))
        boxes = [(b.name, b.shape, b.box, b.tensor.clone(), b.primary) for b in parts.state.boxes()]
        weights = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
        return figures, boxes, weights


def kept(run: Run, ranks: Ranks, *, way: str = "whole") -> Any:
    return run_ranks(ranks.world, _kept, run, ranks, way, timeout_s=400)


def owned_state(told: Any) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for _, boxes, _ in told:
        for name, shape, box, tensor, primary in boxes:
            if primary:
                whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box.slices()] = tensor
    return whole


def copies_that_differ(told: Any) -> tuple[int, list[str]]:
    """How many boxes are copies of what another rank owns, and which have other bits."""
    whole, wrong, count = owned_state(told), [], 0
    for rank, (_, boxes, _) in enumerate(told):
        for name, _, box, tensor, primary in boxes:
            if not primary and "buffer" not in name:
                count += 1
                if not torch.equal(tensor, whole[name][box.slices()]):
                    wrong.append(f"{name} {box} on rank {rank}")
    return count, wrong


def same(a: Any, b: Any) -> bool:
    """Figures, weights of every rank, and what owners keep."""
    one, two = owned_state(a), owned_state(b)
    return (
        [x[0] for x in a] == [y[0] for y in b]
        and all(torch.equal(x[2][name], y[2][name]) for x, y in zip(a, b, strict=True) for name in x[2])
        and one.keys() == two.keys()
        and all(torch.equal(one[name], two[name]) for name in one)
    )


FAST = Run(mode="fast", steps=4, samples=8)
UNEVEN = {"hidden": 36}
CASES = {
    "fp32 ep2": (FAST, Ranks(4, ep=2)),
    "fp32 edp4, three holders": (FAST, Ranks(4, holders=3)),
    "bf16 ep2": (Run(mode="fast", steps=4, samples=8, dtype=torch.bfloat16), Ranks(4, ep=2)),
    "plain kernels, odd widths": (Run(mode="fast", steps=4, samples=8, compiled=False, model=UNEVEN), Ranks(4, ep=2)),
    "torch kernels, 3 ranks": (Run(mode="fast", steps=4, samples=7, kernels="reference", model=UNEVEN), Ranks(3)),
    "3 ranks": (Run(mode="fast", steps=4, samples=7, compiled=False, model=UNEVEN), Ranks(3)),
    "tp2 pp": (FAST, Ranks(4, tp=2)),
    "more holders than ranks": (FAST, Ranks(2, ep=2, holders=5)),
    "exact ep2": (Run(steps=4), Ranks(4, ep=2)),
    "exact bf16": (Run(steps=3, dtype=torch.bfloat16), Ranks(3)),
}

APART = ("fp32 ep2", "fp32 edp4, three holders", "exact ep2")


@pytest.mark.parametrize("name", CASES)
def test_copies_have_the_bits_of_their_owners_and_change_none(name: str) -> None:
    run, ranks = CASES[name]
    many = Ranks(ranks.world, ep=ranks.ep, tp=ranks.tp, holders=max(2, ranks.holders))
    found = kept(run, many)
    count, wrong = copies_that_differ(found)
    assert count > 0 and wrong == []
    assert same(found, kept(run, Ranks(ranks.world, ep=ranks.ep, tp=ranks.tp)))
    if name in APART:
        assert same(found, kept(run, many, way="apart"))


def test_a_copy_without_its_gradient_is_found() -> None:
    count, wrong = copies_that_differ(kept(FAST, Ranks(4, ep=2, holders=2), way="faulty"))
    assert wrong and len(wrong) < count and all(text.endswith("on rank 0") for text in wrong)


def test_exact_mode_ends_the_same_with_any_number_of_holders_and_with_whole_state() -> None:
    run = Run(steps=4)
    whole = ended(run, Ranks(4, ep=2, zero=0))
    for ranks in (Ranks(4, ep=2, holders=2), Ranks(3, holders=2), Ranks(4, holders=4)):
        assert ended(run, ranks) == whole, ranks


def test_a_checkpoint_fills_the_copies(tmp_path: Path) -> None:
    run = Run(steps=6)
    alone = ended(run, Ranks(1))
    ended(run, Ranks(4, ep=2, holders=2), steps=3, folder=tmp_path)
    last = ended(run, Ranks(3, holders=2), first=3, steps=3, folder=tmp_path)
    assert last.state == alone.state and last.figures == alone.figures[3:]


def _commit_alone(rank: int, cache: GroupCache, run: Run, ranks: Ranks) -> Any:
    """Collectives of a commit and of a second `publish`; whether before it parameters changed only where this rank keeps them, whether
    `restore` gives the same, and whether what is kept takes the bytes that are estimated."""
    parts = build(rank, cache, run, ranks)
    before = {key: state.flat.clone() for key, state in parts.state.families.items()}
    reduced = reduce_step(parts, shares(parts, run, 0), step=0, lr=3e-3)
    calls = sum(counter.calls for counter in parts.comms.counters.values())
    commit_step(parts, reduced)
    commits = sum(counter.calls for counter in parts.comms.counters.values()) - calls
    touched = True
    for key, state in parts.state.families.items():
        mask = torch.ones(state.layout.length, dtype=torch.bool)
        for start, stop in state.layout.kept_runs:
            mask[start:stop] = False
        touched = touched and torch.equal(state.flat[mask], before[key][mask])
    publish(parts)
    again = sum(counter.calls for counter in parts.comms.counters.values())
    publish(parts)
    twice = sum(counter.calls for counter in parts.comms.counters.values()) - again
    rounded = {key: state.flat.clone() for key, state in parts.state.families.items()}
    parts.state.restore(parts.comms)
    kept_bytes = sum(
        tensor.numel() * tensor.element_size()
        for state in parts.state.families.values()
        for tensor in (state.master, state.exp_avg, state.exp_avg_sq)
    )
    terms = state_terms(parts.buffers.layouts, item=4, borrowed=parts.buffers.borrowed)
    estimated = terms["optimizer state"] == kept_bytes
    restored = all(torch.equal(state.flat, rounded[key]) for key, state in parts.state.families.items())
    return commits, twice, touched, restored, estimated


def test_a_commit_needs_nobody_and_publishing_comes_later() -> None:
    for found in run_ranks(4, _commit_alone, FAST, Ranks(4, ep=2, holders=2), timeout_s=400):
        assert found == (0, 0, True, True, True)
