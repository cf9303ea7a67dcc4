"""A step that is checked: a wrong product or message costs one repeat, what is wrong again or at rest ends it by name, and sound steps are never called wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiers import some

from phalanx.core.errors import UnsoundError
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import RouterSpec, parameters
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.train.assembly import assemble
from phalanx.train.step.check import check_saved
from phalanx.train.step.transaction import StepParts, commit_step, publish, reduce_step, train_step
from phalanx.verify.numbers import StartingValues, microbatch
from phalanx.verify.reference import context
from phalanx.verify.setups import Setup, small_model
from phalanx_lab.faults.flips import Aim, FlippedMessages, FlippedProducts
from ranks import run_ranks

SETUP = Setup(
    label="test",
    spec=small_model("test", router=RouterSpec(score="sigmoid", renormalize=True, bias_rate=1e-3, aux_loss=0.05)),
    dispatch=DispatchSpec(),
)
MAPPINGS = ({"ep": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"etp": 2})
CASES = [
    *((mapping, dtype, "fast") for mapping in MAPPINGS for dtype in (torch.bfloat16, torch.float64)),
    ({"ep": 2}, torch.float32, "reference"),
]


def make(
    rank: int,
    cache: GroupCache,
    mapping: dict[str, int],
    *,
    checked: bool = True,
    dtype: torch.dtype = torch.float32,
    kernels: str = "fast",
) -> StepParts:
    groups, rows = build_groups(make_folding(**{"world": 2, **mapping}), rank=rank, cache=cache), compiled_rows()
    comms = Collectives(sums=FlippedMessages(rank, rows=rows) if checked else None)
    ctx = dataclasses.replace(
        context(SETUP, groups, comms, dtype=dtype),
        lanes=Lanes(1, rows=rows, sums=FlippedProducts() if checked else None),
        kernels=kernels,
    )
    parts = assemble(ctx, optim=SETUP.optim, num_microbatches=1)
    StartingValues().fill(parts.state.boxes(), {p.name: p for p in parameters(SETUP.spec)})
    parts.state.restore(parts.comms)
    return parts


def masters(parts: StepParts) -> list[torch.Tensor]:
    return [family.master.clone() for family in parts.state.families.values()]


def _sound(
    rank: int, cache: GroupCache, mapping: dict[str, int], dtype: torch.dtype, kernels: str
) -> tuple[float, int]:
    """Steps with and without checks: the largest difference in a master weight, and alarms."""
    both = [make(rank, cache, mapping, checked=on, dtype=dtype, kernels=kernels) for on in (True, False)]
    alarms = 0
    replica = both[0].groups.folding.replica_of(rank)
    for step in range(3):
        for parts in both:
            batches = [part_of(microbatch(SETUP, 2 * step + replica), parts.groups.folding, rank)]
            reduced = reduce_step(parts, batches, step=step, lr=0.01)
            alarms += len(reduced.findings)
            commit_step(parts, reduced)
            check_saved(parts, step=step)
            publish(parts)
    off = max(float((a - b).abs().max()) for a, b in zip(*map(masters, both), strict=True))
    return off, alarms


@pytest.mark.parametrize(("mapping", "dtype", "kernels"), some(CASES, 4))
def test_sound_steps_raise_no_alarm_and_are_those_without_checks(
    mapping: dict[str, int], dtype: torch.dtype, kernels: str
) -> None:
    for off, alarms in run_ranks(2, _sound, mapping, dtype, kernels):
        assert alarms == 0
        assert off < {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 0.1}[dtype]


def test_what_is_summed_over_two_groups_raises_no_alarm_either() -> None:
    """Router and norms with tp: what goes to the second group is no longer what was collected."""
    for off, alarms in run_ranks(4, _sound, {"world": 4, "tp": 2, "ep": 2}, torch.float32, "fast"):
        assert alarms == 0 and off < 1e-2


def huge(x: torch.Tensor) -> None:
    x.view(-1)[x.numel() // 2] = 1e6


def low(x: torch.Tensor) -> None:
    """The last bit of a number."""
    words = x.view(-1)[x.numel() // 2 :][:1].view(torch.int32)
    words ^= 1


def _planted(rank: int, cache: GroupCache, kind: str, times: int) -> tuple[list[str], bool, bool]:
    """Findings of a step with flips on rank 1, whether it is the step without them, and whether it raised and changed nothing."""
    parts, plain = make(rank, cache, {"ep": 2}), make(rank, cache, {"ep": 2}, checked=False)
    products, messages = parts.lanes.sums, parts.comms.sums
    assert isinstance(products, FlippedProducts) and isinstance(messages, FlippedMessages)
    if rank == 1 and kind == "products":
        strike(products.made, "second projection, input gradient", huge, times)
    elif rank == 1:
        strike(messages.way, "bwd.dispatch.rows", low, times)
    batch, before = [microbatch(SETUP, rank)], masters(parts)
    train_step(plain, batch, step=0, lr=0.01)
    try:
        reduced = reduce_step(parts, batch, step=0, lr=0.01)
    except UnsoundError as error:
        return [str(error)], False, all(torch.equal(a, b) for a, b in zip(before, masters(parts), strict=True))
    commit_step(parts, reduced)
    return list(reduced.findings), all(map(torch.equal, masters(parts), masters(plain))), False


def strike(aim: Aim, word: str, flip: Callable[[torch.Tensor], None], times: int) -> None:
    """Flip the first `times` events whose place has `word` in it, one an attempt of the step is enough."""
    left = [times]

    def passes(place: str, x: torch.Tensor) -> None:
        if word in place and left[0] and x.numel():
            left[0] -= 1
            flip(x)

    aim.passes = passes  # type: ignore[method-assign]


@pytest.mark.core
@pytest.mark.parametrize("kind", ("products", "messages"))
def test_a_flip_costs_one_repeat_and_leaves_no_trace(kind: str) -> None:
    for findings, same, _ in run_ranks(2, _planted, kind, 1):
        assert same
        assert findings and "rank 1" in findings[0]
        assert ("second projection" if kind == "products" else "arrived with other bits") in findings[0]


def test_a_rank_that_computes_wrong_again_is_named_and_nothing_is_committed() -> None:
    for findings, _, unchanged in run_ranks(2, _planted, "products", 1000):
        assert unchanged
        assert "rank 1" in findings[0] and "rank 0" not in findings[0]


def _at_rest(rank: int, cache: GroupCache, what: str, restored: bool) -> tuple[str, bool]:
    parts = make(rank, cache, {"ep": 2})
    batch = [microbatch(SETUP, rank)]
    if not restored:
        train_step(parts, batch, step=0, lr=0.01)
    family = (
        parts.state.families["expert"]
        if "expert" in parts.state.families
        else next(iter(parts.state.families.values()))
    )
    if rank == 1:
        low(getattr(family, what))
    before = masters(parts)
    try:
        reduced = reduce_step(parts, batch, step=1, lr=0.01)
        before = []
        commit_step(parts, reduced)
    except UnsoundError as error:
        return str(error), bool(before) and all(map(torch.equal, before, masters(parts)))
    return "", False


@pytest.mark.parametrize("restored", (False, True))
@pytest.mark.parametrize("what", ("flat", "master", "exp_avg", "exp_avg_sq"))
def test_a_bit_that_flips_at_rest_ends_the_rank_by_name(what: str, restored: bool) -> None:
    """After a step, or before the first one."""
    (text0, unchanged0), (text1, _) = run_ranks(2, _at_rest, what, restored)
    assert "rank 1" in text1 and ("parameters" if what == "flat" else what) in text1
    assert "bit 0 of a 32-bit word has flipped" in text1
    if what == "flat":
        assert unchanged0 and text0 == text1
    else:
        assert text0 == ""


def _saved(rank: int, cache: GroupCache, what: str, steps: int) -> str:
    parts = make(rank, cache, {"ep": 2})
    for step in range(steps):
        train_step(parts, [microbatch(SETUP, rank)], step=step, lr=0.01)
    if rank == 1:
        low(getattr(next(iter(parts.state.families.values())), what))
    try:
        check_saved(parts, step=steps)
    except UnsoundError as err:
        return str(err)
    return ""


@pytest.mark.parametrize(("what", "steps"), [("master", 1), ("exp_avg", 1), ("exp_avg_sq", 1), ("master", 0)])
def test_a_bit_that_flipped_at_rest_is_not_saved(what: str, steps: int) -> None:
    sound, text = run_ranks(2, _saved, what, steps)
    assert sound == "" and f"rank 1: {what} of" in text and "nothing was saved" in text
