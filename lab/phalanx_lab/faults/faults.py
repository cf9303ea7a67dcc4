"""Planted faults, as arguments: altered rule tables, collectives, groups, parts of a step. The product code is not touched.

Each is what a framework did wrong, or could. `phalanx verify --plant NAME` must find it, and tells which ones a comparison of losses would
have let through: most do not move the loss of the step (reference/folding.md, section 4.2). `needs` says in which cases the
fault exists at all: dividing by edp changes nothing where edp is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.core.errors import ConfigError, nearest
from phalanx.plan.mapping.folding import GRADIENT_RULES, GradientRule
from phalanx.verify.planted import Fault
from phalanx.verify.setups import Case
from phalanx_lab.faults.cases import (
    accumulates,
    all_of,
    all_to_all,
    bias,
    chunks,
    dropless,
    dropless_serial,
    experts_replicated_less,
    global_aux,
    has_copies,
    local_aux,
    over,
    predicts_further,
    recomputes_nothing,
    replicated,
    router_loss,
    shared_microbatch,
    static_rows,
    tiles,
    uneven_rows,
    zero,
)
from phalanx_lab.faults.collectives import (
    ClippedBeforeReduction,
    CopyWithoutGradient,
    ExpertsDivided,
    LocalBalance,
    LocalBiasCounts,
    LocalValidTokens,
    NothingPublished,
    RouterDetached,
    RowLost,
    SlicesNotSummed,
    WrongCombineSplits,
)
from phalanx_lab.faults.overlap import (
    ChunkRouterDetached,
    ColumnsExchanged,
    PartOverwritten,
    RouterOfPartLost,
    RowsOfPassBefore,
    SumsMisplaced,
    TileBeforeRows,
    own_rows_twice,
)
from phalanx_lab.faults.step import (
    AveragedOverHolders,
    LastHolderLeftOut,
    NewBackward,
    OldForward,
    ahead_inside_part,
    contiguous_positions,
    decay_everywhere,
    first_microbatch_twice,
    norm_skips_experts,
    only_on_first_of_tp,
    rounded_by_source,
    router_losses_over_cp,
    router_losses_per_rank,
    stale_bias,
    sums_by,
    swapped_groups,
    version,
)

Rules = Mapping[str, GradientRule]


PER_FAULT = 2
"""Cases that each fault is planted in, of those in which it exists."""

# ---- rule tables ---------------------------------------------------------------------------------------------------------------


def _rules(family: str, **changes: Any) -> Rules:
    return {**GRADIENT_RULES, family: dataclasses.replace(GRADIENT_RULES[family], **changes)}


_NORM_COUNTS_REPLICAS = {family: dataclasses.replace(rule, replicas=()) for family, rule in GRADIENT_RULES.items()}


def _fault(name: str, summary: str, needs: Callable[[Case], bool] = lambda case: True, **planted: Any) -> Fault:
    return Fault(name=name, summary=summary, needs=needs, **planted)


FAULTS: tuple[Fault, ...] = (
    _fault("experts-divided-by-edp", "expert gradients averaged over edp instead of summed (DeepSpeed #5618, pytorch #160285)",
           over("edp"), comms=ExpertsDivided),
    _fault("no-edp-reduction", "expert gradients not summed over edp", over("edp"), rules=_rules("expert", sum_over=())),
    _fault("experts-over-dp-cp", "experts reduced over the dense parameters' group (Megatron-LM #5916)", experts_replicated_less,
           rules=_rules("expert", sum_over=("dp_cp",))),
    _fault("replicas-averaged", "gradients of an expert averaged over its holders instead of summed", replicated,
           alter=sums_by(AveragedOverHolders)),
    _fault("holder-left-out", "one holder's share of the gradients of its experts is in no sum", replicated,
           alter=sums_by(LastHolderLeftOut)),
    _fault("replicas-rounded-by-rank", "each rank splits its own tokens over the replicas of an expert and rounds by itself",
           all_of(replicated, dropless_serial), alter=rounded_by_source),
    _fault("replicated-not-reduced", "norms and router not summed over dp", over("dp"),
           rules=_rules("dense_replicated", sum_over=("tp",))),
    _fault("aux-counts-not-reduced", "balancing loss over the global batch sees the own rank's counts only",
           all_of(global_aux, over("dp")), comms=LocalBalance),
    _fault("router-losses-per-rank", "router losses divided by the own micro-batches, not by those of the step",
           all_of(router_loss, over("dp")), alter=router_losses_per_rank),
    _fault("norm-skips-experts", "gradient norm without the experts of some ranks (Megatron-LM #5916)", over("ep"),
           alter=norm_skips_experts("ep")),
    _fault("norm-skips-experts-of-tp", "gradient norm without the experts of ranks beyond the first of tp (Megatron-LM #5916)",
           over("tp"), alter=norm_skips_experts("tp")),
    _fault("router-not-summed-over-tp", "router gradients of the first tp rank's rows only (torchtitan #1878)", over("tp"),
           alter=only_on_first_of_tp("router.weight")),
    _fault("norms-not-summed-over-tp",
           "norm gradients of the first tp rank's rows only: the sum that sequence parallelism needs is missing", over("tp"),
           alter=only_on_first_of_tp("norm.weight")),
    _fault("aux-not-scaled-by-cp", "router losses divided by cp once too often", all_of(router_loss, over("cp")),
           alter=router_losses_over_cp),
    _fault("aux-counts-of-own-part", "balancing loss of a micro-batch sees the rank's part of it only, not all of tp x cp",
           all_of(local_aux, shared_microbatch), comms=LocalBalance),
    _fault("contiguous-positions", "zigzag tokens turned by the positions of a contiguous part", over("cp"),
           cut=contiguous_positions),
    _fault("further-tokens-of-part", "multi-token prediction takes the tokens ahead from the rank's part of the sequence",
           all_of(predicts_further, over("cp")), cut=ahead_inside_part),
    _fault("norm-counts-replicas", "gradient norm counts every holder of an element", all_of(zero(0), over("dp")),
           rules=_NORM_COUNTS_REPLICAS),
    _fault("clip-before-reduction", "each rank clips its own gradients before they are summed", over("dp"),
           comms=ClippedBeforeReduction),
    _fault("valid-tokens-per-rank", "loss divided by the rank's own labels: a mean of means", over("dp"), comms=LocalValidTokens),
    _fault("accumulation-counted-twice", "the first micro-batch is added twice", accumulates, alter=first_microbatch_twice),
    # where a layer runs again, it does so with other weights than before, and routes otherwise
    _fault("old-weights-forward",
           "a stage runs a micro-batch forward with the weights of the step before: pipeline weight version off by one",
           all_of(over("pp"), recomputes_nothing), alter=version(OldForward)),
    _fault("new-weights-backward",
           "a stage runs a micro-batch backward with the weights of the next step: pipeline weight version off by one",
           all_of(over("pp"), recomputes_nothing), alter=version(NewBackward)),
    # where sizes depend on the routing, the ranks would disagree and end
    _fault("swapped-ep-etp", "groups with ep fastest, weights with etp fastest", all_of(over("ep", "etp"), static_rows),
           groups=swapped_groups),
    _fault("combine-splits", "rows go back with the split sizes of the next rank", all_of(over("ep"), all_to_all, uneven_rows),
           comms=WrongCombineSplits),
    _fault("dropped-row", "one token's row is lost on its way to the experts", all_of(over("ep"), all_to_all), comms=RowLost),
    _fault("router-detached", "the gradient of routing weights is cut by the exchange (Automodel #2995)",
           all_of(over("ep"), all_to_all), comms=RouterDetached),
    _fault("etp-not-summed", "partial outputs of etp slices not added up", all_of(over("etp"), all_to_all), comms=SlicesNotSummed),
    _fault("tile-before-rows", "overlap: tiles of a part are computed before its rows are there", tiles, comms=TileBeforeRows),
    _fault("columns-exchanged", "overlap: one block of columns goes back in the place of another", tiles, comms=ColumnsExchanged),
    _fault("sums-misplaced", "overlap: partial sums are added to the token behind the one that they belong to", tiles,
           comms=SumsMisplaced),
    _fault("part-overwritten", "overlap: the gradient of weights misses rows of a part, overwritten before it is taken", tiles,
           comms=PartOverwritten),
    _fault("router-of-part-lost", "overlap: gradients of routing weights of a part are lost", tiles, comms=RouterOfPartLost),
    _fault("rows-of-pass-before", "overlap: a receive buffer is read with the rows of the pass before", tiles,
           comms=RowsOfPassBefore),
    _fault("own-rows-twice", "overlap: a rank's own rows are counted twice", all_of(over("ep"), tiles, dropless),
           alter=own_rows_twice),
    _fault("chunk-router-detached", "overlap: the gradient of routing weights of one chunk is cut", all_of(chunks, uneven_rows),
           comms=ChunkRouterDetached),
    _fault("stale-bias", "the expert bias that routers read is never updated", bias, alter=stale_bias),
    _fault("bias-from-own-counts", "the expert bias follows the own rank's counts, so that replicas of the router drift apart",
           all_of(bias, over("dp")), comms=LocalBiasCounts),
    _fault("shards-not-published", "ranks compute on with old parameters of other ranks' shards", all_of(zero(1), over("dp")),
           comms=NothingPublished),
    _fault("copy-without-gradient", "holders of another rank's shard update their copies without its gradient",
           all_of(has_copies, over("dp")), comms=CopyWithoutGradient),
    _fault("decay-on-norms", "weight decay applied to norms and biases", alter=decay_everywhere),
)  # fmt: skip


def fault_named(name: str) -> Fault:
    """The fault of that name. Raises `ConfigError` naming the nearest ones."""
    found = {fault.name: fault for fault in FAULTS}
    if name not in found:
        hint = nearest(name, [*found, "all"])
        raise ConfigError.of("--plant", name, "is not a known fault", hint, subject="arguments")
    return found[name]


def cases_with(fault: Fault, cases: Sequence[Case], *, ranks: int) -> list[Case]:
    """The first cases in which the fault exists. Raises `ConfigError` where there is none."""
    found = [case for case in cases if fault.needs(case)][:PER_FAULT]
    if not found:
        rule = f"this fault ({fault.summary}) exists in no mapping of {ranks} rank{'s' if ranks > 1 else ''}"
        raise ConfigError.of("--plant", fault.name, rule, "try --ranks 4", subject="arguments")
    return found
