"""Experts that move while training runs: skew that shifts is followed, no bit changes in exact mode, and whoever is lost in between changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from exact_help import SEQ, SEQUENCES, Run, _box, shares
from test_elastic import ROW_S, Faults, check_equal, events, train
from test_trace import problems_of
from tiers import some
from train_help import phalanx, train_args, write_text

from phalanx.cli.predicting.against import compare_with_run
from phalanx.core.config import FoldingConfig, OptimConfig, Recipe, ResilienceConfig, TrainConfig
from phalanx.core.errors import ConfigError
from phalanx.core.events import Event, ExpertsMoved
from phalanx.core.recipe import load_recipe
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.models import router
from phalanx.models.moe import MoE
from phalanx.observe.event_log import read_events
from phalanx.observe.recorded.lanes import read_recording
from phalanx.observe.recorded.trace import perfetto_trace
from phalanx.observe.sinks import Sinks
from phalanx.plan.layout.state import STATE_KINDS
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.pipeline.run import plain_pipeline
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.peers import Peers, own_group
from phalanx.runtime.processes.world import WorldInfo
from phalanx.train.build import make_parts
from phalanx.train.placement import rebalancer as replacing
from phalanx.train.placement.expert_figures import placement_in_use
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.setup.machine import MemoryMeter
from phalanx.train.setup.rank import Rank
from phalanx.train.setup.run_folder import RunFolder
from phalanx.train.step.transaction import StepParts, commit_step, publish, reduce_step
from phalanx.train.step_hook import NOWHERE
from phalanx.verify.replicas import not_alike
from ranks import RankError, run_ranks

WORLD, SHIFT, INTERVAL, STEPS = 4, 6, 3, 12
ROUTER = {"force": "imbalanced", "force_skew": 1.5, "z_loss": 1e-3}
"""Drawn for the first `SHIFT` steps, and again for the others."""


@dataclass(frozen=True)
class Way:
    mode: str = "exact"
    interval: int = INTERVAL
    pp: int = 1
    zero: int = 1
    moments: str = "float32"
    row_s: float = ROW_S
    beside: bool = True
    threads: int = 1

    @property
    def run(self) -> Run:
        return Run(mode=self.mode, router=ROUTER, steps=STEPS, chunk_rows=4 if self.mode == "exact" else None)

    @property
    def recipe(self) -> Recipe:
        run = self.run
        return replace(
            Recipe(),
            folding=FoldingConfig(pp=self.pp),
            optim=OptimConfig(zero=self.zero, state_dtype=self.moments),
            train=TrainConfig(
                micro_batch=SEQUENCES, global_batch=SEQUENCES * run.samples, seq_len=SEQ, dtype="float32"
            ),
            resilience=ResilienceConfig(
                mode=self.mode,
                slots_per_rank=5,
                chunk_rows=run.chunk_rows,
                replace_interval=self.interval,
                move_beside=self.beside,
            ),
        )


def advance(rank: int, cache: GroupCache, way: Way, faults: Sequence[str] = ()) -> dict[str, Any]:
    """Steps, with what the trainer does between them."""
    recipe, spec, told = way.recipe, way.run.spec, list[Event]()
    folding = make_folding(world=WORLD, ep=WORLD // way.pp, pp=way.pp)
    me = Rank(
        recipe=recipe, info=WorldInfo(rank=rank, world=WORLD, local_rank=rank, local_world=WORLD), device=torch.device("cpu"),
        peers=Peers(own_group(WORLD, timeout_s=240)), cache=cache, folder=RunFolder("."), sinks=told.append,  # type: ignore[arg-type]
        memory=MemoryMeter(torch.device("cpu")), lanes=Lanes(way.threads), lock=None,
    )  # fmt: skip
    with ExitStack() as stack:
        drawn = router.forced_experts
        stack.enter_context(
            mock.patch.object(router, "forced_experts", lambda *a, step, **w: drawn(*a, step=step // SHIFT, **w))
        )
        stack.enter_context(mock.patch.object(replacing, "seconds_of_a_row", lambda parts: way.row_s))
        for fault in faults:
            stack.enter_context(FAULTS[fault](rank))
        parts = make_parts(me, spec, folding, plain_pipeline(spec, pp=way.pp), warm=False)
        watcher, steps, busiest = Rebalancer(recipe, spec), [], []
        for step in range(STEPS):
            if (new := watcher.between(parts, me, step=step)) is not None:
                parts.buffers.close()
                parts = new.parts
                told.append(new.event)
            rows = heard(parts)
            reduced = reduce_step(parts, shares(parts, way.run, step), step=step, lr=3e-3)
            watcher.reduced(parts, reduced)
            result = commit_step(parts, reduced)
            watcher.applied(parts, reduced)
            publish(parts)
            watcher.committed(result.counts_LE)
            steps.append((result.loss, result.grad_norm))
            busiest.append(sum(r.max() for r in rows) / max(1e-9, sum(r.mean() for r in rows)))
        boxes = [_box(box) for box in parts.state.boxes() if box.primary]
        fewest = min(
            len(p.holders(e)) for p in placement_in_use(parts).layers.values() for e in range(spec.num_experts)
        )
    moves = [e for e in told if isinstance(e, ExpertsMoved)]
    return {
        "steps": steps,
        "busiest": busiest,
        "moves": moves,
        "boxes": boxes,
        "wrong": not_alike(parts),
        "holders": fewest,
    }


def heard(parts: StepParts) -> list[np.ndarray]:
    """Rows of each ep rank in every dispatch from now on."""
    found: list[np.ndarray] = []
    for module in parts.model.modules():
        if isinstance(module, MoE):
            module.routed.dispatcher.listen = lambda plan, counts: found.append(
                plan.rows_PG.sum(0).reshape(plan.ep, -1).sum(1)
            )
    return found


def state(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for found in results:
        for name, shape, at, tensor in found["boxes"]:
            whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[at] = tensor
    return whole


@cache
def ran(way: Way, *faults: str) -> list[dict[str, Any]]:
    return run_ranks(WORLD, advance, way, faults, timeout_s=400)


def compared(way: Way) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return ran(way), ran(replace(way, interval=0, beside=True))


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize(
    "way",
    [
        *some((Way(), Way(beside=False), Way(moments="bfloat16"), Way(moments="bfloat16", beside=False)), 1),
        pytest.param(Way(pp=2, zero=0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_follow_the_load_and_no_bit_changes(way: Way) -> None:
    moved, calm = compared(way)
    assert all(found["steps"] == calm[0]["steps"] for found in (*moved, *calm))
    wanted, found = state(calm), state(moved)
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[k], found[k]) for k in wanted)
    assert all(not r["wrong"] and r["holders"] >= 2 // way.pp for r in moved)  # two ranks a stage have 10 slots
    check_moves(way, moved, calm)


def check_moves(way: Way, moved: list[dict[str, Any]], calm: list[dict[str, Any]]) -> None:
    """Decisions to move after steps 3 and 9 (the first after each draw that has seen it), none at 6; what was predicted came. Beside a step experts are where they are to be one step
    later, and what they hold has come beside it but for the gradients."""
    (first, second), late = moved[0]["moves"], int(way.beside)
    assert (first.step, second.step) == (INTERVAL + late, SHIFT + INTERVAL + late)
    assert not any(r["moves"] for r in calm)
    for event in (e for r in moved for e in r["moves"]):
        state, gradient = (8 if way.moments == "bfloat16" else 12), 4
        assert (
            event.beside_bytes * (state + gradient) == event.moved_bytes * state * late
            and (event.beside_s > 0) == way.beside
        )
    for event, steps in ((first, slice(first.step, SHIFT)), (second, slice(second.step, STEPS))):
        assert event.why == "balance" and event.experts > 0 and event.checked > 0
        assert event.after < event.before
        before, after = (np.mean(r[0]["busiest"][steps]) for r in (calm, moved))
        assert after < before
    assert any(e.moved_bytes for r in moved for e in r["moves"])


@pytest.mark.ranks
@pytest.mark.slow
def test_fast_mode_stays_within_rounding() -> None:
    moved, calm = compared(Way(mode="fast"))
    check_moves(Way(mode="fast"), moved, calm)
    for (loss, norm), (loss_2, norm_2) in zip(moved[0]["steps"], calm[0]["steps"], strict=True):
        assert abs(loss - loss_2) <= 1e-5 * loss_2 and abs(norm - norm_2) <= 1e-4 * norm_2


@pytest.mark.slow
@pytest.mark.ranks
def test_what_does_not_pay_stays() -> None:
    assert not any(r["moves"] for r in ran(Way(row_s=1e-15)))


def _moments_stay(rank: int) -> Any:
    """Moments do not travel with the experts."""
    return mock.patch.object(replacing.ShardedState, "KINDS", ("master",))


def _one_bit(rank: int) -> Any:
    """What one rank has got is not what was sent."""
    sound = replacing.Resharder.move

    def move(self: Any, what: Any, source: Any, *, out: Any, **more: Any) -> Any:
        found = sound(self, what, source, out=out, **more)
        if rank == 1:
            for view in [x for x in out if x is not None][:1]:
                view[tuple(slice(0, n) for n in view.shape)].view(-1)[0] += 1
        return found

    return mock.patch.object(replacing.Resharder, "move", move)


def _not_updated(rank: int) -> Any:
    """What came beside the step stays as it was before."""
    return mock.patch.object(replacing.IncomingExperts, "update", lambda self, *_: setattr(self, "is_updated", True))


def _another_gradient(rank: int) -> Any:
    """Experts that come are updated with gradients of others."""
    sound = replacing.IncomingExperts.complete

    def complete(self: Any, gradients: Any) -> None:
        sound(self, gradients)
        for gradient in self._gradients.values():
            gradient.copy_(gradient.roll(1, 0))

    return mock.patch.object(replacing.IncomingExperts, "complete", complete)


def _another_rate(rank: int) -> Any:
    """Experts that come are updated at another rate than where they are held."""
    sound = replacing.IncomingExperts.update
    return mock.patch.object(
        replacing.IncomingExperts, "update", lambda self, parts, step: sound(self, parts, replace(step, lr=2 * step.lr))
    )


def test_modules_that_are_built_again_keep_the_threads_of_the_process() -> None:
    """Torch has one thread of its own once lanes have started: counted again there would be one lane."""
    way, cpu = Way(mode="fast", threads=2), torch.device("cpu")
    recipe = replace(way.recipe, resilience=ResilienceConfig(mode="fast"))
    folding = make_folding(world=1)
    me = Rank(
        recipe=recipe, info=WorldInfo(rank=0, world=1), device=cpu, peers=Peers(), cache=GroupCache(), folder=RunFolder(Path()),
        sinks=Sinks([]), memory=MemoryMeter(cpu), lanes=Lanes(way.threads), lock=None,
    )  # fmt: skip
    parts = make_parts(me, way.run.spec, folding, plain_pipeline(way.run.spec, pp=1), warm=False)
    parts.lanes.run(lambda item, lane: None, range(4))
    before = threading.active_count()
    placement = plain_placement(way.run.spec.num_experts, folding)
    again = replacing._rebuilt(parts, me, way.run.spec, placement, where=NOWHERE)  # type: ignore[arg-type]
    again.lanes.run(lambda item, lane: None, range(4))
    try:
        assert again.lanes.count == 2 and threading.active_count() == before
    finally:
        again.lanes.close()


FAULTS = {
    "moments stay": _moments_stay, "one bit": _one_bit, "not updated": _not_updated, "another gradient": _another_gradient, "another rate": _another_rate,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
def test_moments_left_behind_show() -> None:
    assert ran(Way(beside=False), "moments stay")[0]["steps"] != ran(Way(interval=0))[0]["steps"]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["one bit", "not updated", "another gradient", "another rate"])
def test_a_copy_that_is_not_what_others_hold_is_found(fault: str) -> None:
    with pytest.raises(RankError, match="members hold different values of"):
        ran(Way(), fault)


@pytest.mark.ranks
def test_a_fixed_run_tells_where_its_replicas_are(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    settings = {"train__steps": "2", "launch__ranks": "2", "resilience__mode": "fast", "resilience__heal": "false"}
    done = phalanx("train", *train_args(tmp_path, **settings, resilience__slots_per_rank="6", folding__ep=None))
    assert done.returncode == 0, done.stderr
    (told,) = [e for e in read_events(tmp_path / "runs/run/events/rank-0.jsonl") if e["kind"] == "StatePlaced"]
    assert (told["step"], told["why"], told["folding"], told["slots_per_rank"]) == (0, "start", "dp2|ep2", 6)
    assert [layer for layers, _ in told["slots"] for layer in layers] == told["expert_layers"] == [0, 1]
    for _, slots in told["slots"]:
        assert [len(held) for held in slots] == [6, 6] and {e for held in slots for e in held} == set(range(8))


# ---- in an elastic run ----------------------------------------------------------------------------------------

ELASTIC = {
    "train__steps": "20", "train__global_batch": "10", "checkpoint__interval": "4", "resilience__slots_per_rank": "5", "folding__ep": None,
    "resilience__chunk_rows": "16", "router__force": "imbalanced", "router__force_skew": "1.5", "router__bias_rate": None,
}  # fmt: skip
"""Drawn anew in every step, so that each decision finds other loads."""


IN_ONE_GO = {"moving": ((1,), 2), "vote": ((0,), 4), "commit": ((2,), 6)}
"""One dies while state moves and all stand still: the others have what they had. One when the step is voted on that is the first in the new place: nobody has moved.
One when it is decided: all have."""
BESIDE = {"beside": ((1,), 2), "staged": ((0,), 4), "update": ((2,), 6)}
"""One dies while state is under way beside a step, one when all of it is there and the step is not voted on, one when it is decided and what came is not updated: what was staged is dropped."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run that never moves is."""
    base = tmp_path_factory.mktemp("moving")
    write_text(base / "text")
    train(base, "calm", {}, **ELASTIC, resilience__replace_interval="0")
    assert not events(base, "calm", "ExpertsMoved")
    return base


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "faults"), [("in-one-go", IN_ONE_GO), ("beside", BESIDE)])
def test_ranks_lost_while_experts_move_change_no_bit(base: Path, name: str, faults: Faults) -> None:
    beside = name == "beside"
    recorded = {"observe__trace_steps": f"1,{ELASTIC['train__steps']}", "resilience__replace_interval": "2"}
    if not beside:
        recorded["resilience__move_beside"] = "false"
    assert train(base, name, faults, **ELASTIC, **recorded) == set(faults)
    check_equal(base, name, to="calm", steps=int(ELASTIC["train__steps"]))
    moves = {e["step"]: e for e in events(base, name, "ExpertsMoved")}
    assert len(moves) >= 2 and all(e["after"] < e["before"] for e in moves.values())
    assert not any("goes back" in e["text"] for e in events(base, name, "Note"))
    placed = [e for e in events(base, name, "StatePlaced") if e["why"] != "members"]
    assert {(e["step"], e["why"]) for e in placed} == {(step, e["why"]) for step, e in moves.items()}
    assert len({str(e["slots"]) for e in placed}) == len(placed), "elsewhere than before"
    ids = {"replace/state", "replace/gradient"} if beside else {f"replace/{kind}" for kind in STATE_KINDS}
    check_recorded_moves(base / "runs" / name, ids=ids, moves={step - beside for step in moves})


