"""Bad luck in an elastic run: a full disk, a damaged checkpoint, the last copy of an expert, too few members, a new history beside an old one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_elastic import SETTINGS, STEPS, Faults, _command, base, check_equal, events, losses, train
from train_help import Running, phalanx, train_args

from phalanx.core.errors import PeerError, RunError
from phalanx.core.events import Event
from phalanx.observe.sinks import Sinks
from phalanx.plan.recovery import StateReport
from phalanx.runtime.checkpoint.folder import CheckpointFolder
from phalanx.runtime.membership.credentials import client_context, make_credentials
from phalanx.runtime.membership.votes import MemberReport, resolve
from phalanx.train.recovery.fallback import Fallback, tell_went_back

__all__ = ["base"]
HOLDERS: Faults = {"reduction": ((1, 3), 9)}
"""Of four ranks with ep = 2: all that have half of the experts."""

# ---- without ranks ---------------------------------------------------------------------------------------------------


def report(uid: str, step: int, *, history: int = 0, doubt: bool = False, holds: bool = True) -> MemberReport:
    return MemberReport(uid=uid, step=step, holds=holds, doubt=doubt, about=StateReport(history=history))


def test_what_is_held_of_a_history_that_was_given_up_counts_for_nothing() -> None:
    found = resolve([report("a", 4, history=2), report("b", 6), report("c", 0, holds=False)])
    assert (found.step, found.holders) == (4, ("a",))
    found = resolve([report("a", 5, history=2), report("b", 4, history=2, doubt=True), report("c", 6, doubt=True)])
    assert (found.step, found.finish, found.repeat, found.holders) == (5, ("b",), (), ("a", "b"))
    with pytest.raises(RunError, match="members disagree about the steps committed"):
        resolve([report("a", 4, history=2), report("b", 6, history=2)])


def checkpoints(path: Path, *steps: int) -> CheckpointFolder:
    for step in steps:
        (path / f"step-{step:08d}").mkdir(parents=True)
        (path / f"step-{step:08d}" / "mark").write_text(str(step))
    (path / "latest").write_text(f"step-{max(steps):08d}\n")
    return CheckpointFolder(path)


def test_later_checkpoints_are_set_aside_whole_and_are_never_the_newest_again(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path / "c", 4, 8, 12)
    assert folder.go_back(4) == ["step-00000012", "step-00000008"]
    assert folder.steps() == [4] and folder.newest() == 4 and folder.candidates() == [4]
    (tmp_path / "c" / "latest").unlink()
    assert folder.newest() == 4, "nor without the name of the newest"
    checkpoints(tmp_path / "c", 8)
    assert folder.go_back(4) == ["step-00000008-2"]
    assert folder.go_back(4) == []
    aside = tmp_path / "c" / "abandoned"
    assert {p.name: (p / "mark").read_text() for p in aside.iterdir()} == {
        "step-00000012": "12", "step-00000008": "8", "step-00000008-2": "8"
    }  # fmt: skip
    assert "step-00000008-2" in folder.list_steps()


def test_a_crash_while_they_are_set_aside_leaves_none_of_them_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(tmp_path / "c", 4, 8, 12)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.go_back(4)
    assert folder.steps() == [4, 8, 12] and folder.newest() == 4 and folder.candidates() == [4]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def _once(folder: Path, name: str) -> bool:
    """True for the first process that asks."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _disk_full(folder: Path) -> None:
    """No file of more than 2000 bytes can be written while the first checkpoint of step 8 is."""
    from phalanx.runtime.checkpoint.manager import CheckpointManager

    inner = CheckpointManager._write_tensors

    def outer(self: Any, job: Any, path: Path) -> Any:
        full = job.state.step == 8 and not (folder / "was-full").exists()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            return inner(self, job, path)
        except Exception:
            (folder / "was-full").touch()
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    CheckpointManager._write_tensors = outer  # type: ignore[method-assign]


def _unreadable(folder: Path) -> None:
    """From the second generation on the folder of checkpoints cannot be listed, four times."""
    from phalanx.runtime.checkpoint.folder import CheckpointFolder

    def failing(inner: Any) -> Any:
        def outer(self: Any) -> Any:
            if (folder / "unreadable").exists() and any(_once(folder, f"eio-{i}") for i in range(4)):
                raise OSError(errno.EIO, "Input/output error", str(self.path))
            return inner(self)

        return outer

    CheckpointFolder.newest = failing(CheckpointFolder.newest)  # type: ignore[method-assign]
    CheckpointFolder.clean = failing(CheckpointFolder.clean)  # type: ignore[method-assign]
    from phalanx.train.recovery.elastic import ElasticMember

    enter = ElasticMember.enter

    def entering(self: Any, team: Any, resolution: Any) -> None:
        if team.begun:
            (folder / "unreadable").touch()
        enter(self, team, resolution)

    ElasticMember.enter = entering  # type: ignore[method-assign]


