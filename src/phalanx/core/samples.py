"""Which data-parallel rank computes which logical sample of a step.

A logical sample is one micro-batch of `train.micro_batch` sequences: a step has a fixed number S of them whatever the number of ranks, and owner
r of n has a contiguous range, sample s being owned by `s * n // S`. Where n does not divide S some owners have one sample more; all take part
in as many rounds as the largest share has, those without a sample with an empty one, for a round holds collectives between owners.
"""

from __future__ import annotations


def owned(samples: int, *, owners: int, owner: int) -> range:
    """The logical samples of owner `owner` of `owners`, in order: those s with `s * owners // samples == owner`."""
    return range(-(-owner * samples // owners), -(-(owner + 1) * samples // owners))


def num_rounds(samples: int, *, owners: int) -> int:
    """Samples of the largest share."""
    return -(-samples // owners)
