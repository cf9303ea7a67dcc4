"""Event logs of a long run on many ranks that never happened, as large as real ones: what the page is measured on. Deterministic.

`python tests/helpers/long_run.py FOLDER [STEPS] [RANKS]` writes one by itself.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS, EXPERTS = 16, 64
STEP_S = 0.9
BEGIN_S = 1_790_000_000.0
EVERY_LOADS = 250


def write_run(folder: Path, *, steps: int, ranks: int, elastic: bool = False, name: str = "long") -> Path:
    """The run folder, with `ranks` logs of `steps` steps each."""
    (folder / "events").mkdir(parents=True)
    (folder / "recipe.toml").write_text(f'[run]\nname = "{name}"\n\n[train]\nsteps = {steps}\n')
    for rank in range(ranks):
        with (folder / "events" / f"rank-{rank}.jsonl").open("wb", buffering=1 << 20) as file:
            file.writelines(lines_of_rank(rank, steps=steps, ranks=ranks, elastic=elastic))
    return folder


def line(kind: str, time_s: float, **fields: object) -> bytes:
    return json.dumps({"kind": kind, "time_s": round(time_s, 6), **fields}, separators=(",", ":")).encode() + b"\n"


def lines_of_rank(rank: int, *, steps: int, ranks: int, elastic: bool) -> Iterator[bytes]:
    """What one rank logs."""
    draw = random.Random(rank if elastic else 0)
    mapping = f"dp{ranks}|ep{min(ranks, EXPERTS)}"
    yield line(
        "RunStarted", BEGIN_S, run="long", rank=rank, world=ranks, step=0, total_steps=steps, num_params=10**10, active_params=10**9,
        folding=mapping, flops_per_token=6e9, peak_flops_per_s=6e16, unigram_loss=7.5,
    )  # fmt: skip
    if elastic:
        yield team(BEGIN_S + 0.5, generation=1, members=ranks, step=0, folding=mapping, why="the run begins")
        yield from placed(BEGIN_S + 0.5, rank, ranks=ranks, step=0, why="members")
    lost = {steps * i // 5 for i in range(1, 5)} if elastic else set()
    for step in range(1, steps + 1):
        time_s = BEGIN_S + 1 + step * STEP_S + 0.001 * rank
        yield step_line(step, time_s, draw)
        yield b'{"kind":"SamplesTaken","time_s":%.6f,"step":%d,"microbatches":[%d,%d],"windows":[%d,%d,%d,%d],"history":0}\n' % (
            time_s, step, 2 * rank, 2 * rank + 1, step * 4, step * 4 + 1, step * 4 + 2, step * 4 + 3,
        )  # fmt: skip
        if rank == 0 and (step == 1 or step % EVERY_LOADS == 0):
            yield line("ExpertLoads", time_s, step=step, counts=loads(step))
        if step % 1000 == 0:
            yield line("Validated", time_s, step=step, loss=2 + 8 * math.exp(-step / 9000), tokens=65536, seconds=2.0)
            yield line("CheckpointSaved", time_s, step=step, path="x", bytes=1 << 36, blocked_s=0.01, total_s=40.0)
        if step in lost:
            yield team(
                time_s + 0.4,
                generation=2 + sorted(lost).index(step),
                members=ranks,
                step=step,
                folding=mapping,
                why="h3.1.ab is lost",
            )
            yield from placed(time_s + 0.4, rank, ranks=ranks, step=step, why="members")
            yield line(
                "TrainingResumed",
                time_s + 0.8,
                generation=2 + sorted(lost).index(step),
                step=step + 1,
                seconds=0.7,
                since_lost_s=0.75,
            )
    yield line("RunEnded", BEGIN_S + 2 + steps * STEP_S, step=steps, reason="finished", seconds=steps * STEP_S)


def team(time_s: float, **fields: object) -> bytes:
    return line(
        "TeamFormed", time_s, **fields, noticed_s=0.1, formed_s=0.05, built_s=0.02, moved_s=0.2, moved_bytes=1 << 24, checked=64,
        lost_s=time_s - 0.4, told_s=0.01, plan="x", life="a",
    )  # fmt: skip


def placed(time_s: float, rank: int, *, ranks: int, step: int, why: str, per_host: int = 4) -> Iterator[bytes]:
    """Who holds what, as the first rank tells it: experts with replicas in 4 slots, placed differently in every layer and after every step. On few ranks some experts have no slot but one."""
    width = max(4, -(-EXPERTS // ranks))
    experts = range(EXPERTS) if width * ranks < 2 * EXPERTS else [e // 2 for e in range(2 * EXPERTS)]
    slots = []
    for layer in range(LAYERS):
        order = random.Random(layer + step).sample(range(width * ranks), width * ranks)
        held = [experts[k % len(experts)] for k in order]
        slots.append([[layer], [held[r * width : (r + 1) * width] for r in range(ranks)]])
    if rank == 0:
        yield line(
            "StatePlaced", time_s, step=step, why=why, folding=f"dp{ranks}|ep{min(ranks, EXPERTS)}", layers=[list(range(LAYERS))], experts=EXPERTS,
            expert_layers=list(range(LAYERS)), slots_per_rank=width, slots=slots, members=[f"h{r // per_host}.{r % per_host}.ab" for r in range(ranks)],
            hosts=[r // per_host for r in range(ranks)], minimum=2, holders=2,
        )  # fmt: skip


def step_line(step: int, time_s: float, draw: random.Random) -> bytes:
    noise = draw.random()
    layers = ",".join([f"{1.05 + noise * 0.5 + 0.01 * n:.15f}" for n in range(LAYERS)])
    return (
        b'{"kind":"StepEnded","time_s":%.6f,"step":%d,"loss":%.15f,"aux_loss":0.0101,"z_loss":0.0012,"grad_norm":%.15f,"lr":%.10e,'
        b'"tokens":524288,"step_s":%.12f,"data_s":%.12f,"tokens_per_s":%.9f,"mfu":%.15f,"load_max_over_mean":[%s],"dead_experts":%d,'
        b'"dropped_tokens":0,"router_entropy":3.1,"peak_memory_bytes":%d,"mtp_loss":0.0,"exposed_forward_s":[],"exposed_backward_s":[],'
        b'"hidden_forward_s":[],"hidden_backward_s":[],"slowness":null}\n'
    ) % (
        time_s, step, 2 + 8 * math.exp(-step / 9000) + 0.1 * noise, 0.5 + noise, 3e-4 * min(1, step / 2000), STEP_S + 0.1 * noise,
        0.001, 524288 / (STEP_S + 0.1 * noise), 0.41 + 0.02 * noise, layers.encode(), noise > 0.99, (60 << 30) + step,
    )  # fmt: skip


def loads(step: int) -> list[list[int]]:
    return [
        [
            int(8192 * (1 + 0.9 * math.sin(e * 0.7 + layer + step / 7000) * math.exp(-step / 30000)))
            for e in range(EXPERTS)
        ]
        for layer in range(LAYERS)
    ]


if __name__ == "__main__":
    given = sys.argv[1:]
    write_run(Path(given[0]), steps=int(given[1]) if len(given) > 1 else 100_000, ranks=int(given[2]) if len(given) > 2 else 64, elastic="elastic" in given)  # fmt: skip
