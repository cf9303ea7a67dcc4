"""The files that make a run's tokenizer loadable by transformers. Bytes become a byte-level BPE without merges, whose ids are the bytes.

Must never change: texts begin as the run's did, and nothing is put behind them, whatever the tokenizer.json of the run puts there. (Training reads that file without its template.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from phalanx.core.reading import parse_json, parse_table
from phalanx.data import EOS, FileTokenizer, Tokenizer, begun_by_flag, parse_tokenizer, special_tokens, with_ends
from phalanx.train.setup import RunFolder

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
_CLASS = "PreTrainedTokenizerFast"
"""Does what tokenizer.json says, in every version."""
_REBUILDS = "GPTNeoX"
"""Beginning of the names of classes that follow neither tokenizer.json nor, in version 5, the flag; one of them is taken where a model of OLMoE names no class."""


def tokenizer_files(run: RunFolder, *, length: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json. `length`: tokens that the model was trained on at once."""
    tokenizer, folder = run.read_tokenizer(), run.path / "tokenizer"
    if isinstance(tokenizer, FileTokenizer):
        eos, begin = tokenizer.eos_token, tokenizer.bos_token
        content = _beginning((folder / "tokenizer.json").read_text(encoding="utf-8"), begin)
    else:
        content, eos, begin = byte_tokenizer_json(), EOS, ""
    config: dict[str, Any] = {
        "tokenizer_class": _CLASS,
        "eos_token": eos,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **({"bos_token": begin, "add_bos_token": True} if begin else {}),
    }
    generation = {"eos_token_id": tokenizer.eos_id}
    if tokenizer.bos_id is not None:
        generation["bos_token_id"] = tokenizer.bos_id
    return {
        "tokenizer.json": content.encode(),
        "tokenizer_config.json": json_file(config),
        "generation_config.json": json_file(generation),
    }


def begun_as_trained(files: Mapping[str, bytes], tokenizer: Tokenizer, *, folder: Path) -> dict[str, bytes]:
    """Those of a tokenizer's own `files` that must change so that every transformers begins texts as the run did; none where they all do. Of its classes some follow tokenizer.json, some
    add_bos_token: it becomes one that follows the file, and both say the same. `folder`: where the files lie."""
    begin, content = tokenizer.bos_token, files["tokenizer.json"].decode()
    made = _beginning(content, begin)
    config, names = (kept_table(files, name, folder=folder) for name in (CONFIG, MAP))
    follows = not begin or not str(config.get("tokenizer_class", _REBUILDS)).startswith(_REBUILDS)
    if made == content and follows and begun_by_flag(config, parse_tokenizer(content)[1]) in (None, begin):
        return {}
    config |= {"tokenizer_class": _CLASS, "add_bos_token": bool(begin)}
    if "add_eos_token" in config:
        config["add_eos_token"] = False
    if "eos_token" not in special_tokens(config):  # its class may have known it
        config["eos_token"] = tokenizer.eos_token
    tables = {CONFIG: config, MAP: names} if MAP in files else {CONFIG: config}
    for table in tables.values():
        if begin and special_tokens(table).get("bos_token") != begin:
            table["bos_token"] = begin
    changed = {"tokenizer.json": made.encode()} | {name: json_file(table) for name, table in tables.items()}
    name = "generation_config.json"
    if "bos_token_id" in (generation := kept_table(files, name, folder=folder)):
        changed[name] = json_file(generation | {"bos_token_id": tokenizer.bos_id})
    return changed


def kept_table(files: Mapping[str, bytes], name: str, *, folder: Path) -> dict[str, Any]:
    """One of `files`, empty where it is none of them. Raises `DataError` that names it in `folder`."""
    return parse_table(files.get(name, b"{}"), where=str(folder / name))


def _beginning(content: str, begin: str) -> str:
    """A tokenizer.json that puts the token `begin` before texts (empty: none) and nothing else; as it came where it does so already. What a post-processor does beside (positions of byte-level tokens) stays."""
    tokenizer, vocabulary = parse_tokenizer(content)
    bare, told = with_ends(tokenizer)
    if told == [begin] * bool(begin) + bare:
        return content
    table = parse_json(content, where="tokenizer.json", plain=False)
    steps = [step for step in _steps(table.get("post_processor")) if step.get("type") == "ByteLevel"]
    if begin:
        token = {"SpecialToken": {"id": begin, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        ids = {begin: {"id": begin, "ids": [vocabulary[begin]], "tokens": [begin]}}
        template = {"single": [token, first], "pair": [token, first, second], "special_tokens": ids}
        steps.append({"type": "TemplateProcessing", **template})
    several = {"type": "Sequence", "processors": steps}
    table["post_processor"] = several if len(steps) > 1 else next(iter(steps), None)
    return json.dumps(table, ensure_ascii=False)


def _steps(processor: Any) -> list[dict[str, Any]]:
    """The post-processors that one consists of."""
    if not isinstance(processor, dict):
        return []
    return [step for part in processor["processors"] for step in _steps(part)] if "processors" in processor else [processor]  # fmt: skip


def json_file(body: object) -> bytes:
    """As the files of a model are written."""
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def byte_tokenizer_json() -> str:
    """A tokenizer.json that gives the ids of `ByteTokenizer`."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return str(tokenizer.to_str())


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where it can be seen, else one from 256 on, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]
