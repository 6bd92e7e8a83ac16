"""The general HTTP server: a site on sockets that the daemon has bound.

A ``Server`` owns its connections; what a request means is its site's business. aiohttp is imported only when a server
is made: it takes a third of a second, and a third of an idle broker's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from flintmq.addresses import BACKLOG, text_of
from flintmq.errors import HttpError
from flintmq.http.admission import Admission, address_of
from flintmq.http.arguments import split_target
from flintmq.http.browsers import Names
from flintmq.http.heads import BadHead, RequestEnd, end_of_head, looked_at, tidy
from flintmq.http.site import CONTINUE, LINGER_SECONDS, TEXT, Answer, Pieces, Request, Site, envelope
from flintmq.http.tls import TlsListener

if TYPE_CHECKING:
    import ssl

    from aiohttp import web as aio

__all__ = ["Server", "load"]

logger = logging.getLogger(__name__)

#: The request line and each header; a client that needs more does not speak NSQ.
LONGEST_LINE = 64 << 10
#: A connection without a request is kept for this long, and this long a request line with its headers may take.
IDLE_SECONDS = 75.0
#: A connection that has not sent the first byte by then is closed.
SILENT_SECONDS = 60.0
#: How long the head of a request may take to arrive once it has begun.
HEAD_SECONDS = 30.0
#: A client that has sent all it will gets this long to be answered.
HALF_OPEN_SECONDS = 10.0
#: Seconds that a TLS handshake may take.
HANDSHAKE_SECONDS = 10.0
#: Bytes that the parser gets at once, and seconds of one loop turn: a body may come in chunks of a byte each.
FEED_BYTES = 2048
SECONDS_AT_ONCE = 0.001
#: What an answer in pieces may take: so long for each piece, and as much again for each MiB of it.
PIECE_SECONDS = 60.0


async def load(name: str) -> None:
    """Import a large module in a thread: reading so many files would hold up everybody for a third of a second.

    What an import raises is raised, and the next call tries again.
    """
    module = sys.modules.get(name)
    # Another thread may be in the middle of it: then this one waits for that, and not the loop.
    if module is None or getattr(module.__spec__, "_initializing", False):
        await asyncio.get_running_loop().run_in_executor(None, _import, name)


#: Python begins with a module of a package while another thread is in the middle of that package: both can fail.
_importing = threading.Lock()


def _import(name: str) -> None:
    with _importing:
        known = set(sys.modules)
        try:
            import_module(name)
        except BaseException:
            # Python forgets the package that failed, not the modules in it that had succeeded: the next attempt would
            # find them, and not make them known to their package.
            for each in set(sys.modules) - known:
                if each.partition(".")[0] not in sys.modules:
                    sys.modules.pop(each, None)
            raise


class Server:
    """A site on listening sockets. ``protocol()`` makes the protocol of one connection, for those who accept it.

    A connection without a request is kept for ``idle`` seconds; the head of a request, and its body, may take ``head``
    and ``body`` seconds. ``refusal`` is given instead of every answer, on a listener that is not to be used; those who
    ask for a name that ``names`` does not know are refused. ``admission`` says how many connections there may be, those
    in their TLS handshake included.
    """

    def __init__(
        self,
        site: Site,
        *,
        idle: float = IDLE_SECONDS,
        head: float = HEAD_SECONDS,
        body: float | None = None,
        refusal: Answer | None = None,
        names: Names | None = None,
        admission: Admission | None = None,
    ) -> None:
        from aiohttp import web as aio

        self.site = site
        self._idle = idle
        self._head_seconds = head
        self._body_seconds = body
        self._refusal = refusal
        self._names = names or Names()
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._broken_body = aio.RequestPayloadError
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._server = aio.Server(self._handle)

    def protocol(self, gone: Callable[[], None] | None = None) -> asyncio.Protocol:
        """The protocol of one connection; ``gone`` is called when it has ended."""
        settings: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": self._idle,
            "max_line_size": LONGEST_LINE,
            "max_field_size": LONGEST_LINE,
            "lingering_time": LINGER_SECONDS,
            # NSQ takes a body as it is, whatever its Content-Encoding.
            "auto_decompress": False,
        }
        protocol: Any = _classes()[0](self._server, loop=self._loop, **settings)
        protocol.head_seconds = self._head_seconds
        protocol.gone = gone
        protocol.admission = self._admission
        made: asyncio.Protocol = protocol
        return made

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve connections to a bound socket, which may be one of the unix kind."""
        listener: asyncio.Server | TlsListener
        if tls is not None:
            listener = TlsListener(self.protocol, sock, tls, HANDSHAKE_SECONDS, self._admit, self._release)
        elif sock.family == getattr(socket, "AF_UNIX", None):
            listener = await self._loop.create_unix_server(self.protocol, sock=sock, backlog=BACKLOG)
        else:
            listener = await self._loop.create_server(self.protocol, sock=sock, backlog=BACKLOG)
        self._listeners.append(listener)

    def _admit(self, protocol: Hashable, address: str) -> bool:
        return self._admission is None or not self._admission.admit(protocol, address)

    def _release(self, protocol: Hashable) -> None:
        if self._admission is not None:
            self._admission.release(protocol)

    def renew_tls(self, context: ssl.SSLContext) -> None:
        """Use this context for the connections that come from now on."""
        for listener in self._listeners:
            if isinstance(listener, TlsListener):
                listener.renew(context)

    def connection_count(self) -> int:
        return len(self._server.connections)

    def abort(self) -> None:
        """Close every connection at once, whatever is under way."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in self._server.connections:
            connection.force_close()

    async def close(self, grace: float = 1.0) -> None:
        """Accept no more, let requests that are under way end within ``grace`` seconds, close every connection."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._server.pre_shutdown()
        await self._server.shutdown(grace)

    async def _handle(self, raw: aio.BaseRequest) -> aio.StreamResponse:
        # HEAD is no method of any route, so nothing here is ever without its body.
        target = raw.raw_path
        transport = raw.transport
        if transport is None:
            raise ConnectionError("the client is gone")
        if self._refusal is not None:
            return _response(self._refusal)
        if target == "*" and raw.method == "OPTIONS":
            return _response(Answer())
        try:
            path, query = split_target(target)
        except HttpError as exc:
            return _response(Answer(exc.code.encode(), TEXT, exc.status, close=True))
        if not self._names.knows(raw.headers.get("Host", "")):
            return _response(envelope(HttpError(403, "UNKNOWN_HOST")))
        if len(raw.headers.getall("Authorization", ())) > 1:
            # Which of them counts? A proxy in front of us may have looked at the other one.
            return _response(Answer(b"400 Bad Request", TEXT, 400, close=True))
        expectation = raw.headers.get("Expect", "").lower()
        if expectation not in ("", "100-continue"):
            return _response(Answer(status=417, headers={"Connection": "close"}, close=True))

        async def read() -> bytes:
            nonlocal expectation
            if expectation:
                # The client waits for a word before it sends the body. It gets it from whoever wants the body.
                expectation = ""
                if not raw.content.total_bytes and raw.version >= (1, 1):
                    transport.write(CONTINUE)
            try:
                return await raw.content.readany()
            except self._broken_body as exc:
                raise ConnectionError(str(exc)) from exc

        remote = text_of(transport.get_extra_info("peername"))
        length, patience = raw.content_length, self._body_seconds
        request = Request(raw.method, target, path, query, raw.headers, remote, read, length, patience)
        answer = await self.site.answer(request)
        # Nobody said that the body may come: whether it does is not known.
        if expectation and raw.content_length:
            answer = replace(answer, close=True)
        if answer.pieces is not None:
            return await self._stream(raw, transport, answer, answer.pieces)
        return _response(answer)

    async def _stream(
        self, raw: aio.BaseRequest, transport: asyncio.Transport, answer: Answer, pieces: Pieces
    ) -> aio.StreamResponse:
        try:
            has_length = "Content-Length" in answer.headers
            if raw.version < (1, 1) and not has_length:
                # It could not tell an answer that was cut off from a whole one.
                return _response(Answer(b"505 HTTP Version Not Supported", TEXT, 505, close=True))
            response = _response(answer)
            if not has_length:
                response.enable_chunked_encoding()
            await response.prepare(raw)
            async for piece in pieces:
                async with asyncio.timeout(PIECE_SECONDS * (1 + len(piece) / (1 << 20))):
                    await response.write(piece)
            await response.write_eof()
        except TimeoutError as exc:
            # What it has not taken would be kept for it for ever.
            transport.abort()
            raise ConnectionError("the client takes no more") from exc
        except asyncio.CancelledError:
            transport.abort()
            raise
        except ConnectionError:
            raise
        except Exception as exc:
            logger.exception("an answer was cut off - %s %s", raw.method, raw.raw_path.partition("?")[0])
            raise ConnectionError("cut off") from exc
        finally:
            await pieces.aclose()
        return response


