"""What a journal says, note by note, and the state that it adds up to.

A note is a tagged MessagePack list ``[verb, …]``: a struct here for each verb, whose fields are the rest of the list in
order. Every note states what is, not what changed, so that one that is applied twice changes nothing. A State is what
the notes of a snapshot and of the journals after it add up to. Files are journal.py's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from flintmq.broker.storage.disk import unpack_numbers
from flintmq.broker.storage.ranges import Ranges
from flintmq.errors import UNREADABLE, FormatError
from flintmq.protocol.wire import valid_name

#: Seqs from here on are those of a topic's side log: messages for one channel only.
SIDE = 1 << 53
#: Beyond every seq.
NEVER = 1 << 54
#: Stands for a due time on a clock that no longer runs.
ANOTHER_BOOT = -1

Key = TypeVar("Key")


class Note(msgspec.Struct, array_like=True, tag_field="verb"):
    """Something that is so."""


class TopicNote(Note, tag="topic"):
    """A topic was created: no seq of it is below ``base``, and none at or beyond ``ceiling`` is used yet."""

    incarnation: int
    name: str
    base: int
    ceiling: int


class CeilingNote(Note, tag="ceiling"):
    """Seqs below it may be used."""

    incarnation: int
    ceiling: int


class DurableNote(Note, tag="durable"):
    """Everything before this seq is on the device."""

    incarnation: int
    seq: int


class FrozenNote(Note, tag="frozen"):
    """``pumped`` stands still here; None: it moves with the log."""

    incarnation: int
    seq: int | None


class PauseNote(Note, tag="pause"):
    """A topic is paused, or no longer."""

    incarnation: int
    paused: bool


class UntopicNote(Note, tag="untopic"):
    """A topic was deleted. No new log starts below ``floor``."""

    incarnation: int
    floor: int


class ChannelNote(Note, tag="channel"):
    """A channel was created: everything from ``start`` on is for it, and of the side log from ``side_start`` on."""

    incarnation: int
    channel: int
    name: str
    start: int
    side_start: int


class UnchannelNote(Note, tag="unchannel"):
    """A channel was deleted."""

    incarnation: int
    channel: int


class ChannelPauseNote(Note, tag="channel_pause"):
    """A channel is paused, or no longer."""

    channel: int
    paused: bool


class ChannelStateNote(Note, tag="channel_state"):
    """All that is outstanding in a channel, as pairs (first, stop), and rows of what of it was delivered before."""

    channel: int
    ranges: bytes
    back: bytes


class ChannelMoreNote(Note, tag="channel_more"):
    """More of a channel's state, where there is too much for one note: what is outstanding follows what was."""

    channel: int
    ranges: bytes
    back: bytes


class RedriveNote(Note, tag="redrive"):
    """What brings dead letters back to a channel, or did last: see ``Redrive.note``."""

    channel: int
    topic: str
    source: str
    most: int
    rate: int | float | None
    stop: int | None
    moved: int
    running: bool
    error: str | None
    reason: str = ""


class SettingsNote(Note, tag="settings"):
    """All that is set live for a topic (empty name), or for this name or pattern of its channels."""

    incarnation: int
    channel: str
    values: dict[str, Any]


class PatternNote(Note, tag="pattern"):
    """All that is set live for a pattern of topics, or of channels of such."""

    topic: str
    channel: str
    values: dict[str, Any]


class SkipNote(Note, tag="skip"):
    """The backlog of a topic was dropped: these are for no channel."""

    incarnation: int
    first: int
    stop: int


class EmptyNote(Note, tag="empty"):
    """A channel was emptied up to here."""

    channel: int
    stop: int
    side_stop: int


class SeekNote(Note, tag="seek"):
    """All from ``start`` on is to be delivered, and of what lies before it ``older``; the channel's own stay."""

    channel: int
    start: int
    older: bytes


class ReaderNote(Note, tag="reader"):
    """A reader of the log is at ``offset``, where it moved at a time."""

    incarnation: int
    name: str
    offset: int
    moved: int


class UnreaderNote(Note, tag="unreader"):
    """A reader is gone."""

    incarnation: int
    name: str


class OpenNote(Note, tag="open"):
    """A file was begun: due times are on the clock of this boot, and no clean stop counts any more."""

    boot: bytes


class FloorNote(Note, tag="floor"):
    """No new log starts below ``floor``, and these numbers come next."""

    floor: int
    next_incarnation: int
    next_channel: int


class EndNote(Note, tag="end"):
    """Where log and side log ended, at a clean stop."""

    incarnation: int
    end: int
    side_end: int


class SideNote(Note, tag="side"):
    """Everything before this seq of the side log is on the device, and none before ``next`` is used from now on."""

    incarnation: int
    seq: int
    next: int = SIDE


