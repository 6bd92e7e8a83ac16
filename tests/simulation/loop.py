"""The event loop of a simulated process: asyncio's own, with the time and the sockets of a World.

`turn` runs it once; the World decides when. Functions for an executor run at a moment of the World's choice, with no
event loop around them, as in a thread. aiohttp's client works: the real socket it makes is exchanged for a simulated
one when it connects.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import selectors
import socket
import sys
import threading
from asyncio import events, selector_events
from collections.abc import Callable
from typing import Any, Protocol

from .network import Network, Owner, Socket
from .world import NotYet, Stuck, World

__all__ = ["Loop"]

#: Timers of one program. Whatever waits should wait for one thing at a time.
MOST_TIMERS = 2_000


class Machine(Owner, Protocol):
    """What a loop wants to know of the machine that it runs on."""

    calls: int
    #: Something may have become readable or writable since the loop was last found to have nothing to do.
    stirred: bool
    #: More than 0 inside what runs in a thread.
    aside: int


class _Selector(selectors._BaseSelectorImpl):  # type: ignore[name-defined,misc]
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for key in self._fd_to_key.values():
            end = self._world.descriptor(key.fd)
            if end is not None and (mask := end.ready() & key.events):
                found.append((key, mask))
        if len(found) > 1:
            self._world.rng.shuffle(found)
        return found


class Loop(selector_events.BaseSelectorEventLoop):
    """`host` is the address that its connections come from; `machine` owns them, and can die under the loop."""

    def __init__(
        self,
        world: World,
        network: Network,
        host: str = "10.0.9.1",
        machine: Machine | None = None,
        *,
        call_cost: int = 0,
    ) -> None:
        self.machine = machine
        #: Nanoseconds that each call of a function takes, so that long work takes long.
        self._call_cost = call_cost
        self._calls = 0
        self._signals: dict[int, Callable[[], object]] = {}
        #: It serves. A start reads all files that it finds in one turn, and nobody waits for it.
        self.serving = True
        #: System calls of the longest turn that served, and of the longest one of a start.
        self.most_calls = self.most_calls_of_start = 0
        #: Called after a turn in which something was written to a file.
        self.wrote: Callable[[], object] = lambda: None
        self.world = world
        self.network = network
        self.host = host
        self._chosen: dict[socket.socket, Socket] = {}
        super().__init__(_Selector(world))
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._unhandled)
        world.processes.append(self)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.machine is not None and self.machine.dead:
            return
        self.world.violated(f"event loop: {context.get('message')}: {error!r}")

    # --- Stepping ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return (self.world.now + self._calls * self._call_cost) / 1e9

    def _count(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self._calls += 1

    def due(self) -> bool:
        if self.machine is not None and self.machine.dead:
            return False
        if self._ready or (self._scheduled and self._scheduled[0]._when <= self.time()):
            return True
        if self.machine is not None and not self.machine.stirred:
            return False
        descriptor = self.world.descriptor
        for key in self._selector._fd_to_key.values():
            end = descriptor(key.fd)
            if end is not None and end.ready() & key.events:
                return True
        if self.machine is not None:
            self.machine.stirred = False
        return False

    def next_timer(self) -> int | None:
        if self.machine is not None and self.machine.dead:
            return None
        while self._scheduled and self._scheduled[0]._cancelled:
            # As the loop itself does, only sooner: time must not stop for what was cancelled.
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        return round(self._scheduled[0]._when * 1e9) + 1 if self._scheduled else None

    def turn(self) -> None:
        self._thread_id = threading.get_ident()
        events._set_running_loop(self)
        before = 0 if self.machine is None else self.machine.calls
        serving = self.serving
        profile = sys.getprofile()
        if self._call_cost:
            sys.setprofile(self._count)
        try:
            self._run_once()
        finally:
            if self._call_cost:
                sys.setprofile(profile)
                calls, self._calls = self._calls, 0
                self.world.pass_time(calls * self._call_cost)
            if self.machine is not None:
                if serving:
                    self.most_calls = max(self.most_calls, self.machine.calls - before)
                else:
                    self.most_calls_of_start = max(self.most_calls_of_start, self.machine.calls - before)
                if self.machine.writes and not self.machine.dead:
                    self.machine.writes = 0
                    self.wrote()
            self._thread_id = None
            events._set_running_loop(None)
        if len(self._scheduled) > MOST_TIMERS and not (self.machine is not None and self.machine.dead):
            self.world.violated(f"timers: {len(self._scheduled)} are waited for")
            raise Stuck("it has too many timers")

    def run(self, work: Any, seconds: float = float("inf")) -> Any:
        """Run a coroutine to its end; Stuck if that does not come within so many virtual seconds."""
        task = self.create_task(work)
        self.world.run(task.done, seconds)
        return task.result()

    def _make_self_pipe(self) -> None:
        self._internal_fds = 0

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...

    # --- Signals -----------------------------------------------------------------------------------------------------

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self._signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def deliver(self, sig: int) -> None:
        """The process is sent a signal; one that it does not handle is lost."""
        if sig in self._signals:
            self.call_soon(self._signals[sig])

    # --- Threads, names, connections ---------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def work() -> None:
            if self.machine is not None and self.machine.dead:
                return
            if done.set_running_or_notify_cancel():
                again()

        def again() -> None:
            if self.machine is not None and self.machine.dead:
                return
            if self.machine is not None:
                self.machine.aside += 1
            try:
                result = func(*args)
            except NotYet:
                self.world.after(0.001, again)
            except BaseException as exc:
                done.set_exception(exc)
            else:
                done.set_result(result)
            finally:
                if self.machine is not None:
                    self.machine.aside -= 1

        self.world.after(self.world.rng.uniform(0, 0.001), work)
        return asyncio.wrap_future(done, loop=self)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.0001)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (self.network.resolve(host), port))]

    async def _dial(self, address: tuple[str, int]) -> Socket:
        if address in self.network.black_holes:
            await asyncio.sleep(120)
            raise TimeoutError("connect timed out")
        await asyncio.sleep(2 * self.network.delay(address[0]))
        near = self.network.connect(address, self.host)
        if self.machine is not None:
            try:
                near.adopt(self.machine)
            except OSError:
                near.close()
                raise
        return near

    async def sock_connect(self, sock: Any, address: Any) -> None:
        self._chosen[sock] = await self._dial(address)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> Any:
        if sock is None:
            try:
                address = (self.network.resolve(host), port)
            except UnicodeError as exc:
                raise OSError(f"bad name {host!r}") from exc
            sock = await self._dial(address)
        elif isinstance(sock, socket.socket):
            sock.close()
            sock = self._chosen.pop(sock)
        return await super().create_connection(factory, sock=sock)
