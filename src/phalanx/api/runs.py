"""`open_run`: what is in a run folder, while it trains or later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.launching import is_run_of
from phalanx.core.config import RECIPE_FILE, STATUS_FILE, Recipe
from phalanx.core.errors import ConfigError, of_kind, raise_if
from phalanx.core.events import Event
from phalanx.core.reading import load_json
from phalanx.observe import METRICS, History, event_of, samples
from phalanx.observe.recorded import read_run

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RunHandle:
    """A run folder. Nothing is kept in memory: every call reads what is there now."""

    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was last started with. It names this folder, also where that was copied or moved: training goes on here."""
        from phalanx.train.setup import RunFolder

        recipe = RunFolder(self.folder).read_recipe()
        if is_run_of(self.folder, recipe):
            return recipe
        here = self.folder.resolve()
        return replace(recipe, run=replace(recipe.run, name=here.name, folder=os.path.relpath(here.parent)))

    @property
    def status(self) -> dict[str, Any]:
        """Status ("running", "finished" or "interrupted"), step, total_steps, samples, checkpoint_step, validation_loss, unigram_loss. Raises `ConfigError` where none was written yet."""
        path = self.folder / STATUS_FILE
        try:
            return dict(load_json(path))
        except FileNotFoundError:
            rule, hint = "has no status yet", "wait until the run has begun"
            raise ConfigError.of(str(path), None, rule, hint, subject="the run") from None

    def events(self) -> Iterator[Event]:
        """The steps and validations that count, by step: those that training later went back behind are left out."""
        yield from _counting(read_run(self.folder).history)

    def metrics(self) -> pa.Table:
        """A row for each step: `step` (int64) and the metrics of docs/reference/metrics.md by name (float64; a list where there is one for each MoE layer), but for `team/*` and `recovery/*`,
        which are no step's. Null where a step has none."""
        import pyarrow as pa

        rows: dict[int, dict[str, Any]] = {}
        history = read_run(self.folder).history
        saved = (event_of(record) for record in history.checkpoints if record["step"] in history.steps)
        for event in (*_counting(history), *filter(None, saved)):
            for sample in samples(event):
                row = rows.setdefault(sample.step, {})
                if sample.layer is None:
                    row[sample.metric.name] = sample.value
                else:
                    row.setdefault(sample.metric.name, []).append(sample.value)
        types = {m.name: pa.list_(pa.float64()) if m.per_layer else pa.float64() for m in METRICS}
        seen = [name for name in types if any(name in row for row in rows.values())]
        columns = {name: pa.array([row.get(name) for row in rows.values()], types[name]) for name in seen}
        return pa.table({"step": pa.array(list(rows), pa.int64()), **columns})

    def generate(
        self, prompt: str = "", *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
    ) -> str:
        """The prompt and how the model of the newest checkpoint goes on, in this process. Raises `ConfigError` or `CheckpointError`."""
        from phalanx.cli.generate import GenerateArgs, continuation

        problems = of_kind("prompt", prompt, str, "must be text", 'use "import "')
        problems += of_kind("temperature", temperature, Real, "must be a number", "use 0.8")
        for name, value, usual in (("tokens", tokens, 200), ("top_k", top_k, 50), ("seed", seed, 0)):
            problems += of_kind(name, value, Integral, "must be a whole number", f"use {usual}")
        raise_if(problems, ConfigError, subject="the arguments")
        options = GenerateArgs(
            run=self.folder, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
        *_, text = continuation(options)
        return prompt + text

    def export(self, folder: str | Path, *, dtype: str | None = None, family: str | None = None) -> Path:
        """Write the model as a Hugging Face checkpoint into a new folder, and return that. Raises `ConfigError` or `CheckpointError`."""
        from phalanx.cli.export_hf import ExportArgs, export

        problems = of_kind("folder", folder, str | Path, "must be a path", 'use "exported"')
        problems += of_kind("dtype", dtype, str | None, "must be text or None", 'use "bfloat16"')
        problems += of_kind("family", family, str | None, "must be text or None", 'use "mixtral"')
        raise_if(problems, ConfigError, subject="the arguments")
        return export(ExportArgs(run=self.folder, dir=Path(folder), dtype=dtype, family=family)).target


def _counting(history: History) -> Iterator[Event]:
    """Steps and validations, by step."""
    for step in sorted({*history.steps, *history.validations}):
        for records in (history.steps, history.validations):
            event = event_of(records[step]) if step in records else None
            if event is not None:
                yield event


def open_run(folder: str | Path) -> RunHandle:
    """The run in `folder`, such as `runs/laptop`. Raises `ConfigError` where there is none."""
    wrong = of_kind("folder", folder, str | Path, "must be the folder of a run", 'use "runs/laptop"')
    raise_if(wrong, ConfigError, subject="the arguments")
    found = Path(folder)
    if not (found / RECIPE_FILE).is_file():
        rule, hint = f"is not the folder of a run: it has no {RECIPE_FILE}", "give one such as runs/laptop"
        raise ConfigError.of("folder", str(folder), rule, hint, subject="the run")
    return RunHandle(found)
