"""The templates in src/phalanx/launch/ and what `phalanx launch` makes of them: they parse, every setting that they name is one, what they start passes the checks of a recipe, and every problem is told at once."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.cli.launch import explain, read_args
from phalanx.cli.launching import NAMES, Asked, Launch, choose, fill, job_name, script_of
from phalanx.cli.main import main
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.core.settings import describe_settings
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery.recipe import wanted_ranks
from phalanx.runtime.membership.credentials import VARIABLE
from phalanx.runtime.membership.membership import TooFewMembers
from phalanx.runtime.membership.supervisor import REMOVED_CODE

LAUNCH = Path(phalanx.__file__).parent / "launch"
SCRIPTS = sorted(p.name for p in LAUNCH.glob("*.sh"))
SETTING = re.compile(r"--([a-z]+\.[a-z_]+)(?:[ =]+(\S+))?")
ALLOWED = ("--folding.ep", "1", "--train.global_batch", "64")
"""With it `recipes/tiny.toml` may be elastic on several nodes."""
RECORDS = (*ALLOWED, "--data.builtin_bytes", "none", "--data.sources", "/runs/a.jsonl")
"""With it `data.text_field` may be any text."""


def settings_of(text: str) -> dict[str, str]:
    """Settings on command lines, with what stands after them."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {m[1]: m[2] for m in SETTING.finditer(code)}


def launch_of(**asked: Any) -> Launch:
    return choose(Asked(**{"where": "slurm", "path": "recipes/tiny.toml", "settings": ALLOWED, **asked}))


