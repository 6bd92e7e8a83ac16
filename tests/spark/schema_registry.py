"""Schema registries for tests: Apicurio's, where scripts/peers has put it, and a small one over real HTTP.

The small one answers the documented API of Confluent's registry. It keeps what it is told in memory, and checks neither
schemas nor their compatibility; Protobuf's schemas are shown as they came, in source or as descriptors.

``python -m spark.schema_registry PORT`` runs one for the examples of the docs.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flintmq.spark import java
from support.peers import PEERS
from support.ports import held_port


class SchemaRegistry:
    """What the registry knows, and how it behaves."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        #: By id, the first of which is 1.
        self._schemas: list[dict[str, Any]] = []
        #: The ids of a subject's versions.
        self._subjects: dict[str, list[int]] = {}
        #: What was asked for, in order.
        self.asked: list[str] = []
        #: The header Authorization that is asked for.
        self.authorization: str | None = None
        #: Answers that are still to be errors of this status.
        self.failures: list[int] = []

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path = target.partition("?")[0]
        with self._lock:
            self.asked.append(target)
            if self.authorization is not None and headers.get("Authorization") != self.authorization:
                return 401, {"error_code": 401, "message": "Unauthorized"}
            if self.failures:
                return self.failures.pop(0), {"error_code": 50001, "message": "Error in the backend datastore"}
            if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
                return self._by_id(int(found[1]))
            if found := re.fullmatch(r"/subjects/([^/]+)/versions(?:/(\w+))?", path):
                subject = urllib.parse.unquote(found[1])
                if method == "POST":
                    return self._register(subject, json.loads(body))
                return self._version(subject, found[2] or "latest")
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _register(self, subject: str, schema: dict[str, Any]) -> tuple[int, Any]:
        if schema not in self._schemas:
            self._schemas.append(schema)
        id = self._schemas.index(schema) + 1
        versions = self._subjects.setdefault(subject, [])
        if id not in versions:
            versions.append(id)
        return 200, {"id": id}

    def _by_id(self, id: int) -> tuple[int, Any]:
        if not 0 < id <= len(self._schemas):
            return 404, {"error_code": 40403, "message": f"Schema {id} not found"}
        return 200, self._shown(id)

    def _version(self, subject: str, version: str) -> tuple[int, Any]:
        versions = self._subjects.get(subject)
        if versions is None:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        number = len(versions) if version == "latest" else int(version)
        if not 0 < number <= len(versions):
            return 404, {"error_code": 40402, "message": f"Version {version} not found."}
        id = versions[number - 1]
        return 200, {"subject": subject, "version": number, "id": id, **self._shown(id)}

    def _shown(self, id: int) -> dict[str, Any]:
        schema = self._schemas[id - 1]
        shown = {key: schema[key] for key in ("schema", "schemaType", "references") if schema.get(key)}
        if shown.get("schemaType") == "AVRO":
            del shown["schemaType"]
        return shown


@contextlib.contextmanager
def serve(port: int = 0) -> Iterator[SchemaRegistry]:
    """A registry on an unused port, unless one is given."""
    registry = SchemaRegistry()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            status, found = registry.answer(self.command, self.path, self.headers, body)
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def apicurio(folder: Path) -> Iterator[str]:
    """The URL of an Apicurio Registry that keeps all in memory; skips where there is none."""
    home = PEERS / "apicurio"
    if not (found := sorted(home.glob("*-runner.jar"))):
        pytest.skip("no Apicurio Registry in $FLINTMQ_PEERS/apicurio or .peers/apicurio: run scripts/peers")
    port = held_port()
    environment = os.environ | {"QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_HTTP_PORT": str(port)}
    command = [str(java.find().home / "bin" / "java"), "-XX:TieredStopAtLevel=1", "-Xmx300m", "-jar", str(found[-1])]
    with open(folder / "apicurio.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
            give_up = time.monotonic() + 120
            while not _answers(f"{url}/subjects"):
                assert process.poll() is None and time.monotonic() < give_up, (folder / "apicurio.log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def register(
    url: str, subject: str, schema: str | bytes, kind: str = "AVRO", references: list[dict[str, Any]] | None = None
) -> int:
    """Tell a registry, whichever it is, of a schema. Its id."""
    text = base64.b64encode(schema).decode() if isinstance(schema, bytes) else schema
    body = {"schemaType": kind, "schema": text, "references": references or []}
    request = urllib.request.Request(
        f"{url}/subjects/{urllib.parse.quote(subject, safe='')}/versions",
        json.dumps(body).encode(),
        {"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["id"])


def framed(id: int, body: bytes, places: bytes = b"") -> bytes:
    """A body behind the id of its schema."""
    return b"\0" + id.to_bytes(4, "big") + places + body


if __name__ == "__main__":
    with serve(int(sys.argv[1])):
        threading.Event().wait()
