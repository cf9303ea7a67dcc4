"""Reachability probes. Members that all reach the service and not each other would renew their generation for ever; so some of them are excluded.

Each member has a listening socket that is never served: the kernel answers for it, also while the process is stopped, and a probe leaves nothing behind in its queue, however long that lasts. When a generation breaks or cannot
be formed and no member is known to be lost, each member probes all others and records those it could not reach (`unreached/GENERATION/MEMBER`). `choose_removed` decides from these
records, the first writer of the next generation applies it, and an excluded member joins again only once it reaches all others.

A refused connection means that the process has ended: the first member to see it excludes that process, long before its host's heartbeats are missed.

Must never change: only a timeout or "no route" makes a member unreachable, and only a refused connection makes it gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.reading import parse_json, typed
from phalanx.core.service_address import is_ipv6
from phalanx.runtime.membership.keys import Keys
from phalanx.runtime.membership.membership import Generation, Membership
from phalanx.runtime.processes import address_towards

PROBE_TIMEOUT_S = 1.5
"""A host that does not answer for so long is unreachable. TCP retransmits after 1 s, so one lost packet is tolerated."""
COLLECT_S = 0.5
"""How long to wait for the reports of others."""
DEFER_S = 30
"""How long a listener's kernel waits for the first byte of a connection; probes end before."""
LOOK_S = 0.02
WAITING = 4096
"""Probes of one listener that may be under way at once; the kernel has a limit of its own, somaxconn."""
LINK_S = 4.0
"""A connection between machines is broken after so long without an answer of the peer's kernel."""


