"""The pipeline benchmark: its models' gradients do not depend on how a backward pass is divided, passes are paced, results are put together."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from phalanx.core.errors import RunError
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx_lab.bench.pipeline.command import CONFIGURATIONS, PipelineArgs, _cluster, _edges, _result
from phalanx_lab.bench.pipeline.models import MODELS, STAGES, PacedPasses, PassPace, StageModel, gradient_digest

pytestmark = pytest.mark.unit
SMALL = {name: dataclasses.replace(shape, sequences=2, seq_len=4, hidden=8) for name, shape in MODELS.items()}
FAST = PassPace(forward_s=0, input_s=0, weight_s=0)


def digest_of(name: str, stage: int, *, divided: bool) -> str:
    shape, later = SMALL[name], DeferredGradients()
    model = StageModel(shape, stage, later)
    passes = PacedPasses(model, later, FAST)
    generator = torch.Generator().manual_seed(1)
    for mb in range(2):
        inputs = tuple(torch.randn(shape.shape(e), generator=generator) for e in shape.edges if e[1] == stage)
        outputs = passes.forward(stage, mb, inputs)
        assert [tuple(x.shape) for x in outputs] == [shape.shape(e) for e in shape.edges if e[0] == stage]
        d_outputs = tuple(torch.randn(x.shape, generator=generator) for x in outputs)
        d_inputs = (passes.input_gradient if divided else passes.backward)(stage, mb, d_outputs)
        assert [x.shape for x in d_inputs] == [x.shape for x in inputs]
        if divided:
            passes.weight_gradient(stage, mb)
    return gradient_digest(model)


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_depend_on_how_a_backward_pass_is_divided(name: str, stage: int) -> None:
    assert digest_of(name, stage, divided=True) == digest_of(name, stage, divided=False)


def test_gradients_are_read_to_the_bit() -> None:
    model = StageModel(SMALL["decoder"], 1, DeferredGradients())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first = gradient_digest(model)
    for parameter in model.parameters():
        assert parameter.grad is None
        parameter.grad = torch.ones_like(parameter)
    model.down.weight.grad[0, 0] += 2**-23
    assert gradient_digest(model) != first


def test_a_pass_takes_its_time_and_a_late_one_is_counted() -> None:
    later = DeferredGradients()
    passes = PacedPasses(
        StageModel(SMALL["decoder"], 0, later), later, PassPace(forward_s=0.5, input_s=1e-9, weight_s=0)
    )
    begin = time.monotonic()
    (out,) = passes.forward(0, 0, ())
    assert time.monotonic() - begin >= 0.5 and passes.late == 0, (
        "the first one takes some milliseconds, and more beside other tests"
    )
    passes.backward(0, 0, (torch.ones_like(out),))
    assert passes.late == 1 and set(passes.spent) == {"F", "B"}


def test_broadcast_sends_one_copy_and_send_recv_one_for_each_replica() -> None:
    options = PipelineArgs()
    for shape in MODELS.values():
        for method, copies in (("best", 1), ("send_recv", 2)):
            for edge, plan in _edges(shape, _cluster(options), method).items():
                for way in (plan.forward, plan.backward):
                    sent = sum(box.num_elements for r in way.values() for leg in r.sends for box in leg.parts)
                    rows, hidden = shape.shape(edge)
                    assert sent == copies * rows * hidden
                assert plan.relays("forward") == (method == "best")


def told(digest: str = "a") -> dict:
    names = len(CONFIGURATIONS)
    return {
        "seconds": [[10.0, 12.0, 11.0], [9.0, 9.0, 9.0], [8.0, 8.0, 8.0], [5.5, 5.0, 6.0]],
        "digests": [["a", "b"]] * (names - 1) + [[digest, "b"]],
        "transfers_s": {"best": 0.02, "send_recv": 0.04},
        "passes_s": {"F": 0.08, "B": 0.16, "I": 0.08, "W": 0.08},
        "late": 3,
        "processors": 0.5,
        "passes": 100,
    }


def test_the_result_has_medians_quotients_and_predictions() -> None:
    result = _result(PipelineArgs(), MODELS["decoder"], told())
    first, *_, last = result["configurations"]
    assert first["samples_per_s"] == 32 * 72 / 11 and last["ratio"] == result["ratio"] == 2.0 and result["met"]
    assert result["transfer_over_forward"] == 0.25 and result["late_passes"] == 3
    assert 1.2 < result["predicted_ratio"] < 1.6  # two copies of a quarter each, blocking, over one
    u_shaped = _result(PipelineArgs(), MODELS["u_shaped"], told())
    assert u_shaped["predicted_ratio"] > result["predicted_ratio"]
    with pytest.raises(RunError, match="different gradients"):
        _result(PipelineArgs(), MODELS["decoder"], told("c"))
