"""Kernels that wait on flags, under Triton's interpreter, against their plain versions; and compiled ahead of time for Hopper.

The interpreter runs the programs of a launch one after the other, so a program can only wait for what an earlier one, an earlier launch or another thread did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiers import some

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from fused_help import SHAPE, TILE, TOLERANCE, Case, Layer, error, layer, poisoned

from phalanx.core.errors import PlanError, RunError
from phalanx.kernels.triton.first_product import Arrivals, fused_first
from phalanx.kernels.triton.layer import begin, compute, finish, route, send
from phalanx.kernels.triton.second_product import Division
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory, symmetric_arena
from phalanx.kernels.triton.tiles import TileShape, check_status, is_interpreted, product_problems
from phalanx_lab.bench.layer.virtual import tell_virtual, virtual_arenas

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")


def assert_right(made: Layer, out: list[torch.Tensor]) -> None:
    for rank, (got, want) in enumerate(zip(out, made.want(), strict=True)):
        assert error(got, want) <= TOLERANCE[made.case.dtype], f"rank {rank}"


# ---- whole layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype=torch.bfloat16),
        Case(top_k=1, slots=1),
        Case(top_k=3, ranks=3, tokens=13),
        Case(top_k=4, dtype=torch.bfloat16, tokens=17),
        Case(routing="one", ranks=3, tokens=11),
        Case(routing="drops", dtype=torch.bfloat16),
        Case(ranks=1, slots=4, hidden=32, ffn=32, tokens=33),
        Case(slots=5, tokens=3),
    ],
    ids=lambda c: f"{c.ranks}x{c.slots}-k{c.top_k}-{c.routing}-{str(c.dtype)[6:]}-t{c.tokens}",
)
def test_a_layer_equals_one_rank(case: Case) -> None:
    """Empty slots, all tokens on one expert, drops, rows that fill no tile, widths that fill none either."""
    made = layer(case)
    assert_right(made, made.run())


def test_the_plain_versions_agree() -> None:
    made = layer(Case(ranks=3, routing="drops"))
    assert_right(made, made.run(replace(SHAPE, impl="reference")))


BITS = Case(dtype=torch.bfloat16, tokens=29)


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    return layer(BITS).run()


@pytest.mark.parametrize(
    ("shape", "parts", "blocks"),
    some(
        [
            (replace(SHAPE, first_programs=5, send_programs=1), 5, 2),
            (replace(SHAPE, division=Division(programs=1, senders=0)), 2, 1),
            (replace(SHAPE, division=Division(programs=5, senders=3, help=False)), 3, 2),
            (replace(SHAPE, first=replace(TILE, row_tiles=1), second=replace(TILE, row_tiles=1)), 2, 2),
        ],
        2,
    ),
)
def test_no_division_or_order_changes_a_bit(
    undisturbed: list[torch.Tensor], shape: object, parts: int, blocks: int
) -> None:
    made = layer(BITS)
    for a, b in zip(undisturbed, made.run(shape, spec=made.spec(parts=parts, blocks=blocks)), strict=True):
        assert torch.equal(a, b)


def test_calls_need_no_reset() -> None:
    """Three batches through the same memory: flags only grow, and what an earlier call left behind is never taken for new."""
    arenas = poisoned(virtual_arenas(layer(Case()).spec()))
    for call in range(1, 4):
        made = layer(Case(seed=call, routing="one" if call == 2 else "random"))
        assert_right(made, made.run(arenas=arenas))
        for arena in arenas:
            poisoned([arena])
            assert set(arena.arrived_F.tolist()) == set(arena.done_F.tolist()) == {call}


def test_what_finds_no_room_is_an_error() -> None:
    made = layer(Case(routing="one"))
    with pytest.raises(RunError, match="entries or rows found no room: raise the capacity"):
        made.run(spec=replace(made.spec(), capacity=12))


# ---- waiting -------------------------------------------------------------------------------------------------------------


class Receiver:
    """Rank 0 of a layer, everything sent but not yet put in place."""

    def __init__(self, made: Layer) -> None:
        self.made, spec = made, made.spec()
        self.arenas = poisoned(virtual_arenas(spec))
        shape = replace(SHAPE, slots_per_rank=made.case.slots)
        self.indices = [route(s, shape=shape, spec=spec) for s in made.slots]
        self.told = tell_virtual(self.indices, made.weights)
        self.order = begin(self.told[0], self.arenas[0], shape=shape)
        for arena in self.arenas:
            arena.next_call()

    def arrive(self, stage: int, part: int) -> None:
        """One part comes, by copy engine."""
        spec = self.made.spec()
        sender = self.arenas[stage % spec.ranks]
        packed = self.made.x[sender.rank][self.indices[sender.rank].token_of_entry_PC.clamp(min=0).long()]
        sender.copy_part(packed, stage, part)

    def first(self, *, wait: bool = True, patience: int = 3) -> torch.Tensor:
        arena, case = self.arenas[0], self.made.case
        out = torch.full((self.order.entry_of_row_M.shape[0], 2 * case.ffn), torch.nan)
        weights = self.made.w13[: case.slots].flatten(1, 2)
        return fused_first(
            arena.received_PCH.flatten(0, 1), weights, self.order, Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2),
            programs=2, tile=TILE, out_MN=out, wait=wait, patience=patience,
        )  # fmt: skip

    def rows(self, out: torch.Tensor, *, upto: int) -> torch.Tensor:
        """Rows of the problems that need no more than the first `upto` flags."""
        problems = self.order.problems_J4[: int(self.order.num_problems)].tolist()
        return torch.cat([out[first : first + rows] for _, first, rows, needed in problems if needed <= upto])


def test_problems_are_computed_as_their_flags_are_there_and_a_missing_flag_is_reported() -> None:
    receiver = Receiver(layer(Case(tokens=60, slots=1, top_k=1)))
    for part in range(2):
        receiver.arrive(0, part)
    out = receiver.first()
    assert 0 < len(receiver.rows(out, upto=3)) < int(receiver.order.num_rows)
    receiver.arrive(1, 0)
    assert receiver.rows(receiver.first(), upto=3).isfinite().all()
    with pytest.raises(RunError, match="flag 3 was not raised in time"):
        check_status(receiver.arenas[0].status_2)


def test_a_rank_leaves_a_product_only_when_every_flag_is_up() -> None:
    """Not one flag less, though it needs no row of the last source: who raised none may still read what the next call writes."""
    made = layer(Case(top_k=1))
    for slots in made.slots:
        slots.fill_(3)
    receiver = Receiver(made)
    arena = receiver.arenas[0]
    arena.arrived_F[:-1] = int(arena.epoch_1)
    receiver.first()
    assert arena.status_2[0] == len(arena.arrived_F)


def test_a_rank_without_tokens_leaves_only_when_every_block_is_there() -> None:
    made = layer(Case())
    for slots in made.slots:
        slots.fill_(-1)
    receiver = Receiver(made)
    arena, to = receiver.arenas[0], receiver.indices[0]
    arena.done_F[:-1] = int(arena.epoch_1)
    finish(replace(to, entry_of_token_TP=to.entry_of_token_TP[:0]), arena, shape=SHAPE)
    assert arena.status_2[0] == len(arena.done_F)


def test_each_block_is_waited_for_before_it_is_added_up() -> None:
    """One program alone: another one's wait at its end would hide it."""
    receiver = Receiver(layer(Case()))
    arena, spec, sums = receiver.arenas[0], receiver.made.spec(), []
    arena.returned_PCH.fill_(torch.nan)
    shape = replace(SHAPE, send_programs=1, patience=10**9)
    adds = threading.Thread(target=lambda: sums.append(finish(receiver.indices[0], arena, shape=shape)))
    adds.start()
    for block in range(spec.blocks):
        time.sleep(0.3 + 2 * block)  # a block is added up in less
        arena.returned_PCH[:, :, block * spec.block_columns : (block + 1) * spec.block_columns] = 1.0
        arena.done_F.view(spec.ranks, spec.blocks)[:, block] = int(arena.epoch_1)
    adds.join()
    assert sums[0].isfinite().all()


