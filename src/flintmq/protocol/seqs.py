"""Message ids and the seqs in them.

    id   16 lower-case hex digits of 64 bits: node id (10 bits), seq (54 bits)

The prefix of a node is its id moved to its place; an id is that prefix and a seq. Clients treat ids as opaque.
"""

from __future__ import annotations

import re

__all__ = ["SEQ_BITS", "SEQ_MASK", "format_id", "parse_id", "seq_of"]

SEQ_BITS = 54
SEQ_MASK = (1 << SEQ_BITS) - 1

_hex_id = re.compile(rb"[0-9a-f]{16}")


def format_id(prefix: int, seq: int) -> bytes:
    """Return the id of a message."""
    return b"%016x" % (prefix | seq)


def parse_id(text: bytes, prefix: int) -> int:
    """Return the seq of a message id of this node; -1 if no message of this node can have this id."""
    if _hex_id.fullmatch(text) is None:
        return -1
    seq = int(text, 16) ^ prefix
    return seq if seq <= SEQ_MASK else -1


def seq_of(id: str | bytes) -> int:
    """Return the seq of a message id, whatever its node."""
    return int(id, 16) & SEQ_MASK