def parses(script: str, shell: str = "bash") -> None:
    """The script, and shell in quotes that it hands to another one."""
    for part in [script, *re.findall(r"^(?:supervise|torchrun)='(.*?)'", script, re.S | re.M)]:
        checked = subprocess.run([shell, "-n"], input=part, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_every_template_is_used_and_looked_at() -> None:
    assert {p.name for p in LAUNCH.iterdir()} == {*NAMES.values(), "Dockerfile", "monitoring"}


@pytest.mark.parametrize("name", [*SCRIPTS, "kubernetes.yaml"])
def test_settings_of_command_lines_exist(name: str) -> None:
    known = {s.name for s in describe_settings()}
    named = set(settings_of((LAUNCH / name).read_text()))
    assert {"checkpoint.fall_back", "launch.device"} <= named
    assert sorted(named - known) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    parses((LAUNCH / name).read_text())


@pytest.mark.parametrize(("name", "address", "found"), [
    ("here", "", "here"), ("n1", "10.0.0.7", "10.0.0.7"), ("n1", "fd00::7", "[fd00::7]"),
])  # fmt: skip
def test_a_node_whose_name_does_not_resolve_is_called_by_its_address(name: str, address: str, found: str) -> None:
    function = re.search(r"^address_of\(\) \{.*?^\}", (LAUNCH / "slurm.sh").read_text(), re.M | re.S)
    assert function is not None
    stand_ins = f'getent() {{ [ "$2" = here ]; }}\nscontrol() {{ printf "NodeName=$3\\n   NodeAddr={address} NodeHostName=$3\\n"; }}'
    line = f"{stand_ins}\n{function[0]}\naddress_of {name}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout == f"{found}\n"


def test_a_host_that_was_put_out_is_started_again() -> None:
    script = (LAUNCH / "slurm.sh").read_text()
    ends = re.search(r"case \$code in\n\s+([0-9 |]+)\) exit .*\n\s+([0-9]+)\).*scontrol requeue", script)
    assert ends is not None and {int(code) for code in ends[1].split("|")} == {0, 2}
    assert int(ends[2]) == TooFewMembers.exit_code
    assert REMOVED_CODE not in (0, 2, TooFewMembers.exit_code)
    assert "restartPolicy: OnFailure" in (LAUNCH / "kubernetes.yaml").read_text()


def test_a_lost_node_ends_neither_job_nor_step() -> None:
    """`#SBATCH --no-kill` does not reach the step."""
    script = (LAUNCH / "slurm.sh").read_text()
    assert re.search(r"^#SBATCH --no-kill$", script, re.M) and re.search(
        r"^srun --no-kill --kill-on-bad-exit=0 ", script, re.M
    )
    assert script.count('--cpus-per-task="$SLURM_CPUS_PER_TASK"') == 1, "srun does not take it from sbatch"


def test_slurm_starts_the_recipe_of_its_first_lines() -> None:
    script = (LAUNCH / "slurm.sh").read_text()
    example = re.search(r"sbatch --nodes=4 slurm.sh (\S+)", script)
    assert example is not None
    values = {
        "$MODE": "fast", "$RANKS": "4", "$WANTED": "16", "$RANKS_MINIMUM": "4", "$SERVICE": "node0:29400", "$DEVICE": "cpu",
        "${SLURMD_NODENAME:-$(hostname": "node0", '"$rack"}': "rack-1",
    }  # fmt: skip
    words = {k: values.get(v, values.get(v.strip('"'), v)) for k, v in settings_of(script).items()}
    check(LAUNCH.parent / example[1], words)


def check(path: Path, words: dict[str, str]) -> Recipe:
    """As `phalanx train` reads it."""
    overrides = [w for k, v in words.items() for w in (f"--{k}", v)]
    recipe = load_recipe(path, overrides, check=lambda r: run_problems(r, world=wanted_ranks(r)))
    assert recipe.resilience.heal and recipe.resilience.service
    return recipe


# ---- what is chosen


def test_elastic_where_the_mapping_allows_it_else_fixed_with_the_reason() -> None:
    elastic = launch_of(nodes=2, gpus=0, settings=(*ALLOWED, "--launch.ranks", "2"))
    assert elastic.elastic and (elastic.ranks, elastic.device, elastic.recipe.resilience.wanted) == (2, "cpu", 4)
    narrow = launch_of(nodes=2, gpus=0, settings=("--folding.ep", "4", "--launch.ranks", "2"))
    assert not narrow.elastic and "folding.ep = 4" in narrow.why and "use folding.ep = 2" in narrow.why
    on_gpus = launch_of(nodes=2, gpus=8)
    assert (on_gpus.elastic, on_gpus.device, on_gpus.ranks) == (
        False,
        "cuda",
        8,
    ) and "--elastic asks for it" in on_gpus.why
    assert launch_of(nodes=2, gpus=8, elastic=True).elastic
    assert not launch_of(nodes=2, gpus=0, elastic=False).elastic
    assert not launch_of(where="torchrun", nodes=2, gpus=0).elastic


def test_a_recipe_decides_what_the_command_line_leaves_open() -> None:
    off = launch_of(gpus=0, settings=(*ALLOWED, "--resilience.heal", "false"))
    assert not off.elastic and "resilience.heal = false" in off.why
    on = (*ALLOWED, "--resilience.heal", "true", "--resilience.mode", "exact", "--launch.threads", "1")
    assert (launch_of(gpus=0, settings=on).elastic, launch_of(gpus=0, settings=on).mode) == (True, "exact")
    told = launch_of(gpus=0, settings=on, elastic=False)
    assert told.settings[-2:] == ("--resilience.heal", "false"), "a launcher refuses what the recipe asks for"


def test_a_searched_mapping_starts_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--model", "mixtral-8x7b", "--cluster", "h100x64", "--recipe", "mix64.toml"]) == 0
    assert main(["launch", "slurm", "mix64.toml", "--nodes", "8", "--gpus-per-node", "8"]) == 0
    said = capsys.readouterr().out
    assert "recovery     fixed: " in said and said.splitlines()[-1] == "next: sbatch slurm-torchrun.sh"
    script = (tmp_path / "slurm-torchrun.sh").read_text()
    for line in ("#SBATCH --nodes=8", "#SBATCH --gpus-per-node=8", "RECIPE=mix64.toml"):
        assert re.search(rf"^{re.escape(line)}\b", script, re.M), line


def test_all_problems_of_a_launch_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slrm", "--nodes", "x", "--elastic", "--fixed", "--out"]) == 2
    said = capsys.readouterr().err
    for words in (
        "did you mean 'slurm'",
        "recipe: is missing",
        "--nodes = 'x'",
        "say the opposite",
        "--out: has no value",
    ):
        assert words in said
    asked = [
        "--nodes",
        "0",
        "--gpus-per-node",
        "4",
        "--launch.device",
        "cpu",
        "--launch.ranks",
        "3",
        "--train.stesp",
        "1",
    ]
    assert main(["launch", "slurm", "recipes/tiny.toml", *asked]) == 2
    said = capsys.readouterr().err
    for words in (
        "--nodes = 0: must be from 1 to 100,000",
        "uses none",
        "--launch.ranks = '3'",
        "did you mean '--train.steps'",
    ):
        assert words in said
    assert main(["launch", "local", "recipes/tiny.toml", "--nodes", "2"]) == 2
    assert main(["launch", "torchrun", "recipes/tiny.toml", "--elastic"]) == 2
    assert main(["launch", "slurm", "recipes/tiny.toml", "--elastic", "--gpus-per-node", "0", "--folding.ep", "8"]) == 2
    assert "resilience.f" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["service", "wanted", "minimum", "wait_s"])
