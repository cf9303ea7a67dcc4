"""The world that a process belongs to: who it is among all ranks, the device that it has, how it joins the others and leaves them.

Decides nothing: the launcher (torchrun, or our own) says it in environment variables. This file and `cli/` are the only places that read them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.files import private_folder
from phalanx.core.process import begun
from phalanx.core.reading import is_count
from phalanx.core.service_address import is_loopback, place
from phalanx.runtime.comm import DEFAULT_TIMEOUT_S, LostPeers
from phalanx.runtime.processes.numa import stay_near

LOOK_S = 0.02
"""How often a rank looks whether the first one has come."""
OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no machine (RFC 5737, RFC 3849), which leave this one by its default routes."""
MORE_S = 30.0
"""How much longer than twice its timeout the ranks of a world may take to meet: once until the last one is there, once until all are connected, and torch writes stacks into its errors."""
OF_LINK = 0x20
"""Scope of addresses of IPv6 that mean nothing without an interface's name."""


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


def _meeting(info: WorldInfo, *, timeout_s: float) -> Path:
    """File for the ranks of this machine, whoever started them: the first rank makes a new one and says so where the others look, with the number of its process, so that what
    earlier ranks have left there is passed over. Raises `RuntimeError`."""
    folder, name = private_folder(), f"ranks-at-{info.master_port}"
    if info.rank == 0:
        if _said_by_first(folder / name, but=os.getpid()) is not None:
            raise RuntimeError("EADDRINUSE")
        for old in folder.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        file = folder / f"{name}-{secrets.token_hex(4)}"
        draft = folder / f"{file.name}.new"
        draft.write_text(f"{os.getpid()} {begun(os.getpid())} {file.name}")
        os.replace(draft, folder / name)
        return file
    end_s = time.monotonic() + timeout_s
    while (found := _said_by_first(folder / name)) is None:
        if time.monotonic() > end_s:
            raise RuntimeError(f"rank 0 has not come to {folder / name}, where ranks of one machine meet")
        time.sleep(LOOK_S)
    return found


def _said_by_first(path: Path, *, but: int = 0) -> Path | None:
    """The file that a first rank which still runs has made."""
    with contextlib.suppress(OSError, ValueError):
        pid, began, name = path.read_text().split()
        if is_count(pid) and int(pid) != but and began == begun(int(pid)):
            return path.with_name(Path(name).name)
    return None


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
            meeting = _meeting(info, timeout_s=timeout_s)
        if meeting is not None:
            store: dist.Store = dist.FileStore(str(meeting), info.world)
            store.set_timeout(timeout)
        else:
            use_interface_to(info.master_addr)
            at, listens = (info.master_addr, info.master_port), info.rank == 0 and not info.agent_listens
            listener = _listen(*at) if listens else None
            store = dist.TCPStore(*at, info.world, listens, timeout=timeout, master_listen_fd=listener)
            if info.agent_listens:
                store = _part_of_this_start(store, info, timeout_s=timeout_s)
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


def _part_of_this_start(store: dist.Store, info: WorldInfo, *, timeout_s: float) -> dist.Store:
    """The agent's store outlives ranks that it starts again (`--max-restarts`), and so do their addresses in it. Each rank says a word that is new, and the first one answers all of them with
    its own until every rank has taken that: how often they were started each agent counts by itself. Raises `RuntimeError` where some do not come."""
    mine, others = secrets.token_hex(8), range(1, info.world)
    store.set(f"here/{info.rank}", mine)
    if info.rank != 0:
        part = store.get(f"part/{mine}").decode()
        store.set(f"taken/{part}/{info.rank}", "")
        return dist.PrefixStore(part, store)
    here, taken = [f"here/{rank}" for rank in others], [f"taken/{mine}/{rank}" for rank in others]
    answered, end_s = set[bytes](), time.monotonic() + timeout_s
    while not store.check(taken):
        if time.monotonic() > end_s:
            raise RuntimeError(f"not all ranks came within {timeout_s:g} s")
        for word in {*store.multi_get(here)} - answered if store.check(here) else ():
            store.set(f"part/{word.decode()}", mine)
            answered.add(word)
        time.sleep(0.02 + info.world / 20_000)
    return dist.PrefixStore(mine, store)


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


