"""A `torch.distributed` store on top of `Keys`, so that process groups meet at the membership service whatever it is (etcd has no store in torch
but through a client that speaks its old interface).

Values are bytes and travel as base64. `add` repeats create-if-absent until its number is free, which is correct with any number of writers.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.runtime.membership.keys import MEETINGS, Keys

WAIT_S = 3.0
SUMS = "store-sum/"


class KeysStore(dist.Store):
    """As much of a store as gloo and `init_process_group` use."""

    def __init__(self, keys: Keys, *, timeout_s: float = WAIT_S) -> None:
        super().__init__()
        self.keys = keys
        self.timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.keys.put(f"{MEETINGS}{key}", base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return base64.b64decode(self.keys.get(f"{MEETINGS}{key}") or "")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, amount: int) -> int:
        """The sum after the addition. The N-th addition to a key is a key of its own that holds the sum so far."""
        total, number, mark = 0, 0, secrets.token_hex(8)
        while True:
            place = f"{SUMS}{key}/{number}"
            found = self.keys.create(place, f"{total + amount} {mark}") if amount else self.keys.get(place)
            if found is None:
                return total
            total, number = int(found.split()[0]), number + 1
            if found.endswith(mark):
                return total

    def check(self, keys: Sequence[str]) -> bool:
        return self.keys.all_there([f"{MEETINGS}{k}" for k in keys])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Only from nothing: what process groups use."""
        if expected not in ("", b""):
            raise NotImplementedError("this store sets a value only where none stands")
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        return base64.b64decode(self.keys.create(f"{MEETINGS}{key}", base64.b64encode(data).decode()))

    def delete_key(self, key: str) -> bool:
        self.keys.delete(f"{MEETINGS}{key}")
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end_s = time.monotonic() + (self.timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            if not self.keys.wait(f"{MEETINGS}{key}", max(0.0, end_s - time.monotonic())):
                raise LookupError(f"{key} was not set within {self.timeout_s:g} s")

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)
