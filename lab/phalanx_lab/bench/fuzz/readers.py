"""Every file and message that Phalanx reads: what its own writers make of it, how it is changed, and how it is read.

A reader that somebody adds to the product belongs here too. Seeds come from the product's own writers, so that changes reach deep.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import torch
from rich.console import Console
from safetensors.torch import save_file

from phalanx.cli.metrics import run_figures, show
from phalanx.cli.predicting.arguments import read_steps
from phalanx.core import events, messages
from phalanx.core.config import DataConfig, Recipe
from phalanx.core.errors import CheckpointError, ConfigError, PhalanxError, Problem, RunError, raise_if
from phalanx.core.files import read_json
from phalanx.core.op_ids import read_op_id
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.core.service_address import parse_service
from phalanx.core.units import read_bytes, read_rate
from phalanx.data import store
from phalanx.data.cache import silent
from phalanx.data.contents import what_changed
from phalanx.data.dataset import Dataset
from phalanx.data.formats import ReadOptions, read_documents
from phalanx.data.loader import Loader
from phalanx.data.preparation import prepare
from phalanx.data.problems import ProblemLog
from phalanx.data.sources import Source, identify, resolve
from phalanx.data.tokenizer import ByteTokenizer, load_tokenizer, read_tokenizer_file, train_bpe
from phalanx.models.families import families
from phalanx.observe.event_log import encode, log_path
from phalanx.observe.index import RunIndex
from phalanx.observe.index.kept import VERSION
from phalanx.observe.page.lanes import step_lanes
from phalanx.observe.page.view import RunView
from phalanx.observe.recorded import find_recording, perfetto_trace, read_run, recovery_figures, recovery_spans
from phalanx.observe.recorded.lanes import Recording
from phalanx.plan.layout.mesh.placements import read_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.mapping import make_folding
from phalanx.plan.mapping.stage_foldings import parse_stages
from phalanx.plan.model import PRESETS
from phalanx.plan.moe.overlap.settings import setting_problems
from phalanx.plan.placement.search import equal_pool, read_host_placement, read_loads
from phalanx.plan.placement.search.hosts import from_copies
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery.state_descriptor import StateDescriptor, StateReport, read_state_descriptor
from phalanx.runtime.checkpoint.folder import CheckpointFolder, RunState
from phalanx.runtime.checkpoint.planner import SavedShare, write_table
from phalanx.runtime.checkpoint.table import SavedBox, SavedTensor
from phalanx.runtime.checkpoint.table_reader import read_table
from phalanx.runtime.membership.membership import Announcement, Generation, Member
from phalanx.runtime.membership.store import Refused, read_request
from phalanx.runtime.membership.votes import Decision, MemberReport
from phalanx.simulate.failures.goodput import read_nodes
from phalanx.simulate.hardware import known_hardware, parse_cluster
from phalanx.simulate.mapping.slow_ranks import straggler_problems
from phalanx.train.huggingface.hugging_face import open_checkpoint, read_config
from phalanx.train.recovery.drained_slots import DrainedSlotsFile
from phalanx_lab.bench.fuzz.mutate import change_bytes, change_json, change_lines, change_number, change_toml

Change = Callable[[bytes, random.Random], bytes]
TEXT = "One day, an expert was chosen by a router. 日本語 and 🙂 came too.\n"
"""Of documents."""
BOMB_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class FuzzReader:
    """One kind of file or message."""

    name: str
    seeds: Sequence[bytes]
    changes: Sequence[Change]
    read: Callable[[bytes, Path], object]
    """Reads changed bytes, with a folder for files. Raises `PhalanxError` where they are refused."""
    every: int = 1
    """Takes so few of its turns; each bomb takes a second."""


def all_readers(home: Path) -> tuple[FuzzReader, ...]:
    """All of them; seeds that are folders are made below `home`."""
    made = [_recipes(), _clusters(), _plans(), _logs(), _checkpoints(home), _published(home)]
    made += [_tokenizers(), _stores(home), _texts(), _talks(), _messages(), _words()]
    return tuple(reader for group in made for reader in group)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A reader of a file of this name."""

    def run(data: bytes, folder: Path) -> object:
        _write(folder / name, data)
        return read(folder / name)

    return run


# ---- recipes, clusters, plans -------------------------------------------------------------------------------------------


def _problems(recipe: Recipe) -> list[Problem]:
    """On 4 ranks, or as few as the degrees ask for."""
    f = recipe.folding
    fewest = f.pp * math.lcm(f.tp * f.cp, (f.ep or 1) * f.etp)
    return run_problems(recipe, world=4 if fewest in (0, 1, 2) else fewest)


