"""The executor by itself, with passes that are a few numbers: order, transfers, bytes, hand-over, errors. It knows no model."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from in_order import Entry, rounds_of_nccl, unfinished
from pipeline_help import PIPELINES

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PeerError, RunError
from phalanx.models.context import ForwardInfo
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.pipeline.comm import PipelinePlan, Recv, Run, Send, Transfer, batches
from phalanx.plan.pipeline.run import Pipeline, make_pipeline
from phalanx.plan.pipeline.schedule.make import Action
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.pipeline import runner
from phalanx.runtime.pipeline.boundary import Boundary, direct_edges
from phalanx.runtime.pipeline.runner import Tensors, agree_on, run_pipeline
from phalanx.train.step.passes import _id
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks
ROWS, HIDDEN = 3, 2
SPEC = dataclasses.replace(PRESETS["tiny"], num_layers=8)


def pipeline_of(config: PipelineConfig, pp: int) -> Pipeline:
    return make_pipeline(config, SPEC, pp=pp, seq_len=32)


def boundary_of(rank: int, cache: GroupCache, plan: PipelinePlan, **comms) -> Boundary:
    pp = plan.schedule.pp
    axis = build_groups(make_folding(world=pp, pp=pp), rank=rank, cache=cache).axis("pp")
    return Boundary(
        position=axis.index,
        edges=direct_edges(plan, (ROWS, HIDDEN), axis.ranks),
        dtype=torch.float64,
        device=torch.device("cpu"),
        axis=axis,
        comms=Collectives(**{"timeout_s": 20.0, **comms}),
    )


class Numbers:
    """Stage s adds 10^s going forward and multiplies by (s + 2) going back; micro-batch m starts as m, its gradient as 1."""

    def __init__(self, num_stages: int) -> None:
        self.last = num_stages - 1
        self.done: list[Action] = []
        self.results: dict[tuple[str, int], float] = {}
        self.given: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most_given = 0

    def _out(self, value: float) -> torch.Tensor:
        out = torch.full((ROWS, HIDDEN), value, dtype=torch.float64)
        self.given.add(out)
        self.most_given = max(self.most_given, len(self.given))
        return out

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        self.done.append(Action("F", stage, microbatch))
        assert len(inputs) == (stage > 0)
        value = (inputs[0][0, 0].item() if inputs else microbatch) + 10.0**stage
        if stage == self.last:
            self.results["F", microbatch] = value
            return ()
        return (self._out(value),)

    def _back(self, kind: str, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        self.done.append(Action(kind, stage, microbatch))  # type: ignore[arg-type]
        assert len(d_outputs) == (stage < self.last)
        value = (d_outputs[0][-1, -1].item() if d_outputs else 1.0) * (stage + 2)
        if stage == 0:
            self.results["B", microbatch] = value
            return ()
        return (self._out(value),)

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        return self._back("B", stage, microbatch, d_outputs)

    def input_gradient(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        return self._back("I", stage, microbatch, d_outputs)

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        self.done.append(Action("W", stage, microbatch))


Told = tuple[dict[tuple[str, int], float], int, int, int]


def _numbers(
    rank: int, cache: GroupCache, pp: int, pipeline: Pipeline, microbatches: int, way: str
) -> Told:  # fmt: skip
    plan = pipeline.plan(microbatches)
    boundary = boundary_of(rank, cache, plan, synchronous=way == "blocking")
    if way == "in turn":  # as in the first step on a device
        boundary = dataclasses.replace(boundary, in_turn=True)
    run = runner._Executor._run_in_batches if way == "in turn" else runner._Executor._run_posted
    passes = Numbers(plan.schedule.num_stages)
    for _ in range(2):  # a second step, with the same tags
        passes.done.clear()
        with mock.patch.object(runner._Executor, "_run_posted", run):
            run_pipeline(plan, passes, boundary)
        assert tuple(passes.done) == plan.schedule.actions[rank]
    counter = boundary.comms.counters.get(("exchange", "pp"))
    messages = sum(isinstance(op, Send | Recv) for op in plan.programs[rank])
    sends = sum(isinstance(op, Send) for op in plan.programs[rank])
    assert (counter.calls if counter else 0) == 2 * messages
    assert (counter.sent_bytes if counter else 0) == 2 * sends * ROWS * HIDDEN * 8
    assert len(passes.given) == 0  # nothing is held at the end
    return passes.results, passes.most_given, sends, plan.schedule.max_live[rank]


@pytest.mark.core
@pytest.mark.parametrize("way", ["beside", "blocking", "in turn"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 1), (2, 7), (3, 4), (4, 5)])
def test_numbers_travel_up_and_down(pp: int, microbatches: int, way: str) -> None:
    for config in PIPELINES:
        pipeline = pipeline_of(config, pp)
        told = run_ranks(pp, _numbers, pp, pipeline, microbatches, way)
        found = {key: value for results, *_ in told for key, value in results.items()}
        num_stages = pp * pipeline.virtual
        for m in range(microbatches):
            assert found["F", m] == m + sum(10.0**s for s in range(num_stages))
            assert found["B", m] == torch.arange(2, num_stages + 2).double().prod().item()
        for _, most, _, live in told:
            assert most <= 2 * max(4, live) + pipeline.virtual, config  # open sends and what waits to be handed over


def test_a_run_without_a_pipeline_sends_nothing() -> None:
    pipeline = make_pipeline(PipelineConfig(), SPEC, pp=1, seq_len=32)
    results, most, sends, _ = _numbers(0, GroupCache(), 1, pipeline, 3, False)
    assert results == {**{("F", m): m + 1.0 for m in range(3)}, **{("B", m): 2.0 for m in range(3)}}
    assert most == sends == 0


class _Wrong(Numbers):
    def __init__(self, num_stages: int, what: str) -> None:
        super().__init__(num_stages)
        self.what = what

    def _out(self, value: float) -> torch.Tensor:
        out = super()._out(value)
        return out[:1] if self.what == "shape" else out.float()


def _wrong_pass(rank: int, cache: GroupCache, what: str, says: str) -> None:
    pipeline = make_pipeline(PipelineConfig(), SPEC, pp=2, seq_len=32)
    boundary = boundary_of(rank, cache, pipeline.plan(2))
    axis = Axis("pp", (0, 1), rank, own_group(2, timeout_s=20.0))  # what is posted stays posted: nobody else's group
    if rank == 0:
        with pytest.raises(ValueError, match=rf"pass F0.0 made {says}; between stages are \(3, 2\) of torch.float64"):
            run_pipeline(pipeline.plan(2), _Wrong(2, what), dataclasses.replace(boundary, axis=axis))


@pytest.mark.parametrize(
    ("what", "says"), [("shape", r"\(1, 2\) of torch.float64"), ("type", r"\(3, 2\) of torch.float32")]
)
def test_a_pass_that_makes_another_shape_or_type_is_named(what: str, says: str) -> None:
    run_ranks(2, _wrong_pass, what, says)


def _disagree(rank: int, cache: GroupCache) -> str:
    pipeline = make_pipeline(PipelineConfig(schedule=("gpipe", "1f1b")[rank]), SPEC, pp=2, seq_len=32)  # type: ignore[arg-type]
    boundary = boundary_of(rank, cache, pipeline.plan(4))
    with pytest.raises(RunError, match="the ranks of a pipeline have different plans") as caught:
        agree_on(pipeline.plan(4), axis=boundary.axis, comms=boundary.comms)
    agree_on(make_pipeline(PipelineConfig(), SPEC, pp=2, seq_len=32).plan(4), axis=boundary.axis, comms=boundary.comms)
    return str(caught.value)


def test_ranks_with_different_plans_are_told_so() -> None:
    told = run_ranks(2, _disagree)
    assert "on rank 0" in told[0] and "on rank 1" in told[1]


# ---- ranks that fail --------------------------------------------------------------------------------------------------------------


class _Fails(Numbers):
    def __init__(self, num_stages: int, how: str) -> None:
        super().__init__(num_stages)
        self.how = how

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        if microbatch == 2 and self.how == "dies":
            os._exit(3)
        if microbatch == 2:
            time.sleep(5.0)
        return super().forward(stage, microbatch, inputs)


def _one_fails(rank: int, cache: GroupCache, config: PipelineConfig, how: str, culprit: int) -> None:
    pipeline = make_pipeline(config, SPEC, pp=3, seq_len=32)
    plan = pipeline.plan(6)
    boundary = boundary_of(rank, cache, plan, timeout_s=20.0 if how == "dies" else 1.0)
    boundary.comms.barrier(boundary.axis)  # nobody dies before all have met
    passes = _Fails(plan.schedule.num_stages, how) if rank == culprit else Numbers(plan.schedule.num_stages)
    run_pipeline(plan, passes, boundary, name=lambda t: f"mb{t.microbatch}.{t.direction}.boundary{t.stage}")


def _one_dies(rank: int, cache: GroupCache, config: PipelineConfig, culprit: int, folder: Path) -> None:
    """As ranks of a run do, each leaves when it hears of an error."""
    try:
        _one_fails(rank, cache, config, "dies", culprit)
    except PeerError as error:
        (folder / f"{rank}").write_text(str(error))
        os._exit(4)


@pytest.mark.core
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("config", [PIPELINES[1], PIPELINES[3]], ids=lambda c: c.schedule)
def test_a_rank_that_dies_ends_the_others_with_a_named_error(
    config: PipelineConfig, culprit: int, tmp_path: Path
) -> None:
    with pytest.raises(RankError):
        run_ranks(3, _one_dies, config, culprit, tmp_path, timeout_s=30.0)
    assert {path.name for path in tmp_path.iterdir()} == {str(rank) for rank in range(3) if rank != culprit}
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert "over axis pp, ranks (0, 1, 2)" in text and "boundary" in text and "a rank left or failed" in text


def test_a_silent_rank_ends_the_others_in_time() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, _one_fails, PIPELINES[1], "sleeps", 1, timeout_s=30.0)
    first = next(error for error in caught.value.causes.values() if error is not None)
    assert isinstance(first, PeerError) and "no answer within 1 s" in str(first)


# ---- transports that match by order -----------------------------------------------------------------------------------------------


class _Recorded(Collectives):
    """Takes down what is posted, and completes it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[list[tuple[str, int]], str]] = []

    def start_exchange(self, sends, receives, axis, *, op_id=""):  # type: ignore[no-untyped-def]
        self.posted.append(([("send", m.peer) for m in sends] + [("recv", m.peer) for m in receives], op_id))
        for message in receives:
            message.tensor.zero_()
        return Exchange(lambda: None)


