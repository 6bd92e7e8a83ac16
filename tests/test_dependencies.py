"""The dependencies that pyproject.toml declares are those that the source imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Distributions whose module has another name.
MODULES = {"google-crc32c": "google_crc32c"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[^A-Za-z0-9_-]", requirement, maxsplit=1)[0] for requirement in requirements}
    return {MODULES.get(name, name.replace("-", "_")) for name in found}


def imported() -> set[str]:
    """The foreign top-level modules that some source file imports, at its top or inside a function."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"flintmq", "pyspark_nsq"}


def test_every_run_time_dependency_is_imported_by_the_source() -> None:
    assert names(PROJECT["dependencies"]) - imported() == set()


def test_what_only_tests_need_is_not_imported_by_the_source() -> None:
    extras = PROJECT["optional-dependencies"]
    # The pytest plugin is part of the product, and only runs where pytest does.
    assert names(extras["test"]) & imported() <= {"pytest", "pytest_asyncio", "hypothesis"}


# Both daemons answer /metrics in a process where prometheus_client cannot be imported.
SCRIPT = """
import asyncio, sys, tempfile
sys.modules["prometheus_client"] = None
from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from flintmq.options import NsqlookupdOptions

async def get(address, path):
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.0\\r\\n\\r\\n".encode())
    answer = await reader.read()
    writer.close()
    return answer

async def main(folder):
    lookupd = Lookupd(NsqlookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0"))
    broker = Broker(data_path=folder, disk_reserve=0, http_address="127.0.0.1:0")
    async with lookupd, broker:
        for daemon in (broker, lookupd):
            answer = await get(daemon.http_address, "/metrics")
            print(type(daemon).__name__, answer.split(b" ", 2)[1].decode(), b"# TYPE " in answer)

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


def test_metrics_need_no_library() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90, env=os.environ, check=False
    )
    assert (result.stdout, result.returncode) == ("Broker 200 True\nLookupd 200 True\n", 0), result.stderr


# Starts a daemon as the command line does, and says what was imported by the time it serves its clients.
START = """
import asyncio, sys, tempfile
from flintmq.broker.daemon import Broker
from flintmq.cli import nsqd

async def main(folder):
    async with Broker(data_path=folder, disk_reserve=0, http_address="127.0.0.1:0"):
        print(*sys.modules)

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


def test_a_start_imports_nothing_that_only_some_programs_or_requests_need() -> None:
    result = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, timeout=90, env=os.environ, check=False
    )
    imported = set(result.stdout.split())
    assert "flintmq.broker.http.api" in imported, result.stderr
    rarely = {"aiohttp", "argparse", "difflib", "email", "http.client", "rich", "tomllib", "urllib.request"}
    rarely |= {"flintmq.broker.backup", "flintmq.broker.net.auth", "flintmq.broker.takeover", "flintmq.client"}
    assert imported & rarely == set()


def test_the_lock_for_images_has_every_dependency_with_its_hash() -> None:
    lines = [line for line in (ROOT / "deploy" / "requirements.lock").read_text().splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[a-z0-9_.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = names([line.partition("==")[0] for line in lines])
    assert names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["uvloop"]) <= locked


def licences(folder: Path, licence: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/licences where a package that a broker needs is under this licence."""
    about = folder / "msgspec-0.99.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: msgspec\nVersion: 0.99\nLicense: {licence}\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(ROOT / "scripts" / "licences")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_licence_that_binds_users_is_not_accepted_at_run_time(tmp_path: Path) -> None:
    for licence in ("GPL-3.0", "LGPL-2.1", "MPL-2.0", "MIT OR GPL-2.0", "", "Proprietary"):
        result = licences(tmp_path, licence)
        assert result.returncode == 1 and "msgspec" in result.stderr.partition("not accepted: ")[2], licence
    assert "msgspec" not in licences(tmp_path, "BSD-3-Clause").stderr
