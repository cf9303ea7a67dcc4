"""What one operation of a step's program takes: a measured table, else a formula of the hardware, each with its error bar.

Decides in this order: the table's seconds for that id, else for its kind (`fwd.attention.core`), else what was measured of its products or links on that machine (the cluster file's
tables), else the formulas of `simulate/hardware/cost.py` and `simulate/hardware/collectives.py` from the FLOPs and bytes that the operation carries (`plan/program/work.py`). Must never change: a formula reads amounts and hardware, never ids of a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.op_ids import read_op_id
from phalanx.plan.program import Op
from phalanx.simulate.hardware import SIGMA, Cost, GroupSpan, Hardware, Network, Oracle

_NUMBER = re.compile(r"(?<=[a-z])\d+(?:to\d+)?")
"""Number of a stage, chunk or skip connection."""
_PLACE = re.compile(r"\d+(?:to\d+)?")
"""A part of an id that is a number, or the two ranks of a message of a move."""
MEASURED_SIGMA = 0.05
"""Spread of a time that was measured under the very same kind."""


def kind_of(id: str) -> str:
    """What an operation does, whatever its micro-batch, layer, stage, chunk, hop or pair of ranks: `fwd.attention.core`, `gradient/expert/edp`, `heal/state`."""
    place = read_op_id(id)
    name = ".".join(part for part in place.name.split(".") if not _PLACE.fullmatch(part))
    if place.phase is None:
        return name
    return f"{place.phase}.{_NUMBER.sub('', name)}"


@dataclass(frozen=True, kw_only=True)
class ProgramOracle:
    """Costs on one kind of hardware. `table` has measured seconds by id or by kind; of collectives from when all have posted to the end.

    `ranks_per_host` says how ranks of a group lie on hosts: consecutive ones share one.
    """

    hardware: Hardware
    precision: str = "bf16"
    seq_len: int = 1
    table: Mapping[str, float] = field(default_factory=dict)

    def cost(self, op: Op, ranks: tuple[int, ...]) -> Cost:
        """Seconds of an operation of one rank; `ranks` are those of its group (of a message the two)."""
        for key in (op.id, kind_of(op.id)):
            if key in self.table:
                return Cost(self.table[key], MEASURED_SIGMA, "measured")
        if op.kind == "collective":
            return self._collective(op, ranks)
        return self._compute(op)

    def _compute(self, op: Op) -> Cost:
        if op.kind == "host" or not (op.flops or op.moved_bytes):
            return Cost(0.0, 0.0, "nothing")
        oracle = Oracle(self.hardware, self.precision)
        if "attention.core" in op.id:
            backward = read_op_id(op.id).phase == "bwd"
            flops = op.flops / (2.5 if backward else 1.0)
            return Cost(oracle.attention(flops, self.seq_len, backward=backward), SIGMA["attention"], "formula")
        if op.products:
            return self._products(op, oracle)
        kind = "gemm" if op.flops else "memory"
        seconds = op.flops / oracle.peak_rate + (oracle.hardware.kernel_s * 4 / 3 if op.flops else 0.0)
        return Cost(seconds + oracle.memory(op.moved_bytes), SIGMA[kind], "formula")

    @staticmethod
    def _products(op: Op, oracle: Oracle) -> Cost:
        """Each product by the table of the machine or by the formula (`simulate/hardware/cost.py`): forward, the input's gradient, the weight's, as many of them as the FLOPs say."""
        work = sum(2.0 * m * n * k for m, n, k, _ in op.products)
        backward, twice = op.phase == "bwd", op.flops > 1.5 * work
        found = []
        for m, n, k, groups in op.products:
            if not backward:
                found.append(oracle.gemm(m, n, k, groups=groups))
            elif "weights" not in op.id:
                found.append(oracle.gemm(m, k, n, groups=groups))
            if backward and (twice or "weights" in op.id):
                found.append(oracle.gemm(m, n, k, groups=groups, accumulate=True))
        seconds = sum(cost.seconds for cost in found)
        spread = sum(cost.seconds * cost.sigma for cost in found) / seconds
        where = {cost.origin for cost in found}
        origin = where.pop() if len(where) == 1 else "formula" if where == {"formula"} else "near a measurement"
        kind = SIGMA["experts"] if "experts" in op.id and origin == "formula" else spread
        return Cost(seconds + oracle.memory(op.moved_bytes), kind, origin)

    def _collective(self, op: Op, ranks: tuple[int, ...]) -> Cost:
        network, n = Network(self.hardware), len(ranks)
        per_host = self.hardware.ranks_per_host
        hosts = {rank // per_host for rank in ranks}
        if op.collective == "exchange":
            peers = max(1, len(op.peers))
            seconds = network.send(op.sent_bytes / peers, between=len(hosts) > 1)
            return Cost(seconds, SIGMA["cp" if op.axis == "cp" else "pp"], "formula")
        span = GroupSpan(math.ceil(n / len(hosts)), len(hosts))
        whole = op.sent_bytes * n / max(1, n - 1)
        match op.collective:
            case "all_reduce":
                seconds = network.all_reduce(max(8.0, whole / 2), span)
            case (
                "all_to_all_rows" | "messages" | "reduce_scatter_rows" | "dispatch_tokens" | "combine_tokens"
            ):  # sums are taken where they arrive
                seconds = network.all_to_all(max(8.0, whole), span)
            case "reduce_scatter":
                seconds = network.reduce_scatter(max(8.0, whole), span)
            case _:
                seconds = network.all_gather(max(8.0, whole), span)
        kind = {"tp": "tp", "etp": "etp", "cp": "cp"}.get(op.axis, "dp" if "gradient" in op.id else "a2a_inside")
        return Cost(seconds, SIGMA["a2a_between" if len(hosts) > 1 and kind == "a2a_inside" else kind], "formula")
