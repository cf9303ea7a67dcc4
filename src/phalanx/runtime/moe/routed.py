"""Routed experts by the way that the recipe names: one after the other, in chunks of tokens, tile by tile, or by fused kernels.

Decides nothing: `dispatch.overlap` does (`plan/moe/overlap/settings.py`). All ways compute the same, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.core.errors import ConfigError, raise_if
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.deferred import DeferredGradients
from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.plan.moe.overlap import FINE, OverlapSetting, TileSchedule, parse_overlap, replica_problems
from phalanx.runtime.moe.coarse import run_coarse
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, run_experts
from phalanx.runtime.moe.fused import FusedMemory, fused_problems, run_fused
from phalanx.runtime.moe.overlap import run_overlapped
from phalanx.runtime.moe.overlap_tuner import Tuned, Tuner

FIXED = {"tiles": TileSchedule(), "fine": FINE}


class RoutedExperts:
    """The way of one layer on one rank; on a group of one rank there is nothing to overlap.

    Raises `ConfigError` where experts with replicas should go tile by tile (tiles are cut from the rows of slots in the order of experts), and where fused kernels cannot reach all ranks.
    """

    def __init__(
        self,
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
    ) -> None:
        """`host_of_rank` of all ranks of the run, () where it is not known. `shared_ffn`: width of the expert that is given as `beside`, 0 for none.
        `micro_tokens`: as in the model's context."""
        self.dispatcher, self.kernels, self.lanes, self.sums = dispatcher, kernels, lanes, sums
        self.tuner, self.shared_ffn, self.micro_tokens = tuner or Tuner(), shared_ffn, micro_tokens
        self.hosts = [host_of_rank[rank] for rank in dispatcher.ep_etp.ranks] if host_of_rank else None
        alone = dispatcher.ep_etp.size == 1
        self.setting = OverlapSetting("serial") if alone else parse_overlap(dispatcher.spec.overlap)
        self.fused = fused or FusedMemory()
        if self.setting.kind == "fused":
            raise_if(fused_problems(dispatcher, self.hosts), ConfigError, subject="the overlap of a MoE layer")
        if not dispatcher.is_plain:
            raise_if(replica_problems(str(self.setting)), ConfigError, subject="the overlap of a MoE layer")

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        *,
        experts: ExpertWeights,
        later: DeferredGradients | None = None,
        recompute: bool = False,
        token_index_T: torch.Tensor | None = None,
        part_T: torch.Tensor | None = None,
        op_prefix: str = "",
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, H) weighted sum over each token's experts plus what `beside` gives, and the number of dropped pairs. As `run_experts`."""
        common: dict[str, Any] = {
            "experts": experts,
            "dispatcher": self.dispatcher,
            "lanes": self.lanes,
            "later": later,
            "recompute": recompute,
            "token_index_T": token_index_T,
            "part_T": part_T,
            "op_prefix": op_prefix,
        }
        routed = (x_TH, weights_TK, experts_TK)
        if self.sums is not None:
            y_TH, dropped = run_experts(*routed, kernels=self.kernels, sums=self.sums, **common)
            return y_TH if beside is None else y_TH + beside(), dropped
        by_tiles: dict[str, Any] = {"beside": beside, "host_of_rank": self.hosts, **common}
        if self.setting.kind in FIXED:
            return run_overlapped(*routed, schedule=FIXED[self.setting.kind], **by_tiles)
        if self.setting.kind == "auto":
            known = self.tuner.of(self.dispatcher, self._of_all(x_TH), experts, self.lanes, shared_ffn=self.shared_ffn)
            tuned = Tuned(known, compares=self.dispatcher.comms.beside is None and not x_TH.is_cuda)
            out = run_overlapped(*routed, schedule=tuned, **by_tiles)
            tuned.done()
            return out
        if self.setting.kind == "fused":
            common.pop("lanes")
            y_TH, dropped = run_fused(*routed, memory=self.fused, **common)
        elif self.setting.kind == "coarse":
            y_TH, dropped = run_coarse(*routed, chunks=self.setting.chunks, kernels=self.kernels, **common)
        else:
            y_TH, dropped = run_experts(*routed, kernels=self.kernels, **common)
        return y_TH if beside is None else y_TH + beside(), dropped

    def _of_all(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Tokens like those of the ranks that have some: what is known of the layer must have one name on all."""
        return x_TH if len(x_TH) else x_TH.new_zeros(self.micro_tokens, x_TH.shape[1])
