"""Whole tokens between ranks by DeepEP: once to each rank that has an expert of theirs, and the sums of those ranks back.

    there      tokens, weights and choices leave; tokens arrive by source, of each in their order (within a host), with the choices of this rank's experts
    back       what each rank has added up of a token comes home and is added, by rank in fp32

The gradient of one is the other, with the same `handle` of the library. Decides nothing: `plan/moe/deepep.py` says where it may be used. Nothing of the library is
imported before the first use, and nothing is pickled when a group's buffer is made: handles go as other messages between ranks do.

Must never change: all ranks of a group make the same calls in the same order, those without a token too. A dispatch waits on the host for what comes here (one wait a layer; a
pass that runs again uses what the first has kept). It has run on stand-ins only (tests/helpers/deepep_stand_in.py).

Legend: T tokens of this rank, N tokens that came here, K experts of a token, H hidden, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from phalanx.core.errors import ConfigError, PhalanxError, Problem, first_line
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.comm.row_collectives import backward_id

PACKAGE = "git+https://github.com/deepseek-ai/DeepEP"
LIMIT_S = 100.0
"""How long the library waits for a rank."""
T = TypeVar("T")


class ByLibrary(Protocol):
    """What `runtime/comm/collectives.py` has for messages that are not its own."""

    doubts: list[torch.Tensor]

    def by_library(
        self, op: str, axis: Axis, op_id: str, launch: Callable[[], tuple[T, int]], *, on_host: bool, limit_s: float
    ) -> T: ...

    def gather_objects(self, value: Any, axis: Axis) -> list[Any]: ...


@dataclass(frozen=True, eq=False)
class TokensCame:
    """Tokens for this rank's experts."""

    x_NH: torch.Tensor
    weights_NK: torch.Tensor
    """0 where the choice is another rank's."""
    experts_NK: torch.Tensor
    """int64 number of the expert among those of this rank; -1: another rank's."""
    counts: tuple[int, ...]
    """Rows of each expert of this rank, on the host."""
    trip: TokenTrip
    chosen_TK: torch.Tensor
    """The choices of this rank's own tokens, by which the same pass is known again."""

    @property
    def kept(self) -> TokensCame:
        """What a pass that runs again needs: all but the tokens, and without a gradient."""
        return replace(self, x_NH=self.x_NH.new_empty(0), weights_NK=self.weights_NK.detach())


class TokenBuffers:
    """DeepEP's buffers of one rank, one for each group and width. `library`: its module, or what stands in for it; None: imported when it is needed."""

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._made: dict[tuple[tuple[int, ...], int], Any] = {}

    def library(self) -> Any:
        """Raises `ConfigError` where the package cannot be imported."""
        if self._library is None:
            try:
                import deep_ep

                if not hasattr(deep_ep, "Buffer"):
                    raise ImportError("it has no Buffer")
                self._library = deep_ep
            except Exception as err:  # it looks for NCCL, NVSHMEM and a compiler, and asserts what it finds
                rule = f"needs DeepEP, which cannot be imported here ({first_line(err)}; the deep-ep of PyPI is not it)"
                hint = f'pip install --no-build-isolation {PACKAGE}, or "all_to_all"'
                problem = Problem(where="dispatch.transport", value="deepep", rule=rule, hint=hint)
                raise ConfigError([problem], subject="the transport of a MoE layer") from err
        return self._library

    def of(self, comms: ByLibrary, axis: Axis, x_TH: torch.Tensor) -> Any:
        """The buffer for rows as wide as those of `x`. Collective where it is new."""
        row_bytes = x_TH.shape[1] * x_TH.element_size()
        key = axis.ranks, row_bytes
        if key not in self._made:
            buffer = self.library().Buffer
            configs = buffer.get_dispatch_config(axis.size), buffer.get_combine_config(axis.size)
            nvl = max(config.get_nvl_buffer_size_hint(row_bytes, axis.size) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(row_bytes, axis.size) for config in configs)
            try:
                self._made[key] = buffer(None, num_nvl_bytes=nvl, num_rdma_bytes=rdma, comm=_Meeting(comms, axis))
            except PhalanxError:  # another rank was lost meanwhile
                raise
            except Exception as err:
                raise _not_opened(err, axis, x_TH.device) from err
        return self._made[key]


