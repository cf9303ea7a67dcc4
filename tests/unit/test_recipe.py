"""Recipes in: what is read from TOML and the command line, and every way in which it can be wrong, with the exact words."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from tiers import some

from phalanx.cli.launching import Request, read_recipe
from phalanx.core.config import Recipe, RouterConfig, TrainConfig
from phalanx.core.errors import ConfigError, Problem
from phalanx.core.processor import MULTIPLIES_BF16, Processor, this_processor
from phalanx.core.recipe import load_recipe, native_dtype
from phalanx.core.rules import EFFECTS, LIMITS, plain, recipe_problems
from phalanx.core.settings import describe_settings
from phalanx.plan.recipe import run_problems

pytestmark = pytest.mark.unit


def problems_of(
    *overrides: str, toml: str | None = None, tmp_path: Path | None = None, **more: object
) -> list[Problem]:
    """What `load_recipe` complains about; the recipe file is called a.toml."""
    path = None
    if toml is not None:
        assert tmp_path is not None
        path = tmp_path / "a.toml"
        path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides, **more)  # type: ignore[arg-type]
    short = str(tmp_path) + "/" if tmp_path else "\0"
    return [dataclasses.replace(p, where=p.where.replace(short, "")) for p in caught.value.problems]


def only(*overrides: str, **more: object) -> Problem:
    found = problems_of(*overrides, **more)  # type: ignore[arg-type]
    assert len(found) == 1, [str(p) for p in found]
    return found[0]


def test_the_fastest_type_is_decided_when_the_recipe_is_read() -> None:
    auto, old = ["--train.dtype", "auto"], partial(native_dtype, processor=Processor())
    assert (
        load_recipe(None, auto, auto_dtype=partial(native_dtype, processor=MULTIPLIES_BF16)).train.dtype == "bfloat16"
    )
    assert load_recipe(None, auto, auto_dtype=old).train.dtype == "float32"
    assert load_recipe(None, [*auto, "--launch.device", "cuda"], auto_dtype=old).train.dtype == "bfloat16"
    assert load_recipe(None, ["--train.dtype", "bfloat16"], auto_dtype=old).train.dtype == "bfloat16"
    several = [
        *auto,
        "--resilience.service",
        "a:29400",
        "--resilience.heal",
        "true",
        "--resilience.mode",
        "fast",
        "--resilience.wanted",
        "8",
    ]
    assert load_recipe(None, several, auto_dtype=old).train.dtype == "bfloat16"  # hosts need not be alike
    (made_by_hand,) = recipe_problems(Recipe(train=TrainConfig(dtype="auto")))
    assert made_by_hand.where == "train.dtype" and "where a recipe is read" in made_by_hand.rule


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_a_run_goes_on_in_the_type_that_it_began_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """On whatever machine: its recipe says which."""
    monkeypatch.setattr(
        "phalanx.core.recipe.this_processor", Processor if kept == "bfloat16" else lambda: MULTIPLIES_BF16
    )
    words = ("--train.dtype", "auto", "--run.folder", str(tmp_path), "--run.name", "one", "--launch.ranks", "4")
    ask = Request(recipe_path=None, overrides=words, dry_run=False)
    assert read_recipe(ask, world=None).train.dtype != kept
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "recipe.toml").write_text(f'[train]\ndtype = "{kept}"\n')
    assert read_recipe(ask, world=None).train.dtype == kept
    assert read_recipe(ask, world=4, several_machines=True).train.dtype == kept
    (tmp_path / "one" / "recipe.toml").unlink()
    assert read_recipe(ask, world=4, several_machines=True).train.dtype == "bfloat16"


def test_a_processor_of_arm(tmp_path: Path) -> None:
    """Grace, as its kernel tells it: numbers for names, another word for extensions."""
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    found = this_processor(told)
    assert found.name == "ARM 0x41 0xd4f" and {"sve", "bf16"} <= found.flags and found.dtype == "float32"
    told.write_text("processor\t: 0\n")
    assert this_processor(told) == Processor()


def test_defaults_are_a_legal_recipe() -> None:
    assert load_recipe(None, []) == Recipe()
    assert recipe_problems(Recipe(), world=4) == []
    assert run_problems(Recipe(), world=4) == []


def test_default_then_file_then_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[train]\nsteps = 7\nseq_len = 64\n[data]\nsources = ["x.txt", "y.jsonl"]\nweights = [1, 2.5]\n')
    recipe = load_recipe(path, ["--train.steps", "9", "--optim.lr=3e-4"])
    assert (recipe.train.steps, recipe.train.seq_len, recipe.train.seed) == (9, 64, 0)
    assert recipe.optim.lr == 3e-4
    assert recipe.data.sources == ("x.txt", "y.jsonl")
    assert recipe.data.weights == (1.0, 2.5) and all(type(w) is float for w in recipe.data.weights)


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["--train.steps", "10"], "train", "steps", 10),
        (["--train.steps=10"], "train", "steps", 10),
        (["--train.steps", "3", "--train.steps", "5"], "train", "steps", 5),
        (["--optim.lr", "3e-4"], "optim", "lr", 3e-4),
        (["--optim.lr", "1"], "optim", "lr", 1.0),
        (["--train.deterministic", "true"], "train", "deterministic", True),
        (["--observe.tensorboard=false"], "observe", "tensorboard", False),
        (["--data.sources", "a.txt,b/*.jsonl"], "data", "sources", ("a.txt", "b/*.jsonl")),
        (["--data.sources", '["a, b.txt", "c.txt"]'], "data", "sources", ("a, b.txt", "c.txt")),
        (["--folding.ep", "none"], "folding", "ep", None),
        (["--model.qk_norm", "none"], "model", "qk_norm", "none"),
        (["--optim.zero", "0"], "optim", "zero", 0),
        (["--run.folder=a=b"], "run", "folder", "a=b"),
        (["--model.norm_eps", "1e-6"], "model", "norm_eps", 1e-6),
    ],
)
def test_overrides(words: list[str], section: str, key: str, value: object) -> None:
    found = getattr(getattr(load_recipe(None, words), section), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("word", "value", "rule", "hint"),
    [
        ("--train.stepz", "3", "is not a setting", "did you mean '--train.steps'?"),
        ("--train.lr", "3", "is not a setting", "did you mean '--optim.lr'?"),
        ("--train.step", "3", "is not a setting", "did you mean '--train.steps' or '--checkpoint.step'?"),
        ("--steps", "3", "is not a setting", "did you mean '--train.steps'?"),
        ("--trian.steps", "3", "is not a setting", "did you mean '--train.steps'?"),
        ("--train.steps", "ten", "must be a whole number", "the default is 300"),
        ("--train.steps", "1e3", "must be a whole number", "write 1000"),
        ("--train.steps", "2.0", "must be a whole number", "write 2"),
        ("--optim.lr", "fast", "must be a number", "write it like 3e-4"),
        ("--optim.lr", "inf", "must be a finite number", "write it like 3e-4"),
        ("--train.deterministic", "yes", "must be true or false", "write true or false"),
        (
            "--train.dtype",
            "bf16",
            'must be one of "bfloat16", "float32", "float64", "auto"',
            "did you mean 'bfloat16'?",
        ),
        ("--optim.zero", "3", "must be one of 0, 1, 2", "legal: 0, 1, 2"),
        ("--router.score", "tanh", 'must be one of "softmax", "sigmoid"', "legal: sigmoid, softmax"),
        ("--train.steps", "none", "must be a whole number", "the default is 300"),
        ("--train.steps", "1e99", "must be a whole number", "the default is 300"),
        ("--data.weights", "1,x", "must be a list, each a number", None),
        ("--run.name", "\udcff", "must be valid UTF-8 text", ""),
    ],
)
def test_overrides_that_cannot_be_read(word: str, value: str, rule: str, hint: str | None) -> None:
    if word == "--data.weights":
        rule, hint = "must be a list, each a number", "write it like 3e-4"
    assert only(word, value) == Problem(where=word, value=value, rule=rule, hint=hint or "")


def test_words_that_are_no_overrides() -> None:
    hint = "write --section.key VALUE, as in --train.steps 10"
    assert only("steps=3") == Problem(where="argument", value="steps=3", rule="is not an override", hint=hint)
    assert only("--train.steps", "3", "a.toml").hint == "a recipe comes first, before all settings"
    assert only("--train.deterministic") == Problem(
        where="--train.deterministic",
        value="",
        rule="needs a value, which must be true or false",
        hint="write --train.deterministic true",
    )
    missing = only("--train.dtype", "--train.steps", "3")
    assert missing.where == "--train.dtype" and missing.hint == "write --train.dtype bfloat16"
    listed = only("--data.sources", "[1")
    assert listed.where == "--data.sources" and listed.hint.startswith("as a TOML list it is broken")


@pytest.mark.parametrize(
    ("toml", "where", "value", "rule", "hint"),
    [
        ("[train]\nstepz = 3", "train.stepz", 3, "is not a setting", "did you mean 'train.steps'?"),
        ("steps = 4", "steps", 4, "is not a setting", "did you mean 'train.steps'?"),
        ("magic = 4", "magic", 4, "is not a setting", "keys belong below a [section]"),
        ("[optm]\nlr = 1", "optm", "[optm]", "is not a section", "did you mean 'optim'?"),
        ("train = 4", "train", 4, "is a section, not a value", "write [train] and below it KEY = VALUE"),
        ("[train]\nsteps = 8.0", "train.steps", 8.0, "must be a whole number", "write 8"),
        ("[train]\nsteps = true", "train.steps", True, "must be a whole number", "the default is 300"),
        ('[train]\nsteps = "8"', "train.steps", "8", "must be a whole number", "write 8 without quotes"),
        ('[train]\ndeterministic = "true"', "train.deterministic", "true", "must be true or false", "write true without quotes"),
        ("[run]\nname = 3", "run.name", 3, "must be text", 'write "3"'),
        ('[data]\nsources = "a.txt"', "data.sources", "a.txt", "must be a list, each text", 'write ["a.txt"]'),
        ("[data]\nsources = [1]", "data.sources", [1], "must be a list, each text", 'write "1"'),
        ("[optim]\nlr = 2024-01-01", "optim.lr", None, "must be a number", "write it like 3e-4"),
        ("[optim]\nlr = nan", "optim.lr", None, "must be a finite number", "write it like 3e-4"),
        ('[optim]\nzero = true', "optim.zero", True, "must be one of 0, 1, 2", "legal: 0, 1, 2"),
        ("[folding]\nworld = 1", "folding.world", 1, "is not a setting",
         "legal: folding.tp, folding.cp, folding.cp_method, folding.pp, folding.ep, folding.etp, folding.stages"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(toml: str, where: str, value: object, rule: str, hint: str, tmp_path: Path) -> None:
    found = only(toml=toml, tmp_path=tmp_path)
    assert (found.where, found.rule, found.hint) == (f"a.toml: {where}", rule, hint)
    assert value is None or found.value == value


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "laptop.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "latop.toml", ["--train.steps", "0"])
    first, second = caught.value.problems
    assert (first.where, first.rule, first.hint) == ("recipe", "is not a file", "did you mean 'laptop.toml'?")
    assert second == Problem(where="--train.steps", value=0, rule="must be at least 1", hint="use 1")
    with pytest.raises(ConfigError, match=r"is not a file; there is no recipe in .*/no"):
        load_recipe(tmp_path / "no" / "a.toml", [])
    with pytest.raises(ConfigError, match=r"is not a file; did you mean 'laptop', which comes with Phalanx\?"):
        load_recipe(tmp_path / "no" / "laptop.toml", [])


def test_broken_files_say_where(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train]\nsteps = \n")
    with pytest.raises(ConfigError, match=r"is not TOML: Invalid value \(at line 2, column 9\)"):
        load_recipe(bad, [])
    bad.write_bytes(b'[run]\nname = "\xff"')
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 14\)"):
        load_recipe(bad, [])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; give the path"):
        load_recipe(tmp_path, [])
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(ConfigError, match=r"Is a directory; did you mean '.*/recipe\.toml'"):
        load_recipe(tmp_path, [])


def test_a_broken_file_makes_no_follow_up_noise(tmp_path: Path) -> None:
    """Effects are judged only where what they depend on was read."""
    found = problems_of("--dispatch.drop_by", "position", toml="[dispatch\n", tmp_path=tmp_path)
    assert [p.where for p in found] == ["recipe"]
    found = problems_of(toml='[dispatch]\npolicy = "dropp"\ndrop_by = "position"', tmp_path=tmp_path)
    assert [p.where for p in found] == ["a.toml: dispatch.policy"]
    found = problems_of(toml='[dispatch]\npolizy = "drop"\ndrop_by = "position"', tmp_path=tmp_path)
    assert [p.where for p in found] == ["a.toml: dispatch.polizy"]


def test_all_problems_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    toml = 'steps = 1\n[train]\nsteps = 0\ndtype = "bf16"\n[dispatch]\ndrop_by = "position"\n[model]\ntop_k = 99\n'
    overrides = ("--optim.lr", "-1", "--foo.bar", "3", "--router.force_skew", "2")
    found = problems_of(*overrides, toml=toml, tmp_path=tmp_path)
    assert sorted(p.where for p in found) == [
        "--foo.bar", "--optim.lr", "--router.force_skew",
        "a.toml: dispatch.drop_by", "a.toml: steps", "a.toml: train.dtype", "a.toml: train.steps",
    ]  # fmt: skip
    text = str(ConfigError(found, subject="the recipe"))
    assert text.startswith("7 problems with the recipe:\n  - a.toml: steps = 1: is not a setting")


def test_an_override_repairs_a_broken_file_value(tmp_path: Path) -> None:
    """The user still hears of the file's value, but not that the overriding one is missing."""
    found = only("--train.steps", "5", toml='[train]\nsteps = "x"', tmp_path=tmp_path)
    assert found.where == "a.toml: train.steps"


