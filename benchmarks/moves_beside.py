"""How long training stands still for experts that move: all at once, or beside a step, or not at all, in turns in one run.

    phalanx testbed run --hosts 4 --rate 200mbit -- python benchmarks/moves_beside.py train    # a rank of it
    python benchmarks/moves_beside.py train --launch.ranks 4                                   # on this machine, without links
    python benchmarks/moves_beside.py read                                                     # the figures

Moves are forced: a row of an expert is taken for a second, so that moving pays at each decision, and loads are drawn anew in each step. Times are real. For each way: the part of the move for which
all stand still (the slowest rank), and the seconds of the steps from one decision to the next, which have all that the move costs, what it takes from the step beside it too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

FOLDER, WAYS, INTERVAL, TURNS = Path("runs"), ("none", "at once", "beside"), 3, 3
STEPS = INTERVAL * (len(WAYS) * TURNS + 2)
SETTINGS = {
    "model.preset": "tiny", "model.hidden": 128, "model.expert_ffn": 512, "data.tokenizer": "byte", "data.builtin_bytes": 300_000,
    "train.seq_len": 64, "train.global_batch": 16, "train.micro_batch": 4, "train.dtype": "float32", "train.steps": STEPS, "train.eval_interval": 0,
    "checkpoint.interval": 0, "resilience.heal": "false", "resilience.mode": "fast", "resilience.slots_per_rank": 5, "resilience.replace_interval": INTERVAL,
    "router.force": "imbalanced", "router.force_skew": 1.5, "launch.threads": 1, "observe.console": "none", "run.name": "moves-beside", "run.folder": FOLDER,
}  # fmt: skip


def way_of(step: int) -> str:
    """Of the decision after `step` steps. The first cycle is not counted."""
    return WAYS[(step // INTERVAL - 1) % len(WAYS)]


def train() -> int:
    from phalanx.cli.main import main
    from phalanx.train.placement import rebalancer as replacing

    sound = replacing.Rebalancer._prepare

    def in_turns(self: Any, parts: Any, rank: Any, way: Any, *, step: int) -> Any:
        if way_of(step) == "none":  # decided, and not done
            asked, self._asked = self._asked, None
            rank.peers.first(
                lambda: self._aside.answer(replacing.plan_replacement, asked.stages, asked.costs, **self._bounds)
            )
            return None
        return sound(self, parts, rank, replace(way, beside=way_of(step) == "beside"), step=step)

    replacing.Rebalancer._prepare = in_turns  # type: ignore[method-assign]
    replacing.seconds_of_a_row = lambda parts: 1.0
    return main(
        ["train", *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))), *sys.argv[2:]]
    )


def read() -> int:
    logs = sorted((FOLDER / "moves-beside" / "events").glob("rank-*.jsonl"))
    events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    ended: dict[int, float] = {}
    for e in events:
        if e["kind"] == "StepEnded":
            ended[e["step"]] = max(ended.get(e["step"], 0.0), e["time_s"])
    moves: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e["kind"] == "ExpertsMoved":
            moves.setdefault(e["step"] // INTERVAL * INTERVAL, []).append(e)
    for way in WAYS:
        starts = [
            s for s in range(2 * INTERVAL, STEPS - INTERVAL, INTERVAL) if way_of(s) == way and s + INTERVAL in ended
        ]
        cycles = [ended[s + INTERVAL] - ended[s] for s in starts]
        print(
            f"{way:<8} {len(cycles)} times, {INTERVAL} steps: {median(cycles):.2f} s ({min(cycles):.2f} to {max(cycles):.2f})"
        )
        of_way = [moves[s] for s in starts if s in moves]
        if of_way:
            still, built, aside = ([max(e[k] for e in m) for m in of_way] for k in ("moved_s", "built_s", "beside_s"))
            some = [max(e["moved_bytes"] for e in m) / 1e6 for m in of_way]
            print(
                f"         {median(some):.1f} MB to a rank; stood still for state {median(still):.2f} s ({min(still):.2f} to {max(still):.2f}), "
                f"for modules {median(built):.2f} s; under way beside {median(aside):.2f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(train() if sys.argv[1:2] == ["train"] else read())
