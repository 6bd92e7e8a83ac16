"""Try the client on simulated brokers: seeded faults, handlers that do anything, and what must hold nevertheless.

    python -m tests.simulation.client --seeds 1000 --start 0

A seed decides how many nsqds and nsqlookupds there are, how the consumer and the producer are set up, what fails and
when, and what each handler does with each message. After the faults everything is healed. Held all the time:

- every publish ends within its time, and in the way its error says: stored, refused, never sent, or unknown
- nothing is finished that no handler has handled, and no more handlers run than may
- the RDY that was said over all connections is never above `max_in_flight`
- a producer holds no more bytes than it may, and keeps the order of one task's publishes

and after the healing: messages from every broker are handled, by as many handlers at a time as there should be; clients
that ask nsqlookupds are back within 3 s of a restart; `close` ends within its bound, sooner where nothing is left to
wait for; no task, no socket and no HTTP session is left. Each seed also runs one of the ``programs``.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import random
import re
import sys
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp

from flintmq.client import Consumer, Message, Producer
from flintmq.errors import ClosedError, ConnectError, FlintError, OptionError, PublishError, PublishUnknownError

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from . import programs
from .loop import Loop
from .network import Network
from .nodes import Lookupd, Nsqd, Session
from .world import Stuck, World

TOPIC = b"orders"
CHANNEL = b"billing"
_READY = re.compile(rb"(?:^|\n)RDY (\d+)(?=\n)")


class Odd(BaseException):
    """Neither an Exception nor a cancellation."""


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"plan {seed}")
        self.world = World(seed)
        self.network = Network(self.world)
        self.loop = Loop(self.world, self.network)
        self.healed = False
        self.closing = False
        # Nodes.
        self.brokers = [
            Nsqd(self.world, self.network, f"10.0.0.{n + 1}", n) for n in range(rng.choice([1, 1, 2, 3, 4]))
        ]
        self.lookupds = [Lookupd(self.world, self.network, f"10.0.1.{n + 1}") for n in range(rng.choice([0, 1, 2]))]
        self.msg_timeout = rng.choice([1.5, 3.0, 10.0])
        for broker in self.brokers:
            broker.msg_timeout = self.msg_timeout
            broker.max_msg_size = 100_000
            broker.max_body = 500_000
            broker.version = rng.choice(["1.3.0"] * 9 + ["0.2.30"])
            broker.max_rdy = rng.choice([1, 3, 2500])
            broker.says_limit = rng.random() < 0.5
            broker.node = rng.choice(["", f"node {broker.number}"])
            self.network.delays[broker.address[0]] = rng.choice([0.0002, 0.0002, 0.02, 0.1])
            broker.finished_hook = self._finished
            broker.timed_out_hook = self._timed_out
            broker.opened_hook = self._watch
            broker.counted_hook = self._counted
            broker.channel(TOPIC, CHANNEL)
            # With several lookupds, some know one broker and not the other.
            known_by = [lookupd for lookupd in self.lookupds if rng.random() < 0.7]
            broker.lookupds = known_by or self.lookupds[:1]
        # The consumer.
        self.mode = rng.choice(["async", "async", "async", "thread", "iterate"])
        self.concurrency = rng.choice([1, 1, 2, 4])
        self.max_in_flight = max(1, rng.choice([1, self.concurrency, self.concurrency, 10]))
        self.stop_timeout = rng.choice([6.0, 15.0])
        self.auto_touch = rng.random() < 0.3
        self.max_attempts = rng.choice([0, 0, 3])
        self.heartbeat = rng.choice([1.0, 2.0])
        self.behaviours = self._draw_behaviours()
        self.running = 0
        self.last_end = 0.0
        self.handled: set[bytes] = set()
        self.given_up: set[bytes] = set()
        self.give_up_seconds = rng.choice([0.0, 0.3])
        self.kept: list[Message] = []
        #: Handlers that wait for one another. A message that is kept waiting may come a second time.
        self.at_barrier = 0
        self.barrier_open = False
        self.swallowing = False
        self.ready: dict[Session, int] = {}
        self.sessions: weakref.WeakSet[aiohttp.ClientSession] = weakref.WeakSet()
        # The producer.
        self.publish_timeout = rng.choice([3.0, 6.0])
        self.retry_unknown = rng.random() < 0.2
        self.pending_limit = rng.choice([50_000, 400_000, 64 << 20])
        self.publishes = 0
        self.pending: dict[int, tuple[float, str]] = {}
        self.outcomes: dict[int, tuple[str, list[bytes]]] = {}
        self.consumer: Consumer | None = None
        self.producer: Producer | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.faults = 0

    def _draw_behaviours(self) -> list[str]:
        if self.mode == "thread":
            odd = ["raise", "stop_iteration", "future_fails", "future_done", "awaitable", "system_exit", "raise_odd"]
        elif self.mode == "async":
            odd = ["raise", "cancel", "inner_cancel", "raise_odd", "later", "never", "requeue", "slow", "slow", "hang"]
            odd += ["future_fails", "generator", "self_cancel", "stale_cancel", "late_cancel"]
        else:
            odd = ["raise", "never", "requeue", "slow"]
        chosen = self.rng.sample(odd, self.rng.randint(0, 3))
        return ["fine", *chosen]

    # --- What brokers see --------------------------------------------------------------------------------------------

    def _finished(self, body: bytes) -> None:
        if body not in self.handled and body not in self.given_up:
            self.world.violated(f"finished, but no handler has handled it: {body!r}")

    def _timed_out(self, session: Session, body: bytes) -> None:
        if self.auto_touch and not session.disturbed and not session.over and not self.closing and self.mode == "async":
            self.world.violated(f"timed out at the broker in spite of auto_touch: {body!r}")

    def _watch(self, session: Session) -> None:
        near = session.sock.peer
        assert near is not None

        def tap(data: bytes) -> None:
            if b"RDY " not in data:
                return  # much sooner said of a large message than by the expression
            for match in _READY.finditer(data):
                self.ready[session] = int(match[1])
            gone = [each for each in self.ready if each.sock.peer is None or each.sock.peer.closed]
            for each in gone:
                del self.ready[each]
            total = sum(self.ready.values())
            if total > self.max_in_flight:
                self.world.violated(f"RDY {total} with max_in_flight {self.max_in_flight}")

        near.tap = tap

    def _counted(self, session: Session) -> None:
        self.ready[session] = max(0, self.ready.get(session, 0) - 1)

    # --- Handlers ----------------------------------------------------------------------------------------------------

    def _enter(self, message: Message) -> str:
        self.running += 1
        if self.running > self.concurrency:
            self.world.violated(f"{self.running} handlers at a time, concurrency {self.concurrency}")
        kind = message.body.partition(b":")[2].decode()
        return "fine" if self.healed and kind not in ("barrier", "final_slow", "swallow") else kind

    async def handle(self, message: Message) -> Any:
        kind = self._enter(message)
        try:
            return await self._behave(message, kind)
        finally:
            self.running -= 1
            self.last_end = self.loop.time()

    async def _behave(self, message: Message, kind: str) -> Any:
        body = message.body
        if kind == "slow":
            await asyncio.sleep(self.msg_timeout * self.rng.uniform(0.2, 1.6))
        elif kind == "final_slow":
            await asyncio.sleep(self.msg_timeout * 1.2)
        elif kind == "hang":
            for _ in range(200):
                if self.healed:
                    break
                await asyncio.sleep(0.25)
        elif kind == "raise":
            raise ZeroDivisionError(body)
        elif kind == "raise_odd":
            raise Odd(body)
        elif kind == "cancel":
            raise asyncio.CancelledError
        elif kind == "inner_cancel":
            inner = asyncio.ensure_future(asyncio.sleep(5))
            self.loop.call_later(0.05, inner.cancel)
            await inner
        elif kind == "self_cancel":
            _this_task().cancel()
            await asyncio.sleep(0)
        elif kind == "stale_cancel":
            # A deadline from before `uncancel`: it swallows what it has caused, and leaves the count.
            self.loop.call_later(0.05, _this_task().cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(5)
        elif kind == "late_cancel":
            # A deadline that nobody takes back: it hits another message's handler, or the wait for one.
            self.loop.call_later(0.2, _this_task().cancel)
        elif kind == "later":
            message.answer_later()
            self.handled.add(body)
            self.loop.call_later(0.3, message.finish)
            return None
        elif kind == "never":
            message.answer_later()
            self.kept.append(message)
            return None
        elif kind == "requeue":
            message.requeue(0.2, backoff=False)
            return None
        elif kind == "future_fails":
            return _failing()
        elif kind == "generator":
            return self._generator(message)
        elif kind == "swallow":
            self.swallowing = True
            await _unstoppable(60)
        elif kind == "barrier":
            self.at_barrier += 1
            try:
                for _ in range(400):
                    if self.barrier_open:
                        break
                    await asyncio.sleep(0.1)
                else:
                    raise TimeoutError
            finally:
                self.at_barrier -= 1
        else:
            await asyncio.sleep(self.rng.choice([0, 0, 0.01]))
        self.handled.add(body)
        return None

    def _generator(self, message: Message) -> Any:
        yield
        self.handled.add(message.body)

    def handle_in_thread(self, message: Message) -> Any:
        if asyncio._get_running_loop() is not None:
            self.world.violated("a plain handler runs on the event loop")
        kind = self._enter(message)
        self.running -= 1
        body = message.body
        if kind == "raise":
            raise ZeroDivisionError(body)
        if kind == "stop_iteration":
            raise StopIteration
        if kind == "system_exit":
            raise SystemExit(3)
        if kind == "raise_odd":
            raise Odd(body)
        if kind == "future_fails":
            return _failing()
        if kind == "future_done":
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            self.world.after(0.5, lambda: (self.handled.add(body), done.set_result(None)))
            return done
        if kind == "awaitable":
            return self._behave(message, "fine")
        if kind == "barrier":
            return self._behave(message, kind)
        self.handled.add(body)
        return None

    def give_up_in_thread(self, message: Message) -> None:
        if asyncio._get_running_loop() is not None:
            self.world.violated("a plain on_give_up runs on the event loop")
        self.given_up.add(message.body)

    async def give_up(self, message: Message) -> None:
        try:
            await asyncio.sleep(self.give_up_seconds)
        except asyncio.CancelledError:
            if not self.closing:
                self.world.violated(f"on_give_up was cancelled: {message.body!r}")
            raise
        self.given_up.add(message.body)

    async def messages(self, consumer: Consumer) -> AsyncIterator[Message]:
        """In one of the ways to ask for them, some of which are given up again and again."""
        way = self.rng.choice(["iterate", "get", "batches"])
        while way != "iterate":
            try:
                if way == "get":
                    yield await consumer.get(timeout=0.1)
                else:
                    for message in await asyncio.wait_for(anext(aiter(consumer.batches(3, wait=0.1))), 0.15):
                        yield message
            except TimeoutError:
                continue
            except (ClosedError, StopAsyncIteration):
                return
        async for message in consumer:
            yield message

    async def iterate(self, consumer: Consumer) -> None:
        async for message in self.messages(consumer):
            kind = self._enter(message)
            try:
                with contextlib.suppress(ZeroDivisionError):
                    if kind == "never":
                        self.kept.append(message)
                    else:
                        with message:
                            await self._behave(message, kind)
            finally:
                self.running -= 1

    # --- The clients -------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        names = [lookupd.name for lookupd in self.lookupds]
        options: dict[str, Any] = {
            "heartbeat_interval": self.heartbeat,
            "read_timeout": 2.5 * self.heartbeat,
            "write_timeout": 3.0,
            "dial_timeout": 2.0,
        }
        if names:
            options["lookupd"] = names
            options["lookupd_timeout"] = 2.0
            # A broker that comes later, and that nobody has lost, is found at the next poll.
            options["lookupd_poll_interval"] = 20.0
            if self.rng.random() < 0.15:
                names.append(self.rng.choice(["nobody.example:4161", "bad..name:4161", f"{'x' * 70}.example:4161"]))
        else:
            options["nsqd"] = [broker.name for broker in self.brokers]
        return options

    def make_consumer(self) -> Consumer:
        options = self.options() | {
            "max_in_flight": self.max_in_flight,
            "max_attempts": self.max_attempts,
            "default_requeue_delay": 0.3,
            "max_backoff_duration": self.rng.choice([0.0, 2.0]),
            "backoff_multiplier": 0.2,
            "stop_timeout": self.stop_timeout,
            "on_give_up": self.rng.choice([self.give_up, self.give_up_in_thread]),
        }
        if self.mode == "async":
            options["handler"] = self.handle
            options["auto_touch"] = self.auto_touch
        elif self.mode == "thread":
            options["handler"] = self.handle_in_thread
        if self.mode != "iterate":
            options["concurrency"] = self.concurrency
            if self.rng.random() < 0.1:
                self._refused(options, handler=self._generator)
                self._refused(options, handler=_async_generator)
        else:
            self.concurrency = self.rng.choice([1, 2])
        if self.rng.random() < 0.1:
            options["backoff_strategy"] = _broken_strategy
        if "lookupd" in options and self.rng.random() < 0.05:
            self._refused(options, lookupd_poll_interval=0)
        return Consumer(TOPIC.decode(), CHANNEL.decode(), **options)

    def _refused(self, options: dict[str, Any], **wrong: Any) -> None:
        try:
            Consumer("t", "c", **{**options, **wrong})
        except (OptionError, TypeError):
            return
        self.world.violated(f"a consumer with {wrong} is not refused")

    async def start_consumer(self) -> None:
        self.consumer = self.make_consumer()
        await self.consumer.start()
        if self.mode == "iterate":
            for _ in range(self.concurrency):
                self.tasks.append(self.loop.create_task(self.iterate(self.consumer)))

    async def start_producer(self) -> None:
        options = self.options() | {
            "timeout": self.publish_timeout,
            "linger": self.rng.choice([0, 0, 0.02]),
            "retry_unknown": self.retry_unknown,
            "max_pending_bytes": self.pending_limit,
            "codec": _BrokenCodec(),
        }
        while True:
            producer = Producer(**options)
            begin = self.loop.time()
            starting = self.loop.create_task(producer.start())
            await asyncio.wait([starting], timeout=self.publish_timeout + 8)
            if not starting.done():
                self.world.violated(f"Producer.start() takes more than {self.loop.time() - begin:.1f} s")
                starting.cancel()
                await asyncio.wait([starting], timeout=8)
                return
            if starting.exception() is None:
                self.producer = producer
                return
            if not isinstance(starting.exception(), ConnectError):
                self.world.violated(f"Producer.start() raised {starting.exception()!r}")
            await asyncio.sleep(0.5)

    # --- Publishing --------------------------------------------------------------------------------------------------

    async def publish(self, task: int, count: int) -> None:
        """One task: several publishes at a time, in order."""
        for _ in range(count):
            producer = self.producer
            if producer is not None and not self.closing:
                made = [self.loop.create_task(self._publish(producer, task)) for _ in range(self.rng.choice([1, 2, 5]))]
                for each in made:
                    if self.rng.random() < 0.05:
                        self.loop.call_later(self.rng.uniform(0, 0.5), each.cancel)
                await asyncio.wait(made)
            await asyncio.sleep(self.rng.uniform(0, 1))

    async def _publish(self, producer: Producer, task: int) -> None:
        number = self.publishes = self.publishes + 1
        kind = self.rng.choice(["small", "small", "small", "small", "large", "many", "defer"])
        if self.rng.random() < 0.06:
            kind = "too large"
        elif self.rng.random() < 0.1:
            await self._publish_wrongly(producer)
            return
        size = {"large": 70_000, "too large": 150_000}.get(kind, self.rng.randint(0, 300))
        bodies = [b"%d.%d.0:fine" % (task, number) + b" " * size]
        if kind == "many":
            bodies = [b"%d.%d.%d:fine" % (task, number, n) + b" " * self.rng.randint(0, 5000) for n in range(1, 8)]
        self.pending[number] = (self.loop.time(), kind)
        outcome = "cancelled"
        try:
            if kind == "many":
                await producer.publish_many("made", bodies)
            elif kind == "defer":
                await producer.defer("made", bodies[0], 0.1)
            else:
                await producer.publish("made", bodies[0])
            outcome = "stored"
        except PublishUnknownError:
            outcome = "unknown"
        except PublishError:
            outcome = "refused"
        except (ConnectError, ClosedError):
            outcome = "never sent"
        except asyncio.CancelledError:
            pass
        except FlintError as exc:
            self.world.violated(f"publish raised {exc!r}")
        finally:
            began, _ = self.pending.pop(number)
            took = self.loop.time() - began
            if took > 2 * self.publish_timeout + 0.5:
                self.world.violated(f"a publish ({kind}) took {took:.1f} s, timeout {self.publish_timeout}")
            if kind != "defer" or outcome == "stored":
                self.outcomes[number] = (outcome, bodies)

    async def _publish_wrongly(self, producer: Any) -> None:
        """A call that can only fail; nobody else may notice."""
        wrong: list[Callable[[], Any]] = [
            lambda: producer.publish(b"made", b"wrong"),
            lambda: producer.publish("made", b"wrong", key=b"k"),
            lambda: producer.publish_many(b"made", [b"wrong", b"wrong"]),
            lambda: producer.publish("made", {"text": 1}),
            lambda: producer.defer("made", {"raise": 1}, 0.1),
            lambda: producer.publish_many("made", [b"wrong", {"odd": 1}]),
        ]
        try:
            await self.rng.choice(wrong)()
        except (TypeError, LookupError, Odd, ClosedError):
            return
        self.world.violated("a publish that cannot be has succeeded")

    def check_publishes(self) -> None:
        stored: dict[bytes, int] = {}
        for broker in self.brokers:
            for body in broker.log.get(b"made", ()):
                stored[body] = stored.get(body, 0) + 1
        for outcome, bodies in self.outcomes.values():
            there = [stored.get(body, 0) for body in bodies]
            if outcome == "stored" and not all(there):
                self.world.violated(f"a publish returned and is not stored: {bodies[0][:20]!r}")
            if outcome in ("refused", "never sent") and any(there):
                self.world.violated(f"a publish failed ({outcome}) and is stored: {bodies[0][:20]!r}")
            if outcome == "stored" and not self.retry_unknown and max(there) > 1:
                self.world.violated(f"a publish is stored {max(there)} times: {bodies[0][:20]!r}")
        if len(self.brokers) == 1 and not self.retry_unknown:
            last: dict[bytes, tuple[int, ...]] = {}
            for body in self.brokers[0].log.get(b"made", ()):
                task, *numbers = body.partition(b":")[0].split(b".")
                at = tuple(map(int, numbers))
                if self.outcomes.get(at[0], ("", []))[0] != "stored":
                    continue  # by a broker that read it much later, perhaps
                if at < last.get(task, (0,)):
                    self.world.violated(f"task {task!r}: {at} was stored behind {last[task]}")
                last[task] = max(at, last.get(task, (0,)))

    def look_at_memory(self) -> None:
        producer = self.producer
        if producer is not None and not self.closing:
            held = 0
            for connection, outlet in producer._outlets.items():
                held += sum(len(body) for command in outlet.unanswered for body in command.bodies)
                if connection._transport is not None:
                    held += connection._transport.get_write_buffer_size()
            held += sum(len(body) for command in producer._backlog for body in command.bodies)
            # What was sent is counted twice while it is in the transport.
            if held > 2 * (self.pending_limit + 200_000):
                self.world.violated(f"a producer holds {held} bytes, limit {self.pending_limit}")
        self.world.after(0.5, self.look_at_memory)

    # --- Faults ------------------------------------------------------------------------------------------------------

    def arm_faults(self, until: float) -> None:
        kinds: list[Callable[[], None]] = [
            self.cut,
            self.half_open,
            self.restart,
            self.restart,
            self.stop_reading,
            self.go_mute,
            self.do_not_answer,
            self.send_garbage,
            self.black_hole,
            self.fill_up,
            self.spoil_lookupd,
            self.kill_lookupd,
        ]
        chosen = self.rng.sample(kinds, self.rng.randint(0, 4))
        for fault in chosen:
            for _ in range(self.rng.randint(1, 3)):
                self.world.after(self.rng.uniform(0.2, until), lambda fault=fault: self._fault(fault))

    def _fault(self, fault: Callable[[], None]) -> None:
        if not self.healed:
            self.faults += 1
            fault()

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        self.world.after(self.rng.uniform(0.5, 12), undo)

    def _broker(self) -> Nsqd:
        return self.rng.choice(self.brokers)

    def _disturb(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            session.disturbed = True

    def cut(self) -> None:
        for session in list(self._broker().sessions):
            session.disturbed = True
            session.sock.cut()

    def half_open(self) -> None:
        broker = self._broker()
        self._disturb(broker.sessions)
        for session in broker.sessions:
            session.sock.link.half_open = True

    def restart(self) -> None:
        broker = self._broker()
        self._disturb(broker.sessions)
        broker.kill()
        self._for_a_while(broker.start)

    def stop_reading(self) -> None:
        for session in self._broker().sessions:
            session.disturbed = True
            session.sock.paused = True

            def resume(session: Session = session) -> None:
                if not session.over:
                    session.sock.resume()

            self._for_a_while(resume)

    def go_mute(self) -> None:
        broker = self._broker()
        self._disturb(broker.sessions)
        broker.mute = True

        def speak() -> None:
            broker.speak()
            self._disturb(broker.sessions)

        self._for_a_while(speak)

    def do_not_answer(self) -> None:
        broker = self._broker()
        broker.unanswering = True
        self._for_a_while(lambda: self._answer_again(broker))

    def _answer_again(self, broker: Nsqd) -> None:
        if broker.unanswering:
            broker.unanswering = False
            # Its answers would be taken for those to other commands.
            self._disturb(broker.sessions)
            for session in list(broker.sessions):
                session.sock.cut()

    def send_garbage(self) -> None:
        data = self.rng.choice(
            [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 40, b"\0\0\0\x05\0\0\0\x09x", b"\0\0\0\x06\0\0\0\0??"]
        )
        for session in list(self._broker().sessions):
            session.garbage(data)

    def black_hole(self) -> None:
        broker = self._broker()
        self.network.black_holes.add(broker.address)
        self._disturb(broker.sessions)
        for session in list(broker.sessions):
            session.sock.link.half_open = True
        self._for_a_while(lambda: self.network.black_holes.discard(broker.address))

    def fill_up(self) -> None:
        broker = self._broker()
        broker.full = True

        def clean() -> None:
            broker.full = False

        self._for_a_while(clean)

    def spoil_lookupd(self) -> None:
        for lookupd in self.rng.sample(self.lookupds, min(1, len(self.lookupds))):
            lookupd.mood = self.rng.choice(["error", "garbage", "silent", "slow"])

            def better(lookupd: Lookupd = lookupd) -> None:
                lookupd.mood = "good"

            self._for_a_while(better)

    def kill_lookupd(self) -> None:
        for lookupd in self.rng.sample(self.lookupds, min(1, len(self.lookupds))):
            lookupd.kill()
            self._for_a_while(lookupd.start)

    def heal(self) -> None:
        self.healed = True
        self.network.black_holes.clear()
        for lookupd in self.lookupds:
            lookupd.mood = "good"
            lookupd.start()
        for broker in self.brokers:
            broker.full = False
            self._answer_again(broker)
            broker.start()
            for session in list(broker.sessions):
                if session.sock.paused:
                    session.sock.resume()
            broker.speak()

    # --- The run -----------------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        world = self.world
        seconds = self.rng.choice([6.0, 15.0])
        for lookupd in self.lookupds:
            lookupd.start()
        for broker in self.brokers:
            # Some come up later than their clients.
            if self.rng.random() < 0.2:
                world.after(self.rng.uniform(0.3, 4), lambda broker=broker: broker.running or broker.start())
            else:
                broker.start()
        for number in range(self.rng.choice([5, 30, 60])):
            body = b"in%d:%s" % (number, self.rng.choice(self.behaviours).encode())
            when = self.rng.uniform(0, seconds)
            broker = self._broker()
            world.after(when, lambda body=body, broker=broker: broker.store(TOPIC, body))
        self.arm_faults(seconds)
        self.look_at_memory()
        try:
            self._live(seconds)
        except AssertionError as exc:
            world.violated(f"{type(exc).__name__}: {exc}")
        except (Exception, SystemExit, Odd) as exc:
            world.violated(f"{exc!r}\n{traceback.format_exc()}")
        self._take_down()
        return world.violations

    def _live(self, seconds: float) -> None:
        world, loop = self.world, self.loop
        loop.run(self.start_consumer(), 1)
        starting = loop.create_task(self.start_producer())
        publishing = [loop.create_task(self.publish(task, self.rng.choice([2, 10]))) for task in range(2)]
        world.run_for(seconds)
        self.heal()
        self._expect(lambda: all(task.done() for task in publishing), 60, "publishes do not end")
        self._expect(starting.done, 30, "Producer.start() does not end after the healing")
        self._check_recovery()
        self._check_workers()
        if self.lookupds and self.rng.random() < 0.6:
            self._check_restart()
        self.check_publishes()
        self._close()

    def _expect(self, condition: Callable[[], object], seconds: float, text: str) -> None:
        try:
            self.world.run(condition, seconds)
        except Stuck as exc:
            raise Stuck(f"{text}: {exc}") from None

    def _probe(self, name: str, seconds: float, what: str) -> None:
        probes = [b"%b%d:fine" % (name.encode(), number) for number in range(len(self.brokers))]
        for broker, probe in zip(self.brokers, probes, strict=True):
            broker.store(TOPIC, probe)

        self._expect(
            lambda: all(probe in self.handled or probe in self.given_up for probe in probes),
            seconds,
            f"messages are not consumed {what}",
        )

    def _check_recovery(self) -> None:
        # Half-open connections are found by silence, a vanished address is dialled now and then.
        self._probe("probe", 45 + 3 * self.msg_timeout, "after the healing")
        if self.producer is not None:
            publishing = self.loop.create_task(self._publish_well(self.producer))
            self._expect(publishing.done, 45, "a publish after the healing does not succeed")
            if self.rng.random() < 0.2 and len(self.brokers) == 1:
                self._check_refusals(self.producer)
            if self.rng.random() < 0.3 and self.pending_limit <= 400_000:
                self._check_memory(self.producer)

    async def _publish_well(self, producer: Producer) -> None:
        while True:
            try:
                await producer.publish("probe", b"x")
                return
            except FlintError:
                await asyncio.sleep(0.1)

    def _check_refusals(self, producer: Producer) -> None:
        """Refused publishes hold up nobody."""
        slowest = 0.0
        # Those that wait for room are refused one after the other, each at the price of a connection.
        together = self.rng.choice([1, 30]) if self.pending_limit > 30 * 150_000 else 1

        async def refused() -> None:
            for _ in range(10):
                calls = (producer.publish("probe", bytes(150_000)) for _ in range(together))
                await asyncio.gather(*calls, return_exceptions=True)
                await asyncio.sleep(0.5)

        async def good() -> None:
            nonlocal slowest
            while not bad.done():
                begin = self.loop.time()
                with contextlib.suppress(PublishUnknownError):
                    await producer.publish("probe", b"x")
                slowest = max(slowest, self.loop.time() - begin)
                await asyncio.sleep(0.1)

        bad = self.loop.create_task(refused())
        publishing = self.loop.create_task(good())
        self._expect(publishing.done, 120, "publishes beside refused ones do not end")
        publishing.result()
        if slowest > 2:
            self.world.violated(f"a publish took {slowest:.1f} s because others were refused")

    def _check_memory(self, producer: Producer) -> None:
        """A broker that reads everything and answers nothing does not fill the memory."""
        for broker in self.brokers:
            broker.unanswering = True

        async def publish() -> None:
            for _ in range(8):
                with contextlib.suppress(FlintError):
                    await producer.publish("probe", bytes(90_000))

        publishing = [self.loop.create_task(publish()) for _ in range(12)]
        self._expect(
            lambda: all(task.done() for task in publishing), 20 * self.publish_timeout, "publishes do not end in time"
        )
        for broker in self.brokers:
            self._answer_again(broker)
        recovered = self.loop.create_task(self._publish_well(producer))
        self._expect(recovered.done, 45, "a producer does not recover from brokers that did not answer")

    def _check_workers(self) -> None:
        """As many handlers at a time as there should be."""
        if self.mode == "iterate" or self.max_in_flight < max(self.concurrency, len(self.brokers)):
            return
        if any(broker.max_rdy < self.max_in_flight for broker in self.brokers):
            return
        for broker in self.brokers:
            for number in range(self.concurrency):
                broker.store(TOPIC, b"b%d.%d:barrier" % (broker.number, number))
        self._expect(
            lambda: self.at_barrier >= self.concurrency, 60, f"not all of {self.concurrency} handlers work any more"
        )
        self.barrier_open = True
        self.world.run_for(2)

    def _check_restart(self) -> None:
        """Every broker restarts, and its clients find it by nsqlookupd soon after."""
        for broker in self.brokers:
            broker.kill()
        self.world.run_for(self.rng.choice([0.5, 3.0, 40.0]))
        for broker in self.brokers:
            broker.start()
        if self.producer is not None:
            publishing = self.loop.create_task(self._publish_well(self.producer))
            self._expect(publishing.done, 3.5, "a producer with lookupds is not back 3 s after a restart")
        self._expect(
            lambda: self.consumer is not None and len(self.consumer.connections) == len(self.brokers),
            3.5,
            "a consumer with lookupds is not back 3 s after a restart",
        )

    # --- The end -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        way = self.rng.choice(["idle", "idle", "busy", "twice", "swallow", "cancelled", "cancelled early", "mute"])
        if self.mode != "async" and way in ("busy", "swallow", "twice"):
            way = "idle"
        assert self.consumer is not None
        if way in ("busy", "twice"):
            # More than can be handled before their time is over.
            for broker in self.brokers:
                for number in range(4):
                    broker.store(TOPIC, b"f%d.%d:final_slow" % (broker.number, number))
            self.world.run_for(0.5)
        elif way == "swallow":
            self.brokers[0].store(TOPIC, b"s:swallow")
            self.world.run_for(1)
        elif way == "mute":
            self._broker().mute = True
        self.closing = True
        begin = self.loop.time()
        bound = self.stop_timeout + 9
        if way == "cancelled":
            if self.mode == "async":
                self.brokers[0].store(TOPIC, b"s:swallow")
                self.world.run_for(1)
            self._close_cancelled(bound)
        elif way == "cancelled early":
            self._close_cancelled_early(self.rng.randint(1, 8))
        else:
            if way == "twice":
                # The first to close it is another one, and is not waited for here.
                first = self.loop.create_task(self.consumer.close())
                self.world.run_for(0.01)
            closing = self.loop.create_task(self.consumer.close())
            self._expect(closing.done, bound, f"Consumer.close() does not end within {bound:g} s ({way})")
            closing.result()
            if way == "twice" and (self.running or self.consumer.connections):
                self.world.violated("the second Consumer.close() returned before the first had done its work")
            if way == "twice":
                self._expect(first.done, 1, "the first Consumer.close() does not end")
            took = self.loop.time() - max(begin, self.last_end)
            # "later" messages are answered within 0.3 s; the goodbye of a slow link takes less than 1 s.
            is_touched = self.auto_touch and self.kept
            if way in ("idle", "busy") and not is_touched and took > 2.5 + (self.msg_timeout if self.kept else 0):
                self.world.violated(f"Consumer.close() took {took:.1f} s with nothing left to wait for ({way})")
        if self.producer is not None:
            last = self._publish_while_away(self.producer) if self.rng.random() < 0.2 and way != "mute" else None
            closing = self.loop.create_task(self.producer.close())
            closing.add_done_callback(lambda _: last is None or last.done() or last.cancel())
            bound = self.publish_timeout + 9
            self._expect(closing.done, bound, f"Producer.close() does not end within {bound:g} s")
            closing.result()

    def _publish_while_away(self, producer: Producer) -> asyncio.Task[None]:
        """A publish that waits for a broker when its producer is closed; the broker comes back in time."""
        for broker in self.brokers:
            broker.kill()
        self.world.run(lambda: not producer.connections, 10)

        async def publish() -> None:
            try:
                await producer.publish("probe", b"at the end")
            except FlintError as exc:
                self.world.violated(f"a publish failed because its producer was closed: {exc!r}")

        task = self.loop.create_task(publish())
        self.world.run_for(0.01)
        for broker in self.brokers:
            self.world.after(0.5, broker.start)
        return task

    def _close_cancelled_early(self, moment: int) -> None:
        async def close() -> None:
            assert self.consumer is not None
            closing = self.loop.create_task(self.consumer.close())
            for _ in range(moment):
                await asyncio.sleep(0)
            if not closing.done():
                closing.cancel()
                await asyncio.wait([closing])
                if not closing.cancelled():
                    self.world.violated(f"Consumer.close() swallowed a cancellation at its step {moment}")

        closing = self.loop.create_task(close())
        self._expect(closing.done, 6, "a Consumer.close() that was cancelled does not end")
        closing.result()

    def _close_cancelled(self, bound: float) -> None:
        async def close() -> str:
            assert self.consumer is not None
            try:
                async with asyncio.timeout(0.5):
                    await self.consumer.close()
            except TimeoutError:
                return "cancelled"
            return "closed"

        closing = self.loop.create_task(close())
        self._expect(closing.done, 6, "asyncio.timeout(0.5) around Consumer.close() does not fire within 6 s")
        closing.result()

    def _take_down(self) -> None:
        """Nothing may be left but what a handler refuses to end."""
        world = self.world
        for task in self.tasks:
            task.cancel()
        with contextlib.suppress(AssertionError):
            world.run_for(1)
        if not world.violations:
            left = [
                task for task in asyncio.all_tasks(self.loop) if not (self.swallowing and "handler" in task.get_name())
            ]
            if left:
                world.violated(f"tasks are left: {[task.get_name() for task in left]}")
            ours = [end for end in world.descriptors if getattr(end, "name", ("",))[0] == self.loop.host]
            if ours:
                world.violated(f"{len(ours)} sockets are left open")
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(AssertionError):
            world.run_for(61)


class _BrokenCodec:
    """A codec of the user's that fails in the way the value says."""

    def encode(self, value: Any, /) -> Any:
        if "raise" in value:
            raise LookupError("no schema")
        if "odd" in value:
            raise Odd
        return "text"

    def decode(self, body: bytes, kind: Any, /) -> Any:
        raise LookupError("no schema")


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _failing() -> concurrent.futures.Future[None]:
    failed: concurrent.futures.Future[None] = concurrent.futures.Future()
    failed.set_exception(ZeroDivisionError("in a future"))
    return failed


