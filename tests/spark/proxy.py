"""A TCP way to a broker that can be cut, after an answer, at once, or for a while, and that can fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Carries connections to ``target`` (host:port). Everything that it carries can be cut at once."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        #: Times a connection was cut after an answer.
        self.cuts = 0
        self._answers_left: int | None = None
        self._is_down = False
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after_answers(self, answers: int) -> None:
        """Cut one connection when this many more answers have come, and do not pass on the next one."""
        with self._lock:
            self._answers_left = answers

    def cut(self) -> None:
        """Cut every connection that is open; new ones are carried."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def down(self) -> None:
        """Cut every connection and refuse new ones, until ``up``."""
        self._is_down = True
        self.cut()

    def hold(self) -> None:
        """Carry nothing, and tell nobody, until ``up``."""
        self._flows.clear()

    def up(self) -> None:
        self._is_down = False
        self._flows.set()

    def close(self) -> None:
        self._server.close()
        self.up()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._is_down:
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        try:
            broker = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, broker}
        threading.Thread(target=self._copy, args=(client, broker, False), daemon=True).start()
        self._copy(broker, client, True)
        with self._lock:
            self._open -= {client, broker}
        client.close()
        broker.close()

    def _copy(self, from_: socket.socket, to: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := from_.recv(65536):
                self._flows.wait()
                if is_answer and self._is_cut():
                    break
                to.sendall(data)
        for end in (from_, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _is_cut(self) -> bool:
        with self._lock:
            if self._answers_left is None:
                return False
            self._answers_left -= 1
            if self._answers_left >= 0:
                return False
            self._answers_left = None
            self.cuts += 1
            return True
