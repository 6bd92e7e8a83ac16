"""The routes of the pages, with three real nodes."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq import Consumer
from flintmq.admin.hub import event
from support.http_client import HttpClient
from support.nsq_client import NsqClient

from .conftest import Cluster, until

DOC = (Path(__file__).resolve().parents[2] / "docs" / "nsqadmin-api.md").read_text()
DOC_OF_NSQ = (Path(__file__).resolve().parents[2] / "docs" / "nsqadmin.md").read_text()
Start = Callable[..., Awaitable[Cluster]]


async def test_every_route_is_in_the_docs_with_its_role(start: Start) -> None:
    cluster = await start(1, proxy_graphite=True, graphite_url="http://127.0.0.1:1")
    rows = dict(re.findall(r"^\| `((?:GET|POST|PUT|DELETE) [^`]+)` \| ([\w ]+) \|", DOC + DOC_OF_NSQ, re.MULTILINE))
    rows["POST /api/v2/actions"] = "operate"
    from flintmq.admin.assets import PAGES

    routes = {f"{route.method} {route.path}": route.role or "none" for route in cluster.admin.site.guarded}
    assert {name: role for name, role in routes.items() if name.removeprefix("GET ") not in PAGES} == rows


@pytest.mark.parametrize("base", ["/", "/queues"])
async def test_a_browser_gets_a_page_where_there_is_none(start: Start, base: str) -> None:
    cluster = await start(1, base_path=base)
    path = f"{base.rstrip('/')}/nosuchpage"
    shown = await cluster.get(path, "Accept: text/html,application/xhtml+xml,*/*;q=0.8")
    assert (shown.status, shown.headers["content-type"]) == (404, "text/html; charset=utf-8")
    # Its script has the page with a link to the overview.
    assert shown.body == (await cluster.get(base)).body
    told = await cluster.get(path, "Accept: */*")
    assert (told.status, told.json) == (404, {"message": "NOT_FOUND"})


async def test_rates_depths_and_what_is_wrong(cluster: Cluster) -> None:
    await cluster.sample()
    await cluster.nsqd(0, "/mpub?topic=orders", b"\n".join([b"x"] * 20))
    await cluster.sample(2)
    overview = (await cluster.get("/api/v2/overview")).json
    assert overview["totals"]["depth"] == 100 and overview["totals"]["published"] == 10
    assert overview["nodes"] == {"total": 3, "up": 3} and overview["missing"] == []
    assert {(one["kind"], one["channel"]) for one in overview["problems"]} == {
        ("no_consumers", "billing"),
        ("no_consumers", "mail"),
    }
    assert overview["problems"][0]["link"].startswith("/topics/orders/")
    assert overview["sparklines"]["series"]["depth"][-1] == pytest.approx(80)
    await cluster.sample(2)
    assert (await cluster.get("/api/v2/overview")).json["totals"]["published"] == 0


async def test_messages_where_a_channel_has_no_consumers_are_a_problem_although_it_has_some_elsewhere(
    cluster: Cluster,
) -> None:
    async with Consumer("orders", "billing", nsqd=[cluster.brokers[0].tcp_address], max_in_flight=0) as consumer:
        await until(lambda: consumer.connections)
        await cluster.sample()
        problems = (await cluster.get("/api/v2/overview")).json["problems"]
    [found] = [one for one in problems if one["channel"] == "billing"]
    assert (found["kind"], found["level"]) == ("some_consumers", 1)
    assert found["text"].endswith(" messages on 2 of 3 nodes, and no consumers there")


async def test_dead_letters_that_no_redrive_has_taken_are_nobody_s_backlog(cluster: Cluster) -> None:
    for name, channel in (("orders.mail.dead", "redrive"), ("orders", "redrive")):
        await cluster.nsqd(0, f"/topic/create?topic={name}")
        await cluster.nsqd(0, f"/channel/create?topic={name}&channel={channel}")
        await cluster.nsqd(0, f"/pub?topic={name}", b"x")
    await cluster.sample()
    problems = (await cluster.get("/api/v2/overview")).json["problems"]
    assert [one["topic"] for one in problems if one["channel"] == "redrive"] == ["orders"]


async def test_a_node_that_is_down_is_named_and_left_out_of_sums(cluster: Cluster) -> None:
    await cluster.sample()
    gone = cluster.node(2)
    await cluster.brokers[2].stop()
    await cluster.sample()
    overview = (await cluster.get("/api/v2/overview")).json
    assert overview["missing"] == [gone] and overview["totals"]["depth"] == 40
    assert overview["problems"][0]["kind"] == "node_down" and overview["problems"][0]["node"] == gone


async def test_a_deleted_channel_disappears_and_comes_back_new(cluster: Cluster) -> None:
    await cluster.sample()
    await cluster.nsqd(0, "/channel/delete?topic=orders&channel=mail")
    await cluster.sample()
    rows = (await cluster.get("/api/v2/channels?filter=mail")).json["items"]
    assert [row["nodes"] for row in rows] == [2]
    await cluster.nsqd(0, "/channel/delete?topic=orders&channel=billing")
    await cluster.nsqd(0, "/channel/create?topic=orders&channel=billing")
    await cluster.sample()
    [row] = (await cluster.get("/api/v2/channels?filter=billing")).json["items"]
    assert row["depth"] == 20 and row["nodes"] == 3


async def test_lists_filter_sort_and_page(start: Start) -> None:
    cluster = await start(1)
    for number in range(30):
        await cluster.nsqd(0, f"/topic/create?topic=t{number:02d}")
        await cluster.nsqd(0, f"/mpub?topic=t{number:02d}", b"\n".join([b"x"] * (number + 1)))
    await cluster.sample()
    answer = (await cluster.get("/api/v2/topics?sort=-depth&limit=3&offset=1")).json
    assert [row["topic"] for row in answer["items"]] == ["t28", "t27", "t26"] and answer["total"] == 30
    answer = (await cluster.get("/api/v2/topics?filter=T1&sort=topic&limit=1000")).json
    assert answer["matched"] == 10 and answer["items"][0]["topic"] == "t10"
    refused = await cluster.get("/api/v2/topics?sort=nothing")
    assert (refused.status, refused.message.split(":")[0]) == (400, "INVALID_SORT")


async def test_clients_of_all_nodes(cluster: Cluster) -> None:
    async with NsqClient.to(cluster.brokers[1].tcp_address) as client:
        await client.subscribe("orders", "billing", ready=2)
        await client.message()
        await cluster.sample()
        answer = (await cluster.get("/api/v2/clients?topic=orders&channel=billing")).json
        [row] = answer["items"]
        assert row["node"] == cluster.node(1) and row["ready"] == 2 and row["in_flight"] == 2
        found = await cluster.get(f"/api/v2/client?id={row['id']}")
        assert found.json["client"]["remote_address"] == row["remote_address"]
        channel = (await cluster.get("/api/v2/topics/orders/billing")).json
        assert channel["ready"] == 2 and channel["channel"]["clients"] == 1


async def test_messages_are_found_by_a_path_on_every_node_and_acted_on_as_counted(cluster: Cluster) -> None:
    await cluster.sample()
    answer = (await cluster.get("/api/v2/messages?topic=orders&channel=billing&path=$.n&equals=7")).json
    bodies = [json.loads(base64.b64decode(one["body"])) for one in answer["messages"]]
    assert sorted(one["node"] for one in bodies) == [0, 1, 2] and answer["scanned"] == 30 and answer["next"] is None
    count = {"kind": "count", "topic": "orders", "channel": "billing", "filter": '"n":7'}
    counted = (await cluster.ask("POST", "/api/v2/jobs", json.dumps(count).encode())).json
    await cluster.admin._jobs.get(counted["id"]).wait()
    # What comes after the count is not hit.
    await cluster.nsqd(0, "/pub?topic=orders", b'{"node":9,"n":7}')
    act = json.dumps({"kind": "finish", "of": counted["id"]}).encode()
    job = (await cluster.ask("POST", "/api/v2/jobs", act)).json
    await cluster.admin._jobs.get(job["id"]).wait()
    done = (await cluster.get(f"/api/v2/jobs/{job['id']}")).json
    assert (done["state"], done["matched"], done["done"], done["failed"]) == ("done", 3, 3, 0)
    await cluster.sample()
    left = (await cluster.get("/api/v2/messages?topic=orders&channel=billing&path=$.n&equals=7")).json
    assert [json.loads(base64.b64decode(one["body"]))["node"] for one in left["messages"]] == [9]
    [entry] = (await cluster.get("/api/v2/actions?filter=finish")).json["items"]
    assert entry["detail"] == "3 of 3" and entry["result"] == "ok"


async def test_pages_of_messages_are_all_of_them_once(cluster: Cluster) -> None:
    await cluster.sample()
    seen, after = [], ""
    while True:
        page = (await cluster.get(f"/api/v2/messages?topic=orders&channel=mail&limit=7&after={after}")).json
        seen += [(one["node"], one["id"]) for one in page["messages"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert len(seen) == len(set(seen)) == 30


async def test_a_topic_with_messages_is_deleted_only_by_its_name(cluster: Cluster) -> None:
    await cluster.sample()
    preview = (await cluster.get("/api/v2/preview?action=delete_topic&topic=orders")).json
    assert preview["messages"] == 60 and preview["confirm"] == "orders" and preview["channels"] == 2
    refused = await cluster.ask("POST", "/api/v2/actions", b'{"action":"delete_topic","topic":"orders"}')
    assert refused.status == 400 and "orders" in cluster.brokers[0].topics
    body = b'{"action":"delete_topic","topic":"orders","confirm":"orders"}'
    assert (await cluster.ask("POST", "/api/v2/actions", body)).status == 200
    assert not any("orders" in broker.topics for broker in cluster.brokers)


async def test_settings_are_set_on_every_node(cluster: Cluster) -> None:
    await cluster.sample()
    answer = await cluster.ask("PUT", "/api/v2/settings?topic=orders", b'{"ttl":"2h"}')
    assert answer.json["settings"]["ttl"] == {"value": "2h0m0s", "source": "live", "live": "2h0m0s", "differs": None}
    assert answer.json["errors"] == {} and len(answer.json["nodes"]) == 3
    wrong = await cluster.ask("PUT", "/api/v2/settings?topic=orders", b'{"tttl":"2h"}')
    assert (wrong.status, wrong.message.split(":")[0]) == (400, "INVALID_SETTING")


async def test_dead_letters_are_grouped_and_sent_back(start: Start) -> None:
    cluster = await start(1)
    await cluster.nsqd(0, "/topic/create?topic=orders")
    await cluster.nsqd(0, "/channel/create?topic=orders&channel=billing")
    await cluster.sample()
    body = b'{"max-attempts":1}'
    assert (await cluster.ask("PUT", "/api/v2/settings?topic=orders&channel=billing", body)).status == 200
    await cluster.nsqd(0, "/mpub?topic=orders", b"a\nb\nc")
    async with NsqClient.to(cluster.brokers[0].tcp_address) as client:
        await client.subscribe("orders", "billing", ready=3)
        for _ in range(3):
            message = await client.message()
            client.send(b"REQ " + message.id + b" 0\n")
        channel = cluster.brokers[0].topics["orders"].channels["billing"]
        await until(lambda: channel.leaving.dead_lettered_count == 3)
    # No sample has the dead-letter topic yet, and it may still wait for nsqlookupd.
    started = await cluster.ask("POST", "/api/v2/redrive", b'{"topic":"orders","channel":"billing","rate":1}')
    assert (started.json["planned"], started.json["running"], started.json["reason"]) == (3, True, "")
    again = await cluster.ask("POST", "/api/v2/redrive", b'{"topic":"orders","channel":"billing"}')
    assert again.status == 409
    stopped = await cluster.ask("DELETE", "/api/v2/redrive?topic=orders&channel=billing")
    while stopped.json["running"]:
        stopped = await cluster.get("/api/v2/redrive?topic=orders&channel=billing")
    assert (stopped.json["error"], stopped.json["moved"] < 3) == ("stopped", True)
    actions = (await cluster.get("/api/v2/actions")).json["items"]
    assert sorted(one["action"] for one in actions) == ["redrive", "redrive", "set_settings", "stop_redrive"]
    left = 3 - stopped.json["moved"]
    await cluster.sample()
    dead = (await cluster.get("/api/v2/dead")).json
    [group] = dead["groups"]
    assert (group["topic"], group["channel"], group["reason"], group["count"]) == (
        "orders",
        "billing",
        "requeued",
        left,
    )
    assert dead["complete"] and group["newest"]["dead"]["attempts"] == 1
    listed = (await cluster.get("/api/v2/messages?topic=orders&channel=billing&state=dead")).json
    assert len(listed["messages"]) == left
    other = await cluster.ask("POST", "/api/v2/redrive", b'{"topic":"orders","channel":"billing","reason":"expired"}')
    assert other.status == 200
    while (progress := (await cluster.get("/api/v2/redrive?topic=orders&channel=billing")).json)["running"]:
        pass
    assert progress["moved"] == 0
    body = b'{"topic":"orders","channel":"billing","reason":"requeued"}'
    started = await cluster.ask("POST", "/api/v2/redrive", body)
    assert started.json["planned"] == left
    await until(lambda: cluster.brokers[0].topics["orders"].channels["billing"].depth == 3)
    while (progress := (await cluster.get("/api/v2/redrive?topic=orders&channel=billing")).json)["running"]:
        pass
    assert progress["moved"] == left


async def test_seek_is_counted_first(cluster: Cluster) -> None:
    async with NsqClient.to(cluster.brokers[0].tcp_address) as client:
        await client.subscribe("orders", "billing", ready=4)
        for _ in range(4):
            client.send(b"FIN " + (await client.message()).id + b"\n")
        await until(lambda: cluster.brokers[0].topics["orders"].channels["billing"].depth <= 6)
    await cluster.sample()
    counted = (await cluster.get("/api/v2/seek?topic=orders&channel=billing&to=earliest")).json
    delivered = 10 - cluster.brokers[0].topics["orders"].channels["billing"].depth
    assert counted["again"] == delivered and counted["skipped"] == 0
    done = await cluster.ask("POST", "/api/v2/seek", b'{"topic":"orders","channel":"billing","to":"earliest"}')
    assert [one["messages"] for one in done.json["nodes"]] == [10, 10, 10]


async def test_the_log_tells_its_rate_and_where_each_channel_stands_in_time(cluster: Cluster) -> None:
    await cluster.sample()
    # It counts what a power failure cannot take, which is everything after the next sync.
    for _ in range(500):
        log = (await cluster.get("/api/v2/log?topic=orders&points=10")).json
        if sum(log["counts"]) == 30:
            break
        await asyncio.sleep(0.02)
    assert {one["channel"] for one in log["positions"]} == {"billing", "mail"}
    # Nothing was delivered: each stands where its node's log begins, within the first step.
    assert all(log["from"] <= one["time"] < log["from"] + log["step"] * 1000 for one in log["positions"])
    await cluster.ask("POST", "/api/v2/seek", b'{"topic":"orders","channel":"mail","to":"latest"}')
    await cluster.sample()
    log = (await cluster.get("/api/v2/log?topic=orders&points=10")).json
    assert {one["time"] for one in log["positions"] if one["channel"] == "mail"} == {log["to"]}


async def test_publishing_and_following_a_topic_leaves_no_channel_behind(cluster: Cluster) -> None:
    await cluster.sample()
    async with HttpClient.connect(cluster.admin.http_address) as tail:
        tail.send(b"GET /api/v2/tail?topic=orders HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await tail.reader.readuntil(b"event: hello")
        body = json.dumps({"topic": "orders", "body": "seen by the tail", "node": cluster.node(1)}).encode()
        assert (await cluster.ask("POST", "/api/v2/publish", body)).json == {"node": cluster.node(1), "message": "OK"}
        await tail.reader.readuntil(b"event: message")
        line = (await tail.reader.readuntil(b"\n\n")).partition(b"data: ")[2]
        assert base64.b64decode(json.loads(line)["body"]) == b"seen by the tail"
    assert set(cluster.brokers[1].topics["orders"].channels) == {"billing", "mail"}


async def test_the_event_stream_has_a_snapshot_and_then_changes_alone(cluster: Cluster) -> None:
    await cluster.sample()
    async with HttpClient.connect(cluster.admin.http_address) as stream:
        stream.send(b"GET /api/v2/events?scope=topics HTTP/1.1\r\nHost: localhost\r\n\r\n")

        async def next_event() -> tuple[str, Any]:
            text = b""
            while b"data: " not in text:
                text = await stream.reader.readuntil(b"\n\n")
            kind = re.search(rb"event: (\w+)", text)
            assert kind is not None
            return kind[1].decode(), json.loads(text.partition(b"data: ")[2].strip())

        kinds = [await next_event() for _ in range(3)]
        assert [kind for kind, _ in kinds] == ["hello", "snapshot", "snapshot"]
        assert kinds[0][1]["boot"] == (await cluster.get("/api/v2/session")).json["boot"]
        assert kinds[2][1]["data"]["topics"]["orders"]["depth"] == 60
        await cluster.nsqd(0, "/topic/create?topic=fresh")
        await cluster.sample()
        updates = dict([(data["scope"], data) for kind, data in [await next_event(), await next_event()]])
        assert set(updates["topics"]["data"]["topics"]) >= {"fresh"}
        await cluster.nsqd(0, "/topic/delete?topic=fresh")
        await cluster.sample()
        while True:
            kind, data = await next_event()
            if kind == "update" and data["scope"] == "topics" and "fresh" in data["data"]["topics"]:
                assert data["data"]["topics"]["fresh"] is None
                break


async def test_a_problem_is_told_again_when_it_has_changed_meaningfully(start: Start) -> None:
    cluster = await start(1)
    names = [f"topic-{number:02d}" for number in range(30)]
    for number, name in enumerate(names):
        await cluster.nsqd(0, f"/topic/create?topic={name}")
        await cluster.nsqd(0, f"/channel/create?topic={name}&channel=c")
        # The first ones are the worst.
        await cluster.nsqd(0, f"/mpub?topic={name}", b"\n".join([b"x"] * (400 - 10 * number)))
    await cluster.sample()
    stream = cluster.admin.hub.listen([], "somebody", lambda role: True)

    async def told() -> Any:
        return json.loads((await anext(stream)).partition(b"data: ")[2])

    await told()
    snapshot = (await told())["data"]
    assert (len(snapshot["problems"]), snapshot["problem_count"]) == (30, 30)

    async def changed() -> dict[str, Any]:
        await cluster.sample()
        data = await told()
        return {row["topic"]: row["values"]["depth"] for row in data["data"].get("problems", {}).values()}

    for name in names:
        await cluster.nsqd(0, f"/pub?topic={name}", b"x")
    await changed()
    for name in names:
        await cluster.nsqd(0, f"/pub?topic={name}", b"x")
    # Their depths grow by less than 1 in 50: those at the top are told with their newest numbers.
    assert await changed() == {name: 402 - 10 * number for number, name in enumerate(names[:8])}
    await cluster.nsqd(0, "/mpub?topic=topic-20", b"\n".join([b"x"] * 58))
    assert (await changed())["topic-20"] == 260
    whole = (await cluster.get("/api/v2/problems")).json["problems"]
    assert [row["topic"] for row in whole if row["values"]["depth"] == 112] == ["topic-29"]
    await cluster.nsqd(0, "/channel/empty?topic=topic-29&channel=c")
    await cluster.sample()
    data = (await told())["data"]
    assert [row for row in data["problems"].values() if row is None] == [None]
    assert data["problem_count"] == 29
    await stream.aclose()


async def test_twenty_viewers_cost_one_computation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.sample()
    hub = cluster.admin.hub
    streams = [hub.listen(["topics"], "somebody", lambda role: True) for _ in range(20)]
    for stream in streams:
        for _ in range(3):
            await anext(stream)
    made: list[str] = []
    monkeypatch.setattr("flintmq.admin.hub.event", lambda kind, *rest: made.append(kind) or event(kind, *rest))
    await cluster.nsqd(0, "/pub?topic=orders", b"x")
    await cluster.sample()
    assert made.count("update") == 2
    seen = {await anext(stream) for stream in streams}
    assert len(seen) == 1
    for stream in streams:
        await stream.aclose()
    assert hub.viewer_count == 0


async def test_search_finds_topics_channels_and_nodes(cluster: Cluster) -> None:
    await cluster.sample()
    found = (await cluster.get("/api/v2/search?q=bill")).json["results"]
    assert found[0] == {
        "kind": "channel",
        "name": "billing",
        "detail": "of orders, depth 30",
        "link": "/topics/orders/billing",
    }
    port = cluster.node(0).rpartition(":")[2]
    assert [one["kind"] for one in (await cluster.get(f"/api/v2/search?q={port}")).json["results"]] == ["node"]


async def test_readers_of_logs_are_pipelines(cluster: Cluster) -> None:
    await cluster.nsqd(0, "/log/position?topic=orders&reader=archive&to=earliest")
    await cluster.sample()
    [reader] = (await cluster.get("/api/v2/pipelines")).json["readers"]
    assert reader["reader"] == "archive" and reader["positions"][0]["node"] == cluster.node(0)
    removed = await cluster.ask("DELETE", "/api/v2/pipelines/archive")
    assert removed.json == {"removed": 1, "errors": {}}
    await cluster.sample()
    assert (await cluster.get("/api/v2/pipelines")).json["readers"] == []


async def test_queries_that_report_to_several_nodes_are_shown_once_with_their_newest_words(cluster: Cluster) -> None:
    now = int(time.time() * 1000)
    cluster.wall.seconds = time.time()

    async def report(number: int, at: int, **fields: Any) -> None:
        said = {"id": "q-1", "at": at, "name": "archive", "topics": ["orders"], "readers": ["spark-1"], **fields}
        await cluster.nsqd(number, "/pipeline/report", json.dumps(said).encode())

    async def queries(target: str = "/api/v2/pipelines") -> list[dict[str, Any]]:
        await cluster.sample()
        found: list[dict[str, Any]] = (await cluster.get(target)).json["queries"]
        return found

    assert await queries() == []
    await report(0, now, batch=7, rows=70, lag=3)
    await report(1, now - 500, batch=6, rows=60, lag=9)
    [query] = await queries()
    assert (query["label"], query["state"], query["batch"], query["rows"], query["lag"]) == (
        "archive",
        "running",
        7,
        70,
        3,
    )
    assert query["nodes"] == sorted([cluster.node(0), cluster.node(1)])
    # The other node hears the next one.
    await report(1, now + 500, batch=8, rows=80, lag=0, batch_seconds=1.5, rows_per_second=6.5, state_bytes=1000)
    [query] = await queries()
    assert (query["batch"], query["rows"], query["batch_seconds"], query["state_bytes"]) == (8, 80, 1.5, 1000)
    # One that it has left, long ago, is not named.
    await report(1, now + 100_000, batch=9)
    [query] = await queries()
    assert query["nodes"] == [cluster.node(1)]

    # Two of one name are told apart; a topic has its own.
    await report(2, now, id="12345678-9", topics=["payments"], writes=["totals"])
    assert [one["label"] for one in await queries()] == ["archive 12345678", "archive q-1"]
    assert [one["id"] for one in await queries("/api/v2/pipelines?topic=orders")] == ["q-1"]
    assert [one["id"] for one in await queries("/api/v2/pipelines?topic=totals")] == ["12345678-9"]
    found = (await cluster.get("/api/v2/search?q=archive+q")).json["results"]
    assert [(one["kind"], one["name"]) for one in found] == [("query", "archive q-1")]
    past = (await cluster.get("/api/v2/history?kind=query&name=12345678-9")).json
    assert set(past["series"]) == {"lag", "rows_per_second", "batch_seconds"}


async def test_a_query_that_failed_or_fell_silent_needs_attention(cluster: Cluster) -> None:
    cluster.wall.seconds = time.time()
    now = int(cluster.wall.seconds * 1000)

    async def problems() -> dict[str, str]:
        await cluster.sample()
        found = (await cluster.get("/api/v2/problems")).json["problems"]
        return {one["reader"]: one["kind"] for one in found if one["kind"].startswith("query")}

    for state in ("running", "ended", "failed"):
        said = {
            "id": state,
            "at": now,
            "name": state,
            "state": state,
            "error": "disk full" if state == "failed" else "",
        }
        await cluster.nsqd(0, "/pipeline/report", json.dumps(said).encode())
    assert await problems() == {"failed": "query_failed"}
    cluster.wall.seconds += 70
    assert await problems() == {"failed": "query_failed", "running": "query_silent"}
    states = {one["id"]: one["state"] for one in (await cluster.get("/api/v2/pipelines")).json["queries"]}
    assert states == {"running": "silent", "ended": "ended", "failed": "failed"}
    [text] = [
        one["text"] for one in (await cluster.get("/api/v2/problems")).json["problems"] if one["reader"] == "failed"
    ]
    assert text == "the query failed: disk full"
    # It is heard again.
    said = {"id": "running", "at": now + 1, "name": "running"}
    await cluster.nsqd(0, "/pipeline/report", json.dumps(said).encode())
    cluster.wall.seconds = time.time()
    assert await problems() == {"failed": "query_failed"}


async def test_a_node_that_is_down_takes_its_queries_with_it_and_is_named(cluster: Cluster) -> None:
    cluster.wall.seconds = time.time()
    said = {"id": "q", "at": 1, "name": "archive"}
    await cluster.nsqd(0, "/pipeline/report", json.dumps(said).encode())
    await cluster.sample()
    assert len((await cluster.get("/api/v2/pipelines")).json["queries"]) == 1
    address = cluster.node(0)
    await cluster.brokers[0].stop()
    await cluster.sample()
    answer = (await cluster.get("/api/v2/pipelines")).json
    assert (answer["queries"], answer["missing"]) == ([], [address])


async def test_pages_and_files_are_served_below_a_base_path(start: Start) -> None:
    cluster = await start(1, base_path="nsq/")
    page = await cluster.get("/nsq/topics/orders")
    assert page.status == 200 and b'data-base="/nsq"' in page.body
    assert "unsafe" not in page.headers["content-security-policy"]
    assert (await cluster.get("/nsq/ping")).body == b"OK"
    assert (await cluster.get("/ping")).status == 404
    # Browsers ask for it there, beside any answer that names no icon.
    assert (await cluster.get("/favicon.ico")).headers["content-type"] == "image/svg+xml"
    for name in ("..%2f__init__.py", "%2e%2e/daemon.py", "../../options.py", "nothing.js", ""):
        assert (await cluster.get(f"/nsq/static/{name}")).status in (301, 404), name


async def test_actions_are_appended_to_a_file(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "actions.jsonl"
    cluster = await start(1, action_log=str(path))
    await cluster.ask("POST", "/api/topics", b'{"topic":"made"}')
    entry = json.loads(path.read_text())
    assert (entry["action"], entry["topic"], entry["result"]) == ("create_topic", "made", "ok")


async def test_an_export_of_actions_has_what_the_page_shows(start: Start) -> None:
    cluster = await start(1)
    for name in ("orders", "refunds", "orders-eu"):
        await cluster.ask("POST", "/api/topics", json.dumps({"topic": name}).encode())
        cluster.wall.seconds += 1
    shown = (await cluster.get("/api/v2/actions?filter=orders")).json["items"]
    assert [one["topic"] for one in shown] == ["orders-eu", "orders"]
    lines = (await cluster.get("/api/v2/actions?filter=orders&format=jsonl&limit=1")).body.splitlines()
    assert [json.loads(line) for line in lines] == shown
    text = (await cluster.get("/api/v2/actions?filter=orders&format=csv")).body.decode()
    assert [row["topic"] for row in csv.DictReader(io.StringIO(text))] == ["orders-eu", "orders"]
    whole = (await cluster.get("/api/v2/actions?format=csv")).body.decode()
    assert len(list(csv.DictReader(io.StringIO(whole)))) == 3


async def test_a_notification_that_is_refused_changes_nothing(start: Start) -> None:
    cluster = await start(1, notification_http_endpoint="http://127.0.0.1:1/hook")
    assert (await cluster.ask("POST", "/api/topics", b'{"topic":"made"}')).json == {"message": ""}
    await cluster.admin.notified()
    assert (await cluster.get("/ping")).body == b"OK"
