"""Recipes and mappings: what is predicted is the recipe's own run, what is written is the mapping that was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.cli.predicting.arguments import model_named
from phalanx.core.config import PipelineConfig, Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe.dispatch import DispatchSpec, rows_of_source
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.recipe import run_problems
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import load_hardware, parse_cluster
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap
from phalanx.simulate.mapping.models import known_models
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.memory.activations import Local
from phalanx.simulate.search.best import search
from phalanx.simulate.search.space import Space, overlaps, pairs_pass
from phalanx.simulate.search.to_recipe import recipe_of_mapping
from phalanx.simulate.step.device_memory import memory_of, parameters_of_rank
from phalanx.simulate.step.stage_layers import contents, layers_of_stages, ranks_of_stages
from phalanx.simulate.step.timing import Prediction, predict

pytestmark = pytest.mark.unit
QWEN = """
[model]
preset = "qwen3-30b-a3b"
vocab = 151936
[train]
seq_len = 4096
global_batch = 256
micro_batch = 1
"""
PP = {"folding.ep": 8, "folding.pp": 8}


def read(tmp_path: Path, changes: dict[str, object], *, world: int = 64, device: str = "cuda") -> Recipe:
    path = tmp_path / "r.toml"
    path.write_text(f'{QWEN}\n[launch]\ndevice = "{device}"\nranks = {world}\n')
    words = [word for key, value in changes.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    return load_recipe(path, words, check=lambda r: run_problems(r, world=world, tokenizer_vocab=r.model.vocab))


def mapped(tmp_path: Path, changes: dict[str, object], *, world: int = 64, device: str = "cuda") -> Mapping:
    recipe = read(tmp_path, changes, world=world, device=device)
    return mapping_of_recipe(recipe, resolve_recipe(recipe), world=world)


# ---- a recipe's own run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x22b", "olmoe-1b-7b", "qwen2-57b-a14b"])
def test_layers_are_divided_as_a_run_divides_them(name: str) -> None:
    spec = PRESETS[name]
    job = Job(spec=spec, seq_len=4096, global_batch=64)
    for pp, schedule, virtual in (
        (2, "1f1b", 1),
        (4, "interleaved_1f1b", 2),
        (8, "1f1b", 1),
        (4, "zbv", 2),
        (8, "dualpipev", 2),
    ):
        if pp * virtual > spec.num_layers:
            continue
        config = PipelineConfig(schedule=schedule, virtual=virtual)  # type: ignore[arg-type]
        stages = make_pipeline(config, spec, pp=pp, seq_len=4096).stages
        mapping = Mapping(folding=make_folding(world=pp, pp=pp), schedule=schedule, virtual=virtual)
        assert layers_of_stages(job, mapping) == stages.counts
        assert ranks_of_stages(mapping) == tuple(stage.rank for stage in stages.stages)


def test_layers_that_a_recipe_gives_are_taken(tmp_path: Path) -> None:
    plain = mapped(tmp_path, PP)
    assert layers_of_stages(Job(spec=PRESETS["qwen3-30b-a3b"], seq_len=4096, global_batch=256), plain)[-1] < 6
    even = mapped(tmp_path, {**PP, "pipeline.layers": [6] * 8})
    assert even.stage_layers == (6,) * 8 and even.hash != plain.hash


def test_different_recipes_have_different_hashes(tmp_path: Path) -> None:
    looped = {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual": 2}
    eager = {"pipeline.schedule": "eager_1f1b"}
    drop = {"dispatch.policy": "drop"}
    recipes = [
        {},
        {"dispatch.overlap": "coarse:2"},
        {"dispatch.overlap": "coarse:4"},
        {"dispatch.overlap": "tiles"},
        {"dispatch.overlap": "fine"},
        {"dispatch.overlap": "auto"},
        {"dispatch.transport": "all_gather"},
        {"optim.zero": 0},
        {"router.force": "balanced"},
        {"router.force": "imbalanced"},
        {"router.force": "imbalanced", "router.force_skew": 0.5},
        drop,
        {**drop, "dispatch.capacity_factor": 0.5},
        {**drop, "dispatch.pad_to_capacity": True},
        {**drop, "dispatch.pad_to_capacity": True, "dispatch.capacity_factor": 4.0},
        looped,
        eager,
        {**eager, "pipeline.extra_warmup": [0] * 8},
        {"resilience.mode": "fast"},
        {"train.dtype": "float32"},
    ]
    hashes = [mapped(tmp_path, {**PP, **changes}).hash for changes in recipes]
    pairs = (("dp32.ep8", "dp32.ep8"), ("dp32.ep8", "dp32.ep4"), ("dp32.ep4", "dp32.ep8"), ("tp2.dp16.ep8", "dp32.ep8"))
    staged = [{"folding.stages": list(stages), "train.micro_batch": 2} for stages in pairs]
    hashes += [mapped(tmp_path, changes).hash for changes in staged]
    assert len(set(hashes)) == len(recipes) + len(staged)
    on_processors = [
        mapped(tmp_path, {**PP, **looped, **more}, device="cpu").hash for more in ({}, {"pipeline.pair_passes": True})
    ]
    assert len(set(on_processors)) == 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({**PP, "train.dtype": "float64"}, "train.dtype"),
        ({**PP, "resilience.slots_per_rank": 32}, "resilience.slots_per_rank"),
        ({**PP, "pipeline.schedule": "eager_1f1b", "pipeline.extra_warmup": "auto"}, "pipeline.extra_warmup"),
        ({"dispatch.overlap": "fused", "optim.bucket_mb": 0}, "dispatch.overlap"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match="(?s)on a cluster.*" + name.replace(".", r"\.")):
        mapped(tmp_path, changes)


def predicted(tmp_path: Path, changes: dict[str, object]) -> Prediction:
    recipe = read(tmp_path, {"folding.ep": 8, "router.force": "balanced", **changes})
    spec = resolve_recipe(recipe)
    return predict(job_of_recipe(recipe, spec), mapping_of_recipe(recipe, spec, world=64), parse_cluster("h100x64"))


def test_capacity_is_rows(tmp_path: Path) -> None:
    """Padding to four times the even share is four times the rows: time of experts and their activations; half of it halves them."""
    drop = {"dispatch.policy": "drop", "dispatch.pad_to_capacity": True}
    plain = predicted(tmp_path, {})
    four = predicted(tmp_path, {**drop, "dispatch.capacity_factor": 4.0})
    assert four.step.parts["experts"] > 2 * plain.step.parts["experts"]
    assert four.step.parts["a2a_inside"] > 3 * plain.step.parts["a2a_inside"]
    assert four.peak_bytes > plain.peak_bytes + 2e9
    half = predicted(tmp_path, {"dispatch.policy": "drop", "dispatch.capacity_factor": 0.5})
    assert half.step.parts["a2a_inside"] < 0.6 * plain.step.parts["a2a_inside"]
    same = predicted(tmp_path, {**drop, "dispatch.capacity_factor": 1.0})
    assert same.step.seconds == pytest.approx(plain.step.seconds, rel=0.01)


def test_capacity_bounds_the_load_of_a_learned_router() -> None:
    job = Job(spec=PRESETS["qwen3-30b-a3b"], seq_len=4096, global_batch=64)
    free = Mapping(folding=Folding(world=64, ep=64), routing=RouterModel(kind="learned"))
    load = free.load(job)
    capped = replace(free, drop=DispatchSpec(policy="drop", capacity_factor=1.05))
    assert load > 1.1 and capped.load(job) == pytest.approx(1.05, rel=0.01) and capped.rows_share(job) == 1
    wide = replace(free, drop=DispatchSpec(policy="drop", capacity_factor=10.0))
    assert wide.load(job) == load
    padded = replace(free, drop=DispatchSpec(policy="drop", capacity_factor=1.5, pad_to_capacity=True))
    assert padded.load(job) == 1 and padded.rows_share(job) == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("degrees", [{"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}])
def test_padded_capacity_of_whole_micro_batches_is_what_ranks_send(degrees: dict[str, int]) -> None:
    """Any rank may have all rows that an expert takes from the micro-batch, as far as it has tokens."""
    folding, spec = make_folding(world=4, **degrees), PRESETS["tiny"]
    drop = DispatchSpec(policy="drop", drop_scope="full_sequence", pad_to_capacity=True)
    local = Local(spec=spec, folding=folding, dispatch=drop, sequences=2, seq_len=32, item=4, recompute="none", lanes=1, rows_share=1.0)  # fmt: skip
    sharing = folding.tp * folding.cp
    rows = rows_of_source(drop, num_tokens=local.tokens, sharing=sharing, top_k=2, num_experts=8)
    assert rows == min(local.tokens, 64 * 2 // 8)
    assert local.sent == 8 * rows and local.held == local.slots * rows * local.sources


# ---- a mapping's own recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, *known_models()])
def test_a_recipe_is_of_the_model_that_was_searched_or_there_is_none(name: str) -> None:
    spec = model_named(name)
    job = Job(spec=spec, seq_len=256, global_batch=16)
    recipe, reasons = recipe_of_mapping(job, Mapping(folding=Folding(world=1)))
    if recipe is None:
        assert reasons and (spec.ffn_matrices != 3 or spec.vocab < 8192 or "no preset" in reasons[0]), reasons
        return
    again = resolve_recipe(recipe)
    fields = ["num_layers", "hidden", "num_heads", "vocab", "mla", "mtp_layers", "tied_embeddings", "num_moe_layers"]
    fields += ["num_experts", "top_k", "expert_ffn", "shared_ffn"] if spec.num_moe_layers else []
    assert [getattr(again, f) for f in fields] == [getattr(spec, f) for f in fields]
    if spec.num_moe_layers < spec.num_layers:
        assert again.dense_ffn == spec.dense_ffn


def test_most_models_have_a_recipe() -> None:
    none = [
        name
        for name in known_models()
        if recipe_of_mapping(
            Job(spec=model_named(name), seq_len=256, global_batch=16), Mapping(folding=Folding(world=1))
        )[0]
        is None
    ]
    assert all(model_named(name).ffn_matrices != 3 for name in none), none


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"overlap": Overlap(ep="pair")}, "pair_passes"),
        ({"overlap": Overlap(tp=True)}, "overlap.tp"),
        ({"dispatch": "dedup"}, "dispatch"),
        ({"sharding": "parameters"}, "sharding"),
        ({"recompute": "half"}, "recompute"),
    ],
)
def test_what_no_recipe_says_is_told(changes: dict[str, object], word: str) -> None:
    job = Job(spec=PRESETS["mixtral-8x7b"], seq_len=4096, global_batch=64)
    mapping = replace(Mapping(folding=Folding(world=8, ep=8)), **changes)  # type: ignore[arg-type]
    recipe, reasons = recipe_of_mapping(job, mapping)
    assert recipe is None and any(word in reason for reason in reasons), reasons


def test_what_recipes_say_comes_back() -> None:
    job = Job(spec=PRESETS["mixtral-8x7b"], seq_len=4096, global_batch=64)
    plain = Mapping(folding=make_folding(world=16, pp=2, ep=8), routing=RouterModel(kind="learned"))
    drop = DispatchSpec(policy="drop", capacity_factor=1.5, pad_to_capacity=True)
    for changes in (
        {"overlap": Overlap(ep="chunks", chunks=2)},
        {"overlap": Overlap(dp=False)},
        {"schedule": "zbv", "virtual": 2, "recompute": "full"},
        {"schedule": "eager_1f1b", "extra_warmup": (0, 0)},
        {"stage_layers": (20, 12)},
        {"drop": drop},
        {"micro_batch": 2},
    ):
        mapping = replace(plain, **changes)  # type: ignore[arg-type]
        recipe, reasons = recipe_of_mapping(job, mapping)
        assert recipe is not None, reasons
        assert mapping_of_recipe(recipe, resolve_recipe(recipe), world=16) == mapping


def test_chunks_and_tiles_beside_pairs(tmp_path: Path) -> None:
    """On processors of the same rates: the partner's computing hides what chunks and tiles leave."""
    cluster = parse_cluster("h100x64")
    processors = replace(cluster, hardware=replace(cluster.hardware, sms=None, threads=8))
    found, looped = (
        {},
        {"folding.pp": 4, "folding.ep": 16, "pipeline.schedule": "interleaved_1f1b", "pipeline.virtual": 2},
    )
    for way in ("serial", "coarse:2", "auto"):
        for pairs in (False, True):
            changes = {**looped, "dispatch.overlap": way, "pipeline.pair_passes": pairs, "router.force": "balanced"}
            recipe = read(tmp_path, {**changes, "resilience.heal": False}, device="cpu")
            spec = resolve_recipe(recipe)
            mapping = mapping_of_recipe(recipe, spec, world=64, cluster=processors)
            assert mapping.overlap.paired == (pairs and way != "serial")
            found[way, pairs] = predict(job_of_recipe(recipe, spec), mapping, processors)
    for way in ("serial", "coarse:2", "auto"):
        assert found[way, True].step.seconds < found[way, False].step.seconds
    assert len({p.mapping.hash for p in found.values()}) == len(found)
    again, reasons = recipe_of_mapping(found["coarse:2", True].job, found["coarse:2", True].mapping, on_device=False)
    assert again is not None and again.pipeline.pair_passes and again.dispatch.overlap == "coarse:2", reasons


