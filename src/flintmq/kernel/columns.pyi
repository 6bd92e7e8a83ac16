"""The interface for type checkers: the source speaks Cython's types."""

from array import array

Buffer = bytes | bytearray | array[int]

def frame_columns(
    data: bytes | bytearray | memoryview, pos: int, stop: int, max_rows: int, max_bytes: int
) -> tuple[int, int, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer, Buffer]: ...
