"""Steps: FLOPs, time, memory by stage, quick and slow paths, and searches against brute force."""

import itertools
import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from speed_help import full_speed_s
from step_without_clock import fullest_bytes, step_without_clock

from phalanx.core.errors import PlanError
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import PRESETS, flops_per_token
from phalanx.plan.pipeline.comm import AHEAD
from phalanx.plan.pipeline.schedule.clock import ScheduleCosts, Timeline, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.make import SCHEDULES, Schedule, make_schedule
from phalanx.plan.pipeline.schedule.pairs import choose_pairs
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.memory.kernel_facts import LEAST_OPEN
from phalanx.simulate.search.best import reasons, search
from phalanx.simulate.search.space import Space, foldings, micro_batches, overlaps, pipelines
from phalanx.simulate.step.bubble import bubble_share
from phalanx.simulate.step.device_memory import layer_bytes, memory_of, parameters_of_rank, usable_bytes
from phalanx.simulate.step.quick import QuickPredictor
from phalanx.simulate.step.stage_layers import contents
from phalanx.simulate.step.timing import predict, predict_many, step_time
from phalanx.simulate.step.trace import chrome_trace
from phalanx_lab.publications.published_mapping import even_layers

pytestmark = pytest.mark.unit
CLUSTER = parse_cluster("h100x128")
MIXTRAL = Job(spec=PRESETS["mixtral-8x22b"], seq_len=4096, global_batch=256)


def folded(**degrees: int) -> Mapping:
    virtual = degrees.pop("virtual", 1)
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    return Mapping(folding=Folding(world=128, **degrees), schedule=schedule, virtual=virtual)


BEST = folded(tp=2, pp=8, ep=8, virtual=7)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PRESETS))
def test_matrices_are_all_but_a_thousandth_of_the_parameters(name: str) -> None:
    """The few sizes that time and memory are counted with, against the table of all parameters."""
    s = PRESETS[name]
    ends = (1 if s.tied_embeddings else 2) * s.vocab * s.hidden
    moe = s.num_moe_layers * (s.num_experts * (s.expert_matrices + s.hidden) + s.shared_matrices)
    counted = s.num_layers * s.attention_matrices + moe + s.dense_layers * s.dense_matrices + ends
    assert counted == pytest.approx(s.num_params, rel=2e-3)


@pytest.mark.parametrize(
    ("seq", "ratio"), [(4096, 1.035), (16384, 1.126), (32768, 1.224), (65536, 1.367), (131072, 1.537)]
)
def test_what_the_convention_of_attention_is_worth(seq: int, ratio: float) -> None:
    full, half = (flops_per_token(MIXTRAL.spec, seq, attention=c) for c in ("full", "causal"))
    assert full / half == pytest.approx(ratio, abs=0.002)


# ---- time -----------------------------------------------------------------------------------------------------------------------


def test_parts_sum_to_the_step() -> None:
    p = predict(MIXTRAL, BEST, CLUSTER)
    assert sum(p.step.parts.values()) == pytest.approx(p.step.seconds, rel=1e-12)
    assert min(p.step.parts.values()) > -1e-9
    assert p.step.p10 < p.step.seconds < p.step.p90
    assert p.mfu("full") / p.mfu("causal") == pytest.approx(1.035, abs=0.002)
    json.dumps(p.to_dict())


def test_folding_is_faster_than_the_same_without() -> None:
    plain = predict(MIXTRAL, folded(tp=2, pp=8, ep=4, etp=2, virtual=7), CLUSTER)
    best = predict(MIXTRAL, BEST, CLUSTER)
    assert best.step.seconds < plain.step.seconds
    assert "etp" in plain.step.parts and "etp" not in best.step.parts


