"""A way to a store that fails as stores do: errors before and after a request was done, and lost answers.

It passes requests on to a real S3 server as they are, with the name of the host that they were signed for. It is a
process of its own, since deltalake holds Python's lock while it lists files.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What is done with a request: refused; done and then answered by an error; done and never answered.
FAULTS = ("refuse", "done-500", "done-503", "lost")
_SPECIFICATION_BYTES = 500

_processes = multiprocessing.get_context("spawn")


class FaultyStore:
    """The process, and which requests fail in it."""

    def __init__(self, target: str) -> None:
        self._specification = _processes.Array("c", _SPECIFICATION_BYTES)
        self._counts = _processes.Array("q", len(FAULTS))
        ours, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(target, self._specification, self._counts, theirs), daemon=True
        )
        self._process.start()
        self.endpoint = f"http://127.0.0.1:{ours.recv()}"

    def fail(self, often: float, *faults: str, method: str = "", part: str = "", seed: int = 0) -> None:
        """Let this share of the requests fail, of those of a method and with a part in their path if these are said."""
        said = {"often": often, "faults": faults or FAULTS, "method": method, "part": part, "seed": seed}
        self._specification.value = json.dumps(said).encode()

    def work(self) -> None:
        """Let all requests through."""
        self._specification.value = b""

    def happened(self, fault: str = "") -> int:
        """How often requests failed."""
        counts = dict(zip(FAULTS, self._counts[:], strict=True))
        return counts[fault] if fault else sum(counts.values())

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(target: str, specification: Any, counts: Any, told: Any) -> None:
    server = _Server(target, specification, counts)
    told.send(server.server_address[1])
    server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Many connections at once.
    request_queue_size = 64

    def __init__(self, target: str, specification: Any, counts: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self._specification, self._counts = specification, counts
        self._known = b""
        self._dice = random.Random(0)
        self._lock = threading.Lock()

    def fault(self, method: str, path: str) -> str:
        """Return how a request fails; nothing if it does not."""
        text = self._specification.value
        if not text:
            return ""
        said = json.loads(text)
        with self._lock:
            if text != self._known:
                self._known, self._dice = text, random.Random(said["seed"])
            if said["method"] not in ("", method) or said["part"] not in path or self._dice.random() >= said["often"]:
                return ""
            found = str(self._dice.choice(said["faults"]))
            self._counts[FAULTS.index(found)] += 1
        return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        if fault == "refuse":
            self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>")
            return
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if fault == "lost":
            # As when the machine in between is restarted.
            self.close_connection = True
            self.connection.close()
        elif fault:
            self._answer(int(fault.removeprefix("done-")), {}, b"<Error><Code>InternalError</Code></Error>")
        else:
            self._answer(response.status, dict(response.getheaders()), data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection") or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants to read who asked."""