@pytest.mark.parametrize("name", some(sorted(LIMITS), 30))
def test_every_limit_refuses_and_suggests_what_it_accepts(name: str) -> None:
    limit, setting = LIMITS[name], next(s for s in describe_settings() if s.name == name)
    low = limit.least if limit.least is not None else limit.above
    assert low is not None
    beyond = low - 1 if limit.least is not None else low
    wrong = str(int(beyond) if setting.base is int else beyond)
    found = [p for p in problems_of(f"--{name}={wrong}") if p.where == f"--{name}"]
    assert found and found[0].rule.endswith(limit.rule)
    if limit.least is not None:
        assert found[0].hint == f"use {low:g}" and limit.allows(low)
    top = limit.ceiling if limit.most is None and limit.below is None else None
    if top is not None:
        found = [p for p in problems_of(f"--{name}={int(2 * top)}") if p.where == f"--{name}"]
        assert found and found[0].rule.endswith(f"must be at most {plain(top)}") and limit.allows(top)
    for bound in (limit.most, limit.below):
        if bound is not None:
            found = [p for p in problems_of(f"--{name}={10**20}") if p.where == f"--{name}"]
            assert found and found[0].rule.endswith(limit.rule) and not found[0].hint.endswith("000000000")
            assert limit.allows(bound) == (limit.most is not None) and not limit.allows(bound + 1)


