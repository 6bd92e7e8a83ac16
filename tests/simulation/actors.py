"""Clients of simulated brokers: plain callbacks on simulated sockets, which tell the Ledger what they know.

They misbehave: they pipeline, repeat, answer for others, stop reading, leave in the middle of everything. None of them
waits: each does what it is told when it is told, and notes the answers when they come.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .ledger import LATENCY, Sent
from .network import Socket

if TYPE_CHECKING:
    from .brokers import Run
    from .cluster import Nsqd

__all__ = ["Body", "Consumer", "Flooder", "Http", "Producer", "Reader", "Talk"]

RESPONSE, ERROR, MESSAGE = 0, 1, 2
BARRIER = b"PUB barrier#ephemeral\n\x00\x00\x00\x01."


class _Client:
    """A connection to a node, if it could be made. ``over`` once it has ended."""

    def __init__(self, run: Run, node: Nsqd, address: tuple[str, int], *, window: int = 0) -> None:
        self.run = run
        self.node = node
        #: The process at the other end.
        self.process = node.machine
        self.over = False
        #: The network has done something to it: what it sees may be old.
        self.disturbed = False
        self.buffer = bytearray()
        self.sock: Socket | None = None
        try:
            self.sock = run.network.connect(address, "10.0.9.9")
        except OSError:
            self.over = True
            return
        self.sock.link.fragments = 0.15
        if window:
            self.sock.link.window = window
        self.sock.on_data = self._data
        run.clients.append(self)

    def send(self, data: bytes) -> bool:
        """Send all of it, or give up."""
        if self.over or self.sock is None:
            return False
        try:
            if self.sock.send(data) < len(data):
                self.close()
                return False
        except OSError:
            self.close()
            return False
        return True

    def _data(self, sock: Socket) -> None:
        if self.over:
            return
        if sock.inbox:
            size = len(sock.inbox)
            self.buffer += sock.recv(size)
            self.received()
        elif sock.eof or sock.error:
            self.close()
        if not self.over and (sock.eof or sock.error) and not sock.inbox:
            self.close()

    @property
    def last_words(self) -> str:
        """How the process has died whose answer arrives now; empty if it has not."""
        if self.process is None or not self.process.dead:
            return ""
        return self.process.death or self.node.death

    def received(self) -> None: ...

    def ended(self) -> None: ...

    def close(self) -> None:
        if not self.over:
            self.over = True
            if self.sock is not None:
                self.sock.close()
            self.ended()


class _Nsq(_Client):
    """One that speaks NSQ's protocol."""

    def received(self) -> None:
        while not self.over and len(self.buffer) >= 8:
            size, kind = struct.unpack_from(">II", self.buffer)
            if len(self.buffer) < 4 + size:
                return
            data = bytes(self.buffer[8 : 4 + size])
            del self.buffer[: 4 + size]
            if kind == RESPONSE and data == b"_heartbeat_":
                self.send(b"NOP\n")
            else:
                self.frame(kind, data)

    def frame(self, kind: int, data: bytes) -> None: ...


class Producer(_Nsq):
    """Publishes over TCP, one command after the other or several at once."""

    def __init__(self, run: Run, node: Nsqd, *, keys: bool = False) -> None:
        super().__init__(run, node, (node.host, 4150))
        self.waiting: deque[list[Sent]] = deque()
        #: Called once, when the next answer comes.
        self.then: Callable[[], object] | None = None
        if self.send(b"  V2") and keys:
            body = json.dumps({"flintmq": True}).encode()
            self.send(b"IDENTIFY\n" + struct.pack(">I", len(body)) + body)
            self.waiting.append([])

    def publish(self, topic: str, sents: list[Sent], *, batch: bool) -> None:
        name = topic.encode()
        first = sents[0]
        key = f" {first.key}".encode() if first.key else b""
        if batch:
            data = _records([sent.body for sent in sents])
            command = b"MPUB %b%b\n" % (name, key) + struct.pack(">I", len(data)) + data
        elif first.delay:
            command = b"DPUB %b %d%b\n" % (name, round(first.delay * 1000), key)
            command += struct.pack(">I", len(first.body)) + first.body
        else:
            command = b"PUB %b%b\n" % (name, key) + struct.pack(">I", len(first.body)) + first.body
        for sent in sents:
            sent.batch = sents
            self.run.ledger.publish(sent)
        self.waiting.append(sents)
        self.send(command)

    def frame(self, kind: int, data: bytes) -> None:
        if not self.waiting:
            self.run.world.violated(f"{self.node.name} answers a publisher who asked nothing: {data[:80]!r}")
            return
        sents = self.waiting.popleft()
        if kind == RESPONSE:
            for sent in sents:
                self.run.ledger.acknowledge(sent, self.last_words)
            self.run.reached["acknowledged"] += len(sents)
        else:
            self.run.reached["refused over TCP"] += 1
            self.run.refused(self.node, data, self.last_words)
            for sent in sents:
                self.run.ledger.refuse(sent)
        then, self.then = self.then, None
        if then is not None and not self.over:
            then()

    def ended(self) -> None:
        if self.waiting:
            self.run.reached["publish without an answer"] += 1


