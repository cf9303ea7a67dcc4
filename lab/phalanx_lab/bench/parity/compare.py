"""One configuration in transformers and in Phalanx: do both take it, and do they compute the same?

Refusing is fine where every problem names a key of the file (or a tensor, whose shape the file decides), and nothing that its owner never wrote.
What both take must agree in logits, packed documents, loss and every gradient, in float64 and in float32, and come back from a run bit for bit,
with the file that came with it and with one that we write.

transformers gives no gradient to the row of the padding token, so no batch has that token.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from phalanx.core.errors import PhalanxError, Problem
from phalanx.core.files import new_folder
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import TokenBatch
from phalanx.models.families import find_family
from phalanx.models.families.family import Family, differences
from phalanx.runtime.processes.launch import StopRequest
from phalanx.runtime.processes.world import WorldInfo
from phalanx.train.huggingface import export_hf
from phalanx.train.huggingface.hugging_face import HfCheckpoint, open_checkpoint
from phalanx.train.huggingface.import_hf import KEPT_FOLDER, Import, import_rank, plan_import
from phalanx_lab.bench.parity.draw import LENGTH, SEQUENCES, Config, Configuration
from phalanx_lab.bench.parity.models import (
    NotLoadedError,
    draw_weights,
    load_ours,
    load_theirs,
    logical_gradients,
    own_gradients,
    own_logits,
    relative,
    run_theirs,
    smallest_gap,
)

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-4}
NEAR = 1e-5
"""Scores of experts that are nearer than this may be ordered otherwise by another way of rounding to float32. Neither does a float32 pass say
anything where transformers itself is farther from its float64 pass than a quarter of the limit: small models can be ill-conditioned."""
FLOOR = 1e-3
"""A gradient counts at least as large as this part of the largest one of the model: a router whose weights are all 1 has none but rounding."""
REDRAWS = 4
FIRST_TOKEN = 8
STORED = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights on disk; cases take turns."""


@dataclass
class Compared:
    """What came of a case. `errors` are relative: `float64 logits`, `float32 gradients`, ..."""

    case: str
    config: Config
    key: str
    verdict: Literal["agree", "both refuse", "we refuse", "they refuse", "mismatch"] = "agree"
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Where our problems are."""
    theirs: str = ""
    """Why transformers does not take it."""
    errors: dict[str, float] = field(default_factory=dict)
    redrawn: int = 0


def compare(case: Configuration, folder: Path, *, number: int = 0) -> Compared:
    """Run one case in an empty folder."""
    outcome = Compared(case.name, case.config, case.key)
    source = folder / "source"
    try:
        model = build(case.base, source)
    except NotLoadedError as error:
        return _without_weights(outcome, str(error))
    for attempt in range(REDRAWS):
        _save(model, case.config, source, seed=1000 * number + attempt, dtype=STORED[number % len(STORED)])
        if not _one(outcome, source, folder):
            break
        outcome.redrawn += 1
    else:
        outcome.wrong.append(f"float32: rounding decided in each of {REDRAWS} draws of weights")
    shutil.rmtree(folder, ignore_errors=True)
    outcome.verdict = "mismatch" if outcome.wrong else outcome.verdict
    return outcome


def build(config: Config, folder: Path) -> Any:
    """A model of transformers from a file. Raises `NotLoadedError`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    except Exception as error:  # whatever it is, transformers has no meaning for this file
        raise NotLoadedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error


def _save(model: Any, config: Config, folder: Path, *, seed: int, dtype: torch.dtype) -> None:
    model.float()
    draw_weights(model, seed)
    model.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def _without_weights(outcome: Compared, why: str) -> Compared:
    outcome.theirs, outcome.verdict = why, "they refuse"
    family = find_family(outcome.config["model_type"])
    assert isinstance(family, Family)  # drawn from the list
    outcome.refused = [p.where for p in _told(outcome, lambda: family.spec_of(outcome.config)[1]) or ()]
    if outcome.wrong or outcome.refused:
        outcome.verdict = "mismatch" if outcome.wrong else "both refuse"
    return outcome


