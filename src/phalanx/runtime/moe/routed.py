"""The ways of a layer through its routed experts: one after the other, in chunks of tokens, tile by tile, or by fused kernels.

Decides which of them a layer has, once, when the model is built: `routed_experts`, by `dispatch.overlap` (`plan/moe/overlap/settings.py`). Each way is a small class that carries out a
`MoeCall`. All compute the same, but for rounding; tile by tile they do to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.core.errors import ConfigError, raise_if
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.plan.moe import host_problems
from phalanx.plan.moe.overlap import OverlapSetting, parse_overlap, replica_problems
from phalanx.plan.moe.overlap.tiles import TileSchedule
from phalanx.runtime.moe.coarse import run_coarse
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import MoeCall, run_exact, run_experts
from phalanx.runtime.moe.fused import FusedMemory, fused_problems, run_fused
from phalanx.runtime.moe.overlap import run_overlapped
from phalanx.runtime.moe.overlap_tuner import Tuned, Tuner


class RoutedExperts(Protocol):
    """The way of one layer on one rank. Collective over `ep_etp`."""

    @property
    def dispatcher(self) -> Dispatcher: ...

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, H) weighted sum over each token's experts plus what `call.beside` gives, and the number of dropped pairs."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SerialRouted:
    """Dispatch, experts and combine one after the other."""

    dispatcher: Dispatcher
    kernels: Impl
    lanes: Lanes

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        y_TH, dropped = run_experts(call, dispatcher=self.dispatcher, kernels=self.kernels, lanes=self.lanes)
        return call.with_shared(y_TH), dropped


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactRouted:
    """One after the other, in exact mode: sums do not depend on the number of ranks."""

    dispatcher: Dispatcher
    kernels: Impl
    lanes: Lanes
    sums: FixedSums

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        y_TH, dropped = run_exact(
            call, dispatcher=self.dispatcher, sums=self.sums, kernels=self.kernels, lanes=self.lanes
        )
        return call.with_shared(y_TH), dropped


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseRouted:
    """Runs the routed experts in chunks of tokens."""

    dispatcher: Dispatcher
    kernels: Impl
    lanes: Lanes
    chunks: int

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        y_TH, dropped = run_coarse(
            call, dispatcher=self.dispatcher, chunks=self.chunks, kernels=self.kernels, lanes=self.lanes
        )
        return call.with_shared(y_TH), dropped


@dataclass(frozen=True, kw_only=True, eq=False)
class TiledRouted:
    """Tile by tile, by one schedule."""

    dispatcher: Dispatcher
    lanes: Lanes
    schedule: TileSchedule
    per_token: bool | None
    """Whether entries are per token, as in `run_overlapped`."""
    hosts: Sequence[int] | None
    """Host of each position in `ep_etp`."""

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        return run_overlapped(
            call,
            dispatcher=self.dispatcher,
            schedule=self.schedule,
            per_token=self.per_token,
            lanes=self.lanes,
            host_of_rank=self.hosts,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TunedRouted:
    """Tile by tile, by the schedule that a measured cost finds fastest for each batch."""

    dispatcher: Dispatcher
    lanes: Lanes
    tuner: Tuner
    hosts: Sequence[int] | None
    """Host of each position in `ep_etp`."""
    shared_ffn: int
    micro_tokens: int

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        # a text that is generated is longer with every token, and each length would be calibrated
        if self.micro_tokens and len(call.x_TH) not in (0, self.micro_tokens):
            return run_overlapped(
                call, dispatcher=self.dispatcher, schedule=TileSchedule(), lanes=self.lanes, host_of_rank=self.hosts
            )
        x_TH = call.x_TH if len(call.x_TH) else call.x_TH.new_zeros(self.micro_tokens, call.x_TH.shape[1])
        # ^ what is known of the layer must have one name on all ranks, those without tokens as well
        known = self.tuner.of(
            self.dispatcher, x_TH, call.experts, self.lanes, shared_ffn=self.shared_ffn, hosts=self.hosts
        )
        tuned = Tuned(known, compares=self.dispatcher.comms.beside is None and not x_TH.is_cuda)
        out = run_overlapped(
            call, dispatcher=self.dispatcher, schedule=tuned, lanes=self.lanes, host_of_rank=self.hosts
        )
        tuned.done()
        return out


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedRouted:
    """Runs the routed experts by kernels that compute while they receive and send."""

    dispatcher: Dispatcher
    memory: FusedMemory

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        y_TH, dropped = run_fused(call, dispatcher=self.dispatcher, memory=self.memory)
        return call.with_shared(y_TH), dropped


def routed_experts(
    dispatcher: Dispatcher,
    *,
    kernels: Impl = "fast",
    lanes: Lanes = SERIAL,
    tuner: Tuner | None = None,
    fused: FusedMemory | None = None,
    sums: FixedSums | None = None,
    host_of_rank: Sequence[int] = (),
    shared_ffn: int = 0,
    micro_tokens: int = 0,
) -> RoutedExperts:
    """The way that `dispatcher.spec.overlap` names; on a group of one rank there is nothing to overlap, and with `sums` nothing does.

    `host_of_rank` of all ranks of the run, () where it is not known. `shared_ffn`: width of the expert that calls have `beside`, 0 for none. `micro_tokens`: as in the
    model's context. Raises `ConfigError` where experts with replicas should go tile by tile (tiles are cut from the rows of slots in the order of experts), and where fused kernels cannot
    reach all ranks.
    """
    alone = dispatcher.ep_etp.size == 1
    setting = OverlapSetting(kind="serial") if alone else parse_overlap(dispatcher.spec.overlap)
    hosts = [host_of_rank[rank] for rank in dispatcher.ep_etp.ranks] if host_of_rank else None
    if setting.kind == "fused":
        raise_if(fused_problems(dispatcher, hosts), ConfigError, subject="the overlap of a MoE layer")
    if dispatcher.spec.transport == "deepep" and not alone:
        raise_if(
            host_problems(hosts or (), num_experts=dispatcher.num_experts),
            ConfigError,
            subject="the transport of a MoE layer",
        )
        assert dispatcher.is_plain and dispatcher.etp.size == 1 and sums is None  # `plan.moe.transport_problems`
    if not dispatcher.is_plain:
        raise_if(replica_problems(str(setting)), ConfigError, subject="the overlap of a MoE layer")
    if sums is not None:
        return ExactRouted(dispatcher=dispatcher, kernels=kernels, lanes=lanes, sums=sums)
    if setting.kind == "serial":
        return SerialRouted(dispatcher=dispatcher, kernels=kernels, lanes=lanes)
    if setting.kind == "coarse":
        return CoarseRouted(dispatcher=dispatcher, kernels=kernels, lanes=lanes, chunks=setting.chunks)
    if setting.kind == "fused":
        return FusedRouted(dispatcher=dispatcher, memory=fused or FusedMemory())
    if setting.kind == "auto":
        return TunedRouted(
            dispatcher=dispatcher,
            lanes=lanes,
            tuner=tuner or Tuner(),
            hosts=hosts,
            shared_ffn=shared_ffn,
            micro_tokens=micro_tokens,
        )
    return TiledRouted(
        dispatcher=dispatcher, lanes=lanes, schedule=setting.schedule, per_token=setting.per_token, hosts=hosts
    )
