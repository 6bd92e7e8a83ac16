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
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

from flintmq.client import consumer as _consumer
from flintmq.client import producer as _producer
from flintmq.client.connection import Message
from flintmq.cluster import node as _node
from flintmq.errors import ClosedError

__all__ = ["Consumer", "Message", "NodeClient", "Producer", "publish"]

_T = TypeVar("_T")


class _Background:
    """The event loop in its thread. One per process: threads do not survive a fork."""

    _lock = threading.Lock()
    _current: _Background | None = None

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that forgets to close something still ends.
        threading.Thread(target=self._loop.run_forever, name="flintmq", daemon=True).start()

    @classmethod
    def get(cls) -> _Background:
        with cls._lock:
            if cls._current is None or cls._current.process != os.getpid():
                cls._current = cls()
            return cls._current

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. Ctrl-C cancels it."""
        if self.process != os.getpid():
            work.close()
            raise ClosedError("made before this process was forked; make another one here")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class Producer:
    """As `flintmq.Producer`; takes the same arguments. Each call returns when it is done."""

    def __init__(self, nsqd: str | Sequence[str] | None = None, **options: Any) -> None:
        self._background = _Background.get()
        self._producer = _producer.Producer(nsqd, **options)

    def start(self) -> None:
        self._background.run(self._producer.start())

    def publish(self, topic: str, body: bytes, *, key: str | None = None) -> None:
        """Publish one message. Returns when a broker has stored it; under a `key` it stores it once."""
        self._background.run(self._producer.publish(topic, body, key=key))

    def publish_many(self, topic: str, bodies: Sequence[bytes], *, key: str | None = None) -> None:
        """Publish messages together, in one command: all are stored or none. One `key` stands for all of them."""
        self._background.run(self._producer.publish_many(topic, bodies, key=key))

    def defer(self, topic: str, body: bytes, delay: float, *, key: str | None = None) -> None:
        """Publish one message that is delivered only after `delay` seconds."""
        self._background.run(self._producer.defer(topic, body, delay, key=key))

    def close(self) -> None:
        self._background.run(self._producer.close())

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Consumer:
    """As `flintmq.Consumer` without a handler; takes the same arguments. Iterating waits for the next message."""

    def __init__(self, topic: str, channel: str, **options: Any) -> None:
        if "handler" in options:
            raise TypeError("iterate over the consumer; handlers are for flintmq.Consumer")
        self._background = _Background.get()
        self._consumer = _consumer.Consumer(topic, channel, **options)

    @property
    def stats(self) -> _consumer.Stats:
        return self._consumer.stats

    def start(self) -> None:
        self._background.run(self._consumer.start())

    def get(self, timeout: float | None = None) -> Message:
        """The next message. TimeoutError if none came in time, ClosedError if none will come."""
        return self._background.run(self._next(timeout))

    async def _next(self, seconds: float | None) -> Message:
        try:
            # Here and not in the caller's thread, where a message could come between the timeout and its notice.
            async with asyncio.timeout(seconds):
                return await anext(self._consumer)
        except StopAsyncIteration:
            raise ClosedError("the consumer was stopped") from None

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.get()
            except ClosedError:
                return

    def stop(self) -> None:
        """Take nothing more. What is here is still handed out; then iterating ends. Signal handlers may call it."""
        self._background.run(self._stop())

    async def _stop(self) -> None:
        self._consumer.stop()

    def close(self) -> None:
        self._background.run(self._consumer.close())

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NodeClient:
    """As `flintmq.NodeClient`; takes the same arguments and has the same methods."""

    def __init__(self, address: str = "127.0.0.1:4151", **options: Any) -> None:
        self._background = _Background.get()
        self._node = _node.NodeClient(address, **options)

    def close(self) -> None:
        self._background.run(self._node.close())

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ping(self) -> str:
        return self._background.run(self._node.ping())

    def info(self, *, extended: bool = False) -> dict[str, Any]:
        return self._background.run(self._node.info(extended=extended))

    def stats(
        self, topic: str = "", channel: str = "", *, clients: bool = True, extended: bool = False
    ) -> dict[str, Any]:
        return self._background.run(self._node.stats(topic, channel, clients=clients, extended=extended))

    def create_topic(self, topic: str) -> None:
        self._background.run(self._node.create_topic(topic))

    def delete_topic(self, topic: str) -> None:
        self._background.run(self._node.delete_topic(topic))

    def empty_topic(self, topic: str) -> None:
        self._background.run(self._node.empty_topic(topic))

    def pause_topic(self, topic: str) -> None:
        self._background.run(self._node.pause_topic(topic))

    def unpause_topic(self, topic: str) -> None:
        self._background.run(self._node.unpause_topic(topic))

    def create_channel(self, topic: str, channel: str) -> None:
        self._background.run(self._node.create_channel(topic, channel))

    def delete_channel(self, topic: str, channel: str) -> None:
        self._background.run(self._node.delete_channel(topic, channel))

    def empty_channel(self, topic: str, channel: str) -> None:
        self._background.run(self._node.empty_channel(topic, channel))

    def pause_channel(self, topic: str, channel: str) -> None:
        self._background.run(self._node.pause_channel(topic, channel))

    def unpause_channel(self, topic: str, channel: str) -> None:
        self._background.run(self._node.unpause_channel(topic, channel))

    def topic_settings(self, topic: str) -> _node.EffectiveSettings:
        return self._background.run(self._node.topic_settings(topic))

    def set_topic_settings(self, topic: str, settings: Mapping[str, Any]) -> _node.EffectiveSettings:
        return self._background.run(self._node.set_topic_settings(topic, settings))

    def channel_settings(self, topic: str, channel: str) -> _node.EffectiveSettings:
        return self._background.run(self._node.channel_settings(topic, channel))

    def set_channel_settings(self, topic: str, channel: str, settings: Mapping[str, Any]) -> _node.EffectiveSettings:
        return self._background.run(self._node.set_channel_settings(topic, channel, settings))

    def peek(
        self,
        topic: str,
        channel: str,
        state: _node.State = "ready",
        *,
        limit: int = 100,
        after: str | None = None,
        shown: int | None = 256,
    ) -> _node.Page:
        return self._background.run(self._node.peek(topic, channel, state, limit=limit, after=after, shown=shown))

    def peek_topic(
        self, topic: str, *, limit: int = 100, after: str | None = None, shown: int | None = 256
    ) -> _node.Page:
        return self._background.run(self._node.peek_topic(topic, limit=limit, after=after, shown=shown))

    def finish(self, topic: str, channel: str, id: str) -> None:
        self._background.run(self._node.finish(topic, channel, id))

    def requeue(self, topic: str, channel: str, id: str, delay: float = 0) -> None:
        self._background.run(self._node.requeue(topic, channel, id, delay))

    def defer(self, topic: str, channel: str, id: str, delay: float) -> None:
        self._background.run(self._node.defer(topic, channel, id, delay))

    def redrive(
        self,
        topic: str,
        channel: str,
        *,
        count: int | None = None,
        rate: int | None = None,
        source: str | None = None,
    ) -> _node.Redrive:
        return self._background.run(self._node.redrive(topic, channel, count=count, rate=rate, source=source))

    def redrive_progress(self, topic: str, channel: str) -> _node.Redrive:
        return self._background.run(self._node.redrive_progress(topic, channel))

    def seek(self, topic: str, channel: str, to: str | int | datetime) -> _node.Seek:
        return self._background.run(self._node.seek(topic, channel, to))

    def log_info(self, topic: str) -> _node.LogInfo:
        return self._background.run(self._node.log_info(topic))

    def log_offset(self, topic: str, time: datetime | int) -> int:
        return self._background.run(self._node.log_offset(topic, time))

    def positions(self, topic: str) -> list[_node.Position]:
        return self._background.run(self._node.positions(topic))

    def position(self, topic: str, reader: str) -> _node.Position:
        return self._background.run(self._node.position(topic, reader))

    def set_position(self, topic: str, reader: str, to: int | str) -> _node.Position:
        return self._background.run(self._node.set_position(topic, reader, to))

    def delete_position(self, topic: str, reader: str) -> None:
        self._background.run(self._node.delete_position(topic, reader))

    def log_messages(
        self, topic: str, start: int, stop: int, *, epoch: str | None = None
    ) -> Iterator[_node.LogMessage]:
        messages = self._node.log_messages(topic, start, stop, epoch=epoch)

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


def publish(topic: str, *bodies: bytes, nsqd: str | Sequence[str] = "127.0.0.1:4150", **options: Any) -> None:
    """Publish once and disconnect: for scripts."""
    with Producer(nsqd, **options) as producer:
        producer.publish_many(topic, bodies)
