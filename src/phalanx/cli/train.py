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
import json
import math
import os
import shlex
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from phalanx.cli.settings import settings_text
from phalanx.core.arguments import help_width, print_usage
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, PhalanxError, Problem, printable, raise_if
from phalanx.core.process import most_open_files
from phalanx.core.recipe import AutoDevice, AutoDtype, Device, Dtype, load_recipe, native_dtype
from phalanx.core.rules import value_of
from phalanx.core.service_address import is_loopback
from phalanx.core.settings import describe_settings
from phalanx.plan import choose_recovery, default_lr, run_problems
from phalanx.plan.model import resolve_model
from phalanx.plan.recovery import wanted_ranks

if TYPE_CHECKING:
    from phalanx.runtime.processes import WorldInfo


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    recipe_path: str | None
    overrides: tuple[str, ...]
    dry_run: bool
    card_gb: float | None = None
    """Memory of a GPU in GB, for a dry run where there is none."""
    cluster: str | None = None
    """Where a dry run is predicted, as `phalanx search --cluster` names it."""
    trust: bool = False
    """The recipe file may say what else only the command line may (`_trust_problems`)."""
    force: bool = False
    """Memory is not asked about."""


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
    from phalanx.runtime.processes import read_world

    launched = read_world()
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
    path = Path(recipe.run.folder) / recipe.run.name / "recipe.toml"
    try:
        return load_recipe(path, tell=lambda line: None) if path.is_file() else None
    except PhalanxError:
        return None  # the run folder's own reader will say so


OF_A_START = ("launch.device", "launch.host", "launch.rack", "launch.keep_service", "checkpoint.step")
"""Settings of one start, which the run folder does not keep."""


def changed_settings(recipe: Recipe) -> list[str]:
    """A line for each setting that is not as it was when the run was started last."""
    kept = _kept_recipe(recipe)
    if kept is None:
        return []
    both = [(s.name, value_of(recipe, s.name), value_of(kept, s.name)) for s in describe_settings()]
    return [
        f"changed since the run was started last: {name} = {_word(now)} (was {_word(before)})"
        for name, now, before in both
        if now != before and name not in OF_A_START
    ]


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


def read_args(args: Sequence[str]) -> Request:
    """A recipe first, if any; then overrides. Raises `ConfigError` for anything else."""
    rest = [a for a in args if a not in ("--dry-run", "--trust", "--force")]
    is_dry = "--dry-run" in args
    card_gb = _take_card(rest, is_dry=is_dry)
    cluster = take_word(rest, "--cluster")
    if cluster is not None and (not is_dry or card_gb is not None):
        rule = "has its own cards: --card-gb has no effect" if is_dry else "goes with --dry-run alone"
        hint = "leave one of them out" if is_dry else "add --dry-run"
        raise ConfigError([Problem(where="--cluster", value=cluster, rule=rule, hint=hint)], subject="the arguments")
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    flags = {"dry_run": is_dry, "trust": "--trust" in args, "force": "--force" in args}
    return Request(recipe_path=path, overrides=tuple(rest), card_gb=card_gb, cluster=cluster, **flags)


def _take_card(rest: list[str], *, is_dry: bool) -> float | None:
    """The number that follows `--card-gb`, if that is among the arguments; both are taken out of them."""
    text = take_word(rest, "--card-gb")
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    rule = "must be the memory of a GPU in GB" if is_dry else "goes with --dry-run alone"
    if not is_dry or not 1 <= number <= 10_000:
        raise ConfigError(
            [Problem(where="--card-gb", value=text, rule=rule, hint="use 80" if is_dry else "add --dry-run")],
            subject="the arguments",
        )
    return number


def take_word(rest: list[str], name: str) -> str | None:
    """What follows an argument, "" where nothing does, None where it is not there; both are taken out. Of several the last one counts, as it does of settings."""
    found = None
    while (
        at := next((i for i, word in enumerate(rest) if word == name or word.startswith(f"{name}=")), None)
    ) is not None:
        word = rest.pop(at)
        found = word.split("=", 1)[1] if "=" in word else rest.pop(at) if at < len(rest) else ""
    return found


def read_recipe(
    request: Request,
    *,
    world: int | None,
    several_machines: bool = False,
    auto_device: AutoDevice | None = None,
    auto_dtype: AutoDtype | None = None,
) -> Recipe:
    """The recipe, checked with its model on `world` ranks (None: launch.ranks). Raises `ConfigError` with every problem.

    `auto_device` and `auto_dtype` say what `launch.device = "auto"` and `train.dtype = "auto"` are; None asks this machine and its run. The run folder keeps what it was: its recipe gives the same run again. The file that the user wrote still says
    "auto", so that the same command goes on with what another machine has.
    """

    def run_dtype(recipe: Recipe) -> Dtype:
        """That of the run, where it has begun: it may go on on another machine."""
        from phalanx.train.setup import RECIPE_FILE

        kept = Path(recipe.run.folder) / recipe.run.name / RECIPE_FILE
        if kept.is_file():
            return cast("Dtype", load_recipe(kept).train.dtype)
        return "bfloat16" if several_machines else native_dtype(recipe)

    def check(recipe: Recipe) -> list[Problem]:
        return run_problems(recipe, world=world or wanted_ranks(recipe))

    recipe = load_recipe(
        request.recipe_path, request.overrides, check=check, auto_dtype=auto_dtype or run_dtype,
        auto_device=auto_device or _device_here,
    )  # fmt: skip
    raise_if(_launch_problems(request, recipe, world), ConfigError, subject="the recipe")
    raise_if(_trust_problems(request, recipe), ConfigError, subject="the recipe")
    return recipe if world is None else replace(recipe, launch=replace(recipe.launch, ranks=world))


