"""``python -m tests.spark.torture``: archive on a cluster while everything is killed, then see whether it is all there.

    --messages 2000000 --kills 30 --folder DIR

A broker is published to, `flintmq pipeline archive` runs on a standalone cluster with two workers, and one after the
other its driver, an executor or the broker is killed with SIGKILL, each as often as the next, at moments spread over
the run. Whoever was killed comes back. At the end `flintmq pipeline audit --complete` compares the log with the
archive, message by message, and a reader without the manifest must find the same. Exit status 1 says that it does not.

The folder keeps everything: run it again with the same one and it goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# For `python -m`, which knows the repository but not the tests' own names.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flintmq.spark.pipelines.store import Archive
from spark.cluster import Cluster, Program, environment
from spark.daemons import Node

TOPIC = "orders"
#: Holds the log: what nobody has finished is not freed.
HOLDER = "audit"
VICTIMS = ("driver", "executor", "broker")
_BATCH = 1000
#: What nothing here should ever take.
_PATIENCE = 1800.0


@dataclass
class State:
    """What is kept across runs of the torture itself."""

    messages: int
    kills: int
    seed: int
    published: int = 0
    killed: list[str] = field(default_factory=list)
    #: Drivers that ended by themselves, because what they need was away.
    given_up: int = 0


class Torture:
    def __init__(self, folder: Path, state: State, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._state = state
        self._say = say
        self._random = random.Random(state.seed + len(state.killed))
        self._broker = Node("flintmq", folder / "broker", "--mem-queue-size=1000")
        self._broker_lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._driver: Program | None = None
        self._over = threading.Event()
        self._trouble: list[BaseException] = []

    @property
    def archive(self) -> Path:
        return self._folder / "archive"

    def run(self) -> dict[str, Any]:
        """The audit's report, with what happened."""
        started = time.monotonic()
        self._broker.start()
        publisher = threading.Thread(target=self._publish, name="publisher")
        try:
            self._broker.post("/topic/create", topic=TOPIC)
            self._broker.post("/channel/create", topic=TOPIC, channel=HOLDER)
            self._cluster = Cluster(self._folder / f"cluster-{os.getpid()}")
            publisher.start()
            self._archive()
            publisher.join()
            if self._trouble:
                raise self._trouble[0]
            self._say("archiving the rest")
            self._finish()
            self._say("auditing")
            report = self._audit()
        finally:
            self._over.set()
            if self._driver is not None:
                self._driver.kill()
            if self._cluster is not None:
                self._cluster.stop()
            if publisher.is_alive():
                publisher.join()
            self._broker.stop()
        report |= {"kills": dict(Counter(self._state.killed)), "drivers_given_up": self._state.given_up}
        report["seconds"] = round(time.monotonic() - started, 1)
        return report

    # --- Publishing --------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        state = self._state
        try:
            while state.published < state.messages and not self._over.is_set():
                count = min(_BATCH, state.messages - state.published)
                bodies = [f"message {state.published + number}".encode() for number in range(count)]
                try:
                    self._broker.publish(TOPIC, bodies)
                except (OSError, urllib.error.URLError):
                    # Killed just now. Perhaps it has them: then they are there twice, which is no business of ours.
                    with self._broker_lock:
                        continue
                state.published += count
                self._save()
                # Slow enough for every kill to hit something that is going on.
                while state.published - self._archived() > 20 * _BATCH and not self._over.is_set():
                    time.sleep(0.2)
        except BaseException as exc:
            self._trouble.append(exc)
            self._over.set()

    def _archived(self) -> int:
        return Archive(self.archive).snapshot().rows if (self.archive / "_manifest").is_dir() else 0

    # --- Archiving, and killing --------------------------------------------------------------------------------------

    def _archive(self) -> None:
        state = self._state
        give_up = time.monotonic() + _PATIENCE
        while state.published < state.messages or len(state.killed) < state.kills:
            assert time.monotonic() < give_up, "it does not get on"
            if self._over.is_set():
                return
            if self._driver is None or self._driver.process.poll() is not None:
                if self._driver is not None:
                    state.given_up += 1
                self._driver = self._start_driver()
            archived = self._archived()
            self._say(
                f"{state.published:,} published, {archived:,} archived, {len(state.killed)} of {state.kills} killed"
            )
            # The next kill is due when its part of the messages is archived, and never before something is going on.
            due = state.messages * (len(state.killed) + 1) // (state.kills + 1)
            if len(state.killed) < state.kills and archived >= due - 10 * _BATCH and archived:
                time.sleep(self._random.uniform(0.0, 3.0))
                if self._kill(VICTIMS[len(state.killed) % len(VICTIMS)]):
                    give_up = time.monotonic() + _PATIENCE
            time.sleep(0.3)

    def _start_driver(self) -> Program:
        assert self._cluster is not None
        flags = ["--every", "1s", "--master", self._cluster.url, *_conf()]
        return Program(self._command("archive", *flags, "--to", str(self.archive)), self._folder / "driver.log")

    def _kill(self, victim: str) -> bool:
        """Kill somebody; False if there is nobody to kill just now."""
        assert self._driver is not None and self._cluster is not None
        if victim == "driver":
            if self._random.random() < 0.5:
                self._driver.kill()
            else:
                # Python alone: its Java notices by itself, and may still be at work when the next driver starts.
                self._driver.process.kill()
                self._driver.process.wait()
            self._driver = None
        elif victim == "executor":
            executors = self._cluster.executors()
            if not executors:
                return False
            os.kill(self._random.choice(executors), signal.SIGKILL)
        else:
            with self._broker_lock:
                self._broker.kill()
                self._broker.start()
        self._state.killed.append(victim)
        self._save()
        return True

    def _finish(self) -> None:
        """Stop the driver as one would, and archive what is left."""
        if self._driver is not None:
            self._driver.process.terminate()
            self._driver.process.wait(_PATIENCE)
            # Also a Java that was left behind by a kill of its Python.
            self._driver.kill()
        self._run("archive", "--once", "--to", str(self.archive))

    # --- Judging -----------------------------------------------------------------------------------------------------

    def _audit(self) -> dict[str, Any]:
        ended = self._run("audit", "--complete", "--archive", str(self.archive), check=False)
        report: dict[str, Any] = json.loads(ended.stdout)
        import pyarrow.dataset

        plain = pyarrow.dataset.dataset(str(self.archive), format="parquet", partitioning="hive")
        found = Counter(plain.to_table(columns=["offset"])["offset"].to_pylist())
        report["plain_reader"] = {"messages": len(found), "doubles": sum(found.values()) - len(found)}
        published = sum(node["published"] for node in report["nodes"])
        report["enough"] = published >= self._state.messages
        report["passed"] &= report["enough"] and report["plain_reader"] == {"messages": published, "doubles": 0}
        return report

    def _command(self, pipeline: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", "flintmq", "pipeline", pipeline, TOPIC, "--nsqd", self._broker.tcp, *flags]

    def _run(self, pipeline: str, *flags: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = self._command(
            pipeline, "--json", "--master", "local[2,4]", "--conf", "spark.driver.memory=1g", *flags
        )
        ended = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        assert not check or ended.returncode == 0, ended.stderr
        assert ended.stdout, ended.stderr
        return ended

    def _save(self) -> None:
        save(self._folder, self._state)


def _conf() -> list[str]:
    settings = {
        "spark.driver.memory": "1g",
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    return [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]


def save(folder: Path, state: State) -> None:
    partial = folder / ".state.json"
    partial.write_text(json.dumps(asdict(state)))
    os.replace(partial, folder / "state.json")


def torture(
    folder: Path, messages: int, kills: int, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run it, or go on with what is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = State(messages, kills, seed)
    if (folder / "state.json").exists():
        state = State(**json.loads((folder / "state.json").read_text()))
        # More of either than last time is a longer run of the same.
        state.messages, state.kills = max(messages, state.messages), max(kills, state.kills)
    save(folder, state)
    return Torture(folder, state, say).run()


def _line_writer() -> Callable[[str], None]:
    """Shows how it goes: one line on a terminal, else a line whenever something is new."""
    last = ""

    def say(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
            sys.stderr.flush()

    return say


def run_command(
    name: str, about: str, run: Callable[..., dict[str, Any]], messages: int, kills: int, argv: Sequence[str] | None
) -> int:
    """The command line of a torture: its exit status says whether it was passed."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.spark.{name}", description=about.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=messages)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--folder", type=Path, help="where everything is kept")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix=f"flintmq-{name.replace('_', '-')}-"))
    sys.stderr.write(f"everything is in {folder}\n")
    report = run(folder.absolute(), arguments.messages, arguments.kills, arguments.seed, _line_writer())
    sys.stderr.write("\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0 if report["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("torture", __doc__, torture, 2_000_000, 30, argv)


if __name__ == "__main__":
    sys.exit(main())
