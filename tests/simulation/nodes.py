"""Scripted nsqds and nsqlookupds for the simulation: small models that speak the protocol and can be told to misbehave.

An Nsqd keeps topics, channels, deadlines and deferred messages in virtual time, and writes down what clients made it
do: what was stored, finished, and by whom. A Lookupd answers ``/lookup`` and ``/nodes`` over HTTP. Neither needs an
event loop, nor knows the client.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from .network import Listener, Network, Socket
from .world import Event, World

__all__ = ["Lookupd", "Nsqd", "Session"]

#: Times its timeout that a message can be kept by touching it.
MOST_TOUCHES = 6
_WITH_BODY = {b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB"}


class _Stored:
    """A message in a channel."""

    __slots__ = ("attempts", "body", "id")

    def __init__(self, id: bytes, body: bytes) -> None:
        self.id = id
        self.body = body
        self.attempts = 0


class _Channel:
    def __init__(self) -> None:
        self.queue: deque[_Stored] = deque()
        self.deferred = 0


class Session:
    """One client's connection."""

    def __init__(self, nsqd: Nsqd, sock: Socket) -> None:
        self.nsqd = nsqd
        self.sock = sock
        self.buffer = bytearray()
        self.has_magic = False
        self.channel: _Channel | None = None
        self.rdy = 0
        self.credit = 0
        self.closing = False
        self.over = False
        self.in_flight: dict[bytes, tuple[_Stored, Event]] = {}
        self.sent_at: dict[bytes, float] = {}
        self.msg_timeout = nsqd.msg_timeout
        self.heartbeat = 30.0
        self.last_heard = nsqd.world.now
        #: Something was wrong with it: no promise of the client's holds here any more.
        self.disturbed = False
        #: Something was not said.
        self.owes = False
        self._beats: Event | None = None
        sock.on_data = self._data

    def send(self, kind: int, data: bytes) -> None:
        if self.nsqd.mute:
            self.owes = True
        elif not self.over:
            self._write(struct.pack(">II", len(data) + 4, kind) + data)

    def _write(self, data: bytes) -> None:
        try:
            # What finds no room is lost; the model's clients read.
            self.sock.send(data)
        except BlockingIOError:
            self.disturbed = True
        except OSError:
            self.end()

    def garbage(self, data: bytes) -> None:
        self.disturbed = True
        if not self.over:
            self._write(data)

    def refuse(self, text: bytes) -> None:
        if self.nsqd.unanswering:
            return
        self.send(1, text)
        if not text.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")):
            self.end()

    def end(self) -> None:
        """The connection is over; what is in flight comes back when its time is over, as in NSQ."""
        if not self.over:
            self.over = True
            self.nsqd.sessions.remove(self)
            if self._beats is not None:
                self._beats.cancel()
            self.sock.close()

    def _data(self, sock: Socket) -> None:
        if self.over:
            return
        try:
            while sock.inbox:
                self.buffer += sock.recv(1 << 20)
        except OSError:
            self.end()
            return
        if sock.error:
            self.end()
            return
        self.last_heard = self.nsqd.world.now
        self._commands()
        if sock.eof and not self.over:
            self.end()

    def _commands(self) -> None:
        buffer = self.buffer
        if not self.has_magic:
            if len(buffer) < 4:
                return
            if buffer[:4] != b"  V2":
                self.end()
                return
            del buffer[:4]
            self.has_magic = True
        while not self.over:
            stop = buffer.find(b"\n")
            if stop < 0:
                return
            words = bytes(buffer[:stop]).split(b" ")
            body = b""
            stop += 1
            if words[0] in _WITH_BODY:
                if len(buffer) < stop + 4:
                    return
                size = int.from_bytes(buffer[stop : stop + 4], "big")
                if words[0] != b"IDENTIFY" and size > self.nsqd.max_body:
                    del buffer[:]
                    self.refuse(b"E_BAD_MESSAGE %b message too big %d" % (words[0], size))
                    return
                if len(buffer) < stop + 4 + size:
                    return
                body = bytes(buffer[stop + 4 : stop + 4 + size])
                stop += 4 + size
            del buffer[:stop]
            self.nsqd.command(self, words, body)

    def beat(self) -> None:
        world = self.nsqd.world
        if world.now - self.last_heard > 2.2 * self.heartbeat * 1e9 and not self.sock.paused:
            self.end()
            return
        self.send(0, b"_heartbeat_")
        self._beats = world.after(self.heartbeat, self.beat)