def _recipes() -> list[FuzzReader]:
    packaged = sorted((Path(events.__file__).parents[1] / "recipes").glob("*.toml"))
    seeds = [path.read_bytes() for path in packaged]
    seeds.append(dump_recipe(load_recipe(None, ["--train.dtype", "float32", "--launch.ranks", "4"])).encode())
    words = [
        b"--train.steps\n10\n--model.num_layers=4",
        b'--data.sources\n["a", "b"]\n--data.weights=1,2',
        b"--folding.stages\ntp2.ep2,tp2.ep2\n--optim.lr\n3e-4",
    ]
    return [
        FuzzReader(name="recipe", seeds=seeds, changes=(change_toml, change_toml, change_bytes, change_number), read=_file("a.toml", lambda p: load_recipe(p, check=_problems))),
        FuzzReader(name="overrides", seeds=words, changes=(change_bytes, change_number), read=lambda data, _: load_recipe(None, data.decode("utf-8", "replace").split("\n"), check=_problems)),
    ]  # fmt: skip


def _clusters() -> list[FuzzReader]:
    folder = Path(events.__file__).parents[1] / "simulate" / "data" / "clusters"
    tomls = [(folder / f"{name}.toml").read_bytes() for name in known_hardware()]
    import tomllib

    jsons = [json.dumps(tomllib.loads(text.decode())).encode() for text in tomls]
    measured = {
        "gemm": [[256, 256, 256, 1e-5]],
        "links": [["all_reduce", 8, 1e6, 1e-4]],
        "between": [["send", 8, 2, 1e6, 1e-4]],
    }
    jsons = [json.dumps({**json.loads(text), "measured": measured}).encode() for text in jsons]
    trace = b"".join(b"%d,add,node%d\n" % (1000 * i, i) for i in range(20)) + b"20000,remove,node3\n"
    return [
        FuzzReader(name="cluster toml", seeds=tomls, changes=(change_toml, change_toml, change_bytes, change_number), read=_file("c.toml", lambda p: parse_cluster(str(p)).explain())),
        FuzzReader(name="cluster json", seeds=jsons, changes=(change_json, change_json, change_bytes, change_number), read=_file("c.json", lambda p: parse_cluster(f"{p}:16").explain())),
        FuzzReader(name="spot trace", seeds=[trace], changes=(change_bytes, change_number), read=_file("t.csv", read_nodes)),
    ]  # fmt: skip


def _plans() -> list[FuzzReader]:
    loads = np.random.default_rng(0).random((2, 8))
    placement = from_copies(np.ones((2, 4, 4), np.int64), equal_pool(4, 4), floor=2).to_json().encode()
    descriptor = StateDescriptor(
        folding=make_folding(world=4, ep=2), rank=1, slots=((0, (0, 1)),), hosts=(0, 0, 1, 1), racks=(0, 0, 1, 1)
    )
    return [
        FuzzReader(name="placement", seeds=[placement], changes=(change_json, change_json, change_bytes, change_number), read=_file("p.json", lambda p: read_host_placement(read_json(p, where="--current")).explain())),
        FuzzReader(name="loads", seeds=[json.dumps(loads.tolist()).encode()], changes=(change_json, change_bytes, change_number), read=_file("l.json", lambda p: read_loads(read_json(p, where="--loads")))),
        FuzzReader(name="state descriptor", seeds=[json.dumps(d.to_dict()).encode() for d in (descriptor, replace(descriptor, moved=3, rest=descriptor))], changes=(change_json, change_number), read=_file("d.json", lambda p: read_state_descriptor(read_json(p, where="d")))),
    ]  # fmt: skip


# ---- logs ---------------------------------------------------------------------------------------------------------------


def _example(kind: type[events.Event], step: int) -> events.Event:
    """An event of a kind with values that its types allow."""
    import typing

    def value(name: str, of: Any) -> Any:
        first = {int: step, float: 1.5 + step, str: "dp2|ep2" if name == "folding" else "laptop", bool: True}
        origin, given = typing.get_origin(of), typing.get_args(of)
        if of in first:
            return first[of]
        if origin is typing.Literal:
            return given[0]
        if origin is tuple:
            return tuple(value(name, each) for each in (given[:1] * 2 if given[-1] is ... else given))
        if origin not in (None, typing.Union) and issubclass(origin, Mapping):
            return {}
        return value(name, given[0]) if given else None

    hints = typing.get_type_hints(kind)
    return kind(**{name: value(name, of) for name, of in hints.items()})


