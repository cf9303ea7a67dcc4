"""Input and starting state of a verified step, a function of names and indices alone: no rank count, no mapping.

Every micro-batch has other tokens, another number of labels and other favourite experts, so that data delivered to a wrong rank, or a
mean taken over the wrong ranks, shows. The starting state is far from an initial one: biases and moments are not zero, norms not one,
and the expert bias has an opinion.

Legend: B sequences, S sequence length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models import TokenBatch
from phalanx.plan.model import ParamSpec
from phalanx.runtime.state import BoxTensor
from phalanx.verify.setups import SEQ_LEN, SEQUENCES, Setup

DRAW = "2"
"""Which data. In the first draw (an empty word), and with padding in the second, a small gradient was so ill-conditioned in bf16 that runs with *any* two
kernels could differ by more than 2e-2 (docs/explanation/verification.md); this one and the two after it have nothing of the kind."""


def generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{DRAW}/{key}".encode()).digest()[:7], "big"))


_RUN = 4
"""Labels in a row of a setup with answers."""

Patch = tuple[int, int, int]
"""(sequence, position, token): a token of a micro-batch that is replaced (see `reference.py`, rounding)."""


def microbatch(setup: Setup, index: int, *, patches: Sequence[Patch] = ()) -> TokenBatch:
    """Micro-batch `index` of the step."""
    rng = generator(f"tokens/{index}")
    favourites = _favourites(setup, index)
    tokens_BS = torch.randint(0, favourites, (SEQUENCES, SEQ_LEN), generator=rng)
    segments = tuple(_documents(rng) if setup.packed else (SEQ_LEN,) for _ in range(SEQUENCES))
    padding = _padding(segments, index)
    _make_starts_differ(tokens_BS, segments, favourites, rng)
    for b, position, token in patches:
        tokens_BS[b, position] = token
    labels_BS = tokens_BS.roll(-1, dims=1)
    positions_BS = torch.empty_like(tokens_BS)
    for b, lengths in enumerate(segments):
        ends = torch.tensor(lengths).cumsum(0)
        labels_BS[b, ends - 1] = IGNORE
        positions_BS[b] = torch.cat([torch.arange(n) for n in lengths])
    masked_BS = torch.rand(SEQUENCES, SEQ_LEN, generator=rng) < 0.1 * (index % 5)
    if setup.answers:
        masked_BS = (torch.rand(SEQUENCES, SEQ_LEN // _RUN, generator=rng) < 0.7).repeat_interleave(_RUN, dim=1)
        masked_BS |= torch.tensor(index % 3 == 1)
    for b, length in enumerate(padding):
        tokens_BS[b, SEQ_LEN - length :], masked_BS[b, SEQ_LEN - length :] = 0, True
    return TokenBatch(tokens_BS, labels_BS.masked_fill(masked_BS, IGNORE), positions_BS, segments, padding=padding)


def empty() -> TokenBatch:
    """What a rank has in a round in which others have a micro-batch and it has none."""
    nothing = torch.zeros(SEQUENCES, SEQ_LEN, dtype=torch.int64)
    positions_BS = torch.arange(SEQ_LEN).expand(SEQUENCES, SEQ_LEN)
    return TokenBatch(nothing, nothing + IGNORE, positions_BS, ((SEQ_LEN,),) * SEQUENCES, is_empty=True)


def _padding(segments: tuple[tuple[int, ...], ...], index: int) -> tuple[int, ...]:
    """The last document of a sequence is padding in two of three micro-batches, so that ranks meet with and without."""
    padded = index // 3 % SEQUENCES if index % 3 != 1 else None
    return tuple(lengths[-1] if b == padded and len(lengths) > 1 else 0 for b, lengths in enumerate(segments))


def _favourites(setup: Setup, index: int) -> int:
    """This micro-batch has tokens below this id only, so that experts are loaded unevenly."""
    vocab = setup.spec.vocab
    return vocab // 4 + (7 * index) % (vocab // 2)


def another_token(setup: Setup, index: int, *, attempt: int) -> int:
    """A token that micro-batch `index` might have had instead."""
    return int(torch.randint(0, _favourites(setup, index), (), generator=generator(f"patch/{index}/{attempt}")))


def _make_starts_differ(
    tokens_BS: torch.Tensor, segments: tuple[tuple[int, ...], ...], favourites: int, rng: torch.Generator
) -> None:
    """The first two tokens of all documents become different ones.

    Documents that begin alike, or with one token twice (attention to equal values is that value), have tokens with equal router scores but for
    rounding; which of them an overfull expert drops would hang on how a product is blocked. Exact ties have their own tests.
    """
    starts = [(b, sum(lengths[:i]), n) for b, lengths in enumerate(segments) for i, n in enumerate(lengths)]
    places = [(b, start + k) for b, start, length in starts for k in range(min(2, length))]
    different = torch.randperm(favourites, generator=rng)
    for token, place in zip(different[: len(places)], places, strict=True):
        tokens_BS[place] = token


def _documents(rng: torch.Generator) -> tuple[int, ...]:
    cuts = sorted(set(torch.randint(1, SEQ_LEN, (2,), generator=rng).tolist()))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, SEQ_LEN], strict=True))


def starting_value(kind: str, name: str, shape: tuple[int, ...], param: ParamSpec | None) -> torch.Tensor:
    """fp64 logical tensor that the state box `kind/name` is filled from (kind: master, exp_avg, exp_avg_sq, buffer)."""
    noise = torch.randn(shape, generator=generator(f"{kind}/{name}"), dtype=torch.float64)
    if kind == "exp_avg":
        return 2e-4 * noise
    if kind == "exp_avg_sq":
        return 1e-6 * (0.5 + noise.square())
    if param is None:  # the expert bias
        return 0.02 * noise
    if param.init == "ones":
        return (0.6 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0) + 0.2 * noise
    if param.init == "zeros":
        return 0.1 * noise
    if name == "embedding.weight":
        return noise
    # the residual stream stays dominated by the embedding, so that routing is decided by wide margins (`reference.py`, rounding)
    scale = 0.1 if name.endswith(("wo.weight", "w2")) else 0.5 if name.endswith(("wq.weight", "wk.weight")) else 1.0
    return scale * noise / math.sqrt(shape[-1])


@dataclass(eq=False)
class StartingValues:
    """Starting values that were drawn once: most tensors of a case are those of the case before."""

    found: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def fill(self, boxes: Iterable[BoxTensor], params: Mapping[str, ParamSpec]) -> None:
        """Put them into the state boxes of a rank."""
        for box in boxes:
            kind, name = box.name.split("/", 1)
            box.tensor.copy_(self._value(kind, name, box.shape, params.get(name))[box.box.slices()])

    def _value(self, kind: str, name: str, shape: tuple[int, ...], param: ParamSpec | None) -> torch.Tensor:
        key = (kind, name, shape, param.init if param is not None else "")
        if key not in self.found:
            self.found[key] = starting_value(kind, name, shape, param)
        return self.found[key]
