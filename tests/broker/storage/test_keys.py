"""Idempotent publish: one key, one message, whatever is repeated, crashes or goes.

A ``Keyed`` client has said ``"flintmq": true``; what it publishes goes the whole way through a real broker. What
happens to keys when the power goes at any file call is in test_keys_power_loss.py.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from conftest import StartBroker
from hypothesis import given
from hypothesis import strategies as st

import flintmq
from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.commit import SLICED_FROM
from flintmq.broker.observe import prometheus
from flintmq.broker.storage import keys as keys_module
from flintmq.broker.storage.disk import BACKGROUND, Disk, pack_numbers
from flintmq.broker.storage.keys import RESERVED, KeyBlock, KeyFiles, Window, digest_of, key_extra, key_in
from flintmq.errors import FormatError
from flintmq.protocol.wire import encode_command, encode_mpub, valid_key
from flintmq.system import System
from support.fakes import SECOND, Client, CountingDisk, FakeClock, quiet, until
from support.http_client import HttpClient, request_of
from support.simdisk import PowerLoss, SimDisk
from support.stage_client import mpub_body

HOUR = 3600 * SECOND


class Keyed(Client):
    """A client that may give keys."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.send(encode_command(b"IDENTIFY", body=b'{"flintmq": true}'))
        assert self.take() == [(0, b"OK")]


def pub(key: str, body: bytes, topic: str = "t") -> bytes:
    return encode_command(b"PUB", topic.encode(), key.encode(), body=body)


def dpub(key: str, body: bytes, milliseconds: int) -> bytes:
    return encode_command(b"DPUB", b"t", b"%d" % milliseconds, key.encode(), body=body)


def mpub(key: str, bodies: list[bytes]) -> bytes:
    return encode_mpub(b"t", bodies, key.encode())


def stored(broker: Broker, topic: str = "t") -> list[bytes]:
    """The bodies in the topic's log, as long as none of them has left the memory."""
    found = []
    for block in broker.topics[topic].log.blocks:
        for seq in range(block.base, block.base + block.count):
            block.find(seq)
            found.append(bytes(block.view[block.start : block.stop])[34:])
    return found


def limit(broker: Broker, **settings: int | str) -> None:
    """Set them for the topic, as over HTTP."""
    broker.topic("t")
    broker.settings.change(("t",), {key.replace("_", "-"): value for key, value in settings.items()})


# --- The window -------------------------------------------------------------------------------------------------------


def digests(count: int, start: int = 0) -> Iterator[bytes]:
    return (digest_of(b"%d" % number) for number in range(start, start + count))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=200), st.integers(1, 30), st.integers(0, 60)
)
def test_a_window_remembers_at_least_the_newest_and_no_key_for_less_than_its_age(
    steps: list[tuple[int, int]], count: int, age: int
) -> None:
    window = Window(System())
    now = 0
    order: list[tuple[int, int]] = []
    for number, seconds in steps:
        now += seconds
        digest = digest_of(b"%d" % number)
        window.trim(now, count, age)
        newest = order[-count:]
        must = {key for key, at in newest if not age or now - at <= age}
        for key in range(41):
            known = window.knows(digest_of(b"%d" % key))
            assert known or key not in must
            assert not known or key in {key for key, _ in order}
        if not window.knows(digest):
            window.add(digest, now, count, age)
            order.append((number, now))


def test_a_window_holds_not_many_more_than_it_must_and_takes_64_bytes_a_key_at_most() -> None:
    window = Window(System())
    for digest in digests(50_000):
        window.add(digest, 0, 20_000, 0)
        assert len(window) <= 20_000 * 1.5
    assert 20_000 <= len(window)
    assert window.memory <= 64 * 20_000
    assert all(map(window.knows, digests(20_000, 30_000)))
    assert not any(map(window.knows, digests(20_000)))


def test_a_window_with_few_keys_is_small() -> None:
    window = Window(System())
    assert window.memory == 0
    window.add(digest_of(b"one"), 0, 1_000_000, 0)
    assert window.memory <= 4096


def test_a_key_is_forgotten_not_long_after_its_age_also_where_few_come() -> None:
    window = Window(System())
    for hour, digest in enumerate(digests(1000)):
        window.add(digest, hour * HOUR, 1_000_000, 100 * HOUR)
    assert 100 <= len(window) <= 130
    window.trim(1099 * HOUR, 1_000_000, 100 * HOUR)
    assert window.knows(digest_of(b"999"))
    window.trim(1099 * HOUR + 1, 1_000_000, 100 * HOUR)
    assert (len(window), window.memory) == (0, 0)


def test_a_digest_may_begin_with_zeros() -> None:
    window = Window(System())
    window.add(bytes(16), 0, 10, 0)
    assert window.knows(bytes(16))
    assert not window.knows(bytes(15) + b"1")


def test_what_is_read_back_counts_from_when_it_came() -> None:
    block = KeyBlock()
    for hour, digest in enumerate(digests(50)):
        block.add(digest, hour, 1000 * HOUR + hour * HOUR)
    window = Window(System())
    # The boot was an hour ago: times lie before it.
    window.load(block, HOUR, 1050 * HOUR, 1_000_000, 20 * HOUR, 0)
    assert not any(map(window.knows, digests(30)))
    assert all(map(window.knows, digests(20, 30)))
    window.trim(HOUR + 10 * HOUR, 1_000_000, 20 * HOUR)
    assert all(map(window.knows, digests(11, 39)))
    window.trim(HOUR + 20 * HOUR, 1_000_000, 20 * HOUR)
    assert len(window) == 0