def _logs() -> list[FuzzReader]:
    elastic = (
        events.RunStarted, events.ClockCompared, events.TeamFormed, events.Operation, events.Collective, events.StepRecorded, events.StepEnded, events.TrainingResumed, events.StepPublished,
    )  # fmt: skip
    rest = (
        events.Validated, events.CheckpointSaved, events.Note, events.Sampled, events.WentBack, events.MoveRecorded, events.Straggling, events.ExpertsMoved, events.WarmupChosen, events.SamplesTaken, events.StatePlaced,
    )  # fmt: skip
    plain = [k for k in (*elastic, *rest) if k not in (events.TeamFormed, events.TrainingResumed)]

    def log(kinds: Sequence[type[events.Event]]) -> bytes:
        told = [_example(kind, step) for step in (1, 2, 3) for kind in kinds] + [_example(events.RunEnded, 3)]
        lines = [encode(event, time_s=1.8e9 + i) for i, event in enumerate(told)]
        return b"".join(line.replace(b'"op_id":"laptop"', b'"op_id":"mb0.L1.fwd.dispatch.rows"') for line in lines)

    def read(data: bytes, folder: Path) -> None:
        _log_at(folder, data)
        refused: PhalanxError | None = None
        for work in (_metrics, _trace):
            try:
                work(folder)
            except PhalanxError as err:
                refused = err
        if refused is not None:
            raise refused

    return [
        FuzzReader(
            name="event log",
            seeds=[log(plain), log([*elastic, *rest])],
            changes=(change_lines, change_lines, change_lines, change_bytes, change_number),
            read=read,
        ),
        FuzzReader(
            name="page of a log",
            seeds=[log([*plain, events.ExpertLoads]), log([*elastic, *rest, events.ExpertLoads])],
            changes=(change_lines, change_lines, change_bytes, change_number),
            read=_page,
        ),
        _indexes(log([*elastic, *rest, events.ExpertLoads])),
    ]


def _page(data: bytes, folder: Path) -> None:
    _log_at(folder, data)
    view = RunView(folder, id="r1")
    view.index.update()
    _sent(view)


def _sent(view: RunView) -> None:
    """All that a browser can ask of a run."""
    found: list[Any] = [view.snapshot(), view.summary(), view.zoom(1, 9), view.experts(0)]
    found += [step_lanes(view.folder, entry) for entry in view.index.course.recorded]
    found += [view.holders(at) for at in (None, *(e["at"] for e in view.index.course.placed[-2:]))]
    json.dumps(found, allow_nan=False)


def _indexes(log: bytes) -> FuzzReader:
    """The index beside its log, with the checksum that belongs to what it says: a stranger knows how it is made."""
    with tempfile.TemporaryDirectory() as home:
        _log_at(Path(home), log)
        index = RunIndex(Path(home))
        index.update()
        index.save()
        seed = index.path.read_bytes()

    def signed(data: bytes, rng: random.Random) -> bytes:
        body = data.partition(b"\n")[2]
        length = int(data.split(b"\n")[0].split()[2])
        text = rng.choice((change_json, change_number))(body[:length], rng)
        rest = text + body[length:]
        return f"{VERSION} {zlib.crc32(rest):08x} {len(text)}\n".encode() + rest

    def read(data: bytes, folder: Path) -> None:
        _log_at(folder, log)
        view = RunView(folder, id="r1")
        view.index.path.write_bytes(data)
        if not view.index.load():
            raise RunError("the index is not believed")
        view.index.update()
        _sent(view)

    return FuzzReader(name="run index", seeds=[seed], changes=(signed, signed, signed, change_bytes), read=read)


def _log_at(folder: Path, log: bytes) -> None:
    _write(log_path(folder, 0), log)


def _metrics(folder: Path) -> None:
    course = read_run(folder)
    with open(os.devnull, "w", encoding="utf-8") as out:
        figures = {**run_figures(course.history, folder=folder), **recovery_figures(course)}
        show(course, figures, Console(file=out, width=100))


def _trace(folder: Path) -> None:
    spans, found = recovery_spans(folder), find_recording(folder)
    if isinstance(found, Recording):
        json.dumps(perfetto_trace(found, spans))


# ---- checkpoints, Hugging Face ------------------------------------------------------------------------------------------


