"""What becomes of each setting of a recipe that `phalanx verify` proves: every one stands in one of five lists, and a test holds them against the settings that there are.

    CARRIED     the shrunken step runs with it (`setups.py: recipe_cases`)
    SHRUNK      a size, which is small there
    ITS_OWN     a number, or a machine's, of which verification has its own: one with which errors show, or an argument of the command
    NO_PART     nothing that a step computes or sends depends on it
    UNVERIFIED  it changes what a step computes or sends, and no verified step has it: the command says so where the recipe has such a value

Decides nothing else. Must never change: silence about a setting of the last kind would look like a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phalanx.core.config import Recipe
from phalanx.core.settings import show
from phalanx.verify.setups import Case


def _of(section: str, keys: str) -> frozenset[str]:
    return frozenset(f"{section}.{key}" for key in keys.split())


CARRIED: frozenset[str] = frozenset().union(
    _of("model", "preset num_kv_heads top_k qk_norm attention_bias tied_embeddings rope_theta norm_eps init_std shared_gate"),
    _of("model", "mtp_layers mtp_weight rope_interleaved yarn_factor yarn_original_length yarn_beta_fast yarn_beta_slow"),
    _of("model", "yarn_mscale yarn_mscale_all_dim"),
    _of("router", "score softmax_order renormalize scale num_groups group_topk group_score z_loss aux_loss aux_scope bias_rate"),
    _of("dispatch", "policy capacity_factor drop_by drop_scope pad_to_capacity transport"),
    _of("folding", "tp cp cp_method pp ep etp stages"),
    _of("pipeline", "schedule virtual layers pair_passes"),
    _of("data", "chat_template"),
    _of("train", "recompute"),
    _of("optim", "zero bucket_mb"),
    _of("resilience", "mode heal f check expert_state"),
    _of("kernels", "implementation compiled"),
)  # fmt: skip
SHRUNK: frozenset[str] = frozenset().union(
    _of("model", "num_layers hidden num_heads head_dim vocab num_experts expert_ffn shared_ffn dense_layers dense_ffn"),
    _of("model", "q_rank kv_rank nope_dim rope_dim value_dim"),
    _of("train", "seq_len global_batch micro_batch"),
)
ITS_OWN: frozenset[str] = frozenset().union(
    _of("train", "dtype seed"),
    _of("optim", "lr beta1 beta2 eps weight_decay"),
    _of("resilience", "chunk_rows fixed_bits loads"),
    _of("launch", "ranks threads"),
)
NO_PART: frozenset[str] = frozenset().union(
    _of("run", "name folder access"),
    _of("pipeline", "memory_gb"),
    _of("data", "sources weights tokenizer text_field eos_token bos_token builtin_bytes validation_fraction cache"),
    _of("train", "steps eval_interval eval_batches"),
    _of("optim", "min_lr_ratio warmup_steps schedule decay_steps"),
    _of("resilience", "service wanted minimum wait_s limit_s hang_s straggler straggler_steps straggler_rest_s state_gb"),
    _of("checkpoint", "interval keep_last asynchronous write_rate resume fall_back wait_s step"),
    _of("observe", "console log_interval tensorboard wandb_project wandb_mode sinks prometheus_port prometheus_address"),
    _of("observe", "trace_steps"),
    _of("launch", "timeout_s host rack keep_service"),
)  # fmt: skip


def _where(has: bool, value: object) -> object:
    return value if has else None


UNVERIFIED: Mapping[str, Callable[[Recipe, Case], object]] = {
    # rounded by the last bits of other numbers, which no two mappings have in common
    "optim.state_dtype": lambda r, _: _where(r.optim.state_dtype != "float32", r.optim.state_dtype),
    # the verified step is clipped
    "optim.clip_norm": lambda r, _: _where(not r.optim.clip_norm, r.optim.clip_norm),
    # workloads of benchmarks, in which no token decides anything
    "router.force": lambda r, _: _where(r.router.force != "none", r.router.force),
    "router.force_skew": lambda r, _: r.router.force_skew,
    # what is chosen by measured times is another choice for a small step
    "dispatch.overlap": lambda r, _: _where(r.dispatch.overlap == "auto", r.dispatch.overlap),
    "pipeline.extra_warmup": lambda r, _: _where(r.pipeline.extra_warmup == "auto", r.pipeline.extra_warmup),
    # processors compute here
    "launch.device": lambda r, _: _where(r.launch.device == "cuda", r.launch.device),
    "dispatch.left_free": lambda r, _: r.dispatch.left_free,
    # a mode of the whole process
    "train.deterministic": lambda r, _: _where(r.train.deterministic, r.train.deterministic),
    # a rank alone has all experts, and no replicas here
    "resilience.slots_per_rank": lambda r, case: _where(case.setup.replicas is None, r.resilience.slots_per_rank),
    # experts that move between steps, or beside one
    "resilience.replace_interval": lambda r, _: r.steps_between_placements() or None,
    "resilience.move_beside": lambda r, _: _where(bool(r.steps_between_placements()), r.resilience.move_beside),
}
"""Setting -> what of its value no verified step has; None: nothing."""


def not_verified(recipe: Recipe, case: Case) -> list[str]:
    """`section.key = value` of everything in the recipe that changes what a step computes or sends, and that `case`, made of it, does not have."""
    found = {name: value(recipe, case) for name, value in UNVERIFIED.items()}
    return [f"{name} = {show(value).strip(chr(34))}" for name, value in found.items() if value is not None]
