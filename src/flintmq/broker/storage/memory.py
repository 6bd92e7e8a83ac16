"""The messages of a log that are in memory.

A Memory owns two kinds of blocks. ``blocks`` hold consecutive seqs, each begins where the one before it ends, and the
last one, ``active``, ends at the log's end: it is the only block that is ever written to. ``pinned`` holds older blocks
that stay behind because memory is the only place to get one of their messages from. Nothing is ever added to them.

Which blocks leave, and why, is decided by the log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flintmq.kernel import Block

__all__ = ["ExtraRow", "Memory", "Pinned", "extra_of"]

#: Pinned blocks that one call of ``unpin`` finds to be pinned still before it stops. The next call goes on there.
LOOKS_IN_VAIN = 4

#: Extra bytes of a record: its first seq, the seq after its last, the bytes.
ExtraRow = tuple[int, int, bytes]


@dataclass(slots=True)
class Pinned:
    """A block that stays behind, and what is known about its messages beside their frames."""

    block: Block
    extras: list[ExtraRow] = field(default_factory=list)
    #: Of its deferred messages: seq, when due by the wall clock. Seqs ascend. Only of those that are in no file.
    delays: list[tuple[int, int]] = field(default_factory=list)


class Memory:
    __slots__ = (
        "_next_look",
        "_pinned_bases",
        "active",
        "bases",
        "blocks",
        "bytes",
        "extras",
        "pinned",
        "pinned_count",
    )

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.bases: list[int] = []
        #: The block that ends at the log's end: the last of ``blocks``.
        self.active: Block | None = None
        #: Extra bytes of the records in ``blocks``, in seq order.
        self.extras: deque[ExtraRow] = deque()
        #: Bytes of all blocks, pinned ones included.
        self.bytes = 0
        # Blocks that stay behind, in seq order, their base seqs, how many messages they hold, which is looked at next.
        self.pinned: list[Pinned] = []
        self._pinned_bases: list[int] = []
        self.pinned_count = 0
        self._next_look = 0

    def count(self, end: int) -> int:
        """Return how many messages are in memory, in a log that ends at ``end``."""
        return self.pinned_count + (end - self.bases[0] if self.bases else 0)

    def find(self, seq: int) -> Block | None:
        """Return the block that holds ``seq``, if there is one."""
        i = bisect_right(self.bases, seq) - 1
        if i >= 0:
            block = self.blocks[i]
            if seq < block.base + block.count:
                return block
        return self.find_pinned(seq) if self.pinned else None

    def find_pinned(self, seq: int) -> Block | None:
        pinned = self._pinned(seq)
        return None if pinned is None else pinned.block

    def _pinned(self, seq: int) -> Pinned | None:
        i = bisect_right(self._pinned_bases, seq) - 1
        if i >= 0:
            pinned = self.pinned[i]
            if seq < pinned.block.base + pinned.block.count:
                return pinned
        return None

    def extra(self, seq: int) -> bytes:
        """Return the extra bytes of a message that is in memory."""
        pinned = self._pinned(seq) if self.pinned else None
        return extra_of(self.extras if pinned is None else pinned.extras, seq)

    def delays(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (seq, when due) of the deferred messages in pinned blocks that are in no file."""
        # Asked for single messages, of which there may be very many: neither blocks nor messages are gone through.
        start, after = bisect_right(self._pinned_bases, first) - 1, bisect_left(self._pinned_bases, stop)
        for pinned in self.pinned[max(0, start) : after]:
            delays = pinned.delays
            yield from delays[bisect_left(delays, (first,)) : bisect_left(delays, (stop,))]

    def all_blocks(self) -> list[Block]:
        """Return every block that holds a message, in seq order. There may be holes between them."""
        return [block for block in (*(pinned.block for pinned in self.pinned), *self.blocks) if block.count]

    # --- Coming and leaving ----------------------------------------------------------------------------------------

    def add(self, block: Block) -> Block | None:
        """Add an empty block that begins at the log's end. Return the one it replaces: empty too, and too small."""
        empty = self.active if self.active is not None and not self.active.count else None
        if empty is not None:
            self.bytes -= self.blocks.pop().size
            self.bases.pop()
        self.blocks.append(block)
        self.bases.append(block.base)
        self.bytes += block.size
        self.active = block
        return empty

    def cut_back(self, seq: int) -> None:
        """Forget everything from ``seq`` on; the log ends there from now on."""
        while self.blocks and self.blocks[-1].base >= seq:
            self.bytes -= self.blocks.pop().size
            self.bases.pop()
        self.active = self.blocks[-1] if self.blocks else None
        if self.active is not None:
            self.active.cut_back(seq - self.active.base)
        while self.extras and self.extras[-1][0] >= seq:
            self.extras.pop()

    def drop(self, count: int, pins: Sequence[Pinned]) -> None:
        """Remove the first ``count`` blocks; those in ``pins`` stay behind as pinned ones."""
        kept = {pinned.block.base: pinned for pinned in pins}
        for block in self.blocks[:count]:
            stop = block.base + block.count
            pinned = kept.get(block.base)
            rows: list[ExtraRow] = []
            while self.extras and self.extras[0][0] < stop:
                rows.append(self.extras.popleft())
            if pinned is None:
                self.bytes -= block.size
            else:
                pinned.extras = rows
                self.pinned.append(pinned)
                self._pinned_bases.append(block.base)
                self.pinned_count += block.count
        del self.blocks[:count], self.bases[:count]
        if not self.blocks:
            self.active = None

    def unpin(self, needed: Callable[[int, int], bool]) -> list[Block]:
        """Remove pinned blocks that are not ``needed(first, stop)`` any more and return them.

        Somebody may hold thousands: only some are looked at, the next call goes on from there.
        """
        removed: list[Block] = []
        looks = len(self.pinned)
        vain = 0
        while looks and vain < LOOKS_IN_VAIN:
            looks -= 1
            i = self._next_look if self._next_look < len(self.pinned) else 0
            block = self.pinned[i].block
            if needed(block.base, block.base + block.count):
                vain += 1
                self._next_look = i + 1
                continue
            self._next_look = i
            del self.pinned[i], self._pinned_bases[i]
            self.pinned_count -= block.count
            self.bytes -= block.size
            removed.append(block)
        return removed

    def clear(self) -> None:
        self.blocks.clear()
        self.bases.clear()
        self.active = None
        self.pinned.clear()
        self._pinned_bases.clear()
        self.pinned_count = 0


def extra_of(extras: Sequence[ExtraRow], seq: int) -> bytes:
    """Return the bytes kept with ``seq`` in an ascending list of rows."""
    i = bisect_right(extras, seq, key=lambda row: row[0]) - 1
    return extras[i][2] if i >= 0 and seq < extras[i][1] else b""