@pytest.mark.parametrize("config", PIPELINES, ids=lambda c: f"{c.schedule}-{c.virtual}")
def test_a_device_gets_neighbouring_transfers_in_one_batch(config: PipelineConfig) -> None:
    """As NCCL needs it: what stands together in the program is posted together; pairs see one another in the same order."""
    plan = make_pipeline(config, SPEC, pp=2, seq_len=32).plan(5)
    orders: list[list[str]] = []
    for rank in range(2):
        posted = on_device(plan, rank)
        wanted = [len(step) for step in batches(plan.programs[rank]) if not isinstance(step, Run)]
        assert [len(messages) for messages, _ in posted] == wanted
        orders.append([name for _, names in posted for name in _names(names)])
    assert orders[0] == orders[1] == [str(t) for t in plan.sent]


def on_device(plan: PipelinePlan, rank: int) -> list[tuple[list[tuple[str, int]], str]]:
    """What a rank of a pipeline of GPUs posts."""
    ranks, comms = tuple(range(plan.schedule.pp)), _Recorded()
    boundary = _OnHost(
        position=rank, edges=direct_edges(plan, (ROWS, HIDDEN), ranks), dtype=torch.float64,
        device=torch.device("cuda"), axis=Axis("pp", ranks, rank, None), comms=comms,
    )  # fmt: skip
    run_pipeline(plan, Numbers(plan.schedule.num_stages), boundary)
    return comms.posted


