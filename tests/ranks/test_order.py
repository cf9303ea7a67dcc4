"""Every communicator sees one order of collectives, on all its ranks, with equal shapes: also where a rank has an empty micro-batch, experts have replicas, or stages pass on what they made.

gloo matches messages by tag and would never notice; NCCL matches by order and would hang, or read rows as gradients. The transport of `in_order.py` matches as NCCL does.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import in_order as in_order_module
import pytest
import torch
from deepep_stand_in import stand_in
from in_order import Entry, OrderError, Orders, crossed, in_order, stuck

from phalanx.cli.predicting.dry_run import _groups as describe_groups
from phalanx.core.config import PipelineConfig
from phalanx.core.samples import num_rounds, owned
from phalanx.models.context import TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import RouterSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.tokens import TokenBuffers
from phalanx.runtime.moe.streams import Posted
from phalanx.runtime.pipeline import runner
from phalanx.train.assembly import assemble
from phalanx.train.step import passes
from phalanx.train.step.transaction import StepParts, eval_loss, train_step
from phalanx.verify.numbers import microbatch
from phalanx.verify.reference import context
from phalanx.verify.replicas import random_placements
from phalanx.verify.setups import Setup, small_model
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One run of two steps. `samples` micro-batches a step are no multiple of the replicas, so some ranks have empty ones."""

    world: int
    samples: int
    degrees: dict[str, int]
    router: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    dispatch: DispatchSpec = dataclasses.field(default_factory=DispatchSpec)
    recompute: str = "none"
    kernels: Literal["fast", "reference"] = "fast"
    schedule: str = "1f1b"
    holders: int = 1
    zero: Literal[0, 1, 2] = 1
    slots: int = 0
    """Of a rank, for experts with replicas."""

    @property
    def folding(self) -> Folding:
        return make_folding(world=self.world, **self.degrees)

    @property
    def setup(self) -> Setup:
        router = RouterSpec(**{"aux_loss": 0.05, **self.router})
        return Setup(
            label="order",
            spec=small_model("order", router=router, **self.model),
            dispatch=self.dispatch,
            zero=self.zero,
            kernels=self.kernels,
        )


