"""Ctrl-C at any moment of any command ends it soon, without a trace of an error.

The moments count from where a program's own code begins: before that, Python itself starts. tests/interrupts.py does
the same to `./scripts/up`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq.testing import NsqBroker

#: Seconds. Imports take the first tenths, in which Python itself sometimes speaks of what it was doing: these are for
#: FLINTMQ_EXHAUSTIVE=1. Then commands are at work, and short ones end.
EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
MOMENTS = (0.0, 0.03, 0.08, 0.15, 0.25, 0.4, 0.7, 1.2) if EXHAUSTIVE else (1.2,)
#: Seconds from ctrl-C to the end, on a busy machine.
LONGEST = 60.0
FREE = "--tcp-address 127.0.0.1:0 --http-address 127.0.0.1:0"
OTHERS = "--lookupd-tcp-address 127.0.0.1:0 --lookupd-http-address 127.0.0.1:0 --admin-http-address 127.0.0.1:0"
#: NSQD, HTTP: the addresses of a broker with messages. DATA: its data path.
COMMANDS = (
    f"up {FREE} {OTHERS}",
    f"up --nodes 2 {FREE} {OTHERS}",
    f"nsqd {FREE}",
    f"nsqlookupd {FREE}",
    "nsqadmin --http-address 127.0.0.1:0 --nsqd-http-address HTTP",
    "pub orders --nsqd NSQD",
    "pub orders --file lines --rate 10 --nsqd NSQD",
    "sub orders/c --nsqd NSQD",
    "tail orders --nsqd-http-address HTTP",
    "stat --interval 100ms --nsqd-http-address HTTP",
    "top --json --interval 100ms --nsqd-http-address HTTP",
    "ls --interval 300ms --nsqd-http-address HTTP",
    "peek orders --nsqd-http-address HTTP",
    "log orders --from earliest --nsqd-http-address HTTP",
    "doctor --nsqd-http-address HTTP",
    "backup copy --data-path DATA",
    "recover DATA",
    "torture --minutes 1",
    "nsq_tail --topic orders --nsqd-tcp-address NSQD",
    "nsq_stat --topic orders --channel c --nsqd-http-address HTTP",
    "nsq_to_file --topic orders --output-dir . --nsqd-tcp-address NSQD",
    "to_nsq --topic orders --nsqd-tcp-address NSQD",
)
#: Another process of the same group presses the key, as a terminal does: all of the group hear it. It presses again
#: after some seconds, as people do: Python may lose one during an import.
PROGRAM = """
import os, signal, sys, time
# Whoever runs the tests in the background ignores it for all of them.
signal.signal(signal.SIGINT, signal.default_int_handler)
moment = float(sys.argv.pop(1))
from flintmq.__main__ import flintmq
parent = os.getpid()
if not os.fork():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(moment)
    pressed = 0.0
    while os.getppid() == parent:
        if time.monotonic() > pressed + 5:
            os.killpg(0, signal.SIGINT)
            pressed = time.monotonic()
        time.sleep(0.02)
    os._exit(0)
sys.exit(flintmq())
"""
#: What Python says of a ctrl-C that meets a callback of its own imports, and is lost there.
LOST = re.compile(
    r"Exception ignored in: <function _get_module_lock.*?^KeyboardInterrupt: *$", re.DOTALL | re.MULTILINE
)
TRACE = re.compile(r"Traceback|Exception|\[Errno|Error:|KeyboardInterrupt|never (?:awaited|retrieved)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker() -> Iterator[NsqBroker]:
    with NsqBroker() as running:
        running.publish("orders", *(b"tea" for _ in range(100)))
        url = f"http://{running.http_address}/channel/create?topic=orders&channel=c"
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()
        yield running


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: "_".join(line.split()[:2]))
def test_ctrl_c_at_any_moment(line: str, broker: NsqBroker, tmp_path: Path) -> None:
    filled = {"NSQD": broker.address, "HTTP": broker.http_address, "DATA": str(broker.data_path)}
    words = [filled.get(word, word) for word in line.split()]
    for number, moment in enumerate(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "lines").write_text("tea\n" * 1000)
        status, said = interrupted(words, moment, folder)
        if status not in (0, 130, -signal.SIGINT):
            printed = (folder / "output").read_text(errors="replace")
            pytest.fail(f"status {status} after ctrl-C at {moment} s\n{said}\n{printed}")
        assert TRACE.search(LOST.sub("", said)) is None, (moment, said)


def interrupted(words: list[str], moment: float, folder: Path) -> tuple[int, str]:
    """Run a command that hears of ctrl-C at a moment; its status, and what it and all that it started said.

    All of these have ended when their standard error is at its end. TimeoutExpired if that is not soon.
    """
    command = [sys.executable, "-c", PROGRAM, str(moment), *words]
    # A standard input that nothing comes from.
    unread, silent = os.pipe()
    with open(unread, "rb") as stdin, open(silent, "wb"), (folder / "output").open("wb") as output:
        running = subprocess.Popen(
            command,
            cwd=folder,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            _, said = running.communicate(timeout=moment + LONGEST)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.communicate()
    return running.returncode, said


def test_nothing_but_its_own_two_files_is_imported_before_a_program_hears_ctrl_c() -> None:
    program = "import re, sys, __future__; before = set(sys.modules); import flintmq.__main__; "
    program += "print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['flintmq', 'flintmq.__main__']\n"