def test_processors_pair_passes_and_are_not_elastic_unasked(tmp_path: Path) -> None:
    job = Job(spec=PRESETS["laptop"], seq_len=256, global_batch=32)
    pair = Mapping(folding=Folding(world=4, ep=4), overlap=Overlap(ep="pair"), routing=RouterModel(kind="learned"))
    recipe, reasons = recipe_of_mapping(job, pair, on_device=False)
    assert recipe is not None, reasons
    assert recipe.pipeline.pair_passes and recipe.launch.device == "cpu" and recipe.resilience.heal is False
    assert mapping_of_recipe(recipe, resolve_recipe(recipe), world=4) == pair
    path = tmp_path / "pair.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path, [], check=lambda r: run_problems(r, world=4, tokenizer_vocab=r.model.vocab)) == recipe


def test_fp8_winners_have_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.toml"
    command = ["search", "--model", "olmoe-1b-7b", "--cluster", "h100x8", "--batch", "16", "--exact", "3"]
    assert main([*command, "--precision", "fp8", "--recipe", str(out)]) == 2
    assert "precision = fp8" in capsys.readouterr().err and not out.exists()
    assert main([*command, "--recipe", str(out)]) == 0
    assert f"{out}: number 1" in capsys.readouterr().out


# ---- what is searched -----------------------------------------------------------------------------------------------------------


