"""Try what is built beside and on the client: pynsq's programs, `flintmq pub` and `sub`, and a large nsqlookupd.

Each seed runs one of them in a world of its own, with faults, and says what was violated:

- a program of pynsq: nothing is finished that was not handled, every publish ends, and after the faults messages are
  handled and published wherever its Reader and Writer were made: before the event loop or on it, Tornado's or not
- `pub` sends no faster than its rate, whatever the pauses in its input; what it calls published is stored, in order
- `sub` finishes what it has printed, and nothing else; it gives back the rest at once however its output ends, and
  lives on while nobody reads it
- an nsqlookupd answers everybody's PING within 50 ms, on a machine that is so slow that a few thousand names are many
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import itertools
import json
import random
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flintmq.compat import pynsq, pynsq_conn
from flintmq.lookup.daemon import Lookupd as LookupDaemon
from flintmq.tools import pub, sub

from .loop import Loop
from .machine import Machine
from .network import Network, Socket
from .nodes import Nsqd, Session
from .world import NotYet, Stuck, World

try:
    import tornado.ioloop as tornado_ioloop
except ImportError:
    tornado_ioloop = None  # type: ignore[assignment]
else:
    # Whoever has not asked for Tornado must not find it.
    del sys.modules["tornado.ioloop"]

__all__ = ["run_seed"]

TOPIC = b"orders"
CHANNEL = b"billing"
#: Nanoseconds that a call takes on the machine of the nsqlookupd: some ten times those of a real one.
_SLOW_CALL = 5_000
_NAMES = 4_000
_LONGEST_PING = 0.05


class _Run:
    """One program in a world of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"program {seed}")
        self.world = World(f"program {seed}")
        self.network = Network(self.world)
        self.loop = Loop(self.world, self.network)
        self.sessions: list[Session] = []

    def broker(self, number: int = 0) -> Nsqd:
        made = Nsqd(self.world, self.network, f"10.0.0.{number + 1}", number)
        made.msg_timeout = self.rng.choice([1.5, 3.0])
        made.opened_hook = self.sessions.append
        made.channel(TOPIC, CHANNEL)
        self.network.delays[made.address[0]] = self.rng.choice([0.0002, 0.0002, 0.02, 0.1])
        made.start()
        return made

    def run(self) -> list[str]:
        with self.surroundings():
            return self._run()

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        """What the program finds in place of the system."""
        return contextlib.nullcontext()

    def _run(self) -> list[str]:
        try:
            self.live()
        except AssertionError as exc:
            self.world.violated(f"{type(exc).__name__}: {exc}")
        except (Exception, SystemExit) as exc:
            self.world.violated(f"{exc!r}\n{traceback.format_exc()}")
        if not self.world.violations:
            self.world.run_for(1)
            if left := asyncio.all_tasks(self.loop):
                self.world.violated(f"tasks are left: {[task.get_coro() for task in left]}")
            ends = [end for end in self.world.descriptors if getattr(end, "name", ("",))[0] == self.loop.host]
            if ends:
                self.world.violated(f"{len(ends)} sockets are left open")
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(AssertionError):
            self.world.run_for(10)
        self.loop.close()
        return self.world.violations

    def live(self) -> None:
        raise NotImplementedError

    def expect(self, condition: Callable[[], object], seconds: float, text: str) -> None:
        try:
            self.world.run(condition, seconds)
        except Stuck as exc:
            raise Stuck(f"{text}: {exc}") from None


# --- pynsq ----------------------------------------------------------------------------------------------------------


