"""A whole decoder, and the rows of an MoE layer, by the programs of `kernels/device`, under Triton's interpreter, against the plain ones: that models call them with what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from kernel_help import normal
from moe_help import context, moe_spec
from test_model_decoder import gradients, variant, worst

from phalanx.kernels.device import LossWork, device_cross_entropy
from phalanx.kernels.ops import norm, permute, rope, swiglu
from phalanx.kernels.ops.cross_entropy import IGNORE, linear_cross_entropy
from phalanx.kernels.triton.tiles import is_interpreted
from phalanx.models import decoder
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.moe import dispatch as dispatching
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every operation that has a program uses it; the operations that were asked for."""
    asked: set[str] = set()

    def answers(module: Any) -> None:
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "runs_programs", lambda x: asked.add(name) is None)

    for module in (norm, permute, rope, swiglu):
        answers(module)

    def loss(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, *, shard: Any, impl: str, lanes: Any) -> Any:
        if impl == "reference":
            return linear_cross_entropy(h, w, labels, impl="reference")
        asked.add("loss")
        return device_cross_entropy(h, w, labels, LossWork(ignore=IGNORE, programs=True, check=lanes.check, chunk=20))

    monkeypatch.setattr(decoder, "linear_cross_entropy", loss)
    return asked


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "recompute"), [("qk norm per head", "none"), ("gated shared expert", "full"), ("latent", "none")]
)
def test_a_decoder_by_programs_equals_the_plain_one(name: str, recompute: str, called: set[str]) -> None:
    loss, found, _ = gradients(variant(name), recompute=recompute)
    assert called >= {"loss", "norm", "permute", "rope"}
    plain_loss, plain, _ = gradients(variant(name), kernels="reference")
    assert torch.allclose(loss, plain_loss, rtol=1e-12, atol=0) and worst(found, plain) < 1e-10


@pytest.mark.parametrize("case", ["alone", "heard", "dropping"])
def test_a_layer_of_one_rank_waits_for_counts_only_where_they_are_asked_for(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits either way, with experts that get no row: the plain sort and the wait against what a device does."""
    policy = DispatchSpec(policy="drop", capacity_factor=0.5) if case == "dropping" else DispatchSpec()
    found = []
    for on_device in (False, True):
        waits = []
        monkeypatch.setattr(dispatching, "runs_programs", lambda x, programs=on_device: programs)
        monkeypatch.setattr(dispatching, "counts_on_host", lambda counts, into=waits: waited(counts, into))
        dispatcher = routing_alone(policy, listens=case == "heard")
        x, w13, w2 = (
            normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((9, 6), (8, 2, 4, 6), (8, 6, 4)))
        )
        weights = normal(9, 2, seed=4).abs().requires_grad_()
        experts = torch.stack([torch.arange(9) % 3, torch.arange(9) % 2 + 5], 1)
        call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts, experts=ExpertWeights(w13, w2))
        y, dropped = run_experts(call, dispatcher=dispatcher)
        y.backward(normal(9, 6, seed=7))
        assert len(waits) == (0 if on_device and case == "alone" else 1)
        found.append([y.detach(), dropped, *(leaf.grad for leaf in (x, w13, w2, weights))])
        monkeypatch.undo()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_layer_of_one_rank_that_runs_again_doubts_another_routing(
    otherwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "runs_programs", lambda x: True)
    dispatcher, known = routing_alone(DispatchSpec(), listens=False), dispatching.KnownCounts()
    experts = torch.stack([torch.arange(9) % 3, torch.arange(9) % 2 + 5], 1)
    for chosen in (experts, (experts + otherwise) % 8):
        dispatcher.dispatch(normal(9, 6), normal(9, 2).abs(), chosen, known=known, needs_counts=False)
    assert [bool(doubt) for doubt in dispatcher.comms.doubts] == [otherwise]


plain_wait = dispatching.counts_on_host


def waited(counts: Any, into: list[int]) -> Any:
    into.append(1)
    return plain_wait(counts)


def routing_alone(policy: DispatchSpec, *, listens: bool) -> dispatching.Dispatcher:
    ctx = context(moe_spec(num_experts=8, top_k=2, hidden=6, expert_ffn=4), dispatch=policy)
    dispatcher = dispatching.Dispatcher(
        ctx.dispatch, placement=ctx.placement.of_layer(0), groups=ctx.groups, comms=ctx.comms, top_k=2
    )
    dispatcher.listen = (lambda plan, counts: None) if listens else None
    return dispatcher
