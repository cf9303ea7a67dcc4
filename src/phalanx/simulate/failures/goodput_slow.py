"""Slow hosts in a job that runs for days: at which pace it goes, and which of them its rule removes (`resilience.straggler`).

Decides nothing about who goes: that is the run's own rule (`plan/recovery/stragglers.py: judge`), asked again and again with the paces of one draw of all ranks until it lets the rest be. A generation's steps are counted anew, so
hosts go one after another. Whoever takes the place of one that went is usual; while the rule is asked, such places count as empty. Must never change: the rule is that of the run, and with nobody removed the pace is that of `slow_step.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.units import format_seconds
from phalanx.plan.recovery import RankPace, StragglerRule, Streaks, judge
from phalanx.simulate.failures.slow_step import with_stragglers
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Stragglers
from phalanx.simulate.step import Prediction


@dataclass(frozen=True, kw_only=True)
class SlowHosts:
    """Slow hosts of a job on a cluster, whose paces are over that of the job with nobody slow, at most 1: fast ranks that are drawn make up for no slow ones."""

    pace: float
    put_out: tuple[tuple[float, float], ...]
    """(seconds since the job began, pace from then on) of each host that is removed."""
    names: tuple[int, ...]
    """Those hosts."""
    kept: str
    """Why the slowest of the others stays; empty where nobody is slow for the rule."""

    def explain(self) -> str:
        """One line that a person reads."""
        text = f"slow ranks: the job goes at {self.pace:.1%} of its pace"
        if self.put_out:
            hosts = ", ".join(map(str, self.names[:8])) + ", ..." * (len(self.names) > 8)
            last_s, pace = self.put_out[-1]
            text += f"; replicas remove hosts ({hosts}), the last after {format_seconds(last_s)}, and go on at {pace:.1%} of what as many usual hosts do"
        return text + (f"; the slowest{' of the others' * bool(self.put_out)}: {self.kept}" if self.kept else "")


def slow_hosts(prediction: Prediction, stragglers: Stragglers, rule: StragglerRule | None) -> SlowHosts:
    """`rule`: of the recipe on that cluster (`goodput_elastic.py`); None: no host is removed. Paces are of one draw, that of the stragglers' seed."""
    cluster = prediction.cluster
    factors = stragglers.factors(cluster, np.random.default_rng(stragglers.seed))
    usual_s = prediction.step.seconds
    step_s = _step_s(prediction, factors)
    pace, now, gone, changes = min(1.0, usual_s / step_s), 0.0, list[int](), list[tuple[float, float]]()
    kept = ""
    while rule is not None and rule.factor:
        due, kept = _next(factors, cluster, gone, rule)
        if due is None:
            break
        now += rule.steps * step_s
        gone.append(due)
        factors[due * cluster.hardware.ranks_per_host : (due + 1) * cluster.hardware.ranks_per_host] = 1.0
        step_s = _step_s(prediction, factors)
        changes.append((now, min(1.0, usual_s / step_s)))
    return SlowHosts(pace=pace, put_out=tuple(changes), names=tuple(gone), kept=kept)


def _step_s(prediction: Prediction, factors: NDArray[np.float64]) -> float:
    """Seconds of a step with these paces of all ranks."""
    slow = tuple((int(rank), float(factors[rank])) for rank in np.flatnonzero(factors > 1.0))
    fast = factors < 1.0
    if not slow and not fast.any():
        return prediction.step.seconds
    named = slow + tuple((int(rank), float(factors[rank])) for rank in np.flatnonzero(fast))
    return with_stragglers(prediction, Stragglers(ranks=named)).step.seconds


def _next(
    factors: NDArray[np.float64], cluster: GpuCluster, gone: Sequence[int], rule: StragglerRule
) -> tuple[int | None, str]:
    """The host that the rule removes next, if any, else why it keeps the slowest. All ranks have the same work."""
    without, per_host = set(gone), cluster.hardware.ranks_per_host
    hosts = [rank // per_host for rank in range(cluster.world)]
    paces = [
        RankPace(uid=str(rank), host=str(host), seconds=float(factors[rank]), work=1.0)
        for rank, host in enumerate(hosts)
        if host not in without
    ]
    before = dict.fromkeys((pace.host for pace in paces), rule.steps - 1)
    _, verdict = judge(paces, Streaks(steps=before), rule)
    if verdict is None:
        return None, ""
    return (int(verdict.host), "") if verdict.put_out else (None, verdict.why)
