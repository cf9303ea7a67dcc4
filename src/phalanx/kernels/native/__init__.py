"""Compiled elementwise kernels (`rows.cpp`), and how they are built on the machine that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.kernels.native.build import user_folder as user_folder
    from phalanx.kernels.native.rows import CompiledRows as CompiledRows, compiled_rows as compiled_rows
else:
    __getattr__ = lazy(__name__)
