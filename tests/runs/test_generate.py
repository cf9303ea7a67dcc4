"""How the next token is drawn, whatever the numbers."""

import pytest
import torch

from phalanx.train.generation import Sampling, draw

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5])


def drawn(sampling: Sampling, *, times: int = 400) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    tokens = [draw(LOGITS, sampling, generator=generator) for _ in range(times)]
    return torch.bincount(torch.tensor(tokens), minlength=4).tolist()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e-3])
@pytest.mark.parametrize("top_k", [0, 2, 9])
def test_a_cold_model_takes_the_likeliest(temperature: float, top_k: int) -> None:
    assert drawn(Sampling(temperature=temperature, top_k=top_k), times=20) == [0, 20, 0, 0]


def test_frequencies_follow_the_temperature() -> None:
    for temperature in (0.7, 2.0):
        expected = torch.softmax(LOGITS.double() / temperature, 0) * 400
        found = torch.tensor(drawn(Sampling(temperature=temperature, top_k=0)))
        assert ((found - expected).abs() < 4 * expected.sqrt() + 1).all()


def test_only_the_likeliest_k_are_drawn() -> None:
    counts = drawn(Sampling(temperature=100.0, top_k=2))
    assert counts[0] == counts[2] == 0 and min(counts[1], counts[3]) > 100
