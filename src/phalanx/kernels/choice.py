"""The word by which every kernel is asked for its fast or its plain version."""

from __future__ import annotations

from typing import Literal

Impl = Literal["fast", "reference"]
"""`reference` is a few plain torch operations that autograd differentiates; `fast` must agree with it."""
