"""Which interface gloo is given, and which GPU and processors a rank takes: with stand-ins for networks, cards and /sys."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.core.errors import ConfigError, RunError
from phalanx.runtime.processes import addresses, numa, world
from phalanx.runtime.processes.addresses import OUTSIDE
from phalanx.runtime.processes.numa import near_cpus, parse_cpus, stay_near
from phalanx.runtime.processes.world import WorldInfo, own_device, read_world, use_interface_to

pytestmark = pytest.mark.unit

# ---- the interface of gloo

LO, ETH, IB = "127.0.0.1", "10.0.0.5", "10.1.0.5"
INTERFACES = {LO: "lo", IB: "ib0", ETH: "eth0", "::1": "lo", "fd77::1": "eth6"}


@pytest.mark.parametrize(
    ("host", "towards", "chosen"),
    [
        ("node0", {"node0": IB}, "ib0"),
        ("node0", {"node0": LO, OUTSIDE[0]: ETH}, "eth0"),  # the head, whose hosts file has node0 at 127.0.1.1
        ("node0", {"node0": LO}, "ib0"),  # the same in a cluster without a default route
        ("node0", {"node0": "fd77::1"}, "eth6"),  # a cluster of IPv6 alone
        ("node0", {"node0": "127.0.1.1", OUTSIDE[1]: "fd77::1"}, "eth6"),
        ("::1", {"::1": "::1", OUTSIDE[0]: ETH}, "lo"),
        ("127.0.0.1", {"127.0.0.1": LO, OUTSIDE[0]: ETH}, "lo"),  # all ranks are here, whoever started them
        ("localhost", {"localhost": LO, OUTSIDE[0]: ETH}, "lo"),
        ("node0", {"node0": "10.0.0.99", OUTSIDE[0]: ETH}, None),  # a second address of some interface
        ("node0", {OUTSIDE[0]: ETH}, None),  # no way there
    ],
)
def test_gloo_gets_an_interface_that_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch, host: str, towards: dict[str, str], chosen: str | None
) -> None:
    monkeypatch.setattr(world, "os", SimpleNamespace(environ={}))
    for module in (addresses, world):
        monkeypatch.setattr(module, "interfaces", lambda: INTERFACES)
    monkeypatch.setattr(addresses, "_address_towards", lambda name: towards.get(name, ""))
    use_interface_to(host)
    assert world.os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    if chosen is not None:
        assert INTERFACES[addresses.address_towards(host)] == chosen


def test_a_machine_that_has_loopback_alone_and_one_whose_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (addresses, world):
        monkeypatch.setattr(module, "interfaces", lambda: {LO: "lo"})
    monkeypatch.setattr(addresses, "_address_towards", lambda name: LO if name == "node0" else "")
    for environ in ({}, {"GLOO_SOCKET_IFNAME": "mine"}):
        monkeypatch.setattr(world, "os", SimpleNamespace(environ=dict(environ)))
        use_interface_to("node0")
        assert world.os.environ == environ
    assert addresses.address_towards("node0") == LO, "all are on this machine"


def test_what_a_rank_tells_others_is_as_long_for_any_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gloo in this torch: a word of each rank, and one question for those of all. What the user has set stays."""
    monkeypatch.setattr(world, "os", SimpleNamespace(environ={"GLOO_ENABLE_STORE_V2_API": "0"}))
    world.ease_gloo()
    assert world.os.environ == {"GLOO_ENABLE_STORE_V2_API": "0", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}


