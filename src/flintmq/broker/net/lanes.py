"""Lanes: what many connections send of one kind is read, framed or applied, and answered in one call of the kernel.

A connection is in a lane if its socket is a plain one and its last command was of the lane's kind. A lane is for whole
commands of that kind; whatever else a client sends is given to its session. A lane guards each connection: an error in
one closes that one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flintmq.broker.net.sockets import SocketTransport
from flintmq.broker.storage.log import NO_BLOCK
from flintmq.kernel import FULL, NOTHING, OTHER, Intake
from flintmq.protocol.wire import OK_FRAME

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.net.session import Session

__all__ = ["FinishLane", "PublishLane"]

logger = logging.getLogger(__name__)

#: Publishers of the last turn that are read again without being asked to.
MOST_REGULARS = 16
#: Consumers that are read in one go.
MOST_TOGETHER = 256


class PublishLane:
    """PUBs, or MPUBs, of many clients to one topic: those of a turn are read and framed together.

    A connection takes it if its socket is a plain one and its last publish was of this kind and to this topic. It is
    for one whole command in one read; whatever else a client sends goes the ordinary way.
    """

    def __init__(self, broker: Broker, topic: Topic, verb: str) -> None:
        self._broker = broker
        self._counters = broker.counters
        self.topic = topic
        self.verb = verb
        options = broker.options
        self._intake = Intake(
            broker.receive_buffer,
            f"{verb} {topic.name}".encode(),
            OK_FRAME,
            options.max_msg_size,
            options.max_body_size if verb == "MPUB" else 0,
        )
        #: Sessions whose sockets can be read in this turn; the Poller appends to it.
        self.arrived: list[tuple[Session, SocketTransport]] = []
        self._regulars: dict[Session, SocketTransport] = {}

    def run(self) -> None:
        arrived, self.arrived = self.arrived, []
        topic = self.topic
        # Those that published a moment ago may well have the next one under way: they are read too, after the others.
        others, self._regulars = self._regulars, {}
        now = self._broker.now()
        together: list[tuple[Session, SocketTransport]] = []
        is_open = topic.open
        for pair in arrived:
            others.pop(pair[0], None)
            if is_open and pair[0].quiet and now < pair[0].granted_until:
                together.append(pair)
            else:
                pair[1].receive()
                is_open = topic.open
        if others and is_open:
            together += [pair for pair in others.items() if pair[0].quiet and now < pair[0].granted_until]
        fds = [transport.fd for _, transport in together]
        start = 0
        while start < len(fds):
            try:
                start = self._take_in(together, fds, start)
            except Exception:
                # Of these it is not known what was read and what was answered.
                logger.exception("TOPIC(%s): unexpected error, its publishers are disconnected", topic.name)
                for _, transport in together[start:]:
                    transport.abort()
                return

    def _take_in(self, together: list[tuple[Session, SocketTransport]], fds: list[int], start: int) -> int:
        """Take in publishes until something has to be done about one of them; where to go on."""
        topic, intake = self.topic, self._intake
        counts = [0] * len(fds)
        status, commit = topic.take_in(intake, fds, counts, start)
        if status == NO_BLOCK:
            # Nothing was read: the log gets a block the ordinary way.
            together[start][1].receive()
            return start + 1
        for i, sent in intake.left:
            together[i][0].send_run(memoryview(OK_FRAME)[sent:])
        now = self._broker.now()
        if commit is not None and commit.done:
            for i in intake.unanswered:
                try:
                    together[i][0].refused(commit.error)
                except Exception:
                    together[i][1].broken()
            commit = None
        self._counters.lane_published += sum(counts)
        for i, count in enumerate(counts):
            if count:
                session, transport = together[i]
                try:
                    session.published(topic, count, commit, now)
                except Exception:
                    transport.broken()
                    continue
                if len(self._regulars) < MOST_REGULARS:
                    self._regulars[session] = transport
        if status == OTHER:
            # What is in the buffer there must be seen to before the buffer is used again; then the others go on.
            i, size = intake.index, intake.size
            fds[i] = -1
            self._other(*together[i], size)
            return i + 1 if commit is not None else start
        if status == FULL and commit is not None:
            topic.flush()
            return intake.index
        return len(fds)

    def _other(self, session: Session, transport: SocketTransport, size: int) -> None:
        """Something else came, or nothing at all: ``size`` bytes are in the buffer."""
        if size > 0:
            try:
                session.buffer_updated(size)
            except Exception:
                transport.broken()
        elif size == 0:
            transport.ended()
        else:
            transport.fail(OSError(-size, "the connection is broken"))


class FinishLane:
    """FINs of a channel's consumers on plain sockets: all of a turn, and one pump at its end."""

    def __init__(self, broker: Broker, channel: Channel) -> None:
        self._broker = broker
        self._channel = channel
        # Sessions that are read in one go; fewer after one that brought more than FINs.
        self._together = MOST_TOGETHER
        #: Sessions whose sockets can be read in this turn; the Poller appends to it.
        self.arrived: list[tuple[Session, SocketTransport]] = []

    def run(self) -> None:
        arrived, self.arrived = self.arrived, []
        now = self._broker.now()
        at = 0
        while at < len(arrived):
            at = self._run_some(arrived, at, now)
        self._broker.answered(self._channel)

    def _run_some(self, arrived: list[tuple[Session, SocketTransport]], at: int, now: float) -> int:
        """See to one session or more from ``at`` on; return where the next one stands."""
        sessions: list[Session] = []
        fds: list[int] = []
        for i in range(at, min(at + self._together, len(arrived))):
            session, transport = arrived[i]
            if session._held is not None or session._waiting or session._closing:
                # What is held back here comes first. It may end other connections: look again after it.
                break
            sessions.append(session)
            fds.append(transport.fd)
        if not fds:
            arrived[at][1].receive()
            return at + 1
        channel, data = self._channel, self._broker.receive_buffer
        ring = channel.ring
        try:
            read = channel.finish_each(sessions, fds, data, now)
        except Exception:
            # Nobody knows how far it came: these connections are closed, and no other.
            for _, transport in arrived[at : at + len(fds)]:
                transport.broken()
            return at + len(fds)
        if read == len(fds):
            self._together = min(4 * self._together, MOST_TOGETHER)
            return at + read
        # What this one brought besides FINs may end other connections, too.
        self._together = 1
        session, transport = arrived[at + read]
        size, taken = ring.received, ring.taken
        if size > 0:
            try:
                data[: size - taken] = data[taken:size]
                session.buffer_updated(size - taken)
            except Exception:
                transport.broken()
        elif size == 0:
            transport.ended()
        elif size != NOTHING:
            transport.fail(OSError(-size, "the connection is broken"))
        return at + read + 1
