"""What the long runs under faults share: rows that are published once each, a driver that is kept running, the ledger.

`torture` and `scale` add the faults and say what is written where.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spark.cluster import Program, environment
from spark.daemons import Node

__all__ = [
    "HOLDER",
    "HOSTS",
    "Drivers",
    "Ledger",
    "Publisher",
    "Results",
    "Say",
    "about_this_machine",
    "create_topic",
    "line_writer",
    "restart",
    "run_audit",
    "run_command",
]

HERE = Path(__file__).parent
#: Holds the logs: what nobody has finished is not freed.
HOLDER = "audit"
#: Workers are hosts of their own, all on this machine: Spark starts copies of a task on another host.
HOSTS = ("127.0.0.1", "127.0.0.2")
#: Seconds that a driver that is asked to stop gets for its last batch.
_LAST_BATCH = 90.0

Say = Callable[[str], None]
#: Which broker gets which rows of a batch in which topic.
Deal = Callable[[range], Iterable[tuple[Node, str, list[bytes]]]]


# --- Brokers ----------------------------------------------------------------------------------------------------------


def create_topic(node: Node, topic: str) -> None:
    """Create a topic whose log is kept."""
    node.post("/topic/create", topic=topic)
    node.post("/channel/create", topic=topic, channel=HOLDER)


def restart(daemon: Any, away: float) -> None:
    """Kill a daemon, and start it again after so many seconds."""
    daemon.kill()
    time.sleep(away)
    daemon.start()


class Publisher(threading.Thread):
    """Publishes rows once each: every batch has a key, and is repeated until it is answered.

    It is at most `ahead` rows before those that have arrived, so that every fault hits something that is going on.
    """

    def __init__(
        self,
        rows: int,
        batch: int,
        ahead: int,
        arrived: Callable[[], int],
        deal: Deal,
        *,
        published: int = 0,
        note: Callable[[int], None] = lambda published: None,
    ) -> None:
        super().__init__(name="publisher", daemon=True)
        self.published = published
        self.trouble: BaseException | None = None
        self._rows, self._batch, self._ahead, self._arrived, self._deal = rows, batch, ahead, arrived, deal
        self._note = note
        self._over = threading.Event()

    def run(self) -> None:
        try:
            while self.published < self._rows and not self._over.is_set():
                if self.published - self._arrived() > self._ahead:
                    self._over.wait(0.2)
                    continue
                numbers = range(self.published, min(self._rows, self.published + self._batch))
                for node, topic, bodies in self._deal(numbers):
                    self._publish(node, topic, bodies)
                if not self._over.is_set():
                    self.published = numbers.stop
                    self._note(numbers.stop)
        except BaseException as exc:
            self.trouble = exc

    def check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()

    def _publish(self, node: Node, topic: str, bodies: list[bytes]) -> None:
        data = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)
        headers = {"X-Flintmq-Key": f"rows-{self.published}"}
        while not self._over.is_set():
            url = f"http://{node.http}/mpub?topic={topic}&binary=true"
            with contextlib.suppress(OSError, urllib.error.URLError):
                request = urllib.request.Request(url, data, headers, method="POST")
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
                return
            self._over.wait(0.2)


# --- Drivers ----------------------------------------------------------------------------------------------------------


class Drivers:
    """The driver of one query, which is started again whenever it has ended."""

    def __init__(
        self, start: Callable[[int, bool], Program], *, started: int = 0, ended: dict[str, int] | None = None
    ) -> None:
        self._start = start
        self.current: Program | None = None
        #: How many there were; the number of the newest.
        self.started = started
        #: Why those ended that were not stopped or killed.
        self.ended: Counter[str] = Counter(ended or {})

    def start(self, *, once: bool = False) -> Program:
        """Start one more, which is not yet the current one. With `once` it ends when all is done."""
        self.started += 1
        return self._start(self.started, once)

    def keep_running(self) -> Program:
        """Return a driver that runs; one that ended by itself is followed by another."""
        if self.current is not None and self.current.process.poll() is not None:
            self.ended[_reason_of(self.current)] += 1
            self.kill()
        if self.current is None:
            self.current = self.start()
        return self.current

    def kill(self) -> None:
        if self.current is not None:
            self.current.kill()
            self.current = None

    def stop(self, patience: float = _LAST_BATCH) -> None:
        """Stop it as one would."""
        if self.current is not None:
            self.current.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.current.process.wait(patience)
            self.kill()

    def finish(self, patience: float) -> None:
        """Stop it, and run the rest to its end."""
        self.stop()
        for _ in range(3):
            driver = self.current = self.start(once=True)
            if driver.process.wait(patience) == 0:
                return
            self.ended[_reason_of(driver)] += 1
        raise AssertionError(f"the rest cannot be written: see {driver.log}")

    def report(self) -> dict[str, Any]:
        return {"started": self.started, "ended by themselves": dict(self.ended)}


def _reason_of(driver: Program) -> str:
    """Return why a driver ended: the last error of ours in its log, short."""
    found = ""
    for line in driver.log.read_text(errors="replace").splitlines():
        if "flintmq.errors." in line:
            found = line.partition("flintmq.errors.")[2]
        elif line.startswith("pyspark.errors.") and not found:
            found = line
    return found[:160] or "unknown"


# --- The ledger -------------------------------------------------------------------------------------------------------


class Ledger:
    """Which rows were found: each must be there once, with the bytes that it had."""

    def __init__(self, rows: int, body_of: Callable[[int], bytes]) -> None:
        self._rows, self._body_of = rows, body_of
        self._seen = bytearray(rows)
        self._wrong = 0

    def add(self, value: bytes, is_right: Callable[[int], bool] = lambda number: True) -> None:
        """Count a row that was found; its number is in its first eight bytes."""
        number = int.from_bytes(value[:8])
        if number >= self._rows or value != self._body_of(number) or not is_right(number):
            self._wrong += 1
        else:
            self._seen[number] = min(255, self._seen[number] + 1)

    def add_table(self, rows: Any) -> None:
        """Count the rows of an archive, a dataset of pyarrow."""
        for batch in rows.to_batches(columns=["value"]):
            for value in batch.column("value").to_pylist():
                self.add(value)

    def leave_out(self, number: int) -> None:
        """Count a row that is not to be there as found once, or as wrong if it is there."""
        if self._seen[number]:
            self._wrong += 1
        self._seen[number] = 1

    def report(self) -> dict[str, Any]:
        lost, doubled = self._seen.count(0), sum(count - 1 for count in self._seen if count > 1)
        passed = not lost and not doubled and not self._wrong
        return {"rows": self._rows, "lost": lost, "doubled": doubled, "wrong": self._wrong, "passed": passed}


def run_audit(archive: str, topics: Sequence[str], flags: Sequence[str], patience: float) -> dict[str, Any]:
    """Return what `flintmq pipeline audit --complete` finds."""
    words = [sys.executable, "-m", "flintmq", "pipeline", "audit", *topics, "--archive", archive, "--complete"]
    done = subprocess.run(
        [*words, "--json", "--master", "local[2,4]", *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- Command lines ----------------------------------------------------------------------------------------------------


def line_writer() -> Say:
    """Show how it goes: one line on a terminal, else a line whenever something is new."""
    last = ""

    def say(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
            sys.stderr.flush()

    return say


def run_command(
    name: str, about: str, run: Callable[..., dict[str, Any]], messages: int, kills: int, argv: Sequence[str] | None
) -> int:
    """The command line of a torture: its exit status says whether it was passed."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.spark.{name}", description=about.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=messages)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--folder", type=Path, help="where everything is kept")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix=f"flintmq-{name.replace('_', '-')}-"))
    sys.stderr.write(f"everything is in {folder}\n")
    report = run(folder.absolute(), arguments.messages, arguments.kills, arguments.seed, line_writer())
    sys.stderr.write("\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0 if report["passed"] else 1


class Results:
    """What the parts of a long torture came to: a file with a JSON line for each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def done(self, route: str, master: str) -> tuple[int, int]:
        """Rows and faults of a combination, as far as it was passed."""
        passed = [line for line in self.lines if (line["to"], line["on"]) == (route, master) and line["passed"]]
        return sum(line["rows"] for line in passed), sum(sum(line["faults"].values()) for line in passed)

    def totals(self) -> dict[str, Any]:
        faults: Counter[str] = Counter()
        for line in self.lines:
            faults.update(line["faults"])
        total = {
            name: sum(line[name] for line in self.lines)
            for name in ("rows", "lost", "doubled", "wrong", "copies of tasks")
        }
        passed = all(line["passed"] for line in self.lines)
        return {"parts": len(self.lines), **total, "faults": dict(faults), "passed": passed}


def about_this_machine() -> dict[str, str]:
    """When, where and with which code: for a line of results."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {memory} GB, {platform.system()} {platform.release()}",
    }
