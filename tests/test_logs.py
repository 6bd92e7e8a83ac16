"""Log lines, exactly: NSQ's text, JSON, and levels that change while it runs."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq import logs
from flintmq.broker.daemon import Broker

# 2024-05-01 12:30:00.000123 UTC
MOMENT = 1_714_566_600.000123


def record(level: int, message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    trace = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("flintmq.broker.delivery.topic", level, __file__, 1, message, args, trace)
    made.created = MOMENT
    return made


@pytest.fixture
def half_past_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone two hours east of Greenwich."""
    monkeypatch.setenv("TZ", "XYZ-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """``setup`` is for a whole process: undo what it does to this one."""
    root, ours = logging.getLogger(), logging.getLogger("flintmq")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers[:] = []
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


LEVELS = [
    (logging.DEBUG, "DEBUG", "debug"),
    (logging.INFO, "INFO", "info"),
    (logging.WARNING, "WARNING", "warn"),
    (logging.ERROR, "ERROR", "error"),
    (logging.CRITICAL, "FATAL", "fatal"),
]


@pytest.mark.usefixtures("half_past_two")
@pytest.mark.parametrize(("number", "word", "_"), LEVELS)
def test_text_is_nsq_s_in_local_time(number: int, word: str, _: str) -> None:
    line = logs.LogFormatter("[nsqd] ").format(record(number, "TOPIC(%s): created", "orders"))
    assert line == f"[nsqd] 2024/05/01 14:30:00.000123 {word}: TOPIC(orders): created"


@pytest.mark.usefixtures("half_past_two")
@pytest.mark.parametrize(("number", "_", "word"), LEVELS)
def test_json_is_one_object_per_line_in_utc(number: int, _: str, word: str) -> None:
    line = logs.JsonFormatter("nsqd").format(record(number, "NSQ: %s", "bye"))
    assert line == (f'{{"time":"2024-05-01T12:30:00.000123Z","level":"{word}","program":"nsqd","message":"NSQ: bye"}}')


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("TOPIC(orders): new channel(billing)", {"topic": "orders"}),
        ("CHANNEL(billing#ephemeral): messages 1 to 2 are lost", {"channel": "billing#ephemeral"}),
        ("LOG(orders): cannot write", {"topic": "orders"}),
        ("client([::1]:4150): E_INVALID x", {"client": "[::1]:4150"}),
        ("NSQ: bye", {}),
        ("about TOPIC(orders): it is not the actor", {}),
        ("TOPIC(orders) without an end", {}),
    ],
)
def test_json_has_the_actor_as_a_field(message: str, fields: dict[str, str]) -> None:
    line = json.loads(logs.JsonFormatter("nsqd").format(record(logging.INFO, "%s", message)))
    assert {key: value for key, value in line.items() if key in ("topic", "channel", "client")} == fields
    assert line["message"] == message


def test_what_a_client_sent_breaks_no_line() -> None:
    hostile = 'client(1.2.3.4:5): E_INVALID invalid command x\n{"level":"fatal"}\r\u2028\udcff'
    line = logs.JsonFormatter("nsqd").format(record(logging.ERROR, "%s", hostile))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == hostile


def test_a_traceback_is_a_field_in_json_and_lines_of_its_own_in_text() -> None:
    try:
        raise ValueError("mine")
    except ValueError as exc:
        made = record(logging.ERROR, "unexpected error", error=exc)
    line = json.loads(logs.JsonFormatter("nsqd").format(made))
    assert line["error"].startswith("Traceback (most recent call last):\n")
    assert line["error"].endswith("\nValueError: mine")
    text = logs.LogFormatter("[nsqd] ").format(made).splitlines()
    assert text[0].endswith("ERROR: unexpected error")
    assert text[-1] == "ValueError: mine"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("level", ["debug", "info", "warn", "error", "fatal"])
def test_ours_are_logged_from_the_chosen_level_on_and_others_from_warning_on(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("", level)
    words = ["debug", "info", "warn", "error", "fatal"]
    for name in ("flintmq.x", "library"):
        for word, number in zip(words, (10, 20, 30, 40, 50), strict=True):
            logging.getLogger(name).log(number, "%s %s", name, word)
    said = [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    ours = words[words.index(level) :]
    assert said == [f"flintmq.x {word}" for word in ours] + [f"library {word}" for word in ours if word in words[2:]]


@pytest.mark.usefixtures("restored_logging")
def test_setup_chooses_the_form_and_may_be_called_again(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("flintmq.x")
    logs.setup("[nsqd] ", "info")
    log.info("one")
    logs.setup("[nsqd] ", "info", "json")
    log.info("two")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("[nsqd] ") and first.endswith(" INFO: one")
    assert json.loads(second)["message"] == "two"
    assert json.loads(second)["program"] == "nsqd"


@pytest.mark.usefixtures("restored_logging")
async def test_the_level_can_be_changed_while_it_runs(tmp_path: Path) -> None:
    log = logging.getLogger("flintmq.broker.x")
    async with Broker(data_path=tmp_path, disk_reserve=0) as broker:
        broker.options_changed.append(lambda: logs.set_level(broker.options.log_level))
        for word, number in zip(("debug", "warn", "fatal", "info"), (10, 30, 50, 20), strict=True):
            broker.change_options(log_level=word)
            assert (log.isEnabledFor(number), log.isEnabledFor(number - 10)) == (True, False)


# --- What peers can do to a log ---------------------------------------------------------------------------------------

HOSTILE = "x\n[nsqd] 2024/05/01 12:30:00.123456 INFO: TOPIC(orders): deleted\x1b[2J\x9b2J\r\x00\u202etxt"


def test_a_peer_cannot_write_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("[nsqd] ", "info")
    logging.getLogger("flintmq.test").error("client(%s): unknown", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("flintmq.test").exception("it failed")
    written = capsys.readouterr().err
    assert [line for line in written.split("\n") if line.startswith("[nsqd] 2024/05/01")] == []
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", written)
    assert r"\n[nsqd] 2024/05/01" in written
    assert r"\x1b[2J\x9b2J\r\x00\u202etxt" in written


def test_the_same_line_again_and_again_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("[nsqd] ", "info")
    logger = logging.getLogger("flintmq.test")
    [handler] = logging.getLogger().handlers

    def log(second: int, text: str, *, line: int = 1) -> None:
        record = logger.makeRecord(logger.name, logging.INFO, __file__, line, text, (), None)
        record.created = float(second)
        handler.handle(record)

    for number in range(10 * logs.LINES_PER_SECOND):
        log(1, f"client({number}): bad command")
    log(1, "another kind", line=2)
    written = capsys.readouterr().err.splitlines()
    assert (len(written), "another kind" in written[-1]) == (logs.LINES_PER_SECOND + 1, True)
    log(2, "client(x): bad command")
    first, second = capsys.readouterr().err.splitlines()
    assert f"{9 * logs.LINES_PER_SECOND} lines like the next one were left out" in first
    assert "client(x): bad command" in second


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_long_message_is_cut(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Five hundred lines a second may not be five hundred times 16 KiB of what a client has sent."""
    logs.setup("", "info", format)
    try:
        logging.getLogger("flintmq.long").error("client(x): E_INVALID invalid command %s", "X" * 16_000)
    finally:
        logging.basicConfig(handlers=[logging.NullHandler()], force=True)
    line = capsys.readouterr().err
    assert "E_INVALID invalid command XXX" in line and "more characters)" in line
    assert len(line) < 1_300
