"""How fast the page of `phalanx watch` is: a run of 100,000 steps on 64 ranks that never happened, before Chromium.

    PYTHONPATH=tests/helpers python benchmarks/page_speed.py FOLDER [--steps 100000] [--ranks 64] [--fixed]

The run is elastic (all logs are read) unless `--fixed` is given, and is written to FOLDER where it is not there. Figures: seconds to make the index from the logs, to the first byte and the first
paint, until the charts are drawn, bytes until then, and seconds from a step in the log to its number on the page.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import time
from pathlib import Path
from statistics import median

from long_run import BEGIN_S, STEP_S, step_line, write_run
from page_help import browser, seconds_until_shown, serving, visit

from phalanx.observe.index import RunIndex

VISITS, APPENDED = 5, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    if not args.folder.exists():
        write_run(args.folder, steps=args.steps, ranks=args.ranks, elastic=not args.fixed)
    figures: dict[str, float] = {"GB of logs": sum(p.stat().st_size for p in args.folder.glob("events/*.jsonl")) / 1e9}
    index, begin_s = RunIndex(args.folder), time.monotonic()
    index.update()
    figures["s, index from logs"] = time.monotonic() - begin_s
    figures["MB of index"] = index.save() / 1e6
    with serving(args.folder) as server, browser() as chromium:
        figures["s, first byte"] = first_byte(server.server_address[1])
        visits = []
        for _ in range(VISITS):
            with chromium.new_context(viewport={"width": 1200, "height": 800}).new_page() as page:
                visits.append(visit(page, server))
        for name, title in (
            ("first_paint_s", "s, first paint"),
            ("drawn_s", "s, charts drawn"),
            ("bytes", "kB sent at first"),
        ):
            figures[title] = median(v[name] for v in visits) / (1e3 if name == "bytes" else 1)
        page = chromium.new_page()
        visit(page, server)
        delays = append(page, args.folder, index.last_step)
        figures |= {"s behind the log": median(delays), "s behind the log, worst of 10": max(delays)}
    print(json.dumps({k: float(f"{v:.3g}") for k, v in figures.items()}, indent=1))


def first_byte(port: int) -> float:
    """Seconds to the first byte of an answer, median."""
    found = []
    for _ in range(9):
        connection, begin_s = http.client.HTTPConnection("127.0.0.1", port), time.monotonic()
        connection.request("GET", "/")
        connection.getresponse().read(1)
        found.append(time.monotonic() - begin_s)
        connection.close()
    return median(found)


def append(page: object, folder: Path, last: int) -> list[float]:
    draw, delays = random.Random(1), []
    for step in range(last + 1, last + 1 + APPENDED):
        time.sleep(draw.uniform(0.2, 1.0))
        line = step_line(step, BEGIN_S + 3 + step * STEP_S, draw)
        delays.append(seconds_until_shown(page, folder / "events" / "rank-0.jsonl", line, f"step {step:,} of"))
    return delays


if __name__ == "__main__":
    main()
