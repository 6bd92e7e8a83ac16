"""`scripts/prose` finds what it is for, in pages and in help texts, and lets plain sentences pass."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "prose"
LONG = "The broker " + "writes and " * 17 + "syncs."


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("prose", str(SCRIPT))
    spec = importlib.util.spec_from_loader("prose", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def help_of(monkeypatch: pytest.MonkeyPatch, description: str, title: str, help: str) -> str:
    monkeypatch.setenv("COLUMNS", "10000")
    parser = argparse.ArgumentParser("program", description=description)
    parser.add_argument_group(title).add_argument("--flag", metavar="VALUE", help=help)
    return parser.format_help()


@pytest.mark.parametrize(
    ("description", "title", "help", "found"),
    [
        ("Copy a file.", "the source", "a file to copy (default so many)", ""),
        ("What is lost is named.", "the source", "a file", "the subject must be a thing"),
        (LONG, "the source", "a file", "37 words"),
        ("Copy a file.", "how it runs", "a file", "not a noun phrase"),
        ("Copy a file.", "over the network", "a file", "not a noun phrase"),
        ("Copy a file.", "further", "a file", "not a noun phrase"),
        ("Copy a file.", "more than one file", "a file", ""),
        ("Copy a file.", "the source", "end after so many files", "say the number or the unit"),
        ("Copy a file.", "the source", f"a file. {LONG}", "37 words"),
    ],
)
def test_a_help_text(
    prose: ModuleType, monkeypatch: pytest.MonkeyPatch, description: str, title: str, help: str, found: str
) -> None:
    text = help_of(monkeypatch, description, title, help)
    problems = [problem.text for problem in prose.problems("program", prose.prose_of_help(text))]
    assert len(problems) == (1 if found else 0)
    assert found in "".join(problems)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Storage\n\nThe broker deletes the segment.\n", ""),
        ("# What is kept\n", "not a noun phrase"),
        (f"{LONG}\n", "37 words"),
        ("Old segments go.\n", "write: is deleted"),
        ("```\nWhoever reads this is code.\n```\n", ""),
    ],
)
def test_a_page(prose: ModuleType, text: str, found: str) -> None:
    problems = [problem.text for problem in prose.problems("page", prose.prose_of(text))]
    assert len(problems) == (1 if found else 0)
    assert found in "".join(problems)


def test_every_command_is_asked_for_its_help(prose: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = dict(prose.help_texts())
    assert {"flintmq", "flintmq up", "flintmq nsqd", "flintmq pub", "flintmq pipeline archive"} <= set(texts)
    assert len(texts) > 30
    assert all("usage" in text.lower() for text in texts.values())


WIDE = "a word `and code` " * 8
COMMENT = f"<!-- setup: first\n{WIDE}\n-->"


@pytest.mark.parametrize(
    ("page", "wrapped"),
    [
        (f"{WIDE}\n", 2),
        (f"- {WIDE}\n  and more\n", 2),
        (f"> {WIDE}\n", 2),
        (f"| {WIDE} | {WIDE} |\n", 1),
        (f"```\n{WIDE}\n```\n", 3),
        (f"{COMMENT}\n", 3),
        ("a word " * 14 + "- 1. and more\n", 2),
    ],
)
def test_a_page_is_wrapped_and_says_the_same(prose: ModuleType, page: str, wrapped: int) -> None:
    lines = prose.wrapped(page).splitlines()
    assert len(lines) == wrapped
    words = [word for line in lines for word in line.removeprefix("> ").split()]
    assert words == page.removeprefix("> ").split()
    assert bool(list(prose.wide_lines("page", page))) == (prose.wrapped(page) != page)
    assert list(prose.wide_lines("page", prose.wrapped(page))) == []
    # What Markdown would take for a list begins no line.
    assert not any(line.startswith(("- 1.", "1. ")) for line in lines[1:])
