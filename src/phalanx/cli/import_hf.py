"""phalanx import-hf DIR [--section.key VALUE ...]

Makes a run of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json): a folder with recipe, tokenizer and a checkpoint of
step 0, from which `phalanx train` and `phalanx generate` go on. Families: mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3.

  DIR                   folder of the checkpoint
  --run.name NAME       name of the run (default: that of DIR)
  --launch.ranks N      ranks that read; each reads 1/N of every tensor
  --model.mtp_layers N  read N blocks of multi-token prediction too (deepseek_v3; default 0)
  --section.key VALUE   any other setting of the recipe, but for the model's shape, which config.json decides
  --help                this text

Everything wrong with DIR is told at once, and then nothing is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from phalanx.core.arguments import print_usage
from phalanx.core.errors import ConfigError
from phalanx.core.reading import is_count


def main(args: Sequence[str]) -> int:
    """Run `phalanx import-hf ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print_usage(__doc__)
        return 0
    folder, overrides = read_args(args)
    from phalanx.runtime.processes import WorldInfo, run_local, run_one, threads_per_rank
    from phalanx.train.huggingface import import_rank, open_checkpoint, plan_import

    job = plan_import(open_checkpoint(folder, mtp_layers=asked_mtp_layers(overrides)), overrides)
    body, ranks = partial(import_rank, job), job.recipe.launch.ranks
    threads = threads_per_rank(ranks, job.recipe.launch.threads)
    if ranks == 1:
        return run_one(body, WorldInfo(), threads=threads)
    return run_local(body, ranks=ranks, threads=threads)


def asked_mtp_layers(overrides: Sequence[str]) -> int:
    """What the overrides say of `model.mtp_layers`, which decides what is read; 0 where they say nothing that is a number."""
    words = [w for word in overrides for w in word.split("=", 1)]
    said = [after for word, after in itertools.pairwise(words) if word == "--model.mtp_layers"]
    return int(said[-1]) if said and is_count(said[-1]) else 0


def read_args(args: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder, then overrides."""
    if not args or args[0].startswith("-"):
        rule, hint = "the first argument is the folder of the checkpoint", "phalanx import-hf DIR --run.name NAME"
        raise ConfigError.of("DIR", args[0] if args else None, rule, hint, subject="the command")
    return Path(args[0]), list(args[1:])
