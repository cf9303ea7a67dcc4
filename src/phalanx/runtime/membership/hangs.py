"""Who is put out of a run although his process exists: workers that say nothing, and workers that stand still while others wait for them.

    silent   no heartbeat for `limit_s`: the process is stopped, or holds Python's lock
    still    its heartbeats say that its own thread neither comes on nor waits (`runtime/comm/progress.py`), for `hang_s`, or for `PAUSES` times as long as the
             longest pause that a sound step of its host has had; and others wait for it meanwhile. At places that may take long (reading
             a checkpoint, the first step of a generation) for half of `timeout_s`, and nowhere longer: the others' collectives end then as well

Decides nothing about workers that have ended: they are lost. Must never change: where so many hosts (on one machine: ranks) are silent or still at once that what they hold may be
nobody else's, nobody is put out for `wait_s`. A laptop that was closed, or a file system that stands, stops all of them and kills none: nor the last one to wake up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.runtime.membership.worker import Worker

PAUSES = 10.0
"""So many times its host's longest sound pause must a worker be still: under load every thread gets a share of its core, and a pause grows by as much."""


@dataclass(frozen=True, kw_only=True)
class HangRule:
    """Bounds, in seconds."""

    limit_s: float = 3.0
    hang_s: float = 30.0
    timeout_s: float = 600.0
    wait_s: float = 600.0
    f: int = 2
    """Hosts (on one machine: ranks) that hold each piece of state at least."""


@dataclass(frozen=True)
class OtherHosts:
    """What other hosts of the generation say of their workers."""

    hosts: int = 0
    quiet: int = 0
    """Hosts among them that are silent, or have a worker that is silent or still."""
    waits_s: float = 0.0
    """Longest time for which a worker there has waited."""


def longest_wait_s(workers: Sequence[Worker], now: float) -> float:
    """For how long the one of them that has waited longest has waited for others."""
    return max((now - w.waits_since_s for w in workers if w.waits_since_s), default=0.0)


class Hangs:
    """The workers of one host. All times are of `time.monotonic`."""

    def __init__(self, rule: HangRule) -> None:
        self.rule = rule
        self.awaited = ""
        """Why nobody is put out for now; empty where nobody is awaited."""
        self._since_s = self._together_s = 0.0
        """When too many were quiet first, and when several were at once last."""
        self._put_out = 0
        """Workers that were put out since the last step: what they held is not held as often again yet."""

    def bound_s(self, worker: Worker, workers: Sequence[Worker]) -> float:
        """How long it may be still while others wait: inside a step never longer than elsewhere."""
        longest_s = self.rule.timeout_s / 2
        if not worker.quick:
            return longest_s
        return max(self.rule.hang_s, min(longest_s, PAUSES * max(w.pause_s for w in workers)))

    def quiet(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        """Those that hold state and have been silent or still for half of what they may. All that stopped at one moment are in it when the first of them is found."""
        return [
            w
            for w in workers
            if not w.joins
            and (
                now - w.last_read_s > self.rule.limit_s / 2
                or (w.still_since_s and now - w.still_since_s > self.bound_s(w, workers) / 2)
            )
        ]

    def put_out(
        self, workers: Sequence[Worker], others: OtherHosts, now: float | None = None, *, f: int | None = None
    ) -> dict[Worker, str]:
        """Those that the run is to continue without, and why. `workers`: members of the run that were not put out before. `f`: holders of each piece of state now,
        where they are fewer than the rule's."""
        now = time.monotonic() if now is None else now
        found = {w: why for w in workers if (why := self._trouble(w, workers, others, now))}
        quiet = self.quiet(workers, now)
        if not quiet:
            self._since_s, self.awaited = 0.0, ""
        if not found:
            self._say_all_still(workers, now)
            return {}
        if self._may_be_last(quiet, workers, others, now, self.rule.f if f is None else f) or self._wake_up(now):
            return {}
        self._put_out += len(found)
        return found

    def _wake_up(self, now: float) -> bool:
        """Whether they were awaited until a moment ago: what stopped all of them is over, and not all come back at once."""
        waits = self._since_s and now - self._since_s < self.rule.wait_s
        return bool(waits) and now - self._together_s < self.rule.limit_s

    def stepped(self) -> None:
        """A step was committed: what those had that were put out before is held as often as it should be again."""
        self._put_out = 0

    def _say_all_still(self, workers: Sequence[Worker], now: float) -> None:
        """All stand still and none waits, as on a file system that does not answer: there is nobody to go on without them."""
        if workers and all(w.still_since_s and now - w.still_since_s > self.bound_s(w, workers) for w in workers):
            places = "; ".join(dict.fromkeys(w.stands or "place unknown" for w in workers))
            self.awaited = f"all {len(workers)} ranks of this host stand still ({places}): they are waited for"

    def _trouble(self, worker: Worker, workers: Sequence[Worker], others: OtherHosts, now: float) -> str:
        silent_s = now - worker.last_read_s
        if silent_s > self.rule.limit_s:
            return f"was silent for {silent_s:.1f} s"
        bound_s = self.bound_s(worker, workers)
        still_s = now - worker.still_since_s if worker.still_since_s else 0.0
        waits_s = max(longest_wait_s([w for w in workers if w is not worker], now), others.waits_s)
        if still_s > bound_s and waits_s > bound_s / 2:
            return (
                f"made no progress for {still_s:.1f} s while others waited for it ({worker.stands or 'place unknown'})"
            )
        return ""

    def _may_be_last(
        self, quiet: Sequence[Worker], workers: Sequence[Worker], others: OtherHosts, now: float, f: int
    ) -> bool:
        """Whether so many are quiet at once that what they hold may be nobody else's, and they were not awaited for `wait_s` yet."""
        here = min(1, len(quiet)) if others.hosts else len(quiet) + self._put_out
        hosts = others.hosts + 1 if others.hosts else len(workers) + self._put_out
        if here + others.quiet < min(f, hosts):
            return False
        self._since_s = self._since_s or now
        self._together_s = now if len(quiet) + others.quiet > 1 else self._together_s
        names = ", ".join(w.uid for w in quiet)
        what = "hosts are" if others.hosts else "ranks are"
        self.awaited = (
            f"{here + others.quiet} of {hosts} {what} silent or still at once (here {names}), and what they hold may be nobody else's: "
            f"nobody is removed for {self.rule.wait_s:g} s (resilience.wait_s)"
        )
        return now - self._since_s < self.rule.wait_s
