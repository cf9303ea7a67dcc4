"""What the lab (`lab/phalanx_lab`) adds to the commands: benchmarks, the testbed, planted faults, published measurements.

The lab proves the product and is not needed to use it, so the wheel does not contain it and nothing in the product imports it by name. It is
found by its entry point, or, where the project runs from its source folders, by importing `phalanx_lab`.
"""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.core.errors import RunError

GROUP = "phalanx.lab"
"""Entry point group; its one entry is the package, whose `part(name)` imports a part of the lab."""


def lab_part(name: str, *, needed_by: str) -> Any:
    """A part of the lab by its name: `bench`, `gpu-check`, `testbed`, `faults`, `validation`. Raises `RunError`, naming `needed_by`, where the lab is not installed."""
    lab = _lab()
    if lab is None:
        raise RunError(
            f"{needed_by} belongs to the lab, which is not installed here; run `make env` in a checkout of Phalanx, or `pip install ./lab` there"
        )
    return lab.part(name)


def _lab() -> Any:
    from importlib import metadata  # half of the time of `phalanx --help`

    for entry in metadata.entry_points(group=GROUP):
        return entry.load()
    try:
        return importlib.import_module("phalanx_lab")
    except ModuleNotFoundError as error:
        if error.name != "phalanx_lab":
            raise
        return None
