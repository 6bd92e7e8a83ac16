"""The interface for type checkers: the source speaks Cython's types."""

from array import array

from flintmq.kernel.lane import Block

def gather(data: bytes, salt: int, first: int, after: int) -> Block | None: ...

class RecordParser:
    seq: int
    stop: int
    indexed: int
    index: list[tuple[int, int, int]]
    deferrals: array[int]
    def __init__(self, salt: int, seq: int, stop: int, step: int) -> None: ...
    def parse(self, data: bytes, at: int, offset: int) -> int: ...
