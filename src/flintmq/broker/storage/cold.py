"""What was read back from files: blocks of messages, within a budget of bytes, and the cursors that are in them.

A cursor is whoever reads a log in order and stays in a block for a while, mostly a channel. A Cold keeps the block that
a cursor is in until the cursor has passed it: evicted before that, it would have to be read again for each message of a
consumer that takes one at a time. Blocks that no cursor is in stay as long as there is room, for cursors that follow.

The more blocks are in use, the smaller are those that are read, so that all of them fit (``room``). A part of a chunk
can be read where it is known at which offset a record begins: these marks are remembered here, too. Nothing here knows
of files or threads.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable

from flintmq.broker.storage.segment import Segment
from flintmq.kernel import Block

__all__ = ["IDLE", "LEAST_ROOM", "MARK_BYTES", "Cold", "Kept"]

#: Bytes that a cursor may keep, however many there are: from here on they no longer fit, and blocks are read again.
LEAST_ROOM = 16 << 10
#: Bytes between two marks of a chunk, unless a record is larger.
MARK_BYTES = 32 << 10
#: Chunks whose marks are remembered, and marks of one chunk; a mark is 16 bytes.
_MARKED_CHUNKS, _MOST_MARKS = 4096, 64
#: Nanoseconds without a question after which a cursor's block counts as one that nobody is in.
IDLE = 120_000_000_000


class Kept:
    """A block that was read back, who is in it, and whether anybody has asked for it since the last look."""

    __slots__ = ("block", "cursors", "seen", "segment", "used")

    def __init__(self, segment: Segment, block: Block) -> None:
        self.segment = segment
        self.block = block
        #: Those who are in it, or for whom it was read. A dict, because it has an order.
        self.cursors: dict[object, None] = {}
        self.used = False
        self.seen = 0


class Cold:
    """See the module's text. ``budget`` is in bytes; the last two blocks stay, whatever their size."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        #: Bytes of all blocks, and of those in use.
        self.bytes = 0
        self._in_use = 0
        # Bytes of the budget that are lent to logs.
        self._lent = 0
        # By segment, in seq order: the bases of the blocks, and the blocks. None lies within another.
        self._by_segment: dict[Segment, tuple[list[int], list[Kept]]] = {}
        # Blocks that somebody is in, and the others; each in the order in which they became that.
        self._held: OrderedDict[Kept, None] = OrderedDict()
        self._free: OrderedDict[Kept, None] = OrderedDict()
        #: The block that each cursor is in, and the one that was read for it and where it has not come to yet.
        self.places: dict[object, Kept] = {}
        self._ahead: dict[object, Kept] = {}
        # Cursors that wait for a block.
        self._waiting: dict[object, None] = {}
        # By segment and number of the chunk: seqs that a record begins with, and where it stands.
        self._marks: OrderedDict[tuple[Segment, int], tuple[array[int], array[int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._free)

    @property
    def room(self) -> int:
        """Bytes that each block may have so that those in use, and those that are waited for, fit together."""
        blocks = len(self._held) + len(self._waiting)
        return max(LEAST_ROOM, (self._budget - self._lent) // (blocks or 1))

    # --- Blocks ----------------------------------------------------------------------------------------------------

    def find(self, segment: Segment, seq: int) -> Kept | None:
        """Return the block that holds ``seq``, if there is one."""
        found = self._by_segment.get(segment)
        if found is None:
            return None
        i = bisect_right(found[0], seq) - 1
        if i < 0:
            return None
        kept = found[1][i]
        return kept if seq < kept.block.base + kept.block.count else None

    def keep(self, segment: Segment, block: Block, cursors: Iterable[object]) -> None:
        """Keep what was read for these cursors."""
        bases, row = self._by_segment.setdefault(segment, ([], []))
        stop = block.base + block.count
        i = bisect_right(bases, block.base)
        if i and row[i - 1].block.base + row[i - 1].block.count >= stop:
            # It was read twice.
            return
        i = bisect_left(bases, block.base)
        kept = Kept(segment, block)
        while i < len(row) and row[i].block.base + row[i].block.count <= stop:
            # It is a part of what was read now.
            within = row[i]
            kept.cursors.update(within.cursors)
            for places in (self.places, self._ahead):
                places.update({cursor: kept for cursor in within.cursors if places.get(cursor) is within})
            self._drop(within)
        if segment not in self._by_segment:
            self._by_segment[segment] = (bases, row)
        bases.insert(i, block.base)
        row.insert(i, kept)
        self.bytes += block.size
        for cursor in cursors:
            self._give_up_ahead(cursor)
            self._ahead[cursor] = kept
            kept.cursors[cursor] = None
        if kept.cursors:
            self._held[kept] = None
            self._in_use += block.size
        else:
            self._free[kept] = None
        self._shrink()

    def enter(self, cursor: object, kept: Kept) -> None:
        """The cursor is in this block from here on, and has passed the one before."""
        self.leave(cursor)
        if not kept.cursors:
            del self._free[kept]
            self._held[kept] = None
            self._in_use += kept.block.size
        self.places[cursor] = kept
        kept.cursors[cursor] = None
        kept.used = True

    def wait(self, cursor: object) -> None:
        """The cursor needs a block that has to be read; the one that it was in is behind it."""
        self.leave(cursor)
        self._waiting[cursor] = None

    def leave(self, cursor: object) -> None:
        """The cursor needs nothing of what is here."""
        self._waiting.pop(cursor, None)
        kept = self.places.pop(cursor, None)
        if kept is not None:
            self._pass(kept, cursor)
        self._give_up_ahead(cursor)

    def _give_up_ahead(self, cursor: object) -> None:
        kept = self._ahead.pop(cursor, None)
        if kept is not None:
            self._pass(kept, cursor)

    def _pass(self, kept: Kept, cursor: object) -> None:
        kept.cursors.pop(cursor, None)
        if not kept.cursors and kept in self._held:
            del self._held[kept]
            self._in_use -= kept.block.size
            self._free[kept] = None

    def _shrink(self) -> None:
        """Let blocks go until the rest fits: those that nobody is in first, then those that were not asked for."""
        while self.bytes + self._lent > self._budget and len(self._held) + len(self._free) > 2:
            kept = next(iter(self._free)) if self._free else self._least_used()
            self._drop(kept)

    def _least_used(self) -> Kept:
        newest = next(reversed(self._held))
        for kept in self._held:
            # Whoever has waited for the newest one has had no time to ask for it.
            if not kept.used and kept is not newest:
                return kept
        for kept in self._held:
            kept.used = False
        return next(iter(self._held))

    def _drop(self, kept: Kept) -> None:
        """Remove a block from all tables."""
        bases, row = self._by_segment[kept.segment]
        i = bisect_left(bases, kept.block.base)
        del bases[i], row[i]
        if not row:
            del self._by_segment[kept.segment]
        self.bytes -= kept.block.size
        if kept in self._held:
            del self._held[kept]
            self._in_use -= kept.block.size
        else:
            del self._free[kept]
        for cursor in kept.cursors:
            for places in (self.places, self._ahead):
                if places.get(cursor) is kept:
                    del places[cursor]

    def tidy(self, now: int) -> None:
        """Called now and then: a block that nobody has asked for in a long time is free to be evicted."""
        # Who still waits asks again.
        self._waiting.clear()
        for kept in list(self._held):
            if kept.used or not kept.seen:
                kept.used = False
                kept.seen = now
            elif now - kept.seen >= IDLE:
                for cursor in list(kept.cursors):
                    self.leave(cursor)

    def lend(self, before: int, size: int) -> bool:
        """May a log hold ``size`` bytes, more than its own limit? ``before``: what it was lent so far.

        What one log is lent another cannot have, nor the cache: cursors keep the blocks that they are in.
        """
        lent = self._lent - before + size
        if size and lent + self._in_use > self._budget:
            return False
        self._lent = lent
        self._shrink()
        return True

    def forget(self, segment: Segment) -> None:
        """The segment is removed, or its log is closed."""
        for kept in self._by_segment.get(segment, ([], ()))[1][:]:
            self._drop(kept)
        for chunk in range(len(segment.index_seqs)):
            self._marks.pop((segment, chunk), None)

    def clear(self) -> None:
        self._by_segment.clear()
        self._held.clear()
        self._free.clear()
        self.places.clear()
        self._ahead.clear()
        self._waiting.clear()
        self._marks.clear()
        self.bytes = self._in_use = 0

    # --- Marks -----------------------------------------------------------------------------------------------------

    def mark(self, segment: Segment, chunk: int, marks: Iterable[tuple[int, int]]) -> None:
        """Remember where records of a chunk begin: their first seqs and their offsets."""
        seqs, offsets = self._marks.setdefault((segment, chunk), (array("q"), array("q")))
        self._marks.move_to_end((segment, chunk))
        for seq, offset in marks:
            i = bisect_left(seqs, seq)
            if i == len(seqs) or seqs[i] != seq:
                seqs.insert(i, seq)
                offsets.insert(i, offset)
        if len(seqs) > _MOST_MARKS:
            # Every other one is enough: cursors that read from everywhere bring more and more of them.
            del seqs[1::2], offsets[1::2]
        while len(self._marks) > _MARKED_CHUNKS:
            self._marks.popitem(last=False)

    def around(self, segment: Segment, chunk: int, seq: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return the last mark up to ``seq`` and the first beyond it, as seq and offset; None where there is none."""
        marks = self._marks.get((segment, chunk))
        if marks is None:
            return None, None
        seqs, offsets = marks
        i = bisect_right(seqs, seq)
        before = (seqs[i - 1], offsets[i - 1]) if i else None
        return before, ((seqs[i], offsets[i]) if i < len(seqs) else None)
