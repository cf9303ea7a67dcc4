"""What a recipe may say, as far as the recipe alone decides it: ranges, settings that belong together, settings without effect.

Rules are data where they can be (`LIMITS`, `EFFECTS`), so that help, documents and tests read the same table. What needs the shape of
the model (a preset's router, its experts) stands in `plan/recipe.py`. Must never change: a setting that has no effect in this run is
a problem, and a rule that cannot be judged because another value is broken stays silent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx.core.config import HOST_BEAT_S, Recipe
from phalanx.core.errors import Problem
from phalanx.core.service_address import HOST_NAME, LEGAL as LEGAL_SERVICE, RACK_NAME, parse_service
from phalanx.core.settings import describe_settings, show


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Range of a number. `above` and `below` exclude the bound, `least`, `most` and `ceiling` include it."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    ceiling: float = 1e12
    """More than anything of use, so that nothing overflows or takes for ever. Told only where it is passed."""

    def allows(self, value: float) -> bool:
        return not (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
            or value > self.ceiling
        )

    @property
    def rule(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return "must be " + " and ".join(f"{word} {plain(bound)}" for word, bound in words.items() if bound is not None)

    def refusal(self, value: float) -> str:
        """The rule as `value` breaks it."""
        return f"must be at most {plain(self.ceiling)}" if self._is_open and value > self.ceiling else self.rule

    @property
    def _is_open(self) -> bool:
        """Whether nothing but the ceiling ends it."""
        return self.most is None and self.below is None

    def hint(self, value: float, default: object) -> str:
        """A legal value nearby: the bound that was passed, or the default where the bound itself is illegal."""
        if self.least is not None and value < self.least:
            return f"use {plain(self.least)}"
        if value > (top := self.ceiling if self._is_open else self.most if self.most is not None else math.inf):
            return f"use {plain(top)}"
        return f"the default is {show(default)}" if default is not None else "leave it out"


def plain(bound: float) -> str:
    """As a setting takes it: a whole number without an exponent."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


POSITIVE = Limit(above=0)
COUNT = Limit(least=1)
NOT_NEGATIVE = Limit(least=0)
SHARE = Limit(least=0, most=1)
DECAY = Limit(least=0, below=1)
WIDTH = Limit(least=1, ceiling=10_000_000)
"""Of anything in a layer; published models have at most 131,072 (and a feed-forward layer of 10 times that in models that nobody trained)."""
WIDTH_OR_NONE = Limit(least=0, ceiling=10_000_000)
LAYERS, NO_LAYERS = Limit(least=1, ceiling=10_000), Limit(least=0, ceiling=10_000)
"""The deepest published transformer has 2,500."""
TOKENS = Limit(least=1, ceiling=10_000_000)
"""Of a vocabulary, a sequence, a batch; the largest published ones have a tenth."""
RANKS = Limit(least=1, ceiling=2_000_000)
"""The largest published cluster has 200,000 devices."""
SECONDS = Limit(above=0, ceiling=1e9)
GIGABYTES = Limit(above=0, ceiling=1e9)
MOST_EXPERTS = 2_000_000
"""Experts of all layers; DeepSeek-V3 has 14,848, BaGuaLu (doi 10.1145/3503221.3508417) 96,000 in a layer."""

LEAST_SILENCE_BEATS = 5
"""A host is not taken for dead before it has missed so many heartbeats."""

