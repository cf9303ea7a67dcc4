"""Process groups of the two rank grids, and the world they live in.

Decides nothing: `plan/mapping/folding.py` says which ranks form a group; here they become `torch.distributed` groups. Groups are cached by
their tuple of ranks (many coincide across the grids, and a gloo group costs about 23 ms, 3 threads and 11 file descriptors).
Must never change: every rank creates every group, also those it is no member of, in the same order, or creation hangs.
A group of one rank is `None` and needs no communication, so that a single rank runs without any process group.

This file and `cli/` are the only places that read environment variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.plan.mapping import AnyFolding, group_names

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, eq=False)
class Axis:
    """This rank's group along one named axis."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks of the group, ascending."""
    index: int
    """Position of this rank in `ranks`."""
    group: dist.ProcessGroup | None
    """None when the axis has size 1."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class GroupCache:
    """Process groups by rank tuple. Make one per process and pass it around; call `get` in the same order on all ranks."""

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._groups: dict[tuple[tuple[int, ...], bool, int, bool], dist.ProcessGroup | None] = {}

    def get(
        self, ranks: Sequence[int], *, second: bool = False, message_ctas: int = 0, beside: bool = False
    ) -> dist.ProcessGroup | None:
        """The group of `ranks`: None if it has one member or this rank is not in it. Creation is collective over the world.

        `second`: another group of the same ranks, whose collectives come in an order of their own; `beside`: one more, for a thread that has it alone while steps are computed.
        `message_ctas`: a group whose NCCL kernels have at most so many thread blocks, each on a multiprocessor of its own; 0: as many as NCCL likes.
        """
        key = tuple(ranks), second, message_ctas, beside
        if len(key[0]) == 1:
            return None
        if key not in self._groups:
            if not dist.is_initialized():
                raise RunError(
                    f"group {_short(key[0])} needs {len(key[0])} ranks, but this process runs alone (no init_world)"
                )
            self._groups[key] = self._create(key[0], second or beside, message_ctas)
        return self._groups[key]

    def _create(self, ranks: tuple[int, ...], second: bool, message_ctas: int) -> dist.ProcessGroup | None:
        if ranks == tuple(range(dist.get_world_size())) and not second and not message_ctas:
            return dist.group.WORLD
        timeout = timedelta(seconds=self.timeout_s)
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=nccl_options(message_ctas))
        return group if dist.get_rank() in ranks else None

    def __len__(self) -> int:
        return len(self._groups)


def nccl_options(message_ctas: int) -> Any:
    """Options of a group of few thread blocks, None for 0. Its kernels go before others that wait for a multiprocessor: they are few, and others wait for what they bring.

    Raises `RunError` where this torch has no NCCL.
    """
    if not message_ctas:
        return None
    if not dist.is_nccl_available():
        raise RunError(f"message_ctas = {message_ctas}: this torch has no NCCL, whose thread blocks it would limit")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = message_ctas
    return options


OF_A_PASS = ("tp", "cp", "tp_cp", "micro", "ep", "etp", "ep_etp", "tp_dp_cp")
"""Axes that a forward pass communicates over."""


@dataclass(frozen=True, eq=False)
class SecondGroups:
    """Further groups of the same ranks, for a pass that runs beside another (`runtime/moe/co_schedule.py`)."""

    by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup]

    def of(self, axis: Axis) -> dist.ProcessGroup:
        """Raises `RunError` where there is none: a forward pass has communicated over an axis that `OF_A_PASS` does not name."""
        if axis.ranks not in self.by_ranks:
            raise RunError(f"axis {axis.name}, ranks {axis.ranks}, has no second group for a pass beside another")
        return self.by_ranks[axis.ranks]


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """All groups of one rank in one folding; `axes` has the names of `plan.stage_foldings.group_names`."""

    folding: AnyFolding
    rank: int
    axes: Mapping[str, Axis]
    second: SecondGroups | None = None
    """Where passes run beside one another."""

    def axis(self, name: str) -> Axis:
        """`micro` are the ranks that share a micro-batch: those of `tp_cp`, and more where a stage divides its sequences among dp."""
        return self.axes["tp_cp" if name == "micro" and name not in self.axes else name]


def build_groups(
    folding: AnyFolding,
    *,
    rank: int,
    cache: GroupCache,
    table_ranks: Sequence[int] | None = None,
    message_ctas: int = 0,
) -> Groups:
    """Create (or find) every group of `folding`. Collective: all ranks call it with the same folding in the same order.

    `table_ranks` are the pipeline ranks that hold a tied embedding (`StagePlan.table_ranks`; None: the first and the last one).
    `message_ctas`: most thread blocks of NCCL's kernels over `ep_etp`, whose messages travel beside products (`GroupCache.get`).
    """
    axes: dict[str, Axis] = {}
    for name in group_names(folding):
        given = name == "embedding" and table_ranks is not None
        for ranks in folding.embedding_groups(table_ranks or ()) if given else folding.groups(name):
            group = cache.get(ranks, message_ctas=message_ctas if name == "ep_etp" else 0)
            if rank in ranks:
                axes[name] = Axis(name, ranks, ranks.index(rank), group)
    return Groups(folding=folding, rank=rank, axes=MappingProxyType(axes))


def with_second_groups(groups: Groups, *, cache: GroupCache) -> Groups:
    """The same with further groups of the axes of a pass, for passes that run beside others. Collective, as `build_groups` is."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name in group_names(groups.folding):
        if name in OF_A_PASS:
            for ranks in groups.folding.groups(name):
                group = cache.get(ranks, second=True)
                if group is not None and groups.rank in ranks:
                    found[ranks] = group
    return replace(groups, second=SecondGroups(MappingProxyType(found)))


