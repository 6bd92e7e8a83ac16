"""``python -m tests.fuzz.sanitized [TARGET…] [--seconds 600]``: the targets on a kernel built with sanitizers.

The compiled kernel is built in a copy of the sources with AddressSanitizer and UndefinedBehaviorSanitizer, and
``python -m tests.fuzz`` runs there, by mutation, with their library in place. Whatever they report ends the process,
and the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"


def library(name: str) -> str:
    """The path of one of the compiler's own libraries."""
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def build(folder: Path) -> None:
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    # The extensions are optional: where they cannot be built, an install goes on without them.
    environment = {**os.environ, "CFLAGS": FLAGS, "LDFLAGS": "-fsanitize=address,undefined"}
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder, env=environment, check=True)
    if not list((folder / "src/flintmq/kernel").glob("*.so")):
        raise SystemExit("the kernel could not be built with sanitizers")


def main(arguments: list[str]) -> int:
    if shutil.which("cc") is None:
        sys.stderr.write("there is no C compiler: the kernel cannot be built with sanitizers\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="flintmq-sanitized-") as name:
        folder = Path(name)
        build(folder)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'src'}:{folder}",
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
            # Python itself leaves things behind at its end.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        command = [sys.executable, "-m", "tests.fuzz", "--engine=mutation", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