def test_overlaps_are_those_that_a_recipe_can_say() -> None:
    device = load_hardware("h100")
    processors = replace(device, sms=None, threads=1)
    folding, space = Folding(world=8, ep=8), Space()
    assert [(o.ep, o.chunks) for o in overlaps(Overlap(), folding, space, device)] == [
        ("none", 4),
        ("chunks", 2),
        ("chunks", 4),
        ("auto", 4),
    ]
    assert {o.ep for o in overlaps(Overlap(), folding, space, processors)} == {"none", "chunks", "pair"}
    assert [o.ep for o in overlaps(Overlap(), Folding(world=8), space, processors)] == ["none"]


def test_pairs_only_where_they_pay() -> None:
    job = Job(spec=PRESETS["laptop"], seq_len=256, global_batch=32)
    processors = replace(load_hardware("h100"), sms=None, threads=1)
    pair = Mapping(folding=make_folding(world=4, pp=4), overlap=Overlap(ep="pair"))
    assert not pairs_pass(pair, ("1f1b", 1), job, processors)  # plain 1F1B has no slack
    assert pairs_pass(replace(pair, folding=make_folding(world=4, ep=4)), ("1f1b", 1), job, processors)
    two = replace(pair, folding=make_folding(world=2, pp=2))
    assert pairs_pass(two, ("interleaved_1f1b", 2), job, processors)


