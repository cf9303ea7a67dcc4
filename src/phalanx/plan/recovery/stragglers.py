"""Which host slows a run down, and whether the others should go on without it.

What is compared is time per work, with waits left out. A rank says how long its own share of a step took (`RankPace.seconds`: from the first pass to the vote, without the
time in which it stood waiting for messages), and all know how much that share was (`RankPace.work`, FLOPs by the counts of the step). Its slowness is its time over the *larger*
of two expectations:

    median seconds of the others                                  so a rank with little to do, whose time is mostly overhead, is not slow
    median seconds per FLOP of the others, times its own FLOPs    so a rank that has the busy experts, or more micro-batches, is not slow

"The others" are the ranks of all other hosts (on one machine: all other ranks), so where all are slow none is. A host is as slow as its slowest rank, for which all wait.
It counts as a straggler after `steps` steps in a row. It is removed if that is asked for and pays: all by the same figures, so all members decide alike.

Must never change: a function of its arguments alone. No host is removed if the run would have too few ranks, and never half of the hosts or more: then the cause is not in these hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.plan.mapping import Folding, LayerPlacements, Stage, StagePlan, layer_costs
from phalanx.plan.model import ModelSpec
from phalanx.plan.placement.search import Floats

REPORT_FACTOR = 2.0
"""A host that is so many times as slow as the others is reported, where `resilience.straggler` names no other factor."""


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """One rank in one step."""

    uid: str
    host: str
    """Failure domain that is removed as a whole."""
    seconds: float
    """Seconds of its own computation, without waits."""
    work: float
    """FLOPs of it."""


@dataclass(frozen=True, kw_only=True)
class StragglerRule:
    """What the recipe asks for, and what the run needs."""

    factor: float
    """`resilience.straggler`; 0: no host is removed."""
    steps: int
    """Number of steps in a row."""
    least_ranks: int = 1
    least_hosts: int = 1
    fits: Callable[[int], bool] = field(default=lambda ranks: True)
    """Whether so many ranks make a mapping of the same degrees."""

    @property
    def report_factor(self) -> float:
        return self.factor or REPORT_FACTOR


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A host has been slow for long enough."""

    host: str
    uids: tuple[str, ...]
    slowness: float
    steps: int
    put_out: bool
    why: str
    """Why it is removed, or why it is not."""


@dataclass(frozen=True, kw_only=True)
class Streaks:
    """Number of steps in a row for which each host has been slow; kept by every member, and empty when a generation begins."""

    steps: Mapping[str, int] = field(default_factory=dict)

    def after(self, slow: Mapping[str, float], factor: float) -> Streaks:
        """One step later."""
        return Streaks(steps={host: self.steps.get(host, 0) + 1 for host, by in slow.items() if by > factor})


def slowness(paces: Sequence[RankPace]) -> dict[str, float]:
    """How many times as long as expected the slowest rank of each host takes; 1 for all where there is none to compare with."""
    timed = [p for p in paces if p.seconds > 0]
    seconds = _Others((p.host, p.seconds) for p in timed)
    rates = _Others((p.host, p.seconds / p.work) for p in timed if p.work > 0)
    found: dict[str, float] = {}
    for pace in paces:
        usual_s = max(seconds.median(pace.host), rates.median(pace.host) * pace.work)
        found[pace.host] = max(found.get(pace.host, 0.0), pace.seconds / usual_s if usual_s else 1.0)
    return found


