"""How much a running broker holds and uses, as the system sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from bench.daemons import PAGE_SIZE, cpu_clock

from support.http_client import HttpClient

from .broker import PATIENCE, BrokerProcess

__all__ = ["Gauge", "depth_of", "disk_bytes", "objects_of", "raise_file_limit", "stats_of", "until"]


class Gauge:
    """Reads of ``/proc``. It holds nothing of the past."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._folder = f"/proc/{broker.pid}"
        self._cpu = cpu_clock(broker.pid)

    def memory(self) -> int:
        """Return the resident bytes."""
        return int(Path(self._folder, "statm").read_text().split()[1]) * PAGE_SIZE

    def anonymous(self) -> int:
        """Return the resident bytes without those of files, such as its libraries."""
        pages = Path(self._folder, "statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * PAGE_SIZE

    def descriptors(self) -> int:
        return len(os.listdir(f"{self._folder}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"{self._folder}/task"))

    def cpu_seconds(self) -> float:
        return time.clock_gettime(self._cpu)

    def bytes_read(self) -> int:
        """Return the bytes of its reads of files so far, whether a device or the page cache had them."""
        return int(dict(line.split(": ") for line in Path(self._folder, "io").read_text().splitlines())["rchar"])


def disk_bytes(folder: Path) -> int:
    """Return the bytes of disk under a folder that a broker works in."""
    return sum(size * 512 for size in _blocks(folder))


def _blocks(folder: Path) -> Iterator[int]:
    # The broker deletes files meanwhile.
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(path, name)).st_blocks


async def stats_of(broker: BrokerProcess) -> list[dict[str, Any]]:
    """Return the topics of /stats."""
    async with HttpClient.connect(broker.http_address) as http:
        return (await http.get("/stats?format=json&include_clients=false")).json["topics"]


async def objects_of(broker: BrokerProcess) -> int:
    """Return how many objects its garbage collector knows, after a collection."""
    async with HttpClient.connect(broker.http_address) as http:
        await http.post("/debug/freememory")
        first = (await http.get("/debug/pprof/heap")).body.splitlines()[0]
        return int(first.rpartition(b" ")[2])


def depth_of(topics: list[dict[str, Any]]) -> int:
    """Return how many messages wait: in topics for want of a channel, and in channels."""
    return sum(topic["depth"] + sum(channel["depth"] for channel in topic["channels"]) for topic in topics)


async def until(so: Callable[[], Awaitable[bool]], patience: float = PATIENCE) -> bool:
    """Look again and again, until it is so; return whether it is."""
    deadline = time.monotonic() + patience
    while not await so():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def raise_file_limit(wanted: int) -> str:
    """Let this process and the ones that it starts open so many files; return why not, or nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return f"{wanted:,} descriptors are needed, and the hard limit is {hard:,}"
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ""
