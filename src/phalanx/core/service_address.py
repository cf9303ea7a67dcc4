"""How a recipe writes down where the membership service of a run is: `host:port`, or `etcd://host:port/name`; an address of IPv6 stands in brackets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

HOST_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Pattern of a host's name: it is a part of the names of its members, between dots."""
RACK_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PLACE = r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})"
_TCP = re.compile(_PLACE)
_ETCD = re.compile(rf"etcd://{_PLACE}/(?P<run>[A-Za-z0-9_.-]+)")
LEGAL = "host:port of a `phalanx service`, or etcd://host:port/NAME"


@dataclass(frozen=True)
class ServiceAddress:
    """`run` names the values of one start of a run in etcd; empty for a service that has one run. `host` has no brackets."""

    host: str
    port: int
    run: str = ""

    @property
    def is_etcd(self) -> bool:
        return bool(self.run)

    @property
    def is_here(self) -> bool:
        """Whether it can only be reached from the machine that it runs on."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name that begins like an address (127.0.0.1.example.com) is anybody's."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_service(text: str) -> ServiceAddress | None:
    """None where `text` is no address."""
    found = _ETCD.fullmatch(text) or _TCP.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536 or (found["v6"] and not is_ipv6(found["v6"])):
        return None
    return ServiceAddress(found["v6"] or found["host"], int(found["port"]), found.groupdict().get("run") or "")


def is_ipv6(host: str) -> bool:
    """Whether that is an address of IPv6, and no name."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def place(host: str, port: int) -> str:
    """`host:port`, as a person writes it: an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"
