"""At least once: a task publishes its rows over TCP as they come, to one broker as long as that one takes them.

For brokers that cannot stage, and for ``idempotent=false``. When its broker is lost, or takes no more, a task goes on
with the next one, which also gets the rows that the first has not answered. A task that is tried again publishes its
rows again, and nothing that was published is taken back.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

from flintmq.errors import ConnectError, ProtocolError, PublishError
from flintmq.spark.shipped.net import Connection
from flintmq.spark.shipped.options import SinkOptions
from flintmq.spark.sink.chunks import Chunk

__all__ = ["Publisher"]

logger = logging.getLogger("flintmq.spark")

#: Commands that may be sent before the first of them is answered.
_OUTSTANDING = 4


#: What a broker says of a message or a body that is too large; NSQ's own nsqd says the same.
_TOO_LARGE = re.compile("E_BAD_(MESSAGE|BODY) .* too big")
#: What one says that takes nothing now, such as one that ends or has a full disk: another may.
_UNABLE = re.compile("E_(PUB|MPUB|DPUB)_FAILED")


class _Command(NamedTuple):
    data: bytes
    chunk: Chunk


class Publisher:
    """One task's publishes, in order, to the first of some brokers that takes them. Publishes that were not answered
    are sent again."""

    def __init__(self, options: SinkOptions, addresses: Sequence[str]) -> None:
        self._options = options
        self._addresses = addresses
        #: The number of the broker that publishes go to.
        self._at = 0
        self._connection: Connection | None = None
        self._outstanding: deque[_Command] = deque()
        #: Since the last answer.
        self._failures = 0

    @property
    def _address(self) -> str:
        return self._addresses[self._at]

    def put(self, chunk: Chunk) -> None:
        topic = chunk.topic.encode()
        if not chunk.delay:
            data = b"".join([b"MPUB %b\n" % topic, pack(">I", len(chunk.body)), chunk.body])
            self._publish(_Command(data, chunk))
            return
        for row in chunk.rows:
            head = b"DPUB %b %d\n" % (topic, chunk.delay)
            self._publish(_Command(head + pack(">I", len(row)) + row, Chunk.of(chunk.topic, chunk.delay, [row])))

    def finish(self) -> None:
        """Wait for the answers to everything."""
        while self._outstanding:
            self._settle()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _publish(self, command: _Command) -> None:
        while len(self._outstanding) >= _OUTSTANDING:
            self._settle()
        self._outstanding.append(command)
        if self._connection is None:
            self._connect()
            return
        try:
            self._connection.send(command.data)
        except OSError as exc:
            self._lost(exc)

    def _settle(self) -> None:
        """Read one more answer."""
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        try:
            kind, data = self._connection.next_frame()
        except (OSError, ProtocolError) as exc:
            self._lost(exc)
            return
        if kind != 0:
            chunk, said = self._outstanding[0].chunk, data.decode(errors="replace")
            text = f"nsqd {self._address} refused a publish to {chunk.topic}: {said}"
            if _UNABLE.match(said) and len(self._addresses) > 1:
                self._lost(PublishError(text, code=said.partition(" ")[0]))
                return
            if _TOO_LARGE.match(said):
                text = f"nsqd {self._address}: {chunk.too_large(said)}"
            raise PublishError(text, code=said.partition(" ")[0])
        self._outstanding.popleft()
        self._failures = 0

    def _lost(self, exc: BaseException) -> None:
        self.close()
        logger.warning("nsqd %s is lost for now: %s", self._address, exc)
        self._failed(exc)
        self._connect()

    def _failed(self, exc: BaseException) -> None:
        """Take the next broker; after each round of all of them wait. ConnectError after the last round."""
        self._failures += 1
        rounds, rest = divmod(self._failures, len(self._addresses))
        if rounds > self._options.network.retries:
            if len(self._addresses) == 1:
                raise ConnectError(f"nsqd {self._address} could not be published to in {rounds} tries: {exc}") from exc
            raise ConnectError(
                f"none of the nsqds {', '.join(self._addresses)} could be published to in {rounds} tries, at last "
                f"{self._address}: {exc}"
            ) from exc
        self._at = (self._at + 1) % len(self._addresses)
        if not rest:
            time.sleep(min(5.0, 0.1 * 2**rounds))

    def _connect(self) -> None:
        """Connect to a broker, and send it the commands that were not answered."""
        while True:
            try:
                self._connection = Connection(self._address, self._options.network, client_id="flintmq-spark-sink")
                for command in self._outstanding:
                    self._connection.send(command.data)
                return
            except (ConnectError, OSError) as exc:
                self.close()
                logger.warning("nsqd %s cannot be published to: %s", self._address, exc)
                self._failed(exc)
