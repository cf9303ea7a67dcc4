"""The scripts of `phalanx launch`: a template of `phalanx/launch/`, which works by hand too, with some of its lines filled in.

Decides which lines those are. Must never change: a value is quoted for the shell, and a template without a line that is to be filled is an error, not a script that ignores it.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from phalanx.cli.launching.choice import Launch
from phalanx.core.recipe import recipe_file

TEMPLATES = Path(__file__).parents[2] / "launch"
NAMES = {
    ("local", True): "local.sh",
    ("local", False): "local.sh",
    ("torchrun", False): "torchrun.sh",
    ("slurm", True): "slurm.sh",
    ("slurm", False): "slurm-torchrun.sh",
    ("kubernetes", True): "kubernetes.yaml",
    ("kubernetes", False): "kubernetes.yaml",
}
"""(where, whether it is elastic) -> template."""
_COMMENT = re.compile(r"\s+#( |$)")


def script_of(launch: Launch) -> str:
    """The filled template."""
    text = (TEMPLATES / NAMES[launch.where, launch.elastic]).read_text()
    if launch.where == "kubernetes":
        recipe = recipe_file(Path(launch.path)).read_text(encoding="utf-8")
        return with_recipe(_named(fill(text, _kubernetes(launch)), job_name(launch.recipe.run.name)), recipe)
    return fill(text, _shell(launch))


def fill(text: str, lines: Mapping[str, str]) -> str:
    """`text` with every line that begins with a key (after its indentation) replaced by the value; the comment behind it stays. Raises `ValueError` for a key that no line begins with."""
    found, missing = [], set(lines)
    for line in text.splitlines():
        body = line.lstrip()
        key = next((k for k in lines if body.startswith(k)), None)
        if key is None:
            found.append(line)
            continue
        missing.discard(key)
        comment = _COMMENT.search(body, len(key)) if not body.startswith("#") else None
        found.append(line[: len(line) - len(body)] + lines[key] + (body[comment.start() :] if comment else ""))
    if missing:
        raise ValueError(f"the template has no line that begins with {sorted(missing)}")
    return "\n".join(found) + "\n"


def job_name(run: str) -> str:
    """Of a run's Job, and of what belongs to it: else a second run would change the recipe of the first one. A run's name that is no name of an object has a hash behind it, so that no two runs share one."""
    plain = re.sub("[^a-z0-9]+", "-", run.lower())[:40].strip("-")
    words = ["phalanx", plain, "" if plain == run else hashlib.sha256(run.encode()).hexdigest()[:6]]
    return "-".join(word for word in words if word)


def _named(text: str, name: str) -> str:
    """The template's objects under the name of a run. The volume and the credentials are of all runs."""
    places = {
        "name: phalanx\n": f"name: {name}\n",  # job-name, too
        "name: phalanx-recipe\n": f"name: {name}-recipe\n",
        "app: phalanx\n": f"app: {name}\n",
        "subdomain: phalanx\n": f"subdomain: {name}\n",
        "phalanx-0.phalanx": f"{name}-0.{name}",
        "phalanx-1.phalanx": f"{name}-1.{name}",
        "patch job phalanx ": f"patch job {name} ",
    }
    for old, new in places.items():
        if old not in text:
            raise ValueError(f"the template has no {old!r}")
        text = text.replace(old, new)
    return text


def with_recipe(text: str, recipe: str) -> str:
    """`text` with `recipe` as the block of `recipe.toml`."""
    head, mark, rest = text.partition("  recipe.toml: |2\n")
    _, end, rest = rest.partition("---\n")
    if not mark or not end:
        raise ValueError("the template has no block recipe.toml")
    block = "".join(f"    {line}\n" if line else "\n" for line in recipe.split("\n"))
    return head + mark + block + end + rest


def cpus_of(launch: Launch) -> int:
    """Processors to ask for on each node: the ranks' threads, or 8 for each GPU."""
    each = launch.recipe.launch.threads or (8 if launch.gpus else 1)
    return max(1, math.ceil(launch.ranks * each))


def memory_of(launch: Launch) -> int | None:
    """GiB to ask for on each node, never fewer than the template's; None where that cannot be told here."""
    from phalanx.cli.predicting.room import host_bytes  # with what predicts, which other commands do without

    found = host_bytes(launch.recipe, local_ranks=launch.ranks, world=launch.nodes * launch.ranks)
    return None if found is None else max(8, math.ceil(found / 2**30))


def _shell(launch: Launch) -> dict[str, str]:
    lines = {
        "RECIPE=recipe": f"RECIPE={shlex.quote(launch.path)}",
        "PYTHON=": f"PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}",
        "DEVICE=": f"DEVICE=${{DEVICE:-{launch.device}}}",
        "RANKS=": f"RANKS=${{RANKS:-{launch.ranks}}}",
        "SETTINGS=": f"SETTINGS=({shlex.join([*launch.settings, *(['--trust'] if launch.trust else [])])})",
    }
    if launch.where == "torchrun":
        lines["NODES="] = f"NODES=${{NODES:-{launch.nodes}}}"
    if launch.where == "slurm":
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", launch.recipe.run.name)
        lines |= {
            "#SBATCH --job-name=": f"#SBATCH --job-name={name}",
            "#SBATCH --nodes=": f"#SBATCH --nodes={launch.nodes}",
            "#SBATCH --cpus-per-task=": f"#SBATCH --cpus-per-task={cpus_of(launch)}",
        }
        if launch.elastic:
            lines["MODE="] = f"MODE=${{MODE:-{launch.mode}}}"
        if launch.gpus:
            lines["##SBATCH --gpus-per-node="] = f"#SBATCH --gpus-per-node={launch.gpus}"
    return lines


def _kubernetes(launch: Launch) -> dict[str, str]:
    settings = shlex.join(launch.settings).replace("$", "$$")  # Kubernetes expands $$ and $(NAME) in `args`
    lines = {
        "WAY=": f"WAY={'elastic' if launch.elastic else 'fixed'}",
        "completions: ": f"completions: {launch.nodes}",
        "parallelism: ": f"parallelism: {launch.nodes}",
        "DEVICE=": f"DEVICE={launch.device}",
        "RANKS=": f"RANKS={launch.ranks}",
        "NODES=": f"NODES={launch.nodes}",
        "MODE=": f"MODE={launch.mode}",
        "set --  ": f"set -- {settings}",
        "cpu: ": f'cpu: "{cpus_of(launch)}"',
        "memory: ": f"memory: {gib}Gi" if (gib := memory_of(launch)) else "# memory: NOT PREDICTED, so without a limit",
    }
    if launch.gpus:
        lines["# nvidia.com/gpu: "] = f"nvidia.com/gpu: {launch.gpus}"
    return lines
