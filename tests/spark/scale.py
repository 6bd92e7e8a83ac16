"""``python -m tests.spark.scale``: topics into a Delta table on S3, by a cluster, while all of it is killed.

    --rows 10000000 --kills 20 --folder FOLDER --results FILE --minutes 60

Rows are published to two brokers. `flintmq pipeline archive` archives them on a standalone cluster of two workers, into
a Delta table on a SeaweedFS server. One after the other are killed, each when its part of the rows is archived:

    driver       with all its processes; another one is started
    executor     its worker starts another one
    broker       back after a while
    store        the S3 server with everything in it, back after a while

The end is judged three times: by `flintmq pipeline audit --complete`, which compares each row with the log; by every
body that `deltalake` reads, of which each must be there once with the bytes that it had; and by DuckDB, which counts.

Everything is in the folder. The same command with the same folder goes on where it ended: after a ctrl-C, a kill, or
after ``--minutes``, when it stops with exit status 75. At the end one JSON line is added to the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# For `python -m`, which knows the repository but not the tests' own names.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark.cluster import Cluster, Program, quick_java
from spark.daemons import Node
from spark.object_store import Server
from spark.ordeal import (
    HOSTS,
    Drivers,
    Ledger,
    Publisher,
    Results,
    Say,
    about_this_machine,
    create_topic,
    line_writer,
    restart,
    run_audit,
)

BROKERS = 2
TOPIC = "rows"
KINDS = ("driver", "executor", "broker", "store")
#: Rows of one publish to a broker.
_BATCH = 5000
#: Seconds without a row that is archived, after which it is given up.
_PATIENCE = 900.0
#: The exit status of a run that is to be gone on with: EX_TEMPFAIL.
UNFINISHED = 75


def body_of(number: int) -> bytes:
    """Return the row of a number, 40 to 295 bytes: its size and content follow from it."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    return struct.pack(">QQ", number, mixed) + b"%024x" % (mixed * mixed) * (1 + (mixed >> 60))


class State:
    """What a run that goes on must know, in a file."""

    def __init__(self, path: Path, rows: int, kills: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.facts: dict[str, Any] = {"rows": rows, "kills": kills, "published": 0, "happened": [], "seconds": 0.0}
        self.facts |= {"drivers": 0, "ended": {}}
        if path.exists():
            self.facts |= json.loads(path.read_text())
            assert (rows, kills) == (self.facts["rows"], self.facts["kills"]), f"{path} is of a run with other numbers"

    def note(self, **facts: Any) -> None:
        with self._lock:
            self.facts |= facts
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.facts))
            partial.replace(self._path)