DEEPEP = DispatchSpec(transport="deepep")
WAYS = {
    "ep": Way(world=4, samples=7, degrees={"ep": 4}),
    "equal": Way(world=4, samples=8, degrees={"ep": 4}),
    "equal, replicas": Way(world=4, samples=8, degrees={"ep": 4}, slots=4),
    "equal, pp": Way(world=4, samples=8, degrees={"pp": 2, "ep": 2}, schedule="zero_bubble"),
    "global counts": Way(world=4, samples=7, degrees={"ep": 4}, router={"aux_scope": "global_batch"}),
    "whole layers again": Way(world=4, samples=7, degrees={"ep": 4}, recompute="full"),
    "whole layers again, plainly": Way(world=2, samples=3, degrees={"ep": 2}, recompute="full", kernels="reference"),
    "tiles again, a shared expert": Way(
        world=2,
        samples=3,
        degrees={"ep": 2},
        model={"shared_ffn": 48},
        dispatch=DispatchSpec(overlap="tiles"),
        recompute="full",
    ),
    "whole layers and tokens again, a shared expert": Way(
        world=2,
        samples=3,
        degrees={"ep": 2},
        model={"shared_ffn": 48},
        dispatch=DispatchSpec(transport="all_gather"),
        recompute="full",
    ),
    "tp": Way(world=4, samples=3, degrees={"tp": 2, "ep": 4}),
    "tp of all": Way(world=4, samples=1, degrees={"tp": 4, "ep": 4}),
    "etp": Way(world=4, samples=3, degrees={"tp": 2, "etp": 2, "ep": 2}),
    "cp": Way(world=4, samples=3, degrees={"cp": 2, "ep": 4}),
    "replicas": Way(world=4, samples=7, degrees={"ep": 4}, slots=4),
    "chunks": Way(world=4, samples=7, degrees={"ep": 4}, dispatch=DispatchSpec(overlap="coarse:2")),
    "tiles": Way(world=4, samples=7, degrees={"ep": 4}, dispatch=DispatchSpec(overlap="fine")),
    "whole tokens": Way(world=4, samples=7, degrees={"ep": 4}, dispatch=DispatchSpec(transport="all_gather")),
    "whole tokens by DeepEP": Way(world=4, samples=7, degrees={"ep": 4}, dispatch=DEEPEP),
    "whole tokens by DeepEP, again": Way(
        world=4, samples=7, degrees={"cp": 2, "ep": 4}, dispatch=DEEPEP, recompute="full"
    ),
    "pp": Way(world=4, samples=7, degrees={"pp": 2, "ep": 2}),
    "pp, tied": Way(world=4, samples=7, degrees={"pp": 2, "ep": 2}, model={"tied_embeddings": True}),
    "pp, dualpipev": Way(world=4, samples=7, degrees={"pp": 2, "ep": 2}, model={"num_layers": 4}, schedule="dualpipev"),
    "pp, zbv": Way(world=4, samples=9, degrees={"pp": 2, "ep": 2}, model={"num_layers": 4}, schedule="zbv"),
    "pp, divided backward": Way(world=4, samples=7, degrees={"pp": 2, "ep": 2}, schedule="zero_bubble"),
    "shards with copies": Way(world=4, samples=7, degrees={"ep": 2}, holders=2),
    "sharded gradients": Way(world=4, samples=7, degrees={"ep": 2}, zero=2),
    "sharded gradients, equal": Way(world=4, samples=8, degrees={"ep": 2}, zero=2),
    "sharded gradients, pp": Way(world=4, samples=7, degrees={"pp": 2, "ep": 2}, schedule="zero_bubble", zero=2),
    "all of it": Way(world=8, samples=3, degrees={"pp": 2, "tp": 2, "ep": 4}),
    "cp and etp": Way(world=8, samples=3, degrees={"pp": 2, "cp": 2, "etp": 2, "ep": 2}),
    "eight": Way(world=8, samples=13, degrees={"ep": 4}, holders=2),
}


class DeviceRounds:
    """Messages of tiles leave in rounds, as on a device (`runtime/moe/overlap_streams.py`); on a host each would be posted by itself, in another order."""

    left_free = 0

    def post(self, comms: Collectives, *messages: Any, op_id: str = "") -> Posted:
        return Posted(comms.start_exchange(*messages, op_id=op_id))

    def order(self, posted: Posted) -> None:
        posted.done.wait()


def build(rank: int, cache: GroupCache, way: Way, *, ordered: bool = True) -> StepParts:
    setup, folding = way.setup, way.folding
    pipeline = make_pipeline(PipelineConfig(schedule=way.schedule), setup.spec, pp=folding.pp, seq_len=32)
    tables = pipeline.stages.table_ranks
    groups = build_groups(folding, rank=rank, cache=cache, table_ranks=tables, in_order=ordered)
    placement = None
    if way.slots:
        placement = random_placements(setup.spec.moe_layers, setup.spec.num_experts, folding.ep, way.slots, 0)
    tokens, ep = TokenBuffers(), groups.axis("ep").group
    if way.dispatch == DEEPEP and ep is not None:
        tokens = TokenBuffers(stand_in(ep))
    comms = Collectives(timeout_s=60, tokens=tokens)
    comms.message_streams = DeviceRounds()
    ctx = context(setup, groups, comms, dtype=torch.float32, placement=placement)
    return assemble(
        dataclasses.replace(ctx, recompute=way.recompute),
        optim=dataclasses.replace(
            setup.optim, bucket_mb=0.004
        ),  # a few buckets, that become complete one after the other
        num_microbatches=num_rounds(way.samples, owners=folding.replicas),
        pipeline=pipeline,
        samples=way.samples,
        holders=way.holders,
    )


