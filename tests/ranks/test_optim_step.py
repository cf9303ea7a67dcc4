"""The step as a transaction: what is not finite changes nothing anywhere, every rank votes, an evaluation only looks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiers import some

from phalanx.core.errors import PeerError, RunError
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import TokenBatch
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import RouterSpec, parameters
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.sums import MessageSums
from phalanx.runtime.state.gradients import NORM_BITS, GradientBuffers
from phalanx.train.assembly import assemble
from phalanx.train.step import not_finite, passes, transaction
from phalanx.train.step.check import Findings
from phalanx.train.step.loss import LossShare
from phalanx.train.step.passes import StageRunner
from phalanx.train.step.transaction import (
    StepParts,
    StepResult,
    commit_step,
    eval_loss,
    reduce_step,
    train_step,
)
from phalanx.train.step.vote import LOSSES, Tally, exact_vote, plain_vote
from phalanx.verify.numbers import StartingValues, microbatch
from phalanx.verify.reference import context
from phalanx.verify.setups import Setup, small_model
from ranks import run_ranks

ROUTER = RouterSpec(score="sigmoid", renormalize=True, bias_rate=1e-3, aux_loss=0.05, z_loss=0.01)


def setup(**changes) -> Setup:
    return Setup(label="test", spec=small_model("test", router=ROUTER), dispatch=DispatchSpec(), **changes)


def make(
    s: Setup,
    rank: int,
    cache: GroupCache,
    *,
    world: int,
    mapping: dict[str, int],
    dtype=torch.float64,
    each: int = 1,
    sums: MessageSums | None = None,
) -> StepParts:
    groups = build_groups(make_folding(world=world, **mapping), rank=rank, cache=cache)
    parts = assemble(context(s, groups, Collectives(sums=sums), dtype=dtype), optim=s.optim, num_microbatches=each)
    StartingValues().fill(parts.state.boxes(), {p.name: p for p in parameters(s.spec)})
    parts.state.restore(parts.comms)
    return parts


def one(s: Setup, **kw) -> StepParts:
    return make(s, 0, GroupCache(), world=1, mapping={}, **kw)


def everything(parts: StepParts) -> list[torch.Tensor]:
    """Copies of all that a step may change."""
    return [
        *(box.tensor.clone() for box in parts.state.boxes()),
        *(p.detach().clone() for p in parts.model.parameters()),
        *(b.clone() for b in parts.model.buffers()),
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


NAMES = ("layers.0.attention.wq.weight", "layers.1.moe.experts.w2", "norm.weight")
POISONED = list(itertools.product(NAMES, (0, 1), ({}, {"ep": 2})))


def _poisoned(rank: int, cache: GroupCache, name: str, zero: int, mapping: dict[str, int]):
    """A step whose gradient of `name` is infinite on rank 1; then the same step in health, and what it should give."""
    s = setup(zero=zero)
    parts = make(s, rank, cache, world=2, mapping=mapping)
    batches = [microbatch(s, rank)]
    before, text = everything(parts), ""
    hooks = []
    if rank == 1:
        param = dict(parts.model.named_parameters())[name]
        hooks.append(param.register_hook(lambda grad: torch.full_like(grad, math.inf)))
    try:
        train_step(parts, batches, step=0, lr=0.02)
    except RunError as error:
        text = str(error)
    untouched = same(before, everything(parts))
    for hook in hooks:
        hook.remove()
    train_step(parts, batches, step=0, lr=0.02)
    sound = make(s, rank, cache, world=2, mapping=mapping)
    train_step(sound, batches, step=0, lr=0.02)
    return text, untouched, same(everything(parts), everything(sound)), same(before, everything(parts))


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "zero", "mapping"), some(POISONED, 5), ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(
    name: str, zero: int, mapping: dict[str, int]
) -> None:
    for text, untouched, recovered, unchanged in run_ranks(2, _poisoned, name, zero, mapping):
        assert f"{name} on rank 1;" in text and "step 1: " in text and "nothing was changed" in text
        assert untouched and recovered and not unchanged


def doubt(parts: StepParts, *, is_doubted: Callable[[], bool]) -> None:
    """Has this rank doubt something on the device in each step that it makes while `is_doubted`."""
    reduce = parts.buffers.reduce

    def doubting(*given, **how):
        parts.comms.doubts += [torch.tensor(False), torch.tensor(is_doubted())]
        return reduce(*given, **how)

    parts.buffers.reduce = doubting  # type: ignore[method-assign]


def _doubted(rank: int, cache: GroupCache, elastic: bool) -> tuple[str, str, bool, bool]:
    """A step of which rank 1 doubts something on the device; then one in which all turns out well."""
    s = setup()
    parts = make(s, rank, cache, world=2, mapping={"ep": 2})
    before, kind, text = everything(parts), "", ""
    doubt(parts, is_doubted=lambda: rank == 1 and not text)
    if elastic:
        parts.comms.escape = AbortableCall(lambda: False)
    try:
        train_step(parts, [microbatch(s, rank)], step=4, lr=0.02)
    except RunError as error:
        kind, text = type(error).__name__, str(error)
    untouched = same(before, everything(parts))
    train_step(parts, [microbatch(s, rank)], step=4, lr=0.02)
    return kind, text, untouched, same(before, everything(parts)) or bool(parts.comms.doubts)


@pytest.mark.ranks
@pytest.mark.parametrize(("elastic", "error"), [(False, "RunError"), (True, "PeerError")])
def test_a_step_of_which_a_rank_doubts_something_is_not_committed(elastic: bool, error: str) -> None:
    for kind, text, untouched, unchanged in run_ranks(2, _doubted, elastic):
        assert "step 5: a MoE layer" in text and "as rank 1 found; nothing was changed" in text
        assert kind == error and untouched and not unchanged


def _doubted_once(rank: int, cache: GroupCache) -> tuple[tuple[str, ...], bool]:
    """What is told of the first try of a checked step, which rank 0 doubts; whether the second one is committed."""
    s = setup()
    parts = make(s, rank, cache, world=2, mapping={"ep": 2}, sums=MessageSums(rank))
    before, tries = everything(parts), iter((rank == 0, False))
    doubt(parts, is_doubted=lambda: next(tries))
    reduced = reduce_step(parts, [microbatch(s, rank)], step=4, lr=0.02)
    commit_step(parts, reduced)
    return reduced.findings, not same(before, everything(parts))


@pytest.mark.ranks
def test_a_checked_step_that_is_made_again_says_why() -> None:
    for (text,), committed in run_ranks(2, _doubted_once):
        assert text.endswith("routed otherwise than before, as rank 0 found") and committed


def _gave_up(rank: int, cache: GroupCache) -> tuple[str, str, bool, bool]:
    """A step and an evaluation in which a kernel of rank 1 has waited in vain, then a step in which none has."""
    s = setup()
    waits = [rank == 1]
    fused: Any = SimpleNamespace(
        fault=lambda: torch.tensor(math.nan if waits[0] else 0.0), failures=lambda: ["a kernel gave up"] * waits[0]
    )
    parts = dataclasses.replace(make(s, rank, cache, world=2, mapping={"ep": 2}), fused=fused)
    before, said = everything(parts), []
    for work in (
        lambda: train_step(parts, [microbatch(s, rank)], step=4, lr=0.02),
        lambda: eval_loss(parts, [microbatch(s, rank)]),
    ):
        try:
            work()
        except PeerError as error:
            said.append(str(error))
    untouched, waits[0] = same(before, everything(parts)), False
    train_step(parts, [microbatch(s, rank)], step=4, lr=0.02)
    return said[0], said[1], untouched, same(before, everything(parts))


@pytest.mark.ranks
def test_a_step_in_which_a_kernel_waited_in_vain_is_not_committed() -> None:
    for step, looked, untouched, unchanged in run_ranks(2, _gave_up):
        assert step == "step 5: a kernel gave up on rank 1; nothing was changed"
        assert looked == "validation after step 0: a kernel gave up on rank 1"
        assert untouched and not unchanged


def test_a_loss_that_is_not_finite_is_named_too() -> None:
    parts = one(setup())
    with torch.no_grad():
        parts.model.head_weight[3, 3] = math.nan
    before = everything(parts)[:-1]
    with pytest.raises(RunError, match=r"loss nan.*more parameters; nothing was changed"):
        train_step(parts, [microbatch(setup(), 0)], step=7, lr=0.1)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, everything(parts), strict=False))


def voted(vote: Callable[..., Tally], *, top: float = 1.0, **losses: float) -> Tally:
    """Of one rank, whose gradients are finite unless `top`, the largest, is not; sums have room below 8."""
    parts, zero = one(setup()), torch.zeros((), dtype=torch.float64)
    figures = {**dict.fromkeys((*LOSSES, "entropy_sum"), zero), **{n: torch.tensor(x) for n, x in losses.items()}}
    counts_LE = torch.zeros(len(parts.spec.moe_layers), parts.spec.num_experts, dtype=torch.int64)
    share = LossShare(**figures, counts_LE=counts_LE, dropped=torch.tensor(0))

    def squares(groups: object, *, scale: float, lanes: object) -> tuple[int, int, int]:
        assert top < 8, "sums have overflowed"
        return 4, 0, 0

    gradients = SimpleNamespace(square_sum=lambda groups, lanes: zero + 4, squares=squares)
    voter = SimpleNamespace(
        model=parts.model, spec=parts.spec, groups=parts.groups, comms=parts.comms, lanes=parts.lanes, fused=None,
        buffers=SimpleNamespace(bits=NORM_BITS, top=top, limit=8.0),
    )  # fmt: skip
    return vote(voter, gradients, [share], stop=False)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("vote", [plain_vote, exact_vote])
def test_any_loss_that_is_not_finite_is_a_veto_whatever_the_gradients_are(
    vote: Callable[..., Tally], name: str
) -> None:
    assert voted(vote).finite and voted(vote, **{name: 1.5}).finite
    for bad in (math.nan, math.inf):
        tally = voted(vote, **{name: bad})
        assert not tally.finite and math.isnan(tally.grad_norm)


def test_sums_without_room_are_said_to_be_so_where_all_else_is_finite() -> None:
    found = [voted(exact_vote, top=top) for top in (7.5, 8.0, 1e30, math.inf, math.nan)]
    assert [tally.too_large for tally in found] == [False, True, True, False, False]
    assert [tally.finite for tally in found] == [True, True, True, False, False]
    assert not voted(exact_vote, top=9.0, cross_entropy=math.nan).too_large


def test_an_overflowing_norm_of_finite_gradients_says_so() -> None:
    parts = one(setup(), dtype=torch.float64)  # the squares of no finite fp32 numbers overflow in fp64
    parts.model.norm.weight.register_hook(lambda grad: torch.full_like(grad, 1e200))
    with pytest.raises(RunError, match="a sum or the norm overflowed"):
        train_step(parts, [microbatch(setup(), 0)], step=0, lr=0.1)


def _stops(rank: int, cache: GroupCache) -> tuple[bool, bool]:
    s = setup()
    parts = make(s, rank, cache, world=2, mapping={"ep": 2})
    first = train_step(parts, [microbatch(s, rank)], step=0, lr=0.01)
    second = train_step(parts, [microbatch(s, rank)], step=1, lr=0.01, stop=rank == 1)
    return first.stop, second.stop


@pytest.mark.ranks
def test_one_rank_that_wants_to_stop_is_heard_by_all() -> None:
    assert run_ranks(2, _stops) == [(False, True), (False, True)]


def _evaluated(rank: int, cache: GroupCache) -> tuple[float, int, bool]:
    s = setup(packed=True)
    parts = make(s, rank, cache, world=2, mapping={"ep": 2}, each=2)
    before = everything(parts)
    loss, tokens = eval_loss(parts, [microbatch(s, 2 * rank + j) for j in range(2)])
    return loss, tokens, same(before, everything(parts)) and all(p.grad is None for p in parts.model.parameters())


@pytest.mark.ranks
def test_evaluation_weighs_tokens_not_ranks_and_only_looks() -> None:
    s = setup(packed=True)
    batches = [microbatch(s, j) for j in range(4)]
    want, tokens = eval_loss(one(s, each=4), batches)
    assert tokens == sum(int((b.labels_BS != IGNORE).sum()) for b in batches)
    for loss, counted, untouched in run_ranks(2, _evaluated):
        assert loss == pytest.approx(want, rel=1e-13) and counted == tokens and untouched


def test_evaluation_of_text_without_labels() -> None:
    batch = microbatch(setup(), 0)
    blank = TokenBatch(batch.tokens_BS, torch.full_like(batch.labels_BS, IGNORE), batch.positions_BS, batch.segments)
    assert eval_loss(one(setup()), [blank]) == (0.0, 0)


def _collectives(rank: int, cache: GroupCache, zero: int) -> dict[tuple[str, str], int]:
    s = setup(zero=zero, buckets=False)
    parts = make(s, rank, cache, world=2, mapping={})
    parts.comms.counters.clear()
    train_step(parts, [microbatch(s, rank)], step=0, lr=0.01)
    return {key: counter.calls for key, counter in parts.comms.counters.items()}


@pytest.mark.core
@pytest.mark.ranks
def test_collectives_of_a_step_are_those_of_its_docstring() -> None:
    (sharded, _), (whole, _) = (run_ranks(2, _collectives, zero) for zero in (1, 0))
    assert sharded[("all_reduce", "world")] == 1 == whole[("all_reduce", "world")]  # the vote
    assert sharded[("all_reduce", "dp_cp")] == 1  # valid tokens
    assert sharded[("reduce_scatter", "dp_cp")] == 2 == sharded[("all_gather", "dp_cp")]  # two dense families
    assert sharded[("reduce_scatter", "edp")] == 1 == sharded[("all_gather", "edp")]
    assert whole[("all_reduce", "dp_cp")] == 3 and whole[("all_reduce", "edp")] == 1
    assert not any(kind == "all_gather" and axis in ("dp_cp", "edp") for kind, axis in whole)


def _results(parts: StepParts, s: Setup) -> StepResult:
    return train_step(parts, [microbatch(s, 0)], step=0, lr=0.02)


def test_borrowed_gradients_step_to_the_same_bits() -> None:
    """In bf16 too: an fp32 copy of a bf16 gradient is that gradient."""
    s = setup()
    lent = one(s, dtype=torch.bfloat16)
    assert lent.buffers.borrowed
    copied = one(s, dtype=torch.bfloat16)
    copied.buffers.close()
    params = dict(copied.model.named_parameters())
    flat = GradientBuffers(params, copied.buffers.layouts, dtype=torch.float32)
    copied = dataclasses.replace(copied, buffers=flat, clip_norm=0.0)
    lent = dataclasses.replace(lent, clip_norm=0.0)  # the norm is summed in another order
    a, b = _results(lent, s), _results(copied, s)
    assert a.loss == b.loss and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
    assert same(everything(lent), everything(copied))


def test_messages_of_a_pipeline_are_waited_for_in_the_first_step_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then it loads kernels, which may wait for a message under way. An evaluation has a first one of its own."""
    s = setup()
    parts, batches = one(s), [microbatch(s, 0)]

    def in_turn(program: str) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(StageRunner, "device", torch.device("cuda"))
            plan = parts.runner.pipeline.plan(1)
            return parts.runner.boundary(plan, batches, program=program).in_turn

    assert in_turn("train") and in_turn("forward")
    train_step(parts, batches, step=0, lr=0.02)
    assert not in_turn("train") and in_turn("forward")
    eval_loss(parts, batches)
    assert not in_turn("forward")


