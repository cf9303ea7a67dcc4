"""`phalanx watch [RUN...]`: shows runs in a browser, live and afterwards, from their event logs alone: no torch, and a run that is being written is not disturbed."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.service_address import is_loopback
from phalanx.observe.page import PageServer

PORT = 8642
TRIED = 20
"""Ports that are tried from `PORT` on where none was asked for."""


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C."""
    parser = WordParser(
        prog="phalanx watch",
        description="Show runs in a browser: curves, loads of experts, the mapping, recoveries, recorded steps; several runs beside one another.",
    )
    parser.add_argument("run", nargs="*", type=Path, help="run folders, such as runs/laptop (default: all below --folder)")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="folder whose runs are shown (default: runs, where no run is given)")  # fmt: skip
    parser.add_argument("--port", type=int, help=f"port to listen on; 0 takes a free one (default: the first free one from {PORT} on)")  # fmt: skip
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, reachable from this machine only)")  # fmt: skip
    args = parser.parse_args(argv)
    below = args.folder if args.folder is not None else None if args.run else Path("runs")
    raise_if(_problems(args.run, below, args.port), ConfigError, subject="the arguments")
    server = _listen(args.address, args.port, folders=args.run, below=below)
    console = Console()
    if not is_loopback(args.address):
        text = f"warning: whoever reaches {args.address} and knows the token can read these runs, and the connection is not encrypted; `ssh -L {server.server_address[1]}:localhost:{server.server_address[1]} HOST` is"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    console.print(Text(f"open {server.url}\n(Ctrl-C ends)"), soft_wrap=True, highlight=False)
    server.start()
    try:
        _wait(server, console)
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
    return 0


def _problems(runs: Sequence[Path], below: Path | None, port: int | None) -> list[Problem]:
    hint = "give the folder of a run, such as runs/laptop"
    problems = [
        Problem(where="run", value=str(path), rule="is not a run folder (it has no events)", hint=hint)
        for path in runs
        if not (path / "events").is_dir()
    ]
    if below is not None and not below.is_dir():
        hint = "give run folders, or --folder with the folder they are in; phalanx train makes one"
        problems.append(Problem(where="--folder", value=str(below), rule="is not a folder", hint=hint))
    if port is not None and not 0 <= port < 65536:
        problems.append(
            Problem(where="--port", value=port, rule="must be from 0 to 65535", hint=f"leave it out, or {PORT}")
        )
    return problems


def _listen(address: str, port: int | None, *, folders: Sequence[Path], below: Path | None) -> PageServer:
    """Raises `ConfigError` where it cannot listen there."""
    ports = range(PORT, PORT + TRIED) if port is None else [port]
    for each in ports:
        try:
            return PageServer(address, each, folders=folders, below=below)
        except OSError as error:
            last = error
    if isinstance(last, socket.gaierror) or last.errno == errno.EADDRNOTAVAIL:
        hint = "127.0.0.1, or an address of this machine"
        problem = Problem(
            where="--address", value=address, rule=f"is no address of this machine ({last.strerror})", hint=hint
        )
    else:
        value = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
        rule = f"cannot listen there ({last.strerror})"
        problem = Problem(where="--port", value=value, rule=rule, hint="--port 0 takes a free port")
    raise ConfigError([problem], subject="the arguments")


def _wait(server: PageServer, console: Console) -> None:
    """Until Ctrl-C; shows how far indexes are that are being made."""
    while True:
        making = [view for view in list(server.views.values()) if view.progress is not None]
        if not making:
            time.sleep(0.3)
            continue
        with Progress(console=console, transient=True) as bars:
            rows = {view.id: bars.add_task(f"reading the logs of {view.name}", total=1.0) for view in making}
            while any(view.progress is not None for view in making):
                for view in making:
                    bars.update(rows[view.id], completed=1.0 if view.progress is None else view.progress)
                time.sleep(0.2)
