"""Alternates whole `phalanx train` processes of two trees, and says how fast this one trains over the other (started by scripts/against.sh).

Two recipes, one whose ranks are replaced when they die and one whose world is fixed. Each pair runs both trees one after the other, in an order that changes from
pair to pair; the first pair warms the caches and is not counted. Speed is what each run's own `phalanx metrics` says: the median tokens/s of its settled steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
RECIPES = {"fixed": "false", "elastic": "true"}
"""Name -> `resilience.heal`."""
SETTINGS = {
    "model.preset": "laptop",
    "data.tokenizer": "byte",
    "data.builtin_bytes": "2000000",
    "train.steps": "40",
    "train.seq_len": "128",
    "train.global_batch": "16",
    "train.micro_batch": "4",
    "train.eval_interval": "0",
    "train.dtype": "auto",
    "checkpoint.interval": "0",
    "folding.ep": "1",
    "launch.ranks": "2",
    "launch.threads": "1",
    "resilience.mode": "fast",
    "observe.console": "none",
    "observe.tensorboard": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other tree, with an environment")
    parser.add_argument("--pairs", type=int, default=10, help="at least 6, or there is no interval of 95 %%")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings in the place of the usual ones"
    )
    args = parser.parse_args()
    if args.pairs < 6:
        parser.error("--pairs must be at least 6: fewer have no interval of 95 %")
    settings = SETTINGS | dict(word.split("=", 1) for word in args.set)
    speeds = measure(args.other.resolve(), settings, pairs=args.pairs)
    recipes = {name: evaluate(found) for name, found in speeds.items()}
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "this": revision(HERE),
        "other": revision(args.other),
        "settings": settings,
        "recipes": recipes,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"training speed of {report['this']} over {report['other']}, {args.pairs} pairs")
    for name, r in recipes.items():
        print(
            f"  {name:<8} {r['ratio']:.3f}  [{r['low']:.3f}, {r['high']:.3f}]   {r['this']:.0f} and {r['other']:.0f} tokens/s"
        )
    print(f"written to {args.json}")
    return 0


def measure(other: Path, settings: dict[str, str], *, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Of each recipe (tokens/s of this tree, of the other) by pair."""
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in RECIPES}
    with tempfile.TemporaryDirectory(prefix="phalanx-against-") as scratch:
        for pair in range(pairs + 1):
            for name, heal in RECIPES.items():
                found: dict[Path, float] = {}
                for tree in (HERE, other) if pair % 2 else (other, HERE):
                    folder = Path(scratch, "this" if tree == HERE else "other")
                    found[tree] = speed(tree, folder, f"{name}-{pair}", {**settings, "resilience.heal": heal})
                print(
                    f"pair {pair} {name:<8} {found[HERE] / found[other]:.3f}{'' if pair else '  (not counted)'}",
                    flush=True,
                )
                if pair:
                    speeds[name].append((found[HERE], found[other]))
    return speeds


def speed(tree: Path, folder: Path, run: str, settings: dict[str, str]) -> float:
    """Median tokens/s of the settled steps of one run of `tree`. Raises `SystemExit` where it fails."""
    given = {**settings, "run.folder": str(folder), "run.name": run, "data.cache": str(folder / "cache")}
    phalanx, told = [str(tree / ".venv/bin/python"), "-m", "phalanx"], folder / f"{run}.json"
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    for command in ([*phalanx, "train", *words], [*phalanx, "metrics", str(folder / run), "--json", str(told)]):
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return float(json.loads(told.read_text())["tokens_per_s"])


def evaluate(pairs: list[tuple[float, float]]) -> dict[str, object]:
    """The median ratio over the pairs and its interval, and every pair."""
    ratios = sorted(this / other for this, other in pairs)
    skip = left_out(len(ratios))
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[skip],
        "high": ratios[-1 - skip],
        "this": statistics.median(this for this, _ in pairs),
        "other": statistics.median(other for _, other in pairs),
        "pairs": pairs,
    }


def left_out(count: int) -> int:
    """Order statistics outside of the interval of the median, on each side: it lies between the others in 95 % of all cases or more, whatever the distribution."""
    skip, beyond = 0, 0.5**count
    while (more := beyond + math.comb(count, skip + 1) * 0.5**count) <= 0.025:
        skip, beyond = skip + 1, more
    return skip


def revision(tree: Path) -> str:
    """Its commit, and whether something was changed since."""
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
