"""``python -m tests.spark.tutorial``: time the first half of docs/spark-tutorial.md on a machine without Java.

    --install  begin with a new environment and pip's downloads; else with this Python's packages
    --image    also take the picture of its chart for the docs

The commands run one after the other as a reader types them, with an empty HOME, in a network of their own, and with a
PATH that has everything but Java, which is that of `flintmq[java]`. The last line has the load of the machine: on one
that does other things these are not the times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support.examples import OWN_NETWORK, bring_up_loopback  # noqa: E402

ORDERS = r"""seq 30000 | awk '{printf "{\"id\": %d, \"country\": \"%s\", \"amount\": %d}\n", """
ORDERS += r"""$1, $1 % 3 ? "de" : $1 % 2 ? "fr" : "it", $1 % 50}' > orders.txt"""
CHART = "orders.html"
#: A guard against hanging, in seconds.
PATIENCE = 600


class Tutorial:
    """The steps, in an empty folder."""

    def __init__(self, home: Path, python: Path) -> None:
        self._home, self._python = home, python
        programs = home / ".programs"
        programs.mkdir()
        for path in Path("/usr/bin").iterdir():
            if not path.name.startswith("java"):
                (programs / path.name).symlink_to(path)
        self._environment = {
            "HOME": str(home),
            "PATH": f"{python.parent}:{programs}",
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
        }
        if python == Path(sys.executable):
            self._environment["PYTHONPATH"] = str(ROOT / "src")
        self._total = 0.0
        assert subprocess.run(["bash", "-c", "command -v java"], env=self._environment, check=False).returncode == 1

    def run(self) -> None:
        up = self._start("up", output=subprocess.DEVNULL)
        try:
            self._step("flintmq up", lambda: self._wait(lambda: _answers("http://127.0.0.1:4151/ping")))
            self._command(["bash", "-c", ORDERS])
            self._step("pub", lambda: self._flintmq("pub", "orders", "--file", "orders.txt", "--rate", "1000"))
            archive = ("pipeline", "archive", "orders", "--to", "archive", "--once")
            self._step("archive", lambda: self._flintmq(*archive))
            self._step("metrics, to the chart", self._chart)
            self._step(
                "audit", lambda: self._flintmq("pipeline", "audit", "orders", "--archive", "archive", "--complete")
            )
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
        _say(f"{self._total:6.1f} s  together, load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")

    def _step(self, name: str, work: Callable[[], object]) -> None:
        begun = time.monotonic()
        work()
        took = time.monotonic() - begun
        self._total += took
        _say(f"{took:6.1f} s  {name}")

    def _chart(self) -> None:
        words = ("pipeline", "metrics", "orders", "--window", "2s", "--path", "$.country", "--plot", CHART)
        process = self._start(*words, output=subprocess.DEVNULL)
        # There is a page without windows at first.
        chart = self._home / CHART
        self._wait(lambda: process.poll() is not None or (chart.exists() and '"fr"' in chart.read_text()))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) in (0, 130)

    def _wait(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < give_up, "it takes too long"
            time.sleep(0.1)

    def _start(self, *words: str, output: int) -> subprocess.Popen[bytes]:
        command = [str(self._python), "-m", "flintmq", *words]
        return subprocess.Popen(command, cwd=self._home, env=self._environment, stdout=output, stderr=output)

    def _flintmq(self, *words: str) -> None:
        self._command([str(self._python), "-m", "flintmq", *words])

    def _command(self, words: list[str]) -> None:
        subprocess.run(
            words, cwd=self._home, env=self._environment, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL
        )


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def install(folder: Path) -> Path:
    """Make a new environment with what the page asks for; return its Python."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    wanted = [f"{ROOT}[spark,java]", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *wanted], check=True)
    _say(f"{time.monotonic() - begun:6.1f} s  venv and pip install")
    return python


def picture(chart: Path) -> None:
    """The chart as the docs show it."""
    from playwright.sync_api import sync_playwright

    from browser.screenshots import CHROMIUM, IMAGES, shrink

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 760}, color_scheme="light", timezone_id="UTC")
        page.goto(chart.as_uri())
        page.mouse.move(620, 560)
        page.screenshot(path=IMAGES / "tutorial-chart.png")
        browser.close()
    shrink(IMAGES / "tutorial-chart.png")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.tutorial", description=__doc__.partition("\n")[0])
    parser.add_argument("--image", action="store_true", help="take the picture of the chart")
    parser.add_argument("--install", action="store_true", help="begin with pip install, and count it")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        bring_up_loopback()
        Tutorial(arguments.inside, arguments.python).run()
        return 0
    with tempfile.TemporaryDirectory(prefix="flintmq-tutorial-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        begun = time.monotonic()
        python = install(Path(folder) / "venv") if arguments.install else arguments.python
        words = [*OWN_NETWORK, sys.executable, "-m", "tests.spark.tutorial", "--inside", str(home)]
        words += ["--python", str(python)]
        status = subprocess.run(words, cwd=ROOT, env=os.environ, check=False).returncode
        _say(f"{time.monotonic() - begun:6.1f} s  from the first command to the last")
        if status == 0 and arguments.image:
            shutil.copy(home / CHART, home / "chart.html")
            picture(home / "chart.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