def test_what_is_read_back_in_many_small_parts_needs_few_tables() -> None:
    window = Window(System())
    for number, digest in enumerate(digests(2000)):
        block = KeyBlock()
        block.add(digest, number, number)
        window.load(block, 5000, 5000, 1_000_000, 10_000, 2000 - number - 1)
    assert all(map(window.knows, digests(2000)))
    assert len(window) == 2000
    assert window.memory <= 64 * 2000


def test_what_is_read_back_from_a_clock_that_ran_ahead_is_as_old_as_the_start() -> None:
    block = KeyBlock()
    block.add(digest_of(b"0"), 1, 2000 * HOUR)
    window = Window(System())
    window.load(block, HOUR, 1000 * HOUR, 100, 20 * HOUR, 0)
    window.trim(21 * HOUR, 100, 20 * HOUR)
    assert window.knows(digest_of(b"0"))
    window.trim(21 * HOUR + 1, 100, 20 * HOUR)
    assert not window.knows(digest_of(b"0"))


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "~" * 128, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}", "query/7/3/0"])
def test_good_keys(key: str) -> None:
    assert valid_key(key.encode())


@pytest.mark.parametrize("key", [b"", b"a" * 129, b"a b", b"a\t", b"a\n", b"\x7f", "ä".encode(), b"\0"])
def test_bad_keys(key: bytes) -> None:
    assert not valid_key(key)


def test_the_key_is_found_in_the_extra_bytes_of_a_record() -> None:
    digest = digest_of(b"key")
    assert key_in(key_extra(digest)) == (digest, 0)
    assert key_in(key_extra(digest, 7 << 32)) == (digest, 7 << 32)
    assert key_in(key_extra(digest, RESERVED)) == (digest, RESERVED)
    pack = keys_module.msgspec.msgpack.encode
    assert pack({"key": digest}) == key_extra(digest)
    assert key_in(pack({"dead": {"topic": "t"}, "key": digest})) == (digest, 0)
    assert key_in(pack({"dead": {"topic": "a topic with a long name", "channel": "c"}})) is None
    assert key_in(pack({"key": digest + digest})) is None
    assert key_in(pack({"key": 7, "padding": "x" * 30})) is None
    # A side log's: a channel, a channel and a seq.
    assert key_in(bytes(4)) is None
    assert key_in(bytes(12)) is None
    assert key_in(b"\xff" * 40) is None


def block_of(first: int, count: int) -> KeyBlock:
    block = KeyBlock()
    for number in range(first, first + count):
        block.add(digest_of(b"%d" % number), number, number * SECOND)
    return block


def test_a_block_of_keys_can_be_packed_cut_and_skipped() -> None:
    block = block_of(10, 5)
    data = block.encode()
    assert len(data) == KeyBlock.size(5)
    again = KeyBlock.decode(data, 5)
    assert (again.digests, again.seqs, again.times) == (block.digests, block.seqs, block.times)
    again.cut(14)
    again.skip(12)
    assert list(again.seqs) == [12, 13]
    assert again.digests == digest_of(b"12") + digest_of(b"13")
    assert again.last == digest_of(b"13")


CONTENTS = [[b"one"], [b"two"], [b"one", b"two"], [b"two", b"one"], [b"onet", b"wo"], [b"one", b"two", b"three"]]


@pytest.mark.parametrize("how", ["at once", "stop", "kill", "gone"])
async def test_a_key_that_is_used_for_other_content_is_an_error(start_broker: StartBroker, how: str) -> None:
    """However it was published, whether or not it is still in a segment, and after a restart."""
    options = {"max_bytes_per_file": 2_000, "http_address": "127.0.0.1:0"}
    broker = await start_broker(**options)
    channel, _ = broker.topic("t").channel("c")
    for number, bodies in enumerate(CONTENTS):
        assert await Keyed(broker).ask(mpub(f"k{number}", bodies)) == b"OK"
    if how == "gone":
        await fill(broker, range(60))
        await drain(broker, channel)
        await broker.stop()
        broker = await start_broker(**options)
    elif how != "at once":
        await end(broker, how)
        broker = await start_broker(**options)
    count = broker.topics["t"].message_count
    async with HttpClient.connect(broker.http_address) as http:
        for number, stored_bodies in enumerate(CONTENTS):
            for bodies in CONTENTS:
                key = f"k{number}"
                answers = [
                    await Keyed(broker).ask(mpub(key, bodies)),
                    (await http.post("/mpub?topic=t", b"\n".join(bodies), f"X-Flintmq-Key: {key}")).body,
                    (await http.post("/mpub?topic=t&binary=true", mpub_body(bodies), f"X-Flintmq-Key: {key}")).body,
                ]
                if len(bodies) == 1:
                    answers.append(await Keyed(broker).ask(pub(key, bodies[0])))
                    answers.append((await http.post("/pub?topic=t", bodies[0], f"X-Flintmq-Key: {key}")).body)
                if bodies == stored_bodies:
                    assert answers == [b"OK"] * len(answers)
                else:
                    assert all(b"E_KEY_CONTENT key k%d was used for" % number in answer for answer in answers), answers
    assert broker.topics["t"].message_count == count


def test_keys_without_content_are_read_and_count_as_equal(tmp_path: Path) -> None:
    """As 0.1.0 wrote them: at the end of a segment, and in a file of keys."""
    block = block_of(10, 5)
    old = bytes(block.digests) + pack_numbers(block.seqs) + pack_numbers(block.times)
    assert len(old) == KeyBlock.size(5, old=True)
    assert list(KeyBlock.decode(old, 5).contents) == [0] * 5
    head = keys_module._head.pack(b"FLINTKEY", 1, 0, 5)
    crc = google_crc32c.extend(google_crc32c.extend(0, head), old)
    (tmp_path / f"{10:016x}.keys").write_bytes(head + keys_module._crc.pack(crc) + old)
    assert seqs_in(tmp_path) == [10, 11, 12, 13, 14]
    window = Window(System())
    window.add(digest_of(b"old"), 0, 10, 0)
    assert window.find(digest_of(b"old")) == 0
    keys_module._compare(b"old", 0, 7)