LIMITS: Mapping[str, Limit] = {
    "model.num_layers": LAYERS,
    "model.vocab": TOKENS,
    **{f"model.{k}": WIDTH for k in ("hidden", "num_heads", "num_kv_heads", "head_dim")},
    **{f"model.{k}": WIDTH for k in ("num_experts", "top_k", "expert_ffn", "dense_ffn")},
    "model.shared_ffn": WIDTH_OR_NONE,
    "model.dense_layers": NO_LAYERS,
    **{f"model.{k}": WIDTH for k in ("kv_rank", "nope_dim", "rope_dim", "value_dim")},
    "model.yarn_original_length": Limit(least=1, ceiling=1e9),
    "model.q_rank": WIDTH_OR_NONE,
    **{f"model.{k}": NOT_NEGATIVE for k in ("yarn_mscale", "yarn_mscale_all_dim")},
    "model.mtp_layers": NO_LAYERS,
    "model.mtp_weight": POSITIVE,
    "model.yarn_factor": COUNT,
    "model.yarn_beta_fast": POSITIVE,
    "model.yarn_beta_slow": POSITIVE,
    "model.rope_theta": POSITIVE,
    "model.norm_eps": POSITIVE,
    "model.init_std": POSITIVE,
    "router.scale": POSITIVE,
    "router.num_groups": WIDTH,
    "router.group_topk": WIDTH,
    "router.z_loss": NOT_NEGATIVE,
    "router.aux_loss": NOT_NEGATIVE,
    "router.bias_rate": NOT_NEGATIVE,
    "router.force_skew": NOT_NEGATIVE,
    "dispatch.capacity_factor": Limit(above=0, ceiling=1e6),
    "dispatch.left_free": WIDTH,
    **{f"folding.{k}": RANKS for k in ("tp", "cp", "pp", "ep", "etp")},
    "pipeline.virtual": LAYERS,
    "pipeline.layers": NO_LAYERS,
    "pipeline.extra_warmup": Limit(least=0, ceiling=1e6),
    "pipeline.memory_gb": GIGABYTES,
    "data.weights": POSITIVE,
    "data.builtin_bytes": COUNT,
    "data.validation_fraction": Limit(above=0, most=0.5),
    "train.steps": COUNT,
    "train.seq_len": Limit(least=2, ceiling=1e9),
    "train.global_batch": TOKENS,
    "train.micro_batch": TOKENS,
    "train.seed": Limit(least=0, most=2**32 - 1),
    "train.eval_interval": NOT_NEGATIVE,
    "train.eval_batches": Limit(least=1, ceiling=1e6),
    "optim.lr": POSITIVE,
    "optim.min_lr_ratio": SHARE,
    "optim.warmup_steps": NOT_NEGATIVE,
    "optim.decay_steps": COUNT,
    "optim.beta1": DECAY,
    "optim.beta2": DECAY,
    "optim.eps": POSITIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.clip_norm": NOT_NEGATIVE,
    "optim.bucket_mb": Limit(least=0, ceiling=1e9),
    "resilience.slots_per_rank": WIDTH,
    "resilience.f": RANKS,
    "resilience.wanted": RANKS,
    "resilience.minimum": RANKS,
    "resilience.wait_s": SECONDS,
    "checkpoint.wait_s": Limit(least=0, ceiling=1e9),
    "resilience.hang_s": Limit(least=LEAST_SILENCE_BEATS * HOST_BEAT_S, ceiling=1e9),
    "resilience.limit_s": Limit(least=LEAST_SILENCE_BEATS * HOST_BEAT_S, ceiling=1e9),
    "resilience.straggler": NOT_NEGATIVE,
    "resilience.straggler_steps": COUNT,
    "resilience.straggler_rest_s": SECONDS,
    "resilience.state_gb": GIGABYTES,
    "resilience.replace_interval": NOT_NEGATIVE,
    "checkpoint.interval": NOT_NEGATIVE,
    "checkpoint.keep_last": COUNT,
    "checkpoint.write_rate": NOT_NEGATIVE,
    "checkpoint.step": NOT_NEGATIVE,
    "resilience.chunk_rows": Limit(least=16, most=2048),
    "resilience.fixed_bits": Limit(least=24, most=60),
    "observe.log_interval": COUNT,
    "observe.trace_steps": COUNT,
    "observe.prometheus_port": Limit(least=1, most=65535),
    "launch.ranks": RANKS,
    "launch.threads": Limit(least=1, ceiling=1e6),
    "launch.timeout_s": Limit(least=1, most=1e6),
}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """`settings` do nothing in a run for which `inert` holds."""

    settings: tuple[str, ...]
    inert: Callable[[Recipe], bool]
    reason: str
    """What makes them do nothing, as it is now."""
    way_out: str
    """What to set so that they count (leaving them out is the other way); empty where no value does it."""
    reads: tuple[str, ...]
    """Settings that `inert` looks at; the rule is silent where one of them is broken."""


def _dropless(r: Recipe) -> bool:
    return r.dispatch.policy == "dropless"


def _any_stage(r: Recipe, *axes: str) -> bool:
    """Whether a stage with a folding of its own says one of these degrees."""
    return any(part.startswith(axes) for text in r.folding.stages or () for part in text.split("."))


