"""nsqlookupd: nsqds say over TCP what they have, everyone else asks over HTTP.

A Lookupd owns two listeners and a Registry. A Session is the connection of one nsqd and knows the protocol V1; the
registry knows what the words mean. An nsqd waits only a moment for its answers, so nothing here holds the loop for
long: large answers over HTTP are built piece by piece.

    from an nsqd:  "  V1", then lines of words; IDENTIFY is followed by a body: size (4) | JSON
    to an nsqd:    size (4) | data, one for each command and in their order; no frame type, errors begin with E_
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flintmq import addresses
from flintmq.errors import FullError, HttpError, OptionError, ProtocolError, StartError
from flintmq.http import site as web
from flintmq.http.admission import Admission, address_of
from flintmq.http.browsers import Names, is_exposed, is_loopback
from flintmq.http.server import Server
from flintmq.http.tls import TlsListener, server_tls
from flintmq.http.tokens import Passes, Tokens
from flintmq.lookup.registry import Producer, Registry
from flintmq.options import NsqlookupdOptions, format_duration
from flintmq.protocol.wire import MAGIC_LOOKUP, NSQ_VERSION, decode_identify, valid_name
from flintmq.system import System, shares_of_descriptors

if TYPE_CHECKING:
    import ssl

__all__ = ["Lookupd"]

logger = logging.getLogger(__name__)

#: A connection that has not sent the magic, and then IDENTIFY, by then is closed. After it, silence is allowed.
MAGIC_SECONDS = 5.0
IDENTIFY_SECONDS = 30.0
#: After a fatal error the peer has this long to read it.
LINGER_SECONDS = 1.0
#: The longest command, and the longest body of IDENTIFY: real ones have some hundred bytes.
LONGEST_LINE = 4096
LONGEST_BODY = 64 << 10
#: Commands, and seconds, that a connection gets of one loop turn; the clock is looked at after every few commands.
COMMANDS_AT_ONCE = 256
SECONDS_AT_ONCE = 0.002
LOOK_EVERY = 8
#: Characters of each text that an nsqd says of itself: all of them are in every answer that names it.
LONGEST_TEXT = 256
#: After so many entries of a large answer the loop gets its turn; so many bytes count as one.
SLICE = 500
ENTRY_BYTES = 256
#: After so many lines of the log, likewise.
LOGGED_AT_ONCE = 64
OPEN_TO_ALL = "whoever reaches it can hide and delete topics; see docs/security.md"
#: See ``Lookupd.when_grown``.
GROWTH = 4_096
#: A half-dead connection is found out within a minute, so that an nsqd that came back is not listed twice for long.
KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3))

_IDENTIFY_FIELDS: dict[str, tuple[str, Any]] = {
    "broadcast_address": ("string", ""),
    "tcp_port": ("int", 0),
    "http_port": ("int", 0),
    "version": ("string", ""),
    "hostname": ("string", ""),
    "topology_zone": ("string", ""),
    "topology_region": ("string", ""),
    # Always that of the socket; but what is no text is no JSON of an nsqd.
    "remote_address": ("string", ""),
    # Ours: see ``--registration-token-file``.
    "token": ("string", ""),
}


class Lookupd:
    """``async with Lookupd() as lookupd`` runs an nsqlookupd in this process; two addresses say where."""

    def __init__(
        self,
        options: NsqlookupdOptions | None = None,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        system: System | None = None,
        **overrides: Any,
    ) -> None:
        self._system = system or System()
        if options is None:
            # Inside somebody's process: only loopback, any free port, unless said otherwise.
            local = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "broadcast_address": "127.0.0.1"}
            options = NsqlookupdOptions(**{**local, **overrides})
        elif overrides:
            raise TypeError("give options, or single ones by keyword, not both")
        options.validate()
        self.options = options
        self.registry = Registry(
            inactive_timeout=options.inactive_producer_timeout,
            tombstone_lifetime=options.tombstone_lifetime,
            now=now,
            wall=wall,
        )
        self.now = now
        # Those who ask must not keep nsqds out: each side has its own.
        # Without a limit it is half of the descriptors that are for connections.
        most = min(options.max_connections or 1 << 30, shares_of_descriptors()[1] // 2)
        per_address = options.max_connections_per_address
        self.admission = Admission(most, per_address, now)
        self._http_admission = Admission(most, per_address, now)
        self.sessions: dict[Session, None] = {}
        self._settling = False
        #: Called whenever GROWTH more names are known than at the last time.
        self.when_grown: Callable[[], None] = lambda: None
        self._grown = GROWTH
        self._tcp_bound = self._http_bound = ""
        self._tcp: asyncio.Server | TlsListener | None = None
        self._http: Server | None = None
        # Read at the start, and again by `reload`.
        self._tls: ssl.SSLContext | None = None
        self._tokens: Tokens | None = None
        #: What an nsqd must show; None: nothing.
        self.passes: Passes | None = None

    # --- Start and stop --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Lookupd:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. StartError says why it cannot."""
        options = self.options
        try:
            tls = self._tls = self._load_tls()
            if options.http_auth_token_file:
                self._tokens = Tokens(options.http_auth_token_file)
            if options.registration_token_file:
                self.passes = Passes(options.registration_token_file)
        except OptionError as exc:
            raise StartError(str(exc)) from exc
        tcp = self._system.listen(options.tcp_address, unix=False)
        try:
            http = self._system.listen(options.http_address, unix=False)
        except StartError:
            tcp.close()
            raise
        try:
            await self._listen(tcp, http, tls)
        except BaseException:
            # Most likely it is cancelled. Whoever starts it again may want the same ports.
            if self._http is not None:
                self._http.abort()
            tcp.close()
            http.close()
            raise

    async def _listen(self, tcp: socket.socket, http: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve connections to both sockets, which are bound."""
        options = self.options
        # Both before the first connection: the answer to IDENTIFY names them.
        self._tcp_bound = addresses.text_of(tcp.getsockname())
        self._http_bound = addresses.text_of(http.getsockname())
        own = (self._system.hostname(), options.broadcast_address, *options.http_allowed_hosts)
        self._http = Server(
            self._site(), names=Names(own, is_guarded=is_loopback(http)), admission=self._http_admission
        )
        await self._http.listen(http, tls)
        logger.info("HTTP: listening on %s", self.http_address)
        if is_exposed(http) and self._tokens is None and not options.tls_root_ca_file:
            logger.warning("HTTP: %s can be reached by other machines, and %s", self.http_address, OPEN_TO_ALL)
        loop = asyncio.get_running_loop()
        if tls is not None:
            self._tcp = TlsListener(lambda: Session(self), tcp, tls, MAGIC_SECONDS, self._admit, self.admission.release)
        else:
            self._tcp = await loop.create_server(lambda: Session(self), sock=tcp, backlog=addresses.BACKLOG)
        logger.info("TCP: listening on %s", self.tcp_address)
        if is_exposed(tcp) and self.passes is None and not options.tls_root_ca_file:
            logger.warning(
                "TCP: %s can be reached by other machines, and whoever reaches it can send consumers to its "
                "own broker; see docs/security.md",
                self.tcp_address,
            )

    def _load_tls(self) -> ssl.SSLContext | None:
        options = self.options
        if not options.tls_cert:
            return None
        return server_tls(
            options.tls_cert,
            options.tls_key,
            client_ca=options.tls_root_ca_file,
            policy="require-verify" if options.tls_root_ca_file else "",
            min_version=options.tls_min_version,
        )

    def reload(self) -> None:
        """Tokens, certificate and authorities are read again; what is no good leaves the old one in its place."""
        logger.info("NSQ: reloading")
        if self._tokens is not None:
            self._tokens.reload()
        if self.passes is not None:
            self.passes.reload()
        if self._tls is not None:
            try:
                context = self._load_tls()
            except OptionError as exc:
                logger.error("TLS: the certificate stays as it was - %s", exc)
                return
            assert context is not None
            self._tls = context
            if self._http is not None:
                self._http.renew_tls(context)
            if isinstance(self._tcp, TlsListener):
                self._tcp.renew(context)
            logger.info("TLS: the certificates were read again")

    async def stop(self) -> None:
        if self._tcp is not None:
            logger.info("TCP: closing %s", self.tcp_address)
            self._tcp.close()
            self._tcp = None
        for session in list(self.sessions):
            session.drop()
        if self._http is not None:
            logger.info("HTTP: closing %s", self.http_address)
            http, self._http = self._http, None
            await http.close()
        # Let the transports notice, so that no socket outlives us.
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def tcp_address(self) -> str:
        """Where nsqds connect: ``host:port`` as really bound."""
        return self._tcp_bound or self.options.tcp_address

    @property
    def http_address(self) -> str:
        """Where everyone else asks: ``host:port`` as really bound."""
        return self._http_bound or self.options.http_address

    def _admit(self, session: Hashable, address: str) -> bool:
        return not self.admission.admit(session, address)

    def settle(self) -> None:
        """Go on with what nsqds have left, a slice in each turn of the loop."""
        if not self._settling and self.registry.settle():
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle_on)

    def _settle_on(self) -> None:
        self._settling = False
        self.settle()

    def registered(self) -> None:
        """Notice how many names there are."""
        if self.registry.name_count >= self._grown:
            self._grown = self.registry.name_count + GROWTH
            self.when_grown()

    def identity(self) -> bytes:
        """What an nsqd is told about us."""
        return msgspec.json.encode(
            {
                "broadcast_address": self.options.broadcast_address,
                "hostname": self._system.hostname(),
                "http_port": addresses.port_of(self.http_address),
                "tcp_port": addresses.port_of(self.tcp_address),
                "version": NSQ_VERSION,
            }
        )

    # --- HTTP ------------------------------------------------------------------------------------------------------

    def _site(self) -> web.Site:
        return web.Site(
            [
                web.Route("GET", "/ping", self._ping, web.OPEN, plain=True),
                web.Route("GET", "/info", self._info, web.READ),
                web.Route("GET", "/topics", self._topics, web.READ),
                web.Route("GET", "/channels", self._channels, web.READ),
                web.Route("GET", "/lookup", self._lookup, web.READ),
                web.Route("GET", "/nodes", self._nodes, web.READ),
                web.Route("GET", "/debug", self._debug, web.READ),
                web.Route("GET", "/metrics", self._metrics, web.READ, plain=True),
                web.Route("POST", "/topic/create", self._create_topic, web.ADMIN),
                web.Route("POST", "/topic/delete", self._delete_topic, web.ADMIN),
                web.Route("POST", "/topic/tombstone", self._tombstone, web.ADMIN),
                web.Route("POST", "/channel/create", self._create_channel, web.ADMIN),
                web.Route("POST", "/channel/delete", self._delete_channel, web.ADMIN),
            ],
            self._tokens,
            self.options.http_allowed_hosts,
        )

    async def _ping(self, request: web.Request) -> str:
        return "OK"

    async def _info(self, request: web.Request) -> dict[str, str]:
        return {"version": NSQ_VERSION}

    async def _topics(self, request: web.Request) -> dict[str, list[str]]:
        return {"topics": list(self.registry.topics)}

    async def _channels(self, request: web.Request) -> dict[str, list[str]]:
        return {"channels": self.registry.channels(request.arguments().text("topic"))}

    async def _lookup(self, request: web.Request) -> dict[str, Any]:
        topic = request.arguments().text("topic")
        producers = self.registry.lookup(topic)
        if producers is None:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        return {"channels": self.registry.channels(topic), "producers": [producer.about() for producer in producers]}

    async def _nodes(self, request: web.Request) -> web.Answer:
        def pieces() -> Iterator[tuple[int, bytes]]:
            for node in self.registry.nodes():
                yield len(node["topics"]), web.json_bytes(node)

        return await _slowly(b'{"producers":[', pieces(), b"]}")

    async def _debug(self, request: web.Request) -> web.Answer:
        def pieces() -> Iterator[tuple[int, bytes]]:
            for name, records in self.registry.dump_steps():
                yield len(records), web.json_bytes(name) + b":" + web.json_bytes(records) if records else b""

        return await _slowly(b"{", pieces(), b"}")

    async def _metrics(self, request: web.Request) -> web.Answer:
        registry = self.registry
        values = (
            ("connections", "Connections of nsqds.", len(self.sessions)),
            ("producers", "Connected nsqds that have introduced themselves.", len(registry.producers)),
            ("active_producers", "Those of them that are alive.", registry.active_count()),
            ("topics", "Topics that are known.", len(registry.topics)),
            ("channels", "Channels that are known.", registry.channel_count),
        )
        lines = []
        for short, text, value in values:
            name = f"flintmq_nsqlookupd_{short}"
            lines.append(f"{web.metric_head(name, 'gauge', text)}{name} {value}\n")
        return web.Answer("".join(lines).encode(), web.PROMETHEUS)

    async def _create_topic(self, request: web.Request) -> None:
        topic = request.arguments().name("topic")
        await request.body()
        logger.info("DB: adding topic(%s)", topic)
        with _limited():
            self.registry.make_topic(topic)

    async def _delete_topic(self, request: web.Request) -> None:
        # A * means everything to NSQ's own daemon: one letter would empty the registry. Here it is no name.
        topic = request.arguments().name("topic")
        await request.body()
        channels, known = self.registry.channels(topic), topic in self.registry.topics
        self.registry.delete_topic(topic)
        for number, channel in enumerate(channels, 1):
            logger.info("DB: removing channel(%s) from topic(%s)", channel, topic)
            if not number % LOGGED_AT_ONCE:
                await asyncio.sleep(0)
        if known:
            logger.info("DB: removing topic(%s)", topic)

    async def _tombstone(self, request: web.Request) -> None:
        arguments = request.arguments()
        # NSQ looks at the name last.
        topic, node = arguments.text("topic"), arguments.text("node")
        arguments.name("topic")
        await request.body()
        logger.info("DB: setting tombstone for producer@%s of topic(%s)", ascii(node)[1:-1], topic)
        self.registry.tombstone(topic, node)

    async def _create_channel(self, request: web.Request) -> None:
        topic, channel = request.arguments().topic_and_channel()
        await request.body()
        logger.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        logger.info("DB: adding topic(%s)", topic)
        with _limited():
            self.registry.make_channel(topic, channel)

    async def _delete_channel(self, request: web.Request) -> None:
        topic, channel = request.arguments().topic_and_channel()
        await request.body()
        if not self.registry.delete_channel(topic, channel):
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        logger.info("DB: removing channel(%s) from topic(%s)", channel, topic)


class Session(asyncio.Protocol):
    """The connection of one nsqd. Every error is fatal but one: a registration that is one too many."""

    def __init__(self, lookupd: Lookupd) -> None:
        self._lookupd = lookupd
        self._loop = asyncio.get_running_loop()
        self._address = ""
        self._buffer = bytearray()
        self._greeted = False
        #: IDENTIFY was read, its body not yet.
        self._identifying = False
        self._producer: Producer | None = None
        #: Nothing more is read: an error was sent, or the connection is gone.
        self._over = False
        #: Its share of a turn was used up: the rest of what was read is run in one of the next turns.
        self._waiting = False
        self._ended = False
        self._writable = True

    def drop(self) -> None:
        self._transport.abort()

    # --- What asyncio calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance: uvloop's transports are none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._address = addresses.text_of(self._transport.get_extra_info("peername"))
        self._lookupd.sessions[self] = None
        self._patience = self._loop.call_later(MAGIC_SECONDS, self._transport.abort)
        if self._lookupd.admission.admit(self, address_of(self._transport.get_extra_info("peername"))):
            self._over = True
            self._transport.abort()
            return
        _keep_alive(self._transport.get_extra_info("socket"))
        logger.info("TCP: new client(%s)", self._address)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._buffer += data
        self._run()

    def _run(self) -> None:
        """Run the commands that are there, as many as one turn of the loop allows."""
        if self._over or self._waiting or not self._writable:
            return
        answers: list[bytes] = []
        deadline = self._loop.time() + SECONDS_AT_ONCE
        try:
            while (answer := self._next()) is not None:
                answers.append(answer)
                count = len(answers)
                if not count % LOOK_EVERY and (count >= COMMANDS_AT_ONCE or self._loop.time() >= deadline):
                    # The others first.
                    self._waiting = True
                    break
        except ProtocolError as exc:
            self._write(answers)
            self._refuse(exc)
            return
        except Exception:
            # A bug of ours costs this connection and no other.
            logger.exception("client(%s)", self._address)
            self._over = True
            self._transport.abort()
            return
        # This may pause writing: what is left is then run when the peer has read its answers.
        self._write(answers)
        if self._waiting:
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)
        elif self._writable:
            self._finish()

    def _go_on(self) -> None:
        self._waiting = False
        self._run()
        if not (self._waiting or self._over or self._ended or self._transport.is_closing()) and self._writable:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """The nsqd sends no more: whole commands that it has sent are still answered."""
        self._ended = True
        if self._over:
            return False
        if (self._waiting or not self._writable) and self._transport.can_write_eof():
            return True
        # TLS ends in both directions at once.
        self._finish()
        return False

    def _finish(self) -> None:
        """All commands are run. At the end of the stream what is half said is an error, and the connection closes."""
        if not self._ended or self._over:
            return
        self._over = True
        if self._identifying:
            missing = "body size" if len(self._buffer) < 4 else "body"
            error = ProtocolError("E_BAD_BODY", f"IDENTIFY failed to read {missing}")
            logger.error("[%s] - %s", self._address, error)
            self._write([_bytes(str(error))])
        self._transport.close()

    def pause_writing(self) -> None:
        # It does not read our answers: then we do not read its commands.
        self._writable = False
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        if not self._waiting:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._patience.cancel()
        self._lookupd.sessions.pop(self, None)
        self._lookupd.admission.release(self)
        if self._greeted:
            logger.info("PROTOCOL(V1): [%s] exiting ioloop", self._address)
        if self._producer is not None:
            self._lookupd.registry.remove(self._producer)
            self._lookupd.settle()
        logger.info("client(%s) - %s", self._address, exc or "EOF")

    # --- Commands --------------------------------------------------------------------------------------------------

    def _next(self) -> bytes | None:
        """Run the next command; its answer, None if it is not all there."""
        buffer = self._buffer
        if not self._greeted:
            if len(buffer) < 4:
                return None
            self._greet(bytes(buffer[:4]))
            del buffer[:4]
        if self._identifying:
            return self._identify()
        end = buffer.find(b"\n", 0, LONGEST_LINE + 1)
        if end < 0:
            if len(buffer) > LONGEST_LINE:
                raise ProtocolError("E_INVALID", f"a command of more than {LONGEST_LINE} bytes")
            return None
        words = bytes(buffer[:end]).strip().split(b" ")
        del buffer[: end + 1]
        return self._command(words[0], words[1:])

    def _greet(self, magic: bytes) -> None:
        if magic != MAGIC_LOOKUP:
            logger.error("client(%s) bad protocol magic '%s'", self._address, _shown(magic))
            raise ProtocolError("E_BAD_PROTOCOL")
        self._greeted = True
        self._patience.cancel()
        self._patience = self._loop.call_later(IDENTIFY_SECONDS, self._transport.abort)
        logger.info("CLIENT(%s): desired protocol magic '%s'", self._address, _shown(magic))

    def _command(self, verb: bytes, params: list[bytes]) -> bytes | None:
        match verb:
            case b"PING":
                self._ping()
                return b"OK"
            case b"IDENTIFY":
                if self._producer is not None:
                    raise ProtocolError("E_INVALID", "cannot IDENTIFY again")
                self._identifying = True
                return self._identify()
            case b"REGISTER" | b"UNREGISTER":
                return self._register(verb.decode(), params)
            case _:
                raise ProtocolError("E_INVALID", f"invalid command {_text(verb)}")

    def _identify(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        size = int.from_bytes(buffer[:4], "big", signed=True)
        if size < 0:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY invalid body size {size}")
        if size > LONGEST_BODY:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY body too big {size} > {LONGEST_BODY}")
        if len(buffer) < 4 + size:
            return None
        fields = decode_identify(buffer[4 : 4 + size].decode("utf-8", "replace"), _IDENTIFY_FIELDS)
        del buffer[: 4 + size]
        self._identifying = False
        if not all(fields[name] for name in ("broadcast_address", "tcp_port", "http_port", "version")):
            raise ProtocolError("E_BAD_BODY", "IDENTIFY missing fields")
        for name, value in fields.items():
            if isinstance(value, str) and len(value) > LONGEST_TEXT:
                raise ProtocolError("E_BAD_BODY", f"IDENTIFY {name} has more than {LONGEST_TEXT} characters")
        del fields["remote_address"]
        token, passes = fields.pop("token"), self._lookupd.passes
        if passes is not None and not passes.is_good(token):
            raise ProtocolError("E_UNAUTHORIZED", "IDENTIFY needs a token that is known here")
        producer = Producer(self._address, **fields)
        logger.info(
            "CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s",
            self._address,
            ascii(producer.broadcast_address)[1:-1],
            producer.tcp_port,
            producer.http_port,
            ascii(producer.version)[1:-1],
        )
        self._lookupd.registry.add(producer)
        self._producer = producer
        self._patience.cancel()
        return self._lookupd.identity()

    def _register(self, verb: str, params: list[bytes]) -> bytes:
        if self._producer is None:
            raise ProtocolError("E_INVALID", "client must IDENTIFY")
        if not params:
            raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
        topic, channel = params[0], params[1] if len(params) > 1 else b""
        if not valid_name(topic):
            raise ProtocolError("E_BAD_TOPIC", f"{verb} topic name '{_text(topic)}' is not valid")
        if channel and not valid_name(channel):
            raise ProtocolError("E_BAD_CHANNEL", f"{verb} channel name '{_text(channel)}' is not valid")
        registry = self._lookupd.registry
        if verb == "UNREGISTER":
            registry.unregister(self._producer, topic.decode(), channel.decode())
            self._lookupd.settle()
            return b"OK"
        try:
            registry.register(self._producer, topic.decode(), channel.decode())
        except FullError as exc:
            # Not fatal: closing would make the nsqd connect again and say it all once more, for ever.
            logger.error("[%s] - REGISTER %s %s - %s", self._address, topic.decode(), channel.decode(), exc)
            return f"E_INVALID REGISTER {exc}".encode()
        self._lookupd.registered()
        return b"OK"

    def _ping(self) -> None:
        producer = self._producer
        if producer is not None:
            if logger.isEnabledFor(logging.INFO):
                ago = format_duration(self._lookupd.now() - producer.seen)
                logger.info("CLIENT(%s): pinged (last ping %s)", self._address, ago)
            self._lookupd.registry.ping(producer)

    # --- Output ----------------------------------------------------------------------------------------------------

    def _write(self, answers: list[bytes]) -> None:
        if answers:
            self._transport.write(b"".join(len(answer).to_bytes(4, "big") + answer for answer in answers))

    def _refuse(self, error: ProtocolError) -> None:
        """Send the error, then close; not at once, for with unread input that would reset the connection."""
        logger.error("[%s] - %s", self._address, _shown(_bytes(str(error))))
        self._over = True
        self._buffer.clear()
        self._write([_bytes(str(error))])
        self._patience.cancel()
        if not self._transport.can_write_eof():
            # TLS ends in both directions at once.
            self._transport.close()
            return
        with contextlib.suppress(OSError):  # the peer may have reset the connection
            self._transport.write_eof()
        # What comes is passed over: unread it would reset the connection.
        self._transport.resume_reading()
        self._patience = self._loop.call_later(LINGER_SECONDS, self._transport.abort)


# --- Small things -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """One name too many is the server's trouble, not the client's."""
    try:
        yield
    except FullError as exc:
        logger.error("HTTP: %s", exc)
        raise HttpError(503, "TOO_MANY_REGISTRATIONS") from exc


async def _slowly(head: bytes, pieces: Iterator[tuple[int, bytes]], tail: bytes) -> web.Answer:
    """Return a list as an answer, put together with pauses; each piece comes with the number of entries it cost.

    A long one is sent in blocks, too: to copy tens of megabytes in one go takes as long as to make them.
    """
    blocks: list[bytes] = []
    made: list[bytes] = []
    cost = 0
    for entries, piece in pieces:
        if piece:
            made.append(piece)
        cost += 1 + entries + len(piece) // ENTRY_BYTES
        if cost > SLICE:
            if made:
                blocks.append(b",".join(made))
                made.clear()
            cost = 0
            await asyncio.sleep(0)
    if made:
        blocks.append(b",".join(made))
    if len(blocks) < 2:
        return web.Answer(head + b"".join(blocks) + tail, web.JSON)
    length = len(head) + sum(map(len, blocks)) + len(blocks) - 1 + len(tail)

    async def send() -> AsyncGenerator[bytes, None]:
        yield head
        for number, block in enumerate(blocks):
            yield b"," + block if number else block
            await asyncio.sleep(0)
        yield tail

    return web.Answer(content_type=web.JSON, headers={"Content-Length": str(length)}, pieces=send())


def _keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shown(data: bytes) -> str:
    """Bytes from a peer as part of one line of a log."""
    return ascii(data.decode("utf-8", "backslashreplace"))[1:-1]