class CleanNote(Note, tag="clean"):
    """A clean stop: nothing comes after it."""


#: All of them, for the decoder.
AnyNote = (
    TopicNote
    | CeilingNote
    | DurableNote
    | FrozenNote
    | PauseNote
    | UntopicNote
    | ChannelNote
    | UnchannelNote
    | ChannelPauseNote
    | ChannelStateNote
    | ChannelMoreNote
    | RedriveNote
    | SettingsNote
    | PatternNote
    | SkipNote
    | EmptyNote
    | SeekNote
    | ReaderNote
    | UnreaderNote
    | OpenNote
    | FloorNote
    | EndNote
    | SideNote
    | CleanNote
)

NOTES: dict[str, Callable[..., Note]] = {
    "topic": TopicNote,
    "ceiling": CeilingNote,
    "durable": DurableNote,
    "frozen": FrozenNote,
    "pause": PauseNote,
    "untopic": UntopicNote,
    "channel": ChannelNote,
    "unchannel": UnchannelNote,
    "channel_pause": ChannelPauseNote,
    "channel_state": ChannelStateNote,
    "channel_more": ChannelMoreNote,
    "redrive": RedriveNote,
    "settings": SettingsNote,
    "pattern": PatternNote,
    "skip": SkipNote,
    "empty": EmptyNote,
    "seek": SeekNote,
    "reader": ReaderNote,
    "unreader": UnreaderNote,
    "open": OpenNote,
    "floor": FloorNote,
    "end": EndNote,
    "side": SideNote,
    "clean": CleanNote,
}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyNote)


def encode(note: Note) -> bytes:
    return _encoder.encode(note)


def decode(data: bytes) -> Note:
    """FormatError if it is of no known kind, or names something that cannot have this name."""
    try:
        note: Note = _decoder.decode(data)
    except UNREADABLE as exc:
        raise FormatError(f"a journal entry cannot be understood, it may be of a newer version - {exc}") from exc
    # A topic's name is a part of the path of its folder, and a file may come from elsewhere.
    names = _NAMED.get(type(note))
    if names is not None and not all(valid_name(name) for name in names(note)):
        raise FormatError(f"a journal entry has a name that cannot be one: {[name[:80] for name in names(note)]!r}")
    return note


#: The names of topics and channels in a note, by its type.
_NAMED: dict[type[Note], Callable[[Any], tuple[str, ...]]] = {
    TopicNote: lambda note: (note.name,),
    ChannelNote: lambda note: (note.name,),
    RedriveNote: lambda note: (note.topic, note.source),
}


@dataclass(slots=True)
class ChannelState:
    """A channel as the journal knows it."""

    id: int
    name: str
    paused: bool = False
    #: Delivered before, or to be delivered later: seq → (attempts so far, due on the clock, due on the wall; 0: now).
    #: Rows of finished messages may be among them.
    back: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    #: What brings dead letters back to it, or did last: see ``Redrive.note``.
    redrive: list[Any] | None = None
    #: Is what is outstanding a snapshot's, less what was finished since? Otherwise gaps in the log may be in it.
    exact: bool = False
    _outstanding: Ranges = field(default_factory=Ranges)
    # Finished, and still to be taken out of the above: pairs (first, stop). There may be a million, scattered.
    _finished: array[int] = field(default_factory=lambda: array("q"))

    @property
    def outstanding(self) -> Ranges:
        """Not finished: all from its start on, seqs that do not exist yet included."""
        if self._finished:
            finished, self._finished = self._finished, array("q")
            self._outstanding.remove_many(finished[::2], finished[1::2])
            if self.back:
                for seq in [seq for seq in self.back if seq not in self._outstanding]:
                    del self.back[seq]
        return self._outstanding

    def set_outstanding(self, outstanding: Ranges) -> None:
        self._outstanding = outstanding
        del self._finished[:]

    def finish(self, first: int, stop: int) -> None:
        """These are finished. That is final, until a seek says otherwise, so that it can be taken out later."""
        self._finished.extend((first, stop))

    def finish_all(self, pairs: array[int]) -> None:
        """The same for many ranges."""
        self._finished.extend(pairs)


