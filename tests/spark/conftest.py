"""What the Spark tests share: a small Spark on ``local[2,4]``, a session per module, and brokers in other processes.

Nothing here stands in for Spark or for a broker. Where pyspark or Java is missing the tests are skipped, and say so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import site
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import flintmq
from flintmq.errors import PipelineError
from flintmq.spark import java

from . import ready_classes
from .cluster import READY_PYTHON, quick_java
from .daemons import Lookupd, Node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

HERE = Path(__file__).parent
SOURCE = Path(flintmq.__file__).resolve().parent.parent
#: A session, a query's first batch and a busy machine all take their time.
PATIENCE = 180.0

StartNode = Callable[..., Node]


def missing() -> str:
    """Why there is no Spark here, or nothing."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'flintmq[spark]'"
    try:
        java.find()
    except PipelineError as exc:
        return str(exc)
    return ""


#: Files that take longest. One worker runs all of a file: what begins last should not be one of these.
LONG = (
    "test_pipelines_broker.py",
    "test_torture.py",
    "test_backfill.py",
    "test_spark_pages.py",
    "test_source_clusters.py",
    "test_pipelines_failures.py",
    "test_pipelines_s3.py",
    "test_reporting.py",
    "test_sink_exactly_once.py",
    "test_source_spool.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # xdist would begin with the files that have most tests, which are not these.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(600))
        fixtures = getattr(item, "fixturenames", ())
        if not {"spark", "spark_environment"}.isdisjoint(fixtures):
            item.add_marker(pytest.mark.slow)
            # Spark's own Python side leaves sockets to the collector and calls what pandas has deprecated.
            for category in ("ResourceWarning", "DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def spark_environment(pytestconfig: pytest.Config) -> Iterator[None]:
    """What Spark's processes read from the environment, and the end of its JVM when the tests are over."""
    if why := missing():
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_HOME", str(java.find().home))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        # Workers start elsewhere: a relative path would not lead them to the package.
        path = [str(READY_PYTHON), str(SOURCE), *_absolute_python_path()]
        patch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys(path)))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.delenv("SPARK_HOME", raising=False)
        patch.setenv("SPARK_LAUNCHER_OPTS", quick_java())
        if pytestconfig.cache is not None:
            ready_classes.make(pytestconfig.cache.mkdir("spark"), quick_java())
        patch.setenv("SPARK_SUBMIT_OPTS", quick_java())
        yield
        stop_jvm()


def _absolute_python_path() -> list[str]:
    return [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def stop_jvm() -> None:
    """End the JVM that pyspark keeps for the next session."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    with contextlib.suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    if process is not None:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has all that this one has, pyspark and pyarrow too, but not flintmq."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for path in map(Path, site.getsitepackages()):
        for found in path.iterdir() if path.is_dir() else ():
            # Files like .pth say where an editable flintmq is.
            if not re.search("flintmq|pyspark_nsq", found.name) and found.suffix != ".pth":
                with contextlib.suppress(FileExistsError):
                    (packages / found.name).symlink_to(found)
    python = str(folder / "bin" / "python")
    have = "import importlib.util, pyarrow, pyspark; print(bool(importlib.util.find_spec('flintmq')))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-c", have], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
    return python


def small_session(master: str, scratch: Path, **conf: str) -> SparkSession:
    """A session that is content with little memory; one at a time."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("flintmq tests")
    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.local.dir": str(scratch / "local"),
        # A lost task is tried again soon.
        "spark.task.maxFailures": "4",
        # A busy machine is slow to start a Python.
        "spark.python.authenticate.socketTimeout": "180s",
        **conf,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="session")
def running_spark(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """``local[2,4]``: two cores, and a task is tried four times."""
    session = small_session("local[2,4]", tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="module")
def spark(running_spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own for each module, with its own settings, views and sources, in the Spark that runs."""
    from pyspark.sql import SparkSession

    # The first one that is made now is what a builder returns.
    SparkSession._instantiatedSession = None
    session = running_spark.newSession()
    yield session
    for query in session.streams.active:
        query.stop()
    session.catalog.clearCache()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Our nsqd, for all tests of a module: each takes topics of its own."""
    node = Node("flintmq", tmp_path_factory.mktemp("broker"))
    node.start()
    yield node
    node.stop()


@pytest.fixture(scope="module")
def go_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """NSQ's own nsqd; skipped where it is not there."""
    node = Node("go", tmp_path_factory.mktemp("go"))
    node.start()
    yield node
    node.stop()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Three brokers for tests that kill nobody; each test is another query, and clears the topics."""
    nodes = [Node("flintmq", tmp_path_factory.mktemp(f"node-{number}")) for number in range(3)]
    for node in nodes:
        node.start()
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture
def nodes(three: list[Node]) -> Iterator[list[Node]]:
    yield three
    for node in three:
        for entry in node.get("/stats", format="json")["topics"]:
            node.post("/topic/delete", topic=entry["topic_name"])


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """``start_node(kind, *flags)``: more nsqds, which the test may kill."""
    started: list[Node] = []

    def start(kind: str = "flintmq", *flags: str) -> Node:
        node = Node(kind, tmp_path / f"node-{len(started)}", *flags)
        node.start()
        started.append(node)
        return node

    yield start
    for node in started:
        node.stop()


@pytest.fixture
def lookupd() -> Iterator[Lookupd]:
    daemon = Lookupd()
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic that no other test uses."""
    words = re.sub(r"[^a-zA-Z0-9_]+", "-", request.node.name.removeprefix("test_"))
    return f"{words[:40]}-{os.urandom(4).hex()}"


def wait_for(condition: Callable[[], Any], what: str = "", patience: float = PATIENCE) -> Any:
    """What the condition says as soon as it says something; it is asked again and again until then."""
    give_up = time.monotonic() + patience
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > give_up:
            raise AssertionError(f"after {patience:g} s still not: {what or condition}")
        time.sleep(0.1)


#: Spark gives a new Python ten seconds to call back, and no setting changes that: not enough on a machine that stands
#: still for a moment. The query has not begun then, and is simply started again.
_NOT_STARTED = "failed to connect back"


def start_query(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query; it is past its beginning, or has failed, when this returns."""
    while True:
        query = start()
        wait_for(
            lambda query=query: query.exception() or "nitializing" not in query.status["message"], "the query starts"
        )
        if _NOT_STARTED not in str(query.exception()):
            return query
        query.stop()


def run_query(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Run a query that ends by itself (trigger AvailableNow) to its end; raises what it failed of."""
    while True:
        query = start()
        try:
            assert query.awaitTermination(PATIENCE), f"the query did not end: {query.status}"
        except Exception as exc:
            if _NOT_STARTED not in str(exc):
                raise
        else:
            return query
        finally:
            query.stop()
