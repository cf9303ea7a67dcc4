"""How a recipe writes down where the membership service of a run is: `host:port`, several of these with commas between them, or `etcd://host:port/name`."""

from __future__ import annotations

import re
from dataclasses import dataclass

HOST_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Pattern of a host's name: it is a part of the names of its members, between dots."""
RACK_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TCP = re.compile(r"(?P<host>[^\s:/]+):(?P<port>\d+)")
_ETCD = re.compile(r"etcd://(?P<host>[^\s:/]+):(?P<port>\d+)/(?P<run>[A-Za-z0-9_.-]+)")
LEGAL = "host:port of a `phalanx service`, several of them with commas where a lighthouse says who keeps the values, or etcd://host:port/NAME"


@dataclass(frozen=True)
class ServiceAddress:
    """`run` names the values of one start of a run in etcd; empty for a service that has one run."""

    host: str
    port: int
    run: str = ""
    standbys: tuple[tuple[str, int], ...] = ()
    """(host, port) of services that take its place."""

    @property
    def is_etcd(self) -> bool:
        return bool(self.run)

    @property
    def is_here(self) -> bool:
        """Whether it can only be reached from the machine that it runs on."""
        return all(h == "localhost" or h.startswith("127.") for h, _ in ((self.host, self.port), *self.standbys))


def parse_service(text: str) -> ServiceAddress | None:
    """None where `text` is no address."""
    if "," in text:
        parts = [parse_service(part) for part in text.split(",")]
        places = [(p.host, p.port) for p in parts if p is not None and not p.is_etcd]
        good = len(places) == len(parts) == len(set(places))
        return ServiceAddress(*places[0], standbys=tuple(places[1:])) if good else None
    found = _ETCD.fullmatch(text) or _TCP.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        return None
    return ServiceAddress(found["host"], int(found["port"]), found.groupdict().get("run") or "")
