"""`flintmq <command>`, and the programs under NSQ's own names.

This is the outermost room: it reads the command line, starts a program, waits for a signal and turns errors into a line
and an exit status. What a command needs is imported inside it, so that `flintmq pub` does not pay for the broker.

Exit status: 0 after a clean end, 1 when something failed, 2 when the command line is wrong.

Size: how each program starts and ends is told once, here, and most of it holds for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq import __version__, logs
from flintmq.errors import (
    BackupError,
    FlintError,
    OptionError,
    StartError,
    StorageError,
    permission_hint,
    system_reason,
)
from flintmq.garbage import freeze, no_collection
from flintmq.options import (
    NsqadminOptions,
    NsqdOptions,
    NsqlookupdOptions,
    Options,
    changes,
    help_text,
    nearest,
    option_table,
    read_flags,
    resolve,
)

if TYPE_CHECKING:
    import argparse

    from flintmq.broker.backup import Manifest
    from flintmq.broker.daemon import Broker
    from flintmq.lookup.daemon import Lookupd

__all__ = ["main", "nsqadmin", "nsqd", "nsqlookupd"]

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `flintmq`."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in _COMMANDS:
        return _COMMANDS[command][0](rest)
    if command == "help" and rest:
        return main([rest[0], "--help"])
    if command in ("-h", "-help", "--help", "help"):
        print(_usage())
        return 0
    if command in ("-version", "--version"):
        print(_own_version())
        return 0
    from importlib.util import find_spec

    is_name = command.isidentifier() and not command.startswith("_")
    if is_name and find_spec(f"flintmq.tools.{command}") is not None:
        status: int = importlib.import_module(f"flintmq.tools.{command}").main(rest)
        return status
    known = [*_COMMANDS, *_tools()]
    meant = nearest(command, [*known, "--help", "--version"])
    hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(known)}"
    print(f"flintmq: there is no command '{command}', {hint}", file=sys.stderr)
    print("run 'flintmq --help'", file=sys.stderr)
    return 2


def _tools(*, imported: bool = True) -> dict[str, str]:
    """Return the commands that are modules of `flintmq.tools`, each with its line of help where it may be imported."""
    import pkgutil

    from flintmq import tools

    found = (module.name for module in pkgutil.iter_modules(tools.__path__))
    # Modules with an underscore are what tools share.
    names = sorted(name for name in found if name not in _COMMANDS and not name.startswith("_"))
    return {name: importlib.import_module(f"flintmq.tools.{name}").ABOUT if imported else "" for name in names}


def _usage() -> str:
    import shutil
    import textwrap

    about = {name: line for name, (_, line) in _COMMANDS.items()} | _tools()
    others = [name for name in about if not any(name in names for names in _GROUPS.values())]
    width = max(40, shutil.get_terminal_size().columns)
    lines = ["usage: flintmq COMMAND [ARGUMENTS]"]
    for title, names in (*_GROUPS.items(), ("others", others)):
        if names:
            lines.append(f"\n{title}:")
        for name in names:
            indents = (f"  {name:<13} ", " " * 16)
            lines.append(textwrap.fill(about[name], width, initial_indent=indents[0], subsequent_indent=indents[1]))
    lines.append("\nflintmq COMMAND --help shows its flags; flintmq --version prints the version.")
    return "\n".join(lines)


def nsqd(argv: Sequence[str] | None = None) -> int:
    """The program `nsqd`."""
    return _daemon(NsqdOptions, argv, _serve)


def nsqlookupd(argv: Sequence[str] | None = None) -> int:
    """The program `nsqlookupd`."""
    return _daemon(NsqlookupdOptions, argv, _serve_lookupd)


def nsqadmin(argv: Sequence[str] | None = None) -> int:
    """The program `nsqadmin`."""
    return _daemon(NsqadminOptions, argv, _serve_admin)


DaemonOptions = TypeVar("DaemonOptions", NsqdOptions, NsqlookupdOptions, NsqadminOptions)


def _daemon(
    options_class: type[DaemonOptions],
    argv: Sequence[str] | None,
    serve: Callable[[DaemonOptions, Callable[[], None]], Coroutine[Any, Any, int]],
) -> int:
    """Read the flags of a daemon as NSQ's own does, and run it to its end."""
    program = options_class.program
    try:
        flags = read_flags(options_class, sys.argv[1:] if argv is None else argv)
    except OptionError as exc:
        print(exc, file=sys.stderr)
        print(f"run '{program} --help' for a list of flags", file=sys.stderr)
        return 2
    if flags.get("help"):
        print(help_text(options_class))
        return 0
    if flags.get("version"):
        print(f"{_nsq_version(options_class)} {_own_version()}")
        return 0
    if flags.get("hash-password"):
        return _hash_password()

    # Until the file is read, only flags can say how log lines look.
    logs.setup(flags.get("log-prefix", f"[{program}] "), "info", flags.get("log-format", "text"), program)
    warnings: list[str] = []
    try:
        options = resolve(options_class, flags, warnings.append)
    except OptionError as exc:
        logger.critical("%s", exc)
        return 1
    logs.setup(options.log_prefix, options.log_level, options.log_format, program)
    for warning in warnings:
        logger.warning("%s", warning)
    try:
        options.validate()
        loop_factory = _event_loop(options.event_loop)
    except OptionError as exc:
        logger.critical("failed to instantiate %s - %s", program, exc)
        return 1

    logger.info("%s", _nsq_version(options_class))
    if isinstance(options, NsqdOptions):
        logger.info("ID: %d", options.id)
    try:
        return _run(partial(serve, options, partial(_report_changes, options, flags)), loop_factory)
    except (StartError, OptionError) as exc:
        # Go's daemons name the step that failed, and for all but loading something the step is their constructor.
        if str(exc).startswith("failed to load "):
            logger.critical("%s", exc)
        else:
            logger.critical("failed to instantiate %s - %s", program, exc)
        return 1


