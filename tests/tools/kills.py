"""``python -m tools.kills``: kill nsq_to_file with -9 again and again while it writes, and count what is lost.

    PYTHONPATH=src:tests python -m tools.kills --kills 50

Every message that the channel no longer has must be in a file. What a killed consumer held comes again a second later.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from flintmq.testing import NsqBroker

__all__ = ["kill_again_and_again", "lines_of"]

TOPIC, CHANNEL = "archive", "files"


def lines_of(folder: Path) -> list[bytes]:
    """All whole lines of all files; of a gzip file those up to where it was cut off."""
    found: list[bytes] = []
    for path in sorted(folder.rglob("*.log*")):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = unzip(data)
        found += [line for line in data.split(b"\n") if line]
    return found


def unzip(data: bytes) -> bytes:
    """Every member of a gzip file that is whole."""
    text = b""
    while data:
        member = zlib.decompressobj(31)
        try:
            part = member.decompress(data)
        except zlib.error:
            break
        if not member.eof:
            break
        text += part
        data = member.unused_data
    return text


def kill_again_and_again(kills: int, messages: int, flags: Sequence[str], folder: Path, seed: int = 0) -> set[bytes]:
    """Return the messages that are lost: published, no longer in the channel, and in no file."""
    moment = random.Random(seed)
    output = folder / "out"
    with NsqBroker(msg_timeout="1s") as broker:
        # The channel first, so that it has everything.
        broker.publish(TOPIC, b"first")
        assert broker.take(TOPIC, 1, channel=CHANNEL) == [b"first"]
        wanted = {b"message %06d" % number for number in range(messages)}
        batches = [sorted(wanted)[place :: kills + 1] for place in range(kills + 1)]
        argv = [f"--topic={TOPIC}", f"--channel={CHANNEL}", f"--nsqd-tcp-address={broker.address}"]
        argv += [f"--output-dir={output}", "--sync-interval=50ms", "--filename-format=<TOPIC><REV>.log", *flags]
        command = [sys.executable, "-m", "flintmq", "nsq_to_file", *argv]
        for batch in batches[:-1]:
            broker.publish(TOPIC, *batch)
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            before = _left(broker)
            end = time.monotonic() + 30
            # Somewhere between its first messages and the end of them.
            while _left(broker) == before and process.poll() is None and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(moment.uniform(0, 0.02))
            process.kill()
            process.wait()
        broker.publish(TOPIC, *batches[-1])
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            broker.wait_until_empty(TOPIC, CHANNEL)
        finally:
            process.terminate()
            status = process.wait(30)
        assert status == 0
    return wanted - set(lines_of(output))


def _left(broker: NsqBroker) -> tuple[int, int]:
    [topic] = broker.stats(TOPIC)["topics"]
    [channel] = topic["channels"]
    return channel["depth"], channel["in_flight_count"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="of nsq_to_file, such as --gzip")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flintmq-kills-") as folder:
        lost = kill_again_and_again(
            arguments.kills, arguments.messages, arguments.flags, Path(folder), seed=arguments.seed
        )
    sys.stdout.write(f"{arguments.kills} kills, {arguments.messages} messages, {len(lost)} lost\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
