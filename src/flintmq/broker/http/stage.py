"""HTTP routes for staged publishes: ``/stage/<verb>``. What they mean is in ``docs/staging.md``.

Bodies are JSON, but for the chunks themselves: those are what ``/mpub?binary=true`` takes. What is refused is answered
with ``{"message": "E_STAGE_FENCED …"}``: a code, and a sentence that says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flintmq.broker.http.publish import check_binary
from flintmq.broker.observe.steps import in_turns
from flintmq.broker.stage.producer import Producer
from flintmq.broker.stage.state import Decision, valid_attempt
from flintmq.errors import UNREADABLE, HttpError, LimitError, StageError
from flintmq.http.arguments import Arguments, is_number
from flintmq.http.site import ADMIN, PUBLISH, READ, Request, Route
from flintmq.protocol.wire import valid_name

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["routes"]

#: The largest body of a call that is no chunk, and the most winners that it may name.
CALL_BYTES = 4 << 20
MOST_WINNERS = 100_000
#: The largest print of a decision, and its largest list of nodes: the last 64 of each producer are kept in memory.
PRINT_BYTES = 64 << 10
NODES_BYTES = 256 << 10
#: The longest name of a run or a job: the last 256 of each producer are kept in memory.
LONGEST_NAME = 512
#: The largest number that is taken: all of JSON's readers know it exactly, and the state's file can hold what follows.
LARGEST = (1 << 53) - 1
_MS = 1_000_000
_PRODUCER = re.compile(r"[!-~]{1,128}")


class _Named(msgspec.Struct, kw_only=True):
    producer: str
    #: Who is meant, by its identity; nothing: whoever is at this address.
    node: str = ""


class _Open(_Named):
    run: str
    job: str
    txn: int


class _Begin(_Named):
    epoch: int
    txn: int
    attempt: str
    decided: Decision | None


class _Prepare(_Named):
    epoch: int
    txn: int
    winners: list[tuple[str, int, int]]


class _Decide(_Named):
    epoch: int
    txn: int
    nodes: dict[str, str]
    print: Any = None


class _Apply(_Named):
    txn: int
    set: str
    #: Who decided it, by its identity.
    home: str = ""


class _Done(_Named):
    txn: int


class _Abort(_Named):
    epoch: int
    txn: int
    #: The highest transaction that is decided, for a node that is not the home to remember; -1: none is told.
    told: int = -1


_C = TypeVar("_C", bound=_Named)


def routes(broker: Broker) -> list[Route]:
    api = _StageApi(broker)
    return [
        Route("POST", "/stage/open", api.call(_Open, api.open), PUBLISH),
        Route("POST", "/stage/begin", api.call(_Begin, api.begin), PUBLISH, unlogged=True),
        Route("POST", "/stage/put", api.put, PUBLISH, unlogged=True),
        Route("POST", "/stage/prepare", api.call(_Prepare, api.prepare), PUBLISH),
        Route("POST", "/stage/decide", api.call(_Decide, api.decide), PUBLISH),
        Route("POST", "/stage/apply", api.call(_Apply, api.apply), PUBLISH),
        Route("POST", "/stage/done", api.call(_Done, api.done), PUBLISH),
        Route("POST", "/stage/abort", api.call(_Abort, api.abort), PUBLISH),
        Route("GET", "/stage", api.describe, READ),
        Route("DELETE", "/stage", api.drop, ADMIN),
    ]


class _StageApi:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._staging = broker.stage

    def call(
        self, kind: type[_C], handle: Callable[[_C], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[dict[str, Any]]]:
        """A handler that reads a JSON body of this kind."""
        decoder = msgspec.json.Decoder(kind)

        async def handler(request: Request) -> dict[str, Any]:
            body = await request.body(CALL_BYTES)
            try:
                asked = decoder.decode(body)
            except UNREADABLE as exc:
                raise HttpError(400, f"INVALID_BODY: {exc}") from exc
            _check_producer(asked.producer)
            self._check_node(asked.node)
            return await _translated(handle(asked))

        return handler

    async def open(self, asked: _Open) -> dict[str, Any]:
        _check_numbers(asked.txn)
        if max(len(asked.run), len(asked.job)) > LONGEST_NAME:
            raise HttpError(400, f"INVALID_BODY: run and job have at most {LONGEST_NAME} characters")
        self._staging.check_memory()
        return await self._staging.producer(asked.producer).open(asked.run, asked.job, asked.txn)

    async def begin(self, asked: _Begin) -> dict[str, Any]:
        _check_attempt(asked.attempt)
        _check_numbers(asked.epoch, asked.txn)
        self._staging.check_memory()
        producer = self._staging.producer(asked.producer)
        return await producer.begin(asked.epoch, asked.txn, asked.attempt, asked.decided)

    async def prepare(self, asked: _Prepare) -> dict[str, Any]:
        _check_numbers(asked.epoch, asked.txn)
        _check_winners(asked.winners)
        self._staging.check_memory()
        return await self._existing(asked).prepare(asked.epoch, asked.txn, asked.winners)

    async def decide(self, asked: _Decide) -> dict[str, Any]:
        _check_numbers(asked.epoch, asked.txn)
        _check_size("print", asked.print, PRINT_BYTES)
        _check_size("nodes", asked.nodes, NODES_BYTES)
        self._staging.check_memory()
        return await self._existing(asked).decide(asked.epoch, asked.txn, asked.nodes, asked.print)

    async def apply(self, asked: _Apply) -> dict[str, Any]:
        _check_numbers(asked.txn)
        return await self._existing(asked).apply(asked.txn, asked.set, asked.home)

    async def done(self, asked: _Done) -> dict[str, Any]:
        _check_numbers(asked.txn)
        return await self._existing(asked).done(asked.txn)

    async def abort(self, asked: _Abort) -> dict[str, Any]:
        _check_numbers(asked.epoch, asked.txn, max(asked.told, 0))
        if asked.told >= 0:
            self._staging.check_memory()
            return await self._staging.producer(asked.producer).abort(asked.epoch, asked.txn, asked.told)
        if asked.producer not in self._staging.producers:
            return {"decided": False}
        return await self._existing(asked).abort(asked.epoch, asked.txn)

    def _existing(self, asked: _Named) -> Producer:
        return self._staging.existing(asked.producer)

    def _check_node(self, asked: str) -> None:
        """Refuse what is meant for another node: epochs and decisions of a producer are in one place alone."""
        mine = self._broker.node.hex()
        if asked not in ("", mine):
            raise HttpError(
                421,
                f"E_STAGE_NODE this is node {mine}, and {asked[:80]} was asked for: its address belongs to another "
                "broker now. Look for it, and ask it again",
            )

    # --- Chunks ----------------------------------------------------------------------------------------------------

    async def put(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        name = arguments.text("producer")
        _check_producer(name)
        attempt = arguments.text("attempt")
        _check_attempt(attempt)
        epoch, txn, chunk = (_number(arguments, name) for name in ("epoch", "txn", "chunk"))
        topic = arguments.text("topic")
        if not valid_name(topic):
            raise HttpError(
                400, "INVALID_TOPIC: 1 to 64 letters, digits and ._- make one; #ephemeral may follow, and counts"
            )
        if self._broker.creation is not None:
            try:
                # It is made when the rows are applied, and then nothing may stand in the way.
                self._broker.creation.check_topic(topic)
            except LimitError as exc:
                raise HttpError(exc.http_status, str(exc)) from exc
        delay = _number(arguments, "defer") if "defer" in arguments else 0
        if delay and delay * _MS > self._settings_of(topic).max_defer:
            raise HttpError(400, "INVALID_DEFER")
        options = self._broker.options
        body = await request.body(
            options.max_body_size,
            f"BODY_TOO_BIG: a chunk for {topic} has more than the {options.max_body_size} bytes of --max-body-size",
        )
        try:
            _, end, count = check_binary(body, 0, len(body), options)
        except HttpError as exc:
            raise HttpError(exc.status, _what_is_wrong(exc, topic, body, options.max_msg_size)) from exc
        try:
            producer = self._staging.existing(name)
        except StageError as exc:
            raise HttpError(exc.status, str(exc), **exc.details) from exc
        await _translated(producer.put((epoch, txn, attempt), chunk, topic, delay, body, end, count))
        return {}

    def _settings_of(self, topic: str) -> Any:
        found = self._broker.topics.get(topic)
        return found.settings if found is not None else self._broker.settings.topic(topic)

    # --- Operators -------------------------------------------------------------------------------------------------

    async def describe(self, request: Request) -> dict[str, Any]:
        return await in_turns(self._staging.describe(request.arguments().get("producer")))

    async def drop(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        txn = _number(arguments, "txn") if "txn" in arguments else None
        return await _translated(self._staging.drop(arguments.text("producer"), txn))


def _what_is_wrong(error: HttpError, topic: str, body: bytearray, most: int) -> str:
    """Return the code of an error and which message of a chunk it is about. Looks at each: nothing of it was stored."""
    pos = 4
    while pos + 4 <= len(body):
        size = int.from_bytes(body[pos : pos + 4], "big")
        if size > most:
            return f"{error.code}: a message for {topic} has {size} bytes, and --max-msg-size is {most}"
        if not size:
            return f"{error.code}: a message for {topic} is empty"
        pos += 4 + size
    return f"{error.code}: a chunk for {topic} is no body of /mpub?binary=true"


_T = TypeVar("_T")


async def _translated(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except StageError as exc:
        raise HttpError(exc.status, str(exc), **exc.details) from exc


def _check_producer(name: str) -> None:
    if not _PRODUCER.fullmatch(name):
        raise HttpError(400, "INVALID_PRODUCER: 1 to 128 printable characters without spaces are needed")


def _check_attempt(name: str) -> None:
    if not valid_attempt(name):
        raise HttpError(400, "INVALID_ATTEMPT: 1 to 64 letters, digits, _ or - are needed")


def _check_numbers(*numbers: int) -> None:
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise HttpError(400, f"INVALID_BODY: epoch and txn are numbers from 0 to {LARGEST}")


def _check_winners(winners: list[tuple[str, int, int]]) -> None:
    if len(winners) > MOST_WINNERS:
        raise HttpError(400, f"INVALID_BODY: more than {MOST_WINNERS} winners")
    names = set()
    for name, chunks, rows in winners:
        _check_attempt(name)
        if min(chunks, rows) < 0 or max(chunks, rows) > LARGEST:
            raise HttpError(400, f"INVALID_BODY: chunks and rows of attempt {name} are numbers from 0 to {LARGEST}")
        names.add(name)
    if len(names) != len(winners):
        raise HttpError(400, "INVALID_BODY: an attempt is named twice among the winners: its rows would count twice")


def _check_size(what: str, value: object, most: int) -> None:
    """Refuse what takes too much, or holds a number that the state's file cannot."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except OverflowError as exc:
        raise HttpError(400, f"INVALID_BODY: {what} has a number of more than 64 bits") from exc
    if size > most:
        raise HttpError(400, f"INVALID_BODY: {what} takes more than {most} bytes")


def _number(arguments: Arguments, name: str) -> int:
    text = arguments.text(name)
    if not is_number(text) or int(text) > LARGEST:
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: a number from 0 to {LARGEST} is needed")
    return int(text)
