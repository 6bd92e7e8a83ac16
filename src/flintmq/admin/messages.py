"""The routes under ``/api/v2`` that look into queues and act on messages: see docs/nsqadmin-api.md.

A question goes through the nodes one after the other, in bounded slices: what is not answered yet is asked for with a
cursor, or by a job.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.admin.access import OPERATE, Identity
from flintmq.admin.cluster import Result
from flintmq.admin.filters import Filter
from flintmq.admin.hub import event
from flintmq.admin.jobs import Job, Jobs
from flintmq.admin.looking import PAGE, STATES, Looking, asked, is_of, shown_message
from flintmq.admin.nsq_api import json_object
from flintmq.admin.routes import Guarded
from flintmq.admin.state import NodeState
from flintmq.admin.upstream import UpstreamError, query_of
from flintmq.cluster.node import PeekedMessage
from flintmq.errors import ConnectError, HttpError
from flintmq.http import site as web

if TYPE_CHECKING:
    from flintmq.admin.daemon import Admin

__all__ = ["MessagesApi"]

#: Messages, and seconds, after which a search hands back what it has found.
SCAN_MESSAGES = 2_000
SCAN_SECONDS = 0.5
LONGEST_BODY = 16 << 20
EVENTS = "text/event-stream"
#: Milliseconds; nsqd has limits of its own.
LONGEST_DELAY = 366 * 86_400_000
#: Tails at the same time of one user or address, and of all.
MOST_TAILS_OF_ONE = 20
MOST_TAILS = 200
MOST_TAIL_RATE = 500
#: Seconds between two looks at a log, and of silence after which a comment is sent.
TAIL_SECONDS = 0.25
QUIET_SECONDS = 15.0


class MessagesApi(Looking):
    def __init__(self, admin: Admin, jobs: Jobs) -> None:
        super().__init__(admin)
        self._jobs = jobs
        #: How many follow a topic, by user or address.
        self._tails: Counter[str] = Counter()

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/api/v2/messages", self._messages, OPERATE),
            Guarded("GET", "/api/v2/message", self._message, OPERATE),
            Guarded("POST", "/api/v2/publish", self._publish, OPERATE),
            Guarded("GET", "/api/v2/tail", self._tail, OPERATE, unlogged=True),
            Guarded("GET", "/api/v2/jobs", self._list_jobs, OPERATE),
            Guarded("POST", "/api/v2/jobs", self._start_job, OPERATE),
            Guarded("GET", "/api/v2/jobs/:id", self._job, OPERATE),
            Guarded("DELETE", "/api/v2/jobs/:id", self._stop_job, OPERATE),
        ]

    # --- Looking ---------------------------------------------------------------------------------------------------

    async def _messages(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        state = arguments.word("state", STATES)
        topic, channel = self.names(arguments, channel=state != "log")
        limit = arguments.number("limit", 50, lowest=1, highest=1000)
        shown = None if arguments.get("bytes") == "all" else arguments.number("bytes", 1024, highest=16 << 20)
        wanted = Filter(arguments)
        where = await self.where(topic, channel, state)
        if not where[0]:
            self.able(topic, channel)
            return {"messages": [], "next": None, "scanned": 0, "total": 0, "unsupported": [], "missing": []}
        nodes, unsupported = self.able(where[0], where[1], arguments.get("node", ""))
        number, after = _cursor(arguments.get("after"), nodes)
        messages: list[dict[str, Any]] = []
        scanned, following = 0, None
        deadline = asyncio.get_running_loop().time() + SCAN_SECONDS
        while number < len(nodes):
            node = nodes[number]
            ask = PAGE if not wanted.is_empty else min(PAGE, limit - len(messages))
            part = await self.page(node, *where, ask, after, None if wanted.needs_bodies else shown)
            full = False
            for at, message in enumerate(part.messages):
                scanned += 1
                if is_of(message, topic, channel, state) and wanted.fits(message):
                    messages.append(shown_message(message, node.address, shown))
                    if len(messages) >= limit and at + 1 < len(part.messages):
                        # The rest of this page comes again: cursors of nsqd are for whole pages only.
                        part = await self.page(node, *where, at + 1, after, 0)
                        full = True
                        break
            after = part.next
            if after is None:
                number += 1
            if full or len(messages) >= limit or scanned >= SCAN_MESSAGES:
                break
            if asyncio.get_running_loop().time() > deadline:
                break
        if number < len(nodes):
            following = _text_of_cursor(nodes[number].address, after)
        return {
            "messages": messages,
            "next": following,
            "scanned": scanned,
            "total": self.total(where, nodes),
            "unsupported": unsupported,
            "missing": self._state.missing,
        }

    async def _message(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        state = arguments.word("state", STATES)
        topic, channel = self.names(arguments, channel=state != "log")
        wanted = arguments.text("id")
        where = await self.where(topic, channel, state)
        if where[0]:
            nodes, _ = self.able(where[0], where[1], arguments.text("node"))
            async for node, messages in self.scan(where, nodes, 0):
                for message in messages:
                    if message.id == wanted:
                        whole = await self._whole(node, where, message)
                        return {"message": shown_message(whole, node.address, None)}
        raise HttpError(404, "MESSAGE_NOT_FOUND: it is not in that state any more")

    async def _whole(self, node: NodeState, where: tuple[str, str, str], message: PeekedMessage) -> PeekedMessage:
        """The same message with its body, which the log has unless it was sent back to one channel alone."""
        client = self.client(node)
        try:
            async for one in client.log_messages(where[0], message.seq, message.seq + 1):
                if one.id == message.id:
                    return msgspec.structs.replace(message, body=one.body, truncated=False)
        except (HttpError, ConnectError):
            pass
        async for _, messages in self.scan(where, [node], None):
            for found in messages:
                if found.id == message.id:
                    return found
        raise HttpError(404, "MESSAGE_NOT_FOUND: it is not in that state any more")

    # --- Publishing and following ----------------------------------------------------------------------------------

    async def _publish(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        body = json_object(await request.body(LONGEST_BODY * 2))
        topic, _ = self.names(body, channel=False)
        text, encoded, defer = body.get("body"), body.get("body_base64"), body.get("defer") or 0
        if text is not None and not isinstance(text, str):
            raise HttpError(400, "INVALID_BODY: body must be a text")
        try:
            data = base64.b64decode(encoded, validate=True) if encoded is not None else (text or "").encode()
        except (binascii.Error, ValueError, TypeError):
            raise HttpError(400, "INVALID_BODY: body_base64 is not base64") from None
        if not data:
            raise HttpError(400, "MSG_EMPTY")
        if not _is_delay(defer):
            raise HttpError(400, f"INVALID_DEFER: defer must be a number of milliseconds up to {LONGEST_DELAY}")
        up = [node for node in self._state.nodes.values() if node.up]
        wanted = body.get("node")
        if wanted:
            up = [node for node in up if node.address == wanted]
        up = [node for node in up if topic in node.topics] or up
        if not up:
            raise HttpError(404 if wanted else 502, "NODE_NOT_FOUND" if wanted else "UPSTREAM_ERROR: no node is up")
        node = min(up, key=lambda one: one.topics.get(topic, {}).get("message_count", 0))
        query = query_of(topic=topic, **({"defer": str(defer)} if defer else {}))
        result = Result(outcomes=[(node.address, "")])
        try:
            await self._admin.upstream.raw("POST", "nsqd", node.address, "pub", query, data)
        except UpstreamError as exc:
            result = Result([str(exc)], [(node.address, str(exc))])
        detail = f"{len(data)} bytes" + (f", deferred by {defer} ms" if defer else "")
        self._admin.record(request, identity, "publish", result, topic=topic, node=node.address, detail=detail)
        if result.warnings:
            raise HttpError(502, f"UPSTREAM_ERROR: {result.warnings[0]}")
        return {"node": node.address, "message": "OK"}

    async def _tail(self, request: web.Request, identity: Identity) -> web.Answer:
        await self._state.fresh()
        arguments = request.arguments()
        topic, _ = self.names(arguments, channel=False)
        nodes, unsupported = self.able(topic, "", arguments.get("node", ""))
        rate = arguments.number("rate", 50, lowest=1, highest=MOST_TAIL_RATE)
        shown = None if arguments.get("bytes") == "all" else arguments.number("bytes", 1024, highest=1 << 20)
        who = identity.user or self._admin.access.address_of(request)
        if self._tails[who] >= MOST_TAILS_OF_ONE or self._tails.total() >= MOST_TAILS:
            raise HttpError(429, f"TOO_MANY_VIEWERS: at most {MOST_TAILS_OF_ONE} tails of one, {MOST_TAILS} of all")
        stream = self._counted(who, self._follow(topic, nodes, unsupported, rate, shown, Filter(arguments), identity))
        return web.Answer(content_type=EVENTS, headers={"X-Accel-Buffering": "no"}, pieces=stream)

    async def _counted(self, who: str, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        self._tails[who] += 1
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    yield piece
        finally:
            self._tails[who] -= 1
            if not self._tails[who]:
                del self._tails[who]

    async def _follow(
        self,
        topic: str,
        nodes: list[NodeState],
        unsupported: list[str],
        rate: int,
        shown: int | None,
        wanted: Filter,
        identity: Identity,
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        ends = {node.address: (await asked(self.client(node).log_info(topic))).end for node in nodes}
        yield event("hello", {"nodes": sorted(ends), "unsupported": unsupported})
        allowance, refilled, quiet = float(rate), loop.time(), loop.time()
        while not self._admin.is_stopping and self._admin.access.still_may(identity, OPERATE):
            skipped = 0
            for node in nodes:
                client = self.client(node)
                try:
                    info = await client.log_info(topic)
                    start, ends[node.address] = ends[node.address], max(ends[node.address], info.durable)
                    # Of very many the newest.
                    first = max(start, info.durable - 2 * MOST_TAIL_RATE)
                    skipped += first - start
                    async for one in client.log_messages(topic, first, info.durable):
                        now = loop.time()
                        allowance = min(float(rate), allowance + (now - refilled) * rate)
                        refilled = now
                        message = PeekedMessage(
                            id=one.id,
                            seq=one.seq,
                            timestamp=one.timestamp,
                            attempts=0,
                            size=len(one.body),
                            body=one.body,
                        )
                        if not wanted.fits(message):
                            continue
                        if allowance < 1:
                            skipped += 1
                            continue
                        allowance -= 1
                        quiet = now
                        yield event("message", shown_message(message, node.address, shown))
                except (HttpError, ConnectError) as exc:
                    yield event("error", {"node": node.address, "message": str(exc)})
            if skipped:
                yield event("skipped", {"count": skipped})
            if loop.time() - quiet > QUIET_SECONDS:
                quiet = loop.time()
                yield b": quiet\n\n"
            await asyncio.sleep(TAIL_SECONDS)
        yield event("bye", {"reason": "shutdown" if self._admin.is_stopping else "logout"})

    # --- Jobs ------------------------------------------------------------------------------------------------------

    async def _list_jobs(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        return {"jobs": [job.describe() for job in self._jobs.all()]}

    async def _job(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        return self._jobs.get(request.parameters["id"]).describe()

    async def _stop_job(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        job = self._jobs.get(request.parameters["id"])
        job.stop()
        self._admin.record(request, identity, "stop_job", None, topic=job.topic, channel=job.channel, detail=job.id)
        return job.describe()

    async def _start_job(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        body = json_object(await request.body())
        kind = body.get("kind")
        if kind == "count":
            state = body.get("state") or "ready"
            if state not in STATES:
                raise HttpError(400, f"INVALID_STATE: state must be one of {', '.join(STATES)}")
            topic, channel = self.names(body, channel=state != "log")
            wanted = Filter(body)
            where = await self.where(topic, channel, state)
            nodes = self.able(where[0], where[1], str(body.get("node") or ""))[0] if where[0] else []
            job = self._jobs.start(kind, topic, channel, identity.user)
            job.where = where
            job.total = self.total(where, nodes)
            job.run(self._count(job, nodes, wanted, state))
            return job.describe()
        if kind not in ("finish", "requeue", "defer"):
            raise HttpError(400, "INVALID_KIND: kind must be count, finish, requeue or defer")
        delay = body.get("delay") or 0
        if not _is_delay(delay) or (kind == "defer" and not delay):
            raise HttpError(400, f"INVALID_DELAY: delay must be a number of milliseconds up to {LONGEST_DELAY}")
        if body.get("of"):
            counted = self._jobs.get(str(body["of"]))
            if counted.kind != "count" or counted.state != "done":
                raise HttpError(409, "NOT_COUNTED: wait for the end of the count")
            if not counted.where[1]:
                raise HttpError(400, "INVALID_STATE: messages of a log belong to no channel, so nobody can act on them")
            topic, channel = counted.where[0], counted.where[1]
            targets = list(counted.found)
        else:
            topic, channel = self.names(body, channel=True)
            targets = []
            messages = body.get("messages") or []
            for one in messages if isinstance(messages, list) else [None]:
                if (
                    not isinstance(one, dict)
                    or not isinstance(one.get("node"), str)
                    or not isinstance(one.get("id"), str)
                ):
                    raise HttpError(400, "INVALID_BODY: messages must be a list of node and id")
                targets.append((one["node"], one["id"]))
        # Only nodes of this cluster: nobody may have us send requests elsewhere.
        if unknown := {node for node, _ in targets if node not in self._state.nodes}:
            raise HttpError(404, f"NODE_NOT_FOUND: {min(unknown)[:80]}")
        job = self._jobs.start(kind, topic, channel, identity.user)
        job.total = job.matched = len(targets)
        job.run(self._act(job, targets, delay / 1000))

        def ended() -> None:
            done = f"{job.done} of {job.matched}"
            result = Result(list(job.errors), [("", "")] * min(1, job.done) + [("", "x")] * min(1, job.failed))
            self._admin.record(request, identity, f"{kind}_messages", result, topic=topic, channel=channel, detail=done)

        job.ended_with(ended)
        return job.describe()

    async def _count(self, job: Job, nodes: list[NodeState], wanted: Filter, state: str) -> None:
        shown = None if wanted.needs_bodies else 0
        async for node, messages in self.scan(job.where, nodes, shown):
            for message in messages:
                job.scanned += 1
                if is_of(message, job.topic, job.channel, state) and wanted.fits(message):
                    if not job.add(node.address, message.id):
                        return
            job.changed()

    async def _act(self, job: Job, targets: list[tuple[str, str]], delay: float) -> None:
        for node, identifier in targets:
            client = self._admin.client(node)
            try:
                if job.kind == "finish":
                    await client.finish(job.topic, job.channel, identifier)
                elif job.kind == "requeue":
                    await client.requeue(job.topic, job.channel, identifier, delay)
                else:
                    await client.defer(job.topic, job.channel, identifier, delay)
                job.done += 1
            except HttpError as exc:
                if exc.status == 404:
                    job.gone += 1
                else:
                    job.fail(f"{node}: {exc.code}")
            except ConnectError as exc:
                job.fail(str(exc))
            job.scanned += 1
            if job.scanned % 100 == 0:
                job.changed()


def _is_delay(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= LONGEST_DELAY


def _text_of_cursor(node: str, after: str | None) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([node, after])).decode()


def _cursor(text: str | None, nodes: list[NodeState]) -> tuple[int, str | None]:
    if not text:
        return 0, None
    try:
        node, after = msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[str, str | None])
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise HttpError(400, "INVALID_AFTER: give the next of the last answer") from None
    # A node that has gone meanwhile is passed over.
    number = next((i for i, one in enumerate(nodes) if one.address >= node), len(nodes))
    return number, after if number < len(nodes) and nodes[number].address == node else None
