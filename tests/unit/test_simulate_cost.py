"""Hardware files, cost of operations and collectives, against published operator values and common sense."""

import math
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import given, strategies as st

from phalanx.core.errors import ConfigError
from phalanx.simulate.hardware.clusters import at, known_hardware, load_hardware, parse_cluster, parse_hardware
from phalanx.simulate.hardware.collectives import GroupSpan, Network, distinct, span_of
from phalanx.simulate.hardware.cost import Oracle
from phalanx.simulate.mapping.routing import RouterModel

pytestmark = pytest.mark.unit
H100 = load_hardware("h100")
H100_FILE = resources.files("phalanx.simulate") / "data" / "clusters" / "h100.toml"
NET = Network(H100)
ROWS = 4096 * 8 * 7168 * 2
"""Bytes that a rank dispatches: 4096 tokens, top-8, hidden 7168, bf16 (arXiv 2603.07685, table 7)."""


# ---- files ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_hardware())
def test_every_constant_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    assert len(hardware.sources) >= 17
    assert all(len(source) > 5 for source in hardware.sources.values())


def test_clusters_of_the_issue_are_there() -> None:
    assert {"a100", "h100", "h800", "h200", "b200"} <= set(known_hardware())
    cluster = parse_cluster("h100x128")
    assert (cluster.world, cluster.hosts) == (128, 16)
    assert cluster.hash == parse_cluster("H100x128").hash != parse_cluster("h200x128").hash


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h10x8", "did you mean 'h100'"),
        ("h100", "is not HARDWARExRANKS"),
        ("h100x0", "needs at least 1 rank"),
        ("h100x-8", "is not HARDWARExRANKS"),
        ("nowhere.toml:8", "cannot be read"),
        ("nowhere.toml:many", "needs a number of ranks"),
    ],
)
def test_bad_clusters_are_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_cluster(text)


def test_a_bad_file_names_all_its_problems(tmp_path) -> None:
    good = (tmp_path / "x.toml").resolve()
    text = H100_FILE.read_text()
    text = text.replace("sms = {", "cores = {").replace(
        'memory_bytes = { value = 8.49e10, source = "80 GB', 'memory_bytes = { value = -1, source = "80 GB'
    )
    text = text.replace("gemm_efficiency = { value = 0.645", "gemm_efficiency = { value = 1.62").replace(
        "latency_s = { value = 2e-5, source", "latency_s = { value = 2e-5, sauce"
    )
    good.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_cluster(f"{good}:16")
    found = str(error.value)
    assert "5 problems" in found
    for word in (
        "sms",
        "cores",
        "memory_bytes",
        "gemm_efficiency",
        "between_latency_s",
        "is missing",
        "above 0",
        "at most 1",
        "source",
    ):
        assert word in found
    with pytest.raises(ConfigError, match=r"x\.toml"):
        parse_hardware("a = [", name="x", where="x.toml")


@pytest.mark.parametrize(("name", "value"), [("ranks_per_host", "0.5"), ("sms", "132.7")])
def test_counts_of_a_file_are_whole(tmp_path, name: str, value: str) -> None:
    path = tmp_path / "mine.toml"
    lines = H100_FILE.read_text().splitlines()
    path.write_text(
        "\n".join(f'{name} = {{ value = {value}, source = "me" }}' if x.startswith(f"{name} =") else x for x in lines)
    )
    with pytest.raises(ConfigError, match=f"{name} = {value}: is a whole number"):
        parse_cluster(f"{path}:16")


