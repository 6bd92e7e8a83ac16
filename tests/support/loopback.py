"""An NSQ client on a real loopback connection, for tests that turn the event loop by hand.

It has the interface of ``fakes.Client``, and nothing of it waits: ``pump`` sends what the socket takes and reads what
has come. The broker sees a plain socket, so that its lanes are taken.
"""

from __future__ import annotations

import socket

from flintmq.protocol.wire import FRAME_RESPONSE, HEARTBEAT, MAGIC_V2, FrameDecoder, Message

__all__ = ["Loopback"]


class Loopback:
    """One connection: ``send`` bytes, look at the frames that came."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()
        self._frames: list[tuple[int, bytes]] = []
        self._unsent = bytearray()
        #: The broker has closed or reset the connection.
        self.lost = False
        self.send(MAGIC_V2)

    def send(self, data: bytes) -> None:
        self._unsent += data
        self.pump()

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def pump(self) -> None:
        while not self.lost:
            try:
                if self._unsent:
                    del self._unsent[: self._sock.send(self._unsent)]
                data = self._sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.lost = True
                return
            self.lost = not data
            self._frames += [frame for frame in self._decoder.feed(data) if frame != (FRAME_RESPONSE, HEARTBEAT)]

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        """All frames so far, without heartbeats."""
        self.pump()
        return self._frames

    def take(self) -> list[tuple[int, bytes]]:
        """The frames since the last time."""
        frames = self.frames
        self._frames = []
        return frames

    def finish(self, *messages: Message) -> None:
        self.send(b"".join(b"FIN %s\n" % message.id for message in messages))

    def requeue(self, message: Message, seconds: float = 0) -> None:
        self.send(b"REQ %s %d\n" % (message.id, round(seconds * 1000)))

    def close(self) -> None:
        self._sock.close()
        self.lost = True
