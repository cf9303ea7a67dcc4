"""Terms of the memory estimate beside real tensors: state, what layers keep, the peak of a step, and the constants they rest on."""

import dataclasses
from typing import Any

import pytest
import torch
from memory_help import Watch, assembled, batches, changed, local_of, small_recipe, small_spec

from phalanx.core.config import Recipe
from phalanx.core.processor import Processor, this_processor
from phalanx.kernels.cpu import shapes
from phalanx.kernels.native import compiled_rows
from phalanx.kernels.ops import adamw, attention, cross_entropy, grouped
from phalanx.kernels.triton.symmetric import ArenaSpec
from phalanx.models.context import ForwardInfo
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import ModelSpec
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.processes import allocator
from phalanx.simulate.mapping.routing import RouterModel
from phalanx.simulate.memory import activations as act, kernel_facts as facts
from phalanx.simulate.memory.balance import Balance, expected_balance, fresh_load, most_uneven
from phalanx.simulate.memory.generated import generated_code, num_expert_sizes
from phalanx.simulate.memory.memory import TERMS, estimate_memory
from phalanx.train import loop, warm
from phalanx.train.setup import machine
from phalanx.train.step.transaction import train_step
from ranks import run_ranks

EVEN = Balance(first=1.0, later=1.0, source="a test")


# ---- constants


def test_mirrored_constants_are_those_of_the_kernels() -> None:
    assert (facts.SPACE, facts.BLOCK) == (shapes.SPACE, shapes.BLOCK)
    assert (facts.LOGIT_CHUNK, facts.LOGIT_GROUP_BYTES) == (cross_entropy.CHUNK, cross_entropy.GROUP_BYTES)
    assert facts.LOGIT_COLUMNS == cross_entropy.COLUMNS
    assert (facts.MAX_PIECE, facts.BLOCK_ROWS) == (grouped.MAX_PIECE, grouped.BLOCK_ROWS)
    assert (facts.KEY_BLOCK, facts.CORRECTION) == (attention.KEY_BLOCK, attention.CORRECTION)
    assert facts.ADAM_CHUNK == adamw.CHUNK
    assert facts.PREFETCH_STEPS == loop.PREFETCH_STEPS
    assert (facts.SAMPLE_TOKENS, facts.PROMPT_TOKENS) == (loop.SAMPLE_TOKENS, loop.PROMPT_TOKENS)
    assert facts.RATE_SIZES == machine.RATE_SIZES
    assert facts.LARGEST_HEAP_BLOCK == allocator.LARGEST_HEAP_BLOCK
    assert facts.LONGEST_WARM == warm.LONGEST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_padded_as_the_experts_pad_them(dtype: torch.dtype) -> None:
    for rows in [*range(300), 1000, 2047, 2048, 2049, 5000]:
        assert facts.padded_rows(rows, dtype.itemsize) == shapes.padded_rows(rows, dtype)
        real = grouped._pieces([rows], dtype)
        num, size = facts.pieces(rows, dtype.itemsize)
        assert num == len(real) and size == max((p.size for p in real), default=0)


@pytest.mark.parametrize("dispatch", [{}, {"policy": "drop"}, {"policy": "drop", "capacity_factor": 2.0}])
def test_generated_sizes_are_those_that_are_asked_for(dispatch: dict[str, Any]) -> None:
    recipe, spec = small_recipe(dispatch=dispatch), small_spec()
    ctx = _context(recipe, spec)
    asked = warm.expert_sizes(ctx, num_tokens=recipe.train.micro_batch * recipe.train.seq_len)
    assert num_expert_sizes(local_of(recipe, spec)) == len(asked)


def _context(recipe: Recipe, spec: ModelSpec) -> Any:
    """Just what `expert_sizes` reads."""
    parts = assembled(recipe, spec)
    moe = parts.model.layers["0"].moe  # type: ignore[union-attr]
    assert moe is not None

    class Context:
        dispatch = moe.routed.dispatcher.spec
        dtype = parts.model.dtype
        groups = parts.groups

    Context.spec = spec  # type: ignore[attr-defined]
    return Context


