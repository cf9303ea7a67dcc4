"""`phalanx bench transformers`: some configurations of today's seed, what it says of planted bugs, and its options."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import tiers

from phalanx.core.errors import ConfigError, Problem
from phalanx.models import router
from phalanx.models.families import known
from phalanx.models.families.mixtral import MIXTRAL
from phalanx_lab.bench.parity.command import main
from phalanx_lab.bench.parity.compare import compare
from phalanx_lab.bench.parity.draw import FAMILIES, Configuration, drawn, edges

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra `hf`)"
)


def case_named(name: str) -> Configuration:
    return next(case for case in edges(tiers.SEED) if case.name == name)


@pytest.mark.core
def test_configurations_of_the_day(tmp_path: Path) -> None:
    cases = [drawn(tiers.SEED, number) for number in range(len(FAMILIES))]
    cases += tiers.some([*edges(tiers.SEED)], 8)
    for number, case in enumerate(cases):
        found = compare(case, tmp_path / str(number), number=number)
        assert found.verdict != "mismatch", found


def test_cases_depend_on_the_seed_and_their_number_alone() -> None:
    assert drawn(3, 5) == drawn(3, 5) != drawn(4, 5)
    assert [*edges(3)] == [*edges(3)]
    names = [case.name for case in edges(3)]
    assert len(set(names)) == len(names) and {n.split()[0] for n in names} == set(FAMILIES)


def test_a_default_of_another_kind_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(MIXTRAL, defaults={**MIXTRAL.defaults, "rms_norm_eps": 1e-2})
    others = tuple(f for f in known.FAMILIES if f is not MIXTRAL)
    monkeypatch.setattr(known, "FAMILIES", (wrong, *others))
    found = compare(case_named("mixtral without rms_norm_eps"), tmp_path / "case")
    assert found.verdict == "mismatch" and found.key == "rms_norm_eps"
    assert any("float64 logits" in word for word in found.wrong)


def test_wrong_weights_of_experts_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = router.routing_weights
    monkeypatch.setattr(router, "routing_weights", lambda *args: right(*args) * (1 + 1e-9))
    case = next(c for c in (drawn(1, n) for n in range(3, 600, 6)) if c.name.endswith(": olmoe"))
    found = compare(case, tmp_path / "case")
    assert found.verdict == "mismatch" and all(word.startswith("float64") for word in found.wrong), found.wrong


def test_a_refusal_that_blames_a_setting_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.models.families.family.in_words_of_file", lambda problem, keys: problem)
    ours = Problem(where="model.hidden", value=1, rule="must be even")
    monkeypatch.setattr("phalanx.models.families.family.model_problems", lambda spec: [ours])
    found = compare(drawn(1, 2), tmp_path / "case")
    assert found.verdict == "mismatch" and any("which nobody wrote" in word for word in found.wrong)


def test_the_command_tells_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--drawn", "0", "--seed", "5", "--only", "olmoe with {'num_experts_per_tok': 1, 'norm", "--json"]
    assert main([*words, str(tmp_path / "right.json")]) == 0
    report = json.loads((tmp_path / "right.json").read_text())
    assert report["agree"] == report["configurations"] == 2 and not report["mismatches"]
    right = router.routing_weights
    monkeypatch.setattr(router, "routing_weights", lambda *args: right(*args) * 1.001)
    assert main([*words, str(tmp_path / "wrong.json")]) == 1
    said = capsys.readouterr().out
    assert "mismatch: olmoe with" in said and "'norm_topk_prob': False" in said and "float64 logits" in said
    with pytest.raises(ConfigError, match="--drawn = -1"):
        main(["--drawn", "-1"])
