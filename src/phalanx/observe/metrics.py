"""The numbers of a run by name: which event carries each, its unit, what it means. TensorBoard, W&B, Prometheus and the docs read this table.

Must never change without need: the names. People's dashboards and scripts are built on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import add
from types import MappingProxyType
from typing import Any

from phalanx.core.events import CheckpointSaved, Event, StepEnded, TeamFormed, TrainingResumed, Validated, WentBack

PROMETHEUS_UNITS: Mapping[str, str] = MappingProxyType({"s": "seconds", "B": "bytes", "ratio": "ratio"})
"""Unit -> what names in Prometheus end with."""


@dataclass(frozen=True)
class Metric:
    """One number (None: not known), or one for each MoE layer (`per_layer`), read from events of one kind."""

    name: str
    kind: type[Event]
    unit: str
    meaning: str
    read: Callable[[Any], Any]
    per_layer: bool = False

    @property
    def prometheus_name(self) -> str:
        """By the conventions of Prometheus: the unit in full at the end, `phalanx_speed_step_seconds`, `phalanx_experts_layer_load_ratio`."""
        area, _, rest = self.name.partition("/")
        words = ["phalanx", area, *(["layer"] if self.per_layer else []), *rest.removesuffix("_of").split("_")]
        if words[-2:] == ["per", "s"]:
            words[-1] = "second"
        elif (unit := PROMETHEUS_UNITS.get(self.unit)) is not None:
            words = [*(words[:-1] if words[-1] in ("s", unit) else words), unit]
        return "_".join(words)


@dataclass(frozen=True)
class Sample:
    """A value of a metric at a step; `layer` counts MoE layers from 0."""

    metric: Metric
    step: int
    value: float
    layer: int | None = None

    @property
    def tag(self) -> str:
        """`train/loss`, or `experts/load/layer-3`."""
        return self.metric.name if self.layer is None else f"{self.metric.name}/layer-{self.layer}"


def exposed_of(event: StepEnded) -> tuple[float, ...]:
    """Seconds a rank stood waiting for dispatch and combine, per MoE layer, forward and backward; empty where not known."""
    return tuple(map(add, event.exposed_forward_s, event.exposed_backward_s))


def hidden_of(event: StepEnded) -> tuple[float, ...]:
    """Seconds for which they were under way while it did something else, per MoE layer."""
    return tuple(map(add, event.hidden_forward_s, event.hidden_backward_s))


def _recovered(event: TeamFormed, value: float) -> float | None:
    """Nothing of the generation that the run begins with."""
    return value if event.generation > 1 else None


METRICS: tuple[Metric, ...] = (
    Metric("train/loss", StepEnded, "nats", "mean cross-entropy per valid token of the step", lambda e: e.loss),
    Metric("train/aux_loss", StepEnded, "nats", "load-balancing term of the objective", lambda e: e.aux_loss),
    Metric("train/z_loss", StepEnded, "nats", "router z-loss term of the objective", lambda e: e.z_loss),
    Metric("train/mtp_loss", StepEnded, "nats", "loss of the tokens after the next one, unweighted", lambda e: e.mtp_loss),
    Metric("train/grad_norm", StepEnded, "", "global gradient norm before clipping", lambda e: e.grad_norm),
    Metric("train/lr", StepEnded, "", "learning rate", lambda e: e.lr),
    Metric("validation/loss", Validated, "nats", "mean cross-entropy per valid validation token", lambda e: e.loss),
    Metric("validation/seconds", Validated, "s", "time that one validation took", lambda e: e.seconds),
    Metric("speed/tokens_per_s", StepEnded, "1/s", "tokens trained per second, all ranks", lambda e: e.tokens_per_s),
    Metric("speed/mfu", StepEnded, "ratio", "model FLOPs per second over the measured matmul rate", lambda e: e.mfu or None),
    Metric("speed/step_s", StepEnded, "s", "duration of the step, waiting for data included", lambda e: e.step_s),
    Metric("speed/data_s", StepEnded, "s", "part of it that was spent waiting for data", lambda e: e.data_s),
    Metric("experts/load", StepEnded, "ratio", "tokens of the fullest expert over the mean, worst layer",
           lambda e: max(e.load_max_over_mean, default=1.0)),
    Metric("experts/load_of", StepEnded, "ratio", "the same for each MoE layer", lambda e: e.load_max_over_mean, per_layer=True),
    Metric("experts/dead", StepEnded, "", "experts without a token in this step, over all layers", lambda e: e.dead_experts),
    Metric("experts/dropped", StepEnded, "", "(token, expert) pairs dropped by capacity, over all layers",
           lambda e: e.dropped_tokens),
    Metric("experts/entropy", StepEnded, "nats", "mean entropy of the router's distribution", lambda e: e.router_entropy),
    Metric("exchange/exposed_s", StepEnded, "s", "time that a rank stood waiting for dispatch and combine, all layers",
           lambda e: sum(exposed_of(e)) if exposed_of(e) else None),
    Metric("exchange/hidden_s", StepEnded, "s", "time that they were under way while it did something else, at most",
           lambda e: sum(hidden_of(e)) if hidden_of(e) else None),
    Metric("exchange/exposed_forward_of", StepEnded, "s", "exposed time of each MoE layer, forward",
           lambda e: e.exposed_forward_s, per_layer=True),
    Metric("exchange/exposed_backward_of", StepEnded, "s", "the same backward", lambda e: e.exposed_backward_s, per_layer=True),
    Metric("exchange/hidden_forward_of", StepEnded, "s", "hidden time of each MoE layer, forward, at most",
           lambda e: e.hidden_forward_s, per_layer=True),
    Metric("exchange/hidden_backward_of", StepEnded, "s", "the same backward", lambda e: e.hidden_backward_s, per_layer=True),
    Metric("speed/slowness", StepEnded, "ratio", "time for its work that the slowest host took, over that of the others (elastic runs)",
           lambda e: e.slowness),
    Metric("team/members", TeamFormed, "", "members of an elastic run", lambda e: e.members),
    Metric("team/wanted", TeamFormed, "", "members that it wants", lambda e: e.wanted or None),
    Metric("team/holders", TeamFormed, "", "hosts (on one machine: ranks) that hold each piece of state, at least",
           lambda e: e.holders or None),
    Metric("team/holders_wanted", TeamFormed, "", "the same as `resilience.f` asks for it", lambda e: e.holders_wanted or None),
    Metric("recovery/told_s", TeamFormed, "s", "from when the supervisor knew of a loss until this member was told",
           lambda e: e.told_s if e.lost_s else None),
    Metric("recovery/noticed_s", TeamFormed, "s", "from when this member saw its process groups broken until the new one was connected",
           lambda e: _recovered(e, e.noticed_s)),
    Metric("recovery/formed_s", TeamFormed, "s", "of that, barrier and groups", lambda e: _recovered(e, e.formed_s)),
    Metric("recovery/built_s", TeamFormed, "s", "modules and buffers for the new mapping", lambda e: _recovered(e, e.built_s)),
    Metric("recovery/moved_s", TeamFormed, "s", "state to those who lack it, checksums included",
           lambda e: _recovered(e, e.moved_s)),
    Metric("recovery/moved_bytes", TeamFormed, "B", "state that came to this member", lambda e: _recovered(e, e.moved_bytes)),
    Metric("recovery/resumed_s", TrainingResumed, "s", "from when this member saw its process groups broken to the next committed step",
           lambda e: e.seconds),
    Metric("recovery/since_lost_s", TrainingResumed, "s", "from when the supervisor knew of a loss to the next committed step",
           lambda e: e.since_lost_s or None),
    Metric("recovery/rolled_back", WentBack, "", "step of the checkpoint that training went back to", lambda e: e.step),
    Metric("memory/peak_bytes", StepEnded, "B", "highest memory of one rank so far", lambda e: e.peak_memory_bytes),
    Metric("checkpoint/blocked_s", CheckpointSaved, "s", "how long training stood still for the checkpoint",
           lambda e: e.blocked_s),
    Metric("checkpoint/total_s", CheckpointSaved, "s", "time until the checkpoint was complete on disk", lambda e: e.total_s),
    Metric("checkpoint/bytes", CheckpointSaved, "B", "size of the checkpoint", lambda e: e.bytes),
)  # fmt: skip


def samples(event: Event) -> Iterator[Sample]:
    """All values that an event carries (nothing for events without numbers)."""
    for metric in METRICS:
        if type(event) is not metric.kind:
            continue
        step = int(event.step)  # type: ignore[attr-defined]
        value = metric.read(event)
        if value is None:
            continue
        if metric.per_layer:
            yield from (Sample(metric, step, float(v), layer) for layer, v in enumerate(value))
        else:
            yield Sample(metric, step, float(value))
