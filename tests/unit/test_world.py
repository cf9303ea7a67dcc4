"""Which interface gloo is given: with stand-ins for networks."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from phalanx.runtime.processes import world
from phalanx.runtime.processes.world import OUTSIDE, use_interface_to

pytestmark = pytest.mark.unit

# ---- the interface of gloo

LO, ETH, IB = "127.0.0.1", "10.0.0.5", "10.1.0.5"
INTERFACES = {LO: "lo", IB: "ib0", ETH: "eth0"}


@pytest.mark.parametrize(
    ("host", "towards", "chosen"),
    [
        ("node0", {"node0": IB}, "ib0"),
        ("node0", {"node0": LO, OUTSIDE: ETH}, "eth0"),  # the head, whose hosts file has node0 at 127.0.1.1
        ("node0", {"node0": LO}, "ib0"),  # the same in a cluster without a default route
        ("127.0.0.1", {"127.0.0.1": LO, OUTSIDE: ETH}, "lo"),  # all ranks are here, whoever started them
        ("localhost", {"localhost": LO, OUTSIDE: ETH}, "lo"),
        ("node0", {"node0": "10.0.0.99", OUTSIDE: ETH}, None),  # a second address of some interface
        ("node0", {OUTSIDE: ETH}, None),  # no way there
    ],
)
def test_gloo_gets_an_interface_that_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch, host: str, towards: dict[str, str], chosen: str | None
) -> None:
    monkeypatch.setattr(world, "os", SimpleNamespace(environ={}))
    monkeypatch.setattr(world, "_interfaces", lambda: INTERFACES)
    monkeypatch.setattr(world, "_address_towards", lambda name: towards.get(name, ""))
    use_interface_to(host)
    assert world.os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_a_machine_that_has_loopback_alone_and_one_whose_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_interfaces", lambda: {LO: "lo"})
    monkeypatch.setattr(world, "_address_towards", lambda name: LO if name == "node0" else "")
    for environ in ({}, {"GLOO_SOCKET_IFNAME": "mine"}):
        monkeypatch.setattr(world, "os", SimpleNamespace(environ=dict(environ)))
        use_interface_to("node0")
        assert world.os.environ == environ


def test_what_this_machine_says_of_itself() -> None:
    """A name at 127.0.1.1 is reached by loopback, whose address is another one."""
    assert world._address_towards("127.0.1.1") == LO and world._interfaces()[LO] in ("lo", "lo0")
    assert world._address_towards("host.invalid") == ""
    assert set(world._interfaces().values()) <= {name for _, name in socket.if_nameindex()}
