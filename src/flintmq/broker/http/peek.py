"""A look at messages without taking them, and one message finished, requeued or deferred by its id: for operators.

Looking changes nothing: no attempt is counted, nothing is delivered, and what has to be read from files is kept out of
the cache that consumers live on. A page holds what was so when it was asked for. Pages are in an order in which a
message keeps its place, so one that stays in its state while somebody turns the pages is seen exactly once:

    ready       the requeued, then those for this channel alone, then the never sent; each by seq
    in flight   by seq
    deferred    by the time they are due, then by seq
    a topic     by seq

What happens to messages is the channel's business; here is what is asked, and how it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Any

from flintmq.broker.http.targets import named_channel, named_topic
from flintmq.broker.storage.journal import SIDE
from flintmq.errors import HttpError, StorageError
from flintmq.http.arguments import Arguments
from flintmq.http.site import ADMIN, CONSUME, Request, Route
from flintmq.kernel import FRAME_OVERHEAD, Block

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.storage.log import Log

__all__ = ["cursor_of", "peek_channel", "peek_topic", "routes"]

#: Messages of a page, unless the request says otherwise, and at most.
LIMIT, MOST = 100, 1_000
#: Bytes of each body that are shown, unless the request says otherwise.
SHOWN = 256
#: Bytes of bodies, and pieces of files read, at which a page ends early.
PAGE_BYTES = 4 << 20
PAGE_READS = 64
#: Messages looked through before the loop is handed back.
SLICE = 20_000
#: A device that does not answer for so long is not waited for.
READ_SECONDS = 30.0
#: Seconds after which a read that is waited for is asked for again.
ASK_AGAIN_SECONDS = 0.2

_MS = 1_000_000
_READY, _IN_FLIGHT, _DEFERRED = "ready", "in_flight", "deferred"
#: What is ready comes from three places, shown in this order.
_REQUEUED, _SIDE, _WAITING = 0, 1, 2

#: Where a page begins: after this pair. What its first number means depends on what is looked at.
Cursor = tuple[int, int]
_START: Cursor = (-1, -1)


@dataclass(slots=True)
class _Found:
    """A message of a page, before its frame was read."""

    seq: int
    cursor: Cursor
    #: Deliveries so far; None: its frame knows.
    attempts: int | None
    #: More that is told about it; None: it was answered while others were looked for.
    more: dict[str, Any] | None


# --- Which messages ---------------------------------------------------------------------------------------------------


async def peek_channel(channel: Channel, state: str, limit: int, after: Cursor, shown: int) -> dict[str, Any]:
    """A page of a channel's messages: up to ``limit`` after a cursor, with ``shown`` bytes of each body."""
    find = {_READY: _ready, _IN_FLIGHT: _in_flight, _DEFERRED: _deferred}[state]
    # One more, to know whether another page follows.
    found = await find(channel, limit + 1, after)
    return await _page(channel.topic, found, limit, shown, lambda seq: _has(channel, seq))


async def peek_topic(topic: Topic, limit: int, after: Cursor, shown: int) -> dict[str, Any]:
    """The same for a topic's log, from the first message that it keeps on; deliveries are its channels' business."""
    start, stop = after[1] + 1, min(topic.log.end, topic.log.committed)
    spans = ((max(first, start), min(end, stop)) for first, end in topic.log.spans())
    found = [_Found(seq, (0, seq), 0, {}) for seq in islice(_seqs(spans), limit + 1)]
    return await _page(topic, found, limit, shown, lambda seq: seq >= topic.log.first)


async def _ready(channel: Channel, count: int, after: Cursor) -> list[_Found]:
    channel.catch_up(channel.topic.pumped)
    place, last = after
    found: list[_Found] = []
    if place <= _REQUEUED:
        requeued = await _lowest(list(channel.requeued), count, last)
        found += [_Found(seq, (_REQUEUED, seq), _attempts(channel, seq), {}) for seq in requeued]
    for number, unsent in ((_SIDE, channel.side), (_WAITING, channel.waiting)):
        if place <= number:
            ranges = unsent.since(last + 1 if place == number else 0)
            attempts = 0 if number == _WAITING else None
            seqs = islice(_seqs(ranges), max(0, count - len(found)))
            found += [_Found(seq, (number, seq), attempts, {}) for seq in seqs]
    return found


