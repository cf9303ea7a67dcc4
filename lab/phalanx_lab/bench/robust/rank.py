"""One rank of `phalanx bench robust`: an overlapped MoE layer, forward and backward, until something fails or the iterations are done.

Passes take turns: tile by tile, in chunks, one after the other. Every pass has another number of tokens (none, too) and another routing, from even to
all tokens to the same experts. After each pass all ranks add up one number, as a step does before it is committed, so that also a rank which
exchanges no rows with a lost one learns of it.

Legend: T tokens of a rank, K experts of a token, H hidden, E experts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from phalanx.core.errors import RunError
from phalanx.core.files import private_folder
from phalanx.core.process import resident_bytes
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.lost import LostPeers
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from phalanx.runtime.moe.routed import routed_experts
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.runtime.processes.world import WorldInfo, init_world
from phalanx_lab.bench.cluster import TrainingCluster

METHODS = ("fine", "coarse:2", "serial")
TIMEOUT_S = 120.0
"""Timeout of a collective: far more than a lost rank may cost, so that nothing is found by waiting for its end."""
LINGER_S = 0.1
"""How long a rank that has raised lives on: what still arrives for it must not end it otherwise."""
RAISED = 2
"""Exit code of a rank that has told its error."""


@dataclass(frozen=True, kw_only=True)
class RobustShape:
    """One layer and what each rank gives it at most."""

    tokens: int
    hidden: int
    ffn: int
    experts: int = 12
    top_k: int = 3


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory of a rank after so many passes."""

    iteration: int
    resident_bytes: int
    in_use_bytes: int
    """Bytes in use of the C library's heaps: what somebody holds, without what is free inside them. 0 where the library does not
    say."""
    objects: int
    """Python's that have come since the first pass, as far as the collector knows them."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """How a rank ended."""

    at_s: float
    """Moment on `time.monotonic`, which processes of a machine share."""
    error: str
    """Type of the error."""
    text: str
    clear: bool
    """An error of ours that names an axis and ranks."""
    method: str
    """What was running."""


class RobustLayer:
    """The layer on this rank, by every method."""

    def __init__(self, info: WorldInfo, folding: Folding, shape: RobustShape, *, lost: LostPeers | None = None) -> None:
        torch.set_num_threads(1)
        keep_freed_memory(threads=1)
        init_world(info, timeout_s=TIMEOUT_S)
        groups = build_groups(folding, rank=info.rank, cache=GroupCache(timeout_s=TIMEOUT_S))
        self.comms, self.world = Collectives(timeout_s=TIMEOUT_S, lost=lost), groups.axis("world")
        self.rank, self.shape, self.method = info.rank, shape, ""
        self.routed = {
            method: routed_experts(
                Dispatcher(
                    DispatchSpec(overlap=method),
                    placement=plain_placement(shape.experts, folding),
                    groups=groups,
                    comms=self.comms,
                    top_k=shape.top_k,
                )
            )
            for method in METHODS
        }
        draw = torch.Generator().manual_seed(1 + info.rank)
        slots, width = shape.experts // folding.ep, shape.ffn // folding.etp
        self.held = ExpertWeights(
            (torch.randn(slots, 2, width, shape.hidden, generator=draw) / shape.hidden**0.5).requires_grad_(),
            (torch.randn(slots, shape.hidden, width, generator=draw) / width**0.5).requires_grad_(),
        )

    def run(self, number: int, method: str = "") -> list[torch.Tensor]:
        """Pass `number`, forward and backward, by the method whose turn it is or the one given: output, and gradients of tokens and weights."""
        self.method = method or METHODS[number % len(METHODS)]
        shape, draw = self.shape, torch.Generator().manual_seed(1000 * number + self.rank)
        tokens = shape.tokens * int(torch.randint(0, 5, (), generator=draw)) // 4
        skew = float(torch.randint(0, 3, (), generator=draw))
        scores = torch.rand(tokens, shape.experts, generator=draw) + skew * torch.linspace(1, 0, shape.experts)
        weights_TK, experts_TK = scores.topk(shape.top_k)
        x_TH = torch.randn(tokens, shape.hidden, generator=draw).requires_grad_()
        call = MoeCall(
            x_TH=x_TH,
            weights_TK=weights_TK.requires_grad_(),
            experts_TK=experts_TK,
            experts=self.held,
            op_prefix="mb0.L0.fwd.",
        )
        y_TH, _ = self.routed[self.method](call)
        y_TH.backward(torch.ones_like(y_TH))
        self.comms.all_reduce(torch.ones(1), self.world, op_id="vote")
        of_weights = (self.held.w13_e2fH, self.held.w2_eHf)
        found = [y_TH.detach(), *(t.grad for t in (x_TH, weights_TK, *of_weights) if t.grad is not None)]
        for tensor in of_weights:
            tensor.grad = None
        return found

    def differs(self, number: int) -> str:
        """Which method finds something else than the serial one in pass `number`, beyond rounding; empty if none does."""
        wanted = self.run(number, "serial")
        for method in METHODS[:-1]:
            got = self.run(number, method)
            pairs = zip(got, wanted, strict=True)
            if not all(float((a - b).abs().max()) <= 1e-4 * float(b.abs().max()) for a, b in pairs if b.numel()):
                return f"pass {number} of rank {self.rank}: {method} differs from serial"
        return ""


# ---- bodies ------------------------------------------------------------------------------------------------------------------


def run_until_lost(end: Connection, info: WorldInfo, *, folding: Folding, shape: RobustShape) -> None:
    """Pass after pass. Tells when all methods have had a turn, then how it ended; lives on a little, and ends."""
    layer: RobustLayer | None = None

    once = threading.Lock()

    def tell(err: BaseException) -> None:
        if once.acquire(blocking=False):
            end.send(_raised(err, "" if layer is None else layer.method))

    def leave() -> None:
        time.sleep(LINGER_S)
        os._exit(RAISED)

    try:
        layer, number = RobustLayer(info, folding, shape, lost=LostPeers(tell, end=lambda _: leave())), 0
        while True:
            layer.run(number)
            number += 1
            if number == len(METHODS):
                end.send("running")
    except Exception as err:
        tell(err)
    layer = None
    gc.collect()  # buffers whose messages are still on their way are free from here on
    leave()


def _raised(err: BaseException, method: str) -> Raised:
    text = str(err)
    clear = isinstance(err, RunError) and "axis" in text and "rank" in text
    return Raised(at_s=time.monotonic(), error=type(err).__name__, text=text, clear=clear, method=method)


def run_for_long(
    end: Connection,
    info: WorldInfo,
    *,
    folding: Folding,
    shape: RobustShape,
    iterations: int,
    every: int,
    compare_every: int,
) -> None:
    """`iterations` passes; tells samples of memory, and where methods differed."""
    try:
        layer = RobustLayer(info, folding, shape)
        fill_buffers(shape, most_rows=folding.world * shape.tokens)
        samples, wrong = [], []
        layer.run(0)
        gc.freeze()  # what is there now is neither looked through nor counted
        for number in range(1, iterations + 1):
            layer.run(number)
            if number % compare_every == 0:
                wrong += [text for text in [layer.differs(number)] if text]
            if number % every == 0:
                samples.append(take_sample(number))
        end.send((samples, wrong))
    except Exception as err:
        end.send(_raised(err, ""))
    end.recv()  # the others may still need this rank
    os._exit(0)


def fill_buffers(shape: RobustShape, *, most_rows: int) -> None:
    """Have the products of this thread done once for every number of rows that a slot may have, the most first.

    MKL keeps a buffer of 4.3 MB for each thread's products of fewer than 128 rows, and where one asks for more than the buffers that it has hold, one more,
    until there are five; it gives none back. Which pass asks first is up to the routing: without this, memory grew by one buffer on one rank at pass 2,100.
    """
    w13_FH, w2_Hf = torch.zeros(2 * shape.ffn, shape.hidden), torch.zeros(shape.hidden, shape.ffn)
    for rows in range(most_rows, 0, -1):
        x_rH, h_rf, d_rF = torch.zeros(rows, shape.hidden), torch.zeros(rows, shape.ffn), torch.zeros(rows, 2 * shape.ffn)  # fmt: skip
        pairs = ((x_rH, w13_FH.T), (h_rf, w2_Hf.T), (x_rH, w2_Hf), (d_rF, w13_FH), (x_rH.T, h_rf), (d_rF.T, x_rH))
        for left, right in pairs:
            torch.mm(left, right)


def take_sample(iteration: int) -> MemorySample:
    gc.collect()
    return MemorySample(
        iteration=iteration,
        resident_bytes=resident_bytes(),
        in_use_bytes=heap_in_use(),
        objects=len(gc.get_objects()),
    )


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]  # fmt: skip  # noqa: SIM905


def heap_in_use() -> int:
    """Bytes that are allocated from the C library, of all its heaps and mappings; 0 where it does not say (mallinfo2(3), glibc 2.33)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


# ---- forked ranks ------------------------------------------------------------------------------------------------------------


Body = Callable[[Connection, WorldInfo], None]


@dataclass(frozen=True)
class ForkedRanks:
    """Each is a host of `cluster`, by its number, and told through its end of a pipe."""

    cluster: TrainingCluster
    ends: list[Connection]


@contextlib.contextmanager
def forked(world: int, body: Body) -> Iterator[ForkedRanks]:
    """`world` ranks that run `body(end, info)`; whatever of them still runs at the end of the block is killed."""
    ranks = ForkedRanks(TrainingCluster(), [])
    with ranks.cluster, contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=private_folder())))
        for rank in range(world):
            info = WorldInfo(rank=rank, world=world, local_rank=rank, local_world=world, meeting=folder / "meeting")
            mine, theirs = Pipe()
            ranks.cluster.start(str(rank), partial(body, theirs, info))
            theirs.close()
            ranks.ends.append(ends.enter_context(mine))
        yield ranks
