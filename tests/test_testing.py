"""The pytest plugin: what it gives to tests, with asyncio and without; and unused it costs nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import typing
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flintmq import Consumer, Message, Producer, sync
from flintmq.errors import ClosedError, ConnectError, OptionError, PublishError, StartError, StorageError
from flintmq.options import (
    BOOL,
    FLOAT,
    INT,
    PERCENTILES,
    STRINGS,
    NsqdOptions,
    NsqlookupdOptions,
    Options,
    option_table,
)
from flintmq.testing import MovableClock, NsqBroker, NsqCluster, NsqLookupd
from flintmq.testing.options import NsqdKeywords, NsqlookupdKeywords

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((REPOSITORY / "examples" / "testing").glob("test_*.py"))
#: Long enough for a machine that stands still for a while; a test that passes never waits for it.
DEADLINE = 90

StartCluster = Callable[..., NsqCluster]


def get(url: str) -> bytes:
    with urllib.request.urlopen(f"http://{url}", timeout=DEADLINE) as response:
        content: bytes = response.read()
    return content


def until(condition: Callable[[], object]) -> None:
    """Polls, because what it waits for happens in another thread."""
    give_up = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


# --- A broker ---------------------------------------------------------------------------------------------------------


def test_a_broker_without_asyncio(nsq_broker: NsqBroker) -> None:
    sync.publish("orders", b"one", b"two", nsqd=nsq_broker.address)
    with sync.Consumer("orders", "billing", nsqd=nsq_broker.address) as consumer:
        for expected in (b"one", b"two"):
            with consumer.get(timeout=DEADLINE) as message:
                assert message.body == expected
        nsq_broker.wait_until_empty("orders", "billing")


async def test_a_broker_with_asyncio(nsq_broker: NsqBroker) -> None:
    found: list[bytes] = []

    async def bill(message: Message) -> None:
        found.append(message.body)

    async with (
        Producer(nsq_broker.address) as producer,
        Consumer("orders", "billing", nsqd=nsq_broker.address, handler=bill),
    ):
        await producer.publish_many("orders", [b"one", b"two"])
        await nsq_broker.until_empty("orders", "billing")
    assert found == [b"one", b"two"]


def test_it_serves_http(nsq_broker: NsqBroker) -> None:
    assert get(f"{nsq_broker.http_address}/ping") == b"OK"
    request = urllib.request.Request(f"http://{nsq_broker.http_address}/pub?topic=t", b"over HTTP")
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        assert response.read() == b"OK"
    assert nsq_broker.take("t") == [b"over HTTP"]


def test_publish_and_take_need_no_client(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"a", b"b", b"c")
    assert nsq_broker.take("t", 2) == [b"a", b"b"]
    [topic] = nsq_broker.stats("t")["topics"]
    assert topic["message_count"] == 3
    # What was not taken is given back, and nothing is left in flight.
    assert (topic["channels"][0]["depth"], topic["channels"][0]["in_flight_count"]) == (1, 0)
    assert nsq_broker.take("t") == [b"c"]


def test_messages_that_are_taken_one_by_one_keep_their_order(nsq_broker: NsqBroker) -> None:
    bodies = [b"%d" % number for number in range(30)]
    nsq_broker.publish("t", *bodies)
    taken = [nsq_broker.take("t")[0] for _ in range(10)]
    assert taken + nsq_broker.take("t", 7) + nsq_broker.take("t", 13) == bodies
    [channel] = nsq_broker.stats("t", "testing")["topics"][0]["channels"]
    assert channel["requeue_count"] == 0
    assert nsq_broker.take("t", 0) == []


def test_the_end_of_the_program_in_a_call_is_the_callers(nsq_broker: NsqBroker) -> None:
    with pytest.raises(SystemExit, match="3"):
        nsq_broker.call(lambda broker: sys.exit("3"))
    nsq_broker.publish("t", b"x")
    assert nsq_broker.take("t") == [b"x"]


@pytest.mark.parametrize(("table", "keywords"), [(NsqdOptions, NsqdKeywords), (NsqlookupdOptions, NsqlookupdKeywords)])
def test_type_checkers_know_every_option(table: type[Options], keywords: type[Any]) -> None:
    kinds = {
        id(INT): int,
        id(BOOL): bool,
        id(FLOAT): float,
        id(STRINGS): Sequence[str],
        id(PERCENTILES): Sequence[float],
    }
    expected = {
        entry.key: kinds.get(id(entry.kind), str)
        for entry in option_table(table).values()
        # An argument of its own.
        if entry.key not in (None, "data_path")
    }
    assert typing.get_type_hints(keywords) == expected


def test_take_says_what_it_found_instead(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"only")
    with pytest.raises(TimeoutError, match=re.escape("0.2 s: 1 of 2 messages came from t/testing: [b'only']")):
        nsq_broker.take("t", 2, timeout=0.2)


def test_waiting_says_what_is_left(nsq_broker: NsqBroker) -> None:
    with pytest.raises(TimeoutError, match="there is no channel t/c"):
        nsq_broker.wait_until_empty("t", "c", timeout=0)
    with sync.Consumer("t", "c", nsqd=nsq_broker.address) as consumer:
        nsq_broker.publish("t", b"held", b"waits")
        nsq_broker.publish("t", b"later", delay=60)
        consumer.get(timeout=DEADLINE)
        with pytest.raises(TimeoutError, match="t/c: 1 waiting, 1 in flight, 1 deferred"):
            nsq_broker.wait_until_empty("t", "c", timeout=0)
        with pytest.raises(TimeoutError, match="t/c: 1 waiting, 1 in flight, 1 deferred"):
            nsq_broker.wait_until_empty("t", "c", deferred=1, timeout=0)
    nsq_broker.take("t", 2, channel="c")
    nsq_broker.wait_until_empty("t", "c", deferred=1)
    nsq_broker.clock.advance(60)
    nsq_broker.take("t", channel="c")
    with pytest.raises(TimeoutError, match="t/c: nothing"):
        nsq_broker.wait_until_empty("t", "c", deferred=1, timeout=0)
    nsq_broker.crash()
    with pytest.raises(TimeoutError, match="not running"):
        nsq_broker.wait_until_empty("t", "c", timeout=0)


async def test_waiting_never_holds_up_the_event_loop_it_is_called_on(nsq_broker: NsqBroker) -> None:
    with pytest.raises(RuntimeError, match="await until_empty"):
        nsq_broker.wait_until_empty("t", "c")


def test_the_broker_itself_can_be_asked(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"x")
    assert nsq_broker.call(lambda broker: broker.topics["t"].depth) == 1
    thread = nsq_broker.call(lambda broker: threading.current_thread())
    assert thread is not threading.current_thread()


class TestOptions:
    @pytest.fixture
    def nsq_options(self) -> dict[str, object]:
        return {"msg_timeout": "17s", "max_msg_size": 100}

    def test_a_fixture_sets_them(self, nsq_broker: NsqBroker) -> None:
        config = msgspec.json.decode(get(f"{nsq_broker.http_address}/config/max_msg_size"))
        assert config == 100
        assert nsq_broker.call(lambda broker: broker.options.msg_timeout) == 17_000_000_000

    def test_a_cluster_has_them_too(self, nsq_cluster: StartCluster) -> None:
        cluster = nsq_cluster(brokers=1, max_msg_size=200)
        options = cluster.brokers[0].call(lambda broker: broker.options)
        assert (options.msg_timeout, options.max_msg_size) == (17_000_000_000, 200)


@pytest.mark.parametrize("made", [NsqBroker, NsqCluster])
def test_wrong_options_are_refused_and_leave_nothing_behind(made: type[NsqBroker | NsqCluster]) -> None:
    threads = threading.active_count()
    with pytest.raises(TypeError, match="nsqd has no option msg_timout; did you mean msg_timeout"):
        made(msg_timout="1s")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"nsqd has no option xyz$"):
        made(xyz=1)  # type: ignore[call-arg]
    # Seconds, milliseconds as in a config file, or nanoseconds as in the broker?
    for number in (5, 5.0, 5000, 5_000_000_000):
        with pytest.raises(OptionError, match='msg_timeout: a time needs a unit, as in "5s" or "250ms", not 5'):
            made(msg_timeout=number)  # type: ignore[arg-type]
    wrong: dict[str, Any] = {"max_msg_size": 1.5, "snappy": 0, "broadcast_address": 7, "auth_http_addresses": [1]}
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=f"{name}: "):
            made(**{name: value})
    with pytest.raises(OptionError, match="msg_timeout: missing unit"):
        made(msg_timeout="1")
    with pytest.raises(OptionError):
        made(max_deflate_level=12)
    with pytest.raises((OptionError, TypeError), match="tcp_address"):
        made(tcp_address="127.0.0.1:0")
    assert threading.active_count() == threads


def test_nothing_is_left_of_it_afterwards() -> None:
    threads = set(threading.enumerate())
    with NsqBroker() as broker:
        broker.publish("t", b"x")
        assert broker.data_path.exists()
        assert set(threading.enumerate()) > threads
    assert not broker.data_path.exists()
    assert set(threading.enumerate()) == threads
    with pytest.raises(ClosedError):
        broker.publish("t", b"y")
    broker.close()


def test_a_data_path_of_ones_own_stays(tmp_path: Path) -> None:
    with NsqBroker(tmp_path) as broker:
        broker.publish("t", b"kept")
        with pytest.raises(StartError, match="in use by another"), NsqBroker(tmp_path):
            pass
    with NsqBroker(tmp_path) as broker:
        assert broker.take("t") == [b"kept"]


# --- The clock --------------------------------------------------------------------------------------------------------


async def test_an_hour_passes_at_once_and_cuts_nobody_off(nsq_broker: NsqBroker) -> None:
    async with (
        Producer(nsq_broker.address, heartbeat_interval=1) as producer,
        Consumer("t", "c", nsqd=nsq_broker.address, heartbeat_interval=1) as consumer,
    ):
        await producer.defer("t", b"in an hour", delay=3600)
        await producer.publish("t", b"now")
        with await anext(consumer) as message:
            assert message.body == b"now"
        await nsq_broker.until_empty("t", "c", deferred=1)
        connections = nsq_broker.call(lambda broker: broker.counters.connection_count)

        nsq_broker.clock.advance(3599)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.05)
        nsq_broker.clock.advance(seconds=1)
        with await anext(consumer) as message:
            assert message.body == b"in an hour"
        # The same connections still.
        await producer.publish("t", b"after")
        with await anext(consumer) as message:
            assert message.body == b"after"
        assert nsq_broker.call(lambda broker: broker.counters.connection_count) == connections


def test_a_message_times_out_when_the_clock_says_so(nsq_broker: NsqBroker) -> None:
    with sync.Consumer("t", "c", nsqd=nsq_broker.address, max_in_flight=2) as consumer:
        nsq_broker.publish("t", b"x")
        assert consumer.get(timeout=DEADLINE).attempts == 1
        nsq_broker.clock.advance(60)
        with consumer.get(timeout=DEADLINE) as message:
            assert message.attempts == 2


def test_a_deferral_outlives_a_crash_by_the_same_clock(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"later", delay=3600)
    nsq_broker.clock.advance(1800)
    nsq_broker.crash()
    nsq_broker.clock.advance(1000)
    nsq_broker.restart()
    with pytest.raises(TimeoutError):
        nsq_broker.take("t", timeout=0.05)
    nsq_broker.clock.advance(800)
    assert nsq_broker.take("t") == [b"later"]


def test_the_clock_goes_by_itself_and_never_back() -> None:
    clock = MovableClock()
    before = clock.now(), clock.wall()
    until(lambda: clock.now() > before[0] and clock.wall() > before[1])
    clock.advance(0.5)
    assert clock.now() - before[0] >= 500_000_000
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="forward only"):
            clock.advance(seconds)


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_a_crash_costs_nothing_that_was_acknowledged(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"one", b"two")
    address = nsq_broker.address
    assert nsq_broker.take("t") == [b"one"]
    nsq_broker.crash()
    assert not nsq_broker.running
    for call in (lambda: nsq_broker.take("t"), lambda: nsq_broker.publish("t", b"x"), nsq_broker.crash):
        with pytest.raises(ClosedError, match="restart it"):
            call()
    with pytest.raises(ConnectError):
        sync.publish("t", b"three", nsqd=address, timeout=0.1)

    nsq_broker.restart()
    assert nsq_broker.address == address
    # What was finished right before a crash may come again; what was not, must.
    assert b"two" in nsq_broker.take("t", nsq_broker.stats("t")["topics"][0]["channels"][0]["depth"])


@pytest.mark.parametrize("stop", [NsqBroker.stop, NsqBroker.crash])
def test_a_crash_is_no_clean_stop(stop: Callable[[NsqBroker], None]) -> None:
    with NsqBroker(durability="memory") as broker:
        broker.publish("t", b"in memory")
        stop(broker)
        broker.restart()
        if stop is NsqBroker.stop:
            assert broker.take("t") == [b"in memory"]
        else:
            with pytest.raises(TimeoutError):
                broker.take("t", timeout=0.05)


async def test_clients_come_back_after_a_crash(nsq_broker: NsqBroker) -> None:
    async with (
        Producer(nsq_broker.address, reconnect_delay=0.01, retry_unknown=True) as producer,
        Consumer("t", "c", nsqd=nsq_broker.address, reconnect_delay=0.01) as consumer,
    ):
        nsq_broker.crash()
        waiting = asyncio.create_task(producer.publish("t", b"meanwhile"))
        nsq_broker.restart()
        await waiting
        with await anext(consumer) as message:
            assert message.body == b"meanwhile"


def test_its_ports_stay_its_own_while_it_is_down(nsq_broker: NsqBroker) -> None:
    nsq_broker.crash()
    host, _, port = nsq_broker.address.rpartition(":")
    with socket.socket() as other:
        other.settimeout(DEADLINE)
        with pytest.raises(ConnectionRefusedError):
            other.connect((host, int(port)))
    if sys.platform == "linux":
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


async def test_cut_ends_connections_and_messages_come_again_after_their_timeout(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"x")
    async with Consumer("t", "c", nsqd=nsq_broker.address, reconnect_delay=0.01) as consumer:
        assert (await anext(consumer)).attempts == 1
        nsq_broker.cut()
        nsq_broker.clock.advance(60)
        with await anext(consumer) as message:
            assert message.attempts == 2


async def test_a_full_disk_refuses_publishes_and_lets_consumers_go_on(nsq_broker: NsqBroker) -> None:
    async with Producer(nsq_broker.address, reconnect_delay=0.01) as producer:
        await producer.publish("t", b"before")
        nsq_broker.disk_full()
        with pytest.raises(PublishError, match="nearly full") as refusal:
            await producer.publish("t", b"refused")
        assert refusal.value.retriable
        assert nsq_broker.take("t") == [b"before"]
        nsq_broker.restart()
        with pytest.raises(PublishError, match="nearly full"):
            await producer.publish("t", b"refused")
        nsq_broker.disk_free()
        await producer.publish("t", b"after")
        assert nsq_broker.take("t") == [b"after"]


# --- A cluster --------------------------------------------------------------------------------------------------------


async def test_consumers_find_the_brokers_of_a_cluster(nsq_cluster: StartCluster) -> None:
    cluster = nsq_cluster(brokers=3, lookupds=2)
    for number, broker in enumerate(cluster.brokers):
        broker.publish("t", b"%d" % number)
    cluster.wait_until_registered("t")
    found = []
    async with Consumer("t", "c", lookupd=cluster.lookupd_addresses, max_in_flight=3) as consumer:
        for _ in cluster.brokers:
            with await anext(consumer) as message:
                found.append((message.body, message.address))
    assert sorted(found) == [(b"%d" % number, address) for number, address in enumerate(cluster.addresses)]


def test_a_node_that_is_gone_is_forgotten_and_found_again(nsq_cluster: StartCluster) -> None:
    cluster = nsq_cluster(brokers=2)
    first, second = cluster.brokers
    [lookupd] = cluster.lookupds
    first.crash()
    until(lambda: not lookupd.knows(first))
    assert lookupd.knows(second)
    cluster.wait_until_registered()
    first.restart()
    cluster.wait_until_registered()
    assert lookupd.knows(first)
    lookupd.crash()
    assert not lookupd.knows(second)
    lookupd.restart()
    cluster.wait_until_registered()
    assert lookupd.knows(first)
    assert lookupd.knows(second)


def test_a_cluster_is_closed_whole_also_if_a_node_of_it_has_died() -> None:
    threads = set(threading.enumerate())
    cluster = NsqCluster(brokers=2)
    cluster.start()
    cluster.brokers[1].call(lambda broker: broker._fatal(StorageError("the disk is gone")))
    with pytest.raises(StorageError, match="the disk is gone"):
        cluster.close()
    assert not any(node.running for node in (*cluster.brokers, *cluster.lookupds))
    assert set(threading.enumerate()) == threads


def test_waiting_for_a_registration_says_whose_is_missing(nsq_cluster: StartCluster) -> None:
    cluster = nsq_cluster(brokers=1)
    with pytest.raises(TimeoutError, match="no broker has the topic t"):
        cluster.wait_until_registered("t", timeout=0)


def test_one_clock_for_a_cluster(nsq_cluster: StartCluster) -> None:
    cluster = nsq_cluster(brokers=2)
    for broker in cluster.brokers:
        broker.publish("t", b"later", delay=3600)
    cluster.clock.advance(3600)
    assert [broker.take("t") for broker in cluster.brokers] == [[b"later"], [b"later"]]


def test_a_lookupd_alone() -> None:
    with NsqLookupd() as lookupd, NsqBroker(nsqlookupd_tcp_addresses=(lookupd.address,)) as broker:
        until(lambda: lookupd.knows(broker))
        nodes = msgspec.json.decode(get(f"{lookupd.http_address}/nodes"))
        assert [node["broadcast_address"] for node in nodes["producers"]] == ["127.0.0.1"]


# --- In a test suite of somebody else's ------------------------------------------------------------------------------


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As where flintmq is installed, whether it is here or not."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:flintmq", "-p", "flintmq.testing", "-W", "error", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def test_the_examples_of_the_document_pass(tmp_path: Path) -> None:
    for example in EXAMPLES:
        (tmp_path / example.name).write_text(example.read_text())
    done = run_pytest(tmp_path, "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


def test_the_document_has_the_examples_as_they_are() -> None:
    document = (REPOSITORY / "docs" / "testing.md").read_text()
    shown = dict(re.findall(r"```python title=\"(examples/\S+\.py)\"\n(.*?)```", document, re.DOTALL))
    assert shown == {f"examples/testing/{example.name}": example.read_text() for example in EXAMPLES}
    # And nothing that nobody runs.
    assert document.count("```") == 2 * len(EXAMPLES)


def test_it_works_without_pytest_asyncio(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            def test_it(nsq_broker):
                nsq_broker.publish("t", b"x")
                assert nsq_broker.take("t") == [b"x"]
        """)
    )
    done = run_pytest(tmp_path, "-p", "no:asyncio")
    assert done.returncode == 0, done.stdout + done.stderr


