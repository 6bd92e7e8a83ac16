import asyncio
import json
import sys
from collections.abc import Callable

import nsq
from stopwatch import Reading, Stopwatch

SCENARIO, ADDRESS, MESSAGES = sys.argv[1], sys.argv[2], int(sys.argv[3])
BODY = b"x" * 200


async def consume() -> Reading:
    handled = 0
    watch: Stopwatch | None = None
    done = asyncio.Event()

    async def handler(message: nsq.Message) -> bool:
        nonlocal handled, watch
        if not handled:
            watch = Stopwatch()
        handled += 1
        if handled == MESSAGES:
            done.set()
        return True

    nsq.Reader("bench", "clients", handler, nsqd_tcp_addresses=[ADDRESS], max_in_flight=1000)
    await done.wait()
    assert watch is not None
    return watch.read()


async def publish(
    send: Callable[[nsq.Writer, Callable[[object, object], None]], object], calls: int, under_way: int
) -> Reading:
    """`calls` calls, `under_way` at a time: each answer makes the next."""
    writer = nsq.Writer([ADDRESS])
    while not writer.conns:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    done = asyncio.Event()
    answered = 0
    left = calls - under_way

    def on_answer(connection: object, data: object) -> None:
        nonlocal answered, left
        if data != b"OK":
            raise RuntimeError(f"answered {data!r}")
        answered += 1
        if left:
            left -= 1
            send(writer, on_answer)
        if answered == calls:
            done.set()

    watch = Stopwatch()
    for _ in range(under_way):
        send(writer, on_answer)
    await done.wait()
    return watch.read()


async def batches() -> Reading:
    return await publish(lambda writer, done: writer.mpub("published", [BODY] * 200, done), MESSAGES // 200, 10)


async def singles() -> Reading:
    return await publish(lambda writer, done: writer.pub("published", BODY, done), MESSAGES, 100)


json.dump(asyncio.run({"consume": consume, "batches": batches, "singles": singles}[SCENARIO]()), sys.stdout)
