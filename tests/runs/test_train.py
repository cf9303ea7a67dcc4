"""Runs from the command line to the closing words: train, stop, go on with other ranks, read, write text."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from train_help import SETTINGS, Running, phalanx, start, start_program, train_args, write_text

from phalanx.cli.main import main
from phalanx.core.errors import RunError
from phalanx.core.process import usable_cores
from phalanx.observe.event_log import log_path, read_events, read_history
from phalanx.runtime.checkpoint.folder import CheckpointFolder
from phalanx_lab.bench.kill import ledger_problems
from phalanx_lab.testbed.slurm import free_ports

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def finished(base: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """8 steps on 4 ranks with ep 4."""
    done = phalanx("train", *train_args(base, observe__console="plain", folding__ep=4))
    assert done.returncode == 0, done.stderr
    return base / "runs" / "run", done


@pytest.mark.core
def test_a_run_ends_with_what_a_person_wants_to_know(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = finished
    text = done.stdout
    assert "101K parameters" in text and "on 4 ranks (dp4|ep4)" in text
    assert re.search(r"train loss       \d\.\d{4}\n", text)
    assert re.search(r"validation loss  [\d.]+  [\d.]+ (below|ABOVE) guessing", text)
    assert "It writes" in text and f"phalanx generate {folder}" in text and "finished" in text
    assert done.stderr == ""


def test_run_folder_holds_everything(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = finished
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    assert names == {"recipe.toml", "run_state.json", "checkpoints", "events", "tokenizer"}
    status = json.loads((folder / "run_state.json").read_text())
    assert (status["status"], status["step"], status["samples"], status["checkpoint_step"]) == ("finished", 8, 128, 8)
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000008\n"
    state = CheckpointFolder(folder / "checkpoints").read_state(8)
    assert (state.samples, state.tokens, state.world, state.folding["ep"]) == (128, 128 * 32, 4, 4)
    assert sorted(p.name for p in (folder / "events").iterdir()) == ["index", *(f"rank-{r}.jsonl" for r in range(4))]


def test_events_tell_the_course(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = finished
    history = read_history(folder)
    assert sorted(history.steps) == list(range(1, 9))
    first, last = history.steps[1], history.steps[8]
    assert first["loss"] > last["loss"] and first["tokens"] == 16 * 32
    assert last["mfu"] > 0 and last["peak_memory_bytes"] > 0 and len(last["load_max_over_mean"]) == 2
    assert history.ended is not None and history.ended["reason"] == "finished"
    assert [c["step"] for c in history.checkpoints] == [4, 8]
    losses = {tuple(read_history(folder, rank=r).steps[8][k] for k in ("loss", "grad_norm")) for r in range(4)}
    assert len(losses) == 1
    loads = [r for rank in range(4) for r in read_events(log_path(folder, rank)) if r["kind"] == "ExpertLoads"]
    assert loads and [len(layer) for layer in loads[0]["counts"]] == [8, 8], "rank 0 alone, at its first step"
    assert {r["step"] for r in loads} >= {1} and len(loads) <= 8
    layer = loads[0]["counts"][0]
    assert sum(layer) == 2 * first["tokens"], "each token chose two experts"
    assert max(layer) * 8 / sum(layer) == pytest.approx(first["load_max_over_mean"][0])


@pytest.mark.core
def test_goes_on_with_other_ranks_and_sees_every_sample_once(base: Path) -> None:
    common = {"run__name": "travelling", "train__deterministic": "true", "train__dtype": "float64"}
    for steps, ranks in ((4, 2), (8, 4), (12, 2)):
        done = phalanx("train", *train_args(base, **common, train__steps=steps, launch__ranks=ranks, folding__ep=ranks))
        assert done.returncode == 0, done.stderr
    folder = base / "runs" / "travelling"
    starts = [r for r in read_events(log_path(folder, 0)) if r["kind"] == "RunStarted"]
    assert [(r["step"], r["world"], r["folding"]) for r in starts] == [
        (0, 2, "dp2|ep2"),
        (4, 4, "dp4|ep4"),
        (8, 2, "dp2|ep2"),
    ]
    places = sorted(
        (r["step"], number, tuple(r["windows"][2 * i : 2 * i + 2]))
        for rank in range(4)
        for r in read_events(log_path(folder, rank))
        if r["kind"] == "SamplesTaken"
        for i, number in enumerate(r["microbatches"])
    )
    assert [p[:2] for p in places] == [(step, number) for step in range(1, 13) for number in range(8)]
    windows = [w for p in places for w in p[2]]
    assert len(set(windows)) == len(windows) == 12 * 16


NOTHING_DRAWN = """
import sys
import phalanx.models.layers as layers
from phalanx.cli.main import main
def refuse(draw):
    raise AssertionError(f"{draw.key} is drawn")
