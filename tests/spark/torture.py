"""``python -m tests.spark.torture``: Spark between brokers while everything fails; is each row there once?

    --rows 4000000 --faults 100 --to topic,archive --on local-cluster,standalone --results FILE --minutes 10

Rows of odd sizes (99 % up to 1 KB, 1 % up to 100 KB) are published to three topics of a source broker. A query on a
cluster takes them through a shuffle into five topics on three target brokers (``topic``), or `flintmq pipeline archive`
archives them (``archive``). Rows come in another order at each computation, and every new driver has other options. One
after the other, faults happen:

    driver       killed, with all its processes or its Python alone
    executor     killed
    source       the source broker killed, back after a while
    target       one of the target brokers killed, back after a while
    cut          connections between Spark and a broker cut, at once or for a while, or silent for a while
    upstream     a function before the sink fails
    speculation  a task stands still in the middle of its rows until Spark has started a copy of it, and goes on
    zombie       the driver stopped, a second one started, the first one continued
    rollback     the checkpoint loses its newest batches, up to three; if the query stops with advice, that is followed
    restart      the driver stopped as one would, and started with other options

Spark starts a copy of a task on another host only. The workers of the standalone cluster have different addresses of
this machine, and so are two hosts; ``local-cluster`` is one, and has no speculation. The query drops some rows, so that
some of its batches are empty.

The ledger decides: every other row in its topic once, with the bytes it had. Exit status 1 says that it is not so.

It is run in parts of ``--part`` rows, each with brokers, a cluster and a seed of its own. What each part came to is
added to the results, a JSON line with date, commit and machine; ``tests/spark/TORTURE.jsonl`` has those so far. After
``--minutes`` no other part is started; the same command with the same results goes on where it ended, until rows and
faults are reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# For `python -m`, which knows the repository but not the tests' own names.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark.cluster import Cluster, Program, quick_java
from spark.daemons import Node
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
from spark.proxy import Proxy
from spark.torture_driver import OUT_TOPICS, is_dropped

HERE = Path(__file__).parent
IN_TOPICS = 3
TARGETS = 3
FAULTS = (
    "driver",
    "executor",
    "source",
    "target",
    "cut",
    "speculation",
    "zombie",
    "rollback",
    "upstream",
    "restart",
)
#: Faults that the archive cannot have: it writes to no broker, and its functions are its own.
NOT_FOR_ARCHIVE = ("target", "upstream")
_BATCH = 500
#: Seconds that nothing here should ever take.
_PATIENCE = 1800.0
#: What an executor says of a task that it runs again, and of one that is not needed since a copy of it has ended.
_AGAIN = re.compile(r"Running task \d+\.[1-9]\d* in stage")
_OVERTAKEN = re.compile("reason: another attempt succeeded")
_SENTENCES = ("was committed with other rows", "checkpoint went back", "has gone back", "restore it")


def body_of(number: int) -> bytes:
    """Return the row of a number: its size and content follow from it."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    size = 1024 + mixed % 99_001 if (mixed >> 40) % 100 == 0 else mixed % 1013
    return struct.pack(">Q", number) + bytes([mixed >> 56]) * size


