"""nsqd's HTTP API: every route, and the listeners that serve them.

An ``Api`` belongs to one broker. It owns the table of routes, the tokens, the TLS context of the HTTPS port, and the
way a connection takes: publishes and ``/ping`` are answered by ``lane``, everything else by the general server. That
one is made, with what it imports, in the background right after the start. What a request does is its topic's, its
channel's or the broker's business; how the broker is doing is told by ``stats``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq import addresses
from flintmq.addresses import BACKLOG
from flintmq.broker.http import dead_letters, debug, peek
from flintmq.broker.http import log as log_api
from flintmq.broker.http import pipelines as pipelines_api
from flintmq.broker.http import settings as settings_api
from flintmq.broker.http import stage as stage_api
from flintmq.broker.http.lane import IDLE_SECONDS, HttpConnection, HttpLane
from flintmq.broker.http.publish import REPEATED, Content, Publishing, refusal
from flintmq.broker.http.targets import existing_topic, named_channel, named_topic
from flintmq.broker.net.sockets import Poller, SocketTransport
from flintmq.broker.observe import stats
from flintmq.broker.observe.deltas import Deltas
from flintmq.broker.observe.prometheus import scrape
from flintmq.broker.observe.statsd import statsd_prefix
from flintmq.errors import UNREADABLE, HttpError, LimitError, OptionError, PublishError
from flintmq.http.browsers import Names, is_loopback
from flintmq.http.server import Server
from flintmq.http.site import ADMIN, JSON, OPEN, PUBLISH, READ, Answer, Request, Route, Site, envelope
from flintmq.http.tls import TlsListener, server_tls
from flintmq.http.tokens import Tokens
from flintmq.options import LOG_LEVEL, option_table
from flintmq.protocol.wire import NSQ_VERSION

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.daemon import Broker

__all__ = ["Api"]

logger = logging.getLogger(__name__)

#: What is read from a socket that the general server serves.
RECEIVE_BYTES = 64 << 10
HANDSHAKE_SECONDS = 10.0


class Api:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        options = broker.options
        self._tokens = Tokens(options.http_auth_token_file) if options.http_auth_token_file else None
        self._publishing = Publishing(broker)
        self._deltas = Deltas(broker)
        self.site = Site(self._routes(), self._tokens, options.http_allowed_hosts)
        self._tls: ssl.SSLContext | None = None
        if options.tls_cert:
            self._tls = self._load_tls()
        self._lanes: list[HttpLane] = []
        self._general: list[_GeneralServer] = []
        self._listeners: list[asyncio.Server | TlsListener] = []
        broker.options_changed.append(self._forget)
        broker.reloaders.append(self.reload)
        if self._tokens is not None:
            self._tokens.changed.append(self._forget)

    # --- Listening -------------------------------------------------------------------------------------------------

    async def listen(self, sock: socket.socket, poller: Poller | None) -> None:
        """Serve plain HTTP on a bound socket."""
        refused = None
        if self._broker.options.tls_required == "true":
            # Clients look for the port in it, in this very form.
            text = f'{{"message": "TLS_REQUIRED", "https_port": {addresses.port_of(self._broker.https_address)}}}'
            refused = envelope(Answer(text.encode(), JSON, 403))
        lane = self._lane(sock, refused)
        if poller is not None:
            poller.listen(sock, lane.connection)
        elif sock.family == socket.AF_UNIX:
            self._listeners.append(await self._loop.create_unix_server(lane.connection, sock=sock, backlog=BACKLOG))
        else:
            self._listeners.append(await self._loop.create_server(lane.connection, sock=sock, backlog=BACKLOG))

    async def listen_tls(self, sock: socket.socket) -> None:
        """Serve HTTPS on a bound socket; for a broker with a certificate."""
        assert self._tls is not None
        lane = self._lane(sock, None)
        listener = TlsListener(lane.connection, sock, self._tls, HANDSHAKE_SECONDS, self._admit, self._release)
        self._listeners.append(listener)

    def _admit(self, connection: Hashable, address: str) -> bool:
        """Is there room for one more connection? Asked before its TLS handshake."""
        if not self._broker.listeners.descriptors.admit():
            return False
        connections = self._broker.connections
        return connections is None or not connections.admit(connection, address)

    def _release(self, connection: Hashable) -> None:
        if self._broker.connections is not None:
            self._broker.connections.release(connection)

    def _load_tls(self) -> ssl.SSLContext:
        """Read what the options name. OptionError if it does not fit."""
        options = self._broker.options
        return server_tls(
            options.tls_cert,
            options.tls_key,
            client_ca=options.tls_root_ca_file,
            policy=options.tls_client_auth_policy,
            min_version=options.tls_min_version,
        )

    def _lane(self, sock: socket.socket, refused: Answer | None) -> HttpLane:
        options = self._broker.options
        own = (self._broker.disk.system.hostname(), options.broadcast_address, *options.http_allowed_hosts)
        names = Names(own, is_guarded=is_loopback(sock))
        general = _GeneralServer(self._broker, self.site, names, refused)
        self._general.append(general)
        is_refused = refused is not None
        lane = HttpLane(self._broker, self.site, self._publishing, general.take, names, refused=is_refused)
        self._lanes.append(lane)
        return lane

    def connection_count(self) -> int:
        """Return how many connections there are: of the lanes, of the general servers, and in their TLS handshake."""
        return (
            sum(len(lane.connections) for lane in self._lanes)
            + sum(general.server.connection_count() for general in self._general)
            + sum(one.connection_count() for one in self._listeners if isinstance(one, TlsListener))
        )

    def drop(self) -> None:
        """No more requests: every connection goes at once."""
        self._close_lanes()
        for general in self._general:
            try:
                general.server.abort()
            except Exception:
                logger.exception("HTTP: a general server could not drop its connections")

    async def close(self) -> None:
        """No more requests; those that are under way get a moment to end. Never raises: a stop goes on."""
        self._close_lanes()
        for general in self._general:
            try:
                await general.server.close()
            except Exception:
                logger.exception("HTTP: a general server could not be closed")

    def _close_lanes(self) -> None:
        listeners, self._listeners = self._listeners, []
        for one in (*listeners, *self._lanes):
            try:
                one.close()
            except Exception:
                logger.exception("HTTP: a listener could not be closed")

    def reload(self) -> None:
        """Tokens, certificate and authorities are read again; what is no good leaves the old one in its place."""
        if self._tokens is not None:
            self._tokens.reload()
        if self._tls is not None:
            try:
                self._tls = self._load_tls()
            except OptionError as exc:
                logger.error("HTTPS: the certificate stays as it was - %s", exc)
                return
            for listener in self._listeners:
                if isinstance(listener, TlsListener):
                    listener.renew(self._tls)
            logger.info("HTTPS: the certificates were read again")

    def _forget(self) -> None:
        self._publishing.forget()
        for lane in self._lanes:
            lane.forget()

    # --- Routes ----------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        """All there are. ``docs/http.md`` has an example of each."""
        return [
            Route("GET", "/ping", self._ping, OPEN, plain=True),
            Route("GET", "/info", self._info, READ),
            # Publishing. Nearly always it is the lane that answers these.
            Route("POST", "/pub", self._pub, PUBLISH, unlogged=True),
            Route("POST", "/mpub", self._mpub, PUBLISH, unlogged=True),
            Route("GET", "/stats", self._stats, READ),
            Route("GET", "/metrics", self._metrics, READ),
            # Topics and channels.
            Route("POST", "/topic/create", self._create_topic, ADMIN),
            Route("POST", "/topic/delete", self._delete_topic, ADMIN),
            Route("POST", "/topic/empty", self._empty_topic, ADMIN),
            Route("POST", "/topic/pause", self._pause_topic(True), ADMIN),
            Route("POST", "/topic/unpause", self._pause_topic(False), ADMIN),
            Route("POST", "/channel/create", self._create_channel, ADMIN),
            Route("POST", "/channel/delete", self._delete_channel, ADMIN),
            Route("POST", "/channel/empty", self._empty_channel, ADMIN),
            Route("POST", "/channel/pause", self._pause_channel(True), ADMIN),
            Route("POST", "/channel/unpause", self._pause_channel(False), ADMIN),
            *dead_letters.routes(self._broker),
            *peek.routes(self._broker),
            # What lies in the files.
            *log_api.routes(self._broker),
            *stage_api.routes(self._broker),
            *pipelines_api.routes(self._broker),
            # The end of the node.
            Route("POST", "/drain", self._drain, ADMIN),
            # Settings.
            Route("GET", "/config/:opt", self._get_config, READ),
            Route("PUT", "/config/:opt", self._put_config, ADMIN),
            *settings_api.routes(self._broker),
            *debug.routes(),
        ]

    async def _ping(self, request: Request) -> str:
        health = self._broker.health
        if health != "OK":
            raise HttpError(500, health)
        return health

    async def _info(self, request: Request) -> dict[str, Any]:
        broker, options = self._broker, self._broker.options
        info: dict[str, Any] = {
            "version": NSQ_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": broker.disk.system.hostname(),
            "http_port": _shown_port(broker.http_address),
            "tcp_port": _shown_port(broker.tcp_address),
            "start_time": broker.counters.start_time,
            "max_heartbeat_interval": options.max_heartbeat_interval,
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": options.max_output_buffer_timeout,
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }
        # NSQ does not look at the query.
        if "extended" in request.query and request.arguments().get("extended") == "true":
            info["flintmq"] = broker.about()
            if broker.http_port:
                info["flintmq"]["http_address"] = addresses.join(options.broadcast_address, broker.http_port)
        return info

    async def _drain(self, request: Request) -> str:
        """Draining goes on after the answer; the log and ``/stats`` tell how far it is."""
        self._broker.drain()
        return "OK"

    # --- Publishing ------------------------------------------------------------------------------------------------

    async def _pub(self, request: Request) -> str | Answer:
        body = await request.body(self._broker.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise HttpError(400, "MSG_EMPTY")
        return await self._publish(request, body, batch=False)

    async def _mpub(self, request: Request) -> str | Answer:
        body = await request.body(self._broker.options.max_body_size, "BODY_TOO_BIG")
        return await self._publish(request, body, batch=True)

    async def _publish(self, request: Request, body: bytearray, *, batch: bool) -> str | Answer:
        publishing = self._publishing
        header = request.headers.get("X-Flintmq-Key")
        key = publishing.key(None if header is None else header.encode("utf-8", "surrogateescape"))
        order = publishing.order(request.query, batch=batch)
        topic = publishing.topic(order)
        data = bytearray(4) + body
        content = None
        if key and publishing.is_long(order, len(body), batch=batch):
            reading = Content()
            while not reading.step(data, 4, len(data)):
                await self._until(self._broker.backlog.add)
            content = reading.value
            topic = publishing.topic(order)
        while (obstacle := publishing.obstacle(topic)) is not None:
            await self._until(obstacle)
            topic = publishing.topic(order)
        is_repeat = False
        if key:
            commit, is_repeat = publishing.once(key, order, topic, data, 4, len(data), batch=batch, content=content)
        else:
            publish = publishing.batch if batch else publishing.message
            commit = publish(order, topic, data, 4, len(data))
        if commit is not None:
            await self._until(commit.waiters.append)
            if commit.error is not None:
                raise refusal(commit.error)
        return REPEATED if is_repeat else "OK"

    async def _until(self, tell: Callable[[Callable[[], None]], None]) -> None:
        """Wait for something that takes a callback."""
        happened = self._loop.create_future()
        tell(lambda: None if happened.done() else happened.set_result(None))
        await happened

    # --- How it is doing -------------------------------------------------------------------------------------------

    async def _stats(self, request: Request) -> Any:
        arguments = request.arguments()
        wanted: dict[str, Any] = {
            "topic": arguments.get("topic", ""),
            "channel": arguments.get("channel", ""),
            "include_clients": arguments.flag("include_clients", True),
            "include_mem": arguments.flag("include_mem", True),
        }
        if arguments.get("format") == "json":
            extended = arguments.get("extended") == "true"
            if extended and "since" in arguments:
                return Answer(await self._deltas.json(arguments["since"], wanted["include_mem"]), JSON)
            return Answer(await stats.survey_json(self._broker, **wanted, extended=extended), JSON)
        return await stats.report(self._broker, **wanted)

    async def _metrics(self, request: Request) -> Answer:
        body, content_type = await scrape(self._broker)
        return Answer(body, content_type)

    # --- Topics and channels ---------------------------------------------------------------------------------------

    async def _create_topic(self, request: Request) -> None:
        name = request.arguments().topic()
        try:
            topic = self._broker.topic_for_client(name)
        except LimitError as exc:
            raise refusal(exc) from exc
        except PublishError as exc:
            logger.error("TOPIC(%s): cannot be made - %s", name, exc)
            raise HttpError(500, "INTERNAL_ERROR") from exc
        await self._broker.as_safe_as(topic)

    async def _delete_topic(self, request: Request) -> None:
        # Deleting and pausing look the name up without asking whether it can exist, as in NSQ.
        topic = existing_topic(self._broker, request.arguments().text("topic"))
        self._broker.delete_topic(topic.name)
        await self._broker.as_safe_as(topic)

    async def _empty_topic(self, request: Request) -> None:
        topic = named_topic(self._broker, request.arguments())
        topic.empty()
        await self._broker.as_safe_as(topic)

    def _pause_topic(self, paused: bool) -> Callable[[Request], Awaitable[None]]:
        async def handler(request: Request) -> None:
            topic = existing_topic(self._broker, request.arguments().text("topic"))
            topic.pause(paused)
            await self._broker.as_safe_as(topic)

        return handler

    async def _create_channel(self, request: Request) -> None:
        topic_name, name = request.arguments().topic_and_channel()
        topic = existing_topic(self._broker, topic_name)
        try:
            self._broker.channel_for_client(topic, name)
        except LimitError as exc:
            raise refusal(exc) from exc
        await self._broker.as_safe_as(topic)

    async def _delete_channel(self, request: Request) -> None:
        channel = named_channel(self._broker, request.arguments())
        channel.topic.delete_channel(channel.name)
        await self._broker.as_safe_as(channel.topic)

    async def _empty_channel(self, request: Request) -> None:
        channel = named_channel(self._broker, request.arguments())
        channel.empty()
        await self._broker.as_safe_as(channel.topic)

    def _pause_channel(self, paused: bool) -> Callable[[Request], Awaitable[None]]:
        async def handler(request: Request) -> None:
            channel = named_channel(self._broker, request.arguments())
            channel.pause(paused)
            await self._broker.as_safe_as(channel.topic)

        return handler

    # --- Settings --------------------------------------------------------------------------------------------------

    async def _get_config(self, request: Request) -> Any:
        return self._setting(request.parameters["opt"])

    def _setting(self, key: str) -> Any:
        options = self._broker.options
        for entry in option_table(type(options)).values():
            if entry.key == key:
                break
        else:
            raise HttpError(400, "INVALID_OPTION")
        value = getattr(options, key)
        if key == "statsd_prefix":
            return statsd_prefix(self._broker)
        if entry.kind.words is not None and entry.kind.words[value] is not None:
            value = entry.kind.words[value]
        if isinstance(value, str):
            return value
        # Numbers, too, are JSON, not text; and a whole number has no fraction, whatever its type.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    async def _put_config(self, request: Request) -> Any:
        limit = self._broker.options.max_msg_size
        body = await request.body(limit, "INVALID_VALUE")
        if not body:
            raise HttpError(413, "INVALID_VALUE")
        key = request.parameters["opt"]
        if key == "nsqlookupd_tcp_addresses":
            try:
                addresses = msgspec.json.decode(body, type=list[str] | None)
            except UNREADABLE as exc:
                raise HttpError(400, "INVALID_VALUE") from exc
            self._broker.change_options(nsqlookupd_tcp_addresses=tuple(addresses or ()))
        elif key == "log_level":
            try:
                level = LOG_LEVEL.from_text(body.decode("utf-8", "replace"))
            except ValueError as exc:
                raise HttpError(400, "INVALID_VALUE") from exc
            self._broker.change_options(log_level=level)
        else:
            raise HttpError(400, "INVALID_OPTION")
        return self._setting(key)


def _shown_port(address: str) -> int:
    """Return the port as NSQ shows it: -1 for a unix socket, 0 for no listener at all."""
    return addresses.port_of(address) or (-1 if address else 0)


# --- Handing over -----------------------------------------------------------------------------------------------------


class _GeneralServer:
    """The server that takes over connections from the lane of one listener."""

    def __init__(self, broker: Broker, site: Site, names: Names, refused: Answer | None) -> None:
        self._broker = broker
        options = broker.options
        self.server = Server(
            site,
            idle=IDLE_SECONDS,
            head=options.http_header_timeout / 1e9,
            body=options.http_body_timeout / 1e9,
            refusal=refused,
            names=names,
        )

    def take(self, connection: HttpConnection, data: bytes) -> None:
        """Serve the connection from here on; ``data`` is what was read from it and not answered."""
        transport = connection.transport
        connections = self._broker.connections
        if transport.is_closing():
            if connections is not None:
                connections.release(connection)
            return
        protocol = self.server.protocol(None if connections is None else partial(connections.release, connection))
        if isinstance(transport, SocketTransport):
            transport.protocol = _Handed(protocol, transport.sock)
        else:
            transport.set_protocol(protocol)
        protocol.connection_made(transport)
        # Before it gets data: it may have reason to read no further.
        transport.resume_reading()
        protocol.data_received(data)


class _Handed:
    """The protocol of a connection, as a plain socket of the Poller sees it."""

    lane = None

    def __init__(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        self._protocol = protocol
        self._socket = sock
        self.connection_made = protocol.connection_made
        self.connection_lost = protocol.connection_lost
        self.eof_received = protocol.eof_received
        self.pause_writing = protocol.pause_writing
        self.resume_writing = protocol.resume_writing

    def receive(self) -> None:
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._protocol.data_received(data)
