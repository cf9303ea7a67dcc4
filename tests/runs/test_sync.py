"""Weights of a run on an inference mesh of another layout: the same bits, under the cap, or a clear refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from train_help import phalanx, train_args, write_text

from phalanx.cli.main import main
from phalanx.train.generation import load_model

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 steps on 4 ranks with pp 2 x ep 2, with an expert bias."""
    base = tmp_path_factory.mktemp("sync")
    write_text(base / "text", files=4)
    more = {"train__steps": 4, "folding__pp": 2, "folding__ep": 2, "router__bias_rate": 0.001}
    done = phalanx("train", *train_args(base, **more))
    assert done.returncode == 0, done.stderr
    return base / "runs" / "run"


def delivered(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors, put together from every rank's file by what the index says; replicas must agree."""
    index = json.loads((folder / "index.json").read_text())
    files = [safe_open(folder / name, framework="pt") for name in index["files"]]
    whole = {}
    for name, entry in index["tensors"].items():
        out, seen = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"])), torch.zeros(entry["shape"])
        for rank, held in entry["held"].items():
            local = files[int(rank)].get_tensor(name)
            for h in held:
                at = tuple(slice(o, o + n) for o, n in zip(h["offsets"], h["sizes"], strict=True))
                here = local[tuple(slice(o, o + n) for o, n in zip(h["local"], h["sizes"], strict=True))]
                fresh = seen[at] == 0
                assert torch.equal(out[at][~fresh], here[~fresh]), name
                out[at], seen[at] = here, 1
        assert bool(seen.all()), name
        whole[name] = out
    return whole


@pytest.mark.core
@pytest.mark.parametrize(
    ("to", "more"),
    [
        ("tp2.dp2.ep4", ["--memory", "64KB", "--readers", "3", "--check"]),
        ("tp4.etp4", ["--dtype", "bfloat16"]),
        ("tp1", ["--readers", "1", "--memory", "48KB", "--step", "4"]),
    ],
)
def test_weights_arrive_bit_for_bit_under_the_cap(run: Path, tmp_path: Path, to: str, more: list[str]) -> None:
    report = tmp_path / "figures.json"
    done = phalanx("sync", str(run), "--to", to, "--out", str(tmp_path / "out"), "--json", str(report), *more)
    assert done.returncode == 0, done.stderr
    model = load_model(run).model
    want = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if "expert_bias" in n}}
    found = delivered(tmp_path / "out")
    assert set(found) == set(want)
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name].detach().to(tensor.dtype)), name
    figures = json.loads(report.read_text())
    assert figures["peak_held_bytes"] <= figures["memory_bytes"] and figures["waves"] >= 1
    assert figures["waves"] > 3 or "--memory" not in more
    total = sum(t.numel() * t.element_size() for t in found.values())
    assert sum(r["received_bytes"] for r in figures["ranks"]) >= total
    assert (figures["compared_bytes"] >= total) == ("--check" in more)
    assert not list(tmp_path.glob(".writing-*"))


def test_what_cannot_be_done_is_refused_at_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    args = ["--to", "tp3", "--out", str(tmp_path / "full"), "--dtype", "float8", "--readers", "0"]
    assert main(["sync", str(run), *args]) == 2
    err = capsys.readouterr().err
    for text in ("must divide num_heads", "exists already", "is not a known data type", "--readers = 0"):
        assert text in err
    for memory, text in (("1KB", "the least is"), ("a lot", "is not a number of bytes")):
        assert main(["sync", str(run), "--to", "tp2", "--out", str(tmp_path / "new"), "--memory", memory]) == 2
        assert text in capsys.readouterr().err
    assert main(["sync", str(run), "--to", "xp2", "--out", str(tmp_path / "new")]) == 2
    assert "--to = 'xp2': is made of degrees" in capsys.readouterr().err
    assert main(["sync", str(tmp_path), "--to", "tp2", "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_all_words_that_are_wrong_are_named_together(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "tp4.foo2", "--memory", "3x", "--readers", "0", "--dtype", "fp8", "--out", str(tmp_path / "new")]
    assert main(["sync", str(run), *words]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("--to = 'tp4.foo2'", "--memory = '3x'", "--readers = 0", "--dtype = 'fp8'"))
