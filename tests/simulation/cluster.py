"""Simulated nodes: real brokers and lookupds, each a process on a Machine of its own, started, killed, started again.

An Nsqd outlives its processes: it keeps the tree of files, the date and the options that the next one starts with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.broker.daemon import Broker
from flintmq.errors import FlintError
from flintmq.lookup.daemon import Lookupd as LookupDaemon

from .inside import stored, stored_keys
from .ledger import FORGOTTEN_BY_A_KILL
from .loop import Loop
from .machine import Machine, Workers
from .network import Socket

if TYPE_CHECKING:
    from .brokers import Run

__all__ = ["Lookupd", "Nsqd"]

SECOND = 1_000_000_000
SYNC_TIMEOUT = 0.3
#: System calls that one turn of a start may make: at least, and more for each file that it finds.
START_CALLS, START_CALLS_PER_FILE = 600, 20


class _Node:
    def __init__(self, run: Run, name: str, host: str) -> None:
        self.run = run
        self.name = name
        self.host = host
        self.machine: Machine | None = None
        self.loop: Loop | None = None
        #: It serves.
        self.up = False
        self.starts = 0
        self.booted = run.world.now
        self.death = ""

    def is_still(self, start: int) -> bool:
        """Is it the process of that start, and alive?"""
        return self.starts == start and self.machine is not None and not self.machine.dead

    def _boot(self, main: Callable[[Machine], Any]) -> Machine:
        run = self.run
        self.starts += 1
        run.machines += 1
        machine = Machine(
            run.world, run.network, self.host, Path("/simulated") / self.name, run.machines, booted=self.booted
        )
        machine.name = self.name
        self.machine = machine
        self.loop = Loop(run.world, run.network, self.host, machine)
        machine.died = self._died
        run.graves.append((machine, self.loop, self.loop.create_task(main(machine))))
        return machine

    def _died(self) -> None: ...

    def _bury(self, *, silently: bool = False) -> None:
        assert self.machine is not None and self.loop is not None
        self.up = False
        self.run.reached.update(self.machine.reached)
        self.run.reached["written by the kernel"] += self.machine.kernel_writes
        self.run.most_calls = max(self.run.most_calls, self.loop.most_calls)
        self.machine.close_sockets(silently=silently)
        if self.loop in self.run.world.processes:
            self.run.world.processes.remove(self.loop)


class Lookupd(_Node):
    def boot(self) -> None:
        if self.machine is None or self.machine.dead:
            self._boot(self._main)

    async def _main(self, machine: Machine) -> None:
        self.daemon = LookupDaemon(
            tcp_address=f"{self.host}:4160",
            http_address=f"{self.host}:4161",
            broadcast_address=self.host,
            now=machine.clock.now,
            wall=machine.clock.wall,
            system=machine,
        )
        await self.daemon.start()
        self.up = True

    def kill(self) -> None:
        if self.machine is not None and not self.machine.dead:
            self.machine.died = lambda: None
            self.machine.die()
            self._bury()


class Nsqd(_Node):
    def __init__(self, run: Run, name: str, host: str, options: dict[str, Any]) -> None:
        super().__init__(run, name, host)
        self.options = options
        self.durability: str = options["durability"]
        self.msg_timeout = options["msg_timeout"] / SECOND
        self.step = 0
        #: Somebody has changed the date.
        self.date_changed = False
        self.was_full = False
        self.broker: Broker | None = None
        self._tree: Any = None
        #: How the process is to end that is dying: "kill", "power", or "exit" by itself.
        self.death = "kill"
        #: Something is wrong with the disk until then: what is not synced may be old.
        self.unsound_since = self.unsound_until = 0.0
        #: The fault itself is over by then, unless it waits for its call.
        self.faulty_until = 0.0
        #: A topic of it is being deleted until then.
        self.deleted_until = 0.0
        self.capacity: int | None = None
        self._silent: list[Socket] = []
        self.stopping = False
        self.retired = False
        #: (calls, how): the next process dies after so many.
        self.crash_next: tuple[int, str] | None = None
        #: What the next process meets while it starts.
        self.fault_next: Callable[[Machine], object] | None = None
        #: Its files were damaged: it must not start.
        self.damaged = False
        self.failed_starts = 0
        self.hostname = name
        #: Files that the last start found.
        self.found = 0
        self.sync_seconds = run.rng.choice([0.0005, 0.002, 0.02])
        self.loss = random.Random(f"{run.seed} {name} losses")

    def boot(self) -> None:
        if self.machine is not None and not self.machine.dead:
            return
        self.stopping = False
        for sock in self._silent:
            # The machine is back, and knows nothing of these connections.
            if not sock.closed:
                sock._reset()
        self._silent.clear()
        machine = self._boot(self._main)
        assert self.loop is not None
        self.loop.wrote = lambda: self.run.inside.wrote(self)
        machine.clock.step = self.step  # type: ignore[attr-defined]
        machine.capacity = self.capacity
        machine.sync_seconds = self.sync_seconds
        machine.name = self.hostname
        if self._tree is not None:
            machine.tree = self._tree
        self.loop.serving = False
        self.found = len(machine._files(machine.tree))
        self.death = "kill"
        if self.crash_next is not None:
            calls, self.death = self.crash_next
            machine.power_off_at = machine.calls + calls
            self.crash_next = None
            self.run.reached["crash at a start"] += 1
        if self.fault_next is not None:
            self.fault_next(machine)
            self.fault_next = None
            self.run.reached["fault at a start"] += 1

    async def _main(self, machine: Machine) -> None:
        assert self.loop is not None
        broker = self.broker = Broker(
            disk=Workers(machine), clock=machine.clock, data_path=str(machine.root), **self.options
        )
        try:
            await broker.start()
        except FlintError as exc:
            self.failed_starts += 1
            self.run.reached["start refused"] += 1
            # The fault may be over by now; it must have been one.
            if self.damaged:
                self.retired = True
                self.run.reached["damaged journal refused"] += 1
            elif not any(what.startswith(("ENOSPC", "EMFILE", "EIO")) for what in machine.reached):
                self.run.world.violated(f"{self.name} does not start: {exc}")
            self.death = "exit"
            machine.die()
            return
        self.up = self.loop.serving = True
        self.run.inside.started(self)
        try:
            await broker.wait_closed()
        except FlintError as exc:
            self.run.reached["stopped by a fault"] += 1
            # A missing descriptor, and a slow disk, are no reason; but a stop that cannot save everything says so.
            reasons = ("EIO", "ENOSPC", "EMFILE") if self.stopping else ("EIO", "ENOSPC")
            failed = any(what.startswith(reasons) for what in machine.reached)
            if not failed or self.run.world.seconds > self.unsound_until:
                self.run.world.violated(f"{self.name} stops without a fault: {exc}")
            self.death = "fault"
        else:
            self.death = "exit"
        machine.die()

    async def _stop(self) -> None:
        assert self.broker is not None
        await self.broker.stop()

    def stop(self) -> None:
        """Ask for a clean stop."""
        if self.up and not self.stopping and self.loop is not None:
            self.stopping = True
            self.run.graves.append((None, None, self.loop.create_task(self._stop())))

    def kill(self, how: str) -> None:
        if self.machine is not None and not self.machine.dead:
            self.death = how
            self.machine.die()

    def kill_in(self, calls: int, how: str) -> None:
        if self.machine is not None and not self.machine.dead:
            self.death = how
            self.machine.power_off_at = self.machine.calls + calls

    def faulty(self, machine: Machine) -> bool:
        """Is something wrong with its disk now?"""
        slow = machine.sync_seconds > self.sync_seconds
        return slow or machine.flaky or machine.most_files is not None or machine.capacity is not None

    def _died(self) -> None:
        machine, run = self.machine, self.run
        assert machine is not None
        stored_messages: dict[str, set[bytes]] = {}
        keys: dict[str, set[bytes]] = {}
        if self.broker is not None:
            run.inside.look(self, ended=True)
            for topic in self.broker.topics.values():
                if topic.log.durability == "memory" and not topic.ephemeral:
                    stored_messages[topic.name] = stored(topic, machine)
                    keys[topic.name] = stored_keys(topic, machine)
            run.reached["published by a lane"] += self.broker.counters.lane_published
            run.reached["finished by a lane"] += self.broker.counters.lane_finished
            brief = self.broker.topics.get("brief")
            run.reached["expired"] += (
                sum(each.leaving.expired_count for each in brief.channels.values()) if brief is not None else 0
            )
        machine.death = self.death
        power = self.death == "power"
        if power:
            self._silent = [
                what.peer
                for what, _ in machine._open.values()
                if isinstance(what, Socket) and what.peer is not None and what.peer.owner is None
            ]
        elif self._has_ended and machine._open:
            left = [path.name for _, path in machine._open.values()]
            run.world.violated(f"{self.name} has stopped with open descriptors: {left}")
        assert self.loop is not None
        calls = self.loop.most_calls_of_start
        if calls > START_CALLS + START_CALLS_PER_FILE * self.found:
            run.world.violated(f"turn: one turn of a start of {self.name} made {calls} calls, with {self.found} files")
        self._bury(silently=power)
        run.reached[{"exit": "clean stop", "fault": "stop by a fault"}.get(self.death, self.death)] += 1
        self._tree = machine.tree
        if power:
            how = self.loss.choice(["none", "some", "some", "all"])
            run.reached["torn or reordered"] += how == "some"
            self._tree = machine.tree.survivor(self.loss if how == "some" else None, how == "all")
            self.booted = run.world.now
            # A slow or failing disk may not have completed a sync since that began.
            unsound = run.world.seconds - self.unsound_since if run.world.seconds < self.unsound_until else 0.0
            run.ledger.lost_power(self.name, unsound + 2 * SYNC_TIMEOUT + 0.3)
        elif self.death == "exit":
            run.ledger.stopped(self.name)
        else:
            run.ledger.killed(self.name, SYNC_TIMEOUT + FORGOTTEN_BY_A_KILL, stored_messages, keys)
        run.world.after(run.world.rng.uniform(0.001, 0.05), self._again)

    @property
    def _has_ended(self) -> bool:
        """Has the process come to its end by itself, with no thread in the middle of something?"""
        disk = None if self.broker is None else self.broker.disk
        at_work = self.death == "fault" and isinstance(disk, Workers) and disk.running > 0
        return self.death in ("exit", "fault") and not at_work

    def copy(self, name: str, host: str, tree: Any) -> Nsqd:
        """Another node with these files, known to nobody."""
        options = {**self.options, "tcp_address": f"{host}:4150", "http_address": f"{host}:4151"}
        made = Nsqd(self.run, name, host, {**options, "broadcast_address": host, "nsqlookupd_tcp_addresses": ()})
        made._tree = tree
        made.step = self.step
        return made

    def retire(self) -> None:
        """It goes, and does not come back."""
        self.retired = True
        self.kill("kill")

    def _again(self) -> None:
        if not self.run.over and not self.retired:
            self.boot()
