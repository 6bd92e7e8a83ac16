"""Messages of a log that are no longer in memory: where they stand in the files, and how they are read back.

A Reader owns what is being read, what could not be read, and the extra bytes that were read last. One function,
``read``, reads a chunk of a file in a thread, for channels, readers and searches alike. Where very many channels read
from different places, each gets a part of its chunk: see ``Cold``. A chunk that a channel waits for is tried several
times with a pause in between, then its messages are given up as damaged; a missing descriptor does not count as a try.
"""

from __future__ import annotations

import errno
import functools
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq.broker.storage.cold import MARK_BYTES, Cold
from flintmq.broker.storage.disk import READ
from flintmq.broker.storage.keys import KeyBlock
from flintmq.broker.storage.memory import ExtraRow, extra_of
from flintmq.broker.storage.segment import (
    CHUNK_BYTES,
    Entry,
    Segment,
    decode_chunk,
    extras_in_chunk,
    part_of,
    read_keys,
    read_records,
    record_size,
    records_in,
    seq_in_chunk,
    timestamp_of,
)
from flintmq.broker.storage.store import NO_DESCRIPTOR, Store
from flintmq.errors import DamageError, StorageError
from flintmq.kernel import Block

if TYPE_CHECKING:
    from flintmq.broker.storage.log import Log

__all__ = ["READ_TRIES", "Place", "Reader", "Submit"]

logger = logging.getLogger(__name__)

#: Tries, and seconds between them, before the messages of a chunk that the device refuses are given up.
READ_TRIES, READ_PAUSE = 10, 1.0
#: Chunks of a log whose extra bytes are remembered once they were read.
_EXTRA_CHUNKS = 4
#: Records of deferred messages that are looked at together.
DEFERRALS = 10_000

T = TypeVar("T")

#: Runs the first in a thread, then calls the second with its result or its error, as ``Disk.submit`` does.
Submit = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
#: Where a message stands: its seq, its segment, the number of its chunk.
Place = tuple[int, Segment, int]
#: What a channel waits for: blocks or extra bytes, of which chunk, from which offset on.
_Key = tuple[str, Segment, int, int]
#: A block that was read, what could not be read, where records begin.
_Found = tuple[Block | None, list[tuple[int, int]], list[tuple[int, int]]]


@dataclass(slots=True)
class _Part:
    """The part of a chunk that is read for ``seq``: where it begins, with which seq, and its size.

    ``stop`` and ``after`` are where the chunk ends, and the seq there; ``room`` is how many bytes are kept of it.
    """

    offset: int
    first: int
    size: int
    stop: int
    after: int
    seq: int
    room: int


