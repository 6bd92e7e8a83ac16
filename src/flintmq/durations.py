"""Durations as Go writes them, `250ms` or `1h30m`, in whole nanoseconds."""

from __future__ import annotations

import re

__all__ = ["HOUR", "MICROSECOND", "MILLISECOND", "MINUTE", "SECOND", "format_duration", "parse_duration"]

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE

_UNITS = {
    "ns": 1,
    "us": MICROSECOND,
    "µs": MICROSECOND,  # U+00B5, the micro sign
    "μs": MICROSECOND,  # U+03BC, the Greek letter
    "ms": MILLISECOND,
    "s": SECOND,
    "m": MINUTE,
    "h": HOUR,
}
_DURATION_PART = re.compile(r"(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")
_INT64_MAX = 2**63 - 1


def parse_duration(text: str) -> int:
    """Return the nanoseconds of `250ms`, `1h30m`, `-1.5s` …; raises ValueError with the reason."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits == "0":
        return 0
    total = position = 0
    while position < len(digits):
        part = _DURATION_PART.match(digits, position)
        if part is None:
            break
        whole, fraction, unit = part[1], part[2] or "", part[3]
        if not unit:
            raise ValueError(f'missing unit in duration "{text}", such as 250ms, 5s or 1h30m')
        if unit not in _UNITS:
            raise ValueError(f'unknown unit "{unit}" in duration "{text}": use ns, us, ms, s, m or h')
        total += int(whole or "0") * _UNITS[unit]
        total += int(fraction or "0") * _UNITS[unit] // 10 ** len(fraction)
        position = part.end()
    if not digits or position < len(digits):
        raise ValueError(f'invalid duration "{text}": write 250ms, 5s or 1h30m')
    if total > _INT64_MAX:
        raise ValueError(f'duration "{text}" is too long')
    return -total if text.startswith("-") else total


def format_duration(nanoseconds: int) -> str:
    """Return the text Go prints, `1h0m0s`, `1.5s`, `250ms`, for the same duration."""
    size = abs(nanoseconds)
    sign = "-" if nanoseconds < 0 else ""
    if size == 0:
        return "0s"
    for unit, limit in (("ns", MICROSECOND), ("µs", MILLISECOND), ("ms", SECOND)):
        if size < limit:
            return f"{sign}{_decimal(size, limit // 1000)}{unit}"
    minutes, seconds = divmod(size, MINUTE)
    text = f"{_decimal(seconds, SECOND)}s"
    if minutes:
        hours, minutes = divmod(minutes, 60)
        text = f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
    return sign + text


def _decimal(value: int, unit: int) -> str:
    """Return `value / unit` exactly, with no trailing zeros; `unit` is a power of ten."""
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    digits = len(str(unit)) - 1
    return f"{whole}.{rest:0{digits}d}".rstrip("0")
