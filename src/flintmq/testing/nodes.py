"""The daemons of a test: nsqd and nsqlookupd, real ones, in a thread of this process.

An NsqBroker owns a broker, where it listens and what it keeps, across crashes and restarts; an NsqLookupd likewise; an
NsqCluster owns several of both. All of them are commanded by plain calls that wait until the thing is done. The daemons
run on an event loop in a thread of their own, so the same calls serve tests with and without asyncio, and a test
that blocks does not hold up the daemons.

They are the daemons that run in production, but for two things. Deliveries go by a MovableClock (heartbeats and
connections do not, so moving it cuts nobody off). And nothing is synced to the device, because a test takes no power
away: what a killed process leaves behind is there without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from flintmq import addresses
from flintmq.addresses import HeldPort
from flintmq.broker.daemon import Broker
from flintmq.broker.observe import stats
from flintmq.broker.storage.disk import Disk, SystemClock
from flintmq.client.codecs import Body, decode
from flintmq.client.consumer import Consumer
from flintmq.client.producer import Producer
from flintmq.errors import ClosedError
from flintmq.lookup.daemon import Lookupd
from flintmq.options import MILLISECOND, NsqdOptions, NsqlookupdOptions
from flintmq.testing.options import NsqdKeywords, NsqlookupdKeywords, read

__all__ = ["MovableClock", "NsqBroker", "NsqCluster", "NsqLookupd"]

T = TypeVar("T")

#: Long enough for a machine that stands still for a while; a test that passes never waits for it.
PATIENCE = 30.0
#: What is due after the clock was moved is found so soon.
_SCAN_INTERVAL = 10 * MILLISECOND
_POLL_SECONDS = 0.005
_PLENTY = 1 << 50
#: In the text of an error.
_MOST_SHOWN = 20
#: What cannot be the same for two nsqds, or makes them a cluster.
_NODE_OPTIONS = frozenset(
    {"data_path", "http_address", "https_address", "id", "nsqlookupd_tcp_addresses", "tcp_address"}
)


class _ClockTimer:
    """A callback that a MovableClock owes to an event loop."""

    def __init__(
        self, clock: MovableClock, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._clock = clock
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._handle: asyncio.TimerHandle | None = None
        clock.follow(self._moved)
        self._wait()

    def cancel(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._clock.unfollow(self._moved)
            if self._handle is not None:
                self._handle.cancel()

    def _moved(self) -> None:
        # The clock is moved by other threads than the loop's.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wait)

    def _wait(self) -> None:
        """Run, or wait for as long as it takes if nobody moves the clock."""
        if self._is_over:
            return
        if self._handle is not None:
            self._handle.cancel()
        left = self._when - self._clock.time()
        if left > 0:
            self._handle = self._loop.call_later(left, self._wait)
        else:
            self._handle = None
            self.cancel()
            self._callback(*self._args)


class _SteadyClock:
    """The running event loop's own time, which nobody moves."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback, *args)


class MovableClock:
    """Goes by itself like any other, and further when it is told to. Several brokers may share one.

    A client on the same clock, ``Consumer(…, clock=nsq_broker.clock)``, has its backoff, timeouts and linger moved too.
    """

    def __init__(self) -> None:
        self._system = SystemClock()
        self._ahead = 0
        # Its own: on another clock, the times that this one's brokers write down mean something else.
        self._boot = os.urandom(16)
        self._followers: list[Callable[[], None]] = []
        #: What connections of clients go by: a jump cuts nobody off.
        self.steady = _SteadyClock()

    def advance(self, seconds: float) -> None:
        """Let time pass. What has become due by then is on its way when this returns, or a few milliseconds later."""
        if not seconds >= 0:
            raise ValueError(f"the clock goes forward only, not by {seconds} seconds")
        self._ahead += round(seconds * 1_000_000_000)
        for follow in list(self._followers):
            follow()

    def follow(self, moved: Callable[[], None]) -> None:
        """Have ``moved`` called whenever the clock was."""
        self._followers.append(moved)

    def unfollow(self, moved: Callable[[], None]) -> None:
        self._followers.remove(moved)

    def now(self) -> int:
        return self._system.now() + self._ahead

    def time(self) -> float:
        """Return the seconds that a client goes by."""
        return self.now() / 1e9

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> _ClockTimer:
        """Call a function on the running event loop when so many seconds have passed, or were skipped."""
        return _ClockTimer(self, self.time() + delay, callback, args)

    def wall(self) -> int:
        return self._system.wall() + self._ahead

    def boot_id(self) -> bytes:
        return self._boot


