"""Two rank grids over one world: attention (tp cp dp pp) and experts (etp ep edp pp).

Decides which rank holds which coordinate, which ranks form a group, which degrees are legal for a model and a sequence, and which
group sums which gradient. Must never change: the pipeline is the slowest coordinate of both grids, so that both have the same
pipeline groups. (Listing 1 of arXiv 2504.14960 puts pp inside dp; in that order the groups agree only when cp*tp == ep*etp.)

    attention: r = tp  + TP *(cp + CP*(dp  + DP *pp))
    experts:   r = etp + ETP*(ep + EP*(edp + EDP*pp))

`dp` and `edp` are derived, never given. Source: arXiv 2504.14960 section 3; rank order of Megatron-Core `tp-cp-ep-dp-pp`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.rules import RANKS
from phalanx.plan.mapping.grid import Grid, RankSet, pp_groups_equal
from phalanx.plan.model import ModelSpec

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
DEGREES = ("tp", "cp", "pp", "ep", "etp")
"""What a person gives; `dp` and `edp` follow from the world."""

GROUP_AXES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # name of the group: (grid, axes along which its members differ)
    "tp": ("attention", ("tp",)),
    "cp": ("attention", ("cp",)),
    "dp": ("attention", ("dp",)),
    "pp": ("attention", ("pp",)),
    "dp_cp": ("attention", ("cp", "dp")),
    "tp_cp": ("attention", ("tp", "cp")),
    "tp_dp_cp": ("attention", ("tp", "cp", "dp")),
    "etp": ("experts", ("etp",)),
    "ep": ("experts", ("ep",)),
    "edp": ("experts", ("edp",)),
    "ep_etp": ("experts", ("etp", "ep")),
    "world": ("attention", ("tp", "cp", "dp", "pp")),
}
"""Groups that lie along axes: all that training uses, but for `embedding`, which is made of the ends of each `pp` group."""

GROUP_NAMES: tuple[str, ...] = (*GROUP_AXES, "embedding")
"""Everything that `Folding.groups` knows."""

PASS_GROUPS = ("tp", "cp", "tp_cp", "micro", "ep", "etp", "ep_etp", "tp_dp_cp", "pp")
"""Groups that the passes of a step communicate over: inside layers, and between stages (pp)."""
STEP_GROUPS = ("tp", "dp_cp", "embedding", "edp", "ep", "tp_dp_cp", "world")
"""Groups that the rest of a step communicates over: sums of gradients and of replicas, parameters that are published, counts and the vote."""
SUMMED_GROUPS = ("world", "tp_dp_cp", "ep", "pp")
"""Groups over which few bytes are summed, and nothing is gathered or reduced to shards."""


def exchanged_groups(rows: str) -> tuple[str, ...]:
    """Groups of `PASS_GROUPS` of which every rank sends to every other one, where the rows of MoE layers are exchanged over `rows` (`DispatchSpec.rows_over`). Sums of rows are exchanges of
    their parts too (`Collectives.reduce_scatter_rows`)."""
    return ("tp", "etp", "ep") if rows == "ep" else ("tp", rows)


@dataclass(frozen=True, kw_only=True)
class GradientRule:
    """How the gradient of a family of parameters becomes the gradient of the logical parameter.

    Every rank back-propagates `sum of its token losses / valid tokens of the whole step` (train/step/loss.py), so the divisor is one:
    `sum_over` names the groups over which partial gradients are added, `shard_over` the group over which ZeRO-1 splits the
    optimizer state, `replicas` the groups whose ranks hold the same reduced gradient (the norm counts each element once).
    With the paper's per-rank mean objective the same table holds with divisor DP*CP for *all* families, never EDP.
    """

    family: str
    sum_over: tuple[str, ...]
    shard_over: str
    replicas: tuple[str, ...]


GRADIENT_RULES: Mapping[str, GradientRule] = {
    "dense_sharded": GradientRule(family="dense_sharded", sum_over=("dp_cp",), shard_over="dp_cp", replicas=("dp_cp",)),
    "dense_replicated": GradientRule(
        family="dense_replicated", sum_over=("tp", "dp_cp"), shard_over="dp_cp", replicas=("tp", "dp_cp")
    ),
    "dense_tied": GradientRule(
        family="dense_tied", sum_over=("embedding", "dp_cp"), shard_over="dp_cp", replicas=("embedding", "dp_cp")
    ),
    "expert": GradientRule(family="expert", sum_over=("edp",), shard_over="edp", replicas=("edp",)),
}
"""The only place that decides which ranks sum which gradient (reference: Megatron-LM #5916 for what happens elsewhere).

Experts with replicas: edp is 1, and in its place the holders of each expert add up, wherever in ep they are (`plan/layout/holders.py`)."""


@dataclass(frozen=True, kw_only=True)
class Folding(Hashed):
    """Degrees of both grids over `world` ranks. Construct with `make_folding`, which checks them."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    @cached_property
    def attention(self) -> Grid:
        return Grid(tuple((axis, self.degree(axis)) for axis in ATTENTION_AXES))

    @cached_property
    def experts(self) -> Grid:
        return Grid(tuple((axis, self.degree(axis)) for axis in EXPERT_AXES))

    def _along(self, name: str) -> tuple[Grid, tuple[str, ...]]:
        grid, varying = GROUP_AXES[name]
        return (self.attention if grid == "attention" else self.experts), varying

    def coord(self, rank: int, axis: str) -> int:
        """Coordinate of `rank` on `axis` (tp cp dp pp etp ep edp)."""
        return (self.attention if axis in ATTENTION_AXES else self.experts).coord(rank, axis)

    # ---- what a rank's stage is: the same for all, here (`plan/mapping/stage_foldings.py` has the other case)

    def of_rank(self, rank: int) -> Folding:
        """The degrees of the rank's pipeline stage."""
        return self

    @property
    def replicas(self) -> int:
        """Pipelines side by side, each with its own micro-batches."""
        return self.dp

    def replica_of(self, rank: int) -> int:
        """The pipeline that a rank is part of."""
        return self.coord(rank, "dp")

    def share_of(self, rank: int) -> tuple[int, int]:
        """(which, of how many) parts of the sequences of a micro-batch the rank works on: all of them."""
        return 0, 1

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called `name` (one of GROUP_NAMES): they partition the world, ranks ascending, ordered by first rank."""
        if name == "embedding":
            return tuple(sorted(part for group in self.groups("pp") for part in _ends(group)))
        grid, varying = self._along(name)
        return grid.groups(varying)

    def embedding_groups(self, table_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Groups that share a tied embedding where the pipeline ranks `table_ranks` hold it (`StagePlan.table_ranks`).

        They partition the world: whoever shares nothing is alone. `groups("embedding")` is the case of first and last rank.
        """
        parts = []
        for group in self.groups("pp"):
            holders = tuple(sorted(group[index] for index in table_ranks))
            parts += [holders, *((rank,) for rank in group if rank not in holders)]
        return tuple(sorted(parts))

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The group called `name` that `rank` belongs to."""
        if name == "embedding":
            return next(part for part in _ends(self.group_of(rank, "pp")) if rank in part)
        grid, varying = self._along(name)
        return grid.group_of(rank, varying)

    def rank_set(self, rank: int, name: str) -> RankSet:
        """`group_of`, not listed; of no tied embedding."""
        grid, varying = self._along(name)
        return grid.rank_set(rank, varying)

    @property
    def pp_groups_equal(self) -> bool:
        """Whether both grids really have the same pipeline groups, computed from the rank lists of both."""
        return pp_groups_equal(self.attention, self.experts)

    @property
    def group_names(self) -> tuple[str, ...]:
        """What `groups` knows."""
        return GROUP_NAMES

    def process_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every distinct set of more than one rank that training communicates over, in the order in which it is created."""
        found = dict.fromkeys(group for name in GROUP_NAMES for group in self.groups(name) if len(group) > 1)
        return tuple(found)

    def check(self) -> None:
        """Raise `PlanError` with all problems, if the degrees do not tile the world."""
        raise_if(folding_problems(self), PlanError, subject="folding")

    def to_dict(self) -> dict[str, Any]:
        """Degrees, derived ones included."""
        return {**super().to_dict(), "dp": self.dp, "edp": self.edp}

    def explain(self) -> str:
        """The folding in a few lines that a person reads."""
        same = "the same in both grids" if self.pp_groups_equal else "DIFFERENT in the two grids"
        lines = [
            f"{self.world} rank{'' if self.world == 1 else 's'}, two grids over the same ranks; pipeline groups are {same}",
            f"  attention  tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp}",
            f"  experts    etp {self.etp} x ep {self.ep} x edp {self.edp} x pp {self.pp}",
        ]
        for name in GROUP_NAMES:
            groups = [g for g in self.groups(name) if len(g) > 1]
            if groups and name != "world":
                shown = " ".join(_short(g) for g in groups[:3]) + (" ..." if len(groups) > 3 else "")
                lines.append(f"  {name:<9}  {len(groups)} of {len(groups[0])} ranks: {shown}")
        lines.append("  gradients  " + "; ".join(_rule_text(rule) for rule in GRADIENT_RULES.values()))
        return "\n".join(lines)

    def label(self) -> str:
        """One word for tables: the degrees above one, e.g. `dp8|ep4.edp2`."""
        left = ".".join(f"{a}{self.degree(a)}" for a in ATTENTION_AXES if self.degree(a) > 1) or "1"
        right = ".".join(f"{a}{self.degree(a)}" for a in EXPERT_AXES if self.degree(a) > 1) or "1"
        return f"{left}|{right}"


def _ends(group: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A pipeline group parted into (first, last) and single middle stages, which share the embedding with nobody."""
    if len(group) <= 2:
        return [group]
    return [(group[0], group[-1]), *((rank,) for rank in group[1:-1])]


def _short(group: tuple[int, ...]) -> str:
    if len(group) <= 6:
        return "(" + " ".join(map(str, group)) + ")"
    return f"({group[0]} {group[1]} ... {group[-1]})"


def _rule_text(rule: GradientRule) -> str:
    return f"{rule.family} summed over {' and '.join(rule.sum_over)}"


# ---- legality -------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _divisors(total: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return tuple(sorted({*small, *(total // d for d in small)}))


@lru_cache(maxsize=64)
def _triples(world: int) -> tuple[tuple[int, int, int], ...]:
    """All (a, b, c) whose product divides `world`, ascending."""
    return tuple(
        (a, b, c) for a in _divisors(world) for b in _divisors(world // a) for c in _divisors(world // (a * b))
    )


_Degrees = TypeVar("_Degrees", bound=tuple[int, ...])


def _nearest(found: Sequence[_Degrees], wanted: Sequence[int]) -> _Degrees | None:
    """Those of `found`, in ascending order, that are fewest doublings away from `wanted`; of several the first."""
    logs = [math.log2(d) for d in wanted]

    def distance(degrees: _Degrees) -> float:
        return round(math.fsum([abs(_log2(d) - log) for d, log in zip(degrees, logs, strict=True)]), 6)

    return min(found, key=lambda degrees: (distance(degrees), degrees), default=None)


_log2 = lru_cache(maxsize=4096)(math.log2)


def folding_problems(folding: Folding, *, nearest: Folding | None = None) -> list[Problem]:
    """What is wrong with the degrees alone. Model and sequence are checked by `fit_problems`.

    `nearest` is a legal folding to hint at, where the caller knows more than the degrees.
    """
    problems = [
        Problem(where=f"folding.{axis}", value=degree, rule=RANKS.refusal(degree), hint="use 1")
        for axis in ("world", *DEGREES)
        if not RANKS.allows(degree := folding.degree(axis))
    ]
    if problems:
        return problems
    for names, given in ((("tp", "cp", "pp"), "dp"), (("etp", "ep", "pp"), "edp")):
        degrees = [folding.degree(n) for n in names]
        if folding.world % math.prod(degrees):
            legal = None if nearest is None else [nearest.degree(n) for n in names]
            problems.append(_tile_problem(folding.world, names, degrees, given, legal=legal))
    return problems


def _tile_problem(
    world: int, names: Sequence[str], degrees: Sequence[int], given: str, *, legal: Sequence[int] | None
) -> Problem:
    legal = legal or _nearest(_triples(world), degrees) or degrees
    return Problem(
        where="folding." + ", folding.".join(names),
        value=None,  # of three settings: the rule has them
        rule=f"{_named(names, degrees)} must divide the {world} ranks, so that {given} is a whole number",
        hint=f"the nearest that does is {_named(names, legal)}",
    )


def _named(names: Sequence[str], degrees: Sequence[int]) -> str:
    return " x ".join(f"{n} {d}" for n, d in zip(names, degrees, strict=True))


@dataclass(frozen=True)
class _Rule:
    """A condition on the degree of one axis, in words and as a function."""

    axis: str
    text: str
    holds: Callable[[int], bool]
    way_out: str = ""
    """Another setting that lifts the rule."""


def _divides(axis: str, name: str, total: int) -> _Rule:
    return _Rule(axis, f"must divide {name} = {total}", lambda degree: total % degree == 0)


def _attention_rules(spec: ModelSpec, *, seq_len: int, cp: int) -> list[_Rule]:
    rules = [_divides("tp", "num_heads", spec.num_heads), _divides("tp", "vocab", spec.vocab)]
    if spec.mla is None:
        rules.append(_kv_rule(spec))
    if spec.shared_ffn and spec.moe_layers:
        rules.append(_divides("tp", "shared_ffn", spec.shared_ffn))
    if spec.dense_layers:
        rules.append(_divides("tp", "dense_ffn", spec.dense_ffn))
    zigzag = f"needs two equal chunks a rank (zigzag) of the sequence of {seq_len}"
    rules.append(_Rule("cp", zigzag, lambda degree: degree == 1 or seq_len % (2 * degree) == 0))
    if seq_len % cp == 0:  # else cp has its own problem
        part = f"must divide {seq_len // cp}, the part of the sequence that a cp rank holds (sequence parallel)"
        rules.append(_Rule("tp", part, lambda degree: seq_len // cp % degree == 0))
    rules.append(_Rule("pp", f"must not exceed num_layers = {spec.num_layers}", lambda d: d <= spec.num_layers))
    return rules


def _ulysses_rules(spec: ModelSpec, *, tp: int) -> list[_Rule]:
    """Each cp rank attends with whole heads of its tp rank: an even share of the query heads, and whole key/value heads that serve them."""
    if spec.num_heads % tp:  # tp has its own problem
        return []
    heads, kv = spec.num_heads // tp, max(1, spec.num_kv_heads // tp)
    way_out = 'folding.cp_method = "ring"'
    text = f"must divide {heads}, the query heads of a tp rank (ulysses)"
    rules = [_Rule("cp", text, lambda cp: heads % cp == 0, way_out)]
    if spec.mla is None:
        text = f"must divide {kv}, the key/value heads of a tp rank, or be a multiple of it (ulysses)"
        rules.append(_Rule("cp", text, lambda cp: kv % cp == 0 or cp % kv == 0, way_out))
    return rules


def _kv_rule(spec: ModelSpec) -> _Rule:
    """Each rank computes whole key/value heads: an even share of them, or one that tp / kv ranks compute alike.

    Storage stays sharded either way (`plan/layout/parameters.py` splits the rows of wk and wv evenly), so the gradient rules do not change.
    """
    kv, rows = spec.num_kv_heads, spec.num_kv_heads * spec.head_dim
    text = f"must divide num_kv_heads = {kv}, or be a multiple of it that divides their {rows} rows (then heads are replicated)"
    return _Rule("tp", text, lambda tp: kv % tp == 0 or (tp % kv == 0 and rows % tp == 0))


def _expert_rules(spec: ModelSpec, *, replicated: bool = False) -> list[_Rule]:
    if not spec.moe_layers:
        text = "has no effect in a model without experts"
        return [_Rule(axis, text, lambda degree: degree == 1) for axis in ("ep", "etp")]
    by_ep = [] if replicated else [_divides("ep", "num_experts", spec.num_experts)]
    return [*by_ep, _divides("etp", "expert_ffn", spec.expert_ffn)]


def _broken(rules: Sequence[_Rule], folding: Folding) -> list[Problem]:
    out = []
    for rule in rules:
        degree = folding.degree(rule.axis)
        if rule.holds(degree):
            continue
        ways = [*_nearest_degree(rules, folding, rule.axis), *([rule.way_out] if rule.way_out else [])]
        out.append(Problem(where=f"folding.{rule.axis}", value=degree, rule=rule.text, hint=", or ".join(ways)))
    return out


def _nearest_degree(rules: Sequence[_Rule], folding: Folding, axis: str) -> list[str]:
    """The legal degree of `axis` that is nearest, as a hint; beside the other degrees if one of them tiles the world so."""
    mine = [r for r in rules if r.axis == axis]
    legal = [d for d in _divisors(folding.world) if all(r.holds(d) for r in mine)]
    legal = [d for d in legal if not folding_problems(replace(folding, **{axis: d}))] or legal
    degree = folding.degree(axis)
    return [f"nearest legal: {axis} {min(legal, key=lambda d: (abs(d - degree), d))}"] if legal else []


def fit_problems(
    folding: Folding,
    spec: ModelSpec,
    *,
    seq_len: int,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    cp_method: str = "ring",
    slots_per_rank: int | None = None,
) -> list[Problem]:
    """Everything that keeps `spec` from running under `folding`, degrees included, each with the nearest legal value.

    `global_batch` and `micro_batch` (sequences) add the rule that every data-parallel rank runs as many micro-batches; `cp_method` is
    that of the recipe. With `slots_per_rank` (experts have replicas) ep need not divide the experts: slots are not theirs by number.
    """
    if any(folding.degree(axis) < 1 for axis in ("world", *DEGREES)):
        return folding_problems(folding)
    rules = _attention_rules(spec, seq_len=seq_len, cp=folding.cp) + _expert_rules(
        spec, replicated=slots_per_rank is not None
    )
    if cp_method == "ulysses":
        rules += _ulysses_rules(spec, tp=folding.tp)
    problems = folding_problems(folding)
    if problems:
        near = nearest_folding(folding, spec, seq_len=seq_len, cp_method=cp_method)
        problems = folding_problems(folding, nearest=near)
    problems += _broken(rules, folding)
    if slots_per_rank is not None and not problems:
        problems += _slot_problems(folding, spec, slots_per_rank)
    if global_batch is not None and micro_batch is not None and folding.dp:
        problems += _batch_problems(folding, global_batch=global_batch, micro_batch=micro_batch)
    return problems


def _slot_problems(folding: Folding, spec: ModelSpec, slots: int) -> list[Problem]:
    """Too few slots, or several expert-parallel groups where replicas are spread over one."""
    problems = []
    if spec.moe_layers and folding.edp > 1:
        pool = folding.ep * folding.edp
        rule = f"experts with replicas (resilience.slots_per_rank) have one expert-parallel group of all {pool} ranks that etp and pp leave"
        problems.append(Problem(where="folding.ep", value=folding.ep, rule=rule, hint=f"leave it out, or set {pool}"))
    elif spec.moe_layers and folding.ep * slots < spec.num_experts:
        rule = f"{spec.num_experts} experts need a slot each, and {folding.ep} ranks have {folding.ep * slots}"
        hint = f"at least {-(-spec.num_experts // folding.ep)}"
        problems.append(Problem(where="resilience.slots_per_rank", value=slots, rule=rule, hint=hint))
    return problems


def _batch_problems(folding: Folding, *, global_batch: int, micro_batch: int) -> list[Problem]:
    unit = micro_batch * folding.dp
    if unit > 0 and global_batch > 0 and global_batch % unit == 0:
        return []
    legal = max(1, round(global_batch / unit)) * unit if unit > 0 else 1
    rule = f"must be a positive multiple of micro_batch {micro_batch} x dp {folding.dp}"
    hint = f"nearest legal: {legal}"
    if unit > 0 and global_batch > 0 and global_batch % folding.dp == 0:
        hint += f", or train.micro_batch = {math.gcd(global_batch // folding.dp, micro_batch)}"
    if micro_batch > 0 and global_batch % micro_batch == 0 and global_batch // micro_batch >= folding.dp:
        hint += ', or resilience.mode = "fast", whose ranks may have unequal shares'
    return [Problem(where="train.global_batch", value=global_batch, rule=rule, hint=hint)]


def legal_foldings(
    world: int,
    spec: ModelSpec,
    *,
    seq_len: int,
    axes: Sequence[str] = DEGREES,
    cp_method: str = "ring",
) -> Iterator[Folding]:
    """Every legal folding of `spec` over `world` ranks, ascending in (pp, tp, cp, ep, etp); degrees outside `axes` stay 1."""
    free = {axis: axis in axes for axis in DEGREES}

    def sides(names: tuple[str, str], rules: Callable[[int], Sequence[_Rule]], inner: int) -> list[tuple[int, int]]:
        """Legal degrees of the two axes `names` whose product divides `inner`; `rules` depends on the second."""
        pairs = ((a, b) for a in _divisors(inner) for b in _divisors(inner // a))
        return [
            pair
            for pair in pairs
            if all(free[n] or d == 1 for n, d in zip(names, pair, strict=True))
            and all(rule.holds(pair[names.index(rule.axis)]) for rule in rules(pair[1]) if rule.axis in names)
        ]

    for pp in _divisors(world):
        if pp > spec.num_layers or (pp > 1 and not free["pp"]):
            continue
        attention = sides(("tp", "cp"), lambda cp: _attention_rules(spec, seq_len=seq_len, cp=cp), world // pp)
        if cp_method == "ulysses":
            attention = [(tp, cp) for tp, cp in attention if all(r.holds(cp) for r in _ulysses_rules(spec, tp=tp))]
        experts = sides(("ep", "etp"), lambda _: _expert_rules(spec), world // pp)
        for (tp, cp), (ep, etp) in itertools.product(attention, experts):
            yield Folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def nearest_folding(folding: Folding, spec: ModelSpec, *, seq_len: int, cp_method: str = "ring") -> Folding | None:
    """The legal folding over the same ranks that is fewest doublings away from `folding`, if there is any."""
    if folding.world < 1:
        return None
    found = _nearest(
        _legal_degrees(folding.world, spec, seq_len, cp_method), [max(1, folding.degree(a)) for a in DEGREES]
    )
    return None if found is None else Folding(world=folding.world, **dict(zip(DEGREES, found, strict=True)))


@lru_cache(maxsize=32)
def _legal_degrees(world: int, spec: ModelSpec, seq_len: int, cp_method: str) -> tuple[tuple[int, ...], ...]:
    legal = legal_foldings(world, spec, seq_len=seq_len, cp_method=cp_method)
    return tuple(tuple(f.degree(a) for a in DEGREES) for f in legal)


def make_folding(*, world: int, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Folding:
    """A folding whose degrees tile the world. Raises `PlanError` naming every problem."""
    folding = Folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    folding.check()
    return folding
