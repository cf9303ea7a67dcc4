"""Write the model of a run as a Hugging Face checkpoint that `transformers` loads as it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, raise_if
from phalanx.core.files import new_folder

if TYPE_CHECKING:
    from phalanx.train.huggingface import Export


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write the model of a run as a Hugging Face checkpoint that `transformers` loads as it is."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, such as runs/laptop."""
    dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """New folder to write: safetensors shards with their index, config.json, tokenizer."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Checkpoint to read. Default: the newest."""
    dtype: Annotated[str | None, tyro.conf.arg(metavar="TYPE")] = None
    """bfloat16, float16, float32 or float64. Default: that of each imported tensor, or train.dtype."""
    family: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Architecture (mixtral, qwen3_moe, ...). Default: that of the import, or the first that can express the model."""
    shard_mb: int = 5000
    """Largest shard in megabytes; a larger tensor has a file of its own."""
    ranks: int = 1
    """Processes that write shards."""


def main(args: list[str]) -> int:
    """Run `phalanx export-hf ARGS...`; returns the exit status."""
    options = read_words(ExportArgs, args, prog="phalanx export-hf", description=__doc__)
    plan = export(options)
    for caution in plan.cautions:
        print(f"phalanx export-hf: warning: {caution}", file=sys.stderr)
    size = sum(plan.bytes_of(link) for shard in plan.shards for link in shard)
    count = len(plan.shards)
    files = f"{count} files" if count > 1 else "one file"
    print(f"{plan.target}: {plan.family.architecture}, step {plan.step}, {size / 1e6:,.1f} MB in {files}")
    return 0


def export(options: ExportArgs) -> Export:
    """Write the checkpoint; returns what was written. Raises `ConfigError` or `CheckpointError`, and then nothing is left behind."""
    raise_if(too_small(options, "leave it out", shard_mb=1, ranks=1), ConfigError, subject="the command")
    from phalanx.runtime.processes import run_local
    from phalanx.train.huggingface import finish_export, plan_export, write_shards

    plan = plan_export(
        options.run,
        options.dir,
        step=options.step,
        dtype=options.dtype,
        family=options.family,
        shard_bytes=options.shard_mb * 1_000_000,
    )
    ranks = min(options.ranks, len(plan.shards))
    with new_folder(plan.target, writer="export"):
        if ranks == 1:
            write_shards(plan)
        else:
            run_local(lambda info, stop: _rank(plan, info.rank, ranks), ranks=ranks, threads=1)
        finish_export(plan)
    return plan


def _rank(plan: object, rank: int, ranks: int) -> int:
    from phalanx.train.huggingface import Export, write_shards

    assert isinstance(plan, Export)
    write_shards(plan, index=rank, count=ranks)
    return 0
