"""Ranges of a topic's log, straight from its files, for those who read it without being a channel.

A ``Fetch`` is one range on its way to one reader. It finds out before the first byte goes how far the answer will
reach; then it reads one chunk of a file after the other, in a thread, checks it, and hands out what lies in the range,
as frames ready to be sent. It reads one chunk ahead of the one that is being sent and nothing else, so that a reader
that is slow or does nothing costs two chunks of memory. The segment it is at cannot be removed meanwhile.

``Fetches`` are all those of a broker. Few of them read at once, so that they do not take the disk and its threads from
publishers and consumers: a turn is one read, never the time that a reader takes to receive it. Their number has a limit
for the memory's sake. When it is reached, the reader that has taken nothing for the longest time is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

from flintmq.broker.storage.disk import FETCH, Disk
from flintmq.broker.storage.log import Log
from flintmq.broker.storage.reader import Place
from flintmq.broker.storage.segment import Segment
from flintmq.errors import DamageError, StorageError
from flintmq.kernel import FRAME_OVERHEAD, Block, frame_columns
from flintmq.kernel.layout import ATTEMPTS_AT, ID_AT, TIMESTAMP_AT, TYPE_MESSAGE

__all__ = ["Fetch", "Fetches"]

logger = logging.getLogger(__name__)

#: Ranges that are sent at once; others wait. Each may hold two chunks in memory.
AT_ONCE = 128
#: Seconds without taking anything after which a reader is disconnected, if others wait.
STALLED = 5.0
#: Ranges that read at once.
READS_AT_ONCE = 2
#: One range may be planned up to this size, however much is asked for.
MOST_BYTES = 1 << 30
#: Bytes of bodies that columns can hold; a chunk has far less.
_MOST_BODIES = (1 << 31) - 1
_EMPTY_FRAME = (FRAME_OVERHEAD - 4).to_bytes(4, "big") + TYPE_MESSAGE.to_bytes(4, "big") + bytes(FRAME_OVERHEAD - 8)


class Fetches:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[Fetch, None] = {}
        # Who waits for one of them to end.
        self._entering: deque[asyncio.Future[None]] = deque()
        self._reading = 0
        self._waiting: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()

    async def enter(self, fetch: Fetch) -> None:
        """Return when the fetch may begin."""
        loop = asyncio.get_running_loop()
        while len(self._open) >= AT_ONCE:
            stalled = min(self._open, key=lambda one: one.given)
            left = min(stalled.given + STALLED - loop.time(), STALLED)
            if left <= 0:
                stalled.cut()
                self._open.pop(stalled, None)
                break
            entering: asyncio.Future[None] = loop.create_future()
            self._entering.append(entering)
            await asyncio.wait([entering], timeout=left)
            entering.cancel()
        self._open[fetch] = None

    def leave(self, fetch: Fetch) -> None:
        """The fetch has ended."""
        self._open.pop(fetch, None)
        while self._entering:
            entering = self._entering.popleft()
            if not entering.done():
                entering.set_result(None)
                break

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Read something in a thread, when it is its turn."""
        if self._reading >= READS_AT_ONCE:
            self._waiting.append((work, done))
            return
        self._disk.submit(work, functools.partial(self._done, done), FETCH)
        self._reading += 1

    def _done(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        self._reading -= 1
        if self._waiting:
            following = self._waiting.popleft()
            if self._disk.closing:
                following[1](None, StorageError("the broker stops"))
            else:
                self.submit(*following)
        done(result, error)


def without_bodies(frames: memoryview) -> memoryview:
    """The same frames, each with an empty body."""
    columns = frame_columns(frames, 0, len(frames), max(1, len(frames) // FRAME_OVERHEAD), _MOST_BODIES)
    rows, stop, _, stamps, _, attempts, ids, _, _ = columns
    if stop != len(frames):
        raise StorageError("what was read does not end with a message")
    # One frame, as many times as there are messages; then each byte that is not the same in all of them.
    made = bytearray(_EMPTY_FRAME * rows)
    for place, column, width, skip in (
        (TIMESTAMP_AT, _big_endian("q", stamps), 8, 0),
        (ATTEMPTS_AT, _big_endian("i", attempts), 4, 2),
        (ID_AT, ids, 16, 0),
    ):
        for number in range(skip, width):
            made[place + number - skip :: FRAME_OVERHEAD] = column[number::width]
    return memoryview(made)


def _big_endian(kind: str, column: Any) -> bytes:
    numbers = array(kind, bytes(column))
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


class Fetch:
    """The messages ``first`` … ``stop - 1`` of a log, all of them durable, or as many as ``most`` bytes hold.

    ``open`` says how far it goes; then the frames are iterated over. ``aclose`` ends it in any case. Errors of ``open``
    are DamageError for what cannot be read any more, OSError or StorageError for what cannot be read now; later ones
    are ConnectionError, because all that can be done about them is to hang up.
    """

    def __init__(
        self, fetches: Fetches, storage: Log, first: int, stop: int, most: int, *, bodies: bool = True
    ) -> None:
        self._fetches = fetches
        self._bodies = bodies
        self._log = storage
        self._stop = stop
        self._most = min(most, MOST_BYTES)
        #: The first seq that is not covered.
        self.next = stop
        # The frames that are sent next, the seq behind them, and what is being read meanwhile.
        self._frames: memoryview | None = None
        self._seq = first
        self._ahead: asyncio.Future[Block] | None = None
        # Who sends it.
        self._task: asyncio.Task[Any] | None = None
        #: The loop's time when the reader was given what it has not taken yet; infinite while it is not its turn.
        self.given = inf
        # The segment that must stay.
        self._segment: Segment | None = None

    async def open(self) -> None:
        """Read the first chunk and decide how far to go."""
        self._task = asyncio.current_task()
        await self._fetches.enter(self)
        place = self._log.reader.place_from(self._seq, self._stop)
        if place is None:
            return
        seq, segment, chunk = place
        block = await self._read(place)
        end = min(self._stop, block.base + block.count)
        self._take(block, seq, end, self._most)
        if self._seq < end or end < min(self._stop, self._log.reader.extent(segment, chunk)[3]):
            # That is enough; or the rest of the chunk is not all there: whoever asks on from here learns it.
            self.next = self._seq
        else:
            self.next = self._reach(segment, chunk + 1)
            lost = self._log.reader.first_lost(self._seq, self.next)
            if lost is not None:
                self.next = lost[0]
        with contextlib.suppress(DamageError):
            if self._log.reader.place_from(self.next, self._stop) is None:
                self.next = self._stop

    def _reach(self, segment: Segment, chunk: int) -> int:
        """How far the rest of the bytes goes from this chunk on, by the index of the files: in whole chunks."""
        assert self._frames is not None
        left = self._most - len(self._frames)
        storage = self._log
        for later in storage.segments[storage.segments.index(segment) :]:
            for number in range(chunk, len(later.index_seqs)):
                _, size, first, _ = storage.reader.extent(later, number)
                left -= size
                if left < 0 or first >= self._stop:
                    return min(first, self._stop)
            chunk = 0
        return self._stop

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        try:
            while self._frames is not None:
                place = self._log.reader.place_from(self._seq, self.next) if self._seq < self.next else None
                self._ahead = None if place is None else self._read(place)
                self.given = asyncio.get_running_loop().time()
                yield self._frames if self._bodies else without_bodies(self._frames)
                self.given = inf
                self._frames = None
                if place is not None and self._ahead is not None:
                    self._take(await self._ahead, place[0], self.next, MOST_BYTES)
        except (OSError, StorageError) as exc:
            if not isinstance(exc, ConnectionError):
                logger.warning("LOG(%s): a reader is cut off at seq %d - %s", self._log.name, self._seq, exc)
            raise ConnectionAbortedError(str(exc)) from exc

    def _take(self, block: Block, seq: int, stop: int, most: int) -> None:
        count = block.cut(seq, stop - seq, most)
        self._frames = block.view[block.start : block.stop]
        self._seq = seq + count

    def _read(self, place: Place) -> asyncio.Future[Block]:
        """Read what is at this place; its segment stays until the next one is read."""
        future: asyncio.Future[Block] = asyncio.get_running_loop().create_future()

        def then(block: Block | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if block is None:
                future.set_exception(error or StorageError("nothing was read"))
            else:
                future.set_result(block)

        if place[1] is not self._segment:
            self._log.pin(place[1])
            self._let_go()
            self._segment = place[1]
        self._log.reader.read_from(place, self._stop, self._fetches.submit, then)
        return future

    def _let_go(self) -> None:
        if self._segment is not None:
            self._log.unpin(self._segment)
            self._segment = None

    async def aclose(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._ahead is not None and not self._ahead.cancel() and not self._ahead.cancelled():
            # Nobody asked for what came of it: that is no reason to complain.
            self._ahead.exception()
        self._ahead = self._frames = None
        self._let_go()
        self._task = None
        self._fetches.leave(self)

    def cut(self) -> None:
        """Disconnect the reader, which takes nothing, for the sake of those who wait."""
        logger.warning("LOG(%s): a reader is cut off at seq %d, it takes nothing", self._log.name, self._seq)
        if self._task is not None:
            self._task.cancel()
