"""Kernels that overlap the communication and the products of a MoE layer: checks and times on one GPU, in one call of under eight minutes.

    python benchmarks/gpu/overlap.py --json overlap.json        # one H100 or H200; needs torch with CUDA, and Triton
    python benchmarks/gpu/overlap.py --interpret                # no GPU: the checks alone, tiny, under Triton's interpreter
    python benchmarks/gpu/overlap.py --dry-run                  # what would be measured

Run on an H200 once: results/h200-2026-11-26-overlap.json.

Eight ranks live in one process on one device. Seven of them only send: copies on a side stream stand in for links, slowed by idle kernels to a
share of the product's time. So communication does not compete for a link, but copies and products do compete for memory. All times are device
events, medians, after warming up, on random data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab")]

SECTIONS = {
    "check": "whole layers on virtual ranks against one rank, fp32 and bf16; the same bits at every division",
    "dense": "measured rate of a dense bf16 product, 8192 cubed",
    "first": "first product: F.grouped_mm, ours without waiting, ours with all flags up; by tile",
    "hide": "first product while copies bring the rows, at 30, 60 and 100 % of its time; by programs left free",
    "divide": "second product and its sending: every division, and the one the model chooses",
    "graph": "the layer captured in a CUDA graph, replayed with other routing",
    "launches": "10,000 launches that each wait for copies",
}
BARS = {
    "first.over_grouped_mm": 0.95, "first.over_dense": 0.70, "first.over_no_wait": 0.97, "hide.60.speedup_vs_serial": 1.5,
    "hide.hidden": 0.865, "divide.chosen_over_best": 1.02,
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes, beside standard output")
    parser.add_argument("--interpret", action="store_true", help="no GPU: checks under Triton's interpreter")
    parser.add_argument("--dry-run", action="store_true", help="list the sections and the bars")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=450.0, help="sections that would begin later are left out")
    return parser.parse_args()


ARGS = parse()
if ARGS.dry_run:
    print(json.dumps({"sections": SECTIONS, "bars": BARS, "ran": "nothing"}, indent=1))
    sys.exit(0)
os.environ["TRITON_INTERPRET"] = "1" if ARGS.interpret else "0"  # before Triton is imported
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # a kernel loaded late could wait behind one that waits for it

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from phalanx.kernels.triton.first_product import Arrivals, fused_first  # noqa: E402
from phalanx.kernels.triton.index import Arranged  # noqa: E402
from phalanx.kernels.triton.layer import (  # noqa: E402
    ArrivalCounts,
    LaunchShape,
    begin,
    reference_layer,
)
from phalanx.kernels.triton.second_product import Division, fused_second  # noqa: E402
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory  # noqa: E402
from phalanx.kernels.triton.tiles import SendShape, TileShape, check_status  # noqa: E402
from phalanx.plan.moe.overlap.fused.device import SecondCost, predicted_s  # noqa: E402
from phalanx_lab.bench.layer.device_division import division  # noqa: E402
from phalanx_lab.bench.layer.virtual import VirtualLayer, enqueue_virtual, run_virtual, virtual_arenas  # noqa: E402

DEVICE = torch.device("cpu" if ARGS.interpret else "cuda")
RANKS, TOP_K, PARTS, BLOCKS = 8, 2, 2, 8
TILES = {
    "128x256x64, 3 stages": TileShape(),
    "128x256x64, 4 stages": TileShape(stages=4),
    "128x128x64, 4 stages": TileShape(columns=128, stages=4),
    "128x256x64, problems of 1024 rows": TileShape(row_tiles=8),
}
SENDS = {f"{entries} entries x {columns}": SendShape(entries=entries, columns=columns)
         for entries, columns in ((8, 256), (8, 512), (16, 256), (16, 512))}  # fmt: skip
"""What a program sends at a time: how many bytes it has on their way."""
FREE = (4, 8, 16, 32)
"""Multiprocessors that the first product leaves to copies and idle kernels."""


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) / 4).to(dtype)


def distinct_slots(*shape: int, top_k: int, slots: int) -> torch.Tensor:
    """(..., K) int32, ascending: `top_k` different slots, each choice equally likely."""
    picked = torch.rand(*shape, slots, device=DEVICE).topk(top_k, dim=-1).indices
    return picked.sort(-1).values.to(torch.int32)


# ---- times ---------------------------------------------------------------------------------------------------------------


def median_s(run: Callable[[], Any], *, repeat: int = 10, warm: int = 3) -> float:
    """Median seconds of `run` on the device."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeat):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        times.append(begin_event.elapsed_time(end_event) / 1e3)
    return statistics.median(times)


