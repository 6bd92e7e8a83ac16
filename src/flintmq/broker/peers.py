"""The broker's conversations with nsqlookupds: they are told which topics and channels are here, and asked for more.

Peers holds one Peer per ``--lookupd-tcp-address``. Each has a task and a connection of its own, so that one that is
dead, slow or out of its mind delays no other and never the broker. A peer is told everything after every connect and
each change afterwards; what it is told is read from the broker's tables at that moment, nothing is kept twice.

A topic that is new here may have channels elsewhere, which must not miss its first messages. So ``pumped`` stands
still (``Topic.gate``) until the lookupds have said over HTTP which channels they know, or have had their time.

    to a lookupd:    "  V1", then commands as in V2: words, \\n, for IDENTIFY a body: size (4) | bytes
    from a lookupd:  size (4) | data, one for each command and in their order; no frame type
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flintmq.addresses import join, port_of, split
from flintmq.errors import OptionError, ProtocolError, file_reason
from flintmq.http.imports import load
from flintmq.http.tokens import read_token
from flintmq.protocol.wire import MAGIC_LOOKUP, NSQ_VERSION, encode_command, is_ephemeral, valid_name

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.topic import Topic

__all__ = ["Peers"]

logger = logging.getLogger(__name__)

#: Commands that are sent before their answers are read.
BATCH = 100
#: Changes that a peer may be behind; one that is further behind is connected anew and told everything.
MOST_PENDING = 100_000
#: The longest answer that is believed. Real ones have some hundred bytes.
MOST_ANSWER = 64 << 10
#: The longest list of channels that is read, and the most channels of it that are made.
MOST_LIST = 4 << 20
MOST_CHANNELS = 10_000
#: Topics that ask for their channels at the same time; the others wait their turn behind their gates.
MOST_QUESTIONS = 16


class Peers:
    """All nsqlookupds of one broker."""

    # In seconds; a test may be in a hurry.
    answer_timeout = 5.0
    ping_interval = 15.0
    first_retry = 0.5
    last_retry = 15.0

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._peers: dict[str, Peer] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._turns = asyncio.Semaphore(MOST_QUESTIONS)
        #: How TLS is spoken with them; None: not at all.
        self.tls: ssl.SSLContext | None = None
        self._headers: dict[str, str] = {}
        #: What a lookupd is shown in IDENTIFY; empty: nothing.
        self.registration_token = ""

    def load_token(self) -> None:
        """Read the tokens that lookupds are shown. OptionError, and no change, if there is none in a file."""
        options = self.broker.options
        headers, registration = self._headers, self.registration_token
        if options.lookupd_token_file:
            headers = {"Authorization": f"Bearer {read_token(options.lookupd_token_file)}"}
        if options.lookupd_registration_token_file:
            registration = read_token(options.lookupd_registration_token_file)
        self._headers, self.registration_token = headers, registration

    def load_tls(self) -> None:
        """Read the certificates for ``--lookupd-tls``. OptionError if they are no good."""
        options = self.broker.options
        if not options.lookupd_tls:
            return
        import ssl

        try:
            self.tls = ssl.create_default_context(cafile=options.lookupd_tls_root_ca_file or None)
            if options.lookupd_tls_cert:
                self.tls.load_cert_chain(options.lookupd_tls_cert, options.lookupd_tls_key)
        except (OSError, ValueError) as exc:
            files = (options.lookupd_tls_root_ca_file, options.lookupd_tls_cert, options.lookupd_tls_key)
            raise OptionError(f"failed to build TLS config for nsqlookupd - {file_reason(exc, *files)}") from exc

    def start(self) -> None:
        """The broker listens: its topics can be announced."""
        self.set_addresses(self.broker.options.nsqlookupd_tcp_addresses)

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Register with these lookupds and no others; connections to those that stay are left alone."""
        for address in [address for address in self._peers if address not in addresses]:
            logger.info("LOOKUP(%s): removing peer", address)
            self._peers.pop(address).close()
        for address in addresses:
            if address not in self._peers:
                logger.info("LOOKUP(%s): adding peer", address)
                peer = self._peers[address] = Peer(self, address)
                peer.task = self._spawn(peer.run())

    def drop(self) -> None:
        """Say no more to anyone, at once. The lookupds forget this node when its connections close."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.drop()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    # --- What the broker says --------------------------------------------------------------------------------------

    def made(self, topic: str, channel: str = "") -> None:
        for peer in self._peers.values():
            peer.changed(topic, channel, gone=False)

    def deleted(self, topic: str, channel: str = "") -> None:
        for peer in self._peers.values():
            peer.changed(topic, channel, gone=True)

    def ask_for_channels(self, topic: Topic) -> None:
        """A topic was made: close its gate until the channels it has elsewhere are made here too."""
        if self._peers:
            topic.gate(True)
            self._spawn(self._make_channels(topic))

    # --- Channels that a topic has elsewhere -----------------------------------------------------------------------

    async def _make_channels(self, topic: Topic) -> None:
        try:
            peers = list(self._peers.values())
            # Right after the start nobody may have been reached yet. Whoever failed once is not waited for again.
            await asyncio.gather(*(peer.tried.wait() for peer in peers))
            async with self._turns:
                names = await self._channels_of(topic.name, [peer for peer in peers if peer.http_address])
            for number, name in enumerate(names):
                if number % BATCH == BATCH - 1:
                    await asyncio.sleep(0)
                if topic.exiting:
                    return
                topic.channel(name)
        finally:
            if not topic.exiting and not self.broker.stopping:
                topic.gate(False)

    async def _channels_of(self, topic: str, peers: list[Peer]) -> list[str]:
        """What the lookupds know together; those that fail are named in the log and missed."""
        if not peers:
            logger.error("no available nsqlookupd to query for channels to pre-create for topic %s", topic)
            return []
        found: dict[str, None] = {}
        for names in await asyncio.gather(*(self._ask(peer, topic) for peer in peers)):
            found.update((name, None) for name in names if valid_name(name) and not is_ephemeral(name))
        if len(found) > MOST_CHANNELS:
            logger.error("nsqlookupd knows %d channels of topic %s, %d are made", len(found), topic, MOST_CHANNELS)
        return list(itertools.islice(found, MOST_CHANNELS))

    async def _ask(self, peer: Peer, topic: str) -> list[str]:
        loop = asyncio.get_running_loop()
        if loop.time() < peer.mute_until:
            return []
        try:
            scheme = "http" if self.tls is None else "https"
            return await self._query(f"{scheme}://{peer.http_address}/channels", topic)
        except TimeoutError:
            # Every new topic would wait as long for it.
            peer.mute_until = loop.time() + self.ping_interval
            reason = "timed out"
        except (OSError, ValueError) as exc:
            reason = _reason(exc)
        logger.warning(
            "failed to query nsqlookupd for channels to pre-create for topic %s - %s: %s", topic, peer.address, reason
        )
        return []

    async def _query(self, url: str, topic: str) -> list[str]:
        """The channels in a lookupd's answer. TimeoutError, OSError or ValueError if there is none."""
        await load("aiohttp")
        import aiohttp

        options = self.broker.options
        timeout = aiohttp.ClientTimeout(
            total=options.http_client_request_timeout / 1e9, sock_connect=options.http_client_connect_timeout / 1e9
        )
        logger.info("CI: querying nsqlookupd %s?topic=%s", _line(url), topic)
        content = bytearray()
        try:
            async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as client:
                async with client.get(url, params={"topic": topic}, ssl=self.tls or True) as response:
                    async for chunk in response.content.iter_any():
                        content += chunk
                        if len(content) > MOST_LIST:
                            raise ValueError("the answer is too long")
        except aiohttp.ClientError as exc:
            if isinstance(exc, TimeoutError):
                raise
            raise OSError(str(exc)) from exc
        if response.status != 200:
            raise ValueError(f"got response {response.status} {_text(bytes(content))}")
        try:
            return msgspec.json.decode(content, type=_Channels).channels
        except msgspec.DecodeError as exc:
            raise ValueError(str(exc)) from exc


