"""What one rank finds out, all ranks know; a failure of one is the same error on all."""

import time

import pytest
import torch.distributed as dist

from phalanx.core.errors import ConfigError, PhalanxError, Problem, RunError
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.peers import FEW, FIRST_BYTES, Peers, joined, own_group
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def talk(rank: int, cache: GroupCache) -> tuple[list[int], str, list[bool]]:
    peers = Peers(own_group(3, timeout_s=30))
    return peers.agree(lambda: rank * 10), peers.first(lambda: f"from {rank}"), [told(peers, n) for n in LENGTHS]


LENGTHS = ((0, 0, 0), (1, FIRST_BYTES, 3), (5 * FIRST_BYTES + 1, 2, FIRST_BYTES + 1))
"""Of values of three ranks: some need a second message."""


def told(peers: Peers, lengths: tuple[int, ...]) -> bool:
    values = [bytes([i]) * n for i, n in enumerate(lengths)]
    return peers.gather(values[peers.rank]) == values


def tell_much(rank: int, cache: GroupCache) -> tuple[list[bool], list[int]]:
    """`FEW` ranks with a long value, and one more of them; then what the first one hears."""
    peers = Peers(own_group(FEW + 2, timeout_s=30))
    lengths = [(FIRST_BYTES + 1 + i) if i <= FEW else 3 for i in range(FEW + 2)]
    said = [told(peers, tuple(lengths[i] if i < n else 0 for i in range(FEW + 2))) for n in (FEW, FEW + 1)]
    return said, list(peers.to_first(rank * 10))


def test_long_values_of_few_and_many_ranks_arrive_and_the_first_rank_alone_hears_all() -> None:
    first, *others = run_ranks(FEW + 2, tell_much)
    assert first == ([True, True], [rank * 10 for rank in range(FEW + 2)])
    assert others == [([True, True], [])] * (FEW + 1)
    assert list(Peers().to_first("alone")) == ["alone"]


def test_all_know_everything() -> None:
    assert run_ranks(3, talk) == [([0, 10, 20], "from 0", [True] * len(LENGTHS))] * 3
    alone = Peers()
    assert alone.agree(lambda: 1) == [1] and alone.first(lambda: 2) == 2 and (alone.rank, alone.size) == (0, 1)


def wait_longer(rank: int, cache: GroupCache) -> tuple[list[int], float]:
    """For one that comes later than a group may take to be made; then, to part, less long."""
    dist.barrier()
    peers = Peers(own_group(2, timeout_s=3, patience_s=30))
    if rank:
        time.sleep(5)
    heard = peers.gather(rank)
    peers.part(timeout_s=20)
    begin_s = time.monotonic()
    if rank:
        time.sleep(6)
        return heard, 0.0
    peers.part(timeout_s=1)  # the other does not come to it
    dist.destroy_process_group(peers.group)
    del peers  # the end of a group waits for what is under way in it
    return heard, time.monotonic() - begin_s


def test_messages_wait_longer_than_the_making_of_their_group_and_the_last_one_less_long() -> None:
    (first, waited_s), (second, _) = run_ranks(2, wait_longer)
    assert first == second == [0, 1] and 0.9 < waited_s < 5.0
    Peers().part(timeout_s=1)


def fail(rank: int, cache: GroupCache, kind: str) -> None:
    peers = Peers(own_group(3, timeout_s=30))

    def work() -> None:
        if kind == "problems" and rank > 0:
            same = Problem(where="a", value=1, rule="is wrong")
            raise ConfigError([same, Problem(where=f"rank{rank}", value=rank, rule="is odd")], subject="recipe")
        if kind == "bug" and rank == 2:
            raise KeyError("lost")

    peers.agree(work)


@pytest.mark.core
def test_problems_of_several_ranks_come_together() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(3, fail, "problems")
    errors = list(info.value.causes.values())
    assert len(errors) == 3 and all(isinstance(e, ConfigError) for e in errors)
    assert {str(e) for e in errors} == {
        "3 problems with recipe:\n  - a = 1: is wrong\n  - rank1 = 1: is odd\n  - rank2 = 2: is odd"
    }


def test_a_bug_of_one_rank_is_named_on_all() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(3, fail, "bug")
    assert {str(e) for e in info.value.causes.values()} == {"rank 2: KeyError: 'lost'"}


def test_a_bug_alone_keeps_its_type() -> None:
    def broken() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError):
        Peers().agree(broken)


def test_first_error_wins_where_types_differ() -> None:
    errors: list[PhalanxError] = [RunError("first"), ConfigError([], subject="x")]
    assert joined(errors) is errors[0]


def test_problems_that_thousands_of_ranks_have_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = [0]

    def counted(mine: Problem, other: object) -> bool:
        compared[0] += 1
        return str(mine) == str(other)

    monkeypatch.setattr(Problem, "__eq__", counted)
    errors = [ConfigError([Problem(where=f"a{i}.{rank // 8}", value=[i], rule="is odd") for i in range(10)]) for rank in range(256)]  # fmt: skip
    err = joined(errors)
    assert isinstance(err, ConfigError) and len(err.problems) == 320 and compared[0] < 10 * 2560
    assert [p.where for p in err.problems[9:12]] == ["a9.0", "a0.1", "a1.1"]
