"""For tests of programs that use NSQ: real daemons inside the test's process, a clock to move, faults to make.

    def test_orders_are_billed(nsq_broker):
        nsq_broker.publish("orders", b"one")
        …

Installed, it is a pytest plugin with the fixtures below; `docs/testing.md` shows them. Without pytest there are the
classes: ``with NsqBroker() as broker``. pytest imports this module at every start, needed or not, so it imports nothing
itself: what the fixtures make is in ``flintmq.testing.nodes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flintmq.testing.nodes import MovableClock as MovableClock
    from flintmq.testing.nodes import NsqBroker as NsqBroker
    from flintmq.testing.nodes import NsqCluster as NsqCluster
    from flintmq.testing.nodes import NsqLookupd as NsqLookupd
    from flintmq.testing.options import NsqdKeywords as NsqdKeywords
    from flintmq.testing.options import NsqlookupdKeywords as NsqlookupdKeywords

__all__ = ["MovableClock", "NsqBroker", "NsqCluster", "NsqLookupd", "NsqdKeywords", "NsqlookupdKeywords"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from flintmq.testing import nodes, options

        return getattr(options if name.endswith("Keywords") else nodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    import pytest
except ImportError:
    # Somebody wants the classes only.
    pass
else:

    @pytest.fixture
    def nsq_options() -> dict[str, Any]:
        """Options of nsqd for `nsq_broker` and `nsq_cluster`; define a fixture of this name to set some."""
        return {}

    @pytest.fixture
    def nsq_broker(nsq_options: dict[str, Any]) -> Iterator[NsqBroker]:
        """An nsqd on free ports, with an empty data path. It is closed, and its files go, when the test ends."""
        from flintmq.testing.nodes import NsqBroker

        with NsqBroker(**nsq_options) as broker:
            yield broker

    @pytest.fixture
    def nsq_cluster(nsq_options: dict[str, Any]) -> Iterator[Callable[..., NsqCluster]]:
        """``nsq_cluster(brokers=2, lookupds=1)`` starts nsqds that are registered with nsqlookupds."""
        import contextlib

        from flintmq.testing.nodes import NsqCluster

        with contextlib.ExitStack() as started:

            def start(brokers: int = 2, lookupds: int = 1, **options: Any) -> NsqCluster:
                return started.enter_context(NsqCluster(brokers, lookupds, **{**nsq_options, **options}))

            yield start
