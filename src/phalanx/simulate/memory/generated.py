"""How much code a run on a CPU makes: where the processor multiplies bf16, products and attention are generated anew for every shape, and what was
generated stays. Other processors keep a few notes for every shape of a product, and nothing for attention.

Decides which shapes there are: those that follow from the model and the batch alone, those that routing and packing bring (all of them, since
`train/build.py` asks for them at the start), and the prompts of the sample at the end. Other types use code that is there already.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.config import Recipe
from phalanx.simulate.memory.activations import Local
from phalanx.simulate.memory.kernel_facts import (
    ATTENTION_BYTES,
    ATTENTION_CODE_BYTES,
    ATTENTION_LENGTHS,
    KEY_BLOCK,
    LONGEST_WARM,
    MAX_PIECE,
    MAX_PRODUCTS,
    NOTED_PRODUCT_BYTES,
    PRODUCT_BYTES,
    PRODUCT_CODE_BYTES,
    PROMPT_TOKENS,
    RATE_SIZES,
    SAMPLE_TOKENS,
    padded_rows,
)

PER_MATRIX = 3
"""Forward, input gradient, weight gradient."""
PER_EXPERT_SIZE = 7
"""Two forward, four backward, and the row weights' gradient."""
PER_KEY_BLOCK = 5


@dataclass(frozen=True, kw_only=True)
class Generated:
    """How many products and attention lengths code exists for: during the steps, and after the sample at the end."""

    products: int
    lengths: int
    after_sample: int
    each: int = PRODUCT_BYTES + PRODUCT_CODE_BYTES
    """Bytes of a product."""

    def num_bytes(self, *, sampled: bool = False, lanes: int = 1) -> int:
        products = min(MAX_PRODUCTS, self.after_sample if sampled else self.products)
        return products * self.each + self.lengths * (ATTENTION_BYTES + ATTENTION_CODE_BYTES) * lanes


def generated_code(recipe: Recipe, x: Local) -> Generated:
    """What a run of `recipe` generates on one rank."""
    if x.item != 2 or recipe.kernels.implementation != "fast" or recipe.launch.device == "cuda":
        return Generated(products=0, lengths=0, after_sample=0)
    matrices = _matrices(x)
    blocks = -(-x.length // KEY_BLOCK)
    fixed = PER_MATRIX * (len(matrices) + 1) + PER_KEY_BLOCK * blocks + len(RATE_SIZES)
    products = fixed + PER_EXPERT_SIZE * num_expert_sizes(x)
    shown = recipe.observe.is_for_people
    sample = len(matrices) * min(SAMPLE_TOKENS, x.length - 1) if shown and x.length > PROMPT_TOKENS else 0
    if x.widens:
        return Generated(products=products, lengths=0, after_sample=products + sample, each=NOTED_PRODUCT_BYTES)
    return Generated(products=products, lengths=_lengths(recipe, x), after_sample=products + sample)


def _lengths(recipe: Recipe, x: Local) -> int:
    """Document lengths that attention meets: the short ones at the start (`warm._warm_attention`), longer ones as documents bring them."""
    t = recipe.train
    longest = t.seq_len if x.folding.cp == 1 or x.swaps_heads else x.length  # of what is computed in one piece
    warmed = min(t.seq_len, LONGEST_WARM)
    met = t.steps * (t.global_batch // x.folding.dp) * (t.seq_len // (LONGEST_WARM + 1))
    return warmed + min(max(0, min(longest, ATTENTION_LENGTHS) - warmed), met)


def num_expert_sizes(x: Local) -> int:
    """`warm.expert_sizes`: padded row counts that a piece of one expert can have."""
    if not x.spec.moe_layers:
        return 0
    if x.dispatch.is_static:
        return 1
    most = min(MAX_PIECE, x.most_of_slot)
    return len({padded_rows(n, x.item) for n in range(1, most + 1)})


def _matrices(x: Local) -> set[tuple[int, int]]:
    """(inputs, outputs) of every dense matrix but the head."""
    s, tp = x.spec, x.folding.tp
    q, kv = s.num_heads * s.head_dim // tp, s.num_kv_heads * s.head_dim // tp
    found = {(s.hidden, q), (s.hidden, kv), (q, s.hidden)}
    for width in (s.dense_ffn if s.dense_layers else 0, s.shared_ffn):
        if width:
            found |= {(s.hidden, 2 * width // tp), (width // tp, s.hidden)}
    return found
