"""What stands around nsqadmin: daemons with TLS and tokens, the notification endpoint, Graphite."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flintmq.admin.daemon import Admin
from flintmq.broker.daemon import Broker
from flintmq.errors import OptionError, StartError
from flintmq.options import NsqadminOptions
from support.http_client import HttpClient
from support.secure import Certificates

from .conftest import Cluster

Start = Callable[..., Awaitable[Cluster]]


@contextlib.asynccontextmanager
async def server(heard: list[Any], answer: str = "", status: int = 200) -> AsyncIterator[str]:
    """An HTTP server that writes down what it hears; its address."""

    async def handle(request: web.Request) -> web.Response:
        heard.append((request.method, request.raw_path, dict(request.headers), await request.text()))
        return web.Response(text=answer, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_node_that_wants_tls_is_asked_again_with_it(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    broker = Broker(
        data_path=data,
        http_address="127.0.0.1:0",
        https_address="127.0.0.1:0",
        broadcast_address="127.0.0.1",
        tls_cert=certificates.cert,
        tls_key=certificates.key,
        tls_required="true",
        disk_reserve=0,
    )
    async with broker, contextlib.AsyncExitStack() as stack:
        broker.topic("orders").channel("billing")
        options = {"nsqd_http_addresses": [broker.http_address], "refresh_interval": 0}
        admin = await stack.enter_async_context(Admin(**options, http_client_tls_root_ca_file=certificates.ca))
        client = await stack.enter_async_context(HttpClient.connect(admin.http_address))
        assert (await client.get("/api/topics")).json == {"topics": ["orders"], "message": ""}
        # Also what NSQ lacks goes there.
        answer = await client.get("/api/v2/messages?topic=orders&channel=billing")
        assert answer.status == 200 and answer.json["messages"] == []
        distrustful = await stack.enter_async_context(Admin(**options))
        client = await stack.enter_async_context(HttpClient.connect(distrustful.http_address))
        assert (await client.get("/api/topics")).status == 502


async def test_nodes_are_shown_the_token(tmp_path: Path) -> None:
    tokens, token, data = tmp_path / "tokens", tmp_path / "token", tmp_path / "data"
    data.mkdir()
    for path, text in ((tokens, "secret admin\n"), (token, "secret\n")):
        path.write_text(text)
        path.chmod(0o600)
    broker = Broker(
        data_path=data, http_address="127.0.0.1:0", http_auth_token_file=str(tokens), broadcast_address="127.0.0.1"
    )
    async with broker, contextlib.AsyncExitStack() as stack:
        broker.topic("orders").channel("billing")
        options = {"nsqd_http_addresses": [broker.http_address], "refresh_interval": 0}
        for given, status in (({"nsqd_http_token_file": str(token)}, 200), ({}, 502)):
            admin = await stack.enter_async_context(Admin(**options, **given))
            client = await stack.enter_async_context(HttpClient.connect(admin.http_address))
            assert (await client.get("/api/topics/orders")).status == status
        assert broker.topics["orders"].paused is False


async def test_a_notification_has_the_fields_of_nsq(start: Start) -> None:
    heard: list[Any] = []
    async with server(heard) as endpoint:
        cluster = await start(1, notification_http_endpoint=f"http://{endpoint}/hook")
        body = b'{"topic":"made","channel":"c"}'
        headers = ("User-Agent: me/1", "Authorization: Basic Ym9iOng=", "X-Scheme: https")
        await cluster.ask("POST", "/api/topics", body, *headers)
        # Nothing of that name: told all the same.
        await cluster.ask("POST", "/api/topics/none/c", b'{"action":"pause"}')
        await cluster.admin.notified()
    documents = [json.loads(text) for _, _, _, text in heard]
    assert [document["action"] for document in documents] == ["create_topic", "create_channel", "pause_channel"]
    first = documents[1]
    assert first.pop("remote_ip").startswith("127.0.0.1:")
    assert first == {
        "action": "create_channel",
        "topic": "made",
        "channel": "c",
        "timestamp": int(cluster.wall()),
        "user": "bob",
        "user_agent": "me/1",
        "url": "https://localhost/api/topics",
        "via": socket.gethostname(),
    }
    assert heard[0][2]["Content-Type"] == "application/json" and "user" not in documents[2]


@pytest.mark.parametrize(
    ("series", "rate"),
    [
        ('[{"datapoints":[[120,1]]}]', "2.00"),
        ('[{"datapoints":[[-1,1]]}]', "N/A"),
        ('[{"datapoints":[[null,1]]}]', "N/A"),
        ("[]", "N/A"),
    ],
)
async def test_a_rate_is_asked_of_graphite(start: Start, series: str, rate: str) -> None:
    heard: list[Any] = []
    async with server(heard, series) as graphite:
        cluster = await start(1, graphite_url=f"http://{graphite}")
        answer = await cluster.get("/api/graphite?metric=rate&target=sumSeries(a.*)")
        assert answer.json == {"rate": rate}
    assert heard[0][1] == "/render?target=sumSeries%28a.%2A%29&from=-120sec&until=-60sec&format=json"


async def test_graphite_is_reached_through_a_base_path(start: Start) -> None:
    heard: list[Any] = []
    async with server(heard, "[1]") as graphite:
        url = f"http://ann:secret@{graphite}"
        cluster = await start(1, graphite_url=url, proxy_graphite=True, base_path="/nsq")
        assert (await cluster.get("/nsq/render?target=a&width=3")).body == b"[1]"
    [(method, target, headers, _)] = heard
    assert (method, target) == ("GET", "/render?target=a&width=3")
    assert headers["Authorization"] == "Basic YW5uOnNlY3JldA=="


async def test_options_over_http_are_checked_as_at_the_start(start: Start) -> None:
    cluster = await start(1)
    lookupd = cluster.lookupd.http_address
    for wrong in (b"[]", b'["127.0.0.1"]', b'{"a":1}', b'["127.0.0.1:4161",3]'):
        answer = await cluster.ask("PUT", "/config/nsqlookupd_http_addresses", wrong)
        assert (answer.status, answer.message) == (400, "INVALID_VALUE"), wrong
    answer = await cluster.ask("PUT", "/config/nsqlookupd_http_addresses", json.dumps([lookupd]).encode())
    assert answer.json == [lookupd]
    elsewhere = await start_elsewhere(lookupd)
    assert elsewhere == (403, "FORBIDDEN")


async def start_elsewhere(lookupd: str) -> tuple[int, str]:
    async with Admin(
        nsqlookupd_http_addresses=[lookupd], refresh_interval=0, allow_config_from_cidr="10.0.0.0/8"
    ) as admin:
        async with HttpClient.connect(admin.http_address) as client:
            answer = await client.get("/config/log_level")
            return answer.status, answer.message


async def test_answers_are_compressed_for_those_who_take_it(cluster: Cluster) -> None:
    import zlib

    plain = await cluster.get("/api/counter")
    packed = await cluster.get("/api/counter", "Accept-Encoding: br, gzip, deflate")
    assert packed.headers["content-encoding"] == "gzip" and packed.headers["vary"] == "Accept-Encoding"
    assert zlib.decompress(packed.body, 31) == plain.body
    raw = await cluster.get("/api/counter", "Accept-Encoding: deflate, gzip")
    assert raw.headers["content-encoding"] == "deflate" and zlib.decompress(raw.body, -15) == plain.body


async def test_what_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    known = {"nsqd_http_addresses": ["127.0.0.1:1"], "http_address": "127.0.0.1:0"}
    for wrong, text in (
        ({"http_client_tls_root_ca_file": "/nowhere"}, "failed to read TLS root CA file /nowhere"),
        ({"users_file": "/nowhere"}, "cannot read the users in /nowhere"),
        ({"nsqd_http_token_file": "/nowhere"}, "cannot read the token in /nowhere"),
        ({"action_log": "/nowhere/x"}, "cannot write the action log /nowhere/x"),
        ({"graphite_url": "://", "proxy_graphite": True}, "failed to parse --graphite-url (://)"),
    ):
        with pytest.raises(StartError, match=text.replace("(", r"\(").replace(")", r"\)")):
            await Admin(NsqadminOptions(**known, **wrong)).start()  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--http-client-tls-key must be specified"):
        Admin(NsqadminOptions(**known, http_client_tls_cert="x"))  # type: ignore[arg-type]
