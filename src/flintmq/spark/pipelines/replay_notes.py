"""How far a replay is, in its checkpoint: the plan, the chunks that are done, and the write that is under way.

On a disk these are small files, and a lock keeps a second replay out. A store has no locks. There each note is a commit
of a small Delta table, and the first commit of two processes that note something at the same time counts: the other
process stops. So two replays never put different chunks into writes of one name.

 disk     plan.json        done.json    doing.json
 store    plan-NAME.json   notes/_delta_log
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.shipped.files import Place

if TYPE_CHECKING:
    from flintmq.spark.pipelines.tables import DeltaTable

__all__ = ["Chunk", "Notes"]

#: The name of the notes in the transactions of their table.
_QUERY = "replay"


@dataclass(frozen=True)
class Chunk:
    """A part of a replay."""

    #: At most so many messages, before the filter.
    rows: int
    #: What is needed to read it again: plain values.
    what: dict[str, Any]


class Notes:
    """The notes of one replay in its checkpoint folder."""

    def __init__(self, place: Place, terms: dict[str, Any]) -> None:
        self.place = place
        self._terms = terms
        self.name = ""
        self.done = 0
        #: How many chunks the write has that was under way when the replay ended.
        self.under_way = 1
        # Of a store: the notes, and the number of the last one.
        self._table: DeltaTable | None = None
        self._number = -1

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other replays out of a folder on a disk. PipelineError if there is one.

        On a store the next note fails if another replay has made one meanwhile.
        """
        if not self.place.is_local:
            yield
            return
        folder = Path(self.place.text)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = open(folder / ".lock", "a")
        except OSError as exc:
            raise PipelineError(f"cannot write to {self.place}: {exc.strerror}") from exc
        with held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise self._not_alone() from exc
            yield

    def _not_alone(self) -> PipelineError:
        return PipelineError(
            f"another process replays from {self.place} at this moment: wait for its end, or give a "
            "--checkpoint of its own to a replay of other messages"
        )

    def begin(self, plan: Callable[[], list[Chunk]]) -> list[Chunk]:
        """The chunks of the plan that is there, or of a new one."""
        known = self.check()
        if not known:
            self._make(plan())
            known = self.check()
        self.name = known["name"]
        if not self.place.is_local and self._number < 0:
            # Begun by a version that kept files on stores, too.
            self.place.write_text(_plan_of(self.name), json.dumps(known))
            self._note(self._read_files())
        said = self._newest() or self._read_files()
        self.done = said["done"]
        first, stop = said["doing"]
        # Of one that is done it says nothing.
        self.under_way = stop - first if first == self.done else 1
        return [Chunk(rows, what) for rows, what in known["chunks"]]

    def _make(self, chunks: list[Chunk]) -> None:
        """Write a plan down."""
        name = uuid.uuid4().hex
        made = {"name": name, "terms": self._terms, "chunks": [[chunk.rows, chunk.what] for chunk in chunks]}
        if self.place.is_local:
            self.place.write_text("plan.json", json.dumps(made))
            return
        # Another replay may write its plan at this moment: the first note says which one counts.
        self.place.write_text(_plan_of(name), json.dumps(made))
        self.name = name
        self._note({"done": 0, "doing": [0, 1]})

    def check(self) -> dict[str, Any]:
        """Read the plan, or nothing if there is none. PipelineError if it is of another replay."""
        noted = self._newest()
        name = _plan_of(noted["name"]) if noted else "plan.json"
        if not noted and not self.place.exists(name):
            return {}
        known: dict[str, Any] = json.loads(self.place.read_text(name))
        # A plan of 0.1.0 has fewer terms.
        if any(known["terms"].get(key, value) != value for key, value in self._terms.items()):
            raise PipelineError(
                f"{self.place} is of another replay ({json.dumps(known['terms'])}): say the same, or take another"
            )
        return known

    def begun(self, stop: int) -> None:
        """Note that the chunks up to this one are published by the next write."""
        doing = [self.done, stop]
        if self.place.is_local:
            self.place.write_text("doing.json", json.dumps(doing))
        else:
            self._note({"done": self.done, "doing": doing})

    def finished(self, done: int) -> None:
        """Note that the chunks before this one are published."""
        self.done = done
        if self.place.is_local:
            self.place.write_text("done.json", json.dumps(done))
        else:
            self._note({"done": done, "doing": [done, done + 1]})

    # --- Files --------------------------------------------------------------------------------------------------------

    def _read_files(self) -> dict[str, Any]:
        found: dict[str, Any] = {"done": 0, "doing": [0, 1]}
        for name in found:
            if self.place.exists(f"{name}.json"):
                found[name] = json.loads(self.place.read_text(f"{name}.json"))
        return found

    # --- A table ------------------------------------------------------------------------------------------------------

    def _newest(self) -> dict[str, Any]:
        """Read the newest note of a store; nothing if there is none."""
        if self.place.is_local:
            return {}
        from flintmq.spark.pipelines.tables import DeltaTable

        self._table = DeltaTable(self.place / "notes")
        noted = self._table.ends(_QUERY)
        if not noted:
            return {}
        self._number = max(noted)
        read: dict[str, Any] = json.loads(noted[self._number][0])
        return read

    def _note(self, said: dict[str, Any]) -> None:
        """Add a note to those of a store. PipelineError if another process has added one since the last was read."""
        table = self._table
        assert table is not None  # check() has opened it
        if table.schema() is None:
            import pyarrow as pa

            table.make(pa.schema([pa.field("chunk", pa.int64())]), partitioned=False)
        text = json.dumps({"name": self.name, **said})
        if not table.commit_note(_QUERY, self._number + 1, text):
            raise self._not_alone()
        self._number += 1


def _plan_of(name: str) -> str:
    return f"plan-{name}.json"
