"""Padding behind the text of a sequence: a step learns what it would learn without, on every mapping. More of these: `phalanx verify`, whose packed cases have padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.core.config import PipelineConfig
from phalanx.data.loader import MicroBatch
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import TokenBatch
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.stage_foldings import AnyFolding, parse_stages
from phalanx.train.build import token_batch
from phalanx.verify.compare import errors
from phalanx.verify.numbers import microbatch
from phalanx.verify.reference import alone, model_boxes, run_step
from phalanx.verify.session import CaseTask, VerifyJob, run_job
from phalanx.verify.setups import DISPATCH, FACTORS, PLAIN_ROW, SEQ_LEN, Case, Setup, setup_of

PADDING = 12


def setup(**changes: Any) -> Setup:
    row = {**PLAIN_ROW, "dispatch": "dropless", "travel": "all_to_all", "zero": 1, "accumulation": 1, "z_loss": 0.01}
    return setup_of({**row, **changes})


def stepped(made: Setup, batches: list[TokenBatch]) -> tuple[dict[str, Any], list[Any]]:
    """What a step of one rank tells, and gradients and state after it."""
    parts = alone(made, num_microbatches=len(batches), dtype=torch.float64)
    result, gradients = run_step(parts, batches)
    return dataclasses.asdict(result), [*gradients.boxes(), *parts.state.boxes(), *model_boxes(parts)]


def assert_same(got: tuple[dict[str, Any], list[Any]], want: tuple[dict[str, Any], list[Any]]) -> None:
    for name in ("loss", "aux_loss", "z_loss", "grad_norm", "entropy"):
        assert got[0][name] == pytest.approx(want[0][name], rel=1e-12)
    assert np.array_equal(got[0]["counts_LE"], want[0]["counts_LE"]) and got[0]["dropped"] == want[0]["dropped"]
    wanted = {box.name: box.tensor for box in want[1]}
    assert max(errors(got[1], wanted, floor=1e-8 * want[0]["grad_norm"]).values()) < 1e-12
    biases = [box for box in got[1] if box.name.startswith("buffer/")]
    assert all(torch.equal(box.tensor, wanted[box.name]) for box in biases)


@pytest.mark.parametrize("scope", FACTORS["aux"])
@pytest.mark.parametrize("routing", ["softmax-renorm", "groups-bias"])
def test_a_step_is_that_of_the_text_alone(routing: str, scope: str) -> None:
    """Losses, entropy, counts, every gradient, and the experts' biases after the step. With two micro-batches, so that counts of the whole step come first."""
    made = setup(routing=routing, aux=scope, packed=False)
    short, padded = [], []
    for j in range(2):
        batch = microbatch(made, j)
        cut = (x[:1, : SEQ_LEN - PADDING] for x in (batch.tokens_BS, batch.labels_BS, batch.positions_BS))
        tokens, labels, positions = (x.clone() for x in cut)
        labels[:, -1] = IGNORE
        short.append(TokenBatch(tokens, labels, positions, ((SEQ_LEN - PADDING,),)))
        behind = torch.zeros(1, PADDING, dtype=torch.int64)
        filled = (torch.cat((x, y), 1) for x, y in ((tokens, behind), (labels, behind + IGNORE), (positions, behind)))
        tokens, labels, positions = filled
        padded.append(TokenBatch(tokens, labels, positions, ((SEQ_LEN - PADDING, PADDING),), padding=(PADDING,)))
    assert_same(stepped(made, padded), stepped(made, short))


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_nothing_depends_on_what_stands_there(dispatch: str) -> None:
    """All alike, as it is, or anything: text is routed, dropped and learnt the same."""
    made = setup(dispatch=dispatch)
    batch = microbatch(made, 0)
    assert sum(batch.padding) > 3
    other = batch.tokens_BS.clone()
    for b, length in enumerate(batch.padding):
        other[b, SEQ_LEN - length :] = torch.arange(length) + 5
    assert_same(stepped(made, [dataclasses.replace(batch, tokens_BS=other)]), stepped(made, [batch]))


STAGED = parse_stages(["tp2.etp2", "dp2.ep2"])
MAPPINGS: list[tuple[AnyFolding, dict[str, Any]]] = [
    (STAGED, {"aux": "sequence", "dispatch": "drop-prob-full"}),
    (Folding(world=4, tp=2, cp=2, ep=4), {"aux": "micro_batch", "dispatch": "drop-prob-sub", "travel": "coarse:2"}),
    (Folding(world=4, cp=2, ep=2), {"aux": "sequence", "dispatch": "drop-pos-full", "travel": "fine", "recompute": "full"}),
    (Folding(world=4, tp=2, ep=4), {"aux": "global_batch", "dispatch": "drop-pos-full-pad", "travel": "coarse:2", "accumulation": 1}),
    (Folding(world=4, ep=4), {"aux": "micro_batch", "travel": "fine", "recompute": "full"}),
    (Folding(world=4, tp=2, ep=2), {"aux": "sequence", "travel": "all_gather"}),
    (Folding(world=4, ep=2, etp=2), {"aux": "global_batch", "travel": "coarse:2", "routing": "groups-bias"}),
    (Folding(world=4, cp=4, ep=2), {"aux": "global_batch", "dispatch": "drop-prob-pad", "travel": "all_gather", "routing": "groups-bias"}),
]  # fmt: skip


@pytest.mark.core
@pytest.mark.ranks
def test_every_way_of_rows_has_the_step_of_one_rank() -> None:
    """Micro-batches with and without padding side by side, and ranks that have none of it."""
    tasks = []
    for folding, changes in MAPPINGS:
        made = setup(**{"accumulation": 2, **changes})
        pipe = PipelineConfig(schedule="1f1b") if folding.pp > 1 else PipelineConfig()
        tasks.append(CaseTask(Case(setup=made, folding=folding, pipe=pipe)))
    for report in run_job(VerifyJob(tasks=tasks, world=4, dtype=torch.float64)):
        assert not report.failures, f"{report.task.case.label}: {report.failures}"
        assert 0 < report.gradient_error < 1e-12, report.task.case.label


@pytest.mark.parametrize(
    "folding",
    [Folding(world=4, tp=2, cp=2), Folding(world=2, ep=2), parse_stages(["tp1", "dp2.ep2", "tp2.cp2"])],
    ids=lambda folding: folding.label(),
)
def test_every_rank_knows_its_rows_of_text_and_how_many_all_have(folding: Any) -> None:
    """From the loader's micro-batch on, also where the ranks of a stage share sequences."""
    lengths, length = np.array([5, 16, 0, 11]), 16
    grid = np.arange(4 * length).reshape(4, length)
    micro = MicroBatch(
        index=0, tokens=grid, labels=grid, positions=grid, segments=((length,),) * 4,
        padding=tuple((length - lengths).tolist()), sample_ids=np.arange(4),
    )  # fmt: skip
    is_text_N = torch.from_numpy(np.arange(length) < lengths[:, None]).flatten()
    for rank in range(folding.world):
        batch = token_batch(micro, torch.device("cpu"), folding=folding, rank=rank)
        index_T = torch.arange(grid.size) if batch.token_index_T is None else batch.token_index_T
        assert batch.text is not None and batch.text.tokens == lengths.sum()
        assert torch.equal(batch.text.is_text_T, is_text_N[index_T])
        own = np.unique(index_T.numpy() // length)
        assert batch.text.tokens_B.tolist() == np.maximum(lengths[own], 1).tolist()
        full = dataclasses.replace(micro, padding=(0,) * 4)
        assert token_batch(full, torch.device("cpu"), folding=folding, rank=rank).text is None
