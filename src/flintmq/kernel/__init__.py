"""The hot byte loops, compiled where a C compiler was there at build time and run as they are where not.

Written in Cython's pure Python mode: one source, two forms. Each hot function holds two twins side by side, one for
the compiler and one for the interpreter. It works on buffers and numbers only and knows nothing of topics, sessions or
files. Bounds checks are dropped in single functions, after their inputs were checked.

    layout   where things stand in a frame          frames    publishes and received messages as bytes
    lane     blocks, sockets, first deliveries      heap      deadlines
    records  records of segment files               columns   frames as columns
    spans    sets of seqs as ranges

Only ``lane`` makes system calls. ``FLINTMQ_PURE=1`` asks for the interpreted form.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

_MODULES = ("lane", "frames", "heap", "columns", "records", "spans")


def _is_compiled(name: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(f"{__name__}.{name}", __path__)
    return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)


def _use_interpreted() -> None:
    """Load the sources as they stand, with a stand-in for the ``cython`` module that they import."""
    from flintmq.kernel import _cython

    real = sys.modules.get("cython")
    sys.modules["cython"] = _cython
    try:
        for name in _MODULES:
            path = os.path.join(os.path.dirname(__file__), f"{name}.py")
            spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", path)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {path}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = globals()[name] = module
            spec.loader.exec_module(module)
    finally:
        if real is None:
            del sys.modules["cython"]
        else:
            sys.modules["cython"] = real


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let ctrl-C wait while modules of Cython are imported: they lose a KeyboardInterrupt that meets them there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# All or none: a form that is half of each would be a third one.
if os.environ.get("FLINTMQ_PURE") == "1" or not all(map(_is_compiled, _MODULES)):
    _use_interpreted()
else:
    with uninterrupted():
        for _name in _MODULES:
            importlib.import_module(f"{__name__}.{_name}")

from flintmq.kernel.columns import frame_columns
from flintmq.kernel.frames import (
    PARSE_BAD,
    PARSE_DONE,
    PARSE_MORE,
    BatchParser,
    Delivery,
    encode_mpub,
    line_records,
    split_frames,
    sum_records,
    total_size,
)
from flintmq.kernel.heap import Heap
from flintmq.kernel.lane import (
    ALL,
    COMPILED,
    FAILED,
    FULL,
    NOTHING,
    OTHER,
    Block,
    Calls,
    Intake,
    Ring,
    Tail,
    populate,
    replace_calls,
    send_each,
    use_one_arena,
)
from flintmq.kernel.layout import FRAME_OVERHEAD
from flintmq.kernel.records import RecordParser, gather, resalted, whole_groups
from flintmq.kernel.spans import spans_hold, spans_of, spans_total, spans_union, spans_without

__all__ = [
    "ALL",
    "COMPILED",
    "FAILED",
    "FRAME_OVERHEAD",
    "FULL",
    "NOTHING",
    "OTHER",
    "PARSE_BAD",
    "PARSE_DONE",
    "PARSE_MORE",
    "BatchParser",
    "Block",
    "Calls",
    "Delivery",
    "Heap",
    "Intake",
    "RecordParser",
    "Ring",
    "Tail",
    "encode_mpub",
    "frame_columns",
    "gather",
    "line_records",
    "populate",
    "replace_calls",
    "resalted",
    "send_each",
    "spans_hold",
    "spans_of",
    "spans_total",
    "spans_union",
    "spans_without",
    "split_frames",
    "sum_records",
    "total_size",
    "uninterrupted",
    "use_one_arena",
    "whole_groups",
]
