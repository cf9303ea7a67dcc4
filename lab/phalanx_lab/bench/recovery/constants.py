"""Constants of this machine for the clock of a recovery (`simulate/failures/recovery_time.py`): pieces of it by themselves, in processes where nobody dies.

    exit_s, exit_s_per_byte          processes of two sizes are killed, and their handles waited for
    trip_s, drop_s, meet_s ...       members of a service of their own meet again and again, under numbers that no run has
    group_s, gather_s                further groups of them, and small objects through one
    tensor_s, build ..., fresh ...   two small models that are in no run are put together in memory that was given back; new memory is written to
    sum_s, copy_s, plan_s            their state: checksums, copies to another place, plans
    message_s ...                    messages from one to another, of two sizes

A line goes through each pair of sizes. As many processes compute at once as there are processors, so a constant is that of a rank with one for itself; who waits for them sleeps.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from phalanx.core.config import OptimConfig
from phalanx.core.errors import RunError
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.state import STATE_KINDS
from phalanx.plan.layout.tensors import Held, TensorLayout
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.state_descriptor import Fact
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move, equal_hosts
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.comm.peers import Peers
from phalanx.runtime.membership.keys import LAST_LOOK_S, poll
from phalanx.runtime.membership.membership import Generation
from phalanx.runtime.membership.rendezvous import GroupEpoch, form, ready_keys
from phalanx.runtime.membership.supervisor import Supervisor, SupervisorSettings
from phalanx.runtime.membership.votes import MemberReport
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.runtime.reshard.program import rank_program
from phalanx.runtime.reshard.resharder import Resharder
from phalanx.simulate.failures.recovery_time import Constants
from phalanx.train.assembly import assemble
from phalanx.train.placement.state_transfer import checksums, move_state
from phalanx.train.step.transaction import StepParts
from phalanx_lab.plain_model import plain_context

T = TypeVar("T")
MEMBERS = 3
REPEATS = 5
FIRST_NUMBER = 1000
"""First number of the generations that are met for the clock alone."""
KILLED_BYTES = (0, 256 << 20)
MODELS: tuple[ModelSpec, ...] = (
    replace(PRESETS["tiny"], name="calibration-small", num_layers=3, hidden=48, expert_ffn=96),
    replace(PRESETS["tiny"], name="calibration-large", num_layers=3, hidden=192, expert_ffn=640),
)
MESSAGES = (64 << 10, 4 << 20)
"""Bytes of the two sizes of message."""
COUNT = 16
"""Messages of one size, one behind the other."""
BLOCK_BYTES, BLOCKS = 8 << 20, 16
"""New memory."""
TIMEOUT_S = 60.0


def measure_constants() -> Constants:
    """About 10 seconds. The calling process must have run no tensor operation: it forks. Raises `RunError` where a process of the measurement fails."""
    small, large = (_killed_s(size) for size in KILLED_BYTES)
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as folder:
        path = Path(folder) / "told.json"
        settings = SupervisorSettings(
            slots=MEMBERS, wanted=MEMBERS, respawns=0, limit_s=TIMEOUT_S, agent=AgentSettings(timeout_s=TIMEOUT_S)
        )
        code = Supervisor(partial(_work, path), settings).run()
        if code or not path.exists():
            raise RunError(f"a process of the measurement ended with {code}")
        told: dict[str, float] = json.loads(path.read_text())
    return Constants(
        cores=float(len(os.sched_getaffinity(0))),
        exit_s=small,
        exit_s_per_byte=max(0.0, large - small) / KILLED_BYTES[1],
        look_s=LAST_LOOK_S,
        **told,
    )


def _killed_s(size: int) -> float:
    """Median from SIGKILL of a process that holds so many bytes until its parent's poll knows."""
    found = []
    for _ in range(REPEATS):
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            held = bytearray(size)
            held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
            os.write(told, b"!")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        handle = os.pidfd_open(pid)
        begin_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        select.select([handle], [], [])
        os.waitpid(pid, 0)
        found.append(time.monotonic() - begin_s)
        for fd in (ready, told, handle):
            os.close(fd)
    return statistics.median(found)


def _work(path: Path, agent: WorkerAgent) -> int:
    """One member of the measurement; the first one writes what was found."""
    torch.set_num_threads(1)
    keep_freed_memory(threads=1)
    agent.announce(plan_hash="calibration", version="1")
    report = MemberReport(uid=agent.uid, step=0, holds=False)
    team = agent.next_epoch(report)
    meeting = _Meeting(agent, team, report)
    told = meeting.constants()
    own = meeting.alone(_of_models)
    told |= {name: meeting.median(value) for name, value in own.items()}
    told |= meeting.messages()
    if meeting.index == 0:
        path.write_text(json.dumps(told))
    meeting.over()
    return 0