class Consumer(_Nsq):
    """Subscribes to a channel. ``auto`` finishes what it gets by itself; others wait to be told."""

    def __init__(
        self,
        run: Run,
        node: Nsqd,
        topic: str,
        channel: str,
        ready: int,
        *,
        auto: float | None = None,
        timeout: float = 0.0,
        sample: int = 0,
        window: int = 0,
        heartbeat: int = 1000,
        fails: bool = False,
    ) -> None:
        super().__init__(run, node, (node.host, 4150), window=window)
        self.topic = topic
        self.channel = channel
        self.auto = auto
        #: It requeues what it gets, at once.
        self.fails = fails
        self.timeout = timeout or node.msg_timeout
        self.sampled = bool(sample)
        self.held: dict[bytes, tuple[bytes, float]] = {}
        self.ready = [(run.world.seconds, ready)]
        self.subscribed = False
        #: Answers that are still due: to IDENTIFY, SUB and barriers.
        self._due: deque[str] = deque()
        #: Body, generation of the Book, and whether the FIN was sent in time.
        self._unconfirmed: dict[bytes, tuple[bytes, int, bool]] = {}
        #: What was requeued for later or touched, and when.
        self._last_wishes: dict[bytes, float] = {}
        self._asked: dict[bytes, tuple[bytes, int, bool]] = {}
        #: It has said CLS; the second time is an error that ends the connection.
        self.leaving = 0
        self.received_count = 0
        #: What it has asked about although another one may hold it, and when.
        self.meddled: dict[bytes, float] = {}
        wishes: dict[str, Any] = {"heartbeat_interval": heartbeat, "client_id": f"c{len(run.clients)}"}
        if timeout:
            wishes["msg_timeout"] = round(timeout * 1000)
        if sample:
            wishes["sample_rate"] = sample
        body = json.dumps(wishes).encode()
        self._due.extend(("identify", "sub"))
        self.send(b"  V2IDENTIFY\n" + struct.pack(">I", len(body)) + body)
        self.send(f"SUB {topic} {channel}\nRDY {ready}\n".encode())

    @property
    def book(self) -> Any:
        return None if self.sampled else self.run.ledger.book(self.node.name, self.topic, self.channel)

    @property
    def gave_back(self) -> bool:
        """What it holds may be requeued before its timeout: the broker knows that the connection has ended."""
        peer = None if self.sock is None else self.sock.peer
        # It ends it by itself after an error: of a second CLS, or of a barrier that a draining or full node refuses.
        ended = self.over or self.leaving > 1 or peer is None or peer.closed or peer._shut
        return ended and bool(self.node.options["requeue_on_disconnect"])

    def frame(self, kind: int, data: bytes) -> None:
        if kind == MESSAGE:
            self._message(data)
        elif kind == ERROR:
            self.run.reached["error of a consumer"] += 1
            words = data.split()
            if data.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")):
                for id in list(self._unconfirmed):
                    if id in words:
                        self._fin_failed(*self._unconfirmed.pop(id))
            elif self._due:
                self._due.popleft()
        elif data == b"CLOSE_WAIT":
            self.run.reached["CLS"] += 1
        elif self._due:
            what = self._due.popleft()
            if what == "sub":
                self.subscribed = True
            elif what == "barrier":
                self._confirm()

    def _fin_failed(self, body: bytes, generation: int, in_time: bool) -> None:
        book = self.book
        if in_time and not self.disturbed and book is not None and book.generation == generation:
            self.run.world.violated(
                f"FIN: {self.node.name} {self.topic}/{self.channel} refuses the FIN of what is in flight: {body[:60]!r}"
            )

    def _message(self, data: bytes) -> None:
        world = self.run.world
        _, attempts, id = struct.unpack_from(">qH16s", data)
        body = data[26:]
        self.received_count += 1
        self.run.progress = world.now
        self.run.ledger.delivered(
            self.node.name, self.topic, "" if self.sampled else self.channel, self, id, body, attempts
        )
        if self.disturbed:
            # Who knows how old it is? It is left to time out.
            return
        now = world.seconds
        if now < self.meddled.get(id, -LATENCY) + LATENCY:
            # The other one may have let go of it first: then the question was asked by its owner, and granted.
            if self.book is not None:
                self.book.owed.pop(body, None)
                self.book.held.pop(body, None)
            return
        # Certainly in flight: not answered, and the broker cannot have given up on it yet.
        self.held = {
            each: (of, at) for each, (of, at) in self.held.items() if now - at < self.timeout - LATENCY and each != id
        }
        self.held[id] = (body, now)
        recent = [count for at, count in self.ready if at > now - 3 * LATENCY]
        allowed = max([*recent, self.ready[-1 - len(recent)][1] if len(recent) < len(self.ready) else 0])
        book = self.book
        changing = book is not None and (book.during is not None or now < book.changed_at + LATENCY)
        if len(self.held) > allowed and not changing:
            world.violated(
                f"RDY: {self.node.name} {self.topic}/{self.channel} has {len(self.held)} in flight, RDY {allowed}"
            )
        if self.auto is not None:
            world.after(self.auto * world.rng.random(), lambda: self.finish([id]))
        elif self.fails:
            world.after(0.001 * world.rng.random(), lambda: self.requeue(id, 0.0))

    # --- What it is told to do ---------------------------------------------------------------------------------------

    def finish(self, ids: list[bytes], *, barrier: bool = False) -> None:
        ids = [id for id in ids if id in self.held]
        if self.over or not ids:
            return
        book = self.book
        generation = -1 if book is None else book.generation
        lines = []
        for id in ids:
            body, at = self.held.pop(id)
            lines.append(b"FIN %b\n" % id)
            if book is not None:
                book.release(body)
                # Not what came while the channel was emptied, or sent elsewhere: it may have been on its way then.
                is_certain = book.during is None and at > book.changed_at + LATENCY
                in_time = is_certain and self.run.world.seconds - at < self.timeout - LATENCY
                self._unconfirmed[id] = (body, generation, in_time)
        if not self.send(b"".join(lines)):
            self._unconfirmed.clear()
        elif barrier or self.run.world.rng.random() < 0.1:
            self.barrier()

    def barrier(self) -> None:
        """Ask for something that is answered: what was sent before has been done then."""
        if not self.over and self.subscribed and "barrier" not in self._due:
            self._due.append("barrier")
            self._asked = dict(self._unconfirmed)
            self.send(BARRIER)

    def _confirm(self) -> None:
        book = self.book
        if self.last_words:
            # It may have died before it could write this down.
            return
        for id, (body, generation, _) in self._asked.items():
            if self._unconfirmed.pop(id, None) is not None and book is not None and book.generation == generation:
                book.confirmed[body] = self.run.world.seconds
                self.run.reached["FIN confirmed"] += 1

    def requeue(self, id: bytes, seconds: float) -> None:
        if self.over or id not in self.held:
            return
        body, at = self.held.pop(id)
        if self.run.world.seconds - at >= self.timeout - LATENCY:
            # Too late, unless it is on its way to this one again.
            self.meddled[id] = self.run.world.seconds
        book = self.book
        if book is not None:
            book.held.pop(body, None)
        # Else it may have timed out, or its process is gone.
        if book is not None and not self.last_words and self.run.world.seconds - at < self.timeout - LATENCY:
            if self.disturbed:
                # It may never arrive, or after the timeout.
                book.maybe_later[body] = self.run.world.seconds
            else:
                book.requeue(body, self.run.world.seconds, seconds, self)
                self._last_wishes[body] = self.run.world.seconds
        self.send(b"REQ %b %d\n" % (id, round(seconds * 1000)))

    def touch(self, id: bytes) -> None:
        book, now = self.book, self.run.world.seconds
        body, at = self.held[id]
        if book is not None and body in book.held and book.held[body].consumer is self:
            if now - at < self.timeout - LATENCY:
                # It arrives in time: the timeout begins anew.
                book.held[body].at = now
                self._last_wishes[body] = now
        self.send(b"TOUCH %b\n" % id)

    def change_ready(self, count: int) -> None:
        self.ready.append((self.run.world.seconds, count))
        self.send(b"RDY %d\n" % count)

    def leave(self) -> None:
        self.leaving += 1
        self.send(b"CLS\n")

    def doubt_last_wishes(self) -> None:
        """What was on its way to the broker just now may not have been heard."""
        book = self.book
        for body, at in self._last_wishes.items():
            if book is not None and at > self.run.world.seconds - LATENCY:
                if book.not_before.pop(body, None) is not None:
                    book.maybe_later[body] = at
                book.held.pop(body, None)

    def ended(self) -> None:
        book = self.book
        if book is not None:
            # What was on its way to it counts as an attempt, and nobody has seen it.
            book.shaken += 1
            self.doubt_last_wishes()
        self.held.clear()
        self._unconfirmed.clear()


