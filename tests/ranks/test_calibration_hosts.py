"""`phalanx calibrate` of a job: how ranks lie on hosts, what of several hosts' measurements stands for one, links between hosts; two ranks that are told to be two hosts."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.calibration import _groups, _spans
from phalanx.cli.main import main
from phalanx.core.errors import ConfigError
from phalanx.simulate.calibration.fit import TimedAttention, TimedCollective, TimedProduct, TimedStream, calibrate
from phalanx.simulate.calibration.hosts import HostRows, apart, combined, ranks_of_host
from phalanx.simulate.hardware.clusters import parse_cluster
from phalanx.simulate.hardware.collectives import GroupSpan, Network

START_S, LATENCY_S, RATE = 1e-4, 3e-4, 2e8
"""Of a link inside, of a message between hosts, of a rank's own link between them."""


def host(name: str, slower: float = 1.0, *, threads: int = 4, memory_bytes: float = 1e10) -> HostRows:
    return HostRows(
        name=name,
        threads=threads,
        memory_bytes=memory_bytes,
        copy_bytes_per_s=1e10 / slower,
        launch_s=1e-6 * slower,
        products=tuple(
            TimedProduct(m=m, n=256, k=256, precision=kind, seconds=m * 1e-7 * slower)
            for kind in ("bf16", "fp32")
            for m in (64, 256, 1024)
        ),
        experts=(TimedProduct(m=512, n=512, k=256, groups=4, precision="bf16", seconds=2e-3 * slower),),
        attention=(TimedAttention(seq=256, heads=4, dim=64, forward_s=1e-3 * slower, backward_s=3e-3 * slower),),
        streams=(TimedStream(what="sum", moved_bytes=1e6, seconds=1e-4 * slower),),
    )


def links(*, per_host: int, hosts: int) -> list[TimedCollective]:
    """As formulas have them: inside `START_S` and 1 GB/s, between `LATENCY_S` and `RATE`."""
    found = []
    for inside, far in _spans(per_host * hosts, per_host):
        n = inside * far
        for size in (256.0, 65536.0, 16777216.0):
            for what in ("all_reduce", "all_gather", "all_to_all", *(("send",) if n == 2 else ())):
                times, share = 2 if what == "all_reduce" else 1, 1.0 if what == "send" else (n - 1) / n
                steps = far - 1 if what in ("all_reduce", "all_gather") else 1
                start_s = START_S if far == 1 or what != "send" else 0.0
                rate = 1e9 if far == 1 else RATE * inside
                seconds = times * (start_s + (far > 1) * steps * LATENCY_S + share * size / rate)
                found.append(TimedCollective(what=what, ranks=n, hosts=far, num_bytes=size, seconds=seconds))
    return found


@pytest.mark.unit
def test_how_ranks_lie_on_hosts() -> None:
    assert ranks_of_host(["a", "a", "b", "b"]) == 2 and ranks_of_host(["a"]) == 1 and ranks_of_host("abc") == 1
    with pytest.raises(ConfigError, match="has 1 of the ranks and a has 2"):
        ranks_of_host(["a", "a", "b"])
    with pytest.raises(ConfigError, match="side by side") as caught:
        ranks_of_host(["a", "b", "a", "c", "c"])
    assert len(caught.value.problems) == 2  # c has others than a


