"""A producer of staged publishes, as simple as it can be: each call is one request, each refusal an exception."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

from flintmq.broker.daemon import Broker
from flintmq.kernel import encode_mpub
from support.http_client import HttpClient


class Refused(Exception):
    """A call was refused; ``code`` is the first word of the reason."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.code = text.partition(" ")[0]
        super().__init__(f"{status} {text}")


def mpub_body(bodies: list[bytes]) -> bytes:
    """What ``/mpub?binary=true`` takes."""
    return encode_mpub(b"", bodies)[4:]


class StageClient:
    def __init__(self, http: HttpClient, producer: str) -> None:
        self.http = http
        self.producer = producer

    @classmethod
    @asynccontextmanager
    async def connect(cls, broker: Broker, producer: str = "query-1") -> AsyncIterator[Self]:
        async with HttpClient.connect(broker.http_address) as http:
            yield cls(http, producer)

    async def ask(self, method: str, target: str, body: bytes | None = None) -> Any:
        answer = await self.http.ask(method, target, body)
        if answer.status != 200:
            raise Refused(answer.status, answer.message)
        return answer.json

    async def call(self, verb: str, **fields: Any) -> Any:
        return await self.ask("POST", f"/stage/{verb}", msgspec.json.encode({"producer": self.producer, **fields}))

    async def open(self, txn: int = 0, run: str = "run-1", job: str = "job-1") -> Any:
        return await self.call("open", run=run, job=job, txn=txn)

    async def begin(self, epoch: int, txn: int, attempt: str, decided: Any = None) -> Any:
        return await self.call("begin", epoch=epoch, txn=txn, attempt=attempt, decided=decided)

    async def put(
        self, epoch: int, txn: int, attempt: str, chunk: int, bodies: list[bytes], topic: str = "t", defer: int = 0
    ) -> None:
        query = f"producer={self.producer}&epoch={epoch}&txn={txn}&attempt={attempt}&chunk={chunk}&topic={topic}"
        query += f"&defer={defer}" if defer else ""
        assert await self.ask("POST", f"/stage/put?{query}", mpub_body(bodies)) == {}

    async def prepare(self, epoch: int, txn: int, winners: list[tuple[str, int, int]]) -> Any:
        return await self.call("prepare", epoch=epoch, txn=txn, winners=winners)

    async def decide(self, epoch: int, txn: int, nodes: dict[str, str], print: Any = "p") -> Any:
        return await self.call("decide", epoch=epoch, txn=txn, nodes=nodes, print=print)

    async def apply(self, txn: int, name: str) -> Any:
        return await self.call("apply", txn=txn, set=name)

    async def done(self, txn: int) -> Any:
        return await self.call("done", txn=txn)

    async def abort(self, epoch: int, txn: int) -> Any:
        return await self.call("abort", epoch=epoch, txn=txn)

    async def stage(
        self, epoch: int, txn: int, attempt: str, chunks: list[list[bytes]], topic: str = "t", decided: Any = None
    ) -> tuple[str, int, int]:
        """A whole attempt; what names it as a winner."""
        answer = await self.begin(epoch, txn, attempt, decided)
        for number, bodies in enumerate(chunks[answer["next"] :], answer["next"]):
            await self.put(epoch, txn, attempt, number, bodies, topic)
        return attempt, len(chunks), sum(map(len, chunks))

    async def commit(self, txn: int, chunks: list[list[bytes]], job: str, topic: str = "t", run: str = "run-1") -> Any:
        """A whole transaction on one node."""
        opened = await self.open(txn, run, job)
        epoch = opened["epoch"]
        winner = await self.stage(epoch, txn, f"a-{job}", chunks, topic, opened["decided"])
        prepared = await self.prepare(epoch, txn, [winner])
        decided = await self.decide(epoch, txn, {"n": prepared["set"]})
        applied = await self.apply(txn, decided["decided"]["nodes"]["n"])
        await self.done(txn)
        return applied


def stored(broker: Broker, topic: str = "t") -> Counter[bytes]:
    """The messages in a topic's log, and how often each is there; only what is still in memory."""
    found: Counter[bytes] = Counter()
    if topic not in broker.topics:
        return found
    log = broker.topics[topic].log
    for block in log.blocks:
        for seq in range(block.base, block.base + block.count):
            frame = log.frame(seq)
            assert frame is not None
            found[bytes(frame[34:])] += 1
    return found
