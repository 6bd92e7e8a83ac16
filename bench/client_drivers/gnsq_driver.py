import json
import sys
from collections.abc import Callable

import gevent
import gevent.event
import gnsq
from stopwatch import Reading, Stopwatch

SCENARIO, ADDRESS, MESSAGES = sys.argv[1], sys.argv[2], int(sys.argv[3])
BODY = b"x" * 200


def consume() -> Reading:
    handled = 0
    watch: Stopwatch | None = None
    done = gevent.event.Event()

    def handler(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        nonlocal handled, watch
        if not handled:
            watch = Stopwatch()
        handled += 1
        if handled == MESSAGES:
            done.set()

    consumer = gnsq.Consumer("bench", "clients", ADDRESS, message_handler=handler, max_in_flight=1000)
    consumer.start(block=False)
    done.wait()
    assert watch is not None
    return watch.read()


def batches() -> Reading:
    return publish(lambda producer: producer.multipublish("published", [BODY] * 200), MESSAGES // 200, 10)


def singles() -> Reading:
    return publish(lambda producer: producer.publish("published", BODY), MESSAGES, 100)


def publish(send: Callable[[gnsq.Producer], object], calls: int, under_way: int) -> Reading:
    def repeat() -> None:
        for _ in range(calls // under_way):
            send(producer)

    producer = gnsq.Producer(ADDRESS)
    producer.start()
    watch = Stopwatch()
    gevent.joinall([gevent.spawn(repeat) for _ in range(under_way)], raise_error=True)
    return watch.read()


json.dump({"consume": consume, "batches": batches, "singles": singles}[SCENARIO](), sys.stdout)
