"""From the address in a recipe to the service itself, and the first talk with it before any rank is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phalanx.core.errors import RunError
from phalanx.core.service_address import ServiceAddress
from phalanx.runtime.membership.keys import Service, ServiceLost, TcpKeys, TcpService
from phalanx.runtime.membership.keys_etcd import EtcdService

AGAIN_S = 0.1
TOLD_S = 2.0
WANTED = "wanted"
"""How many ranks a run began with, on which its mapping rests: a host that comes later with another number takes this one."""


def service_at(address: ServiceAddress) -> TcpService | EtcdService | AnyService:
    """Where members meet."""
    if address.is_etcd:
        return EtcdService(address.host, address.port, address.run)
    if address.standbys:
        return AnyService([TcpService(host, port) for host, port in ((address.host, address.port), *address.standbys)])
    return TcpService(address.host, address.port)


class AnyService:
    """Services of which one at most keeps values (`runtime/membership/lighthouse.py`): the one that answers is meant."""

    def __init__(self, services: Sequence[TcpService]) -> None:
        self.services = list(services)

    @property
    def host(self) -> str:
        """Of the one that answered last: names of the others may not resolve any more."""
        return self.services[0].host

    @property
    def port(self) -> int:
        return self.services[0].port

    def connect(self) -> TcpKeys:
        """Raises `ServiceLost` where none answers. The one that answered last is asked first."""
        said = list[str]()
        for service in self.services:
            try:
                keys = service.connect()
            except ServiceLost as err:
                said.append(str(err))
            else:
                self.services = sorted(self.services, key=lambda s: s != service)  # a new list: threads share this one
                return keys
        raise ServiceLost("; ".join(said))


def expect_service(service: Service, where: str, *, wait_s: float, tell: Callable[[str], None]) -> bool:
    """Return once it answers: whether a run is under way there. Raises `RunError` where it does not within `wait_s`, or serves a run that is over or was stopped."""
    end_s, told_s = time.monotonic() + wait_s, time.monotonic() + TOLD_S
    while True:
        try:
            keys = service.connect()
            break
        except ServiceLost as err:
            if time.monotonic() > end_s:
                raise RunError(f"{err}; waited {wait_s:g} s for it (resilience.wait_s)") from None
            if time.monotonic() > told_s:
                told_s = float("inf")
                tell(f"waiting for the membership service at {where} (`phalanx service` keeps one)")
            time.sleep(AGAIN_S)
    try:
        over, first = keys.get("finished"), keys.get("first")
        stopped, stop = keys.get("stopped"), keys.get("stop")
    finally:
        keys.close()
    if over is not None:
        raise RunError(
            f"the membership service at {where} has served a run that is over, after {over.split()[0]} steps; "
            "start another one, or in etcd use another name"
        )
    if stopped is not None or stop is not None:
        state = "was stopped" if stopped is not None else "is being stopped"
        raise RunError(
            f"the membership service at {where} serves a run that {state} ({stop or 'without a reason'}), and remembers it: nobody takes part any more. "
            "Start another service, or in etcd use another name; the same command then goes on from the newest checkpoint"
        )
    return first is not None


def run_at(service: Service, *, wanted: int) -> tuple[int, bool]:
    """(ranks that the run there begins with: what the first host that asked has said, else `wanted`; whether it is under way)."""
    try:
        keys = service.connect()
        try:
            return int(keys.create(WANTED, str(wanted))), keys.get("first") is not None
        finally:
            keys.close()
    except ServiceLost:
        return wanted, False
