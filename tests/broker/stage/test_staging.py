"""Staged publishes over HTTP: nothing is seen before the decision, everything once after it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from conftest import StartBroker

from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.commit import SLICED_FROM
from flintmq.broker.observe.steps import SLICE, at_once
from flintmq.broker.stage import apply as apply_module
from flintmq.broker.stage import staging as staging_module
from flintmq.broker.stage.producer import Producer
from flintmq.errors import StageError, StartError
from support.fakes import Client, CountingDisk, FakeClock, quiet, until
from support.http_client import HttpClient
from support.simdisk import SimDisk
from support.stage_client import Refused, StageClient, stored


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(http_address="127.0.0.1:0")


class HeldDisk(CountingDisk):
    """Deletes no folder while it is held."""

    held: Event | None = None

    def remove_folder(self, path: Path) -> None:
        if self.held is not None:
            self.held.wait(10)
        super().remove_folder(path)


CHUNKS = [[b"one", b"two"], [b"three"], [b"four" * 1000, b"five", b"one"]]
ROWS = Counter(body for chunk in CHUNKS for body in chunk)


async def test_rows_are_seen_once_they_are_decided_and_applied(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        opened = await client.open(0)
        assert opened == {"epoch": 1, "decided": None}
        winner = await client.stage(1, 0, "a", CHUNKS)
        assert winner == ("a", 3, 6)
        assert "t" not in broker.topics
        prepared = await client.prepare(1, 0, [winner])
        assert prepared["topics"]["t"]["count"] == 6
        assert prepared["topics"]["t"]["bytes"] == sum(map(len, ROWS.elements()))
        decided = await client.decide(1, 0, {"n": prepared["set"]}, "print")
        assert decided["repeat"] is False
        assert "t" not in broker.topics
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 6}}
        assert stored(broker) == ROWS
        assert broker.topics["t"].durable == broker.topics["t"].log.end
        assert await client.done(0) == {}
        assert broker.stage.bytes == 0
        # All of it again changes nothing.
        assert (await client.prepare(1, 0, [winner]))["set"] == prepared["set"]
        again = await client.decide(1, 0, {"n": prepared["set"]}, "print")
        assert again["repeat"] is True and again["decided"]["done"] is True
        await client.apply(0, prepared["set"])
        await client.done(0)
        assert stored(broker) == ROWS


async def test_prepared_rows_survive_a_restart(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
    broker.kill()
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        opened = await client.open(0, job="job-2")
        assert opened["epoch"] == 2 and opened["decided"]["txn"] == 0 and not opened["decided"]["done"]
        await client.apply(0, prepared["set"])
        assert stored(broker) == ROWS


async def test_a_fenced_job_can_do_nothing(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        prepared = await client.prepare(1, 0, [winner])
        assert (await client.open(0, run="run-2", job="job-2"))["epoch"] == 2
        for call in (
            client.open(0),
            client.begin(1, 0, "b"),
            client.put(1, 0, "b", 0, [b"x"]),
            client.prepare(1, 0, [winner]),
            client.decide(1, 0, {"n": prepared["set"]}),
        ):
            with pytest.raises(Refused, match="E_STAGE_FENCED") as refused:
                await call
            assert refused.value.status == 409


# --- Sums -------------------------------------------------------------------------------------------------------------


async def test_sums_depend_neither_on_order_nor_on_chunks(broker: Broker) -> None:
    choice = random.Random(3)
    rows = [choice.randbytes(choice.randrange(1, 400)) for _ in range(200)]
    sums = set()
    async with StageClient.connect(broker) as client:
        for txn, size in enumerate((1, 7, 200)):
            choice.shuffle(rows)
            opened = await client.open(txn, job=f"job-{txn}")
            chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
            winner = await client.stage(opened["epoch"], txn, "a", chunks, decided=opened["decided"])
            prepared = await client.prepare(opened["epoch"], txn, [winner])
            sums.add(prepared["topics"]["t"]["sum"])
        assert len(sums) == 1
        # Another row, or another topic, makes another sum.
        for other in ([*rows[:-1], rows[0]], [*rows[:-1], rows[-1] + b"x"]):
            txn += 1
            opened = await client.open(txn, job=f"job-{txn}")
            winner = await client.stage(opened["epoch"], txn, "a", [other], decided=opened["decided"])
            sums.add((await client.prepare(opened["epoch"], txn, [winner]))["topics"]["t"]["sum"])
        opened = await client.open(txn + 1, job="job-u")
        winner = await client.stage(opened["epoch"], txn + 1, "a", [rows], "u", decided=opened["decided"])
        sums.add((await client.prepare(opened["epoch"], txn + 1, [winner]))["topics"]["u"]["sum"])
        assert len(sums) == 4


# --- Requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "body", "message"),
    [
        ("/stage/open", b"{", "INVALID_BODY"),
        ("/stage/open", b'{"producer": "q", "run": "r", "job": "j"}', "INVALID_BODY"),
        ("/stage/open", b'{"producer": "", "run": "r", "job": "j", "txn": 0}', "INVALID_PRODUCER"),
        ("/stage/begin", b'{"producer": "q", "epoch": 1, "txn": 0, "attempt": "a"}', "INVALID_BODY"),
        ("/stage/begin", b'{"producer": "q", "epoch": 1, "txn": 0, "attempt": "../a", "decided": null}', "INVALID_ATT"),
        ("/stage/begin", b'{"producer": "q", "epoch": 1, "txn": -1, "attempt": "a", "decided": null}', "INVALID_BODY"),
        ("/stage/put?producer=q", b"", "MISSING_ARG_ATTEMPT"),
        ("/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=x&topic=t", b"", "INVALID_ARG_CHUNK"),
        ("/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=0&topic=..*", b"", "INVALID_TOPIC"),
        ("/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=0&topic=t&defer=99999999999", b"", "INVALID_DEFER"),
        ("/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=0&topic=t", b"", "BAD_BODY"),
        (
            "/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=0&topic=t",
            b"\0\0\0\2\0\0\0\1x",
            "BAD_MESSAGE: a chunk for t",
        ),
        (
            "/stage/put?producer=q&epoch=1&txn=0&attempt=a&chunk=0&topic=t",
            b"\0\0\0\1\0\0\0\0",
            "BAD_MESSAGE: a message for t is empty",
        ),
        ("/stage/apply", b'{"producer": "nobody", "txn": 0, "set": "x"}', "E_STAGE_UNKNOWN"),
        ("/stage/open", b'{"producer": "q", "run": "%s", "job": "j", "txn": 0}' % (b"r" * 513), "INVALID_BODY: run"),
        ("/stage/open", b'{"producer": "q", "run": "r", "job": "%s", "txn": 0}' % (b"j" * 513), "INVALID_BODY: run"),
        *(
            (target, body.replace(b"N", number), "INVALID_BODY: epoch and txn")
            for number in (b"-1", b"9007199254740992", b"18446744073709551616")
            for target, body in (
                ("/stage/open", b'{"producer": "q", "run": "r", "job": "j", "txn": N}'),
                ("/stage/begin", b'{"producer": "q", "epoch": N, "txn": 0, "attempt": "a", "decided": null}'),
                ("/stage/prepare", b'{"producer": "q", "epoch": 1, "txn": N, "winners": []}'),
                ("/stage/decide", b'{"producer": "q", "epoch": 1, "txn": N, "nodes": {}}'),
                ("/stage/apply", b'{"producer": "q", "txn": N, "set": "x"}'),
                ("/stage/done", b'{"producer": "q", "txn": N}'),
                ("/stage/abort", b'{"producer": "q", "epoch": N, "txn": 0}'),
            )
        ),
        ("/stage/put?producer=q&epoch=9007199254740992&txn=0&attempt=a&chunk=0&topic=t", b"", "INVALID_ARG_EPOCH"),
    ],
)
async def test_what_is_no_call_is_refused(broker: Broker, target: str, body: bytes, message: str) -> None:
    async with HttpClient.connect(broker.http_address) as http:
        answer = await http.post(target, body)
        assert 400 <= answer.status < 500
        assert answer.message.startswith(message)


# --- Limits -----------------------------------------------------------------------------------------------------------


WINNERS: list[tuple[list[Any], str]] = [
    ([("a", 1, 1), ("a", 1, 1)], "INVALID_BODY: an attempt is named twice"),
    ([("a", 1, 1), ("b", 0, 1 << 70)], "INVALID_BODY: chunks and rows of attempt b"),
    ([("a", 1, 1), ("b", -1, 0)], "INVALID_BODY: chunks and rows of attempt b"),
    ([("a", 1, 1), ("b" * 65, 0, 0)], "INVALID_ATTEMPT"),
]


@pytest.mark.parametrize(("winners", "message"), WINNERS)
async def test_winners_that_cannot_be_are_refused_and_spoil_nothing(
    broker: Broker, winners: list[Any], message: str
) -> None:
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", [[b"x"]])
        for _ in range(2):
            with pytest.raises(Refused, match=message) as refused:
                await client.prepare(1, 0, winners)
            assert refused.value.status == 400
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 1}}


DECISIONS: list[tuple[dict[str, Any], str]] = [
    ({"print": {"offset": 1 << 70}}, "INVALID_BODY: print has a number of more than 64 bits"),
    ({"print": "x" * (64 << 10)}, "INVALID_BODY: print takes more than"),
    ({"nodes": {"n": "x" * (256 << 10)}}, "INVALID_BODY: nodes takes more than"),
    ({"txn": 1 << 70}, "INVALID_BODY: epoch and txn"),
]


@pytest.mark.parametrize(("fields", "message"), DECISIONS)
async def test_decisions_that_cannot_be_kept_are_refused_and_spoil_nothing(
    broker: Broker, fields: dict[str, Any], message: str
) -> None:
    async with StageClient.connect(broker) as client:
        await client.open(0)
        with pytest.raises(Refused, match=message) as refused:
            await client.call("decide", **{"epoch": 1, "txn": 0, "nodes": {}, "print": None, **fields})
        assert refused.value.status == 400
        assert (await client.open(0, job="job-2"))["epoch"] == 2
        await client.commit(0, CHUNKS, "job-3")
    assert stored(broker) == ROWS


async def test_staged_bytes_have_a_limit(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", max_staged_bytes=10_000)
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", [[b"x" * 9_000]])
        await client.begin(1, 0, "b")
        with pytest.raises(Refused, match=r"507 E_STAGE_FULL .*max-staged-bytes"):
            await client.put(1, 0, "b", 0, [b"x" * 2_000])
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        await client.apply(0, prepared["set"])
        await client.done(0)
        assert broker.stage.bytes == 0
        await client.commit(1, [[b"x" * 9_000]], "job-2")


async def test_a_topic_that_is_full_refuses_to_prepare_and_never_to_apply(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        broker.topic("t")
        assert (await client.http.ask("PUT", "/topic/config?topic=t", b'{"max-messages": 10}')).status == 200
        for txn, count in enumerate((11, 10)):
            opened = await client.open(txn, job=f"job-{txn}")
            rows = [b"%d" % number for number in range(count)]
            winner = await client.stage(opened["epoch"], txn, "a", [rows], decided=opened["decided"])
            if count > 10:
                with pytest.raises(Refused, match=r"429 E_STAGE_LIMIT .*limit of 10 messages"):
                    await client.prepare(opened["epoch"], txn, [winner])
                continue
            prepared = await client.prepare(opened["epoch"], txn, [winner])
        await Client(broker).publish("t", b"in between", b"and another")
        await client.decide(opened["epoch"], 1, {"n": prepared["set"]})
        broker.refuse("the disk is nearly full")
        assert await client.apply(1, prepared["set"]) == {"topics": {"t": 10}}
        with pytest.raises(Refused, match="507 E_STAGE_FULL the disk is nearly full"):
            opened = await client.open(2, job="job-2")
            await client.stage(opened["epoch"], 2, "a", [[b"x"]], decided=opened["decided"])


async def test_sets_are_prepared_no_faster_than_the_topic_may_be_filled(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        topic = broker.topic("t")
        broker.topic("other")
        for name in ("t", "other"):
            answer = await client.http.ask("PUT", f"/topic/config?topic={name}", b'{"publish-rate": 10}')
            assert answer.status == 200
        await client.open(0)
        # A task that is tried again pays for nothing that is not published.
        for attempt in ("a", "b", "c"):
            winner = await client.stage(1, 0, attempt, [[b"x"] * 10, [b"x"] * 15])
        prepared = await client.prepare(1, 0, [winner])
        assert await client.prepare(1, 0, [winner]) == prepared
        await client.decide(1, 0, {"n": prepared["set"]})
        # What was paid for is not paid for again.
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 25}}
        await client.done(0)
        # 15 more than a second's worth were published: the next ones wait, and are told how long.
        epoch = (await client.open(1, job="job-2"))["epoch"]
        await client.begin(epoch, 1, "a")
        await client.put(epoch, 1, "a", 0, [b"x"] * 5)
        await client.put(epoch, 1, "a", 1, [b"x"] * 10, "other")
        body = msgspec.json.encode({"producer": "query-1", "epoch": epoch, "txn": 1, "winners": [["a", 2, 15]]})
        refused = await client.http.ask("POST", "/stage/prepare", body)
        assert (refused.status, refused.json["retry_after"]) == (429, 2.0)
        assert "E_STAGE_LIMIT topic t: its publish-rate is used up. Try again in 2.0 s" in refused.message
        clock.advance(2)
        # The refusal cost the other topic nothing.
        assert (await client.http.ask("POST", "/stage/prepare", body)).status == 200
        clock.advance(1)
        await Client(broker).publish("t", *[b"x"] * 10)
        assert topic.message_count == 35


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
@pytest.mark.parametrize("topic", ["t", "e%23ephemeral"])
async def test_whatever_the_topic_is(start_broker: StartBroker, durability: str, topic: str) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", durability=durability, mem_queue_size=100_000)
    async with StageClient.connect(broker) as client:
        rows = [b"%d" % number for number in range(SLICED_FROM + 500)]
        await client.commit(0, [rows[:100], rows[100:]], "job-1", topic)
    assert stored(broker, topic.replace("%23", "#")) == Counter(rows)


async def test_delays_begin_with_the_commit(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    broker.topic("t").channel("c")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        await client.begin(1, 0, "a")
        await client.put(1, 0, "a", 0, [b"later"] * 3, defer=60_000)
        await client.put(1, 0, "a", 1, [b"now"])
        prepared = await client.prepare(1, 0, [("a", 2, 4)])
        await client.decide(1, 0, {"n": prepared["set"]})
        clock.advance(3600)
        await client.apply(0, prepared["set"])
    channel = broker.topics["t"].channels["c"]
    await quiet(broker)
    assert (len(channel.deferred), channel.depth) == (3, 1)


async def test_a_topic_that_was_deleted_is_made_anew(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        await client.commit(0, [[b"one"]], "job-1")
        opened = await client.open(1, job="job-2")
        winner = await client.stage(opened["epoch"], 1, "a", [[b"two"]], decided=opened["decided"])
        prepared = await client.prepare(opened["epoch"], 1, [winner])
        await client.decide(opened["epoch"], 1, {"n": prepared["set"]})
        broker.delete_topic("t")
        await client.apply(1, prepared["set"])
    assert stored(broker) == Counter([b"two"])


@pytest.mark.parametrize("rows", [3, SLICED_FROM + 1])
async def test_a_topic_that_is_deleted_while_rows_are_applied_is_made_anew(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", durability="fsync")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", [[b"x"] * rows])])
        await client.decide(1, 0, {"n": prepared["set"]})
        applying = asyncio.create_task(client.apply(0, prepared["set"]))
        applies = broker.stage.producers["query-1"].applies
        await until(lambda: 0 in applies and applies[0]._commits)
        broker.delete_topic("t")
        assert await applying == {"topics": {"t": rows}}
    assert broker.topics["t"].message_count == rows
    assert "tried again" not in caplog.text


async def test_a_key_of_a_client_is_never_one_of_ours(broker: Broker) -> None:
    """Staged rows take no place in the window of keys, and work where no keys are remembered."""
    async with StageClient.connect(broker) as client:
        broker.topic("t")
        assert (await client.http.ask("PUT", "/topic/config?topic=t", b'{"key-count": 0}')).status == 200
        await client.commit(0, [[b"%d" % number] for number in range(20)], "job-1")
    keys = broker.topics["t"].keys
    assert keys is not None and len(keys.window) == 0
    assert broker.topics["t"].message_count == 20


async def test_a_disk_that_fails_delays_a_commit_and_repeats_nothing(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_module, "RETRY", 0.01)
    disk = SimDisk(tmp_path)
    broker = await start_broker(http_address="127.0.0.1:0", disk=disk)
    rows = [[b"%d" % (number + 10 * chunk) for number in range(10)] for chunk in range(20)]
    async with StageClient.connect(broker) as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", rows)])
        await client.decide(1, 0, {"n": prepared["set"]})
        disk.fail("write", 28, times=3, path=".seg", short=20)
        with pytest.raises(Refused, match="503 E_STAGE_FULL transaction 0 is decided"):
            await client.apply(0, prepared["set"])
        producer = broker.stage.producers["query-1"]
        await until(lambda: not producer.applies)
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 200}}
    assert stored(broker) == Counter(body for chunk in rows for body in chunk)


# --- Operators --------------------------------------------------------------------------------------------------------


async def test_stats_and_metrics_show_what_is_staged(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        staging = (await client.http.get("/stats?format=json&extended=true")).json["staging"]
        assert staging["attempts"] == 1 and staging["bytes"] > 4_000
        assert staging["producers"][0]["staging"]["rows"] == 6
        assert "staging" not in (await client.http.get("/stats?format=json")).json
        prepared = await client.prepare(1, 0, [winner])
        metrics = (await client.http.get("/metrics")).body.decode()
        assert "nsqd_staged_sets 1\n" in metrics and "nsqd_staged_attempts 0\n" in metrics
        await client.decide(1, 0, {"n": prepared["set"]})
        await client.apply(0, prepared["set"])
        metrics = (await client.http.get("/metrics")).body.decode()
        for line in ("nsqd_staged_bytes 0", "nsqd_staged_commits_total 1", "nsqd_staged_messages_total 6"):
            assert f"{line}\n" in metrics


@pytest.mark.parametrize("same_node", [True, False])
async def test_a_backup_has_prepared_sets_and_decisions(
    start_broker: StartBroker, tmp_path: Path, same_node: bool
) -> None:
    (tmp_path / "data").mkdir()
    options: dict[str, Any] = {"http_address": "127.0.0.1:0"}
    broker = await start_broker(data_path=tmp_path / "data", **options)
    async with StageClient.connect(broker) as client:
        await client.commit(0, [[b"zero"]], "job-0")
        opened = await client.open(1, job="job-1")
        epoch = opened["epoch"]
        winner = await client.stage(epoch, 1, "a", CHUNKS, decided=opened["decided"])
        prepared = await client.prepare(epoch, 1, [winner])
        await client.decide(epoch, 1, {"n": prepared["set"]}, "one")
        await client.begin(epoch, 2, "b")
        await client.put(epoch, 2, "b", 0, [b"not yet"])
        make = partial(backup.make, tmp_path / "data", tmp_path / "copy")
        manifest = await asyncio.get_running_loop().run_in_executor(None, make)
    assert sorted(Path(file.path).suffix for file in manifest.files if "/stage/" in file.path) == ["", ".rows"]
    backup.verify(tmp_path / "copy")
    backup.restore(tmp_path / "copy", tmp_path / "back", same_node=same_node)
    restored = await start_broker(data_path=tmp_path / "back", **options)
    async with StageClient.connect(restored) as client:
        opened = await client.open(1, run="run-2", job="job-9")
        assert opened["decided"]["print"] == "one"
        if same_node:
            await client.apply(1, prepared["set"])
            assert stored(restored) == ROWS
        else:
            with pytest.raises(Refused, match="E_STAGE_UNKNOWN"):
                await client.apply(1, prepared["set"])
        assert restored.stage.bytes == 0


async def test_puts_of_several_tasks_at_once(broker: Broker) -> None:
    rows = [b"%d" % number for number in range(6_000)]

    async def task(number: int) -> tuple[str, int, int]:
        async with StageClient.connect(broker) as client:
            mine = rows[number::6]
            return await client.stage(1, 0, f"task{number}", [mine[at : at + 37] for at in range(0, len(mine), 37)])

    async with StageClient.connect(broker) as client:
        await client.open(0)
        winners = await asyncio.gather(*map(task, range(6)))
        prepared = await client.prepare(1, 0, list(winners))
        await client.decide(1, 0, {"n": prepared["set"]})
        await client.apply(0, prepared["set"])
    assert broker.topics["t"].message_count == 6_000


async def test_an_unexpected_error_while_it_is_applied_repeats_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = apply_module.read_chunk
    reads = 0

    def read_chunk(*arguments: Any) -> bytearray:
        nonlocal reads
        reads += 1
        if reads == 9:
            raise ValueError("nobody expected this")
        return original(*arguments)

    monkeypatch.setattr(apply_module, "read_chunk", read_chunk)
    monkeypatch.setattr(apply_module, "READ_AHEAD", 1)
    rows = [[b"%d" % (number + 10 * chunk) for number in range(10)] for chunk in range(20)]
    async with StageClient.connect(broker) as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", rows)])
        await client.decide(1, 0, {"n": prepared["set"]})
        with pytest.raises(Refused, match="500 E_STAGE_FAILED nobody expected this"):
            await client.apply(0, prepared["set"])
        assert 0 < broker.topics["t"].message_count < 200
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 200}}
    assert stored(broker) == Counter(body for chunk in rows for body in chunk)


async def test_a_stop_while_it_is_applied_is_no_success(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", CHUNKS)])
        await client.decide(1, 0, {"n": prepared["set"]})
    producer = broker.stage.producers["query-1"]
    asking = asyncio.create_task(producer.apply(0, prepared["set"]))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(broker.stop())
    await asyncio.sleep(0)
    with pytest.raises(StageError, match="E_STAGE_CLOSED"):
        await asking
    with pytest.raises(StageError, match="E_STAGE_CLOSED"):
        await producer.apply(0, prepared["set"])
    await stopping
    broker = await start_broker(http_address="127.0.0.1:0")
    await until(lambda: broker.stage.applied_sets or "t" not in broker.topics)
    async with StageClient.connect(broker) as client:
        await client.apply(0, prepared["set"])
    assert stored(broker) == ROWS


async def test_producers_are_forgotten_when_they_are_quiet_for_long(broker: Broker, clock: FakeClock) -> None:
    day = 24 * 3600
    async with StageClient.connect(broker, "old") as client:
        await client.commit(0, CHUNKS, "job-1")
    async with StageClient.connect(broker, "unfinished") as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", [[b"x"]])])
        await client.decide(1, 0, {"n": prepared["set"]})
    clock.advance(89 * day)
    async with StageClient.connect(broker, "new") as client:
        await client.commit(0, CHUNKS, "job-1")
    broker.stage._sweep()
    assert set(broker.stage.producers) == {"old", "unfinished", "new"}
    clock.advance(2 * day)
    broker.stage._sweep()
    assert set(broker.stage.producers) == {"unfinished", "new"}
    await until(lambda: len(list((broker.path / "flintmq" / "stage").iterdir())) == 2)


async def test_a_producer_that_comes_back_while_it_is_forgotten_keeps_its_decisions(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    go_on, removed = threading.Event(), threading.Event()
    remove = broker.stage._remove

    def remove_late(folder: Path) -> None:
        go_on.wait(30)
        remove(folder)
        removed.set()

    monkeypatch.setattr(broker.stage, "_remove", remove_late)
    async with StageClient.connect(broker) as client:
        await client.commit(0, CHUNKS, "job-1")
        await client.ask("DELETE", "/stage?producer=query-1")
        again = asyncio.create_task(client.commit(7, CHUNKS, "job-2"))
        # Whatever it can do before the old folder is deleted.
        await asyncio.wait({again}, timeout=0.5)
        go_on.set()
        await again
        await until(removed.is_set)
    broker.kill()
    await asyncio.sleep(0)
    broker = await start_broker(http_address="127.0.0.1:0")
    described = at_once(broker.stage.describe())
    assert [one["decided"]["txn"] for one in described["producers"]] == [7]


async def test_others_have_their_turn_while_very_many_producers_are_described(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    names = [f"query-{number:03}" for number in range(3 * SLICE)]
    described = 0
    describe = Producer.describe

    def count(producer: Producer) -> dict[str, Any]:
        nonlocal described
        described += 1
        return describe(producer)

    monkeypatch.setattr(Producer, "describe", count)
    async with StageClient.connect(broker) as client:
        for client.producer in names:
            await client.open(0)
        answer = asyncio.create_task(client.ask("GET", "/stage"))
        between = set()
        while not answer.done():
            await asyncio.sleep(0)
            between.add(described)
        assert [one["producer"] for one in answer.result()["producers"]] == names
    assert len(between - {0, len(names)}) >= 2, "all were described in one turn"


async def test_a_clock_that_is_set_makes_nobody_forgotten(start_broker: StartBroker, clock: FakeClock) -> None:
    day = 24 * 3600
    broker = await start_broker(http_address="127.0.0.1:0")
    clock.step_wall(-50 * 365 * day)
    async with StageClient.connect(broker, "early") as client:
        await client.commit(0, CHUNKS, "job-1")
    clock.step_wall(50 * 365 * day)
    clock.advance(60)
    broker.stage._sweep()
    assert set(broker.stage.producers) == {"early"}
    # Nor after a start, whose states were written by a clock that was wrong.
    broker.kill()
    await asyncio.sleep(0)
    broker = await start_broker(http_address="127.0.0.1:0")
    broker.stage._sweep()
    assert set(broker.stage.producers) == {"early"}
    # What is quiet is forgotten all the same, over several starts.
    for number in range(4):
        clock.advance(25 * day)
        async with StageClient.connect(broker, f"later-{number}") as client:
            await client.commit(0, CHUNKS, "job-1")
        broker.kill()
        await asyncio.sleep(0)
        broker = await start_broker(http_address="127.0.0.1:0")
        broker.stage._sweep()
        assert ("early" in broker.stage.producers) is (number < 3)


async def test_producers_of_one_write_are_forgotten_when_they_are_too_many(
    start_broker: StartBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quietest first, those before others that nobody can come back for; never streams, nor what is unfinished."""
    monkeypatch.setattr(staging_module, "MOST_SINGLE", 3)
    monkeypatch.setattr(staging_module, "FORGET_AT_ONCE", 2)
    broker = await start_broker(http_address="127.0.0.1:0")

    async def write(name: str, run: str = "run-1", last: int = 0) -> None:
        async with StageClient.connect(broker, name) as client:
            for txn in range(last + 1):
                await client.commit(txn, [[b"x"]], f"job-{txn}", run=run)
        clock.advance(1)

    async with StageClient.connect(broker, "unfinished") as client:
        await client.open(0)
        await client.prepare(1, 0, [await client.stage(1, 0, "a", [[b"x"]])])
    await write("stream", last=1)
    await write("named")
    for number in range(6):
        await write(f"write-{number}", f"write-{number}")
    everybody = set(broker.stage.producers)
    broker.stage._sweep()
    assert set(broker.stage.producers) == everybody, "any of them may ask once more"
    clock.advance(3_600)
    await write("late", "late")
    broker.stage._sweep()
    assert everybody - set(broker.stage.producers) == {"write-0", "write-1"}
    broker.stage._sweep()
    broker.stage._sweep()
    left = {"unfinished", "stream", "named", "write-5", "late"}
    assert set(broker.stage.producers) == left
    folder = broker.path / "flintmq" / "stage"
    await until(lambda: len(list(folder.iterdir())) == len(left))
    # Forgotten, the same name begins anew.
    async with StageClient.connect(broker, "write-0") as client:
        assert await client.open(0) == {"epoch": 1, "decided": None}
    await broker.stop()
    broker = await start_broker(http_address="127.0.0.1:0")
    assert set(broker.stage.producers) == {*left, "write-0"}


