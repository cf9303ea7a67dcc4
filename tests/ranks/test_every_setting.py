"""Every setting of a recipe changes something in the run that it is given to, or is refused by name: with a fixed world, and with members that come and go.

A setting that is accepted and ignored is the worst kind of drift: nobody finds out. So each is tried: a run with it and one without go from `cli.train.start` to the last
checkpoint (`helpers/started.py`), and what anybody can observe of them must differ. What only shows when something goes wrong, or by the clock, is named with the test that shows it.
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
from started import OBSERVED, Seen, seen_of
from tiers import some
from train_help import write_text

from phalanx.cli.launching import Request, read_recipe
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.settings import Setting, describe_settings
from phalanx.plan import choose_recovery
from phalanx.runtime.checkpoint.folder import CheckpointFolder
from phalanx.runtime.checkpoint.manager import import_now
from phalanx.runtime.comm.groups import GroupCache
from phalanx.train import build, loop
from ranks import run_ranks

pytestmark = pytest.mark.ranks
import_now()  # once, and not by each rank

World = Literal["fixed", "elastic"]
WORLDS: tuple[World, ...] = ("fixed", "elastic")
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
    "observe.trace_steps": "1",
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
STRETCHED = {"model.yarn_factor": "4", "model.yarn_original_length": "4096"}
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
    "model.init_std": Try(value="0.01"),
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
    "model.yarn_original_length": Try(value="64", beside=STRETCHED),
    "model.yarn_beta_fast": Try(value="4", beside=STRETCHED),
    "model.yarn_beta_slow": Try(value="0.1", beside=STRETCHED),
    "model.yarn_mscale": Try(value="0.5", beside={**STRETCHED, "model.yarn_mscale": "1", "model.yarn_mscale_all_dim": "1"}),
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
    "pipeline.schedule": Try(value="zero_bubble", beside=TWO_STAGES),
    "pipeline.virtual": Try(value="2", beside={**TWO_STAGES, "train.global_batch": "8"}),
    "pipeline.layers": Try(value="1, 3", beside=TWO_STAGES),
    "pipeline.extra_warmup": Try(value="auto", beside=EAGER),
    "pipeline.memory_gb": Try(value="1e-6", beside={**EAGER, "pipeline.extra_warmup": "auto"}),
    "pipeline.pair_passes": Try(beside=TWO_PARTS),
    "data.sources": Try(value='["{other}"]'),
    "data.weights": Try(value="[1, 5]", beside={"data.sources": '["{text}", "{other}"]'}),
    "data.tokenizer": Try(value="bpe:300"),
    "data.text_field": Try(value="body", beside={"data.sources": '["{records}"]'}),
    "data.chat_template": Try(value="{chat}", beside={"data.sources": '["{talks}"]', "data.tokenizer": "bpe:300", "data.chat_template": "chatml", "train.seq_len": "64"}),
    "data.bos_token": Try(value="b", beside={"data.tokenizer": "{tokenizer}", "data.eos_token": "a"}),
    "data.eos_token": Try(value="b", beside={"data.tokenizer": "{tokenizer}", "data.eos_token": "a"}),
    "data.builtin_bytes": Try(value="1000000", beside={"data.sources": '["builtin:python"]', "data.builtin_bytes": "100000"}),
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
    "optim.lr": Try(value="1e-3"),
    "optim.eps": Try(value="0.01"),
    "optim.zero": Try(value="0"),
    "optim.state_dtype": Try(value="bfloat16", beside={"train.steps": "4"}),  # whether two show it depends on the processor
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
    "resilience.chunk_rows": Try(value="16", beside={**EXACT, "train.seq_len": "128"}),
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
    "checkpoint.fall_back": Try(again=True),
    "observe.console": Try(value="plain"),
    "observe.log_interval": Try(value="3", beside={"observe.console": "plain", "observe.log_interval": "1", "train.steps": "4"}),
    "observe.wandb_project": Try(value="some"),
    "observe.wandb_mode": Try(value="offline"),
    "observe.prometheus_port": Try(value="{port}"),
    "observe.prometheus_address": Try(value="0.0.0.0", beside={"observe.prometheus_port": "{port}"}),
    "observe.sinks": Try(value="mine"),
    "observe.trace_steps": Try(value="1, 2"),
    "launch.ranks": Try(value="4"),
    "launch.threads": Try(value="2"),
    "launch.device": Try(value="cuda"),
    "launch.host": Try(value="there", members=SEVERAL_HOSTS),
    "launch.rack": Try(value="r1", members=SEVERAL_HOSTS),
    "launch.keep_service": Try(members=SEVERAL_HOSTS),
}  # fmt: skip
"""Settings that need another value than the first that comes to mind, or others beside them. An empty value leaves a setting out."""

ELSEWHERE = {"dispatch.left_free", "observe.sinks", "observe.wandb_mode", "observe.wandb_project"}
"""They do nothing on a machine without a GPU, or without a package that is not installed for tests, and are refused there."""


BY_REFUSING = {"checkpoint.resume", "pipeline.memory_gb"}
"""What they do is to end a run that would mix with another one, or that would hold more."""


OF_HOSTS = "runs/test_elastic_bad_luck.py::test_a_host_with_another_recipe_and_a_stranger_are_refused_by_name_and_the_run_goes_on"
TOO_FEW = "runs/test_elastic_bad_luck.py::test_too_few_members_wait_say_for_whom_save_and_end"
TOO_SLOW = "runs/test_straggler_run.py::test_a_slow_rank_hands_over_leaves_and_stays_away"
PROVEN_BY = {
    "pipeline.pair_passes": "ranks/test_pairs_run.py::test_ranks_may_interleave_their_passes_as_they_come",
    "resilience.service": OF_HOSTS,
    "resilience.wanted": "ranks/test_membership.py::test_a_fresh_run_waits_for_all_that_are_wanted",
    "resilience.minimum": TOO_FEW,
    "resilience.wait_s": TOO_FEW,
    "resilience.limit_s": "unit/test_membership_outage.py::test_a_host_that_dies_while_the_service_is_away_is_put_out_after_the_limit",
    "resilience.hang_s": "runs/test_elastic_bad_luck.py::test_a_rank_that_hangs_while_it_heartbeats_is_named_and_replaced",
    "resilience.straggler": TOO_SLOW,
    "resilience.straggler_steps": TOO_SLOW,
    "resilience.straggler_rest_s": "unit/test_supervisor_deaths.py::test_a_slot_that_was_too_slow_is_filled_again_after_its_rest",
    "resilience.state_gb": "unit/test_recovery_plans.py::test_ranks_are_rather_idle_than_without_room",
    "resilience.f": "unit/test_plan_replicas.py::test_every_input_has_an_answer_that_holds_what_it_says",
    "checkpoint.asynchronous": "ranks/test_checkpoint.py::test_a_save_is_completed_between_later_steps_or_by_nobody",
    "checkpoint.wait_s": "unit/test_checkpoint_losses.py::test_the_last_save_tries_again_while_the_disk_refuses_it",
    "checkpoint.write_rate": "ranks/test_checkpoint.py::test_a_checkpoint_is_written_no_faster_than_the_limit",
    "launch.ranks": "runs/test_launch.py::test_ranks_meet_and_compute",
    "launch.threads": "runs/test_launch.py::test_threads_share_the_cores",
    "launch.device": "ranks/test_devices.py::test_an_elastic_run_without_gpus_says_so_once_and_ends",
    "launch.timeout_s": "ranks/test_collectives.py::test_timeout_names_op_axis_and_ranks",
    "launch.rack": "unit/test_plan_racks.py::test_shards_have_holders_in_as_many_racks_as_can_be",
    "launch.keep_service": OF_HOSTS,
}  # fmt: skip
"""Settings of which runs where nothing goes wrong show nothing, or not in both worlds: there it is only seen that they are handed on. With the test of what they do."""


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
    """("changes", what), ("handed on", where) if only that, ("refused", why) or ("nothing", []); ("wrong", why) where the setting cannot be tried so. Collective."""
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
    observed = [path for path in differ if path.startswith(OBSERVED)]
    return ("changes" if observed else "handed on" if differ else "nothing"), (observed or differ)[:4]


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
    talks = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"some text {i}"}]}
        for i in range(40)
    ]
    (shared / "talks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    (shared / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (shared / "loads.json").write_text(json.dumps([9, 1, 1, 1, 1, 1, 1, 1]))
    _write_tokenizer(shared / "tokenizer.json")
    found = {
        "text": shared / "text", "other": shared / "other", "records": shared / "records.jsonl", "talks": shared / "talks.jsonl", "chat": shared / "chat.jinja", "cache": shared / "cache",
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


NAMES = [s.name for s in describe_settings()]
TODAY = some(NAMES, 2)
"""Those that the core tier tries, too: a setting takes two seconds."""


def bases() -> dict[str, tuple[str, World]]:
    """Each run that settings are held against, by its words -> the first of those settings, and its world."""
    found: dict[str, tuple[str, World]] = {}
    for name in NAMES:
        for world in WORLDS:
            base, _ = words_of(name, world)
            found.setdefault(json.dumps([base, TRIES.get(name, Try()).again]), (name, world))
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.core if n in TODAY else ()) for n in NAMES])
def test_a_setting_changes_something_or_is_refused(name: str, places: Callable[[], Path]) -> None:
    found = {world: try_it(name, world, places()) for world in WORLDS}
    kinds = {what for what, _ in found.values()}
    assert "nothing" not in kinds, f"{name} is accepted and ignored: {found}"
    assert "wrong" not in kinds, f"{name} needs another entry in TRIES: {found}"
    assert ("handed on" in kinds) == (name in PROVEN_BY), (
        f"{name} shows nothing, or does and stands in PROVEN_BY: {found}"
    )
    assert name in ELSEWHERE | BY_REFUSING or kinds & {"changes", "handed on"}, found


def some_bases() -> list[Any]:
    first, *others = some(list(bases().values()), 4)
    return [pytest.param(*first, marks=pytest.mark.core), *others]


@pytest.mark.parametrize(("name", "world"), some_bases())
def test_two_runs_of_one_recipe_look_the_same(name: str, world: World, places: Callable[[], Path]) -> None:
    """Else every setting that is held against it would seem to change something."""
    base, _ = words_of(name, world)
    assert run_ranks(2, tried, name, base, base, str(places()), ())[0] == ("nothing", [])


def test_a_setting_that_is_stored_and_never_read_is_found(places: Callable[[], Path]) -> None:
    plant: Plant = ((CheckpointFolder, "prune", _never),)
    assert try_it("checkpoint.keep_last", "fixed", places(), plant)[0] == "handed on"


def refused(words: Words, *, launched: bool) -> tuple[set[str], bool]:
    """The settings that are refused before ranks are there, and whether the run would be elastic."""
    line = [word for k, v in words.items() if v for word in (f"--{k}", v)]
    try:
        recipe = read_recipe(Request(None, tuple(line), False), world=2 if launched else None)
        return set(), choose_recovery(recipe, launched=launched).is_elastic
    except ConfigError as err:
        return {p.where.removeprefix("--").split("[")[0] for p in err.problems}, False


@pytest.mark.core
def test_where_the_recipe_leaves_recovery_open_the_same_is_refused_as_where_it_says_so(
    places: Callable[[], Path],
) -> None:
    """By default, and under a launcher, a run is one of the two worlds."""
    folder = places()
    found = json.loads((folder / "places.json").read_text())
    for name in [n for n in NAMES if n not in ("resilience.heal", "launch.ranks")]:
        _, changed = words_of(name, "fixed")
        words = {k: v.format(folder=folder, **found) for k, v in changed.items() if k != "resilience.heal"}
        fixed, _ = refused({**words, "resilience.heal": "false"}, launched=False)
        launched, elastic = refused(words, launched=True)
        assert (name in launched) == (name in fixed) and not elastic, name
        by_default, elastic = refused(words, launched=False)
        if elastic:
            mode = "exact" if words.get("resilience.mode") == "exact" else "fast"
            fixed, _ = refused({**words, "resilience.heal": "true", "resilience.mode": mode}, launched=False)
        assert (name in by_default) == (name in fixed), name


def test_a_setting_that_an_elastic_run_ignores_is_found(places: Callable[[], Path]) -> None:
    """As `pipeline.extra_warmup` was, when the loop of such runs was another one."""
    plant: Plant = tuple((owner, "measures_warmup", _never) for owner in (build, loop))
    for name in ("pipeline.extra_warmup", "pipeline.memory_gb"):
        assert try_it(name, "elastic", places(), plant) == ("nothing", [])


def _never(*_: object, **__: object) -> bool:
    return False


def test_each_entry_names_a_setting() -> None:
    names = {s.name for s in describe_settings()}
    assert not (set(TRIES) | ELSEWHERE | BY_REFUSING | set(PROVEN_BY)) - names
    for test in PROVEN_BY.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / file).read_text(), f"{test} is no test"
    assert {f.name for f in dataclasses.fields(Try)} == {"value", "beside", "members", "again"}
