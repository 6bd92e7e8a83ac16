"""The broker: topics, listeners, sessions, start and stop.

A Broker owns everything that lives as long as the process: the data path, the journal, the topics, the table of
sessions, the listeners. Messages are its topics' business. Beside it stand the parts that it hands work to: the end of
a loop turn (turn.py), syncing and deleting files (upkeep.py), the ports (listeners.py), the data path (data_path.py)
and bringing topics back from it (opening.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import flintmq
from flintmq import addresses
from flintmq.broker.data_path import DataPath, reason, remove_tree
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.scan import Scan
from flintmq.broker.delivery.topic import RESERVE, Topic
from flintmq.broker.drain import REASON, DrainReport, drain
from flintmq.broker.limits import Connections, Creation
from flintmq.broker.listeners import Listeners
from flintmq.broker.net import sockets
from flintmq.broker.net.lanes import FinishLane, PublishLane
from flintmq.broker.net.session import Session
from flintmq.broker.observe.counters import Counters
from flintmq.broker.observe.pipelines import Pipelines
from flintmq.broker.observe.statsd import Statsd
from flintmq.broker.opening import Opening
from flintmq.broker.peers import Peers
from flintmq.broker.settings import Settings
from flintmq.broker.stage.staging import Staging
from flintmq.broker.storage.disk import NO_ROOM, Clock, Disk
from flintmq.broker.storage.ids import NodeIds
from flintmq.broker.storage.journal import SIDE, Journal, State
from flintmq.broker.storage.store import Store
from flintmq.broker.turn import Turn
from flintmq.broker.upkeep import SPACE_INTERVAL, Upkeep
from flintmq.errors import FlintError, NotFoundError, PublishError, StartError, StorageError, permission_hint
from flintmq.options import NsqdOptions
from flintmq.protocol.wire import valid_name

if TYPE_CHECKING:
    from flintmq.broker.net.auth import AuthServers

__all__ = ["Broker"]

logger = logging.getLogger(__name__)

#: Bytes that one read takes from a socket.
RECEIVE_BYTES = 256 << 10
#: Seconds that a stop waits for writes and syncs before it closes the connections, and between two looks at them.
LAST_WRITES = 5.0
LOOK_AGAIN = 0.002


@contextlib.contextmanager
def _going_on(what: str) -> Iterator[None]:
    """Log what goes wrong with one step of a stop: it must not cost the steps behind it, which save messages."""
    try:
        yield
    except Exception:
        logger.exception("NSQ: unexpected error, the stop goes on - %s", what)


@dataclasses.dataclass
class _Numbers:
    """The numbers that topics, channels and sessions get. None is given twice to what can be mistaken."""

    #: Seqs of new topics begin above it.
    floor: int = 0
    next_incarnation: int = 1
    next_channel: int = 1
    last_session: int = 0

    def incarnation(self) -> int:
        self.next_incarnation += 1
        return self.next_incarnation - 1

    def channel(self) -> int:
        self.next_channel += 1
        return self.next_channel - 1

    def session(self) -> int:
        """Return the next one of 32 bits; 0 is nobody."""
        self.last_session = self.last_session % 0xFFFF_FFFE + 1
        return self.last_session

    def raise_floor(self, seq: int) -> int:
        self.floor = max(self.floor, seq)
        return self.floor

    def noted(self) -> tuple[int, int, int]:
        """Return what the journal keeps of them."""
        return self.floor, self.next_incarnation, self.next_channel


class Broker:
    """``async with Broker(data_path=…) as broker`` runs an nsqd in this process; ``tcp_address`` says where.

    Size: it is where the parts of a process meet, and each of them is reached through it: most attributes are parts.
    ``turn``, ``soon``, ``answered``, ``later`` and ``now`` are borrowed from parts, and ``refusing`` and the receive
    buffer are in none, because every publish, run or read uses them.
    """

    def __init__(
        self,
        options: NsqdOptions | None = None,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        #: Inside somebody's process. For an nsqd, a folder that is missing may be a disk that is not mounted.
        self._is_embedded = options is None
        if options is None:
            # Only loopback, any free port, unless said otherwise.
            overrides = {"tcp_address": "127.0.0.1:0", "http_address": "", "https_address": "", **overrides}
            overrides["data_path"] = str(overrides.get("data_path", ""))
            options = NsqdOptions(**overrides)
        elif overrides:
            raise TypeError("give options, or single ones by keyword, not both")
        options.validate()
        self.options = options
        #: Called after ``options`` was replaced.
        self.options_changed: list[Callable[[], None]] = [self._options_changed]
        #: Called by ``reload``: each reads again what it keeps in memory of a file, such as certificates.
        self.reloaders: list[Callable[[], None]] = []
        self.disk = disk or Disk()
        self.clock: Clock = clock or self.disk.system.clock
        self.path = Path(options.data_path or os.getcwd())
        self.topology_aware = "topology-aware-consumption" in options.enable_experiment
        # Parts. What is called for every publish or run is borrowed from them.
        turns = self.turns = Turn(self)
        self.turn, self.soon, self.answered = turns.add, turns.soon, turns.answered
        self.upkeep = Upkeep(self)
        self.store = Store(
            self.disk,
            self.clock,
            options,
            fatal=self._fatal,
            relieved=turns.relieved,
            delay=lambda seconds, work: self.after(seconds, work),
            recovered=self._recovered,
        )
        self._data_path = DataPath(self.path, self.disk)
        self.node_ids = NodeIds(self.store, options.id)
        self.listeners = Listeners(self)
        self.peers = Peers(self)
        self.reloaders += [self.listeners.reload_certificates, self.peers.load_token]
        #: What single topics and channels do differently.
        self.settings = Settings(self)
        #: Publishes that nobody sees until they are decided.
        self.stage = Staging(self)
        #: Whether one more may connect; None: as many as like to.
        self.connections = Connections.of(options, self.clock)
        #: Set at the start, if the options name any.
        self.auth: AuthServers | None = None
        self.topics: dict[str, Topic] = {}
        #: Whether clients may make one more topic or channel; None: as many as they like to.
        self.creation = Creation.of(options, self.clock, self.topics)
        self._numbers = _Numbers()
        # Sessions, the buffer that each receives into in its turn, and the lanes that they share.
        self.sessions: dict[int, Session] = {}
        self.receive_buffer = bytearray(RECEIVE_BYTES)
        self.receive_view = memoryview(self.receive_buffer)
        self._lanes: dict[tuple[Topic, str], PublishLane] = {}
        #: The lines of commands that have published to a topic, without a key: they need not be taken apart again.
        self.publish_lines: dict[bytes, Topic] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # Health. ``refusing`` says why publishes are refused; it is empty when they are not.
        self.refusing = ""
        self._illness = ""
        self._draining: asyncio.Task[DrainReport] | None = None
        # The end.
        self.stopping = False
        self._failure: BaseException | None = None
        self._closed: asyncio.Future[None] | None = None
        # For the statistics.
        self.counters = Counters()
        self.pipelines = Pipelines(self.clock)
        self._statsd = Statsd(self)

    # --- Start and stop --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Broker:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, opened: Callable[[], None] = lambda: None) -> None:
        """Open the data path, call ``opened``, and listen. StartError says why it cannot."""
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self.later = self._loop.call_soon
        self.now = self._loop.time
        self.backlog = sockets.Backlog(self._loop, self.turns.end)
        self.disk.attach(self._loop.call_soon_threadsafe)
        declared: list[Topic] = []
        self.journal = Journal(
            self.disk,
            self.clock,
            self.path / "flintmq" / "journal",
            fatal=self._fatal,
            later=self.later,
            snapshot=self._snapshot,
        )
        self.scan = Scan(lambda: self.options, self.later)
        self.listeners.load_certificates()
        if self.options.auth_http_addresses:
            from flintmq.broker.net.auth import AuthServers

            self.auth = AuthServers(self.options)
        self._data_path.lock(create=self._is_embedded)
        try:
            self._open()
            self.store.fill_reserve(self.path / "flintmq")
            self.peers.load_tls()
            self.peers.load_token()
            # Before anybody can connect: no first message is missed.
            declared = self.settings.declare()
            for topic in declared if self.options.nsqlookupd_tcp_addresses else ():
                topic.gate(True)
            opened()
            await self.listeners.open(self._new_session)
        except (OSError, FlintError) as exc:
            await self._abandon()
            if isinstance(exc, FlintError):
                raise exc if isinstance(exc, StartError) else StartError(str(exc)) from exc
            if exc.errno in NO_ROOM and exc.filename is None:
                raise StartError(
                    f"no room in {self.path}: {exc.strerror}. Nothing is lost: free some space, then start again"
                ) from exc
            hint = permission_hint(exc, exc.filename or self.path)
            raise StartError(f"{exc.filename or self.path}: {exc.strerror or exc}{hint}") from exc
        self.counters.start(self.clock)
        self._statsd.start()
        self._every("scan", self.options.queue_scan_interval / 1e9, lambda: self.scan.tick(self.clock.now))
        self._every("sync", self.options.sync_timeout / 1e9, self.upkeep.sync)
        self._every("space", SPACE_INTERVAL, self.upkeep.look_at_space)
        self.upkeep.look_at_space()
        self.stage.start()
        self.upkeep.structure_changed(False)
        self.peers.start()
        for topic in declared:
            self.peers.ask_for_channels(topic)

    def _open(self) -> None:
        """Open the data path: everything in it is back when this returns."""
        self._data_path.open(self.options, self.clock)
        state = self.journal.recover(accept=self.options.accept_damaged_journal)
        self.settings.restore(state)
        self.stage.read()
        Opening(self, self._data_path.root).run(state)

    def resume(self, state: State, next_incarnation: int, next_channel: int) -> None:
        """Go on with these numbers; called by the opening, before the journal is begun."""
        self._numbers = _Numbers(state.floor, next_incarnation, next_channel)

    def _new_session(self) -> Session:
        return Session(self)

    def about(self) -> dict[str, Any]:
        """What a client is told that asks for more than NSQ says."""
        return {"version": flintmq.__version__, "node": self.node.hex(), "log": True, "keys": True, "stage": 1}

    @property
    def node(self) -> bytes:
        """The random identity of the data path."""
        return self._data_path.node

    @property
    def http_port(self) -> int:
        """Where others reach our HTTP port; 0 if it is not served, or not on a port."""
        return self.options.broadcast_http_port or addresses.port_of(self.http_address) if self.http_address else 0

    @property
    def tcp_address(self) -> str:
        """Where clients connect: ``host:port`` as really bound, or the path of a unix socket."""
        return self.listeners.tcp or self.options.tcp_address

    @property
    def http_address(self) -> str:
        """The same for HTTP; empty if it is not served."""
        return self.listeners.http

    @property
    def https_address(self) -> str:
        return self.listeners.https

    def change_options(self, **changes: Any) -> None:
        """Replace the options by a copy with these changes, and tell who asked to know."""
        options = dataclasses.replace(self.options, **changes)
        options.validate()
        Settings.check(options)
        self.options = options
        for changed in self.options_changed:
            changed()

    def _options_changed(self) -> None:
        self.peers.set_addresses(self.options.nsqlookupd_tcp_addresses)

    async def wait_closed(self) -> None:
        """Returns when the broker has stopped; raises what it died of."""
        if self._closed is not None:
            await asyncio.shield(self._closed)

    async def stop(self) -> None:
        """A clean stop: everything is kept, in-flight messages with their attempts."""
        if self.stopping or self._closed is None or self._closed.done():
            return
        self.stopping = True
        logger.info("NSQ: stopping subsystems")
        with _going_on("statsd"):
            await self._statsd.stop()
        # What was taken is written and answered; then nothing more is taken.
        self.disk.in_a_hurry = True
        with _going_on("the last turn"):
            self.turns.flush()
        await self._publishers_are_answered()
        with _going_on("staged publishes"):
            self.stage.stop()
        await self._close_listeners()
        with _going_on("the last turn"):
            self.turns.flush()
        # What threads still do must end before the files are closed; their answers arrive in the next turns.
        for topic in self.topics.values():
            for channel in topic.channels.values():
                with _going_on(f"TOPIC({topic.name}): channel({channel.name})"):
                    channel.settle()
        self.disk.refuse_work()
        await self._loop.run_in_executor(None, self.disk.close)
        await asyncio.sleep(0)
        try:
            self.upkeep.write_metadata()
        except OSError as exc:
            # Only others read it: no reason to keep less of what we need.
            logger.error("NSQ: cannot write nsqd.dat - %s", exc)
        for topic in self.topics.values():
            try:
                self._save(topic)
            except Exception as exc:
                # The others are saved all the same.
                self._not_saved(f"TOPIC({topic.name})", exc if isinstance(exc, OSError) else repr(exc))
        try:
            self.journal.save(clean=self._failure is None)
        except OSError as exc:
            self._not_saved("the journal", exc)
        self._tear_down()
        logger.info("NSQ: bye")

    async def _publishers_are_answered(self) -> None:
        """Wait for the writes and syncs under way: what was taken is stored, so its publishers are to know."""
        owed = [commit for topic in self.topics.values() if (commit := topic.last_commit) is not None]
        deadline = self._loop.time() + LAST_WRITES
        while self._loop.time() < deadline and (  # noqa: ASYNC110
            any(topic.log.writing for topic in self.topics.values()) or not all(commit.done for commit in owed)
        ):
            await asyncio.sleep(LOOK_AGAIN)

    def _not_saved(self, what: str, why: OSError | str) -> None:
        error = StorageError(f"cannot save everything: {what}: {why}")
        logger.critical("%s", error)
        self._failure = self._failure or error

    def _save(self, topic: Topic) -> None:
        """Bring all of a topic to the device, for a clean stop."""
        topic.close()
        lost = 0
        for storage in (topic.log, topic.side):
            if storage is not None:
                storage.write_all()
                lost += storage.unwritten(topic.needs)
                storage.sync_now()
                storage.close()
        if topic.keys is not None:
            topic.keys.close()
        if not topic.ephemeral:
            self.journal.note("durable", topic.incarnation, topic.log.durable)
            self.journal.note("end", topic.incarnation, topic.log.end, topic.side_end)
        if lost:
            self._not_saved(f"TOPIC({topic.name})", f"{lost} messages in memory could not be written, they are lost")

    def drain(self, timeout: float | None = None) -> asyncio.Task[DrainReport]:
        """Refuse publishes, let consumers empty the node, then stop; the report says what is left.

        After ``timeout`` seconds (0: never; None: ``--drain-timeout``) it stops whatever is left. ``stop`` ends it at
        once. A second call gives the same task, which need not be awaited.
        """
        if self._draining is None:
            self.refuse(REASON)
            seconds = self.options.drain_timeout / 1e9 if timeout is None else timeout
            self._draining = self._loop.create_task(drain(self, longest=seconds))
        return self._draining

    def reload(self) -> None:
        """Read files again that may have changed. What cannot be read stays as it was."""
        logger.info("NSQ: reloading")
        for reload in self.reloaders:
            try:
                reload()
            except (OSError, ValueError, FlintError) as exc:
                logger.error("NSQ: cannot reload, going on as before - %s", exc)

    async def _close_listeners(self) -> None:
        with _going_on("connections to nsqlookupds"):
            await self.peers.stop()
        self._cancel_timers()
        with _going_on("the TCP listener"):
            self.listeners.stop_accepting()
        with _going_on("HTTP requests"):
            await self.listeners.end_requests()
        with _going_on("connections"):
            self._disconnect()
        # Let the transports notice, so that no socket outlives the broker.
        for _ in range(3):
            await asyncio.sleep(0)
        with _going_on("plain sockets"):
            self.listeners.close_poller()
        with _going_on("unix sockets"):
            self.listeners.remove_sockets()

    def _disconnect(self) -> None:
        self.listeners.drop()
        for session in list(self.sessions.values()):
            try:
                session.drop()
            except Exception:
                logger.exception("client(%s): unexpected error", session.remote_address)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.turns.stop()

    def kill(self) -> None:
        """Stop as a crash would: nothing is flushed, no file is closed cleanly. For tests."""
        if self._closed is None or self._closed.done():
            return
        self._halt()
        self._tear_down()

    async def _abandon(self) -> None:
        """The start failed: give everything back."""
        await self._close_listeners()
        self._halt()
        self._tear_down()

    def _fatal(self, error: BaseException) -> None:
        """Storage can no longer be trusted: stop at once, say why, save nothing that could be wrong."""
        logger.critical("%s", error)
        if self._closed is None or self._closed.done() or self._failure is not None:
            return
        self._failure = error
        self._halt()
        # Not now: the caller may be in the middle of using what is torn down.
        self.later(self._tear_down)

    def _halt(self) -> None:
        """Take, send and write nothing from here on."""
        self.stopping = True
        self._statsd.cancel()
        self._cancel_timers()
        self.peers.drop()
        self.stage.stop()
        self._disconnect()
        for topic in self.topics.values():
            topic.halt()
        self.journal.halt()

    def _tear_down(self) -> None:
        """The last thing that every way to stop does: give back threads, files and the lock, and say how it ended."""
        self.listeners.close_poller()
        self.disk.close()
        for topic in self.topics.values():
            topic.abandon()
        self.store.close()
        self.journal.close()
        self.counters.stop()
        self._data_path.unlock()
        if self._closed is None or self._closed.done():
            return
        if self._failure is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(self._failure)
            # Somebody may never ask; that must not look like a lost exception.
            self._closed.exception()

    # --- Timers ----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, work)

    def once(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Do it after some time, unless the broker stops before."""

        def run() -> None:
            self._timers.pop(name, None)
            work()

        self._timers[name] = self.after(seconds, run)

    def _every(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers[name] = self.after(seconds, run)
            work()

        self._timers[name] = self.after(seconds, run)

    # --- Topics ----------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic, made if need be. PublishError if it cannot be made."""
        topic = self.topics.get(name)
        return topic if topic is not None else self._create_topic(name)

    def _create_topic(self, name: str) -> Topic:
        if not valid_name(name):
            raise ValueError(f"not a topic name: {name!r}")
        incarnation = self._numbers.incarnation()
        # Seqs must never repeat: not those of a topic of this name that was deleted, not those lost in a crash.
        base = self.first_number()
        folder = None
        topic_is_ephemeral = name.endswith("#ephemeral")
        if not topic_is_ephemeral:
            folder = self.path / "flintmq" / "topics" / f"{name}@{incarnation}"
            try:
                self.disk.make_folder(folder)
            except OSError as exc:
                self.unwell(f"cannot make a folder: {reason(exc)}")
                raise PublishError(reason(exc)) from exc
        topic = Topic(self, name, incarnation, base, folder)
        self.topics[name] = topic
        if topic_is_ephemeral:
            topic.grant(base + RESERVE, self.note_floor(base + RESERVE))
        else:
            position = self.journal.note("topic", incarnation, name, base, base + RESERVE)
            topic.grant(base + RESERVE, position)
        logger.info("TOPIC(%s): created", name)
        self.upkeep.structure_changed(topic_is_ephemeral)
        self.peers.made(name)
        self.peers.ask_for_channels(topic)
        return topic

    def topic_for_client(self, name: str) -> Topic:
        """``topic``, for those who may not make as many as they like. LimitError if this is one too many."""
        if self.creation is not None:
            self.creation.check_topic(name)
        return self.topic(name)

    def channel_for_client(self, topic: Topic, name: str) -> tuple[Channel, int]:
        """``Topic.channel``, likewise."""
        if self.creation is not None:
            self.creation.check_channel(topic, name)
        return topic.channel(name)

    def first_number(self) -> int:
        """Where a new log begins: beyond all numbers of logs that are gone."""
        return max(self.clock.wall() // 1000, self._numbers.floor)

    def note_floor(self, seq: int) -> int:
        """Let no log that is created from here on, also after a restart, begin below ``seq``. Return the note's place.

        The seqs of an ephemeral topic are noted nowhere else.
        """
        self._numbers.raise_floor(seq)
        return self.journal.note("floor", *self._numbers.noted())

    def existing_topic(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            raise NotFoundError("topic does not exist")
        return topic

    def delete_topic(self, name: str) -> None:
        topic = self.existing_topic(name)
        logger.info("TOPIC(%s): deleting", name)
        topic.close()
        for channel in list(topic.channels):
            topic.delete_channel(channel)
        del self.topics[name]
        self.settings.forget(name)
        self.turns.forget(topic)
        for verb in ("PUB", "MPUB"):
            self._lanes.pop((topic, verb), None)
            self.publish_lines.pop(f"{verb} {name}".encode(), None)
        floor = self._numbers.raise_floor(max(topic.ceiling, topic.log.end, topic.side_end - SIDE))
        if not topic.ephemeral:
            position = self.journal.note("untopic", topic.incarnation, floor)
            # Its files go only when it is certain that it is gone.
            self.journal.when_synced(position, functools.partial(self._discard, topic))
        self.upkeep.structure_changed(topic.ephemeral)
        self.peers.deleted(name)

    def _discard(self, topic: Topic) -> None:
        for storage in (topic.side, topic.log):
            if storage is not None:
                storage.discard()
        if topic.folder is not None and not self.disk.closing:
            # Giving back the space of large files takes the system a while. The next start deletes what is left.
            self.disk.submit(
                functools.partial(remove_tree, self.disk, topic.folder), functools.partial(self._discarded, topic)
            )

    def _discarded(self, topic: Topic, _: None, error: BaseException | None) -> None:
        if error is not None:
            logger.error("TOPIC(%s): cannot delete %s - %s", topic.name, topic.folder, error)

    def next_channel_id(self) -> int:
        return self._numbers.channel()

    # --- Sessions --------------------------------------------------------------------------------------------------

    def next_ident(self) -> int:
        """A number for a session that no other connected one has; 0 is nobody."""
        while (ident := self._numbers.session()) in self.sessions:
            pass
        return ident

    def lane(self, topic: Topic, verb: str) -> PublishLane | None:
        """Return the lane for such publishes to a topic; None where there is no poller."""
        if self.listeners.poller is None:
            return None
        lane = self._lanes.get((topic, verb))
        if lane is None:
            lane = self._lanes[topic, verb] = PublishLane(self, topic, verb)
        return lane

    def finish_lane(self, channel: Channel) -> FinishLane:
        """Return the lane for FINs; all of a channel's consumers share it."""
        if channel.lane is None:
            channel.lane = FinishLane(self, channel)
        return channel.lane

    def connected(self, session: Session) -> None:
        self.counters.connection_count += 1
        self.sessions[session.ident] = session
        if self.stopping:
            session.drop()
        elif self.connections is not None:
            # Before IDENTIFY the host name is the address.
            why = self.connections.admit(session.ident, session.identity.hostname)
            if why:
                session.turn_away(why)

    def disconnected(self, session: Session) -> None:
        self.sessions.pop(session.ident, None)
        if self.connections is not None:
            self.connections.release(session.ident)

    # --- Health ----------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Refuse publishes for this reason; take them again if it is empty."""
        self.refusing = why

    @property
    def draining(self) -> bool:
        return self._draining is not None

    def unwell(self, why: str) -> None:
        """A write failed: so it stays until one succeeds."""
        self._illness = why
        self.store.note_health(ill=True)

    def _recovered(self) -> None:
        self._illness = ""
        self.store.note_health(ill=False)

    @property
    def health(self) -> str:
        """``OK``, or ``NOK - <why>``."""
        why = self.refusing or self._illness
        return f"NOK - {why}" if why else "OK"

    # --- What is written down --------------------------------------------------------------------------------------

    def _snapshot(self) -> Iterator[tuple[Any, ...]]:
        """The whole state as notes, for the journal. Taken in slices: topics may come and go in between."""
        # How far logs are durable, before the first channel is looked at: whoever reads this takes it that a message is
        # finished whose copy is durable elsewhere.
        marks = {
            topic: (topic.log.durable, topic.side.durable if topic.side is not None else topic.side_end)
            for topic in self.topics.values()
        }
        yield ("floor", *self._numbers.noted())
        yield from self.settings.notes()
        for topic in list(self.topics.values()):
            if topic.ephemeral or topic.exiting:
                continue
            try:
                yield from self._topic_notes(topic, *marks.get(topic, (topic.noted_durable, topic.noted_side)))
            except Exception as exc:
                # Without its notes the topic would be forgotten with the older files.
                raise StorageError(f"TOPIC({topic.name}): its state cannot be written down - {exc!r}") from exc

    def _topic_notes(self, topic: Topic, durable: int, side: int) -> Iterator[tuple[Any, ...]]:
        yield ("topic", topic.incarnation, topic.name, topic.log.first, topic.ceiling)
        yield ("durable", topic.incarnation, durable)
        yield ("pause", topic.incarnation, topic.paused)
        yield ("frozen", topic.incarnation, topic.pumped if topic.frozen else None)
        yield from topic.readers.notes()
        if side > SIDE:
            yield ("side", topic.incarnation, side)
        for channel in list(topic.channels.values()):
            if channel.ephemeral or channel.exiting:
                continue
            yield ("channel", topic.incarnation, channel.id, channel.name, topic.pumped, SIDE)
            yield ("channel_pause", channel.id, channel.paused)
            parts = channel.snapshot_parts()
            yield ("channel_state", channel.id, *next(parts))
            for ranges, rows in parts:
                yield ("channel_more", channel.id, ranges, rows)
            if channel.redrive is not None:
                yield channel.redrive.note()
        yield from self.settings.notes(topic)

    async def synced(self) -> None:
        """Returns when all that the journal was told so far is on the device."""
        done = self._loop.create_future()
        self.journal.when_synced(self.journal.noted, lambda: None if done.done() else done.set_result(None))
        await done

    async def as_safe_as(self, topic: Topic) -> None:
        """Returns when what was changed is as safe as a publish to the topic would be."""
        self.journal.flush()
        if topic.settings.durability == "fsync":
            await self.synced()
