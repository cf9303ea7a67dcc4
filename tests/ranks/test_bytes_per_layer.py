"""What one MoE layer sends, number for number, against the formulas of `docs/explanation/folding.md`: from the events and counters of real steps.

Routing is dealt like cards (`router.force = balanced`), so that every rank sends as many rows to each expert and the formulas hold exactly;
what holds for any routing (the backward pass sends what the forward pass received) is checked with a free router too.

Names as there: n tokens of this rank, N = tp * n of its cp part, H hidden, K experts of a token, E experts, w bytes of an activation.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from program_help import SEQ_LEN, SEQUENCES, TINY, Record, Run, recorded, with_router

from phalanx.plan.mapping.folding import Folding, legal_foldings, make_folding
from phalanx.plan.moe.dispatch import DispatchSpec
from ranks import run_ranks

pytestmark = pytest.mark.ranks
FREE = dataclasses.replace(TINY, shared_ffn=0)
DEALT = with_router(FREE, force="balanced")
WEIGHT_BYTES = 4
"""Weights of rows are fp32 where activations are narrower."""

Sent = list[tuple[str, str, int]]
"""(operation without its place, axis, bytes)."""


def tokens(folding: Folding) -> int:
    return SEQUENCES * SEQ_LEN // (folding.cp * folding.tp)


def attention_bytes(run: Run) -> dict[str, Sent]:
    """Attention by phase: rows gathered and scattered over tp, keys over cp. Nothing else."""
    f, spec, w = run.folding, run.spec, run.dtype.itemsize
    rows = tokens(f) * spec.hidden * w * (f.tp - 1)
    local, kv = SEQUENCES * SEQ_LEN // f.cp, max(spec.num_kv_heads // f.tp, 1)
    keys, gradients = (2 * local * kv * spec.head_dim * size for size in (w, 4))
    forward: Sent = [("attention.gather", "tp", rows)] if f.tp > 1 else []
    back = list(forward)
    if f.tp > spec.num_kv_heads:
        copies = f.tp // spec.num_kv_heads
        part = ("attention.kv", "tp", (copies - 1) * 2 * local * spec.head_dim // copies * w)
        forward.append(part)
        back.append(part)
    ring = [(f"attention.ring.{i}", "cp", keys) for i in range(1, f.cp)]
    again = [
        (f"attention.ring.{i}", "cp", (keys if i < f.cp else 0) + (gradients if i > 2 else 0))
        for i in range(1, f.cp + 1)
        if i < f.cp or i > 2
    ]
    home = [("attention.ring.home", "cp", gradients)] if f.cp > 1 else []
    scatter: Sent = [("attention.scatter", "tp", rows)] if f.tp > 1 else []
    return {"fwd": [*forward, *ring, *scatter], "bwd": [*scatter, *again, *home, *reversed(back)]}


def expert_bytes(run: Run) -> dict[str, Sent]:
    """The formulas of the page."""
    f, spec, w = run.folding, run.spec, run.dtype.itemsize
    pairs = tokens(f) * spec.top_k
    over_ep, over_etp = (pairs * (f.ep - 1) // f.ep, pairs * (f.etp - 1))
    row, counts = spec.hidden * w, spec.num_experts * 8 * (f.ep * f.etp - 1)
    there: Sent = [
        ("dispatch.rows", "ep", over_ep * row),
        ("dispatch.rows_etp", "etp", over_etp * row),
        ("dispatch.weights", "ep", over_ep * WEIGHT_BYTES),
        ("dispatch.weights_etp", "etp", over_etp * WEIGHT_BYTES),
    ]
    back: Sent = [("combine.rows_etp", "etp", over_etp * row), ("combine.rows", "ep", over_ep * row)]
    forward = [one for one in [("dispatch.counts", "ep_etp", counts), *there, *back] if one[1] in _axes(f)]
    return {"fwd": forward, "bwd": [one for one in reversed(forward) if one[0] != "dispatch.counts"]}


def _axes(f: Folding) -> set[str]:
    return {name for name, size in (("ep", f.ep), ("etp", f.etp), ("ep_etp", f.ep * f.etp)) if size > 1}


def sent(record: Record, layer: int, phase: str) -> Sent:
    """Everything of a layer and phase, in order, whichever operation it is."""
    mark = f".L{layer}.{phase}."
    return [(e.op_id.split(mark)[1], e.axis, e.sent_bytes) for e in record.events if mark in e.op_id]


def check(world: int, runs: Sequence[Run]) -> None:
    by_rank = run_ranks(world, recorded, list(runs), timeout_s=400)
    for i, run in enumerate(runs):
        attention, experts = attention_bytes(run), expert_bytes(run)
        for rank in range(world):
            record: Record = by_rank[rank][i]
            for layer in run.spec.moe_layers:
                # lists, not sets: that nothing stands between attention and experts is part of what is compared
                assert sent(record, layer, "fwd") == attention["fwd"] + experts["fwd"], (run.folding, rank)
                assert sent(record, layer, "bwd") == experts["bwd"] + attention["bwd"], (run.folding, rank)


def mappings(world: int) -> list[Folding]:
    return list(legal_foldings(world, DEALT, seq_len=SEQ_LEN, axes=("tp", "cp", "ep", "etp")))


def test_every_mapping_of_four_ranks_sends_what_the_formulas_say() -> None:
    found = mappings(4)
    assert len(found) == 36
    check(4, [Run(folding=f, spec=DEALT) for f in found])


@pytest.mark.slow
def test_mappings_of_eight_ranks_in_bf16() -> None:
    found = [f for f in mappings(8) if f.tp > 1 and f.cp > 1 and f.ep * f.etp > 1][::2]
    assert len(found) == 14 and {(f.ep > 1, f.etp > 1) for f in found} == {(True, False), (False, True), (True, True)}
    check(8, [Run(folding=f, spec=DEALT, dtype=torch.bfloat16) for f in found])


@pytest.mark.core
def test_how_many_collectives_a_layer_has() -> None:
    """One exchange of counts; rows twice and weights once over ep; over etp one gather of rows, one of weights, one scatter, if etp > 1."""
    runs = [
        Run(folding=make_folding(world=8, tp=2, cp=2, ep=e, etp=t), spec=FREE)
        for e, t in ((8, 1), (4, 2), (1, 8), (1, 1))
    ]
    want = [
        {("all_gather", "ep_etp"): 1, ("all_to_all_rows", "ep"): 3},
        {
            ("all_gather", "ep_etp"): 1,
            ("all_to_all_rows", "ep"): 3,
            ("all_gather_rows", "etp"): 2,
            ("reduce_scatter_rows", "etp"): 1,
        },
        {("all_gather", "ep_etp"): 1, ("all_gather_rows", "etp"): 2, ("reduce_scatter_rows", "etp"): 1},
        {},
    ]
    mirror = {"all_gather_rows": "reduce_scatter_rows", "reduce_scatter_rows": "all_gather_rows"}
    for record_of_run in run_ranks(8, recorded, runs):
        for record, forward in zip(record_of_run, want, strict=True):
            back = {(mirror.get(op, op), axis): n for (op, axis), n in forward.items() if op != "all_gather"}
            for layer in FREE.moe_layers:
                assert _calls(record, layer, "fwd") == forward
                assert _calls(record, layer, "bwd") == back


def _calls(record: Record, layer: int, phase: str) -> dict[tuple[str, str], int]:
    """Calls by kind and axis, of the experts' axes."""
    events = [e for e in record.events if f".L{layer}.{phase}." in e.op_id and e.axis in ("ep", "etp", "ep_etp", "edp")]
    return dict(collections.Counter((e.op, e.axis) for e in events))