def sleep_cycles_per_s() -> float:
    """Of the idle kernel that slows copies."""
    cycles = 2_000_000
    return cycles / median_s(lambda: torch.cuda._sleep(cycles))


# ---- one rank of eight ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class OneRank:
    """Rank 0 with `rows` rows in `experts` slots, an equal share from each of eight sources."""

    arena: SymmetricMemory
    senders: list[SymmetricMemory]
    packed: torch.Tensor
    told: ArrivalCounts
    w13: torch.Tensor
    w2: torch.Tensor

    @staticmethod
    def make(rows: int) -> OneRank:
        capacity = rows // RANKS // TOP_K
        spec = ArenaSpec(
            ranks=RANKS, capacity=capacity, columns=ARGS.hidden, dtype=torch.bfloat16, parts=PARTS, blocks=BLOCKS
        )
        arenas = virtual_arenas(spec, DEVICE)
        slots = distinct_slots(RANKS, capacity, top_k=TOP_K, slots=ARGS.experts)
        slots = torch.stack(
            [s[s[:, 0].sort(stable=True).indices] for s in slots]
        )  # entries by smallest slot, as senders have them
        told = ArrivalCounts(
            slots,
            torch.rand(slots.shape, device=DEVICE),
            torch.full((RANKS,), capacity, dtype=torch.int32, device=DEVICE),
        )
        packed = normal(RANKS, capacity, ARGS.hidden)
        return OneRank(
            arenas[0], arenas, packed, told,
            normal(ARGS.experts, 2 * ARGS.ffn, ARGS.hidden), normal(ARGS.experts, ARGS.hidden, ARGS.ffn),
        )  # fmt: skip

    def order(self, tile: TileShape) -> Arranged:
        shape = LaunchShape(slots_per_rank=ARGS.experts, first=tile, second=tile)
        return begin(self.told, self.arena, shape=shape)

    def next_call(self) -> None:
        for arena in self.senders:
            arena.next_call()

    def copies(self, delay_cycles: int) -> None:
        """All entries come, part after part, own first; on the current stream."""
        for stage in range(RANKS):
            for part in range(PARTS):
                if stage and delay_cycles:
                    torch.cuda._sleep(delay_cycles)
                self.senders[stage].copy_part(self.packed[stage : stage + 1], stage, part)  # to rank 0

    def first(self, order: Arranged, tile: TileShape, out: torch.Tensor, *, programs: int, wait: bool) -> None:
        arrivals = Arrivals(self.arena.arrived_F, self.arena.epoch_1, self.arena.status_2)
        fused_first(
            self.arena.received_PCH.flatten(0, 1), self.w13, order, arrivals,
            programs=programs, tile=tile, out_MN=out, wait=wait,
        )  # fmt: skip


# ---- sections --------------------------------------------------------------------------------------------------------------


def small_layer(
    dtype: torch.dtype, tokens: int, hidden: int, ffn: int, *, ranks: int = 2
) -> tuple[VirtualLayer, ArenaSpec]:
    experts = 2 * ranks
    w13, w2 = normal(experts, 2, ffn, hidden, dtype=dtype), normal(experts, hidden, ffn, dtype=dtype)
    layer = VirtualLayer(
        [normal(tokens, hidden, dtype=dtype) for _ in range(ranks)],
        [distinct_slots(tokens, top_k=TOP_K, slots=experts) for _ in range(ranks)],
        [torch.rand(tokens, TOP_K, device=DEVICE) for _ in range(ranks)],
        w13.split(2),
        w2.split(2),
    )
    spec = ArenaSpec(ranks=ranks, capacity=tokens, columns=hidden, dtype=dtype, parts=2, blocks=2)
    return layer, spec