def test_only_bf16_generates_code() -> None:
    spec = small_spec()
    wide = small_recipe(dtype="float32")
    assert generated_code(wide, local_of(wide, spec)).num_bytes() == 0
    narrow = small_recipe()
    code = generated_code(narrow, local_of(narrow, spec))
    assert code.num_bytes(sampled=True) > code.num_bytes() > 0
    noted = generated_code(narrow, dataclasses.replace(local_of(narrow, spec), widens=True))
    assert noted.products == code.products and noted.lengths == 0 < code.lengths
    assert 0 < noted.num_bytes() < code.num_bytes() / 10
    huge = dataclasses.replace(code, products=10**6)
    assert huge.num_bytes() < 2 * facts.MAX_PRODUCTS * (facts.PRODUCT_BYTES + facts.PRODUCT_CODE_BYTES)


# ---- state

STATES = [
    (1, Folding(world=4, ep=4), {}),
    (0, Folding(world=4, ep=4), {}),
    (1, Folding(world=4, ep=2), {"global_batch": 32}),
    (1, Folding(world=4, ep=1), {"dtype": "float32", "global_batch": 16}),
    (1, Folding(world=4, ep=2, etp=2), {"dtype": "float64", "global_batch": 16}),
    (0, Folding(world=4, ep=2), {"global_batch": 16}),
    (1, Folding(world=4, ep=2), {"global_batch": 16, "mode": "exact"}),
]


def _state_bytes(rank: int, cache: GroupCache, zero: int, folding: Folding, train: dict[str, Any]) -> dict[str, int]:
    parts = assembled(_state_recipe(zero, folding, train), small_spec(), folding, rank=rank, cache=cache)
    families = parts.state.families.values()
    flats = [f.flat for f in parts.buffers._parts.values() if hasattr(f, "flat")]
    primary = {b.tensor.data_ptr(): b.tensor.nbytes for b in parts.state.boxes() if b.primary}
    return {
        "parameters": sum(f.flat.nbytes for f in families),
        "optimizer state": sum(t.nbytes for f in families for t in (f.master, f.exp_avg, f.exp_avg_sq)),
        "gradients": sum(t.nbytes for t in flats),
        "checkpoint copy": sum(primary.values()),
    }


def _state_recipe(zero: int, folding: Folding, train: dict[str, Any]) -> Recipe:
    return small_recipe(zero=zero, **{"global_batch": 4 * folding.dp, **train})


@pytest.mark.ranks
@pytest.mark.parametrize(("zero", "folding", "train"), STATES)
def test_state_is_what_the_buffers_hold(zero: int, folding: Folding, train: dict[str, Any]) -> None:
    recipe = _state_recipe(zero, folding, train)
    for rank, real in enumerate(run_ranks(4, _state_bytes, zero, folding, train)):
        moments = estimate_memory(recipe, small_spec(), folding, rank=rank, balance=EVEN).moments
        terms = next(m.terms for m in moments if m.name == "validation")
        padding = real.pop("checkpoint copy") - terms["checkpoint copy"]
        assert {k: terms[k] for k in real} == real
        assert -3 * 8 * 64 * 3 <= padding <= 0  # shards are padded, boxes are not


def test_pipeline_stages_hold_their_own_layers() -> None:
    """Before training runs with them: degrees of the attention grid split what `plan.layout` says."""
    spec, recipe = small_spec(num_layers=4), small_recipe(global_batch=16)
    folding = Folding(world=4, pp=2, tp=2, ep=2)
    whole = estimate_memory(recipe, spec, make_folding(world=1), balance=EVEN)
    parts = [estimate_memory(recipe, spec, folding, rank=r, balance=EVEN) for r in (0, 2)]
    held = [sum(p.moments[-1].terms[k] for k in ("parameters", "optimizer state")) for p in (whole, *parts)]
    assert held[1] < held[0] / 2 and held[2] < held[0] / 2
    names = [{m.name for m in p.moments} for p in parts]
    assert not any("head" in n for n in names[0]) and any("head" in n for n in names[1])
    assert any("embedding" in n for n in names[0]) and not any("embedding" in n for n in names[1])


