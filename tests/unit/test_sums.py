"""Checksums of products, memory and messages: sound work passes whatever its type, a wrong bit that matters does not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from phalanx.kernels.cpu.checked_attention import check_backward
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.products import EVERY, ProductSums, reference_deviation, stands_alone, stands_out, tolerance_of
from phalanx.kernels.cpu.words import WORDS, phase_of, reference_word_sum, word_sum
from phalanx.kernels.native import compiled_rows, not_seen
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.cross_entropy import linear_cross_entropy
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.linear import projections
from phalanx.runtime.comm.sums import MessageNote, MessageSums, Passed, wrong_messages
from phalanx.runtime.state.sums import StateSums

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def flip(x: torch.Tensor, place: int, bit: int) -> None:
    """Turn one bit of one element over."""
    words = x.view(-1).view(BITS[x.dtype])
    mask = torch.tensor([1], dtype=torch.int64) << bit
    words[place] ^= mask.to(words.dtype).item() if bit < 8 * x.element_size() - 1 else torch.iinfo(words.dtype).min


def lanes_of(compiled: bool, *, late: bool = True) -> Lanes:
    sums = ProductSums()
    sums.looks_late = late  # type: ignore[misc]
    return Lanes(1, rows=compiled_rows() if compiled else None, sums=sums)


class Flipping(ProductSums):
    """Turns the highest bit of an exponent over in the first product of a kind."""

    looks_late = False

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.done = place, False

    def check(self, place, c_mn, *factors, rows=None, seen=None):  # type: ignore[no-untyped-def]
        if place == self.place and not self.done:
            self.done = True
            c_mn[c_mn.shape[0] // 2, c_mn.shape[1] // 3] = 1e4 * c_mn.abs().max().clamp(min=1.0)
        super().check(place, c_mn, *factors, rows=rows, seen=seen)


def compute(lanes: Lanes, dtype: torch.dtype, *, impl: str = "fast") -> None:
    """Each operation that has products, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(96, 32).to(dtype).requires_grad_()
    weights = [torch.randn(n, 32).to(dtype).requires_grad_() for n in (48, 16)]
    y, z = projections(x, weights, [None, torch.randn(16).to(dtype)], impl=impl, lanes=lanes)
    w13, w2 = torch.randn(3, 2, 24, 32).to(dtype).requires_grad_(), torch.randn(3, 32, 24).to(dtype).requires_grad_()
    out = expert_ffn(x, w13, w2, (40, 0, 56), row_weights_M=torch.rand(96), impl=impl, lanes=lanes)
    q, k, v = (torch.randn(2, 48, h, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    attended = causal_attention(q, k, v, ((48,), (20, 28)), impl=impl, lanes=lanes)
    loss = linear_cross_entropy(
        x, torch.randn(64, 32).to(dtype).requires_grad_(), torch.randint(0, 64, (96,)), impl=impl, lanes=lanes
    )
    (loss + sum(t.float().square().mean() for t in (y, z, out, attended))).backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("impl", "compiled"), [("fast", True), ("fast", False), ("reference", False)])
def test_sound_work_raises_no_alarm(dtype: torch.dtype, impl: str, compiled: bool) -> None:
    lanes = lanes_of(compiled)
    for _ in range(3):
        compute(lanes, dtype, impl=impl)
    assert lanes.sums is not None and lanes.sums.checked > 20
    assert lanes.sums.take() == []


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("impl", "compiled"), [("fast", True), ("fast", False), ("reference", False)])
def test_a_wrong_element_is_found_in_each_product(dtype: torch.dtype, impl: str, compiled: bool) -> None:
    seen: list[str] = []

    class Listening(ProductSums):
        def check(self, place, c_mn, *factors, **kept):  # type: ignore[no-untyped-def]
            seen.append(place)

    rows = compiled_rows() if compiled else None
    compute(Lanes(1, rows=rows, sums=Listening()), dtype, impl=impl)
    assert len(set(seen)) >= 9
    for place in sorted(set(seen)):
        sums = Flipping(place)
        compute(Lanes(1, rows=rows, sums=sums), dtype, impl=impl)
        found = sums.take()
        assert found and found[0].place == place, place
        assert place in str(found[0])


