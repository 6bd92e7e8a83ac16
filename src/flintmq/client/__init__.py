"""The client: `Producer` and `Consumer` for any NSQ server, `NodeClient` for the HTTP API of one nsqd, on asyncio."""

from __future__ import annotations

from flintmq.client.connection import Clock, Message, Settings
from flintmq.client.consumer import Consumer
from flintmq.client.producer import Producer
from flintmq.cluster.node import NodeClient

__all__ = ["Clock", "Consumer", "Message", "NodeClient", "Producer", "Settings"]
