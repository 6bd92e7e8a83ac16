"""How a pipeline ends when it is told to: by ctrl-C within three seconds, whatever it does, by SIGTERM after a batch.

Ctrl-C first asks: a stream ends after its batch, a replay after its write. What has not ended by then is cut short.
That costs nothing but time: each commit is whole or is not there, and the next run goes on from it. Libraries that do
not hear of a signal, because they are at work in code of their own, do not hold up the end either.

 0 s    ctrl-C: asked_to_stop() is set; without it KeyboardInterrupt is raised
 1.2 s  KeyboardInterrupt is raised in any case
 2.0 s  the process ends, wherever it is
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

__all__ = [
    "Asked",
    "asked_to_stop",
    "end_quietly",
    "ending_soon",
    "has_standard_error",
    "is_interrupted",
    "is_program",
    "standard_error_led",
    "stopped",
]

#: Seconds from ctrl-C until work is cut short.
_CUT_SECONDS = 1.2
#: Seconds from ctrl-C until the process ends, wherever it is.
_LAST_SECONDS = 2.0

#: What a shell says of a program that SIGINT ended.
_INTERRUPTED = 130

#: The command line that this process is, of which there is one at most.
_program: Ending | None = None
#: Standard error as it was before ctrl-C.
_before_the_end: int | None = None
#: Standard error, while its descriptor leads elsewhere.
_aside: int | None = None


class Ending:
    """The end of one command line."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        #: The exit status, as soon as it is known.
        self.status: int | None = None
        #: Ctrl-C was pressed.
        self.is_near = False


@contextlib.contextmanager
def ending_soon(pipeline: str) -> Iterator[Ending]:
    """Inside, ctrl-C ends this process within three seconds. Once it was pressed that holds on the way out, too.

    Only the main thread of a program of our own can see to it.
    """
    global _program
    ending = Ending(pipeline)
    if threading.current_thread() is not threading.main_thread() or not has_standard_error() or _has_spark():
        yield ending
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The interpreter writes the number of a signal there at once, also while the main thread is in other code.
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, ending), name="flintmq-ctrl-c", daemon=True).start()
    _program = ending
    try:
        yield ending
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        if ending.status == _INTERRUPTED:
            _end_children()
        if not ending.is_near:
            _program = None


def _has_spark() -> bool:
    """Does Spark run in this process already? Then this is a larger program, which may go on after the command line."""
    pyspark = sys.modules.get("pyspark")
    return getattr(getattr(pyspark, "SparkContext", None), "_active_spark_context", None) is not None


def _watch(read: int, ending: Ending) -> None:
    """End the process some time after ctrl-C, unless it has ended by itself."""
    with open(read, "rb", buffering=0) as signals:
        while signal.SIGINT not in (heard := signals.read(1)):
            if not heard:
                return
        ending.is_near = True
        # The other end is still written to: it is not left alone.
        time.sleep(_LAST_SECONDS)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if ending.status is None:
            ending.status = stopped(ending.pipeline)
        _end_children()
        os._exit(ending.status)


def is_program() -> bool:
    """Is this process a pipeline's command line, and not a program that calls its function?"""
    return _program is not None


class Asked(threading.Event):
    """Set when a signal asks for the end."""

    #: It was ctrl-C.
    is_ctrl_c = False

    def check(self) -> None:
        """KeyboardInterrupt if ctrl-C has ended work that was to be done to its end."""
        if self.is_ctrl_c:
            raise KeyboardInterrupt


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """Set when SIGINT or SIGTERM asks for the end; a second ctrl-C raises KeyboardInterrupt.

    On a command line that happens by itself soon after the first one. Outside of the main thread there are no signals
    to hear.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    main = threading.get_ident()
    again = threading.Timer(_CUT_SECONDS, lambda: signal.pthread_kill(main, signal.SIGINT))
    again.daemon = True

    def heard(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            if asked.is_ctrl_c:
                _interrupt()
            asked.is_ctrl_c = True
            if is_program():
                again.start()
        asked.set()

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        again.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_quietly() -> None:
    """From now on, ctrl-C ends this program with one line.

    Spark's own handler calls Java, perhaps from within a call of Java; and py4j, and whatever tidies up afterwards over
    a connection that is gone, have a trace for each such moment. Nobody needs them: nothing is written but that line.
    """
    if threading.current_thread() is threading.main_thread() and has_standard_error():
        signal.signal(signal.SIGINT, _interrupt)


@contextlib.contextmanager
def standard_error_led(to: int) -> Iterator[None]:
    """Inside, what is written to standard error goes to another descriptor. Ctrl-C is still told where it belongs."""
    global _aside
    before = os.dup(2)
    os.dup2(to, 2)
    _aside = before
    try:
        yield
    finally:
        _aside = None
        if not is_interrupted():
            os.dup2(before, 2)
        os.close(before)


def has_standard_error() -> bool:
    """Is standard error the process's own, and not something that a program has put in its place?"""
    try:
        return sys.stderr.fileno() == 2
    except (OSError, ValueError):
        return False


def _interrupt(*_: object) -> NoReturn:
    global _before_the_end
    if _before_the_end is None and is_program() and has_standard_error():
        _before_the_end = os.dup(2 if _aside is None else _aside)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    raise KeyboardInterrupt


def is_interrupted() -> bool:
    return _before_the_end is not None


def stopped(pipeline: str) -> int:
    """Say that ctrl-C ended a pipeline, and return the exit status of that."""
    os.write(2 if _before_the_end is None else _before_the_end, f"flintmq pipeline {pipeline}: stopped\n".encode())
    return _INTERRUPTED


def _end_children() -> None:
    """Tell Java, which is our child, to end: one that is only just starting does not see yet that we are gone."""
    ours = str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The second field is a name in parentheses that may hold spaces; the parent is the second behind it.
            if stat.read_text().rpartition(")")[2].split()[1] == ours:
                os.kill(int(stat.parent.name), signal.SIGTERM)
