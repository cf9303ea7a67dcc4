"""What a trace should cost both systems, from a few measured figures: no process, `simulate/failures/goodput.py` over the trace. Printed beside what was measured.

    share of the time    useful, saving, lost, down: of the baseline with checkpoints, of ours with replicas
    rate                 of slots of their own: samples/s in proportion to the slots in use (the baseline uses whole expert-parallel groups). Ranks that share
                         the cores of one machine lose nothing when others die, so there it is 1 for both.

The paper's set-up (arXiv 2407.04656) in these terms, and where each figure is from:

    printed      a failure every 300 s; a save every 50 steps; 10 nodes, down to 5; NFS over 10 Gbps; expert state 63 and 112 MB, so 14 bytes a parameter
    from these   a save writes 14 bytes x 521M and 1.7G parameters through 10 Gbps: 5.8 and 19 s at least
    inferred     steps of the order of 0.6 and 0.9 s; a restart of 150 s (see `PAPER_RESTART_S`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.simulate.failures.goodput import Practice, poisson, simulate_goodput, young_daly
from phalanx_lab.bench.recovery.trace import Trace
from phalanx_lab.bench.recovery.workload import Workload

PAPER_FAILURE_S = 300.0
PAPER_INTERVAL_STEPS = 50
PAPER_STATE_BYTES = 14
"""Bytes of a parameter in the paper: 63 MiB for the 2 x 768 x 3072 weights of an expert of GPT-S, 112 MiB for 2 x 1024 x 4096 of
GPT-L."""
PAPER_NFS_BYTES_PER_S = 10e9 / 8
PAPER_RESTART_S = 150.0
"""Nowhere printed. Reading the state back takes 33 s (GPT-S, 10 nodes) and 45 s (GPT-L, 8 nodes) at 10 Gbps, so 60 to 90 s with processes, libraries and groups is a lower
bound; two and a half minutes are an assumption. With them, saves and idle nodes as above, this model gives 2.0x and 2.4x where the paper measured 2.8x and 5.7x. What it leaves
out is the load: up to 87 % of the tokens on two experts, which a fixed placement waits for in every step and replicas do not."""
SOME = 8
"""Hosts of a job that never loses the last one."""
PAPER_REPAIR_S = 30.0
"""Lazarus: 20 to 40 s a reconfiguration (printed)."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measured on one machine, of one workload. Seconds."""

    step_s: float
    save_s: float
    """How long a checkpoint stops training."""
    save_bytes: int = 0
    """What it writes."""
    restart_s: float
    """Seconds from a kill to the first step of the processes that torchrun started."""
    elastic_step_s: float
    """Seconds of a step of the elastic run."""
    repair_s: float
    """Seconds from a kill to its next step."""


def paper_save_s(workload: Workload) -> float:
    """Seconds of the paper's checkpoint, at least."""
    return workload.paper_params * PAPER_STATE_BYTES / PAPER_NFS_BYTES_PER_S


def paper_save_share(workload: Workload) -> float:
    """A checkpoint as a share of the time between failures, at least: 0.019 and 0.063."""
    return paper_save_s(workload) / PAPER_FAILURE_S


def paper_interval_share(workload: Workload) -> float:
    """Work between two saves, as a share of the time between failures: 0.1 and 0.15."""
    return PAPER_INTERVAL_STEPS * workload.paper_step_s / PAPER_FAILURE_S


def paper_figures(workload: Workload) -> Figures:
    """The paper's set-up, with both systems' steps equal."""
    return Figures(
        step_s=workload.paper_step_s,
        save_s=paper_save_s(workload),
        restart_s=PAPER_RESTART_S,
        elastic_step_s=workload.paper_step_s,
        repair_s=PAPER_REPAIR_S,
    )


