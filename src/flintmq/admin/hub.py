"""The event streams of the pages: what changed, computed once for all who look at the same thing.

A ``Hub`` knows who listens to which scope. After each sample it makes the object of every scope that somebody listens
to, compares it with the one before, and hands the same bytes to all of them. Somebody who does not read is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from flintmq.admin.access import VIEW
from flintmq.admin.problems import is_much_the_same, name_of
from flintmq.admin.state import State, part_of_topic
from flintmq.errors import HttpError

__all__ = ["Hub", "event"]

#: Events that wait for a viewer, and seconds after which a comment shows that the stream lives.
MOST_WAITING = 100
QUIET_SECONDS = 15.0
MOST_SCOPES = 8
#: Viewers at the same time, and those of one user or address.
MOST_VIEWERS = 1000
MOST_OF_ONE = 200
#: Maps whose keys come and go; everything else comes whole.
_MAPS = ("topics", "channels", "nodes", "problems")
#: Problems that are told at all, the worst first, and those whose numbers are always the newest.
MOST_PROBLEMS = 200
FRESH_PROBLEMS = 8

Object = dict[str, Any]


def event(kind: str, data: Any, number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class _Viewer:
    def __init__(self, scopes: Sequence[str], who: str, may: Callable[[str], bool]) -> None:
        self.scopes = tuple(scopes)
        self.who = who
        #: Does the login still hold, for what needs a role?
        self.may = may
        self.waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        #: Why it ends; empty: it does not.
        self.reason = ""

    def put(self, data: bytes) -> None:
        if self.reason:
            return
        if self.waiting.qsize() >= MOST_WAITING:
            self.end("slow")
        else:
            self.waiting.put_nowait(data)

    def end(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self.waiting.put_nowait(None)


class Hub:
    def __init__(self, state: State, boot: str, interval: int, version: str) -> None:
        self._state = state
        self._hello = {"boot": boot, "interval": interval, "version": version}
        self._viewers: set[_Viewer] = set()
        self._objects: dict[str, Object] = {}
        self._number = 0
        self._is_closed = False
        state.followers.append(self.sampled)

    def sampled(self) -> None:
        """Tell every viewer what has changed."""
        for viewer in list(self._viewers):
            if not viewer.may(VIEW):
                viewer.end("logout")
        listened = {scope for viewer in self._viewers for scope in viewer.scopes}
        for scope in set(self._objects) - listened:
            del self._objects[scope]
        for scope in listened:
            new, old = self._make(scope), self._objects.get(scope)
            self._objects[scope] = new
            patch = _patch(old or {}, new)
            if patch:
                self._number += 1
                document = {"scope": scope, "at": self._state.at * 1000, "data": patch}
                data = event("update", document, self._number)
                for viewer in self._viewers:
                    if scope in viewer.scopes:
                        viewer.put(data)

    def tell(self, kind: str, data: Any, role: str = VIEW) -> None:
        """Tell every viewer who has this role of something that happened."""
        self._number += 1
        made = event(kind, data, self._number)
        for viewer in self._viewers:
            if viewer.may(role):
                viewer.put(made)

    def close(self) -> None:
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end("shutdown")

    @property
    def viewer_count(self) -> int:
        return len(self._viewers)

    def listen(self, scopes: Sequence[str], who: str, may: Callable[[str], bool]) -> AsyncGenerator[bytes, None]:
        """Return the events for one viewer. ``may`` says whether he still has a role."""
        wanted = list(dict.fromkeys(["cluster", *filter(None, scopes)]))
        if len(wanted) > MOST_SCOPES:
            raise HttpError(400, f"TOO_MANY_SCOPES: at most {MOST_SCOPES}")
        for scope in wanted:
            if scope not in ("cluster", "topics") and scope.partition(":")[0] not in ("topic", "channel", "node"):
                raise HttpError(400, f"INVALID_SCOPE: there is no scope {scope[:80]}")
        if self._is_closed or len(self._viewers) >= MOST_VIEWERS:
            raise HttpError(503, "TOO_MANY_VIEWERS")
        if sum(viewer.who == who for viewer in self._viewers) >= MOST_OF_ONE:
            raise HttpError(429, f"TOO_MANY_VIEWERS: {MOST_OF_ONE} streams are open for {who[:80]}")
        return self._stream(_Viewer(wanted, who, may))

    async def _stream(self, viewer: _Viewer) -> AsyncGenerator[bytes, None]:
        self._viewers.add(viewer)
        try:
            at = self._state.at * 1000
            yield event("hello", {**self._hello, "at": at}, self._number)
            for scope in viewer.scopes:
                if scope not in self._objects:
                    self._objects[scope] = self._make(scope)
                yield event("snapshot", {"scope": scope, "at": at, "data": self._objects[scope]}, self._number)
            while True:
                try:
                    async with asyncio.timeout(QUIET_SECONDS):
                        data = await viewer.waiting.get()
                except TimeoutError:
                    yield b": quiet\n\n"
                    continue
                if data is None:
                    yield event("bye", {"reason": viewer.reason})
                    return
                yield data
        finally:
            self._viewers.discard(viewer)

    # --- Objects ---------------------------------------------------------------------------------------------------

    def _make(self, scope: str) -> Object:
        state = self._state
        kind, _, name = scope.partition(":")
        if kind == "cluster":
            nodes = {
                address: {"up": row["up"], "error": row["error"], "trouble": row["trouble"]}
                for address, row in state.node_rows.items()
            }
            return {
                "at": state.at * 1000,
                "totals": state.totals,
                "nodes": nodes,
                "problems": self._problems(),
                "problem_count": len(state.problems),
            }
        if kind == "topics":
            return {"topics": dict(state.topics)}
        if kind == "topic":
            return {
                "topic": state.topics.get(name),
                "channels": {channel: row for (topic, channel), row in state.channels.items() if topic == name},
                "nodes": {node.address: part_of_topic(node.topics[name]) for node in state.having(name)},
            }
        if kind == "channel":
            topic, _, channel = name.partition("/")
            nodes = {}
            for node in state.having(topic, channel):
                nodes[node.address] = channel_part(node.topics[topic]["channels"][channel])
            return {"channel": state.channels.get((topic, channel)), "nodes": nodes}
        found = state.nodes.get(name)
        topics = {topic: part_of_topic(stats) for topic, stats in found.topics.items()} if found else {}
        return {"node": state.node_rows.get(name), "topics": topics}

    def _problems(self) -> Object:
        """The worst problems by name. A row stays as it was told until it differs in more than its last digits."""
        told = self._objects.get("cluster", {}).get("problems", {})
        rows: Object = {}
        for rank, problem in enumerate(self._state.problems[:MOST_PROBLEMS]):
            name = name_of(problem)
            old = told.get(name)
            is_kept = rank >= FRESH_PROBLEMS and old is not None and is_much_the_same(problem, old)
            rows[name] = old if is_kept else problem
        return rows


def channel_part(stats: Object) -> Object:
    """A channel on one node, as pages see it."""
    return {name: value for name, value in stats.items() if name not in ("e2e", "sent", "position")}


def _patch(old: Object, new: Object) -> Object:
    """What makes the new object of the old one: whole rows, and null for keys of maps that are gone."""
    patch: Object = {}
    for name, value in new.items():
        before = old.get(name)
        if name in _MAPS and isinstance(value, dict) and isinstance(before, dict):
            changed = {key: row for key, row in value.items() if before.get(key) != row}
            changed |= dict.fromkeys(before.keys() - value.keys())
            if changed:
                patch[name] = changed
        elif before != value and name != "at":
            patch[name] = value
    if patch and "at" in new:
        patch["at"] = new["at"]
    return patch
