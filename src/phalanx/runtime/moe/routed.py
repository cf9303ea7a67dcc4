"""The ways of a layer through its routed experts: one after the other, in chunks of tokens, tile by tile, or by fused kernels.

Decides which of them a layer has, once, when the model is built: `routed_experts`, by `dispatch.overlap` (`plan/moe/overlap/settings.py`).
All compute the same, but for rounding; tile by tile they do to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The way of one layer on one rank."""

    dispatcher: Dispatcher
    way: Callable[[MoeCall], Result]

    def __call__(self, call: MoeCall) -> Result:
        """(T, H) weighted sum over each token's experts plus what `call.beside` gives, and the number of dropped pairs. Collective over `ep_etp`."""
        return self.way(call)


def _run_tuned(
    call: MoeCall,
    *,
    dispatcher: Dispatcher,
    lanes: Lanes,
    tuner: Tuner,
    hosts: Sequence[int] | None,
    shared_ffn: int,
    micro_tokens: int,
) -> Result:
    """Tile by tile, by the schedule that a measured cost finds fastest for each batch. `hosts`: host of each position in `ep_etp`."""
    run = partial(run_overlapped, call, dispatcher=dispatcher, lanes=lanes, host_of_rank=hosts)
    # a text that is generated is longer with every token, and each length would be calibrated
    if micro_tokens and len(call.x_TH) not in (0, micro_tokens):
        return run(schedule=TileSchedule())
    x_TH = call.x_TH if len(call.x_TH) else call.x_TH.new_zeros(micro_tokens, call.x_TH.shape[1])
    # ^ what is known of the layer must have one name on all ranks, those without tokens as well
    known = tuner.of(dispatcher, x_TH, call.experts, lanes, shared_ffn=shared_ffn, hosts=hosts)
    tuned = Tuned(known, compares=dispatcher.comms.beside is None and not x_TH.is_cuda)
    out = run(schedule=tuned)
    tuned.done()
    return out


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
    way: Callable[[MoeCall], Result]
    if sums is not None:
        way = partial(run_exact, dispatcher=dispatcher, sums=sums, kernels=kernels, lanes=lanes)
    elif setting.kind == "serial":
        way = partial(run_experts, dispatcher=dispatcher, kernels=kernels, lanes=lanes)
    elif setting.kind == "coarse":
        way = partial(run_coarse, dispatcher=dispatcher, chunks=setting.chunks, kernels=kernels, lanes=lanes)
    elif setting.kind == "fused":
        way = partial(run_fused, dispatcher=dispatcher, memory=fused or FusedMemory())
    elif setting.kind == "auto":
        way = partial(
            _run_tuned, dispatcher=dispatcher, lanes=lanes, tuner=tuner or Tuner(), hosts=hosts, shared_ffn=shared_ffn,
            micro_tokens=micro_tokens,
        )  # fmt: skip
    else:
        way = partial(
            run_overlapped, dispatcher=dispatcher, schedule=setting.schedule, per_token=setting.per_token, lanes=lanes,
            host_of_rank=hosts,
        )  # fmt: skip
    return RoutedExperts(dispatcher, way)
