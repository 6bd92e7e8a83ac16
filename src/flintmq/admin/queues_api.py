"""The routes under ``/api/v2`` about whole queues: the log and seek, dead letters, readers, settings."""

from __future__ import annotations

import asyncio
import bisect
from datetime import UTC, datetime
from typing import Any

import msgspec

from flintmq.admin.access import ADMIN, OPERATE, VIEW, Identity
from flintmq.admin.cluster import Result
from flintmq.admin.looking import Looking, asked, shown_message
from flintmq.admin.nsq_api import json_object
from flintmq.admin.routes import Guarded
from flintmq.errors import ConnectError, HttpError
from flintmq.http import site as web

__all__ = ["QueuesApi"]

#: Dead letters that are looked at for one answer.
MOST_DEAD = 20_000
#: Milliseconds.
HOUR = 3_600_000


class QueuesApi(Looking):
    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/api/v2/log", self._log, VIEW),
            Guarded("GET", "/api/v2/seek", self._count_seek, OPERATE),
            Guarded("POST", "/api/v2/seek", self._seek, OPERATE),
            Guarded("GET", "/api/v2/dead", self._dead, OPERATE),
            Guarded("GET", "/api/v2/redrive", self._redrive_progress, VIEW),
            Guarded("POST", "/api/v2/redrive", self._redrive, OPERATE),
            Guarded("DELETE", "/api/v2/redrive", self._stop_redrive, OPERATE),
            Guarded("DELETE", "/api/v2/pipelines/:reader", self._forget_reader, ADMIN),
            Guarded("GET", "/api/v2/settings", self._settings, VIEW),
            Guarded("PUT", "/api/v2/settings", self._set_settings, ADMIN),
        ]

    # --- The log ---------------------------------------------------------------------------------------------------

    async def _log(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        topic, _ = self.names(arguments, channel=False)
        points = arguments.number("points", 120, lowest=2, highest=500)
        nodes, unsupported = self.able(topic)
        rows, begin = [], float("inf")
        for node in nodes:
            info = await asked(self.client(node).log_info(topic))
            rows.append((node, info))
            first = await asked(self.client(node).peek_topic(topic, limit=1, shown=0))
            if first.messages:
                begin = min(begin, first.messages[0].timestamp / 1e6)
        now = self._admin.wall() * 1000
        begin = min(begin, now - 1000)
        step = (now - begin) / points
        counts = [0] * points
        positions: list[dict[str, Any]] = []
        for node, info in rows:
            # Where each step begins: what lies between two of them was published in between.
            times = [int((begin + i * step) * 1e6) for i in range(1, points)]
            marks = await asyncio.gather(*(asked(self.client(node).log_offset(topic, time)) for time in times))
            places = [info.first, *(max(info.first, min(mark, info.durable)) for mark in marks), info.durable]
            for i in range(points):
                counts[i] += max(0, places[i + 1] - places[i])
            for name, channel in node.topics[topic]["channels"].items():
                if (offset := channel["position"]) is not None:
                    when = begin + _step_of(offset, places) * step
                    positions.append({"channel": name, "node": node.address, "offset": offset, "time": when})
        return {
            "topic": topic,
            "nodes": [
                {
                    "node": node.address,
                    "first": info.first,
                    "durable": info.durable,
                    "messages": info.messages,
                    "bytes": info.bytes,
                }
                for node, info in rows
            ],
            "from": begin,
            "to": now,
            "step": step / 1000,
            "counts": counts,
            "positions": positions,
            "unsupported": unsupported,
            "missing": self._state.missing,
        }

    @staticmethod
    def _place(given: Any) -> str:
        """``earliest``, ``latest``, or nanoseconds of a time in milliseconds."""
        if given in ("earliest", "latest"):
            return str(given)
        try:
            milliseconds = float(given)
            if isinstance(given, bool) or not 0 <= milliseconds < 1e14:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise HttpError(400, "INVALID_TO: give earliest, latest or milliseconds since 1970") from None
        # nsqd takes a whole number for an offset: a time is written as one.
        seconds, rest = divmod(int(milliseconds), 1000)
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest:03d}Z"

    async def _count_seek(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        topic, channel = self.names(arguments, channel=True)
        given = arguments.text("to")
        place = self._place(given)
        nodes, unsupported = self.able(topic, channel)
        rows = []
        for node in nodes:
            stats = node.topics[topic]["channels"][channel]
            row: dict[str, Any] = {"node": node.address, "waiting": stats["depth"], "error": None}
            try:
                client = self.client(node)
                info = await asked(client.log_info(topic))
                if place == "earliest":
                    offset = info.first
                elif place == "latest":
                    offset = info.end
                else:
                    offset = await asked(client.log_offset(topic, int(float(given) * 1e6)))
                position = stats["position"]
                if position is None:
                    position = info.end - stats["depth"]
                row |= {
                    "offset": offset,
                    "position": position,
                    "again": max(0, position - offset),
                    "skipped": min(stats["depth"], max(0, offset - position)),
                }
            except HttpError as exc:
                row |= {"offset": None, "position": None, "again": 0, "skipped": 0, "error": exc.code}
            rows.append(row)
        sums = {name: sum(row[name] for row in rows) for name in ("again", "skipped", "waiting")}
        return {"to": given, **sums, "nodes": rows, "unsupported": unsupported}

    async def _seek(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        body = json_object(await request.body())
        topic, channel = self.names(body, channel=True)
        place = self._place(body.get("to"))
        nodes, _ = self.able(topic, channel)
        rows, result = [], Result()
        for node in nodes:
            row: dict[str, Any] = {"node": node.address, "offset": None, "messages": None, "error": None}
            try:
                done = await asked(self.client(node).seek(topic, channel, place))
                row |= {"offset": done.offset, "messages": done.messages}
            except HttpError as exc:
                row["error"] = exc.code
                result.warnings.append(exc.code)
            result.outcomes.append((node.address, row["error"] or ""))
            rows.append(row)
        self._admin.record(request, identity, "seek", result, topic=topic, channel=channel, detail=f"to {place}")
        return {"nodes": rows}

    # --- Dead letters ----------------------------------------------------------------------------------------------

    async def _dead(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        topic, channel = arguments.get("topic", ""), arguments.get("channel", "")
        names: set[str] = set()
        for (one, each), row in self._state.channels.items():
            if (topic and one != topic) or (channel and each != channel):
                continue
            if row["dead_lettered_count"] or (topic and channel):
                dead = await self._admin.dead_letter_topic(one, each)
                if dead is not None:
                    names.add(dead)
        # After a restart counters are 0; the names by default are still known.
        names |= {name for name in self._state.topics if name.endswith((".dead", ".dead#ephemeral"))}
        groups: dict[tuple[str, str, str, str, int], dict[str, Any]] = {}
        scanned, is_complete, topics = 0, True, []
        for name in sorted(names & self._state.topics.keys()):
            where = (name, "redrive", "ready") if self._state.having(name, "redrive") else (name, "", "log")
            nodes = [node for node in self._state.having(name, where[1]) if node.is_flintmq]
            topics.append({"dead_letter_topic": name, "depth": self.total(where, nodes)})
            async for node, messages in self.scan(where, nodes, 1024):
                for message in messages:
                    scanned += 1
                    letter = message.dead
                    if letter is None or (topic and letter.topic != topic) or (channel and letter.channel != channel):
                        continue
                    hour = letter.time // 1_000_000 // HOUR * HOUR
                    key = (letter.topic, letter.channel, name, letter.reason, hour)
                    group = groups.setdefault(key, {"count": 0, "time": -1})
                    group["count"] += 1
                    if letter.time > group["time"]:
                        group |= {"time": letter.time, "newest": shown_message(message, node.address, 1024)}
                if scanned >= MOST_DEAD:
                    is_complete = False
                    break
            if not is_complete:
                break
        return {
            "groups": [
                {
                    **dict(zip(("topic", "channel", "dead_letter_topic", "reason", "hour"), key, strict=True)),
                    "count": group["count"],
                    "newest": group["newest"],
                }
                for key, group in sorted(groups.items(), key=lambda one: (-one[0][4], one[0]))
            ],
            "topics": topics,
            "scanned": scanned,
            "complete": is_complete,
            "missing": self._state.missing,
        }

    async def _progress(self, topic: str, channel: str) -> dict[str, Any]:
        nodes, _ = self.able(topic, channel)
        rows, name, reason = [], "", ""
        for node in nodes:
            found = await asked(self.client(node).redrive_progress(topic, channel))
            name = found.dead_letter_topic or name
            if found.running:
                reason = found.reason or ""
            rows.append(
                {
                    "node": node.address,
                    "planned": found.planned,
                    "moved": found.moved,
                    "running": found.running,
                    "error": found.error,
                }
            )
        return {
            "topic": topic,
            "channel": channel,
            "dead_letter_topic": name,
            "reason": reason,
            "planned": sum(row["planned"] for row in rows),
            "moved": sum(row["moved"] for row in rows),
            "running": any(row["running"] for row in rows),
            "error": next((row["error"] for row in rows if row["error"]), ""),
            "nodes": rows,
        }

    async def _redrive_progress(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        return await self._progress(*self.names(request.arguments(), channel=True))

    async def _redrive(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        body = json_object(await request.body())
        topic, channel = self.names(body, channel=True)
        count, rate, source = body.get("count"), body.get("rate"), body.get("from")
        for name, number in (("count", count), ("rate", rate)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise HttpError(400, f"INVALID_{name.upper()}: {name} must be a number from 1 on")
        if source is not None and not isinstance(source, str):
            raise HttpError(400, "INVALID_FROM: from must be the name of a channel")
        reason = body.get("reason") or None
        if reason is not None and not isinstance(reason, str):
            raise HttpError(400, "INVALID_REASON: reason must be a text")
        dead = await self._admin.dead_letter_topic(topic, channel)
        nodes = [node for node in self.able(topic, channel)[0] if dead in node.topics]
        if not nodes:
            # It may have been created since the last sample.
            await self._state.sample()
            nodes = [node for node in self.able(topic, channel)[0] if dead in node.topics]
        if not nodes:
            raise HttpError(404, "TOPIC_NOT_FOUND: there are no dead letters")
        left, result = count, Result()
        for number, node in enumerate(nodes):
            share = None
            if left is not None:
                share = -(-left // (len(nodes) - number))
                left -= share
                if not share:
                    continue
            per_node = max(1, rate // len(nodes)) if rate else None
            try:
                client = self.client(node)
                await client.redrive(topic, channel, count=share, rate=per_node, source=source, reason=reason)
                result.outcomes.append((node.address, ""))
            except (HttpError, ConnectError) as exc:
                result.outcomes.append((node.address, str(exc)))
                result.warnings.append(str(exc))
        given = (("reason", reason), ("count", count), ("rate", rate))
        detail = ", ".join(f"{name} {value}" for name, value in given if value)
        self._admin.record(request, identity, "redrive", result, topic=topic, channel=channel, detail=detail)
        if result.warnings and len(result.warnings) == len(result.outcomes):
            raise HttpError(409 if "ALREADY_RUNNING" in result.warnings[0] else 502, result.warnings[0])
        return await self._progress(topic, channel)

    async def _stop_redrive(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        topic, channel = self.names(request.arguments(), channel=True)
        nodes, _ = self.able(topic, channel)
        result = Result()
        for node in nodes:
            try:
                await self.client(node).stop_redrive(topic, channel)
                result.outcomes.append((node.address, ""))
            except (HttpError, ConnectError) as exc:
                result.outcomes.append((node.address, str(exc)))
                result.warnings.append(str(exc))
        self._admin.record(request, identity, "stop_redrive", result, topic=topic, channel=channel)
        if result.warnings:
            # Somewhere it goes on.
            raise HttpError(502, f"UPSTREAM_ERROR: {'; '.join(result.warnings)}")
        return await self._progress(topic, channel)

    async def _forget_reader(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        reader, topic = request.parameters["reader"], request.arguments().get("topic", "")
        row = self._state.readers.get(reader)
        if row is None:
            raise HttpError(404, "READER_NOT_FOUND")
        removed, errors, result = 0, {}, Result()
        for position in row["positions"]:
            if topic and position["topic"] != topic:
                continue
            node = position["node"]
            try:
                await self._admin.client(node).delete_position(position["topic"], reader)
                removed += 1
                result.outcomes.append((node, ""))
            except (HttpError, ConnectError) as exc:
                errors[node] = str(exc)
                result.outcomes.append((node, str(exc)))
                result.warnings.append(str(exc))
        self._admin.record(request, identity, "forget_reader", result, topic=topic, detail=reader)
        return {"removed": removed, "errors": errors}

    # --- Settings --------------------------------------------------------------------------------------------------

    async def _gathered(self, topic: str, channel: str) -> dict[str, Any]:
        nodes, unsupported = self.able(topic, channel)
        settings: dict[str, dict[str, Any]] = {}
        for node in nodes:
            client = self.client(node)
            found = await asked(client.channel_settings(topic, channel) if channel else client.topic_settings(topic))
            for key, value in found.settings.items():
                row = settings.setdefault(
                    key,
                    {
                        "value": value,
                        "source": found.source.get(key, ""),
                        "live": found.set.get(key),
                        "differs": None,
                        "nodes": {},
                    },
                )
                row["nodes"][node.address] = value
        for row in settings.values():
            values = row.pop("nodes")
            if len({msgspec.json.encode(value) for value in values.values()}) > 1:
                row["differs"] = values
        return {
            "topic": topic,
            "channel": channel or None,
            "settings": settings,
            "nodes": [node.address for node in nodes],
            "unsupported": unsupported,
            "missing": self._state.missing,
        }

    async def _settings(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        return await self._gathered(*self.names(arguments, channel=bool(arguments.get("channel"))))

    async def _set_settings(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        topic, channel = self.names(arguments, channel=bool(arguments.get("channel")))
        body = json_object(await request.body())
        nodes, _ = self.able(topic, channel)
        errors, result = {}, Result()
        for node in nodes:
            client = self.client(node)
            try:
                if channel:
                    await client.set_channel_settings(topic, channel, body)
                else:
                    await client.set_topic_settings(topic, body)
                result.outcomes.append((node.address, ""))
            except (HttpError, ConnectError) as exc:
                text = exc.code if isinstance(exc, HttpError) else str(exc)
                errors[node.address] = text
                result.outcomes.append((node.address, text))
                result.warnings.append(text)
        detail = ", ".join(f"{key} = {value}" for key, value in body.items())[:500]
        self._admin.record(request, identity, "set_settings", result, topic=topic, channel=channel, detail=detail)
        if errors and len(errors) == len(nodes):
            text = next(iter(errors.values()))
            raise HttpError(400 if text.startswith("INVALID_SETTING") else 502, text)
        return await self._gathered(topic, channel) | {"errors": errors}


def _step_of(offset: int, places: list[int]) -> float:
    """How many steps lie before an offset, of those that begin at ``places``; within a step by its share."""
    number = bisect.bisect_right(places, offset) - 1
    if number < 0:
        return 0.0
    if number >= len(places) - 1:
        return float(len(places) - 1)
    return number + (offset - places[number]) / (places[number + 1] - places[number])
