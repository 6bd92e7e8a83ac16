"""The interface for type checkers: the source speaks Cython's types."""

from flintmq.kernel.lane import Block

def gather(data: bytes, salt: int, first: int, after: int) -> Block | None: ...
