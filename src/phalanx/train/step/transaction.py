"""One optimizer step, as a transaction: until every rank has voted, no parameter and no moment has changed.

    1. count      valid tokens of the whole step, over all ranks                        1 all-reduce of one number
    2. collect    forward and backward of the micro-batches (`train/step/passes.py`)         those of the layers, transfers of the pipeline
    3. reduce     gradients, by the rule table                                          1 reduce-scatter or all-reduce per family
    4. vote       norm, losses, counts, finite or not, stop or not, in one vector       1 all-reduce of 8 + 5*L + L*E numbers, over the world
                  (`train/step/vote.py`)
    5. commit     clip, AdamW on all that this rank keeps, expert bias; alone
    6. publish    every rank gets the new parameters                                    1 all-gather per sharded family

An elastic run commits a step once it is decided, and publishes at the beginning of whatever reads parameters next: a rank that is lost
in between takes nothing with it that its copies' keepers have not.

Everything is an argument, nothing is decided here: which micro-batches a rank runs is the loader's, who sums what is `plan/mapping/folding.py`'s, how
a gradient becomes an update is `train/step/optim.py`'s business. A non-finite number anywhere ends the step on all ranks with the same
`RunError`, which names the parameters and the ranks; the state is as it was.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.errors import PeerError
from phalanx.core.samples import owned
from phalanx.kernels.cpu.fixed_point import bits_for
from phalanx.models import (
    DecoderOutput,
    ForwardInfo,
    TokenBatch,
    counts_of_text,
    update_expert_bias,
)
from phalanx.plan.mapping import Stage
from phalanx.plan.program import Phase
from phalanx.runtime.state import ReducedGradients
from phalanx.train.step.check import Findings, check_commit, is_checked, look, unsound
from phalanx.train.step.exact import EVAL_BITS
from phalanx.train.step.loss import num_valid
from phalanx.train.step.not_finite import gave_up, why_not_finite
from phalanx.train.step.optim import clip_scale
from phalanx.train.step.parts import StepParts
from phalanx.train.step.vote import ExchangeTimes, Tally, exact_vote, plain_vote


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """A committed step; every figure is global and the same on all ranks."""

    step: int
    loss: float
    """Mean cross-entropy per valid token, nats."""
    aux_loss: float
    z_loss: float
    mtp_loss: float
    """Mean over the blocks of multi-token prediction, per valid token, nats, without its weight; 0 where there are none."""
    grad_norm: float
    """Norm of the gradients before clipping."""
    lr: float
    tokens: int
    """Tokens of the step, those without a label and padding included."""
    counts_LE: NDArray[np.int64]
    """Tokens of text that chose each expert, before dropping."""
    dropped: int
    """(token, expert) pairs over all layers."""
    entropy: float
    """Mean over tokens of text and layers of the router's entropy, nats."""
    stop: bool
    """Some rank asked to stop after this step."""
    exchange: ExchangeTimes
    """Times of dispatch and combine."""
    seconds: tuple[float, ...] = ()
    """What each rank took for its own share, waits left out; empty where it is not known."""

    @property
    def load_max_over_mean(self) -> tuple[float, ...]:
        """Tokens of the fullest expert over the mean, per MoE layer."""
        return tuple(float(c.max() / max(c.mean(), 1e-9)) for c in self.counts_LE)

    @property
    def dead_experts(self) -> int:
        """Experts that no token of this step chose, over all layers."""
        return int((self.counts_LE == 0).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducedStep:
    """A step whose gradients are reduced and voted for on all ranks, and which has changed nothing yet."""

    step: int
    lr: float
    tokens: int
    gradients: ReducedGradients
    tally: Tally
    findings: tuple[str, ...] = ()
    """What was wrong with it when it was first made, where steps are checked."""

    def clip_scale(self, clip_norm: float) -> float:
        """What its gradients are multiplied by."""
        return clip_scale(self.tally.grad_norm, clip_norm)


def train_step(
    parts: StepParts,
    batches: Sequence[TokenBatch],
    *,
    step: int,
    lr: float,
    stop: bool = False,
) -> StepResult:
    """Run step `step` (from 0) on this rank's micro-batches and commit it. Collective; all ranks have equally many micro-batches, empty ones included.

    `stop` is this rank's wish to end the run after this step; the result says whether any rank has it. Raises `RunError` on all
    ranks, with the state unchanged, where a gradient or a loss is not finite.
    """
    result = commit_step(parts, reduce_step(parts, batches, step=step, lr=lr, stop=stop))
    publish(parts)
    return result


def reduce_step(
    parts: StepParts, batches: Sequence[TokenBatch], *, step: int, lr: float, stop: bool = False
) -> ReducedStep:
    """Everything of a step that changes nothing. Collective; arguments and errors are those of `train_step`."""
    findings: tuple[str, ...] = ()
    for again in (False, True) if is_checked(parts) else (True,):
        gradients, tally = _compute_with_room(parts, batches, step=step, stop=stop)
        found = look(parts) if is_checked(parts) else Findings()
        if found.state or (found and again and tally.finite):
            raise unsound(parts, found, step=step)
        if not found and tally.finite:
            break
        if again or not found:
            kind, text, hint = why_not_finite(parts, tally)
            if again:
                raise kind(f"step {step + 1}: {text}; nothing was changed{hint}")
        findings = tuple(found.explain()) or (text,)
        if found.messages:
            parts.state.publish(parts.comms)
    tokens = _tokens_of_step(parts, batches)
    return ReducedStep(step=step, lr=lr, tokens=tokens, gradients=gradients, tally=tally, findings=findings)


def _compute_with_room(
    parts: StepParts, batches: Sequence[TokenBatch], *, step: int, stop: bool
) -> tuple[ReducedGradients, Tally]:
    """In exact mode with as many binary places as the gradients of this step leave room for."""
    bits = None if parts.exact is None else parts.exact.bits
    gradients, tally = _compute(parts, batches, step=step, stop=stop, bits=bits)
    if tally.too_large:
        bits = _fewer_bits(parts)
        gradients, tally = _compute(parts, batches, step=step, stop=stop, bits=bits)
    return gradients, tally


def commit_step(parts: StepParts, reduced: ReducedStep) -> StepResult:
    """Apply it. Needs no other rank; parameters are not to be read before `publish`."""
    tally = reduced.tally
    scale = reduced.clip_scale(parts.clip_norm)
    parts.state.is_published = False
    with torch.no_grad(), parts.comms.doing("commit"):
        parts.optimizer.commit(parts.state, reduced.gradients, step=reduced.step, lr=reduced.lr, scale=scale)
        _update_expert_biases(parts, tally.counts_LE)
    check_commit(parts, step=reduced.step)
    parts.comms.doubts.clear()
    parts.buffers.release()
    return _result(tally, step=reduced.step, lr=reduced.lr, tokens=reduced.tokens, top_k=parts.spec.top_k)


def publish(parts: StepParts) -> None:
    """Give every rank the parameters of the last step committed; nothing where all have them. Collective."""
    if not parts.state.is_published:
        parts.state.publish(parts.comms)


def _compute(
    parts: StepParts, batches: Sequence[TokenBatch], *, step: int, stop: bool, bits: int | None
) -> tuple[ReducedGradients, Tally]:
    """Everything of a step that changes nothing: from counting to the vote."""
    own_s = _own_clock(parts)
    parts.buffers.begin(bits)
    parts.comms.layers.take()  # what came before is of no step
    parts.comms.doubts.clear()
    valid_tokens = parts.comms.all_reduce(num_valid(batches), parts.groups.step_axis("dp_cp"), op_id="valid_tokens")
    balance_counts_LE = _balance_counts(parts, batches, step=step)
    infos = _infos(parts, batches, step=step, balance_counts_LE=balance_counts_LE)
    shares = parts.runner.train(batches, infos, valid_tokens=valid_tokens, buffers=parts.buffers)
    gradients = parts.buffers.reduce(parts.groups, parts.comms)
    vote = plain_vote if parts.exact is None else exact_vote
    return gradients, vote(parts, gradients, shares, stop=stop, own_s=own_s())


def _own_clock(parts: StepParts) -> Callable[[], float | None]:
    """Seconds from now on, without those in which the rank waited for messages; None where these are not recorded (only an elastic run does)."""
    escape, begin_s = parts.comms.escape, time.monotonic()
    if escape is None:
        return lambda: None
    waited_s = escape.waited_s
    return lambda: max(0.0, time.monotonic() - begin_s - (escape.waited_s - waited_s))


def _fewer_bits(parts: StepParts) -> int:
    """Number of binary places that leave room for the largest gradient of this step: a function of the samples, the same for any
    ranks."""
    assert parts.exact is not None
    top = torch.tensor([parts.buffers.top], dtype=torch.float64, device=parts.runner.device)
    parts.comms.all_reduce(top, parts.groups.step_axis("world"), op="max", op_id="largest_gradient")
    return bits_for(float(top), parts.exact.summands)  # SYNC: of the vote


@torch.no_grad()
def eval_loss(parts: StepParts, batches: Sequence[TokenBatch], *, step: int = 0) -> tuple[float, int]:
    """Mean cross-entropy per valid token over all ranks' `batches`, and how many tokens that is. Collective; changes nothing."""
    infos = _infos(parts, batches, step=step, phase="eval")
    sums = torch.zeros(2, dtype=torch.float64, device=parts.runner.device)

    def add(stage: Stage, j: int, output: DecoderOutput) -> None:
        if not stage.has_head:
            return
        loss = parts.model.cross_entropy_sum(output.hidden_TH, batches[j], infos[j]).to(torch.float64)
        if parts.exact is not None:  # whole units, which add up to the same in any order
            loss = (loss * 2.0**EVAL_BITS).round() * 2.0**-EVAL_BITS
        if parts.groups.axis("tp").index == 0:  # all of a tp group have the same loss
            sums.add_(torch.stack([loss, num_valid([batches[j]]).to(torch.float64)]))

    parts.runner.forward(batches, infos, add)
    fault = None if parts.fused is None else parts.fused.fault()
    if fault is not None:
        sums[0] += fault
    parts.comms.all_reduce(sums, parts.groups.step_axis("world"), op_id="eval")
    total, tokens = sums.tolist()  # SYNC: the figures are for people
    if parts.fused is not None and math.isnan(total) and (waited := gave_up(parts)):
        raise PeerError(f"validation after step {step}: {waited}")
    return total / max(tokens, 1.0), int(tokens)


def _infos(
    parts: StepParts,
    batches: Sequence[TokenBatch],
    *,
    step: int,
    phase: Phase = "fwd",
    balance_counts_LE: torch.Tensor | None = None,
) -> list[ForwardInfo]:
    """One for each micro-batch of this rank."""
    folding, rounds = parts.groups.folding, len(batches)
    replica = folding.replica_of(parts.groups.rank)
    samples = parts.samples if parts.samples is not None and phase != "eval" else folding.replicas * rounds
    numbers = list(owned(samples, owners=folding.replicas, owner=replica))
    numbers += [samples + replica] * (rounds - len(numbers))  # empty ones are no micro-batch of the step
    return [
        ForwardInfo(
            step=step,
            microbatch=number,
            phase=phase,
            num_microbatches=samples,
            rounds=rounds,
            balance_counts_LE=balance_counts_LE,
        )
        for number in numbers
    ]


@torch.no_grad()
def _balance_counts(parts: StepParts, batches: Sequence[TokenBatch], *, step: int) -> torch.Tensor | None:
    """(L, E) counts of the whole step, where the balancing loss is over the global batch and one pass does not see all of it.

    A first pass without gradients routes every micro-batch; the second pass then has the final counts from its first micro-batch on.
    Each rank needs those of its own layers, and has zeros for the others.
    """
    router = parts.spec.router
    if not (router.aux_loss and router.aux_scope == "global_batch" and len(batches) > 1 and parts.spec.moe_layers):
        return None
    shape = (len(parts.spec.moe_layers), parts.spec.num_experts)
    counts_LE = torch.zeros(shape, dtype=torch.float64, device=parts.runner.device)

    def add(stage: Stage, j: int, output: DecoderOutput) -> None:
        for i, stats in zip(output.moe_layers, output.routing, strict=True):
            counts_LE[i] += stats.balance_counts_E

    parts.runner.forward(batches, _infos(parts, batches, step=step, phase="count"), add)
    parts.comms.all_reduce(counts_LE, parts.groups.step_axis("tp_dp_cp"), op_id="balance_counts")
    return counts_of_text(counts_LE, pairs=_tokens_of_step(parts, batches) * parts.spec.top_k)


def _update_expert_biases(parts: StepParts, counts: NDArray[np.int64]) -> None:
    rate = parts.spec.router.bias_rate
    if not rate:
        return
    counts_LE = torch.from_numpy(counts).to(parts.runner.device, non_blocking=True)
    for layer, counts_E in zip(parts.spec.moe_layers, counts_LE, strict=True):
        bias_E = parts.state.buffers.get(f"layers.{layer}.moe.router.expert_bias")
        if bias_E is None:  # of another stage
            continue
        update_expert_bias(bias_E, counts_E, rate)


def _tokens_of_step(parts: StepParts, batches: Sequence[TokenBatch]) -> int:
    """All micro-batches have the same shape, empty ones too, which do not count."""
    with_empty = sum(batch.num_tokens for batch in batches) * parts.groups.axis("dp_cp").size
    rounds = parts.groups.folding.replicas * len(batches)
    return with_empty * (parts.samples or rounds) // rounds


def _result(tally: Tally, *, step: int, lr: float, tokens: int, top_k: int) -> StepResult:
    return StepResult(
        step=step,
        loss=tally.loss,
        aux_loss=tally.aux_loss,
        z_loss=tally.z_loss,
        mtp_loss=tally.mtp_loss,
        grad_norm=tally.grad_norm,
        lr=lr,
        tokens=tokens,
        counts_LE=tally.counts_LE,
        dropped=tally.dropped,
        entropy=tally.entropy_sum / max(1, int(tally.counts_LE.sum()) // max(1, top_k)),
        stop=tally.stop,
        exchange=tally.exchange,
        seconds=tally.seconds,
    )
