"""How the next token is drawn, whatever the numbers."""

import pytest
import torch

from phalanx.core.errors import RunError
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=0), Sampling(top_k=2)])
def test_output_that_is_not_finite_is_no_text(value: float, sampling: Sampling) -> None:
    logits = LOGITS.clone()
    logits[2] = value
    with pytest.raises(RunError, match=f"the model's output is not finite: the logit of token 2 is {value}"):
        draw(logits, sampling, generator=torch.Generator())
    logits[2] = -float("inf")  # a token that is never drawn
    assert draw(logits, sampling, generator=torch.Generator()) != 2


def test_of_equal_tokens_the_lowest_ids_are_kept() -> None:
    logits = (torch.randn(100, generator=torch.Generator().manual_seed(1)) / 2).round()
    equal = (logits == logits.max()).nonzero().flatten().tolist()
    assert len(equal) > 2
    generator = torch.Generator().manual_seed(0)
    seen = {draw(logits, Sampling(temperature=1.0, top_k=2), generator=generator) for _ in range(50)}
    assert seen == set(equal[:2])
    assert draw(logits, Sampling(temperature=0), generator=generator) == equal[0]


def test_without_ties_the_draw_is_that_of_topk() -> None:
    logits = torch.randperm(5000, generator=torch.Generator().manual_seed(2)).float() / 700
    ours, topk = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(50):
        kept = torch.topk((logits - logits.max()).double() / 0.8, 50)
        choice = torch.multinomial(torch.softmax(kept.values, 0), 1, generator=topk)
        assert draw(logits, Sampling(), generator=ours) == int(kept.indices[choice])
