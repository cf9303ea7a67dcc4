"""What the passes of a step hold on one rank, in the order of its schedule: memory by stage and time, never an average.

    pass_moments    a rank's stages and its order of passes -> the fullest moments of each kind of pass of each stage

A forward pass leaves what its layers keep (`activations.py`) until its backward pass frees it, layer by layer. Where weight gradients are deferred, a
backward pass leaves their inputs until W. What the other passes of the rank have left at that time is counted from the order itself, so that virtual stages,
uneven stages and every schedule are met as they are. Tensors under way between stages live until they have been waited for.

Must never change: everything that is counted mirrors `train/step/passes.py` and `runtime/pipeline/runner.py`; nothing is scaled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.plan.mapping import Stage
from phalanx.plan.pipeline import AHEAD
from phalanx.plan.pipeline.schedule import Order
from phalanx.simulate.memory import activations, device_activations
from phalanx.simulate.memory.activations import Local
from phalanx.simulate.memory.kernel_facts import LEAST_OPEN

Left = Literal["live", "owed"]
"""What a forward pass leaves for the backward pass; what that leaves for the weight gradients."""


@dataclass(frozen=True, kw_only=True)
class PassMoment:
    """Sizes in bytes of the tensors that are there: `kept` for backward passes (and under way between stages), `working` for the operation itself.

    `done`: layers whose weights have their gradients of this pass.
    """

    name: str
    kept: tuple[int, ...]
    working: tuple[int, ...]
    done: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankPasses:
    """A rank's stages and what it does with them. `x`: its part of a micro-batch."""

    x: Local
    stages: tuple[Stage, ...]
    order: Order
    max_live: int
    puts_off: bool
    """Weight gradients are computed at the end of a backward pass, or later."""
    in_pairs: bool
    """A forward pass may begin before the backward pass beside it has let go of anything."""
    rank_of_stage: tuple[int, ...]


def pass_moments(run: RankPasses) -> Iterator[PassMoment]:
    """The moments of every kind of pass of every stage, each with the most that the other passes have left then."""
    of = {stage.index: _StageKeeps(run.x, stage, puts_off=run.puts_off) for stage in run.stages}
    several, under_way = len(of) > 1, _under_way(run)
    for (kind, index), others in _fullest(run, of).items():
        stage = of[index]
        left = under_way + [n for (what, i), count in others.items() for n in of[i].left[what] * count]
        moments = {"F": stage.forward, "B": stage.backward, "I": stage.backward, "W": stage.weights}[kind]()
        for moment in moments:
            name = f"stage {index}: {moment.name}" if several else moment.name
            yield dataclasses.replace(moment, name=name, kept=(*left, *moment.kept))


Held = Mapping[tuple[Left, int], int]
"""("live" or "owed", stage) -> of how many micro-batches."""


def _fullest(run: RankPasses, of: Mapping[int, _StageKeeps]) -> dict[tuple[str, int], Held]:
    """(kind, stage) -> what other passes have left at that one of its passes where it is most."""
    held: Counter[tuple[Left, int]] = Counter()
    found: dict[tuple[str, int], tuple[int, Held]] = {}
    for before, action in zip((None, *run.order), run.order, strict=False):
        if action.kind in "BI":
            held["live", action.stage] -= 1
        elif action.kind == "W":
            held["owed", action.stage] -= 1
        there = held.copy()
        if run.in_pairs and action.kind == "F" and before is not None and before.kind != "F":
            there["live", before.stage] += 1
        size = sum(count * sum(of[stage].left[what]) for (what, stage), count in there.items())
        key = action.kind, action.stage
        if key not in found or size > found[key][0]:
            found[key] = size, there
        if action.kind == "F":
            held["live", action.stage] += 1
        elif action.kind == "I":
            held["owed", action.stage] += 1
    return {key: there for key, (_, there) in found.items()}


