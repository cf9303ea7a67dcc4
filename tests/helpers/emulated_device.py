"""A device of two streams, emulated on the CPU: everything torch is asked to do is put into a queue and carried out later, in any order that streams and events allow.

    with EmulatedDevice(seed) as device:      # operations of torch go to the stream "compute", messages of `device` to "messages"
        comms.message_streams = device
        ...
        device.synchronise()

What makes a forgotten event or a tensor that died too early show: memory is poisoned (all bits set: NaN, -1) by its stream when it is given out, for who had it before may still be using it
there, and again when it is given back, for somebody else may use it there next. A read that comes before its write, or after the memory was given to others, finds the poison.

What needs a value on the host (`.item()`, sizes that depend on data, collectives of the host) synchronises everything first, and is counted. Messages are exchanged by gloo when their turn comes.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from phalanx.runtime.comm.exchange import Message
from phalanx.runtime.moe.streams import Posted

ROOM_ONLY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_SIZES = threading.Lock()
"""torch registers what it knows of sizes at the first call, and not for several threads."""
READ_BY_THE_HOST = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"}


class Event:
    def __init__(self):
        self.is_over = False


class _HostReads(TorchFunctionMode):
    """Calls that read a tensor's memory without an operation."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            self.device.sync_for_host(func.__name__)
        return func(*args, **(kwargs or {}))


class EmulatedDevice(TorchDispatchMode):
    """`faults`: what to leave out, by name (see `post` and `order`)."""

    def __init__(self, seed, faults=()):
        super().__init__()
        self.random = random.Random(seed)
        self.faults = frozenset(faults)
        self.queues = {"compute": deque(), "messages": deque()}
        self.messages_first = self.random.choice((0.02, 0.5, 0.98))
        self.eager = self.random.choice((0.0, 0.3))
        self.left_free = 0
        self.host_reads = []
        self.syncs_at_posts = []
        self._raw = {}
        self._reads = _HostReads(self)

    def __enter__(self):
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._reads.__exit__(*error)

    # ---- streams -------------------------------------------------------------------------------------------------------------

    def put(self, stream, call):
        self.queues[stream].append(call)
        if self.random.random() < self.eager:
            self._step()

    def record(self, stream):
        event = Event()
        self.queues[stream].append(event)
        return event

    def wait(self, stream, event):
        self.queues[stream].append((event,))

    def _step(self):
        """One operation of one stream; whether there was any."""
        able = [name for name, queue in self.queues.items() if queue and not _is_held(queue[0])]
        if not able:
            return False
        name = able[0]
        if len(able) == 2:
            name = "messages" if self.random.random() < self.messages_first else "compute"
        call = self.queues[name].popleft()
        if isinstance(call, Event):
            call.is_over = True
        elif not isinstance(call, tuple):
            call()
        return True

    def synchronise(self):
        with _disable_current_modes(), torch.no_grad():
            while self._step():
                pass
        assert not any(self.queues.values()), "streams wait for each other"

    @property
    def host_syncs(self):
        return len(self.host_reads)

    def sync_for_host(self, why):
        self.host_reads.append(why)
        self.synchronise()

    # ---- memory --------------------------------------------------------------------------------------------------------------

    def _room(self, like):
        """A tensor of the sizes of `like` in poisoned memory that the current stream has given out."""
        items = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        raw = np.empty(items * like.element_size(), np.uint8)
        view = raw[:]
        if not items:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._raw[raw.ctypes.data] = raw
        self.put("compute", lambda: raw.fill(255))
        weakref.finalize(view, self._given_back, raw)
        storage = torch.from_numpy(view).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())

    def _given_back(self, raw):
        self.queues["compute"].append(lambda: (raw.fill(255), self._raw.pop(raw.ctypes.data, None)))

    def _alias(self, tensor):
        """The same memory, without being a use of it that its owner knows of."""
        raw = self._raw.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if raw is None:
            return tensor.detach()
        storage = torch.from_numpy(raw).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    # ---- operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if func.namespace == "c10d" or name in READ_BY_THE_HOST:
            self.sync_for_host(name)
            return func(*args, **kwargs)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return func(*args, **kwargs)  # a view
        aliased = _each(self._alias, args), {key: _each(self._alias, value) for key, value in kwargs.items()}
        if func._schema.is_mutable:
            self.put("compute", lambda: func(*aliased[0], **aliased[1]))
            return kwargs.get("out", args[0] if args else None)
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.sync_for_host(name)  # as many rows as are true
            return func(*args, **kwargs)
        with _SIZES:
            found = self._sizes(func, args, kwargs)
        out = _each(self._room, found)
        if name not in ROOM_ONLY:
            into = [self._alias(t) for t in _flat(out)]
            self.put("compute", lambda: _copy(into, _flat(func(*aliased[0], **aliased[1]))))
        return out

    @staticmethod
    def _sizes(func, args, kwargs):
        def meta(tensor):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        args, kwargs = _each(meta, args), {key: _each(meta, value) for key, value in kwargs.items()}
        if any(a.name == "device" for a in func._schema.arguments) and not (
            "like" in func._schema.name or "new_" in func._schema.name or "_to_copy" in func._schema.name
        ):
            kwargs = {**kwargs, "device": "meta"}
        elif "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})

    # ---- `phalanx.runtime.moe.streams.CudaStreams` -----------------------------------------------------------------------------------

    def post(self, comms, sends, receives, axis, *, op_id=""):
        with _disable_current_modes():
            self.syncs_at_posts.append(self.host_syncs)
            if "post without waiting" not in self.faults:
                self.wait("messages", self.record("compute"))
            sends_too = [Message(self._alias(m.tensor), m.peer) for m in sends]
            receives_too = [Message(self._alias(m.tensor), m.peer) for m in receives]
            self.put("messages", lambda: comms.start_exchange(sends_too, receives_too, axis, op_id=op_id).wait())
            kept = [] if "keep nothing" in self.faults else [m.tensor for m in (*sends, *receives)]
            return Posted(self.record("messages"), kept)

    def order(self, posted):
        if "use without waiting" not in self.faults:
            self.wait("compute", posted.done)
        posted.kept.clear()


def _each(change, value):
    """The same with every tensor changed, in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_each(change, item) for item in value) if type(value) in (list, tuple) else value


def _is_held(call):
    return isinstance(call, tuple) and not call[0].is_over


def _flat(out):
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)]


def _copy(into, found):
    for a, b in zip(into, found, strict=True):
        a.copy_(b)
