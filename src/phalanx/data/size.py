"""How large the token files of a data section will be, without reading any text: for the memory estimate of a dry run."""

from __future__ import annotations

from phalanx.core.config import DataConfig
from phalanx.data.sources import resolve
from phalanx.data.tokenizer import parse_choice

BPE_BYTES_PER_TOKEN = 3.6
"""Bytes per token of Python text with 8,192 tokens; larger vocabularies make fewer tokens of it."""
LARGEST_SHORT_VOCAB = 1 << 16


def token_file_bytes(config: DataConfig, *, vocab: int) -> int:
    """Bytes of tokens that preparing `config` will make. Raises `DataError` where a source is not there."""
    each = 2 if vocab <= LARGEST_SHORT_VOCAB else 4
    per_token = 1.0 if parse_choice(config) is None else BPE_BYTES_PER_TOKEN
    total = 0
    for source in resolve(config):
        if source.kind == "tokens":
            total += source.num_bytes
        else:
            text = source.builtin_bytes if source.kind == "builtin" else source.num_bytes
            total += round(text / per_token * each)
    return total