def test_a_file_of_ones_own(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(H100_FILE.read_text() + "\n[measured]\ngemm = [[4096, 4096, 4096, 1e-3]]\n")
    cluster = parse_cluster(f"{path}:16")
    assert parse_cluster(cluster.word) == cluster and parse_cluster("H100x8").word == "h100x8"
    assert cluster.name == "minex16" and load_hardware(str(path)) == cluster.hardware
    cost = Oracle(cluster.hardware).gemm(4096, 4096, 4096)
    assert cost.origin == "measured"
    assert cost.seconds == pytest.approx(1e-3, rel=0.02)
    near = Oracle(cluster.hardware).gemm(4096, 4096, 6000)
    assert near.origin == "near a measurement"
    assert Oracle(cluster.hardware).gemm(64, 64, 64).origin == "formula"
    path.write_text(H100_FILE.read_text() + "\n[measured]\ngemm = [[4096, 0, 4096, 1e-3]]\n")
    with pytest.raises(ConfigError, match="all above 0"):
        parse_cluster(f"{path}:16")


# ---- operations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "ffn", "local", "rows_each", "tflops"),
    [
        (4096, 1536, 128, 256, 487), (4096, 1536, 128, 1024, 632), (4096, 1536, 16, 256, 416), (4096, 1536, 16, 1024, 593),
        (4096, 1536, 4, 256, 294), (4096, 1536, 4, 1024, 481), (2048, 768, 16, 256, 253), (2048, 768, 16, 1024, 387),
        (2048, 768, 4, 1024, 257),
    ],
)  # fmt: skip
def test_grouped_experts_follow_the_operator_table(
    hidden: int, ffn: int, local: int, rows_each: int, tflops: int
) -> None:
    """aiconfigurator, H100: MoE operation with permutation, short runs (full clocks: efficiency 0.8, not the 0.62 of training)."""
    o = Oracle(replace(H100, gemm_efficiency=0.8))
    rows = local * rows_each
    seconds = o.product(rows, 2 * ffn, hidden, groups=local) + o.product(rows, hidden, ffn, groups=local)
    seconds += o.memory(rows * 3 * ffn * 2) + o.memory(4 * rows * hidden * 2, kernels=4) + 10 * H100.launch_s
    measured = 2 * rows * 3 * hidden * ffn / (tflops * 1e12)
    assert seconds == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "forward", "gradient"),
    [
        (40, 616, 3072, 5120, 0.631, 0.520), (40, 616, 5120, 1536, 0.629, 0.520), (20, 1232, 3072, 5120, 0.707, 0.604),
        (20, 1232, 5120, 1536, 0.675, 0.637), (1, 4096, 16384, 5120, 0.755, 0.719), (1, 24640, 3072, 5120, 0.741, 0.761),
    ],
)  # fmt: skip
def test_weight_gradients_follow_the_operator_table(
    groups: int, rows: int, n: int, k: int, forward: float, gradient: float
) -> None:
    """SimuMax, A100 PCIe (312 TFLOPS, 1.6 TB/s of which it reaches 0.91): share of the peak, weight gradients summed in fp32."""
    o = Oracle(replace(load_hardware("a100"), gemm_efficiency=0.74, memory_bytes_per_s=1.6e12, memory_efficiency=0.91))
    work = 2 * groups * rows * n * k / 312e12
    assert o.product(groups * rows, n, k, groups=groups) == pytest.approx(work / forward, rel=0.2)
    assert o.product(groups * rows, n, k, groups=groups, accumulate=True) == pytest.approx(work / gradient, rel=0.07)


def test_attention_follows_its_curve_and_falls_below_it() -> None:
    o = Oracle(H100)
    flops = 1e12
    rates = [flops / o.attention(flops, s) / 1e12 for s in (256, 512, 1024, 4096, 16384, 10**6)]
    assert rates == sorted(rates)
    assert rates[3] == pytest.approx(423, rel=0.02)
    assert o.attention(flops, 4096, backward=True) == pytest.approx(2.5 / 0.8 * o.attention(flops, 4096), rel=0.02)


def test_a_curve_is_read_between_and_beyond_its_knots() -> None:
    curve = ((1.0, 10.0), (100.0, 20.0))
    assert [at(curve, x) for x in (0.1, 1, 10, 100, 1000)] == [10, 10, pytest.approx(15), 20, 20]


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(1, 1e5), st.floats(1.01, 4))
def test_more_work_never_takes_less(m: float, n: float, k: float, factor: float) -> None:
    o = Oracle(H100)
    assert o.product(m * factor, n, k) >= o.product(m, n, k)
    assert o.product(m, n, k, groups=4) >= o.product(m, n, k)
    assert o.product(m, n, k, accumulate=True) >= o.product(m, n, k)


