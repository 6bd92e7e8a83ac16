"""One producer's staged transactions on one node: what it may do next, and what becomes of what it staged.

    staging   chunks are stored, in one file per attempt
    prepared  the attempts that count are sealed and on the device; the others are dropped
    applying  the transaction is decided: its rows are becoming messages (``apply``)
    applied   all of them are, and (producer, transaction) is remembered

A producer's home is the one node that gives it epochs and keeps its decisions. A run, or a job, that was superseded by
another one is fenced: its epoch is too low for everything but completing what was decided. No decision means abort.

A ``Producer`` owns the state, its file, and the files of rows. Every answer waits until what it says is on the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import msgspec

from flintmq.broker.stage.apply import Apply
from flintmq.broker.stage.rows import Attempt, remove_files, sync_attempts
from flintmq.broker.stage.state import (
    APPLIED,
    APPLYING,
    PREPARED,
    Decision,
    Prepared,
    State,
    TopicSum,
    encode_state,
    write_state,
)
from flintmq.broker.storage.disk import COMMIT
from flintmq.errors import LimitError, StageError

if TYPE_CHECKING:
    from flintmq.broker.limits import TopicLimits
    from flintmq.broker.stage.staging import Staging

__all__ = ["Producer", "Winner"]

logger = logging.getLogger(__name__)

#: An attempt, how many chunks it has, and how many rows.
Winner = tuple[str, int, int]

#: Unsynced bytes of one attempt at which a sync starts in the background, and at which the next chunk waits for it.
SYNC_AT = 8 << 20
WAIT_AT = 64 << 20


def fenced(text: str) -> StageError:
    return StageError(409, "E_STAGE_FENCED", text)


def unknown(text: str) -> StageError:
    return StageError(404, "E_STAGE_UNKNOWN", text)


def closed(text: str) -> StageError:
    return StageError(409, "E_STAGE_CLOSED", text)


class Producer:
    def __init__(self, staging: Staging, folder: Path, state: State) -> None:
        self._staging = staging
        self._broker = staging.broker
        self.folder = folder
        self.state = state
        #: Attempts that are being staged, by epoch, transaction and name; and those of sealed sets, by transaction.
        self.attempts: dict[tuple[int, int, str], Attempt] = {}
        self.sealed: dict[int, list[Attempt]] = {}
        self.applies: dict[int, Apply] = {}
        #: When it was last heard of, by ``Staging.age``.
        self.touched = state.age if state.time else staging.age
        #: Bytes of its state's file; only its staging assigns.
        self.state_size = 0
        # What was prepared again of a transaction that was decided before: the set, and the answer.
        self._compared: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
        # What the last attempt was begun for: there is no attempt of an earlier transaction.
        self._begun: tuple[int, int] | None = None
        # One call at a time that opens, closes or drops something.
        self._turn = asyncio.Lock()
        # Changes of the state, and how many of them are in its file.
        self._changes = self._saved = 1 if state.time else 0
        self._saving: asyncio.Task[None] | None = None
        # Is the folder's entry on the device?
        self._entered = False
        # Of sets that the next state does not name.
        self._dropped: list[Attempt] = []

    @property
    def name(self) -> str:
        return self.state.producer

    @property
    def idle(self) -> bool:
        """Nothing is staged, prepared, being applied or unfinished."""
        return not (self.attempts or self.sealed or self.applies or self.state.unfinished or self._turn.locked())

    def staged(self) -> Iterator[Attempt]:
        """All attempts whose rows are in files."""
        return chain(self.attempts.values(), *self.sealed.values())

    # --- The state's file ------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """The state was changed: the next answer waits until that is in its file."""
        self._changes += 1

    async def save(self) -> None:
        """Return when the state is on the device as it is now. StageError if it cannot be."""
        wanted = self._changes
        while self._saved < wanted:
            if self._saving is None:
                self._saving = asyncio.get_running_loop().create_task(self._save())
                # If it fails, somebody who has gone does not hear of it.
                self._saving.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(self._saving)

    async def _save(self) -> None:
        await self._staging.vacant(self.folder)
        changes = self._changes
        self.state.trim()
        self.state.time = self._broker.clock.wall()
        self.state.age = self._staging.age
        data = encode_state(self.state)
        self._staging.count_state(self, len(data))
        dropped: list[Attempt] = []
        try:
            dropped, self._dropped = self._dropped, []
            await self._staging.run(partial(self._write, data), COMMIT)
            self._saved = changes
            self._staging.dropped(sum(attempt.size for attempt in dropped))
            self._discard(dropped)
            dropped = []
        except OSError as exc:
            if self._broker.store.complaints.due("state", self.name):
                logger.error("STAGE(%s): cannot write %s - %s", self.name, self.folder, exc)
            raise StageError(507, "E_STAGE_FULL", f"the state cannot be written ({exc.strerror}): try again") from exc
        finally:
            self._saving = None
            self._dropped += dropped

    def _write(self, data: bytes) -> None:
        disk = self._broker.disk
        if not self._entered:
            self._staging.make_folder(self.folder)
            self._entered = True
        write_state(disk, self.folder, data)

    # --- The home --------------------------------------------------------------------------------------------------

    async def open(self, run: str, job: str, txn: int) -> dict[str, Any]:
        """Begin, or go on with, a job: its epoch, and the last decision."""
        state = self.state
        is_new = (state.run, state.job) != (run, job) or not state.home
        if is_new and (run in state.superseded_runs or job in state.superseded_jobs):
            raise fenced(
                f"run {run} or job {job} of producer {self.name} was superseded by run {state.run}: another driver "
                "writes for this query now, stop this one"
            )
        # Before anybody is superseded by a job that will decide nothing.
        self._check_order(txn)
        if is_new:
            if state.run not in ("", run):
                state.superseded_runs.append(state.run)
            if state.job not in ("", job):
                state.superseded_jobs.append(state.job)
            state.run, state.job, state.home = run, job, True
            state.epoch = max(state.epoch, state.fence) + 1
            self.changed()
        epoch, decided = state.epoch, state.last_decision
        await self.save()
        return {"epoch": epoch, "decided": _shown(decided)}

    def _check_order(self, txn: int) -> None:
        """StageError for a transaction without a decision if a later one has one: its number was passed over.

        A producer decides its transactions in order. One that comes back to such a number went back, and its rows may
        be part of what was decided since.
        """
        decisions = self.state.decisions
        if txn in decisions:
            return
        known = sorted(decisions)
        if txn <= self.state.forgotten:
            raise StageError(
                409,
                "E_STAGE_DECIDED",
                f"transaction {txn} of producer {self.name} is older than those that are remembered "
                f"({known[0] if known else '-'} to {known[-1] if known else '-'}): nobody can tell whether it was "
                "committed. Go on from a newer checkpoint, or begin with a new one",
            )
        if known and txn < known[-1]:
            raise StageError(
                409,
                "E_STAGE_DECIDED",
                f"transaction {txn} of producer {self.name} was never committed, and transaction {known[-1]} is: the "
                f"checkpoint went back, and rows of {txn} may be published already. Restore a checkpoint that is "
                f"after {known[-1]}, or begin with a new one",
            )

    async def decide(self, epoch: int, txn: int, nodes: dict[str, str], fingerprint: object) -> dict[str, Any]:
        """Decide a transaction, once and for ever: the decision, and was it there before?"""
        state = self.state
        self._check_home()
        stored = state.decisions.get(txn)
        if epoch != state.epoch and not (stored is not None and (stored.epoch, stored.nodes) == (epoch, nodes)):
            raise self._superseded(epoch)
        if stored is None:
            self._check_order(txn)
            if state.closed >= epoch:
                raise fenced(f"epoch {epoch} of producer {self.name} was aborted: open a new job, and stage again")
            unfinished = next((decision for decision in state.decisions.values() if not decision.done), None)
            if unfinished is not None:
                raise StageError(
                    409,
                    "E_STAGE_UNFINISHED",
                    f"transaction {unfinished.txn} of producer {self.name} is decided and not done: apply it on "
                    f"{', '.join(sorted(unfinished.nodes))}, say done, then decide {txn}",
                )
            state.decisions[txn] = Decision(txn, epoch, nodes, fingerprint)
            self.changed()
        decided = state.decisions[txn]
        await self.save()
        return {"decided": _shown(decided), "repeat": stored is not None}

    async def done(self, txn: int) -> dict[str, Any]:
        """Every node has applied the transaction."""
        self._check_home()
        decision = self.state.decisions.get(txn)
        if decision is None:
            if txn <= self.state.forgotten:
                return {}
            raise unknown(f"transaction {txn} of producer {self.name} is not decided: decide it first")
        own = self.state.sets.get(txn)
        if own is not None and own.set in decision.nodes.values() and own.state != APPLIED:
            raise StageError(
                409,
                "E_STAGE_UNFINISHED",
                f"transaction {txn} of producer {self.name} is not applied on this node: apply it, then say done",
            )
        if not decision.done:
            decision.done = True
            self.changed()
        if own is not None and own.state == PREPARED:
            # Of a later run that found the transaction decided.
            self._drop_set(txn)
        await self.save()
        return {}

    def _check_home(self) -> None:
        if not self.state.home:
            raise unknown(f"this node is not the home of producer {self.name}: ask the one that gave the epoch")

    def _superseded(self, epoch: int) -> StageError:
        return fenced(
            f"epoch {epoch} of producer {self.name} is not the current one ({self._epoch}): another driver, or a later "
            "attempt of this batch, writes now. Stop this one"
        )

    # --- Staging ---------------------------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """The highest epoch that is known here."""
        return max(self.state.epoch, self.state.fence)

    async def begin(self, epoch: int, txn: int, name: str, decided: Decision | None) -> dict[str, Any]:
        """Begin an attempt, or go on with it: which chunk is next, and the highest transaction applied here."""
        state = self.state
        async with self._turn:
            if epoch < self._epoch:
                raise self._superseded(epoch)
            if epoch > state.fence:
                await self._supersede(epoch, decided)
            self._check_open(epoch, txn)
            if self._begun != (epoch, txn):
                # Whoever stages a later transaction has given up the earlier ones.
                self.drop_attempts([key for key in self.attempts if key[0] == epoch and key[1] < txn])
                self._begun = (epoch, txn)
            attempt = self.attempts.get((epoch, txn, name))
            if attempt is None:
                self._staging.admit_attempt()
                path = self.folder / Attempt.file_name(epoch, txn, name)
                attempt = Attempt(path, epoch, txn, name, self._broker.clock.now())
                self.attempts[epoch, txn, name] = attempt
            if not self._saved:
                # Without it a start could not tell whose rows these are, nor that it was told of the producer.
                self.changed()
                await self.save()
        async with attempt.turn:
            await self._check(attempt)
        return {"next": len(attempt.chunks), "applied": state.applied, "told": state.told}

    async def _supersede(self, epoch: int, decided: Decision | None) -> None:
        """A higher epoch begins: complete what was decided before it, drop the rest."""
        state = self.state
        named = set(decided.nodes.values()) if decided is not None else set()
        for decision in state.decisions.values():
            named |= set(decision.nodes.values())
        for txn, found in list(state.sets.items()):
            if found.state != APPLIED and found.set in named:
                await self._apply(txn)
        for txn, found in list(state.sets.items()):
            if found.state == PREPARED and found.epoch < epoch:
                self._drop_set(txn)
                await self.save()
        self.drop_attempts([key for key in self.attempts if key[0] < epoch])
        self._compared.clear()
        state.fence = epoch
        self.changed()

    def _check_open(self, epoch: int, txn: int) -> None:
        found = self.state.sets.get(txn)
        if (found is not None and found.epoch == epoch) or (epoch, txn) in self._compared:
            raise closed(
                f"transaction {txn} of producer {self.name} is prepared: no more rows are taken. "
                "An attempt that was not named among the winners can stop"
            )

    async def put(
        self, key: tuple[int, int, str], chunk: int, topic: str, delay: int, data: bytearray, end: int, count: int
    ) -> None:
        """Store a chunk: the ``count`` records at ``data[4:end]``. Returns when they are written."""
        epoch, txn, name = key
        if epoch < self._epoch:
            raise self._superseded(epoch)
        self._check_open(epoch, txn)
        attempt = self.attempts.get(key)
        if attempt is None:
            raise unknown(f"attempt {name} of transaction {txn} is not known here: begin it, and go on at `next`")
        async with attempt.turn:
            self._check_usable(key, attempt)
            await self._check(attempt)
            attempt.touched = self._broker.clock.now()
            if chunk < len(attempt.chunks):
                self._compare(attempt, chunk, topic, delay, data, end, count)
                return
            if chunk > len(attempt.chunks):
                raise StageError(
                    409,
                    "E_STAGE_GAP",
                    f"chunk {chunk} of attempt {name} cannot follow chunk {len(attempt.chunks) - 1}: "
                    f"send chunk {len(attempt.chunks)} first",
                )
            if attempt.syncing and attempt.size - attempt.synced > WAIT_AT:
                await self._staging.until(lambda: not attempt.syncing)
            self._staging.reserve(end)
            try:
                write = partial(attempt.write, self._broker.disk, topic, delay, count, data, 4, end)
                written = await self._staging.write(write)
            except OSError as exc:
                raise StageError(
                    507, "E_STAGE_FULL", f"the rows cannot be written ({exc.strerror}): make room, then try again"
                ) from exc
            finally:
                self._staging.unreserve(end)
            before = attempt.size
            attempt.wrote(written)
            self._staging.count_bytes(attempt.size - before)
            if self.attempts.get(key) is not attempt:
                # It was dropped meanwhile; its file goes again.
                self._discard([attempt])
                raise self._superseded(epoch)
        if attempt.size - attempt.synced >= SYNC_AT and not attempt.syncing:
            self._sync_soon(attempt)

    def _check_usable(self, key: tuple[int, int, str], attempt: Attempt) -> None:
        if attempt.closed:
            raise closed(f"transaction {attempt.txn} of producer {self.name} is being prepared: no more rows are taken")
        if attempt.broken:
            raise unknown(f"attempt {attempt.name} cannot be used any more ({attempt.broken}): stage its rows again")
        if self.attempts.get(key) is not attempt:
            raise unknown(f"attempt {attempt.name} was dropped: stage its rows again, as another attempt")

    async def _check(self, attempt: Attempt) -> None:
        """Find out what an earlier process left of it."""
        if attempt.checked:
            return
        before = attempt.size
        try:
            await self._staging.run(partial(attempt.check, self._broker.disk))
        except OSError as exc:
            raise unknown(f"attempt {attempt.name} cannot be read ({exc}): stage its rows again") from exc
        self._staging.count_bytes(attempt.size - before)

    def _compare(
        self, attempt: Attempt, number: int, topic: str, delay: int, data: bytearray, end: int, count: int
    ) -> None:
        stored = attempt.chunks[number]
        crc = google_crc32c.extend(attempt.salt, bytes(memoryview(data)[4:end]))
        if (stored.topic, stored.delay, stored.rows, stored.size, stored.crc) != (topic, delay, count, end - 4, crc):
            raise StageError(
                409,
                "E_STAGE_CONTENT",
                f"chunk {number} of attempt {attempt.name} was stored with other content ({stored.rows} messages, "
                f"{stored.size} bytes for {stored.topic}): rows that were computed again need another attempt",
            )

    def _sync_soon(self, attempt: Attempt) -> None:
        """Bring it to the device while more comes, so that ``prepare`` need not wait long."""
        attempt.syncing = True
        size = attempt.size

        def done(_: None, error: BaseException | None) -> None:
            attempt.syncing = False
            if error is None:
                attempt.synced = size
            elif not isinstance(error, FileNotFoundError):
                # After a failed sync the kernel may call the lost pages clean: they are not trusted again.
                attempt.broken = str(error)
                logger.error("STAGE(%s): cannot sync %s - %s", self.name, attempt.path, error)
            self._staging.tell()

        self._staging.submit(partial(attempt.sync, self._broker.disk), done)

    # --- Prepared sets ---------------------------------------------------------------------------------------------

    async def prepare(self, epoch: int, txn: int, winners: list[Winner]) -> dict[str, Any]:
        """Seal the attempts that count, and drop the others. Returns when they are on the device."""
        state = self.state
        async with self._turn:
            if epoch < self._epoch:
                raise self._superseded(epoch)
            name = self._set_name(epoch, txn, winners)
            found = state.sets.get(txn)
            compared = self._compared.get((epoch, txn))
            if (found is not None and found.epoch == epoch) or compared is not None:
                if name != (compared[0] if compared is not None else found and found.set):
                    raise closed(f"transaction {txn} of producer {self.name} was prepared with other winners")
                await self.save()
                # The first time it may not have come to that.
                self._drop_losers(epoch, txn)
                return compared[1] if compared is not None else _answer(name, found)
            if winners and epoch != state.fence:
                raise unknown(f"nothing of epoch {epoch} was staged here: stage again")
            is_repeat = found is not None or txn in state.decisions
            mine = [self._winner(epoch, txn, winner) for winner in winners if winner[1]]
            prepared = await self._seal(epoch, txn, name, winners, mine, compare=is_repeat)
            answer = _answer(name, prepared, repeat=is_repeat)
            if is_repeat:
                # It was committed before: these rows are only compared with those.
                self._compared[epoch, txn] = (name, answer)
            else:
                state.sets[txn] = prepared
                self.sealed[txn] = mine
                for attempt in mine:
                    del self.attempts[epoch, txn, attempt.name]
                self.changed()
                await self.save()
            self._drop_losers(epoch, txn)
            return answer

    def _drop_losers(self, epoch: int, txn: int) -> None:
        self.drop_attempts([key for key in self.attempts if key[1] == txn and key[0] <= epoch])

    def _set_name(self, epoch: int, txn: int, winners: list[Winner]) -> str:
        """The name of a set: another one for other winners, and on another node."""
        content = msgspec.json.encode([self._broker.node.hex(), self.name, epoch, txn, sorted(winners)])
        return blake2b(content, digest_size=16).hexdigest()

    def _winner(self, epoch: int, txn: int, winner: Winner) -> Attempt:
        attempt = self.attempts.get((epoch, txn, winner[0]))
        if attempt is None:
            raise unknown(
                f"attempt {winner[0]} of transaction {txn} is not here: it was dropped, or lost. Stage the rows again"
            )
        return attempt

    async def _seal(
        self, epoch: int, txn: int, name: str, winners: list[Winner], mine: list[Attempt], *, compare: bool
    ) -> Prepared:
        """Close all attempts of the transaction, and bring those that count to the device, unless it is a repeat."""
        others = [attempt for key, attempt in self.attempts.items() if key[:2] == (epoch, txn)]
        for attempt in others:
            attempt.closed = True
        topics: dict[str, TopicSum] = {}
        try:
            expected = {winner[0]: winner for winner in winners}
            for attempt in mine:
                async with attempt.turn:
                    await self._check(attempt)
                if attempt.broken:
                    raise unknown(f"attempt {attempt.name} cannot be used ({attempt.broken}): stage its rows again")
                _, chunks, rows = expected[attempt.name]
                if (len(attempt.chunks), attempt.rows) != (chunks, rows):
                    raise unknown(
                        f"attempt {attempt.name} has {len(attempt.chunks)} chunks with {attempt.rows} rows here, "
                        f"{chunks} with {rows} were named: stage its rows again"
                    )
                for topic, total in attempt.topics.items():
                    topics.setdefault(topic, TopicSum()).add(total.count, total.bytes, total.sum)
            size = sum(attempt.size for attempt in mine)
            if not compare:
                self._admit(topics, size)
                await self._sync(mine)
                self._pay(topics)
        except BaseException:
            for attempt in others:
                attempt.closed = False
            raise
        return Prepared(epoch, name, winners, topics, PREPARED, size, self._broker.clock.wall())

    def _admit(self, topics: dict[str, TopicSum], size: int) -> None:
        """Refuse now what cannot be applied later: then it is too late."""
        waits: dict[str, float] = {}
        for name, limits in self._limits(topics):
            total = topics[name]
            try:
                limits.check(total.count, total.bytes)
            except LimitError as exc:
                raise StageError(429, "E_STAGE_LIMIT", f"topic {name}: {exc}. Try again later, or raise it") from exc
            waits[name] = limits.wait(total.count)
        slowest = max(waits, key=lambda name: waits[name], default="")
        if slowest and waits[slowest]:
            raise StageError(
                429,
                "E_STAGE_LIMIT",
                f"topic {slowest}: its publish-rate is used up. Try again in {waits[slowest]:.1f} s, or raise it",
                retry_after=waits[slowest],
            )
        self._staging.check_room(size)

    def _pay(self, topics: dict[str, TopicSum]) -> None:
        """Count the rows of a set against the rates of their topics: once, and only those that will be published."""
        for name, limits in self._limits(topics):
            limits.pay(topics[name].count)

    def _limits(self, topics: Iterable[str]) -> Iterator[tuple[str, TopicLimits]]:
        for name in topics:
            topic = self._broker.topics.get(name)
            if topic is not None and topic.limits is not None:
                yield name, topic.limits

    async def _sync(self, attempts: list[Attempt]) -> None:
        if not attempts:
            return
        try:
            await self._staging.run(partial(sync_attempts, self._broker.disk, attempts), COMMIT)
        except OSError as exc:
            for attempt in attempts:
                attempt.broken = str(exc)
            logger.error("STAGE(%s): cannot sync %s - %s", self.name, self.folder, exc)
            raise unknown(f"the rows cannot be brought to the disk ({exc.strerror}): stage them again") from exc

    # --- Applying --------------------------------------------------------------------------------------------------

    async def apply(self, txn: int, name: str, home: str = "") -> dict[str, Any]:
        """Make a set's rows messages of their topics. Returns when all of them are durable.

        ``home`` is the node that decided it, if that is told: this one may have been made a home by a driver that did
        not see the home, and then knows nothing of decisions.
        """
        found = self.state.sets.get(txn)
        if found is None or found.set != name:
            raise unknown(
                f"set {name} of transaction {txn} of producer {self.name} is not here. If it was applied long ago, all "
                "is well; otherwise this node lost it: see whether it was restored from a backup"
            )
        is_mine = self.state.home and home in ("", self._broker.node.hex())
        if found.state == PREPARED and is_mine and not self._is_decided(txn, name):
            raise unknown(f"transaction {txn} of producer {self.name} is not decided with set {name}: decide it first")
        if found.state != APPLIED:
            await self._apply(txn)
        await self.save()
        return {"topics": {topic: total.count for topic, total in found.topics.items()}}

    def _is_decided(self, txn: int, name: str) -> bool:
        decision = self.state.decisions.get(txn)
        return decision is not None and name in decision.nodes.values()

    async def _apply(self, txn: int) -> None:
        apply = self.applies.get(txn)
        if apply is None:
            apply = self.applies[txn] = Apply(self._staging, self, txn, self.state.sets[txn])
        await apply.wait()
        found = self.state.sets.get(txn)
        if found is None or found.state != APPLIED:
            raise StageError(503, "E_STAGE_CLOSED", "the node stops, or an operator dropped the set: ask again")

    def resume(self) -> None:
        """At the start: go on with what was being applied."""
        for txn, found in self.state.sets.items():
            if found.state == APPLYING:
                logger.info("STAGE(%s): applying transaction %d goes on", self.name, txn)
                self.applies[txn] = Apply(self._staging, self, txn, found)

    async def applying(self, txn: int) -> None:
        """Note that a set is being applied, before any of it can be seen."""
        found = self.state.sets[txn]
        if found.state == PREPARED:
            found.state = APPLYING
            self.changed()
        await self.save()

    async def applied(self, txn: int) -> None:
        """Note that all of a set is durable in its topics; its files are deleted."""
        found = self.state.sets[txn]
        before = found.size, found.winners
        found.size, found.winners, found.state = 0, [], APPLIED
        self.state.applied = max(self.state.applied, txn)
        self.changed()
        try:
            await self.save()
        except StageError:
            found.state, (found.size, found.winners) = APPLYING, before
            raise
        self._discard(self.sealed.pop(txn, []))
        self.applies.pop(txn, None)

    # --- Dropping --------------------------------------------------------------------------------------------------

    async def abort(self, epoch: int, txn: int, told: int = -1) -> dict[str, Any]:
        """Give up a transaction, unless it is decided; ``told`` is the highest one that is decided at the home."""
        state = self.state
        async with self._turn:
            if told > state.told:
                state.told = told
                self.changed()
            decided = txn in state.decisions
            if state.home and not decided and epoch == state.epoch and state.closed < epoch:
                state.closed = epoch
                self.changed()
            found = state.sets.get(txn)
            if (
                found is not None
                and found.state == PREPARED
                and found.epoch <= epoch
                and not self._is_decided(txn, found.set)
            ):
                self._drop_set(txn)
            self.drop_attempts([key for key in self.attempts if key[0] <= epoch])
            await self.save()
            return {"decided": decided}

    async def drop(self, txn: int | None) -> dict[str, Any]:
        """An operator drops a prepared set, or all that is staged and remembered of the producer."""
        async with self._turn:
            dropped = 0
            for number, found in list(self.state.sets.items()):
                if txn in (None, number):
                    dropped += sum(total.count for total in found.topics.values()) if found.state != APPLIED else 0
                    apply = self.applies.pop(number, None)
                    if apply is not None:
                        apply.cancel()
                    self._drop_set(number)
            self.drop_attempts([key for key in self.attempts if txn in (None, key[1])])
            for number in [number for number in self.state.decisions if txn in (None, number)]:
                self.state.decisions[number].done = True
            self.changed()
            logger.warning("STAGE(%s): dropped by an operator, %d rows that were not applied", self.name, dropped)
            await self.save()
            return {"dropped_rows": dropped}

    def _drop_set(self, txn: int) -> None:
        """Forget a set. Its files are deleted once the state is saved: a set without files would be damage."""
        del self.state.sets[txn]
        self.changed()
        self._staging.release(self, txn)
        self._dropped += self.sealed.pop(txn, [])

    def drop_attempts(self, keys: list[tuple[int, int, str]]) -> None:
        """Forget attempts; their files are deleted."""
        dropped = [self.attempts.pop(key) for key in keys]
        self._staging.dropped(sum(attempt.size for attempt in dropped))
        self._discard(dropped)

    def expire(self, now: int, timeout: int) -> None:
        """Drop the attempts that nobody has added to for so long."""
        old = [key for key, attempt in self.attempts.items() if now - attempt.touched > timeout and not attempt.closed]
        if old:
            logger.warning("STAGE(%s): %d attempts are dropped after --stage-timeout", self.name, len(old))
            self.drop_attempts(old)

    def _discard(self, attempts: list[Attempt]) -> None:
        # Also those without a whole chunk: a write that failed, or the power, may have left an empty file.
        paths = [attempt.path for attempt in attempts]
        self._staging.count_bytes(-sum(attempt.size for attempt in attempts))
        if paths and not self._broker.disk.closing:
            self._staging.submit(partial(remove_files, self._broker.disk, paths), self._discarded)

    def _discarded(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            # The next start deletes them.
            logger.error("STAGE(%s): cannot delete files in %s - %s", self.name, self.folder, error)

    # --- For operators ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        state, now = self.state, self._broker.clock.now()
        staging = list(self.attempts.values())
        return {
            "producer": self.name,
            "home": state.home,
            "epoch": self._epoch,
            "applied": state.applied,
            "told": state.told,
            "decided": _shown(state.last_decision),
            "staging": {
                "attempts": len(staging),
                "rows": sum(attempt.rows for attempt in staging),
                "bytes": sum(attempt.size for attempt in staging),
                "oldest_seconds": max(((now - attempt.touched) // 1_000_000_000 for attempt in staging), default=0),
            },
            "sets": [
                {
                    "txn": txn,
                    "epoch": found.epoch,
                    "set": found.set,
                    "state": found.state,
                    "bytes": found.size,
                    "time": found.time,
                    "topics": {topic: total.count for topic, total in found.topics.items()},
                }
                for txn, found in state.sets.items()
                if found.state != APPLIED
            ],
        }


def _answer(name: str, found: Prepared | None, *, repeat: bool = False) -> dict[str, Any]:
    assert found is not None
    topics = {topic: msgspec.to_builtins(total) for topic, total in found.topics.items()}
    return {"set": name, "topics": topics, "repeat": repeat}


def _shown(decision: Decision | None) -> dict[str, Any] | None:
    return None if decision is None else msgspec.to_builtins(decision)
