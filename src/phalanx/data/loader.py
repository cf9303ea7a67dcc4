"""Which samples form a step, and the micro-batches that a data-parallel rank takes of it.

Step n (from 0) holds samples [n*G, (n+1)*G) of the mixture's endless order (`sampling.Mixture`), G the global batch. Micro-batch j of
a step holds samples [j*b, (j+1)*b) of it, data-parallel rank r of d runs those that `core.samples.owned` gives it: G/(b*d) each, or (with
`any_ranks`) up to one more than others, which then get an empty micro-batch in its place. So the number of
ranks decides who computes a sample and never which samples there are, and the state of the loader is (seed, step): nothing is lost
or seen twice when a run stops anywhere and goes on with other ranks. `check_state` refuses to go on with other data or another batch.

Legend: b sequences of a micro-batch, S sequence length, G global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import CheckpointError, ConfigError, Problem, raise_if
from phalanx.core.samples import num_rounds, owned
from phalanx.data.dataset import Dataset, pack_ids
from phalanx.data.packing import Packed
from phalanx.data.sampling import Mixture, permute, shares

Ints = NDArray[np.int64]

_VALIDATION_KEY = 0x76616C  # fixed: runs with different seeds are compared on the same text


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch(Packed):
    """Sequences of a step. `labels` is -100 where nothing is predicted."""

    index: int
    """Number of this micro-batch in its step, over all ranks; -1 for an empty one."""
    sample_ids: Ints
    """(b,) window ids (`data/dataset.py`); -1 for a filler of a validation batch and in an empty micro-batch."""

    @property
    def is_empty(self) -> bool:
        """Whether this stands for no micro-batch of the step: nothing in it is computed."""
        return self.index < 0


@dataclass(kw_only=True, eq=False)
class _Batches:
    """What training and validation have in common: global batches, and each rank's micro-batches of them."""

    dataset: Dataset = field(kw_only=False)
    seq_len: int
    global_batch: int
    micro_batch: int
    any_ranks: bool = False

    def __post_init__(self) -> None:
        _check_batch(self.global_batch, self.micro_batch, dp_size=1)

    def _ids(self, first: int, count: int) -> Ints:
        """(count,) window ids from sample `first` on, -1 for fillers."""
        raise NotImplementedError

    def sample_ids(self, step: int) -> Ints:
        """(G,) window ids of a step, or of a validation batch."""
        return self._ids(step * self.global_batch, self.global_batch)

    def microbatches(self, step: int, *, dp_index: int = 0, dp_size: int = 1) -> list[MicroBatch]:
        """What data-parallel rank `dp_index` of `dp_size` runs in `step`, in order; as many on all ranks, empty ones last."""
        _check_batch(self.global_batch, self.micro_batch, dp_size=1 if self.any_ranks else dp_size)
        samples, first = self.global_batch // self.micro_batch, step * self.global_batch
        found = [self._microbatch(first, j) for j in owned(samples, owners=dp_size, owner=dp_index)]
        missing = num_rounds(samples, owners=dp_size) - len(found)
        return found + [empty_microbatch(self.micro_batch, self.seq_len) for _ in range(missing)]

    def _microbatch(self, first: int, index: int) -> MicroBatch:
        ids = self._ids(first + index * self.micro_batch, self.micro_batch)
        packed = pack_ids(self.dataset, ids, seq_len=self.seq_len)
        return MicroBatch(**vars(packed), index=index, sample_ids=ids)


