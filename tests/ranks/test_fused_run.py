"""The fused layer as a run has it, `dispatch.overlap = "fused"`: on two processes that write into each other's memory, under Triton's interpreter, against the plain layer; and where it is refused.

A file that both map stands in for the memory of devices. What stands for CUDA's streams runs in order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import some

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from fused_help import SHAPE, TOLERANCE, error
from moe_help import context, moe_spec
from program_help import TINY, Run, one_step, random_batch

from phalanx.core.errors import ConfigError, PeerError, PlanError, RunError
from phalanx.core.events import Collective, Event, Operation
from phalanx.kernels.ops.deferred import DeferredGradients, run
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory
from phalanx.kernels.triton.tiles import SendShape, TileShape, is_interpreted
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.moe.overlap.fused.launch import LEFT_FREE, fused_launch
from phalanx.plan.moe.overlap.settings import fused_setting_problems
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall
from phalanx.runtime.moe.fused import FusedMemory
from phalanx.runtime.moe.routed import RoutedExperts, routed_experts
from phalanx.train.step.transaction import eval_loss
from ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)"),
]
E, K, H, F = 4, 2, 40, 24
PATIENT = replace(SHAPE, patience=10**7)
"""Programs wait for the other process."""
LARGE = TileShape(rows=32, columns=64, depth=32, row_tiles=1, warps=4, stages=2)
COARSE = replace(PATIENT, first=LARGE, second=LARGE, send=SendShape(chunk=64, entries=64, columns=64))
"""As few pieces as the interpreter can be given."""


class SharedFiles:
    """Arenas in files that all ranks map, a new set for each spec."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.comms, self.made = folder, Collectives(timeout_s=240), 0

    def __call__(self, spec: ArenaSpec, axis: Axis, device: torch.device) -> SymmetricMemory:
        self.made += 1
        paths = [self.folder / f"{self.made}-{rank}" for rank in axis.ranks]
        mine = paths[axis.index]
        mine.write_bytes(bytes(spec.num_bytes))
        self.comms.barrier(axis)
        whole = [torch.from_file(str(path), shared=True, size=spec.num_bytes, dtype=torch.uint8) for path in paths]
        arena = SymmetricMemory(spec, axis.index, whole)
        arena.received_PCH.fill_(torch.nan)
        arena.returned_PCH.fill_(torch.nan)
        self.comms.barrier(axis)
        return arena


def layers(
    rank: int, cache: GroupCache, spec: DispatchSpec, folder: Path, dtype: torch.dtype, impl: str
) -> tuple[RoutedExperts, RoutedExperts, SharedFiles]:
    """A plain layer and a fused one."""
    made = moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F)
    ctx = context(made, folding=make_folding(world=2, ep=2), rank=rank, cache=cache, dispatch=spec, dtype=dtype)

    def dispatcher(overlap: str) -> Dispatcher:
        dispatch = dataclasses.replace(spec, overlap=overlap)
        return Dispatcher(dispatch, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)

    files = SharedFiles(folder)
    memory = FusedMemory(launch=replace(PATIENT, impl=impl), make=files)  # type: ignore[arg-type]
    fused = routed_experts(dispatcher("fused"), fused=memory, host_of_rank=(3, 3))
    return routed_experts(dispatcher("serial"), kernels="reference"), fused, files


