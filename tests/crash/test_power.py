"""Power loss of a real nsqd, a few times; ``python -m tests.crash.power`` does it as often as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from .power import CREATE, RENAME, SYNC_BEGIN, SYNC_END, WRITE, Device, _head, power, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize(("durability", "losses"), [("fsync", 3), ("os", 2)])
async def test_a_power_loss_costs_only_what_was_not_promised(durability: str, losses: int, tmp_path: Path) -> None:
    report = await power(losses, durability, 1, tmp_path, seconds_between=0.4)

    assert report.samples == []
    assert report.passed
    assert report.losses == losses
    assert report.acknowledged > 500
    # The layer was in place, and saw the fast path's writes.
    assert report.writes > 100
    assert report.syncs > 20


# --- The device -------------------------------------------------------------------------------------------------------


def entry(kind: int, handle: int = 0, where: int = 0, first: bytes = b"", rest: bytes = b"") -> bytes:
    data = first + rest
    return _head.pack(_head.size + len(data), kind, handle, where, len(first)) + data


def synced(device: Device) -> dict[str, bytes]:
    """What the device holds for certain, by name."""
    return {name: bytes(node.synced.data) for name, node in device.tree.synced.items() if hasattr(node, "content")}


def test_a_sync_covers_what_was_written_before_it_began(tmp_path: Path) -> None:
    name = str(tmp_path / "file").encode()
    device = Device(tmp_path)
    device.replay(
        entry(CREATE, 1, -1, name)
        + entry(WRITE, 1, 0, b"one")
        + entry(SYNC_BEGIN, 2, 1)
        + entry(WRITE, 1, 3, b"two")
        + entry(SYNC_END, 2)
    )
    assert synced(device) == {}, "its name was never synced"
    folder = str(tmp_path).encode()
    device.replay(entry(1, 3, -1, folder) + entry(SYNC_BEGIN, 4, 3) + entry(SYNC_END, 4))
    assert synced(device) == {"file": b"one"}
    # The kill came in the middle of an entry, and before a sync's end.
    device.replay(entry(SYNC_BEGIN, 5, 1) + entry(WRITE, 1, 6, b"three")[:-1])
    assert synced(device) == {"file": b"one"}


def test_a_rename_is_lost_or_not_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"content")
    device = Device(tmp_path)
    old, new = str(tmp_path / "old").encode(), str(tmp_path / "new").encode()
    device.replay(entry(RENAME, 0, 0, old, new))
    assert synced(device) == {"old": b"content"}
    folder = str(tmp_path).encode()
    device.replay(entry(1, 3, -1, folder) + entry(SYNC_BEGIN, 4, 3) + entry(SYNC_END, 4))
    assert synced(device) == {"new": b"content"}
