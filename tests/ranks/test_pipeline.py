"""Pipelines: tied tables, divisions by hand, equal bits, evaluation, memory, planted faults and refusals. `phalanx verify` holds every schedule against one rank on many mappings."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from pipeline_help import PIPELINES, PipelineCase, batches_of, build, findings, reference, report, verify

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PlanError, RunError
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.decoder import DecoderOutput
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.stages import Stage
from phalanx.plan.model.model import RouterSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import StepParts, eval_loss, train_step
from phalanx.verify.numbers import microbatch
from phalanx.verify.reference import Reference, context, run_step
from phalanx.verify.setups import Setup, small_model
from ranks import run_ranks

pytestmark = pytest.mark.ranks


ROUTER = RouterSpec(
    score="sigmoid", renormalize=True, bias_rate=1e-3, aux_loss=0.1, aux_scope="global_batch", z_loss=0.01
)


def chosen(config: PipelineConfig, *, pp: int = 2, num_microbatches: int = 4, **model: Any) -> PipelineCase:
    spec = small_model("pipeline", **{"num_layers": 4, "router": ROUTER, **model})
    setup = Setup(label="chosen", spec=spec, dispatch=DispatchSpec())
    return PipelineCase(
        setup=setup, folding=make_folding(world=pp, pp=pp), config=config, num_microbatches=num_microbatches
    )


def test_tied_tables_on_one_rank_on_two_and_with_one_microbatch() -> None:
    """At the ends of a V both stages are rank 0's, elsewhere two ranks share the table; a single micro-batch brings it two gradients."""
    configs = [PIPELINES[i] for i in (1, 5, 7, 8, 9)]
    verify(2, [chosen(c, tied_embeddings=True, num_microbatches=m) for c in configs for m in (1, 3)])


def test_uneven_divisions_by_hand() -> None:
    divisions = [
        PipelineConfig(layers=(0, 4)),
        PipelineConfig(layers=(4, 0), schedule="zero_bubble"),
        PipelineConfig(layers=(0, 3, 1, 0), virtual=2),
        PipelineConfig(layers=(1, 2, 1, 0), schedule="zbv"),
    ]
    verify(2, [chosen(config, dense_layers=2, dense_ffn=48, tied_embeddings=True) for config in divisions])


def _bits(rank: int, cache: GroupCache, case: PipelineCase) -> dict[str, torch.Tensor]:
    parts = build(case, rank, cache)
    _, gradients = run_step(parts, batches_of(case, rank))
    return {box.name: box.tensor.clone() for box in gradients.boxes()}


@pytest.mark.core
def test_schedules_of_one_division_make_the_same_bits() -> None:
    """Weight gradients put off or not, micro-batches interleaved or not: accumulated in one order."""
    vee = [config for config in PIPELINES if config.schedule in ("zbv", "dualpipev")]
    twice = [config for config in PIPELINES if config.virtual == 2]
    once = [config for config in PIPELINES if config not in (*vee, *twice)]
    assert {"1f1b", "eager_1f1b", "eager_1f1b_split"} <= {config.schedule for config in once}
    for configs in (once, twice, vee):
        first, *rest = [run_ranks(2, _bits, chosen(config, num_microbatches=5)) for config in configs]
        for other in rest:
            for a, b in zip(first, other, strict=True):
                assert a.keys() == b.keys()
                assert [name for name in a if not torch.equal(a[name], b[name])] == []