def _listen(host: str, port: int) -> int | None:
    """Descriptor of a socket at the one address that the ranks of other machines know. None, for all addresses of this machine, where `host` is no address of its own:
    a name that its hosts file calls loopback, or a translated address. Raises `RuntimeError` where the port is in use."""
    try:
        family, where = addresses_of(host, port, socket.SOCK_STREAM)[0]
        if is_loopback(str(where[0])):
            return None
        return socket.create_server(where[:2], family=family).detach()
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise RuntimeError("EADDRINUSE") from err
        return None


def own_device(info: WorldInfo, device: str) -> torch.device:
    """Where this rank's tensors live, from now on the current device; a GPU's rank stays on the processors near it. Raises `ConfigError` where this rank has no GPU."""
    target = (
        torch.device("cuda", 0 if info.gpu_bound else info.local_rank) if device == "cuda" else torch.device(device)
    )
    if target.type == "cuda":
        raise_if(_gpu_problems(info, num_gpus=torch.cuda.device_count()), ConfigError, subject="the recipe")
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


def device_here(local_ranks: int, *, num_gpus: int | None = None) -> Literal["cpu", "cuda"]:
    """What `launch.device = "auto"` is for so many ranks of this machine, which has `num_gpus` (None: as many as torch counts, which asks the driver and makes no context of CUDA).

    Raises `ConfigError` where there are GPUs, but not one for every rank.
    """
    found = torch.cuda.device_count() if num_gpus is None else num_gpus
    if found >= local_ranks:
        return "cuda"
    if not found:
        return "cpu"
    rule = f'"auto" means GPUs here, and this machine has {found} for {local_ranks} ranks'
    hint = f"--launch.device cpu, or {found} rank{'s' if found > 1 else ''} (--launch.ranks {found})"
    raise ConfigError([Problem(where="launch.device", value="auto", rule=rule, hint=hint)], subject="the recipe")


def _gpu_problems(info: WorldInfo, *, num_gpus: int) -> list[Problem]:
    """Each local rank needs a GPU of its own."""
    if num_gpus == 0:
        rule, hint = "needs a GPU that torch can use, and finds none on this machine", "use cpu, or see `nvidia-smi`"
        return [Problem(where="launch.device", value="cuda", rule=rule, hint=hint)]
    if info.gpus_to_see > num_gpus:
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
    names, own = _interfaces(), address_towards(host)
    if own in names and is_loopback(own) == is_loopback(host):
        os.environ["GLOO_SOCKET_IFNAME"] = names[own]


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`, at which the others that reach `host` reach it, too; empty where there is none.

    Debian's hosts file has this machine's own name at 127.0.1.1, where no other machine reaches it: then that of the interface that leads out, else of the first with an address, if there is one.
    """
    own = _address_towards(host)
    if not is_loopback(own) or is_loopback(host):
        return own
    return next((a for a in (*map(_address_towards, OUTSIDE), *_interfaces()) if a and not is_loopback(a)), own)


GLOO_EASED = {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1", "GLOO_ENABLE_STORE_V2_API": "1"}


def ease_gloo() -> None:
    """Let each rank of a group write 154 bytes to its store and ask once for those of all others, before the first group is made. By itself gloo writes 8 more for each rank, and
    asks for every rank apart: 1,024 ranks would read 9 GB in a million calls for one group, 16,384 ranks 35 TB."""
    for name, value in GLOO_EASED.items():
        os.environ.setdefault(name, value)


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


def _interfaces() -> dict[str, str]:
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
