"""Plans once, moves often: every rank makes the plan of a move by itself, and all compare one integer before anything travels.

Decides nothing: `plan/reshard/plan.py` plans. Must never change: the integer is the plan's hash (or "I refuse"), exchanged once for each move and nothing else
with it, so ranks that were given different layouts all stop before the first message, and a move that was planned before costs no more than that integer.
"""

from __future__ import annotations

import socket
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, PlanError, Problem, raise_if
from phalanx.plan.program import compare_id
from phalanx.plan.reshard import Hosts, Move, ReshardPlan, equal_hosts, plan_reshard
from phalanx.runtime.comm import Axis, Collectives
from phalanx.runtime.reshard.executor import Posting, ReshardReport, Transport, run_program
from phalanx.runtime.reshard.program import RankProgram, rank_program
from phalanx.runtime.reshard.sums import not_summable

REFUSED = -1
KEPT_PLANS = 64
HASH_DIGITS = 15
"""Hexadecimal digits of a plan's hash in the integer: 60 bits."""

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How moves are planned; `plan_reshard` knows what each means."""

    method: str = "best"
    message_bytes: int | None = None
    open_hops: int | None = None
    staging_bytes: int | None = None

    def words(self) -> dict[str, Any]:
        """Arguments of `plan_reshard`, what was not given left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedMove:
    """A move of some tensors, planned, and this rank's part of it."""

    moves: tuple[Move, ...]
    plan: ReshardPlan
    program: RankProgram

    @property
    def number(self) -> int:
        """What ranks compare."""
        return int(self.plan.hash[:HASH_DIGITS], 16)


