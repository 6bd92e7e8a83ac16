"""`nsq_to_nsq`: republish the messages of topics to other nsqds.

A message is finished when a destination has confirmed it, and requeued (with backoff) when that failed. Messages that
are here together go out together, in one command per destination; where one of them is refused, each is sent alone, so
that a bad one takes no other with it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from flintmq.client import Consumer, Message, Producer
from flintmq.errors import UNREADABLE, FlintError, PublishError
from flintmq.protocol import wire
from flintmq.tools._hosts import MODES, HostPool, Status
from flintmq.tools._program import (
    INT,
    STOP_SECONDS,
    STRING,
    STRINGS,
    Failures,
    Fatal,
    Progress,
    Source,
    client_options,
    connected,
    option,
    run_program,
    stop_on_signals,
    user_agent,
)

__all__ = ["ABOUT", "OPTIONS", "NsqToNsqOptions", "main"]

#: The line of `flintmq --help`.
ABOUT = "republish the messages of topics to other nsqds, with the flags of NSQ's nsq_to_nsq"

logger = logging.getLogger(__name__)

#: Most bytes in one command: well within a broker's default limit of 5 MiB.
_COMMAND_BYTES = 1 << 20
#: Seconds that a destination may take to connect or to answer.
_PUBLISH_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class NsqToNsqOptions(Source):
    program: ClassVar[str] = "nsq_to_nsq"

    topics: tuple[str, ...] = option(STRINGS, (), "topic to consume (repeatable)", flag="topic")
    channel: str = option(STRING, "nsq_to_nsq", "channel")
    destination_topic: str = option(STRING, "", "topic to publish to; by default that of the message")
    destination_nsqd_tcp_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqd to publish to, host:port (repeatable)", flag="destination-nsqd-tcp-address"
    )
    mode: str = option(STRING, "hostpool", "how a destination is chosen: round-robin, hostpool or epsilon-greedy")
    status_every: int = option(INT, 250, "results between two status lines; 0: none")
    require_json_field: str = option(STRING, "", "pass only messages that are JSON objects with this field")
    require_json_value: str = option(STRING, "", "and in which the field has this value")
    whitelist_json_fields: tuple[str, ...] = option(
        STRINGS,
        (),
        "pass this field of messages that are JSON objects, and no other (repeatable)",
        flag="whitelist-json-field",
    )
    producer_opts: tuple[str, ...] = option(
        STRINGS, (), "option of the producers, as name,value (repeatable)", flag="producer-opt"
    )

    def check(self) -> None:
        if not self.topics or not self.channel:
            raise Fatal("--topic and --channel are required")
        if not all(map(wire.valid_name, self.topics)):
            raise Fatal("--topic is invalid")
        if self.destination_topic and not wire.valid_name(self.destination_topic):
            raise Fatal("--destination-topic is invalid")
        if not wire.valid_name(self.channel):
            raise Fatal("--channel is invalid")
        self.check_source()
        if not self.destination_nsqd_tcp_addresses:
            raise Fatal("--destination-nsqd-tcp-address required")


OPTIONS = NsqToNsqOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `nsq_to_nsq`."""
    return run_program(NsqToNsqOptions, argv, lambda options: _Relay(options).run())


# --- JSON -------------------------------------------------------------------------------------------------------------


class Filter:
    """What `--require-json-field`, `--require-json-value` and `--whitelist-json-field` let through."""

    def __init__(self, field: str, value: str, fields: Sequence[str]) -> None:
        self._field = field
        self._value = value
        self._fields = fields
        self.is_on = bool(field or fields)
        try:
            self._number: float | None = float(value)
        except ValueError:
            self._number = None

    def apply(self, body: bytes) -> bytes | None:
        """Return the body to publish; None if the message is to be dropped. ValueError if it has failed."""
        try:
            content = _object(body)
        except ValueError:
            logger.error("Unable to decode json: %s", body[:500].decode(errors="replace"))
            return None
        if self._field and not self._passes(content):
            return None
        if not self._fields:
            return body
        kept = {key: _plain(content[key]) for key in self._fields if key in content}
        return _as_go(msgspec.json.encode(kept, order="deterministic"))

    def _passes(self, content: dict[str, Any]) -> bool:
        if self._field not in content:
            if self._value:
                raise ValueError("missing field to check required value")
            return False
        if not self._value:
            return True
        found = content[self._field]
        if isinstance(found, str):
            return found == self._value
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or self._number is None:
            return False
        try:
            return float(found) == self._number
        except OverflowError:
            return False


