"""Products that add up gradients of weights themselves: the same gradients as those that autograd makes and a hook adds, whatever a weight is used for, and reductions that leave when they did."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from program_help import TINY, Run, one_step, random_batch

from phalanx.core.config import PipelineConfig
from phalanx.kernels.device import weight_sums
from phalanx.kernels.device.weight_sums import WeightSum, WeightSums, sums_of_experts
from phalanx.kernels.ops.grouped_mm import grouped_ffn
from phalanx.kernels.ops.linear import linear, projections
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache
from phalanx.simulate.memory import device_activations
from phalanx.train.step import transaction
from ranks import run_ranks


class Total:
    """A sum of one weight, and how often something was added."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.sum, self.times = torch.full(weight.shape, float("nan"), dtype=dtype), 0

    def begin(self) -> tuple[torch.Tensor, bool]:
        self.times += 1
        return self.sum, self.times > 1


def totals(*weights: torch.Tensor, dtype: torch.dtype) -> tuple[WeightSums, list[Total]]:
    made, sums = [Total(w, dtype) for w in weights], WeightSums()
    sums.take((w, WeightSum(t.begin)) for w, t in zip(weights, made, strict=True))
    return sums, made


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_a_projection_adds_to_its_sum_and_returns_nothing() -> None:
    a, b = (torch.nn.Parameter(torch.randn(n, 6, dtype=torch.float64)) for n in (4, 3))
    sums, (first, second) = totals(a, b, dtype=torch.float64)
    want = [torch.zeros_like(a), torch.zeros_like(b)]
    for _ in range(3):
        x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
        y, z = projections(x, [a, b], [None, None], weight_sums=sums)
        (y.square().sum() + z.sum()).backward()
        plain = x.detach().clone().requires_grad_()
        found = torch.autograd.grad((plain @ a.T).square().sum() + (plain @ b.T).sum(), [plain, a, b])
        assert torch.allclose(x.grad, found[0])
        want = [w + g for w, g in zip(want, found[1:], strict=True)]
    assert a.grad is None and b.grad is None and (first.times, second.times) == (3, 3)
    assert torch.allclose(first.sum, want[0]) and torch.allclose(second.sum, want[1])


@pytest.mark.unit
def test_a_weight_in_another_shape_is_found_and_a_part_of_one_is_not() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 4, 6))
    sums, (total,) = totals(weight, dtype=torch.float32)
    assert sums.of(weight.flatten(0, 1)) is sums.of(weight) is not None
    assert sums.of(weight[0]) is None and sums.of(torch.randn(2, 4, 6)) is None
    assert sums.of(weight.transpose(1, 2)) is None
    with torch.no_grad():
        linear(torch.randn(3, 6), weight.flatten(0, 1), weight_sums=sums)
    assert total.times == 0
    x = torch.randn(3, 6, requires_grad=True)
    linear(x, weight.flatten(0, 1), weight_sums=sums).sum().backward()
    assert torch.allclose(total.sum.flatten(0, 1), x.sum(0).expand(8, 6)) and weight.grad is None


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_added_is_rounded_to_the_type_of_the_sum_alone(dtype: torch.dtype) -> None:
    """Groups without rows at first, and later: in fp32 the sum of products of bf16 is the exact one to a millionth; a gradient in bf16 would be off by a thousandth."""
    total = Total(torch.empty(3, 24, 40), torch.promote_types(dtype, torch.float32))
    want = torch.zeros(3, 24, 40, dtype=torch.float64)
    for counts in (7, 0, 9), (0, 5, 11):
        a, b = (torch.randn(16, width).to(dtype) for width in (24, 40))
        WeightSum(total.begin).add_groups(a, b, counts)
        want += torch.stack([x.T @ y for x, y in zip(a.double().split(counts), b.double().split(counts), strict=True)])
    assert (total.sum.double() - want).norm() <= (1e-14 if dtype == torch.float64 else 1e-6) * want.norm()


@pytest.mark.unit
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_add_what_they_would_return(recompute: bool) -> None:
    counts_of, width, hidden = [(7, 0, 9), (0, 5, 11), (0, 0, 0)], 16, 24
    w13, w2 = (
        torch.nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((3, 2, width, hidden), (3, hidden, width))
    )
    sums, made = totals(w13, w2, dtype=torch.float32)
    with mock.patch.object(weight_sums, "LARGE_EXPERT", 1):
        into = sums_of_experts(sums, w13, w2)
    want = [torch.zeros(w.shape) for w in (w13, w2)]
    for counts in counts_of:
        x, r = torch.randn(sum(counts), hidden).bfloat16().requires_grad_(), torch.rand(sum(counts))
        grouped_ffn(x, w13, w2, counts, row_weights_M=r, recompute=recompute, into=into).sum().backward()
        y = grouped_ffn(x.detach(), w13, w2, counts, row_weights_M=r, recompute=recompute)
        for total, grad in zip(want, torch.autograd.grad(y.sum(), [w13, w2]), strict=True):
            total += grad
    assert w13.grad is None and w2.grad is None and [t.times for t in made] == [3, 3]
    for total, plain in zip(made, want, strict=True):
        assert (total.sum - plain).norm() <= 0.01 * plain.norm()


