"""The client for programs without asyncio, with a real broker."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq import sync
from flintmq.errors import ClosedError, ConnectError, OptionError
from flintmq.testing import NsqBroker


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with NsqBroker() as broker:
        yield broker.address


def test_publish_and_consume(address: str) -> None:
    with sync.Producer(address) as producer:
        producer.publish("sync", b"one")
        producer.publish_many("sync", [b"two", b"three"])
        producer.defer("sync", b"four", 0.01)
    with sync.Consumer("sync", "c", nsqd=address, max_in_flight=5) as consumer:
        found = []
        for message in consumer:
            with message:
                found.append(message.body)
            if len(found) == 4:
                break
        assert sorted(found) == [b"four", b"one", b"three", b"two"]
    assert consumer.stats.finished == 4


def test_publish_once_from_a_script(address: str) -> None:
    sync.publish("script", b"a", b"b", nsqd=address)
    with sync.Consumer("script", "c", nsqd=address) as consumer:
        for body in (b"a", b"b"):
            message = consumer.get(timeout=60)
            assert message.body == body
            message.finish()
        with pytest.raises(TimeoutError):
            consumer.get(timeout=0.01)


def test_stop_ends_the_loop(address: str) -> None:
    with sync.Consumer("silent", "c", nsqd=address) as consumer:
        threading.Timer(0.05, consumer.stop).start()
        assert list(consumer) == []
        with pytest.raises(ClosedError):
            consumer.get()


def test_many_threads_may_share_a_producer(address: str) -> None:
    with sync.Producer(address) as producer:
        threads = [
            threading.Thread(target=lambda n=n: [producer.publish("threads", b"%d" % n) for _ in range(20)])
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with sync.Consumer("threads", "c", nsqd=address, max_in_flight=100) as consumer:
        for _ in range(160):
            consumer.get(timeout=60).finish()


def test_errors_are_raised_where_they_are_made() -> None:
    with pytest.raises(ConnectError):
        sync.publish("t", b"x", nsqd="127.0.0.1:1")
    with pytest.raises(OptionError):
        sync.Consumer("t", "c")
    with pytest.raises(TypeError):
        sync.Consumer("t", "c", nsqd="127.0.0.1:1", handler=print)


def test_a_forked_process_is_told_to_make_its_own(address: str) -> None:
    script = """
        import os, sys
        from flintmq import sync
        producer = sync.Producer(sys.argv[1])
        producer.start()
        producer.publish("fork", b"parent")
        if os.fork() == 0:
            try:
                producer.publish("fork", b"wrong")
            except sync.ClosedError as exc:
                assert "forked" in str(exc)
                sync.publish("fork", b"child", nsqd=sys.argv[1])
                os._exit(0)
            os._exit(1)
        status = os.wait()[1]
        producer.publish("fork", b"parent again")
        producer.close()
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), address], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_program_that_forgets_to_close_still_ends(address: str, tmp_path: Path) -> None:
    script = "import sys; from flintmq import sync; p = sync.Producer(sys.argv[1]); p.start(); p.publish('t', b'x')"
    done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
