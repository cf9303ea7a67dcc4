"""What the testbed decides before it starts anything: the cluster, the links' text, scenarios and their errors, owners, the step watcher."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import phalanx
import phalanx_lab
from phalanx.core.errors import PlanError, TestbedError
from phalanx_lab.testbed import links
from phalanx_lab.testbed.access import machine_problems, refusal, ways_out
from phalanx_lab.testbed.cluster import ClusterSpec, cluster_problems, parse_rate
from phalanx_lab.testbed.owner import VARIABLE, Owner, new_owner, parse_tag, processes_of, reap_stale
from phalanx_lab.testbed.progress import StepWatcher
from phalanx_lab.testbed.scenario import Progress, Scenario, ScenarioAction, load_scenario, parse_scenario

pytestmark = pytest.mark.unit
SPEC = ClusterSpec(hosts=3, ranks_per_host=2)


# -- the cluster ------------------------------------------------------------------------------------------------------------


@given(hosts=st.integers(1, 40), per_host=st.integers(1, 9))
def test_every_rank_has_one_host(hosts: int, per_host: int) -> None:
    spec = ClusterSpec(hosts=hosts, ranks_per_host=per_host)
    spec.check()
    assert [r for h in range(hosts) for r in spec.ranks_of(h)] == list(range(spec.world))
    for rank in range(spec.world):
        assert rank in spec.ranks_of(spec.host_of(rank))


def test_a_cluster_is_hashed_and_explained() -> None:
    assert ClusterSpec(**json.loads(SPEC.to_json())) == SPEC
    assert SPEC.hash == ClusterSpec(hosts=3, ranks_per_host=2).hash != ClusterSpec(hosts=3).hash
    assert SPEC.explain() == "3 hosts x 2 ranks = 6 ranks\n  between hosts 1.00 Gbit/s, inside a host unlimited"
    slow = ClusterSpec(link_bit_per_s=2e8, link_latency_s=1e-3)
    assert "between hosts 200 Mbit/s + 1.00 ms" in slow.explain()


def test_all_problems_of_a_cluster_at_once() -> None:
    bad = ClusterSpec(hosts=0, ranks_per_host=-1, link_bit_per_s=0, link_latency_s=-1, inside_bit_per_s=float("inf"))
    with pytest.raises(PlanError) as caught:
        bad.check()
    assert [p.where.removeprefix("cluster.") for p in caught.value.problems] == [
        "hosts", "ranks_per_host", "link_bit_per_s", "inside_bit_per_s", "link_latency_s",
    ]  # fmt: skip
    assert [p.where for p in cluster_problems(ClusterSpec(inside_latency_s=float("nan")))] == [
        "cluster.inside_latency_s"
    ]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 1e9), ("200 Mbit/s", 2e8), ("1.5gbit/s", 1.5e9), ("64kbit", 64e3), ("1e9", 1e9), ("5", 5.0)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, where="rate") == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "0", "0gbit", "-1gbit", "1gb", "125MB/s", "nan", "1 2gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(PlanError, match="write 1gbit, 200mbit or 1e9"):
        parse_rate(text, where="rate")


# -- links ------------------------------------------------------------------------------------------------------------------


def test_addresses_are_distinct_and_in_one_subnet() -> None:
    addresses = [links.address(h) for h in range(links.MAX_HOSTS)]
    assert len(set(addresses)) == links.MAX_HOSTS and all(a.startswith("10.77.0.") for a in addresses)
    assert links.hosts_file(SPEC).splitlines() == [
        "127.0.0.1 localhost", "10.77.0.1 host0", "10.77.0.2 host1", "10.77.0.3 host2",
    ]  # fmt: skip


@pytest.mark.parametrize("grain", [links.FINE, links.COARSE])
@given(rate=st.floats(links.MIN_RATE, links.MAX_RATE))
def test_a_bucket_always_holds_a_segment(grain: links.Grain, rate: float) -> None:
    """A segment larger than the bucket would be cut to packets, which costs most of the rate."""
    words = links.shape("eth0", rate=rate, latency_s=0.0, grain=grain).split()
    burst = int(words[words.index("burst") + 1].removesuffix("b"))
    limit = int(words[words.index("limit") + 1].removesuffix("b"))
    segment = links.segment_bytes(rate, grain)
    assert 1514 < segment < burst < limit
    assert f"gso_max_size {segment}" in links.resize("eth0", rate=rate, grain=grain)


def test_latency_is_shared_by_two_ends_and_comes_before_the_bucket() -> None:
    assert links.shape("eth0", rate=None, latency_s=0.0) == ""
    delay, bucket = links.shape("eth0", rate=1e9, latency_s=1e-3).splitlines()
    assert "root handle 1: netem delay 500us" in delay and "parent 1:1 handle 2: tbf rate 1000000000bit" in bucket


def test_what_the_testbed_cannot_build() -> None:
    spec = ClusterSpec(hosts=900, link_bit_per_s=10.0, inside_bit_per_s=1e9, inside_latency_s=1e-6)
    wheres = [p.where.removeprefix("cluster.") for p in links.link_problems(spec)]
    assert wheres == ["hosts", "link_bit_per_s", "inside_bit_per_s", "inside_latency_s"]


# -- scenarios --------------------------------------------------------------------------------------------------------------

GOOD = """
[progress]
events = "runs/demo/events/rank-*.jsonl"

