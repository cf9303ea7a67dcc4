"""Seconds of one MoE layer on the kernels that wait on flags (`dispatch.overlap = "fused"`), as `runtime/moe/fused.py` launches them on one host's devices.

Decides what of the messages hides. Must never change: launches, their division and their order are those of `plan/moe/overlap/fused/launch.py`, `plan/moe/overlap/fused/device.py` and `runtime/moe/fused.py`; no
time of theirs was measured on a device.

    index       which token goes where and in which order rows are computed: small operations on tables, forward only, nothing beside them
    tables      slots and weights of what comes, backward gradients of row weights: an all-to-all of fixed size, bare
    first       entries are sent by `left_free` multiprocessors, the first product has the others; it computes problem by problem, each when the last flag of its rows is there. Every slot's
                last problem needs the last flag, so a slot of one problem waits for everything
    between     a copy of the rows that came, and the activation
    second      the second product by blocks of columns on the same multiprocessors, a block sent back while the next is computed; those that have computed help to send
    weights     backward, gradients of weights: the kernel before them ends when its rows have left, so among equal ranks nothing travels beside them
    finish      partial sums of the ranks are added up

An entry is a token that goes to a rank, once (both ways). Rows travel at the link's rate where `ROW_SMS` multiprocessors send, slower in proportion where fewer do. All ranks have the fullest rank's load.

t tokens of a rank, K choices, P ranks of the group, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.mapping import Folding
from phalanx.plan.moe.overlap.fused import FusedLaunch, SecondCost, fused_launch, predicted_s
from phalanx.simulate.hardware import GroupSpan, Hardware, Network, Oracle, distinct
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step.tile_layer import LedgerEntries
from phalanx.simulate.step.tile_time import FIRST_KERNELS, ROW_SMS, Direction

PROBLEM_ROWS = 512
"""Most rows of a problem (`kernels/triton/tiles.py: TileShape`)."""
INDEX_KERNELS = 122
"""Operations of `kernels/triton/layer.py` that order a layer's rows: route, pack_weights, begin and row_weights (a test counts them)."""


