"""An elastic run: what moves (plans), what is refused, and whole runs in which ranks are killed at chosen moments."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trace import problems_of
from train_help import Running, phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import RunError
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.model.model import resolve_model
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.recipe import recovery_problems
from phalanx.plan.recovery.state_descriptor import Fact, StateDescriptor
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import equal_hosts
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.placement.state_transfer import compare


def planner(*, ep: int = 2, floor: int = 2) -> RecoveryPlanner:
    spec = resolve_model(ModelConfig(preset="tiny"), RouterConfig(bias_rate=1e-2))
    return RecoveryPlanner(spec=spec, base=Folding(world=4, ep=ep), seq_len=32, floor=floor)


def member(run: RecoveryPlanner, uid: int, at: tuple[int, int] | None) -> Fact:
    """A member whose state is that of rank `at[1]` of the mapping on `at[0]` ranks."""
    descriptor = None if at is None else StateDescriptor(folding=run.folding(at[0]), rank=at[1])
    return Fact(uid=f"local.{uid}.x", machine="local", descriptor=descriptor)


def plan_for(run: RecoveryPlanner, *places: tuple[int, int] | None) -> GenerationPlan:
    return run.plan([member(run, uid, at) for uid, at in enumerate(places)])


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_mapping_follows_the_members_and_keeps_every_expert_at_two() -> None:
    run = planner()
    assert [run.folding(n).ep for n in range(1, 9)] == [1, 1, 1, 2, 1, 2, 1, 2]
    assert all(run.folding(n).edp >= min(2, n) for n in range(1, 33))


@pytest.mark.parametrize("seed", range(12))
def test_any_one_may_be_missing_whatever_generations_the_others_come_from(seed: int) -> None:
    """With f = 2 the loss of one member of a generation leaves everything; the moves pass the checker of all reshard plans."""
    rng, run = random.Random(seed), planner()
    size = rng.randint(3, 6)
    places: list[tuple[int, int] | None] = [(size, rank) for rank in range(size)]
    places.pop(rng.randrange(size))
    places += [None] * rng.randint(0, 2)
    rng.shuffle(places)
    plan = plan_for(run, *places)
    assert plan.missing == () and plan.idle == ()
    for moves in (plan.params, plan.buffers):
        plan_reshard(moves, equal_hosts([0] * len(places))).check()


def test_members_of_different_generations_are_sources_together() -> None:
    """One has entered a generation of three, the others still have what they held in one of four."""
    plan = plan_for(planner(), (3, 1), (4, 1), None)
    assert plan.missing == ()
    assert {move.src.ranks for move in plan.params} == {
        tuple(sorted(i for i, f in enumerate(plan.members) if f.descriptor is not None))
    }
    plan_reshard(plan.params, equal_hosts([0] * 3)).check()


def test_what_nobody_holds_is_named() -> None:
    plan = plan_for(planner(), (4, 0), (4, 2), None)
    assert plan.missing and all(".experts." in name for name in plan.missing)
    assert "no member holds all of layers.0.moe.experts" in plan.explain()
    nothing = plan_for(planner(), None, None)
    assert set(nothing.missing) == {m.name for m in (*nothing.params, *nothing.buffers)}


def test_experts_of_a_single_holder_are_refused() -> None:
    (problem,) = recovery_problems(Folding(world=4, ep=4), f=2)
    assert problem.where == "folding.ep" and "folding.ep = 2" in problem.hint
    assert recovery_problems(Folding(world=4, ep=2), f=2) == []


def test_holders_that_differ_are_found() -> None:
    assert compare([{"a": 1, "b": 2}, {"a": 1}]) == 2
    with pytest.raises(RunError, match="different values of a, and it cannot be decided"):
        compare([{"a": 1, "b": 2}, {"a": 3}])


def test_what_cannot_recover_is_refused_by_name(tmp_path: Path) -> None:
    found = phalanx(
        "train",
        *train_args(
            tmp_path, resilience__heal="true", resilience__expert_state="sharded", resilience__slots_per_rank=8
        ),
        "--dry-run",
    )
    assert found.returncode == 2
    for words in ("resilience.mode = 'off'", "resilience.expert_state = 'sharded'"):
        assert words in found.stderr


# ---- whole runs ------------------------------------------------------------------------------------------------------

RANKS, STEPS = 4, 14
SETTINGS = {
    "resilience__heal": "true", "resilience__mode": "exact", "optim__zero": "0", "launch__threads": "1", "folding__ep": "2",
    "launch__ranks": str(RANKS), "train__steps": str(STEPS), "train__global_batch": "14", "checkpoint__interval": "4",
    "router__bias_rate": "0.01", "checkpoint__asynchronous": "false",
}  # fmt: skip
ROW_S = 1e6
"""Of a row of an expert, in tests of moves: then moving pays wherever it helps, on a machine and at a moment however slow."""
Faults = dict[str, tuple[tuple[int, ...], int]]
"""Phase -> slots that are killed in it, at the first step from this one on at which all ranks take part."""
AT_REST = {"parameters": "flat", "moments": "exp_avg"}
"""Phases in which nobody is killed, but one bit flips in what a rank keeps, which has to end it."""


def _command(args: list[str], folder: str, faults: Faults) -> int:
    """Body of a process: `phalanx ARGS...`, whose workers kill themselves where `faults` says so."""
    _plant(faults, folder, ranks=int(args[args.index("--launch.ranks") + 1]))
    return main(args)


def _plant(faults: Faults, folder: str, *, ranks: int) -> None:
    """Wrap what a worker does in each phase. A byte of shared memory for each victim says that it has died already."""
    from phalanx.models.moe import MoE
    from phalanx.runtime.comm.collectives import Collectives
    from phalanx.runtime.state.gradients import GradientBuffers
    from phalanx.train import loop
    from phalanx.train.placement import incoming as coming, rebalancer as replacing
    from phalanx.train.recovery import elastic, run as elastic_run

    victims = [(phase, slot) for phase, (slots, _) in faults.items() if phase != "corruption" for slot in slots]
    done, here = mmap.mmap(-1, len(victims) + 1), {"slot": -1, "step": -1, "size": 0}

    pids, announced = mmap.mmap(-1, 4 * ranks), mmap.mmap(-1, 100)  # on a slow machine some come more than once

    def is_due(phase: str) -> bool:
        key = (phase, here["slot"])
        began = key in victims and here["size"] == ranks and here["step"] >= faults[phase][1]
        return began and not done[victims.index(key)]

    def note(phase: str, slot: int) -> None:
        done[victims.index((phase, slot))] = 1
        Path(folder, f"killed-{phase}-{slot}").touch()

    def maybe_die(phase: str) -> None:
        if is_due(phase):
            slots = faults[phase][0]
            for slot in sorted(slots, key=lambda slot: slot == here["slot"]):  # all at once, itself last
                note(phase, slot)
                os.kill(struct.unpack_from("i", pids, 4 * slot)[0], signal.SIGKILL)

    def before(owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **words: Any) -> Any:
            maybe_die(phase)
            return inner(*args, **words)

        setattr(owner, name, outer)

    before(MoE, "forward", "forward")
    before(GradientBuffers, "reduce", "reduction")
    before(loop, "commit_step", "commit")
    before(CheckpointManager, "_write_tensors", "checkpoint")
    before(elastic, "take_state", "migration")
    before(replacing, "_move_experts", "moving")
    before(coming.IncomingExperts, "_bring", "beside")
    before(coming.IncomingExperts, "update", "update")
    if faults.keys() & {"moving", "beside", "staged", "update"}:
        replacing.seconds_of_a_row = lambda parts: ROW_S
    reduce_step, enter, compute, work = (
        loop.reduce_step,
        elastic.ElasticMember.enter,
        elastic.ElasticMember.compute,
        elastic_run.work,
    )

    exchange, publish = Collectives.start_exchange, loop.publish

    def publishing(parts: Any) -> None:
        sent = [  # families whose parameters not every rank has rounded itself
            f"publish/{key}"
            for key, family in parts.state.families.items()
            if len(family.layout.copies) + 1 < family.layout.num_shards
        ]
        here["publishing"] = sent[-1:]
        publish(parts)
        here["publishing"] = []

    def exchanging(self: Any, *args: Any, op_id: str = "", **words: Any) -> Any:
        if op_id in here.get("publishing", ()):  # parameters of the other families are there already
            maybe_die("publish")
        return exchange(self, *args, op_id=op_id, **words)

    complete = coming.IncomingExperts.complete

    def then_staged(*args: Any) -> None:
        complete(*args)
        maybe_die("staged")

    coming.IncomingExperts.complete = then_staged  # type: ignore[method-assign]

    def then_vote(*args: Any, **words: Any) -> Any:
        found = reduce_step(*args, **words)
        maybe_die("vote")
        return found

    def entering(self: Any, team: Any, resolution: Any) -> None:
        here.update(size=team.size, step=self.step)
        enter(self, team, resolution)

    def computing(self: Any) -> None:
        here["step"] = self.step
        deaths = sum(done[: len(victims)])
        if here["size"] < ranks and deaths:  # let the new process come before too many steps are done
            end_s = time.monotonic() + 15
            while sum(announced[:]) < ranks + deaths and time.monotonic() < end_s:
                time.sleep(0.02)
            time.sleep(0.4)
        if faults.get("corruption", ((), 0)) == ((here["slot"],), self.step) and not Path(folder, "corrupted").exists():
            Path(folder, "corrupted").touch()
            flip_a_bit(self.trainer.parts.state)
        for phase, kind in AT_REST.items():
            if is_due(phase):
                note(phase, here["slot"])
                flip_a_bit(self.trainer.parts.state, kind=kind)
        compute(self)

    def working(run: Any, agent: Any, **words: Any) -> int:
        here["slot"] = int(agent.uid.split(".")[1])
        struct.pack_into("i", pids, 4 * here["slot"], os.getpid())
        announce = agent.announce

        def announcing(**words: Any) -> None:
            announce(**words)
            announced[next(i for i, said in enumerate(announced[:]) if not said)] = 1

        agent.announce = announcing
        return work(run, agent, **words)

    loop.reduce_step, loop.publish = then_vote, publishing
    Collectives.start_exchange = exchanging  # type: ignore[method-assign]
    elastic.ElasticMember.enter, elastic.ElasticMember.compute = entering, computing  # type: ignore[method-assign]
    elastic_run.work = working


def flip_a_bit(state: Any, *, kind: str = "master") -> None:
    """Of one number of `kind` that every member holds."""
    family = next(f for name, f in state.families.items() if name.startswith("dense"))
    getattr(family, kind).view(torch.int32)[7] ^= 1 << 20


def train(
    base: Path,
    name: str,
    faults: Faults,
    *,
    code: int = 0,
    body: Callable[[list[str], str, Faults], int] = _command,
    **changes: str | None,
) -> set[str]:
    """Run to the end; the phases in which all victims were killed."""
    args = ["train", *train_args(base, **{**SETTINGS, "run__name": name, **changes})]
    folder = base / f"printed-{name}"
    running = Running(body, args, str(folder), faults, folder=folder)
    try:
        out, err = running.communicate(360)
    finally:
        running.kill()
    assert running.returncode == code, f"{out}\n{err}"
    return {
        phase
        for phase, (slots, _) in faults.items()
        if all((folder / (f"killed-{phase}-{s}" if phase != "corruption" else "corrupted")).exists() for s in slots)
    }


def events(base: Path, name: str, kind: str) -> list[dict[str, Any]]:
    found = []
    for slot in range(RANKS):
        path = base / "runs" / name / "events" / f"rank-{slot}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found += [{**json.loads(line), "slot": slot} for line in lines if f'"kind":"{kind}"' in line]
    return found


def losses(base: Path, name: str) -> dict[int, set[tuple[float, float]]]:
    """(loss, norm) of each step, from all who told."""
    found: dict[int, set[tuple[float, float]]] = {}
    for event in events(base, name, "StepEnded"):
        found.setdefault(event["step"], set()).add((event["loss"], event["grad_norm"]))
    return found


def state_at_the_end(base: Path, name: str, *, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from phalanx.plan.layout.parameters import Box

    manager = CheckpointManager(base / "runs" / name / "checkpoints")
    step = manager.choose()
    assert step == steps
    found = dcp.FileSystemReader(manager.folder.of(step)).read_metadata().state_dict_metadata
    boxes = []
    for key, meta in found.items():
        assert isinstance(meta, TensorStorageMetadata)
        shape = tuple(meta.size)
        boxes.append(
            BoxTensor(key, shape, Box((0,) * len(shape), shape), torch.empty(shape, dtype=meta.properties.dtype), True)
        )
    manager.load(boxes, step=step)
    return {box.name: box.tensor for box in boxes}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and the undisturbed run `calm`: one for all files of tests that compare with it."""
    folder = tmp_path_factory.getbasetemp() / "heal"
    if not (folder / "calm-ended").exists():
        write_text(folder / "text")
        train(folder, "calm", {})
        (folder / "calm-ended").touch()
    return folder


