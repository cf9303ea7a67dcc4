"""Text from a model: one token after the other, each from a forward pass over the window before it.

Decides how the next token is drawn. The window is computed anew for every token: no state is kept between them, so the model sees exactly
what it saw in training (positions from 0 at the start of the window, at most its sequence length). Collective over the world: all ranks
call it with the same prompt, and all get the same tokens, whatever the mapping.

Legend: S tokens of the window, T rows of this rank, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.models import DecoderOutput, ForwardInfo, TokenBatch, part_of
from phalanx.plan.mapping import AnyFolding, Stage
from phalanx.train.passes import StageRunner


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: `temperature` 0 takes the likeliest one; `top_k` 0 draws from all."""

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


@torch.no_grad()
def generate(
    runner: StageRunner, prompt: Sequence[int], *, num_tokens: int, window: int, vocab: int, sampling: Sampling
) -> Iterator[int]:
    """Yield `num_tokens` tokens that follow `prompt` (at least one token). Ids from `vocab` on are rows of padding, never drawn."""
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits_V = next_logits(runner, tokens[-window:])[:vocab]
        token = draw(logits_V, sampling, generator=generator)
        tokens.append(token)
        yield token


@torch.no_grad()
def next_logits(runner: StageRunner, tokens: Sequence[int]) -> torch.Tensor:
    """(V,) float32 logits of the token after `tokens`, on the host. Collective over the world; the same on all ranks.

    Where a sequence is split over ranks the window is filled up to a length that they can share; the filling is a document of its own.
    """
    model, groups = runner.model, runner.groups
    filling = (-len(tokens)) % _unit(groups.folding)
    window = _window(tokens, filling, model.device, copies=_shares(groups.folding))
    batch = part_of(window, groups.folding, groups.rank)
    last = len(tokens) - 1
    hidden_H = torch.zeros(
        model.spec.hidden, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device
    )

    def keep(stage: Stage, _: int, output: DecoderOutput) -> None:
        if stage.has_head and groups.axis("dp").index == 0:
            index_T = batch.token_index_T
            rows = output.hidden_TH[last : last + 1] if index_T is None else output.hidden_TH[index_T == last]
            hidden_H.copy_(rows.sum(0))  # one row, or none where another rank has it

    runner.forward([batch], [ForwardInfo(phase="eval")], keep)
    runner.comms.all_reduce(hidden_H, groups.axis("world"), op_id="generate.hidden")
    logits_V = torch.zeros(model.spec.vocab, dtype=torch.float32, device=model.device)
    if any(stage.has_head for stage in model.stages) and groups.axis("dp_cp").index == 0:
        weight_VH = model.head_weight
        first = groups.axis("tp").index * len(weight_VH)
        logits_V[first : first + len(weight_VH)] = hidden_H.to(model.dtype) @ weight_VH.T
    runner.comms.all_reduce(logits_V, groups.axis("world"), op_id="generate.logits")
    return logits_V.cpu()  # SYNC: the next token is chosen on the host


def _unit(folding: AnyFolding) -> int:
    """Windows of a multiple of so many tokens can be shared by the tp and cp ranks of every stage (zigzag halves)."""
    stages = {folding.of_rank(rank) for rank in range(folding.world)}
    return math.lcm(*(s.tp if s.cp == 1 else math.lcm(2 * s.cp, s.cp * s.tp) for s in stages))


def _shares(folding: AnyFolding) -> int:
    """Sequences that a window needs so that the ranks which share a micro-batch get some: the same one, again and again."""
    return math.lcm(*{folding.share_of(rank)[1] for rank in range(folding.world)})


def _window(tokens: Sequence[int], filling: int, device: torch.device, *, copies: int) -> TokenBatch:
    length = len(tokens)
    tokens_1S = torch.tensor([[*tokens, *[0] * filling]], dtype=torch.int64, device=device)
    positions = torch.cat((torch.arange(length), torch.arange(filling))).to(device)
    return TokenBatch(
        tokens_BS=tokens_1S.repeat(copies, 1),
        labels_BS=torch.full_like(tokens_1S, -100).repeat(copies, 1),
        positions_BS=positions.unsqueeze(0).repeat(copies, 1),
        segments=((length, filling) if filling else (length,),) * copies,
    )


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