def _report_changes(options: Options, flags: Mapping[str, Any]) -> None:
    """Read the config file again, and name the keys in it that a reload does not apply."""
    try:
        wanted = resolve(type(options), flags, lambda warning: logger.warning("CONFIG: %s", warning))
        wanted.validate()
    except OptionError as exc:
        logger.error("CONFIG: %s", exc)
        return
    for change in changes(options, wanted):
        logger.warning("CONFIG: %s", change)


#: The addresses of `flintmq up`, by the names of its arguments.
_UP_ADDRESSES = ("tcp", "http", "lookupd_tcp", "lookupd_http", "admin_http")


def _up(argv: Sequence[str]) -> int:
    """Run everything on this machine with nothing to set up: the first command of a newcomer."""
    from flintmq import addresses
    from flintmq.tools._fleet import MOST_NODES, check_data_path
    from flintmq.tools._show import parse_count
    from flintmq.usage import Parser

    parser = Parser(
        prog="flintmq up",
        description="Run the whole platform, reachable from this machine only. Ctrl-C ends it.",
        epilog="Other options of the broker, such as --durability, are those of flintmq nsqd.",
    )
    parser.add_argument(
        "--data-path", metavar="DIR", default="flintmq-data", help="created if missing (default ./%(default)s)"
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=parse_count,
        default=1,
        help="brokers, to use more cores: each has its own process, the next two ports, and the folder node-1, node-2, "
        "… of the data path (default %(default)s, in this process)",
    )
    parser.add_argument(
        "--tcp-address", metavar="ADDRESS", default="127.0.0.1:4150", help="of the broker (default %(default)s)"
    )
    parser.add_argument(
        "--http-address",
        metavar="ADDRESS",
        default="127.0.0.1:4151",
        help="of the broker's HTTP API (default %(default)s)",
    )
    parser.add_argument(
        "--lookupd-tcp-address",
        metavar="ADDRESS",
        default="127.0.0.1:4160",
        help="of nsqlookupd, for brokers (default %(default)s)",
    )
    parser.add_argument(
        "--lookupd-http-address",
        metavar="ADDRESS",
        default="127.0.0.1:4161",
        help="of nsqlookupd, for consumers (default %(default)s)",
    )
    parser.add_argument(
        "--admin-http-address",
        metavar="ADDRESS",
        default="127.0.0.1:4171",
        help="of nsqadmin, for your browser (default %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        default="warn",
        choices=("debug", "info", "warn", "error", "fatal"),
        help="debug, info, warn, error or fatal (default %(default)s)",
    )
    place = "it is one of the broker alone: see flintmq nsqd --help"
    parser.elsewhere = {f"--{flag}": place for flag in option_table(NsqdOptions)}
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.nodes <= MOST_NODES:
        parser.error(f"--nodes must be from 1 to {MOST_NODES}")
    for name in _UP_ADDRESSES:
        address = getattr(arguments, f"{name}_address")
        try:
            # A name without a slash would be a unix socket in this folder, which nobody means who forgets the port.
            addresses.split(address, listening=True, unix="/" in address)
        except OptionError as exc:
            parser.error(f"--{name.replace('_', '-')}-address: {exc}")
    logs.setup("[nsqd] ", arguments.log_level)
    try:
        os.makedirs(arguments.data_path, exist_ok=True)
    except OSError as exc:
        hint = permission_hint(exc, arguments.data_path) or "; choose another"
        wrong = f"cannot create the directory {arguments.data_path}: {exc.strerror}{hint}"
        print(f"flintmq up: {wrong} (--data-path)", file=sys.stderr)
        return 1
    options = NsqdOptions(
        data_path=arguments.data_path,
        tcp_address=arguments.tcp_address,
        http_address=arguments.http_address,
        https_address="",
        broadcast_address="127.0.0.1",
        log_level=arguments.log_level,
    )
    lookupd_options = NsqlookupdOptions(
        tcp_address=arguments.lookupd_tcp_address,
        http_address=arguments.lookupd_http_address,
        broadcast_address="127.0.0.1",
        log_level=arguments.log_level,
    )
    try:
        check_data_path(Path(arguments.data_path), arguments.nodes)
        serve = _serve_all if arguments.nodes == 1 else partial(_serve_fleet, arguments.nodes)
        main = partial(serve, options, lookupd_options, arguments.admin_http_address)
        return _run(main, _event_loop(options.event_loop))
    except StartError as exc:
        print(f"flintmq up: {exc}", file=sys.stderr)
        if str(exc).endswith("address already in use"):
            print(
                "Another broker may be running there. Stop it, or choose other ports:\n"
                f"  flintmq up {_other_ports(arguments)}",
                file=sys.stderr,
            )
        elif "failed to lock data-path" in str(exc) and not isinstance(exc.__cause__, PermissionError):
            print("Stop the other broker, or choose another directory: flintmq up --data-path DIR", file=sys.stderr)
        return 1
    except OSError as exc:
        if exc.filename is None:
            raise
        print(f"flintmq up: {system_reason(exc)}", file=sys.stderr)
        return 1


