"""Who may import whom. A new arrow fails here first, so that it is drawn on purpose or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flintmq"

# A room may import the rooms beside it here, and what those may import.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "kernel": set(),
    "wire": {"errors", "kernel"},
    "compression": {"errors"},
    "options": {"errors"},
    "web": {"errors"},
    "logs": {"errors"},
    "cluster": {"options", "web"},
    "client": {"wire", "compression", "cluster"},
    "sync": {"client"},
    "compat": {"client"},
    "tools": {"client", "cluster"},
    "spark": {"client", "cluster", "kernel"},
    "broker": {"kernel", "wire", "compression", "web", "options"},
    "lookup": {"wire", "web", "options"},
    "admin": {"cluster"},
}
# These stand above the others: the command line and the test plugin bring rooms together, and `flintmq` itself
# (with what it starts the kernel with) names what is public.
ANYTHING = {"cli", "testing", "__init__", "__main__", "_cython"}
# Whom nobody but the above may import.
DAEMONS = {"broker", "lookup", "admin"}


class Import(NamedTuple):
    module: str
    line: int
    #: Not at run time of the module itself: inside a function, or for type checkers only.
    late: bool


def imports_of(source: str, module: str) -> Iterator[Import]:
    """Every import in a source, `from x import y` as x.y: y may be a module. `module` is the importing one."""

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, late)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *filter(None, [base])])
            for name in node.names:
                yield Import(f"{base}.{name.name}", node.lineno, late)
        for child in ast.iter_child_nodes(node):
            is_for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, late or is_for_checkers or in_function)

    yield from visit(ast.parse(source), False)


def room_of(module: str) -> str | None:
    """The room of one of our modules; None for foreign ones and for names of the package itself."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    return room if package == "flintmq" and room in ARROWS.keys() | ANYTHING else None


def allowed(room: str) -> set[str]:
    """A room, what it may import, and so on."""
    found = {room}
    for other in ARROWS[room]:
        found |= allowed(other)
    return found


def wrong_arrows(source: str, module: str) -> list[str]:
    room = room_of(module)
    if room is None or room in ANYTHING:
        return []
    wrong = []
    for found in imports_of(source, module):
        target = room_of(found.module)
        if target is not None and target not in allowed(room):
            wrong.append(f"{module}, line {found.line}: {room} may not import {found.module}")
    return wrong


def module_name(path: Path) -> str:
    return ".".join(["flintmq", *path.relative_to(SOURCE).with_suffix("").parts])


MODULES = [pytest.param(path, id=module_name(path)) for path in sorted(SOURCE.rglob("*.py"))]


@pytest.mark.parametrize("path", MODULES)
def test_only_allowed_arrows(path):
    assert wrong_arrows(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize("path", MODULES)
def test_every_room_has_its_place_in_the_table(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in ARROWS.keys() | ANYTHING, f"say who may import {room}"


@pytest.mark.parametrize("path", MODULES)
def test_only_spark_imports_pyspark(path):
    if room_of(module_name(path)) != "spark":
        found = {module.module.partition(".")[0] for module in imports_of(path.read_text(), module_name(path))}
        assert "pyspark" not in found


@pytest.mark.parametrize("room", ["wire", "kernel", "compression"])
def test_the_protocol_knows_neither_event_loops_nor_logs(room):
    found = {
        name.module.partition(".")[0] for name in imports_of((SOURCE / f"{room}.py").read_text(), f"flintmq.{room}")
    }
    assert not found & {"asyncio", "logging"}


def test_the_command_line_imports_what_is_heavy_inside_its_commands():
    rooms = {
        room_of(found.module) for found in imports_of((SOURCE / "cli.py").read_text(), "flintmq.cli") if not found.late
    }
    assert rooms <= {"errors", "options", "logs", None}


def test_daemons_import_neither_each_other_nor_the_client():
    for daemon in DAEMONS:
        assert not allowed(daemon) & (DAEMONS - {daemon} | {"client"})
    for room in ARROWS.keys() - DAEMONS:
        assert not allowed(room) & DAEMONS


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flintmq.broker.topic", "from flintmq.client import producer"),
        ("flintmq.broker.topic", "import flintmq.lookup.daemon"),
        ("flintmq.broker.topic", "from flintmq import cli"),
        ("flintmq.broker.topic", "from ..client.producer import Producer"),
        ("flintmq.broker.topic", "def late():\n    from flintmq.admin import daemon"),
        ("flintmq.broker.topic", "if TYPE_CHECKING:\n    from flintmq.tools.pub import main"),
        ("flintmq.wire", "from .options import NsqdOptions"),
        ("flintmq.client.connection", "from flintmq.broker import session"),
    ],
)
def test_a_wrong_arrow_is_found_however_it_is_written(module, source):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flintmq.broker.topic", "from flintmq.broker.log import Log"),
        ("flintmq.broker.topic", "from .log import Log"),
        ("flintmq.broker.topic", "from flintmq import __version__, wire"),
        ("flintmq.tools.pub", "from flintmq.options import parse_duration"),
        ("flintmq.cli", "from flintmq.broker.daemon import Broker"),
        ("flintmq.wire", "import flint_client"),
    ],
)
def test_a_right_arrow_is_let_through(module, source):
    assert wrong_arrows(source, module) == []