def check_equal(base: Path, name: str, *, to: str = "calm", steps: int = STEPS) -> None:
    """The bits of the undisturbed run: every loss and norm, whoever told of it, and the state at the end."""
    calm, hurt = losses(base, to), losses(base, name)
    assert set(calm) == set(range(1, steps + 1)) and all(len(told) == 1 for told in calm.values())
    assert hurt == calm
    wanted, found = (state_at_the_end(base, run, steps=steps) for run in (to, name))
    assert wanted.keys() == found.keys()
    assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == []


@pytest.mark.ranks
def test_ranks_killed_in_every_phase_change_no_bit(base: Path) -> None:
    faults: Faults = {
        "forward": ((1,), 1),
        "reduction": ((2,), 2),
        "vote": ((0,), 3),
        "checkpoint": ((3,), 4),
        "commit": ((1,), 5),
        "migration": ((2,), 6),
    }
    assert train(base, "hurt", faults, checkpoint__asynchronous="true") == set(faults)
    check_equal(base, "hurt")
    formed = events(base, "hurt", "TeamFormed")
    assert {e["members"] for e in formed} == {3, 4}
    assert sum(e["moved_bytes"] for e in formed) > 0 and all(e["checked"] for e in formed if e["generation"] > 1)
    assert events(base, "hurt", "TrainingResumed")
    assert not any("goes back" in e["text"] for e in events(base, "hurt", "Note"))
    check_samples(base, "hurt")


