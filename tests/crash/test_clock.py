"""The wall clock steps by hours and days under a real nsqd: nothing stops, nothing comes early.

Fifty steps; with ``FLINTMQ_EXHAUSTIVE=1`` a thousand, and then no delivery may take longer than a second.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from support.fakes import dpub, pub
from support.nsq_client import NsqClient

from .power import why_not
from .test_faults import nsqd

EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
STEPS = 1_000 if EXHAUSTIVE else 50
SECOND = 1_000_000_000
SIZES = (3_600, -3_600, 86_400, -86_400)
#: Milliseconds.
DELAY = 300


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_steps_of_the_clock_stop_nothing_and_make_nothing_early(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with nsqd(tmp_path, "--msg-timeout=1h") as (node, layer):
        wall = 0
        published: dict[bytes, float] = {}
        slowest = 0.0
        async with NsqClient.to(node.address) as consumer, NsqClient.to(node.address) as producer:
            await consumer.subscribe("t", "c")
            consumer.send(b"RDY 100\n")

            async def until_all_came(wanted: set[bytes]) -> None:
                while wanted:
                    message = await consumer.message()
                    consumer.send(b"FIN %b\n" % message.id)
                    early = published.pop(message.body) - time.monotonic()
                    assert early <= 0, f"{message.body!r} came {early:.3f} s early"
                    wanted.discard(message.body)

            for number in range(STEPS):
                wall += rng.choice(SIZES) * SECOND
                layer.control.wall_ns = wall
                now, later = b"now %d" % number, b"later %d" % number
                began = time.monotonic()
                published[now], published[later] = began, began + DELAY / 1000
                producer.send(dpub("t", DELAY, later) + pub("t", now))
                await until_all_came({now})
                slowest = max(slowest, time.monotonic() - began)
                await producer.answer()
                await producer.answer()
            await until_all_came(set(published))
            # The steps were seen: what a message says of its time is the wall clock's.
            producer.send(pub("t", b"last"))
            message = await consumer.message()
            assert abs(message.timestamp - (time.time_ns() + wall)) < 600 * SECOND
        assert node.running
        assert await node.stop() == 0
        assert not EXHAUSTIVE or slowest < 1.0
