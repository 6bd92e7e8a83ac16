"""What clients can fill before anybody trusts them: memory, answers, topics, channels, logs, files that others read."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.observe import stats
from flintmq.http import site
from flintmq.protocol.wire import encode_command
from support.http_client import HttpClient
from support.secure import Peer, identify, pub

HOSTILE = "x\n      [fake                     ] depth: 0\x1b[2J\x9b\r\u202e"


async def test_texts_of_clients_are_cut_short_in_stats(tmp_path: Path) -> None:
    long = "y" * 10_000
    texts = dict.fromkeys(("client_id", "hostname", "user_agent", "topology_region", "topology_zone"), long)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with Peer.connect(broker.tcp_address) as peer, HttpClient.connect(broker.http_address) as client:
            await peer.negotiate(**texts)
            assert await peer.ask(b"SUB t c\n") == b"OK"
            found = (await client.get("/stats?format=json")).json["topics"][0]["channels"][0]["clients"][0]
            assert {name: len(found[name]) for name in texts} == dict.fromkeys(texts, 256)
            assert len((await client.get("/stats")).body) < 4_000


async def test_control_characters_of_clients_do_nothing_in_text_stats(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with Peer.connect(broker.tcp_address) as peer, HttpClient.connect(broker.http_address) as client:
            await peer.negotiate(hostname=HOSTILE, user_agent=HOSTILE)
            assert await peer.ask(b"SUB t c\n") == b"OK"
            text = (await client.get("/stats")).body.decode()
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
            assert [line for line in text.splitlines() if line.startswith("      [fake")] == []
            assert r"x\n      [fake" in text
            # In JSON they are what they are.
            found = (await client.get("/stats?format=json")).json["topics"][0]["channels"][0]["clients"][0]
            assert found["hostname"] == HOSTILE


async def test_json_stats_in_slices_are_the_same(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, disk_reserve=0) as broker:
        for number in range(20):
            topic = broker.topic(f"t{number}")
            for other in range(3):
                topic.channel(f"c{other}")
        async with Peer.connect(broker.tcp_address) as peer:
            await peer.negotiate(hostname="<&>", user_agent="\u2028")
            assert await peer.ask(b"SUB t1 c1\n") == b"OK"
            for wanted in ({}, {"topic": "t1"}, {"include_clients": False}, {"topic": "none"}, {"extended": True}):
                asked: dict[str, Any] = {"include_mem": False, **wanted}
                whole = await stats.survey_json(broker, **asked)
                assert msgspec.json.decode(whole) == msgspec.to_builtins(stats.document(broker, **asked))
                assert not re.search("[<>&\u2028]", whole.decode())


async def test_unfinished_identifies_hold_little(tmp_path: Path) -> None:
    """The first byte beyond 64 KiB is never waited for."""
    async with Broker(data_path=tmp_path, disk_reserve=0, auth_http_addresses=("127.0.0.1:1",)) as broker:
        for verb in (b"IDENTIFY", b"AUTH"):
            async with Peer.connect(broker.tcp_address) as peer:
                peer.send(verb + b"\n" + (65_537).to_bytes(4, "big"))
                frame = await peer.frame()
                assert frame is not None
                assert frame[1] == b"E_BAD_BODY %b body too big 65537 > 65536" % verb


@pytest.mark.parametrize("limit", ["max_topics", "max_channels", "max_creation_rate"])
async def test_clients_make_no_more_topics_and_channels_than_they_may(limit: str, tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0, **{limit: 2}) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            statuses = []
            for number in range(6):
                topic = "t" if limit == "max_channels" else f"t{number}"
                if limit == "max_channels":
                    broker.topic("t")
                    answer = await client.post(f"/channel/create?topic=t&channel=c{number}")
                elif number % 2:
                    answer = await client.post(f"/topic/create?topic={topic}")
                else:
                    answer = await client.post(f"/pub?topic={topic}", b"x")
                statuses.append(answer.status)
            expected = 429 if limit == "max_creation_rate" else 503
            # The bucket may have got another drop meanwhile.
            assert statuses[:2] == [200, 200]
            assert statuses.count(expected) >= 3
        made = broker.topics if limit != "max_channels" else broker.topics["t"].channels
        assert len(made) == statuses.count(200)
        refused = "limit of 2 "
        for words in (pub(b"new"), b"SUB new new\n", encode_command(b"MPUB", b"new", body=b"\0\0\0\1\0\0\0\1x")):
            if limit == "max_topics":
                async with Peer.connect(broker.tcp_address) as peer:
                    assert refused in (await peer.ask(words)).decode()
        if limit == "max_channels":
            async with Peer.connect(broker.tcp_address) as peer:
                assert await peer.ask(b"SUB t new\n") == b"E_SUB_FAILED SUB failed limit of 2 channels of t reached"
            # What is there goes on.
            async with Peer.connect(broker.tcp_address) as peer:
                assert await peer.ask(b"SUB t c0\n") == b"OK"
        assert "new" not in broker.topics


async def test_staged_rows_make_no_topics_either(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0, max_topics=1) as broker:
        broker.topic("t")
        producer = broker.stage.producer("p")
        await producer.open("run", "job", 0)
        await producer.begin(1, 0, "a", None)
        async with HttpClient.connect(broker.http_address) as client:
            target = "/stage/put?producer=p&epoch=1&txn=0&attempt=a&chunk=0&topic="
            chunk = b"\0\0\0\1\0\0\0\1x"
            assert (await client.post(target + "new", chunk)).message == "limit of 1 topics reached"
            assert (await client.post(target + "t", chunk)).status == 200


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o600), ("0660", 0o660), ("777", 0o777)])
async def test_unix_sockets_are_for_those_whom_the_mode_names(mode: str | None, expected: int, tmp_path: Path) -> None:
    options = {} if mode is None else {"unix_socket_mode": mode}
    addresses = {"tcp_address": str(tmp_path / "tcp"), "http_address": str(tmp_path / "http")}
    before = os.umask(0)
    try:
        async with Broker(data_path=tmp_path, disk_reserve=0, **addresses, **options) as broker:
            for path in addresses.values():
                assert stat.S_IMODE(os.stat(path).st_mode) == expected
            async with HttpClient.connect(broker.http_address) as client:
                assert (await client.get("/ping")).status == 200
        assert os.umask(0) == 0
    finally:
        os.umask(before)


async def test_secrets_in_a_query_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            for name in ("token", "access_token", "secret", "password", "Authorization", "api_key", "pwd", "Bearer"):
                await client.get(f"/info?a=b&{name}=s3cr3t&c=d")
                await client.get(f"/nothing?{name}=s3cr3t")
                await client.get(f"/ping?{name}=s3cr3t")
                await client.get(f"/ping?a=b&x{name}%5B0%5D=s3cr3t?s3cr3t#s3cr3t;c=d")
            await client.get("/ping?%74oken=s3cr3t")
    assert "s3cr3t" not in caplog.text
    assert "/info?a=b&token=***&c=d" in caplog.text


async def test_a_long_target_costs_the_log_little(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The words that secrets are known by may stand in it thousands of times."""
    caplog.set_level("INFO")
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:

            async def seconds(words: str) -> float:
                began = time.perf_counter()
                assert (await client.get("/ping?" + words)).status == 200
                return time.perf_counter() - began

            few, many = [
                min([await seconds("?token" * count) for _ in range(3)])
                # Eight times as many: with work that grows with their square, or faster, it would be 64 times as long.
                for count in (40, 320)
            ]
            assert many < 16 * few + 0.02, (few, many)
            await client.get("/ping?" + "x" * 60_000)
    assert max(map(len, caplog.messages)) < 3_000