def _other_ports(arguments: argparse.Namespace) -> str:
    """Return the flags of `flintmq up` that move the addresses which other programs have by 1,000 ports."""
    from flintmq import addresses

    flags = []
    for name in _UP_ADDRESSES:
        address = getattr(arguments, f"{name}_address")
        host, port, path = addresses.split(address, listening=True)
        if path:
            continue
        try:
            addresses.bind(address).close()
        except StartError:
            moved = addresses.join(host, port + 1000 if port <= 60_000 else port - 1000)
            flags.append(f"--{name.replace('_', '-')}-address {moved}")
    return " ".join(flags) or "--tcp-address 127.0.0.1:5150"


def _welcome(nsqds: Sequence[tuple[str, str]], options: NsqdOptions, lookupd: Lookupd, admin: str) -> None:
    """Say where things are, and what to type next."""
    import shlex
    import shutil

    address = nsqds[0][0]
    elsewhere = "" if address == "127.0.0.1:4150" else f" --nsqd {address}"
    facts = (
        f"in your browser     {admin}\n"
        f"nsqd (TCP)          {' '.join(tcp for tcp, _ in nsqds)}\n"
        f"nsqd (HTTP)         {' '.join(http for _, http in nsqds)}\n"
        f"nsqlookupd (TCP)    {lookupd.tcp_address}   for more nsqds: --lookupd-tcp-address\n"
        f"nsqlookupd (HTTP)   {lookupd.http_address}\n"
        f"messages            {os.path.abspath(options.data_path)}"
    )
    consume = f"flintmq sub greetings/printer{elsewhere}"
    if len(nsqds) > 1:
        # From all of them.
        consume = f"nsq_tail --topic greetings --lookupd-http-address {lookupd.http_address}"
    example = f'{consume}\nflintmq pub greetings "hello"{elsewhere}'
    if shutil.which("flintmq") is None and sys.prefix != sys.base_prefix:
        # Started by its path: other terminals do not find it either.
        example = f"source {shlex.quote(os.path.join(sys.prefix, 'bin', 'activate'))}\n{example}"
    if not sys.stdout.isatty():
        print(f"flintmq {__version__} is up\n\n{facts}\n\nTry, in two other terminals:\n\n{example}\n", flush=True)
        return
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    content = Group(
        Text(facts), Text("\nTry, in two other terminals:\n", style="dim"), Text(example, style="bold cyan")
    )
    console.print(Panel(content, title=f"flintmq {__version__} is up", subtitle="ctrl-C ends it", expand=False))