GUARDED = """
import ctypes, math, mmap, torch
from fused_help import TILE, Case, layer
from test_fused_kernels import Receiver
from phalanx.kernels.triton.first_product import Arrivals, fused_first

def at_the_end_of_a_page(x):
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(begin + room), page, 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=room - size).view(x.shape).copy_(x)

made = layer(Case(ffn=20, hidden=40))
receiver = Receiver(made)
arena, weights = receiver.arenas[0], made.w13[: made.case.slots].flatten(1, 2).contiguous()
assert weights.shape[1] % TILE.columns
found = [
    fused_first(
        arena.received_PCH.flatten(0, 1).fill_(0.5), w, receiver.order, Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2),
        programs=1, tile=TILE, out_MN=torch.zeros(receiver.order.entry_of_row_M.shape[0], weights.shape[1]), wait=False,
    )
    for w in (weights, at_the_end_of_a_page(weights), at_the_end_of_a_page(weights.mT.contiguous()).mT)
]
assert all(torch.equal(found[0], other) for other in found[1:]) and found[0].abs().sum() > 0
"""


def test_no_weight_is_read_beyond_the_last_one() -> None:
    """Which lie at the end of a page before one that may not be read: a GPU would stop, or not."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", GUARDED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_flag_of_the_last_call_does_not_count() -> None:
    receiver = Receiver(layer(Case()))
    receiver.arenas[0].arrived_F.fill_(int(receiver.arenas[0].epoch_1) - 1)
    receiver.first()
    with pytest.raises(RunError, match="was not raised in time"):
        check_status(receiver.arenas[0].status_2)


def test_the_kernel_leaves_only_when_every_source_has_begun() -> None:
    """Nobody sends rank 0 a row, and still it waits for all flags: buffers need no barrier for that reason."""
    made = layer(Case(top_k=1))
    for slots in made.slots:
        slots.fill_(3)
    receiver = Receiver(made)
    assert int(receiver.order.num_problems) == 0
    receiver.first()
    assert receiver.arenas[0].status_2[0] > 0


@pytest.mark.parametrize("wait", [True, False])
def test_rows_that_come_while_the_kernel_runs(wait: bool) -> None:
    """Parts come from another thread, long after the launch. A kernel that does not wait takes what is not there yet."""
    receiver = Receiver(layer(Case(ranks=2, tokens=24)))
    begun, result = threading.Event(), []

    def run() -> None:
        begun.set()
        result.append(receiver.first(wait=wait, patience=10**9))

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    for stage in range(2):
        for part in range(2):
            time.sleep(0.2)
            receiver.arrive(stage, part)
    thread.join()
    rows = receiver.rows(result[0], upto=4)
    assert len(rows) == int(receiver.order.num_rows)
    assert bool(rows.isfinite().all()) is wait
    assert receiver.arenas[0].status_2.tolist() == [0, 0]
    if wait:
        want = receiver.first(wait=False)
        assert torch.equal(rows, receiver.rows(want, upto=4))


def test_a_block_is_not_sent_before_it_is_computed() -> None:
    """Programs that help begin before the others have computed: here, where they cannot go on, their waiting ends in a report."""
    made = layer(Case())
    with pytest.raises(RunError, match="a block of columns was not computed in time"):
        made.run(replace(SHAPE, division=Division(programs=3, senders=0)))


def test_results_are_not_added_up_before_they_are_there() -> None:
    receiver = Receiver(layer(Case()))
    finish(receiver.indices[0], receiver.arenas[0], shape=SHAPE)
    with pytest.raises(RunError, match="was not raised in time"):
        check_status(receiver.arenas[0].status_2)


def test_every_peer_learns_of_every_block() -> None:
    made = layer(Case(ranks=3))
    receiver = Receiver(made)
    for rank in range(3):
        send(made.x[rank], receiver.indices[rank], receiver.arenas[rank], shape=SHAPE)
    compute(receiver.arenas[0], receiver.told[0], receiver.order, made.w13[:2], made.w2[:2], shape=SHAPE)
    for arena in receiver.arenas:
        assert arena.done_F.tolist() == [1, 1, 0, 0, 0, 0], "rank 0 has sent its blocks, ranks 1 and 2 have not"
        count = int(receiver.told[0].counts_P[arena.rank])
        assert arena.returned_PCH[0, :count].isfinite().all()
        assert arena.returned_PCH[0, count:].isnan().all(), "places that hold no entry are not written"


# ---- operands ------------------------------------------------------------------------------------------------------------


def test_weights_may_be_transposed() -> None:
    """As the backward pass has them."""
    receiver = Receiver(layer(Case()))
    arena, case = receiver.arenas[0], receiver.made.case
    arena.received_PCH.normal_()
    w = torch.randn(case.slots, case.hidden, 48).transpose(1, 2)
    arrivals = Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2)
    how = {"programs": 2, "tile": TILE, "wait": False}
    x = arena.received_PCH.flatten(0, 1)
    rows = int(receiver.order.num_rows)
    got = fused_first(x, w, receiver.order, arrivals, **how)[:rows]
    assert error(got, fused_first(x, w, receiver.order, arrivals, impl="reference", **how)[:rows]) <= 1e-5


def test_the_plain_version_refuses_what_the_kernel_would_wait_for() -> None:
    receiver = Receiver(layer(Case()))
    arena = receiver.arenas[0]
    arrivals = Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2)
    with pytest.raises(RunError, match=r"rows of slot 0 are not there: flags \[0, 1"):
        fused_first(
            arena.received_PCH.flatten(0, 1), receiver.made.w13[:2].flatten(1, 2), receiver.order, arrivals,
            programs=1, tile=TILE, impl="reference",
        )  # fmt: skip


def test_all_problems_with_operands_are_named() -> None:
    receiver = Receiver(layer(Case()))
    arena = receiver.arenas[0]
    arrivals = Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2)
    with pytest.raises(PlanError) as caught:
        fused_first(
            torch.zeros(4, 8, dtype=torch.float64), torch.zeros(1, 8, 4), receiver.order, arrivals,
            programs=1, tile=TileShape(rows=24),
        )  # fmt: skip
    assert len(caught.value.problems) == 3
    assert "tile.rows = 24: must be a power of two" in str(caught.value)


def test_weights_whose_places_32_bits_cannot_count_are_refused() -> None:
    order = Receiver(layer(Case())).order.problems_J4
    for columns, problems in ((2**15 - 1, 0), (2**15 + 1, 1)):  # of 2**16 elements each
        weights = torch.empty(2, columns, 2**16, device="meta")
        for w, depth in ((weights, 2**16), (weights.mT, columns)):
            found = product_problems(torch.empty(1, depth, device="meta"), w, order, TileShape(), name="x")
            assert ["2**31" in x.rule for x in found] == problems * [True]


def test_a_division_that_leaves_nobody_to_compute_or_send_is_refused() -> None:
    made = layer(Case())
    with pytest.raises(PlanError, match=r"division\.senders = 2: some programs must compute; 0 to 1"):
        made.run(replace(SHAPE, division=Division(programs=2, senders=2)))
    with pytest.raises(PlanError, match=r"division\.help = false: without senders somebody must send"):
        made.run(replace(SHAPE, division=Division(programs=2, senders=0, help=False)))


def test_an_arena_of_impossible_sizes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"arena\.ranks = 0: must be at least 1\n.*arena\.blocks = 0"):
        ArenaSpec(ranks=0, capacity=1, columns=1, dtype=torch.float32, blocks=0)
    with pytest.raises(PlanError, match=r"arena\.parts = 3: more parts than entries; at most 2"):
        ArenaSpec(ranks=1, capacity=2, columns=1, dtype=torch.float32, parts=3)


# ---- memory of several processes ------------------------------------------------------------------------------------------


class FakeSymmetricMemory:
    """The part of torch's module that is used, with the ranks' memory in one process."""

    def __init__(self, whole: list[torch.Tensor], rank: int) -> None:
        self.whole, self.rank, self.barriers = whole, rank, 0

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert (size, dtype) == (self.whole[0].numel(), torch.uint8)
        return self.whole[self.rank]

    def rendezvous(self, tensor: torch.Tensor, group: str) -> SimpleNamespace:
        def barrier() -> None:
            self.barriers += 1

        def get_buffer(rank: int, sizes: tuple[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
            return self.whole[rank][offset : offset + sizes[0]]

        return SimpleNamespace(rank=self.rank, world_size=len(self.whole), get_buffer=get_buffer, barrier=barrier)


def test_arenas_of_processes_are_those_of_one_process() -> None:
    made = layer(Case(ranks=3))
    spec = made.spec()
    whole = [torch.full((spec.num_bytes,), 7, dtype=torch.uint8) for _ in range(3)]
    fakes = [FakeSymmetricMemory(whole, rank) for rank in range(3)]
    arenas = [symmetric_arena(spec, "group", torch.device("cpu"), symm_mem=fake) for fake in fakes]
    assert [fake.barriers for fake in fakes] == [1, 1, 1]
    assert_right(made, made.run(arenas=arenas))


def test_symmetric_memory_needs_a_gpu_and_the_ranks_of_the_plan() -> None:
    spec = layer(Case()).spec()
    with pytest.raises(RunError, match="needs CUDA devices, not cpu"):
        symmetric_arena(spec, "group", torch.device("cpu"))
    fake = FakeSymmetricMemory([torch.zeros(spec.num_bytes, dtype=torch.uint8)], 0)
    with pytest.raises(RunError, match="the group has 1 ranks, the plan 2"):
        symmetric_arena(spec, "group", torch.device("cpu"), symm_mem=fake)


@pytest.mark.parametrize(("error", "told"), [(RuntimeError("CUDA driver error: peer access is not supported\nframe #0"), RunError), (torch.OutOfMemoryError("full"), torch.OutOfMemoryError)])  # fmt: skip
def test_devices_that_share_no_memory_are_told_with_a_way_out(error: RuntimeError, told: type[Exception]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    fake = SimpleNamespace(empty=lambda *_, **__: torch.empty(0), rendezvous=refuse)
    spec = ArenaSpec(ranks=2, capacity=4, columns=8, dtype=torch.float32)
    with pytest.raises(told) as raised:
        symmetric_arena(spec, "group", torch.device("cpu"), symm_mem=fake)
    if told is RunError:
        assert "peer access is not supported; use dispatch.overlap" in str(raised.value)


def test_regions_do_not_overlap() -> None:
    spec = ArenaSpec(ranks=3, capacity=5, columns=7, dtype=torch.bfloat16, parts=2, blocks=3)
    arena: SymmetricMemory = virtual_arenas(spec)[1]
    for i, name in enumerate(spec.regions()):
        getattr(arena, name).fill_(i + 1)
    assert [getattr(arena, name).unique().tolist() for name in spec.regions()] == [[1], [2], [3], [4]]
    assert arena.received_table_P[1] == arena.received_PCH.data_ptr()


# ---- compiled ahead of time ------------------------------------------------------------------------------------------------

COMPILE = """
import dataclasses, json, torch
from compile_ahead import KERNELS, compile_ahead
from phalanx.kernels.triton.tiles import TileShape
how = dict(dtype=torch.bfloat16, tile=TileShape())
built = {n: compile_ahead(n, **how) for n in KERNELS}
built |= {f"{n} transposed": compile_ahead(n, transposed=True, **how) for n in ("first", "second")}
print(json.dumps({name: dataclasses.asdict(kernel) for name, kernel in built.items()}))
"""
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one block can have on compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""


def test_the_kernels_compile_for_hopper() -> None:
    """With the tiles that real layers use, and with weights as the backward pass has them: down to machine code, nothing spilled, no tensor moved element by element, matrix instructions of Hopper, flags read and raised system-wide."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    assert set(built) == {"first", "second", "send", "add_ranks", "first transposed", "second transposed"}
    for kernel in built.values():
        assert kernel["local_bytes"] == 0 and kernel["registers"] <= 255 and kernel["narrow"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_LIMIT, kernel
    assert all(kernel["wgmma"] for name, kernel in built.items() if name.startswith(("first", "second")))
    assert built["first"]["acquires_sys"] and built["add_ranks"]["acquires_sys"]
    assert built["second"]["releases_sys"] and built["send"]["releases_sys"]
