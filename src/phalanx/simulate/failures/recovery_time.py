"""How long an elastic run takes from the death of ranks to the next committed step: the plan of the new generation (`plan/recovery/planner.py`) on a clock.

Decides the clock of a recovery. Its phases are those that the running system tells (`core/events.py: TeamFormed`, `TrainingResumed`):

    detected   the process has ended, and its supervisor knows
    formed     the generation is decided and announced, old groups are dropped, all members have met and are connected
    built      the other groups of the new mapping, modules and buffers
    moved      plans, checksums of what is held, messages (their programs, `plan/program/moves.py`, on the clock of `simulate/program/clock.py`), copies, checksums of what is held now
    step       the step that was lost, again

What each has to do is counted in the plan: groups, tensors, pieces, bytes, messages. What a unit of it takes are constants of a machine (`Constants`), measured by
`phalanx_lab/bench/recovery/constants.py` on pieces of the work by themselves, or given for a cluster; none is of a recovery. Ranks that share processors take turns. Must never change: no
torch, no process; the same plan and constants give the same seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.layout import STATE_KINDS, cells
from phalanx.plan.mapping import Folding, step_groups
from phalanx.plan.program import Op, StepProgram, move_program
from phalanx.plan.recovery import GenerationPlan, RecoveryPlanner, wave_id
from phalanx.plan.reshard import Hosts, Move, equal_hosts, plan_reshard
from phalanx.simulate.hardware import Cost
from phalanx.simulate.program import run_moves

PHASES = ("detected", "formed", "built", "moved", "step")
DECIDE_TRIPS = 4
"""Proposal of a generation: read the newest, create the next, put what says so."""
MEET_TRIPS = 6
"""Decision of the broken step, report (put and looked at), reports of others read, "begun" asked for, vote."""
GATHERS = 5
"""Gathers of small objects among all members: checkpoint folder, plans with checksums, hash of the moves, checksums again,
micro-batches agreed."""
WAVE_GATHERS = 2
"""More for each wave of state after the first: hash of its moves, checksums."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What units of a recovery take on one machine, seconds. Pieces of work are those of a rank that has a processor to itself."""

    cores: float
    """Processors that the ranks of a host share; infinite: each has its own."""
    exit_s: float
    """Seconds from SIGKILL until a supervisor knows, for a small process."""
    exit_s_per_byte: float
    """More for each byte that the process held."""
    trip_s: float
    """There and back to the membership service."""
    look_s: float
    """Seconds between two looks of somebody who waits for a key."""
    drop_s: float
    """Old groups and what refers to them."""
    meet_s: float
    """Barrier and world group of two, and for each further member `member_s`."""
    member_s: float
    group_s: float
    """A further process group."""
    gather_s: float
    """A small object of each member to all."""
    plan_s: float
    """Planning, for each tensor of state and rank that holds some of it."""
    tensor_s: float
    """A parameter tensor with its module, gradient and state."""
    build_s_per_byte: float
    """Seconds per byte of parameters and state that are laid out, in memory that the process had before."""
    fresh_s_per_byte: float
    """More where the memory is new to the process."""
    sum_s: float
    """Checksum of a piece, and for each byte `sum_s_per_byte`."""
    sum_s_per_byte: float
    copy_s: float
    """A piece that stays on its rank goes to its new place, and for each byte `copy_s_per_byte`."""
    copy_s_per_byte: float
    message_s: float
    """A message of state, and for each byte `message_s_per_byte`."""
    message_s_per_byte: float

    def shares(self, ranks: int) -> float:
        """How much longer computing takes where so many ranks of a host do it at once."""
        return max(1.0, ranks / self.cores)


@dataclass(frozen=True, kw_only=True)
class RankRecoveryWork:
    """What one rank of the new mapping has to do."""

    tensors: int
    parameter_bytes: int
    """Bytes of parameters in the compute type."""
    state_bytes: int
    """Master weights and both moments."""
    held_bytes: int
    """State that it held before."""
    held_pieces: int
    """Pieces of that whose checksums are compared; each kind of state counts."""
    pieces: int
    """The same of what it holds afterwards."""
    kept_bytes: int
    """State that stays on the rank, and goes to its new place."""
    copies: int
    messages: int
    """Sent and received."""
    sent_bytes: int
    received_bytes: int

    @property
    def laid_out_bytes(self) -> int:
        """Parameters and state."""
        return self.parameter_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True)
class RecoveryWork:
    """All that a new generation has to do, counted in its plan."""

    hash: str
    """Hash of the decision; a running member tells the same one."""
    folding: Folding
    lost: int
    members: int
    """Number of members on one machine: those that share its processors, if all are on it."""
    groups: int
    """Process groups beside the world's, that a rank waits for."""
    planned: int
    """Pairs of a tensor of state, each kind by itself, and a rank that holds some of it."""
    ranks: tuple[RankRecoveryWork, ...]
    """Those that differ."""
    waves: tuple[tuple[StepProgram, ...], ...] = ()
    """Messages of state, of all members, wave by wave; none where no plan was made: then the counts of `ranks` stand for them."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that move to all ranks together."""
        return sum(rank.received_bytes for rank in self.ranks)