def _told(outcome: Compared, ask: Callable[[], list[Problem]]) -> list[Problem] | None:
    """Problems, as a list or as an error; anything else that is raised is wrong."""
    try:
        return ask()
    except PhalanxError as error:
        return list(getattr(error, "problems", ())) or [Problem(where="?", value=None, rule=str(error))]
    except Exception as error:
        outcome.wrong.append(f"a raw error: {type(error).__name__}: {error}")
        return None


def _one(outcome: Compared, source: Path, folder: Path) -> bool:
    """Compare one draw of weights; True where rounding decided which experts were chosen, so that it says nothing."""
    found: list[tuple[HfCheckpoint, Import]] = []

    def ask() -> list[Problem]:
        checkpoint = open_checkpoint(source)
        settings = ["--run.folder", str(folder / "runs"), "--data.tokenizer", "byte", "--train.seq_len", str(LENGTH)]
        found.append((checkpoint, plan_import(checkpoint, settings)))
        return []

    problems = _told(outcome, ask)
    try:
        wide = load_theirs(source, torch.float64)
        run_theirs(wide, plain_batch(), gradients=False)
    except NotLoadedError as error:
        outcome.theirs, outcome.verdict = str(error), "both refuse" if problems else "they refuse"
        outcome.refused = [p.where for p in problems or ()]
        return False
    if problems:
        outcome.verdict, outcome.refused = "we refuse", [p.where for p in problems]
        outcome.wrong += [f"blames {p.where}, which nobody wrote: {p}" for p in problems if not _names_the_file(p)]
    if not found:
        return False
    ((checkpoint, job),) = found
    odd = differences(checkpoint.spec, job.spec)
    outcome.wrong += [f"the recipe means {name} = {other!r}, the file {value!r}" for name, value, other in odd]
    if _numbers(outcome, checkpoint, source, wide):
        return True
    _exports(outcome, job, source, folder)
    return False


def _names_the_file(problem: Problem) -> bool:
    return problem.where.startswith("config.json: ") or problem.where.endswith((".weight", ".bias", "_proj"))


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def plain_batch() -> TokenBatch:
    return _batch([(LENGTH,)] * SEQUENCES)


def packed_batch() -> TokenBatch:
    return _batch([(7, LENGTH - 7), (LENGTH,), (1, 4, LENGTH - 5)])


def _batch(segments: list[tuple[int, ...]]) -> TokenBatch:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(FIRST_TOKEN, 256, (len(segments), LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = labels[-1, 7:9] = IGNORE
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in segments])
    return TokenBatch(tokens[:, :-1].contiguous(), labels, positions, tuple(segments))


@dataclass(frozen=True)
class _Pass:
    """What a model computes, in one type: both batches, and the step on the packed one."""

    logits: torch.Tensor
    packed: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, want: _Pass) -> tuple[dict[str, float], str]:
        """Relative errors, and which gradient is the worst."""
        gradients, name = _gradient_error(self.gradients, want.gradients)
        return {
            "logits": relative(self.logits, want.logits),
            "packed": relative(self.packed, want.packed),
            "loss": abs(self.loss - want.loss) / abs(want.loss),
            "gradients": gradients,
        }, name


def _their_pass(model: Any, checkpoint: HfCheckpoint) -> _Pass:
    plain, packed = run_theirs(model, plain_batch(), gradients=False), run_theirs(model, packed_batch())
    return _Pass(plain.logits, packed.logits, packed.loss, logical_gradients(checkpoint, packed))


def _own_pass(checkpoint: HfCheckpoint, dtype: torch.dtype) -> _Pass:
    parts = load_ours(checkpoint, dtype)
    plain, packed = own_logits(parts, plain_batch()), own_logits(parts, packed_batch())
    return _Pass(plain, packed, *own_gradients(parts, packed_batch()))


