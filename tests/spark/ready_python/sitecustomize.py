"""Python runs this at its start, where this folder is on its path: a worker of Spark is ready in a tenth of the time.

Spark has its workers import pyspark from an archive, which keeps no bytecode: each of them compiles all of it again.
Its daemon imports nothing before it forks a worker, so that each of them imports pyarrow and everything else by itself.
Most tests have workers do less than that. Here they import the same pyspark as it is installed, and so does the daemon.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

#: What workers import, but for the module of their own. Where a test keeps flintmq from them it is not there.
_FOR_ALL = ("numpy", "pyarrow", "flintmq.spark.source")
#: What those of tasks import besides: pyarrow asks of each list whether it comes from pandas.
_FOR_TASKS = ("pyarrow.compute", "pandas", "pyarrow.pandas_compat")


def _pass_by_archives() -> None:
    """Leave out Spark's archives where the pyspark that they belong to is installed."""
    within = os.path.join("pyspark", "")
    archives = [path for path in sys.path if path.endswith((".zip", ".jar")) and within in path]
    installed = {os.path.realpath(os.path.join(path, "pyspark")) for path in sys.path if path not in archives}
    for path in archives:
        if os.path.realpath(path.rpartition(within)[0] + "pyspark") in installed:
            sys.path.remove(path)


def _import_for_workers(module: str) -> None:
    # Its threads would be in the daemon alone.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in (*_FOR_ALL, module, *(_FOR_TASKS if module == "pyspark.worker" else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


_pass_by_archives()
# python -m pyspark.daemon MODULE
if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    _import_for_workers(sys.orig_argv[3])