def both_ways(
    rank: int, cache: GroupCache, spec: DispatchSpec, folder: Path, dtype: torch.dtype, options: dict[str, object]
) -> tuple[list[float], int, bool]:
    """Differences between the fused layer and the plain one: output, and gradients of tokens, row weights and both weights, of several batches. How many arenas were made, and whether
    as many pairs were dropped."""
    options = dict(options)
    impl, later = str(options.pop("impl", "fast")), options.pop("later", False)
    plain, fused, files = layers(rank, cache, spec, folder, dtype, impl)
    g = torch.Generator().manual_seed(rank + 1)
    w13, w2 = ((torch.randn(2, *shape, generator=g) / 4).to(dtype) for shape in ((2, F, H), (H, F)))
    found_errors, same = list[float](), True
    for tokens in ((11, 17), (19, 3), (6, 0)):
        x = (torch.randn(tokens[rank], H, generator=g) / 4).to(dtype)
        weights, experts_TK = torch.rand(tokens[rank], E, generator=g).topk(K)
        if tokens == (6, 0):
            experts_TK = experts_TK * 0 + torch.arange(K)  # all on the first rank
        dy = torch.randn(tokens[rank], H, generator=g).to(dtype)
        found = []
        for layer in (plain, fused):
            put_off = DeferredGradients() if later else None
            wide = (
                (lambda t: t.float()) if layer is plain else (lambda t: t)
            )  # the same numbers, rounded nowhere further
            operands = [wide(t.detach().clone()).requires_grad_() for t in (x, weights, w13, w2)]
            call = MoeCall(
                x_TH=operands[0],
                weights_TK=operands[1],
                experts_TK=experts_TK,
                experts=ExpertWeights(*operands[2:]),
                later=put_off,
                **options,  # type: ignore[arg-type]
            )
            y, dropped = layer(call)
            y.backward(wide(dy))
            if put_off is not None:
                assert operands[2].grad is None
                run(put_off.take())
            found.append((dropped, [y, *(t.grad for t in operands)]))
        same &= bool(found[0][0] == found[1][0])
        assert [t.dtype for t in found[1][1]] == [dtype, dtype, torch.float32, dtype, dtype]
        for want, got in zip(found[0][1], found[1][1], strict=True):
            assert want is not None and got is not None
            found_errors.append(error(got, want))
    return found_errors, files.made, same


CASES = {
    "fp32": (DispatchSpec(), torch.float32, {}),
    "bf16, recomputed": (DispatchSpec(), torch.bfloat16, {"recompute": True}),
    "drops, put off": (DispatchSpec(policy="drop", capacity_factor=0.7), torch.float32, {"later": True}),
    "plain kernels": (DispatchSpec(), torch.float32, {"impl": "reference"}),
}


@pytest.mark.core
@pytest.mark.parametrize("name", some(list(CASES), 2))
def test_a_fused_layer_equals_a_plain_one_forward_and_backward(name: str, tmp_path: Path) -> None:
    """Batches of other sizes on each rank, one without tokens on a rank and rows on the other alone; buffers grow once."""
    spec, dtype, options = CASES[name]
    for errors, made, same in run_ranks(2, both_ways, spec, tmp_path, dtype, options, timeout_s=400):
        assert len(errors) == 15 and all(e <= TOLERANCE[dtype] for e in errors), errors  # NaN is no less
        assert made == 2 and same


def steps(rank: int, cache: GroupCache, folder: Path) -> tuple[list[tuple[float, float]], set[str], set[str]]:
    """Loss and gradient norm of a training step, plain and fused; ids of what the fused one sent and computed, and those of its program."""
    found, ids, planned = [], set[str](), set[str]()
    for overlap in ("serial", "fused"):
        spec = dataclasses.replace(
            TINY, num_layers=2, dense_layers=1, dense_ffn=16, num_experts=4, hidden=32, head_dim=8
        )
        run = Run(
            folding=make_folding(world=2, ep=2), spec=spec, recompute="full", dispatch=DispatchSpec(overlap=overlap)
        )
        events: list[Event] = []
        comms = Collectives(trace=True, emit=events.append, timeout_s=60)
        memory = FusedMemory(launch=COARSE, make=SharedFiles(folder))
        result, _ = one_step(rank, cache, run, comms, fused=memory)
        found.append((result.loss, result.grad_norm))
        ids = {
            e.op_id for e in events if isinstance(e, Collective) or (isinstance(e, Operation) and e.lane == "compute")
        }
        program = run.program(rank)
        program.check()
        planned = {op.id for op in (*program.collectives, *(op for op in program.ops if op.kind == "compute"))}
    return found, ids, planned


