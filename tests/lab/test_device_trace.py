"""The real training step on a GPU that computes nothing: what it would ask of a real one, written down. One process traces all cases.

A change of these numbers is a change of what the first day on a GPU brings. Mend the code, or say in the commit why the number is another one.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiers import some

import phalanx
from phalanx_lab.bench.trace.command import per_layer
from phalanx_lab.bench.trace.order import differences
from phalanx_lab.bench.trace.pieces import trace_piece
from phalanx_lab.bench.trace.shim import run_traces, why_not
from phalanx_lab.bench.trace.steps import even_estimate

SMALL = (
    "--model.preset qwen3-30b-a3b --model.num_layers 2 --model.hidden 256 --model.vocab 512 --model.num_experts 8 --model.top_k 2 "
    "--model.expert_ffn 128 --train.seq_len 256 --train.micro_batch 1"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of some ranks of a world."""

    words: str
    base: str = SMALL
    world: int = 4
    ranks: tuple[int, ...] = (0,)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[dict[str, Any]]:
        settings = [*self.base.split(), *self.words.split()]
        return [{"settings": settings, "world": self.world, "rank": r, **self.more} for r in self.ranks]


pytestmark = [
    pytest.mark.timeout(900),  # the traces of all cases count with whichever test asks first
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

ALL = (0, 1, 2, 3)
EMPTY = {"samples": 7}
"""The last rank's second micro-batch has no sample."""
ORDER = {
    "experts": Case(words="--folding.ep 4", ranks=ALL),
    "an empty micro-batch": Case(
        words="--folding.ep 4 --resilience.mode fast --optim.bucket_mb 0.05", ranks=ALL, more=EMPTY
    ),
    "replicas": Case(
        words="--folding.ep 4 --resilience.mode fast --resilience.slots_per_rank 3 --optim.bucket_mb 0.05",
        ranks=ALL,
        more=EMPTY,
    ),
    "a pipeline": Case(words="--folding.ep 2 --folding.pp 2", ranks=ALL, more={"samples": 4}),
    "a pipeline in v": Case(
        words="--model.num_layers 4 --folding.ep 2 --folding.pp 2 --pipeline.schedule zbv",
        ranks=ALL,
        more={"samples": 8},
    ),
    "rings": Case(words="--folding.ep 2 --folding.cp 2", ranks=ALL),
    "heads exchanged": Case(words="--folding.ep 2 --folding.cp 2 --folding.cp_method ulysses", ranks=ALL),
    "tensor parallel": Case(words="--folding.ep 2 --folding.tp 2 --folding.etp 2", ranks=ALL),
    "full recompute": Case(words="--folding.ep 2 --train.recompute full", ranks=ALL),
    "chunks": Case(words="--folding.ep 4 --dispatch.overlap coarse:2", ranks=ALL),
    "tiles": Case(words="--folding.ep 4 --dispatch.overlap tiles", ranks=ALL),
    "gradients in shards": Case(
        words="--folding.ep 2 --optim.zero 2 --resilience.mode fast --optim.bucket_mb 0.05", ranks=ALL, more=EMPTY
    ),
    "fine": Case(words="--folding.ep 4 --dispatch.overlap fine", ranks=ALL),
    "tokens by DeepEP": Case(
        words="--folding.ep 4 --dispatch.transport deepep --resilience.mode fast --optim.bucket_mb 0.05",
        ranks=ALL,
        more=EMPTY,
    ),
}
RUNS = {
    "one rank": Case(words="", world=1),
    "keys gathered": Case(words="--folding.ep 2 --folding.cp 2 --folding.cp_method all_gather"),
    "drop": Case(words="--folding.ep 4 --dispatch.policy drop"),
    "padded": Case(words="--folding.ep 4 --dispatch.policy drop --dispatch.pad_to_capacity true"),
    "gathered tokens": Case(words="--folding.ep 4 --dispatch.transport all_gather"),
    "tokens by DeepEP": Case(words="--folding.ep 4 --dispatch.transport deepep"),
    "tokens by DeepEP, full": Case(words="--folding.ep 4 --dispatch.transport deepep --train.recompute full"),
    "selective": Case(words="--folding.ep 4 --train.recompute selective"),
    "full": Case(words="--folding.ep 4 --train.recompute full"),
    "full, chunks": Case(words="--folding.ep 4 --train.recompute full --dispatch.overlap coarse:2"),
    "auto": Case(words="--folding.ep 4 --dispatch.overlap auto"),
    "documents": Case(words="--folding.ep 4", more={"documents": 4}),
    "zero bubble": Case(words="--folding.ep 2 --folding.pp 2 --pipeline.schedule zero_bubble", more={"samples": 8}),
    "interleaved": Case(
        words="--model.num_layers 4 --folding.ep 2 --folding.pp 2 --pipeline.virtual 2", more={"samples": 8}
    ),
    "moments in bf16": Case(words="--folding.ep 4 --optim.state_dtype bfloat16"),
    "whole state": Case(words="--folding.ep 4 --optim.zero 0"),
    "plain": Case(words="--folding.ep 4"),
    "saved": Case(words="--folding.ep 4", more={"saves": True}),
    "fused": Case(words="--folding.ep 4 --dispatch.overlap fused"),
}
FAMILIES = {
    name: Case(base=f"--model.preset {name} --train.seq_len 512 --train.micro_batch 1", words=f"--model.num_layers {layers} --folding.ep {ep}", world=ep)
    for name, layers, ep in (
        ("mixtral-8x7b", 2, 8), ("deepseek-v2", 2, 8), ("deepseek-v3", 4, 64), ("olmoe-1b-7b", 2, 8), ("qwen2-57b-a14b", 2, 8),
    )
}  # fmt: skip
QWEN = "--model.preset qwen3-30b-a3b --train.seq_len 4096 --train.micro_batch 1 --folding.ep 8"
MEASURED = {
    "few": Case(base=QWEN, words="--model.num_layers 2", world=8),
    "more": Case(base=QWEN, words="--model.num_layers 3", world=8),
    "twice": Case(base=QWEN, words="--model.num_layers 2", world=8, more={"samples": 16}),
    "few, selective": Case(base=QWEN, words="--model.num_layers 2 --train.recompute selective", world=8),
    "more, selective": Case(base=QWEN, words="--model.num_layers 3 --train.recompute selective", world=8),
}
WORLDS = {
    "1,024 ranks": Case(
        base=QWEN, words="--model.num_layers 2 --train.seq_len 256 --folding.tp 2", world=1024, ranks=(1023,)
    )
}
SHAPES = {
    "mixtral-8x22b": "--model.num_layers 3 --train.seq_len 2048 --folding.ep 8",
    "qwen3-235b-a22b, long": "--model.num_layers 2 --train.seq_len 8192 --folding.ep 16 --train.recompute selective",
    "deepseek-v2, whole groups": "--model.num_layers 4 --train.seq_len 2048 --folding.ep 16",
    "deepseek-v3, selective": "--model.num_layers 5 --train.seq_len 2048 --folding.ep 32 --train.recompute selective",
    "olmoe-1b-7b, wide": "--model.num_layers 4 --train.micro_batch 4 --train.seq_len 1024 --folding.ep 8 --train.recompute full",
    "qwen3-30b-a3b, heads exchanged": "--model.num_layers 3 --train.seq_len 4096 --folding.ep 8 --folding.cp 2 --folding.cp_method ulysses",
    "mixtral-8x7b, tensor parallel": "--model.num_layers 3 --train.seq_len 4096 --folding.tp 4 --folding.ep 4 --folding.etp 2",
    "qwen2-57b-a14b, full": "--model.num_layers 4 --train.seq_len 2048 --folding.ep 8 --train.recompute full",
    "qwen3-30b-a3b, padded": "--model.num_layers 3 --train.seq_len 2048 --folding.ep 4 --dispatch.policy drop --dispatch.pad_to_capacity true",
    "qwen3-30b-a3b, pipeline": "--model.num_layers 4 --train.seq_len 2048 --folding.ep 4 --folding.pp 2",
    "qwen3-30b-a3b, tokens by DeepEP": "--model.num_layers 3 --train.seq_len 4096 --folding.ep 8 --dispatch.transport deepep",
    "olmoe-1b-7b, tokens by DeepEP, full": "--model.num_layers 4 --train.seq_len 4096 --folding.ep 8 --dispatch.transport deepep --train.recompute full",
    "mixtral-8x7b, put off": "--model.num_layers 4 --train.seq_len 2048 --folding.ep 4 --folding.pp 2 --pipeline.schedule zero_bubble",
    "olmoe-1b-7b, sharded": "--model.num_layers 4 --train.seq_len 2048 --folding.ep 4 --optim.zero 2 --optim.state_dtype bfloat16",
}  # fmt: skip
"""Shapes that no term of the dry run was fitted to."""
MEMORY = {
    name: Case(
        base=f"--model.preset {name.split(',')[0]}",
        words=f"--train.micro_batch 1 {words}" if "micro_batch" not in words else words,
        world=32 if "deepseek-v3" in name else 16 if "16" in words.split() else 8,
        more={"samples": 16} if "pp 2" in words or "zero 2" in words else {},
    )
    for name, words in SHAPES.items()
}
ASKED = {
    "order": {"an empty micro-batch", "tiles", "a pipeline"},
    "runs": {"one rank", "padded", "plain", "saved", "fused", "full", "full, chunks", "tokens by DeepEP", "tokens by DeepEP, full"},
}  # fmt: skip
"""Cases of which some test asks more than that they run: always traced. Of the others some each day."""


def today(group: str, cases: dict[str, Case], few: int) -> dict[str, Case]:
    asked = ASKED.get(group, set[str]())
    chosen = asked | set(some([name for name in cases if name not in asked], few))
    return {name: case for name, case in cases.items() if name in chosen}


GROUPS = {
    "order": today("order", ORDER, 3),
    "runs": today("runs", RUNS, 3),
    "families": today("families", FAMILIES, 2),
    "measured": MEASURED,
    "worlds": WORLDS,
    "memory": today("memory", MEMORY, 4),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, list[dict[str, Any]]]]]:
    """Group -> case -> what each of its ranks said."""
    asked = [one for group in GROUPS.values() for case in group.values() for one in case.asked]
    told = iter(run_traces(asked, cache=tmp_path_factory.mktemp("shim")))
    yield {g: {name: [next(told) for _ in case.ranks] for name, case in group.items()} for g, group in GROUPS.items()}


