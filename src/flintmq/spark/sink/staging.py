"""A task's side of a staged write: its rows are stored at a broker, and nobody sees them.

    OPEN    at the query's home: the epoch of this execution; an execution that was superseded is refused
    BEGIN   at the task's broker: how many chunks of this attempt it has
    PUT     one chunk after the other, numbered

An Attempt never makes rows visible. When the function upstream fails, a task's input simply ends: only the driver,
whose commit has the messages of tasks that succeeded, knows which attempts are whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flintmq.errors import ConnectError, HttpError, OptionError, PublishError
from flintmq.spark.shipped.net import Refused, Web
from flintmq.spark.shipped.options import SinkOptions
from flintmq.spark.sink.chunks import Chunk

__all__ = ["LOST", "Attempt", "Broker", "Calls", "Write", "check_witness"]

logger = logging.getLogger("flintmq.spark")

#: Statuses that may pass: too many attempts, stopping or starting, staged bytes at their limit.
_PASSING = (429, 503, 507)
#: Another broker is at the address: the one that is meant may come back to it.
_ELSEWHERE = 421
#: Calls whose time depends on how many rows there are.
_LONG = ("prepare", "apply")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
#: What is wrong, and what to do, when a home does not know what it decided.
LOST = (
    "the home lost its decisions, as when it was restored from an old backup. Restore a newer one, or begin with a new "
    "checkpoint after the last batch that was committed"
)


class _Elsewhere(ConnectError):
    """Another broker answers at the address of the one that was asked."""


class Broker(NamedTuple):
    """A broker that can stage: its identity, and where it is asked."""

    node: str
    http: str
    tcp: str = ""

    def __str__(self) -> str:
        return f"{self.tcp or self.http} ({self.node})"


class Write(NamedTuple):
    """The names of one execution of one write."""

    #: A query's id, a writeId, or made for this write.
    producer: str
    #: One start of a query.
    run: str
    #: One execution of a batch.
    job: str
    #: The batch of a stream; 0 for a batch write.
    txn: int

    @property
    def is_nameless(self) -> bool:
        """Was the producer made for this execution, so that nobody can repeat it?"""
        return self.producer == self.job

    def __str__(self) -> str:
        return f"batch {self.txn} of {self.producer}"


class Calls:
    """The calls ``/stage/<verb>``. All of them may be repeated, and are until an answer comes or time is up."""

    def __init__(
        self,
        options: SinkOptions,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._web = Web(options.network)
        network = options.network
        #: Seconds for which a broker that is away, or full, is asked again.
        self.patience = network.timeout if network.retries else 0.0
        self._sleep = sleep
        self._clock = clock

    def close(self) -> None:
        self._web.close()

    def call(self, broker: Broker, verb: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a call. PublishError is a refusal, ConnectError says that nobody answered in time.

        A broker that is busy with the rows of a large batch may take longer than an answer should: as long as it
        answers others it is waited for.
        """
        data = _encode(broker, body)
        while True:
            try:
                answer: dict[str, Any] = self.insist(
                    broker, lambda: self._web.ask("POST", broker.http, f"/stage/{verb}", data)
                )
                return answer
            except ConnectError as exc:
                if verb not in _LONG or isinstance(exc.__cause__, _Elsewhere) or not self._answers(broker):
                    raise

    def _answers(self, broker: Broker) -> bool:
        try:
            self._web.request("GET", broker.http, "/ping").read()
        except (ConnectError, HttpError, OSError):
            return False
        return True

    def once(self, broker: Broker, verb: str, **body: Any) -> dict[str, Any]:
        """The same, without asking again."""
        try:
            return self._web.ask("POST", broker.http, f"/stage/{verb}", _encode(broker, body))
        except Refused as exc:
            raise refusal(broker, exc) from exc

    def put(self, broker: Broker, chunk: Chunk, number: int, query: dict[str, Any]) -> None:
        """Send a chunk, once; ConnectError without an answer."""
        query = {**query, "chunk": number, "topic": chunk.topic}
        if chunk.delay:
            query["defer"] = chunk.delay
        self._web.ask("POST", broker.http, "/stage/put", chunk.body, **query)

    def known(self, broker: Broker, producer: str) -> dict[str, Any] | None:
        """Return what a broker knows of a producer: its entry in ``GET /stage``. Asked once."""
        try:
            found = self._web.ask("GET", broker.http, "/stage", producer=producer)
        except Refused as exc:
            if exc.status in _PASSING:
                raise ConnectError(f"nsqd {broker}: {exc.reason}") from exc
            if exc.status == 403:
                raise OptionError(
                    f"nsqd {broker} does not tell the owner of nsq.http.token whether it keeps the decisions of "
                    f"{producer}: the token needs the rights read and publish"
                ) from exc
            raise refusal(broker, exc) from exc
        for entry in found.get("producers") or []:
            if entry.get("producer") == producer:
                return dict(entry)
        return None

    def insist(self, broker: Broker, ask: Callable[[], Any]) -> Any:
        """Ask until there is an answer that stays."""
        pause = self.pauses(broker)
        while True:
            try:
                return ask()
            except Refused as exc:
                if exc.status == _ELSEWHERE:
                    pause(_Elsewhere(exc.reason))
                    continue
                if exc.status not in _PASSING:
                    raise refusal(broker, exc) from exc
                pause(exc)
            except ConnectError as exc:
                pause(exc)

    def pauses(self, broker: Broker) -> Callable[[Exception], None]:
        """Return a function that sleeps a little longer at each call, and raises when patience is at its end."""
        give_up = self._clock() + self.patience
        seconds = _FIRST_PAUSE

        def pause(exc: Exception) -> None:
            nonlocal seconds, give_up
            if isinstance(exc, Refused) and (told := exc.details.get("retry_after")) and self.patience:
                # It is there, and says when: that is no reason to give up, however long it takes.
                logger.warning("nsqd %s: %s", broker, exc.reason)
                self._sleep(float(told))
                give_up = self._clock() + self.patience
                return
            if self._clock() + seconds > give_up:
                if isinstance(exc, Refused):
                    raise refusal(broker, exc) from exc
                raise ConnectError(f"nsqd {broker} did not answer in {self.patience:g} s: {exc}") from exc
            self._sleep(seconds)
            seconds = min(_LONGEST_PAUSE, seconds * 2)

        return pause


