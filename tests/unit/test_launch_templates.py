"""The templates in src/phalanx/launch/: they parse, every setting that they name is one, and what they start passes the checks of a recipe."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import phalanx
from phalanx.core.config import Recipe
from phalanx.core.recipe import load_recipe
from phalanx.core.settings import describe_settings
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery.recipe import wanted_ranks
from phalanx.runtime.membership.credentials import VARIABLE
from phalanx.runtime.membership.membership import TooFewMembers
from phalanx.runtime.membership.supervisor import REMOVED_CODE

LAUNCH = Path(phalanx.__file__).parent / "launch"
SETTING = re.compile(r"--([a-z]+\.[a-z_]+)(?:[ =]+(\S+))?")


def settings_of(text: str) -> dict[str, str]:
    """Settings on command lines, with what stands after them."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {m[1]: m[2] for m in SETTING.finditer(code) if m[1] != "section.key"}  # that one is in the words on usage


def test_every_template_is_looked_at() -> None:
    assert {p.name for p in LAUNCH.iterdir()} == {"slurm.sh", "kubernetes.yaml"}


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml"])
def test_settings_of_command_lines_exist(name: str) -> None:
    known = {s.name for s in describe_settings()}
    named = set(settings_of((LAUNCH / name).read_text()))
    assert {"resilience.service", "launch.host"} <= named
    assert sorted(named - known) == []


def parts_of(script: str) -> list[str]:
    """Shell that a shell gets: the script, and the loop of each node that it hands to another."""
    found = re.search(r"supervise='(.*?)'", script, re.S)
    assert found is not None
    return [script, found[1]]


def test_slurm_script_parses() -> None:
    for part in parts_of((LAUNCH / "slurm.sh").read_text()):
        checked = subprocess.run(["bash", "-n"], input=part, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_a_host_that_was_put_out_is_started_again() -> None:
    ends = re.search(r"case \$code in ([0-9 |]+)\) exit", (LAUNCH / "slurm.sh").read_text())
    assert ends is not None and {int(code) for code in ends[1].split("|")} == {0, 2, TooFewMembers.exit_code}
    assert REMOVED_CODE not in (0, 2, TooFewMembers.exit_code)
    assert "restartPolicy: OnFailure" in (LAUNCH / "kubernetes.yaml").read_text()


def test_slurm_starts_the_recipe_of_its_first_line() -> None:
    script = (LAUNCH / "slurm.sh").read_text()
    example = re.search(r"sbatch --nodes=4 slurm.sh (\S+)", script)
    assert example is not None
    values = {
        "$MODE": "fast",
        "$RANKS": "4",
        "$WANTED": "16",
        "$RANKS_MINIMUM": "4",
        "$PHALANX_SERVICE": "node0:29400",
        "$(hostname": "node0",
        '"$rack"}': "rack-1",
    }
    given = settings_of(script)
    words = {k: values.get(v, values.get(v.strip('"'), v)) for k, v in given.items()}
    check(LAUNCH.parent / example[1], words, {})


def check(path: Path | None, words: dict[str, str], more: dict[str, str]) -> Recipe:
    """As `phalanx train` reads it."""
    overrides = [w for k, v in {**words, **more}.items() for w in (f"--{k}", v)]
    recipe = load_recipe(path, overrides, check=lambda r: run_problems(r, world=wanted_ranks(r)))
    assert recipe.resilience.heal and recipe.resilience.service
    return recipe


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_kubernetes_objects_fit_together(tmp_path: Path) -> None:
    import yaml

    objects = {o["kind"]: o for o in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}
    assert set(objects) == {"ConfigMap", "PersistentVolumeClaim", "Service", "NetworkPolicy", "Job"}
    job, pod = objects["Job"]["spec"], objects["Job"]["spec"]["template"]["spec"]
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"] == objects["Job"]["metadata"]["name"]
    assert objects["Service"]["spec"]["selector"] == {"job-name": objects["Job"]["metadata"]["name"]}
    (container,) = pod["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    policy, template = objects["NetworkPolicy"]["spec"], objects["Job"]["spec"]["template"]
    peers = [rule["podSelector"]["matchLabels"] for way in policy["ingress"] for rule in way["from"]]
    assert peers == [policy["podSelector"]["matchLabels"]] == [template["metadata"]["labels"]]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] != 0
    (secret,) = (v["secret"] for v in pod["volumes"] if "secret" in v)
    assert secret["defaultMode"] & 0o037 == 0 and VARIABLE in {e["name"] for e in container["env"]}
    script = container["args"][0]
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(objects["ConfigMap"]["data"]["recipe.toml"])
    words = {
        k: {"$keep": "true", '"phalanx-$JOB_COMPLETION_INDEX"': "phalanx-0", '"$ZONE"}': "zone-a"}.get(v, v)
        for k, v in settings_of(script).items()
    }
    loaded = check(recipe, words, {})
    port = objects["Service"]["spec"]["ports"][0]["port"]
    assert words["resilience.service"] == f"{objects['Job']['metadata']['name']}-0.phalanx:{port}"
    assert loaded.resilience.wanted == loaded.launch.ranks * job["completions"]
