"""Drawn reshards of strange tensors, and calls that are wrong on one rank: `phalanx bench reshard-drawn --cases 600 --json F`

Four ranks move tensors between drawn layouts: of no dims, of no elements, of one; lying in memory transposed, with holes, of any stride, conjugate;
with new destinations and with given ones; as plain tensors, as states, as DTensors between meshes. What arrives is compared bit for bit with slices of the
whole tensor. In one call of five a rank gives what does not fit (`WRONG`): then every rank must raise an error of ours, at once, and the next call
must work. Exit status 1 where bits differ, where a rank raises anything else, where a wrong call is taken, or where the group is dead afterwards.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import phalanx
from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, PeerError, PhalanxError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.reshard.types import Move
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.processes.launch import StopRequest, run_local
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world
from phalanx.runtime.reshard.resharder import PlanOptions, Resharder
from phalanx_lab.bench.reshard.drawn import (
    DTYPES,
    DrawnMove,
    awkward,
    prefilled,
    random_case,
    random_shape,
    same,
    sources,
    wanted,
)

RANKS = 4
TIMEOUT_S = 60.0
PROMPT_S = 30.0
"""A wrong call that keeps a rank waiting longer than this on a busy machine has left it to a timeout."""
MESHES = ([0, 1, 2, 3], [[0, 1], [2, 3]], [3, 1], [2], [[0], [2]])
WRONG = ("shape", "type", "nothing", "list", "sparse", "meta", "expanded", "overlapping", "in place", "layout", "count")


@dataclass(frozen=True, kw_only=True)
class DrawnReshardArgs:
    """Drawn reshards of strange tensors over four ranks."""

    cases: int = 600
    seed: int | None = None
    """Seed of the draws. Default: today's date."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench reshard-drawn ARGS...`; 1 where a case went wrong."""
    options = read_words(DrawnReshardArgs, args, prog="phalanx bench reshard-drawn", description=__doc__)
    raise_if(too_small(options, cases=1), ConfigError, subject="the options")
    check_writable(options.json)
    seed = options.seed if options.seed is not None else int(datetime.date.today().strftime("%Y%m%d"))
    report = run_drawn(options.cases, seed)
    print(describe(report))
    write_json(options.json, report)
    return 0 if is_well(report) else 1


def run_drawn(cases: int, seed: int) -> dict[str, Any]:
    """All cases on forked ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told.json"
        begin_s = time.perf_counter()
        code = run_local(lambda info, stop: _rank(info, stop, cases, seed, path), ranks=RANKS, threads=1)
        if code:
            raise SystemExit(code)
        report: dict[str, Any] = json.loads(path.read_text())
    return {"cases": cases, "seed": seed, "ranks": RANKS, **report, "seconds": time.perf_counter() - begin_s}


def is_well(report: dict[str, Any]) -> bool:
    return not report["silent"] and not report["raw"] and not report["dead"] and not report["unexpected"]


def describe(report: dict[str, Any]) -> str:
    """A few lines for a person, with every case that went wrong."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(report["kinds"].items()))
    lines = [
        f"{report['cases']} reshards on {report['ranks']} ranks, seed {report['seed']}, {report['seconds']:.0f} s: "
        f"{len(report['silent'])} silent mismatches, {len(report['raw'])} raw errors, {len(report['dead'])} dead groups, "
        f"{len(report['unexpected'])} refused or taken wrongly",
        f"  {report['refused']} wrong calls refused, the slowest after {report['slowest_refusal_s']:.2f} s; {kinds}",
    ]
    return "\n".join(
        lines + [f"  {word}: {w}" for word in ("silent", "raw", "dead", "unexpected") for w in report[word]]
    )


# ---- one rank ----------------------------------------------------------------------------------------------------------------


def _rank(info: WorldInfo, stop: StopRequest, cases: int, seed: int, path: Path) -> int:
    init_world(info, device="cpu", timeout_s=120.0)
    told = all_cases(info.rank, list(range(cases)), seed)
    if info.rank == 0:
        path.write_text(json.dumps(told))
    if not told["dead"]:
        close_world()
    return 0


def all_cases(rank: int, numbers: list[int], seed: int) -> dict[str, Any]:
    """What all ranks found together; ends where the group is dead. Collective."""
    comms = Collectives(timeout_s=TIMEOUT_S)
    axis = Axis("reshard", tuple(range(RANKS)), rank, dist.group.WORLD)
    told: dict[str, Any] = {word: [] for word in ("silent", "raw", "dead", "unexpected")}
    kinds: Counter[str] = Counter()
    refused, slowest_s = 0, 0.0
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in MESHES]
    for number in numbers:
        call = _Call(number, seed, rank, comms, axis, meshes)
        found = call.run()
        try:
            answers = comms.gather_objects((found, call.seconds, call.kinds), axis)
        except Exception as error:  # the group does not answer
            told["dead"].append(f"{call.name}: {type(error).__name__}: {error}")
            break
        kinds.update(set[str]().union(*(mine for _, _, mine in answers)))
        everybody = [(what, seconds) for what, seconds, _ in answers]
        for other, (word, text) in enumerate(f for f, _ in everybody):
            if word not in ("right", "refused"):
                told[word].append(f"{call.name}, rank {other}: {text}")
        taken = [r for r, ((word, _), _) in enumerate(everybody) if (word == "refused") != bool(call.wrong)]
        if taken and all(word in ("right", "refused") for (word, _), _ in everybody):
            told["unexpected"].append(
                f"{call.name}: ranks {taken} {'took it' if call.wrong else 'refused it'}: {everybody}"
            )
        if call.wrong:
            refused, slowest_s = refused + 1, max(slowest_s, *(s for _, s in everybody))
    if slowest_s > PROMPT_S:
        told["dead"].append(f"a wrong call kept a rank waiting for {slowest_s:.1f} s")
    return {**told, "kinds": dict(kinds), "refused": refused, "slowest_refusal_s": slowest_s}


