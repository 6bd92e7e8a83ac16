"""The slow ones of test_slow_connections.py, in a process of their own.

``python slow_clients.py ADDRESS KIND CONNECTIONS INTERVAL`` connects, says ``connected``, then sends one byte after the
other, each connection one every so many seconds. Once each has sent, it says ``each has sent``; once the broker has
closed them all, ``all were cut``. It goes on until standard input ends.
"""

from __future__ import annotations

import select
import socket
import sys
import time

#: A guard against hanging, nowhere a measure.
PATIENCE = 120.0
#: Without heartbeats, so that the broker has no reason to drop them: the worst for it.
GREETING = b'  V2IDENTIFY\n\0\0\0\x19{"heartbeat_interval":-1}'
#: What a slow client says at once; more of the same follows. It stands always in the middle of something.
OPENINGS = {
    "tcp command": GREETING + b"PUB slow",
    "tcp body": GREETING + b"PUB slow\n\0\x0f\x42\x40",
    "http header": b"POST /pub?topic=slow HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "http body": b"POST /pub?topic=slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(address: str, kind: str, count: int, interval: float) -> None:
    host, _, port = address.rpartition(":")
    connections = []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        connection.sendall(OPENINGS[kind])
        connection.setblocking(False)
        connections.append(connection)
    say("connected")
    sent = 0
    cut: set[int] = set()
    begun = time.monotonic()
    while True:
        due = begun + sent * interval / count
        ended, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if ended:
            return
        try:
            connections[sent % count].send(b"x")
        except OSError:
            # The broker has had enough of this one; that is its right.
            cut.add(sent % count)
            if len(cut) == count:
                say("all were cut")
                sys.stdin.read()
                return
        sent += 1
        if sent == count:
            say("each has sent")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