class Resharder:
    """Moves tensors between layouts over the ranks of one axis. Collective: all ranks of the axis make the same calls in the same order.

    `hosts` says which ranks share a host and how fast its links are: all ranks give it, or none does. In the first move all tell whether they do, or else
    the name of their host.
    `report` tells of the last move.
    """

    def __init__(
        self,
        comms: Collectives,
        axis: Axis,
        *,
        hosts: Hosts | None = None,
        options: PlanOptions | None = None,
        posting: Posting | None = None,
    ) -> None:
        self.comms, self.axis = comms, axis
        self.options = options if options is not None else PlanOptions()
        self.posting = posting
        """None: what the transport needs."""
        self.report: ReshardReport | None = None
        self._hosts = hosts
        self._met = False
        """Whether all have told where they are."""
        self._connected: set[tuple[bool, int]] = set()
        """`Transport.connected` of the axis."""
        self._prepared: OrderedDict[tuple[Move, ...], PreparedMove] = OrderedDict()

    @property
    def rank(self) -> int:
        return self.axis.ranks[self.axis.index]

    @property
    def hosts(self) -> Hosts:
        """Collective on first use, if hosts were not given."""
        if self._hosts is None:
            self._meet()
        assert self._hosts is not None  # given or made
        return self._hosts

    def _meet(self) -> None:
        """Learn where the others are, once. Collective. Raises `PlanError` on all ranks where some were given hosts and some were not."""
        if self._met:
            return
        told = self.comms.gather_objects(socket.gethostname() if self._hosts is None else None, self.axis)
        given = [rank for rank, name in zip(self.axis.ranks, told, strict=True) if name is None]
        if 0 < len(given) < len(told):
            hint = "give the same hosts to every rank, or to none"
            problem = Problem(where="hosts", value=f"given to ranks {given}", rule="missing on others", hint=hint)
            raise PlanError([problem], subject="what is moved")
        if not given:
            self._hosts = hosts_by_name(told, self.axis.ranks)
        self._met = True

    def prepare(self, moves: Sequence[Move]) -> PreparedMove:
        """The plan of a move, from the last ones or made now (the same on every rank, without a message)."""
        key = tuple(moves)
        found = self._prepared.pop(key, None)
        if found is None:
            raise_if(self._rank_problems(key), PlanError, subject="the move between layouts")
            plan = plan_reshard(key, self.hosts, **self.options.words())
            found = PreparedMove(moves=key, plan=plan, program=rank_program(plan, self.rank))
        self._prepared[key] = found
        if len(self._prepared) > KEPT_PLANS:
            self._prepared.popitem(last=False)
        return found

    def move(
        self,
        what: PreparedMove | Sequence[Move],
        source: Tensors,
        *,
        dtypes: Sequence[torch.dtype],
        device: torch.device | None = None,
        out: Tensors | None = None,
        op_id: str = "reshard",
    ) -> list[torch.Tensor | None]:
        """The rank's tensors of the destination layouts, new ones on `device` or (`out`) those given; None where it holds nothing.

        Raises an error on all ranks: `PlanError` where they were given different things, or (on the rank itself) what does not fit; `PeerError`
        where another rank refused or has gone.
        """
        self._meet()  # collective: before anything that may fail on one rank alone
        ready, error = self._ready(what, source, dtypes, device, out)
        self._compare(REFUSED if ready is None else ready[0].number ^ _type_bits(dtypes), op_id)
        if ready is None:
            assert error is not None
            raise error
        prepared, dest = ready
        devices = {x.device for x in (*source, *dest) if x is not None}
        lane = self._lane(next(iter(devices), torch.device("cpu")), op_id)
        with torch.inference_mode():  # destinations may have been made in it, and are then written to nowhere else
            self.report = run_program(prepared.plan, prepared.program, lane, source=source, dest=dest)
        return dest

    def refuse(self, op_id: str = "reshard") -> None:
        """Tells the others, in place of `move`, that this rank cannot, before its caller raises why."""
        self._meet()
        self._compare(REFUSED, op_id)

    def _ready(
        self,
        what: PreparedMove | Sequence[Move],
        source: Tensors,
        dtypes: Sequence[torch.dtype],
        device: torch.device | None,
        out: Tensors | None,
    ) -> tuple[tuple[PreparedMove, list[torch.Tensor | None]] | None, Exception | None]:
        """Everything that can be wrong on this rank, before anything travels: memory that is not there, too."""
        try:
            prepared = what if isinstance(what, PreparedMove) else self.prepare(what)
            raise_if(
                _tensor_problems(prepared.moves, self.rank, source, dtypes, out), PlanError, subject="what is moved"
            )
            at = (
                device if device is not None else next((x.device for x in source if x is not None), torch.device("cpu"))
            )
            return (prepared, list(out) if out is not None else _new(prepared.moves, self.rank, dtypes, at)), None
        except Exception as err:  # whatever it is: the others must hear of it, then it is raised
            return None, err

    def _rank_problems(self, moves: Sequence[Move]) -> list[Problem]:
        inside = set(self.axis.ranks)
        sides = {
            ranks for m in moves for ranks in (m.src.ranks, m.dst.ranks)
        }  # a state has many moves and few sets of ranks
        strays = sorted({r for ranks in sides for r in ranks} - inside)
        if not strays:
            return []
        rule = f"not in the process group, whose ranks are {self.axis.ranks}"
        return [Problem(where="layout.ranks", value=strays, rule=rule, hint="give a group over both meshes")]

    def _compare(self, mine: int, op_id: str) -> None:
        """One integer of each rank. Raises `PlanError` where they differ; a rank that refused raises its own error afterwards."""
        told = self.comms.all_gather(torch.tensor([mine]), self.axis, op_id=compare_id(op_id)).tolist()
        if mine == REFUSED or all(n == mine for n in told):
            return
        by_number: dict[int, list[int]] = {}
        for rank, number in zip(self.axis.ranks, told, strict=True):
            by_number.setdefault(number, []).append(rank)
        refused = by_number.pop(REFUSED, [])
        if refused:
            raise PeerError(f"{op_id}: nothing was moved, because ranks {refused} refused: they say why")
        groups = "; ".join(f"ranks {ranks}: plan {number:0{HASH_DIGITS}x}" for number, ranks in by_number.items())
        rule = "differs between ranks, so nothing was moved: they were given different layouts, types, hosts or options"
        raise PlanError.of(f"{op_id}.plan", groups, rule, subject="what is moved")

    def _lane(self, device: torch.device, op_id: str) -> Transport:
        nccl = device.type == "cuda" and self.axis.group is not None and _backend(self.axis.group, device) == "nccl"
        posting = self.posting if self.posting is not None else "batches" if nccl else "tags"
        wire = device if nccl else torch.device("cpu")
        return Transport(
            comms=self.comms, axis=self.axis, wire=wire, posting=posting, op_id=op_id, connected=self._connected
        )


def _type_bits(dtypes: Sequence[torch.dtype]) -> int:
    """Element types as part of the integer that ranks compare: a plan knows their size alone, and bits of one type are no number of another."""
    return zlib.crc32(",".join(map(str, dtypes)).encode())


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the transport that a group uses for tensors on `device`."""
    pairs = [pair.split(":") for pair in str(dist.get_backend_config(group)).split(",")]
    return next((pair[1] for pair in pairs if len(pair) == 2 and pair[0] == device.type), pairs[0][-1])


def hosts_by_name(names: Sequence[str], ranks: Sequence[int]) -> Hosts:
    """Ranks with one host name share a host; all links are equal. Ranks that are not listed are on the first host (they take no part)."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    host_of = dict(zip(ranks, (numbers[name] for name in names), strict=True))
    return equal_hosts([host_of.get(rank, 0) for rank in range(max(ranks) + 1)])


