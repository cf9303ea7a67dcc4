"""The baseline of `phalanx bench train`: Hugging Face transformers' Mixtral, trained in its ordinary way, as fast as it goes here.

Which of its expert implementations in which type is fastest is found by trial on the machine that measures. `batched_mm` is left out: it
copies the weights of the chosen experts for every token, 8.6 GB for the published shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch

from phalanx.core.errors import RunError, install_extra
from phalanx_lab.bench.workload import AUX_LOSS, BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, WorkloadShape, batch_of


@dataclass(frozen=True)
class Variant:
    """One way to run it. `autocast`: fp32 weights, bf16 products."""

    experts: str
    dtype: str
    autocast: bool = False

    @property
    def label(self) -> str:
        return f"{self.experts} {self.dtype}" + (" autocast to bf16" if self.autocast else "")


VARIANTS = (
    Variant("grouped_mm", "float32"),
    Variant("eager", "float32"),
    Variant("grouped_mm", "bfloat16"),
    Variant("eager", "bfloat16"),
    Variant("eager", "float32", autocast=True),
)


def transformers_version() -> str:
    """Raises `RunError` where the package is missing."""
    if find_spec("transformers") is None:
        raise RunError(f"the baseline needs the package transformers; {install_extra('bench')}")
    return metadata.version("transformers")


class Baseline:
    """A model and its optimizer in one variant."""

    def __init__(self, shape: WorkloadShape, variant: Variant) -> None:
        from transformers import AutoModelForCausalLM, MixtralConfig

        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            num_experts_per_tok=shape.top_k,
            num_local_experts=shape.experts,
            max_position_embeddings=shape.seq_len,
            output_router_logits=True,
            router_aux_loss_coef=AUX_LOSS,
            use_cache=False,
        )
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", experts_implementation=variant.experts
        )
        self.shape, self.variant = shape, variant
        self.model = model.to(getattr(torch, variant.dtype)).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.steps_done = 0

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def run(self, steps: int) -> tuple[list[float], float]:
        """Seconds of each of `steps` more steps, and the last loss."""
        times, loss = [], float("nan")
        for _ in range(steps):
            tokens = torch.from_numpy(batch_of(self.shape, step=self.steps_done))
            begin_s = time.perf_counter()
            loss = self._step(tokens[:, :-1], tokens[:, 1:])
            times.append(time.perf_counter() - begin_s)
            self.steps_done += 1
        return times, loss

    def _step(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.variant.autocast):
            loss = self.model(input_ids=tokens, shift_labels=labels.contiguous(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def fastest(shape: WorkloadShape, *, steps: int = 2) -> tuple[Variant, dict[str, float]]:
    """The variant with the shortest step (one to warm up, then the best of `steps`), and the seconds of all."""
    trials = {}
    for variant in VARIANTS:
        contender = Baseline(shape, variant)
        times, _ = contender.run(1 + steps)
        trials[variant] = min(times[1:])
    best = min(trials, key=lambda v: trials[v])
    return best, {v.label: round(t, 4) for v, t in trials.items()}