class _Disk(Disk):
    """Full or not as the test says, whatever the machine's real one is."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        super().__init__()
        self._is_full = is_full

    def free(self, path: Path) -> int:
        return 0 if self._is_full() else _PLENTY

    # The write is what outlives a killed process. The rest is for a power failure, and takes most of a start's time.
    def sync(self, fd: int) -> None: ...

    def sync_folder(self, path: Path) -> None: ...

    def allocate(self, fd: int, size: int) -> None: ...


class _EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Have the thread; a second call changes nothing."""
        if self._thread is None and not self._is_closed:
            self._started = threading.Event()
            self._thread = threading.Thread(target=self._serve, name="flintmq-testing", daemon=True)
            self._thread.start()
            self._started.wait()

    def _serve(self) -> None:
        # It also ends what is left of tasks and threads when the end has come.
        with asyncio.Runner() as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._started.set()
        await self._end.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine. Ctrl-C cancels it."""
        self._check(work)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        ended: list[BaseException] = []

        async def work() -> list[T]:
            try:
                return [function()]
            except (KeyboardInterrupt, SystemExit) as exc:
                # It is the caller's end, not the event loop's.
                ended.append(exc)
                return []

        for result in self.run(work()):
            return result
        raise ended[0]

    async def join(self, work: Coroutine[Any, Any, T]) -> T:
        """The same as `run`, for whoever has an event loop himself."""
        self._check(work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _check(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._thread is None or not self._thread.is_alive():
            work.close()
            raise ClosedError("it was closed" if self._is_closed else "it was not started")

    def rest(self) -> None:
        """End the thread until the next start."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
        self._thread = None

    def close(self) -> None:
        self.rest()
        self._is_closed = True


class _Managed(ABC):
    """``with`` starts and closes it."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Node(_Managed):
    """A daemon that may go and come back: its ports, and the event loop it runs on."""

    def __init__(self, loop: _EventLoop | None) -> None:
        # Given back in the opposite order, by `close`.
        self._resources = contextlib.ExitStack()
        self._owns_loop = loop is None
        if loop is None:
            loop = _EventLoop()
            self._resources.callback(loop.close)
        self._loop = loop

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the daemon. No thread is left if it cannot."""
        self._loop.start()
        try:
            self._loop.run(work)
        except BaseException:
            if self._owns_loop:
                self._loop.rest()
            raise

    def _port(self) -> str:
        port = HeldPort()
        self._resources.callback(port.close)
        return port.address

    @abstractmethod
    def stop(self) -> None: ...

    def restart(self) -> None:
        """Start again at the same addresses, after a crash or a stop; else stop first."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop for good, and give everything back."""
        with self._resources:
            self.stop()


