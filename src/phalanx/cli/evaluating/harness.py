"""Runs lm-evaluation-harness on a Hugging Face checkpoint: a process of its own, `python -m phalanx.cli.evaluating.harness JOB.json`.

It is offline, and a template of a task is a stranger's program: it runs in Jinja's immutable sandbox, where loops (100,000 turns) and repeated texts (`MOST_TEXT`) are bounded. Must
never change: no template is made before `enclose_templates`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.reading import load_json, typed

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
MOST_TEXT = 1 << 20
"""Characters that a template may make of one document."""


@dataclass(frozen=True, kw_only=True)
class HarnessJob:
    """What the process is asked for, and where its results go."""

    model: str
    """Folder of the checkpoint."""
    tasks: tuple[dict[str, Any], ...]
    files: tuple[str, ...]
    """YAML files that the harness reads itself, with whatever they run."""
    window: int
    """Longest sequence in tokens."""
    batch: int
    limit: int | None
    threads: int
    device: str
    out: str
    pieces: str | None = None
    """File of the tokens that training validates on: their loss is told with the first task."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(path: str) -> int:
    """Runs the job of a file."""
    job: HarnessJob = typed(load_json(path), HarnessJob, where=path)
    results = evaluate(job)
    Path(job.out).write_text(json.dumps(results, allow_nan=True), encoding="utf-8")
    return 0


def evaluate(job: HarnessJob) -> dict[str, Any]:
    """{task: {"metrics": {name: value}, "errors": {name: standard error}, "documents": n, "loss": that of `HarnessJob.pieces`}}."""
    import torch

    torch.set_num_threads(job.threads)
    enclose_templates()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(
        pretrained=job.model, tokenizer=job.model, dtype="float32" if job.device == "cpu" else "auto", max_length=job.window, trust_remote_code=False,
        batch_size=job.batch, device=job.device, parallelize=takes_several(Path(job.model), _gpu_bytes() if job.device == "cuda" else []),
    )  # fmt: skip
    tasks = [*job.tasks, *map(_with_functions, job.files)]
    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=TaskManager(include_defaults=False), limit=job.limit, log_samples=False, bootstrap_iters=1000,
    )  # fmt: skip
    assert found is not None
    results = {name: _figures(row, found["n-samples"].get(name, {})) for name, row in found["results"].items()}
    if job.pieces is not None:
        results[job.tasks[0]["task"]]["loss"] = loss_of(model, job.pieces)
    return results


def takes_several(model: Path, gpu_bytes: Sequence[int]) -> bool:
    """Whether a checkpoint is shared out over all GPUs, layer by layer: where its weights and a quarter of them to compute with are more than the first one has."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return len(gpu_bytes) > 1 and 1.25 * size > gpu_bytes[0]


def _gpu_bytes() -> list[int]:
    import torch

    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def loss_of(model: Any, path: str) -> float:
    """Nats a token that the harness's model needs for what is predicted in each piece: what our validation loss is the mean of."""
    with np.load(path) as file:
        pieces, seen = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1]), file["seen"].tolist()
    requests = [(("", ""), p[:n].tolist(), p[n:].tolist()) for p, n in zip(pieces, seen, strict=True)]
    nats = -math.fsum(found[0] for found in model._loglikelihood_tokens(requests, disable_tqdm=True))
    return nats / sum(len(predicted) for _, _, predicted in requests)


def _figures(row: dict[str, Any], samples: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in row.items() if "," in key and isinstance(value, int | float)}
    return {
        "metrics": {_name(key): value for key, value in numbers.items() if "_stderr" not in key},
        "errors": {_name(key.replace("_stderr", "")): value for key, value in numbers.items() if "_stderr" in key},
        "loss": None,
        "documents": samples.get("effective", samples.get("original", 0)),
    }


def _name(key: str) -> str:
    """Metric of `metric,filter`; the filter stays where it is one."""
    name, _, chosen = key.partition(",")
    return name if chosen == "none" else f"{name} ({chosen})"


def _with_functions(file: str) -> dict[str, Any]:
    """A task that the harness reads itself, with whatever it includes. Paths of data begin in the folder of the file, as in all tasks here."""
    from lm_eval.tasks._yaml_loader import load_yaml

    task = dict(load_yaml(file, resolve_func=True))
    data = task.get("dataset_kwargs") or {}
    if isinstance(files := data.get("data_files"), dict):
        found = {
            split: str(Path(file).parent / name) if isinstance(name, str) else name for split, name in files.items()
        }
        task["dataset_kwargs"] = {**data, "data_files": found}
    return task


def enclose_templates() -> None:
    """From now on templates of tasks run in Jinja's immutable sandbox. Raises `RuntimeError` where the harness makes them elsewhere than it did."""
    import lm_eval.utils as harness
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*" and any(isinstance(side, str | bytes | list | tuple) for side in (left, right)):
                times = left if isinstance(left, int) else right
                if len(right if times is left else left) * times > MOST_TEXT:
                    raise SecurityError(f"a template may not repeat a text to more than {MOST_TEXT} characters")
            if operator == "**" or (operator == "%" and isinstance(left, str)):
                raise SecurityError(f"a template may not use {operator} here")
            return super().call_binop(context, operator, left, right)

    if not hasattr(harness, "env") or "env" not in harness.apply_template.__code__.co_names:
        rule = (
            "this lm-evaluation-harness makes its templates in another way than 0.4.13, so that they cannot be enclosed"
        )
        raise RuntimeError(rule)
    inside = Sandbox(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    inside.filters["regex_replace"] = harness.regex_replace
    harness.env = inside


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
