"""Ctrl-C and SIGTERM, whatever a pipeline does at that moment: it ends soon, with one line and no trace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common

PATIENCE = 60.0
#: Seconds from ctrl-C to the end; on a busy machine a process takes its time to end, too.
LONGEST = 10.0
PROGRAM = """
import hashlib, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from flintmq.spark.pipelines import audit, main, stopping

def run(arguments):
    print("working", flush=True)
{work}

audit.run = run
sys.exit(main(["audit", "t", "--archive", "a"]))
"""
#: Work, and the exit status of a ctrl-C.
WORK = {
    "Python": ("while True: time.sleep(0.01)", 130),
    "what is quiet": ("stopping.end_quietly()\nwhile True: time.sleep(0.01)", 130),
    "a library that hears no signal": ("hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2_000_000_000)", 130),
    "a batch that ends soon": (
        "with stopping.asked_to_stop() as asked:\n    asked.wait()\n    time.sleep(0.2)\nreturn 0",
        0,
    ),
    "a batch that does not end": (
        "with stopping.asked_to_stop() as asked:\n    asked.wait()\n    while True: time.sleep(0.01)",
        130,
    ),
    "a library within a batch": (
        "with stopping.asked_to_stop() as asked:\n    hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2_000_000_000)",
        130,
    ),
    "work that is not done": ("with stopping.asked_to_stop() as asked:\n    asked.wait()\n    asked.check()", 130),
    "the end, which waits for a thread": (
        "threading.Thread(target=time.sleep, args=(1000,)).start()\nwhile True: time.sleep(0.01)",
        130,
    ),
    "Java, which starts": (
        "import subprocess\nfrom flintmq.spark.pipelines import screen\nstopping.end_quietly()\n"
        "with screen.words_of_java():\n    child = subprocess.Popen(['sh', '-c', 'trap \"\" INT; exec sleep 1000'])\n"
        "    time.sleep(1000)",
        130,
    ),
}


def indented(work: str) -> str:
    return "".join(f"    {line}\n" for line in work.splitlines())


def pressed(work: str, *signals: signal.Signals, folder: Path) -> tuple[int, float, str]:
    """Run some work and signal it; its exit status, the seconds that it took to end, and what it said."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work=indented(work))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "working\n"
        time.sleep(0.3)
        began = time.monotonic()
        for one in signals:
            child.send_signal(one)
            time.sleep(0.1)
        # At its end when all have ended that have inherited it.
        _, errors = child.communicate(timeout=PATIENCE)
        return child.returncode, time.monotonic() - began, errors
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.mark.parametrize("what", WORK)
def test_ctrl_c_ends_it_soon(what: str, tmp_path: Path):
    work, wanted = WORK[what]
    status, seconds, errors = pressed(work, signal.SIGINT, folder=tmp_path)
    assert (status, errors) == (wanted, "flintmq pipeline audit: stopped\n" if wanted else "")
    assert seconds < LONGEST


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path):
    work = "with stopping.asked_to_stop() as asked:\n    while True: time.sleep(0.01)"
    status, seconds, errors = pressed(work, signal.SIGINT, signal.SIGINT, folder=tmp_path)
    assert (status, errors) == (130, "flintmq pipeline audit: stopped\n")
    assert seconds < LONGEST


def test_sigterm_lets_a_batch_end(tmp_path: Path):
    """A service manager knows itself how long it waits."""
    work = "with stopping.asked_to_stop() as asked:\n    asked.wait()\n    time.sleep(3.5)\n    asked.check()\nreturn 0"
    status, seconds, errors = pressed(work, signal.SIGTERM, folder=tmp_path)
    assert (status, errors) == (0, "")
    assert seconds > 3.4


def test_a_program_that_calls_a_pipeline_keeps_its_standard_error(tmp_path: Path):
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from flintmq.spark.pipelines import stopping

with stopping.asked_to_stop() as asked:
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.is_set() and asked.is_ctrl_c
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        sys.stderr.write("heard")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "heard")


class Query:
    """As much of a streaming query as is followed: one that is signalled, and ends its batch at once."""

    recentProgress = ()
    lastProgress: Any = None

    def __init__(self, number: signal.Signals, error: str = "") -> None:
        self.stopped = False
        self._number = number
        self._error = error

    @property
    def status(self) -> dict[str, bool]:
        return {"isTriggerActive": False}

    def awaitTermination(self, _seconds: float) -> bool:
        os.kill(os.getpid(), self._number)
        if self._error:
            raise RuntimeError(self._error)
        return False

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(
    ("number", "once", "raises"),
    [
        (signal.SIGINT, False, None),
        (signal.SIGTERM, False, None),
        (signal.SIGINT, True, KeyboardInterrupt),
        (signal.SIGTERM, True, PipelineError),
    ],
)
def test_a_signal_before_all_was_read_is_no_clean_end(number: signal.Signals, once: bool, raises: Any):
    query: Any = Query(number)
    with pytest.raises(raises) if raises else contextlib.nullcontext():
        assert common._follow(query, "archive", once, quiet=True).batches == 0
    assert query.stopped


def test_what_fails_because_java_heard_a_signal_too_is_told_as_that():
    query: Any = Query(signal.SIGTERM, "Failed: Traceback (most recent call last):")
    with pytest.raises(PipelineError, match="a signal ended Spark within a batch"):
        common._follow(query, "archive", False, quiet=True)


class Backlog(Query):
    """A query whose batches follow each other: there is no moment without one. Each takes three questions."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.asked = 0

    @property
    def batch(self) -> int:
        return self.asked // 3

    @property
    def status(self) -> dict[str, bool]:
        self.asked += 1
        return {"isTriggerActive": True}

    @property
    def lastProgress(self) -> Any:
        return types.SimpleNamespace(batchId=self.batch, timestamp=f"2026-11-16T08:00:{self.batch:02}.000Z")


def test_a_stream_with_a_backlog_ends_after_the_batch_that_is_under_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common, "_LAST_BATCH_SECONDS", 5.0)
    query: Any = Backlog(signal.SIGTERM)
    common._follow(query, "archive", False, quiet=True)
    assert query.stopped and query.batch == 1
