"""Phalanx trains mixture-of-experts language models. See docs/architecture.md.

The public names move tensors between layouts (docs/reference/api.md): `reshard` and `open_resharder` as one call that all ranks make, `WeightSync` again and
again. torch is imported when one of them is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.reshard import WeightSync as WeightSync, open_resharder as open_resharder, reshard as reshard
else:
    __getattr__ = lazy(__name__)