def choose_removed(uids: Sequence[str], unreached: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Members to remove so that the others reach each other: again and again the one with the most broken pairs, of equals the one with the last rank.

    `unreached`: the members that each could not reach; a pair is broken if either reports it. At least one member always stays.
    """
    ranks = {uid: rank for rank, uid in enumerate(uids)}
    broken: dict[str, set[str]] = {uid: set() for uid in uids}
    for a, others in unreached.items():
        for b in others:
            if a in ranks and b in ranks and a != b:
                broken[a].add(b)
                broken[b].add(a)
    counts = Counter({uid: len(others) for uid, others in broken.items() if others})
    out: list[str] = []
    while counts:
        worst = max(counts, key=lambda uid: (counts[uid], ranks[uid]))
        out.append(worst)
        del counts[worst]
        for other in broken[worst]:
            counts[other] -= 1
        counts = +counts
    return tuple(out)


class ProbeListener:
    """Listening socket that other members probe. Use from any thread."""

    def __init__(self, service_host: str) -> None:
        """Listens on the address by which this machine reaches the service. Raises `OSError` where it has none."""
        own = address_towards(service_host)
        if not own:
            raise OSError(errno.EADDRNOTAVAIL, f"this machine has no address on the way to {service_host}")
        self._socket = socket.create_server((own, 0), family=_family(own), backlog=WAITING)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            # a connection is in the queue once it has brought a byte, and probes bring none: that of a stopped process would be full after WAITING of them
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
        self._socket.setblocking(False)
        self.address = f"{own}:{self._socket.getsockname()[1]}"

    def clear(self) -> None:
        """Drop the connections of probes so far."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(address) else socket.AF_INET


def probe_key(uid: str) -> str:
    """Key under which a member publishes the address of its `ProbeListener`."""
    return f"probe/{uid}"


@dataclass(frozen=True)
class Answers:
    """Outcome of probes."""

    silent: frozenset[str]
    """Members that did not answer: unreachable."""
    refused: frozenset[str]
    """Members whose machine refused the connection: the process is gone."""
    answered: frozenset[str] = frozenset()
    """Members whose process exists."""


def probe_members(
    keys: Keys,
    uids: Sequence[str],
    *,
    own: str,
    limit_s: float = PROBE_TIMEOUT_S,
    whole: bool = False,
    over: Callable[[], bool] = lambda: False,
) -> Answers:
    """Probes members, as far as they have published an address."""
    others = [uid for uid in uids if uid != own]
    addresses = zip(others, keys.values([probe_key(uid) for uid in others]), strict=True)
    there = {uid: address for uid, address in addresses if address is not None}
    return probe_all(there, limit_s=limit_s, whole=whole, over=over)


def probe_all(
    addresses: Mapping[str, str],
    *,
    limit_s: float = PROBE_TIMEOUT_S,
    whole: bool = False,
    over: Callable[[], bool] = lambda: False,
) -> Answers:
    """Probes all at once, for `limit_s` at most; ends early when one refuses (but for `whole`) or `over` returns true, and then reports none as
    silent."""
    waiting: dict[int, tuple[str, socket.socket]] = {}
    codes: dict[str, int] = {}
    poll = select.poll()
    try:
        for name, where in addresses.items():
            host, _, port = where.rpartition(":")
            sock = socket.socket(_family(host), socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            waiting[sock.fileno()] = name, sock
            code = sock.connect_ex((host, int(port)))
            if code == errno.EINPROGRESS:
                poll.register(sock, select.POLLOUT)
            else:
                codes[name] = code
        end_s = time.monotonic() + limit_s
        while len(codes) < len(addresses) and (left_s := end_s - time.monotonic()) > 0:
            if (errno.ECONNREFUSED in codes.values() and not whole) or over():
                limit_s = 0.0
                break
            for fd, _ in poll.poll(min(left_s, LOOK_S) * 1000):
                poll.unregister(fd)
                name, sock = waiting.pop(fd)
                codes[name] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                sock.close()  # at once: others probe the same member
    finally:
        for _, sock in waiting.values():
            sock.close()
    refused = frozenset(name for name in addresses if codes.get(name) == errno.ECONNREFUSED)
    unanswered = -1 if limit_s else 0
    silent = frozenset(name for name in addresses if codes.get(name, unanswered) != 0) - refused
    return Answers(silent, refused, frozenset(name for name, code in codes.items() if code == 0))


def _propose_gone(keys: Keys, generation: Generation, answers: Answers) -> bool:
    if answers.refused:
        Membership(keys).propose_death(answers.refused, "its process is gone", generation)
    return bool(answers.refused)


def remove_unreachable(
    keys: Keys, generation: Generation, *, own: str, over: Callable[[], bool] = lambda: False
) -> bool:
    """Exclude unreachable members from a generation that broke or could not be formed: probe, publish the result, read those of the
    others, propose. False where all members answer.

    `over`: there is a newer generation already.
    """
    answers = probe_members(keys, generation.uids, own=own, over=over)
    if _propose_gone(keys, generation, answers):
        return True
    if not answers.silent:
        return False
    prefix = f"unreached/{generation.number}/"
    keys.put(prefix + own, json.dumps(sorted(answers.silent)))
    if keys.wait(f"gen/{generation.number + 1}", COLLECT_S):
        return True
    unreached = {
        k.removeprefix(prefix): typed(parse_json(keys.get(k) or "[]", where=k), list[str], where=k)
        for k in keys.listed(prefix)
    }
    gone = choose_removed(generation.uids, unreached)
    others = sorted({uid for pair in unreached.items() for uid in (pair[0], *pair[1])} - {*gone})
    change = f"could not be reached by {', '.join(others)}"
    membership = Membership(keys)
    now = membership.current(generation)
    if now is not None and now.number == generation.number:
        membership.propose_death(gone, change, now)
    return True


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel break the connection where the peer's does not answer for `LINK_S`: neither to data nor, while the connection is idle, to keep-alive probes.

    An answer needs no process: peers that compute, or are stopped, give it. `TCP_USER_TIMEOUT` would also break a connection whose peer answers and reads nothing for so long
    (tcp(7)); gloo sends data only to a receiver that has asked for it, and reads in a thread of its own.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_S * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LINK_S) - 1)
