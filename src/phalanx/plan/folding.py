"""Two rank grids over one world: attention (tp cp dp pp) and experts (etp ep edp pp).

Decides which rank holds which coordinate, which ranks form a group, which degrees are legal, and which group sums which gradient.
Must never change: the pipeline is the slowest coordinate of both grids, so that both have the same pipeline groups. (Listing 1
of arXiv 2504.14960 puts pp inside dp; in that order the groups agree only when cp*tp == ep*etp.)

    attention: r = tp  + TP *(cp + CP*(dp  + DP *pp))
    experts:   r = etp + ETP*(ep + EP*(edp + EDP*pp))

`dp` and `edp` are derived, never given. Source: arXiv 2504.14960 section 3; rank order of Megatron-Core `tp-cp-ep-dp-pp`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, raise_if

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")

GROUP_AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    # name of the group: (grid, axes along which its members differ)
    "tp": ("attention", ("tp",)),
    "cp": ("attention", ("cp",)),
    "dp": ("attention", ("dp",)),
    "pp": ("attention", ("pp",)),
    "dp_cp": ("attention", ("cp", "dp")),
    "tp_cp": ("attention", ("tp", "cp")),
    "tp_dp_cp": ("attention", ("tp", "cp", "dp")),
    "tp_pp": ("attention", ("tp", "pp")),
    "etp": ("experts", ("etp",)),
    "ep": ("experts", ("ep",)),
    "edp": ("experts", ("edp",)),
    "ep_etp": ("experts", ("etp", "ep")),
    "ep_edp": ("experts", ("ep", "edp")),
    "etp_ep_pp": ("experts", ("etp", "ep", "pp")),
    "world": ("attention", ("tp", "cp", "dp", "pp")),
}
"""Every group that training uses. `embedding` (first and last stage) is built from `pp` and is not listed."""


@dataclass(frozen=True, kw_only=True)
class GradientRule:
    """How the gradient of a family of parameters becomes the gradient of the logical parameter.

    Every rank back-propagates `sum of its token losses / valid tokens of the whole step` (train/loss.py), so the divisor is one:
    `sum_over` names the groups over which partial gradients are added, `shard_over` the group over which ZeRO-1 splits the
    optimizer state, `replicas` the groups whose ranks hold the same reduced gradient (the norm counts each element once).
    With the paper's per-rank mean objective the same table holds with divisor DP*CP for *all* families, never EDP.
    """

    family: str
    sum_over: tuple[str, ...]
    shard_over: str
    replicas: tuple[str, ...]


GRADIENT_RULES: dict[str, GradientRule] = {
    "dense_sharded": GradientRule(family="dense_sharded", sum_over=("dp_cp",), shard_over="dp_cp", replicas=("dp_cp",)),
    "dense_replicated": GradientRule(
        family="dense_replicated", sum_over=("tp", "dp_cp"), shard_over="dp_cp", replicas=("tp", "dp_cp")
    ),
    "expert": GradientRule(family="expert", sum_over=("edp",), shard_over="edp", replicas=("edp",)),
}
"""The only place that decides which ranks sum which gradient (reference: Megatron-LM #5916 for what happens elsewhere)."""


@dataclass(frozen=True, kw_only=True)
class Folding:
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
    def _coords(self) -> dict[str, NDArray[np.int64]]:
        """Axis -> coordinate of every rank, for both grids (`pp` is the same in both)."""
        ranks = np.arange(self.world)
        coords: dict[str, NDArray[np.int64]] = {}
        for axes in (ATTENTION_AXES, EXPERT_AXES):
            stride = 1
            for axis in axes:
                degree = self.degree(axis)
                coords[axis] = (ranks // stride) % degree
                stride *= degree
        return coords

    def coord(self, rank: int, axis: str) -> int:
        """Coordinate of `rank` on `axis` (tp cp dp pp etp ep edp)."""
        return int(self._coords[axis][rank])

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called `name` (a key of GROUP_AXES), ranks ascending in each, ordered by their first rank."""
        grid, varying = GROUP_AXES[name]
        axes = ATTENTION_AXES if grid == "attention" else EXPERT_AXES
        key = np.zeros(self.world, dtype=np.int64)
        for axis in axes:
            if axis not in varying:
                key = key * self.degree(axis) + self._coords[axis]
        order = np.argsort(key, kind="stable")
        size = int(np.prod([self.degree(a) for a in varying]))
        members = [tuple(int(r) for r in row) for row in order.reshape(-1, size)]
        return tuple(sorted(members))

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The group called `name` that `rank` belongs to."""
        grid, varying = GROUP_AXES[name]
        axes = ATTENTION_AXES if grid == "attention" else EXPERT_AXES
        same = np.ones(self.world, dtype=bool)
        for axis in axes:
            if axis not in varying:
                same &= self._coords[axis] == self._coords[axis][rank]
        return tuple(int(r) for r in np.flatnonzero(same))

    def check(self) -> None:
        """Raise `PlanError` with all problems, if the degrees do not tile the world."""
        raise_if(folding_problems(self), PlanError, subject="folding")

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "dp": self.dp, "edp": self.edp}, sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The folding in a few lines that a person reads."""
        lines = [
            f"{self.world} ranks, two grids over the same ranks",
            f"  attention  tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp}",
            f"  experts    etp {self.etp} x ep {self.ep} x edp {self.edp} x pp {self.pp}",
        ]
        for name in ("dp_cp", "ep", "etp", "edp", "pp"):
            groups = self.groups(name)
            if len(groups[0]) > 1:
                shown = " ".join(_short(g) for g in groups[:4]) + (" ..." if len(groups) > 4 else "")
                lines.append(f"  {name:<9}  {len(groups)} groups of {len(groups[0])}: {shown}")
        return "\n".join(lines)

    def label(self) -> str:
        """One word for tables: the degrees above one, e.g. `dp8|ep4.edp2`."""
        left = ".".join(f"{a}{self.degree(a)}" for a in ATTENTION_AXES if self.degree(a) > 1) or "1"
        right = ".".join(f"{a}{self.degree(a)}" for a in EXPERT_AXES if self.degree(a) > 1) or "1"
        return f"{left}|{right}"


def _short(group: tuple[int, ...]) -> str:
    if len(group) <= 6:
        return "(" + " ".join(map(str, group)) + ")"
    return f"({group[0]} {group[1]} ... {group[-1]})"


def _nearest_divisor(value: int, total: int) -> int:
    """The divisor of `total` closest to `value`, the smaller one on a tie."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))


def folding_problems(folding: Folding) -> list[Problem]:
    """What is wrong with the degrees alone. Model and sequence are checked by `fit_problems`."""
    f = folding
    problems = [
        Problem(where=f"folding.{axis}", value=f.degree(axis), rule="a degree is at least 1", hint="use 1")
        for axis in ("world", "tp", "cp", "pp", "ep", "etp")
        if f.degree(axis) < 1
    ]
    if problems:
        return problems
    for names, given in ((("tp", "cp", "pp"), "dp"), (("etp", "ep", "pp"), "edp")):
        product = int(np.prod([f.degree(n) for n in names]))
        if f.world % product:
            legal = _nearest_divisor(product, f.world)
            shown = " x ".join(f"{n} {f.degree(n)}" for n in names)
            problems.append(
                Problem(
                    where="folding." + ", folding.".join(names),
                    value=product,
                    rule=f"{shown} must divide the {f.world} ranks, so that {given} is a whole number",
                    hint=f"the nearest product that does is {legal}",
                )
            )
    return problems


def make_folding(*, world: int, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Folding:
    """A checked folding. Raises `PlanError` naming every problem."""
    folding = Folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    folding.check()
    return folding


def to_dict(folding: Folding) -> dict[str, Any]:
    """Degrees as a plain dict, derived ones included."""
    return {**asdict(folding), "dp": folding.dp, "edp": folding.edp}
