"""`phalanx eval`: the harness sees the model that was trained, its loss is ours, and templates of tasks are enclosed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train_help import phalanx, start_program, train_args

from phalanx.cli.eval import EvalArgs, evaluate, own_text, run_harness
from phalanx.cli.evaluating.harness import HarnessJob
from phalanx.cli.evaluating.tasks import read_tasks
from phalanx.cli.export_hf import ExportArgs, export
from phalanx.core.errors import ConfigError, RunError
from phalanx.observe.event_log import read_history
from phalanx.train.generation import LoadedModel, load_model, next_logits

pytest.importorskip("lm_eval", reason="the extra eval is not installed (phalanx[eval])")
pytestmark = pytest.mark.ranks
WINDOW = 512


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose validation text is a window and a little more: one document is cut."""
    base = tmp_path_factory.mktemp("eval")
    lines = (json.dumps({"text": f"{n} times {n % 7} makes {n * (n % 7)}, said number {n}."}) for n in range(60))
    (base / "text.jsonl").write_text("\n".join(lines) + "\n")
    changes = {"launch__ranks": 1, "train__steps": 12, "train__seq_len": WINDOW, "train__global_batch": 2, "train__micro_batch": 2, "checkpoint__interval": 12}  # fmt: skip
    done = phalanx("train", *train_args(base, data__sources=f'["{base / "text.jsonl"}"]', **changes))
    assert done.returncode == 0, done.stderr
    return base / "runs/run"


def loss_of(loaded: LoadedModel, context: list[int], then: list[int]) -> float:
    """Nats that the model needs for `then` after `context`, token by token."""
    total = 0.0
    for number, token in enumerate(then):
        logits = next_logits(loaded.runner, [*context, *then[:number]])
        total -= float(torch.log_softmax(logits.double(), 0)[token])
    return total


@pytest.mark.core
def test_its_loss_is_the_one_of_training(run: Path, tmp_path: Path) -> None:
    loaded = load_model(run)
    tokenizer = loaded.tokenizer
    own = own_text(EvalArgs(run=run), tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert len(texts) > 3
    # a task of one's own: what follows the first token, as the loss of training counts it
    rows = "".join(json.dumps({"first": text[0], "rest": text[1:]}) + "\n" for text in texts)
    (tmp_path / "rest.jsonl").write_text(rows)
    (tmp_path / "rest.yaml").write_text(
        "task: rest\ndataset_path: json\ndataset_kwargs: {data_files: {test: rest.jsonl}}\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{first}}'\ndoc_to_target: '{{rest}}'\ntarget_delimiter: ''\nmetric_list: [{metric: perplexity}]\n"
    )
    export(ExportArgs(run=run, dir=tmp_path / "model", dtype="float32"))
    tasks = (own["task"], *read_tasks([tmp_path / "rest.yaml"]))
    job = HarnessJob(model=str(tmp_path / "model"), tasks=tasks, files=(), pieces=own["pieces"], window=WINDOW, batch=4, limit=None, threads=1, device="cpu", out=str(tmp_path / "out.json"))  # fmt: skip
    found = run_harness(job, tmp_path)
    ids = [tokenizer.encode(text).tolist() for text in texts]
    assert own["tokens"] == sum(map(len, ids)) and own["bytes"] == sum(len(t.encode()) for t in texts)
    # all tokens of each document, after its beginning
    nats = sum(loss_of(loaded, [tokenizer.eos_id], of) for of in ids)
    theirs = found["validation"]["metrics"]["bits_per_byte"] * math.log(2) * own["bytes"]
    assert theirs == pytest.approx(nats, rel=1e-6)
    # what training calls validation loss: the first token left out, the end counted
    ends = sum(loss_of(loaded, of, [tokenizer.eos_id]) for of in ids)
    rest = math.log(found["rest"]["metrics"]["perplexity"]) * len(texts)  # the harness means over documents
    validated = read_history(run).validations[12]
    assert validated["tokens"] == own["tokens"]
    assert own["tokens"] + len(texts) > WINDOW + 1, "no document is cut by the windows of training"
    assert validated["loss"] == pytest.approx((rest + ends) / own["tokens"], rel=2e-3), "but for the cut one"
    # the very tokens of training, cut as they are there
    assert found["validation"]["loss"] == pytest.approx(validated["loss"], rel=2e-6)


def test_the_command(run: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps({"q": f"{n}?", "of": ["yes", "no"], "right": n % 2}) + "\n" for n in range(6)))  # fmt: skip
    head = "dataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_choice: '{{of}}'\ndoc_to_target: '{{right}}'\n"
    (tasks / "a.yaml").write_text(f"task: a\n{head}doc_to_text: '{{{{q}}}}'\nmetric_list: [{{metric: acc}}, {{metric: acc_norm}}]\n")  # fmt: skip
    done = phalanx("eval", str(run), "--tasks", str(tasks), "--limit", "4", "--threads", "1", "--json", str(tmp_path / "e.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["step"] == 12 and found["tasks"]["a"]["documents"] == 4
    assert 0 <= found["tasks"]["a"]["metrics"]["acc"] <= 1 and "acc_norm" in done.stdout


def test_functions_of_own_tasks_run_where_asked_for(run: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps({"q": f"{n}?", "of": ["yes", "no"]}) + "\n" for n in range(4)))
    (tasks / "_all.yaml").write_text(
        "dataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: q\ndoc_to_choice: of\ndoc_to_target: !function own.first\nmetric_list: [{metric: acc}]\n"
    )
    (tasks / "a.yaml").write_text("include: _all.yaml\ntask: first\n")
    (tasks / "b.yaml").write_text("include: _all.yaml\ntask: last\ndoc_to_target: !function own.last\n")
    (tasks / "own.py").write_text("def first(row):\n    return 0\n\ndef last(row):\n    return 1\n")
    done = phalanx("eval", str(run), "--tasks", str(tasks), "--allow-functions", "--threads", "1", "--json", str(tmp_path / "e.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e.json").read_text())["tasks"]
    assert found["first"]["metrics"]["acc"] + found["last"]["metrics"]["acc"] == 1  # one of two answers is the likelier
    loaded = load_model(run)
    row = loaded.tokenizer.encode("0?").tolist()
    yes, no = (loss_of(loaded, row, loaded.tokenizer.encode(f" {word}").tolist()) for word in ("yes", "no"))
    assert found["first"]["metrics"]["acc"] in ((0.25, 0.5, 0.75, 1.0) if yes < no else (0.0, 0.25, 0.5, 0.75))


def test_without_tasks_it_tells_both_losses(run: Path, tmp_path: Path) -> None:
    done = phalanx("eval", str(run), "--threads", "1", "--json", str(tmp_path / "e.json"))
    assert done.returncode == 0, done.stderr
    own = json.loads((tmp_path / "e.json").read_text())["own_text"]
    assert own["exported_loss"] == pytest.approx(read_history(run).validations[12]["loss"], rel=2e-6)
    said = f"validation loss {own['validation_loss']:.4f} in training (step 12), {own['exported_loss']:.4f} of the exported model"
    assert said in " ".join(done.stdout.split())


def test_of_conversations_the_answers_count_behind_what_was_asked(tmp_path: Path) -> None:
    """Two answers in each: the second stands behind the first, and what the user says is seen and not counted."""
    said = [[{"role": role, "content": f"{n} {role} {turn}"} for turn in "ab" for role in ("user", "assistant")] for n in range(60)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in said))
    changes = {
        "launch__ranks": 1,
        "train__steps": 4,
        "train__seq_len": 256,
        "train__global_batch": 2,
        "train__micro_batch": 2,
    }
    chats = {"data__sources": f'["{tmp_path / "chats.jsonl"}"]', "data__chat_template": "chatml", "data__tokenizer": "bpe:300"}  # fmt: skip
    done = phalanx("train", *train_args(tmp_path, **chats, **changes))
    assert done.returncode == 0, done.stderr
    found = evaluate(EvalArgs(run=tmp_path / "runs/run", threads=1), Console(quiet=True))["own_text"]
    assert found["exported_loss"] == pytest.approx(found["validation_loss"], rel=2e-6)


