"""What the broker says about itself: the same as the Go daemon in the same scene, and what is ours alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import flintmq
from flintmq.broker.daemon import Broker
from flintmq.broker.net.auth import Grant
from flintmq.broker.net.authorization import Authorization
from flintmq.broker.net.upgrade import Upgrade
from flintmq.broker.observe import prometheus, stats, steps
from flintmq.broker.observe import statsd as statsd_module
from flintmq.broker.observe.statsd import statsd_prefix
from flintmq.protocol.wire import encode_mpub
from support.fakes import SECOND, Client, CountingDisk, FakeClock, pass_time, pub, quiet, until
from support.go_stats import (
    BROADCAST_HOST,
    BROADCAST_PORT,
    NSQD,
    PERCENTILES,
    QUESTIONS,
    RECORDED,
    Scene,
    StatsdServer,
    ask_go,
    plain_lines,
    totals,
)

RECORDING = json.loads(RECORDED.read_text())
#: Keys of the revision after 1.3.0, which the recording cannot have. IDENTIFY has keys of it too.
NEWER_KEYS = {
    "topology_zone",
    "topology_region",
    "zone_local_msg_count",
    "region_local_msg_count",
    "global_msg_count",
}


def without_newer_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_newer_keys(item) for key, item in value.items() if key not in NEWER_KEYS}
    return [without_newer_keys(item) for item in value] if isinstance(value, list) else value


# --- As the Go daemon -------------------------------------------------------------------------------------------------


class Stage:
    """Our broker in the recorded scene."""

    def __init__(self, broker: Broker, statsd: StatsdServer) -> None:
        self.broker = broker
        self.statsd = statsd
        self.scene = Scene(int(broker.tcp_address.rpartition(":")[2]))

    async def play(self) -> None:
        await self.scene.play(self._operate, self._document)

    async def _document(self) -> Any:
        return stats.document(self.broker)

    async def _operate(self, verb: str, topic: str, channel: str) -> None:
        thing = self.broker.topics[topic]
        (thing.channels[channel] if channel else thing).pause(verb == "pause")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    server, port = await StatsdServer.open()
    broker = Broker(
        data_path=tmp_path,
        disk_reserve=0,
        broadcast_address=BROADCAST_HOST,
        broadcast_http_port=BROADCAST_PORT,
        e2e_processing_latency_percentiles=PERCENTILES,
        statsd_address=f"127.0.0.1:{port}",
        statsd_interval=SECOND // 4,
    )
    async with broker:
        stage = Stage(broker, server)
        await stage.play()
        yield stage
        stage.scene.close()
    server.transport.close()


async def test_stats_are_those_of_the_go_daemon(stage: Stage) -> None:
    for question, recorded in zip(QUESTIONS, RECORDING["documents"], strict=True):
        topic, channel, clients, memory = question
        asked = {"topic": topic, "channel": channel, "include_clients": clients, "include_mem": memory}
        document = stats.document(stage.broker, **asked)
        found = without_newer_keys(stage.scene.plain_document(document))
        # As text: the order of keys counts.
        assert json.dumps(found, indent=1) == json.dumps(recorded, indent=1), question
        # The one that takes its time says the same.
        later = stage.scene.plain_document(await stats.survey(stage.broker, **asked))
        assert without_newer_keys(later) == recorded


async def test_the_text_is_that_of_the_go_daemon(stage: Stage) -> None:
    for question, recorded in zip(QUESTIONS, RECORDING["texts"], strict=True):
        topic, channel, clients, memory = question
        asked = {"topic": topic, "channel": channel, "include_clients": clients, "include_mem": memory}
        assert stage.scene.plain_text(stats.text(stage.broker, **asked)) == recorded, question
        assert stage.scene.plain_text(await stats.report(stage.broker, **asked)) == recorded


async def test_statsd_gets_what_the_go_daemon_sends(stage: Stage) -> None:
    [report] = await stage.statsd.whole_reports(1, "mem.gc_runs")
    assert plain_lines(report) == RECORDING["statsd"]
    assert totals(stage.statsd.lines) == RECORDING["totals"]


@pytest.mark.interop
@pytest.mark.skipif(not os.access(NSQD, os.X_OK), reason="no Go nsqd in $FLINTMQ_PEERS/bin or .peers/bin")
async def test_the_recording_is_what_the_go_daemon_says() -> None:
    assert await ask_go() == RECORDING


async def test_keys_of_the_newer_revision_are_in_their_places(stage: Stage) -> None:
    document = stats.document(stage.broker, topic="a", channel="x")
    [channel] = document["topics"][0]["channels"]
    keys = list(channel)
    # Everything came from memory, and without the experiment everybody is far away.
    assert channel["global_msg_count"] == 4
    assert keys[keys.index("message_count") + 1 : keys.index("requeue_count")] == ["global_msg_count"]
    [client] = channel["clients"]
    keys = list(client)
    assert keys[keys.index("user_agent") + 1 :][:2] == ["topology_zone", "topology_region"]


# --- The document -----------------------------------------------------------------------------------------------------


async def test_without_topics_there_is_an_empty_list_and_no_producers(broker: Broker) -> None:
    document = stats.document(broker)
    assert document["topics"] == [] and document["producers"] is None
    assert "Topics: None\n\nProducers: None\n" in stats.text(broker)


async def test_the_document_is_json_without_help(broker: Broker) -> None:
    await Client(broker).publish("t", b"x")
    document = stats.document(broker)
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


async def test_health_is_told(start_broker: Any) -> None:
    disk = CountingDisk()
    broker = await start_broker(disk=disk, disk_reserve=1000)
    disk.free_bytes = 10
    broker.upkeep.look_at_space()
    assert stats.document(broker)["health"].startswith("NOK - the disk is nearly full")
    assert "\nHealth: NOK - the disk is nearly full" in stats.text(broker)


async def test_timeouts_are_counted_and_no_longer_in_flight(broker: Broker, clock: FakeClock) -> None:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", ready=1)
    await Client(broker).publish("t", b"x")
    await until(lambda: consumer.messages)
    consumer.ready(0)
    await pass_time(broker, clock, 61)
    [channel] = stats.document(broker)["topics"][0]["channels"]
    found = {name: channel[name] for name in ("depth", "in_flight_count", "timeout_count", "requeue_count")}
    assert found == {"depth": 1, "in_flight_count": 0, "timeout_count": 1, "requeue_count": 0}
    assert channel["clients"][0]["in_flight_count"] == 0


async def test_what_left_the_memory_is_backend_depth(start_broker: Any) -> None:
    broker = await start_broker(mem_queue_size=0)
    producer = Client(broker)
    await producer.publish_many("t", [b"x" * 100] * 50)
    await producer.publish_many("alone", [b"x" * 100] * 20)
    broker.topics["t"].channel("c")
    await quiet(broker)
    for topic in broker.topics.values():
        topic.trim()
    alone, t = stats.document(broker)["topics"]
    assert (alone["depth"], alone["backend_depth"]) == (20, 20)
    assert (t["depth"], t["channels"][0]["depth"], t["channels"][0]["backend_depth"]) == (0, 50, 50)


class FailingDisk(CountingDisk):
    """Large writes fail, those of the journal do not."""

    failing = False

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        if self.failing and sum(map(len, buffers)) > 1000:
            raise OSError(28, "No space left on device")
        return super().write(fd, buffers, offset)


async def test_counts_of_publishes_that_failed_are_taken_back(start_broker: Any) -> None:
    disk = FailingDisk()
    broker = await start_broker(disk=disk)
    producer = Client(broker)
    await producer.publish_many("t", [b"x" * 700] * 3)
    disk.failing = True
    refused = Client(broker)
    refused.send(encode_mpub(b"t", [b"y" * 700] * 4))
    also_refused = Client(broker)
    also_refused.send(encode_mpub(b"t", [b"z" * 700] * 2))
    await until(lambda: refused.errors and also_refused.errors)
    disk.failing = False
    await producer.publish("t", b"more")
    [topic] = stats.document(broker)["topics"]
    assert (topic["message_count"], topic["message_bytes"], topic["depth"]) == (4, 2104, 4)
    assert broker.counters.refused_count == 6


async def test_counts_of_failed_publishes_from_sockets_are_taken_back(tmp_path: Path) -> None:
    """The same where publishes take the short way, from the socket into the log."""
    disk = FailingDisk()
    async with Broker(data_path=tmp_path, disk=disk, disk_reserve=0) as broker:
        host, _, port = broker.tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"  V2")
        for size in (700, 1500, 700, 1500):
            disk.failing = size > 1000 and broker.topics["t"].message_count == 3
            writer.write(pub("t", b"x" * size))
            answer = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            assert (b"E_PUB_FAILED" in answer) == disk.failing
        disk.failing = False
        [topic] = stats.document(broker)["topics"]
        assert (topic["message_count"], topic["message_bytes"], topic["depth"]) == (3, 2900, 3)
        assert broker.counters.refused_count == 1
        writer.close()
        await writer.wait_closed()


async def test_clients_with_tls_and_authorization(broker: Broker) -> None:
    client = Client(broker)
    await client.publish("t", b"x")
    info = {
        "version": "TLS1.3",
        "cipher_suite": "Unknown 4865",
        "negotiated_protocol": "",
        "negotiated_protocol_is_mutual": True,
    }
    nothing: Any = lambda _: None  # noqa: E731
    upgrade = Upgrade(client.transport, asyncio.get_running_loop(), nothing, nothing, nothing)
    upgrade.tls_info = info
    client.session.upgrade = upgrade
    authorization = Authorization(client.session, nothing, asyncio.get_running_loop())
    authorization.grant = Grant(60, "someone", "http://example.com", ())
    client.session.authorization = authorization
    [producer] = stats.document(broker)["producers"]
    keys = list(producer)
    found = {key: producer[key] for key in keys if key.startswith(("tls", "auth"))}
    assert found == {
        "authed": True,
        "auth_identity": "someone",
        "auth_identity_url": "http://example.com",
        "tls": True,
        "tls_cipher_suite": "Unknown 4865",
        "tls_version": "TLS1.3",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": True,
    }
    assert keys.index("user_agent") < keys.index("authed") < keys.index("pub_counts") < keys.index("tls")


async def test_topology_counts_by_distance(start_broker: Any) -> None:
    broker = await start_broker(
        enable_experiment=("topology-aware-consumption",), topology_region="r", topology_zone="z"
    )
    for zone, region in (("z", "r"), ("q", "r"), ("q", "s")):
        client = Client(broker)
        body = json.dumps({"topology_zone": zone, "topology_region": region}).encode()
        await client.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body)
        await client.subscribe("t", "c", ready=1)
        await Client(broker).publish("t", b"x")
        await until(lambda client=client: client.messages)
    [channel] = stats.document(broker)["topics"][0]["channels"]
    counts = [channel[f"{name}_msg_count"] for name in ("zone_local", "region_local", "global")]
    assert counts == [1, 1, 1]


async def test_a_unix_socket_peer_has_no_port(broker: Broker) -> None:
    await Client(broker, peer="").publish("t", b"x")
    [producer] = stats.document(broker)["producers"]
    assert producer["remote_address"] == "@"
    assert "   [V2 :                    ] msgs: 1        topics: t=1 connected: 0s\n" in stats.text(broker)


async def test_numbers_are_those_of_this_process(broker: Broker) -> None:
    gc.collect()
    memory = stats.document(broker)["memory"]
    assert memory["heap_objects"] > 10_000
    assert memory["heap_in_use_bytes"] > 10_000_000
    assert memory["gc_total_runs"] > 0
    assert memory["gc_pause_usec_100"] >= memory["gc_pause_usec_99"] >= memory["gc_pause_usec_95"]
    assert memory["gc_pause_usec_100"] > 0


async def test_a_stopped_broker_no_longer_listens_to_the_garbage_collector(start_broker: Any) -> None:
    before = len(gc.callbacks)
    broker = await start_broker()
    assert len(gc.callbacks) == before + 1
    await broker.stop()
    broker = await start_broker()
    broker.kill()
    assert len(gc.callbacks) == before


def test_durations_are_for_people() -> None:
    values = [0, 999, 1000, 1001, 1e6, 1_500_000, 1e9, 2_340_000_000, 7.2e12]
    expected = ["0.0ns", "999.0ns", "1000.0ns", "1.0us", "1000.0us", "1.5ms", "1000.0ms", "2.3s", "7200.0s"]
    assert [stats._humanised(value) for value in values] == expected


# --- Prometheus -------------------------------------------------------------------------------------------------------


def families(broker: Broker) -> dict[str, Any]:
    body, kind = prometheus.metrics(broker)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    samples = found[name.removesuffix("_total")].samples
    [sample] = [sample for sample in samples if sample.name == name and sample.labels == labels]
    return float(sample.value)


async def test_metrics_say_what_stats_say(stage: Stage) -> None:
    found = families(stage.broker)
    document = stats.document(stage.broker)
    for topic in document["topics"]:
        labels = {"topic": topic["topic_name"]}
        assert value(found, "nsqd_topic_depth", **labels) == topic["depth"]
        assert value(found, "nsqd_topic_backend_depth", **labels) == topic["backend_depth"]
        assert value(found, "nsqd_topic_messages_total", **labels) == topic["message_count"]
        assert value(found, "nsqd_topic_message_bytes_total", **labels) == topic["message_bytes"]
        assert value(found, "nsqd_topic_paused", **labels) == topic["paused"]
        assert value(found, "nsqd_topic_channels", **labels) == len(topic["channels"])
        for channel in topic["channels"]:
            names = {
                "nsqd_channel_depth": "depth",
                "nsqd_channel_backend_depth": "backend_depth",
                "nsqd_channel_in_flight": "in_flight_count",
                "nsqd_channel_deferred": "deferred_count",
                "nsqd_channel_messages_total": "message_count",
                "nsqd_channel_requeues_total": "requeue_count",
                "nsqd_channel_timeouts_total": "timeout_count",
                "nsqd_channel_clients": "client_count",
                "nsqd_channel_paused": "paused",
            }
            both = {**labels, "channel": channel["channel_name"]}
            assert {name: value(found, name, **both) for name in names} == {
                name: channel[key] for name, key in names.items()
            }
    latency = document["topics"][0]["channels"][0]["e2e_processing_latency"]["percentiles"]
    for item in latency:
        quantile = str(item["quantile"])
        labels = {"topic": "a", "channel": "x", "quantile": quantile}
        assert value(found, "nsqd_channel_latency_seconds", **labels) == item["value"] / SECOND
        assert value(found, "nsqd_topic_latency_seconds", topic="a", quantile=quantile) == item["value"] / SECOND
    # Channel y has finished nothing: it has no quantiles, not some of 0.
    samples = found["nsqd_channel_latency_seconds"].samples
    assert {sample.labels["channel"] for sample in samples if "quantile" in sample.labels} == {"x"}
    for name in ("nsqd_channel_latency_seconds_count", "nsqd_channel_latency_seconds_sum"):
        counts = {sample.labels["channel"]: sample.value > 0 for sample in samples if sample.name == name}
        assert counts == {"x": True, "y": False, "channel": False, "c#ephemeral": False}


async def test_metrics_of_the_node(start_broker: Any, clock: FakeClock) -> None:
    disk = CountingDisk()
    broker = await start_broker(disk=disk, disk_reserve=1000)
    await Client(broker).publish_many("t", [b"x" * 100] * 10)
    broker.topics["t"].channel("c")
    Client(broker).hang_up()
    await until(lambda: len(broker.sessions) == 1)
    found = families(broker)
    [info] = found["nsqd_build_info"].samples
    assert info.labels["version"] == flintmq.__version__ and info.labels["nsq_version"] == "1.3.0"
    assert value(found, "nsqd_start_time_seconds") == clock.wall() // SECOND
    assert value(found, "nsqd_healthy") == 1 and value(found, "nsqd_refusing_publishes") == 0
    assert value(found, "nsqd_topics") == value(found, "nsqd_channels") == 1
    assert value(found, "nsqd_connections") == 1
    assert value(found, "nsqd_connections_opened_total") == 2
    assert value(found, "nsqd_log_segments") == 1
    [segment] = broker.topics["t"].log.segments
    assert value(found, "nsqd_log_segment_bytes") == segment.path.stat().st_size
    assert value(found, "nsqd_log_unsynced_bytes") == broker.store.unsynced
    assert value(found, "nsqd_log_memory_bytes") > 1000
    assert value(found, "nsqd_journal_bytes") > 0
    assert value(found, "nsqd_disk_reserve_bytes") == 1000
    assert value(found, "nsqd_disk_free_bytes") > 1000
    assert value(found, "process_resident_memory_bytes") > 10_000_000
    assert value(found, "process_cpu_seconds_total") > 0
    assert 3 < value(found, "process_open_fds") < value(found, "process_max_fds")

    disk.free_bytes = 10
    broker.upkeep.look_at_space()
    refused = Client(broker)
    refused.send(encode_mpub(b"t", [b"x"] * 7))
    await until(lambda: refused.errors)
    found = families(broker)
    assert value(found, "nsqd_healthy") == 0 and value(found, "nsqd_refusing_publishes") == 1
    assert value(found, "nsqd_disk_free_bytes") == 10
    assert value(found, "nsqd_refused_messages_total") == 7


async def test_counters_are_counters_and_end_in_total(broker: Broker) -> None:
    for family in (*prometheus.NODE_FAMILIES, *prometheus.TOPIC_FAMILIES, *prometheus.CHANNEL_FAMILIES):
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
    kinds = {name: family.type for name, family in families(broker).items()}
    assert kinds["nsqd_topic_messages"] == "counter" and kinds["nsqd_topic_depth"] == "gauge"


async def test_a_scrape_is_the_same_as_reading_at_once(stage: Stage) -> None:
    def stable(body: bytes) -> list[str]:
        return [line for line in body.decode().splitlines() if not line.startswith(("process_", "nsqd_gc", "nsqd_log"))]

    at_once, kind = prometheus.metrics(stage.broker)
    in_turns, same_kind = await prometheus.scrape(stage.broker)
    assert kind == same_kind
    assert stable(at_once) == stable(in_turns)


async def test_a_registry_of_prometheus_client_takes_the_collector(stage: Stage) -> None:
    registry = CollectorRegistry()
    registry.register(prometheus.Collector(stage.broker))
    text = generate_latest(registry).decode()
    theirs = {family.name: family for family in text_string_to_metric_families(text)}
    ours = families(stage.broker)
    assert theirs.keys() == {name for name in ours if not name.startswith("process_")}
    for name in theirs.keys() - {"nsqd_gc_runs", "nsqd_gc_pause_seconds", "nsqd_log_unsynced_bytes"}:
        assert theirs[name].samples == ours[name].samples, name


async def test_many_channels_do_not_hold_up_the_loop(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is handed back by the number of things that were read, on machines of any speed."""
    monkeypatch.setattr(steps, "SLICE", 10)
    for number in range(20):
        topic = broker.topic(f"t{number}")
        for other in range(10):
            topic.channel(f"c{other}")
    turns = 0
    counting = True

    async def count() -> None:
        nonlocal turns
        while counting:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    for reading in (prometheus.scrape(broker), stats.survey(broker), stats.report(broker)):
        turns = 0
        await reading
        # 200 channels at least, ten of them in a slice.
        assert 20 <= turns < 100
    counting = False
    await counter


