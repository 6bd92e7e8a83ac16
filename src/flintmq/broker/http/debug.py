"""``/debug``: a look inside the process. Paths are those of Go's profiler, what they show is Python's."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from types import FrameType

from flintmq.errors import HttpError
from flintmq.http.site import ADMIN, Answer, Request, Route

__all__ = ["routes"]

#: A profile takes a sample this often, and at most this long.
PROFILE_INTERVAL = 0.01
LONGEST_PROFILE = 300


def routes() -> list[Route]:
    """Return the routes, for the table of a daemon."""
    looks = _Looks()
    return [
        Route("GET", "/debug/pprof/", looks.index, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/cmdline", looks.cmdline, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/symbol", looks.symbol, ADMIN, plain=True, unlogged=True),
        Route("POST", "/debug/pprof/symbol", looks.symbol, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/profile", looks.profile, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/heap", looks.heap, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/goroutine", looks.tasks, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/block", looks.nothing, ADMIN, plain=True, unlogged=True),
        Route("GET", "/debug/pprof/threadcreate", looks.nothing, ADMIN, plain=True, unlogged=True),
        Route("PUT", "/debug/setblockrate", looks.block_rate, ADMIN, plain=True),
        Route("POST", "/debug/freememory", looks.free_memory, ADMIN, plain=True),
    ]


class _Looks:
    def __init__(self) -> None:
        self._profiling = False

    async def index(self, request: Request) -> Answer:
        rows = "".join(
            f'<tr><td><a href="/debug/pprof/{name}">{name}</a></td><td>{what}</td></tr>\n'
            for name, what in _PROFILES.items()
        )
        page = f"<html>\n<title>/debug/pprof/</title>\n<body>\n<table>\n{rows}</table>\n</body>\n</html>\n"
        return Answer(page.encode(), "text/html; charset=utf-8")

    async def cmdline(self, request: Request) -> bytes:
        return "\0".join(sys.argv).encode("utf-8", "surrogateescape")

    async def symbol(self, request: Request) -> str:
        # There are no addresses to look up: the profiles have names in them.
        return "num_symbols: 0\n"

    async def profile(self, request: Request) -> str:
        seconds = request.arguments().number("seconds", 30, lowest=1, highest=LONGEST_PROFILE)
        if self._profiling:
            raise HttpError(500, "Could not enable CPU profiling: cpu profiling already in use")
        self._profiling = True
        over = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                None, _profile, threading.get_ident(), seconds, over
            )
        finally:
            over.set()
            self._profiling = False

    async def heap(self, request: Request) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, _heap)

    async def tasks(self, request: Request) -> str:
        lines = []
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
        for task in asyncio.all_tasks():
            stack = "".join("".join(traceback.format_stack(frame, 1)) for frame in task.get_stack())
            lines.append(f"task {task.get_name()} {task.get_coro()}\n{stack}")
        return "\n".join(lines)

    async def nothing(self, request: Request) -> str:
        name = request.path.rpartition("/")[2]
        return f"{name}: this profile has no meaning in Python; see /debug/pprof/ for those that have\n"

    async def block_rate(self, request: Request) -> None:
        text = request.arguments().get("rate", "")
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
            raise HttpError(400, f'invalid block rate : strconv.Atoi: parsing "{text}": invalid syntax')

    async def free_memory(self, request: Request) -> None:
        gc.collect()


_PROFILES = {
    "cmdline": "the command line",
    "goroutine": "stacks of all threads and tasks",
    "heap": "memory, and what it is used for",
    "profile": "where the time goes: stacks with their number of samples, for ?seconds=N",
}


def _profile(thread: int, seconds: int, over: threading.Event) -> str:
    """Look where the event loop is, again and again. Stacks in the folded form that flame graphs are made from."""
    stacks: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not over.wait(PROFILE_INTERVAL):
        frame = sys._current_frames().get(thread)
        if frame is not None:
            stacks[_folded(frame)] += 1
    return "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())


def _folded(frame: FrameType | None) -> str:
    calls: list[str] = []
    while frame is not None:
        code = frame.f_code
        calls.append(f"{os.path.basename(code.co_filename)}:{code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(calls))


def _heap() -> str:
    objects = Counter(type(found).__qualname__ for found in gc.get_objects())
    lines = [f"objects that the collector knows: {objects.total()}"]
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            lines += [line.rstrip() for line in file if line.startswith(("VmRSS", "VmHWM", "VmData", "Threads"))]
    except OSError:
        pass
    lines += [f"collections by generation: {[generation['collections'] for generation in gc.get_stats()]}", ""]
    lines += [f"{count:10} {name}" for name, count in objects.most_common(50)]
    return "\n".join(lines) + "\n"
