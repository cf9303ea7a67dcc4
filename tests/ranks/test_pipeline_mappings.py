"""Every schedule trains what one rank trains, on every kind of mapping: gradients, norm, clipped step, losses, counts and expert biases, in fp64.

Experts, dense first layers (stages without experts), tied and untied embeddings, all router losses, recomputation, dropping, buckets and
ZeRO-1 are in the cases; tp, cp, ep and etp inside the stages.
"""

from __future__ import annotations

import pytest
from pipeline_help import PIPELINES, cases, verify
from tiers import some

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("skip", [0, len(PIPELINES)])
def test_two_ranks(skip: int) -> None:
    verify(2, some(cases(2, pp=2, count=len(PIPELINES), skip=skip), 5))


def test_four_stages_of_ranks() -> None:
    verify(4, some(cases(4, pp=4, count=len(PIPELINES)), 5))


def test_tensor_and_expert_parallelism_inside_the_stages() -> None:
    verify(4, some(cases(4, pp=2, axes=("tp", "ep", "etp"), count=2 * len(PIPELINES)), 7))


def test_eight_ranks() -> None:
    verify(8, some(cases(8, pp=2, axes=("tp", "cp", "ep", "etp"), count=len(PIPELINES), skip=5), 4))


def test_four_stages_beside_experts() -> None:
    verify(8, some(cases(8, pp=4, axes=("tp", "ep", "etp"), count=len(PIPELINES), skip=2), 3))