def batches_of(parts: StepParts, way: Way) -> list[TokenBatch]:
    folding, rank = parts.groups.folding, parts.groups.rank
    own = owned(way.samples, owners=folding.replicas, owner=folding.replica_of(rank))
    found = [microbatch(way.setup, j) for j in own]
    nothing = microbatch(way.setup, 0)
    nothing = dataclasses.replace(nothing, labels_BS=torch.full_like(nothing.labels_BS, -100), is_empty=True)
    found += [nothing] * (num_rounds(way.samples, owners=folding.replicas) - len(own))
    return [part_of(batch, folding, rank) for batch in found]


def steps(rank: int, cache: GroupCache, way: Way, folder: Path, plant: str) -> list[float]:
    """Two steps and an evaluation, and the losses of these steps. `plant` puts back what was wrong."""
    in_batches = mock.patch.object(runner._Executor, "_run_posted", runner._Executor._run_in_batches)  # as on a device
    in_turn = mock.patch.object(passes.StageRunner, "boundary", _boundary_of_a_device)
    with PLANTED[plant](), in_batches, in_turn, in_order(folder, rank=rank):
        parts = build(rank, cache, way, ordered=plant != "one group")
        losses = [train_step(parts, batches_of(parts, way), step=step, lr=3e-3).loss for step in range(2)]
        return [*losses, eval_loss(parts, batches_of(parts, way))[0]]


_boundary = passes.StageRunner.boundary


def _boundary_of_a_device(self: Any, *args: Any, program: str = "train") -> Any:
    return dataclasses.replace(_boundary(self, *args, program=program), in_turn=program not in self.done)


def posted(folder: Path) -> dict[str, list[str]]:
    """Ids of collectives on each communicator."""
    found = defaultdict(list)
    for path in folder.glob("order-*"):
        for line in path.read_text().splitlines():
            name, _, op_id = line.split(" ", 2)
            found[name].append(op_id)
    return found


def _of_a_pass(op_id: str) -> bool:
    return op_id.startswith("[mb")


class _Early:
    """Gradients leave as soon as they are complete, whatever others do."""

    def __enter__(self) -> None:
        self._before = passes._some_are_empty
        passes._some_are_empty = lambda infos, groups: False

    def __exit__(self, *_: object) -> None:
        passes._some_are_empty = self._before


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


PLANTED: dict[str, Callable[[], Any]] = {"nothing": _Nothing, "early": _Early, "one group": _Early}