@pytest.mark.parametrize(
    ("words", "where", "rule", "hint"),
    [
        (["--dispatch.capacity_factor", "2"], "--dispatch.capacity_factor",
         'has no effect because dispatch.policy = "dropless"', 'leave it out, or set dispatch.policy = "drop"'),
        (["--dispatch.pad_to_capacity", "false"], "--dispatch.pad_to_capacity",
         'has no effect because dispatch.policy = "dropless"', 'leave it out, or set dispatch.policy = "drop"'),
        (["--dispatch.left_free", "8", "--dispatch.overlap", "fine"], "--dispatch.left_free",
         'has no effect because launch.device = "cpu" has no multiprocessors', 'leave it out, or set launch.device = "cuda"'),
        (["--dispatch.left_free", "8", "--launch.device", "cuda"], "--dispatch.left_free",
         "has no effect because dispatch.overlap does not divide the device: serial and coarse:N do not",
         'leave it out, or set dispatch.overlap = "auto"'),
        (["--folding.ep", "1", "--dispatch.transport", "all_gather"], "--dispatch.transport",
         "has no effect because folding.ep = 1 and folding.etp = 1 keep every row where it is",
         "leave it out, or set folding.ep = 2"),
        (["--folding.cp_method", "ulysses"], "--folding.cp_method",
         "has no effect because folding.cp = 1 leaves every sequence whole", "leave it out, or set folding.cp = 2"),
        (["--router.score", "sigmoid", "--router.softmax_order", "before_topk"], "--router.softmax_order",
         'has no effect because router.score = "sigmoid" and no softmax comes after top-k', 'leave it out, or set router.score = "softmax"'),
        (["--router.aux_loss", "0", "--router.aux_scope", "sequence"], "--router.aux_scope",
         "has no effect because router.aux_loss = 0", "leave it out, or set router.aux_loss = 0.01"),
        (["--router.force", "balanced", "--router.force_skew", "1"], "--router.force_skew",
         'has no effect because router.force is not "imbalanced"', 'leave it out, or set router.force = "imbalanced"'),
        (["--router.force", "balanced", "--router.bias_rate", "1e-3"], "--router.bias_rate",
         "has no effect because router.force replaces the choice of experts", 'leave it out, or set router.force = "none"'),
        (["--optim.decay_steps", "4"], "--optim.decay_steps",
         'has no effect because optim.schedule is not "wsd"', 'leave it out, or set optim.schedule = "wsd"'),
        # written down, though it is the default
        (["--optim.schedule", "constant", "--optim.min_lr_ratio", "0.1"], "--optim.min_lr_ratio",
         'has no effect because optim.schedule = "constant"', 'leave it out, or set optim.schedule = "cosine"'),
        (["--checkpoint.interval", "0", "--checkpoint.asynchronous", "true"], "--checkpoint.asynchronous",
         "has no effect because checkpoint.interval = 0 makes the run wait for every save",
         "leave it out, or set checkpoint.interval = 50"),
        (["--checkpoint.resume", "false", "--checkpoint.step", "3"], "--checkpoint.step",
         "has no effect because checkpoint.resume = false", "leave it out, or set checkpoint.resume = true"),
        (["--data.weights", "1"], "--data.weights",
         "has no effect because data.sources has one entry", "leave it out, or set more data.sources"),
        (["--data.text_field", "body"], "--data.text_field",
         "has no effect because each entry of data.sources names its own field or has none",
         "leave it out, or set a .jsonl or .parquet source without #FIELD"),
        (["--data.sources", "a.jsonl#body,b/#c", "--data.text_field", "body"], "--data.text_field",
         "has no effect because each entry of data.sources names its own field or has none",
         "leave it out, or set a .jsonl or .parquet source without #FIELD"),
        (["--data.eos_token", "<eos>"], "--data.eos_token",
         "has no effect because data.tokenizer is not a tokenizer.json",
         "leave it out, or set the path of one as data.tokenizer"),
        (["--data.bos_token", "<s>"], "--data.bos_token",
         "has no effect because data.tokenizer is not a tokenizer.json",
         "leave it out, or set the path of one as data.tokenizer"),
        (["--data.sources", "a.txt", "--data.builtin_bytes", "9"], "--data.builtin_bytes",
         "has no effect because data.sources has no builtin:python",
         'leave it out, or set data.sources = ["builtin:python"]'),
        (["--observe.console", "none", "--observe.log_interval", "3"], "--observe.log_interval",
         'has no effect because observe.console is "none" or "json"', 'leave it out, or set observe.console = "plain"'),
        (["--observe.wandb_mode", "offline"], "--observe.wandb_mode",
         "has no effect because observe.wandb_project is not set",
         'leave it out, or set observe.wandb_project = "phalanx"'),
        (["--observe.prometheus_address", "0.0.0.0"], "--observe.prometheus_address",
         "has no effect because observe.prometheus_port is not set",
         "leave it out, or set observe.prometheus_port = 9100"),
        (["--launch.device", "cuda", "--kernels.compiled", "true"], "--kernels.compiled",
         'has no effect because launch.device = "cuda", and these kernels are those of a CPU',
         'leave it out, or set launch.device = "cpu"'),
    ],
)  # fmt: skip
def test_settings_without_effect(words: list[str], where: str, rule: str, hint: str) -> None:
    found = only(*words)
    assert (found.where, found.rule, found.hint) == (where, rule, hint)