@pytest.mark.parametrize("where", ["slurm", "kubernetes"])
def test_a_setting_that_the_script_decides_is_refused(where: str, name: str) -> None:
    """Pods would not hear of it, and nodes would look for another service than the one that the script starts."""
    setting = f"--resilience.{name}"
    settings = (*ALLOWED, setting, "other:1" if name == "service" else "3")
    if where == "slurm" and name in ("minimum", "wait_s"):  # it stands behind the script's own, on every node
        return assert_handed_on(launch_of(gpus=0, elastic=True, settings=settings), setting)
    with pytest.raises(ConfigError, match="is decided by the script") as caught:
        launch_of(where=where, gpus=0, elastic=True, settings=settings)
    assert [p.where for p in caught.value.problems] == [setting], "once, and nothing about a service that is not set"
    return None


def assert_handed_on(launch: Launch, setting: str) -> None:
    assert launch.elastic and launch.settings[-2:] == (setting, "3")
    assert str(getattr(launch.recipe.resilience, setting.partition(".")[2])) in ("3", "3.0")


@pytest.mark.parametrize("where", ["slurm", "kubernetes"])
def test_names_of_hosts_and_the_service_are_those_of_the_script(where: str) -> None:
    words = ("--launch.host", "a", "--launch.rack=b", "--launch.keep_service", "true")
    with pytest.raises(ConfigError) as caught:
        launch_of(where=where, gpus=0, settings=(*ALLOWED, *words))
    assert {p.where for p in caught.value.problems} == {"--launch.host", "--launch.rack", "--launch.keep_service"}


def test_a_fixed_run_has_no_service_to_decide() -> None:
    with pytest.raises(ConfigError, match="has no effect") as caught:
        launch_of(gpus=0, elastic=False, settings=(*ALLOWED, "--resilience.wanted", "3"))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("name", "elsewhere"), [("run.folder", "own"), ("data.cache", "/runs/../tmp")])
def test_pods_write_to_their_volume(name: str, elsewhere: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)1 problem.*--{name} = .*/runs/mine"):
        launch_of(where="kubernetes", gpus=0, settings=(*ALLOWED, f"--{name}={elsewhere}"))
    kept = launch_of(where="kubernetes", gpus=0, settings=(*ALLOWED, f"--{name}", "/runs/mine"))
    assert kept.settings[-2:] == (f"--{name}", "/runs/mine")
    text = (LAUNCH.parent / "recipes/tiny.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("[run]\n", '[run]\nfolder = "own"\n', 1))
    from_file = launch_of(where="kubernetes", path=str(tmp_path / "own.toml"), gpus=0)
    assert from_file.recipe.run.folder == "/runs", "the script says otherwise, after the file"


def test_pods_read_text_of_their_volume_or_of_their_image() -> None:
    def with_sources(text: str) -> Launch:
        return launch_of(where="kubernetes", gpus=0, settings=(*ALLOWED, "--data.sources", text))

    assert with_sources('["builtin:python"]').where == "kubernetes"
    on_volume = ("--data.builtin_bytes", "none", "--data.sources", "/runs/text/*.jsonl#content")
    assert launch_of(where="kubernetes", gpus=0, settings=(*ALLOWED, *on_volume)).settings[-1] == on_volume[-1]
    with pytest.raises(ConfigError, match=r"--data.sources = 'my/a.txt'.*/runs/a.txt"):
        with_sources("my/a.txt")


def test_no_gpus_and_a_device_that_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "recipes/tiny.toml", "--gpus-per-node", "0", "--launch.device", "cuda"]
    assert main(words) == 2
    assert "--gpus-per-node = 0: asks for no GPUs, and --launch.device cuda uses them" in capsys.readouterr().err


