"""An elastic run, on one host: a supervisor, which prepares everything, and workers, which are forked with it.

    parent    run folder and its lock ─ text ─ model and mapping ─ `Supervisor.run`: forks workers, also in the place of those that died
    worker    sinks ─ worker agent ─ `run_member` with a `ElasticMember` ─ the last words

With `resilience.service` several hosts do so for one run, in one folder that all can write (`train/recovery/run_hosts.py`): each has a supervisor and meets the others
at the service. The hosts prepare one after the other, so that one does the work and the others find it done.

Must never change: the parent runs no tensor operation and has no thread when it forks; whatever is wrong with recipe, text or mapping is an error before it does.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, raise_if
from phalanx.core.events import Emit, Event, Note
from phalanx.core.recipe import dump_recipe
from phalanx.core.service_address import parse_service
from phalanx.data import PreparedData, prepare
from phalanx.observe import JsonlSink, PreparationProgress, Sinks, open_sinks, wants_live
from phalanx.plan import resolve_shape
from phalanx.plan.mapping import Folding
from phalanx.plan.recovery import per_host, recovery_planner, recovery_problems, wanted_ranks
from phalanx.runtime.checkpoint import import_now
from phalanx.runtime.comm import DeviceThread
from phalanx.runtime.membership import (
    AgentSettings,
    Supervisor,
    SupervisorSettings,
    WorkerAgent,
    expect_service,
    run_at,
    run_member,
    service_at,
    start_network_store,
)
from phalanx.runtime.processes import (
    ANSWER_STOP,
    STOPPING,
    WorldInfo,
    keep_freed_memory,
    leave_errors_to_run,
    own_device,
    use_interface_to,
)
from phalanx.train import RunEnd, recipe_to_keep, start_candidates, trained_text
from phalanx.train.recovery.drained_slots import DRAINED_SLOTS_FILE, DrainedSlotsFile
from phalanx.train.recovery.elastic import ElasticMember, ElasticRun
from phalanx.train.recovery.run_hosts import RunHosts
from phalanx.train.recovery.watch import Watch, WatchedSinks
from phalanx.train.setup import RunFolder, RunLock, be_deterministic, resolve_pipeline, tell_uncompiled, versions

GATHER_S = 5.0
"""How long the first generation waits for ranks that are not heard of; a run on several hosts begins without those that take longer."""
LOCAL_GATHER_S = 60.0
"""Seconds for which, on one host, whose supervisor knows who is dead, a rank that takes long to start is waited for, so that all
runs of a recipe begin alike."""


def train_elastic(recipe: Recipe, *, threads: int, watch: Watch | None = None, kept: Recipe | None = None) -> int:
    """Train on `launch.ranks` ranks of this host until all steps of the run are done, whoever dies; returns the exit code.

    `kept`: what the run folder keeps in the place of
    `recipe`, where that was completed for this start. Raises `PhalanxError` for whatever a person can act on.
    """
    folder = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    folder.create(shared=recipe.run.access == "group")
    host = recipe.launch.host or socket.gethostname().split(".")[0]
    if recipe.resilience.service is None:
        lock: RunLock | RunHosts = folder.lock()  # inherited by the workers: it is free when the last of them has ended
    else:
        lock = RunHosts(folder, host=host, service=recipe.resilience.service)
    try:
        if isinstance(lock, RunHosts):
            run, first, joins = _prepare_with_others(recipe, folder, lock, kept=kept)
        else:
            run, first, joins, host = prepare_run(recipe, folder, kept=kept), 0, False, "local"
        main = partial(work, run, threads=threads, first=first, watch=watch)
        screen = 0 if first == 0 and wants_live(recipe.observe, Console()) else None
        return _supervisor(run, host, main, joins=joins, tell=_host_log(run, host, watch), screen=screen).run()
    finally:
        lock.close()


def _prepare_with_others(
    recipe: Recipe, folder: RunFolder, lock: RunHosts, *, kept: Recipe | None
) -> tuple[ElasticRun, int, bool]:
    """`prepare_run` of a host of several, with the number of ranks that its run began with; the first place of its logs; whether the run is under way. Waits for the service, where others keep
    it; while it is not there the text is prepared."""
    begun = as_begun(recipe)
    with lock.preparing():
        run, first = prepare_run(begun[0], folder, kept=kept, joins=begun[1]), lock.first_place(recipe.launch.ranks)
    where = recipe.resilience.service or ""
    address = parse_service(where)
    if address is None or recipe.launch.keep_service:
        return run, first, begun[1]
    expect_service(service_at(address), where, wait_s=recipe.resilience.wait_s, tell=print)
    again = as_begun(recipe)
    if again != begun:
        with lock.preparing():
            run = prepare_run(again[0], folder, kept=kept, joins=again[1])
    return run, first, again[1]


def _host_log(run: ElasticRun, host: str, watch: Watch | None) -> Emit:
    """What this host's supervisor does, in a log of its own. A disk that fails costs lines of it and nothing else."""
    log: JsonlSink | None = None
    with contextlib.suppress(OSError):
        log = JsonlSink(run.folder.path, host=host)

    def tell(event: Event, /) -> None:
        if log is not None:
            with contextlib.suppress(OSError):
                log.write(event)
        if watch is not None:
            watch.host(event)

    return tell