def test_result_speaks_of_loads() -> None:
    result = _results(one(setup()), setup())
    assert result.counts_LE.shape == (2, 8) and result.counts_LE.sum() == 2 * 2 * 64
    assert result.tokens == 64 and result.dropped == 0 and 0 < result.entropy <= math.log(8)
    assert all(1 <= load <= 8 for load in result.load_max_over_mean)
    assert result.dead_experts == int((result.counts_LE == 0).sum())


# ---- one function at a time, with all around it made up


def test_empty_micro_batches_have_numbers_of_their_own() -> None:
    """Else two micro-batches of a step would have messages of one name."""

    def numbers(replica: int) -> list[int]:
        groups = SimpleNamespace(folding=SimpleNamespace(replicas=2, replica_of=lambda rank: rank), rank=replica)
        parts: Any = SimpleNamespace(groups=groups, samples=3)
        infos = transaction._infos(parts, [None, None], step=0)  # type: ignore[list-item]
        return [info.microbatch for info in infos]

    assert [numbers(replica) for replica in range(2)] == [[0, 1], [2, 4]]


@pytest.mark.parametrize(("samples", "tokens"), [(None, 4 * 64), (4, 4 * 64), (3, 3 * 64)])
def test_empty_micro_batches_are_no_tokens_of_a_step(samples: int | None, tokens: int) -> None:
    groups = SimpleNamespace(axis=lambda name: SimpleNamespace(size=4), folding=SimpleNamespace(replicas=2))
    parts: Any = SimpleNamespace(groups=groups, samples=samples)
    batch: Any = SimpleNamespace(num_tokens=32)  # the other half is another rank's, of cp
    assert transaction._tokens_of_step(parts, [batch, batch]) == tokens


