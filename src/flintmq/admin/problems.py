"""What is wrong with a cluster, the worst first, each with the page that shows it.

A ``Watch`` looks at a ``State`` after each sample and remembers since when each problem is there. It judges numbers
that others have made, and makes none itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from flintmq.admin.state import State

__all__ = ["Watch", "is_much_the_same", "name_of"]

Problem = dict[str, Any]

#: Messages a second by which a depth must grow to be a problem, and the share of deliveries that may time out.
LEAST_GROWTH = 0.5
MOST_TIMEOUTS = 0.01
#: Milliseconds for which a reader with a lag may stand still.
STILL = 600_000
#: Share by which a number may differ from the one that was told before the problem is another one to people.
MUCH_THE_SAME = 0.2

#: How the names of dead-letter topics end.
_DEAD = (".dead", ".dead#ephemeral")


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def name_of(problem: Problem) -> str:
    """Return what stays the same while the problem lasts."""
    return " ".join(problem[name] or "" for name in ("kind", "topic", "channel", "node", "reader"))


def is_much_the_same(new: Problem, old: Problem) -> bool:
    """Do the two tell people the same? Where a problem has numbers, its text is made of them, and they always move."""
    told = ("level", "link", "since") if new["values"] else ("level", "link", "since", "text")
    if any(new[name] != old[name] for name in told) or new["values"].keys() != old["values"].keys():
        return False
    for name, value in new["values"].items():
        before = old["values"][name]
        if abs(value - before) > max(LEAST_GROWTH, MUCH_THE_SAME * max(abs(value), abs(before))):
            return False
    return True


class Watch:
    def __init__(self) -> None:
        self._since: dict[tuple[Any, ...], float] = {}
        #: Dead letters by channel: times and counts of the last hour.
        self._dead: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def look(self, state: State) -> list[Problem]:
        found: list[Problem] = []
        for part in (self._nodes, self._channels, self._topics, self._readers, self._queries):
            part(state, found)
        kept: dict[tuple[Any, ...], float] = {}
        for problem in found:
            key = tuple(problem[name] for name in ("kind", "topic", "channel", "node", "reader"))
            kept[key] = self._since.get(key, state.at)
            problem.setdefault("since", kept[key] * 1000)
        self._since = kept
        found.sort(key=lambda problem: (-problem["level"], -problem["weight"]))
        return found

    def _nodes(self, state: State, found: list[Problem]) -> None:
        for address, error in state.lookupds.items():
            if error is not None:
                found.append(
                    _problem("lookupd_down", 2, f"nsqlookupd {address} does not answer", "/lookup", node=address)
                )
        for address, row in state.node_rows.items():
            link = f"/nodes/{quote(address, safe=':[]')}"
            if not row["up"]:
                found.append(_problem("node_down", 3, f"{address} does not answer: {row['error']}", link, node=address))
                continue
            free, reserve = row["disk_free"], row["disk_reserve"]
            if free is not None and reserve and free < 2 * reserve:
                level, what = (3, "publishes are refused") if free < reserve else (2, "publishes stop soon")
                text = f"disk of {address} nearly full, {free >> 20:,} MiB free: {what}"
                values = {"disk_free": free, "disk_reserve": reserve}
                found.append(_problem("disk_full", level, text, link, node=address, values=values))
            elif row["health"] not in (None, "OK"):
                found.append(_problem("unhealthy", 3, f"{address}: {row['health']}", link, node=address))
        versions = {row["version"] for row in state.node_rows.values() if row["up"]}
        if len(versions) > 1:
            found.append(
                _problem("versions", 1, f"nodes of {len(versions)} versions: {', '.join(sorted(versions))}", "/nodes")
            )

    def _channels(self, state: State, found: list[Problem]) -> None:
        for (topic, channel), row in state.channels.items():
            names = {"topic": topic, "channel": channel}
            link = f"/topics/{quote(topic, safe='')}/{quote(channel, safe='')}"
            depth, growth = row["depth"], row["growth"] or 0
            values = {"depth": depth, "growth": growth}
            grows = growth > LEAST_GROWTH and depth > 10 * growth
            if row["paused"] and depth:
                found.append(
                    _problem("paused", 1, f"paused with {_amount(depth)} messages", link, depth, values, **names)
                )
            elif channel == "redrive" and topic.endswith(_DEAD):
                # Where redrives take dead letters from: those that stay have nobody who consumes them.
                pass
            elif depth and not row["clients"]:
                rate = f" grows by {_amount(growth)}/s" if growth > LEAST_GROWTH else ""
                text = f"depth {_amount(depth)}{rate}, no consumers"
                level = 2 if growth > LEAST_GROWTH else 1
                found.append(_problem("no_consumers", level, text, link, depth, values, **names))
            else:
                if grows:
                    text = f"depth {_amount(depth)} grows by {_amount(growth)}/s"
                    found.append(_problem("growing", 2, text, link, growth, values, **names))
                if (topic, channel) in state.unserved:
                    count, stuck = state.unserved[topic, channel]
                    text = f"{_amount(stuck)} messages on {count} of {row['nodes']} nodes, and no consumers there"
                    found.append(_problem("some_consumers", 1, text, link, stuck, {"depth": stuck}, **names))
            timeouts, delivered = row["timed_out"] or 0, row["delivered"] or 0
            if timeouts and timeouts > MOST_TIMEOUTS * delivered:
                text = f"{_amount(timeouts)}/s of {_amount(delivered)}/s deliveries time out"
                found.append(_problem("timeouts", 1, text, link, timeouts, {"timed_out": timeouts}, **names))
            self._dead_letters(state, row, found)

    def _dead_letters(self, state: State, row: dict[str, Any], found: list[Problem]) -> None:
        count = row["dead_lettered_count"]
        if count is None:
            return
        key = (row["topic"], row["channel"])
        past = self._dead.get(key)
        if past is None:
            # What died before we looked is not of the last hour, as far as we know.
            self._dead[key] = deque([(state.at, count)])
            return
        if count != past[-1][1]:
            if count < past[-1][1]:
                past.clear()
            past.append((state.at, count))
        while len(past) > 1 and past[1][0] < state.at - 3600:
            past.popleft()
        recent = count - past[0][1]
        if recent > 0:
            level = 2 if past[-1][0] > state.at - 60 else 1
            link = f"/dead?topic={quote(key[0], safe='')}&channel={quote(key[1], safe='')}"
            text = f"{_amount(recent)} dead letters in the last hour"
            found.append(
                _problem("dead_letters", level, text, link, recent, {"count": recent}, topic=key[0], channel=key[1])
            )

    def _topics(self, state: State, found: list[Problem]) -> None:
        for topic, row in state.topics.items():
            link = f"/topics/{quote(topic, safe='')}"
            depth = row["topic_depth"]
            values = {"depth": depth}
            if row["paused"] and depth:
                text = f"paused with {_amount(depth)} messages"
                found.append(_problem("paused", 1, text, link, depth, values, topic=topic))
            elif depth and not row["channels"] and not topic.endswith(_DEAD):
                text = f"{_amount(depth)} messages and no channel"
                found.append(_problem("no_channels", 1, text, link, depth, values, topic=topic))

    def _readers(self, state: State, found: list[Problem]) -> None:
        for name, row in state.readers.items():
            if row["lag"] and state.at * 1000 - row["moved"] > STILL:
                text = f"{name} is {_amount(row['lag'])} messages behind and does not move"
                problem = _problem("reader_behind", 2, text, "/pipelines", row["lag"], {"lag": row["lag"]}, reader=name)
                found.append({**problem, "since": row["moved"]})

    def _queries(self, state: State, found: list[Problem]) -> None:
        for row in state.queries.values():
            name, lag = row["label"], row["lag"] or 0
            if row["state"] == "failed":
                text = f"the query failed: {row['error'] or 'it does not say why'}"
                problem = _problem("query_failed", 2, text, "/pipelines", lag, reader=name)
                found.append({**problem, "since": row["at"]})
            elif row["state"] == "silent":
                text = "the query should run, and does not report any more"
                problem = _problem("query_silent", 2, text, "/pipelines", lag, reader=name)
                found.append({**problem, "since": row["reported"]})


def _problem(
    kind: str,
    level: int,
    text: str,
    link: str,
    weight: float = 0,
    values: dict[str, Any] | None = None,
    *,
    topic: str | None = None,
    channel: str | None = None,
    node: str | None = None,
    reader: str | None = None,
) -> Problem:
    names = {"topic": topic, "channel": channel, "node": node, "reader": reader}
    return {"kind": kind, "level": level, **names, "text": text, "values": values or {}, "link": link, "weight": weight}
