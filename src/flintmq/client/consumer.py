"""The consumer: finds the brokers of a topic, keeps connections to them, and hands out their messages.

A Consumer owns what it was sent and has not handed out yet; it is bounded by `max_in_flight`, so the reader never waits
for a handler and heartbeats are answered whatever handlers do. Who may send how much is its Flow's business, the
sockets are its Connections'. Handlers run in a fixed number of tasks, not in one per message.

Size: one class, whose text says why it is one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Unpack, overload

from flintmq.addresses import split
from flintmq.client import codecs, signals, tracing
from flintmq.client.batch import Batch, Stats
from flintmq.client.brokers import Brokers
from flintmq.client.callbacks import Calls, check, is_asynchronous, result_of
from flintmq.client.clock import Clock, Timer, limit, sleep
from flintmq.client.connection import Connection, Message, T, addresses
from flintmq.client.flow import Flow
from flintmq.client.options import ConsumerOptions, ConsumerSettings, parse
from flintmq.cluster.lookupds import Lookupds
from flintmq.errors import ClosedError, DecodeError, OptionError, ProtocolError
from flintmq.protocol import wire

__all__ = ["Batch", "Consumer", "Stats"]

logger = logging.getLogger(__name__)

#: How long handlers that never wait may have the event loop for themselves.
_SLICE_SECONDS = 0.005
_SLICE_MESSAGES = 1000
#: Deliveries after which a body that cannot be read is given up where `max_attempts` is no limit.
_UNDECODABLE_ATTEMPTS = 5
#: How long handlers may take to end after they were cancelled; those that do not are left to themselves.
_CANCEL_SECONDS = 2.0
#: The pause before a handler task that has died is replaced.
_REVIVE_SECONDS = 1.0
#: How long `close` waits for brokers to confirm that they send no more, once nothing is left to answer.
_CONFIRM_SECONDS = 5.0


class Consumer(Generic[T]):
    """Messages of a channel, from every nsqd that has the topic.

        async with Consumer("orders", "billing", lookupd=["127.0.0.1:4161"]) as consumer:
            async for message in consumer:
                with message:              # finished at the end, requeued if the block raises
                    bill(message.body)

    or, with a handler, `await Consumer("orders", "billing", nsqd="127.0.0.1:4150", handler=bill).run()`.

    Size: half of it are the arguments, which are public; the rest is looked at for every message or batch of them, so
    it is flat.
    """

    @overload
    def __init__(
        self: Consumer[bytes],
        topic: str,
        channel: str,
        *,
        handler: Callable[[Message], Any] | None = None,
        on_give_up: Callable[[Message], Any] | None = None,
        type: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        type: type[T],
        handler: Callable[[Message[T]], Any] | None = None,
        on_give_up: Callable[[Message[T]], Any] | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None: ...

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        handler: Callable[[Message[Any]], Any] | None = None,
        on_give_up: Callable[[Message[Any]], Any] | None = None,
        type: type[Any] | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Make a consumer; `start`, `run` or ``async with`` begins.

        A `handler` is called with each message, and `on_give_up` with each that came more than `max_attempts` times.
        With a `type`, bodies are read as JSON, or by the `codec`, and ``message.value`` is of that type. All other
        options are described in `flintmq.client.options.ConsumerOptions`.
        """
        if not isinstance(topic, str) or not wire.valid_name(topic):
            raise OptionError(f'"{topic}" is not a topic name')
        if not isinstance(channel, str) or not wire.valid_name(channel):
            raise OptionError(f'"{channel}" is not a channel name')
        check(handler, "handler")
        check(on_give_up, "on_give_up")
        self._options, self._settings = parse(ConsumerSettings, options)
        own = self._options
        if type is not None:
            codecs.check(own.codec, type)
        self.topic = topic
        self.channel = channel
        self.stats = Stats()
        self._name = f"{topic}/{channel}"
        self._fixed = addresses(own.nsqd)
        for address in self._fixed:
            split(address)
        looked_up = addresses(own.lookupd)
        if not self._fixed and not looked_up:
            raise OptionError("a consumer needs nsqd or lookupd addresses")
        self._lookupds = Lookupds(looked_up, timeout=own.lookupd_timeout, token=own.lookupd_token, tls=own.lookupd_tls)
        self._handler = handler
        self._on_give_up = on_give_up
        self._type = type
        self._max_attempts = own.max_attempts
        self._max_in_flight = own.concurrency if own.max_in_flight is None else own.max_in_flight
        # Brokers.
        self._connections: dict[Connection, None] = {}
        # Messages that nobody has taken, and who waits for one.
        self._queue: deque[Message[T]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._slice_end = 0.0
        self._slice_left = 0
        # Handlers.
        self._workers: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._busy = 0
        self._giving_up: dict[asyncio.Task[None], Message[T]] = {}
        self._handler_calls = Calls(f"{topic}-{channel}", own.concurrency)
        # Each has a thread of its own for plain functions: a slow on_error must not hold up an on_give_up.
        self._give_up_calls = Calls(f"CONSUMER({self._name})-give-up")
        self._calls = Calls(f"CONSUMER({self._name})")
        self._touch_timer: Timer | None = None
        # The end.
        self._started = False
        self._stopping = False
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._ending = False
        self._changed = asyncio.Event()
        # Gives ctrl-C back its meaning.
        self._interrupt: Callable[[], None] | None = None

    # --- Start and stop ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer[T]:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin. Brokers that cannot be reached are tried again until the end; `on_error` and the log hear of it."""
        if self._started:
            raise ClosedError("a consumer runs once")
        self._loop = asyncio.get_running_loop()
        own = self._options
        self._clock: Clock = own.clock or self._loop
        self._time = self._clock.time
        self.flow = Flow(
            self._clock,
            self._max_in_flight,
            name=self._name,
            max_backoff_duration=own.max_backoff_duration,
            backoff_multiplier=own.backoff_multiplier,
            backoff_strategy=own.backoff_strategy,
            backoff_jitter=own.backoff_jitter,
            low_rdy_idle_timeout=own.low_rdy_idle_timeout,
            low_rdy_timeout=own.low_rdy_timeout,
            rdy_redistribute_interval=own.rdy_redistribute_interval,
        )
        work = None if self._handler is None else self._handler_coroutine(self._handler)
        self._brokers = Brokers(
            f"CONSUMER({self._name})",
            self,
            self._settings,
            self._clock,
            fixed=self._fixed,
            look=(lambda found: self._lookupds.producers(self.topic, found)) if self._lookupds.urls else None,
            poll_interval=own.lookupd_poll_interval,
            poll_jitter=own.lookupd_poll_jitter,
            on_open=self._opened,
            on_error=lambda address, error: self._calls.tell("on_error", own.on_error, address, error),
            subscribe=(self.topic, self.channel),
        )
        if work is not None:
            self._workers = [self._worker(work, number) for number in range(own.concurrency)]
            self._watch = self._loop.create_task(self._keep_workers(work), name=f"flintmq handlers of {self._name}")
        # Not before all of it is there: after a start that failed there is nothing to close.
        self._started = True

    async def run(self, stop_on: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """Handle messages until `stop` is called or one of these signals comes; then end in order."""
        if self._handler is None:
            raise OptionError("run needs a handler")
        with signals.calling_on(stop_on, self.stop):
            async with self:
                while not self._stopping:
                    self._changed.clear()
                    await self._changed.wait()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the consumer belongs to another event loop: for several threads there is flintmq.sync")

    def stop(self) -> None:
        """Take nothing more. What is here is still handed out; then the iteration, or `run`, ends."""
        if self._stopping or not self._started:
            return
        self._stopping = True
        self.flow.stop()
        self._brokers.forbid()
        for connection in self._connections:
            connection.say_goodbye()
        self._something_changed()

    async def close(self) -> None:
        """Stop, wait for the handlers (at most `stop_timeout`), give back what was not answered, disconnect.

        A second call waits for the first. A handler cannot close its own consumer, which would wait for it: `stop` is
        what it may call.
        """
        if not self._started or (self._closing is not None and self._closing.done()):
            return
        self._check_loop()
        task = asyncio.current_task()
        if task in self._workers or task in self._giving_up:
            raise RuntimeError("close() in a handler would wait for this very handler: call stop() there")
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_future()
        try:
            await self._close()
        finally:
            self._closing.set_result(None)

    async def _close(self) -> None:
        self._closed = True
        self.stop()
        try:
            await self._brokers.stop()
            await self._drain()
            await self._end_workers()
            self._give_back()
            await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        finally:
            # Cancelled or not, nothing stays behind; and here nothing waits for a broker any more.
            self._abandon()
            if self._interrupt is not None:
                self._interrupt()
            try:
                await self._lookupds.close()
                for calls in (self._handler_calls, self._give_up_calls, self._calls):
                    await calls.close()
            finally:
                self._something_changed()

    async def _drain(self) -> None:
        """Until the brokers have confirmed and, where handlers work, all is answered; or the time is over."""
        time_over = False

        def give_up() -> None:
            nonlocal time_over
            time_over = True
            self._changed.set()

        timer = self._clock.call_later(self._options.stop_timeout, give_up)
        is_answered = False
        try:
            while not time_over:
                if all(worker.done() for worker in self._workers):
                    # Nobody will take what is here: back with it, now and as long as more comes.
                    self._give_back(self._giving_up.values())
                left = self._seconds_of_work()
                if not left:
                    if all(connection.drained for connection in self._connections):
                        return
                    if not is_answered:
                        # A broker that does not even confirm is not waited for as a handler is.
                        is_answered = True
                        timer.cancel()
                        timer = self._clock.call_later(min(_CONFIRM_SECONDS, self._options.stop_timeout), give_up)
                await self._change(left)
        finally:
            timer.cancel()
        if not is_answered:
            logger.warning("CONSUMER(%s): stopped after %g s with work left", self._name, self._options.stop_timeout)

    def _seconds_of_work(self) -> float:
        """Return how long there may be something to wait for: a handler, or a message that can still be answered."""
        if self._busy or self._queue or self._giving_up:
            return float("inf")
        # Messages past their deadline are the brokers' again, answered or not.
        deadlines = [message.deadline for connection in self._connections for message in connection.unanswered]
        return max(0.0, max(deadlines) - self._time()) if deadlines else 0.0

    async def _change(self, seconds: float) -> None:
        """Wait for a change, or for some seconds if that is sooner."""
        self._changed.clear()
        timer = self._clock.call_later(seconds, self._changed.set) if 0 < seconds < float("inf") else None
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _end_workers(self) -> None:
        if tasks := self._cancel_workers():
            # Theirs too: a handler that was cancelled has given its message back by then.
            _, late = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            if late:
                logger.error("CONSUMER(%s): %d handlers go on although they were cancelled", self._name, len(late))

    def _cancel_workers(self) -> list[asyncio.Task[None]]:
        """Cancel the handlers; return those that have not ended yet."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
        # From now on a cancellation of a worker is ours.
        self._ending = True
        tasks = [task for task in (self._watch, *self._workers, *self._giving_up) if task and not task.done()]
        for task in tasks:
            task.cancel()
        return tasks

    def _abandon(self) -> None:
        """End what is left at once: after a `close` that was cancelled."""
        self._brokers.abandon()
        self._cancel_workers()
        self._give_back()
        for connection in list(self._connections):
            connection.flush()
            connection.fail(ClosedError(f"{connection.address}: closed"))

    def _give_back(self, kept: Iterable[Message[T]] = ()) -> None:
        self._queue.clear()
        keep = set(kept)
        for connection in self._connections:
            for message in sorted(connection.unanswered - keep, key=lambda message: message.id):
                message.requeue(0, backoff=False)

    def _something_changed(self) -> None:
        """Whoever waits for a message or for the end should look again."""
        self._changed.set()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # --- Settings that may change ------------------------------------------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """Messages under way at a time, over all connections. 0 pauses."""
        return self.flow.max_in_flight if self._started else self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if count < 0:
            raise OptionError("max_in_flight must not be below 0")
        self._max_in_flight = count
        if self._started:
            self.flow.max_in_flight = count

    @property
    def is_starved(self) -> bool:
        """Some connection has sent nearly all it may. Whoever gathers messages should work on what he has."""
        return self._started and self.flow.is_starved

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` or `close` was called."""
        return self._stopping

    @property
    def connections(self) -> list[str]:
        """The brokers that we are connected to."""
        return sorted(connection.address for connection in self._connections)

    @property
    def in_flight(self) -> int:
        """Messages that came and were not answered."""
        return sum(connection.in_flight for connection in self._connections)

    # --- Brokers that come later -------------------------------------------------------------------------------------

    def add_nsqd(self, address: str) -> None:
        """Consume from one more broker. It is dialled until the end, as if it had been named at the start."""
        split(address)
        if not self._started:
            self._fixed = addresses([*self._fixed, address])
        else:
            self._brokers.add(address)

    async def look(self) -> None:
        """Ask the lookupds now, and not only when the poll interval is over. Those that fail, `on_error` hears of."""
        if not self._started:
            raise ClosedError("start the consumer first: async with Consumer(…) as consumer")
        self._check_loop()
        await self._brokers.look()

    # --- Messages out ------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        if self._handler is not None:
            raise OptionError("a consumer with a handler cannot be iterated over")
        if self._interrupt is None:
            self._interrupt = signals.call_on_interrupt(self.stop)
        return self

    async def __anext__(self) -> Message[T]:
        if self._handler is not None:
            raise OptionError("a consumer with a handler cannot be asked for messages")
        if not self._started:
            raise ClosedError("start the consumer first: async with Consumer(…) as consumer")
        self._check_loop()
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def get(self, timeout: float | None = None) -> Message[T]:  # noqa: ASYNC109
        """Return the next message. TimeoutError if none comes within so many seconds, ClosedError if none will come.

        With a `timeout` of 0 it is one that is here already.
        """
        if self._handler is not None:
            raise OptionError("a consumer with a handler cannot be asked for messages")
        if not self._started:
            raise ClosedError("start the consumer first: async with Consumer(…) as consumer")
        self._check_loop()
        if self._time() >= self._slice_end:
            # Before the time counts: a message that is here is given out whatever the timeout is.
            await self._give_way()
        if timeout is None:
            message = await self._next()
        else:
            try:
                async with limit(self._clock, timeout):
                    message = await self._next()
            except TimeoutError:
                raise TimeoutError(f"no message within {timeout:g} s") from None
        if message is None:
            raise ClosedError("the consumer was stopped")
        return message

    async def batches(self, size: int, wait: float) -> AsyncIterator[Batch[T]]:
        """Yield messages in batches of at most `size`, each at most `wait` seconds after its first message came.

            async for batch in consumer.batches(100, wait=1.0):
                with batch:                # all finished at the end, or requeued if the block raises
                    store([message.body for message in batch])

        A batch is also over when `max_in_flight` messages are unanswered, since no more come then.
        """
        while (batch := await self._batch(size, wait)) is not None:
            yield batch

    async def _batch(self, size: int, wait: float) -> Batch[T] | None:
        """The next batch; None at the end."""
        if size < 1 or not wait >= 0:
            raise OptionError("a batch has a size of at least 1, and wait is not below 0")
        try:
            batch = Batch([await self.get()])
        except ClosedError:
            return None
        # One that was in a batch before, which nobody has got, has waited already.
        end = min(self._time() + wait, getattr(batch[0], "_batch_end", float("inf")))
        while len(batch) < size and (self._queue or self.in_flight < self.max_in_flight):
            if self._type is None and batch.fill(self._queue, size, self._time(), self._max_attempts or 65535):
                break
            try:
                batch.append(await self.get(max(0.0, end - self._time())))
            except (TimeoutError, ClosedError):
                break
            except BaseException:
                # Cancelled: nobody will have this batch.
                for message in batch:
                    message._batch_end = end
                self._put_back(batch)
                raise
        return batch

    def _put_back(self, messages: Sequence[Message[T]]) -> None:
        """Hand out again what nobody has got in the end."""
        if not self._started:
            return
        found = [message for message in messages if not message.answered and message.source in self._connections]
        self._queue.extendleft(reversed(found))
        if self._closed:
            self._changed.set()
        self._wake(len(found))

    async def _give_way(self) -> None:
        """Let others have the event loop: our own reader, for one."""
        await asyncio.sleep(0)
        self._slice_end = self._time() + _SLICE_SECONDS
        self._slice_left = _SLICE_MESSAGES

    def _take(self) -> Message[T] | None:
        """The next message if it can be handled at once, as nearly all can; None where `_next` must look."""
        queue = self._queue
        if not queue or self._type is not None:
            return None
        now = self._time()
        message = queue[0]
        if now >= self._slice_end or self._slice_left < 1 or message.deadline <= now:
            return None
        if 0 < self._max_attempts < message.attempts:
            return None
        self._slice_left -= 1
        return queue.popleft()

    async def _next(self) -> Message[T] | None:
        """The next message that is worth handling; None at the end."""
        queue = self._queue
        while True:
            while queue:
                now = self._time()
                self._slice_left -= 1
                if now >= self._slice_end or self._slice_left < 0:
                    await self._give_way()
                    continue
                message = queue.popleft()
                if message.deadline <= now:
                    self._expire(message)
                elif 0 < self._max_attempts < message.attempts:
                    await self._give_up(message)
                elif self._type is None or await self._decodes(message):
                    return message
            if self._stopping and all(connection.drained for connection in self._connections):
                return None
            if self._closed and self._handler is None:
                return None
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and queue:
                    self._wake(1)  # we were called for a message that somebody else must take now
                raise
            self._slice_end = self._time() + _SLICE_SECONDS
            self._slice_left = _SLICE_MESSAGES

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _expire(self, message: Message[T]) -> None:
        """Its time was over before its turn came. The broker delivers it again, so to handle it would be twice."""
        self.stats.expired += 1
        message.answered = True
        connection = message.source
        if connection is not None:
            connection.unanswered.discard(message)
            self._answered(connection)

    async def _decodes(self, message: Message[T]) -> bool:
        """Read a message's body; one that cannot be read has failed, and is given up like any other."""
        try:
            _ = message.value
        except DecodeError as exc:
            id = message.id.decode(errors="replace")
            logger.error("CONSUMER(%s): message %s: %s", self._name, id, exc)
            self.stats.undecodable += 1
            if not self._max_attempts and message.attempts >= _UNDECODABLE_ATTEMPTS:
                # Without a limit it would come for ever.
                await self._give_up(message)
            else:
                message.requeue()
            return False
        except BaseException:
            message.requeue(0, backoff=False)
            raise
        return True

    def _decode(self, body: bytes) -> T:
        kind: type[T] | None = self._type
        assert kind is not None
        try:
            return codecs.decode(self._options.codec, body, kind)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            # A library that is written in Rust panics with one.
            raise DecodeError(f"no {getattr(kind, '__name__', kind)}: {type(exc).__name__}: {exc}") from exc

    async def _give_up(self, message: Message[T]) -> None:
        """Give a message up, and wait for that. Whoever cancels the wait does not cancel the rest."""
        self.stats.given_up += 1
        function = self._on_give_up
        if function is None:
            logger.warning(
                "CONSUMER(%s): giving up on message %s after %d attempts (max_attempts): it is finished",
                self._name,
                message.id.decode(errors="replace"),
                message.attempts - 1,
            )
            message.finish()
            return
        task = self._loop.create_task(self._call_give_up(function, message), name=f"flintmq give-up of {self._name}")
        self._giving_up[task] = message
        task.add_done_callback(self._gave_up)
        await asyncio.wait([task])

    def _gave_up(self, task: asyncio.Task[None]) -> None:
        del self._giving_up[task]
        if not task.cancelled():
            # The end of the program, which the event loop has heard of.
            task.exception()
        if self._stopping:
            self._changed.set()

    async def _call_give_up(self, function: Callable[[Message[T]], Any], message: Message[T]) -> None:
        try:
            await self._give_up_calls.call(function, message)
        except BaseException as exc:
            if self._ends_a_task(exc):
                message.requeue(0, backoff=False)
                raise
            logger.exception("CONSUMER(%s): on_give_up failed; the message is requeued", self._name)
            message.requeue()
        if not message.kept:
            message.finish()

    # --- Handlers ----------------------------------------------------------------------------------------------------

    def _handler_coroutine(self, handler: Callable[[Message[T]], Any]) -> Callable[[Message[T]], Awaitable[Any]]:
        if is_asynchronous(handler):
            return tracing.traced_handler(handler, self.topic, self.channel)
        calls = self._handler_calls

        async def in_thread(message: Message[T]) -> Any:
            # One that blocks would hold up heartbeats and everything else.
            return await calls.call_in_thread(handler, message)

        return tracing.traced_handler(in_thread, self.topic, self.channel)

    def _worker(self, handler: Callable[[Message[T]], Awaitable[Any]], number: int) -> asyncio.Task[None]:
        return self._loop.create_task(self._work(handler), name=f"flintmq handler {number} of {self._name}")

    async def _keep_workers(self, handler: Callable[[Message[T]], Awaitable[Any]]) -> None:
        """Replace workers that have died. Only the end of the program, caught by somebody, should do that to one."""
        while alive := [worker for worker in self._workers if not worker.done()]:
            await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            dead = [worker for worker in alive if worker.done() and (worker.cancelled() or worker.exception())]
            if not dead:
                continue
            for worker in dead:
                error = None if worker.cancelled() else worker.exception()
                logger.error("CONSUMER(%s): %s has died", self._name, worker.get_name(), exc_info=error)
            await sleep(self._clock, _REVIVE_SECONDS)
            for worker in dead:
                number = self._workers.index(worker)
                self._workers[number] = self._worker(handler, number)

    async def _work(self, handler: Callable[[Message[T]], Awaitable[Any]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                message = self._take() or await self._next()
            except asyncio.CancelledError as exc:
                if self._ends_a_task(exc):
                    raise
                # A handler that has returned is cancelled too late, by a timer of its own.
                await self._uncancel(task)
                continue
            if message is None:
                return
            self._busy += 1
            try:
                returned = await handler(message)
                if returned is not None:
                    await result_of(returned)
            except BaseException as exc:
                if self._ends_a_task(exc):
                    message.requeue(0, backoff=False)
                    raise
                id = message.id.decode(errors="replace")
                logger.exception("CONSUMER(%s): the handler failed on message %s", self._name, id)
                message.requeue()
            else:
                if not message.kept:
                    message.finish()
            finally:
                self._busy -= 1
                if self._stopping:
                    self._changed.set()
            if task.cancelling():
                await self._uncancel(task)

    async def _uncancel(self, task: asyncio.Task[None]) -> None:
        """Forget that a handler has cancelled the task it runs in; the next message has nothing to do with it."""
        if self._is_ending:
            return
        while task.uncancel():
            pass
        try:
            # One that has not arrived yet would come at the next wait, which may be the next handler's.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._is_ending:
                raise
            while task.cancelling():
                task.uncancel()

    @property
    def _is_ending(self) -> bool:
        """Whether a cancellation of a handler's task is meant for the task, and not for what the handler does.

        It is where we cancel it ourselves, and where an event loop ends, which cancels all of its tasks: so also the
        one that watches over the workers, which no handler can get hold of.
        """
        watch = self._watch
        return self._ending or (watch is not None and (watch.done() or watch.cancelling() > 0))

    def _ends_a_task(self, error: BaseException) -> bool:
        """Return whether an error of the user's code is none: the program ends, or we end the task around it."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        return isinstance(error, asyncio.CancelledError) and self._is_ending

    def _touch_all(self) -> None:
        """Automatic touch: nothing that we hold times out before the broker's own limit."""
        soonest = 60.0
        now = self._time()
        for connection in self._connections:
            timeout = connection.msg_timeout
            for message in connection.unanswered:
                if message.deadline - now < timeout / 2:
                    # One whose time is over is the broker's again; the connection knows.
                    connection.touch(message)
            soonest = min(soonest, timeout / 4)
        self._touch_timer = self._clock.call_later(soonest, self._touch_all)

    def _touch_sooner(self) -> None:
        """A broker has come whose messages may run out of time sooner than those of the others."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
        self._touch_all()

    # --- What connections tell ---------------------------------------------------------------------------------------

    def _messages_came(self, connection: Connection, messages: list[Message[T]]) -> None:
        self.stats.received += len(messages)
        if connection.counts_down:
            self.flow.received(connection, len(messages))
        self._queue.extend(messages)
        if self._closed:
            self._changed.set()
        self._wake(len(messages))

    def _response_came(self, connection: Connection, payload: bytes) -> None:
        if connection.drained:
            self._something_changed()

    def _error_came(self, connection: Connection, error: ProtocolError) -> None:
        if not error.fatal:
            # Somebody answered too late; the broker had given the message away.
            logger.warning("CONSUMER(%s): %s: %s", self._name, connection.address, error)
        # A fatal one is reported with the connection's end.

    def _heartbeat_came(self, connection: Connection) -> None:
        self._calls.tell("on_heartbeat", self._options.on_heartbeat, connection.address)

    def _finished(self, connection: Connection, message: Message[T]) -> None:
        self.stats.finished += 1
        flow = self.flow
        if flow.level:
            flow.succeeded()
        self._answered(connection)

    def _requeued(self, connection: Connection, message: Message[T], backoff: bool) -> None:
        self.stats.requeued += 1
        if backoff:
            self.flow.failed()
        else:
            self.flow.neither()
        self._answered(connection)

    def _answered(self, connection: Connection) -> None:
        if not connection.ready:
            self.flow.answered(connection)
            if self._stopping:
                self._changed.set()

    def _delay_of(self, message: Message[T]) -> float:
        return min(self._options.default_requeue_delay * message.attempts, self._options.max_requeue_delay)

    def _connection_ended(self, connection: Connection, reason: Exception) -> None:
        self._connections.pop(connection, None)
        self.flow.remove(connection)
        if self._queue:
            # Nobody could answer these any more.
            kept = [message for message in self._queue if message.source is not connection]
            self._queue.clear()
            self._queue.extend(kept)
        if not self._stopping:
            self._brokers.lost(connection, reason)
        self._something_changed()

    def _opened(self, connection: Connection) -> None:
        self._connections[connection] = None
        if self._type is not None:
            connection.decode = self._decode
        if self._stopping:
            connection.say_goodbye()
        else:
            self.flow.add(connection)
            if self._options.auto_touch:
                self._touch_sooner()
