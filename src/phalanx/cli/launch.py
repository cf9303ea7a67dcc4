"""phalanx launch local|torchrun|slurm|kubernetes RECIPE [--nodes N] [--gpus-per-node G] [--elastic | --fixed] [--trust] [--out FILE] [--section.key VALUE ...]

Checks the recipe for the ranks that this launch gives, writes the script that starts it there, says why each choice was made, and ends with the next command. It starts nothing.

  local        this machine
  torchrun     machines that you log in to, which stay the same for the whole run
  slurm        a job
  kubernetes   a Job, with the recipe in it

  --nodes N           machines, nodes or pods (default 2, local 1)
  --gpus-per-node G   a rank for each; 0: processors alone, with launch.ranks ranks on each node (default 8, or 0 where launch.device is cpu; local: as the recipe says)
  --elastic           ranks and nodes may die, come and go while training goes on; wants every expert on resilience.f nodes
  --fixed             any mapping, on ranks that stay the same; a failure ends the run, which resumes from its newest sound checkpoint
                      (default: elastic on processors where the mapping allows it, else fixed)
  --trust             as in `phalanx train`, and the script hands it on
  --out FILE          where to write it (default: the name of the template, in this folder)
  --section.key VALUE changes a setting, as in `phalanx train`
  --help              this text

The templates are files of `phalanx/launch/`, which work by hand, too.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from phalanx.core.arguments import print_usage, take_word
from phalanx.core.errors import ConfigError, Problem, nearest, printable, raise_if
from phalanx.core.files import check_writable, write_text

if TYPE_CHECKING:
    from phalanx.cli.launching import Asked, Launch


def main(args: list[str]) -> int:
    """Run `phalanx launch ARGS...`; returns the exit status."""
    if not args or "-h" in args or "--help" in args:
        print_usage(__doc__)
        return 0
    from phalanx.cli.launching import NAMES, choose, script_of

    asked, out = read_args(args)
    launch = choose(asked)
    path = out or Path(NAMES[launch.where, launch.elastic])
    script = script_of(launch)
    _write(path, script)
    print(printable(explain(launch, path)))
    return 0


def read_args(args: list[str]) -> tuple[Asked, Path | None]:
    """What is asked for, and where to write it. Raises `ConfigError` with all that is wrong."""
    from phalanx.cli.launching import WHERE, Asked, Where

    rest, problems = list(args), list[Problem]()
    numbers = {name: _take_number(rest, name, problems) for name in ("--nodes", "--gpus-per-node")}
    out = _take(rest, "--out", problems)
    ways = [word for word in ("--elastic", "--fixed") if word in rest]
    trust, rest = "--trust" in rest, [word for word in rest if word not in (*ways, "--trust")]
    if len(ways) == 2:
        problems.append(Problem(where="--elastic, --fixed", value=None, rule="say the opposite", hint="leave one out"))
    where = rest.pop(0) if rest and not rest[0].startswith("--") else ""
    path = rest.pop(0) if rest and not rest[0].startswith("--") else ""
    if where not in WHERE:
        problems.append(Problem(where="where", value=where, rule="is no way to launch", hint=nearest(where, WHERE)))
    if not path:
        problems.append(
            Problem(where="recipe", value=None, rule="is missing", hint="as in phalanx launch slurm recipes/tiny.toml")
        )
    raise_if(problems, ConfigError, subject="the arguments")
    asked = Asked(
        where=cast("Where", where), path=path, nodes=numbers["--nodes"], gpus=numbers["--gpus-per-node"],
        elastic=None if not ways else ways == ["--elastic"], trust=trust, settings=tuple(rest),
    )  # fmt: skip
    return asked, Path(out) if out else None


def _take(rest: list[str], name: str, problems: list[Problem]) -> str | None:
    """The value of an option, which is taken out of `rest`."""
    value = take_word(rest, name)
    if value == "":
        problems.append(Problem(where=name, value=None, rule="has no value", hint=f"as in {name} 2"))
    return value


def _take_number(rest: list[str], name: str, problems: list[Problem]) -> int | None:
    text = _take(rest, name, problems)
    if not text:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        problems.append(Problem(where=name, value=text, rule="must be a whole number", hint=f"as in {name} 2"))
        return None
    return int(text)


def _write(path: Path, script: str) -> None:
    """Writes the script. A file of that name that says something else is left alone: somebody may have edited it."""
    check_writable(path)
    if path.exists() and path.stat().st_size and path.read_text("utf-8", errors="replace") != script:
        rule, hint = (
            "is there already, and another script",
            f"remove it, or name another one: --out {shlex.quote(f'{path.stem}-2{path.suffix}')}",
        )
        raise ConfigError.of("--out", str(path), rule, hint, subject="the arguments")
    write_text(path, script)


def explain(launch: Launch, path: Path) -> str:
    """What was chosen and why, and the next command."""
    from phalanx.cli.launching import cpus_of

    world, each = launch.nodes * launch.ranks, "" if launch.where == "local" else " on each node"
    nodes = "this machine" if launch.where == "local" else f"{launch.nodes} {'node' if launch.nodes == 1 else 'nodes'}"
    lines = {
        "ranks": f"{world}: {launch.ranks} on {nodes if launch.nodes == 1 else f'each of {nodes}'}",
        "devices": f"{launch.gpus} GPUs{each}, a rank for each"
        if launch.gpus
        else f"launch.device = {launch.device}, no GPUs are asked for",
        "recovery": f"{'elastic' if launch.elastic else 'fixed'}: {launch.why}",
    }
    if launch.where in ("slurm", "kubernetes"):
        lines["processors"] = f"{cpus_of(launch)}{each}; edit the script for other sizes, a partition, memory"
    lines |= _explain_cluster(launch, world) | _explain_place(launch)
    width = max(map(len, lines))
    text = [
        f"{path}: {launch.recipe.run.name} on {nodes}",
        *(f"  {name:<{width}}  {said}" for name, said in lines.items()),
    ]
    return "\n".join([*text, f"next: {_next(launch, path)}"])


def _explain_cluster(launch: Launch, world: int) -> dict[str, str]:
    """Where the recipe was made for more or fewer GPUs: how to ask whether it fits these."""
    from phalanx.cli.predicting.packaged import read_predicted
    from phalanx.core.recipe import recipe_file

    predicted = read_predicted(recipe_file(Path(launch.path)).read_text(encoding="utf-8")) if launch.gpus else None
    if predicted is None:
        return {}
    kind, _, size = predicted.cluster.rpartition("x")
    if size == str(world):
        return {}
    return {
        "memory": f"the recipe is for {kind}x{size}; phalanx train {shlex.quote(launch.path)} --dry-run --cluster {kind}x{world} says whether it fits"
    }


def _explain_place(launch: Launch) -> dict[str, str]:
    from phalanx.cli.launching import job_name

    again = "resumes from the newest sound checkpoint; damaged ones are kept in checkpoints/abandoned"
    python = f"{sys.executable} (PYTHON=...), which all nodes must see, and one folder for runs and texts"
    if launch.where == "local":
        return {"restart": f"the same command {again}"}
    if launch.where == "torchrun":
        return {
            "environment": python,
            "ports": "29500 of the first machine (PORT=...)",
            "restart": f"the same command {again}",
        }
    if launch.where == "slurm":
        port = "20000 + the job's number mod 10000, on the first node (PORT=...)"
        grow = "; JOIN=JOBID sbatch brings more nodes" if launch.elastic else ""
        return {
            "environment": python,
            "port": port,
            "restart": f"a job that is preempted or requeued saves first and {again}{grow}",
        }
    ports = f"{29400 if launch.elastic else 29500} of pod 0, open to the pods of this run alone"
    return {
        "job": f"kubectl logs -f job/{job_name(launch.recipe.run.name)}",
        "image": "phalanx:latest (Dockerfile in phalanx/launch)",
        "ports": ports,
        "restart": f"a pod that fails starts again; the run {again}",
    }


def _next(launch: Launch, path: Path) -> str:
    name = shlex.quote(str(path))
    if launch.where == "slurm":
        return f"sbatch {name}"
    if launch.where == "torchrun":
        return f"NODE=0 HEAD=ADDRESS bash {name}   (on the machine of that address; NODE=1 ... on the others)"
    if launch.where == "kubernetes":
        secret = "kubectl create secret generic phalanx-credentials --from-file=run.pem"
        return f"phalanx service --new-credentials run.pem && {secret} && kubectl apply -f {name}"
    return f"bash {name}"
