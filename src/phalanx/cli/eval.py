"""How good the model of a run is: tasks of lm-evaluation-harness on the model as `phalanx export-hf` writes it.

Without --tasks: the validation documents of the run, by the harness's perplexity, beside the validation loss of training. Tasks are YAML files of yours, with data in local files:
nothing is fetched, and nothing that a file names is run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from phalanx.cli.evaluating import OFFLINE, HarnessJob, read_tasks, task_files
from phalanx.cli.export_hf import ExportArgs, export
from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, DataError, Problem, RunError, not_installed, printable, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.process import is_installed
from phalanx.core.reading import parse_json, read_text
from phalanx.observe.recorded import read_run
from phalanx.train.setup import RunFolder

if TYPE_CHECKING:
    from phalanx.core.config import Recipe
    from phalanx.data import Dataset

OWN = "validation"
"""The task of the run's own text."""
OWN_DOCUMENTS = 200
"""Documents of it, where --limit does not say."""
NOT_PASSED_ON = ("HF_", "LM_HARNESS_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")
"""Beginnings of variables: tokens and caches of the Hub, `HF_ALLOW_CODE_EVAL`, and what makes a process a rank of `torchrun`."""
NEEDED = ("lm_eval", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Say how good the model of a run is."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, such as runs/laptop."""
    tasks: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.yaml [FILE.yaml ...]")] = ()
    """Tasks, or folders of them. Default: the run's own validation text."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Documents of each task. Default: all, of the run's own text 200."""
    batch: int = 8
    """Sequences that the model works on at a time."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Checkpoint to read. Default: the newest."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Compute threads. Default: all cores."""
    allow_functions: bool = False
    """Let the harness read the files alone, and run the functions that they name: for files that you trust."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the results."""


def main(args: list[str]) -> int:
    """Run `phalanx eval ARGS...`; returns the exit status."""
    options = read_words(EvalArgs, args, prog="phalanx eval", description=__doc__)
    check_writable(options.json)
    results = evaluate(options, Console())
    show(results, Console())
    write_json(options.json, results)
    return 0


def evaluate(options: EvalArgs, console: Console) -> dict[str, Any]:
    """What `--json` writes: {"run", "step", "tasks": {task: {"metrics", "errors", "documents"}}}, and for the run's own text what `_compared` gives.

    Raises `ConfigError` with all that is wrong with the arguments, and `RunError` where the harness fails.
    """
    raise_if(problems(options), ConfigError, subject="the arguments")
    tasks = () if options.allow_functions else tuple(read_tasks(options.tasks))
    files = tuple(str(path.resolve()) for path in task_files(options.tasks)) if options.allow_functions else ()
    recipe, device = RunFolder(options.run).read_recipe(), _device()
    with tempfile.TemporaryDirectory(prefix="phalanx-eval-") as name:
        folder = Path(name)
        with console.status("exporting the model"):
            # a GPU computes in the type that the model is trained in, of half the bytes
            dtype = "float32" if device == "cpu" else None
            plan = export(ExportArgs(run=options.run, dir=folder / "model", step=options.step, dtype=dtype))
        own = None
        if not options.tasks:
            with console.status("reading the validation text"):
                own = own_text(options, folder, trained_on=plan.run.trained_text(plan.step))
            tasks = (own["task"],)
        job = HarnessJob(
            model=str(folder / "model"), tasks=tasks, files=files, pieces=own["pieces"] if own else None, window=recipe.train.seq_len, batch=options.batch, limit=options.limit,
            threads=options.threads or os.cpu_count() or 1, device=device, out=str(folder / "results.json"),
        )  # fmt: skip
        with console.status("evaluating"):
            found = run_harness(job, folder)
    results = {"run": str(options.run), "step": plan.step, "tasks": found}
    return results if own is None else {**results, "own_text": _compared(found[OWN], own, options, plan.step)}


def problems(options: EvalArgs) -> list[Problem]:
    """What is wrong with the arguments, and what is not installed."""
    found = too_small(options, "leave it out", limit=1, batch=1, threads=1)
    if options.allow_functions and not options.tasks:
        found.append(Problem(where="--allow-functions", value=None, rule="has no effect without --tasks", hint="leave it out"))  # fmt: skip
    missing = [name for name in NEEDED if not is_installed(name)]
    if missing:
        found.append(not_installed("phalanx eval", None, *missing, extra="eval"))
    return found


def own_text(options: EvalArgs, folder: Path, *, trained_on: str | None = None) -> dict[str, Any]:
    """{"task", "tokens", "bytes"} of the first validation documents, as a task of the harness, and the file of the "pieces" that training validates on (not with --limit).

    Raises `DataError` or `ConfigError` where the run's text (`trained_on`, its fingerprint) is not there any more.
    """
    from phalanx.data import prepare

    recipe = RunFolder(options.run).read_recipe()
    prepared = prepare(recipe.data, resume=trained_on)
    if trained_on not in (None, prepared.train.fingerprint):
        raise ConfigError.of("data.sources", recipe.data.sources, "is not the text that the run was trained on", "put it back, or give tasks with --tasks", subject="the run")  # fmt: skip
    tokenizer, texts = prepared.tokenizer, list[str]()
    for stream in (s for pool in prepared.validation.pools for s in pool):
        for number in range(min(stream.num_documents, (options.limit or OWN_DOCUMENTS) - len(texts))):
            text = tokenizer.decode(stream.document(number).tolist())
            if text.strip():
                texts.append(text)
    if not texts:
        raise ConfigError.of("data.validation_fraction", None, "left no document for validation", "give tasks with --tasks", subject="the run")  # fmt: skip
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "validation.jsonl").write_text(lines, encoding="utf-8")
    task = {
        "task": OWN, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "validation.jsonl")}}, "test_split": "test",
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": m} for m in ("bits_per_byte", "byte_perplexity", "word_perplexity")],
    }  # fmt: skip
    pieces = None if options.limit else write_pieces(prepared.validation, recipe, folder / "pieces.npz")
    return {"task": task, "tokens": tokens, "bytes": sum(len(text.encode()) for text in texts), "pieces": pieces}


