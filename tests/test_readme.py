"""The README: its programs run as they are pasted, its commands print what it shows, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from flintmq.testing import NsqBroker

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAM, TEST, SPARK = (text for kind, text in BLOCKS if kind == "python")
#: A guard against hanging, nowhere a measure.
PATIENCE = 60


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_program_runs_beside_the_platform_and_once_more(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # As `./scripts/up` leaves it: a reader has it running by then.
    (tmp_path / "flintmq-data").mkdir()
    with NsqBroker(data_path=tmp_path / "flintmq-data"):
        for _ in range(2):
            assert run(sys.executable, "-W", "error", "program.py", folder=tmp_path) == "hello\n"


def test_the_test_passes(tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(TEST)
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path)


def test_the_commands_print_what_is_shown(tmp_path: Path) -> None:
    [shown] = [text for kind, text in BLOCKS if kind == "console" and "flintmq pub" in text]
    commands: list[tuple[str, str]] = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    with NsqBroker() as broker:
        for command, output in commands:
            program, *words = shlex.split(command)
            if program == "source":
                continue
            printed = run(sys.executable, "-m", program, *words, "--nsqd", broker.address, folder=tmp_path)
            assert re.sub(r"\d\.\d\d s", "0.00 s", printed) == output
    assert [command.split()[0] for command, _ in commands] == ["source", "flintmq", "flintmq"]


def test_the_samples_of_scripts_up_have_a_topic_that_no_example_reads() -> None:
    # It is read from the source: this test needs no Spark.
    source = (ROOT / "src" / "flintmq" / "spark" / "pipelines" / "sample.py").read_text()
    [topic] = re.findall(r'^TOPIC = "(.+)"$', source, re.MULTILINE)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [(page.name, block) for page in pages for block in re.findall(r"```.*?```", page.read_text(), re.DOTALL)]
    named = re.compile(rf"(?<![\w.-]){re.escape(topic)}(?![\w-])")
    assert [(name, block) for name, block in blocks if named.search(block)] == []


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", README)
    targets = [first or second for first, second in links]
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []
    docs = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert docs <= set(targets), "every page of the docs can be found from the README"
