"""The files that make a run's tokenizer loadable by transformers. Bytes become a byte-level BPE without merges, whose ids are the bytes."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phalanx.data import EOS, FileTokenizer
from phalanx.train.setup import RunFolder


def tokenizer_files(run: RunFolder, *, length: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json. `length`: tokens that the model was trained on at once."""
    tokenizer, folder = run.read_tokenizer(), run.path / "tokenizer"
    if isinstance(tokenizer, FileTokenizer):
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
        eos, begin = tokenizer.eos_token, tokenizer.bos_token
    else:
        content, eos, begin = byte_tokenizer_json(), EOS, ""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **({"bos_token": begin, "add_bos_token": True} if begin else {}),
    }
    files: dict[str, Any] = {
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": tokenizer.eos_id},
    }
    return {
        "tokenizer.json": content.encode(),
        **{n: (json.dumps(c, indent=2) + "\n").encode() for n, c in files.items()},
    }


def byte_tokenizer_json() -> str:
    """A tokenizer.json that gives the ids of `ByteTokenizer`."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return str(tokenizer.to_str())


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where it can be seen, else one from 256 on, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]
