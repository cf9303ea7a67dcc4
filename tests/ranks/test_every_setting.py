"""Every setting of a recipe changes something in the run that it is given to, or is refused by name: with a fixed world, and with members that come and go.

A setting that is accepted and ignored is the worst kind of drift: nobody finds out. So each is tried: a run with it and one without go from `cli.train.start` to the last
checkpoint (`helpers/started.py`), and what can be seen of them must differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from started import Seen, seen_of
from train_help import write_text

from phalanx.core.errors import ConfigError, DataError
from phalanx.core.settings import Setting, describe_settings
from phalanx.runtime.checkpoint.manager import import_now
from phalanx.runtime.comm.groups import GroupCache
from phalanx.train import build, loop
from ranks import run_ranks

pytestmark = pytest.mark.ranks
import_now()  # once, and not by each rank

World = Literal["fixed", "elastic"]
Words = Mapping[str, str]

BASE: Words = {
    "model.preset": "tiny",
    "data.sources": '["{text}"]',
    "data.tokenizer": "byte",
    "data.validation_fraction": "0.2",
    "data.cache": "{cache}",
    "run.folder": "{folder}/runs",
    "folding.ep": "1",
    "train.steps": "2",
    "train.seq_len": "16",
    "train.global_batch": "4",
    "train.micro_batch": "1",
    "train.dtype": "float32",
    "train.eval_interval": "1",
    "train.eval_batches": "1",
    "checkpoint.interval": "1",
    "observe.console": "none",
    "observe.tensorboard": "false",
    "launch.ranks": "2",
    "launch.threads": "1",
    "resilience.heal": "false",
}
ONE_STEP = ("model", "router", "dispatch", "folding", "data", "kernels")
"""Sections of which one step says enough."""
ELASTIC: Words = {"resilience.heal": "true", "resilience.mode": "fast", "resilience.f": "1"}


@dataclass(frozen=True, kw_only=True)
class Try:
    """How a setting is tried: `value` in a run that is otherwise as the base with `beside`, and in the elastic world with `members` too."""

    value: str = ""
    """Empty: some other value than the default."""
    beside: Words = field(default_factory=dict)
    members: Words = field(default_factory=dict)
    again: bool = False
    """The run has been made before, and goes on."""


TWO_STAGES = {"folding.pp": "2", "model.num_layers": "4"}
EAGER = {**TWO_STAGES, "pipeline.schedule": "eager_1f1b"}
TWO_PARTS = {"folding.ep": "2"}
DROPS = {"dispatch.policy": "drop"}
LATENT = {
    "model.preset": "deepseek-v2", "model.num_layers": "2", "model.hidden": "32", "model.num_heads": "4", "model.vocab": "320", "model.num_experts": "8",
    "model.top_k": "2", "model.expert_ffn": "32", "model.shared_ffn": "16", "model.dense_ffn": "48", "router.num_groups": "2", "router.group_topk": "1",
    "model.q_rank": "8", "model.kv_rank": "16", "model.nope_dim": "8", "model.rope_dim": "8", "model.value_dim": "8",
}  # fmt: skip
STRETCHED = {"model.yarn_factor": "4", "model.yarn_original_length": "8"}
GROUPS = {"router.num_groups": "4", "router.group_topk": "2"}
REPLICAS = {"resilience.slots_per_rank": "5", "resilience.mode": "fast", "resilience.f": "1", "folding.ep": ""}
MOVES = {**REPLICAS, "resilience.replace_interval": "1", "train.steps": "3"}
EXACT = {"resilience.mode": "exact"}
SEVERAL_HOSTS = {"resilience.service": "127.0.0.1:1", "resilience.wanted": "2", "launch.host": "here"}

TRIES: dict[str, Try] = {
    "run.folder": Try(value="{folder}/elsewhere"),
    "model.preset": Try(value="laptop", beside={"train.steps": "1"}),
    "model.num_layers": Try(value="3"),
    "model.hidden": Try(value="64"),
    "model.num_heads": Try(value="2"),
    "model.num_kv_heads": Try(value="4"),
    "model.head_dim": Try(value="16"),
    "model.vocab": Try(value="512"),
    "model.num_experts": Try(value="4"),
    "model.top_k": Try(value="1"),
    "model.expert_ffn": Try(value="32"),
    "model.shared_ffn": Try(value="16"),
    "model.dense_layers": Try(value="1", beside={"model.num_layers": "3", "model.dense_layers": "2", "model.dense_ffn": "64"}),
    "model.dense_ffn": Try(value="32", beside={"model.dense_layers": "1", "model.dense_ffn": "64"}),
    "model.qk_norm": Try(value="head"),
    "model.rope_theta": Try(value="5000"),
    "model.norm_eps": Try(value="0.001"),
    "model.shared_gate": Try(beside={"model.shared_ffn": "16"}),
    "model.mtp_layers": Try(value="1"),
    "model.mtp_weight": Try(value="0.7", beside={"model.mtp_layers": "1"}),
    "model.q_rank": Try(value="16", beside=LATENT),
    "model.kv_rank": Try(value="8", beside=LATENT),
    "model.nope_dim": Try(value="16", beside=LATENT),
    "model.rope_dim": Try(value="16", beside=LATENT),
    "model.value_dim": Try(value="16", beside=LATENT),
    "model.rope_interleaved": Try(value="false", beside=LATENT),
    "model.yarn_factor": Try(value="8", beside=STRETCHED),
    "model.yarn_original_length": Try(value="4", beside=STRETCHED),
    "model.yarn_beta_fast": Try(value="0.5", beside={**STRETCHED, "model.yarn_beta_slow": "0.1"}),
    "model.yarn_beta_slow": Try(value="0.1", beside=STRETCHED),
    "model.yarn_mscale": Try(value="0.5", beside=STRETCHED),
    "model.yarn_mscale_all_dim": Try(value="0.5", beside={**LATENT, **STRETCHED}),
    "router.score": Try(value="sigmoid"),
    "router.softmax_order": Try(value="after_topk"),
    "router.renormalize": Try(value="false"),
    "router.scale": Try(value="2"),
    "router.num_groups": Try(value="2", beside={"router.num_groups": "4", "router.group_topk": "1"}),
    "router.group_topk": Try(value="1", beside=GROUPS),
    "router.group_score": Try(value="max", beside={**GROUPS, "model.top_k": "4"}),
    "router.aux_scope": Try(value="sequence", beside={"train.micro_batch": "2"}),
    "router.bias_rate": Try(value="0.5"),
    "router.force": Try(value="balanced"),
    "router.force_skew": Try(value="2", beside={"router.force": "imbalanced"}),
    "dispatch.capacity_factor": Try(value="0.5", beside=DROPS),
    "dispatch.drop_by": Try(value="position", beside={**DROPS, "dispatch.capacity_factor": "0.5"}),
    "dispatch.drop_scope": Try(value="full_sequence", beside={**DROPS, "folding.tp": "2"}),
    "dispatch.pad_to_capacity": Try(beside=DROPS),
    "dispatch.transport": Try(value="all_gather", beside=TWO_PARTS),
    "dispatch.overlap": Try(value="coarse:2", beside=TWO_PARTS),
    "dispatch.left_free": Try(value="4", beside={**TWO_PARTS, "dispatch.overlap": "fine"}),
    "folding.cp_method": Try(value="all_gather", beside={"folding.cp": "2"}),
    "folding.pp": Try(value="2", beside={"model.num_layers": "4"}),
    "folding.ep": Try(value="2"),
    "folding.stages": Try(value='["tp1", "tp1"]', beside={"folding.ep": ""}),
    "pipeline.schedule": Try(value="gpipe", beside=TWO_STAGES),
    "pipeline.virtual": Try(value="2", beside={**TWO_STAGES, "train.global_batch": "8"}),
    "pipeline.layers": Try(value="1, 3", beside=TWO_STAGES),
    "pipeline.extra_warmup": Try(value="auto", beside=EAGER),
    "pipeline.memory_gb": Try(value="1e-6", beside={**EAGER, "pipeline.extra_warmup": "auto"}),
    "pipeline.pair_passes": Try(beside=TWO_PARTS),
    "data.sources": Try(value='["{other}"]'),
    "data.weights": Try(value="[1, 5]", beside={"data.sources": '["{text}", "{other}"]'}),
    "data.tokenizer": Try(value="bpe:300"),
    "data.text_field": Try(value="body", beside={"data.sources": '["{records}"]'}),
    "data.eos_token": Try(value="b", beside={"data.tokenizer": "{tokenizer}", "data.eos_token": "a"}),
    "data.builtin_bytes": Try(value="300000", beside={"data.sources": '["builtin:python"]', "data.builtin_bytes": "200000"}),
    "data.cache": Try(value="{folder}/cache"),
    "train.steps": Try(value="1"),
    "train.global_batch": Try(value="8"),
    "train.micro_batch": Try(value="2"),
    "train.dtype": Try(value="float64"),
    "train.seq_len": Try(value="32"),
    "train.eval_interval": Try(value="2"),
    "train.eval_batches": Try(value="2"),
    "train.recompute": Try(value="full"),
    "optim.warmup_steps": Try(value="1"),
    "optim.decay_steps": Try(value="2", beside={"optim.schedule": "wsd", "optim.decay_steps": "1"}),
    "optim.eps": Try(value="0.01"),
    "optim.zero": Try(value="0"),
    "optim.clip_norm": Try(value="0.01"),
    "optim.bucket_mb": Try(value="0.001"),
    "resilience.mode": Try(value="exact"),
    "resilience.heal": Try(value="true", beside={"resilience.mode": "fast"}, members={"resilience.f": ""}),
    "resilience.service": Try(value="127.0.0.1:2", members=SEVERAL_HOSTS),
    "resilience.wanted": Try(value="4", members=SEVERAL_HOSTS),
    "resilience.minimum": Try(value="2"),
    "resilience.straggler": Try(value="3"),
    "resilience.straggler_steps": Try(value="5"),
    "resilience.straggler_rest_s": Try(value="5", members={"resilience.straggler": "3"}),
    "resilience.state_gb": Try(value="1"),
    "resilience.chunk_rows": Try(value="16", beside=EXACT),
    "resilience.fixed_bits": Try(value="40", beside=EXACT),
    "resilience.slots_per_rank": Try(value="5", beside={"folding.ep": "", "resilience.mode": "fast"}, members={"resilience.f": "1"}),
    "resilience.f": Try(value="2", beside={**REPLICAS, "resilience.slots_per_rank": "8"}, members={"resilience.slots_per_rank": "", "folding.ep": "1"}),
    "resilience.loads": Try(value="{loads}", beside=REPLICAS),
    "resilience.replace_interval": Try(value="1", beside={**REPLICAS, "train.steps": "3"}),
    "resilience.move_beside": Try(value="false", beside=MOVES),
    "resilience.expert_state": Try(value="sharded", beside={**REPLICAS, "resilience.slots_per_rank": "8"}),
    "checkpoint.interval": Try(value="2"),
    "checkpoint.keep_last": Try(value="1"),
    "checkpoint.write_rate": Try(value="100"),
    "checkpoint.resume": Try(value="false", again=True),
    "checkpoint.step": Try(value="1", again=True),
    "observe.console": Try(value="plain"),
    "observe.log_interval": Try(value="2", beside={"observe.console": "plain"}),
    "observe.wandb_project": Try(value="some"),
    "observe.wandb_mode": Try(value="offline"),
    "observe.prometheus_port": Try(value="{port}"),
    "observe.prometheus_address": Try(value="0.0.0.0", beside={"observe.prometheus_port": "{port}"}),
    "observe.trace_steps": Try(value="1, 2"),
    "launch.ranks": Try(value="4"),
    "launch.threads": Try(value="2"),
    "launch.device": Try(value="cuda"),
    "launch.host": Try(value="there", members=SEVERAL_HOSTS),
    "launch.rack": Try(value="r1", members=SEVERAL_HOSTS),
    "launch.keep_service": Try(members=SEVERAL_HOSTS),
}  # fmt: skip
"""Settings that need another value than the first that comes to mind, or others beside them. An empty value leaves a setting out."""

ELSEWHERE = {"dispatch.left_free", "observe.wandb_mode", "observe.wandb_project"}
"""They do nothing on a machine without a GPU, or without a package that is not installed for tests, and are refused there."""


BY_REFUSING = {"checkpoint.resume", "pipeline.memory_gb"}
"""What they do is to end a run that would mix with another one, or that would hold more."""


def other_value(setting: Setting) -> str:
    """One that is not the default, for settings of which any will do."""
    if setting.choices:
        return str(next(c for c in setting.choices if c != setting.default))
    if setting.base is bool:
        return "false" if setting.default else "true"
    if setting.base is str:
        return "other"
    default = setting.default
    assert isinstance(default, int | float), f"{setting.name} needs an entry in TRIES"
    return str(default + 1 if setting.base is int else default / 2 or 0.25)


def words_of(name: str, world: World) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of the run without the setting that is tried, and of the one with it."""
    setting = next(s for s in describe_settings() if s.name == name)
    found = TRIES.get(name, Try())
    short = {"train.steps": "1"} if setting.section in ONE_STEP else {}
    ours = {**ELASTIC, **found.beside, **found.members} if world == "elastic" else found.beside
    base = {**BASE, **short, **ours}
    value = found.value or other_value(setting)
    if base.get(name) == value:
        value = "false" if value == "true" else "true"
    return base, {**base, name: value}