@pytest.mark.slow
@pytest.mark.ranks
def test_moments_in_bf16_are_carried_over_as_they_are(base: Path) -> None:
    how = {"optim__state_dtype": "bfloat16", "optim__zero": "1"}
    faults: Faults = {"reduction": ((2,), 2), "commit": ((1,), 5), "migration": ((2,), 6)}
    assert train(base, "narrow", {}, **how) == set()
    assert train(base, "narrow-hurt", faults, **how) == set(faults)
    check_equal(base, "narrow-hurt", to="narrow")
    kinds = {name.split("/")[0]: x.dtype for name, x in state_at_the_end(base, "narrow").items()}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == torch.bfloat16 and kinds["master"] == torch.float32


def check_samples(base: Path, name: str) -> None:
    """No window twice in a step; none missing but those whose rank died before it could tell. (That all were computed is what equal bits say.)"""
    told: dict[int, Counter[int]] = {}
    for event in events(base, name, "SamplesTaken"):
        told.setdefault(event["step"], Counter()).update(event["windows"])
    wanted: dict[int, Counter[int]] = {}
    for event in events(base, "calm", "SamplesTaken"):
        wanted.setdefault(event["step"], Counter()).update(event["windows"])
    for step, windows in wanted.items():
        assert not told[step] - windows, f"step {step}"
    assert (
        sum(told[step] != windows for step, windows in wanted.items()) <= 1
    )  # the one killed between decision and telling