class Peer:
    """One nsqlookupd, as this node sees it: reached, told everything, told of changes; or tried again later."""

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers = peers
        self._broker = peers.broker
        self.address = address
        self.task: asyncio.Task[None] | None = None
        #: Set once the first attempt has led somewhere or failed.
        self.tried = asyncio.Event()
        #: Where it answers HTTP; empty while there is no connection.
        self.http_address = ""
        #: Its HTTP did not answer in time: it is left alone until then.
        self.mute_until = 0.0
        self._link: _Link | None = None
        # What changed since ``_everything`` was read; true: it is to be unregistered first. Kept while connected.
        self._pending: dict[tuple[str, str], bool] = {}
        self._noting = False
        # Has it taken all it was told?
        self._settled = False
        # Something changed, or the connection is gone.
        self._wake = asyncio.Event()

    def close(self) -> None:
        self.tried.set()
        self._forget()
        if self.task is not None:
            self.task.cancel()

    def changed(self, topic: str, channel: str, *, gone: bool) -> None:
        if not self._noting:
            # The next connect tells everything anyway.
            return
        key = (topic, channel)
        self._pending[key] = gone or self._pending.get(key, False)
        self._wake.set()
        if len(self._pending) > MOST_PENDING and self._link is not None:
            self._link.fail(ProtocolError("too slow, it will be told everything anew"))

    # --- The connection --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay registered; ends only by being cancelled."""
        retry = self._peers.first_retry
        while True:
            try:
                await self._converse()
            except (OSError, ValueError, ProtocolError) as exc:
                logger.error("LOOKUPD(%s): %s", self.address, _reason(exc))
            except Exception:
                # A bug of ours: this lookupd is tried again, as after any other failure.
                logger.exception("LOOKUPD(%s)", self.address)
            if self._settled:
                retry = self._peers.first_retry
            self._forget()
            self.tried.set()
            # Not all brokers at the same moment, when the lookupd they share has come back.
            await asyncio.sleep(retry * random.uniform(0.75, 1.25))
            retry = min(2 * retry, self._peers.last_retry)

    def _forget(self) -> None:
        self.http_address = ""
        self._noting = self._settled = False
        self._pending = {}
        if self._link is not None:
            self._link.abort()
            self._link = None

    async def _converse(self) -> None:
        """Connect, tell everything, then changes and PINGs. Ends by raising what went wrong."""
        logger.info("LOOKUP connecting to %s", self.address)
        self._wake.clear()
        link = self._link = _Link(self._wake.set, self._peers.answer_timeout)
        loop = asyncio.get_running_loop()
        host, port = _split(self.address)
        patience = self._broker.options.http_client_connect_timeout / 1e9
        try:
            async with asyncio.timeout(patience):
                await loop.create_connection(lambda: link, host, port, ssl=self._peers.tls)
        except TimeoutError as exc:
            raise TimeoutError(f"no connection within {patience:g} s") from exc
        link.write(MAGIC_LOOKUP)
        [answer] = await link.ask([encode_command(b"IDENTIFY", body=self._identity())])
        info = _read_info(answer)
        logger.info(
            "LOOKUPD(%s): peer info {TCPPort:%d HTTPPort:%d Version:%s BroadcastAddress:%s}",
            self.address,
            info.tcp_port,
            info.http_port,
            _line(info.version),
            _line(info.broadcast_address),
        )
        if info.broadcast_address and info.http_port:
            self.http_address = join(info.broadcast_address, info.http_port)
        self.tried.set()
        # The list is of this moment, and what changes after it is noted.
        self._noting = True
        await self._tell(link, list(self._everything()), logging.DEBUG)
        self._settled = True
        next_ping = loop.time() + self._peers.ping_interval
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_ping):
                    await self._wake.wait()
            self._wake.clear()
            link.check()
            pending, self._pending = self._pending, {}
            await self._tell(link, self._commands(pending), logging.INFO)
            if loop.time() >= next_ping:
                logger.debug("LOOKUPD(%s): sending heartbeat", self.address)
                await link.ask([b"PING\n"])
                next_ping = loop.time() + self._peers.ping_interval

    async def _tell(self, link: _Link, commands: Iterable[tuple[str, ...]], level: int) -> None:
        waiting = iter(commands)
        while batch := list(itertools.islice(waiting, BATCH)):
            for command in batch:
                logger.log(level, "LOOKUPD(%s): %s %s", self.address, _kind(command), " ".join(command))
            answers = await link.ask([encode_command(*(word.encode() for word in command)) for command in batch])
            for command, answer in zip(batch, answers, strict=True):
                if answer.startswith(b"E_"):
                    # Only this one is not known there. If it also closes the connection, we start over.
                    logger.error("LOOKUPD(%s): %s - %s", self.address, " ".join(command), _text(answer))

    def _everything(self) -> Iterator[tuple[str, ...]]:
        for topic in self._broker.topics.values():
            if not topic.channels:
                yield "REGISTER", topic.name
            for channel in topic.channels:
                # The topic comes with it.
                yield "REGISTER", topic.name, channel

    def _commands(self, pending: dict[tuple[str, str], bool]) -> Iterator[tuple[str, ...]]:
        """Who is gone, then who is there: a topic that was deleted and made again loses its old tombstone that way."""
        for key, gone in pending.items():
            if gone:
                yield ("UNREGISTER", *filter(None, key))
        for topic, channel in pending:
            here = self._broker.topics.get(topic)
            if here is not None and (not channel or channel in here.channels):
                yield ("REGISTER", *filter(None, (topic, channel)))

    def _identity(self) -> bytes:
        broker, options = self._broker, self._broker.options
        token = self._peers.registration_token
        return msgspec.json.encode(
            {
                **({"token": token} if token else {}),
                "broadcast_address": options.broadcast_address,
                "hostname": broker.disk.system.hostname(),
                "http_port": options.broadcast_http_port or port_of(broker.http_address),
                "tcp_port": options.broadcast_tcp_port or port_of(broker.tcp_address),
                "topology_region": options.topology_region,
                "topology_zone": options.topology_zone,
                "version": NSQ_VERSION,
            }
        )


