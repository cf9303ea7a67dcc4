"""Kill a run again and again, and prove that nothing of it was lost: `phalanx bench kill --kills 20 --json F`.

Trains a tiny model twice in deterministic mode: once undisturbed, and once killed with SIGKILL at random moments (all ranks at once, one
rank, or the parent alone; a share of the kills while a checkpoint is being written), each time started again by the same command. Then

    every logged loss and gradient norm of the killed run, redone steps included, must equal the undisturbed run's bit for bit
    the ledger (SamplesTaken of all ranks, without what a resumed run went back behind) must hold every micro-batch of every step once,
    with the same sequences as the undisturbed run, and no sequence twice within the first epoch
    the tensors of the last checkpoint must be the same bytes
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from phalanx.core.errors import RunError
from phalanx.core.files import check_writable, write_json
from phalanx.observe.event_log import log_path, read_events
from phalanx.runtime.checkpoint.folder import CheckpointFolder

MODES = ("all ranks", "one rank", "all ranks", "parent")
"""Who is killed, in turn."""
SETTINGS = {
    "model.preset": "tiny",
    "model.vocab": "320",
    "data.tokenizer": "byte",
    "data.builtin_bytes": "1000000",
    "train.seq_len": "32",
    "train.global_batch": "16",
    "train.micro_batch": "2",
    "train.dtype": "float32",
    "train.deterministic": "true",
    "train.eval_interval": "0",
    "train.eval_batches": "1",
    "observe.console": "none",
    "observe.tensorboard": "false",
}


@dataclass(frozen=True, kw_only=True)
class KillArgs:
    """Kill a run again and again, and prove that no step and no sample was lost."""

    kills: int = 20
    """How often to kill it."""
    ranks: int = 4
    """Local ranks."""
    interval: int = 4
    """Steps between checkpoints."""
    seed: int = 0
    """Decides the moments."""
    folder: Path | None = None
    """Where to run (kept afterwards). Default: a temporary folder."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class KillResult:
    kills: int
    kills_while_saving: int = 0
    starts: int = 0
    steps: int = 0
    steps_redone: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench kill ARGS...`; exit status 0 if everything held."""
    options = tyro.cli(KillArgs, args=args, prog="phalanx bench kill", description=__doc__)
    check_writable(options.json)
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-kill-")))
        result = kill_and_compare(
            folder, kills=options.kills, ranks=options.ranks, interval=options.interval, seed=options.seed, tell=print
        )
    print(report(result))
    if options.json is not None:
        write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def report(result: KillResult) -> str:
    head = (
        f"{result.kills} kills ({result.kills_while_saving} while a checkpoint was written), {result.starts} starts, "
        f"{result.steps} steps and {result.steps_redone} of them again, {result.seconds:.0f} s"
    )
    if not result.failures:
        return f"{head}\nevery loss equals that of an undisturbed run bit for bit, every sample was seen exactly once"
    return "\n".join([head, *(f"FAILED: {f}" for f in result.failures)])


def kill_and_compare(
    folder: Path, *, kills: int, ranks: int = 4, interval: int = 4, seed: int = 0, tell: Any = lambda text: None
) -> KillResult:
    """The whole experiment in `folder`."""
    begin_s = time.monotonic()
    steps = 2 * (kills + 1) * interval
    calm = _Run(folder, "undisturbed", ranks=ranks, steps=steps, interval=interval)
    wild = _Run(folder, "killed", ranks=ranks, steps=steps, interval=interval)
    result = KillResult(kills=kills, steps=steps)
    calm.finish()
    tell(f"undisturbed run: {steps} steps")
    chance = random.Random(seed)
    for number in range(kills):
        saving = number % 3 == 2
        mode = MODES[number % len(MODES)]
        moment = wild.kill_at_random(chance, mode=mode, saving=saving)
        result.kills_while_saving += moment.saving
        tell(f"kill {number + 1}: {mode} {moment.text}")
    wild.finish()
    result.starts = kills + 1
    result.steps_redone = sum(wild.times_done().values()) - steps
    result.failures = compare(calm, wild)
    result.seconds = time.monotonic() - begin_s
    return result


@dataclass(frozen=True)
class _Moment:
    saving: bool
    text: str


class _Run:
    """A training run that is started as a user starts it."""

    def __init__(self, folder: Path, name: str, *, ranks: int, steps: int, interval: int) -> None:
        self.path = folder / name
        self.ranks = ranks
        self.steps = steps
        self.interval = interval
        settings = {
            **SETTINGS,
            "run.name": name,
            "run.folder": str(folder),
            "data.cache": str(folder / "cache"),
            "launch.ranks": str(ranks),
            "train.steps": str(steps),
            "checkpoint.interval": str(interval),
        }
        words = [w for key, value in settings.items() for w in (f"--{key}", value)]
        self.command = [sys.executable, "-m", "phalanx", "train", *words]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self) -> None:
        process = self.start()
        output, _ = process.communicate()
        if process.returncode:
            raise RunError(f"{self.path.name}: the run ended with exit code {process.returncode}\n{output}")

    def kill_at_random(self, chance: random.Random, *, mode: str, saving: bool) -> _Moment:
        """Start, wait for a random moment of training (or of a save), kill. A run that ends by itself before is an error."""
        before, wanted = self._log_size(), chance.randint(0, self.interval + self.interval // 2)
        process = self.start()
        try:
            self._await(process, lambda: self._log_size() > before and self._steps_since(before) >= wanted)
            if saving:
                self._await(process, self._is_saving)
            time.sleep(chance.random() * (0.01 if saving else 0.05))
            caught = self._is_saving()
            self._kill(process, mode, chance)
        finally:
            process.kill()
            process.communicate()
        return _Moment(caught, "while saving" if caught else f"{self._steps_since(before)} steps after its start")

    def _kill(self, process: subprocess.Popen[str], mode: str, chance: random.Random) -> None:
        ranks = children(process.pid)
        victims = {"all ranks": ranks, "one rank": chance.sample(ranks, min(1, len(ranks))), "parent": [process.pid]}[
            mode
        ]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=30)
        end_s = time.monotonic() + 30
        while any(_runs(pid) for pid in ranks):  # a parent's death takes its ranks along, a little later
            if time.monotonic() > end_s:
                raise RunError(f"ranks {ranks} outlive their parent")
            time.sleep(0.005)

    def _await(self, process: subprocess.Popen[str], ready: Any) -> None:
        end_s = time.monotonic() + 120
        while not ready():
            if process.poll() is not None:
                output = process.stdout.read() if process.stdout else ""
                raise RunError(f"{self.path.name}: ended by itself with exit code {process.returncode}\n{output}")
            if time.monotonic() > end_s:
                raise RunError(f"{self.path.name}: no step within 120 s")
            time.sleep(0.002)

    def _is_saving(self) -> bool:
        folder = self.path / "checkpoints"
        return folder.is_dir() and any(name.startswith(".writing") for name in os.listdir(folder))

    def _log_size(self) -> int:
        path = log_path(self.path, 0)
        return path.stat().st_size if path.exists() else 0

    def _steps_since(self, offset: int) -> int:
        """Steps logged by rank 0 behind `offset` bytes."""
        path = log_path(self.path, 0)
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().count(b'"kind":"StepEnded"')

    # ---- what the logs say

    def records(self, rank: int) -> list[dict[str, Any]]:
        return list(read_events(log_path(self.path, rank)))

    def times_done(self) -> Counter[int]:
        """How often each step was logged by rank 0, redone ones included."""
        return Counter(r["step"] for r in self.records(0) if r["kind"] == "StepEnded")

    def curve(self, rank: int) -> dict[int, set[tuple[float, float]]]:
        """(loss, gradient norm) of each step, all that were ever logged."""
        found: dict[int, set[tuple[float, float]]] = {}
        for r in self.records(rank):
            if r["kind"] == "StepEnded":
                found.setdefault(r["step"], set()).add((r["loss"], r["grad_norm"]))
        return found

    def ledger(self) -> Counter[tuple[int, int, tuple[int, ...]]]:
        """(step, micro-batch, its sequences) of all ranks, without what a resumed run went back behind."""
        entries: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        for rank in range(self.ranks):
            taken: dict[int, dict[str, Any]] = {}
            for r in self.records(rank):
                if r["kind"] == "RunStarted":
                    taken = {step: t for step, t in taken.items() if step <= r["step"]}
                elif r["kind"] == "SamplesTaken":
                    taken[r["step"]] = r
            for step, r in taken.items():
                size = len(r["windows"]) // len(r["microbatches"])
                for i, number in enumerate(r["microbatches"]):
                    entries[step, number, tuple(r["windows"][i * size : (i + 1) * size])] += 1
        return entries

    def tensor_files(self) -> dict[str, str]:
        folder = CheckpointFolder(self.path / "checkpoints")
        return {n: e.sha256 for n, e in folder.read_state(self.steps).files.items() if n.endswith(".distcp")}


def compare(calm: _Run, wild: _Run) -> list[str]:
    """What differs between the undisturbed and the killed run; nothing, if all is well."""
    failures = []
    for rank in range(calm.ranks):
        reference, found = calm.curve(rank), wild.curve(rank)
        if sorted(reference) != list(range(1, calm.steps + 1)) or any(len(v) > 1 for v in reference.values()):
            failures.append(f"rank {rank} of the undisturbed run did not log each step once")
        wrong = [s for s in reference if found.get(s) != reference[s]]
        if wrong:
            failures.append(f"rank {rank}: steps {_some(wrong)} have another loss or gradient norm, or none")
    failures += ledger_problems(calm.ledger(), wild.ledger(), steps=calm.steps)
    if calm.tensor_files() != wild.tensor_files():
        failures.append("the tensors of the last checkpoints differ")
    return failures


def ledger_problems(
    reference: Counter[tuple[int, int, tuple[int, ...]]],
    found: Counter[tuple[int, int, tuple[int, ...]]],
    *,
    steps: int,
) -> list[str]:
    """Samples that were lost, repeated or exchanged."""
    failures = []
    for name, ledger in (("undisturbed", reference), ("killed", found)):
        places = Counter((step, number) for step, number, _ in ledger.elements())
        repeated = sorted(p for p, times in places.items() if times > 1)
        per_step = Counter(step for step, _ in places)
        uneven = sorted(s for s in range(1, steps + 1) if per_step[s] != max(per_step.values()))
        windows = Counter(w for _, _, each in ledger.elements() for w in each)
        if repeated:
            failures.append(f"{name} run: micro-batches {_some(repeated)} (step, number) were trained on twice")
        if uneven:
            failures.append(f"{name} run: steps {_some(uneven)} miss micro-batches")
        if any(times > 1 for times in windows.values()):
            failures.append(
                f"{name} run: sequences {_some(sorted(w for w, t in windows.items() if t > 1))} were seen twice"
            )
    if reference != found:
        odd = sorted({entry[:2] for entry in (reference - found) + (found - reference)})
        failures.append(f"other sequences than in the undisturbed run at (step, micro-batch) {_some(odd)}")
    return failures


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return f"{shown} and {len(items) - 8} more" if len(items) > 8 else shown


def children(pid: int) -> list[int]:
    """Processes that `pid` forked."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