@pytest.mark.ranks
def test_a_rank_whose_state_has_a_flipped_bit_ends_by_itself_and_is_replaced(tmp_path: Path) -> None:
    """Found in a parameter before the step that read it counts, in a moment when the commit reads it."""
    write_text(tmp_path / "text")
    few = {"resilience__check": "sums", "launch__ranks": "3", "folding__ep": "1", "train__steps": "9"}
    few |= {"train__global_batch": "6", "checkpoint__interval": "0", "checkpoint__asynchronous": None}
    train(tmp_path, "calm", {}, **few)
    faults: Faults = {"parameters": ((1,), 1), "moments": ((2,), 3)}
    assert train(tmp_path, "flipped", faults, **few) == set(faults)
    check_equal(tmp_path, "flipped", steps=9)
    check_samples(tmp_path, "flipped")
    ended = {(e["slot"], e["reason"].split(":")[0]): e["reason"] for e in events(tmp_path, "flipped", "RunEnded")}
    assert "rank 1: parameters of dense" in ended[1, "UnsoundError"]
    assert "exp_avg of dense" in ended[2, "UnsoundError"]
    assert {slot for slot, word in ended if word == "UnsoundError"} == {1, 2}
    assert {e["members"] for e in events(tmp_path, "flipped", "TeamFormed")} == {2, 3}  # the second needs all three


@pytest.mark.ranks
def test_a_run_that_is_not_elastic_has_the_same_bits(base: Path) -> None:
    """Exact mode on two ranks with sharded state: elastic recovery costs bits neither where nobody dies."""
    train(base, "plain", {}, resilience__heal=None, optim__zero="1", launch__ranks="2", folding__ep=None)
    check_equal(base, "plain")


@pytest.mark.core
@pytest.mark.ranks
def test_a_step_that_is_not_finite_ends_the_run_once(tmp_path: Path) -> None:
    """New processes would find the same, so none is started."""
    base = tmp_path
    write_text(base / "text")
    train(base, "nan", {}, code=2, optim__lr="1e12", optim__warmup_steps="0", train__steps="6")
    assert "the gradient is not finite" in (base / "printed-nan" / "err").read_text()
    assert len(events(base, "nan", "RunStarted")) == RANKS


