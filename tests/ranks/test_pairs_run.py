"""Passes beside one another: the bits of one after the other, everywhere; whatever fails ends both."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_help import PipelineCase, batches_of, build

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PeerError, RunError
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import RouterSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups, with_second_groups
from phalanx.runtime.moe import co_schedule
from phalanx.runtime.moe.co_schedule import Baton, CoScheduler
from phalanx.train.step.transaction import StepParts, train_step
from phalanx.verify.numbers import StartingValues
from phalanx.verify.reference import GradientRecorder, start
from phalanx.verify.setups import Setup, small_model
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

SPEC = small_model("pairs", num_layers=3, dense_layers=1, dense_ffn=48, router=RouterSpec(aux_loss=0.05))


def case_of(
    degrees: dict[str, int],
    config: PipelineConfig,
    *,
    recompute: str = "none",
    each: int = 3,
    overlap: str = "serial",
    **changes: object,
) -> PipelineCase:
    folding = make_folding(**degrees)
    setup = Setup(
        label="pairs",
        spec=dataclasses.replace(SPEC, **changes),
        dispatch=DispatchSpec(overlap=overlap),
        recompute=recompute,
    )  # type: ignore[arg-type]
    config = dataclasses.replace(config, pair_passes=True)
    return PipelineCase(setup=setup, folding=folding, config=config, num_microbatches=each * folding.replicas)


PLAIN = PipelineConfig()
INTERLEAVED = PipelineConfig(schedule="interleaved_1f1b", virtual=2)
CASES = {
    "ep2": case_of({"world": 2, "ep": 2}, PLAIN),
    "ep2-full": case_of({"world": 2, "ep": 2}, PLAIN, recompute="full"),
    "ep2-fine": case_of({"world": 2, "ep": 2}, PLAIN, recompute="selective", overlap="fine"),
    "cp2": case_of({"world": 2, "cp": 2, "ep": 2}, PLAIN),
    "ep2-pp2-eager": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="eager_1f1b")),
    "ep2-pp2-interleaved-full": case_of({"world": 4, "ep": 2, "pp": 2}, INTERLEAVED, recompute="full", each=4),
    "ep2-pp2-later": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="eager_1f1b_split")),
    "ep2-pp2-zbv": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="zbv"), each=5),
    "ep2-pp2-dual": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="dualpipev"), each=5),
    "ep2-edp2": case_of({"world": 4, "ep": 2}, PLAIN),
}  # fmt: skip


def steps(parts: StepParts, case: PipelineCase, rank: int, *, count: int) -> list[torch.Tensor]:
    """Loss, gradients and weights of `count` steps from the starting state of `verify`."""
    start(parts, StartingValues())
    batches, out = batches_of(case, rank), []
    for step in range(count):
        recorder = GradientRecorder(parts.optimizer)
        result = train_step(dataclasses.replace(parts, optimizer=recorder), batches, step=step, lr=0.02)
        assert recorder.gradients is not None
        out += [torch.tensor([result.loss, result.aux_loss, result.grad_norm], dtype=torch.float64)]
        out += [box.tensor.clone() for box in recorder.gradients.boxes()]
        out += [p.detach().clone() for p in parts.model.parameters()]
    return out


def _both_ways(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[bool, bool, int, int]:
    """Beside one another; the same plan one after the other; a plan without pairs."""
    paired = build(case, rank, cache)
    num_pairs = len(paired.pipeline.plan(case.num_microbatches // case.folding.replicas).pairs)
    count = 2 if case.setup.recompute == "none" and case.folding.world == 2 else 1
    found = steps(paired, case, rank, count=count)
    counted = {key: (c.calls, c.sent_bytes) for key, c in paired.comms.counters.items()}
    waiting = build(case, rank, cache)
    waiting = dataclasses.replace(waiting, groups=dataclasses.replace(waiting.groups, second=None))
    plan_alone = steps(waiting, case, rank, count=count) if case.folding.pp > 1 else None
    plain = build(dataclasses.replace(case, config=dataclasses.replace(case.config, pair_passes=False)), rank, cache)
    want = steps(plain, case, rank, count=count)
    assert counted == {key: (c.calls, c.sent_bytes) for key, c in plain.comms.counters.items()}
    assert not [t.name for t in threading.enumerate() if t.name == "second pass"]
    return _equal(found, want), plan_alone is None or _equal(plan_alone, want), num_pairs, len(want)


def _equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_one_after_the_other(name: str) -> None:
    case = CASES[name]
    for beside, after, num_pairs, tensors in run_ranks(case.folding.world, _both_ways, case, timeout_s=400):
        assert num_pairs > 1 and tensors > 10
        assert beside and after


# ---- by itself ------------------------------------------------------------------------------------------------------------------


def _beside(rank: int, cache: GroupCache, **settings: object) -> tuple[CoScheduler, Collectives, Axis]:
    groups = with_second_groups(build_groups(make_folding(world=2, ep=2), rank=rank, cache=cache), cache=cache)
    comms = Collectives(**{"timeout_s": 20.0, **settings})  # type: ignore[arg-type]
    assert groups.second is not None
    return CoScheduler(comms, groups.second), comms, groups.axis("ep")


def _other_order(rank: int, cache: GroupCache) -> tuple[list[float], bool, bool, int]:
    """The ranks meet the sums of their two passes in opposite order, which one group of ranks would not survive."""
    beside, comms, axis = _beside(rank, cache, trace=True)
    most = [0, 0]

    def sums(which: int, *, slow: bool) -> Callable[[], list[float]]:
        def run() -> list[float]:
            out = []
            for i in range(20):
                most[0] += 1
                most[1] = max(most)
                if slow:
                    time.sleep(0.001)
                x = torch.full((4,), float(rank + 10 * which + i))
                most[0] -= 1
                out.append(comms.all_reduce(x, axis)[0].item())
            return out

        return run

    with beside, torch.no_grad():
        grad_mode: list[bool] = []
        first, second = beside.run(sums(1, slow=rank == 0), sums(2, slow=rank == 1))
        beside.run(lambda: None, lambda: grad_mode.append(torch.is_grad_enabled()))
    assert comms.beside is None
    return first + second, grad_mode == [False], most[1] == 1, comms.counters["all_reduce", "ep"].calls


def test_ranks_may_interleave_their_passes_as_they_come() -> None:
    want = [2.0 * (10 * which + i) + 1 for which in (1, 2) for i in range(20)]
    for found, grad_mode, one_at_a_time, calls in run_ranks(2, _other_order):
        assert found == want and calls == 40
        assert grad_mode and one_at_a_time


def test_an_offered_turn_is_taken() -> None:
    baton, told = Baton(), []
    baton.take()
    baton.offer()  # nobody wants it

    def other() -> None:
        baton.take()
        told.append("other")
        baton.give()

    thread = threading.Thread(target=other)
    thread.start()
    while not baton._wanted:
        time.sleep(0.001)
    baton.offer()
    told.append("first")
    baton.give()
    thread.join(5.0)
    assert told == ["other", "first"]


# ---- errors ---------------------------------------------------------------------------------------------------------------------


def _raises(rank: int, cache: GroupCache, which: int) -> str:
    """One pass of each rank raises; the other waits for a message that never comes."""
    beside, comms, axis = _beside(rank, cache)

    def fails() -> None:
        comms.all_reduce(torch.ones(1), axis)
        raise RunError("planned")

    def waits() -> None:
        comms.all_reduce(torch.ones(1), axis)
        if rank == 0:
            comms.all_reduce(torch.ones(1), axis)  # rank 1 never comes
        else:
            for _ in range(1000):
                time.sleep(0.001)
                comms.offer_turn()

    begin_s = time.monotonic()
    with beside, pytest.raises(RunError) as caught:
        beside.run(*((fails, waits) if which == 0 else (waits, fails)))
    assert time.monotonic() - begin_s < 15.0
    assert not [t.name for t in threading.enumerate() if t.name == "second pass"]
    return str(caught.value)


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_in_one_pass_ends_both_and_is_raised(which: int) -> None:
    def alone(rank: int, cache: GroupCache) -> str:  # a pool of its own: the groups are lost
        return _raises(rank, cache, which)

    assert run_ranks(2, alone) == ["planned", "planned"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_pass_in_the_middle_of_a_message_is_left_behind(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends its wait (`runtime/comm/abortable.py`). Where it is the rank's own thread that waits, the run is told, and ends."""
    monkeypatch.setattr(co_schedule, "GRACE_S", 0.02)
    broken_off, given_up, axis = list[Axis](), list[BaseException](), Axis("ep", (0, 1), 0, None)
    timeout, said = threading.Event(), list[str]()

    def give_up(error: BaseException) -> None:
        given_up.append(error)
        said.append(both.failed)
        timeout.set()

    comms: Any = SimpleNamespace(beside=None, break_off=broken_off.append, give_up=give_up)
    both = CoScheduler(comms, None)  # type: ignore[arg-type]
    waits = threading.Event()

    def stays() -> None:
        with both.away(axis):
            waits.set()
            timeout.wait(30)

    def fails() -> None:
        if which:
            with both.away(axis):
                assert waits.wait(10)
        raise ArithmeticError("planned")

    with pytest.raises(ArithmeticError, match="planned"), both:
        both.run(*((stays, fails) if which else (fails, stays)))
    assert broken_off == [axis] and comms.beside is None
    assert [str(e) for e in given_up] == ["planned"] * which
    assert said == ["a pass beside this one failed: ArithmeticError: planned"] * which
    assert (both.failed == "") == bool(which), "a pass that was left behind goes no further"
    timeout.set()


