"""What an elastic run costs while nobody dies: steps of a plain run, of an elastic one in fast mode and of one in exact mode, in turn, on the same ranks.

All three are there at once, on the process groups of one team, and each round makes one step of each, in an order that changes from round to round: load of the
machine falls on all alike. The plain one is what `phalanx train` does without `resilience`; the elastic ones are the `ElasticMember` of `phalanx train`, with the
vote of each step at the membership service. A step begins when all ranks are ready and ends when the last one is through.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.config import (
    CheckpointConfig,
    DataConfig,
    FoldingConfig,
    LaunchConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    Recipe,
    ResilienceConfig,
    RunConfig,
    TrainConfig,
)
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.observe.sinks import open_sinks
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.peers import Peers
from phalanx.runtime.membership.member import resolve_now
from phalanx.runtime.membership.rendezvous import GroupEpoch
from phalanx.runtime.membership.supervisor import Supervisor, SupervisorSettings
from phalanx.runtime.membership.votes import MemberReport
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.runtime.processes.launch import StopRequest
from phalanx.runtime.processes.world import WorldInfo
from phalanx.train.build import make_loader, make_parts
from phalanx.train.loop import Trainer
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.recovery.elastic import ElasticMember, ElasticRun
from phalanx.train.recovery.run import prepare_run
from phalanx.train.reporting import RunProgress
from phalanx.train.setup.rank import Rank, resolve_pipeline
from phalanx.train.setup.run_folder import RunFolder

Mode = Literal["plain", "fast", "exact"]
MODES: tuple[Mode, ...] = ("plain", "fast", "exact")
ORDERS = tuple(itertools.permutations(MODES))
COLD = 3
"""Rounds that are not counted."""
RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class HealCostCase:
    """What is measured."""

    preset: str = "laptop"
    ranks: int = 4
    ep: int = 2
    zero: Literal[0, 1] = 1
    micro_batch: int = 8
    samples: int = 4
    """Micro-batches of a step."""
    seq_len: int = 256
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tokenizer: str = "byte"
    rounds: int = 20
    fast_bar: float = 1.05
    exact_bar: float = 1.6
    """Exit status 1 where a step takes more than so many times that of the plain run."""


@dataclass(frozen=True, kw_only=True)
class CostArgs:
    """Cost of elastic recovery while nobody dies."""

    case: Annotated[HealCostCase, tyro.conf.arg(name="")] = field(default_factory=HealCostCase)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench heal-cost ARGS...`; 1 where a bar is missed."""
    options = read_words(CostArgs, args, prog="phalanx bench heal-cost", description=__doc__)
    raise_if(_problems(options.case), ConfigError, subject="the options")
    check_writable(options.json)
    report = measure(options.case)
    print(describe(report))
    write_json(options.json, report)
    case = options.case
    return 0 if report["fast_over_plain"] <= case.fast_bar and report["exact_over_plain"] <= case.exact_bar else 1


def _problems(case: HealCostCase) -> list[Problem]:
    problems = too_small(case, ranks=2, ep=1, micro_batch=1, samples=1, seq_len=2, rounds=4)
    if not problems and case.samples % case.ranks:
        rule = f"must be a multiple of --ranks = {case.ranks}: a plain run has equal shares"
        problems.append(Problem(where="--samples", value=case.samples, rule=rule, hint=f"use {2 * case.ranks}"))
    return problems


