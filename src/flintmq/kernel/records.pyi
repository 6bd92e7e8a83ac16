"""The interface for type checkers: the source speaks Cython's types."""

from array import array

from flintmq.kernel.lane import Block

def gather(data: bytes, salt: int, first: int, after: int) -> Block | None: ...
def whole_groups(data: bytes, salt: int, seq: int, stop: int) -> tuple[int, int]: ...
def resalted(data: bytes, salt: int, other: int) -> bytes | None: ...

class RecordParser:
    seq: int
    stop: int
    indexed: int
    index: list[tuple[int, int, int]]
    deferrals: array[int]
    extras: list[tuple[int, int, int, bytes]]
    def __init__(self, salt: int, seq: int, stop: int, step: int) -> None: ...
    def parse(self, data: bytes, offset: int) -> int: ...
