"""Sees every operation of a step on tensors that compute nothing, and takes down what a device would have done.

launches   operations that a device runs, by phase and by name; views and allocations are none. One operation of torch may be several kernels
           (a sort is): what is counted is what the host asks for
syncs      where the host waits for the device: copies that block, values that Python reads
calls      collectives and messages, by communicator, in the order in which they were posted
memory     bytes of all storages that are alive, rounded up to 512 as torch's allocator does, by a reference to each
moved      bytes that operations other than products read and write, each tensor once
flops      of products and attention; of products in kernels that wait for rows apart (`fused`)
exchanges  bytes that this rank sends, by what they are: rows of experts, gradients, parameters, what crosses between stages, or else
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from phalanx_lab.bench.trace.places import content_of, frames, line_of, phase_of

GRAIN = 512
NO_LAUNCH = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "is_same_size", "_local_scalar_dense",
     "set_", "resize_", "record_stream", "_reshape_alias", "detach", "_has_compatible_shallow_copy_type")
)  # fmt: skip
"""Operations that start nothing on a device (or, of scalars, that are told of elsewhere)."""
READS = frozenset(
    (
        "_local_scalar_dense",
        "nonzero",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "masked_select",
        "equal",
        "is_nonzero",
    )
)
"""Operations whose result the host must know before it can go on."""
PRODUCTS = frozenset(("mm", "bmm", "baddbmm"))
FUSED_PRODUCTS = frozenset(("triton first_kernel", "triton second_kernel"))
PICKS = frozenset(("index_select", "embedding", "gather", "index"))
"""Operations that read of their first tensor what they write, not all of it."""


@dataclass(kw_only=True, eq=False)
class Seen:
    """What was taken down; all counters are by phase first."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)
    syncs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(phase, what, line)."""
    host: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(phase, line) of operations on tensors of the host with more than 64 elements."""
    moved: Counter[str] = field(default_factory=Counter)
    moved_at: Counter[str] = field(default_factory=Counter)
    """The same by phase, operation and line in one."""
    flops: Counter[str] = field(default_factory=Counter)
    """Of products."""
    attention: Counter[str] = field(default_factory=Counter)
    """FLOPs of attention by the kernel that the card likes best, all scores counted."""
    flash: Counter[str] = field(default_factory=Counter)
    """The same of documents that are packed, which flash attention takes."""
    fused: Counter[str] = field(default_factory=Counter)
    """FLOPs of products that begin as their rows arrive, and send their results (`dispatch.overlap = "fused"`)."""
    exchanges: Counter[tuple[str, str, str, tuple[int, ...]]] = field(default_factory=Counter)
    """Bytes sent, by phase, content (`places.content_of`), operation and ranks of the communicator."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    now_bytes: int = 0
    peak_bytes: int = 0
    peak_at: str = ""
    peaks: dict[str, int] = field(default_factory=dict)
    """The same by phase."""
    live: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Bytes of each storage, and where it was made."""
    kept_bytes: int | None = None
    """Alive when the first backward pass began."""
    kept: Counter[str] = field(default_factory=Counter)
    """The same by line."""

    def sync(self, what: str) -> None:
        """The host waits for the device here."""
        stack = frames()
        self.syncs[phase_of(stack), what, line_of(stack)] += 1

    def launch(self, name: str, tensors: list[torch.Tensor]) -> None:
        """A kernel of our own with these arguments. One that computes products as rows come has rows, a matrix for each group and its result as its first tensors of floats."""
        stack = frames()
        phase = phase_of(stack)
        self._backward_begins(phase)
        self.launches[phase, name] += 1
        self.lines[phase, line_of(stack)] += 1
        if name in FUSED_PRODUCTS:
            rows, _, out = [x for x in tensors if x.is_floating_point()][:3]
            self.fused[phase] += 2 * out.numel() * rows.shape[1]
        else:
            self.move(phase, name, line_of(stack), sum(num_bytes(x) for x in tensors))

    def move(self, phase: str, name: str, line: str, size: int) -> None:
        """Bytes that an operation reads and writes."""
        self.moved[phase] += size
        self.moved_at[f"{phase} {name} {line}"] += size

    def _backward_begins(self, phase: str) -> None:
        if self.kept_bytes is None and phase == "backward":
            self.kept_bytes = self.now_bytes
            for size, line in self.live.values():
                self.kept[line] += size


