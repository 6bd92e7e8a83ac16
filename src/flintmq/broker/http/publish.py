"""What ``/pub`` and ``/mpub`` do: their checks in NSQ's order, then one append.

``Publishing`` serves both the lane (``lane.py``) and the general server's routes (``api.py``). It owns what is known of
queries that were seen before; how the bytes of a request arrive is its callers' business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING

from flintmq.broker.delivery.commit import SLICED_FROM, Commit, Piece, slices
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage.keys import content_of
from flintmq.errors import HttpError, KeyContentError, LimitError, PublishError
from flintmq.http.arguments import parse_query
from flintmq.http.site import TEXT, Answer, envelope
from flintmq.kernel import PARSE_BAD, PARSE_MORE, BatchParser, line_records
from flintmq.protocol.wire import valid_key, valid_name

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.options import NsqdOptions

__all__ = ["OK", "REPEATED", "Content", "Order", "Publishing", "check_binary", "refusal"]

_u32 = Struct(">I")
_i32 = Struct(">i")
_MS = 1_000_000

#: Queries that are remembered, and bytes of the longest of them.
REMEMBERED = 1024
LONGEST_REMEMBERED = 2048
#: Text that is split into messages before the loop is handed back.
TEXT_SLICE = 64 << 10
#: Text of a keyed batch whose content is worked out before the loop is handed back.
CONTENT_SLICE = 4 * TEXT_SLICE
_NEWLINE = 10

OK = envelope("OK")
#: A publish under a key that was known.
REPEATED = envelope(Answer(b"OK", TEXT, headers={"X-Flintmq-Repeat": "true"}))


class Order:
    """What the query of a publish asks for."""

    __slots__ = ("binary", "delay", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        #: In nanoseconds; -1 if what the query says is no delay.
        self.delay = 0
        self.binary = False


def refusal(error: Exception) -> HttpError:
    """What is answered to a publish that was refused. NSQ has one word for all reasons; a limit says which it is."""
    if isinstance(error, KeyContentError):
        return HttpError(error.http_status, f"{error.code} {error}")
    if isinstance(error, LimitError):
        return HttpError(error.http_status, str(error))
    return HttpError(503, "EXITING")


_NUMBER = re.compile(r"[+-]?[0-9]+")
_EMPTY_LINES = re.compile(rb"\n+")


class Publishing:
    """``/pub`` and ``/mpub``: all their checks, in NSQ's order, and the append."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._orders: dict[tuple[bool, str], Order] = {}

    def forget(self) -> None:
        """The options have changed."""
        self._orders.clear()

    def order(self, query: str, *, batch: bool) -> Order:
        """HttpError if the query cannot be parsed or names no topic."""
        order = self._orders.get((batch, query))
        if order is None:
            order = self._read_order(query, batch)
            if len(query) <= LONGEST_REMEMBERED:
                if len(self._orders) >= REMEMBERED:
                    self._orders.clear()
                self._orders[batch, query] = order
        return order

    def _read_order(self, query: str, batch: bool) -> Order:
        arguments = parse_query(query)
        name = arguments.get("topic")
        if name is None:
            raise HttpError(400, "MISSING_ARG_TOPIC")
        if not valid_name(name):
            raise HttpError(400, "INVALID_TOPIC")
        order = Order(name)
        if batch:
            # Anything but these two is binary, as in NSQ: also "no" and "False".
            order.binary = arguments.get("binary", "false") not in ("false", "0")
        elif "defer" in arguments:
            text = arguments["defer"]
            # Twenty digits are beyond every limit, and int() has one of its own.
            order.delay = max(-1, int(text) * _MS) if len(text) <= 20 and _NUMBER.fullmatch(text) else -1
        return order

    def topic(self, order: Order) -> Topic:
        """The topic, made if need be. HttpError if it cannot be, or if the deferral is none."""
        try:
            topic = self._broker.topic_for_client(order.name)
        except PublishError as exc:
            raise refusal(exc) from exc
        if order.delay and not 0 < order.delay <= topic.settings.max_defer:
            raise HttpError(400, "INVALID_DEFER")
        return topic

    def obstacle(self, topic: Topic) -> Callable[[Callable[[], None]], None] | None:
        """What a publish has to wait for, as something to give a callback to; None: nothing."""
        if topic.busy:
            return topic.when_free
        return self._broker.turns.when_relieved if self._broker.store.congested else None

    def key(self, header: bytes | None) -> bytes:
        """The key of a publish, empty if it has none. HttpError if it is no good."""
        if header is None:
            return b""
        if not valid_key(header):
            raise HttpError(400, "INVALID_KEY")
        return header

    def once(
        self,
        key: bytes,
        order: Order,
        topic: Topic,
        data: bytearray,
        pos: int,
        stop: int,
        *,
        batch: bool,
        content: int | None = None,
    ) -> tuple[Commit | None, bool]:
        """Publish ``data[pos:stop]``, unless it was done before under this key: what to wait for, and was it?

        ``content`` is what a Content came to, for a text that is ``long``.
        """
        if batch and not order.binary and not data[pos:stop].strip(b"\n"):
            # A batch of no messages: nothing is stored, so the key stays free.
            return None, False
        publish = partial(self.batch if batch else self.message, order, topic, data, pos, stop)
        try:
            return topic.once(
                key, publish, self._content(order, data, pos, stop, batch) if content is None else content
            )
        except PublishError as exc:
            raise refusal(exc) from exc

    def is_long(self, order: Order, size: int, *, batch: bool) -> bool:
        """Does a body take so long to read for its content that a Content has to do it in slices?"""
        return batch and not order.binary and size > CONTENT_SLICE

    def _content(self, order: Order, data: bytearray, pos: int, stop: int, batch: bool) -> int:
        """What is published, as one number: the same whether it comes as text, in binary form, or over TCP."""
        if not batch:
            return content_of(_u32.pack(stop - pos), memoryview(data)[pos:stop])
        if order.binary:
            pos, stop, _ = check_binary(data, pos, stop, self._broker.options)
            return content_of(memoryview(data)[pos:stop])
        return content_of(*(records for records, _, _, _ in _lines(data, pos, stop)))

    def message(
        self, order: Order, topic: Topic, data: bytearray, pos: int, stop: int, extra: bytes = b""
    ) -> Commit | None:
        """Publish ``data[pos:stop]``. The four bytes before ``pos`` are overwritten: they become its size."""
        _u32.pack_into(data, pos - 4, stop - pos)
        try:
            return topic.publish(data, pos - 4, stop, 1, delay=order.delay, extra=extra)
        except PublishError as exc:
            raise refusal(exc) from exc

    def batch(
        self, order: Order, topic: Topic, data: bytearray, pos: int, stop: int, extra: bytes = b""
    ) -> Commit | None:
        """Publish the messages of ``data[pos:stop]``, all or none."""
        count = 0
        if order.binary:
            pos, stop, count = check_binary(data, pos, stop, self._broker.options)
        else:
            _check_lines(data, pos, stop, self._broker.options.max_msg_size)
        try:
            if count > SLICED_FROM or (not count and stop - pos > TEXT_SLICE):
                # A copy of our own: the buffer it came in is used again before the last slice is appended.
                data = data[pos:stop]
                pieces = slices(data, 0, len(data), count) if count else _lines(data, 0, len(data))
                return topic.publish_slices(pieces, extra)
            piece = (data, pos, stop, count) if count else next(_lines(data, pos, stop), None)
            # Nothing but empty lines is a batch of no messages, and fine.
            return topic.publish(*piece, extra=extra) if piece is not None else None
        except PublishError as exc:
            raise refusal(exc) from exc