def _damage(folder: Path) -> None:
    """One byte of the newest checkpoint changes before anyone goes back to it."""
    from phalanx.train.recovery import fallback

    inner = fallback.newest_sound

    def outer(trainer: Any) -> Any:
        if _once(folder, "damaged"):
            path = next(trainer.manager.folder.of(8).glob("*.distcp"))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        trainer.rank.peers.gather(None)  # nobody reads before
        return inner(trainer)

    fallback.newest_sound = outer


def _stays_behind(folder: Path) -> None:
    """When all go back to a checkpoint, one member leaves the generation as if it had never entered it, with what it held before."""
    from phalanx.train.recovery.elastic import ElasticMember

    enter, adopt = ElasticMember.enter, ElasticMember._adopt

    def entering(self: Any, team: Any, resolution: Any) -> None:
        before = dict(vars(self))

        def adopting(*args: Any, **words: Any) -> None:
            if self.progress.history and team.rank == 1 and _once(folder, "stayed"):
                vars(self).update({k: before[k] for k in ("trainer", "held", "place", "place_of", "progress", "hook")})
                raise PeerError("the last message did not come")
            adopt(self, *args, **words)

        self._adopt = adopting
        enter(self, team, resolution)

    ElasticMember.enter = entering  # type: ignore[method-assign]


def _nobody_comes(folder: Path) -> None:
    """A new process in the place of a dead one never gets ready."""
    from phalanx.train.recovery import run as elastic_run

    work = elastic_run.work

    def working(run: Any, agent: Any, **words: Any) -> int:
        if not _once(folder, f"began-{agent.uid.split('.')[1]}"):
            time.sleep(60)
        return work(run, agent, **words)

    elastic_run.work = working


def _waits_for_the_other(folder: Path) -> None:
    """After three steps, until the file `go` is there."""
    from phalanx.train.recovery.elastic import ElasticMember

    compute = ElasticMember.compute

    def computing(self: Any) -> None:
        while self.step >= 3 and not (folder / "go").exists():
            time.sleep(0.05)
        compute(self)

    ElasticMember.compute = computing  # type: ignore[method-assign]


def _hangs(folder: Path) -> None:
    """The first process that reads step 6 never comes back from it, though its heartbeats go on: a dead network file system."""
    from phalanx.train.loop import Trainer

    load = Trainer.load

    def loading(self: Any, step: int) -> Any:
        if step == 6 and _once(folder, "hung"):
            threading.Event().wait()
        return load(self, step)

    Trainer.load = loading  # type: ignore[method-assign]


def _all_stop(folder: Path) -> None:
    """At step 6 every process of a rank is stopped at once, and they go on after 6 s, where silence is allowed for 3."""
    from phalanx.train.recovery.elastic import ElasticMember

    compute = ElasticMember.compute

    def computing(self: Any) -> None:
        if self.step == 6 and _once(folder, "stopped"):
            mine = os.getpid()
            ranks = [int(p) for p in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()]
            if os.fork() == 0:
                os.setsid()
                for number, pause_s in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
                    for pid in {mine, *ranks}:
                        if (Path(f"/proc/{pid}/cmdline").read_bytes()) == Path(f"/proc/{mine}/cmdline").read_bytes():
                            os.kill(pid, number)
                    time.sleep(pause_s)
                os._exit(0)
        compute(self)

    ElasticMember.compute = computing  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[Path], None]] = {
    "waits": _waits_for_the_other,
    "disk full": _disk_full, "unreadable": _unreadable, "damage": _damage, "stays behind": _stays_behind, "hangs": _hangs, "all stop": _all_stop, "nobody comes": _nobody_comes
}  # fmt: skip


def _hooked(hook: str, args: list[str], folder: str, faults: Faults) -> int:
    HOOKS[hook](Path(folder))
    return _command(args, folder, faults)


def notes(folder: Path, name: str) -> str:
    return "\n".join(sorted({e["text"] for e in events(folder, name, "Note")}))


def went_back(folder: Path, name: str) -> dict[str, Any]:
    """What the members said of the one time that they went back, all the same."""
    told = events(folder, name, "WentBack")
    kept = [{k: e[k] for k in ("history", "step", "from_step", "damaged", "abandoned")} for e in told]
    assert kept and all(e == kept[0] for e in kept)
    return kept[0]


