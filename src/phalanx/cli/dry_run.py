"""What `phalanx train --dry-run` prints: who the ranks are, what they hold, how much memory and how many steps. Nothing is started."""

from __future__ import annotations

from phalanx.core.config import DataConfig, Recipe
from phalanx.core.units import format_bytes, format_count, format_rate
from phalanx.data.tokenizer import parse_choice, read_tokenizer_file
from phalanx.plan.folding import GROUP_NAMES, Folding, resolve_folding
from phalanx.plan.layout import local_param, stage_params
from phalanx.plan.model import ModelSpec, flops_per_token, resolve_model
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.placement import plain_placement


def describe(recipe: Recipe, *, world: int) -> str:
    """The run of `recipe` on `world` ranks in a few lines. Raises `ConfigError` or `DataError` for what cannot run."""
    t = recipe.train
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer_vocab(recipe.data))
    folding = resolve_folding(
        recipe.folding, spec, world=world, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch
    )
    pipeline = make_pipeline(recipe.pipeline, spec, pp=folding.pp, seq_len=t.seq_len)
    parts = [
        [f"{recipe.run.name}: a dry run, nothing is started"],
        folding.explain().splitlines(),
        _groups(folding),
        pipeline.explain().splitlines() if folding.pp > 1 else [],
        _parameters(spec, folding, pipeline),
        _steps(recipe, spec, folding),
    ]
    return "\n".join(line for part in parts for line in part)


def tokenizer_vocab(config: DataConfig) -> int:
    """Tokens of the tokenizer, without preparing any text (a trained one may come out smaller, never larger)."""
    choice = parse_choice(config)
    if choice is None:
        return 257
    return choice if isinstance(choice, int) else read_tokenizer_file(choice, eos_token=config.eos_token).vocab_size


def _groups(folding: Folding) -> list[str]:
    """How many process groups there are; many names share one."""
    distinct = {group for name in GROUP_NAMES for group in folding.groups(name) if len(group) > 1}
    return [f"groups       {len(distinct)} process groups of more than one rank"]


def _parameters(spec: ModelSpec, folding: Folding, pipeline: Pipeline) -> list[str]:
    """What the rank with the most holds; without a pipeline all hold as much."""
    held = [_held(spec, folding, pipeline, rank) for rank in folding.group_of(0, "pp")]
    dense, experts = max(held, key=sum)
    most = "  per rank   " if len(set(held)) == 1 else "  at most    "
    return [
        f"parameters   {format_count(spec.num_params)}, {format_count(spec.active_params)} of them for each token",
        f"{most}{format_count(dense + experts)}: {format_count(dense)} dense, {format_count(experts)} of experts",
    ]


def _held(spec: ModelSpec, folding: Folding, pipeline: Pipeline, rank: int) -> tuple[int, int]:
    """Dense and expert parameters of a rank."""
    placement = plain_placement(max(1, spec.num_experts), folding)
    params = stage_params(spec, pipeline.stages.of_rank(folding.coord(rank, "pp")))
    local = [local_param(p, folding, placement, rank) for p in params]
    experts = sum(p.num_elements for p in local if p.param.family == "expert")
    return sum(p.num_elements for p in local) - experts, experts


def _steps(recipe: Recipe, spec: ModelSpec, folding: Folding) -> list[str]:
    t = recipe.train
    tokens = t.global_batch * t.seq_len
    per_rank = t.global_batch // (t.micro_batch * folding.dp)
    flops = flops_per_token(spec, t.seq_len)
    return [
        f"steps        {t.steps} of {t.global_batch} sequences x {t.seq_len} tokens, {format_count(t.steps * tokens)} tokens in all",
        f"  per rank   {per_rank} micro-batch{'es' if per_rank > 1 else ''} of {t.micro_batch} sequences a step",
        f"  work       {format_rate(flops * tokens, 'FLOP').removesuffix('/s')} a step",
        f"checkpoints  every {recipe.checkpoint.interval or t.steps} steps, "
        f"{format_bytes(spec.num_params * (24 if t.dtype == 'float64' else 12))} each, the last {recipe.checkpoint.keep_last} kept",
    ]