Traces = dict[str, dict[str, list[dict[str, Any]]]]


@pytest.mark.core
@pytest.mark.parametrize(("group", "name"), [(g, name) for g, group in GROUPS.items() for name in group])
def test_the_step_runs_on_a_device(traces: Traces, group: str, name: str) -> None:
    """No operation that only a CPU has, no tensors of two devices in one, and nothing whose size the host would have to ask for."""
    for told in traces[group][name]:
        assert "error" not in told, told["error"]
        assert told["launches"]["optimizer"] > 0 and told["peak_bytes"] > told["static_bytes"] > 0


@pytest.mark.parametrize("name", GROUPS["order"])
def test_every_communicator_sees_one_order_on_all_of_its_ranks(traces: Traces, name: str) -> None:
    told = traces["order"][name]
    assert all(t.get("calls") for t in told), "nothing was compared"
    assert [d.explain() for d in differences(dict(enumerate(t["calls"] for t in told)))] == []


def waits_of(told: dict[str, Any], *phases: str) -> list[tuple[str, str, int]]:
    """(what, file, times)."""
    return [(what, line.split(":")[0], n) for phase, what, line, n in told["syncs"] if phase in phases]


def test_the_host_waits_once_a_layer_and_where_the_table_says(traces: Traces) -> None:
    few, more = traces["measured"]["few"][0], traces["measured"]["more"][0]
    assert waits_of(few, "forward", "backward") == [("synchronize", "runtime/moe/dispatch.py", 2)]
    assert waits_of(more, "forward", "backward") == [("synchronize", "runtime/moe/dispatch.py", 3)]
    made_once = ("copy cpu to cuda", "kernels/triton/symmetric.py", 4)  # when the first layer makes the buffers
    fused = traces["runs"]["fused"][0]
    assert waits_of(fused, "forward", "backward") == [made_once, ("synchronize", "runtime/moe/dispatch.py", 2)]
    assert waits_of(traces["runs"]["padded"][0], "forward", "backward", "loss") == []


