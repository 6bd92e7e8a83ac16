"""A misspelt flag of one of our commands is named, whatever else is wrong with the line."""

from __future__ import annotations

import argparse

import pytest

from flintmq import cli
from flintmq.spark import pipelines
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
        ("", "flintmq pipeline: error: the following arguments are required: NAME"),
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
