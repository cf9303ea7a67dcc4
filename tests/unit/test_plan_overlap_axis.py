"""Which axis may be cut: derived from access maps, and found again by changing single positions of the tensor and looking which results change."""

import numpy as np
import pytest

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.tiles import axis
from phalanx.plan.moe.overlap.tiles.axis import BACKWARD, FORWARD, Access, axis_rules, cuts_of
from phalanx.plan.moe.overlap.tiles.plan import plan_overlap
from phalanx.plan.moe.overlap.tiles.types import TileSchedule

pytestmark = pytest.mark.unit


def access_of(einsum: str, *, operand: int = 0, name: str = "consumer") -> Access:
    """The access of one operand of an einsum such as `rc,ci->ri`, a letter a loop."""
    inputs, _, result = einsum.replace(" ", "").partition("->")
    return Access(tuple(inputs.split(",")[operand]), tuple(result), name=name)


ROWS, COLUMNS = 6, 4
TOKEN_OF_ROW = np.array([0, 1, 1, 2, 0, 2])
SLOT_OF_ROW = np.array([0, 0, 0, 1, 1, 1])
RNG = np.random.default_rng(0)
W = RNG.normal(size=(COLUMNS, 5))
Y = RNG.normal(size=(ROWS, 3))
MOVE = Access(("row", "column"), ("row", "column"), name="dispatch")


def by_key(key_of_row, values):
    out = np.zeros((key_of_row.max() + 1, *values.shape[1:]))
    np.add.at(out, key_of_row, values)
    return out


def used_together(consumer, dim):
    """For each result of `consumer` the positions along `dim` of its (ROWS, COLUMNS) input on which it depends, found by trying."""
    x = RNG.normal(size=(ROWS, COLUMNS))
    before = consumer(x)
    depends = []
    for position in range(x.shape[dim]):
        changed = x.copy()
        np.moveaxis(changed, dim, 0)[position] += RNG.normal(size=x.shape[1 - dim])
        depends.append(~np.isclose(consumer(changed), before, atol=1e-12).reshape(-1))
    return {tuple(np.flatnonzero(column)) for column in np.stack(depends).T} - {()}


def kind_by_trying(consumer, dim, size):
    groups = used_together(consumer, dim)
    if all(len(group) == 1 for group in groups):
        return "free", groups
    return ("whole" if groups == {tuple(range(size))} else "grouped"), groups


def keys_as_groups(key_of_row):
    return {tuple(np.flatnonzero(key_of_row == key)) for key in np.unique(key_of_row)}


