"""What stands in for a device's Python side in a trace: streams, events, attention, the norm, kernels of Triton, and what the host reads.

All of it is put in place for the life of the process that traces (`child.py`); nothing of it is in the product.

A value that the host reads is a wait, which is taken down; what it reads is *planted*, because tensors hold nothing: counts of rows as a router makes them that
loads all experts alike, sizes that follow from them, and ones and zeros for figures.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.core.samples import owned
from phalanx.simulate.hardware import distinct
from phalanx_lab.bench.trace.places import PASSES, frames, local, phase_of
from phalanx_lab.bench.trace.watch import Seen


@dataclass(frozen=True, kw_only=True)
class World:
    """What a trace knows of other ranks: which of their micro-batches are empty, by the rule of the loader, and how many tokens the others have."""

    samples: int
    """Micro-batches of the step, over all ranks."""
    replicas: int
    replica_of: Callable[[int], int]
    tokens: int
    """Tokens of a rank between the layers, in a micro-batch that is not empty."""

    def is_empty(self, rank: int, microbatch: int) -> bool:
        """Whether a rank's micro-batch number so much has no sample."""
        own = owned(self.samples, owners=self.replicas, owner=self.replica_of(rank))
        return microbatch >= len(own)


class _Stream:
    device_index, stream_id, cuda_stream = 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _Properties:
    multi_processor_count, major, minor, name = 132, 9, 0, "NVIDIA H100 80GB HBM3"
    total_memory = 80 * 2**30


class _Norm(torch.autograd.Function):
    """torch's fused norm: fake tensors would take it apart into its elementwise operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_H: torch.Tensor, seen: Seen) -> torch.Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, w_H, scale)
        ctx.seen, out = seen, torch.empty_like(x)
        seen.launch("_fused_rms_norm", [x, w_H, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_H, _ = ctx.saved_tensors
        dx, dw_H = torch.empty_like(x), torch.empty_like(w_H)
        ctx.seen.launch("_fused_rms_norm_backward", [x, w_H, grad, dx])
        ctx.seen.launch("_fused_rms_norm_backward_weight", [dw_H])
        return dx, dw_H, None


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **_: Any) -> torch.Tensor:
    """The kernel that a device takes for bf16: on fake tensors torch takes plain products."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 256:
        raise TypeError(f"flash attention takes no {q.dtype} of head size {q.shape[-1]}")
    if q.shape[-1] != v.shape[-1]:
        wide: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]
        return wide
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return out


def stand_in(current: Callable[[], tuple[Seen, World]]) -> None:
    """Put all of it in place; `current` gives what is taken down at the time."""

    def synchronize(device: Any = None) -> None:
        current()[0].sync("synchronize")

    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.synchronize = _Stream, _Event, synchronize
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_device = lambda device: None
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: _Properties()
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.mem_get_info = lambda *_: (_Properties.total_memory, _Properties.total_memory)
    _stand_in_for_batches(current)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    functional: Any = F
    functional.scaled_dot_product_attention = _attention
    backends: Any = torch.backends.cuda
    backends.SDPAParams = lambda *tensors: tensors[0].shape[-1]
    backends.can_use_cudnn_attention = lambda width, debug: width <= 192
    functional.rms_norm = lambda x, shape, w_H, eps: _Norm.apply(x, w_H, current()[0])
    _stand_in_for_reads(current)
    _stand_in_for_triton(current)
    _stand_in_for_shared_memory()
    sys.modules["deep_ep"] = _deepep(current)


def _stand_in_for_batches(current: Callable[[], tuple[Seen, World]]) -> None:
    """Messages of one batch have one number, for `order.py`."""
    distributed: Any = dist
    distributed.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    post = distributed.batch_isend_irecv

    def batch(ops: Any) -> Any:
        seen = current()[0]
        first = len(seen.calls)
        works = post(ops)
        for call in seen.calls[first:]:
            call["batch"] = first
        return works

    distributed.batch_isend_irecv = batch