@pytest.mark.parametrize("of_host", [1, 4, 12])
def test_pipelines_of_more_ranks_than_nccl_carries_at_once_come_to_their_end(of_host: int) -> None:
    """In batches those of several virtual stages do not: what is posted together travels in rounds, and two ranks have two transfers in other batches."""
    turn, stuck = rounds_of_nccl(12, of_host), []
    for config in PIPELINES:
        plan = make_pipeline(config, dataclasses.replace(SPEC, num_layers=24), pp=12, seq_len=32).plan(24)
        alone, together = ({rank: [] for rank in range(12)} for _ in range(2))
        for rank in range(12):
            alone[rank] = [_entry(messages) for messages, _ in on_device(plan, rank)]
            steps = [step for step in batches(plan.programs[rank]) if not isinstance(step, Run)]
            together[rank] = [_entry([_way(op) for op in step]) for step in steps]
        assert not unfinished(alone, connected=True, turn=turn), config
        stuck += [config.schedule] if unfinished(together, connected=True, turn=turn) else []
    assert set(stuck) == {"interleaved_1f1b", "dualpipev"}


def _way(op: Send | Recv) -> tuple[str, int]:
    return ("send", op.transfer.dst_rank) if isinstance(op, Send) else ("recv", op.transfer.src_rank)


def _entry(messages: list[tuple[str, int]]) -> Entry:
    return {"op": "messages", "id": "", "ends": [(way, peer, "") for way, peer in messages]}


def _names(joined: str) -> list[str]:
    words = joined.split(" ")
    return [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]


class _OnHost(Boundary):
    """A boundary of a device whose tensors are nevertheless on the host, and which has no streams."""

    def stream(self) -> None:
        return None

    def empty(self, transfer: Transfer) -> torch.Tensor:
        return torch.empty(self.route(transfer).shape, dtype=self.dtype)


def test_transfers_are_named_for_the_boundary_they_cross() -> None:
    infos = [ForwardInfo(microbatch=8), ForwardInfo(microbatch=9)]
    assert _id(Transfer(0, 1, 4, 1, "forward"), infos) == "mb9.fwd.boundary4"
    assert _id(Transfer(1, 0, 5, 1, "backward"), infos) == "mb9.bwd.boundary4"
    assert _id(Transfer(0, 3, 0, 1, "forward", 3), infos) == "mb9.fwd.skip0to3"
    assert _id(Transfer(3, 0, 3, 0, "backward", 3), infos) == "mb8.bwd.skip0to3"