PAIRS = {
    "layer 0: dispatch, first product": (FORWARD.first, lambda x: x @ W, None),
    "layer 1: second product, sum of copies": (FORWARD.merge, lambda x: by_key(TOKEN_OF_ROW, x), TOKEN_OF_ROW),
    "SwiGLU: first product, gate times up": (
        Access(("row", "column"), ("row", "unit"), together=(("column", "unit"),), name="SwiGLU"),
        lambda x: x[:, :2] / (1 + np.exp(-x[:, :2])) * x[:, 2:],
        np.array([0, 1, 0, 1]),
    ),
    "shared expert: its result is added": (Access(("row", "column"), ("row", "column")), lambda x: x + Y.sum(), None),
    "backward: gradient, second weights": (BACKWARD.first, lambda x: x @ W, None),
    "backward: gradient, gradient of weights": (
        BACKWARD.weights,
        lambda x: np.stack([Y[s == SLOT_OF_ROW].T @ x[s == SLOT_OF_ROW] for s in (0, 1)]),
        SLOT_OF_ROW,
    ),
    "nobody thought of: means over rows": (Access(("row", "column"), ("column",)), lambda x: x.mean(0), None),
    "nobody thought of: rows of unit length": (
        access_of("rc,rc->r", name="the norm"),
        lambda x: (x * x).sum(1),
        None,
    ),
    "nobody thought of: a low-rank expert": (access_of("rc,ck->rk"), lambda x: x @ W[:, :2], None),
    "nobody thought of: the whole loss": (access_of("rc->"), lambda x: (x * x).sum(), None),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_rule_says_what_trying_finds(name):
    consumer, function, keys = PAIRS[name]
    rules = axis_rules(MOVE, consumer)
    for dim, (rule, size) in enumerate(zip(rules.values(), (ROWS, COLUMNS), strict=True)):
        found, groups = kind_by_trying(function, dim, size)
        assert rule.kind == found, rule.reason
        if found == "grouped":
            assert groups == keys_as_groups(keys)


def test_layer_0_is_cut_by_rows_and_layer_1_by_columns():
    there, back = axis_rules(FORWARD.bring, FORWARD.first), axis_rules(FORWARD.second, FORWARD.merge)
    assert (there["row"].kind, there["column"].kind) == ("free", "whole")
    assert (back["row"].kind, back["row"].key, back["column"].kind) == ("grouped", "token", "free")
    assert "the first product reduces along column" in there["column"].reason


def test_rows_by_source_are_closed_under_tokens_and_not_under_slots():
    back = axis_rules(FORWARD.second, FORWARD.merge)["row"]
    weights = axis_rules(BACKWARD.bring, BACKWARD.weights)["row"]
    labels = dict(FORWARD.determines)
    assert back.may_cut_by("source", labels) and back.may_cut_by("token", {}) and back.may_stream
    assert not back.may_cut_by("source", {}) and not back.may_cut_by("slot", labels)
    assert not weights.may_cut_by("source", labels)


def test_a_cut_by_source_parts_no_token_and_a_cut_by_slot_does():
    """Tokens 0, 1, 2 of source 0 and 3, 4 of source 1: what `determines` claims, on a routing."""
    token, slot = np.array([0, 1, 3, 0, 2, 3, 4]), np.array([0, 0, 0, 1, 1, 1, 1])
    source = (token > 2).astype(int)

    def parted(label):
        return any(len(set(label[token == t])) > 1 for t in token)

    assert not parted(source) and parted(slot)


def test_a_producer_that_finishes_all_at_once_allows_no_cut():
    softmax = Access(("row", "column"), ("row", "column"), at_once=("column",), name="softmax")
    rules = axis_rules(softmax, Access(("row", "column"), ("row", "column")))
    assert (rules["row"].kind, rules["column"].kind) == ("free", "whole")
    assert "softmax finishes all of column at once" in rules["column"].reason


def test_operations_that_speak_of_different_tensors_are_refused():
    with pytest.raises(PlanError, match=r"consumer reads 1 axes"):
        axis_rules(MOVE, Access(("row",), ("row",)))


def test_einsums():
    assert access_of("rc,ck->rk") == Access(("r", "c"), ("r", "k"))
    assert access_of("rc, ck -> rk", operand=1).reads == ("c", "k")


# ---- the planner reads it --------------------------------------------------------------------------------------------------


def plan(layer, **schedule):
    dispatch = plan_dispatch([[64, 64], [64, 64]], range(2), ep=2, etp=1)
    return plan_overlap(dispatch, TileSchedule(**schedule), rank=0, tile_rows=16, layer=layer)


def changed(**operations):
    return axis.Layer(
        **{name: operations.get(name, getattr(FORWARD, name)) for name in axis.Layer.__dataclass_fields__}
    )


def test_an_ordinary_layer_may_be_cut_every_way():
    for layer in (FORWARD, BACKWARD):
        cuts = cuts_of(layer)
        assert (cuts.not_sources, cuts.not_parts, cuts.not_blocks) == ("", "", "")
    assert cuts_of(FORWARD).not_weights_by_source == ""
    assert "adds up row of the same slot" in cuts_of(BACKWARD).not_weights_by_source


def test_experts_that_normalise_over_all_their_rows_are_not_overlapped():
    normed = changed(first=Access(("row", "column"), ("other row", "inner"), name="a norm over rows"))
    plan(normed, order="serial")
    for wrong in ({"order": "arrival"}, {"parts": 2}, {"seed": 3}):
        with pytest.raises(PlanError, match="a norm over rows reduces along row"):
            plan(normed, **wrong)


def test_a_sum_that_normalises_columns_allows_no_blocks_and_the_rest_stays():
    merge = Access(("row", "column"), ("token", "all"), together=(("row", "token"),), name="a row norm")
    normed = changed(merge=merge)
    assert plan(normed, order="arrival", parts=2) == plan(None, order="arrival", parts=2)
    with pytest.raises(PlanError, match=r"schedule.blocks = 4.*a row norm reduces along column"):
        plan(normed, blocks=4)


def test_without_knowing_that_tokens_have_one_source_only_serial_is_legal():
    unknown = changed(determines=())
    plan(unknown)
    with pytest.raises(PlanError, match="adds up row of the same token"):
        plan(unknown, order="own_first")
