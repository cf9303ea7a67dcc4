"""`phalanx plan reshard`: the move of a tensor between two layouts, with its bound, its schedule and a picture. What is illegal exits 2 and still writes the JSON."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from phalanx.core.arguments import too_small
from phalanx.core.errors import PlanError, Problem, nearest
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.reading import is_count, parse_table
from phalanx.core.units import format_seconds, read_rate
from phalanx.observe.pictures import svg_picture, text_picture
from phalanx.plan.layout import TensorLayout
from phalanx.plan.layout.mesh import mesh_sizes, read_layout
from phalanx.plan.reshard import METHODS, Hosts, Move, ReshardPlan, plan_reshard


@dataclass(frozen=True, kw_only=True)
class ReshardArgs:
    """Plan the move of a tensor from one sharded layout to another: who sends what to whom, and the least time that it can take.

    A layout is a mesh and a symbol for each tensor dim: `2x4 S0RR` splits dim 0 over axis 0 of a 2 x 4 mesh; `S01`: over axis 0, then 1; `R`: not split; a last
    word `P1`: axis 1 holds terms of a sum.
    """

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Layout that the tensor has, such as "2x4 S0RR"."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Layout that it gets."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    itemsize: int = 4
    """Bytes of an element."""
    ranks_per_host: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Consecutive ranks that share a host (default: the last axis of the source mesh)."""
    dst_first_rank: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """First rank of the destination mesh (default: the one after the source's; less makes them overlap)."""
    rate: str = "10gbit"
    """Rate of each host's link, each way."""
    slow: tuple[str, ...] = ()
    """Hosts with another rate, as HOST=RATE: "1=2gbit"."""
    method: str = "best"
    """Ours, or one of the strategies of arXiv 2211.05322."""
    staging_kib: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Most memory that a rank may use besides its tensors."""
    partial_back: bool = False
    """Plan the way back, of gradients of which each replica of the destination has a term."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the plan: legal, problems, rho, bound, phases, hops, ..."""
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for a Gantt picture."""


def reshard(args: ReshardArgs) -> int:
    """Plan the move of a tensor from one sharded layout to another."""
    check_writable(args.json, args.svg)
    problems = _shape_problems(args)
    if problems:
        return _refuse(args, _number_problems(args) + problems)
    src = _layout(args.src, args.shape, 0, "SRC", problems)
    first = args.dst_first_rank
    if first is None:
        first = len(src.ranks) if src is not None else 0
    dst = _layout(args.dst, args.shape, first, "DST", problems)
    problems += _number_problems(args)
    rate, problem = read_rate(args.rate, where="--rate")
    problems += [problem] if problem else []
    slow = _slow_hosts(args.slow, problems)
    if problems or src is None or dst is None:
        return _refuse(args, problems)
    begin = time.process_time()
    try:
        hosts = _hosts(args, src, dst, rate / 8, slow)
        move = Move(name="tensor", itemsize=args.itemsize, src=src, dst=dst)
        staging = None if args.staging_kib is None else args.staging_kib << 10
        plan = plan_reshard((move,), hosts, method=args.method, staging_bytes=staging)
        plan = plan.inverse(partial=True) if args.partial_back else plan
        took = time.process_time() - begin
        plan.check()
    except PlanError as error:
        return _refuse(args, list(error.problems))
    if args.json is not None:
        write_json(args.json, reshard_result(plan, took))
    if args.svg is not None:
        write_text(args.svg, svg_picture(plan))
    print(plan.explain())
    print(_schedule_text(plan))
    print(text_picture(plan, width=shutil.get_terminal_size((100, 24)).columns))
    print(f"planned in {took * 1e3:.1f} ms of CPU; checked; {len(plan.hops)} messages; hash {plan.hash}")
    return 0


def _layout(
    text: str, shape: tuple[int, ...], first_rank: int, where: str, problems: list[Problem]
) -> TensorLayout | None:
    try:
        return read_layout(text, shape, first_rank=first_rank, where=where)
    except PlanError as error:
        problems += error.problems
        return None


def _shape_problems(args: ReshardArgs) -> list[Problem]:
    """Problems of the shape alone: neither layout can be read without it, and each would say the same of it."""
    if min(args.shape, default=0) >= 0:
        return []
    return [Problem(where="--shape", value=args.shape, rule="must have no negative dim", hint="use 0 or more")]


def _number_problems(args: ReshardArgs) -> list[Problem]:
    problems = too_small(args, itemsize=1, ranks_per_host=1, staging_kib=1, dst_first_rank=0)
    if args.method not in METHODS:
        hint = nearest(args.method, METHODS)
        problems.append(Problem(where="--method", value=args.method, rule="is not known", hint=hint))
    return problems


def _slow_hosts(given: tuple[str, ...], problems: list[Problem]) -> dict[int, float]:
    """Bytes per second of hosts with a rate of their own."""
    slow = {}
    for text in given:
        host, _, word = text.partition("=")
        rate, problem = read_rate(word, where=f"--slow {text}")
        if problem or not is_count(host):
            rule, hint = "is not a host and its rate", "write 1=2gbit"
            problems.append(Problem(where="--slow", value=text, rule=rule, hint=hint))
        else:
            slow[int(host)] = rate / 8
    return slow


def _hosts(args: ReshardArgs, src: TensorLayout, dst: TensorLayout, rate: float, slow: dict[int, float]) -> Hosts:
    """Hosts of consecutive ranks, as many as both meshes take."""
    per_host = args.ranks_per_host or mesh_sizes(args.src)[-1]
    world = max((*src.ranks, *dst.ranks)) + 1
    count = -(-world // per_host)
    problems = [
        Problem(where="--slow", value=host, rule=f"must be one of {count} hosts", hint="count from 0")
        for host in slow
        if host >= count
    ]
    if problems:
        raise PlanError(problems, subject="arguments")
    rates = tuple(slow.get(host, rate) for host in range(count))
    return Hosts(
        host_of_rank=tuple(rank // per_host for rank in range(world)), send_bytes_per_s=rates, recv_bytes_per_s=rates
    )


def _refuse(args: ReshardArgs, problems: list[Problem]) -> int:
    """All problems on stderr, and in the file."""
    write_json(args.json, {"legal": False, "problems": [str(p) for p in problems]})
    print(str(PlanError(problems, subject="the move")), file=sys.stderr)
    return 2


def reshard_result(plan: ReshardPlan, took: float) -> dict[str, Any]:
    """What `plan reshard --json` writes. A hop is [source rank, destination rank, [[move, offsets, sizes, term], ...]]."""
    hops = [
        [hop.src, hop.dst, [[p.move, list(p.box.offsets), list(p.box.sizes), p.term] for p in hop.parts]]
        for hop in plan.hops
    ]
    return {
        "legal": True,
        "problems": [],
        "explanation": plan.explain(),
        "certificate": plan.bound.explain(),
        "hash": plan.hash,
        "cpu_s": took,
        "num_hops": len(hops),
        "hops": hops,
        **parse_table(plan.to_json(), where="the plan"),
    }


MOST_STREAMS = 12


def _schedule_text(plan: ReshardPlan) -> str:
    """The first streams, a line each."""
    lines = []
    streams = [
        (phase, s) for phase in plan.phases for s in sorted(phase.schedule.streams, key=lambda s: (s.begin_s, s.flow))
    ]
    for phase, stream in streams[:MOST_STREAMS]:
        way = _tree_text(stream.edges[0].src, [(edge.src, edge.dst) for edge in stream.edges])
        begin, end = (format_seconds(phase.start_s + at) for at in (stream.begin_s, stream.end_s))
        lines.append(f"  flow {stream.flow:>3} bytes {stream.start}:{stream.stop}  {begin} to {end}  hosts {way}")
    if len(streams) > MOST_STREAMS:
        lines.append(f"  ... and {len(streams) - MOST_STREAMS} more")
    return "\n".join(lines)


def _tree_text(root: int, edges: list[tuple[int, int]]) -> str:
    """`0 -> 2 -> 3` for a chain; edges one by one for other trees."""
    chain = [root]
    for src, dst in edges:
        if src != chain[-1]:
            return ", ".join(f"{a} -> {b}" for a, b in edges)
        chain.append(dst)
    return " -> ".join(map(str, chain))