@dataclass(slots=True)
class TopicState:
    """A topic as the journal knows it."""

    name: str
    incarnation: int
    base: int
    #: Seqs below it may have been used.
    ceiling: int
    #: Everything before it is known to be on the device.
    durable: int
    #: Where ``pumped`` stands still: the topic is paused or has no channel. None: it moves with the log.
    frozen: int | None
    paused: bool = False
    #: Made since the last snapshot: no crash has left a gap in its log below ``durable``.
    whole: bool = False
    #: Was it frozen in the snapshot? Then gaps may lie in what its channels are still to see.
    was_frozen: bool = False
    #: Where the log ended, after a clean stop.
    end: int | None = None
    #: Everything before it in the side log is known to be on the device, and may be gone again.
    side_end: int = SIDE
    #: The next message of the side log has no seq below it.
    side_next: int = SIDE
    #: ``side_end`` in the snapshot: of what comes before it, a channel's row names its own messages alone.
    side_exact: int = SIDE
    channels: dict[int, ChannelState] = field(default_factory=dict)
    #: What was set live for it (empty name), and for its channels by their name or pattern.
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Readers of the log: where each is, and when it last moved.
    readers: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """Everything the journal knows."""

    topics: dict[int, TopicState] = field(default_factory=dict)
    channels: dict[int, ChannelState] = field(default_factory=dict)
    #: What was set live for patterns of topics (with an empty name), and for channels of such.
    patterns: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    #: No new log starts below it.
    floor: int = 0
    next_incarnation: int = 1
    next_channel: int = 1
    clean: bool = False
    #: Is a snapshot being read?
    in_snapshot: bool = False
    #: The boot whose clock the due times of entries are on.
    boot: bytes = b""

    def apply_done(self, channel: int, pairs: array[int]) -> None:
        """These pairs (first, stop) are finished. ValueError if they are not whole."""
        if len(pairs) % 2:
            raise ValueError(f"{len(pairs)} numbers are no whole pairs")
        state = self.channels.get(channel)
        if state is not None:
            state.finish_all(pairs)

    def snapshot_read(self) -> None:
        """The snapshot is at its end; what follows is from the journal."""
        self.in_snapshot = False
        for topic in self.topics.values():
            topic.was_frozen = topic.frozen is not None
            topic.side_exact = topic.side_end

    def apply_back(self, channel: int, rows: array[int]) -> None:
        """Take up rows (seq, attempts, due on the clock, due on the wall). ValueError if they are not whole."""
        if len(rows) % 4:
            raise ValueError(f"{len(rows)} numbers are no whole rows of 4")
        state = self.channels.get(channel)
        if state is not None:
            for i in range(0, len(rows), 4):
                state.back[rows[i]] = (rows[i + 1], rows[i + 2], rows[i + 3])

    def apply(self, note: Note) -> None:
        """Take up what the note says."""
        _APPLIED[type(note)](self, *msgspec.structs.astuple(note))
        self.clean = isinstance(note, CleanNote)

    def _topic(self, incarnation: int, name: str, base: int, ceiling: int) -> None:
        self.next_incarnation = max(self.next_incarnation, incarnation + 1)
        if incarnation not in self.topics:
            # Names are unique: an older one was deleted, and the entry that said so was lost at the end of its file.
            for other in [t for t in self.topics.values() if t.name == name and t.incarnation < incarnation]:
                self._untopic(other.incarnation, max(other.ceiling, other.side_next - SIDE))
            whole = not self.in_snapshot
            self.topics[incarnation] = TopicState(name, incarnation, base, ceiling, base, base, whole=whole)

    def _ceiling(self, incarnation: int, ceiling: int) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].ceiling = ceiling

    def _durable(self, incarnation: int, seq: int) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].durable = max(seq, self.topics[incarnation].durable)

    def _frozen(self, incarnation: int, seq: int | None) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].frozen = seq

    def _pause(self, incarnation: int, paused: bool) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].paused = paused

    def _untopic(self, incarnation: int, floor: int) -> None:
        self.floor = max(self.floor, floor)
        topic = self.topics.pop(incarnation, None)
        if topic is not None:
            for channel in topic.channels:
                del self.channels[channel]

    def _channel(self, incarnation: int, channel: int, name: str, start: int, side_start: int) -> None:
        self.next_channel = max(self.next_channel, channel + 1)
        if incarnation in self.topics and channel not in self.channels:
            state = ChannelState(channel, name)
            state.set_outstanding(Ranges([(start, SIDE), (side_start, NEVER)]))
            self.channels[channel] = self.topics[incarnation].channels[channel] = state

    def _unchannel(self, incarnation: int, channel: int) -> None:
        state = self.channels.pop(channel, None)
        if incarnation in self.topics:
            self.topics[incarnation].channels.pop(channel, None)
            if state is not None:
                self.topics[incarnation].settings.pop(state.name, None)

    def _channel_pause(self, channel: int, paused: bool) -> None:
        if channel in self.channels:
            self.channels[channel].paused = paused

    def _channel_state(self, channel: int, ranges: bytes, back: bytes) -> None:
        """A snapshot's row: all that is outstanding, and what of it was delivered before."""
        state = self.channels.get(channel)
        if state is not None:
            pairs = unpack_numbers(ranges)
            state.set_outstanding(Ranges.of(pairs[::2], pairs[1::2]))
            state.exact = self.in_snapshot
            if not self.in_snapshot:
                # Of a log that was copied, with its gaps.
                for topic in self.topics.values():
                    topic.whole = topic.whole and channel not in topic.channels
            state.back.clear()
            self.apply_back(channel, unpack_numbers(back))

    def _channel_more(self, channel: int, ranges: bytes, back: bytes) -> None:
        """More of a snapshot's row, where there is too much for one: what is outstanding follows what was."""
        state = self.channels.get(channel)
        if state is not None:
            pairs = unpack_numbers(ranges)
            state.outstanding.append(Ranges.of(pairs[::2], pairs[1::2]))
            self.apply_back(channel, unpack_numbers(back))

    def _redrive(self, channel: int, *about: Any) -> None:
        if channel in self.channels:
            self.channels[channel].redrive = list(about)

    def _settings(self, incarnation: int, channel: str, values: dict[str, Any]) -> None:
        """All that is set live for a topic, or for this name or pattern of its channels."""
        if incarnation in self.topics:
            _put(self.topics[incarnation].settings, channel, values)

    def _pattern(self, topic: str, channel: str, values: dict[str, Any]) -> None:
        _put(self.patterns, (topic, channel), values)

    def _skip(self, incarnation: int, first: int, stop: int) -> None:
        if incarnation in self.topics:
            for channel in self.topics[incarnation].channels.values():
                channel.finish(first, stop)

    def _empty(self, channel: int, stop: int, side_stop: int) -> None:
        if channel in self.channels:
            self.channels[channel].finish(0, stop)
            self.channels[channel].finish(SIDE, side_stop)

    def _seek(self, channel: int, start: int, older: bytes) -> None:
        """All from ``start`` on is to be delivered, and of what lies before it these; the channel's own stay."""
        state = self.channels.get(channel)
        if state is not None:
            own = [(max(first, SIDE), stop) for first, stop in state.outstanding if stop > SIDE]
            kept = [(seq, seq + 1) for seq in unpack_numbers(older)]
            state.set_outstanding(Ranges([*kept, (start, SIDE), *own]))
            state.exact = False
            state.back = {seq: row for seq, row in state.back.items() if seq >= SIDE}

    def _reader(self, incarnation: int, name: str, offset: int, moved: int) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].readers[name] = (offset, moved)

    def _unreader(self, incarnation: int, name: str) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].readers.pop(name, None)

    def _open(self, boot: bytes) -> None:
        self.count_from(boot)
        for topic in self.topics.values():
            topic.end = None

    def count_from(self, boot: bytes) -> None:
        """From here on due times are on the clock of this boot; of those before only the wall time still counts."""
        if boot != self.boot:
            for channel in self.channels.values():
                for seq, (attempts, due, wall) in channel.back.items():
                    if due:
                        channel.back[seq] = (attempts, ANOTHER_BOOT, wall)
        self.boot = boot

    def _floor(self, floor: int, next_incarnation: int, next_channel: int) -> None:
        self.floor = max(floor, self.floor)
        self.next_incarnation = max(next_incarnation, self.next_incarnation)
        self.next_channel = max(next_channel, self.next_channel)

    def _end(self, incarnation: int, end: int, side_end: int) -> None:
        if incarnation in self.topics:
            self.topics[incarnation].end = end
            self.topics[incarnation].side_end = side_end
            self._side(incarnation, side_end, side_end)

    def _side(self, incarnation: int, seq: int, following: int) -> None:
        if incarnation in self.topics:
            topic = self.topics[incarnation]
            topic.side_end = max(seq, topic.side_end)
            topic.side_next = max(topic.side_end, following, topic.side_next)

    def _clean(self) -> None:
        pass


#: What each kind of note does.
_APPLIED: dict[type[Note], Callable[..., None]] = {
    TopicNote: State._topic,
    CeilingNote: State._ceiling,
    DurableNote: State._durable,
    FrozenNote: State._frozen,
    PauseNote: State._pause,
    UntopicNote: State._untopic,
    ChannelNote: State._channel,
    UnchannelNote: State._unchannel,
    ChannelPauseNote: State._channel_pause,
    ChannelStateNote: State._channel_state,
    ChannelMoreNote: State._channel_more,
    RedriveNote: State._redrive,
    SettingsNote: State._settings,
    PatternNote: State._pattern,
    SkipNote: State._skip,
    EmptyNote: State._empty,
    SeekNote: State._seek,
    ReaderNote: State._reader,
    UnreaderNote: State._unreader,
    OpenNote: State._open,
    FloorNote: State._floor,
    EndNote: State._end,
    SideNote: State._side,
    CleanNote: State._clean,
}


def _put(said: dict[Key, dict[str, Any]], key: Key, values: dict[str, Any]) -> None:
    if values:
        said[key] = values
    else:
        said.pop(key, None)
