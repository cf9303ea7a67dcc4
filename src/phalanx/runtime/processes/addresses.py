"""Addresses of this machine, and those by which others are reached, of IPv4 first."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Any

from phalanx.core.service_address import is_loopback

OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849), which leave this one by its default routes."""
OF_LINK = 0x20
"""Scope of addresses of IPv6 that mean nothing without an interface's name."""


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`, at which the others that reach `host` reach it, too; empty where there is none.

    Debian's hosts file has this machine's own name at 127.0.1.1, where no other machine reaches it: then that of the interface that leads out, else of the first with an address, if there is one.
    """
    own = _address_towards(host)
    if not is_loopback(own) or is_loopback(host):
        return own
    return next((a for a in (*map(_address_towards, OUTSIDE), *interfaces()) if a and not is_loopback(a)), own)


def addresses_of(host: str, port: int, kind: socket.SocketKind) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """(family, address) of each way to reach `host`, those of IPv4 first. Raises `OSError`."""
    found = [(family, where) for family, _, _, _, where in socket.getaddrinfo(host, port, type=kind)]
    return sorted(found, key=lambda way: way[0] != socket.AF_INET)


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`, of IPv4 where there is such a way; empty where there is none."""
    with contextlib.suppress(OSError):
        for family, where in addresses_of(host, 9, socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
    return ""


def interfaces() -> dict[str, str]:
    """Address -> interface, those of IPv4 first (Linux: SIOCGIFADDR of netdevice(7), /proc/net/if_inet6)."""
    found = dict[str, str]()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                found.setdefault(socket.inet_ntoa(answer[20:24]), name)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != OF_LINK:
                found.setdefault(str(ipaddress.IPv6Address(int(digits, 16))), name)
    return found