def test_a_rank_to_which_another_never_connects_ends_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """gloo waits five times its timeout then, in a call that no signal interrupts."""
    pid = os.fork()
    if pid == 0:
        with world._ends_after(0.1, "could not meet"):
            time.sleep(30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == RunError("").exit_code
    assert "could not meet" in capfd.readouterr().err
    with world._ends_after(0.1, "not said"):
        pass
    time.sleep(0.2)


def test_what_this_machine_says_of_itself() -> None:
    """A name at 127.0.1.1 is reached by loopback, whose address is another one."""
    assert addresses._address_towards("127.0.1.1") == LO and addresses.interfaces()[LO] in ("lo", "lo0")
    assert addresses._address_towards("host.invalid") == ""
    assert set(addresses.interfaces().values()) <= {name for _, name in socket.if_nameindex()}


# ---- a GPU for each rank


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A process that sees one GPU; which it stays near, and which it makes its own."""
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"properties of {device}")
    monkeypatch.setattr(world, "stay_near", taken.append)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", taken.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: taken.append("a tensor"))
    for name in world.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    return taken


BOUND = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0"}


def test_a_rank_whose_launcher_bound_a_gpu_to_it_takes_that(one_gpu: list[object]) -> None:
    info = read_world(BOUND)
    assert info is not None and info.gpus_to_see == 1
    assert own_device(info, "cuda") == torch.device("cuda", 0)
    near = ["properties of cuda:0", torch.device("cuda", 0)]
    assert one_gpu == [*near, "expandable_segments:True", "a tensor"], "its context is made near it"


def test_a_driver_that_maps_no_memory_leaves_segments_as_they_were(
    one_gpu: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(size: int, device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: unknown error")

    monkeypatch.setattr(torch, "empty", refused)
    monkeypatch.setenv(world.ALLOCATOR[0], "")  # as before when the test is over
    own_device(WorldInfo(rank=0, world=1, local_rank=0, local_world=1), "cuda")
    assert one_gpu[-2:] == ["expandable_segments:True", "expandable_segments:False"]
    own_device(WorldInfo(rank=0, world=1, local_rank=0, local_world=1), "cuda")
    assert one_gpu.count("expandable_segments:True") == 1, "a refusal holds for the process"


@pytest.mark.parametrize("name", world.ALLOCATOR)
def test_what_the_user_sets_of_the_allocator_stays(
    one_gpu: list[object], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    own_device(WorldInfo(rank=0, world=1, local_rank=0, local_world=1), "cuda")
    assert one_gpu == ["properties of cuda:0", torch.device("cuda", 0)]


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_too_few_gpus_stay_an_error_where_none_is_bound(one_gpu: list[object], visible: str | None) -> None:
    env = {**BOUND, "CUDA_VISIBLE_DEVICES": visible} if visible else {k: BOUND[k] for k in list(BOUND)[:4]}
    for info in (read_world(env), WorldInfo(rank=3, world=8, local_rank=3, local_world=8)):  # ours: all see all GPUs
        assert info is not None
        with pytest.raises(ConfigError, match=r"launch.ranks = 8: must be at most the GPUs of this machine \(1\)"):
            own_device(info, "cuda")
    assert not one_gpu


# ---- processors near a GPU

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)


def machine(tree: Path, *, node: str = "1", cpus: tuple[str, ...] = ("0-3,8-11", "4-7,12-15")) -> Path:
    """/sys of a machine with these processors on its nodes, and the GPU on `node`."""
    (card := tree / "bus/pci/devices/0000:dc:00.0").mkdir(parents=True)
    (card / "numa_node").write_text(f"{node}\n")
    for number, text in enumerate(cpus):
        (folder := tree / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    return tree


SECOND = {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("now", "near"),
    [
        (set(range(16)), SECOND),
        ({0, 1, 4, 5}, {4, 5}),  # SLURM has given half of each node to the job
        ({4, 5}, {4, 5}),  # the launcher has bound it, narrower
        ({0, 1}, {0, 1}),  # ... or elsewhere
        ({0, 1, 2, 3, 8, 9, 10, 11, 4}, {0, 1, 2, 3, 8, 9, 10, 11, 4}),  # the ranks of the second node would crowd on 4
    ],
)
def test_a_rank_stays_on_the_node_of_its_gpu(tmp_path: Path, now: set[int], near: set[int]) -> None:
    assert near_cpus("0000:dc:00.0", now, tree=machine(tmp_path)) == near


def test_a_node_without_processors_or_not_known_changes_nothing(tmp_path: Path) -> None:
    everything = set(range(16))
    assert near_cpus("0000:dc:00.0", everything, tree=machine(tmp_path / "a", node="-1")) == everything
    memory_alone = machine(tmp_path / "b", node="2", cpus=("0-7", "8-15", ""))
    assert near_cpus("0000:dc:00.0", everything, tree=memory_alone) == everything


def test_affinity_is_set_and_no_fault_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []

    def refuse(pid: int, cpus: set[int]) -> None:
        bound.append(cpus)
        raise PermissionError

    monkeypatch.setattr(
        numa, "os", SimpleNamespace(sched_getaffinity=lambda pid: set(range(16)), sched_setaffinity=refuse)
    )
    stay_near(GPU, tree=machine(tmp_path / "good"))
    assert bound == [SECOND]
    stay_near(GPU, tree=machine(tmp_path / "bad", cpus=("x", "y")))
    stay_near(GPU, tree=machine(tmp_path / "unsaid", node="none"))
    stay_near(GPU, tree=tmp_path / "nowhere")
    stay_near(SimpleNamespace(), tree=tmp_path / "good")  # a device that has no such address
    monkeypatch.setattr(numa, "os", SimpleNamespace())  # a system without affinities
    stay_near(GPU, tree=tmp_path / "good")
    assert bound == [SECOND]


def test_cpu_lists_of_the_kernel() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11} and parse_cpus("\n") == set()
