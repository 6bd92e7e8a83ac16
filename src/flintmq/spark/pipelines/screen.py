"""What pipelines write to standard error while they work: a line that changes, and lines above it.

Java writes there too. Its lines pass through here, so that they do not break the one that changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, TextIO

from flintmq.spark.pipelines.stopping import has_standard_error, is_interrupted, standard_error_led

__all__ = [
    "Display",
    "Screen",
    "Silent",
    "say",
    "words_of_java",
    "working",
]

# How often Spark is asked how it stands; how often a line is written where nobody watches a terminal.
_POLL_SECONDS = 0.5
_LINE_SECONDS = 10.0


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class Screen:
    """A line on standard error that changes while something works; other lines come above it.

    Where nobody watches a terminal, `show` writes a line now and then.
    """

    #: The one that is open, of which there is one at most.
    _open: ClassVar[Screen | None] = None

    def __init__(self, pipeline: str = "") -> None:
        self._prefix = f"{pipeline}: " if pipeline else ""
        self._file: TextIO = sys.stderr
        self._console: Any = None
        self._status: Any = None
        self._written = time.monotonic()

    def __enter__(self) -> Screen:
        if has_standard_error():
            # A file of its own: standard error may be led elsewhere meanwhile.
            self._file = os.fdopen(os.dup(2), "w")
        if self._file.isatty():
            from rich.console import Console

            self._console = Console(file=self._file, highlight=False, markup=False)
            self._status = self._console.status(self._prefix)
            self._status.start()
        Screen._open = self
        return self

    def __exit__(self, *_: object) -> None:
        Screen._open = None
        if self._status is not None:
            self._status.stop()
            self._status = self._console = None
        if self._file is not sys.stderr:
            self._file.close()

    def show(self, text: str) -> None:
        """Say how it stands."""
        if self._status is not None:
            self._status.update(f"{self._prefix}{text}")
        elif time.monotonic() - self._written >= _LINE_SECONDS:
            self._written = time.monotonic()
            self._write(f"{self._prefix}{text}")

    def report(self, text: str) -> None:
        """Say what has begun, or is done."""
        if self._status is not None and text.startswith("starting "):
            self._status.update(f"{text} …")
        else:
            self._write(text, style="dim")

    def _write(self, text: str, style: str | None = None) -> None:
        if self._console is not None:
            self._console.print(text, style=style, soft_wrap=True)
        else:
            self._file.write(f"{text}\n")
            self._file.flush()

    @staticmethod
    def line(text: str) -> None:
        """Write a line, above the one that changes if there is one."""
        screen = Screen._open
        if screen is not None:
            screen._write(text)
        else:
            say(text)


class Display(Screen):
    """What a person sees while a stream runs."""

    def __enter__(self) -> Display:
        super().__enter__()
        self.show("waiting for the first batch")
        return self


class Silent(Display):
    """For programs, which show what they like."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, text: str) -> None:
        pass


@contextlib.contextmanager
def working(pipeline: str, what: str, tracker: Any) -> Iterator[None]:
    """Show how far Spark is while a batch query runs: tasks of its stages that are done.

    `tracker` is the context's own; a Connect server has none, and there it is None.
    """
    ended = threading.Event()
    started = time.monotonic()

    def look() -> None:
        while not ended.wait(_POLL_SECONDS):
            text = f"{what}, {time.monotonic() - started:.0f} s"
            with contextlib.suppress(Exception):
                stages = [] if tracker is None else [tracker.getStageInfo(one) for one in tracker.getActiveStageIds()]
                known = [stage for stage in stages if stage is not None]
                if known:
                    done, of = sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)
                    text += f", {done:,} of {of:,} tasks"
            screen.show(text)

    with Screen(pipeline) as screen:
        screen.show(what)
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@contextlib.contextmanager
def words_of_java() -> Iterator[None]:
    """Inside, start a Java whose standard error passes through us: it must not write into a line that changes."""
    if not has_standard_error():
        yield
        return
    read, write = os.pipe()
    threading.Thread(target=_pass_on, args=(read,), daemon=True).start()
    with standard_error_led(write):
        os.close(write)
        yield


def _pass_on(read: int) -> None:
    """Write what Java writes, but for the warnings of its launcher, about which a user can do nothing."""
    all_of_it = os.environ.get("FLINTMQ_SPARK_LOG", "error") != "error"
    with open(read, errors="replace") as lines:
        for line in lines:
            if is_interrupted():
                continue
            if all_of_it or not line.startswith("WARNING: "):
                Screen.line(line.rstrip("\n"))