def _supervisor(
    run: ElasticRun, host: str, main: Callable[[WorkerAgent], int], *, joins: bool, tell: Emit, screen: int | None
) -> Supervisor:
    """This host's, and with it the service where this host keeps it."""
    recipe = run.recipe
    address = None if recipe.resilience.service is None else parse_service(recipe.resilience.service)
    settings = supervisor_settings(recipe, host, own_machine=address is None or address.is_here)
    name = DRAINED_SLOTS_FILE if address is None else f"{DRAINED_SLOTS_FILE}-{host}"
    settings = replace(
        settings,
        minimum=max(settings.minimum, run.planner.least()),
        drained_slots=DrainedSlotsFile(run.folder.path / name),
        screen_slot=screen,
    )
    if address is None:
        import_now()
        here = settings.wanted - len(settings.drained_slots() & set(range(settings.slots)))
        settings = replace(settings, wanted=max(1, here))
        return Supervisor(main, settings, tell=tell)
    if recipe.launch.keep_service:
        if not address.is_here:
            use_interface_to(address.host)
        import_now()
        store = start_network_store(address.host, address.port)
        run_at(store.address, wanted=wanted_ranks(recipe))  # what the others ask for
        return Supervisor(main, settings, service=store, tell=tell)
    if not joins:
        import_now()  # once for all ranks of this host; where a run is under way they take part first (`ElasticMember`)
    if not address.is_here:
        use_interface_to(address.host)
    return Supervisor(main, settings, service=service_at(address), tell=tell)


def supervisor_settings(recipe: Recipe, host: str, *, own_machine: bool) -> SupervisorSettings:
    """How a host takes part, as the recipe says it."""
    r, timeout_s = recipe.resilience, recipe.launch.timeout_s
    return SupervisorSettings(
        host=host,
        slots=recipe.launch.ranks,
        wanted=wanted_ranks(recipe),
        alone=r.service is None,
        minimum=r.minimum,
        limit_s=r.limit_s,
        hang_s=r.hang_s,
        f=r.f,
        gather_s=max(r.limit_s, LOCAL_GATHER_S if r.service is None else GATHER_S),
        wait_s=r.wait_s,
        rest_s=r.straggler_rest_s,
        agent=AgentSettings(
            timeout_s=timeout_s,
            device=recipe.launch.device_type,
            own_machine=own_machine,
            probe_peers=r.service is not None,
        ),
    )


def prepare_run(recipe: Recipe, folder: RunFolder, *, kept: Recipe | None = None, joins: bool = False) -> ElasticRun:
    """Text, model and mapping. `joins`: the run is under way on other hosts, so checkpoints are its own.

    Raises `PhalanxError` with all that is wrong.
    """
    if not recipe.checkpoint.resume and not joins:
        folder.refuse_mixing()
    prepared = _prepare_text(recipe, folder)
    spec, folding = resolve_shape(recipe, world=wanted_ranks(recipe), tokenizer_vocab=prepared.tokenizer.vocab_size)
    assert isinstance(
        folding, Folding
    )  # the rules refuse stages of their own with a mode, and elastic recovery without one
    resolve_pipeline(recipe, spec, folding)  # or what is wrong with it
    planner, alone = recovery_planner(recipe, spec, folding), recipe.resilience.service is None
    problems = recovery_problems(
        folding, f=planner.floor, per_host=per_host(recipe), replicated=planner.slots_per_rank is not None
    )
    problems += planner.room_problems()
    raise_if(problems, ConfigError, subject="the recipe")
    again = recipe_to_keep(recipe if kept is None else kept)
    kept = None if joins else again
    if not folder.has_recipe:
        folder.write_recipe(again, prepared.tokenizer, prepared.template)
        kept = None if alone else kept
    return ElasticRun(recipe=recipe, folder=folder, prepared=prepared, spec=spec, planner=planner, kept=kept)


