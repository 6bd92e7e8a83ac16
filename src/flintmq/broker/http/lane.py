"""The HTTP port's own way for publishes and health checks: bytes in, one append, the answer when it is committed.

An ``HttpLane`` serves connections that publish or ask ``/ping``: it owns them, their deadlines, and what it knows of
request heads that were seen before. A producer sends the same head again and again, so a head is parsed once
(``request_heads.py``) and looked up after that; ``publish.py`` has what a publish does. A connection that asks for
anything else is handed, with its bytes, to the general server, and stays there; publishes work there too, only not as
fast.

One request per connection is under way at a time: answers are in order, and nobody can pile up work. What a client has
sent beyond that waits in its buffer, and then in its socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, TypeVar, cast

from flintmq.addresses import text_of
from flintmq.broker.delivery.commit import Commit
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http.publish import OK, REPEATED, Content, Publishing, refusal
from flintmq.broker.http.request_heads import Head, read_head
from flintmq.broker.net.sockets import SocketTransport
from flintmq.errors import HttpError, PublishError
from flintmq.http.admission import address_of
from flintmq.http.browsers import Names
from flintmq.http.heads import LONGEST_HEAD, BadHead, check_trailer, chunk_size, end_of_head, looked_at, tidy
from flintmq.http.site import CONTINUE, LINGER_SECONDS, PUBLISH, Answer, date_now, envelope, log_request, render
from flintmq.kernel import send_each

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.http.site import Site

__all__ = ["HttpConnection", "HttpLane"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_sized = Struct(">I").pack

#: Request heads that are remembered, and bytes of the longest of them.
REMEMBERED = 1024
LONGEST_REMEMBERED = 2048
#: Bytes of the line before a chunk.
LONGEST_CHUNK_LINE = 4096
#: How often deadlines are looked at.
SWEEP_SECONDS = 5.0
#: A connection without a request is kept this long. NSQ keeps it for ever, and a producer's pool counts on that.
IDLE_SECONDS = 3600.0
#: One that has not sent its first request by then is closed.
SILENT_SECONDS = 60.0
#: Bytes that are read from a client that is ahead of its answers.
READ_AHEAD = 256 << 10
#: Requests, and seconds, that a connection gets of one loop turn.
REQUESTS_AT_ONCE = 64
SECONDS_AT_ONCE = 0.001
#: Chunks of one body after which the clock is looked at.
LOOK_EVERY = 64


# --- Connections ------------------------------------------------------------------------------------------------------


class HttpLane:
    """What the connections of one listener share."""

    def __init__(
        self,
        broker: Broker,
        site: Site,
        publishing: Publishing,
        hand_over: Callable[[HttpConnection, bytes], None],
        names: Names,
        *,
        refused: bool = False,
    ) -> None:
        self.broker = broker
        self.site = site
        self.publishing = publishing
        #: Gives a connection that does not publish, with its bytes, to the general server.
        self.hand_over = hand_over
        self._names = names
        #: Nothing is served here: the general server says why.
        self.refused = refused
        self.connections: dict[HttpConnection, None] = {}
        #: Connections whose sockets can be read in this turn; the Poller appends to it.
        self.arrived: list[tuple[HttpConnection, SocketTransport]] = []
        self._heads: dict[bytes, Head] = {}
        # The publishers of one commit, who get the same answer in one go.
        self._commit: Commit | None = None
        self._waiting: list[HttpConnection] = []
        # The answer of nearly every request, made once per second.
        self._ok = b""
        self._ok_at = 0
        self.loop = asyncio.get_running_loop()
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def connection(self) -> HttpConnection:
        return HttpConnection(self)

    def forget(self) -> None:
        """Options or tokens have changed: look at every head again."""
        self._heads.clear()

    def close(self) -> None:
        """End every connection. Answers that were given are still sent."""
        self._timer.cancel()
        for connection in list(self.connections):
            try:
                connection.close()
            except Exception:
                logger.exception("a connection could not be closed")

    def _sweep(self) -> None:
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)
        now = self.loop.time()
        for connection in list(self.connections):
            try:
                connection.look(now)
            except Exception:
                logger.exception("a connection's deadlines could not be checked")

    def ok(self) -> bytes:
        now = int(time.time())
        if now != self._ok_at:
            self._ok_at = now
            self._ok = render(OK, date_now())
        return self._ok

    def known(self, data: bytes) -> Head | None:
        """Return what a head says that was seen before."""
        return self._heads.get(data)

    def head(self, data: bytes) -> Head | None:
        """Return what a head says, None if it is for the general server. HttpError if the client may not publish."""
        if self.refused:
            return None
        head = read_head(data)
        if head is None or not self._names.knows(head.host):
            return None
        if head.ping:
            return self._remembered(data, head)
        if self.site.tokens is not None:
            self.site.tokens.check(head.authorization, PUBLISH)
        options = self.broker.options
        if head.length > (options.max_body_size if head.batch else options.max_msg_size):
            raise HttpError(413, "BODY_TOO_BIG" if head.batch else "MSG_TOO_BIG")
        return self._remembered(data, head)

    def _remembered(self, data: bytes, head: Head) -> Head:
        usual = head.keep_alive and not head.chunked and not head.expects
        # A head with a key does not come again, or only with the same publish.
        if usual and head.key is None and len(data) <= LONGEST_REMEMBERED:
            if len(self._heads) >= REMEMBERED:
                self._heads.clear()
            self._heads[data] = head
        return head

    # --- The short way ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read what has arrived. Single messages to one topic, with heads that are known, become one append."""
        arrived, self.arrived = self.arrived, []
        data, view = self.broker.receive_buffer, self.broker.receive_view
        heads, topics = self._heads, self.broker.topics
        topic: Topic | None = None
        records = bytearray()
        publishers: list[HttpConnection] = []
        for connection, transport in arrived:
            size = 0
            # Is there nothing under way here, so that a request can take the short way?
            if (
                not (connection._pending or connection._closing or connection._paused)
                and connection._held is None
                and connection._writable
            ):
                try:
                    size = transport.sock.recv_into(view)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as exc:
                    transport.fail(exc)
                    continue
                if not size:
                    transport.ended()
                    continue
                body = data.find(b"\r\n\r\n", 0, size) + 4
                head = heads.get(bytes(view[:body]))
                if head is not None and head.order is not None and body + head.length == size:
                    target = topics.get(head.order.name)
                    if publishers and target is not topic:
                        self._append(topic, records, publishers)
                        records, publishers = bytearray(), []
                    # Nothing happens to a topic between the first of its messages and their append.
                    if publishers or (target is not None and target.open):
                        topic = target
                        records += _sized(head.length)
                        records += view[body:size]
                        publishers.append(connection)
                        continue
            # Anything else, in its turn: it may well be a batch that keeps the topic busy.
            if publishers:
                self._append(topic, records, publishers)
                records, publishers = bytearray(), []
            if size:
                try:
                    connection.buffer_updated(size)
                except Exception:
                    transport.broken()
            else:
                transport.receive()
        if publishers:
            self._append(topic, records, publishers)

    def _append(self, topic: Topic | None, records: bytearray, publishers: list[HttpConnection]) -> None:
        assert topic is not None
        for connection in publishers:
            connection._requests += 1
            connection._pending = True
        try:
            commit = topic.publish(records, 0, len(records), len(publishers))
        except PublishError as exc:
            for connection in publishers:
                connection.refused(exc)
            return
        except Exception:
            logger.exception("TOPIC(%s): unexpected error, its publishers are disconnected", topic.name)
            for connection in publishers:
                connection.transport.abort()
            return
        if commit is None:
            self._answer(publishers)
        else:
            commit.waiters.append(lambda: self._committed(commit, publishers))

    # --- Answers ---------------------------------------------------------------------------------------------------

    def when_committed(self, commit: Commit, connection: HttpConnection) -> None:
        if commit is not self._commit:
            self._commit = commit
            waiting: list[HttpConnection] = []
            self._waiting = waiting
            commit.waiters.append(lambda: self._committed(commit, waiting))
        self._waiting.append(connection)

    def _committed(self, commit: Commit, waiting: list[HttpConnection]) -> None:
        if commit is self._commit:
            self._commit = None
        if commit.error is not None:
            for connection in waiting:
                connection.refused(commit.error or PublishError("exiting"))
        else:
            self._answer(waiting)

    def _answer(self, publishers: list[HttpConnection]) -> None:
        """``OK`` for all of them: where it can be, in one go."""
        together: list[HttpConnection] = []
        fds: list[int] = []
        for connection in publishers:
            fd = connection.fd
            # An answer like all, on a plain socket with nothing unsent.
            if fd >= 0 and connection._writable and not (connection._last or connection._closing):
                together.append(connection)
                fds.append(fd)
            else:
                connection.committed()
        ok = self.ok()
        for i, sent in send_each(fds, ok):
            together[i].transport.write(ok[sent:])
        for connection in together:
            if connection._held is None and not connection._ended:
                connection._pending = False
            else:
                connection.settled()