def _backup(argv: Sequence[str]) -> int:
    from flintmq.usage import Parser

    parser = Parser(
        prog="flintmq backup",
        description="Copy the data path of a broker to a new directory. The broker may be running.",
    )
    parser.add_argument("target", metavar="TARGET", help="the directory to create; with --verify, the backup to check")
    parser.add_argument("--data-path", metavar="DIR", help="the broker's data path")
    parser.add_argument("--verify", action="store_true", help="only check an existing backup")
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object")
    arguments = parser.parse_args(argv)
    if bool(arguments.data_path) == arguments.verify:
        parser.error("give --data-path to create a backup, or --verify to check one")

    def work(progress: Callable[[int, int], None]) -> str:
        from flintmq.broker import backup

        if arguments.verify:
            manifest = backup.verify(Path(arguments.target), progress)
            whole = f"{arguments.target} is whole: {_contents(manifest)}"
            return _contents_as_json(arguments.target, manifest) if arguments.json else whole
        manifest = backup.make(Path(arguments.data_path), Path(arguments.target), progress)
        for path in manifest.left_out:
            print(f"flintmq backup: skipped, because the broker set it aside: {path}", file=sys.stderr)
        for damage in manifest.damage:
            print(f"flintmq backup: {damage}", file=sys.stderr)
        if manifest.damage:
            if arguments.json:
                print(_contents_as_json(arguments.target, manifest))
            raise BackupError("the backup was written, but some messages of the data path could not be read")
        if arguments.json:
            return _contents_as_json(arguments.target, manifest)
        return f"{arguments.target}: {_contents(manifest)}"

    return _with_progress("backup", work)


def _restore(argv: Sequence[str]) -> int:
    from flintmq.usage import Parser

    parser = Parser(
        prog="flintmq restore",
        description="Create the data path of a broker from a backup. Nothing is overwritten.",
    )
    parser.add_argument("source", metavar="SOURCE", help="the backup")
    parser.add_argument("--data-path", metavar="DIR", required=True, help="an empty directory, or one to create")
    parser.add_argument(
        "--same-node",
        action="store_true",
        help="keep the node's identity, so that log readers can continue; only if the original never runs again",
    )
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object")
    arguments = parser.parse_args(argv)

    def work(progress: Callable[[int, int], None]) -> str:
        from flintmq.broker import backup

        manifest = backup.restore(
            Path(arguments.source), Path(arguments.data_path), same_node=arguments.same_node, progress=progress
        )
        if arguments.json:
            return _contents_as_json(arguments.data_path, manifest)
        return f"{arguments.data_path}: {_contents(manifest)}"

    return _with_progress("restore", work)