def restarts(trace: Trace, ep: int) -> tuple[list[float], list[float]]:
    """When a baseline on multiples of `ep` starts again: (because it lost a slot in use, because it can use more)."""
    hits, grows = [], []
    there = frozenset(range(trace.slots))
    active = _legal(there, ep)
    for change in trace.changes:
        there = there - set(change.lost) | set(change.back)
        wanted = _legal(there, ep)
        if active & set(change.lost):
            hits.append(change.at_s)
        elif len(wanted) > len(active):
            grows.append(change.at_s)
        else:
            continue
        active = wanted
    return hits, grows


def _legal(there: frozenset[int], ep: int) -> frozenset[int]:
    return frozenset(sorted(there)[: len(there) // ep * ep])


def mean_in_use(trace: Trace, ep: int) -> float:
    """Slots in use, mean over time, of what runs on multiples of `ep` (1: on all)."""
    parts = trace.present()
    ends = [at_s for at_s, _ in parts[1:]] + [trace.duration_s]
    used = sum((end - at) * (len(there) // ep * ep) for (at, there), end in zip(parts, ends, strict=True))
    return used / trace.duration_s


@dataclass(frozen=True, kw_only=True)
class TracePrediction:
    """Steps in the whole trace."""

    ours: float
    baseline: float

    @property
    def ratio(self) -> float:
        return self.ours / self.baseline if self.baseline > 0 else float("inf")


def predict(figures: Figures, trace: Trace, *, ep: int, interval_steps: int, own_speed: bool) -> TracePrediction:
    """Both systems through `trace`. `own_speed`: samples/s follow the slots in use; else they do not depend on them."""
    duration, hits_and_grows = trace.duration_s, restarts(trace, ep)
    hits, grows = hits_and_grows
    base, planner = _practices(figures, interval_steps)
    baseline = simulate_goodput(base, hits, duration_s=duration).useful
    baseline = max(
        0.0, baseline - len(grows) * (figures.restart_s + figures.save_s) / duration
    )  # saved before, so nothing is lost
    ours = simulate_goodput(planner, [c.at_s for c in trace.changes], duration_s=duration, hosts=SOME).useful
    rate_base, rate_ours = (mean_in_use(trace, ep), mean_in_use(trace, 1)) if own_speed else (1.0, 1.0)
    return TracePrediction(
        ours=ours * rate_ours * duration / figures.elastic_step_s,
        baseline=baseline * rate_base * duration / figures.step_s,
    )


def _practices(figures: Figures, interval_steps: int) -> tuple[Practice, Practice]:
    """Restarts from checkpoints, and elastic recovery, which saves a fifth as often."""
    base = Practice(
        interval_s=interval_steps * figures.step_s, save_s=figures.save_s, detect_s=0.0, restart_s=figures.restart_s
    )
    planner = Practice(
        recovery="replicas",
        interval_s=5 * interval_steps * figures.elastic_step_s,
        save_s=figures.save_s,
        detect_s=0.0,
        repair_s=figures.repair_s,
    )
    return base, planner


def best_interval(figures: Figures, mean_between_s: float) -> int:
    """Young and Daly's, in steps."""
    return max(1, round(young_daly(max(figures.save_s, 1e-3), mean_between_s) / figures.step_s))


def where_as_good(
    figures: Figures, failure_s: float, *, factors: Sequence[float], restart_factors: Sequence[float]
) -> list[dict[str, float]]:
    """Ratio at rarer failures and cheaper restarts than measured, each at its best interval, over 2000 Poisson failures, all slots alike."""
    out = []
    for factor in factors:
        for share in restart_factors:
            changed = replace(figures, restart_s=figures.restart_s * share)
            mean = failure_s * factor
            steps = best_interval(changed, mean)
            base, ours = _practices(changed, steps)
            span = 2000 * mean
            found = [
                simulate_goodput(p, poisson(mean, 0), duration_s=span, hosts=SOME, seed=0).useful for p in (ours, base)
            ]
            ratio = found[0] / changed.elastic_step_s / (found[1] / changed.step_s)
            out.append(
                {"failure_s": mean, "restart_s": changed.restart_s, "best_interval_steps": steps, "ratio": ratio}
            )
    return out