class _Link(asyncio.Protocol):
    """A connection to a lookupd: batches of commands out, as many answers in. It believes nothing it reads."""

    def __init__(self, woken: Callable[[], None], timeout: float) -> None:
        self._woken = woken
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._due = 0
        self._answers: list[bytes] = []
        self._waiter: asyncio.Future[list[bytes]] | None = None
        self._error: Exception | None = None

    async def ask(self, commands: list[bytes]) -> list[bytes]:
        """The answers to these commands. OSError or ProtocolError when they will not come."""
        self.check()
        self._due = len(commands)
        self._waiter = asyncio.get_running_loop().create_future()
        self.write(b"".join(commands))
        try:
            async with asyncio.timeout(self._timeout):
                return await self._waiter
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        finally:
            self._waiter = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def check(self) -> None:
        """Raise what ended the connection, if something did."""
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            self._woken()
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- What asyncio calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance: uvloop's transports are none of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and self._error is None:
            size = int.from_bytes(buffer[:4], "big", signed=True)
            if not 0 <= size <= MOST_ANSWER:
                self.fail(ProtocolError(f"an answer of {size} bytes"))
            elif not self._due:
                self.fail(ProtocolError("an answer that nobody asked for"))
            elif len(buffer) < 4 + size:
                break
            else:
                self._answers.append(bytes(buffer[4 : 4 + size]))
                del buffer[: 4 + size]
                self._due -= 1
                if not self._due:
                    self._answered()

    def _answered(self) -> None:
        answers, self._answers = self._answers, []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answers)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))