def _has_field(source: str) -> bool:
    """Could this source hold records whose field `data.text_field` names? Folders and globs could; `a.jsonl#body` names its own."""
    name, mark, own = source.rpartition("#")
    if mark and "/" not in own and name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", "/")):
        return False
    return not source.startswith("builtin:") and not source.endswith((".txt", ".bin", ".idx"))


EFFECTS: tuple[Effect, ...] = (
    Effect(settings=tuple(f"dispatch.{k}" for k in ("capacity_factor", "drop_by", "drop_scope", "pad_to_capacity")),
           inert=_dropless, reason='dispatch.policy = "dropless"', way_out='dispatch.policy = "drop"', reads=("dispatch.policy",)),
    Effect(settings=("dispatch.transport", "dispatch.overlap"),
           inert=lambda r: not _any_stage(r, "ep", "etp") if r.folding.stages else r.folding.ep == 1 and r.folding.etp == 1,
           reason="folding.ep = 1 and folding.etp = 1 keep every row where it is", way_out="folding.ep = 2",
           reads=("folding.ep", "folding.etp", "folding.stages")),
    Effect(settings=("dispatch.left_free",), inert=lambda r: r.launch.device != "cuda",
           reason='launch.device = "cpu" has no multiprocessors', way_out='launch.device = "cuda"', reads=("launch.device",)),
    Effect(settings=("dispatch.left_free",),
           inert=lambda r: r.dispatch.overlap == "serial" or r.dispatch.overlap.startswith("coarse"),
           reason="dispatch.overlap does not divide the device: serial and coarse:N do not", way_out='dispatch.overlap = "auto"',
           reads=("dispatch.overlap",)),
    Effect(settings=("folding.cp_method",), inert=lambda r: r.folding.cp == 1 and not _any_stage(r, "cp"),
           reason="folding.cp = 1 leaves every sequence whole", way_out="folding.cp = 2", reads=("folding.cp", "folding.stages")),
    Effect(settings=("pipeline.memory_gb",), inert=lambda r: r.pipeline.extra_warmup != "auto",
           reason='pipeline.extra_warmup is not "auto"', way_out='pipeline.extra_warmup = "auto"',
           reads=("pipeline.extra_warmup",)),
    Effect(settings=tuple(f"pipeline.{k}" for k in ("schedule", "virtual", "layers", "extra_warmup", "memory_gb")),
           inert=lambda r: r.folding.num_stages == 1, reason="folding.pp = 1 has one stage for everything",
           way_out="folding.pp = 2", reads=("folding.pp", "folding.stages")),
    Effect(settings=("pipeline.pair_passes",), inert=lambda r: r.launch.device == "cuda",
           reason='launch.device = "cuda", and passes take turns on a CPU only', way_out='launch.device = "cpu"',
           reads=("launch.device",)),
    Effect(settings=tuple(f"folding.{k}" for k in ("tp", "cp", "pp", "ep", "etp")), inert=lambda r: r.folding.stages is not None,
           reason="folding.stages says the degrees of each stage", way_out="", reads=("folding.stages",)),
    Effect(settings=("router.softmax_order",),
           inert=lambda r: r.router.score == "sigmoid" and r.router.softmax_order != "after_topk",
           reason='router.score = "sigmoid" and no softmax comes after top-k', way_out='router.score = "softmax"',
           reads=("router.score",)),
    Effect(settings=("router.aux_scope",), inert=lambda r: r.router.aux_loss == 0, reason="router.aux_loss = 0",
           way_out="router.aux_loss = 0.01", reads=("router.aux_loss",)),
    Effect(settings=("router.force_skew",), inert=lambda r: r.router.force != "imbalanced",
           reason='router.force is not "imbalanced"', way_out='router.force = "imbalanced"', reads=("router.force",)),
    Effect(settings=tuple(f"router.{k}" for k in ("num_groups", "group_topk", "group_score", "bias_rate")),
           inert=lambda r: r.router.force != "none", reason="router.force replaces the choice of experts",
           way_out='router.force = "none"', reads=("router.force",)),
    Effect(settings=("resilience.f",), inert=lambda r: r.resilience.slots_per_rank is None and r.resilience.heal is False,
           reason="resilience.slots_per_rank is not set and the run is not elastic, so nothing has replicas",
           way_out="resilience.heal = true", reads=("resilience.slots_per_rank", "resilience.heal")),
    Effect(settings=tuple(f"resilience.{k}" for k in ("minimum", "wait_s", "limit_s", "hang_s", "straggler", "straggler_steps", "straggler_rest_s", "state_gb")),
           inert=lambda r: r.resilience.heal is False, reason="resilience.heal = false, so a run without one of its ranks ends",
           way_out="resilience.heal = true", reads=("resilience.heal",)),
    Effect(settings=("resilience.service",), inert=lambda r: not r.resilience.heal,
           reason="resilience.heal is not set to true, and other hosts take part only in an elastic run",
           way_out="resilience.heal = true", reads=("resilience.heal",)),
    Effect(settings=("resilience.straggler_rest_s",), inert=lambda r: r.resilience.straggler == 0,
           reason="resilience.straggler = 0 excludes no rank", way_out="resilience.straggler = 2.5",
           reads=("resilience.straggler",)),
    Effect(settings=("resilience.wanted", "launch.host", "launch.rack", "launch.keep_service"),
           inert=lambda r: not r.resilience.heal or r.resilience.service is None,
           reason="resilience.service is not set, so no other host takes part",
           way_out='resilience.service = "node0:29400" and resilience.heal = true',
           reads=("resilience.heal", "resilience.service")),
    Effect(settings=tuple(f"resilience.{k}" for k in ("loads", "expert_state", "replace_interval")),
           inert=lambda r: r.resilience.slots_per_rank is None,
           reason="resilience.slots_per_rank is not set, so no expert has replicas", way_out="resilience.slots_per_rank = 4",
           reads=("resilience.slots_per_rank",)),
    Effect(settings=("resilience.move_beside",), inert=lambda r: not _most_often_placed(r) or r.launch.device == "cuda",
           reason="experts never move while training runs, or only while all ranks wait (launch.device is not cpu)",
           way_out="resilience.slots_per_rank = 4 and resilience.replace_interval = 200",
           reads=("resilience.slots_per_rank", "resilience.replace_interval", "resilience.mode", "resilience.heal", "train.deterministic", "launch.device",)),
    Effect(settings=("optim.decay_steps",), inert=lambda r: r.optim.schedule != "wsd", reason='optim.schedule is not "wsd"',
           way_out='optim.schedule = "wsd"', reads=("optim.schedule",)),
    Effect(settings=("optim.min_lr_ratio",), inert=lambda r: r.optim.schedule == "constant", reason='optim.schedule = "constant"',
           way_out='optim.schedule = "cosine"', reads=("optim.schedule",)),
    Effect(settings=("checkpoint.asynchronous",), inert=lambda r: r.checkpoint.interval == 0,
           reason="checkpoint.interval = 0 makes the run wait for every save", way_out="checkpoint.interval = 50",
           reads=("checkpoint.interval",)),
    Effect(settings=("checkpoint.step", "checkpoint.fall_back"), inert=lambda r: not r.checkpoint.resume,
           reason="checkpoint.resume = false", way_out="checkpoint.resume = true", reads=("checkpoint.resume",)),
    Effect(settings=("resilience.chunk_rows", "resilience.fixed_bits"), inert=lambda r: r.resilience.mode != "exact",
           reason='resilience.mode is not "exact"', way_out='resilience.mode = "exact"', reads=("resilience.mode",)),
    Effect(settings=("data.weights",), inert=lambda r: len(r.data.sources) == 1, reason="data.sources has one entry",
           way_out="more data.sources", reads=("data.sources",)),
    Effect(settings=("data.text_field",), inert=lambda r: not any(_has_field(s) for s in r.data.sources),
           reason="each entry of data.sources names its own field or has none",
           way_out="a .jsonl or .parquet source without #FIELD", reads=("data.sources",)),
    Effect(settings=("data.chat_template",),
           inert=lambda r: not any(_has_field(s.rpartition("#")[0] or s) for s in r.data.sources),
           reason="no entry of data.sources can hold records", way_out="a .jsonl or .parquet source of conversations",
           reads=("data.sources",)),
    Effect(settings=("data.eos_token", "data.bos_token"),
           inert=lambda r: r.data.tokenizer == "byte" or r.data.tokenizer.startswith("bpe:"),
           reason="data.tokenizer is not a tokenizer.json", way_out="the path of one as data.tokenizer", reads=("data.tokenizer",)),
    Effect(settings=("data.builtin_bytes",), inert=lambda r: "builtin:python" not in r.data.sources,
           reason="data.sources has no builtin:python", way_out='data.sources = ["builtin:python"]', reads=("data.sources",)),
    Effect(settings=("observe.log_interval",), inert=lambda r: not r.observe.is_for_people,
           reason='observe.console is "none" or "json"', way_out='observe.console = "plain"', reads=("observe.console",)),
    Effect(settings=("observe.wandb_mode",), inert=lambda r: r.observe.wandb_project is None,
           reason="observe.wandb_project is not set", way_out='observe.wandb_project = "phalanx"',
           reads=("observe.wandb_project",)),
    Effect(settings=("observe.prometheus_address",), inert=lambda r: r.observe.prometheus_port is None,
           reason="observe.prometheus_port is not set", way_out="observe.prometheus_port = 9100",
           reads=("observe.prometheus_port",)),
    Effect(settings=("kernels.compiled",), inert=lambda r: r.launch.device == "cuda",
           reason='launch.device = "cuda", and these kernels are those of a CPU', way_out='launch.device = "cpu"',
           reads=("launch.device",)),
)  # fmt: skip


