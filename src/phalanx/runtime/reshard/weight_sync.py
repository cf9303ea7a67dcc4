"""Weights of running ranks delivered to other ranks of the same group, again and again: a training mesh feeds an inference mesh.

Decides nothing: the plan is made once, from the layouts of all tensors together. Must never change: receivers have two sets of tensors and read one of them
while the other is filled; the sets are exchanged when all of a version is there, and never otherwise. So a reader sees whole versions only, and
one that fails on the way leaves the last one in place. A delivery costs one integer beside its bytes (`resharder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import TensorLayout
from phalanx.plan.reshard import Move
from phalanx.runtime.reshard.resharder import PreparedMove, Resharder


class WeightSync:
    """Deliveries from layouts `src` to layouts `dst`, both by name of tensor; `dtypes` by name too. Made by all ranks with the same arguments.

    What a rank holds afterwards is in `weights`, empty before the first delivery and on ranks that only send.
    """

    def __init__(
        self,
        resharder: Resharder,
        *,
        src: Mapping[str, TensorLayout],
        dst: Mapping[str, TensorLayout],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device | None = None,
    ) -> None:
        raise_if(_name_problems(src, dst, dtypes), PlanError, subject="weights to be delivered")
        self.names = tuple(sorted(src))
        self.version = 0
        """Deliveries that were completed."""
        self.weights: Mapping[str, torch.Tensor] = {}
        self._resharder = resharder
        self._device = device if device is not None else torch.device("cpu")
        self._dtypes = [dtypes[name] for name in self.names]
        self._moves = tuple(
            Move(name=name, itemsize=dtypes[name].itemsize, src=src[name], dst=dst[name]) for name in self.names
        )
        self._prepared: PreparedMove | None = None
        self._spare: list[torch.Tensor | None] | None = None

    def deliver(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Send what this rank holds (`params`: views of live parameters are fine, they are only read) and return the new `weights`. Collective.

        Raises as `Resharder.move` does; `weights` and `version` are then as they were.
        """
        rank, op_id = self._resharder.rank, f"weights{self.version + 1}"
        try:
            source = [params.get(m.name) if rank in m.src.ranks else None for m in self._moves]
            source = [x.detach() if isinstance(x, torch.Tensor) else x for x in source]
        except Exception:  # whatever it is: the others must hear of it
            self._resharder.refuse(op_id)
            raise
        what = self._prepared if self._prepared is not None else self._moves
        got = self._resharder.move(what, source, dtypes=self._dtypes, device=self._device, out=self._spare, op_id=op_id)
        if self._prepared is None:
            self._prepared = self._resharder.prepare(self._moves)  # made by now
        before = [self.weights.get(name) for name in self.names] if self.weights else None
        self.weights = {name: x for name, x in zip(self.names, got, strict=True) if x is not None}
        self._spare = before
        self.version += 1
        return self.weights


def _name_problems(
    src: Mapping[str, TensorLayout], dst: Mapping[str, TensorLayout], dtypes: Mapping[str, torch.dtype]
) -> list[Problem]:
    problems: list[Problem] = []
    kinds = (("src", src, TensorLayout), ("dst", dst, TensorLayout), ("dtypes", dtypes, torch.dtype))
    for which, given, kind in kinds:
        one, hint = kind.__name__, f"give {which}={{NAME: {kind.__name__}}}"
        if not isinstance(given, Mapping):
            rule = f"must be a dict by name, each a {one}"
            problems.append(Problem(where=which, value=type(given).__name__, rule=rule, hint=hint))
            continue
        problems += [
            Problem(where=f"{which}[{name!r}]", value=type(x).__name__, rule=f"must be a {one}", hint=hint)
            for name, x in given.items()
            if not isinstance(x, kind)
        ]
    if problems:
        return problems
    for which, given in (("dst", dst), ("dtypes", dtypes)):
        for name in sorted(set(src) ^ set(given)):
            there = "has no source layout" if name in given else f"is not in {which}"
            problems.append(Problem(where=f"{which}[{name!r}]", value=None, rule=there, hint="give the same names"))
    return problems
