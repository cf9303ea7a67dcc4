"""Kill a run again and again, and prove that nothing of it was lost: `phalanx bench kill --kills 20 --json F`.

Trains a tiny model twice in deterministic mode: once undisturbed, and once killed with SIGKILL at random moments (all ranks at once, one
rank, or the parent alone; a share of the kills while a checkpoint is being written), each time started again by the same command. Then

    every logged loss and gradient norm of the killed run, redone steps included, must equal the undisturbed run's bit for bit
    the ledger (SamplesTaken of all ranks, without what a resumed run went back behind) must hold every micro-batch of every step once,
    with the same sequences as the undisturbed run, and no sequence twice within the first epoch
    the tensors of the last checkpoint must be the same bytes
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, RunError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.observe.event_log import log_path, read_events
from phalanx.runtime.checkpoint.folder import CheckpointFolder
from phalanx_lab.bench.cluster import (
    GONE_S,
    TrainingCluster,
    await_end,
    kept_or_temporary,
    send,
    tiny_run,
    train_command,
)

MODES = ("all ranks", "one rank", "all ranks", "parent")
"""Who is killed, in turn."""
SETTINGS: dict[str, object] = {
    "model.vocab": 320,
    "data.builtin_bytes": 1_000_000,
    "train.seq_len": 32,
    "train.global_batch": 16,
    "train.micro_batch": 2,
    "train.deterministic": "true",
    "resilience.heal": "false",  # else a rank that is killed is replaced, and the run ends by itself
}
LOOK_S = 0.002


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
    options = read_words(KillArgs, args, prog="phalanx bench kill", description=__doc__)
    raise_if(too_small(options, kills=1, ranks=2, interval=1), ConfigError, subject="the options")
    check_writable(options.json)
    with kept_or_temporary(options.folder, prefix="phalanx-kill-") as folder:
        result = kill_and_compare(
            folder, kills=options.kills, ranks=options.ranks, interval=options.interval, seed=options.seed, tell=print
        )
    print(report(result))
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
        own = {"launch.ranks": ranks, "train.steps": steps, "checkpoint.interval": interval}
        self.command = train_command(tiny_run(folder, name, folder / "cache", {**SETTINGS, **own}))
        self.printed = folder / f"{name}.txt"
        self.cluster = TrainingCluster(self.path, ranks=ranks)

    def finish(self) -> None:
        with self.cluster as cluster:
            cluster.start(self.path.name, self.command, out=self.printed)
            cluster.wait_for_end(float("inf"))
        code = cluster.codes[self.path.name]
        if code:
            raise RunError(f"{self.path.name}: the run ended with exit code {code}\n{cluster.last_words()}")

    def kill_at_random(self, chance: random.Random, *, mode: str, saving: bool) -> _Moment:
        """Start, wait for a random moment of training (or of a save), kill. A run that ends by itself before is an error."""
        wanted = chance.randint(0, self.interval + self.interval // 2)
        with self.cluster as cluster:
            cluster.forget()
            cluster.start(self.path.name, self.command, out=self.printed)
            cluster.wait_for(lambda: self._begun() and self._steps() >= wanted, f"step {wanted}", look_s=LOOK_S)
            if saving:
                cluster.wait_for(self._is_saving, "a checkpoint", look_s=LOOK_S)
            time.sleep(chance.random() * (0.01 if saving else 0.05))
            caught = self._is_saving()
            self._kill(mode, chance)
            return _Moment(caught, "while saving" if caught else f"{self._steps()} steps after its start")

    def _kill(self, mode: str, chance: random.Random) -> None:
        parent, ranks = self.cluster.pids[self.path.name], sorted(self.cluster.workers().values())
        victims = {"all ranks": ranks, "one rank": chance.sample(ranks, min(1, len(ranks))), "parent": [parent]}[mode]
        for pid in victims:
            send(pid, signal.SIGKILL)
        if self.cluster.wait_for_end(GONE_S):
            raise RunError(f"{self.path.name}: still runs {GONE_S:g} s after {mode} was killed")
        await_end(ranks)  # a parent's death takes its ranks along, a little later

    def _is_saving(self) -> bool:
        folder = self.path / "checkpoints"
        return folder.is_dir() and any(name.startswith(".writing") for name in os.listdir(folder))

    def _begun(self) -> bool:
        return any(r["slot"] == 0 for r in self.cluster.told())

    def _steps(self) -> int:
        """Steps that rank 0 has logged since this start."""
        return sum(r["slot"] == 0 and r["kind"] == "StepEnded" for r in self.cluster.told())

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