def _not_opened(err: Exception, axis: Axis, device: torch.device) -> ConfigError:
    """The library asserts what it finds. On cards that have PCIE in their name it asks a process group for NVLinks (deep_ep/utils/envs.py, `check_nvlink_connections`), and is given none: an
    `AttributeError`. Other cards without NVLink it does not tell apart."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    why = f"{type(err).__name__}: {first_line(err)}"
    if isinstance(err, AttributeError):
        why += "; it cannot look for NVLink on PCIe cards unless a process group is given, which it is not"
    rule = f"needs GPUs that NVLink joins, and cannot open its buffers for ranks {axis.ranks} on {card} ({why})"
    problem = Problem(where="dispatch.transport", value="deepep", rule=rule, hint='use "all_to_all"')
    return ConfigError([problem], subject="the transport of a MoE layer")


class _Meeting:
    """The ranks of a group as the library asks for them (it calls this `comm`, of mpi4py): with a process group it would send pickles."""

    def __init__(self, comms: ByLibrary, axis: Axis) -> None:
        self._comms, self._axis = comms, axis

    def Get_rank(self) -> int:
        return self._axis.index

    def Get_size(self) -> int:
        return self._axis.size

    def allgather(self, value: Any) -> list[Any]:
        """Numbers, None and handles, which are byte arrays."""
        told = self._comms.gather_objects(bytes(value) if isinstance(value, bytearray) else value, self._axis)
        return [bytearray(one) if isinstance(one, bytes) else one for one in told]


class TokenTrip:
    """One dispatch, and what its way back and its gradients need.

    Within a host (up to 8 ranks) the library waits for sizes in C++ with Python's GIL held, for 100 s at most (`csrc/legacy/buffer.hpp`, `intranode_dispatch`); between hosts it lets the GIL go
    (`internode_dispatch`, `gil_scoped_release`). So while a rank waits for one that is lost no other thread of it runs: no signal, heartbeat or abort gets through, and then the library raises.
    That is why `resilience.heal` is refused with it (`plan/moe/deepep.py`), for both cases: kernels on the device that wait for a lost rank end by no abort either, but in a trap after as long.
    """

    def __init__(self, comms: ByLibrary, buffer: Any, axis: Axis, *, row_bytes: int, on_host: bool) -> None:
        self.comms, self._buffer, self._axis = comms, buffer, axis
        self._row_bytes, self._on_host = row_bytes, on_host
        self._handle: Any = None
        self._sent = self._came = 0
        """Tokens to other ranks, and from them."""

    def go(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor, *, num_experts: int, op_id: str
    ) -> TokensCame:
        """Send tokens. Waits on the host for what comes."""
        experts_TK = experts_TK.contiguous()

        def launch() -> tuple[Any, int]:
            to_rank_P, to_host, to_expert, is_in_TP, _ = self._buffer.get_dispatch_layout(experts_TK, num_experts)
            told_P = to_rank_P.to("cpu", non_blocking=True)  # behind it on the stream comes what the library waits for
            x_NH, experts_NK, weights_NK, counts, self._handle, _ = self._buffer.dispatch(  # SYNC: sizes of what comes
                x_TH.contiguous(), topk_idx=experts_TK, topk_weights=weights_TK.contiguous(), num_tokens_per_rank=to_rank_P,
                num_tokens_per_rdma_rank=to_host, is_token_in_rank=is_in_TP, num_tokens_per_expert=to_expert,
            )  # fmt: skip
            to_rank: list[int] = told_P.tolist()
            own = to_rank[self._axis.index]
            self._sent, self._came = sum(to_rank) - own, len(x_NH) - own
            choices = experts_TK.shape[1] * (experts_TK.element_size() + weights_TK.element_size())
            return (x_NH, experts_NK, weights_NK, counts), self._sent * (self._row_bytes + choices)

        x_NH, experts_NK, weights_NK, counts = self._by_library("dispatch_tokens", op_id, launch)
        return TokensCame(x_NH, weights_NK, experts_NK, tuple(counts), self, experts_TK)

    def again(self, x_TH: torch.Tensor, *, op_id: str) -> torch.Tensor:
        """Send other rows the same way: (N, H). The host does not wait."""

        def launch() -> tuple[torch.Tensor, int]:
            rows_NH, *_ = self._buffer.dispatch(x_TH.contiguous(), handle=self._handle)
            return rows_NH, self._sent * self._row_bytes

        return self._by_library("dispatch_tokens", op_id, launch)

    def back(
        self, rows_NH: torch.Tensor, weights_NK: torch.Tensor | None, *, op_id: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, H) sum of each token's rows over the ranks, and the same of (N, K) figures of its choices."""

        def launch() -> tuple[Any, int]:
            weights = None if weights_NK is None else weights_NK.contiguous()
            x_TH, weights_TK, _ = self._buffer.combine(rows_NH.contiguous(), self._handle, topk_weights=weights)
            choices = 0 if weights is None else weights.shape[1] * weights.element_size()
            return (x_TH, weights_TK), self._came * (self._row_bytes + choices)

        return self._by_library("combine_tokens", op_id, launch)

    def combine(self, rows_NH: torch.Tensor, *, op_id: str) -> torch.Tensor:
        """(T, H) sum of each token's rows over the ranks. Gradient: it is sent to all of them."""
        out: torch.Tensor = _SumTokens.apply(rows_NH, self, op_id)
        return out

    def _by_library(self, op: str, op_id: str, launch: Callable[[], tuple[T, int]]) -> T:
        return self.comms.by_library(op, self._axis, op_id, launch, on_host=self._on_host, limit_s=LIMIT_S)


