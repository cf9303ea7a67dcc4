"""State that moves between the members of an elastic run, on GPUs that compute nothing: one order of messages on all members, no wait that is not declared, and room for little more than a step's state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiers import some

import phalanx
from phalanx_lab.bench.trace.order import differences
from phalanx_lab.bench.trace.shim import run_traces, why_not

pytestmark = [pytest.mark.unit, pytest.mark.skipif(bool(why_not()), reason=why_not())]
LARGE = (
    "--model.preset qwen3-30b-a3b --model.num_layers 4 --model.vocab 4096 --model.num_experts 16 --model.top_k 2 --model.expert_ffn 2048 "
    "--train.seq_len 256 --train.micro_batch 1 --resilience.mode fast --resilience.heal true --resilience.f 2"
)
"""State of gigabytes, which moves in many waves."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Four ranks of which some are lost, and whom others join."""

    words: str
    lost: tuple[int, ...] = ()
    joining: int = 0

    @property
    def asked(self) -> list[dict[str, Any]]:
        case = {
            "settings": [*LARGE.split(), *self.words.split()],
            "world": 4,
            "lost": self.lost,
            "joining": self.joining,
        }
        by = "phalanx_lab.bench.trace.recovery:trace_recovery"
        return [{"by": by, **case, "rank": r} for r in range(4 - len(self.lost) + self.joining)]


EACH = {
    "shards": Recovery(words="--folding.ep 2", lost=(1,)),
    "replicas": Recovery(words="--folding.ep 4 --resilience.slots_per_rank 8", lost=(2,), joining=1),
    "whole state": Recovery(words="--folding.ep 2 --optim.zero 0", lost=(3,), joining=1),
    "a pipeline": Recovery(words="--folding.pp 2", lost=(3,), joining=1),
    "rings, more hosts": Recovery(words="--folding.cp 2 --folding.ep 2 --optim.zero 2", joining=2),
}
CASES = {name: EACH[name] for name in some(list(EACH), 1)}
"""That of today (each takes half a minute)."""
Traces = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    asked = [one for case in CASES.values() for one in case.asked]
    told = iter(run_traces(asked, cache=tmp_path_factory.mktemp("shim")))
    yield {name: [next(told) for _ in case.asked] for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_all_members_move_state_in_one_order(traces: Traces, name: str) -> None:
    told = traces[name]
    assert not [t["error"] for t in told if "error" in t]
    assert sum(len(t["calls"]) for t in told) > 20, "nothing was compared"
    assert [d.explain() for d in differences({rank: t["calls"] for rank, t in enumerate(told)})] == []


@pytest.mark.parametrize("name", CASES)
def test_members_wait_for_the_device_where_the_source_says_so(traces: Traces, name: str) -> None:
    """Once for checksums of what is held, and in each wave for what came and for its checksums."""
    waits = [wait for told in traces[name] for wait in told["syncs"]]
    lines = {line for _, _, line, _ in waits}
    for line in lines:
        file, number = line.split(":")
        assert "# SYNC:" in (Path(phalanx.__file__).parent / file).read_text().splitlines()[int(number) - 1], line
    assert {line.split(":")[0] for line in lines} == {"runtime/comm/devices.py", "kernels/ops/checksum.py"}
    assert all(times <= 18 for *_, times in waits)


@pytest.mark.parametrize("name", CASES)
def test_a_move_takes_little_more_than_a_steps_state(traces: Traces, name: str) -> None:
    for told in traces[name]:
        assert 0 < told["peak_bytes"] <= 1.15 * told["static_bytes"] and told["static_bytes"] > 2**30


def test_what_nobody_holds_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    (told,) = run_traces(Recovery(words="--folding.ep 4", lost=(1, 2)).asked[:1], cache=tmp_path_factory.mktemp("shim"))
    assert "no member holds" in told["error"]