class _Dies(Collectives):
    """Leaves in the middle of a pair."""

    left = 3

    def all_to_all_raw(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.beside is not None:
            self.left -= 1
            if not self.left:
                os._exit(3)
        return super().all_to_all_raw(*args, **kwargs)


def _one_dies(rank: int, cache: GroupCache, folder: Path) -> None:
    """As ranks of a run do, the other leaves when it hears of it."""
    case = CASES["ep2-full"]
    parts = build(case, rank, cache, comms=_Dies(timeout_s=30.0) if rank else None)
    begin_s = time.monotonic()
    try:
        steps(parts, case, rank, count=1)
    except PeerError as error:
        left = [t.name for t in threading.enumerate() if t.name == "second pass"]
        (folder / f"{rank}").write_text(f"{time.monotonic() - begin_s:.0f} {left} {error}")
        os._exit(4)


def test_a_rank_that_dies_ends_both_passes_of_the_other(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(2, _one_dies, tmp_path, timeout_s=40.0)
    text = (tmp_path / "0").read_text()
    seconds, left, error = text.split(" ", 2)
    assert int(seconds) < 20 and left == "[]"
    assert "over axis ep" in error and "ranks (0, 1), failed on rank 0" in error


def test_an_axis_without_a_second_group_is_named() -> None:
    def alone(rank: int, cache: GroupCache) -> None:
        beside, comms, axis = _beside(rank, cache)
        stranger = Axis("strangers", (0, 1, 2), rank, axis.group)
        with beside, pytest.raises(RunError, match=r"axis strangers, ranks \(0, 1, 2\), has no second group"):
            beside.run(lambda: None, lambda: comms.barrier(stranger))

    run_ranks(2, alone)