class _Meeting:
    """The members, that meet again and again; every call is collective."""

    def __init__(self, agent: WorkerAgent, team: GroupEpoch, report: MemberReport) -> None:
        self.agent, self.first, self.report = agent, team.generation, report
        self.index, self.number = self.first.uids.index(agent.uid), FIRST_NUMBER
        self.team, self.peers = team, Peers(team.groups.get(tuple(range(team.size)), purpose="control"))
        self.computing = min(MEMBERS, len(os.sched_getaffinity(0)))

    def median(self, mine: float) -> float:
        """Median of what those who computed found."""
        return statistics.median(value for value in self.peers.gather(mine) if value >= 0)

    def alone(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Done by as many members as there are processors at once; the others sleep."""
        self.peers.gather(None)
        found = work() if self.index < self.computing else None
        names = next(each for each in self.peers.gather(found) if each is not None)
        return found if found is not None else dict.fromkeys(names, -1.0)

    def constants(self) -> dict[str, float]:
        keys = self.agent.keys()
        trip_s = self.median(_each_s(lambda: keys.all_there(ready_keys(self.first)), 50))
        self._all_here("asked")
        two_s, _ = self._meet(2)
        three_s, drop_s = self._meet(3)
        everyone = tuple(range(MEMBERS))
        begin_s = time.monotonic()
        groups = [self.team.groups.get(ranks) for ranks in ((0, 1), (0, 2), (1, 2))]
        groups.append(self.team.groups.get(everyone, purpose="control"))
        mine_s = (time.monotonic() - begin_s) / len(groups)
        self.peers = Peers(groups[-1])
        group_s = self.median(mine_s)
        gather_s = self.median(_each_s(lambda: self.peers.gather({"hash": "x" * 16}), 30))
        return {
            "trip_s": trip_s, "drop_s": drop_s, "meet_s": two_s, "member_s": max(0.0, three_s - two_s),
            "group_s": group_s, "gather_s": gather_s,
        }  # fmt: skip

    def _meet(self, size: int) -> tuple[float, float]:
        """(seconds of barrier and world group, seconds to drop them) of so many members: medians over meetings, after which the team is that of the last one."""
        met, dropped = [], []
        for _ in range(REPEATS):
            begin_s = time.monotonic()
            self.team.drop()
            dropped.append(time.monotonic() - begin_s)
            self.number += 1
            here = replace(self.first, number=self.number, members=self.first.members[:size])
            self._all_here("before")
            if self.index < size:
                self.team = self._form(here)
                met.append(self.team.formed_s)
            self._all_here("formed")  # who drops it earlier breaks it for the others
        told = self._all_here("told", f"{statistics.median(met) if met else -1.0} {statistics.median(dropped)}")
        seconds = [[float(word) for word in text.split()] for text in told]
        return max(one for one, _ in seconds), statistics.median(one for _, one in seconds)

    def _form(self, generation: Generation) -> GroupEpoch:
        keys = self.agent.keys()
        keys.put(ready_keys(generation)[generation.uids.index(self.agent.uid)], self.report.to_json())
        return form(generation, self.agent.uid, keys, timeout_s=TIMEOUT_S)

    def _all_here(self, what: str, said: str = "1") -> list[str]:
        """A barrier without groups; what each says."""
        keys = self.agent.keys()
        names = [f"calibration/{self.number}/{what}/{uid}" for uid in self.first.uids]
        keys.put(names[self.index], said)
        if not poll(lambda: keys.all_there(names), TIMEOUT_S, last_look_s=1e-3):
            raise RunError(f"calibration: a member did not come ({what})")
        return [keys.get(name) or "" for name in names]

    def messages(self) -> dict[str, float]:
        """A line through messages of two sizes, from the first member to the second."""
        axis = Axis("everyone", tuple(range(MEMBERS)), self.index, self.team.groups.get(tuple(range(MEMBERS))))
        resharder = Resharder(Collectives(timeout_s=TIMEOUT_S), axis, hosts=equal_hosts([0] * MEMBERS))
        found = []
        for size in MESSAGES:
            rows = COUNT * size // 4
            move = _travelling(rows)
            have = torch.ones(rows) if self.index == 0 else None
            want = torch.zeros(rows) if self.index == 1 else None
            resharder.options = replace(resharder.options, message_bytes=size)
            seconds = []
            for _ in range(REPEATS):
                self.peers.gather(None)
                prepared = resharder.prepare([move])
                begin_s = time.monotonic()
                resharder.move(prepared, [have], dtypes=[torch.float32], out=[want], op_id="calibration")
                seconds.append(time.monotonic() - begin_s)
            found.append(max(self.peers.gather(statistics.median(seconds))) / COUNT)
        slope = max(0.0, found[1] - found[0]) / (MESSAGES[1] - MESSAGES[0])
        return {"message_s": max(0.0, found[0] - slope * MESSAGES[0]), "message_s_per_byte": slope}

    def over(self) -> None:
        self._all_here("over")
        self.team.drop()


def _travelling(rows: int) -> Move:
    """A tensor from the first rank to the second."""
    box = Box((0,), (rows,))
    held = ((Held(box, (0,)),),)
    src, dst = (TensorLayout(shape=(rows,), ranks=(rank,), held=held, local_shapes=((rows,),)) for rank in (0, 1))
    return Move(name="x", itemsize=4, src=src, dst=dst)


def _each_s(work: Callable[[], object], count: int) -> float:
    work()
    begin_s = time.monotonic()
    for _ in range(count):
        work()
    return (time.monotonic() - begin_s) / count


# ---- two models that are in no run -----------------------------------------------------------------------------------


def _of_models() -> dict[str, float]:
    """Lines through both, of a rank by itself."""
    (small, large) = (_of_model(spec) for spec in MODELS)
    size = large["bytes"] - small["bytes"]
    state = large["state"] - small["state"]

    def slope(name: str, by: float) -> float:
        return max(0.0, large[name] - small[name]) / by

    reused = slope("again_s", size)
    sum_byte, copy_byte = slope("sums_s", state), slope("copied_s", state)
    return {
        "tensor_s": max(0.0, small["again_s"] - reused * small["bytes"]) / small["tensors"],
        "build_s_per_byte": reused,
        "fresh_s_per_byte": _fresh_s_per_byte(),
        "sum_s": max(0.0, small["sums_s"] - sum_byte * small["state"]) / small["pieces"],
        "sum_s_per_byte": sum_byte,
        "copy_s": max(0.0, small["copied_s"] - copy_byte * small["state"]) / small["pieces"],
        "copy_s_per_byte": copy_byte,
        "plan_s": small["plan_s"],
    }


def _of_model(spec: ModelSpec) -> dict[str, float]:
    first, second = _put_together(spec), _put_together(spec)
    del first
    third, again_s = _timed(lambda: _put_together(spec))  # in the memory of the first
    boxes = third.state.boxes()
    _, sums_s = _timed(lambda: checksums(boxes, cut={}))
    moves = [_staying(box.name, tuple(box.tensor.shape)) for box in boxes]
    old = {box.name: box.tensor for box in second.state.boxes()}
    new = {box.name: box.tensor for box in boxes}
    axis = Axis("alone", (0,), 0, None)
    resharder = Resharder(Collectives(timeout_s=TIMEOUT_S), axis, hosts=equal_hosts([0]))
    move_state(resharder, moves, old, new, op_id="calibration")  # plans it
    _, copied_s = _timed(lambda: move_state(resharder, moves, old, new, op_id="calibration"))
    params = sum(p.numel() for p in third.model.parameters())
    return {
        "bytes": 4.0 * params + sum(box.tensor.nbytes for box in boxes),
        "state": float(sum(box.tensor.nbytes for box in boxes)),
        "tensors": float(len(boxes) / len(STATE_KINDS)),
        "pieces": float(len(boxes)),
        "again_s": again_s,
        "sums_s": sums_s,
        "copied_s": copied_s,
        "plan_s": _plan_s(spec),
    }


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    begin_s = time.monotonic()
    found = work()
    return found, time.monotonic() - begin_s


def _fresh_s_per_byte() -> float:
    """What the first write to memory takes longer than the second."""
    blocks, first_s = _timed(lambda: [torch.ones(BLOCK_BYTES // 4) for _ in range(BLOCKS)])
    _, second_s = _timed(lambda: [block.fill_(1.0) for block in blocks])
    return max(0.0, first_s - second_s) / (BLOCK_BYTES * BLOCKS)


def _put_together(spec: ModelSpec) -> StepParts:
    """Parts of one rank, put together as a generation builds them."""
    groups = build_groups(make_folding(world=1), rank=0, cache=GroupCache(timeout_s=TIMEOUT_S))
    ctx = plain_context(spec, groups, dtype=torch.float32, comms=Collectives(timeout_s=TIMEOUT_S), drawn=False)
    parts = assemble(ctx, optim=OptimConfig(zero=0), num_microbatches=1)
    parts.state.make_room()
    return parts


def _staying(name: str, shape: Sequence[int]) -> Move:
    """A tensor whose rank keeps it."""
    whole = Box((0,) * len(shape), tuple(shape))
    layout = TensorLayout(
        shape=tuple(shape), ranks=(0,), held=((Held(whole, whole.offsets),),), local_shapes=(tuple(shape),)
    )
    return Move(name=name, itemsize=4, src=layout, dst=layout)


def _plan_s(spec: ModelSpec) -> float:
    """Seconds of a heal plan and its messages, for each moved tensor and member: three of four members go on."""
    folding = make_folding(world=4, ep=2)
    planner = RecoveryPlanner(spec=spec, base=folding, seq_len=32, floor=2)
    begun = planner.plan([Fact(uid=f"local.{i}.x", machine="local", descriptor=None) for i in range(4)])
    facts = [replace(fact, descriptor=begun.state_descriptor(rank)) for rank, fact in enumerate(begun.members)][:3]
    begin_s = time.monotonic()
    plan = planner.plan(facts)
    moves = plan.moves
    reshard = plan_reshard(moves, equal_hosts([0, 0, 0]))
    rank_program(reshard, 0)
    _ = plan.hash, plan.decision, reshard.hash
    return (time.monotonic() - begin_s) / sum(max(len(m.src.ranks), len(m.dst.ranks)) for m in moves)