# --- Files of keys ----------------------------------------------------------------------------------------------------


def seqs_in(folder: Path) -> list[int]:
    return [seq for block in KeyFiles(Disk(), folder, "t").read() for seq in block.seqs]


def test_small_files_of_keys_are_joined_and_large_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MOST_IN_FILE", 25)
    files = KeyFiles(Disk(), tmp_path, "t")
    for first in range(0, 60, 10):
        files.save(block_of(first, 10))
    assert len(os.listdir(tmp_path)) == 3
    assert seqs_in(tmp_path) == list(range(60))
    assert files.last == 59


def test_keys_that_are_saved_already_are_not_saved_again(tmp_path: Path) -> None:
    files = KeyFiles(Disk(), tmp_path, "t")
    files.save(block_of(0, 10))
    files.save(block_of(5, 10))
    files.save(block_of(5, 10))
    assert seqs_in(tmp_path) == list(range(15))


def test_files_of_keys_go_when_all_their_keys_are_too_many_or_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "MOST_IN_FILE", 10)
    files = KeyFiles(Disk(), tmp_path, "t")
    for first in range(0, 50, 10):
        files.save(block_of(first, 10))
    files.expire(0, 45, 0, 4)
    assert seqs_in(tmp_path) == list(range(50))
    files.expire(0, 45, 0, 5)
    assert seqs_in(tmp_path) == list(range(10, 50))
    files.expire(29 * SECOND, 1000, 10 * SECOND, 0)
    assert seqs_in(tmp_path) == list(range(10, 50))
    files.expire(30 * SECOND, 1000, 10 * SECOND, 0)
    assert seqs_in(tmp_path) == list(range(20, 50))