def value_of(recipe: Recipe, name: str) -> object:
    """The value of `section.key`."""
    section, key = name.split(".")
    return getattr(getattr(recipe, section), key)


def inert_settings(recipe: Recipe) -> dict[str, Effect]:
    """Settings that would do nothing in this run, with the rule that says so."""
    return {name: effect for effect in EFFECTS if effect.inert(recipe) for name in effect.settings}


def recipe_problems(
    recipe: Recipe, *, world: int | None = None, given: Collection[str] | None = None, broken: Collection[str] = ()
) -> list[Problem]:
    """All problems that the recipe alone shows, and with `world` ranks those of the batch.

    `given` names the settings that were written down (default: those that differ from their default); only they can be
    without effect. `broken` names settings whose value could not be read: rules that look at them stay silent.
    """
    defaults = {s.name: s.default for s in describe_settings()}
    if given is None:
        given = [n for n, default in defaults.items() if value_of(recipe, n) != default]
    limited = ((n, limit) for n, limit in LIMITS.items() if n not in broken)
    problems = [p for n, limit in limited for p in _limit_problems(recipe, n, limit, defaults[n])]
    broken = {*broken, *(p.where for p in problems)}
    clashes = [*_data_clashes(recipe), *_schedule_clashes(recipe), *_run_clashes(recipe), *_resilience_clashes(recipe)]
    clashes += [*_recovery_clashes(recipe), *_replacement_clashes(recipe), *_check_clashes(recipe)]
    if world is not None:
        clashes += _batch_clashes(recipe, world)
    problems += [c.problem for c in clashes if not broken & {c.problem.where, *c.reads}]
    for name, effect in inert_settings(recipe).items():
        if value_of(recipe, name) is None:  # written down as "not set": that is leaving it out
            continue
        if name in given and not broken & {name, *effect.reads}:
            hint = f"leave it out, or set {effect.way_out}" if effect.way_out else "leave it out"
            rule = f"has no effect because {effect.reason}"
            problems.append(Problem(where=name, value=value_of(recipe, name), rule=rule, hint=hint))
    return problems


