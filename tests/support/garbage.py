"""Collecting what is left of brokers that tests let die."""

from __future__ import annotations

import gc

_GROWTH_PAGES = (600 << 20) // 4096
_resident = 0


def collect_if_grown() -> None:
    """A dead broker holds megabytes in a few objects, far too few for the collector to come by itself."""
    global _resident
    if _pages() > _resident + _GROWTH_PAGES:
        gc.collect()
        _resident = _pages()


def _pages() -> int:
    """How much of this process is in memory; 0 where that cannot be asked."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])
    except OSError:
        return 0
