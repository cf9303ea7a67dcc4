"""Progress under failures: closed forms, conservation, Llama 3's practice, traces, and the command."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from step_without_clock import fullest_bytes
from tiers import some

from phalanx.cli.main import main
from phalanx.cli.predicting.goodput import goodput
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, DataError, PlanError
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.model.model import PRESETS
from phalanx.simulate.failures.goodput import (
    LLAMA3_FAILURES_PER_RANK_HOUR,
    Practice,
    expected_goodput,
    poisson,
    read_removals,
    simulate_goodput,
    sweep,
    swept_optimum,
    young_daly,
)
from phalanx.simulate.failures.goodput_elastic import HostsLeft, hosts_left, memory_left
from phalanx.simulate.failures.goodput_slow import slow_hosts
from phalanx.simulate.failures.recovery_cluster import cluster_constants, host_lost, work_without_host
from phalanx.simulate.failures.recovery_time import recovery_time
from phalanx.simulate.failures.slow_step import with_stragglers
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.mapping.mapping import Job, Mapping
from phalanx.simulate.mapping.slow_ranks import Stragglers
from phalanx.simulate.step.device_memory import usable_bytes
from phalanx.simulate.step.timing import Prediction, predict

pytestmark = pytest.mark.unit
LLAMA3 = 3600 / (LLAMA3_FAILURES_PER_RANK_HOUR * 16384)


def test_no_failure_costs_saves_only() -> None:
    run = simulate_goodput(Practice(interval_s=90, save_s=10), [], duration_s=1000)
    assert (run.useful, run.saving, run.lost, run.down) == pytest.approx((0.9, 0.1, 0, 0))


def test_one_failure_by_hand() -> None:
    """Work 0-90, save to 100, work 100-150, failure: 50 lost; down 150-180; work 180-270, save to 280, work 280-300.

    From replicas nothing is lost: down 150-165, the other 40 of the interval to 205, save to 215, work to 300.
    """
    practice = Practice(interval_s=90, save_s=10, detect_s=10, restart_s=20)
    run = simulate_goodput(practice, [150.0], duration_s=300)
    assert [round(300 * x, 6) for x in (run.useful, run.saving, run.lost, run.down)] == [200, 20, 50, 30]
    kept = simulate_goodput(replace(practice, recovery="replicas", repair_s=5), [150.0], duration_s=300, hosts=2)
    assert [round(300 * x, 6) for x in (kept.useful, kept.saving, kept.lost, kept.down)] == [265, 20, 0, 15]


def test_a_failure_while_down_begins_the_downtime_again() -> None:
    run = simulate_goodput(Practice(interval_s=90, save_s=0, detect_s=10, restart_s=20), [10.0, 30.0], duration_s=100)
    assert run.failures == 2
    assert 100 * run.down == pytest.approx(50)


def test_lost_hosts_add_up() -> None:
    """A host fails every 300 s and is away for 1,800: six of eight are out."""
    practice = Practice(recovery="replicas", interval_s=1e9, save_s=0, detect_s=0, repair_s=0, repair_host_s=1800)
    run = simulate_goodput(practice, [300.0 * k for k in range(1, 1000)], duration_s=290000, hosts=8)
    assert run.useful == pytest.approx(2 / 8, abs=0.01)
    assert run.lost == pytest.approx(6 / 8, abs=0.01)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_with_the_last_host_the_replicas_are_lost(hosts: int) -> None:
    """All hosts die within 40 s: work since the last save is lost, which a host that is left would have kept."""
    practice = Practice(
        recovery="replicas", interval_s=90_000, save_s=0, detect_s=1, restart_s=300, repair_s=1, repair_host_s=3600
    )
    times = [50_000 + 10.0 * host for host in range(hosts)]
    run = simulate_goodput(practice, times, duration_s=100_000, hosts=hosts)
    back_s = times[-1] + 301 + 3600 if hosts == 1 else times[0] + 1 + 1 + 3600  # of the first host
    assert run.lost * 100_000 >= 50_000 and run.useful * 100_000 <= 100_000 - back_s
    one_left = simulate_goodput(practice, times[:-1], duration_s=100_000, hosts=hosts)
    assert one_left.useful * 100_000 >= 50_000 and run.total == pytest.approx(1)


def test_too_few_hosts_wait() -> None:
    practice = Practice(
        recovery="replicas",
        interval_s=1e9,
        save_s=0,
        detect_s=0,
        repair_s=0,
        repair_host_s=100,
        share=lambda left: left / 3 if left >= 2 else 0.0,
    )
    run = simulate_goodput(practice, [100.0, 150.0], duration_s=400, hosts=3)
    # full speed to 100, two thirds to 150, down to 200, two thirds to 250, full speed to 400
    assert [400 * x for x in (run.useful, run.lost, run.down)] == pytest.approx([100 + 100 / 3 * 2 + 150, 100 / 3, 50])


def test_a_slow_host_is_put_out_with_replicas_and_stays_without() -> None:
    """Four hosts at half their pace for 100 s; then one leaves, a hand-over of 10 s, three of four for 50 s, and another has come."""
    practice = Practice(
        interval_s=1e9, save_s=0, detect_s=5, repair_s=10, repair_host_s=50, pace=0.5, put_out=((100.0, 1.0),)
    )
    stays = simulate_goodput(practice, [], duration_s=400, hosts=4)
    assert (stays.useful, stays.lost, stays.down) == pytest.approx((0.5, 0.5, 0))
    left = simulate_goodput(replace(practice, recovery="replicas"), [], duration_s=400, hosts=4)
    assert 400 * left.useful == pytest.approx(50 + 0.75 * 50 + 240)
    assert (400 * left.down, left.failures, left.total) == pytest.approx((10, 0, 1))
    assert expected_goodput(replace(practice, interval_s=100.0), 1e6) == pytest.approx(0.5, rel=1e-3)


def test_a_save_under_way_begins_again_when_a_slow_host_leaves() -> None:
    """Work 0-90, save to 95, hand-over to 105, the whole save to 115, and work to 150 on the other host at half the speed."""
    practice = Practice(
        recovery="replicas", interval_s=90, save_s=10, repair_s=10, repair_host_s=1000, put_out=((95.0, 1.0),)
    )
    run = simulate_goodput(practice, [], duration_s=150, hosts=2)
    assert [150 * x for x in (run.saving, run.down, run.useful, run.lost)] == pytest.approx([15, 10, 107.5, 17.5])


def left_of(p: Prediction, name: str, **resilience: float) -> HostsLeft:
    """A recipe of that mapping on its cluster, some of whose hosts are lost."""
    whole, folding = Recipe(), p.mapping.folding
    assert isinstance(folding, Folding)
    train = replace(whole.train, seq_len=p.job.seq_len, global_batch=p.job.global_batch, micro_batch=1)
    recipe = replace(whole, train=train, resilience=replace(whole.resilience, **resilience))  # type: ignore[arg-type]
    return hosts_left(recipe, PRESETS[name], folding, p.cluster)


@pytest.mark.parametrize(
    ("pp", "factor", "gone", "kept"),
    [
        (4, 0.0, (), ""),
        (4, 1.2, (3,), ""),
        (4, 1.6, (), ""),
        (4, 1.05, (3, 1), ""),
        (8, 1.2, (), "120 ranks have no mapping of the same degrees without idle ones"),
        (8, 1.6, (), ""),
    ],
)
def test_the_rule_of_a_run_says_who_is_put_out(pp: int, factor: float, gone: tuple[int, ...], kept: str) -> None:
    """Hosts 3 and 1 of 16 are 1.5 and 1.1 times as slow. Where the others would make no mapping with all of them (tp 2 x pp 8), nobody goes."""
    job = Job(spec=PRESETS["mixtral-8x22b"], seq_len=4096, global_batch=256)
    mapping = Mapping(folding=Folding(world=128, tp=2, pp=pp, ep=8))
    p = predict(job, mapping, parse_cluster("h100x128"), most_microbatches=4)
    stragglers = Stragglers(hosts=((3, 1.5), (1, 1.1)))
    rule = left_of(p, "mixtral-8x22b", straggler=factor, straggler_steps=20).rule
    found = slow_hosts(p, stragglers, rule)
    assert found.names == gone and bool(kept) == bool(found.kept)
    assert kept in found.kept and kept in found.explain() and ("for 20 steps" in found.kept) == bool(kept)
    assert found.pace == pytest.approx(p.step.seconds / with_stragglers(p, stragglers).step.seconds) and found.pace < 1
    times, paces = [at for at, _ in found.put_out], [pace for _, pace in found.put_out]
    assert [found.pace, *paces] == sorted([found.pace, *paces]) and times == sorted(times)
    if gone:
        assert times[0] == pytest.approx(20 * p.step.seconds / found.pace)
        assert paces[-1] == pytest.approx(1.0) or len(gone) < 2


def small(world: int, **degrees: int) -> Prediction:
    job = Job(spec=PRESETS["mixtral-8x7b"], seq_len=4096, global_batch=32)
    return predict(job, Mapping(folding=Folding(world=world, **degrees)), parse_cluster(f"h100x{world}"))


def test_a_host_stays_where_the_others_would_be_no_faster() -> None:
    p = small(32, tp=2, pp=2, ep=8)
    rule = left_of(p, "mixtral-8x7b", straggler=1.2, straggler_steps=5).rule
    stays, goes = (slow_hosts(p, Stragglers(hosts=((0, by),)), rule) for by in (1.3, 1.4))
    assert not stays.names and "no faster" in stays.kept and "no faster" in stays.explain()
    assert goes.names == (0,) and not goes.kept  # 4 hosts over 3 is 1.33


def test_a_host_is_measured_by_the_others_and_not_by_itself() -> None:
    """Of paces 1, 1, 1.19 and 1.4 the last is 1.4 times as slow as the median of the others, as `judge` says, whatever the median of all."""
    p = small(32, tp=2, pp=2, ep=8)
    rule = left_of(p, "mixtral-8x7b", straggler=1.2, straggler_steps=5).rule
    assert slow_hosts(p, Stragglers(hosts=((2, 1.19), (3, 1.4))), rule).names == (3,)
    one_rank = slow_hosts(p, Stragglers(ranks=((31, 1.4),)), rule)
    assert one_rank.names == (3,)  # a host is as slow as its slowest rank


def test_fast_ranks_make_up_for_no_slow_ones() -> None:
    """Three of four hosts are faster than usual, so is the stage of two of them; a job has its usual pace at most."""
    p = small(32, tp=2, pp=2, ep=8)
    rule = left_of(p, "mixtral-8x7b", straggler=1.2, straggler_steps=5).rule
    fast = tuple((rank, 0.8) for rank in range(32))
    assert slow_hosts(p, Stragglers(ranks=fast), None).pace == 1.0
    found = slow_hosts(p, Stragglers(ranks=fast[:24], hosts=((3, 1.4),)), rule)
    assert found.names == (3,) and found.put_out[-1][1] == 1.0 > found.pace
    assert slow_hosts(p, Stragglers(hosts=((3, 1.4),)), None).names == ()


def test_a_lost_host_is_counted_on_the_hosts_of_the_cluster() -> None:
    p = small(32, tp=2, pp=2, ep=2)
    left = left_of(p, "mixtral-8x7b", heal=True)
    found = host_lost(p, left)
    assert found.phases["step"] == pytest.approx(p.step.seconds * 32 / 24)
    constants, going_on = cluster_constants(p.cluster.hardware), left.folding(3)
    assert going_on is not None and going_on.world == 24
    works = [work_without_host(left.planner, going_on, members=24, per_host=n) for n in (8, 1)]
    of_eight, of_one = (recovery_time(work, constants, step_s=0.0).phases["moved"] for work in works)
    assert found.phases["moved"] == of_eight > of_one  # the second stage begins in the middle of a host
    with pytest.raises(PlanError, match=r"resilience\.minimum = 25: the 24 ranks of 3 hosts wait"):
        host_lost(p, left_of(p, "mixtral-8x7b", minimum=25))


def test_hosts_that_make_no_whole_mapping_are_idle_or_wait() -> None:
    """tp 2 x pp 8 needs a multiple of 16 ranks: 15 hosts of 8 are no faster than 14; with fewer than the run's minimum they wait."""
    p = small(128, tp=2, pp=8, ep=8)
    left = left_of(p, "mixtral-8x7b")
    assert [128 * left.share(hosts) for hosts in (16, 15, 14, 13)] == [128, 112, 112, 96]
    assert left.share(0) == 0
    waits = left_of(p, "mixtral-8x7b", minimum=113)
    assert [waits.share(hosts) for hosts in (16, 15, 14)] == [1, 112 / 128, 0]  # 120 members, of which 112 compute
    practice = Practice(recovery="replicas", interval_s=1e9, save_s=0, detect_s=0, repair_s=0, repair_host_s=100)
    for share, useful in ((left.share, 112 / 128), (None, 15 / 16), (left_of(p, "mixtral-8x7b", minimum=121).share, 0)):
        run = simulate_goodput(replace(practice, share=share), [100.0], duration_s=300, hosts=16)
        assert 300 * run.useful == pytest.approx(200 + 100 * useful)
        assert 300 * run.down == pytest.approx(100 * (useful == 0))


