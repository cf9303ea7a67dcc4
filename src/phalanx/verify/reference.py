"""The one-rank run that every mapping is held against, and the choice of data on which that comparison is fair.

In fp64 the data is whatever `numbers.py` draws. In fp32 and bf16 a token whose k-th and (k+1)-th best expert are closer than rounding may be
routed differently when rows of a product are summed in another order; its gradient then differs by far more than rounding, and nothing
is wrong. So such tokens are looked for and replaced: copies of each micro-batch get random errors of the size of rounding on what
the first MoE layer's block put out (`NOISE * eps * root mean square` of a token), and as long as a decision of the second one (chosen experts; kept
rows, where some are dropped) differs between copies, the first such token of each sequence becomes another one. How many is reported. The
first MoE layer is never in doubt: what comes before it is computed alike in every mapping.

Legend: T tokens, K experts of a token, L MoE layers, C copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.core.config import ResilienceConfig, TrainConfig
from phalanx.core.errors import RunError
from phalanx.core.samples import num_rounds
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.products import ProductSums
from phalanx.kernels.native import compiled_rows
from phalanx.kernels.ops.rope import rope_table
from phalanx.models import Block, Decoder, ForwardInfo, ModelContext, Routing, TokenBatch, parts_of_all
from phalanx.plan.layout import Box, local_param
from phalanx.plan.mapping import (
    GRADIENT_RULES,
    AnyFolding,
    AnyPlacement,
    Folding,
    GradientRule,
    make_folding,
    plain_placement,
)
from phalanx.plan.model import buffers, parameters
from phalanx.plan.moe import DispatchSpec, capacity, kept_pairs
from phalanx.plan.pipeline import Pipeline
from phalanx.runtime.comm import Collectives, GroupCache, Groups, MessageSums, build_groups
from phalanx.runtime.state import BoxTensor, ReducedGradients, ShardedState
from phalanx.train import assemble
from phalanx.train.step import Optimizer, State, StepParts, StepResult, exact_sums, train_step
from phalanx.verify.numbers import Patch, StartingValues, another_token, generator, microbatch
from phalanx.verify.setups import SEQ_LEN, SEQUENCES, Setup

STEP = 3
"""The step that is run: not the first, so that bias corrections are not what they are at the start."""
NOISE = 1.0
"""Errors put on a token, in roundings of its root mean square. Mappings differ by a third of that (partial sums over etp and over sources are
rounded, and that tips the rounding of what they are added to), so a decision that so many such errors leave alone stays."""
NOISY_COPIES = (3, 16)
"""Few find most doubtful tokens; the larger number is for data that the few find nothing in."""
EXACT = ResilienceConfig(mode="exact", chunk_rows=8, fixed_bits=60)
"""Several chunks of an expert's rows, and binary places such that float64 shows what is wrong: as many as the gradients leave room for."""
ALONE = make_folding(world=1)
HOST = torch.device("cpu")
MAX_PATCHES = 400
FREELY = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """What one rank computed; tensors are logical and whole."""

    patches: tuple[tuple[Patch, ...], ...]
    """Tokens of each micro-batch of the step that were replaced, because rounding could have routed them."""
    initial: dict[str, torch.Tensor]
    """Parameters as `Decoder` makes them."""
    gradients: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    """State and parameters after the step, by box name."""
    result: StepResult


@dataclass(eq=False)
class GradientRecorder:
    """An optimizer that keeps a copy of the reduced gradients before it hands them on."""

    inner: Optimizer
    gradients: ReducedGradients | None = None

    def commit(self, state: ShardedState, gradients: ReducedGradients, *, step: int, lr: float, scale: float) -> None:
        segments = {
            family: tuple(dataclasses.replace(s, tensor=s.tensor.clone()) for s in parts)
            for family, parts in gradients.segments.items()
        }
        self.gradients = dataclasses.replace(gradients, segments=segments)
        self.inner.commit(state, gradients, step=step, lr=lr, scale=scale)

    def update(
        self, state: State, gradient: torch.Tensor, rounded: torch.Tensor | None, *, decay: bool, step: int, lr: float, scale: float
    ) -> None:  # fmt: skip
        self.inner.update(state, gradient, rounded, decay=decay, step=step, lr=lr, scale=scale)