class Reader(_Nsq):
    """Takes and finishes everything of a channel, whoever published it."""

    def __init__(
        self, run: Run, node: Nsqd, topic: str, channel: str, wanted: dict[bytes, None], over: dict[bytes, None]
    ) -> None:
        super().__init__(run, node, (node.host, 4150))
        self.wanted = wanted
        #: What must not come.
        self.done_with = over
        self.send(f"  V2SUB {topic} {channel}\nRDY 100\n".encode())

    def frame(self, kind: int, data: bytes) -> None:
        if kind == MESSAGE:
            self.wanted.pop(data[26:], None)
            if data[26:] not in self.run.ledger.sent:
                self.run.world.violated(f"invented: {self.node.name} delivers {data[26:86]!r}")
            if data[26:] in self.done_with:
                self.run.world.violated(f"backup: {self.node.name} delivers what was finished: {data[26:86]!r}")
            self.send(b"FIN %b\n" % data[10:26])


class Flooder(_Nsq):
    """Asks for thousands of answers and reads none."""

    def __init__(self, run: Run, node: Nsqd, lines: int) -> None:
        super().__init__(run, node, (node.host, 4150))
        self.disturbed = True
        if self.sock is not None:
            self.sock.paused = True
            self.sock.link.window = 256 << 10
            # Without a subscription the first FIN would end the connection.
            self.send(b"  V2SUB plain flood#ephemeral\n" + b"FIN 0123456789abcdef\n" * lines)
            # What one read brings is answered; the next one must wait.
            for portion in range(1, 4):
                run.world.after(0.005 * portion, lambda: self._go_on(lines))

    def _go_on(self, lines: int) -> None:
        """Send what the broker takes: it takes nothing once it has stopped to read."""
        if not self.over and self.sock is not None:
            try:
                self.sock.send(b"FIN 0123456789abcdef\n" * lines)
            except OSError:
                self.close()


