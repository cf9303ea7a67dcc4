"""Recipes in and out: TOML and ``--section.key value`` become a `Recipe`, and a `Recipe` becomes TOML again.

Decides the order *default < recipe file < command line*, and that all problems of both come together, each named where the user wrote
it (``recipes/a.toml: train.steps`` or ``--train.steps``). Must never change: loading what `dump_recipe` wrote gives the same recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, nearest, raise_if
from phalanx.core.process import say
from phalanx.core.processor import Processor, this_processor
from phalanx.core.reading import MOST_TOML, MalformedError, parse_toml, read_text, toml_value
from phalanx.core.rules import EFFECTS, LIMITS, Effect, Limit, inert_settings, recipe_problems, value_of
from phalanx.core.service_address import is_loopback
from phalanx.core.settings import (
    IllegalValueError,
    Setting,
    Value,
    describe_settings,
    section_docs,
    sections,
)

__all__ = [
    "EFFECTS", "LIMITS", "Effect", "Limit", "Setting", "describe_settings", "dump_recipe", "inert_settings",
    "load_recipe", "native_dtype", "recipe_file", "recipe_problems", "untrusted", "value_of",
]  # fmt: skip

Check = Callable[[Recipe], Sequence[Problem]]
Dtype = Literal["bfloat16", "float32", "float64"]
AutoDtype = Callable[[Recipe], Dtype]
Device = Literal["auto", "cpu", "cuda"]
AutoDevice = Callable[[Recipe], Device]

PACKAGED = Path(__file__).parents[1] / "recipes"
"""Recipes that come with Phalanx: `recipes/NAME.toml` names one where the reader's own folder has no such file."""
READ_BY_CHECKS = (
    "model.", "router.", "dispatch.", "folding.", "pipeline.",
    "train.seq_len", "train.global_batch", "train.micro_batch", "launch.ranks",
)  # fmt: skip
"""Beginnings of the settings that a `Check` looks at: it is silent where one of them could not be read."""


def no_device(recipe: Recipe) -> Device:
    """What `launch.device = "auto"` is where nobody has looked at a machine: it stays so, and every plan counts it as cpu."""
    return recipe.launch.device


def native_dtype(recipe: Recipe, processor: Processor | None = None) -> Dtype:
    """What `train.dtype = "auto"` is in a new run: what `processor` (None: this machine's) computes fastest in; bfloat16 on devices, and on several hosts, which need not be alike."""
    if recipe.launch.device == "cuda" or recipe.resilience.service is not None:
        return "bfloat16"
    return (processor or this_processor()).dtype


def load_recipe(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    world: int | None = None,
    check: Check | None = None,
    auto_dtype: AutoDtype = native_dtype,
    auto_device: AutoDevice = no_device,
    tell: Callable[[str], None] = say,
) -> Recipe:
    """The recipe in `path` (None: all defaults; `recipes/laptop.toml` and its neighbours come with Phalanx) with `overrides` such as
    ``["--train.steps", "10", "--optim.lr=3e-4"]``.

    `world` adds the rules that need the number of ranks, `check` those of the caller (the model's: `plan/recipe.py`), so that their
    problems come together with the others. A setting of the file that has no effect beside an override is left out, which `tell` hears. `auto_dtype` says what `train.dtype = "auto"` is; the recipe
    that is returned says no "auto" there. `auto_device` says what `launch.device = "auto"` is, first, and may raise `ConfigError`. Raises `ConfigError` with all problems.
    """
    reading = _Reading(settings={s.name: s for s in describe_settings()})
    if path is not None:
        _read_file(reading, Path(path))
    _read_overrides(reading, overrides)
    recipe = _without_overridden(reading, _build(reading.values), tell=tell)
    recipe = _with_device(reading, recipe, auto_device)
    if recipe.train.dtype == "auto":
        recipe = replace(recipe, train=replace(recipe.train, dtype=auto_dtype(recipe)))
    problems = recipe_problems(recipe, world=world, given=reading.values, broken=reading.broken)
    if check is not None and not any(name.startswith(READ_BY_CHECKS) for name in reading.broken):
        seen = {p.where for p in problems}
        problems += [p for p in check(recipe) if p.where.partition("[")[0] not in seen]
    located = [replace(p, where=reading.located(p.where)) for p in problems]
    raise_if(reading.problems + located, ConfigError, subject="the recipe")
    return recipe