def recovery_work(planner: RecoveryPlanner, plan: GenerationPlan, *, lost: int, itemsize: int) -> RecoveryWork:
    """Work of the generation of `plan`, which `planner` made, `lost` members fewer than before. `itemsize`: bytes of a parameter
    in the compute type."""
    everyone = range(len(plan.members))
    waves = [plan_reshard(plan.moves_of(wave), _hosts_of(plan)) for wave in range(len(plan.waves))]
    cut = {m.name: cells(h.box for side in (m.src, m.dst) for of in side.held for h in of) for m in plan.params}
    own, each = planner.state_bytes, planner.state_bytes + 2 * planner.moment_bytes
    ranks = []
    for rank in everyone:
        hops = [(hop, wave.moves) for wave in waves for hop in wave.programs.get(rank, ())]
        copies = [(part, wave.moves) for wave in waves for part in wave.copies(rank)]
        held, held_pieces = _held(plan.params, cut, rank, source=True)
        state, pieces = _held(plan.params, cut, rank, source=False)
        ranks.append(
            RankRecoveryWork(
                tensors=sum(rank in m.dst.ranks for m in plan.params),
                parameter_bytes=_local_bytes(planner, plan, rank, itemsize=itemsize),
                state_bytes=state * each // own,
                held_bytes=held * each // own,
                held_pieces=len(STATE_KINDS) * held_pieces,
                pieces=len(STATE_KINDS) * pieces,
                kept_bytes=sum(part.num_bytes(moves) for part, moves in copies),
                copies=len(copies),
                messages=len(hops),
                sent_bytes=sum(p.num_bytes(moves) for hop, moves in hops if hop.src == rank for p in hop.parts),
                received_bytes=sum(p.num_bytes(moves) for hop, moves in hops if hop.dst == rank for p in hop.parts),
            )
        )
    return RecoveryWork(
        hash=plan.decision,
        folding=plan.folding,
        lost=lost,
        members=len(plan.members),
        groups=num_groups(plan.folding, members=len(plan.members)),
        planned=sum(max(len(m.src.ranks), len(m.dst.ranks)) for m in plan.moves),
        ranks=tuple(ranks),
        waves=tuple(
            tuple(move_program(wave, rank, ranks=everyone, op_id=wave_id(number)) for rank in everyone)
            for number, wave in enumerate(waves)
        ),
    )


def num_groups(folding: Folding, *, members: int, in_order: bool = False) -> int:
    """Process groups that a generation makes beside the one of all, for which a rank waits: distinct sets of ranks, one of all for control, and one of the mapping where some members are idle.

    `in_order`, as on GPUs, where connecting takes the time and disjoint groups do so side by side: the most that a rank is in, and those of a step outside of its passes (`plan.mapping.step_groups`).
    """
    everyone = tuple(range(members))
    found = {ranks for name in folding.group_names for ranks in folding.groups(name) if len(ranks) > 1}
    mapped = tuple(range(folding.world))
    second = {ranks for ranks in (everyone, mapped) if len(ranks) > 1}
    if not in_order:
        return len(found - {everyone}) + len(second)
    apart = [ranks for of_name in step_groups(folding).values() for ranks in of_name]
    of_rank = Counter(rank for ranks in (*(found - {everyone}), *apart) for rank in ranks)
    return max(of_rank.values(), default=0) + len(second)


def _hosts_of(plan: GenerationPlan) -> Hosts:
    machines = sorted({fact.machine for fact in plan.members})
    return equal_hosts([machines.index(fact.machine) for fact in plan.members])


def _held(params: Sequence[Move], cut: dict[str, list[Any]], rank: int, *, source: bool) -> tuple[int, int]:
    """(bytes, pieces) of one kind of state that a rank holds before (`source`) or afterwards."""
    total = pieces = 0
    for move in params:
        side = move.src if source else move.dst
        if rank not in side.ranks:
            continue
        for held in side.held[side.ranks.index(rank)]:
            total += held.box.num_elements * move.itemsize
            pieces += sum(held.box.contains(cell) for cell in cut[move.name])
    return total, pieces


def _local_bytes(planner: RecoveryPlanner, plan: GenerationPlan, rank: int, *, itemsize: int) -> int:
    """Parameters of a rank, whole whatever is sharded of their state; 0 for one that is idle."""
    if rank >= plan.folding.world:
        return 0
    whole = replace(planner, zero=0)
    held = whole.holds(plan.state_descriptor(rank))
    return itemsize * sum(h.box.num_elements for boxes, _ in held.values() for h in boxes)


