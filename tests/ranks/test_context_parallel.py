"""Ranks that share sequences: attention in three ways, whole runs, messages, memory, and what a fault looks like."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_help import error, normal
from train_help import phalanx, train_args, write_text

from phalanx.core.errors import RunError
from phalanx.core.events import Collective
from phalanx.kernels.ops.attention import causal_attention
from phalanx.plan.attention.zigzag import make_layout
from phalanx.runtime.comm import context_parallel
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.context_parallel import ContextParallel
from phalanx.runtime.comm.exchange import Message
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx_lab.bench.context import Work, build, saved_bytes
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

METHODS = ("ring", "all_gather", "ulysses")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of one attention call over all ranks."""

    cp: int
    heads: int
    kv: int
    dim: int
    documents: tuple[tuple[int, ...], ...]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output, whole."""
        at = (len(self.documents), sum(self.documents[0]))
        return [normal(*at, n, self.dim, seed=i) for i, n in enumerate((self.heads, self.kv, self.kv, self.heads))]


SHAPES = {
    "two": Shape(2, 4, 2, 8, ((64,), (5, 1, 30, 28))),
    "three": Shape(3, 6, 3, 4, ((30,), (1,) * 30)),
    "four, one key head": Shape(4, 4, 1, 8, ((40, 24), (64,))),
    "four, tiles": Shape(4, 4, 2, 4, ((700, 1348),)),
}


def name_of(what: str) -> str:
    return f"mb0.L3.fwd.attention.{what}"


def cp_axis(rank: int, cache: GroupCache, size: int) -> Axis:
    ranks = tuple(range(size))
    return Axis("cp", ranks, rank, cache.get(ranks))


def attention_on(rank: int, cache: GroupCache, shape: Shape, **options: Any) -> dict[str, Any]:
    """This rank's output and gradients, in fp64 unless `dtype` says otherwise, and what was sent."""
    dtype, synchronous = options.pop("dtype", torch.float64), options.pop("synchronous", False)
    told: list[Collective] = []
    comms = Collectives(timeout_s=20, trace=True, synchronous=synchronous, emit=told.append)  # type: ignore[arg-type]
    how = ContextParallel(axis=cp_axis(rank, cache, shape.cp), comms=comms, **options)
    places = torch.from_numpy(make_layout("zigzag", seq_len=sum(shape.documents[0]), cp=shape.cp).positions(rank))
    q, k, v, d_out = (x[:, places].to(dtype) for x in shape.inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = how.attention(q, k, v, shape.documents, name=name_of)
    out.backward(d_out)
    sent = {op: (c.calls, c.sent_bytes) for (op, _), c in comms.counters.items()}
    tensors = [out.detach(), *(x.grad for x in leaves)]
    return {
        "places": places,
        "tensors": tensors,
        "sent": sent,
        "ids": [event.op_id for event in told if isinstance(event, Collective)],
    }


def put_together(found: list[dict[str, Any]], shape: Shape) -> list[torch.Tensor]:
    whole = [torch.empty(x.shape, dtype=found[0]["tensors"][0].dtype) for x in (shape.inputs[0], *shape.inputs[:3])]
    for part in found:
        for tensor, own in zip(whole, part["tensors"], strict=True):
            tensor[:, part["places"]] = own
    return whole


def alone(shape: Shape) -> list[torch.Tensor]:
    *qkv, d_out = shape.inputs
    leaves = [x.requires_grad_() for x in qkv]
    out = causal_attention(leaves[0], leaves[1], leaves[2], shape.documents, impl="reference")
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def worst(found: list[dict[str, Any]], shape: Shape) -> float:
    return max(error(a, b) for a, b in zip(put_together(found, shape), alone(shape), strict=True))


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_that_of_one_rank(name: str, method: str, impl: str) -> None:
    shape = SHAPES[name]
    run_all = [run_ranks(shape.cp, _attention, shape, {"method": method, "impl": impl})]
    if impl == "fast":
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            found = run_ranks(shape.cp, _attention, shape, {"method": method, "dtype": dtype})
            assert worst(found, shape) < limit, dtype
    assert worst(run_all[0], shape) < 1e-14


def _attention(rank: int, cache: GroupCache, shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    return attention_on(rank, cache, shape, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["two", "four, one key head"])
def test_bytes_are_those_of_the_formulas(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    cp, local = shape.cp, len(shape.documents) * sum(shape.documents[0]) // shape.cp
    keys = 2 * local * shape.kv * shape.dim * dtype.itemsize
    gradients = 2 * local * shape.kv * shape.dim * 4  # fp32, whatever the keys are
    copies = max(1, cp // shape.kv)
    swapped = local * shape.dim * (shape.heads + 2 * shape.kv * copies + shape.heads) * dtype.itemsize // cp
    want = {
        "ring": {"exchange": (cp - 1 + (2 if cp == 2 else cp + 1), (cp - 1) * (2 * keys + gradients))},
        "all_gather": {
            "all_gather_rows": (2, 2 * (cp - 1) * keys),
            "reduce_scatter_rows": (1, (cp - 1) * gradients),
        },
        "ulysses": {"all_to_all_rows": (4, 2 * (cp - 1) * swapped)},
    }
    for method in METHODS:
        for found in run_ranks(cp, _attention, shape, {"method": method, "dtype": dtype}):
            assert found["sent"] == want[method], method


def test_operations_have_ids() -> None:
    found = run_ranks(4, _attention, SHAPES["four, one key head"], {"method": "ring"})
    forward = [name_of(f"ring.{i}") for i in (1, 2, 3)]
    backward = [name_of(f"ring.{i}").replace("fwd", "bwd") for i in (1, 2, 3, 4, "home")]
    for rank in found:
        assert rank["ids"] == forward + backward
    (gathered, *_) = run_ranks(4, _attention, SHAPES["four, one key head"], {"method": "all_gather"})
    assert [i.split(".", 2)[2] for i in gathered["ids"]] == [
        "fwd.attention.keys", "bwd.attention.keys_again", "bwd.attention.keys",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waiting_changes_no_bit(dtype: torch.dtype) -> None:
    shape = SHAPES["four, tiles"]
    hidden, waiting, again = (
        run_ranks(4, _attention, shape, {"dtype": dtype, "synchronous": s}) for s in (False, True, False)
    )
    for a, b, c in zip(hidden, waiting, again, strict=True):
        for x, y, z in zip(a["tensors"], b["tensors"], c["tensors"], strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)


def test_one_rank_sends_nothing() -> None:
    comms, shape = Collectives(), SHAPES["two"]
    q, k, v, _ = shape.inputs
    for method in METHODS:
        how = ContextParallel(axis=Axis("cp", (0,), 0, None), comms=comms, method=method)
        out = how.attention(q, k, v, shape.documents, name=name_of)
        assert error(out, alone(shape)[0]) < 1e-14
    assert not comms.counters


# ---- faults: the whole model is held against one rank by `phalanx verify`, which plants others (`contiguous-positions`) ----


def wrong_sources(rank: int, cache: GroupCache, shape: Shape) -> dict[str, Any]:
    """The ring takes the keys that it holds for those of the rank after this one, not the one before."""
    right = context_parallel.ring_source
    context_parallel._ring_blocks.cache_clear()
    context_parallel.ring_source = lambda rank, step, *, cp: right(rank, -step, cp=cp)  # type: ignore[assignment]
    try:
        return attention_on(rank, cache, shape)
    finally:
        context_parallel.ring_source = right
        context_parallel._ring_blocks.cache_clear()


def lost_gradients(rank: int, cache: GroupCache, shape: Shape) -> dict[str, Any]:
    """Gradients of keys that other ranks computed do not come home: output and loss are right."""
    right = context_parallel._Hop.take

    def forget(self: Any, x: torch.Tensor, *, tag: int) -> torch.Tensor:
        coming = right(self, x, tag=tag)
        return torch.zeros_like(coming) if tag == context_parallel.GRADIENTS else coming

    context_parallel._Hop.take = forget  # type: ignore[method-assign]
    try:
        return attention_on(rank, cache, shape)
    finally:
        context_parallel._Hop.take = right  # type: ignore[method-assign]


@pytest.mark.core
@pytest.mark.parametrize("fault", [wrong_sources, lost_gradients])
def test_a_wrong_ring_is_caught(fault: Any) -> None:
    shape = SHAPES["three"]
    assert worst(run_ranks(3, fault, shape), shape) > 1e-3


# ---- messages -------------------------------------------------------------------------------------------------------------------


def exchanges(rank: int, cache: GroupCache) -> tuple[list[float], float, dict[Any, Any]]:
    """Two messages of one tag to the next rank, one of another tag before them; computing goes on while they travel."""
    axis, comms = cp_axis(rank, cache, 3), Collectives(timeout_s=20)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    sends = [Message(torch.full((4,), 10.0 * i + rank), after, tag) for i, tag in enumerate((5, 0, 0))]
    boxes = [torch.empty(4) for _ in range(3)]
    receives = [Message(box, before, tag) for box, tag in zip(boxes, (0, 0, 5), strict=True)]
    exchange = comms.start_exchange(sends, receives, axis, op_id="three")
    begin = time.monotonic()
    exchange.wait()
    exchange.wait()
    counts = {key: (c.calls, c.sent_bytes) for key, c in comms.counters.items()}
    return [float(box[0]) for box in boxes], time.monotonic() - begin, counts


def test_messages_arrive_by_tag_and_in_order() -> None:
    for rank, (got, _, counts) in enumerate(run_ranks(3, exchanges)):
        before = (rank - 1) % 3
        assert got == [10.0 + before, 20.0 + before, before]
        assert counts == {("exchange", "cp"): (1, 48)}


def unanswered(rank: int, cache: GroupCache) -> None:
    axis, comms = cp_axis(rank, cache, 2), Collectives(timeout_s=1.0)
    cache.get((0, 1))
    if rank == 0:
        comms.start_exchange([], [Message(torch.empty(3), 1)], axis, op_id="mb0.L1.fwd.attention.ring.1").wait()


def test_a_silent_peer_is_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, unanswered)
    (cause,) = caught.value.causes.values()
    assert isinstance(cause, RunError)
    text = str(cause)
    for words in ("exchange [mb0.L1.fwd.attention.ring.1]", "axis cp", "(0, 1)", "rank 0", "no answer within 1 s"):
        assert words in text, text


def test_nobody_to_exchange_with() -> None:
    comms, axis = Collectives(), Axis("cp", (0,), 0, None)
    comms.start_exchange([], [], axis).wait()
    with pytest.raises(ValueError, match="no peer to exchange with"):
        comms.start_exchange([Message(torch.zeros(1), 0)], [], axis)


# ---- memory, and a run ------------------------------------------------------------------------------------------------------------


def kept_on(rank: int, cache: GroupCache, work: Work) -> int:
    return saved_bytes(*build(work, rank, cache))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_falls_with_cp(method: Any) -> None:
    kept = []
    for cp in (1, 2, 4):
        work = Work(cp=cp, method=method, seq_len=1024, preset="tiny", documents=3, recompute="none")
        kept.append(max(run_ranks(cp, kept_on, work)))
    ratios = [b / a for a, b in itertools.pairwise(kept)]
    assert all(0.45 < ratio < 0.62 for ratio in ratios), (kept, ratios)


@pytest.mark.slow
def test_a_long_sequence_on_more_ranks_than_cores(tmp_path: Path) -> None:
    """The benchmark itself. Scores of the whole sequence would be 0.5 GB for each head."""
    file = tmp_path / "context.json"
    words = ("--degrees", "2", "4", "--seq-len", "4096", "--documents", "3", "--long", "16384", "--json", str(file))
    done = phalanx("bench", "context", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert [(r["cp"], r["seq_len"]) for r in told["runs"]] == [(2, 4096), (4, 4096)] and told["falls"]
    assert told["long"]["finite"] and told["long"]["cp"] == 4 and told["long"]["peak_bytes"] < 400e6


@pytest.mark.slow
def test_the_benchmark_refuses_what_cannot_be_shared() -> None:
    done = phalanx("bench", "context", "--degrees", "8", "--seq-len", "100", "--methods", "ulysses")
    assert done.returncode == 2
    assert "zigzag" in done.stderr and "query heads" in done.stderr and "nearest legal: cp" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_the_losses_of_one_rank(method: str, tmp_path: Path) -> None:
    """Started as a user starts it: text, trainer, validation; packed documents."""
    write_text(tmp_path / "text")
    shape = {"train__steps": 3, "train__seq_len": 256, "train__global_batch": 2, "train__micro_batch": 1}
    kind = {"train__dtype": "float64", "train__recompute": "selective"}
    one = phalanx("train", *train_args(tmp_path, run__name="one", launch__ranks=1, **shape, **kind))
    assert one.returncode == 0, one.stderr
    grid = {"folding__cp": 2, "launch__ranks": 2} | ({"folding__cp_method": method} if method != "ring" else {})
    many = phalanx("train", *train_args(tmp_path, run__name="many", **grid, **shape, **kind))
    assert many.returncode == 0, many.stderr
    losses = [_losses(tmp_path / "runs" / name) for name in ("one", "many")]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-12)


def _losses(folder: Path) -> list[float]:
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "StepEnded"]
