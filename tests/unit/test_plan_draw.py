"""The picture of a folding shows every rank in both grids, coloured by group."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from phalanx.cli.plan import main
from phalanx.core.errors import PlanError
from phalanx.observe.pictures.folding import folding_svg
from phalanx.plan.mapping.folding import make_folding

pytestmark = pytest.mark.unit
SVG = "{http://www.w3.org/2000/svg}"


def test_every_rank_has_a_cell_in_both_grids_and_groups_have_one_colour() -> None:
    folding = make_folding(world=16, tp=2, cp=2, pp=2, ep=8)
    rects = list(ET.fromstring(folding_svg(folding)).iter(f"{SVG}rect"))[1:]
    assert len(rects) == 2 * folding.world
    expert_fill = [r.get("fill") for r in rects[folding.world :]]
    for group in folding.groups("ep_etp"):
        assert len({expert_fill[r] for r in group}) == 1
    assert len(set(expert_fill)) == len(folding.groups("ep_etp"))


def test_labels_are_the_coordinates() -> None:
    texts = [t.text for t in ET.fromstring(folding_svg(make_folding(world=4, ep=2))).iter(f"{SVG}text")]
    assert [t for t in texts if t and t.startswith("edp") and t != "edp"] == ["edp0", "edp0", "edp1", "edp1"]


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="at most 64 ranks"):
        folding_svg(make_folding(world=128, ep=8))


def test_command_writes_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "pictures" / "folding.svg"
    assert main(["folding", "--world", "8", "--ep", "4", "--svg", str(file)]) == 0
    assert file.read_text() == folding_svg(make_folding(world=8, ep=4))