@pytest.mark.parametrize("late", (True, False))
@pytest.mark.parametrize("compiled", (True, False))
def test_every_product_of_experts_is_checked_as_often_as_the_others(compiled: bool, late: bool) -> None:
    seen = Counter[str]()

    class Listening(ProductSums):
        looks_late = late

        def check(self, place, c_mn, *factors, **kept):  # type: ignore[no-untyped-def]
            seen[place] += 1

    compute(Lanes(1, rows=compiled_rows() if compiled else None, sums=Listening()), torch.float32)
    times = seen["experts, first projection, forward"]
    assert times > 0 and {place: n for place, n in seen.items() if place.startswith("experts")} == {
        f"experts, {projection} projection, {product}": times
        for projection in ("first", "second")
        for product in ("forward", "input gradient", "weight gradient")
    }


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_element_is_found_in_each_gradient_of_attention(which: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 48, h, 16, requires_grad=True) for h in (4, 2, 2))
    out = causal_attention(q, k, v, ((48,), (20, 28)), impl="reference")
    d_out, sums = torch.randn_like(out), ProductSums()
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    check_backward(sums, q, k, d_out, grads)
    assert sums.take() == []
    grads[which][0, 3, 1, 2] += 100.0
    check_backward(sums, q, k, d_out, grads)
    assert len(sums.take()) == 1


def test_the_compiled_sums_are_those_of_plain_operations() -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    for dtype in DTYPES:
        for a, b in ((torch.randn(70, 33), torch.randn(33, 21)), (torch.randn(33, 70).T, torch.randn(21, 33).T)):
            a, b = a.to(dtype), b.to(dtype)
            c = a @ b
            flip(c, 5, 8 * c.element_size() - 3)
            want = float(reference_deviation(c, (a, b)))
            got = rows.deviation(c, [(a, b)], tolerance=tolerance_of(c, [(a, b)]))
            assert got == pytest.approx(want, rel=0.05) or (got > 1e3 and want > 1e3)