class _Pynsq(_Run):
    """A Reader and a Writer, as pynsq's programs make them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.brokers = [self.broker(number) for number in range(rng.choice([1, 1, 2]))]
        for broker in self.brokers:
            broker.finished_hook = self._finished
        # Made on a loop that runs; before it, to be started by `nsq.run`; or before Tornado's own loop is started.
        ways = ["running", "run", "tornado", "tornado"] if tornado_ioloop is not None else ["running", "run"]
        self.way = rng.choice(ways)
        self.kinds = ["true", *rng.sample(["false", "raise", "coroutine", "late", "fails later"], 2)]
        self.healed = False
        self.handled: set[bytes] = set()
        self.outcomes: dict[bytes, list[Any]] = {}
        self.writer: Any = None
        self.reader: Any = None

    def _finished(self, body: bytes) -> None:
        if body not in self.handled:
            self.world.violated(f"finished, but no handler has handled it: {body!r}")

    def _handle(self, message: Any) -> Any:
        kind = "true" if self.healed else message.body.partition(b":")[2].decode()
        if kind == "raise":
            raise ZeroDivisionError
        if kind == "false":
            return False
        if kind in ("coroutine", "fails later"):
            return self._handle_later(message, kind)
        self.handled.add(message.body)
        self._publish(b"from " + message.body)
        if kind == "late":
            message.enable_async()
            self.loop.call_later(0.3, message.finish)
            return None
        return True

    async def _handle_later(self, message: Any, kind: str) -> bool:
        await asyncio.sleep(0.05)
        if kind == "fails later":
            raise ZeroDivisionError
        self.handled.add(message.body)
        return True

    def _publish(self, body: bytes) -> None:
        told = self.outcomes.setdefault(body, [])
        self.writer.pub("made", body, lambda conn, data: told.append(data))

    def make(self) -> None:
        addresses = [broker.name for broker in self.brokers]
        options = {"heartbeat_interval": 1, "requeue_delay": 0}
        self.writer = pynsq.Writer(addresses, reconnect_interval=2.0, **options)
        self.reader = pynsq.Reader(
            TOPIC.decode(),
            CHANNEL.decode(),
            self._handle,
            nsqd_tcp_addresses=addresses,
            max_in_flight=self.rng.choice([2, 10]),
            max_tries=0,
            max_backoff_duration=2,
            **options,
        )

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        return _tornado(self.loop if self.way == "tornado" else None)

    def live(self) -> None:
        rng, world, loop = self.rng, self.world, self.loop
        main: asyncio.Task[None] | None = None
        if self.way == "running":
            loop.call_soon(self.make)
        else:
            self.make()
        if self.way == "run":
            main = loop.create_task(pynsq._main())
        world.run_for(0.1)
        if rng.random() < 0.5:
            broker = rng.choice(self.brokers)
            world.after(rng.uniform(0, 5), broker.kill)
            world.after(rng.uniform(5, 9), broker.start)
        for number in range(rng.choice([0, 10])):
            body = b"in%d:%b" % (number, rng.choice(self.kinds).encode())
            world.after(rng.uniform(0, 6), lambda body=body: rng.choice(self.brokers).store(TOPIC, body))
            world.after(rng.uniform(0, 6), lambda body=body: loop.call_soon(self._publish, body))
        world.run_for(10)
        self.healed = True
        probes = [b"probe%d" % broker.number for broker in self.brokers]
        for broker, probe in zip(self.brokers, probes, strict=True):
            broker.store(TOPIC, probe)
        loop.call_soon(self._publish, b"probe")
        # A backoff is left step by step, each of which may go to a broker that has nothing.
        self.expect(lambda: self.handled.issuperset(probes), 180, "messages are not handled")
        self.expect(lambda: all(self.outcomes.values()), 30, "a publish has not ended")
        self._check_publishes()
        self._close(main)
        if pynsq_conn.waiting or pynsq_conn.running:
            world.violated("a Reader or Writer is left")

    def _check_publishes(self) -> None:
        stored = {body for broker in self.brokers for body in broker.log.get(b"made", ())}
        if self.outcomes[b"probe"] != [b"OK"]:
            self.world.violated(f"a publish after the faults did not succeed: {self.outcomes[b'probe']}")
        for body, told in self.outcomes.items():
            if b"OK" in told and body not in stored:
                self.world.violated(f"a publish that was called OK is not stored: {body!r}")

    def _close(self, main: asyncio.Task[None] | None) -> None:
        if main is not None:
            self.loop.deliver(signal.SIGTERM)
            self.expect(main.done, 20, "nsq.run() does not end")
            main.result()
            return

        async def close() -> None:
            for each in (self.reader, self.writer):
                each.close()
                await each._closing

        closing = self.loop.create_task(close())
        self.expect(closing.done, 20, "Reader.close() and Writer.close() do not end")
        closing.result()


@contextlib.contextmanager
def _tornado(loop: Loop | None) -> Iterator[None]:
    """A program that has imported Tornado, whose loop is this one; or one that has not."""
    before = sys.modules.pop("tornado.ioloop", None)
    policy = asyncio.get_event_loop_policy()
    own = asyncio.DefaultEventLoopPolicy()
    own.set_event_loop(loop)
    asyncio.set_event_loop_policy(own)
    if loop is not None:
        sys.modules["tornado.ioloop"] = tornado_ioloop
    try:
        yield
    finally:
        sys.modules.pop("tornado.ioloop", None)
        if before is not None:
            sys.modules["tornado.ioloop"] = before
        asyncio.set_event_loop_policy(policy)
        if loop is not None:
            tornado_ioloop.IOLoop._ioloop_for_asyncio.pop(loop, None)
        pynsq_conn.waiting.clear()
        pynsq_conn.running.clear()


# --- pub and sub ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced(module: Any, **names: Any) -> Iterator[None]:
    """A module that sees these in place of what it has imported."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