def _limit_problems(recipe: Recipe, name: str, limit: Limit, default: object) -> list[Problem]:
    value = value_of(recipe, name)
    numbers = value if isinstance(value, tuple) else () if value is None else (value,)
    wrong = [v for v in numbers if isinstance(v, int | float) and not limit.allows(v)]
    each = "each " if isinstance(value, tuple) else ""
    return [Problem(where=name, value=v, rule=each + limit.refusal(v), hint=limit.hint(v, default)) for v in wrong]


@dataclass(frozen=True)
class _Clash:
    """A problem that the setting `problem.where` has beside others."""

    problem: Problem
    reads: tuple[str, ...] = ()


def _clash(where: str, value: object, rule: str, hint: str, *reads: str) -> _Clash:
    return _Clash(Problem(where=where, value=value, rule=rule, hint=hint), reads)


def _data_clashes(recipe: Recipe) -> list[_Clash]:
    d, found = recipe.data, []
    if not d.sources or "" in d.sources:
        rule, hint = "must name at least one source, and none of them empty", 'use ["builtin:python"]'
        found.append(_clash("data.sources", d.sources, rule, hint))
    if d.weights is not None and len(d.sources) > 1 and len(d.weights) != len(d.sources):
        rule = f"must have one weight for each of the {len(d.sources)} entries of data.sources"
        hint = "use [" + ", ".join(["1.0"] * len(d.sources)) + "]"
        found.append(_clash("data.weights", d.weights, rule, hint, "data.sources"))
    own = d.tokenizer == "byte" or d.tokenizer.startswith("bpe:")
    lacks = {"model": own, "chatml": d.tokenizer == "byte"}.get(d.chat_template or "", False)
    if lacks:
        what = "its own template" if d.chat_template == "model" else "ChatML's control tokens"
        hint = "the path of the model's tokenizer.json as data.tokenizer" if d.chat_template == "model" else "bpe:8192"
        rule = f"needs a tokenizer that has {what}, and data.tokenizer is {d.tokenizer}"
        found.append(_clash("data.chat_template", d.chat_template, rule, f"use {hint}", "data.tokenizer"))
    for key in ("text_field", "cache", "tokenizer", "chat_template"):
        if getattr(d, key) == "":
            found.append(_clash(f"data.{key}", "", "must not be empty", "leave it out"))
    return found


