"""Ranks of a benchmark on the testbed: they read their job from a file, and rank 0 leaves its result beside it.

Ranks may ask for the rate of their links while they run: what is right for a link follows from what they measure, and processes that live on keep connections and
memory warm. A rank cannot shape links, the process that owns the bed can: `request` leaves a file, which `run_ranks` finds while it waits, and answers with another.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import RunError
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.processes.world import WorldInfo, init_world, read_world
from phalanx_lab.testbed import links
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.testbed import Testbed

_TICK_S = 0.01
_PATIENCE_S = 60.0


def _ask_file(job_file: Path) -> Path:
    return job_file.with_suffix(".ask")


def _answer_file(job_file: Path) -> Path:
    return job_file.with_suffix(".answer")


def run_ranks(
    bench: str,
    job: Mapping[str, Any],
    spec: ClusterSpec,
    *,
    timeout_s: float,
    grain: links.Grain = links.FINE,
    own_cores: bool = False,
) -> Any:
    """Run `phalanx bench BENCH --rank-of FILE` in every rank of a testbed; what rank 0 tells of `job`. Raises `RunError` where a rank fails."""
    with tempfile.TemporaryDirectory(prefix=f"phalanx-{bench}-") as name:
        job_file = Path(name) / "job.json"
        job_file.write_text(json.dumps(job))
        command = [sys.executable, "-m", "phalanx", "bench", bench, "--rank-of", str(job_file)]
        with Testbed(spec, grain=grain, own_cores=own_cores) as bed:

            def tick() -> tuple[str, ...]:
                _set_asked_rate(bed, job_file)
                return ()

            ended = bed.run(command, env={"OMP_NUM_THREADS": "1"}).wait(timeout_s=timeout_s, tick=tick)
        if not ended.ok:
            raise RunError(f"the ranks of the benchmark failed: {ended.explain()}")
        return read_told(job_file)


def _set_asked_rate(bed: Testbed, job_file: Path) -> None:
    asked = _ask_file(job_file)
    if asked.exists():
        rate = json.loads(asked.read_text())["bit_per_s"]
        asked.unlink()
        for host in range(bed.spec.hosts):
            bed.set_rate(host, rate)
        _answer_file(job_file).touch()


def join_ranks(timeout_s: float) -> WorldInfo:
    """This process becomes a rank of its job, on one thread."""
    info = read_world()
    assert info is not None  # the testbed sets it
    torch.set_num_threads(1)
    init_world(info, timeout_s=timeout_s)
    return info


def request(job_file: Path, bit_per_s: float | None, *, comms: Collectives, axis: Axis) -> None:
    """All links get this rate, None for no limit; the least that the testbed can shape where it is below. Collective: nothing of the job is under way meanwhile. Raises `RunError` where nobody answers."""
    comms.barrier(axis)
    if axis.index == 0:
        answer, draft = _answer_file(job_file), job_file.with_suffix(".draft")
        rate = None if bit_per_s is None else max(bit_per_s, links.MIN_RATE)
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


def read_told(job_file: Path) -> Any:
    """What rank 0 has left."""
    return json.loads(job_file.with_suffix(".told").read_text())
