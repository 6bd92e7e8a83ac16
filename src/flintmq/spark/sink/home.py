"""Which broker is a query's home: the one that gives out its epochs and keeps its decisions.

It never changes by itself. If two brokers were home to the same query, both could decide the same batch. In this order:
the option ``home``; the file ``_nsq_home`` in the checkpoint, where Python can reach it; what brokers remember. A new
query's home is chosen by a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from flintmq.errors import ConnectError, OptionError
from flintmq.spark.sink.staging import Broker, Calls, Write, ranked

__all__ = ["Checkpoint", "choose", "find", "named"]

FILE = "_nsq_home"


class Checkpoint:
    """A stream's checkpoint, if it is on a file system that Python sees. Spark itself may use any."""

    def __init__(self, location: str) -> None:
        path = location.removeprefix("file://") if location.startswith("file:///") else location.removeprefix("file:")
        self._folder = Path(path) if location and "://" not in path else None

    @property
    def query(self) -> str:
        """The id of the query it belongs to; nothing where it cannot be read."""
        if self._folder is None:
            return ""
        try:
            return str(json.loads((self._folder / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def read_home(self) -> str:
        """Return the node that the file names; nothing without a file."""
        assert self._folder is not None
        try:
            read = json.loads((self._folder / FILE).read_text())
            return str(read["node"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError) as exc:
            raise OptionError(
                f"{self._folder / FILE} names no broker: name the one that keeps decisions by the option home"
            ) from exc

    def write_home(self, node: str) -> str:
        """Name a node in the file unless one is named; return who is named then."""
        assert self._folder is not None
        path, partial = self._folder / FILE, self._folder / f".{FILE}.{uuid.uuid4().hex}"
        with open(partial, "x") as file:
            json.dump({"node": node}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link, because a rename would replace the file of another driver.
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        finally:
            partial.unlink()
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self.read_home()

    def offsets(self, batch: int, query: str) -> str:
        """Return a digest of a batch's offsets, without the line that has a time in it; nothing if unreadable."""
        if self._folder is None or self.query != query:
            return ""
        try:
            lines = (self._folder / "offsets" / str(batch)).read_text().splitlines()
        except OSError:
            return ""
        return hashlib.sha256("\n".join(lines[2:]).encode()).hexdigest() if len(lines) > 2 else ""


def named(name: str, brokers: Sequence[Broker]) -> Broker:
    """Return the broker of this node id or address; ConnectError if it is not among those that answer."""
    for broker in brokers:
        if name in broker:
            return broker
    raise ConnectError(
        f"{name} keeps the decisions of this query and does not answer, so nobody knows which batches are committed: "
        "start it, or name it by the option home if its address is another one now"
    )


def choose(producer: str, brokers: Sequence[Broker]) -> Broker:
    return ranked(brokers, producer)[0]


def find(calls: Calls, write: Write, brokers: Sequence[Broker], silent: Sequence[str]) -> Broker:
    """Return the home by what brokers remember, for a query whose checkpoint Python cannot read."""
    known = {broker: found for broker in brokers if (found := calls.known(broker, write.producer)) is not None}
    homes = [broker for broker, found in known.items() if found.get("home")]
    if len(homes) == 1:
        return homes[0]
    if len(homes) > 1:
        raise OptionError(
            f"{' and '.join(map(str, homes))} both keep decisions of {write.producer}: name the right one by the "
            "option home"
        )
    if known or silent or write.txn:
        away = f" ({'; '.join(silent)})" if silent else ""
        raise OptionError(
            f"no broker that answers{away} keeps the decisions of {write.producer}, which is at batch {write.txn}: "
            "start the one that does. If this sink has not written for the query before, name any of "
            f"{', '.join(broker.node for broker in brokers)} by the option home"
        )
    return choose(write.producer, brokers)