@dataclass
class _Call:
    """One case as this rank makes it."""

    number: int
    seed: int
    rank: int
    comms: Collectives
    axis: Axis
    meshes: list[DeviceMesh]
    kinds: set[str] = field(default_factory=set)
    wrong: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, self.number])
        """The same on every rank."""
        self.own = np.random.default_rng([self.seed, self.number, self.rank + 1])
        self.form = ("moves", "moves", "state", "dtensor")[int(self.rng.integers(4))]

    @property
    def name(self) -> str:
        return f"case {self.number} ({self.form}{', wrong ' + self.wrong if self.wrong else ''})"

    def run(self) -> tuple[str, str]:
        """What came of it here: right, refused, silent, raw or dead; and why."""
        begin_s = time.perf_counter()
        try:
            differ = self._dtensor() if self.form == "dtensor" else self._moves()
            found = ("silent", differ) if differ else ("right", "")
        except PeerError as error:
            found = ("refused" if "refused" in str(error) else "dead", str(error))
        except PhalanxError as error:
            found = ("refused", str(error))
        except Exception as error:
            found = ("raw", f"{type(error).__name__}: {error}")
        self.seconds = time.perf_counter() - begin_s
        return found

    def _moves(self) -> str:
        case = random_case(self.seed * 100_003 + self.number, world=RANKS, odd=True)
        source = [None if x is None else awkward(x, self.own) for x in sources(case, self.rank)]
        out = [None if x is None else awkward(x, self.own) for x in prefilled(case, self.rank)]
        given: list[Any] | None = out if self.rng.random() < 0.6 else None
        kept = [None if x is None else x.clone() for x in source]
        self._note(case, source)
        culprit = _culprit(case) if self.rng.random() < 0.25 else None
        moves, taken = case.moves, list[Any](source)
        if culprit is not None:
            self.wrong = WRONG[int(self.rng.integers(len(WRONG)))]
            self.kinds.add(f"wrong {self.wrong}")
            if self.wrong in ("expanded", "overlapping", "in place"):
                given = list(out)
            moves, given = self._spoil(case, culprit, taken, given)
        got = self._moved(case, moves, taken, given)
        for i, want in enumerate(wanted(case, self.rank)):
            if not same(got[i], want):
                return f"tensor {i} of {case.moves[i].src.shape}, {case.dtypes[i]}, differs from the oracle"
            if not same(source[i], kept[i]):
                return f"tensor {i}: the source was written to"
        return ""

    def _moved(
        self, case: DrawnMove, moves: tuple[Move, ...], taken: list[Any], given: list[Any] | None
    ) -> list[torch.Tensor | None]:
        """The answer of the call, tensor by tensor."""
        options = PlanOptions(
            method=case.method,
            message_bytes=case.message_bytes,
            open_hops=case.open_hops,
            staging_bytes=case.staging_bytes,
        )
        resharder = Resharder(self.comms, self.axis, hosts=case.hosts, options=options)
        if self.form == "moves":
            return resharder.move(moves, taken, dtypes=case.dtypes, out=given, op_id=f"case{self.number}")
        names = [move.name for move in case.moves]
        state: Any = dict(zip(names, taken, strict=False))
        answer = phalanx.reshard(
            state,
            {move.name: move.src for move in moves},
            {move.name: move.dst for move in moves},
            dtype=dict(zip(names, case.dtypes, strict=True)),
            out=None if given is None else dict(zip(names, given, strict=True)),
            resharder=resharder,
        )
        return [answer[name] for name in names]

    def _note(self, case: DrawnMove, source: list[torch.Tensor | None]) -> None:
        """Kinds of tensors, and how those of this rank lie."""
        for move, dtype, x in zip(case.moves, case.dtypes, source, strict=True):
            size = int(np.prod(move.src.shape))
            self.kinds |= {f"{len(move.src.shape)} dims"} | (
                {"empty"} if size == 0 else {"one element"} if size == 1 else set()
            )
            self.kinds |= {"partial"} if move.src.num_terms > 1 else set()
            self.kinds |= {"complex"} if dtype.is_complex else set()
            self.kinds |= {"non-contiguous"} if x is not None and not x.is_contiguous() else set()

    def _spoil(
        self, case: DrawnMove, culprit: int, source: list[Any], out: list[Any] | None
    ) -> tuple[Any, list[Any] | None]:
        """On one rank, something that does not fit in place of what does; moves and destinations as that rank gives them."""
        number, rank = divmod(culprit, RANKS)
        writes = self.wrong in ("expanded", "overlapping", "in place")
        if writes:
            places = _writers(case)
            if not places:
                self.wrong = "type"
            else:
                number, rank = divmod(places[0], RANKS)
        if rank != self.rank:
            return case.moves, out
        if self.wrong in ("expanded", "overlapping", "in place"):
            assert out is not None
            out[number] = _bad_place(self.wrong, out[number], source)
            return case.moves, out
        if self.wrong == "layout":
            move = case.moves[number]
            others = (whole_layout(move.dst.shape, [(rank + n) % RANKS]) for n in (1, 2))
            changed = dataclasses.replace(move, dst=next(dst for dst in others if dst != move.dst))
            return (*case.moves[:number], changed, *case.moves[number + 1 :]), out
        x = source[number]
        if self.wrong == "count":
            if self.form == "state":
                source[number] = "a word"
            else:
                source.append(x)
        else:
            source[number] = {
                "shape": lambda: x.new_zeros((*x.shape, 2)),
                "type": lambda: x.new_zeros(x.shape, dtype=torch.int16),
                "nothing": lambda: None,
                "list": x.tolist,
                "sparse": lambda: x.to_sparse() if x.dim() else "sparse",
                "meta": lambda: x.to("meta"),
            }[self.wrong]()
        return case.moves, out

    # ---- DTensors -----------------------------------------------------------------------------------------------------------

    def _dtensor(self) -> str:
        shape, dtype = random_shape(self.rng, odd=True), DTYPES[int(self.rng.integers(len(DTYPES)))]
        full = torch.arange(int(np.prod(shape))).mul(7).add(3).to(dtype).view(shape)
        here, there = (self.meshes[int(self.rng.integers(len(self.meshes)))] for _ in range(2))
        before, after = (self._placements(shape, mesh) for mesh in (here, there))
        self.kinds |= {f"DTensor of {len(shape)} dims"} | ({"empty"} if full.numel() == 0 else set())
        x = distribute_tensor(full, here, before, src_data_rank=None)
        if self.rank in here.mesh:
            local = awkward(x.to_local(), self.own)
            x = (
                DTensor.from_local(local, here, before, run_check=False, shape=x.shape, stride=x.stride())
                if shape
                else (DTensor.from_local(local, here, before, run_check=False))
            )
        got = phalanx.reshard(x, None, (there, after), resharder=Resharder(self.comms, self.axis))
        want = distribute_tensor(full, there, after, src_data_rank=None)
        if got.shape != want.shape or got.dtype != dtype or tuple(got.placements) != tuple(want.placements):
            return (
                f"a DTensor of {tuple(got.shape)}, {got.placements} in place of {tuple(want.shape)}, {want.placements}"
            )
        inside = self.rank in there.mesh
        return "" if not inside or same(got.to_local(), want.to_local()) else f"DTensor of {shape}: {before} -> {after}"

    def _placements(self, shape: tuple[int, ...], mesh: DeviceMesh) -> list[Shard | Replicate]:
        draw = [self.rng.integers(-1, len(shape)) for _ in range(mesh.ndim)]
        return [Replicate() if dim < 0 else Shard(int(dim)) for dim in draw]


