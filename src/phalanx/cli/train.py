"""phalanx train [RECIPE.toml] [--section.key VALUE ...] [--dry-run] [--force] [--trust]

Trains the model of a recipe: on ranks of this machine (launch.ranks), or as one rank where torchrun started this program. The
same command goes on with a run that was stopped. Without a recipe every setting has its default; `phalanx settings` lists them.

  --section.key VALUE   changes a setting, as in --train.steps 1000 --launch.ranks 2
  --dry-run             print ranks, groups, parameters, memory per rank and steps; start nothing
  --cluster NAMExRANKS  with it: on a cluster that is not here, such as h100x64 (`phalanx simulate clusters` lists them): step time,
                        and whether it fits, else the nearest run that does
  --card-gb N           with it: the same question for a GPU of so many GB
  --force               start although the memory that it will need is predicted to be more than there is
  --trust               let the recipe file write anywhere, name a membership service, listen to other machines and send to Weights & Biases;
                        else it may only write below the present folder, and the command line says the rest
  --help                this text

Ctrl-C finishes the step, saves and ends; a second one, or one before training has begun, ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.launching import Request, read_args, read_recipe
from phalanx.cli.settings import settings_text
from phalanx.core.arguments import help_width, print_usage
from phalanx.core.config import RECIPE_FILE, Recipe
from phalanx.core.errors import ConfigError, PhalanxError, Problem, printable, raise_if
from phalanx.core.process import most_open_files
from phalanx.core.recipe import load_recipe
from phalanx.core.rules import value_of
from phalanx.core.settings import describe_settings
from phalanx.plan import choose_recovery, default_lr
from phalanx.plan.model import resolve_model
from phalanx.plan.recovery import wanted_ranks

if TYPE_CHECKING:
    from phalanx.runtime.processes import WorldInfo


def main(args: list[str]) -> int:
    """Run `phalanx train ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print_usage(__doc__)
        print("\nSettings, with type, default and range\n")
        print(settings_text(describe_settings(), width=help_width()))
        return 0
    with _stopped_as_by_ctrl_c():
        return _train(read_args(args))


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM before ranks are there, as while text is prepared: a line and an exit code, and nothing half done is left. Ranks and who watches them listen themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before in (None, signal.SIG_IGN):  # whoever started this wants it so
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _train(request: Request) -> int:
    if request.cluster is not None:
        _show_there(request, request.cluster)
        return 0
    launched = _launched(os.environ)
    try:
        return _train_here(request, launched)
    except ConfigError as err:
        if launched is None and request.recipe_path is not None:
            err = ConfigError([*_elsewhere(request.recipe_path), *err.problems], subject=err.subject)
        raise err from None


def _train_here(request: Request, launched: WorldInfo | None) -> int:
    several = launched is not None and launched.local_world < launched.world
    recipe = read_recipe(request, world=launched.world if launched else None, several_machines=several)
    recipe, told = with_learning_rate(recipe)
    if recipe.observe.is_for_people and (launched is None or launched.rank == 0):
        for line in (*told, *changed_settings(recipe)):
            print(printable(line), flush=True)
    if request.dry_run:
        _show(recipe, launched, request.card_gb)
        return 0
    return start(recipe, os.environ, force=request.force)


def _launched(environ: Mapping[str, str]) -> WorldInfo | None:
    """The place of this process among all, where a launcher started it. Without one a wrong setting is answered before torch is imported, which takes seconds."""
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    from phalanx.runtime.processes import read_world

    return read_world(environ)


def _elsewhere(name: str) -> list[Problem]:
    """What to do with a recipe that comes with Phalanx for a cluster, where it cannot be trained here."""
    from phalanx.cli.predicting.packaged import next_commands, packaged_recipes, read_predicted
    from phalanx.simulate.hardware import parse_cluster

    path = packaged_recipes().get(name)
    predicted = None if path is None else read_predicted(path.read_text(encoding="utf-8"))
    if predicted is None or parse_cluster(predicted.cluster).hosts == 1:
        return []
    rule, hint = f"is for the GPUs of {predicted.cluster}", " or ".join(next_commands(name, predicted))
    return [Problem(where="recipe", value=name, rule=rule, hint=hint)]


def with_learning_rate(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with a learning rate, and in a line whence, where it says none: that of the run where it has begun, else by the size of the model and the length of its training."""
    if recipe.optim.lr is not None:
        return recipe, []
    kept = _kept_recipe(recipe)
    if kept is not None and kept.optim.lr is not None:
        lr, why = kept.optim.lr, "as the run began"
    else:
        lr = default_lr(recipe, resolve_model(recipe.model, recipe.router))
        why = "by the FLOPs of the training (arXiv 2401.02954)"
    line = f"optim.lr = {lr:g}, {why}; --optim.lr sets another"
    return replace(recipe, optim=replace(recipe.optim, lr=lr)), [line]


def _kept_recipe(recipe: Recipe) -> Recipe | None:
    """What the run was last started with, where it has begun and that can be read."""
    path = Path(recipe.run.folder) / recipe.run.name / RECIPE_FILE
    try:
        return load_recipe(path, tell=lambda line: None) if path.is_file() else None
    except PhalanxError:
        return None  # the run folder's own reader will say so


OF_A_START = ("launch.device", "launch.host", "launch.rack", "launch.keep_service", "checkpoint.step")
"""Settings of one start, which the run folder does not keep."""


def changed_settings(recipe: Recipe) -> list[str]:
    """A line for each setting that is not as it was when the run was started last, and for what follows from another micro-batch."""
    kept = _kept_recipe(recipe)
    if kept is None:
        return []
    lines = []
    if recipe.train.micro_batch != kept.train.micro_batch:
        spec = resolve_model(recipe.model, recipe.router)
        if spec.moe_layers and spec.router.aux_loss and spec.router.aux_scope == "micro_batch":
            lines.append(
                'router.aux_scope = "micro_batch": with another train.micro_batch the balancing loss is another'
            )
        if spec.moe_layers and recipe.dispatch.policy == "drop":
            lines.append('dispatch.policy = "drop": with another train.micro_batch other rows are dropped')
    both = [(s.name, value_of(recipe, s.name), value_of(kept, s.name)) for s in describe_settings()]
    changed = [
        f"changed since the run was started last: {name} = {_word(now)} (was {_word(before)})"
        for name, now, before in both
        if now != before and name not in OF_A_START
    ]
    return changed + lines


def _word(value: object) -> str:
    return "not set" if value is None else f"{value}"


def _show_there(request: Request, name: str) -> None:
    """The dry run on a cluster that is not here."""
    from rich.console import Console

    from phalanx.cli.predicting.dry_run import dry_run, machine_of
    from phalanx.cli.predicting.recipe import device_of, dtype_of
    from phalanx.simulate.hardware import parse_cluster

    cluster = parse_cluster(name)
    recipe = read_recipe(
        request, world=cluster.world, auto_device=lambda _: device_of(cluster), auto_dtype=partial(dtype_of, cluster)
    )
    dry_run(recipe, machine_of(cluster), world=cluster.world, console=Console())


def _show(recipe: Recipe, launched: WorldInfo | None, card_gb: float | None) -> None:
    from rich.console import Console

    from phalanx.cli.predicting.cards import card_here, card_sold_as
    from phalanx.cli.predicting.dry_run import available_bytes, dry_run, machine_here
    from phalanx.cli.predicting.room import has_room
    from phalanx.observe import sink_problems

    raise_if(sink_problems(recipe.observe), ConfigError, subject="the recipe")
    raise_if(_file_problems(most_open_files()), ConfigError, subject="this machine")
    local = launched.local_world if launched else recipe.launch.ranks
    found = card_here() if card_gb is None and recipe.launch.device == "cuda" else None
    machine = replace(
        machine_here(recipe, local_ranks=local, available_bytes=available_bytes()),
        launched=launched is not None,
        card=found if card_gb is None else card_sold_as(card_gb),
    )
    world = launched.world if launched else wanted_ranks(recipe)
    dry_run(recipe, machine, world=world, console=Console(), fits=has_room)


LEAST_OPEN_FILES = 256
"""What a process with a few ranks opens: libraries, logs, and some sockets for each pair of ranks in each group."""
SOCKETS = 3
"""To each other rank: those of two groups of all ranks, and of smaller ones."""


def _file_problems(most: int, *, sockets: int = 0) -> list[Problem]:
    least = max(LEAST_OPEN_FILES, sockets)
    rule = f"must be {least} at least: ranks that cannot open sockets wait for each other for ever"
    hint = f"ulimit -n {max(4096, least)}"
    return [] if most >= least else [Problem(where="open files (ulimit -n)", value=most, rule=rule, hint=hint)]


def start(recipe: Recipe, environ: Mapping[str, str], *, force: bool = False) -> int:
    """Become one rank, or the parent of all local ranks. Raises `ConfigError` where their memory will not do, unless `force`."""
    from phalanx.cli.predicting.room import has_room, memory_problems
    from phalanx.runtime.checkpoint import import_now
    from phalanx.runtime.processes import WorldInfo, read_world, run_local, run_one, threads_per_rank
    from phalanx.train import train
    from phalanx.train.placement import Rebalancer

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    info = read_world(environ)
    sockets = 0 if force else SOCKETS * (wanted_ranks(recipe) if info is None else info.world)
    raise_if(_file_problems(most_open_files(), sockets=sockets), ConfigError, subject="this machine")
    if recipe.run.access == "group":
        os.umask(0o027)
    if recipe.launch.device == "cuda" and recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses to be deterministic without it
    body = partial(train, recipe, hook=Rebalancer)
    choice = choose_recovery(recipe, launched=info is not None, fits=has_room)
    if info is not None:
        return run_one(body, info, threads=threads_per_rank(info.local_world, recipe.launch.threads))
    if not force:
        raise_if(memory_problems(choice.recipe), ConfigError, subject="this machine")
    ranks = recipe.launch.ranks
    threads = threads_per_rank(ranks, recipe.launch.threads)
    if choice.is_elastic:
        from phalanx.train.recovery import train_elastic

        return train_elastic(choice.recipe, threads=threads, kept=recipe)
    if ranks > 1 and recipe.observe.is_for_people:
        print(f"elastic recovery: {choice.explain()}", flush=True)
    if ranks == 1:
        return run_one(body, WorldInfo(), threads=threads)
    import_now()  # once, and not by each rank with its first save
    again = "The same command continues from the newest checkpoint"
    return run_local(body, ranks=ranks, threads=threads, after_kill=again)
