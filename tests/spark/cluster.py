"""Spark's own programs for the tests: a standalone cluster out of the wheel, as processes that can be killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import ready_classes

#: Options of a JVM that lives for a minute: what its second compiler would gain is spent before it is gained.
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MaxDirectMemorySize=2g"
#: A folder that is first on the path of Spark's Pythons, see the module in it.
READY_PYTHON = Path(__file__).with_name("ready_python")
#: A JVM on a busy machine takes its time.
PATIENCE = 300.0


def quick_java() -> str:
    """Options of a JVM that lives for a minute."""
    return _QUICK + ready_classes.options()


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def environment(**more: str) -> dict[str, str]:
    """What Spark's programs read: our Python, this machine alone, and our code."""
    import flintmq
    from flintmq.spark import java

    source = str(Path(flintmq.__file__).resolve().parent.parent)
    return {
        **os.environ,
        "SPARK_HOME": str(spark_home()),
        "JAVA_HOME": str(java.find().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(READY_PYTHON), source]),
        "SPARK_DAEMON_JAVA_OPTS": quick_java(),
        **more,
    }


class Program:
    """A process with its output in a file, in a process group of its own."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(**variables),
                start_new_session=True,
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        give_up = time.monotonic() + PATIENCE
        while True:
            # Asked before the log is read: the last words of a program that ends count.
            ended = self.process.poll() is not None
            if (found := re.search(pattern, self.log.read_text(errors="replace"))) is not None:
                return found
            assert not ended, f"it ended:\n{self.log.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < give_up, f"no {pattern!r} in {self.log}"
            time.sleep(0.2)

    def kill(self) -> None:
        """It and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Cluster:
    """A master and workers on this machine, one at each of ``hosts``, which are addresses of it."""

    def __init__(
        self,
        folder: Path,
        *,
        hosts: Sequence[str] = ("127.0.0.1", "127.0.0.1"),
        cores: int = 1,
        memory: str = "1g",
        **variables: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        program = str(spark_home() / "bin" / "spark-class")
        deploy = "org.apache.spark.deploy"
        self.workers: list[Program] = []
        self.master = Program(
            [program, f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"],
            folder / "master.log",
            **variables,
        )
        try:
            self.url = self.master.wait_for(r"Starting Spark master at (spark://\S+)")[1]
            self.master.wait_for("elected leader")
            for number, host in enumerate(hosts):
                flags = ["--host", host, "--cores", str(cores), "--memory", memory, "--webui-port", "0"]
                self.workers.append(
                    Program(
                        [program, f"{deploy}.worker.Worker", *flags, self.url],
                        folder / f"worker-{number}.log",
                        SPARK_WORKER_DIR=str(folder / f"work-{number}"),
                        **variables,
                    )
                )
            for worker in self.workers:
                worker.wait_for("Successfully registered with master")
        except BaseException:
            self.stop()
            raise

    def executors(self) -> list[int]:
        """The processes that our workers have started to run tasks."""
        found = []
        mine = {worker.process.pid for worker in self.workers}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in mine and b"CoarseGrainedExecutorBackend" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def stop(self) -> None:
        for program in (*self.workers, self.master):
            program.kill()
