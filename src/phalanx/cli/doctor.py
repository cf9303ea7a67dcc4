"""`phalanx doctor`: what this machine has, what a run would use of it, and what is missing and how to get it.

Decides nothing: it reports what runs decide by. Exits 1 where no run could start here.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.predicting.dry_run import available_bytes
from phalanx.cli.train import LEAST_OPEN_FILES
from phalanx.core.arguments import WordParser
from phalanx.core.errors import first_line, install_extra
from phalanx.core.process import is_installed, most_open_files
from phalanx.core.processor import data_sheet_flops_per_s, this_processor
from phalanx.core.units import format_bytes, format_rate
from phalanx.kernels.native import attempt, cpp_compilers, user_folder, why_uncompiled

Verdict = Literal["ok", "note", "missing"]
OLDEST_TORCH = (2, 11)
EXTRAS = (
    ("transformers", "hf", "`phalanx export-hf` and parity tests read its models"),
    ("lm_eval", "eval", "`phalanx eval`"),
    ("wandb", "wandb", "observe.wandb_project"),
    ("trackio", "trackio", "observe.sinks"),
    ("mlflow", "mlflow", "observe.sinks"),
    ("prometheus_client", "prometheus", "observe.prometheus_port"),
    ("cryptography", "service", "runs on several hosts (`phalanx service`)"),
)
"""(module, extra, what needs it)"""


@dataclass(frozen=True)
class MachineFact:
    """One line: a subject, what was found, and where it is missing how to get it."""

    subject: str
    text: str
    verdict: Verdict = "ok"
    way: str = ""


def main(argv: Sequence[str]) -> int:
    """Run `phalanx doctor`."""
    parser = WordParser(
        prog="phalanx doctor", description="Say what this machine has, what a run would use of it, and what is missing."
    )
    parser.parse_args(list(argv))
    found = list(findings())
    show(found, Console())
    return 1 if any(f.verdict == "missing" for f in found) else 0


def findings() -> Iterator[MachineFact]:
    """Everything that is looked at, in the order in which a run needs it."""
    yield from _software()
    yield from _processors()
    yield from _devices()
    yield from _limits()
    yield from _folders()
    yield from _extras()
    yield from _schedulers()


def _software() -> Iterator[MachineFact]:
    yield MachineFact("Python", f"{sys.version.split()[0]}, {platform.system()} {platform.machine()}")
    try:
        import torch
    except ImportError as error:
        yield MachineFact("torch", f"cannot be imported ({first_line(error)})", "missing", "pip install torch")
    else:
        number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        old = number < OLDEST_TORCH
        way = "pip install a newer one: 2.11 at least" if old else ""
        yield MachineFact("torch", torch.__version__, "missing" if old else "ok", way)
    yield _compiler()


def _compiler() -> MachineFact:
    """Whether there is one, and whether what it makes can be used: it is made here where it is not there yet (seconds)."""
    way = "install one (Debian: apt-get install g++); elementwise kernels run slower without"
    if not cpp_compilers():
        return MachineFact("compiler", "no C++ compiler", "note", way)
    made = attempt()
    if made.library is None:
        return MachineFact(
            "compiler", f"elementwise kernels cannot be compiled: {why_uncompiled()}", "note", f"mend it, or {way}"
        )
    other = f" ({made.failures[0]})" if made.failures else ""
    return MachineFact("compiler", f"{made.compiler}: elementwise kernels are compiled{other}")


def _processors() -> Iterator[MachineFact]:
    processor, cores = (
        this_processor(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    kinds = [name for name, has in (("AMX", processor.has_amx), ("bf16 products", processor.multiplies_bf16)) if has]
    yield MachineFact(
        "processor", f"{processor.name or 'unknown'}, {cores} cores{', ' + ', '.join(kinds) if kinds else ''}"
    )
    yield MachineFact("dtype", f'train.dtype = "auto" is {processor.dtype} here')
    memory = available_bytes()
    yield MachineFact(
        "memory", f"{format_bytes(memory)} available" if memory is not None else "the system does not say"
    )


def _devices() -> Iterator[MachineFact]:
    try:
        import torch
    except ImportError:  # told above
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why = "torch was built without CUDA" if torch.version.cuda is None else "the driver shows none"
        yield MachineFact("GPUs", f"none ({why}): runs compute on processors, over gloo")
        return
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    for name in dict.fromkeys(names):
        rate, index = data_sheet_flops_per_s(name), names.index(name)
        total = torch.cuda.get_device_properties(index).total_memory
        sheet = f", {format_rate(rate, 'FLOP')} in bf16 by its data sheet" if rate else ""
        yield MachineFact("GPUs", f"{names.count(name)} x {name}, {format_bytes(total)}{sheet}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield MachineFact("NCCL", nccl)
    if not is_installed("triton"):
        yield MachineFact("Triton", "not installed: fused kernels cannot run", "note", install_extra("gpu"))
    yield MachineFact("GPU check", "phalanx gpu-check proves and times this machine's GPU")


def _limits() -> Iterator[MachineFact]:
    files = most_open_files()
    few = files < LEAST_OPEN_FILES
    yield MachineFact("open files", f"{files:,} at most", "missing" if few else "ok", "ulimit -n 4096" if few else "")
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).free
        small = room < 64 << 20
        way = "containers: --shm-size 1g, or an emptyDir of medium Memory" if small else ""
        yield MachineFact("shared memory", f"{format_bytes(room)} free in {shared}", "note" if small else "ok", way)


def _folders() -> Iterator[MachineFact]:
    kept, wrong = user_folder(), _not_writable(user_folder())
    yield MachineFact("kept here", f"{kept} {wrong}".strip(), "note" if wrong else "ok")
    here = Path.cwd()
    wrong = next(filter(None, map(_not_writable, (here, here / "runs", here / "cache"))), "")
    way = "runs/ and cache/ are made in the present folder: go to one of yours" if wrong else ""
    yield MachineFact("this folder", f"{here} {wrong}".strip(), "missing" if wrong else "ok", way)


def _not_writable(folder: Path) -> str:
    """Why, for a folder that may still have to be made."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"cannot be written ({there}: {first_line(error)})"


def _extras() -> Iterator[MachineFact]:
    for module, extra, use in EXTRAS:
        if not is_installed(module):
            yield MachineFact(module, f"not installed; needed by {use}", "note", install_extra(extra))
        else:
            yield MachineFact(module, metadata.version(module.replace("_", "-")))


def _schedulers() -> Iterator[MachineFact]:
    for program, name in (("sbatch", "SLURM"), ("kubectl", "Kubernetes"), ("torchrun", "torchrun")):
        if shutil.which(program):
            yield MachineFact(name, f"{program} is here: phalanx launch {name.lower()} RECIPE writes what it starts")


MARKS = {"ok": ("ok", ""), "note": ("note", "yellow"), "missing": ("MISSING", "bold red")}


def show(found: Sequence[MachineFact], console: Console) -> None:
    """A line each; below it the way to what is missing."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in found:
        mark, style = MARKS[finding.verdict]
        text = Text(finding.text)
        if finding.way:
            text.append(f"\n{finding.way}", style="dim")
        table.add_row(Text(mark, style=style), Text(finding.subject), text)
    console.print(table)
    missing = sum(f.verdict == "missing" for f in found)
    console.print("a run could not start here" if missing else "ready: phalanx train laptop --train.steps 3 tries it")