def test_hosts_whose_mapping_does_not_fit_are_down_and_told_of() -> None:
    """A shard of the optimizer state grows as hosts go; here memory is enough for 6."""
    p = small(64, tp=2, pp=2, ep=4)
    asked = left_of(p, "mixtral-8x7b")
    assert isinstance(p.mapping, Mapping)
    need = {
        n: fullest_bytes(p.job, replace(p.mapping, folding=asked.folding(n), shares="any")) for n in (8, 7, 6, 5, 4)
    }
    assert sorted(need.values()) == list(need.values())
    memory = p.cluster.hardware.memory_bytes * (need[6] + need[5]) / 2 / usable_bytes(p.cluster.hardware)
    less = replace(p, cluster=replace(p.cluster, hardware=replace(p.cluster.hardware, memory_bytes=memory)))
    left = replace(asked, fits=memory_left(less))
    assert [64 * left.share(hosts) for hosts in (8, 7, 6)] == [64, 56, 48] and left.explain() == ""
    assert left.share(5) == 0 and left.share(4) == 0 and asked.share(4) == 0.5
    assert "with 5 hosts left the mapping (tp2." in left.explain() and "(nor with 4)" in left.explain()
    held = asked.planner.bytes_of(asked.planner.base)
    assert f"resilience.state_gb ({held / 1e9:.3g} GB of state" in left.explain()
    wide = left_of(small(64, tp=2, pp=2, ep=8), "mixtral-8x7b")
    limit = 1.1 * wide.planner.bytes_of(wide.planner.base)
    roomy = replace(wide, planner=replace(wide.planner, room=replace(wide.planner.room, limit=limit)))
    for hosts, ranks in (
        (7, 56),
        (6, 48),
        (5, 32),
        (4, 32),
    ):  # pp is another one, and the state is cut as far as before
        folding, free = roomy.folding(hosts), wide.folding(hosts)
        assert folding is not None and free is not None and folding.world == ranks and folding.pp > free.pp
        assert wide.planner.bytes_of(folding) <= limit < wide.planner.bytes_of(free)
    assert roomy.explain() == ""
    practice = Practice(
        recovery="replicas", interval_s=1e9, save_s=0, detect_s=0, repair_s=0, repair_host_s=100, share=left.share
    )
    run = simulate_goodput(practice, [100.0] * 3, duration_s=300, hosts=8)
    assert 300 * run.down == pytest.approx(100)
    small_memory = replace(p.cluster.hardware, memory_bytes=need[8] / 2)
    never = replace(p, cluster=replace(p.cluster, hardware=small_memory))
    assert not never.fits and memory_left(never)(p.mapping.folding), (
        "that nothing fits is told once, and nothing more is asked"
    )