layers._drawn = refuse
sys.exit(main(sys.argv[1:]))
"""


def test_what_a_checkpoint_brings_is_not_drawn(base: Path) -> None:
    """For 235 billion parameters that would take minutes at each start."""
    common = {"launch__ranks": 1, "folding__ep": 1}
    assert phalanx("train", *train_args(base, run__name="drawn", train__steps=2, **common)).returncode == 0
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}  # fmt: skip
    for name, code in (("drawn", 0), ("from-nothing", 1)):
        again = [sys.executable, "-c", NOTHING_DRAWN, "train", *train_args(base, run__name=name, train__steps=4, **common)]  # fmt: skip
        done = subprocess.run(again, env={**os.environ, **rank}, capture_output=True, text=True, timeout=300)
        assert done.returncode == code and ("is drawn" in done.stderr) == (code == 1), done.stdout + done.stderr


def test_same_command_on_a_finished_run_says_so(
    finished: tuple[Path, subprocess.CompletedProcess[str]], base: Path
) -> None:
    done = phalanx("train", *train_args(base, observe__console="plain", folding__ep=4))
    assert done.returncode == 0, done.stderr
    assert "all 8 steps of this run are done" in done.stdout
    assert CheckpointFolder(finished[0] / "checkpoints").steps() == [4, 8]


@pytest.mark.core
def test_sources_with_fields_of_their_own_and_a_tokenizer_that_comes_out_smaller(tmp_path: Path) -> None:
    """Records, a table and a saved dataset together; the size is told once, and not again by the run that goes on."""
    texts = [f"Text {i} says {' '.join(str(i * j) for j in range(40))}.\n" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"content": t}) + "\n" for t in texts[:20]))
    pq.write_table(pa.table({"body": texts[20:40]}), tmp_path / "b.parquet")
    (tmp_path / "saved").mkdir()
    table = pa.table({"text": texts[40:]})
    with pa.ipc.new_stream(tmp_path / "saved" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    entries = [f"{tmp_path}/*.jsonl#content", f"{tmp_path}/b.parquet#body", f"{tmp_path}/saved"]
    told = "data.tokenizer = 'bpe:9000' came out with "
    for steps, times in ((1, 1), (2, 0)):
        changes = {
            "data.sources": json.dumps(entries),
            "data.tokenizer": "bpe:9000",
            "launch.ranks": 1,
            "folding.ep": 1,
        }
        done = phalanx("train", *train_args(tmp_path, observe__console="plain", train__steps=steps, **changes))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(told) == times
    notes = [e["text"] for e in read_events(log_path(tmp_path / "runs" / "run", 0)) if e["kind"] == "Note"]
    assert [text.startswith(told) for text in notes].count(True) == 1


def test_what_was_prepared_is_not_tokenised_by_the_run(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    args = train_args(tmp_path, train__steps=2, launch__ranks=2)
    at = [i for i, word in enumerate(args) if word.startswith("--data.")]
    done = phalanx("prepare", *(word for i in at for word in args[i : i + 2]), "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    folders = [Path(folder) for folder in json.loads((tmp_path / "found.json").read_text())["folders"]]
    before = {p: p.stat() for folder in folders for p in folder.iterdir()}
    done = phalanx("train", *args)
    assert done.returncode == 0, done.stderr
    assert {p: p.stat() for folder in (tmp_path / "cache" / "tokens").glob("[!.]*") for p in folder.iterdir()} == before


def test_ranks_have_a_large_source_tokenised_by_processes(tmp_path: Path) -> None:
    """Kilobytes count as large. In ranks, which have threads, and alone."""
    write_text(tmp_path / "text")
    code = (
        "import sys\nfrom phalanx.data import pieces, preparation\n"
        "preparation.LARGE_BYTES, pieces.PIECE_BYTES = 1000, (20000, 20000)\n"
        "started, start = [], pieces.start_program\n"
        "pieces.start_program = lambda *a, **k: print('a worker starts', flush=True) or start(*a, **k)\n"
        "from phalanx.cli.main import main\nsys.exit(main(sys.argv[1].split('\\n')))\n"
    )
    for ranks in (1, 2):
        args = train_args(tmp_path, train__steps=2, launch__ranks=ranks, run__name=f"r{ranks}", data__cache=str(tmp_path / f"c{ranks}"))  # fmt: skip
        running = start_program(code, "\n".join(["train", *args]))
        out, err = running.communicate(timeout=200)
        assert running.returncode == 0 and err == "", err
        assert out.count("a worker starts") == min(2, usable_cores()) * (usable_cores() > 1), out
        assert not list((tmp_path / f"c{ranks}" / "pieces").glob("[!.]*"))
    stores = [{p.name: p.read_bytes() for p in (tmp_path / f"c{ranks}" / "tokens").glob("[!.]*/*")} for ranks in (1, 2)]
    assert stores[0] == stores[1]


def test_recipe_of_the_run_folder_goes_on(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = finished
    done = phalanx(
        "train",
        str(folder / "recipe.toml"),
        "--trust",
        "--train.steps",
        "9",
        "--launch.ranks",
        "1",
        "--folding.ep",
        "1",
        "--launch.threads",
        "1",
    )
    assert done.returncode == 0, done.stderr
    history = read_history(folder)
    assert sorted(history.steps) == list(range(1, 10))
    assert (history.started["step"], history.started["world"]) == (8, 1)


def wait_for_step(process: Running, folder: Path, step: int, *, timeout_s: float = 90.0) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None:
        if log_path(folder, 0).exists() and step in read_history(folder).steps:
            return
        time.sleep(0.02)
    raise RunError(f"step {step} was not reached; exit code {process.poll()}")


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_finishes_the_step_saves_and_ends(base: Path, ranks: int) -> None:
    common = {
        "run__name": f"stopped{ranks}",
        "launch__ranks": ranks,
        "folding__ep": ranks,
        "checkpoint__interval": 1000,
        "observe__console": "plain",
    }
    process = start(["train", *train_args(base, **common, train__steps=5000)])
    folder = base / "runs" / f"stopped{ranks}"
    wait_for_step(process, folder, 3)
    if ranks == 1:
        second = phalanx("train", *train_args(base, **common, train__steps=5000))
        assert second.returncode == 2 and "trains this run" in second.stderr, second.stderr
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=360)
    assert process.returncode == 0, err
    assert "Finishing the step and saving a checkpoint. Press Ctrl-C again to stop immediately.\n" in out and err == ""
    found = re.search(r"stopped after step (\d+) of 5000", out)
    assert found is not None and f"go on from step {found[1]}" in out
    step = int(found[1])
    assert CheckpointFolder(folder / "checkpoints").steps() == [step]
    assert json.loads((folder / "run_state.json").read_text())["status"] == "interrupted"
    assert max(read_history(folder).steps) == step
    if ranks == 2:
        done = phalanx("train", *train_args(base, **common, train__steps=step + 1))
        assert done.returncode == 0 and f"resumed after step {step}" in done.stdout


@pytest.mark.parametrize("heal", ["false", "true"])
def test_a_terminal_that_closes_ends_the_run_in_good_order(base: Path, heal: str) -> None:
    """SIGHUP from the kernel, for which the last step is saved; whatever is still printed goes nowhere."""
    name = f"hangup-{heal}"
    args = {
        "run__name": name,
        "launch__ranks": 2,
        "resilience__heal": heal,
        "folding__ep": 1,
        "checkpoint__interval": 1000,
    }
    words = train_args(
        base, **args, observe__console="live", train__steps=50_000, resilience__mode="fast" if heal == "true" else None
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "phalanx", "train", *words])
    folder, end_s = base / "runs" / name, time.monotonic() + 120
    while time.monotonic() < end_s and not (log_path(folder, 0).exists() and 3 in read_history(folder).steps):
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert json.loads((folder / "run_state.json").read_text())["status"] == "interrupted"
    assert CheckpointFolder(folder / "checkpoints").steps() == [max(read_history(folder).steps)]


def test_under_torchrun(base: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "phalanx", "train"]
    args = train_args(base, run__name="torchrun", launch__ranks=None, train__steps=4)
    done = subprocess.run([sys.executable, *launcher, *args], capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    history = read_history(base / "runs" / "torchrun")
    assert history.started["world"] == 2 and sorted(history.steps) == [1, 2, 3, 4]
    assert json.loads((base / "runs" / "torchrun" / "run_state.json").read_text())["status"] == "finished"


def test_mapping_does_not_change_the_loss(base: Path) -> None:
    """One rank and four ranks, the same steps: in float64 the losses agree to rounding."""
    curves = []
    for ranks in (1, 4):
        name = f"same{ranks}"
        args = train_args(
            base, run__name=name, launch__ranks=ranks, launch__threads=1, train__dtype="float64", train__steps=3
        )
        done = phalanx("train", *args)
        assert done.returncode == 0, done.stderr
        history = read_history(base / "runs" / name)
        curves.append([history.steps[s]["loss"] for s in (1, 2, 3)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-12)


def test_ledger_check_can_fail() -> None:
    from collections import Counter

    good = Counter({(1, 0, (5, 6)): 1, (1, 1, (7, 8)): 1, (2, 0, (1, 2)): 1, (2, 1, (3, 4)): 1})
    assert ledger_problems(good, good, steps=2) == []
    lost = good - Counter({(2, 1, (3, 4)): 1})
    assert any("miss micro-batches" in p for p in ledger_problems(good, lost, steps=2))
    twice = good + Counter({(2, 1, (3, 4)): 1})
    assert any("trained on twice" in p for p in ledger_problems(good, twice, steps=2))
    exchanged = lost + Counter({(2, 1, (5, 6)): 1})
    found = ledger_problems(good, exchanged, steps=2)
    assert any("seen twice" in p for p in found) and any("other sequences" in p for p in found)


def test_settings_of_these_tests_are_real() -> None:
    from phalanx.core.settings import describe_settings

    assert set(SETTINGS) <= {s.name for s in describe_settings()}


def test_generate_reads_any_mapping_in_one_process(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = str(finished[0])
    args = ["generate", folder, "import ", "--tokens", "20", "--threads", "1"]
    first, again = (phalanx(*args) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("import ") and first.stdout == again.stdout
    likeliest = phalanx(*args, "--temperature", "0", "--step", "4")
    assert likeliest.returncode == 0 and likeliest.stdout != first.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["RUN", "x", "--tokens", "0"], "--tokens = 0: must be at least 1"),
        (["RUN", "x", "--seed", "-1"], "--seed = -1: must lie between 0 and 2**63 - 1"),
        (["RUN", "\udcff"], r"PROMPT = '\udcff': must be UTF-8 text"),
        (["RUN", "x", "--temperature", "0", "--top-k", "3"], "has no effect with --temperature 0"),
        (["RUN", "x", "--chat"], "--chat = true: asks for a conversation, and the run was trained on none"),
        (["RUN", "--chat"], "must say something with --chat"),
        (["RUN", "x", "--step", "5"], "checkpoint.step = 5: there is no such checkpoint; there are checkpoints of steps 4, 8"),
        (["RUNS"], "is not a run folder (it has no recipe.toml); runs next to it: "),
    ],
)  # fmt: skip
def test_generate_names_what_is_wrong(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    text: str,
) -> None:
    words = {"RUN": str(finished[0]), "RUNS": str(finished[0].parent / "none")}
    assert main(["generate", *(words.get(a, a) for a in args)]) == 2
    assert text in capsys.readouterr().err


def test_dry_run_starts_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = train_args(base, run__name="dry", folding__ep=2, launch__ranks=4)
    assert main(["train", "--dry-run", *args]) == 0
    text = capsys.readouterr().out
    for words in (
        "etp 1 x ep 2 x edp 2",
        "process groups",
        "101K, ",
        "8 of 16 sequences x 32 tokens",
        "2 micro-batches of 2 sequences",
    ):
        assert words in text, text
    assert not (base / "runs" / "dry").exists()


def test_dry_run_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model.preset mixtral-8x7b --launch.ranks 64 --folding.ep 8 --train.seq_len 4096 --train.micro_batch 1 --train.global_batch 256"
    assert main(["train", "--dry-run", *words.split()]) == 0
    text = capsys.readouterr().out
    assert "64 ranks" in text and "46.5B" in text and "4 micro-batches of 1 sequences" in text