def _numbers(outcome: Compared, checkpoint: HfCheckpoint, source: Path, wide: Any) -> bool:
    truth = _their_pass(wide, checkpoint)
    for dtype, limit in LIMITS.items():
        want = truth if dtype == torch.float64 else _their_pass(load_theirs(source, dtype), checkpoint)
        errors, name = _own_pass(checkpoint, dtype).errors(want)
        over = [what for what, error in errors.items() if not error <= limit]
        if over and dtype == torch.float32 and not outcome.wrong and _is_rounding(checkpoint, want, truth, limit):
            return True
        word = str(dtype).removeprefix("torch.")
        outcome.errors |= {f"{word} {what}": error for what, error in errors.items()}
        outcome.wrong += [f"{word} {what}: {errors[what]:.1e}" + f" ({name})" * (what == "gradients") for what in over]
    return False


def _is_rounding(checkpoint: HfCheckpoint, narrow: _Pass, wide: _Pass, limit: float) -> bool:
    if smallest_gap(load_ours(checkpoint, torch.float64), packed_batch()) < NEAR:
        return True
    return max(narrow.errors(wide)[0].values()) > limit / 4


def _gradient_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The worst of all parameters, and its name; inf where one has a gradient here or there alone."""
    if got.keys() != want.keys():
        return float("inf"), str(sorted(got.keys() ^ want.keys())[0])
    least = FLOOR * max(g.abs().max().item() for g in want.values())
    errors = {
        name: ((got[name] - g).abs().max() / g.abs().max().clamp(min=max(least, 1e-30))).item()
        for name, g in want.items()
    }
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return errors[worst], worst


# ---- there and back ----------------------------------------------------------------------------------------------------------


def _exports(outcome: Compared, job: Import, source: Path, folder: Path) -> None:
    """The run of the import goes out with the file that came in, and with one that we write."""
    run = job.folder.path

    def out(name: str) -> Callable[[], list[Problem]]:
        def ask() -> list[Problem]:
            plan = export_hf.plan_export(run, folder / name, dtype=None if name == "same" else "float32")
            with new_folder(plan.target, writer="export"):
                export_hf.write_shards(plan)
                export_hf.finish_export(plan)
            return []

        return ask

    with contextlib.redirect_stdout(io.StringIO()):
        import_rank(job, WorldInfo(), StopRequest())
    for name in ("same", "fresh"):
        if name == "fresh":
            shutil.rmtree(run / KEPT_FOLDER)
        problems = _told(outcome, out(name))
        if problems or problems is None:
            outcome.wrong += [f"export ({name}): {p}" for p in problems or ()]
            continue
        if name == "same":
            outcome.wrong += _not_the_same(source, folder / name)
        try:
            got, want = (
                run_theirs(load_theirs(path, torch.float32), plain_batch(), gradients=False).logits
                for path in (folder / name, source)
            )
        except NotLoadedError as refusal:
            outcome.wrong.append(f"export ({name}): transformers does not take it: {refusal}")
            continue
        error = relative(got, want)
        outcome.errors[f"export {name}"] = error
        if not error <= LIMITS[torch.float32]:
            outcome.wrong.append(f"export ({name}): logits differ by {error:.1e}")


def _not_the_same(source: Path, target: Path) -> list[str]:
    """Tensors that did not come back as they were. (The expert bias is float32 whatever it came in.)"""
    before, after = (load_file(path / "model.safetensors") for path in (source, target))
    if before.keys() != after.keys():
        return [f"export: tensors {sorted(before.keys() ^ after.keys())[:3]} are here or there alone"]
    wrong = []
    for name, x in before.items():
        x = x.float() if name.endswith("correction_bias") else x
        if after[name].dtype != x.dtype or not torch.equal(after[name], x):
            wrong.append(f"export: {name} came in as {x.dtype} and is {after[name].dtype}, or has other bits")
    return wrong[:3]
