"""`phalanx plan placement`: replicas of experts on hosts, what losses they survive, and what other rules would. Bad input exits 2 with all problems.

The JSON file has, for `ours`, `printed` (maximum rank overlap as printed), `spread` and `compact`: `recovery_probability` (a list by number of lost hosts),
`f_guarantee` (any loss of fewer hosts is survived) and `max_over_mean_load`; besides the placement itself, which `--current` reads again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phalanx.core.arguments import too_small
from phalanx.core.errors import ConfigError, DataError, PlanError, Problem, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.reading import MalformedError, load_json
from phalanx.core.units import format_seconds
from phalanx.observe.pictures import placement_svg, placement_text
from phalanx.plan.placement.search import (
    Certificate,
    CostWeights,
    Floats,
    HostPlacement,
    HostPool,
    Point,
    ReplicaCounts,
    choose,
    equal_pool,
    placement_front,
    plan_placement,
    pool_problems,
    read_host_placement,
    read_loads,
    replica_counts,
    rule_placement,
    zipf_loads,
)

OTHERS = ("printed", "spread", "compact")


@dataclass(frozen=True, kw_only=True)
class PlacementArgs:
    """Place replicas of experts on hosts so that losing hosts loses no expert, and show what others would do."""

    hosts: int
    """Hosts; one of them is what fails."""
    slots: int
    """Replica slots of each host, in every layer."""
    experts: int
    """Experts of a layer."""
    layers: int = 1
    """Layers with experts: all must survive together."""
    f: Annotated[int, tyro.conf.arg(aliases=["-f"], metavar="INT")] = 2
    """Any loss of fewer than f hosts must be survived: each expert is on f hosts or more."""
    loads: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON with a row of tokens per expert for each layer."""
    skew: Annotated[float | None, tyro.conf.arg(metavar="Z")] = None
    """Loads that fall as rank^-Z instead (0: all alike); which expert has which rank is drawn per layer."""
    seed: int = 0
    """Seed of --skew and of the search."""
    racks: int = 0
    """Racks that consecutive hosts share, and that may fail as a whole (0: not known)."""
    failure: Annotated[tuple[float, ...], tyro.conf.arg(metavar="P [P ...]")] = ()
    """Probability that each host fails while what was lost is being replaced, where hosts are not alike."""
    current: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Result file of an earlier placement: says what has to travel from there."""
    lost: Annotated[tuple[int, ...], tyro.conf.arg(metavar="HOST [HOST ...]")] = ()
    """Hosts of --current that are gone; the others keep their names."""
    max_load: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """Take the placement that recovers best among those whose busiest host has at most X times the mean load."""
    max_copies: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """... among those for which at most so many expert states travel, with --current."""
    choose: Literal["recovery", "cost"] = "recovery"
    """What decides: recovery alone, or the time that waiting, rolling back and moving cost together."""
    layer: int = 0
    """Layer that the map on the screen shows."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result: recovery_probability, f_guarantee, max_over_mean_load, front, placement, ..."""
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for a map of all layers."""


def placement(args: PlacementArgs) -> int:
    """Place replicas of experts on hosts, and show what losses they survive."""
    check_writable(args.json, args.svg)
    raise_if(_argument_problems(args), ConfigError, subject="arguments")
    loads = _loads(args)
    current, pool = _present(args)
    begin, cpu = time.perf_counter(), time.process_time()
    counts = replica_counts(loads, pool, floor=args.f)
    best = plan_placement(counts, pool, loads)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    worth = CostWeights()
    points = placement_front(loads, pool, floor=args.f, current=current, worth=worth, best=best)
    by = worth.cost if args.choose == "cost" else None
    chosen = choose(points, max_over_mean=args.max_load, max_copies=args.max_copies, by=by)
    plans = {"ours": chosen.plan, **{rule: rule_placement(rule, loads, counts, pool) for rule in OTHERS}}
    result = placement_result(plans, points, chosen, loads, counts=counts, worth=worth, seconds=seconds)
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, placement_svg(chosen.plan))
    _show(args, plans, points, chosen, loads, counts, worth)
    print(
        f"planned in {format_seconds(seconds)}, {format_seconds(cpu_s)} of CPU; with the other placements {format_seconds(time.perf_counter() - begin)}"
    )
    return 0


def _argument_problems(args: PlacementArgs) -> list[Problem]:
    problems = too_small(args, "use 1 or more", hosts=1, slots=1, experts=1, layers=1, f=1)
    if (args.loads is None) == (args.skew is None):
        rule = "one of --loads FILE and --skew Z says how tokens are spread"
        problems.append(
            Problem(where="--loads, --skew", value=None, rule=rule, hint="--skew 1 is a common skew, --skew 0 is none")
        )
    if args.skew is not None and not 0 <= args.skew < 50:
        problems.append(Problem(where="--skew", value=args.skew, rule="is 0 or more, and below 50", hint="use 1"))
    for name in ("lost", "max_copies"):
        if getattr(args, name) not in ((), None) and args.current is None:
            flag = f"--{name.replace('_', '-')}"
            rule = "has no effect without --current"
            problems.append(Problem(where=flag, value=getattr(args, name), rule=rule, hint="add --current FILE"))
    if args.racks < 0 or args.racks > max(args.hosts, 1):
        problems.append(Problem(where="--racks", value=args.racks, rule=f"0 ... {args.hosts}, the number of hosts"))
    if not 0 <= args.layer < max(args.layers, 1):
        problems.append(Problem(where="--layer", value=args.layer, rule=f"layers are 0 ... {args.layers - 1}"))
    return problems


def _loads(args: PlacementArgs) -> Floats:
    if args.loads is None:
        return zipf_loads(args.layers, args.experts, skew=args.skew or 0.0, seed=args.seed)
    table = read_loads(_read(args.loads))
    if table.shape != (args.layers, args.experts):
        rule = f"must be {args.layers} layers x {args.experts} experts"
        raise DataError.of(str(args.loads), table.shape, rule, subject="--loads")
    return table


def _read(path: Path) -> Any:
    """A JSON file. Raises `DataError` naming it."""
    try:
        return load_json(path)
    except (OSError, MalformedError) as error:
        rule = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else error.problems[0].rule
        raise DataError.of(str(path), None, rule, subject="arguments") from error


def _present(args: PlacementArgs) -> tuple[HostPlacement | None, HostPool]:
    """What is placed now, and the hosts to place on: those of --current that live, and new ones up to --hosts."""
    racks = equal_pool(args.hosts, args.slots, num_racks=args.racks).racks
    if args.current is None:
        pool = HostPool(slots=(args.slots,) * args.hosts, racks=racks, failure=args.failure)
        raise_if(pool_problems(pool), PlanError, subject="hosts")
        return None, pool
    data = _read(args.current)
    current = read_host_placement(data["placement"] if isinstance(data, dict) and "placement" in data else data)
    strangers = [h for h in args.lost if h not in current.pool.host_names]
    names = [name for name in current.pool.host_names if name not in args.lost][: args.hosts]
    new = max((*current.pool.host_names, -1)) + 1
    names += range(new, new + args.hosts - len(names))
    pool = HostPool(slots=(args.slots,) * args.hosts, racks=racks, failure=args.failure, names=tuple(names))
    problems = pool_problems(pool)
    if strangers:
        rule = f"--current knows the hosts {list(current.pool.host_names)}"
        problems.append(Problem(where="--lost", value=strangers, rule=rule))
    raise_if(problems, PlanError, subject="hosts")
    return current, pool


def placement_result(
    plans: dict[str, HostPlacement],
    points: list[Point],
    chosen: Point,
    loads: Floats,
    *,
    counts: ReplicaCounts,
    worth: CostWeights,
    seconds: float,
) -> dict[str, Any]:
    """What `plan placement --json` writes."""
    certificates = {name: plan.certificate for name, plan in plans.items()}
    racks = {name: plan.rack_certificate for name, plan in plans.items()}
    return {
        "recovery_probability": {name: list(c.probabilities) for name, c in certificates.items()},
        "recovery_probability_high": {name: [float(x.high) for x in c.chances] for name, c in certificates.items()},
        "exact": {name: [x.is_exact for x in c.chances] for name, c in certificates.items()},
        "f_guarantee": {name: c.guaranteed for name, c in certificates.items()},
        "keeps_f": {name: c.guaranteed >= counts.floor for name, c in certificates.items()},
        "max_over_mean_load": {name: plan.max_over_mean(loads) for name, plan in plans.items()},
        "rack_recovery_probability": {name: list(c.probabilities) for name, c in racks.items() if c is not None},
        "independent_recovery_probability": {
            name: plan.independent for name, plan in plans.items() if plan.independent is not None
        },
        "trade_offs": _trade_offs(certificates),
        "f_asked": counts.asked_floor,
        "f": counts.floor,
        "notes": list(counts.notes),
        "chosen": chosen.name,
        "front": [
            {
                "name": p.name,
                "risk": p.risk,
                "max_over_mean_load": p.max_over_mean,
                "copies": p.num_copies,
                "cost": worth.cost(p),
                "on_front": p.on_front,
            }
            for p in points
        ],
        "fetches": [] if chosen.migration is None else [list(fetch) for fetch in chosen.migration.fetches],
        "lost_experts": [] if chosen.migration is None else [list(pair) for pair in chosen.migration.lost],
        "placement": chosen.plan.to_dict(),
        "hash": chosen.plan.hash,
        "seconds": seconds,
    }


def _trade_offs(certificates: dict[str, Certificate]) -> dict[str, list[int]]:
    """Numbers of lost hosts of which another rule survives more, though it survives fewer of a smaller number."""
    ours = certificates["ours"].chances
    found = {
        name: [mine.lost for mine, theirs in zip(ours, certificate.chances, strict=True) if theirs.low > mine.high]
        for name, certificate in certificates.items()
    }
    return {name: lost for name, lost in found.items() if lost}


def _show(
    args: PlacementArgs,
    plans: dict[str, HostPlacement],
    points: list[Point],
    chosen: Point,
    loads: Floats,
    counts: ReplicaCounts,
    worth: CostWeights,
) -> None:
    print(chosen.plan.explain())
    for note in counts.notes:
        print(f"  {note}")
    print(placement_text(chosen.plan, args.layer))
    _show_rules(plans, loads, floor=counts.floor)
    _show_front(points, chosen, worth, moving=args.current is not None)
    if chosen.migration is not None:
        print(chosen.migration.explain())


def _show_rules(plans: dict[str, HostPlacement], loads: Floats, *, floor: int) -> None:
    """P(recover) of each rule, from the first number of lost hosts at which one of them is uncertain."""
    certificates = {name: plan.certificate for name, plan in plans.items()}
    first = min(c.guaranteed for c in certificates.values())
    lost = range(first, min(first + 6, len(certificates["ours"].chances)))
    print(
        f"{'P(recover | k lost)':<20}"
        + "".join(f"{f'k={k}':>16}" for k in lost)
        + f"{'survives any':>14}{'max/mean load':>15}"
    )
    for name, certificate in certificates.items():
        row = "".join(f"{certificate.chances[k]!s:>16}" for k in lost)
        broken = "" if certificate.guaranteed >= floor else f"  breaks f = {floor}"
        print(f"{name:<20}{row}{certificate.guaranteed - 1:>14}{plans[name].max_over_mean(loads):>15.3f}{broken}")
    for name, more in _trade_offs(certificates).items():
        print(f"no placement is best for every k: {name} survives more losses of k = {', '.join(map(str, more))}")


def _show_front(points: list[Point], chosen: Point, worth: CostWeights, *, moving: bool) -> None:
    print(
        f"what recovery, load and copies cost each other (* nothing beats it; risk: each host fails with {worth.failure:g}):"
    )
    for p in points:
        mark, arrow = "*" if p.on_front else " ", "  <- taken" if p is chosen else ""
        copies = f"{p.num_copies:>8} copies" if moving else ""
        print(
            f" {mark} {p.name:<26}risk {p.risk:<12.3g}max/mean load {p.max_over_mean:<8.3f}cost {worth.cost(p):<8.4f}{copies}{arrow}"
        )
