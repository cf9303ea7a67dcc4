"""Passes beside one another: the bits of one after the other, everywhere; whatever fails ends both."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PeerError, RunError
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import make_folding
from phalanx.plan.model import RouterSpec
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.groups import Axis, GroupCache, build_groups, with_second_groups
from phalanx.runtime.pair import Baton, Beside
from phalanx.train.step import StepParts, train_step
from phalanx.verify.reference import Recorder, start
from phalanx.verify.numbers import StartingValues
from phalanx.verify.setups import Setup, small_model
from pipeline_help import PipelineCase, batches_of, build, verify
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

SPEC = small_model("pairs", num_layers=4, dense_layers=1, dense_ffn=48, router=RouterSpec(aux_loss=0.05))


def case_of(
    degrees: dict[str, int], config: PipelineConfig, *, recompute: str = "none", each: int = 4, **changes: object
) -> PipelineCase:
    folding = make_folding(**degrees)
    setup = Setup(label="pairs", spec=dataclasses.replace(SPEC, **changes), dispatch=DispatchSpec(), recompute=recompute)  # type: ignore[arg-type]
    config = dataclasses.replace(config, pair_passes=True)
    return PipelineCase(setup=setup, folding=folding, config=config, num_microbatches=each * folding.replicas)


PLAIN = PipelineConfig()
INTERLEAVED = PipelineConfig(schedule="interleaved_1f1b", virtual=2)
CASES = {
    "ep2": case_of({"world": 2, "ep": 2}, PLAIN),
    "ep2-full": case_of({"world": 2, "ep": 2}, PLAIN, recompute="full"),
    "ep2-selective": case_of({"world": 2, "ep": 2}, PLAIN, recompute="selective", shared_ffn=32),
    "tp2": case_of({"world": 2, "tp": 2, "etp": 2}, PLAIN),
    "cp2": case_of({"world": 2, "cp": 2, "ep": 2}, PLAIN),
    "ep2-pp2-eager": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="eager_1f1b")),
    "ep2-pp2-interleaved-full": case_of({"world": 4, "ep": 2, "pp": 2}, INTERLEAVED, recompute="full"),
    "ep2-pp2-later": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="eager_1f1b_split")),
    "ep2-pp2-zbv": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="zbv"), each=6),
    "ep2-pp2-dual": case_of({"world": 4, "ep": 2, "pp": 2}, PipelineConfig(schedule="dualpipev"), each=6, num_layers=5),
    "ep4-edp": case_of({"world": 4, "ep": 2}, PLAIN, each=3),
}  # fmt: skip


def two_steps(parts: StepParts, case: PipelineCase, rank: int) -> list[torch.Tensor]:
    """Loss, gradients and weights of two steps from the starting state of `verify`."""
    start(parts, StartingValues())
    batches, out = batches_of(case, rank), []
    for step in range(2):
        recorder = Recorder(parts.optimizer)
        result = train_step(dataclasses.replace(parts, optimizer=recorder), batches, step=step, lr=0.02)
        assert recorder.gradients is not None
        out += [torch.tensor([result.loss, result.aux_loss, result.grad_norm], dtype=torch.float64)]
        out += [box.tensor.clone() for box in recorder.gradients.boxes()]
        out += [p.detach().clone() for p in parts.model.parameters()]
    return out


def _both_ways(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[bool, bool, int, int]:
    """Beside one another; the same plan one after the other; a plan without pairs."""
    paired = build(case, rank, cache)
    num_pairs = len(paired.pipeline.plan(case.num_microbatches // case.folding.replicas).pairs)
    found = two_steps(paired, case, rank)
    counted = {key: (c.calls, c.sent_bytes) for key, c in paired.comms.counters.items()}
    waiting = build(case, rank, cache)
    waiting = dataclasses.replace(waiting, groups=dataclasses.replace(waiting.groups, second=None))
    plan_alone = two_steps(waiting, case, rank)
    plain = build(dataclasses.replace(case, config=dataclasses.replace(case.config, pair_passes=False)), rank, cache)
    want = two_steps(plain, case, rank)
    assert counted == {key: (c.calls, c.sent_bytes) for key, c in plain.comms.counters.items()}
    assert not [t.name for t in threading.enumerate() if t.name == "second pass"]
    return _equal(found, want), _equal(plan_alone, want), num_pairs, len(want)


def _equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_one_after_the_other(name: str) -> None:
    case = CASES[name]
    for beside, after, num_pairs, tensors in run_ranks(case.folding.world, _both_ways, case):
        assert num_pairs > 1 and tensors > 20
        assert beside and after
