"""New inputs from old ones: what a fuzzer without coverage can do. The same seed gives the same inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["mutations"]

#: Numbers at the edges of what fields can hold, as they stand in fields.
_EDGES = [
    number.to_bytes(size, order, signed=number < 0)
    for size in (1, 2, 4, 8)
    for number in (0, 1, -1, (1 << 8 * size - 1) - 1, -(1 << 8 * size - 1), 16, 64, 100)
    for order in ("big", "little")
] + [b"0", b"-1", b"9" * 20, b"9" * 5000, b"1e999", b"\n", b"\r\n", b" ", b"\x00", b"\xff" * 4, b"{", b"[" * 200, b'"']


def mutations(corpus: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """Yield ``count`` inputs, each a few steps away from one of the corpus."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            _STEPS[rng.randrange(len(_STEPS))](rng, data, corpus)
        yield bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def _flip(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _insert(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))


def _edge(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    edge = rng.choice(_EDGES)
    at = _place(rng, data)
    data[at : at + rng.choice((0, len(edge)))] = edge


def _delete(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice((1, 2, 4, 16, 64))]


def _cut(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _repeat(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = _place(rng, data)
    part = data[at : at + rng.choice((1, 4, 16, 64))]
    data[at:at] = part * rng.choice((1, 2, 8))


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    at = rng.randrange(len(other) + 1)
    data[_place(rng, data) :] = other[at : at + 1024]


_STEPS = (_flip, _flip, _byte, _byte, _insert, _edge, _edge, _delete, _cut, _repeat, _splice)
