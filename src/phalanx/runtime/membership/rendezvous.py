"""Process groups of one generation: made, dropped and made again inside a running process.

What is known of gloo (torch 2.13): `abort` and `shutdown` do nothing; a peer that is not the neighbour of a dead one waits for its whole timeout
unless sockets close; the constructor blocks on its store if a member never comes. So:

    form   an interruptible barrier of keys first, then the constructor with a short timeout, under a prefix that no other generation uses
    abort   shut down the sockets of the groups, from any thread: every call in them fails at once, here and at the peers; NCCL: abort (`runtime/comm/devices.py`)
    drop   abort, destroy, and forget every reference

Must never change: `abort` touches connected sockets only (`getpeername`), and only those whose inode is still the one that was noted while a group
was made, under the lock under which other connections of the process open.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line
from phalanx.runtime.comm import (
    DEFAULT_TIMEOUT_S,
    AbortableCall,
    DeviceAbort,
    GroupCache,
    RankProgress,
    Use,
    connect,
    leave_behind,
    nccl_backends,
    nccl_options,
)
from phalanx.runtime.membership.keys import ASKED_PER_S, LAST_LOOK_S, OPENING, Keys, KeysStore, open_sockets
from phalanx.runtime.membership.membership import Generation
from phalanx.runtime.membership.reachability import keep_alive
from phalanx.runtime.membership.votes import MemberReport
from phalanx.runtime.processes import ease_gloo, use_loopback

READY_BLOCK = 64
"""Members whose reports one look asks for: the first that are not complete."""
CONSTRUCT_S = 3.0
"""All members have reported that they are ready, so a group is made in milliseconds or never; the first one once all have put themselves in order."""
LOOK_S = 0.002


class NoMapping(PeerError):
    """No mapping fits the members of this generation."""


class NewerGeneration(PeerError):
    """This generation was superseded before it formed."""


class Sockets:
    """Sockets that this process opened inside `noted` blocks. `far`: peers are on other machines, whose links may break without a word."""

    def __init__(self, *, far: bool = False) -> None:
        self.far = far
        self._lock = threading.Lock()
        self._found: dict[int, str] = {}
        self._before: dict[int, str] | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Whatever sockets are new after the block are ours. No other connection of ours (`keys.OPENING`) opens meanwhile."""
        with OPENING:
            with self._lock:
                self._before = open_sockets()
            try:
                yield
            finally:
                with self._lock:
                    new = self._note()
                    self._before = None
                    if self.far:
                        _keep_alive(new)

    def _note(self) -> list[int]:
        """Descriptors that the block has opened so far."""
        if self._before is None:
            return []
        new = {f: i for f, i in open_sockets().items() if self._before.get(f) != i}
        self._found.update(new)
        return list(new)

    def shut(self) -> int:
        """Shut down those that are still open and connected; returns how many. Any thread may call it at any time, also inside a block."""
        with self._lock:
            self._note()
            return sum(_shut(fd, inode) for fd, inode in self._found.items())


