"""Loss on answers alone: ranks and micro-batches hold unequal numbers of labels, some none, and every mapping has the loss and the gradients of one rank."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from phalanx.core.config import DataConfig, PipelineConfig, Recipe
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import TokenBatch
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.train.step.transaction import train_step
from phalanx.verify.numbers import microbatch
from phalanx.verify.session import CaseTask, VerifyJob, run_job
from phalanx.verify.setups import Case, Setup, recipe_cases, small_model
from phalanx_lab.faults.faults import fault_named

from test_optim_step import one, setup  # isort: skip

pytestmark = pytest.mark.ranks

WORLD = 4
MAPPINGS = {"dp": {}, "ep": {"ep": 4}, "cp": {"cp": 2, "ep": 2}, "tp": {"tp": 2, "etp": 2}, "pp": {"pp": 2, "ep": 2}}


def of_answers(*, mtp_layers: int = 0, **changes: Any) -> Setup:
    """As `phalanx verify` takes it from a recipe with conversations."""
    recipe = Recipe(data=DataConfig(chat_template="chatml"))
    spec = small_model(
        "verify",
        num_layers=2,
        mtp_layers=mtp_layers,
        router=dataclasses.replace(small_model("verify").router, aux_loss=0.1, z_loss=0.01),
    )
    found = recipe_cases(recipe, spec, make_folding(world=1), DispatchSpec())[0].setup
    assert found.answers
    return dataclasses.replace(found, spec=spec, **changes)


def cases() -> dict[str, Case]:
    """One micro-batch for each replica, of which one then has no label at all, and two where there is a pipeline."""
    found = {}
    for name, axes in MAPPINGS.items():
        piped = "pp" in axes
        made = of_answers(accumulation=2 if piped else 1, zero=2 if name == "dp" else 1, label=name)
        found[name] = Case(
            setup=made,
            folding=Folding(world=WORLD, **axes),
            pipe=PipelineConfig(schedule="1f1b") if piped else PipelineConfig(),
        )
    further = of_answers(mtp_layers=1, accumulation=2, label="mtp")
    return found | {"mtp": Case(setup=further, folding=Folding(world=WORLD, cp=2, ep=2))}


def test_labels_are_few_in_runs_and_in_some_microbatches_none() -> None:
    made = of_answers()
    counts = [int((microbatch(made, j).labels_BS != IGNORE).sum()) for j in range(6)]
    assert counts[1] == counts[4] == 0 and len(set(counts)) >= 4
    assert max(counts) < 0.6 * microbatch(made, 0).labels_BS.numel()


def test_every_mapping_has_the_loss_and_the_gradients_of_one_rank() -> None:
    """And a mean of the ranks' own means is found."""
    per_rank = fault_named("valid-tokens-per-rank")
    made = cases()
    tasks = [CaseTask(case) for case in made.values()] + [CaseTask(made[name], per_rank) for name in ("dp", "ep", "cp")]
    reports = run_job(VerifyJob(tasks=tasks, world=WORLD, dtype=torch.float64))
    for name, report in zip(made, reports, strict=False):
        assert not report.failures, f"{name}: {report.failures}"
        assert 0 < report.gradient_error < 1e-12, name  # 0: nothing was compared
    for report in reports[len(made) :]:
        assert report.gradient_error > 1e-3 and any("gradient" in text for text in report.failures), report.failures


def test_a_step_without_any_label_moves_the_router_alone() -> None:
    """Its loss is 0, and no gradient is a division by nothing. Packed conversations have none such (`data/packing.py`)."""
    made = setup()
    batch = microbatch(made, 0)
    blank = TokenBatch(batch.tokens_BS, torch.full_like(batch.labels_BS, IGNORE), batch.positions_BS, batch.segments)
    result = train_step(one(made), [blank], step=0, lr=0.01)
    assert result.loss == 0.0 and result.grad_norm >= 0.0 and not json.dumps(result.grad_norm).startswith("N")