class NsqBroker(_Node):
    """A real nsqd, with NSQ's protocol at ``address`` and HTTP at ``http_address``.

        with NsqBroker(msg_timeout="1s") as broker:
            broker.publish("orders", b"one")
            …
            broker.crash()
            broker.restart()

    Keywords are nsqd's options; times are texts with a unit. Without a ``data_path`` it makes one, which goes with it.
    """

    def __init__(
        self,
        data_path: str | os.PathLike[str] | None = None,
        *,
        clock: MovableClock | None = None,
        loop: _EventLoop | None = None,
        **options: Unpack[NsqdKeywords],
    ) -> None:
        # Before anything is taken that would have to be given back.
        given = read(NsqdOptions, options)
        super().__init__(loop)
        self.clock = clock or MovableClock()
        self.clock.follow(self._clock_moved)
        self._resources.callback(self.clock.unfollow, self._clock_moved)
        if data_path is None:
            data_path = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="flintmq-"))
        self.data_path = Path(data_path)
        ours = {
            "tcp_address": self._port(),
            "http_address": self._port(),
            "https_address": "",
            "broadcast_address": "127.0.0.1",
            "queue_scan_interval": _SCAN_INTERVAL,
        }
        self._options = NsqdOptions(**{**ours, **given, "data_path": str(self.data_path)})
        self._broker: Broker | None = None
        self._full = False

    # --- Start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, with what is on the data path. StartError says why it cannot."""
        if self._broker is None:
            self._begin(self._start())

    async def _start(self) -> None:
        broker = Broker(self._options, disk=_Disk(lambda: self._full), clock=self.clock)
        await broker.start()
        self._broker = broker

    def stop(self) -> None:
        """A clean stop, as by SIGTERM. Raises what the broker died of, if it did before."""
        if self._broker is not None:
            broker, self._broker = self._broker, None
            self._loop.run(_stop(broker))

    def crash(self) -> None:
        """As kill -9: connections are cut, and of what was not written yet nothing is."""
        broker, self._broker = self._there(), None
        self._loop.run(_kill(broker))

    @property
    def running(self) -> bool:
        return self._broker is not None

    @property
    def address(self) -> str:
        """``host:port`` for clients; the same after a restart."""
        return self._options.tcp_address

    @property
    def http_address(self) -> str:
        return self._options.http_address

    # --- Faults ------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End the connections of all clients without a word; they may come back."""

        def cut(broker: Broker) -> None:
            for session in list(broker.sessions.values()):
                session.drop()

        self.call(cut)

    def disk_full(self) -> None:
        """From now on publishes are refused and ``/ping`` fails; consumers go on. Also after a restart."""
        self._set_full(True)

    def disk_free(self) -> None:
        """There is room on the disk again."""
        self._set_full(False)

    def _set_full(self, is_full: bool) -> None:
        self._full = is_full
        if self._broker is not None:
            self.call(lambda broker: broker.upkeep.look_at_space())

    def _clock_moved(self) -> None:
        if self._broker is not None:
            self.call(lambda broker: broker.scan.tick(self.clock.now))

    # --- Messages ----------------------------------------------------------------------------------------------------

    def publish(self, topic: str, *bodies: Body, delay: float | None = None) -> None:
        """Publish messages, bytes or values; with a ``delay`` in seconds each is deferred."""
        self._there()
        self._loop.run(self._publish(topic, bodies, delay))

    async def _publish(self, topic: str, bodies: Sequence[Body], delay: float | None) -> None:
        async with Producer(self.address, max_defer=self._options.max_req_timeout / 1e9) as producer:
            if delay is None:
                await producer.publish_many(topic, bodies)
            else:
                await asyncio.gather(*(producer.defer(topic, body, delay) for body in bodies))

    @overload
    def take(
        self, topic: str, count: int = 1, *, channel: str = "testing", timeout: float = PATIENCE, type: None = None
    ) -> list[bytes]: ...

    @overload
    def take(
        self, topic: str, count: int = 1, *, channel: str = "testing", timeout: float = PATIENCE, type: type[T]
    ) -> list[T]: ...

    def take(
        self,
        topic: str,
        count: int = 1,
        *,
        channel: str = "testing",
        timeout: float = PATIENCE,
        type: type[Any] | None = None,
    ) -> list[Any]:
        """Consume so many messages, and return their bodies, or values of a type. TimeoutError if fewer come.

        A channel gets what is published after it was made, and the first one of a topic all that waits there.
        """
        self._there()
        bodies = self._loop.run(self._take(topic, count, channel, timeout))
        return bodies if type is None else [decode(None, body, type) for body in bodies]

    async def _take(self, topic: str, count: int, channel: str, seconds: float) -> list[bytes]:
        bodies: list[bytes] = []

        def missing() -> str:
            if len(bodies) == count:
                return ""
            shown = f"{bodies}" if len(bodies) <= _MOST_SHOWN else f"the last is {bodies[-1]!r}"
            return f"{len(bodies)} of {count} messages came from {topic}/{channel}: {shown}"

        async def consume() -> None:
            while len(bodies) < count:
                with await anext(consumer) as message:
                    bodies.append(message.body)
                    # Before it is finished: else the broker sends one that nobody wants here, and gets it back behind
                    # the others.
                    consumer.max_in_flight = count - len(bodies)

        async with Consumer(topic, channel, nsqd=self.address, max_in_flight=count, max_attempts=0) as consumer:
            consuming = asyncio.create_task(consume())
            try:
                await _until(missing, seconds)
            finally:
                consuming.cancel()
                await asyncio.wait([consuming])
        return bodies

    def stats(self, topic: str = "", channel: str = "") -> dict[str, Any]:
        """What ``/stats?format=json`` says; of one topic or channel if it is named."""
        return self.call(lambda broker: stats.document(broker, topic=topic, channel=channel, include_mem=False))

    def wait_until_empty(self, topic: str, channel: str, *, deferred: int = 0, timeout: float = PATIENCE) -> None:
        """Until all that was published is finished, but for so many deferred messages. TimeoutError says what is left.

        Where consumers run on the caller's event loop, ``await until_empty(…)``: this would wait for them for ever.
        """
        _forbid_inside_event_loop("until_empty")
        self._loop.run(self._empty(topic, channel, deferred, timeout))

    async def until_empty(
        self,
        topic: str,
        channel: str,
        *,
        deferred: int = 0,
        timeout: float = PATIENCE,  # noqa: ASYNC109
    ) -> None:
        """As `wait_until_empty`, for tests with asyncio."""
        await self._loop.join(self._empty(topic, channel, deferred, timeout))

    async def _empty(self, topic: str, channel: str, deferred: int, seconds: float) -> None:
        await _until(lambda: self._left(topic, channel, deferred), seconds)

    def has(self, topic: str) -> bool:
        """Is there such a topic?"""
        return self._broker is not None and topic in self._broker.topics

    def _left(self, topic: str, channel: str, deferred: int) -> str:
        """What is there to be consumed, in words; nothing if nothing."""
        if self._broker is None:
            return "the broker is not running"
        found = self._broker.topics.get(topic)
        if found is None or channel not in found.channels:
            return f"there is no channel {topic}/{channel}"
        place = found.channels[channel]
        counts = {
            "in the topic": found.depth,
            "waiting": place.depth,
            "in flight": place.in_flight_count,
            "deferred": len(place.deferred),
        }
        if not place.depth and not place.in_flight_count and not found.depth and counts["deferred"] == deferred:
            return ""
        return f"{topic}/{channel}: " + (", ".join(f"{n} {where}" for where, n in counts.items() if n) or "nothing")

    # --- Whatever else -----------------------------------------------------------------------------------------------

    def call(self, function: Callable[[Broker], T]) -> T:
        """Call a function with the broker itself, where it may be touched: on its event loop. It must not wait."""
        broker = self._there()
        return self._loop.call(lambda: function(broker))

    def _there(self) -> Broker:
        if self._broker is None:
            raise ClosedError("the broker is not running: start or restart it")
        return self._broker


