"""Brokers and lookupds as Spark's processes speak to them: plain sockets and http.client, nothing to install.

Connection is one blocking TCP connection to an nsqd after its handshake. Web asks over HTTP and keeps connections open.
Cluster finds the brokers and what they can do. None of them is ever pickled: each process makes its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import ssl
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from flintmq.addresses import join, split
from flintmq.errors import ConnectError, HttpError, ProtocolError
from flintmq.spark.shipped.options import Network

__all__ = ["Broker", "Cluster", "Connection", "Found", "Refused", "Web", "http_url"]

logger = logging.getLogger("flintmq.spark")

#: Larger is no answer of a broker or a lookupd to a small question.
_ANSWER_BYTES = 64 << 20
_RECEIVE_BYTES = 256 << 10
_RESPONSE, _ERROR, _MESSAGE = 0, 1, 2
_HEARTBEAT = b"_heartbeat_"
#: The size of a frame that begins with the letters HTTP.
_HTTP = 0x48545450


def http_url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _tls_context(network: Network) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=network.tls_ca or None)
    if not network.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if network.tls_cert:
        context.load_cert_chain(network.tls_cert, network.tls_key or None)
    return context


# --- TCP --------------------------------------------------------------------------------------------------------------


class Connection:
    """A connection to an nsqd: IDENTIFY, TLS, deflate and AUTH are done when it is there. ConnectError says why not."""

    def __init__(
        self, address: str, network: Network, *, client_id: str = "flintmq-spark", timeout: float | None = None
    ) -> None:
        self.address = address
        #: What the broker answered to IDENTIFY.
        self.features: dict[str, Any] = {}
        self._network = network
        self._received = bytearray()
        self._inflate: Any = None
        self._deflate: Any = None
        try:
            self._socket: socket.socket = socket.create_connection(
                split(address)[:2], timeout=timeout or network.timeout
            )
        except OSError as exc:
            raise ConnectError(f"nsqd {address} cannot be reached: {exc.strerror or exc}") from exc
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(client_id)
        except (OSError, ValueError, zlib.error, ProtocolError) as exc:
            self.close()
            raise ConnectError(f"nsqd {address} did not take the connection: {exc}") from exc
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, client_id: str) -> None:
        network = self._network
        about = {
            "client_id": client_id,
            "hostname": socket.gethostname(),
            "user_agent": "flintmq-spark",
            "feature_negotiation": True,
            "heartbeat_interval": 30_000,
            "tls_v1": network.tls,
            "deflate": network.deflate,
            "deflate_level": 6,
            "flintmq": True,
        }
        self.send(b"  V2" + _command(b"IDENTIFY", json.dumps(about).encode()))
        answer = self._answer("IDENTIFY")
        if answer != b"OK":
            self.features = json.loads(answer)
        if network.tls:
            if not self.features.get("tls_v1"):
                raise ConnectError(f"nsqd {self.address} has no TLS: take nsq.tls away, or set it up there")
            context = _tls_context(network)
            self._socket = context.wrap_socket(self._socket, server_hostname=split(self.address).host)
            self._answer("TLS")
        if network.deflate and self.features.get("deflate"):
            self._inflate = zlib.decompressobj(-15)
            self._deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
            # What follows the answer to IDENTIFY is compressed, and may have come together with it.
            self._received = bytearray(self._inflate.decompress(self.leftover()))
            self._answer("deflate")
        if self.features.get("auth_required"):
            if not network.auth_secret:
                raise ConnectError(f"nsqd {self.address} asks for AUTH: set the option nsq.auth.secret")
            self.send(_command(b"AUTH", network.auth_secret.encode()))
            self._answer("AUTH")

    def _answer(self, what: str) -> bytes:
        kind, data = self.next_frame()
        if kind != _RESPONSE:
            raise ProtocolError(data.decode(errors="replace"), fatal=True)
        return data

    @property
    def flintmq(self) -> dict[str, Any]:
        """What a broker of ours says of itself; empty from others."""
        found = self.features.get("flintmq")
        return found if isinstance(found, dict) else {}

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, data: bytes) -> None:
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._socket.sendall(data)

    def receive(self) -> bytes:
        """What came, at least a byte; empty when the broker has closed. TimeoutError after the timeout."""
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data or self._inflate is None:
                return data
            data = self._inflate.decompress(data)
            if data:
                return bytes(data)

    def next_frame(self) -> tuple[int, bytes]:
        """The next frame that is no heartbeat: its type and what it holds. ConnectionError at the end."""
        while True:
            if len(self._received) >= 4:
                (size,) = struct.unpack_from(">I", self._received)
                if size == _HTTP:
                    raise ProtocolError("E_INVALID", "an HTTP server answers there: is that the HTTP port of a broker?")
                if not 4 <= size <= _ANSWER_BYTES:
                    raise ProtocolError("E_INVALID", f"a frame of {size} bytes")
                if len(self._received) >= 4 + size:
                    (kind,) = struct.unpack_from(">I", self._received, 4)
                    data = bytes(self._received[8 : 4 + size])
                    del self._received[: 4 + size]
                    if kind == _RESPONSE and data == _HEARTBEAT:
                        self.send(b"NOP\n")
                        continue
                    return kind, data
            more = self.receive()
            if not more:
                raise ConnectionError("the broker has closed the connection")
            self._received += more

    def leftover(self) -> bytes:
        """What came behind the last frame; for who reads on by ``receive``."""
        data = bytes(self._received)
        self._received.clear()
        return data

    def subscribe(self, topic: str, channel: str) -> None:
        self.send(f"SUB {topic} {channel}\n".encode())
        self._answer("SUB")

    def close(self) -> None:
        # Somebody may be waiting in receive(): closing alone would not wake him.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _command(name: bytes, body: bytes) -> bytes:
    return name + b"\n" + struct.pack(">I", len(body)) + body


# --- HTTP -------------------------------------------------------------------------------------------------------------


class Web:
    """Questions over HTTP. Connections stay open, one per address; for one thread."""

    def __init__(self, network: Network, timeout: float | None = None) -> None:
        self._network = network
        self._timeout = timeout or network.timeout
        self._open: dict[str, http.client.HTTPConnection] = {}
        self._tls: ssl.SSLContext | None = None

    def ask(
        self, method: str, address: str, path: str, body: bytes | None = None, /, **query: object
    ) -> dict[str, Any]:
        """The JSON object of an answer. HttpError for a status other than 200, ConnectError without an answer."""
        response = self.request(method, address, path, body, **query)
        data = self._body(response, address)
        try:
            read = json.loads(data) if data else {}
        except ValueError as exc:
            raise ConnectError(f"what {address} answers to {path} is no JSON") from exc
        if isinstance(read, dict) and "status_code" in read and isinstance(read.get("data"), dict):
            # As before NSQ 1.0.
            read = read["data"]
        return read if isinstance(read, dict) else {"value": read}

    def request(
        self, method: str, address: str, path: str, body: bytes | None = None, /, **query: object
    ) -> http.client.HTTPResponse:
        """An answer of status 200, still to be read whole before the next question to this address."""
        text = urlencode([(name, str(value)) for name, value in query.items()], quote_via=quote)
        target = f"{urlsplit(http_url(address)).path}{path}" + (f"?{text}" if text else "")
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if self._network.http_token:
            headers["Authorization"] = f"Bearer {self._network.http_token}"
        while True:
            is_new = address not in self._open
            connection = self._open.get(address) or self._connect(address)
            try:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as exc:
                self.drop(address)
                if is_new:
                    raise ConnectError(f"{address} cannot be asked over HTTP: {_reason(exc)}") from exc
                # It was closed while nobody looked: that says nothing about a new one.
                continue
            if response.status == 200:
                return response
            data = self._body(response, address)
            raise Refused(response.status, data)

    def _body(self, response: http.client.HTTPResponse, address: str) -> bytes:
        try:
            data = response.read(_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as exc:
            self.drop(address)
            raise ConnectError(f"{address} broke off its answer: {_reason(exc)}") from exc
        if len(data) > _ANSWER_BYTES or response.will_close:
            self.drop(address)
        return data

    def _connect(self, address: str) -> http.client.HTTPConnection:
        parts = urlsplit(http_url(address))
        host, timeout = parts.hostname or "", self._timeout
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._tls = self._tls or _tls_context(self._network)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=timeout)
        self._open[address] = connection
        return connection

    def drop(self, address: str) -> None:
        """Forget a connection, as after an answer that was not read to its end."""
        connection = self._open.pop(address, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for address in list(self._open):
            self.drop(address)


class Refused(HttpError):
    """An HttpError with what else the answer says, such as where a log begins."""

    def __init__(self, status: int, data: bytes) -> None:
        try:
            read = json.loads(data)
        except ValueError:
            read = {}
        details: dict[str, Any] = read if isinstance(read, dict) else {}
        text = str(details.get("message") or data[:200].decode(errors="replace"))
        super().__init__(status, text.partition(":")[0].strip())
        #: The code is the first word; what follows is for people.
        self.reason = text
        self.details: dict[str, Any] = details


def _reason(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


# --- Who is there -----------------------------------------------------------------------------------------------------


@dataclass
class Broker:
    """An nsqd, and what it can do as far as we know."""

    tcp: str = ""
    http: str = ""
    #: The identity of one of ours; of others the address.
    node: str = ""
    has_log: bool = False
    has_keys: bool = False
    has_stage: bool = False
    #: Topics, where a lookupd told them.
    topics: tuple[str, ...] = ()


class Found(NamedTuple):
    """Who answers, and what is to be said about those who do not."""

    brokers: list[Broker]
    failures: list[str]
    #: Of the failures those of brokers; the others are of lookupds.
    silent: Sequence[str] = ()


class Waiting(NamedTuple):
    """What a channel still has for a client."""

    messages: int
    #: Brokers that did not say it, and why: by TCP address, or by HTTP address where only that is known.
    silent: dict[str, str]


def _in_flight_to(client: str, channel: Mapping[str, Any]) -> int:
    """Return the messages of a channel's statistics that were sent to a client and are not finished."""
    clients = channel.get("clients") or []
    return sum(int(one.get("in_flight_count") or 0) for one in clients if one.get("client_id") == client)


