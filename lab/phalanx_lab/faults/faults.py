"""Planted faults, as arguments: altered rule tables, collectives, groups, parts of a step. The product code is not touched.

Each is what a framework did wrong, or could. `phalanx verify --plant NAME` must find it, and tells which ones a comparison of losses would
have let through: most do not move the loss of the step (reference/folding.md, section 4.2). `needs` says in which cases the
fault exists at all: dividing by edp changes nothing where edp is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="experts-divided-by-edp",
        summary="expert gradients averaged over edp instead of summed (DeepSpeed #5618, pytorch #160285)",
        needs=over("edp"),
        comms=ExpertsDivided,
    ),
    Fault(
        name="no-edp-reduction",
        summary="expert gradients not summed over edp",
        needs=over("edp"),
        rules=_rules("expert", sum_over=()),
    ),
    Fault(
        name="experts-over-dp-cp",
        summary="experts reduced over the dense parameters' group (Megatron-LM #5916)",
        needs=experts_replicated_less,
        rules=_rules("expert", sum_over=("dp_cp",)),
    ),
    Fault(
        name="replicas-averaged",
        summary="gradients of an expert averaged over its holders instead of summed",
        needs=replicated,
        alter=sums_by(AveragedOverHolders),
    ),
    Fault(
        name="holder-left-out",
        summary="one holder's share of the gradients of its experts is in no sum",
        needs=replicated,
        alter=sums_by(LastHolderLeftOut),
    ),
    Fault(
        name="replicas-rounded-by-rank",
        summary="each rank splits its own tokens over the replicas of an expert and rounds by itself",
        needs=all_of(replicated, dropless_serial),
        alter=rounded_by_source,
    ),
    Fault(
        name="replicated-not-reduced",
        summary="norms and router not summed over dp",
        needs=over("dp"),
        rules=_rules("dense_replicated", sum_over=("tp",)),
    ),
    Fault(
        name="aux-counts-not-reduced",
        summary="balancing loss over the global batch sees the own rank's counts only",
        needs=all_of(global_aux, over("dp")),
        comms=LocalBalance,
    ),
    Fault(
        name="router-losses-per-rank",
        summary="router losses divided by the own micro-batches, not by those of the step",
        needs=all_of(router_loss, over("dp")),
        alter=router_losses_per_rank,
    ),
    Fault(
        name="norm-skips-experts",
        summary="gradient norm without the experts of some ranks (Megatron-LM #5916)",
        needs=over("ep"),
        alter=norm_skips_experts("ep"),
    ),
    Fault(
        name="norm-skips-experts-of-tp",
        summary="gradient norm without the experts of ranks beyond the first of tp (Megatron-LM #5916)",
        needs=over("tp"),
        alter=norm_skips_experts("tp"),
    ),
    Fault(
        name="router-not-summed-over-tp",
        summary="router gradients of the first tp rank's rows only (torchtitan #1878)",
        needs=over("tp"),
        alter=only_on_first_of_tp("router.weight"),
    ),
    Fault(
        name="norms-not-summed-over-tp",
        summary="norm gradients of the first tp rank's rows only: the sum that sequence parallelism needs is missing",
        needs=over("tp"),
        alter=only_on_first_of_tp("norm.weight"),
    ),
    Fault(
        name="aux-not-scaled-by-cp",
        summary="router losses divided by cp once too often",
        needs=all_of(router_loss, over("cp")),
        alter=router_losses_over_cp,
    ),
    Fault(
        name="aux-counts-of-own-part",
        summary="balancing loss of a micro-batch sees the rank's part of it only, not all of tp x cp",
        needs=all_of(local_aux, shared_microbatch),
        comms=LocalBalance,
    ),
    Fault(
        name="contiguous-positions",
        summary="zigzag tokens turned by the positions of a contiguous part",
        needs=over("cp"),
        cut=contiguous_positions,
    ),
    Fault(
        name="further-tokens-of-part",
        summary="multi-token prediction takes the tokens ahead from the rank's part of the sequence",
        needs=all_of(predicts_further, over("cp")),
        cut=ahead_inside_part,
    ),
    Fault(
        name="norm-counts-replicas",
        summary="gradient norm counts every holder of an element",
        needs=all_of(zero(0), over("dp")),
        rules=_NORM_COUNTS_REPLICAS,
    ),
    Fault(
        name="clip-before-reduction",
        summary="each rank clips its own gradients before they are summed",
        needs=over("dp"),
        comms=ClippedBeforeReduction,
    ),
    Fault(
        name="valid-tokens-per-rank",
        summary="loss divided by the rank's own labels: a mean of means",
        needs=over("dp"),
        comms=LocalValidTokens,
    ),
    Fault(
        name="accumulation-counted-twice",
        summary="the first micro-batch is added twice",
        needs=accumulates,
        alter=first_microbatch_twice,
    ),
    Fault(
        name="old-weights-forward",
        summary="a stage runs a micro-batch forward with the weights of the step before: pipeline weight version off by one",
        # where a layer runs again, it does so with other weights than before, and routes otherwise
        needs=all_of(over("pp"), recomputes_nothing),
        alter=version(OldForward),
    ),
    Fault(
        name="new-weights-backward",
        summary="a stage runs a micro-batch backward with the weights of the next step: pipeline weight version off by one",
        needs=all_of(over("pp"), recomputes_nothing),
        alter=version(NewBackward),
    ),
    Fault(
        name="swapped-ep-etp",
        summary="groups with ep fastest, weights with etp fastest",
        needs=all_of(
            over("ep", "etp"), static_rows
        ),  # where sizes depend on the routing, the ranks would disagree and end
        groups=swapped_groups,
    ),
    Fault(
        name="combine-splits",
        summary="rows go back with the split sizes of the next rank",
        needs=all_of(over("ep"), all_to_all, uneven_rows),
        comms=WrongCombineSplits,
    ),
    Fault(
        name="dropped-row",
        summary="one token's row is lost on its way to the experts",
        needs=all_of(over("ep"), all_to_all),
        comms=RowLost,
    ),
    Fault(
        name="router-detached",
        summary="the gradient of routing weights is cut by the exchange (Automodel #2995)",
        needs=all_of(over("ep"), all_to_all),
        comms=RouterDetached,
    ),
    Fault(
        name="etp-not-summed",
        summary="partial outputs of etp slices not added up",
        needs=all_of(over("etp"), all_to_all),
        comms=SlicesNotSummed,
    ),
    Fault(
        name="tile-before-rows",
        summary="overlap: tiles of a part are computed before its rows are there",
        needs=tiles,
        comms=TileBeforeRows,
    ),
    Fault(
        name="columns-exchanged",
        summary="overlap: one block of columns goes back in the place of another",
        needs=tiles,
        comms=ColumnsExchanged,
    ),
    Fault(
        name="sums-misplaced",
        summary="overlap: partial sums are added to the token behind the one that they belong to",
        needs=tiles,
        comms=SumsMisplaced,
    ),
    Fault(
        name="part-overwritten",
        summary="overlap: the gradient of weights misses rows of a part, overwritten before it is taken",
        needs=tiles,
        comms=PartOverwritten,
    ),
    Fault(
        name="router-of-part-lost",
        summary="overlap: gradients of routing weights of a part are lost",
        needs=tiles,
        comms=RouterOfPartLost,
    ),
    Fault(
        name="rows-of-pass-before",
        summary="overlap: a receive buffer is read with the rows of the pass before",
        needs=tiles,
        comms=RowsOfPassBefore,
    ),
    Fault(
        name="own-rows-twice",
        summary="overlap: a rank's own rows are counted twice",
        needs=all_of(over("ep"), tiles, dropless),
        alter=own_rows_twice,
    ),
    Fault(
        name="chunk-router-detached",
        summary="overlap: the gradient of routing weights of one chunk is cut",
        needs=all_of(chunks, uneven_rows),
        comms=ChunkRouterDetached,
    ),
    Fault(
        name="stale-bias",
        summary="the expert bias that routers read is never updated",
        needs=bias,
        alter=stale_bias,
    ),
    Fault(
        name="bias-from-own-counts",
        summary="the expert bias follows the own rank's counts, so that replicas of the router drift apart",
        needs=all_of(bias, over("dp")),
        comms=LocalBiasCounts,
    ),
    Fault(
        name="shards-not-published",
        summary="ranks compute on with old parameters of other ranks' shards",
        needs=all_of(zero(1), over("dp")),
        comms=NothingPublished,
    ),
    Fault(
        name="copy-without-gradient",
        summary="holders of another rank's shard update their copies without its gradient",
        needs=all_of(has_copies, over("dp")),
        comms=CopyWithoutGradient,
    ),
    Fault(
        name="decay-on-norms",
        summary="weight decay applied to norms and biases",
        alter=decay_everywhere,
    ),
)


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
