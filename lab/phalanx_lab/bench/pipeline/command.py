"""What pipelines gain from transfers that travel beside passes: `phalanx bench pipeline --json F`, on the testbed.

Four stages, each on an emulated host with two ranks, links of at most 200 Mbit/s; what crosses is replicated over the two ranks of a stage. Two models
(`phalanx_lab/bench/pipeline/models.py`): a decoder, and a U-shaped one with skip connections that cross stages. The ranks take turns of one step each
with four configurations, the same in every round:

    send/recv, 1f1b                a copy for each replica crosses the wire, and the sender waits until its receiver has it
    broadcast, 1f1b                one copy crosses, and is passed on inside the host, beside the passes
    broadcast, eager_1f1b          with forwards ahead
    broadcast, eager_1f1b_split    with forwards ahead, and weight gradients while the input gradient travels

Passes are paced: there are more ranks than processors, so a pass computes and then waits until its time is over. That time follows from the wire: before
anything else the ranks measure c, what one tensor takes from stage to stage in a stream of them (broadcast, passes that do nothing); a forward
pass is given 4 c in the decoder, 2 c in the U-shaped model (whose lower stages send two tensors each), an input gradient and a weight
gradient each as much. *Predicted* is `plan.pipeline.schedule.clock.simulate` with the measured median pass times and c, that of send/recv
measured in the same way. The gradients of all configurations are the same bits, or the benchmark fails.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import RunError
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_seconds
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.pipeline.boundary.edges import EdgePlan, planned_edge
from phalanx.plan.pipeline.comm import PipelinePlan, plan_pipeline
from phalanx.plan.pipeline.schedule.clock import Edge, ScheduleCosts, chain, simulate
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Hosts, Move, equal_hosts
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.pipeline.boundary import Boundary
from phalanx.runtime.pipeline.runner import run_pipeline
from phalanx.runtime.processes.world import close_world
from phalanx.train.step.warmup import transfer_seconds
from phalanx_lab.bench.pipeline.models import (
    MODELS,
    STAGES,
    ModelShape,
    PacedPasses,
    PassPace,
    StageModel,
    gradient_digest,
)
from phalanx_lab.bench.rank_jobs import join_ranks, run_ranks, tell
from phalanx_lab.testbed.cluster import ClusterSpec

REPLICAS = 2
"""Ranks of a stage."""
CONFIGURATIONS: tuple[tuple[str, str, str], ...] = (
    ("send/recv, 1f1b", "send_recv", "1f1b"),
    ("broadcast, 1f1b", "best", "1f1b"),
    ("broadcast, eager_1f1b", "best", "eager_1f1b"),
    ("broadcast, eager_1f1b_split", "best", "eager_1f1b_split"),
)
"""What it is called, how tensors cross, in which order passes run. The first is what the others are compared with."""
MESSAGE_BYTES = 1 << 17
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class PipelineArgs:
    """Samples per second of pipelines that hide their transfers, over one that does not, on four emulated hosts."""

    models: tuple[Literal["decoder", "u_shaped"], ...] = ("decoder", "u_shaped")
    microbatches: int = 32
    rounds: int = 3
    """Turns of each configuration; medians count."""
    link_mbit: float = 200.0
    """Rate of each host's link."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench pipeline ARGS...` (or, with `--rank-of FILE`, one rank of it)."""
    if args[:1] == ["--rank-of"]:
        return _rank(Path(args[1]))
    options = read_words(PipelineArgs, args, prog="phalanx bench pipeline", description=__doc__)
    check_writable(options.json)
    found: dict[str, Any] = {name: measure(options, MODELS[name]) for name in options.models}
    for name, result in found.items():
        _show(name, result)
    if options.json is not None:
        link = options.link_mbit * 1e6
        write_json(
            options.json,
            {"paced": True, "stages": STAGES, "ranks_per_stage": REPLICAS, "link_bit_per_s": link, **found},
        )
    return 0 if all(result["met"] for result in found.values()) else 1


def measure(options: PipelineArgs, shape: ModelShape) -> dict[str, Any]:
    """All configurations of one model in one job of the testbed. Raises `RunError` where it fails or gradients differ."""
    job = {**dataclasses.asdict(options), "json": None, "models": (shape.name,)}
    return _result(options, shape, run_ranks("pipeline", job, _cluster(options), timeout_s=600))


def _cluster(options: PipelineArgs) -> ClusterSpec:
    return ClusterSpec(hosts=STAGES, ranks_per_host=REPLICAS, link_bit_per_s=options.link_mbit * 1e6)


