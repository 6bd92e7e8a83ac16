"""The same scenario on clusters of several processes, with flintmq on every machine and shipped to those without it.

A standalone cluster that has flintmq is the one of the torture.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.ports import held_port

pytest.importorskip("pyspark")

from .cluster import READY_PYTHON, quick_java
from .conftest import SOURCE, wait_for

SCENARIO = Path(__file__).with_name("scenario.py")
SUBMITTED = Path(__file__).resolve().parents[2] / "examples" / "spark_archive.py"
RIGHT = {"batch": True, "stream": 3000, "stream after a restart": 3000, "out": True}


def environment(python=sys.executable, **more):
    """What processes of Spark inherit: no path by which they would find flintmq."""
    import pyspark

    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "SPARK_", "PYSPARK_"))}
    return {
        **kept,
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(READY_PYTHON),
        **dict.fromkeys(("SPARK_LAUNCHER_OPTS", "SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"), quick_java()),
        **more,
    }


def play(master, broker, topic, folder, *, ship, env=None):
    """The scenario in a driver of its own; what it found."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCENARIO), master, broker.tcp, topic, str(folder), str(SOURCE), "1" if ship else "0"]
    env = env or environment(**({} if ship else {"PYTHONPATH": f"{READY_PYTHON}{os.pathsep}{SOURCE}"}))
    if master.startswith("sc://"):
        env = {key: value for key, value in env.items() if key != "SPARK_HOME"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


class Process:
    """One of Spark's own programs; ready when it has said so."""

    def __init__(self, name, arguments, env, ready, folder):
        self._log = folder / f"{name}.log"
        with open(self._log, "wb") as log:
            command = [str(Path(env["SPARK_HOME"]) / "bin" / "spark-class"), *arguments]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        try:
            self.found = wait_for(lambda: self._ready(ready), f"{name} is ready")
        except BaseException:
            self.stop()
            raise

    def _ready(self, pattern):
        text = self._log.read_text(errors="replace")
        assert self._process.poll() is None, text[-3000:]
        return re.search(pattern, text)

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def standalone(folder, env):
    """A master and two workers; the master's URL."""
    port = held_port()
    env = {**env, "SPARK_WORKER_DIR": str(folder / "work"), "SPARK_DAEMON_MEMORY": "256m"}
    listen = ["--host", "127.0.0.1", "--webui-port", "0"]
    with contextlib.ExitStack() as stack:
        master = Process(
            "master",
            ["org.apache.spark.deploy.master.Master", *listen, "--port", str(port)],
            env,
            "elected leader",
            folder,
        )
        stack.callback(master.stop)
        url = f"spark://127.0.0.1:{port}"
        workers: list[Process] = []
        lock = threading.Lock()

        def start(name):
            arguments = ["org.apache.spark.deploy.worker.Worker", *listen, "--cores", "1", "--memory", "1g", url]
            worker = Process(name, arguments, env, "Successfully registered with master", folder)
            with lock:
                workers.append(worker)

        threads = [threading.Thread(target=start, args=(f"worker-{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in workers:
            stack.callback(worker.stop)
        assert len(workers) == 2
        yield url


def test_executors_in_processes_of_their_own(spark_environment, broker, topic, tmp_path):
    found = play("local-cluster[2,1,1024]", broker, topic, tmp_path, ship=False)
    assert found == {"executors have flintmq": [True], **RIGHT}


def test_a_standalone_cluster_that_gets_it_shipped(
    spark_environment, bare_python, broker, start_node, lookupd, topic, tmp_path
):
    env = environment(bare_python)
    with standalone(tmp_path, env) as url:
        assert play(url, broker, topic, tmp_path / "app", ship=True, env=env) == {
            "executors have flintmq": [False],
            **RIGHT,
        }
        submit(url, start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}"), lookupd, tmp_path, env)


def submit(url, node, lookupd, folder, env):
    """A script by spark-submit on workers that have no flintmq: the session is the one that it has configured."""
    deltalake = pytest.importorskip("deltalake")
    node.publish("orders", [b"%d" % number for number in range(500)])
    words = [str(Path(env["SPARK_HOME"]) / "bin" / "spark-submit"), "--master", url, "--driver-memory", "700m"]
    conf = {"spark.archive.once": "yes", "spark.executor.memory": "700m", "spark.ui.enabled": "false"}
    conf["spark.executor.extraJavaOptions"] = quick_java()
    words += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    words += [str(SUBMITTED), "orders", str(folder / "archive"), str(folder / "checkpoint"), lookupd.http]
    done = subprocess.run(words, env={**env, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("archive: 500 messages")
    table = deltalake.DeltaTable(str(folder / "archive")).to_pyarrow_table(columns=["value"])
    assert sorted(map(int, table["value"].to_pylist())) == list(range(500))


def test_spark_connect_gets_it_shipped(spark_environment, bare_python, broker, topic, tmp_path):
    pytest.importorskip("grpc")
    port = held_port()
    env = environment(bare_python)
    arguments = [
        "org.apache.spark.deploy.SparkSubmit",
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master",
        "local[2,4]",
        "--driver-memory",
        "1g",
        "--conf",
        f"spark.connect.grpc.binding.port={port}",
        "--conf",
        "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf",
        "spark.ui.enabled=false",
        "--conf",
        f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}",
        "spark-internal",
    ]
    server = Process("connect", arguments, env, "Spark Connect server started", tmp_path)
    try:
        found = play(f"sc://127.0.0.1:{port}", broker, topic, tmp_path / "app", ship=True, env=env)
    finally:
        server.stop()
    assert found == {"executors have flintmq": [False], **RIGHT}