def test_deepep_waits_once_a_layer_by_itself_and_not_where_a_layer_runs_again(traces: Traces) -> None:
    for name in ("tokens by DeepEP", "tokens by DeepEP, full"):
        told = traces["runs"][name][0]
        assert waits_of(told, "forward", "backward") == [("DeepEP's wait", "runtime/comm/tokens.py", 2)]
        (line,) = (line for _, what, line, _ in told["syncs"] if what == "DeepEP's wait")
        file, number = line.split(":")
        assert "# SYNC:" in (Path(phalanx.__file__).parent / file).read_text().splitlines()[int(number) - 1]


def test_a_save_adds_copies_and_one_wait_in_the_thread_that_writes(traces: Traces) -> None:
    plain, saved = (traces["runs"][name][0] for name in ("plain", "saved"))
    before = [tuple(wait) for wait in plain["syncs"]]
    ((phase, what, line, times),) = [wait for wait in map(tuple, saved["syncs"]) if wait not in before]
    assert (phase, what, times) == ("step", "synchronize", 1) and len(saved["syncs"]) == len(before) + 1
    file, number = line.split(":")
    assert file == "runtime/checkpoint/host_copies.py"
    assert "# SYNC:" in (Path(phalanx.__file__).parent / file).read_text().splitlines()[int(number) - 1]
    assert {**saved["ops"], "step": 0} == {**plain["ops"], "step": 0} and saved["peak_bytes"] == plain["peak_bytes"]
    more = Counter(saved["ops"]["step"]) - Counter(plain["ops"]["step"])
    assert set(more) == {"copy to host"} and more["copy to host"] > 10


