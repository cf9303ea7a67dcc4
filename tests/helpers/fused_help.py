"""Layers small enough for Triton's interpreter, on ranks of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phalanx.kernels.triton.layer import LaunchShape, reference_layer
from phalanx.kernels.triton.second_product import Division
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory
from phalanx.kernels.triton.tiles import SendShape, TileShape
from phalanx_lab.bench.layer.virtual import VirtualLayer, run_virtual, virtual_arenas

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference, relative to the largest element of the reference."""
TILE = TileShape(rows=16, columns=32, depth=32, row_tiles=2, warps=4, stages=2)
SEND = SendShape(chunk=32, entries=32, columns=32)
SHAPE = LaunchShape(
    slots_per_rank=2,
    first=TILE,
    second=TILE,
    send=SEND,
    division=Division(programs=2, senders=1),
    first_programs=2,
    send_programs=2,
    patience=4,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer on `ranks` ranks. Widths that are no multiples of a tile by default."""

    ranks: int = 2
    slots: int = 2
    tokens: int = 19
    top_k: int = 2
    hidden: int = 40
    ffn: int = 24
    dtype: torch.dtype = torch.float32
    routing: str = "random"
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.ranks * self.slots

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True, eq=False)
class Layer:
    """Tensors of all ranks of a case."""

    case: Case
    x: list[torch.Tensor]
    slots: list[torch.Tensor]
    weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor

    def spec(self, *, parts: int = 2, blocks: int = 2) -> ArenaSpec:
        c = self.case
        return ArenaSpec(ranks=c.ranks, capacity=c.tokens, columns=c.hidden, dtype=c.dtype, parts=parts, blocks=blocks)

    def run(
        self, shape: LaunchShape = SHAPE, *, spec: ArenaSpec | None = None, arenas: list[SymmetricMemory] | None = None
    ) -> list[torch.Tensor]:
        """The layer on the kernels, every element of memory poisoned before the call."""
        spec = self.spec() if spec is None else spec
        if arenas is None:
            arenas = poisoned(virtual_arenas(spec))
        w13, w2 = self.w13.split(self.case.slots), self.w2.split(self.case.slots)
        virtual = VirtualLayer(self.x, self.slots, self.weights, w13, w2)
        return run_virtual(virtual, arenas, shape=replace(shape, slots_per_rank=self.case.slots))

    def want(self) -> list[torch.Tensor]:
        return [
            reference_layer(x, s, w, self.w13, self.w2)
            for x, s, w in zip(self.x, self.slots, self.weights, strict=True)
        ]


def poisoned(arenas: list[SymmetricMemory]) -> list[SymmetricMemory]:
    for arena in arenas:
        arena.received_PCH.fill_(torch.nan)
        arena.returned_PCH.fill_(torch.nan)
    return arenas


def layer(case: Case) -> Layer:
    gen = case.generator()

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=gen) / 4).to(case.dtype)

    x = [normal(case.tokens, case.hidden) for _ in range(case.ranks)]
    weights = [torch.rand(case.tokens, case.top_k, generator=gen) for _ in range(case.ranks)]
    slots = [route(case, gen) for _ in range(case.ranks)]
    w13 = normal(case.experts, 2, case.ffn, case.hidden)
    return Layer(case, x, slots, weights, w13, normal(case.experts, case.hidden, case.ffn))


def route(case: Case, gen: torch.Generator) -> torch.Tensor:
    """(T, K) slots of the group, int32. `one`: all tokens to the first slots; `drops`: a third of the choices is dropped."""
    slots = torch.stack([torch.randperm(case.experts, generator=gen)[: case.top_k] for _ in range(case.tokens)])
    if case.routing == "one":
        slots = torch.arange(case.top_k).expand(case.tokens, -1)
    if case.routing == "drops":
        slots = torch.where(torch.rand(slots.shape, generator=gen) < 1 / 3, -1, slots)
    return slots.to(torch.int32)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest element of `want`; NaN where there is one."""
    if want.numel() == 0:
        return 0.0
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6)).item()
