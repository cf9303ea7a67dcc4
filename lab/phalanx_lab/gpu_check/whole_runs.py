"""Whole runs of the trainer on a tiny model, each in a process of its own that may stand still for so long and no longer: then it says where its threads stand, and is killed."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from phalanx.core.config import Recipe
from phalanx.core.recipe import load_recipe
from phalanx.observe import Record, log_path, read_events
from phalanx.plan.recipe import run_problems
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.run import train
from phalanx_lab.bench.cluster import TrainingCluster, overrides, send, tiny_run
from phalanx_lab.bench.storm.trainer import tensors_at_the_end
from phalanx_lab.gpu_check.cards import run_on_cards
from phalanx_lab.gpu_check.here import Here

WATCHDOG_S, PATIENCE_S = 20.0, 120.0
"""Longest time without a step on a lent device, and on a CPU that may have other work."""
STATE = 1e-3
"""Difference of a tensor at the end of a run, relative to its largest element, at most: other numbers of ranks round otherwise."""
SHOWN, FRAMES = 6000, 5
"""Characters of what a run printed, and innermost calls of each of its threads where it stood still."""
DEBUGGERS, DEBUGGER_S = ("gdb", "cuda-gdb"), 25.0
"""Asked for native frames of all processes at once where a run stood still, so long at most."""
OF_DEVICES = re.compile(r"^Thread \d|nccl|Nccl|NCCL|c10d|libcuda|cuda[A-Z]|cu[A-Z]\w+ \(|pthread_join|clockjoin")
SETTINGS: Mapping[str, object] = {
    "data.validation_fraction": 0.2,
    "train.seq_len": 32,
    "train.micro_batch": 2,
    "optim.lr": 3e-4,
    "optim.warmup_steps": 0,
    "optim.schedule": "constant",
    "optim.bucket_mb": 0.01,
    "resilience.mode": "fast",
    "checkpoint.interval": 0,
    "launch.threads": 1,
    "launch.timeout_s": 60,
}


def recipe_of(folder: Path, name: str, **changes: object) -> Recipe:
    """The recipe of a run in `folder/runs/name` of the text in `folder/text`; keys with `__` for the dot. Raises `ConfigError`."""
    own = {"data.sources": f'["{folder / "text"}"]', **{key.replace("__", "."): v for key, v in changes.items()}}
    words = overrides(tiny_run(folder / "runs", name, folder / "cache", {**SETTINGS, **own}))
    return load_recipe(None, words, check=lambda recipe: run_problems(recipe, world=recipe.launch.ranks))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    code: int | None
    """Its exit code; None: it stood still, or its time was over, and it was killed."""
    seconds: float
    words: str
    """The end of what it printed, or where its threads stood."""
    native: str = ""
    """Where they stood in libraries, as far as a debugger is there to say it."""


def run_bounded(
    program: Callable[[], int],
    *,
    folder: Path,
    marks: Callable[[], int],
    still_s: float,
    limit_s: float = math.inf,
) -> Ended:
    """Run `program` in a fork. Where `marks`, which grows with what it has done, stays the same for `still_s`, or `limit_s` have passed, its processes say where they stand, and are killed."""
    begin_s = changed_s = time.monotonic()
    printed, seen = folder / "printed", -1

    def body() -> int:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # and in all that it forks
        try:
            return program()
        except Exception:
            os.write(2, traceback.format_exc().encode())  # wherever this process thinks that its errors go
            return 1

    def still() -> bool:
        nonlocal changed_s, seen
        now_s, found = time.monotonic(), marks()
        if found != seen:
            seen, changed_s = found, now_s
        return now_s - changed_s > still_s or now_s - begin_s > limit_s

    faulthandler.cancel_dump_traceback_later()  # a fork of a process that waits for it can set no other
    with TrainingCluster() as cluster:
        cluster.start("run", body, out=printed)
        stuck, native = cluster.until(still, math.inf, look_s=0.05), ""
        if stuck:
            for pid in cluster.processes("run"):
                send(pid, signal.SIGUSR1)
                time.sleep(0.5)  # one after the other
            native = native_frames(cluster.processes("run"), folder)
    text = printed.read_text(errors="replace")
    words = where_threads_stand(text) if stuck else text[-SHOWN:]
    return Ended(code=cluster.codes.get("run"), seconds=time.monotonic() - begin_s, words=words, native=native)


def native_frames(pids: Sequence[int], folder: Path) -> str:
    """The frames within CUDA, NCCL and torch's groups of processes, by the first debugger that is installed, as far as it came; empty where none is. All that it said is in `folder/native-PID`."""
    debugger = next(filter(None, map(shutil.which, DEBUGGERS)), None)
    if debugger is None:
        return ""
    asked, found, end_s = dict[Path, subprocess.Popen[bytes]](), [], time.monotonic() + DEBUGGER_S
    for pid in pids:
        line = [debugger, "-p", str(pid), "-batch", "-ex", "set pagination off", "-ex", "thread apply all bt 14"]
        path = folder / f"native-{pid}"
        with path.open("wb") as file:
            asked[path] = subprocess.Popen(line, stdout=file, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    for path, process in asked.items():
        try:
            process.wait(timeout=max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        frames = [x[:120] for x in path.read_text(errors="replace").splitlines() if OF_DEVICES.search(x)]
        found.append("\n".join([f"process {path.name.removeprefix('native-')}", *frames])[: SHOWN // len(asked)])
    return "\n".join(found)


def where_threads_stand(text: str) -> str:
    """The innermost calls of each thread, of what `faulthandler` printed."""
    found = []
    for block in text.split("\n\n"):
        head, *frames = [
            line for line in block.splitlines() if "most recent call first" in line or "  File" in line
        ] or [""]
        found += ["\n".join([head, *frames[:FRAMES]])] if frames else []
    return "\n".join(found)[:SHOWN]


def run_folder(recipe: Recipe) -> Path:
    """Where the run is kept."""
    return Path(recipe.run.folder) / recipe.run.name


def steps_of(recipe: Recipe) -> list[Record]:
    """What all ranks have told of committed steps so far."""
    logs = [log_path(run_folder(recipe), rank) for rank in range(recipe.launch.ranks)]
    return [r for log in logs if log.exists() for r in read_events(log) if r["kind"] == "StepEnded"]


def train_still(recipe: Recipe, *, still_s: float) -> Ended:
    """Train in a world that is fixed, whose ranks share the device."""
    run = run_folder(recipe)

    def program() -> int:
        main = partial(train, recipe, hook=Rebalancer)
        return run_on_cards(main, ranks=recipe.launch.ranks)

    return run_bounded(
        program, folder=run.with_name(f"{run.name}.out"), marks=lambda: len(steps_of(recipe)), still_s=still_s
    )


def worst_difference(got: Sequence[Record], want: Sequence[Record]) -> float:
    """Largest relative difference of losses of the same step; infinite where a step is missing, or is not a number."""
    right = {r["step"]: r["loss"] for r in want}
    if not right or {r["step"] for r in got} != right.keys():
        return math.inf
    found = [abs(r["loss"] - right[r["step"]]) / right[r["step"]] for r in got]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def tell_state(here: Here, name: str, recipe: Recipe, plain: Recipe) -> None:
    """Tell the tensor of the newest checkpoint (weights, moments, biases) that differs most between two runs, relative to its largest element. A tensor that one of them lacks differs infinitely."""
    got, want = (tensors_at_the_end(run_folder(one)) for one in (recipe, plain))
    found = {key: tensor_difference(got.get(key), want.get(key)) for key in got | want}
    worst = max(found, key=lambda key: found[key], default="no checkpoint")
    here.tell(f"{name}: largest difference of the state at the end", found.get(worst, math.inf), most=STATE)
    here.tell(f"{name}: in", worst)


def tensor_difference(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Relative to the largest element."""
    if got is None or want is None or got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-12)
    return float(error) if math.isfinite(error) else math.inf


def tell_end(here: Here, name: str, ended: Ended) -> None:
    """Tell how a run ended; what it printed only where that was not well."""
    here.tell(f"{name}: seconds", ended.seconds)
    if ended.code != 0:
        how = "stood still" if ended.code is None else f"ended with {ended.code}"
        here.tell(f"{name}: {how}", ended.words)
        if ended.native:
            here.tell(f"{name}: in libraries", ended.native)
    here.tell(f"{name}: did not end well", int(ended.code != 0), most=0)