class NsqLookupd(_Node):
    """A real nsqlookupd: nsqds register at ``address``, everyone else asks at ``http_address``.

    It keeps nothing: after a restart it knows what the nsqds tell it anew. Keywords are its options.
    """

    def __init__(self, *, loop: _EventLoop | None = None, **options: Unpack[NsqlookupdKeywords]) -> None:
        given = read(NsqlookupdOptions, options)
        super().__init__(loop)
        ours = {"tcp_address": self._port(), "http_address": self._port(), "broadcast_address": "127.0.0.1"}
        self._options = NsqlookupdOptions(**{**ours, **given})
        self._lookupd: Lookupd | None = None

    def start(self) -> None:
        if self._lookupd is None:
            self._begin(self._start())

    async def _start(self) -> None:
        lookupd = Lookupd(self._options)
        await lookupd.start()
        self._lookupd = lookupd

    def stop(self) -> None:
        if self._lookupd is not None:
            lookupd, self._lookupd = self._lookupd, None
            self._loop.run(lookupd.stop())

    def crash(self) -> None:
        """It has nothing to lose but its connections, and a stop cuts those too."""
        self.stop()

    @property
    def running(self) -> bool:
        return self._lookupd is not None

    @property
    def address(self) -> str:
        return self._options.tcp_address

    @property
    def http_address(self) -> str:
        return self._options.http_address

    def knows(self, broker: NsqBroker, topic: str | None = None) -> bool:
        """Is the broker registered here, and for the topic if one is named?"""
        if self._lookupd is None:
            return False
        registry = self._lookupd.registry
        port = addresses.port_of(broker.address)
        found = list(registry.producers.values()) if topic is None else registry.lookup(topic) or []
        return any(producer.tcp_port == port for producer in found)