async def test_the_json_of_many_channels_is_no_work_for_the_garbage_collector(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection takes long in a large broker, and it starts when there are enough new objects."""
    monkeypatch.setattr(steps, "SLICE", 10)
    for number in range(100):
        for other in range(10):
            broker.topic(f"t{number}").channel(f"c{other}")

    async def objects(reading: Coroutine[Any, Any, Any]) -> int:
        """How many objects there were at most while it was read."""
        task = asyncio.create_task(reading)
        most = 0
        gc.collect()
        gc.disable()
        try:
            while not task.done():
                await asyncio.sleep(0)
                most = max(most, gc.get_count()[0])
        finally:
            gc.enable()
        await task
        return most

    assert await objects(stats.survey_json(broker)) * 5 < await objects(stats.survey(broker))


async def test_many_clients_of_one_channel_do_not_hold_up_the_loop(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SLICE", 10)
    for _ in range(50):
        client = Client(broker)
        client.send(b"SUB t c\n")
    await until(lambda: len(broker.topics["t"].channels["c"].sessions) == 50)
    reading = stats.survey(broker, include_mem=False).__await__()
    pauses = sum(1 for _ in reading)
    assert pauses == 5


async def test_topics_that_go_while_they_are_read_are_left_out(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SLICE", 1)
    for name in ("a", "b", "c"):
        broker.topic(name).channel("x")
        broker.topic(name).channel("y")
    reading = asyncio.create_task(prometheus.scrape(broker))
    surveying = asyncio.create_task(stats.survey(broker))
    await asyncio.sleep(0)
    broker.delete_topic("b")
    broker.topics["c"].delete_channel("y")
    body, _ = await reading
    assert b'topic="b"' not in body and b'topic="c",channel="x"' in body and b'topic="c",channel="y"' not in body
    topics = (await surveying)["topics"]
    names = {topic["topic_name"]: [channel["channel_name"] for channel in topic["channels"]] for topic in topics}
    assert names == {"a": ["x", "y"], "c": ["x"]}


def test_a_broker_that_is_not_asked_imports_no_library_for_it() -> None:
    script = "import sys, flintmq.broker.daemon as d; sys.exit(1 if 'prometheus_client' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ).returncode == 0


# --- Statsd -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def statsd() -> AsyncIterator[StatsdServer]:
    server, _ = await StatsdServer.open()
    yield server
    server.transport.close()


def address(server: StatsdServer) -> str:
    return f"127.0.0.1:{server.transport.get_extra_info('sockname')[1]}"


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({}, "nsq.node_example_com_4151."),
        ({"statsd_prefix": "x"}, "x."),
        ({"statsd_prefix": "x.%s.y.%s."}, "x.node_example_com_4151.y.node_example_com_4151."),
        ({"statsd_prefix": ""}, ""),
        ({"broadcast_http_port": 99}, "nsq.node_example_com_99."),
        ({"broadcast_address": "::1"}, "nsq.[__1]_4151."),
        ({"http_address": ""}, "nsq.node_example_com_0."),
        ({"http_address": "/run/nsqd.sock"}, "nsq.node_example_com_0."),
    ],
)
def test_the_prefix_names_the_node(options: dict[str, Any], prefix: str) -> None:
    options = {"broadcast_address": "node.example.com", "http_address": "0.0.0.0:4151", **options}
    broker = Broker(**options)
    # As it is once it listens there.
    broker.listeners.http = options["http_address"]
    assert statsd_prefix(broker) == prefix


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0", "2001:db8::a:b", "node.example.com", "[::1]"])
@pytest.mark.parametrize("given", ["nsq.%s", "x", "%s.a.%s.", ""])
async def test_config_reports_the_prefix_that_is_sent(
    start_broker: Any, statsd: StatsdServer, host: str, given: str
) -> None:
    broker = await start_broker(
        statsd_address=address(statsd),
        statsd_interval=SECOND // 10,
        statsd_prefix=given,
        broadcast_address=host,
        http_address="127.0.0.1:0",
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.http_address.rpartition(":")[2]))
    writer.write(b"GET /config/statsd_prefix HTTP/1.0\r\n\r\n")
    _, _, reported = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await statsd.whole_reports(1, "mem.gc_runs")
    assert {line.partition("mem.")[0] for line in statsd.lines} == {reported}


async def test_packets_hold_as_many_whole_lines_as_fit(stage: Stage) -> None:
    await stage.statsd.whole_reports(1, "mem.gc_runs")
    packets = stage.statsd.packets
    limit = stage.broker.options.statsd_udp_packet_size
    assert limit == 508
    for packet, following in pairwise(packets):
        assert packet.endswith(b"\n") and len(packet) <= limit
        if b"mem.gc_runs" not in packet:
            assert len(packet) + len(following.split(b"\n")[0]) + 1 > limit


async def test_a_line_longer_than_a_packet_goes_alone(start_broker: Any, statsd: StatsdServer) -> None:
    broker = await start_broker(
        statsd_address=address(statsd), statsd_interval=SECOND // 5, statsd_udp_packet_size=10, statsd_mem_stats=False
    )
    broker.topic("t")
    await statsd.whole_reports(1, "topic.t.backend_depth")
    assert {packet.count(b"\n") for packet in statsd.packets} == {1}
    assert not any("mem." in line for line in statsd.lines)


async def test_ephemeral_ones_can_be_left_out(start_broker: Any, statsd: StatsdServer) -> None:
    broker = await start_broker(
        statsd_address=address(statsd), statsd_interval=SECOND // 5, statsd_exclude_ephemeral=True, statsd_prefix=""
    )
    broker.topic("t").channel("c#ephemeral")
    broker.topic("t").channel("c")
    broker.topic("e#ephemeral").channel("c")
    [report] = await statsd.whole_reports(1, "mem.gc_runs")
    assert {re.sub(r"\.\w+:.*", "", line) for line in report} == {"topic.t", "topic.t.channel.c", "mem"}


async def test_counters_are_sent_as_what_they_grew_by(start_broker: Any, statsd: StatsdServer) -> None:
    broker = await start_broker(statsd_address=address(statsd), statsd_interval=SECOND // 5, statsd_prefix="")
    producer = Client(broker)
    await producer.publish_many("t", [b"x"] * 5)
    await statsd.whole_reports(1, "mem.gc_runs")
    assert totals(statsd.lines)["topic.t.message_count"] == 5
    await producer.publish_many("t", [b"x"] * 3)
    [quiet_one] = await statsd.whole_reports(1, "mem.gc_runs")
    assert totals(statsd.lines)["topic.t.message_count"] == 8
    assert "topic.t.message_count:0|c" in quiet_one and "topic.t.depth:8|g" in quiet_one
    # Made anew, it counts anew: nothing is taken back.
    broker.delete_topic("t")
    await Client(broker).publish_many("t", [b"x"] * 2)
    await statsd.whole_reports(1, "mem.gc_runs")
    assert totals(statsd.lines)["topic.t.message_count"] == 10
    assert not any(":-" in line for line in statsd.lines)


async def test_packets_are_spread_and_a_stop_sends_the_rest_at_once(start_broker: Any, statsd: StatsdServer) -> None:
    """The interval is so long that the report can only become whole by the stop."""
    broker = await start_broker(
        statsd_address=address(statsd), statsd_interval=3600 * SECOND, statsd_udp_packet_size=100, statsd_prefix=""
    )
    await Client(broker).publish("t", b"x")
    pusher = broker._statsd
    push = asyncio.create_task(pusher._push(broker.options.statsd_address, 3599))
    await until(lambda: statsd.packets)
    assert "mem.gc_runs" not in statsd.lines[-1]
    await broker.stop()
    await push
    await until(lambda: "mem.gc_runs" in statsd.lines[-1])
    assert statsd.lines[0] == "topic.t.message_count:1|c"


@pytest.mark.parametrize("wrong", ["127.0.0.1:1", "no-such-host.invalid:8125", "nonsense", "127.0.0.1:99999999"])
async def test_a_statsd_that_is_not_there_does_no_harm(
    start_broker: Any, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    caplog.set_level("INFO")
    broker = await start_broker(statsd_address=wrong, statsd_interval=SECOND // 5)
    # A port where nobody listens is only noticed by the second of two packets; the others are errors at once.
    words = "pushing" if wrong == "127.0.0.1:1" else "failed to create UDP socket"
    await until(lambda: sum(words in record.message for record in caplog.records) >= 3)
    client = Client(broker)
    await client.publish("t", b"x")
    await client.subscribe("t", "c", ready=1)
    await until(lambda: client.bodies == [b"x"])


async def test_a_bug_in_a_report_costs_that_report(
    start_broker: Any, statsd: StatsdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True
    memory = stats.memory

    def sometimes(broker: Broker) -> dict[str, int]:
        if broken:
            raise RuntimeError("a bug")
        return memory(broker)

    monkeypatch.setattr(statsd_module, "memory", sometimes)
    await start_broker(statsd_address=address(statsd), statsd_interval=SECOND // 5)
    await until(lambda: any("failed to push" in record.message for record in caplog.records))
    assert not statsd.packets
    broken = False
    await until(lambda: statsd.packets)
