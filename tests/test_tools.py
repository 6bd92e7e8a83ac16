"""The commands for operators, as people run them, on a real nsqd in another process."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.daemons import Nsqd
from flintmq import sync
from flintmq.cluster.node import PeekedMessage
from flintmq.errors import HttpError
from flintmq.protocol import wire

Run = Any


@pytest.fixture(scope="module")
def nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    nsqd = Nsqd("flintmq", tmp_path_factory.mktemp("nsqd"))
    nsqd._wants = ("TCP", "HTTP")
    nsqd.start()
    yield nsqd
    nsqd.stop()


@pytest.fixture
def node(nsqd: Nsqd) -> Iterator[sync.NodeClient]:
    with sync.NodeClient(nsqd.at["HTTP"]) as node:
        yield node


@pytest.fixture
def topic(request: pytest.FixtureRequest, nsqd: Nsqd, node: sync.NodeClient) -> str:
    """A topic of the test's own, with a channel c and three messages in it."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    node.create_topic(name)
    node.create_channel(name, "c")
    sync.publish(name, b'{"id": 1}', b"two\nlines [bold]", b"\xff\x00", nsqd=nsqd.address)
    return name


@pytest.fixture
def run(nsqd: Nsqd, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; (status, output, errors)."""

    def run(tool: str, *argv: str, address: str = nsqd.at["HTTP"]) -> tuple[int, str, str]:
        main = importlib.import_module(f"flintmq.tools.{tool}").main
        capfd.readouterr()
        try:
            status = main([*argv, "--nsqd-http-address", address])
        except SystemExit as exc:
            status = exc.code
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return status, out, err

    return run


def lines_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# --- peek -------------------------------------------------------------------------------------------------------------


def test_peek_shows_a_table(run: Run, topic: str) -> None:
    status, out, err = run("peek", f"{topic}/c")
    assert (status, err) == (0, "")
    header, first, second, third = (line.split() for line in out.splitlines() if line.strip(" ─"))
    assert header == ["ID", "AGE", "ATTEMPTS", "BYTES", "BODY"]
    # As one line each, whatever is in them.
    assert first[-2:] == ['{"id":', "1}"]
    assert " ".join(second[-2:]) == r"two\nlines [bold]"
    assert third[-1] == r"\xff\x00"


def test_peek_prints_json(run: Run, topic: str) -> None:
    status, out, _ = run("peek", f"{topic}/c", "--json", "--bytes", "4")
    assert status == 0
    first, second, third = lines_of(out)
    assert (first["body"], first["size"], first["truncated"], first["attempts"]) == ('{"id', 9, True, 0)
    assert (second["body"], third["body_base64"], third["truncated"]) == ("two\n", "/wA=", False)


def test_peek_says_where_it_stops(run: Run, topic: str) -> None:
    _, out, _ = run("peek", f"{topic}/c", "--limit", "2")
    assert "more follow: --limit 20, or --limit all" in out
    _, out, _ = run("peek", f"{topic}/c", "--limit", "3")
    assert "more follow" not in out
    _, out, _ = run("peek", f"{topic}/c", "--limit", "all", "--json")
    assert len(lines_of(out)) == 3


def test_peek_shows_who_holds_a_message_and_for_how_long(run: Run, topic: str, nsqd: Nsqd) -> None:
    assert run("peek", f"{topic}/c", "--state", "in-flight")[1] == "no in flight messages\n"
    with sync.Consumer(topic, "c", nsqd=nsqd.address, max_in_flight=3) as consumer:
        message = consumer.get(timeout=60)
        _, out, _ = run("peek", f"{topic}/c", "--state", "in-flight")
        assert "TIME LEFT" in out and "CLIENT" in out and "127.0.0.1:" in out
        message.finish()


def test_peek_shows_when_a_message_is_due(run: Run, topic: str, node: sync.NodeClient) -> None:
    [first, *_] = node.peek(topic, "c").messages
    node.defer(topic, "c", first.id, 600)
    _, out, _ = run("peek", f"{topic}/c", "--state", "deferred")
    assert "DUE IN" in out and "9m5" in out


def test_peek_shows_the_log_of_a_topic(run: Run, topic: str, node: sync.NodeClient) -> None:
    for message in node.peek(topic, "c").messages[:2]:
        node.finish(topic, "c", message.id)
    _, out, _ = run("peek", topic, "--json")
    assert len(lines_of(out)) == 3
    node.create_topic("silent")
    assert run("peek", "silent")[1] == "no messages\n"


def test_peek_acts_on_single_messages(run: Run, topic: str, node: sync.NodeClient) -> None:
    ids = [message.id for message in node.peek(topic, "c").messages]
    status, out, _ = run("peek", f"{topic}/c", "--finish", ids[0], "--defer", ids[1], "--delay", "10m")
    assert (status, out) == (0, f"{ids[0]}: finished\n{ids[1]}: deferred\n")
    assert [message.id for message in node.peek(topic, "c").messages] == ids[2:]
    status, out, _ = run("peek", f"{topic}/c", "--requeue", ids[1], "--json")
    assert (status, lines_of(out)) == (0, [{"id": ids[1], "done": "requeue"}])
    assert {message.id for message in node.peek(topic, "c").messages} == set(ids[1:])
    status, out, err = run("peek", f"{topic}/c", "--finish", ids[0])
    assert (status, out) == (1, "")
    assert err.startswith("flintmq peek: MESSAGE_NOT_FOUND: ")


def test_a_reader_that_goes_away_is_no_error(topic: str, nsqd: Nsqd) -> None:
    command = [sys.executable, "-m", "flintmq", "peek", topic, "--json", "--nsqd-http-address", nsqd.at["HTTP"]]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=100)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


# --- What all of them share -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "argv", "reason"),
    [
        ("peek", ("no.such/topic/x",), "is not TOPIC or TOPIC/CHANNEL"),
        ("peek", ("t", "--finish", "x"), "write TOPIC/CHANNEL"),
        ("peek", ("t", "--state", "deferred"), "write TOPIC/CHANNEL"),
        ("peek", ("t/c", "--defer", "x"), "--defer needs --delay"),
        ("peek", ("t/c", "--delay", "1s"), "--delay needs --requeue or --defer"),
        ("peek", ("t/c", "--requeue", "x", "--delay=-1s"), "--delay must not be negative"),
        ("peek", ("t/c", "--limit", "0"), "a number above 0"),
        ("peek", ("t/c", "--bytes", "-1"), "a whole number"),
        ("peek", ("t/c", "--state", "finished"), "invalid choice"),
        ("seek", ("t", "latest"), "is not TOPIC/CHANNEL"),
        ("seek", ("t/c", "yesterday"), "neither earliest, latest, a number nor a time"),
        ("redrive", ("t",), "is not TOPIC/CHANNEL"),
        ("redrive", ("t/c", "--count", "0"), "a number above 0"),
        ("redrive", ("t/c", "--status", "--rate", "1"), "--status cannot be combined"),
        ("redrive", ("t/c", "--stop", "--reason", "expired"), "--stop cannot be combined"),
        ("redrive", ("t/c", "--stop", "--status"), "--status cannot be combined with --stop"),
        ("redrive", ("t/c", "--reason", "bored"), "invalid choice"),
        ("seek", ("t/c#x", "latest"), '"c#x" is not a channel name'),
        ("seek", ("t!/c", "latest"), '"t!" is not a topic name'),
        ("redrive", ("t/c/d",), '"t/c/d" is not TOPIC/CHANNEL'),
        ("redrive", ("/c",), '"/c" is not TOPIC/CHANNEL'),
        ("log", ("a b",), '"a b" is not a topic name'),
        ("settings", ("a b",), "is not TOPIC or TOPIC/CHANNEL"),
        ("settings", ("t", "ttl"), "is not KEY=VALUE"),
        ("log", ("t/c",), "is not a topic"),
        ("log", ("t", "--time", "12"), "is not a time"),
        ("log", ("t", "--from", "0", "--positions"), "exclude each other"),
        ("log", ("t", "--raw", "x", "--json"), "exclude each other"),
    ],
)
def test_a_wrong_command_line_is_status_2(run: Run, tool: str, argv: tuple[str, ...], reason: str) -> None:
    status, out, err = run(tool, *argv)
    assert (status, out) == (2, "")
    assert reason in err


#: One use of each that works on any topic with a channel c.
USES = [("peek", "t/c"), ("seek", "t/c", "latest"), ("redrive", "t/c"), ("settings", "t/c"), ("log", "t")]


@pytest.mark.parametrize("argv", USES, ids=lambda argv: argv[0])
def test_nobody_listens(run: Run, argv: tuple[str, ...]) -> None:
    status, out, err = run(*argv, address="127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err == (
        f"flintmq {argv[0]}: cannot speak to an nsqd at 127.0.0.1:1 (Connection refused); see --nsqd-http-address\n"
    )


@pytest.mark.parametrize("argv", USES, ids=lambda argv: argv[0])
def test_an_nsqd_of_nsq_cannot_do_it(run: Run, argv: tuple[str, ...], go: str) -> None:
    status, out, err = run(*argv, address=go)
    assert (status, out) == (1, "")
    assert "cannot do this: it is NSQ's own" in err


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    nsqd = Nsqd("go", tmp_path_factory.mktemp("go"))
    nsqd._wants = ("TCP", "HTTP")
    nsqd.start()
    yield nsqd.at["HTTP"]
    nsqd.stop()


def test_an_unknown_topic_or_channel_is_answered_with_those_there_are(run: Run, topic: str) -> None:
    status, _, err = run("peek", "none-such/c")
    assert status == 1
    assert err.startswith("flintmq peek: 127.0.0.1:") and "has no topic none-such; it has " in err and topic in err
    status, _, err = run("peek", f"{topic}/other")
    assert (status, err) == (1, f"flintmq peek: the topic {topic} has no channel other; it has c\n")


def test_a_topic_without_channels_has_none_to_choose_from(run: Run, node: sync.NodeClient) -> None:
    node.create_topic("lonely")
    _, _, err = run("peek", "lonely/other")
    assert err == "flintmq peek: the topic lonely has no channel other; it has no channel at all\n"


def test_what_is_no_address_is_named(run: Run) -> None:
    status, _, err = run("peek", "t", address="nowhere")
    assert status == 1
    assert '"nowhere" is not an HTTP address of an nsqd' in err


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nsqd, Path]]:
    """One with HTTPS and tokens; and the folder of its files."""
    import trustme

    path = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(path / "cert.pem"))
    (path / "tokens").write_text("reading-1 read,consume\ncounting-1 read\n")
    (path / "tokens").chmod(0o600)
    (path / "token").write_text("reading-1\n")
    (path / "empty").write_text("")
    nsqd = Nsqd(
        "flintmq",
        path,
        f"--http-auth-token-file={path / 'tokens'}",
        f"--tls-cert={path / 'cert.pem'}",
        f"--tls-key={path / 'key.pem'}",
        "--https-address=127.0.0.1:0",
    )
    nsqd._wants = ("TCP", "HTTP", "HTTPS")
    nsqd.start()
    yield nsqd, path
    nsqd.stop()


def test_tokens_and_certificates(run: Run, guarded: tuple[Nsqd, Path]) -> None:
    nsqd, path = guarded
    address = f"https://{nsqd.at['HTTPS']}"
    trust = ("--tls-root-ca-file", str(path / "ca.pem"))
    token = ("--token-file", str(path / "token"))
    sync.publish("t", b"secret", nsqd=nsqd.address)
    for flags in ((*trust, *token), (*trust, "--token", "reading-1"), ("--tls-insecure", *token)):
        status, out, _ = run("peek", "t", *flags, address=address)
        assert (status, "secret" in out) == (0, True)
    status, _, err = run("peek", "t", *token, address=address)
    assert (status, "certificate verify failed" in err) == (1, True)
    status, _, err = run("peek", "t", *trust, address=address)
    assert (status, "asks for a token; give one" in err) == (1, True)
    status, _, err = run("peek", "t/c", "--finish", "x", *trust, *token, address=address)
    assert (status, "lacks the right admin" in err) == (1, True)
    status, _, err = run("peek", "t", *trust, "--token", "counting-1", address=address)
    assert (status, "lacks the right consume" in err) == (1, True)
    status, _, err = run("peek", "t", "--token-file", str(path / "none"), address=address)
    assert (status, err) == (1, f"flintmq peek: {path / 'none'}: No such file or directory\n")
    status, _, err = run("peek", "t", "--token-file", str(path / "empty"), address=address)
    assert (status, "must hold one token" in err) == (1, True)
    status, _, err = run("peek", "t", "--tls-root-ca-file", str(path / "empty"), address=address)
    assert (status, "cannot use the files of --tls-root-ca-file" in err) == (1, True)


# --- redrive ----------------------------------------------------------------------------------------------------------


def test_dead_letters_are_shown_and_sent_back(run: Run, topic: str, node: sync.NodeClient, nsqd: Nsqd) -> None:
    node.set_channel_settings(topic, "c", {"max-attempts": 1})
    with sync.Consumer(topic, "c", nsqd=nsqd.address, max_in_flight=1) as consumer:
        consumer.get(timeout=60).requeue()
        deadline = time.monotonic() + 60
        while not (dead := letters(node, f"{topic}.c.dead")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [(letter.body, letter.dead and letter.dead.reason) for letter in dead] == [(b'{"id": 1}', "requeued")]
    assert f"requeued in {topic}/c" in run("peek", f"{topic}.c.dead")[1]
    status, out, err = run("redrive", f"{topic}/c")
    assert (status, err) == (0, "")
    assert out == f"1 of 1 dead letters went from {topic}.c.dead back to {topic}/c\n"
    assert run("redrive", f"{topic}/c", "--status")[1] == out
    status, _, err = run("redrive", f"{topic}/c", "--from", "nobody")
    assert status == 1 and "nobody" in err
    assert run("redrive", f"{topic}/c") == (0, f"no dead letters of {topic}/c in {topic}.c.dead\n", "")


def test_a_redrive_need_not_be_waited_for(run: Run, topic: str, node: sync.NodeClient, nsqd: Nsqd) -> None:
    node.set_channel_settings(topic, "c", {"max-attempts": 1})
    with sync.Consumer(topic, "c", nsqd=nsqd.address, max_in_flight=3) as consumer:
        for _ in range(3):
            consumer.get(timeout=60).requeue()
        deadline = time.monotonic() + 60
        while len(letters(node, f"{topic}.c.dead")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    # So slowly that it is still under way when it is looked at.
    status, out, _ = run("redrive", f"{topic}/c", "--no-wait", "--rate", "1", "--json")
    [found] = lines_of(out)
    assert (status, found["planned"], found["running"]) == (0, 3, True)
    status, _, err = run("redrive", f"{topic}/c")
    assert (status, "ALREADY_RUNNING" in err) == (1, True)
    assert "it goes on" in run("redrive", f"{topic}/c", "--status")[1]


def test_a_redrive_is_stopped_and_the_rest_stay_dead_letters(
    run: Run, topic: str, node: sync.NodeClient, nsqd: Nsqd
) -> None:
    node.set_channel_settings(topic, "c", {"max-attempts": 1})
    with sync.Consumer(topic, "c", nsqd=nsqd.address, max_in_flight=3) as consumer:
        for _ in range(3):
            consumer.get(timeout=60).requeue()
        deadline = time.monotonic() + 60
        while len(letters(node, f"{topic}.c.dead")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    # Nothing died of this: all stay.
    assert run("redrive", f"{topic}/c", "--reason", "expired")[:2] == (
        0,
        f"no dead letters of {topic}/c in {topic}.c.dead\n",
    )
    status, out, _ = run("redrive", f"{topic}/c", "--no-wait", "--rate", "1", "--reason", "requeued", "--json")
    [found] = lines_of(out)
    assert (status, found["reason"], found["running"]) == (0, "requeued", True)
    status, out, err = run("redrive", f"{topic}/c", "--stop", "--json")
    [stopped] = lines_of(out)
    assert (status, err, stopped["running"], stopped["error"]) == (0, "", False, "stopped")
    assert stopped["moved"] < 3
    status, _, err = run("redrive", f"{topic}/c", "--status")
    assert (status, "it ended early: stopped" in err) == (1, True)
    status, out, _ = run("redrive", f"{topic}/c", "--json")
    assert (status, lines_of(out)[0]["moved"]) == (0, 3 - stopped["moved"])


def letters(node: sync.NodeClient, topic: str) -> list[PeekedMessage]:
    try:
        return node.peek_topic(topic).messages
    except HttpError as exc:
        assert exc.status == 404
        return []


# --- settings ---------------------------------------------------------------------------------------------------------


def rows_of(out: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in (line.split() for line in out.splitlines()) if len(row) > 1}


def test_settings_are_shown_with_where_they_are_from(run: Run, topic: str) -> None:
    status, out, err = run("settings", topic)
    assert (status, err) == (0, "")
    assert rows_of(out)["ttl"] == ["0s", "default"]
    status, out, _ = run("settings", f"{topic}/c", "--json")
    [found] = lines_of(out)
    assert (status, found["topic"], found["channel"]) == (0, topic, "c")
    assert found["source"]["max-attempts"] == "default"


def test_settings_are_set_and_taken_back(run: Run, topic: str, node: sync.NodeClient) -> None:
    status, out, _ = run("settings", topic, "ttl=1h", "max-messages=1000")
    assert (status, rows_of(out)["ttl"]) == (0, ["1h0m0s", "live"])
    assert rows_of(out)["max-messages"] == ["1000", "live"]
    status, out, _ = run("settings", "--unset", "ttl", topic, "max-messages=7")
    assert (rows_of(out)["ttl"], rows_of(out)["max-messages"]) == (["0s", "default"], ["7", "live"])
    run("settings", f"{topic}/c", "max-attempts=5")
    assert node.channel_settings(topic, "c").set == {"max-attempts": 5}


@pytest.mark.parametrize("change", ["ttl=5", "retain-age=3600", "key-age=1", "max-defer=1000"])
def test_a_duration_without_a_unit_changes_nothing(run: Run, topic: str, node: sync.NodeClient, change: str) -> None:
    """Over HTTP a number is milliseconds: a topic with `ttl=5` would lose its messages at once."""
    key, _, value = change.partition("=")
    status, out, err = run("settings", topic, "max-messages=9", change)
    assert (status, out) == (1, "")
    assert f'{key}: missing unit in duration "{value}", such as {value}ms or {value}s' in err
    assert node.topic_settings(topic).set == {}
    assert run("settings", topic, f"{key}=0")[0] == 0


def test_settings_may_be_for_all_topics_of_a_kind(run: Run, topic: str) -> None:
    pattern = topic[:-1] + "*"
    assert run("settings", pattern, "ttl=2h")[0] == 0
    assert rows_of(run("settings", topic)[1])["ttl"] == ["2h0m0s", "live"]


def test_a_wrong_setting_is_told_and_changes_nothing(run: Run, topic: str, node: sync.NodeClient) -> None:
    before = node.topic_settings(topic)
    for change in ("ttl=soon", "colour=green"):
        status, out, err = run("settings", topic, "max-messages=5", change)
        assert (status, out) == (1, "")
        assert err.startswith("flintmq settings: INVALID_SETTING: ")
    assert node.topic_settings(topic) == before


# --- log --------------------------------------------------------------------------------------------------------------


def when_durable(node: sync.NodeClient, topic: str) -> tuple[int, int]:
    """The first message and the end of the log, once all of it can be read."""
    give_up = time.monotonic() + 60
    while (info := node.log_info(topic)).durable < info.end:
        assert time.monotonic() < give_up, "never synced"
        time.sleep(0.01)
    return info.first, info.end


def test_log_tells_how_far_it_reaches(run: Run, topic: str, node: sync.NodeClient) -> None:
    first, end = when_durable(node, topic)
    status, out, err = run("log", topic)
    assert (status, err) == (0, "")
    assert out.startswith(f"{topic} on 127.0.0.1:") and ": 3 messages, " in out
    assert f"first    {first}\n" in out and f"end      {end}\n" in out
    [info] = lines_of(run("log", topic, "--json")[1])
    assert (info["topic"], info["first"], info["durable"], info["end"]) == (topic, first, end, end)


def test_log_prints_messages(run: Run, topic: str, node: sync.NodeClient) -> None:
    first, _ = when_durable(node, topic)
    status, out, _ = run("log", topic, "--from", "earliest", "--json")
    assert status == 0
    assert [line["seq"] for line in lines_of(out)] == [first, first + 1, first + 2]
    assert [line.get("body") for line in lines_of(out)] == ['{"id": 1}', "two\nlines [bold]", None]
    status, out, _ = run("log", topic, "--from", str(first), "--to", str(first + 2))
    assert (status, out) == (0, '{"id": 1}\ntwo\nlines [bold]\n')
    # Later than everything, and earlier.
    assert run("log", topic, "--from", "2100-01-01T00:00:00Z") == (0, "", "")
    assert len(lines_of(run("log", topic, "--from", "2001-01-01", "--json")[1])) == 3


def test_log_saves_frames(run: Run, topic: str, node: sync.NodeClient, tmp_path: Path) -> None:
    first, end = when_durable(node, topic)
    path = tmp_path / "frames"
    status, out, _ = run("log", topic, "--raw", str(path))
    frames = path.read_bytes()
    assert (status, out) == (0, f"{path}: {len(frames)} bytes of frames, messages {first} to {end - 1} of {topic}\n")
    bodies = [wire.decode_message(frame).body for _, frame in wire.FrameDecoder().feed(frames)]
    assert bodies == [b'{"id": 1}', b"two\nlines [bold]", b"\xff\x00"]
    # What is there is never written over.
    status, _, err = run("log", topic, "--raw", str(path))
    assert (status, err) == (1, f"flintmq log: {path}: File exists\n")


def test_log_finds_a_time(run: Run, topic: str, node: sync.NodeClient) -> None:
    first, end = when_durable(node, topic)
    assert run("log", topic, "--time", "2001-01-01T00:00:00Z") == (0, f"{first}\n", "")
    assert lines_of(run("log", topic, "--time", "2100-01-01T00:00:00Z", "--json")[1]) == [{"offset": end}]


def test_log_keeps_reader_positions(run: Run, topic: str, node: sync.NodeClient) -> None:
    first, _ = when_durable(node, topic)
    assert run("log", topic, "--positions") == (0, f"nobody reads the log of {topic}\n", "")
    status, out, _ = run("log", topic, "--set-position", "spark", str(first + 1), "--json")
    assert (status, lines_of(out)[0]["offset"]) == (0, first + 1)
    status, out, _ = run("log", topic, "--positions")
    header, row = (line.split() for line in out.splitlines() if line.strip(" ─"))
    assert (header[:2], row[:3]) == (["READER", "POSITION"], ["spark", str(first + 1), "2"])
    assert run("log", topic, "--delete-position", "spark") == (0, "spark: forgotten\n", "")
    status, _, err = run("log", topic, "--delete-position", "spark")
    assert (status, "READER_NOT_FOUND" in err) == (1, True)


def test_log_says_why_there_is_none(run: Run, node: sync.NodeClient) -> None:
    node.create_topic("short#ephemeral")
    status, _, err = run("log", "short#ephemeral")
    assert (status, "NO_LOG" in err) == (1, True)


# --- seek -------------------------------------------------------------------------------------------------------------


def test_seek_moves_a_channel(run: Run, topic: str, node: sync.NodeClient) -> None:
    first, end = when_durable(node, topic)
    assert run("seek", f"{topic}/c", "latest") == (0, f"{topic}/c goes on at {end}, 0 messages to deliver\n", "")
    assert run("seek", f"{topic}/c", str(end - 1)) == (0, f"{topic}/c goes on at {end - 1}, 1 message to deliver\n", "")
    status, out, _ = run("seek", f"{topic}/c", "2001-01-01T00:00:00Z", "--json")
    assert (status, lines_of(out)) == (0, [{"topic": topic, "channel": "c", "offset": first, "messages": 3}])
    assert len(node.peek(topic, "c").messages) == 3


# --- The document -----------------------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).parent.parent / "docs" / "tools.md").read_text()


@pytest.mark.parametrize("tool", ["pub", "sub", "peek", "seek", "redrive", "settings", "log"])
def test_every_flag_is_in_the_document(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"flintmq.tools.{tool}").main(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert {"--json"} <= flags
    assert sorted(flag for flag in flags if f"`{flag}" not in DOCUMENT) == []
    assert f"`flintmq {tool}`" in DOCUMENT