def _with_device(reading: _Reading, recipe: Recipe, auto_device: AutoDevice) -> Recipe:
    """The recipe with the device that "auto" is; as it stands where that is a problem, which is kept. Where there are problems nobody looks, which takes seconds: it may be GPUs."""
    if recipe.launch.device != "auto":
        return recipe
    if reading.problems:
        reading.broken.add("launch.device")
    try:
        device: Device = "cuda" if reading.problems else auto_device(recipe)
    except ConfigError as error:
        reading.problems += error.problems
        return recipe
    return replace(recipe, launch=replace(recipe.launch, device=device))


@dataclass
class _Reading:
    """What has been read so far."""

    settings: Mapping[str, Setting]
    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Setting -> where the user wrote it."""
    broken: set[str] = field(default_factory=set)
    """Settings whose value is unknown because of a problem already found: nothing more is said about them."""
    problems: list[Problem] = field(default_factory=list)

    def take(self, name: str, origin: str, *, raw: object, text: bool) -> None:
        """Read one value of a known setting."""
        setting = self.settings[name]
        self.origins[name] = origin
        try:
            self.values[name] = setting.from_text(str(raw)) if text else setting.from_toml(raw)
            self.broken.discard(name)
        except IllegalValueError as error:
            self.values.pop(name, None)
            self.broken.add(name)
            self.add(origin, raw, error.rule, error.hint)

    def located(self, where: str) -> str:
        """`where` (one setting, or several with commas) as the user wrote it: of several, those that were written down, and their file once."""
        where, bracket, index = where.partition("[")
        first, *others = [self.origins[name] for name in where.split(", ") if name in self.origins] or [where]
        file, colon, _ = first.rpartition(": ")
        return ", ".join([first, *(origin.removeprefix(file + colon) for origin in others)]) + bracket + index

    def add(self, where: str, value: object, rule: str, hint: str = "") -> None:
        self.problems.append(Problem(where=where, value=value, rule=rule, hint=hint))


def _without_overridden(reading: _Reading, recipe: Recipe, *, tell: Callable[[str], None]) -> Recipe:
    """The recipe without settings of its file that an override has made inert: whoever wrote the file could not know."""
    over = {name for name, origin in reading.origins.items() if origin == f"--{name}"}
    for name, effect in inert_settings(recipe).items():
        if name in reading.values and name not in over and not over.isdisjoint(effect.reads):
            value = reading.values.pop(name)
            if value is not None:
                tell(f"note: {reading.origins[name]} = {toml_value(value)} is left out: {effect.reason}")
            recipe = _build(reading.values)
    return recipe


def _build(values: Mapping[str, Value]) -> Recipe:
    parts: dict[str, dict[str, Value]] = {section: {} for section in sections()}
    for name, value in values.items():
        section, key = name.split(".")
        parts[section][key] = value
    return Recipe(**{section: cls(**parts[section]) for section, cls in sections().items()})


def _read_file(reading: _Reading, path: Path) -> None:
    table = _parse_file(reading, path)
    if table is None:
        reading.broken |= set(reading.settings)
        return
    for section, content in table.items():
        where = f"{path}: {section}"
        if section not in sections():
            _unknown_section(reading, where, section, content)
        elif not isinstance(content, dict):
            reading.add(where, content, "is a section, not a value", f"write [{section}] and below it KEY = VALUE")
            _doubt(reading, section)
        else:
            for key, value in content.items():
                _take_key(reading, path, f"{section}.{key}", value)


def recipe_file(path: Path) -> Path:
    """The file that `path` names: the reader's own, else one that comes with Phalanx (`laptop`, or `recipes/laptop.toml`)."""
    if path.parent == Path("recipes") and not path.parent.is_dir():
        return PACKAGED / path.name
    packaged = PACKAGED / f"{path}.toml"
    return packaged if path.name == str(path) and not path.is_file() and packaged.is_file() else path


def _parse_file(reading: _Reading, path: Path) -> dict[str, object] | None:
    """The file's table, or None after saying why there is none."""
    try:
        return parse_toml(read_text(recipe_file(path), most=MOST_TOML), where=str(path))
    except FileNotFoundError:
        is_name = path.name == str(path) and not path.suffix
        folder = PACKAGED if is_name else recipe_file(path).parent
        beside = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
        hint = nearest(path.name, beside) if beside else f"there is no recipe in {path.parent}"
        if is_name:
            hint = f"{nearest(path.name, [name.removesuffix('.toml') for name in beside])}; `phalanx recipes` lists those that come with Phalanx"
        elif (PACKAGED / path.name).is_file():
            hint = f"did you mean {path.stem!r}, which comes with Phalanx?"
        reading.add("recipe", str(path), "is not a file", hint)
    except OSError as error:
        of_a_run = path / "recipe.toml"
        hint = f"did you mean {str(of_a_run)!r}?" if of_a_run.is_file() else "give the path of a .toml file"
        reading.add("recipe", str(path), f"cannot be read: {error.strerror}", hint)
    except MalformedError as error:
        for problem in error.problems:
            reading.add("recipe", str(path), problem.rule, problem.hint)
    return None