def small_shape(dtype: torch.dtype, senders: int = 1) -> LaunchShape:
    if ARGS.interpret:
        tile, send = TileShape(rows=16, columns=32, depth=32, row_tiles=2), SendShape(chunk=32, entries=32, columns=32)
        how = Division(programs=2, senders=senders)
        return LaunchShape(
            slots_per_rank=2,
            first=tile,
            second=tile,
            send=send,
            division=how,
            first_programs=1,
            send_programs=1,
            patience=9,
        )
    tile = TileShape(rows=64, columns=64, depth=32, warps=4) if dtype == torch.float32 else TileShape()
    return LaunchShape(slots_per_rank=2, first=tile, second=tile, division=Division(programs=132, senders=senders))


def check(state: dict[str, Any]) -> dict[str, Any]:
    """Raises if a layer is wrong: nothing after it would mean anything."""
    sizes = (13, 40, 24) if ARGS.interpret else (1111, 512, 704)
    result: dict[str, Any] = {}
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        layer, spec = small_layer(dtype, *sizes)
        first = None
        for senders in (1,) if ARGS.interpret else (0, 1, 16):
            out = run_virtual(layer, virtual_arenas(spec, DEVICE), shape=small_shape(dtype, senders))
            first = out if first is None else first
            if not all(torch.equal(a, b) for a, b in zip(first, out, strict=True)):
                raise SystemExit(f"{dtype}: {senders} senders give other bits than the first division")
        worst = max(
            ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
            for got, want in zip(first or [], wanted(layer), strict=True)
        )
        if not worst <= limit:
            raise SystemExit(f"{dtype}: largest error {worst} is over {limit}")
        result[str(dtype).removeprefix("torch.")] = {"largest_error": worst, "limit": limit}
    return result


def wanted(layer: VirtualLayer) -> list[torch.Tensor]:
    w13, w2 = torch.cat(list(layer.w13)), torch.cat(list(layer.w2))
    return [reference_layer(x, s, w, w13, w2) for x, s, w in zip(layer.x, layer.slots, layer.weights, strict=True)]


def dense(state: dict[str, Any]) -> dict[str, Any]:
    a, b = normal(8192, 8192), normal(8192, 8192)
    state["dense_per_s"] = 2 * 8192**3 / median_s(lambda: a @ b)
    return {"tflop_per_s": state["dense_per_s"] / 1e12}


def first(state: dict[str, Any]) -> dict[str, Any]:
    rank = state["rank"]
    flop = 2 * ARGS.rows * ARGS.hidden * 2 * ARGS.ffn
    rank.next_call()
    rank.copies(0)
    by_tile = {name: tile_times(rank, tile, state["num_sms"]) for name, tile in TILES.items()}
    best = min(by_tile, key=lambda name: by_tile[name]["flags_up_s"])
    ours = by_tile[best]
    state["tile"] = TILES[best]
    grouped_s, difference = grouped_mm(rank, rank.order(state["tile"]), state)
    return {
        "by_tile": by_tile, "best": best, "tflop_per_s": flop / ours["flags_up_s"] / 1e12,
        "grouped_mm_s": grouped_s, "largest_difference_from_grouped_mm": difference,
        "over_grouped_mm": grouped_s / ours["flags_up_s"],
        "over_dense": flop / ours["flags_up_s"] / state["dense_per_s"],
        "over_no_wait": ours["no_wait_s"] / ours["flags_up_s"],
    }  # fmt: skip


def tile_times(rank: OneRank, tile: TileShape, programs: int) -> dict[str, float]:
    order = rank.order(tile)
    out = rank.packed.new_empty(order.entry_of_row_M.shape[0], 2 * ARGS.ffn)
    return {
        "no_wait_s": median_s(lambda: rank.first(order, tile, out, programs=programs, wait=False)),
        "flags_up_s": median_s(lambda: rank.first(order, tile, out, programs=programs, wait=True)),
    }


