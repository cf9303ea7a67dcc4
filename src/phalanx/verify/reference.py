"""The one-rank run that every mapping is held against, and the choice of data on which that comparison is fair.

In fp64 the data is draw 0, whatever it is. In fp32 and bf16 a token whose k-th and (k+1)-th best expert are closer than rounding may be routed
differently when rows of a product are summed in another order; its gradient then differs by far more than rounding, and nothing
is wrong. So data is drawn again, micro-batch by micro-batch, until no routing decision (chosen experts, and kept rows where some are dropped)
changes under `NOISE_DRAWS` random relative errors of `NOISE` roundings on everything that the MoE layers put out. How often
that was needed is reported. The first MoE layer's decisions never depend on it: what comes before is computed alike in every mapping.

Legend: T tokens, K experts of a token, L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from phalanx.core.errors import RunError
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.decoder import Decoder
from phalanx.models.moe import MoE
from phalanx.models.router import Routing
from phalanx.plan.dispatch import DispatchSpec, capacity, kept_pairs
from phalanx.plan.folding import make_folding
from phalanx.plan.model import parameters
from phalanx.plan.placement import plain_placement
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.gradients import ReducedGradients
from phalanx.runtime.groups import GroupCache, Groups, build_groups
from phalanx.runtime.optimizer_state import ShardedState
from phalanx.train.assemble import assemble
from phalanx.train.optim import Optimizer
from phalanx.train.step import StepParts, StepResult, train_step
from phalanx.verify.numbers import fill_state, generator, microbatch
from phalanx.verify.setups import Setup

STEP = 3
"""The step that is run: not the first, so that bias corrections are not what they are at the start."""
NOISE = 4.0
NOISE_DRAWS = 3
MAX_DRAWS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """What one rank computed; tensors are logical and whole."""

    draws: tuple[int, ...]
    """Per micro-batch of the step: which draw of its data is used."""
    initial: dict[str, torch.Tensor]
    """Parameters as `Decoder` makes them."""
    gradients: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    """State and parameters after the step, by box name."""
    result: StepResult


@dataclass(eq=False)
class Recorder:
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


def context(setup: Setup, groups: Groups, comms: Collectives, *, dtype: torch.dtype) -> ModelContext:
    return ModelContext(
        spec=setup.spec,
        dispatch=setup.dispatch,
        placement=plain_placement(max(setup.spec.num_experts, 1), groups.folding),
        groups=groups,
        comms=comms,
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=setup.kernels,
        recompute=setup.recompute,
        seed=11,
    )


def run_step(parts: StepParts, batches: Sequence[TokenBatch]) -> tuple[StepResult, ReducedGradients]:
    """One clipped step from the starting state of `numbers.py`, and the gradients that it applied."""
    fill_state(parts.state.boxes(), {p.name: p for p in parameters(parts.spec)})
    parts.state.restore(parts.comms)
    recorder = Recorder(parts.optimizer)
    result = train_step(dataclasses.replace(parts, optimizer=recorder), batches, step=STEP, lr=0.02)
    assert recorder.gradients is not None  # the step was committed, or it has raised
    return result, recorder.gradients


def reference_run(setup: Setup, *, num_microbatches: int, dtype: torch.dtype) -> Reference:
    """Run the setup on this process alone: all micro-batches of the step, one after the other, nothing sharded or recomputed."""
    plain = dataclasses.replace(setup, zero=0, recompute="none")
    if dtype == torch.float64:
        plain = dataclasses.replace(plain, kernels="reference")
    groups = build_groups(make_folding(world=1), rank=0, cache=GroupCache())
    parts = assemble(
        context(plain, groups, Collectives(), dtype=dtype), optim=plain.optim, num_microbatches=num_microbatches
    )
    initial = {b.name: b.tensor.clone() for b in parts.state.parameter_boxes()}
    fill_state(parts.state.boxes(), {p.name: p for p in parameters(parts.spec)})
    parts.state.restore(parts.comms)
    draws = tuple(
        _robust_draw(parts.model, setup, j, num_microbatches=num_microbatches, dtype=dtype)
        for j in range(num_microbatches)
    )
    batches = [microbatch(setup, j, draw=draw) for j, draw in enumerate(draws)]
    result, gradients = run_step(parts, batches)
    _must_exercise(setup, result)
    after = [*parts.state.boxes(), *parts.state.parameter_boxes()]
    return Reference(
        draws=draws,
        initial=initial,
        gradients={b.name: b.tensor for b in gradients.boxes()},
        after={b.name: b.tensor.clone() for b in after},
        result=result,
    )


def _must_exercise(setup: Setup, result: StepResult) -> None:
    """A comparison in which nothing was clipped or dropped would prove less than it says."""
    if not result.grad_norm > setup.optim.clip_norm:
        raise RunError(
            f"verification data: gradient norm {result.grad_norm:g} does not reach clip_norm ({setup.label})"
        )
    if setup.dispatch.policy == "drop" and setup.spec.moe_layers and result.dropped == 0:
        raise RunError(f"verification data: no row is dropped ({setup.label})")


# ---- data on which rounding decides nothing ------------------------------------------------------------------------------------


def _robust_draw(model: Decoder, setup: Setup, index: int, *, num_microbatches: int, dtype: torch.dtype) -> int:
    """The first draw of micro-batch `index` whose routing survives noise. Only layers behind the first MoE layer can be in doubt."""
    if dtype == torch.float64 or len(setup.spec.moe_layers) < 2:
        return 0
    info = ForwardInfo(microbatch=index, num_microbatches=num_microbatches)
    size = NOISE * torch.finfo(dtype).eps
    for draw in range(MAX_DRAWS):
        batch = microbatch(setup, index, draw=draw)
        plain = _decisions(model, setup.dispatch, batch, info)
        noisy = (
            _decisions(model, setup.dispatch, batch, info, noise=size, key=f"noise/{index}/{draw}/{i}")
            for i in range(NOISE_DRAWS)
        )
        if all(np.array_equal(plain, other) for other in noisy):
            return draw
    raise RunError(
        f"verification data: no draw of micro-batch {index} in {MAX_DRAWS} is routed beyond rounding ({setup.label})"
    )


@torch.no_grad()
def _decisions(
    model: Decoder, dispatch: DispatchSpec, batch: TokenBatch, info: ForwardInfo, *, noise: float = 0.0, key: str = ""
) -> Any:
    """(L, T, E) 0 not chosen, 1 dropped, 2 kept."""
    found: list[Any] = []

    def listen(module: nn.Module, args: Any, routing: Routing) -> None:
        experts, weights = routing.experts_TK.numpy(), routing.weights_TK.double().numpy()
        num_tokens, top_k = experts.shape
        num_experts = len(routing.counts_E)
        kept = np.ones(experts.shape, dtype=bool)
        if dispatch.policy == "drop":
            rows = capacity(dispatch, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts)
            kept = kept_pairs(experts, weights, rows=rows, by=dispatch.drop_by)
        table = np.zeros((num_tokens, num_experts), dtype=np.int8)
        np.put_along_axis(table, experts, 1 + kept.astype(np.int8), axis=1)
        found.append(table)

    rng = generator(key)

    def disturb(module: nn.Module, args: Any, out: Any) -> Any:
        y_TH, stats = out
        return y_TH * (1 + noise * torch.randn(y_TH.shape, generator=rng).to(y_TH.dtype)), stats

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MoE):
                stack.enter_context(_hook(module.router, listen))
                if noise:
                    stack.enter_context(_hook(module, disturb))
        model(batch, info)
    return np.stack(found)


@contextmanager
def _hook(module: nn.Module, function: Any) -> Iterator[None]:
    handle = module.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()
