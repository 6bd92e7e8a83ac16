"""The client for programs without asyncio: the same producer and consumer, with calls that wait.

    from flintmq import sync

    with sync.Producer("127.0.0.1:4150") as producer:
        producer.publish("orders", b"one")

    with sync.Consumer("orders", "billing", nsqd="127.0.0.1:4150") as consumer:
        for message in consumer:
            with message:
                bill(message.body)

One event loop in a thread of its own serves all of them, so heartbeats are answered while the program computes. Calls
may come from any thread. A process that was forked must make its own.

A method here is one line: ``_waits`` and ``_calls`` take its arguments, result and text from the asynchronous one, for
readers, for type checkers and for ``help()``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload

from flintmq.client import consumer as _consumer
from flintmq.client import producer as _producer
from flintmq.client.callbacks import Threads, is_the_end
from flintmq.client.codecs import Body
from flintmq.client.connection import Message, T
from flintmq.client.options import ConsumerOptions, ProducerOptions
from flintmq.cluster import node as _node
from flintmq.errors import ClosedError

__all__ = ["Consumer", "Message", "NodeClient", "Producer", "publish"]

logger = logging.getLogger(__name__)

#: Threads that resolve host names, at most.
_RESOLVERS = 8


class _Closable(Protocol):
    async def close(self) -> None: ...


_T = TypeVar("_T")
_P = ParamSpec("_P")
_A = TypeVar("_A", bound=_Closable)


class _Background:
    """The event loop in its thread. One per process: threads do not survive a fork."""

    _lock = threading.Lock()
    _current: _Background | None = None

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Of our own: Python's take nothing any more once the program ends, when `atexit` functions still publish.
        self._loop.set_default_executor(Threads("flintmq-resolver", _RESOLVERS))
        # A daemon: a program that forgets to close something still ends.
        self._thread = threading.Thread(target=self._serve, name="flintmq", daemon=True)
        # In an `atexit` function there may be no thread: then the loop runs in that of the caller, while it waits.
        self._runs_here = False
        try:
            self._thread.start()
        except RuntimeError as exc:
            if not is_the_end(exc):
                raise
            self._runs_here = True

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except BaseException as exc:
                # SystemExit and KeyboardInterrupt of a callback leave the loop. Others use it too.
                logger.error("SYNC: a callback raised %s on the event loop, which goes on", repr(exc), exc_info=exc)

    @classmethod
    def get(cls) -> _Background:
        with cls._lock:
            if cls._current is None or cls._current.process != os.getpid() or not cls._current.is_alive():
                cls._current = cls()
            return cls._current

    def is_alive(self) -> bool:
        return self._runs_here or self._thread.is_alive()

    @classmethod
    def forget(cls) -> None:
        """Begin anew in a process that was forked: another thread may have held the lock at that moment.

        The old loop is only replaced, by the next `get`. To close it would close what the parent still uses.
        """
        cls._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. Ctrl-C cancels it."""
        if self.process != os.getpid():
            work.close()
            raise ClosedError("made before this process was forked; make another one here")
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "flintmq.sync was called on its own event loop, which would wait for itself: "
                "use a plain function as callback, which runs in a thread"
            )
        if self._runs_here:
            return self._loop.run_until_complete(work)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function on the event loop, and wait for it."""

        async def work() -> _T:
            return function()

        return self.run(work())

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the event loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *args)


os.register_at_fork(after_in_child=_Background.forget)


class _Waiting(Generic[_A]):
    """A thing of the asyncio client, and the event loop that runs it."""

    def __init__(self, wrapped: _A) -> None:
        self._background = _Background.get()
        self._wrapped = wrapped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._background.run(self._wrapped.close())


def _waits(
    method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_Waiting[_A], _P], _T]:
    """Return a method with the arguments, result and text of an asynchronous one, that returns when it is done."""

    @functools.wraps(method)
    def call(self: _Waiting[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._background.run(method(self._wrapped, *args, **kwargs))

    return call


def _calls(method: Callable[Concatenate[_A, _P], _T]) -> Callable[Concatenate[_Waiting[_A], _P], _T]:
    """As `_waits`, for a method that is not asynchronous but belongs to the event loop."""

    @functools.wraps(method)
    def call(self: _Waiting[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._background.call(lambda: method(self._wrapped, *args, **kwargs))

    return call


class Producer(_Waiting[_producer.Producer]):
    """As `flintmq.Producer`; takes the same arguments. Each call returns when it is done."""

    def __init__(self, nsqd: str | Sequence[str] | None = None, **options: Unpack[ProducerOptions]) -> None:
        super().__init__(_producer.Producer(nsqd, **options))

    start = _waits(_producer.Producer.start)
    publish = _waits(_producer.Producer.publish)
    publish_many = _waits(_producer.Producer.publish_many)
    defer = _waits(_producer.Producer.defer)
    flush = _waits(_producer.Producer.flush)
    add_nsqd = _calls(_producer.Producer.add_nsqd)

    @property
    def connections(self) -> list[str]:
        """The brokers that we are connected to."""
        return self._background.call(lambda: self._wrapped.connections)

    def __enter__(self) -> Self:
        self.start()
        return self


class Consumer(_Waiting[_consumer.Consumer[T]], Generic[T]):
    """As `flintmq.Consumer` without a handler; takes the same arguments. Iterating waits for the next message."""

    @overload
    def __init__(
        self: Consumer[bytes],
        topic: str,
        channel: str,
        *,
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
        on_give_up: Callable[[Message[T]], Any] | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None: ...

    def __init__(self, topic: str, channel: str, *, type: type[Any] | None = None, **options: Any) -> None:
        if "handler" in options:
            raise TypeError("iterate over the consumer; handlers are for flintmq.Consumer")
        wrapped: _consumer.Consumer[T] = _consumer.Consumer(topic, channel, type=cast(Any, type), **options)
        super().__init__(wrapped)

    start = _waits(_consumer.Consumer.start)
    look = _waits(_consumer.Consumer.look)
    add_nsqd = _calls(_consumer.Consumer.add_nsqd)

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def stats(self) -> _consumer.Stats:
        return self._wrapped.stats

    @property
    def connections(self) -> list[str]:
        """The brokers that we are connected to."""
        return self._background.call(lambda: self._wrapped.connections)

    @property
    def in_flight(self) -> int:
        """Messages that came and were not answered."""
        return self._background.call(lambda: self._wrapped.in_flight)

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` or `close` was called."""
        return self._background.call(lambda: self._wrapped.is_stopping)

    @property
    def is_starved(self) -> bool:
        """Some connection has sent nearly all it may. Whoever gathers messages should work on what he has."""
        return self._background.call(lambda: self._wrapped.is_starved)

    @property
    def max_in_flight(self) -> int:
        """Messages under way at a time, over all connections. 0 pauses."""
        return self._background.call(lambda: self._wrapped.max_in_flight)

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._background.call(lambda: setattr(self._wrapped, "max_in_flight", count))

    def get(self, timeout: float | None = None) -> Message[T]:
        async def take() -> Message[T]:
            taken.append(await self._wrapped.get(timeout))
            return taken[0]

        taken: list[Message[T]] = []
        try:
            return self._background.run(take())
        except BaseException:
            self._put_back(taken)
            raise

    def batches(self, size: int, wait: float) -> Iterator[_consumer.Batch[T]]:
        async def gather() -> _consumer.Batch[T] | None:
            batch = await self._wrapped._batch(size, wait)
            taken.extend(batch or ())
            return batch

        while True:
            taken: list[Message[T]] = []
            try:
                batch = self._background.run(gather())
            except BaseException:
                self._put_back(taken)
                raise
            if batch is None:
                return
            yield batch

    def _put_back(self, taken: list[Message[T]]) -> None:
        """Ctrl-C came when messages were on their way to this thread: the next call has them."""
        # Later than the cancellation, so `taken` does not grow any more.
        if self._background.process == os.getpid():
            self._background.call_soon(self._wrapped._put_back, taken)

    get.__doc__ = _consumer.Consumer.get.__doc__
    batches.__doc__ = _consumer.Consumer.batches.__doc__

    def __iter__(self) -> Iterator[Message[T]]:
        while True:
            try:
                message = self.get()
            except ClosedError:
                return
            except KeyboardInterrupt:
                # Ctrl-C while nothing is being worked on: the loop ends as after `stop`.
                self.stop()
                continue
            yield message

    def stop(self) -> None:
        """Take nothing more. What is here is still handed out; then iterating ends. Signal handlers may call it."""
        self._background.run(self._stop())

    async def _stop(self) -> None:
        self._wrapped.stop()


