"""The router's launch under Triton's interpreter against its plain operations: choice, weights, sums and every gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from kernel_help import close, normal
from moe_help import context, moe_spec, with_router

from phalanx.kernels.device import router as fused
from phalanx.kernels.triton.tiles import is_interpreted
from phalanx.models import router as models_router
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.router import Router
from phalanx.plan.model.model import RouterSpec

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

E, K, T = 12, 3, 22
LOSSES = {"aux_loss": 0.1, "z_loss": 0.1}
SPECS = {
    "softmax": RouterSpec(**LOSSES),
    "renormalised": RouterSpec(renormalize=True, scale=1.5, **LOSSES),
    "top-k first": RouterSpec(softmax_order="after_topk", scale=0.5, **LOSSES),
    "sequences": RouterSpec(aux_scope="sequence", renormalize=True, **LOSSES),
    "sigmoid, softmax of the chosen": RouterSpec(
        score="sigmoid", softmax_order="after_topk", bias_rate=1e-3, **LOSSES
    ),
    "groups": RouterSpec(num_groups=4, group_topk=2, group_score="max", **LOSSES),
    "groups of logits": RouterSpec(softmax_order="after_topk", num_groups=2, group_topk=1),
    "DeepSeek-V3": RouterSpec(
        score="sigmoid", renormalize=True, scale=2.5, num_groups=4, group_topk=2, group_score="top2", bias_rate=1e-3,
        aux_scope="sequence", **LOSSES,
    ),
}  # fmt: skip


def both(
    spec: RouterSpec, logits_TE: torch.Tensor, *, top_k: int = K, is_text_T: torch.Tensor | None = None
) -> list[list[torch.Tensor]]:
    """Of the launch and of plain operations: what came out, then the gradient of the logits for random ones of all that has one."""
    experts = logits_TE.shape[1]
    model = with_router(moe_spec(num_experts=experts, top_k=top_k, hidden=experts), **vars(spec))
    router = Router(context(model, dtype=logits_TE.dtype), 0)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.arange(experts) % 3 * 0.25)
    sequences = 2 if spec.aux_scope == "sequence" else 1

    def plain(x: torch.Tensor) -> fused.Choice:
        return router._plain_choice(x, ForwardInfo(), None, sequences=sequences, is_text_T=is_text_T)

    def launched(x: torch.Tensor) -> fused.Choice:
        return fused.fused_choice(x, router.rule, sequences=sequences, bias_E=router.expert_bias, is_text_T=is_text_T)

    out = []
    for choose in (launched, plain):
        x = logits_TE.clone().requires_grad_()
        choice = choose(x)
        loss = (choice.weights_TK * normal(*choice.weights_TK.shape, seed=5)).sum()
        if spec.aux_loss:
            loss = loss + (choice.probs_SE * normal(*choice.probs_SE.shape, seed=6)).sum() + 0.3 * choice.squares
        loss.backward()
        known = [getattr(choice, f.name) for f in dataclasses.fields(choice)]
        out.append([*(known if spec.aux_loss else known[:4]), x.grad])
    return out


def assert_same(found: list[list[torch.Tensor]], tolerance: float) -> None:
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert close(got, want.to(torch.float64), tolerance) if want.is_floating_point() else torch.equal(got, want)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("what", ["", "ties", "padding"])
def test_equals_its_reference(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several blocks of tokens, the last of which is not full, with few distinct scores, and with padding behind two sequences."""
    monkeypatch.setattr(fused, "TILE", 64)
    logits_TE = normal(T, E, seed=1, scale=2.0)
    if what == "ties":
        logits_TE = logits_TE.round().clamp(-1, 1)
    is_text_T = torch.arange(T) % (T // 2) < 7 if what == "padding" else None
    assert_same(both(SPECS[name], logits_TE, is_text_T=is_text_T), 1e-12)
    assert_same(both(SPECS[name], logits_TE.to(torch.float32), is_text_T=is_text_T), 2e-5)


def test_a_router_tells_its_program_which_rows_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_router(moe_spec(num_experts=E, top_k=K, hidden=E), **vars(SPECS["DeepSeek-V3"]))
    router, x = Router(context(model, dtype=torch.float64), 0), normal(T, E, seed=1)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    tokens_BS = torch.zeros(2, T // 2, dtype=torch.int64)
    text = TokenBatch(tokens_BS, tokens_BS, tokens_BS, ((T // 2,),) * 2, padding=(0, 5)).text
    want = router(x, ForwardInfo(), num_sequences=2, text=text)
    monkeypatch.setattr(models_router, "runs_programs", lambda x: True)
    got = router(x, ForwardInfo(), num_sequences=2, text=text)
    assert int(got.counts_E.sum()) == (T - 5) * K
    for field in dataclasses.fields(got):
        torch.testing.assert_close(getattr(got, field.name), getattr(want, field.name), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (16, 8), (33, 2)])
def test_any_number_of_experts(experts: int, top_k: int) -> None:
    assert_same(both(SPECS["renormalised"], normal(70, experts, seed=2), top_k=top_k), 1e-12)


def test_no_tokens() -> None:
    got, want = both(SPECS["softmax"], torch.zeros(0, E, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", ["renormalised", "top-k first", "DeepSeek-V3"])
def test_a_logit_that_is_no_number_shows(name: str) -> None:
    """As in plain operations, so that an evaluation tells it too."""
    logits_TE = normal(T, E, seed=1)
    logits_TE[3, 5] = torch.nan
    (_, weights_TK, *_), (_, plain_TK, *_) = both(SPECS[name], logits_TE)
    assert weights_TK[3].isnan().all() and plain_TK[3].isnan().all() and not weights_TK[4:].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_hold_no_number_stay_within_the_experts() -> None:
    logits_TE = torch.full((3, E), torch.nan, dtype=torch.float64)
    logits_TE[1] = torch.arange(E)
    (experts_TK, *_), _ = both(dataclasses.replace(SPECS["softmax"], aux_loss=0.0), logits_TE)
    assert experts_TK.min() >= 0 and experts_TK.max() < E and experts_TK[1].tolist() == [11, 10, 9]
