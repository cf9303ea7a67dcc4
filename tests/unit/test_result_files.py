"""Every command that takes `--json FILE` finds out before its work, not after, whether the file can be written."""

import errno
import importlib
import os
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.core.errors import RunError
from phalanx.core.files import check_writable, write_json, write_text

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "bench train": ("phalanx_lab.bench.train", "measure"),
    "bench transformers": ("phalanx_lab.bench.parity.command", "measure"),
    "bench reshard-drawn": ("phalanx_lab.bench.reshard.strange", "run_drawn"),
    "bench curve": ("phalanx_lab.bench.curve", "compare"),
    "bench context": ("phalanx_lab.bench.context", "measure"),
    "bench hiding --what ring": ("phalanx_lab.bench.hiding", "measure"),
    "bench layer": ("phalanx_lab.bench.layer.command", "measure"),
    "bench step": ("phalanx_lab.bench.step", "measure"),
    "bench memory": ("phalanx_lab.bench.memory.command", "compare"),
    "bench predict": ("phalanx_lab.bench.predict.command", "measure"),
    "bench predict --recovery": ("phalanx_lab.bench.predict.command", "measure_recovery"),
    "bench kill": ("phalanx_lab.bench.kill", "kill_and_compare"),
    "bench storm": ("phalanx_lab.bench.storm.command", "run_storm"),
    "bench recovery": ("phalanx_lab.bench.recovery.command", "measure"),
    "bench storm-members": ("phalanx_lab.bench.storm.members", "storm"),
    "bench heal-cost": ("phalanx_lab.bench.heal_cost", "measure"),
    "bench fuzz": ("phalanx_lab.bench.fuzz.command", "all_readers"),
    "bench trace": ("phalanx_lab.bench.trace.command", "measure"),
    "simulate traced trace.json": ("phalanx.cli.predicting.traced", "read_step"),
    "bench flips": ("phalanx_lab.bench.flips", "measure"),
    "bench robust": ("phalanx_lab.bench.robust.command", "measure"),
    "bench pipeline": ("phalanx_lab.bench.pipeline.command", "measure"),
    "bench reshard": ("phalanx_lab.bench.reshard.command", "measure"),
    "bench reshard-plan --nine": ("phalanx_lab.bench.reshard.plan", "measure_nine"),
    "sync . --to tp1 --out served": ("phalanx.train.sync", "plan_sync"),
    "eval .": ("phalanx.cli.eval", "evaluate"),
    "prepare": ("phalanx.cli.prepare", "load_recipe"),
    "search --model tiny --cluster h100x8": ("phalanx.cli.search", "search"),
    "simulate a.toml --cluster h100x8": ("phalanx.cli.simulate", "read_and_predict"),
    "calibrate --out cluster.toml": ("phalanx.cli.calibrate", "measure"),
    "simulate a.toml --cluster h100x8 --against run": ("phalanx.cli.predicting.against", "compare_with_run"),
    "simulate flops --model tiny": ("phalanx.cli.predicting.flops", "rates"),
    "simulate goodput": ("phalanx.cli.predicting.goodput", "run"),
    "simulate validate": ("phalanx_lab.publications.validation", "validate"),
    "plan reshard 1x2S0 1x2R --shape 8": ("phalanx.cli.planning.reshard", "plan_reshard"),
    "plan placement --hosts 4 --slots 2 --experts 4": ("phalanx.cli.planning.placement", "placement_result"),
    "verify --ranks 2": ("phalanx.cli.verify", "verify"),
    "metrics .": ("phalanx.cli.metrics", "read_run"),
    "runs .": ("phalanx.cli.runs", "list_runs"),
    "trace .": ("phalanx.cli.trace", "read_recording"),
    "plan folding --world 8": ("phalanx.cli.plan", "folding_result"),
    "plan model tiny": ("phalanx.cli.plan", "model_result"),
    "plan schedule --name 1f1b --pp 2 --microbatches 4": ("phalanx.cli.planning.schedule", "schedule_problems"),
    "testbed run": ("phalanx_lab.testbed.command", "_build"),
    "testbed measure": ("phalanx_lab.testbed.command", "_build"),
    "testbed clean": ("phalanx_lab.testbed.command", "reap_stale"),
}
"""Command -> what begins its work."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def began(*args: object, **options: object) -> None:
        raise AssertionError(f"{command} began its work")

    module, work = COMMANDS[command]
    monkeypatch.setattr(importlib.import_module(module), work, began)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    after = ["--", "true"] if command == "testbed run" else []
    assert main([*command.split(), "--json", "file/result.json", *after]) == 2
    said = capsys.readouterr().err
    assert "cannot write file/result.json" in said and "name another file" in said
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("command", ["plan folding --world 8", "plan schedule --name 1f1b --pp 2 --microbatches 4"])
def test_pictures_too(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    json = tmp_path / "result.json"
    assert main([*command.split(), "--json", str(json), "--svg", str(tmp_path / "file" / "a.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err and not json.exists()


def test_no_command_is_missing_here() -> None:
    writers = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for root, folder in ((ROOT / "src", "phalanx/cli"), (ROOT / "lab", "phalanx_lab"))
        for path in (root / folder).rglob("*.py")
        if "write_json(" in path.read_text()
    }
    assert writers == {
        "phalanx.cli.sync" if module == "phalanx.train.sync" else module for module, _ in COMMANDS.values()
    }


def test_asking_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("{}")
    for path in (old, new):
        check_writable(path)
    assert old.read_text() == "{}" and not new.exists()
    check_writable(None)
    with pytest.raises(RunError, match="cannot write"):
        check_writable(tmp_path)
    write_json(new, {"a": 1})
    assert '"a": 1' in new.read_text()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **options: object) -> None:
        path.write_bytes(text[:2].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("{}")
    old.chmod(0o600)
    link.symlink_to(old)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        for path in (old, link, tmp_path / "new.json"):
            with pytest.raises(RunError, match=rf"cannot write {path}: No space left on device"):
                write_text(path, "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "old.json"] and old.read_text() == "{}"
    write_text(link, "whole")
    assert link.is_symlink() and old.read_text() == "whole" and old.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    write_text(tmp_path / "pipe", "whole")
    assert os.read(reader, 100) == b"whole" and [p.name for p in tmp_path.iterdir()] == ["pipe"]
    os.close(reader)