def test_chunks_cost_latencies_and_weights() -> None:
    """Where nothing is left to hide, more chunks are slower: each reads all weights."""
    job = Job(spec=PRESETS["qwen3-30b-a3b"], seq_len=512, global_batch=64)
    plain = Mapping(folding=Folding(world=8, ep=8))
    cluster = parse_cluster("h100x8")
    parts = [predict(job, replace(plain, overlap=Overlap(ep="chunks", chunks=n)), cluster).step.parts for n in (2, 16)]
    assert parts[1]["experts"] > parts[0]["experts"] > predict(job, plain, cluster).step.parts["experts"]


def test_the_front_says_how_far_it_is_whole() -> None:
    job = Job(spec=replace(PRESETS["mixtral-8x22b"], num_layers=8), seq_len=4096, global_batch=32)
    cluster, space = parse_cluster("h100x16"), Space(ep_overlaps=("none",), micro_batches=(1,))
    few, every = (search(job, cluster, space=space, keep=keep) for keep in (2, 1000))
    assert few.pareto_until_s < every.pareto_until_s == float("inf")
    near = [(c.seconds, c.peak_bytes) for c in few.pareto if c.seconds <= few.pareto_until_s]
    assert near == [(c.seconds, c.peak_bytes) for c in every.pareto if c.seconds <= few.pareto_until_s]


@pytest.mark.parametrize(
    ("pp", "schedule", "virtual"), [(1, "1f1b", 1), (2, "zbv", 2), (2, "dualpipev", 2), (2, "1f1b", 1)]
)
def test_a_tied_table_is_held_once_where_both_ends_are_on_a_rank(pp: int, schedule: str, virtual: int) -> None:
    spec = replace(PRESETS["qwen3-30b-a3b"], tied_embeddings=True)
    job = Job(spec=spec, seq_len=4096, global_batch=64)
    mapping = Mapping(folding=make_folding(world=pp, pp=pp), schedule=schedule, virtual=virtual)
    ends = [content.tables(tied=True) for content in contents(job, mapping)]
    assert ends == ([1] if pp == 1 else [1, 0] if virtual == 2 else [1, 1])
    held = sum(sum(parameters_of_rank(job, mapping, content)) for content in contents(job, mapping))
    assert held == pytest.approx(spec.num_params + (sum(ends) - 1) * spec.vocab * spec.hidden, rel=1e-3)
    assert len(memory_of(job, mapping)) == pp
