"""Compiled elementwise kernels (`rows.cpp`), and how they are built on the machine that runs them.

The room decides whether a machine has compiled kernels at all (`compiled_rows` gives None where there is no compiler), where the binary is kept, and that it is the user's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.kernels.native.build import (
        attempt as attempt,
        cpp_compilers as cpp_compilers,
        user_folder as user_folder,
        why_uncompiled as why_uncompiled,
    )
    from phalanx.kernels.native.rows import (
        CompiledRows as CompiledRows,
        Seen as Seen,
        compiled_rows as compiled_rows,
        not_seen as not_seen,
    )
else:
    __getattr__ = lazy(__name__)