class Content:
    """The content of a long text under a key, as one number, worked out in slices."""

    __slots__ = ("_done", "value")

    def __init__(self) -> None:
        self.value = 0
        # Bytes of the text; where it lies may change between two slices.
        self._done = 0

    def step(self, data: bytearray, pos: int, stop: int) -> bool:
        """Read on in the text ``data[pos:stop]``. True: all of it is in ``value``."""
        at = pos + self._done
        limit = min(stop, at + CONTENT_SLICE)
        while at < limit:
            records, _, at = _some_lines(data, at, stop)
            self.value = content_of(records, before=self.value)
        self._done = at - pos
        return at == stop


def check_binary(data: bytearray, pos: int, stop: int, options: NsqdOptions) -> tuple[int, int, int]:
    """``[count]{[size][body]}``: return where the records start and stop, and how many they are. HttpError if not."""
    if stop - pos < 4:
        raise HttpError(413, "BAD_BODY")
    count = int(_i32.unpack_from(data, pos)[0])
    if not 0 < count <= (options.max_body_size - 4) // 5:
        raise HttpError(413, "BAD_BODY")
    batch = BatchParser(pos + 4)
    if batch.run(data, stop, count, options.max_msg_size) in (PARSE_MORE, PARSE_BAD):
        raise HttpError(413, "BAD_MESSAGE")
    return pos + 4, batch.pos, count


def _check_lines(data: bytearray, pos: int, stop: int, longest: int) -> None:
    """HttpError if a line is too long. Looks only where a line could be: from limit to limit."""
    while stop - pos > longest:
        newline = data.rfind(b"\n", pos, pos + longest + 1)
        if newline < 0:
            raise HttpError(413, "MSG_TOO_BIG")
        pos = newline + 1


def _lines(data: bytearray, pos: int, stop: int) -> Iterator[Piece]:
    """The lines of a text as records, in pieces of bounded length; empty lines are no messages."""
    while pos < stop:
        records, count, pos = _some_lines(data, pos, stop)
        if count:
            yield records, 0, len(records), count


def _some_lines(data: bytearray, pos: int, stop: int) -> tuple[bytearray, int, int]:
    """Return the next lines of a text as records, how many they are, and where the text goes on."""
    if data[pos] == _NEWLINE and (empty := _EMPTY_LINES.match(data, pos, stop)) is not None:
        # In one step, so that every piece has a message, and the loop its turn after each.
        pos = empty.end()
    end = stop
    if stop - pos > TEXT_SLICE:
        newline = data.rfind(b"\n", pos, pos + TEXT_SLICE)
        if newline < 0:
            newline = data.find(b"\n", pos, stop)
        end = newline + 1 if newline >= 0 else stop
    records, count = line_records(data, pos, end) if pos < end else (bytearray(), 0)
    return records, count, end