def test_the_command_asks_the_runs_own_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 hosts ep 2 leaves every expert on 16 ranks; of 3 the experts of 24 are no longer divided alike."""
    recipe, file = tmp_path / "r.toml", tmp_path / "out.json"
    recipe.write_text(
        '[model]\npreset = "mixtral-8x7b"\nvocab = 32000\n[train]\nseq_len = 4096\nglobal_batch = 512\nmicro_batch = 1\n'
        '[folding]\ntp = 2\nep = 4\n[launch]\ndevice = "cuda"\n[resilience]\nstraggler = 1.2\n'
    )
    words = ["--recipe", str(recipe), "--straggler", "host=1:1.6", "--json", str(file), "--cluster", "h200x64"]
    assert goodput(words) == 0
    found = json.loads(file.read_text())
    assert found["slow"]["names"] == [1] and found["repair"]["share"] == 56 / 64 and "no_replicas" not in found
    told = capsys.readouterr().out
    assert (
        "resilience.heal is not set" in told and found["assumed"] in told and "56 members" in found["repair"]["explain"]
    )
    assert goodput([*words, "--resilience.straggler", "0"]) == 0
    kept = json.loads(file.read_text())
    assert not kept["slow"]["names"]
    assert kept["replicas"]["useful"] == pytest.approx(kept["slow"]["pace"], rel=0.05)
    capsys.readouterr()
    many = ["--rate", "1e-2", "--days", "5", "--replace", "20000", "--train.global_batch", "1280", "--json", str(file)]
    assert goodput(["--recipe", "olmoe-1b-7b-32", "--cluster", "h100x40", *many]) == 0
    memory = json.loads(file.read_text())["memory"]
    assert memory["fits"] and 3 in memory["too_few_hosts"] and 4 not in memory["too_few_hosts"]
    assert (
        "with 3 hosts left the mapping (dp24|edp24)" in memory["explain"]
        and memory["explain"] in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "OWN --cluster h200x64 --folding.ep 8 --folding.etp 8",
            "folding.ep = 8: leaves every expert on 1 of the hosts",
        ),
        ("OWN --cluster h200x64 --folding.ep 8 --folding.etp 8", "use folding.ep = 4"),
        ("OWN --cluster h200x64 --resilience.heal false", "resilience.heal = false"),
        ("OWN --cluster h200x8", "is one host"),
        ("OWN --cluster h200x64 --resilience.minimum 57", "resilience.minimum = 57"),
        (
            "OWN --cluster h200x64 --resilience.slots_per_rank 4 --resilience.expert_state sharded",
            "resilience.expert_state = 'sharded'",
        ),
        ("olmoe-1b-7b-32 --cluster h100x32", "with 3 hosts left the mapping"),
        ("olmoe-1b-7b-32 --cluster h100x16 --train.micro_batch 4", "with the copies of its state on 2 hosts"),
    ],
)
def test_a_run_that_cannot_recover_has_no_row(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the rules with which such a run is refused; with their way out, and without a time of what cannot be."""
    recipe, file, picture = tmp_path / "r.toml", tmp_path / "out.json", tmp_path / "out.svg"
    recipe.write_text(
        '[model]\npreset = "mixtral-8x7b"\nvocab = 32000\n[train]\nseq_len = 4096\nglobal_batch = 512\nmicro_batch = 1\n'
        '[folding]\ntp = 2\n[launch]\ndevice = "cuda"\n'
    )
    own = str(recipe) if "folding.ep" in words or "slots" in words else f"{recipe} --folding.ep=4"
    removes = [] if "heal" in words else ["--resilience.straggler", "1.2"]
    asked = ["--straggler", "host=0:1.6", "--json", str(file), "--svg", str(picture), *removes]
    assert goodput([*asked, "--recipe", *words.replace("OWN", own).split()]) == 0
    found, told = json.loads(file.read_text()), capsys.readouterr().out
    assert why in found["no_replicas"] and found["no_replicas"] in told
    assert not {"replicas", "repair", "assumed"} & found.keys() and list(found["sweep"]) == ["checkpoint"]
    assert "\nreplicas" not in told and "next step" not in told and "replicas" not in picture.read_text()
    assert list(found["slow"]["names"]) == [] and found["checkpoint"]["useful"] > 0
    assert "hosts left" not in found["memory"]["explain"]


