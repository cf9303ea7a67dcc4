"""Scripted functions are the functions that they are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from kernel_help import normal

from phalanx.kernels.cpu import scripted
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops import attention, cross_entropy, grouped, norm, rope, square_sum

Outcome = list[torch.Tensor]


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [normal(*shape, seed=i).to(torch.bfloat16).requires_grad_() for i, shape in enumerate(shapes)]


def _differentiated(out: torch.Tensor, leaves: list[torch.Tensor]) -> Outcome:
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape, seed=9).to(out.dtype))]


def _attention(lanes: Lanes) -> Outcome:
    q, k, v = _leaves((2, 300, 4, 16), (2, 300, 2, 16), (2, 300, 2, 16))
    return _differentiated(attention.causal_attention(q, k, v, ((300,), (100, 200)), lanes=lanes), [q, k, v])


def _experts(lanes: Lanes) -> Outcome:
    x, w13, w2 = _leaves((200, 32), (3, 2, 48, 32), (3, 32, 48))
    weights = normal(200, seed=7).to(torch.float32).requires_grad_()
    out = grouped.expert_ffn(x, w13, w2, [120, 0, 80], row_weights_M=weights, lanes=lanes)
    return _differentiated(out, [x, w13, w2, weights])


def _norm(lanes: Lanes) -> Outcome:
    x, w = _leaves((5000, 64), (64,))
    return _differentiated(norm.rms_norm(x, w, 1e-5, lanes=lanes), [x, w])


def _rope(lanes: Lanes) -> Outcome:
    (x,) = _leaves((2, 300, 4, 16))
    table = rope.rope_table(torch.arange(300).expand(2, -1), head_dim=16, theta=1e4, dtype=x.dtype)
    return _differentiated(rope.apply_rope(x, x, table=table, lanes=lanes)[0], [x])


def _loss(lanes: Lanes) -> Outcome:
    hidden, weight = _leaves((600, 32), (100, 32))
    loss = cross_entropy.linear_cross_entropy(hidden, weight, torch.arange(600) % 100, lanes=lanes)
    return _differentiated(loss, [hidden, weight])


def _squares(lanes: Lanes) -> Outcome:
    return [square_sum.square_sums(_leaves((3 * square_sum.PIECE // 2,), (77,)), lanes=lanes)]


@pytest.mark.parametrize("kernel", [_attention, _experts, _norm, _rope, _loss, _squares])
def test_same_bits_without_script_and_with_any_lanes(
    kernel: Callable[[Lanes], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [kernel(SERIAL)]
    with Lanes(3) as lanes:
        outcomes.append(kernel(lanes))
    for module in (attention, cross_entropy, grouped, norm, rope, square_sum):
        monkeypatch.setattr(module, "scripted", lambda function: function)
    outcomes.append(kernel(SERIAL))
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))


def test_without_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    monkeypatch.delattr(torch.jit, "script")
    assert scripted.scripted(double) is double


def test_compiled_once_and_quietly(recwarn: pytest.WarningsRecorder) -> None:
    assert scripted.scripted(_triple) is scripted.scripted(_triple)
    assert isinstance(scripted.scripted(_triple), torch.jit.ScriptFunction)
    assert not recwarn.list


def _triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def test_a_finished_run_holds_nothing() -> None:
    """Autograd copies a gradient that somebody else holds: 60 MB a step once, by a worker that remembered its last job."""
    with Lanes(2) as lanes:
        assert _after_a_run(lanes)() is None


def _after_a_run(lanes: Lanes) -> weakref.ref[torch.Tensor]:
    made = torch.zeros(4)
    lanes.run(lambda i, _: made[i].add_(1), range(4))
    return weakref.ref(made)