def fused_run_problems(folding: Folding, hardware: Hardware, *, left_free: int | None) -> list[Problem]:
    """Why no run on this hardware takes these kernels: what `runtime/moe/fused.py` refuses when a run begins."""

    def wrong(rule: str, hint: str) -> Problem:
        return Problem(where="dispatch.overlap", value="fused", rule=rule, hint=hint)

    if hardware.sms is None:
        return [wrong("stores rows in the memory of other devices, and this cluster computes on processors", "auto")]
    problems = []
    hosts = max(len({rank // hardware.ranks_per_host for rank in group}) for group in folding.groups("ep"))
    if hosts > 1:
        rule = f"stores rows in the memory of other devices, and with folding.ep = {folding.ep} an expert-parallel group is on {hosts} hosts of {hardware.ranks_per_host} ranks"
        problems.append(wrong(rule, f"folding.ep up to {hardware.ranks_per_host}, or fine"))
    try:
        fused_launch(hardware.sms, left_free=left_free, capacity=1, columns=1)
    except PlanError as error:
        problems += error.problems
    return problems


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What a rank sends one way: seconds at the rate of its links, and until the first of it is there."""

    link_s: float
    latency_s: float

    def sending_s(self, programs: int) -> float:
        """All of it, by so many multiprocessors."""
        return self.link_s * max(1.0, ROW_SMS / programs)


def first_s(product_s: float, messages: Messages, launch: FusedLaunch, *, ranks: int, slot_rows: float) -> float:
    """The first product beside the entries that come to it. `product_s`: on the whole device; `slot_rows`: rows of each slot."""
    slowed, sending_s = product_s * launch.second / launch.first, messages.sending_s(launch.send)
    flags, each = ranks * launch.parts, min(1.0, PROBLEM_ROWS / max(slot_rows, 1.0))
    end_s, done = 0.0, 0.0
    for number in range(math.ceil(1 / each - 1e-9)):
        share = min(1.0, (number + 1) * each)
        needed = math.ceil(share * flags - 1e-9)
        others = max(0, needed - launch.parts)  # the own entries come first, and need no link
        come_s = messages.latency_s + sending_s * others / (flags - launch.parts) if others else 0.0
        end_s, done = max(end_s, come_s) + slowed * (share - done), share
    return max(end_s, messages.latency_s + sending_s)


def second_s(product_s: float, messages: Messages, launch: FusedLaunch) -> float:
    """The second product and the sending of its sums."""
    slowed = product_s * launch.second / (launch.second - launch.senders)
    cost = SecondCost(
        programs=launch.second,
        tiles=launch.second - launch.senders,
        tile_s=slowed,
        blocks=launch.blocks,
        sender_s=messages.link_s * ROW_SMS,
        link_s=messages.link_s,
    )
    return messages.latency_s + predicted_s(cost, launch.senders)


@dataclass(frozen=True)
class FusedPass:
    """One direction of a layer, without index, tables and finish."""

    seconds: float
    compute_s: float
    """Products on the whole device, and memory-bound kernels."""
    messages_s: float
    """Both ways, at the rate of the links."""
    weights_s: float = 0.0
    """Part of `compute_s` for gradients of weights."""

    @property
    def exposed_s(self) -> float:
        """Longer than computing alone: waits, and products on fewer multiprocessors."""
        return self.seconds - self.compute_s


@dataclass(frozen=True)
class FusedExperts:
    """Experts of one job under one mapping."""

    job: Job
    mapping: Mapping
    oracle: Oracle
    network: Network

    @property
    def tokens(self) -> float:
        return self.mapping.tokens(self.job)

    @property
    def rows(self) -> float:
        """Rows of a rank's experts, with an even load."""
        return self.tokens * self.job.spec.top_k * self.mapping.rows_share(self.job)

    @property
    def slots(self) -> int:
        return max(1, round(self.job.spec.num_experts / self.mapping.folding.ep))

    @property
    def row_bytes(self) -> int:
        return self.job.spec.hidden * self.mapping.item_bytes

    @property
    def span(self) -> GroupSpan:
        return GroupSpan(self.mapping.folding.ep, 1)

    @property
    def launch(self) -> FusedLaunch:
        """Raises `PlanError` where a device cannot be divided so."""
        capacity, sms = max(1, round(self.tokens)), self.oracle.hardware.sms
        assert sms is not None  # `fused_run_problems`
        left_free = self.mapping.overlap.left_free
        return fused_launch(sms, left_free=left_free, capacity=capacity, columns=self.job.spec.hidden)

    def messages(self, load: float) -> Messages:
        """Messages of entries, one way."""
        s, latency_s = self.job.spec, self.oracle.hardware.inside_latency_s
        sent = self.tokens * load * min(1.0, self.mapping.rows_share(self.job)) * self.row_bytes
        whole = self.network.all_to_all_dedup(sent, self.span, top_k=s.top_k, num_experts=s.num_experts)
        return Messages(link_s=max(0.0, whole - latency_s), latency_s=latency_s)

    def one(self, load: float, direction: Direction) -> FusedPass:
        """Ranks that all have `load` times the even share of the rows."""
        s, o, f, item = self.job.spec, self.oracle, self.mapping.folding, self.mapping.item_bytes
        rows, slots = self.rows * load, self.slots
        h, n, up = s.hidden, s.expert_ffn, s.ffn_matrices - 1
        forward, launch, messages = direction == "forward", self.launch, self.messages(load)
        widths = ((up * n, h), (h, n)) if forward else ((n, h), (h, up * n))
        first, second = (o.product(rows, columns, depth, groups=slots) for columns, depth in widths)
        inner = (1.0 if forward else 5 / 3) * rows * s.ffn_matrices * n * item
        between = o.memory(2 * rows * self.row_bytes + inner, kernels=1 + FIRST_KERNELS[direction])
        weights = 0.0
        if not forward:
            weights = o.product(rows, up * n, h, groups=slots, accumulate=True)
            weights += o.product(rows, h, n, groups=slots, accumulate=True)
        first_phase = first_s(first, messages, launch, ranks=f.ep, slot_rows=rows / slots)
        return FusedPass(
            seconds=first_phase + between + second_s(second, messages, launch) + weights,
            compute_s=first + between + second + weights,
            messages_s=2 * (messages.link_s + messages.latency_s),
            weights_s=weights,
        )

    def around(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(forward, backward) of index and finish, and of the all-to-alls of fixed size."""
        s, o, f, t = self.job.spec, self.oracle, self.mapping.folding, self.tokens
        table = 4 * f.ep * t * s.top_k
        entries = t * min(1.0, self.mapping.rows_share(self.job)) * distinct(f.ep, s.top_k, s.num_experts)
        finish = o.memory((entries + t) * self.row_bytes)
        index = o.memory(INDEX_KERNELS * 2 * table, kernels=INDEX_KERNELS)
        fixed = (self.network.all_to_all(2 * table, self.span), self.network.all_to_all(table, self.span))
        return (index + finish, finish), fixed

    def again_s(self) -> float:
        """The first product once more, on the whole device: what selective recomputation repeats."""
        s = self.job.spec
        return self.oracle.product(self.rows, (s.ffn_matrices - 1) * s.expert_ffn, s.hidden, groups=self.slots)

    def entries(self) -> LedgerEntries:
        """Everything between the router and the sum over ranks, as entries of a layer's ledger."""
        load = self.mapping.load(self.job)
        calm, full = ([self.one(x, way) for way in ("forward", "backward")] for x in (1.0, load))
        memory, fixed = self.around()
        late = [one.compute_s - other.compute_s for one, other in zip(full, calm, strict=True)]
        exposed = [one.exposed_s + bare for one, bare in zip(full, fixed, strict=True)]
        return LedgerEntries(
            seconds={
                "experts": (calm[0].compute_s, calm[1].compute_s),
                "imbalance": (late[0], late[1]),
                "memory": memory,
                "a2a_inside": (exposed[0], exposed[1]),
            },
            hidden=sum(max(0.0, one.messages_s - one.exposed_s) for one in full),
            weight_grad=full[1].weights_s,
            # the ledger takes a backward pass to have twice the kernels of a forward one
            kernels=(INDEX_KERNELS + sum(FIRST_KERNELS.values()) + 16) // 3,
        )