def write_pieces(validation: Dataset, recipe: Recipe, path: Path) -> str:
    """The tokens that training validates on: each stretch of predicted ones behind what the model sees of their document before them. Returns the path."""
    import numpy as np

    from phalanx.data import ValidationLoader

    t = recipe.train
    loader = ValidationLoader(validation, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch, batches=t.eval_batches)  # fmt: skip
    pieces, seen = list[Any](), list[int]()
    for micro in (m for number in range(loader.num_batches) for m in loader.microbatches(number)):
        for tokens, labels, lengths in zip(micro.tokens, micro.labels, micro.segments, strict=True):
            ends = np.cumsum(lengths)
            for begin, end in zip(ends - lengths, ends, strict=True):
                for first, last in stretches(labels[begin:end] >= 0):
                    pieces.append(np.append(tokens[begin : begin + first + 1], labels[begin + first : begin + last]))
                    seen.append(first + 1)
    np.savez(path, tokens=np.concatenate(pieces), lengths=np.asarray([len(piece) for piece in pieces]), seen=np.asarray(seen))  # fmt: skip
    return str(path)


def stretches(chosen: Any) -> list[tuple[int, int]]:
    """[first, last) of each stretch of true values: one in a text, one for each answer in a conversation."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(chosen, dtype=np.int8), [0])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def run_harness(job: HarnessJob, folder: Path) -> dict[str, Any]:
    """What the harness finds, in a process of its own, which takes no module from the folder that this command runs in. Raises `RunError` with the end of what that said."""
    job.write(folder / "job.json")
    (folder / "home").mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED_ON)}
    environ |= {**OFFLINE, "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-P", "-m", "phalanx.cli.evaluating.harness", str(folder / "job.json")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()][-12:]
        raise RunError("lm-evaluation-harness failed:\n  " + "\n  ".join(said))
    return dict(parse_json(read_text(job.out), where="results of the harness", plain=False))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _compared(found: dict[str, Any], own: dict[str, Any], options: EvalArgs, step: int) -> dict[str, Any]:
    """The harness's loss in our unit; the loss of the exported model on what training validates on, and what training found."""
    nats = found["metrics"]["bits_per_byte"] * math.log(2) * own["bytes"]
    validated = [(at, r["loss"]) for at, r in sorted(_validations(options.run).items()) if at <= step]
    return {
        "tokens": own["tokens"],
        "loss_per_token": nats / own["tokens"],
        "exported_loss": found["loss"],
        "validation_loss": validated[-1][1] if validated else None,
        "validation_step": validated[-1][0] if validated else None,
    }


def _validations(run: Path) -> dict[int, Any]:
    """By step; none of a run that was imported and not trained."""
    try:
        return dict(read_run(run).history.validations)
    except DataError:
        return {}


def show(results: dict[str, Any], console: Console) -> None:
    """A table of what was found, and how the run's own text compares."""
    table = Table(title=f"{results['run']}, step {results['step']}", title_justify="left")
    for name in ("task", "metric"):
        table.add_column(name)
    for name in ("value", "± error", "documents"):
        table.add_column(name, justify="right")
    for task, found in results["tasks"].items():
        for metric, value in found["metrics"].items():
            error = found["errors"].get(metric)
            shown = f"{error:.4g}" if error is not None and math.isfinite(error) else ""
            table.add_row(printable(task), printable(metric), f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}", shown, str(found["documents"]))  # fmt: skip
    console.print(table)
    if "own_text" in results:
        own = results["own_text"]
        if own["validation_loss"] is not None:
            exported = f", {own['exported_loss']:.4f} of the exported model" if own["exported_loss"] is not None else ""
            console.print(f"validation loss {own['validation_loss']:.4f} in training (step {own['validation_step']}){exported}", highlight=False)  # fmt: skip
        said = f"{own['loss_per_token']:.4f} nats a token by the harness, which counts the first token of each document, not its end, and cuts longer ones only"
        console.print(said, highlight=False)