# ---- what layers keep

KEPT = {
    "plain": (small_spec(), {}),
    "fp32": (small_spec(), {"dtype": "float32"}),
    "head norms": (small_spec(qk_norm="head"), {}),
    "wide norms": (small_spec(qk_norm="hidden"), {}),
    "late softmax": (changed(small_spec(), softmax_order="after_topk"), {}),
    "sigmoid, late softmax": (changed(small_spec(), score="sigmoid", softmax_order="after_topk"), {}),
    "sigmoid, z-loss": (changed(small_spec(), score="sigmoid", z_loss=0.01), {}),
    "no balance loss, top-1": (changed(small_spec(top_k=1), aux_loss=0.0), {}),
    "dense first, shared": (small_spec(dense_layers=1, dense_ffn=160, shared_ffn=80), {}),
    "shared with a gate": (small_spec(shared_ffn=80, shared_gate=True), {}),
    "drop": (small_spec(), {"dispatch": {"policy": "drop"}}),
    "padded": (small_spec(), {"dispatch": {"policy": "drop", "pad_to_capacity": True}}),
    "tied": (small_spec(tied_embeddings=True), {}),
}


def _saved_bytes(recipe: Recipe, spec: ModelSpec) -> int:
    """Bytes of all tensors that autograd keeps after a forward pass, weights and tokens left out, each memory counted once."""
    parts, (batch,) = assembled(recipe, spec), batches(recipe, spec)
    known = {p.untyped_storage().data_ptr() for p in parts.model.parameters()}
    known |= {t.untyped_storage().data_ptr() for t in (batch.tokens_BS, batch.labels_BS)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that the address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = parts.model(batch, ForwardInfo())
    assert output.hidden_TH.requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in known)


@pytest.mark.parametrize("name", KEPT)
def test_layers_keep_what_autograd_saves(name: str) -> None:
    spec, changes = KEPT[name]
    recipe = small_recipe(**changes)
    x = local_of(recipe, spec)
    if x.dispatch.policy == "drop" and not x.dispatch.is_static:  # rows are what routing leaves: at most the capacity
        x = dataclasses.replace(x, rows_share=1.0)
    expected = sum(sum(act.kept_layer(x, i)) for i in range(spec.num_layers)) + sum(act.kept_norm(x))
    saved = _saved_bytes(recipe, spec)
    slack = 0.08 if "drop" in name or x.item == 2 else 0.02  # padding of pieces depends on the routing
    assert saved == pytest.approx(expected, rel=slack)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recompute_keeps_less(recompute: str) -> None:
    """Tensors alive after a forward pass, whoever holds them."""
    recipe, spec = small_recipe(recompute=recompute, seq_len=128), small_spec(qk_norm="head")
    parts, (batch,) = assembled(recipe, spec), batches(recipe, spec)
    parts.model(batch, ForwardInfo())  # what is made once
    with Watch() as watch:
        output = parts.model(batch, ForwardInfo())
    x = local_of(recipe, spec)
    ends = act.kept_table(x) + act.kept_norm(x) + [x.stream()]  # and what it puts out
    expected = sum(ends) + sum(sum(act.kept_layer(x, i)) for i in range(spec.num_layers))
    assert output.hidden_TH.requires_grad
    assert watch.left == pytest.approx(expected, rel=0.1)


# ---- the peak of a step