class Reader:
    def __init__(self, log: Log, store: Store, arrived: Callable[[Collection[object] | None], None]) -> None:
        self._log = log
        self._store = store
        self._cold: Cold = store.cold
        self._disk = store.disk
        # Called when something that was wanted was read, or given up, with the cursors that wait for it.
        self._arrived = arrived
        # What is being read or waits for its next try, the cursors that wait for it and what each wants; how often each
        # was tried in vain.
        self._reading: dict[_Key, dict[object, int]] = {}
        self._failures: dict[_Key, int] = {}
        # What each cursor asked for last, and the read that it waits for as long as that is in ``_reading``.
        self._asked: dict[object, tuple[int, _Key, dict[object, int]]] = {}
        # Extra bytes by segment and chunk: up to which seq they are known, and those of each record.
        self._extras: OrderedDict[tuple[Segment, int], tuple[int, list[ExtraRow]]] = OrderedDict()
        #: Seqs that could not be read.
        self.damaged: list[tuple[int, int]] = []
        #: Seqs of files that could not be made sense of at all.
        self.set_aside: list[tuple[int, int]] = []

    # --- The one way to read ---------------------------------------------------------------------------------------

    def read(
        self,
        segment: Segment,
        chunk: int,
        decode: Callable[[bytes, int, int], T],
        done: Callable[[T | None, BaseException | None], None],
        submit: Submit | None = None,
    ) -> None:
        """Read a chunk in a thread and make something of it: ``decode(bytes, first seq, seq after its last)``.

        ``done`` gets that, or the error. OSError, StorageError: the file cannot be opened now; ``done`` is not called.
        """
        offset, size, first, after = self.extent(segment, chunk)
        disk = self._disk
        self._run(segment, lambda fd: decode(disk.read(fd, size, offset), first, after), done, submit or self._submit)

    def _run(
        self,
        segment: Segment,
        read: Callable[[int], T],
        done: Callable[[T | None, BaseException | None], None],
        submit: Submit,
        *,
        keep_open: bool = False,
    ) -> None:
        """Call ``read`` with the segment's open file in a thread. ``keep_open``: more of it will be read soon."""
        log = self._log
        fd = log.pin(segment)

        def work() -> T:
            return read(fd)

        def finished(result: T | None, error: BaseException | None) -> None:
            log.unpin(segment, keep_open=keep_open)
            done(result, error)

        try:
            submit(work, finished)
        except BaseException:
            log.unpin(segment, keep_open=keep_open)
            raise

    def _submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._disk.submit(work, done, READ)

    # --- For channels ----------------------------------------------------------------------------------------------

    def block(self, seq: int, cursor: object = None) -> Block | None:
        """Return the block that holds ``seq``. None: it is being read back. DamageError: it cannot be.

        ``cursor`` goes on from there in order; all that ask without one share one.
        """
        cold = self._cold
        if cursor is None:
            cursor = self
        # A consumer that takes its messages one by one asks for the same block again and again.
        last = cold.places.get(cursor)
        if last is not None:
            block = last.block
            if block.base <= seq < block.base + block.count:
                last.used = True
                return block
        asked = self._asked.get(cursor)
        if asked is not None and asked[0] == seq and self._reading.get(asked[1]) is asked[2]:
            # A consumer that finishes messages meanwhile asks each time.
            return None
        segment, chunk = self.place(seq)
        found = cold.find(segment, seq)
        if found is not None:
            cold.enter(cursor, found)
            # By the time this block is sent the next one is there.
            self._read_ahead(segment, chunk, cursor)
            return found.block
        cold.wait(cursor)
        key = self._want_block(segment, chunk, seq, cursor)
        wanted = self._reading.get(key)
        if wanted is not None:
            self._asked[cursor] = (seq, key, wanted)
        return None

    def leave(self, cursor: object) -> None:
        """The cursor needs nothing more."""
        self._asked.pop(cursor, None)
        self._cold.leave(cursor)

    def extra(self, seq: int) -> bytes | None:
        """Return the extra bytes of the record that ``seq`` is in. None, DamageError: as with ``block``."""
        segment, chunk = self.place(seq)
        if not segment.extras:
            return b""
        known = self._extras.get((segment, chunk))
        if known is not None and seq < known[0]:
            return extra_of(known[1], seq)
        self._want_extras(segment, chunk)
        return None

    def _read_ahead(self, segment: Segment, chunk: int, cursor: object) -> None:
        """Have the next chunk read for a cursor that has just come to this one, if there is room for both."""
        cold = self._cold
        if cold.room < 2 * CHUNK_BYTES:
            return
        if chunk + 1 < len(segment.index_seqs):
            seq = segment.index_seqs[chunk + 1]
            if cold.find(segment, seq) is None:
                self._want_block(segment, chunk + 1, seq, cursor)
        elif segment.sealed:
            segments = self._log.segments
            i = segments.index(segment) + 1
            if i < len(segments) and segments[i].index_seqs and not self._log.in_memory(segments[i].base):
                if cold.find(segments[i], segments[i].base) is None:
                    self._want_block(segments[i], 0, segments[i].base, cursor)

    def _want_block(self, segment: Segment, chunk: int, seq: int, cursor: object) -> _Key:
        """Read the block that holds ``seq``, unless it is being read; return what names the read."""
        # What a thread is still writing is not there yet, and is not damaged.
        written = self._log.written
        cold, disk = self._cold, self._disk
        part = self._part(segment, chunk, seq)

        def read(fd: int) -> _Found:
            found = None if part.size == part.stop - part.offset else self._read_part(fd, segment, part)
            if found is not None:
                return found
            # All that is left of the chunk. What cannot be made sense of is damaged.
            data = disk.read(fd, part.stop - part.offset, part.offset)
            block, damage = decode_chunk(data, segment.salt, part.first, part.after, seq)
            marks: list[tuple[int, int]] = []
            if block is not None and part.room < part.stop - part.offset:
                marks = records_in(data, segment.salt, part.first, part.after, part.offset, MARK_BYTES)[1]
                block = part_of(block, seq, part.room, marks)
            return block, damage, marks

        def take(result: _Found, wanted: dict[object, int]) -> None:
            block, damage, marks = result
            if block is not None:
                stop = block.base + block.count
                cold.keep(segment, block, [who for who, seq in wanted.items() if block.base <= seq < stop])
            if marks:
                cold.mark(segment, chunk, marks)
            self._note_damage(segment, damage, written)

        key: _Key = ("block", segment, chunk, part.offset)
        self._want(key, (part.first, part.after), read, take, cursor, seq)
        return key

    def _part(self, segment: Segment, chunk: int, seq: int) -> _Part:
        """Plan what to read for ``seq``: the chunk, or a part of it where each cursor can keep no more than that."""
        offset, size, first, after = self.extent(segment, chunk)
        stop = offset + size
        room = self._cold.room
        if size <= room:
            return _Part(offset, first, size, stop, after, seq, size)
        # Parts of one size, instead of a small one at the end.
        room = -(-size // -(-size // room))
        before, behind = self._cold.around(segment, chunk, seq)
        if before is not None and before[0] >= first:
            first, offset = before
        least = 0
        if behind is not None and offset < behind[1] <= stop:
            least = behind[1] - offset
        elif seq > first:
            # How far it is to the message is a guess, by the size of those in between.
            least = (seq - first) * (stop - offset) // (after - first) * 5 // 4 + MARK_BYTES
        return _Part(offset, first, min(stop - offset, max(least, room)), stop, after, seq, room)

    def _read_part(self, fd: int, segment: Segment, part: _Part) -> _Found | None:
        """Read a part of a chunk; None if the message is not in a whole record of it. Runs in a thread."""
        disk = self._disk
        data = disk.read(fd, part.size, part.offset)
        size, marks = records_in(data, segment.salt, part.first, part.after, part.offset, MARK_BYTES)
        if not size:
            # The first record alone is larger, or damaged.
            more = record_size(data) - len(data)
            if 0 < more <= part.stop - part.offset - len(data):
                data += disk.read(fd, more, part.offset + len(data))
                size, marks = records_in(data, segment.salt, part.first, part.after, part.offset, MARK_BYTES)
        after = marks[-1][0]
        if after <= part.seq:
            return None
        block, damage = decode_chunk(data[:size], segment.salt, part.first, after, part.seq)
        if block is None or damage:
            return None
        return part_of(block, part.seq, part.room, marks), [], marks

    def _want_extras(self, segment: Segment, chunk: int) -> None:
        offset, size, first, after = self.extent(segment, chunk)
        disk = self._disk

        def read(fd: int) -> list[ExtraRow]:
            return extras_in_chunk(disk.read(fd, size, offset), segment.salt, first, after)

        def take(rows: list[ExtraRow], _: dict[object, int]) -> None:
            self._extras[segment, chunk] = (after, rows)
            self._extras.move_to_end((segment, chunk))
            while len(self._extras) > _EXTRA_CHUNKS:
                self._extras.popitem(last=False)

        self._want(("extras", segment, chunk, offset), (first, after), read, take, self, first)

    def _want(
        self,
        key: _Key,
        lost: tuple[int, int],
        read: Callable[[int], T],
        take: Callable[[T, dict[object, int]], None],
        cursor: object,
        seq: int,
    ) -> None:
        """Read what a cursor waits for, unless it is being read; call ``arrived`` when it is there, or given up.

        ``lost`` is what counts as damaged then.
        """
        log = self._log
        if log.closed or self._disk.closing:
            return
        wanted = self._reading.get(key)
        if wanted is not None:
            wanted[cursor] = seq
            return
        wanted = {cursor: seq}
        segment = key[1]

        def done(result: T | None, error: BaseException | None) -> None:
            self._reading.pop(key, None)
            if log.closed or segment not in log.segments:
                return
            if isinstance(error, OSError):
                if not self._retried(key, lost, wanted, error):
                    self._tell(wanted)
                return
            if error is not None or result is None:
                self._store.fatal(error or StorageError("no result"))
                return
            self._failures.pop(key, None)
            take(result, wanted)
            self._tell(wanted)

        try:
            self._run(segment, read, done, self._submit, keep_open=True)
        except OSError as exc:
            if not self._retried(key, lost, wanted, exc):
                # The one who asked is told to wait.
                self._store.delay(0, functools.partial(self._tell, wanted))
        else:
            self._reading[key] = wanted

    def _tell(self, wanted: dict[object, int]) -> None:
        """What these cursors wait for is there, or given up."""
        self._arrived(None if self in wanted else wanted)

    def _retried(self, key: _Key, lost: tuple[int, int], wanted: dict[object, int], error: OSError) -> bool:
        """Try again after a pause; False if the chunk is given up instead."""
        segment = key[1]
        logger.error("LOG(%s): cannot read %s - %s", self._log.name, segment.path, error)
        if error.errno not in NO_DESCRIPTOR:
            self._failures[key] = failures = self._failures.get(key, 0) + 1
            if failures >= READ_TRIES:
                del self._failures[key]
                first, after = lost
                segment.damaged.append((first, min(after, max(first, self._log.written))))
                return False
        # It may pass: nothing is given up for it, the channel waits.
        self._reading[key] = wanted
        self._store.delay(READ_PAUSE, functools.partial(self._try_again, key))
        return True

    def _try_again(self, key: _Key) -> None:
        wanted = self._reading.pop(key, {})
        if not self._log.closed and key[1] in self._log.segments:
            self._tell(wanted)

    def forget(self, segment: Segment) -> None:
        """The segment is removed."""
        self._cold.forget(segment)
        for key in [key for key in self._extras if key[0] is segment]:
            del self._extras[key]
        for failed in [key for key in self._failures if key[1] is segment]:
            del self._failures[failed]

    # --- For others ------------------------------------------------------------------------------------------------

    def look(self, seq: int, then: Callable[[Block | None, BaseException | None], None]) -> Block | None:
        """Return the block that holds ``seq`` if it is at hand. None: ``then`` gets it, or an error.

        What is read for it is kept nowhere, so that consumers still find what was read for them.
        """
        segment, chunk = self.place(seq)
        found = self._cold.find(segment, seq)
        if found is not None:
            return found.block
        self.read_from((seq, segment, chunk), seq + 1, self._submit, then, note=False)
        return None

    def read_from(
        self,
        place: Place,
        stop: int,
        submit: Submit,
        then: Callable[[Block | None, BaseException | None], None],
        *,
        note: bool = True,
    ) -> None:
        """Read what ``place_from`` found, and what follows it in its chunk, checked, for somebody who is no channel.

        ``submit`` runs it in a thread. ``then`` gets a block that holds the message, or the error: a DamageError if
        it cannot be read. Nothing from ``stop`` on is looked at. OSError, StorageError: the file cannot be read now.
        """
        seq, segment, chunk = place

        def decode(data: bytes, first: int, after: int) -> tuple[Block | None, list[tuple[int, int]]]:
            return decode_chunk(data, segment.salt, first, after, seq)

        def done(result: tuple[Block | None, list[tuple[int, int]]] | None, error: BaseException | None) -> None:
            if result is None:
                then(None, error)
                return
            block, damage = result
            if note:
                self._note_damage(segment, damage, stop)
            if block is None or not block.base <= seq < block.base + block.count:
                last = next((b for a, b in damage if a <= seq < b), seq + 1)
                then(None, self.damage_error(seq, min(last, stop)))
            else:
                then(block, None)

        self.read(segment, chunk, decode, done, submit)

    def seq_at(self, time: int, blocks: list[Block], then: Callable[[int, BaseException | None], None]) -> None:
        """Call ``then`` with the first seq that was published at or after ``time``: see ``Log.seq_at``.

        ``blocks`` are those in memory that lead up to the end.
        """
        start = blocks[0].base if blocks else self._log.end
        # The chunk of the files that begins too early, right before one that does not or that is in memory.
        before: tuple[Segment, int] | None = None
        for segment in self._log.segments:
            cold = bisect_left(segment.index_seqs, start)
            late = bisect_left(segment.index_times, time, 0, cold)
            if late:
                before = segment, late - 1
            if late < cold:
                start = segment.index_seqs[late]
                break
        else:
            if blocks and (before is None or timestamp_of(blocks[0].view) < time):
                then(_seq_in_memory(blocks, time), None)
                return
        if before is None:
            then(start, None)
            return
        segment, chunk = before

        def decode(data: bytes, first: int, after: int) -> int:
            seq = seq_in_chunk(data, segment.salt, first, after, time)
            return seq if seq < min(after, start) else start

        def done(seq: int | None, error: BaseException | None) -> None:
            then(start if seq is None else seq, error)

        try:
            self.read(segment, chunk, decode, done)
        except (OSError, StorageError) as exc:
            then(start, exc)

    # --- Where messages stand --------------------------------------------------------------------------------------

    def extent(self, segment: Segment, chunk: int) -> tuple[int, int, int, int]:
        """Return where a chunk stands: its offset and size; and its seqs: the first, and the one after its last."""
        offset = segment.index_offsets[chunk]
        first = segment.index_seqs[chunk]
        if chunk + 1 == len(segment.index_offsets):
            return offset, segment.size - offset, first, segment.end
        return offset, segment.index_offsets[chunk + 1] - offset, first, segment.index_seqs[chunk + 1]

    def place(self, seq: int) -> tuple[Segment, int]:
        """Return in which segment and chunk ``seq`` is written; DamageError if in none."""
        name, segments = self._log.name, self._log.segments
        low = bisect_right(segments, seq, key=_base)
        after = segments[low].base if low < len(segments) else self._log.end
        if low == 0:
            raise DamageError(f"LOG({name}): seq {seq} is gone", seq, max(after, seq + 1))
        segment = segments[low - 1]
        for first, stop in segment.damaged:
            if first <= seq < stop:
                raise DamageError(f"LOG({name}): seq {seq} is damaged in {segment.path}", seq, stop)
        i = bisect_right(segment.spans, seq)
        if i % 2 == 0:
            stop = segment.spans[i] if i < len(segment.spans) else after
            raise DamageError(f"LOG({name}): seq {seq} was never written", seq, max(stop, seq + 1))
        return segment, bisect_right(segment.index_seqs, seq) - 1

    def place_from(self, seq: int, stop: int) -> Place | None:
        """Return the place of the first message from ``seq`` on and before ``stop``. None if there is none.

        Seqs that no message ever had are passed over. DamageError if messages there are known to be lost, StorageError
        if the log is closed.
        """
        if self._log.closed:
            raise StorageError(f"LOG({self._log.name}): closed")
        found: Place | None = None
        for segment in self.segments_from(seq):
            if segment.base >= stop:
                break
            k = bisect_right(segment.spans, seq)
            if k < len(segment.spans):
                first = seq if k % 2 else segment.spans[k]
                if first < stop:
                    found = first, segment, bisect_right(segment.index_seqs, first) - 1
                break
        lost = self.first_lost(seq, found[0] + 1 if found is not None else stop)
        if lost is not None:
            raise self.damage_error(lost[0], min(lost[1], stop))
        return found

    def segments_from(self, seq: int) -> list[Segment]:
        """Return the segment that holds ``seq``, if any does, and those after it."""
        segments = self._log.segments
        return segments[max(0, bisect_right(segments, seq, key=_base) - 1) :]

    def lost(self) -> list[tuple[int, int]]:
        """Return all that is known to be lost, in no order."""
        found = list(self.set_aside)
        for segment in self._log.segments:
            found += segment.damaged + segment.lost
        return found

    def first_lost(self, first: int, stop: int) -> tuple[int, int] | None:
        """Return the first of ``first`` … ``stop - 1`` that are known to be lost."""
        lost = list(self.set_aside)
        for segment in self.segments_from(first):
            if segment.base >= stop:
                break
            if segment.damaged or segment.lost:
                lost += segment.damaged + segment.lost
        met = [(max(a, first), b) for a, b in lost if a < stop and b > first]
        return min(met) if met else None

    def measure(self, first: int, stop: int) -> tuple[int, int]:
        """Return how many messages of ``first`` … ``stop - 1`` are in files, and about how many bytes they take."""
        count = size = 0
        for segment in self.segments_from(first):
            if segment.base >= stop:
                break
            count += sum(b - a for a, b in segment.present(first, stop))
            size += segment.offset_of(stop) - segment.offset_of(first)
        return count, size

    def damage_error(self, first: int, stop: int) -> DamageError:
        return DamageError(f"LOG({self._log.name}): seqs {first} to {stop - 1} cannot be read", first, stop)

    def _note_damage(self, segment: Segment, damage: list[tuple[int, int]], stop: int) -> None:
        """Remember, and log, which seqs before ``stop`` could not be read."""
        for first, last in damage:
            for a, b in segment.present(first, min(last, stop)):
                if (a, b) not in segment.damaged:
                    logger.error(
                        "LOG(%s): seqs %d to %d in %s do not match their checksum",
                        self._log.name,
                        a,
                        b - 1,
                        segment.path,
                    )
                    segment.damaged.append((a, b))
                    self.damaged.append((a, b))

    def deferrals(self, pumped: int = 0) -> Iterator[tuple[array[int], array[int]]]:
        """Yield the seqs of deferred messages in the files and when they are due, on this boot's clock.

        Those before ``pumped`` that are due are left out: they wait as any other. At most ``DEFERRALS`` records are
        looked at for each yield.
        """
        now, wall = self._store.clock.now(), self._store.clock.wall()
        boot = self._store.clock.boot_id()
        for segment in tuple(self._log.segments):
            for at in range(0, len(segment.deferrals), 5 * DEFERRALS):
                rows = segment.deferrals[at : at + 5 * DEFERRALS]
                firsts, counts, started, delays, stamps = (rows[i::5] for i in range(5))
                if segment.boot != boot:
                    started = array("q", [now + stamp - wall for stamp in stamps])
                dues = array("q", map(add, started, delays))
                if max(counts) > 1:
                    seqs = array("q", chain.from_iterable(map(range, firsts, map(add, firsts, counts))))
                    dues = array("q", chain.from_iterable(map(repeat, dues, counts)))
                else:
                    seqs = firsts
                if seqs[0] < pumped and min(dues) <= now:
                    wanted = [due > now or seq >= pumped for seq, due in zip(seqs, dues, strict=True)]
                    seqs, dues = array("q", compress(seqs, wanted)), array("q", compress(dues, wanted))
                yield seqs, dues

    # --- Whole files -----------------------------------------------------------------------------------------------

    def addressed(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (first seq, count, extra bytes) of every record in the files."""
        for segment in self._log.segments:
            fd = self._log.pin(segment)
            try:
                for entry in self._entries(segment, fd):
                    yield entry.seq, entry.count, entry.extra
            finally:
                self._log.unpin(segment, keep_open=True)

    def _entries(self, segment: Segment, fd: int) -> Iterator[Entry]:
        """Yield every record of a segment."""
        for chunk in range(len(segment.index_offsets)):
            start, size, _, _ = self.extent(segment, chunk)
            for entry in read_records(self._disk.read(fd, size, start), segment.salt, 0, start, True):
                if isinstance(entry, Entry):
                    yield entry

    def keys(self, *, strict: bool = False) -> Iterator[KeyBlock]:
        """Yield the keys in the files, of the newest segment first.

        StorageError if some cannot be read. Without ``strict`` those are left out that the device cannot read.
        """
        for segment in reversed(self._log.segments):
            if not segment.key_count:
                continue
            try:
                yield self.keys_in(segment, self._store.file(segment))
            except OSError as exc:
                if strict or exc.errno != errno.EIO:
                    raise StorageError(f"the keys in {segment.path} cannot be read: {exc.strerror or exc}") from exc
                # They are forgotten: what is published again with one of them is stored again.
                logger.error("LOG(%s): the keys in %s cannot be read - %s", self._log.name, segment.path, exc)

    def keys_in(self, segment: Segment, fd: int) -> KeyBlock:
        """Return the keys in a segment. May be called in a thread."""
        keys = segment.keys
        if keys is None and segment.sealed:
            keys = read_keys(self._disk, fd, segment)
            if keys is None:
                logger.warning("LOG(%s): the keys in %s are read from its records", self._log.name, segment.path)
        if keys is None:
            # The records have them too.
            again = Segment(segment.path, segment.base, segment.salt, segment.boot)
            for entry in self._entries(segment, fd):
                if entry.extra:
                    again.note_key(entry.extra, entry.flags, entry.seq, entry.timestamp)
            keys = again.keys or KeyBlock()
        keys.cut(segment.end)
        return keys


def _base(segment: Segment) -> int:
    return segment.base


def _seq_in_memory(blocks: list[Block], time: int) -> int:
    i = bisect_left(blocks, time, key=lambda block: timestamp_of(block.view)) - 1
    if i < 0:
        return blocks[0].base
    block = blocks[i]
    seqs = range(block.base, block.base + block.count)
    return block.base + bisect_left(seqs, time, key=lambda seq: timestamp_of(block.view, block.find(seq)))