def _new(
    moves: Sequence[Move], rank: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> list[torch.Tensor | None]:
    return [
        torch.empty(move.dst.local_shapes[move.dst.ranks.index(rank)], dtype=dtype, device=device)
        if rank in move.dst.ranks
        else None
        for move, dtype in zip(moves, dtypes, strict=True)
    ]


def _tensor_problems(
    moves: Sequence[Move], rank: int, source: Tensors, dtypes: Sequence[torch.dtype], out: Tensors | None
) -> list[Problem]:
    """All that does not fit between layouts and tensors."""
    problems = []
    for name, given in (("source", source), ("dtypes", dtypes), ("out", out)):
        if given is not None and len(given) != len(moves):
            problems.append(
                Problem(where=name, value=len(given), rule=f"needs one entry for each of {len(moves)} moves")
            )
    if problems:
        return problems
    for i, (move, dtype) in enumerate(zip(moves, dtypes, strict=True)):
        if dtype.itemsize != move.itemsize:
            rule = f"has {dtype.itemsize} bytes an element, its move {move.itemsize}"
            problems.append(Problem(where=f"{move.name}.dtype", value=str(dtype), rule=rule))
        if move.src.num_terms > 1 and not_summable([dtype]):
            rule = "its terms cannot be added up"
            problems.append(Problem(where=f"{move.name}.dtype", value=str(dtype), rule=rule, hint="use a wider type"))
        problems += _fit(f"{move.name} of the source", move.src.ranks, move.src.local_shapes, rank, source[i], dtype)
        if out is not None:
            problems += _fit(f"{move.name} of out", move.dst.ranks, move.dst.local_shapes, rank, out[i], dtype)
            problems += _writable(f"{move.name} of out", out[i])
    return problems or ([] if out is None else _shared_memory(moves, source, out))


def _writable(where: str, x: torch.Tensor | None) -> list[Problem]:
    """Each element of what is received has a place of its own."""
    if x is None or x.numel() == 0:
        return []
    reach = 0
    for size, step in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and step <= reach:
            rule, hint = "several of its elements are one place in memory", "clone() what was expanded"
            return [Problem(where=where, value=tuple(x.stride()), rule=rule, hint=hint)]
        reach += (size - 1) * step
    return []


def _shared_memory(moves: Sequence[Move], source: Tensors, out: Tensors) -> list[Problem]:
    """Where something is received lies nothing that is sent, and nothing else that is received."""
    both = [
        (x, move.name, written)
        for side, written in ((source, False), (out, True))
        for x, move in zip(side, moves, strict=True)
    ]
    spans = sorted(((*_span(x), i) for i, (x, _, _) in enumerate(both) if isinstance(x, torch.Tensor) and x.numel()))
    problems, near = [], list[tuple[int, int]]()
    for first, stop, i in spans:
        near = [(end, j) for end, j in near if end > first]
        x, name, written = both[i]
        for _, j in near:
            there, other, also = both[j]
            if (written or also) and np.shares_memory(_place(x), _place(there)):
                rule = f"shares memory with {other} of {'out' if also else 'the source'}"
                where = f"{name} of {'out' if written else 'the source'}"
                problems.append(
                    Problem(
                        where=where,
                        value=None if x is None else tuple(x.shape),
                        rule=rule,
                        hint="give out memory of its own",
                    )
                )
        near.append((stop, i))
    return problems


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Address of the first element, and of what follows the last."""
    reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _place(x: torch.Tensor | None) -> np.ndarray:
    """The addresses of a tensor's elements, as an array that nobody reads (so that it may lie on a device)."""
    assert x is not None  # it has a span
    size = x.element_size()
    words = {"version": 3, "data": (x.data_ptr(), True), "shape": tuple(x.shape), "typestr": f"|V{size}"}
    return np.asarray(SimpleNamespace(__array_interface__={**words, "strides": tuple(n * size for n in x.stride())}))


def _is_dense(x: object) -> bool:
    """Also of what has of a tensor what moving needs (`runtime/state/views.py`)."""
    if not isinstance(x, torch.Tensor):
        return all(hasattr(x, name) for name in ("shape", "dtype", "device", "stride", "__getitem__"))
    return x.layout == torch.strided and not x.is_meta and not x.is_quantized


def _fit(
    where: str,
    ranks: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    x: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[Problem]:
    wanted = shapes[ranks.index(rank)] if rank in ranks else None
    if x is not None and not _is_dense(x):
        found = str(x.device if x.is_meta else x.layout) if isinstance(x, torch.Tensor) else type(x).__name__
        return [Problem(where=where, value=found, rule="must be a dense tensor with elements in memory")]
    if x is None:
        if wanted is None or 0 in wanted:
            return []
        return [Problem(where=where, value=None, rule=f"rank {rank} holds {wanted} of it, but was given nothing")]
    if wanted is not None and tuple(x.shape) != wanted and not (0 in wanted and x.numel() == 0):
        return [Problem(where=where, value=tuple(x.shape), rule=f"rank {rank} holds {wanted} of it")]
    if x.dtype != dtype:
        return [Problem(where=where, value=str(x.dtype), rule=f"must be {dtype}, as on other ranks")]
    return []
