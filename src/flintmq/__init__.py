"""flintmq: an NSQ-compatible message broker in Python. A topic is a log of wire frames, a channel is a cursor."""

from __future__ import annotations

# Nothing is imported here: ctrl-C in the first moments of a command would meet that, before anybody hears it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from flintmq import errors as errors
    from flintmq.broker.daemon import Broker as Broker
    from flintmq.client.connection import Message as Message
    from flintmq.client.consumer import Consumer as Consumer
    from flintmq.client.producer import Producer as Producer
    from flintmq.cluster.node import NodeClient as NodeClient

__version__ = "1.0.0rc1"
__all__ = ["Broker", "Consumer", "Message", "NodeClient", "Producer", "__version__", "errors"]

_PUBLIC = {
    "Broker": "flintmq.broker.daemon",
    "Consumer": "flintmq.client.consumer",
    "Message": "flintmq.client.connection",
    "NodeClient": "flintmq.cluster.node",
    "Producer": "flintmq.client.producer",
}


def __getattr__(name: str) -> Any:
    # Imported late: `import flintmq` in a script that only wants an error class should cost nothing.
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "errors":
        return importlib.import_module("flintmq.errors")
    raise AttributeError(f"module 'flintmq' has no attribute {name!r}")