class _Info(msgspec.Struct):
    """What of the answer to IDENTIFY is of use."""

    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    broadcast_address: str = ""


class _Channels(msgspec.Struct):
    channels: list[str] = []


def _read_info(answer: bytes) -> _Info:
    if answer.startswith(b"E_"):
        hint = ""
        if b"missing fields" in answer:
            hint = " (it wants a TCP and an HTTP port: see --broadcast-tcp-port and --broadcast-http-port)"
        raise ProtocolError(f"IDENTIFY - {_text(answer)}{hint}")
    try:
        return msgspec.json.decode(answer, type=_Info)
    except (msgspec.DecodeError, ValueError) as exc:
        raise ProtocolError(f"IDENTIFY - the answer is not understood: {exc}") from exc


def _kind(command: tuple[str, ...]) -> str:
    return "channel" if len(command) == 3 else "topic"


def _split(address: str) -> tuple[str, int]:
    try:
        host, port, _ = split(address, listening=True, unix=False)
    except OptionError as exc:
        raise ProtocolError(str(exc)) from exc
    # As Go dials an address without a host.
    return host or "localhost", port


def _text(answer: bytes) -> str:
    return _line(answer[:200].decode("utf-8", "backslashreplace"))


def _line(text: str) -> str:
    """What a lookupd said, as part of one line of a log."""
    return text[:200].translate(_CONTROL)


_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), 127)}


def _reason(exc: Exception) -> str:
    # Other errors may have numbers that mean something else, as those of TLS.
    if isinstance(exc, ConnectionError) and exc.errno:
        return os.strerror(exc.errno).lower()
    return _line(str(exc)) or type(exc).__name__
