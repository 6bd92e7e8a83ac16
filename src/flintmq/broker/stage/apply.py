"""Make the rows of a prepared set messages of their topics: each once, whatever is killed meanwhile.

An ``Apply`` reads the chunks of a set, in their order, and publishes each as one batch under a reserved key. That key
is in the records of the messages, so it is exactly as durable as they are. After a crash the keys that a start found in
the logs say which chunks are there; only the others are published. Chunks cannot differ, because a set is immutable.

It runs by itself, in slices that hand the loop back, and goes on after an error: what is decided cannot be refused any
more. Whoever asked for it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flintmq.broker.delivery.commit import SLICED_FROM, Commit, slices
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.stage.rows import Attempt, Chunk, read_chunk
from flintmq.broker.stage.state import Prepared
from flintmq.broker.storage.keys import RESERVED, key_extra, reserved_digest
from flintmq.errors import FlintError, PublishError, StageError, StorageError

if TYPE_CHECKING:
    from flintmq.broker.stage.producer import Producer
    from flintmq.broker.stage.staging import Staging

__all__ = ["Apply"]

logger = logging.getLogger(__name__)

#: Bytes, and messages, that are published before the loop is handed back.
BYTES_AT_ONCE = 1 << 20
MESSAGES_AT_ONCE = 20_000
#: Chunks that are looked for before the loop is handed back.
CHUNKS_AT_ONCE = 1_000
#: Chunks that are read ahead, as long as they are this many bytes in total.
READ_AHEAD = 8 << 20
#: Seconds until what failed is tried again.
RETRY = 1.0


class Apply:
    def __init__(self, staging: Staging, producer: Producer, txn: int, found: Prepared) -> None:
        self._staging = staging
        self._broker = staging.broker
        self._producer = producer
        self._txn = txn
        self._set = found
        # What is not yet published, in order; and published chunks whose commits failed.
        self._left: list[tuple[Attempt, int]] = []
        self._failed: list[tuple[Attempt, int]] = []
        # Why a commit failed, unless its topic was deleted.
        self._error: Exception | None = None
        self._commits: dict[Commit, None] = {}
        self._topics: dict[str, Topic] = {}
        # Who waits for it, or for the next error.
        self._waiting: list[asyncio.Future[None]] = []
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait(self) -> None:
        """Return when it is done. StageError if something went wrong: then it goes on by itself."""
        if self._task.done():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def cancel(self) -> None:
        self._task.cancel()
        self._tell(StageError(503, "E_STAGE_CLOSED", "the node stops, or an operator dropped the set: ask again"))

    def _tell(self, error: StageError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def _run(self) -> None:
        loaded = False
        try:
            while True:
                try:
                    await self._producer.applying(self._txn)
                    if not loaded:
                        await self._load()
                        loaded = True
                    while self._left:
                        await self._publish()
                    await self._make_durable()
                    await self._producer.applied(self._txn)
                    break
                except (OSError, FlintError) as exc:
                    self._trouble(exc)
                    await asyncio.sleep(RETRY)
        except Exception as exc:
            logger.exception("STAGE(%s): transaction %d cannot be applied", self._producer.name, self._txn)
            # Whoever tries again must know what became of these.
            await self._until_committed()
            self._producer.applies.pop(self._txn, None)
            self._tell(StageError(500, "E_STAGE_FAILED", f"{exc}: see the log of this node"))
            return
        finally:
            if self._broker.stopping:
                self._tell(StageError(503, "E_STAGE_CLOSED", "the node stops: ask again when it is back"))
        self._staging.applied(self._set)
        self._staging.release(self._producer, self._txn)
        self._tell(None)

    def _trouble(self, exc: Exception) -> None:
        """Log it and tell who waits; it is tried again."""
        if self._broker.store.complaints.due("apply", self._producer.name):
            logger.error("STAGE(%s): applying transaction %d is tried again - %s", self._producer.name, self._txn, exc)
        text = f"transaction {self._txn} is decided, and not all of it is stored yet ({exc}). It goes on: ask again"
        self._tell(exc if isinstance(exc, StageError) else StageError(503, "E_STAGE_FULL", text))

    async def _load(self) -> None:
        """Read the heads of the chunks, if another process wrote them, and leave out what is in the logs."""
        attempts = self._producer.sealed.get(self._txn, [])
        for attempt in attempts:
            if not attempt.checked:
                await self._staging.run(partial(attempt.check, self._broker.disk, bodies=False))
        found = {attempt.name: attempt for attempt in attempts}
        for name, chunks, rows in self._set.winners:
            if not chunks:
                continue
            winner = found.get(name)
            if winner is None or (len(winner.chunks), winner.rows) != (chunks, rows):
                raise StorageError(
                    f"the file of attempt {name} is missing or damaged in {self._producer.folder}: restore it, or drop "
                    f"the set with DELETE /stage?producer={self._producer.name}&txn={self._txn}"
                )
            for number in range(chunks):
                if not self._is_stored(winner, number):
                    self._left.append((winner, number))
                if number % CHUNKS_AT_ONCE == CHUNKS_AT_ONCE - 1:
                    await asyncio.sleep(0)

    def _digest(self, attempt: Attempt, number: int) -> bytes:
        return reserved_digest(f"{self._set.set} {attempt.name} {number}".encode())

    def _is_stored(self, attempt: Attempt, number: int) -> bool:
        topic = self._broker.topics.get(attempt.chunks[number].topic)
        if topic is None or topic.keys is None or not topic.keys.reserved:
            return False
        return self._digest(attempt, number) in topic.keys.reserved

    # --- Publishing ------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Publish all that is left. What could not be stored is left again, and PublishError says why.

        If it was only that a topic was deleted there is no error: the topic is created again.
        """
        reads: list[asyncio.Task[bytearray]] = []
        ahead = size = count = 0
        done = 0
        try:
            while done < len(self._left):
                while len(reads) + done < len(self._left) and (not reads or ahead < READ_AHEAD):
                    attempt, number = self._left[done + len(reads)]
                    chunk = attempt.chunks[number]
                    read = self._staging.run(partial(read_chunk, self._broker.disk, attempt, chunk))
                    reads.append(asyncio.ensure_future(read))
                    ahead += chunk.size
                attempt, number = self._left[done]
                chunk = attempt.chunks[number]
                data = await reads[0]
                topic = await self._free_topic(chunk.topic)
                self._store(topic, attempt, number, chunk, data)
                del reads[0]
                done += 1
                ahead -= chunk.size
                size += chunk.size
                count += chunk.rows
                if size >= BYTES_AT_ONCE or count >= MESSAGES_AT_ONCE:
                    size = count = 0
                    await asyncio.sleep(0)
        finally:
            del self._left[:done]
            for task in reads:
                task.cancel()
        await self._until_committed()
        if self._failed:
            self._left, self._failed = self._failed, []
            error, self._error = self._error, None
            if error is not None:
                raise PublishError(f"a write failed: {error}")

    async def _until_committed(self) -> None:
        while self._commits:
            await self._until(next(iter(self._commits)).waiters.append)

    async def _free_topic(self, name: str) -> Topic:
        """The topic, made if need be, when it can take the next batch."""
        while True:
            topic = self._broker.topic(name)
            if topic.busy:
                await self._until(topic.when_free)
            elif self._broker.store.congested:
                await self._until(self._broker.turns.when_relieved)
            else:
                break
        if self._topics.get(name) is not topic:
            self._topics[name] = topic
            self._staging.hold(self._producer, self._txn, topic.own_keys())
        return topic

    def _store(self, topic: Topic, attempt: Attempt, number: int, chunk: Chunk, data: bytearray) -> None:
        digest = self._digest(attempt, number)
        extra = key_extra(digest, RESERVED)
        delay = chunk.delay * 1_000_000
        if chunk.rows > SLICED_FROM:
            pieces = slices(data, 0, len(data), chunk.rows)
            commit = topic.publish_slices(pieces, extra, delay=delay, admitted=True)
        else:
            commit = topic.publish(data, 0, len(data), chunk.rows, delay=delay, extra=extra, admitted=True)
        if commit is None:
            topic.own_keys().reserved.add(digest)
        else:
            self._commits[commit] = None
            commit.waiters.append(partial(self._committed, commit, topic, attempt, number))

    def _committed(self, commit: Commit, topic: Topic, attempt: Attempt, number: int) -> None:
        self._commits.pop(commit, None)
        if commit.error is not None:
            self._failed.append((attempt, number))
            if not topic.exiting:
                self._error = commit.error
        else:
            topic.own_keys().reserved.add(self._digest(attempt, number))

    async def _make_durable(self) -> None:
        """Return when all of it is on the device, whatever the durability of its topics."""
        for name in self._set.topics:
            topic = self._broker.topics.get(name)
            if topic is None:
                # It was deleted, and its rows with it.
                continue
            failure: list[Exception | None] = []
            log = topic.log

            def tell(then: Callable[[], None], topic: Topic = topic, failure: list[Exception | None] = failure) -> None:
                def durable(error: Exception | None) -> None:
                    failure.append(error)
                    then()

                topic.log.when_durable(topic.log.end, durable)
                self._broker.turn(topic)

            await self._until(tell)
            if failure[0] is not None and not log.closed:
                raise PublishError(str(failure[0]))

    async def _until(self, tell: Callable[[Callable[[], None]], object]) -> None:
        """Wait for something that takes a callback."""
        happened = asyncio.get_running_loop().create_future()
        tell(lambda: None if happened.done() else happened.set_result(None))
        await happened
