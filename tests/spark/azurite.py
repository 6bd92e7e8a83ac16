"""A real emulator of Azure's blobs for tests: Microsoft's Azurite, from npm, where scripts/peers puts it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.peers import PEERS
from support.ports import held_port

#: The account and the key that every emulator has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Container:
    """A container of the emulator, under both of its names, and what opens it."""

    name: str
    address: str

    @property
    def uris(self) -> tuple[str, str]:
        return f"az://{self.name}", f"abfss://{self.name}@{ACCOUNT}.dfs.core.windows.net"

    @property
    def options(self) -> dict[str, str]:
        """As `--storage-option` takes them."""
        return {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_account_key": KEY,
            "azure_storage_endpoint": f"http://{self.address}/{ACCOUNT}",
            "allow_http": "true",
        }


@contextlib.contextmanager
def azurite(folder: Path, container: str = "tests") -> Iterator[Container]:
    """An emulator that keeps all in memory; skips where there is none."""
    program = PEERS / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists() or not shutil.which("node"):
        pytest.skip("no Azurite in $FLINTMQ_PEERS/azurite or .peers/azurite, or no node: run scripts/peers")
    found = Container(container, f"127.0.0.1:{held_port()}")
    words = [str(program), "--blobPort", found.address.partition(":")[2], "--inMemoryPersistence", "--silent"]
    with open(folder / "azurite.log", "wb") as log:
        process = subprocess.Popen(
            [*words, "--disableTelemetry", "--skipApiVersionCheck"], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        give_up = time.monotonic() + 120
        while "successfully listens" not in (folder / "azurite.log").read_text():
            assert process.poll() is None and time.monotonic() < give_up, (folder / "azurite.log").read_text()
            time.sleep(0.1)
        from pyarrow import fs

        at = {"blob_storage_authority": found.address, "dfs_storage_authority": found.address}
        http = {"blob_storage_scheme": "http", "dfs_storage_scheme": "http"}
        fs.AzureFileSystem(account_name=ACCOUNT, account_key=KEY, **at, **http).create_dir(container)
        yield found
    finally:
        process.terminate()
        process.wait(60)
