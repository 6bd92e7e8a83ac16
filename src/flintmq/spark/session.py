"""A Spark session that is right for messages, on this machine, on a cluster or behind Spark Connect.

`session` starts Spark, or joins one that runs, with the settings that our sources, sinks and pipelines count on: the
same Python for driver and workers, times in UTC and in microseconds, task retries also in local mode, few shuffle
partitions where there are few cores. It finds Java first, and says in one sentence what is missing.

What the caller sets wins over all of it, and a session that runs already keeps what it has, its time zone too. No
session is asked for its `sparkContext`, which Spark Connect does not have.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.errors import PipelineError
from flintmq.spark import java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LOCAL_MASTER", "check_pyspark", "session"]

#: All cores, and four attempts for each task: plain `local[*]` ends a query at the first one that fails.
LOCAL_MASTER = "local[*,4]"

#: Said once Spark is there, and while it starts.
Report = Callable[[str], None]

# Local mode shuffles through one machine: more partitions than this per core only cost time.
_PARTITIONS_PER_CORE = 2
# Memory of Java in local mode, where it does the work too.
_LEAST_MEGABYTES, _MOST_MEGABYTES = 1024, 4096

_LOGGING = """\
# Made by flintmq: errors only, on standard error. Set FLINTMQ_SPARK_LOG=info (or warn, debug) to see more.
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
logger.python.name = org.apache.spark.api.python.PythonGatewayServer
logger.python.level = {level}
# Why a query ended is in the exception that it ended with, for whoever waits for it.
logger.query.name = org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution
logger.query.level = {query_level}
appender.console.type = Console
appender.console.name = stderr
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


def check_pyspark() -> None:
    """PipelineError, with what to install, if there is no pyspark, or one that is too old."""
    try:
        import pyspark
    except ImportError as exc:
        raise PipelineError(f"pyspark is not installed ({exc}): pip install 'flintmq[spark]'") from exc
    if int(pyspark.__version__.split(".")[0]) < 4:
        raise PipelineError(f"pyspark {pyspark.__version__} is too old: pip install 'flintmq[spark]'")


def session(
    app: str = "flintmq",
    *,
    master: str | None = None,
    remote: str | None = None,
    report: Report | None = None,
    **conf: object,
) -> SparkSession:
    """A SparkSession. `master` is Spark's (default: all cores of this machine), `remote` a Spark Connect server.

    Further keywords are Spark's settings: ``session("x", **{"spark.driver.memory": "4g"})``. `report` is given a line
    when Spark starts and one when it is there; without it, a terminal on standard error gets them.
    """
    if master and remote:
        raise PipelineError("give a master or a remote server, not both")
    check_pyspark()
    import pyspark
    from pyspark.sql import SparkSession

    # Workers and the processes of our sources are started by Java, which would take the first `python3` in PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    remote = remote or (None if master else os.environ.get("SPARK_REMOTE"))
    builder = SparkSession.builder.appName(app)
    settings: dict[str, str] = {}
    is_ours = not _is_running(remote)
    if remote:
        builder = builder.remote(remote)
        where = remote
    elif "PYSPARK_GATEWAY_PORT" in os.environ or not is_ours:
        # Inside spark-submit, or in a notebook that has a session: Java runs, and has its master.
        if master:
            builder = builder.master(master)
        where = "the Spark that runs here"
    else:
        found = java.find()
        os.environ["JAVA_HOME"] = str(found.home)
        master = master or os.environ.get("MASTER") or LOCAL_MASTER
        builder = builder.master(master)
        settings |= _own_jvm(master)
        where = f"{master} with {found}"
    settings |= {key: _text(value) for key, value in conf.items()}
    for key, value in settings.items():
        builder = builder.config(key, value)

    with _progress(report, f"Spark {pyspark.__version__} on {where}"):
        try:
            spark = builder.getOrCreate()
        except Exception as exc:
            raise PipelineError(f"Spark did not start on {where}: {_first_line(exc)}") from exc
        _complete(spark, is_ours)
    return spark


