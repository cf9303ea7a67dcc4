"""Is a pipeline schedule right? An independent check of its orders, which knows nothing of how they were made.

Decides what every schedule must keep: each (stage, microbatch) is passed forward once and backward once (B, or I and then W) on the
rank that holds the stage; weight gradients of a stage accumulate in the order of the microbatches; the ranks, each running its actions
in order, all come to the end; and no rank holds more activations than the schedule promises.

Communication rule for "come to the end": a send is posted and never waited for, a receive blocks until the other side has produced.
(`plan/pipeline/comm.py` orders sends and receives such that blocking ones come to the end too.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from phalanx.core.errors import Problem
from phalanx.plan.pipeline.schedule.orders import Action

Orders = Sequence[Sequence[Action]]
SHOWN = 4
"""How many offenders a problem names."""


def order_problems(
    orders: Orders, rank_of_stage: Sequence[int], *, num_microbatches: int, max_live: Sequence[int]
) -> list[Problem]:
    """Everything that is wrong with the orders of all ranks."""
    if len(max_live) != len(orders):
        rule = f"promises a number for each of the {len(orders)} ranks"
        return [Problem(where="schedule.max_live", value=list(max_live), rule=rule)]
    problems = list(_placement(orders, rank_of_stage, num_microbatches))
    problems += _completeness(orders, len(rank_of_stage), num_microbatches)
    problems += [problem for rank, order in enumerate(orders) for problem in _sequence(rank, order)]
    if problems:
        return problems
    problems += _deadlock(orders, len(rank_of_stage))
    for rank, (order, promised) in enumerate(zip(orders, max_live, strict=True)):
        peak = peak_live(order)
        if peak > promised:
            rule = f"holds more activations than the {promised} that the schedule promises"
            problems.append(Problem(where=f"schedule.rank{rank}", value=peak, rule=rule))
    return problems


def peak_live(order: Sequence[Action]) -> int:
    """Most (stage, microbatch) activations alive at once: from the F until the B or the W has ended."""
    live = peak = 0
    for action in order:
        if action.kind == "F":
            live += 1
            peak = max(peak, live)
        elif action.kind in "BW":
            live -= 1
    return peak


def warmup_problems(orders: Orders, *, num_microbatches: int, extra_warmup: Sequence[int]) -> list[Problem]:
    """Ranks that do not do the forwards before their first backward that 1F1B with `extra_warmup` more of them would do."""
    if len(extra_warmup) != len(orders):
        rule = f"gives a number for each of the {len(orders)} ranks"
        return [Problem(where="schedule.extra_warmup", value=list(extra_warmup), rule=rule)]
    problems = []
    for rank, (order, extra) in enumerate(zip(orders, extra_warmup, strict=True)):
        found = next((i for i, action in enumerate(order) if action.kind != "F"), len(order))
        wanted = min(num_microbatches, len(orders) - rank + extra)
        if found != wanted:
            rule = f"does {wanted} forwards before its first backward: 1F1B's and {extra} more"
            problems.append(Problem(where=f"schedule.rank{rank}", value=found, rule=rule))
    return problems


def _placement(orders: Orders, rank_of_stage: Sequence[int], num_microbatches: int) -> Iterator[Problem]:
    num_stages = len(rank_of_stage)
    for rank, order in enumerate(orders):
        inside = [0 <= a.stage < num_stages and 0 <= a.microbatch < num_microbatches for a in order]
        unknown = [str(a) for a, ok in zip(order, inside, strict=True) if not ok]
        if unknown:
            rule = f"stages are 0 .. {num_stages - 1}, microbatches 0 .. {num_microbatches - 1}"
            yield Problem(where=f"schedule.rank{rank}", value=unknown[:SHOWN], rule=rule)
        foreign = [str(a) for a, ok in zip(order, inside, strict=True) if ok and rank_of_stage[a.stage] != rank]
        if foreign:
            yield Problem(where=f"schedule.rank{rank}", value=foreign[:SHOWN], rule="the stage is on another rank")


def _completeness(orders: Orders, num_stages: int, num_microbatches: int) -> Iterator[Problem]:
    counts = Counter(action for order in orders for action in order)
    for stage in range(num_stages):
        for mb in range(num_microbatches):
            found = [counts[Action(kind, stage, mb)] for kind in ("F", "B", "I", "W")]
            if found not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                shown = dict(zip("FBIW", found, strict=True))
                rule = "is passed forward once, and backward once (one B, or one I and one W)"
                yield Problem(where=f"schedule.stage{stage}.microbatch{mb}", value=shown, rule=rule)


def _sequence(rank: int, order: Sequence[Action]) -> Iterator[Problem]:
    """What can be seen on one rank alone: F before B or I, I before W, and the order of accumulation."""
    seen: set[Action] = set()
    accumulated: dict[int, int] = {}
    for action in order:
        kind, stage, mb = action
        before = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
        if before is not None and (before, stage, mb) not in seen:
            yield Problem(where=f"schedule.rank{rank}", value=str(action), rule=f"comes after {before}{stage}.{mb}")
        if kind in "BW":
            if mb <= accumulated.get(stage, -1):
                rule = f"adds to the weight gradient after microbatch {accumulated[stage]}: order decides bits"
                yield Problem(where=f"schedule.rank{rank}", value=str(action), rule=rule)
            accumulated[stage] = mb
        seen.add(action)


def _deadlock(orders: Orders, num_stages: int) -> list[Problem]:
    """Run all ranks in order, with no clock, until none can go on; those that are not at their end wait for ever."""
    forward: set[tuple[int, int]] = {(-1, mb) for order in orders for _, _, mb in order}
    backward = {(num_stages, mb) for _, mb in forward}
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                kind, stage, mb = order[position[rank]]
                if kind == "F" and (stage - 1, mb) not in forward:
                    break
                if kind in "BI" and (stage + 1, mb) not in backward:
                    break
                if kind != "W":
                    (forward if kind == "F" else backward).add((stage, mb))
                position[rank] += 1
                moved = True
    return [
        Problem(where=f"schedule.rank{rank}", value=str(order[at]), rule="deadlocks waiting for the neighbouring stage")
        for rank, (order, at) in enumerate(zip(orders, position, strict=True))
        if at < len(order)
    ]
