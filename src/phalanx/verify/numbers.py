"""Input and starting state of a verified step, a function of names and indices alone: no rank count, no mapping.

Every micro-batch has other tokens, another number of labels and other favourite experts, so that data delivered to a wrong rank, or a
mean taken over the wrong ranks, shows. The starting state is far from an initial one: biases and moments are not zero, norms not one,
and the expert bias has an opinion.

Legend: B sequences, S sequence length.
"""

from __future__ import annotations

import hashlib
import math

import torch

from phalanx.kernels.cross_entropy import IGNORE
from phalanx.models.context import TokenBatch
from phalanx.plan.model import ParamSpec
from phalanx.runtime.boxes import BoxTensor
from phalanx.verify.setups import SEQ_LEN, SEQUENCES, Setup


def generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))


def microbatch(setup: Setup, index: int, *, draw: int = 0) -> TokenBatch:
    """Micro-batch `index` of the step. `draw` chooses between equally good data (see `reference.py`, rounding)."""
    rng = generator(f"tokens/{index}/{draw}")
    vocab = setup.spec.vocab
    favourites = vocab // 4 + (7 * index) % (vocab // 2)  # tokens below this id only: experts are loaded unevenly
    tokens_BS = torch.randint(0, favourites, (SEQUENCES, SEQ_LEN), generator=rng)
    segments = tuple(_documents(rng) if setup.packed else (SEQ_LEN,) for _ in range(SEQUENCES))
    labels_BS = tokens_BS.roll(-1, dims=1)
    positions_BS = torch.empty_like(tokens_BS)
    for b, lengths in enumerate(segments):
        ends = torch.tensor(lengths).cumsum(0)
        labels_BS[b, ends - 1] = IGNORE
        positions_BS[b] = torch.cat([torch.arange(n) for n in lengths])
    masked_BS = torch.rand(SEQUENCES, SEQ_LEN, generator=rng) < 0.1 * (index % 5)
    return TokenBatch(tokens_BS, labels_BS.masked_fill(masked_BS, IGNORE), positions_BS, segments)


def _documents(rng: torch.Generator) -> tuple[int, ...]:
    cuts = sorted(set(torch.randint(1, SEQ_LEN, (2,), generator=rng).tolist()))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, SEQ_LEN], strict=True))


def starting_value(kind: str, name: str, shape: tuple[int, ...], param: ParamSpec | None) -> torch.Tensor:
    """fp64 logical tensor that the state box `kind/name` is filled from (kind: master, exp_avg, exp_avg_sq, buffer)."""
    noise = torch.randn(shape, generator=generator(f"{kind}/{name}"), dtype=torch.float64)
    if kind == "exp_avg":
        return 2e-4 * noise
    if kind == "exp_avg_sq":
        return 1e-8 * (0.5 + noise.square())
    if param is None:  # the expert bias
        return 0.02 * noise
    if param.init == "ones":
        return 1 + 0.2 * noise
    if param.init == "zeros":
        return 0.1 * noise
    if name == "embedding.weight":
        return noise
    # the residual stream stays dominated by the embedding, so that routing is decided by wide margins (`reference.py`, rounding)
    small = 0.3 if name.endswith(("wo.weight", "w2")) else 1.0
    return small * noise / math.sqrt(shape[-1])


def fill_state(boxes: list[BoxTensor], params: dict[str, ParamSpec]) -> None:
    """Put the starting values into the state boxes of a rank."""
    for box in boxes:
        kind, name = box.name.split("/", 1)
        value = starting_value(kind, name, box.shape, params.get(name))
        box.tensor.copy_(value[box.box.slices()])