def test_the_time_of_a_step_is_without_the_waits_that_fall_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, escape = [10.0], SimpleNamespace(waited_s=500.0)
    monkeypatch.setattr(transaction, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts: Any = SimpleNamespace(comms=SimpleNamespace(escape=escape))
    own_s = transaction._own_clock(parts)
    now[0], escape.waited_s = 14.0, 501.0
    assert own_s() == 3.0
    escape.waited_s = 600.0
    assert own_s() == 0.0
    parts.comms.escape = None
    assert transaction._own_clock(parts)() is None


@pytest.mark.parametrize(("count", "end"), [(1, "p0 on rank 0, 1"), (8, "p7 on rank 0, 1"), (9, "; and 1 more parameters")])  # fmt: skip
def test_of_many_parameters_with_a_bad_gradient_eight_are_named(count: int, end: str) -> None:
    names = [f"p{i}" for i in range(count)]
    comms = SimpleNamespace(doubts=[], escape=None, gather_objects=lambda mine, axis: [mine, mine])
    groups = SimpleNamespace(axis=lambda name: SimpleNamespace(ranks=(0, 1)))
    buffers = SimpleNamespace(non_finite=lambda: names)
    parts: Any = SimpleNamespace(fused=None, groups=groups, comms=comms, buffers=buffers)
    tally: Any = SimpleNamespace(loss=1.0, aux_loss=0.0, z_loss=0.0)
    _, text, _ = not_finite.why_not_finite(parts, tally)
    assert text.endswith(end)


def test_biases_of_the_layers_that_this_stage_has_follow_their_counts() -> None:
    """Also where its layers are not the first ones."""
    biases = {f"layers.{layer}.moe.router.expert_bias": torch.zeros(2) for layer in (2, 3)}
    spec = SimpleNamespace(router=SimpleNamespace(bias_rate=0.5), moe_layers=(0, 1, 2, 3))
    parts: Any = SimpleNamespace(
        spec=spec, runner=SimpleNamespace(device=torch.device("cpu")), state=SimpleNamespace(buffers=biases)
    )
    transaction._update_expert_biases(parts, np.array([[4, 0], [4, 0], [0, 4], [4, 0]]))
    assert [bias.tolist() for bias in biases.values()] == [[0.5, -0.5], [-0.5, 0.5]]


def test_a_step_that_is_wrong_and_not_finite_again_is_a_matter_of_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    tally = SimpleNamespace(finite=False)
    monkeypatch.setattr(transaction, "is_checked", lambda parts: True)
    monkeypatch.setattr(transaction, "look", lambda parts: Findings(products={0: ["a product"]}))
    monkeypatch.setattr(transaction, "_compute_with_room", lambda *_, **__: (tries.append(1), tally))
    monkeypatch.setattr(transaction, "why_not_finite", lambda *_: (RunError, "the gradient is not finite", ""))
    with pytest.raises(RunError, match="step 4: the gradient is not finite; nothing was changed") as info:
        reduce_step(SimpleNamespace(), [], step=3, lr=0.1)  # type: ignore[arg-type]
    assert type(info.value) is RunError and len(tries) == 2


def test_a_step_of_text_without_labels_is_one_of_the_router_alone() -> None:
    batch = microbatch(setup(), 0)
    blank = TokenBatch(batch.tokens_BS, torch.full_like(batch.labels_BS, IGNORE), batch.positions_BS, batch.segments)
    result = train_step(one(setup()), [blank], step=0, lr=0.02)
    assert result.loss == 0.0 and result.aux_loss > 0 and math.isfinite(result.grad_norm)


def test_what_a_step_borrowed_is_free_once_it_is_committed() -> None:
    parts = one(setup(), dtype=torch.bfloat16)
    reduced = reduce_step(parts, [microbatch(setup(), 0)], step=0, lr=0.02)
    lent = [weakref.ref(part.tensor.untyped_storage()) for of in reduced.gradients.segments.values() for part in of]
    commit_step(parts, reduced)
    del reduced
    assert parts.buffers.borrowed and not any(found() is not None for found in lent)


def test_exchanges_of_what_came_before_a_step_are_not_counted_with_it() -> None:
    parts = one(setup())
    for layer in parts.spec.moe_layers:
        op_id = f"mb0.L{layer}.fwd.dispatch.rows"
        parts.comms.layers.posted(op_id, 0.0)
        parts.comms.layers.ended(op_id, 1000.0, 1000.0)
    exchange = _results(parts, setup()).exchange
    assert max(exchange.exposed_forward_s) < 1000 > max(exchange.hidden_forward_s)


def test_nothing_of_a_forward_pass_is_held_behind_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Counted(passes._TrainingPasses):
        def backward(self, *given: Any) -> Any:
            made = super().backward(*given)
            held.append(len(self._live))
            return made

    monkeypatch.setattr(passes, "_TrainingPasses", Counted)
    train_step(one(setup(), each=3), [microbatch(setup(), j) for j in range(3)], step=0, lr=0.02)
    assert held == [0, 0, 0]


def test_a_pass_of_weights_alone_makes_their_gradients_alone_and_keeps_nothing_of_them() -> None:
    said: list[Any] = []
    runner = SimpleNamespace(
        model=SimpleNamespace(deferred=frozenset({"w"})), comms=SimpleNamespace(offer_turn=lambda: None)
    )
    me: Any = SimpleNamespace(
        runner=runner, buffers=SimpleNamespace(pass_ends=lambda: said.append("ends")), _owed={(1, 0): [], (1, 2): []},
        _announce=lambda action: said.append(action.kind), _pass_begins=lambda index, of: said.append((index, set(of or ()))),
    )  # fmt: skip
    passes._TrainingPasses.weight_gradient(me, 1, 2)
    assert said == ["W", (1, {"w"}), "ends"] and list(me._owed) == [(1, 0)]


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_table_of_both_ends_leaves_behind_the_passes_of_a_first_step(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a transfer is waited for before the next is posted, and the sum over both ends would be waited for by the end that the transfers come from."""
    left: list[str] = []
    boundary = StageRunner.boundary
    monkeypatch.setattr(
        StageRunner, "boundary", lambda *given, **more: dataclasses.replace(boundary(*given, **more), in_turn=in_turn)
    )
    final = GradientBuffers.final
    monkeypatch.setattr(
        GradientBuffers, "final", lambda me, names, *more: (left.extend(names), final(me, names, *more))[1]
    )
    tied = dataclasses.replace(setup(), spec=dataclasses.replace(setup().spec, tied_embeddings=True))
    parts = one(tied)
    train_step(parts, [microbatch(tied, 0)], step=0, lr=0.02)
    tables = {p.name for p in parameters(parts.spec) if p.family == "dense_tied"}
    assert tables and (not tables & {*left} if in_turn else tables <= {*left}) and len(left) > 5