async def _in_flight(channel: Channel, count: int, after: Cursor) -> list[_Found]:
    start = after[1] + 1
    seqs = await _lowest(list(channel.unusual), count, after[1])
    ring = channel.ring
    first = max(start, ring.lo)
    held: list[int] = []
    while first < ring.hi and len(held) < count:
        held += [seq for seq, _ in ring.held(first, first + SLICE)]
        first += SLICE
        if first < ring.hi:
            await asyncio.sleep(0)
    clock = channel.broker.clock
    found = []
    for seq in sorted({*seqs, *held})[:count]:
        more: dict[str, Any] | None = None
        owner = channel.owner(seq)
        if owner:
            more = {"deadline": clock.wall() + channel.deadline(seq) - clock.now()}
            session = channel.sessions.get(owner)
            if session is not None:
                more["client"] = {"client_id": session.identity.client_id, "remote_address": session.remote_address}
        message = channel.unusual.get(seq)
        found.append(_Found(seq, (0, seq), message.attempts if message is not None else 1, more))
    return found


async def _deferred(channel: Channel, count: int, after: Cursor) -> list[_Found]:
    clock = channel.broker.clock
    wall = clock.wall() - clock.now()
    return [
        _Found(seq, (due, seq), _attempts(channel, seq), {"due": wall + due})
        for due, seq in channel.deferred.earliest(count, *after)
    ]


async def _lowest(seqs: list[int], count: int, after: int) -> list[int]:
    """The ``count`` lowest that are higher than ``after``."""
    found: list[int] = []
    for i in range(0, len(seqs), SLICE):
        if i:
            await asyncio.sleep(0)
        found += [seq for seq in seqs[i : i + SLICE] if seq > after]
        found.sort()
        del found[count:]
    return found


def _seqs(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    return chain.from_iterable(starmap(range, ranges))


def _attempts(channel: Channel, seq: int) -> int | None:
    attempts = channel.attempts.get(seq, 0 if seq < SIDE else -1)
    return attempts if attempts >= 0 else None


def _has(channel: Channel, seq: int) -> bool:
    """Is it still the channel's, in whatever state?"""
    return bool(channel.owner(seq)) or channel.is_ready(seq) or channel.deferred.count_between(seq, seq + 1) > 0


# --- What they hold ---------------------------------------------------------------------------------------------------


async def _page(
    topic: Topic, found: list[_Found], limit: int, shown: int, exists: Callable[[int], bool]
) -> dict[str, Any]:
    reader = _Reader(topic)
    messages: list[dict[str, Any]] = []
    size = 0
    last: Cursor | None = None
    for candidate in found:
        if len(messages) == limit or size >= PAGE_BYTES or reader.reads >= PAGE_READS:
            return {"messages": messages, "next": _text_of(last)}
        last = candidate.cursor
        if candidate.more is None:
            continue
        try:
            message = await _message(topic, reader, candidate, shown)
        except (StorageError, OSError):
            # Asking may take a while where very many are requeued.
            await asyncio.sleep(0)
            if not exists(candidate.seq):
                # Finished while we looked, and the file it stood in is gone.
                continue
            message = _unreadable(topic, candidate)
        messages.append(message)
        size += len(message["body"])
    return {"messages": messages, "next": None}


async def _message(topic: Topic, reader: _Reader, found: _Found, shown: int) -> dict[str, Any]:
    dead = await reader.dead(found.seq)
    frame = await reader.frame(found.seq)
    size = len(frame) - FRAME_OVERHEAD
    # The frame says how often it will have been delivered with its first delivery here.
    attempts = int.from_bytes(frame[16:18], "big") - 1 if found.attempts is None else found.attempts
    return {
        "id": topic.ids.text(found.seq).decode(),
        "seq": found.seq,
        "timestamp": int.from_bytes(frame[8:16], "big"),
        "attempts": attempts,
        "size": size,
        "body": bytes(frame[FRAME_OVERHEAD : FRAME_OVERHEAD + min(shown, size)]),
        "truncated": shown < size,
        **(found.more or {}),
        **({"dead": dead} if dead is not None else {}),
    }


def _unreadable(topic: Topic, found: _Found) -> dict[str, Any]:
    """A message that is there, and damaged in its file."""
    return {
        "id": topic.ids.text(found.seq).decode(),
        "seq": found.seq,
        "timestamp": 0,
        "attempts": found.attempts or 0,
        "size": 0,
        "body": b"",
        "truncated": False,
        "damaged": True,
        **(found.more or {}),
    }


class _Reader:
    """Reads frames for one page. Many stand beside each other: what was read from a file is kept for the next."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._read: Block | None = None
        self._log: Log | None = None
        #: How often something had to be read from a file.
        self.reads = 0

    async def frame(self, seq: int) -> memoryview:
        """To be used at once: a block in memory may soon hold something else."""
        log, place = self._topic.place(seq)
        block = self._read
        if block is None or log is not self._log or not block.base <= place < block.base + block.count:
            block = await self._look(log, place)
        block.find(place)
        return block.view[block.start : block.stop]

    async def dead(self, seq: int) -> dict[str, Any] | None:
        """What is kept with a dead letter; None if it is none."""
        async with _patience():
            while (extra := self._topic.extra_of(seq)) is None:
                self.reads += 1
                arrived = asyncio.Event()
                self._topic.when_read(arrived.set)
                with contextlib.suppress(TimeoutError):
                    # A read that could not even begin is begun by asking again.
                    await asyncio.wait_for(arrived.wait(), ASK_AGAIN_SECONDS)
        return extra.get("dead")

    async def _look(self, log: Log, place: int) -> Block:
        arrived = asyncio.get_running_loop().create_future()

        def then(block: Block | None, error: BaseException | None) -> None:
            if arrived.done():
                return
            if error is not None:
                arrived.set_exception(error)
            else:
                arrived.set_result(block)

        block = log.look(place, then)
        if block is not None:
            return block
        self.reads += 1
        async with _patience():
            self._read, self._log = await arrived, log
        assert self._read is not None
        return self._read


@contextlib.asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    """For reads: they take the time that they take, but not for ever."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            yield
    except TimeoutError as exc:
        raise HttpError(503, "DISK_BUSY: the disk does not answer; try again later") from exc


# --- Cursors ----------------------------------------------------------------------------------------------------------

_CURSOR = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16})", re.ASCII)