def test_stages_with_foldings_of_their_own_have_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--folding.stages", '["dp8.ep4", "dp8.ep8"]', "--train.micro_batch", "2", "--train.global_batch", "16"]
    assert goodput(["--recipe", "tiny", "--cluster", "h100x16", *words]) == 0
    told = capsys.readouterr().out
    assert "recovery from replicas cannot be: " in told and "stages with foldings of their own" in told


def test_one_host_has_no_row_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hosts in ((["--ranks", "8"], 1), (["--hosts", "1"], 1), (["--ranks", "16"], 2)):
        assert goodput([*words, "--days", "3"]) == 0
        told = capsys.readouterr().out
        assert ("the job is on one host" in told) == (hosts == 1) == ("\nreplicas" not in told)


def test_work_at_half_speed_is_lost_as_half() -> None:
    """Two hosts, one out for good from 100 s on; what a second failure loses is what was useful, so nothing is negative."""
    practice = Practice(
        recovery="replicas",
        interval_s=1e6,
        save_s=0,
        detect_s=0,
        repair_s=0,
        restart_s=0,
        survival=0.5,
        repair_host_s=1e6,
    )
    seed = next(s for s in range(50) if (lambda d: d.random() < 0.5 <= d.random())(random.Random(s)))
    run = simulate_goodput(practice, [100.0, 1990.0], duration_s=2000, hosts=2, seed=seed)
    assert run.useful == 0 and run.down == pytest.approx(10 / 2000)
    assert run.total == pytest.approx(1)