class Torture:
    """One route on one kind of cluster."""

    def __init__(
        self, folder: Path, rows: int, faults: int, seed: int, route: str, master: str, say: Say, first_fault: int
    ) -> None:
        self._folder, self._rows, self._faults, self._say = folder, rows, faults, say
        self._first_fault = first_fault
        self._is_archive = route == "archive"
        self._master_kind = master
        self._dice = random.Random(seed)
        self._source = Node("flintmq", folder / "source", "--mem-queue-size=1000")
        self._targets = [
            Node("flintmq", folder / f"target-{number}", "--mem-queue-size=1000")
            for number in range(0 if self._is_archive else TARGETS)
        ]
        self._proxies: list[Proxy] = []
        self._cluster: Cluster | None = None
        self._drivers = Drivers(self._start_driver)
        self._fails, self._is_slow = folder / "fail", folder / "slow"
        self.happened: list[str] = []

    @property
    def checkpoint(self) -> Path:
        return self._folder / "archive" / "_checkpoint" if self._is_archive else self._folder / "checkpoint"

    def run(self) -> dict[str, Any]:
        """Return what was found."""
        started = time.monotonic()
        publisher: Publisher | None = None
        try:
            for node in (self._source, *self._targets):
                node.start()
                self._proxies.append(Proxy(node.http))
            for node, prefix, count in (
                (self._source, "in", IN_TOPICS),
                *((t, "out", OUT_TOPICS) for t in self._targets),
            ):
                for number in range(count):
                    create_topic(node, f"{prefix}-{number}")
            if self._master_kind == "standalone":
                # Room for two drivers at a time.
                self._cluster = Cluster(self._folder / "cluster", hosts=HOSTS, cores=2, memory="2g")
            ahead = max(4000, self._rows // (self._faults + 2))
            publisher = Publisher(self._rows, _BATCH, ahead, self._arrived, self._deal)
            publisher.start()
            self._torment(publisher)
            publisher.join()
            self._say("the rest")
            self._drivers.finish(_PATIENCE)
            self._say("the ledger")
            report = self._judge()
        finally:
            if publisher is not None:
                publisher.stop()
            self._drivers.kill()
            if self._cluster is not None:
                self._cluster.stop()
            for proxy in self._proxies:
                proxy.close()
            for node in (self._source, *self._targets):
                node.stop()
        report["faults"] = dict(Counter(self.happened))
        report["copies of tasks"] = self._logged(_OVERTAKEN)
        report["drivers"] = self._drivers.report()
        report["seconds"] = round(time.monotonic() - started, 1)
        return report

    def _deal(self, numbers: range) -> Iterator[tuple[Node, str, list[bytes]]]:
        for topic in range(IN_TOPICS):
            yield self._source, f"in-{topic}", [body_of(number) for number in numbers if number % IN_TOPICS == topic]

    # --- Drivers -----------------------------------------------------------------------------------------------------

    def _conf(self) -> dict[str, str]:
        return {
            "spark.driver.memory": "1g",
            "spark.executor.memory": "512m",
            "spark.cores.max": "2",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(self._folder / "local"),
            "spark.driver.extraJavaOptions": quick_java(),
            "spark.executor.extraJavaOptions": quick_java(),
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.multiplier": "1.2",
            "spark.speculation.quantile": "0.3",
            "spark.speculation.minTaskRuntime": "500ms",
            "spark.task.maxFailures": "6",
            "spark.python.authenticate.socketTimeout": "180s",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(self._dice.choice([997, 3331, 10_000])),
        }

    def _master(self) -> str:
        return self._cluster.url if self._cluster is not None else "local-cluster[2,1,1024]"

    def _start_driver(self, number: int, once: bool) -> Program:
        log = self._folder / f"driver-{number}.log"
        if self._is_archive:
            return Program(self._archive_command(once), log)
        dice = self._dice
        # Many batches, but not so many that nothing else is done.
        most = max(1, self._rows // 60_000)
        spec = {
            "master": self._master(),
            "conf": self._conf(),
            "partitions": dice.randint(2, 5),
            "reading": {
                "nsq.nsqd.addresses": self._source.tcp,
                "nsq.nsqd.http.addresses": self._proxies[0].address,
                "subscribe": ",".join(f"in-{number}" for number in range(IN_TOPICS)),
                "startingOffsets": "earliest",
                "maxMessagesPerTrigger": str(dice.choice([2999, 5501 * most, 8191 * most])),
                "minPartitions": str(dice.randint(1, 6)),
                "arrowBatchRows": str(dice.choice([701, 4001, 10_000])),
                "fetch.timeoutMs": "15000",
            },
            "writing": {
                "nsq.nsqd.addresses": ",".join(node.tcp for node in self._targets),
                "nsq.nsqd.http.addresses": ",".join(proxy.address for proxy in self._proxies[1:]),
                "mpubMaxMessages": str(dice.choice([37, 101, 1000, 4999])),
                "mpubMaxBytes": dice.choice(["13k", "64k", "1m"]),
                "fetch.timeoutMs": "15000",
                "idempotent": "true",
            },
            "checkpoint": str(self.checkpoint),
            "progress": str(self._folder / "progress"),
            "fails": str(self._fails),
            "is slow": str(self._is_slow),
            "once": once,
        }
        path = self._folder / f"driver-{number}.json"
        path.write_text(json.dumps(spec, indent=1))
        return Program([sys.executable, str(HERE / "torture_driver.py"), str(path)], log)

    def _archive_command(self, once: bool) -> list[str]:
        flags = ["--once"] if once else ["--every", "1s"]
        conf = [part for key, value in self._conf().items() for part in ("--conf", f"{key}={value}")]
        topics = [f"in-{number}" for number in range(IN_TOPICS)]
        where = ["--nsqd", self._source.tcp, "--master", self._master(), "--to", str(self._folder / "archive")]
        options = [
            f"nsq.nsqd.http.addresses={self._proxies[0].address}",
            f"maxMessagesPerTrigger={self._dice.choice([5501, 14983, 30011])}",
            f"minPartitions={self._dice.randint(1, 6)}",
            f"arrowBatchRows={self._dice.choice([701, 4001, 10_000])}",
        ]
        reading = [part for option in options for part in ("--option", option)]
        return [sys.executable, "-m", "flintmq", "pipeline", "archive", *topics, *where, *flags, *reading, *conf]

    def _arrived(self) -> int:
        """Rows of the batches that are through."""
        if self._is_archive:
            from flintmq.spark.pipelines.archive import Target

            return sum(file.rows for file in Target.of(self._folder / "archive").open().files())
        path = self._folder / "progress"
        batches: dict[str, int] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                batch, _, rows = line.partition(" ")
                if rows:
                    batches[batch] = int(rows)
        return sum(batches.values())

    # --- Faults ------------------------------------------------------------------------------------------------------

    def _torment(self, publisher: Publisher) -> None:
        kinds = self.kinds
        give_up = time.monotonic() + _PATIENCE
        while publisher.is_alive() or len(self.happened) < self._faults:
            assert time.monotonic() < give_up, "it does not get on"
            publisher.check()
            self._drivers.keep_running()
            arrived = self._arrived()
            self._say(
                f"{publisher.published:,} published, {arrived:,} through, {len(self.happened)} of {self._faults} faults"
            )
            # The next fault is due when its part of the rows is through, and never before something is going on.
            due = self._rows * (len(self.happened) + 1) // (self._faults + 1) - 2 * _BATCH
            if len(self.happened) < self._faults and arrived >= min(due, self._rows) and arrived:
                time.sleep(self._dice.uniform(0.0, 1.5))
                kind = kinds[(self._first_fault + len(self.happened)) % len(kinds)]
                if getattr(self, f"_fault_{kind}")():
                    self.happened.append(kind)
                    give_up = time.monotonic() + _PATIENCE
            time.sleep(0.2)

    @property
    def kinds(self) -> list[str]:
        """The faults that can happen here."""
        impossible = {*(NOT_FOR_ARCHIVE if self._is_archive else ()), *(() if self._cluster else ("speculation",))}
        return [kind for kind in FAULTS if kind not in impossible]

    def _fault_driver(self) -> bool:
        driver = self._drivers.keep_running()
        if self._dice.random() < 0.7:
            self._drivers.kill()
        else:
            # Python alone: its Java notices by itself, and may still be at work when the next driver starts.
            driver.process.kill()
            driver.process.wait()
            self._drivers.current = None
        return True

    def _fault_restart(self) -> bool:
        self._drivers.keep_running()
        self._drivers.stop(20)
        return True

    def _fault_executor(self) -> bool:
        executors = self._executors()
        if not executors:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._dice.choice(executors), signal.SIGKILL)
        return True

    def _fault_source(self) -> bool:
        restart(self._source, self._dice.choice([0.0, 0.5, 3.0]))
        return True

    def _fault_target(self) -> bool:
        restart(self._dice.choice(self._targets), self._dice.choice([0.0, 0.5, 3.0]))
        return True

    def _fault_cut(self) -> bool:
        proxy = self._dice.choice(self._proxies)
        how = self._dice.randrange(3)
        if how == 0:
            for _ in range(5):
                proxy.cut()
                time.sleep(self._dice.uniform(0.0, 0.3))
            return True
        if how == 1:
            proxy.down()
        else:
            # Nothing arrives and nobody is told, as when a cable is pulled.
            proxy.hold()
        time.sleep(self._dice.uniform(0.5, 4.0))
        proxy.up()
        if self._dice.random() < 0.5:
            # Not all of what was on its way arrives.
            proxy.cut()
        return True

    def _fault_upstream(self) -> bool:
        self._fails.touch()
        return True

    def _fault_speculation(self) -> bool:
        """A task stands still; a copy of it runs elsewhere, and then both do."""
        # The first one wakes up when there is a copy, and both race; or when the copy was faster.
        awaited = self._dice.choice([_AGAIN, _OVERTAKEN])
        before = self._logged(awaited)
        stopped: list[int] = []
        if self._is_archive or self._dice.random() < 0.3:
            executors = self._executors()
            if not executors:
                return False
            stopped = _family(self._dice.choice(executors))
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        else:
            self._is_slow.write_text(str(len(self.happened)))
        give_up = time.monotonic() + 15
        while self._logged(awaited) == before and time.monotonic() < give_up and self._drivers.keep_running():
            time.sleep(0.2)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._is_slow.unlink(missing_ok=True)
        return True

    def _logged(self, pattern: re.Pattern[str]) -> int:
        """How often the executors of the cluster said something."""
        logs = self._folder.glob("cluster/work-*/*/*/stderr")
        return sum(len(pattern.findall(path.read_text(errors="replace"))) for path in logs)

    def _fault_zombie(self) -> bool:
        """Two drivers of one query: the first sleeps while the second gets on, and wakes up."""
        zombie = self._drivers.keep_running()
        stopped = _stop_without_executors(zombie)
        before = self._arrived()
        second = self._drivers.start()
        give_up = time.monotonic() + 120
        while self._arrived() == before and second.process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.2)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            zombie.process.wait(self._dice.uniform(2.0, 8.0))
        self._drivers.ended["zombie ended" if zombie.process.poll() is not None else "zombie killed"] += 1
        zombie.kill()
        self._drivers.current = second
        return True

    def _fault_rollback(self) -> bool:
        """The newest batches are gone from the checkpoint, as after a power cut or from a backup."""
        self._drivers.keep_running()
        self._drivers.kill()
        commits = [int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*")]
        if not commits:
            return False
        last = max(min(commits), max(commits) - self._dice.randrange(3))
        aside = self._folder / f"aside-{self._drivers.started}"
        shutil.copytree(self.checkpoint, aside)
        for path in self.checkpoint.glob("*/*"):
            number = path.name.removeprefix(".").removesuffix(".crc")
            if path.parent.name in ("commits", "offsets") and number.isdigit() and int(number) >= last:
                path.unlink()
        before = self._arrived()
        driver = self._drivers.current = self._drivers.start()
        give_up = time.monotonic() + 180
        while driver.process.poll() is None and self._arrived() == before and time.monotonic() < give_up:
            time.sleep(0.2)
        if driver.process.poll() is not None:
            text = driver.log.read_text(errors="replace")
            assert any(sentence in text for sentence in _SENTENCES), f"no advice in {driver.log}"
            self._drivers.ended["stopped with advice: the checkpoint went back"] += 1
            self._drivers.kill()
            shutil.rmtree(self.checkpoint)
            shutil.copytree(aside, self.checkpoint)
        shutil.rmtree(aside)
        return True

    def _executors(self) -> list[int]:
        if self._cluster is not None:
            return self._cluster.executors()
        driver = self._drivers.keep_running()
        return [pid for pid, about in _group(driver).items() if about.is_executor]

    # --- The ledger --------------------------------------------------------------------------------------------------

    def _judge(self) -> dict[str, Any]:
        if self._is_archive:
            return self._judge_archive()
        ledger = Ledger(self._rows, body_of)
        for node in self._targets:
            for topic, value in _rows_of(node):
                ledger.add(value, lambda number, topic=topic: topic == f"out-{number % OUT_TOPICS}")
        for number in filter(is_dropped, range(self._rows)):
            ledger.leave_out(number)
        return ledger.report() | {"staged bytes": sum(node.get("/stage")["bytes"] for node in self._targets)}

    def _judge_archive(self) -> dict[str, Any]:
        import deltalake

        where = str(self._folder / "archive")
        flags = ["--nsqd", self._source.tcp, "--conf", "spark.driver.memory=1g"]
        audit = run_audit(where, [f"in-{number}" for number in range(IN_TOPICS)], flags, _PATIENCE)
        # A reader that knows nothing of us must find the same.
        ledger = Ledger(self._rows, body_of)
        ledger.add_table(deltalake.DeltaTable(where).to_pyarrow_dataset())
        report = ledger.report()
        report["audit passed"] = audit["passed"]
        report["passed"] &= audit["passed"]
        return report


def _rows_of(node: Node) -> Any:
    """Yield every (topic, value) of a broker's logs."""
    from flintmq.spark.shipped.options import read_source_options
    from flintmq.spark.source import BatchReader

    options = {"nsq.nsqd.addresses": node.tcp, "subscribe": ",".join(f"out-{n}" for n in range(OUT_TOPICS))}
    reader = BatchReader(read_source_options(options, streaming=False))
    for partition in reader.partitions():
        for batch in reader.read(partition):
            yield from zip(batch.column("topic").to_pylist(), batch.column("value").to_pylist(), strict=True)


class _Process:
    def __init__(self, parent: int, is_executor: bool) -> None:
        self.parent, self.is_executor = parent, is_executor


def _group(program: Program) -> dict[int, _Process]:
    """The processes that a program started, itself included."""
    found: dict[int, _Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            # Session, which is the program's own.
            if int(fields[3]) == program.process.pid:
                command = (folder / "cmdline").read_bytes()
                found[int(folder.name)] = _Process(int(fields[1]), b"CoarseGrainedExecutorBackend" in command)
    return found


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def _stop_without_executors(program: Program) -> list[int]:
    """Stop a driver, its Java and its Python, and let executors run on; return who was stopped."""
    group = _group(program)

    def runs_on(pid: int) -> bool:
        about = group.get(pid)
        return about is not None and (about.is_executor or runs_on(about.parent))

    stopped = [pid for pid in group if not runs_on(pid)]
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return stopped


def torture(
    folder: Path,
    rows: int,
    faults: int,
    seed: int = 0,
    route: str = "topic",
    master: str = "local-cluster",
    say: Say = lambda line: None,
    first_fault: int = 0,
) -> dict[str, Any]:
    """Run one route on one kind of cluster; return what was found. Faults begin with the one of this number."""
    folder.mkdir(parents=True)
    return Torture(folder, rows, faults, seed, route, master, say, first_fault).run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000, help="shared by the combinations")
    parser.add_argument("--faults", type=int, default=100, help="shared by the combinations")
    parser.add_argument("--to", default="topic,archive", help="topic, archive or both (default: both)")
    parser.add_argument("--on", default="local-cluster,standalone", help="kinds of clusters (default: both)")
    parser.add_argument("--part", type=int, default=200_000, help="rows of one part")
    parser.add_argument("--results", type=Path, help="what parts came to; what it has is not done again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other part after so many")
    parser.add_argument("--folder", type=Path, help="where everything is kept; parts that passed are removed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args(argv)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="flintmq-spark-torture-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.results or folder / "results")
    combinations = [(route, master) for route in arguments.to.split(",") for master in arguments.on.split(",")]
    rows, faults = arguments.rows // len(combinations), -(-arguments.faults // len(combinations))
    over = time.monotonic() + 60 * arguments.minutes
    number = len(results.lines)
    is_whole, has_passed = False, True
    while time.monotonic() < over:
        # The combination that is farthest behind.
        (done, had), route, master = min((results.done(*pair), *pair) for pair in combinations)
        if done >= rows:
            is_whole = True
            break
        part = min(arguments.part, rows - done)
        seed = arguments.seed + number
        where = folder / f"{number}-{route}-{master}-{seed}"
        sys.stderr.write(f"{where}\n")
        due = max(1, faults * (done + part) // rows - had)
        report = torture(where, part, due, seed, route, master, line_writer(), had)
        results.add({"to": route, "on": master, "seed": seed, **about_this_machine(), **report})
        sys.stderr.write(f"\n{json.dumps(results.lines[-1])}\n")
        number += 1
        if report["passed"]:
            shutil.rmtree(where)
        else:
            has_passed = False
    sys.stdout.write(json.dumps({**results.totals(), "finished": is_whole}, indent=2) + "\n")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