def _text_of(cursor: Cursor | None) -> str | None:
    return None if cursor is None else f"{cursor[0]:x}-{cursor[1]:x}"


def cursor_of(text: str) -> Cursor:
    """Where the page begins that an answer called its ``next``."""
    if not text:
        return _START
    match = _CURSOR.fullmatch(text)
    numbers = tuple(int(part, 16) for part in match.groups()) if match is not None else ()
    if not numbers or max(numbers) >= 1 << 63:
        raise HttpError(400, "INVALID_AFTER: give what an answer to the same question had as next, or nothing")
    return numbers[0], numbers[1]


# --- Routes -----------------------------------------------------------------------------------------------------------


def routes(broker: Broker) -> list[Route]:
    async def channel_page(request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        channel = named_channel(broker, arguments)
        state = arguments.word("state", (_READY, _IN_FLIGHT, _DEFERRED), code="INVALID_STATE")
        return await peek_channel(channel, state, *_page_arguments(arguments))

    async def topic_page(request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        return await peek_topic(named_topic(broker, arguments), *_page_arguments(arguments))

    def one(act: Callable[[Channel, int, int], bool], *, delay: int | None) -> Callable[[Request], Awaitable[None]]:
        """What is done to one message; ``delay`` is the one that is meant where none is given."""

        async def handler(request: Request) -> None:
            arguments = request.arguments()
            channel = named_channel(broker, arguments)
            id = arguments.text("id", "say which message, by its id of 16 hex digits")
            seq = channel.topic.ids.seq(id.encode("utf-8", "surrogateescape"))
            wait = _delay(channel, arguments, delay)
            if seq < 0 or not act(channel, seq, wait):
                raise HttpError(404, "MESSAGE_NOT_FOUND: the channel has no such message; it may be finished")
            await broker.as_safe_as(channel.topic)

        return handler

    def finish(channel: Channel, seq: int, delay: int) -> bool:
        return channel.dismiss(seq)

    def reschedule(channel: Channel, seq: int, delay: int) -> bool:
        return channel.reschedule(seq, delay)

    return [
        Route("GET", "/channel/peek", channel_page, CONSUME),
        Route("GET", "/topic/peek", topic_page, CONSUME),
        Route("POST", "/message/finish", one(finish, delay=0), ADMIN),
        Route("POST", "/message/requeue", one(reschedule, delay=0), ADMIN),
        Route("POST", "/message/defer", one(reschedule, delay=None), ADMIN),
    ]


def _page_arguments(arguments: Arguments) -> tuple[int, Cursor, int]:
    limit = arguments.number("limit", LIMIT, lowest=1, highest=MOST, code="INVALID_LIMIT", what="a number")
    if arguments.get("bytes") == "all":
        shown = 1 << 62
    else:
        shown = arguments.number("bytes", SHOWN, code="INVALID_BYTES", what="all, or a number")
    return limit, cursor_of(arguments.get("after", "")), shown


def _delay(channel: Channel, arguments: Arguments, default: int | None) -> int:
    """Return the delay, which is given in milliseconds, in nanoseconds."""
    longest = channel.settings.max_defer // _MS
    return _MS * arguments.number(
        "delay",
        default,
        highest=longest,
        code="INVALID_DELAY",
        what="a number of milliseconds",
        hint="say for how many milliseconds, as in delay=60000",
    )
