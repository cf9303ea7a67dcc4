"""The random configurations of `test_overlap.py` in fp32 and bf16, against one process in float64.

Tokens, weights of the experts and the gradient of the output are rounded to the type first (routing weights to fp32, as the router gives them); one process computes
the layer of these very values in float64, dense, with gradients by autograd. So what differs is what the overlapped layer itself rounds. One process in
bf16 would be no better yardstick: it rounds in other places, and its errors would count as ours or make up for them.

The error of a tensor is max |difference| / max |value in one process|, over the tokens of all ranks: of the output, of the gradient of the tokens, and of the
gradients of each of the two weights of all experts. The gradient of a routing weight is a sum over columns, dy_h * f_h, which may cancel, and some of these
batches have one token: its error is max |difference| / max of the sums of |dy_h * f_h|.
"""

from __future__ import annotations

import pytest
import test_dispatch as dense
import torch
from test_overlap import drawn, run_case
from tiers import times

from ranks import run_ranks

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHARE = 4
"""One configuration in so many, other ones in each type. All of them: see docs/explanation/overlap.md."""


def round_data(patch, dtype):
    """Let what `test_dispatch` draws be values of the type."""
    tokens_of, expert_weights, probe = dense.tokens_of, dense.expert_weights, dense.probe
    wide = torch.promote_types(dtype, torch.float32)

    def tokens(*args, **options):
        x, weights, experts_TK = tokens_of(*args, **options)
        return x.to(dtype).double(), weights.to(wide).double(), experts_TK

    patch.setattr(dense, "tokens_of", tokens)
    patch.setattr(dense, "expert_weights", lambda *args: tuple(w.to(dtype).double() for w in expert_weights(*args)))
    patch.setattr(dense, "probe", lambda *args: probe(*args).to(dtype).double())


def run_rounded(rank, cache, cases, dtype):
    with pytest.MonkeyPatch.context() as patch:
        round_data(patch, dtype)
        return [run_case(rank, cache, *case, dtype=dtype) for case in cases]


def errors_of(case, results, dtype):
    """Name -> error."""
    with pytest.MonkeyPatch.context() as patch:
        round_data(patch, dtype)
        want = dense.one_process(case)
        sums = dense.slot_sums_of(case, results)
        found = {
            name: error(torch.cat([r[name] for r in results]), torch.cat(getattr(want, name)), scale)
            for name, scale in (("y", None), ("x", None), ("weights", largest_sum(case, want)))
        }
    for i, name in enumerate(("w13", "w2")):
        got, wanted = torch.stack([s[i] for s in sums]), torch.stack([dense.grad_of(c[i]) for c in want.copies])
        found[name] = error(got, wanted)
    assert [r["dropped"] for r in results] == [int((kept < 0).sum()) for kept in want.kept]
    return found


def largest_sum(case, want):
    """Of |dy_h * f_h| over the columns, of all pairs of tokens and experts that are kept."""
    most = torch.zeros(())
    data, _ = dense.kept_experts(case)
    for r, (x, weights, _) in enumerate(data):
        copies = [w.detach() for w in want.copies[case.folding.coord(r, "edp")]]
        dy = dense.probe(r, want.y[r])
        for k in range(weights.shape[1] if len(x) else 0):
            f = dense.dense_experts(x, torch.ones_like(weights[:, :1]), want.kept[r][:, k : k + 1], *copies)
            most = torch.maximum(most, (dy * f).abs().sum(1).max())
    return most


def error(got, want, scale=None):
    assert got.shape == want.shape and got.isfinite().all()
    if not want.numel():
        return 0.0
    scale = want.abs().max() if scale is None else scale
    return float((got - want).abs().max() / scale.clamp(min=1e-30))


def worst_errors(world, dtype, seeds):
    """Of the configurations of these seeds that have `world` ranks: seed -> errors."""
    cases = {seed: case for seed, (size, case) in ((s, drawn(s)) for s in seeds) if size == world}
    results = run_ranks(world, run_rounded, list(cases.values()), dtype, timeout_s=240)
    return {seed: errors_of(case[0], [r[i] for r in results], dtype) for i, (seed, case) in enumerate(cases.items())}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_configurations_in_other_types(world, dtype):
    found = worst_errors(world, dtype, range(list(LIMITS).index(dtype), times(1500, 480), SHARE))
    assert len(found) > 6
    beyond = {seed: errors for seed, errors in found.items() if max(errors.values()) > LIMITS[dtype]}
    assert not beyond
    assert max(max(errors.values()) for errors in found.values()) > LIMITS[dtype] / 1000  # or it was not computed in it
