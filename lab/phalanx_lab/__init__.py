"""What proves Phalanx and is not needed to use it: benchmarks, an emulated cluster, planted faults, published measurements.

The commands `phalanx bench`, `phalanx gpu-check`, `phalanx testbed`, `phalanx verify --plant` and `phalanx simulate validate` come here through `part`.
"""

from __future__ import annotations

import importlib
from typing import Any

PARTS = {
    "bench": ("phalanx_lab.bench.commands", "main"),
    "gpu-check": ("phalanx_lab.gpu_check.command", "main"),
    "testbed": ("phalanx_lab.testbed.command", "main"),
    "faults": ("phalanx_lab.faults.faults", None),
    "validation": ("phalanx_lab.publications.validation", "validation"),
}
"""Name of a part -> its module and, where the part is a function, the function's name."""


def part(name: str) -> Any:
    """The module or function of that name. Imports nothing else of the lab."""
    module_name, attribute = PARTS[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
