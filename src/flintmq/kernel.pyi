"""The kernel's interface, for type checkers: its source speaks Cython's types."""

from array import array
from mmap import mmap
from typing import Any, TypeVar

_D = TypeVar("_D", bound="Delivery")
Buffer = bytes | bytearray | array[int]

COMPILED: bool
FRAME_OVERHEAD: int
SCAN_DONE: int
SCAN_MORE: int
SCAN_BAD: int
ALL: int
FULL: int
OTHER: int
FAILED: int
NOTHING: int

def send_each(fds: list[int], frame: bytes) -> list[tuple[int, int]]: ...
def populate(memory: list[mmap]) -> None: ...
def line_records(data: bytearray, pos: int, stop: int) -> tuple[bytearray, int]: ...

class Scan:
    pos: int
    index: int
    size: int
    def __init__(self, pos: int) -> None: ...
    def run(self, data: bytearray, stop: int, count: int, max_size: int) -> int: ...

class Block:
    buf: bytearray | mmap
    view: memoryview
    size: int
    used: int
    base: int
    count: int
    pos: int
    start: int
    stop: int
    def __init__(self, size: int, base: int, buf: bytearray | mmap | None = None) -> None: ...
    def recycle(self, base: int) -> bool: ...
    def fill(
        self,
        data: bytearray,
        pos: int,
        stop: int,
        count: int,
        ident: int,
        timestamp: int,
        attempts: int,
        max_bytes: int,
    ) -> int: ...
    def checksum(self, value: int, start: int, stop: int) -> int: ...
    def adopt(self, used: int, count: int) -> bool: ...
    def cut_back(self, count: int) -> int: ...
    def find(self, seq: int) -> int: ...
    def index(self, offset: int) -> int: ...
    def cut(self, seq: int, max_count: int, max_bytes: int) -> int: ...

def gather(data: bytes, salt: int, first: int, after: int) -> Block | None: ...

class Intake:
    index: int
    size: int
    wrote: int
    error: int
    unwritten: int
    unanswered: list[int]
    left: list[tuple[int, int]]
    def __init__(self, data: bytearray, line: bytes, ok: bytes, max_size: int, max_body: int) -> None: ...
    def run(
        self,
        block: Block,
        fds: list[int],
        counts: list[int],
        start: int,
        ident: int,
        timestamp: int,
        write_at: int,
        budget: int,
        room: int,
        file: int,
        offset: int,
        salt: int,
        prefix: int,
        answer: bool,
    ) -> int: ...

class Ring:
    lo: int
    hi: int
    count: int
    finished: int
    limit: int
    received: int
    sent: int
    def __init__(self) -> None: ...
    @property
    def window(self) -> int: ...
    def reset(self, seq: int) -> None: ...
    def deliver(self, first: int, count: int, owner: int) -> int: ...
    def send_run(self, block: Block, first: int, max_count: int, max_bytes: int, owner: int, fd: int) -> int: ...
    def owner(self, seq: int) -> int: ...
    def release(self, seq: int) -> int: ...
    def finish_run(self, data: bytearray, pos: int, stop: int, owner: int, prefix: int) -> int: ...
    def finish_from_socket(self, fd: int, data: bytearray, owner: int, prefix: int) -> int: ...
    def add_done(self, first: int, stop: int) -> None: ...
    def take_done(self) -> bytes: ...
    def held(self, first: int, stop: int) -> list[tuple[int, int]]: ...

class Heap:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...
    def first_due(self) -> int: ...
    def first_seq(self, start: int = 0) -> int: ...
    def count_between(self, first: int, stop: int) -> int: ...
    def between(self, first: int, stop: int) -> list[tuple[int, int]]: ...
    def items(self) -> list[tuple[int, int]]: ...
    def earliest(self, count: int, due: int, seq: int) -> list[tuple[int, int]]: ...
    def remove(self, seq: int) -> int: ...
    def push(self, due: int, seq: int) -> int: ...
    def pop(self) -> int: ...

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
def frame_columns(
    data: bytes | bytearray | memoryview, pos: int, stop: int, max_rows: int, max_bytes: int
) -> tuple[int, int, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer]: ...
