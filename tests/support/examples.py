"""The examples of a Markdown page, and one run of all of them in a shell of their own.

Every page gets a network of its own (`unshare`), so that the ports are those that readers use, and an empty folder.
Unless it has ``<!-- platform: none -->`` somewhere, `flintmq up` runs there. Marks are comments, unseen by readers:

    <!-- not run: REASON -->        the next block is not run; the reason is one of `REASONS`
    <!-- run by: PATH -->           the next block is run by this test
    <!-- until ctrl-C -->           the commands of the next block run until they are interrupted, here after a moment
    <!-- setup: COMMANDS -->        run before the next block
    <!-- TEXT is: COMMAND -->       in the next block, TEXT stands for what COMMAND prints
    <!-- everywhere TEXT is: VALUE -->    on the whole page, TEXT stands for VALUE, in which $PWD is the page's folder

A command must end with status 0, `curl` also with a status of HTTP below 400. Output that a page shows must come: in
this order, `…` for anything, numbers and ids of any value.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Why a block may not be run.
REASONS = {
    "container engine": "needs Docker or a Kubernetes cluster",
    "download": "downloads what the tests already have",
    "long": "takes minutes",
    "other machines": "names machines of yours",
    "service": "runs until you stop it, and a test runs it elsewhere",
    "system": "changes the system: users, services, files in /etc",
    "terminal": "needs a terminal",
    "placeholder": "has names to fill in",
}
#: Languages whose blocks are examples; the others show files, answers and drawings.
RUNNABLE = ("console", "python", "sql", "sh", "bash")
MARK = re.compile(r"^ *<!-- (.*?) -->$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
#: Languages whose blocks are whole files, for the program `run_example`.
PROGRAMS = ("python", "sql")
#: A command that is to be interrupted gets this long, in seconds.
MOMENT = 2
#: A guard against hanging, in seconds.
PATIENCE = 280
SCRIPT_HEAD = """
curl() { command curl --fail-with-body -sS "$@"; }
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"""
UNTIL_INTERRUPTED = """#!/bin/sh
timeout --preserve-status --signal=INT {moment} "$@"
"""
# With a /proc of its own: Spark looks for its Pythons there.
OWN_NETWORK = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--map-root-user")
STEP = "printf '\\n@@ "
REPOSITORY = Path(__file__).resolve().parents[2]


class Example(NamedTuple):
    line: int
    language: str
    #: What stands behind the language: the title of the file that has the same text.
    title: str
    text: str
    marks: tuple[str, ...]

    def marked(self, name: str) -> str | None:
        """Return the text behind a mark, or None."""
        return next((mark[len(name) :].strip() for mark in self.marks if mark.startswith(name)), None)


def examples(text: str) -> list[Example]:
    """Return the blocks of a page that are examples, each with the marks right before it."""
    found = []
    for block in BLOCK.finditer(text):
        language, _, title = block["info"].strip().partition(" ")
        if language not in RUNNABLE:
            continue
        # Comments that touch each other and the block.
        before = text[: block.start()]
        marks: list[str] = []
        while (last := re.search(r"^ *<!-- ((?:(?!-->).)*?) -->\n\Z", before, re.DOTALL | re.MULTILINE)) is not None:
            marks.insert(0, last[1])
            before = before[: last.start()]
        body = re.sub(rf"(?m)^{block['indent']}", "", block["text"])
        found.append(Example(text.count("\n", 0, block.start()) + 1, language, title, body, tuple(marks)))
    return found


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, shown output) of a console block; one without prompts is all commands."""
    text = text.replace("\\\n", " ")
    if "$ " not in re.findall(r"(?m)^.. ?", text):
        for line in text.splitlines():
            if line.strip():
                yield line, []
        return
    command: str | None = None
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, shown
            command, shown = line[2:], []
        else:
            shown.append(line)
    if command is not None:
        yield command, shown


def loosened(line: str) -> re.Pattern[str]:
    """Return what a shown line of output means: numbers and ids may differ, … is anything, spaces do not count."""
    parts = re.split(r"((?:\b[0-9a-f]+)?…|\b[0-9a-f]{8,}\b|\d[\d.,:]*)", " ".join(line.split()))
    return re.compile(
        "".join(
            r".*?" if n % 2 and p.endswith("…") else r"[\w.,:-]+" if n % 2 else re.escape(p)
            for n, p in enumerate(parts)
        )
    )


def script_of(page: list[Example]) -> str:
    """Return one shell script that runs all examples of a page and says where it is."""
    lines = [SCRIPT_HEAD]
    number = 0
    for example in page:
        if example.marked("not run:") is not None or example.marked("run by:") is not None:
            continue
        text = example.text
        for mark in example.marks:
            if mark.startswith("setup:"):
                lines.append(f"{{ {mark.removeprefix('setup:').strip()}\n}} || exit 99")
            elif " is: " in mark and not mark.startswith("everywhere "):
                literal, command = mark.split(" is: ", 1)
                number += 1
                lines.append(f"VALUE{number}=$({command}) || exit 98")
                text = "\n".join(filled_in(line, literal, f"${{VALUE{number}}}") for line in text.split("\n"))
        if example.language in PROGRAMS:
            quoted = f"example-{example.line}.{example.language}"
            lines.append(f"cat > {quoted} <<'END_OF_EXAMPLE'\n{example.text}END_OF_EXAMPLE")
            lines.append(step(example.line, f"run_example {quoted}"))
            continue
        for command, _ in commands(text):
            if example.marked("until ctrl-C") is not None:
                command = f"until_interrupted {command}"
            lines.append(step(example.line, command))
    return "\n".join(lines) + "\n"


