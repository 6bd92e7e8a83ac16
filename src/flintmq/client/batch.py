"""What a consumer hands out besides single messages: batches of them, and counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType

from flintmq.client.connection import Message, T

__all__ = ["Batch", "Stats"]


@dataclass
class Stats:
    """Counts since the start."""

    received: int = 0
    finished: int = 0
    requeued: int = 0
    #: Over `max_attempts`.
    given_up: int = 0
    #: Timed out before a handler was free; the broker delivers them again.
    expired: int = 0
    #: Bodies that were not of the consumer's `type`; each delivery counts.
    undecodable: int = 0


class Batch(list[Message[T]]):
    """Messages that are answered together. As a context manager it is a single message to its block."""

    __slots__ = ()

    def fill(self, queue: deque[Message[T]], size: int, now: float, most_attempts: int) -> bool:
        """Take messages from a queue, up to the first that has expired or come too often; return whether it is full."""
        while queue and len(self) < size and queue[0].deadline > now and queue[0].attempts <= most_attempts:
            self.append(queue.popleft())
        return len(self) >= size

    def finish(self) -> None:
        """All are done."""
        for message in self:
            message.finish()

    def requeue(self, delay: float | None = None, *, backoff: bool = True) -> None:
        """Give back those that are not answered yet."""
        for message in self:
            message.requeue(delay, backoff=backoff)

    def __enter__(self) -> Batch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for message in self:
            message.__exit__(kind, error, trace)