def _culprit(case: DrawnMove) -> int | None:
    """Tensor number * RANKS + rank, of the first rank that holds elements of a source."""
    for number, move in enumerate(case.moves):
        for rank, shape in zip(move.src.ranks, move.src.local_shapes, strict=True):
            if 0 not in shape:
                return number * RANKS + rank
    return None


def _writers(case: DrawnMove) -> list[int]:
    """The same of destinations of two elements or more, of ranks that hold some of that source too."""
    return [
        number * RANKS + rank
        for number, move in enumerate(case.moves)
        for rank, shape in zip(move.dst.ranks, move.dst.local_shapes, strict=True)
        if 0 not in shape and int(np.prod(shape)) > 1
    ]


def _bad_place(how: str, x: torch.Tensor, source: list[Any]) -> torch.Tensor:
    """A destination of the shape of `x` in which elements share places, or that lies where a source does."""
    if how == "overlapping" and sum(size > 1 for size in x.shape) > 1:
        return x.new_zeros(x.numel() + 1).as_strided(x.shape, [1] * x.dim())
    if how in ("expanded", "overlapping"):
        return x.new_zeros(()).expand(x.shape)
    mine = next((s for s in source if isinstance(s, torch.Tensor) and s.numel() and s.dtype == x.dtype), None)
    if (
        mine is None
        or mine.untyped_storage().nbytes() < x.numel() * x.element_size() + mine.storage_offset() * x.element_size()
    ):
        return x.new_zeros(()).expand(x.shape)
    return torch.as_strided(mine.resolve_conj(), x.shape, x.contiguous().stride(), mine.storage_offset())
