"""Hosts of one run in one folder: who may be there, which numbers their ranks have, and what a recipe may say about them."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
import stat
from pathlib import Path

import pytest

from phalanx.core.config import LaunchConfig, Recipe, ResilienceConfig
from phalanx.core.errors import RunError
from phalanx.core.rules import recipe_problems
from phalanx.core.service_address import ServiceAddress, parse_service, place
from phalanx.plan.recovery.recipe import per_host, wanted_ranks
from phalanx.train.recovery.run_hosts import RunHosts
from phalanx.train.setup.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.create()
    return found


def test_hosts_of_one_service_share_the_folder_and_others_do_not(folder: RunFolder) -> None:
    a = RunHosts(folder, host="a", service="s:1")
    b = RunHosts(folder, host="b", service="s:1")
    with pytest.raises(RunError, match="another program is host b"):
        RunHosts(folder, host="b", service="s:1")
    with pytest.raises(RunError, match="this host belongs to one with service s:2"):
        RunHosts(folder, host="c", service="s:2")
    with pytest.raises(RunError, match="trains this run"):
        folder.lock()
    a.close()
    b.close()
    RunHosts(folder, host="b", service="s:2").close()
    alone = folder.lock()
    with pytest.raises(RunError, match="is in use by another run"):
        RunHosts(folder, host="a", service="s:1")
    alone.close()


def _refused(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks_has_one_run_at_a_time(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", _refused)
    held = folder.lock()
    with pytest.raises(
        RunError, match=f"process {socket.gethostname()} {os.getpid()} .*trains this run.*remove .*.held"
    ):
        folder.lock()
    held.close()
    folder.lock().close()
    pid = os.fork()
    if pid == 0:  # killed while it has it
        folder.lock()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (folder.path / ".held").exists()
    folder.lock().close()
    (folder.path / ".held").write_text("node7 1 1")
    with pytest.raises(RunError, match="process node7 1 1"):
        folder.lock()


def test_a_file_that_another_process_took_over_meanwhile_stays_its_own(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, rename = folder.path / ".held", os.rename
    held.write_text(f"{socket.gethostname()} 999999 1")  # of a process that was killed

    def faster(src: Path, dst: Path) -> None:
        held.write_text("node7 1 1")
        rename(src, dst)

    monkeypatch.setattr(fcntl, "flock", _refused)
    monkeypatch.setattr(os, "rename", faster)
    with pytest.raises(RunError, match="process node7 1 1"):
        folder.lock()
    assert held.read_text() == "node7 1 1"


def test_a_run_folder_is_its_users_alone_unless_it_is_shared(tmp_path: Path) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((tmp_path / "runs" / name).stat().st_mode)

    for name, shared in (("mine", False), ("ours", True)):
        RunFolder(tmp_path / "runs" / name).create(shared=shared)
    assert (mode("mine"), mode("ours")) == (0o700, 0o2750)
    (tmp_path / "runs" / "mine").chmod(0o755)
    RunFolder(tmp_path / "runs" / "mine").create()
    assert mode("mine") == 0o755, "what somebody has set stays"


def test_a_host_that_comes_back_has_its_numbers_again(folder: RunFolder) -> None:
    def first(host: str, slots: int) -> int:
        claim = RunHosts(folder, host=host, service="s:1")
        with claim.preparing():
            number = claim.first_place(slots)
        claim.close()
        return number

    assert [first("b", 2), first("a", 2), first("c", 1), first("a", 2), first("b", 1)] == [0, 2, 4, 2, 0]
    assert first("c", 3) == 5  # it has grown: its old number is nobody's


def _take(path: str, host: str, start: object, out: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    claim = RunHosts(RunFolder(Path(path)), host=host, service="s:1")
    with claim.preparing():
        out.put((host, claim.first_place(2)))  # type: ignore[attr-defined]
    start.wait()  # type: ignore[attr-defined]


def test_hosts_that_start_at_once_all_get_in(folder: RunFolder) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(6), context.Queue()
    hosts = [context.Process(target=_take, args=(str(folder.path), f"h{i}", start, out)) for i in range(6)]
    for process in hosts:
        process.start()
    taken = [out.get(timeout=20) for _ in hosts]
    for process in hosts:
        process.join(20)
    assert sorted(number for _, number in taken) == [0, 2, 4, 6, 8, 10]
    assert [process.exitcode for process in hosts] == [0] * 6


def test_addresses() -> None:
    assert parse_service("node0:29400") == ServiceAddress("node0", 29400)
    etcd = parse_service("etcd://10.0.0.1:2379/job-7")
    assert etcd == ServiceAddress("10.0.0.1", 2379, "job-7") and etcd.is_etcd and not etcd.is_here
    for text, v6 in [
        ("[fd77::1]:29400", ServiceAddress("fd77::1", 29400)),
        ("etcd://[::1]:1/r", ServiceAddress("::1", 1, "r")),
    ]:
        assert parse_service(text) == v6 and place(v6.host, v6.port) in text and v6.is_here == (v6.host == "::1")
    wrong = ("node0", "node0:", "node0:0", "node0:70000", "etcd://a:1", "etcd://a:1/", "http://a:1/b", "a b:1")
    wrong += (
        "fd77::1:29400",
        "[fd77::1]",
        "[fd77::1]:",
        "[node0]:1",
        "[10.0.0.1]:1",
        "[fd77:::1]:1",
        "etcd://fd77::1:1/r",
    )
    assert [parse_service(text) for text in wrong] == [None] * len(wrong)


def problems(resilience: dict[str, object], launch: dict[str, object]) -> set[str]:
    recipe = Recipe(
        resilience=ResilienceConfig(**resilience),  # type: ignore[arg-type]
        launch=LaunchConfig(threads=1, **launch),  # type: ignore[arg-type]
    )
    return {p.where for p in recipe_problems(recipe)}


def test_settings_of_several_hosts_are_checked_together() -> None:
    heal = {"heal": True, "mode": "exact"}
    good = problems({**heal, "service": "n:1", "wanted": 4}, {"ranks": 1, "host": "n-1", "keep_service": True})
    assert not {w for w in good if w.startswith(("resilience", "launch"))}
    assert {"resilience.wanted", "launch.host"} <= problems({**heal, "service": "n:1"}, {"host": "a.b"})
    assert "resilience.service" in problems({**heal, "service": "n", "wanted": 4}, {})
    assert "launch.keep_service" in problems({**heal, "service": "etcd://n:1/x", "wanted": 4}, {"keep_service": True})
    assert {"resilience.wanted", "launch.host"} <= problems({**heal, "wanted": 4}, {"ranks": 2, "host": "a"})
    told = {"service": "n:1", "limit_s": 2.0}
    assert {"resilience.service", "resilience.limit_s"} <= problems({"heal": False, **told}, {})
    assert problems(told, {}) & {"resilience.service", "resilience.limit_s"} == {"resilience.service"}
    assert "resilience.minimum" in problems({**heal, "minimum": 3}, {"ranks": 2})


def test_a_host_counts_as_one_holder() -> None:
    alone = Recipe(launch=LaunchConfig(ranks=4), resilience=ResilienceConfig(heal=True, f=2))
    assert (wanted_ranks(alone), per_host(alone)) == (4, None)
    several = Recipe(
        launch=LaunchConfig(ranks=4), resilience=ResilienceConfig(heal=True, f=3, service="n:1", wanted=16)
    )
    assert (wanted_ranks(several), per_host(several)) == (16, 4)
