"""Text from a model: one token after the other, each from a forward pass over the window before it.

Decides how the next token is drawn. The window is computed anew for every token: no state is kept between them, so the model sees exactly
what it saw in training (positions from 0 at the start of the window, at most its sequence length). Collective over the world: all ranks
call it with the same prompt, and all get the same tokens, whatever the mapping.

`load_model` reads the model of a run from its folder alone into one process, whatever mapping wrote it.

Legend: S tokens of the window, T rows of this rank, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import RunError
from phalanx.data import ChatTemplate, Tokenizer
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models import Decoder, DecoderOutput, ForwardInfo, ModelContext, TokenBatch, part_of
from phalanx.plan.layout import Box
from phalanx.plan.mapping import AnyFolding, Stage, make_folding, plain_placement
from phalanx.plan.model import buffers, resolve_model
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.pipeline import plain_pipeline
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.comm import Collectives, GroupCache, build_groups
from phalanx.runtime.state import BoxTensor
from phalanx.train.assembly import state_dtype
from phalanx.train.setup import DTYPES, RunFolder, choose_checkpoint
from phalanx.train.step import StageRunner


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    model: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Of conversations; None: ChatML, or it knows none."""
    recipe: Recipe
    step: int
    runner: StageRunner


def load_model(path: Path, *, step: int | None = None) -> LoadedModel:
    """The model after `step` steps (None: the newest checkpoint) on the CPU. Tokens are never dropped, whatever training did.

    Raises `ConfigError` where `path` is no run folder, `CheckpointError` where there is no sound checkpoint.
    """
    folder = RunFolder(path)
    recipe, tokenizer = folder.read_recipe(), folder.read_tokenizer()
    spec = resolve_model(recipe.model, recipe.router, tokenizer_vocab=tokenizer.vocab_size)
    manager, chosen = choose_checkpoint(
        folder, spec, step, hint="wait until phalanx train has saved its first checkpoint"
    )
    folding = make_folding(world=1)
    ctx = ModelContext(
        spec=spec,
        dispatch=DispatchSpec(),
        placement=plain_placement(max(1, spec.num_experts), folding),
        groups=build_groups(folding, rank=0, cache=GroupCache()),
        comms=Collectives(),
        dtype=DTYPES[recipe.train.dtype],
        device=torch.device("cpu"),
        kernels=recipe.kernels.implementation,
        lanes=Lanes(torch.get_num_threads(), rows=compiled_rows() if recipe.kernels.compiled else None),
    )
    model = Decoder(ctx)
    _fill(model, manager, chosen, wanted={name for name, _ in buffers(spec)}, dtype=state_dtype(ctx.dtype))
    runner = StageRunner(model=model, pipeline=plain_pipeline(spec), groups=ctx.groups, comms=ctx.comms)
    template = folder.read_template(recipe)
    return LoadedModel(model=model, tokenizer=tokenizer, template=template, recipe=recipe, step=chosen, runner=runner)


def _fill(model: Decoder, manager: CheckpointManager, step: int, *, wanted: set[str], dtype: torch.dtype) -> None:
    """Read the master weights, which each parameter is the rounded value of, and the buffers."""
    masters = {name: torch.empty(p.shape, dtype=dtype) for name, p in model.named_parameters()}
    boxes = [_whole(f"master/{name}", tensor) for name, tensor in masters.items()]
    boxes += [_whole(f"buffer/{name}", tensor) for name, tensor in model.named_buffers() if name in wanted]
    manager.load(boxes, step=step, partial=True)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(masters.pop(name))


def _whole(name: str, tensor: torch.Tensor) -> BoxTensor:
    shape = tuple(tensor.shape)
    return BoxTensor(name, shape, Box((0,) * len(shape), shape), tensor, primary=True)


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
        padding=(filling,) * copies,
    )


def draw(logits_V: torch.Tensor, sampling: Sampling, *, generator: torch.Generator) -> int:
    """One token id. Ties go to the lowest id. Raises `RunError` where the largest logit is no finite number, which NaN anywhere makes it."""
    top = int(logits_V.argmax())
    if not math.isfinite(logits_V[top]):
        value = float(logits_V[top])
        raise RunError(
            f"the model's output is not finite: the logit of token {top} is {value}; read an earlier checkpoint"
        )
    if sampling.temperature == 0:
        return top
    # the likeliest at 0, so that no temperature, however small, makes an infinity of it
    scaled_V = (logits_V - logits_V[top]).double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        least = torch.topk(scaled_V, sampling.top_k).values[-1]  # it takes any of equal ones
        ids = (scaled_V >= least).nonzero().flatten()
        likely, order = scaled_V[ids].sort(descending=True, stable=True)
        choice = torch.multinomial(torch.softmax(likely[: sampling.top_k], 0), 1, generator=generator)
        return int(ids[order[choice]])
    return int(torch.multinomial(torch.softmax(scaled_V, 0), 1, generator=generator))