class NsqCluster(_Managed):
    """Several nsqds, registered with nsqlookupds, on one clock. Keywords are options of the nsqds."""

    def __init__(
        self,
        brokers: int = 2,
        lookupds: int = 1,
        *,
        clock: MovableClock | None = None,
        **options: Unpack[NsqdKeywords],
    ) -> None:
        if own := _NODE_OPTIONS & options.keys():
            raise TypeError(f"each nsqd of a cluster has its own: {', '.join(sorted(own))}")
        read(NsqdOptions, options)
        self.clock = clock or MovableClock()
        self._loop = _EventLoop()
        self.lookupds = [NsqLookupd(loop=self._loop) for _ in range(lookupds)]
        common: dict[str, Any] = {
            **options,
            "nsqlookupd_tcp_addresses": tuple(lookupd.address for lookupd in self.lookupds),
        }
        self.brokers = [
            NsqBroker(clock=self.clock, loop=self._loop, **{**common, "id": number}) for number in range(brokers)
        ]

    def start(self) -> None:
        """Returns when every nsqd is registered with every nsqlookupd."""
        for node in (*self.lookupds, *self.brokers):
            node.start()
        self.wait_until_registered()

    def close(self) -> None:
        # All of them, also if one has died and says so; the last first.
        with contextlib.ExitStack() as closing:
            closing.callback(self._loop.close)
            for node in (*self.lookupds, *self.brokers):
                closing.callback(node.close)

    @property
    def addresses(self) -> list[str]:
        """Of the nsqds."""
        return [broker.address for broker in self.brokers]

    @property
    def lookupd_addresses(self) -> list[str]:
        """Of the nsqlookupds, for clients: over HTTP."""
        return [lookupd.http_address for lookupd in self.lookupds]

    def wait_until_registered(self, topic: str | None = None, timeout: float = PATIENCE) -> None:
        """Until all nsqlookupds that run know all nsqds that run; with a topic, all that have it, and one does."""
        self._loop.run(self._registered(topic, timeout))

    async def _registered(self, topic: str | None, seconds: float) -> None:
        await _until(lambda: self._missing(topic), seconds)

    def _missing(self, topic: str | None) -> str:
        """Who is not registered, in words; nothing if nobody."""
        running = [broker for broker in self.brokers if broker.running and (topic is None or broker.has(topic))]
        if topic is not None and not running:
            return f"no broker has the topic {topic}"
        for lookupd in self.lookupds:
            for broker in running:
                if lookupd.running and not lookupd.knows(broker, topic):
                    of_topic = "" if topic is None else f" for {topic}"
                    return f"nsqd {broker.address} is not registered with nsqlookupd {lookupd.address}{of_topic}"
        return ""


async def _stop(broker: Broker) -> None:
    await broker.stop()
    await broker.wait_closed()


async def _kill(broker: Broker) -> None:
    broker.kill()
    # Let the transports notice, so that clients see the end when this returns.
    for _ in range(3):
        await asyncio.sleep(0)


async def _until(what_is_missing: Callable[[], str], seconds: float) -> None:
    """Until nothing is. Polls, because what it waits for happens in many places.

    It is the polls that count, not the time: on a machine that stood still for a while, nothing else has run either.
    """
    for _ in range(max(1, round(seconds / _POLL_SECONDS))):
        missing = what_is_missing()
        if not missing:
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise TimeoutError(f"waited for {seconds:g} s: {missing}")


def _forbid_inside_event_loop(instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"this would hold up the event loop that it is called on: await {instead}(…)")
