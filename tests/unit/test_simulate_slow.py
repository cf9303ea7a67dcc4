"""Slow ranks in a prediction: whom they hold up, closed forms, draws, and what the command says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cli.main import main
from phalanx.core.errors import PlanError
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.pipeline.schedule.clock import ScheduleCosts, simulate
from phalanx.plan.pipeline.schedule.make import SCHEDULES, make_schedule
from phalanx.plan.pipeline.schedule.many import ends_of_ranks
from phalanx.simulate.failures.slow_step import with_stragglers
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.mapping.slow_ranks import Stragglers, island_size, paces, parse_stragglers, straggler_problems
from phalanx.simulate.step.block_time import COMMUNICATION
from phalanx.simulate.step.timing import Pass, Prediction, predict, slowed

pytestmark = pytest.mark.unit
CLUSTER = parse_cluster("h100x64")
QWEN = Job(spec=PRESETS["qwen3-30b-a3b"], seq_len=4096, global_batch=256)
EVEN = RouterModel(kind="balanced")


def job_and_step(mapping: Mapping, stragglers: Stragglers) -> tuple[Prediction, Prediction]:
    plain = predict(QWEN, mapping, CLUSTER)
    return plain, with_stragglers(plain, stragglers)


def compute_s(p: Prediction) -> float:
    """What a slow rank takes longer for."""
    return sum(s for kind, s in p.step.parts.items() if kind not in (*COMMUNICATION, "dp", "bubble"))


@pytest.mark.parametrize(
    "degrees", [{}, {"ep": 8}, {"tp": 2, "cp": 2, "ep": 16}, {"tp": 4, "ep": 2, "etp": 2, "pp": 2}, {"ep": 8, "pp": 4}]
)
def test_an_island_is_what_groups_join(degrees: dict[str, int]) -> None:
    """Union of all groups that communicate inside a layer, against the closed form."""
    f = Folding(world=64, **degrees)
    of = list(range(64))
    for name in ("tp_cp", "ep_etp"):
        for group in f.groups(name):
            joined = {of[rank] for rank in group}
            of = [min(joined) if own in joined else own for own in of]
    size = island_size(f)
    assert of == [rank // size * size for rank in range(64)]
    factors = np.ones(64)
    factors[37] = 1.5
    table = paces(f, factors)
    assert table.shape == (64 // f.pp // size, f.pp)
    place = np.argwhere(table == 1.5)
    assert place.tolist() == [[37 % (64 // f.pp) // size, f.coord(37, "pp")]]


def test_one_slow_rank_of_data_parallelism_slows_all_computation() -> None:
    """Nothing else of the step changes: reductions wait and then take what they took (they are not hidden here)."""
    mapping = Mapping(folding=Folding(world=64), routing=EVEN, overlap=Overlap(dp=False))
    plain, slow = job_and_step(mapping, Stragglers(ranks=((5, 1.3),)))
    assert slow.step.seconds == pytest.approx(plain.step.seconds + 0.3 * compute_s(plain), rel=1e-9)
    assert slow.step.parts["stragglers"] == pytest.approx(
        0.3 * (compute_s(plain) - plain.step.parts["optimizer"]), rel=1e-9
    )
    assert slow.nominal_s == plain.step.seconds
    assert sum(slow.step.parts.values()) == pytest.approx(slow.step.seconds, rel=1e-12)


def test_two_slow_ranks_are_no_slower_than_the_slower() -> None:
    mapping = Mapping(folding=Folding(world=64, ep=8), routing=EVEN)
    seconds = [
        job_and_step(mapping, Stragglers(ranks=ranks))[1].step.seconds
        for ranks in (((5, 1.3),), ((5, 1.3), (40, 1.2)), ((40, 1.2),))
    ]
    assert seconds[0] == seconds[1] > seconds[2]


def test_an_all_to_all_waits_for_its_slowest_and_exchanges_as_fast() -> None:
    mapping = Mapping(folding=Folding(world=64, ep=8), routing=EVEN, overlap=Overlap(dp=False))
    plain, slow = job_and_step(mapping, Stragglers(hosts=((3, 1.2),)))
    assert slow.step.seconds - plain.step.seconds == pytest.approx(0.2 * compute_s(plain), rel=1e-9)
    assert slow.step.parts["a2a_inside"] == plain.step.parts["a2a_inside"]


def test_a_slow_rank_is_seldom_the_one_with_the_fullest_experts() -> None:
    """Experts of 10 s, 4 s more on the fullest of 8 ranks: a rank slower by 1.2 is behind it (12 < 14) in seven layers of eight, and is it in one (16.8)."""
    stage = Pass({"experts": 10.0, "imbalance": 4.0, "a2a_inside": 3.0, "gemm": 5.0}, {}, 2.0, 1.0)
    made = slowed(stage, 1.2, 8)
    assert made.forward["a2a_inside"] == 3.0 and made.forward["gemm"] == 6.0 and made.weight_grad == 2.4
    assert made.forward["experts"] + made.forward["imbalance"] == pytest.approx(7 / 8 * 14 + 1 / 8 * 16.8)
    same = slowed(stage, 1.0, 8)
    assert same.forward == pytest.approx(stage.forward) and same.seconds == stage.seconds


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_goes_at_the_pace_of_its_slow_stage(pp: int, stage: int) -> None:
    """Each further micro-batch costs a pass of the slow stage; filling and draining cost no more than one way through the others."""
    mapping = Mapping(folding=Folding(world=64, pp=pp, ep=8), routing=EVEN)
    slow = Stragglers(ranks=((stage * 64 // pp + 9, 1.5),))
    seconds, plain = [], []
    for batch in (256, 512):
        plain.append(predict(replace(QWEN, global_batch=batch), mapping, CLUSTER))
        step = with_stragglers(plain[-1], slow).step
        seconds.append(step.seconds - step.parts["dp"] - step.parts["optimizer"])
    passes = [slowed(p, 1.5 if i == stage else 1.0, 8).seconds for i, p in enumerate(plain[0].step.passes)]
    slowest, ways = max(map(sum, passes)), sum(map(sum, passes))
    m = plain[0].step.microbatches
    assert seconds[1] - seconds[0] == pytest.approx(m * slowest, rel=1e-6)
    assert m * slowest < seconds[0] < (m - 1) * slowest + ways * 1.01
    assert slowest == pytest.approx(sum(passes[stage]))


def test_a_slow_rank_where_a_pipeline_has_time_costs_less() -> None:
    """The last stage has the head; a rank of the first has room before it is the slowest."""
    job = Job(spec=PRESETS["mixtral-8x22b"], seq_len=4096, global_batch=256)
    mapping = Mapping(folding=Folding(world=64, tp=2, pp=4, ep=8), stage_layers=(13, 14, 14, 15), routing=EVEN)
    plain = predict(job, mapping, CLUSTER)
    longer = [
        with_stragglers(plain, Stragglers(ranks=((rank, 1.1),))).step.seconds / plain.step.seconds - 1
        for rank in (0, 63)
    ]
    assert 0 < longer[0] < 0.5 * longer[1] < 0.1


@settings(max_examples=30)
@given(
    ranks=st.lists(st.tuples(st.integers(0, 63), st.floats(1, 3)), max_size=4),
    more=st.tuples(st.integers(0, 63), st.floats(1, 3)),
)
def test_no_slower_rank_makes_a_step_faster(ranks: list[tuple[int, float]], more: tuple[int, float]) -> None:
    plain = predict(QWEN, Mapping(folding=Folding(world=64, pp=2, ep=4)), CLUSTER)
    few, many = (
        with_stragglers(plain, Stragglers(ranks=tuple(given))).step.seconds for given in (ranks, [*ranks, more])
    )
    assert plain.step.seconds <= few * (1 + 1e-9) and few <= many * (1 + 1e-9)


# ---- draws


def test_the_slowest_of_many_is_slower_and_surer() -> None:
    """Median of the slowest of n devices: exp(spread z), z the (1/2)^(1/n) quantile of a normal draw; on computation alone."""
    mapping = Mapping(folding=Folding(world=64), routing=EVEN, overlap=Overlap(dp=False))
    plain, slow = job_and_step(mapping, Stragglers(spread=0.05, draws=401))
    factor = math.exp(0.05 * NormalDist().inv_cdf(0.5 ** (1 / 64)))
    expected = plain.step.seconds + (factor - 1) * compute_s(plain)
    assert slow.step.seconds == pytest.approx(expected, rel=0.004)
    one = replace(slow.step, draws=())
    assert slow.step.p10 < one.p10 and slow.step.p90 > one.p90
    again = with_stragglers(plain, Stragglers(spread=0.05, draws=401))
    assert again.step == slow.step


def test_quantiles_of_draws_are_those_of_the_mixture() -> None:
    plain = predict(QWEN, Mapping(folding=Folding(world=64)), CLUSTER)
    same, two = (replace(plain.step, draws=draws) for draws in ((1.0,) * 3, (1.0,) * 9 + (3.0,) * 9))
    assert (same.p10, same.p90) == pytest.approx((plain.step.p10, plain.step.p90), rel=1e-6)
    assert two.p10 == pytest.approx(two.seconds * math.exp(-0.8416 * two.sigma), rel=1e-3)  # a fifth of the lower half
    assert two.p90 == pytest.approx(3 * two.seconds * math.exp(0.8416 * two.sigma), rel=1e-3)


def test_hosts_are_drawn_with_their_probability() -> None:
    rng = np.random.default_rng(1)
    big = parse_cluster("h100x16384")
    factors = Stragglers(shares=((0.01, 1.1),)).factors(big, rng).reshape(-1, 8)
    assert set(np.unique(factors)) == {1.0, 1.1} and (factors == factors[:, :1]).all()
    assert (factors[:, 0] == 1.1).mean() == pytest.approx(0.01, abs=0.006)


# ---- the command


def test_the_command_tells_what_slow_ranks_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = tmp_path / "r.toml", tmp_path / "x.json"
    recipe.write_text(
        '[model]\npreset = "qwen3-30b-a3b"\n[folding]\nep = 8\n[train]\nseq_len = 4096\nglobal_batch = 64\nmicro_batch = 1\n[launch]\ndevice = "cuda"\n'
    )
    plain = ["simulate", str(recipe), "--cluster", "h100x64"]
    assert main([*plain, "--straggler", "host=3:1.2", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert told["stragglers"]["hosts"] == [[3, 1.2]] and told["stragglers"]["nominal_s"] < told["seconds"]["p50"]
    assert sum(told["parts"].values()) == pytest.approx(told["seconds"]["p50"])
    assert "slow ranks: +1" in capsys.readouterr().out
    assert main([*plain, "--spread", "0.02", "--json", str(file)]) == 0
    assert "in the median of 65 draws" in capsys.readouterr().out
    assert (
        main([*plain, "--straggler", "host=8:1.2", "--straggler", "rank=5%:0.5", "--straggler", "x", "--spread", "0"])
        == 2
    )
    error = capsys.readouterr().err
    for words in (
        "5 problems",
        "hosts are 0 to 7",
        "below 1",
        "draws hosts, not ranks",
        "is not host=NUMBER",
        "above 0",
    ):
        assert words in error
    assert main([*plain, "--against", str(tmp_path), "--spread", "0.1"]) == 2
    assert "no effect with --against" in capsys.readouterr().err


def test_what_is_said_is_read() -> None:
    texts = ["host=3:1.2", "rank=17:1.05", "host=0.5%:1.1"]
    assert straggler_problems(texts, 0.02, CLUSTER) == [] and parse_stragglers([], None) is None
    found = parse_stragglers(texts, 0.02)
    assert found == Stragglers(hosts=((3, 1.2),), ranks=((17, 1.05),), shares=((0.005, 1.1),), spread=0.02)


def test_a_search_ranks_by_the_steps_with_slow_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One slow host is dear where it holds up everybody in every layer, and less so on a stage with time to spare: each step is that of `with_stragglers`."""
    out = tmp_path / "s.json"
    command = [
        "search",
        "--model",
        "mixtral-8x7b",
        "--cluster",
        "h100x64",
        "--batch",
        "128",
        "--exact",
        "6",
        "--schedules",
        "1f1b",
        "--json",
        str(out),
    ]
    assert main([*command, "--straggler", "host=7:1.5"]) == 0
    assert "ranked with slow ranks" in capsys.readouterr().out
    best = json.loads(out.read_text())["best"]
    times = [entry["seconds"] for entry in best]
    assert times == sorted(times) and all(entry["seconds"] > entry["nominal_s"] for entry in best)
    assert main([*command, "--spread", "2"]) == 2
    assert "--spread" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "eager_1f1b", "zbv", "dualpipev"])
def test_many_clocks_at_once_are_the_clock(name: str) -> None:
    """Of every schedule, with and without transfers, stages as different as draws make them, and costs that the clock takes one by one."""
    pp, virtual = 4, SCHEDULES[name].virtual or (2 if name == "interleaved_1f1b" else 1)
    made = make_schedule(name, pp=pp, virtual=virtual, num_microbatches=8)
    rng, costs = np.random.default_rng(3), []
    for p2p in (0.0, 0.02, 0.4, 3.0):
        for _ in range(4):
            f, b, w = rng.lognormal(0, 0.5, (3, pp * virtual))
            costs.append(
                ScheduleCosts(
                    forward=tuple(f), backward=tuple(b + w), input_grad=tuple(b), weight_grad=tuple(w), p2p=p2p
                )
            )
    alone = [simulate(made, one).makespan for one in costs]
    assert ends_of_ranks(made, costs)[1].max(axis=1) == pytest.approx(alone, rel=1e-12)
    with pytest.raises(PlanError, match="positive time"):
        ends_of_ranks(made, [*costs, replace(costs[0], forward=(0.0,) * pp * virtual)])
