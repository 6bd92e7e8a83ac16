"""What somebody may try, and what daemons may do: requests that aim elsewhere, nodes that lie, hang or change names."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq.admin.daemon import Admin
from flintmq.broker.daemon import Broker
from flintmq.cluster.node import NodeClient
from flintmq.lookup.daemon import Lookupd
from support.http_client import HttpClient, request_of
from support.ports import held_port
from support.secure import Certificates

from .conftest import Cluster, until
from .test_around import server

Start = Callable[..., Awaitable[Cluster]]


# --- Where actions go -------------------------------------------------------------------------------------------------


async def test_an_action_that_is_done_everywhere_takes_no_node(cluster: Cluster) -> None:
    await cluster.sample()
    for action in ("empty_channel", "empty_topic", "delete_channel", "delete_topic", "pause_topic", "pause_channel"):
        target = f"action={action}&topic=orders&channel=mail"
        for node in (cluster.node(0), "127.0.0.1:1"):
            body = {"action": action, "topic": "orders", "channel": "mail", "node": node}
            answer = await cluster.ask("POST", "/api/v2/actions", json.dumps(body).encode())
            assert (answer.status, answer.message.partition(":")[0]) == (400, "INVALID_NODE"), action
            assert (await cluster.get(f"/api/v2/preview?{target}&node={node}")).status == 400, action
    depths = [broker.topics["orders"].channels["mail"].depth for broker in cluster.brokers]
    assert depths == [10, 10, 10] and not cluster.brokers[1].topics["orders"].paused


async def test_a_topic_is_counted_before_it_is_deleted_not_when_it_was_sampled(start: Start) -> None:
    cluster = await start(2)
    await cluster.sample()
    await cluster.nsqd(1, "/pub?topic=new", b"precious")
    await cluster.registered("new")
    answer = await cluster.ask("POST", "/api/v2/actions", b'{"action":"delete_topic","topic":"new"}')
    assert answer.status == 400 and answer.message.startswith("CONFIRM: 1 messages")
    preview = (await cluster.get("/api/v2/preview?action=delete_topic&topic=new")).json
    assert (preview["confirm"], preview["nodes"]) == ("new", [cluster.node(1)])


async def test_nobody_has_requests_and_tokens_sent_elsewhere(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    heard: list[Any] = []
    async with server(heard, '{"topics":[],"producers":[]}') as mine:
        cluster = await start(
            1, http_address="0.0.0.0:0", nsqd_http_token_file=str(token), lookupd_http_token_file=str(token)
        )
        cluster.clients[cluster.admin.http_address] = await cluster._to(
            cluster.admin.http_address.replace("0.0.0.0", "127.0.0.1")
        )
        answer = await cluster.ask("DELETE", f"/api/nodes/{mine}", b'{"topic":"x"}')
        assert (answer.status, answer.message) == (404, "NODE_NOT_FOUND")
        body = json.dumps({"action": "tombstone_topic_producer", "topic": "x", "node": mine}).encode()
        assert (await cluster.ask("POST", "/api/v2/actions", body)).status == 404
        # NSQ's rules let visitors of loopback change it; the tokens are not theirs.
        answer = await cluster.ask("PUT", "/config/nsqlookupd_http_addresses", json.dumps([mine]).encode())
        assert answer.status == 401
        for target in (f"/api/nodes/{mine}", f"/api/v2/nodes/{mine}", f"/api/v2/clients?node={mine}"):
            await cluster.get(target)
        await cluster.sample()
    assert heard == []


async def test_a_node_of_the_cluster_is_tombstoned_where_it_is_asked_for(cluster: Cluster) -> None:
    answer = await cluster.ask("DELETE", f"/api/nodes/{cluster.node(1)}", b'{"topic":"orders"}')
    assert answer.json == {"message": ""}
    assert ["orders" in broker.topics for broker in cluster.brokers] == [True, False, True]


# --- One process, one count -------------------------------------------------------------------------------------------


def broker_at(path: Path, port: int, name: str, **options: Any) -> Broker:
    path.mkdir(exist_ok=True)
    return Broker(data_path=path, http_address=f"127.0.0.1:{port}", broadcast_address=name, disk_reserve=0, **options)


@contextlib.asynccontextmanager
async def looking(**options: Any) -> AsyncIterator[tuple[Admin, HttpClient]]:
    async with Admin(**{"refresh_interval": 0, **options}) as admin:
        async with HttpClient.connect(admin.http_address) as client:
            yield admin, client


async def fill(broker: Broker) -> None:
    async with HttpClient.connect(broker.http_address) as client:
        await client.post("/topic/create?topic=orders")
        await client.post("/channel/create?topic=orders&channel=c")
        await client.post("/mpub?topic=orders", b"x\n" * 10)


async def sums(client: HttpClient) -> tuple[int, int, list[str]]:
    totals = (await client.get("/api/v2/overview")).json["totals"]
    nodes = (await client.get("/api/v2/nodes")).json["items"]
    return totals["depth"], totals["message_count"], [row["node"] for row in nodes]


def names_in(lookupd: Lookupd) -> list[str]:
    return [one.broadcast_address for one in lookupd.registry.producers.values()]


async def sample_all(admin: Admin) -> None:
    """So often that nodes are looked up again."""
    for _ in range(5):
        await admin.state.sample()


async def test_a_node_counts_once_though_it_was_down_when_its_name_was_asked_for(tmp_path: Path) -> None:
    port = held_port()
    async with looking(nsqd_http_addresses=[f"127.0.0.1:{port}"]) as (admin, client):
        await sample_all(admin)
        assert await sums(client) == (0, 0, [f"127.0.0.1:{port}"])
        for _ in range(2):
            async with broker_at(tmp_path / "data", port, "localhost") as broker:
                if "orders" not in broker.topics:
                    await fill(broker)
                await sample_all(admin)
                await sample_all(admin)
                depth, _, nodes = await sums(client)
                assert (depth, nodes) == (10, [f"localhost:{port}"])
            # While it is down, too, it has one name.
            await sample_all(admin)
            assert await sums(client) == (0, 0, [f"localhost:{port}"])


async def test_a_node_that_comes_back_with_another_name_counts_once(tmp_path: Path) -> None:
    port = held_port()
    async with Lookupd() as lookupd, looking(nsqlookupd_http_addresses=[lookupd.http_address]) as (admin, client):
        for name in ("127.0.0.1", "localhost"):
            options = {"nsqlookupd_tcp_addresses": [lookupd.tcp_address]}
            async with broker_at(tmp_path / "data", port, name, **options) as broker:
                if name == "127.0.0.1":
                    await fill(broker)
                await until(lambda name=name: name in names_in(lookupd))
                await sample_all(admin)
                depth, _, nodes = await sums(client)
                assert (depth, nodes) == (10, [f"{name}:{port}"])
            await until(lambda: not lookupd.registry.producers)


async def test_a_node_that_no_nsqlookupd_lists_leaves_the_sums_after_a_minute(cluster: Cluster) -> None:
    await cluster.sample()
    left = cluster.node(0)
    cluster.lookupd.registry.producers.clear()
    for seconds in (2, 2, 2, 2, 50):
        await cluster.sample(seconds)
    # A nsqlookupd that has just been started knows nobody yet.
    assert (await cluster.get("/api/v2/overview")).json["totals"]["depth"] == 60
    for _ in range(2):
        await cluster.sample(40)
    overview = (await cluster.get("/api/v2/overview")).json
    assert overview["totals"]["depth"] == 0 and left in overview["missing"]
    row = (await cluster.get(f"/api/v2/nodes/{left}")).json["node"]
    assert row["up"] is False and "no nsqlookupd lists it" in row["error"]


async def test_of_a_cluster_that_was_left_nothing_stays(cluster: Cluster) -> None:
    await cluster.sample()
    async with Lookupd() as empty:
        body = json.dumps([empty.http_address]).encode()
        assert (await cluster.ask("PUT", "/config/nsqlookupd_http_addresses", body)).status == 200
        overview = (await cluster.get("/api/v2/overview")).json
        assert (overview["totals"]["depth"], overview["nodes"]) == (0, {"total": 0, "up": 0})
        assert (await cluster.ask("POST", "/api/v2/publish", b'{"topic":"new","body":"x"}')).status == 502


# --- Daemons that lie or hang -----------------------------------------------------------------------------------------

_INFO = '{"version":"1.3.0","broadcast_address":"127.0.0.1","hostname":"h","http_port":%d,"tcp_port":1%s}'


@pytest.mark.parametrize(
    ("info", "stats"),
    [
        ("[]", "{}"),
        ('{"version":5}', "{}"),
        (_INFO, "null"),
        (_INFO, '{"topics":[{}]}'),
        (_INFO, '{"topics":[{"topic_name":"orders","channels":[{"channel_name":"c","depth":"x"}]}]}'),
        (_INFO, '{"topics":[],"memory":[]}'),
        (_INFO, "[" * 100_000),
    ],
    ids=["a list", "a wrong version", "null", "no name", "text for a number", "a wrong memory", "deep"],
)
@pytest.mark.parametrize("kind", ["nsq", "flintmq"])
async def test_a_node_that_answers_nonsense_is_missing_and_spoils_nothing(
    tmp_path: Path, info: str, stats: str, kind: str
) -> None:
    async def handle(request: Any) -> Any:
        from aiohttp import web

        if not request.path.startswith("/info"):
            return web.Response(text=stats)
        extra = ',"flintmq":{}' if kind == "flintmq" else ""
        return web.Response(text=info % (request.url.port, extra) if "%d" in info else info)

    async with serving(handle) as odd, broker_at(tmp_path / "data", 0, "127.0.0.1") as broker:
        await fill(broker)
        async with looking(nsqd_http_addresses=[broker.http_address, odd]) as (admin, client):
            await sample_all(admin)
            overview = (await client.get("/api/v2/overview")).json
            assert (overview["totals"]["depth"], overview["missing"]) == (10, [odd])
            assert odd in (await client.get("/api/v2/clients")).json["missing"]
            for target in ("/api/topics", "/api/topics/orders", "/api/counter", "/api/nodes", "/api/topics/orders/c"):
                answer = await client.get(target)
                assert answer.status == 200, target
            assert (await client.get("/api/topics/orders")).json["depth"] == 0
            assert (await client.get("/api/topics/orders/c")).json["depth"] == 10


async def test_an_nsqlookupd_that_answers_nonsense_is_down(start: Start) -> None:
    async with server([], '{"producers":[{"topics":5}],"topics":{}}') as odd:
        cluster = await start(1)
        body = json.dumps([odd, cluster.lookupd.http_address]).encode()
        await cluster.ask("PUT", "/config/nsqlookupd_http_addresses", body)
        assert (await cluster.get("/api/v2/overview")).json["lookupds"] == {"total": 2, "up": 1}
        for target in ("/api/topics", "/api/nodes", "/api/v2/lookupds"):
            assert (await cluster.get(target)).status == 200


@contextlib.asynccontextmanager
async def serving(handle: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[str]:
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_node_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def handle(request: Any) -> Any:
        from aiohttp import web

        await over.wait()
        return web.Response(text="{}")

    async with serving(handle) as hung, broker_at(tmp_path / "data", 0, "127.0.0.1") as broker:
        await fill(broker)
        options = {
            "nsqd_http_addresses": [hung, broker.http_address],
            "refresh_interval": 20_000_000,
            "http_client_request_timeout": 3600 * 10**9,
        }
        async with looking(**options) as (admin, client):
            overview = (await client.get("/api/v2/overview")).json
            assert (overview["totals"]["depth"], overview["missing"]) == (10, [hung])
            seen = admin.state.nodes[broker.http_address].seen
            await until(lambda: admin.state.nodes[broker.http_address].seen > seen + 0.1)
            over.set()


async def test_a_node_that_takes_plain_http_again_is_found_again(tmp_path: Path) -> None:
    port, certificates = held_port(), Certificates(tmp_path)
    secure = {"https_address": "127.0.0.1:0", "tls_cert": certificates.cert, "tls_key": certificates.key}
    options = {
        "nsqd_http_addresses": [f"127.0.0.1:{port}"],
        "http_client_tls_root_ca_file": certificates.ca,
    }
    async with looking(**options) as (admin, client):
        # HTTPS, HTTPS at another port, plain.
        for given in ({**secure, "tls_required": "true"}, {**secure, "tls_required": "true"}, {}):
            async with broker_at(tmp_path / "data", port, "127.0.0.1", **given) as broker:
                broker.topic("orders").channel("c")
                await admin.state.sample()
                assert (await client.get("/api/topics")).json == {"topics": ["orders"], "message": ""}
                assert admin.state.missing == []
                answer = await client.get("/api/v2/messages?topic=orders&channel=c")
                assert answer.status == 200 and answer.json["messages"] == []


# --- Input ------------------------------------------------------------------------------------------------------------

_JOB = '{"kind":"requeue","topic":"orders","channel":"mail",'


ODD_INPUT = [
    ("POST", "/api/v2/jobs", _JOB + '"messages":[],"delay":1' + "0" * 400 + "}", 400),
    ("POST", "/api/v2/jobs", _JOB + '"messages":[],"delay":true}', 400),
    ("POST", "/api/v2/jobs", _JOB + '"messages":5}', 400),
    ("POST", "/api/v2/jobs", '{"kind":"count","topic":"orders","channel":"mail","min_attempts":1e999}', 400),
    ("POST", "/api/v2/jobs", "[" * 200_000, 400),
    ("POST", "/api/v2/seek", '{"topic":"orders","channel":"mail","to":true}', 400),
    ("POST", "/api/v2/seek", '{"topic":"orders","channel":"mail","to":1' + "0" * 400 + "}", 400),
    ("POST", "/api/v2/publish", '{"topic":"orders","body":{"a":1}}', 400),
    ("POST", "/api/v2/publish", '{"topic":"orders","body":true}', 400),
    ("POST", "/api/v2/publish", '{"topic":"orders","body":"x","defer":1' + "0" * 400 + "}", 400),
    ("PUT", "/api/v2/settings?topic=orders", '{"ttl":1e999}', 400),
    ("PUT", "/api/v2/settings?topic=orders", '{"\\ud800":1}', 400),
    ("POST", "/api/v2/actions", '{"action":["x"]}', 400),
    ("POST", "/api/v2/login", '{"user":"\\ud800","password":"x"}', 404),
    ("PUT", "/config/nsqlookupd_http_addresses", '["\u00e9\u00e9..:1"]', 400),
    ("DELETE", "/api/topics/%ff", "", 400),
    ("POST", "/api/topics/%ed%a0%80", '{"action":"pause"}', 400),
    ("DELETE", "/api/nodes/%ff", '{"topic":"orders"}', 400),
    ("GET", "/api/v2/topics/%ff", "", 400),
    ("GET", "/api/v2/history?kind=topic&range=1h&name=%ff", "", 400),
    ("GET", "/api/v2/events?scope=topic:%ff", "", 400),
    ("GET", "/api/graphite?metric=rate&target=%ff", "", 400),
    ("GET", "/api/v2/messages?topic=orders&channel=mail&filter=%ff", "", 200),
]


async def test_odd_input_is_refused_and_leaves_nothing_behind(odd: Cluster) -> None:
    for method, target, body, status in ODD_INPUT:
        answer = await odd.ask(method, target, body.encode() or None)
        assert answer.status == status, (method, target, body[:100], answer)
        assert (await odd.get("/api/v2/jobs")).json["jobs"] == []


@pytest.fixture
async def odd(start: Start) -> Cluster:
    cluster = await start(1)
    await cluster.nsqd(0, "/topic/create?topic=orders")
    await cluster.nsqd(0, "/channel/create?topic=orders&channel=mail")
    await cluster.sample()
    return cluster


async def test_a_file_of_the_pages_has_one_name(start: Start) -> None:
    cluster = await start(1)
    assert (await cluster.get("/static/app.css")).status == 200
    for name in ("./app.css", "x/../app.css", "js/../app.css", "/app.css", "%2e/app.css", ".//app.css", "js/./app.js"):
        assert (await cluster.get(f"/static/{name}")).status == 404, name


async def test_nobody_follows_without_end(odd: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.admin.messages.MOST_TAILS_OF_ONE", 1)
    async with HttpClient.connect(odd.admin.http_address) as client:
        client.send(request_of("GET", "/api/v2/tail?topic=orders", None))
        await client.reader.readuntil(b"event: hello")
        answer = await odd.get("/api/v2/tail?topic=orders")
        assert (answer.status, answer.message.partition(":")[0]) == (429, "TOO_MANY_VIEWERS")


async def test_a_dead_letter_topic_that_others_change_is_seen(odd: Cluster) -> None:
    target = "/api/v2/topics/orders/mail"
    assert (await odd.get(target)).json["dead_letter_topic"] == "orders.mail.dead"
    async with NodeClient(odd.node(0)) as node:
        await node.set_channel_settings("orders", "mail", {"dead-letter-topic": "elsewhere"})
    odd.wall.seconds += 11
    assert (await odd.get(target)).json["dead_letter_topic"] == "elsewhere"
