"""Emulate hosts and links on this machine: run a job in them and break things, measure the links, clean up.

`run` starts hosts joined by links of a given rate and a command in every rank, with the variables that torchrun sets; a scenario file kills,
freezes or cuts at given seconds or steps. `measure` says what the links carry. `clean` removes what a killed testbed left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from phalanx.core.arguments import run_subcommand
from phalanx.core.errors import TestbedError
from phalanx.core.files import check_writable, write_json
from phalanx_lab.testbed.cluster import ClusterSpec, parse_rate
from phalanx_lab.testbed.measure import measure as measure_links
from phalanx_lab.testbed.owner import reap_stale
from phalanx_lab.testbed.play import play
from phalanx_lab.testbed.scenario import Scenario, load_scenario
from phalanx_lab.testbed.testbed import Testbed

JsonFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
_RATE_HELP = "Rate of each host's link in each direction: 1gbit, 200mbit, 1e9, or none for no limit."


@dataclass(frozen=True, kw_only=True)
class BedArgs:
    """The cluster."""

    hosts: int = 2
    """Emulated hosts."""
    rate: Annotated[str, tyro.conf.arg(metavar="RATE", help=_RATE_HELP)] = "1gbit"
    latency: float = 0.0
    """Seconds that the links add one way (needs netem in the kernel)."""
    access: Literal["auto", "root", "user"] = "auto"
    """Make namespaces as root, through a user namespace, or whichever works."""


@dataclass(frozen=True, kw_only=True)
class RunArgs(BedArgs):
    """Run a command, given after --, in every rank."""

    ranks_per_host: int = 1
    """Ranks on each host."""
    scenario: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML file that says what happens when; see the README beside this file."""
    logs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/testbed")
    """Each run makes a folder in here with one log file per rank."""
    timeout: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Kill the job after so many seconds; it has failed then."""
    keep_going: bool = False
    """Let the other ranks run on when one fails."""
    even_cores: bool = False
    """Every host gets an equal share of the cores, however many programs it runs (needs the right to make control groups)."""
    quiet: bool = False
    """Do not print what the ranks print."""
    json: JsonFile = None
    """File for the result: ok, seconds, ranks, actions, problems, logs."""


@dataclass(frozen=True, kw_only=True)
class MeasureArgs(BedArgs):
    """Measure what the links carry, one way, both ways and inside a host."""

    seconds: float = 1.0
    """Time for each figure."""
    json: JsonFile = None
    """File for the result: hosts, rate_bit_per_s, one_way_bit_per_s, both_ways_bit_per_s, inside_bit_per_s, latency_s, leftovers, ..."""


@dataclass(frozen=True, kw_only=True)
class CleanArgs:
    """Kill the processes and remove the folders of testbeds whose owner is dead. Every testbed does this at its start."""

    json: JsonFile = None
    """File for the result: reaped."""


def main(args: list[str]) -> int:
    """Run `phalanx testbed ARGS... [-- COMMAND ...]`; returns the exit status."""
    cut = args.index("--") if "--" in args else len(args)
    command = args[cut + 1 :]

    def run(args: RunArgs) -> int:
        """Run a command, given after --, in every rank of emulated hosts."""
        return run_command(args, command)

    if command and args[:1] != ["run"]:
        rule = "only `phalanx testbed run` takes a command"
        raise TestbedError.of("--", " ".join(command), rule, subject="arguments")
    commands: dict[str, Callable[..., int]] = {"run": run, "measure": measure, "clean": clean}
    return run_subcommand(commands, args[:cut], prog="phalanx testbed", description=__doc__)


def _spec(args: BedArgs, *, ranks_per_host: int = 1) -> ClusterSpec:
    rate = None if args.rate == "none" else parse_rate(args.rate, where="--rate", error=TestbedError)
    return ClusterSpec(
        hosts=args.hosts, ranks_per_host=ranks_per_host, link_bit_per_s=rate, link_latency_s=args.latency
    )


def _build(spec: ClusterSpec, args: BedArgs, *, folder: Path | None = None, even_cores: bool = False) -> Testbed:
    bed = Testbed(spec, access=args.access, folder=folder, even_cores=even_cores)
    for what in bed.reaped:
        print(f"cleaned up after a dead testbed: {what}", file=sys.stderr)
    return bed


def run_command(args: RunArgs, command: list[str]) -> int:
    """0 if every rank that was not ended on purpose ended with 0 and all of the scenario happened, else 1."""
    check_writable(args.json)
    if not command:
        hint = "put it after --: phalanx testbed run -- hostname"
        raise TestbedError.of("command", "", "there is none", hint, subject="arguments")
    spec = _spec(args, ranks_per_host=args.ranks_per_host)
    scenario = load_scenario(args.scenario, spec=spec) if args.scenario else Scenario()
    echo = None if args.quiet else sys.stdout
    with _build(spec, args, folder=_new_folder(args.logs), even_cores=args.even_cores) as bed:
        if bed.uneven:
            print(f"the hosts' shares of the cores are not even: {bed.uneven}", file=sys.stderr)
        if not args.quiet:
            print(bed.explain())
        job = bed.run(command, name="ranks")
        result, done = play(bed, scenario, job, timeout_s=args.timeout, keep_going=args.keep_going, echo=echo)
    for action in done:
        print(f"after {action.seconds:.2f} s: {action.action}")
    print(result.explain())
    print(f"logs: {job.folder}")
    if args.json is not None:
        record = {
            "ok": result.ok,
            "seconds": result.seconds,
            "hosts": spec.hosts,
            "ranks_per_host": spec.ranks_per_host,
            "rate_bit_per_s": spec.link_bit_per_s,
            "access": bed.access,
            "ranks": [asdict(r) for r in result.ranks],
            "actions": [asdict(d) for d in done],
            "problems": list(result.problems),
            "logs": str(job.folder),
            "leftovers": bed.leftovers(),
        }
        write_json(args.json, record)
    return 0 if result.ok else 1


def _new_folder(parent: Path) -> Path:
    """A folder named after the moment, that does not exist yet."""
    name = time.strftime("%Y%m%d-%H%M%S")
    others = (parent / f"{name}-{i}" for i in range(2, 10_000))
    return next(folder for folder in (parent / name, *others) if not folder.exists())


def measure(args: MeasureArgs) -> int:
    """Measure what the links carry: one stream one way, both directions loaded, inside a host, latency."""
    check_writable(args.json)
    with _build(_spec(args), args) as bed:
        report = measure_links(bed, seconds=args.seconds)
    print(report.explain())
    leftovers = bed.leftovers()
    print(f"  left behind: {', '.join(leftovers) or 'nothing'}")
    write_json(args.json, {**asdict(report), "warning": report.warning(), "leftovers": leftovers})
    return 1 if leftovers else 0


def clean(args: CleanArgs) -> int:
    """Kill the processes and remove the folders of testbeds whose owner is dead."""
    check_writable(args.json)
    reaped = reap_stale()
    print("\n".join(reaped) or "nothing to clean")
    write_json(args.json, {"reaped": reaped})
    return 0