PEAKS = {
    "head": (small_spec(vocab=4096), {"seq_len": 128}),
    "head in groups": (
        small_spec(vocab=65536, num_layers=1, hidden=32, head_dim=8),
        {"seq_len": 256, "micro_batch": 4},
    ),
    "experts": (small_spec(vocab=64, hidden=128, expert_ffn=256), {"seq_len": 128}),
    "experts, fp32": (small_spec(vocab=64, hidden=128, expert_ffn=256), {"seq_len": 128, "dtype": "float32"}),
    "recompute full": (small_spec(vocab=64, num_layers=6, hidden=128), {"seq_len": 256, "recompute": "full"}),
    "recompute selective": (small_spec(vocab=64, num_layers=6), {"seq_len": 256, "recompute": "selective"}),
    "weights": (small_spec(vocab=64, num_layers=2, hidden=256, expert_ffn=512), {"seq_len": 32}),
    "two micro-batches": (small_spec(vocab=1024), {"seq_len": 128, "global_batch": 8}),
    "exact": (small_spec(vocab=64, num_layers=2, hidden=256, expert_ffn=512), {"seq_len": 32, "mode": "exact"}),
    "exact, two micro-batches": (small_spec(vocab=1024), {"seq_len": 128, "global_batch": 8, "mode": "exact"}),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_step(name: str) -> None:
    """All tensors of a real step, their largest sum: within 10 % of the largest moment."""
    spec, train = PEAKS[name]
    if train.get("mode") == "exact" and compiled_rows() is None:  # type: ignore[attr-defined]
        pytest.skip("without a C++ compiler fixed-point sums take several tensors of the size of a gradient")
    recipe = small_recipe(**{"global_batch": 4, **train})
    parts = assembled(recipe, spec)
    data = batches(recipe, spec, count=recipe.train.global_batch // recipe.train.micro_batch)
    train_step(parts, data, step=0, lr=1e-3)
    with Watch() as watch:
        train_step(parts, data, step=1, lr=1e-3)
    estimate = estimate_memory(recipe, spec, make_folding(world=1), balance=EVEN, processor=this_processor())
    steps = [m.terms for m in estimate.moments if m.name.startswith("first steps")]
    state = next(m.terms["gradients"] for m in estimate.moments if m.name == "validation")
    peak = max(t["activations"] + t["working memory"] + t["gradients"] - state for t in steps)
    assert watch.peak == pytest.approx(peak, rel=0.1)


def test_a_processor_without_bf16_sums_up_in_a_room_of_fp32() -> None:
    """Of the size of the largest result: a chunk of logits. It generates nothing; other types are not touched."""
    spec, plain = PEAKS["head"][0], Processor(flags=frozenset({"avx512f"}))

    def heads(recipe: Recipe, **given: Any) -> int:
        moments = estimate_memory(recipe, spec, make_folding(world=1), balance=EVEN, **given).moments
        return max(m.terms["working memory"] for m in moments if m.name.endswith("the head"))

    recipe = small_recipe(seq_len=128)
    logits, total = 512 * spec.vocab, spec.vocab * spec.hidden * 2
    assert heads(recipe, processor=plain) >= heads(recipe) + 4 * logits - total - (1 << 20) * 2
    wide = small_recipe(seq_len=128, dtype="float32")
    assert heads(wide, processor=plain) == heads(wide)
    assert heads(recipe, processor=Processor(flags=frozenset({"avx2"}))) == heads(
        recipe
    )  # torch multiplies by itself there


# ---- the whole


def test_terms_add_up_and_the_peak_is_the_largest() -> None:
    estimate = estimate_memory(small_recipe(), small_spec(), make_folding(world=1))
    for moment in estimate.moments:
        assert set(moment.terms) == set(TERMS)
        assert moment.total == sum(moment.terms.values()) and min(moment.terms.values()) >= 0
    assert estimate.peak_bytes == max(m.total for m in estimate.moments)


def test_more_of_anything_takes_more() -> None:
    """A larger batch, sequence, vocabulary, model or imbalance never takes less; ZeRO-1 never more, nor recomputing, but for what it imports."""

    def peak(spec: ModelSpec, world: int = 4, balance: Balance | None = EVEN, **changes: Any) -> int:
        recipe = small_recipe(**{"global_batch": 32, "seq_len": 1024, **changes})
        return estimate_memory(recipe, spec, Folding(world=world, ep=4), balance=balance).peak_bytes

    base = small_spec(hidden=256, expert_ffn=512, vocab=4096)
    start = peak(base)
    assert peak(base, seq_len=2048) > start
    for bigger in ({"hidden": 512}, {"vocab": 32768}, {"num_layers": 6}, {"expert_ffn": 1024}):
        assert peak(dataclasses.replace(base, **bigger)) > start
    assert peak(base, balance=Balance(first=2.0, later=2.0, source="")) > start
    assert peak(base, zero=0) > start > peak(base, recompute="full") - facts.RECOMPUTE_BYTES


def test_balance_is_bounded_by_what_routing_can_do() -> None:
    spec, folding = small_spec(), Folding(world=4, ep=4)
    assert most_uneven(spec, folding) == 4.0
    assert most_uneven(small_spec(top_k=4), folding) == 2.0  # two slots a rank: half of a token's experts at most
    balance = expected_balance(small_recipe(), spec, folding)
    assert 1.0 < balance.later < balance.first <= 4.0
    assert expected_balance(small_recipe(), spec, make_folding(world=1)).first == 1.0
    even = expected_balance(small_recipe(), changed(spec, force="balanced"), folding)
    uneven = expected_balance(small_recipe(), changed(spec, force="imbalanced", force_skew=2.0), folding)
    assert even.first == 1.0 < uneven.first <= 4.0


def test_pages_of_text_come_with_the_windows_that_are_read() -> None:
    """Few windows: a page or two each. Many: the whole file and not more."""

    def mapped(text_bytes: int, **train: Any) -> int:
        estimate = estimate_memory(small_recipe(**train), small_spec(), make_folding(world=1), text_bytes=text_bytes)
        return estimate.peak.terms["mapped text"]

    few = {"steps": 2, "eval_interval": 0}
    windows = (2 + facts.PREFETCH_STEPS + 2) * 4
    assert mapped(1 << 40, **few) == pytest.approx(windows * facts.FAULT_BYTES, rel=0.01)
    assert mapped(1 << 40, steps=2, eval_interval=1, eval_batches=6) == pytest.approx(
        2 * mapped(1 << 40, **few), rel=0.01
    )
    assert mapped(1 << 20, steps=10_000) == pytest.approx(1 << 20, rel=0.01)
    assert mapped(0, **few) == 0


def test_library_pages_follow_what_a_run_calls() -> None:
    def libraries(recipe: Recipe) -> int:
        return estimate_memory(recipe, small_spec(), make_folding(world=1)).peak.terms["libraries"]

    narrow, wide = small_recipe(), small_recipe(dtype="float32")
    room = small_spec().hidden * small_spec().vocab * 4  # for the head's operand, rearranged
    assert libraries(narrow) - libraries(wide) == facts.GENERATOR_BYTES - room
    plain = dataclasses.replace(wide, kernels=dataclasses.replace(wide.kernels, implementation="reference"))
    assert libraries(wide) - libraries(plain) == facts.SCRIPT_BYTES


def test_a_gpu_is_charged_with_tensors_alone() -> None:
    host = small_recipe(steps=1000, global_batch=16)
    device = dataclasses.replace(host, launch=dataclasses.replace(host.launch, device="cuda"))
    left_out = {"communication", "heap holes", "checkpoint copy", "mapped text", "generated code", "libraries"}
    spec, folding = small_spec(), Folding(world=4, ep=4)
    there, here = (estimate_memory(recipe, spec, folding, text_bytes=1 << 20) for recipe in (device, host))
    for moment, same in zip(there.moments, here.moments, strict=True):
        assert not any(moment.terms[term] for term in left_out)
        assert 0.8 * same.terms["activations"] <= moment.terms["activations"] <= same.terms["activations"]
    assert all(any(m.terms[term] for m in here.moments) for term in left_out)


def test_fused_kernels_have_buffers_for_every_token_of_every_source() -> None:
    plain, fused = (
        dataclasses.replace(
            small_recipe(),
            launch=dataclasses.replace(small_recipe().launch, device="cuda"),
            dispatch=dataclasses.replace(small_recipe().dispatch, overlap=overlap),
        )
        for overlap in ("serial", "fused")
    )
    spec, folding = small_spec(), Folding(world=4, ep=4)
    before, there = (estimate_memory(recipe, spec, folding).moments for recipe in (plain, fused))
    tokens = fused.train.micro_batch * fused.train.seq_len
    arena = ArenaSpec(ranks=4, capacity=tokens, columns=spec.hidden, dtype=torch.bfloat16, parts=4, blocks=4)
    places = 2 * arena.ranks * tokens * spec.hidden * 2
    more = [after.total - moment.total for moment, after in zip(before, there, strict=True)]
    assert more == [moment.terms["fused buffers"] for moment in there] and set(more) == {0, places}
    assert more[-1] == places  # from the first step on
    assert places <= arena.num_bytes < places + 16384  # flags besides
    alone = estimate_memory(fused, spec, Folding(world=4))
    assert not any(moment.terms["fused buffers"] for moment in alone.moments)


def test_a_copy_of_gloo_stays_from_the_first_step_on() -> None:
    """Of the largest parameters that ranks publish to each other, in the compute type."""
    for item, dtype in ((2, "bfloat16"), (4, "float32")):
        recipe = small_recipe(dtype=dtype, global_batch=16)
        moments = estimate_memory(recipe, small_spec(), Folding(world=4, ep=4)).moments
        largest = next(m.terms["communication"] for m in moments if m.name == "validation")
        assert largest == item * (2 * 512 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32))  # both ends, attention
        assert not any(m.terms["communication"] for m in moments[:2])
        assert all(m.terms["communication"] >= largest for m in moments[2:])
    alone = estimate_memory(small_recipe(), small_spec(), make_folding(world=1)).moments
    assert not any(m.terms["communication"] for m in alone)


@pytest.mark.parametrize(
    ("ep", "experts", "top_k"), [(1, 8, 2), (2, 8, 1), (4, 8, 2), (8, 8, 2), (8, 64, 8), (4, 4, 4)]
)
def test_searches_and_dry_runs_assume_the_same_of_a_fresh_router(ep: int, experts: int, top_k: int) -> None:
    spec = small_spec(num_experts=experts, top_k=top_k)
    balance = expected_balance(small_recipe(), spec, Folding(world=ep, ep=ep))
    found = fresh_load(ep=ep, experts=experts, top_k=top_k)
    assert found == pytest.approx(balance.alone_first or balance.first)
    assert RouterModel(kind="learned").hottest(ep=ep, experts=experts, rows=1e6, top_k=top_k, worst=True) >= found


def test_a_layer_alone_is_less_even_than_all_together() -> None:
    """With full recomputation one layer's rows are alive at a time."""
    spec, folding = small_spec(num_layers=12, top_k=1), Folding(world=4, ep=4)
    balance = expected_balance(small_recipe(), spec, folding)
    assert balance.alone_first is not None and balance.first < balance.alone_first <= 4.0
    even = dataclasses.replace(balance, alone_first=None, alone_later=None)
    full, none = (small_recipe(recompute=kind, global_batch=16) for kind in ("full", "none"))

    def peak(recipe: Recipe, balance: Balance) -> int:
        moments = estimate_memory(recipe, spec, folding, balance=balance).moments
        return max(m.total for m in moments if "backward" in m.name)

    assert peak(full, balance) > peak(full, even) and peak(none, balance) == peak(none, even)


def test_imbalance_falls_with_the_layers_and_rises_with_the_ranks() -> None:
    def first(ep: int, **model: Any) -> float:
        return expected_balance(small_recipe(), small_spec(**model), Folding(world=8, ep=ep)).first

    assert 1.0 < first(2) < first(4) < first(8)
    assert first(4, num_layers=12) - 1.0 == pytest.approx((first(4) - 1.0) / 2)  # a quarter of the variance
    assert first(8, top_k=4) < first(8)
