"""What can go wrong in a benchmark run.

BenchError          one run failed; the other scenarios still make sense
└── StartError      a daemon or the load generator cannot be started at all; nothing makes sense
"""


class BenchError(Exception):
    """A run that gave no figure: lost messages, an error frame, a daemon that died."""


class StartError(BenchError):
    """A program that never came up; every further run would fail in the same way."""
