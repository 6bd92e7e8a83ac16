"""Work that is done in slices, in slices of a few: so that everything else happens in between, in small tests too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flintmq.broker.delivery import channel, give_back, in_flight, seek, slices, snapshot, topic
from flintmq.broker.storage import journal, syncer

#: Where each number of entries that are handled in one go is kept.
SIZES = (
    (topic, "HAND_AT_ONCE"),
    (seek, "SLICE"),
    (snapshot, "PART"),
    (snapshot, "CHUNK"),
    (slices, "FREE_AT_ONCE"),
    (in_flight, "LOOK_AT_ONCE"),
    (give_back, "LOOK_AT_ONCE"),
    (channel, "DROP_AT_ONCE"),
    (channel, "EXPIRE_AT_ONCE"),
    (journal, "_SLICE"),
    (syncer, "FILES_AT_ONCE"),
)


@contextmanager
def small_slices(size: int) -> Iterator[None]:
    """Handle ``size`` entries in one go, wherever work is done in slices; 0 leaves everything as it is."""
    before = [getattr(module, name) for module, name in SIZES]
    for module, name in SIZES if size else ():
        setattr(module, name, size)
    try:
        yield
    finally:
        for (module, name), value in zip(SIZES, before, strict=True):
            setattr(module, name, value)