@given(
    st.floats(10, 1e4), st.floats(0, 500), st.floats(0, 500), st.floats(50, 1e5), st.sampled_from(["checkpoint", "replicas"]),
    st.floats(0, 1), st.integers(0, 99),
)  # fmt: skip
def test_all_time_is_accounted_for(
    interval: float, save: float, restart: float, mean: float, recovery: str, survival: float, seed: int
) -> None:
    practice = Practice(
        recovery=recovery, interval_s=interval, save_s=save, restart_s=restart, survival=survival, repair_host_s=100
    )  # type: ignore[arg-type]
    run = simulate_goodput(practice, poisson(mean, seed), duration_s=50 * mean, hosts=8, seed=seed)
    assert run.total == pytest.approx(1, abs=1e-9)
    assert min(run.useful, run.saving, run.lost, run.down) >= -1e-12


def test_monte_carlo_agrees_with_the_closed_form() -> None:
    for interval, save, mean in ((600, 30, 5000), (1800, 60, 11000), (300, 5, 900)):
        for down in (0, mean / 2, 2.2 * mean):
            practice = Practice(interval_s=interval, save_s=save, detect_s=0, restart_s=down)
            run = simulate_goodput(practice, poisson(mean, 1), duration_s=20000 * mean)
            assert run.useful == pytest.approx(expected_goodput(practice, mean), rel=0.03)


