"""`phalanx calibrate`: constants come back from times that were computed with them, files say what was wrong with them all at once."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.core.errors import ConfigError
from phalanx.simulate.calibration.fit import (
    Calibration,
    Measurements,
    TimedAttention,
    TimedCollective,
    TimedProduct,
    TimedStream,
    calibrate,
    without_tables,
)
from phalanx.simulate.hardware.clusters import known_hardware, load_hardware, parse_cluster, parse_hardware
from phalanx.simulate.hardware.collectives import GroupSpan, Network, beside
from phalanx.simulate.hardware.cost import Oracle

pytestmark = pytest.mark.unit
RATE = {"bf16": 4e11, "fp32": 1e11}
COPY, SHARE, KERNEL_S, LATENCY_S, LINK = 1e10, 0.5, 2e-5, 1e-4, {2: 2e9, 4: 1e9}


def product(m: int, n: int, k: int, precision: str, *, share: float = 0.8) -> TimedProduct:
    width = {"bf16": 2, "fp32": 4}[precision]
    bound = max(2 * m * n * k / (share * RATE[precision]), width * (m * k + m * n + k * n) / (COPY * SHARE))
    return TimedProduct(m=m, n=n, k=k, precision=precision, seconds=KERNEL_S * 4 / 3 + bound)


def link(what: str, ranks: int, num_bytes: float) -> TimedCollective:
    steps = 2 if what == "all_reduce" else 1
    share = 1.0 if what == "send" else (ranks - 1) / ranks
    seconds = steps * (LATENCY_S + share * num_bytes / LINK[ranks])
    return TimedCollective(what=what, ranks=ranks, num_bytes=num_bytes, seconds=seconds)


MEASURED = Measurements(
    title="a machine",
    ranks=4,
    threads=1,
    memory_bytes=1e10,
    copy_bytes_per_s=COPY,
    launch_s=1e-6,
    products=tuple(product(m, n, n, kind) for kind in RATE for m in (64, 512, 4096) for n in (256, 1024, 4096)),
    experts=(TimedProduct(m=512, n=512, k=256, groups=4, precision="bf16", seconds=2e-3),),
    attention=tuple(
        TimedAttention(seq=s, heads=a, dim=64, forward_s=s * s * a * 64 * 1e-11, backward_s=s * s * a * 64 * 3e-11)
        for a in (4, 8)
        for s in (256, 1024)
    ),
    streams=tuple(
        TimedStream(what="sum", moved_bytes=x, seconds=x / (COPY * SHARE) + KERNEL_S) for x in (1e4, 1e6, 1e8)
    ),
    links=tuple(
        link(what, n, size)
        for n in (2, 4)
        for what in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for size in (256.0, 65536.0, 16777216.0)
    ),
)


@pytest.fixture(scope="module")
def made() -> Calibration:
    return calibrate(MEASURED, name="here", when="2026-01-01")


def test_constants_come_back(made: Calibration) -> None:
    h = made.hardware
    assert h.memory_efficiency == pytest.approx(SHARE, rel=0.02) and h.kernel_s == pytest.approx(KERNEL_S, rel=0.1)
    assert h.bf16_flops_per_s * h.gemm_efficiency == pytest.approx(0.8 * RATE["bf16"], rel=0.02)
    assert h.fp32_flops_per_s and h.fp32_efficiency
    assert h.fp32_flops_per_s * h.fp32_efficiency == pytest.approx(0.8 * RATE["fp32"], rel=0.02)
    assert h.inside_latency_s == pytest.approx(LATENCY_S, rel=0.1)
    assert dict(h.inside_bytes_per_s) == {n: pytest.approx(rate, rel=0.1) for n, rate in LINK.items()}
    assert h.attention_backward == pytest.approx(2.5 / 3)
    kinds = ("products bf16", "products fp32", "memory", "link all_reduce", "link all_to_all")
    assert all(made.errors[kind].median < 0.05 for kind in kinds), made.errors
    measured = {key: source for key, source in h.sources.items() if key != "fp8_efficiency"}
    assert all("phalanx calibrate on 2026-01-01, 4 ranks of 1 threads" in source for source in measured.values())


def test_a_row_that_was_disturbed_moves_nothing(made: Calibration) -> None:
    first, *rest = MEASURED.products
    disturbed = replace(MEASURED, products=(replace(first, seconds=first.seconds * 20), *rest))
    again = calibrate(disturbed, name="here", when="2026-01-01")
    assert again.hardware.gemm_efficiency == pytest.approx(made.hardware.gemm_efficiency, rel=0.02)
    assert again.errors["products bf16"].worst > 0.9 and "64 x 256 x 256" in again.errors["products bf16"].worst_row


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_written_file_is_a_cluster(made: Calibration, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"here.{suffix}"
    path.write_text(made.to_toml() if suffix == "toml" else made.to_json())
    assert parse_cluster(str(path)).hardware == made.hardware
    assert parse_cluster(str(path)).world == 4 and parse_cluster(f"{path}:16").world == 16
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "laptop"\nvocab = 8192\n[train]\nseq_len = 256\nglobal_batch = 32\n')
    assert main(["simulate", str(recipe), "--cluster", str(path)]) == 0
    search = ["search", "--model", "laptop", "--seq", "256", "--batch", "32", "--cluster", str(path)]
    assert main(search) == 0


@pytest.mark.parametrize("title", ['a "b" \\ é', "\U0001f600 x", "tab\tline\n", "\x7f\x1f", "[a] = {}"])
def test_whatever_a_machine_is_called_its_file_can_be_read(title: str) -> None:
    found = calibrate(replace(MEASURED, title=title), name="here", when="2026-01-01")
    assert tomllib.loads(found.to_toml()) == json.loads(found.to_json())


def test_tables_of_products_and_experts_come_before_the_formula(made: Calibration) -> None:
    """A file holds both types of both; each is used for what is near it, and only for its own type."""
    h = made.hardware
    assert len(h.measured_gemm) == len(h.measured_gemm_fp32) == 9 and h.measured_experts == ((512, 512, 256, 4, 2e-3),)
    slow = replace(h, measured_gemm=(), measured_gemm_fp32=((512, 1024, 1024, 0.7),), measured_experts=())
    wide, narrow = Oracle(slow, "fp32"), Oracle(slow)
    assert wide.gemm(512, 1024, 1024).origin == "measured" and narrow.gemm(512, 1024, 1024).origin == "formula"
    assert wide.product(512, 1024, 1024) == pytest.approx(0.7, rel=0.01)
    # two products of 4 experts: with the activation between them what was measured of both
    o = Oracle(h)
    both = o.product(512, 1024, 256, groups=4) + o.product(512, 256, 512, groups=4)
    bare = Oracle(without_tables(h))
    formula = bare.product(512, 1024, 256, groups=4) + bare.product(512, 256, 512, groups=4)
    assert 1e-3 < both < 2e-3 < 10 * both and formula < both
    assert o.gemm(512, 1024, 256, groups=4).origin == "near a measurement"
    assert o.product(512, 1024, 256, groups=64) == Oracle(replace(h, measured_experts=())).product(
        512, 1024, 256, groups=64
    )


def test_measured_links_come_before_the_formula(made: Calibration) -> None:
    table = (("all_to_all", 2, 1000.0, 1.0), ("all_to_all", 2, 4000.0, 2.0))
    network, span = Network(replace(made.hardware, measured_links=table)), GroupSpan(2, 1)
    assert network.all_to_all(1000.0, span) == pytest.approx(1.0)
    assert network.all_to_all(2000.0, span) == pytest.approx(2.0**0.5)
    formula = Network(replace(made.hardware, measured_links=()))
    beyond = formula.all_to_all(8000.0, span) / formula.all_to_all(4000.0, span)
    assert network.all_to_all(8000.0, span) == pytest.approx(2.0 * beyond)
    assert network.all_gather(1000.0, span) == formula.all_gather(1000.0, span)
    assert network.all_to_all(1000.0, GroupSpan(4, 1)) == formula.all_to_all(1000.0, GroupSpan(4, 1))


def test_float32_has_a_rate_of_its_own(made: Calibration) -> None:
    slow, fast = Oracle(made.hardware, "fp32"), Oracle(replace(made.hardware, measured_gemm=()), "bf16")
    shape = (4096, 4096, 4096)
    assert slow.product(*shape) / fast.product(*shape) == pytest.approx(RATE["bf16"] / RATE["fp32"], rel=0.05)


def test_impossible_measurements_are_all_told() -> None:
    bad = replace(
        MEASURED,
        launch_s=-1.0,
        streams=(),
        products=(replace(MEASURED.products[0], seconds=0.0), *MEASURED.products[1:]),
        links=(TimedCollective(what="shout", ranks=2, num_bytes=1.0, seconds=1.0),),
    )
    with pytest.raises(ConfigError) as caught:
        calibrate(bad, name="here", when="today")
    told = str(caught.value)
    assert all(word in told for word in ("launch_s", "streams", "products[0].seconds", "links[0].what", "shout")), told


def test_what_is_wrong_with_a_file_is_all_told(made: Calibration) -> None:
    table = json.loads(made.to_json())
    table["kernels_s"] = {"value": 1, "source": "a typing mistake"}
    table["inside"]["latency"] = {"value": 1, "source": "another"}
    table["bf16_flops_per_s"]["value"] = -1.0
    table["memory_efficiency"]["value"] = 0
    table["launch_s"] = {"value": 1e-6}
    table["measured"] = {"gemm": [[1, 2, 3, 0]], "links": [["shout", 2, 1, 1]], "kernels": []}
    with pytest.raises(ConfigError) as caught:
        parse_hardware(json.dumps(table), name="here", where="here.json")
    told = str(caught.value)
    wanted = ("kernels_s", "did you mean 'kernel_s'", "inside.latency", "bf16_flops_per_s", "memory_efficiency",
              "launch_s", "measured.gemm", "measured.links", "measured.kernels")  # fmt: skip
    assert all(word in told for word in wanted), told


@pytest.mark.parametrize("text", ["[]", "{", "nothing"])
def test_what_is_no_table_is_told(text: str) -> None:
    for where in ("x.json", "x.toml"):
        if (text, where) != ("[]", "x.toml"):
            with pytest.raises(ConfigError):
                parse_hardware(text, name="x", where=where)


def test_arguments_are_checked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "cluster.txt", "--ranks", "0"]) == 2
    told = capsys.readouterr().err
    assert "--out" in told and "--ranks" in told


@pytest.mark.parametrize("name", known_hardware())
def test_every_constant_of_the_files_that_come_along_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    tables = {name for name in vars(hardware) if name.startswith("measured_")}
    constants = set(vars(hardware)) - {"name", "title", "sources"} - tables
    without = {key for key in constants if key not in hardware.sources and getattr(hardware, key) is not None}
    assert not without


def test_processors_have_no_multiprocessors(made: Calibration, tmp_path: Path) -> None:
    """What a rank's one thread hides does not cost sixteen times itself, nor do old files that called threads multiprocessors make it so."""
    path = tmp_path / "here.json"
    path.write_text(json.dumps(made.table))
    hardware = parse_cluster(str(path)).hardware
    assert (hardware.sms, hardware.threads) == (None, 1)
    assert hardware.share_of(16) == 0
    old = replace(hardware, sms=1, threads=None)
    assert old.share_of(16) == 1
    assert load_hardware("h100").share_of(33) == pytest.approx(0.25)
    assert beside(1.0, 10.0, old.share_of(16)) == 1.0
    assert beside(3.0, 2.0, 0.25) == 1.5


def test_a_file_is_of_devices_or_of_processors(made: Calibration) -> None:
    table = json.loads(json.dumps(made.table))
    table["sms"] = table["threads"]
    with pytest.raises(ConfigError, match="cannot go with threads"):
        parse_hardware(json.dumps(table), name="x", where="x.json")
    del table["threads"]
    with pytest.raises(ConfigError, match=r"counts threads.*calibrate again"):
        parse_hardware(json.dumps(table), name="x", where="x.json")