def _encode(broker: Broker, body: dict[str, Any]) -> bytes:
    """Return the body of a call to this broker: an address may come to be another one's while a batch runs."""
    return json.dumps({**body, "node": broker.node}).encode()


def refusal(broker: Broker, exc: Refused) -> PublishError:
    """Return the error for a call that a broker refused; its ``code`` is what the broker said."""
    code = exc.reason.partition(" ")[0].rstrip(":")
    return PublishError(f"nsqd {broker} refused to stage: {exc.reason}", code=code)


def check_witness(
    broker: Broker, about: Mapping[str, Any], write: Write, home: Broker, decided: Mapping[str, Any] | None
) -> None:
    """PublishError if a broker knows of a later decision than the home's last: then the home forgot it."""
    last = int(decided["txn"]) if decided else -1
    applied, told = int(about.get("applied", -1)), int(about.get("told", -1))
    if max(applied, told) > last:
        how = "has rows of" if applied > last else "was told of"
        raise PublishError(
            f"nsqd {broker} {how} batch {max(applied, told)} of {write.producer}, but the last batch that its home "
            f"{home} knows is {last if decided else 'none'}: {LOST}",
            code="E_STAGE_HOME",
        )


def ranked(brokers: Iterable[Broker], key: str) -> list[Broker]:
    """Return brokers in an order that depends on the key; when one comes or goes, the others keep theirs."""
    return sorted(brokers, key=lambda broker: hashlib.sha256(f"{key} {broker.node}".encode()).digest(), reverse=True)


class Attempt:
    """One try of one task: its chunks at one broker."""

    def __init__(self, calls: Calls, write: Write, home: Broker, choices: list[Broker]) -> None:
        self.chunks = 0
        self.epoch = 0
        self.id = uuid.uuid4().hex
        self._calls = calls
        self._write = write
        self._home = home
        #: Where rows may go; the first that answers is taken.
        self._choices = choices
        self._decided: dict[str, Any] | None = None
        self.broker: Broker | None = None

    def open(self) -> None:
        """Ask for the epoch, and find a broker for the rows."""
        write = self._write
        answer = self._calls.call(self._home, "open", **write._asdict())
        self.epoch, self._decided = answer["epoch"], answer.get("decided")
        for number, broker in enumerate(self._choices):
            try:
                stored = self._begin(broker)
            except ConnectError as exc:
                # Nothing of this attempt is there yet: the rows may as well go elsewhere.
                if number + 1 == len(self._choices):
                    raise
                logger.warning("%s: its rows go to another broker", exc)
            else:
                assert stored == 0, "an attempt has a new name"
                self.broker = broker
                return

    def put(self, chunk: Chunk) -> None:
        """Store a chunk. When the connection is lost, the broker is asked what it has, and nothing is stored twice."""
        if self.broker is None:
            self.open()
        broker = self.broker
        assert broker is not None
        query = {
            "producer": self._write.producer,
            "epoch": self.epoch,
            "txn": self._write.txn,
            "attempt": self.id,
        }
        pause = self._calls.pauses(broker)
        while True:
            try:
                self._calls.put(broker, chunk, self.chunks, query)
                break
            except Refused as exc:
                if exc.status == 413:
                    text = f"nsqd {broker}: {chunk.too_large(exc.reason)}"
                    raise PublishError(text, code=refusal(broker, exc).code) from exc
                if exc.status not in _PASSING:
                    raise refusal(broker, exc) from exc
                pause(exc)
            except ConnectError as exc:
                pause(exc)
                if self._begin(broker) > self.chunks:
                    # It was stored, and only the answer was lost.
                    break
        self.chunks += 1

    def _begin(self, broker: Broker) -> int:
        """Return how many chunks of this attempt a broker has."""
        write = self._write
        try:
            answer = self._calls.call(
                broker,
                "begin",
                producer=write.producer,
                epoch=self.epoch,
                txn=write.txn,
                attempt=self.id,
                decided=self._decided,
            )
        except PublishError as exc:
            if exc.code == "E_STAGE_FENCED":
                self._check_home(broker, exc)
            raise
        stored = answer["next"]
        check_witness(broker, answer, write, self._home, self._decided)
        if stored < self.chunks:
            raise PublishError(
                f"nsqd {broker} has {stored} of {self.chunks} chunks that it had taken: it lost power, and the task is "
                "tried again",
                code="E_STAGE_GAP",
            )
        return int(stored)

    def _check_home(self, broker: Broker, refused: PublishError) -> None:
        """A broker knows a later epoch. PublishError says so if the home has given none to another driver."""
        opened = self._calls.call(self._home, "open", **self._write._asdict())
        if opened["epoch"] == self.epoch and broker.node != self._home.node:
            raise PublishError(
                f"nsqd {broker} knows a later epoch of {self._write.producer} than {self.epoch}, the last one that its "
                f"home {self._home} has given: {LOST}",
                code="E_STAGE_HOME",
            ) from refused
