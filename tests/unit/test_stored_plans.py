"""Plans and predictions of a fixed list of inputs, against what is stored in tests/oracles/stored_plans.json: a refactoring that changes one of them is seen here.

A plan is stored as the hash of its values in their order (names of classes and fields do not count), a prediction as its numbers. Where a change of a plan or of a digit is meant, renew
the file and say in the commit what changed and why:

    python tests/unit/test_stored_plans.py
"""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.core.config import (
    DispatchConfig,
    FoldingConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    Recipe,
    ResilienceConfig,
    RouterConfig,
    TrainConfig,
)
from phalanx.plan.layout import flat_layouts, stage_params
from phalanx.plan.layout.mesh import read_layout
from phalanx.plan.mapping import Folding, legal_foldings, plain_placement
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe import DispatchPlan, plan_dispatch, plan_local_dispatch, plan_static_dispatch
from phalanx.plan.moe.overlap import CANDIDATES
from phalanx.plan.moe.overlap.prediction.bytes import choose_transport, traffic_of, wire_bytes
from phalanx.plan.moe.overlap.prediction.choose import Chooser
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost
from phalanx.plan.moe.overlap.tiles.plan import backward_of, plan_overlap
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.plan.pipeline import make_pipeline
from phalanx.plan.pipeline.schedule.make import SCHEDULES, make_schedule
from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.migration import plan_migration
from phalanx.plan.placement.search.plan import plan_placement, rule_placement
from phalanx.plan.placement.search.replicas import replica_counts, zipf_loads
from phalanx.plan.reshard import Move, equal_hosts, plan_reshard
from phalanx.simulate import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.memory import estimate_memory
from phalanx.simulate.program import oracle_of, programs_of_recipe, run_programs
from phalanx.simulate.search import Space, search
from phalanx.simulate.step import predict

pytestmark = [pytest.mark.unit, pytest.mark.core]
STORED = Path(__file__).resolve().parents[1] / "oracles" / "stored_plans.json"
TINY = PRESETS["tiny"]
Made = Iterator[tuple[str, Any]]


# ---- plans ----------------------------------------------------------------------------------------------------------------------


def values(of: Any) -> Any:
    """What a plan consists of, without a name of a class or a field."""
    if dataclasses.is_dataclass(of) and not isinstance(of, type):
        return [values(getattr(of, field.name)) for field in dataclasses.fields(of)]
    if isinstance(of, Mapping):
        return [[values(key), values(value)] for key, value in of.items()]
    if isinstance(of, set | frozenset):
        return sorted(map(values, of))
    if isinstance(of, np.ndarray | np.generic):
        return of.tolist()
    return [values(one) for one in of] if isinstance(of, list | tuple | range) else of


def digest(plan: Any) -> str:
    """Of all its values."""
    return hashlib.sha256(json.dumps(values(plan)).encode()).hexdigest()[:16]


def models() -> Made:
    """What checkpoints know a model by."""
    yield from ((name, spec.hash) for name, spec in PRESETS.items())


def foldings() -> Made:
    """All that are legal over 24 ranks, and who is in which group of some."""
    yield "legal", list(legal_foldings(24, PRESETS["qwen3-30b-a3b"], seq_len=4096))
    for sizes in ({"tp": 2, "ep": 4}, {"cp": 2, "pp": 2, "ep": 4, "etp": 2}, {"tp": 4, "pp": 4, "etp": 4}):
        folding = Folding(world=16, **sizes)
        yield folding.label(), [(name, folding.groups(name)) for name in folding.group_names]


def layouts() -> Made:
    """What each rank holds of parameters and optimizer state."""
    for name, sizes in {"tp2 ep4": {"tp": 2, "ep": 4}, "pp2 ep2 etp2": {"pp": 2, "ep": 2, "etp": 2}}.items():
        folding = Folding(world=8, **sizes)
        stages = make_pipeline(PipelineConfig(), TINY, pp=folding.pp, seq_len=32).stages
        for options in ({"zero": 0}, {"zero": 1, "holders": 2}, {"zero": 1, "bucket_elements": 5000}):
            ranks = [
                flat_layouts(
                    stage_params(TINY, stages.of_rank(folding.coord(rank, "pp"))),
                    folding,
                    plain_placement(TINY.num_experts, folding),
                    rank,
                    **options,  # type: ignore[arg-type]
                )
                for rank in range(8)
            ]
            held = [
                [[of.num_shards, of.shard_index, of.shard_length, of.length, [of.params, of.holders]] for of in mine.values()]
                for mine in ranks
            ]  # fmt: skip
            yield f"{name}, {options}", held


def routed(ep: int, etp: int, *, num_experts: int = 16) -> Any:
    """(P, E) rows, uneven."""
    return np.random.default_rng(7).integers(0, 90, (ep * etp, num_experts)) ** 2 // 30