class _Others:
    """Medians of what the ranks of all hosts but one have, sorted once for all hosts: there may be thousands."""

    def __init__(self, times: Iterable[tuple[str, float]]) -> None:
        ordered = sorted(times, key=lambda one: one[1])
        self._values = [value for _, value in ordered]
        self._places: dict[str, list[int]] = {}
        for place, (host, _) in enumerate(ordered):
            self._places.setdefault(host, []).append(place)
        self._known: dict[str, float] = {}

    def median(self, host: str) -> float:
        """Median of the others; 0 where there are none."""
        if host not in self._known:
            own = self._places.get(host, [])
            left = len(self._values) - len(own)
            two = [self._values[_place_without(own, at)] for at in ((left - 1) // 2, left // 2)] if left else [0.0]
            self._known[host] = sum(two) / len(two)
        return self._known[host]


def _place_without(gone: Sequence[int], at: int) -> int:
    """Where number `at` of those stands that are left without the places `gone`, ascending."""
    for place in gone:
        if place > at:
            break
        at += 1
    return at


def judge(paces: Sequence[RankPace], streaks: Streaks, rule: StragglerRule) -> tuple[Streaks, Verdict | None]:
    """The streaks after one more step, and what is to be reported or done: about the slowest of those that were slow for long enough."""
    slow = slowness(paces)
    streaks = streaks.after(slow, rule.report_factor)
    due = {host: slow[host] for host, steps in streaks.steps.items() if steps >= rule.steps}
    if not due:
        return streaks, None
    host = max(sorted(due), key=lambda name: due[name])
    uids = tuple(p.uid for p in paces if p.host == host)
    kept = _why_kept(paces, due, host, rule)
    text = f"{due[host]:.1f} times as slow as the others for {streaks.steps[host]} steps"
    return streaks, Verdict(
        host=host,
        uids=uids,
        slowness=due[host],
        steps=streaks.steps[host],
        put_out=not kept,
        why=f"{text}; it stays: {kept}" if kept else text,
    )


def _why_kept(paces: Sequence[RankPace], due: Mapping[str, float], host: str, rule: StragglerRule) -> str:
    """Nothing where `host` is to go."""
    hosts = {p.host for p in paces}
    ranks = sum(p.host != host for p in paces)
    if not rule.factor:
        return "resilience.straggler = 0 excludes no rank"
    if 2 * len(due) >= len(hosts):
        return f"{len(due)} of {len(hosts)} are slow, so the cause is not in these hosts"
    if ranks < rule.least_ranks:
        return f"{ranks} ranks would be left and the run needs {rule.least_ranks}"
    if len(hosts) - 1 < rule.least_hosts:
        return f"{len(hosts) - 1} holders would be left, and resilience.f asks for {rule.least_hosts}"
    if not rule.fits(ranks):
        return f"{ranks} ranks have no mapping of the same degrees without idle ones"
    if due[host] <= len(paces) / ranks:
        return f"{ranks} ranks would be no faster without it"
    return ""


# ---- work ------------------------------------------------------------------------------------------------------------


def work_of_ranks(
    spec: ModelSpec,
    folding: Folding,
    stages: StagePlan,
    counts_LE: Floats,
    *,
    microbatches: Sequence[int],
    tokens_of_one: int,
    seq_len: int,
    placement: Sequence[LayerPlacements] = (),
) -> list[float]:
    """FLOPs of each rank in a step, forward and backward, nothing computed twice. Only proportions count.

    `counts_LE` (L, E): tokens that chose each expert. `microbatches`: of each data-parallel replica, empty ones left out. `placement` of each stage, where experts have replicas:
    those share an expert's rows evenly; without, each expert-parallel group serves its own replicas' tokens.
    """
    row, all_samples = 6.0 * spec.expert_matrices, max(1, sum(microbatches))
    dense = _dense_flops(spec, stages, folding.pp, seq_len=seq_len)
    served = _served_rows(spec, folding, stages, counts_LE, placement)
    samples = _samples_of_pools(folding, microbatches)
    share, out = folding.tp * folding.cp, []
    for rank in range(folding.world):
        ep, edp, pp = (folding.coord(rank, axis) for axis in ("ep", "edp", "pp"))
        mine = microbatches[folding.replica_of(rank)] * tokens_of_one
        of_group = 1.0 if placement else samples[edp, pp] / share / all_samples
        out.append(dense[pp] * mine / share + row * served[ep, pp] * of_group / folding.etp)
    return out


def _layers_of(spec: ModelSpec, stage: Sequence[Stage]) -> list[int]:
    """Blocks of a pipeline rank, those of multi-token prediction behind the head among them."""
    held = [number for part in stage for number in part.layers]
    return [*held, *spec.mtp_blocks] if any(part.has_head for part in stage) else held


def _dense_flops(spec: ModelSpec, stages: StagePlan, pp: int, *, seq_len: int) -> list[float]:
    """FLOPs of a token on each pipeline rank, routed experts left out."""
    costs, out = layer_costs(spec, seq_len=seq_len), []
    for at in range(pp):
        stage = stages.of_rank(at)
        blocks = math.fsum(costs.blocks[number] for part in stage for number in part.layers)
        routed = sum(number in spec.moe_layers for number in _layers_of(spec, stage))
        head = costs.head * any(part.has_head for part in stage)
        out.append(blocks + head - 6.0 * spec.expert_matrices * spec.top_k * routed)
    return out


def _served_rows(
    spec: ModelSpec, folding: Folding, stages: StagePlan, counts_LE: Floats, placement: Sequence[LayerPlacements]
) -> dict[tuple[int, int], float]:
    """(ep, pp) -> rows of the experts there, where one expert-parallel group has those of all tokens."""
    rows, each = counts_LE.tolist(), spec.num_experts // folding.ep
    out: dict[tuple[int, int], float] = {}
    for pp in range(folding.pp):
        held = set(_layers_of(spec, stages.of_rank(pp)))
        found: list[list[float]] = [[] for _ in range(folding.ep)]
        for row, number in zip(rows, spec.moe_layers, strict=True):
            if number not in held:
                continue
            if not placement:
                for ep in range(folding.ep):
                    found[ep] += row[ep * each : (ep + 1) * each]
                continue
            slots = placement[pp].layers[number].slots
            copies = Counter(expert for group in slots for of_rank in group for expert in of_rank)
            for ep, experts in enumerate(slots[0]):
                found[ep] += [row[expert] * (1.0 / copies[expert]) for expert in experts]
        out |= {(ep, pp): math.fsum(terms) for ep, terms in enumerate(found)}
    return out


def _samples_of_pools(folding: Folding, microbatches: Sequence[int]) -> Counter[tuple[int, int]]:
    """(edp, pp) -> micro-batches whose tokens the expert-parallel group there serves, times tp x cp: each rank brings its part of its replica's."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(folding.world):
        found[folding.coord(rank, "edp"), folding.coord(rank, "pp")] += microbatches[folding.replica_of(rank)]
    return found
