"""What one topic or channel does differently from the rest: its settings, and where they come from.

Topics and channels hold their settings (``TopicSettings``, ``ChannelSettings``: frozen, replaced as a whole) and know
nothing of where they come from. ``Settings`` owns what was said of which names: in the tables of the config file, and
live, over HTTP. It hands out what that comes to, at the moment a topic or channel is made and whenever something
changes, never per message; and it makes the topics and channels that the file declares. What is set live is in the
journal.

A name is that of a topic, or of a topic and a channel; ``*`` in it stands for anything. For each key the first of these
that has it counts:

    live, then the file        in each: the name itself, then patterns, that with more literal characters first;
                               of a topic and a channel, the topic is compared first
    the broker's options

Durations are nanoseconds, 0 is "no limit" or "never". One table, the fields of the two classes, drives the file, the
HTTP routes, the documents and all checks.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq.durations import HOUR
from flintmq.errors import OptionError, PublishError
from flintmq.options import (
    DURABILITY,
    DURATION,
    INT,
    LONGEST_DEFER,
    NEW_CHANNEL,
    STRING,
    TOPIC_LIMIT_POLICY,
    TTL_ACTION,
    Kind,
    NsqdOptions,
    read_tables,
)
from flintmq.protocol.wire import is_ephemeral, valid_name

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.storage.journal import State

__all__ = [
    "CHANNEL_SETTINGS",
    "TOPIC_SETTINGS",
    "ChannelSettings",
    "Names",
    "Setting",
    "Settings",
    "TopicSettings",
    "is_pattern",
    "valid_name_or_pattern",
]

logger = logging.getLogger(__name__)

#: Topics and channels that take a change of settings before the loop is handed back.
APPLY_AT_ONCE = 200

#: A topic, or a topic and a channel; patterns have a ``*`` in them.
Names = tuple[str, ...]
#: What was said of a name: values by key.
Values = dict[str, Any]

_DAY = 24 * HOUR
_MOST = 2**63 - 1
_PATTERN = re.compile(r"[.a-zA-Z0-9_*-]+(#ephemeral)?")


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    #: In the config file and over HTTP.
    key: str
    field: str
    kind: Kind
    help: str
    #: The option that holds where nothing is set; without one there is a default.
    option: str | None
    default: Any
    minimum: int
    maximum: int

    def read(self, found: Any) -> Any:
        """The value that a file or a request gives. ValueError with the reason."""
        value = self.kind.read(found)
        if isinstance(value, int):
            for wrong, words, limit in (
                (value < self.minimum, "at least", self.minimum),
                (value > self.maximum, "at most", self.maximum),
            ):
                if wrong:
                    raise ValueError(f"must be {words} {self.kind.to_text(limit)}")
        return value

    def shown(self, value: Any) -> Any:
        """As HTTP gives it: durations as text, all else as it is."""
        return self.kind.to_text(value) if self.kind is DURATION else value


def _setting(
    kind: Kind, help: str, *, option: str | None = None, default: Any = None, minimum: int = 0, maximum: int = _MOST
) -> Any:
    metadata = {"kind": kind, "help": help, "option": option, "minimum": minimum, "maximum": maximum}
    if option is not None:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _topic_name(text: str) -> str:
    if text and not valid_name(text):
        raise ValueError(f'"{text}" is not a topic name')
    return text


def _only_text(_: Any) -> str:
    raise TypeError


_TOPIC_NAME = dataclasses.replace(STRING, from_text=_topic_name, from_toml=_only_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of one topic, with the options' values where nothing else is set."""

    durability: str = _setting(
        DURABILITY,
        "meaning of the OK of a publish: memory, os or fsync; to and from memory only while the topic is empty",
        option="durability",
    )
    mem_queue_size: int = _setting(INT, "messages kept in memory", option="mem_queue_size")
    mem_queue_bytes: int = _setting(INT, "bytes of messages kept in memory, at most", option="mem_queue_bytes")
    max_messages: int = _setting(INT, "most messages that it may hold; 0: no limit", option="max_topic_messages")
    max_bytes: int = _setting(INT, "most bytes of messages that it may hold; 0: no limit", option="max_topic_bytes")
    limit_policy: str = _setting(
        TOPIC_LIMIT_POLICY, "at its limit refuse publishes (refuse), or drop the oldest (drop-oldest)",
        option="topic_limit_policy",
    )  # fmt: skip
    publish_rate: int = _setting(
        INT, "most messages a second that may be published; 0: no limit", option="max_publish_rate"
    )
    max_defer: int = _setting(
        DURATION, "longest delay of a deferred publish", option="max_req_timeout", maximum=LONGEST_DEFER
    )
    retain_bytes: int = _setting(INT, "bytes of files that are kept although no channel needs them", default=0)
    retain_age: int = _setting(DURATION, "time for which files are kept although no channel needs them", default=0)
    ttl: int = _setting(DURATION, "age after which messages are no longer delivered; 0: no limit", default=0)
    ttl_action: str = _setting(
        TTL_ACTION, "fate of those messages: drop, or dead-letter (to the channel's dead-letter topic)", default="drop"
    )
    new_channel: str = _setting(
        NEW_CHANNEL,
        "start of a new channel: backlog (messages that have not reached a channel, as in NSQ), earliest or latest",
        default="backlog",
    )
    key_count: int = _setting(
        INT, "number of idempotency keys that are remembered; 0: keys are refused", default=1_000_000
    )
    key_age: int = _setting(DURATION, "time for which an idempotency key is remembered; 0: for ever", default=7 * _DAY)
    reader_age: int = _setting(
        DURATION, "time without a move after which a reader position expires; 0: never", default=7 * _DAY
    )
    reader_bytes: int = _setting(
        INT, "bytes of files behind a reader position beyond which it expires; 0: no limit", default=0
    )

    @classmethod
    def of(cls, options: NsqdOptions) -> TopicSettings:
        return cls(**_from_options(TOPIC_SETTINGS, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """The settings of one channel."""

    msg_timeout: int = _setting(
        DURATION, "time a consumer has to finish a message, unless it asks for another", option="msg_timeout", minimum=1
    )
    max_defer: int = _setting(
        DURATION, "longest delay of a requeued message", option="max_req_timeout", maximum=LONGEST_DEFER
    )
    delivery_rate: int = _setting(
        INT, "most messages a second that it delivers; 0: no limit", option="max_delivery_rate"
    )
    max_attempts: int = _setting(
        INT,
        "failed attempts after which a message goes to the dead-letter topic; 0: never",
        default=0,
        maximum=65_535,
    )
    dead_letter_topic: str = _setting(
        _TOPIC_NAME, "that topic; empty: one of its own, named after topic and channel", default=""
    )

    @classmethod
    def of(cls, options: NsqdOptions) -> ChannelSettings:
        return cls(**_from_options(CHANNEL_SETTINGS, options))


SettingsT = TypeVar("SettingsT", TopicSettings, ChannelSettings)


def _table(kind: type[TopicSettings] | type[ChannelSettings]) -> Mapping[str, Setting]:
    table = {}
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        key = field.name.replace("_", "-")
        table[key] = Setting(key=key, field=field.name, default=default, **field.metadata)
    return table


#: Every setting of a topic, and of a channel, by key.
TOPIC_SETTINGS = _table(TopicSettings)
CHANNEL_SETTINGS = _table(ChannelSettings)


def _from_options(table: Mapping[str, Setting], options: NsqdOptions) -> Values:
    return {entry.field: getattr(options, entry.option) for entry in table.values() if entry.option is not None}


def _table_of(names: Names) -> Mapping[str, Setting]:
    return TOPIC_SETTINGS if len(names) == 1 else CHANNEL_SETTINGS


# --- Names ------------------------------------------------------------------------------------------------------------


def is_pattern(name: str) -> bool:
    return "*" in name


def valid_name_or_pattern(name: str) -> bool:
    return len(name) <= 64 and _PATTERN.fullmatch(name) is not None


def _lasting(name: str) -> bool:
    """Is it more than the name of something ephemeral?"""
    return is_pattern(name) or not is_ephemeral(name)


def _rank(names: Names) -> list[tuple[bool, int, int, str]]:
    """What comes first in this order counts before the others; never equal for two names."""
    return [(is_pattern(name), name.count("*") - len(name), name.count("*"), name) for name in names]


def _matcher(names: Names) -> Callable[[Names], bool]:
    # What fnmatch makes of a pattern takes no longer for many stars; its other special characters are in no name.
    parts = [re.compile(translate(name)).match for name in names]
    return lambda others: all(match(other) for match, other in zip(parts, others, strict=True))


class _Rules:
    """What was said in one place, by name. A pattern may be asked for too: it is what others say of such a name."""

    def __init__(self) -> None:
        self._said: dict[Names, Values] = {}
        self._by_topic: dict[str, dict[Names, None]] = {}
        # By number of names: patterns in their order.
        self._patterns: dict[int, list[tuple[Names, Callable[[Names], bool]]]] = {1: [], 2: []}

    def topics(self) -> list[str]:
        """The names and patterns of topics that something is said of."""
        return list(self._by_topic)

    def of_topic(self, topic: str) -> list[Names]:
        """What begins with exactly this name or pattern of a topic."""
        return list(self._by_topic.get(topic, ()))

    def get(self, names: Names) -> Values:
        return self._said.get(names, {})

    def put(self, names: Names, values: Values) -> None:
        """All that is said of this name from now on; nothing: an empty dict."""
        known = names in self._said
        if values:
            self._said[names] = values
            self._by_topic.setdefault(names[0], {})[names] = None
        elif known:
            del self._said[names]
            del self._by_topic[names[0]][names]
            if not self._by_topic[names[0]]:
                del self._by_topic[names[0]]
        if known != bool(values) and any(map(is_pattern, names)):
            patterns = self._patterns[len(names)]
            if values:
                insort(patterns, (names, _matcher(names)), key=lambda pair: _rank(pair[0]))
            else:
                patterns[:] = [pair for pair in patterns if pair[0] != names]

    def about(self, names: Names) -> Iterator[Values]:
        """What was said of this name, the most exact first."""
        if names in self._said:
            yield self._said[names]
        for pattern, matches in self._patterns[len(names)]:
            if pattern != names and matches(names):
                yield self._said[pattern]


# --- The file ---------------------------------------------------------------------------------------------------------


def _read_file(options: NsqdOptions) -> tuple[_Rules, list[Names]]:
    """What the tables of the config file say, and of which names. OptionError says which of them is wrong, and how."""
    rules = _Rules()
    titles: list[Names] = []
    file = f"failed to load config file {options.config} - " if options.config else ""

    def read(names: Names, table: Any) -> None:
        title = ".".join(f'{kind}."{name}"' for kind, name in zip(("topic", "channel"), names, strict=False))
        where = f"{file}[{title}]"
        if not valid_name_or_pattern(names[-1]):
            raise OptionError(f'{where} "{names[-1]}" is neither a name nor a pattern of names')
        if not isinstance(table, Mapping):
            raise OptionError(f"{where} must be a table")
        values = {key: value for key, value in table.items() if key != "channel" or len(names) == 2}
        try:
            rules.put(names, _checked(names, values, options))
        except OptionError as exc:
            raise OptionError(f"{where} {exc}") from exc
        titles.append(names)

    for topic, table in options.topic.items():
        read((topic,), table)
        channels = table.get("channel", {})
        if not isinstance(channels, Mapping):
            raise OptionError(f'{file}[topic."{topic}"] channel: write a table, such as [topic."{topic}".channel."c"]')
        for channel, settings in channels.items():
            read((topic, channel), settings)
    return rules, titles


def _check_keys(names: Names, keys: Iterable[str]) -> None:
    table = _table_of(names)
    for key in keys:
        if key not in table:
            kind = "topic" if len(names) == 1 else "channel"
            raise OptionError(f"{key}: there is no such setting of a {kind}, only {', '.join(table)}")


def _checked(names: Names, found: Mapping[str, Any], options: NsqdOptions) -> Values:
    """The values of a table or a request. OptionError for the first that is wrong."""
    _check_keys(names, found)
    table = _table_of(names)
    values = {}
    for key, value in found.items():
        try:
            values[key] = table[key].read(value)
        except ValueError as exc:
            raise OptionError(f"{key}: {exc}") from exc
        if key == "msg-timeout" and values[key] > options.max_msg_timeout:
            longest = DURATION.to_text(options.max_msg_timeout)
            raise OptionError(f"{key}: must be at most {longest}, which is --max-msg-timeout")
    return values


def _within_limits(names: Names, values: Values) -> Values:
    """Values as the journal has them. An older version may have let in what is too much for this one."""
    table = _table_of(names)
    found = dict(values)
    for key, value in values.items():
        if key in table and isinstance(value, int) and value > table[key].maximum:
            found[key] = table[key].maximum
            most = table[key].shown(found[key])
            logger.warning(
                "SETTINGS(%s): %s was more than the most that is allowed, it is %s now", "/".join(names), key, most
            )
    return found


def _each(topics: list[Topic]) -> Iterator[Topic | Channel]:
    """Yield topics, and after each its channels."""
    for topic in topics:
        yield topic
        yield from list(topic.channels.values())


# --- All together -----------------------------------------------------------------------------------------------------


class Settings:
    """The settings of all topics and channels of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._live = _Rules()
        # Changes that are not applied to all topics and channels yet, the latest first, and who waits for that.
        self._unapplied: deque[Iterator[Topic | Channel]] = deque()
        self._waiters: list[Callable[[], None]] = []
        self._take(broker.options)
        broker.options_changed.append(self._options_changed)
        broker.reloaders.append(self.reload)

    def _take(self, options: NsqdOptions) -> None:
        self._file, self._titles = _read_file(options)
        self._tables = options.topic
        self._topic_defaults = TopicSettings.of(options)
        self._channel_defaults = ChannelSettings.of(options)

    @staticmethod
    def check(options: NsqdOptions) -> None:
        """OptionError if these options have wrong tables."""
        _read_file(options)

    # --- What they are ---------------------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicSettings:
        return self._resolve((name,), self._topic_defaults)

    def channel(self, topic: str, channel: str) -> ChannelSettings:
        return self._resolve((topic, channel), self._channel_defaults)

    def _resolve(self, names: Names, defaults: SettingsT) -> SettingsT:
        table = _table_of(names)
        found = {table[key].field: value for key, (value, _) in self._found(names).items()}
        return dataclasses.replace(defaults, **found) if found else defaults

    def _found(self, names: Names) -> dict[str, tuple[Any, str]]:
        """Value and source of every key that something is said of."""
        table = _table_of(names)
        found: dict[str, tuple[Any, str]] = {}
        for source, rules in (("live", self._live), ("file", self._file)):
            for values in rules.about(names):
                for key, value in values.items():
                    # A newer version may have known more of them.
                    if key in table and key not in found:
                        found[key] = (value, source)
        return found

    def describe(self, names: Names) -> dict[str, Any]:
        """What they are, what of it was set live for exactly this name, and where each comes from."""
        table = _table_of(names)
        found = self._found(names)
        effective: TopicSettings | ChannelSettings = self.topic(*names) if len(names) == 1 else self.channel(*names)
        topic = self._broker.topics.get(names[0])
        if topic is not None and len(names) == 1:
            # A durability that cannot be changed now stays as it is.
            effective = topic.settings
        answer: dict[str, Any] = dict(zip(("topic", "channel"), names, strict=False))
        answer["settings"] = {key: entry.shown(getattr(effective, entry.field)) for key, entry in table.items()}
        answer["set"] = {key: table[key].shown(value) for key, value in self._live.get(names).items() if key in table}
        answer["source"] = {key: found[key][1] if key in found else "default" for key in table}
        return answer

    # --- Changing them ---------------------------------------------------------------------------------------------

    def change(self, names: Names, changes: Mapping[str, Any]) -> None:
        """Set these values live, and take those away that are None. It is noted in the journal.

        OptionError if one of them is wrong, or cannot be now: then nothing has changed. Where it is about very many
        topics and channels they take it in slices: see ``when_applied``.
        """
        before = self._live.get(names)
        # A key that only another version knows can still be taken away.
        taken = {key for key, value in changes.items() if value is None and key in before}
        _check_keys(names, changes.keys() - taken)
        new = _checked(names, {key: value for key, value in changes.items() if value is not None}, self._broker.options)
        values = {key: value for key, value in before.items() if changes.get(key, value) is not None} | new
        topics = list(self._meant(names[0]))
        # Nothing else can be in the way.
        concerned = topics if "durability" in changes else []
        durabilities = [self.topic(topic.name).durability for topic in concerned]
        self._live.put(names, values)
        for topic, durability in zip(concerned, durabilities, strict=True):
            settings = self.topic(topic.name)
            # One that the file asked for in vain is no reason to refuse other changes.
            obstacle = topic.obstacle_to(settings) if settings.durability != durability else ""
            if obstacle:
                self._live.put(names, before)
                raise OptionError(obstacle)
        self._note(names, values)
        logger.info("SETTINGS(%s): %s", "/".join(names), ", ".join(f"{key}={value}" for key, value in changes.items()))
        self._apply(topics)

    def _meant(self, name: str) -> Iterator[Topic]:
        """The topics that a name or pattern is about."""
        if not is_pattern(name):
            if name in self._broker.topics:
                yield self._broker.topics[name]
            return
        matches = _matcher((name,))
        yield from (topic for topic in self._broker.topics.values() if matches((topic.name,)))

    def _note(self, names: Names, values: Values) -> None:
        """Those of one topic go with it, and are noted with it. What is ephemeral outlives nothing."""
        journal = self._broker.journal
        channel = names[1] if len(names) == 2 else ""
        if is_pattern(names[0]):
            journal.note("pattern", names[0], channel, values)
        elif (topic := self._broker.topics.get(names[0])) is not None and not topic.ephemeral and _lasting(channel):
            journal.note("settings", topic.incarnation, channel, values)

    def _apply(self, topics: Iterable[Topic]) -> None:
        """Let topics and their channels take what holds for them: some at once, the others in later loop turns.

        Each takes what holds when its turn comes, so that no change is overtaken by an older one.
        """
        under_way = bool(self._unapplied)
        self._unapplied.appendleft(_each(list(topics)))
        self._apply_some(not under_way)

    def _take_newest(self, one: Topic | Channel) -> None:
        try:
            if one.exiting:
                return
            one.take_settings(self)
        except Exception:
            # The others take theirs all the same.
            logger.exception("SETTINGS(%s): they were not taken", one.name)

    def _apply_some(self, go_on: bool = True) -> None:
        """Apply a slice; if ``go_on``, the next one in another loop turn."""
        left = APPLY_AT_ONCE
        while self._unapplied and left > 0:
            one = next(self._unapplied[0], None)
            if one is None:
                self._unapplied.popleft()
            else:
                self._take_newest(one)
                left -= 1
        if self._broker.stopping:
            self._unapplied.clear()
        if self._unapplied:
            if go_on:
                self._broker.later(self._apply_some)
            return
        waiters, self._waiters = self._waiters, []
        for then in waiters:
            try:
                then()
            except Exception:
                # The others have waited, too.
                logger.exception("SETTINGS: they are applied, and somebody who waited for it failed")

    def when_applied(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all topics and channels have taken all changes."""
        if self._unapplied:
            self._waiters.append(then)
        else:
            then()

    def _options_changed(self) -> None:
        options = self._broker.options
        before = (self._tables, self._topic_defaults, self._channel_defaults)
        if before != (options.topic, TopicSettings.of(options), ChannelSettings.of(options)):
            self._take(options)
            self._apply(self._broker.topics.values())

    def reload(self) -> None:
        """Read the tables of the config file again. If they are no good, all stays as it was."""
        path = self._broker.options.config
        if not path or self._broker.stopping:
            return

        def read() -> Mapping[str, Any]:
            tables = read_tables(path)
            self.check(dataclasses.replace(self._broker.options, topic=tables))
            return tables

        def done(tables: Mapping[str, Any] | None, error: BaseException | None) -> None:
            if error is not None or tables is None:
                logger.error("SETTINGS: they stay as they were - %s", error)
                return
            if self._broker.stopping:
                return
            self._broker.change_options(topic=tables)
            self.when_applied(applied)

        def applied() -> None:
            if self._broker.stopping:
                return
            logger.info("SETTINGS: the tables of %s were read again", path)
            try:
                self.declare()
            except PublishError as exc:
                logger.error("SETTINGS: not every topic of %s could be made - %s", path, exc)

        self._broker.disk.submit(read, done)

    def forget(self, topic: str, channel: str = "") -> None:
        """The topic or channel is gone, and what was set live for it goes too. The journal knows that by itself."""
        for names in [(topic, channel)] if channel else self._live.of_topic(topic):
            self._live.put(names, {})

    # --- What the file declares ------------------------------------------------------------------------------------

    def declare(self) -> list[Topic]:
        """Make the topics and channels that have a table of their own; the topics that were not there before.

        What is ephemeral comes with its first client. PublishError if one cannot be made.
        """
        made = []
        for names in self._titles:
            if any(is_pattern(name) or is_ephemeral(name) for name in names):
                continue
            if names[0] not in self._broker.topics:
                made.append(self._broker.topic(names[0]))
            if len(names) == 2:
                self._broker.topic(names[0]).channel(names[1])
        return made

    # --- What must survive -----------------------------------------------------------------------------------------

    def restore(self, state: State) -> None:
        """Take up what the journal knows, before any topic is made."""
        said = dict(state.patterns)
        for known in state.topics.values():
            said |= {(known.name, channel): values for channel, values in known.settings.items()}
        for (topic, channel), values in said.items():
            names = (topic, channel) if channel else (topic,)
            unknown = values.keys() - _table_of(names).keys()
            if unknown:
                logger.warning("SETTINGS(%s): of another version, not used: %s", "/".join(names), ", ".join(unknown))
            self._live.put(names, _within_limits(names, values))

    def notes(self, topic: Topic | None = None) -> Iterator[tuple[Any, ...]]:
        """For a snapshot: what was set live for this topic and its channels, or for patterns of topics."""
        for name in [topic.name] if topic is not None else filter(is_pattern, self._live.topics()):
            for names in self._live.of_topic(name):
                channel = names[1] if len(names) == 2 else ""
                if topic is None:
                    yield ("pattern", name, channel, self._live.get(names))
                elif _lasting(channel):
                    yield ("settings", topic.incarnation, channel, self._live.get(names))
