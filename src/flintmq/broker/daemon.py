"""The broker: topics, listeners, metadata, start and stop.

A Broker owns everything that lives as long as the process: the data path and its lock, the journal, the topics, the
sessions' table, the timers. It decides when a loop turn's work is written, and when files may go. Messages are its
topics' business.

The data path holds, beside ``nsqd.dat`` for those who read it, one folder ``flintmq``:

    flintmq/format.json        format version, the node's random identity
    flintmq/node-ids.json      which node ids the messages were published under (ids.py)
    flintmq/journal/           what happened (journal.py)
    flintmq/topics/NAME@N/     a topic's segment files (segment.py); N is its incarnation; ``side`` its side log;
                               keys of segments that are gone (keys.py)
    flintmq/topics/NAME@N.lost a topic that the journal does not know, after damage to it
    flintmq.restoring          a backup that is being put back: no broker starts beside it
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

import flintmq
from flintmq.broker import takeover
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.dead_letters import finish_moved
from flintmq.broker.delivery.scan import Scan
from flintmq.broker.delivery.topic import RESERVE, Topic
from flintmq.broker.drain import REASON, DrainReport, drain
from flintmq.broker.limits import Connections
from flintmq.broker.net import sockets
from flintmq.broker.net.session import FinishLane, Lane, Session
from flintmq.broker.observe import stats
from flintmq.broker.peers import Peers
from flintmq.broker.settings import Settings
from flintmq.broker.storage.disk import Clock, Disk
from flintmq.broker.storage.ids import NodeIds
from flintmq.broker.storage.journal import ANOTHER_BOOT, SIDE, Journal, TopicState
from flintmq.broker.storage.log import Log, Store
from flintmq.broker.storage.mover import copies
from flintmq.errors import FlintError, FormatError, NotFoundError, OptionError, PublishError, StartError, StorageError
from flintmq.options import NsqdOptions
from flintmq.protocol.wire import NSQ_VERSION, valid_name

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.http.api import Api
    from flintmq.broker.net.auth import AuthServers

__all__ = ["Broker"]

logger = logging.getLogger(__name__)

FORMAT = 1
#: Finished messages reach the journal's file within this time, if nothing else writes it sooner.
JOURNAL_DELAY = 0.005
#: What one read takes from a socket.
RECEIVE_BYTES = 256 << 10
#: What is appended to the name of a topic's folder that is set aside.
LOST = ".lost"
#: A backup that is being restored (backup.py); it is renamed once it is whole.
RESTORING = "flintmq.restoring"
#: How often free space is looked at.
SPACE_INTERVAL = 1.0


class Broker:
    """``async with Broker(data_path=…) as broker`` runs an nsqd in this process; ``tcp_address`` says where."""

    def __init__(
        self,
        options: NsqdOptions | None = None,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        if options is None:
            # Inside somebody's process: only loopback, any free port, unless said otherwise.
            overrides = {"tcp_address": "127.0.0.1:0", "http_address": "", "https_address": "", **overrides}
            overrides["data_path"] = str(overrides.get("data_path", ""))
            options = NsqdOptions(**overrides)
        elif overrides:
            raise TypeError("give options, or single ones by keyword, not both")
        options.validate()
        self.options = options
        #: Called after ``options`` was replaced.
        self.options_changed: list[Callable[[], None]] = []
        self.disk = disk or Disk()
        self.system = self.disk.system
        self.clock: Clock = clock or self.system.clock
        self.topology_aware = "topology-aware-consumption" in options.enable_experiment
        self.store = Store(
            self.disk,
            self.clock,
            options,
            fatal=self._fatal,
            relieved=self._relieved,
            delay=lambda seconds, work: self._loop.call_later(seconds, work),
            recovered=self._recovered,
        )
        self.node_ids = NodeIds(self.store, options.id)
        self.topics: dict[str, Topic] = {}
        self.peers = Peers(self)
        self.options_changed.append(lambda: self.peers.set_addresses(self.options.nsqlookupd_tcp_addresses))
        self.sessions: dict[int, Session] = {}
        #: Whether one more may connect; None: as many as like to.
        self.connections = Connections.of(options, self.clock)
        self.start_time = 0
        self.started = 0
        #: Why publishes are refused; empty when they are not.
        self.refusing = ""
        self._illness = ""
        self._draining: asyncio.Task[DrainReport] | None = None
        #: Called by ``reload``: each reads again what it keeps in memory of a file, such as certificates.
        self.reloaders: list[Callable[[], None]] = [self.reload_certificates, self.peers.load_token]
        #: What single topics and channels do differently.
        self.settings = Settings(self)
        # One buffer that every session receives into, one after the other.
        self.receive_buffer = bytearray(RECEIVE_BYTES)
        self.receive_view = memoryview(self.receive_buffer)
        # The work of this loop turn.
        self._turn: dict[Topic, None] = {}
        self._flush_due = False
        self._touched: dict[Topic, None] = {}
        self._housekeeping_due = False
        self._pumps: dict[Channel, None] = {}
        self._answered: dict[Channel, None] = {}
        self._stalled: list[Callable[[], None]] = []
        self._lanes: dict[tuple[Topic, str], Lane] = {}
        self._syncing = False
        # Numbers.
        self._last_ident = 0
        self._next_incarnation = 1
        self._next_channel = 1
        self._floor = 0
        self.node = b""
        self.stopping = False
        self._closed: asyncio.Future[None] | None = None
        # Set at the start, by the options.
        self.tls: ssl.SSLContext | None = None
        self.auth: AuthServers | None = None
        self._server: asyncio.Server | None = None
        self._poller: sockets.Poller | None = None
        self._api: Api | None = None
        # Where it listens, as really bound.
        self._bound = self._http_bound = self._https_bound = ""
        self._lock = -1
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._metadata_due = False
        self._metadata_busy = False
        # For the statistics.
        self.connection_count = 0
        self.refused_count = 0
        #: Messages published, and finished, through lanes.
        self.lane_published = self.lane_finished = 0
        self.free_bytes = 0
        self.pauses = stats.Pauses()
        self._statsd = stats.Statsd(self)

    # --- Start and stop --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Broker:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the data path and listen. StartError says why it cannot."""
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self.later = self._loop.call_soon
        self.now = self._loop.time
        self.disk.attach(self._loop.call_soon_threadsafe)
        self.path = Path(self.options.data_path or os.getcwd())
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
        self._set_up_security()
        self._lock_path()
        try:
            self._open_path()
            self.peers.load_tls()
            self.peers.load_token()
            # Before anybody can connect: no first message is missed.
            declared = self.settings.declare()
            for topic in declared if self.options.nsqlookupd_tcp_addresses else ():
                topic.gate(True)
            await self._listen()
        except (OSError, FlintError) as exc:
            await self._abandon()
            if isinstance(exc, FlintError):
                raise exc if isinstance(exc, StartError) else StartError(str(exc)) from exc
            raise StartError(f"{exc}") from exc
        self.start_time = self.clock.wall() // 1_000_000_000
        self.started = self.clock.now()
        self.pauses.start()
        self._statsd.start()
        self._every("scan", self.options.queue_scan_interval / 1e9, lambda: self.scan.tick(self.clock.now))
        self._every("sync", self.options.sync_timeout / 1e9, self._sync)
        self._every("space", SPACE_INTERVAL, self.look_at_space)
        self.look_at_space()
        self.structure_changed(False)
        self.peers.start()
        for topic in declared:
            self.peers.ask_for_channels(topic)

    def _set_up_security(self) -> None:
        if self.options.tls_cert:
            from flintmq.broker.net import tls

            try:
                self.tls = tls.server_context(self.options)
            except OptionError as exc:
                raise StartError(str(exc)) from exc
        if self.options.auth_http_addresses:
            from flintmq.broker.net.auth import AuthServers

            self.auth = AuthServers(self.options)

    def reload_certificates(self) -> None:
        """Connections that come from now on get what is in the files. If that is no good, all stays as it was."""
        if self.tls is None or self.stopping:
            return
        from flintmq.broker.net import tls

        def done(context: Any, error: BaseException | None) -> None:
            if error is not None:
                logger.error("TLS: the certificates are not replaced - %s", error)
            else:
                self.tls = context
                logger.info("TLS: the certificates were read again")

        self.disk.submit(lambda: tls.server_context(self.options), done)

    def _lock_path(self) -> None:
        try:
            fd = self.system.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise StartError(f"failed to lock data-path: open {self.path}: {_reason(exc)}") from exc
        try:
            self.system.lock(fd)
        except OSError as exc:
            self.system.close(fd)
            raise StartError(
                f"failed to lock data-path: cannot flock directory {self.path} - {_reason(exc)} "
                "(possibly in use by another instance of nsqd)"
            ) from exc
        self._lock = fd

    async def _listen(self) -> None:
        if sockets.available():
            self._poller = sockets.Poller(self._loop, self._turned, self.system)
        sock, self._bound = self._bind(self.options.tcp_address)
        if self._poller is not None:
            self._poller.listen(sock, self._new_session)
        elif sock.family == socket.AF_UNIX:
            self._server = await self._loop.create_unix_server(self._new_session, sock=sock, backlog=1024)
        else:
            self._server = await self._loop.create_server(self._new_session, sock=sock, backlog=1024)
        logger.info("TCP: listening on %s", self.tcp_address)
        await self._listen_http()

    async def _listen_http(self) -> None:
        secure = self.options.https_address if self.options.tls_cert else ""
        if not self.options.http_address and not secure:
            return
        # Late: what only speaks TCP need not pay for it.
        from flintmq.broker.http.api import Api

        self._api = Api(self)
        if secure:
            # First: what the plain port may have to say is where this one is.
            sock, self._https_bound = self._bind(secure)
            await self._api.listen_tls(sock)
        if self.options.http_address:
            sock, self._http_bound = self._bind(self.options.http_address)
            await self._api.listen(sock, self._poller)
            logger.info("HTTP: listening on %s", self._http_bound)
        if secure:
            logger.info("HTTPS: listening on %s", self._https_bound)

    def _bind(self, address: str) -> tuple[socket.socket, str]:
        """A listening socket, and where it really is."""
        try:
            sock = _bind(address)
        except (OSError, ValueError) as exc:
            raise StartError(f"listen ({address}) failed - {_reason(exc)}") from exc
        name = sock.getsockname()
        if isinstance(name, str):
            return sock, name
        return sock, f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def _new_session(self) -> Session:
        return Session(self)

    def about(self) -> dict[str, Any]:
        """What a client is told that asks for more than NSQ says."""
        return {"version": flintmq.__version__, "node": self.node.hex(), "log": True, "keys": True}

    @property
    def http_port(self) -> int:
        """Where others reach our HTTP port; 0 if it is not served, or not on a port."""
        return self.options.broadcast_http_port or split_address(self.http_address)[1] if self.http_address else 0

    @property
    def tcp_address(self) -> str:
        """Where clients connect: ``host:port`` as really bound, or the path of a unix socket."""
        return self._bound or self.options.tcp_address

    @property
    def http_address(self) -> str:
        """The same for HTTP; empty if it is not served."""
        return self._http_bound

    @property
    def https_address(self) -> str:
        return self._https_bound

    def change_options(self, **changes: Any) -> None:
        """Replace the options by a copy with these changes, and tell who asked to know."""
        options = dataclasses.replace(self.options, **changes)
        options.validate()
        Settings.check(options)
        self.options = options
        for changed in self.options_changed:
            changed()

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
        await self._statsd.stop()
        # What was taken is written and answered; then nothing more is taken.
        self.flush()
        await self._close_listeners()
        self.flush()
        # What threads still do must end before the files are closed; their answers arrive in the next turns.
        for topic in self.topics.values():
            for channel in topic.channels.values():
                channel.settle()
        self.disk.refuse_work()
        await self._loop.run_in_executor(None, self.disk.close)
        await asyncio.sleep(0)
        try:
            self._write_metadata()
        except OSError as exc:
            # Only others read it: no reason to keep less of what we need.
            logger.error("NSQ: cannot write nsqd.dat - %s", exc)
        try:
            for topic in self.topics.values():
                topic.close()
                topic.log.write_all()
                topic.log.sync_now()
                topic.log.close()
                if topic.keys is not None:
                    topic.keys.close()
                if topic.side is not None:
                    topic.side.write_all()
                    topic.side.sync_now()
                    topic.side.close()
                if not topic.ephemeral:
                    self.journal.note("durable", topic.incarnation, topic.log.durable)
                    self.journal.note("end", topic.incarnation, topic.log.end, topic.side_end)
            self.journal.close(clean=True)
        except OSError as exc:
            self._fatal(StorageError(f"cannot save everything: {exc}"))
        self._unlock()
        logger.info("NSQ: bye")
        if not self._closed.done():
            self._closed.set_result(None)

    def drain(self, timeout: float | None = None) -> asyncio.Task[DrainReport]:
        """Refuse publishes, let consumers empty the node, then stop; the report says what is left.

        After ``timeout`` seconds (0: never; None: ``--drain-timeout``) it stops whatever is left. ``stop`` ends it at
        once. A second call gives the same task, which need not be awaited.
        """
        if self._draining is None:
            self.refusing = REASON
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
        await self.peers.stop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._poller is not None:
            self._poller.stop_listening()
        if self._api is not None:
            await self._api.close()
        self._disconnect()
        # Let the transports notice, so that no socket outlives the broker.
        for _ in range(3):
            await asyncio.sleep(0)
        self._close_poller()
        for bound in (self._bound, self._http_bound):
            if bound and split_address(bound)[0] is None:
                with contextlib.suppress(OSError):
                    os.unlink(bound)

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._poller is not None:
            self._poller.stop_listening()
        if self._api is not None:
            self._api.drop()
        for session in list(self.sessions.values()):
            session.drop()

    def _close_poller(self) -> None:
        if self._poller is not None:
            self._poller.close()
            self._poller = None

    def kill(self) -> None:
        """Stop as a crash would: nothing is flushed, no file is closed cleanly. For tests."""
        if self._closed is None or self._closed.done():
            return
        self.stopping = True
        self._statsd.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.peers.drop()
        self._disconnect()
        self._close_poller()
        self.disk.close()
        for topic in self.topics.values():
            topic.exiting = True
            topic.log.abandon()
            if topic.side is not None:
                topic.side.abandon()
        self.journal.close(clean=False)
        self._unlock()
        self._closed.set_result(None)

    async def _abandon(self) -> None:
        """The start failed: give everything back."""
        await self._close_listeners()
        self.disk.close()
        for topic in self.topics.values():
            topic.log.abandon()
        self.journal.close(clean=False)
        self._unlock()
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _unlock(self) -> None:
        """The last thing that every way to stop does."""
        self.pauses.stop()
        if self._lock >= 0:
            self.system.close(self._lock)
            self._lock = -1

    def _fatal(self, error: BaseException) -> None:
        """Storage can no longer be trusted: stop at once, say why, save nothing that could be wrong."""
        logger.critical("%s", error)
        if self._closed is None or self._closed.done():
            return
        self.stopping = True
        self._statsd.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self.peers.drop()
        self._disconnect()
        self.later(self._close_poller)
        for topic in self.topics.values():
            topic.exiting = True
            topic.log.closed = True
        self.journal.closed = True
        self._unlock()
        self._closed.set_exception(error)
        # Somebody may never ask; that must not look like a lost exception.
        self._closed.exception()

    def _every(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers[name] = self._loop.call_later(seconds, run)
            work()

        self._timers[name] = self._loop.call_later(seconds, run)

    # --- The data path ---------------------------------------------------------------------------------------------

    def _open_path(self) -> None:
        root = self.path / "flintmq"
        pending = self.path / "flintmq.tmp"
        moving = root / "takeover-pending"
        if self.disk.exists(self.path / RESTORING):
            # Starting with nothing would look as if the backup had been empty.
            raise StartError(f"{self.path / RESTORING} is a restore that was cut off: run it again, or remove it")
        if not self.disk.exists(root):
            _remove_tree(self.disk, pending)
            self._make_root(pending)
            if takeover.found(self.path):
                self._take_over(pending)
            self.disk.rename(pending, root)
        # Also when it was there: a kill may have come right after the rename.
        self.disk.sync_folder(self.path)
        if self.disk.exists(moving):
            # The old files are ours now: out of the way with them, also after a crash half-way.
            if takeover.found(self.path):
                data = takeover.read(self.path, max_msg_size=self.options.max_msg_size)
                aside = takeover.move_aside(data, self.path)
                logger.info("NSQ: the files of the old nsqd were moved to %s", aside)
            self.disk.remove(moving)
            self.disk.sync_folder(root)
        fd = self.disk.open(root / "format.json")
        try:
            about = msgspec.json.decode(self.disk.read(fd, 4096, 0))
        except msgspec.DecodeError as exc:
            raise FormatError(f"{root / 'format.json'} is damaged - {exc}") from exc
        finally:
            self.disk.close_file(fd)
        if about["format"] > FORMAT:
            raise FormatError(f"{root} was written by a newer version of flintmq (format {about['format']})")
        self.node = bytes.fromhex(about["node"])
        self._recover(root)

    def _make_root(self, root: Path) -> None:
        for folder in (root, root / "journal", root / "topics"):
            self.disk.make_folder(folder)
        about = {"format": FORMAT, "node": secrets.token_hex(16)}
        fd = self.disk.open(root / "format.json", create=True)
        self.disk.write(fd, [msgspec.json.encode(about)], 0)
        self.disk.sync(fd)
        self.disk.close_file(fd)
        for folder in (root / "journal", root / "topics", root):
            self.disk.sync_folder(folder)

    def _recover(self, root: Path) -> None:
        state = self.journal.recover()
        self._floor = state.floor
        self._next_incarnation = state.next_incarnation
        self._next_channel = state.next_channel
        self.settings.restore(state)
        self.node_ids.read(root)
        clean = state.clean
        opened = [self._open_topic(root, topic_state, clean) for topic_state in state.topics.values()]
        finish_moved(opened, state)
        for topic, topic_state in zip(opened, state.topics.values(), strict=True):
            self._restore_topic(topic, topic_state, state.boot == self.clock.boot_id())
        self.node_ids.take_up(root, opened)
        known = {topic.folder for topic in opened}
        for name in self.disk.names(root / "topics"):
            if root / "topics" / name not in known and not name.endswith(LOST):
                self._clear_away(root / "topics" / name, state.next_incarnation)
        if not clean:
            # What is called durable from here on must be: a folder's own entry too.
            self.disk.sync_folder(root / "topics")
        self.journal.start(state)
        for topic in self.topics.values():
            # The old ceiling was durable; after an unclean stop the log goes on there, so a new one is needed.
            topic.grant(topic.ceiling, 0)
            if clean:
                # Otherwise the snapshot says so, together with what follows from it.
                self.journal.note("durable", topic.incarnation, topic.log.durable)
            # Ephemeral channels are gone: where the topic stands still now, the next start must know.
            topic.note_frozen()
            self.turn(topic)
        self.journal.sync_now()
        if clean:
            # In slices, when the loop runs: what older files say is said again in one, and they can go.
            self.later(self.journal.take_snapshot)
        else:
            self.journal.secure()

    def _clear_away(self, folder: Path, next_incarnation: int) -> None:
        """A topic's folder that the journal does not know.

        It was deleted; or it was made right before a crash, and nothing in it was ever answered for. If there are
        messages in one that was never heard of, though, it is the journal that is not whole: then they are set aside.
        """
        incarnation = folder.name.rpartition("@")[2]
        heard_of = incarnation.isdigit() and int(incarnation) < next_incarnation
        if heard_of or not any(name.endswith(".seg") for name in self.disk.names(folder)):
            _remove_tree(self.disk, folder)
            return
        lost = folder.with_name(folder.name + LOST)
        logger.error("NSQ: the journal does not know %s, it is set aside as %s", folder.name, lost)
        self.disk.rename(folder, lost)

    def _open_topic(self, root: Path, state: TopicState, clean: bool) -> Topic:
        folder = root / "topics" / f"{state.name}@{state.incarnation}"
        if not self.disk.exists(folder):
            self.disk.make_folder(folder)
            self.disk.sync_folder(root / "topics")
        topic = Topic(self, state.name, state.incarnation, state.base, folder)
        after = None if clean and state.end is not None else state.ceiling
        topic.log.recover(state.durable, after)
        if after is None and state.end is not None:
            # Messages that were finished before they were ever written leave no trace but the end.
            topic.log.end = topic.log.written = topic.log.durable = max(topic.log.end, state.end)
        topic.restore_keys()
        topic.ceiling = state.ceiling
        topic.paused = state.paused
        topic.readers.restore(state.readers)
        if self.disk.exists(folder / "side"):
            topic.side = topic._new_log(folder / "side", SIDE)
            topic.side.recover(state.side_end, None)
            topic.side.end = topic.side.written = topic.side.durable = max(topic.side.end, state.side_end)
        self.topics[topic.name] = topic
        return topic

    def _restore_topic(self, topic: Topic, state: TopicState, same_boot: bool) -> None:
        spans = topic.log.spans()
        end = topic.log.end
        topic.pumped = end if state.frozen is None else min(state.frozen, end)
        if state.frozen is not None:
            # A gap right behind the mark is no backlog.
            behind = [first for first, stop in spans if stop > topic.pumped]
            topic.pumped = max(topic.pumped, behind[0]) if behind else end
            topic.gaps.extend(_between(spans, topic.pumped, end))
        addressed = side_spans(topic.side) if topic.side is not None else {}
        copied = topic.mover.restore(copies(topic.side)) if topic.side is not None else []
        now, wall = self.clock.now(), self.clock.wall()
        for channel_state in state.channels.values():
            channel = Channel(topic, channel_state.name, channel_state.id, topic.pumped)
            channel.paused = channel_state.paused
            mine = [*copied, *_before(spans, topic.pumped), *addressed.get(channel_state.id, [])]
            back = channel_state.back
            for seq, (attempts, due, due_wall) in back.items():
                if due == ANOTHER_BOOT or (due and not same_boot):
                    back[seq] = (attempts, now + due_wall - wall, due_wall)
            topic.channels[channel.name] = channel
            # Gone through anew for each: a list of a million of them would take more memory than all else.
            channel.restore(channel_state.outstanding.within(mine), back, topic.log.deferrals(topic.pumped))
        deferrals = topic.log.deferrals(topic.pumped)
        topic.log.deferred.extend((seq, due) for seq, due in deferrals if seq >= topic.pumped)

    def _take_over(self, root: Path) -> None:
        """Build our files from those of a Go nsqd; nothing of its own is touched yet."""
        data = takeover.read(self.path, max_msg_size=self.options.max_msg_size)
        logger.info("NSQ: taking over the data path of another nsqd, %d topics", len(data.topics))
        importer = takeover.Importer(self.disk, self.clock, self.options, root)
        for topic in data.topics:
            importer.topic(topic)
        importer.finish()
        for line in data.damage:
            logger.error("NSQ: %s", line)
        for topic in data.topics:
            for queue in (topic.queue, *(channel.queue for channel in topic.channels)):
                for line in queue.damage:
                    logger.error("NSQ: %s", line)
        fd = self.disk.open(root / "takeover-pending", create=True)
        self.disk.sync(fd)
        self.disk.close_file(fd)
        self.disk.sync_folder(root)

    # --- Topics ----------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic, made if need be. PublishError if it cannot be made."""
        topic = self.topics.get(name)
        return topic if topic is not None else self._create_topic(name)

    def _create_topic(self, name: str) -> Topic:
        if not valid_name(name):
            raise ValueError(f"not a topic name: {name!r}")
        incarnation = self._next_incarnation
        self._next_incarnation += 1
        # Seqs must never repeat: not those of a topic of this name that was deleted, not those lost in a crash.
        base = max(self.clock.wall() // 1000, self._floor)
        folder = None
        topic_is_ephemeral = name.endswith("#ephemeral")
        if not topic_is_ephemeral:
            folder = self.path / "flintmq" / "topics" / f"{name}@{incarnation}"
            try:
                self.disk.make_folder(folder)
            except OSError as exc:
                self.unwell(f"cannot make a folder: {_reason(exc)}")
                raise PublishError(_reason(exc)) from exc
        topic = Topic(self, name, incarnation, base, folder)
        self.topics[name] = topic
        if topic_is_ephemeral:
            topic.grant(base + RESERVE, 0)
        else:
            position = self.journal.note("topic", incarnation, name, base, base + RESERVE)
            topic.grant(base + RESERVE, position)
        logger.info("TOPIC(%s): created", name)
        self.structure_changed(topic_is_ephemeral)
        self.peers.made(name)
        self.peers.ask_for_channels(topic)
        return topic

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
        self._turn.pop(topic, None)
        self._touched.pop(topic, None)
        for verb in ("PUB", "MPUB"):
            self._lanes.pop((topic, verb), None)
        self._floor = max(self._floor, topic.ceiling, topic.log.end)
        if not topic.ephemeral:
            position = self.journal.note("untopic", topic.incarnation, self._floor)
            # Its files go only when it is certain that it is gone.
            self.journal.when_synced(position, functools.partial(self._discard, topic))
        self.structure_changed(topic.ephemeral)
        self.peers.deleted(name)

    def _discard(self, topic: Topic) -> None:
        for storage in (topic.side, topic.log):
            if storage is not None:
                storage.discard()
        if topic.folder is not None:
            try:
                _remove_tree(self.disk, topic.folder)
            except OSError as exc:
                logger.error("TOPIC(%s): cannot remove %s - %s", topic.name, topic.folder, exc)

    def next_channel_id(self) -> int:
        self._next_channel += 1
        return self._next_channel - 1

    # --- Sessions --------------------------------------------------------------------------------------------------

    def next_ident(self) -> int:
        """A number for a session that no other connected one has; 0 is nobody."""
        while True:
            self._last_ident = self._last_ident % 0xFFFF_FFFE + 1
            if self._last_ident not in self.sessions:
                return self._last_ident

    def lane(self, topic: Topic, verb: str) -> Lane | None:
        """The short way for publishes, where sockets are read without asyncio's help."""
        if self._poller is None:
            return None
        lane = self._lanes.get((topic, verb))
        if lane is None:
            lane = self._lanes[topic, verb] = Lane(self, topic, verb)
        return lane

    def finish_lane(self, channel: Channel) -> FinishLane:
        """The short way for FINs; all of a channel's consumers share it."""
        if channel.lane is None:
            channel.lane = FinishLane(self, channel)
        return channel.lane

    def connected(self, session: Session) -> None:
        self.connection_count += 1
        self.sessions[session.ident] = session
        if self.stopping:
            session.drop()
        elif self.connections is not None:
            # Before IDENTIFY the host name is the address.
            reason = self.connections.admit(session.ident, session.hostname)
            if reason:
                session.turn_away(reason)

    def disconnected(self, session: Session) -> None:
        self.sessions.pop(session.ident, None)
        if self.connections is not None:
            self.connections.release(session.ident)

    def when_relieved(self, then: Callable[[], None]) -> None:
        self._stalled.append(then)

    def _relieved(self) -> None:
        stalled, self._stalled = self._stalled, []
        for then in stalled:
            self.later(then)

    # --- The loop turn ---------------------------------------------------------------------------------------------

    def turn(self, topic: Topic) -> None:
        """The topic has something to write or to hand on: at the end of this loop turn."""
        self._turn[topic] = None
        if not self._flush_due:
            self._flush_due = True
            if self._poller is None or not self._poller.turning:
                self.later(self.flush)

    def answered(self, channel: Channel) -> None:
        """Consumers may take more: pump at the end of the turn, when what was published in it can be sent as well."""
        self._answered[channel] = None

    def _turned(self) -> None:
        """All that could be read in this turn has been."""
        if self._flush_due:
            self.flush()
        if self._answered:
            channels, self._answered = self._answered, {}
            for channel in channels:
                channel.pump()

    def flush(self) -> None:
        """The end of a loop turn: one write per topic for all its publishers, then their answers, then deliveries."""
        self._flush_due = False
        topics, self._turn = self._turn, {}
        for topic in topics:
            if not topic.exiting:
                topic.flush()
        if self.journal.pending and not self._housekeeping_due:
            self._housekeeping_due = True
            self._timers["house"] = self._loop.call_later(JOURNAL_DELAY, self._housekeeping)

    def soon(self, channel: Channel) -> None:
        """Messages of the channel were finished or put back: the journal and the memory are seen to soon."""
        self._touched[channel.topic] = None
        if not self._housekeeping_due:
            self._housekeeping_due = True
            self._timers["house"] = self._loop.call_later(JOURNAL_DELAY, self._housekeeping)

    def _housekeeping(self) -> None:
        self._housekeeping_due = False
        self._timers.pop("house", None)
        self.journal.flush()
        topics, self._touched = self._touched, {}
        for topic in topics:
            if not topic.exiting:
                topic.trim()

    def pump_later(self, channel: Channel) -> None:
        """The channel has sent its share of this turn and goes on in the next."""
        if channel not in self._pumps:
            self._pumps[channel] = None
            self.later(self._pump_again)

    def _pump_again(self) -> None:
        channels, self._pumps = self._pumps, {}
        for channel in channels:
            channel.pump()

    # --- Syncing, freeing ------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Every ``--sync-timeout``: logs, then the journal, then the files that nobody needs any more."""
        if self._syncing or self.stopping:
            return
        for topic in self.topics.values():
            if topic.log.dirty:
                topic.log.sync()
            if topic.side is not None and topic.side.dirty:
                topic.side.sync()
            if not topic.ephemeral and topic.log.durable > topic.noted_durable:
                topic.noted_durable = topic.log.durable
                self.journal.note("durable", topic.incarnation, topic.log.durable)
            if topic.side is not None and not topic.ephemeral and topic.side.durable > topic.noted_side:
                # Before its files go: no number of it must be used twice.
                topic.noted_side = topic.side.durable
                self.journal.note("side", topic.incarnation, topic.side.durable)
            if topic.settings.ttl:
                topic.expiry.look()
            if topic.log.memory.pinned:
                topic.trim()
        self._free()
        self.store.tidy()

    def _free(self) -> None:
        freeable: list[tuple[Log, int, Callable[[], int]]] = []
        for topic in self.topics.values():
            if topic.keys is not None:
                topic.keys.trim()
            if topic.ephemeral:
                continue
            if topic.log.segments:
                freeable.append((topic.log, topic.let_go(), topic.first_kept))
            if topic.side is not None and topic.side.segments:
                freeable.append((topic.side, topic.first_side_needed(), topic.first_side_needed))
        self.journal.flush()

        def free() -> None:
            self._syncing = False
            for storage, seq, first_kept in freeable:
                if not storage.closed:
                    storage.free(seq, first_kept)

        self._syncing = True
        self.journal.when_synced(self.journal.noted, free)

    def look_at_space(self) -> None:
        """Refuse publishes from here on, or take them again, by what is free on the disk."""
        if self._draining is not None:
            return
        try:
            free = self.disk.free(self.path)
        except OSError as exc:
            logger.error("NSQ: cannot look at the disk - %s", _reason(exc))
            return
        self.free_bytes = free
        if free < 2 * self.options.disk_reserve:
            self._make_room(2 * self.options.disk_reserve - free)
        if free < self.options.disk_reserve:
            if not self.refusing:
                logger.error("NSQ: the disk is nearly full, publishes are refused (%d bytes free)", free)
            self.refusing = (
                f"the disk is nearly full: {free} bytes free, {self.options.disk_reserve} are kept in reserve"
            )
        else:
            if self.refusing:
                logger.info("NSQ: there is room on the disk again")
            self.refusing = ""

    def _make_room(self, size: int) -> None:
        """The disk gets full: what is kept by retention alone goes first, the oldest of all topics."""
        spare = [
            (segment.index_times[0] if segment.index_times else 0, topic.name, segment.size, stop)
            for topic in self.topics.values()
            for segment, stop in topic.retention.spare()
        ]
        for _, name, segment_size, stop in sorted(spare):
            if size <= 0:
                break
            logger.warning("TOPIC(%s): the disk is nearly full, a file goes before its time (up to %d)", name, stop)
            self.topics[name].retention.give_up(stop)
            size -= segment_size
        if spare and not self._syncing and not self.stopping:
            self._free()

    def unwell(self, reason: str) -> None:
        """A write failed: so it stays until one succeeds."""
        self._illness = reason
        self.store.ill = True

    def _recovered(self) -> None:
        self._illness = ""
        self.store.ill = False

    @property
    def health(self) -> str:
        """``OK``, or ``NOK - <why>``."""
        reason = self.refusing or self._illness
        return f"NOK - {reason}" if reason else "OK"

    # --- What is written down --------------------------------------------------------------------------------------

    def _snapshot(self) -> Iterator[tuple[Any, ...]]:
        """The whole state as notes, for the journal. Taken in slices: topics may come and go in between."""
        yield ("floor", self._floor, self._next_incarnation, self._next_channel)
        yield from self.settings.notes()
        for topic in list(self.topics.values()):
            if topic.ephemeral or topic.exiting:
                continue
            yield ("topic", topic.incarnation, topic.name, topic.log.first, topic.ceiling)
            yield ("durable", topic.incarnation, topic.log.durable)
            yield ("pause", topic.incarnation, topic.paused)
            yield ("frozen", topic.incarnation, topic.pumped if topic.frozen else None)
            yield from topic.readers.notes()
            if topic.side is not None:
                yield ("side", topic.incarnation, topic.side.durable)
            for channel in list(topic.channels.values()):
                if channel.ephemeral or channel.exiting:
                    continue
                yield ("channel", topic.incarnation, channel.id, channel.name, topic.pumped, SIDE)
                yield ("channel_pause", channel.id, channel.paused)
                yield ("channel_state", channel.id, *channel.snapshot())
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

    def structure_changed(self, ephemeral: bool) -> None:
        """Topics or channels came, went or were paused: the journal has it at once, ``nsqd.dat`` follows soon."""
        self.journal.flush()
        if ephemeral or self.stopping or self._metadata_due:
            return
        self._metadata_due = True
        self._timers["metadata"] = self._loop.call_later(0.05, self._save_metadata)

    def _save_metadata(self) -> None:
        self._metadata_due = False
        self._timers.pop("metadata", None)
        if self._metadata_busy:
            self.structure_changed(False)
            return
        self._metadata_busy = True
        content = self._metadata()

        def done(_: None, error: BaseException | None) -> None:
            self._metadata_busy = False
            if error is not None:
                logger.error("NSQ: cannot write nsqd.dat - %s", error)

        self.disk.submit(lambda: self._write_metadata(content), done)

    def _metadata(self) -> bytes:
        """Topics and channels in NSQ's own form; empty lists are null there."""
        topics = [
            {
                "name": topic.name,
                "paused": topic.paused,
                "channels": [
                    {"name": channel.name, "paused": channel.paused}
                    for channel in topic.channels.values()
                    if not channel.ephemeral
                ]
                or None,
            }
            for topic in self.topics.values()
            if not topic.ephemeral
        ]
        return msgspec.json.encode({"topics": topics or None, "version": NSQ_VERSION})

    def _write_metadata(self, content: bytes | None = None) -> None:
        temporary = self.path / f"nsqd.dat.{secrets.randbelow(1 << 31)}.tmp"
        fd = self.disk.open(temporary, create=True)
        try:
            self.disk.write(fd, [content if content is not None else self._metadata()], 0)
            self.disk.sync(fd)
        finally:
            self.disk.close_file(fd)
        self.disk.rename(temporary, self.path / "nsqd.dat")


def side_spans(side: Log) -> dict[int, list[tuple[int, int]]]:
    """Which seqs of a side log are for which channel."""
    found: dict[int, list[tuple[int, int]]] = {}
    for first, count, extra in side.addressed():
        # 0 is nobody in particular: the copy of an old message.
        spans = found.setdefault(int.from_bytes(extra[:4], "big"), [])
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], first + count)
        else:
            spans.append((first, first + count))
    return found


