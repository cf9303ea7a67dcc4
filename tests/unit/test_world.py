"""Which interface gloo is given, and which GPU a rank takes: with stand-ins for networks and cards."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from phalanx.core.errors import ConfigError
from phalanx.runtime.processes import world
from phalanx.runtime.processes.world import OUTSIDE, WorldInfo, own_device, read_world, use_interface_to

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


# ---- a GPU for each rank


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A process that sees one GPU; which it makes its own."""
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


BOUND = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0"}


def test_a_rank_whose_launcher_bound_a_gpu_to_it_takes_that(one_gpu: list[object]) -> None:
    info = read_world(BOUND)
    assert info is not None and info.gpus_to_see == 1
    assert own_device(info, "cuda") == torch.device("cuda", 0)
    assert one_gpu == [torch.device("cuda", 0)]


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_too_few_gpus_stay_an_error_where_none_is_bound(one_gpu: list[object], visible: str | None) -> None:
    env = {**BOUND, "CUDA_VISIBLE_DEVICES": visible} if visible else {k: BOUND[k] for k in list(BOUND)[:4]}
    for info in (read_world(env), WorldInfo(rank=3, world=8, local_rank=3, local_world=8)):  # ours: all see all GPUs
        assert info is not None
        with pytest.raises(ConfigError, match=r"launch.ranks = 8: must be at most the GPUs of this machine \(1\)"):
            own_device(info, "cuda")
    assert not one_gpu
