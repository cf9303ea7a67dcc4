"""Change every file and message that Phalanx reads, and read it: `phalanx bench fuzz --cases 200000 --json F`.

Case `n` is what seed and `n` give, whatever ran before: `--case N` repeats one and shows what it raised. Readers take turns. Cases run in forked processes with a limit of address space; the watching process kills
one that takes too long over a case, and goes on behind it. A *finding* is whatever is neither read nor refused by an error of ours: a traceback, a hang, memory beyond the limit, a process that ends.

Exit status 1 where there is a finding.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phalanx.core import messages
from phalanx.core.arguments import read_words
from phalanx.core.errors import ConfigError, PhalanxError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx_lab.bench.fuzz.readers import FuzzReader, all_readers

Ending = Literal["read", "refused", "traceback", "memory", "hang", "ended"]
SOUND = ("read", "refused")
BATCH = 2000
"""Cases of one process."""
MOST_SHOWN = 200
"""Findings that are kept word by word."""


@dataclass(frozen=True, kw_only=True)
class FuzzArgs:
    """Change every file and message that Phalanx reads, and read it."""

    cases: int = 20_000
    """How many."""
    seconds: float = 0.0
    """Stop after so many seconds; 0: after all cases."""
    seed: int = 0
    """Decides all changes."""
    first: int = 0
    """Number of the first case."""
    case: int | None = None
    """Repeat this one only, and show what it raised."""
    only: str | None = None
    """Readers whose name has this in it."""
    memory_gb: float = 6.0
    """Address space of a process."""
    limit_s: float = 15.0
    """Time of a case."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A case that was neither read nor refused."""

    case: int
    reader: str
    end: Ending
    text: str
    """The traceback, or how the process ended."""


