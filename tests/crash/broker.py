"""A broker in a process of its own, on a data path that outlives it."""

from __future__ import annotations

from pathlib import Path

from flintmq.tools.torture.node import PATIENCE, Node

__all__ = ["PATIENCE", "BrokerProcess"]


class BrokerProcess(Node):
    """One life: its ports are given back when it is killed."""

    @classmethod
    async def of(cls, data_path: Path, *flags: str) -> BrokerProcess:
        """Return one that clients can connect to, at ``endpoint``."""
        broker = cls("nsqd", "--https-address=", f"--data-path={data_path}", *flags)
        try:
            await broker.start()
        except BaseException:
            await broker.kill()
            raise
        return broker

    async def kill(self) -> None:
        await super().kill()
        for port in self._ports:
            port.close()
