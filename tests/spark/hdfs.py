"""A real HDFS for tests: Hadoop's own name node and data node in one process, from the jar that scripts/peers fetches.

The rest of Hadoop is in pyspark's jars, of the same version. ``python -m spark.hdfs FOLDER PORT`` runs one for the
examples of the docs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq.spark import java
from support.peers import PEERS
from support.ports import held_port

from .cluster import quick_java, spark_home

#: Hadoop's command line around its small cluster, which the jar has for its own tests.
_MAIN = "org.apache.hadoop.test.MiniDFSClusterManager"


class Hdfs:
    """One name node and one data node. They can be killed, and come back with what they had."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        jars = sorted((PEERS / "hadoop").glob("hadoop-client-minicluster-*.jar"))
        if not jars:
            pytest.skip("no HDFS in $FLINTMQ_PEERS/hadoop or .peers/hadoop: run scripts/peers")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port = port or held_port()
        #: Where files are: a path is put behind it.
        self.uri = f"hdfs://127.0.0.1:{self.port}"
        self._classes = os.pathsep.join(map(str, [*jars, *_jars_of_spark()]))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, format: bool = True) -> None:
        """Return when files can be written."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        log = self._folder / "hdfs.log"
        command = [
            str(java.find().home / "bin" / "java"),
            *quick_java().split(),
            "-Xmx400m",
            "-cp",
            self._classes,
            _MAIN,
        ]
        command += ["-nnport", str(self.port), "-datanodes", "1", "-writeDetails", str(ready)]
        command += ["-format"] if format else []
        command += ["-D", f"hdfs.minidfs.basedir={self._folder / 'dfs'}", "-D", "dfs.replication=1"]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT)
        give_up = time.monotonic() + 180
        while not ready.exists():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < give_up, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@contextlib.contextmanager
def hdfs(folder: Path, port: int = 0) -> Iterator[Hdfs]:
    """A new and empty one, which ends with the context."""
    found = Hdfs(folder, port)
    found.start()
    try:
        yield found
    finally:
        found.kill()


def _jars_of_spark() -> list[Path]:
    """The client's side of Hadoop, and what writes its log."""
    folder = spark_home() / "jars"
    names = ("hadoop-client-api-", "hadoop-client-runtime-", "slf4j-api-", "jcl-over-slf4j-", "log4j-")
    return [path for path in sorted(folder.glob("*.jar")) if path.name.startswith(names)]


if __name__ == "__main__":
    with hdfs(Path(sys.argv[1]).absolute(), int(sys.argv[2])):
        (Path(sys.argv[1]) / "running").touch()
        threading.Event().wait()