async def _async_generator(message: Message) -> Any:
    yield


async def _unstoppable(seconds: float) -> None:
    """Swallow every cancellation until the time is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


def _broken_strategy(level: int) -> float:
    raise LookupError("a strategy that fails")


def run_seed(seed: int) -> list[str]:
    """Run one seed; what was violated."""
    opened: weakref.WeakSet[aiohttp.ClientSession] = weakref.WeakSet()
    original = aiohttp.ClientSession.__init__

    def noted(session: aiohttp.ClientSession, *args: Any, **options: Any) -> None:
        opened.add(session)
        original(session, *args, **options)

    state = random.getstate()
    random.seed(seed)
    aiohttp.ClientSession.__init__ = noted  # type: ignore[method-assign]
    try:
        run = Run(seed)
        violations = run.run()
        if not violations and any(not session.closed for session in opened):
            violations.append("an HTTP session is left open")
        run.loop.close()
        return violations + programs.run_seed(seed)
    finally:
        aiohttp.ClientSession.__init__ = original  # type: ignore[method-assign]
        random.setstate(state)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.client", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first that fails")
    parser.add_argument("--log", action="store_true", help="show what the client logs")
    arguments = parser.parse_args()
    if not arguments.log:
        logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    failed = 0
    for seed in range(arguments.start, arguments.start + arguments.seeds):
        violations = run_seed(seed)
        if seed % 50 == 0:
            gc.collect()
        if seed % 1000 == 999:
            sys.stdout.write(f"up to seed {seed}: {failed} failed, {time.monotonic() - begin:.0f} s\n")
            sys.stdout.flush()
        if violations:
            failed += 1
            sys.stdout.write(f"seed {seed}: {len(violations)} violations\n")
            for line in violations[:6]:
                sys.stdout.write(f"    {line}\n")
            sys.stdout.flush()
            if not arguments.keep_going:
                break
    sys.stdout.write(f"{arguments.seeds} seeds, {failed} failed, {time.monotonic() - begin:.1f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
