"""A newcomer's first minutes, and ctrl-C at every moment of them: ``python -m tests.interrupts [--clone DIR]``.

It clones this repository at HEAD, runs `./scripts/up` there on a terminal of its own and presses ctrl-C: at three
moments while the environment of a fresh clone is made, then, with Spark installed, 1, 2, 3, 4, 5, 6 and 8 seconds
after the start, and when the samples run. Each end must come within 3 seconds, with no trace of an error, and leave
no process behind.

The runs have a network of their own (`unshare`), so that the ports are free. Not part of the suite: a new environment
is a download of 550 MB. `--clone` takes a clone that has one already.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
#: Seconds from ctrl-C to the end.
LONGEST = 3.0
#: When the samples run, they have said this.
SETTLED = "check it"
PATIENCE = 600.0
TRACE = re.compile(
    r"Traceback|^\s+at [\w.$]+\(|Exception|\[Errno|cannot be reached|Error:|Killed|Terminated", re.MULTILINE
)
OWN_NETWORK = (
    "unshare",
    "--net",
    "--map-root-user",
    "sh",
    "-c",
    'ip link set lo up 2>/dev/null || python3 -c "$LO"; exec ./scripts/up',
)
LOOPBACK = "import fcntl,socket,struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14s', b'lo', 0x41, b''))"


class Run:
    """`./scripts/up` on a terminal, until ctrl-C."""

    def __init__(self, clone: Path, *command: str) -> None:
        self.text = ""
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"} | {
            "LO": LOOPBACK,
            "TERM": "xterm",
        }
        pid, self._terminal = pty.fork()
        if pid == 0:
            # A shell that runs this in the background ignores ctrl-C for it, and would for all that it starts.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.chdir(clone)
            os.execvpe(command[0], command, environment)
        self.pid = pid
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def read(self, seconds: float, until: str | None = None) -> bool:
        """Read for some time, or until a text came; False when the other side has ended."""
        give_up = time.monotonic() + seconds
        while (left := give_up - time.monotonic()) > 0:
            if until is not None and until in self.text:
                return True
            if select.select([self._terminal], [], [], min(left, 0.2))[0]:
                try:
                    data = os.read(self._terminal, 1 << 16)
                except OSError:
                    return False
                if not data:
                    return False
                self.text += data.decode(errors="replace")
        return True

    def interrupt(self) -> tuple[float, int, str]:
        """Press ctrl-C; the seconds until the end, the exit status, and what was written since."""
        before, began = len(self.text), time.monotonic()
        os.write(self._terminal, b"\x03")
        while True:
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - began > PATIENCE:
                os.kill(self.pid, signal.SIGKILL)
        took = time.monotonic() - began
        self.read(0.3)
        os.close(self._terminal)
        return took, os.waitstatus_to_exitcode(status), self.text[before:]


def left_behind(clone: Path) -> list[str]:
    """Return the processes that still have to do with the clone, after a moment to end."""
    for _ in range(20):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(clone) in line + os.readlink(folder / "cwd") and "interrupts" not in line:
                    found.append(line[:100])
            except OSError:
                continue
        if not found:
            return []
        time.sleep(0.1)
    return found


def attempt(name: str, clone: Path, wait: float | None, *command: str) -> bool:
    """Run, press ctrl-C after some seconds or when the samples run, and print a line about the end."""
    run = Run(clone, *command)
    alive = run.read(PATIENCE, SETTLED) if wait is None else run.read(wait)
    if not alive or (wait is None and SETTLED not in run.text):
        print(f"{name:>28}: it ended by itself\n{run.text[-2000:]}")  # noqa: T201
        return False
    if wait is None:
        run.read(10)
    took, status, said = run.interrupt()
    wrong = []
    if took > LONGEST:
        wrong.append(f"more than {LONGEST:g} s")
    if found := TRACE.search(run.text):
        wrong.append(f"it wrote {found[0].strip()!r}")
    if status not in (130, -signal.SIGINT):
        wrong.append(f"status {status}")
    wrong += [f"left behind: {line}" for line in left_behind(clone)]
    lines = len([line for line in said.splitlines() if line.strip(" \r^C")])
    print(f"{name:>28}: ended after {took:4.1f} s, {lines} lines; {'; '.join(wrong) or 'fine'}", flush=True)  # noqa: T201
    if wrong:
        print(run.text[-3000:])  # noqa: T201
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clone", metavar="DIR", type=Path, help="a clone whose environment is ready, in place of a new one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = arguments.clone or Path(folder) / "flintmq"
        fresh = Path(folder) / "fresh"
        for target in (fresh, clone):
            if not target.exists():
                subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
        good = [attempt(f"fresh clone, {wait:g} s", fresh, wait, "./scripts/up") for wait in (1.0, 4.0, 15.0)]
        shutil.rmtree(fresh)
        prepare = 'source scripts/up; prepare_environment; add_extras spark "550 MB"'
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        subprocess.run(["bash", "-c", prepare], cwd=clone, env=environment, check=True)
        good += [attempt(f"{moment:g} s", clone, moment, *OWN_NETWORK) for moment in MOMENTS]
        good.append(attempt("settled", clone, None, *OWN_NETWORK))
    print(f"{sum(good)} of {len(good)} ends were as they should be")  # noqa: T201
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
