"""Which broker is a query's home: the one that gives out its epochs and keeps its decisions.

It never changes by itself. If two brokers were home to the same query, both could decide the same batch. In this order:
the option ``home``; the file ``_nsq_home`` in the checkpoint, where Python can reach it; what brokers remember. A new
query's home is chosen by a hash, and every broker that answers is told of the query before it writes a row: whoever
comes back while the home is away finds that there is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flintmq.errors import ConnectError, OptionError, PublishError
from flintmq.spark.shipped.files import sync_folder
from flintmq.spark.sink.staging import Broker, Calls, Write, ranked

__all__ = ["Checkpoint", "Offsets", "choose", "find", "named"]

FILE = "_nsq_home"
#: The file in a checkpoint that notes the newest batch that is decided: the home may forget it, if it is restored.
DECIDED = "_nsq_decided"


class Offsets(NamedTuple):
    """The offsets of a batch, as far as they can be read."""

    #: Of all of them, without the line that has a time in it; nothing if they cannot be read.
    digest: str = ""
    #: Are they places in logs, so that the same offsets are the same rows? Those of a spool, or of files, count.
    name_rows: bool = False


class Checkpoint:
    """A stream's checkpoint, if it is on a file system that Python sees. Spark itself may use any."""

    def __init__(self, location: str) -> None:
        path = location.removeprefix("file://") if location.startswith("file:///") else location.removeprefix("file:")
        self._folder = Path(path) if location and "://" not in path else None

    @property
    def is_there(self) -> bool:
        return self._folder is not None and self._folder.is_dir()

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
        """Return the node that the file names; nothing without a file, or where it cannot be read."""
        if self._folder is None:
            return ""
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
        sync_folder(self._folder)
        return self.read_home()

    @property
    def decided_path(self) -> Path:
        assert self._folder is not None
        return self._folder / DECIDED

    def read_decided(self, query: str) -> int:
        """Return the newest batch of a query that is noted to be decided; -1 if none is."""
        try:
            note = json.loads(self.decided_path.read_text())
            # The folder may have been another query's before.
            return int(note["batch"]) if note["query"] == query else -1
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def write_decided(self, query: str, batch: int) -> None:
        """Note that a batch of a query is decided. Returns when the note is on the device."""
        if batch <= self.read_decided(query):
            return
        assert self._folder is not None
        partial = self._folder / f".{DECIDED}.{uuid.uuid4().hex}"
        try:
            with open(partial, "x") as file:
                json.dump({"query": query, "batch": batch}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.decided_path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)

    @property
    def is_new(self) -> bool:
        """Is the first batch the newest one, and not known to be committed?"""
        assert self._folder is not None
        try:
            later = any(path.name.isdigit() and int(path.name) for path in (self._folder / "offsets").iterdir())
        except FileNotFoundError:
            later = False
        return not later and not (self._folder / "commits" / "0").exists()

    def offsets(self, batch: int, query: str) -> Offsets:
        """Return the offsets of a batch of a query."""
        if self._folder is None or self.query != query:
            return Offsets()
        try:
            lines = (self._folder / "offsets" / str(batch)).read_text().splitlines()[2:]
        except OSError:
            return Offsets()
        if not lines:
            return Offsets()
        # A source that has nothing yet is a dash.
        name_rows = all(_is_place_in_log(line) for line in lines if line != "-")
        return Offsets(hashlib.sha256("\n".join(lines).encode()).hexdigest(), name_rows)


def _is_place_in_log(line: str) -> bool:
    try:
        offset = json.loads(line)
    except ValueError:
        return False
    return isinstance(offset, dict) and offset.get("mode") == "log" and isinstance(offset.get("p"), dict)


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


def find(
    calls: Calls, write: Write, brokers: Sequence[Broker], silent: Sequence[str], *, is_new: bool = False
) -> Broker:
    """Return the home by what brokers remember, or choose it; afterwards every broker that answers knows the producer.

    ConnectError while nobody who answers can tell. With ``is_new`` brokers that do not answer are not waited for.
    """
    silent = list(silent)
    known: dict[Broker, bool] = {}
    unknown: list[Broker] = []
    for broker in brokers:
        try:
            found = calls.known(broker, write.producer)
        except ConnectError as exc:
            silent.append(str(exc))
            continue
        if found is None:
            unknown.append(broker)
        else:
            known[broker] = bool(found.get("home"))
    homes = [broker for broker, is_home in known.items() if is_home]
    if len(homes) > 1:
        raise OptionError(
            f"{' and '.join(map(str, homes))} both keep decisions of {write.producer}: name the right one by the "
            "option home"
        )
    if homes:
        home = homes[0]
    else:
        home = _choose(write, list(known), unknown, silent, is_new)
        # First of all, so that who finds others told of it finds the home, too.
        calls.call(home, "open", **write._asdict())
        unknown.remove(home)
    for broker in unknown:
        _tell(calls, broker, write)
    return home


def _choose(
    write: Write, known: Sequence[Broker], unknown: Sequence[Broker], silent: Sequence[str], is_new: bool
) -> Broker:
    """Choose a home where no broker that answers is one, if nobody can have been it."""
    away = f" ({'; '.join(silent)})" if silent else ""
    if known:
        raise ConnectError(
            f"the broker that keeps the decisions of {write.producer} does not answer{away}: "
            f"{', '.join(map(str, known))} only know that there is one. Start it"
        )
    # Its number is above 0 only where there is no other way to tell whether it wrote before.
    sentence = (
        f"no broker that answers{away} keeps the decisions of {write.producer}, which is at batch {write.txn}: start "
        "the one that does. If this sink has not written for it before, name any of "
        f"{', '.join(broker.node for broker in unknown)} by the option home"
    )
    if not unknown or (silent and not is_new):
        raise ConnectError(sentence)
    if write.txn:
        raise OptionError(sentence)
    return choose(write.producer, unknown)


def _tell(calls: Calls, broker: Broker, write: Write) -> None:
    """Have a broker remember the producer, by an attempt that never gets a row, in an epoch before all others."""
    try:
        calls.call(broker, "begin", producer=write.producer, epoch=0, txn=write.txn, attempt="home", decided=None)
    except PublishError as exc:
        if exc.code != "E_STAGE_FENCED":
            raise
        # Somebody staged there meanwhile: for this home, or for another one.
        raise ConnectError(f"{broker} has just heard of {write.producer} from another task or driver") from exc
