"""The stream executor of an overlapped MoE layer, and the fused layer: checks and times with one NCCL rank on each device of a machine (`phalanx gpu-check` C4: checks of two ranks on one).

    torchrun --standalone --nproc-per-node 8 benchmarks/gpu/streams.py --json streams.json
    python benchmarks/gpu/streams.py --cpu          # no GPU: the script itself, one rank, tiny; no figure is a time of anything
    python benchmarks/gpu/streams.py --dry-run      # what would be measured

NOT YET RUN ON A GPU. Only --cpu and --dry-run have been.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab")]

SECTIONS = {
    "check": "bits of output and gradients over random schedules; against the serial layer; passes with changing routing",
    "fused": "the fused layer against the serial one, with changing routing",
    "calibration": "the cost model's fit on these ranks, with no multiprocessor left free; its median error",
    "schedules": "forward and backward: serial layer, and by tiles in several schedules",
    "left_free": "thread blocks of NCCL and multiprocessors left to them: every number, and the one the clock chooses",
}
BARS = {"left_free.chosen_over_best": 1.02, "schedules.best_over_serial_layer": 1.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the first rank writes the result, too")
    parser.add_argument("--cpu", action="store_true", help="no GPU: a tiny layer on the host's executor")
    parser.add_argument("--dry-run", action="store_true", help="list the sections and the bars")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--experts-per-rank", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--schedules", type=int, default=20, help="random ones that are checked")
    parser.add_argument("--passes", type=int, default=200, help="with changing routing")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    return parser.parse_args()


ARGS = parse()
if ARGS.dry_run:
    print(json.dumps({"sections": SECTIONS, "bars": BARS, "ran": "nothing"}, indent=1))
    sys.exit(0)
if ARGS.cpu:
    ARGS.tokens, ARGS.hidden, ARGS.ffn, ARGS.repeat, ARGS.schedules, ARGS.passes = 24, 32, 16, 1, 4, 2

import torch  # noqa: E402

from phalanx.core.errors import RunError  # noqa: E402
from phalanx.kernels.cpu.lanes import SERIAL  # noqa: E402
from phalanx.plan.mapping.folding import make_folding  # noqa: E402
from phalanx.plan.mapping.placement import plain_placement  # noqa: E402
from phalanx.plan.moe.dispatch import DispatchPlan, DispatchSpec  # noqa: E402
from phalanx.plan.moe.overlap.prediction.bytes import WireBytes  # noqa: E402
from phalanx.plan.moe.overlap.prediction.cost import LayerShape  # noqa: E402
from phalanx.plan.moe.overlap.settings import FINE  # noqa: E402
from phalanx.plan.moe.overlap.tiles.plan import backward_of, plan_overlap  # noqa: E402
from phalanx.plan.moe.overlap.tiles.types import TileSchedule  # noqa: E402
from phalanx.runtime.comm.collectives import Collectives, Message  # noqa: E402
from phalanx.runtime.comm.groups import GroupCache, build_groups  # noqa: E402
from phalanx.runtime.moe.dispatch import Dispatcher  # noqa: E402
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts  # noqa: E402
from phalanx.runtime.moe.fused import FusedMemory, run_fused  # noqa: E402
from phalanx.runtime.moe.overlap import TILE_ROWS, run_overlapped  # noqa: E402
from phalanx.runtime.moe.overlap_tuner import Tuner  # noqa: E402
from phalanx.runtime.moe.streams import message_streams_of  # noqa: E402
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world, read_world  # noqa: E402
from phalanx_lab.bench.layer.device_division import DeviceShare, choose_left_free  # noqa: E402

TOP_K = 2
LIMIT = 1e-4 if ARGS.cpu else 3e-2
LEFT_FREE = (4, 8, 16, 24, 32)
SCHEDULES = {
    "tiles": TileSchedule(),
    "own first": TileSchedule(order="own_first"),
    "fine": FINE,
    "8 parts": TileSchedule(parts=8, order="arrival", own_before=0.5),
    "2 blocks": TileSchedule(parts=4, blocks=2, order="arrival", own_before=0.75),
}


class Layer:
    """One layer of one rank, and what runs it; `message_ctas`: most thread blocks of its messages."""

    def __init__(self, world: WorldInfo, device: torch.device, cache: GroupCache, message_ctas: int = 0) -> None:
        folding = make_folding(world=world.world, ep=world.world)
        self.device, self.num_experts = device, world.world * ARGS.experts_per_rank
        groups = build_groups(folding, rank=world.rank, cache=cache, message_ctas=message_ctas)
        self.axis, self.comms = groups.axis("ep_etp"), Collectives()
        self.dispatcher = Dispatcher(
            DispatchSpec(),
            placement=plain_placement(self.num_experts, folding),
            groups=groups,
            comms=self.comms,
            top_k=min(TOP_K, self.num_experts),
        )
        self.memory = FusedMemory()
        self.generator = torch.Generator(device).manual_seed(world.rank)
        dtype = torch.float32 if ARGS.cpu else torch.bfloat16
        self.w13 = self.random(ARGS.experts_per_rank, 2, ARGS.ffn, ARGS.hidden, dtype=dtype, scale=0.02)
        self.w2 = self.random(ARGS.experts_per_rank, ARGS.hidden, ARGS.ffn, dtype=dtype, scale=0.02)
        self.x, self.dy = (self.random(ARGS.tokens, ARGS.hidden, dtype=dtype) for _ in range(2))
        self.route()

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        found = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return found.to(dtype).requires_grad_()

    def route(self) -> None:
        """Other experts for every token."""
        scores = torch.rand(ARGS.tokens, self.num_experts, generator=self.generator, device=self.device)
        self.weights, self.experts = scores.topk(self.dispatcher.top_k)
        self.weights.requires_grad_()

    def step(self, schedule: Any, *, backward: bool = True) -> list[torch.Tensor]:
        """Output and gradients; `schedule` None: the serial layer, "fused": the fused one."""
        leaves = [self.x, self.weights, self.w13, self.w2]
        for leaf in leaves:
            leaf.grad = None
        weights = ExpertWeights(self.w13, self.w2)
        call = MoeCall(x_TH=self.x, weights_TK=self.weights, experts_TK=self.experts, experts=weights)
        if schedule is None:
            y, _ = run_experts(call, dispatcher=self.dispatcher, lanes=SERIAL)
        elif schedule == "fused":
            y, _ = run_fused(call, dispatcher=self.dispatcher, memory=self.memory)
        else:
            y, _ = run_overlapped(call, dispatcher=self.dispatcher, schedule=schedule, lanes=SERIAL)
        if backward:
            y.backward(self.dy.detach())
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def seconds(self, run: Callable[[], Any], *, repeat: int | None = None) -> float:
        """Median over the repeats of the slowest rank; all begin together."""
        times = []
        for number in range((repeat or ARGS.repeat) + 2):
            self.finish()
            self.comms.barrier(self.axis)
            begin_s = time.perf_counter()
            run()
            self.finish()
            if number > 1:
                times.append(time.perf_counter() - begin_s)
        told = self.comms.gather_objects(times, self.axis)
        return statistics.median(map(max, zip(*told, strict=True)))

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def planned(self) -> tuple[DispatchPlan, WireBytes]:
        """Of the routing at hand."""
        seen: list[tuple[DispatchPlan, WireBytes]] = []

        def choose(plan: DispatchPlan, wire: WireBytes) -> TileSchedule:
            seen.append((plan, wire))
            return FINE

        self.step(choose, backward=False)
        return seen[0]


def check(layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
    """Raises where bits depend on the schedule, or results are not those of the serial layer: nothing after it would mean anything."""
    want, plain = layer.step(TileSchedule()), layer.step(None)
    for seed in range(ARGS.schedules):
        got = layer.step(TileSchedule(parts=1 + seed % 6, blocks=1 + seed % 2, seed=seed))
        if not all(torch.equal(a, b) for a, b in zip(want, got, strict=True)):
            raise SystemExit(f"rank {layer.axis.index}: schedule {seed} gives other bits")
    error = differs(layer, want, plain)
    for _ in range(ARGS.passes):
        layer.route()
        layer.step(FINE)
    layer.finish()
    return {"largest_error": max(layer.comms.gather_objects(error, layer.axis)), "limit": LIMIT}


def differs(layer: Layer, got: list[torch.Tensor], serial: list[torch.Tensor]) -> float:
    """Largest difference, relative to the largest element. Raises where it is beyond the limit, or not a number."""
    errors = [((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(got, serial, strict=True)]
    if not all(error <= LIMIT for error in errors):
        raise SystemExit(f"rank {layer.axis.index}: errors {errors} against the serial layer")
    return max(errors)


def fused(layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
    """Symmetric memory that cannot be had leaves it out."""
    if layer.device.type != "cuda" or layer.axis.size == 1:
        return {"left_out": "needs several ranks on GPUs"}
    try:
        layer.memory.of(layer.dispatcher.ep, layer.x, capacity=ARGS.tokens, slots=ARGS.experts_per_rank)
    except (RuntimeError, RunError) as err:
        return {"left_out": f"no symmetric memory: {str(err).splitlines()[0]}"}
    largest, seconds = 0.0, []
    for _ in range(ARGS.passes):
        layer.route()
        want = layer.step(None)
        layer.finish()
        begin_s = time.perf_counter()
        got = layer.step("fused")
        layer.finish()
        seconds.append(time.perf_counter() - begin_s)
        largest = max(largest, differs(layer, got, want))
    largest = max(layer.comms.gather_objects(largest, layer.axis))
    return {"largest_error": largest, "limit": LIMIT, "passes": ARGS.passes, "median_s": statistics.median(seconds)}


def shape_of(layer: Layer) -> LayerShape:
    size = layer.x.element_size()
    return LayerShape(
        tokens=ARGS.tokens, hidden=ARGS.hidden, ffn=ARGS.ffn, element_bytes=size, slots=ARGS.experts_per_rank
    )


def calibration(layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
    if layer.axis.size == 1:
        return {"left_out": "one rank sends nothing"}
    experts = ExpertWeights(layer.w13, layer.w2)
    found = Tuner().of(layer.dispatcher, layer.x, experts, SERIAL)
    state["cost"] = found.cost
    return {"cost": asdict(found.cost), "median_error": found.median_error}


def schedules(layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
    serial_s = layer.seconds(lambda: layer.step(None))
    by_name = {name: layer.seconds(lambda s=s: layer.step(s)) for name, s in SCHEDULES.items()}  # type: ignore[misc]
    best = min(by_name, key=lambda name: by_name[name])
    return {
        "serial_layer_s": serial_s,
        "seconds": by_name,
        "best": best,
        "best_over_serial_layer": by_name[best] / serial_s,
    }


def block_bytes_per_s(layer: Layer, ctas: int) -> float:
    """What one thread block of an exchange between all ranks moves in a second."""
    others = [peer for peer in range(layer.axis.size) if peer != layer.axis.index]
    size = 1 << 24
    sends = [Message(torch.zeros(size, dtype=torch.uint8, device=layer.device), peer) for peer in others]
    receives = [Message(torch.empty(size, dtype=torch.uint8, device=layer.device), peer) for peer in others]
    return (
        size
        * len(others)
        / layer.seconds(lambda: layer.comms.start_exchange(sends, receives, layer.axis).wait())
        / ctas
    )


def layers_by_ctas(world: WorldInfo, device: torch.device, cache: GroupCache) -> Iterator[tuple[int, Layer]]:
    for ctas in LEFT_FREE:
        yield ctas, Layer(world, device, cache, message_ctas=ctas)


def left_free(layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
    """0 is NCCL as it likes, and products as they like."""
    if layer.device.type != "cuda" or layer.axis.size == 1:
        return {"left_out": "needs several devices"}
    seconds, rates = {0: layer.seconds(lambda: layer.step(FINE))}, {}
    for ctas, one in layers_by_ctas(*state["make"]):
        streams = message_streams_of(one.comms, one.device)
        assert streams is not None
        streams.left_free = ctas
        seconds[ctas] = one.seconds(lambda one=one: one.step(FINE))  # type: ignore[misc]
        rates[ctas] = block_bytes_per_s(one, ctas)
    dispatch, wire = layer.planned()
    plan = plan_overlap(dispatch, FINE, rank=layer.axis.index, tile_rows=TILE_ROWS)
    device = DeviceShare(
        multiprocessors=torch.cuda.get_device_properties(layer.device).multi_processor_count,
        block_bytes_per_s=rates[LEFT_FREE[0]],
        candidates=LEFT_FREE,
    )
    mine, predicted = choose_left_free([plan, backward_of(plan)], shape_of(layer), state["cost"], wire, device)
    chosen = layer.comms.gather_objects(mine, layer.axis)[0]
    return {
        "seconds": seconds, "block_bytes_per_s": rates, "predicted_s": predicted, "chosen": chosen,
        "chosen_over_best": seconds[chosen] / min(seconds.values()),
    }  # fmt: skip


RUN = {"check": check, "fused": fused, "calibration": calibration, "schedules": schedules, "left_free": left_free}


def main() -> None:
    world = read_world() or WorldInfo()
    if not ARGS.cpu and world.world < 2:
        raise SystemExit(
            "needs torchrun with one rank on each of at least two CUDA devices; --cpu runs the script without"
        )
    device = init_world(world, device="cpu" if ARGS.cpu else "cuda")
    state: dict[str, Any] = {"make": (world, device, GroupCache())}
    layer = Layer(*state["make"])
    if device.type == "cuda":  # products that can be asked to leave multiprocessors free
        torch.backends.cuda.preferred_blas_library("cublaslt")
    ran_on = "CPU: no figure is a time of anything" if ARGS.cpu else torch.cuda.get_device_name(device)
    shape = {name: getattr(ARGS, name) for name in ("tokens", "hidden", "ffn", "experts_per_rank")}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "ran_on": ran_on,
        "ranks": world.world,
        "shape": shape,
        "bars": BARS,
    }
    for name in ARGS.only:
        result[name] = RUN[name](layer, state)
    if world.rank == 0:
        text = json.dumps(result, indent=1)
        if ARGS.json is not None:
            ARGS.json.write_text(text + "\n")
        print(text)
    close_world()


if __name__ == "__main__":
    main()