def _schedule_clashes(recipe: Recipe) -> list[_Clash]:
    o, steps, found = recipe.optim, recipe.train.steps, []
    if recipe.train.dtype == "auto":
        rule = "is decided where a recipe is read; one that was made otherwise must name the type"
        found.append(_clash("train.dtype", "auto", rule, "use bfloat16, or core.recipe.native_dtype(recipe)"))
    if recipe.train.dtype == "float64" and o.state_dtype != "float32":
        rule = "would round moments far below the float64 of everything else"
        found.append(_clash("optim.state_dtype", o.state_dtype, rule, "leave it out", "train.dtype"))
    warmup = o.warmup(steps)
    if o.warmup_steps is not None and warmup >= steps:
        rule = f"must be less than train.steps = {steps}, or warm-up never completes"
        hint = f"use {steps // 10}, or leave it out"
        found.append(_clash("optim.warmup_steps", warmup, rule, hint, "train.steps"))
    elif o.schedule == "wsd" and o.decay_steps is not None and o.decay_steps + warmup > steps:
        rule = f"must fit after {warmup} steps of warm-up into train.steps = {steps}"
        hint, reads = f"use at most {steps - warmup}", ("optim.warmup_steps", "optim.schedule", "train.steps")
        found.append(_clash("optim.decay_steps", o.decay_steps, rule, hint, *reads))
    return found


MOST_NAME_BYTES = 200
"""Of a run. Drafts of files have a longer name."""


def _run_clashes(recipe: Recipe) -> list[_Clash]:
    found = []
    name = recipe.run.name
    if re.search(r"[\x00-\x1f\x7f-\x9f]", name):
        hint = f"use {''.join(c for c in name if c.isprintable()) or 'run'}"
        found.append(_clash("run.name", name, "must hold no control characters, such as a newline", hint))
    elif not name or name in (".", "..") or set(name) & set("/\\"):
        hint = f"use {name.strip('./').replace('/', '-') or 'run'}, and run.folder for where it lies"
        found.append(_clash("run.name", name, "must be the name of one folder, without slashes", hint))
    elif (size := len(name.encode("utf-8", "replace"))) > MOST_NAME_BYTES:
        rule = f"is {size} bytes long; {MOST_NAME_BYTES} at most, for file systems end names at 255"
        found.append(_clash("run.name", name, rule, f"use {name[:20]}"))
    if not recipe.run.folder or "\0" in recipe.run.folder:
        found.append(_clash("run.folder", recipe.run.folder, "must be a path", "use runs"))
    traced = recipe.observe.trace_steps
    if traced is not None and (len(traced) not in (1, 2) or traced[0] > traced[-1]):
        rule, hint = "must be the first and the last step to record, in this order", "use [10, 12]"
        found.append(_clash("observe.trace_steps", traced, rule, hint))
    elif traced is not None and traced[-1] > recipe.train.steps:
        rule = f"must not go past train.steps = {recipe.train.steps}, or these steps are never recorded"
        hint = f"use [{max(1, recipe.train.steps - 2)}, {recipe.train.steps}]"
        found.append(_clash("observe.trace_steps", traced, rule, hint, "train.steps"))
    for key in ("wandb_project", "prometheus_address"):
        if getattr(recipe.observe, key) == "":
            found.append(_clash(f"observe.{key}", "", "must not be empty", "leave it out"))
    return found