async def test_a_producer_that_is_begun_anew_outlives_the_end_of_its_former_self(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """Its folder is deleted in a thread: the new state must not be deleted with it."""
    disk = HeldDisk()
    broker = await start_broker(http_address="127.0.0.1:0", disk=disk)
    async with StageClient.connect(broker, "q") as client:
        await client.commit(0, CHUNKS, "job-1")
        disk.held = Event()
        broker.stage._forget(broker.stage.producers["q"])
        opening = asyncio.create_task(client.open(0))
        await until(lambda: "q" in broker.stage.producers)
        assert not opening.done()
        disk.held.set()
        assert (await opening)["epoch"] == 1
    assert len(list(tmp_path.glob("flintmq/stage/*/state"))) == 1


async def test_producers_attempts_and_what_is_known_of_them_have_a_limit(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "MOST_PRODUCERS", 2)
    monkeypatch.setattr(staging_module, "MOST_ATTEMPTS", 3)
    async with HttpClient.connect(broker.http_address) as http:
        first, second, third = (StageClient(http, name) for name in ("one", "two", "three"))
        await first.open(0)
        await second.open(0)
        for call in (third.open(0), third.begin(1, 0, "a")):
            with pytest.raises(Refused, match="E_STAGE_FULL 2 producers") as refused:
                await call
            assert refused.value.status == 507
        for client, name in ((first, "a"), (first, "b"), (second, "a"), (first, "a")):
            await client.begin(1, 0, name)
        with pytest.raises(Refused, match="E_STAGE_FULL 3 attempts"):
            await second.begin(1, 0, "b")
        # What is there goes on, and makes room.
        monkeypatch.setattr(staging_module, "MOST_CHUNKS", 2)
        await first.put(1, 0, "a", 0, [b"x"])
        prepared = await first.prepare(1, 0, [("a", 1, 1)])
        await second.begin(1, 0, "b")
        await second.put(1, 0, "a", 0, [b"x"])
        with pytest.raises(Refused, match="E_STAGE_FULL 2 chunks"):
            await second.put(1, 0, "b", 0, [b"y"])
        # Once more the same is no other one.
        await second.put(1, 0, "a", 0, [b"x"])
        await second.prepare(1, 0, [])
        await first.begin(1, 1, "a")
        await first.put(1, 1, "a", 0, [b"z"])
        monkeypatch.setattr(staging_module, "STATE_BYTES", 200)
        with pytest.raises(Refused, match="E_STAGE_FULL the transactions of 2 producers"):
            await first.decide(1, 0, {"n": prepared["set"]})
        await second.ask("DELETE", "/stage?producer=two")
        await first.ask("DELETE", "/stage?producer=one")
        await third.open(0)


@pytest.mark.parametrize("same_node", [False, True])
async def test_a_backup_during_an_apply_does_not_double_its_rows(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_node: bool
) -> None:
    """The set is decided and applied right after the backup has read that it is not."""
    options = {"http_address": "127.0.0.1:0"}
    (tmp_path / "data").mkdir()
    broker = await start_broker(data_path=tmp_path / "data", **options)
    broker.topic("t").channel("c")
    loop = asyncio.get_running_loop()
    tries: list[int] = []
    copy_keys = backup._Copy._copy_keys

    async with StageClient.connect(broker) as client:
        await client.open(0)
        prepared = await client.prepare(1, 0, [await client.stage(1, 0, "a", CHUNKS)])

        async def finish() -> None:
            await client.decide(1, 0, {"n": prepared["set"]})
            await client.apply(0, prepared["set"])
            await client.done(0)

        def held_up(copy: backup._Copy) -> None:
            if not tries:
                asyncio.run_coroutine_threadsafe(finish(), loop).result(30)
            tries.append(1)
            copy_keys(copy)

        monkeypatch.setattr(backup._Copy, "_copy_keys", held_up)
        await loop.run_in_executor(None, backup.make, tmp_path / "data", tmp_path / "copy")
    assert len(tries) == 2
    await broker.stop()
    backup.restore(tmp_path / "copy", tmp_path / "new", same_node=same_node)
    broker = await start_broker(data_path=tmp_path / "new", **options)
    async with StageClient.connect(broker) as client:
        opened = await client.open(0, job="job-2")
        if opened["decided"] is None:
            await client.commit(0, CHUNKS, "job-2")
    assert broker.topics["t"].channels["c"].depth == ROWS.total()


async def test_a_state_that_cannot_be_looked_at_is_not_a_missing_one(start_broker: StartBroker) -> None:
    """The system does not say whether the file is there: a producer without one is deleted, with all its rows."""
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        prepared = await client.prepare(1, 0, [winner])
    await broker.stop()
    [folder] = (broker.path / "flintmq" / "stage").iterdir()
    state = folder / "state"
    state.rename(folder.parent.parent / "elsewhere")
    state.symlink_to(state)
    with pytest.raises(StartError, match="state"):
        await start_broker(http_address="127.0.0.1:0")
    (folder.parent.parent / "elsewhere").replace(state)
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        await client.decide(1, 0, {"n": prepared["set"]})
        await client.apply(0, prepared["set"])
    assert stored(broker) == ROWS
