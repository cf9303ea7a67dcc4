"""A run folder that an earlier version wrote (commit 48a5eed, before the code was moved into rooms) goes on as that version would have gone on.

`stored/run-48a5eed.tar.xz` holds the text and, after 4 of its steps, the folder of: `phalanx train --model.preset tiny --model.hidden 16 --model.num_layers 2 --model.expert_ffn 16
--data.tokenizer byte --data.sources text --data.validation_fraction 0.2 --train.steps 4 --train.seq_len 32 --train.global_batch 8 --train.micro_batch 2 --train.dtype float32
--checkpoint.interval 4 --launch.ranks 2 --launch.threads 1 --folding.ep 1` (its ranks are replaced when they die, by default).
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from train_help import phalanx

from phalanx.cli.main import main
from phalanx.observe.event_log import read_history

pytestmark = pytest.mark.ranks
STORED = Path(__file__).parent / "stored" / "run-48a5eed.tar.xz"
LOSSES = {4: 5.6590482, 5: 5.6535485, 6: 5.6282653, 7: 5.6107222, 8: 5.6033756}
"""What that version trained: step -> loss; it went on by itself from step 4 to step 8."""


@pytest.mark.core
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(STORED) as stored:
        stored.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    run = tmp_path / "runs" / "stored"
    here = {"run.folder": run.parent, "data.sources": f'["{tmp_path / "text"}"]', "data.cache": tmp_path / "cache"}
    changed = here | {"train.steps": 8}
    words = [str(word) for key, value in changed.items() for word in (f"--{key}", value)]
    done = phalanx("train", str(run / "recipe.toml"), *words)
    assert done.returncode == 0, done.stderr
    history = read_history(run)
    assert history.started["step"] == 4
    for step, loss in LOSSES.items():
        assert history.steps[step]["loss"] == pytest.approx(loss, rel=1e-5)
    assert main(["metrics", str(run)]) == 0
    assert "8 of 8 steps (finished, 2 starts)" in capsys.readouterr().out