def test_products_are_summed_in_turn_even_where_nothing_stands_out() -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    sums, (a, b) = ProductSums(), (torch.ones(64, 16), torch.ones(16, 8))
    wrong = a @ b * 1.5
    for _ in range(EVERY):
        sums.check("always half too large", wrong, (a, b), rows=rows)
    assert len(sums.take()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_large_elements_does_not_stand_out_and_an_element_in_it_does(dtype: torch.dtype) -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    c = torch.randn(70, 200).clamp(-3, 3).to(dtype)
    assert not stands_alone(c, rows.look(c), rows)
    c[33] *= 100
    seen = rows.look(c)
    assert stands_out(seen) and not stands_alone(c, seen, rows)
    others = c[33].double().square().sum() - seen[0] ** 2
    assert rows.beside(c, seen) == pytest.approx(float(others / 200), rel=1e-2)
    for place, wrong in ((33, 3000.0), (0, 2000.0), (69, float("nan")), (8, float("-inf"))):
        spoilt = c.clone()
        spoilt[place, 7] = wrong
        assert stands_alone(spoilt, rows.look(spoilt), rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_word_sum(dtype: torch.dtype) -> None:
    x = torch.randn(37).to(dtype)
    rows, before = compiled_rows(), int(reference_word_sum(x))
    assert word_sum(x, rows=rows) == before
    assert (int(reference_word_sum(x[:12])) + int(reference_word_sum(x[12:]))) % WORDS == before
    assert (
        sum(int(word_sum(x[a:b], rows=rows, phase=phase_of(x[a:b]))) for a, b in ((0, 1), (1, 2), (2, 15), (15, 37)))
        % WORDS
        == before
    )
    for bit in range(8 * x.element_size()):
        y = x.clone()
        flip(y, (7 * bit) % 37, bit)
        assert word_sum(y, rows=rows) == int(reference_word_sum(y)) != before


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("start", (0, 1))
def test_an_update_sums_what_it_reads_and_writes(compiled: bool, start: int) -> None:
    state, flat = [torch.randn(5001), torch.randn(5001), torch.rand(5001)], torch.zeros(5100).bfloat16()
    before = [int(reference_word_sum(x)) for x in state]
    sums, lanes = torch.zeros(7, dtype=torch.int64), Lanes(1, rows=compiled_rows() if compiled else None)
    adamw_(state[0], torch.randn(5001), *state[1:], flat[start : start + 5001], lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, lanes=lanes, sums=sums)  # fmt: skip
    assert [int(n) % WORDS for n in sums] == before + [int(reference_word_sum(x)) for x in (*state, flat)]


@pytest.mark.parametrize("compiled", (True, False))
def test_an_update_knows_what_it_published_without_reading_it_again(compiled: bool) -> None:
    sums, flat = StateSums(rows=compiled_rows() if compiled else None), torch.randn(101).bfloat16()
    kept = {"expert": [(30, 51), (7, 20)]}
    rounded = sum(int(reference_word_sum(flat[a:b], phase_of(flat[a:b]))) for a, b in kept["expert"])
    sums.updated("expert", ("master", "exp_avg", "exp_avg_sq"), torch.tensor([0] * 6 + [rounded]))
    flip(flat, 31, 4)
    sums.published({"expert": flat}, kept)
    sums.compare({"expert": flat})
    assert len(sums.take()) == 1  # it flipped after it was written
    flip(flat, 31, 4)
    sums.compare({"expert": flat})
    assert sums.take() == []
    sums.forget()
    flip(flat, 31, 4)
    sums.published({"expert": flat}, kept)
    sums.compare({"expert": flat})
    assert sums.take() == []


def test_state_that_changes_by_itself_is_named_with_its_bit() -> None:
    sums, flat = StateSums(), torch.randn(100)
    sums.published({"expert": flat}, {})
    sums.compare({"expert": flat})
    assert sums.take() == []
    flip(flat, 17, 22)
    sums.compare({"expert": flat})
    assert sums.take() == ["parameters of expert: bit 22 of a 32-bit word has flipped"]


def test_a_message_that_arrives_otherwise_is_named() -> None:
    a, b, x = MessageSums(0), MessageSums(1), torch.randn(64)
    a.sent("rows", [Passed(1, x)])
    y = x.clone()
    flip(y, 3, 30)
    b.received("rows", [Passed(0, y)])
    (left, sent, _), (right, _, received) = a.take(), b.take()
    assert (left + right) % WORDS != 0
    assert wrong_messages(sent, received) == [(0, 1, "rows from rank 0 to rank 1 arrived with other bits")]
    assert wrong_messages(sent, [MessageNote("rows", 0, 1, sent[0].total)]) == []


def test_of_few_whole_numbers_two_copies_of_three_count() -> None:
    sums, x = MessageSums(0), torch.arange(6).repeat(3, 1)
    assert torch.equal(sums.majority(x), torch.arange(6)) and sums.outvoted == 0
    x[1, 4] ^= 1 << 40
    assert torch.equal(sums.majority(x), torch.arange(6)) and sums.outvoted == 1


@pytest.mark.parametrize("copy", range(3))
def test_whichever_of_three_copies_is_wrong_the_other_two_count(copy: int) -> None:
    sums, x = MessageSums(0), torch.arange(6).repeat(3, 1)
    x[copy, 5] ^= 1 << 40 | 1  # a bit that was not set, and one that was
    assert torch.equal(sums.majority(x), torch.arange(6)) and sums.outvoted == 1


def test_a_sum_that_was_just_made_is_not_read_again_unless_somebody_wrote_there() -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    sums, parts, out = MessageSums(0, rows=rows), torch.randn(3, 5000), torch.empty(5000)
    sums.add("sum", (0, 1, 2), parts, parts[0].clone(), out)
    assert torch.equal(out, parts[0] + parts[1] + parts[2])
    made = int(reference_word_sum(out))
    flip(out.data, 3, 7)  # memory that nobody wrote: what was made is what is told
    sums.sent("copy", [Passed(1, out)])
    out.mul_(2.0)
    sums.sent("copy", [Passed(2, out)])
    _, sent, received = sums.take()
    assert [note.total for note in sent] == [made, int(reference_word_sum(out))]
    assert [note.total for note in received] == [int(reference_word_sum(part)) for part in parts[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", (False, True))
def test_what_is_collected_is_summed_on_the_way(dtype: torch.dtype, add: bool) -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    grad = torch.randn(3001).to(dtype)
    total = torch.randn(3001, dtype=torch.promote_types(dtype, torch.float32))
    want = total + grad if add else grad.to(total.dtype)
    assert rows.collect(grad, total, add=add) == int(reference_word_sum(want))
    assert torch.equal(total, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", (False, True))
def test_rows_are_looked_at_while_they_are_scaled(dtype: torch.dtype, scaled: bool) -> None:
    rows = compiled_rows()
    if rows is None:
        pytest.skip("no compiler on this machine")
    x, by = torch.randn(40, 96).to(dtype)[:33, :64], torch.rand(33, 1).to(dtype) if scaled else None
    out, seen = torch.empty(33, 64, dtype=dtype), not_seen()
    rows.scale_rows(x, by, out, seen=seen)
    assert torch.equal(out, x if by is None else x * by)
    assert tuple(seen) == tuple(rows.look(x))