def _stand_in_for_reads(current: Callable[[], tuple[Seen, World]]) -> None:
    fake: Any = FakeTensor

    def read(self: torch.Tensor, what: str, plain: Any) -> Any:
        if self.is_cuda:
            current()[0].sync(what)
        planted = _planted(self, current()[1])
        return plain if planted is None else planted

    def array(self: torch.Tensor, *_: Any, **__: Any) -> np.ndarray:
        kind = str(self.dtype).removeprefix("torch.").replace("bfloat16", "float32")
        plain = np.ones(tuple(self.shape), dtype=kind)
        return np.asarray(read(self, "numpy", plain))

    fake.numpy = array
    fake.tolist = lambda self: np.asarray(read(self, "tolist", np.zeros(tuple(self.shape)))).tolist()
    fake.item = lambda self: read(self, "item", 1)
    fake.__float__ = lambda self: float(read(self, "float", 1.0))
    fake.__int__ = fake.__index__ = lambda self: int(read(self, "int", 1))
    fake.__bool__ = lambda self: bool(read(self, "bool", True))
    fake.data_ptr = lambda self: 0


def _planted(x: torch.Tensor, world: World) -> Any:
    """What the host reads where it decides about sizes; None elsewhere."""
    stack = frames()
    if not stack:
        return None
    caller = stack[0].f_code.co_name
    if caller == "counts_on_host":
        return _counts(x, world, stack)
    if caller == "_compare":  # all members have made the same plan
        return [local(stack, "runtime/reshard/resharder.py", caller, "mine")] * len(x)
    if caller == "entries_of_all":  # an entry for each row
        lists: Any = local(stack, "runtime/moe/overlap_lists.py", caller, "lists")
        return [n for _, rows_to, _ in lists for n in (*rows_to, *rows_to)]
    return None


