"""Order of rows for kernels that wait on flags: the device's builder against its NumPy twin, and the twin against its rule. Needs no Triton."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from device_rows import arrange, part_of, send_index

from phalanx.core.errors import RunError
from phalanx.kernels.triton import index as fused_index
from phalanx.kernels.triton.tiles import check_status, new_status
from phalanx.plan.moe.overlap.fused.device import EMPTY, SecondCost, predicted_s
from phalanx.runtime.moe.overlap_lists import outgoing
from phalanx_lab.bench.layer.device_division import division


def slots_of(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> np.ndarray:
    slots = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int32).reshape(tokens, top_k)
    return np.where(rng.random(slots.shape) < 0.1, EMPTY, slots).astype(np.int32)


def assert_twins(plan: object, device: object) -> None:
    for field in dataclasses.fields(plan):  # type: ignore[arg-type]
        want, got = getattr(plan, field.name), getattr(device, field.name)
        assert got.dtype == torch.int32, field.name
        np.testing.assert_array_equal(got.numpy(), want, err_msg=field.name)


@pytest.mark.parametrize("seed", range(60))
def test_the_device_builds_what_the_plan_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, slots, tokens = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(0, 30))
    top_k = int(rng.integers(1, min(4, ranks * slots) + 1))
    capacity = int(rng.integers(1, tokens + 4))
    sent = [slots_of(rng, tokens, top_k, ranks * slots) for _ in range(ranks)]
    sizes = {"ranks": ranks, "slots_per_rank": slots, "capacity": capacity}
    indices = [send_index(s, **sizes) for s in sent]
    for s, plan in zip(sent, indices, strict=True):
        assert_twins(plan, fused_index.send_index(torch.from_numpy(s), **sizes))
    rank = int(rng.integers(ranks))
    comes = np.stack([g.slots_PCK[rank] for g in indices])
    how = {
        "rank": rank,
        "slots": slots,
        "parts": int(rng.integers(1, 4)),
        "problem_rows": int(rng.integers(1, 9)),
        "max_rows": None if seed % 3 else int(rng.integers(1, 40)),
    }
    plan = arrange(comes, **how)
    assert_twins(plan, fused_index.arrange(torch.from_numpy(comes), **how))


@pytest.mark.parametrize("seed", range(10))
def test_entries_of_tiles_in_order_of_slots_travel_in_the_same_order(seed: int) -> None:
    """Lists that the host sizes and parts (`runtime/moe/overlap_lists.py`) follow the rule of the device where no tile is moved: one order, two executors."""
    rng = np.random.default_rng(seed)
    ranks, slots, tokens, top_k = 3, 4, 25, 3
    sent = slots_of(rng, tokens, top_k, ranks * slots)
    plan = send_index(sent, ranks=ranks, slots_per_rank=slots, capacity=tokens)
    lists = []
    for rank in range(ranks):
        mine = [pair for pair in range(tokens * top_k) if sent.flat[pair] // slots == rank and sent.flat[pair] != EMPTY]
        pairs = torch.tensor(sorted(mine, key=lambda pair: (sent.flat[pair], pair // top_k)), dtype=torch.int64)
        lists.append((pairs, [len(pairs)], None))
    found = outgoing(lists, top_k, num_tokens=tokens, per_token=True)
    for one, tokens_C, count in zip(found, plan.token_of_entry_PC, plan.counts_P, strict=True):
        assert one.tokens_outbound.tolist() == tokens_C[:count].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_every_copy_is_in_one_problem_that_needs_its_flag(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, slots, tokens, top_k, parts, rows = 3, 4, 25, 3, 2, 5
    sent = [slots_of(rng, tokens, top_k, ranks * slots) for _ in range(ranks)]
    comes = np.stack([send_index(s, ranks=ranks, slots_per_rank=slots, capacity=tokens).slots_PCK[1] for s in sent])
    plan = arrange(comes, rank=1, slots=slots, parts=parts, problem_rows=rows)
    problems = plan.problems_J4[: plan.num_problems]
    assert (np.diff(problems[:, 3]) >= 0).all(), "a problem stands before one that can start earlier"
    slot_of_row = np.full(plan.num_rows, EMPTY)
    for slot, first, count, needed in problems:
        assert 1 <= count <= rows
        assert (slot_of_row[first : first + count] == EMPTY).all(), "a row is in two problems"
        slot_of_row[first : first + count] = slot
        for entry in plan.entry_of_row_M[first : first + count]:
            source, place = divmod(int(entry), tokens)
            flag = (source - 1) % ranks * parts + part_of(place, tokens, parts)
            assert flag < needed, "a problem starts before its row is there"
    assert (slot_of_row != EMPTY).all()
    copies = comes != EMPTY
    assert copies.sum() == plan.num_rows and plan.overflow == 0
    np.testing.assert_array_equal(slot_of_row[plan.row_of_copy_PCK[copies]], comes[copies])
    assert (plan.row_of_copy_PCK[~copies] == EMPTY).all()


def test_own_rows_need_only_own_flags() -> None:
    own = np.array([[[0, 1]] * 4, [[EMPTY, EMPTY]] * 4], np.int32)
    plan = arrange(own, rank=0, slots=2, parts=2, problem_rows=16)
    assert plan.problems_J4[: plan.num_problems].tolist() == [[0, 0, 4, 2], [1, 4, 4, 2]]
    as_other = arrange(own, rank=1, slots=2, parts=2, problem_rows=16)
    assert set(as_other.problems_J4[: as_other.num_problems, 3].tolist()) == {4}, "seen from rank 1 they come last"


def test_no_more_rows_and_problems_than_there_is_room_for() -> None:
    """Worst cases of the bounds: every slot has one row more than a problem holds."""
    slots, rows = 3, 4
    comes = np.repeat(np.arange(slots, dtype=np.int32), rows + 1).reshape(1, -1, 1)
    plan = arrange(comes, rank=0, slots=slots, parts=1, problem_rows=rows)
    assert plan.num_problems == 6 and plan.problems_J4.shape[0] >= 6 and plan.overflow == 0


def test_what_finds_no_room_is_reported() -> None:
    slots = torch.zeros(5, 1, dtype=torch.int32)
    to = fused_index.send_index(slots, ranks=1, slots_per_rank=1, capacity=3)
    with pytest.raises(RunError, match="2 entries or rows found no room: raise the capacity"):
        check_status(new_status(slots.device), to.overflow)


COST = SecondCost(programs=132, tiles=2048, tile_s=2e-4, blocks=8, sender_s=0.05, link_s=0.002)


def test_the_division_is_the_best_of_its_model() -> None:
    best = division(COST)
    assert predicted_s(COST, best) == min(predicted_s(COST, n) for n in range(COST.programs))
    assert 0 < best < COST.programs // 2
    assert predicted_s(COST, best) < predicted_s(COST, 0)


def test_a_slower_link_never_makes_the_prediction_shorter() -> None:
    times = [predicted_s(dataclasses.replace(COST, link_s=s), 16) for s in (0.0, 1e-3, 2e-3, 8e-3)]
    assert times == sorted(times)


def test_nothing_to_send_needs_no_senders() -> None:
    assert division(dataclasses.replace(COST, sender_s=0.0, link_s=0.0)) == 0


def test_a_division_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"programs 0, link_s -1\.0"):
        division(dataclasses.replace(COST, programs=0, link_s=-1.0))