def test_fused_kernels_compute_what_grouped_products_do_and_send_a_token_to_a_rank_once(traces: Traces) -> None:
    plain, fused = (traces["runs"][name][0] for name in ("plain", "fused"))
    assert sum(fused["fused"].values()) > 0 == sum(plain["fused"].values())
    for phase in ("forward", "backward"):
        assert fused["fused"].get(phase, 0) + fused["flops"][phase] == plain["flops"][phase]
    rows = [sum(sent for _, what, _, _, sent in told["exchanges"] if what == "rows") for told in (plain, fused)]
    assert 0.8 < rows[1] / rows[0] < 0.98  # of two experts both are on one rank of four for a token of seven


def test_exchanges_are_told_apart_by_what_they_carry(traces: Traces) -> None:
    def contents(told: dict[str, Any]) -> dict[tuple[str, str], int]:
        found = Counter[tuple[str, str]]()
        for phase, what, _, _, sent in told["exchanges"]:
            found[phase, what] += sent
        return found

    plain, tiles = contents(traces["runs"]["plain"][0]), contents(traces["order"]["tiles"][0])
    assert (
        plain["forward", "rows"] >= 2 * 2 * 256 * 2 * 256 * 2 * 3 // 4
    )  # 2 layers, there and back, 256 x 2 rows of 256
    assert plain["backward", "gradients"] > plain["publish", "parameters"] > 0 == plain["publish", "gradients"]
    assert tiles["forward", "rows"] > 0 and set(tiles) == set(plain)
    assert contents(traces["order"]["a pipeline"][0])["step", "stages"] == 2 * 256 * 256 * 2  # two micro-batches' rows
    assert not contents(traces["runs"]["one rank"][0])


@pytest.mark.parametrize("name", ["full", "full, chunks"])
def test_a_layer_that_runs_again_does_not_wait_again(traces: Traces, name: str) -> None:
    told = traces["runs"][name][0]
    assert waits_of(told, "forward") == [("synchronize", "runtime/moe/dispatch.py", 2)]
    assert waits_of(told, "backward") == []


BUDGETS = {
    "forward_launches": 48,
    "backward_launches": 52,
    "loss_launches_per_4096": 100,
    "syncs_per_layer": 1,
    "kept_bytes_per_token_layer": 104e3,
    "moved_bytes_per_token_layer": 0.85e6,
}
"""On Qwen3-30B-A3B with 8 ranks."""


@pytest.mark.parametrize("what", BUDGETS)
def test_a_layer_stays_within_its_budget(traces: Traces, what: str) -> None:
    found = per_layer(*(traces["measured"][name][0] for name in ("few", "more", "twice")))
    assert 0 < found[what] <= BUDGETS[what]