def _result(options: PipelineArgs, shape: ModelShape, told: dict[str, Any]) -> dict[str, Any]:
    """Rates, quotients and predictions."""
    samples = options.microbatches * shape.sequences
    rows = []
    for (name, _, schedule), seconds in zip(CONFIGURATIONS, told["seconds"], strict=True):
        predicted_s = _predicted(options, shape, told, name, schedule)
        measured_s = statistics.median(seconds)
        rows.append(
            {
                "name": name,
                "step_s": measured_s,
                "samples_per_s": samples / measured_s,
                "predicted_samples_per_s": samples / predicted_s,
                "steps_s": seconds,
            }
        )
    for row in rows:
        row["ratio"] = row["samples_per_s"] / rows[0]["samples_per_s"]
        row["predicted_ratio"] = row["predicted_samples_per_s"] / rows[0]["predicted_samples_per_s"]
    digests = {tuple(each) for each in told["digests"]}
    if len(digests) != 1:
        raise RunError(f"the configurations of {shape.name} have different gradients: {sorted(digests)}")
    return {
        "tensor_bytes": shape.tensor_bytes,
        "transfer_s": told["transfers_s"]["best"],
        "send_recv_s": told["transfers_s"]["send_recv"],
        "passes_s": told["passes_s"],
        "transfer_over_forward": told["transfers_s"]["best"] / told["passes_s"]["F"],
        "late_passes": told["late"],
        "passes": told["passes"],
        "processors_used": told["processors"],
        "gradients_equal": True,
        "configurations": rows,
        "ratio": rows[-1]["ratio"],
        "predicted_ratio": rows[-1]["predicted_ratio"],
        "bar": shape.bar,
        "met": rows[-1]["ratio"] >= shape.bar,
    }


def _predicted(options: PipelineArgs, shape: ModelShape, told: dict[str, Any], name: str, schedule: str) -> float:
    """Seconds of a step by the clock of `plan/pipeline/schedule/clock.py`: links carry one transfer at a time each way."""
    spent, plain = told["passes_s"], name == CONFIGURATIONS[0][0]
    c = told["transfers_s"]["send_recv" if plain else "best"]
    f, i, w = ((spent[kind],) * STAGES for kind in "FIW")
    costs = ScheduleCosts(
        forward=f,
        backward=(spent["B"],) * STAGES,
        input_grad=i,
        weight_grad=w,
        edge_p2p={edge: c * width for edge, width in shape.widths.items()},
        blocking=plain,
        channels="rank",
    )
    made = make_schedule(schedule, pp=STAGES, virtual=1, num_microbatches=options.microbatches)
    return simulate(made, costs, edges=shape.edges).makespan


def _show(name: str, result: dict[str, Any]) -> None:
    passes = result["passes_s"]
    print(
        f"{name} (paced: {STAGES * REPLICAS} ranks share this machine): one tensor of {result['tensor_bytes']} bytes takes "
        f"{format_seconds(result['transfer_s'])} (send/recv {format_seconds(result['send_recv_s'])}), a forward pass {format_seconds(passes['F'])}; "
        f"{result['late_passes']} of {result['passes']} passes took longer than their time; all ranks together used "
        f"{result['processors_used']:.2f} processors"
    )
    for row in result["configurations"]:
        print(
            f"  {row['name']:<28} {row['samples_per_s']:8.1f} samples/s  {row['ratio']:5.2f}x   "
            f"predicted {row['predicted_samples_per_s']:8.1f}  {row['predicted_ratio']:5.2f}x"
        )
    print(
        f"  last over first {result['ratio']:.2f}x, at least {result['bar']:.2f}x wanted: {'met' if result['met'] else 'missed'}"
    )


# ---- one rank ------------------------------------------------------------------------------------------------------------------


def _edges(shape: ModelShape, cluster: ClusterSpec, method: str) -> dict[Edge, EdgePlan]:
    """Every edge's tensor, replicated over the ranks of both of its stages, there and back."""
    out = {}
    for edge in shape.edges:
        below, above = (whole_layout(shape.shape(edge), cluster.ranks_of(stage)) for stage in edge)
        up = Move(name=f"{edge[0]} to {edge[1]}", itemsize=4, src=below, dst=above)
        down = Move(name=f"{edge[1]} to {edge[0]}", itemsize=4, src=above, dst=below)
        size = MESSAGE_BYTES if method == "best" else shape.tensor_bytes * shape.widths[edge]
        plans = [plan_reshard([move], hosts_of(cluster), method=method, message_bytes=size) for move in (up, down)]
        out[edge] = planned_edge(edge, *plans)
    return out


@dataclass(frozen=True, eq=False)
class _Place:
    """One rank of the benchmark."""

    shape: ModelShape
    model: StageModel
    later: DeferredGradients
    boundaries: dict[str, Boundary]
    microbatches: int

    @property
    def boundary(self) -> Boundary:
        """How one copy crosses."""
        return self.boundaries["best"]

    def plan(self, schedule: str) -> PipelinePlan:
        made = make_schedule(schedule, pp=STAGES, virtual=1, num_microbatches=self.microbatches)
        return plan_pipeline(made, edges=self.shape.edges)

    def step(self, method: str, schedule: str, pace: PassPace) -> tuple[float, PacedPasses, str]:
        """Seconds of a step from the moment all begin to the moment all have ended, its passes, its gradients."""
        boundary, plan = self.boundaries[method], self.plan(schedule)
        passes = PacedPasses(self.model, self.later, pace)
        boundary.comms.barrier(boundary.axis)
        begin_s = time.perf_counter()
        run_pipeline(plan, passes, boundary)
        boundary.comms.barrier(boundary.axis)
        return time.perf_counter() - begin_s, passes, gradient_digest(self.model)