def test_on_this_machine_recovery_may_be_turned_off() -> None:
    off = launch_of(where="local", settings=(*ALLOWED, "--resilience.heal", "false"))
    assert not off.elastic and off.settings[-2:] == ("--resilience.heal", "false")


def test_a_setting_in_one_word_stays_one() -> None:
    assert (
        launch_of(gpus=0, settings=(*RECORDS, "--data.text_field=--x", "--launch.ranks=2")).settings[-1]
        == "--data.text_field=--x"
    )


# ---- what is written


@pytest.mark.parametrize(("where", "elastic"), NAMES)
@pytest.mark.parametrize("gpus", [0, 4])
def test_filled_scripts_parse_and_ask_for_what_was_asked(where: str, elastic: bool, gpus: int, tmp_path: Path) -> None:
    recipe = tmp_path / "it's $HOME; a `recipe`.toml"
    recipe.write_text((LAUNCH.parent / "recipes/tiny.toml").read_text().replace('"tiny"\n\n', '"two words"\n\n', 1))
    settings = (
        *ALLOWED,
        "--run.name",
        "two words",
        "--data.sources",
        '["/runs/a b", "/runs/$c"]',
        "--data.builtin_bytes",
        "none",
    )
    nodes = 1 if where == "local" else 2
    launch = launch_of(
        where=where,
        path=str(recipe),
        nodes=nodes,
        gpus=gpus,
        elastic=None if where == "local" else elastic,
        settings=settings,
    )
    script = script_of(launch)
    if where == "kubernetes":
        return  # below
    parses(script)
    values = subprocess.run(
        ["bash", "-c", f"{assignments(script)}\nprintf '%s\\0' \"$RECIPE\" \"$DEVICE\" \"$RANKS\" \"${{SETTINGS[@]}}\""],
        capture_output=True, text=True, check=True, env={"SLURM_JOB_NUM_NODES": "2"},
    ).stdout.split("\0")  # fmt: skip
    assert values[:3] == [str(recipe), "cuda" if gpus else "cpu", str(gpus or 4)]
    assert tuple(values[3 : 3 + len(settings)]) == settings
    if where == "slurm":
        assert "#SBATCH --job-name=two-words\n" in script and ("#SBATCH --gpus-per-node=4\n" in script) == (gpus > 0)


def assignments(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if re.match(r"(RECIPE|DEVICE|RANKS|SETTINGS)=", line))


def test_a_template_without_a_line_is_an_error_and_a_comment_stays() -> None:
    assert fill("A=1  # <- one\n  A: 2\n", {"A=": "A=3", "A: ": "A: 4"}) == "A=3  # <- one\n  A: 4\n"
    with pytest.raises(ValueError, match="B="):
        fill("A=1\n", {"B=": "B=1"})


def test_a_script_that_somebody_has_edited_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "local", "recipes/tiny.toml"]) == main(["launch", "local", "recipes/tiny.toml"]) == 0
    assert "next: bash local.sh" in capsys.readouterr().out
    (tmp_path / "local.sh").write_text("mine")
    assert main(["launch", "local", "recipes/tiny.toml"]) == 2
    assert "--out local-2.sh" in capsys.readouterr().err and (tmp_path / "local.sh").read_text() == "mine"


# ---- Kubernetes


def objects_of(text: str) -> dict[str, Any]:
    import yaml

    return {o["kind"]: o for o in yaml.safe_load_all(text)}


