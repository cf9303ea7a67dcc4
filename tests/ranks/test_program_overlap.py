"""Every value of `dispatch.overlap`: a traced step records the ids of its program, no others, and the ways can be compared id by id."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from program_help import TINY, Run, one_step
from tiers import some

from phalanx.core.events import Collective, Event, Operation
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.program.step import step_program
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache
from ranks import run_ranks

WAYS = ("serial", "coarse:2", "tiles", "fine")
GATED = dataclasses.replace(TINY, dense_layers=1, dense_ffn=32, shared_ffn=32, shared_gate=True)
PLAIN = dataclasses.replace(TINY, shared_ffn=0)
TWO = (
    (Folding(world=2, ep=2), TINY, "none"),
    (Folding(world=2, ep=2), PLAIN, "full"),
    (Folding(world=2, tp=2, etp=2), GATED, "full"),
    (make_folding(world=2, cp=2, ep=2), TINY, "selective"),
)
FOUR = (
    (Folding(world=4, ep=2, etp=2), TINY, "none"),
    (Folding(world=4, tp=2, ep=4), GATED, "full"),
    (make_folding(world=4, pp=2, ep=2), PLAIN, "none"),
)


def runs(cases: Any) -> list[Run]:
    return [
        Run(folding=folding, spec=spec, recompute=recompute, dispatch=DispatchSpec(overlap=way))
        for (folding, spec, recompute), way in itertools.product(cases, WAYS)
    ]


Told = tuple[dict[str, tuple[str, int]], list[str]]
"""Of each id of a collective: axis and bytes of all its messages; what was computed, each time that it was."""


def told_by(rank: int, cache: GroupCache, several: list[Run]) -> list[Told]:
    found = []
    for run in several:
        events: list[Event] = []
        one_step(rank, cache, run, Collectives(trace=True, emit=events.append, timeout_s=30))
        sent: dict[str, tuple[str, int]] = {}
        for event in events:
            if isinstance(event, Collective):
                sent[event.op_id] = event.axis, sent.get(event.op_id, ("", 0))[1] + event.sent_bytes
        computed = [e.op_id for e in events if isinstance(e, Operation) and e.lane == "compute"]
        found.append((sent, computed))
    return found


def check(world: int, several: list[Run]) -> list[list[Told]]:
    results = run_ranks(world, told_by, several, timeout_s=400)
    for rank, found in enumerate(results):
        for run, (sent, computed) in zip(several, found, strict=True):
            program = run.program(rank)
            program.check()
            planned = {op.id: op.axis for op in program.collectives}
            assert {id: axis for id, (axis, _) in sent.items()} == planned, (run, rank)
            assert sorted(computed) == sorted(op.id for op in program.ops if op.kind == "compute"), (run, rank)
    return results


@pytest.mark.core
@pytest.mark.ranks
def test_two_ranks_record_the_ids_of_their_programs() -> None:
    check(2, some(runs(TWO), 6))


@pytest.mark.ranks
def test_four_ranks_record_the_ids_of_their_programs() -> None:
    check(4, some(runs(FOUR), 6))


def losses(rank: int, cache: GroupCache, several: list[Run]) -> list[tuple[float, float]]:
    steps = [one_step(rank, cache, run, Collectives(timeout_s=240))[0] for run in several]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_with_gateways_is_the_serial_step_and_has_the_same_ids() -> None:
    """Four ranks as two hosts: fewer bytes between them, other sums, and the ids of a program that does not know of hosts."""
    spec = dataclasses.replace(TINY, top_k=4)
    common = Run(folding=Folding(world=4, ep=4), spec=spec, recompute="full", dtype=torch.float64)
    serial, plain, hosts = (
        dataclasses.replace(common, dispatch=DispatchSpec(overlap=way), hosts=hosts)
        for way, hosts in (("serial", ()), ("fine", ()), ("fine", (0, 0, 1, 1)))
    )
    for found in run_ranks(4, losses, [serial, plain, hosts], timeout_s=400):
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-12)
    total = [0, 0]
    for found in check(4, [plain, hosts]):
        for number, (sent, _) in enumerate(found):
            total[number] += sum(n for id, (_, n) in sent.items() if id.endswith((".rows", ".weights")))
    assert total[0] != total[1]  # with gateways second hops count too


@pytest.mark.slow
@pytest.mark.ranks
def test_the_same_rows_have_the_same_id_in_every_way() -> None:
    """Bytes there and back, forward and backward, under the ids of the serial step; chunks add up. An entry a row, so that bytes are equal."""
    spec = dataclasses.replace(PLAIN, top_k=1)
    several = [
        Run(folding=Folding(world=2, ep=2), spec=spec, dispatch=DispatchSpec(overlap=way)) for way in WAYS
    ]  # with one choice a token has one row: a copy for each rank is a copy for each row
    for found in check(2, several):
        serial, *others = (
            {
                (layer, phase, name): sum(n for id, (_, n) in sent.items() if _is(id, layer, phase, name))
                for layer in range(spec.num_layers)
                for phase in ("fwd", "bwd")
                for name in ("dispatch.rows", "combine.rows")
            }
            for sent, _ in found
        )
        assert all(serial.values())
        assert others == [serial] * 3


def _is(id: str, layer: int, phase: str, name: str) -> bool:
    way, _, what = name.partition(".")
    return f".L{layer}.{phase}.{way}." in id and id.endswith("." + what)


@pytest.mark.unit
def test_programs_of_every_way() -> None:
    """Ids occur once; on one rank of experts every setting is the serial one; tile by tile the shared expert stands in the gap."""
    for way, recompute in itertools.product(("auto", "coarse:3", *WAYS), ("none", "full", "selective")):
        for world, folding in ((4, Folding(world=4, ep=2, etp=2)), (4, Folding(world=4))):
            for rank in range(world):
                run = Run(folding=folding, recompute=recompute, dispatch=DispatchSpec(overlap=way))
                run.program(rank).check()
                alone = folding.ep == 1
                plain = dataclasses.replace(run, dispatch=DispatchSpec()).program(rank)
                assert (run.program(rank) == plain) == (alone or way == "serial")
    program = step_program(Folding(world=2, ep=2), TINY, DispatchSpec(overlap="fine"), rank=1)
    layer = [op.id.split("L0.fwd.")[1] for op in program.ops if ".L0.fwd." in op.id and not op.id.count("attention")]
    assert layer == [
        "router", "dispatch.counts", "dispatch.sizes", "dispatch.weights", "dispatch.permute", "dispatch.rows", "shared",
        "experts", "combine.rows", "combine.sum",
    ]  # fmt: skip
    (rows,) = (op for op in program.ops if op.id == "mb1.L0.fwd.dispatch.rows")
    assert (rows.axis, rows.collective, rows.peers) == ("ep_etp", "messages", (0,))
    assert "messages over ep_etp" in program.explain()
