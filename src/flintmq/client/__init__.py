"""The client: `Producer` and `Consumer` for any NSQ server, on asyncio."""

from __future__ import annotations

from flintmq.client.connection import Clock, Message, Settings
from flintmq.client.consumer import Consumer
from flintmq.client.producer import Producer

__all__ = ["Clock", "Consumer", "Message", "Producer", "Settings"]