class Cluster:
    """The brokers that the options name, or that the lookupds know."""

    def __init__(self, network: Network, web: Web | None = None, timeout: float | None = None) -> None:
        self._network = network
        self._timeout = timeout
        self._web = web or Web(network, timeout)

    def close(self) -> None:
        self._web.close()

    def brokers(self, strict: bool = False) -> list[Broker]:
        """Everybody who answers; ConnectError if nobody does, or with ``strict`` if somebody does not."""
        found = self.survey()
        if not found.brokers or (strict and found.failures):
            raise ConnectError("; ".join(found.failures) or "the nsqlookupds know no broker")
        for failure in found.failures:
            logger.warning("%s", failure)
        return found.brokers

    def survey(self) -> Found:
        """Ask everybody. ConnectError if no lookupd answers."""
        return self._from_lookupds() if self._network.lookupds else self._from_options()

    def addresses(self) -> list[str]:
        """The TCP addresses of all brokers, whether they answer or not; those of lookupds as these have them."""
        if not self._network.lookupds:
            return sorted(self._network.nsqds)
        return sorted({producer.tcp for producer in self._producers().brokers})

    def topics(self, broker: Broker) -> list[str]:
        """The topics of a broker."""
        if broker.topics:
            return list(broker.topics)
        if not broker.http:
            raise ConnectError(
                f"nsqd {broker.tcp} does not say where its HTTP side is, so its topics cannot be listed: name it by "
                "nsq.nsqd.http.addresses, or name topics by subscribe"
            )
        try:
            stats = self._web.ask("GET", broker.http, "/stats", format="json", include_clients="false")
        except HttpError as exc:
            raise ConnectError(f"{broker.http} does not list its topics: {exc}") from exc
        return [entry["topic_name"] for entry in stats.get("topics") or []]

    def waiting(self, channel: str, wanted: Callable[[str], bool], client: str) -> Waiting:
        """Count the messages that a channel still has for a client, of the wanted topics, on all brokers.

        These are the ones that could be delivered now, and those in flight to the client. Paused topics and channels
        count nothing: their messages do not come, however long one waits. ConnectError if no lookupd answers.
        """
        total = 0
        silent: dict[str, str] = {}
        for broker in self._with_topics(wanted, silent):
            if not broker.http:
                continue
            try:
                stats = self._web.ask("GET", broker.http, "/stats", format="json", include_clients="true")
            except (ConnectError, HttpError) as exc:
                silent[broker.tcp or broker.http] = str(exc)
                continue
            for topic in stats.get("topics") or []:
                if wanted(topic["topic_name"]) and not topic.get("paused"):
                    total += topic["depth"]
                    for entry in topic.get("channels") or []:
                        if entry["channel_name"] == channel and not entry.get("paused"):
                            total += entry["depth"] + _in_flight_to(client, entry)
        return Waiting(total, silent)

    def _with_topics(self, wanted: Callable[[str], bool], silent: dict[str, str]) -> list[Broker]:
        """Return the brokers that may have wanted topics, with the HTTP sides that are known.

        Those that did not say where theirs is are added to ``silent``.
        """
        network = self._network
        if network.lookupds:
            return [one for one in self._producers().brokers if any(map(wanted, one.topics))]
        if len(network.http_addresses) == len(network.nsqds):
            return [Broker(tcp, side) for tcp, side in zip(network.nsqds, network.http_addresses, strict=True)]
        found = {side: Broker(http=side) for side in network.http_addresses}
        for address in network.nsqds:
            try:
                broker = self._by_tcp(address)
            except (ConnectError, HttpError) as exc:
                silent[address] = str(exc)
            else:
                found[broker.http or address] = broker
        return list(found.values())

    def _from_options(self) -> Found:
        brokers: dict[str, Broker] = {}
        failures: list[str] = []
        # Who has said where his HTTP side is needs no second way there.
        http_sides = list(self._network.http_addresses)
        for address in http_sides:
            self._learn(brokers, failures, partial(self._by_http, address), address)
        if not http_sides or len(http_sides) != len(self._network.nsqds):
            for address in self._network.nsqds:
                self._learn(brokers, failures, partial(self._by_tcp, address), address)
        else:
            # Named side by side: each TCP address belongs to the HTTP address at the same place.
            for tcp, side in zip(self._network.nsqds, http_sides, strict=True):
                for broker in brokers.values():
                    if broker.http == side:
                        broker.tcp = tcp
                        broker.node = broker.node or tcp
        return Found(list(brokers.values()), failures, failures)

    def _from_lookupds(self) -> Found:
        producers = self._producers()
        brokers: dict[str, Broker] = {}
        silent: list[str] = []
        for producer in producers.brokers:
            self._learn(brokers, silent, partial(self._asked, producer), producer.http)
        return Found(list(brokers.values()), [*producers.failures, *silent], silent)

    def _asked(self, producer: Broker) -> Broker:
        broker = self._by_http(producer.http)
        broker.tcp = producer.tcp
        broker.topics = producer.topics
        broker.node = broker.node if broker.has_log else producer.tcp
        return broker

    def _producers(self) -> Found:
        """All nsqds that any lookupd knows, joined; ConnectError if none of them answers."""
        found: dict[str, Broker] = {}
        failures: list[str] = []
        for lookupd in self._network.lookupds:
            try:
                answer = self._web.ask("GET", lookupd, "/nodes")
            except (ConnectError, HttpError) as exc:
                failures.append(f"nsqlookupd {lookupd}: {exc}")
                continue
            for entry in answer.get("producers") or []:
                host = entry.get("broadcast_address") or entry.get("hostname") or ""
                tcp = join(host, entry.get("tcp_port") or 0)
                hidden = entry.get("tombstones") or []
                topics = tuple(
                    topic
                    for number, topic in enumerate(entry.get("topics") or [])
                    if not (number < len(hidden) and hidden[number])
                )
                producer = found.setdefault(tcp, Broker(tcp, join(host, entry.get("http_port") or 0)))
                producer.topics = tuple(dict.fromkeys([*producer.topics, *topics]))
        if len(failures) == len(self._network.lookupds):
            raise ConnectError(f"no nsqlookupd answered: {'; '.join(failures)}")
        return Found(list(found.values()), failures)

    def _learn(self, brokers: dict[str, Broker], failures: list[str], ask: Callable[[], Broker], address: str) -> None:
        try:
            broker = ask()
        except (ConnectError, HttpError) as exc:
            failures.append(str(exc) if address in str(exc) else f"{address}: {exc}")
        else:
            brokers.setdefault(broker.node or address, broker)

    def _by_tcp(self, address: str) -> Broker:
        """Ask IDENTIFY; what one of ours says of itself includes its HTTP port."""
        connection = Connection(address, self._network, timeout=self._timeout)
        about = connection.flintmq
        connection.close()
        host = split(address).host
        port = about.get("http_port")
        return Broker(
            tcp=address,
            http=join(host, port) if isinstance(port, int) and port else "",
            node=str(about.get("node") or address),
            has_log=bool(about.get("log")),
            has_keys=bool(about.get("keys")),
            has_stage=bool(about.get("stage")),
        )

    def _by_http(self, address: str) -> Broker:
        info = self._web.ask("GET", address, "/info", extended="true")
        found = info.get("flintmq")
        about = found if isinstance(found, dict) else {}
        host = urlsplit(http_url(address)).hostname or ""
        tcp = join(host, info.get("tcp_port") or 0)
        return Broker(
            tcp=tcp,
            http=address,
            node=str(about.get("node") or tcp),
            has_log=bool(about.get("log")),
            has_keys=bool(about.get("keys")),
            has_stage=bool(about.get("stage")),
        )
