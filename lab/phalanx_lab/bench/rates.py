"""Ranks of a benchmark on the testbed that ask for the rate of their links while they run.

What is right for the link follows from what the ranks measure, and processes that live on keep connections and memory warm. A rank cannot
shape links, the process that owns the bed can: `request` leaves a file, `serve` finds it while it waits for the job, and answers with another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunError
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx_lab.testbed.job import JobResult
from phalanx_lab.testbed.links import MIN_RATE
from phalanx_lab.testbed.testbed import Testbed

_TICK_S = 0.01
_PATIENCE_S = 60.0


def _ask_file(job_file: Path) -> Path:
    return job_file.with_suffix(".ask")


def _answer_file(job_file: Path) -> Path:
    return job_file.with_suffix(".answer")


def serve(bed: Testbed, command: Sequence[str], job_file: Path, *, timeout_s: float) -> JobResult:
    """Run `command` in every rank of the bed, and set all links as its rank 0 asks, until it has ended."""
    asked, answer = _ask_file(job_file), _answer_file(job_file)

    def tick() -> tuple[str, ...]:
        if asked.exists():
            rate = json.loads(asked.read_text())["bit_per_s"]
            asked.unlink()
            for host in range(bed.spec.hosts):
                bed.set_rate(host, rate)
            answer.touch()
        return ()

    return bed.run(command, env={"OMP_NUM_THREADS": "1"}).wait(timeout_s=timeout_s, tick=tick)


def request(job_file: Path, bit_per_s: float | None, *, comms: Collectives, axis: Axis) -> None:
    """All links get this rate, None for no limit; the least that the testbed can shape where it is below. Collective: nothing of the job is under way meanwhile. Raises `RunError` where nobody answers."""
    comms.barrier(axis)
    if axis.index == 0:
        answer, draft = _answer_file(job_file), job_file.with_suffix(".draft")
        rate = None if bit_per_s is None else max(bit_per_s, MIN_RATE)
        draft.write_text(json.dumps({"bit_per_s": rate}))
        os.replace(draft, _ask_file(job_file))
        deadline = time.monotonic() + _PATIENCE_S
        while not answer.exists():
            if time.monotonic() > deadline:
                raise RunError(f"no link was set within {_PATIENCE_S:g} s")
            time.sleep(_TICK_S)
        answer.unlink()
    comms.barrier(axis)


def tell(job_file: Path, told: Any) -> None:
    """Rank 0 leaves its result."""
    job_file.with_suffix(".told").write_text(json.dumps(told))


def told(job_file: Path, ended: JobResult) -> Any:
    """What rank 0 has left. Raises `RunError` where a rank failed."""
    if not ended.ok:
        raise RunError(f"the ranks of the benchmark failed: {ended.explain()}")
    return json.loads(job_file.with_suffix(".told").read_text())
