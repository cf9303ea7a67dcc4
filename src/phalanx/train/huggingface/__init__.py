"""Hugging Face checkpoints to runs and back.

The room decides which tensor of a checkpoint is which parameter of a run, what is read by which rank, and what `config.json` says; how families name things is in `models/families`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.huggingface.export_hf import (
        Export as Export,
        finish_export as finish_export,
        plan_export as plan_export,
        write_shards as write_shards,
    )
    from phalanx.train.huggingface.hugging_face import open_checkpoint as open_checkpoint
    from phalanx.train.huggingface.import_hf import import_rank as import_rank, plan_import as plan_import
else:
    __getattr__ = lazy(__name__)