@pytest.mark.parametrize(
    ("name", "virtual"),
    [("1f1b", 1), ("interleaved_1f1b", 7), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_the_closed_form_is_near_the_clock(name: str, virtual: int) -> None:
    mapping = replace(BEST, schedule=name, virtual=virtual)
    exact, quick = (step(MIXTRAL, mapping, CLUSTER) for step in (step_time, step_without_clock))
    assert quick.seconds == pytest.approx(exact.seconds, rel=0.03)
    short = step_time(MIXTRAL, mapping, CLUSTER, most_microbatches=3)
    assert short.seconds == pytest.approx(exact.seconds, rel=0.01)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 33])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_bubbles_equal_their_closed_forms(name: str, p: int, m: int) -> None:
    """On equal stages. A backward is I + W; with v chunks a rank all times are of a chunk, so the bubble is the same number of them.

    (P-1)(F+B) without splitting; (P-1)(F+I-W) zero-bubble (arXiv 2401.10241: F+B-2W) and ZB-V where F = I = W; (P-1)(F+I) where W follows its I at
    once; DualPipeV on D ranks (D-1)(F&B+B-3W), F&B one pass beside another (DeepSeek's DualPipe README, whose PP is 2D).
    """
    for unit in (1.0, 0.37):
        f, i, w = (unit, unit, unit) if SCHEDULES[name].vee else (unit, 1.3 * unit, 0.6 * unit)
        back = i + w
        form = {"zero_bubble": f + i - w, "zbv": f + i - w, "eager_1f1b_split": f + i}.get(name, f + back)
        for v in (1, 2, 4) if SCHEDULES[name].virtual is None else (SCHEDULES[name].virtual,):
            if (SCHEDULES[name].vee and m < 2 * p) or (v > 1 and m % p and not SCHEDULES[name].vee):
                continue
            made = make_schedule(name, pp=p, virtual=v, num_microbatches=m)
            costs = uniform_costs(p * v, forward=f, input_grad=i, weight_grad=w)
            if name == "dualpipev":
                _check_dual(made, costs, p=p, f=f, back=back, w=w)
                continue
            run = simulate(made, costs)
            assert run.makespan - max(run.busy) == pytest.approx((p - 1) * form, abs=1e-9), v
            if name in ("gpipe", "1f1b", "interleaved_1f1b"):
                assert bubble_share(name, p, v, m, 0.5) * 3 * v == pytest.approx(3 * (p - 1), abs=1e-9)


def _check_dual(made: Schedule, costs: ScheduleCosts, *, p: int, f: float, back: float, w: float) -> None:
    for share in (1.0, 0.8, 2 / 3):
        run = simulate(made, costs, pairs=choose_pairs(made), paired_share=share)
        busy = [sum(end - start for start, end in {(s.start, s.end) for s in spans}) for spans in run.spans]
        form = (p - 1) * (share * (f + back) + back - 3 * w)
        assert max(run.makespan - b for b in busy) == pytest.approx(form, abs=1e-9)


def test_fourteen_thousand_passes_in_a_fraction_of_a_second() -> None:

    def run() -> Timeline:
        return simulate(make_schedule("interleaved_1f1b", pp=8, virtual=7, num_microbatches=128))

    assert sum(map(len, run().spans)) == 14336
    assert full_speed_s(run, rounds=10) <= 0.25  # 0.06 to 0.10 on three processors


def test_overlap_and_recomputation_go_the_right_way() -> None:
    def seconds(job: Job = MIXTRAL, **changes: object) -> float:
        return step_without_clock(job, replace(BEST, **changes), CLUSTER).seconds  # type: ignore[arg-type]

    plain = seconds()
    assert seconds(overlap=Overlap(dp=False)) > plain
    assert seconds(overlap=Overlap(tp=True)) < plain
    assert seconds(overlap=Overlap(ep="pair")) < plain
    assert plain < seconds(recompute="selective") < seconds(recompute="full") < 1.45 * plain
    assert seconds(routing=RouterModel(kind="learned")) > plain
    assert seconds(precision="fp8") < plain
    assert seconds(fused_permute=False) > plain
    assert seconds(grouped_experts=False) >= plain
    assert seconds(sharding="parameters", reshard_after_forward=True) > plain


def test_split_backwards_hide_less_of_tensor_parallel_traffic() -> None:
    """Megatron-LM scatters an input's gradient beside the weight's; a schedule that puts the weight's off has nothing there."""
    job, plain = MIXTRAL, replace(BEST, schedule="1f1b", virtual=1)
    whole, split = (step_without_clock(job, replace(plain, schedule=s), CLUSTER) for s in ("1f1b", "zero_bubble"))
    assert plain.splits_backward is False and replace(plain, schedule="zero_bubble").splits_backward
    assert not replace(folded(tp=2), schedule="zero_bubble").splits_backward  # no pipeline, nothing to put off
    assert split.parts["tp"] > 1.2 * whole.parts["tp"]
    assert split.hidden_s < whole.hidden_s


