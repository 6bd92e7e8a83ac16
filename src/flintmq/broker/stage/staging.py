"""All staged publishes of a node: the producers, what they may take of the disk, and what a start finds of them.

    flintmq/stage/HASH/state              what is known of a producer's transactions (state.py); HASH is of its name
    flintmq/stage/HASH/E-T-NAME.rows      the rows of attempt NAME of transaction T in epoch E (rows.py)

A ``Staging`` belongs to one broker. It owns the producers, the count of staged bytes, and the threads' turns. The
rules are each producer's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq.broker.stage.producer import Producer
from flintmq.broker.stage.rows import ROWS, Attempt
from flintmq.broker.stage.state import APPLIED, PREPARED, Prepared, State, encode_state, read_state
from flintmq.broker.storage.disk import BACKGROUND
from flintmq.broker.storage.keys import Keys
from flintmq.errors import StageError

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["Staging"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Chunks that are written at once: the other threads of the disk are for commits and reads.
WRITES_AT_ONCE = 2
#: Seconds between two looks at what has to be dropped or forgotten.
SWEEP = 60.0
#: Nanoseconds after its last call, by ``Staging.age``, that a producer with nothing unfinished is remembered.
REMEMBER = 90 * 24 * 3600 * 1_000_000_000
#: Producers of a single transaction that are remembered; beyond that the quietest are forgotten.
MOST_SINGLE = 10_000
#: Nanoseconds after its last call that none of them is: it may ask for an answer once more.
KEEP_SINGLE = 600 * 1_000_000_000
#: Producers that are forgotten at once, and seconds until the next ones are.
FORGET_AT_ONCE = 500
FORGET_AGAIN = 1.0
#: Producers that are known, attempts that are being staged, chunks that are not applied yet, and bytes of all states:
#: beyond that new ones are refused.
MOST_PRODUCERS = 20_000
MOST_ATTEMPTS = 100_000
MOST_CHUNKS = 1_000_000
STATE_BYTES = 256 << 20


class Staging:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.producers: dict[str, Producer] = {}
        self._root = broker.path / "flintmq" / "stage"
        # The highest age in a state that was read, and when that was.
        self._age = 0
        self._started = broker.clock.now()
        # Staged bytes: in files, and of chunks that are being written.
        self.bytes = 0
        self._reserved = 0
        # Bytes of the producers' states.
        self._state_bytes = 0
        # Attempts, and chunks, at the last count, and those that came since.
        self._attempts_begun = 0
        self._chunks_put = 0
        # Topics that unfinished sets have rows for; keys that are held for a set.
        self._topics: dict[str, None] = {}
        self._held: dict[tuple[str, int], list[Keys]] = {}
        # Is the folder's own entry on the device?
        self._entered = False
        # Folders of producers that were forgotten, until they are gone.
        self._leaving: set[Path] = set()
        self._writes = asyncio.Semaphore(WRITES_AT_ONCE)
        self._waiting: list[asyncio.Future[None]] = []
        # Counters.
        self.applied_rows = 0
        self.applied_bytes = 0
        self.applied_sets = 0
        self.dropped_bytes = 0

    @property
    def age(self) -> int:
        """Nanoseconds that processes have run on this data path, as far as states tell.

        Producers are forgotten by it and not by the wall clock: that may be set, and then all of them would be old. A
        process that writes no state adds nothing, and has made nothing that could be forgotten.
        """
        return self._age + self.broker.clock.now() - self._started

    # --- Start and stop --------------------------------------------------------------------------------------------

    def read(self) -> None:
        """At the start, before topics are opened: what is there. StorageError if some of it is damaged."""
        disk = self.broker.disk
        if not disk.exists(self._root):
            return
        # A state may have been renamed just before a crash. Whoever asks about it is told, and it is acted on: so it
        # must not be the one before it again after the next crash.
        disk.sync_folder(self._root.parent)
        disk.sync_folder(self._root)
        self._entered = True
        for name in disk.names(self._root):
            disk.sync_folder(self._root / name)
            self._read_producer(self._root / name)

    def _read_producer(self, folder: Path) -> None:
        disk, node = self.broker.disk, self.broker.node.hex()
        state = read_state(disk, folder)
        names = [name for name in disk.names(folder) if name.endswith(ROWS)]
        if state is None:
            # Nothing was ever answered for it but chunks, which without a state cannot be told whose they are.
            for name in disk.names(folder):
                disk.remove(folder / name)
            disk.remove_folder(folder)
            return
        producer = self.producers[state.producer] = Producer(self, folder, state)
        self._age = max(self._age, state.age)
        self.count_state(producer, len(encode_state(state)))
        is_copy = state.node != node
        if is_copy:
            # A restored copy under another identity: the decisions of others name the original's sets.
            state.node = node
            for txn in [txn for txn, found in state.sets.items() if found.state == PREPARED]:
                logger.warning("STAGE(%s): prepared transaction %d is dropped, the node is a copy", state.producer, txn)
                del state.sets[txn]
            producer.changed()
        sealed = {
            (found.epoch, txn, winner[0]): txn
            for txn, found in state.sets.items()
            if found.state != APPLIED
            for winner in found.winners
        }
        now = self.broker.clock.now()
        for name in names:
            attempt = Attempt.found(disk, folder / name, now)
            key = (attempt.epoch, attempt.txn, attempt.name) if attempt is not None else None
            if attempt is None or key is None:
                continue
            known = state.sets.get(attempt.txn)
            if key in sealed:
                producer.sealed.setdefault(sealed[key], []).append(attempt)
            elif (
                is_copy
                or attempt.epoch < max(state.epoch, state.fence)
                or (known is not None and known.epoch == attempt.epoch)
            ):
                disk.remove(attempt.path)
                continue
            else:
                producer.attempts[key] = attempt
                state.fence = max(state.fence, attempt.epoch)
            self.bytes += attempt.size
        # Names are not in the order of their epochs.
        producer.drop_attempts([key for key in producer.attempts if key[0] < state.fence])
        for txn, found in state.sets.items():
            if found.state != APPLIED:
                producer.sealed.setdefault(txn, [])
                self._topics.update(dict.fromkeys(found.topics))

    def holds(self, topic: str) -> bool:
        """Has an unfinished set rows for this topic? Asked at the start, before its keys are read."""
        return topic in self._topics

    def start(self) -> None:
        """The topics are open: go on with what was being applied."""
        for producer in self.producers.values():
            for txn, found in producer.state.sets.items():
                if found.state != APPLIED:
                    for name in found.topics:
                        topic = self.broker.topics.get(name)
                        if topic is not None:
                            self.hold(producer, txn, topic.own_keys())
        for name in self._topics:
            topic = self.broker.topics.get(name)
            if topic is not None and topic.keys is not None:
                # The hold that its keys were read with.
                topic.keys.release()
        self._topics.clear()
        for producer in self.producers.values():
            producer.resume()
        self.broker.once("stage", SWEEP, self._sweep)

    def stop(self) -> None:
        """Nothing more is applied; the next start goes on."""
        for producer in self.producers.values():
            for apply in list(producer.applies.values()):
                apply.cancel()

    # --- Threads ---------------------------------------------------------------------------------------------------

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        """Run ``work`` in a thread, then ``done`` on the loop."""
        if self.broker.disk.closing:
            raise StageError(503, "E_STAGE_CLOSED", "the node stops: ask again when it is back")
        self.broker.disk.submit(work, done, urgency)

    async def run(self, work: Callable[[], T], urgency: int = BACKGROUND) -> T:
        """Run ``work`` in a thread and wait for it."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.submit(work, done, urgency)
        return await future

    async def write(self, work: Callable[[], T]) -> T:
        """Run ``work``, which adds to a file of rows, when it is its turn."""
        async with self._writes:
            return await self.run(work)

    def make_folder(self, folder: Path) -> None:
        """In a thread: make a producer's folder, and bring its name to the device.

        One that is there may have been made by a process that was killed before it synced the name.
        """
        disk = self.broker.disk
        for path in (self._root, folder):
            if not disk.exists(path):
                with contextlib.suppress(FileExistsError):
                    disk.make_folder(path)
        if not self._entered:
            disk.sync_folder(self._root.parent)
            self._entered = True
        disk.sync_folder(self._root)

    def tell(self) -> None:
        """Something changed that somebody may wait for with ``until``."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    # --- Room ------------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """A chunk of this size is about to be written. StageError if there is no room for it."""
        broker = self.broker
        most = broker.options.max_staged_bytes
        if self.bytes + self._reserved + size > most:
            raise StageError(
                507,
                "E_STAGE_FULL",
                f"{self.bytes} bytes are staged, --max-staged-bytes allows {most}: try again when others have "
                "committed, or write smaller batches",
            )
        if broker.refusing:
            raise StageError(507, "E_STAGE_FULL", f"{broker.refusing}: try again later")
        if self._chunks_put >= MOST_CHUNKS:
            self._chunks_put = sum(len(attempt.chunks) for one in self.producers.values() for attempt in one.staged())
            if self._chunks_put >= MOST_CHUNKS:
                raise StageError(
                    507,
                    "E_STAGE_FULL",
                    f"{self._chunks_put} chunks are staged, as many as are possible: put more rows into each, or try "
                    "again when others have committed",
                )
        self._chunks_put += 1
        self._reserved += size

    def unreserve(self, size: int) -> None:
        self._reserved -= size

    def count_state(self, producer: Producer, size: int) -> None:
        """A producer's state takes so many bytes from now on."""
        if self.producers.get(producer.name) is not producer:
            size = 0
        self._state_bytes += size - producer.state_size
        producer.state_size = size

    def check_memory(self) -> None:
        """StageError if what is known of all producers takes more than it may."""
        if self._state_bytes > STATE_BYTES:
            raise StageError(
                507,
                "E_STAGE_FULL",
                f"the transactions of {len(self.producers)} producers take {self._state_bytes} bytes, at most "
                f"{STATE_BYTES} are kept: drop those that never return with DELETE /stage?producer=",
            )

    def admit_attempt(self) -> None:
        """An attempt is about to begin. StageError if there are too many."""
        if self._attempts_begun >= MOST_ATTEMPTS:
            self._attempts_begun = sum(len(producer.attempts) for producer in self.producers.values())
            if self._attempts_begun >= MOST_ATTEMPTS:
                raise StageError(
                    507,
                    "E_STAGE_FULL",
                    f"{self._attempts_begun} attempts are being staged, as many as are possible: try again when "
                    "others have committed, or write with fewer partitions",
                )
        self._attempts_begun += 1

    def count_bytes(self, size: int) -> None:
        """So many bytes more are in files, or fewer."""
        self.bytes += size

    def check_room(self, size: int) -> None:
        """StageError if there is no room for a set to be applied, beside the others: rows are written once more."""
        broker = self.broker
        free = broker.disk.free(broker.path)
        size += sum(found.size for one in self.producers.values() for found in one.state.sets.values())
        if free - size < broker.options.disk_reserve:
            raise StageError(
                507,
                "E_STAGE_FULL",
                f"{size} bytes cannot be committed, {free} are free and {broker.options.disk_reserve} are kept in "
                "reserve: make room, then try again",
            )

    # --- Keys ------------------------------------------------------------------------------------------------------

    def hold(self, producer: Producer, txn: int, keys: Keys) -> None:
        """Keep the reserved keys of a topic until ``release``."""
        held = self._held.setdefault((producer.name, txn), [])
        if keys not in held:
            keys.hold()
            held.append(keys)

    def release(self, producer: Producer, txn: int) -> None:
        """A set is applied, or dropped."""
        for keys in self._held.pop((producer.name, txn), ()):
            keys.release()

    def dropped(self, size: int) -> None:
        """Count rows that were dropped."""
        self.dropped_bytes += size

    def applied(self, found: Prepared) -> None:
        """Count a set that was applied."""
        self.applied_sets += 1
        self.applied_rows += sum(total.count for total in found.topics.values())
        self.applied_bytes += sum(total.bytes for total in found.topics.values())

    # --- Producers -------------------------------------------------------------------------------------------------

    def producer(self, name: str) -> Producer:
        """The producer, made if need be. StageError if there are too many."""
        producer = self.producers.get(name)
        if producer is None:
            folder = self._root / blake2b(name.encode(), digest_size=16).hexdigest()
            if len(self.producers) >= MOST_PRODUCERS:
                raise StageError(
                    507,
                    "E_STAGE_FULL",
                    f"{len(self.producers)} producers are known, as many as are possible: try again later, or drop "
                    "those that never return with DELETE /stage?producer=",
                )
            producer = self.producers[name] = Producer(self, folder, State(name, self.broker.node.hex()))
        producer.touched = self.age
        return producer

    def existing(self, name: str) -> Producer:
        if name not in self.producers:
            raise StageError(
                404,
                "E_STAGE_UNKNOWN",
                f"producer {name} is not known here: it staged nothing, or was not heard of for long",
            )
        return self.producer(name)

    async def drop(self, name: str, txn: int | None) -> dict[str, Any]:
        """An operator drops what is staged of a producer; without ``txn`` the producer is forgotten."""
        producer = self.existing(name)
        answer = await producer.drop(txn)
        if txn is None and producer.idle:
            self._forget(producer)
        return answer

    def _forget(self, producer: Producer) -> None:
        del self.producers[producer.name]
        self.count_state(producer, 0)
        if not self.broker.disk.closing:
            self._leaving.add(producer.folder)
            self.submit(partial(self._remove, producer.folder), partial(self._removed, producer.folder))

    def _remove(self, folder: Path) -> None:
        disk = self.broker.disk
        if disk.exists(folder):
            for name in disk.names(folder):
                disk.remove(folder / name)
            disk.remove_folder(folder)

    def _removed(self, folder: Path, _: None, error: BaseException | None) -> None:
        self._leaving.discard(folder)
        self.tell()
        if error is not None:
            logger.error("STAGE: a folder cannot be deleted - %s", error)

    async def vacant(self, folder: Path) -> None:
        """Return when nothing of an earlier producer of this name is being deleted any more."""
        await self.until(lambda: folder not in self._leaving)

    def _sweep(self) -> None:
        clock, timeout = self.broker.clock, self.broker.options.stage_timeout
        now, age = clock.now(), self.age
        single: list[Producer] = []
        for producer in list(self.producers.values()):
            try:
                producer.expire(now, timeout)
                # One that never had a state has nothing to be remembered.
                if producer.idle and age - producer.touched > (REMEMBER if producer.state.time else timeout):
                    self._forget(producer)
                elif producer.state.single and producer.idle:
                    single.append(producer)
            except Exception:
                logger.exception("STAGE(%s): cannot be looked at", producer.name)
        more = False
        try:
            more = self._forget_some(single, age)
        finally:
            self.broker.once("stage", FORGET_AGAIN if more else SWEEP, self._sweep)

    def _forget_some(self, single: list[Producer], age: int) -> bool:
        """Forget the quietest of these if they are too many, those first that nobody can come back for; are there more?

        A batch write makes a producer of its own: without a limit there would be as many as writes in 90 days.
        """
        excess = len(single) - MOST_SINGLE
        if excess <= 0:
            return False
        quiet = [producer for producer in single if age - producer.touched > KEEP_SINGLE]
        quiet.sort(key=lambda producer: (producer.state.repeatable, producer.touched))
        for producer in quiet[: min(excess, FORGET_AT_ONCE)]:
            self._forget(producer)
        return min(excess, len(quiet)) > FORGET_AT_ONCE

    # --- For operators ---------------------------------------------------------------------------------------------

    def describe(self, producer: str | None = None) -> Generator[int, None, dict[str, Any]]:
        """Return everything, or of one producer alone, for ``GET /stage``.

        A reading in steps (``observe/steps.py``): there may be very many producers, and they may come and go meanwhile.
        """
        producers = []
        for name in sorted(self.producers) if producer is None else [producer]:
            one = self.producers.get(name)
            if one is not None:
                producers.append(one.describe())
                yield 1 + len(one.attempts) + len(one.state.sets)
        return {"bytes": self.bytes, "max_bytes": self.broker.options.max_staged_bytes, "producers": producers}

    def summary(self) -> dict[str, Any]:
        """Numbers, for ``/stats`` and metrics."""
        sets = [found for one in self.producers.values() for found in one.state.sets.values()]
        waiting = [found for found in sets if found.state != APPLIED]
        attempts = [attempt for one in self.producers.values() for attempt in one.attempts.values()]
        now, wall = self.broker.clock.now(), self.broker.clock.wall()
        return {
            "attempts": len(attempts),
            "oldest_attempt_seconds": max(((now - one.touched) // 1_000_000_000 for one in attempts), default=0),
            "sets": len(waiting),
            "oldest_set_seconds": max(((wall - found.time) // 1_000_000_000 for found in waiting), default=0),
            "applied_sets": self.applied_sets,
            "applied_rows": self.applied_rows,
            "applied_bytes": self.applied_bytes,
            "dropped_bytes": self.dropped_bytes,
        }
