"""What `phalanx bench flips` makes of what its ranks told, and that a flip is one bit and can be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx_lab.bench.flips import FlipsCase, describe, evaluate
from phalanx_lab.faults.flips import Aim, BitFlip


def flip(kind: str, *, found: bool, matters: bool) -> dict[str, Any]:
    change = 0.1 if matters else 1e-7
    return {
        "kind": kind, "rank": 1, "place": f"a {kind} [mb0]", "bit": 14, "of": 16, "before": "1.0", "after": "inf", "found": found, "matters": matters,
        "loss_change": change, "norm_change": 0.0,
    }  # fmt: skip


def told(*flips: dict[str, Any], checked: float = 1.02, alarms: int = 0) -> dict[str, Any]:
    sound = [flip("state", found=True, matters=False), flip("messages", found=True, matters=True)]
    return {
        "flips": [*sound, *flips],
        "plain": {"cpu_s": [1.0, 2.0], "step_s": [1.0, 1.0]},
        "checked": {"cpu_s": [checked, 2 * checked], "step_s": [1.0, 1.0]},
        "alarms": alarms,
        "sound_steps": 4,
        "checks_per_step": 200.0,
    }


@pytest.mark.parametrize(
    ("report", "passed"),
    [
        (told(flip("products", found=True, matters=True), flip("products", found=False, matters=False)), True),
        (told(flip("products", found=False, matters=True)), False),
        (told(flip("messages", found=False, matters=False)), False),
        (told(flip("elsewhere", found=False, matters=True)), True),
        (told(checked=1.04), False),
        (told(alarms=1), False),
    ],
)
def test_bars(report: dict[str, Any], passed: bool) -> None:
    found = evaluate(report, FlipsCase())
    assert found["passed"] is passed
    text = describe(found)
    assert ("missed" in text) == any(
        f["matters"] and not f["found"] and f["kind"] != "elsewhere" for f in report["flips"]
    )
    assert "CPU time" in text and "4 sound steps" in text


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.int64))
def test_a_flip_is_one_bit_and_can_be_taken_back(dtype: torch.dtype) -> None:
    x = torch.arange(1, 13).to(dtype).view(3, 4)
    kept, aim, planted = x.clone(), Aim(), BitFlip(0.5, 0.3)
    aim.begin(1, planted)
    aim.passes("first", x)
    assert torch.equal(x, kept) and aim.hit == ""
    aim.passes("second", x)
    assert aim.hit == "second" and int((x != kept).sum()) == 1 and planted.was["of"] == 8 * x.element_size()
    planted(x)
    assert torch.equal(x, kept)
