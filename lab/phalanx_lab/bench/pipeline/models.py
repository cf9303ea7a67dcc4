"""The two models of `phalanx bench pipeline`: a decoder, and a U-shaped one whose skip connections cross stages. Small, real, and paced.

Each stage is a transformer block on the whole rows of a micro-batch; the ranks of a stage compute the same, so that what crosses is
replicated over them, as the activation between tensor-parallel layers is. In the U-shaped model the two lower stages give their output
once more to the stage at the same height on the way up, which adds a projection of it. Matrices put their weight gradients off
(`kernels/ops/deferred.py`), so that every schedule runs the same products and adds them up in the same order.

*Paced*: ranks exceed processors here, so a pass does its computation and then waits until the time of its kind is over. What schedule and wire
make of the passes is real; how long a pass takes is set.

Legend: T rows, H hidden, N sequences, S positions, A heads, V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.kernels.ops.deferred import DeferredGradients, DeferredProduct, later_linear, run
from phalanx.plan.pipeline.schedule.clock import Edge
from phalanx.runtime.pipeline.runner import Tensors

STAGES = 4
VOCAB = 64
HEADS = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One of the two models. A tensor between stages has `sequences * seq_len` rows of `hidden` numbers, times the edge's width."""

    name: str
    sequences: int
    seq_len: int
    hidden: int
    widths: Mapping[Edge, int]
    """How many tensors cross each edge, side by side."""
    transfers_per_forward: float
    """f / c: transfers of one tensor in the time that a forward pass is given."""
    bar: float
    """The last configuration over the first, at least."""
    skips: Mapping[int, int] = field(default_factory=dict)
    """Stage -> the stage whose output it adds."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self.widths)

    @property
    def rows(self) -> int:
        return self.sequences * self.seq_len

    @property
    def tensor_bytes(self) -> int:
        return 4 * self.rows * self.hidden

    def shape(self, edge: Edge) -> tuple[int, int]:
        return self.rows, self.hidden * self.widths[edge]


MODELS = {
    "decoder": ModelShape(
        name="decoder", sequences=72, seq_len=16, hidden=64,
        widths={(0, 1): 1, (1, 2): 1, (2, 3): 1}, transfers_per_forward=4, bar=1.10,
    ),
    "u_shaped": ModelShape(
        name="u_shaped", sequences=288, seq_len=16, hidden=32,
        widths={(0, 1): 1, (1, 2): 2, (2, 3): 1, (0, 3): 1}, transfers_per_forward=2, bar=1.50, skips={2: 1, 3: 0},
    ),
}  # fmt: skip
"""U-shaped: from stage 1 to 2 go the chain's tensor and the inner skip's, side by side; from 0 to 3 the outer skip's."""


class DeferredLinear(nn.Module):
    """A matrix whose gradient is put off."""

    def __init__(self, inputs: int, outputs: int, later: DeferredGradients) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.later = later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return later_linear(x, self.weight, None, self.later)


class StageModel(nn.Module):
    """One stage. `forward` takes what comes along its edges (nearest stage first) and gives what leaves."""

    def __init__(self, shape: ModelShape, stage: int, later: DeferredGradients) -> None:
        super().__init__()
        torch.manual_seed(100 + stage)  # replicas of a stage are the same
        self.shape, self.stage, h = shape, stage, shape.hidden
        self.embedding = nn.Embedding(VOCAB, h) if stage == 0 else None
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
        self.qkv, self.out = DeferredLinear(h, 3 * h, later), DeferredLinear(h, h, later)
        self.up, self.down = DeferredLinear(h, 2 * h, later), DeferredLinear(2 * h, h, later)
        self.skip = DeferredLinear(h, h, later) if stage in shape.skips else None
        self.head = DeferredLinear(h, VOCAB, later) if stage == STAGES - 1 else None

    def forward(self, inputs: Tensors, tokens_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the stage's edges upwards; of the last stage the loss."""
        if self.embedding is not None:
            x_TH = self.embedding(tokens_T)
        else:
            x_TH, *beside = [part for x in inputs for part in x.split(self.shape.hidden, dim=1)]
            if self.skip is not None:
                x_TH = x_TH + self.skip(beside[0])
        x_TH = x_TH + self._attention(self.norms[0](x_TH))
        x_TH = x_TH + self.down(F.gelu(self.up(self.norms[1](x_TH))))
        if self.head is not None:
            return (F.cross_entropy(self.head(x_TH), tokens_T),)
        edges = [edge for edge in self.shape.edges if edge[0] == self.stage]
        return tuple(x_TH.repeat(1, self.shape.widths[edge]) for edge in edges)

    def _attention(self, x_TH: torch.Tensor) -> torch.Tensor:
        n, s = self.shape.sequences, self.shape.seq_len
        q, k, v = self.qkv(x_TH).view(n, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y_NASD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y_NASD.transpose(1, 2).reshape(x_TH.shape))
        return out


@dataclass(frozen=True, kw_only=True)
class PassPace:
    """Seconds of each kind of pass."""

    forward_s: float
    input_s: float
    weight_s: float


class PacedPasses:
    """The passes of one stage in one step: computed, then waited for. `late` counts those whose computing took longer than their time."""

    def __init__(self, model: StageModel, later: DeferredGradients, pace: PassPace) -> None:
        self.model, self.later, self.pace = model, later, pace
        self.late = 0
        self.spent: dict[str, list[float]] = {}
        self._live: dict[int, tuple[Tensors, tuple[torch.Tensor, ...]]] = {}
        self._owed: dict[int, list[DeferredProduct]] = {}

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        begin_s = time.perf_counter()
        generator = torch.Generator().manual_seed(microbatch)
        tokens_T = torch.randint(VOCAB, (self.model.shape.rows,), generator=generator)
        for x in inputs:
            x.requires_grad_()
        outputs = self.model(inputs, tokens_T)
        self._live[microbatch] = inputs, outputs
        self._wait("F", begin_s, self.pace.forward_s)
        return () if self.model.head is not None else tuple(out.detach() for out in outputs)

    def _inputs(self, microbatch: int, d_outputs: Tensors) -> Tensors:
        inputs, outputs = self._live.pop(microbatch)
        torch.autograd.backward(outputs, d_outputs or (torch.ones(()),))
        grads = tuple(x.grad for x in inputs)
        return tuple(grad for grad in grads if grad is not None)

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        begin_s = time.perf_counter()
        d_inputs = self._inputs(microbatch, d_outputs)
        run(self.later.take())
        self._wait("B", begin_s, self.pace.input_s + self.pace.weight_s)
        return d_inputs

    def input_gradient(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        begin_s = time.perf_counter()
        d_inputs = self._inputs(microbatch, d_outputs)
        self._owed[microbatch] = self.later.take()
        self._wait("I", begin_s, self.pace.input_s)
        return d_inputs

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        begin_s = time.perf_counter()
        run(self._owed.pop(microbatch))
        self._wait("W", begin_s, self.pace.weight_s)

    def _wait(self, kind: str, begin_s: float, seconds: float) -> None:
        rest = begin_s + seconds - time.perf_counter()
        self.late += rest < 0
        if rest > 0:
            time.sleep(rest)
        self.spent.setdefault(kind, []).append(time.perf_counter() - begin_s)


def gradient_digest(model: StageModel) -> str:
    """Digest of every gradient, bit for bit; they are cleared."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        digest.update(name.encode() + parameter.grad.numpy().tobytes())
        parameter.grad = None
    return digest.hexdigest()[:16]