class Nsqd:
    """`finished_hook` is called with each message body that a client finishes."""

    def __init__(self, world: World, network: Network, host: str, number: int) -> None:
        self.world = world
        self.network = network
        self.address = (host, 4150)
        self.name = f"{host}:4150"
        self.number = number
        # What it is like.
        self.version = "1.3.0"
        self.msg_timeout = 60.0
        self.max_rdy = 2500
        self.max_msg_size = 1 << 20
        self.max_body = 5 << 20
        #: Whether it says how large a message may be where it refuses one, as NSQ's nsqd does.
        self.says_limit = True
        #: Its name as a node of flintmq; NSQ's nsqd has none, and may store a part of an MPUB that fails.
        self.node = ""
        # What it does wrong at the moment.
        self.mute = False
        self.unanswering = False
        self.full = False
        # What it knows.
        self.log: dict[bytes, list[bytes]] = {}
        self.channels: dict[tuple[bytes, bytes], _Channel] = {}
        self.sessions: list[Session] = []
        self.accepted = 0
        self.lookupds: list[Lookupd] = []
        self.timed_out: list[tuple[Session, bytes]] = []
        self.finished_hook: Callable[[bytes], object] = lambda body: None
        self.stored_hook: Callable[[bytes, bytes], object] = lambda topic, body: None
        self.timed_out_hook: Callable[[Session, bytes], object] = lambda session, body: None
        self.opened_hook: Callable[[Session], object] = lambda session: None
        #: Called where RDY is counted down by a delivery.
        self.counted_hook: Callable[[Session], object] = lambda session: None
        self._ids = 0
        self._listener: Listener | None = None

    # --- Up and down -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._listener is not None

    def start(self) -> None:
        if self._listener is None:
            self._listener = self.network.listen(self.address, self._accept)
            for lookupd in self.lookupds:
                lookupd.known.add(self)

    def kill(self) -> None:
        """Cut all connections and listen no more. What was stored is there after the next start."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for lookupd in self.lookupds:
            lookupd.known.discard(self)
        for session in list(self.sessions):
            session.sock.cut()
            for stored, deadline in session.in_flight.values():
                deadline.cancel()
                self._requeue(session.channel, stored, 0)
            session.in_flight.clear()
            session.end()

    def _accept(self, sock: Socket) -> None:
        session = Session(self, sock)
        self.accepted += 1
        self.sessions.append(session)
        self.opened_hook(session)

    # --- Commands ----------------------------------------------------------------------------------------------------

    def command(self, session: Session, words: list[bytes], body: bytes) -> None:
        name = words[0]
        if name == b"IDENTIFY":
            self._identify(session, body)
        elif name == b"SUB":
            session.channel = self.channel(words[1], words[2])
            session.send(0, b"OK")
            self.pump(session.channel)
        elif name == b"RDY":
            if not session.closing:
                session.rdy = session.credit = int(words[1])
                if session.channel is not None:
                    self.pump(session.channel)
        elif name in (b"FIN", b"REQ", b"TOUCH"):
            self._answer(session, name, words)
        elif name in (b"PUB", b"MPUB", b"DPUB"):
            self._publish(session, name, words, body)
        elif name == b"CLS":
            session.closing = True
            session.rdy = session.credit = 0
            session.send(0, b"CLOSE_WAIT")
        elif name != b"NOP":
            session.refuse(b"E_INVALID invalid command " + name)

    def _identify(self, session: Session, body: bytes) -> None:
        about = json.loads(body)
        session.heartbeat = about.get("heartbeat_interval", 30000) / 1000
        if about.get("msg_timeout"):
            session.msg_timeout = about["msg_timeout"] / 1000
        answer: dict[str, object] = {
            "version": self.version,
            "max_rdy_count": self.max_rdy,
            "msg_timeout": round(session.msg_timeout * 1000),
        }
        if self.node and about.get("flintmq"):
            answer["flintmq"] = {"node": self.node, "keys": False}
        session.send(0, json.dumps(answer).encode())
        session.beat()

    def _answer(self, session: Session, name: bytes, words: list[bytes]) -> None:
        id = words[1]
        if id not in session.in_flight:
            session.refuse(b"E_%b_FAILED %b %b failed ID not in flight" % (name, name, id))
            return
        stored, deadline = session.in_flight[id]
        deadline.cancel()
        if name == b"TOUCH":
            session.in_flight[id] = (stored, self._deadline(session, stored))
            return
        del session.in_flight[id]
        if name == b"FIN":
            self.finished_hook(stored.body)
        else:
            self._requeue(session.channel, stored, int(words[2]) / 1000)
        if session.channel is not None:
            self.pump(session.channel)

    def _publish(self, session: Session, name: bytes, words: list[bytes], body: bytes) -> None:
        bodies = [body]
        if name == b"MPUB":
            bodies, at = [], 4
            for _ in range(int.from_bytes(body[:4], "big")):
                size = int.from_bytes(body[at : at + 4], "big")
                bodies.append(body[at + 4 : at + 4 + size])
                at += 4 + size
        largest = max(map(len, bodies))
        if largest > self.max_msg_size:
            limit = b" %d > %d" % (largest, self.max_msg_size) if self.says_limit else b""
            session.refuse(b"E_BAD_MESSAGE %b message too big%b" % (name, limit))
            return
        if self.full:
            session.refuse(b"E_%b_FAILED %b failed disk is full" % (name, name))
            return
        delay = int(words[2]) / 1000 if name == b"DPUB" else 0
        for each in bodies:
            self.store(words[1], each, delay)
        if not self.unanswering:
            session.send(0, b"OK")

    def store(self, topic: bytes, body: bytes, delay: float = 0) -> None:
        """Put a message into a topic and all its channels."""
        self.log.setdefault(topic, []).append(body)
        self.stored_hook(topic, body)
        for (of, _), channel in self.channels.items():
            if of == topic:
                self._ids += 1
                stored = _Stored(b"%02x%014x" % (self.number, self._ids), body)
                self._requeue(channel, stored, delay)

    def channel(self, topic: bytes, name: bytes) -> _Channel:
        return self.channels.setdefault((topic, name), _Channel())

    def speak(self) -> None:
        """End a silence."""
        self.mute = False
        for session in list(self.sessions):
            if session.owes:
                # Later answers would be taken for those that were not given.
                session.sock.cut()
                session.end()
        for channel in self.channels.values():
            self.pump(channel)

    # --- Deliveries --------------------------------------------------------------------------------------------------

    def pump(self, channel: _Channel) -> None:
        counts_down = self.version.startswith("0.2")
        ready = [session for session in self.sessions if session.channel is channel and not session.closing]
        if len(ready) > 1:
            self.world.rng.shuffle(ready)
        for session in ready:
            while channel.queue and not self.mute and not session.over:
                if counts_down:
                    if session.credit <= 0:
                        break
                    session.credit -= 1
                    self.counted_hook(session)
                elif len(session.in_flight) >= session.rdy:
                    break
                stored = channel.queue.popleft()
                stored.attempts += 1
                session.sent_at[stored.id] = self.world.seconds
                session.in_flight[stored.id] = (stored, self._deadline(session, stored))
                head = struct.pack(">qH16s", 1_700_000_000_000_000_000, stored.attempts, stored.id)
                session.send(2, head + stored.body)

    def _deadline(self, session: Session, stored: _Stored) -> Event:
        left = session.sent_at[stored.id] + MOST_TOUCHES * session.msg_timeout - self.world.seconds

        def over() -> None:
            if session.in_flight.pop(stored.id, None) is not None:
                if left >= session.msg_timeout:
                    self.timed_out_hook(session, stored.body)
                self._requeue(session.channel, stored, 0)

        return self.world.after(min(left, session.msg_timeout), over)

    def _requeue(self, channel: _Channel | None, stored: _Stored, delay: float) -> None:
        assert channel is not None

        def back() -> None:
            channel.deferred -= 1
            channel.queue.append(stored)
            self.pump(channel)

        channel.deferred += 1
        if delay:
            self.world.after(delay, back)
        else:
            back()


class Lookupd:
    """`mood` is what it does with a question: "good", "error", "garbage", "silent" or "slow"."""

    def __init__(self, world: World, network: Network, host: str) -> None:
        self.world = world
        self.network = network
        self.address = (host, 4161)
        self.name = f"{host}:4161"
        self.known: set[Nsqd] = set()
        self.mood = "good"
        self.asked = 0
        self._listener: Listener | None = None
        self._sockets: list[Socket] = []

    def start(self) -> None:
        if self._listener is None:
            self._listener = self.network.listen(self.address, self._accept)

    def kill(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for sock in self._sockets:
            sock.cut()
            sock.close()
        self._sockets.clear()

    def _accept(self, sock: Socket) -> None:
        self._sockets.append(sock)
        sock.on_data = self._data

    def _data(self, sock: Socket) -> None:
        if sock.error or (sock.eof and not sock.inbox):
            if sock in self._sockets:
                self._sockets.remove(sock)
            sock.close()
            return
        if b"\r\n\r\n" not in sock.inbox:
            return
        request = sock.recv(1 << 16)
        self.asked += 1
        if self.mood == "silent":
            return
        delay = self.world.rng.uniform(0.5, 4.0) if self.mood == "slow" else 0.0
        self.world.after(delay, lambda: self._reply(sock, request))

    def _reply(self, sock: Socket, request: bytes) -> None:
        if sock.closed or sock.error:
            return
        target = urlsplit(request.split(b" ")[1].decode())
        topic = parse_qs(target.query).get("topic", [""])[0].encode()
        nodes = sorted(self.known, key=lambda nsqd: nsqd.name)
        if target.path == "/lookup":
            nodes = [nsqd for nsqd in nodes if topic in nsqd.log or any(of == topic for of, _ in nsqd.channels)]
        producers = [
            {"broadcast_address": nsqd.address[0], "hostname": "h", "tcp_port": 4150, "http_port": 4151}
            for nsqd in nodes
        ]
        status, body = b"200 OK", json.dumps({"channels": [], "producers": producers}).encode()
        if self.mood == "error":
            status, body = b"500 Internal Server Error", b"oops"
        elif self.mood == "garbage":
            body = self.world.rng.choice(
                [b"<html>", b"[1]", b'{"producers": 5}', b"\xff\xfe", b'{"producers":[{"tcp_port":"x"}]}']
            )
        sock.send(
            b"HTTP/1.1 %b\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n" % (status, len(body)) + body
        )
