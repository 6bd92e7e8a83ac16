"""The topic or channel that a request is about: read from its arguments, and looked up in the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flintmq.errors import HttpError, NotFoundError

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.http.arguments import Arguments

__all__ = ["existing_channel", "existing_topic", "named_channel", "named_topic"]


def existing_topic(broker: Broker, name: str) -> Topic:
    """Return a topic; HttpError 404 if there is none of this name."""
    try:
        return broker.existing_topic(name)
    except NotFoundError as exc:
        raise HttpError(404, "TOPIC_NOT_FOUND") from exc


def existing_channel(topic: Topic, name: str) -> Channel:
    """Return a channel; HttpError 404 if the topic has none of this name."""
    try:
        return topic.existing_channel(name)
    except NotFoundError as exc:
        raise HttpError(404, "CHANNEL_NOT_FOUND") from exc


def named_topic(broker: Broker, arguments: Arguments) -> Topic:
    """Return the topic that the arguments name."""
    return existing_topic(broker, arguments.topic())


def named_channel(broker: Broker, arguments: Arguments) -> Channel:
    """Return the channel that the arguments name."""
    topic, channel = arguments.topic_and_channel()
    return existing_channel(existing_topic(broker, topic), channel)
