"""`phalanx bench reshard-drawn`: some cases of today's seed, and what it says of a planted bug."""

from __future__ import annotations

from typing import Any

import pytest
import tiers

from phalanx.core.errors import ConfigError
from phalanx.runtime.reshard.tensors import RankTensors
from phalanx_lab.bench.reshard.strange import RANKS, all_cases, describe, is_well, main
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def cases(rank: int, cache: object, numbers: list[int], seed: int) -> dict[str, Any]:
    return {**all_cases(rank, numbers, seed), "cases": len(numbers), "seed": seed, "ranks": RANKS, "seconds": 0.0}


@pytest.mark.core
def test_cases_of_the_day() -> None:
    told = run_ranks(RANKS, cases, list(range(tiers.times(300, 60))), tiers.SEED)[0]
    assert is_well(told), describe(told)
    assert told["refused"] > 2 and told["kinds"]["0 dims"] > 2 and told["kinds"]["empty"] > 2, told


def test_a_wrong_byte_is_seen() -> None:
    right = RankTensors.unpack

    def plant(rank: int, cache: object) -> dict[str, Any]:
        def wrong(self: RankTensors, step: Any, buffer: Any) -> None:
            buffer[0] ^= 1
            right(self, step, buffer)

        RankTensors.unpack = wrong  # type: ignore[method-assign]  # in ranks of their own
        return cases(rank, cache, list(range(30)), 1)

    told = run_ranks(RANKS, plant)[0]
    assert told["silent"] and not is_well(told) and "differs from the oracle" in describe(told)


def test_options() -> None:
    with pytest.raises(ConfigError, match="--cases = 0"):
        main(["--cases", "0"])
