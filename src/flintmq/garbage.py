"""When Python looks for garbage: not while a program starts, and never in what lives as long as the program.

Imports and a start make hardly any garbage, and looking for it takes a tenth of their time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["freeze", "no_collection"]

#: Objects of a start with little to read: a collection would find next to nothing among them.
_FEW_OBJECTS = 100_000


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Do not look for garbage meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze() -> None:
    """Keep everything that is alive now out of every later collection."""
    if gc.get_count()[0] > _FEW_OBJECTS:
        gc.collect()
    gc.freeze()