def test_few_rows_are_bound_by_weights() -> None:
    """64 experts with 16 rows each: reading bf16 weights forward, reading and writing fp32 gradients backward, four times the bytes."""
    o = Oracle(H100)
    forward, gradient = (o.product(1024, 4096, 4096, groups=64, accumulate=a) for a in (False, True))
    assert forward == pytest.approx(64 * 4096 * 4096 * 2 / o.bytes_per_s, rel=0.02)
    assert gradient == pytest.approx(4 * forward, rel=0.02)


# ---- collectives ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "measured", "tolerance"),
    [
        (NET.all_to_all(ROWS, GroupSpan(8, 1)), 1265e-6, 0.05),
        (NET.all_to_all(ROWS, GroupSpan(8, 8)), 9164e-6, 0.10),
        (NET.all_to_all(ROWS, GroupSpan(8, 2)), 5774e-6, 0.05),
        (NET.all_to_all_dedup(ROWS / 8, GroupSpan(8, 8), top_k=8, num_experts=256, host_limit=4), 4626e-6, 0.10),
        (NET.all_to_all_dedup(ROWS / 8, GroupSpan(8, 1), top_k=8, num_experts=256), 661e-6, 0.35),
        (NET.all_gather(512 * 2**20, GroupSpan(8, 1)), 512 * 2**20 * 7 / 8 / 336e9, 0.03),
    ],
)
def test_collectives_follow_published_values(seconds: float, measured: float, tolerance: float) -> None:
    assert seconds == pytest.approx(measured, rel=tolerance)


spans = st.builds(GroupSpan, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 16]))


@given(st.floats(1e3, 1e10), spans, st.floats(1.01, 10))
def test_more_bytes_and_slower_links_never_help(size: float, span: GroupSpan, factor: float) -> None:
    slow = Network(replace(H100, between_bytes_per_s=H100.between_bytes_per_s / factor))
    for call in (
        lambda net, s, sp: net.all_gather(s, sp),
        lambda net, s, sp: net.all_reduce(s, sp),
        lambda net, s, sp: net.all_to_all(s, sp),
        lambda net, s, sp: net.all_to_all_dedup(s, sp, top_k=8, num_experts=256),
    ):
        now = call(NET, size, span)
        assert now >= 0
        assert call(NET, size * factor, span) >= now * (1 - 1e-9)
        assert call(slow, size, span) >= now * (1 - 1e-9)
    more = GroupSpan(span.inside, span.hosts * 2)
    assert NET.all_gather(size, more) >= NET.all_gather(size, span) * (1 - 1e-9)
    assert NET.all_gather(size, GroupSpan(1, 1)) == NET.all_to_all(size, GroupSpan(1, 1)) == 0


def test_rails_share_the_traffic_of_a_ring() -> None:
    """Four members a host cross hosts on four cards: a quarter of the time of one; eight are as fast as the links inside."""
    one, four, eight = (NET.all_gather(8e9, GroupSpan(g, 4)) for g in (1, 4, 8))
    assert one / four == pytest.approx(4, rel=0.05)
    assert eight == pytest.approx(8e9 * 31 / 32 / 336e9, rel=0.02)


@pytest.mark.parametrize("hosts", [4, 32, 256])
@pytest.mark.parametrize("inside", [1, 8])
def test_small_all_reduces_take_trees_and_large_ones_rings(hosts: int, inside: int) -> None:
    """The size where both take as long, from their closed forms: latency 2 log2(H) against 2 (H - 1) messages, 2 S / 0.92 against 2 S (H - 1) / H bytes."""
    h, span = H100, GroupSpan(inside, hosts)
    net = Network(replace(h, inside_bytes_per_s=((2.0, 1e15),), inside_half_bytes=1.0))  # cards alone are scarce
    card, chain = h.between_bytes_per_s * h.between_efficiency * inside, (inside - 1) * h.hop_s
    ring_s = 2 * (h.inside_latency_s + (hosts - 1) * (h.between_latency_s + chain))
    tree_s = h.inside_latency_s + 2 * (math.log2(hosts) * h.between_latency_s + chain)
    equal = (ring_s - tree_s) * card / (2 / 0.92 - 2 * (hosts - 1) / hosts)
    for size, is_tree in ((equal / 3, True), (equal * 0.99, True), (equal * 1.01, False), (equal * 3, False)):
        ring, tree = ring_s + 2 * size * (hosts - 1) / hosts / card, tree_s + 2 * size / card / 0.92
        assert (tree < ring) == is_tree
        assert net.all_reduce(size, span) == pytest.approx(min(ring, tree), rel=1e-9)
    assert net.tree(equal, span) == pytest.approx(net.all_reduce(equal, span), rel=1e-6)


