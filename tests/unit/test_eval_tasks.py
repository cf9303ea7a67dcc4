"""Tasks of `phalanx eval`: what a stranger's YAML may say, and that reading it runs nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import eval as command
from phalanx.cli.evaluating.harness import OFFLINE, HarnessJob, takes_several
from phalanx.cli.evaluating.tasks import MOST_BYTES, read_tasks
from phalanx.cli.main import main
from phalanx.core.errors import ConfigError
from phalanx.core.events import TeamFormed, Validated
from phalanx.observe.event_log import JsonlSink

pytest.importorskip("yaml")
pytestmark = pytest.mark.unit
GOOD = "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: d.jsonl}}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: '{{of}}'\ndoc_to_target: right\nmetric_list:\n  - metric: acc\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d.jsonl").write_text('{"q": "a", "of": ["b"], "right": 0}\n')
    return tmp_path


def told(folder: Path, text: str) -> str:
    (folder / "t.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tasks([folder / "t.yaml"])
    assert all(p.hint for p in error.value.problems)
    return str(error.value)


def test_a_task_is_plain_data_with_its_file_found(folder: Path) -> None:
    (folder / "t.yaml").write_text(GOOD)
    (task,) = read_tasks([folder])
    assert task["task"] == "t" and task["dataset_kwargs"]["data_files"] == {"test": str(folder / "d.jsonl")}


def test_code_is_refused_and_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').write('x')\ndef f(doc): return doc\n")
    said = told(folder, GOOD + "process_docs: !function evil.f\ndoc_to_text: !function evil.f\n")
    assert "t.yaml:11 = 'evil.f': names code to be run (!function)" in said and "t.yaml:12" in said
    assert "--allow-functions" in said and not (folder / "ran").exists()
    assert "has a tag (tag:yaml.org,2002:python/name:os.system)" in told(folder, GOOD + "description: !!python/name:os.system x\n")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("dataset_path: json", "dataset_path: allenai/ai2_arc"), "dataset_path = 'allenai/ai2_arc': must be one of json, csv, parquet, text: nothing is fetched"),
        (GOOD.replace("{data_files: {test: d.jsonl}}", "{trust_remote_code: true}"), "dataset_kwargs: must be data_files alone"),
        (GOOD.replace("d.jsonl", "none.jsonl"), "data_files.test = 'none.jsonl': is no file here"),
        (GOOD + "include: other.yaml\n", "include = 'other.yaml': takes in another file"),
        (GOOD + "unsafe_code: true\n", "unsafe_code = 'True': asks for code"),
        (GOOD + "doc_to_txt: x\n", "doc_to_txt: is not taken here; did you mean 'doc_to_text'"),
        (GOOD.replace("metric: acc", "metric: rouge"), "metric_list[0] = 'rouge': is no metric of the harness for multiple_choice"),
        (GOOD.replace("multiple_choice", "multiple"), "output_type = 'multiple': must be one of"),
        (GOOD.replace("task: t\n", ""), "task: must be the name of the task; write task: t"),
        (GOOD + "filter_list: [{name: x, filter: [{function: custom}]}]\n", "t.yaml:11: filter_list[0].filter[0] = 'custom': must be one of"),
        (GOOD.replace("metric: acc", "{metric: acc, hf_evaluate: true}"), "t.yaml:9: metric_list[0].hf_evaluate: is not taken here"),
        (GOOD.replace("metric: acc", "{metric: acc, aggregation: other}"), "metric_list[0].aggregation = 'other': must be one of mean"),
        (GOOD.replace("  - metric: acc", "  metric: acc"), "metric_list: must be a list"),
        (GOOD + "filter_list: 5\n", "filter_list: must be a list"),
        (GOOD + "filter_list: [{name: x, filter: [{function: regex, path: x}]}]\n", "filter_list[0].filter[0].path: is not taken here"),
        (GOOD + "generation_kwargs: {custom_generate: ./folder}\n", "generation_kwargs = 'custom_generate': must be until"),
        (GOOD + "metadata: 2020-01-01\n", "t.yaml:11 = '2020-01-01': is a date"),
        (GOOD + "metadata: !!binary aGk=\n", "has a tag (tag:yaml.org,2002:binary)"),
        (GOOD.replace("multiple_choice", "[multiple_choice]"), "output_type = ['multiple_choice']: must be one of"),
        (GOOD.replace("d.jsonl", "zip://d.jsonl::https://example.com/d.zip"), "is no file here"),
        (GOOD + "num_fewshot: -1\n", "num_fewshot = -1: must be a whole number from 0 to 1000"),
        (GOOD + "description: [a]\n", "description = ['a']: must be text"),
        (GOOD + "metadata: &a [x]\ntag: *a\n", "t.yaml:12 = '*a': refers to another place of the file"),
        (GOOD + "metadata: [x\n", "is not YAML"),
        ("- a\n", "must be keys with values"),
        ("a: " + "[" * 100_000, "is nested too deeply"),
        ("a: " + "x" * MOST_BYTES, f"cannot be read (has more than {MOST_BYTES} bytes)"),
        ("a: \x00", "is not YAML"),
    ],
    ids=range(28),
)  # fmt: skip
def test_what_a_task_may_not_say(folder: Path, text: str, says: str) -> None:
    assert says in told(folder, text)


def test_a_pipe_and_other_bytes_are_no_tasks(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "bytes.yaml").write_bytes(b"task: \xff\n")
    for name, says in (("pipe.yaml", "not a regular file"), ("bytes.yaml", "is not UTF-8")):
        with pytest.raises(ConfigError, match=says):
            read_tasks([folder / name])


def test_the_harness_is_offline_gets_no_secrets_and_takes_no_module_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("yaml", "torch", "lm_eval", "datasets"):
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_TOKEN", "HF_ALLOW_CODE_EVAL", "RANK"):
        monkeypatch.setenv(name, "1")
    seen: dict[str, Any] = {}
    real = command.subprocess.run

    def run(words: list[str], **more: Any) -> Any:
        seen.update(more["env"])
        return real([*words[:-3], "-c", "import torch, yaml"], **more)

    monkeypatch.setattr(command.subprocess, "run", run)
    job = HarnessJob(model="m", tasks=(), files=(), window=1, batch=1, limit=None, threads=1, device="cpu", out=str(tmp_path / "out.json"))  # fmt: skip
    (tmp_path / "out.json").write_text("{}")
    command.run_harness(job, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert all(seen[name] == value for name, value in OFFLINE.items()) and seen["HF_HOME"] == str(tmp_path / "home")
    assert not {"HF_TOKEN", "HF_ALLOW_CODE_EVAL", "RANK"} & seen.keys()


def test_all_is_told_at_once(folder: Path) -> None:
    (folder / "a.yaml").write_text(GOOD + "include: x\n")
    (folder / "b.yaml").write_text(GOOD.replace("json", "csv", 1).replace("d.jsonl", "e.csv"))
    with pytest.raises(ConfigError) as error:
        read_tasks([folder])
    assert len(error.value.problems) == 2
    (folder / "a.yaml").write_text(GOOD)
    (folder / "b.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match="'t': is the name of several tasks"):
        read_tasks([folder])


def test_the_extra_that_is_missing_and_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda name: name != "lm_eval")
    assert main(["eval", str(tmp_path), "--limit", "0", "--allow-functions"]) == 2
    said = capsys.readouterr().err
    assert (
        "needs the package lm_eval, which is not installed; in a checkout of Phalanx: pip install -e '.[eval]'" in said
    )
    assert "--limit = 0: must be at least 1" in said and "--allow-functions: has no effect without --tasks" in said
    monkeypatch.setattr(command, "is_installed", lambda name: name == "transformers")
    assert main(["eval", str(tmp_path)]) == 2
    assert "needs the packages lm_eval, accelerate, which are not installed; in a" in capsys.readouterr().err


def test_validations_are_those_of_all_logs(tmp_path: Path) -> None:
    """The host of rank 0 is lost after step 2: another member validates step 4."""
    assert command._validations(tmp_path) == {}, "of a run that was imported"
    team = {"folding": "dp1", "noticed_s": 0.0, "formed_s": 0.0, "built_s": 0.0, "moved_s": 0.0, "moved_bytes": 0, "checked": 1}  # fmt: skip
    for rank, told in {
        0: [TeamFormed(generation=1, members=2, step=0, why="begins", **team), Validated(step=2, loss=5.0, tokens=9, seconds=1.0)],
        1: [TeamFormed(generation=2, members=1, step=2, why="lost", **team), Validated(step=4, loss=4.0, tokens=9, seconds=1.0)],
    }.items():  # fmt: skip
        with contextlib.closing(JsonlSink(tmp_path, rank=rank)) as log:
            for event in told:
                log.write(event)
    assert {step: r["loss"] for step, r in command._validations(tmp_path).items()} == {2: 5.0, 4: 4.0}


def test_a_model_that_one_gpu_does_not_hold_is_shared_out(tmp_path: Path) -> None:
    """As the harness does it, layer by layer; no GPU has run it."""
    for shard in range(2):
        (tmp_path / f"model-{shard}.safetensors").write_bytes(bytes(500))
    assert not takes_several(tmp_path, []) and not takes_several(tmp_path, [100]), "there is but one"
    assert takes_several(tmp_path, [1200, 2000]) and not takes_several(tmp_path, [1300, 1300])