async def test_long_paths_are_not_looked_for_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    real = site._match

    def counted(pattern: Any, given: Any) -> Any:
        parts.append(len(given))
        return real(pattern, given)

    monkeypatch.setattr(site, "_match", counted)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            for method in ("GET", "POST", "OPTIONS"):
                assert (await client.ask(method, "/" + "a/" * 30_000)).status == 404
            assert sum(parts) < 500
            assert (await client.get("/./" * 10 + "PING")).status == 301


async def test_a_head_has_a_limited_number_of_lines(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        for target in ("/ping", "/info"):
            async with HttpClient.connect(broker.http_address) as client:
                assert (await client.get(target, *["a: b"] * 100)).status == 200
                client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (target.encode(), b"a:\r\n" * 130))
                assert (await client.reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_identities_do_not_outgrow_their_share(tmp_path: Path) -> None:
    """Sixty clients that have begun to identify themselves, and stop in the middle of it."""
    async with Broker(data_path=tmp_path, disk_reserve=0) as broker, asyncio.timeout(30):
        before = stats.resident_bytes()
        words = identify(client_id="y" * 60_000)
        peers = [Peer.connect(broker.tcp_address) for _ in range(60)]
        for peer in [await peer.__aenter__() for peer in peers]:
            peer.send(words[:-1])
        async with Peer.connect(broker.tcp_address) as last:
            await last.negotiate()
        assert stats.resident_bytes() - before < 60 << 20
        for context in peers:
            await context.__aexit__(None, None, None)
