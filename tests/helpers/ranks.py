"""A pool of forked gloo ranks for tests: `run_ranks(world, fn, *args)`.

One pool per world size is forked on first use (after the imports, so that starting 8 ranks takes about half a second) and serves all
later cases; its `GroupCache` lives as long as the pool. Each rank computes with one thread. A case that raises or hangs is reported with rank,
traceback and, for a hang, the stacks of all ranks; the pool is then killed and the next case gets a fresh one.

`fn` is called as `fn(rank, cache, *args)`. A module-level function goes to the standing pool; a closure gets a pool of its own, forked for it. Large
arguments travel in a file that all ranks map: through pipes every rank would get, and unpack, a copy of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.runtime.comm.groups import GroupCache

MAX_POOLS = 5
"""Standing pools: those of 1, 2, 3, 4 and 8 ranks, which most tests use. Ranks of a new one cost a second of processor each."""
LARGE_JOB = 1 << 20
"""Bytes from which on arguments go through a file."""
IN_A_FILE = b"file:"
"""Begins a job of which the rest is the name of that file (pickles begin otherwise)."""
GRACE_S = 2.0
"""How long the other ranks may go on after one has failed."""


class RankError(Exception):
    """One or more ranks raised; `causes` maps each to its exception (where it could be pickled) and the text has the tracebacks."""

    def __init__(self, text: str, causes: dict[int, BaseException | None]) -> None:
        super().__init__(text)
        self.causes = causes


class RankTimeout(Exception):
    """The watchdog ended the case; the text has every rank's stacks."""


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Run `fn(rank, cache, *args)` on `world` forked ranks and return the results in rank order."""
    try:
        job = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError):
        pool = _Pool(world, (fn, args))
        try:
            return pool.run(b"", timeout_s)
        finally:
            pool.kill()
    pool = _standing_pool(world)
    try:
        if len(job) >= LARGE_JOB:
            job = pool.in_a_file((fn, args))
        return pool.run(job, timeout_s)
    except BaseException:
        _POOLS.pop(world, None)
        pool.kill()
        raise


_POOLS: dict[int, _Pool] = {}  # tests only: standing pools by world size, least recently used first


def _standing_pool(world: int) -> _Pool:
    pool = _POOLS.pop(world, None)
    if pool is None or not pool.alive():
        while len(_POOLS) >= MAX_POOLS:
            _POOLS.pop(next(iter(_POOLS))).kill()
        pool = _Pool(world, None)
    _POOLS[world] = pool
    return pool


@atexit.register
def close_pools() -> None:
    """End all standing ranks (also when pytest ends)."""
    for world in list(_POOLS):
        _POOLS.pop(world).kill()


class _Pool:
    def __init__(self, world: int, inherited: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-ranks-"))
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(world)]
        self.ends: list[Connection] = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_rank_main, args=(r, world, pipes, self.folder, inherited), daemon=True)
            for r in range(world)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def in_a_file(self, job: Any) -> bytes:
        """What the ranks are sent instead. Tensors that share memory are written once."""
        path = self.folder / "job"
        path.unlink(missing_ok=True)  # ranks may have the one before mapped
        torch.save(job, path, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        return IN_A_FILE + str(path).encode()

    def run(self, job: bytes, timeout_s: float) -> list[Any]:
        for end in self.ends:
            end.send_bytes(job)
        answers: dict[int, tuple[bool, Any, str]] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(answers) < len(self.ends):
            pending = {end: r for r, end in enumerate(self.ends) if r not in answers}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if failed:
                    break
                raise RankTimeout(self._stacks(sorted(pending.values()), timeout_s))
            for end in ready:
                rank = pending[end]  # type: ignore[index]
                answers[rank] = self._answer(rank)
                if not answers[rank][0] and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failed:
            raise _rank_error(answers, len(self.ends))
        return [answers[r][1] for r in range(len(self.ends))]

    def _answer(self, rank: int) -> tuple[bool, Any, str]:
        try:
            ok, value, text = pickle.loads(self.ends[rank].recv_bytes())
            return ok, value, text
        except EOFError:
            self.processes[rank].join(1.0)
            return (
                False,
                None,
                f"the process died (exit code {self.processes[rank].exitcode})\n{self._last_words(rank)}",
            )

    def _last_words(self, rank: int) -> str:
        path = self.folder / f"stacks-{rank}"
        return path.read_text() if path.exists() else ""

    def _stacks(self, pending: list[int], timeout_s: float) -> str:
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = [f"ranks {pending} did not finish within {timeout_s:g} s"]
        parts += [f"--- rank {r} ---\n{self._last_words(r)}" for r in range(len(self.processes))]
        return "\n".join(parts)

    def kill(self) -> None:
        if os.getpid() != self.owner:
            return
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for end in self.ends:
            end.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank_error(answers: dict[int, tuple[bool, Any, str]], world: int) -> RankError:
    causes = {r: value for r, (ok, value, _) in sorted(answers.items()) if not ok}
    parts = [f"{len(causes)} of {world} ranks failed"]
    parts += [f"--- rank {r} ---\n{answers[r][2]}" for r in causes]
    silent = sorted(set(range(world)) - set(answers))
    if silent:
        parts.append(f"ranks {silent} were still running")
    return RankError("\n".join(parts), causes)


def _rank_main(rank: int, world: int, pipes: list[Any], folder: Path, inherited: Any) -> None:
    """Body of a forked rank: join the world, then serve jobs until the pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive pytest
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = pipes[rank][1]
    for r, (mine, theirs) in enumerate(pipes):
        mine.close()
        if r != rank:
            theirs.close()
    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115 - must stay open for the handler
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cache = GroupCache(timeout_s=240.0)
    joined = world == 1
    try:
        while True:
            job = end.recv_bytes()
            try:
                if not joined:
                    store = dist.FileStore(str(folder / "store"), world)
                    dist.init_process_group(
                        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240)
                    )
                    joined = True
                fn, args = inherited if inherited is not None else _unpacked(job)
                answer = (True, fn(rank, cache, *args), "")
                message = pickle.dumps(answer)
            except BaseException as err:  # whatever it is belongs to the caller, also a result that cannot travel
                message = pickle.dumps((False, _picklable(err), traceback.format_exc()))
            end.send_bytes(message)
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def _unpacked(job: bytes) -> Any:
    if job.startswith(IN_A_FILE):
        return torch.load(job.removeprefix(IN_A_FILE).decode(), mmap=True, weights_only=False)
    return pickle.loads(job)


def _picklable(err: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(err))
        return err
    except Exception:
        return None
