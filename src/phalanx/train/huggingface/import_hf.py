"""A Hugging Face checkpoint becomes a run: its recipe, its tokenizer, and a checkpoint of step 0 from which any mapping goes on.

    plan_import    config.json and the command line -> recipe, model, tokenizer; nothing is written
    import_rank    one rank: read 1/n of every tensor, write it as checkpoint of step 0, part by part

Must never change: a rank reads its share of the elements and nothing else; master weights are the numbers on disk, widened without rounding;
a run that has checkpoints is never written over.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.reading import parse_table
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.core.settings import describe_settings
from phalanx.data import (
    Beginnings,
    ByteTokenizer,
    ChatTemplate,
    Tokenizer,
    beginnings,
    parse_choice,
    read_tokenizer_file,
    template_of,
)
from phalanx.models.families import NameLink, shapes_of
from phalanx.plan import run_problems
from phalanx.plan.layout import boxes_of_range
from phalanx.plan.mapping import resolve_mapping
from phalanx.plan.model import ModelSpec, buffers, resolve_model, settings_for
from phalanx.runtime.checkpoint import CheckpointManager, RunState
from phalanx.runtime.comm import Peers, own_group
from phalanx.runtime.processes import StopRequest, WorldInfo, close_world, init_world
from phalanx.runtime.state import BoxTensor
from phalanx.train import moment_dtype, state_dtype
from phalanx.train.huggingface.hugging_face import BoxReader, HfCheckpoint
from phalanx.train.setup import DTYPES, PATIENCE_S, RunFolder, lost_peers, versions

FINE_TUNING_LR = 2e-5
"""Highest learning rate for weights that are trained already (Llama 2, arXiv 2307.09288, section 3.1): that of a model of random weights would wreck them."""
KEPT_FOLDER = "hugging_face"
"""Folder in the run folder for the small files of the checkpoint, for its tokenizer and for the way back."""
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
TYPES_FILE = "phalanx_types.json"
"""Beside them: {tensor: type} of what goes out again, the commonest type under the empty name. It stays here."""
LEFT_OUT = ("*.index.json", TYPES_FILE)
TRAINING_SETTINGS = (
    "router.z_loss",
    "router.aux_loss",
    "router.aux_scope",
    "router.bias_rate",
    "model.mtp_layers",
    "model.mtp_weight",
)
"""Settings of model and router that no config.json decides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Import:
    """Everything that is known before ranks start."""

    checkpoint: HfCheckpoint
    recipe: Recipe
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    remarks: tuple[str, ...] = ()
    """What was decided that a person may want otherwise."""

    @property
    def folder(self) -> RunFolder:
        return _run_folder(self.recipe)


def _run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(Path(recipe.run.folder) / recipe.run.name)


# ---- what the run will be --------------------------------------------------------------------------------------------------


def plan_import(checkpoint: HfCheckpoint, overrides: Sequence[str]) -> Import:
    """The run that `checkpoint` becomes. Raises `ConfigError` (`DataError` for a broken tokenizer) with all that is wrong."""
    said = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
    raise_if(_decided_problems(said), ConfigError, subject="the arguments")
    own = checkpoint.path / "tokenizer.json"
    derived = _derived(checkpoint)
    remarks: tuple[str, ...] = ()
    if "data.tokenizer" not in said and own.is_file():
        derived["data.tokenizer"] = own
        begin = beginnings(own)
        if begin.taken:
            derived["data.bos_token"] = begin.taken
        if begin.flag not in (None, begin.template) and "data.bos_token" not in said:
            remarks = (_disagreement(begin),)
    words = [w for name, value in derived.items() if name not in said for w in (f"--{name}", _text(value))]
    recipe = load_recipe(None, [*words, *overrides], check=lambda r: run_problems(r, world=r.launch.ranks))
    raise_if(_recipe_problems(checkpoint, recipe), ConfigError, subject="the import")
    tokenizer = _read_tokenizer(recipe)
    raise_if(_vocab_problems(checkpoint, recipe, tokenizer), ConfigError, subject="the import")
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer.vocab_size)
    template = template_of(recipe.data)
    if derived.get("data.tokenizer") is own:  # the run goes on without the folder it came from
        kept = str(_run_folder(recipe).path / KEPT_FOLDER)
        recipe = replace(recipe, data=replace(recipe.data, tokenizer=kept))
    return Import(
        checkpoint=checkpoint, recipe=recipe, spec=spec, tokenizer=tokenizer, template=template, remarks=remarks
    )


def _disagreement(begin: Beginnings) -> str:
    """Of two files about what begins texts."""
    flag, template = (repr(token) if token else "no token" for token in (begin.flag, begin.template))
    return f"texts begin with {flag} by add_bos_token in tokenizer_config.json, with {template} by tokenizer.json: the former was taken; --data.bos_token TOKEN (or none) decides otherwise"