@pytest.mark.unit
def test_pairs_inside_and_between() -> None:
    """Of two hosts with four ranks: pairs inside, pairs between (each rank's own link at once), and larger groups of both kinds; each rank once in a kind."""
    assert (2, 1) in _spans(8, 4) and (1, 2) in _spans(8, 4) and (4, 2) in _spans(8, 4)
    assert _groups(8, 4, 2, 1) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert _groups(8, 4, 1, 2) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    for inside, hosts in _spans(24, 4):
        ranks = [rank for group in _groups(24, 4, inside, hosts) for rank in group]
        assert len(ranks) == len(set(ranks)) > 0
        assert all(len({r // 4 for r in group}) == hosts for group in _groups(24, 4, inside, hosts))


@pytest.mark.unit
def test_hosts_are_combined_by_median() -> None:
    """Three hosts, one of them disturbed: times are the middle one's, memory and threads the least, and who is slow is told."""
    hosts = [host("a"), host("b", 1.1, threads=2), host("c", 7.0, memory_bytes=5e9)]
    made = combined(hosts, links(per_host=2, hosts=3), ranks_per_host=2, title="three")
    assert (made.products, made.experts, made.attention, made.streams) == (
        hosts[1].products, hosts[1].experts, hosts[1].attention, hosts[1].streams,
    )  # fmt: skip
    assert (made.ranks, made.hosts, made.threads, made.memory_bytes) == (2, 3, 2, 5e9)
    assert made.launch_s == hosts[1].launch_s and made.copy_bytes_per_s == hosts[1].copy_bytes_per_s
    told = apart(hosts)
    assert "products bf16: c takes 7.00 times as long as a" in told and any("threads" in line for line in told)
    assert apart([host("a"), host("b", 1.19)]) == [] and len(apart([host("a"), host("b", 1.21)])) == 5
    one_row = replace(host("b"), products=(replace(hosts[0].products[0], seconds=1.0), *hosts[0].products[1:]))
    assert apart([host("a"), one_row]) == []  # one disturbed row is no slow host
    with pytest.raises(ConfigError, match="other products than a"):
        combined([host("a"), replace(host("b"), products=())], [], ranks_per_host=1, title="")


@pytest.mark.unit
@pytest.mark.parametrize("per_host", [1, 2])
def test_constants_between_hosts_come_back(per_host: int, tmp_path: Path) -> None:
    hosts = [host(name) for name in "abcd"]
    measured = combined(hosts, links(per_host=per_host, hosts=4), ranks_per_host=per_host, title="four")
    made = calibrate(measured, name="job", when="2026-01-01")
    h = made.hardware
    assert h.ranks_per_host == per_host and h.between_bytes_per_s == pytest.approx(RATE, rel=0.1)
    inside_s = START_S if per_host == 2 else LATENCY_S  # without a link inside, starting is part of a message's latency
    assert h.between_latency_s == pytest.approx(LATENCY_S, rel=0.35 if per_host == 1 else 0.1)
    assert h.inside_latency_s == pytest.approx(START_S, rel=0.1) if per_host == 2 else h.inside_latency_s < inside_s
    assert "on each of 4 hosts" in h.sources["between_latency_s"] and "no other" not in h.sources["between_latency_s"]
    assert made.errors["between all_to_all"].median < 0.25
    path = tmp_path / "job.json"
    path.write_text(made.to_json())
    again = parse_cluster(f"{path}:{4 * per_host}")
    assert again.hosts == 4
    row = next(x for x in measured.links if x.hosts == 4 and x.what == "all_reduce")
    span = GroupSpan(row.ranks // 4, 4)
    assert Network(again.hardware).all_reduce(row.num_bytes, span) == pytest.approx(row.seconds)


@pytest.mark.unit
def test_links_of_a_kind_that_are_missing_are_told() -> None:
    whole = combined([host("a"), host("b")], links(per_host=2, hosts=2), ranks_per_host=2, title="")
    for far in (False, True):
        with pytest.raises(ConfigError, match="several hosts" if far else "inside a host"):
            calibrate(replace(whole, links=tuple(x for x in whole.links if (x.hosts > 1) != far)), name="x", when="")


@pytest.mark.unit
def test_what_has_no_effect_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "c.json", "--host", "a"]) == 2
    assert "--host" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", "--out", "c.json", "--ranks", "2"]) == 2
    assert "the launcher started 2 ranks" in capsys.readouterr().err


_QUICK = """
import sys
from phalanx.cli import calibration as c
from phalanx.cli.main import main
c.REPEAT_S, c.IDLE_S, c.LENGTHS, c.EXPERTS, c.STREAM_ELEMENTS = 0.0, 0.0, (128,), ((4, 16),), (1 << 14,)
c.PRODUCTS, c.LARGE = ((64, 256, 256),), (64, 256, 512)
sys.exit(main(["calibrate", *sys.argv[1:]]))
"""
"""All of it with few rows and repeats."""


@pytest.mark.ranks
def test_two_ranks_that_are_told_to_be_two_hosts(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, rows = tmp_path / "job.toml", tmp_path / "rows.json"
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port),
             "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _QUICK, "--out", str(out), "--json", str(rows), "--host", f"h{rank}"],
            env={**os.environ, **world, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0], said
    assert "between hosts" in said[0] and said[1] == ""
    cluster = parse_cluster(f"{out}:2")
    assert cluster.hosts == 2 and not cluster.hardware.measured_links
    assert {row[0] for row in cluster.hardware.measured_between} >= {"all_reduce", "all_to_all", "send"}
    found = json.loads(rows.read_text())
    assert found["hosts"] == 2 and {row["hosts"] for row in found["rows"]["links"]} == {2}
