"""What one topic or channel does differently from the rest: its settings.

Topics and channels read their settings here and know nothing of where they come from. Everything that is not set is
as the broker's options say; durations are nanoseconds, 0 is "no limit" or "never".
"""

from __future__ import annotations

from dataclasses import dataclass

from flintmq.options import NsqdOptions

__all__ = ["ChannelSettings", "TopicSettings"]

_DAY = 86_400_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of one topic, with the options' values where nothing else is set."""

    durability: str
    mem_queue_size: int
    mem_queue_bytes: int
    max_messages: int
    max_bytes: int
    limit_policy: str
    publish_rate: int
    #: The longest delay of a deferred publish.
    max_defer: int
    #: Files are kept up to this size and this age, whether a channel needs them or not.
    retain_bytes: int = 0
    retain_age: int = 0
    #: Messages older than this are not delivered any more; what becomes of them: drop or dead-letter.
    ttl: int = 0
    ttl_action: str = "drop"
    #: Where a new channel starts: backlog (what no channel has seen, as in NSQ), earliest or latest.
    new_channel: str = "backlog"
    #: How many idempotency keys are remembered, and how long.
    key_count: int = 1_000_000
    key_age: int = 7 * _DAY
    #: A reader position that does not move for so long, or holds so many bytes, is given up.
    reader_age: int = 7 * _DAY
    reader_bytes: int = 0

    @classmethod
    def of(cls, options: NsqdOptions) -> TopicSettings:
        return cls(
            durability=options.durability,
            mem_queue_size=options.mem_queue_size,
            mem_queue_bytes=options.mem_queue_bytes,
            max_messages=options.max_topic_messages,
            max_bytes=options.max_topic_bytes,
            limit_policy=options.topic_limit_policy,
            publish_rate=options.max_publish_rate,
            max_defer=options.max_req_timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """The settings of one channel."""

    msg_timeout: int
    #: The longest delay of a requeued message.
    max_defer: int
    delivery_rate: int
    #: After so many failed attempts a message goes to the dead-letter topic; 0: never.
    max_attempts: int = 0
    #: That topic; empty: the channel's own, made from the names of topic and channel.
    dead_letter_topic: str = ""

    @classmethod
    def of(cls, options: NsqdOptions) -> ChannelSettings:
        return cls(
            msg_timeout=options.msg_timeout,
            max_defer=options.max_req_timeout,
            delivery_rate=options.max_delivery_rate,
        )
