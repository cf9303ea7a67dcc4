"""Fused kernels on a cluster: between one after the other and the longer of the two parts, what the division costs, who is refused, what their buffers take."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cli.main import main
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.kernels.triton.index import arrange
from phalanx.kernels.triton.layer import ArrivalCounts, LaunchShape, pack_weights, route, row_weights
from phalanx.kernels.triton.symmetric import ArenaSpec
from phalanx.kernels.triton.tiles import TileShape
from phalanx.plan.mapping.folding import legal_foldings, make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe.overlap.fused.launch import fused_launch
from phalanx.plan.recipe import run_problems
from phalanx.simulate.from_recipe import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import Hardware, load_hardware, parse_cluster
from phalanx.simulate.hardware.collectives import Network
from phalanx.simulate.hardware.cost import Oracle
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.program.recipe import programs_of_recipe
from phalanx.simulate.search.space import fuses
from phalanx.simulate.step.block_time import Blocks
from phalanx.simulate.step.device_memory import memory_of
from phalanx.simulate.step.fused_time import (
    INDEX_KERNELS,
    PROBLEM_ROWS,
    FusedExperts,
    Messages,
    first_s,
    fused_run_problems,
    second_s,
)
from phalanx.simulate.step.timing import Prediction, predict

pytestmark = pytest.mark.unit
H100 = load_hardware("h100")
LAUNCH = fused_launch(132, left_free=32, capacity=4096, columns=4096)
SLOWED = 132 / 100


def experts(
    preset: str, *, hardware: Hardware = H100, seq_len: int = 16384, left_free: int | None = None
) -> FusedExperts:
    job = Job(spec=PRESETS[preset], seq_len=seq_len, global_batch=8)
    overlap = Overlap(dp=False, ep="fused", left_free=left_free)
    mapping = Mapping(folding=make_folding(world=8, ep=8), overlap=overlap, routing=RouterModel(kind="balanced"))
    return FusedExperts(job, mapping, Oracle(hardware), Network(hardware))


# ---- one product -----------------------------------------------------------------------------------------------------------------


def test_a_phase_lies_between_its_longer_part_and_both_one_after_the_other() -> None:
    rng = random.Random(1)
    for _ in range(500):
        messages = Messages(link_s=rng.uniform(0, 3), latency_s=rng.uniform(0, 0.1))
        launch = fused_launch(132, left_free=rng.randint(1, 131), capacity=4096, columns=4096)
        slowed, sending = 132 / launch.first, messages.sending_s(launch.send) + messages.latency_s
        ranks, rows = rng.randint(2, 16), rng.uniform(1, 20000)
        first = first_s(1.0, messages, launch, ranks=ranks, slot_rows=rows)
        assert max(slowed, sending) - 1e-9 <= first <= slowed + sending + 1e-9
        second = second_s(1.0, messages, launch)
        assert max(slowed, messages.link_s) - 1e-9 <= second <= slowed + sending + 1e-9


def test_the_first_product_waits_by_whole_problems() -> None:
    """A slot of one problem needs its last row, so nothing hides; of c problems all but the last hide behind messages that take longer."""
    messages = Messages(link_s=5.0, latency_s=0.0)
    one = first_s(1.0, messages, LAUNCH, ranks=8, slot_rows=PROBLEM_ROWS)
    assert one == pytest.approx(5.0 + SLOWED)
    for cuts in (2, 4, 16):
        first = first_s(1.0, messages, LAUNCH, ranks=8, slot_rows=cuts * PROBLEM_ROWS)
        assert first == pytest.approx(5.0 + SLOWED / cuts)
    # few messages: all but what comes before the first problem can begin is hidden
    few = first_s(1.0, Messages(link_s=0.1, latency_s=0.0), LAUNCH, ranks=8, slot_rows=8 * PROBLEM_ROWS)
    assert few == pytest.approx(SLOWED)  # the first problem of each slot has the own rows


def test_the_second_product_hides_all_blocks_but_one() -> None:
    for link_s in (0.2, 1.0, 4.0):
        second = second_s(1.0, Messages(link_s=link_s, latency_s=0.0), LAUNCH)
        assert second == pytest.approx(max(SLOWED + link_s / 4, link_s + SLOWED / 4))


# ---- a layer ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_layer_lies_between_serial_and_the_longer_of_its_parts(preset: str, direction: str) -> None:
    """Where messages take a good part of the time; by the same products and messages, and beside the serial layer of the same mapping."""
    fused = experts(preset)
    one = fused.one(1.0, direction)  # type: ignore[arg-type]
    assert max(one.compute_s, one.messages_s) < one.seconds < one.compute_s + one.messages_s
    bare = replace(fused.mapping, overlap=Overlap(dp=False))
    layer, serial = (Blocks(fused.job, m, fused.oracle, fused.network).experts().seconds for m in (fused.mapping, bare))
    assert layer[direction == "backward"] < serial[direction == "backward"]


def test_multiprocessors_that_carry_rows_are_missing_elsewhere() -> None:
    """With links that take no time products take 132/116 as long; few messages do not pay for that, and one multiprocessor cannot carry many."""
    quick = replace(H100, inside_bytes_per_s=((2.0, 1e30),), inside_latency_s=1e-12, inside_half_bytes=1e-9)
    fused = experts("deepseek-v3", hardware=quick)
    one, shape = fused.one(1.0, "forward"), fused.job.spec
    second = fused.oracle.product(
        fused.tokens * shape.top_k, shape.hidden, shape.expert_ffn, groups=shape.num_experts // 8
    )
    assert one.seconds - one.compute_s == pytest.approx((fused.again_s() + second) * 16 / 116)
    few = experts("mixtral-8x22b").one(1.0, "forward")
    assert few.seconds > few.compute_s + few.messages_s
    assert experts("deepseek-v3", left_free=1).one(1.0, "forward").seconds > 2 * experts("deepseek-v3").one(1.0, "forward").seconds  # fmt: skip


def test_the_entries_add_up() -> None:
    fused = experts("deepseek-v3")
    told, (memory, fixed) = fused.entries(), fused.around()
    for place, direction in enumerate(("forward", "backward")):
        whole = sum(pair[place] for pair in told.seconds.values())
        one = fused.one(1.0, direction)  # type: ignore[arg-type]
        assert whole == pytest.approx(one.seconds + memory[place] + fixed[place])
    assert told.weight_grad == fused.one(1.0, "backward").weights_s > 0
    assert 0 < told.hidden < 2 * fused.one(1.0, "forward").messages_s


def test_an_uneven_load_is_imbalance_and_longer_messages() -> None:
    fused = experts("deepseek-v3")
    uneven = replace(fused, mapping=replace(fused.mapping, routing=RouterModel(kind="learned"))).entries().seconds
    even = fused.entries().seconds
    assert uneven["imbalance"][0] > even["imbalance"][0] == 0 and uneven["experts"] == even["experts"]
    assert uneven["a2a_inside"][0] > even["a2a_inside"][0]


# ---- what the kernels are ----------------------------------------------------------------------------------------------------------


class _Counted(TorchDispatchMode):
    """Operations that do something: neither views nor memory alone."""

    VIEWS = ("view", "expand", "unsqueeze", "squeeze", "select", "slice", "alias", "split", "detach", "unbind", "empty")
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.split(".")[0].lstrip("_").removeprefix("new_").removeprefix("unsafe_")
        self.number += not name.startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


def test_constants_are_the_kernels() -> None:
    assert TileShape().problem_rows == PROBLEM_ROWS
    spec = ArenaSpec(ranks=4, capacity=64, columns=32, dtype=torch.float32, parts=4, blocks=4)
    shape = LaunchShape(slots_per_rank=4, impl="reference")
    slots, weights = torch.randint(0, 16, (64, 2), dtype=torch.int32), torch.rand(64, 2)
    with _Counted() as counted:
        to = route(slots, shape=shape, spec=spec)
        told = ArrivalCounts(to.slots_PCK, pack_weights(weights, to), to.counts_P)
        order = arrange(told.slots_PCK, rank=0, slots=4, parts=4, problem_rows=PROBLEM_ROWS, max_rows=128)
        row_weights(told, order)
    assert counted.number == pytest.approx(
        INDEX_KERNELS, rel=0.1
    )  # torch composes a few of them otherwise from version to version


# ---- a recipe --------------------------------------------------------------------------------------------------------------------

RECIPE = """
[model]
preset = "qwen3-30b-a3b"
vocab = 151936
[train]
seq_len = 4096
global_batch = 256
micro_batch = 1
[router]
force = "balanced"
[launch]
device = "cuda"
ranks = 64
[optim]
bucket_mb = 0
[folding]
"""


def read(tmp_path: Path, *words: str, ep: int = 8) -> Recipe:
    path = tmp_path / "r.toml"
    path.write_text(f"{RECIPE}ep = {ep}\n")
    return load_recipe(path, words, check=lambda r: run_problems(r, world=64, tokenizer_vocab=r.model.vocab))


def predicted(tmp_path: Path, *words: str, ep: int = 8) -> Prediction:
    recipe, on = read(tmp_path, *words, ep=ep), parse_cluster("h100x64")
    spec = resolve_recipe(recipe)
    return predict(job_of_recipe(recipe, spec), mapping_of_recipe(recipe, spec, world=64, cluster=on), on)


FUSED = ("--dispatch.overlap", "fused")


def test_a_recipe_is_predicted(tmp_path: Path) -> None:
    """Faster than serial where messages take time, another run with another division, and its buffers are there: a place on each rank for every token of its group, there and back."""
    serial, fused = predicted(tmp_path), predicted(tmp_path, *FUSED)
    assert fused.step.seconds < serial.step.seconds
    other = predicted(tmp_path, *FUSED, "--dispatch.left_free", "8")
    assert other.step.seconds != fused.step.seconds and other.mapping.hash != fused.mapping.hash
    buffers = 2 * 8 * 4096 * 2048 * 2
    bare, full = (memory_of(p.job, p.mapping)[0].buffers for p in (serial, fused))
    assert buffers <= full - bare < 1.2 * buffers
    assert fused.peak_bytes > serial.peak_bytes + buffers


@pytest.mark.parametrize(
    ("words", "ep", "told"),
    [
        ((), 16, "folding.ep = 16.*2 hosts of 8"),
        (("--dispatch.left_free", "132"), 8, r"dispatch\.left_free.*from 1 to 131"),
        (("--dispatch.left_free", "200"), 16, r"(?s)folding.ep = 16.*dispatch\.left_free"),
    ],
)
def test_what_a_run_would_refuse_is_refused(tmp_path: Path, words: tuple[str, ...], ep: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        predicted(tmp_path, *FUSED, *words, ep=ep)


def test_its_rows_are_on_no_program_clock(tmp_path: Path) -> None:
    recipe = read(tmp_path, *FUSED)
    with pytest.raises(ConfigError, match=r"dispatch\.overlap"):
        programs_of_recipe(recipe, resolve_recipe(recipe), world=64)


def test_processors_have_no_such_kernels() -> None:
    (problem,) = fused_run_problems(make_folding(world=8, ep=8), replace(H100, sms=None, threads=1), left_free=None)
    assert problem.where == "dispatch.overlap" and "processors" in problem.rule
    assert fused_run_problems(make_folding(world=8, ep=8), H100, left_free=None) == []


# ---- in a search -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_host", [6, 8])
def test_a_search_asks_where_a_run_would_not_refuse(per_host: int) -> None:
    hardware = replace(H100, ranks_per_host=per_host)
    for world in (4, 24, 48):
        for folding in legal_foldings(world, resolve_recipe(Recipe()), seq_len=128):
            legal = folding.etp == 1 and not fused_run_problems(folding, hardware, left_free=None)
            assert fuses(folding, hardware) == legal, folding


def test_a_search_finds_them_and_writes_their_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mixtral-8x22b", "--cluster", "h100x64", "--batch", "64", "--top", "1", "--exact", "1"]
    path, fused = tmp_path / "best.toml", ["--routing", "balanced", "--schedules", "1f1b", "--ep-overlap", "fused"]
    assert main(["search", *words, *fused, "--recipe", str(path)]) == 0
    recipe = load_recipe(path, [])
    assert recipe.dispatch.overlap == "fused" and recipe.optim.bucket_mb == 0.0
    spec = resolve_recipe(recipe)
    again = mapping_of_recipe(recipe, spec, world=64, cluster=parse_cluster("h100x64"))
    assert again.label() in capsys.readouterr().out
    assert main(["search", *words, "--precision", "fp8", "--ep-overlap", "fused"]) == 2
    assert "computes in bf16" in capsys.readouterr().err