def _prepare_text(recipe: Recipe, folder: RunFolder) -> PreparedData:
    there = folder.checkpoints
    starts = start_candidates(recipe, there) if recipe.checkpoint.resume else there.candidates()[:1]
    known = trained_text(folder, starts)
    console = Console() if recipe.observe.is_for_people else None
    live = console is not None and wants_live(recipe.observe, console)
    with PreparationProgress(console, live=live) as bar:
        return prepare(recipe.data, progress=bar, resume=known)


def work(run: ElasticRun, agent: WorkerAgent, *, threads: int, first: int = 0, watch: Watch | None = None) -> int:
    """One worker, in its own process; returns its exit code. Its log has the number `first` + slot; number 0 is the one that a person watches, as long as its host is there."""
    recipe = run.recipe
    torch.set_num_threads(threads)
    on_cpu = recipe.launch.device != "cuda"
    keep_freed_memory(threads=threads if on_cpu else 1)
    be_deterministic(recipe.train.deterministic)
    slot = int(agent.uid.split(".")[1])
    ranks = recipe.launch.ranks
    device = own_device(
        WorldInfo(rank=slot, world=ranks, local_rank=slot, local_world=ranks), recipe.launch.device_type
    )
    if not on_cpu:
        leave_errors_to_run()
    number, body, joins = first + slot, None, agent.under_way()
    with (
        open_sinks(recipe.observe, folder=run.folder.path, rank=number, patient=joins) as sinks,
        RunEnd(sinks, lambda: body.step if body is not None else 0) as end,
        contextlib.nullcontext() if on_cpu else DeviceThread() as thread,
    ):
        if number == 0:
            threading.Thread(target=_answer_stop, args=(sinks,), daemon=True).start()
        body = _body(run, sinks, agent, slot=slot, watch=watch, joins=joins, device=device)
        if number == 0 and not joins:
            tell_uncompiled(recipe, device, emit=sinks)
        if joins:  # when a run begins, all are cold together
            warm = partial(_warm_up, body, sinks)
            warm() if thread is None else thread.run(warm)  # plans that it makes are the thread's
        agent.announce(plan_hash=_plan_hash(run), version=versions()["phalanx"])
        why = run_member(agent, body, tell=body.tell, order=body.order, thread=thread)
        end.reason, is_watched = {"stopped": "interrupted"}.get(why, why), sinks.is_watched
    if is_watched and recipe.observe.is_for_people and body.outcome is not None:
        end.summarize(run.folder.path, body.outcome)
    return 0


def _answer_stop(sinks: Sinks) -> None:
    """Tell that the run stops, where its picture is drawn."""
    signal.sigwait({ANSWER_STOP})
    sinks(Note(level="info", text=STOPPING))


def _warm_up(body: ElasticMember, sinks: Sinks) -> None:
    """Warm code is worth no member: one that cannot warm up joins cold."""
    try:
        body.warm_up()
    except Exception as err:
        text = f"Warm-up step failed; this worker's first step will be slow: {type(err).__name__}: {err}"
        sinks(Note(level="warning", text=text))
    gc.collect()
    gc.freeze()  # what it has imported and compiled stays: each generation collects what the last one left (`GroupEpoch.drop`), and need not look through all of that


def _body(
    run: ElasticRun,
    sinks: Sinks,
    agent: WorkerAgent,
    *,
    slot: int,
    watch: Watch | None,
    joins: bool,
    device: torch.device,
) -> ElasticMember:
    if watch is None:
        return ElasticMember(run, sinks, progress=agent.progress, joins=joins, device=device)
    member = watch.member(slot)
    return ElasticMember(
        run, WatchedSinks(sinks, member), watch=member, progress=agent.progress, joins=joins, device=device
    )


def as_begun(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe of a host of several, with the number of ranks that its run began with (the first host decides), and whether that run is under way.

    A service that does not answer yet, as one that this host is to keep, has served none.
    """
    address = None if recipe.resilience.service is None else parse_service(recipe.resilience.service)
    if address is None or recipe.launch.keep_service:
        return recipe, False
    wanted, under_way = run_at(service_at(address), wanted=wanted_ranks(recipe))
    return replace(recipe, resilience=replace(recipe.resilience, wanted=wanted)), under_way


def _plan_hash(run: ElasticRun) -> str:
    """What all members of one run have alike, whatever host they are on and when it came: where to begin is asked once."""
    recipe = recipe_to_keep(run.recipe)
    recipe = replace(
        recipe,
        checkpoint=replace(recipe.checkpoint, resume=True),
        resilience=replace(recipe.resilience, wanted=wanted_ranks(recipe)),
    )
    text = f"{dump_recipe(recipe)}\n{run.spec.hash}\n{run.prepared.fingerprint}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