@pytest.mark.unit
def test_small_experts_are_left_to_grouped_products() -> None:
    weights = [torch.nn.Parameter(torch.empty(2, 1, 2**n, dtype=torch.bfloat16)) for n in (22, 23)]
    sums, _ = totals(*weights, dtype=torch.float32)
    assert sums_of_experts(sums, weights[0], weights[0]) == () == sums_of_experts(None, weights[1], weights[1])
    assert len(sums_of_experts(sums, weights[0], weights[1])) == 2
    assert sums_of_experts(sums, torch.empty(2, 1, 2**23), weights[1]) == ()
    assert device_activations.LARGE_EXPERT == weight_sums.LARGE_EXPERT


# ---- steps -----------------------------------------------------------------------------------------------------------


def _gradients(rank: int, cache: GroupCache, run: Run, summed: bool) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """Reduced gradients of a step that is made twice, the ids of its reductions in the order in which they began, and products that were added."""
    found: dict[str, torch.Tensor] = {}
    begun: list[str] = []
    commit, add, post = transaction.commit_step, weight_sums._add_product, Collectives._posted

    def seen(parts: Any, reduced: Any) -> Any:
        once = {b.name: b.tensor.clone() for b in reduced.gradients.boxes()}
        first = run.folding.replica_of(rank) * run.num_microbatches
        batches = [part_of(random_batch(first + j), run.folding, rank) for j in range(run.num_microbatches)]
        reduced = transaction.reduce_step(parts, batches, step=0, lr=1e-3)  # again: what is there is of another step
        found.update({b.name: b.tensor.clone() for b in reduced.gradients.boxes()})
        assert all(torch.allclose(once[name], x) for name, x in found.items())
        return commit(parts, reduced)

    def posted(self: Any, call: Any) -> float:
        if call.op_id.startswith("gradient/") or "experts" in call.op_id or "combine" in call.op_id:
            begun.append(call.op_id)
        return post(self, call)

    with (
        mock.patch.object(transaction, "commit_step", seen),
        mock.patch.object(weight_sums, "_add_product", mock.Mock(side_effect=add)) as added,
        mock.patch.object(weight_sums, "LARGE_EXPERT", 1),
        mock.patch.object(Collectives, "_posted", posted),
    ):
        more = {"weight_sums": WeightSums()} if summed else {}
        one_step(rank, cache, run, Collectives(timeout_s=30), **more)
        return found, begun, added.call_count


RUNS = {
    "one rank": Run(folding=Folding(world=1), num_microbatches=3),
    "experts over ranks, early": Run(folding=Folding(world=2, ep=2), num_microbatches=2, bucket_mb=0.001),
    "chunks": Run(folding=Folding(world=2, ep=2), num_microbatches=2, bucket_mb=0.001, dispatch=DispatchSpec(overlap="coarse:2")),
    "split weights, no shards": Run(folding=Folding(world=2, tp=2), num_microbatches=2, zero=0),
    "selective": Run(folding=Folding(world=2, ep=2), num_microbatches=2, recompute="selective"),
    "full": Run(folding=Folding(world=2), num_microbatches=2, recompute="full", bucket_mb=0.001),
    "a pipeline": Run(folding=Folding(world=2, pp=2), num_microbatches=3),
    "a head used twice": Run(folding=Folding(world=2), num_microbatches=2, bucket_mb=0.001, spec=dataclasses.replace(TINY, mtp_layers=1, tied_embeddings=True)),
    "gradients in shards": Run(folding=Folding(world=2), num_microbatches=2, zero=2),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_step_has_the_same_gradients_and_reduces_as_early(name: str, dtype: torch.dtype) -> None:
    """In fp64 to rounding. In bf16, where experts are grouped products too, to what rounding each gradient to bf16 makes of it."""
    run = dataclasses.replace(RUNS[name], dtype=dtype)
    world = run.folding.world
    plain, summed = (run_ranks(world, _gradients, run, kind) for kind in (False, True))
    for (want, order, none), (got, reduced, added) in zip(plain, summed, strict=True):
        assert none == 0 and added > 0
        assert order == reduced and want.keys() == got.keys()
        for key, x in want.items():
            close = 1e-12 if dtype == torch.float64 else 0.03
            assert (got[key] - x).norm() <= close * x.norm() + 1e-12, key


@pytest.mark.unit
def test_what_is_summed_is_freed_with_its_buffers() -> None:
    """No hook of a node keeps parameters, buffers or the model alive."""
    run = Run(folding=Folding(world=1), num_microbatches=2)
    (held,) = run_ranks(1, _alive, run)
    assert held == 0


def _alive(rank: int, cache: GroupCache, run: Run) -> int:
    _, parts = one_step(rank, cache, run, Collectives(timeout_s=30), weight_sums=WeightSums())
    seen = [weakref.ref(x) for x in (parts.buffers, parts.model, next(parts.model.parameters()))]
    del parts
    gc.collect()
    return sum(ref() is not None for ref in seen)


@pytest.mark.core
@pytest.mark.ranks
def test_a_schedule_that_puts_off_weight_gradients_keeps_its_own_way() -> None:
    run = Run(folding=Folding(world=2, pp=2), num_microbatches=3, pipeline=PipelineConfig(schedule="zero_bubble"))
    assert all(added == 0 for _, _, added in run_ranks(2, _gradients, run, True))
