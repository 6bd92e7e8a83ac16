"""What the documents say about tests and files is true: everything they name is there, and their examples work."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from conformance.cases import CASES
from conformance.http_cases import HTTP_CASES
from flintmq.broker.daemon import Broker
from flintmq.broker.storage.segment import FILE_HEADER, RECORD_HEADER
from support.nsq_client import NsqClient

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
SOURCE = REPOSITORY / "src" / "flintmq"
COMPATIBILITY = (DOCS / "nsq-compatibility.md").read_text()
ARCHITECTURE = (DOCS / "architecture.md").read_text()

TRAPS = 67
VERDICTS = ("same", "better", "does not apply", "not yet")
#: path::name, and for a recorded conversation its name in brackets.
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^`]+)\])?`")


def names_of_tests(path: Path) -> set[str]:
    """The test functions of a file, those in classes included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def rows(text: str) -> list[list[str]]:
    """The cells of every table row that begins with a number."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    return [row for row in found if row[0].isdigit()]


# --- nsq-compatibility.md ---------------------------------------------------------------------------------------------


def test_every_test_that_is_named_exists() -> None:
    named = NAMED_TEST.findall(COMPATIBILITY)
    assert len(named) > TRAPS
    missing = [f"{path}::{name}" for path, name, _ in named if name not in names_of_tests(REPOSITORY / path)]
    assert missing == []


def test_every_conversation_that_is_named_is_recorded() -> None:
    known = {case.name for case in (*CASES, *HTTP_CASES)}
    named = {conversation for _, _, conversation in NAMED_TEST.findall(COMPATIBILITY) if conversation}
    assert named
    assert sorted(named - known) == []


def test_a_name_in_another_form_is_not_passed_over() -> None:
    """Whatever looks like the name of a test is one that was looked up."""
    assert COMPATIBILITY.count("tests/") == len(NAMED_TEST.findall(COMPATIBILITY))


def test_every_trap_is_there_once_with_a_verdict() -> None:
    traps = rows(COMPATIBILITY)
    assert [int(row[0]) for row in traps] == list(range(1, TRAPS + 1))
    assert [row[0] for row in traps if len(row) != 4 or row[2] not in VERDICTS] == []


def test_what_is_claimed_of_a_trap_is_shown() -> None:
    assert [row[0] for row in rows(COMPATIBILITY) if row[2] in ("same", "better") and "::" not in row[3]] == []


# --- architecture.md --------------------------------------------------------------------------------------------------


def test_every_package_is_in_the_architecture() -> None:
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    listed = set(re.findall(r"`([\w/.]+)`", "".join(re.findall(r"^\| (`.*?) \|", ARCHITECTURE, re.MULTILINE))))
    assert sorted((packages | modules) - listed) == []


def test_every_file_in_the_architecture_exists() -> None:
    named = set(re.findall(r"[\w./-]+\.(?:py|pyi|pxd|md)\b", ARCHITECTURE))
    assert named
    # The broker's rows name files beside its daemon, and of its HTTP API, without their folder.
    places = (SOURCE, REPOSITORY, DOCS, SOURCE / "broker", SOURCE / "broker" / "http")
    assert sorted(name for name in named if not any((place / name).is_file() for place in places)) == []


def methods_of_the_source() -> set[str]:
    """Every ``Class.method`` of the package, inherited ones too, and every ``module.function``."""
    found: set[str] = set()
    classes: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found |= {f"{path.stem}.{f.name}" for f in tree.body if isinstance(f, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                functions = {f.name for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
                classes.setdefault(node.name, set()).update(functions)
                bases.setdefault(node.name, []).extend(base.id for base in node.bases if isinstance(base, ast.Name))

    def with_inherited(name: str) -> set[str]:
        return classes.get(name, set()).union(*(with_inherited(base) for base in bases.get(name, []) if base != name))

    return found | {f"{name}.{method}" for name in classes for method in with_inherited(name)}


def test_every_method_in_a_diagram_exists() -> None:
    diagrams = "".join(re.findall(r"^```\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL))
    named = set(re.findall(r"\b([A-Z]\w+\.\w+)\b", diagrams))
    named |= set(re.findall(r"^ +([a-z]\w+\.\w+) {2,}", diagrams, re.MULTILINE))
    assert len(named) > 25 and "commands.run" in named
    assert sorted(named - methods_of_the_source()) == []


# --- Links and examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


async def publish(broker: Broker, *bodies: bytes) -> None:
    async with NsqClient.to(broker.tcp_address) as client:
        for body in bodies:
            # Each waits for its answer, so that each is a record of its own.
            await client.publish_many("t", body)


async def test_a_file_that_was_set_aside_is_read_as_the_documents_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker(data_path=tmp_path, disk_reserve=0) as broker:
        await publish(broker, b"damaged", b"first whole one", b"second whole one")
    [segment] = (tmp_path / "flintmq" / "topics").glob("*/*.seg")
    with open(segment, "r+b") as file:
        file.write(bytes(FILE_HEADER + RECORD_HEADER))
    async with Broker(data_path=tmp_path, disk_reserve=0):
        pass
    aside = segment.with_suffix(".bad")
    assert aside.exists()

    [script] = re.findall(r"```python\n(.*?)```", (DOCS / "storage.md").read_text(), re.DOTALL)
    monkeypatch.setattr(sys, "argv", ["read_bad.py", str(aside)])
    exec(compile(script, "storage.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [repr(b"first whole one"), repr(b"second whole one")]
