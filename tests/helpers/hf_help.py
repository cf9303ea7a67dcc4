"""Small random models of transformers, and what we compute with the same checkpoint on any mapping (`phalanx_lab/bench/parity/models.py` has the rest)."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.layout.parameters import Box
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.huggingface.hugging_face import BoxReader, open_checkpoint
from phalanx.train.step.transaction import StepParts, train_step
from phalanx.verify.reference import GradientRecorder
from phalanx_lab.bench.parity import models
from phalanx_lab.bench.parity.models import Theirs, draw_weights, in_float64, parts_of, relative

SEQUENCES, LENGTH, VOCAB = 4, 24, 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "intermediate_size": 40}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_hidden_layers": 3,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"intermediate_size": 16, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "intermediate_size": 16}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_parameters": _YARN}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral with YaRN": (
        "mixtral",
        {"head_dim": 8, "intermediate_size": 16, "num_local_experts": 4, "rope_parameters": {**_YARN, "mscale": None}},
    ),
    "qwen3_moe with attention_factor": (
        "qwen3_moe",
        {
            **_EXPERTS,
            "head_dim": 8,
            "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None, "attention_factor": 1.0},
        },
    ),
    "deepseek_v3 with attention_factor": (
        "deepseek_v3",
        {**_LATENT, "moe_layer_freq": [0, 1, 1], "rope_parameters": {**_YARN, "attention_factor": 1.3}},
    ),
    "qwen2_moe without biases": (
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 24, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "qwen3_moe, dense first": ("qwen3_moe", {**_EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}),
    "olmoe, renormalised": ("olmoe", {"num_experts": 4, "intermediate_size": 16, "norm_topk_prob": True}),
    "deepseek_v2, direct queries": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": _YARN, "v_head_dim": 16},
    ),
    "deepseek_v3, halves, one group": (
        "deepseek_v3",
        {**_LATENT, "rope_interleave": False, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    ),
}
ALL = {**CONFIGS, **OTHERS}


def hf_model(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A random model in eager attention, with weights that make every part count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = ALL[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **fields, **changes})
    with in_float64() if dtype == torch.float64 else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        model = model.to(dtype).train()
    draw_weights(model, len(name))
    return model


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = labels[2, 7:9] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def run_theirs(model: Any) -> Theirs:
    return models.run_theirs(model, _micro(make_folding(world=1), 0))


@dataclasses.dataclass(frozen=True)
class Ours:
    """One rank's part: worst relative error of its logits, the loss, boxes of reduced gradients, bytes read and bytes owned."""

    logits_error: float
    loss: float
    gradients: list[BoxTensor]
    bytes_read: int


def run_ours(
    rank: int, cache: GroupCache, folder: Path, folding: Folding, dtype: torch.dtype, want_logits: torch.Tensor
) -> Ours:
    """Read the checkpoint into this rank's state, run the forward pass and one step's gradients."""
    checkpoint = open_checkpoint(folder)
    parts = parts_of(rank, cache, checkpoint, folding, dtype)
    groups = parts.groups
    with BoxReader(checkpoint) as reader:
        reader.fill(parts.state.boxes())
    parts.state.restore(parts.comms)
    batch = part_of(_micro(folding, groups.axis("dp").index), folding, rank)
    error = _logits_error(parts, batch, want_logits.chunk(folding.dp)[groups.axis("dp").index])
    recorder = GradientRecorder(parts.optimizer)
    result = train_step(dataclasses.replace(parts, optimizer=recorder), [batch], step=0, lr=0.0)
    assert recorder.gradients is not None
    return Ours(error, result.loss, recorder.gradients.boxes(), reader.bytes_read)


def _micro(folding: Folding, index: int) -> TokenBatch:
    tokens, labels = (x.chunk(folding.dp)[index] for x in tokens_and_labels())
    positions = torch.arange(LENGTH).expand_as(tokens)
    return TokenBatch(tokens, labels, positions, ((LENGTH,),) * len(tokens))


@torch.no_grad()
def _logits_error(parts: StepParts, batch: TokenBatch, want_BSV: torch.Tensor) -> float:
    """Of this rank's rows of the vocabulary for its part of the sequences; 0 where another pipeline rank predicts."""
    info, model = ForwardInfo(), parts.model
    kept: list[torch.Tensor] = []
    parts.runner.forward([batch], [info], lambda stage, _, out: kept.append(out.hidden_TH) if stage.has_head else None)
    if not kept:
        return 0.0
    hidden_NH = model.sequence.gather(kept[0], info, num_sequences=batch.num_sequences)
    axis = parts.groups.axis("tp")
    own_BSV = want_BSV.gather(1, batch.positions_BS.unsqueeze(-1).expand(-1, -1, want_BSV.shape[-1]))
    return relative(hidden_NH @ model.head_weight.T, own_BSV.flatten(0, 1).chunk(axis.size, dim=1)[axis.index])


def logical_gradients(folder: Path, theirs: Theirs) -> dict[str, torch.Tensor]:
    """Gradients of transformers, laid out as our parameters."""
    return models.logical_gradients(open_checkpoint(folder), theirs)


def whole(name: str, tensor: torch.Tensor) -> BoxTensor:
    shape = tuple(tensor.shape)
    return BoxTensor(name, shape, Box((0,) * len(shape), shape), tensor, primary=True)