def yamls() -> dict[str, str]:
    """The template and what is made of it."""
    found = {"template": (LAUNCH / "kubernetes.yaml").read_text()}
    for elastic in (True, False):
        launch = launch_of(
            where="kubernetes",
            nodes=3,
            gpus=0 if elastic else 4,
            elastic=elastic,
            settings=(*ALLOWED, "--train.global_batch", "48"),
        )
        found["elastic" if elastic else "fixed"] = script_of(launch)
    return found


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
@pytest.mark.parametrize("which", ["template", "elastic", "fixed"])
def test_kubernetes_objects_fit_together(tmp_path: Path, which: str) -> None:
    objects = objects_of(yamls()[which])
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
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (4 if which == "fixed" else None)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(objects["ConfigMap"]["data"]["recipe.toml"])
    ports = {p["name"]: p["port"] for p in objects["Service"]["spec"]["ports"]}
    words = started_by(container["args"][0], recipe)
    name = objects["Job"]["metadata"]["name"]
    assert name == ("phalanx" if which == "template" else "phalanx-tiny")
    if which == "fixed":
        assert (
            words[:10]
            == shlex.split(
                f"torchrun --nnodes 3 --node-rank 0 --nproc-per-node 4 --master-addr {name}-0.{name} --master-port {ports['torchrun']}"
            )[:10]
        )
        return
    given = dict(zip(words[4::2], words[5::2], strict=True))
    assert words[:4] == ["phalanx", "train", str(recipe), "--trust"]
    loaded = check(recipe, {k.removeprefix("--"): v for k, v in given.items()})
    assert loaded.resilience.service == f"{name}-0.{name}:{ports['membership']}"
    assert loaded.resilience.wanted == loaded.launch.ranks * job["completions"] and loaded.launch.keep_service


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_runs_of_one_namespace_share_the_volume_alone() -> None:
    """`kubectl apply` for a second run would else change the recipe that pods of the first one start again with."""

    def objects(run: str) -> dict[str, Any]:
        return objects_of(script_of(launch_of(where="kubernetes", gpus=0, settings=(*ALLOWED, "--run.name", run))))

    one, two = objects("one"), objects("two")
    shared = {kind for kind in one if one[kind]["metadata"]["name"] == two[kind]["metadata"]["name"]}
    assert shared == {"PersistentVolumeClaim"}
    (volume,) = (v for v in one["Job"]["spec"]["template"]["spec"]["volumes"] if v["name"] == "recipe")
    assert volume["configMap"]["name"] == one["ConfigMap"]["metadata"]["name"] == "phalanx-one-recipe"
    assert one["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": {"app": "phalanx-one"}}
    labels = {job_name(run) for run in ("a-b", "a_b", "A b", "a-b-", "_", "é" * 99, "x" * 99)}
    assert len(labels) == 7 and all(re.fullmatch("[a-z]([a-z0-9-]{0,55}[a-z0-9])", label) for label in labels)