[[action]]
at_step = 5
do = "kill"
host = 1
silent = true

[[action]]
at_s = 10
do = "rate"
host = 0
rate = "100mbit"
for_s = 5

[[action]]
at_s = 12.5
do = "start"
host = 1

[[action]]
at_s = 1
do = "freeze"
rank = 5
for_s = 0.5
"""


def test_a_scenario_file(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    scenario = load_scenario(tmp_path / "good.toml", spec=SPEC)
    assert scenario.progress == Progress(events="runs/demo/events/rank-*.jsonl", kind="StepEnded", key="step")
    assert scenario.actions[1] == ScenarioAction(do="rate", at_s=10, host=0, bit_per_s=1e8, for_s=5)
    assert scenario.explain().splitlines() == [
        "at step 5: kill host 1 silently",
        "at 10.0 s: link of host 0 at 100 Mbit/s for 5 s",
        "at 12.5 s: start host 1",
        "at 1.00 s: freeze rank 5 for 0.5 s",
    ]
    assert scenario.hash == load_scenario(tmp_path / "good.toml", spec=SPEC).hash


BAD = """
speed = 3
[progress]
event = "x"
[[action]]
at_s = 1
at_step = 2
do = "kil"
host = 9
[[action]]
do = "cut"
at_s = -1
rank = 0
[[action]]
do = "kill"
at_s = "soon"
rank = true
for_s = 1
[[action]]
at_s = 1
do = "rate"
host = 0
rate = "1gb"
"""


def test_all_problems_of_a_scenario_at_once(tmp_path: Path) -> None:
    """First what cannot be read, all of it; then what makes no sense, all of it."""
    (tmp_path / "bad.toml").write_text(BAD)
    with pytest.raises(TestbedError) as caught:
        load_scenario(tmp_path / "bad.toml", spec=SPEC)
    found = {p.where: p for p in caught.value.problems}
    assert set(found) == {
        "scenario.speed", "progress.event", "progress.events", "action[2].at_s", "action[2].rank", "action[3].rate",
    }  # fmt: skip
    assert "did you mean 'events'?" in found["progress.event"].hint
    assert "bad.toml" in str(caught.value)


def test_all_that_makes_no_sense_at_once() -> None:
    actions = [
        {"do": "kil", "at_s": 1, "at_step": 2, "host": 9},
        {"do": "cut", "at_s": -1, "rank": 0},
        {"do": "kill", "host": 0, "rank": 0, "for_s": 0.0},
        {"do": "thaw", "at_s": 1, "rank": 1},
        {"do": "freeze", "at_s": 1, "rank": 0, "silent": True, "rate": "1mbit"},
        {"do": "rate", "at_s": 1, "host": 0},
        {"do": "start", "at_s": 1, "host": 2},
        {"do": "rate", "at_s": 1, "host": 0, "rate": 3.0},
    ]
    with pytest.raises(TestbedError) as caught:
        parse_scenario({"action": actions}, spec=SPEC)
    found = {(p.where, p.rule) for p in caught.value.problems}
    assert found == {
        ("action[0].do", "is not an action"),
        ("action[0]", "needs exactly one of at_s and at_step"),
        ("action[0].host", "the cluster has hosts 0 to 2"),
        ("action[1].at_s", "must be finite and not negative"),
        ("action[1].rank", "cut acts on the link of a host"),
        ("action[2]", "needs exactly one of at_s and at_step"),
        ("action[2]", "needs exactly one of rank and host"),
        ("action[2].for_s", "must be above 0 and finite"),
        ("action[2].for_s", "has an effect only on freeze, cut, rate"),
        ("action[3]", "has no effect: no action does freeze there"),
        ("action[4].silent", "has an effect only on the kill of a host"),
        ("action[4].rate", "has no effect on freeze"),
        ("action[5].rate", "rate needs a rate"),
        ("action[6]", "has no effect: no action does kill or terminate there"),
        ("action[7].rate", "the testbed shapes links from 100 kbit/s to 1 Tbit/s"),
        ("progress", "at_step needs to know where the job tells its step"),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs at least one"),
        ("action = 3", "needs at least one"),
        ("action = [3]", "must be a table"),
        ("[[action]", "cannot be read as TOML"),
        ("progress = 1\n[[action]]\ndo='kill'\nat_s=1\nrank=0", "must be a table"),
        ("[progress]\nevents='x'\n[[action]]\ndo='kill'\nat_s=1\nrank=0", "no action has at_step"),
        ("[[action]]\nat_s=1\nrank=0", "legal: kill, terminate"),
    ],
)
def test_scenarios_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(TestbedError, match=says):
        load_scenario(tmp_path / "s.toml", spec=SPEC)
    with pytest.raises(TestbedError, match="No such file"):
        load_scenario(tmp_path / "none.toml", spec=SPEC)


def test_a_freeze_that_ends_by_itself_cannot_be_thawed() -> None:
    freeze = ScenarioAction(do="freeze", at_s=1, rank=0, for_s=1)
    with pytest.raises(TestbedError, match="has no effect"):
        Scenario(actions=(freeze, ScenarioAction(do="thaw", at_s=2, rank=0))).check(SPEC)


# -- steps ------------------------------------------------------------------------------------------------------------------


def line(step: object, kind: str = "StepEnded") -> str:
    return json.dumps({"kind": kind, "step": step}) + "\n"


def test_the_step_is_that_of_this_run_and_of_whole_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "rank-0.jsonl", tmp_path / "rank-1.jsonl"
    first.write_text(line(90))
    watcher = StepWatcher(Progress(events="rank-*.jsonl"), tmp_path)
    assert watcher.update() == -1, "an earlier run's step"
    with first.open("a") as file:
        file.write(line(3) + line(8, kind="Validated") + "no json\n[1]\n" + line("9") + line(True) + line(4)[:-5])
    assert watcher.update() == 3
    with first.open("a") as file:
        file.write(line(4)[-5:])
    assert watcher.update() == 4
    second.write_text(line(6))
    assert watcher.update() == 6
    second.write_text("")
    assert watcher.update() == 6
    second.write_text(line(7))
    assert watcher.update() == 7
    second.unlink()
    assert watcher.update() == 7


# -- owners -----------------------------------------------------------------------------------------------------------------


def dead_owner() -> Owner:
    """An owner in this process namespace that has just died."""
    me = new_owner()
    process = subprocess.Popen(["sleep", "0"])
    process.wait()
    return Owner(process.pid, 1, me.namespace, me.bed)


def bystander(tag: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "30"], env={**os.environ, VARIABLE: tag})


def test_tags() -> None:
    me = new_owner()
    assert parse_tag(me.tag) == me and me.is_alive()
    assert new_owner() != me, "each bed is told apart"
    assert not Owner(me.pid, me.start + 1, me.namespace, 0).is_alive(), "a reused process id"
    assert parse_tag("1.2.3") is parse_tag("1.2.3.x") is None


def test_only_what_a_dead_owner_left_is_reaped() -> None:
    dead, alive = dead_owner(), new_owner()
    elsewhere = Owner(dead.pid, dead.start, dead.namespace + 1, 0)
    stale, ours, foreign, plain = (bystander(t) for t in (dead.tag, alive.tag, elsewhere.tag, "no tag"))
    try:
        deadline = time.monotonic() + 5
        while not (processes_of(dead) and processes_of(alive)) and time.monotonic() < deadline:
            time.sleep(0.01)  # until they run what they shall run
        assert f"process {stale.pid} of the dead owner {dead.pid}" in reap_stale()
        assert stale.wait(5) == -9
        time.sleep(0.1)
        assert [p.poll() for p in (ours, foreign, plain)] == [None] * 3
    finally:
        for process in (stale, ours, foreign, plain):
            process.kill()
            process.wait()


# -- refusals ---------------------------------------------------------------------------------------------------------------


def test_missing_programs_and_systems_are_named() -> None:
    (problem,) = machine_problems(find=lambda _: None, platform="linux")
    assert "ip and tc not found" in problem.rule and "install the package iproute2 (Debian" in problem.hint
    (problem,) = machine_problems(find=lambda name: None if name == "tc" else "/sbin/ip", platform="linux")
    assert problem.value == "tc" and "links are made with it" in problem.rule
    (problem,) = machine_problems(platform="darwin")
    assert "use a Linux machine" in problem.hint


def test_ways_out_follow_the_switches_of_the_kernel() -> None:
    assert ways_out(lambda _: "") == ["run as root"]
    switches = {
        "/proc/sys/user/max_user_namespaces": "0",
        "/proc/sys/kernel/unprivileged_userns_clone": "0",
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
        "/proc/self/status": "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1",
    }
    found = " ".join(ways_out(lambda path: switches.get(path, "")))
    for name in (
        "max_user_namespaces=",
        "unprivileged_userns_clone=1",
        "restrict_unprivileged_userns=0",
        "--privileged",
    ):
        assert name in found
    assert "needs root or user namespaces" in str(refusal("as root: no", said=""))
    assert "broke: ImportError: x" in str(refusal("has ended", said="Traceback\nImportError: x"))


def test_the_planning_side_needs_no_third_party_package() -> None:
    """The supervisor must start in milliseconds, and an unprivileged user's Python may have nothing installed."""
    code = "import sys, phalanx_lab.testbed.testbed, phalanx_lab.testbed.measure; print(*sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(str(Path(p.__file__).parents[1]) for p in (phalanx, phalanx_lab))},
    )
    assert done.returncode == 0, done.stderr
    assert (
        {"phalanx", "phalanx_lab"} <= set(done.stdout.split()) <= {"phalanx", "phalanx_lab", "__main__", "__mp_main__"}
    )