def test_latency_grows_with_the_logarithm_in_a_tree_and_with_the_ranks_in_a_ring() -> None:
    def growth(call: str, inside: int) -> float:
        few, many = (getattr(NET, call)(64, GroupSpan(inside, hosts)) for hosts in (16, 1024))
        return many / few

    assert growth("all_reduce", 8) < 10 / 4 * 1.01
    assert growth("all_gather", 8) == pytest.approx(1023 / 15, rel=0.1)
    assert 5 < growth("all_gather", 1) < 1023 / 15  # PAT has a linear part of its own
    assert NET.all_gather(8e9, GroupSpan(1, 16)) == pytest.approx(
        NET.ring_latency(GroupSpan(1, 16)) + 8e9 * 15 / 16 / (50e9 * 0.84)
    )


def test_gloo_has_rings_alone() -> None:
    host = replace(H100, sms=None, threads=1, inside_hop_s=None)
    assert host.hop_s == host.inside_latency_s and replace(H100, inside_hop_s=None).hop_s == H100.hop_s == 9e-7
    net, span = Network(host), GroupSpan(2, 64)
    assert net.all_reduce(8, span) == pytest.approx(2 * net.all_gather(8, span)) and net.tree(8, span) < net.all_reduce(
        8, span
    )


def test_spans_follow_the_rank_order() -> None:
    def span(size: int, stride: int) -> GroupSpan:
        return span_of(size, stride, ranks_per_host=8)

    assert span(8, 1) == GroupSpan(8, 1)
    assert span(8, 2) == GroupSpan(4, 2)
    assert span(16, 8) == GroupSpan(1, 16)
    assert span(4, 1) == GroupSpan(4, 1)
    assert span(64, 1) == GroupSpan(8, 8)
    assert span(1, 1) == GroupSpan(1, 1)


def test_distinct_places_by_counting() -> None:
    """4 experts on 2 places, 2 chosen: 2 of 6 pairs share a place, so 4/3 + 1/3 ... = 5/3 places on average."""
    assert distinct(2, 2, 4) == pytest.approx(5 / 3)
    assert distinct(8, 8, 8) == 8
    assert distinct(8, 1, 64) == pytest.approx(1)
    assert distinct(64, 8, 256) == pytest.approx(64 * (1 - math.comb(252, 8) / math.comb(256, 8)))


# ---- routing --------------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.5, 100), st.integers(16, 10**6))
def test_imbalance_is_bounded_and_grows_with_skew(ep: int, concentration: float, rows: int) -> None:
    def load(c: float, *, worst: bool = False) -> float:
        return RouterModel(kind="learned", concentration=c).hottest(ep=ep, experts=64, rows=rows, top_k=8, worst=worst)

    assert 1 <= load(concentration) <= ep
    assert load(concentration) <= load(concentration / 2) * (1 + 1e-12)
    assert load(concentration) <= load(concentration, worst=True)
    assert RouterModel().hottest(ep=ep, experts=64, rows=rows, top_k=8) == 1


def test_the_fullest_rank_is_what_sampling_finds() -> None:
    """Popularity drawn from a Dirichlet distribution, the fullest of 8 ranks with 8 experts each."""
    import numpy as np

    draw = np.random.default_rng(0).dirichlet([8.0] * 64, size=4000).reshape(4000, 8, 8).sum(2).max(1) * 8
    predicted = RouterModel(kind="learned").hottest(ep=8, experts=64, rows=1e9, top_k=8)
    assert predicted == pytest.approx(float(np.median(draw)), rel=0.03)