def test_full_recomputation_repeats_dispatch() -> None:
    plain, full = (step_without_clock(MIXTRAL, replace(BEST, recompute=r), CLUSTER).parts for r in ("none", "full"))  # type: ignore[arg-type]
    assert full["a2a_inside"] == pytest.approx(1.5 * plain["a2a_inside"])


def test_dispatch_between_hosts_is_dearer_and_dedup_helps() -> None:
    spec = PRESETS["deepseek-v3"]
    job = Job(spec=spec, seq_len=4096, global_batch=256)
    wide = Mapping(folding=Folding(world=128, tp=1, pp=4, ep=32))
    plain, lean = (step_without_clock(job, replace(wide, dispatch=d), CLUSTER).parts for d in ("all_to_all", "dedup"))  # type: ignore[arg-type]
    assert lean["a2a_between"] < 0.75 * plain["a2a_between"]


def test_a_trace_has_every_pass_once() -> None:
    step = predict(MIXTRAL, BEST, CLUSTER).step
    events = [e for e in chrome_trace(step, title="x")["traceEvents"] if e["ph"] == "X"]
    passes = [e for e in events if e["cat"] == "kernel"]
    assert len({(e["pid"], e["name"]) for e in passes}) == len(passes) == 2 * 56 * 32
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(step.seconds * 1e6)
    for lane in (0, 1):  # of a lane nothing overlaps, and on the second passes are divided without rest
        own = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == (3, lane))
        assert all(a + da <= b + 1e-2 for (a, da), (b, _) in itertools.pairwise(own))
    parts = [e for e in events if e["tid"] == 1 and e["pid"] == 3]
    assert {"gemm", "experts", "a2a_inside"} <= {e["name"] for e in parts}
    busy = sum(e["dur"] for e in passes if e["pid"] == 3)
    assert sum(e["dur"] for e in parts) == pytest.approx(busy, rel=1e-3)


def test_a_step_without_a_pipeline_has_a_trace_too() -> None:
    step = predict(
        MIXTRAL, replace(BEST, folding=Folding(world=128, tp=2, ep=8), schedule="1f1b", virtual=1), CLUSTER
    ).step
    names = [e["name"] for e in chrome_trace(step, title="x")["traceEvents"] if e["ph"] == "X" and e["cat"] == "kernel"]
    assert names[:2] == ["F0.0", "B0.0"] and len(names) == 2 * step.microbatches


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"folding": Folding(world=128, tp=5)}, "folding.tp"),
        ({"folding": Folding(world=128, ep=16)}, "must divide num_experts = 8"),
        ({"micro_batch": 0}, "train.micro_batch"),
        ({"micro_batch": 3}, "must be a multiple of micro_batch 3"),
        ({"schedule": "2f2b"}, "is not a schedule"),
        ({"schedule": "interleaved_1f1b", "virtual": 9}, "must not exceed the 56 layers"),
    ],
)
def test_impossible_mappings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        predict(MIXTRAL, replace(BEST, **changes), CLUSTER)  # type: ignore[arg-type]


def test_all_problems_at_once() -> None:
    job = replace(MIXTRAL, seq_len=-1, global_batch=0)
    with pytest.raises(PlanError, match="3 problems"):
        predict(job, replace(BEST, folding=Folding(world=128, tp=3)), CLUSTER)


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def test_memory_is_by_stage() -> None:
    stages = memory_of(MIXTRAL, BEST)
    assert len(stages) == 8
    assert stages[0].activations > stages[3].activations > stages[7].activations
    wide = replace(MIXTRAL, spec=replace(MIXTRAL.spec, vocab=1 << 20))  # a head that takes more than a layer at work
    assert memory_of(wide, BEST)[7].logits > 0 == memory_of(wide, BEST)[0].logits
    assert stages[0].weights > stages[3].weights
    per_rank = sum(stage.weights for stage in stages) * 16 / 2  # bf16, 16 ranks a stage, each dense weight held 8 times
    assert per_rank > MIXTRAL.spec.num_params