# ---- the clock ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecoveryTime:
    """Seconds of each phase, and of the whole."""

    hash: str
    phases: dict[str, float]
    members: int
    lost: int
    folding: str
    moved_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds from the death to the next committed step on all members."""
        return sum(self.phases.values())

    def explain(self) -> str:
        """Says it in a line."""
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in self.phases.items())
        return f"{format_seconds(self.seconds)} to the next step of {self.members} members ({self.folding}), {format_bytes(self.moved_bytes)} moved: {parts}"


def recovery_time(
    work: RecoveryWork, constants: Constants, *, step_s: float, notice_s: float = 0.0, fresh: bool = True
) -> RecoveryTime:
    """A recovery on the clock. `step_s`: a step of the new mapping. `notice_s`: until those who compute come to a collective, `notice_share` of a step of the old one.

    `fresh`: the processes have never given back the memory of an earlier generation, so all is new.
    """
    c, share = constants, constants.shares(work.members)
    fresh_s = c.fresh_s_per_byte if fresh else 0.0
    busiest = max(work.ranks, key=lambda rank: rank.laid_out_bytes)
    held_bytes = max(rank.held_bytes + rank.parameter_bytes for rank in work.ranks)
    formed = DECIDE_TRIPS * c.trip_s + c.look_s + share * c.drop_s + MEET_TRIPS * c.trip_s + c.look_s
    detected = constants.shares(work.members + work.lost) * (c.exit_s + c.exit_s_per_byte * held_bytes)
    formed += max(0.0, notice_s - detected)  # they compute while it is found out
    if work.members > 1:
        formed += share * (c.meet_s + (work.members - 2) * c.member_s)
    built = share * (
        work.groups * c.group_s
        + max(rank.tensors for rank in work.ranks) * c.tensor_s
        + busiest.laid_out_bytes * (c.build_s_per_byte + fresh_s)
    )
    return RecoveryTime(
        hash=work.hash,
        phases={
            "detected": detected,
            "formed": formed,
            "built": built,
            "moved": _moved_s(work, c, share),
            "step": step_s + share * fresh_s * busiest.parameter_bytes,
        },
        members=work.members,
        lost=work.lost,
        folding=work.folding.label(),
        moved_bytes=work.moved_bytes,
    )


def _moved_s(work: RecoveryWork, c: Constants, share: float) -> float:
    """The slowest rank of each part, for all wait for all between them."""
    planned = work.planned * c.plan_s
    before = max(r.held_pieces * c.sum_s + r.held_bytes * c.sum_s_per_byte for r in work.ranks)
    after = max(r.pieces * c.sum_s + r.state_bytes * c.sum_s_per_byte for r in work.ranks)
    copied = max(r.copies * c.copy_s + r.kept_bytes * c.copy_s_per_byte for r in work.ranks)
    return _carried_s(work, c, share) + share * (planned + before + copied + after)


def _carried_s(work: RecoveryWork, c: Constants, share: float) -> float:
    """Small objects among all, and messages of state: one in and one out of a rank at a time, each once what it carries has come."""
    each = GATHERS + WAVE_GATHERS * max(0, len(work.waves) - 1)
    gathers = each * c.gather_s if work.members > 1 else 0.0
    if not work.waves:
        return gathers + share * max(
            r.messages * c.message_s + max(r.sent_bytes, r.received_bytes) * c.message_s_per_byte for r in work.ranks
        )

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        if op.collective == "exchange":
            return Cost(share * (c.message_s + op.sent_bytes * c.message_s_per_byte), 0.0, "measured")
        return Cost(0.0, 0.0, "counted among the small objects")

    return gathers + sum(run_moves(wave, cost).seconds for wave in work.waves)


def step_after(step_s: float, *, samples: int, before: Folding, after: Folding, cores: float) -> float:
    """A step of the same micro-batches in another mapping: the most that a rank does of them where each has a processor, else all of it over the processors."""

    def work(folding: Folding) -> float:
        mine = math.ceil(samples / folding.replicas) * folding.replicas / folding.world
        return max(mine, samples / min(folding.world, cores))

    return step_s * work(after) / work(before)


def notice_share(program: StepProgram) -> float:
    """Expected time until a rank comes to its next collective, as a share of a step, at a random moment: whoever computes learns of a death there.

    Work counts by its FLOPs: sum of g^2 / 2 over the gaps g between collectives, which are 1 together.
    """
    gaps, gap = [], 0.0
    early = {op.posted_after for op in program.ops if op.posted_after}
    for op in program.ops:
        gap += op.flops
        if op.id in early or (op.kind == "collective" and not op.posted_after):
            gaps.append(gap)
            gap = 0.0
    gaps.append(gap)
    total = sum(gaps)
    return sum((g / total) ** 2 for g in gaps) / 2 if total else 0.0
