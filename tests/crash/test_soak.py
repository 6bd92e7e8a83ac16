"""A soak of seconds (``python -m tests.crash.soak`` is one of 80 minutes); and its judges notice what they are for."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import struct
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import load
from flintmq.protocol.wire import FRAME_MESSAGE, FRAME_RESPONSE, encode_frame

from .flow import Flow, FlowFailed, Latencies, _upper_bound
from .soak import BODY_BYTES, Plan, Sample, Soak, chart, judge, result_line, thinned
from .trickle import Amounts, Book, Totals

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and the load generator uses epoll"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler"),
]


async def test_a_mixed_load_loses_nothing_and_everything_arrives_once(tmp_path: Path) -> None:
    # Seconds are too few to tell what grows.
    amounts = Amounts(rate=50, longest_delay=0.5, msg_timeout=1.0)
    plan = Plan(2.0, seed=1, calibration=1.0, every=0.5, warm_up=60.0, lag=20_000, amounts=amounts)
    soak = Soak(plan, tmp_path)
    report = await soak.run()

    assert report.failures == []
    assert report.passed
    assert report.maximum["batches"] > report.rate["batches"] > 0
    assert report.published > 2 * (report.rate["batches"] + report.rate["singles"]) / 2
    # It was a mixed load.
    assert min(report.trickle[name] for name in ("requeued", "let_time_out", "redelivered", "visits", "tailed")) > 0
    assert len(soak.samples) >= 3
    assert all(sample.memory_mb > 1 and sample.descriptors > 1 and sample.threads >= 1 for sample in soak.samples)
    line = json.loads(result_line(soak, plan))
    assert line["passed"]
    assert {"commit", "machine", "maximum", "trends"} <= set(line)
    assert len(line["columns"]["p99_ms"]) == len(soak.samples)


async def test_ctrl_c_ends_it_with_the_figures_so_far(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.crash.soak", "--minutes=10", "--calibration=1", "--json"),
        *(f"--data-path={tmp_path}", f"--results={tmp_path / 'results'}"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"at most" not in (line := await process.stderr.readline()):
        assert line, "it ended before its load began"
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()

    assert process.returncode == 130
    report = json.loads(out)
    assert (report["interrupted"], report["passed"], report["failures"]) == (True, False, [])
    assert report["published"] > 0
    assert json.loads((tmp_path / "results").read_text())["interrupted"]
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "the broker's files are left"


# --- Trends -----------------------------------------------------------------------------------------------------------


def sample(seconds: float, **values: float) -> Sample:
    usual = dict.fromkeys(Sample.__slots__, 10.0) | {"seconds": seconds, "memory_mb": 100.0} | values
    return Sample(**usual)


def samples(**columns: Callable[[int], float]) -> list[Sample]:
    """An hour of samples."""
    return [sample(5.0 * n, **{name: value(n) for name, value in columns.items()}) for n in range(720)]


@pytest.mark.parametrize(
    ("columns", "grown"),
    [
        ({}, []),
        ({"memory_mb": lambda n: 100 + n / 10}, ["memory_mb"]),
        ({"descriptors": lambda n: 50 + n // 5}, ["descriptors"]),
        ({"p99_ms": lambda n: 10 if n < 400 else 50}, ["p99_ms"]),
        ({"disk_mb": lambda n: n}, ["disk_mb"]),
        # It comes and goes; one moment is different; it happens in the warm-up.
        ({"memory_mb": lambda n: 100 + n % 30}, []),
        ({"p99_ms": lambda n: 5_000 if n in (300, 719) else 10}, []),
        ({"memory_mb": lambda n: min(n, 100)}, []),
    ],
)
def test_only_lasting_growth_counts(columns: dict[str, Callable[[int], float]], grown: list[str]) -> None:
    trends = judge(samples(**columns), warm_up=600)
    assert [trend.name for trend in trends if not trend.passed] == grown
    assert all(("GROWN" in str(trend)) == (not trend.passed) for trend in trends)


def test_a_trend_has_the_slope_of_its_line() -> None:
    [memory, *_] = judge(samples(memory_mb=lambda n: 100 + n / 100), warm_up=600)
    assert memory.per_hour == pytest.approx(7.2)


def test_few_samples_have_no_trend() -> None:
    assert judge(samples()[:3], warm_up=0) == []


def test_thinned_samples_keep_the_longest_latency() -> None:
    few = thinned(samples(max_ms=lambda n: 400 if n == 77 else 5), 100)
    assert len(few) <= 100
    assert sorted(each.max_ms for each in few)[-2:] == [5, 400]
    assert thinned([]) == []


def test_the_picture_has_memory_and_latency_over_time() -> None:
    text = chart(samples())
    assert {"Memory, MB", "Publish to delivery, ms", "p50", "p99"} <= {
        element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    }


# --- The ledgers ------------------------------------------------------------------------------------------------------


def test_a_book_knows_what_is_doubled_early_and_missing() -> None:
    totals = Totals()
    book = Book(totals)
    for number in range(4):
        book.enter(number)
    book.enter(4, not_before=1 << 62)
    for number in (0, 0, 1, 4):
        book.deliver(number)
    # Delivered again before it was finished: it was requeued.
    assert (totals.redelivered, totals.doubled, totals.early) == (1, 0, 1)
    book.finish(1)
    book.deliver(1)
    assert totals.doubled == 1
    assert book.some() == [0, 2, 3, 4]


def test_a_quantile_is_exact_to_one_part_in_16() -> None:
    latencies, other = Latencies(), Latencies()
    # Bucket 0 ends at 1 ns, 15 at 16 ns; from there on 16 share each power of two.
    assert [_upper_bound(bucket) for bucket in (0, 15, 16, 31, 32, 47)] == [1, 16, 17, 32, 34, 64]
    latencies.add([(16, 98), (32, 1)], most=33e-9)
    other.add([(47, 1)], most=63e-9)
    latencies.merge(other)
    assert [latencies.quantile(share) * 1e9 for share in (0.5, 0.99, 1.0)] == pytest.approx([17, 34, 63])
    assert Latencies().quantile(0.99) == 0.0


class _OddBroker:
    """Takes PUBs, answers each, and hands its message on as often as it is told to."""

    def __init__(self, copies: Callable[[int], int]) -> None:
        self._copies = copies
        self._consumer: asyncio.StreamWriter
        self._taken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ok = encode_frame(FRAME_RESPONSE, b"OK")
        await reader.readexactly(len(b"  V2"))
        while line := await reader.readline():
            if line.startswith(b"IDENTIFY"):
                await reader.readexactly(*struct.unpack(">I", await reader.readexactly(4)))
                writer.write(ok)
            elif line.startswith(b"SUB"):
                self._consumer = writer
                writer.write(ok)
            elif line.startswith(b"PUB"):
                body = await reader.readexactly(*struct.unpack(">I", await reader.readexactly(4)))
                head = struct.pack(">qH", 0, 1) + b"%016x" % self._taken
                self._consumer.write(encode_frame(FRAME_MESSAGE, head + body) * self._copies(self._taken))
                self._taken += 1
                writer.write(ok)
            elif line.startswith(b"CLS"):
                writer.write(encode_frame(FRAME_RESPONSE, b"CLOSE_WAIT"))
        writer.close()


@asynccontextmanager
async def flow_at(copies: Callable[[int], int]) -> AsyncIterator[Flow]:
    odd = _OddBroker(copies)
    async with await asyncio.start_server(odd.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await Flow.start(
            load.build(), port, batch=1, rate=500, size=BODY_BYTES, connections=1, consumers=1, seconds=1, grace=1
        ) as flow:
            yield flow


async def test_a_flow_counts_what_was_lost_and_what_came_twice() -> None:
    async with flow_at(lambda number: {3: 0, 7: 2}.get(number, 1)) as flow:
        reading = await flow.result()
    assert reading.published > 100
    assert (reading.published - reading.messages, reading.again) == (1, 1)
    assert reading.answered == reading.published
    # Of two copies with one id the second is out of order.
    assert flow.take_latencies().count == reading.messages


async def test_a_flow_says_what_the_broker_did() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(FlowFailed, match="load: connection 1: "):
            await Flow.start(load.build(), port)
