"""A second stream of a device, on which messages travel while the current one computes.

    current stream   ... make what is sent | post | compute ........................ | order | use what has come ...
                                              \\ event                                ^ event
    message stream                            [wait] group of messages ............ /

The host waits for nothing: `post` and `order` only enqueue. Decides nothing; which messages are a group and in which order groups are posted is `plan/moe/overlap/tiles/rounds.py`'s.

Memory. A device's allocator gives freed memory out again at once to whatever is allocated on the same stream, knowing nothing of other streams. So (1) a group begins behind everything that the current stream
had been given before: also what still used the memory of its receive buffers; (2) `Posted` holds the tensors of the group until `order`, behind which the current stream may use their memory
for other things. `record_stream` would do the second too, but gives memory back at times that nobody chooses (pytorch #132292).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.core.errors import ConfigError, Problem, RunError
from phalanx.runtime.comm import Axis, Collectives, Message


@dataclass(eq=False)
class Posted:
    """A group of messages under way."""

    done: Any
    """The event of its end."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """What it reads and writes, until the current stream has been ordered behind it."""


class CudaStreams:
    """The streams of one CUDA device. Steps of ranks that share one have run there (gpu-check C1); never timed on several.

    NCCL's kernels run on a stream that the process group owns; torch orders it behind the stream on which messages are posted, and `wait` orders that one behind NCCL's. So the
    message stream here does nothing but stand between the two, without holding up the stream that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._messages = torch.cuda.Stream(device)
        self.left_free = 0
        """Multiprocessors that products leave to messages (`leaving_free`); may change from pass to pass."""

    def post(
        self,
        comms: Collectives,
        sends: Sequence[Message],
        receives: Sequence[Message],
        axis: Axis,
        *,
        op_id: str = "",
    ) -> Posted:
        """Exchange the messages as one group, behind all groups posted before and behind all that the current stream has been given so far. Returns at once, as `order` does."""
        self._messages.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._messages):
            comms.start_exchange(sends, receives, axis, op_id=op_id).wait()
            done = self._messages.record_event()
        return Posted(done, [message.tensor for message in (*sends, *receives)])

    def order(self, posted: Posted) -> None:
        """What the current stream is given from here on comes behind the group."""
        torch.cuda.current_stream().wait_event(posted.done)
        posted.kept.clear()


def message_streams_of(comms: Collectives, device: torch.device) -> CudaStreams | None:
    """Streams of the device whose messages go by `comms`, made at the first call; None on a host. What is set as
    `comms.message_streams` before is taken."""
    if comms.message_streams is None and device.type == "cuda":
        comms.message_streams = CudaStreams(device)
    found: CudaStreams | None = comms.message_streams
    return found


def leave_free(comms: Collectives, device: torch.device, *, multiprocessors: int) -> None:
    """Products inside layers leave so many multiprocessors to messages from here on, whose groups have as many thread blocks (`build_groups`).

    Raises `ConfigError` where the device has no more than that, and what `leaving_free` raises, so that a run hears it before its first step.
    """
    streams = message_streams_of(comms, device)
    if streams is None:
        rule = f"a GPU, and this is {device.type}"
        problem = Problem(where="dispatch.left_free", value=multiprocessors, rule=rule)
        raise ConfigError([problem], subject="the recipe")
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).multi_processor_count - 1
        if multiprocessors > most:
            rule, hint = "must leave products some of the device's multiprocessors", f"at most {most}"
            problem = Problem(where="dispatch.left_free", value=multiprocessors, rule=rule, hint=hint)
            raise ConfigError([problem], subject="the recipe")
    with leaving_free(multiprocessors):
        streams.left_free = multiprocessors


@contextmanager
def leaving_free(multiprocessors: int) -> Iterator[None]:
    """Products inside are asked to leave so many multiprocessors to others; 0 asks for nothing. For all threads of the process.

    torch calls it experimental (pytorch #147966): products that go through cuBLASLt take it as a hint. Raises `RunError` where this torch has no such call.
    """
    if not multiprocessors:
        yield
        return
    get: Callable[[], int | None] | None = getattr(torch._C, "_get_sm_carveout_experimental", None)
    put: Callable[[int | None], None] | None = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if get is None or put is None:
        text = f"left_free = {multiprocessors}: this torch has no _set_sm_carveout_experimental; 0 leaves nothing free"
        raise RunError(text)
    before = get()
    put(multiprocessors)
    try:
        yield
    finally:
        put(before)
