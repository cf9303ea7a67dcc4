"""The one stream that everything a person sees is derived from.

Any package may emit; ``observe`` decides where events go. An event is a frozen dataclass of plain values; ``to_record`` gives the
JSON object that lands in ``events/rank-N.jsonl``. Times are seconds since the epoch, durations seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from phalanx.core.messages import message

Lane = Literal["host", "compute", "wait"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. ``kind`` is the class name in the record."""

    def to_record(self) -> dict[str, Any]:
        """Its fields, as they are: numbers, words, tuples and mappings of them. What writes it down changes none."""
        return {"kind": type(self).__name__, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Emitted once by each rank when training begins or resumes."""

    run: str
    rank: int
    world: int
    step: int
    """Steps that were committed before: 0, or those of the checkpoint. What an earlier process logged beyond is void."""
    total_steps: int
    num_params: int
    active_params: int
    folding: str
    flops_per_token: float
    peak_flops_per_s: float
    """Measured matmul rate of all ranks together, the highest that was ever measured on such a machine; 0 where it was not measured."""
    rated_flops_per_s: float = 0.0
    """The same by the data sheet of the GPUs, against which `mfu` is told; 0 where it is not known, and `mfu` is told against what was measured."""
    unigram_loss: float | None = None
    """Validation loss of a model that knows only how frequent each token is: what training must beat."""


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One committed optimizer step; the figures are global."""

    step: int
    """Steps committed so far, this one included: the first step of a run ends as 1."""
    loss: float
    """Mean cross-entropy per valid token, nats."""
    aux_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    data_s: float
    tokens_per_s: float
    mfu: float
    load_max_over_mean: tuple[float, ...]
    """Tokens of the fullest expert over the mean, per MoE layer."""
    dead_experts: int
    """Experts without a token in this step, over all layers."""
    dropped_tokens: int
    router_entropy: float
    peak_memory_bytes: int
    mtp_loss: float = 0.0
    """Loss of the tokens after the next one, where they are predicted; mean over the blocks, without its weight."""
    exposed_forward_s: tuple[float, ...] = ()
    """Time that a rank stood waiting for dispatch or combine in the forward passes of the step, per MoE layer; mean over the ranks
    that have the layer. Empty, as the next three, where it is not known: on a device, whose host waits for nothing."""
    exposed_backward_s: tuple[float, ...] = ()
    """The same of the backward passes, a layer that is run again in them included."""
    hidden_forward_s: tuple[float, ...] = ()
    """Time for which dispatch or combine was under way while the rank did something else, per MoE layer. At most: a message counts
    from its posting to the end of the wait for it, though it may have been there before anyone asked."""
    hidden_backward_s: tuple[float, ...] = ()
    slowness: float | None = None
    """Slowness in an elastic run: how many times as long for its work the slowest host (on one machine: rank) took as the others
    (`plan/recovery/stragglers.py`)."""


@dataclass(frozen=True, kw_only=True)
class ExpertLoads(Event):
    """How many tokens of one step chose each expert; told by rank 0 from time to time, the more seldom the longer it trains."""

    step: int
    """Number of the step, as in `StepEnded`."""
    counts: tuple[tuple[int, ...], ...]
    """By MoE layer, then by expert, over all ranks, before dropping."""


@dataclass(frozen=True, kw_only=True)
class SamplesTaken(Event):
    """What one rank trained on in a committed step. All ranks' logs together are the ledger that no sample is lost or repeated.

    Of the ranks that share samples (along tp, cp and pp) the first one tells.
    """

    step: int
    """Number of the step, as in `StepEnded`."""
    microbatches: tuple[int, ...]
    """Numbers of its micro-batches in the step, over all ranks."""
    windows: tuple[int, ...]
    """Ids of their sequences, in order."""
    history: int = 0
    """History of the run that the step belongs to; a later one begins at the step of a `WentBack` and voids the steps after it."""


@dataclass(frozen=True, kw_only=True)
class Validated(Event):
    """The validation loss after `step` steps."""

    step: int
    loss: float
    """Mean cross-entropy per valid token, nats."""
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk and visible."""

    step: int
    path: str
    bytes: int
    blocked_s: float
    """How long training stood still for it."""
    total_s: float


@dataclass(frozen=True, kw_only=True)
class Collective(Event):
    """One collective as this rank saw it (``runtime/comm/collectives.py``)."""

    op_id: str
    op: str
    axis: str
    size: int
    """Ranks in the group."""
    sent_bytes: int
    """Bytes that left this rank for others, as the algorithm of the reference counts them (own share excluded)."""
    begin_s: float
    """When it was posted."""
    end_s: float
    """When the wait for it had ended: it was under way until then at the latest."""
    waited_s: float = 0.0
    """How long that wait blocked the rank, up to `end_s`: the time that nothing hid. On an asynchronous device the host waits for nothing."""
    aside: bool = False
    """A thread beside the rank's own waited: the rank was free."""
    ranks: tuple[int, ...] = ()
    """The group."""
    sends_to: tuple[int, ...] = ()
    """Ranks that this rank sent messages to, where messages go between single ranks; both fields are empty where all of the group
    take part alike."""
    receives_from: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operation(Event):
    """Something that a rank did in a step that is recorded (`observe.trace_steps`), as its host saw it."""

    op_id: str
    lane: Lane
    """host: a pass of the pipeline, waiting for data. compute: arithmetic. wait: blocked on something that is no collective."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepRecorded(Event):
    """All `Collective` and `Operation` events since the last one are of this step of this rank."""

    step: int
    """Number of the step, as in `StepEnded`."""
    begin_s: float
    end_s: float
    rank: int | None = None
    """Rank in its generation, in an elastic run, whose logs have the numbers of slots."""
    generation: int = 0
    """Generation in an elastic run."""
    committed: bool = True
    """Whether all members did; else the step was given up, and done again in a later generation."""
    voted_s: float = 0.0
    """When this member of an elastic run was ready to vote (seconds since the epoch); 0: it did not come so far."""
    decided_s: float = 0.0
    """When it knew the decision."""


@dataclass(frozen=True, kw_only=True)
class StepPublished(Event):
    """All `Collective` and `Operation` events since the last record gave the parameters of this step to those that lacked them: in an elastic run behind the commit, before whatever
    reads them next."""

    step: int
    """That made them, as in `StepEnded`."""
    begin_s: float
    end_s: float
    rank: int | None
    generation: int


@dataclass(frozen=True, kw_only=True)
class MoveRecorded(Event):
    """All `Collective` events since the last record are of this move of state between layouts, which happened between steps."""

    op_id: str
    """What ids of its messages begin with (`plan/program/moves.py`)."""
    step: int
    """Steps committed by then."""
    begin_s: float
    end_s: float
    rank: int | None
    """Rank, as in `StepRecorded`; in a recovery its place in the order of all members, idle ones too."""
    generation: int
    """0 in a run that is not elastic."""
    world: int
    """Ranks that took part."""
    done: bool
    """Whether all that this rank lacked came."""
    plan: str
    """Hash of the reshard plan; empty where it was not done."""
    hosts: tuple[int, ...]
    """Host of each rank, as the plan took them; likewise."""
    order: Mapping[str, Any]
    """What it was planned from (`plan/recovery/move_order.py`); empty: what this rank's move before was planned from."""


@dataclass(frozen=True, kw_only=True)
class ClockCompared(Event):
    """How this rank's clock differs from rank 0's: a moment here, less `offset_s`, is that moment there."""

    rank: int
    host: str
    """Machine whose clock it is; ranks with the same one are compared exactly."""
    offset_s: float
    error_s: float
    """Largest error of the comparison; 0 on the machine of rank 0."""


@dataclass(frozen=True, kw_only=True)
class WarmupChosen(Event):
    """How many forwards ahead of 1F1B each pipeline rank does from here on, measured in the step before (``plan/pipeline/schedule/eager.py``)."""

    step: int
    """Steps committed so far."""
    extra_warmup: tuple[int, ...]
    transfer_s: float
    """Seconds to transfer one tensor between neighbouring stages."""
    forward_s: tuple[float, ...]
    """Seconds of one pass, by rank of the pipeline."""
    backward_s: tuple[float, ...]
    live_bytes: tuple[int, ...]
    """What one micro-batch holds, by rank of the pipeline."""
    reason: str
    """Reason in words."""


@message
@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """Text that the model wrote after `step` steps."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something a person should read once. ``level`` is info, warning or error."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TeamFormed(Event):
    """The members of an elastic run are connected anew, as one of them saw it: somebody is lost, has left or has come."""

    generation: int
    members: int
    step: int
    """Steps committed: where they go on."""
    folding: str
    why: str
    """What ended the last generation, in words."""
    noticed_s: float
    """Seconds from when this member saw the last generation broken until the new one was decided and connected; 0: it saw none
    broken."""
    formed_s: float
    """Seconds of that for the barrier and groups."""
    built_s: float
    """Modules and buffers for the new mapping."""
    moved_s: float
    """State from those who have it to those who lack it, checksums included."""
    moved_bytes: int
    """That came to this member."""
    checked: int
    """Pieces of state whose checksums all their holders agree on."""
    lost_s: float = 0.0
    """When the supervisor knew that somebody is lost (seconds since the epoch); 0: nobody is, or whoever told it did not say."""
    told_s: float = 0.0
    """Seconds from then until this member was told."""
    plan: str = ""
    """Hash of what was decided for the team (`plan/recovery/generation.py: GenerationPlan.decision`)."""
    life: str = ""
    """Life of the service that counts the generations (`runtime/membership/membership.py: Generation.epoch`): another one counts
    anew, above those of a run that goes on."""
    wanted: int = 0
    """Members that the run wants; 0, here and in the next two: whoever told it did not say."""
    holders: int = 0
    """Hosts (on one machine: ranks) that hold each piece of state, at least."""
    holders_wanted: int = 0
    """The same as `resilience.f` asks for it."""


@dataclass(frozen=True, kw_only=True)
class Straggling(Event):
    """A host (on one machine: a rank) has been slow for long enough that a person should know, or that it is removed."""

    step: int
    """Steps committed."""
    host: str
    members: tuple[str, ...]
    """Its ranks."""
    slowness: float
    """Slowness, as in `StepEnded`."""
    steps: int
    """Number of steps in a row for which it was so slow."""
    put_out: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class WentBack(Event):
    """Nobody held all state any more, so the run goes on from a checkpoint: a new history. What was committed after `step` is void and is done again."""

    history: int
    """Number of the new one: the generation in which it begins."""
    step: int
    """Steps committed where it begins."""
    from_step: int | None
    """Steps committed in the old one; None: nobody is left who could say (the logs do)."""
    why: str
    damaged: tuple[int, ...]
    """Steps of newer checkpoints that could not be used."""
    abandoned: tuple[str, ...]
    """Later checkpoints, which lie in `checkpoints/abandoned` now."""


@dataclass(frozen=True, kw_only=True)
class TrainingResumed(Event):
    """The first step that a new generation has committed."""

    generation: int
    step: int
    """Steps committed, this one included."""
    seconds: float
    """Seconds since this member saw the last generation broken; for one that has just come, since it was connected."""
    since_lost_s: float = 0.0
    """Seconds since the supervisor knew that somebody is lost; 0 where nobody is."""


@dataclass(frozen=True, kw_only=True)
class ExpertsMoved(Event):
    """Experts with replicas lie elsewhere from the next step on (`plan/placement/rebalancing.py`)."""

    step: int
    """Steps committed when the state was moved."""
    why: str
    """balance: rows are more even so. mend: some expert was on too few hosts."""
    experts: int
    """States of experts that travelled, over all ranks and layers."""
    moved_bytes: int
    """That came to this rank."""
    built_s: float
    """Modules and buffers for the new placement."""
    moved_s: float
    """Seconds for which training stood still for state, checksums included."""
    checked: int
    """Pieces of expert state whose checksums all holders agree on."""
    before: float
    """Rows of the busiest rank over the mean, summed over the layers, by the smoothed loads."""
    after: float
    """The same in the new placement: a prediction."""
    gain_s: float
    """Predicted, of a step."""
    cost_s: float
    """Predicted, of the move."""
    beside_bytes: int = 0
    """Part of `moved_bytes` that came while the step before was computed. 0: training stood still for all."""
    beside_s: float = 0.0
    """Seconds for which that was under way beside the step; what was left of it then is in `moved_s`."""


@dataclass(frozen=True, kw_only=True)
class StatePlaced(Event):
    """Which rank holds what from the next step on. Told by the first rank: when a run begins or resumes, when the members of an elastic run are connected anew, when experts move."""

    step: int
    """Steps committed."""
    why: str
    """start, members, balance or mend."""
    folding: str
    layers: tuple[tuple[int, ...], ...]
    """Layers of each stage of the pipeline, by its rank."""
    experts: int
    """Routed experts of a layer."""
    expert_layers: tuple[int, ...]
    """Layers that have them."""
    slots_per_rank: int = 0
    """Replicas of experts that an ep rank has room for in each layer; 0: none has any, and each ep rank has its share of the experts in order."""
    slots: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...] = ()
    """(layers, expert in each slot of each ep rank of their stage), where experts have replicas. Layers that are placed alike stand together. Empty: these are too many for a line of the log."""
    members: tuple[str, ...] = ()
    """Members of an elastic run in the order of their ranks, then those that are idle; empty: the world is fixed."""
    hosts: tuple[int, ...] = ()
    """Failure domain of each rank of an elastic run: its host, or on a single machine the rank itself."""
    minimum: int = 0
    """An elastic run waits while it has fewer members."""
    holders: int = 0
    """As in `TeamFormed`."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training stopped. ``reason`` is finished, interrupted or the error in one line."""

    step: int
    reason: str
    seconds: float


def was_refused(reason: str) -> bool:
    """Whether `RunEnded`, after another end, tells of a start that was refused, as for a wrong setting or checkpoint: what the run was before, it is still."""
    return reason.startswith(("ConfigError:", "CheckpointError:", "DataError:", "FinalError:"))


class Emit(Protocol):
    """What a component needs in order to be seen: a callable that takes an event."""

    def __call__(self, event: Event, /) -> None: ...


def ignore(event: Event, /) -> None:
    """An `Emit` for those who listen to nothing."""
