"""Whether a run fits the memory of this machine, or of its GPUs, asked before it starts: ranks that fill it are ended, after minutes."""

from __future__ import annotations

import os
from dataclasses import replace

from phalanx.cli.predicting.cards import nearest_fit, smallest_card, way_out
from phalanx.cli.predicting.dry_run import (
    available_bytes,
    card_bytes,
    machine_here,
    peak_bytes,
    rank_estimates,
    tokenizer_vocab,
)
from phalanx.core.config import Recipe
from phalanx.core.errors import PhalanxError, Problem
from phalanx.core.units import format_bytes
from phalanx.plan import choose_recovery, resolve_shape
from phalanx.plan.recovery import wanted_ranks

DOUBT = 1.1
"""A prediction may be a tenth too high (`phalanx bench memory`): only what is beyond that is refused."""
PROCESS_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
"""Of a process on the host, beside what is predicted, generously: what importing torch and tokenising take; CUDA's context, buffers of NCCL (also in /dev/shm), batches and text."""


def needed_bytes(recipe: Recipe) -> int | None:
    """Memory of all ranks of this machine together, predicted; None where that is not known (a recipe that cannot run, a GPU)."""
    if recipe.launch.device == "cuda":
        return None
    ranks = recipe.launch.ranks
    try:
        return ranks * peak_bytes(recipe, machine_here(recipe, local_ranks=ranks), world=ranks)
    except PhalanxError:
        return None


def host_bytes(recipe: Recipe, *, local_ranks: int, world: int) -> int | None:
    """Memory to ask for on a host with so many ranks of `world`. With GPUs the host has the copies of state that checkpoints are written from, at most all that its ranks hold (`runtime/checkpoint/host_copies.py`).
    None where that cannot be told (a tokenizer that is not on this machine)."""
    device = recipe.launch.device_type
    try:
        ranks = rank_estimates(recipe, machine_here(recipe, local_ranks=local_ranks), world=world)
    except PhalanxError:
        return None
    copies = max(m.terms["optimizer state"] for e in ranks for m in e.moments)
    each = copies if device == "cuda" else max(e.peak_bytes for e in ranks)
    return int(DOUBT * local_ranks * (PROCESS_BYTES[device] + each))


def has_room(recipe: Recipe) -> bool:
    """Whether the run fits the processors' memory, as far as that is known."""
    return recipe.launch.device == "cuda" or not memory_problems(recipe, with_hint=False)


def _card_problems(recipe: Recipe) -> list[Problem]:
    card, world = smallest_card(os.environ), wanted_ranks(recipe)
    if card is None:
        return []

    def peak(other: Recipe) -> int:
        return card_bytes(other, machine_here(other, local_ranks=recipe.launch.ranks), world=world)

    try:
        needed = peak(recipe)
        spec, _ = resolve_shape(recipe, world=world, tokenizer_vocab=tokenizer_vocab(recipe.data))
    except PhalanxError:
        return []  # it cannot run, and whoever runs it says why
    if needed <= DOUBT * card.room_bytes:
        return []
    found = nearest_fit(recipe, spec, world=world, room=card.room_bytes, peak=peak)
    way = way_out(found, "use more GPUs, or a smaller model")
    rule = f"is more than the {format_bytes(card.room_bytes)} that {card.name} leaves for tensors and NCCL (predicted)"
    where = "memory of a rank"
    return [Problem(where=where, value=format_bytes(needed), rule=rule, hint=f"{way}; --force starts it all the same")]


def memory_problems(recipe: Recipe, *, with_hint: bool = True) -> list[Problem]:
    """That the ranks of this machine need more memory than it has left, or one than its GPU has, with the nearest run that would fit."""
    if recipe.launch.device == "cuda":
        return _card_problems(recipe)
    needed, available = needed_bytes(recipe), available_bytes()
    if needed is None or available is None or needed <= DOUBT * available:
        return []
    ranks = recipe.launch.ranks
    rule = f"is more than the {format_bytes(available)} that are available: the system would end this run in its middle"
    hint = f"{_way_out(recipe, available)}; --force starts it all the same" if with_hint else ""
    where = f"memory of {ranks} rank{'s' if ranks > 1 else ''}"
    return [Problem(where=where, value=format_bytes(needed), rule=rule, hint=hint)]


def _way_out(recipe: Recipe, available: int) -> str:
    """Settings with which it would fit, or which could."""
    whole = choose_recovery(recipe).recipe
    spec, folding = resolve_shape(whole, world=whole.launch.ranks, tokenizer_vocab=tokenizer_vocab(whole.data))
    if whole.folding.ep is None:
        whole = replace(whole, folding=replace(whole.folding, ep=folding.of_rank(0).ep))
    found = nearest_fit(
        whole, spec, world=whole.launch.ranks, room=available, peak=lambda other: needed_bytes(other) or available + 1
    )
    return way_out(found, "lower train.seq_len, or take a smaller model")