@pytest.mark.ranks
def test_disk_full_and_then_the_last_copy_of_an_expert_lost(base: Path) -> None:
    """The checkpoint of step 8 cannot be written: training goes on, that of step 4 stays, and is what is left later."""
    assert train(base, "full", HOLDERS, body=partial(_hooked, "disk full")) == set(HOLDERS)
    said = notes(base, "full")
    assert "saving a checkpoint" in said and "training continues; the next checkpoint tries again" in said
    assert "nothing saved before was touched (there are checkpoints of steps 4)" in said
    assert "no member holds all of layers.0.moe.experts" in said and "goes back to the checkpoint of step 4" in said
    found = went_back(base, "full")
    assert (found["step"], found["from_step"], found["damaged"], found["abandoned"]) == (4, 9, [], [])
    check_equal(base, "full")
    check_ledger(base, "full", found)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_disk_that_cannot_be_read_costs_checkpoints_only(base: Path) -> None:
    faults: Faults = {"reduction": ((1,), 2)}
    assert train(base, "unreadable", faults, body=partial(_hooked, "unreadable")) == set(faults)
    assert (base / "printed-unreadable" / "eio-3").exists()  # each of the four has happened
    assert "Input/output error" in notes(base, "unreadable")
    check_equal(base, "unreadable")


def check_ledger(folder: Path, name: str, found: dict[str, Any]) -> None:
    """The steps that were taken twice are those after the checkpoint; every step of the history that counts has all samples once."""
    taken: dict[tuple[int, int], list[int]] = {}
    for event in events(folder, name, "SamplesTaken"):
        taken.setdefault((event["history"], event["step"]), []).extend(event["windows"])
    before = {step for history, step in taken if history == 0}
    again = {step for history, step in taken if history == found["history"]}
    assert before == set(range(1, found["from_step"] + 1)) and again == set(range(found["step"] + 1, STEPS + 1))
    for step in before & again:
        assert sorted(taken[0, step]) == sorted(taken[found["history"], step]), f"step {step}"


@pytest.mark.ranks
def test_a_damaged_checkpoint_is_passed_over_and_named(base: Path) -> None:
    assert train(base, "damaged", HOLDERS, body=partial(_hooked, "damage")) == set(HOLDERS)
    said = notes(base, "damaged")
    assert "the checkpoint of step 8 cannot be used, trying the next older one" in said and "sha256" in said
    found = went_back(base, "damaged")
    assert (found["step"], found["damaged"], found["abandoned"]) == (4, [8], ["step-00000008"])
    assert (base / "runs/damaged/checkpoints/abandoned/step-00000008/run_state.json").exists()
    check_equal(base, "damaged")


@pytest.mark.ranks
def test_one_that_stayed_in_the_old_history_follows_the_new_one(base: Path) -> None:
    assert train(base, "behind", HOLDERS, body=partial(_hooked, "stays behind")) == set(HOLDERS)
    assert (base / "printed-behind" / "stayed").exists()
    assert went_back(base, "behind")["step"] == 8
    check_equal(base, "behind")


@pytest.mark.ranks
def test_too_few_members_wait_say_for_whom_save_and_end(base: Path) -> None:
    """One of four is killed at step 6 and nobody comes in its place: what three hold is saved at step 6, and the same command goes on from there."""
    code = 75
    few = {"resilience__minimum": "4", "resilience__wait_s": "1"}
    train(base, "few", {"vote": ((2,), 6)}, code=code, body=partial(_hooked, "nobody comes"), **few)
    said, err = notes(base, "few"), (base / "printed-few" / "err").read_text()
    assert "local.2." in said and "killed by SIGKILL; 3 members are left" in said
    assert "the run needs 4: it waits for 1 more, then it saves and ends" in said
    assert "and the run needs 4; waited 1 s for more. What was committed is safe" in err
    saved = max(losses(base, "few"))
    assert 6 <= saved < 14 and CheckpointFolder(base / "runs/few/checkpoints").newest() == saved
    train(base, "few", {})
    check_equal(base, "few")


def said_by_host(folder: Path, name: str, kind: str) -> list[str]:
    """Reasons in the events of a kind that the supervisor has logged."""
    log = (folder / "runs" / name / "events").glob("host-*.jsonl")
    told = [json.loads(line) for path in log for line in path.read_text().splitlines()]
    return [e["why"] for e in told if e["kind"] == kind]