class _Pub(_Run):
    """Lines that come now and then, at a rate."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.nsqd = self.broker()
        self.rate = self.rng.choice([5.0, 40.0, 300.0])
        self.lines = [b"line %d" % number for number in range(self.rng.choice([20, 200]))]
        self.cut_at = self.rng.uniform(0, 20) if self.rng.random() < 0.2 else None
        self.times: list[float] = []
        self.nsqd.stored_hook = lambda topic, body: self.times.append(self.world.seconds)

    async def typed(self, descriptor: int) -> AsyncIterator[tuple[bytes, bool]]:
        """Standard input: some lines at a time, sometimes half a line, and pauses."""
        data = b"".join(line + b"\n" for line in self.lines)
        while data:
            size = min(len(data), self.rng.choice([1, 50, 1000, 5000]))
            piece, data = data[:size], data[size:]
            yield piece, self.rng.random() < 0.5
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.choice([0.01, 0.5, 8.0]))

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        streams = SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: -1), stderr=io.StringIO())
        clock = SimpleNamespace(monotonic=self.loop.time)
        return _replaced(pub, sys=streams, time=clock, _chunks=self.typed)

    def live(self) -> None:
        arguments = pub._parser().parse_intermixed_args(["made", "--rate", str(self.rate), "--nsqd", self.nsqd.name])
        publisher = pub._Publisher(b"made", 0, self.rate)
        task = self.loop.create_task(pub._publish(publisher, arguments))
        if self.cut_at is not None:
            self.world.after(self.cut_at, lambda: [session.sock.cut() for session in self.sessions])
        bound = 20 + len(self.lines) / self.rate + 9 * len(self.lines)
        self.expect(task.done, bound, "pub does not end")
        if self.cut_at is None or task.exception() is None:
            task.result()
        stored = self.nsqd.log.get(b"made", [])
        if stored != self.lines[: len(stored)]:
            self.world.violated("lines are stored in another order")
        if not publisher.messages <= len(stored) <= publisher.messages + publisher.unconfirmed:
            self.world.violated(
                f"{len(stored)} are stored, {publisher.messages} confirmed, {publisher.unconfirmed} sent"
            )
        if task.exception() is None and publisher.messages != len(self.lines):
            self.world.violated(f"pub has ended well after {publisher.messages} of {len(self.lines)} lines")
        self._check_rate(publisher._batch_messages)

    def _check_rate(self, batch: int) -> None:
        # A lag of 0.1 s may be made up for, and a network delays one packet more than the next.
        slack = 0.1 + 2 * self.network.delay(self.nsqd.address[0])
        for first, last in itertools.combinations(range(0, len(self.times), batch), 2):
            seconds = self.times[last] - self.times[first] + slack
            if last - first > self.rate * seconds + batch:
                self.world.violated(f"{last - first} messages within {seconds:.2f} s, rate {self.rate:g}")
                return


class _Output:
    """Standard output: a pipe with a reader, or a file on a disk that fills up."""

    def __init__(self, run: _Run, msg_timeout: float) -> None:
        self.run = run
        self.data = bytearray()
        rng = run.rng
        now = run.world.seconds
        #: Somebody reads from it, but not in this time; it is less than the broker allows to keep a message.
        self.stuck_from = now + rng.uniform(0, 10)
        self.stuck_until = self.stuck_from + rng.choice([0, 0, 2, 4]) * msg_timeout
        self.ends_at = now + rng.uniform(1, 8) if rng.random() < 0.6 else None
        self.error = rng.choice([errno.ENOSPC, errno.EPIPE, errno.EBADF, errno.EIO])

    def write(self, descriptor: int, data: Any) -> int:
        world = self.run.world
        if asyncio._get_running_loop() is not None:
            world.violated("sub writes on the event loop")
        if self.ends_at is not None and world.seconds >= self.ends_at:
            raise OSError(self.error, "the output has ended")
        if self.is_stuck:
            raise NotYet
        size = len(data) if self.run.rng.random() < 0.9 else self.run.rng.randint(1, len(data))
        self.data += data[:size]
        return size

    @property
    def is_stuck(self) -> bool:
        return self.stuck_from <= self.run.world.seconds < self.stuck_until

    @property
    def lines(self) -> list[bytes]:
        return bytes(self.data).split(b"\n")[:-1]


class _Sub(_Run):
    """Messages are printed to something that does not always take them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.nsqd = self.broker()
        self.nsqd.finished_hook = self._finished
        self.nsqd.timed_out_hook = self._timed_out
        self.output = _Output(self, self.nsqd.msg_timeout)
        self.count = rng.choice([None, None, 7])
        self.timeout = rng.choice([None, 3.0])
        # Not before it is connected: until then ctrl-C is not caught.
        self.interrupt_at = rng.uniform(1, 10) if self.timeout is None or rng.random() < 0.5 else None

    def _finished(self, body: bytes) -> None:
        if body not in self.output.lines:
            self.world.violated(f"finished, but not printed: {body!r}")

    def _timed_out(self, session: Session, body: bytes) -> None:
        self.world.violated(f"timed out at the broker: {body!r}")

    def _thread(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> Any:
        """A thread that begins at a moment of the world's choice, and waits where it would block."""

        def work() -> None:
            try:
                target(*args)
            except NotYet:
                self.world.after(0.02, work)
            except BaseException as exc:
                self.world.violated(f"a thread has died: {exc!r}\n{traceback.format_exc()}")

        return SimpleNamespace(start=lambda: self.world.after(self.rng.uniform(0, 0.01), work))

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        streams = SimpleNamespace(stdout=SimpleNamespace(fileno=lambda: 1), stderr=io.StringIO())
        system = SimpleNamespace(write=self.output.write)
        return _replaced(sub, sys=streams, os=system, threading=SimpleNamespace(Thread=self._thread))

    def live(self) -> None:
        world, loop = self.world, self.loop
        words = [f"{TOPIC.decode()}/{CHANNEL.decode()}", "--nsqd", self.nsqd.name]
        words += ["-n", str(self.count)] if self.count else []
        words += ["--timeout", f"{self.timeout:g}s"] if self.timeout else []
        words += ["--max-in-flight", str(self.rng.choice([1, 20]))]
        arguments = sub._parser().parse_args(words)
        for number in range(self.rng.choice([0, 3, 60])):
            body = b"message %d" % number + b"." * self.rng.choice([0, 0, 9000])
            world.after(self.rng.uniform(0, 6), lambda body=body: self.nsqd.store(TOPIC, body))
        task = loop.create_task(sub._subscribe(TOPIC.decode(), CHANNEL.decode(), arguments))
        if self.interrupt_at is not None:
            world.after(self.interrupt_at, lambda: loop.deliver(signal.SIGINT))
        # With messages, and a reader that is stuck, in between.
        self.expect(task.done, 10 + 6 + 12 + 6, "sub does not end")
        self._check(task)

    def _check(self, task: asyncio.Task[int]) -> None:
        lines = self.output.lines
        error = task.exception()
        if error is not None and "cannot print" not in str(error):
            self.world.violated(f"sub has failed: {error!r}")
        if len(lines) > len(set(lines)):
            self.world.violated("a message was printed twice")
        if self.count and len(lines) > self.count:
            self.world.violated(f"{len(lines)} were printed, -n {self.count}")
        self.world.run_for(0.5)
        left = [body.body for session in self.sessions for body, _ in session.in_flight.values()]
        if left:
            self.world.violated(f"not given back: {left[0][:20]!r} and {len(left) - 1} more")


# --- nsqlookupd -----------------------------------------------------------------------------------------------------


class _Peer:
    """An nsqd, as an nsqlookupd sees it: what it sends, and how long each answer took."""

    def __init__(self, run: _Run, address: tuple[str, int], host: str) -> None:
        self.world = run.world
        self.sock = run.network.connect(address, host)
        self.sock.on_data = self._data
        self.waiting: list[float] = []
        self.slowest = 0.0
        self.answers = 0
        self._unsent = bytearray()
        self._came = bytearray()
        about = {"broadcast_address": host, "hostname": host, "tcp_port": 4150, "http_port": 4151, "version": "1.3.0"}
        body = json.dumps(about).encode()
        self.send(b"  V1IDENTIFY\n" + len(body).to_bytes(4, "big") + body, 1)

    def send(self, data: bytes, answers: int) -> None:
        self.waiting += [self.world.seconds] * answers
        self._unsent += data
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            self.world.after(0.01, self._push)
        except OSError:
            self._unsent.clear()

    def _data(self, sock: Socket) -> None:
        with contextlib.suppress(OSError):
            while sock.inbox:
                self._came += sock.recv(1 << 20)
        while len(self._came) >= 4 and self.waiting:
            size = int.from_bytes(self._came[:4], "big")
            if len(self._came) < 4 + size:
                return
            del self._came[: 4 + size]
            self.slowest = max(self.slowest, self.world.seconds - self.waiting.pop(0))
            self.answers += 1


class _Registry(_Run):
    """An nsqlookupd with many names, one nsqd that has them, and another that wants an answer to its PINGs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.names = self.rng.choice(["topics", "channels", "ephemeral"])
        self.over = False

    def _name(self, number: int) -> bytes:
        if self.names == "topics":
            return b"topic%d" % number
        return b"many channel%d%b" % (number, b"#ephemeral" if self.names == "ephemeral" else b"")

    def _fill(self, daemon: LookupDaemon) -> None:
        """The large one has registered much before."""
        [producer] = [each for each in daemon.registry.producers.values() if each.broadcast_address == "10.0.0.2"]
        for number in range(_NAMES):
            daemon.registry.register(producer, *self._name(number).decode().split(" "))

    def live(self) -> None:
        # Calls are what time is made of here: those of a garbage collection, of whatever ran before, are not its own.
        gc.collect()
        gc.disable()
        try:
            self._live()
        finally:
            gc.enable()

    def _live(self) -> None:
        rng, world = self.rng, self.world
        host = "10.0.1.1"
        machine = Machine(world, self.network, host, Path("/simulated/lookupd"), 1)
        loop = Loop(world, self.network, host, machine, call_cost=_SLOW_CALL)
        daemon = LookupDaemon(
            tcp_address=f"{host}:4160",
            http_address=f"{host}:4161",
            broadcast_address=host,
            now=machine.clock.now,
            wall=machine.clock.wall,
            system=machine,
        )
        starting = loop.create_task(daemon.start())
        self.expect(starting.done, 60, "nsqlookupd does not start")
        starting.result()
        pinging = _Peer(self, (host, 4160), "10.0.0.1")
        large = _Peer(self, (host, 4160), "10.0.0.2")
        self.expect(lambda: pinging.answers and large.answers, 60, "nsqlookupd does not answer")
        for request in (b"GET /lookup?topic=x", b"GET /nodes", b"GET /debug", b"POST /topic/delete?topic=x"):
            # What is imported or compiled at the first use is not what this is about.
            self._ask(request)
        self._fill(daemon)
        pinging.slowest = 0.0
        self._ping(pinging)
        count = rng.choice([10, 400])
        large.send(b"".join(b"REGISTER %b\n" % self._name(_NAMES + number) for number in range(count)), count)
        self.expect(lambda: large.answers > count, 120, "not all is registered")
        held = self._name(_NAMES).partition(b" ")[0]
        if self._ask(b"GET /lookup?topic=" + held).count(b"10.0.0.2") == 0:
            world.violated("what was registered is not found")
        for _ in range(rng.randint(1, 3)):
            self._disturb(rng.choice(["leave", "cut", "unregister", "delete", "nodes", "debug"]), large, held)
        world.run_for(1)
        if pinging.slowest > _LONGEST_PING:
            world.violated(f"a PING was answered after {pinging.slowest:.3f} s")
        self.over = True
        pinging.sock.close()
        large.sock.close()
        stopping = loop.create_task(daemon.stop())
        self.expect(stopping.done, 60, "nsqlookupd does not stop")
        stopping.result()
        world.run_for(1)
        world.processes.remove(loop)
        loop.close()

    def _ping(self, peer: _Peer) -> None:
        if not self.over:
            peer.send(b"PING\n", 1)
            self.world.after(0.01, lambda: self._ping(peer))

    def _disturb(self, what: str, large: _Peer, held: bytes) -> None:
        if what == "leave":
            large.sock.close()
        elif what == "cut":
            large.sock.cut()
        elif what == "unregister" and not large.sock.closed:
            large.send(b"UNREGISTER %b\n" % held, 1)
        elif what == "delete":
            self._ask(b"POST /topic/delete?topic=" + held)
        elif what in ("nodes", "debug"):
            self._ask(b"GET /" + what.encode())
        self.world.run_for(self.rng.uniform(0, 0.5))

    def _ask(self, request: bytes) -> bytes:
        sock = self.network.connect(("10.0.1.1", 4161), "10.0.9.9")
        sock.send(request + b" HTTP/1.1\r\nHost: 10.0.1.1:4161\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        came = bytearray()

        def data(sock: Socket) -> None:
            with contextlib.suppress(OSError):
                while sock.inbox:
                    came.extend(sock.recv(1 << 20))

        sock.on_data = data
        self.expect(lambda: sock.eof or sock.error, 60, f"no answer to {request!r}")
        sock.close()
        return bytes(came)


_KINDS: list[type[_Run]] = [_Pynsq, _Pub, _Sub, _Sub]


def run_seed(seed: int) -> list[str]:
    """Run the program of one seed; what was violated."""
    kind = _Registry if seed % 20 == 19 else _KINDS[seed % len(_KINDS)]
    return [f"{kind.__name__.strip('_').lower()}: {line}" for line in kind(seed).run()]
