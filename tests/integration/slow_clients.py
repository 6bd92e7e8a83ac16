"""The slow ones of test_slow_connections.py, in a process of their own: ``python slow_clients.py ADDRESS KIND``.

It connects, says ``connected``, then sends one byte after the other, each connection one every ten seconds. Once each
has sent, it says so; it goes on until standard input ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time

CONNECTIONS = 5_000
#: Seconds between two bytes of a connection.
INTERVAL = 10.0
#: A guard against hanging, nowhere a measure.
PATIENCE = 120.0
#: Without heartbeats, so that the broker has no reason to drop them: the worst for it.
GREETING = b'  V2IDENTIFY\n\0\0\0\x19{"heartbeat_interval":-1}'
#: What a slow client says at once; more of the same follows. It stands always in the middle of something.
OPENINGS = {
    "tcp command": GREETING + b"PUB slow",
    "tcp body": GREETING + b"PUB slow\n\0\x0f\x42\x40",
    "http header": b"POST /pub?topic=slow HTTP/1.1\r\nHost: broker\r\nX-Slow: ",
    "http body": b"POST /pub?topic=slow HTTP/1.1\r\nHost: broker\r\nContent-Length: 100000\r\n\r\n",
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(address: str, kind: str) -> None:
    host, _, port = address.rpartition(":")
    connections = []
    for _ in range(CONNECTIONS):
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        connection.sendall(OPENINGS[kind])
        connection.setblocking(False)
        connections.append(connection)
    say("connected")
    sent = 0
    begun = time.monotonic()
    while True:
        due = begun + sent * INTERVAL / CONNECTIONS
        ended, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if ended:
            return
        # The broker may have had enough of this one; that is its right.
        with contextlib.suppress(OSError):
            connections[sent % CONNECTIONS].send(b"x")
        sent += 1
        if sent == CONNECTIONS:
            say("each has sent")


if __name__ == "__main__":
    main(*sys.argv[1:])