def container_of(script: str) -> dict[str, Any]:
    (container,) = objects_of(script)["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
@pytest.mark.parametrize("which", ["template", "elastic", "fixed"])
def test_pods_have_shared_memory_for_nccl(which: str) -> None:
    """The runtime gives 64 MiB."""
    text = yamls()[which]
    (name,) = (m["name"] for m in container_of(text)["volumeMounts"] if m["mountPath"] == "/dev/shm")
    volumes = objects_of(text)["Job"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": name, "emptyDir": {"medium": "Memory"}} in volumes


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_lines_for_rdma_are_fields_once_their_comment_is_taken_away() -> None:
    text = yamls()["fixed"]
    for words in ("rdma/NAME: 1", "securityContext:", "  capabilities:", "    add: [IPC_LOCK]"):
        assert text.count(f"# {words}") == 1, words
        text = text.replace(f"# {words}", words)
    assert container_of(text)["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    limits = container_of(text)["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4 and limits["rdma/NAME"] == 1


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_memory_of_pods_is_what_their_ranks_need() -> None:
    """30.5e9 parameters, of which 8 GPUs hold masters and moments, and the host copies for checkpoints."""

    def gib(path: str, *settings: str, gpus: int = 8) -> int:
        launch = launch_of(where="kubernetes", path=path, nodes=1, gpus=gpus, settings=settings)
        resources = container_of(script_of(launch))["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        return int(resources["limits"]["memory"].removesuffix("Gi"))

    copies = 30.5e9 * 12 / 2**30
    assert 64 + copies < gib("qwen3-30b-a3b-8", "--optim.state_dtype", "float32") < 1.3 * (64 + copies)
    assert gib("laptop", gpus=0) == 8 < gib("laptop", "--launch.ranks", "16", "--train.micro_batch", "2", gpus=0)


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_memory_that_cannot_be_told_is_no_limit() -> None:
    launch = launch_of(
        where="kubernetes", nodes=2, gpus=4, settings=(*ALLOWED, "--data.tokenizer", "/of/the/pods.json")
    )
    script = script_of(launch)
    assert container_of(script)["resources"] == {"requests": {"cpu": "32"}, "limits": {"nvidia.com/gpu": 4}}
    assert script.count("# memory: NOT PREDICTED") == 2


def test_the_image_compiles_what_triton_compiles() -> None:
    """Its module for NVIDIA's driver is C with Python.h, which neither python3 nor python3-venv brings."""
    (line,) = (x for x in (LAUNCH / "Dockerfile").read_text().splitlines() if "apt-get install" in x)
    assert {"g++", "python3-dev", "python3-venv"} <= set(line.split())


def test_the_next_command_can_be_pasted() -> None:
    assert explain(launch_of(nodes=2), Path("my run.sh")).endswith("next: sbatch 'my run.sh'")


def test_of_an_option_given_twice_the_last_one_counts() -> None:
    asked, out = read_args(["slurm", "tiny", "--nodes", "2", "--out=a.sh", "--nodes=4", "--out", "b.sh"])
    assert (asked.nodes, out, asked.settings) == (4, Path("b.sh"), ())


def test_what_a_refused_file_is_told_to_add_can_be_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (LAUNCH.parent / "recipes/tiny.toml").read_text()
    (tmp_path / "far.toml").write_text(text.replace("[run]\n", '[run]\nfolder = "/somewhere"\n', 1))
    words = ["launch", "slurm", "far.toml", "--gpus-per-node", "0", "--launch.ranks", "1", "--folding.ep", "1"]
    assert main(words) == 2 and "--run.folder /somewhere), or add --trust" in capsys.readouterr().err
    assert main([*words, "--trust", "--data.sources", "far.toml"]) == 0
    assert capsys.readouterr().err.count("note: ") == 1, "each note once, however often the recipe is read"
    assert "SETTINGS=(--folding.ep 1 --data.sources far.toml --trust)" in Path("slurm.sh").read_text()


def test_counts_beyond_all_reason_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)--nodes = 9+: must be at most.*--gpus-per-node = 9+: must be at most"):
        launch_of(nodes=10**20 - 1, gpus=10**20 - 1)


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_the_recipe_of_a_config_map_is_the_file(tmp_path: Path) -> None:
    """With its indentation and its comments; what is "auto" is for the pods to say, not for the machine that writes it."""
    text = '  [model]\n  preset = "tiny"\n# nvidia.com/gpu: as many as ranks\n\n[train]\nsteps = 5\n'
    text += '[data]\nsources = ["/runs/a.jsonl"]\ntext_field = """two blanks  \n  \n\ta tab\t\n\n"""\n'
    (tmp_path / "own.toml").write_text(text)
    launch = launch_of(where="kubernetes", path=str(tmp_path / "own.toml"), gpus=4)
    assert objects_of(script_of(launch))["ConfigMap"]["data"]["recipe.toml"].rstrip() == text.rstrip()
    launch = launch_of(where="kubernetes", path="laptop", gpus=4, settings=("--train.global_batch", "64"))
    assert 'dtype = "auto"' in objects_of(script_of(launch))["ConfigMap"]["data"]["recipe.toml"]


def started_by(script: str, recipe: Path) -> list[str]:
    """The words of what pod 0 becomes."""
    shown = script.replace("exec ", "printf '%s\\n' ").replace("/recipe/recipe.toml", shlex.quote(str(recipe)))
    shown = shown.replace('-m phalanx train "$@"\nfi', '-m phalanx train "$@"; exit\nfi')
    environ = {"JOB_COMPLETION_INDEX": "0", "ZONE": "zone-a"}
    return subprocess.run(
        ["sh", "-euc", shown], env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def expanded(text: str) -> str:
    """As Kubernetes expands `args` of a container with the variable ZONE; a name that it does not know stays."""
    return re.sub(r"\$\$|\$\(ZONE\)", lambda found: "$" if found[0] == "$$" else "zone-a", text)


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
def test_pods_get_a_setting_with_dollars_as_it_is(tmp_path: Path) -> None:
    odd = "$$ $(ZONE) $HOME $$$(x) it's"
    launch = launch_of(where="kubernetes", gpus=0, elastic=False, settings=(*RECORDS, f"--data.text_field={odd}"))
    script = expanded(container_of(script_of(launch))["args"][0])
    assert started_by(script, tmp_path / "recipe.toml")[-1] == f"--data.text_field={odd}"


@pytest.mark.parametrize("char", ["\n", "\r", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffe"])
def test_a_character_that_yaml_cannot_hold_is_refused(char: str, tmp_path: Path) -> None:
    name = f"U\\+{ord(char):04X}"
    with pytest.raises(ConfigError, match=rf"(?s)1 problem.*--data.text_field = .*{name}"):
        launch_of(where="kubernetes", gpus=0, settings=(*RECORDS, "--data.text_field", f"a{char}b"))
    assert launch_of(where="slurm", gpus=0, settings=(*RECORDS, "--data.text_field", f"a{char}b"))
    if char not in "\n\r\x7f":  # which TOML refuses, or which ends a line
        recipe = tmp_path / "own.toml"
        recipe.write_text(f"{(LAUNCH.parent / 'recipes/tiny.toml').read_text()}\n# a{char}b\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"own.toml:\d+: has the character {name}"):
            launch_of(where="kubernetes", path=str(recipe), gpus=0)


@pytest.mark.parametrize("which", ["template", "elastic", "fixed"])
def test_kubernetes_objects_are_what_the_api_knows(which: str) -> None:
    """Every field, with its type, against the models of the official client, which are made from the API's OpenAPI schema."""
    models = pytest.importorskip(
        "kubernetes.client.models", reason="no package kubernetes here: its models have the API's types"
    )
    kinds = {
        "Job": "V1Job",
        "Service": "V1Service",
        "ConfigMap": "V1ConfigMap",
        "NetworkPolicy": "V1NetworkPolicy",
        "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    }
    for kind, value in objects_of(yamls()[which]).items():
        assert unknown(value, kinds[kind], models, kind) == []
    assert unknown({"spec": {"completion": 4}}, "V1Job", models, "Job") == [
        "Job.spec.completion: is no field of V1JobSpec"
    ]
    assert unknown({"spec": {"completions": "4"}}, "V1Job", models, "Job") == ["Job.spec.completions: '4' is no int"]


@pytest.mark.skipif(find_spec("yaml") is None, reason="no YAML parser here")
@pytest.mark.parametrize("which", ["elastic", "fixed"])
def test_the_overlay_of_the_page_changes_what_it_names_alone(tmp_path: Path, which: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    page = Path("docs/how-to/run-on-kubernetes.md").read_text()
    (overlay,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "kustomization.yaml").write_text(textwrap.dedent("   " + overlay.lstrip()))
    (tmp_path / "kubernetes.yaml").write_text(yamls()[which])
    made = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert made.returncode == 0 and "deprecated" not in made.stderr, made.stderr
    before, after = objects_of(yamls()[which]), objects_of(made.stdout)
    assert {o["metadata"].pop("namespace") for o in after.values()} == {"training"}
    assert after["PersistentVolumeClaim"]["spec"].pop("storageClassName") == "shared-ssd"
    for objects, image in ((before, "phalanx:latest"), (after, "my-registry/phalanx:7")):
        (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        assert container.pop("image") == image
    assert after == before


def unknown(value: Any, declared: str, models: Any, where: str) -> list[str]:
    """What of a value is not as declared."""
    if found := re.fullmatch(r"[Ll]ist\[(.*)\]", declared):
        items = value if isinstance(value, list) else [None]
        return [p for i, item in enumerate(items) for p in unknown(item, found[1], models, f"{where}[{i}]")]
    if found := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", declared):
        return [p for key, item in value.items() for p in unknown(item, found[1], models, f"{where}.{key}")]
    plain = {"str": (str,), "int": (int,), "bool": (bool,), "object": (object,)}
    if declared in plain:
        quantity = declared == "str" and where.partition("resources.")[2] and isinstance(value, int)
        return [] if isinstance(value, plain[declared]) or quantity else [f"{where}: {value!r} is no {declared}"]
    model = getattr(models, declared)
    names = {json: python for python, json in model.attribute_map.items()}
    problems = [f"{where}.{key}: is no field of {declared}" for key in value if key not in names]
    for key in value.keys() & names.keys():
        problems += unknown(value[key], model.openapi_types[names[key]], models, f"{where}.{key}")
    return problems


def test_a_recipe_of_another_cluster_says_how_to_ask_whether_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "mixtral-8x7b-64", "--nodes", "4"]) == 0
    assert "phalanx train mixtral-8x7b-64 --dry-run --cluster h100x32 says whether it fits" in capsys.readouterr().out
    assert main(["launch", "slurm", "mixtral-8x7b-64", "--nodes", "8", "--out", "right.sh"]) == 0
    assert "whether it fits" not in capsys.readouterr().out