def test_unsetting_what_a_recipe_sets_is_leaving_it_out(tmp_path: Path) -> None:
    """So that `--data.sources` of one's own works with a recipe that limits the built-in corpus."""
    path = tmp_path / "a.toml"
    path.write_text("[data]\nbuiltin_bytes = 1000\n")
    recipe = load_recipe(path, ["--data.sources", "a.txt", "--data.builtin_bytes", "none"])
    assert recipe.data.sources == ("a.txt",) and recipe.data.builtin_bytes is None


def test_old_checkpoints_are_removed_where_only_stops_save_too() -> None:
    """Each stop and each hand-over saves, and a run that goes on saves again."""
    assert load_recipe(None, ["--checkpoint.interval", "0", "--checkpoint.keep_last", "1"])


def test_capacity_of_a_whole_micro_batch_is_that_of_a_rank_which_has_all_of_it() -> None:
    drops = ["--dispatch.policy", "drop", "--dispatch.drop_scope", "full_sequence"]
    (found,) = in_a_run(*drops)
    assert (found.where, found.hint) == ("--dispatch.drop_scope", "leave it out, or set folding.tp = 2")
    assert found.rule == "has no effect: folding.tp = folding.cp = 1"
    for degrees in (["--folding.tp", "2"], ["--folding.cp", "2"], ["--folding.stages", '["tp2", "dp2.ep2"]']):
        more = ["--model.num_layers", "4"] if "stages" in degrees[0] else []
        assert load_recipe(None, [*drops, *degrees, *more], check=lambda r: run_problems(r, world=4))
    (found,) = in_a_run(*drops, "--folding.stages", '["dp2", "dp2"]', "--model.num_layers", "4")
    assert found.where == "--dispatch.drop_scope"


