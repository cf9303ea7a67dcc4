"""Saves and loads the state of a run by logical tensors, for any mapping and number of ranks.

The room decides when a checkpoint counts as there (all files, then the name in `latest`), which old ones go, and what is damage; nothing that was saved whole is ever touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.checkpoint.folder import (
        CheckpointFolder as CheckpointFolder,
        RunState as RunState,
        Writer as Writer,
        write_flushed as write_flushed,
    )
    from phalanx.runtime.checkpoint.helper_process import HelperProcess as HelperProcess
    from phalanx.runtime.checkpoint.manager import (
        CheckpointManager as CheckpointManager,
        Saved as Saved,
        import_beside as import_beside,
        import_now as import_now,
    )
else:
    __getattr__ = lazy(__name__)
