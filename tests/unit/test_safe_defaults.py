"""What is chosen where a recipe is silent, and what is told of it: learning rate, expert parallelism, memory, settings that changed or have no effect any more."""

from __future__ import annotations

import errno
import fcntl
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx import open_run
from phalanx.cli import train as command
from phalanx.cli.launching import Request, read_args, read_recipe
from phalanx.cli.predicting import room
from phalanx.cli.train import changed_settings, with_learning_rate
from phalanx.core.config import (
    MOST_LR,
    DispatchConfig,
    FoldingConfig,
    LaunchConfig,
    Recipe,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.recipe import dump_recipe, load_recipe
from phalanx.core.rules import recipe_problems
from phalanx.plan import choose_recovery, default_lr
from phalanx.plan.mapping import resolve_mapping
from phalanx.plan.model import PRESETS
from phalanx.train.setup import RunFolder

pytestmark = pytest.mark.unit


def steps_for(tokens: float, seq_len: int = 4096, batch: int = 1024) -> TrainConfig:
    return TrainConfig(steps=int(tokens / seq_len / batch), seq_len=seq_len, global_batch=batch)


@pytest.mark.parametrize(
    ("preset", "tokens", "lr"), [("mixtral-8x7b", 1e12, 4.2e-4), ("deepseek-v3", 14.8e12, 2.6e-4), ("tiny", 1e6, 3e-3)]
)
def test_the_rate_follows_from_model_and_length(preset: str, tokens: float, lr: float) -> None:
    """DeepSeek-V3 itself was trained with 2.2e-4 (arXiv 2412.19437, section 4.2)."""
    recipe = Recipe(train=steps_for(tokens))
    assert default_lr(recipe, PRESETS[preset]) == pytest.approx(lr, rel=0.06)


def test_a_look_at_a_large_model_does_not_take_the_rate_of_a_small_one() -> None:
    few, many = (default_lr(Recipe(train=steps_for(tokens)), PRESETS["mixtral-8x7b"]) for tokens in (1e8, 1e13))
    assert many < few < 6e-4 < MOST_LR


def test_a_rate_is_told_kept_and_never_chosen_over_one_that_is_given(tmp_path: Path) -> None:
    run = RunConfig(name="a", folder=str(tmp_path))
    recipe, told = with_learning_rate(Recipe(run=run))
    assert recipe.optim.lr == MOST_LR and len(told) == 1 and "arXiv 2401.02954" in told[0]
    assert with_learning_rate(recipe) == (recipe, [])
    (tmp_path / "a").mkdir()
    kept = replace(recipe, optim=replace(recipe.optim, lr=7e-4))
    (tmp_path / "a" / "recipe.toml").write_text(dump_recipe(kept))
    again, told = with_learning_rate(Recipe(run=run, train=TrainConfig(steps=10**6)))
    assert again.optim.lr == 7e-4 and "as the run began" in told[0]


def test_the_recipe_of_a_copied_run_folder_does_not_train_the_run_that_it_was_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with the original, or began anew where that was elsewhere, and said nothing."""
    monkeypatch.chdir(tmp_path)
    for place in ("runs/mine", "runs/copy", "other/mine", "x y/z"):
        Path(place).mkdir(parents=True)
        Path(place, "run_state.json").write_text("{}")
        Path(place, "recipe.toml").write_text('[run]\nname = "mine"\n[model]\npreset = "tiny"\n')

    def read(place: str, *words: str) -> str:
        try:
            recipe = read_recipe(read_args([f"{place}/recipe.toml", *words]), world=None)
        except ConfigError as err:
            return str(err)
        return f"{recipe.run.folder}/{recipe.run.name}"

    assert read("runs/mine") == read(str(tmp_path / "runs" / "mine")) == "runs/mine"
    assert "--run.name copy to go on in runs/copy, or --run.name mine to train runs/mine" in read("runs/copy")
    assert "--run.folder other to go on in other/mine" in read("other/mine")
    assert "--run.name z --run.folder 'x y' to go on in x y/z" in read("x y/z")
    assert "runs/copy" in read("runs/copy", "--trust") and "runs/copy" in read("runs/copy", "--run.folder", "runs")
    assert (
        read("runs/copy", "--run.name", "copy") == "runs/copy" and read("runs/copy", "--run.name=mine") == "runs/mine"
    )
    assert read("other/mine", "--run.folder", "other") == "other/mine"
    assert read("x y/z", "--run.name", "z", "--run.folder", "x y") == "x y/z"
    shutil.rmtree("runs/mine")
    assert "other/mine" in read("other/mine") and "to train runs/mine" in read("runs/copy")
    Path("other/mine/run_state.json").unlink()  # a file that somebody called so
    assert read("other/mine") == "runs/mine"
    Path("link").symlink_to("runs")
    Path("runs/copy").rename("runs/mine")
    assert read("link/mine") == "runs/mine"
    monkeypatch.chdir("other")
    said = read("../runs/mine", "--trust")
    assert (
        "copied or renamed, or begun elsewhere than in the present folder" in said
        and "add --run.folder ../runs to go on in ../runs/mine" in said
    )


def test_the_recipe_of_a_run_that_is_opened_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python the recipe of a copied run trained the one that it was copied from."""
    monkeypatch.chdir(tmp_path)
    for place in ("runs/mine", "runs/copy"):
        Path(place).mkdir(parents=True)
        Path(place, "recipe.toml").write_text('[run]\nname = "mine"\n[model]\npreset = "tiny"\n[train]\nsteps = 7\n')

    def named(folder: str) -> tuple[str, str, int]:
        recipe = open_run(folder).recipe
        return recipe.run.folder, recipe.run.name, recipe.train.steps

    assert named("runs/mine") == named(str(tmp_path / "runs" / "mine")) == ("runs", "mine", 7)
    assert named("runs/copy") == ("runs", "copy", 7)
    monkeypatch.chdir("runs/copy")
    assert named(".") == named("../copy/") == ("..", "copy", 7) and named("../mine") == ("..", "mine", 7)


def test_the_name_of_a_run_is_short_enough_for_a_folder() -> None:
    said = []
    for name in ("x" * 201, "\u00fc" * 101, "x" * 200):
        found = recipe_problems(Recipe(run=RunConfig(name=name)))
        said.append([str(problem) for problem in found if problem.where == "run.name"])
    assert [len(found) for found in said] == [1, 1, 0]
    assert "is 201 bytes long; 200 at most" in said[0][0] and "is 202 bytes long" in said[1][0]


def test_what_changed_since_the_last_start_is_told_and_the_recipe_of_before_is_there(tmp_path: Path) -> None:
    from phalanx.data import ByteTokenizer

    run = RunConfig(name="a", folder=str(tmp_path))
    first = Recipe(run=run)
    assert changed_settings(first) == []
    folder = RunFolder(tmp_path / "a")
    folder.create()
    for recipe in (first, first, replace(first, train=TrainConfig(steps=7, seed=3)), first):
        folder.write_recipe(recipe, ByteTokenizer())
    assert sorted(p.name for p in (tmp_path / "a").glob("*.toml")) == ["recipe-1.toml", "recipe-2.toml", "recipe.toml"]
    assert load_recipe(tmp_path / "a" / "recipe-2.toml").train.steps == 7
    told = changed_settings(replace(first, train=TrainConfig(steps=400), launch=LaunchConfig(host="n2")))
    assert told == ["changed since the run was started last: train.steps = 400 (was 300)"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_full_disk_is_told_with_the_folder_that_cannot_be_claimed(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of any size are refused, as a full disk refuses them; so too where the file system has no locks."""

    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", none)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = RunFolder(tmp_path / "a")
    folder.create()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(RunError, match=r"/a: the run folder cannot be written \(File too large\).*run.folder"):
            folder.lock()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_depends_on_the_micro_batch_is_told_where_that_changed(tmp_path: Path) -> None:
    from phalanx.data import ByteTokenizer

    first = Recipe(run=RunConfig(name="a", folder=str(tmp_path)))
    folder = RunFolder(tmp_path / "a")
    folder.create()
    folder.write_recipe(first, ByteTokenizer())
    drops, other = DispatchConfig(policy="drop"), TrainConfig(micro_batch=4)
    for router, dispatch, said in (
        (RouterConfig(), DispatchConfig(), ["router.aux_scope"]),
        (RouterConfig(), drops, ["router.aux_scope", "dispatch.policy"]),
        (RouterConfig(aux_scope="global_batch"), DispatchConfig(), []),
        (RouterConfig(aux_loss=0.0), DispatchConfig(), []),
    ):
        again = replace(first, router=router, dispatch=dispatch)
        for train, right in ((other, said), (TrainConfig(), [])):
            told = [line for line in changed_settings(replace(again, train=train)) if "with another" in line]
            assert [line.partition(" = ")[0] for line in told] == right


@pytest.mark.parametrize("text", ["", "[train]\nsteps = 'x'", "\0"])
def test_a_damaged_recipe_of_the_run_is_not_asked(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.toml").write_text(text)
    recipe = Recipe(run=RunConfig(name="a", folder=str(tmp_path)))
    assert with_learning_rate(recipe)[0].optim.lr == MOST_LR and isinstance(changed_settings(recipe), list)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (3, 1), (4, 2), (6, 2), (8, 4)])
def test_where_ep_is_not_set_every_expert_has_two_holders(ranks: int, ep: int) -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=ranks), train=TrainConfig(global_batch=48, micro_batch=1))
    found = choose_recovery(recipe)
    folding = resolve_mapping(found.recipe.folding, PRESETS["laptop"], world=ranks, seq_len=256)
    assert found.is_elastic and folding.of_rank(0).ep == ep and folding.of_rank(0).edp >= 2
    told = choose_recovery(replace(recipe, folding=FoldingConfig(ep=ranks if ranks in (2, 4, 8) else 1)))
    assert told.is_elastic == (ranks in (3, 6)), "a degree that is given stays"


def test_slices_of_experts_have_two_holders_too() -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=4), train=TrainConfig(global_batch=48, micro_batch=1))
    found = choose_recovery(replace(recipe, folding=FoldingConfig(etp=2)))
    assert found.is_elastic and found.recipe.folding.ep == 1
    found = choose_recovery(replace(recipe, folding=FoldingConfig(etp=4)))
    assert not found.is_elastic and "use folding.etp = 2" in found.why_not


def test_ep_is_left_where_more_experts_on_a_rank_do_not_fit() -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=4))
    tried: list[int | None] = []

    def fits(other: Recipe) -> bool:
        tried.append(other.folding.ep)
        return False

    found = choose_recovery(recipe, fits=fits)
    assert tried == [2] and not found.is_elastic and found.recipe.folding.ep is None
    assert "use folding.ep = 2" in found.explain()


def test_a_run_that_cannot_fit_is_refused_with_the_nearest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("recipes/laptop.toml", ["--train.dtype", "float32"])
    needed = room.needed_bytes(recipe)
    assert needed is not None and needed > 1 << 28
    for available, refused in ((needed, False), (int(needed / 1.05), False), (int(needed / 1.2), True), (None, False)):
        monkeypatch.setattr(room, "available_bytes", lambda available=available: available)
        assert bool(room.memory_problems(recipe)) == refused and room.has_room(recipe) != refused
    monkeypatch.setattr(room, "available_bytes", lambda: int(needed / 1.2))
    (problem,) = room.memory_problems(recipe)
    assert "4 ranks" in problem.where and "--force" in problem.hint and " takes " in problem.hint
    words = problem.hint.split(" takes ")[0].split()
    assert room.memory_problems(load_recipe("recipes/laptop.toml", ["--train.dtype", "float32", *words])) == []
    with pytest.raises(ConfigError, match="--force"):
        command.start(recipe, {})


def test_force_is_read() -> None:
    assert read_args(["laptop.toml", "--force"]).force and not read_args(["laptop.toml"]).force


def test_what_an_override_makes_inert_in_a_file_is_a_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    request = Request(recipe_path="recipes/tiny.toml", overrides=("--data.sources", str(text)), dry_run=True)
    assert read_recipe(request, world=None).data.builtin_bytes is None
    said = capsys.readouterr().err
    assert (
        said.startswith("note: recipes/tiny.toml: data.builtin_bytes = 1000000 is left out") and said.count("\n") == 1
    )
    with pytest.raises(ConfigError, match=r"has no effect because data\.sources has no builtin:python"):
        more = (*request.overrides, "--data.builtin_bytes", "5")
        read_recipe(replace(request, overrides=more), world=None)
    own = tmp_path / "own.toml"
    own.write_text(f'[data]\nsources = ["{text}"]\nbuiltin_bytes = 5\n')
    with pytest.raises(ConfigError, match="has no effect"):
        read_recipe(Request(recipe_path=str(own), overrides=(), dry_run=True), world=None)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--optim.learning_rate", "--optim.lr"), ("--train.batch_size", "--train.global_batch"), ("--train.max_steps", "--train.steps"), ("--folding.expert_parallel_size", "--folding.ep")],
)  # fmt: skip
def test_names_of_other_programs_lead_to_ours(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as err:
        load_recipe(None, [given, "3"])
    assert f"did you mean '{meant}'" in str(err.value)