def _is_running(remote: str | None) -> bool:
    """Is there a session already, of this thread or another, that a builder would return?"""
    if remote:
        try:
            from pyspark.sql.connect.session import SparkSession as Remote
        except Exception:  # a part of Spark Connect is missing, and starting it will say which
            return False
        return Remote.getActiveSession() is not None or Remote._get_default_session() is not None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    return SparkContext._active_spark_context is not None or SparkSession.getActiveSession() is not None


def _complete(spark: SparkSession, is_ours: bool) -> None:
    """Set what nobody has set: not here, not on the command line of spark-submit, not in spark-defaults.conf."""
    is_set = spark.conf.getAll
    settings = _settings()
    if is_ours:
        settings |= {"spark.sql.session.timeZone": "UTC"}
    for key, value in settings.items():
        if key not in is_set:
            spark.conf.set(key, value)


def _settings() -> dict[str, str]:
    """What a session may set at any time; the time zone is that of a session's owner, and only set in a new one."""
    return {
        # The default, INT96, is read as nanoseconds by others, and is refused by Iceberg.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.metricsEnabled": "true",
    }


def _own_jvm(master: str) -> dict[str, str]:
    """What can only be set before Java starts."""
    settings = {
        "spark.ui.showConsoleProgress": "false",
        # Two sessions on a machine are nothing unusual; the second would search for a port, with a warning for each.
        "spark.ui.enabled": os.environ.get("FLINTMQ_SPARK_UI", "false"),
    }
    level = os.environ.get("FLINTMQ_SPARK_LOG", "error")
    logging = java.cache_folder() / f"log4j2-{level}.properties"
    with contextlib.suppress(OSError):
        logging.parent.mkdir(parents=True, exist_ok=True)
        _write_if_changed(logging, _LOGGING.format(level=level, query_level="off" if level == "error" else level))
        settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={logging.as_uri()}"
    if master.startswith("local"):
        # Spark's own 1g does not hold a few messages of 20 MB. On a cluster the tasks are elsewhere.
        if not _is_configured("spark.driver.memory", "SPARK_DRIVER_MEMORY"):
            settings["spark.driver.memory"] = f"{_memory_megabytes()}m"
        cores = os.cpu_count() or 1
        settings["spark.sql.shuffle.partitions"] = str(max(2, _PARTITIONS_PER_CORE * cores))
        # A machine that changes networks, or resolves its own name wrongly, must still reach itself.
        settings["spark.driver.bindAddress"] = settings["spark.driver.host"] = "127.0.0.1"
    return settings


def _is_configured(key: str, variable: str) -> bool:
    """Is there a value for a setting in the environment, or in Spark's own configuration?"""
    if os.environ.get(variable):
        return True
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    try:
        text = Path(folder, "spark-defaults.conf").read_text()
    except OSError:
        return False
    return re.search(rf"^\s*{re.escape(key)}[\s=:]", text, re.MULTILINE) is not None


def _memory_megabytes() -> int:
    """Memory for Java: a quarter of the machine's, within bounds."""
    try:
        megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        return _LEAST_MEGABYTES
    return min(max(megabytes // 4, _LEAST_MEGABYTES), _MOST_MEGABYTES)


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        # In one step: another process may be reading it.
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


@contextlib.contextmanager
def _progress(report: Report | None, what: str) -> Iterator[None]:
    """Starting Spark takes several seconds: say so, and how long it took."""
    started = time.monotonic()
    if report is None and not sys.stderr.isatty():
        yield
    elif report is not None:
        report(f"starting {what}")
        yield
        report(f"{what} started in {time.monotonic() - started:.1f} s")
    else:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        with console.status(f"starting {what} …"):
            yield
        console.print(f"{what} started in {time.monotonic() - started:.1f} s", style="dim")