@pytest.mark.parametrize("name", WAYS)
def test_every_communicator_sees_one_order(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    losses = run_ranks(way.world, steps, way, tmp_path, "nothing")
    assert len({tuple(found) for found in losses}) == 1
    assert crossed(tmp_path) == []
    assert [name for name, ids in posted(tmp_path).items() if 0 < sum(map(_of_a_pass, ids)) < len(ids)] == []
    assert stuck(tmp_path) == []


def losses_of(rank: int, cache: GroupCache, way: Way, ordered: bool) -> list[float]:
    parts = build(rank, cache, way, ordered=ordered)
    return [train_step(parts, batches_of(parts, way), step=step, lr=3e-3).loss for step in range(2)]


def test_sharded_gradients_of_unequal_shares_end_on_a_cpu_too() -> None:
    """Within a pass a rank waits for the reduction before the last one, and the rank with an empty micro-batch has started none yet."""
    way = WAYS["sharded gradients"]
    assert run_ranks(4, losses_of, way, False) == run_ranks(4, losses_of, way, True)


def test_one_communicator_for_all_is_found(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        run_ranks(4, steps, WAYS["ep"], tmp_path, "one group")
    wrong = [cause for cause in failed.value.causes.values() if isinstance(cause, OrderError)]
    assert wrong and "gradient/" in str(wrong[0]) and "all_to_all" in str(wrong[0])


def test_gradients_that_leave_between_exchanges_of_some_are_found(tmp_path: Path) -> None:
    run_ranks(4, steps, WAYS["ep"], tmp_path, "early")
    assert any("gradient/" in text and "all_to_all" in text for text in crossed(tmp_path))


def groups_made(rank: int, cache: GroupCache, folding: Folding, in_order: bool) -> int:
    """How many communicators a rank of a run makes."""
    own = GroupCache()
    build_groups(folding, rank=rank, cache=own, in_order=in_order)
    return len(own)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_says_how_many_communicators_there_are(device: str) -> None:
    folding = make_folding(world=4, tp=2, pp=2, ep=2)
    (made,) = set(run_ranks(4, groups_made, folding, device == "cuda"))
    assert describe_groups(folding, device) == [f"groups       {made} process groups of more than one rank"]


ALL_TO_ALL = {"op": "all_to_all", "id": "b", "what": "float32 rows of (2)"}
SUM = {"op": "all_reduce", "id": "a", "what": "4 float32 SUM"}
PAIRS: dict[str, tuple[Entry, Entry, str]] = {
    "operation": (SUM, {**SUM, "op": "all_gather"}, "rank 1 posted all_gather of 4 float32 SUM [a], rank 0 posted all_reduce of 4 float32 SUM [a]"),
    "shape": (SUM, {**SUM, "what": "6 float32 SUM"}, "rank 1 posted all_reduce of 6 float32 SUM [a], rank 0 posted all_reduce of 4 float32 SUM [a]"),
    "dtype": (SUM, {**SUM, "what": "4 float64 SUM"}, "rank 1 posted all_reduce of 4 float64 SUM [a], rank 0 posted all_reduce of 4 float32 SUM [a]"),
    "sizes": (
        {**ALL_TO_ALL, "at": 0, "sends": [1, 2], "takes": [1, 1]},
        {**ALL_TO_ALL, "at": 1, "sends": [1, 1], "takes": [1, 1]},
        "sends [1, 1], takes [1, 1] [b], rank 0 posted all_to_all of float32 rows of (2), sends [1, 2], takes [1, 1] [b]",
    ),
    "message": (
        {"op": "messages", "id": "c", "ends": [("send", 1, "4 float32")]},
        {"op": "messages", "id": "d", "ends": [("receive", 0, "8 float32")]},
        "rank 1 posted its receive of 8 float32 [d] after 0 collectives, rank 0 posted its send of 4 float32 [c] after 0 collectives",
    ),
}  # fmt: skip


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Orders, Orders]:
    """A communicator of two ranks, both in this process."""
    monkeypatch.setattr(in_order_module, "dist", SimpleNamespace(get_process_group_ranks=lambda group: [0, 1]))
    return SimpleNamespace(group_name="g"), Orders(tmp_path, 0), Orders(tmp_path, 1)


@pytest.mark.unit
@pytest.mark.parametrize("kind", PAIRS)
def test_what_does_not_belong_together_is_told_by_both_sides(kind: str, two: tuple[Any, Orders, Orders]) -> None:
    group, first, second = two
    for orders in (first, second):
        orders.post(group, SUM if kind != "message" else {**SUM, "op": "messages", "ends": []})  # these fit
    first.post(group, PAIRS[kind][0])
    with pytest.raises(OrderError, match=re.escape(PAIRS[kind][2])):
        second.post(group, PAIRS[kind][1])


@pytest.mark.unit
def test_ranks_that_wait_for_each_other_are_found(two: tuple[Any, Orders, Orders], tmp_path: Path) -> None:
    """Both send what is equal, but each before it receives: on one communicator nobody comes to the end."""
    group, *both = two
    for orders in both:
        for way in ("send", "receive"):
            orders.post(group, {"op": "messages", "id": way, "ends": [(way, 1 - orders.rank, "4 float32")]})
    assert [text.split("rank ")[1] for text in stuck(tmp_path)] == [
        "0 waits in messages [send]",
        "1 waits in messages [send]",
    ]
