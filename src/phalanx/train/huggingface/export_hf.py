"""A checkpoint of a run becomes a Hugging Face checkpoint: sharded safetensors with their index, config.json and the tokenizer's files.

    plan_export    run folder -> family, shards, config; nothing is written
    write_shards   some of the shards, each read from the run's checkpoint by boxes and written whole; processes share them
    finish         the small files and the index

Must never change: a folder with the name asked for is complete; no number is rounded but to the type that its tensor came in, or that was asked
for; the expert bias stays fp32; config.json means the model of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, ConfigError, Problem, RunError, nearest, raise_if
from phalanx.core.files import writing_folder
from phalanx.core.reading import is_count, parse_table, read_text
from phalanx.data import CHATML_TEMPLATE, ChatEncoder, ChatTemplate, special_tokens, variables_of
from phalanx.models.families import Family, NameLink, families, families_for, shapes_of
from phalanx.plan.model import ModelSpec, buffers, resolve_model
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.state import BoxTensor
from phalanx.train import state_dtype
from phalanx.train.huggingface.hf_tokenizer import (
    CONFIG,
    MAP,
    begun_as_trained,
    json_file,
    kept_table,
    tokenizer_files,
)
from phalanx.train.huggingface.hugging_face import INDEX_FILE, SINGLE_FILE, read_config, strange_links
from phalanx.train.huggingface.import_hf import KEPT_FOLDER, TYPES_FILE, small_files
from phalanx.train.setup import DTYPES, RunFolder, choose_checkpoint

DEFAULT_SHARD_BYTES = 5_000_000_000
TYPES = {**DTYPES, "float16": torch.float16}
"""What can be written. (float16 is no type to train in.)"""
WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Types in the words of safetensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Export:
    """What is written where."""

    run: RunFolder
    target: Path
    recipe: Recipe
    spec: ModelSpec
    family: Family
    step: int
    dtype: torch.dtype
    types: Mapping[str, torch.dtype]
    """Of tensors that came in another one."""
    shards: tuple[tuple[NameLink, ...], ...]

    @property
    def writing(self) -> Path:
        """Where the files gather until all are there."""
        return writing_folder(self.target)

    def file_of(self, shard: int) -> str:
        count = len(self.shards)
        return SINGLE_FILE if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def type_of(self, link: NameLink) -> torch.dtype:
        if link.param is None or link.param in self._buffers:
            return torch.float32
        return self.types.get(link.tensor, self.dtype)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a person should know of programs that read it otherwise."""
        return self.family.cautions(self.spec)

    def bytes_of(self, link: NameLink) -> int:
        return link.part.num_elements * self.type_of(link).itemsize

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(name for name, _ in buffers(self.spec))


def plan_export(
    run: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    family: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Export:
    """Everything decided and checked. Raises `ConfigError` or `CheckpointError` with all that is wrong."""
    folder = RunFolder(run)
    recipe, tokenizer = folder.read_recipe(), folder.read_tokenizer()
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer.vocab_size)
    chosen, problems = _choose_family(folder, spec, family)
    problems += _target_problems(target)
    if dtype is not None and dtype not in TYPES:
        problems.append(
            Problem(where="--dtype", value=dtype, rule="is not a known data type", hint=nearest(dtype, TYPES))
        )
    raise_if(problems, ConfigError, subject="the export")
    assert chosen is not None  # or there was a problem
    _, found = choose_checkpoint(folder, spec, step)
    kept, came = read_config(folder.path / KEPT_FOLDER)[0], _types_of_import(folder)
    words = (dtype, came.pop("", None), kept.get("dtype"), kept.get("torch_dtype"), recipe.train.dtype)
    word = next(w for w in words if w in TYPES)
    plan = Export(
        run=folder, target=target, recipe=recipe, spec=spec, family=chosen, step=found, dtype=TYPES[word],
        types={} if dtype else {name: TYPES[word] for name, word in came.items()}, shards=(),
    )  # fmt: skip
    links = sorted([*chosen.links(spec), *chosen.copies_of(spec)], key=lambda link: _natural(link.tensor))
    return Export(**{**vars(plan), "shards": _shards(plan, links, shard_bytes)})