def _place(options: PipelineArgs, shape: ModelShape, rank: int) -> _Place:
    cluster, comms, later = _cluster(options), Collectives(timeout_s=TIMEOUT_S), DeferredGradients()
    ranks = tuple(range(cluster.world))
    axis = Axis("pp", ranks, rank, GroupCache(timeout_s=TIMEOUT_S).get(ranks))
    lane = Axis("lane", ranks, rank, own_group(cluster.world, timeout_s=TIMEOUT_S))
    stage = cluster.host_of(rank)
    boundaries = {
        method: Boundary(
            position=stage,
            edges=_edges(shape, cluster, method),
            dtype=torch.float32,
            device=torch.device("cpu"),
            axis=axis,
            comms=comms,
            lane=lane,
            wait_for_sends=method == "send_recv",
        )
        for method in ("send_recv", "best")
    }
    return _Place(shape, StageModel(shape, stage, later), later, boundaries, options.microbatches)


def _rank(job_file: Path) -> int:
    options = PipelineArgs(**json.loads(job_file.read_text()))
    (model,) = options.models
    info = join_ranks(TIMEOUT_S)
    place = _place(options, MODELS[model], info.rank)
    comms, axis = place.boundary.comms, place.boundary.axis
    transfers_s = {m: max(comms.gather_objects(_one_transfer(place, options, m), axis)) for m in place.boundaries}
    f = transfers_s["best"] * place.shape.transfers_per_forward
    pace = PassPace(forward_s=f, input_s=f, weight_s=f)
    place.step("best", "1f1b", pace)  # first touch of memory, connections
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    turns = [
        [place.step(method, schedule, pace) for _, method, schedule in CONFIGURATIONS] for _ in range(options.rounds)
    ]
    mine = _told(turns) | {"cpu_share": (time.process_time() - cpu_s) / (time.perf_counter() - begin_s)}
    told = comms.gather_objects(mine, axis)
    if info.rank == 0:
        tell(job_file, _together(told) | {"transfers_s": transfers_s})
    close_world()
    return 0


def _one_transfer(place: _Place, options: PipelineArgs, method: str) -> float:
    """Seconds of one tensor from stage to stage, in a stream of them up and then down the chain."""
    single = dataclasses.replace(place.shape, widths=dict.fromkeys(chain(STAGES), 1))
    edges = _edges(single, _cluster(options), method)
    return transfer_seconds(dataclasses.replace(place.boundaries[method], edges=edges), pp=STAGES)


Turns = Sequence[Sequence[tuple[float, PacedPasses, str]]]


def _told(turns: Turns) -> dict[str, Any]:
    """What one rank has to say of its turns."""
    spent: dict[str, list[float]] = {}
    for turn in turns:
        for _, passes, _ in turn:
            for kind, seconds in passes.spent.items():
                spent.setdefault(kind, []).extend(seconds)
    return {
        "seconds": [[turn[i][0] for turn in turns] for i in range(len(CONFIGURATIONS))],
        "digests": [[turn[i][2] for turn in turns] for i in range(len(CONFIGURATIONS))],
        "passes_s": {kind: statistics.median(seconds) for kind, seconds in spent.items()},
        "late": sum(passes.late for turn in turns for _, passes, _ in turn),
        "passes": sum(len(seconds) for seconds in spent.values()),
    }


def _together(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all ranks: the slowest's seconds, every rank's gradients by configuration and turn, medians of passes."""
    count, rounds = len(CONFIGURATIONS), len(told[0]["seconds"][0])
    return {
        "seconds": [[max(t["seconds"][i][r] for t in told) for r in range(rounds)] for i in range(count)],
        "digests": [[t["digests"][i][r] for t in told] for i in range(count) for r in range(rounds)],
        "passes_s": {kind: statistics.median(t["passes_s"][kind] for t in told) for kind in "FBIW"},
        "late": sum(t["late"] for t in told),
        "processors": sum(t["cpu_share"] for t in told),
        "passes": sum(t["passes"] for t in told),
    }


def hosts_of(cluster: ClusterSpec) -> Hosts:
    """The hosts of a cluster, all with the same links (1 byte per second where they are not limited: only ratios count then)."""
    rate = 1.0 if cluster.link_bit_per_s is None else cluster.link_bit_per_s / 8
    return equal_hosts([cluster.host_of(rank) for rank in range(cluster.world)], rate=rate)