def test_a_training_step_is_the_plain_one_and_has_the_ids_of_its_program(tmp_path: Path) -> None:
    """Layers are run again in the backward pass."""
    for (plain, fused), ids, planned in run_ranks(2, steps, tmp_path, timeout_s=400):
        assert fused == pytest.approx(plain, rel=1e-5)
        assert ids == planned


def gives_up(rank: int, cache: GroupCache, folder: Path) -> tuple[bool, bool, str]:
    """Rank 0 forgets what it has sent: its epoch is one behind. Whether the output of this rank is NaN, whether it vetoes the step, and what it says in the next call."""
    _, fused, _ = layers(rank, cache, DispatchSpec(), folder, torch.float32, "fast")
    x, weights = torch.ones(4, H), torch.full((4, K), 0.5)
    experts = ExpertWeights(torch.ones(2, 2, F, H), torch.ones(2, H, F))
    chosen_TK = torch.tensor([0, 3]).expand(4, K)
    call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=chosen_TK, experts=experts, op_prefix="L3.")
    fused(call)
    memory = fused.way.keywords["memory"]  # type: ignore[attr-defined]
    assert memory.failures() == [] and memory.fault() == 0.0
    (arena,) = memory._arenas.values()
    memory._launch = replace(SHAPE, patience=50)
    if rank == 0:
        arena.epoch_1 -= 1
    y, _ = fused(call)
    fault = memory.fault()
    assert fault is not None
    vetoes = bool(fault.isnan())
    axis = fused.dispatcher.ep
    fused.dispatcher.comms.all_reduce(arena.status_2, axis, op="max")
    memory.report(arena, "rank 1's")  # as if rank 0 had waited too: both leave at the same place
    text = ""
    try:
        fused(replace(call, op_prefix="L4."))
    except RunError as found:
        text = str(found)
    return bool(y.isnan().all()), vetoes, text


def test_a_call_that_gave_up_gives_nan_and_the_next_one_raises(tmp_path: Path) -> None:
    found = run_ranks(2, gives_up, tmp_path)
    assert [nan for nan, _, _ in found] == [vetoes for _, vetoes, _ in found] == [False, True]
    assert all("was not raised in time: its rank left, or never began" in text for _, _, text in found)
    assert "fused MoE layer: L3.experts: flag" in found[1][2]


class FailsLate(FusedMemory):
    """Calls of a phase give up where no number of this rank shows it, as with a rank that has no tokens."""

    phase = "bwd"

    def report(self, arena: SymmetricMemory, place: str) -> None:
        if f".{self.phase}." in place:
            arena.status_2[0] = 8
        super().report(arena, place)


def late_steps(rank: int, cache: GroupCache, folder: Path, phase: str) -> str:
    spec = dataclasses.replace(TINY, num_layers=2, dense_layers=1, dense_ffn=16, num_experts=4, hidden=32, head_dim=8)
    dispatch = DispatchSpec(overlap="fused")
    run = Run(folding=make_folding(world=2, ep=2), spec=spec, dispatch=dispatch, num_microbatches=1)
    memory = (FailsLate if rank == 1 else FusedMemory)(launch=COARSE, make=SharedFiles(folder))
    if isinstance(memory, FailsLate):
        memory.phase = phase
    with pytest.raises(PeerError) as err:  # an elastic run goes on in another generation: the numbers are no cause
        _, parts = one_step(rank, cache, run, Collectives(timeout_s=60), fused=memory)
        eval_loss(parts, [part_of(random_batch(rank), run.folding, rank)], step=1)
    return str(err.value)


