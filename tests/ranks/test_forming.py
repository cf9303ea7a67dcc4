"""Process groups that are made, dropped, aborted and made again in the same processes: no peer waits for a timeout, nothing is left open."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import some

from phalanx.core.errors import PeerError
from phalanx.plan.mapping.folding import Folding
from phalanx.runtime.comm.groups import build_groups
from phalanx.runtime.membership import rendezvous
from phalanx.runtime.membership.keys import Keys, KeysStore, open_sockets
from phalanx.runtime.membership.membership import Generation, Member
from phalanx.runtime.membership.rendezvous import GroupEpoch, NewerGeneration, form, ready_keys
from phalanx.runtime.membership.service import start_store
from phalanx.runtime.membership.votes import MemberReport
from phalanx.runtime.membership.worker import fork_worker

pytestmark = pytest.mark.ranks
TIMEOUT_S = 60.0
COLLECTIVES = ("all_reduce", "all_to_all", "send")


def together(
    work: Callable[[int, Keys, Path], None], ranks: int, folder: Path, *, limit_s: float = 150.0
) -> dict[int, int]:
    """Run `work(rank, keys, folder)` in forked processes around a TCPStore; exit codes by rank."""
    store = start_store()

    def main(rank: int) -> Callable[[Member, int], int]:
        def run(member: Member, pipe: int) -> int:
            log = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            work(rank, store.address.connect(), folder)
            return 0

        return run

    workers = [fork_worker(main(r), Member(f"h.{r}", "h"), slot=r) for r in range(ranks)]
    end_s = time.monotonic() + limit_s
    try:
        while sum(w.reap() for w in workers) < ranks and time.monotonic() < end_s:
            time.sleep(0.01)
        for worker in workers:
            worker.read()
            error = worker.error()
            if error is not None:
                raise error
        return {r: w.code for r, w in enumerate(workers)}
    finally:
        for worker in workers:
            worker.kill()
            worker.close()
        store.stop()


def generation(keys: Keys, uids: list[int], number: int) -> Generation:
    return Generation(number=number, epoch=keys.epoch, members=tuple(Member(f"h.{u}", "h") for u in uids))


def report(uid: str) -> str:
    return MemberReport(uid=uid, step=0, holds=False).to_json()


def connect(keys: Keys, who: Generation, rank: int, **rest: Any) -> GroupEpoch:
    keys.put(ready_keys(who)[who.uids.index(f"h.{rank}")], report(f"h.{rank}"))
    return form(who, f"h.{rank}", keys, timeout_s=TIMEOUT_S, **rest)


def collective(kind: str, team: GroupEpoch) -> None:
    if kind == "all_reduce":
        dist.all_reduce(torch.ones(1000))
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty(team.size * 100), torch.ones(team.size * 100))
    else:
        peer = (team.rank + 1) % team.size, (team.rank - 1) % team.size
        sent = dist.isend(torch.ones(10), peer[0])
        dist.recv(torch.empty(10), peer[1])
        sent.wait()


@pytest.mark.core
@pytest.mark.parametrize(("victim", "kind"), some([(victim, kind) for victim in (0, 2) for kind in COLLECTIVES], 2))
def test_survivors_of_a_kill_form_again_at_once(kind: str, victim: int, tmp_path: Path) -> None:
    def work(rank: int, keys: Keys, folder: Path) -> None:
        team = connect(keys, generation(keys, [0, 1, 2, 3], 1), rank)
        for _ in range(3):
            collective(kind, team)
        if rank == victim:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                collective(kind, team)
        team.drop()
        rest = [r for r in range(4) if r != victim]
        team = connect(keys, generation(keys, rest, 2), rank)
        collective(kind, team)
        (folder / f"again-{rank}").write_text(str(time.time()))
        team.drop()

    codes = together(work, 4, tmp_path)
    assert codes == {r: -signal.SIGKILL if r == victim else 0 for r in range(4)}
    killed_s = float((tmp_path / "killed").read_text())
    assert max(float(p.read_text()) for p in tmp_path.glob("again-*")) - killed_s < TIMEOUT_S / 2


def test_an_abort_frees_those_who_wait_for_a_frozen_peer(tmp_path: Path) -> None:
    def work(rank: int, keys: Keys, folder: Path) -> None:
        team = connect(keys, generation(keys, [0, 1, 2], 1), rank)
        collective("all_reduce", team)
        if rank == 2:
            for other in (0, 1):  # its sockets stay open meanwhile
                assert keys.wait(f"done/{other}", TIMEOUT_S)
            return
        begin_s = time.monotonic()
        threading.Timer(0.3, team.abort).start()
        with pytest.raises(RuntimeError):
            collective("all_reduce", team)
        assert time.monotonic() - begin_s < TIMEOUT_S / 2
        team.drop()
        team = connect(keys, generation(keys, [0, 1], 2), rank)
        collective("all_to_all", team)
        keys.put(f"done/{rank}", "1")

    begin_s = time.monotonic()
    codes = together(work, 3, tmp_path)
    assert [codes[0], codes[1]] == [0, 0] and time.monotonic() - begin_s < TIMEOUT_S - 10


def test_many_generations_with_the_groups_of_a_folding_leave_nothing_open(tmp_path: Path) -> None:
    def work(rank: int, keys: Keys, folder: Path) -> None:
        folding = Folding(world=4, tp=2, ep=4)
        counts = []
        for number in range(1, 6):
            team = connect(keys, generation(keys, [0, 1, 2, 3], number), rank)
            groups = build_groups(folding, rank=rank, cache=team.groups)
            for axis in groups.axes.values():
                if axis.group is not None:
                    x = torch.full((8,), float(axis.index))
                    dist.all_reduce(x, group=axis.group)
                    assert x[0].item() == sum(range(axis.size))
            axis = groups = None  # type: ignore[assignment]
            team.drop()
            now = open_sockets()
            assert not any(now.get(fd) == inode for fd, inode in team.sockets._found.items())
            counts.append((len(open_sockets()), threading.active_count(), len(os.listdir("/proc/self/task"))))
        assert counts[1] == counts[-1], counts

    assert together(work, 4, tmp_path) == dict.fromkeys(range(4), 0)


def test_a_kept_reference_makes_nobody_wait(tmp_path: Path) -> None:
    def work(rank: int, keys: Keys, folder: Path) -> None:
        team = connect(keys, generation(keys, [0, 1, 2, 3], 1), rank)
        kept = dist.group.WORLD
        collective("all_reduce", team)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                collective("all_reduce", team)
        team.drop()
        assert kept is not None
        team = connect(keys, generation(keys, [1, 2, 3], 2), rank)
        collective("all_reduce", team)

    begin_s = time.monotonic()
    assert together(work, 4, tmp_path)[3] == 0
    assert time.monotonic() - begin_s < TIMEOUT_S - 10


def test_a_member_that_does_not_come_is_named_and_a_newer_generation_ends_the_wait(tmp_path: Path) -> None:
    def work(rank: int, keys: Keys, folder: Path) -> None:
        who = generation(keys, [0, 1, 2], 1)
        with pytest.raises(PeerError, match=r"generation 1 failed to form: no report from h\.1, h\.2"):
            connect(keys, who, 0, limit_s=0.2)
        with pytest.raises(NewerGeneration):
            connect(keys, replace(who, number=2), 0, newer=lambda: True)

    assert together(work, 1, tmp_path) == {0: 0}


@pytest.mark.core
@pytest.mark.parametrize("where", ["device", "host"])
def test_groups_are_made_where_connecting_one_of_them_takes_long_on_a_device(where: str, tmp_path: Path) -> None:
    """Ranks 0 and 1 connect for longer than the making of a group may take, 2 and 3 at once, and then all make another one."""

    def slow(group: dist.ProcessGroup, *_: Any) -> None:
        time.sleep(1.0 + rendezvous.CONSTRUCT_S if dist.get_process_group_ranks(group) == [0, 1] else 0)

    def work(rank: int, keys: Keys, folder: Path) -> None:
        rendezvous.connect = slow  # type: ignore[assignment]
        rendezvous.nccl_backends = lambda groups: groups if where == "device" else []  # type: ignore[assignment]
        team = connect(keys, generation(keys, [0, 1, 2, 3], 1), rank)
        try:
            for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)):
                team.groups.get(ranks)
            said = "made"
        except RuntimeError as error:
            said = f"not made: {error}"
        (folder / f"said-{rank}").write_text(said)
        while len([*folder.glob("said-*")]) < 4:  # a peer may still be at the end of the last one
            time.sleep(0.01)
        team.drop()

    assert together(work, 4, tmp_path) == dict.fromkeys(range(4), 0)
    said = {path.read_text() for path in tmp_path.glob("said-*")}
    assert said == {"made"} if where == "device" else any(text.startswith("not made: ") for text in said), said


def test_a_member_that_dies_while_groups_are_made_costs_no_timeout(tmp_path: Path) -> None:
    """It has said that it is ready, and never connects. The watchdog's abort ends the constructor, which waits on the store."""

    def work(rank: int, keys: Keys, folder: Path) -> None:
        rendezvous.KeysStore = partial(KeysStore, timeout_s=TIMEOUT_S)  # type: ignore[misc, assignment]
        who = generation(keys, [0, 1], 1)
        keys.put(ready_keys(who)[1], report("h.1"))
        begin_s = time.monotonic()
        with pytest.raises(PeerError, match="generation 1 failed to form"):
            connect(keys, who, 0, watch=lambda team: threading.Timer(0.3, team.abort).start())
        assert time.monotonic() - begin_s < TIMEOUT_S - 10, "the constructor alone would wait for all of it"
        team = connect(keys, generation(keys, [0], 2), 0)
        assert team.size == 1
        keys.get("x")  # the connection of the keys is not one of the team

    assert together(work, 1, tmp_path) == {0: 0}