def context(
    setup: Setup,
    groups: Groups,
    comms: Collectives,
    *,
    dtype: torch.dtype,
    device: torch.device = HOST,
    placement: AnyPlacement | None = None,
) -> ModelContext:
    """`placement`: of experts with replicas; None: plain. Products are checked where `comms` checks messages (`collectives`)."""
    sums = None if comms.sums is None else ProductSums()
    return ModelContext(
        spec=setup.spec,
        dispatch=setup.dispatch,
        placement=placement or plain_placement(max(setup.spec.num_experts, 1), groups.folding.of_rank(groups.rank)),
        expert_state=setup.replicas.state if setup.replicas is not None else "whole",
        groups=groups,
        comms=comms,
        dtype=dtype,
        device=device,
        kernels="reference" if setup.kernels == "reference" else "fast",
        lanes=Lanes(1, rows=compiled_rows() if setup.kernels == "compiled" else None, sums=sums),
        recompute=setup.recompute,
        cp_method=setup.cp_method,
        seed=11,
    )


def collectives(setup: Setup, rank: int, *, timeout_s: float, make: type[Collectives] = Collectives) -> Collectives:
    """Those of a rank; they check messages where the setup asks for checks."""
    rows = compiled_rows() if setup.kernels == "compiled" else None
    return make(timeout_s=timeout_s, sums=MessageSums(rank, rows=rows) if setup.check else None)


def on_mapping(
    setup: Setup,
    ctx: ModelContext,
    *,
    num_microbatches: int,
    pipeline: Pipeline,
    rules: Mapping[str, GradientRule] = GRADIENT_RULES,
) -> StepParts:
    """This rank's part of the step, sharded and summed as the setup says. `num_microbatches`: of all ranks."""
    folding, rank = ctx.groups.folding, ctx.groups.rank
    train = TrainConfig(micro_batch=SEQUENCES, seq_len=SEQ_LEN, global_batch=SEQUENCES * num_microbatches)
    return assemble(
        ctx,
        optim=setup.optim,
        num_microbatches=num_rounds(num_microbatches, owners=folding.replicas),
        pipeline=pipeline,
        rules=rules,
        samples=num_microbatches,
        exact=exact_sums(EXACT, train, folding, spec=setup.spec, rank=rank) if setup.exact else None,
        holders=setup.holders,
    )


def run_step(
    parts: StepParts,
    batches: Sequence[TokenBatch],
    *,
    values: StartingValues | None = None,
    alter: Callable[[StepParts], StepParts] = lambda parts: parts,
) -> tuple[StepResult, ReducedGradients]:
    """One clipped step from the starting state of `numbers.py`, and the gradients that it applied. `alter` plants a fault."""
    start(parts, values if values is not None else StartingValues())
    parts = alter(parts)
    recorder = GradientRecorder(parts.optimizer)
    result = train_step(dataclasses.replace(parts, optimizer=recorder), batches, step=STEP, lr=0.02)
    assert recorder.gradients is not None  # the step was committed, or it has raised
    return result, recorder.gradients


def start(parts: StepParts, values: StartingValues) -> None:
    """Put the step into the starting state of `numbers.py`. Collective."""
    values.fill(parts.state.boxes(), {p.name: p for p in parameters(parts.spec)})
    parts.state.restore(parts.comms)


def model_boxes(parts: StepParts) -> list[BoxTensor]:
    """What the modules compute with, `param/<name>` and `buffer/<name>`: read from the modules, not from the state behind them."""
    folding, rank = parts.groups.folding, parts.groups.rank
    placement = parts.placement or plain_placement(max(parts.spec.num_experts, 1), folding.of_rank(rank))
    held = dict(parts.model.named_parameters())
    out = []
    for param in parameters(parts.spec):
        if param.name not in held:  # of another pipeline stage
            continue
        for piece in local_param(param, folding, placement, rank).pieces:
            tensor = held[param.name].detach()[piece.local.slices()]
            out.append(BoxTensor(f"param/{param.name}", param.shape, piece.box, tensor, primary=False))
    tensors = dict(parts.model.named_buffers())
    for name, shape in buffers(parts.spec):
        if name not in tensors:
            continue
        out.append(BoxTensor(f"buffer/{name}", shape, Box((0,) * len(shape), shape), tensors[name], primary=False))
    return out


