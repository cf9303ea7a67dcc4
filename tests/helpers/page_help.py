"""A page server in this process, a browser before it, and figures of both: for tests and for `benchmarks/page_speed.py`."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.observe.page import PageServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
LOADED = """() => {
  const all = [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')];
  const drawn = performance.getEntriesByName('drawn')[0].startTime;
  return {first_paint_s: performance.getEntriesByName('first-contentful-paint')[0].startTime / 1e3, drawn_s: drawn / 1e3,
          bytes: all.filter((r) => r.startTime <= drawn).reduce((sum, r) => sum + r.transferSize, 0)};
}"""


@contextlib.contextmanager
def serving(*folders: Path, below: Path | None = None, address: str = "127.0.0.1") -> Iterator[PageServer]:
    """A server of these runs on a free port."""
    server = PageServer(address, 0, folders=folders, below=below)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Chromium, without a window. Playwright's own network of services is not used."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield found
        finally:
            found.close()


def visit(page: Any, server: PageServer) -> dict[str, float]:
    """Open the page and wait for its charts; seconds and bytes until then."""
    page.goto(server.url)
    page.wait_for_function("() => performance.getEntriesByName('drawn').length > 0", timeout=60_000)
    page.wait_for_timeout(100)  # the paint is told a moment later
    return dict(page.evaluate(LOADED))


def seconds_until_shown(page: Any, log: Path, line: bytes, words: str) -> float:
    """From when `line` is in the log to when the page says `words` in its story."""
    with log.open("ab") as file:
        begin_s = time.monotonic()
        file.write(line)
    page.wait_for_function(
        "(words) => document.getElementById('story').textContent.includes(words)", arg=words, timeout=60_000, polling=20
    )
    return time.monotonic() - begin_s
