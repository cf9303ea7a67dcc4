"""Numbers as people read them: bytes, counts, seconds, rates; and bytes as people write them.

Bytes use powers of 1024 (KiB, MiB, GiB), everything else powers of 1000. Three significant digits, never scientific notation.
"""

from __future__ import annotations

import math
import re

from phalanx.core.errors import Problem

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?([eE][+-]?\d+)?)\s*(?P<unit>[kmgt]?bit)?(/s|ps)?", re.IGNORECASE)


_RATE_FACTORS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SHORT_SCALE = ("", "K", "M", "B", "T")


def _scaled(value: float, base: float, steps: int) -> tuple[float, int]:
    """`value` divided by the largest power of `base` that leaves at least 1, rounding up into the next power where it would show."""
    power = 0
    while power < steps - 1 and abs(value) >= base * (1 - 5e-4):
        value /= base
        power += 1
    return value, power


def _digits(value: float) -> str:
    """Three significant digits, whole numbers from 100 on."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def format_bytes(num_bytes: float) -> str:
    """`format_bytes(1536) == '1.50 KiB'`."""
    value, power = _scaled(num_bytes, 1024.0, len(_BINARY))
    return f"{num_bytes:.0f} B" if power == 0 else f"{_digits(value)} {_BINARY[power]}"


def format_count(count: float) -> str:
    """Things that are counted, in thousands, millions, billions: `format_count(46_702_792_704) == '46.7B'`."""
    value, power = _scaled(count, 1000.0, len(_SHORT_SCALE))
    whole = power == 0 and float(count).is_integer()
    return f"{count:.0f}" if whole else f"{_digits(value)}{_SHORT_SCALE[power]}"


def format_rate(per_s: float, unit: str) -> str:
    """`format_rate(2.2e12, 'FLOP') == '2.20 TFLOP/s'`; `unit` is what is counted."""
    value, power = _scaled(per_s, 1000.0, len(_DECIMAL))
    return f"{_digits(value)} {_DECIMAL[power]}{unit}/s"


def format_seconds(seconds: float) -> str:
    """Formats nanoseconds to days, in two neighbouring units at most: `format_seconds(3725) == '1 h 02 min'`."""
    if not math.isfinite(seconds):
        return "unknown"
    sign, s = ("-" if seconds < 0 else ""), abs(seconds)
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (0.9995, 1e3, "ms")):
        if 0 < s < limit:
            return f"{sign}{_digits(s * factor)} {unit}"
    if s < 59.95:
        return f"{sign}{_digits(s)} s"
    whole = round(s)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{sign}{days} d {hours:02d} h"


_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>([kmgt]i?)?b?)", re.IGNORECASE)
_BYTE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def read_bytes(text: str) -> int | None:
    """A number of bytes from `256MB`, `1.5 GiB`, `1000`; None where it is none, or none above 0."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    count = float(match["number"]) * _BYTE_UNITS[match["unit"].lower().removesuffix("b")]
    return int(count) if 1 <= count < 2**63 else None


def read_rate(text: object, *, where: str) -> tuple[float, Problem | None]:
    """The rate, or a problem for a list of problems. Bytes are refused: a link that is 8 times off is no small mistake."""
    match = _RATE.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool) or not 0 < float(match["number"]) < 1e24:
        rule = "is not a rate in bits per second above 0"
        return 1.0, Problem(where=where, value=text, rule=rule, hint="write 1gbit, 200mbit or 1e9")
    return float(match["number"]) * _RATE_FACTORS[(match["unit"] or "").lower()], None