def test_another_text_than_that_of_training_is_no_validation(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources = .*: is not the text that the run was trained on"):
        own_text(EvalArgs(run=run), tmp_path, trained_on="another")


ENCLOSED = """
import json, sys
from phalanx.cli.evaluating.harness import enclose_templates
from lm_eval import utils
enclose_templates()
row = {"q": " a ", "of": ["x", "y"], "right": 1, "names": ["__class__", "__mro__"]}
for template in json.loads(sys.argv[1]):
    try:
        print(utils.apply_template(template, row))
    except Exception as error:
        print(type(error).__name__)
"""
HARMLESS = {
    "{{ q.strip() }}{{ of[right] }}": "ay",
    "{% for each in of %}{{ each|upper }}{% endfor %}": "XY",
    "{{ q|regex_replace('a', 'b') }}{{ 'ab' * 2 }}{{ 2 * 3 }}": " b abab6",
}
HARMFUL = (
    "{{ ''.__class__.__mro__ }}", "{{ q[names[0]][names[1]] }}", "{{ q|attr(names[0])|attr(names[1]) }}", "{{ ('{0.__class__.__mro__}'|attr('format'))(q) }}",
    "{{ '{0.__class__}'.format(q) }}", "{{ utils.__init__ }}", "{{ of.append('z') }}", "{{ 'a' * 100000000 }}", "{{ 9 ** 9 ** 9 }}", "{{ '%1000000000d' % 1 }}",
    "{% for i in range(1000000) %}x{% endfor %}", "{% include '/etc/hostname' %}",
)  # fmt: skip


@pytest.mark.core
def test_templates_fill_in_fields_and_reach_no_python() -> None:
    out, err = start_program(ENCLOSED, json.dumps([*HARMLESS, *HARMFUL])).communicate(timeout=120)
    lines = out.splitlines()
    assert lines[: len(HARMLESS)] == list(HARMLESS.values()), err
    for template, line in zip(HARMFUL, lines[len(HARMLESS) :], strict=True):
        assert line in ("SecurityError", "UndefinedError", "OverflowError", "TemplateNotFound"), (
            template,
            line,
        )


@pytest.mark.slow
def test_a_template_is_enclosed(run: Path, tmp_path: Path) -> None:
    from rich.console import Console

    (tmp_path / "d.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: d.jsonl}}\ntest_split: test\noutput_type: loglikelihood\n"
        f"doc_to_text: {json.dumps(HARMFUL[0])}\ndoc_to_target: q\nmetric_list: [{{metric: acc}}]\n"
    )
    with pytest.raises(RunError, match="SecurityError"):
        evaluate(EvalArgs(run=run, tasks=(tmp_path / "t.yaml",), threads=1), Console())


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", None)])
def test_a_gpu_gets_the_model_in_the_type_of_training(
    device: str, dtype: str | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the bytes would not fit where the model does."""
    asked = list[str | None]()

    def exported(args: ExportArgs) -> None:
        asked.append(args.dtype)
        raise RunError("seen")

    monkeypatch.setattr("phalanx.cli.eval._device", lambda: device)
    monkeypatch.setattr("phalanx.cli.eval.export", exported)
    with pytest.raises(RunError, match="seen"):
        evaluate(EvalArgs(run=run), Console())
    assert asked == [dtype]
