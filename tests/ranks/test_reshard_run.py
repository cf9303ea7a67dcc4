"""Random moves between layouts on 8 gloo ranks, bitwise against a slicing oracle; plans compared, cached and refused."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from in_order import in_order, rounds_of_nccl, stuck, unfinished
from reshard_help import equal_hosts
from tiers import ALL, times

from phalanx.core.errors import PeerError, PhalanxError, PlanError
from phalanx.plan.layout.mesh.placements import Partial, Shard, mesh_layout
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import travels_together
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.reshard.executor import batches
from phalanx.runtime.reshard.program import rank_program
from phalanx.runtime.reshard.resharder import KEPT_PLANS, PlanOptions, Resharder
from phalanx_lab.bench.reshard.counts import gather_counts
from phalanx_lab.bench.reshard.drawn import (
    local_of,
    logical_terms,
    prefilled,
    random_case,
    same,
    sources,
    wanted,
    whole,
)
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks
WORLD = 8
CASES = times(320, 48)


def axis_of(rank, cache, world=WORLD):
    ranks = tuple(range(world))
    return Axis("reshard", ranks, rank, cache.get(ranks))


# ---- every layout to every other -----------------------------------------------------------------------------------------------


def options_of(case):
    return PlanOptions(**{n: getattr(case, n) for n in ("method", "message_bytes", "open_hops", "staging_bytes")})


def random_moves(rank, cache, seeds, posting, folder):
    """What went wrong on this rank: nothing, if all is well. And how many pairs of layouts there were, by kind."""
    with in_order(folder, rank=rank) if posting == "batches" else nullcontext() as orders:
        return moved(rank, cache, seeds, posting, folder, orders)


def moved(rank, cache, seeds, posting, folder, orders):
    wrong, kinds = [], {}
    for seed in seeds:
        if orders is not None:
            orders.begin(folder / str(seed), rank)
        case = random_case(seed, world=WORLD)
        options = options_of(case)
        resharder = Resharder(
            Collectives(timeout_s=20), axis_of(rank, cache), hosts=case.hosts, options=options, posting=posting
        )
        source, out = sources(case, rank), prefilled(case, rank)
        kept = [x if x is None else x.clone() for x in source]
        got = resharder.move(case.moves, source, dtypes=case.dtypes, out=out, op_id=f"case{seed}")
        for i, want in enumerate(wanted(case, rank)):
            if not same(got[i], want):
                wrong.append(f"case {seed}, tensor {i}: differs from the oracle")
            if not same(source[i], kept[i]):
                wrong.append(f"case {seed}, tensor {i}: the source was written to")
        report = resharder.report
        if report.staging_peak_bytes > (case.staging_bytes or report.staging_limit_bytes):
            wrong.append(f"case {seed}: {report.staging_peak_bytes} bytes of staging")
        program = resharder.prepare(case.moves).program
        did = ["sends a sum"] if any(s.reads for s in program.steps) else []
        did += ["adds"] if program.sums else []
        did += ["sends on"] if any(s.needs and not s.reads for s in program.steps) else []
        for kind in (*kinds_of(case), *did):
            kinds[kind] = kinds.get(kind, 0) + 1
    return wrong, kinds


def kinds_of(case):
    for move, dtype in zip(case.moves, case.dtypes, strict=True):
        yield "pair"
        yield str(dtype)
        yield f"{len(move.src.shape)} dims"
        yield "disjoint" if not set(move.src.ranks) & set(move.dst.ranks) else "overlapping"
        if move.src.num_terms > 1:
            yield "partial"
        if any(len(boxes) > 1 for boxes in move.src.held + move.dst.held):
            yield "strided"
        if len({s for s in move.src.local_shapes if 0 not in s}) > 1:
            yield "uneven"


@pytest.mark.core
@pytest.mark.parametrize(("posting", "seeds"), [("tags", range(CASES)), ("batches", range(times(60, 48)))])
def test_random_layout_pairs(posting, seeds, tmp_path):
    got = run_ranks(WORLD, random_moves, list(seeds), posting, tmp_path, timeout_s=400)
    assert [wrong for wrong, _ in got] == [[]] * WORLD
    assert [text for seed in seeds if posting == "batches" for text in stuck(tmp_path / str(seed))] == []
    kinds = got[0][1]
    assert kinds["pair"] >= len(seeds)
    few = 0.02 * len(seeds) if ALL else 0
    for kind in ("disjoint", "overlapping", "partial", "strided", "uneven", "torch.bfloat16", "torch.int64", "torch.bool",
                 "torch.uint8", "1 dims", "2 dims", "3 dims", "4 dims"):  # fmt: skip
        assert kinds.get(kind, 0) > few, f"the cases have hardly any that are {kind}: {kinds}"
    for work in ("adds", "sends a sum", "sends on"):
        assert sum(kinds.get(work, 0) for _, kinds in got) > few, f"hardly any rank {work}"


def any_messages(program, window):
    """Runs with as many messages one way between two ranks as the window has."""
    runs = [(0, 0)]
    for number, step in enumerate(program.steps):
        first, _ = runs[-1]
        full = sum(other.sends == step.sends for other in program.steps[first:number]) == window
        if full or any(need >= first for need in step.needs):
            runs.append((number, number))
        runs[-1] = runs[-1][0], number + 1
    return runs


def ends(case, runs_of, *, connected, world=WORLD, together=True, **turns):
    """Whether a case comes to its end, by what NCCL carries at once and how it connects ranks."""
    plan = plan_reshard(case.moves, case.hosts, **options_of(case).words())
    posted = {}
    for rank in range(world):
        program = rank_program(plan, rank)
        ways = [("send" if step.sends else "receive", step.peer, "") for step in program.steps]
        runs = runs_of(program, plan.open_hops if together else 0)
        posted[rank] = [{"op": "messages", "id": "", "ends": ways[first:last]} for first, last in runs]
    return not unfinished(posted, connected=connected, **turns)


def test_moves_come_to_their_end_on_nccl_only_as_they_are_posted():
    """Not all do where peers are connected in whichever run has their first message, or where a run has several messages one way between two ranks."""
    cases = [random_case(seed, world=WORLD) for seed in range(100)]
    assert all(ends(case, batches, connected=True) for case in cases)
    assert not all(ends(case, batches, connected=False) for case in cases)
    assert not all(ends(case, any_messages, connected=True) for case in cases)
    turn = rounds_of_nccl(WORLD, WORLD)
    assert travels_together(WORLD) and all(ends(case, batches, connected=True, turn=turn) for case in cases)


@pytest.mark.parametrize(("world", "of_host"), [(12, 12), (24, 4)])
def test_moves_between_more_ranks_than_nccl_carries_at_once_post_each_message_alone(world, of_host):
    """Else those of a later round of its schedule wait for others, and ranks for each other."""
    cases, turn = [random_case(seed, world=world) for seed in range(40)], rounds_of_nccl(world, of_host)
    assert not travels_together(world)
    assert all(ends(case, batches, connected=True, world=world, turn=turn, together=False) for case in cases)
    assert not all(ends(case, batches, connected=True, world=world, turn=turn) for case in cases)


def test_the_oracle_sees_a_wrong_element():
    case = random_case(3)
    for number, move in enumerate(case.moves):
        full = whole(logical_terms(case, number))
        rank = next(r for r, shape in zip(move.dst.ranks, move.dst.local_shapes, strict=True) if 0 not in shape)
        good, bad = local_of(full, move.dst, rank), local_of(full, move.dst, rank)
        bad.view(-1).view(torch.uint8)[-1] ^= 1
        assert same(good, good.clone()) and not same(good, bad)


# ---- plans are compared, once --------------------------------------------------------------------------------------------------


def simple_moves(rows=8):
    src = mesh_layout((rows, 4), [2], [Shard(0)], ranks=[0, 1])
    return (Move(name="w", itemsize=4, src=src, dst=mesh_layout((rows, 4), [2], [Shard(1)], ranks=[2, 3])),)


def steady(rank, cache):
    """Four moves along two plans: what each of them exchanged beside the messages."""
    comms = Collectives(timeout_s=20)
    resharder = Resharder(comms, axis_of(rank, cache, 4), hosts=equal_hosts([0, 0, 1, 1]))
    counts, numbers = [], []
    for rows in (8, 12, 8, 8):
        comms.counters.clear()
        x = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4)
        half = rows // 2
        source = x[half * rank : half * (rank + 1)] if rank < 2 else None
        (got,) = resharder.move(simple_moves(rows), [source], dtypes=[torch.float32])
        assert got is None if rank < 2 else torch.equal(got, x[:, 2 * rank - 4 : 2 * rank - 2])
        counts.append({op: c.calls for (op, _), c in comms.counters.items()})
        numbers.append(resharder.prepare(simple_moves(rows)))
    assert numbers[0] is numbers[2] is numbers[3] and numbers[0] is not numbers[1]
    counted = gather_counts(comms, resharder.axis, resharder.report, moves=simple_moves(), hosts=resharder.hosts)
    assert [(c.host, c.once, c.entered_bytes) for c in counted] == ([] if rank else [(1, True, 8 * 4 * 4)])
    return counts


def test_a_move_costs_one_integer_beside_its_messages():
    for rank, counts in enumerate(run_ranks(4, steady)):
        for count in counts:
            assert count.pop("all_gather") == 1
            assert set(count) == ({"send"} if rank < 2 else {"receive"})


def plans_kept(rank, cache):
    resharder = Resharder(Collectives(), Axis("reshard", (0,), 0, None), hosts=equal_hosts([0]))
    first = resharder.prepare(alone(1))
    for rows in range(2, KEPT_PLANS + 2):
        resharder.prepare(alone(rows))
    return resharder.prepare(alone(1)) is first, resharder.prepare(alone(KEPT_PLANS)) is resharder.prepare(
        alone(KEPT_PLANS)
    )


def alone(rows):
    return (Move(name="w", itemsize=4, src=whole_layout((rows,), [0]), dst=whole_layout((rows,), [0])),)


def test_plans_are_forgotten_in_the_end():
    assert plans_kept(0, None) == (False, True)


def different_layouts(rank, cache):
    moves = simple_moves(8 if rank != 3 else 12)
    resharder = Resharder(Collectives(timeout_s=5), axis_of(rank, cache, 4), hosts=equal_hosts([0, 0, 1, 1]))
    source = torch.zeros(4, 4) if rank < 2 else None
    with pytest.raises(PlanError, match=r"ranks \[0, 1, 2\]: plan \w+; ranks \[3\]: plan \w+") as info:
        resharder.move(moves, [source], dtypes=[torch.float32])
    assert "so nothing was moved: they were given different layouts, types, hosts or options" in str(info.value)


@pytest.mark.core
def test_ranks_with_different_plans_all_stop():
    run_ranks(4, different_layouts)


def hosts_of_some(rank, cache, first):
    comms, axis = Collectives(timeout_s=5), axis_of(rank, cache, 4)
    resharder = Resharder(comms, axis, hosts=equal_hosts([0, 0, 1, 1]) if rank in (1, 3) else None)
    for _ in range(2):  # asked again, they say the same
        with pytest.raises(PlanError, match=r"hosts = 'given to ranks \[1, 3\]': missing on others; give the same"):
            if first == "prepare":
                resharder.prepare(simple_moves())  # needs no message of those that have hosts
            if first == "refuse" and rank == 2:
                resharder.refuse()
            resharder.move(simple_moves(), [torch.zeros(4, 4) if rank < 2 else None], dtypes=[torch.float32])


@pytest.mark.parametrize("first", ["move", "prepare", "refuse"])
def test_hosts_that_only_some_were_given_stop_all(first):
    run_ranks(4, hosts_of_some, first)


def bad_tensor(rank, cache, wrong):
    resharder = Resharder(Collectives(timeout_s=5), axis_of(rank, cache, 4), hosts=equal_hosts([0, 0, 1, 1]))
    source = torch.zeros(4, 4) if rank < 2 else None
    if rank == 1:
        source = {"shape": torch.zeros(5, 4), "type": torch.zeros(4, 4, dtype=torch.int32), "none": None}[wrong]
    try:
        resharder.move(simple_moves(), [source], dtypes=[torch.float32], op_id="sync")
    except PhalanxError as err:
        return type(err), str(err)
    return None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("shape", "w of the source = (5, 4): rank 1 holds (4, 4) of it"),
        ("type", "w of the source = 'torch.int32': must be torch.float32, as on other ranks"),
        ("none", "w of the source: rank 1 holds (4, 4) of it, but was given nothing"),
    ],
)
def test_a_rank_with_a_wrong_tensor_says_why_and_the_others_do_not_wait(wrong, text):
    got = run_ranks(4, bad_tensor, wrong)
    assert got[1][0] is PlanError and text in got[1][1]
    for rank in (0, 2, 3):
        kind, said = got[rank]
        assert kind is PeerError and said == "sync: nothing was moved, because ranks [1] refused: they say why"


def test_sums_of_truth_values_are_refused():
    src = mesh_layout((4,), [1], [Partial()], ranks=[0])
    move = Move(name="m", itemsize=1, src=dataclasses.replace(src, ranks=(0,), terms=(1,)), dst=whole_layout((4,), [0]))
    resharder = Resharder(Collectives(), Axis("reshard", (0,), 0, None), hosts=equal_hosts([0]))
    with pytest.raises(PlanError):
        resharder.move([move], [torch.zeros(4, dtype=torch.bool)], dtypes=[torch.bool])


def test_ranks_outside_the_group_are_named():
    resharder = Resharder(Collectives(), Axis("reshard", (0,), 0, None), hosts=equal_hosts([0] * 4))
    with pytest.raises(
        PlanError, match=r"layout.ranks = \[1, 2, 3\]: not in the process group, whose ranks are \(0,\)"
    ):
        resharder.prepare(simple_moves())


# ---- a planted bug is seen by the random cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", ["order", "chunk", "term", "half"])
def test_random_cases_see_planted_bugs(bug):
    from phalanx.runtime.reshard import resharder as module

    made = module.rank_program

    def broken(plan, rank):
        program = made(plan, rank)
        steps = list(program.steps)
        receives = [i for i, s in enumerate(steps) if not s.sends and s.placed]
        if bug == "order":
            for i, j in itertools.pairwise(receives):
                if steps[i].nbytes == steps[j].nbytes and steps[i].peer == steps[j].peer:
                    steps[i], steps[j] = (
                        steps[a]._replace(placed=steps[b].placed, tag=steps[a].tag) for a, b in ((i, j), (j, i))
                    )
                    break
        elif bug == "chunk" and receives:
            last = steps[receives[-1]]
            if all(p.store == "dest" for placed in last.placed for p in placed.pieces):
                steps[receives[-1]] = last._replace(placed=())
        elif bug == "half" and program.copies:
            program = dataclasses.replace(program, copies=program.copies[1:])
        elif bug == "term":
            program = dataclasses.replace(program, sums=tuple(dataclasses.replace(s, kept=()) for s in program.sums))
        return dataclasses.replace(program, steps=tuple(steps))

    def job(rank, cache):
        module.rank_program = broken
        return random_moves(rank, cache, list(range(40)), "tags", None)[0]

    try:
        got = run_ranks(WORLD, job, timeout_s=400)
    except RankError:
        return  # an error is as good as a wrong value
    assert any("differs from the oracle" in line for lines in got for line in lines)
