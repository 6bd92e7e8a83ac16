"""One HTTP/1.1 connection: bytes in, one request after the other to its site, answers out.

A ``Connection`` owns its input, the request that is under way, and the time that a client may take for each step. It
reads no more than one request ahead: while a request is answered, what follows it waits in the socket. What bytes mean
is decided in ``heads``, what a request is answered with by the site; neither knows of sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from flintmq.addresses import text_of
from flintmq.errors import HttpError
from flintmq.http import site as web
from flintmq.http.admission import address_of
from flintmq.http.arguments import split_target
from flintmq.http.heads import BadHead, Body, end_of_head, looked_at, tidy
from flintmq.http.site import TEXT, Answer, Pieces, Request, date_now, envelope, render, render_head

if TYPE_CHECKING:
    from flintmq.http.server import Server

__all__ = ["Connection", "Headers"]

logger = logging.getLogger(__name__)

#: A connection that has not sent the first byte by then is closed.
SILENT_SECONDS = 60.0
#: A client that has sent all it will gets this long to be answered.
HALF_OPEN_SECONDS = 10.0
#: Bytes that are parsed at once, and seconds of one loop turn: a body may come in chunks of a byte each.
FEED_BYTES = 2048
SECONDS_AT_ONCE = 0.001
#: Bytes of a body that wait for its handler before the client is not read from.
BODY_AHEAD = 128 << 10
#: A client that has taken nothing of its answer for this long is gone.
TAKE_SECONDS = 60.0


class Headers(Mapping[str, str]):
    """The headers of a request. Names are looked up in any case; of several values the first one counts."""

    def __init__(self, lines: list[bytes]) -> None:
        self._values: dict[str, list[str]] = {}
        for line in lines:
            name, _, value = line.partition(b":")
            text = value.strip(b" \t").decode("utf-8", "surrogateescape")
            self._values.setdefault(name.decode("ascii").lower(), []).append(text)

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def getall(self, name: str, default: Iterable[str] = ()) -> list[str]:
        """Return every value of a header, in order."""
        return list(self._values.get(name.lower(), default))


class Connection(asyncio.Protocol):
    """``gone`` is called when the connection has ended."""

    def __init__(self, server: Server, gone: Callable[[], None] | None = None) -> None:
        self._server = server
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        # What has arrived and was not parsed; how much of an unfinished head needs no second look; the next turn of
        # parsing, if there is one.
        self._input = bytearray()
        self._looked = 0
        self._feeding: asyncio.Handle | None = None
        #: The request that is under way.
        self.task: asyncio.Task[None] | None = None
        # Its body, whether that is none, and whether it is of HTTP/1.0.
        self._body = Body.empty()
        self._is_broken = False
        self._old = False
        # What its handler waits for: more of the body, or room for more of the answer.
        self._awaited: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._full = False
        # No more requests: the client sends none, the last one was begun, what it sent is none.
        self._ended = False
        self._is_last = False
        self._refused = False
        # Bytes that were written, and how many of them the client's socket had taken at the last look.
        self._written = 0
        self._seen = 0
        # The step that the client must take in time.
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False

    # --- The connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._allow(SILENT_SECONDS)
        admission = self._server.admission
        if admission is not None and admission.admit(self, address_of(transport.get_extra_info("peername"))):
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None
        self._end_timer()
        if self._feeding is not None:
            self._feeding.cancel()
        self._input.clear()
        for waiter in (self._awaited, self._room):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._server.connections.discard(self)
        if self._server.admission is not None:
            self._server.admission.release(self)
        if self._gone is not None:
            self._gone()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def eof_received(self) -> bool:
        """The client sends no more, and waits for its answers perhaps."""
        self._ended = True
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            # There is no such thing as half a TLS connection.
            return False
        if self._feeding is None:
            self._feed()
        self._wake()
        if self.task is None and self._feeding is None:
            # All requests are answered, and none can come.
            return False
        self._allow(HALF_OPEN_SECONDS, self._end_half)
        return True

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def end(self) -> None:
        """Close the connection when the request that is under way is answered."""
        self._is_last = True
        if self.task is None and self.transport is not None:
            self.transport.close()

    def cancel(self) -> None:
        """Give up the request that is under way, and close the connection."""
        if self.task is not None:
            self.task.cancel()
        self.abort()

    # --- Time ------------------------------------------------------------------------------------------------------

    def _allow(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        """Close the connection unless the client takes its next step within so many seconds."""
        self._end_timer()
        self._timer = self._loop.call_later(seconds, then or self.abort)

    def _end_half(self) -> None:
        """The client has sent all it will some time ago: close, unless it has been given something since."""
        if self._progress() == self._seen:
            self.abort()
        else:
            self._seen = self._progress()
            self._allow(HALF_OPEN_SECONDS, self._end_half)

    def _progress(self) -> int:
        """How many bytes the client's socket has taken."""
        return self._written - (self.transport.get_write_buffer_size() if self.transport is not None else 0)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- Input -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._input += data
        if self._feeding is None:
            self._feed()

    def _feed(self) -> None:
        """Parse what has arrived, in turns with the other connections."""
        self._feeding = None
        deadline = self._loop.time() + SECONDS_AT_ONCE
        while self._input and self.transport is not None:
            if self._refused or self._is_broken or (self._is_last and (self.task is None or self._body.is_over)):
                self._input.clear()
                break
            try:
                if self.task is None:
                    if not self._take_head():
                        break
                elif self._body.is_over or len(self._body.arrived) >= BODY_AHEAD:
                    # The next request is looked at when this one is answered, and no more is read ahead of a handler.
                    self.transport.pause_reading()
                    return
                elif not self._take_body():
                    break
            except BadHead as exc:
                if self.task is None:
                    self._refuse(exc.answer)
                else:
                    # Its handler is told if it reads on; the answer is its own, and the last one.
                    self._is_last = self._is_broken = True
                    self._input.clear()
                    self._wake()
                break
            if self._input and self._loop.time() >= deadline:
                self.transport.pause_reading()
                self._feeding = self._loop.call_soon(self._feed)
                return
        transport = self.transport
        if transport is None:
            return
        if not self._ended:
            transport.resume_reading()
        elif self.task is None:
            # What is missing of a request will not come.
            transport.close()
        else:
            self._wake()

    def _take_head(self) -> bool:
        """Begin the next request if its head is all there. BadHead if it is none."""
        size = len(self._input)
        end = end_of_head(self._input, 0, size, self._looked)
        if end < 0:
            self._looked = looked_at(size)
            if not self._in_head and not self._ended:
                # However slowly the rest of it comes.
                self._in_head = True
                self._allow(self._server.head_seconds)
            return False
        head = tidy(bytes(self._input[:end]))
        del self._input[:end]
        self._looked = 0
        self._in_head = False
        if not self._ended:
            self._end_timer()
        request_line, *lines = head.split(b"\r\n")[:-2]
        method, target, version = request_line.decode("ascii").split(" ")
        self._old = version == "HTTP/1.0"
        headers = Headers(lines)
        self._body = Body(headers, old=self._old)
        self._is_last = self._is_last or self._body.closes
        self._is_broken = False
        self.task = self._loop.create_task(self._serve(method, target, headers))
        return True

    def _take_body(self) -> bool:
        """Take some of the body; False if it takes more bytes. BadHead if they are none of a body."""
        size = len(self._input)
        taken = 0
        if self._body.is_chunked and size > FEED_BYTES:
            # Chunks can be so small that many of them take long.
            taken = self._body.take(self._input, FEED_BYTES)
        taken = taken or self._body.take(self._input, size)
        del self._input[:taken]
        if self._body.arrived or self._body.is_over:
            self._wake()
        return taken > 0

    def _wake(self) -> None:
        """The handler looks at the body again."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def _read(self) -> bytes:
        """Return what has arrived of the body, empty at its end. ConnectionError if the rest does not come."""
        body = self._body
        while not body.arrived and not body.is_over:
            if self.transport is None:
                raise ConnectionError("the client is gone")
            if self._is_broken:
                raise ConnectionError("the body is none")
            if self._ended and self._feeding is None:
                raise ConnectionError("the client has sent a part of the body")
            self._awaited = self._loop.create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        piece = bytes(body.arrived)
        body.arrived.clear()
        if self._feeding is None and self.transport is not None:
            self._feeding = self._loop.call_soon(self._feed)
        return piece

    def _refuse(self, answer: bytes) -> None:
        """Give the only answer that there is to bytes that are no request."""
        self._refused = True
        self._input.clear()
        self._write(answer)
        self._close_in_order()

    def _close_in_order(self) -> None:
        """Close, but leave the client a moment to read: with unread input the connection would be reset."""
        transport = self.transport
        if transport is None:
            return
        if not transport.can_write_eof():
            transport.close()
            return
        with contextlib.suppress(OSError):  # the peer may have reset the connection
            transport.write_eof()
        self._allow(web.LINGER_SECONDS)

    # --- Answers ---------------------------------------------------------------------------------------------------

    async def _serve(self, method: str, target: str, headers: Headers) -> None:
        """Answer one request, and let the next one come."""
        try:
            answer = await self._answer_to(method, target, headers)
            if self.transport is None:
                if answer.pieces is not None:
                    await answer.pieces.aclose()
                return
            answer = replace(answer, close=answer.close or self._is_last)
            self._is_last = answer.close
            if answer.pieces is not None:
                await self._stream(answer, answer.pieces, target)
            else:
                self._write(render(answer, date_now(), old=self._old, bare=method == "HEAD"))
            await self._drained()
            await self._read_rest()
        except ConnectionError:
            self.abort()
        except asyncio.CancelledError:
            self.abort()
            raise
        except Exception:
            logger.exception("HTTP: unexpected error, the connection is closed - %s", method)
            self.abort()
        finally:
            self.task = None
            self._go_on()

    async def _answer_to(self, method: str, target: str, headers: Headers) -> Answer:
        server, transport = self._server, self.transport
        if transport is None:
            raise ConnectionError("the client is gone")
        if server.refusal is not None:
            return server.refusal
        if target == "*" and method == "OPTIONS":
            return Answer()
        try:
            path, query = split_target(target)
        except HttpError as exc:
            return Answer(exc.code.encode(), TEXT, exc.status, close=True)
        if not server.names.knows(headers.get("Host", "")):
            return envelope(HttpError(403, "UNKNOWN_HOST"))
        if len(headers.getall("Authorization")) > 1:
            # Which of them counts? A proxy in front of us may have looked at the other one.
            return Answer(b"400 Bad Request", TEXT, 400, close=True)
        expectation = headers.get("Expect", "").lower()
        if expectation not in ("", "100-continue"):
            return Answer(status=417, headers={"Connection": "close"}, close=True)

        async def read() -> bytes:
            nonlocal expectation
            if expectation:
                # The client waits for a word before it sends the body. It gets it from whoever wants the body.
                expectation = ""
                if not self._body.has_begun and not self._old:
                    self._write(web.CONTINUE)
            return await self._read()

        remote = text_of(transport.get_extra_info("peername"))
        length = self._body.length
        request = Request(method, target, path, query, headers, remote, read, length, server.body_seconds)
        answer = await server.site.answer(request)
        # Nobody said that the body may come: whether it does is not known.
        if expectation and not self._body.is_over:
            answer = replace(answer, close=True)
        return answer

    async def _stream(self, answer: Answer, pieces: Pieces, target: str) -> None:
        try:
            chunked = "Content-Length" not in answer.headers
            if chunked and self._old:
                # It could not tell an answer that was cut off from a whole one.
                refusal = Answer(b"505 HTTP Version Not Supported", TEXT, 505, close=True)
                self._is_last = True
                self._write(render(refusal, date_now(), old=True))
                return
            self._write(render_head(answer, date_now(), old=self._old, chunked=chunked))
            async for piece in pieces:
                if chunked and len(piece):
                    self._write(b"%x\r\n" % len(piece), piece, b"\r\n")
                else:
                    self._write(piece)
                await self._drained()
                if self.transport is None:
                    raise ConnectionError("the client is gone")
            if chunked:
                self._write(b"0\r\n\r\n")
        except ConnectionError:
            raise
        except Exception as exc:
            logger.exception("an answer was cut off - %s", target.partition("?")[0])
            raise ConnectionError("cut off") from exc
        finally:
            await pieces.aclose()

    def _write(self, *parts: bytes | memoryview) -> None:
        if self.transport is not None:
            self._written += sum(map(len, parts))
            self.transport.writelines(parts)

    async def _drained(self) -> None:
        """Wait until the client has taken enough of what was written. ConnectionError if it takes nothing any more."""
        while self._full and self.transport is not None:
            taken = self._progress()
            self._room = self._loop.create_future()
            try:
                async with asyncio.timeout(TAKE_SECONDS):
                    await self._room
            except TimeoutError as exc:
                # What it has not taken would be kept for it for ever.
                if self._progress() == taken:
                    raise ConnectionError("the client takes no more") from exc
            finally:
                self._room = None

    async def _read_rest(self) -> None:
        """Read what nobody wanted of the body, for a moment, so that the client gets to see its answer."""
        if self._body.is_over:
            return
        if self._is_last:
            self._close_in_order()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(web.LINGER_SECONDS):
                while await self._read():
                    pass
        self._is_last = self._is_last or not self._body.is_over

    def _go_on(self) -> None:
        """A request was answered: to the next one, or the end."""
        transport = self.transport
        if transport is None:
            return
        if self._is_last:
            self._end_timer()
            transport.close()
            return
        self._body = Body.empty()
        if self._input:
            if self._feeding is None:
                self._feeding = self._loop.call_soon(self._feed)
        elif self._ended:
            transport.close()
        else:
            self._allow(self._server.idle_seconds)
            transport.resume_reading()