def dispatches() -> Iterator[tuple[str, DispatchPlan]]:
    """Every expert once, with replicas, with replicas of the sender's own first, and padded."""
    plain, twice = list(range(16)), [*range(16), *range(8), 3, 3, 3, 3, 5, 5, 9, 9]
    yield "plain", plan_dispatch(routed(4, 2), plain, ep=4, etp=2)
    yield "replicas", plan_dispatch(routed(4, 1), twice, ep=4, etp=1)
    yield "local", plan_local_dispatch(routed(4, 1), twice, ep=4, etp=1, host_of_ep=(0, 0, 1, 1), unit_rows=16)
    yield "static", plan_static_dispatch(48, plain, ep=4, etp=2)


def overlaps() -> Made:
    """Orders of tiles there and back, with and without gateways, who sends which bytes, and the schedules that are chosen."""
    schedules = (
        TileSchedule(),
        TileSchedule(parts=3, order="own_first", blocks=2),
        TileSchedule(parts=4, order="arrival", own_before=0.4, hot_first=True),
    )
    for name, dispatch in dispatches():
        size = dispatch.ep * dispatch.etp
        for schedule in schedules:
            plans = [plan_overlap(dispatch, schedule, rank=rank, tile_rows=64) for rank in range(size)]
            yield f"{name}, {schedule.order}", [plans, [backward_of(plan) for plan in plans]]
        hosts = [rank * 2 // size for rank in range(size)]
        if dispatch.etp == 1:
            ways = {"host_of_rank": hosts, "through_hosts": True, "has_shared": True, "tile_rows": 32}
            plans = [plan_overlap(dispatch, schedules[1], rank=rank, **ways) for rank in range(size)]  # type: ignore[arg-type]
            yield f"{name}, through hosts", [plans, [backward_of(plan) for plan in plans]]
        traffic = traffic_of(dispatch, host_of_rank=hosts)
        wires = [wire_bytes(traffic, route, row_bytes=4096) for route in ("all_to_all", "all_gather", "dedup")]  # type: ignore[arg-type]
        yield f"{name}, bytes", [wires, choose_transport(traffic, row_bytes=4096)]
        shape = LayerShape(tokens=512, hidden=1024, ffn=512, element_bytes=2, slots=dispatch.slots_per_rank)
        for bytes_per_s in (1e8, 4e9):
            cost = OverlapCost(
                latency_s=2e-5,
                bytes_per_s=bytes_per_s,
                flops_by_rows=((16, 2e11), (128, 9e11), (512, 2e12)),
                op_s=4e-6,
                block_s=8e-6,
                interference=0.1,
            )
            chosen = Chooser(shape, cost, CANDIDATES, tile_rows=64)(dispatch, wires[0])
            yield f"{name}, chosen at {bytes_per_s:g}", chosen


def reshards() -> Made:
    """Messages of layouts to other layouts, within and between hosts."""
    cases = [("4 S0R", "2x2 S0S1"), ("2x4 S0R", "8 RS0"), ("4 RS0", "6 S0R"), ("2x2 RS01", "4 RR")]
    for src, dst in cases:
        a, b = read_layout(src, (48, 24)), read_layout(dst, (48, 24), first_rank=2)
        world = max(*a.ranks, *b.ranks) + 1
        moves = [Move(name=name, itemsize=4, src=a, dst=b) for name in ("w", "v")]
        for method in ("best", "greedy"):
            plan = plan_reshard(
                moves, equal_hosts([rank // 4 for rank in range(world)]), method=method, least_bytes=256
            )
            yield (
                f"{src} -> {dst}, {method}",
                [json.loads(plan.to_json()), [plan.program(rank) for rank in range(world)]],
            )


def placements() -> Made:
    """Replicas and hosts of experts, those of simple rules, and the way from one placement to another."""
    loads = zipf_loads(3, 16, skew=0.8, seed=1)
    for hosts, slots, racks in ((4, 8, 0), (6, 6, 3)):
        pool = equal_pool(hosts, slots, num_racks=racks)
        counts = replica_counts(loads, pool, floor=2)
        made = plan_placement(counts, pool, loads)
        ruled = [rule_placement(rule, loads, counts, pool) for rule in ("spread", "compact", "least_loaded")]
        yield f"{hosts} hosts of {slots}", [counts.counts, made.copies, made.slots, [one.slots for one in ruled]]
        yield f"{hosts} hosts of {slots}, from spread", plan_migration(ruled[0], made, rename=True).fetches


def schedules() -> Made:
    """Order of passes of every schedule, and what crosses between stages."""
    for name in SCHEDULES:
        for pp, microbatches in ((2, 4), (4, 12)):
            virtual = SCHEDULES[name].virtual or (2 if name == "interleaved_1f1b" else 1)
            schedule = make_schedule(name, pp=pp, virtual=virtual, num_microbatches=microbatches)
            yield f"{name} of {pp}", [schedule.actions, schedule.rank_of_stage, schedule.max_live]
    for name in ("1f1b", "zbv", "dualpipev"):
        pipeline = make_pipeline(PipelineConfig(schedule=name), PRESETS["qwen3-30b-a3b"], pp=4, seq_len=4096)  # type: ignore[arg-type]
        yield f"layers of {name}", pipeline.stages.counts


# ---- runs ---------------------------------------------------------------------------------------------------------------------------


def recipe_of(model: str, *, batch: int, micro: int = 1, seq: int = 4096, **sections: Any) -> Recipe:
    """A recipe of a preset with other settings in some sections."""
    train = {"seq_len": seq, "global_batch": batch, "micro_batch": micro, **sections.pop("train", {})}
    kinds: dict[str, Callable[..., Any]] = {
        "folding": FoldingConfig,
        "dispatch": DispatchConfig,
        "pipeline": PipelineConfig,
        "optim": OptimConfig,
        "router": RouterConfig,
        "resilience": ResilienceConfig,
    }
    made = {name: kinds[name](**settings) for name, settings in sections.items()}
    vocab = PRESETS[model].vocab
    return Recipe(model=ModelConfig(preset=model, vocab=vocab), train=TrainConfig(**train), **made)


RUNS: dict[str, tuple[Recipe, int, str]] = {
    "mixtral, pp 4": (recipe_of("mixtral-8x7b", batch=128, folding={"tp": 2, "pp": 4, "ep": 8}), 64, "h100"),
    "mixtral, virtual": (recipe_of("mixtral-8x22b", batch=256, folding={"tp": 2, "pp": 8, "ep": 8}, pipeline={"schedule": "interleaved_1f1b", "virtual": 7}), 128, "h100"),
    "qwen, zero bubble": (recipe_of("qwen3-30b-a3b", batch=256, folding={"pp": 4, "ep": 8}, pipeline={"schedule": "zero_bubble"}), 64, "h200"),
    "qwen, recomputed": (recipe_of("qwen3-30b-a3b", batch=64, folding={"ep": 8}, train={"recompute": "full"}), 16, "a100"),
    "qwen2, chunks": (recipe_of("qwen2-57b-a14b", batch=64, folding={"tp": 4, "ep": 16}, dispatch={"overlap": "coarse:2"}), 64, "h100"),
    "qwen2, capacity": (recipe_of("qwen2-57b-a14b", batch=64, folding={"tp": 2, "ep": 8}, dispatch={"policy": "drop", "capacity_factor": 1.25}), 32, "h100"),
    "deepseek, dualpipev": (recipe_of("deepseek-v3", batch=512, folding={"pp": 8, "ep": 32}, pipeline={"schedule": "dualpipev"}, train={"recompute": "selective"}), 256, "h800"),
    "deepseek, zbv": (recipe_of("deepseek-v2", batch=256, folding={"pp": 4, "ep": 16}, pipeline={"schedule": "zbv"}), 128, "b200"),
    "olmoe, tiles": (recipe_of("olmoe-1b-7b", batch=64, folding={"ep": 8}, dispatch={"overlap": "tiles"}), 16, "h100"),
    "olmoe, fine": (recipe_of("olmoe-1b-7b", batch=64, folding={"ep": 8}, dispatch={"overlap": "fine"}), 8, "h100"),
    "olmoe, fused": (recipe_of("olmoe-1b-7b", batch=64, folding={"ep": 8}, dispatch={"overlap": "fused"}), 8, "h100"),
    "olmoe, ring": (recipe_of("olmoe-1b-7b", batch=32, seq=16384, folding={"cp": 4, "ep": 8}), 16, "h100"),
    "qwen, skewed": (recipe_of("qwen3-30b-a3b", batch=64, folding={"ep": 16}, router={"force": "imbalanced", "force_skew": 0.8}), 16, "h100"),
    "qwen, resilient": (recipe_of("qwen3-30b-a3b", batch=64, folding={"ep": 8}, resilience={"mode": "fast", "heal": True, "f": 1}), 32, "h100"),
}  # fmt: skip
"""(recipe, ranks, hardware) of predictions on a cluster."""
HERE: dict[str, tuple[Recipe, int]] = {
    "tiny, pp 2": (recipe_of("tiny", batch=16, seq=64, folding={"pp": 2, "ep": 2}), 4),
    "tiny, tp 2": (recipe_of("tiny", batch=8, seq=64, folding={"tp": 2, "ep": 2, "etp": 2}, train={"recompute": "selective"}), 4),
    "laptop": (recipe_of("laptop", batch=32, micro=4, seq=256, folding={"ep": 4}), 4),
    "laptop, fp32, ring": (recipe_of("laptop", batch=8, micro=1, seq=256, folding={"cp": 2, "ep": 4}, train={"dtype": "float32"}), 4),
    "laptop, zbv": (recipe_of("laptop", batch=32, micro=1, seq=256, folding={"pp": 2, "ep": 2}, pipeline={"schedule": "zbv"}, dispatch={"transport": "all_gather"}), 4),
}  # fmt: skip
"""(recipe, ranks) of runs on this machine."""


def programs() -> Made:
    """Operations of every rank."""
    for name, (recipe, world) in HERE.items():
        made = programs_of_recipe(recipe, resolve_recipe(recipe), world=world)
        yield name, [[[op.id, op.kind, op.axis, op.sent_bytes, op.flops] for op in one.ops] for one in made.programs]


PLANS: dict[str, Callable[[], Made]] = {
    made.__name__: made for made in (models, foldings, layouts, overlaps, reshards, placements, schedules, programs)
} | {"dispatches": dispatches}  # type: ignore[dict-item]


# ---- predictions --------------------------------------------------------------------------------------------------------------------


def step_of(name: str) -> dict[str, float]:
    """Seconds and bytes of a step on a cluster."""
    recipe, world, hardware = RUNS[name]
    spec, cluster = resolve_recipe(recipe), parse_cluster(f"{hardware}x{world}")
    mapping = mapping_of_recipe(recipe, spec, world=world, cluster=cluster)
    found = predict(job_of_recipe(recipe, spec), mapping, cluster)
    numbers = {
        "seconds": found.step.seconds,
        "p90": found.step.p90,
        "bytes": found.peak_bytes,
        "mfu": found.mfu("full"),
    }
    return numbers | {f"part {kind}": seconds for kind, seconds in found.step.parts.items()}


def run_of(name: str) -> dict[str, float]:
    """Bytes of a rank of a run here at its fullest moment, by term, and seconds of its programs on a cluster."""
    recipe, world = HERE[name]
    spec = resolve_recipe(recipe)
    made = programs_of_recipe(recipe, spec, world=world)
    found = {f"bytes of {term}": float(n) for term, n in estimate_memory(recipe, spec, made.folding).peak.terms.items()}
    if recipe.train.dtype == "bfloat16":
        oracle = oracle_of(recipe, parse_cluster(f"h100x{world}"))
        found["program"] = run_programs(made.programs, made.folding, oracle.cost).seconds
    return found


def best_of(kind: str) -> dict[str, float]:
    """What a search finds, best first."""
    recipe = recipe_of("mixtral-8x7b", batch=64, folding={"ep": 8})
    job = job_of_recipe(recipe, resolve_recipe(recipe))
    space = Space(ep_overlaps=("none", "chunks") if kind == "chunks" else ("none",))
    found = search(job, parse_cluster("h100x32"), space=space, keep=5)
    counts = {"tried": float(found.tried), "fitting": float(found.fitting), "foldings": float(found.num_foldings)}
    return counts | {f"{n}: {p.mapping.label()}": p.step.seconds for n, p in enumerate(found.best)}


NUMBERS: dict[str, Callable[[], dict[str, float]]] = {
    **{f"step: {name}": partial(step_of, name) for name in RUNS},
    **{f"run: {name}": partial(run_of, name) for name in HERE},
    **{f"search: {kind}": partial(best_of, kind) for kind in ("plain", "chunks")},
}


# ---- what is stored -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORED.read_text())  # type: ignore[no-any-return]


def _plain_sum(values: Iterable[Any], /, start: Any = 0, *, of: Callable[..., Any] = sum) -> Any:
    """`sum` that refuses numbers with a fraction in code that plans: from Python 3.12 on they are rounded otherwise, and hosts would differ."""
    found = of(values, start)
    assert type(found) is not float or not sys._getframe(1).f_globals["__name__"].startswith("phalanx.plan."), (
        "say math.fsum"
    )
    return found


@pytest.mark.parametrize("kind", PLANS)
def test_plans_are_those_that_are_stored(
    kind: str, stored: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "sum", _plain_sum)
    assert {name: digest(plan) for name, plan in PLANS[kind]()} == stored["plans"][kind]


@pytest.mark.parametrize("name", NUMBERS)
def test_predictions_are_those_that_are_stored(name: str, stored: dict[str, dict[str, Any]]) -> None:
    """To twelve digits: the last ones are the processor's."""
    assert NUMBERS[name]() == pytest.approx(stored["numbers"][name], rel=1e-12)


def made() -> dict[str, dict[str, Any]]:
    """All that the file holds."""
    plans = {kind: {name: digest(plan) for name, plan in of()} for kind, of in PLANS.items()}
    return {"plans": plans, "numbers": {name: of() for name, of in NUMBERS.items()}}


if __name__ == "__main__":
    STORED.write_text(json.dumps(made(), indent=1) + "\n")
