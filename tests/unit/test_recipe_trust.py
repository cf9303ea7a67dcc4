"""A recipe file of a stranger: it writes below the present folder only, joins nobody's run and tells nobody of it, unless the command line says yes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from phalanx.cli.launching import read_args, read_recipe
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.train.huggingface.hugging_face import strange_links
from phalanx.train.setup.run_folder import RunFolder

pytestmark = pytest.mark.unit


def read(text: str, *words: str) -> Recipe:
    Path("recipe.toml").write_text(text)
    return read_recipe(read_args(["recipe.toml", *words]), world=None)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[run]\nfolder = "/somewhere"', "run.folder"),
        ('[run]\nfolder = "../else"', "run.folder"),
        ('[run]\nfolder = "runs/../../else"', "run.folder"),
        ('[run]\nfolder = "link/runs"', "run.folder"),
        ('[run]\nfolder = "."\nname = "link"', "run.name"),
        ('[data]\ncache = "/somewhere"', "data.cache"),
        ('[resilience]\nmode = "fast"\nheal = true\nwanted = 4\nservice = "his.host:29400"\n[folding]\nep = 1', "resilience.service"),
        ('[observe]\nprometheus_port = 9100\nprometheus_address = "0.0.0.0"', "observe.prometheus_address"),
        ('[observe]\nprometheus_port = 9100\nprometheus_address = "127.his.host"', "observe.prometheus_address"),
        ('[observe]\nwandb_project = "his"', "observe.wandb_project"),
        ('[run]\nfolder = "/some where"', "run.folder"),
        ('[observe]\nsinks = ["nope:a=b", "mlflow"]', "observe.sinks"),
        ('[observe]\nsinks = ["mlflow:project=\U0001f600 \\u007f"]', "observe.sinks"),
        ('[observe]\nwandb_project = "his"\nwandb_mode = "online"', "observe.wandb_project"),
    ],
)  # fmt: skip
def test_it_is_refused_with_what_to_type(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert problem.where == where and "which a recipe file alone may not decide" in problem.rule
    assert "--trust" in problem.hint
    name, value = shlex.split(problem.hint.partition("(")[2].partition("), or")[0])
    assert name == f"--{where}"
    read(text, "--trust")
    read(text, name, value)
    read(text, f"{name}={value}")


def test_all_of_it_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read('[run]\nfolder = "/a"\n[data]\ncache = "/b"')
    assert [p.where for p in caught.value.problems] == ["run.folder", "data.cache"]


def test_what_is_harmless_needs_no_word(here: Path) -> None:
    read('[run]\nfolder = "runs/deep"\n[data]\ncache = "cache"')
    read(f'[run]\nfolder = "{here}/runs"')
    read('[observe]\nprometheus_port = 9100\nwandb_project = "mine"\nwandb_mode = "offline"')
    read('[observe]\nprometheus_port = 9100\nprometheus_address = "127.0.0.1"')


def test_a_run_goes_on_by_the_recipe_in_its_own_folder(tmp_path: Path) -> None:
    home = tmp_path / "elsewhere" / "mine"
    home.mkdir(parents=True)
    (home / "recipe.toml").write_text(f'[run]\nname = "mine"\nfolder = "{tmp_path / "elsewhere"}"')
    read_recipe(read_args([str(home / "recipe.toml")]), world=None)


@pytest.mark.parametrize("place", [".lock", "events/rank-0.jsonl", "checkpoints", "tokenizer/tokenizer.json"])
def test_a_run_folder_with_links_is_refused_and_nothing_is_written_through_them(place: str, here: Path) -> None:
    """It may have come in an archive."""
    victim, link = here / "victim", here / "run" / place
    victim.write_text("precious")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(
        ConfigError, match=rf"run/{place} = .*victim': is a link, which a run would write through; remove it"
    ):
        RunFolder(here / "run").create()
    assert victim.read_text() == "precious"
    link.unlink()
    RunFolder(here / "run").create()


def test_what_an_export_takes_along_is_no_linked_folder(here: Path) -> None:
    (here / "secrets").mkdir()
    (here / "secrets" / "credentials.json").write_text("{}")
    (here / "kept").symlink_to(here / "secrets")
    (problem,) = strange_links(here / "kept", whole=True)
    assert problem.rule == "is a link to another folder" and not strange_links(here / "kept")
