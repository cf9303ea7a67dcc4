"""Where ranks meet that another launcher has started: a file for those of one machine, a store of the first one's, or of torchrun's agent, for those of several."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from phalanx.core.files import private_folder
from phalanx.core.process import begun
from phalanx.core.reading import is_count
from phalanx.core.service_address import is_loopback
from phalanx.runtime.processes.addresses import addresses_of

LOOK_S = 0.02
"""How often a rank looks whether the first one has come."""


def meeting_file(rank: int, port: int, *, timeout_s: float) -> Path:
    """File for the ranks of this machine, whoever started them: the first rank makes a new one and says so where the others look, with the number of its process, so that what
    earlier ranks have left there is passed over. Raises `RuntimeError`."""
    folder, name = private_folder(), f"ranks-at-{port}"
    if rank == 0:
        if _said_by_first(folder / name, but=os.getpid()) is not None:
            raise RuntimeError("EADDRINUSE")
        for old in folder.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        file = folder / f"{name}-{secrets.token_hex(4)}"
        draft = folder / f"{file.name}.new"
        draft.write_text(f"{os.getpid()} {begun(os.getpid())} {file.name}")
        os.replace(draft, folder / name)
        return file
    end_s = time.monotonic() + timeout_s
    while (found := _said_by_first(folder / name)) is None:
        if time.monotonic() > end_s:
            raise RuntimeError(f"rank 0 has not come to {folder / name}, where ranks of one machine meet")
        time.sleep(LOOK_S)
    return found


def _said_by_first(path: Path, *, but: int = 0) -> Path | None:
    """The file that a first rank which still runs has made."""
    with contextlib.suppress(OSError, ValueError):
        pid, began, name = path.read_text().split()
        if is_count(pid) and int(pid) != but and began == begun(int(pid)):
            return path.with_name(Path(name).name)
    return None


def part_of_this_start(store: dist.Store, *, rank: int, world: int, timeout_s: float) -> dist.Store:
    """The agent's store outlives ranks that it starts again (`--max-restarts`), and so do their addresses in it. Each rank says a word that is new, and the first one answers all of them with
    its own until every rank has taken that: how often they were started each agent counts by itself. Raises `RuntimeError` where some do not come."""
    mine, others = secrets.token_hex(8), range(1, world)
    store.set(f"here/{rank}", mine)
    if rank != 0:
        part = store.get(f"part/{mine}").decode()
        store.set(f"taken/{part}/{rank}", "")
        return dist.PrefixStore(part, store)
    here, taken = [f"here/{other}" for other in others], [f"taken/{mine}/{other}" for other in others]
    answered, end_s = set[bytes](), time.monotonic() + timeout_s
    while not store.check(taken):
        if time.monotonic() > end_s:
            raise RuntimeError(f"not all ranks came within {timeout_s:g} s")
        for word in {*store.multi_get(here)} - answered if store.check(here) else ():
            store.set(f"part/{word.decode()}", mine)
            answered.add(word)
        time.sleep(0.02 + world / 20_000)
    return dist.PrefixStore(mine, store)


def listen_at(host: str, port: int) -> int | None:
    """Descriptor of a socket at the one address that the ranks of other machines know. None, for all addresses of this machine, where `host` is no address of its own:
    a name that its hosts file calls loopback, or a translated address. Raises `RuntimeError` where the port is in use."""
    try:
        family, where = addresses_of(host, port, socket.SOCK_STREAM)[0]
        if is_loopback(str(where[0])):
            return None
        return socket.create_server(where[:2], family=family).detach()
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise RuntimeError("EADDRINUSE") from err
        return None