def _object(body: bytes) -> dict[str, Any]:
    """Return a JSON object, as lenient as Go's decoder: null is one without fields. ValueError if it is none."""
    try:
        content = msgspec.json.decode(body)
    except UNREADABLE:
        # What msgspec does not take: bytes that are not UTF-8, halves of surrogates, deep nesting, huge numbers.
        return {key: _value(text) for key, text in _fields(body).items()}
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


def _value(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # Too deep, or too large a number: it can be passed on all the same.
        return msgspec.Raw(text)


#: As in Go's decoder.
_DEEPEST = 10_000
_TOKEN = re.compile(
    r'[ \t\n\r]*+(?:([{}\[\]:,])|("(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+")'
    r"|(-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null))"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
#: How to decode what is not UTF-8: U+FFFD for each byte, where Python's own way has one for several.
_EACH_BYTE = "flintmq.each-byte"
codecs.register_error(_EACH_BYTE, lambda exc: ("\ufffd" * (exc.end - exc.start), exc.end))  # type: ignore[attr-defined]


def _fields(body: bytes) -> dict[str, bytes]:
    """Return the fields of a JSON object, each as JSON without white space. ValueError if it is none.

    There is no recursion. What is not a character becomes U+FFFD, as in Go.
    """
    text = body.decode(errors=_EACH_BYTE)
    fields: dict[str, bytes] = {}
    key = ""
    value: list[str] = []
    inside: list[str] = []
    # What may come: v a value, k a key, : and , themselves, e the end of the container that is open.
    allowed = "v"
    position, end = 0, len(text.rstrip(" \t\n\r"))
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError("not JSON")
        position = found.end()
        mark, string, _ = found.groups()
        token = _whole(string) if string else found[0].strip(" \t\n\r")
        kind = "v"
        if mark and mark in "}]":
            if "e" not in allowed or inside[-1] != mark:
                raise ValueError("not JSON")
            inside.pop()
            kind = "e"
        elif mark and mark in ":,":
            kind = mark
        elif string and "k" in allowed:
            kind = "k"
        if kind not in allowed or (not inside and kind == "v" and mark != "{"):
            raise ValueError("not a JSON object")
        is_open = bool(mark) and mark in "{["
        if is_open:
            inside.append("}" if mark == "{" else "]")
            if len(inside) > _DEEPEST:
                raise ValueError("exceeded max depth")
        if kind == "k" and len(inside) == 1:
            key = json.loads(token)
            value = []
        elif len(inside) > 1 or (len(inside) == 1 and (kind == "e" or (kind == "v" and not is_open))):
            value.append(token)
        if len(inside) == 1 and value and kind in "ve":
            fields[key] = "".join(value).encode()
        if not inside:
            allowed = ""
        elif is_open:
            allowed = "ke" if mark == "{" else "ve"
        elif kind == ",":
            allowed = "k" if inside[-1] == "}" else "v"
        else:
            allowed = {"k": ":", ":": "v"}.get(kind, ",e")
    if allowed:
        raise ValueError("JSON that ends too early")
    return fields


def _whole(string: str) -> str:
    """Return a JSON string in which halves of surrogates are U+FFFD."""
    if "\\u" not in string:
        return string
    return msgspec.json.encode(_SURROGATE.sub("\ufffd", json.loads(string))).decode()


def _plain(value: Any) -> Any:
    """Return a number of the top level that is whole as an integer, as NSQ's tool prints it."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 2**63:
        return int(value)
    return value


def _as_go(text: bytes) -> bytes:
    """Escape what Go's JSON encoder escapes in strings; outside of strings none of these can be."""
    for plain, escaped in (
        (b"&", b"\\u0026"),
        (b"<", b"\\u003c"),
        (b">", b"\\u003e"),
        ("\u2028".encode(), b"\\u2028"),
        ("\u2029".encode(), b"\\u2029"),
    ):
        if plain in text:
            text = text.replace(plain, escaped)
    return text


# --- Destinations -----------------------------------------------------------------------------------------------------


class _Destination:
    """One nsqd to publish to. It is dialled when there is something for it."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        self.address = address
        self._options = options
        self._producer: Producer | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> Producer:
        async with self._starting:
            if self._producer is None:
                producer = Producer(self.address, **self._options)
                await producer.start()
                self._producer = producer
            return self._producer

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()


class _Relay:
    def __init__(self, options: NsqToNsqOptions) -> None:
        self._options = options
        addresses = list(dict.fromkeys(options.destination_nsqd_tcp_addresses))
        given = client_options("producer-opt", options.producer_opts) | {"user_agent": user_agent(options.program)}
        given.setdefault("timeout", _PUBLISH_SECONDS)
        self._destinations = {address: _Destination(address, given) for address in addresses}
        self._pool = HostPool(addresses, options.mode if options.mode in MODES else "round-robin")
        self._filter = Filter(options.require_json_field, options.require_json_value, options.whitelist_json_fields)
        several = len(addresses) > 1
        self._status = Status(options.status_every, "[aggregate]:")
        self._statuses = {each: Status(options.status_every if several else 0, f"[{each}]" + ":") for each in addresses}
        self._progress = Progress(options.program, "republished")
        self._failures = Failures()
        self._consumers: list[Consumer[bytes]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self) -> int:
        options = self._options
        stop_on_signals(self._stop)
        given = options.consumer_options() | {"on_error": self._failures}
        # A destination that is down for a quarter of an hour must not cost its messages.
        given.setdefault("max_attempts", 0)
        tasks: list[asyncio.Task[None]] = []
        try:
            with self._progress.shown():
                for topic in dict.fromkeys(options.topics):
                    consumer: Consumer[bytes] = Consumer(topic, options.channel, **given)
                    self._consumers.append(consumer)
                    await consumer.start()
                    if self._is_over:
                        consumer.stop()
                    tasks.append(asyncio.create_task(self._republish_all(consumer)))
                    await connected(consumer, options.nsqd_tcp_addresses, self._failures)
                await asyncio.gather(*tasks)
        finally:
            self._stop()
            for task in tasks:
                task.cancel()
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=STOP_SECONDS)
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
            await asyncio.gather(*(destination.close() for destination in self._destinations.values()))
        return 0

    def _stop(self) -> None:
        self._is_over = True
        for consumer in self._consumers:
            consumer.stop()

    async def _republish_all(self, consumer: Consumer[bytes]) -> None:
        topic = self._options.destination_topic or consumer.topic
        async for batch in consumer.batches(self._options.max_in_flight, wait=0):
            chosen: dict[str, list[tuple[Message[bytes], bytes]]] = {}
            for message in batch:
                body: bytes | None = message.body
                if self._filter.is_on:
                    try:
                        body = self._filter.apply(message.body)
                    except ValueError as exc:
                        logger.error("%s", exc)
                        message.requeue()
                        continue
                    if not body:
                        message.finish()
                        continue
                assert body is not None
                chosen.setdefault(self._pool.choose(), []).append((message, body))
            for address, messages in chosen.items():
                for command in _commands(messages):
                    task = asyncio.create_task(self._publish(self._destinations[address], topic, command))
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)

    async def _publish(
        self, destination: _Destination, topic: str, messages: Sequence[tuple[Message[bytes], bytes]]
    ) -> None:
        began = time.monotonic()
        is_up = True
        try:
            producer = await destination.open()
            bodies = [body for _, body in messages]
            try:
                await (producer.publish_many(topic, bodies) if len(bodies) > 1 else producer.publish(topic, bodies[0]))
                refused: set[int] = set()
            except PublishError as exc:
                refused = {0} if len(bodies) == 1 else await self._publish_singly(producer, topic, bodies)
                logger.error("%s refuses %d of %d messages: %s", destination.address, len(refused), len(bodies), exc)
        except (FlintError, OSError) as exc:
            logger.error("%s: %s", destination.address, exc)
            refused, is_up = set(range(len(messages))), False
        took = time.monotonic() - began
        self._pool.mark(destination.address, is_up, took)
        for number, (message, _) in enumerate(messages):
            if number in refused:
                message.requeue()
            else:
                message.finish()
        self._statuses[destination.address].add(took, len(messages))
        self._status.add(took, len(messages))
        self._progress.add(len(messages) - len(refused))

    async def _publish_singly(self, producer: Producer, topic: str, bodies: Sequence[bytes]) -> set[int]:
        """Publish each for itself; return the places of those that are refused."""
        outcomes = await asyncio.gather(*(producer.publish(topic, body) for body in bodies), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, FlintError | OSError):
                raise outcome
        return {number for number, outcome in enumerate(outcomes) if outcome is not None}


def _commands(
    messages: Iterable[tuple[Message[bytes], bytes]],
) -> Iterable[list[tuple[Message[bytes], bytes]]]:
    """Yield messages that go out together."""
    command: list[tuple[Message[bytes], bytes]] = []
    size = 0
    for each in messages:
        if command and size + len(each[1]) > _COMMAND_BYTES:
            yield command
            command, size = [], 0
        command.append(each)
        size += len(each[1]) + 4
    if command:
        yield command
