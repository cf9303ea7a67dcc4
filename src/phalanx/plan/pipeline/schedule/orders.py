"""The order in which each pipeline rank runs the forward and backward passes of its stages, for every schedule by name.

Decides nothing but orders: pure functions of (ranks, virtual stages, microbatches). `plan/pipeline/schedule/make.py` gives them names and rules,
`plan/pipeline/schedule/check.py` verifies them without reading this file. Must never change: on each stage, weight gradients are accumulated in
the order of the microbatches, so that all schedules of one division into stages give the same bits.

Kinds: F forward; B whole backward; I gradient of the stage's input (what the stage below waits for); W gradient of its weights (nobody
waits for it, so it can fill a bubble). A microbatch of a stage has F, then either B, or I and later W.
p ranks, v stages a rank, m microbatches; *stage* is the virtual stage 0 .. p*v-1, *chunk* numbers the stages of one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Order = tuple[Action, ...]


def looped_ranks(pp: int, virtual: int) -> tuple[int, ...]:
    """Rank of each stage, dealt round: stage s on rank s mod p (arXiv 2104.04473)."""
    return tuple(stage % pp for stage in range(pp * virtual))


def vee_ranks(pp: int) -> tuple[int, ...]:
    """Rank of each of 2p stages, down the ranks and up again: rank 0 holds the first and the last stage."""
    return (*range(pp), *reversed(range(pp)))


# ---- GPipe and the 1F1B family --------------------------------------------------------------------------------------------------


def gpipe_order(rank: int, *, pp: int, virtual: int, microbatches: int) -> Order:
    """All forwards, then all backwards (arXiv 1811.06965); with several stages a rank, chunk after chunk (arXiv 2211.05953)."""
    chunks, count = range(virtual), range(microbatches)
    forwards = [Action("F", chunk * pp + rank, mb) for chunk in chunks for mb in count]
    backwards = [Action("B", chunk * pp + rank, mb) for chunk in reversed(chunks) for mb in count]
    return (*forwards, *backwards)


def round_sizes(pp: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches of each round of the interleaved order: at least p each where there are p, as even as possible, larger ones first.

    A round passes through all chunks before the next one starts. With p microbatches or more it comes back to a rank for the next
    chunk without a wait. Megatron needs m to be a multiple of p, PyTorch a multiple of m // p; this takes any m. Larger rounds come
    first, because the warm-up (sized for the first) must cover every round.
    """
    rounds = max(1, microbatches // pp)
    size, more = divmod(microbatches, rounds)
    return (size + 1,) * more + (size,) * (rounds - more)


def interleaved_warmup(rank: int, *, pp: int, virtual: int, microbatches: int, hop: int) -> int:
    """Forwards before the first pair of one forward and one backward; `hop` for each rank between this one and the last."""
    first = round_sizes(pp, microbatches)[0]
    return min(virtual * microbatches, hop * (pp - 1 - rank) + (virtual - 1) * first)


def one_f_one_b_order(
    rank: int, *, pp: int, virtual: int, microbatches: int, warmup: int, defer: int | None = None
) -> Order:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards.

    `warmup` p-1-r is 1F1B, 2(p-1-r) eager-1F1B (arXiv 2211.05322); see `interleaved_warmup` for v > 1. With `defer` the backwards are
    split, and the W of a microbatch follows the I that is `defer` backwards later; what is left of W ends the order.
    """
    forwards = _rounds(rank, pp=pp, virtual=virtual, microbatches=microbatches, down=False)
    backwards = _rounds(rank, pp=pp, virtual=virtual, microbatches=microbatches, down=True)
    out = [Action("F", *at) for at in forwards[:warmup]]
    for i, at in enumerate(backwards):
        if warmup + i < len(forwards):
            out.append(Action("F", *forwards[warmup + i]))
        out.append(Action("B" if defer is None else "I", *at))
        if defer is not None and i >= defer:
            out.append(Action("W", *backwards[i - defer]))
    if defer:
        out += [Action("W", *at) for at in backwards[-min(defer, len(backwards)) :]]
    return tuple(out)


def _rounds(rank: int, *, pp: int, virtual: int, microbatches: int, down: bool) -> list[tuple[int, int]]:
    """(stage, microbatch) of a rank in interleaved order: round after round, in each chunk after chunk (from the last if `down`)."""
    chunks = range(virtual)
    out, begin = [], 0
    for size in round_sizes(pp, microbatches):
        for chunk in reversed(chunks) if down else chunks:
            out += [(chunk * pp + rank, mb) for mb in range(begin, begin + size)]
        begin += size
    return out


# ---- V-shaped schedules ---------------------------------------------------------------------------------------------------------


def zbv_order(rank: int, *, pp: int, microbatches: int) -> Order:
    """ZB-V (arXiv 2401.10241, section 6): two stages a rank, all backwards split; no bubble but the start where F = I = W.

    Written for at least 2p-1 microbatches; with fewer, the passes of the missing ones are left out.
    """
    count, after = max(microbatches, 2 * pp - 1), pp - rank
    phases = [
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 I1 W1"),
        (count - 2 * pp + rank + 1, "F0 I0 W0 F1 I1 W1"),
        (after - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (after, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
    steps = [step for times, pattern in phases for step in pattern.split() * times]
    return _written(rank, steps, pp=pp, microbatches=microbatches)


def dualpipev_order(rank: int, *, pp: int, microbatches: int) -> Order:
    """The order of DualPipeV (DualPipe of arXiv 2412.19437 cut in half): two stages a rank, B whole but in warm-up and cool-down.

    In the steady phase a forward of one direction stands next to a backward of the other, so that an executor with overlap can run
    such a pair (F0 B1, F1 B0) at once; run one after the other it is still right. Written for at least 2p microbatches; with fewer,
    the passes of the missing ones are left out.
    """
    count, above = max(microbatches, 2 * pp), pp - rank - 1
    last = [f"{'B' if i < rank + 1 else 'I'}{1 - i % 2}" for i in range(2 * (rank + 1))]
    phases = [
        (2 * above, "F0"),
        (rank + 1, "F0 F1"),
        (above, "I1 W F1"),
        (count - 2 * pp + rank + 1, "F0 B1 F1 B0"),
        (above, "B1 F1 B0"),
        (1, " ".join(last)),
        (above, "W I0"),
        (rank + 1, "W"),
    ]
    steps = [step for times, pattern in phases for step in pattern.split() * times]
    return _written(rank, steps, pp=pp, microbatches=microbatches)


def _written(rank: int, steps: Sequence[str], *, pp: int, microbatches: int) -> Order:
    """Steps like `F0` (next forward of chunk 0), `W1` (oldest W owed by chunk 1) and `W` (oldest owed) as actions."""
    stages = (rank, 2 * pp - 1 - rank)
    done: dict[str, int] = {}
    owed: deque[tuple[int, int]] = deque()
    out: list[Action] = []
    for step in steps:
        if step[0] == "W":
            chunk, mb = next(at for at in owed if step in ("W", f"W{at[0]}"))
            owed.remove((chunk, mb))
            out.append(Action("W", stages[chunk], mb))
            continue
        chunk = int(step[1])
        side = f"{'F' if step[0] == 'F' else 'B'}{chunk}"
        mb = done[side] = done.get(side, -1) + 1
        out.append(Action(_KINDS[step[0]], stages[chunk], mb))
        if step[0] == "I":
            owed.append((chunk, mb))
    return tuple(action for action in out if action.microbatch < microbatches)


_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
