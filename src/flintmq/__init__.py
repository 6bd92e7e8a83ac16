"""flintmq: an NSQ-compatible message broker in Python. A topic is a log of wire frames, a channel is a cursor."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flintmq import errors as errors
    from flintmq.broker.daemon import Broker as Broker
    from flintmq.client.connection import Message as Message
    from flintmq.client.consumer import Consumer as Consumer
    from flintmq.client.producer import Producer as Producer
    from flintmq.cluster.node import NodeClient as NodeClient

__version__ = "0.1.0"
__all__ = ["Broker", "Consumer", "Message", "NodeClient", "Producer", "__version__", "errors"]

_PUBLIC = {
    "Broker": "flintmq.broker.daemon",
    "Consumer": "flintmq.client.consumer",
    "Message": "flintmq.client.connection",
    "NodeClient": "flintmq.cluster.node",
    "Producer": "flintmq.client.producer",
}


def _use_interpreted_kernel() -> None:
    """Load ``kernel.py`` as it stands, with a stand-in for the ``cython`` module it imports.

    Needed where the extension was not built, and where ``FLINTMQ_PURE=1`` asks for the interpreted form.
    """
    from flintmq import _cython

    path = os.path.join(os.path.dirname(__file__), "kernel.py")
    spec = importlib.util.spec_from_file_location("flintmq.kernel", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    real = sys.modules.get("cython")
    sys.modules["cython"] = _cython
    try:
        spec.loader.exec_module(module)
    finally:
        if real is None:
            del sys.modules["cython"]
        else:
            sys.modules["cython"] = real
    sys.modules["flintmq.kernel"] = globals()["kernel"] = module


def _extension_is_there() -> bool:
    spec = importlib.machinery.PathFinder.find_spec("flintmq.kernel", __path__)
    return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)


if os.environ.get("FLINTMQ_PURE") == "1" or not _extension_is_there():
    _use_interpreted_kernel()


def __getattr__(name: str) -> Any:
    # Imported late: `import flintmq` in a script that only wants an error class should cost nothing.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "errors":
        return importlib.import_module("flintmq.errors")
    raise AttributeError(f"module 'flintmq' has no attribute {name!r}")