def test_a_step_whose_last_call_gave_up_is_not_taken_and_says_which_layer(tmp_path: Path) -> None:
    for text in run_ranks(2, late_steps, tmp_path, "bwd", timeout_s=400):
        assert (
            "L1.bwd.experts: flag 7 was not raised in time" in text
            and "on rank 1" in text
            and "nothing was changed" in text
        )


def test_a_validation_in_which_a_call_gave_up_has_no_loss(tmp_path: Path) -> None:
    for text in run_ranks(2, late_steps, tmp_path, "eval", timeout_s=400):
        assert "validation after step 1: " in text and "L1.eval.experts: flag 7" in text and "on rank 1" in text


# ---- where it is refused ------------------------------------------------------------------------------------------------------


def refused(rank: int, cache: GroupCache) -> list[str]:
    made = moe_spec(num_experts=E, top_k=K, hidden=H, expert_ffn=F)
    told = []
    for degrees, hosts in (({"ep": 2}, (0, 1)), ({"ep": 1, "etp": 2}, (0, 0))):
        ctx = context(made, folding=make_folding(world=2, **degrees), rank=rank, cache=cache)
        spec = DispatchSpec(overlap="fused")
        dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
        try:
            routed_experts(dispatcher, host_of_rank=hosts)
        except ConfigError as error:
            told.append(str(error))
    ctx = context(made, folding=make_folding(world=2, ep=2), rank=rank, cache=cache, dtype=torch.float32)
    dispatcher = Dispatcher(
        DispatchSpec(overlap="fused"), placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K
    )
    layer = routed_experts(dispatcher, fused=FusedMemory(left_free=4))
    layer.way.keywords["memory"]._launch = SHAPE  # type: ignore[attr-defined]
    try:
        experts = ExpertWeights(torch.ones(2, 2, F, H), torch.ones(2, H, F))
        chosen_TK = torch.zeros(4, K, dtype=torch.int64)
        call = MoeCall(x_TH=torch.ones(4, H), weights_TK=torch.ones(4, K), experts_TK=chosen_TK, experts=experts)
        layer(call)
    except RunError as error:
        told.append(str(error))
    return told


def test_where_ranks_cannot_reach_each_other_it_is_refused() -> None:
    for hosts, cut, device in run_ranks(2, refused):
        assert "dispatch.overlap = 'fused'" in hosts and "are on 2 hosts; folding.ep up to the devices" in hosts
        assert "computes whole experts, and folding.etp cuts them" in cut
        assert "symmetric memory needs CUDA devices, not cpu" in device


@pytest.mark.unit
def test_a_recipe_hears_all_that_speaks_against_it() -> None:
    good = {"device": "cuda", "dtype": "bfloat16", "etp": 1, "kernels": "fast", "bucket_mb": 0.0, "heals": False}
    assert fused_setting_problems("fused", **good) == fused_setting_problems("auto", **{**good, "device": "cpu"}) == []  # type: ignore[arg-type]
    bad = fused_setting_problems(
        "fused", device="cpu", dtype="float64", etp=2, kernels="reference", bucket_mb=64.0, heals=True
    )
    words = ["launch.device", "train.dtype", "folding.etp = 2", "kernels.implementation", "bucket_mb = 64", "heal ="]
    assert all(word in str(problem) for word, problem in zip(words, bad, strict=True))


@pytest.mark.unit
def test_a_device_is_divided() -> None:
    launch = fused_launch(132, left_free=None, capacity=4096, columns=4096)
    assert (launch.first, launch.send, launch.second, launch.senders) == (132 - LEFT_FREE, LEFT_FREE, 132, LEFT_FREE)
    small = fused_launch(8, left_free=None, capacity=2, columns=3)
    assert (small.first, small.send, small.parts, small.blocks) == (4, 4, 2, 3)
    for free in (0, 132):
        with pytest.raises(PlanError, match=rf"dispatch\.left_free = {free}: from 1 to 131"):
            fused_launch(132, left_free=free, capacity=1, columns=1)