@pytest.mark.ranks
@pytest.mark.core
def test_a_rank_that_hangs_while_it_heartbeats_is_named_and_replaced(base: Path) -> None:
    train(base, "hangs", {}, body=partial(_hooked, "hangs"), resilience__hang_s="1.5")
    lost = said_by_host(base, "hangs", "MemberLost")
    assert any(why.startswith("made no progress for ") and "(data of step 7, " in why for why in lost), lost
    check_equal(base, "hangs")


@pytest.mark.ranks
def test_silence_of_all_ranks_at_once_is_waited_for(base: Path) -> None:
    """The supervisor of one machine hears nothing of any rank for twice the limit: nobody is removed."""
    train(base, "all-stop", {}, body=partial(_hooked, "all stop"))
    assert said_by_host(base, "all-stop", "MemberLost") == []
    awaited = said_by_host(base, "all-stop", "SilentAwaited")
    assert any("ranks are silent or still at once" in why and "nobody is removed for 600 s" in why for why in awaited)
    assert "silent or still at once" in (base / "printed-all-stop" / "err").read_text()
    check_equal(base, "all-stop")


def attack(port: int, folder: Path) -> bool:
    """Another user of this machine, with credentials of his own, asks the membership service of a run to stop it, without TLS and with. Whether he got an answer."""
    make_credentials(folder / "his.pem")
    context, words = client_context(folder / "his.pem"), b'["put", "stop", "by him"]'
    context.verify_mode = ssl.CERT_NONE  # he does not care whom he speaks with
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    try:
        if os.geteuid() == 0:
            os.setuid(65534)
        for wraps in (False, True):
            with contextlib.suppress(OSError), socket.socket() as plain:
                plain.settimeout(20.0)
                plain.connect(("127.0.0.1", port))
                sock = context.wrap_socket(plain) if wraps else plain
                sock.sendall(struct.pack(">I", len(words)) + words)
                if b'"ok"' in sock.recv(100):
                    os._exit(1)
        os._exit(0)
    finally:
        os._exit(2)


@pytest.mark.ranks
def test_a_host_with_another_recipe_and_a_stranger_are_refused_by_name_and_the_run_goes_on(base: Path) -> None:
    """Another seed of the data would be another run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        service = f"127.0.0.1:{probe.getsockname()[1]}"
    both = {
        **SETTINGS,
        "run__name": "hosts",
        "resilience__service": service,
        "resilience__wanted": "4",
        "resilience__f": "1",
    }
    own = {"launch__host": "a", "launch__keep_service": "true"}
    folder = base / "printed-a"
    first = Running(_hooked, "waits", ["train", *train_args(base, **both, **own)], str(folder), {}, folder=folder)
    wait_until(lambda: max(losses(base, "hosts"), default=0) >= 3)
    assert not attack(int(service.rpartition(":")[2]), base)
    other = train_args(base, **{**both, "launch__host": "b", "launch__ranks": "1", "train__seed": "7"})
    done = phalanx("train", *other, timeout_s=60)
    (folder / "go").touch()
    _, err = first.communicate(60)
    said = done.stderr
    assert (first.returncode, done.returncode) == (0, 2), err + said
    assert err.count("the membership service refused 127.0.0.1") == 1, err
    assert "problem with member b.0." in said and "plan hash = " in said and "the run has " in said
    check_equal(base, "hosts")


def wait_until(there: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("rank", "seen", "console", "said"),
    [(0, False, "plain", True), (0, True, "plain", False), (1, False, "plain", False), (0, False, "none", False)],
)
def test_a_way_back_is_told_where_nobody_draws(
    rank: int, seen: bool, console: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks of a machine were killed at once, and the successor of the one that draws came after the others."""
    told: list[Event] = []

    class Told(Sinks):
        def __call__(self, event: Event, /) -> None:
            told.append(event)

    trainer = SimpleNamespace(
        manager=SimpleNamespace(go_back=lambda step: []),
        rank=SimpleNamespace(
            sinks=Told([]), peers=SimpleNamespace(gather=lambda own: [own, seen]), info=SimpleNamespace(rank=rank),
            recipe=SimpleNamespace(observe=SimpleNamespace(console=console)),
        ),
    )  # fmt: skip
    back = Fallback(step=4, damaged=(), damaged_steps=())
    tell_went_back(trainer, back, why="nobody is left", committed=9, history=2)  # type: ignore[arg-type]
    assert [type(event).__name__ for event in told] == ["Note", "WentBack"]
    text = "phalanx: warning: nobody is left: training goes back to the checkpoint of step 4, 5 steps before\n"
    assert capsys.readouterr().err == (text if said else "")
