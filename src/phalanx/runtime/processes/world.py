"""The world that a process belongs to: who it is among all ranks, the device that it has, how it joins the others and leaves them.

Decides nothing: the launcher (torchrun, or our own) says it in environment variables. This file and `cli/` are the only places that read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.reading import is_count
from phalanx.core.service_address import is_loopback, place
from phalanx.runtime.comm import DEFAULT_TIMEOUT_S, LostPeers
from phalanx.runtime.processes.addresses import address_towards, interfaces
from phalanx.runtime.processes.gpus import gpu_problems
from phalanx.runtime.processes.meeting import listen_at, meeting_file, part_of_this_start
from phalanx.runtime.processes.numa import stay_near

MORE_S = 30.0
"""How much longer than twice its timeout the ranks of a world may take to meet: once until the last one is there, once until all are connected, and torch writes stacks into its errors."""


@dataclass(frozen=True, kw_only=True)
class WorldInfo:
    """Who this process is among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    meeting: Path | None = None
    """Our own launcher: where the ranks of one machine meet, a file in a folder that only their user can reach. None: they agree on one by `master_port`, or, on
    several machines, meet at `master_addr`."""
    agent_listens: bool = False
    """torchrun's agent listens at `master_addr` already, for the ranks of all machines."""
    gpu_bound: bool = False
    """The launcher lets each process see one GPU of its own alone (SLURM's `--gpus-per-task=1`), which is device 0 of each."""

    @property
    def gpus_to_see(self) -> int:
        """GPUs that this process must find."""
        return 1 if self.gpu_bound else self.local_world


def read_world(environ: Mapping[str, str] | None = None) -> WorldInfo | None:
    """What the launcher (torchrun, or our own) set, or None where this process was started by hand.

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
        if text is None or not is_count(text):
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
    if is_count(env.get("MASTER_PORT", "")) and not 1 <= port <= 65535:
        rule = "must lie between 1 and 65535"
        problems.append(Problem(where="MASTER_PORT", value=port, rule=rule, hint="use 29500"))
    raise_if(problems, ConfigError, subject="launch environment")
    return WorldInfo(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        agent_listens=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        gpu_bound="," not in env.get("CUDA_VISIBLE_DEVICES", ","),
    )


def init_world(info: WorldInfo, *, device: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> torch.device:
    """Join all ranks (gloo for cpu; NCCL for tensors on cuda, gloo for those on the host) and return this rank's device.

    A world of one rank joins nothing. Raises `ConfigError` where this rank has no GPU of its own, `RunError` when the ranks cannot meet.
    """
    target = own_device(info, device)
    if info.world == 1:
        return target
    ease_gloo()
    if info.local_world == info.world:
        use_loopback()
    where = place(info.master_addr, info.master_port) if info.meeting is None else str(info.meeting)
    timeout = timedelta(seconds=timeout_s)
    try:
        meeting = info.meeting
        if meeting is None and info.local_world == info.world:
            meeting = meeting_file(info.rank, info.master_port, timeout_s=timeout_s)
        if meeting is not None:
            store: dist.Store = dist.FileStore(str(meeting), info.world)
            store.set_timeout(timeout)
        else:
            use_interface_to(info.master_addr)
            at, listens = (info.master_addr, info.master_port), info.rank == 0 and not info.agent_listens
            listener = listen_at(*at) if listens else None
            store = dist.TCPStore(*at, info.world, listens, timeout=timeout, master_listen_fd=listener)
            if info.agent_listens:
                store = part_of_this_start(store, rank=info.rank, world=info.world, timeout_s=timeout_s)
        with _ends_after(2 * timeout_s + MORE_S, _meeting_failed(info, where, "", timeout_s)):
            dist.init_process_group(
                "gloo" if target.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=info.rank,
                world_size=info.world,
                timeout=timeout,
            )
        if target.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(target).uuid)
            raise_if(_sharing_problems(uuid, info.world), ConfigError, subject="launch environment")
            if info.gpu_bound:
                os.environ.setdefault(SAME_NUMBER, "1")
    except (RuntimeError, ValueError) as err:
        raise RunError(_meeting_failed(info, where, str(err), timeout_s)) from err
    return target


@contextlib.contextmanager
def _ends_after(limit_s: float, why: str) -> Iterator[None]:
    """Ends the process where a call takes longer, which neither an exception nor a signal interrupts: gloo waits five times its timeout for a rank that does not connect."""
    late = threading.Timer(limit_s, LostPeers(asks=False).end, (RunError(why),))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


SAME_NUMBER = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""For fused layers. torch takes GPUs of a host that have one number for one GPU, and where each process sees its own alone all are number 0 (its validate_rendezvous_requests)."""