def grouped_mm(rank: OneRank, order: Arranged, state: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the library's product on rows already in order (it need not pick them), and how far ours is from it."""
    rows = rank.arena.received_PCH.flatten(0, 1)[order.entry_of_row_M.long()][: ARGS.rows]
    counts = torch.bincount(rank.told.slots_PCK.flatten().long(), minlength=ARGS.experts)
    offsets = counts.cumsum(0).to(torch.int32)
    weights = rank.w13.transpose(1, 2)
    seconds = median_s(lambda: F.grouped_mm(rows, weights, offs=offsets))
    want = F.grouped_mm(rows, weights, offs=offsets)
    out = torch.full((order.entry_of_row_M.shape[0], 2 * ARGS.ffn), torch.nan, dtype=rows.dtype, device=DEVICE)
    rank.first(order, state["tile"], out, programs=state["num_sms"], wait=True)
    difference = ((out[: ARGS.rows].float() - want.float()).abs().max() / want.float().abs().max()).item()
    if not difference <= 2e-2:
        raise SystemExit(f"the first product differs from F.grouped_mm by {difference}")
    return seconds, difference


def hide(state: dict[str, Any]) -> dict[str, Any]:
    """Serial is all copies, then the product on all multiprocessors."""
    rank, tile, num_sms = state["rank"], state["tile"], state["num_sms"]
    order = rank.order(tile)
    out = rank.packed.new_empty(order.entry_of_row_M.shape[0], 2 * ARGS.ffn)
    side = torch.cuda.Stream()
    cycles_per_s = sleep_cycles_per_s()

    def product(*, programs: int = num_sms, wait: bool = True) -> None:
        rank.first(order, tile, out, programs=programs, wait=wait)

    def copies(delay: int) -> None:
        rank.next_call()
        rank.copies(delay)

    def serial(delay: int) -> None:
        copies(delay)
        product()

    def overlapped(delay: int, free: int) -> None:
        rank.next_call()
        side.wait_stream(torch.cuda.current_stream())  # the last product has read what the copies write over
        with torch.cuda.stream(side):
            rank.copies(delay)
        product(programs=num_sms - free)
        torch.cuda.current_stream().wait_stream(side)

    compute_s, bare_s = median_s(partial(product, wait=False)), median_s(partial(copies, 0))
    result: dict[str, Any] = {"compute_s": compute_s, "bare_copies_s": bare_s}
    for share in (30, 60, 100):
        delay = int(max(0.0, compute_s * share / 100 - bare_s) / ((RANKS - 1) * PARTS) * cycles_per_s)
        comm_s, serial_s = median_s(partial(copies, delay)), median_s(partial(serial, delay))
        by_free = {free: median_s(partial(overlapped, delay, free)) for free in FREE}
        best = min(by_free, key=lambda free: by_free[free])
        check_status(rank.arena.status_2)
        result[str(share)] = {
            "comm_s": comm_s, "comm_share_of_compute": comm_s / compute_s, "serial_s": serial_s, "overlapped_s": by_free,
            "best_free": best, "speedup_vs_serial": serial_s / by_free[best],
            "hidden": (comm_s + compute_s - by_free[best]) / min(comm_s, compute_s),
            "hidden_of_comm": 1 - (by_free[best] - compute_s) / comm_s,
            "time_over_bound": by_free[best] / max(comm_s, compute_s),
        }  # fmt: skip
    return result


def divide(state: dict[str, Any]) -> dict[str, Any]:
    rank, tile, num_sms = state["rank"], state["tile"], state["num_sms"]
    order = rank.order(tile)
    h = normal(order.entry_of_row_M.shape[0], ARGS.ffn)
    out = h.new_empty(h.shape[0], ARGS.hidden)
    nothing, none = torch.zeros_like(rank.told.counts_P), torch.zeros_like(order.num_problems)

    def run(
        senders: int, *, programs: int = num_sms, counts: torch.Tensor = rank.told.counts_P, work: Arranged = order,
        shape: SendShape | None = None,
    ) -> float:  # fmt: skip
        how = Division(programs=programs, senders=senders)
        rank.next_call()
        return median_s(
            lambda: fused_second(
                h, rank.w2, work, counts, rank.arena, division=how, tile=tile, shape=shape, out_MH=out
            ),
            repeat=5,
            warm=1,
        )

    idle = replace(order, num_problems=none)
    compute_s, all_send_s, one_sends_s = run(0, counts=nothing), run(0, work=idle), run(0, work=idle, programs=1)
    block_columns = rank.arena.spec.block_columns
    tiles = int(order.num_problems) * tile.row_tiles * -(-block_columns // tile.columns) * BLOCKS
    waves = -(-tiles // num_sms)
    cost = SecondCost(
        programs=num_sms, tiles=tiles, tile_s=compute_s / waves, blocks=BLOCKS, sender_s=one_sends_s, link_s=all_send_s
    )
    swept = {senders: run(senders) for senders in (*range(0, 33), *range(36, num_sms // 2, 4))}
    by_shape = {
        name: {"all_send_s": run(0, work=idle, shape=shape), "one_sends_s": run(0, work=idle, programs=1, shape=shape)}
        for name, shape in SENDS.items()
    }
    check_status(rank.arena.status_2)
    best, chosen = min(swept, key=lambda n: swept[n]), division(cost)
    chosen_s = swept[chosen] if chosen in swept else run(chosen)
    return {
        "compute_s": compute_s, "all_send_s": all_send_s, "one_sends_s": one_sends_s, "swept_s": swept, "best": best,
        "chosen": chosen, "chosen_over_best": chosen_s / swept[best], "predicted_s": predicted_s(cost, chosen),
        "sends_by_shape": by_shape, "measured_s": chosen_s, "speedup_vs_no_overlap": swept[0] / chosen_s,
    }  # fmt: skip


def graph(state: dict[str, Any]) -> dict[str, Any]:
    """Captured once; replayed with routing that the capture has not seen, it must give what an uncaptured call gives, bit for bit."""
    layer, spec = small_layer(torch.bfloat16, 512, 512, 704)
    shape = small_shape(torch.bfloat16)
    arenas = virtual_arenas(spec, DEVICE)
    run_virtual(layer, arenas, shape=shape)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, _ = enqueue_virtual(layer, arenas, shape=shape)
    for replay in range(20):
        for slots in layer.slots:
            slots.copy_(distinct_slots(slots.shape[0], top_k=TOP_K, slots=4))
        captured.replay()
        want = run_virtual(layer, virtual_arenas(spec, DEVICE), shape=shape)
        if not all(torch.equal(a, b) for a, b in zip(out, want, strict=True)):
            raise SystemExit(f"replay {replay} of the graph gives other bits than an ordinary call")
    return {"replays": 20, "equal": True, "replay_s": median_s(captured.replay)}


def launches(state: dict[str, Any]) -> dict[str, Any]:
    """Small products, so that launching and waiting are what is tried. A deadlock would show as a flag that never came."""
    rank = OneRank.make(2048)
    tile, side = state["tile"], torch.cuda.Stream()
    order = rank.order(tile)
    out = rank.packed.new_empty(order.entry_of_row_M.shape[0], 2 * ARGS.ffn)
    begin_s = time.perf_counter()
    for launch in range(ARGS.launches):
        rank.next_call()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            rank.copies(0)
        rank.first(order, tile, out, programs=state["num_sms"] - 8, wait=True)
        torch.cuda.current_stream().wait_stream(side)
        if launch % 1000 == 999:
            check_status(rank.arena.status_2)
    torch.cuda.synchronize()
    return {"launches": ARGS.launches, "seconds": time.perf_counter() - begin_s}


RUN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "check": check, "dense": dense, "first": first, "hide": hide, "divide": divide, "graph": graph, "launches": launches,
}  # fmt: skip


def main() -> None:
    begin_s = time.perf_counter()
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "shape": {k: getattr(ARGS, k) for k in ("rows", "hidden", "ffn", "experts")},
    }
    if ARGS.interpret:
        result |= {"ran_on": "CPU, Triton's interpreter: checks only, no figure is a time", "check": check({})}
    else:
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device here; --interpret runs the checks without one")
        facts = torch.cuda.get_device_properties(0)
        state: dict[str, Any] = {"num_sms": facts.multi_processor_count}
        result |= {"ran_on": facts.name, "multiprocessors": facts.multi_processor_count, "bars": BARS}
        for name, section in RUN.items():
            if time.perf_counter() - begin_s > ARGS.limit_s:
                result[name] = {"left_out": f"{ARGS.limit_s:g} s had passed"}
                continue
            if name == "first":
                state["rank"] = OneRank.make(ARGS.rows)
            at = time.perf_counter()
            try:
                result[name] = section(state)
            except Exception as error:  # what other sections found is kept
                traceback.print_exc()
                result[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            result[name]["section_s"] = time.perf_counter() - at
            print(f"{name}: {json.dumps(result[name])}", file=sys.stderr, flush=True)
            write(result)
    result["wall_s"] = time.perf_counter() - begin_s
    write(result)
    print(json.dumps(result, indent=1))
    if any("error" in part for part in result.values() if isinstance(part, dict)):
        raise SystemExit(1)


def write(result: dict[str, Any]) -> None:
    """As far as it is known: a section that hangs takes nothing with it."""
    if ARGS.json is not None:
        ARGS.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