@pytest.mark.parametrize("name", ["zero_bubble", "zbv", "dualpipev"])
def test_weight_gradients_that_are_put_off_keep_their_inputs(name: str) -> None:
    """Counted by hand over the order of each rank: an activation until I, then inputs and output gradients of the products until W."""
    mapping = replace(BEST, schedule=name, virtual=SCHEDULES[name].virtual or 1)
    made = make_schedule(name, pp=8, virtual=mapping.virtual, num_microbatches=32)
    layer = layer_bytes(MIXTRAL, mapping)
    for rank, stage in enumerate(memory_of(MIXTRAL, mapping)):
        held = {("F", 0): 1, ("I", 0): -1, ("I", 1): 1, ("W", 1): -1, ("B", 0): -1}
        live, most, layers, open_sends = [0, 0], 0.0, contents(MIXTRAL, mapping)[rank].layers, LEAST_OPEN
        for action in made.actions[rank]:
            live = [live[i] + held.get((action.kind, i), 0) for i in (0, 1)]
            later = live[1] + (action.kind == "B")  # until the end of a whole backward pass
            most = max(most, (live[0] * layer.moe + later * layer.moe_later) * layers / mapping.virtual)
            open_sends = max(open_sends, live[0])
        assert stage.activations == pytest.approx(most + (open_sends + AHEAD) * layer.message), rank
    last = {r: memory_of(MIXTRAL, replace(mapping, recompute=r))[7].activations for r in ("none", "full")}  # type: ignore[arg-type]
    plain = {r: memory_of(MIXTRAL, replace(BEST, recompute=r))[7].activations for r in ("none", "full")}  # type: ignore[arg-type]
    assert (
        last["full"] / last["none"] > 3 * plain["full"] / plain["none"]
    )  # recomputing saves little of what W waits with


def test_recomputation_keeps_less() -> None:
    none, selective, full = (
        fullest_bytes(MIXTRAL, replace(BEST, recompute=r))  # type: ignore[arg-type]
        for r in ("none", "selective", "full")
    )
    assert none > selective > full


def test_uneven_stages_are_not_averaged() -> None:
    """57 layers on 8 ranks: the fullest has 8, not 57 / 8."""
    job = replace(MIXTRAL, spec=replace(MIXTRAL.spec, num_layers=57))
    counts = even_layers(57, 8)
    mapping = replace(folded(tp=2, pp=8, ep=8), stage_layers=counts)
    assert sorted(counts) == [7] * 7 + [8] and counts[0] == counts[-1] == 7
    full = [m.weights for m in memory_of(job, mapping)]
    assert max(full) / full[0] > 1.05
    assert sum(c.layers for c in contents(job, mapping)) == 57


def test_a_learned_router_needs_more_room() -> None:
    learned = replace(BEST, routing=RouterModel(kind="learned"))
    assert fullest_bytes(MIXTRAL, learned) > fullest_bytes(MIXTRAL, BEST)


def test_sharding_parameters_saves_memory() -> None:
    plain = folded(tp=8, ep=8)
    assert fullest_bytes(MIXTRAL, replace(plain, sharding="parameters", reshard_after_forward=True)) < fullest_bytes(
        MIXTRAL, plain
    )


# ---- quick and slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral-8x22b", "deepseek-v3", "qwen2-57b-a14b"])
@pytest.mark.parametrize("kind", ["balanced", "learned"])
def test_the_quick_way_gives_what_the_slow_way_gives(name: str, kind: str) -> None:
    draw, space = random.Random(name + kind), Space(ep_overlaps=("none", "chunks", "pair"))
    job = Job(spec=PRESETS[name], seq_len=4096, global_batch=512)
    cluster, quick = parse_cluster("h100x256"), QuickPredictor(job, parse_cluster("h100x256"))
    every = list(foldings(job, 256))
    for _ in range(60):
        folding = draw.choice(every)
        schedule, virtual = draw.choice(pipelines(job.spec.num_layers, folding.pp, space))
        mapping = Mapping(
            folding=folding,
            micro_batch=draw.choice(micro_batches(job, folding, space)),
            schedule=schedule,
            virtual=virtual,
            recompute=draw.choice(space.recomputes),
            overlap=draw.choice(overlaps(Overlap(), folding, space, cluster.hardware)),
            routing=RouterModel(kind=kind),  # type: ignore[arg-type]
        )
        slow = step_without_clock(job, mapping, cluster).seconds
        assert quick.seconds(mapping) == pytest.approx(slow, rel=1e-9), mapping.label()
        all_work = mapping.num_microbatches(job) * quick.work(mapping) / folding.pp
        assert all_work <= slow * (1 + 1e-9), mapping.label()
        assert quick.peak_bytes(mapping) == pytest.approx(fullest_bytes(job, mapping), rel=1e-12)


