"""The client for programs without asyncio, with a real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flintmq
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
        sync.publish("t", b"x", nsqd="127.0.0.1:1", timeout=0.1)
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


# --- Callbacks, forks, and no time at all


def test_a_message_that_is_here_is_had_without_waiting(address: str) -> None:
    sync.publish("no_time", b"a", b"b", nsqd=address)
    with sync.Consumer("no_time", "c", nsqd=address, max_in_flight=2) as consumer:
        consumer.get(timeout=60).finish()
        found = None
        for _ in range(10_000):
            try:
                found = consumer.get(timeout=0)
                break
            except TimeoutError:
                pass
        assert found is not None and found.body == b"b"
        with pytest.raises(TimeoutError):
            consumer.get(timeout=0)


def test_callbacks_may_use_it_themselves(address: str) -> None:
    """Each would wait for the event loop; on the event loop, that would be for ever."""
    called: set[str] = set()
    everything = threading.Event()

    def note(name: str) -> None:
        sync.publish("noted", name.encode(), nsqd=address)
        called.add(name)
        if len(called) == 3:
            everything.set()

    sync.publish("given_up", b"x", nsqd=address)
    with sync.Consumer(
        "given_up",
        "c",
        nsqd=[address, "127.0.0.1:1"],
        max_attempts=1,
        max_backoff_duration=0,
        heartbeat_interval=1,
        on_give_up=lambda message: note("on_give_up"),
        on_error=lambda where, error: note("on_error"),
        on_heartbeat=lambda where: note("on_heartbeat"),
    ) as consumer:
        consumer.get(timeout=60).requeue(0)
        # It is given up within a call, and no call gets anything any more.
        while not everything.is_set():
            with pytest.raises(TimeoutError):
                consumer.get(timeout=0.1)
    assert called == {"on_give_up", "on_error", "on_heartbeat"}


def test_on_its_own_event_loop_it_is_an_error_and_no_deadlock(address: str) -> None:
    errors: list[Exception] = []
    heard = threading.Event()

    async def on_heartbeat(where: str) -> None:
        try:
            sync.publish("t", b"x", nsqd=address)
        except Exception as exc:
            errors.append(exc)
        heard.set()

    with sync.Consumer("own_loop", "c", nsqd=address, heartbeat_interval=1, on_heartbeat=on_heartbeat):
        assert heard.wait(60)
    assert isinstance(errors[0], RuntimeError) and "its own event loop" in str(errors[0])


def test_a_fork_while_another_thread_makes_a_client_is_no_deadlock(address: str) -> None:
    script = """
        import os, sys
        from flintmq import sync
        sync.publish("fork", b"parent", nsqd=sys.argv[1])
        # As another thread that has come into the middle of it.
        sync._Background._lock.acquire()
        if os.fork() == 0:
            sync.publish("fork", b"child", nsqd=sys.argv[1])
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["sync", "asyncio"])
def test_ctrl_c_ends_an_idle_loop_without_a_traceback(address: str, form: str) -> None:
    script = {
        "sync": """
            import sys
            from flintmq import sync
            with sync.Consumer("idle", "c", nsqd=sys.argv[1]) as consumer:
                print("ready", flush=True)
                for message in consumer:
                    pass
            print("the end", flush=True)
        """,
        "asyncio": """
            import asyncio, sys
            from flintmq import Consumer
            async def main():
                async with Consumer("idle", "c", nsqd=sys.argv[1]) as consumer:
                    asyncio.get_running_loop().call_later(0.1, print, "ready")
                    asyncio.get_running_loop().call_later(0.1, sys.stdout.flush)
                    async for message in consumer:
                        pass
                print("the end", flush=True)
            asyncio.run(main())
        """,
    }[form]
    # A shell that runs the tests in the background ignores ctrl-C for all its children.
    head = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)  # until it waits; too early, ctrl-C would hit the print
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (output, errors, process.returncode) == ("the end\n", "", 0)


# --- Callbacks, methods and endings


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("callback", ["on_error", "on_give_up"])
def test_a_callback_that_ends_the_program_does_not_end_the_event_loop_of_all(
    error: type[BaseException], callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    raised = threading.Event()

    async def fails(*arguments: object) -> None:
        if not raised.is_set():
            raised.set()
            raise error("in a callback")

    with NsqBroker() as broker:
        options: dict[str, Any] = {callback: fails, "max_attempts": 1, "max_backoff_duration": 0}
        with sync.Consumer("exit", "c", nsqd=broker.address, **options) as consumer:
            broker.publish("exit", b"one")
            consumer.get(timeout=60).requeue(0)
            if callback == "on_error":
                broker.cut()
            else:
                with pytest.raises(TimeoutError):
                    consumer.get(timeout=0.2)
            assert raised.wait(60)
            sync.publish("other", b"x", nsqd=broker.address, timeout=60)
            assert broker.take("other") == [b"x"]
    assert f"a callback raised {error.__name__}" in caplog.text


@pytest.mark.parametrize("name", ["Producer", "Consumer", "NodeClient"])
def test_it_has_the_methods_of_the_asyncio_client(name: str) -> None:
    def public(kind: object) -> set[str]:
        return {each for each in dir(kind) if not each.startswith("_")}

    # `run` is for handlers; `log_fetch` gives frames as they come from a socket of asyncio's.
    without = {"Consumer": {"run"}, "NodeClient": {"log_fetch"}}
    assert public(getattr(flintmq, name)) - public(getattr(sync, name)) == without.get(name, set())


def test_a_consumer_can_be_watched_and_changed(address: str) -> None:
    with (
        NsqBroker() as second,
        sync.Producer(address) as producer,
        sync.Consumer("watched", "c", nsqd=address, max_in_flight=2) as consumer,
    ):
        producer.publish("watched", b"x")
        producer.flush()
        assert producer.connections == [address]
        message = consumer.get(timeout=60)
        assert (consumer.in_flight, consumer.max_in_flight, consumer.is_starved) == (1, 2, True)
        message.finish()
        consumer.max_in_flight = 0
        assert consumer.max_in_flight == 0
        consumer.look()
        for client in (producer, consumer):
            client.add_nsqd(second.address)
            until(lambda client=client: client.connections == sorted([address, second.address]))
        with pytest.raises(OptionError):
            consumer.add_nsqd("nonsense")


def test_a_message_on_its_way_when_ctrl_c_comes_is_not_lost(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = type(sync.Producer(address)._background).run

    def interrupted(background: Any, work: Any) -> Any:
        run(background, work)
        raise KeyboardInterrupt

    with sync.Consumer("interrupted", "c", nsqd=address, max_in_flight=5) as consumer:
        for wait in (lambda: consumer.get(timeout=60), lambda: next(consumer.batches(2, wait=60))):
            sync.publish("interrupted", b"one", b"two", nsqd=address)
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(sync._Background, "run", interrupted)
                wait()
            for expected in (b"one", b"two"):
                with consumer.get(timeout=60) as message:
                    assert (message.body, message.attempts) == (expected, 1)


def test_an_atexit_function_may_publish_to_a_host_name(address: str) -> None:
    script = """
        import atexit, sys
        from flintmq import sync
        @atexit.register
        def last():
            sync.publish("last", b"bye", nsqd=f"localhost:{sys.argv[1]}", timeout=30)
            print("published", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), address.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("published\n", "")


def until(condition: Callable[[], object]) -> None:
    """Polls, because it waits for another thread."""
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)