class Witness(TorchDispatchMode):
    """Inside `FakeTensorMode`'s context: calls come here first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, name = func._schema.name.split("::")
        if space == "prim":
            return func(*args, **kwargs)
        stack = frames()
        phase = phase_of(stack)
        self.seen._backward_begins(phase)
        ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if space == "c10d" and name != "wait_tensor":
            self._call(name, args, ins, phase)
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in outs:
            if x.is_cuda:
                self._note(x, stack, phase)
        if space != "c10d":
            self._count(func, name, (args, kwargs, out), ins, outs, stack, phase)
        return out

    # ---- operations -----------------------------------------------------------------------------------------------------------

    def _count(
        self, func: Any, name: str, call: Any, ins: list[torch.Tensor], outs: list[torch.Tensor], stack: Any, phase: str
    ) -> None:
        seen, line = self.seen, line_of(stack)
        on_device = any(x.is_cuda for x in ins + outs)
        if name in ("copy_", "_to_copy") and self._crosses(name, call, ins, outs, line, phase):
            return
        if on_device and name in READS:
            seen.syncs[phase, name, line] += 1
        if not on_device:
            if any(x.numel() > 64 for x in outs) and not _is_view(func):
                seen.host[phase, line] += 1
            return
        if name in NO_LAUNCH or _is_view(func):
            return
        seen.launches[phase, name] += 1
        seen.lines[phase, line] += 1
        args, kwargs, out = call
        if name in ("_grouped_mm", "addmm", "addmm_"):  # of the latter two the first is what they add to
            seen.flops[phase] += _grouped_flops(*args[:2] if name == "_grouped_mm" else args[1:3])
        elif func.overloadpacket in flop_registry and (name in PRODUCTS or "attention" in name):
            packed = seen.flash if name.startswith("_flash") else seen.attention
            of = packed if "attention" in name else seen.flops
            of[phase] += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        else:
            seen.move(phase, name, line, _moved(name, ins, outs))

    def _crosses(
        self, name: str, call: Any, ins: list[torch.Tensor], outs: list[torch.Tensor], line: str, phase: str
    ) -> bool:
        """Whether it is a copy between host and device; one that blocks is a wait."""
        args, kwargs, _ = call
        source, target = (ins[-1], ins[0]) if name == "copy_" else (ins[0], outs[0])
        if source.is_cuda == target.is_cuda:
            return False
        is_late = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        if not is_late:
            self.seen.syncs[phase, f"copy {source.device.type} to {target.device.type}", line] += 1
        self.seen.launches[phase, "copy to device" if target.is_cuda else "copy to host"] += 1
        self.seen.lines[phase, line] += 1
        return True

    # ---- collectives ----------------------------------------------------------------------------------------------------------

    def _call(self, name: str, args: Any, ins: list[torch.Tensor], phase: str) -> None:
        """Posts of one communicator: its ranks and name, the operation, sizes and types of the tensors."""
        if not any(x.is_cuda for x in ins):
            return
        group = next(g for g in (_group(a) for a in args) if g is not None)
        numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        ranks = tuple(dist.get_process_group_ranks(group))
        entry: dict[str, Any] = {"on": [list(ranks), group.group_name], "op": name.rstrip("_"), "phase": phase}
        entry["sizes"] = [[x.numel(), str(x.dtype)] for x in ins]
        content = content_of(frames(), entry["op"])
        self.seen.exchanges[phase, content, entry["op"], ranks] += _sent(entry["op"], ins, len(ranks))
        if entry["op"] == "alltoall_base":
            entry["splits"] = [
                list(a) for a in args if isinstance(a, (list, tuple)) and all(isinstance(n, int) for n in a)
            ]
        if entry["op"] in ("send", "recv"):
            entry["peer"] = ranks[numbers[0]]
        self.seen.calls.append(entry)

    # ---- memory ---------------------------------------------------------------------------------------------------------------

    def _note(self, x: torch.Tensor, stack: Any, phase: str) -> None:
        storage = x.untyped_storage()
        key, seen = storage._cdata, self.seen
        if key in seen.live:
            return
        size = -(-storage.nbytes() // GRAIN) * GRAIN
        line = f"{phase} {line_of(stack)}"
        seen.live[key] = size, line
        seen.now_bytes += size
        seen.peaks[phase] = max(seen.peaks.get(phase, 0), seen.now_bytes)
        if seen.now_bytes > seen.peak_bytes:
            seen.peak_bytes, seen.peak_at = seen.now_bytes, line
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.seen.now_bytes -= self.seen.live.pop(key, (0, ""))[0]


def _grouped_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of rows (M, K) by one matrix (K, N) for each group, or of (K, M) by (M, N), summed over the rows of each group."""
    return 2 * a.numel() * b.shape[-1]


def _sent(op: str, ins: list[torch.Tensor], ranks: int) -> int:
    """Bytes that leave a rank: by a ring, or straight to each of the others, of which each gets as much."""
    if op in ("send", "recv"):
        return num_bytes(ins[0]) if op == "send" else 0
    whole = num_bytes(ins[-1]) if op == "alltoall_base" else max(map(num_bytes, ins))
    return (2 if op == "allreduce" else 1) * whole * (ranks - 1) // ranks


def num_bytes(x: torch.Tensor) -> int:
    """Bytes that reading all of it takes: an expanded one is read once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _moved(name: str, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> int:
    written = sum(num_bytes(x) for x in outs if x.is_cuda)
    read = [num_bytes(x) for x in ins if x.is_cuda]
    if name in PICKS and read:
        read[0] = min(read[0], written)
    return written + sum(read)


def _is_view(func: Any) -> bool:
    """Its results are the memory of its arguments, and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _group(value: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective stands for."""
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):  # another object: how to reduce
            return None
    return None