class HttpConnection(asyncio.BufferedProtocol):
    """One connection of a producer."""

    def __init__(self, lane: HttpLane) -> None:
        #: For the Poller too: it hands all that can be read in one turn to the lane.
        self.lane = lane
        self._broker = lane.broker
        self._publishing = lane.publishing
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._socket: socket.socket = cast(socket.socket, None)
        #: Where answers can be sent to without the transport's help; -1: nowhere.
        self.fd = -1
        # What is left of unfinished requests, and of the first of them: its head, where its body starts.
        self._held: bytearray | None = None
        self._fill = 0
        self._head: Head | None = None
        self._body_at = 0
        # Bytes of an unfinished head that need no second look.
        self._looked = 0
        # A chunked body: what there is of it, behind four free bytes, and how far the chunks were read.
        self._chunks: bytearray | None = None
        self._chunks_at = 0
        # The content of a long text under a key, as far as it was read.
        self._content: Content | None = None
        # The request that is under way: is it waiting for its commit, and is it the last one?
        self._pending = False
        self._last = False
        self._paused = False
        self._ended = False
        self._writable = True
        self._closing = False
        self._linger: asyncio.TimerHandle | None = None
        # Deadlines: when an unfinished request began to keep us waiting; what was done at the last look.
        self._since = 0.0
        self._requests = 0
        self._seen = -1
        self._idle_since = 0.0

    # --- The connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._socket = sock
            if sock.family != getattr(socket, "AF_UNIX", None):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(transport, SocketTransport):
            self.fd = transport.fd
        # Accepted by asyncio, which does not ask. A TlsListener does, before the handshake.
        asked = self.fd >= 0 or sock is None or transport.get_extra_info("sslcontext") is not None
        refused = not asked and not self._broker.listeners.descriptors.admit()
        self.lane.connections[self] = None
        if refused:
            self._closing = True
            self.transport.abort()
            return
        self._limit_connections()

    def _limit_connections(self) -> None:
        connections = self._broker.connections
        if connections is None:
            return
        reason = connections.admit(self, address_of(self.transport.get_extra_info("peername")))
        if reason:
            # It gets the reason, but no time to read it: descriptors are what is short.
            self.transport.write(render(replace(envelope(HttpError(503, reason)), close=True), date_now()))
            self.close()
            if not self.transport.can_write_eof():
                # A TLS connection waits for the peer's goodbye, which may not come.
                self._linger = self.lane.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        # The descriptor may soon be another connection's.
        self.fd = -1
        self._closing = True
        self._held = None
        self.lane.connections.pop(self, None)
        if self._broker.connections is not None:
            self._broker.connections.release(self)
        if self._linger is not None:
            self._linger.cancel()

    def close(self) -> None:
        self._closing = True
        self.transport.close()

    def look(self, now: float) -> None:
        """Every few seconds: is this client keeping us waiting?"""
        if self._held is not None and not self._pending and not self._paused:
            options = self._broker.options
            limit = options.http_header_timeout if self._head is None else options.http_body_timeout
            if now - self._since > limit / 1e9:
                self._closing = True
                self.transport.abort()
        elif self._requests != self._seen or self._pending or self._paused:
            self._seen = self._requests
            self._idle_since = now
        elif now - self._idle_since > (IDLE_SECONDS if self._requests else SILENT_SECONDS):
            self.close()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if not self._pending:
            self._resume() if self._paused else self._go_on()

    # --- Input -----------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        held = self._held
        if held is None:
            return self._broker.receive_view
        if self._fill == len(held):
            # Grows as bytes arrive, never by what a length promises.
            self._held = held = held + bytes(len(held))
        return memoryview(held)[self._fill :]

    def buffer_updated(self, size: int) -> None:
        if self._closing:
            return
        if self._held is None:
            self._take(self._broker.receive_buffer, size)
        else:
            self._fill += size
            self._take(self._held, self._fill)

    def receive(self) -> None:
        """Read from the plain socket. EOFError or OSError when the connection has ended."""
        size = self._socket.recv_into(self.get_buffer(-1))
        if not size:
            raise EOFError
        self.buffer_updated(size)

    def eof_received(self) -> bool:
        """The client sends no more: whole requests that it has sent are still answered."""
        self._ended = True
        if self._held is not None and self._writable and not (self._pending or self._paused or self._closing):
            # The answer before was given a moment ago, and what came behind its request was not looked at yet.
            self._take(self._held, self._fill)
        return self._pending or self._paused or not self._writable

    def _take(self, data: bytearray, stop: int) -> None:
        """Serve the requests in ``data[:stop]`` and keep the rest."""
        pos = served = 0
        started = 0.0
        while pos < stop and not (self._pending or self._paused or self._closing) and self._writable:
            if served:
                # A lone request, which is the usual case, needs no clock; the first of many is free.
                now = self.lane.loop.time()
                started = started or now
                if served == REQUESTS_AT_ONCE or now - started >= SECONDS_AT_ONCE:
                    # The others first.
                    self._pause(self._broker.backlog.add)
                    break
            served += 1
            try:
                after = self._request(data, pos, stop)
            except HttpError as exc:
                # Only a part of the request was read: what follows is no beginning of another.
                self._end(envelope(exc))
                break
            except BadHead as exc:
                self._end_with(exc.answer)
                break
            if after < 0:
                break
            pos = after
        left = stop - pos
        if not left or self._closing:
            self._held = None
            self._since = 0.0
            return
        if self._held is not data:
            held = bytearray(max(2 * left, 512))
            held[:left] = data[pos:stop]
            self._held = held
        elif pos:
            data[:left] = data[pos:stop]
        self._fill = left
        if not self._since:
            self._since = self.lane.loop.time()
        if not self._paused and (not self._writable or (self._pending and left > READ_AHEAD)):
            # It is ahead of its answers, or does not read them.
            self._pause(None)

    def _request(self, data: bytearray, pos: int, stop: int) -> int:
        """Serve one request; where the next one starts, -1 if it is not all there or has to wait."""
        head = self._head
        if head is None:
            looked = self._looked
            body = data.find(b"\r\n\r\n", pos + looked, min(stop, pos + LONGEST_HEAD)) + 4
            known = self.lane.known(bytes(memoryview(data)[pos:body])) if body > 3 else None
            if known is None:
                # Its head may end sooner than with the first empty line of this form.
                body = end_of_head(data, pos, stop, looked)
                self._looked = looked_at(stop - pos) if body < 0 else 0
                if body < 0:
                    return -1
                text = tidy(bytes(memoryview(data)[pos:body]))
                head = self.lane.head(text)
                if head is None:
                    self._leave(text, data, body, stop)
                    return stop
            else:
                head = known
                if looked:
                    self._looked = 0
        else:
            body = pos + self._body_at
        if head.special:
            return self._ping(head, body) if head.ping else self._chunked(head, data, pos, body, stop)
        after = body + head.length
        if after > stop or not self._publish(head, data, body, after):
            self._begin(head, body - pos)
            return -1
        self._head = None
        self._since = 0.0
        return after

    def _ping(self, head: Head, after: int) -> int:
        """Say how the broker is doing, as the route of the general server does; return where the next request starts.

        Health checks are frequent, and the first of them must not wait until the general server is imported.
        """
        started = time.perf_counter_ns()
        health = self._broker.health
        answer = envelope(health if health == "OK" else HttpError(500, health), plain=True)
        self._requests += 1
        self._since = 0.0
        log_request(answer.status, "GET", head.target, text_of(self.transport.get_extra_info("peername")), started)
        text = render(replace(answer, close=not head.keep_alive), date_now(), old=head.old)
        if head.keep_alive:
            self.transport.write(text)
        else:
            self._end_with(text)
        return after

    def _begin(self, head: Head, body_at: int) -> None:
        """The head is known, but the request is not all there or has to wait."""
        if self._head is None:
            self._head = head
            self._body_at = body_at
            # The head is in; the body has a time of its own, all of it, however it trickles in.
            self._since = 0.0
            if head.expects:
                self.transport.write(CONTINUE)

    def _chunked(self, head: Head, data: bytearray, pos: int, body: int, stop: int) -> int:
        """A body in chunks: each ``size in hex [;…] CRLF bytes CRLF``, an empty one, header lines, an empty line."""
        limit = self._broker.options.max_body_size if head.batch else self._broker.options.max_msg_size
        if self._chunks is None:
            self._chunks, self._chunks_at = bytearray(4), body - pos
            self._begin(head, body - pos)
        at = pos + self._chunks_at
        now = self.lane.loop.time
        deadline = now() + SECONDS_AT_ONCE
        count = 0
        while True:
            line = data.find(b"\r\n", at, min(stop, at + LONGEST_CHUNK_LINE))
            if line < 0:
                if stop - at >= LONGEST_CHUNK_LINE:
                    raise HttpError(500, "INTERNAL_ERROR")
                return -1
            size = self._checked(chunk_size, bytes(memoryview(data)[at:line]))
            if size == 0:
                break
            if len(self._chunks) - 4 + size > limit:
                raise HttpError(413, "BODY_TOO_BIG" if head.batch else "MSG_TOO_BIG")
            after = line + 2 + size
            if after + 2 > stop:
                return -1
            if data[after : after + 2] != b"\r\n":
                raise HttpError(500, "INTERNAL_ERROR")
            self._chunks += memoryview(data)[line + 2 : after]
            at = after + 2
            self._chunks_at = at - pos
            if at - body > 2 * limit + LONGEST_HEAD:
                # Tiny chunks with long extensions: they cost us more than the body they carry.
                raise HttpError(413, "BODY_TOO_BIG" if head.batch else "MSG_TOO_BIG")
            count += 1
            if not count % LOOK_EVERY and now() >= deadline:
                # The others first.
                self._pause(self._broker.backlog.add)
                return -1
        # Trailers mean nothing here. They end with an empty line, which may follow at once.
        end = data.find(b"\r\n\r\n", line, stop)
        if end < 0:
            if stop - line > LONGEST_HEAD:
                raise HttpError(500, "INTERNAL_ERROR")
            return -1
        for trailer in bytes(memoryview(data)[line + 2 : end]).split(b"\r\n") if end > line else ():
            self._checked(check_trailer, trailer)
        if not self._publish(head, self._chunks, 4, len(self._chunks)):
            return -1
        self._head = self._chunks = None
        self._since = 0.0
        return end + 4

    def _checked(self, read: Callable[[bytes], T], line: bytes) -> T:
        """Read a line of a body in chunks. If it is none, the body may end elsewhere for others: it is refused."""
        try:
            return read(line)
        except BadHead as exc:
            raise HttpError(500, "INTERNAL_ERROR") from exc

    def _publish(self, head: Head, data: bytearray, pos: int, stop: int) -> bool:
        """The request is all there. False if it has to wait."""
        publishing = self._publishing
        batch = head.batch
        is_repeat = False
        try:
            if pos == stop and not batch:
                raise HttpError(400, "MSG_EMPTY")
            key = publishing.key(head.key)
            order = publishing.order(head.query, batch=batch)
            topic = publishing.topic(order)
            obstacle = publishing.obstacle(topic)
            if obstacle is not None:
                self._pause(obstacle)
                return False
            if key:
                content = None
                if publishing.is_long(order, stop - pos, batch=batch):
                    self._content = self._content or Content()
                    if not self._content.step(data, pos, stop):
                        self._pause(self._broker.backlog.add)
                        return False
                    content, self._content = self._content.value, None
                commit, is_repeat = publishing.once(key, order, topic, data, pos, stop, batch=batch, content=content)
            elif batch:
                commit = publishing.batch(order, topic, data, pos, stop)
            else:
                commit = publishing.message(order, topic, data, pos, stop)
        except HttpError as exc:
            # Perhaps in the middle of a text: the next one is read from its beginning.
            self._content = None
            self._last = not head.keep_alive
            self._answer(envelope(exc))
            return True
        if not (batch or order.delay or key):
            head.order = order
        self._requests += 1
        self._last = not head.keep_alive
        if commit is not None:
            self._pending = True
            if is_repeat:
                commit.waiters.append(partial(self._repeated, commit))
            else:
                self.lane.when_committed(commit, self)
        elif is_repeat:
            self._answer(REPEATED)
        elif self._last:
            self._answer(OK)
        else:
            self.transport.write(self.lane.ok())
        return True

    def _pause(self, until: Callable[[Callable[[], None]], None] | None) -> None:
        """Read no further until something has happened."""
        self._paused = True
        self.transport.pause_reading()
        if until is not None:
            until(self._resume)

    def _resume(self) -> None:
        if not self._paused or self._closing:
            return
        self._paused = False
        self._go_on()
        # What was waited for may be there again.
        if not self._paused and not self._closing:
            self.transport.resume_reading()

    def _go_on(self) -> None:
        """Look at what has arrived meanwhile."""
        if self._held is not None and not (self._pending or self._paused or self._closing):
            self._take(self._held, self._fill)
        if self._ended and not (self._pending or self._paused or self._closing):
            self.close()

    def _leave(self, head: bytes, data: bytearray, body: int, stop: int) -> None:
        """Hand the connection, with this request and what follows, to the general server."""
        self._closing = True
        self.fd = -1
        self.lane.connections.pop(self, None)
        self.lane.hand_over(self, head + memoryview(data)[body:stop])

    # --- Output ----------------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """The publish is safe, and its answer is not sent yet."""
        if not self._closing:
            self._answer(OK)
        self.settled()

    def _repeated(self, commit: Commit) -> None:
        """What this request repeats is safe, or is not to be."""
        if commit.error is not None:
            self.refused(commit.error)
            return
        if not self._closing:
            self._answer(REPEATED)
        self.settled()

    def settled(self) -> None:
        """The answer is sent: on to the next request."""
        self._pending = False
        if self._held is not None or self._ended:
            # Not at once: a commit is being resolved, and its topic cannot take another publish in the middle of that.
            self._broker.later(self._resume if self._paused else self._go_on)

    def refused(self, error: Exception) -> None:
        """The publish could not be made safe."""
        if not self._closing:
            self._answer(envelope(refusal(error)))
        self.settled()

    def _answer(self, answer: Answer) -> None:
        if self._last:
            self._end(answer)
        else:
            # The whole request was read, so the connection can go on, whatever came of it.
            self.transport.write(render(replace(answer, close=False), date_now()))

    def _end(self, answer: Answer) -> None:
        """The last answer. The peer gets a moment to read it.

        Closing at once with unread input in the socket would reset the connection and could cost the peer the answer.
        """
        self._end_with(render(replace(answer, close=True), date_now()))

    def _end_with(self, answer: bytes) -> None:
        self._closing = True
        transport = self.transport
        transport.write(answer)
        if transport.can_write_eof():
            transport.write_eof()
            transport.resume_reading()
            self._linger = self.lane.loop.call_later(LINGER_SECONDS, transport.abort)
        else:
            transport.close()
