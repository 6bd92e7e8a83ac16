"""Numbers that cannot be true: each is refused, costs next to nothing, and nobody else notices."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from flintmq.broker.daemon import Broker
from support.fakes import Client, until
from support.http_client import HttpClient
from support.nsq_client import open_stream

StartBroker = Callable[..., Awaitable[Broker]]

MOST = 16 << 20

HUGE = b"9" * 5_000
#: 2³¹, 2³¹ - 1, and -1 as sizes.
SIZES = {"2^31": b"\x80\x00\x00\x00", "2^31 - 1": b"\x7f\xff\xff\xff", "-1": b"\xff\xff\xff\xff"}


def lies() -> dict[str, bytes]:
    found = {}
    for name, size in SIZES.items():
        for command in (b"PUB t", b"MPUB t", b"DPUB t 10", b"IDENTIFY", b"AUTH"):
            found[f"{command.decode()}, {name} bytes"] = command + b"\n" + size + b"x" * 100
        # The size is one that can be, the number of messages, or the size of the first one, is not.
        found[f"MPUB, {name} messages"] = b"MPUB t\n\x00\x00\x00\x64" + size + b"\x00\x00\x00\x01x" * 19
        found[f"MPUB, a message of {name}"] = b"MPUB t\n\x00\x00\x00\x64\x00\x00\x00\x02" + size + b"x" * 92
    for command in (b"RDY %b", b"RDY -%b", b"DPUB t %b", b"DPUB t -%b"):
        name = command.replace(b"%b", b"5,000 digits").decode()
        start = b"SUB t c\n" if command.startswith(b"RDY") else b""
        found[name] = start + command % HUGE + b"\n\x00\x00\x00\x01x"
    found["REQ 5,000 digits"] = b"SUB t c\nREQ 0123456789abcdef %b\n" % HUGE
    found["FIN 5,000 digits"] = b"SUB t c\nFIN %b\n" % HUGE
    for key in ("heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "sample_rate", "msg_timeout"):
        for name, number in (("5,000 digits", HUGE), ("-2^31", b"-2147483648"), ("1e400", b"1e400")):
            body = b'{"feature_negotiation":true,"%b":%b}' % (key.encode(), number)
            found[f"{key} {name}"] = b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body
    return found


LIES = lies()


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_refused_and_costs_next_to_nothing(broker: Broker, lie: str) -> None:
    other = Client(broker)
    client = Client(broker)
    gc.collect()
    tracemalloc.start()
    try:
        client.send(LIES[lie])
        await until(lambda: client.errors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    assert client.errors[0].startswith(b"E_")
    assert not any(topic.message_count for topic in broker.topics.values())
    await other.publish("u", b"all is well")


BATCH = b"POST /mpub?topic=t&binary=true HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: %b\r\n\r\nx" % HUGE,
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\nx",
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2147483648\r\n\r\nx",
        b"POST /pub?topic=t&defer=%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx" % HUGE,
        b"POST /pub?topic=t&defer=-1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx",
        BATCH + b"\x7f\xff\xff\xff\x00\x00\x00\x01x",
        BATCH + b"\x00\x00\x00\x01\xff\xff\xff\xffx",
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%b\r\nx" % (b"f" * 5_000),
    ],
    ids=["length of 5,000 digits", "length -1", "length 2^31", "defer", "defer -1", "count", "size", "chunk"],
)
async def test_a_lie_over_http_is_refused_and_costs_next_to_nothing(start_broker: StartBroker, request_: bytes) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    # The general server is there before anything is counted.
    async with HttpClient.connect(broker.http_address) as client:
        await client.get("/info")
    gc.collect()
    tracemalloc.start()
    try:
        reader, writer = await open_stream(broker.http_address)
        writer.write(request_)
        status = await reader.readline()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    writer.close()
    assert peak < MOST
    # NSQ's own nsqd calls a body that it cannot read an internal error.
    refusals = (b"500",) if b"chunked" in request_ else (b"400", b"413")
    assert status.split()[1] in refusals, status
    assert not any(topic.message_count for topic in broker.topics.values())