def test_installed_and_not_used_it_imports_nothing() -> None:
    script = (
        "import sys, pytest, flintmq; old = set(sys.modules); import flintmq.testing; print(*set(sys.modules) - old)"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["flintmq.testing"]


def test_without_pytest_there_are_the_classes() -> None:
    script = """
        import sys
        sys.modules["pytest"] = None  # as if it were not installed
        from flintmq.testing import NsqBroker
        with NsqBroker() as broker:
            broker.publish("t", b"x")
            assert broker.take("t") == [b"x"]
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- One clock, and no threads left


async def test_a_clients_backoff_goes_by_the_brokers_clock(nsq_broker: NsqBroker) -> None:
    """Three failing attempts, with minutes of backoff and requeue delay between them, take no time."""
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempts)
        if message.attempts < 3:
            raise ZeroDivisionError

    nsq_broker.publish("t", b"x")
    begin = time.monotonic()
    async with Consumer("t", "c", nsqd=nsq_broker.address, handler=handler, clock=nsq_broker.clock) as consumer:
        for count in (1, 2, 3):
            while len(attempts) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            nsq_broker.clock.advance(600)
        assert consumer.connections == [nsq_broker.address]
    assert attempts == [1, 2, 3]
    assert time.monotonic() - begin < 30


def test_a_start_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with NsqBroker(tmp_path):
        second = NsqBroker(tmp_path)
        during = threading.active_count()
        with pytest.raises(StartError):
            second.start()
        assert threading.active_count() == during
    second.start()
    second.publish("t", b"x")
    second.close()
    assert threading.active_count() <= before
