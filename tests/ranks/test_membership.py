"""Generations: rules by hand, and the same protocol over a TCPStore and over etcd, whose processes are killed."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from membership_help import MemoryKeys, MemoryService

from phalanx.runtime.membership.keys import KeysStore, Over, Service, ServiceLost
from phalanx.runtime.membership.keys_etcd import EtcdService
from phalanx.runtime.membership.membership import (
    Announcement,
    FirstRule,
    Generation,
    Member,
    Membership,
    MembershipError,
)
from phalanx.runtime.membership.service import start_network_store, start_store
from phalanx_lab.testbed.slurm import free_ports

ROOT = Path(__file__).parents[2]


def members(*uids: str) -> list[Member]:
    return [Member(u, u.split(".")[0]) for u in uids]


def announcement(uid: str, last: Generation | None = None, **rest: str) -> Announcement:
    said = {"plan_hash": "p", "version": "1", **rest}
    return Announcement(member=members(uid)[0], last=last, **said)  # type: ignore[arg-type]


def first(membership: Membership, *uids: str) -> Generation:
    return membership.start(members(*uids), above=0, minimum=2, why="the run begins")


@pytest.mark.unit
def test_numbers_only_grow_and_members_keep_their_order() -> None:
    membership = Membership(MemoryService().connect())
    assert membership.current() is None
    one = first(membership, "a.0", "a.1", "b.0")
    two = membership.propose_death(["a.1"], "killed by SIGKILL", one)
    three = membership.propose_join(members("a.1x"), two)
    assert three is not None and two is not None
    assert (one.number, two.number, three.number) == (1, 2, 3)
    assert two.uids == ("a.0", "b.0") and two.why == "a.1: killed by SIGKILL"
    assert three.uids == ("a.0", "b.0", "a.1x")
    assert membership.current() == three == membership.current(one)
    assert membership.wait(one, 0.0) == three and membership.wait(three, 0.0) is None
    assert three.lost_of(one) == ("a.1",)
    assert len({g.meeting for g in (one, two, three)}) == 3


@pytest.mark.unit
def test_what_is_true_already_makes_no_generation() -> None:
    membership = Membership(MemoryService().connect())
    one = first(membership, "a.0", "a.1")
    assert membership.propose_death(["c.9"], "unknown") == one
    assert membership.propose_join(members("a.0")) == one
    two = membership.renew(one, "nobody died")
    assert two is not None and two.uids == one.uids and two.number == 2
    assert membership.renew(one, "asked late") == two


@pytest.mark.unit
def test_two_that_propose_at_once_both_count() -> None:
    service = MemoryService()
    here, there = Membership(service.connect()), Membership(service.connect())
    one = first(here, "a.0", "a.1", "b.0", "b.1")
    assert first(there, "b.0") == one
    here.propose_death(["a.0"], "x", one)
    two = there.propose_death(["b.0"], "y", one)  # knows of the first generation only
    assert two is not None and two.uids == ("a.1", "b.1") and two.number == 3


@pytest.mark.unit
def test_who_leaves_in_good_health_is_not_lost() -> None:
    membership = Membership(MemoryService().connect())
    one = first(membership, "a.0", "a.1", "b.0")
    two = membership.propose_leave(["a.0"], "notice", one)
    assert two is not None and two.leaving == ("a.0",) and two.lost_of(one) == ()
    three = membership.propose_join(members("c.0"), two)
    assert three is not None and three.lost_of(one) == ()
    four = membership.propose_death(["a.0"], "killed while it handed over", three)
    assert four is not None and four.lost_of(one) == ("a.0",)


@pytest.mark.unit
def test_fewer_than_the_minimum_is_not_enough() -> None:
    membership = Membership(MemoryService().connect())
    one = first(membership, "a.0", "a.1")
    two = membership.propose_death(["a.0"], "killed", one)
    assert one.enough and two is not None and not two.enough


@pytest.mark.unit
def test_another_plan_or_version_is_refused_by_name() -> None:
    membership = Membership(MemoryService().connect())
    membership.announce(announcement("a.0"))
    with pytest.raises(
        MembershipError, match=r"(?s)member b\.0.*plan hash = 'q': the run has 'p'.*code version = '2': the run has '1'"
    ):
        membership.announce(announcement("b.0", plan_hash="q", version="2"))
    assert [a.member.uid for a in membership.announced()] == ["a.0"]


RULE = FirstRule(wanted=3, minimum=2, gather_s=5.0)


@pytest.mark.unit
def test_a_fresh_run_waits_for_all_that_are_wanted() -> None:
    announced = [announcement("a.1"), announcement("a.10"), announcement("a.2")]
    assert RULE.members(announced[:2], above=None, dead=(), waited_s=1.0) is None
    assert RULE.members(announced, above=None, dead=["a.1"], waited_s=1.0) is None
    assert RULE.members(announced, above=None, dead=(), waited_s=0.0) == (members("a.1", "a.2", "a.10"), 0)
    assert RULE.members(announced[:2], above=None, dead=(), waited_s=6.0) == (members("a.1", "a.10"), 0)
    assert RULE.members(announced[:1], above=None, dead=(), waited_s=6.0) is None


@pytest.mark.unit
def test_a_run_that_lost_its_service_goes_on_with_its_own_members() -> None:
    last = Generation(number=7, epoch="old", members=tuple(members("b.0", "a.0", "a.1")))
    older = replace(last, number=6)
    announced = [announcement("a.0", last), announcement("c.0"), announcement("b.0", older)]
    assert RULE.members(announced, above=None, dead=(), waited_s=1.0) is None, "a.1 may still come"
    assert RULE.members(announced, above=None, dead=["a.1"], waited_s=1.0) == (members("b.0", "a.0", "c.0"), 7)
    assert RULE.members(announced, above=replace(last, number=9), dead=(), waited_s=6.0) == (
        members("b.0", "a.0", "c.0"),
        9,
    )
    strangers = [announcement("c.0"), announcement("c.1"), announcement("c.2")]
    assert RULE.members(strangers, above=last, dead=(), waited_s=99.0) is None, "nobody of them has state"


@pytest.mark.unit
def test_a_member_that_was_put_out_is_not_in_the_first_generation_of_a_new_life() -> None:
    last = Generation(number=7, epoch="old", members=tuple(members("b.0", "a.0")))
    zombie = announcement("z.0", replace(last, number=5, members=tuple(members("b.0", "a.0", "z.0"))))
    announced = [announcement("a.0", last), announcement("b.0", last), zombie]
    found = RULE.members(announced, above=None, dead=(), waited_s=0.0)
    assert found == (members("b.0", "a.0"), 7)


# -- the services


class StoreHost:
    """A store of our own that can be killed and started again at its place."""

    def __init__(self, kind: str) -> None:
        self.process = start_store() if kind == "socket" else start_network_store("127.0.0.1", 0)
        self.service: Service = self.process.address

    def kill(self) -> None:
        self.process.kill()

    def again(self) -> None:
        self.process.start()

    def close(self) -> None:
        self.process.stop()

    keeps_values = False


class EtcdHost:
    """An etcd with a folder of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.ports = free_ports(2)
        self.service: Service = EtcdService("127.0.0.1", self.ports[0], run="test")
        self.again()

    def again(self) -> None:
        client, peer = (f"http://127.0.0.1:{p}" for p in self.ports)
        self.process = subprocess.Popen(
            [
                self.program, "--data-dir", str(self.folder), "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end_s = time.monotonic() + 20.0
        while time.monotonic() < end_s:
            with contextlib.suppress(ServiceLost):
                self.service.connect().close()
                return
            time.sleep(0.05)
        raise AssertionError("etcd did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()

    keeps_values = True


def etcd_program() -> str | None:
    fetched = ROOT / ".etcd" / "root" / "usr" / "bin" / "etcd"
    return shutil.which("etcd") or (str(fetched) if fetched.exists() else None)


@pytest.fixture(params=["socket", "tls", "etcd"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreHost | EtcdHost]:
    if request.param != "etcd":
        found: StoreHost | EtcdHost = StoreHost(request.param)
    else:
        program = etcd_program()
        if program is None:
            pytest.skip("no etcd here: `sh scripts/etcd.sh` fetches it from the distribution's packages")
        found = EtcdHost(program, tmp_path / "etcd")
    yield found
    found.close()


@pytest.mark.ranks
def test_a_service_keeps_what_the_first_writer_said(host: StoreHost | EtcdHost) -> None:
    one, two = host.service.connect(), host.service.connect()
    assert one.epoch == two.epoch
    assert one.get("k") is None and not two.all_there(["k"])
    assert one.create("k", "first") == "first" and two.create("k", "second") == "first"
    assert two.get("k") == "first" and one.all_there(["k"]) and not one.all_there(["k", "other"])
    two.put("k", "third")
    two.put("k/a", "")
    assert one.get("k") == "third" and one.get("k/a") == ""
    assert one.listed("k") == ["k", "k/a"] and one.listed("k/") == ["k/a"] and one.listed("z") == []
    one.delete("k")
    assert two.get("k") is None
    begin_s = time.monotonic()
    assert not one.wait("never", 0.1) and 0.09 < time.monotonic() - begin_s < 20.0
    assert one.all_there([f"k/{i}" for i in range(300)]) is False
    for i in range(150):
        one.put(f"n/{i}", "x")
    assert one.all_there([f"n/{i}" for i in range(150)])


@pytest.mark.core
@pytest.mark.ranks
def test_a_killed_service_is_noticed_and_found_again(host: StoreHost | EtcdHost) -> None:
    keys = host.service.connect()
    membership = Membership(keys)
    one = first(membership, "a.0", "a.1")
    host.kill()
    begin_s = time.monotonic()
    for call in (lambda: keys.put("x", "1"), lambda: keys.get("x"), host.service.connect):
        with pytest.raises(ServiceLost):
            call()
    assert time.monotonic() - begin_s < 20.0, "nobody waits for a service that refuses"
    host.again()
    with pytest.raises(ServiceLost):  # a connection that failed once fails for ever
        keys.get("x")
    again = host.service.connect()
    assert (again.epoch == one.epoch) is host.keeps_values
    newest = Membership(again).current(one)
    assert newest == (one if host.keeps_values else None)


def state(task: Path) -> str:
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.core
@pytest.mark.ranks
def test_a_stopped_service_is_taken_for_lost() -> None:
    process = start_store()
    keys = process.address.connect()
    os.kill(process.pid, signal.SIGSTOP)
    while any(state(task) != "T" for task in Path(f"/proc/{process.pid}/task").iterdir()):  # a signal takes a moment
        time.sleep(0.01)
    begin_s = time.monotonic()
    with pytest.raises(ServiceLost):
        keys.get("x")
    assert time.monotonic() - begin_s < 60.0, "else it would wait for ever"
    process.stop()


class Late(MemoryKeys):
    """Writes a key the moment that somebody waits for it."""

    def __init__(self, service: MemoryService, key: str) -> None:
        super().__init__(service)
        self.late = key

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        if key == self.late:
            self.put(key, base64.b64encode(b"late").decode())
        return super().wait(key, timeout_s)


@pytest.mark.unit
def test_a_store_of_keys_is_a_store() -> None:
    service = MemoryService()
    one, two = (KeysStore(service.connect(), timeout_s=0.05) for _ in range(2))
    assert [one.add("c", 1), two.add("c", 2), one.add("c", 0)] == [1, 3, 3]
    one.set("a", b"\x00\xff")
    assert two.get("a") == b"\x00\xff" and two.check(["a"]) and two.multi_get(["a"]) == [b"\x00\xff"]
    assert KeysStore(Late(service, "store/b")).multi_get(["a", "b", "a"]) == [b"\x00\xff", b"late", b"\x00\xff"]
    assert one.compare_set("d", "", "1") == b"1" and two.compare_set("d", "", "2") == b"1"
    with pytest.raises(dist.DistStoreError, match="never was not set"):
        one.get("never")