PAIRS = (("dispatch.rows", "combine.rows"), ("dispatch.rows_etp", "combine.rows_etp"))


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_the_backward_pass_mirrors_the_forward_pass_whatever_the_routing(transport: str) -> None:
    """Rows come back on the way on which they went: a rank's gradients of what it received are as large as what it sends in `combine`."""
    dispatch = DispatchSpec(transport=transport)  # type: ignore[arg-type]
    degrees = ({"ep": 4}, {"ep": 2, "etp": 2}, {"tp": 2, "cp": 2, "ep": 4}, {"cp": 2, "etp": 2, "ep": 2})
    runs = [Run(folding=make_folding(world=4, **d), spec=FREE, dispatch=dispatch) for d in degrees]
    uneven = 0
    for records in run_ranks(4, recorded, runs):
        for record in records:
            for layer in FREE.moe_layers:
                forward, back = ({name: size for name, _, size in sent(record, layer, p)} for p in ("fwd", "bwd"))
                for there, home in PAIRS:
                    assert forward.get(there) == back.get(home) and forward.get(home) == back.get(there)
                uneven += forward["dispatch.rows"] != forward["combine.rows"]
                row = FREE.hidden * 4
                if transport == "all_to_all":
                    assert forward["dispatch.weights"] * row == forward["dispatch.rows"] * WEIGHT_BYTES
    assert uneven > 0 or transport == "all_gather"  # the router is free: equal sizes by chance would prove little


def test_counters_hold_what_the_events_say() -> None:
    run = Run(folding=make_folding(world=4, tp=2, cp=2, ep=2, etp=2), spec=FREE)
    for (record,) in run_ranks(4, recorded, [run]):
        calls: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
        for event in record.events:
            calls[event.op, event.axis][0] += 1
            calls[event.op, event.axis][1] += event.sent_bytes
        assert {k: [c.calls, c.sent_bytes] for k, c in record.counters.items()} == calls