def test_a_way_for_rows_that_all_stay_is_refused_where_the_ranks_decide_it() -> None:
    """`folding.ep` is not written: one rank has no other to send to, and two have."""
    words = ["--dispatch.transport", "all_gather"]
    with pytest.raises(ConfigError) as info:
        load_recipe(None, words, check=lambda r: run_problems(r, world=1))
    (found,) = info.value.problems
    assert (found.where, found.hint) == ("--dispatch.transport", "leave it out, or set folding.ep = 2")
    assert found.rule == "has no effect: with ep x etp = 1 every row stays where it is"
    assert load_recipe(None, words, check=lambda r: run_problems(r, world=2))
    assert load_recipe(None, [], check=lambda r: run_problems(r, world=1))


def test_every_effect_speaks_of_real_settings_and_is_escapable() -> None:
    names = {s.name for s in describe_settings()}
    for effect in EFFECTS:
        assert {*effect.settings, *effect.reads} <= names
        assert effect.reads, "a rule that reads nothing could not fall silent"


def test_a_recipe_made_in_code_is_judged_by_what_differs_from_the_defaults() -> None:
    recipe = Recipe(router=RouterConfig(force_skew=2.0), train=TrainConfig(steps=-1))
    assert [p.where for p in recipe_problems(recipe)] == ["train.steps", "router.force_skew"]


