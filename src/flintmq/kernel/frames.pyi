"""The interface for type checkers: the source speaks Cython's types."""

from typing import Any, TypeVar

_D = TypeVar("_D", bound="Delivery")

PARSE_DONE: int
PARSE_MORE: int
PARSE_BAD: int

def total_size(bodies: list[bytes]) -> int: ...
def encode_mpub(line: bytes, bodies: list[bytes]) -> bytes: ...
def sum_records(data: bytearray, pos: int, stop: int, count: int, seed: int) -> int: ...
def line_records(data: bytearray, pos: int, stop: int) -> tuple[bytearray, int]: ...

class BatchParser:
    pos: int
    index: int
    size: int
    def __init__(self, pos: int) -> None: ...
    def run(self, data: bytearray, stop: int, count: int, max_size: int) -> int: ...

class Delivery:
    timestamp: int
    attempts: int
    id: bytes
    body: bytes
    source: Any
    deadline: float
    answered: bool
    kept: bool
    def __init__(self, timestamp: int, attempts: int, id: bytes, body: bytes) -> None: ...

def split_frames(
    data: bytes,
    max_size: int,
    kind: type[_D],
    source: object,
    deadline: float,
    messages: list[_D],
    others: list[tuple[int, bytes]],
) -> int: ...
