"""Phalanx trains mixture-of-experts language models. See docs/architecture.md.

`reshard` and `open_resharder` move tensors between layouts (docs/resharding-run.md); torch is imported when they are called, not before.
"""

from __future__ import annotations

from typing import Any

__all__ = ["open_resharder", "reshard"]


def reshard(tensor_or_state: Any, src_layout: Any, dst_layout: Any, **options: Any) -> Any:
    """Move a tensor or a dict of tensors from one layout to another: `phalanx.runtime.reshard.call.reshard`."""
    from phalanx.runtime import reshard as room

    return room.reshard(tensor_or_state, src_layout, dst_layout, **options)


def open_resharder(group: Any = None, **options: Any) -> Any:
    """What remembers plans between calls of `reshard`: `phalanx.runtime.reshard.call.open_resharder`."""
    from phalanx.runtime import reshard as room

    return room.open_resharder(group, **options)
