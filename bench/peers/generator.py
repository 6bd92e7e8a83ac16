"""The Go program in ``load`` as seen from Python: build it once, run one mode of it, read its report."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from bench.errors import BenchError, StartError
from bench.load import cache_folder

SOURCES = Path(__file__).with_name("load")
Mode = Literal["describe", "setup", "one", "batch", "consume", "through", "latency"]
#: Seconds after which a run has hung; the program itself gives up a minute after the last progress.
LIMIT = 900


class Report(msgspec.Struct, frozen=True):
    """The JSON line of one run; times are in seconds."""

    client: str = ""
    settings: list[str] = []
    messages: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    cpu: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0


def build() -> Path:
    """Return the compiled program; its name carries a hash of the sources, so that a change builds it again."""
    if shutil.which("go") is None:
        raise StartError("the load generator needs Go 1.26 or newer: https://go.dev/dl, or the package golang-go")
    key = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    binary = cache_folder() / f"peers-{key.hexdigest()[:16]}"
    if binary.exists():
        return binary
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        fresh = Path(folder) / "load"
        command = ["go", "build", "-mod=readonly", "-buildvcs=false", "-o", str(fresh), "."]
        done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
        if done.returncode:
            raise StartError(f"the load generator does not compile:\n{done.stderr.strip()}")
        # Two benchmarks may build at once: each renames a whole file into place.
        fresh.replace(binary)
    return binary


def run(binary: Path, system: str, address: str, mode: Mode, **options: int | float | str | bool) -> Report:
    command = [str(binary), f"-system={system}", f"-address={address}", f"-mode={mode}"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command.append(f"-{flag}={str(value).lower() if isinstance(value, bool) else value}")
    # A process group of its own: ctrl-C is for the benchmark, which then ends its children in order.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired as exc:
        raise BenchError(f"{system}, {mode}: still running after {LIMIT} s") from exc
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise BenchError(f"{system}, {mode}: {errors.strip() or f'status {process.returncode}'}")
    return msgspec.json.decode(output, type=Report)
