"""Pipelines that are ready to run: `flintmq pipeline NAME`, or the function of the same name.

Each module here is one pipeline: a function for programs, `add_arguments` and `run` for the command line. What they
share is in `common`; `store` and `lake` are the files of an archive.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flintmq.errors import FlintError
from flintmq.usage import Parser

if TYPE_CHECKING:
    import argparse

__all__ = ["PIPELINES", "main"]

#: By name on the command line: the module, and what it is for.
PIPELINES = {
    "archive": ("archive", "write topics to a table, each message exactly once"),
    "backfill": ("backfill", "add missing messages of a period to an archive"),
    "audit": ("audit", "compare published and archived messages"),
    "metrics": ("metrics", "measure rates, sizes, delays and frequent values of topics"),
    "replay": ("replay", "publish messages of an archive or a log again"),
    "dead-letters": ("dead_letters", "show why messages died, and send them back by a filter"),
    "sql": ("sql", "run a query over topics, to a topic, a table or the screen"),
    "status": ("status", "show the progress of streams, from brokers and checkpoints"),
    "sample": ("sample", "publish, archive and measure sample messages"),
}

#: Packages of the extra spark, which pipelines import when they need them.
_SPARK_PACKAGES = frozenset({"pyspark", "py4j", "pyarrow", "pandas", "deltalake"})


def main(argv: Sequence[str]) -> int:
    """`flintmq pipeline`: 0 after a clean end, 1 when something failed or does not add up, 2 for a wrong call.

    130 if ctrl-C has cut work short; a stream whose batch ended in time has a clean end.
    """
    parser = Parser(
        prog="flintmq pipeline",
        description="Ready-made Spark pipelines; flintmq pipeline NAME --help describes one.",
    )
    names = parser.add_subparsers(dest="pipeline", metavar="NAME", required=True)
    for name, (module, purpose) in PIPELINES.items():
        # Only the one that is asked for is imported.
        if name in argv[:1]:
            importlib.import_module(f"flintmq.spark.pipelines.{module}").add_arguments(
                names.add_parser(name, help=purpose)
            )
        else:
            names.add_parser(name, help=purpose)
    arguments = parser.parse_args(argv)
    from flintmq.spark.pipelines import stopping

    with stopping.ending_soon(arguments.pipeline) as ending:
        ending.status = _run(arguments)
        return ending.status


def _run(arguments: argparse.Namespace) -> int:
    from flintmq.spark.pipelines import stopping

    error = ""
    try:
        pipeline = importlib.import_module(f"flintmq.spark.pipelines.{PIPELINES[arguments.pipeline][0]}")
        from flintmq.spark.pipelines import common, reports

        try:
            status: int = pipeline.run(arguments)
        except Exception as exc:
            error = str(exc) or type(exc).__name__
            if stopping.is_interrupted():
                # Spark tidied up over a connection that was gone.
                return stopping.stopped(arguments.pipeline)
            if isinstance(exc, ModuleNotFoundError) and (exc.name or "").split(".")[0] in _SPARK_PACKAGES:
                error = f"{exc.name} is not installed: pip install 'flintmq[spark]'"
                sys.stderr.write(f"flintmq pipeline {arguments.pipeline}: {error}\n")
                return 1
            is_of_spark = type(exc).__module__.startswith(("pyspark.", "py4j."))
            if not isinstance(exc, FlintError) and not is_of_spark:
                raise
            # What Spark refuses only when it computes: a query that cannot run, a topic that is gone.
            told = common.explain(exc) if is_of_spark else str(exc)
            sys.stderr.write(f"flintmq pipeline {arguments.pipeline}: {told}{_remedy(arguments, told)}\n")
            return 1
        finally:
            reports.end("" if stopping.is_interrupted() else error)
    except KeyboardInterrupt:
        return stopping.stopped(arguments.pipeline)
    return status


def _remedy(arguments: argparse.Namespace, told: str) -> str:
    """Return what to do where no broker runs at the default address."""
    is_default = not (getattr(arguments, "nsqd", None) or getattr(arguments, "lookupd", None))
    return "; start one with: flintmq up" if is_default and "cannot be reached: Connection refused" in told else ""
