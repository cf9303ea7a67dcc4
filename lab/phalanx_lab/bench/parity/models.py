"""The same checkpoint in transformers and in Phalanx: logits, loss and every gradient of both.

transformers rounds to float32 inside every family, whatever the type of the model: in RMSNorm, in the softmax of router and attention, in the
rotary tables. `in_float64` turns each of these wishes into float64 while a block runs, so that the same code of transformers is an oracle in
float64 too.

Legend: B sequences, S positions, N = B*S rows, H hidden, V vocabulary, T tokens, E experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from phalanx.core.config import OptimConfig
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.families.names import shapes_of
from phalanx.models.router import Router
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.train.assembly import assemble
from phalanx.train.huggingface.hugging_face import BoxReader, HfCheckpoint
from phalanx.train.step.transaction import StepParts, train_step
from phalanx.verify.reference import GradientRecorder
from phalanx_lab.plain_model import plain_context


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide: tuple[Any, ...] = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named) if func is not torch.Tensor.float else wide[0].to(torch.float64)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Whoever asks for float32 gets float64."""
    with _Float64():
        yield


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What transformers computes: (B, S, V) logits, mean loss, gradients by the names that it has in memory."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


class NotLoadedError(Exception):
    """transformers does not take the folder: it raises, or tensors are missing or misshapen."""


def draw_weights(model: Any, seed: int) -> None:
    """Weights that make every part count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not (isinstance(tensor, torch.nn.Parameter) or name.endswith("correction_bias")):
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            tensor.copy_(1 + 0.2 * noise if tensor.dim() == 1 else noise / tensor.shape[-1] ** 0.5)
            if name.endswith("correction_bias"):
                tensor.mul_(0.02)


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder, in eager attention. Raises `NotLoadedError`."""
    from transformers import AutoModelForCausalLM

    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **eager
        )
    except Exception as error:  # whatever it is, transformers has no meaning for this folder
        raise NotLoadedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    model, told = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if told[kind]:
            raise NotLoadedError(f"{kind}: {sorted(map(str, told[kind]))[0]}")
    if dtype == torch.float64:
        with in_float64():
            model = model.to(dtype)
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.train()


def run_theirs(model: Any, batch: TokenBatch, *, gradients: bool = True) -> Theirs:
    """One pass, and one back. Raises `NotLoadedError` where transformers cannot compute it."""
    dtype = next(model.parameters()).dtype
    try:
        with in_float64() if dtype == torch.float64 else contextlib.nullcontext():
            logits = model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=IGNORE)
            if gradients:
                loss.backward()
    except Exception as error:
        raise NotLoadedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Theirs(logits.detach(), loss.item(), found)


# ---- ours -------------------------------------------------------------------------------------------------------------------


def parts_of(rank: int, cache: GroupCache, checkpoint: HfCheckpoint, folding: Folding, dtype: torch.dtype) -> StepParts:
    """A run's state on this rank of a mapping, not yet filled."""
    groups, kernels = build_groups(folding, rank=rank, cache=cache), "fast" if dtype == torch.float32 else "reference"
    ctx = plain_context(checkpoint.spec, groups, dtype=dtype, comms=Collectives(timeout_s=240), kernels=kernels)
    return assemble(ctx, optim=OptimConfig(clip_norm=0.0), num_microbatches=1)


def load_ours(checkpoint: HfCheckpoint, dtype: torch.dtype) -> StepParts:
    """The whole model on one rank."""
    parts = parts_of(0, GroupCache(timeout_s=240), checkpoint, make_folding(world=1), dtype)
    with BoxReader(checkpoint) as reader:
        reader.fill(parts.state.boxes())
    parts.state.restore(parts.comms)
    return parts


@torch.no_grad()
def own_logits(parts: StepParts, batch: TokenBatch) -> torch.Tensor:
    """(B, S, V)."""
    kept: list[torch.Tensor] = []
    parts.runner.forward([batch], [ForwardInfo()], lambda stage, _, out: kept.append(out.hidden_TH))
    return (kept[0] @ parts.model.head_weight.T).unflatten(0, batch.tokens_BS.shape)


def own_gradients(parts: StepParts, batch: TokenBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of a step, and its gradients by parameter."""
    recorder = GradientRecorder(parts.optimizer)
    result = train_step(dataclasses.replace(parts, optimizer=recorder), [batch], step=0, lr=0.0)
    assert recorder.gradients is not None
    out: dict[str, torch.Tensor] = {}
    for box in recorder.gradients.boxes():
        name = box.name.removeprefix("gradient/")
        out.setdefault(name, torch.zeros(box.shape, dtype=box.tensor.dtype))[box.box.slices()] = box.tensor
    return result.loss, out


def logical_gradients(checkpoint: HfCheckpoint, theirs: Theirs) -> dict[str, torch.Tensor]:
    """Gradients of transformers, laid out as our parameters; nan where it has none."""
    shapes, out = shapes_of(checkpoint.spec), dict[str, torch.Tensor]()
    for link in checkpoint.family.links(checkpoint.spec, fused=True):
        if link.tensor not in theirs.gradients or link.param is None:  # the expert bias has none
            continue
        source = theirs.gradients[link.tensor]
        target = out.setdefault(link.param, torch.full(shapes[link.param], torch.nan, dtype=source.dtype))
        target[link.box.slices()] = source[link.part.slices()].reshape(link.box.sizes)
    return out


def smallest_gap(parts: StepParts, batch: TokenBatch) -> float:
    """Least distance, over all tokens and layers, between the score of a chosen expert (or group) and that of one that is not: where it is
    small, rounding decides who is chosen."""
    gaps = [float("inf")]

    def look(router: Router, args: tuple[Any, ...], _: Any) -> None:
        logits_TE = args[0] @ router.weight.T
        spec, k = router.spec, router.top_k
        scores_TE = torch.sigmoid(logits_TE) if spec.score == "sigmoid" else torch.softmax(logits_TE, -1)
        if router.expert_bias is not None:
            scores_TE = scores_TE + router.expert_bias
        if spec.num_groups > 1:
            best = 2 if spec.group_score == "top2" else 1
            groups_TG = scores_TE.unflatten(-1, (spec.num_groups, -1)).topk(best, dim=-1).values.sum(-1)
            gaps.append(_gap(groups_TG, spec.group_topk))
        gaps.append(_gap(scores_TE, k if spec.num_groups == 1 else None))

    hooks = [m.register_forward_hook(look) for m in parts.model.modules() if isinstance(m, Router)]
    try:
        own_logits(parts, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return min(gaps)


def _gap(scores: torch.Tensor, at: int | None) -> float:
    """Between place `at` and the next one of each row, sorted; between any two neighbours where `at` is None."""
    ordered = scores.sort(-1, descending=True).values
    between = ordered[:, :-1] - ordered[:, 1:]
    between = between if at is None else between[:, at - 1 : at]
    return between.min().item() if between.numel() else float("inf")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
