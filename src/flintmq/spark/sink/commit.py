"""The driver's side of a staged write: one decision, then every broker makes its rows visible.

    PREPARE   at every broker used: the attempts that count, sealed and synced; the rest is dropped
    DECIDE    at the home: which sets are the batch. Once for ever; from here on the batch is committed
    APPLY     at every broker used: its set is published
    DONE      at the home

A batch that runs again finds the decision of the first time, completes it, and is compared with it: by the offsets of
the batch where both are known and name its rows, else by sums over the rows, which do not depend on their order. So a
batch without rows is decided, too: when it runs again it may have some.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flintmq.errors import ConnectError, FlintError, PublishError
from flintmq.spark.sink.home import Checkpoint
from flintmq.spark.sink.staging import LOST, Broker, Calls, Write, check_witness

__all__ = ["Commit", "Staged"]

logger = logging.getLogger("flintmq.spark")


class Staged:
    """What a task staged; part of its message to the driver, which knows nothing else."""

    def __init__(
        self, write: Write, home: Broker, rows: int, epoch: int, broker: Broker | None, attempt: str, chunks: int
    ) -> None:
        self.write = write
        self.home = home
        self.rows = rows
        self.epoch = epoch
        #: None: no rows, and nothing was staged.
        self.broker = broker
        self.attempt = attempt
        self.chunks = chunks


class Commit:
    """The end of one write, from the messages of its tasks."""

    def __init__(self, calls: Calls, staged: Sequence[Staged], brokers: Sequence[Broker]) -> None:
        self._calls = calls
        self._staged = [found for found in staged if found.broker is not None]
        self._write, self._home = staged[0].write, staged[0].home
        #: Tasks that have to find the home by themselves may see different brokers.
        self._homes = {found.home.node: found.home for found in staged}
        self._brokers = {broker.node: broker for broker in brokers}
        self._used: dict[str, Broker] = {}
        for found in self._staged:
            assert found.broker is not None
            self._used[found.broker.node] = found.broker
        self._epoch = 0

    def run(self, checkpoint: Checkpoint, skip: bool) -> None:
        """Commit, or find that it is committed. Raises before the decision, or when a decided set is not applied."""
        write, calls = self._write, self._calls
        if len(self._homes) > 1:
            raise PublishError(
                f"{write}: its tasks found two homes, {' and '.join(map(str, self._homes.values()))}: name one of them "
                "by the option home",
                code="E_STAGE_HOME",
            )
        if not self._used and write.is_nameless:
            return
        # Again, and not only in the tasks: a batch without rows must be compared, too, with what it was the first time.
        opened = calls.call(self._home, "open", **write._asdict())
        self._epoch = opened["epoch"]
        last = opened.get("decided")
        if last is not None and not last["done"]:
            self._complete(last)
        is_noted = not write.is_nameless and checkpoint.query == write.producer
        if is_noted:
            self._check_note(checkpoint, last)
        elif not write.is_nameless:
            self._ask_witnesses(last)
        sets, topics = self._prepare()
        offsets = checkpoint.offsets(write.txn, write.producer)
        mark = fingerprint(offsets.digest, topics)
        answer = calls.call(
            self._home,
            "decide",
            producer=write.producer,
            epoch=self._epoch,
            txn=write.txn,
            nodes=sets,
            print=mark,
        )
        decided = answer["decided"]
        if decided["nodes"] == sets and decided["print"] == mark:
            unused = [node for node in self._brokers if node not in sets]
            is_noted = is_noted and self._note(checkpoint)
            if not is_noted and not write.is_nameless:
                # Before a row is visible: if the home forgets the decision, somebody else must know of it.
                self._drop(unused, told=write.txn)
                unused = []
            self._complete(decided)
            self._drop(unused)
            return
        # This batch was committed before.
        self._complete(decided)
        self._drop(self._brokers.keys() | self._used.keys())
        if not same(decided["print"], mark, by_offsets=offsets.name_rows):
            text = (
                f"batch {write.txn} was committed with other rows: the checkpoint went back (restore it, or begin a "
                "new one after the rows of that batch), or rows differ at each computation (set repeatedBatch=skip)"
            )
            if not skip:
                raise PublishError(text, code="E_STAGE_DECIDED")
            logger.warning("%s. It is skipped", text)

    def _check_note(self, checkpoint: Checkpoint, last: Mapping[str, Any] | None) -> None:
        """PublishError if the checkpoint notes that this batch is decided, and the home does not know it."""
        write = self._write
        if (last["txn"] if last else -1) < write.txn <= checkpoint.read_decided(write.producer):
            raise PublishError(
                f"{write} was committed, as {checkpoint.decided_path} notes, and its home {self._home} does not know "
                f"it: {LOST}. To publish the batch once more, delete that file",
                code="E_STAGE_HOME",
            )

    def _ask_witnesses(self, last: Mapping[str, Any] | None) -> None:
        """PublishError if a broker that no task has asked knows of a later decision than the home."""
        for node, broker in self._brokers.items():
            if node == self._home.node or node in self._used:
                continue
            try:
                known = self._calls.known(broker, self._write.producer)
            except ConnectError as exc:
                logger.info("%s: nsqd %s does not say what it knows: %s", self._write, broker, exc)
                continue
            if known is not None:
                check_witness(broker, known, self._write, self._home, last)

    def _note(self, checkpoint: Checkpoint) -> bool:
        """Note in the checkpoint that this batch is decided; return whether that was possible."""
        try:
            checkpoint.write_decided(self._write.producer, self._write.txn)
        except OSError as exc:
            logger.warning("%s cannot be noted in the checkpoint (%s): brokers are told", self._write, exc)
            return False
        return True

    def abort(self) -> None:
        """Drop what was staged, unless it is decided: Spark aborts also after a commit that failed on its way."""
        write = self._write
        epoch = max((found.epoch for found in self._staged), default=0)
        if not epoch:
            return
        try:
            answer = self._calls.call(self._home, "abort", producer=write.producer, epoch=epoch, txn=write.txn)
        except FlintError as exc:
            # Whether it is decided is not known. The next run of the query, or the brokers' timeout, drops it.
            logger.warning("%s: what was staged stays for now: %s", write, exc)
            return
        if not answer.get("decided"):
            self._epoch = epoch
            self._drop((self._brokers.keys() | self._used.keys()) - {self._home.node})

    def _prepare(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Seal the attempts that count; return the set of each node, and the sums of all rows by topic."""
        sets: dict[str, str] = {}
        topics: dict[str, dict[str, int]] = {}
        for node, broker in self._used.items():
            winners = [
                [found.attempt, found.chunks, found.rows]
                for found in self._staged
                if found.broker is not None and found.broker.node == node
            ]
            answer = self._calls.call(
                broker,
                "prepare",
                producer=self._write.producer,
                epoch=self._epoch,
                txn=self._write.txn,
                winners=winners,
            )
            sets[node] = answer["set"]
            for topic, sums in answer["topics"].items():
                total = topics.setdefault(topic, {"count": 0, "bytes": 0, "sum": 0})
                for name in total:
                    total[name] = (total[name] + int(sums[name])) % 2**64
        expected = sum(found.rows for found in self._staged)
        if (found := sum(sums["count"] for sums in topics.values())) != expected:
            raise PublishError(
                f"{self._write}: brokers have {found} rows, and Spark's tasks wrote {expected}", code="E_STAGE_CONTENT"
            )
        return sets, topics

    def _complete(self, decided: Mapping[str, Any]) -> None:
        """Apply a decision everywhere it names."""
        if decided["done"]:
            return
        producer, txn = self._write.producer, decided["txn"]
        for node, found in decided["nodes"].items():
            broker = self._used.get(node) or self._brokers.get(node)
            try:
                if broker is None:
                    raise ConnectError(f"node {node} is not among the brokers that answer")
                self._calls.call(broker, "apply", producer=producer, txn=txn, set=found, home=self._home.node)
            except ConnectError as exc:
                raise ConnectError(
                    f"batch {txn} of {producer} is committed, and its rows at node {node} are not yet visible: {exc}. "
                    "Nothing is lost: start that broker, and start the query again"
                ) from exc
        self._calls.call(self._home, "done", producer=producer, txn=txn)

    def _drop(self, nodes: Iterable[str], told: int = -1) -> None:
        """Have brokers drop what else they hold of this batch, as far as they answer; ``told`` is for them to remember.

        A home that is restored from an old backup has forgotten its last decisions. Who was told of them remembers.
        """
        write = self._write
        more = {"told": told} if told >= 0 else {}
        for node in sorted(nodes):
            broker = self._used.get(node) or self._brokers[node]
            try:
                self._calls.once(broker, "abort", producer=write.producer, epoch=self._epoch, txn=write.txn, **more)
            except FlintError as exc:
                logger.info("%s: nsqd %s keeps what it staged until its timeout: %s", write, broker, exc)


def fingerprint(offsets: str, topics: Mapping[str, Mapping[str, int]]) -> str:
    """Return what a batch is known by: a digest of its offsets, if they can be read, and one of its rows' sums."""
    sums = hashlib.sha256(json.dumps(topics, sort_keys=True).encode()).hexdigest()
    return f"{offsets or '-'}:{sums}"


def same(one: str, other: str, *, by_offsets: bool) -> bool:
    """Tell whether two fingerprints are of the same batch. Where both have offsets these must be the same, and if
    offsets name rows (``by_offsets``) that is enough; otherwise the sums must be the same, too."""
    (offsets, _, sums), (other_offsets, _, other_sums) = one.partition(":"), other.partition(":")
    if "-" not in (offsets, other_offsets):
        if offsets != other_offsets:
            return False
        if by_offsets:
            return True
    return sums == other_sums
