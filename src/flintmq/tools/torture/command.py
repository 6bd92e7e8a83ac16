"""The command line of `flintmq torture`: its flags, its end, ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flintmq.addresses import split
from flintmq.durations import parse_duration
from flintmq.errors import OptionError, system_reason
from flintmq.tools import print_json
from flintmq.tools.torture import display
from flintmq.tools.torture.front import FAULTS
from flintmq.tools.torture.run import DURABILITIES, Plan, Report, Run
from flintmq.usage import Parser

__all__ = ["main"]

_DEFAULT_MINUTES = 2.0
#: Seconds for a server of --against to take a connection.
_DIAL_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    for address in arguments.against:
        try:
            host, port, _ = split(address)
            socket.create_connection((host, port), _DIAL_SECONDS).close()
        except OptionError as exc:
            parser.error(str(exc))
        except OSError as exc:
            sys.stderr.write(f"flintmq torture: {address}: {exc.strerror or exc}\n")
            return 1
    if arguments.minutes is None and not arguments.kills:
        arguments.minutes = _DEFAULT_MINUTES
    if arguments.against and arguments.kills:
        parser.error("--kills needs brokers of its own: leave out --against")
    unknown = [fault for fault in arguments.without if fault not in FAULTS]
    if unknown:
        parser.error(f"--without knows {', '.join(FAULTS)}, and not {unknown[0]}")
    if arguments.data_path is not None and not arguments.data_path.is_dir():
        parser.error(f"--data-path: there is no directory {arguments.data_path}")
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    try:
        folder = Path(tempfile.mkdtemp(prefix="flintmq-torture-", dir=arguments.data_path))
    except OSError as exc:
        sys.stderr.write(f"flintmq torture: {system_reason(exc)}; choose another with --data-path\n")
        return 1
    plan = Plan(
        seed=seed,
        folder=folder,
        seconds=None if arguments.minutes is None else arguments.minutes * 60,
        kills=arguments.kills,
        durabilities=tuple(arguments.durability or ("os", "fsync")),
        lookupds=0 if arguments.against else arguments.lookupds,
        seconds_between=arguments.between,
        faults=tuple(fault for fault in FAULTS if fault not in arguments.without),
        against=tuple(arguments.against),
    )
    passed = True
    try:
        report, interrupted = asyncio.run(_conduct(plan, quiet=arguments.json))
        passed = report.passed
    except KeyboardInterrupt:
        # Before there was anything to count.
        return 130
    finally:
        if passed or arguments.against:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            sys.stderr.write(f"flintmq torture: the brokers' files are kept in {folder}\n")
    if arguments.json:
        print_json(report.as_dict())
    else:
        display.print_report(report)
    sys.stdout.flush()
    return 1 if not passed else 130 if interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flintmq torture",
        description="Run brokers under mixed load on this machine, kill, stop and starve them, and count what is lost, "
        "comes twice, early or late. Exit status 1: something was lost.",
    )
    parser.add_argument(
        "--minutes", type=_positive, metavar="M", help=f"of faults (default {_DEFAULT_MINUTES:g} without --kills)"
    )
    parser.add_argument("--kills", type=_count, metavar="N", help="end after N kills of brokers; 0: kill none")
    parser.add_argument("--seed", type=int, metavar="N", help="repeats load and plan; by default a new one each time")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and show nothing meanwhile")
    parser.add_argument(
        "--data-path",
        metavar="DIR",
        type=Path,
        help="the disk to use: a directory in which a new one is created (default: the system's for temporary files)",
    )
    parser.add_argument(
        "--durability",
        action="append",
        choices=DURABILITIES,
        help="of a broker; repeat it for more brokers (default os and fsync)",
    )
    parser.add_argument(
        "--lookupds", type=_count, default=2, metavar="N", help="nsqlookupds; 0: no cluster (default %(default)s)"
    )
    parser.add_argument(
        "--between",
        type=lambda text: parse_duration(text) / 1e9,
        default=2.0,
        metavar="DURATION",
        help="mean lifetime of a broker (default 2s)",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FAULT",
        help=f"leave out a fault: {', '.join(FAULTS)} (repeatable)",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="use these running servers, of any NSQ; only their connections are cut and stalled",
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0')
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from 0 on')
    return int(text)


async def _conduct(plan: Plan, *, quiet: bool) -> tuple[Report, bool]:
    """Run it, shown where somebody watches. Return the report, and whether ctrl-C cut it short."""
    run = Run(plan)
    work = asyncio.create_task(run.run())
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        # First, since the cancellation itself leaves work half done everywhere.
        run.close_books()
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    watching = asyncio.create_task(display.watch(run, quiet=quiet))
    try:
        await asyncio.wait([work])
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    if work.cancelled():
        return run.report(), interrupted
    return work.result(), interrupted
