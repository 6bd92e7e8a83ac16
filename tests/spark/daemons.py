"""Brokers and lookupds for the Spark tests: real processes, spoken to over plain HTTP.

A Node is one nsqd, ours or Go's. It can be killed and come back at the same addresses, on the same data path.
"""

from __future__ import annotations

import json
import struct
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from client.daemons import Daemon

#: How much one /mpub of ours carries.
PUBLISH_BYTES = 2 << 20


class Node(Daemon):
    """An nsqd; ``kind`` is "flintmq" or "go"."""

    def __init__(self, kind: str, data_path: Path, *flags: str) -> None:
        data_path.mkdir(parents=True, exist_ok=True)
        super().__init__(
            kind,
            "nsqd",
            f"--data-path={data_path}",
            "--broadcast-address=127.0.0.1",
            # Only what is durable can be read from a log, and most tests wait for that.
            "--sync-timeout=100ms",
            *flags,
            wants=("TCP", "HTTP"),
        )
        self.data_path = data_path

    @property
    def tcp(self) -> str:
        return self.at["TCP"]

    @property
    def http(self) -> str:
        return self.at["HTTP"]

    def publish(self, topic: str, bodies: Iterable[bytes]) -> int:
        """Publish them in order; how many they were."""
        count = 0
        batch: list[bytes] = []
        size = 0
        for body in bodies:
            batch.append(struct.pack(">I", len(body)) + body)
            size += len(body) + 4
            count += 1
            if size >= PUBLISH_BYTES:
                self._mpub(topic, batch)
                batch, size = [], 0
        if batch:
            self._mpub(topic, batch)
        return count

    def _mpub(self, topic: str, batch: list[bytes]) -> None:
        self.post("/mpub", struct.pack(">I", len(batch)) + b"".join(batch), topic=topic, binary="true")

    def get(self, path: str, **query: object) -> Any:
        """What a route says, as JSON where it is JSON."""
        return self._ask("GET", path, None, query)

    def post(self, path: str, body: bytes = b"", **query: object) -> Any:
        return self._ask("POST", path, body, query)

    def put(self, path: str, body: object, **query: object) -> Any:
        return self._ask("PUT", path, json.dumps(body).encode(), query)

    def _ask(self, method: str, path: str, body: bytes | None, query: dict[str, object]) -> Any:
        url = f"http://{self.http}{path}?{urlencode(query)}"
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=60) as answer:
            data: bytes = answer.read()
        try:
            return json.loads(data)
        except ValueError:
            return data.decode()

    def depth(self, topic: str, channel: str) -> int:
        """What waits in a channel or is in flight there; 0 where there is no such channel."""
        stats = self.get("/stats", format="json", topic=topic, channel=channel)
        return sum(
            found["depth"] + found["in_flight_count"]
            for entry in stats["topics"]
            for found in entry["channels"]
            if found["channel_name"] == channel
        )


class Lookupd(Daemon):
    def __init__(self, kind: str = "flintmq") -> None:
        super().__init__(kind, "nsqlookupd", wants=("TCP", "HTTP"))

    @property
    def tcp(self) -> str:
        return self.at["TCP"]

    @property
    def http(self) -> str:
        return self.at["HTTP"]
