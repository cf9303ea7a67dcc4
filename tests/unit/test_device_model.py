"""A whole decoder by the programs of `kernels/device`, under Triton's interpreter, against the plain one: that models call them with what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from test_model_decoder import gradients, variant, worst

from phalanx.kernels.cpu import norm, permute, rope, swiglu
from phalanx.kernels.cpu.cross_entropy import IGNORE, linear_cross_entropy
from phalanx.kernels.device import LossWork, device_cross_entropy
from phalanx.kernels.triton.tiles import is_interpreted
from phalanx.models import decoder

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


@pytest.mark.parametrize(
    ("name", "recompute"), [("qk norm per head", "none"), ("gated shared expert", "full"), ("latent", "none")]
)
def test_a_decoder_by_programs_equals_the_plain_one(name: str, recompute: str, called: set[str]) -> None:
    loss, found, _ = gradients(variant(name), recompute=recompute)
    assert called >= {"loss", "norm", "permute", "rope"}
    plain_loss, plain, _ = gradients(variant(name), kernels="reference")
    assert torch.allclose(loss, plain_loss, rtol=1e-12, atol=0) and worst(found, plain) < 1e-10
