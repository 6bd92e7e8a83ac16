"""``python -m bench.log_fetch``: what a reader of a topic's log costs its consumers.

Each run publishes to a topic on a broker of its own while one consumer finishes everything; in every other run a reader
follows through ``/log/fetch`` and moves its position on. The runs are interleaved, so that whatever else slows the
machine down hits both kinds. The reader is a process of its own; it compares every byte of every body with what was
published, and fails if one is missing or too many.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import load
from .daemons import Daemon, Side, fresh
from .errors import BenchError, StartError
from .load import Load

TOPIC, CHANNEL, READER = "log", "bench", "reader"
BATCH, SIZE = 200, 200
FRAME = 34 + SIZE
#: The bodies of one batch: the generator's are all the same, and each has its offsets in a row.
BODIES = b"".join(bytes([ord("a") + i % 26]) * SIZE for i in range(BATCH))
FULL, QUICK = 2_000_000, 40_000
#: The consumers' rate may fall to this share.
LEAST = 2 / 3
PATIENCE = 300
#: The reader has caught up: it asks again after so many seconds.
PAUSE = 0.05


def main() -> int:
    options = _parse_options()
    if options.read:
        print(json.dumps(_follow(options.read, options.messages)))
        return 0
    side = Side.ours(None, options.durability)
    figures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    try:
        binary = load.build()
        for repeat in range(options.repeat):
            for reading in (False, True):
                figures[reading].append(run := _run(binary, side, options.messages, reading))
                print(f"run {repeat + 1}, {'with' if reading else 'without'} a reader: {_words(run)}", file=sys.stderr)
    except (BenchError, StartError) as exc:
        print(f"bench.log_fetch: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rates = {reading: statistics.median(run["consume"] for run in runs) for reading, runs in figures.items()}
    ratio = rates[True] / rates[False]
    read = statistics.median(run["read"] for run in figures[True])
    print(f"consumed per second: {rates[False]:,.0f} without a reader, {rates[True]:,.0f} with one: {ratio:.2f}")
    print(f"read per second: {read:,.0f} messages, {read * FRAME / 1e6:,.0f} MB; every byte as published")
    if options.json:
        options.json.write_text(json.dumps({"messages": options.messages, "ratio": ratio, "runs": figures}, indent=1))
    if ratio < LEAST and not options.quick:
        print(f"bench.log_fetch: the consumers fell to less than {LEAST:.0%}", file=sys.stderr)
        return 1
    return 0


def _words(run: dict[str, Any]) -> str:
    parts = [f"published {run['publish']:,.0f}/s", f"consumed {run['consume']:,.0f}/s"]
    if "read" in run:
        parts.append(f"read {run['read']:,.0f}/s")
    return ", ".join([*parts, f"{run['cpu']:.2f} µs of the broker's CPU per message"])


def _run(binary: Path, side: Side, messages: int, reading: bool) -> dict[str, Any]:
    with fresh(side) as daemon:
        daemon.create_channel(TOPIC, CHANNEL)
        # What HTTP needs is imported at the first request: not while we measure.
        ask(daemon.http_port, "GET", f"/log/info?topic={TOPIC}")
        reader = _start_reader(daemon, messages) if reading else None
        try:
            return _measure(binary, daemon, messages, reader)
        finally:
            if reader is not None:
                reader.kill()
                reader.wait()


def _start_reader(daemon: Daemon, messages: int) -> subprocess.Popen[str]:
    """A reader that has its position, so that nothing goes before it has been read."""
    ask(daemon.http_port, "POST", f"/log/position?topic={TOPIC}&reader={READER}&to=earliest")
    command = [sys.executable, "-m", "bench.log_fetch", f"--read={daemon.http_port}", f"--messages={messages}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)


def _measure(binary: Path, daemon: Daemon, messages: int, reader: subprocess.Popen[str] | None) -> dict[str, Any]:
    before = daemon.cpu_seconds()
    sizes = {"messages": messages, "seconds": PATIENCE}
    with Load(binary, "sub", daemon.port, topic=TOPIC, channel=CHANNEL, connections=1, rdy=2500, **sizes) as consumer:
        consumer.ready()
        with Load(binary, "mpub", daemon.port, topic=TOPIC, connections=2, batch=BATCH, size=SIZE, **sizes) as producer:
            published = producer.result()
        consumed = consumer.result()
    if published.messages != messages or consumed.messages != messages:
        raise BenchError(f"{published.messages} published and {consumed.messages} consumed instead of {messages}")
    figures = {
        "publish": published.rate,
        "consume": consumed.marked_messages / (consumed.marked - published.started),
    }
    if reader is not None:
        try:
            output, errors = reader.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as exc:
            raise BenchError(f"the reader did not get {messages} messages within {PATIENCE} s") from exc
        if reader.returncode:
            raise BenchError(f"the reader failed:\n{errors.strip()}")
        found = json.loads(output)
        figures["read"] = messages / (found["finished"] - published.started)
        figures["reader-busy"] = found["cpu"] / (found["finished"] - published.started)
    figures["cpu"] = (daemon.cpu_seconds() - before) / messages * 1e6
    return figures


# --- The reader -------------------------------------------------------------------------------------------------------


def ask(port: int, method: str, target: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise BenchError(f"{method} {target} was answered with {answer.status} {body.decode()}")
        return json.loads(body)
    finally:
        connection.close()


def _follow(port: int, messages: int) -> dict[str, float]:
    """Read as many messages as they become durable, compare them, and move the position on."""
    at = ask(port, "GET", f"/log/position?topic={TOPIC}&reader={READER}")["offset"]
    end = at + messages
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    first = at
    while at < end:
        durable = min(end, ask(port, "GET", f"/log/info?topic={TOPIC}")["durable"])
        while at < durable:
            connection.request("GET", f"/log/fetch?topic={TOPIC}&from={at}&to={durable}")
            answer = connection.getresponse()
            body = answer.read()
            following = int(answer.headers["X-Flintmq-Next"])
            _compare(body, at, following - at, (at - first) % BATCH)
            at = following
        # Not after every answer: each move is synced.
        ask(port, "POST", f"/log/position?topic={TOPIC}&reader={READER}&to={at}")
        if at < end:
            time.sleep(PAUSE)
    return {"finished": time.monotonic(), "cpu": time.process_time()}


def _compare(data: bytes, first: int, count: int, start: int) -> None:
    """Are these the frames of so many messages, from ``first`` on, with the bodies that were published?"""
    if len(data) != count * FRAME:
        raise BenchError(f"{len(data)} bytes for {count} messages from {first} on")
    head = (FRAME - 4).to_bytes(4, "big") + b"\0\0\0\2"
    if b"".join([data[at : at + 8] for at in range(0, len(data), FRAME)]) != head * count:
        raise BenchError(f"something else than messages between {first} and {first + count - 1}")
    bodies = b"".join([data[at : at + SIZE] for at in range(34, len(data), FRAME)])
    expected = (BODIES * (count // BATCH + 2))[start * SIZE : (start + count) * SIZE]
    if bodies != expected:
        raise BenchError(f"other bytes than were published, between {first} and {first + count - 1}")
    for number in {0, count - 1}:
        found = int(data[number * FRAME + 18 : number * FRAME + 34], 16) & ((1 << 54) - 1)
        if found != first + number:
            raise BenchError(f"the message {found} in the place of {first + number}")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.log_fetch", description="What a reader of a topic's log costs its consumers."
    )
    parser.add_argument("--messages", metavar="N", type=int, help=f"of each run (default: {FULL:,})")
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--durability", choices=("os", "fsync"), default="os")
    parser.add_argument(
        "--quick", action="store_true", help="small runs, to see that it works; the ratio is not judged"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures of every run")
    parser.add_argument("--read", metavar="PORT", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.messages = options.messages or (QUICK if options.quick else FULL)
    if options.messages % BATCH:
        parser.error(f"--messages must be a multiple of {BATCH}")
    return options


if __name__ == "__main__":
    sys.exit(main())