def _resilience_clashes(recipe: Recipe) -> list[_Clash]:
    """What cannot be had together with a step that any number of ranks shares, or with its bits."""
    if recipe.resilience.mode == "off":
        return []
    t, mode = recipe.train, recipe.resilience.mode
    found, reads = list[_Clash](), ("resilience.mode",)
    if min(t.global_batch, t.micro_batch) > 0 and t.global_batch % t.micro_batch:
        rule = f"must be a multiple of train.micro_batch = {t.micro_batch}: a step is a whole number of micro-batches"
        nearby = max(1, round(t.global_batch / t.micro_batch)) * t.micro_batch
        found.append(_clash("train.global_batch", t.global_batch, rule, f"use {nearby}", "train.micro_batch", *reads))
    found += [_clash(*clash, *reads) for clash in _unshared(recipe, mode)]
    return found + ([_clash(*clash, *reads) for clash in _inexact(recipe)] if mode == "exact" else [])


def _unshared(recipe: Recipe, mode: str) -> Iterator[tuple[str, object, str, str]]:
    """What needs all ranks to have as many tokens."""
    beside, d = f'with resilience.mode = "{mode}"', recipe.dispatch
    unequal = f"{beside} ranks may have unequal numbers of micro-batches, and"
    if recipe.folding.stages is not None:
        rule = f"{unequal} stages with foldings of their own need equal ones"
        yield "folding.stages", recipe.folding.stages, rule, "use folding.pp"
    if d.pad_to_capacity:
        yield "dispatch.pad_to_capacity", True, f"{unequal} padding needs as many tokens on all", "leave it out"
    if recipe.pipeline.pair_passes:
        yield "pipeline.pair_passes", True, f"{unequal} passes are paired by equal ones", "leave it out"


def _inexact(recipe: Recipe) -> Iterator[tuple[str, object, str, str]]:
    """What makes bits depend on the number of ranks."""
    beside = 'with resilience.mode = "exact"'
    if recipe.launch.threads is None:
        rule = f"must be set {beside}: its default follows from the number of ranks, and products may depend on it"
        yield "launch.threads", None, rule, "use 1"
    if recipe.launch.device == "cuda":
        rule = f"has not been shown to keep the bits {beside}"
        yield "launch.device", recipe.launch.device, rule, 'use "cpu"'
    if recipe.dispatch.overlap != "serial":
        rule = f"has no effect {beside}: experts compute units of equal size one after the other there"
        yield "dispatch.overlap", recipe.dispatch.overlap, rule, "leave it out"
    if recipe.dispatch.transport != "all_to_all":
        rule = f"sums per rank {beside}, so results depend on expert placement"
        yield "dispatch.transport", recipe.dispatch.transport, rule, 'use "all_to_all"'
    if recipe.optim.zero == 2:
        rule = f"reduces gradients once a micro-batch, which {beside} are added up in fixed point first"
        yield "optim.zero", 2, rule, "use 1"


def _recovery_clashes(recipe: Recipe) -> list[_Clash]:
    """What an elastic run cannot have: every member must be able to finish a step alone, and be replaced by any other."""
    if not recipe.resilience.heal:
        return []
    beside, found = "with resilience.heal = true", list[_Clash]()
    if recipe.resilience.mode == "off":
        rule = f"{beside} a step must be a fixed set of micro-batches that any number of ranks shares"
        found.append(_clash("resilience.mode", "off", rule, 'use "exact" or "fast"', "resilience.heal"))
    if recipe.resilience.expert_state == "sharded":
        rule = f"is not supported {beside}: a part of an expert's state would be lost with the only rank that has it"
        found.append(_clash("resilience.expert_state", "sharded", rule, 'use "whole"', "resilience.heal"))
    if recipe.launch.ranks == 1 and recipe.resilience.service is None:
        rule = f"leaves no rank to continue {beside}"
        found.append(_clash("launch.ranks", 1, rule, "use 2 or more", "resilience.heal"))
    found += _several_hosts_clashes(recipe)
    return found