def _count_lanes(args: list[str], folder: str, faults: Faults) -> int:
    """Body of a process as `_command`: each worker notes with how many lanes and threads it enters a generation, after a step of the last one."""
    from phalanx.train.recovery import elastic

    adopt = elastic.ElasticMember._adopt

    def noting(self: Any, trainer: Any, *args: Any, **words: Any) -> None:
        adopt(self, trainer, *args, **words)
        lanes = trainer.parts.lanes
        lanes.run(lambda item, lane: None, range(2))
        threads = sum(t.name.startswith("lane-") for t in threading.enumerate())
        with Path(folder, "lanes").open("a") as file:
            file.write(f"{trainer.recorder.generation} {lanes.count} {threads}\n")

    elastic.ElasticMember._adopt = noting  # type: ignore[method-assign]
    return _command(args, folder, faults)


@pytest.mark.ranks
def test_compute_threads_outlive_a_generation(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    few = {
        "resilience__mode": "fast",
        "launch__ranks": "2",
        "folding__ep": "1",
        "train__steps": "4",
        "launch__threads": "2",
    }
    two = {"train__global_batch": "4", "checkpoint__interval": "0", "checkpoint__asynchronous": None}
    assert train(tmp_path, "lanes", {"reduction": ((1,), 2)}, body=_count_lanes, **few, **two) == {"reduction"}
    noted = [line.split() for line in (tmp_path / "printed-lanes" / "lanes").read_text().splitlines()]
    assert {generation for generation, *_ in noted} >= {"1", "2"}
    assert {tuple(rest) for _, *rest in noted} == {("2", "1")}, noted


@pytest.mark.ranks
def test_fast_mode_recovers_within_rounding(base: Path) -> None:
    few = {"resilience__mode": "fast", "launch__ranks": "3", "folding__ep": None, "train__steps": "6"}
    train(base, "fast-calm", {}, **few)
    assert train(base, "fast", {"reduction": ((1,), 2)}, **few, observe__trace_steps="[2, 4]") == {"reduction"}
    calm, hurt = losses(base, "fast-calm"), losses(base, "fast")
    check_trace(base / "runs" / "fast")
    assert set(hurt) == set(calm) == set(range(1, 7))
    for step, told in hurt.items():
        (wanted,) = calm[step]
        assert all(abs(loss - wanted[0]) <= 1e-5 * wanted[0] for loss, _ in told)


def check_trace(run: Path) -> None:
    """Lanes of several generations: the attempt that broke, and its repetition by those that were left."""
    assert main(["trace", str(run)]) == 0
    trace = json.loads((run / "trace.json").read_text())
    assert problems_of(trace) == []
    drawn = [(e["pid"], e["name"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    (broken,) = {name for _, name, _ in drawn if name.endswith("given up")}
    step = broken.removesuffix(", given up")
    again = {args["generation"] for _, name, args in drawn if name == step}
    before = {args["generation"] for _, name, args in drawn if name == broken}
    assert len(again) == len(before) == 1 and min(again) > max(before)
    names = {(pid, name) for pid, name, _ in drawn}
    survivors = {pid for pid, name in names if name == broken}
    assert survivors and all(
        {(pid, "decision"), (pid, "move state"), (pid, "first step")} <= names for pid in survivors
    )
    assert {name for _, name in names if name.startswith("step ")} >= {"step 2", "step 3", "step 4"}


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", [pytest.param("fine", marks=pytest.mark.slow), "auto"])
def test_overlapped_layers_recover(base: Path, overlap: str) -> None:
    """7 micro-batches on 4 ranks: in the last round one takes part in the others' messages without a token."""
    few = {"resilience__mode": "fast", "train__steps": "6", "train__micro_batch": "2"}
    if not (base / "runs" / "serial-calm").exists():
        train(base, "serial-calm", {}, **few)
    faults: Faults = {"forward": ((1,), 2), "reduction": ((2,), 4)}
    assert train(base, overlap, faults, **few, dispatch__overlap=overlap) == set(faults)
    calm, hurt = losses(base, "serial-calm"), losses(base, overlap)
    assert set(hurt) == set(calm) == set(range(1, 7))
    for step, told in hurt.items():
        (wanted,) = calm[step]
        assert all(abs(loss - wanted[0]) <= 1e-5 * wanted[0] for loss, _ in told)


@pytest.mark.ranks
def test_last_copy_lost_goes_back_to_the_checkpoint_and_says_so(base: Path) -> None:
    assert train(base, "back", {"reduction": ((1, 2, 3), 6)}) == {"reduction"}
    check_equal(base, "back")
    notes = {e["text"] for e in events(base, "back", "Note")}
    assert any("goes back to the checkpoint of step 4, 2 steps before" in text for text in notes), notes
