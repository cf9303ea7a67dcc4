"""`phalanx bench fuzz`: what its writers made is read, what is changed is read or refused, and what is planted is found."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tiers import ALL, SEED
from train_help import phalanx

from phalanx.core.errors import ConfigError
from phalanx_lab.bench.fuzz.command import FuzzArgs, changed, chosen, fuzz
from phalanx_lab.bench.fuzz.mutate import change_bytes
from phalanx_lab.bench.fuzz.readers import FuzzReader, all_readers


def misbehave(data: bytes, _: Path) -> None:
    what = data[0] % 6
    if what == 0:
        raise ConfigError.of("a", 1, "must be 2", subject="a")
    if what == 1:
        raise IndexError("planted")
    if what == 2:
        np.ones(1 << 30)
    if what == 3:
        time.sleep(60)
    if what == 4:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path: Path) -> None:
    reader = FuzzReader(
        name="planted", seeds=[bytes([i]) for i in range(6)], changes=(lambda data, _: data,), read=misbehave
    )
    options = FuzzArgs(cases=24, limit_s=1.0, memory_gb=4.0)
    result = fuzz([reader], options, tmp_path)
    wanted = [changed([reader], 0, case)[1][0] for case in range(24)]
    ends = ["refused", "traceback", "memory", "hang", "ended", "read"]
    assert result.cases == 24 and result.endings["planted"] == {
        end: wanted.count(i) for i, end in enumerate(ends) if i in wanted
    }
    assert [(f.case, f.end) for f in result.findings] == [
        (case, ends[w]) for case, w in enumerate(wanted) if w in (1, 2, 3, 4)
    ]
    assert any("planted" in f.text for f in result.findings)


@pytest.mark.slow
def test_what_is_unchanged_is_read(tmp_path: Path) -> None:
    """Else changes would not reach deep."""
    for reader in all_readers(tmp_path / "seeds"):
        for number, seed in enumerate(reader.seeds):
            if reader.every == 1 and reader.name != "words":
                folder = tmp_path / f"{reader.name.replace('/', '-')}-{number}"
                folder.mkdir()
                reader.read(seed, folder)


@pytest.mark.unit
def test_a_case_is_what_seed_and_number_give() -> None:
    readers = [
        FuzzReader(name=n, seeds=[b"abcdefgh" * 9], changes=(change_bytes,), read=misbehave, every=e)
        for n, e in (("a", 1), ("b", 3))
    ]
    first = [changed(readers, 5, case) for case in range(40)]
    assert first == [changed(readers, 5, case) for case in range(40)]
    assert [r.name for r, _ in first[1::2]].count("b") >= 7 and first[1][0].name == "b" and first[3][0].name == "a"
    assert first[0][1] != changed(readers, 6, 0)[1] and change_bytes(b"", random.Random(0)) is not None
    with pytest.raises(ConfigError, match="names no reader"):
        chosen(readers, FuzzArgs(only="c"))


@pytest.mark.core
def test_every_file_and_message_of_today_is_read_or_refused(tmp_path: Path) -> None:
    """A fresh seed each day; a minute with all tests, else ten seconds."""
    seconds = 60 if ALL else 10
    found = phalanx(
        "bench",
        "fuzz",
        "--cases",
        "1000000",
        "--seconds",
        str(seconds),
        "--seed",
        str(SEED),
        "--json",
        str(tmp_path / "f.json"),
    )
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads((tmp_path / "f.json").read_text())
    assert told["cases"] > 100 and (told["tracebacks"], told["hangs"], told["over_memory"]) == (0, 0, 0)