def send_tokens(
    trip: TokenTrip,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    *,
    num_experts: int,
    op_id: str,
    known: TokensCame | None = None,
) -> TokensCame:
    """`Collectives.dispatch_tokens`. Gradients of tokens are sums over the ranks they went to; those of a weight come from the one rank that has its expert."""
    if known is not None:
        trip.comms.doubts.append((experts_TK != known.chosen_TK).any())
    went = [] if known is None else [known]
    x_NH, weights_NK = _SendTokens.apply(x_TH, weights_TK, experts_TK, trip, num_experts, op_id, went)
    return replace(went[0], x_NH=x_NH, weights_NK=weights_NK)


class _SendTokens(torch.autograd.Function):
    """`went`: what is known of a pass that runs again; else empty, and what came is put there."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        trip: TokenTrip,
        num_experts: int,
        op_id: str,
        went: list[TokensCame],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.trip, ctx.op_id = trip, op_id
        if went:
            return trip.again(x_TH, op_id=op_id), went[0].weights_NK.view_as(went[0].weights_NK)
        went.append(trip.go(x_TH, weights_TK, experts_TK, num_experts=num_experts, op_id=op_id))
        return went[0].x_NH, went[0].weights_NK

    @staticmethod
    def backward(ctx: Any, dx_NH: torch.Tensor, dw_NK: torch.Tensor) -> tuple[Any, ...]:
        dx_TH, dw_TK = ctx.trip.back(dx_NH, dw_NK, op_id=backward_id(ctx.op_id))
        return dx_TH, dw_TK, None, None, None, None, None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: torch.Tensor, trip: TokenTrip, op_id: str) -> torch.Tensor:
        ctx.trip, ctx.op_id = trip, op_id
        out_TH, _ = trip.back(rows_NH, None, op_id=op_id)
        return out_TH

    @staticmethod
    def backward(ctx: Any, d_TH: torch.Tensor) -> tuple[Any, ...]:
        return ctx.trip.again(d_TH, op_id=backward_id(ctx.op_id)), None, None