class Scale:
    """One run, or what is left of it."""

    def __init__(self, folder: Path, rows: int, kills: int, seed: int, minutes: float, say: Say) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rows, self._kills, self._say = folder, rows, kills, say
        self._over = time.monotonic() + 60 * minutes
        self._state = State(folder / "state.json", rows, kills)
        self._dice = random.Random(seed)
        # 2 GB for a small run; files grow as they are needed.
        self._store = Server(folder / "store", "scale", volumes=(100, max(64, rows // 20_000)))
        self._brokers = [
            Node("flintmq", folder / f"broker-{number}", "--mem-queue-size=1000") for number in range(BROKERS)
        ]
        self._cluster: Cluster | None = None
        facts = self._state.facts
        self._drivers = Drivers(self._start_driver, started=facts["drivers"], ended=facts["ended"])
        self._archived = 0
        # The driver that runs is looked for in the table this often.
        self._next_look = 0.0

    @property
    def _table(self) -> str:
        return f"{self._store.bucket.uri}/archive"

    def run(self) -> dict[str, Any] | None:
        """Return what was found; None if the time was over before the end."""
        started, before = time.monotonic(), self._state.facts["seconds"]
        publisher: Publisher | None = None
        try:
            self._store.start()
            for node in self._brokers:
                node.start()
                create_topic(node, TOPIC)
            # The logs of the workers of an earlier run are of no use.
            shutil.rmtree(self._folder / "cluster", ignore_errors=True)
            self._cluster = Cluster(self._folder / "cluster", hosts=HOSTS, cores=1, memory="1g")
            self._look()
            publisher = self._publisher()
            publisher.start()
            if not self._torment(publisher):
                return None
            publisher.join()
            self._say("the rest")
            self._drivers.finish(3 * _PATIENCE)
            self._say("the ledger")
            report = self._judge()
        finally:
            if publisher is not None:
                publisher.stop()
            self._drivers.kill()
            if self._cluster is not None:
                self._cluster.stop()
            for node in self._brokers:
                node.stop()
            self._store.kill()
            self._note_drivers()
            self._state.note(seconds=round(before + time.monotonic() - started, 1))
        facts = self._state.facts
        report["kills"] = dict(Counter(facts["happened"]))
        report["drivers"] = self._drivers.report()
        report["seconds"] = facts["seconds"]
        return report

    def _publisher(self) -> Publisher:
        def deal(numbers: range) -> Iterator[tuple[Node, str, list[bytes]]]:
            for at, broker in enumerate(self._brokers):
                yield broker, TOPIC, [body_of(number) for number in numbers[at :: len(self._brokers)]]

        return Publisher(
            self._rows,
            _BATCH * len(self._brokers),
            max(4 * _BATCH, self._rows // 8),
            lambda: self._archived,
            deal,
            published=self._state.facts["published"],
            note=lambda published: self._state.note(published=published),
        )

    # --- The driver ---------------------------------------------------------------------------------------------------

    def _command(self, *flags: str) -> list[str]:
        assert self._cluster is not None
        conf = {
            "spark.driver.memory": "1g",
            "spark.executor.memory": "700m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(self._folder / "local"),
            "spark.driver.extraJavaOptions": quick_java(),
            "spark.executor.extraJavaOptions": quick_java(),
            "spark.task.maxFailures": "8",
            "spark.python.authenticate.socketTimeout": "180s",
        }
        # About 50 batches, whatever the number of rows: each kill hits another one.
        options = {"maxMessagesPerTrigger": str(max(2000, self._rows // 50)), "minPartitions": "4"}
        words = [sys.executable, "-m", "flintmq", "pipeline", "archive", TOPIC, "--master", self._cluster.url]
        words += [part for node in self._brokers for part in ("--nsqd", node.tcp)]
        words += ["--to", self._table, "--checkpoint", str(self._folder / "checkpoint"), *self._store.bucket.flags]
        words += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
        words += [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
        return [*words, *flags]

    def _start_driver(self, number: int, once: bool) -> Program:
        self._note_drivers()
        flags = ["--once"] if once else ["--every", "1s"]
        return Program(self._command(*flags), self._folder / f"driver-{number}.log")

    def _note_drivers(self) -> None:
        self._state.note(drivers=self._drivers.started, ended=dict(self._drivers.ended))

    def _look(self) -> int:
        """Rows that are in the table, as it was last seen: while the store is down nobody can tell."""
        from deltalake import DeltaTable

        if time.monotonic() >= self._next_look:
            with contextlib.suppress(Exception):
                found = DeltaTable(self._table, storage_options={**self._store.bucket.options, "max_retries": "0"})
                import pyarrow as pa

                self._archived = sum(pa.table(found.get_add_actions())["num_records"].to_pylist())
            self._next_look = time.monotonic() + 2.0
        return self._archived

    # --- Kills --------------------------------------------------------------------------------------------------------

    def _torment(self, publisher: Publisher) -> bool:
        """Publish all rows and kill so often; False if the time was over before."""
        last, give_up = -1, 0.0
        while publisher.is_alive() or len(self._happened) < self._kills:
            publisher.check()
            if time.monotonic() > self._over:
                return False
            self._drivers.keep_running()
            archived = self._look()
            if archived != last:
                last, give_up = archived, time.monotonic() + _PATIENCE
            assert time.monotonic() < give_up, f"it does not get on: see {self._folder}"
            kills = f"{len(self._happened)} of {self._kills} kills"
            self._say(f"{publisher.published:,} published, {archived:,} archived, {kills}")
            due = self._rows * (len(self._happened) + 1) // (self._kills + 2)
            if len(self._happened) < self._kills and archived >= due:
                time.sleep(self._dice.uniform(0.0, 1.5))
                kind = KINDS[len(self._happened) % len(KINDS)]
                if getattr(self, f"_kill_{kind}")():
                    self._state.note(happened=[*self._happened, kind])
            time.sleep(0.3)
        return True

    @property
    def _happened(self) -> list[str]:
        return list(self._state.facts["happened"])

    def _kill_driver(self) -> bool:
        self._drivers.keep_running()
        self._drivers.kill()
        return True

    def _kill_executor(self) -> bool:
        assert self._cluster is not None
        if not (executors := self._cluster.executors()):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._dice.choice(executors), signal.SIGKILL)
        return True

    def _kill_broker(self) -> bool:
        restart(self._dice.choice(self._brokers), self._dice.choice([0.0, 1.0, 5.0]))
        return True

    def _kill_store(self) -> bool:
        restart(self._store, self._dice.choice([0.0, 1.0, 5.0]))
        return True

    # --- The ledger ---------------------------------------------------------------------------------------------------

    def _judge(self) -> dict[str, Any]:
        started = time.monotonic()
        flags = [part for node in self._brokers for part in ("--nsqd", node.tcp)] + self._store.bucket.flags
        conf = {"spark.driver.memory": "3g", "spark.local.dir": self._folder / "local"}
        conf |= {"spark.sql.shuffle.partitions": "16"}
        flags += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
        audit = run_audit(self._table, [TOPIC], flags, 4 * _PATIENCE)
        audited = time.monotonic()
        report = self._read()
        report["audit"] = {
            "passed": audit["passed"],
            "published": sum(node["published"] for node in audit["nodes"]),
            "archived": sum(node["archived"] for node in audit["nodes"]),
            "seconds": round(audited - started, 1),
        }
        counts = {report["deltalake"], report["duckdb"], report["audit"]["published"], report["audit"]["archived"]}
        report["passed"] &= bool(audit["passed"]) and counts == {self._rows}
        return report

    def _read(self) -> dict[str, Any]:
        """Look at the table as one does who knows nothing of us."""
        import duckdb
        from deltalake import DeltaTable

        table = DeltaTable(self._table, storage_options=self._store.bucket.options)
        rows = table.to_pyarrow_dataset()
        ledger = Ledger(self._rows, body_of)
        ledger.add_table(rows)
        [(counted,)] = duckdb.sql('SELECT count(DISTINCT (node, "offset")) FROM rows').fetchall()
        found = {"deltalake": rows.count_rows(), "duckdb": counted}
        return ledger.report() | found | {"files": len(table.file_uris()), "commits": table.version()}


def scale(
    folder: Path, rows: int, kills: int, seed: int = 0, minutes: float = float("inf"), say: Say = lambda line: None
) -> dict[str, Any] | None:
    """Run it, or go on with it; return what was found, None if the time was over before."""
    return Scale(folder, rows, kills, seed, minutes, say).run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where everything is kept, and gone on with")
    parser.add_argument("--results", type=Path, help="a JSON line is added to this file at the end")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so many; the same command goes on"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="flintmq-spark-scale-"))).absolute()
    sys.stderr.write(f"everything is in {folder}\n")
    report = scale(folder, arguments.rows, arguments.kills, arguments.seed, arguments.minutes, line_writer())
    if report is None:
        sys.stderr.write(f"\nnot finished: the same command with --folder {folder} goes on\n")
        return UNFINISHED
    line = {"what": "scale", "seed": arguments.seed, **about_this_machine(), **report}
    if arguments.results:
        Results(arguments.results).add(line)
    sys.stdout.write(f"\n{json.dumps(line)}\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
