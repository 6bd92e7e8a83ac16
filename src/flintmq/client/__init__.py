"""The client: `Producer` and `Consumer` for any NSQ server, `NodeClient` for the HTTP API of one nsqd, on asyncio."""

from __future__ import annotations

from flintmq.client.codecs import Codec, Json, MessagePack
from flintmq.client.connection import Clock, Message, Settings
from flintmq.client.consumer import Batch, Consumer
from flintmq.client.options import ConsumerOptions, ProducerOptions
from flintmq.client.producer import Producer
from flintmq.cluster.node import NodeClient

__all__ = [
    "Batch",
    "Clock",
    "Codec",
    "Consumer",
    "ConsumerOptions",
    "Json",
    "Message",
    "MessagePack",
    "NodeClient",
    "Producer",
    "ProducerOptions",
    "Settings",
]