@pytest.mark.parametrize(
    ("words", "where", "rule", "hint"),
    [
        (["--data.sources", "a.txt,b.txt", "--data.weights", "1,2,3"], "--data.weights",
         "must have one weight for each of the 2 entries of data.sources", "use [1.0, 1.0]"),
        (["--data.sources", "a.txt,"], "--data.sources",
         "must name at least one source, and none of them empty", 'use ["builtin:python"]'),
        (["--data.sources", "a.txt,b.txt", "--data.weights", "1,0"], "--data.weights", "each must be above 0", "leave it out"),
        (["--data.sources", "a.txt,b.txt", "--data.weights", "1,inf"], "--data.weights", "must be a finite number", "write it like 3e-4"),
        (["--data.validation_fraction", "0"], "--data.validation_fraction", "must be above 0 and at most 0.5", "the default is 0.02"),
        (["--data.validation_fraction", "0.9"], "--data.validation_fraction", "must be above 0 and at most 0.5", "use 0.5"),
        (["--data.builtin_bytes", "0"], "--data.builtin_bytes", "must be at least 1", "use 1"),
        (["--optim.warmup_steps", "300"], "--optim.warmup_steps",
         "must be less than train.steps = 300, or warm-up never completes", "use 30, or leave it out"),
        (["--optim.schedule", "wsd", "--optim.warmup_steps", "200", "--optim.decay_steps", "101"], "--optim.decay_steps",
         "must fit after 200 steps of warm-up into train.steps = 300", "use at most 100"),
        (["--run.name", "a/b"], "--run.name",
         "must be the name of one folder, without slashes", "use a-b, and run.folder for where it lies"),
        (["--run.name", ".."], "--run.name",
         "must be the name of one folder, without slashes", "use run, and run.folder for where it lies"),
        (["--run.name", "two\nlines"], "--run.name",
         "must hold no control characters, such as a newline", "use twolines"),
        (["--data.cache="], "--data.cache", "must not be empty", "leave it out"),
        (["--observe.wandb_project="], "--observe.wandb_project", "must not be empty", "leave it out"),
        (["--run.folder="], "--run.folder", "must be a path", "use runs"),
        (["--resilience.mode", "exact"], "launch.threads",
         'must be set with resilience.mode = "exact": its default follows from the number of ranks, and products may depend on it', "use 1"),
        (["--resilience.mode", "fast", "--train.global_batch", "30"], "--train.global_batch",
         "must be a multiple of train.micro_batch = 8: a step is a whole number of micro-batches", "use 32"),
        (["--resilience.mode", "exact", "--launch.threads", "1", "--folding.ep", "2", "--dispatch.overlap", "fine"], "--dispatch.overlap",
         'has no effect with resilience.mode = "exact": experts compute units of equal size one after the other there',
         "leave it out"),
        (["--resilience.mode", "exact", "--launch.threads", "1", "--folding.ep", "2", "--dispatch.transport", "all_gather"],
         "--dispatch.transport",
         'sums per rank with resilience.mode = "exact", so results depend on expert placement', 'use "all_to_all"'),
    ],
)  # fmt: skip
def test_settings_that_clash(words: list[str], where: str, rule: str, hint: str) -> None:
    found = only(*words)
    assert (found.where, found.rule, found.hint) == (where, rule, hint)


