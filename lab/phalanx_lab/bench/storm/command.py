"""A storm over the real trainer: `phalanx bench storm --faults 20 --seed 0 --json F`.

Hosts train a tiny model together and heal themselves, while faults come one after another, each at a phase of a step: kill -9 of a rank, of a host, of two of them at
once, of the membership service; a freeze and a thaw; a notice to leave, and two at once; and on the testbed a link that is cut or slow, and two hosts that do not reach each other. Everyone comes
back. Then

    every run ends, no process is left, no fault is followed by a standstill
    every sample of every step was taken exactly once, by the logs of all members together
    losses, norms and weights are those of an undisturbed run, bit for bit in exact mode

Locally a host is a supervisor with its ranks, a process group of this machine. With --testbed hosts have machines, addresses and links of their own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx_lab.bench.cluster import kept_or_temporary, write_text
from phalanx_lab.bench.storm.chaos_cluster import ChaosCluster
from phalanx_lab.bench.storm.run import LINK_KINDS, LOCAL_KINDS, StormPlan, StormResult, report, storm
from phalanx_lab.bench.storm.trainer import StormSetup, TrainerChaosCluster, recipe_of


@dataclass(frozen=True, kw_only=True)
class StormArgs:
    """A storm of faults over an elastic run."""

    faults: int = 20
    """How many (where one needs a joiner, the kill that makes room for it counts too)."""
    seed: int = 0
    mode: Literal["exact", "fast"] = "exact"
    testbed: bool = False
    """Hosts with links of their own (needs Linux, and namespaces that this user may make)."""
    hosts: int | None = None
    """Default 4, on the testbed 5."""
    slots: int | None = None
    """Ranks of a host; default 1, on the testbed 2."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults, in turn; default all that can be done here."""
    limit_s: float | None = None
    """Limit of heartbeats in seconds; default 1, on the testbed 2."""
    between_s: float = 0.5
    """Time between faults, about."""
    etcd: Annotated[Path | None, tyro.conf.arg(metavar="PROGRAM")] = None
    """Local hosts meet at an etcd, which this program starts (`sh scripts/etcd.sh` prints a path). Default: a TCPStore."""
    folder: Path | None = None
    """Where to run (kept afterwards). Default: a temporary folder."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench storm ARGS...`; exit status 0 if everything held."""
    options = read_words(StormArgs, args, prog="phalanx bench storm", description=__doc__)
    check_writable(options.json)
    with kept_or_temporary(options.folder, prefix="phalanx-storm-") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        result = run_storm(options, folder.absolute())
    print(report(result))
    write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def run_storm(options: StormArgs, folder: Path) -> StormResult:
    """The whole experiment in `folder`."""
    possible = (*LOCAL_KINDS, *LINK_KINDS) if options.testbed else LOCAL_KINDS
    kinds = options.kinds or possible
    wrong = [k for k in kinds if k not in possible]
    rule = f"is no kind of fault {'of the testbed' if options.testbed else 'of local hosts'}; there are {', '.join(possible)}"
    raise_if([Problem(where="kinds", value=k, rule=rule) for k in wrong], ConfigError, subject="phalanx bench storm")
    if options.etcd is not None:
        program = options.etcd.is_file() and not options.testbed
        rule = "must be a program, and goes with local hosts only"
        found = [] if program else [Problem(where="etcd", value=str(options.etcd), rule=rule)]
        raise_if(found, ConfigError, subject="phalanx bench storm")
    hosts = options.hosts or (5 if options.testbed else 4)
    slots = options.slots or (2 if options.testbed else 1)
    limit_s = options.limit_s or (2.0 if options.testbed else 1.0)
    setup = StormSetup(mode=options.mode, hosts=hosts, slots=slots, limit_s=limit_s, service="127.0.0.1:1")
    recipe_of(setup, folder)  # what is wrong with it is said before anything is started
    write_text(folder / "text")
    cluster = _chaos_cluster(options, setup, folder)
    plan = StormPlan(faults=options.faults, seed=options.seed, kinds=kinds, between_s=options.between_s)
    result = storm(cluster, cluster.setup, plan, folder, tell=lambda text: print(text, flush=True))  # type: ignore[attr-defined]
    result.where = "the testbed" if options.testbed else "local hosts" + (" with etcd" if options.etcd else "")
    result.not_here = () if options.testbed else LINK_KINDS
    return result


def _chaos_cluster(options: StormArgs, setup: StormSetup, folder: Path) -> ChaosCluster:
    if options.etcd is not None:
        from phalanx_lab.bench.storm.etcd import EtcdChaosCluster

        return EtcdChaosCluster(setup, folder, program=options.etcd)
    if options.testbed:
        from phalanx_lab.bench.storm.on_testbed import TestbedChaosCluster

        return TestbedChaosCluster(setup, folder)
    return TrainerChaosCluster(replace(setup, service=""), folder)
