"""What `dispatch.overlap` may say: every schedule has a name, and what is wrong is named with a legal value nearby."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from phalanx.core.config import DispatchConfig, FoldingConfig, Recipe
from phalanx.core.errors import ConfigError
from phalanx.kernels.cpu.tiles import column_units
from phalanx.plan.moe.overlap.settings import (
    CANDIDATES,
    FINE,
    KEYS,
    MOST_BLOCKS,
    OverlapSetting,
    block_problems,
    most_blocks,
    parse_overlap,
    setting_problems,
)
from phalanx.plan.moe.overlap.tiles.order import tile_schedule_problems
from phalanx.plan.moe.overlap.tiles.types import TileSchedule
from phalanx.plan.recipe import run_problems
from phalanx.runtime.moe.overlap_tuner import schedule_candidates

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("text", ["serial", "coarse:4", "tiles", "fine", "auto", "fused", "tiles:parts=4,order=arrival,own_before=0.5,blocks=2,hot_first=true,rows=pairs"])  # fmt: skip
def test_settings_are_read_and_written(text: str) -> None:
    setting = parse_overlap(text)
    assert str(setting) == text and setting.kind == text.partition(":")[0]


def test_what_is_read() -> None:
    assert parse_overlap("coarse:4").chunks == 4
    assert parse_overlap("fine").schedule == FINE and parse_overlap("tiles").schedule == TileSchedule()
    found = parse_overlap("tiles:parts=4,order=arrival,own_before=0.5,blocks=2")
    assert (
        found.schedule == TileSchedule(parts=4, order="arrival", own_before=0.5, blocks=2) and found.per_token is None
    )
    assert [parse_overlap(f"tiles:rows={rows}").per_token for rows in ("pairs", "tokens")] == [False, True]
    assert str(parse_overlap("tiles: order=own_first, parts=1".replace(": ", ":"))) == "tiles:order=own_first"


def test_every_schedule_has_a_name() -> None:
    assert {field.name for field in fields(TileSchedule)} - {"seed"} == KEYS.keys() - {"rows"}
    draw = random.Random(0)
    drawn = [
        TileSchedule(
            parts=draw.randint(1, 8),
            blocks=draw.randint(1, MOST_BLOCKS),
            order=(order := draw.choice(("serial", "own_first", "arrival"))),  # type: ignore[arg-type]
            own_before=draw.random() if order == "arrival" else 1.0,
            hot_first=draw.random() < 0.5,
        )
        for _ in range(50)
    ]
    for schedule in (*CANDIDATES, *drawn):
        assert parse_overlap(str(OverlapSetting(kind="tiles", schedule=schedule))).schedule == schedule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be serial, coarse:N, tiles, tiles:KEY=VALUE"),
        ("Auto", "; auto"),
        ("fine:2", "must be serial"),
        ("coarse", "2 to 64"),
        ("coarse:1", "; coarse:2"),
        ("coarse:x", "2 to 64"),
        ("tiles:", "'' is none of tiles' options: KEY=VALUE with one of parts, order, own_before, blocks"),
        ("tiles:blocks", "'blocks' is none of tiles' options"),
        ("tiles:chunks=2", "'chunks=2' is none of tiles' options"),
        ("tiles:seed=2", "'seed=2' is none of tiles' options"),
        ("tiles:parts=0", "parts = '0' must be a number from 1 to 64; tiles:parts=4"),
        ("tiles:parts=²", "must be a number from 1 to 64"),
        ("tiles:blocks=3", "blocks = '3' must be a number from 1 to 2; tiles:blocks=2"),
        ("tiles:order=best", "order = 'best' must be one of serial, own_first, arrival"),
        ("tiles:order=arrival,own_before=1.5", "own_before = '1.5' must be a share from 0 to 1"),
        ("tiles:order=arrival,own_before=nan", "must be a share from 0 to 1"),
        ("tiles:own_before=0.5", "own_before = 0.5 has an effect with order = 'arrival'"),
        ("tiles:hot_first=yes", "must be true or false"),
        ("tiles:rows=bytes", "rows = 'bytes' must be one of pairs, tokens"),
        ("tiles:parts=2,parts=2", "names parts twice"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overlap(text)
    assert words in str(caught.value) and "dispatch.overlap" in str(caught.value)
    assert all(problem.value == text and not setting_problems(problem.hint) for problem in caught.value.problems)


def test_all_that_is_wrong_is_named() -> None:
    assert len(setting_problems("tiles:parts=0,blocks=9,way=2")) == 3


def test_blocks_that_cannot_be_cut_are_refused() -> None:
    assert [most_blocks(hidden) for hidden in (64, 511, 512, 1024, 513)] == [1, 1, 2, 2, 1]
    assert [column_units(hidden) for hidden in (64, 512)] == [1, 2]
    assert not block_problems("tiles:blocks=2", hidden=512) and not block_problems("auto", hidden=64)
    (problem,) = block_problems("tiles:blocks=2", hidden=64)
    assert "64 columns (model.hidden) make 1 block" in problem.rule and "512" in problem.hint
    recipe = replace(Recipe(), folding=FoldingConfig(ep=2), dispatch=DispatchConfig(overlap="tiles:blocks=2"))
    assert [problem.where for problem in run_problems(recipe, world=2)] == ["dispatch.overlap"]


def test_auto_has_the_second_cut_among_its_candidates() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES) and not any(tile_schedule_problems(one) for one in CANDIDATES)
    assert TileSchedule(parts=4, blocks=2, order="arrival", own_before=0.5) in CANDIDATES
    assert any(one.blocks > 1 for one in schedule_candidates(1024)) and all(
        one.blocks == 1 for one in schedule_candidates(256)
    )
    assert len(set(schedule_candidates(256))) == len(schedule_candidates(256)) < len(CANDIDATES)