def _unknown_section(reading: _Reading, where: str, section: str, content: object) -> None:
    if isinstance(content, dict):
        reading.add(where, f"[{section}]", "is not a section", nearest(section, sections()))
    else:
        hint = _same_key(reading, section) or "keys belong below a [section]"
        reading.add(where, content, "is not a setting", hint)
    for close in difflib.get_close_matches(section, sections(), n=1, cutoff=0.5):
        _doubt(reading, close)


def _take_key(reading: _Reading, path: Path, name: str, value: object) -> None:
    if name in reading.settings:
        reading.take(name, f"{path}: {name}", raw=value, text=False)
    else:
        reading.add(f"{path}: {name}", value, "is not a setting", _nearest_setting(reading, name, prefix=""))


def _doubt(reading: _Reading, section: str) -> None:
    """Nothing more is said about a section that could not be read."""
    reading.broken |= {n for n in reading.settings if n.startswith(f"{section}.")}


def _same_key(reading: _Reading, key: str) -> str:
    same = [s.name for s in reading.settings.values() if s.key == key]
    return "did you mean " + " or ".join(repr(n) for n in same) + "?" if same else ""


OTHER_NAMES = {
    "learning_rate": ("optim.lr",),
    "batch_size": ("train.global_batch", "train.micro_batch"),
    "train_batch_size": ("train.global_batch",),
    "per_device_train_batch_size": ("train.micro_batch",),
    "gradient_accumulation_steps": ("train.global_batch",),
    "max_steps": ("train.steps",),
    "num_train_epochs": ("train.steps",),
    "epochs": ("train.steps",),
    "max_seq_length": ("train.seq_len",),
    "sequence_length": ("train.seq_len",),
    "context_length": ("train.seq_len",),
    "block_size": ("train.seq_len",),
    "precision": ("train.dtype",),
    "max_grad_norm": ("optim.clip_norm",),
    "grad_clip": ("optim.clip_norm",),
    "gradient_checkpointing": ("train.recompute",),
    "output_dir": ("run.folder",),
    "dataset": ("data.sources",),
    "world_size": ("launch.ranks",),
    "num_gpus": ("launch.ranks",),
    "tensor_parallel_size": ("folding.tp",),
    "pipeline_parallel_size": ("folding.pp",),
    "expert_parallel_size": ("folding.ep",),
    "save_interval": ("checkpoint.interval",),
    "save_steps": ("checkpoint.interval",),
    "eval_steps": ("train.eval_interval",),
}
"""What other programs call a setting -> what it is called here."""


def _nearest_setting(reading: _Reading, name: str, *, prefix: str) -> str:
    """A hint for an unknown `section.key`: similar ones of the section, and the same key elsewhere; else similar names, else what the section has."""
    section, _, key = name.partition(".")
    inside = {s.key: s.name for s in reading.settings.values() if s.section == section}
    similar = [inside[k] for k in difflib.get_close_matches(key, inside, n=2, cutoff=0.6)]
    similar += [s for s in OTHER_NAMES.get(key, ()) if s in reading.settings and s not in similar]
    reading.broken |= set(similar)
    same = [s.name for s in reading.settings.values() if s.key == (key or section)]
    close = [*similar, *same] or difflib.get_close_matches(name, reading.settings, n=2, cutoff=0.75)
    if close:
        return "did you mean " + " or ".join(repr(prefix + n) for n in close) + "?"
    return "legal: " + ", ".join(prefix + n for n in inside.values() or (f"{s}.KEY" for s in sections()))


