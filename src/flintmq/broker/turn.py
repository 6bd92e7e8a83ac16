"""The work of a loop turn: what is done at its end for all who asked in it, and what is done soon after.

A Turn collects topics and channels while sockets are read, and sees to each of them once: topics are written and their
publishers answered, channels are pumped, the journal is flushed and memory trimmed a few milliseconds later. An error
in one topic or channel is logged with its name and costs no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.topic import Topic
from flintmq.errors import FlintError

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.net.session import Session
    from flintmq.broker.net.sockets import Poller

__all__ = ["Turn", "report"]

logger = logging.getLogger(__name__)

#: Seconds until finished messages reach the journal's file, if nothing else writes it sooner.
JOURNAL_DELAY = 0.005
#: Topics that are written before publishers get the answers of these topics.
TOPICS_PER_ANSWER = 64


def report(topic: Topic, what: str, error: Exception) -> None:
    """Log an error that costs one topic alone; with its trace unless it is of a kind that is expected."""
    known = isinstance(error, OSError | FlintError)
    logger.error("TOPIC(%s): cannot %s - %s", topic.name, what, error, exc_info=None if known else error)


class Turn:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._poller: Poller | None = None
        # At the end of this turn: topics to write, channels to pump.
        self._topics: dict[Topic, None] = {}
        self._flush_due = False
        self._answered: dict[Channel, None] = {}
        # While topics are written: publishers of several of them, whose answers leave together.
        self._flushing = False
        self._publishers: dict[Session, None] = {}
        # In the next turn: channels that have sent their share of this one.
        self._pumps: dict[Channel, None] = {}
        # Soon: topics whose memory can be trimmed, once the journal is flushed.
        self._touched: dict[Topic, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        # When the disk keeps up again.
        self._stalled: list[Callable[[], None]] = []

    def follow(self, poller: Poller) -> None:
        """The poller calls ``end`` when it has read all sockets of a turn."""
        self._poller = poller

    @property
    def busy(self) -> bool:
        """Is there something to do in this turn or the next?"""
        return bool(self._flush_due or self._topics or self._pumps)

    # --- This turn -------------------------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        """The topic has something to write or to hand on: at the end of this loop turn."""
        self._topics[topic] = None
        if not self._flush_due:
            self._flush_due = True
            if self._poller is None or not self._poller.turning:
                self._broker.later(self.flush)

    def answered(self, channel: Channel) -> None:
        """Consumers may take more: pump at the end of the turn, when what was published in it can be sent as well."""
        self._answered[channel] = None

    def end(self) -> None:
        """All that could be read in this turn has been."""
        if self._flush_due:
            self.flush()
        if self._answered:
            channels, self._answered = self._answered, {}
            self._pump(channels)

    def flush(self) -> None:
        """Write once per topic for all its publishers, then answer them, then deliver."""
        self._flush_due = False
        topics, self._topics = self._topics, {}
        if len(topics) > 1:
            # A publisher of one topic has all its answers with that topic.
            self._flushing = True
        since = 0
        for topic in topics:
            if not topic.exiting:
                try:
                    topic.flush()
                except Exception as exc:
                    report(topic, "write or hand on what was published", exc)
            if self._publishers:
                since += 1
                if since >= TOPICS_PER_ANSWER:
                    since = 0
                    self._answer()
        if self._flushing:
            self._flushing = False
            self._answer()
        broker = self._broker
        if broker.store.room < 0:
            broker.upkeep.look_at_space()
        if self._timer is None and broker.journal.pending:
            self._see_to_it_soon()

    def answer_later(self, session: Session) -> bool:
        """Call ``session.send_answers`` once more topics of this turn are written; False if none are being written."""
        if self._flushing:
            self._publishers[session] = None
        return self._flushing

    def _answer(self) -> None:
        sessions, self._publishers = self._publishers, {}
        for session in sessions:
            try:
                session.send_answers()
            except Exception:
                logger.exception("client(%s): a publisher cannot be answered", session.remote_address)

    def _pump(self, channels: dict[Channel, None]) -> None:
        for channel in channels:
            try:
                channel.pump()
            except Exception as exc:
                report(channel.topic, f"deliver to channel {channel.name}", exc)

    # --- Soon after ------------------------------------------------------------------------------------------------

    def soon(self, channel: Channel) -> None:
        """Messages of the channel were finished or requeued: flush the journal and trim memory within JOURNAL_DELAY."""
        self._touched[channel.topic] = None
        if self._timer is None:
            self._see_to_it_soon()

    def _see_to_it_soon(self) -> None:
        self._timer = self._broker.after(JOURNAL_DELAY, self.housekeeping)

    def housekeeping(self) -> None:
        """Flush the journal, then trim the memory of topics whose messages were finished."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._broker.journal.flush()
        topics, self._touched = self._touched, {}
        for topic in topics:
            if not topic.exiting:
                try:
                    topic.trim()
                except Exception as exc:
                    report(topic, "trim its memory", exc)

    def pump_later(self, channel: Channel) -> None:
        """The channel has sent its share of this turn and goes on in the next."""
        if channel not in self._pumps:
            self._pumps[channel] = None
            self._broker.later(self._pump_again)

    def _pump_again(self) -> None:
        channels, self._pumps = self._pumps, {}
        self._pump(channels)

    # --- Back-pressure ---------------------------------------------------------------------------------------------

    def when_relieved(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the disk has caught up with publishers."""
        self._stalled.append(then)

    def relieved(self) -> None:
        stalled, self._stalled = self._stalled, []
        for then in stalled:
            self._broker.later(then)

    # --- The end ---------------------------------------------------------------------------------------------------

    def forget(self, topic: Topic) -> None:
        """The topic is deleted."""
        self._topics.pop(topic, None)
        self._touched.pop(topic, None)

    def stop(self) -> None:
        """Cancel what was to be done soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