@dataclass(kw_only=True)
class FuzzResult:
    cases: int = 0
    seed: int = 0
    endings: dict[str, dict[str, int]] = field(default_factory=dict)
    """Reader -> how many cases ended how."""
    tracebacks: int = 0
    hangs: int = 0
    over_memory: int = 0
    """Cases that took more than the limit, or whose process ended."""
    slowest_s: float = 0.0
    slowest: str = ""
    most_resident_bytes: int = 0
    """Of any process."""
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench fuzz ARGS...`; exit status 0 where every case was read or refused."""
    options = read_words(FuzzArgs, args, prog="phalanx bench fuzz", description=__doc__)
    check_writable(options.json)
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-") as folder:
        readers = chosen(all_readers(Path(folder) / "seeds"), options)
        if options.case is not None:
            return repeat(readers, options, Path(folder))
        result = fuzz(readers, options, Path(folder))
    print(report(result))
    write_json(options.json, asdict(result))
    return 1 if result.findings else 0


def chosen(readers: Sequence[FuzzReader], options: FuzzArgs) -> list[FuzzReader]:
    """Readers by name. Raises `ConfigError` with all that is wrong with the options."""
    found = [r for r in readers if options.only is None or options.only in r.name]
    rules = (
        ("--cases", options.cases, options.cases >= 1, "must be at least 1"),
        ("--limit-s", options.limit_s, options.limit_s > 0, "must be above 0"),
        ("--only", options.only, bool(found), f"names no reader: {', '.join(r.name for r in readers)}"),
    )
    raise_if(
        [Problem(where=w, value=v, rule=rule) for w, v, ok, rule in rules if not ok], ConfigError, subject="options"
    )
    return found


def fuzz(readers: Sequence[FuzzReader], options: FuzzArgs, folder: Path) -> FuzzResult:
    """All cases. Call it before any tensor operation (it forks)."""
    result, begin_s, case = FuzzResult(seed=options.seed), time.monotonic(), options.first
    last = options.first + options.cases
    while case < last and not 0 < options.seconds < time.monotonic() - begin_s:
        case = _run_some(readers, options, folder, result, range(case, min(last, case + BATCH)), begin_s)
    result.seconds = round(time.monotonic() - begin_s, 1)
    return result


def _run_some(
    readers: Sequence[FuzzReader], options: FuzzArgs, folder: Path, result: FuzzResult, cases: range, begin_s: float
) -> int:
    """Cases of one process, until it ends; the number of the next one."""
    pid, ends = _forked(readers, options, folder, cases)
    case, rest, killed = cases.start, b"", False
    while select.select([ends], [], [], options.limit_s)[0]:
        data = os.read(ends, 1 << 20)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            _note(result, messages.decode(line))
            case += 1
        if 0 < options.seconds < time.monotonic() - begin_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(ends)
            return case
    else:
        killed = True
        os.kill(pid, signal.SIGKILL)
    os.close(ends)
    status = os.waitpid(pid, 0)[1]
    if killed or status:
        end: Ending = "hang" if killed else "ended"
        text = f"no end within {options.limit_s} s" if killed else f"its process ended with status {status}"
        _note(result, (case, changed(readers, options.seed, case)[0].name, end, 0.0, 0, text))
        case += 1
    return case


def _forked(readers: Sequence[FuzzReader], options: FuzzArgs, folder: Path, cases: range) -> tuple[int, int]:
    """A process that runs these cases, and where it tells of them."""
    ends, told = os.pipe()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(ends)
            _work(readers, options, folder, cases, told)
            status = 0
        finally:  # never return into the parent's stack
            os._exit(status)
    os.close(told)
    return pid, ends


def _note(result: FuzzResult, told: tuple[int, str, Ending, float, int, str]) -> None:
    case, reader, end, seconds, resident, text = told
    result.cases += 1
    counts = result.endings.setdefault(reader, {})
    counts[end] = counts.get(end, 0) + 1
    result.most_resident_bytes = max(result.most_resident_bytes, resident)
    if seconds > result.slowest_s:
        result.slowest_s, result.slowest = round(seconds, 3), f"{reader}, case {case}"
    if end in SOUND:
        return
    result.tracebacks += end == "traceback"
    result.hangs += end == "hang"
    result.over_memory += end in ("memory", "ended")
    if len(result.findings) < MOST_SHOWN:
        result.findings.append(Finding(case=case, reader=reader, end=end, text=text))


# ---- in the forked process ----------------------------------------------------------------------------------------------


def _work(readers: Sequence[FuzzReader], options: FuzzArgs, folder: Path, cases: range, told: int) -> None:
    limit = int(options.memory_gb * (1 << 30))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    for case in cases:
        reader, data = changed(readers, options.seed, case)
        begin_s = time.monotonic()
        end, text = ending(reader, data, folder)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = messages.encode((case, reader.name, end, time.monotonic() - begin_s, resident, text))
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[os.write(told, rest) :]


def changed(readers: Sequence[FuzzReader], seed: int, case: int) -> tuple[FuzzReader, bytes]:
    """The reader of a case, and what it gets."""
    turn, rng = divmod(case, len(readers)), random.Random(f"{seed}/{case}")
    reader = readers[turn[1]]
    if turn[0] % reader.every:
        reader = rng.choice([r for r in readers if r.every == 1] or [reader])
    return reader, rng.choice(reader.changes)(rng.choice(reader.seeds), rng)


def ending(reader: FuzzReader, data: bytes, folder: Path) -> tuple[Ending, str]:
    """How the reader takes it, and the traceback where that is a finding."""
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        reader.read(data, place)
    except PhalanxError as err:
        with contextlib.suppress(UnicodeEncodeError):
            str(err).encode()
            return "refused", ""
        return "traceback", f"its words are no text: {str(err)!r}"
    except MemoryError:
        return "memory", traceback.format_exc()[-4000:]
    except BaseException:  # a panic of Rust is no Exception
        return "traceback", traceback.format_exc()[-4000:]
    return "read", ""


# ---- what is told -------------------------------------------------------------------------------------------------------


def repeat(readers: Sequence[FuzzReader], options: FuzzArgs, folder: Path) -> int:
    """One case, here, without limits."""
    assert options.case is not None
    reader, data = changed(readers, options.seed, options.case)
    print(f"{reader.name}: {data[:2000]!r}")
    (folder / "case").mkdir()
    try:
        reader.read(data, folder / "case")
    except PhalanxError as err:
        print(err)
    return 0


def report(result: FuzzResult) -> str:
    """What a person reads."""
    totals = Counter[str]()
    lines = []
    for reader, counts in sorted(result.endings.items()):
        totals.update(counts)
        lines.append(f"  {reader:<24}" + ", ".join(f"{n} {end}" for end, n in sorted(counts.items())))
    kinds = Counter((f.reader, f.end, _place(f.text)) for f in result.findings)
    for (reader, end, place), number in kinds.most_common():
        example: Any = next(
            f.case for f in result.findings if (f.reader, f.end, _place(f.text)) == (reader, end, place)
        )
        lines.append(f"  {number} x {end} in {reader}, as case {example}: {place}")
    lines.append(
        f"{result.cases} cases, seed {result.seed}: {totals['read']} read, {totals['refused']} refused, {result.tracebacks} tracebacks, {result.hangs} hangs, "
        f"{result.over_memory} over memory; the slowest took {result.slowest_s} s ({result.slowest}), the largest process {result.most_resident_bytes / 1e9:.2f} GB"
    )
    return "\n".join(lines)


def _place(text: str) -> str:
    """Last line of ours, and the error."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    ours = [line for line in lines if "phalanx/" in line and "phalanx_lab" not in line]
    return f"{(ours[-1] if ours else '')[-100:]} {lines[-1][:150]}"