@pytest.mark.parametrize("save", some([5.0, 20.0], 1))
def test_the_sweep_finds_young_and_daly(save: float) -> None:
    """The optimum over intervals, of the Monte Carlo (a parabola through its best points) and of the closed form, within 5 %."""
    mean, best = LLAMA3, young_daly(save, LLAMA3)
    practice = Practice(save_s=save, detect_s=60, restart_s=300)
    fine = [best * 1.01**k for k in range(-60, 61)]
    exact = max(fine, key=lambda i: expected_goodput(replace(practice, interval_s=i), mean))
    assert exact == pytest.approx(best, rel=0.05)
    coarse = [best * 2 ** (k / 2) for k in range(-5, 6)]
    runs = sweep(practice, lambda: poisson(mean, 0), coarse, duration_s=20000 * mean)
    # lost share is a + b / interval + c * interval: least squares over the sweep, optimum at sqrt(b / c)
    import numpy as np

    table = np.array([[1, 1 / i, i] for i, _ in runs])
    _, b, c = np.linalg.lstsq(table, np.array([1 - y for _, y in runs]), rcond=None)[0]
    assert math.sqrt(b / c) == pytest.approx(best, rel=0.05)


def test_the_command_finds_young_and_daly(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    for save in ("5", "20"):
        assert main(["simulate", "goodput", "--save", save, "--json", str(file)]) == 0
        result = json.loads(file.read_text())
        assert result["swept_optimum_s"] == pytest.approx(result["young_daly_s"], rel=0.05)
    assert result["checkpoint"]["useful"] > 0.88


def test_the_optimum_of_a_sweep() -> None:
    points = [(x, 1 - 0.02 - 3 / x - x / 1200) for x in (10, 20, 40, 80, 160, 320)]
    assert swept_optimum(points) == pytest.approx(60)
    assert swept_optimum(points[:2]) is None
    assert swept_optimum([(x, 1 - x / 1000) for x in (1, 2, 4, 8)]) is None
    assert swept_optimum([]) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 0 --interval 0 --repair -1 --survival 2", ("4 problems", "--hosts", "--interval", "--repair", "--survival")),
        ("--save 0", ("--save", "give --interval")),
        ("--ranks 100000000 --days 1000", ("are played", "--days")),
        ("--rate 1", ("are played", "--days")),
        ("--failures TRACE --days 3 --rate 1e-5", ("2 problems", "--days", "--rate", "has no effect")),
        ("--spread 0.1 --straggler host=3:2", ("2 problems", "--spread", "--straggler", "give --recipe")),
        ("--failures TRACE", ("all its lines are at 0",)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_at_once(
    arguments: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("0,add,a\n0,remove,a\n")
    assert main(["simulate", "goodput", *arguments.replace("TRACE", str(trace)).split()]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_saves_that_cost_nothing() -> None:
    assert main(["simulate", "goodput", "--save", "0", "--interval", "100"]) == 0


def test_llama_3_is_effective_more_than_nine_tenths_of_the_time() -> None:
    """419 interruptions in 54 days on 16,384 devices, more than 90 % effective (arXiv 2407.21783)."""
    assert pytest.approx(3.1 * 3600, rel=0.03) == LLAMA3
    practice = Practice(interval_s=young_daly(10, LLAMA3), save_s=10, detect_s=60, restart_s=600)
    shares = [simulate_goodput(practice, poisson(LLAMA3, seed), duration_s=54 * 86400).useful for seed in range(20)]
    assert 0.90 < sum(shares) / len(shares) < 0.97
    replicas = replace(practice, recovery="replicas", survival=0.99)
    better = [
        simulate_goodput(replicas, poisson(LLAMA3, seed), duration_s=54 * 86400, hosts=2048).useful
        for seed in range(20)
    ]
    assert all(b > a for a, b in zip(shares, better, strict=True))


def test_poisson_has_its_mean() -> None:
    times = list(itertools.islice(poisson(100, 3), 20000))
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(100, rel=0.03)


def test_a_trace_is_as_long_as_its_last_line_and_its_last_failure_counts(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "g.json"
    for last, failures in (("360000000,add,node2", 1), ("360000000,remove,node2", 2)):
        path.write_text(f"0,add,node1\n3600000,remove,node1\n{last}\n")
        assert main(["simulate", "goodput", "--failures", str(path), "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        assert found["mean_between_failures_s"] == 360000 / failures
        assert found["checkpoint"]["failures"] == failures and found["checkpoint"]["hours"] == 100


def test_traces_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,add,node1\n5000,remove,node1\n1000,remove,node2\n")
    assert read_removals(path) == ([1, 5], 5)
    path.write_text("0,add,node1\nsoon,remove,node1\n1,vanish,node2\n")
    with pytest.raises(DataError, match="2 problems"):
        read_removals(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_removals(tmp_path / "none.csv")


def test_impossible_practices_are_refused() -> None:
    bad = Practice(interval_s=0, save_s=-1, survival=2)
    with pytest.raises(PlanError, match="3 problems"):
        simulate_goodput(bad, [], duration_s=10)
    for pace in (0.0, -1.0, 1.01, 2.0, math.inf, math.nan):
        for wrong in (Practice(pace=pace), Practice(put_out=((1.0, pace),))):
            with pytest.raises(PlanError, match=r"goodput\.pace.*at most 1"):
                simulate_goodput(wrong, [], duration_s=10)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, trace = tmp_path / "g.json", tmp_path / "g.svg", tmp_path / "t.csv"
    trace.write_text("".join(f"{k * 600000},remove,node{k}\n" for k in range(1, 20)))
    assert main(["simulate", "goodput", "--json", str(out), "--svg", str(picture), "--days", "5"]) == 0
    result = json.loads(out.read_text())
    assert result["replicas"]["useful"] > result["checkpoint"]["useful"] > 0.8
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and drawn.count('fill="white"') == 3
    assert drawn.rindex("<polyline") < drawn.index(">checkpoint<"), "names stand before the lines"
    assert "Young and Daly" in capsys.readouterr().out
    assert main(["simulate", "goodput", "--failures", str(trace)]) == 0
    assert main(["simulate", "goodput", "--ranks", "0", "--survival", "3"]) == 2
    error = capsys.readouterr().err
    assert "--ranks" in error and "survival" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--save", "0"], "--save"),
        (["--hosts", "0"], "--hosts"),
        (["--hosts", "-3"], "--hosts"),
        (["--interval", "0"], "--interval"),
        (["--failures", "t.csv", "--days", "3"], "--days"),
        (["--failures", "t.csv", "--rate", "1"], "--rate"),
    ],
)
def test_arguments_are_told_by_their_name(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "goodput", *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and "interval_s" not in error


def test_curves_are_of_the_trace(tmp_path: Path) -> None:
    """Failures that always strike after a minute of work leave nothing of intervals that are longer."""
    trace, out = tmp_path / "t.csv", tmp_path / "g.json"
    trace.write_text("".join(f"{k * 1000000},remove,node{k}\n" for k in range(1, 40)))
    quick = ["--detect", "0", "--restart", "900", "--interval", "50", "--save", "0.1"]
    assert main(["simulate", "goodput", "--failures", str(trace), *quick, "--json", str(out)]) == 0
    curve = dict(json.loads(out.read_text())["sweep"]["checkpoint"])
    assert all(
        useful < 0.03 for interval, useful in curve.items() if interval > 100
    )  # but for the first failure, at full length
    assert max(curve.values()) > 0.08


def test_saves_that_cost_nothing_want_an_interval(tmp_path: Path) -> None:
    out = tmp_path / "g.json"
    arguments = ["--save", "0", "--interval", "600", "--days", "3", "--json", str(out)]
    assert main(["simulate", "goodput", *arguments]) == 0
    assert json.loads(out.read_text())["interval_s"] == 600


def test_repair_of_a_recipe_on_a_cluster_follows_from_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More state on a rank takes longer to go to others; the parts are told and add up; the job has the cluster's ranks."""
    recipe, file = tmp_path / "r.toml", tmp_path / "out.json"
    recipe.write_text(
        '[model]\npreset = "mixtral-8x7b"\nvocab = 32000\n[train]\nseq_len = 4096\nglobal_batch = 256\nmicro_batch = 1\n'
        '[folding]\ntp = 2\nep = 2\n[launch]\ndevice = "cuda"\n'
    )
    found = {}
    for pp in (1, 4):
        words = ["--recipe", str(recipe), "--cluster", "h100x128", "--json", str(file), f"--folding.pp={pp}"]
        assert goodput(words) == 0
        found[pp] = json.loads(file.read_text())["repair"]
        assert sum(found[pp]["phases"].values()) == pytest.approx(found[pp]["seconds"])
        assert f"{120} members" in found[pp]["explain"]
    assert found[1]["phases"]["moved"] > found[4]["phases"]["moved"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "h100x128"], "--recipe"),
        (["--recipe", "r.toml"], "--cluster"),
        (["--recipe", "r.toml", "--cluster", "h100x128", "--repair", "3"], "--repair"),
        (["--recipe", "r.toml", "--cluster", "h100x128", "--hosts", "3"], "--hosts"),
        (["--folding.tp", "2"], "--folding.tp"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        goodput(words)
