"""Files that end anywhere, and files with a bit that is another one: what that costs is one record, and never more.

``FLINTMQ_EXHAUSTIVE=1`` cuts at every byte of the last 64 KiB and flips 100,000 bits.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from support.log_rig import BASE, Rig, numbered

EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
LAST = 64 << 10
STEP = 1 if EXHAUSTIVE else 97
FLIPS = 100_000 if EXHAUSTIVE else 1_000
#: Of a file: its header, which belongs to no record.
HEADER = 44


class Written:
    """A log on a simulated disk, and for each of its records where it ends and what is in it."""

    def __init__(self, size: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rig = Rig(max_bytes_per_file=1 << 30)
        self.records: list[tuple[int, dict[int, bytes]]] = []
        self.end = BASE
        while not self.records or self.records[-1][0] < size:
            count = rng.choice((1, 1, 1, 2, 5, 20))
            bodies = numbered(count, rng.choice((20, 200, 2000)), self.end)
            first = self.rig.publish(*bodies)
            self.end = first + count
            self.records.append((len(self.content), dict(zip(range(first, self.end), bodies, strict=True))))

    @property
    def path(self) -> Path:
        (path,) = self.rig.files
        return path

    @property
    def content(self) -> bytes:
        return self.rig.disk.content(self.path)

    def read(self, content: bytes, durable: int) -> dict[int, bytes]:
        """What a start finds if the file is this one."""
        disk = self.rig.disk.after_kill()
        disk.swap(self.path, content)
        rig = self.rig.reopened(disk, durable=durable)
        found = rig.bodies()
        rig.log.close()
        rig.run()
        return found


def test_a_torn_tail_keeps_every_whole_record_wherever_it_ends() -> None:
    written = Written(LAST + 8_000, seed=1)
    content = written.content
    cuts = range(len(content) - LAST, len(content) + 1, STEP)
    for cut in [*cuts, *(end for end, _ in written.records if end >= cuts[0])]:
        expected = {}
        for end, bodies in written.records:
            if end <= cut:
                expected |= bodies
        assert written.read(content[:cut], BASE) == expected, f"cut at {cut}"


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_flipped_bit_costs_the_record_that_it_is_in(is_synced: bool) -> None:
    written = Written(12_000, seed=2)
    content = written.content
    everything = {seq: body for _, bodies in written.records for seq, body in bodies.items()}
    rng = random.Random(3)
    for _ in range(FLIPS // 2):
        at = rng.randrange(len(content))
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        found = written.read(bytes(flipped), written.end if is_synced else BASE)
        assert found.items() <= everything.items(), f"at {at}, something that was never written"
        begin = HEADER
        for end, bodies in written.records:
            if begin <= at < end:
                assert everything.keys() - found.keys() <= bodies.keys(), f"at {at}, in the record {begin} to {end}"
            begin = end
        if at < HEADER:
            assert found == everything, f"at {at}, in the header"