def _device_here(recipe: Recipe) -> Device:
    """By the GPUs of this machine and the ranks that start on it."""
    from phalanx.runtime.processes import device_here, read_world

    launched = read_world()
    return device_here(launched.local_world if launched else recipe.launch.ranks)


def _trust_problems(request: Request, recipe: Recipe) -> list[Problem]:
    """A recipe file comes from anywhere: where it writes, whose run it joins, and who is told of it, is for the command line to say."""
    if request.recipe_path is None or request.trust:
        return []
    given = {word.split("=")[0].removeprefix("--") for word in request.overrides if word.startswith("--")}
    run, observe = recipe.run, recipe.observe
    home = Path(run.folder) / run.name
    its_own = Path(request.recipe_path).resolve().parent == home.resolve()  # kept by its run
    named, place = (
        ("run.name", run.name) if _is_below(run.folder) else ("run.folder", run.folder)
    )  # a name may be a link
    listens = observe.prometheus_port is not None and not is_loopback(observe.prometheus_address or "localhost")
    sends = observe.wandb_project is not None and observe.wandb_mode != "offline"
    writes, joins = "writes outside of the present folder", "joins or keeps a run of several hosts"
    found = []
    for name, value, wrong, does in (
        (named, place, not its_own and not _is_below(str(home)), writes),
        ("data.cache", recipe.data.cache, not _is_below(recipe.data.cache), writes),
        ("resilience.service", recipe.resilience.service, recipe.resilience.service is not None, joins),
        ("launch.keep_service", recipe.launch.keep_service, recipe.launch.keep_service, joins),
        ("observe.prometheus_address", observe.prometheus_address, listens, "listens to other machines"),
        ("observe.wandb_project", observe.wandb_project, sends, "sends this run to Weights & Biases"),
        ("observe.sinks", observe.sinks, observe.sinks is not None, "gives this run to programs of other packages"),
    ):
        if wrong and name not in given:
            rule = f"{does}, which a recipe file alone may not decide"
            word = shlex.quote(json.dumps(value) if isinstance(value, tuple) else f"{value}")
            hint = f"repeat it on the command line (--{name} {word}), or add --trust if the file is your own"
            found.append(Problem(where=name, value=value, rule=rule, hint=hint))
    return found


def _is_below(folder: str) -> bool:
    """Whether a path of a recipe stays below the present folder."""
    return Path(folder).resolve().is_relative_to(Path.cwd().resolve())


def _launch_problems(request: Request, recipe: Recipe, world: int | None) -> list[Problem]:
    """A number of ranks on the command line has no effect under a launcher. (One in a recipe is that recipe's default.)"""
    if world is not None and recipe.resilience.heal and request.cluster is None:
        rule = "has no effect: the launcher starts and ends the ranks, not this program"
        return [
            Problem(
                where="resilience.heal",
                value=True,
                rule=rule,
                hint="leave it out, or start one `phalanx train` on each host, without a launcher, with resilience.service",
            )
        ]
    asked = any(a.split("=")[0] == "--launch.ranks" for a in request.overrides)
    if world is None or not asked or recipe.launch.ranks == world:
        return []
    rule = f"has no effect: {f'{request.cluster} has' if request.cluster else 'the launcher started'} {world} ranks"
    return [Problem(where="--launch.ranks", value=recipe.launch.ranks, rule=rule, hint="leave it out")]


LEAST_OPEN_FILES = 256
"""What a process with a few ranks opens: libraries, logs, and some sockets for each pair of ranks in each group."""


def _file_problems(most: int) -> list[Problem]:
    rule, hint = (
        f"must be {LEAST_OPEN_FILES} at least: ranks that cannot open sockets wait for each other for ever",
        "ulimit -n 4096",
    )
    return (
        [] if most >= LEAST_OPEN_FILES else [Problem(where="open files (ulimit -n)", value=most, rule=rule, hint=hint)]
    )


def start(recipe: Recipe, environ: Mapping[str, str], *, force: bool = False) -> int:
    """Become one rank, or the parent of all local ranks. Raises `ConfigError` where their memory will not do, unless `force`."""
    from phalanx.cli.predicting.room import has_room, memory_problems
    from phalanx.runtime.checkpoint import import_now
    from phalanx.runtime.processes import WorldInfo, read_world, run_local, run_one, threads_per_rank
    from phalanx.train import train
    from phalanx.train.placement import Rebalancer

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    raise_if(_file_problems(most_open_files()), ConfigError, subject="this machine")
    if recipe.run.access == "group":
        os.umask(0o027)
    if recipe.launch.device == "cuda" and recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses to be deterministic without it
    body = partial(train, recipe, hook=Rebalancer)
    info = read_world(environ)
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
    return run_local(body, ranks=ranks, threads=threads)
