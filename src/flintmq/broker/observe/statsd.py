"""Reports to a statsd server by UDP, in NSQ's keys. Whatever happens to them, the broker goes on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flintmq.addresses import join, port_of, split
from flintmq.broker.observe.stats import channel_stats, memory, topic_stats
from flintmq.broker.observe.steps import Steps, by_name, in_turns
from flintmq.errors import OptionError

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["Statsd", "statsd_prefix"]

logger = logging.getLogger(__name__)

_SECOND = 1_000_000_000
#: Finding the server's address may take this long.
_LOOKUP_SECONDS = 1.0
#: Packets are spread over the interval less this, as in NSQ; none closer than that.
_MARGIN_SECONDS = 1.0
_SHORTEST_INTERVAL = 0.1

Line = tuple[str, str, int]


def statsd_prefix(broker: Broker) -> str:
    """Return ``--statsd-prefix`` with this node's address in the place of ``%s``, and a dot at its end.

    ``/config/statsd_prefix`` shows the same. An IPv6 address has brackets here, as wherever Go joins it with a port.
    """
    options = broker.options
    prefix = options.statsd_prefix
    if not prefix:
        return ""
    address = join(options.broadcast_address, options.broadcast_http_port or port_of(broker.http_address))
    prefix = prefix.replace("%s", address.replace(".", "_").replace(":", "_"))
    return prefix if prefix.endswith(".") else f"{prefix}."


class Statsd:
    """Pushes to ``--statsd-address``, every ``--statsd-interval``. Counters go out as what they grew by."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        # What was sent last. A topic that was deleted and made again starts anew: hence its number beside its name.
        self._sent: dict[tuple[str, int], int] = {}

    def start(self) -> None:
        if self._broker.options.statsd_address:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="statsd")

    async def stop(self) -> None:
        """What is under way goes out at once."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        interval = max(self._broker.options.statsd_interval / _SECOND, _SHORTEST_INTERVAL)
        due = loop.time() + interval
        while not await self._stops_before(due):
            address = self._broker.options.statsd_address
            try:
                await self._push(address, interval - _MARGIN_SECONDS)
            except (OSError, OptionError) as exc:
                logger.error("STATSD: failed to create UDP socket to statsd(%s) - %s", address, exc)
            except Exception:
                # A bug here costs this report and no more.
                logger.exception("STATSD: failed to push stats to %s", address)
            while due <= loop.time():
                due += interval
        logger.info("STATSD: closing")

    async def _stops_before(self, moment: float) -> bool:
        """Wait until then, or until the broker stops."""
        try:
            async with asyncio.timeout_at(moment):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _push(self, address: str, spread: float) -> None:
        """Send one report. OSError or OptionError if the server's address is of no use."""
        loop = asyncio.get_running_loop()
        host, port, _ = split(address if not address.startswith(":") else f"127.0.0.1{address}", unix=False)
        async with asyncio.timeout(_LOOKUP_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            sock.connect(where)
            logger.info("STATSD: pushing stats to %s", address)
            packets = await in_turns(self._packets())
            failures: list[OSError] = []
            began = loop.time()
            for number, packet in enumerate(packets, 1):
                try:
                    sock.send(packet)
                except OSError as exc:
                    # Nobody listens, or the socket is full: as with every lost UDP packet, the next report will tell.
                    failures.append(exc)
                if self._stopping.is_set() or spread <= 0:
                    if number % 100 == 0:
                        await asyncio.sleep(0)
                else:
                    await self._stops_before(began + spread * number / len(packets))
            if failures:
                logger.warning(
                    "STATSD: %d of %d packets to %s failed - %s", len(failures), len(packets), address, failures[0]
                )

    def _packets(self) -> Steps[list[bytes]]:
        """As many whole lines in each as fit."""
        prefix = statsd_prefix(self._broker)
        limit = self._broker.options.statsd_udp_packet_size
        packets: list[bytes] = []
        packet = bytearray()
        for name, kind, value in self._lines():
            line = f"{prefix}{name}:{value}|{kind}\n".encode()
            if packet and len(packet) + len(line) > limit:
                packets.append(bytes(packet))
                packet.clear()
            packet += line
            yield 1
        if packet:
            packets.append(bytes(packet))
        return packets

    def _lines(self) -> Iterator[Line]:
        """(name, ``c`` or ``g``, value) of everything, in NSQ's order."""
        broker = self._broker
        sent: dict[tuple[str, int], int] = {}

        def grown(name: str, number: int, value: int) -> Line:
            sent[name, number] = value
            return name, "c", value - self._sent.get((name, number), 0)

        def latencies(name: str, latency: dict[str, Any]) -> Iterator[Line]:
            for item in latency["percentiles"] or ():
                yield f"{name}.e2e_processing_latency_{item['quantile'] * 100:.0f}", "g", item["value"]

        without_ephemeral = broker.options.statsd_exclude_ephemeral
        for topic in by_name(broker.topics.values()):
            if topic.exiting or (topic.ephemeral and without_ephemeral):
                continue
            t = f"topic.{topic.name}"
            stats = topic_stats(topic, [])
            yield grown(f"{t}.message_count", topic.incarnation, stats["message_count"])
            yield grown(f"{t}.message_bytes", topic.incarnation, stats["message_bytes"])
            yield f"{t}.depth", "g", stats["depth"]
            yield f"{t}.backend_depth", "g", stats["backend_depth"]
            yield from latencies(t, stats["e2e_processing_latency"])
            for channel in by_name(topic.channels.values()):
                if channel.exiting or (channel.ephemeral and without_ephemeral):
                    continue
                c = f"{t}.channel.{channel.name}"
                stats = channel_stats(channel)
                yield grown(f"{c}.message_count", channel.id, stats["message_count"])
                for name in ("depth", "backend_depth", "in_flight_count", "deferred_count"):
                    yield f"{c}.{name}", "g", stats[name]
                yield grown(f"{c}.requeue_count", channel.id, stats["requeue_count"])
                yield grown(f"{c}.timeout_count", channel.id, stats["timeout_count"])
                yield f"{c}.clients", "g", stats["client_count"]
                yield from latencies(c, stats["e2e_processing_latency"])
        if broker.options.statsd_mem_stats:
            sizes = memory(broker)
            runs = sizes.pop("gc_total_runs")
            for name, value in sizes.items():
                yield f"mem.{name}", "g", value
            yield grown("mem.gc_runs", 0, runs)
        self._sent = sent