def _read_overrides(reading: _Reading, overrides: Sequence[str]) -> None:
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            first = "a recipe comes first, before all settings"
            hint = first if word.endswith(".toml") else "write --section.key VALUE, as in --train.steps 10"
            reading.add("argument", word, "is not an override", hint)
            continue
        name, equals, text = word[2:].partition("=")
        where = f"--{name}"
        missing = not equals and (not rest or rest[0].startswith("--"))
        if not equals and not missing:
            text = rest.pop(0)
        if name not in reading.settings:
            reading.add(where, text, "is not a setting", _nearest_setting(reading, name, prefix="--"))
        elif missing:
            setting = reading.settings[name]
            example = "true" if setting.base is bool else (setting.choices or ("VALUE",))[0]
            reading.broken.add(name)
            reading.add(where, "", f"needs a value, which {setting.rule}", f"write {where} {example}")
        else:
            reading.take(name, where, raw=text, text=True)


def untrusted(recipe: Recipe, *, its_own: bool) -> list[tuple[str, Value, str]]:
    """(setting, value, what it does) of what a recipe file alone may not decide. `its_own`: the file is that of the run folder that the recipe names."""
    run, observe = recipe.run, recipe.observe
    named, place = (
        ("run.name", run.name) if _is_below(run.folder) else ("run.folder", run.folder)
    )  # a name may be a link
    listens = observe.prometheus_port is not None and not is_loopback(observe.prometheus_address or "localhost")
    sends = observe.wandb_project is not None and observe.wandb_mode != "offline"
    writes, joins = "writes outside of the present folder", "joins or keeps a run of several hosts"
    rows: tuple[tuple[str, Value, bool, str], ...] = (
        (named, place, not its_own and not _is_below(str(Path(run.folder) / run.name)), writes),
        ("data.cache", recipe.data.cache, not _is_below(recipe.data.cache), writes),
        ("resilience.service", recipe.resilience.service, recipe.resilience.service is not None, joins),
        ("launch.keep_service", recipe.launch.keep_service, recipe.launch.keep_service, joins),
        ("observe.prometheus_address", observe.prometheus_address, listens, "listens to other machines"),
        ("observe.wandb_project", observe.wandb_project, sends, "sends this run to Weights & Biases"),
        ("observe.sinks", observe.sinks, observe.sinks is not None, "gives this run to programs of other packages"),
    )
    return [(name, value, does) for name, value, wrong, does in rows if wrong]


def _is_below(folder: str) -> bool:
    """Whether a path of a recipe stays below the present folder."""
    return Path(folder).resolve().is_relative_to(Path.cwd().resolve())


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with the meaning of each setting beside it.

    Left out (as comments): settings that are not set, and defaults that have no effect in this run, or on one of the devices that "auto" may be.
    """
    devices: tuple[Device, ...] = ("cuda", "cpu") if recipe.launch.device == "auto" else ()
    either = [inert_settings(replace(recipe, launch=replace(recipe.launch, device=d))) for d in devices]
    now = inert_settings(recipe)
    inert = {name: f"because {effect.reason}" for name, effect in now.items()}
    inert |= {n: f"where {effect.reason}" for found in either for n, effect in found.items() if n not in now}
    docs = section_docs()
    lines = ["# Everything that decides this run. `phalanx train` with this file gives the same run again."]
    for setting in describe_settings():
        header = f"[{setting.section}]"
        if header not in lines:
            lines += ["", f"# {docs[setting.section]}", header]
        value = value_of(recipe, setting.name)
        if value is None:
            lines.append(f"# {setting.key}: not set. {setting.doc}")
        elif setting.name in inert and value == setting.default:
            lines.append(f"# {setting.key}: no effect {inert[setting.name]}")
        else:
            lines += [f"# {setting.doc}", f"{setting.key} = {toml_value(value)}"]
    return "\n".join(lines) + "\n"


def short_recipe(recipe: Recipe, *, head: Sequence[str], comments: Mapping[str, str]) -> str:
    """The recipe as TOML: what differs from the defaults, and every setting of `comments`, with that comment beside it. `head` stands above, a comment line each.

    A key of `comments` that ends in "#" is a line of a section that is written as it is.
    """
    lines = [f"# {line}".rstrip() for line in head]
    for section in sections():
        own = [s for s in describe_settings() if s.section == section]
        body = []
        for setting in own:
            value = value_of(recipe, setting.name)
            if value is not None and (value != setting.default or setting.name in comments):
                body.append(_with_comment(f"{setting.key} = {toml_value(value)}", comments.get(setting.name, "")))
        if f"{section}#" in comments:
            body.append(comments[f"{section}#"])
        lines += ["", f"[{section}]", *body] if body else []
    return "\n".join(lines) + "\n"


def _with_comment(line: str, comment: str) -> str:
    return f"{line:<32}  # {comment}" if comment else line