def _evaluated(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[float, int]:
    parts = build(case, rank, cache)
    return eval_loss(parts, batches_of(case, rank)[:3])


def test_evaluation_is_that_of_one_rank_and_known_everywhere() -> None:
    case = chosen(PIPELINES[1])
    alone = dataclasses.replace(case, folding=make_folding(world=1), config=PipelineConfig())
    want, tokens = _evaluated(0, GroupCache(), alone)
    for config in (PIPELINES[1], PIPELINES[5], PIPELINES[7]):
        for loss, counted in run_ranks(2, _evaluated, dataclasses.replace(case, config=config)):
            assert loss == pytest.approx(want, rel=1e-13) and counted == tokens


# ---- memory ---------------------------------------------------------------------------------------------------------------------


class _Watched:
    """Runs the stages and counts (stage, micro-batch) pairs of which some saved activation is alive."""

    def __init__(self, model: Any) -> None:
        self.model, self.now = model, (-1, -1)
        self.alive: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        self.now = (stage.index, info.microbatch)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
            out: DecoderOutput = self.model.run_stage(stage, x_TH, batch, info)
        self.most = max(self.most, len(set(self.alive.values())))
        return out

    def _pack(self, tensor: torch.Tensor) -> Any:
        held = _Held(tensor)
        self.alive[held] = self.now
        return held


class _Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def watch_activations(model: Any) -> _Watched:
    """For tests of other pipelines."""
    return _Watched(model)


def _most_alive(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[int, int, int]:
    parts = build(case, rank, cache)
    watched: Any = _Watched(parts.model)
    run_step(dataclasses.replace(parts, model=watched), batches_of(case, rank))
    plan = parts.pipeline.plan(case.num_microbatches)
    return watched.most, plan.schedule.peak_live[rank], len(set(watched.alive.values()))


@pytest.mark.parametrize("config", [PIPELINES[i] for i in (0, 1, 5, 8, 10)], ids=lambda c: f"{c.schedule}-{c.virtual}")
def test_no_more_micro_batches_are_alive_than_planned(config: PipelineConfig) -> None:
    case = chosen(config, num_microbatches=6)
    for rank, (most, planned, left) in enumerate(run_ranks(2, _most_alive, case)):
        assert most == planned and left == 0
        if config.schedule == "1f1b":
            assert planned == 2 - rank


# ---- faults ---------------------------------------------------------------------------------------------------------------------


class _OldWeights:
    """On one rank the layers of a pass use the weights of the step before."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.old = {name: p.detach() * 0.999 for name, p in model.named_parameters() if name.startswith("layers.")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        if info.microbatch != 1:
            out: DecoderOutput = self.model.run_stage(stage, x_TH, batch, info)
            return out
        held = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in self.old}
        self._write(self.old)
        out = self.model.run_stage(stage, x_TH, batch, info)
        self._write(held)
        return out

    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, p in self.model.named_parameters():
            if name in values:
                p.data = values[name].clone()


class _SwappedLabels:
    """On one stage two micro-batches change places: positions, documents and labels of the other one."""

    def __init__(self, model: Any, batches: list[TokenBatch]) -> None:
        self.model, self.batches = model, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _other(self, batch: TokenBatch, info: ForwardInfo) -> TokenBatch:
        return self.batches[{0: 1, 1: 0}.get(info.microbatch, info.microbatch)]

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        out: DecoderOutput = self.model.run_stage(stage, x_TH, self._other(batch, info), info)
        return out

    def cross_entropy_sum(self, hidden_TH: torch.Tensor, batch: TokenBatch, info: ForwardInfo) -> torch.Tensor:
        out: torch.Tensor = self.model.cross_entropy_sum(hidden_TH, self._other(batch, info), info)
        return out


def _faulty(rank: int, cache: GroupCache, case: PipelineCase, want: Reference, fault: str, culprit: int) -> list[str]:
    def alter(parts: StepParts) -> StepParts:
        if rank != culprit:
            return parts
        faulty: Any = {
            "old weights": lambda: _OldWeights(parts.model),
            "swapped": lambda: _SwappedLabels(parts.model, batches_of(case, rank)),
        }[fault]()
        return dataclasses.replace(parts, model=faulty)

    return findings([report(rank, cache, case, want, alter)])


@pytest.mark.core
@pytest.mark.parametrize("fault", ["old weights", "swapped"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_planted_faults_are_found(fault: str, culprit: int) -> None:
    case = chosen(PIPELINES[1], num_microbatches=3)
    case = dataclasses.replace(case, setup=dataclasses.replace(case.setup, packed=True))
    want = reference(case)
    assert any(run_ranks(2, _faulty, case, want, fault, culprit))
    assert run_ranks(2, _faulty, case, want, fault, 9) == [[], []]


def _poisoned(rank: int, cache: GroupCache, case: PipelineCase) -> tuple[str, bool]:
    """A weight of the second rank is not a number."""
    parts = build(case, rank, cache)
    if rank == 1:
        with torch.no_grad():
            next(p for name, p in parts.model.named_parameters() if name.endswith("moe.router.weight"))[0, 0] = (
                torch.nan
            )
    before = [box.tensor.clone() for box in parts.state.boxes()]
    with pytest.raises(RunError) as caught:
        train_step(parts, batches_of(case, rank), step=0, lr=0.1)
    return str(caught.value), all(torch.equal(a, b.tensor) for a, b in zip(before, parts.state.boxes(), strict=True))


@pytest.mark.parametrize("config", [PIPELINES[1], PIPELINES[3]], ids=lambda c: c.schedule)
def test_a_number_that_is_not_finite_on_one_stage_ends_the_step_on_all(config: PipelineConfig) -> None:
    told = run_ranks(2, _poisoned, chosen(config, num_microbatches=2))
    assert told[0][0] == told[1][0] and all(unchanged for _, unchanged in told)
    assert "the gradient is not finite" in told[0][0] and " on rank " in told[0][0]


def _without_embedding_sum(rank: int, cache: GroupCache, case: PipelineCase, want: Reference) -> list[str]:
    def alter(parts: StepParts) -> StepParts:
        part = parts.buffers._parts.get("dense_tied")
        if part is not None:
            part.layout = dataclasses.replace(
                part.layout, rule=dataclasses.replace(part.layout.rule, sum_over=("dp_cp",))
            )
        return parts

    case = dataclasses.replace(case, setup=dataclasses.replace(case.setup, buckets=False))
    return findings([report(rank, cache, case, want, alter)])


def test_a_tied_table_that_is_not_summed_is_found() -> None:
    case = chosen(PIPELINES[1], tied_embeddings=True)
    found = run_ranks(2, _without_embedding_sum, case, reference(case))
    assert all(any("embedding.weight" in text for text in of_rank) for of_rank in found)


def _other_groups(rank: int, cache: GroupCache, case: PipelineCase) -> None:
    groups = build_groups(case.folding, rank=rank, cache=cache)  # first and last rank share the table
    with pytest.raises(PlanError, match=r"do not share the embedding"):
        assemble(
            context(case.setup, groups, Collectives(), dtype=torch.float64),
            optim=case.setup.optim,
            num_microbatches=2,
            pipeline=case.pipeline,
        )


def test_groups_of_another_pipeline_are_refused() -> None:
    run_ranks(2, _other_groups, chosen(PIPELINES[7], tied_embeddings=True))


def _different_shapes(rank: int, cache: GroupCache, case: PipelineCase) -> None:
    parts = build(case, rank, cache)
    whole = microbatch(case.setup, 0)
    short = TokenBatch(whole.tokens_BS[:1], whole.labels_BS[:1], whole.positions_BS[:1], whole.segments[:1])
    with pytest.raises(ValueError, match="a pipeline needs one shape for all"):
        train_step(parts, [whole, short], step=0, lr=0.1)


def test_micro_batches_of_different_sizes_are_refused() -> None:
    run_ranks(2, _different_shapes, chosen(PIPELINES[1]))