def _decided_problems(said: set[str]) -> list[Problem]:
    known = {s.name for s in describe_settings() if s.section in ("model", "router")}
    rule = "is decided by the checkpoint's config.json"
    decided = sorted((said & known) - set(TRAINING_SETTINGS))
    return [Problem(where=f"--{name}", value="given", rule=rule, hint="leave it out") for name in decided]


def _derived(checkpoint: HfCheckpoint) -> dict[str, object]:
    """Settings that follow from the checkpoint."""
    model, router = settings_for(checkpoint.spec)
    training = {name.partition(".")[2] for name in TRAINING_SETTINGS if name.startswith("router.")}
    values: dict[str, object] = {f"model.{k}": v for k, v in vars(model).items()}
    values |= {f"router.{k}": v for k, v in vars(router).items() if k not in training and k != "force"}
    values["run.name"] = checkpoint.path.resolve().name
    values["optim.lr"] = FINE_TUNING_LR
    return {k: v for k, v in values.items() if v is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _recipe_problems(checkpoint: HfCheckpoint, recipe: Recipe) -> list[Problem]:
    problems = []
    choice, where = recipe.data.tokenizer, "data.tokenizer"
    if choice.startswith("bpe:"):
        rule = f"a tokenizer trained here does not fit the weights, and {checkpoint.path} has no tokenizer.json"
        hint = "give the path of the model's tokenizer.json, or byte for a model of bytes"
        problems.append(Problem(where=where, value=choice, rule=rule, hint=hint))
    wide = next((n for n, t in checkpoint.tensors.items() if t.dtype == "F64"), None)
    if wide is not None and recipe.train.dtype != "float64":
        rule = f"would round {wide}, which is float64"
        problems.append(
            Problem(where="train.dtype", value=recipe.train.dtype, rule=rule, hint="use --train.dtype float64")
        )
    lost = _lost_buffers(checkpoint, recipe)
    if lost:
        rule = f"has no expert biases to receive those of the checkpoint ({lost[0]}, ...)"
        problems.append(Problem(where="router.bias_rate", value=0.0, rule=rule, hint="use 0.001"))
    folder = _run_folder(recipe)
    steps = folder.checkpoints.steps()
    if steps:
        rule = f"{folder.path} holds checkpoints of steps {', '.join(map(str, steps))}"
        hint = "give the run another --run.name, or remove that folder"
        problems.append(Problem(where="run.name", value=recipe.run.name, rule=rule, hint=hint))
    return problems


def _vocab_problems(checkpoint: HfCheckpoint, recipe: Recipe, tokenizer: Tokenizer) -> list[Problem]:
    """Tokens that the embedding has no rows for."""
    if tokenizer.vocab_size <= checkpoint.spec.vocab:
        return []
    rule = f"has ids up to {tokenizer.vocab_size - 1}, but by config.json vocab_size is {checkpoint.spec.vocab}"
    hint = "give one that fits, or have transformers resize_token_embeddings first"
    return [Problem(where="data.tokenizer", value=recipe.data.tokenizer, rule=rule, hint=hint)]


def _lost_buffers(checkpoint: HfCheckpoint, recipe: Recipe) -> list[str]:
    wanted = dict(buffers(checkpoint.spec))
    kept = dict(buffers(resolve_model(recipe.model, recipe.router)))
    return sorted(wanted.keys() - kept.keys())


def _read_tokenizer(recipe: Recipe) -> Tokenizer:
    choice = parse_choice(recipe.data)
    if choice is None:
        return ByteTokenizer()
    assert isinstance(choice, Path)  # a vocabulary to be trained was refused
    return read_tokenizer_file(choice, eos_token=recipe.data.eos_token, bos_token=recipe.data.bos_token)


# ---- ranks -------------------------------------------------------------------------------------------------------------------


def import_rank(job: Import, info: WorldInfo, stop: StopRequest) -> int:
    """Read and write this rank's share. Collective; returns the exit code."""
    timeout_s = job.recipe.launch.timeout_s
    init_world(info, timeout_s=timeout_s)
    lost = lost_peers()
    groups = [own_group(info.world, timeout_s=timeout_s, patience_s=PATIENCE_S) for _ in range(2)]
    peers = Peers(groups[0], lost=lost)
    locks = []

    def prepare() -> None:
        job.folder.create(shared=job.recipe.run.access == "group")
        locks.append(job.folder.lock())
        _keep_small_files(job.checkpoint, job.folder.path / KEPT_FOLDER)
        job.folder.write_recipe(job.recipe, job.tokenizer, job.template)

    peers.first(prepare)
    compute = DTYPES[job.recipe.train.dtype]
    moments = moment_dtype(job.recipe.optim, compute)
    boxes = share_of(job.spec, rank=info.rank, world=info.world, dtype=state_dtype(compute), moments=moments)
    manager = CheckpointManager(job.folder.checkpoints.path, group=groups[1], asynchronous=False, lost=lost)
    manager.open()
    with BoxReader(job.checkpoint) as reader:
        manager.save(boxes, _run_state(job, info), fill=reader.fill)
        manager.finish()
    read = peers.gather(reader.bytes_read)
    if info.rank == 0:
        print(_told(job, read))
    peers.part(timeout_s=timeout_s)
    close_world()
    return 0


def share_of(
    spec: ModelSpec, *, rank: int, world: int, dtype: torch.dtype, moments: torch.dtype | None = None
) -> list[BoxTensor]:
    """Boxes of elements [n*rank/world, n*(rank+1)/world) of every tensor of a run's state, without memory for them (device "meta").
    `dtype` of masters, `moments` of both moments (None: the same).

    A checkpoint remembers no mapping, so an import needs none: these shares are equal whatever the run's mapping is.
    """
    kinds = {name: ("buffer",) for name, _ in buffers(spec)}
    out = []
    for name, shape in shapes_of(spec).items():
        num = torch.Size(shape).numel()
        parts = boxes_of_range(shape, num * rank // world, num * (rank + 1) // world)
        for kind in kinds.get(name, ("master", "exp_avg", "exp_avg_sq")):
            of = {"buffer": torch.float32, "master": dtype}.get(kind, moments or dtype)
            out += [
                BoxTensor(f"{kind}/{name}", shape, box, torch.empty(box.sizes, dtype=of, device="meta"), primary=True)
                for box, _ in parts
            ]
    return out


def _keep_small_files(source: HfCheckpoint, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in small_files(source.path):
        shutil.copyfile(path, target / path.name)
    types = types_on_disk(source)
    most = Counter(types.values()).most_common(1)[0][0]
    (target / TYPES_FILE).write_text(json.dumps({"": most} | {n: t for n, t in types.items() if t != most}))


def types_on_disk(source: HfCheckpoint) -> dict[str, str]:
    """Type of each tensor that an export writes, in the words of safetensors: its own, or that of the one with all experts it was read from."""
    read: dict[str | None, list[NameLink]] = defaultdict(list)
    for link in source.links:
        read[link.param].append(link)

    def origin(link: NameLink) -> str:
        if link.tensor in source.tensors:
            return link.tensor
        return next(r.tensor for r in read[link.param] if r.box.intersection(link.box))

    links = source.family.links(source.spec)
    return {link.tensor: source.tensors[origin(link)].dtype for link in links if link.param is not None}


def small_files(folder: Path) -> list[Path]:
    """config.json, the tokenizer's files and the like."""
    found = {p for pattern in SMALL_FILES for p in folder.glob(pattern)}
    return sorted(found - {p for pattern in LEFT_OUT for p in folder.glob(pattern)})


def _run_state(job: Import, info: WorldInfo) -> RunState:
    t = job.recipe.train
    folding = resolve_mapping(
        job.recipe.folding,
        job.spec,
        world=info.world,
        seq_len=t.seq_len,
        global_batch=t.global_batch,
        micro_batch=t.micro_batch,
    )
    return RunState(
        step=0, samples=0, tokens=0, seed=t.seed,
        loader={},  # no sample was drawn: the first training run decides data and batch
        model=parse_table(job.spec.to_json(), where="the model"), model_hash=job.spec.hash,
        recipe_hash=hashlib.sha256(dump_recipe(job.recipe).encode()).hexdigest()[:16],
        folding=folding.to_dict(), world=info.world, versions=versions(),
    )  # fmt: skip


def _told(job: Import, read: Sequence[int]) -> str:
    total = job.checkpoint.num_bytes
    share = f"; each of {len(read)} ranks read at most {max(read) / max(total, 1):.1%} of it" if len(read) > 1 else ""
    lines = [
        replace(job.spec, name=f"{job.recipe.run.name} ({job.checkpoint.family.model_type})").explain(),
        f"read {len(job.checkpoint.tensors)} tensors, {total / 1e6:,.1f} MB, from {job.checkpoint.path}{share}",
    ]
    if job.checkpoint.ignored:
        names = job.checkpoint.ignored
        lines.append(f"left {len(names)} tensors that are no part of this model: {', '.join(names[:3])}, ...")
    path = job.folder.path
    if job.recipe.optim.lr == FINE_TUNING_LR:
        lines.append(
            f"optim.lr = {FINE_TUNING_LR:g}, with which pretrained weights are commonly tuned (arXiv 2307.09288); --optim.lr sets another"
        )
    lines += job.remarks
    run, recipe = shlex.quote(str(path)), shlex.quote(f"{path}/recipe.toml")
    lines.append(f"{path} is a run at step 0: phalanx train {recipe}, or phalanx generate {run} PROMPT")
    return "\n".join(lines)