def _under_way(run: RankPasses) -> list[int]:
    """`_Executor.open_sends` and `posted_receives`: sends that are not waited for yet, receives that are posted ahead of their place."""
    last = len(run.rank_of_stage) - 1

    def elsewhere(stage: int, other: int) -> bool:
        return 0 <= other <= last and run.rank_of_stage[other] != run.rank_of_stage[stage]

    passes = [(action.stage, 1 if action.kind == "F" else -1) for action in run.order if action.kind != "W"]
    sends = sum(elsewhere(stage, stage + way) for stage, way in passes)
    receives = sum(elsewhere(stage, stage - way) for stage, way in passes)
    return [run.x.stream()] * (min(sends, max(LEAST_OPEN, run.max_live)) + min(receives, AHEAD))


class _StageKeeps:
    """One stage: what its passes leave, and its own moments."""

    def __init__(self, x: Local, stage: Stage, *, puts_off: bool) -> None:
        self.x, self.stage, self.puts_off = x, stage, puts_off
        act = self.act = device_activations if x.on_device else activations
        more = x.spec.mtp_blocks if stage.has_head else ()
        self.layers = (*stage.layers, *more)
        self.kept: list[list[int]] = [act.kept_layer(x, i) for i in self.layers]
        self.table: list[int] = act.kept_table(x)
        self.ends = act.kept_norm(x) if stage.has_head else []
        loss = act.kept_loss(x) if stage.has_head else []
        owed = [n for i in self.layers for n in act.owed_layer(x, i)]
        self.left: dict[Left, list[int]] = {"live": [*self._upto(len(self.layers)), *self.ends, *loss], "owed": owed}

    def _upto(self, count: int) -> list[int]:
        return self.table + [n for part in self.kept[:count] for n in part]

    def _is_moe(self, layer: int) -> bool:
        return layer in self.x.spec.moe_layers

    def forward(self) -> Iterator[PassMoment]:
        """Its end: the last layer with experts, the head."""
        every = self._upto(len(self.layers))
        if self.layers and self._is_moe(self.layers[-1]):
            yield _moment(f"forward, layer {self.layers[-1]}", every, self.act.experts_forward(self.x))
        if self.stage.has_head:
            yield _moment("forward, the head", every + self.ends, self.act.head_forward(self.x))

    def backward(self) -> Iterator[PassMoment]:
        """Goes backward from the head down. What weight gradients need collects as far as they are deferred."""
        x, layers = self.x, self.layers
        if self.stage.has_head:
            yield _moment("backward, the head", self.left["live"], self.act.head_backward(x))
        tied = self._tied()
        again = dataclasses.replace(x, recompute="none")
        for i in range(len(layers) - 1, -1, -1):
            layer, done = layers[i], layers[i + 1 :]
            owed = [n for j in done for n in self.act.owed_layer(x, j)] if self.puts_off else []
            redone = self.act.kept_layer(again, layer) if x.recompute == "full" else []
            if self._is_moe(layer):
                experts = self.act.experts_backward(x, weights=not self.puts_off)
                kept = self._upto(i + 1) + redone + owed
                yield _moment(f"backward, layer {layer}, experts", kept, experts + tied, done)
                owed = owed + self.act.owed_experts(x) if self.puts_off else owed
            attention = self.act.kept_attention(again if x.recompute == "full" else x)
            kept = self._upto(i) + attention + owed
            yield _moment(f"backward, layer {layer}, attention", kept, self.act.attention_backward(x) + tied, done)
        owed = self.left["owed"] if self.puts_off else []
        if self.stage.has_embedding:
            yield _moment("backward, the embedding", self.table + owed, self.act.embedding_backward(x) + tied, layers)
        elif owed:
            yield from self.weights()

    def weights(self) -> Iterator[PassMoment]:
        """What was deferred: the job that makes most at once, with all others still to do."""
        made: list[int] = max((self.act.largest_owed_gradient(self.x, i) for i in self.layers), key=sum, default=[])
        yield _moment("weight gradients", self.left["owed"], made, self.layers)

    def _tied(self) -> list[int]:
        """The gradient of a table that is head and embedding waits for both."""
        s = self.x.spec
        both = self.stage.has_head and self.stage.has_embedding and s.tied_embeddings
        return [self.x.vocab * s.hidden * self.x.item] if both else []


def _moment(name: str, kept: Sequence[int], working: Sequence[int], done: Sequence[int] = ()) -> PassMoment:
    return PassMoment(name=name, kept=tuple(kept), working=tuple(working), done=tuple(done))
