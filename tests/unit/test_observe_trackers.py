"""Trackio, MLflow and W&B get hyperparameters and metrics. Stand-ins have the signatures that the packages document, so that a wrong call is an error; the packages themselves are not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_events import ended, started

import phalanx.observe.sinks as sinks_module
from phalanx.cli.main import main
from phalanx.core.config import ObserveConfig
from phalanx.core.errors import ConfigError
from phalanx.core.events import RunEnded
from phalanx.observe.sinks import open_sinks

pytestmark = pytest.mark.unit


class Told:
    """What a package was told: parameters, metrics by step, and how it ended."""

    def __init__(self) -> None:
        self.init: dict[str, Any] = {}
        self.params: dict[str, str] = {}
        self.steps: dict[int, dict[str, float]] = {}
        self.ends: list[str] = []
        self.requests: list[int] = []


def trackio_like(told: Told) -> dict[str, ModuleType]:
    class Run:
        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            assert step is not None
            told.steps[step] = metrics

        def finish(self) -> None:
            told.ends.append("finished")

    def init(project: str, name: str | None = None, group: str | None = None, space_id: str | None = None, config: dict[str, Any] | None = None, resume: str = "never") -> Run:  # fmt: skip
        told.init = {"project": project, "name": name, "space": space_id, "resume": resume}
        assert config is not None and not any(key.startswith("_") for key in config)  # trackio refuses these
        told.params = config
        return Run()

    module = ModuleType("trackio")
    module.init = init  # type: ignore[attr-defined]
    return {"trackio": module}


def mlflow_like(told: Told) -> dict[str, ModuleType]:
    class Client:
        def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
            told.init["uri"] = tracking_uri

        def get_experiment_by_name(self, name: str) -> None:
            told.init["project"] = name

        def create_experiment(self, name: str, artifact_location: str | None = None, tags: dict[str, Any] | None = None) -> str:  # fmt: skip
            return "7"

        def create_run(self, experiment_id: str, start_time: int | None = None, tags: dict[str, Any] | None = None, run_name: str | None = None) -> SimpleNamespace:  # fmt: skip
            told.init |= {"experiment": experiment_id, "name": run_name}
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
            told.ends.append(f"{run_id} {status}")

        def get_run(self, run_id: str) -> SimpleNamespace:
            return SimpleNamespace(data=SimpleNamespace(params=dict(told.params)))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: bool | None = None) -> SimpleNamespace | None:  # fmt: skip
            assert run_id == "r1" and len(params) <= 100 and len(metrics) <= 1000
            told.requests.append(len(params))
            for p in params:
                assert told.params.get(p.key, p.value) == p.value and len(p.value) <= 500, "MLflow refuses it"
                told.params[p.key] = p.value
            for m in metrics:
                assert m.timestamp > 1e12, "milliseconds"
                told.steps.setdefault(m.step, {})[m.key] = m.value
            return None if synchronous else SimpleNamespace(wait=lambda: told.ends.append("waited"))

        def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
            told.ends.append(f"{run_id} {status}")

    class Metric:
        def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
            self.key, self.value, self.timestamp, self.step = key, value, timestamp, step

    class Param:
        def __init__(self, key: str, value: str) -> None:
            self.key, self.value = key, value

    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    package.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric, entities.Param = Metric, Param  # type: ignore[attr-defined]
    return {"mlflow": package, "mlflow.entities": entities}


def wandb_like(told: Told) -> dict[str, ModuleType]:
    axes = dict[str, str | None]()

    def log(values: dict[str, Any]) -> None:
        """Without a step of W&B's own, of which it takes none that is lower than its last."""
        assert axes == {"step": None, "*": "step"}
        told.steps.update({values["step"]: values})

    def init(*, project: str, name: str, id: str, resume: str, dir: str, mode: str) -> SimpleNamespace:
        told.init = {"project": project, "name": name}
        return SimpleNamespace(
            config=SimpleNamespace(update=lambda values, allow_val_change: told.params.update(values)),
            define_metric=lambda name, step_metric=None: axes.update({name: step_metric}),
            log=log,
            finish=lambda exit_code: told.ends.append(str(exit_code)),
        )

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    return {"wandb": module}


def put(monkeypatch: pytest.MonkeyPatch, name: str, modules: dict[str, ModuleType]) -> None:
    """As if the package were installed."""
    monkeypatch.setattr(sinks_module, "is_installed", lambda asked: True)
    monkeypatch.delitem(sys.modules, f"phalanx.observe.{name}", raising=False)
    for known, module in modules.items():
        monkeypatch.setitem(sys.modules, known, module)