def _sharing_problems(uuid: str, world: int) -> list[Problem]:
    """That several ranks have one GPU, which no rank sees by itself where each sees one. As for NCCL, ranks with another NCCL_HOSTID are elsewhere. Collective."""
    own = hashlib.sha256(f"{uuid} {os.environ.get('NCCL_HOSTID', '')}".encode()).digest()
    every = [torch.empty(len(own), dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(every, torch.tensor(list(own), dtype=torch.uint8))
    sharing = [rank for rank, other in enumerate(every) if bytes(other.tolist()) == own]
    if len(sharing) == 1:
        return []
    rule = f"is the GPU of ranks {', '.join(map(str, sharing))}, and each needs one of its own"
    hint = "let CUDA_VISIBLE_DEVICES name all GPUs of the machine, or another one for each of its processes"
    return [Problem(where="GPU", value=uuid, rule=rule, hint=hint)]


def own_device(info: WorldInfo, device: str) -> torch.device:
    """Where this rank's tensors live, from now on the current device; a GPU's rank stays on the processors near it. Raises `ConfigError` where this rank has no GPU."""
    target = (
        torch.device("cuda", 0 if info.gpu_bound else info.local_rank) if device == "cuda" else torch.device(device)
    )
    if target.type == "cuda":
        raise_if(
            gpu_problems(wanted=info.gpus_to_see, ranks=info.local_world, num_gpus=torch.cuda.device_count()),
            ConfigError,
            subject="the recipe",
        )
        stay_near(torch.cuda.get_device_properties(target))  # before its context, and all pinned memory
        torch.cuda.set_device(target)
        _grow_segments(target)
    return target


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where a user sets torch's allocator."""


def _grow_segments(device: torch.device) -> None:
    """Let torch's allocator grow its segments in place, where the user has not set it: experts have another number of rows in every step, which leaves holes between segments of fixed sizes.
    Before the first tensor on the GPU, which tells whether its driver can: that of some shared GPUs and of WSL 2 refuses (pytorch #192330)."""
    change: Callable[[str], None] | None = getattr(
        torch._C, "_accelerator_setAllocatorSettings", None
    )  # torch 2.11 and 2.13
    if change is not None and not any(os.environ.get(name) for name in ALLOCATOR):
        change("expandable_segments:True")
        try:
            torch.empty(1, device=device)
        except RuntimeError:
            change("expandable_segments:False")
            os.environ[ALLOCATOR[0]] = "expandable_segments:False"  # so that a worker does not ask again


LEFT_TO_RUN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "4",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
"""torch's settings for that. Whoever destroys a group waits for two threads of torch. After an error, here or at another rank, one would write records (whose text is made by importing
torch's compiler) and sleep four times WAIT_TIMEOUT_DUMP, 60 s by default; the other, monitoring or not, would sleep HEARTBEAT_TIMEOUT, 480 s by default, which is also how long it may
miss that it shall end. Both were seen on an H200."""


def leave_errors_to_run() -> None:
    """NCCL's own threads neither end this process nor abort its communicators when a peer is lost, nor keep them: an elastic run does. Before the first group is made.

    What the user has set stays: torch's defaults end the process, which its supervisor then replaces.
    """
    watched = os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "0") != "0"  # then a short heartbeat would end the process
    for name, value in LEFT_TO_RUN.items():
        if not (watched and name == "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
            os.environ.setdefault(name, value)


def use_loopback() -> None:
    """All ranks are on this machine: gloo need not resolve the host's name, which fails on many laptops."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def use_interface_to(host: str) -> None:
    """Let gloo use the interface by which `host` is reached, so that it need not resolve this machine's own name. Does nothing where that is not known."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    names, own = interfaces(), address_towards(host)
    if own in names and is_loopback(own) == is_loopback(host):
        os.environ["GLOO_SOCKET_IFNAME"] = names[own]


GLOO_EASED = {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1", "GLOO_ENABLE_STORE_V2_API": "1"}


def ease_gloo() -> None:
    """Let each rank of a group write 154 bytes to its store and ask once for those of all others, before the first group is made. By itself gloo writes 8 more for each rank, and
    asks for every rank apart: 1,024 ranks would read 9 GB in a million calls for one group, 16,384 ranks 35 TB."""
    for name, value in GLOO_EASED.items():
        os.environ.setdefault(name, value)


def _meeting_failed(info: WorldInfo, where: str, text: str, timeout_s: float) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "one that is there did not connect to this rank"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"MASTER_PORT = {info.master_port}: the port is in use on this machine; choose a free one (torchrun --master-port)"
    return (
        f"rank {info.rank} of {info.world} could not meet the others at {where} within {timeout_s:g} s: {first}; "
        f"check that all ranks run, that MASTER_ADDR and MASTER_PORT name rank 0, and that GLOO_SOCKET_IFNAME, where it is set, names an interface that the other machines reach"
    )


def takes_spare_messages() -> bool:
    """Whether a message that nobody receives does no harm: a debug level of torch compares how many each rank has sent, and lazy connections would be made for it."""
    return dist.get_debug_level() != dist.DebugLevel.DETAIL and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0")


def close_world() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()
