"""Who can reach whom. Members that all reach the service and not each other would renew their generation for ever; so somebody of them is removed.

A member has a *door*: a socket that listens and is never served, because the kernel answers for it, also for a process that is stopped. Where a generation breaks, or could not
be formed, and nobody is known to be lost, each member knocks at the doors of the others and writes down whom it could not reach (`unreached/GENERATION/MEMBER`). `put_out` decides from all that
is written, the first writer of the next generation makes it so, and one who was removed comes back only once it reaches everybody.

A door that refuses says that the process behind it is gone: whoever hears that first removes it, long before anybody misses the heartbeats of its host.

Must never change: only silence and "no route" make a member unreachable, and only a refusal makes it gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.runtime.membership.keys import Keys
from phalanx.runtime.membership.membership import Generation, Membership

KNOCK_S = 1.5
"""A host that does not answer for so long is out of reach. TCP asks a second time after 1 s, so one lost packet means nothing."""
COLLECT_S = 0.5
"""How long reports of others are waited for."""
LOOK_S = 0.02
LINK_S = 4.0
"""A connection between machines is broken after so long without a sign of the peer's kernel."""


def put_out(uids: Sequence[str], told: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Members to remove so that the others reach each other: again and again the one with the most broken pairs, of equals the one with the last rank.

    `told`: what each member could not reach; a pair is broken where either says so. At least one member always stays.
    """
    pairs = {frozenset((a, b)) for a, others in told.items() for b in others if a in uids and b in uids and a != b}
    out: list[str] = []
    while pairs:
        counts = {uid: sum(uid in pair for pair in pairs) for uid in uids}
        worst = max(uids, key=lambda uid: (counts[uid], uids.index(uid)))
        out.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(out)


class ReachabilityProbe:
    """Where others can knock. Use from any thread."""

    def __init__(self, service_host: str, service_port: int) -> None:
        """Opens the door on the address by which this machine reaches the service."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((service_host, service_port))  # sends nothing
            own = probe.getsockname()[0]
        self._socket = socket.create_server((own, 0), backlog=128)
        self._socket.setblocking(False)
        self.address = f"{own}:{self._socket.getsockname()[1]}"

    def clear(self) -> None:
        """Forget who has knocked."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def door_key(uid: str) -> str:
    """Where a member writes the address of its door."""
    return f"door/{uid}"


@dataclass(frozen=True)
class Answers:
    """Answers of doors."""

    silent: frozenset[str]
    """Nobody answers: out of reach."""
    refused: frozenset[str]
    """The machine answers, and nobody listens there any more: the process is gone."""


def knock_at(keys: Keys, uids: Sequence[str], *, own: str, over: Callable[[], bool] = lambda: False) -> Answers:
    """Knocks at the doors of members, as far as they have one."""
    others = [uid for uid in uids if uid != own]
    doors = zip(others, keys.values([door_key(uid) for uid in others]), strict=True)
    return knock({uid: door for uid, door in doors if door is not None}, over=over)


def knock(doors: Mapping[str, str], *, limit_s: float = KNOCK_S, over: Callable[[], bool] = lambda: False) -> Answers:
    """Knocks at all at once; for `limit_s` at most, and only until somebody refuses or `over` says that nobody asks any more (then
    nobody is called silent)."""
    waiting: dict[int, tuple[str, socket.socket]] = {}
    codes: dict[str, int] = {}
    poll = select.poll()
    try:
        for name, where in doors.items():
            host, _, port = where.rpartition(":")
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            waiting[sock.fileno()] = name, sock
            code = sock.connect_ex((host, int(port)))
            if code == errno.EINPROGRESS:
                poll.register(sock, select.POLLOUT)
            else:
                codes[name] = code
        end_s = time.monotonic() + limit_s
        while len(codes) < len(doors) and (left_s := end_s - time.monotonic()) > 0:
            if errno.ECONNREFUSED in codes.values() or over():
                limit_s = 0.0
                break
            for fd, _ in poll.poll(min(left_s, LOOK_S) * 1000):
                name, sock = waiting[fd]
                codes[name] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                poll.unregister(fd)
    finally:
        for _, sock in waiting.values():
            sock.close()
    refused = frozenset(name for name in doors if codes.get(name) == errno.ECONNREFUSED)
    unanswered = -1 if limit_s else 0
    return Answers(frozenset(name for name in doors if codes.get(name, unanswered) != 0) - refused, refused)


def _propose_gone(keys: Keys, generation: Generation, answers: Answers) -> bool:
    if answers.refused:
        Membership(keys).propose_death(answers.refused, "its process is gone", generation)
    return bool(answers.refused)


def agree_who_goes(keys: Keys, generation: Generation, *, own: str, over: Callable[[], bool] = lambda: False) -> bool:
    """Agrees who goes from a generation that broke, or could not be formed: knock, tell, hear the others, propose. False where all
    doors answer, so that nobody has to go.

    `over`: there is a newer generation already.
    """
    answers = knock_at(keys, generation.uids, own=own, over=over)
    if _propose_gone(keys, generation, answers):
        return True
    if not answers.silent:
        return False
    prefix = f"unreached/{generation.number}/"
    keys.put(prefix + own, json.dumps(sorted(answers.silent)))
    if keys.wait(f"gen/{generation.number + 1}", COLLECT_S):
        return True
    told = {k.removeprefix(prefix): json.loads(keys.get(k) or "[]") for k in keys.listed(prefix)}
    gone = put_out(generation.uids, told)
    others = sorted({uid for pair in told.items() for uid in (pair[0], *pair[1])} - {*gone})
    change = f"could not be reached by {', '.join(others)}"
    membership = Membership(keys)
    now = membership.current(generation)
    if now is not None and now.number == generation.number:
        membership.propose_death(gone, change, now)
    return True


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel break the connection where the peer's does not answer for `LINK_S`: neither to what was sent nor, while nothing comes, to the question whether it is there.

    An answer needs no process: peers that compute, or are stopped, give it. `TCP_USER_TIMEOUT` would also break a connection whose peer answers and reads nothing for so long
    (tcp(7)); gloo sends data only to a receiver that has asked for it, and reads in a thread of its own.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_S * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LINK_S) - 1)