@pytest.mark.parametrize(
    ("world", "words", "hint"),
    [
        (
            3,
            ["--train.global_batch", "30"],
            "use train.global_batch = 24 or train.global_batch = 48, or train.micro_batch = 5",
        ),
        (4, ["--train.global_batch", "8"], "use train.global_batch = 32, or train.micro_batch = 2"),
        (4, ["--train.global_batch", "33"], "use train.global_batch = 32 or train.global_batch = 64"),
    ],
)
def test_the_batch_must_split_over_the_ranks(world: int, words: list[str], hint: str) -> None:
    found = only(*words, world=world)
    assert found.where == "--train.global_batch" and found.hint == hint
    assert found.rule.startswith("must be a multiple of train.micro_batch 8 x ")
    assert load_recipe(None, [*words, "--train.micro_batch", "1", "--folding.tp", str(world)], world=world)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_any_number_of_ranks_shares_a_batch_of_whole_micro_batches(mode: str) -> None:
    words = ["--resilience.mode", mode, "--launch.threads", "1", "--train.micro_batch", "2"]
    for world in (1, 2, 3, 5, 7):
        assert load_recipe(None, words, world=world, check=lambda r, n=world: run_problems(r, world=n))


def test_the_batch_rule_is_silent_where_the_mapping_does_not_fit() -> None:
    assert load_recipe(None, ["--folding.tp", "3"], world=4)


def in_a_run(*words: str, world: int = 4) -> list[Problem]:
    return problems_of(*words, check=lambda r: run_problems(r, world=world))


def test_model_and_mapping_are_judged_together_with_the_rest() -> None:
    found = in_a_run("--model.top_k", "9", "--folding.tp", "3", "--train.steps", "0")
    assert [(p.where, p.hint) for p in found] == [
        ("--train.steps", "use 1"),
        ("--model.top_k", "try 8"),
        ("--folding.tp", "the nearest that does is tp 4 x cp 1 x pp 1"),
    ]
    (preset,) = in_a_run("--model.preset", "lapto")
    assert (preset.rule, preset.hint) == ("is not a preset", "did you mean 'laptop'?")


def test_what_cannot_be_read_hides_only_the_rules_that_look_at_it() -> None:
    found = in_a_run("--optim.lr", "fast", "--train.stepz", "4", "--folding.tp", "3")
    assert list(dict.fromkeys(p.where for p in found)) == ["--optim.lr", "--train.stepz", "--folding.tp"]
    assert [p.where for p in in_a_run("--folding.cp", "two", "--folding.tp", "3")] == ["--folding.cp"]


