"""What is different where a rank's tensors live on a GPU and its messages are NCCL's. Steps of several ranks have run on one; of recovery the first part (docs/explanation/elastic-recovery.md).

A call of gloo fails where a peer is lost. NCCL's calls return before anything has been sent, its kernels wait for a peer for ever, and an abort from another thread ends them
without an error, with arbitrary results. So in an elastic run:

    abort      all communicators of the generation are aborted at once, each by a thread of its own because one waits for another; no collective is posted afterwards
    alone      who fails by itself tells the membership service, for no kernel of the others sees its sockets shut: they abort, too (`WorkerAgent.leave_broken`)
    late       nor does a kernel end by its time, for torch only notes a communicator's error or a message's limit where it is to end no process: who sees such a note leaves the same way
               (`MembershipWatcher`), or members that all live would wait for each other for ever, as behind a link that fails
    complete   before a device's results are used, the rank synchronizes and then checks that the generation was not aborted meanwhile
    invalid    arbitrary results may cause any error: after an abort that counts as a lost peer (`runtime/membership/member.py`)
    left       an abort that does not end is left behind with its communicators, whose memory it keeps
    connect    a communicator is created in its first call, which waits for all its ranks, and which no abort ends: a member that has seen a newer generation never comes to it. So groups are
               connected when they are made, in a helper thread, which is left behind with its group
    thread     a refused message leaves the group calls open that it was posted in (torch 2.11 and 2.13: two for one of a batch, one for an all-to-all). Nothing that the thread posts afterwards, on
               any communicator, is launched before they are ended, and to end them would launch what was posted on communicators that are freed. NCCL and torch keep all of it by thread: so
               generations have a thread of their own, another one after each that ended in an error (`DeviceThread`); not each its own, because cuDNN's plans of attention are the thread's too
    stuck      any other call that no abort ends ends with its process; the supervisor starts another one
    useless    after an assertion or an illegal access on the device every later call of the process fails, and others would wait for it in vain: the process ends, too

Communicators are not shrunk (`ncclCommShrink`, behind `shrink_group` of torch 2.11 and 2.13), so that survivors would keep them:

    who        all survivors must name the same ranks. A generation is settled only once all its members have reported, and the abort is what brings them out of their kernels to do so; with
               one more loss in between the call has no end, for it creates a communicator
    which      a generation has other groups, in another order of ranks, and mostly a replacement for who was lost: a communicator cannot gain ranks in these versions, nor change their order
    parent     kernels are ended by the same flag, with results as arbitrary, and the parent must be aborted all the same (pytorch issue 194679): the step that does not end on an H200
    torch      destroys the parent instead, which hangs with NCCL from 2.31 on; keeps one backend of a group for CPU and GPU; clones the store, which one written in Python does not allow

Must never change: no member votes for a step, and none compares state, before `complete` has let it through.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, RunError
from phalanx.runtime.comm.abortable import AbortableCall, run_abortable

T = TypeVar("T")
Use = Literal["sum", "gather", "exchange"]
"""Messages for which NCCL allocates buffers of their own, at the first of each kind (`simulate/step/nccl.py`)."""
ABORT_S = 5.0
"""An abort that takes longer is left behind."""
CONNECT_S = 60.0
"""Seconds after which a communicator that is being created says so: neither NCCL nor torch limits it, and neither says anything."""
_left: list[dist.ProcessGroup] = []
"""Groups that nothing may destroy, because that would wait for their abort, or for their creation."""


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # SYNC: who calls it says why


def complete(device: torch.device, aborted: Callable[[], bool] | None) -> None:
    """Wait until what `device` has computed is there. Raises `PeerError` where the generation was aborted meanwhile: the results may be anything.

    On a CPU it does nothing: every call there has failed by itself.
    """
    if device.type == "cpu":
        return
    synchronize(device)  # SYNC: once a step, before the vote
    if aborted is not None and aborted():
        raise PeerError("the process group was aborted while the device computed; its results are discarded")


def connect(group: dist.ProcessGroup, uses: Sequence[Use], escape: AbortableCall | None = None) -> None:
    """Create the NCCL communicator of a group and its buffers for these uses; nothing is to be done for one without NCCL. Collective over the group, also for ranks that will have no part in its first messages.

    Else buffers would be allocated in the first step, when tensors have the memory. Raises `RunError` where they find none, and what `escape` does where its group epoch is aborted meanwhile: then the
    group is to be left behind (`leave_behind`).
    """
    if not nccl_backends([group]):
        return
    device = torch.device("cuda", torch.cuda.current_device())

    def first() -> None:  # in a thread whose device is the first one, where any call of CUDA would leave a context
        torch.cuda.set_device(device)
        # a stream that no later work waits for, and of a priority of which NCCL takes few: torch has 32 of each, in turn, and two groups on one would wait for each other
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            for use in uses:
                try:
                    _first_call(group, device, use)
                except RuntimeError as err:
                    if "out of memory" not in str(err):
                        raise
                    raise RunError(
                        f"NCCL finds no memory for the buffers of a group of {group.size()} ranks ({use}): lower NCCL_MAX_P2P_NCHANNELS or NCCL_BUFFSIZE, or end what else the GPU runs"
                    ) from err
        if escape is not None and escape.aborted():  # before there was anything to abort; its kernel may meet no other
            for backend in nccl_backends([group]):
                threading.Thread(target=_abort, args=(backend,), name="abort", daemon=True).start()

    with _told_where_it_is_slow(group):
        run_abortable(escape, first)


@contextlib.contextmanager
def _told_where_it_is_slow(group: dist.ProcessGroup) -> Iterator[None]:
    """The first rank of a group says which ranks it waits for, and what to look at."""
    timer = threading.Timer(CONNECT_S, _tell_slow, args=(group,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell_slow(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        text = f"NCCL has been connecting ranks {ranks} for {CONNECT_S:g} s: some have not come yet, or do not reach each other. NCCL_DEBUG=INFO shows by which network interfaces, NCCL_SOCKET_IFNAME chooses them"
        os.write(2, f"{text}\n".encode())


class DeviceThread:
    """A thread that computes and posts messages, one after another until one of them is spoiled. Its device is that of the thread that makes this."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._launch: Callable[[], None] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.is_spoiled = False
        """Set by the work itself when it fails: a message may have been refused in it, and then nothing may be posted in this thread again."""

    def __enter__(self) -> DeviceThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="generation", initializer=self._begin)
        try:
            return self._threads.submit(work).result()
        finally:
            if self.is_spoiled:
                self._end()

    def why_useless(self) -> str:
        """What the device says where an assertion failed on it or an access was illegal, as every later call of this process does. Empty where it says nothing (yet). Does not wait for the device."""
        if self._launch is None:
            return ""
        try:
            self._launch()
        except RuntimeError as err:
            return str(err).strip().partition("\n")[0]
        return ""

    def _begin(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
            self._launch = self._launch or _small_launch(self._device)

    def _end(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self._threads, self.is_spoiled = None, False


def _small_launch(device: int) -> Callable[[], None]:
    """A launch on a stream of its own, which raises what every call does once the device is of no more use. (To query a stream would hold Python's lock, and with it the threads that abort, while the
    driver frees memory for the first of them.)"""
    one, stream = torch.zeros(1, device=torch.device("cuda", device)), torch.cuda.Stream(device)

    def launch() -> None:
        with torch.cuda.stream(stream):
            one.zero_()

    return launch


def _first_call(group: dist.ProcessGroup, device: torch.device, use: Use) -> None:
    """One element is enough: an exchange connects all its channels whatever it sends. Gathers and reductions to shards take rings, as a broadcast always does (src/graph/tuning.cc); a gather of one
    element may take others where each host has one rank."""
    one = torch.zeros(1, device=device)
    if use == "sum":
        dist.all_reduce(one, group=group)
    elif use == "gather":
        dist.broadcast(one, group_src=0, group=group)
    else:
        all_N = one.expand(group.size()).contiguous()
        dist.all_to_all_single(torch.empty_like(all_N), all_N, group=group)


class DeviceAbort:
    """Aborts the NCCL communicators of groups, each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended: list[Any] = []

    def start(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Starts from any thread; returns at once. Groups without NCCL are left alone, and those that were given before."""
        with self._lock:
            new = [b for b in nccl_backends(groups) if not any(b is old for old in self._ended)]
            self._ended += new
            self._threads += [threading.Thread(target=_abort, args=(b,), name="abort", daemon=True) for b in new]
            for thread in self._threads[len(self._threads) - len(new) :]:
                thread.start()

    def finish(self) -> None:
        """Call it before groups are destroyed: waits for the aborts, and leaves behind the groups of one that does not end."""
        if not self.wait(ABORT_S):
            leave_behind()

    def wait(self, limit_s: float) -> bool:
        """Waits until all aborts have ended, for `limit_s` at most; returns whether they have."""
        end_s = time.monotonic() + limit_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def nccl_backends(groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    """Backends of those groups that have one."""
    if not dist.is_nccl_available():
        return []
    found = []
    for group in groups:
        with contextlib.suppress(RuntimeError):  # none for this device
            backend: Any = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def nccl_options(message_ctas: int) -> Any:
    """Options of a group of few thread blocks, None for 0. Its kernels go before others that wait for a multiprocessor: they are few, and others wait for what they bring.

    Raises `RunError` where this torch has no NCCL.
    """
    if not message_ctas:
        return None
    if not dist.is_nccl_available():
        raise RunError(f"message_ctas = {message_ctas}: this torch has no NCCL, whose thread blocks it would limit")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = message_ctas
    return options


def leave_behind() -> None:
    """Keep torch's groups of NCCL, and keep torch from destroying them, which would wait for a call in one of them."""
    names = dist.distributed_c10d._world.pg_names
    left = [group for group in names if nccl_backends([group])]
    _left.extend(left)
    for group in left:
        del names[group]


def _abort(backend: Any) -> None:
    """NCCL's abort of a communicator may wait for kernels of others to end (pytorch issue 119797), and torch's runs in yet another thread, which no group call around it reaches."""
    with contextlib.suppress(RuntimeError):  # what it complains about is being ended
        backend.abort()