# ---- on the ranks ----------------------------------------------------------------------------------------------------

_SEEN: dict[str, Seen] = {}  # tests only: what was seen of runs that are the base of several


def tried(
    rank: int, cache: GroupCache, name: str, base: dict[str, str], changed: dict[str, str], folder: str, plant: Plant
) -> tuple[str, list[str]]:
    """("changes", what), ("refused", why) or ("nothing", []); ("wrong", why) where the setting cannot be tried so. Collective."""
    places = json.loads(Path(folder, "places.json").read_text())
    again = TRIES.get(name, Try()).again
    with contextlib.ExitStack() as stack:
        for owner, attribute, new in plant:
            stack.enter_context(mock.patch.object(owner, attribute, new))

        def run(words: Mapping[str, str], own: str) -> Seen:
            home = Path(folder, own)
            texts = {k: v.format(folder=home, **places) for k, v in words.items() if v}
            line = [word for k, v in texts.items() for word in (f"--{k}", v)]
            return seen_of(line, rank=rank, cache=cache, folder=home)

        key = json.dumps([base, again])
        try:
            if key not in _SEEN or plant:
                if again:
                    run(base, "base")
                _SEEN[key] = run(base, "base")
            if again:
                run(base, "changed")
            seen, before = run(changed, "changed"), _SEEN[key]
        except (ConfigError, DataError) as err:
            named = [str(p) for p in err.problems if p.where.removeprefix("--").split("[")[0] == name]
            return ("refused", named) if named else ("wrong", [str(err)])
    differ = sorted(path for path in {*seen, *before} if seen.get(path) != before.get(path))
    return ("changes" if differ else "nothing"), differ[:4]


