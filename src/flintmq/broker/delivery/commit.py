"""What publishers wait for: a commit, which is safe, refused, or neither yet.

Every ``OK`` of a publish that had to be written leaves here. A commit knows nothing of files: its topic resolves it.
Very large batches are cut into pieces here, so that they can be appended in slices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flintmq.kernel import BatchParser, send_each
from flintmq.protocol.wire import OK_FRAME

if TYPE_CHECKING:
    from flintmq.broker.net.session import Session

__all__ = ["SLICED_FROM", "Commit", "Piece", "slices"]

logger = logging.getLogger(__name__)

#: Messages of one batch that are turned into frames before the loop is handed back.
SLICE = 4_000
#: A batch larger than this is turned into frames in slices.
SLICED_FROM = 20_000


class Commit:
    """The publishes of one loop turn to one topic: safe, refused, or neither yet."""

    __slots__ = ("before", "done", "end", "error", "sessions", "waiters")

    def __init__(self) -> None:
        self.end = 0
        self.done = False
        self.error: Exception | None = None
        self.waiters: list[Callable[[], None]] = []
        #: Sessions that wait for one publish in it and nothing else: all of them are answered in one go.
        self.sessions: list[Session] = []
        #: The topic's counters without the publishes in it: messages, bytes.
        self.before = (0, 0)

    def resolve(self, error: Exception | None = None) -> None:
        self.done = True
        self.error = error
        if self.sessions:
            self._answer(error)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            try:
                waiter()
            except Exception:
                # The others wait for the same commit.
                logger.exception("COMMIT: a publisher cannot be answered")

    def _answer(self, error: Exception | None) -> None:
        sessions, self.sessions = self.sessions, []
        if error is None:
            for i, sent in send_each([session.fd for session in sessions], OK_FRAME):
                sessions[i].send_run(memoryview(OK_FRAME)[sent:])
        else:
            for session in sessions:
                try:
                    session.refused(error)
                except Exception:
                    logger.exception("COMMIT: a client cannot be told that its publish was refused")


#: Some records of a batch: the bytes, where they start and stop, how many they are.
Piece = tuple[bytearray, int, int, int]


def slices(data: bytearray, pos: int, stop: int, count: int) -> Iterator[Piece]:
    """The ``count`` records of ``data[pos:stop]``, which were found to be in order, in pieces of bounded length."""
    batch = BatchParser(pos)
    done = 0
    while done < count:
        target = min(done + SLICE, count)
        batch.run(data, stop, target, stop)
        yield data, pos, batch.pos, target - done
        pos, done = batch.pos, target