class Body(bytes):
    """The body of an answer, and the offset that a range of a log goes up to, -1 if it is none."""

    next_offset = -1


class Http(_Client):
    """One request at a time; ``answered(status, body)`` is called for each, with status 0 if none came."""

    def __init__(self, run: Run, node: Nsqd) -> None:
        super().__init__(run, node, (node.host, 4151))
        self._waiting: Callable[[int, bytes], object] | None = None

    @property
    def idle(self) -> bool:
        return not self.over and self._waiting is None

    def ask(self, method: str, target: str, body: bytes, answered: Callable[[int, bytes], object]) -> None:
        if self.over:
            answered(0, b"")
            return
        self._waiting = answered
        head = f"{method} {target} HTTP/1.1\r\nHost: {self.node.name}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def received(self) -> None:
        head, found, rest = bytes(self.buffer).partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if b"transfer-encoding" in headers:
            content = self._chunks(rest)
            if content is None:
                return
            body, length = content
        else:
            length = int(headers.get(b"content-length", 0))
            if len(rest) < length:
                return
            body = Body(rest[:length])
        body.next_offset = int(headers.get(b"x-flintmq-next", -1))
        self.buffer[:] = rest[length:]
        answered, self._waiting = self._waiting, None
        status = int(lines[0].split(b" ")[1])
        if answered is None:
            self.run.world.violated(f"{self.node.name} answers a request that nobody made: {status}")
            return
        if b"connection: close" in head.lower():
            self.close()
        answered(status, body)

    def _chunks(self, data: bytes) -> tuple[Body, int] | None:
        """The body that comes in chunks, and what it takes up; None while it is not whole."""
        body, at = bytearray(), 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line], 16)
            at = line + 2 + size + 2
            if at > len(data):
                return None
            if not size:
                return Body(body), at
            body += data[line + 2 : line + 2 + size]
        return None

    def ended(self) -> None:
        answered, self._waiting = self._waiting, None
        if answered is not None:
            answered(0, b"")


#: What a Talk yields: the node, method, target and body of a request. It gets status and body.
Request = tuple[Any, str, str, bytes]


class Talk:
    """A conversation over HTTP that may take several nodes and requests: a generator that yields requests.

    A request without an answer is answered with status 0 after a while, and so is one that takes too long.
    """

    def __init__(self, run: Run, script: Generator[Request, tuple[int, bytes], None], *, patience: float = 3.0) -> None:
        self._run = run
        self._script = script
        self._patience = patience
        self.done = False
        run.talks.append(self)
        self._next(None)

    def _next(self, answer: tuple[int, bytes] | None) -> None:
        try:
            node, method, target, body = next(self._script) if answer is None else self._script.send(answer)
        except StopIteration:
            self.done = True
            self._run.talks.remove(self)
            return
        client = Http(self._run, node)
        answered = False

        def arrived(status: int, data: bytes) -> None:
            nonlocal answered
            if not answered:
                answered = True
                client.close()
                # Never at once: a node that is down, or full, would be asked without end.
                self._run.world.after(0.0001 if status == 200 else 0.05, lambda: self._next((status, data)))

        client.ask(method, target, body, arrived)
        self._run.world.after(self._patience, lambda: arrived(0, b""))


def _records(bodies: list[bytes]) -> bytes:
    return struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)