def test_blocks_of_further_tokens_are_dense_where_all_layers_are() -> None:
    spec = replace(PRESETS["deepseek-v3"], num_layers=4, dense_layers=4, mtp_layers=2)
    job, cluster = Job(spec=spec, seq_len=4096, global_batch=64), parse_cluster("h100x8")
    whole = Mapping(folding=make_folding(world=8))
    assert [(c.dense_layers, c.moe_layers) for c in contents(job, whole)] == [(6, 0)]
    both = sum(parameters_of_rank(job, whole, contents(job, whole)[0]))
    without = replace(job, spec=replace(spec, mtp_layers=0))
    more = both - sum(parameters_of_rank(without, whole, contents(without, whole)[0]))
    assert more > 2 * (spec.attention_matrices + spec.dense_matrices)
    assert QuickPredictor(job, cluster).seconds(whole) == pytest.approx(step_without_clock(job, whole, cluster).seconds)


def test_many_mappings_on_the_clock_are_those_one_by_one() -> None:
    several = [replace(BEST, recompute=r) for r in ("none", "full")] + [folded(tp=8, ep=8), folded(tp=2, pp=4, ep=8)]
    job = replace(MIXTRAL, global_batch=1024)
    together = predict_many(job, several, CLUSTER, most_microbatches=2)
    for mapping, found in zip(several, together, strict=True):
        alone = predict(job, mapping, CLUSTER, most_microbatches=2)
        assert (found.step.seconds, found.step.parts, found.memory) == (
            alone.step.seconds,
            alone.step.parts,
            alone.memory,
        )


# ---- search ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_finds_what_brute_force_finds() -> None:
    job = Job(spec=replace(MIXTRAL.spec, num_layers=8), seq_len=4096, global_batch=32)
    cluster, space = parse_cluster("h100x16"), Space()
    result = search(job, cluster, space=space, keep=5)
    best: dict[Folding, float] = {}
    for folding in foldings(job, 16):
        for micro in micro_batches(job, folding, space):
            for schedule, virtual in pipelines(8, folding.pp, space):
                for recompute in space.recomputes:
                    for overlap in overlaps(Overlap(), folding, space, cluster.hardware):
                        m = Mapping(folding=folding, micro_batch=micro, schedule=schedule, virtual=virtual,
                                    recompute=recompute, overlap=overlap)  # fmt: skip
                        if fullest_bytes(job, m) <= usable_bytes(cluster.hardware):
                            seconds = step_without_clock(job, m, cluster).seconds
                            best[folding] = min(seconds, best.get(folding, seconds))
    wanted = sorted(best, key=lambda f: best[f])[:5]
    assert {p.mapping.folding for p in result.best} == set(wanted)
    times = [p.step.seconds for p in result.best]
    assert times == sorted(times)
    assert result.evaluated < result.tried
    assert all(p.fits for p in result.best)
    assert all(reasons(result, p) for p in result.best)


def test_the_best_of_a_search_is_the_optimum_on_the_clock() -> None:
    result = search(MIXTRAL, CLUSTER, keep=40)
    on_the_clock = min(
        predict(MIXTRAL, p.mapping, CLUSTER).step.seconds for p in (*result.best[:10], *result.variants[:10])
    )
    assert predict(MIXTRAL, result.best[0].mapping, CLUSTER).step.seconds <= 1.05 * on_the_clock
    front = result.pareto
    assert all(a.seconds <= b.seconds and a.peak_bytes >= b.peak_bytes for a, b in pairwise(front))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (replace(MIXTRAL, spec=PRESETS["deepseek-v3"], global_batch=8), "nothing fits on h100x8"),
        (replace(MIXTRAL, global_batch=0), "no legal folding"),
    ],
)
def test_a_search_that_cannot_succeed_says_why(job: Job, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        search(job, parse_cluster("h100x8"))