def test_one_fault_is_one_problem() -> None:
    """Not again by a rule that follows from the first, with another way out."""
    assert [p.where for p in in_a_run("--launch.ranks", "0", world=0)] == ["--launch.ranks"]
    assert [p.where for p in in_a_run("--model.num_experts", "0")] == ["--model.num_experts"]
    assert [p.where for p in in_a_run("--router.group_topk", "2")] == ["--router.group_topk"]
    pipeline = ["--model.preset", "tiny", "--folding.pp", "4"]
    assert [p.where for p in in_a_run(*pipeline)] == ["--folding.pp"]
    latent = ["--model.preset", "deepseek-v3", "--model.rope_dim", "63"]
    assert [p.where for p in in_a_run(*latent)] == ["--model.rope_dim"]
    (layers,) = in_a_run("--folding.pp", "2", "--pipeline.layers", "5,-1")
    assert (layers.where, layers.hint) == ("--pipeline.layers", "use 0")


def test_a_schedule_is_judged_where_the_model_is_broken() -> None:
    words = ["--model.top_k", "99", "--folding.pp", "2", "--pipeline.schedule", "zbv", "--pipeline.virtual", "3"]
    assert [p.where for p in in_a_run(*words)] == ["--model.top_k", "--pipeline.virtual"]


def test_values_are_shown_as_a_recipe_has_them() -> None:
    found = [str(p) for p in in_a_run("--model.preset", "tiny", "--model.shared_gate", "true")]
    assert found == ["--model.shared_gate = true: has no effect: there is no shared expert; leave it out"]
    assert str(Problem(where="a", value=None, rule="is missing")) == "a: is missing"


def test_a_dense_model_has_no_use_for_routing() -> None:
    dense = ["--model.dense_layers", "4", "--model.dense_ffn", "64"]
    assert load_recipe(None, dense, check=lambda r: run_problems(r, world=4))
    found = in_a_run(*dense, "--dispatch.policy", "drop", "--router.scale", "2", "--folding.etp", "2")
    assert {p.where for p in found} == {"--dispatch.policy", "--router.scale", "--folding.etp"}
    assert all("has no effect" in p.rule for p in found)


def test_fused_kernels_are_for_devices_that_are_theirs_alone() -> None:
    words = ["--dispatch.overlap", "fused", "--folding.ep", "4"]
    legal = [*words, "--launch.device", "cuda", "--optim.bucket_mb", "0", "--dispatch.left_free", "24"]
    assert load_recipe(None, legal, check=lambda r: run_problems(r, world=4))
    found = in_a_run(*words[:2], "--train.dtype", "float64", "--folding.ep", "2", "--folding.etp", "2")
    assert {p.where for p in found} == {"--dispatch.overlap"}
    told = " ".join(p.rule for p in found)
    assert all(
        w in told
        for w in ('launch.device = "cpu"', 'train.dtype = "float64"', "folding.etp = 2", "optim.bucket_mb = 64")
    )
    assert found[0].hint == 'launch.device = "cuda", or "auto"'
    (padded,) = in_a_run(*legal, "--dispatch.policy", "drop", "--dispatch.pad_to_capacity", "true")
    assert padded.hint == "pad_to_capacity = false"


def test_groups_are_set_together_and_limit_something() -> None:
    (half,) = in_a_run("--router.num_groups", "4")
    assert (half.where, half.hint) == ("--router.num_groups", "add router.group_topk = 2")
    assert {p.where for p in in_a_run("--router.group_topk", "2")} == {"--router.group_topk"}
    assert in_a_run("--router.num_groups", "2", "--router.group_topk", "2")[0].rule == (
        "has no effect: router.group_topk is as large, so every group is chosen"
    )
    legal = ["--router.num_groups", "4", "--router.group_topk", "2"]
    assert load_recipe(None, legal, check=lambda r: run_problems(r, world=4))


def test_recipes_that_come_with_phalanx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`recipes/NAME.toml` works wherever Phalanx is installed; a folder of the reader's own goes before."""
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/tiny.toml").model.preset == "tiny"
    with pytest.raises(ConfigError, match=r"tinny\.toml.*did you mean 'tiny\.toml'"):
        load_recipe("recipes/tinny.toml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text("[train]\nsteps = 7\n")
    assert load_recipe("recipes/tiny.toml").train.steps == 7
    with pytest.raises(ConfigError, match=r"recipes/laptop\.toml"):
        load_recipe("recipes/laptop.toml")
