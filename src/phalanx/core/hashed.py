"""What every plan has beside its own words: a text and a hash, the same on every rank and in every run for the same decision.

Ranks compare hashes instead of exchanging plans, and folders, caches and stored results are known by them. Must never change: the bytes of the text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any


class Hashed:
    """A frozen dataclass that is known by its hash."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
