"""Cross-entropy, AdamW and lanes: fast against plain."""

from __future__ import annotations

import math
import os
import threading

import pytest
import torch
from kernel_help import LANES, TOLERANCE, agree, close, normal, outcome, pool_of, seeded

from phalanx.core.errors import DataError
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.ops import cross_entropy
from phalanx.kernels.ops.adamw import CHUNK, adamw_
from phalanx.kernels.ops.cross_entropy import IGNORE, VocabShard, linear_cross_entropy


def _labels(tokens: int, vocab: int) -> torch.Tensor:
    labels = torch.randint(0, vocab, (tokens,), generator=seeded(7))
    labels[::5] = IGNORE
    return labels


@LANES
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(0, 4, 6), (1, 4, 6), (29, 12, 70), (1100, 8, 600)])
def test_cross_entropy(tokens: int, hidden: int, vocab: int, lanes: int | str) -> None:
    labels = _labels(tokens, vocab)
    with pool_of(lanes) as pool:
        agree(
            lambda h, w: linear_cross_entropy(h, w, labels, lanes=pool).to(h.dtype),
            lambda h, w: linear_cross_entropy(h, w, labels, impl="reference"),
            [normal(tokens, hidden), normal(vocab, hidden, seed=1)],
        )


def test_cross_entropy_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than one group's logits: the weight's gradient is summed over groups in fp32."""
    monkeypatch.setattr(cross_entropy, "GROUP_BYTES", 1)
    labels = _labels(1300, 40)
    agree(
        lambda h, w: linear_cross_entropy(h, w, labels).to(h.dtype),
        lambda h, w: linear_cross_entropy(h, w, labels, impl="reference"),
        [normal(1300, 8), normal(40, 8, seed=1)],
    )


def test_cross_entropy_is_a_sum_in_fp32_and_scales_exactly() -> None:
    h, w = (x.to(torch.bfloat16).requires_grad_() for x in (normal(6, 4), normal(5, 4, seed=1)))
    loss = linear_cross_entropy(h, w, torch.tensor([0, 1, 2, 3, 4, IGNORE]))
    assert loss.dtype == torch.float32 and loss.dim() == 0
    (loss / 2047).backward()
    assert h.grad is not None and torch.equal(h.grad[5], torch.zeros(4, dtype=torch.bfloat16))


def test_cross_entropy_of_nothing_and_of_certainty() -> None:
    h, w = normal(3, 4).requires_grad_(), normal(5, 4, seed=1)
    loss = linear_cross_entropy(h, w, torch.full((3,), IGNORE))
    loss.backward()
    assert loss.item() == 0 and h.grad is not None and not h.grad.any()
    sure = linear_cross_entropy(
        1e4 * torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), torch.tensor([0, 0])
    )
    assert sure.item() == pytest.approx(1e4)


@LANES
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("shard", [None, VocabShard(0, 6, lambda own: own.unsqueeze(0))], ids=["whole", "shard"])
def test_what_is_not_predicted_has_no_part_in_the_loss(
    shard: VocabShard | None, impl: Impl, bad: float, lanes: int | str
) -> None:
    """Whatever its hidden state is: zero times infinity is NaN."""
    labels = torch.tensor([IGNORE, 3, 0, IGNORE, 5])
    h, w = normal(5, 4), normal(6, 4, seed=1)
    want = outcome(lambda h: linear_cross_entropy(h, w, labels, impl="reference"), [h], torch.float64, "random")
    h[0, 1] = bad
    h[3] = bad
    with pool_of(lanes) as pool:
        for dtype, tolerance in TOLERANCE.items():
            got = outcome(
                lambda h: linear_cross_entropy(h, w.to(h.dtype), labels, shard=shard, impl=impl, lanes=pool),
                [h],
                dtype,
                "random",
            )
            assert all(close(a, b, tolerance) for a, b in zip(got, want, strict=True)), dtype
            assert not got[1][0].any() and not got[1][3].any()


def test_cross_entropy_gradcheck() -> None:
    h, w = normal(4, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    labels = torch.tensor([0, IGNORE, 4, 2])
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels), (h, w))


def unreachable(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a message, although the labels are illegal on all ranks")


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("shard", [None, VocabShard(5, 10, unreachable)])
@pytest.mark.parametrize("label", [-1, -101, 10])
def test_labels_outside_of_the_vocabulary_are_named(label: int, shard: VocabShard | None, impl: Impl) -> None:
    h, w = normal(4, 3).requires_grad_(), normal(10 if shard is None else 5, 3, seed=1)
    labels = torch.tensor([9, label, IGNORE, label])
    rule = rf"labels\[1\] = {label}: .* 2 of 4 labels; ids are 0 to 9, and -100 is [^$]*labels\[3\] = {label}"
    with pytest.raises(DataError, match=rule):
        linear_cross_entropy(h, w, labels, shard=shard, impl=impl)


def test_labels_on_a_device_are_checked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "_assert_async", lambda legal, text: asked.append((legal.device.type, text)))
    h, w = torch.empty(4, 3, device="meta"), torch.empty(10, 3, device="meta")
    linear_cross_entropy(h, w, torch.empty(4, dtype=torch.int64, device="meta"), impl="reference")
    assert asked == [("meta", "a label is outside of the vocabulary")]


def test_cross_entropy_without_gradients() -> None:
    h, w = normal(4, 3), normal(5, 3, seed=1)
    with torch.no_grad():
        got = linear_cross_entropy(h, w, torch.tensor([0, 1, 2, 3]))
    assert got.item() == pytest.approx(linear_cross_entropy(h, w, torch.tensor([0, 1, 2, 3]), impl="reference").item())


@LANES
@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK + 77])
def test_adamw(size: int, grad_dtype: torch.dtype, lanes: int | str) -> None:
    """Three steps, the fast kernel against plain operations; fp64 state for fp64 gradients, else fp32."""
    dtype = torch.float64 if grad_dtype == torch.float64 else torch.float32
    options = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    states = {}
    with pool_of(lanes) as pool:
        for impl in ("fast", "reference"):
            state = [normal(size, seed=1).to(dtype), torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)]
            out = torch.empty(size, dtype=torch.bfloat16)
            for step in (1, 2, 3):
                grad = normal(size, seed=10 + step).to(grad_dtype)
                scale = 0.3 if step == 2 else torch.tensor(1.7, dtype=torch.float64)
                adamw_(state[0], grad, *state[1:], out, step=step, scale=scale, impl=impl, lanes=pool, **options)  # type: ignore[call-arg]
                assert torch.equal(grad, normal(size, seed=10 + step).to(grad_dtype)), "the gradient is only read"
            states[impl] = [*state, out]
            assert torch.equal(out, state[0].to(torch.bfloat16))
    for a, b in zip(states["fast"][:3], states["reference"][:3], strict=True):
        assert torch.allclose(a, b, rtol=1e-12 if dtype == torch.float64 else 2e-5, atol=1e-7)


def test_adamw_equals_torch() -> None:
    param = torch.nn.Parameter(normal(50))
    optimizer = torch.optim.AdamW([param], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    master, exp_avg, exp_avg_sq = normal(50), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for step in (1, 2, 3, 4):
        param.grad = normal(50, seed=step)
        optimizer.step()
        adamw_(
            master,
            normal(50, seed=step),
            exp_avg,
            exp_avg_sq,
            lr=0.1,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.2,
            step=step,
        )
    assert torch.allclose(param.detach(), master, rtol=1e-13, atol=0)


# ---- lanes -------------------------------------------------------------------------------------------------------------------


def test_lanes_do_every_piece_once() -> None:
    with Lanes(3) as lanes:
        for size in (0, 1, 2, 50):
            done: list[int] = []
            lanes.run(lambda item, lane, done=done: done.append(item), range(size))
            assert sorted(done) == list(range(size))


def test_lanes_have_no_gradients_and_single_threads() -> None:
    seen: list[tuple[bool, int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Lanes(2) as lanes:
            barrier = threading.Barrier(2, timeout=20)

            def look(item: int, lane: int) -> None:
                barrier.wait()
                seen.append((torch.is_grad_enabled(), torch.get_num_threads()))

            lanes.run(look, [0, 1])
        assert seen == [(False, 1), (False, 1)]
        assert torch.is_grad_enabled() and torch.get_num_threads() == 2, "given back"
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_lane_reaches_the_caller_and_the_lanes_go_on() -> None:
    def fail(item: int, lane: int) -> None:
        if item == 3:
            raise ValueError("piece 3")

    with Lanes(2) as lanes:
        with pytest.raises(ValueError, match="piece 3"):
            lanes.run(fail, range(8))
        done: list[int] = []
        lanes.run(lambda item, lane: done.append(item), range(8))
        assert sorted(done) == list(range(8))


def test_lanes_with_other_kernels_are_the_same_threads() -> None:
    before = torch.get_num_threads()
    seen: set[int] = set()
    with Lanes(3) as lanes:
        for each in (lanes, lanes.with_rows(None), lanes.with_rows(None).with_rows(None)):
            barrier = threading.Barrier(3, timeout=20)

            def look(item: int, lane: int, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                seen.add(threading.get_ident())

            each.run(look, range(3))
            assert each.count == 3
        assert len(seen) == 3
    assert torch.get_num_threads() == before


def test_lanes_survive_a_fork() -> None:
    with Lanes(2) as lanes:
        lanes.run(lambda item, lane: None, range(4))
        child = os.fork()
        if child == 0:
            done: list[int] = []
            lanes.run(lambda item, lane: done.append(item), range(8))
            os._exit(0 if sorted(done) == list(range(8)) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
