"""Reports of pipelines: what is taken, what is refused, how many there are, and how long they are remembered."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import StartBroker
from hypothesis import given
from hypothesis import strategies as st

from flintmq.broker.daemon import Broker
from flintmq.broker.observe import stats
from flintmq.broker.observe.pipelines import (
    FORGET_SECONDS,
    MOST_NAMES,
    MOST_PIPELINES,
    REPORT_BYTES,
    Pipelines,
    Report,
    read_report,
)
from flintmq.errors import OptionError
from support.fakes import FakeClock
from support.http_client import HttpClient

#: More than any report may say.
TOO_MUCH = 1 << 60

counts = st.integers(0, (1 << 53) - 1)
amounts = st.floats(0, 1e15)
lines = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=128)
topics = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=64)
names = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=128)
reports = st.fixed_dictionaries(
    {"id": st.text(string.ascii_letters + string.digits + "._:-", min_size=1, max_size=64), "at": counts},
    optional={
        "name": lines,
        "host": lines,
        "error": lines,
        "state": st.sampled_from(["running", "ended", "failed"]),
        "topics": st.lists(topics, max_size=5),
        "writes": st.lists(topics, max_size=5),
        "readers": st.lists(names, max_size=5),
        "batch": st.none() | counts,
        "progress": st.none() | counts,
        "batch_seconds": st.none() | amounts,
        "rows": counts,
        "rows_per_second": amounts,
        "lag": st.none() | counts,
        "state_rows": counts,
        "state_bytes": counts,
        "something_newer": st.integers(),
    },
)
#: For each field values that it cannot have.
WRONG: dict[str, list[Any]] = {
    "id": ["", "x" * 65, "two words", "line\n", "a/b", "ä", 7, None],
    "at": [-1, 1.5, "now", None, TOO_MUCH],
    "name": ["x" * 129, "two\nlines", "a line\n", "\x1b[31m", "\x85", 7, None],
    "host": ["x" * 129, "\0", []],
    "error": ["x" * 501, "a\tb", 1],
    "state": ["", "silent", "Running", 1, None],
    "topics": [["two words"], [""], ["x" * 65], [1], "orders", {"orders": 1}, ["t"] * (MOST_NAMES + 1), ["a\n"]],
    "writes": [["$"], ["a#b"], None, ["t"] * (MOST_NAMES + 1)],
    "readers": [[""], ["x" * 129], ["a\rb"], ["r"] * (MOST_NAMES + 1)],
    "batch": [-1, 0.5, "1", TOO_MUCH, True],
    "progress": [-1, "x", TOO_MUCH],
    "batch_seconds": [-0.1, "1", 1e16],
    "rows": [-1, None, 1.5, TOO_MUCH],
    "rows_per_second": [-1, None, 1e300, "fast"],
    "lag": [-1, 0.5, TOO_MUCH],
    "state_rows": [-1, None, TOO_MUCH],
    "state_bytes": [-1, None, TOO_MUCH],
}


def report(id: str = "q", at: int = 1, **fields: Any) -> Report:
    return Report(id=id, at=at, **fields)


@given(reports)
def test_what_a_query_says_is_shown_as_it_was_said(said: dict[str, Any]) -> None:
    pipelines = Pipelines(FakeClock())
    assert pipelines.take(read_report(json.dumps(said).encode()))
    [shown] = pipelines.describe()
    assert {name: shown[name] for name in said if name != "something_newer"} == {
        name: value for name, value in said.items() if name != "something_newer"
    }
    assert shown.keys() == {*Report.__struct_fields__, "reported"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_field_that_is_wrong_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as refused:
        read_report(json.dumps({"id": "q", "at": 1, name: value}).encode())
    # A name that cannot be one is shown itself.
    assert f"$.{name}" in str(refused.value) or "is no name of a topic" in str(refused.value)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(OptionError):
        read_report(body)


@given(st.sampled_from(["id", "name", "state", "error", "topics", "readers"]), st.integers(0x80, 0xFF))
def test_bytes_that_are_no_text_are_refused(field: str, byte: int) -> None:
    value = "a?b" if field not in ("topics", "readers") else ["a?b"]
    body = json.dumps({"id": "q", "at": 1, field: value}).encode()
    with pytest.raises(OptionError):
        read_report(body.replace(b"?", bytes([byte])))


def test_depth_without_end_is_refused() -> None:
    with pytest.raises(OptionError):
        read_report(b'{"id":"q","at":1,"x":' + b"[" * 8000)


def test_a_field_is_missing() -> None:
    for body in (b"{}", b'{"id":"q"}', b'{"at":1}'):
        with pytest.raises(OptionError, match="missing required field"):
            read_report(body)


def test_an_older_report_changes_nothing_and_does_not_renew() -> None:
    clock = FakeClock()
    pipelines = Pipelines(clock)
    pipelines.take(report(at=5, rows=50))
    clock.advance(FORGET_SECONDS - 1)
    assert pipelines.take(report(at=4, rows=40))
    assert [one["rows"] for one in pipelines.describe()] == [50]
    clock.advance(2)
    assert pipelines.describe() == []


def test_a_query_is_forgotten_when_it_was_not_renewed() -> None:
    clock = FakeClock()
    pipelines = Pipelines(clock)
    pipelines.take(report("a"))
    clock.advance(FORGET_SECONDS // 2)
    pipelines.take(report("b"))
    version = pipelines.version
    clock.advance(FORGET_SECONDS // 2)
    assert [one["id"] for one in pipelines.describe()] == ["b"]
    assert pipelines.version > version
    pipelines.take(report("b", at=2))
    clock.advance(FORGET_SECONDS - 1)
    assert len(pipelines) == 1
    clock.advance(2)
    assert len(pipelines) == 0


def test_there_are_never_too_many_and_those_that_ended_make_room() -> None:
    pipelines = Pipelines(FakeClock())
    for number in range(MOST_PIPELINES):
        assert pipelines.take(report(f"q{number}", state="failed" if number == 3 else "running"))
    assert pipelines.take(report("one more"))
    assert "q3" not in {one["id"] for one in pipelines.describe()}
    assert not pipelines.take(report("another"))
    assert len(pipelines) == MOST_PIPELINES
    # One that is known is renewed all the same.
    assert pipelines.take(report("q0", at=2))


async def test_reports_are_in_the_extended_statistics_alone(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    plain, text = stats.document(broker), stats.text(broker)
    async with HttpClient.connect(broker.http_address) as client:
        answer = await client.post("/pipeline/report", b'{"id":"q","at":1,"name":"archive","topics":["orders"]}')
        assert (answer.status, answer.body) == (200, b"")
        [shown] = (await client.get("/pipeline/report")).json["pipelines"]
        extended = (await client.get("/stats?format=json&extended=true")).json
        assert extended["pipelines"] == [shown]
        assert (shown["name"], shown["topics"]) == ("archive", ["orders"])
        assert "pipelines" not in (await client.get("/stats?format=json")).json
    without = {name: value for name, value in stats.document(broker).items() if name != "memory"}
    assert msgspec.json.encode(without) == msgspec.json.encode({k: v for k, v in plain.items() if k != "memory"})
    assert stats.text(broker).partition("Health")[2].partition("Topics")[2] == text.partition("Topics")[2]


async def test_what_changed_has_the_reports_only_when_they_changed(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    target = "/stats?format=json&extended=true&include_mem=false&since="
    async with HttpClient.connect(broker.http_address) as client:
        first = (await client.get(target)).json
        assert first["pipelines"] == []
        assert "pipelines" not in (await client.get(target + first["cursor"])).json
        await client.post("/pipeline/report", b'{"id":"q","at":1}')
        second = (await client.get(target + first["cursor"])).json
        assert [one["id"] for one in second["pipelines"]] == ["q"]
        third = (await client.get(target + second["cursor"])).json
        assert "pipelines" not in third
        # Another asker, who knows less.
        assert [one["id"] for one in (await client.get(target + first["cursor"])).json["pipelines"]] == ["q"]
        clock.advance(FORGET_SECONDS + 1)
        assert (await client.get(target + third["cursor"])).json["pipelines"] == []


async def test_what_is_wrong_is_refused_in_words(start_broker: StartBroker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("reads read\nwrites publish\n")
    tokens.chmod(0o600)
    broker = await start_broker(http_address="127.0.0.1:0", http_auth_token_file=str(tokens))
    good = b'{"id":"q","at":1}'
    async with HttpClient.connect(broker.http_address) as client:

        async def post(body: bytes, token: str = "writes") -> Any:
            return await client.ask("POST", "/pipeline/report", body, f"Authorization: Bearer {token}")

        assert (await post(good, "nobody")).status == 401
        refused = await post(good, "reads")
        assert (refused.status, refused.json["missing_right"]) == (403, "publish")
        assert len(broker.pipelines) == 0
        bad = await post(b'{"id":"q","at":1,"lag":-1}')
        assert bad.status == 400
        assert bad.json["message"].startswith("INVALID_REPORT: the body must be the JSON of a report - ")
        assert "$.lag" in bad.json["message"]
        large = await post(json.dumps({"id": "q", "at": 1, "x": "x" * REPORT_BYTES}).encode())
        assert large.status == 413
    async with HttpClient.connect(broker.http_address) as client:
        for number in range(MOST_PIPELINES):
            answer = await client.ask(
                "POST", "/pipeline/report", b'{"id":"q%d","at":1}' % number, "Authorization: Bearer writes"
            )
            assert answer.status == 200
        full = await client.ask("POST", "/pipeline/report", good, "Authorization: Bearer writes")
        assert full.status == 429
        assert full.json["message"].startswith("TOO_MANY_PIPELINES: ")


async def test_nothing_of_it_is_on_disk(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    broker.pipelines.take(report("a-name-that-no-file-has"))
    await broker.stop()
    found = [path for path in tmp_path.rglob("*") if path.is_file() and b"a-name-that-no-file-has" in path.read_bytes()]
    assert found == []
    again: Broker = await start_broker()
    assert len(again.pipelines) == 0
