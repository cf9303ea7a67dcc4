"""`phalanx plan placement`: figures, map, picture, migration from an earlier result; everything wrong named at once."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from phalanx.cli.main import main
from phalanx.cli.planning.placement import _trade_offs
from phalanx.core.errors import PlanError
from phalanx.observe.pictures.placement import placement_svg, placement_text
from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.hosts import read_host_placement
from phalanx.plan.placement.search.plan import plan_placement
from phalanx.plan.placement.search.probability import certify
from phalanx.plan.placement.search.replicas import replica_counts, zipf_loads

pytestmark = pytest.mark.unit
RULES = {"ours", "printed", "spread", "compact"}


def run(*words):
    return main(["plan", "placement", *map(str, words)])


def sizes(hosts=6, slots=4, experts=10, layers=2, f=2):
    return ("--hosts", hosts, "--slots", slots, "--experts", experts, "--layers", layers, "-f", f)


def test_figures_map_and_picture(tmp_path, capsys):
    out, svg = tmp_path / "deep" / "p.json", tmp_path / "p.svg"
    assert run(*sizes(), "--skew", 1, "--json", out, "--svg", svg) == 0
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    for key in ("recovery_probability", "f_guarantee", "max_over_mean_load", "exact"):
        assert set(result[key]) == RULES
    ours = result["recovery_probability"]["ours"]
    assert len(ours) == 7 and ours[0] == ours[1] == 1 and ours[6] == 0
    for rule in RULES - {"ours"}:
        assert ours >= result["recovery_probability"][rule]
    assert result["f_guarantee"]["ours"] >= 2 and result["keeps_f"]["ours"]
    plan = read_host_placement(result["placement"])
    assert plan.hash == result["hash"] and plan.certificate.probabilities == tuple(ours)
    assert all(
        word in text for word in ("survives any 1 hosts lost", "slot 3", "! = on", "<- taken", "max/mean load", "k=2")
    )
    cells = [r for r in ElementTree.fromstring(svg.read_text()).iter() if r.tag.endswith("title")]
    assert len(cells) == 2 * 6 * 4


def test_loads_from_a_file_and_a_promise_that_the_printed_rule_breaks(tmp_path, capsys):
    loads, out = tmp_path / "loads.json", tmp_path / "p.json"
    loads.write_text("[[5, 5, 5]]")
    assert run(*sizes(3, 2, 3, 1), "--loads", loads, "--json", out) == 0
    result = json.loads(out.read_text())
    assert result["f_guarantee"] == {"ours": 2, "printed": 1, "spread": 2, "compact": 1}
    assert result["recovery_probability"]["ours"][1] == 1 and result["recovery_probability"]["printed"][1] < 1
    assert "printed" in capsys.readouterr().out.split("breaks f = 2")[0]


def test_after_a_loss_it_says_what_travels(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run(*sizes(), "--skew", 1, "--json", first) == 0
    assert run(*sizes(5), "--skew", 1, "--current", first, "--lost", 3, "--json", second) == 0
    result = json.loads(second.read_text())
    assert result["placement"]["hosts"]["names"] == [0, 1, 2, 4, 5] and result["fetches"]
    assert all(3 not in (src, dst) for _, _, src, dst in result["fetches"]) and not result["lost_experts"]
    few = min(p["copies"] for p in result["front"])
    assert run(*sizes(5), "--skew", 1, "--current", first, "--lost", 3, "--max-copies", few, "--json", second) == 0
    assert len(json.loads(second.read_text())["fetches"]) == few
    assert "expert states travel" in capsys.readouterr().out
    assert run(*sizes(7), "--skew", 1, "--current", first, "--json", second) == 0  # a host joins: it gets the next name
    assert json.loads(second.read_text())["placement"]["hosts"]["names"] == [*range(7)]


def test_limits_and_cost_choose_from_the_front(tmp_path):
    out = tmp_path / "p.json"
    words = (*sizes(10, 6, 16, 1, 3), "--skew", 1.5, "--json", out)
    assert run(*words) == 0
    free = json.loads(out.read_text())
    bound = (free["max_over_mean_load"]["ours"] + 1) / 2
    assert run(*words, "--max-load", bound) == 0
    level = json.loads(out.read_text())
    assert level["max_over_mean_load"]["ours"] <= bound < free["max_over_mean_load"]["ours"]
    assert level["recovery_probability"]["ours"] < free["recovery_probability"]["ours"]
    assert run(*words, "--choose", "cost") == 0
    cheap = json.loads(out.read_text())
    costs = {p["name"]: p["cost"] for p in cheap["front"]}
    assert costs[cheap["chosen"]] == min(costs.values())


def test_racks_and_unequal_hosts(tmp_path, capsys):
    out = tmp_path / "p.json"
    words = ("--skew", 1, "--racks", 3, "--json", out)
    assert run(*sizes(), *words, "--failure", 0.2, 0.2, 0.01, 0.01, 0.01, 0.01) == 0
    result = json.loads(out.read_text())
    assert result["rack_recovery_probability"]["ours"][1] == 1
    low, high = result["independent_recovery_probability"]["ours"]
    assert low == high and low >= result["independent_recovery_probability"]["printed"][0]
    text = capsys.readouterr().out
    assert "racks (3)" in text and "own failure probabilities" in text and "rack" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (sizes(), ["one of --loads FILE and --skew Z"]),
        ((*sizes(0, 0), "--skew", -1), ["--hosts = 0", "--slots = 0", "--skew = -1.0"]),
        (
            (*sizes(), "--skew", 1, "--lost", 3, "--max-copies", 4),
            ["--lost", "--max-copies", "no effect without --current"],
        ),
        ((*sizes(), "--skew", 1, "--racks", 9, "--layer", 7), ["--racks = 9", "--layer = 7"]),
        ((*sizes(2, 2), "--skew", 1), ["10 experts need a slot each", "at least 5 slots a host"]),
        ((*sizes(), "--loads", "nowhere.json"), ["nowhere.json", "No such file"]),
        ((*sizes(), "--skew", 1, "--failure", 0.5), ["needs one for each of the 6 hosts"]),
        ((*sizes(), "--skew", 1, "--max-load", 0.1), ["the lowest found is"]),
    ],
)
def test_wrong_input_exits_2_and_is_named(words, said, capsys):
    assert run(*words) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in said), text


def test_wrong_files_are_named(tmp_path, capsys):
    file = tmp_path / "x.json"
    for content, said in (
        ("{", "is not JSON"),
        ("[[1, 2]]", "must be 2 layers x 10 experts"),
        ("[[1, -2]]", "not negative"),
    ):
        file.write_text(content)
        assert run(*sizes(), "--loads", file) == 2
        assert said in capsys.readouterr().err
    file.write_text('{"slots": 1}')
    assert run(*sizes(), "--skew", 1, "--current", file) == 2
    assert "is not a placement on hosts" in capsys.readouterr().err
    assert run(*sizes(), "--skew", 1, "--json", tmp_path / "p.json") == 0
    assert run(*sizes(), "--skew", 1, "--current", tmp_path / "p.json", "--lost", 42) == 2
    assert "knows the hosts" in capsys.readouterr().err


def test_pictures_refuse_what_cannot_be_read():
    pool, loads = equal_pool(50, 2), zipf_loads(1, 20, skew=0.5)
    plan = plan_placement(replica_counts(loads, pool, floor=2), pool, loads)
    assert "... and 10 more hosts" in placement_text(plan, 0)
    with pytest.raises(PlanError, match=r"layers are 0 \.\.\. 0"):
        placement_text(plan, 3)
    with pytest.raises(PlanError, match="at most 20000 slots"):
        placement_svg(plan, [0] * 201)


def test_trade_offs_are_named():
    """One fatal pair and its two triples, against four fatal triples: fewer at k = 2 wins, and it is said that k = 3 is worse."""
    ours, theirs = certify([0b0111, 0b1011, 0b1101, 0b1110], 4), certify([0b0011], 4)
    assert _trade_offs({"ours": ours, "spread": theirs, "compact": certify([0b1], 4)}) == {
        "spread": [3],
        "compact": [3],
    }
    assert _trade_offs({"ours": ours, "printed": ours}) == {}