def measure(case: HealCostCase) -> dict[str, Any]:
    """Ratios of medians over the rounds, with intervals, and every single time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {mode: _prepare(case, mode, folder) for mode in MODES}
        settings = SupervisorSettings(
            slots=case.ranks, wanted=case.ranks, respawns=0, limit_s=60.0, agent=AgentSettings(timeout_s=600.0)
        )
        code = Supervisor(partial(_work, case, runs, folder / "times.json"), settings).run()
        if code:
            raise SystemExit(code)
        times = json.loads((folder / "times.json").read_text())
    return evaluate(times, case)


def evaluate(times: dict[str, dict[str, list[float]]], case: HealCostCase) -> dict[str, Any]:
    """`times`: of each mode seconds and CPU seconds of each round."""
    report: dict[str, Any] = {}
    for mode in ("fast", "exact"):
        ratio, low, high = ratio_of_medians(times[mode]["step_s"], times["plain"]["step_s"])
        report |= {f"{mode}_over_plain": ratio, f"{mode}_ci_low": low, f"{mode}_ci_high": high}
        cpu, low, high = ratio_of_medians(times[mode]["cpu_s"], times["plain"]["cpu_s"])
        report |= {f"{mode}_cpu": cpu, f"{mode}_cpu_ci_low": low, f"{mode}_cpu_ci_high": high}
    medians = {f"{mode}_{kind}": statistics.median(times[mode][kind]) for mode in MODES for kind in ("step_s", "cpu_s")}
    return {**report, **medians, "case": vars(case), "samples": times}


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """median(above) / median(below), and the 95 % interval of it: percentiles over resampled rounds (Efron, Annals of Statistics 7(1), 1979).

    Both lists are by round, and a round is drawn whole: what slowed one round down slowed down both.
    """
    pairs = np.array([above, below])
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    ratios = np.median(pairs[0][drawn], axis=1) / np.median(pairs[1][drawn], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(pairs[0]) / np.median(pairs[1])), float(low), float(high)


def describe(report: dict[str, Any]) -> str:
    """Describes the figures for a person."""
    case = report["case"]
    shape = f"{case['preset']}, {case['ranks']} ranks, ep {case['ep']}, {case['samples']} x {case['micro_batch']} sequences of {case['seq_len']}"
    lines = [f"a step while nobody dies, over that of the plain run ({shape}, {case['rounds']} rounds in turn)"]
    for mode in ("fast", "exact"):
        lines.append(
            f"  {mode:<6} {report[f'{mode}_over_plain']:.3f}x  [{report[f'{mode}_ci_low']:.3f}, {report[f'{mode}_ci_high']:.3f}]   "
            f"CPU time, all ranks {report[f'{mode}_cpu']:.3f}x  [{report[f'{mode}_cpu_ci_low']:.3f}, {report[f'{mode}_cpu_ci_high']:.3f}]"
        )
    steps = ", ".join(f"{mode} {1e3 * report[f'{mode}_step_s']:.1f} ms" for mode in MODES)
    return "\n".join([*lines, f"  medians: {steps} (time of a step means nothing on a busy machine)"])


# ---- what runs ----------------------------------------------------------------------------------------------------------


def _prepare(case: HealCostCase, mode: Mode, folder: Path) -> ElasticRun:
    recipe = _recipe(case, mode, folder)
    own = RunFolder(folder / mode)
    own.create()
    return prepare_run(recipe, own)


def _recipe(case: HealCostCase, mode: Mode, folder: Path) -> Recipe:
    planner = mode != "plain"
    return Recipe(
        run=RunConfig(name=mode, folder=str(folder)),
        model=ModelConfig(preset=case.preset),
        folding=FoldingConfig(ep=case.ep),
        data=DataConfig(
            sources=("builtin:python",),
            builtin_bytes=2_000_000,
            tokenizer=case.tokenizer,
            cache=str(folder / "cache"),
        ),
        train=TrainConfig(
            steps=COLD + case.rounds,
            seq_len=case.seq_len,
            global_batch=case.micro_batch * case.samples,
            micro_batch=case.micro_batch,
            dtype=case.dtype,
            eval_interval=0,
        ),
        optim=OptimConfig(zero=case.zero),
        checkpoint=CheckpointConfig(interval=0),
        resilience=ResilienceConfig(
            mode="off" if mode == "plain" else mode, heal=planner, f=min(2, case.ranks // case.ep)
        ),
        observe=ObserveConfig(console="none", tensorboard=False),
        launch=LaunchConfig(ranks=case.ranks, threads=1),
    )


def _work(case: HealCostCase, runs: dict[Mode, ElasticRun], path: Path, agent: WorkerAgent) -> int:
    """One rank."""
    torch.set_num_threads(1)
    keep_freed_memory(threads=1)
    slot = int(agent.uid.split(".")[1])
    with open_sinks(runs["plain"].recipe.observe, folder=runs["plain"].folder.path, rank=slot) as sinks:
        bodies = {mode: ElasticMember(runs[mode], sinks) for mode in MODES if mode != "plain"}
        agent.announce(plan_hash="heal-cost", version="1")
        _, about = bodies["fast"].describe()
        report = MemberReport(uid=agent.uid, step=0, holds=False, about=about)
        team = agent.next_epoch(report, order=bodies["fast"].order)
        for body in bodies.values():
            body.order(team.generation, team.reports)
            body.enter(team, resolve_now(team, 0))
        with _Plain(runs["plain"], bodies["fast"], team) as plain:
            steps: dict[Mode, Callable[[], None]] = {
                "plain": plain.step,
                **{mode: _Elastic(body, agent, i).step for i, (mode, body) in enumerate(bodies.items())},
            }
            times = _rounds(case, steps, plain.trainer.rank.peers)
    if team.rank == 0:
        path.write_text(json.dumps(times))
    for body in bodies.values():
        body.leave_epoch()
    return 0


def _rounds(
    case: HealCostCase, steps: dict[Mode, Callable[[], None]], peers: Peers
) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {mode: {"step_s": [], "cpu_s": []} for mode in MODES}
    for number in range(COLD + case.rounds):
        for mode in ORDERS[number % len(ORDERS)]:
            peers.gather(None)
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            steps[mode]()
            mine = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            told = peers.gather(mine)
            if number >= COLD:
                times[mode]["step_s"].append(max(seconds for seconds, _ in told))
                times[mode]["cpu_s"].append(sum(cpu for _, cpu in told))
    return times


class _Elastic:
    """Steps of a member, as the loop of `runtime/membership/member.py` makes them. `number` of `bodies` bodies vote in one team: their keys differ."""

    def __init__(self, body: ElasticMember, agent: WorkerAgent, number: int, bodies: int = 2) -> None:
        self.body, self.agent, self.number, self.bodies = body, agent, number, bodies

    def step(self) -> None:
        self.body.compute()
        decision = self.agent.vote(self.bodies * self.body.step + self.number)
        if not decision.commit:
            raise SystemExit("a rank was lost; nothing was measured")
        self.body.commit()


class _Plain:
    """A trainer without any of it, on the same groups."""

    def __init__(self, run: ElasticRun, beside: ElasticMember, team: GroupEpoch) -> None:
        world = tuple(range(team.size))
        group = team.groups.get(world, purpose="control")
        rank = Rank(
            recipe=run.recipe,
            info=WorldInfo(rank=team.rank, world=team.size, local_rank=team.rank, local_world=team.size),
            device=beside.device,
            peers=Peers(group),
            cache=team.groups,
            folder=run.folder,
            sinks=beside.sinks,
            memory=beside.memory,
            lanes=beside.lanes,
            lock=None,
        )
        assert beside.trainer is not None
        folding = beside.trainer.folding
        parts = make_parts(rank, run.spec, folding, resolve_pipeline(run.recipe, run.spec, folding))
        self.trainer = Trainer(
            rank=rank, stop=StopRequest(), prepared=run.prepared, spec=run.spec, folding=folding, parts=parts,
            loader=make_loader(run.recipe, run.prepared), manager=CheckpointManager(run.folder.checkpoints.path, group=group),
            hook=Rebalancer(run.recipe, run.spec), progress=RunProgress(),
        )  # fmt: skip

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.drop_batches()

    def step(self) -> None:
        self.trainer.compute()
        self.trainer.commit()