def _types_of_import(folder: RunFolder) -> dict[str, str]:
    """Types of the tensors that a run came from (the commonest under the empty name), as far as they are known."""
    path = folder.path / KEPT_FOLDER / TYPES_FILE
    try:
        return {str(name): WORDS[word] for name, word in parse_table(read_text(path), where=str(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        problem = Problem(
            where=str(path), value=str(error), rule="must be a table of types", hint="import the run again"
        )
        raise CheckpointError([problem], subject=f"the run {folder.path}") from error


def _choose_family(folder: RunFolder, spec: ModelSpec, asked: str | None) -> tuple[Family | None, list[Problem]]:
    """The family asked for, or that of the import, or the first that can express the model."""
    names = {f.model_type: f for f in families()}
    if asked is not None and asked not in names:
        hint = nearest(asked, names)
        return None, [Problem(where="--family", value=asked, rule="is not a known family", hint=hint)]
    came_from = read_config(folder.path / KEPT_FOLDER)[0].get("model_type")
    first = names.get(asked or str(came_from))
    if first is not None:
        return first, first.express_problems(spec)
    able = families_for(spec)
    if able:
        return able[0], []
    return None, [min((f.express_problems(spec) for f in families()), key=len)[0]]


def _target_problems(target: Path) -> list[Problem]:
    here = target.resolve()
    if here == Path.cwd() or here in Path.cwd().parents:  # it is replaced by a new one at the end
        return [
            Problem(
                where="DIR", value=str(target), rule="is the folder that this command runs in", hint="give a new folder"
            )
        ]
    if target.is_dir() and any(target.iterdir()):
        rule, hint = "is a folder that is not empty, and nothing is overwritten", "give a new one"
        return [Problem(where="DIR", value=str(target), rule=rule, hint=hint)]
    if target.exists() and not target.is_dir():
        return [Problem(where="DIR", value=str(target), rule="is a file", hint="give a new folder")]
    return []


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if is_count(part) else (-1, part) for part in re.split(r"(\d+)", name)]


def _shards(plan: Export, links: Sequence[NameLink], limit: int) -> tuple[tuple[NameLink, ...], ...]:
    """Consecutive tensors up to `limit` bytes a file; a larger tensor has a file of its own."""
    shards: list[list[NameLink]] = [[]]
    used = 0
    for link in links:
        size = plan.bytes_of(link)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(link)
        used += size
    return tuple(map(tuple, shards))


# ---- writing -----------------------------------------------------------------------------------------------------------------


def write_shards(plan: Export, *, index: int = 0, count: int = 1) -> None:
    """Shards number `index`, `index + count`, ...; one is in memory at a time."""
    manager = CheckpointManager(plan.run.checkpoints.path)
    for number in range(index, len(plan.shards), count):
        tensors = _read_shard(plan, manager, plan.shards[number])
        try:
            save_file(tensors, plan.writing / plan.file_of(number), metadata={"format": "pt"})
        except SafetensorError as error:
            raise RunError(f"cannot write {plan.target}: {error}") from error


def _read_shard(plan: Export, manager: CheckpointManager, links: Sequence[NameLink]) -> dict[str, torch.Tensor]:
    wide = state_dtype(DTYPES[plan.recipe.train.dtype])
    kinds = {name: "buffer" for name, _ in buffers(plan.spec)}
    logical = shapes_of(plan.spec)
    out, boxes = {}, []
    for link in links:
        if link.param is None:
            out[link.tensor] = torch.zeros(link.shape)
            continue
        kind = kinds.get(link.param, "master")
        held = torch.empty(link.box.sizes, dtype=torch.float32 if kind == "buffer" else wide)
        boxes.append(BoxTensor(f"{kind}/{link.param}", logical[link.param], link.box, held, primary=True))
        out[link.tensor] = held.view(link.shape)
    manager.load(boxes, step=plan.step, partial=True)
    return {link.tensor: _narrowed(link.tensor, out[link.tensor], plan.type_of(link)) for link in links}


def _narrowed(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in the type that is written. Raises `RunError` where a number is too large for it."""
    found = x.to(dtype).contiguous()
    if dtype == torch.float16 and not found.isfinite().all() and x.isfinite().all():
        raise RunError(f"{name} has {x.abs().max().item():g}, too large for float16; use --dtype bfloat16")
    return found


def finish_export(plan: Export) -> None:
    """Config, tokenizer and index next to the shards."""
    for name, content in {**_small_files(plan), **_index(plan)}.items():
        (plan.writing / name).write_bytes(content)
    for number in range(len(plan.shards)):  # safetensors keeps its files from other readers
        (plan.writing / plan.file_of(number)).chmod((plan.writing / "config.json").stat().st_mode)


def _index(plan: Export) -> dict[str, bytes]:
    if len(plan.shards) == 1:
        return {}
    weight_map = {link.tensor: plan.file_of(i) for i, shard in enumerate(plan.shards) for link in shard}
    total = sum(plan.bytes_of(link) for shard in plan.shards for link in shard)
    body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {INDEX_FILE: json_file(body)}


def _small_files(plan: Export) -> dict[str, bytes]:
    """What came with an imported model, unchanged but for the config's type; for others, made from the recipe."""
    kept_folder = plan.run.path / KEPT_FOLDER
    strange = [p for folder in (kept_folder, plan.run.path / "tokenizer") for p in strange_links(folder, whole=True)]
    raise_if(strange, CheckpointError, subject=f"the run {plan.run.path}")
    kept = {p.name: p.read_bytes() for p in small_files(kept_folder)}
    config = parse_table(kept.pop("config.json", b"{}"), where=str(kept_folder / "config.json"))
    if config.get("model_type") != plan.family.model_type:
        config = _fresh_config(plan)
    elif not plan.family.says(config, plan.spec):  # an older version read it otherwise, and trained what it read
        second = ("rope_theta", "rope_scaling", "original_max_position_embeddings", *plan.family.aliases)
        config = {k: v for k, v in config.items() if k not in second} | plan.family.config_of(plan.spec)
    own, tokenizer = _is_tokenizer_of(plan.run, kept), plan.run.read_tokenizer()
    if not own:
        kept = _with_tokenizer_of_run(plan, kept)
        config |= {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}
    elif changed := begun_as_trained(kept, tokenizer, folder=kept_folder):
        kept |= changed
        config["bos_token_id"] = tokenizer.bos_id
    if own and plan.recipe.data.eos_token is not None:
        kept |= _ending_as_told(plan, kept, config)
    if own and plan.recipe.data.chat_template == "model":  # the model's own files say it all but for their tokens
        kept |= _as_rendered(plan, kept)
    elif plan.recipe.data.chat_template is not None:
        kept.pop(_TEMPLATE, None)
        kept |= _of_conversations(plan, kept)
    if plan.family.mtp_rules:
        config.pop("num_mtp_layers", None)
        config["num_nextn_predict_layers"] = plan.spec.mtp_layers  # others were left behind when the model came in
    config.pop("torch_dtype", None)
    config.pop("auto_map", None)  # names Python files, which stay behind; transformers has these families itself
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    return {**kept, "config.json": json_file(config)}


def _is_tokenizer_of(run: RunFolder, kept: Mapping[str, bytes]) -> bool:
    """Whether the run has the tokenizer that came with the model."""
    path = run.path / "tokenizer" / "tokenizer.json"
    return path.is_file() and path.read_bytes() == kept.get("tokenizer.json")


def _with_tokenizer_of_run(plan: Export, kept: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, with the run's own tokenizer in place of what came. The template of conversations stays with the tokens that it names, and how the
    model generates."""
    tokens = plan.run.read_tokenizer().control_tokens
    made = tokenizer_files(plan.run, length=plan.recipe.train.seq_len)
    tables = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        came = kept_table(kept, name, folder=plan.run.path / KEPT_FOLDER)
        tables[name] = came, parse_table(made[name], where=name)
    came, config = tables["tokenizer_config.json"]
    config |= {key: came[key] for key in ("chat_template", "model_max_length") if key in came}
    named = {key: _content(came.get(key)) for key in ("bos_token", "pad_token", "unk_token")}
    config |= {key: token for key, token in named.items() if token in tokens and key not in config}
    came, generation = tables["generation_config.json"]
    came.pop("bos_token_id", None)
    generation = (
        came | generation | {"eos_token_id": _still_ends(plan, came.get("eos_token_id"), generation["eos_token_id"])}
    )
    files = {"tokenizer_config.json": json_file(config), "generation_config.json": json_file(generation)}
    return {name: content for name, content in kept.items() if not _TOKENIZERS.fullmatch(name)} | made | files


_TEMPLATE = "chat_template.jinja"
_TOKENIZERS = re.compile(r"(tokenizer.*|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt|.*\.model")
"""Files that tokenizers of transformers consist of."""


def _content(token: object) -> object:
    """A token as tokenizer_config.json has it, by itself or in a table."""
    return token.get("content") if isinstance(token, dict) else token


def _still_ends(plan: Export, came: object, eos: int) -> int | list[int]:
    """The run's own end, and what else ended a text before, where it is a control token of the run's tokenizer."""
    tokenizer = plan.run.read_tokenizer()
    tokens = tokenizer.control_tokens
    control = {tuple(ids.tolist()) for ids in tokenizer.encode_rendered(tokens, [""] * len(tokens))}
    more = [i for i in _as_list(came) if isinstance(i, int) and (i,) in control and i != eos]
    return [eos, *more] if more else eos


def _ending_as_told(plan: Export, kept: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """How the model generates, with the end that the recipe names among those where it stops."""
    name, eos = "generation_config.json", plan.run.read_tokenizer().eos_id
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    of_config = {key: config[key] for key in ids if config.get(key) is not None}
    found = parse_table(kept.get(name, json_file(of_config)), where=str(plan.run.path / KEPT_FOLDER / name))
    known = _as_list(found.get("eos_token_id"))
    return {} if eos in known else {name: json_file(found | {"eos_token_id": [*known, eos]})}


def _as_list(ids: object) -> list[Any]:
    """Ids as the files have them: one, several or none."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _of_conversations(plan: Export, files: dict[str, bytes]) -> dict[str, bytes]:
    """The template of a run's conversations, and the tokens that end its answers, for other programs."""
    template = plan.run.read_template(plan.recipe)
    with ChatEncoder(plan.run.read_tokenizer(), template) as encoder:
        stops = encoder.stops()
    found = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        found[name] = kept_table(files, name, folder=plan.run.path / KEPT_FOLDER)
    known = _as_list(found["generation_config.json"].get("eos_token_id"))
    found["generation_config.json"]["eos_token_id"] = [*known, *sorted(stops.difference(known))]
    source = CHATML_TEMPLATE if template is None else _with_its_tokens(plan, template, files)
    found["tokenizer_config.json"]["chat_template"] = source
    return {name: json_file(table) for name, table in found.items()}


def _as_rendered(plan: Export, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The model's own template, where its files alone would have others write it with other tokens than the run did."""
    template = plan.run.read_template(plan.recipe)
    source = _with_its_tokens(plan, template, files) if template is not None else ""
    if template is None or source == template.source:
        return {}
    if _TEMPLATE in files:
        return {_TEMPLATE: source.encode()}
    config = kept_table(files, CONFIG, folder=plan.run.path / KEPT_FOLDER)
    named = config.get("chat_template")
    others = [t for t in named if isinstance(t, dict) and t.get("name") != "default"] if isinstance(named, list) else []
    config["chat_template"] = [*others, {"name": "default", "template": source}] if others else source
    return {CONFIG: json_file(config)}


def _with_its_tokens(plan: Export, template: ChatTemplate, files: Mapping[str, bytes]) -> str:
    """A template that begins by saying which special tokens the run gave it, where transformers would give it others of `files`."""
    config, more = (kept_table(files, name, folder=plan.run.path / KEPT_FOLDER) for name in (CONFIG, MAP))
    theirs = special_tokens(config) | ({} if "added_tokens_decoder" in config else special_tokens(more))
    ours = variables_of(template, plan.run.read_tokenizer())
    used = sorted(n for n in {*theirs, *ours} if n.isidentifier() and n in template.source)
    told = {n: json.dumps(ours.get(n, ""), ensure_ascii=False) for n in used if ours.get(n, "") != theirs.get(n, "")}
    return "".join(f"{{% set {n} = {token} %}}\n" for n, token in told.items()) + template.source


def _fresh_config(plan: Export) -> dict[str, Any]:
    return {
        **plan.family.config_of(plan.spec),
        "max_position_embeddings": plan.recipe.train.seq_len,
        "initializer_range": plan.spec.init_std,
        "use_cache": True,
        "bos_token_id": plan.run.read_tokenizer().bos_id,
        "pad_token_id": None,
    }
