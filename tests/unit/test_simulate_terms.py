"""Settings whose cost on a cluster is stated in bytes and FLOPs: state that nobody shares, tokens gathered everywhere, forced routing, shards with several holders, forwards ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest

from phalanx.core.config import FoldingConfig, LaunchConfig, ModelConfig, PipelineConfig, Recipe, TrainConfig
from phalanx.core.errors import ConfigError
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import load_hardware, parse_cluster
from phalanx.simulate.hardware.collectives import GroupSpan, Network
from phalanx.simulate.mapping.mapping import Job, Mapping
from phalanx.simulate.mapping.routing import RouterModel, forced_loads
from phalanx.simulate.step.device_memory import memory_of, parameters_of_rank
from phalanx.simulate.step.replicas import ReplicaTraffic
from phalanx.simulate.step.stage_layers import contents
from phalanx.simulate.step.timing import predict

pytestmark = pytest.mark.unit
QWEN = Job(spec=PRESETS["qwen3-30b-a3b"], seq_len=4096, global_batch=64)
PLAIN = Mapping(folding=make_folding(world=16, ep=8))
H100 = load_hardware("h100")


@pytest.mark.parametrize(
    ("model", "degrees", "batch", "seconds", "peak"),
    [
        ("mixtral-8x22b", {"tp": 2, "pp": 4, "ep": 8}, 64, 2.7718362701304913, 95337511936.0),
        ("qwen3-30b-a3b", {"ep": 16}, 128, 1.1821391914068682, 52510694400.0),
        ("deepseek-v3", {"tp": 2, "ep": 32, "pp": 2}, 64, 5.517103500753072, 280404832768.0),
        ("mixtral-8x7b", {"cp": 2, "ep": 2, "etp": 4}, 64, 1.2005733598644623, 74997844992.0),
    ],
)
def test_what_was_predicted_before_is_predicted_still(
    model: str, degrees: dict[str, int], batch: int, seconds: float, peak: float
) -> None:
    mapping = Mapping(folding=make_folding(world=64, **degrees))
    job = Job(spec=PRESETS[model], seq_len=4096, global_batch=batch)
    found = predict(job, mapping, parse_cluster("h100x64"))
    assert (found.step.seconds, found.peak_bytes) == (pytest.approx(seconds, rel=1e-9), pytest.approx(peak, rel=1e-9))


def test_state_that_nobody_shares_is_whole_everywhere() -> None:
    """12 bytes a parameter on every rank in place of a share of them; one all-reduce of gradients, and nothing gathered."""
    whole = replace(PLAIN, sharding="none")
    own = parameters_of_rank(QWEN, PLAIN, contents(QWEN, PLAIN)[0])
    assert memory_of(QWEN, whole)[0].optimizer == pytest.approx(12 * sum(own))
    assert memory_of(QWEN, PLAIN)[0].optimizer == pytest.approx(12 * (own[0] / 16 + own[1] / 2))
    gather, reduce = ReplicaTraffic(QWEN, whole, Network(H100)).traffic(own)
    net = Network(H100)
    assert gather == 0
    assert reduce == pytest.approx(
        net.all_reduce(4 * own[0], GroupSpan(8, 2)) + net.all_reduce(4 * own[1], GroupSpan(1, 2))
    )


def test_gathered_tokens_cost_what_gathers_cost() -> None:
    gathered = replace(PLAIN, dispatch="all_gather")
    one, other = (predict(QWEN, m, parse_cluster("h100x16")) for m in (PLAIN, gathered))
    layers, rounds = QWEN.spec.num_moe_layers, PLAIN.num_microbatches(QWEN)
    each = Network(H100).all_gather(4096 * 8 * QWEN.spec.hidden * 2, GroupSpan(8, 1))
    assert other.step.parts["a2a_inside"] == pytest.approx(4 * layers * rounds * each)
    assert other.step.parts["experts"] == one.step.parts["experts"]
    assert other.peak_bytes > one.peak_bytes  # the tokens of all, there and back


def test_forced_routing_is_counted() -> None:
    how = {"experts": 128, "top_k": 8, "tokens": 512, "seed": 3}
    loads = [forced_loads(ep=8, skew=skew, **how) for skew in (0.0, 0.5, 1.0, 2.0)]  # type: ignore[arg-type]
    assert loads[0][0] == pytest.approx(1.05, abs=0.05)
    assert all(a[0] < b[0] and a[0] <= a[1] <= 8 for a, b in pairwise(loads))
    assert forced_loads(ep=1, skew=1.0, **how) == (1.0, 1.0)  # type: ignore[arg-type]
    forced = replace(PLAIN, routing=RouterModel(kind="learned", forced=loads[2]))
    assert (forced.load(QWEN), forced.load(QWEN, worst=True)) == loads[2]
    even, uneven = (predict(QWEN, m, parse_cluster("h100x16")) for m in (PLAIN, forced))
    assert uneven.step.seconds > even.step.seconds and uneven.peak_bytes > even.peak_bytes


def test_several_holders_keep_and_update_more_and_gather_less() -> None:
    wide = Mapping(folding=make_folding(world=4, ep=2))
    own = (1e8, 2e8)
    network = Network(H100)
    plain, two, four = (ReplicaTraffic(QWEN, replace(wide, holders=n), network) for n in (1, 2, 4))
    assert two.traffic(own)[1] == plain.traffic(own)[1]
    assert four.traffic(own)[0] < two.traffic(own)[0] < plain.traffic(own)[0]
    assert four.traffic(own)[0] == 0  # whoever needs parameters rounds them itself
    memory = [memory_of(QWEN, replace(wide, holders=n))[0].optimizer for n in (1, 2, 4)]
    dense, expert = parameters_of_rank(QWEN, wide, contents(QWEN, wide)[0])
    assert memory == [pytest.approx(12 * (dense * n / 4 + expert * min(n, 2) / 2)) for n in (1, 2, 4)]
    voting = ReplicaTraffic(QWEN, replace(wide, votes=True), network)
    assert voting.vote_s == pytest.approx(12 * H100.inside_latency_s) and plain.vote_s == 0


def test_forwards_ahead_are_chosen_by_the_runs_rule() -> None:
    cluster = parse_cluster("h100x64")

    def seconds(
        warmup: tuple[int, ...] | Literal["auto"], memory_gb: float | None = None
    ) -> tuple[float, tuple[int, ...] | None]:
        recipe = Recipe(
            model=ModelConfig(preset="qwen3-30b-a3b", vocab=151936),
            folding=FoldingConfig(pp=8, ep=8),
            pipeline=PipelineConfig(schedule="eager_1f1b", extra_warmup=warmup, memory_gb=memory_gb),
            train=TrainConfig(seq_len=4096, global_batch=128, micro_batch=1),
            launch=LaunchConfig(ranks=64, device="cuda"),
        )
        spec = resolve_recipe(recipe)
        mapping = mapping_of_recipe(recipe, spec, world=64, cluster=cluster)
        return predict(job_of_recipe(recipe, spec), mapping, cluster).step.seconds, mapping.extra_warmup

    auto, chosen = seconds("auto")
    none, _ = seconds((0,) * 8)
    assert chosen is not None and len(chosen) == 8
    assert auto <= none * (1 + 1e-9)
    with pytest.raises(ConfigError, match=r"pipeline\.memory_gb"):
        seconds("auto", memory_gb=0.001)