def train(folder: Path, config: ObserveConfig, *, first: int = 0, reason: str = "finished", lr: float = 0.003) -> None:
    folder.mkdir(exist_ok=True)
    more = "".join(f"key{n} = {n}\n" for n in range(150))
    (folder / "recipe.toml").write_text(f'[optim]\nlr = {lr}\n[run]\nname = "a"\nnote = "{"x" * 5000}"\n[more]\n{more}')
    with open_sinks(config, folder=folder, rank=0) as emit:
        emit(started(step=first))
        emit(ended(first + 1))
        emit(RunEnded(step=first + 1, reason=reason, seconds=1.0))


def quiet(*sinks: str) -> ObserveConfig:
    return ObserveConfig(console="none", tensorboard=False, sinks=sinks)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    put(monkeypatch, "trackio", trackio_like(told))
    train(tmp_path / "a", quiet("trackio:project=moe,space=me/board"))
    assert told.init == {"project": "moe", "name": "a", "space": "me/board", "resume": "allow"}
    assert told.params["optim.lr"] == "0.003" and told.steps[1]["train/loss"] == ended(1).loss
    assert "experts/load_of/layer-3" in told.steps[1] and told.ends == ["finished"]


def test_mlflow_and_a_run_that_goes_on_by_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    put(monkeypatch, "mlflow", mlflow_like(told))
    words = quiet("mlflow:project=moe,uri=http://tracker:5000")
    train(tmp_path / "a", words, reason="interrupted")
    assert told.init == {"uri": "http://tracker:5000", "project": "moe", "experiment": "7", "name": "a"}
    assert told.params["optim.lr"] == "0.003" and told.steps[1]["train/loss"] == ended(1).loss
    assert told.requests == [100, 53, 0] and told.ends == ["waited", "r1 KILLED"]
    train(tmp_path / "a", words, first=1, lr=0.001)
    assert told.ends[2:] == ["r1 RUNNING", "waited", "r1 FINISHED"] and told.params["optim.lr"] == "0.003"
    assert told.steps.keys() == {1, 2}


def test_wandb_gets_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    put(monkeypatch, "wandb", wandb_like(told))
    train(tmp_path / "a", ObserveConfig(console="none", tensorboard=False, wandb_project="moe"), reason="RunError: x")
    assert told.params["optim.lr"] == "0.003" and told.params["folding"] == "dp4|ep4" and told.ends == ["1"]


def test_what_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "is_installed", lambda name: name != "mlflow")
    monkeypatch.delitem(sys.modules, "phalanx.observe.trackio", raising=False)
    monkeypatch.setitem(sys.modules, "trackio", trackio_like(Told())["trackio"])
    with pytest.raises(ConfigError) as caught:
        open_sinks(quiet("mlflow", "trackio:projekt=a", "mlflov"), folder=tmp_path, rank=0)
    missing, option, unknown = caught.value.problems
    assert (missing.where, missing.rule) == ("observe.sinks[0]", "needs the package mlflow, which is not installed")
    assert "pip install -e '.[mlflow]'" in missing.hint
    assert (option.where, option.value, option.rule) == ("observe.sinks[1]", "projekt", "is no option of trackio")
    assert "'project'" in option.hint and unknown.where == "observe.sinks[2]" and "'mlflow'" in unknown.hint


def test_a_dry_run_tells_what_a_start_would_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks_module, "is_installed", lambda name: name != "mlflow")
    words = ["train", "tiny", "--dry-run", "--launch.device", "cpu", "--observe.sinks"]
    assert main([*words, '["nope:a=b", "mlflow", "trackio:projekt=a"]']) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said and "observe.sinks[0] = 'nope': is no sink of Phalanx" in said
    assert "observe.sinks[1] = 'mlflow': needs the package mlflow" in said and "'projekt': is no option of" in said
    monkeypatch.setitem(sys.modules, "phalanx.observe.trackio", None)  # importing it would fail
    assert main([*words, '["trackio:project=a"]']) == 0 and list(tmp_path.iterdir()) == []


def test_a_server_that_cannot_be_reached_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    modules = mlflow_like(Told())

    def refuse(tracking_uri: str | None = None) -> None:
        raise OSError("connection refused")

    modules["mlflow"].MlflowClient = refuse  # type: ignore[attr-defined]
    put(monkeypatch, "mlflow", modules)
    with pytest.raises(ConfigError, match=r"cannot be opened by mlflow \(OSError: connection refused\)"):
        train(tmp_path / "a", quiet("mlflow"))
