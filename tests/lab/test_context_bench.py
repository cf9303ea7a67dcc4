"""`phalanx bench context`: what is kept falls with cp, a check that says so can fail, and bad input is refused before any process starts."""

import dataclasses
import json
from pathlib import Path

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx_lab.bench import context
from phalanx_lab.bench.context import ContextArgs, Measured, falls, measure

RUN = Measured(cp=1, method="ring", seq_len=64, saved_bytes=100, peak_bytes=200, step_s=1.0, loss=5.5, finite=True)


def runs(*saved: int, **changes: object) -> list[Measured]:
    return [dataclasses.replace(RUN, cp=1 << i, saved_bytes=n, **changes) for i, n in enumerate(saved)]  # type: ignore[arg-type]


def test_falls_fails_where_a_larger_degree_keeps_as_much() -> None:
    assert falls(runs(100, 50, 25)) and falls(runs(100))
    assert not falls(runs(100, 50, 50)) and not falls(runs(100, 120))
    assert falls(list(reversed(runs(100, 50))))  # the order in which they were measured does not matter
    assert not falls([*runs(100, 50), *runs(100, 100, method="ulysses")])  # every method for itself


@pytest.mark.ranks
def test_two_ranks_keep_half_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "context.json"
    words = ["--seq-len", "1024", "--degrees", "1", "2", "--long", "2048", "--json", str(file)]
    assert context.main(words) == 0
    found = json.loads(file.read_text())
    one, two = found["runs"]
    assert found["falls"] and (one["cp"], two["cp"]) == (1, 2)
    assert two["saved_bytes"] == pytest.approx(one["saved_bytes"] / 2, rel=0.02)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5) and two["finite"]
    assert found["long"]["seq_len"] == 2048 and found["long"]["cp"] == 2
    assert found["long"]["saved_bytes"] == pytest.approx(one["saved_bytes"], rel=0.02)
    said = capfd.readouterr()
    assert "cp 2" in said.out and "falls" in said.out
    assert "[3/3]" in said.err, "a line for what is under way"


def test_a_missed_fall_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(context, "run", lambda job: dataclasses.replace(RUN, cp=job.cp))
    assert context.main(["--seq-len", "64", "--degrees", "1", "2"]) == 1
    assert "FAILED: a larger degree" in capsys.readouterr().out


def test_a_number_that_is_not_finite_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: context.Work) -> Measured:
        return dataclasses.replace(
            RUN, cp=job.cp, saved_bytes=100 // job.cp, seq_len=job.seq_len, finite=job.seq_len == 64
        )

    monkeypatch.setattr(context, "run", run)
    assert context.main(["--seq-len", "64", "--degrees", "1", "2"]) == 0
    assert context.main(["--seq-len", "64", "--degrees", "1", "2", "--long", "128"]) == 1
    assert "128 tokens" in capsys.readouterr().out


def test_bad_input_is_refused_before_any_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(job: object) -> Measured:
        raise AssertionError("a measurement was started")

    monkeypatch.setattr(context, "run", started)
    wrong = ContextArgs(seq_len=100, degrees=(0, 3, 8, 8), methods=("ring", "ulysses"), documents=0, long=-4)
    with pytest.raises(ConfigError) as caught:
        measure(wrong)
    text = str(caught.value)
    for words in ("the sequence of 100", "degrees", "documents", "long", "ulysses"):
        assert words in text, text
    with pytest.raises(ConfigError, match="degrees"):
        measure(ContextArgs(degrees=()))
    with pytest.raises(ConfigError, match="documents = 65"):
        measure(ContextArgs(seq_len=64, degrees=(1,), documents=65))
    with pytest.raises(ConfigError, match="seq_len = 0"):
        measure(ContextArgs(seq_len=0, degrees=(1,)))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        context.main(["--json", str(tmp_path / "file" / "result.json")])
