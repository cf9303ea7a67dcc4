"""What prepared data was made of, remembered in the cache by the fingerprint of its train text: so that a run that may not go on with other data is told what is other.

Decides nothing: whether data is the same is a matter of its content (`sources.identify`). Files are told by size and time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.core.config import DataConfig
from phalanx.core.reading import MalformedError, load_json, typed
from phalanx.data.cache import write_atomically
from phalanx.data.sources import Source
from phalanx.data.tokenizer import Tokenizer

MOST_FILES = 100_000
"""Files of data that is remembered."""
NAMED = 3
"""Files of each kind of change that are named."""


@dataclass(frozen=True)
class Contents:
    """Of all sources of a recipe."""

    tokenizer: str
    """Its fingerprint."""
    settings: dict[str, str]
    """Those that decide the data besides its sources."""
    files: dict[str, tuple[int, int]]
    """Size and time of the last change (ns), by path; built-in text has none."""


def remember(
    cache: Path, fingerprint: str, config: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer
) -> None:
    """Note what the train text of this fingerprint is made of, if nobody has. A cache that cannot be written, which may be complete, goes without."""
    path, found = _path(cache, fingerprint), [f for s in sources if s.kind != "builtin" for f in s.files]
    if len(found) > MOST_FILES or os.path.exists(path):
        return
    settings = {
        name: repr(getattr(config, name))
        for name in ("validation_fraction", "weights", "chat_template", "text_field", "builtin_bytes")
    }
    with contextlib.suppress(OSError):
        stats = {str(f.resolve()): f.stat() for f in found}
        files = {name: (s.st_size, s.st_mtime_ns) for name, s in stats.items()}
        write_atomically(path, json.dumps(asdict(Contents(tokenizer.fingerprint, settings, files))).encode())


def what_changed(cache: Path, before: object, now: str) -> str:
    """What differs between the data of two fingerprints, in words; empty where the cache does not know them, or nothing that it knows differs."""
    then, here = _read(cache, before), _read(cache, now)
    if then is None or here is None:
        return ""
    told = ["the tokenizer is another one"] if then.tokenizer != here.tokenizer else []
    told += [f"data.{n} was {v}" for n, v in then.settings.items() if here.settings.get(n, v) != v]
    new, gone = here.files.keys() - then.files.keys(), then.files.keys() - here.files.keys()
    both = then.files.keys() & here.files.keys()
    sized = {f for f in both if then.files[f][0] != here.files[f][0]}
    written = {f for f in both if then.files[f] != here.files[f]}
    changed = sized or (set() if new or gone else written)  # a copy of a file has another time
    each = (("changed", changed), ("new", new), ("gone", gone))
    return "; ".join([*told, *(_named(what, sorted(files)) for what, files in each if files)])


def _named(what: str, files: Sequence[str]) -> str:
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"{what}: {', '.join(files[:NAMED])}{more}"


def _path(cache: Path, fingerprint: object) -> Path:
    return cache / "contents" / f"{fingerprint}.json"


def _read(cache: Path, fingerprint: object) -> Contents | None:
    if not isinstance(fingerprint, str) or not fingerprint.isalnum():  # of a checkpoint, which says what it likes
        return None
    path = _path(cache, fingerprint)
    try:
        found: Contents = typed(load_json(path), Contents, where=str(path))
    except (OSError, MalformedError):
        return None
    return found
