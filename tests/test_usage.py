"""A misspelt flag of one of our commands is named, whatever else is wrong with the line."""

from __future__ import annotations

import argparse

import pytest

from flintmq import cli
from flintmq.cluster.node import NodeClient
from flintmq.errors import HttpError
from flintmq.spark import pipelines
from flintmq.tools import _advice
from flintmq.usage import Parser


def parser() -> Parser:
    made = Parser("tool")
    made.add_argument("topic")
    made.add_argument("bodies", nargs="*")
    made.add_argument("--limit", type=int)
    made.add_argument("-n", type=int)
    return made


@pytest.mark.parametrize("intermixed", [False, True])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--limti 3 orders", "there is no flag --limti, did you mean --limit?"),
        ("--limti=3", "there is no flag --limti, did you mean --limit?"),
        ("orders --nosuch", "there is no flag --nosuch, see --help"),
        ("orders tea --limit 3 -x", "there is no flag -x, see --help"),
        ("-n5 --lim 3", "the following arguments are required: topic"),
        ("--limit 3", "the following arguments are required: topic"),
        ("--limit 3 -n 5 -- ", "the following arguments are required: topic"),
    ],
)
def test_an_unknown_flag_comes_before_all_else(
    capsys: pytest.CaptureFixture[str], line: str, told: str, intermixed: bool
) -> None:
    made = parser()
    with pytest.raises(SystemExit) as end:
        (made.parse_intermixed_args if intermixed else made.parse_args)(line.split())
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"tool: error: {told}")


def test_words_behind_two_dashes_are_no_flags() -> None:
    assert parser().parse_args(["orders", "--", "--limti"]) == argparse.Namespace(
        topic="orders", bodies=["--limti"], limit=None, n=None
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("status --nsdq x", "flintmq pipeline status: error: there is no flag --nsdq, did you mean --nsqd?"),
        ("status --nsqd x --jsn", "flintmq pipeline status: error: there is no flag --jsn, did you mean --json?"),
        ("--nosuch", "flintmq pipeline: error: there is no flag --nosuch, see --help"),
        ("archiv", "flintmq pipeline: error: argument NAME: invalid choice: 'archiv', did you mean archive?"),
    ],
)
def test_a_subcommand_knows_its_own_flags(capsys: pytest.CaptureFixture[str], line: str, told: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["pipeline", *line.split()])
    assert capsys.readouterr().err.splitlines()[-1] == told


@pytest.mark.parametrize(
    ("given", "why", "remedy"),
    [
        ({"nsqd": []}, "Connection refused", "; start one with: flintmq up"),
        ({}, "Connection refused", "; start one with: flintmq up"),
        ({"nsqd": ["there:4150"]}, "Connection refused", ""),
        ({"lookupd": ["there:4161"]}, "Connection refused", ""),
        ({"nsqd": []}, "timed out", ""),
    ],
)
def test_a_pipeline_without_a_broker_says_how_to_start_one(given: dict[str, list[str]], why: str, remedy: str) -> None:
    told = f"nsqd 127.0.0.1:4150 cannot be reached: {why}"
    assert pipelines._remedy(argparse.Namespace(**given), told) == remedy


def test_a_pipeline_without_a_name_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["pipeline"])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("flintmq pipeline: error: the following arguments are required: NAME, one of archive, ")
    assert all(name in told for name in pipelines.PIPELINES)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--verison", "there is no command '--verison', did you mean --version?"),
        ("version", "there is no command 'version', did you mean --version?"),
        ("--hlep", "there is no command '--hlep', did you mean --help?"),
        ("topic crate orders", "argument ACTION: invalid choice: 'crate', did you mean create?"),
        ("peek orders/c --state in_fligt", "argument --state: invalid choice: 'in-fligt', did you mean in-flight?"),
        (
            "up --durability fsync",
            "there is no flag --durability, it is one of the broker alone: see flintmq nsqd --help",
        ),
        ("settings orders ttl=5s ttl=6s", "ttl is given twice"),
        ("settings orders ttl=5s --unset ttl", "ttl is given twice"),
        ("log orders --from 5 --to 2", "--to lies before --from"),
        ("log orders --from 2030-01-31T12:00:00Z --to 2030-01-31", "--to lies before --from"),
    ],
)
def test_a_slip_of_the_command_line_is_named(capsys: pytest.CaptureFixture[str], line: str, told: str) -> None:
    try:
        status = cli.main(line.split())
    except SystemExit as exc:
        status = exc.code  # type: ignore[assignment]
    assert (status, told in capsys.readouterr().err) == (2, True)


async def test_a_place_before_a_log_is_told_with_its_first_message() -> None:
    error = HttpError(410, "GONE: the log begins at 7, …", first=7)
    told = await _advice(NodeClient("127.0.0.1:4151"), error, argparse.Namespace(source="orders/billing"))
    assert told == "127.0.0.1:4151 has deleted the messages of orders before 7: begin there, or at earliest"


def test_help_and_a_command_is_the_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["help", "pub"])
    assert capsys.readouterr().out.startswith("usage: flintmq pub ")