def _contents(manifest: Manifest) -> str:
    counts = ((manifest.topics, "topic"), (manifest.messages, "message"), (len(manifest.files), "file"))
    words = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts]
    return f"{', '.join(words)}, {manifest.bytes} bytes"


def _contents_as_json(path: str, manifest: Manifest) -> str:
    """Return what a backup or a restored data path holds, for scripts; damaged and skipped files are named."""
    import json

    result = {
        "path": path,
        "node": manifest.node,
        "topics": manifest.topics,
        "messages": manifest.messages,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "damage": manifest.damage,
        "left_out": manifest.left_out,
    }
    return json.dumps(result)


def _with_progress(command: str, work: Callable[[Callable[[int, int], None]], str]) -> int:
    """Run something long, with a bar where somebody watches; its result, or why there is none, as one line."""
    with contextlib.suppress(OSError, ValueError):
        # Each segment is held open, so that the broker may remove it meanwhile.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        if not sys.stderr.isatty():
            result = work(lambda done, of: None)
        else:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(command, total=None)
                result = work(lambda done, of: bar.update(task, completed=done, total=of))
    except FlintError as exc:
        print(f"flintmq {command}: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"flintmq {command}: stopped half-way, nothing was kept", file=sys.stderr)
        return 130
    print(result)
    return 0


@contextlib.asynccontextmanager
async def _front(
    options: NsqdOptions, lookupd_options: NsqlookupdOptions, admin_address: str
) -> AsyncIterator[tuple[Lookupd, str]]:
    """Run an nsqlookupd and an nsqadmin; the address of its page."""
    from flintmq.admin.daemon import Admin
    from flintmq.lookup.daemon import Lookupd

    async with Lookupd(lookupd_options) as lookupd:
        admin_options = NsqadminOptions(
            http_address=admin_address,
            nsqlookupd_http_addresses=(lookupd.http_address,),
            log_level=options.log_level,
        )
        async with Admin(admin_options) as admin:
            yield lookupd, admin.url


async def _serve_all(options: NsqdOptions, lookupd_options: NsqlookupdOptions, admin_address: str) -> int:
    """A broker, an nsqlookupd that it is registered with and an nsqadmin, until a signal asks for their end."""
    # Before the start: a signal that meets what is half started may be lost in it.
    asked_to_stop = asyncio.Event()
    _hear(asked_to_stop.set, signal.SIGINT, signal.SIGTERM)
    async with _front(options, lookupd_options, admin_address) as (lookupd, page):

        def announce(broker: Broker, options: NsqdOptions) -> None:
            _welcome([(broker.tcp_address, broker.http_address)], options, lookupd, page)

        broker_options = replace(options, nsqlookupd_tcp_addresses=(lookupd.tcp_address,))
        return await _serve(broker_options, announce=announce, asked_to_stop=asked_to_stop)


async def _serve_fleet(count: int, options: NsqdOptions, lookupd_options: NsqlookupdOptions, admin_address: str) -> int:
    """The same with several brokers, each in a process of its own."""
    from flintmq.tools._fleet import Fleet, ports

    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _hear(asked_to_stop.set, signal.SIGINT, signal.SIGTERM)
    taken = (lookupd_options.tcp_address, lookupd_options.http_address, admin_address)
    chosen = ports(options.tcp_address, options.http_address, count, taken)
    async with _front(options, lookupd_options, admin_address) as (lookupd, page):
        if await _is_asked(asked_to_stop):
            return 0
        flags = (
            f"--lookupd-tcp-address={lookupd.tcp_address}",
            f"--broadcast-address={options.broadcast_address}",
            f"--log-level={options.log_level}",
        )
        async with Fleet(Path(options.data_path), chosen, options.id, flags) as fleet:
            loop.add_signal_handler(signal.SIGHUP, fleet.signal, signal.SIGHUP)
            if not await _is_asked(asked_to_stop):
                _welcome(fleet.addresses, options, lookupd, page)
            await asked_to_stop.wait()
    return 0


async def _serve_lookupd(options: NsqlookupdOptions, report_changes: Callable[[], None]) -> int:
    """Run an nsqlookupd until a signal asks for its end."""
    from flintmq.lookup.daemon import Lookupd

    def reload() -> None:
        lookupd.reload()
        report_changes()

    # Before the start: a signal must not end what is half started.
    lookupd = Lookupd(options)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _hear(asked_to_stop.set, signal.SIGINT, signal.SIGTERM)
    loop.add_signal_handler(signal.SIGHUP, reload)
    async with lookupd:
        freeze()
        # A collection that looks at 100,000 names again and again would hold up everybody.
        lookupd.when_grown = gc.freeze
        await asked_to_stop.wait()
    return 0


async def _serve_admin(options: NsqadminOptions, report_changes: Callable[[], None]) -> int:
    """Run an nsqadmin until a signal asks for its end."""
    from flintmq.admin.daemon import Admin

    def reload() -> None:
        admin.reload()
        report_changes()

    admin = Admin(options)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _hear(asked_to_stop.set, signal.SIGINT, signal.SIGTERM)
    await admin.start()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        await asked_to_stop.wait()
    finally:
        await admin.stop()
    return 0


def _hash_password() -> int:
    """Print what belongs into a users file for a password, which is typed or piped in and shown nowhere."""
    import getpass

    from flintmq.admin.access import hash_password

    try:
        password = getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        if not password:
            print("nsqadmin: the password is empty", file=sys.stderr)
            return 1
        print(f"NAME view {hash_password(password)}")
    except OptionError as exc:
        print(f"nsqadmin: {exc}", file=sys.stderr)
        return 1
    return 0


async def _serve(
    options: NsqdOptions,
    report_changes: Callable[[], None] | None = None,
    *,
    announce: Callable[[Broker, NsqdOptions], None] | None = None,
    asked_to_stop: asyncio.Event | None = None,
) -> int:
    """Run a broker until a signal asks for its end, perhaps already has, or until it cannot go on."""
    with no_collection():
        from flintmq.broker.daemon import Broker
        from flintmq.kernel import use_one_arena
    if asked_to_stop is not None and await _is_asked(asked_to_stop):
        return 0

    # Before the first thread. An embedded broker leaves the process as it is.
    use_one_arena()
    # Before the start, which may have much to recover: a signal must never cut that short.
    broker = Broker(options)
    asked_to_stop, asked_to_drain, started = asked_to_stop or asyncio.Event(), asyncio.Event(), asyncio.Event()

    def terminate() -> None:
        if options.sigterm == "drain" and not asked_to_drain.is_set():
            asked_to_drain.set()
        else:
            asked_to_stop.set()

    def reload() -> None:
        if started.is_set():
            _tell_systemd(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            broker.reload()
            if report_changes is not None:
                report_changes()
            _tell_systemd("READY=1")

    loop = asyncio.get_running_loop()
    _hear(asked_to_stop.set, signal.SIGINT)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGHUP, reload)
    # Log lines are this program's business, not the broker's.
    broker.options_changed.append(lambda: logs.set_level(broker.options.log_level))

    # Before anybody can connect, and would wait for it.
    with no_collection():
        await broker.start(freeze)
    started.set()
    if announce is not None and not await _is_asked(asked_to_stop):
        announce(broker, options)
    _tell_systemd("READY=1")

    stop = asyncio.create_task(asked_to_stop.wait())
    drain = asyncio.create_task(asked_to_drain.wait())
    closed = asyncio.create_task(broker.wait_closed())
    try:
        await asyncio.wait({stop, drain, closed}, return_when=asyncio.FIRST_COMPLETED)
        _tell_systemd("STOPPING=1")
        if drain.done() and not stop.done():
            broker.drain()
            await asyncio.wait({stop, closed}, return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            closed.result()
        else:
            await broker.stop()
            # It may not have been able to save everything.
            await closed
    except (StorageError, OSError) as exc:
        logger.critical("%s", exc)
        return 1
    finally:
        for task in (stop, drain, closed):
            task.cancel()
    return 0


def _tell_systemd(state: str) -> None:
    """Say how it stands to the service manager that started us, if one did and asked for it (`Type=notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        # An abstract socket: its name begins with a zero byte.
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.send(state.encode())
    except OSError as exc:
        # It will think that we hang; all the more reason to say why.
        logger.warning("cannot tell the service manager %s - %s", state.partition("\n")[0], exc)


def _run(
    main: Callable[[], Coroutine[Any, Any, int]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
) -> int:
    """Run a daemon, which calls `_hear` first. A ctrl-C before that is kept for it.

    uvloop loses one that meets its start, and a cancellation would meet what is half started.
    """
    before = signal.signal(signal.SIGINT, lambda number, _: _early.append(number))
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())
    finally:
        signal.signal(signal.SIGINT, before)


#: Signals that came before the event loop listened for them.
_early: list[int] = []


def _hear(stop: Callable[[], None], *numbers: int) -> None:
    """Call a function when one of these signals comes, or has come since `_run`; perhaps twice."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop)
        # uvloop loses some in its first moments. Python's own handler is called for each.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    if _early:
        stop()


async def _is_asked(stop: asyncio.Event) -> bool:
    """Tell whether a signal came while modules were imported and ports opened: then nothing more is to be started."""
    await asyncio.sleep(0)
    return stop.is_set()


def _event_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of `--event-loop`; None is asyncio's own."""
    if name == "asyncio":
        return None
    from flintmq.kernel import uninterrupted

    try:
        with uninterrupted():
            import uvloop
    except ImportError as exc:
        if name == "uvloop":
            raise OptionError("--event-loop=uvloop: uvloop is not installed") from exc
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _recover(argv: Sequence[str]) -> int:
    from flintmq.broker import leftovers
    from flintmq.tools import recover

    return recover.main(argv, leftovers.find)


def _completion(argv: Sequence[str]) -> int:
    from flintmq.tools import completion

    return completion.main(argv, [*_COMMANDS, *_tools(imported=False)], main)


def _pipeline(argv: Sequence[str]) -> int:
    from flintmq.spark import pipelines

    return pipelines.main(argv)


def _nsq_version(options_class: type[Options]) -> str:
    from flintmq.protocol.wire import NSQ_VERSION

    return f"{options_class.program} v{NSQ_VERSION} (built w/python{sys.version.split()[0]})"


def _own_version() -> str:
    from flintmq.kernel import COMPILED

    return f"flintmq {__version__} {'compiled' if COMPILED else 'interpreted'}"


#: How the help sorts the commands.
_GROUPS = {
    "daemons": ("up", "nsqd", "nsqlookupd", "nsqadmin"),
    "messages": ("pub", "sub", "tail", "peek", "log", "seek", "redrive"),
    "topics and channels": ("ls", "stat", "top", "topic", "channel", "settings"),
    "disks and health": ("doctor", "backup", "restore", "recover", "torture"),
    "Spark": ("pipeline",),
    "NSQ's tools": ("nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq"),
    "shells": ("completion",),
}
#: The commands that are not modules of `flintmq.tools`, or need more than its layer may import.
_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "up": (_up, "run the whole platform, on this machine only"),
    "nsqd": (nsqd, "run the broker, with the flags of NSQ's nsqd"),
    "nsqlookupd": (nsqlookupd, "run the directory in which consumers find brokers, with the flags of NSQ's nsqlookupd"),
    "nsqadmin": (nsqadmin, "run the admin web pages, with the flags and the API of NSQ's nsqadmin"),
    "backup": (_backup, "copy the data path of a broker, while it runs"),
    "restore": (_restore, "create a data path from a backup"),
    "recover": (_recover, "list files that a broker set aside after damage, and publish their messages again"),
    "pipeline": (_pipeline, "archive, measure, replay or query topics with Spark"),
    "completion": (_completion, "print a completion script for bash, zsh or fish"),
}
