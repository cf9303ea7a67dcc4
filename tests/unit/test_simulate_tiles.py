"""Layers tile by tile on a cluster: the plan's own clock, what no overlap can beat, and published layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from overlap_clock import predict as clock
from step_without_clock import step_without_clock

from phalanx.cli.main import main
from phalanx.core.errors import ConfigError
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.moe.overlap.prediction.choose import SERIAL, compare_schedules
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost
from phalanx.plan.moe.overlap.settings import CANDIDATES, FINE
from phalanx.simulate.from_recipe import mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware.clusters import Hardware, load_hardware, parse_cluster
from phalanx.simulate.hardware.collectives import GroupSpan, Network
from phalanx.simulate.hardware.cost import Oracle
from phalanx.simulate.mapping.mapping import Job, Mapping, Overlap
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.search.best import search
from phalanx.simulate.search.space import Space, overlaps
from phalanx.simulate.search.to_recipe import recipe_of_mapping
from phalanx.simulate.step.block_time import Blocks, Ledger
from phalanx.simulate.step.quick import QuickPredictor
from phalanx.simulate.step.tile_layer import TiledExperts
from phalanx.simulate.step.tile_time import (
    TILE_ROWS,
    Direction,
    ExpertWidths,
    LayerPass,
    Pieces,
    TileLayer,
    layer_passes,
    link_cost,
    plan_of,
    tile_pieces,
    wire_of,
)

pytestmark = pytest.mark.unit
H100 = load_hardware("h100")
BARE = replace(H100, kernel_s=0.0, memory_bytes_per_s=1e30, ranks_per_host=4)
"""Products at one rate, and nothing else that takes time."""
LAYER = TileLayer(
    tokens=4096, rows=8192, top_k=2, experts=8, ep=8, etp=1, row_bytes=8192, ranks_per_host=4, gateways=False
)
WAYS = {"tiles": SERIAL, "fine": FINE, "auto": None}
WIDTHS = ExpertWidths(hidden=4096, ffn=14336, matrices=3)


def pieces(hardware: Hardware, layer: TileLayer, direction: Direction, *, taken: float = 0.15) -> Pieces:
    num_bytes = layer.rows * layer.etp * layer.row_bytes
    link = link_cost(Network(hardware), layer, num_bytes=num_bytes, taken=taken)
    return tile_pieces(Oracle(hardware), layer, WIDTHS, link, direction, shared_s=0.0)


@pytest.mark.parametrize("way", ["tiles", "fine", "auto"])
def test_in_pairs_the_partner_hides_what_is_left(way: str) -> None:
    """Never shorter than all computing of both passes, nor longer than one after the other; weight gradients that are put off are computed as long, and hide nothing."""
    of = {d: pieces(H100, LAYER, d) for d in ("forward", "backward")}  # type: ignore[arg-type]
    for puts_off in (False, True):
        alone, pair = (
            layer_passes(LAYER, of.__getitem__, WAYS[way], paired=paired, puts_off=puts_off)  # type: ignore[arg-type]
            for paired in (False, True)
        )
        left = sum(one.exposed_s for one in pair)
        bare = sum(one.exposed_s for one in alone)  # of finer schedules nothing but products that messages slow down
        assert 0 <= left < 0.5 * bare if way == "tiles" else left <= bare * (1 + 1e-9)
        assert all(one.exposed_s >= 0 for one in pair)
        if way != "auto":
            assert [one.compute_s for one in pair] == [one.compute_s for one in alone]


def passes(hardware: Hardware, layer: TileLayer, way: str) -> tuple[LayerPass, LayerPass]:
    return layer_passes(layer, lambda d: pieces(hardware, layer, d), WAYS[way])  # type: ignore[arg-type]


# ---- the clock of plan/moe/overlap/prediction/clock.py -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tiles", "fine", "auto"])
@pytest.mark.parametrize("change", [{}, {"ep": 4, "experts": 16}, {"ep": 4, "etp": 2}, {"gateways": True}])
def test_seconds_are_those_of_the_plans_clock(way: str, change: dict[str, int]) -> None:
    layer = replace(LAYER, **change)  # type: ignore[arg-type]
    rate = Oracle(BARE).peak_rate
    shape = LayerShape(tokens=layer.tokens, hidden=4096, ffn=14336, element_bytes=2, slots=layer.slots)
    for direction, found in zip(("forward", "backward"), passes(BARE, layer, way), strict=True):
        cost = replace(pieces(BARE, layer, direction).link, flops_by_rows=((1, rate),))  # type: ignore[arg-type]
        plan = plan_of(layer, found.schedule, direction)  # type: ignore[arg-type]
        assert found.seconds == pytest.approx(clock(plan, shape, cost, wire_of(layer, direction)).seconds, rel=1e-9)  # type: ignore[arg-type]


def test_the_choice_is_the_choosers() -> None:
    from phalanx.simulate.step.tile_time import _dispatch

    chosen = set()
    for rate in (1e9, 1e11, 1e13):
        hardware = replace(BARE, inside_bytes_per_s=((2.0, rate),), between_bytes_per_s=rate)
        cost = replace(pieces(hardware, LAYER, "forward").link, flops_by_rows=((1, Oracle(BARE).peak_rate),))
        shape = LayerShape(tokens=4096, hidden=4096, ffn=14336, element_bytes=2, slots=1)
        wire = wire_of(LAYER, "forward")
        choice = compare_schedules(_dispatch(LAYER), shape, cost, CANDIDATES, wire=wire, tile_rows=TILE_ROWS)
        found = passes(hardware, LAYER, "auto")[0]
        seconds = dict(choice.seconds)
        assert found.seconds == pytest.approx(seconds[choice.schedule], rel=1e-9)
        assert (found.schedule == SERIAL) == (choice.schedule == SERIAL)
        chosen.add(found.schedule)
    assert SERIAL in chosen and len(chosen) > 1


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_serial_messages_take_what_an_all_to_all_takes(size: int) -> None:
    """Both ways, with four bytes more for each row's weight."""
    layer = replace(LAYER, ep=size, experts=size, top_k=1, rows=4096)
    link = pieces(BARE, layer, "forward", taken=0.0).link
    found = passes(BARE, layer, "tiles")[0]
    span = GroupSpan(min(size, 4), max(1, size // 4))
    one = Network(BARE).all_to_all(layer.rows * layer.row_bytes, span)
    assert found.exposed_s == pytest.approx(2 * one, rel=0.01)
    assert link.bytes_per_s > 0


# ---- what no overlap can beat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["h100", "a100", "h800"])
@pytest.mark.parametrize(("ep", "experts", "tokens"), [(2, 8, 512), (8, 8, 2048), (16, 64, 4096), (64, 256, 1024)])
def test_never_faster_than_computing_or_messages_alone(hardware: str, ep: int, experts: int, tokens: int) -> None:
    machine = load_hardware(hardware)
    layer = replace(LAYER, ep=ep, experts=experts, tokens=tokens, rows=2 * tokens, ranks_per_host=8)
    times = {way: passes(machine, layer, way) for way in ("tiles", "fine", "auto")}
    for both in times.values():
        for one in both:
            assert one.seconds >= max(one.compute_s, one.communication_s) * (1 - 1e-9)
    bound = layer_passes(layer, lambda d: pieces(machine, layer, d), None, bound=True)
    assert all(least.seconds <= one.seconds for least, one in zip(bound, times["auto"], strict=True))
    assert times["auto"][0].seconds <= times["tiles"][0].seconds
    assert times["tiles"][0].schedule == SERIAL and times["fine"][0].schedule == FINE


def test_slower_links_never_help() -> None:
    for way in ("tiles", "fine", "auto"):
        seconds = []
        for factor in (0.01, 0.1, 0.5, 1.0, 3.0, 100.0):
            knots = tuple((x, y * factor) for x, y in H100.inside_bytes_per_s)
            machine = replace(H100, inside_bytes_per_s=knots, between_bytes_per_s=H100.between_bytes_per_s * factor)
            seconds.append(passes(machine, replace(LAYER, ranks_per_host=4), way)[0].seconds)
        # auto: another schedule must save 3 %
        assert all(b <= a * (1.03 if way == "auto" else 1 + 1e-9) for a, b in pairwise(seconds))


def test_put_off_weight_gradients_hide_nothing() -> None:
    together = layer_passes(LAYER, lambda d: pieces(H100, LAYER, d), FINE)
    apart = layer_passes(LAYER, lambda d: pieces(H100, LAYER, d), FINE, puts_off=True)
    assert apart[0] == together[0] and apart[1].weights_s == together[1].weights_s > 0
    assert apart[1].seconds >= together[1].seconds and apart[1].compute_s == pytest.approx(together[1].compute_s)


# ---- in a layer, a step, a search -------------------------------------------------------------------------------------------------

MIXTRAL = Job(spec=PRESETS["mixtral-8x22b"], seq_len=4096, global_batch=64)


def layer_of(job: Job, mapping: Mapping, cluster: str) -> Ledger:
    hardware = parse_cluster(cluster).hardware
    return Blocks(job, mapping, Oracle(hardware), Network(hardware)).experts()


@pytest.mark.parametrize("routing", ["balanced", "learned"])
@pytest.mark.parametrize("model", ["mixtral-8x22b", "deepseek-v3"])
def test_a_layer_is_the_clock_and_what_stands_around_it(model: str, routing: str) -> None:
    job = replace(MIXTRAL, spec=PRESETS[model])
    mapping = Mapping(
        folding=make_folding(world=8, ep=8),
        overlap=Overlap(ep="fine"),
        routing=RouterModel(kind=routing),  # type: ignore[arg-type]
    )
    bare = replace(mapping, overlap=Overlap())
    ledger, plain = layer_of(job, mapping, "h100x8"), layer_of(job, bare, "h100x8")
    assert ledger.hidden > 0 == plain.hidden
    assert ledger.forward["a2a_inside"] < plain.forward["a2a_inside"]
    assert (ledger.forward["imbalance"] > 0) == (routing == "learned")
    assert ledger.forward["experts"] > plain.forward["experts"]  # every tile reads its expert's weights
    assert ledger.forward.keys() == plain.forward.keys()


def test_layers_that_send_nothing_are_not_cut() -> None:
    mapping = Mapping(folding=make_folding(world=8))
    for way in ("none", "fine"):
        one = replace(mapping, overlap=Overlap(ep=way))  # type: ignore[arg-type]
        assert layer_of(MIXTRAL, one, "h100x8").forward == layer_of(MIXTRAL, mapping, "h100x8").forward


def test_tiles_are_searched_with_bounds_that_hold() -> None:
    cluster, space = parse_cluster("h800x16"), Space(ep_overlaps=("none", "tiles"), micro_batches=(1,))
    job = replace(MIXTRAL, spec=replace(MIXTRAL.spec, num_layers=8), global_batch=16)
    quick = QuickPredictor(job, cluster)
    seen = 0
    for ep, etp in ((2, 1), (8, 1), (8, 2), (4, 4)):
        folding = make_folding(world=16, ep=ep, etp=etp)
        for overlap in overlaps(Overlap(), folding, space, cluster.hardware):
            mapping = Mapping(folding=folding, overlap=overlap)
            assert mapping.num_microbatches(job) * quick.work(mapping) <= quick.seconds(mapping)
            assert quick.seconds(mapping) == pytest.approx(step_without_clock(job, mapping, cluster).seconds)
            seen += overlap.ep == "auto"
            assert quick.can_pay(mapping) or quick.seconds(mapping) >= quick.seconds(
                replace(mapping, overlap=Overlap())
            )
    assert seen == 4


def test_more_than_128_ranks_on_devices_are_not_asked() -> None:
    wide = make_folding(world=256, ep=256)
    asked = Space(ep_overlaps=("none", "tiles"))
    assert "auto" not in {o.ep for o in overlaps(Overlap(), wide, asked, H100)}
    assert "auto" in {o.ep for o in overlaps(Overlap(), make_folding(world=128, ep=128), asked, H100)}


@pytest.mark.parametrize("way", ["tiles", "tiles:parts=4,order=arrival,own_before=0.5,blocks=2", "fine", "auto"])
def test_recipes_of_tiles_come_back(way: str) -> None:
    from phalanx.simulate.from_recipe import mapping_of_recipe, resolve_recipe

    job = replace(MIXTRAL, spec=PRESETS["mixtral-8x7b"])
    mapping = Mapping(
        folding=make_folding(world=16, pp=2, ep=8),
        overlap=Overlap(ep=way.partition(":")[0], tiles=way.partition(":")[2]),  # type: ignore[arg-type]
        routing=RouterModel(kind="learned"),
    )
    recipe, reasons = recipe_of_mapping(job, mapping)
    assert recipe is not None and recipe.dispatch.overlap == way, reasons
    assert mapping_of_recipe(recipe, resolve_recipe(recipe), world=16) == mapping


# ---- published --------------------------------------------------------------------------------------------------------------------


def test_hidden_communication_is_near_comets() -> None:
    """arXiv 2502.19811, section 5 and figure 11: E 8, top-2, M 16384 tokens on 8 H800, experts 4096 x 14336; COMET hides 86.5 % of communication.

    Theirs is one fused kernel, ours an operation for each part: within 15 points, and chunks (Tutel's: 68.6 %) are behind. Nothing was fitted to these figures.
    """
    spec = ModelSpec(name="comet", num_layers=1, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, vocab=32000, num_experts=8, top_k=2, expert_ffn=14336, ffn_matrices=2)  # fmt: skip
    job = Job(spec=spec, seq_len=2048, global_batch=8)
    hardware = load_hardware("h800")

    def hidden(overlap: Overlap) -> float:
        mapping = Mapping(folding=make_folding(world=8, ep=8), overlap=overlap)
        if overlap.ep == "auto":
            tiled = TiledExperts(job, mapping, Oracle(hardware), Network(hardware))
            forward = tiled.passes(tiled.layer(1.0), (0.0, 0.0))[0]
            return 1 - forward.exposed_s / forward.communication_s
        bare = layer_of(job, replace(mapping, overlap=Overlap()), "h800x8").forward["a2a_inside"]
        return 1 - layer_of(job, mapping, "h800x8").forward["a2a_inside"] / bare

    chunks = max(hidden(Overlap(ep="chunks", chunks=n)) for n in (2, 4, 8))
    assert hidden(Overlap(ep="auto")) == pytest.approx(0.865, abs=0.15)
    assert 0.292 < chunks < hidden(Overlap(ep="auto"))


@pytest.mark.parametrize(("left_free", "rate"), [(10, 0.5), (20, 1.0), (66, 1.0)])
def test_multiprocessors_left_to_messages(left_free: int, rate: float) -> None:
    """Products have the others all along, nothing slows them further, and few multiprocessors carry rows more slowly."""
    mapping = Mapping(folding=make_folding(world=8, ep=8), overlap=Overlap(ep="fine"))
    network, oracle = Network(H100), Oracle(H100)
    usual, left = (
        TiledExperts(MIXTRAL, replace(mapping, overlap=replace(mapping.overlap, left_free=n)), oracle, network)
        for n in (None, left_free)
    )
    for direction in ("forward", "backward"):
        plain, divided = (one.pieces(one.layer(1.0), (1.0, 1.0), direction) for one in (usual, left))  # type: ignore[arg-type]
        slower = 132 / (132 - left_free)
        for (_, _, before), (_, _, after) in zip(plain.tiles, divided.tiles, strict=True):
            assert after == pytest.approx(slower * before)
        assert divided.shared_s == pytest.approx(slower) and divided.row_s == plain.row_s
        assert divided.link.interference == 0 < plain.link.interference
        assert divided.link.bytes_per_s == pytest.approx(rate * plain.link.bytes_per_s)
        assert divided.link.latency_s == plain.link.latency_s


def test_recipes_that_leave_multiprocessors_come_back() -> None:
    job, folding = replace(MIXTRAL, global_batch=64), make_folding(world=8, ep=8)
    mapping = Mapping(folding=folding, overlap=Overlap(ep="fine", left_free=16), routing=RouterModel(kind="learned"))
    recipe, reasons = recipe_of_mapping(job, mapping, cluster=parse_cluster("h100x8"))
    assert recipe is not None and recipe.dispatch.left_free == 16, reasons
    all_of_it = replace(recipe, dispatch=replace(recipe.dispatch, left_free=132))
    with pytest.raises(ConfigError, match="leaves nothing to products"):
        mapping_of_recipe(all_of_it, resolve_recipe(recipe), world=8, cluster=parse_cluster("h100x8"))


def test_a_search_in_fp8_tries_no_tiles() -> None:
    """As where they are asked for by name: a default space would price their products at rates that no run of them has."""
    cluster, space = parse_cluster("h100x16"), Space(micro_batches=(1,), schedules=("1f1b",), recomputes=("none",))
    job = replace(MIXTRAL, spec=replace(MIXTRAL.spec, num_layers=4), global_batch=16)
    tried = {}
    for precision in ("bf16", "fp8"):
        found = search(job, cluster, precision=precision, space=space, keep=60)  # type: ignore[arg-type]
        tried[precision] = {p.uniform.overlap.ep for p in found.variants}
    assert tried == {"bf16": {"none", "chunks", "auto"}, "fp8": {"none", "chunks"}}


def test_tiles_in_fp8_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "olmoe-1b-7b", "--cluster", "h100x8", "--precision", "fp8", "--ep-overlap", "none", "tiles"]
    assert main(["search", *words]) == 2
    assert "computes in bf16" in capsys.readouterr().err


def test_bad_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        OverlapCost(latency_s=0.0, bytes_per_s=0.0, flops_by_rows=((1, 1.0),))
