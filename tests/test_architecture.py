"""Who may import whom, how large a module or a class may be, and who may call the system.

A new arrow fails here first, so that it is drawn on purpose or not at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flintmq"

# A layer is a module or a package; the longest name that fits counts. It may import the layers beside it here, and what
# those may import.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "system": {"addresses"},
    "addresses": {"errors"},
    "kernel": set(),
    "protocol": {"errors", "addresses", "kernel"},
    "durations": set(),
    "garbage": set(),
    "options": {"errors", "addresses", "durations"},
    "usage": {"options"},
    "http": {"protocol"},
    "logs": {"errors"},
    "cluster": {"options", "http", "protocol"},
    "client": {"protocol", "cluster"},
    "sync": {"client"},
    "compat": {"client"},
    "tools": {"client", "cluster", "logs", "usage"},
    "spark.shipped": {"errors", "addresses", "kernel"},
    "spark.log_mode": {"spark.shipped"},
    "spark.spool_mode": {"spark.shipped"},
    "spark": {"client", "cluster", "usage", "spark.log_mode", "spark.spool_mode"},
    "broker.storage": {"system", "protocol", "http", "options"},
    "broker.settings": {"broker.storage"},
    "broker.limits": {"broker.storage"},
    "broker.delivery": {"broker.settings", "broker.limits"},
    "broker.net": {"broker.delivery"},
    "broker.observe": {"broker.delivery", "logs"},
    "broker.stage": {"broker.delivery"},
    "broker.http": {"broker.delivery", "broker.net", "broker.observe", "broker.stage"},
    "broker": {"broker.http"},
    "lookup": {"system", "protocol", "http", "options", "cluster"},
    "admin": {"cluster", "logs"},
}
# These stand above the others: the command line and the test plugin bring layers together, and `flintmq` itself
# names what is public.
ANYTHING = {"cli", "testing", "__init__", "__main__"}
# Whom nobody but the above may import.
DAEMONS = {"broker", "lookup", "admin"}


class Import(NamedTuple):
    module: str
    line: int
    #: Not at run time of the module itself: inside a function, or for type checkers only.
    late: bool
    #: For type checkers only.
    for_types: bool = False


@cache
def imports_of(source: str, module: str) -> list[Import]:
    """Every import in a source, `from x import y` as x.y: y may be a module. `module` is the importing one."""

    def visit(node: ast.AST, late: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, late, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *filter(None, [base])])
            for name in node.names:
                yield Import(f"{base}.{name.name}", node.lineno, late, for_types)
        for child in ast.iter_child_nodes(node):
            is_for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, late or is_for_checkers or in_function, for_types or is_for_checkers)

    return list(visit(ast.parse(source), False, False))


def layer_of(module: str) -> str | None:
    """The layer of one of our modules; None for foreign ones and for names of the package itself."""
    package, *names = module.split(".")
    if package != "flintmq":
        return None
    for length in range(len(names), 0, -1):
        layer = ".".join(names[:length])
        if layer in ARROWS or layer in ANYTHING:
            return layer
    return None


def allowed(layer: str) -> set[str]:
    """A layer, the layers it may import, and so on."""
    found = {layer}
    for other in ARROWS[layer]:
        found |= allowed(other)
    return found


def is_inside(layer: str, target: str) -> bool:
    """Do both belong to the same program? There, a type may be named that is above the layer which names it."""
    return layer.partition(".")[0] == target.partition(".")[0]


def wrong_arrows(source: str, module: str) -> list[str]:
    layer = layer_of(module)
    if layer is None or layer in ANYTHING:
        return []
    wrong = []
    for found in imports_of(source, module):
        target = layer_of(found.module)
        if target is None or target in allowed(layer) or (found.for_types and is_inside(layer, target)):
            continue
        wrong.append(f"{module}, line {found.line}: {layer} may not import {found.module}")
    return wrong


def module_name(path: Path) -> str:
    return ".".join(["flintmq", *path.relative_to(SOURCE).with_suffix("").parts])


MODULES = [pytest.param(path, id=module_name(path)) for path in sorted(SOURCE.rglob("*.py"))]


@pytest.mark.parametrize("path", MODULES)
def test_only_allowed_arrows(path):
    assert wrong_arrows(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize("path", MODULES)
def test_every_layer_has_its_place_in_the_table(path):
    assert path == SOURCE / "__init__.py" or layer_of(module_name(path)), f"say who may import {module_name(path)}"


@pytest.mark.parametrize("path", MODULES)
def test_only_spark_imports_pyspark(path):
    if layer_of(module_name(path)) != "spark":
        found = {module.module.partition(".")[0] for module in imports_of(path.read_text(), module_name(path))}
        assert "pyspark" not in found


@pytest.mark.parametrize("path", [path for path in MODULES if layer_of(str(path.id)) in ("protocol", "kernel")])
def test_the_protocol_knows_neither_event_loops_nor_logs(path):
    found = {name.module.partition(".")[0] for name in imports_of(path.read_text(), module_name(path))}
    assert not found & {"asyncio", "logging"}


def test_the_command_line_imports_what_is_heavy_inside_its_commands():
    layers = {
        layer_of(found.module) for found in imports_of((SOURCE / "cli.py").read_text(), "flintmq.cli") if not found.late
    }
    assert layers <= {"errors", "garbage", "options", "logs", None}


def test_daemons_import_neither_each_other_nor_the_client():
    for daemon in DAEMONS:
        programs = {layer.partition(".")[0] for layer in allowed(daemon)}
        assert not programs & (DAEMONS - {daemon} | {"client"})
    for layer in ARROWS:
        if layer.partition(".")[0] not in DAEMONS:
            assert not {other.partition(".")[0] for other in allowed(layer)} & DAEMONS


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flintmq.broker.daemon", "from flintmq.client import producer"),
        ("flintmq.broker.daemon", "import flintmq.lookup.daemon"),
        ("flintmq.broker.daemon", "from flintmq import cli"),
        ("flintmq.broker.daemon", "from ..client.producer import Producer"),
        ("flintmq.broker.daemon", "def late():\n    from flintmq.admin import daemon"),
        ("flintmq.broker.daemon", "if TYPE_CHECKING:\n    from flintmq.tools.pub import main"),
        ("flintmq.broker.storage.log", "from flintmq.broker.delivery.topic import Topic"),
        ("flintmq.broker.delivery.topic", "from flintmq.broker.net import session"),
        ("flintmq.broker.delivery.topic", "def late():\n    from flintmq.broker.daemon import Broker"),
        ("flintmq.protocol.wire", "from ..options import NsqdOptions"),
        ("flintmq.client.connection", "from flintmq.broker import session"),
    ],
)
def test_a_wrong_arrow_is_found_however_it_is_written(module, source):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flintmq.broker.delivery.topic", "from flintmq.broker.storage.log import Log"),
        ("flintmq.broker.delivery.topic", "from .channel import Channel"),
        ("flintmq.broker.delivery.topic", "if TYPE_CHECKING:\n    from flintmq.broker.daemon import Broker"),
        ("flintmq.broker.delivery.topic", "from flintmq import __version__"),
        ("flintmq.tools.pub", "from flintmq.options import parse_duration"),
        ("flintmq.cli", "from flintmq.broker.daemon import Broker"),
        ("flintmq.protocol.wire", "import flint_client"),
    ],
)
def test_a_right_arrow_is_let_through(module, source):
    assert wrong_arrows(source, module) == []


# --- Sizes -----------------------------------------------------------------------------------------------------------

#: Lines of a module, and attributes of a class, from which on its docstring says why: in a line that begins so.
MOST_LINES = 800
MOST_ATTRIBUTES = 30
REASON = "Size: "


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """The attributes of a class's objects: slots, fields, and whatever a method assigns to ``self``."""
    found: set[str] = set()
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign) and any(ast.unparse(target) == "__slots__" for target in node.targets):
            found |= {str(name.value) for name in ast.walk(node.value) if isinstance(name, ast.Constant)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def gives_a_reason(definition: ast.ClassDef | ast.Module) -> bool:
    return any(line.startswith(REASON) for line in (ast.get_docstring(definition) or "").splitlines())


class Sizes(NamedTuple):
    #: Too large, without a reason.
    unexplained: set[str]
    #: A reason, but not too large.
    needless: set[str]


def sizes_of(source: str, module: str) -> Sizes:
    tree = ast.parse(source)
    sizes = Sizes(set(), set())
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = [(module, tree, len(source.splitlines()) > MOST_LINES)]
    found += [(f"{module}.{node.name}", node, len(attributes_of(node)) > MOST_ATTRIBUTES) for node in definitions]
    for name, definition, is_large in found:
        if is_large and not gives_a_reason(definition):
            sizes.unexplained.add(name)
        elif not is_large and gives_a_reason(definition):
            sizes.needless.add(name)
    return sizes


@pytest.mark.parametrize("path", MODULES)
def test_a_large_module_or_class_says_why_it_is_one(path):
    sizes = sizes_of(path.read_text(), module_name(path))
    assert sizes == (set(), set())


def a_class(attributes: int, docstring: str = "") -> str:
    """The source of a class that has so many attributes, a third of each kind."""
    a, b = attributes // 3, 2 * attributes // 3
    slots = ", ".join(f'"s{i}"' for i in range(a))
    fields = "".join(f"    f{i}: int = 0\n" for i in range(a, b))
    assigned = "".join(f"        self.a{i}, _ = 0, self.read{i}\n" for i in range(b, attributes))
    return f'class Large:\n    """{docstring}"""\n    __slots__ = ({slots},)\n{fields}    def f(self):\n{assigned}'


@pytest.mark.parametrize("attributes", [3, MOST_ATTRIBUTES, MOST_ATTRIBUTES + 1, 100])
def test_attributes_are_counted(attributes):
    explained = "Is one thing.\n\n    Size: nothing of it could be elsewhere.\n    "
    is_large = attributes > MOST_ATTRIBUTES
    assert sizes_of(a_class(attributes), "m").unexplained == ({"m.Large"} if is_large else set())
    assert sizes_of(a_class(attributes, explained), "m") == (set(), set() if is_large else {"m.Large"})


@pytest.mark.parametrize("lines", [3, MOST_LINES, MOST_LINES + 1])
def test_lines_are_counted(lines):
    is_large = lines > MOST_LINES
    assert sizes_of("x = 1\n" * lines, "m").unexplained == ({"m"} if is_large else set())
    explained = '"""Does it.\n\nSize: for speed.\n"""\n' + "x = 1\n" * (lines - 4)
    assert lines < 4 or sizes_of(explained, "m") == (set(), set() if is_large else {"m"})


# --- System calls -----------------------------------------------------------------------------------------------------

#: Calls that the broker makes through the table in ``flintmq.system`` alone, which tests replace.
THROUGH_THE_TABLE = {
    "os": {
        *("open", "close", "read", "write", "pread", "preadv", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate"),
        *("truncate", "posix_fallocate", "rename", "replace", "link", "unlink", "remove", "mkdir", "makedirs", "rmdir"),
        *("listdir", "scandir", "stat", "fstat", "statvfs", "urandom", "getrandom"),
    },
    "socket": {"gethostname"},
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "clock_gettime_ns", "sleep"},
    "select": {"epoll", "poll"},
    "fcntl": {"flock", "lockf"},
    "shutil": {"rmtree", "move", "copyfile", "copy", "copytree", "disk_usage"},
    "secrets": {"token_bytes", "token_hex", "randbelow"},
    "": {"open"},
}
#: Modules of the broker that make such calls themselves, and why.
DIRECT = {
    "flintmq.broker.backup": "runs in the process of `flintmq backup`, beside a broker or without one",
    "flintmq.broker.leftovers": "runs in the process of `flintmq recover`, without a broker",
    "flintmq.broker.takeover": "reads another program's files before there is a data path",
    "flintmq.broker.http.debug": "measures this process",
    "flintmq.broker.observe.stats": "reads /proc of this process",
    "flintmq.broker.http.lane": "shows the date in answers",
    "flintmq.broker.net.upgrade": "asks a socket whether its client has left",
}


def direct_calls(source: str) -> list[str]:
    """Every use of a call that goes through the table, however it was imported."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    names = {"open": "open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {name.asname or name.name: name.name for name in node.names if name.name in THROUGH_THE_TABLE}
        elif isinstance(node, ast.ImportFrom) and node.module in THROUGH_THE_TABLE:
            forbidden = THROUGH_THE_TABLE[node.module]
            names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names if n.name in forbidden}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            module = aliases[node.value.id]
            if node.attr in THROUGH_THE_TABLE[module]:
                found.append(f"line {node.lineno}: {module}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            found.append(f"line {node.lineno}: {names[node.func.id]}")
    return found


@pytest.mark.parametrize("path", [path for path in MODULES if str(path.id).startswith("flintmq.broker.")])
def test_the_broker_calls_the_system_through_its_table(path):
    found = direct_calls(path.read_text())
    if module_name(path) in DIRECT:
        assert found, "it makes no such call: take it from the list"
    else:
        assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.rename(a, b)",
        "import os as system\nfd = system.open(a, 0)",
        "from os import urandom\nurandom(4)",
        "from time import time as now\nnow()",
        "import time\nclock = time.monotonic",
        "import socket\nsocket.gethostname()",
        "with open(path) as file: pass",
    ],
)
def test_a_direct_call_is_found_however_it_is_written(source):
    assert len(direct_calls(source)) == 1


@pytest.mark.parametrize(
    "source",
    ["import os\nos.fspath(p)", "disk.open(p)", "self.open()", "system.rename(a, b)", "import time\ntime.strftime(x)"],
)
def test_other_calls_are_let_through(source):
    assert direct_calls(source) == []