def _checkpoints(home: Path) -> list[FuzzReader]:
    state = RunState(step=7, samples=70, tokens=700, seed=1, loader={"seed": 1, "step": 7}, model=json.loads(PRESETS["tiny"].to_json()), model_hash="a", recipe_hash="b", folding={"tp": 1}, world=2, versions={"torch": "2"})  # fmt: skip
    text = state.to_json().encode()
    boxes = [
        SavedBox(SavedTensor(f"param/{i}", "float32", (4,)), offsets=(0,), sizes=(4,), file="__0_0.distcp", at=10 * i, length=10)
        for i in range(3)
    ]  # fmt: skip
    home.mkdir(parents=True, exist_ok=True)
    write_table(home, [SavedShare.of(boxes, {})])
    table = (home / ".metadata").read_bytes()
    by_torch = pickle.dumps(torch.distributed.checkpoint.FileSystemReader(home).read_metadata())

    def newest(path: Path) -> object:
        folder = CheckpointFolder(path.parent.parent)
        (path.parent.parent / "latest").write_bytes(b"step-00000007")
        return folder.read_state(folder.newest() or 0)

    return [
        FuzzReader(name="run state", seeds=[text], changes=(change_json, change_json, change_bytes, change_number, _signed), read=_file("step-00000007/run_state.json", newest)),
        FuzzReader(name="latest", seeds=[b"step-00000007\n"], changes=(change_bytes, change_number), read=_file("latest", lambda p: CheckpointFolder(p.parent).newest())),
        FuzzReader(name="table of contents", seeds=[table, by_torch], changes=(change_bytes,), read=_file(".metadata", lambda p: read_table(p.parent))),
        FuzzReader(name="away", seeds=[b"1 3\n"], changes=(change_bytes, change_number), read=_file("away", lambda p: DrainedSlotsFile(p)())),
    ]  # fmt: skip


def _signed(data: bytes, rng: random.Random) -> bytes:
    """A changed run state with the right checksum: what a stranger sends."""
    import hashlib

    try:
        body = json.loads(change_json(data, rng))
        body.pop("checksum", None)
        told = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({**body, "checksum": told}).encode()
    except (ValueError, AttributeError, TypeError, UnicodeEncodeError):
        return data


_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16, "intermediate_size": 40, "shared_expert_intermediate_size": 24, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}  # fmt: skip
_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}}  # fmt: skip


def _configs() -> list[dict[str, Any]]:
    """Small ones of every family, plain and with YaRN."""
    configs = []
    for family in families():
        base = {
            **_SIZES,
            **_EXPERTS,
            "model_type": family.model_type,
            **(_LATENT if "deepseek" in family.model_type else {}),
            **({"topk_method": "noaux_tc"} if family.model_type == "deepseek_v3" else {}),
        }
        configs += [base, {**base, **_YARN}]
    return configs


def _spec_of(path: Path) -> None:
    table, problems = read_config(path.parent)
    for each in families():
        if each.model_type == table.get("model_type"):
            problems += each.spec_of(table)[1]
    raise_if(problems, CheckpointError, subject="config.json")


def _published(home: Path) -> list[FuzzReader]:
    configs = _configs()
    folder = home / "published"
    folder.mkdir(parents=True)
    config = next(c for c in configs if c["model_type"] == "olmoe")
    family = next(f for f in families() if f.model_type == "olmoe")
    spec, _ = family.spec_of(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {link.tensor: torch.zeros(link.shape, dtype=torch.bfloat16) for link in family.links(spec, fused=False)}
    save_file(tensors, folder / "model.safetensors")
    weights = (folder / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(weights[:8], "little")
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}).encode()

    def whole(name: str, data: bytes, below: Path) -> object:
        for file in ("config.json", "model.safetensors"):
            if file != name:
                (below / file).write_bytes((folder / file).read_bytes())
        (below / name).write_bytes(data)
        return open_checkpoint(below)

    def header(data: bytes, rng: random.Random) -> bytes:
        changed = change_json(data[8:head], rng) if rng.random() < 0.7 else change_number(data[8:head], rng)
        size = len(changed) if rng.random() < 0.9 else rng.choice((0, 1, 2**31, 2**63, 2**64 - 1))
        return size.to_bytes(8, "little") + changed + data[head:]

    return [
        FuzzReader(name="config.json", seeds=[json.dumps(c).encode() for c in configs], changes=(change_json, change_json, change_bytes, change_number), read=_file("config.json", _spec_of)),
        FuzzReader(name="safetensors index", seeds=[index], changes=(change_json, change_bytes), read=partial(whole, "model.safetensors.index.json")),
        FuzzReader(name="safetensors", seeds=[weights], changes=(header, header, change_bytes), read=partial(whole, "model.safetensors")),
    ]  # fmt: skip


