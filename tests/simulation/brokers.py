"""Try brokers on simulated machines: seeded clients and faults, and what must hold nevertheless.

    python -m tests.simulation --seed 7 --steps 200

A seed decides on a script of steps, and on everything that happens between them: when packets arrive, which thread
works first, what a lost page holds. Nodes are real brokers and lookupds with their lanes, threads and recovery; only
the system calls below them are simulated. Held all the time:

- what is delivered was published there, under one id for ever, and every id has one body
- nothing comes early, nothing that was finished comes again, attempts count one by one, no more in flight than RDY
- no task, callback or call of the kernel raised; no turn of a loop makes more calls than it may, a start by the files
  that it finds
- a node stops only when it is told to, or when its disk fails; then it starts again
- an error that nobody foresees costs one connection or lane
- marks, blocks and files of a broker are as its modules say (``inside``)

and at the end, with all faults healed: everything that was acknowledged is delivered, within what its durability
promises; a clean stop leaves no descriptor open; what was finished stays so over it; and whoever reads a log has read
all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp.web  # noqa: F401  -- before the first seed: an import has no place in a simulation
import pytest

from flintmq import kernel
from flintmq.broker import backup
from flintmq.broker.http.lane import HttpConnection
from flintmq.broker.net import sockets as sockets_module
from flintmq.broker.net.lanes import PublishLane
from flintmq.broker.net.session import Session
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import log as log_module
from flintmq.broker.storage import mover as mover_module
from flintmq.broker.storage import store as store_module
from flintmq.broker.storage import syncer as syncer_module
from flintmq.lookup import daemon as lookup_module

from .actors import Body, Consumer, Flooder, Http, Producer, Reader, Request, Talk, _Client, _records
from .cluster import SECOND, SYNC_TIMEOUT, Lookupd, Nsqd
from .inside import Inside
from .ledger import FORGOTTEN_BY_A_KILL, LATENCY, Book, Ledger, LogReader, Sent, TopicBook
from .machine import Machine, Workers
from .network import Network
from .world import Busy, Stuck, World

__all__ = ["EXPECTED", "Outcome", "Run", "run_script", "run_seed", "script_of", "shrink"]

MSG_TIMEOUT = 1.5
TTL = 2.0
#: Virtual seconds without a delivery after which nothing more will come.
PATIENCE = 12.0
#: System calls that one turn of a loop may make, once its process serves.
MOST_CALLS = 3_000
#: Descriptors that a node may hold beside its connections and the files of messages, for which its store has a limit.
MOST_FILES = 60
#: That limit, unless a seed has a lower one, and the one for connections: those of a process with 2,048 descriptors.
MOST_SEGMENTS, MOST_CONNECTIONS = 400, 1_536
#: Seconds that a block of messages may stay in memory that nobody needs.
IDLE = 0.7
#: Bytes that a connection may hold for a client that does not read them.
MOST_UNREAD = 600_000
#: Times in a row that a broker may try to make one of its own files, and fail, within a second.
MOST_TRIES = 10

#: Topics, and the channels that are there from the start.
TOPICS = {
    "plain": ("a", "b"),
    "safe": ("a",),
    "kept": ("a",),
    "brief": ("a",),
    "hard": ("a",),
    "hard.a.dead": ("x",),
    "staged": ("a",),
    "few": (),
}
#: Messages that the topic `few` keeps.
FEW = 6
#: A topic of which nothing is in a file, made by its first client.
LIVE = "live#ephemeral"

#: (operation, weight, seconds that follow: least and most)
OPERATIONS: list[tuple[str, float, float, float]] = [
    ("publish", 30, 0.0, 0.004),
    ("publish_batch", 10, 0.0, 0.004),
    ("publish_burst", 12, 0.0, 0.006),
    ("publish_deferred", 5, 0.0, 0.004),
    ("publish_keyed", 6, 0.0, 0.004),
    ("publish_http", 10, 0.0, 0.004),
    ("subscribe", 16, 0.0, 0.006),
    ("subscribe_ephemeral", 3, 0.0, 0.006),
    ("subscribe_live", 4, 0.0, 0.006),
    ("subscribe_sampled", 2, 0.0, 0.006),
    ("subscribe_slow", 3, 0.0, 0.006),
    ("subscribe_failing", 2.5, 0.0, 0.02),
    ("finish", 20, 0.0, 0.006),
    ("finish_all", 10, 0.0, 0.006),
    ("finish_foreign", 5, 0.0, 0.004),
    ("requeue", 6, 0.0, 0.01),
    ("requeue_all", 1.5, 0.0, 0.01),
    ("touch", 3, 0.0, 0.01),
    ("touch_late", 1, 1.1 * MSG_TIMEOUT, 1.4 * MSG_TIMEOUT),
    ("change_ready", 5, 0.0, 0.01),
    ("leave", 3, 0.0, 0.01),
    ("leave_politely", 2, 0.0, 0.01),
    ("wait", 6, 0.02, 0.4),
    ("wait_for_timeouts", 1.5, MSG_TIMEOUT, MSG_TIMEOUT + 0.5),
    ("kill", 1.5, 0.0, 0.05),
    ("kill_soon", 2.5, 0.0, 0.05),
    ("lose_power", 1.5, 0.0, 0.05),
    ("lose_power_soon", 3, 0.0, 0.05),
    ("lose_power_after_sync", 3, 0.0, 0.05),
    ("lose_power_after_call", 2, 0.0, 0.05),
    ("kill_after_call", 2, 0.0, 0.05),
    ("crash_at_start", 1.5, 0.0, 0.1),
    ("fault_at_start", 1, 0.0, 0.1),
    ("stop", 1, 0.0, 0.1),
    ("stop_and_rename", 0.7, 0.0, 0.1),
    ("drain", 0.5, 0.0, 0.3),
    ("no_descriptors", 2, 0.05, 0.4),
    ("no_descriptor_for_a_call", 3, 0.0, 0.1),
    ("full_disk", 1.2, 0.05, 0.4),
    ("failing_write", 1.5, 0.0, 0.05),
    ("failing_sync", 1.2, 0.0, 0.1),
    ("failing_read", 0.6, 0.0, 0.05),
    ("failing_names", 2.2, 0.0, 0.1),
    ("slow_disk", 1, 0.05, 0.3),
    ("step_clock", 0.8, 0.0, 0.1),
    ("delay_packets", 2, 0.0, 0.05),
    ("half_open", 1.5, 0.0, 0.05),
    ("cut", 1.5, 0.0, 0.02),
    ("kill_lookupd", 1, 0.0, 0.05),
    ("look_up", 1.5, 0.0, 0.02),
    ("pause_channel", 1.5, 0.0, 0.05),
    ("unpause_channel", 1.5, 0.0, 0.05),
    ("pause_topic", 1, 0.0, 0.05),
    ("unpause_topic", 1, 0.0, 0.05),
    ("empty_channel", 0.8, 0.0, 0.05),
    ("empty_topic", 0.5, 0.0, 0.05),
    ("delete_channel", 0.6, 0.0, 0.05),
    ("delete_topic", 0.6, 0.0, 0.05),
    ("create_channel", 1.2, 0.0, 0.05),
    ("seek", 1, 0.0, 0.05),
    ("change_settings", 1.5, 0.0, 0.05),
    ("redrive", 2, 0.0, 0.1),
    ("ask_for_redrive", 1, 0.0, 0.05),
    ("read_log", 2, 0.0, 0.05),
    ("stage", 1.5, 0.0, 0.05),
    ("ask_for_stats", 1, 0.0, 0.02),
    ("flood", 0.4, 0.0, 0.02),
    ("unforeseen_error", 2, 0.0, 0.02),
    ("back_up", 0.5, 0.0, 0.02),
    ("flip_a_bit", 0.7, 0.0, 0.02),
]

#: By how much a seed likes each operation more or less than others: so what is rare with another meets it somewhere.
SWARM = (0.1, 0.5, 1.0, 1.0, 2.0, 5.0)

#: Ends of processes, and faults of disks: a seed has few of them or many, so that some processes live for long.
CRASHES = frozenset(
    """kill kill_soon lose_power lose_power_soon lose_power_after_sync lose_power_after_call kill_after_call
    crash_at_start fault_at_start stop stop_and_rename drain""".split()
)
FAULTS = frozenset(
    """no_descriptors no_descriptor_for_a_call full_disk failing_write failing_sync failing_read failing_names
    slow_disk""".split()
)

#: What is under way when something happens to a node.
LOAD = (
    *("publish", "publish_batch", "publish_batch", "publish_burst", "publish_burst", "publish_deferred"),
    *("publish_keyed", "publish_http", "finish", "requeue"),
)

#: What a full run must have reached, and how often at least.
EXPECTED: dict[str, int] = {
    **{name: 100 for name, *_ in OPERATIONS},
    **dict.fromkeys(
        [
            *(
                "acknowledged",
                "acknowledged over HTTP",
                "refused over TCP",
                "publish without an answer",
                "repeated key",
            ),
            *(
                "published by a lane",
                "finished by a lane",
                "FIN confirmed",
                "error of a consumer",
                "CLS",
                "another's message",
                "redelivered",
            ),
            *("clean stop", "kill", "power", "stop by a fault", "EMFILE", "ENOSPC at write", "EIO at write"),
            *("EIO at sync", "EIO at read", "write during a sync", "crash at a call", "torn or reordered"),
            *("dead letter", "seek done", "emptied", "channel deleted", "topic deleted", "settings changed"),
            *(
                "staged and committed",
                "restored",
                "early deliveries looked for",
                "attempts compared",
                "paused",
                "drained",
            ),
            *(
                "topic paused",
                "timed out",
                "attempts compared over a crash",
                "whole batches looked for",
                "start refused",
            ),
            *(
                "delay over a reboot and a clock step",
                "refused over HTTP",
                "expired",
                "dropped at a limit",
                "host name changed",
                "clock stepped",
                "superseded run is fenced",
                "written in a thread",
                "written by the kernel",
            ),
            *("redriven", "read from a log", "unforeseen error"),
            *("found by a lookupd", "snapshot of the journal", "segment removed", "read back from the disk"),
        ],
        100,
    ),
}


@dataclass(frozen=True)
class Step:
    id: int
    do: str
    wait: float

    def line(self) -> str:
        return json.dumps({"id": self.id, "do": self.do, "wait": self.wait})


def script_of(seed: int, steps: int) -> list[Step]:
    """The steps of a seed. What each of them does in detail follows from the seed and its id alone."""
    rng = random.Random(f"script {seed}")
    crashes, faults = rng.choice([0.1, 0.4, 1.0]), rng.choice([0.3, 1.0, 2.0])
    weights = [
        weight * rng.choice(SWARM) * (crashes if name in CRASHES else faults if name in FAULTS else 1.0)
        for name, weight, _, _ in OPERATIONS
    ]
    script = []
    for number in range(steps):
        name, _, least, most = rng.choices(OPERATIONS, weights)[0]
        script.append(Step(number, name, round(rng.uniform(least, most), 6)))
    return script


@dataclass
class Outcome:
    seed: int
    violations: list[str]
    trace: str
    reached: Counter[str]
    script: list[Step]

    @property
    def kind(self) -> str:
        """The first word of the first violation: what shrinking keeps."""
        return self.violations[0].split(": ", 2)[1] if self.violations else ""


@dataclass
class _Owed:
    """What the copy of a node must deliver, and what it must not."""

    topic: str
    channel: str
    wanted: dict[bytes, None]
    finished: dict[bytes, None]


class Run:
    """One seed."""

    def __init__(self, seed: int, script: list[Step]) -> None:
        self.seed = seed
        self.script = script
        self.world = World(f"brokers {seed}", tick=20_000)
        self.network = Network(self.world)
        self.ledger = Ledger(self.world)
        self.reached: Counter[str] = Counter()
        self.clients: list[_Client] = []
        self.talks: list[Talk] = []
        #: What dead processes leave: kept, so that no destructor runs in the middle of things.
        self.graves: list[Any] = []
        self.machines = 0
        self.most_calls = 0
        self.over = False
        self.healed = False
        self.settled = False
        self.progress = self.world.now
        self.numbers = 0
        self.rng = rng = random.Random(f"plan {seed}")
        self.lookupds = [Lookupd(self, f"lookupd{n}", f"10.0.1.{n + 1}") for n in range(rng.choice([0, 1, 2, 2]))]
        self.nsqds = [
            Nsqd(self, f"nsqd{n}", f"10.0.0.{n + 1}", self._options(n)) for n in range(rng.choice([1, 1, 2, 3, 3]))
        ]
        # Most of what happens happens in one place, so that much happens there.
        self._traffic = [rng.choice([1, 10]) for _ in self.nsqds]
        self._topics = {
            name: rng.choice([0.3, 1, 6]) for name in ("plain", "safe", "kept", "brief", "hard", "few", LIVE)
        }
        self._producers: dict[tuple[str, str], list[Producer]] = {}
        self._web: dict[str, Http] = {}
        #: Nodes made from a backup, and what they must deliver.
        self.copies: list[tuple[Nsqd, list[_Owed]]] = []
        #: Topics whose log is being read.
        self._read: list[TopicBook] = []
        self.keyed: list[tuple[Nsqd, list[Sent], bool]] = []
        #: Where everything happens for a moment.
        self._at: Nsqd | None = None
        self.inside = Inside(self)
        #: Blocks of messages that nobody needs, and since when.
        self._idle_blocks: dict[tuple[str, int, str, int], float] = {}

    def _options(self, number: int) -> dict[str, Any]:
        rng = self.rng
        host = f"10.0.0.{number + 1}"
        return {
            "tcp_address": f"{host}:4150",
            "http_address": f"{host}:4151",
            "broadcast_address": host,
            "id": number * 100 + rng.randrange(100),
            "durability": rng.choice(["os", "os", "os", "fsync", "memory"]),
            "nsqlookupd_tcp_addresses": tuple(f"{lookupd.host}:4160" for lookupd in self.lookupds),
            "max_bytes_per_file": rng.choice([3_000, 3_000, 20_000, 200_000, 2_000_000]),
            "mem_queue_size": rng.choice([0, 5, 5, 50, 10_000]),
            "cold_cache_bytes": rng.choice([0, 0, 2_000, 1 << 20]),
            "sync_every": rng.choice([0, 3, 100]),
            "sync_timeout": round(SYNC_TIMEOUT * SECOND),
            "disk_reserve": rng.choice([0, 0, 100_000]),
            "msg_timeout": round(MSG_TIMEOUT * SECOND),
            "queue_scan_interval": SECOND // 10,
            "requeue_on_disconnect": rng.random() < 0.3,
            "drain_timeout": 2 * SECOND,
            "max_req_timeout": 60 * SECOND,
        }

    # --- Small helps -------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.world.note("step", text)

    def refused(self, node: Nsqd, why: bytes, last_words: str) -> None:
        """A publish was refused: something must be wrong with the node, and the reason must say what."""
        words = why.lower()
        if any(word in words for word in (b"drain", b"exiting", b"stopp")):
            # A failed sync, or a failed write of the journal, ends it, too.
            sound = not node.stopping and not last_words and self.world.seconds > node.unsound_until
            # So do publishers of a topic that is being deleted hear.
            sound = sound and self.world.seconds > node.deleted_until
        elif any(
            word in words for word in (b"no space", b"nearly full", b"too many open files", b"input/output error")
        ):
            # A folder that cannot be made may meet its fault at any time.
            failed_at = node.machine.failed_at if node.machine is not None else 0.0
            sound = self.world.seconds > max(node.unsound_until, failed_at + LATENCY)
        else:
            sound = True
        if sound:
            self.world.violated(f"refused: {node.name} refuses a publish without a fault: {why[:100]!r}")

    def body(self, rng: random.Random, node: Nsqd, topic: str) -> bytes:
        self.numbers += 1
        head = f"<{self.numbers} {node.name} {topic}>".encode()
        return head + b"." * rng.choice([0, 0, 20, 200, 200, 1500, 6000])

    def consumers(self) -> list[Consumer]:
        self.clients = [client for client in self.clients if not client.over]
        return [client for client in self.clients if isinstance(client, Consumer)]

    def _node(self, rng: random.Random) -> Nsqd:
        return self._at or rng.choices(self.nsqds, self._traffic)[0]

    def _topic(self, rng: random.Random) -> str:
        return rng.choices(list(self._topics), list(self._topics.values()))[0]

    def _sent(self, rng: random.Random, node: Nsqd, topic: str, delay: float = 0.0, key: str = "") -> Sent:
        return Sent(self.body(rng, node, topic), node.name, topic, self.world.seconds, delay, key)

    def _producer(self, rng: random.Random, node: Nsqd, kind: str) -> Producer:
        """Mostly one that has published like this before: so it takes a lane."""
        known = self._producers.setdefault((node.name, kind), [])
        known[:] = [producer for producer in known if not producer.over]
        if len(known) < 2 or rng.random() < 0.03:
            made = Producer(self, node, keys=kind == "keyed")
            if not made.over:
                known.append(made)
            return made
        return rng.choice(known)

    def _under_load(self, rng: random.Random, node: Nsqd) -> None:
        """Mostly there is something under way at a node when something happens to it."""
        if rng.random() < 0.8:
            self._at = node
            for name in rng.choices(LOAD, k=rng.choice([1, 2, 3, 5])):
                getattr(self, name)(rng)
            self._at = None

    # --- Steps: publishing -------------------------------------------------------------------------------------------

    def publish(self, rng: random.Random) -> None:
        node, topic = self._node(rng), self._topic(rng)
        producer = self._producer(rng, node, topic)
        for _ in range(rng.choice([1, 1, 2, 5, 12])):
            producer.publish(topic, [self._sent(rng, node, topic)], batch=False)

    def publish_batch(self, rng: random.Random) -> None:
        node, topic = self._node(rng), self._topic(rng)
        producer = self._producer(rng, node, f"{topic} batch")
        sents = [self._sent(rng, node, topic) for _ in range(rng.choice([1, 2, 5, 15, 30, 45]))]
        producer.publish(topic, sents, batch=True)

    def publish_burst(self, rng: random.Random) -> None:
        """Several publishers, one command each at a time: the lanes' own kind of traffic."""
        # Only durability `os`, which most nodes give to some topics alone, lets the kernel write by itself.
        node, topic = self._node(rng), rng.choice(["plain", "plain", "hard", self._topic(rng), self._topic(rng)])
        kind = rng.choice(["", " batch"])
        producers = dict.fromkeys(self._producer(rng, node, topic + kind) for _ in range(rng.randint(2, 5)))

        # Those of the same host send the next one while the kernel still answers others.
        local = rng.random() < 0.6

        def again(producer: Producer, left: int) -> None:
            if left and not producer.over:
                if not producer.waiting:
                    sents = [self._sent(rng, node, topic) for _ in range(3 if kind else 1)]
                    producer.publish(topic, sents, batch=bool(kind))
                    left -= 1
                if local:
                    producer.then = lambda: again(producer, left)
                else:
                    self.world.after(0.0004, lambda: again(producer, left))

        for producer in producers:
            if local and producer.sock is not None:
                producer.sock.link.delay = 1e-6
            again(producer, rng.randint(2, 6) * (2 if local else 1))
        if rng.random() < 0.5:
            # In the same turns others publish to the same topic what no lane takes.
            aside = self._producer(rng, node, f"{topic} aside")
            for _ in range(rng.randint(1, 4)):
                wait, size = rng.choice([0.0, 0.0001, 0.0003, 0.0007]), rng.choice([1, 1, 4, 12])
                sents = [self._sent(rng, node, topic) for _ in range(size)]
                self.world.after(wait, lambda sents=sents: aside.publish(topic, sents, batch=len(sents) > 1))

    def publish_deferred(self, rng: random.Random) -> None:
        node, topic = self._node(rng), rng.choice(["plain", "safe"])
        delay = rng.choice([0.0, 0.01, 0.05, 0.3, 1.0, 4.0])
        self._producer(rng, node, "deferred").publish(topic, [self._sent(rng, node, topic, delay)], batch=False)

    def publish_keyed(self, rng: random.Random) -> None:
        """A new key, or one that was used before, with the same content."""
        # Keys are forgotten by their age, which goes by the date.
        known = [each for each in self.keyed if not each[0].date_changed]
        if known and rng.random() < 0.4:
            node, sents, batch = rng.choice(known)
            self.reached["repeated key"] += 1
        else:
            node, topic = self._node(rng), rng.choice(["plain", "safe"])
            batch = rng.random() < 0.4
            self.numbers += 1
            key = f"key-{self.numbers}"
            sents = [self._sent(rng, node, topic, 0.0, key) for _ in range(rng.choice([1, 4]) if batch else 1)]
            self.keyed.append((node, sents, batch))
        self._producer(rng, node, "keyed").publish(sents[0].topic, sents, batch=batch)

    def publish_http(self, rng: random.Random) -> None:
        node, topic = self._node(rng), self._topic(rng)
        web = self._web.get(node.name)
        if web is None or not web.idle:
            web = self._web[node.name] = Http(self, node)
        kind = rng.choice(["pub", "pub", "defer", "mpub"])
        delay = rng.choice([0.02, 0.4]) if kind == "defer" and topic in ("plain", "safe") else 0.0
        sents = [self._sent(rng, node, topic, delay) for _ in range(rng.choice([1, 5]) if kind == "mpub" else 1)]
        for sent in sents:
            sent.batch = sents
            self.ledger.publish(sent)
        target = f"/{'mpub' if kind == 'mpub' else 'pub'}?topic={topic}"
        target += f"&defer={round(delay * 1000)}" if delay else ""
        target += "&binary=true" if kind == "mpub" else ""
        data = _records([sent.body for sent in sents]) if kind == "mpub" else sents[0].body

        def answered(status: int, answer: bytes) -> None:
            if status == 200:
                self.reached["acknowledged over HTTP"] += len(sents)
                for sent in sents:
                    self.ledger.acknowledge(sent, web.last_words)
            elif status:
                self.reached["refused over HTTP"] += 1
                self.refused(node, answer, web.last_words)
                for sent in sents:
                    self.ledger.refuse(sent)

        web.ask("POST", target, data, answered)

    # --- Steps: consuming --------------------------------------------------------------------------------------------

    def _channel(self, rng: random.Random) -> tuple[Nsqd, str, str]:
        node = self._node(rng)
        names = [name for name in TOPICS if TOPICS[name]]
        topic = rng.choices(names, [self._topics.get(name, 0.7) for name in names])[0]
        book = self.ledger.topic(node.name, topic)
        channels = list(book.books) if book is not None else []
        return node, topic, rng.choice(channels or list(TOPICS[topic]))

    def subscribe(self, rng: random.Random) -> None:
        node, topic, channel = self._channel(rng)
        auto = rng.choice([None, None, 0.0005, 0.01])
        if topic == "hard.a.dead":
            auto = 0.001
        timeout = rng.choice([0.0, 0.0, 1.0])
        for _ in range(rng.choice([1, 1, 2])):
            Consumer(self, node, topic, channel, rng.choice([1, 2, 10, 50, 300]), auto=auto, timeout=timeout)

    def subscribe_ephemeral(self, rng: random.Random) -> None:
        node = self._node(rng)
        Consumer(self, node, self._topic(rng), "now#ephemeral", rng.choice([1, 20]), auto=rng.choice([None, 0.01]))

    def subscribe_live(self, rng: random.Random) -> None:
        """It may hold an old message while newer ones come and are finished."""
        node, channel = self._node(rng), rng.choice(["a", "now#ephemeral"])
        Consumer(self, node, LIVE, channel, 1)
        Consumer(self, node, LIVE, channel, rng.choice([5, 100]), auto=0.002)
        producer = self._producer(rng, node, LIVE)
        for _ in range(rng.choice([2, 10, 20])):
            producer.publish(LIVE, [self._sent(rng, node, LIVE)], batch=False)

    def subscribe_sampled(self, rng: random.Random) -> None:
        """On a channel of its own: what it is not sent is dropped."""
        node = self._node(rng)
        Consumer(self, node, self._topic(rng), "sampled", 50, auto=0.001, sample=rng.choice([1, 50, 99]))

    def subscribe_slow(self, rng: random.Random) -> None:
        """It stops to read after a while, and its window is small."""
        node, topic, channel = self._channel(rng)
        consumer = Consumer(self, node, topic, channel, 300, window=rng.choice([500, 4_000]), heartbeat=60_000)
        consumer.disturbed = True
        sock, book = consumer.sock, consumer.book
        if sock is None:
            return
        if book is not None:
            book.unsteady = True
        sock.paused = True
        self.world.after(rng.choice([0.05, 0.5, 2.0]), lambda: None if consumer.over else sock.resume())

    def subscribe_failing(self, rng: random.Random) -> None:
        """It cannot do anything with what it gets, and says so at once: dead letters come of that."""
        node, topic, channel = self._channel(rng)
        if rng.random() < 0.7:
            topic, channel = "hard", "a"
        consumer = Consumer(self, node, topic, channel, rng.choice([1, 10, 50]), fails=True)
        self.world.after(rng.choice([0.05, 0.5]), consumer.close)

    def _some(self, rng: random.Random) -> list[Consumer]:
        found = [consumer for consumer in self.consumers() if consumer.held]
        return [] if not found else rng.sample(found, rng.randint(1, len(found)))

    def finish(self, rng: random.Random) -> None:
        for consumer in self._some(rng):
            ids = list(consumer.held)
            if rng.random() < 0.5:
                rng.shuffle(ids)
            consumer.finish(ids[: rng.randint(1, len(ids))], barrier=rng.random() < 0.3)

    def finish_all(self, rng: random.Random) -> None:
        for consumer in self.consumers():
            consumer.finish(list(consumer.held), barrier=rng.random() < 0.5)

    def finish_foreign(self, rng: random.Random) -> None:
        """FIN, REQ and TOUCH of what another connection holds, or nobody."""
        consumers = self.consumers()
        if not consumers:
            return
        # Those that the broker cannot have given to the intruder meanwhile.
        latest = self.world.seconds - MSG_TIMEOUT / 2 + LATENCY
        chances = [
            (intruder, ids)
            for holder in consumers
            for intruder in consumers
            if holder is not intruder and not holder.disturbed and not intruder.disturbed
            if (holder.node, holder.topic, holder.channel) == (intruder.node, intruder.topic, intruder.channel)
            if (ids := [id for id, (_, at) in holder.held.items() if at > latest and id not in intruder.held])
        ]
        intruder, found = rng.choice(chances) if chances else (rng.choice(consumers), [])
        self.reached["another's message"] += bool(found)
        for id in rng.sample(found, min(len(found), 6)) or [b"0123456789abcdef"]:
            intruder.meddled[id] = self.world.seconds
            intruder.send(rng.choice([b"FIN %b\n" % id, b"FIN %b\n" % id, b"REQ %b 0\n" % id, b"TOUCH %b\n" % id]))

    def requeue(self, rng: random.Random) -> None:
        for consumer in self._some(rng):
            for id in rng.sample(list(consumer.held), min(len(consumer.held), rng.choice([1, 1, 5]))):
                consumer.requeue(id, rng.choice([0.0, 0.0, 0.02, 0.5, 4.0]))

    def requeue_all(self, rng: random.Random) -> None:
        """Whoever holds something cannot do it: dead letters come of that."""
        for consumer in self.consumers():
            if consumer.topic == "hard" or rng.random() < 0.3:
                for id in list(consumer.held):
                    consumer.requeue(id, 0.0)

    def touch(self, rng: random.Random) -> None:
        for consumer in self._some(rng):
            consumer.touch(rng.choice(list(consumer.held)))

    def touch_late(self, rng: random.Random) -> None:
        """Some ask for more time in the middle of theirs, and do nothing else while the first one would run out."""
        for consumer in self._some(rng):
            self.world.after(rng.uniform(0.3, 0.8) * consumer.timeout, partial(self._touch_all, consumer))

    def _touch_all(self, consumer: Consumer) -> None:
        if not (consumer.over or self.healed):
            for id in list(consumer.held):
                consumer.touch(id)

    def change_ready(self, rng: random.Random) -> None:
        for consumer in self.consumers():
            if rng.random() < 0.5:
                consumer.change_ready(rng.choice([0, 1, 5, 50, 300]))

    def leave(self, rng: random.Random) -> None:
        consumers = self.consumers()
        if consumers:
            rng.choice(consumers).close()

    def leave_politely(self, rng: random.Random) -> None:
        consumers = self.consumers()
        if consumers:
            rng.choice(consumers).leave()

    def wait(self, rng: random.Random) -> None: ...

    def wait_for_timeouts(self, rng: random.Random) -> None: ...

    # --- Steps: the end of processes ---------------------------------------------------------------------------------

    def kill(self, rng: random.Random) -> None:
        self._node(rng).kill("kill")

    def kill_soon(self, rng: random.Random) -> None:
        node = self._node(rng)
        node.kill_in(rng.randint(1, 80), "kill")
        self._under_load(rng, node)
        self.reached["crash at a call"] += 1

    def lose_power(self, rng: random.Random) -> None:
        self._node(rng).kill("power")

    def lose_power_soon(self, rng: random.Random) -> None:
        node = self._node(rng)
        node.kill_in(rng.randint(1, 80), "power")
        self._under_load(rng, node)
        self.reached["crash at a call"] += 1

    def lose_power_after_sync(self, rng: random.Random) -> None:
        """Right after something was called durable."""
        self._lose_power_after(rng, "sync")

    def lose_power_after_call(self, rng: random.Random) -> None:
        """Right after a file was made, renamed or deleted, or a folder synced: between two steps of something."""
        self._lose_power_after(rng, rng.choice(["create", "rename", "remove", "sync_folder", "truncate"]))

    def kill_after_call(self, rng: random.Random) -> None:
        """Between two steps of something, as above; or between two writes."""
        self._lose_power_after(rng, rng.choice(["create", "write", "write", "write", "remove", "rename"]), "kill")

    def _lose_power_after(self, rng: random.Random, kind: str, death: str = "power") -> None:
        node = self._node(rng)
        if node.machine is not None and not node.machine.dead:
            node.death = death
            node.machine.calls_after = (kind, rng.choice([1, 1, 2, 3, 5, 8, 12]))
            self.reached["crash at a call"] += 1
            self._under_load(rng, node)

    def crash_at_start(self, rng: random.Random) -> None:
        """The next process of a node does not live long."""
        node = self._node(rng)
        node.crash_next = (rng.randint(1, rng.choice([60, 300, 1000])), rng.choice(["kill", "power"]))
        rng.choice([node.stop, lambda: node.kill("kill"), lambda: node.kill("power")])()

    def fault_at_start(self, rng: random.Random) -> None:
        """The next process of a node meets a disk that fails once or twice; if it cannot start, another one does."""
        node = self._node(rng)
        kind = rng.choice(["open", "open", "create", "read", "write", "sync", "sync_folder", "rename", "truncate"])
        error = errno.EMFILE if kind in ("open", "create") and rng.random() < 0.5 else errno.EIO
        path, times, after = rng.choice(["", "", ".seg", "side", "journal"]), rng.choice([1, 2]), rng.randrange(12)

        def meet(machine: Machine) -> None:
            node.unsound_since, node.unsound_until = self.world.seconds, self.world.seconds + 5
            machine.fail(kind, error, times=times, path=path, skip=after)

        node.fault_next = meet
        rng.choice([node.stop, lambda: node.kill("kill"), lambda: node.kill("power")])()

    def stop(self, rng: random.Random) -> None:
        self._node(rng).stop()

    def stop_and_rename(self, rng: random.Random) -> None:
        """Another node id and host name from the next start on."""
        node = self._node(rng)
        node.options = {**node.options, "id": (node.options["id"] // 100) * 100 + rng.randrange(100)}
        node.hostname = f"{node.name}-{rng.randrange(10)}"
        self.reached["host name changed"] += node.up
        node.stop()

    def drain(self, rng: random.Random) -> None:
        node = self._node(rng)
        if node.up and not node.stopping:
            node.stopping = True

            def script() -> Generator[Request, tuple[int, bytes], None]:
                status, _ = yield node, "POST", "/drain", b""
                self.reached["drained"] += status == 200
                if status != 200:
                    node.stopping = False

            Talk(self, script())

    # --- Steps: faults of machines and networks ----------------------------------------------------------------------

    def _unsound(self, rng: random.Random, seconds: float) -> Nsqd | None:
        """A node whose disk is about to misbehave."""
        node = self._node(rng)
        if node.machine is None or node.machine.dead:
            return None
        if self.world.seconds > node.unsound_until:
            node.unsound_since = self.world.seconds
        node.unsound_until = max(node.unsound_until, self.world.seconds + seconds)
        # A fault that waits for its call has no end of its own.
        node.faulty_until = max(node.faulty_until, self.world.seconds + seconds - 3)
        return node

    def no_descriptors(self, rng: random.Random) -> None:
        seconds = rng.uniform(0.02, 0.5)
        node = self._unsound(rng, seconds + 3)
        if node is not None and node.machine is not None:
            machine = node.machine
            if rng.random() < 0.4:
                # Somebody else takes descriptors and gives them back.
                machine.flaky = True
                self.world.after(seconds, lambda: setattr(machine, "flaky", False))
            else:
                # Below what is open: then those that the broker holds in reserve are of no use either.
                machine.most_files = max(1, len(machine._open) + rng.choice([-20, -10, -4, 0, 1, 2]))
                self.world.after(seconds, lambda: setattr(machine, "most_files", None))
            self._with_more(rng, node)

    def no_descriptor_for_a_call(self, rng: random.Random) -> None:
        """Others took the last descriptors, for a moment: some of the next files cannot be opened, others can."""
        kind, path = rng.choice(
            [("open", ".seg")] * 6 + [("create", "journal-")] * 3 + [("create", ".seg"), ("open_folder", "journal")]
        )
        node = self._unsound(rng, 4)
        if node is not None and node.machine is not None:
            times, skip = rng.choice([1, 2, 6, 40]) if kind == "open" else 40, rng.choice([0, 0, 1, 3])
            self._for_a_while(node.machine.fail(kind, errno.EMFILE, times=times, path=path, skip=skip))
            self._with_more(rng, node)

    def _for_a_while(self, fault: Any) -> None:
        """A fault that has not met its call by then never does."""
        self.world.after(1.5, lambda: setattr(fault, "times", 0))

    def full_disk(self, rng: random.Random) -> None:
        seconds = rng.uniform(0.02, 0.5)
        node = self._unsound(rng, seconds + 3)
        if node is not None and node.machine is not None:
            node.was_full = True
            node.capacity = node.machine.capacity = node.machine.used + rng.choice([0, 100, 5_000])

            def over() -> None:
                node.capacity = None
                if node.machine is not None:
                    node.machine.capacity = None

            self.world.after(seconds, over)
            self._with_more(rng, node)

    def _with_more(self, rng: random.Random, node: Nsqd) -> None:
        """A fault meets traffic, and often it is the first of two: what it has left half done is not mended then."""
        self._under_load(rng, node)
        if rng.random() < 0.25:
            node.kill_in(rng.choice([5, 30, 100]) + rng.randrange(30), rng.choice(["kill", "power"]))

    def _failing(self, rng: random.Random, kind: str, path: str = "") -> None:
        node = self._unsound(rng, 4)
        if node is not None and node.machine is not None:
            short, skip = rng.choice([0, 10, 900, 5_000]), rng.choice([0, 0, 1, 2, 5])
            fault = node.machine.fail(kind, errno.EIO, times=rng.choice([1, 1, 3]), path=path, short=short, skip=skip)
            if kind != "make_folder":
                self._for_a_while(fault)
            self._with_more(rng, node)

    def failing_write(self, rng: random.Random) -> None:
        self._failing(rng, "write", rng.choice(["", ".seg"]))

    def failing_sync(self, rng: random.Random) -> None:
        """What was not synced is gone with the power, whatever the broker thinks."""
        self._failing(rng, "sync", rng.choice(["", ".seg", ".seg"]))

    def failing_read(self, rng: random.Random) -> None:
        self._failing(rng, "read")

    def failing_names(self, rng: random.Random) -> None:
        """Files and folders cannot be made, opened or deleted."""
        kind = rng.choice(["open"] * 4 + ["make_folder"] * 4 + ["create", "remove", "truncate"])
        # Side logs are made rarely: their folder meets the fault whenever it is made.
        self._failing(
            rng, kind, {"open": ".seg", "make_folder": rng.choice(["", "side", "side", "side"])}.get(kind, "")
        )

    def slow_disk(self, rng: random.Random) -> None:
        seconds = rng.uniform(0.1, 1.0)
        node = self._unsound(rng, seconds + 3)
        if node is not None and node.machine is not None:
            machine = node.machine
            machine.sync_seconds, machine.work_seconds = rng.choice([(0.3, 0.01), (0.02, 0.2), (1.0, 0.3)])
            # The last sync that it slows down may take as long.
            node.faulty_until += machine.sync_seconds + machine.work_seconds

            def over() -> None:
                machine.sync_seconds, machine.work_seconds = node.sync_seconds, 0.001

            self.world.after(seconds, over)

    def step_clock(self, rng: random.Random) -> None:
        node = self._node(rng)
        step = rng.choice([-86_400, -3_600, -1, 1, 3_600, 86_400]) * SECOND
        node.step += step
        if node.machine is not None:
            node.machine.clock.step += step  # type: ignore[attr-defined]
        self.reached["clock stepped"] += node.up
        self.ledger.stepped[node.name] = self.world.seconds
        self.ledger.steps[node.name] = node.step / SECOND
        if step < 0:
            self.ledger.set_back.add(node.name)
        node.date_changed = True
        if not node.up:
            self.ledger.loosen(node.name)

    def _link(self, rng: random.Random) -> _Client | None:
        self.clients = [client for client in self.clients if not client.over]
        return rng.choice(self.clients) if self.clients else None

    def _disturb(self, client: _Client) -> None:
        client.disturbed = True
        if isinstance(client, Consumer) and client.book is not None:
            client.book.unsteady = True

    def delay_packets(self, rng: random.Random) -> None:
        """A packet is lost and sent again: what comes behind it waits."""
        client = self._link(rng)
        if client is not None and client.sock is not None:
            self._disturb(client)
            link, delay = client.sock.link, client.sock.link.delay
            link.delay = rng.choice([0.05, 0.2, 1.0])
            self.world.after(rng.uniform(0.01, 0.3), lambda: setattr(link, "delay", delay))

    def half_open(self, rng: random.Random) -> None:
        """A cable is pulled; the client gives up after a while, the broker when no heartbeat is answered."""
        client = self._link(rng)
        if client is not None and client.sock is not None:
            self._disturb(client)
            client.sock.link.half_open = True
            if isinstance(client, Consumer):
                client.doubt_last_wishes()
            self.world.after(rng.choice([0.1, 1.0, 5.0]), client.close)

    def cut(self, rng: random.Random) -> None:
        client = self._link(rng)
        if client is not None and client.sock is not None:
            self._disturb(client)
            client.sock.cut()

    def kill_lookupd(self, rng: random.Random) -> None:
        if self.lookupds:
            lookupd = rng.choice(self.lookupds)
            lookupd.kill()
            self.world.after(rng.choice([0.01, 0.5, 3.0]), lookupd.boot)

    def look_up(self, rng: random.Random) -> None:
        if self.lookupds:
            lookupd = rng.choice(self.lookupds)

            def answered(status: int, answer: bytes) -> None:
                if status == 200 and json.loads(answer)["producers"]:
                    self.reached["found by a lookupd"] += 1

            client = Http.__new__(Http)
            _Client.__init__(client, self, lookupd, (lookupd.host, 4161))  # type: ignore[arg-type]
            client._waiting = None
            client.ask("GET", "/lookup?topic=plain", b"", answered)

    # --- Steps: administration ---------------------------------------------------------------------------------------

    def _ask(self, node: Nsqd, method: str, target: str, body: bytes, then: Callable[[int], object]) -> None:
        def script() -> Generator[Request, tuple[int, bytes], None]:
            status, _ = yield node, method, target, body
            then(status)

        Talk(self, script())

    def _a_book(self, rng: random.Random, *topics: str) -> Book | None:
        found = [book for book in self.ledger.all_books() if book.topic.name in topics and book.during is None]
        return rng.choice(found) if found else None

    def _node_of(self, book: Book) -> Nsqd:
        return next(node for node in self.nsqds if node.name == book.topic.node)

    def pause_channel(self, rng: random.Random) -> None:
        book = self._a_book(rng, "plain", "safe", "hard")
        if book is not None:
            node, starts, known = self._node_of(book), self._node_of(book).starts, book.unpauses.known

            def then(status: int) -> None:
                if status == 200 and node.is_still(starts) and known and book.unpauses.known == known:
                    book.paused_at = self.world.seconds
                    self.reached["paused"] += 1

            target = f"/channel/pause?topic={book.topic.name}&channel={book.name}"
            self._ask(node, "POST", target, b"", then)

    def unpause_channel(self, rng: random.Random) -> None:
        for book in self.ledger.all_books():
            if book.paused_at is not None:
                target = f"/channel/unpause?topic={book.topic.name}&channel={book.name}"
                self._ask(self._node_of(book), "POST", target, b"", book.unpause())

    def pause_topic(self, rng: random.Random) -> None:
        node, topic = self._node(rng), self._topic(rng)
        starts, book = node.starts, self.ledger.topic(node.name, topic)
        # A topic that is being deleted may be the one that is paused.
        known = 0 if book is None or self.world.seconds < node.deleted_until else book.unpauses.known
        generation = None if book is None else book.generation

        def then(status: int) -> None:
            if book is None or book.generation != generation or not known or book.unpauses.known != known:
                return
            if status == 200 and node.is_still(starts):
                book.paused_at = self.world.seconds
                self.reached["topic paused"] += 1

        self._ask(node, "POST", f"/topic/pause?topic={topic}", b"", then)

    def unpause_topic(self, rng: random.Random) -> None:
        for node in self.nsqds:
            for topic in (*TOPICS, LIVE):
                if rng.random() < 0.5:
                    book = self.ledger.topic(node.name, topic)
                    then = book.unpause() if book is not None else lambda status: None
                    self._ask(node, "POST", f"/topic/unpause?topic={topic}", b"", then)

    def _changing(self, book: Book, target: str, done: Callable[[bool], object]) -> None:
        """A request after which the channel holds something else; until its answer nobody knows what."""
        before = dict(book.topic.acked)

        def taken() -> None:
            """What was in flight is so no longer."""
            for consumer in self.consumers():
                if consumer.book is book:
                    consumer.held.clear()

        book.clear()
        taken()
        book.during = during = {}
        generation = book.generation
        node, starts = self._node_of(book), self._node_of(book).starts

        def then(status: int) -> None:
            if book.during is not during:
                return
            book.during = None
            book.changed_at = self.world.seconds
            book.clear()
            # What was sent before may still be on its way.
            taken()
            self.world.after(LATENCY, book.clear_seen)
            self.world.after(LATENCY, taken)
            certain = status == 200 and node.is_still(starts) and book.generation == generation + 1
            done(certain)
            # Files that are kept for nobody go when the disk is nearly full.
            if certain and target.startswith("/channel/seek") and not node.was_full:
                # A FIN that was sent before may come when the message is in flight again, to the same consumer.
                late = {
                    body for each in self.consumers() if each.book is book for body, _, _ in each._unconfirmed.values()
                }
                for body, at in before.items():
                    if body in book.topic.acked and body not in during and body not in late:
                        book.owed[body] = at

        self._ask(node, "POST", target, b"", then)

    def empty_channel(self, rng: random.Random) -> None:
        book = self._a_book(rng, "plain", "safe")
        if book is not None:
            target = f"/channel/empty?topic={book.topic.name}&channel={book.name}"
            self._changing(book, target, lambda good: self.reached.update({"emptied": good}))

    def empty_topic(self, rng: random.Random) -> None:
        book = self._a_book(rng, "plain")
        if book is not None:
            for each in book.topic.books.values():
                if each.during is not None:
                    return
            for each in list(book.topic.books.values()):
                self._changing(each, "/topic/empty?topic=plain", lambda good: None)

    def seek(self, rng: random.Random) -> None:
        """The topic's files are all kept: everything comes again."""
        book = self._a_book(rng, "kept")
        if book is not None:
            book.finished.clear()
            target = f"/channel/seek?topic=kept&channel={book.name}&to=earliest"
            self._changing(book, target, lambda good: self.reached.update({"seek done": good}))

    def delete_channel(self, rng: random.Random) -> None:
        book = self._a_book(rng, "plain", "safe")
        if book is not None:
            self.ledger.topics[book.topic.node, book.topic.name].books.pop(book.name)
            target = f"/channel/delete?topic={book.topic.name}&channel={book.name}"
            then = lambda status: self.reached.update({"channel deleted": status == 200})  # noqa: E731
            self._ask(self._node_of(book), "POST", target, b"", then)

    def delete_topic(self, rng: random.Random) -> None:
        node = self._node(rng)
        name = rng.choice(["plain", "safe"])
        topic = self.ledger.topic(node.name, name)
        if topic is not None:
            topic.generation += 1
            topic.books.clear()
            topic.acked.clear()
            topic.paused_at = None
            topic.durability = "unknown"
            node.deleted_until = float("inf")

            def then(status: int) -> None:
                self.reached["topic deleted"] += status == 200
                node.deleted_until = self.world.seconds + (LATENCY if status == 200 else 4)

            self._ask(node, "POST", f"/topic/delete?topic={name}", b"", then)

    def create_channel(self, rng: random.Random) -> None:
        node, name = self._node(rng), rng.choice(["plain", "safe"])
        topic = self.ledger.topic(node.name, name)
        self.numbers += 1
        channel, starts = f"c{self.numbers}", node.starts
        if topic is None:
            return
        generation = topic.generation

        def then(status: int) -> None:
            if status == 200 and node.is_still(starts) and topic.generation == generation:
                if topic.durability == "unknown":
                    topic.durability = node.durability
                self.ledger.open(node.name, name, channel, topic.durability)

        def script() -> Generator[Request, tuple[int, bytes], None]:
            status, _ = yield node, "POST", f"/topic/create?topic={name}", b""
            if status == 200:
                status, _ = yield node, "POST", f"/channel/create?topic={name}&channel={channel}", b""
                then(status)

        Talk(self, script())

    def change_settings(self, rng: random.Random) -> None:
        """Durability between os and fsync, and some that change nothing that is looked at."""
        node = self._node(rng)
        topic = self.ledger.topic(node.name, "plain")
        if rng.random() < 0.5 and topic is not None and topic.durability in ("os", "fsync"):
            wanted = rng.choice(["os", "fsync"])
            if wanted == "os":
                topic.durability = "os"

            def then(status: int) -> None:
                self.reached["settings changed"] += status == 200

            body = json.dumps({"durability": wanted}).encode()
            self._ask(node, "PUT", "/topic/config?topic=plain", body, then)
            return
        name, value = rng.choice([("mem-queue-size", 3), ("mem-queue-size", 1000), ("key-age", "1h"), ("max-bytes", 0)])
        self._ask(
            node,
            "PUT",
            f"/topic/config?topic={rng.choice(['plain', 'safe'])}",
            json.dumps({name: value}).encode(),
            lambda status: self.reached.update({"settings changed": status == 200}),
        )

    def redrive(self, rng: random.Random) -> None:
        """Dead letters go back to where they came from. In most cases some die first: there is something to do."""
        node = self._node(rng)
        delay = 0.0
        if rng.random() < 0.7:
            producer = self._producer(rng, node, "hard")
            for _ in range(rng.choice([2, 6, 12])):
                producer.publish("hard", [self._sent(rng, node, "hard")], batch=False)
            consumer = Consumer(self, node, "hard", "a", 50, fails=True)
            delay = rng.choice([0.1, 0.3])
            self.world.after(delay, consumer.close)
        self.world.after(delay, lambda: None if self.healed else self._begin_redrive(rng, node))

    def _begin_redrive(self, rng: random.Random, node: Nsqd) -> None:
        book = self.ledger.book(node.name, "hard", "a")
        if book is not None:
            # They come back under new ids, and their attempts start anew.
            book.topic.redriven = book.unsteady = True
        target = "/channel/redrive?topic=hard&channel=a&from=x"
        self._redriving(node, "POST", target + rng.choice(["", "&rate=5", "&rate=20", "&count=2"]))
        for seconds in (0.02, 0.3, 0.8, 1.6, 3.0):
            self.world.after(seconds, lambda: None if self.healed else self.ask_for_redrive(rng, node))

    def ask_for_redrive(self, rng: random.Random, node: Nsqd | None = None) -> None:
        """How far is it? Those that have gone back stay counted, over restarts too."""
        self._redriving(node or self._node(rng), "GET", "/channel/redrive?topic=hard&channel=a")

    def _redriving(self, node: Nsqd, method: str, target: str) -> None:
        topic, starts = self.ledger.topic(node.name, "hard"), node.starts

        def script() -> Generator[Request, tuple[int, bytes], None]:
            begun = topic.redrives_begun if topic is not None else 0
            status, data = yield node, method, target, b""
            if topic is not None and method == "POST":
                topic.redrives_begun += 1
            elif topic is not None and topic.redrives_begun != begun:
                # It may be about the one before.
                return
            if status == 200 and topic is not None and node.is_still(starts):
                moved = json.loads(data)["moved"]
                self.reached["redriven"] += moved > topic.redrive[0]
                self.ledger.redriven(topic, moved, new=method == "POST")

        if method == "POST" and topic is not None:
            # Whether a request without an answer was heard is not known, nor when.
            topic.redrive = (0, 0.0)
            topic.redrives_unheard += 1
        Talk(self, script())

    def read_log(self, rng: random.Random) -> None:
        """Read a log up to its end, and say so: from there on it is kept. Or leave, and let go what was kept.

        Some follow it for a while, as a query of Spark does.
        """
        node, name = self._node(rng), rng.choice(["plain", "safe", "safe", "kept"])
        begin, most = rng.choice(["earliest", "latest"]), rng.choice([1, 3_000, 1 << 20])
        leaves, follows = rng.random() < 0.2, rng.random() < 0.5
        self._read_once(node, name, begin, most, leaves=leaves)
        for seconds in (0.2, 0.5, 1.0, 2.0, 4.0) if follows and not leaves else ():
            self.world.after(seconds, lambda: None if self.healed else self._read_once(node, name, begin, most))

    def _read_once(self, node: Nsqd, name: str, begin: str, most: int, *, leaves: bool = False) -> None:
        topic = self.ledger.topic(node.name, name)
        if topic is not None and topic.durability in ("os", "fsync") and topic not in self._read:
            self._read.append(topic)
            Talk(self, self._reading(node, topic, begin, most, leaves=leaves))

    def _reading(
        self, node: Nsqd, topic: TopicBook, begin: str, most: int, *, leaves: bool = False
    ) -> Generator[Request, tuple[int, bytes], None]:
        try:
            yield from self._read_on(node, topic, begin, most, leaves=leaves)
        finally:
            self._read.remove(topic)

    def _read_on(
        self, node: Nsqd, topic: TopicBook, begin: str, most: int, *, leaves: bool
    ) -> Generator[Request, tuple[int, bytes], None]:
        name, reader, generation = topic.name, topic.reader, topic.generation
        status, data = yield node, "GET", f"/log/info?topic={name}", b""
        if status != 200:
            return
        epoch = json.loads(data)["epoch"]
        if reader is not None and reader.generation != topic.generation:
            reader = topic.reader = None
        position = f"/log/position?topic={name}&reader=r"
        if reader is None:
            since = self.world.seconds
            status, data = yield node, "POST", f"{position}&to={begin}", b""
            if status != 200 or topic.generation != generation:
                return
            # A node that is full, or whose date has changed, may give the position up.
            reader = topic.reader = LogReader(epoch, generation, since, json.loads(data)["offset"])
        while topic.generation == generation:
            target = f"/log/fetch?topic={name}&from={reader.at}&to=latest&epoch={reader.epoch}&max_bytes={most}"
            status, data = yield node, "GET", target, b""
            certain = topic.generation == generation and not node.was_full and not node.date_changed
            if status == 500 and b"DAMAGED" in data and node.name in self.ledger.powerless:
                # A file that was never synced may have lost its beginning with the power: it is passed over.
                reader.at = json.loads(data)["stop"]
                continue
            if status in (400, 409, 410, 500) and certain:
                self.world.violated(f"log: {node.name} {name} cannot be read on: {data[:160]!r}")
            if status != 200 or topic.generation != generation:
                return
            assert isinstance(data, Body)
            at = 0
            while at < len(data):
                size = int.from_bytes(data[at : at + 4], "big")
                id, body = data[at + 18 : at + 34], data[at + 34 : at + 4 + size]
                self.ledger.read(topic, reader, id, body)
                at += 4 + size
            self.reached["read from a log"] += 1
            if data.next_offset <= reader.at:
                break
            reader.at = data.next_offset
        if leaves:
            topic.reader = None
            yield node, "DELETE", position, b""
        else:
            yield node, "POST", f"{position}&to={reader.at}", b""

    def ask_for_stats(self, rng: random.Random) -> None:
        target = rng.choice(["/stats?format=json&include_mem=false", "/ping", "/info"])
        self._ask(self._node(rng), "GET", target, b"", lambda status: None)

    def flood(self, rng: random.Random) -> None:
        """A client that asks and does not read: the broker must stop reading, too."""
        client = Flooder(self, self._node(rng), rng.choice([1_000, 12_000, 12_000]))
        self.world.after(rng.choice([0.05, 0.5]), client.close)

    def unforeseen_error(self, rng: random.Random) -> None:
        """A defect that only one connection, or one lane, runs into: the others in its turn must not notice."""
        node = self._node(rng)
        if node.machine is not None:
            node.machine.unforeseen = rng.choice(list(DEFECTIVE))
            self._at = node
            for name in rng.choices(LOAD, k=3):
                getattr(self, name)(rng)
            self.publish_http(rng)
            self._at = None

    def stage(self, rng: random.Random) -> None:
        """A transaction of one or two nodes, until it is done or given up."""
        self.numbers += 1
        nodes = rng.sample(self.nsqds, min(len(self.nsqds), rng.choice([1, 2])))
        rows = {
            node: [[self._sent(rng, node, "staged") for _ in range(rng.choice([1, 3]))] for _ in range(2)]
            for node in nodes
        }
        for chunks in rows.values():
            for chunk in chunks:
                for sent in chunk:
                    sent.visible = False
                    self.ledger.publish(sent)
        Talk(self, self._transaction(f"q{self.numbers}", nodes, rows, rival=rng.random() < 0.25))

    def _transaction(
        self, producer: str, nodes: list[Nsqd], rows: dict[Nsqd, list[list[Sent]]], *, rival: bool
    ) -> Generator[Request, tuple[int, bytes], None]:
        """With a ``rival`` another run of the same producer begins before the decision: then there must be none."""
        home = nodes[0]

        def call(node: Nsqd, verb: str, **fields: Any) -> Request:
            return node, "POST", f"/stage/{verb}", json.dumps({"producer": producer, **fields}).encode()

        def insist(request: Request, tries: int = 60) -> Generator[Request, tuple[int, bytes], Any]:
            """The answer, asked for again while nobody answers; None if it is refused for good."""
            for _ in range(tries):
                status, data = yield request
                if status == 200:
                    return json.loads(data)
                if status not in (0, 503, 507):
                    return None
            return None

        opened = yield from insist(call(home, "open", run="r", job="j", txn=0))
        if opened is None:
            return
        epoch = opened["epoch"]
        sets: dict[str, str] = {}
        for node in nodes:
            if (yield from insist(call(node, "begin", epoch=epoch, txn=0, attempt="a", decided=None))) is None:
                return
            for number, chunk in enumerate(rows[node]):
                target = f"/stage/put?producer={producer}&epoch={epoch}&txn=0&attempt=a&chunk={number}&topic=staged"
                data = _records([sent.body for sent in chunk])
                if (yield from insist((node, "POST", target, data))) is None:
                    return
            count = sum(map(len, rows[node]))
            winners = [["a", len(rows[node]), count]]
            prepared = yield from insist(call(node, "prepare", epoch=epoch, txn=0, winners=winners))
            if prepared is None:
                return
            if prepared["topics"].get("staged", {}).get("count") != count:
                self.world.violated(f"staged: {node.name} has prepared {prepared['topics']}, not {count} rows")
            sets[f"{node.host}:4151"] = prepared["set"]
        if rival:
            other = yield from insist(call(home, "open", run="r2", job="j2", txn=0))
            if other is None:
                return
            if other["epoch"] <= epoch:
                self.world.violated(f"staged: {home.name} gives the epoch {other['epoch']} after {epoch}")
            late = yield from insist(call(home, "decide", epoch=epoch, txn=0, nodes=sets, print="p"))
            if late is not None:
                self.world.violated(f"staged: {home.name} lets a run decide that another one has superseded")
            self.reached["superseded run is fenced"] += 1
            return
        for chunks in rows.values():
            for chunk in chunks:
                for sent in chunk:
                    sent.visible = True
        decided = yield from insist(call(home, "decide", epoch=epoch, txn=0, nodes=sets, print="p"))
        if decided is None:
            self.world.violated(f"staged: {home.name} does not decide what all nodes have prepared")
            return
        for node in nodes:
            applied = yield from insist(call(node, "apply", txn=0, set=sets[f"{node.host}:4151"]))
            if applied is None:
                self.world.violated(f"staged: {node.name} does not apply what was decided")
                return
            for chunk in rows[node]:
                for sent in chunk:
                    sent.at = self.world.seconds
                    self.ledger.acknowledge(sent)
        yield from insist(call(home, "done", txn=0))
        self.reached["staged and committed"] += 1

    def back_up(self, rng: random.Random) -> None:
        """`flintmq backup` beside a running broker, and `flintmq restore` of it to another machine."""
        node = self._node(rng)
        machine = node.machine
        if machine is None or machine.dead or not node.up or self.copies:
            return
        self.numbers += 1
        tree = restored(machine.tree, lambda: machine.clock.wall() / 1e9, rng)
        copy = node.copy(f"copy{self.numbers}", "10.0.2.1", tree)
        # The copy counts delays by the date, which may have changed since they began: no promise for these.
        stepped = self.ledger.stepped.get(node.name, -1.0)
        late = {
            body
            for book in self.ledger.all_books()
            if book.topic.node == node.name
            for body in book.owed
            if (self.ledger.sent[body].delay and self.ledger.sent[body].at <= stepped)
            or book.not_before.get(body, (0.0, stepped + 1))[1] <= stepped
            or book.maybe_later.get(body, stepped + 1) <= stepped
        }
        owed = [
            _Owed(
                topic.name,
                book.name,
                dict.fromkeys(body for body in book.owed if body not in late),
                # It is of the moment at which the journal was copied, and that is written within milliseconds.
                {body: None for body, at in book.confirmed.items() if at < self.world.seconds - FORGOTTEN_BY_A_KILL},
            )
            for topic in self.ledger._of(node.name)
            for book in topic.books.values()
            # What is only in memory is in no backup, and a change that is under way may be in it or not. Dead letters
            # are owed in another topic.
            if book.owed and topic.durability in ("os", "fsync") and book.during is None and topic.name != "hard"
        ]
        self.copies = [(copy, owed)]
        copy.boot()
        self.reached["restored"] += 1

    def flip_a_bit(self, rng: random.Random) -> None:
        """A device that changes what it holds, under a copy of a node that has crashed just now.

        A journal whose middle is damaged is refused. Damage to one topic's messages costs no other topic any.
        """
        node = self._node(rng)
        machine = node.machine
        if machine is None or machine.dead or not node.up or self.copies:
            return
        tree = machine.tree.survivor(None, True)
        home = tree.entries["flintmq"].entries
        journal = max((name for name in home["journal"].entries if name.startswith("journal-")), default="")
        data = bytes(home["journal"].entries[journal].content.data) if journal else b""
        head = journal_module.read_head(data, Path(journal))
        stops = [stop for stop, _ in journal_module.read_batches(data, head[0])] if head is not None else []
        # Batches of which a later one says that they were on the device: others count as torn.
        starts = [journal_module.FILE_HEADER, *stops]
        known = [
            (start, stop)
            for start, stop in zip(starts[1:-2], stops[1:-1], strict=True)
            if head is not None and journal_module.synced_beyond(data, head[0], stop, stop)
        ]
        if not known:
            return
        at = rng.randrange(*rng.choice(known))
        home["journal"].entries[journal].content.data[at] ^= 1 << rng.randrange(8)
        self.numbers += 1
        copy = node.copy(f"copy{self.numbers}", "10.0.2.1", tree)
        copy.damaged = True
        self.copies = [(copy, [])]
        copy.boot()
        self.reached["bit flipped"] += 1

    def check_copies(self) -> None:
        """What a backup holds is delivered by its copy."""
        for copy, owed in self.copies:
            self.world.run(lambda copy=copy: copy.up or copy.retired, 20)  # type: ignore[misc]
            if copy.damaged and not copy.retired:
                self.world.violated(f"damaged: {copy.name} starts with a journal that has lost a batch in its middle")
            for each in owed:
                channel = f"topic={each.topic}&channel={each.channel}"
                for target in (f"/topic/unpause?topic={each.topic}", f"/channel/unpause?{channel}"):
                    self._ask(copy, "POST", target, b"", lambda status: None)
            self.world.run(lambda: not self.talks, 20)
            for each in owed:
                Reader(self, copy, each.topic, each.channel, each.wanted, each.finished)
            with contextlib.suppress(Stuck):
                self.world.run(lambda owed=owed: not any(each.wanted for each in owed), 5)  # type: ignore[misc]
            for each in owed:
                if each.wanted:
                    some, place = next(iter(each.wanted))[:60], f"{each.topic}/{each.channel}"
                    self.world.violated(f"backup: {len(each.wanted)} of {place} are not in it, as {some!r}")
            copy.retire()
        self.world.run_for(0.01)

    # --- The run -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for lookupd in self.lookupds:
            lookupd.boot()
        for node in self.nsqds:
            node.boot()
        self.world.run(lambda: all(node.up for node in [*self.lookupds, *self.nsqds]), 30)
        for node in self.nsqds:
            Talk(self, self._set_up(node))
        self.world.run(lambda: not self.talks, 30)
        # So that all of it is on the devices.
        self.world.run_for(3 * SYNC_TIMEOUT)

    def _set_up(self, node: Nsqd) -> Generator[Request, tuple[int, bytes], None]:
        settings: dict[str, dict[str, Any]] = {
            "safe": {"durability": "fsync"},
            "kept": {"durability": "fsync", "retain-bytes": 1 << 30},
            "brief": {"ttl": f"{TTL}s"},
            "hard.a.dead": {"durability": "fsync"},
            "staged": {"durability": "fsync"},
            "few": {"max-messages": FEW, "limit-policy": "drop-oldest"},
        }
        for topic, channels in TOPICS.items():
            yield node, "POST", f"/topic/create?topic={topic}", b""
            if topic in settings:
                status, answer = yield node, "PUT", f"/topic/config?topic={topic}", json.dumps(settings[topic]).encode()
                assert status == 200, answer
            for channel in channels:
                status, answer = yield node, "POST", f"/channel/create?topic={topic}&channel={channel}", b""
                assert status == 200, answer
                if topic != "brief":
                    self.ledger.open(
                        node.name, topic, channel, settings.get(topic, {}).get("durability", node.durability)
                    )
        body = json.dumps({"max-attempts": 2}).encode()
        status, answer = yield node, "PUT", "/channel/config?topic=hard&channel=a", body
        assert status == 200, answer
        hard = self.ledger.book(node.name, "hard", "a")
        assert hard is not None
        hard.max_attempts = 2
        brief = self.ledger.open(node.name, "brief", "a", node.durability).topic
        brief.ttl = TTL
        brief.books.clear()
        dead = self.ledger.topics[node.name, "hard.a.dead"]
        dead.dead_letters_of = hard
        # It is looked at for what it releases; its own messages are others' copies.
        dead.books.clear()

    def heal(self) -> None:
        """All faults are over."""
        self.healed = True
        for node in self.nsqds:
            node.capacity = node.crash_next = node.fault_next = None
            machine = node.machine
            if machine is not None:
                machine.heal()
                machine.most_files = machine.power_off_at = machine.calls_after = None
                machine.flaky = False
                machine.unforeseen = ""
                machine.sync_seconds, machine.work_seconds = node.sync_seconds, 0.001
        for lookupd in self.lookupds:
            lookupd.boot()
        for client in self.clients:
            if client.sock is not None:
                client.sock.link.half_open = False
            client.close()

    def finale(self) -> None:
        """Everything that is owed must come now."""
        world = self.world
        self.heal()
        # Brokers without descriptors accept again after a second; requests that wait until then are done then.
        world.run_for(1.3)
        self.check()
        world.run(lambda: all(node.up and not node.stopping for node in self.nsqds), 60)
        for node in self.nsqds:
            for topic in (*TOPICS, LIVE):
                found = self.ledger.topic(node.name, topic)
                then = found.unpause() if found is not None else lambda status: None
                self._ask(node, "POST", f"/topic/unpause?topic={topic}", b"", then)
        for book in self.ledger.all_books():
            target = f"/channel/unpause?topic={book.topic.name}&channel={book.name}"
            self._ask(self._node_of(book), "POST", target, b"", book.unpause())
        world.run(lambda: not self.talks, 300)
        last = [
            *((self._node_of(book), book.topic.name, book.name) for book in self.ledger.all_books()),
            *((node, "hard.a.dead", "x") for node in self.nsqds),
        ]
        self.progress = world.now

        def consume(node: Nsqd, topic: str, channel: str, consumer: Consumer | None = None) -> None:
            """There is always one; a barrier may cost it its connection while the disk is still called full."""
            if not self.settled:
                if consumer is None or consumer.over:
                    consumer = Consumer(self, node, topic, channel, 300, auto=0.0001)
                world.after(1.0, lambda: consume(node, topic, channel, consumer))

        for each in last:
            consume(*each)

        def settled() -> bool:
            if not any(book.owed for book in self.ledger.all_books()):
                return True
            # What a dead-letter topic refuses is requeued for a minute.
            hard = any(book.owed for book in self.ledger.all_books() if book.topic.name == "hard")
            return world.now - self.progress > (PATIENCE + 62 * hard) * SECOND

        world.run(settled)
        # The rest of a batch is not owed where the power may have taken all of it. It may be in flight to a client that
        # is gone, and a dead-letter topic may refuse it for a minute.
        deadline = world.now + 70 * SECOND
        world.run(lambda: world.now > deadline or next(self.ledger.parts_of_batches(), None) is None)
        self.settled = True
        self.check()
        for book in self.ledger.all_books():
            if book.owed:
                some = next(iter(book.owed))
                at = book.owed[some]
                world.violated(
                    f"lost: {len(book.owed)} of {book.topic.node} {book.topic.name}/{book.name} "
                    f"({book.topic.durability}), for example {some[:60]!r}, acknowledged at {at - 1000:.3f} s"
                )
        self.check_copies()
        if world.violations:
            return
        self._probe()
        self._read_logs()
        self.ledger.check_batches()
        self._check_memory()
        self._check_limits()
        self._check_files()
        if world.violations:
            return
        # What was finished stays so over a clean stop.
        for consumer in self.consumers():
            consumer.finish(list(consumer.held))
            consumer.barrier()
        world.run_for(0.05)
        for client in list(self.clients):
            client.close()
        world.run_for(0.05)
        for node in self.nsqds:
            # All clients have gone.
            self._check_descriptors(node, 0)
        starts = [node.starts for node in self.nsqds]
        for node in self.nsqds:
            node.stop()
        world.run(
            lambda: all(node.starts > before and node.up for node, before in zip(self.nsqds, starts, strict=True)), 60
        )
        for node, topic, channel in last:
            Consumer(self, node, topic, channel, 300, auto=0.0001)
        world.run_for(0.1)
        self.over = True

    def _probe(self) -> None:
        """Nothing is wrong any more: every topic takes a message, and delivers it, also one with a time to live."""
        world = self.world
        wanted: list[Sent] = []
        for node in self.nsqds:
            Consumer(self, node, "brief", "a", 300, auto=0.0001)
        world.run_for(0.05)
        for node in self.nsqds:
            for name in TOPICS:
                topic = self.ledger.topic(node.name, name)
                if name != "few" and (topic is None or name == "hard.a.dead" or (name != "brief" and not topic.books)):
                    continue
                sent = Sent(self.body(random.Random(0), node, name), node.name, name, world.seconds)
                Producer(self, node).publish(name, [sent], batch=False)
                wanted.append(sent)
        # Nobody listens there.
        probes = {sent.body for sent in wanted if sent.topic != "few"}
        with contextlib.suppress(Stuck):
            world.run(lambda: probes <= self.ledger.came and all(s.acknowledged is not None for s in wanted), TTL)
        for sent in wanted:
            if sent.acknowledged is None:
                world.violated(f"stopped: {sent.node} {sent.topic} does not answer a publish when all is well again")
            elif sent.body in probes and sent.body not in self.ledger.came:
                world.violated(f"stopped: {sent.node} {sent.topic} does not deliver a message when all is well again")

    def _read_logs(self) -> None:
        """Whoever reads a log comes to its end, and whoever asks about a redrive has an answer."""
        self.world.run_for(2 * SYNC_TIMEOUT)
        for node in self.nsqds:
            self._redriving(node, "GET", "/channel/redrive?topic=hard&channel=a")
            for topic in self.ledger._of(node.name):
                if topic.reader is not None and topic not in self._read and topic.durability in ("os", "fsync"):
                    if node.was_full or node.date_changed:
                        topic.reader = None
                        continue
                    self._read.append(topic)
                    Talk(self, self._reading(node, topic, "earliest", 1 << 20))
        self.world.run(lambda: not self.talks, 60)
        self.ledger.check_logs()

    def _check_limits(self) -> None:
        """The oldest messages of a topic have made room, however often it was published to and the node was killed."""
        for node in self.nsqds:
            topic = node.broker.topics.get("few") if node.broker is not None else None
            if topic is None or topic.limits is None:
                continue
            self.reached["dropped at a limit"] += topic.dropped_count > 0
            waiting = topic.depth + max((channel.depth for channel in topic.channels.values()), default=0)
            if waiting > FEW:
                self.world.violated(f"limit: {node.name} {topic.name} holds {waiting} messages")

    def _check_memory(self) -> None:
        """Beyond its limit, met to within a block, a topic holds the block that it fills, and what it was lent.

        And the blocks of messages that an ephemeral channel has, which are nowhere else: its consumer may be gone
        without a word, and the broker learns that by its heartbeats, later than this.
        """
        for node in self.nsqds:
            for topic in node.broker.topics.values() if node.broker is not None else ():
                log = topic.log
                pinned = [each.block for each in log.memory.pinned]
                ephemeral = [block for block in pinned if topic._pins(block.base, block.base + block.count)]
                held = log.memory_count - sum(block.count for block in (*log.blocks[-2:], *ephemeral))
                if held > topic.settings.mem_queue_size and not log._lent and not topic.ephemeral:
                    self.world.violated(
                        f"memory: {node.name} {topic.name} holds {held} messages beside its last blocks"
                    )

    def _check_blocks(self, node: Nsqd) -> None:
        """Beyond its limit a topic holds no block of messages that nobody needs, or not for long."""
        assert node.broker is not None
        now, idle = self.world.seconds, self._idle_blocks
        for topic in node.broker.topics.values():
            log = topic.log
            if log.memory_count <= topic.settings.mem_queue_size or len(log.blocks) < 3 or log._lent or log.in_group:
                continue
            for block in log.blocks[:-2]:
                key = (node.name, node.starts, f"{topic.name} {topic.incarnation}", block.base)
                stop = block.base + block.count
                # Not what waits for a slow disk, or to be written.
                waits = not topic.ephemeral and (now < node.unsound_until or stop > log.written)
                if waits or topic.needs(block.base, stop):
                    idle.pop(key, None)
                elif now - idle.setdefault(key, now) > IDLE:
                    self.world.violated(
                        f"memory: {node.name} {topic.name} holds {block.count} messages for {IDLE} s that nobody needs"
                    )

    def _unneeded_files(self) -> dict[str, str]:
        return {
            str(segment.path): f"{node.name} {topic.name}"
            for node in self.nsqds
            for topic in (node.broker.topics.values() if node.broker is not None else ())
            if not topic.ephemeral
            for segment, following in pairwise(topic.log.segments)
            # One before a gap stays for a reader that stands in it.
            if segment.end <= topic.first_kept() and (following.base <= topic.first_kept() or not topic.readers)
            if not segment.pins
        }

    def _check_files(self) -> None:
        """Files that nobody needs are deleted, as soon as a sync or two have said so."""
        before = self._unneeded_files()
        if before:
            self.world.run_for(4 * SYNC_TIMEOUT)
            for path, where in self._unneeded_files().items():
                if path in before:
                    self.world.violated(f"files: {where} keeps {path}, which nobody needs")

    def _check_descriptors(self, node: Nsqd, connections: int) -> None:
        """The store has no more files of messages open than it may and are in use; and there is little else."""
        machine, broker = node.machine, node.broker
        if machine is None or broker is None:
            return
        assert isinstance(broker.disk, Workers)
        files = broker.store._files
        used = sum(segment.pins > 0 for segment in files)
        if len(files) > broker.store._most_files + used:
            self.world.violated(f"descriptors: {node.name} has {len(files)} files of messages open, and uses {used}")
        others = len(machine._open) - connections - len(files) - broker.disk.closes
        if others > MOST_FILES:
            self.world.violated(f"descriptors: {node.name} has {others} open beside its connections and messages")

    def check(self) -> None:
        """What must hold after every step."""
        for node in self.nsqds:
            machine, broker = node.machine, node.broker
            if machine is None or machine.dead or broker is None or not node.up:
                continue
            self._check_descriptors(node, len(broker.sessions))
            if machine.most_tries > MOST_TRIES:
                self.world.violated(
                    f"tries: {node.name} has tried to make a file {machine.most_tries} times in a second"
                )
            self._check_blocks(node)
            self.inside.look(node)
            for session in broker.sessions.values():
                unread = session._transport.get_write_buffer_size()
                if unread > MOST_UNREAD:
                    self.world.violated(f"unread: {node.name} holds {unread} bytes for a client that does not read")

    def go(self) -> None:
        self.start()
        for step in self.script:
            rng = random.Random(f"{self.seed}/{step.id}")
            self.say(step.do)
            self.reached[step.do] += 1
            getattr(self, step.do)(rng)
            self.world.run_for(step.wait)
            self.check()
            if self.world.violations:
                return
        self.finale()
        for node in self.nsqds:
            if node.machine is not None:
                self.reached.update(node.machine.reached)
                self.reached["written by the kernel"] += node.machine.kernel_writes
        self.reached["redelivered"] += self.ledger.redelivered
        self.reached["dead letter"] += self.ledger.dead_letters
        self.reached["attempts compared"] += self.ledger.checked_attempts
        self.reached["early deliveries looked for"] += self.ledger.checked_early
        self.reached["timed out"] += self.ledger.timed_out
        self.reached["attempts compared over a crash"] += self.ledger.attempts_after_a_crash
        self.reached["whole batches looked for"] += self.ledger.checked_batches
        self.reached["delay over a reboot and a clock step"] += len(self.ledger.loose)
        if self.most_calls > MOST_CALLS:
            self.world.violated(f"turn: one turn of a loop made {self.most_calls} system calls")


def restored(tree: Any, wall: Callable[[], float], rng: random.Random) -> Any:
    """The files of a node after they went through a backup and were restored."""
    chance, dates = (
        SimpleNamespace(token_hex=lambda size: rng.randbytes(size).hex()),
        SimpleNamespace(time=wall, time_ns=lambda: round(wall() * 1e9)),
    )
    with tempfile.TemporaryDirectory(prefix="flintmq-simulation-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        # It is a program of its own, with the system's own calls; only its date and its dice are the simulation's.
        patch.setattr(backup, "time", dates)
        patch.setattr(backup, "secrets", chance)
        tree.write_to(folder / "data")
        backup.make(folder / "data", folder / "backup")
        backup.restore(folder / "backup", folder / "again")
        return type(tree).read_from(folder / "again")


class Unforeseen(Exception):
    """What a defect raises."""


#: Methods that serve one connection, or those of one lane.
DEFECTIVE: dict[str, tuple[type, str]] = {
    "a lane of publishers": (PublishLane, "_take_in"),
    "a connection": (Session, "buffer_updated"),
    "an HTTP connection": (HttpConnection, "buffer_updated"),
}


def _make_defective(patch: pytest.MonkeyPatch, run: Run) -> None:
    for what, (owner, name) in DEFECTIVE.items():
        found = getattr(owner, name)

        def method(self: Any, *args: Any, what: str = what, real: Any = found) -> Any:
            machine = getattr(asyncio._get_running_loop(), "machine", None)
            if machine is not None and machine.unforeseen == what:
                machine.unforeseen = ""
                run.reached["unforeseen error"] += 1
                raise Unforeseen(what)
            return real(self, *args)

        patch.setattr(owner, name, method)


class _Errors(logging.Handler):
    """An exception that a broker caught and logged is none that it expected."""

    def __init__(self, run: Run) -> None:
        super().__init__(logging.WARNING)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        machine = getattr(asyncio._get_running_loop(), "machine", None)
        # A thread does not say whose it is: there any death excuses it.
        machines = [node.machine for node in self._run.nsqds] if machine is None else [machine]
        dying = any(each is not None and each.dead for each in machines)
        if error is not None and not dying and not isinstance(error, Unforeseen):
            self._run.world.violated(f"logged: {record.getMessage()}: {error!r}")


def _limits(patch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Limits of megabytes and of hundreds of files, so small that they are reached; some of them together."""
    scarce = rng.random() < 0.2
    # Snapshots are taken in every state.
    roll = rng.choice([700, 1_500, 3_000, 6_000])
    patch.setattr(journal_module, "ROLL_AT", roll)
    patch.setattr(journal_module, "_SPACE", 2 * roll)
    if rng.random() < 0.5:
        # Many blocks in memory, and a few messages in each.
        patch.setattr(log_module, "SMALLEST_BLOCK", rng.choice([300, 1_000]))
        patch.setattr(log_module, "LARGEST_BLOCK", rng.choice([1_500, 5_000]))
        patch.setattr(log_module, "TAKE_ROOM", 700)
    if rng.random() < 0.8:
        # The kernel writes by itself only where a file has room for twice as much.
        patch.setattr(log_module, "TAKE_AT_ONCE", rng.choice([300, 1_000, 4_000]))
    if rng.random() < 0.5:
        # It makes several writes of what it finds at once.
        patch.setattr(log_module, "WRITE_AT", 300)
    if rng.random() < 0.7:
        # Old messages are copied out of files that are kept for them alone.
        patch.setattr(mover_module, "LOOK_AGAIN", SECOND // 5)
        patch.setattr(mover_module, "FEW", rng.choice([1, 2, 4]))
    if scarce or rng.random() < 0.3:
        patch.setattr(log_module, "WRITE_IN_THREAD_AT", 0 if scarce else rng.choice([0, 5_000, 40_000]))
    if rng.random() < 0.3:
        total = rng.choice([10_000, 60_000])
        patch.setattr(store_module, "SYNC_TOTAL_AT", total)
        patch.setattr(syncer_module, "SYNC_TOTAL_AT", total)
        patch.setattr(store_module, "SYNC_TOTAL_LEAVES", total // 3)
        patch.setattr(store_module, "PAUSE_AT", rng.choice([2, 5]) * total)
    if rng.random() < 0.5:
        # Batches of a few messages are appended, and larger records written, in several pieces.
        for module in [module for name, module in sys.modules.items() if name.startswith("flintmq.broker")]:
            for limit, value in (("SLICED_FROM", 6), ("SLICE", 3), ("RECORD_BYTES", 3_000)):
                if isinstance(getattr(module, limit, None), int):
                    patch.setattr(module, limit, value)
    files = MOST_SEGMENTS
    if scarce or rng.random() < 0.5:
        files = 2 if scarce else rng.choice([2, 3, 6])
    # Not what the system allows this process: the same seed makes the same calls on every machine.
    for module in (store_module, sockets_module, lookup_module):
        patch.setattr(module, "shares_of_descriptors", lambda: (files, MOST_CONNECTIONS))


@contextlib.contextmanager
def _surroundings(run: Run) -> Iterator[None]:
    """Chance, garbage and journals as a simulation wants them."""
    state, patch = random.getstate(), pytest.MonkeyPatch()
    before = kernel.replace_calls(None)
    logger, handler = logging.getLogger("flintmq"), _Errors(run)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    random.seed(run.seed)
    made_durable, reached = log_module.Log.made_durable, journal_module.Journal._reached

    def looked_at(log: log_module.Log, seq: int) -> None:
        run.inside.made_durable(log, seq)
        made_durable(log, seq)

    def journal_looked_at(journal: journal_module.Journal, mark: int) -> None:
        run.inside.reached(journal, mark)
        reached(journal, mark)

    patch.setattr(log_module.Log, "made_durable", looked_at)
    patch.setattr(journal_module.Journal, "_reached", journal_looked_at)
    _make_defective(patch, run)
    _limits(patch, random.Random(f"limits {run.seed}"))
    patch.setattr(syncer_module, "FILES_AT_ONCE", random.Random(f"files {run.seed}").choice([1, 1, 2, 3, 32]))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        for machine, loop, _ in run.graves:
            if machine is not None:
                machine.dead = True
                loop.set_exception_handler(lambda loop, context: None)
        run.graves.clear()
        run.world.processes.clear()
        patch.undo()
        random.setstate(state)
        kernel.replace_calls(before)


@contextlib.contextmanager
def _without_destructors() -> Iterator[None]:
    """Nothing is collected in the middle; what dead processes leave is collected at the end, and has nothing to say."""
    asyncio_logger = logging.getLogger("asyncio")
    hook, silent = sys.unraisablehook, logging.root.manager.disable
    was_enabled = gc.isenabled()
    asyncio_logger.disabled = True
    gc.disable()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            sys.unraisablehook = lambda unraisable: None
            logging.disable()
            gc.collect()
            # A destructor may bring something back, once.
            gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
        asyncio_logger.disabled = False
        sys.unraisablehook = hook
        logging.disable(silent)


def run_script(seed: int, script: list[Step]) -> Outcome:
    """Run these steps."""
    with _without_destructors():
        outcome = _run_script(seed, script)
    return outcome


def _run_script(seed: int, script: list[Step]) -> Outcome:
    run = Run(seed, script)
    with _surroundings(run):
        try:
            run.go()
        except Stuck as exc:
            run.world.violated(f"stuck: {exc}")
        except Busy as exc:
            run.world.violated(f"busy: {exc}")
        failures = list(run.world.violations)
    return Outcome(seed, failures, run.world.trace.hexdigest(), run.reached, script)


def run_seed(seed: int, steps: int = 200) -> Outcome:
    return run_script(seed, script_of(seed, steps))


def shrink(outcome: Outcome, seconds: float = 90.0) -> Outcome:
    """A shorter script with a violation of the same kind; the shortest that was found in the time."""
    best = outcome
    end = time.monotonic() + seconds
    size = max(1, len(best.script) // 2)
    while time.monotonic() < end:
        found = False
        for start in range(len(best.script) - size, -size, -size):
            script = best.script[: max(0, start)] + best.script[max(0, start) + size :]
            attempt = run_script(best.seed, script)
            if attempt.kind == best.kind:
                best, found = attempt, True
            if time.monotonic() > end:
                break
        if not found:
            if size == 1:
                break
            size = max(1, size // 2)
    return best