@dataclass(frozen=True, kw_only=True)
class WorldInfo:
    """Who this process is among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    listen_fd: int | None = None
    """Our own launcher: the socket on `master_port` that it already listens on, so that nobody can take the port in between."""


def read_world(environ: Mapping[str, str] | None = None) -> WorldInfo | None:
    """What the launcher (torchrun, or our own) said, or None where this process was started by hand.

    Raises `ConfigError` naming every variable that is missing or makes no sense.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    problems: list[Problem] = []

    def number(name: str, default: int | None = None) -> int:
        text = env.get(name)
        if text is None and default is not None:
            return default
        if text is None or not text.isdecimal():
            rule = "must be a whole number, as torchrun sets it"
            problems.append(
                Problem(where=name, value=text, rule=rule, hint="start with torchrun, or unset RANK and WORLD_SIZE")
            )
            return 0
        return int(text)

    rank, world, port = number("RANK"), number("WORLD_SIZE"), number("MASTER_PORT", 29500)
    local_rank, local_world = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world)
    if not problems and not rank < world:
        problems.append(Problem(where="RANK", value=rank, rule=f"must lie between 0 and WORLD_SIZE - 1 = {world - 1}"))
    if not problems and not local_rank < local_world <= world:
        rule = f"must lie between 0 and LOCAL_WORLD_SIZE - 1, which is below WORLD_SIZE = {world}"
        problems.append(
            Problem(where="LOCAL_RANK", value=local_rank, rule=rule, hint=f"LOCAL_WORLD_SIZE is {local_world}")
        )
    raise_if(problems, ConfigError, subject="launch environment")
    return WorldInfo(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
    )


def init_world(info: WorldInfo, *, device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> torch.device:
    """Join all ranks (gloo for cpu; NCCL for tensors on cuda, gloo for those on the host) and return this rank's device.

    A world of one rank joins nothing. Raises `ConfigError` where this rank has no GPU, `RunError` when the ranks cannot meet.
    """
    target = own_device(info, device)
    if info.world == 1:
        return target
    if info.local_world == info.world:
        use_loopback()
    where = f"{info.master_addr}:{info.master_port}"
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            info.world,
            info.rank == 0,
            timeout=timeout,
            master_listen_fd=info.listen_fd,
        )
        dist.init_process_group(
            "gloo" if target.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=info.rank,
            world_size=info.world,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as err:
        raise RunError(_meeting_failed(info, where, str(err), timeout_s)) from err
    return target


def own_device(info: WorldInfo, device: str) -> torch.device:
    """Where this rank's tensors live, from now on the current device. Raises `ConfigError` where this rank has no GPU."""
    target = torch.device("cuda", info.local_rank) if device == "cuda" else torch.device(device)
    if target.type == "cuda":
        raise_if(_gpu_problems(info, num_gpus=torch.cuda.device_count()), ConfigError, subject="the recipe")
        torch.cuda.set_device(target)
    return target


def leave_errors_to_run() -> None:
    """NCCL's own threads neither end this process nor abort its communicators when a peer is lost: an elastic run does. Before the first group is made.

    What the user has set stays: torch's defaults end the process, which its supervisor then replaces.
    """
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        os.environ.setdefault(name, "0")


def _gpu_problems(info: WorldInfo, *, num_gpus: int) -> list[Problem]:
    """Each local rank needs a GPU of its own."""
    if num_gpus == 0:
        rule, hint = "needs a GPU that torch can use, and finds none on this machine", "use cpu, or see `nvidia-smi`"
        return [Problem(where="launch.device", value="cuda", rule=rule, hint=hint)]
    if info.local_world > num_gpus:
        rule = f"must be at most the GPUs of this machine ({num_gpus}), one for each rank"
        return [Problem(where="launch.ranks", value=info.local_world, rule=rule, hint=f"use {num_gpus}")]
    return []


def use_loopback() -> None:
    """All ranks are on this machine: gloo need not resolve the host's name, which fails on many laptops."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def use_interface_to(host: str) -> None:
    """Let gloo use the interface by which `host` is reached, so that it need not resolve this machine's own name. Does nothing where that is not known."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if _address_of(probe, name) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


def _address_of(sock: socket.socket, interface: str) -> bytes:
    """IPv4 address of an interface (Linux: SIOCGIFADDR of netdevice(7))."""
    answer = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
    return bytes(answer[20:24])


def _meeting_failed(info: WorldInfo, where: str, text: str, timeout_s: float) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "unknown error"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"MASTER_PORT = {info.master_port}: the port is in use on this machine; choose a free one (torchrun --master-port)"
    return (
        f"rank {info.rank} of {info.world} could not meet the others at {where} within {timeout_s:g} s: {first}; "
        f"check that all ranks run and that MASTER_ADDR and MASTER_PORT name rank 0"
    )


def close_world() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return "(" + " ".join(map(str, ranks)) + ")"
    return f"({ranks[0]} {ranks[1]} ... {ranks[-1]})"
