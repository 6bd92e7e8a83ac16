"""Pipelines that are ready to run: `flintmq pipeline NAME`, or the function of the same name.

Each module here is one pipeline: a function for programs, `add_arguments` and `run` for the command line. What they
share is in `common`; `store` and `lake` are the files of an archive.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flintmq.errors import FlintError

__all__ = ["PIPELINES", "main"]

#: By name on the command line: the module, and what it is for.
PIPELINES = {
    "archive": ("archive", "topics into files, each message exactly once"),
    "audit": ("audit", "what was published against what was archived"),
    "metrics": ("metrics", "rates, sizes, delays and frequent values of topics"),
    "replay": ("replay", "publish again what was archived or is still in a log"),
    "dead-letters": ("dead_letters", "why messages died, and sending them back by a filter"),
    "sql": ("sql", "a query over topics, to a topic, a table or the screen"),
    "sample": ("sample", "sample messages, archived and measured, to have something to look at"),
}


def main(argv: Sequence[str]) -> int:
    """`flintmq pipeline`: 0 after a clean end, 1 when something failed or does not add up, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="flintmq pipeline",
        description="Ready-made Spark pipelines; flintmq pipeline NAME --help tells more of one.",
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
    pipeline = importlib.import_module(f"flintmq.spark.pipelines.{PIPELINES[arguments.pipeline][0]}")
    try:
        status: int = pipeline.run(arguments)
    except FlintError as exc:
        sys.stderr.write(f"flintmq pipeline {arguments.pipeline}: {exc}\n")
        return 1
    except Exception as exc:
        if not type(exc).__module__.startswith(("pyspark.", "py4j.")):
            raise
        # What Spark refuses only when it computes: a query that cannot run, a topic that is gone.
        from flintmq.spark.pipelines.common import explain

        sys.stderr.write(f"flintmq pipeline {arguments.pipeline}: {explain(exc)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"flintmq pipeline {arguments.pipeline}: stopped\n")
        return 130
    return status
