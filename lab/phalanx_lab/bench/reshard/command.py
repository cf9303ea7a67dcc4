"""Moving a sharded tensor over real, shaped links: `phalanx bench reshard --json F`, on the testbed.

Five emulated hosts of four ranks, each with a link slow enough that it is the bottleneck and not this machine. For each of the paper's nine cases
(`nine.py`), at 64 MiB: the rate of a link is measured by the transport itself, the least time that any schedule needs follows from
it, and these take turns after a warm-up:

    ours        the best schedule found, with relay by receivers
    naive       the paper's broadcast with the first replica as sender, in tile order
    gather      send/recv of a share to each rank of a host, which then gather inside the host
    sendrecv    a message to each rank that needs it

Seconds are from all ranks ready to the last one complete; medians of the rounds. The last two take up to seven times as long as ours, so a
machine's noise is small beside them, and they have fewer turns. Exit status 1 where an element arrived wrong, or where by our schedule some byte
entered a host more than once. `missed` lists the bars that were not reached.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_bytes, format_rate
from phalanx_lab.bench.reshard.nine import CASES, DEST_HOSTS, SOURCE_HOSTS
from phalanx_lab.bench.reshard.rank import ReshardJob, host_main
from phalanx_lab.testbed.cluster import ClusterSpec, parse_rate
from phalanx_lab.testbed.testbed import Testbed

METHODS = {"ours": "best", "naive": "naive", "gather": "local_all_gather", "sendrecv": "send_recv"}
"""Name here -> method of `plan_reshard`."""
SLOW = ("gather", "sendrecv")
HOSTS = SOURCE_HOSTS + DEST_HOSTS
LONGEST_S = 1800.0
OVER_BOUND = 1.15
FASTER = {
    "naive": {2: 1.4, 3: 1.4, 5: 1.4, 6: 1.4, 9: 1.4},
    "sendrecv": {1: 3.5, 2: 3.5, 3: 3.5, 5: 3.5, 6: 3.5, 9: 3.5, 7: 7.0},
}
"""Method -> case -> how many times faster ours must be."""


@dataclass(frozen=True, kw_only=True)
class BenchReshardArgs:
    """Move the paper's nine cases over shaped links, beside its baselines."""

    cases: tuple[int, ...] = tuple(c.number for c in CASES)
    mib: int = 64
    """Size of the whole tensor."""
    rate: str = "150mbit"
    """Rate of each host's link, in each direction, headers included."""
    rounds: int = 3
    """Turns of each method."""
    slow_rounds: int = 1
    """Turns of gather and sendrecv, at most."""
    methods: tuple[str, ...] = ("ours", "naive", "sendrecv")
    """Methods to time: ours, naive, gather, sendrecv."""
    message_kib: int | None = None
    """Size of a message. Default: what the planner takes."""
    open_hops: int | None = None
    """Messages under way at a time. Default: what the planner takes."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    case: int
    src: str
    dst: str
    shape: list[int]
    bytes: int
    link_bit_per_s: float
    """Payload that one stream carried, measured before the case."""
    bound_s: float
    """The least time of any schedule, at that rate."""
    over_bound: float
    """Ours."""
    seconds: dict[str, float]
    """Median of each method."""
    faster_than: dict[str, float]
    """Median over rounds of the quotient of a method's time and ours in the same round."""
    entered_once: bool
    """Whether, by ours, each distinct byte entered each destination host exactly once."""
    right: bool
    methods: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReshardResult:
    rate_bit_per_s: float
    mib: int
    rounds: int
    cases: list[CaseResult] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench reshard ARGS...` (or, with `--host-of FILE`, one host of it)."""
    if args[:1] == ["--host-of"]:
        return host_main(Path(args[1]))
    options = read_words(BenchReshardArgs, args, prog="phalanx bench reshard", description=__doc__)
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json)
    result = measure(options)
    Console().print(_table(result))
    for line in result.missed + result.failures:
        print(line)
    write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def _problems(options: BenchReshardArgs) -> list[Problem]:
    numbers = [c.number for c in CASES]
    problems = too_small(options, mib=1, rounds=1, slow_rounds=1, message_kib=1, open_hops=1)
    for name, given, legal in (("cases", options.cases, numbers), ("methods", options.methods, list(METHODS))):
        strays = [value for value in given if value not in legal]
        if strays or not given:
            hint = "legal: " + " ".join(map(str, legal))
            problems.append(Problem(where=f"--{name}", value=strays, rule="must be one or more of the list", hint=hint))
    if "ours" not in options.methods:
        problems.append(Problem(where="--methods", value=list(options.methods), rule="must have ours", hint="add it"))
    return problems


def measure(options: BenchReshardArgs) -> ReshardResult:
    """All cases in one bed."""
    rate = parse_rate(options.rate, where="--rate", error=ConfigError)
    job = ReshardJob(
        cases=options.cases,
        methods=tuple(METHODS[name] for name in options.methods),
        mib=options.mib,
        rounds=options.rounds,
        slow=tuple(METHODS[name] for name in SLOW),
        slow_rounds=min(options.rounds, options.slow_rounds),
        message_kib=options.message_kib,
        open_hops=options.open_hops,
    )
    with tempfile.TemporaryDirectory(prefix="phalanx-reshard-") as name:
        job_file = Path(name) / "job.json"
        job_file.write_text(json.dumps(asdict(job)))
        with Testbed(ClusterSpec(hosts=HOSTS, ranks_per_host=1, link_bit_per_s=rate)) as bed:
            command = [sys.executable, "-m", "phalanx", "bench", "reshard", "--host-of", str(job_file)]
            ended = bed.run(command, env={"OMP_NUM_THREADS": "1"}).wait(timeout_s=LONGEST_S)
            if not ended.ok:
                raise RunError(f"the hosts of the benchmark failed: {ended.explain()}")
        rows = [json.loads(line) for line in job_file.with_suffix(".rows").read_text().splitlines()]
    cases = [_case(row) for row in rows]
    result = ReshardResult(rate_bit_per_s=rate, mib=options.mib, rounds=options.rounds, cases=cases)
    for case in cases:
        result.missed.extend(missed(case))
        result.failures.extend(failures(case))
    return result


def _case(row: dict[str, Any]) -> CaseResult:
    """A row of the ranks, with its medians."""
    names = {method: name for name, method in METHODS.items()}
    methods = {names[method]: found for method, found in row["methods"].items()}
    ours = methods["ours"]["seconds"]
    seconds = {name: statistics.median(found["seconds"]) for name, found in methods.items()}
    faster = {
        name: statistics.median(b / a for a, b in zip(ours, found["seconds"], strict=False))
        for name, found in methods.items()
        if name != "ours"
    }
    return CaseResult(
        **{key: row[key] for key in ("case", "src", "dst", "shape", "bytes", "link_bit_per_s", "bound_s")},
        over_bound=seconds["ours"] / row["bound_s"],
        seconds=seconds,
        faster_than=faster,
        entered_once=methods["ours"]["once"],
        right=all(found["right"] for found in methods.values()),
        methods=methods,
    )


def missed(case: CaseResult) -> list[str]:
    """Bars that a case did not reach."""
    found = []
    if case.over_bound > OVER_BOUND:
        found.append(f"case {case.case}: {case.over_bound:.3f} x the bound, more than {OVER_BOUND}")
    for name, ratio in case.faster_than.items():
        wanted = FASTER.get(name, {}).get(case.case, 0.0)
        if ratio < wanted:
            found.append(f"case {case.case}: {ratio:.2f} times faster than {name}, less than {wanted}")
    return found


def failures(case: CaseResult) -> list[str]:
    """What must never be, however slow the machine."""
    found = [] if case.right else [f"case {case.case}: wrong elements arrived"]
    ours = case.methods["ours"]
    if not case.entered_once:
        extra = ours["entered_bytes"] - ours["distinct_bytes"]
        found.append(f"case {case.case}: {format_bytes(extra)} entered a host again")
    return found


def _table(result: ReshardResult) -> Table:
    links = sorted(c.link_bit_per_s for c in result.cases)
    carried = f" carrying {format_rate(links[0], 'bit')} to {format_rate(links[-1], 'bit')}" if links else ""
    rate = format_rate(result.rate_bit_per_s, "bit")
    again = [str(c.case) for c in result.cases if not c.entered_once]
    table = Table(
        title=f"{result.mib} MiB, links of {rate}{carried}, medians of {result.rounds}",
        caption="bound and ours: seconds; others: times ours\nby ours each distinct byte entered each host once: "
        + (f"NOT in case {', '.join(again)}" if again else "in all cases"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    others = [name for name in METHODS if any(name in c.faster_than for c in result.cases)]
    for title in ("case", "source", "destination"):
        table.add_column(title, no_wrap=True)
    for title in ("bound", "ours", "/bound", *others):
        table.add_column(title, justify="right", no_wrap=True)
    for c in result.cases:
        times = (f"{c.bound_s:.3f}", f"{c.seconds['ours']:.3f}", f"{c.over_bound:.3f}")
        table.add_row(str(c.case), c.src, c.dst, *times, *(f"{c.faster_than[name]:.2f}" for name in others))
    return table