@pytest.mark.parametrize("cut", [0, 3, 19, 20, 200])
def test_a_damaged_file_of_keys_is_set_aside_and_said_so(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = KeyFiles(Disk(), tmp_path, "t")
    files.save(block_of(0, 10))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    assert seqs_in(tmp_path) == []
    assert "is damaged and set aside" in caplog.text
    assert os.listdir(tmp_path) == [f"{path.name}.bad"]


def test_keys_that_were_read_outlive_a_power_loss(tmp_path: Path) -> None:
    """Killed at any call of a save; segments are deleted whose keys the next process has found in a file."""
    whole = SimDisk(tmp_path)
    KeyFiles(whole, tmp_path, "t").save(block_of(0, 10))
    for n in range(1, whole.calls + 1):
        disk = SimDisk(tmp_path)
        disk.power_off_at = n
        with pytest.raises(PowerLoss):
            KeyFiles(disk, tmp_path, "t").save(block_of(0, 10))
        left = disk.after_kill()
        found = [list(block.seqs) for block in KeyFiles(left, tmp_path, "t").read()]
        files = KeyFiles(left.after_power_loss("none"), tmp_path, "t")
        assert [list(block.seqs) for block in files.read()] == found, disk.history[n - 1]


def test_a_file_of_keys_with_a_changed_byte_is_damaged(tmp_path: Path) -> None:
    KeyFiles(Disk(), tmp_path, "t").save(block_of(0, 2))
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        files = KeyFiles(Disk(), tmp_path, "t")
        try:
            assert files.read() == []
        except FormatError:
            # A version that nobody knows: refused, not guessed at.
            assert 8 <= at < 10
        (tmp_path / f"{path.name}.bad").unlink(missing_ok=True)


def test_a_file_of_keys_that_the_device_cannot_read_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BadDisk(Disk):
        def read(self, fd: int, size: int, offset: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    KeyFiles(Disk(), tmp_path, "t").save(block_of(0, 10))
    assert KeyFiles(BadDisk(), tmp_path, "t").read() == []
    assert "cannot read" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]


def test_a_file_of_keys_that_was_damaged_meanwhile_is_not_added_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = KeyFiles(Disk(), tmp_path, "t")
    files.save(block_of(0, 10))
    [path] = tmp_path.iterdir()
    path.write_bytes(b"nonsense" * 10)
    files.save(block_of(10, 10))
    assert "it is not added to" in caplog.text
    assert seqs_in(tmp_path) == list(range(10, 20))


# --- Publishing over TCP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_a_repeat_is_answered_and_not_stored(start_broker: StartBroker, durability: str) -> None:
    broker = await start_broker(durability=durability)
    client = Keyed(broker)
    for command in (pub("a", b"one"), mpub("b", [b"two", b"three"]), dpub("c", b"four", 1000)):
        assert await client.ask(command) == b"OK"
        assert await client.ask(command) == b"OK"
    assert await client.ask(pub("d", b"one")) == b"OK"
    assert stored(broker) == [b"one", b"two", b"three", b"four", b"one"]
    assert broker.topics["t"].message_count == 5
    assert client.session.publish_counts == {"t": 5}
    scraped, _ = await prometheus.scrape(broker)
    assert b'nsqd_topic_keys{topic="t"} 4' in scraped
    assert b'nsqd_topic_repeats_total{topic="t"} 3' in scraped


async def test_a_key_counts_for_its_topic_alone_and_whatever_the_command(broker: Broker) -> None:
    client = Keyed(broker)
    assert await client.ask(pub("k", b"one")) == b"OK"
    assert await client.ask(mpub("k", [b"one"])) == b"OK"
    assert await client.ask(dpub("k", b"one", 0)) == b"OK"
    assert await client.ask(pub("k", b"five", "u")) == b"OK"
    assert (stored(broker), stored(broker, "u")) == ([b"one"], [b"five"])


async def test_a_repeat_may_come_over_another_connection(broker: Broker) -> None:
    assert await Keyed(broker).ask(pub("k", b"one")) == b"OK"
    assert await Keyed(broker).ask(pub("k", b"one")) == b"OK"
    assert stored(broker) == [b"one"]


async def test_a_client_that_did_not_ask_for_keys_has_none(broker: Broker) -> None:
    """As in NSQ, which ignores words that it does not know."""
    client = Client(broker)
    for command in (pub("k", b"one"), mpub("k", [b"two"]), dpub("k", b"three", 0)):
        assert await client.ask(command) == b"OK"
        assert await client.ask(command) == b"OK"
    assert len(stored(broker)) == 6
    assert broker.topics["t"].keys is None


async def test_publishes_without_a_key_are_as_they_were(broker: Broker) -> None:
    client = Keyed(broker)
    await client.publish("t", b"one", b"one")
    await client.publish_many("t", [b"two", b"two"])
    assert stored(broker) == [b"one", b"one", b"two", b"two"]
    assert broker.topics["t"].keys is None


@pytest.mark.parametrize(
    ("command", "verb"),
    [(b"PUB t %s\n", "PUB"), (b"MPUB t %s\n", "MPUB"), (b"DPUB t 5 %s\n", "DPUB")],
    ids=["PUB", "MPUB", "DPUB"],
)
@pytest.mark.parametrize("key", [b"", b"a b", b"a" * 129, b"\xc3\xa4"], ids=["none", "two words", "too long", "umlaut"])
async def test_a_bad_key_is_refused(broker: Broker, command: bytes, verb: str, key: bytes) -> None:
    client = Keyed(broker)
    client.send(command % key)
    await until(lambda: client.is_over)
    [error] = client.errors
    assert error.startswith(b"E_INVALID " + verb.encode() + b" bad key ")
    assert broker.topics == {}


async def test_keys_can_be_switched_off_for_a_topic(broker: Broker) -> None:
    limit(broker, key_count=0)
    client = Keyed(broker)
    client.send(pub("k", b"one"))
    await until(lambda: client.is_over)
    [error] = client.errors
    assert error == b"E_PUB_FAILED PUB failed no keys are remembered for this topic (key-count is 0)"
    assert broker.topics["t"].depth == 0


async def test_identify_tells_those_who_ask_what_this_broker_is(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    body = json.dumps({"feature_negotiation": True, "flintmq": True}).encode()
    answer = json.loads(await Client(broker).ask(encode_command(b"IDENTIFY", body=body)))
    assert answer["flintmq"] == {
        "version": flintmq.__version__,
        "node": broker.node.hex(),
        "log": True,
        "keys": True,
        "stage": 1,
        "http_port": int(broker.http_address.rpartition(":")[2]),
    }
    del answer["flintmq"]
    for said in ({}, {"flintmq": False}):
        body = json.dumps({"feature_negotiation": True, **said}).encode()
        assert json.loads(await Client(broker).ask(encode_command(b"IDENTIFY", body=body))) == answer


async def test_keyed_publishes_between_others_keep_their_order(broker: Broker) -> None:
    client = Keyed(broker)
    plain = encode_command(b"PUB", b"t", body=b"plain")
    client.send(pub("a", b"a") + plain + pub("a", b"a") + pub("b", b"b") + plain + mpub("b", [b"b"]) + b"FOO\n")
    await until(lambda: client.is_over)
    assert [kind for kind, _ in client.frames] == [0, 0, 0, 0, 0, 0, 1]
    assert stored(broker) == [b"a", b"plain", b"b", b"plain"]


async def test_keys_and_the_short_way_over_real_sockets(start_broker: StartBroker) -> None:
    """A producer that has published without a key goes on with one, and back."""
    broker = await start_broker()
    host, _, port = broker.tcp_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"  V2" + encode_command(b"IDENTIFY", body=b'{"flintmq": true}'))
    await reader.readexactly(10)
    plain = encode_command(b"PUB", b"t", body=b"plain")
    for command in (plain, plain, plain, pub("k", b"keyed"), plain, pub("k", b"keyed"), plain):
        writer.write(command)
        assert await reader.readexactly(10) == b"\0\0\0\x06\0\0\0\0OK"
    writer.close()
    await writer.wait_closed()
    assert sorted(stored(broker)) == [b"keyed"] + [b"plain"] * 5


# --- Repeats while the first is under way -----------------------------------------------------------------------------


class HeldDisk(CountingDisk):
    """Its threads can be held back, and its writes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = self.full = False
        self._held: list[tuple[Any, ...]] = []

    def submit(self, work: Any, done: Any, urgency: int = BACKGROUND) -> None:
        if self.hold:
            self._held.append((work, done, urgency))
        else:
            super().submit(work, done, urgency)

    def let_go(self) -> None:
        self.hold = False
        held, self._held = self._held, []
        for arguments in held:
            super().submit(*arguments)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, buffers, offset)


async def test_a_repeat_waits_for_the_commit_of_the_first(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(disk=disk, durability="fsync")
    await Keyed(broker).ask(pub("before", b"0"))
    await quiet(broker)
    disk.hold = True
    one, other, late = Keyed(broker), Keyed(broker), Keyed(broker)
    one.send(pub("k", b"one"))
    other.send(pub("k", b"one"))
    await quiet(broker)
    late.send(mpub("k", [b"one"]))
    await quiet(broker)
    assert [one.frames, other.frames, late.frames] == [[], [], []]
    disk.let_go()
    await quiet(broker)
    assert [one.responses, other.responses, late.responses] == [[b"OK"]] * 3
    assert stored(broker) == [b"0", b"one"]


async def test_if_the_first_fails_so_does_its_repeat_and_the_key_is_free_again(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(disk=disk)
    await Keyed(broker).ask(pub("before", b"0"))
    await quiet(broker)
    disk.full = True
    one, other = Keyed(broker), Keyed(broker)
    one.send(pub("k", b"one"))
    other.send(mpub("k", [b"one"]))
    await quiet(broker)
    disk.full = False
    assert one.errors == [b"E_PUB_FAILED PUB failed No space left on device"]
    assert other.errors == [b"E_MPUB_FAILED MPUB failed No space left on device"]
    assert await Keyed(broker).ask(pub("k", b"one")) == b"OK"
    assert await Keyed(broker).ask(pub("k", b"one")) == b"OK"
    assert stored(broker) == [b"0", b"one"]


async def test_a_refused_publish_leaves_its_key_free(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=1)
    await Keyed(broker).ask(pub("a", b"one"))
    client = Keyed(broker)
    client.send(pub("b", b"two"))
    await until(lambda: client.is_over)
    assert b"limit of 1 messages" in client.errors[0]
    # What is there already is no second message.
    assert await Keyed(broker).ask(pub("a", b"one")) == b"OK"
    broker.topics["t"].empty()
    assert await Keyed(broker).ask(pub("b", b"two")) == b"OK"
    assert broker.topics["t"].depth == 1


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_a_huge_batch_is_stored_once(start_broker: StartBroker, durability: str) -> None:
    broker = await start_broker(durability=durability)
    batch = mpub("k", [b"x"] * (SLICED_FROM + 1))
    one, other = Keyed(broker), Keyed(broker)
    one.send(batch)
    other.send(batch)
    await until(lambda: one.responses and other.responses)
    assert await Keyed(broker).ask(batch) == b"OK"
    assert broker.topics["t"].depth == SLICED_FROM + 1


async def test_a_huge_batch_that_fails_leaves_its_key_free(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(disk=disk)
    await Keyed(broker).ask(pub("before", b"0"))
    batch = mpub("k", [b"x"] * (SLICED_FROM + 1))
    client = Keyed(broker)
    client.send(batch)
    await until(lambda: broker.topics["t"].log.end - broker.topics["t"].log.first > 5000)
    disk.full = True
    await until(lambda: client.is_over)
    disk.full = False
    assert client.errors == [b"E_MPUB_FAILED MPUB failed No space left on device"]
    assert await Keyed(broker).ask(batch) == b"OK"
    assert broker.topics["t"].depth == SLICED_FROM + 2


# --- Restarts ---------------------------------------------------------------------------------------------------------


async def end(broker: Broker, how: str) -> None:
    if how == "stop":
        await broker.stop()
    else:
        broker.kill()


async def is_known(broker: Broker, key: str) -> bool:
    topic = broker.topics["t"]
    count = topic.message_count
    answer = await Keyed(broker).ask(pub(key, b"is it known?"))
    if answer.startswith(b"E_KEY_CONTENT "):
        # It is, and stands for something else.
        assert topic.message_count == count
        return True
    assert answer == b"OK"
    return topic.message_count == count


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_keys_survive_a_restart(start_broker: StartBroker, durability: str, how: str) -> None:
    broker = await start_broker(durability=durability)
    client = Keyed(broker)
    # Several records: the group has one key.
    commands = [pub("a", b"one"), mpub("b", [b"x" * 20_000] * 10), dpub("c", b"four", 60_000), pub("d", b"five")]
    for command in commands:
        assert await client.ask(command) == b"OK"
    for _ in range(3):
        await end(broker, how)
        broker = await start_broker(durability=durability)
        topic = broker.topics["t"]
        assert topic.keys is not None and len(topic.keys.window) == 4
        again = Keyed(broker)
        for command in commands:
            assert await again.ask(command) == b"OK"
        assert topic.message_count == 0
        assert topic.depth == 13


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_with_durability_memory_a_clean_stop_keeps_the_keys_and_a_crash_forgets_both(
    start_broker: StartBroker, how: str
) -> None:
    broker = await start_broker(durability="memory")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    for key in "ab":
        await Keyed(broker).ask(pub(key, key.encode()))
    await until(lambda: consumer.messages)
    # Finished before it was ever in a file: nothing is left of it but its key.
    consumer.finish(*consumer.messages)
    await quiet(broker)
    await end(broker, how)
    for _ in range(2):
        broker = await start_broker(durability="memory")
        assert await is_known(broker, "a") == (how == "stop")
        assert await is_known(broker, "b") == (how == "stop")
        if how == "kill":
            break
        # What comes later is not taken for something that was saved.
        await Keyed(broker).ask(pub("new", b"new"))
        assert await is_known(broker, "new")
        await broker.stop()


async def test_a_clean_stop_keeps_keys_from_before_the_durability_was_changed(start_broker: StartBroker) -> None:
    broker = await start_broker(durability="memory")
    await Keyed(broker).ask(pub("a", b"one"))
    broker.topics["t"].empty()
    await quiet(broker)
    limit(broker, durability="os")
    await Keyed(broker).ask(pub("b", b"two"))
    await broker.stop()
    broker = await start_broker(durability="os")
    assert await is_known(broker, "a")
    assert await is_known(broker, "b")


async def test_an_ephemeral_topic_has_keys_in_memory(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    for _ in range(2):
        await Keyed(broker).ask(pub("k", b"one", "t#ephemeral"))
    assert broker.topics["t#ephemeral"].depth == 1
    await broker.stop()
    assert list(tmp_path.rglob("*.keys")) == []


async def test_a_topic_that_was_deleted_takes_its_keys_along(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    await Keyed(broker).ask(pub("k", b"one"))
    broker.delete_topic("t")
    await quiet(broker)
    assert await Keyed(broker).ask(pub("k", b"two")) == b"OK"
    assert stored(broker) == [b"two"]


async def test_what_was_emptied_was_stored(broker: Broker) -> None:
    await Keyed(broker).ask(pub("k", b"one"))
    broker.topics["t"].empty()
    assert await is_known(broker, "k")


async def test_a_group_that_is_not_whole_takes_its_key_along(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    client = Keyed(broker)
    await client.ask(pub("a", b"one"))
    await client.ask(mpub("b", [b"x" * 20_000] * 10))
    broker.kill()
    [segment] = tmp_path.rglob("*.seg")
    os.truncate(segment, segment.stat().st_size - 1)
    broker = await start_broker()
    assert await is_known(broker, "a")
    assert broker.topics["t"].depth == 1
    assert not await is_known(broker, "b")


# --- When segments go -------------------------------------------------------------------------------------------------


async def drain(broker: Broker, channel: Channel) -> None:
    """Everything is delivered and finished, and the files go that nobody needs."""
    consumer = Client(broker)
    await consumer.subscribe("t", channel.name, 100)
    while channel.depth or channel.in_flight_count:
        await quiet(broker)
        messages = consumer.messages
        consumer.take()
        consumer.finish(*messages)
    consumer.hang_up()
    broker.turns.housekeeping()
    for _ in range(3):
        await quiet(broker)
        broker.upkeep.sync()
        await until(lambda: not broker.upkeep.freeing)
    await quiet(broker)


async def fill(broker: Broker, numbers: range, size: int = 300) -> None:
    client = Keyed(broker)
    for number in numbers:
        assert await client.ask(pub(f"key-{number}", (b"%d " % number).ljust(size, b"."))) == b"OK"


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_keys_outlive_their_segments(start_broker: StartBroker, tmp_path: Path, how: str) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    channel, _ = broker.topic("t").channel("c")
    await fill(broker, range(60))
    assert len(list(tmp_path.rglob("*.seg"))) > 3
    await drain(broker, channel)
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    [_] = tmp_path.rglob("*.keys")
    for _ in range(2):
        await fill(broker, range(60))
        assert channel.depth == 0
        await end(broker, how)
        broker = await start_broker(max_bytes_per_file=5_000)
        channel = broker.topics["t"].channels["c"]
    await fill(broker, range(50, 70))
    assert channel.depth == 10


async def test_a_segment_without_keys_leaves_no_file(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    channel, _ = broker.topic("t").channel("c")
    await Client(broker).publish("t", *[b"x" * 300] * 40)
    await drain(broker, channel)
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    assert list(tmp_path.rglob("*.keys")) == []


async def test_a_segment_stays_until_its_keys_are_saved(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoKeys(CountingDisk):
        refuse = True

        def open(self, path: Path, *, create: bool = False) -> int:
            if create and self.refuse and ".keys" in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().open(path, create=create)

    disk = NoKeys()
    broker = await start_broker(max_bytes_per_file=5_000, disk=disk)
    channel, _ = broker.topic("t").channel("c")
    await fill(broker, range(60))
    before = len(list(tmp_path.rglob("*.seg")))
    await drain(broker, channel)
    assert len(list(tmp_path.rglob("*.seg"))) == before
    assert "stays for its keys - [Errno 28]" in caplog.text
    disk.refuse = False
    await drain(broker, channel)
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    assert await is_known(broker, "key-0")


async def test_a_damaged_list_of_keys_is_read_from_the_records(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker()
    await fill(broker, range(20))
    await Keyed(broker).ask(mpub("batch", [b"x" * 20_000] * 10))
    segment = broker.topics["t"].log.segments[0]
    await broker.stop()
    with open(segment.path, "r+b") as file:
        file.seek(segment.size)
        assert file.read(16) == digest_of(b"key-0")
        file.seek(segment.size)
        file.write(b"?")
    broker = await start_broker()
    assert "are read from its records" in caplog.text
    topic = broker.topics["t"]
    assert topic.keys is not None and len(topic.keys.window) == 21
    await fill(broker, range(20))
    assert await is_known(broker, "batch")
    assert topic.message_count == 0


async def test_without_a_damaged_file_of_keys_the_broker_goes_on_and_says_so(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    channel, _ = broker.topic("t").channel("c")
    await fill(broker, range(60))
    await drain(broker, channel)
    await broker.stop()
    [path] = tmp_path.rglob("*.keys")
    path.write_bytes(b"?" + path.read_bytes()[1:])
    with caplog.at_level(logging.ERROR):
        broker = await start_broker(max_bytes_per_file=5_000)
    assert f"KEYS(t): {path} is damaged and set aside" in caplog.text
    assert not await is_known(broker, "key-0")
    # Those of the segment that is still there.
    assert await is_known(broker, "key-59")
    # The file that was set aside is no reason not to start, however often.
    for _ in range(2):
        await broker.stop()
        broker = await start_broker(max_bytes_per_file=5_000)
        assert await is_known(broker, "key-59")


async def test_keys_that_the_device_cannot_read_do_not_hold_up_a_start_nor_a_segment_for_ever(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BadDisk(CountingDisk):
        bad = True

        def read(self, fd: int, size: int, offset: int) -> bytes:
            if self.bad and size and size % KeyBlock.size(1) == 0 and offset > 4096:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, size, offset)

    broker = await start_broker(max_bytes_per_file=5_000)
    broker.topic("t").channel("c")
    await fill(broker, range(60))
    await broker.stop()
    disk = BadDisk()
    broker = await start_broker(max_bytes_per_file=5_000, disk=disk)
    assert "cannot be read - [Errno 5]" in caplog.text
    topic = broker.topics["t"]
    while len(topic.log.segments) > 1:
        await drain(broker, topic.channels["c"])
    assert "they are given up" in caplog.text
    assert not await is_known(broker, "key-0")


async def test_a_segment_ends_at_so_many_keys(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintmq.broker.storage.log.MOST_IN_SEGMENT", 10)
    broker = await start_broker()
    await fill(broker, range(35))
    assert len(list(tmp_path.rglob("*.seg"))) == 4
    broker.kill()
    broker = await start_broker()
    await fill(broker, range(35))
    assert broker.topics["t"].message_count == 0


# --- How many and how long --------------------------------------------------------------------------------------------


async def known(broker: Broker, numbers: range) -> list[bool]:
    keys = broker.topics["t"].keys
    if keys is None:
        return [False] * len(numbers)
    keys.trim()
    return [keys.window.knows(digest_of(b"key-%d" % number)) for number in numbers]


@pytest.mark.parametrize("restart", [False, True])
async def test_the_newest_keys_are_known_and_the_oldest_forgotten(
    start_broker: StartBroker, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "SMALLEST_TABLE", 5)
    broker = await start_broker(max_bytes_per_file=5_000)
    limit(broker, key_count=40)
    channel, _ = broker.topic("t").channel("c")
    for first in range(0, 300, 60):
        await fill(broker, range(first, first + 60))
        await drain(broker, channel)
        if restart:
            await broker.stop()
            broker = await start_broker(max_bytes_per_file=5_000)
            channel = broker.topics["t"].channels["c"]
        assert all(await known(broker, range(first + 20, first + 60)))
    assert not any(await known(broker, range(200)))


@pytest.mark.parametrize("reboot", [False, True])
async def test_a_key_is_known_for_its_age(start_broker: StartBroker, clock: FakeClock, reboot: bool) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    limit(broker, key_age="100h")
    channel, _ = broker.topic("t").channel("c")
    await fill(broker, range(30))
    await drain(broker, channel)

    async def later(hours: int) -> None:
        nonlocal broker
        if not reboot:
            clock.advance(hours * 3600)
            return
        await broker.stop()
        clock.reboot(hours * 3600)
        broker = await start_broker(max_bytes_per_file=5_000)

    await later(60)
    await fill(broker, range(30, 60))
    assert broker.topics["t"].message_count % 30 == 0
    await later(40)
    assert all(await known(broker, range(60)))
    await later(1)
    assert not any(await known(broker, range(30)))
    assert all(await known(broker, range(30, 60)))
    assert not await is_known(broker, "key-0")
    assert await is_known(broker, "key-0")
    await later(60)
    assert not any(await known(broker, range(30, 60)))
    assert await is_known(broker, "key-0")


async def test_files_of_keys_go_when_their_keys_are_too_old(
    start_broker: StartBroker, clock: FakeClock, tmp_path: Path
) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    topic = broker.topic("t")
    channel, _ = topic.channel("c")
    limit(broker, key_age="100h")
    await fill(broker, range(30))
    await drain(broker, channel)
    [old] = tmp_path.rglob("*.keys")
    clock.advance(99 * 3600)
    await broker.stop()
    broker = await start_broker(max_bytes_per_file=5_000)
    topic = broker.topics["t"]
    assert topic.keys is not None and len(topic.keys.window) == 30
    assert old.exists()
    clock.advance(2 * 3600)
    await drain(broker, topic.channels["c"])
    assert topic.keys.window.memory == 0
    await broker.stop()
    await start_broker(max_bytes_per_file=5_000)
    assert not old.exists()


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["lane", "asyncio", "general"])
async def http(request: pytest.FixtureRequest, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A broker, and a client on one of the ways in."""
    if request.param == "asyncio":
        monkeypatch.setattr("flintmq.broker.net.sockets.available", lambda: False)
    broker = await start_broker(http_address="127.0.0.1:0", durability="fsync")
    async with HttpClient.connect(broker.http_address) as client:
        if request.param == "general":
            assert (await client.get("/ping")).status == 200
        yield broker, client


async def test_a_repeat_over_http_is_answered_and_not_stored(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    requests: list[tuple[str, bytes, str]] = [
        ("/pub?topic=t", b"one", "a"),
        ("/mpub?topic=t", b"two\nthree\n", "b"),
        ("/mpub?topic=t&binary=true", b"\0\0\0\1\0\0\0\4four", "c"),
        ("/pub?topic=t&defer=1000", b"five", "d"),
    ]
    for target, body, key in requests:
        answer = await client.post(target, body, f"X-Flintmq-Key: {key}")
        assert (answer.status, answer.body) == (200, b"OK")
        assert "x-flintmq-repeat" not in answer.headers
        answer = await client.post(target, body, f"x-flintmq-key:{key}")
        assert (answer.status, answer.body, answer.headers["x-flintmq-repeat"]) == (200, b"OK", "true")
        # The same connection without a key, in between.
        answer = await client.post("/pub?topic=t", b"plain")
        assert (answer.status, "x-flintmq-repeat" in answer.headers) == (200, False)
    assert [body for body in stored(broker) if body != b"plain"] == [b"one", b"two", b"three", b"four", b"five"]
    assert len(stored(broker)) == 9


async def test_tcp_and_http_know_the_same_keys(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    assert await Keyed(broker).ask(pub("k", b"one")) == b"OK"
    answer = await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")
    assert answer.headers["x-flintmq-repeat"] == "true"


@pytest.mark.parametrize("key", ["", "a b", "a" * 129, "\xe4"], ids=["none", "two words", "too long", "umlaut"])
async def test_a_bad_key_over_http_is_refused(http: tuple[Broker, HttpClient], key: str) -> None:
    broker, client = http
    for target in ("/pub?topic=t", "/mpub?topic=t"):
        answer = await client.post(target, b"one", f"X-Flintmq-Key: {key}")
        assert (answer.status, answer.message) == (400, "INVALID_KEY")
    assert broker.topics == {}
    # Nothing but the publish was wrong: the connection goes on.
    assert (await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")).status == 200


async def test_a_batch_of_nothing_leaves_its_key_free(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    for body in (b"", b"\n\n\n", b"one\n"):
        answer = await client.post("/mpub?topic=t", body, "X-Flintmq-Key: k")
        assert (answer.status, "x-flintmq-repeat" in answer.headers) == (200, False)
    assert stored(broker) == [b"one"]


async def test_a_key_of_a_refused_publish_over_http_is_free(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    assert (await client.post("/pub?topic=t", b"", "X-Flintmq-Key: k")).message == "MSG_EMPTY"
    bad = await client.post("/mpub?topic=t&binary=true", b"\0\0\0\2\0\0\0\1x", "X-Flintmq-Key: k")
    assert bad.message == "BAD_MESSAGE"
    limit(broker, key_count=0)
    async with HttpClient.connect(broker.http_address) as client:
        answer = await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")
        assert answer.status == 503
        assert answer.message == "no keys are remembered for this topic (key-count is 0)"
        limit(broker, key_count=10)
        answer = await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")
        assert (answer.status, "x-flintmq-repeat" in answer.headers) == (200, False)


async def test_repeats_over_http_that_come_together_are_answered_together(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(http_address="127.0.0.1:0", durability="fsync", disk=disk)
    await Keyed(broker).ask(pub("before", b"0"))
    await quiet(broker)
    disk.hold = True
    async with HttpClient.connect(broker.http_address) as one, HttpClient.connect(broker.http_address) as other:
        request = request_of("POST", "/pub?topic=t", b"one", "X-Flintmq-Key: k")
        one.send(request)
        await until(lambda: broker.topics["t"].log.end - broker.topics["t"].log.first == 2)
        keys = broker.topics["t"].keys
        assert keys is not None
        # The second of a connection waits for the first anyway.
        one.send(request)
        other.send(request)
        await until(lambda: keys.repeats == 1)
        disk.let_go()
        answers = [await one.answer(), await other.answer(), await one.answer()]
    assert [answer.status for answer in answers] == [200] * 3
    assert ["x-flintmq-repeat" in answer.headers for answer in answers] == [False, True, True]
    assert stored(broker) == [b"0", b"one"]


async def test_a_keyed_publish_that_cannot_be_written_is_refused_over_http(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(http_address="127.0.0.1:0", disk=disk)
    await Keyed(broker).ask(pub("before", b"0"))
    await quiet(broker)
    async with HttpClient.connect(broker.http_address) as client:
        disk.full = True
        assert (await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")).status == 503
        disk.full = False
        answer = await client.post("/pub?topic=t", b"one", "X-Flintmq-Key: k")
        assert (answer.status, "x-flintmq-repeat" in answer.headers) == (200, False)


async def test_heads_with_keys_do_not_push_out_those_that_come_again(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    assert broker.listeners.api is not None
    [lane] = broker.listeners.api._lanes
    async with HttpClient.connect(broker.http_address) as client:
        await client.post("/pub?topic=t", b"plain")
        for number in range(20):
            await client.post("/pub?topic=t", b"keyed", f"X-Flintmq-Key: {number}")
    assert len(lane._heads) == 1


async def test_info_tells_more_to_those_who_ask(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    plain = (await client.get("/info")).json
    assert "flintmq" not in plain
    for query in ("extended=false", "extended", "%zz", "a=b"):
        assert (await client.get(f"/info?{query}")).json == plain
    told = (await client.get("/info?extended=true")).json
    about = told.pop("flintmq")
    assert told == plain
    port = broker.http_address.rpartition(":")[2]
    assert about == {
        "version": flintmq.__version__,
        "node": broker.node.hex(),
        "log": True,
        "keys": True,
        "stage": 1,
        "http_address": f"{broker.options.broadcast_address}:{port}",
    }


# --- Backups ----------------------------------------------------------------------------------------------------------


async def test_a_backup_has_the_keys(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(data_path=_made(tmp_path / "one"), max_bytes_per_file=5_000)
    channel, _ = broker.topic("t").channel("c")
    await fill(broker, range(60))
    await drain(broker, channel)
    await fill(broker, range(60, 80))
    await asyncio.to_thread(backup.make, tmp_path / "one", tmp_path / "backup")
    await asyncio.to_thread(backup.verify, tmp_path / "backup")
    await fill(broker, range(80, 90))
    await asyncio.to_thread(backup.restore, tmp_path / "backup", tmp_path / "two")
    restored = await start_broker(data_path=tmp_path / "two", max_bytes_per_file=5_000)
    await fill(restored, range(80))
    assert restored.topics["t"].message_count == 0
    await fill(restored, range(80, 90))
    assert restored.topics["t"].message_count == 10


def _made(path: Path) -> Path:
    path.mkdir()
    return path