# ---- tokenizers, tokens, texts ------------------------------------------------------------------------------------------


def _word_tokenizers() -> list[bytes]:
    """Of two other kinds, with what a tokenizer may have besides."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Replace("a", "b")]
    )
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    words.add_special_tokens(["<|pad|>"])
    unigram = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("b", -2.5)], unk_id=0, byte_fallback=False
        )
    )
    unigram.decoder = tokenizers.decoders.Metaspace()
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    return [words.to_str().encode(), unigram.to_str().encode()]


def _tokenizers() -> list[FuzzReader]:
    bpe = train_bpe([TEXT * 20], vocab_size=300)

    def use(path: Path) -> None:
        found = read_tokenizer_file(path, eos_token=None)
        ids = found.encode_batch([TEXT, "", "<|endoftext|> </s>", "\x00\x1b"])
        found.decode([*ids[0].tolist(), 0, found.vocab_size - 1])
        found.encode(TEXT)

    def saved(data: bytes, folder: Path) -> object:
        (folder / "tokenizer.json").write_text(bpe)
        (folder / "tokenizer_meta.json").write_bytes(data)
        return load_tokenizer(folder)

    def beside(data: bytes, folder: Path) -> object:
        (folder / "tokenizer.json").write_text(bpe)
        (folder / "tokenizer_config.json").write_bytes(data)
        return read_tokenizer_file(folder / "tokenizer.json", eos_token=None)

    seeds = [bpe.encode(), *_word_tokenizers()]
    meta = [
        b'{"kind": "byte"}',
        json.dumps({"kind": "file", "eos_token": "<|endoftext|>", "name": "a", "sum": ""}).encode(),
    ]
    return [
        FuzzReader(name="tokenizer.json", seeds=seeds, changes=(change_json, change_json, change_bytes, change_number), read=_file("tokenizer.json", use)),
        FuzzReader(name="tokenizer of a run", seeds=meta, changes=(change_json, change_bytes), read=saved),
        FuzzReader(name="tokenizer_config.json", seeds=[b'{"eos_token": {"content": "<|endoftext|>"}, "eos_token_id": [256]}'], changes=(change_json, change_bytes), read=beside),
    ]  # fmt: skip


def _use_store(folder: Path, source: Source) -> None:
    store.is_complete(folder)
    opened = store.open_store(folder, source, ByteTokenizer())
    if not any(s.num_tokens > 1 for s in opened.streams["train"]):
        return
    data = Dataset(
        name="train", pools=(opened.streams["train"],), weights=(1.0,), fingerprint="a", vocab_size=257, eos_id=256
    )
    loader = Loader(data, seq_len=64, global_batch=4, micro_batch=2, seed=0)
    loader.microbatches(0)
    store.unigram_loss(opened.counts)


def _stores(home: Path) -> list[FuzzReader]:
    corpus = home / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(40)))
    config = DataConfig(sources=(str(corpus),), cache=str(home / "cache"), tokenizer="byte")
    prepare(config)
    (source,) = (identify(s, home / "cache", silent) for s in resolve(config))
    (made,) = (p.parent for p in (home / "cache").rglob("meta.json"))
    files = {p.name: p.read_bytes() for p in made.iterdir()}
    talks = _prepared_talks(home)
    old = json.loads(files["meta.json"])
    old = {k: v for k, v in old.items() if k not in ("sums", "checksum")}

    def read(name: str, meta: bytes, data: bytes, folder: Path) -> None:
        for file, content in {**files, "meta.json": meta, name: data}.items():
            (folder / file).write_bytes(content)
        _use_store(folder, source)

    names = [n for n in sorted(files) if n != "meta.json"]
    return [
        FuzzReader(
            name="meta.json",
            seeds=[files["meta.json"], json.dumps(old).encode()],
            changes=(change_json, change_bytes, change_number),
            read=partial(read, "meta.json", files["meta.json"]),
        ),
        *(
            FuzzReader(
                name=f"prepared {n}",
                seeds=[files[n]],
                changes=(change_bytes,),
                read=partial(read, n, json.dumps(old).encode()),
            )
            for n in names
        ),
        *talks,
        *_megatron(),
        _identities(home, config),
        _contents(home),
    ]


def _identities(home: Path, config: DataConfig) -> FuzzReader:
    """What the cache of `_stores` remembers of its source."""
    (memo,) = (home / "cache" / "identities").glob("*.json")

    def identity(data: bytes, folder: Path) -> None:
        _write(folder / "identities" / memo.name, data)
        identify(resolve(config)[0], folder, silent)

    return FuzzReader(name="identity", seeds=[memo.read_bytes()], changes=(change_json, change_bytes), read=identity)


def _contents(home: Path) -> FuzzReader:
    """What the cache of `_stores` remembers of what its data was made of."""
    (memo,) = (home / "cache" / "contents").glob("*.json")

    def read(data: bytes, folder: Path) -> None:
        _write(folder / "contents" / "before.json", data)
        _write(folder / "contents" / "now.json", memo.read_bytes())
        what_changed(folder, "before", "now")

    return FuzzReader(name="contents", seeds=[memo.read_bytes()], changes=(change_json, change_bytes), read=read)


def _prepared_talks(home: Path) -> list[FuzzReader]:
    """What conversations have beside tokens."""
    corpus, template, cache = home / "talks.jsonl", home / "template.jinja", home / "talks"
    said = [{"role": "user", "content": TEXT[:20]}, {"role": "assistant", "content": TEXT[:30]}]
    corpus.write_text("".join(json.dumps({"messages": [*said, said[i % 2]]}) + "\n" for i in range(40)))
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = DataConfig(sources=(str(corpus),), cache=str(cache), tokenizer="byte", chat_template=str(template))
    prepare(config)
    (source,) = (identify(s, cache, silent) for s in resolve(config))
    (made,) = (p.parent for p in cache.rglob("meta.json"))
    files = {p.name: p.read_bytes() for p in made.iterdir()}
    meta = {k: v for k, v in json.loads(files["meta.json"]).items() if k not in ("sums", "checksum")}

    def read(name: str, data: bytes, folder: Path) -> None:
        for file, content in {**files, "meta.json": json.dumps(meta).encode(), name: data}.items():
            (folder / file).write_bytes(content)
        _use_store(folder, source)

    names = ("answers.bin", "answers.sums.npy", "0.train.first.npy")
    return [
        FuzzReader(name=f"prepared {n}", seeds=[files[n]], changes=(change_bytes,), read=partial(read, n))
        for n in names
    ]


def _megatron() -> list[FuzzReader]:
    tokens = np.arange(200, dtype="<u2") % 250
    lengths, starts = np.full(10, 20, "<i4"), np.arange(11, dtype="<i8")
    pointers = np.arange(10, dtype="<i8") * 40
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 10, 11)
    index = head + lengths.tobytes() + pointers.tobytes() + starts.tobytes()

    def read(name: str, data: bytes, folder: Path) -> None:
        for file, content in {"a.idx": index, "a.bin": tokens.tobytes(), name: data}.items():
            (folder / file).write_bytes(content)
        (source,) = resolve(DataConfig(sources=(str(folder / "a"),)))
        target = folder / "store"
        target.mkdir(exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        store.write_store(target, source, ByteTokenizer(), fraction=0.1, log=ProblemLog(), progress=silent)
        store.open_store(target, source, ByteTokenizer())

    def words(data: bytes, rng: random.Random) -> bytes:
        """A number of the tables becomes one that is near a limit."""
        at = rng.randrange(26, len(data) - 7, 4)
        number = rng.choice((0, 1, -1, 2**62, -(2**62), 2**63 - 40, 40, 400, rng.randrange(500)))
        return data[:at] + (number % 2**64).to_bytes(8, "little") + data[at + 8 :]

    return [
        FuzzReader(name="Megatron index", seeds=[index], changes=(words, words, change_bytes), read=partial(read, "a.idx")),
        FuzzReader(name="Megatron tokens", seeds=[tokens.tobytes()], changes=(change_bytes,), read=partial(read, "a.bin")),
    ]  # fmt: skip


def _read_all(path: Path) -> None:
    log = ProblemLog()
    for document in read_documents(path, ReadOptions(), log):
        assert document.text.encode() is not None
    log.raise_if_any()


def _read_talks(path: Path) -> None:
    log = ProblemLog()
    for document in read_documents(path, ReadOptions(text_field="messages", conversations=True), log):
        assert document.messages and all(text.encode() is not None for _, text in document.messages)
    log.raise_if_any()


def _talks() -> list[FuzzReader]:
    said = [{"role": "user", "content": TEXT, "tool_calls": None}, {"role": "assistant", "content": "ab"}]
    rows: list[dict[str, Any]] = [
        {"messages": said[: 1 + i % 2] * (1 + i % 3), "n": i, "system": "", "tools": []} for i in range(30)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    schema = pa.schema({"messages": pa.list_(message), "system": pa.string(), "tools": pa.list_(pa.string())})
    table = pa.Table.from_pylist(
        [
            {"messages": [{k: m[k] for k in ("role", "content")} for m in row["messages"]], "system": "", "tools": []}
            for row in rows
        ],
        schema=schema,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    tables = [_packed(table, codec, use_dictionary=codec == "none") for codec in ("none", "zstd")]
    return [
        FuzzReader(name="conversations .jsonl", seeds=[lines], changes=(change_lines, change_lines, change_bytes), read=_file("a.jsonl", _read_talks)),
        FuzzReader(name="conversations .parquet", seeds=tables, changes=(change_bytes,), read=_file("a.parquet", _read_talks)),
        FuzzReader(name="conversations .arrow", seeds=[bytes(sink.getvalue())], changes=(change_bytes,), read=_file("a.arrow", _read_talks)),
    ]  # fmt: skip


def _texts() -> list[FuzzReader]:
    lines = "".join(json.dumps({"text": f"{i} {TEXT}", "n": i}) + "\n" for i in range(30)).encode()
    packed = gzip.compress(lines, mtime=0)
    zipped = pa.compress(lines, codec="zstd", asbytes=True)
    repeat = BOMB_BYTES // (16 << 20)
    zeros = [gzip.compress(each * (16 << 20), mtime=0) * repeat for each in (b"0", b"\n")]
    frames = [pa.compress(each * (16 << 20), codec="zstd", asbytes=True) * repeat for each in (b"0", b"\n")]
    tables = [_parquet(lines, c, d) for c in ("none", "snappy", "gzip", "zstd") for d in (True, False)]

    streams = [_stream(lines, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]

    def inside(pack: Callable[[bytes], bytes]) -> Change:
        return lambda data, rng: pack(change_lines(lines, rng))

    gz, zst = partial(gzip.compress, mtime=0), partial(pa.compress, codec="zstd", asbytes=True)
    return [
        FuzzReader(name=".txt", seeds=[TEXT.encode() * 30], changes=(change_bytes,), read=_file("a.txt", _read_all)),
        FuzzReader(name=".jsonl", seeds=[lines], changes=(change_lines, change_lines, change_bytes), read=_file("a.jsonl", _read_all)),
        FuzzReader(name=".jsonl.gz", seeds=[packed], changes=(change_bytes, change_bytes, inside(gz)), read=_file("a.jsonl.gz", _read_all)),
        FuzzReader(name=".jsonl.zst", seeds=[zipped], changes=(change_bytes, change_bytes, inside(zst)), read=_file("a.jsonl.zst", _read_all)),
        FuzzReader(name=".parquet", seeds=tables, changes=(change_bytes,), read=_file("a.parquet", _read_all)),
        FuzzReader(name=".arrow", seeds=streams, changes=(change_bytes,), read=_file("a.arrow", _read_all)),
        FuzzReader(name="bombs of gz", every=50, seeds=zeros, changes=(_rarely,), read=_file("a.jsonl.gz", _read_all)),
        FuzzReader(name="bombs of zst", every=50, seeds=frames, changes=(_rarely,), read=_file("a.jsonl.zst", _read_all)),
        FuzzReader(name="bombs of parquet", every=50, seeds=_parquet_bombs(), changes=(change_bytes,), read=_file("a.parquet", _read_all)),
    ]  # fmt: skip


def _rarely(data: bytes, rng: random.Random) -> bytes:
    """Most often the short begin of a bomb: a whole one takes a second."""
    return data if rng.random() < 0.02 else change_bytes(data[: rng.randrange(1, 20_000)], rng)


def _stream(lines: bytes, kind: pa.DataType) -> bytes:
    """An Arrow stream as `datasets` saves it, with several batches."""
    rows, sink = [json.loads(line) for line in lines.splitlines()], pa.BufferOutputStream()
    table = pa.table({"n": [r["n"] for r in rows], "text": pa.array([r["text"] for r in rows], kind)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return bytes(sink.getvalue())


def _parquet(lines: bytes, codec: str, dictionary: bool) -> bytes:
    rows = [json.loads(line) for line in lines.splitlines()]
    return _packed(
        pa.table({"text": [r["text"] for r in rows], "n": [r["n"] for r in rows]}), codec, use_dictionary=dictionary
    )


def _parquet_bombs() -> list[bytes]:
    """One long value; the same value again and again; many empty ones."""
    long = pa.table({"text": pa.array(["0" * (100 << 20)])})
    same = pa.DictionaryArray.from_arrays(np.zeros(200_000, np.int32), pa.array(["0" * (1 << 20)]))
    none = pa.table({"text": pa.array([""] * 3_000_000)})
    return [
        _packed(long, "zstd", use_dictionary=False),
        _packed(pa.table({"text": same}), "zstd", use_dictionary=True),
        _packed(none, "zstd", use_dictionary=True),
    ]


def _packed(table: pa.Table, codec: str, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression=codec, store_schema=False, write_statistics=False, **options)
    return out.getvalue()


# ---- messages and words -------------------------------------------------------------------------------------------------


def _messages() -> list[FuzzReader]:
    members = (Member("local.0.ab", "local"), Member("local.1.cd", "local"))
    generation = Generation(number=3, epoch="e", members=members, left=(("local.2.ef", 2),), why="killed", lost_s=1.5)
    who = Announcement(member=members[0], plan_hash="p", version="v", last=generation, data={"a": 1})
    at = StateDescriptor(
        folding=make_folding(world=4, ep=2), rank=1, slots=((0, (0, 1)),), hosts=(0, 0, 1, 1), racks=(0, 0, 1, 1)
    )
    report = MemberReport(uid="local.0.ab", step=7, holds=True, about=StateReport(descriptor=at, host="h"))
    values: list[Any] = [
        {"a": [1, 2.5, None, True], ("b", 1): {1, 2}, "c": b"xyz", "d": Path("a/b")},
        np.arange(12, dtype=np.float32).reshape(3, 4),
        ConfigError.of("a.b", 3, "must be 4", subject="the recipe"),
        [Box((0, 0), (2, 3)), SavedShare.of([SavedBox(SavedTensor("a", "float32", (4,)), offsets=(0,), sizes=(4,), file="f", at=0, length=10)], {})],
        from_copies(np.ones((1, 4, 2), np.int64), equal_pool(2, 4), floor=1),
    ]  # fmt: skip
    sent = [messages.encode(value) for value in values]
    requests = [b'["wait", "gen/3", 1.5]', b'["put", "a", "b"]', b'["cancel"]', b'["delete_below", "a", 3]']

    def request(data: bytes, _: Path) -> None:
        try:
            read_request(data)
        except Refused as err:
            raise ConfigError.of("request", None, str(err), subject="a request") from err

    tree = (change_json, change_json, change_bytes, change_number)
    return [
        FuzzReader(name="message of a rank", seeds=sent, changes=tree, read=lambda data, _: messages.decode(data)),
        FuzzReader(name="request to the store", seeds=requests, changes=tree, read=request),
        FuzzReader(name="generation", seeds=[generation.to_json().encode()], changes=tree, read=lambda data, _: Generation.from_json(_text(data)).lost_of(generation)),
        FuzzReader(name="announcement", seeds=[who.to_json().encode()], changes=tree, read=lambda data, _: Announcement.from_json(_text(data)).member.uid),
        FuzzReader(name="member's report", seeds=[report.to_json().encode()], changes=tree, read=lambda data, _: MemberReport.from_json(_text(data)).history),
        FuzzReader(name="decision", seeds=[b"commit go on", b"abort"], changes=(change_bytes,), read=lambda data, _: Decision.read(_text(data))),
    ]  # fmt: skip


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _words() -> list[FuzzReader]:
    """Small languages of settings, arguments and names."""

    def all_of(data: bytes, _: Path) -> None:
        text = data.decode("utf-8", "replace")
        problems = [p for p in (read_rate(text, where="x")[1],) if p is not None]
        problems += setting_problems(text) + straggler_problems([text], None, None)
        parse_service(text), read_bytes(text), read_op_id(text)
        for read in (read_steps, parse_cluster, lambda t: parse_stages(t.split(",")), lambda t: read_layout(t, (8, 8))):
            try:
                read(text)
            except PhalanxError as err:
                problems.append(Problem(where="text", value=text[:20], rule=str(err)[:40]))
        raise_if(problems, ConfigError, subject="words")

    seeds = [
        b"10:12", b"h100x128", b"tp2.ep2,tp1.ep4", b"2x2 S0S1", b"4 R P1", b"1gbit", b"256MB", b"1.5e3mbit", b"host=3:1.2", b"rank=7:2",
        b"host=10%:1.5", b"coarse:4", b"tiles:rows=64,share=2", b"node0:29400", b"etcd://a:2379/run", b"mb0.L3.fwd.dispatch.rows",
    ]  # fmt: skip
    return [FuzzReader(name="words", seeds=seeds, changes=(change_bytes, change_number), read=all_of)]