def reference_run(
    setup: Setup,
    *,
    num_microbatches: int,
    dtype: torch.dtype,
    folding: Folding = ALONE,
    values: StartingValues | None = None,
) -> Reference:
    """Run the setup on this process alone: all micro-batches of the step, one after the other, nothing sharded or recomputed.

    Only the tp and cp of `folding` matter, and only where rows are dropped by sub-sequence, which depends on them by design.
    """
    parts = alone(setup, num_microbatches=num_microbatches, dtype=dtype)
    initial = {b.name: b.tensor.clone() for b in model_boxes(parts)}
    values = values if values is not None else StartingValues()
    start(parts, values)
    patches = tuple(
        _patches(parts.model, setup, j, num_microbatches=num_microbatches, dtype=dtype) for j in range(num_microbatches)
    )
    batches = [in_parts(microbatch(setup, j, patches=patches[j]), folding) for j in range(num_microbatches)]
    result, gradients = run_step(parts, batches, values=values)
    _must_exercise(setup, result)
    after = [*parts.state.boxes(), *model_boxes(parts)]
    return Reference(
        patches=patches,
        initial=initial,
        gradients={b.name: b.tensor.clone() for b in gradients.boxes()},  # not the whole buffer behind each
        after={b.name: b.tensor.clone() for b in after},
        result=result,
    )


def alone(setup: Setup, *, num_microbatches: int, dtype: torch.dtype) -> StepParts:
    """The step of the setup on this process alone; nothing is sharded or recomputed, and in float64 the kernels are the plain ones."""
    plain = dataclasses.replace(setup, zero=0, recompute="none")
    if dtype == torch.float64:
        plain = dataclasses.replace(plain, kernels="reference")
    groups = build_groups(ALONE, rank=0, cache=GroupCache())
    ctx = context(plain, groups, Collectives(), dtype=dtype)
    return assemble(ctx, optim=plain.optim, num_microbatches=num_microbatches)


def partition(setup: Setup, folding: AnyFolding) -> Folding:
    """The mapping whose parts of a micro-batch the one-rank run must know: the tp and cp alone, where rows are dropped by part of a sequence.

    Raises `RunError` where the stages have parts of their own: no one-rank run drops by all of them.
    """
    by_part = setup.dispatch.policy == "drop" and setup.dispatch.drop_scope == "sub_sequence"
    if not by_part:
        return ALONE
    if not isinstance(folding, Folding):
        raise RunError(
            'stages with foldings of their own drop by different parts of a sequence; verify with dispatch.drop_scope = "full_sequence"'
        )
    return Folding(world=folding.tp * folding.cp, tp=folding.tp, cp=folding.cp)


def in_parts(batch: TokenBatch, folding: Folding) -> TokenBatch:
    """The micro-batch with the part that each token would lie in on `folding`."""
    if folding.tp * folding.cp == 1:
        return batch
    return dataclasses.replace(batch, part_T=parts_of_all(batch, folding))


def _must_exercise(setup: Setup, result: StepResult) -> None:
    """A comparison in which nothing was clipped or dropped would prove less than it says."""
    if not result.grad_norm > setup.optim.clip_norm:
        raise RunError(
            f"verification data: gradient norm {result.grad_norm:g} does not reach clip_norm ({setup.label})"
        )
    if setup.dispatch.policy == "drop" and setup.spec.moe_layers and result.dropped == 0:
        raise RunError(f"verification data: no row is dropped ({setup.label})")


# ---- data on which rounding decides nothing ------------------------------------------------------------------------------------


def _patches(
    model: Decoder, setup: Setup, index: int, *, num_microbatches: int, dtype: torch.dtype
) -> tuple[Patch, ...]:
    """Replacements after which the routing of micro-batch `index` survives noise. Raises `RunError` where none are found."""
    patches: list[Patch] = []
    if dtype == torch.float64 or len(setup.spec.moe_layers) < 2:
        return ()
    if len(setup.spec.moe_layers) > 2:  # what noise does behind the second is not looked for
        layers = f"{len(setup.spec.moe_layers)} layers with experts"
        raise RunError(
            f"rounding can be kept from deciding the routing of two layers with experts, and this has {layers}: use float64"
        )
    info = ForwardInfo(microbatch=index, num_microbatches=num_microbatches)
    while len(patches) < MAX_PATCHES:
        batch = microbatch(setup, index, patches=patches)
        doubtful_T = _doubtful_tokens(model, setup.dispatch, batch, info, noise=NOISE * torch.finfo(dtype).eps)
        if not doubtful_T.any():
            return tuple(patches)
        for b, doubtful_S in enumerate(np.split(doubtful_T, SEQUENCES)):
            if doubtful_S.any():  # a token sees those before it only, so the first one in doubt comes first
                token = another_token(setup, index, attempt=len(patches))
                patches.append((b, int(doubtful_S.argmax()), token))
    raise RunError(
        f"verification data: rounding decides the routing of micro-batch {index} after {MAX_PATCHES} changes"
    )