def filled_in(line: str, literal: str, variable: str) -> str:
    """Put a variable in the place of a text, also inside of single quotes, where the shell would not look at it."""
    first, *others = line.split(literal)
    for other in others:
        quoted = first.count("'") % 2 == 1
        first += (f"'\"{variable}\"'" if quoted else variable) + other
    return first


def step(line: int, command: str) -> str:
    return f'{STEP}{line}\\n\'\n{command}\necho "@@= $?"'


def prepare(path: Path, folder: Path, test: str = "") -> list[Example]:
    """Write the script of a page into a folder, and return its examples as they run there.

    Examples that are marked as run by `test` run too.
    """
    text = path.read_text()
    for literal, value in re.findall(r"<!-- everywhere (.+?) is: (.+?) -->", text):
        value = value.replace("$PWD", str(folder))
        text = BLOCK.sub(lambda block: block[0].replace(literal, value), text)  # noqa: B023
    page = [example for example in examples(text) if not is_run_elsewhere(example)]
    mine = f"run by: {test}"
    page = [example._replace(marks=tuple(mark for mark in example.marks if mark != mine)) for example in page]
    (folder / "page.sh").write_text(script_of(page))
    return page


def is_run_elsewhere(example: Example) -> bool:
    """Tell whether a block is a file of examples/, which tests of their own run."""
    return example.title.startswith('title="examples/') and (REPOSITORY / example.title[7:].rstrip('"')).exists()


def environment_of(path: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a page's script."""
    return os.environ | {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY / "tests"),
        "HOME": str(folder),
        # For setups: the page, and the repository.
        "PAGE": str(path),
        "REPOSITORY": str(REPOSITORY),
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }


def run_page(path: Path, folder: Path, *, platform: bool) -> list[str]:
    """Run all examples of a page, and return what is wrong with them, a text each."""
    page = prepare(path, folder)
    if not script_of(page).count(STEP):
        return []
    words = [*OWN_NETWORK, sys.executable, "-m", "support.examples", "platform" if platform else "none"]
    done = run_apart(words, folder, environment_of(path, folder), PATIENCE)
    if done.returncode != 0:
        return [f"the script ended with {done.returncode}: {done.stdout[-2000:]}"]
    return judge(page, done.stdout)


def run_apart(
    words: list[str], folder: Path, environment: dict[str, str], patience: float
) -> subprocess.CompletedProcess[str]:
    """Run a command with its output and its errors in one text."""
    return subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience,
        check=False,
    )


def judge(page: list[Example], printed: str) -> list[str]:
    """Return what is wrong with the output of a page's script, a text each."""
    results = re.findall(r"^@@ (\d+)\n(.*?)@@= (\d+)$", printed, re.DOTALL | re.MULTILINE)
    expected_steps = script_of(page).count(STEP)
    if len(results) != expected_steps:
        return [f"only {len(results)} of {expected_steps} commands ended: {printed[-2000:]}"]
    wrong = []
    at = 0
    for example in page:
        if example.marked("not run:") is not None or example.marked("run by:") is not None:
            continue
        steps = [(example.language, [])] if example.language in PROGRAMS else list(commands(example.text))
        for command, shown in steps:
            line, output, status = results[at]
            at += 1
            good = ("0", "130") if example.marked("until ctrl-C") is not None else ("0",)
            if status not in good:
                wrong.append(f"line {line}: {command} ended with {status}: {output.strip()[-500:]}")
            rest = " ".join(output.split())
            for expected in shown:
                found = loosened(expected).search(rest)
                if found is None:
                    wrong.append(f"line {line}: {command} did not print {expected!r}: {output.strip()[-500:]}")
                    break
                rest = rest[found.end() :]
    return wrong


def can_run() -> bool:
    """Tell whether this system lets us have a network of our own."""
    if shutil.which("unshare") is None or shutil.which("curl") is None:
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        siocsifflags, up_and_running = 0x8914, 0x41
        fcntl.ioctl(sock, siocsifflags, struct.pack("16sH14s", b"lo", up_and_running, b""))


def add_program(folder: Path, name: str, text: str) -> None:
    """Add a program to those that a page's script finds first."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@contextlib.contextmanager
def platform_in(folder: Path) -> Iterator[None]:
    """Run `flintmq up` in a folder, on the usual ports."""
    command = [str(Path(sys.executable).parent / "flintmq"), "up", "--data-path", "platform"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        subprocess.run(
            ["curl", "-s", "--retry", "60", "--retry-connrefused", "--retry-delay", "1", "http://127.0.0.1:4171/ping"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield
    finally:
        running.kill()
        running.wait()


def main(platform: str) -> int:
    """Inside of the new network: bring up its loopback, start the platform, run the script."""
    bring_up_loopback()
    folder = Path.cwd()
    add_program(folder, "until_interrupted", UNTIL_INTERRUPTED.format(moment=MOMENT))
    add_program(folder, "run_example", f'#!/bin/sh\nexec {sys.executable} -W error -m support.run_python "$@"\n')
    with platform_in(folder) if platform == "platform" else contextlib.nullcontext():
        return subprocess.run(["bash", "page.sh"], stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
