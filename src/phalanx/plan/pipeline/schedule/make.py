"""Pipeline schedules: which rank runs which pass of which stage and microbatch, in which order.

Decides the schedule of a run, by name, and which combinations are legal. The orders themselves are in `orders.py`, the check
that trusts none of them in `check.py`, sends and receives in `comm.py`, time in `clock.py`. Must never
change: a schedule depends on its name and a few integers alone, so every rank makes the same one.

    gpipe             all forwards, then all backwards; any v
    1f1b              v = 1; one forward and one backward in turn (PipeDream-flush)
    interleaved_1f1b  any v, any m; stages dealt round (arXiv 2104.04473); with v = 1 the order of 1f1b
    zero_bubble       any v, any m; the same with I and W apart, W filling the end (ZB-H1 of arXiv 2401.10241; v = 1 needs no more memory
                      than the first rank of 1f1b)
    eager_1f1b        v = 1; 1f1b with up to p-1-r further forwards before the first backward of rank r, so that a transfer has the time of
                      a pass to travel (arXiv 2211.05322)
    eager_1f1b_split  the same with I and W apart: the gradient for the stage below travels while W is computed
    zbv               v = 2 in the shape of a V, all backwards split (ZB-V of arXiv 2401.10241)
    dualpipev         v = 2 in the shape of a V, whole backwards beside forwards of the other direction (DualPipeV, arXiv 2412.19437)

p ranks, v virtual stages a rank, m microbatches; e further forwards of a rank. The stage of a rank with number c there is its *chunk* c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from phalanx.core.errors import PlanError, Problem, nearest, raise_if
from phalanx.core.extensions import extensions
from phalanx.core.hashed import Hashed
from phalanx.plan.pipeline.schedule.check import order_problems, peak_live, warmup_problems
from phalanx.plan.pipeline.schedule.orders import (
    Action,
    Kind,
    Order,
    dualpipev_order,
    gpipe_order,
    interleaved_warmup,
    looped_ranks,
    one_f_one_b_order,
    round_sizes,
    vee_ranks,
    zbv_order,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Order",
    "Schedule",
    "make_schedule",
    "most_extra",
    "nearest_extra",
    "nearest_schedule",
    "ScheduleRule",
    "schedule_problems",
    "schedules",
    "splits_backward",
    "spread_extra",
    "stage_ranks",
]


@dataclass(frozen=True, kw_only=True)
class Schedule(Hashed):
    """Ordered actions of each pipeline rank. `max_live` promises how many activations a rank holds at most at once.

    One activation is what a (stage, microbatch) keeps from its F until its B or W has ended.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[Order, ...]
    max_live: tuple[int, ...]
    extra_warmup: tuple[int, ...] = ()
    """Forwards of each rank of the eager schedules before its first backward that 1F1B would do later."""

    @property
    def pp(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def virtual(self) -> int:
        return self.num_stages // self.pp

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is divided in I and W."""
        return any(action.kind == "I" for order in self.actions for action in order)

    @cached_property
    def chunk_of_stage(self) -> tuple[int, ...]:
        """Number of each stage among those of its rank."""
        return tuple(self.stages_of(rank).index(stage) for stage, rank in enumerate(self.rank_of_stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, ascending."""
        return tuple(stage for stage, r in enumerate(self.rank_of_stage) if r == rank)

    def check(self) -> None:
        """Raise `PlanError` with everything that an independent check of the orders finds."""
        problems = order_problems(
            self.actions, self.rank_of_stage, num_microbatches=self.num_microbatches, max_live=self.max_live
        )
        if self.extra_warmup:
            problems += warmup_problems(
                self.actions, num_microbatches=self.num_microbatches, extra_warmup=self.extra_warmup
            )
        raise_if(problems, PlanError, subject=f"schedule {self.name}")

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Most activations that each rank holds at once, counted."""
        return tuple(peak_live(order) for order in self.actions)

    def to_dict(self) -> dict[str, Any]:
        """The whole schedule as plain data; an action is written `F2.5`, kind, stage, microbatch."""
        return {
            "name": self.name,
            "pp": self.pp,
            "virtual": self.virtual,
            "num_microbatches": self.num_microbatches,
            "rank_of_stage": list(self.rank_of_stage),
            "max_live": list(self.max_live),
            "extra_warmup": list(self.extra_warmup),
            "actions": [" ".join(map(str, order)) for order in self.actions],
        }

    def explain(self) -> str:
        """The schedule in a few lines that a person reads."""
        known = schedules()
        rule = known[self.name].about if self.name in known else "an order of its own"
        stages = " ".join(str(rank) for rank in self.rank_of_stage)
        lines = [
            f"{self.name}: {rule}",
            f"  {self.pp} ranks x {self.virtual} virtual stage{'s' if self.virtual > 1 else ''}, {self.num_microbatches} microbatches; ranks of the stages: {stages}",
            f"  activations held at most, by rank: {' '.join(map(str, self.max_live))}",
        ]
        if self.extra_warmup:
            lines.append(f"  forwards ahead of 1F1B, by rank: {' '.join(map(str, self.extra_warmup))}")
        return "\n".join(lines)


# ---- names and rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """What a name stands for: the order of one rank, the bound of its memory, where the stages lie."""

    about: str
    order: Callable[[int, int, int, int, int], Order]
    """(rank, pp, virtual, microbatches, further forwards) -> order of that rank."""
    live: Callable[[int, int, int, int, int], int]
    """The same -> activations that the rank holds at most."""
    virtual: int | None = None
    """Virtual stages that it needs, where there is no choice."""
    vee: bool = False
    eager: bool = False
    """Whether it has forwards ahead of 1F1B, whose number is a choice."""


def _interleaved(rank: int, p: int, v: int, m: int, e: int) -> Order:
    return one_f_one_b_order(rank, pp=p, virtual=v, microbatches=m, warmup=_warmup(rank, p, v, m))


def _warmup(rank: int, p: int, v: int, m: int) -> int:
    """Two forwards for each hop to the last rank give neighbours one microbatch of slack; plain 1F1B (v = 1) has none."""
    return interleaved_warmup(rank, pp=p, virtual=v, microbatches=m, hop=2 if v > 1 else 1)


def _eager(rank: int, p: int, m: int, e: int, *, defer: int | None = None) -> Order:
    """W stands right behind its I: a later W would hold a micro-batch more, and hide nothing that is not hidden so."""
    warmup = min(m, p - 1 - rank + e)
    return one_f_one_b_order(rank, pp=p, virtual=1, microbatches=m, warmup=warmup, defer=defer)


def _zero_bubble(rank: int, p: int, v: int, m: int, e: int) -> Order:
    """Rank r defers W by r backwards: then all ranks hold as much as the first, which needs it most."""
    warmup = interleaved_warmup(rank, pp=p, virtual=v, microbatches=m, hop=1)
    return one_f_one_b_order(rank, pp=p, virtual=v, microbatches=m, warmup=warmup, defer=rank)


SCHEDULES: Mapping[str, ScheduleRule] = {
    "gpipe": ScheduleRule(
        about="all forwards, then all backwards",
        order=lambda r, p, v, m, e: gpipe_order(r, pp=p, virtual=v, microbatches=m),
        live=lambda r, p, v, m, e: v * m,
    ),
    "1f1b": ScheduleRule(
        about="one forward and one backward in turn",
        order=_interleaved,
        live=lambda r, p, v, m, e: min(m, p - r),
        virtual=1,
    ),
    "interleaved_1f1b": ScheduleRule(
        about="one forward and one backward in turn, stages dealt round the ranks",
        order=_interleaved,
        live=lambda r, p, v, m, e: min(v * m, _warmup(r, p, v, m) + 1),
    ),
    "zero_bubble": ScheduleRule(
        about="one forward and one input gradient in turn, weight gradients deferred into the bubble (ZB-H1)",
        order=_zero_bubble,
        live=lambda r, p, v, m, e: min(v * m, p + (v - 1) * round_sizes(p, m)[0]),
    ),
    "eager_1f1b": ScheduleRule(
        about="1f1b with forwards ahead, so that transfers overlap with passes (eager-1F1B)",
        order=lambda r, p, v, m, e: _eager(r, p, m, e),
        live=lambda r, p, v, m, e: min(m, p - r + e),
        virtual=1,
        eager=True,
    ),
    "eager_1f1b_split": ScheduleRule(
        about="eager_1f1b whose input gradients travel while weight gradients are computed",
        order=lambda r, p, v, m, e: _eager(r, p, m, e, defer=0),
        live=lambda r, p, v, m, e: min(m, p - r + e),
        virtual=1,
        eager=True,
    ),
    "zbv": ScheduleRule(
        about="stages down the ranks and up again, backwards split, no bubble in the steady phase (ZB-V)",
        order=lambda r, p, v, m, e: zbv_order(r, pp=p, microbatches=m),
        live=lambda r, p, v, m, e: min(2 * p, 2 * m, m + r + 1),
        virtual=2,
        vee=True,
    ),
    "dualpipev": ScheduleRule(
        about="stages down the ranks and up again, each forward overlapped with a backward of the other direction (DualPipeV)",
        order=lambda r, p, v, m, e: dualpipev_order(r, pp=p, microbatches=m),
        live=lambda r, p, v, m, e: min(2 * p + 1, 2 * m, m + r + 1),
        virtual=2,
        vee=True,
    ),
}
"""Phalanx's own schedules by name."""


@cache
def schedules() -> Mapping[str, ScheduleRule]:
    """All schedules by name: our own, and those of installed packages (entry points of `phalanx.schedules`). Raises `ConfigError` for one that is no `ScheduleRule`."""
    added = extensions("schedules", taken=SCHEDULES)
    return MappingProxyType({**SCHEDULES, **{name: each.load(ScheduleRule) for name, each in added.items()}})


def stage_ranks(name: str, *, pp: int, virtual: int) -> tuple[int, ...]:
    """Pipeline rank of every virtual stage of a schedule that is known."""
    return vee_ranks(pp) if schedules()[name].vee else looped_ranks(pp, virtual)


@cache
def splits_backward(name: str) -> bool:
    """Whether a schedule defers weight gradients."""
    made = make_schedule(name, pp=2, virtual=schedules()[name].virtual or 1, num_microbatches=4)
    return made.splits_backward


def schedule_problems(
    name: str, *, pp: int, virtual: int, num_microbatches: int, extra_warmup: Sequence[int] | None = None
) -> list[Problem]:
    """Why there is no such schedule; all reasons, each with the nearest legal value."""
    problems = [
        Problem(where=f"schedule.{where}", value=value, rule="must be at least 1", hint="nearest legal: 1")
        for where, value in (("pp", pp), ("virtual", virtual), ("microbatches", num_microbatches))
        if value < 1
    ]
    if name not in schedules():
        hint = nearest(name, schedules())
        return [*problems, Problem(where="schedule.name", value=name, rule="is not a schedule", hint=hint)]
    needed = schedules()[name].virtual
    if needed is not None and virtual != needed and virtual >= 1:
        hint = f"nearest legal: {needed}" + (", or interleaved_1f1b" if name == "1f1b" else "")
        text = f"must be {needed}: {name} has {needed} virtual stage{'s' if needed > 1 else ''} a rank"
        problems.append(Problem(where="schedule.virtual", value=virtual, rule=text, hint=hint))
    if extra_warmup is not None and pp >= 1:
        problems += _extra_problems(name, tuple(extra_warmup), pp)
    return problems


def most_extra(pp: int) -> tuple[int, ...]:
    """Forwards ahead of 1F1B with which each rank has one to spare for each hop to the last one: 2(p-r)-1 activations."""
    return tuple(pp - 1 - rank for rank in range(pp))


def spread_extra(given: Sequence[int], *, pp: int) -> tuple[int, ...]:
    """`given` for each rank; a single number means as many on every rank, as far as the rank can use them."""
    if len(given) == 1 and pp > 1:
        return tuple(min(given[0], most) for most in most_extra(pp))
    return tuple(given)


def nearest_extra(given: Sequence[int], *, pp: int) -> tuple[int, ...]:
    """The largest legal numbers that are at most `given`; a missing one is 0."""
    padded = [*spread_extra(given, pp=pp), *[0] * pp][:pp]
    out: list[int] = []
    for wished, most in zip(padded, most_extra(pp), strict=True):
        bound = min(most, out[-1] + 1) if out else most
        out.append(max(0, min(wished, bound)))
    return tuple(out)


def _extra_problems(name: str, given: tuple[int, ...], pp: int) -> list[Problem]:
    where = "schedule.extra_warmup"
    if not schedules()[name].eager:
        names = " or ".join(known for known, rule in schedules().items() if rule.eager)
        rule = f"has no effect: {name} runs no extra warm-up forwards"
        return [Problem(where=where, value=list(given), rule=rule, hint=f"leave it out, or use schedule {names}")]
    hint = "nearest legal: " + " ".join(map(str, nearest_extra(given, pp=pp)))
    if len(given) not in (1, pp):
        rule = f"gives one number for each of the {pp} ranks, or one for all"
        return [Problem(where=where, value=list(given), rule=rule, hint=hint)]
    if len(given) == 1 and not 0 <= given[0] <= pp - 1:
        rule = f"must be 0 to {pp - 1}, what the first of {pp} ranks can use"
        return [Problem(where=where, value=list(given), rule=rule, hint=hint)]
    problems = []
    extra = spread_extra(given, pp=pp)
    for rank, (number, most) in enumerate(zip(extra, most_extra(pp), strict=True)):
        if not 0 <= number <= most:
            rule = f"must be 0 to {most}: more than one for each rank behind it hides nothing more"
            problems.append(Problem(where=f"{where}[{rank}]", value=number, rule=rule, hint=hint))
        elif rank and number > extra[rank - 1] + 1:
            rule = f"must be at most {extra[rank - 1] + 1}: rank {rank - 1} would wait for a gradient, and rank {rank} for its forwards"
            problems.append(Problem(where=f"{where}[{rank}]", value=number, rule=rule, hint=hint))
    return problems


def nearest_schedule(name: str, *, pp: int, virtual: int, num_microbatches: int) -> tuple[str, int, int, int]:
    """(name, pp, virtual, microbatches) of the legal schedule nearest to what was asked for; an unknown name becomes 1f1b's family."""
    name = name if name in schedules() else "interleaved_1f1b"
    needed = schedules()[name].virtual
    return name, max(1, pp), needed if needed is not None else max(1, virtual), max(1, num_microbatches)


def make_schedule(
    name: str, *, pp: int, virtual: int, num_microbatches: int, extra_warmup: Sequence[int] | None = None
) -> Schedule:
    """The schedule of that name. Raises `PlanError` naming every problem.

    `extra_warmup`, of an eager schedule alone: forwards ahead of 1F1B on each rank, or one number for all (None: `most_extra`).
    """
    problems = schedule_problems(
        name, pp=pp, virtual=virtual, num_microbatches=num_microbatches, extra_warmup=extra_warmup
    )
    raise_if(problems, PlanError, subject="schedule")
    rule, sizes = schedules()[name], (pp, virtual, num_microbatches)
    extra = most_extra(pp) if extra_warmup is None else spread_extra(extra_warmup, pp=pp)
    made = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        rank_of_stage=stage_ranks(name, pp=pp, virtual=virtual),
        actions=tuple(rule.order(rank, *sizes, extra[rank]) for rank in range(pp)),
        max_live=tuple(rule.live(rank, *sizes, extra[rank]) for rank in range(pp)),
        extra_warmup=extra if rule.eager else (),
    )
    if name not in SCHEDULES:  # those are checked by our tests; of this one nothing is known
        made.check()
    return made