@dataclass(kw_only=True, eq=False)
class Loader(_Batches):
    """Batches of the train side. Safe to use from several threads; holds no position."""

    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.dataset.pool_sizes(self.seq_len)
        self._mixture = Mixture(sizes=sizes, weights=self.dataset.weights, seed=self.seed)
        self._first_id = np.cumsum(sizes) - np.asarray(sizes)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps so that `step` is the next one: seed and step, and what both refer to."""
        return {
            "seed": self.seed,
            "step": step,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "data": self.dataset.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any], *, changed: Callable[[object, str], str] = lambda *_: "") -> int:
        """The step to go on with. `changed` says what differs between the data of two fingerprints. Raises CheckpointError where a run cannot go on with these samples, with everything that differs."""
        hints = {
            "seed": ("train.seed", "keep the seed of the run"),
            "global_batch": ("train.global_batch", "keep it, so that no sample is lost or repeated"),
            "seq_len": ("train.seq_len", "keep it, so that no sample is lost or repeated"),
            "data": (
                "data",
                "keep data section, files and tokenizer as they were (a changed file or package counts), or start another run",
            ),
        }
        here = self.state(0)
        problems = [
            Problem(
                where=where,
                value=here[key],
                rule=f"differs from the run that is to be resumed ({state.get(key)!r})"
                + (f": {told}" if key == "data" and (told := changed(state.get(key), here[key])) else ""),
                hint=hint,
            )
            for key, (where, hint) in hints.items()
            if state.get(key) != here[key]
        ]
        raise_if(problems, CheckpointError, subject="resuming")
        return int(state["step"])

    def _ids(self, first: int, count: int) -> Ints:
        pools, windows, _ = self._mixture.locate(np.arange(first, first + count, dtype=np.int64))
        return self._first_id[pools] + windows


@dataclass(kw_only=True, eq=False)
class ValidationLoader(_Batches):
    """The same `num_batches` global batches at every validation, for any seed and any number of ranks.

    Windows are spread over the validation side, and have the shares of the mixture's weights: those of a source with too few come again, so that
    the loss is that of the mixture. Once each window has come no more are drawn, and the last batch is filled up with sequences that predict
    nothing, so that all ranks run equally many micro-batches and means stay exact.
    """

    batches: int

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = _validation_ids(self.dataset, seq_len=self.seq_len, wanted=self.batches * self.global_batch)
        self.num_batches = -(-len(ids) // self.global_batch)
        self._all_ids = np.full(self.num_batches * self.global_batch, -1, np.int64)
        self._all_ids[: len(ids)] = ids

    def _ids(self, first: int, count: int) -> Ints:
        return self._all_ids[first : first + count]


def _validation_ids(dataset: Dataset, *, seq_len: int, wanted: int) -> Ints:
    sizes, total = dataset.pool_sizes(seq_len), math.fsum(dataset.weights)
    enough = max(math.ceil(size * total / weight) for size, weight in zip(sizes, dataset.weights, strict=True))
    chosen, first = [], 0
    for pool, (size, count) in enumerate(zip(sizes, shares(dataset.weights, min(wanted, enough)), strict=True)):
        spread = permute(np.arange(count) % size, size=size, key=_VALIDATION_KEY + pool)
        chosen.append(first + spread)
        first += size
    return np.concatenate(chosen)


def empty_microbatch(micro_batch: int, seq_len: int) -> MicroBatch:
    """The shape of a micro-batch with nothing in it."""
    shape = (micro_batch, seq_len)
    return MicroBatch(
        index=-1,
        tokens=np.zeros(shape, np.int64),
        labels=np.full(shape, -100, np.int64),
        positions=np.broadcast_to(np.arange(seq_len), shape).copy(),
        segments=((seq_len,),) * micro_batch,
        padding=(0,) * micro_batch,
        sample_ids=np.full(micro_batch, -1, np.int64),
    )


def _check_batch(global_batch: int, micro_batch: int, *, dp_size: int) -> None:
    unit = micro_batch * dp_size
    if global_batch % unit:
        nearby = max(round(global_batch / unit), 1) * unit
        rule = f"must be a multiple of train.micro_batch x data-parallel ranks = {micro_batch} x {dp_size}"
        raise ConfigError.of("train.global_batch", global_batch, rule, f"for example {nearby}", subject="the batch")