@torch.no_grad()
def _doubtful_tokens(
    model: Decoder, dispatch: DispatchSpec, batch: TokenBatch, info: ForwardInfo, *, noise: float
) -> NDArray[np.bool_]:
    """(T,) tokens that the second MoE layer treats otherwise in some copy with noise on what the first one's block put out."""
    first, second = (block for block in model.layers.values() if isinstance(block, Block) and block.moe is not None)
    assert second.moe is not None
    found: list[torch.Tensor] = []
    listener = _Listener(
        dispatch, np.ones(batch.num_tokens, bool) if batch.text is None else batch.text.is_text_T.numpy()
    )
    with _hook(first, lambda module, args, out: found.append(out[0] + out[1])), _hook(second.moe.router, listener):
        model(batch, info)
        x_TH = found[0].float()
        scale_T1 = noise * x_TH.square().mean(-1, keepdim=True).sqrt()
        doubtful_T = np.zeros(batch.num_tokens, dtype=bool)
        for count in NOISY_COPIES:
            copies = _repeated(batch, count)
            errors_CTH = torch.randn((count, *x_TH.shape), generator=generator(f"noise/{info.microbatch}"))
            x_NH = (x_TH + scale_T1 * errors_CTH).to(model.dtype).flatten(0, 1)
            table = rope_table(
                copies.positions_BS,
                head_dim=model.spec.rotary_dim,
                theta=model.spec.rope_theta,
                dtype=model.dtype,
                yarn=model.spec.yarn,
            )
            second(x_NH, None, table=table, info=info, batch=copies)
            doubtful_T = (listener.found[-1] != listener.found[0]).any(axis=(0, 2))
            if doubtful_T.any():
                break
    return doubtful_T


def _repeated(batch: TokenBatch, count: int) -> TokenBatch:
    tokens_BS, labels_BS, positions_BS = (
        part.repeat(count, 1) for part in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)
    )
    return TokenBatch(tokens_BS, labels_BS, positions_BS, batch.segments * count, padding=batch.padding * count)


@dataclass(eq=False)
class _Listener:
    """Notes what a router decides of text: (C, T, E) 0 not chosen, 1 dropped, 2 kept; + FREELY where chosen by the scores alone.

    Copies of a micro-batch that come one after the other (C of them) are told apart, also where rows are dropped.
    """

    dispatch: DispatchSpec
    is_text_T: NDArray[np.bool_]
    found: list[NDArray[np.int8]] = field(default_factory=list)

    def __call__(self, module: Any, args: Any, routing: Routing) -> None:
        # the balance loss counts the best experts without bias and groups: another decision (all scores rise with the logit)
        logits_NE = args[0].float() @ module.weight.float().T
        free_NK = torch.topk(logits_NE, routing.experts_TK.shape[1]).indices
        parts = [
            part.numpy().reshape(-1, len(self.is_text_T), part.shape[1])[:, self.is_text_T]
            for part in (routing.experts_TK, routing.weights_TK.double(), free_NK)
        ]
        num_experts = logits_NE.shape[1]
        tables = [self._table(e, w, free, num_experts) for e, w, free in zip(*parts, strict=True)]
        found_CTE = np.zeros((len(tables), len(self.is_text_T), num_experts), dtype=np.int8)
        found_CTE[:, self.is_text_T] = tables
        self.found.append(found_CTE)

    def _table(self, experts_TK: Any, weights_TK: Any, free_TK: Any, num_experts: int) -> NDArray[np.int8]:
        num_tokens, top_k = len(self.is_text_T), experts_TK.shape[1]
        kept_TK = np.ones(experts_TK.shape, dtype=bool)
        if self.dispatch.policy == "drop":
            rows = capacity(self.dispatch, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts)
            kept_TK = kept_pairs(experts_TK, weights_TK, rows=rows, by=self.dispatch.drop_by)
        table_TE = np.zeros((len(experts_TK), num_experts), dtype=np.int8)
        np.put_along_axis(table_TE, experts_TK, 1 + kept_TK.astype(np.int8), axis=1)
        np.put_along_axis(table_TE, free_TK, np.take_along_axis(table_TE, free_TK, axis=1) + FREELY, axis=1)
        return table_TE


@contextmanager
def _hook(module: nn.Module, function: Any) -> Iterator[None]:
    handle = module.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()
