"""How much memory each rank of a run needs: physical terms, summed at every moment of a step that can be the largest.

    estimate_memory   recipe, model and mapping -> terms per moment; the peak is the largest sum

Nothing here is fitted to a total. What tensors hold follows from the same tables that make the tensors (`plan.layout`, `simulate/memory/activations.py`); what
no tensor holds (libraries, generated code, holes of the heap) are the constants of `simulate/memory/kernel_facts.py`, each measured by itself.

The one assumption about data is how unevenly tokens meet experts (`Balance`): a rank's experts get more than their share before the balance
loss has acted. Where the router is forced, it is computed. Counted is what comes after a process has imported torch and joined the
world, as `train.setup.machine.MemoryMeter` measures it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.core.config import Recipe
from phalanx.core.processor import MULTIPLIES_BF16, Processor
from phalanx.plan import microbatches_per_rank
from phalanx.plan.layout import FlatLayout, HolderPlan, flat_layouts, publication, stage_params, sums_whole
from phalanx.plan.mapping import AnyFolding, AnyPlacement, Stage, plain_placement
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import deepep_bytes, dispatch_spec
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.recovery import FIXED_POINT_ITEM, ITEM, moment_bytes, optimizer_bytes
from phalanx.simulate.memory import activations, device_activations
from phalanx.simulate.memory.activations import Local, batch_bytes
from phalanx.simulate.memory.balance import SETTLED_STEPS, Balance, expected_balance
from phalanx.simulate.memory.generated import Generated, generated_code
from phalanx.simulate.memory.kernel_facts import (
    ADAM_CHUNK,
    FAULT_BYTES,
    GENERATOR_BYTES,
    GRADIENT_ROOMS,
    HOLES,
    INTERPRETER_BYTES,
    LARGEST_HEAP_BLOCK,
    LIBRARY_BYTES,
    MOST_REARRANGED,
    PREFETCH_STEPS,
    RATE_SIZES,
    RECOMPUTE_BYTES,
    SCRIPT_BYTES,
)
from phalanx.simulate.memory.passes import PassMoment, RankPasses, pass_moments

TERMS: Mapping[str, str] = {
    "parameters": "in the compute type",
    "optimizer state": "masters and both moments of this rank's shards",
    "gradients": "buffers that collect them, and reduced shards",
    "activations": "kept by the layers for the backward pass",
    "working memory": "of the operation at the peak",
    "communication": "copies that gloo makes",
    "fused buffers": "where other devices write rows or tokens, for all layers",
    "checkpoint copy": "of the state while it is written",
    "batches": "loaded ahead",
    "mapped text": "pages of the token file",
    "generated code": "of products and attention, in all the shapes that occur",
    "libraries": "pages of torch, objects of Python",
    "heap holes": "between the tensors of a step",
}
"""The terms, and what is in them."""
OF_HOSTS = ("communication", "heap holes")
"""Terms of gloo and of the C library, which a GPU does not have; what its kernels keep has not been measured."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is in memory at one time, by term."""

    name: str
    terms: Mapping[str, int]
    mapped: int = 0
    """Bytes of it in blocks that are mapped by themselves and gone with the operation."""

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank over a run. `moments` are in the order in which they come."""

    rank: int
    stage: int
    """Its place in the pipeline."""
    moments: tuple[Moment, ...]
    balance: Balance

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total


def estimate_memory(
    recipe: Recipe,
    spec: ModelSpec,
    folding: AnyFolding,
    *,
    rank: int = 0,
    placement: AnyPlacement | None = None,
    threads: int = 1,
    text_bytes: int = 0,
    balance: Balance | None = None,
    processor: Processor = MULTIPLIES_BF16,
) -> MemoryEstimate:
    """Memory of `rank` under `recipe`.

    `threads` compute threads a rank; `text_bytes` is the size of the prepared token files (preparing them is not counted); `balance` replaces
    the assumption about routing; `processor` is that of the machine of the run.
    """
    run = _Run(
        recipe=recipe,
        spec=spec,
        folding=folding,
        rank=rank,
        placement=placement or plain_placement(max(1, spec.num_experts), folding.of_rank(rank)),
        threads=threads,
        text_bytes=text_bytes,
        given=balance,
        processor=processor,
    )
    stage = folding.coord(rank, "pp")
    moments = tuple(run.moments() if run.on_device else with_idle_heap(run.moments()))
    return MemoryEstimate(rank=rank, stage=stage, moments=moments, balance=run.balance)


def with_idle_heap(moments: Iterable[Moment]) -> Iterator[Moment]:
    """The heap never shrinks (`runtime/processes/allocator.py`), and a block that is mapped by itself can use none of it: at such a moment all of the heap that
    earlier moments have needed is there as well, idle."""
    high = 0
    for moment in moments:
        heap = moment.total - moment.mapped
        idle = max(0, high - heap) if moment.mapped else 0
        high = max(high, heap)
        terms = {**moment.terms, "heap holes": moment.terms["heap holes"] + idle}
        yield dataclasses.replace(moment, terms=terms)


# ---- the moments -------------------------------------------------------------------------------------------------------------------


def state_terms(
    layouts: Mapping[str, FlatLayout],
    *,
    item: int,
    borrowed: frozenset[str],
    exact: bool = False,
    moment: int | None = None,
    zero: int = 1,
    rooms: int = 0,
) -> dict[str, int]:
    """`ShardedState` and `GradientBuffers`: what a rank holds from the first step to the last. `exact`: gradients are added up in fixed point.
    `moment`: bytes of an element of a moment; None: as many as of a master. `zero`: 2 adds up gradients in shards,
    beside `rooms` buffers of each family."""
    wide = max(4, item)
    collected = {key: x for key, x in layouts.items() if key not in borrowed}
    in_shards = [x for x in collected.values() if zero == 2 and x.adds_in_shards and not exact]
    whole = sum(x.length for x in collected.values()) - sum(x.length for x in in_shards)
    shards = sum(x.kept_length for x in in_shards) + rooms * room_elements(in_shards)
    return {
        "parameters": sum(x.length for x in layouts.values()) * item,
        "optimizer state": (wide + 2 * (moment or wide)) * sum(x.kept_length for x in layouts.values()),
        "gradients": (whole + shards) * (FIXED_POINT_ITEM if exact else wide),
    }


def room_elements(layouts: Iterable[FlatLayout]) -> int:
    """Elements of one buffer of each family of those that add up in shards: of its largest."""
    families: dict[str, int] = {}
    for layout in layouts:
        families[layout.rule.family] = max(layout.length, families.get(layout.rule.family, 0))
    return sum(families.values())


@dataclass(frozen=True, kw_only=True)
class _Run:
    recipe: Recipe
    spec: ModelSpec
    folding: AnyFolding
    rank: int
    placement: AnyPlacement
    threads: int
    text_bytes: int
    given: Balance | None
    processor: Processor

    def moments(self) -> Iterator[Moment]:
        """Moments in the order in which they come."""
        yield self._moment("drawing the initial weights", self._drawing(), held={})
        x = self._local(1.0)
        rate = RATE_SIZES[-2] if x.item > 2 or x.widens else RATE_SIZES[-1]
        rated = {"working memory": 3 * rate**2 * self.item + sum(x.room(rate**2)[:1])}
        yield self._moment("measuring the machine", rated, before=True)
        b = self.balance
        uneven = b.first != b.later
        first, alone_first = (self._local(share, crowded=uneven) for share in (b.first, b.alone_first or b.first))
        later, alone_later = (self._local(share) for share in (b.later, b.alone_later or b.later))
        yield from self._step("first steps: ", first, alone_first, copy=0)
        if self.copy_bytes and self.recipe.checkpoint.interval < SETTLED_STEPS:
            later, alone_later = first, alone_first
        yield from self._step("a step while a checkpoint is written: ", later, alone_later, copy=self.copy_bytes)
        yield self._moment("validation", self._validation(alone_later), copy=self.copy_bytes)
        yield self._moment("the sample at the end", {}, copy=self.copy_bytes, sampled=True)

    # ---- what does not change

    @property
    def item(self) -> int:
        return ITEM[self.recipe.train.dtype]

    @property
    def on_device(self) -> bool:
        """Tensors live on a GPU, whose allocator counts them alone."""
        return self.recipe.launch.device == "cuda"

    @cached_property
    def pipeline(self) -> Pipeline:
        recipe = self.recipe
        return make_pipeline(recipe.pipeline, self.spec, pp=self.folding.pp, seq_len=recipe.train.seq_len)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return self.pipeline.stages.of_rank(self.folding.coord(self.rank, "pp"))

    @cached_property
    def layouts(self) -> dict[str, FlatLayout]:
        optim = self.recipe.optim
        return flat_layouts(
            stage_params(self.spec, self.stages),
            self.folding,
            self.placement,
            self.rank,
            zero=optim.zero,
            bucket_elements=math.ceil(optim.bucket_mb * 1e6 / max(4, self.item)),
            expert_state=self.recipe.resilience.expert_state,
            holders=self.recipe.resilience.shard_holders,
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of this rank's pipeline stage."""
        found = {p.param.layer for layout in self.layouts.values() for p in layout.params}
        return tuple(sorted(layer for layer in found if layer is not None))

    @cached_property
    def moe_layers(self) -> list[int]:
        """Those of them that have experts."""
        every = set(self.spec.moe_layers)
        return [layer for layer in self.layers if layer in every]

    @property
    def num_microbatches(self) -> int:
        return max(1, microbatches_per_rank(self.recipe, self.folding))

    @property
    def is_exact(self) -> bool:
        return self.recipe.resilience.mode == "exact"

    @cached_property
    def borrowed(self) -> frozenset[str]:
        """`runtime.state.gradients.borrowable`: families whose gradients stay where autograd made them."""
        if self.num_microbatches > 1 or self.is_exact:
            return frozenset()
        return frozenset(
            family
            for family, layout in self.layouts.items()
            if layout.num_shards == 1
            and layout.holders is None
            and all(len(self.folding.group_of(self.rank, name)) == 1 for name in layout.rule.sum_over)
        )

    @property
    def _experts_are_summed(self) -> bool:
        """Whether gradients of experts are added up in buffers of the shape of their weights."""
        borrowed = any(self.layouts[name].rule.family == "expert" for name in self.borrowed)
        fast = self.recipe.kernels.implementation == "fast" and self.recipe.resilience.check == "off"
        return fast and not (borrowed or self.is_exact or self._sums_of_holders)

    @property
    def _sums_of_holders(self) -> list[HolderPlan]:
        """`runtime/state/holders.py`: of every buffer what goes to others, what comes from them, and the sums are there at once."""
        return [layout.holders for layout in self.layouts.values() if layout.holders is not None]

    @cached_property
    def copy_bytes(self) -> int:
        """A copy of what this rank writes, kept from the first save on.

        `runtime/checkpoint/host_copies.py` makes it where saving goes on beside training. Members of an elastic run and has `checkpoint.asynchronous = false` write between
        steps, and there the writer of `torch.distributed.checkpoint` makes it: it clones every part of a larger tensor and lets none go before the end of the file. That is
        on a thread of its own (`run_abortable`), in whose heap it stays.
        """
        c, t = self.recipe.checkpoint, self.recipe.train
        copies = c.asynchronous or bool(self.recipe.resilience.heal)
        if not (copies and 0 < c.interval < t.steps):
            return 0
        mine = [x.written_elements for x in self.layouts.values() if self._is_primary(x)]
        return sum(mine) * optimizer_bytes(self.recipe)

    def _is_primary(self, layout: FlatLayout) -> bool:
        """`ShardedState._is_primary`."""
        rule = layout.rule
        names = [name for name in rule.replicas if layout.num_shards == 1 or name != rule.shard_over]
        return all(self.folding.group_of(self.rank, name)[0] == self.rank for name in names)

    @cached_property
    def _experts_held(self) -> int | None:
        """Different experts of the layer where this rank has most; None without replicas."""
        if self.placement.is_plain:
            return None
        at = {"edp": self.folding.coord(self.rank, "edp"), "ep": self.folding.coord(self.rank, "ep")}
        return max((len(self.placement.of_layer(i).local_experts(**at)) for i in self.moe_layers), default=0)

    @cached_property
    def balance(self) -> Balance:
        """How uneven routing is assumed to be for what this rank holds."""
        if self.given is not None:
            return self.given
        shares = None if self.placement.is_plain or not self.moe_layers else self._shares()
        stage = self.folding.of_rank(self.rank)
        return expected_balance(self.recipe, self.spec, stage, num_layers=len(self.moe_layers), shares=shares)

    def _shares(self) -> list[list[float]]:
        """Share of each expert, by layer: its slots here over all that it has in the group."""
        edp, ep = (self.folding.coord(self.rank, axis) for axis in ("edp", "ep"))
        found = []
        for layer in self.moe_layers:
            slots = [int(e) for e in self.placement.of_layer(layer).group_slots(edp)]
            width = len(slots) // self.folding.of_rank(self.rank).ep
            here = slots[ep * width : (ep + 1) * width]
            found.append([here.count(e) / max(1, slots.count(e)) for e in range(self.spec.num_experts)])
        return found

    def _local(self, rows_share: float, *, crowded: bool = False) -> Local:
        t = self.recipe.train
        return Local(
            spec=self.spec,
            folding=self.folding.of_rank(self.rank),
            dispatch=dispatch_spec(self.recipe.dispatch),
            sequences=t.micro_batch // self.folding.share_of(self.rank)[1],
            seq_len=t.seq_len,
            item=self.item,
            recompute=t.recompute,
            lanes=self.threads,
            rows_share=rows_share,
            on_device=self.on_device,
            crowded=crowded,
            cp_method=self.recipe.folding.cp_method,
            experts_held=self._experts_held,
            widens=self.item == 2 and not self.on_device and self.processor.widens_bf16,
            exact=self.is_exact,
            sums_experts=self._experts_are_summed,
        )

    @cached_property
    def generated(self) -> Generated:
        return generated_code(self.recipe, self._local(1.0))

    @cached_property
    def held(self) -> dict[str, int]:
        return state_terms(
            self.layouts,
            item=self.item,
            borrowed=self.borrowed,
            exact=self.is_exact,
            moment=moment_bytes(self.recipe),
            zero=self.recipe.optim.zero,
            rooms=0 if self.on_device else GRADIENT_ROOMS,
        )

    def _moment(
        self,
        name: str,
        terms: Mapping[str, int],
        *,
        held: Mapping[str, int] | None = None,
        copy: int = 0,
        sampled: bool = False,
        before: bool = False,
        mapped: int = 0,
    ) -> Moment:
        """`before`: the first step. `mapped`: see `Moment`."""
        x = self._local(1.0)
        always = (
            {"fused buffers": 0 if before or held is not None else self._fused_bytes}
            if self.on_device
            else {
                "checkpoint copy": copy,
                "communication": 0 if before or held is not None else self._published_bytes,
                "batches": (PREFETCH_STEPS + 2) * self.num_microbatches * batch_bytes(x),
                "mapped text": self._mapped_text(),
                "generated code": self.generated.num_bytes(sampled=sampled, lanes=self.threads),
                "libraries": self._library_bytes,
            }
        )
        total = dict.fromkeys(TERMS, 0)
        for part in (self.held if held is None else held, always, terms):
            for key, value in part.items():
                total[key] += 0 if self.on_device and key in OF_HOSTS else value
        return Moment(name=name, terms=total, mapped=0 if self.on_device else mapped)

    @property
    def _fused_bytes(self) -> int:
        """Bytes of `dispatch.overlap = "fused"`: a place for every token of every source, there and back
        (`kernels/triton/symmetric.py`); flags are less than a place. Or DeepEP's."""
        x = self._local(1.0)
        if not self.moe_layers:
            return 0
        if x.sends_tokens:
            return deepep_bytes(ranks=x.sources, hidden=self.spec.hidden)
        is_fused = self.recipe.dispatch.overlap == "fused" and x.sources > 1
        return 2 * x.sources * x.stream() if is_fused else 0

    @property
    def _published_bytes(self) -> int:
        """gloo's copy of the largest result of an all-gather. Its thread has a heap of its own, where the copy stays from the first step on (smaps: 10 MiB in
        bf16, 19 in fp32, in the default model) unless it is mapped by itself."""
        return max((n for n in self._gathered_blocks if n < LARGEST_HEAP_BLOCK), default=0)

    @property
    def _gathered_blocks(self) -> list[int]:
        """Bytes of the families that an all-gather publishes; others go by messages into their places (`plan/layout/shard_copies.py: publication`)."""
        return [
            y.length * self.item
            for y in self.layouts.values()
            if y.num_shards > 1 and publication(y.keepers, y.shard_index) is None
        ]

    @property
    def _library_bytes(self) -> int:
        fast = self.recipe.kernels.implementation == "fast"
        at_times = (
            (GENERATOR_BYTES, bool(self.generated.products)),
            (SCRIPT_BYTES, fast),
            (RECOMPUTE_BYTES, self.recipe.train.recompute != "none"),
        )
        return LIBRARY_BYTES + INTERPRETER_BYTES + sum(n for n, there in at_times if there) + self._rearranged_bytes

    @property
    def _rearranged_bytes(self) -> int:
        """Room that MKL keeps for the largest operand of its products, in each lane."""
        if self.item == 2:
            return 0
        x, s = self._local(1.0), self.spec
        widest = x.vocab if any(stage.has_head for stage in self.stages) else 2 * x.width
        return min(MOST_REARRANGED, s.hidden * widest * self.item) * self.threads

    def _mapped_text(self) -> int:
        """Pages of the token files after all windows of a run were read: windows lie anywhere, so that some meet pages that were read before."""
        t = self.recipe.train
        evaluated = t.eval_batches if t.eval_interval else 0
        batches = t.steps + PREFETCH_STEPS + 2 + evaluated
        touched = batches * t.micro_batch * self.num_microbatches * (FAULT_BYTES + 4 * t.seq_len)
        return int(self.text_bytes * -math.expm1(-touched / self.text_bytes)) if self.text_bytes else 0

    # ---- before the first step, and between steps

    def _drawing(self) -> dict[str, int]:
        """`models.layers.initialise`: whole logical tensors (one expert at a time) in fp32, drawn and scaled, beside the parameters."""
        locals_ = [p for layout in self.layouts.values() for p in layout.params]
        drawn = [
            p.param.num_elements // (p.param.shape[p.param.ep_dim] if p.param.ep_dim is not None else 1)
            for p in locals_
        ]
        return {
            "parameters": sum(p.num_elements for p in locals_) * self.item,
            "working memory": 2 * 4 * max(drawn),
        }

    def _validation(self, x: Local) -> dict[str, int]:
        """`eval_loss`: one layer's tensors, or the logits; and all batches."""
        of = device_activations if self.on_device else activations
        layer = max((sum(of.kept_layer(x, i)) + sum(of.experts_forward(x)) for i in self.layers[-1:]), default=0)
        batches = self.recipe.train.eval_batches * self.num_microbatches * batch_bytes(x)
        return {"working memory": max(layer, sum(of.head_forward(x))), "batches": batches}

    # ---- inside a step

    def _step(self, when: str, x: Local, alone: Local, *, copy: int) -> Iterator[Moment]:
        """`x` as all layers are together, `alone` as the fullest of them is."""
        for moment in self._passes(x if x.recompute != "full" else alone):
            idle = HOLES * sum(n for n in (*moment.kept, *moment.working) if n < LARGEST_HEAP_BLOCK)
            terms = {
                "activations": sum(moment.kept),
                "working memory": sum(moment.working),
                "heap holes": int(idle),
                "gradients": self._borrowed_bytes(moment.done) + self._rooms_bytes(moment.name, x),
            }
            yield self._moment(when + moment.name, terms, copy=copy)
        apart, item = sum(y.shard_length for y in self.layouts.values() if self._lies_apart(y)), x.wide
        shards = (apart + self._copied_elements) * item
        if self.is_exact:  # read from fixed point, whether a family is sharded or not; copies of shards come as numbers
            item = FIXED_POINT_ITEM
            shards = apart * item + sum(y.kept_length for y in self.layouts.values()) * x.wide
        gradients = {"gradients": shards + self._borrowed_bytes(self.layers)}
        of_holders = [
            n * item for h in self._sums_of_holders for n in (h.sent_elements, h.received_elements, h.owned_elements)
        ]
        staged, mapped = {"communication": sum(of_holders)}, sum(n for n in of_holders if n >= LARGEST_HEAP_BLOCK)
        yield self._moment(when + "reducing gradients", gradients | staged, copy=copy, mapped=mapped)
        scratch = {
            "working memory": min(ADAM_CHUNK, max(y.shard_length for y in self.layouts.values())) * x.wide * x.lanes
        }
        yield self._moment(when + "the optimizer", gradients | scratch, copy=copy)
        mapped = max((n for n in self._gathered_blocks if n >= LARGEST_HEAP_BLOCK), default=0)
        published = {"gradients": shards, "communication": mapped}
        yield self._moment(when + "publishing parameters", published, copy=copy, mapped=mapped)

    def _lies_apart(self, layout: FlatLayout) -> bool:
        """Whether a reduced shard is no part of its buffer: that of experts' holders, and that of checked messages on a device."""
        checked = self.on_device and self.recipe.optim.zero < 2 and self.recipe.resilience.check != "off"
        return layout.scattered is not None or (checked and layout.num_shards > 1)

    @property
    def _copied_elements(self) -> int:
        """Reduced gradients of other ranks' shards, which come in messages of their own (of `zero = 2` they are counted with what it keeps)."""
        if not self.on_device or self.recipe.optim.zero == 2:
            return 0
        sent = (y for y in self.layouts.values() if y.keepers and not sums_whole(y.keepers, scatters=True))
        return sum(y.kept_length - y.shard_length for y in sent)

    def _passes(self, x: Local) -> Iterator[PassMoment]:
        """Passes in the rank's order, with as many micro-batches as a step of this run has."""
        place, plan = self.folding.coord(self.rank, "pp"), self.pipeline.plan(self.num_microbatches)
        passes = RankPasses(
            x=x,
            stages=self.stages,
            order=plan.schedule.actions[place],
            max_live=plan.schedule.max_live[place],
            puts_off=self.pipeline.splits_backward,
            in_pairs=bool(plan.pairs),
            rank_of_stage=plan.schedule.rank_of_stage,
        )
        return pass_moments(passes)

    def _rooms_bytes(self, moment: str, x: Local) -> int:
        """`Rooms` on a device, where a buffer is there for as long as it is filled and reduced: in backward passes, that of experts once their gradients are made, or added to it."""
        if not self.on_device or self.recipe.optim.zero < 2 or self.is_exact or "forward" in moment:
            return 0
        experts = ("experts" not in moment or device_activations.products_add(x)) and "head" not in moment
        layouts = (
            x
            for key, x in self.layouts.items()
            if x.adds_in_shards and key not in self.borrowed and (experts or x.rule.family != "expert")
        )
        return room_elements(layouts) * max(4, self.item)

    def _borrowed_bytes(self, layers: Sequence[int]) -> int:
        """Gradients of these layers that stay where autograd made them."""
        return self.item * sum(
            p.num_elements for family in self.borrowed for p in self.layouts[family].params if p.param.layer in layers
        )