def check_recorded_moves(run: Path, *, ids: set[str], moves: set[int]) -> None:
    """The recipe makes the plans of all moves again, and what ranks told is message by message and byte by byte what their programs say."""
    found = compare_with_run(run / "recipe.toml", run, "h100x4", [])
    assert found.steps is None and "resilience.mode" in found.why_not  # exact mode
    assert found.moves_left == () or not any(left.wrong for left in found.moves_left)
    assert {m.op_id for m in found.moves} == {"heal/state", *ids}
    for id in ids:
        assert {m.step for m in found.moves if m.op_id == id} >= moves
    for move in found.moves:
        assert move.other_bytes == () and move.sent_bytes[0] == move.sent_bytes[1]
        assert move.found.only_measured == move.found.only_predicted == ()
    assert {m.ranks for m in found.moves} == {3, 4}  # three that all hold everything have nothing to send one another
    for id in ("heal/state", *ids):
        assert any(m.messages for m in found.moves if m.op_id == id)
    trace = perfetto_trace(read_recording(run))
    assert problems_of(trace) == []
    assert {f"move {id}" for id in ("heal/state", *ids)} <= {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_when_a_run_decides() -> None:
    def steps(*, deterministic: bool = False, slots: int | None = 4, **resilience: Any) -> int:
        r = ResilienceConfig(**{"slots_per_rank": slots, "mode": "fast", **resilience})
        return Recipe(resilience=r, train=TrainConfig(deterministic=deterministic)).steps_between_placements()

    assert steps(slots=None) == 0 and steps() == 200
    assert steps(mode="off") == 0 and steps(mode="off", replace_interval=7) == 7
    assert steps(expert_state="sharded") == 0 and steps(deterministic=True) == 0
    assert steps(deterministic=True, mode="exact") == 200


@pytest.mark.unit
def test_how_experts_move_may_be_said_where_the_run_becomes_elastic_by_itself() -> None:
    slots, stands = "--resilience.slots_per_rank=4", "--resilience.move_beside=false"
    assert not load_recipe(None, [slots, stands]).resilience.move_beside
    with pytest.raises(ConfigError, match=r"resilience.move_beside = false: has no effect"):
        load_recipe(None, [slots, stands, "--resilience.heal=false"])
    with pytest.raises(ConfigError, match=r"replace_interval = 9: moves experts when measured times .*; use 0"):
        load_recipe(None, [slots, "--resilience.replace_interval=9", "--train.deterministic=true"])


@pytest.mark.unit
def test_experts_on_too_few_hosts_do_not_wait_for_a_step_and_even_loads_follow_soon() -> None:
    recipe = load_recipe(None, ["--resilience.slots_per_rank=4", "--resilience.replace_interval=20"])
    watcher, parts = Rebalancer(recipe, Way().run.spec), Any
    watcher._asked = SimpleNamespace(step=20, parts=parts, before={}, stages=[], costs=None)  # type: ignore[assignment]
    decided = SimpleNamespace(action="mend", migrations=())
    rank = SimpleNamespace(peers=SimpleNamespace(first=lambda work: decided))
    way = replacing._Way(where=NOWHERE, recorder=None, beside=True)
    with mock.patch.object(Rebalancer, "_carry_out", return_value="moved"):
        assert watcher._prepare(parts, rank, way, step=20) == "moved"  # type: ignore[arg-type, comparison-overlap]
    assert [step for step in range(20, 42) if watcher.due(step)] == [20, 22, 40]


@pytest.mark.unit
def test_what_cannot_move_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"resilience.replace_interval = 5.*no effect"):
        load_recipe(None, ["--resilience.replace_interval", "5"])
    with pytest.raises(ConfigError, match=r"resilience.replace_interval = 5: moves whole experts"):
        load_recipe(
            None,
            ["--resilience.replace_interval=5", "--resilience.slots_per_rank=4", "--resilience.expert_state=sharded"],
        )


@pytest.mark.unit
def test_loads_count_what_is_not_dropped() -> None:
    recipe = load_recipe(
        None,
        ["--resilience.slots_per_rank=4", "--resilience.replace_interval=4", "--model.preset=tiny", "--dispatch.policy=drop", "--dispatch.capacity_factor=1.5"],
    )  # fmt: skip
    watcher = Rebalancer(recipe, Way().run.spec)
    counts = np.array([[10, 0, 0, 0, 0, 0, 0, 30], [5] * 8])
    watcher.committed(counts)
    assert watcher.loads is not None and watcher.loads.tolist() == [[7.5, 0, 0, 0, 0, 0, 0, 7.5], [5] * 8]
    assert [watcher.due(step) for step in range(9)] == [step in (4, 8) for step in range(9)]
    watcher.formed(5)
    assert [step for step in range(13) if watcher.due(step)] == [4, 6, 8, 12]
