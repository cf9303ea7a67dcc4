"""The two rank grids: groups, the one constraint, legality, enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st
from speed_help import full_speed_s
from tiers import times

from phalanx.core.config import FoldingConfig
from phalanx.core.errors import ConfigError, PlanError
from phalanx.plan.mapping.folding import (
    DEGREES,
    GRADIENT_RULES,
    GROUP_NAMES,
    Folding,
    fit_problems,
    folding_problems,
    legal_foldings,
    make_folding,
    nearest_folding,
)
from phalanx.plan.mapping.grid import Grid, pp_groups_equal
from phalanx.plan.mapping.stage_foldings import resolve_mapping
from phalanx.plan.model.model import PRESETS, parameters

pytestmark = pytest.mark.unit

TINY = PRESETS["tiny"]
NO_PP = ("tp", "cp", "ep", "etp")


@st.composite
def foldings(draw: st.DrawFn, largest: int = 8) -> Folding:
    """Any folding that tiles its world: both inner products are completed to the same number of ranks."""
    tp, cp, ep, etp, pp = (draw(st.integers(1, 4)) for _ in range(5))
    inner = math.lcm(tp * cp, ep * etp) * draw(st.integers(1, max(1, largest // 4)))
    return make_folding(world=inner * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@given(foldings())
@settings(max_examples=60, deadline=None)
def test_groups_partition_the_world_and_agree_with_group_of(folding: Folding) -> None:
    for name in GROUP_NAMES:
        groups = folding.groups(name)
        assert sorted(r for g in groups for r in g) == list(range(folding.world))
        assert all(g == tuple(sorted(g)) for g in groups)
        assert [g[0] for g in groups] == sorted(g[0] for g in groups)
        for group in groups:
            for rank in {group[0], group[-1]}:
                assert folding.group_of(rank, name) == group


@given(foldings())
@settings(max_examples=40, deadline=None)
def test_coordinates_are_a_bijection_in_both_grids(folding: Folding) -> None:
    for grid in (folding.attention, folding.experts):
        coords = {tuple(folding.coord(r, a) for a, _ in grid.axes) for r in range(folding.world)}
        assert coords == set(itertools.product(*(range(d) for _, d in grid.axes)))
        for rank in range(folding.world):
            assert rank == sum(folding.coord(rank, a) * grid.strides[a] for a, _ in grid.axes)


@given(foldings())
@settings(max_examples=60, deadline=None)
def test_members_of_a_group_differ_only_along_its_axes(folding: Folding) -> None:
    along = {"tp": {"tp"}, "dp_cp": {"dp", "cp"}, "ep": {"ep"}, "ep_etp": {"ep", "etp"}, "edp": {"edp"}, "pp": {"pp"}}
    for name, varying in along.items():
        grid = folding.attention if name in ("tp", "dp_cp", "pp") else folding.experts
        for group in folding.groups(name):
            for axis, degree in grid.axes:
                seen = {folding.coord(r, axis) for r in group}
                assert len(seen) == (degree if axis in varying else 1)


def test_rank_order_is_written_out() -> None:
    f = make_folding(world=16, tp=2, cp=2, pp=2, ep=4, etp=2)
    assert f.groups("tp")[:2] == ((0, 1), (2, 3))
    assert f.groups("cp")[:2] == ((0, 2), (1, 3))
    assert f.groups("dp")[:2] == ((0, 4), (1, 5))
    assert f.groups("pp")[:2] == ((0, 8), (1, 9))
    assert f.groups("etp")[:2] == ((0, 1), (2, 3))
    assert f.groups("ep")[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert f.groups("ep_etp") == (tuple(range(8)), tuple(range(8, 16)))
    assert f.edp == 1


def test_embedding_groups_join_first_and_last_stage_only() -> None:
    f = make_folding(world=8, pp=4)
    assert f.groups("embedding") == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    assert [f.group_of(r, "embedding") for r in (0, 2, 6)] == [(0, 6), (2,), (0, 6)]
    assert make_folding(world=4, pp=2).groups("embedding") == ((0, 2), (1, 3))
    assert make_folding(world=2).groups("embedding") == ((0,), (1,))


# ---- the one constraint ---------------------------------------------------------------------------------------------------------


def powers(world: int) -> list[int]:
    return [2**i for i in range(world.bit_length())]


def tilings(world: int) -> list[Folding]:
    """Every power-of-two mapping that tiles the world, whatever the model."""
    out = []
    for pp in powers(world):
        inner = [(a, b) for a in powers(world // pp) for b in powers(world // pp) if a * b <= world // pp]
        out += [
            Folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
            for (tp, cp), (ep, etp) in itertools.product(inner, inner)
        ]
    return out


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32])
def test_pipeline_groups_are_equal_for_every_tiling(world: int) -> None:
    for folding in tilings(world):
        assert folding_problems(folding) == []
        assert folding.pp_groups_equal


def test_pipeline_groups_are_equal_up_to_1024_ranks() -> None:
    """Every (tp*cp, ep*etp, pp) class of 1,024 ranks: pp groups depend on the inner products only."""
    for pp in powers(1024):
        for a, b in itertools.product(powers(1024 // pp), repeat=2):
            assert Folding(world=1024, tp=a, ep=b, pp=pp).pp_groups_equal


def listing_1(f: Folding) -> tuple[Grid, Grid]:
    """The order printed in Listing 1 of arXiv 2504.14960: `reshape(dp, pp, cp, tp)`, that is pp inside dp."""
    attention = Grid((("tp", f.tp), ("cp", f.cp), ("pp", f.pp), ("dp", f.dp)))
    return attention, Grid((("etp", f.etp), ("ep", f.ep), ("pp", f.pp), ("edp", f.edp)))


@pytest.mark.parametrize("world", [4, 8, 16, 32])
def test_the_printed_order_breaks_where_the_inner_products_differ(world: int) -> None:
    broken = 0
    for f in tilings(world):
        breaks = f.pp > 1 and f.tp * f.cp != f.ep * f.etp
        assert pp_groups_equal(*listing_1(f)) != breaks, f
        broken += breaks
    assert broken


PAPER = [
    # name, world, tp, cp, pp, etp, ep, edp, pp groups equal in the printed order (reference/folding.md 1.2)
    ("mixtral-8x22b", 128, 2, 1, 8, 1, 8, 2, False),
    ("qwen2-57b-a14b", 64, 2, 1, 4, 1, 4, 4, False),
    ("mixtral-8x22b-g8t8", 128, 4, 1, 8, 1, 8, 2, False),
    ("llama3-8x70b", 256, 8, 1, 16, 1, 8, 2, True),
    ("mixtral-8x7b", 16, 2, 2, 2, 1, 8, 1, False),
]
LLAMA3_8X70B = dataclasses.replace(
    PRESETS["mixtral-8x22b"],
    name="llama3-8x70b",
    num_layers=80,
    hidden=8192,
    num_heads=64,
    expert_ffn=28672,
    vocab=128256,
)


@pytest.mark.parametrize("row", PAPER, ids=lambda row: row[0])
def test_the_mappings_of_the_paper_are_accepted(row: tuple[str, int, int, int, int, int, int, int, bool]) -> None:
    name, world, tp, cp, pp, etp, ep, edp, printed_order_works = row
    f = make_folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    spec = LLAMA3_8X70B if name == "llama3-8x70b" else PRESETS[name]
    assert fit_problems(f, spec, seq_len=4096) == []
    assert (f.edp, f.pp_groups_equal) == (edp, True)
    assert pp_groups_equal(*listing_1(f)) is printed_order_works
    assert hosts_spanned(f) == 1


def hosts_spanned(folding: Folding) -> int:
    """Most hosts of 8 consecutive ranks that one block of etp x ep lies on."""
    return max(len({rank // 8 for rank in group}) for group in folding.groups("ep_etp"))


TABLE_3 = [
    # model, world, tp, pp, etp, ep, hosts spanned by an etp*ep block (reference/folding.md 2.4; coupled rows have etp = tp)
    ("mixtral-8x22b", 128, 2, 8, 2, 4, 1),
    ("qwen2-57b-a14b", 64, 2, 4, 2, 4, 1),
    ("mixtral-8x22b-g8t8", 128, 2, 8, 2, 8, 2),
    ("llama3-8x70b", 256, 8, 8, 8, 4, 4),
]


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: row[0])
def test_coupled_mappings_are_accepted_and_span_the_hosts_of_the_reference(
    row: tuple[str, int, int, int, int, int, int],
) -> None:
    name, world, tp, pp, etp, ep, hosts = row
    f = make_folding(world=world, tp=tp, pp=pp, ep=ep, etp=etp)
    spec = LLAMA3_8X70B if name == "llama3-8x70b" else PRESETS[name]
    assert fit_problems(f, spec, seq_len=4096) == []
    assert hosts_spanned(f) == hosts


def test_a_plan_of_1024_ranks_takes_well_under_a_second() -> None:
    def plan() -> None:
        f = make_folding(world=1024, tp=4, cp=2, pp=8, ep=8, etp=2)
        groups = f.process_groups()
        for rank in range(1024):
            for name in GROUP_NAMES:
                assert rank in f.group_of(rank, name)
        assert len(set(groups)) == len(groups) and f.explain() and f.hash

    assert full_speed_s(plan, rounds=3) < 1.0


# ---- legality -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "ffn", "count"), [(4, 48, 36), (8, 48, 90), (16, 40, 156), (16, 48, 168)])
def test_number_of_legal_mappings(world: int, ffn: int, count: int) -> None:
    """4 heads, 8 experts, sequence 32 (reference/folding.md section 6, bar 1)."""
    spec = dataclasses.replace(TINY, expert_ffn=ffn)
    found = list(legal_foldings(world, spec, seq_len=32, axes=NO_PP))
    assert len(found) == len(set(found)) == count


@pytest.mark.parametrize("world", [6, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_enumeration_is_exactly_what_fit_problems_accepts(world: int) -> None:
    legal = set(legal_foldings(world, TINY, seq_len=48))
    degrees = range(1, world + 1)
    for tp, cp, ep, etp in itertools.product(degrees, repeat=4):
        if tp * cp > world or ep * etp > world:
            continue
        for pp in (1, 2, 3):
            f = Folding(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
            assert (f in legal) == (not fit_problems(f, TINY, seq_len=48)), f


def test_axes_left_out_stay_at_one() -> None:
    found = list(legal_foldings(8, TINY, seq_len=32, axes=("ep", "etp")))
    assert len(found) == 10
    assert all(f.tp == f.cp == f.pp == 1 for f in found)


@pytest.mark.parametrize(
    ("degrees", "changes", "seq_len", "words"),
    [
        ({"tp": 8}, {}, 64, ["num_heads = 4", "nearest legal: tp 4"]),
        ({"tp": 2}, {"vocab": 255}, 32, ["vocab = 255", "nearest legal: tp 1"]),
        ({"tp": 2}, {"shared_ffn": 15}, 32, ["shared_ffn = 15"]),
        ({"tp": 2}, {"dense_layers": 1, "dense_ffn": 9}, 32, ["dense_ffn = 9"]),
        ({"tp": 4}, {"num_heads": 12, "num_kv_heads": 3}, 32, ["num_kv_heads = 3", "nearest legal: tp 1"]),
        ({"cp": 8}, {}, 24, ["two equal chunks", "sequence of 24", "nearest legal: cp 4"]),
        ({"cp": 4, "tp": 4}, {}, 40, ["must divide 10", "nearest legal: tp 2"]),
        ({"ep": 16}, {}, 32, ["num_experts = 8", "nearest legal: ep 8"]),
        ({"etp": 16}, {"expert_ffn": 40}, 32, ["expert_ffn = 40", "nearest legal: etp 8"]),
        ({"pp": 4}, {}, 32, ["num_layers = 2", "nearest legal: pp 2"]),
        ({"ep": 2}, {"dense_layers": 2, "dense_ffn": 64}, 32, ["no effect in a model without experts"]),
    ],
)
def test_each_rule_names_its_numbers_and_the_nearest_legal_value(
    degrees: dict[str, int], changes: dict[str, object], seq_len: int, words: list[str]
) -> None:
    spec = dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
    problems = [str(p) for p in fit_problems(Folding(world=16, **degrees), spec, seq_len=seq_len)]
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems


def hints(folding: Folding, **options: object) -> dict[str, str]:
    return {p.where: p.hint for p in fit_problems(folding, TINY, seq_len=32, **options)}  # type: ignore[arg-type]


def test_the_nearest_degree_tiles_the_world_beside_the_others() -> None:
    """tp 2 would be nearer, but 2 x cp 2 does not divide 6 ranks."""
    assert hints(Folding(world=6, tp=3, cp=2))["folding.tp"] == "nearest legal: tp 1"


def test_degrees_that_do_not_tile_are_answered_with_those_that_fit_the_model_too() -> None:
    """pp 4 divides 4 ranks, and is more than the model has layers."""
    assert hints(Folding(world=4, pp=3))["folding.tp, folding.cp, folding.pp"].endswith("tp 1 x cp 1 x pp 2")
    assert hints(Folding(world=16, cp=16, tp=2), cp_method="ulysses")["folding.tp, folding.cp, folding.pp"].endswith(
        "tp 1 x cp 4 x pp 1"
    )


def test_a_batch_that_does_not_split_has_two_ways_out() -> None:
    batch = {"global_batch": 16, "micro_batch": 6}
    assert hints(Folding(world=4), **batch)["train.global_batch"] == "nearest legal: 24, or train.micro_batch = 2"
    assert hints(Folding(world=3), **batch)["train.global_batch"] == "nearest legal: 18"


def test_ulysses_points_to_the_ring_and_says_nothing_of_heads_that_tp_does_not_divide() -> None:
    assert hints(Folding(world=8, cp=8), cp_method="ulysses")["folding.cp"].endswith(', or folding.cp_method = "ring"')
    assert "folding.cp" not in hints(Folding(world=6, tp=3, cp=2), cp_method="ulysses")


def test_key_value_heads_may_be_replicated() -> None:
    spec = dataclasses.replace(TINY, num_kv_heads=1)
    assert fit_problems(Folding(world=4, tp=4), spec, seq_len=32) == []


@pytest.mark.parametrize(
    ("degrees", "kv_heads", "words"),
    [
        ({"cp": 4}, 2, []),
        ({"cp": 4, "tp": 2}, 2, ["must divide 2, the query heads of a tp rank (ulysses)", "nearest legal: cp 2"]),
        ({"cp": 8}, 2, ["must divide 4, the query heads", "nearest legal: cp 4"]),
        ({"cp": 2}, 1, []),
        ({"cp": 4}, 6, ["must divide 6, the key/value heads of a tp rank, or be a multiple", "nearest legal: cp 2"]),
    ],
)
def test_ulysses_needs_whole_heads(degrees: dict[str, int], kv_heads: int, words: list[str]) -> None:
    spec = dataclasses.replace(TINY, num_heads=12 if kv_heads == 6 else 4, num_kv_heads=kv_heads)
    folding = Folding(world=16, **degrees)
    assert fit_problems(folding, spec, seq_len=32) == []
    problems = [str(p) for p in fit_problems(folding, spec, seq_len=32, cp_method="ulysses")]
    assert len(problems) == bool(words), problems
    assert all(word in problems[0] for word in words), problems
    if words:
        config = FoldingConfig(cp_method="ulysses", ep=1, **degrees)
        with pytest.raises(ConfigError, match="ulysses"):
            resolve_mapping(config, spec, world=16, seq_len=32)


def test_all_problems_are_reported_at_once() -> None:
    f = Folding(world=16, tp=3, cp=5, pp=7, ep=9, etp=11)
    text = "\n".join(str(p) for p in fit_problems(f, TINY, seq_len=31, global_batch=3, micro_batch=2))
    for word in (
        "dp is",
        "edp is",
        "num_heads",
        "vocab",
        "num_kv_heads",
        "zigzag",
        "num_layers",
        "num_experts",
        "expert_ffn",
    ):
        assert word in text, word
    near = nearest_folding(f, TINY, seq_len=32)
    assert near is not None and fit_problems(near, TINY, seq_len=32) == []


@given(st.integers(1, 40), st.lists(st.integers(-1, 20), min_size=5, max_size=5))
@settings(max_examples=times(150, 50), deadline=None)
def test_any_degrees_are_either_legal_or_refused_with_a_legal_neighbour(world: int, degrees: list[int]) -> None:
    f = Folding(world=world, **dict(zip(DEGREES, degrees, strict=True)))
    problems = fit_problems(f, TINY, seq_len=32)
    near = nearest_folding(f, TINY, seq_len=32)
    assert near is not None and fit_problems(near, TINY, seq_len=32) == []
    assert (near == f) == (not problems)
    assert all(p.rule and p.where.startswith("folding.") for p in problems)
    if folding_problems(f):
        with pytest.raises(PlanError, match="problem"):
            f.check()


def test_tiling_problem_suggests_degrees_that_tile() -> None:
    with pytest.raises(PlanError) as caught:
        make_folding(world=24, tp=5, cp=1, pp=1, ep=7, etp=1)
    assert len(caught.value.problems) == 2
    assert "tp 6 x cp 1 x pp 1" in caught.value.problems[0].hint
    assert "etp 1 x ep 8 x pp 1" in caught.value.problems[1].hint


def test_batch_must_split_over_data_parallel_ranks() -> None:
    f = Folding(world=8)
    assert fit_problems(f, TINY, seq_len=32, global_batch=32, micro_batch=2) == []
    (problem,) = fit_problems(f, TINY, seq_len=32, global_batch=30, micro_batch=2)
    assert problem.where == "train.global_batch" and "32" in problem.hint
    assert fit_problems(f, TINY, seq_len=32, global_batch=0, micro_batch=2)
    assert fit_problems(f, TINY, seq_len=32, global_batch=8, micro_batch=0)


def test_resolve_mapping_spreads_experts_over_all_ranks_that_divide_them() -> None:
    assert resolve_mapping(FoldingConfig(), TINY, world=4, seq_len=32).ep == 4
    assert resolve_mapping(FoldingConfig(), TINY, world=12, seq_len=32).ep == 4
    assert resolve_mapping(FoldingConfig(etp=2), TINY, world=8, seq_len=32).ep == 4
    dense = dataclasses.replace(TINY, dense_layers=2, dense_ffn=64)
    assert resolve_mapping(FoldingConfig(), dense, world=4, seq_len=32).ep == 1
    with pytest.raises(ConfigError, match=r"num_experts = 8; nearest legal: ep 2"):
        resolve_mapping(FoldingConfig(ep=3), TINY, world=4, seq_len=32)


def test_embedding_groups_follow_the_stages_that_hold_the_table() -> None:
    folding = make_folding(world=8, pp=4)
    assert folding.embedding_groups((0, 3)) == folding.groups("embedding")
    assert all(len(group) == 1 for group in folding.embedding_groups((0,)))
    assert folding.embedding_groups((1, 3)) == ((0,), (1,), (2, 6), (3, 7), (4,), (5,))


def test_rules_cover_every_family_and_name_real_groups() -> None:
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    families = {p.family for spec in (*PRESETS.values(), tied) for p in parameters(spec)}
    assert families == set(GRADIENT_RULES)
    for rule in GRADIENT_RULES.values():
        assert {*rule.sum_over, rule.shard_over, *rule.replicas} <= set(GROUP_NAMES)


def test_label_explain_and_json() -> None:
    f = make_folding(world=16, tp=2, pp=2, ep=8)
    assert f.label() == "tp2.dp4.pp2|ep8.pp2"
    assert make_folding(world=1).label() == "1|1"
    assert "tp 2 x cp 1 x dp 4 x pp 2" in f.explain() and "the same in both grids" in f.explain()
    assert '"edp": 1' in f.to_json()