def test_selective_recomputation_keeps_half(traces: Traces) -> None:
    few, more = (traces["measured"][name][0] for name in ("few, selective", "more, selective"))
    assert (more["kept_bytes"] - few["kept_bytes"]) / few["tokens"] <= 60e3


@pytest.mark.parametrize("name", GROUPS["memory"])
def test_the_dry_run_is_within_5_percent_of_the_trace(traces: Traces, name: str) -> None:
    case, (told,) = MEMORY[name], traces["memory"][name]
    estimate = even_estimate(case.asked[0]["settings"], world=case.world, samples=case.more.get("samples"))
    seen = estimate.peak_bytes - estimate.peak.terms["fused buffers"]  # which are not of torch's allocator
    assert 0.95 <= seen / told["peak_bytes"] <= 1.05


def test_pieces_that_a_card_was_timed_at_ask_for_what_their_sizes_say(tmp_path_factory: pytest.TempPathFactory) -> None:
    by = f"{trace_piece.__module__}:{trace_piece.__name__}"
    cases = [{"by": by, "piece": name} for name in ("qwen3-30b-a3b", "loss", "adamw")]
    layer, loss, update = run_traces(cases, cache=tmp_path_factory.mktemp("shim"))
    assert layer["product_flops"] == pytest.approx(6 * 4096 * 2048 * 3 * 8 * 768, rel=0.01) and layer["waits"] == 0
    assert loss["product_flops"] == 6 * 4096 * 2048 * 151_936
    assert update["moved_bytes"] == pytest.approx(30 * 200_000_000, rel=1e-6)  # masters and moments there and back


def call(op: str, *sizes: int, ranks: Sequence[int] = (0, 1), **more: Any) -> dict[str, Any]:
    return {
        "on": [list(ranks), "g"],
        "op": op,
        "phase": "backward",
        "sizes": [[n, "torch.float32"] for n in sizes],
        **more,
    }


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({0: [call("allreduce", 4)], 1: [call("allreduce", 4)]}, ""),
        ({0: [call("allreduce", 4)], 1: [call("allreduce", 5)]}, "after 0 calls: rank 0: allreduce (4 float32)"),
        ({0: [call("allreduce", 4)], 1: []}, "rank 1: nothing more"),
        ({0: [call("allreduce", 4), call("allgather", 4)], 1: [call("allgather", 4), call("allreduce", 4)]}, "after 0 calls"),
        (
            {
                0: [call("alltoall_base", 3, 3, splits=[[1, 2], [1, 2]])],
                1: [call("alltoall_base", 3, 3, splits=[[2, 1], [2, 1]])],
            },
            "",
        ),
        (
            {
                0: [call("alltoall_base", 3, 3, splits=[[1, 2], [1, 2]])],
                1: [call("alltoall_base", 3, 3, splits=[[1, 2], [2, 1]])],
            },
            "alltoall_base",
        ),
        ({0: [call("send", 4, peer=1)], 1: [call("recv", 4, peer=0)]}, ""),
        ({0: [call("send", 4, peer=1)], 1: [call("recv", 8, peer=0)]}, "send rank 1 (4 float32)"),
        ({r: [call("send", 4, peer=1 - r), call("recv", 4, peer=1 - r)] for r in (0, 1)}, "send"),
        ({r: [call("send", 4, peer=1 - r, batch=0), call("recv", 4, peer=1 - r, batch=0)] for r in (0, 1)}, ""),
    ],
)  # fmt: skip
def test_calls_meet_by_their_order_alone(calls: dict[int, list[dict[str, Any]]], words: str) -> None:
    found = [d.explain() for d in differences(calls)]
    assert (found == []) if not words else (len(found) == 1 and words in found[0])


def test_nothing_that_a_parent_imports_initialises_a_device() -> None:
    """Workers are forked: a parent with a device of its own would break all of them."""
    words = "import phalanx.train.run, phalanx.cli.main, phalanx.launch, torch; assert not torch.cuda._initialized"
    subprocess.run([sys.executable, "-c", words], check=True)


def test_a_case_that_fails_says_where(traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> None:
    broken = dataclasses.replace(RUNS["one rank"], words="--folding.tp 3")
    (told,) = run_traces(broken.asked, cache=tmp_path_factory.mktemp("shim"))
    assert "folding.tp" in told["error"]