def _before(spans: list[tuple[int, int]], stop: int) -> Iterator[tuple[int, int]]:
    for first, last in spans:
        if first < stop:
            yield first, min(last, stop)


def _between(spans: list[tuple[int, int]], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """What of ``first`` … ``stop - 1`` no span holds."""
    for start, end in spans:
        if first < start:
            yield first, start
        first = max(first, end)
    if first < stop:
        yield first, stop


def _bind(address: str) -> socket.socket:
    host, port = split_address(address)
    if host is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: Any = address
    else:
        # An empty host is every address, as in Go.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if host:
            family, _, _, _, where = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)[0]
        else:
            where = ("", port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def split_address(address: str) -> tuple[str | None, int]:
    """``host:port`` taken apart; the host is None if it is the path of a unix socket instead."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in port:
        return None, 0
    return host.removeprefix("[").removesuffix("]"), int(port)


def _remove_tree(disk: Disk, path: Path) -> None:
    if not disk.exists(path):
        return
    for name in disk.names(path):
        child = path / name
        try:
            disk.remove(child)
        except FileNotFoundError:
            # A thread was quicker.
            continue
        except (IsADirectoryError, PermissionError):
            _remove_tree(disk, child)
    disk.remove_folder(path)


def _reason(exc: BaseException) -> str:
    """The operating system's own words, in lower case as Go prints them."""
    if isinstance(exc, OSError) and exc.errno is not None and exc.errno in errno.errorcode:
        return os.strerror(exc.errno).lower()
    return str(exc)