def _response(answer: Answer) -> aio.StreamResponse:
    headers = dict(answer.headers)
    if answer.content_type:
        headers["Content-Type"] = answer.content_type
    _, whole, streamed = _classes()
    response: aio.StreamResponse
    if answer.pieces is None:
        response = whole(status=answer.status, headers=headers, body=answer.body)
    else:
        response = streamed(status=answer.status, headers=headers)
    if answer.close:
        response.force_close()
    return response


@cache
def _classes() -> tuple[Any, type[aio.Response], type[aio.StreamResponse]]:
    """aiohttp's own, less talkative."""
    from aiohttp import web as aio

    class Streamed(aio.StreamResponse):
        async def _prepare_headers(self) -> None:
            await super()._prepare_headers()
            # Go's servers do not say what they are made of. Should aiohttp rename this method, ours will say it.
            self.headers.pop("Server", None)

    class Response(Streamed, aio.Response):
        pass

    class Connection(aio.RequestHandler):
        head_seconds = HEAD_SECONDS
        gone: Callable[[], None] | None = None
        admission: Admission | None = None
        #: Runs until the first byte of the first request.
        _silence: asyncio.TimerHandle | None = None
        _deadline: asyncio.TimerHandle | None = None
        #: The head of a request as far as it has arrived, and how many bytes of it need no second look.
        _head = bytearray()
        _looked = 0
        #: Were we sent something that is no request?
        _refused = False
        #: Requests that the parser has got, and those whose answers were taken by the client's socket.
        _begun = 0
        _answered = 0
        #: The request that the parser is in the middle of.
        _current: RequestEnd | None = None
        #: Will there be no more requests: the client sends no more, or the last one was begun?
        _ended = False
        _is_last = False
        #: Bytes that the parser has not got yet, and its next turn.
        _unfed = b""
        _feeding: asyncio.Handle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._silence = asyncio.get_running_loop().call_later(SILENT_SECONDS, self.force_close)
            peer = address_of(transport.get_extra_info("peername"))
            if self.admission is not None and self.admission.admit(self, peer):
                cast(asyncio.Transport, transport).abort()

        def data_received(self, data: bytes) -> None:
            self._end_silence()
            if not data:
                # aiohttp's parser goes on with what it held back while nobody read the body.
                super().data_received(data)
                return
            self._unfed += data
            if self._feeding is None:
                self._feed()

        def _feed(self) -> None:
            """Give the parser what has arrived, in turns with the other connections."""
            loop = asyncio.get_running_loop()
            is_resumed, self._feeding = self._feeding is not None, None
            deadline = loop.time() + SECONDS_AT_ONCE
            data, self._unfed = self._unfed, b""
            at = 0
            while at < len(data) and self.transport is not None:
                if self._is_busy():
                    # The next request is looked at when this one is answered, like one that comes by itself.
                    self._unfed = data[at:]
                    self.transport.pause_reading()
                    return
                # Only heads, and chunks, can be so small that many of them take long.
                step = len(data) if self._current is not None and not self._current.is_chunked else FEED_BYTES
                at += self._parse(data[at : at + step])
                if at < len(data) and loop.time() >= deadline:
                    self._unfed = data[at:]
                    self.transport.pause_reading()
                    self._feeding = loop.call_soon(self._feed)
                    return
            if is_resumed and self.transport is not None and not (self._reading_paused or self._buffer_paused):
                self.transport.resume_reading()

        def _is_busy(self) -> bool:
            """Is a whole request there that is not answered yet?"""
            return self._current is None and self._begun > self._answered and not self._is_last and not self._refused

        def _parse(self, data: bytes) -> int:
            """Give the parser what belongs to one request; return how many bytes that are."""
            if self._refused or (self._is_last and self._current is None):
                return len(data)
            if self._current is not None:
                size = self._current.take(data)
                waiting = len(self._messages)
                super().data_received(data[:size])
                if len(self._messages) > waiting:
                    # It is fed one request at a time: another message is an error, of a chunk. aiohttp would tell it
                    # after this request is answered, whose handler waits for a body that does not come any more.
                    self._refuse(b"" if self._answered >= self._begun else BadHead().answer)
                    return len(data)
                if self._current.is_over:
                    self._current = None
                return size
            self._head = self._head or bytearray()
            before = len(self._head)
            self._head += data
            try:
                body = end_of_head(self._head, 0, len(self._head), self._looked)
                head = tidy(bytes(self._head[:body])) if body >= 0 else b""
            except BadHead as exc:
                self._refuse(exc.answer)
                return len(data)
            if not head:
                self._looked = looked_at(len(self._head))
                # aiohttp waits for the rest of a head as long as it takes, if only a byte comes now and then.
                if self._deadline is None:
                    self._deadline = asyncio.get_running_loop().call_later(self.head_seconds, self.force_close)
                return len(data)
            self._end_deadline()
            self._looked, self._head = 0, bytearray()
            request = RequestEnd(head)
            self._current = None if request.is_over else request
            self._is_last = request.closes
            self._begun += 1
            super().data_received(head)
            return body - before

        def _refuse(self, answer: bytes) -> None:
            self._refused = True
            self._head = bytearray()
            transport = self.transport
            if transport is None:
                return
            if answer:
                transport.write(answer)
            if transport.can_write_eof():
                # Closing at once with unread input would reset the connection, and could cost the peer the answer.
                with contextlib.suppress(OSError):  # the peer may have reset the connection
                    transport.write_eof()
                asyncio.get_running_loop().call_later(LINGER_SECONDS, self.force_close)
            else:
                transport.close()

        async def finish_response(self, *args: Any) -> Any:
            """Send the answer, and take up the next request when the client has read it."""
            result = await super().finish_response(*args)
            if self.transport is not None:
                await self._drain_helper()
            self._answered += 1
            if self._unfed and self._feeding is None:
                self._feeding = asyncio.get_running_loop().call_soon(self._feed)
            elif self._ended and self._answered >= self._begun:
                self.close()
            return result

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            self._end_deadline()
            self._end_silence()
            if self.admission is not None:
                self.admission.release(self)
            if self._feeding is not None:
                self._feeding.cancel()
            if self.gone is not None:
                self.gone()

        def _end_silence(self) -> None:
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def eof_received(self) -> bool:  # type: ignore[override]
            """The client sends no more. aiohttp would hang up, with the answer still to come."""
            while self._unfed and not self._is_busy():
                size = self._parse(self._unfed)
                self._unfed = self._unfed[size:]
            if self.ssl_context is not None:
                # There is no such thing as half a TLS connection.
                return False
            self._ended = True
            if self._answered >= self._begun and not self._unfed:
                # All requests are answered, and none can come.
                return False
            asyncio.get_running_loop().call_later(HALF_OPEN_SECONDS, self.force_close)
            return True

        def handle_error(
            self,
            request: aio.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> aio.StreamResponse:
            """What cannot be parsed is its sender's business: no line in the log, and Go's words as the answer."""
            if request.writer.output_size > 0:
                raise ConnectionError("a part of the answer is sent already")
            return _response(Answer(f"{status} {HTTPStatus(status).phrase}".encode(), TEXT, status, close=True))

    return Connection, Response, Streamed