def _counts(x: torch.Tensor, world: World, stack: Any) -> np.ndarray:
    """Rows of each source for each expert: alike for all experts, none of a source whose micro-batch is empty.

    `x` has a row for each source: counts of E experts for each chunk, and what else a source tells, which are numbers of tokens."""
    dispatcher: Any = next(
        frame.f_locals.get("self") or frame.f_locals["dispatcher"]
        for frame in stack
        if frame.f_code.co_name in ("finish_list", "_gather")
    )
    experts, axis = dispatcher.num_experts, dispatcher.ep_etp
    table = np.zeros((axis.size, x.numel() // axis.size), dtype=np.int64)
    chunks = table.shape[1] // experts if stack[1].f_code.co_name == "_gather" else 1
    microbatch = _microbatch(stack)
    for row, rank in zip(table, axis.ranks, strict=True):
        if world.is_empty(rank, microbatch):
            continue
        for chunk in range(chunks):
            pairs = (world.tokens // chunks + (chunk < world.tokens % chunks)) * dispatcher.top_k
            share, rest = divmod(pairs, experts)
            row[chunk * experts : (chunk + 1) * experts] = share + (np.arange(experts) < rest)
        row[chunks * experts :] = _tokens_told(
            row[: chunks * experts], len(row) - chunks * experts, ep=dispatcher.ep.size, tokens=world.tokens
        )
    return table.reshape(tuple(x.shape))


def _tokens_told(counts: np.ndarray, num: int, *, ep: int, tokens: int) -> np.ndarray:
    """Tokens of a source (one number), or those that go to each rank of ep and then to each host: each of its rows to a rank is another token's."""
    if num <= 1:
        return np.full(num, tokens)
    to_rank = np.minimum(counts.reshape(ep, -1).sum(1), tokens)
    return np.concatenate([to_rank, np.full(num - ep, min(tokens, int(counts.sum())))])


def _microbatch(stack: Any) -> int:
    for function in PASSES:
        found: Any = local(stack, "train/step/passes.py", function, "microbatch")
        if found is not None:
            return int(found)
    return 0


def _stand_in_for_triton(current: Callable[[], tuple[Seen, World]]) -> None:
    """A kernel of Triton is one launch."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # an extra
        return

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = {id(x): x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        tensors = list(given.values())  # one that stands in for another that is not there is read once
        tensors += args[: UPDATED.get(self.fn.__name__, 0)]
        seen, world = current()
        seen.launch(f"triton {self.fn.__name__}", tensors)
        if self.fn.__name__ in SENDING:
            _store_rows(seen, world)

    kernel: Any = JITFunction
    kernel.run = run


UPDATED = {"adamw": 3}
"""Program -> how many of its first tensors it reads and writes."""
SENDING = ("send_kernel", "second_kernel")
"""Programs that store rows in the memory of other ranks."""


def _store_rows(seen: Seen, world: World) -> None:
    """A token goes once to each rank that has an expert of its: to so many, where all experts are chosen alike."""
    stack = frames()
    call: Any = next(frame.f_locals["call"] for frame in stack if "call" in frame.f_locals)
    ranks, top_k = call.axis.ranks, call.told.slots_PCK.shape[2]
    copies = world.tokens * distinct(len(ranks), top_k, len(ranks) * call.shape.slots_per_rank)
    size = round(copies * (1 - 1 / len(ranks)) * call.arena.spec.columns * call.arena.spec.dtype.itemsize)
    seen.exchanges[phase_of(stack), "rows", "alltoall_base", ranks] += size


class _Shared:
    """Memory that a group's devices share: this rank's is all that there is."""

    def __init__(self, own: torch.Tensor, group: Any) -> None:
        self.own, self.rank, self.world_size = own, dist.get_rank(group), dist.get_world_size(group)

    def get_buffer(self, rank: int, *_: Any) -> torch.Tensor:
        return self.own

    def barrier(self) -> None:
        pass


def _stand_in_for_shared_memory() -> None:
    shared: Any = symmetric
    shared.empty, shared.rendezvous = torch.empty, _Shared


class _Room:
    """Bytes of a buffer of DeepEP, which lie outside torch's allocator."""

    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        return 1

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def _deepep(current: Callable[[], tuple[Seen, World]]) -> ModuleType:
    """DeepEP as far as tensors and waits go: every row that comes is another token's, as far as there are as many."""

    class Buffer:
        def __init__(self, *_: Any, comm: Any, **__: Any) -> None:
            self.comm, self.size = comm, comm.Get_size()

        get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _Room())

        def get_dispatch_layout(self, choices_TK: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
            to_rank_P = choices_TK.new_empty(self.size, dtype=torch.int32)
            to_expert_E = choices_TK.new_empty(num_experts, dtype=torch.int32)
            is_in_TP = choices_TK.new_empty((len(choices_TK), self.size), dtype=torch.bool)
            current()[0].launch("deepep layout", [choices_TK, is_in_TP])
            return to_rank_P, None, to_expert_E, is_in_TP, None

        def dispatch(self, x_TH: torch.Tensor, handle: Any = None, **told: Any) -> tuple[Any, ...]:
            seen, world = current()
            if handle is not None:
                x_NH = x_TH.new_empty((len(handle[0]), x_TH.shape[1]))
                seen.launch("deepep dispatch", [x_TH, x_NH])
                return x_NH, None, None, None, None, None
            choices_TK, held = told["topk_idx"], len(told["num_tokens_per_expert"]) // self.size
            tokens, counts = _coming(world, self.size, choices_TK.shape[1], held)
            x_NH, choices_NK = (x.new_empty((tokens, x.shape[1])) for x in (x_TH, choices_TK))
            weights_NK = told["topk_weights"].new_empty(choices_NK.shape)
            source_N = choices_TK.new_empty(tokens, dtype=torch.int32)
            head_TP = choices_TK.new_empty((len(x_TH), self.size), dtype=torch.int32)
            seen.sync("DeepEP's wait")
            seen.launch("deepep notify", [source_N])
            seen.launch("deepep dispatch", [x_TH, x_NH, choices_NK, weights_NK])
            return x_NH, choices_NK, weights_NK, counts, (source_N, head_TP, told["is_token_in_rank"]), None

        def combine(self, x_NH: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
            x_TH = x_NH.new_empty((len(handle[1]), x_NH.shape[1]))
            weights = None if topk_weights is None else topk_weights.new_empty((len(x_TH), topk_weights.shape[1]))
            current()[0].launch("deepep combine", [x_NH, x_TH])
            return x_TH, weights, None

    module: Any = ModuleType("deep_ep")
    module.Buffer = Buffer
    return module


def _coming(world: World, ranks: int, top_k: int, held: int) -> tuple[int, list[int]]:
    """Tokens that come to a rank, and rows of each of its experts, where all experts get alike; none from a rank whose micro-batch is empty."""
    microbatch = _microbatch(frames())
    sources = sum(not world.is_empty(rank, microbatch) for rank in range(ranks))
    rows = sources * world.tokens * top_k // ranks
    share, rest = divmod(rows, held)
    return min(rows, sources * world.tokens), [share + (i < rest) for i in range(held)]
