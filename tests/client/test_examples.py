"""The programs of the docs: they stand there as they are in examples/, and they run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq import sync
from flintmq.testing import NsqBroker

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with NsqBroker() as broker:
        yield broker.address


def start(name: str, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name)]
    return subprocess.Popen(command, env=os.environ | {"NSQD": address}, stdout=subprocess.PIPE, text=True)


def run(name: str, address: str) -> list[str]:
    with start(name, address) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return output.splitlines()


def run_until(name: str, address: str, count: int) -> list[str]:
    """Of a program that runs until it is told to end: its first lines."""
    with start(name, address) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(count)]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert process.returncode == 0
    return lines


def test_the_documents_have_every_example_as_it_is() -> None:
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    shown = dict(re.findall(r"```python title=\"(examples/\w+\.py)\"\n(.*?)```", text, re.DOTALL))
    files = {f"examples/{path.name}": path.read_text() for path in EXAMPLES.glob("*.py")}
    assert shown == files


def test_hello(address: str) -> None:
    assert run("hello.py", address) == ["hello"]


def test_worker(address: str) -> None:
    sync.publish("jobs", b"one", b"not yet", b"two", nsqd=address)
    lines = run_until("worker.py", address, 3)
    assert sorted(lines) == ["done: not yet", "done: one", "done: two"]


def test_batching(address: str) -> None:
    lines = run("batching.py", address)
    assert sum(int(line.removeprefix("stored ")) for line in lines) == 300
    assert lines == ["stored 100"] * 3


def test_typed(address: str) -> None:
    assert run("typed.py", address) == ["2 tea"]


def test_deferred(address: str) -> None:
    lines = run("deferred.py", address)
    assert [line.split(": ")[1] for line in lines] == ["put the kettle on", "tea is ready"]


def test_script(address: str) -> None:
    assert run("script.py", address) == ["first", "second"]


def test_from_pynsq(address: str) -> None:
    sync.publish("events", b"a", b"b", nsqd=address)
    assert sorted(run_until("from_pynsq.py", address, 2)) == ["received a", "received b"]