Plant = tuple[tuple[Any, str, Any], ...]
"""What is patched on the ranks: (owner, name, new value)."""


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder for one attempt, beside files that all of them read."""
    shared = tmp_path_factory.mktemp("shared")
    write_text(shared / "text", files=3)
    write_text(shared / "other", files=5)
    records = [{"text": "some text " * 20 + str(i), "body": "another body " * 30 + str(i)} for i in range(40)]
    (shared / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (shared / "loads.json").write_text(json.dumps([9, 1, 1, 1, 1, 1, 1, 1]))
    _write_tokenizer(shared / "tokenizer.json")
    found = {
        "text": shared / "text", "other": shared / "other", "records": shared / "records.jsonl", "cache": shared / "cache",
        "loads": shared / "loads.json", "tokenizer": shared / "tokenizer.json", "port": 19123,
    }  # fmt: skip

    def make() -> Path:
        folder = tmp_path_factory.mktemp("try")
        (folder / "places.json").write_text(json.dumps({k: str(v) for k, v in found.items()}))
        return folder

    return make


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["a", "b"])
    tokenizer.save(str(path))


def try_it(name: str, world: World, folder: Path, plant: Plant = ()) -> tuple[str, list[str]]:
    base, changed = words_of(name, world)
    return run_ranks(2, tried, name, base, changed, str(folder), plant)[0]


@pytest.mark.parametrize("name", [s.name for s in describe_settings()])
def test_a_setting_changes_something_or_is_refused(name: str, places: Callable[[], Path]) -> None:
    found = {world: try_it(name, world, places()) for world in ("fixed", "elastic")}  # type: ignore[arg-type]
    assert all(what != "nothing" for what, _ in found.values()), f"{name} is accepted and ignored: {found}"
    assert all(what != "wrong" for what, _ in found.values()), f"{name} needs another entry in TRIES: {found}"
    assert name in ELSEWHERE | BY_REFUSING or any(what == "changes" for what, _ in found.values()), found


@pytest.mark.parametrize("world", ["fixed", "elastic"])
def test_two_runs_of_one_recipe_look_the_same(world: World, places: Callable[[], Path]) -> None:
    """Else every setting would seem to change something."""
    base, _ = words_of("run.name", world)
    assert run_ranks(2, tried, "run.name", base, base, str(places()), ())[0] == ("nothing", [])


def test_a_setting_that_an_elastic_run_ignores_is_found(places: Callable[[], Path]) -> None:
    """As `pipeline.extra_warmup` was, when the loop of such runs was another one."""
    plant: Plant = tuple((owner, "measures_warmup", _never) for owner in (build, loop))
    for name in ("pipeline.extra_warmup", "pipeline.memory_gb"):
        assert try_it(name, "elastic", places(), plant) == ("nothing", [])


def _never(*_: object) -> bool:
    return False


def test_each_entry_names_a_setting() -> None:
    names = {s.name for s in describe_settings()}
    assert not (set(TRIES) | ELSEWHERE | BY_REFUSING) - names
    assert {f.name for f in dataclasses.fields(Try)} == {"value", "beside", "members", "again"}
