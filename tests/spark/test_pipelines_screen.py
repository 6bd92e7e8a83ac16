"""What pipelines write to standard error while they work, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from flintmq.spark.pipelines import common

PATIENCE = 60.0
#: Java, as far as its standard error goes: it begins inside of `words_of_java`, and goes on after it.
JAVA = """
import os, subprocess, sys, time
from flintmq.spark.pipelines import screen as screens

java = 'echo "WARNING: Using incubator modules" >&2; echo "an error of Java" >&2; sleep 1; echo "a later one" >&2'
with screens.Screen() as screen, screens.words_of_java():
    screen.report("starting Java")
    child = subprocess.Popen(["sh", "-c", java])
    time.sleep(0.5)
    screen.report("Java is there")
with screens.Screen("audit") as screen:
    for number in range(10):
        screen.show(f"step {number}")
        time.sleep(0.1)
child.wait()
time.sleep(0.2)
screens.say("the end")
"""


def on_a_terminal(*command: str) -> str:
    """Run a command with a terminal as its standard error, and return what a terminal got."""
    ours, its = pty.openpty()
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(its)
    got = b""
    give_up = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < give_up:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    got += os.read(ours, 1 << 16)
                except OSError:
                    break
        assert child.wait(PATIENCE) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    return got.decode()


def lines_left(text: str) -> list[str]:
    """Return the lines that stay on a terminal after all that was erased."""
    screen = [""]
    row = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            while len(screen) <= row:
                screen.append("")
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            screen[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            screen[row] += part
    return [line.rstrip() for line in screen if line.strip()]


def test_lines_of_java_come_above_the_line_that_changes() -> None:
    text = on_a_terminal(sys.executable, "-c", JAVA)
    assert lines_left(text) == ["an error of Java", "Java is there", "a later one", "the end"]
    assert "step 9" in text and "starting Java" in text


def test_without_a_terminal_lines_are_written_once_and_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", JAVA], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert sorted(done.stderr.splitlines()) == [
        "Java is there",
        "a later one",
        "an error of Java",
        "starting Java",
        "the end",
    ]
    assert done.stderr.startswith("starting Java\n") and done.stderr.endswith("the end\n")


def test_all_words_of_java_are_shown_where_they_are_asked_for() -> None:
    environment = os.environ | {"FLINTMQ_SPARK_LOG": "warn"}
    done = subprocess.run(
        [sys.executable, "-c", JAVA], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert "WARNING: Using incubator modules" in done.stderr.splitlines()


def test_the_first_line_of_an_error_of_java_is_its_reason() -> None:
    text = (
        "An error occurred while calling o63.load.\n: java.lang.IllegalStateException: no worker\n\tat org.apache.Spark"
    )
    assert common.explain(Exception(text)) == "IllegalStateException: no worker"


def test_ctrl_c_in_the_middle_of_a_query_is_one_line(spark_environment: None, tmp_path: Path) -> None:
    """At whatever moment it comes: Spark's own handler and py4j have traces for some."""
    program = """
import argparse, sys, time
from flintmq.spark.pipelines import audit, common, main, screen

def run(arguments):
    spark = common.open_session(arguments, "test")
    with screen.working("audit", "counting", spark.sparkContext.statusTracker()):
        print("working", flush=True)
        while True:
            spark.range(100_000).selectExpr("sum(id)").collect()

audit.run = run
sys.exit(main(["audit", "t", "--archive", "a"]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "working\n"
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
        child.wait()
    usual = re.compile(r"starting Spark|Spark .* started in|audit: counting")
    said = [line for line in errors.splitlines() if not usual.match(line)]
    assert said == ["flintmq pipeline audit: stopped"]
    assert child.returncode == 130