def _keep_alive(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            keep_alive(sock)


def _shut(fd: int, inode: str) -> bool:
    """Works on a duplicate of the descriptor, so that no other thread can change it between the check and the shutdown."""
    try:
        own = os.dup(fd)
    except OSError:
        return False
    try:
        if os.readlink(f"/proc/self/fd/{own}") != inode:
            os.close(own)
            return False
        with socket.socket(fileno=own) as sock:
            sock.getpeername()  # a listener has none
            sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False


class EpochGroups(GroupCache):
    """Process groups of one generation; their sockets are known."""

    def __init__(
        self,
        sockets: Sockets,
        *,
        timeout_s: float,
        generation: int = 0,
        aborted: Callable[[], bool] = lambda: False,
        progress: RankProgress | None = None,
    ) -> None:
        """`progress` of the rank's own thread, which waits for others while it connects."""
        super().__init__(timeout_s=timeout_s)
        self.generation, self.aborted = generation, aborted
        self._sockets = sockets
        self._escape = AbortableCall(aborted, keep=self.all, progress=progress)
        self.is_stuck = False
        """A thread is left in the creation of one, which none of them may wait for."""

    def _create(self, ranks: tuple[int, ...], second: bool, message_ctas: int) -> dist.ProcessGroup | None:
        if ranks == tuple(range(dist.get_world_size())) and not second and not message_ctas:
            return dist.group.WORLD
        if self.aborted():
            raise PeerError(f"cannot create a process group: generation {self.generation} was aborted")
        timeout = timedelta(seconds=min(CONSTRUCT_S, self.timeout_s))
        inside = dist.get_rank() in ranks
        with self._sockets.noted() if inside else contextlib.nullcontext():  # who is not in it opens no socket
            group = dist.new_group(list(ranks), timeout=timeout, pg_options=nccl_options(message_ctas))
        if not inside:
            return None
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        return group

    def _meet(self) -> None:
        """Members come from connecting other groups, some of them seconds later than gloo waits (`CONSTRUCT_S`)."""
        everyone = dist.group.WORLD
        if everyone is not None and not self.aborted() and nccl_backends([everyone]):
            with self._escape.progress.waiting():
                dist.all_reduce(torch.zeros(1))

    def _connect(self, group: dist.ProcessGroup, uses: Sequence[Use]) -> None:
        try:
            connect(group, uses, self._escape)
        except PeerError:
            self.is_stuck = True
            raise
        except RuntimeError as err:  # a peer was lost meanwhile
            raise PeerError(
                f"generation {self.generation} could not connect a process group: {first_line(err)}"
            ) from None

    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Those that this rank is in, in the order in which they were made. From any thread."""
        return tuple(group for group in list(self._groups.values()) if group is not None)

    def forget(self) -> None:
        """Keep no group."""
        self._escape.close()
        if self.is_stuck:
            leave_behind()
        self._groups.clear()


class GroupEpoch:
    """The connected members of one generation. `groups` makes what a folding needs (`build_groups(..., cache=epoch.groups)`).

    Whoever keeps an `Axis`, a `Groups`, a `Work` or a traceback of a step must forget it when the epoch is dropped. Sockets are shut all the same,
    so that no peer waits; but descriptors and threads stay until the last reference is gone.
    """

    def __init__(
        self,
        generation: Generation,
        uid: str,
        *,
        timeout_s: float,
        far: bool = False,
        uids: Sequence[str] = (),
        reports: Sequence[MemberReport] = (),
        progress: RankProgress | None = None,
    ) -> None:
        self.generation, self.uid = generation, uid
        self.uids = tuple(uids) or generation.uids
        """Uids in the order of their ranks."""
        self.rank, self.size = self.uids.index(uid), len(generation.members)
        self.reports = tuple(sorted(reports, key=lambda report: self.uids.index(report.uid)))
        """Reports of all members, in the order of their ranks."""
        self.begun = False
        """Whether a step of the run was ever committed: then members must not start from scratch."""
        self.sockets = Sockets(far=far)
        self.aborted = False
        self.groups = EpochGroups(
            self.sockets,
            timeout_s=timeout_s,
            generation=generation.number,
            aborted=lambda: self.aborted,
            progress=progress,
        )
        self.aborted_s = 0.0
        """When, on the monotonic clock; 0: it was not."""
        self._abort = DeviceAbort()
        self.check: Callable[[], None] = lambda: None
        """Asks the membership service. Raises `PeerError` where this generation is over: for whoever changes what outlives it."""
        self.store: dist.Store | None = None
        """What its groups meet at. torch keeps the C++ half of a store only: one written in Python answers nothing once its object is gone."""
        self.formed_s = 0.0
        """How long the groups took, barrier included."""

    def abort(self) -> int:
        """Make every call in the groups fail, here and at the peers. From any thread; returns how many sockets were shut."""
        self.aborted = True
        self.aborted_s = self.aborted_s or time.monotonic()
        shut = self.sockets.shut()
        if self.size > 1 and dist.is_initialized():
            self._abort.start([g for g in (dist.group.WORLD, *self.groups.all()) if g is not None])
        return shut

    def drop(self) -> None:
        """Forget the groups. From the thread that made them; safe to call again."""
        self.abort()
        self._abort.finish()
        self.groups.forget()
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # what it complains about was shut on purpose
                dist.destroy_process_group()
        self.store = None
        gc.collect()


Order = Callable[[Generation, Sequence[MemberReport]], Sequence[str]]
"""Ranks of the members: their names in that order. The same on all of them, for all have the same reports."""


def as_listed(generation: Generation, reports: Sequence[MemberReport]) -> Sequence[str]:
    """Ranks in the order of the generation."""
    return generation.uids


def ready_keys(generation: Generation) -> list[str]:
    """One for each member: its report, written when it can form the groups."""
    return [f"ready/{generation.number}/{uid}" for uid in generation.uids]


def meet(generation: Generation, keys: Keys, *, limit_s: float, newer: Callable[[], bool]) -> None:
    """The barrier: return when every member has reported. Raises `NewerGeneration`, or `PeerError` naming who is missing after `limit_s`."""
    wanted, end_s = ready_keys(generation), time.monotonic() + limit_s
    look_s, last_look_s = LOOK_S, max(LAST_LOOK_S, len(wanted) / ASKED_PER_S)
    while wanted:
        if keys.all_there(wanted[:READY_BLOCK]):
            wanted = wanted[READY_BLOCK:]
            continue
        if newer():
            raise NewerGeneration(f"generation {generation.number} was superseded before it formed")
        if time.monotonic() > end_s:
            said = zip(generation.uids, keys.values(ready_keys(generation)), strict=True)
            missing = [uid for uid, report in said if report is None]
            raise PeerError(f"generation {generation.number} failed to form: no report from {', '.join(missing)}")
        time.sleep(look_s)
        look_s = min(look_s * 1.5, last_look_s)


def form(
    generation: Generation,
    uid: str,
    keys: Keys,
    *,
    newer: Callable[[], bool] = lambda: False,
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    limit_s: float = 60.0,
    own_machine: bool = True,
    watch: Callable[[GroupEpoch], None] = lambda team: None,
    order: Order = as_listed,
    progress: RankProgress | None = None,
) -> GroupEpoch:
    """Connect the members of `generation`; this one has put its report under its key of `ready_keys`. Collective.

    `timeout_s` is for collectives, `limit_s` for members to become ready. `watch` is given the group epoch before it connects, so that a watchdog can abort
    it from then on. `order` decides the ranks. Raises `NewerGeneration`, `PeerError`, `ServiceLost`. Nothing is left of a group that could not be made.
    """
    begin_s = time.monotonic()
    meet(generation, keys, limit_s=limit_s, newer=newer)
    reports, order_s = _reports(generation, keys), time.monotonic()
    ranks, far = order(generation, reports), not own_machine
    patience_s = CONSTRUCT_S + time.monotonic() - order_s  # others may take twice as long for the same
    team = GroupEpoch(generation, uid, timeout_s=timeout_s, far=far, uids=ranks, reports=reports, progress=progress)
    watch(team)
    if team.size > 1:
        if own_machine:
            use_loopback()
        try:
            with team.sockets.noted():
                team.store = KeysStore(keys, timeout_s=patience_s, over=lambda: team.aborted)
                _init(team, team.store, device=device, timeout_s=timeout_s, patience_s=patience_s)
        except RuntimeError as err:
            text = first_line(err)
            err.__traceback__ = None
            team.drop()
            raise PeerError(f"generation {generation.number} failed to form: {text}") from None
    if newer():
        team.drop()
        raise NewerGeneration(f"generation {generation.number} is over")
    team.formed_s = time.monotonic() - begin_s
    return team


def _reports(generation: Generation, keys: Keys) -> list[MemberReport]:
    """Reports of all members, written before the barrier opened. Raises `PeerError` where some are gone."""
    texts = keys.values(ready_keys(generation))
    reports = [MemberReport.from_json(text) for text in texts if text is not None]
    if len(reports) < len(texts):
        raise PeerError(f"reports of generation {generation.number} are missing")
    return reports


def _init(team: GroupEpoch, store: dist.Store, *, device: str, timeout_s: float, patience_s: float) -> None:
    ease_gloo()
    # Groups are named by a counter of the process, and only the destruction of a whole world sets it back: a member whose last attempt failed half
    # way would look for the others under another name.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(team.generation.meeting, store),
        rank=team.rank,
        world_size=team.size,
        timeout=timedelta(seconds=min(patience_s, timeout_s)),
    )
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
