"""Memory that NCCL takes: counted for the communicators that a run makes, by sizes of its source, once for the search and for the dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from phalanx.cli.predicting.dry_run import Machine, card_bytes, peak_bytes
from phalanx.core.recipe import load_recipe
from phalanx.plan.mapping import Folding, StagedFolding, make_folding
from phalanx.runtime.comm import GroupCache, build_groups
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.mapping import Mapping
from phalanx.simulate.step import FIXED_BYTES, nccl_bytes
from phalanx.simulate.step.device_memory import reserved_bytes
from phalanx.simulate.step.nccl import COMMUNICATOR_BYTES, MIB, communicators

pytestmark = pytest.mark.unit
RING = 24 * 12 * MIB
"""On one host."""


class Connected(GroupCache):
    """Notes which groups of a rank are connected."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.found = rank, set[tuple[tuple[int, ...], str]]()

    def get(self, ranks: Sequence[int], *, purpose: Any = "passes", uses: Any = ("sum",), **_: Any) -> None:
        if self.rank in ranks and len(ranks) > 1 and uses:
            self.found.add((tuple(ranks), purpose))


@pytest.mark.parametrize(
    "folding",
    [
        make_folding(world=8, ep=8),
        make_folding(world=8, pp=4, ep=2),
        make_folding(world=64, tp=2, cp=2, ep=8, pp=4),
        make_folding(world=64, tp=4, pp=8, ep=8),
        StagedFolding(stages=(make_folding(world=2, ep=2), make_folding(world=4, tp=2, ep=2))),
    ],
    ids=lambda folding: folding.label(),
)
def test_the_communicators_are_those_that_a_run_connects(folding: Any) -> None:
    for rank in range(0, folding.world, 3):
        cache = Connected(rank)
        build_groups(folding, rank=rank, cache=cache, table_ranks=(0,), in_order=True)
        assert sorted(tuple(ranks) for ranks, _ in communicators(folding, rank)) == sorted(
            ranks for ranks, _ in cache.found
        )


def test_groups_that_are_not_listed_are_those_that_are() -> None:
    for folding in (make_folding(world=64, tp=2, cp=2, ep=8, pp=4), make_folding(world=48, tp=2, ep=6, etp=2, pp=2)):
        for name in folding.group_names:
            if name == "embedding":
                continue
            sets = {folding.rank_set(rank, name) for rank in range(folding.world)}
            assert {tuple(group) for group in sets} == set(folding.groups(name)) and len(sets) == len(
                folding.groups(name)
            )
            for group in sets:
                listed = tuple(group)
                assert len(group) == len(listed) == len(set(listed))
                assert [rank in group for rank in range(-2, folding.world + 2)] == [
                    rank in listed for rank in range(-2, folding.world + 2)
                ]


def test_a_search_lists_no_group_of_a_large_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for tens of thousands of foldings of 16,384 ranks, and took minutes instead of 40 s."""
    monkeypatch.setattr(Folding, "group_of", lambda *_: pytest.fail("a group is listed"))
    assert nccl_bytes(make_folding(world=16384, tp=4, cp=2, pp=16, ep=8), ranks_per_host=8) > 3e9


def test_an_exchange_on_one_host_takes_twelve_mib_of_each_channel_and_peer() -> None:
    """Seen by others on 8 H100: 10,485,760 and 2,097,152 bytes for each of 32 channels and 7 peers (NVIDIA/nccl issue 1685)."""
    both = 2 * (COMMUNICATOR_BYTES + RING)
    assert nccl_bytes(make_folding(world=8, ep=8), ranks_per_host=8) == both + 7 * 32 * (10 + 2) * MIB


def test_sums_of_whole_gradients_take_multicast_and_ulysses_all_ranks_of_its_axis() -> None:
    folding = make_folding(world=8, cp=4, ep=8)
    plain = nccl_bytes(folding, ranks_per_host=8)
    assert nccl_bytes(folding, ranks_per_host=8, sums_whole=True) == plain + 8 * 32 * MIB
    assert nccl_bytes(folding, ranks_per_host=8, cp_exchanges=True) == plain + 32 * 12 * MIB  # 3 peers in place of 2


def test_peers_on_other_hosts_share_their_buffers() -> None:
    """So experts of all hosts take less than those of one: between hosts few channels lead to a peer."""
    inside, across = (nccl_bytes(make_folding(world=64, ep=ep), ranks_per_host=8) for ep in (8, 64))
    assert across < inside


def test_one_rank_and_ranks_on_processors_have_none() -> None:
    alone = make_folding(world=1)
    assert communicators(alone) == () and nccl_bytes(alone, ranks_per_host=8) == 0
    mapping = Mapping(folding=make_folding(world=8, ep=8))
    gpus = parse_cluster("h100x8").hardware
    assert reserved_bytes(mapping, replace(gpus, sms=None)) == FIXED_BYTES


def test_the_dry_run_and_the_search_count_the_same() -> None:
    words = "--model.preset olmoe-1b-7b --train.micro_batch 1 --train.global_batch 16 --folding.ep 8 --launch.ranks 8"
    recipe = load_recipe(None, [*words.split(), "--launch.device", "cuda", "--train.dtype", "bfloat16"])
    machine = Machine(local_ranks=8, threads=1, available_bytes=None)
    of_run = card_bytes(recipe, machine, world=8) - peak_bytes(recipe, machine, world=8)
    mapping = Mapping(folding=make_folding(world=8, ep=8))
    assert of_run == reserved_bytes(mapping, parse_cluster("h100x8").hardware) - FIXED_BYTES > 3e9
