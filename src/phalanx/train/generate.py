"""Text from a model: one token after the other, each from a forward pass over the window before it.

Decides how the next token is drawn. The window is computed anew for every token: no state is kept between them, so the model sees exactly
what it saw in training (positions from 0 at the start of the window, at most its sequence length). Collective where experts are spread:
all ranks of an expert group call it with equally long prompts.

Legend: S tokens of the window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: `temperature` 0 takes the likeliest one; `top_k` 0 draws from all."""

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


@torch.no_grad()
def generate(
    model: Decoder, prompt: Sequence[int], *, num_tokens: int, window: int, vocab: int, sampling: Sampling
) -> Iterator[int]:
    """Yield `num_tokens` tokens that follow `prompt` (at least one token). Ids from `vocab` on are rows of padding, never drawn."""
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits_V = next_logits(model, tokens[-window:])[:vocab]
        token = draw(logits_V, sampling, generator=generator)
        tokens.append(token)
        yield token


@torch.no_grad()
def next_logits(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """(V,) float32 logits of the token after `tokens`, on the host."""
    device = model.head_weight.device
    tokens_1S = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
    batch = TokenBatch(
        tokens_BS=tokens_1S,
        labels_BS=torch.full_like(tokens_1S, -100),
        positions_BS=torch.arange(len(tokens), device=device).unsqueeze(0),
        segments=((len(tokens),),),
    )
    hidden_TH = model(batch, ForwardInfo()).hidden_TH
    return (hidden_TH[-1] @ model.head_weight.T).float().cpu()  # SYNC: the next token is chosen on the host


def draw(logits_V: torch.Tensor, sampling: Sampling, *, generator: torch.Generator) -> int:
    """One token id. Ties go to the lowest id."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # the likeliest at 0, so that no temperature, however small, makes an infinity of it
    scaled_V = (logits_V - logits_V.max()).double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        kept = torch.topk(scaled_V, sampling.top_k)
        choice = torch.multinomial(torch.softmax(kept.values, 0), 1, generator=generator)
        return int(kept.indices[choice])
    return int(torch.multinomial(torch.softmax(scaled_V, 0), 1, generator=generator))
