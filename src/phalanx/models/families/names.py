"""How the tensors of a Hugging Face checkpoint and the parameters of the model name the same numbers: rules as data, links by expansion.

A `NameRule` names one kind of tensor and the parameter that it is a part of; `links` turns the rules of a family into one `NameLink` for each tensor
of a given model. Must never change: a link is a copy and nothing else (no transpose, no reordering), so that import and export are the same
table read in two directions, bit for bit, and any box of a parameter is a few boxes of tensors.

Legend: E experts, F width, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.plan.layout import Box
from phalanx.plan.model import ModelSpec, buffers, parameters

Index = int | Literal["expert", "rows", "all"]
"""What a leading dim of a parameter is in the tensor's name or shape.

a number   the tensor holds this index only
expert     one tensor for each index, `{expert}` in its name
rows       the indices lie one after the other along the tensor's next dim
all        a dim of the tensor
"""


@dataclass(frozen=True)
class NameRule:
    """`tensor` may contain {layer} and {expert}, `param` {layer}; `at` speaks of the leading dims of the parameter, the rest are `all`."""

    tensor: str
    param: str
    at: tuple[Index, ...] = ()


@dataclass(frozen=True)
class NameLink:
    """The box `part` of a tensor of shape `shape` is the box `box` of a parameter (or buffer); dim t of the tensor is dim `dims[t]` of it.

    `param` is None for a tensor of zeros that the model does not have (`Family.absent`).
    """

    tensor: str
    shape: tuple[int, ...]
    part: Box
    param: str | None
    box: Box
    dims: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.part.sizes == self.shape


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Logical shape of every parameter and buffer."""
    return {**{p.name: p.shape for p in parameters(spec)}, **dict(buffers(spec))}


def links(rules: Sequence[NameRule], spec: ModelSpec) -> tuple[NameLink, ...]:
    """A link for each tensor of `spec`. Rules whose parameter this model does not have say nothing."""
    shapes = shapes_of(spec)
    return tuple(link for rule in rules for link in _of_rule(rule, spec, shapes))


def _of_rule(rule: NameRule, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[NameLink]:
    for layer in range(spec.num_layers + spec.mtp_layers) if "{layer}" in rule.param else (None,):
        param = rule.param.format(layer=layer)
        if param in shapes:
            yield from _expand(rule, param, shapes[param], layer)


def _expand(rule: NameRule, param: str, shape: tuple[int, ...], layer: int | None) -> Iterator[NameLink]:
    rest: Index = "all"
    at = rule.at + (rest,) * (len(shape) - len(rule.at))
    dims = tuple(d for d, index in enumerate(at) if index == "all")
    rows = at.index("rows") if "rows" in at else None
    tensor_shape = [shape[d] for d in dims]
    if rows is not None:
        tensor_shape[dims.index(rows + 1)] *= shape[rows]
    for place in itertools.product(*(_places(index, size) for index, size in zip(at, shape, strict=True))):
        sizes = tuple(size if index == "all" else 1 for index, size in zip(at, shape, strict=True))
        offsets = [0] * len(dims)
        if rows is not None:
            offsets[dims.index(rows + 1)] = place[rows] * shape[rows + 1]
        expert = place[at.index("expert")] if "expert" in at else None
        yield NameLink(
            tensor=rule.tensor.format(layer=layer, expert=expert),
            shape=tuple(tensor_shape),
            part=Box(tuple(offsets), tuple(shape[d] for d in dims)),
            param=param,
            box=Box(tuple(place), sizes),
            dims=dims,
        )


def _places(index: Index, size: int) -> Iterable[int]:
    if index == "all":
        return (0,)
    return (index,) if isinstance(index, int) else range(size)


def in_tensor(link: NameLink, box: Box) -> Box:
    """Where in the tensor the part `box` of `link.box` lies."""
    offsets = tuple(
        first + box.offsets[d] - link.box.offsets[d] for first, d in zip(link.part.offsets, link.dims, strict=True)
    )
    return Box(offsets, tuple(box.sizes[d] for d in link.dims))


# ---- what several families share ----------------------------------------------------------------------------------------------


ENDS = (
    NameRule("model.embed_tokens.weight", "embedding.weight"),
    NameRule("model.norm.weight", "norm.weight"),
    NameRule("lm_head.weight", "head.weight"),
)
NORMS = (
    NameRule("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.attention_norm.weight"),
    NameRule("model.layers.{layer}.post_attention_layernorm.weight", "layers.{layer}.ffn_norm.weight"),
)
GROUPED_ATTENTION = tuple(
    NameRule(f"model.layers.{{layer}}.self_attn.{theirs}", f"layers.{{layer}}.attention.{ours}")
    for theirs, ours in (
        ("q_proj.weight", "wq.weight"),
        ("k_proj.weight", "wk.weight"),
        ("v_proj.weight", "wv.weight"),
        ("o_proj.weight", "wo.weight"),
        ("q_proj.bias", "wq.bias"),
        ("k_proj.bias", "wk.bias"),
        ("v_proj.bias", "wv.bias"),
        ("q_norm.weight", "q_norm.weight"),
        ("k_norm.weight", "k_norm.weight"),
    )
)
LATENT_ATTENTION = tuple(
    NameRule(f"model.layers.{{layer}}.self_attn.{theirs}.weight", f"layers.{{layer}}.attention.{ours}.weight")
    for theirs, ours in (
        ("q_proj", "wq"),
        ("q_a_proj", "wq_a"),
        ("q_a_layernorm", "q_norm"),
        ("q_b_proj", "wq_b"),
        ("kv_a_proj_with_mqa", "wkv_a"),
        ("kv_a_layernorm", "kv_norm"),
        ("kv_b_proj", "wkv_b"),
        ("o_proj", "wo"),
    )
)


def mlp(theirs: str, ours: str) -> tuple[NameRule, ...]:
    """gate, up and down projection of a SwiGLU; ours has gate and up in one (2, F, H) parameter."""
    return (
        NameRule(f"model.layers.{{layer}}.{theirs}.gate_proj.weight", f"layers.{{layer}}.{ours}.w13", (0,)),
        NameRule(f"model.layers.{{layer}}.{theirs}.up_proj.weight", f"layers.{{layer}}.{ours}.w13", (1,)),
        NameRule(f"model.layers.{{layer}}.{theirs}.down_proj.weight", f"layers.{{layer}}.{ours}.w2"),
    )


def experts(folder: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[NameRule, ...]:
    """A router and one tensor for each expert and projection (gate, up, down): what lies on disk."""
    at = f"model.layers.{{layer}}.{folder}"
    gate, up, down = (f"{at}.experts.{{expert}}.{name}.weight" for name in names)
    return (
        NameRule(f"{at}.gate.weight", "layers.{layer}.moe.router.weight"),
        NameRule(gate, "layers.{layer}.moe.experts.w13", ("expert", 0)),
        NameRule(up, "layers.{layer}.moe.experts.w13", ("expert", 1)),
        NameRule(down, "layers.{layer}.moe.experts.w2", ("expert",)),
    )


FUSED_EXPERTS = (
    NameRule("model.layers.{layer}.mlp.gate.weight", "layers.{layer}.moe.router.weight"),
    NameRule("model.layers.{layer}.mlp.experts.gate_up_proj", "layers.{layer}.moe.experts.w13", ("all", "rows")),
    NameRule("model.layers.{layer}.mlp.experts.down_proj", "layers.{layer}.moe.experts.w2"),
)
"""All experts in one tensor (E, 2F, H): as transformers 5 holds them in memory, and saves them where asked not to restore the names."""
