"""The program `phalanx`: finds the command, runs it, and turns errors into one clear message.

Decides exit codes: 0 done, 1 a bug (with traceback), 2 an error that a person can act on, 75 not enough members (the same command goes on later), 130 interrupted. Must never change:
`phalanx --help` imports no command, so that it answers at once, and a command imports only what it needs (`plan` never imports torch).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from phalanx.cli.allocator import start_again
from phalanx.cli.lab import lab_part
from phalanx.core.errors import PhalanxError, nearest, printable
from phalanx.core.process import flush_or_drop_output, open_closed_streams, say


@dataclass(frozen=True)
class Command:
    """A command lives in the module of its name (`_` for `-`) here in `cli`, as `main(args) -> exit status`, or in the lab."""

    name: str
    summary: str
    in_lab: bool = False


COMMANDS = (
    Command("train", "train a model from a recipe, on this machine's ranks or under torchrun"),
    Command("prepare", "read, check and tokenise the text of a recipe before its run, without a GPU"),
    Command("launch", "write the script that starts a recipe here, by torchrun, under SLURM or on Kubernetes"),
    Command("generate", "continue a prompt with the model of a run"),
    Command("import-hf", "make a run of a Hugging Face checkpoint"),
    Command("export-hf", "write the model of a run as a Hugging Face checkpoint"),
    Command("eval", "say how good the model of a run is, by tasks of lm-evaluation-harness"),
    Command("sync", "deliver the weights of a run to an inference mesh of another layout"),
    Command("verify", "prove a mapping against one rank: loss, every gradient, norm and step"),
    Command("bench", "measure speed against a baseline in the same run", in_lab=True),
    Command("gpu-check", "check that it is right and fast on this machine's GPU", in_lab=True),
    Command("plan", "check and draw a mapping or a pipeline schedule, count a model: no process, no torch"),
    Command("simulate", "predict a step, its memory and failures on a cluster that is not here"),
    Command("search", "find the best mapping of a model on a cluster"),
    Command("calibrate", "measure this machine, for predictions of it"),
    Command("testbed", "emulate hosts and links on this machine, and kill, freeze or cut them", in_lab=True),
    Command("service", "keep the membership service of an elastic run on several hosts"),
    Command("watch", "show runs in a browser, live and afterwards"),
    Command("runs", "list the runs of a folder"),
    Command("metrics", "show the course of a run from its event log, or compare several"),
    Command("trace", "write what each rank did in recorded steps, for Perfetto"),
    Command("doctor", "say what this machine has, what a run would use of it, and what is missing"),
    Command("completion", "print a script that completes commands and settings in bash, zsh or fish"),
    Command("recipes", "list the recipes that come with Phalanx, or copy one"),
    Command("settings", "list every setting of a recipe with its default and meaning"),
)

OF_THE_SYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
"""What no command can help, wherever it comes up: a full disk, one that is not to be written, a path that is too long, what is somebody else's."""
NCCL_OF_TORCH = ("TORCH_DIST_USE_NCCL2", "0")
"""torch 2.15 has another backend behind the name of NCCL (pytorch PR 192281), with other aborts and options than those that recovery on GPUs is made of (`runtime/comm/devices.py`).
This keeps the one of before; set before torch is imported."""
TRAINING = ("train", "bench")
"""Commands whose processes hold the tensors of steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `phalanx ARGV...` and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    os.environ.update([NCCL_OF_TORCH])
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # of a locale without our signs (Latin-1, ASCII): another sign, and no traceback
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    debug = os.environ.get("PHALANX_DEBUG", "") not in ("", "0")
    if not args or args[0] in ("-h", "--help", "help"):
        return _ended("phalanx", lambda: print(help_text()), debug=debug)
    if args[0] in ("-V", "--version"):
        return _ended("phalanx", lambda: print(version_text()), debug=debug)
    name = args[0]
    if name not in {c.name for c in COMMANDS}:
        hint = nearest(name, (c.name for c in COMMANDS))
        print(f"phalanx: {name!r} is not a command; {hint} (phalanx --help lists them)", file=sys.stderr)
        return 2
    if name in TRAINING and argv is None:
        start_again(os.environ)
    status = run_command(name, args[1:], debug=debug)
    if argv is None and "RANK" in os.environ:
        _end_rank(status)
    return status


def _end_rank(status: int) -> NoReturn:
    """Ends a forked rank the way forked ranks end. An interpreter that shuts down stops its threads where they are, and one inside
    gloo then aborts the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def run_command(name: str, args: Sequence[str], *, debug: bool) -> int:
    """Import the command and run it."""
    return _ended(f"phalanx {name}", lambda: _main_of(name)(list(args)), debug=debug)


def _ended(who: str, work: Callable[[], int | None], *, debug: bool) -> int:
    """Exit status of `work`. Errors made for people end here; everything else is a bug and keeps its traceback."""
    try:
        status = int(work() or 0)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return status
    except PhalanxError as error:
        if debug:
            traceback.print_exc()
        print(printable(f"{who}: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        flush_or_drop_output()
        return 0
    except OSError as error:
        if debug or error.errno not in OF_THE_SYSTEM:
            raise
        flush_or_drop_output()
        named = "" if error.filename is None else printable(f"{error.filename}: ")
        say(f"{who}: {named}{error.strerror}")
        return 2
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich ends so, and has silenced the output
            return 0
        # argument parsers leave this way after --help or a wrong argument
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0


def _main_of(name: str) -> Callable[[list[str]], int | None]:
    if any(c.in_lab for c in COMMANDS if c.name == name):
        return lab_part(name, needed_by="this command")
    return importlib.import_module(f"phalanx.cli.{name.replace('-', '_')}").main


def help_text() -> str:
    """All commands, a line each."""
    width = max(len(c.name) for c in COMMANDS)
    lines = [
        "usage: phalanx COMMAND [ARGUMENTS]",
        "",
        "Trains mixture-of-experts language models on any mapping of ranks, and proves it against one rank.",
        "",
        "commands",
        *(f"  {c.name:<{width}}  {c.summary}" for c in COMMANDS),
        "",
        "phalanx COMMAND --help says more. --version prints versions. PHALANX_DEBUG=1 shows tracebacks of errors.",
    ]
    from phalanx.core.arguments import wrapped

    return wrapped("\n".join(lines))


def version_text() -> str:
    """Versions of what decides a run, read from the installed packages without importing them."""
    from importlib import metadata  # half of the time of `phalanx --help`

    found = []
    for package in ("phalanx", "torch", "numpy"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} is not installed")
    return f"{', '.join(found)}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