def _several_hosts_clashes(recipe: Recipe) -> list[_Clash]:
    """Where the other hosts of an elastic run are found."""
    r, launch, found = recipe.resilience, recipe.launch, list[_Clash]()
    if r.service is not None:
        address = parse_service(r.service)
        if address is None:
            found.append(_clash("resilience.service", r.service, f"must be {LEGAL_SERVICE}", "node0:29400"))
        elif address.is_etcd and launch.keep_service:
            rule = "has no effect: etcd is kept by others"
            found.append(_clash("launch.keep_service", True, rule, "leave it out", "resilience.service"))
        if r.wanted is None:
            rule = "must be set: launch.ranks counts this host only"
            found.append(_clash("resilience.wanted", None, rule, "launch.ranks times the number of hosts"))
    if 0 < r.straggler <= 1:
        rule = "must be 0 or above 1"
        found.append(_clash("resilience.straggler", r.straggler, rule, "2.5"))
    wanted = launch.ranks if r.wanted is None else r.wanted
    if wanted < r.minimum:
        rule = f"is more than the {wanted} ranks with which the run begins"
        reads = ("resilience.wanted", "launch.ranks")
        found.append(_clash("resilience.minimum", r.minimum, rule, f"use {wanted} or fewer", *reads))
    if launch.host is not None and not HOST_NAME.fullmatch(launch.host):
        rule = "must consist of letters, digits, - and _"
        found.append(_clash("launch.host", launch.host, rule, "use the name of the machine without its domain"))
    if launch.rack is not None and not RACK_NAME.fullmatch(launch.rack):
        rule = "must consist of letters, digits, -, _ and dots"
        found.append(_clash("launch.rack", launch.rack, rule, "use a name such as rack-7, or leave it out"))
    return found


def _most_often_placed(recipe: Recipe) -> int:
    """Steps between placements; those of mode fast where it is still open whether the run is elastic (`plan/recovery_choice.py`)."""
    r = recipe.resilience
    if r.heal is None and r.mode == "off":
        recipe = replace(recipe, resilience=replace(r, mode="fast"))
    return recipe.steps_between_placements()


def _replacement_clashes(recipe: Recipe) -> list[_Clash]:
    """What experts cannot have that are to move while training runs."""
    r, found = recipe.resilience, list[_Clash]()
    if not r.replace_interval:
        return found
    if recipe.train.deterministic and r.mode != "exact" and r.slots_per_rank is not None:
        rule = "moves experts when measured times say that it pays, and with train.deterministic = true a run is the same each time"
        found.append(_clash("resilience.replace_interval", r.replace_interval, rule, "use 0", "train.deterministic"))
    if r.expert_state == "sharded":
        rule = (
            'moves whole experts, and with resilience.expert_state = "sharded" their state is split among their holders'
        )
        found.append(
            _clash("resilience.replace_interval", r.replace_interval, rule, "use 0", "resilience.expert_state")
        )
    return found


def _check_clashes(recipe: Recipe) -> list[_Clash]:
    """Products that no check sees."""
    overlap = recipe.dispatch.overlap
    if recipe.resilience.check == "off" or overlap == "serial" or overlap.startswith("coarse"):
        return []
    rule = 'computes experts tile by tile, which resilience.check = "sums" does not check'
    return [_clash("dispatch.overlap", overlap, rule, 'use "serial" or "coarse:2"', "resilience.check")]


def _batch_clashes(recipe: Recipe, world: int) -> list[_Clash]:
    """Whether the batch splits over the data-parallel ranks (silent where the folding itself does not fit the world)."""
    f, t = recipe.folding, recipe.train
    if recipe.resilience.mode != "off":
        return []  # any number of ranks shares the micro-batches
    if f.stages is not None or min(f.tp, f.cp, f.pp, t.micro_batch, t.global_batch) < 1 or world % (f.tp * f.cp * f.pp):
        return []
    dp = world // (f.tp * f.cp * f.pp)
    unit = t.micro_batch * dp
    if t.global_batch % unit == 0:
        return []
    below = t.global_batch // unit * unit
    ways = " or ".join(f"train.global_batch = {n}" for n in (below, below + unit) if n)
    if t.global_batch % dp == 0:
        share = t.global_batch // dp
        micro = max(d for d in range(1, min(share, t.micro_batch) + 1) if share % d == 0)
        ways += f", or train.micro_batch = {micro}"
    rule = f"must be a multiple of train.micro_batch {t.micro_batch} x {dp} data-parallel ranks = {unit}"
    reads = ("train.micro_batch", "folding.tp", "folding.cp", "folding.pp")
    return [_clash("train.global_batch", t.global_batch, rule, f"use {ways}", *reads)]