class NodeClient(_Waiting[_node.NodeClient]):
    """As `flintmq.NodeClient`; takes the same arguments and has the same methods."""

    def __init__(self, address: str = "127.0.0.1:4151", **options: Any) -> None:
        super().__init__(_node.NodeClient(address, **options))

    ping = _waits(_node.NodeClient.ping)
    info = _waits(_node.NodeClient.info)
    stats = _waits(_node.NodeClient.stats)
    create_topic = _waits(_node.NodeClient.create_topic)
    delete_topic = _waits(_node.NodeClient.delete_topic)
    empty_topic = _waits(_node.NodeClient.empty_topic)
    pause_topic = _waits(_node.NodeClient.pause_topic)
    unpause_topic = _waits(_node.NodeClient.unpause_topic)
    create_channel = _waits(_node.NodeClient.create_channel)
    delete_channel = _waits(_node.NodeClient.delete_channel)
    empty_channel = _waits(_node.NodeClient.empty_channel)
    pause_channel = _waits(_node.NodeClient.pause_channel)
    unpause_channel = _waits(_node.NodeClient.unpause_channel)
    topic_settings = _waits(_node.NodeClient.topic_settings)
    set_topic_settings = _waits(_node.NodeClient.set_topic_settings)
    channel_settings = _waits(_node.NodeClient.channel_settings)
    set_channel_settings = _waits(_node.NodeClient.set_channel_settings)
    peek = _waits(_node.NodeClient.peek)
    peek_topic = _waits(_node.NodeClient.peek_topic)
    finish = _waits(_node.NodeClient.finish)
    requeue = _waits(_node.NodeClient.requeue)
    defer = _waits(_node.NodeClient.defer)
    redrive = _waits(_node.NodeClient.redrive)
    redrive_progress = _waits(_node.NodeClient.redrive_progress)
    stop_redrive = _waits(_node.NodeClient.stop_redrive)
    seek = _waits(_node.NodeClient.seek)
    log_info = _waits(_node.NodeClient.log_info)
    log_offset = _waits(_node.NodeClient.log_offset)
    log_ranges = _waits(_node.NodeClient.log_ranges)
    log_count = _waits(_node.NodeClient.log_count)
    positions = _waits(_node.NodeClient.positions)
    position = _waits(_node.NodeClient.position)
    set_position = _waits(_node.NodeClient.set_position)
    delete_position = _waits(_node.NodeClient.delete_position)

    def log_messages(
        self, topic: str, start: int, stop: int, *, epoch: str | None = None, bodies: bool = True
    ) -> Iterator[_node.LogMessage]:
        messages = self._wrapped.log_messages(topic, start, stop, epoch=epoch, bodies=bodies)

        async def some() -> list[_node.LogMessage]:
            # Many at a time: each call goes to another thread and back.
            found: list[_node.LogMessage] = []
            while len(found) < 500 and (message := await anext(messages, None)) is not None:
                found.append(message)
            return found

        async def close() -> None:
            await messages.aclose()

        try:
            while found := self._background.run(some()):
                yield from found
        finally:
            self._background.run(close())


def publish(
    topic: str, *bodies: Body, nsqd: str | Sequence[str] = "127.0.0.1:4150", **options: Unpack[ProducerOptions]
) -> None:
    """Publish once and disconnect: for scripts."""
    with Producer(nsqd, **options) as producer:
        producer.publish_many(topic, bodies)
