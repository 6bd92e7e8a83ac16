"""The comparison with other brokers, the durable rates and the cost curves: small runs of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
TIMEOUT = 110
SYSTEMS = ("flintmq", "nsqd", "jetstream", "redis", "rabbitmq", "kafka")

#: They build a Go program of many modules, start brokers and measure for minutes.
measures = pytest.mark.skipif(
    os.environ.get("FLINTMQ_EXHAUSTIVE") != "1", reason="FLINTMQ_EXHAUSTIVE=1 runs the comparisons themselves"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    cli = pytest.importorskip("flintmq.cli", exc_type=ImportError)
    # The benchmark starts the broker by module name: let it find the package that this test runs with.
    paths = [str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def go_client() -> None:
    from bench.errors import StartError
    from bench.peers import generator

    try:
        generator.build()
    except StartError as exc:
        pytest.skip(str(exc).splitlines()[0] + " " + str(exc).splitlines()[-1])


def bench(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@measures
@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_small_run_measures_every_figure_of_a_system(
    name: str, go_client: None, environment: dict[str, str], tmp_path: Path
) -> None:
    from bench.peers.measure import METRICS
    from bench.peers.systems import SYSTEMS

    system = SYSTEMS[name]
    if system.version() is None:
        pytest.skip(f"{system.title} is missing: {system.get}")
    output = tmp_path / "peers.json"
    arguments = ("bench", "--peers", "--quick", "--repeat=1", f"--only={name}", f"--json={output}")
    answer = bench(environment, *arguments)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = read(output)
    [sample] = result["samples"]
    assert set(sample["figures"]) == set(METRICS)
    assert all(value > 0 for value in sample["figures"].values())
    [client] = result["clients"]
    assert client["client"].split()[1].startswith("v")
    assert system.acknowledged in answer.stdout


@measures
def test_a_missing_system_is_named_with_the_way_to_install_it(
    go_client: None, environment: dict[str, str], tmp_path: Path
) -> None:
    empty = environment | {"FLINTMQ_PEERS": str(tmp_path)}
    answer = bench(empty, "bench", "--peers", "--only=nsqd,kafka", "--repeat=1", "--quick")
    assert answer.returncode == 0, answer.stderr
    assert "nsqd is missing: scripts/peers (needs Go)" in answer.stderr
    assert "Kafka is missing: python -m bench --peers --get" in answer.stderr
    assert "- nsqd was not there: scripts/peers" in answer.stdout


def test_an_unknown_system_is_refused_with_the_known_names(environment: dict[str, str]) -> None:
    answer = bench(environment, "bench", "--peers", "--only=flintmq,pulsar")
    assert answer.returncode == 2
    assert "'pulsar' is none of flintmq, nsqd, jetstream, redis, rabbitmq, kafka" in answer.stderr


@measures
def test_a_comparison_that_is_killed_ends_its_broker_and_removes_its_data(
    go_client: None, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bench", "--peers", "--only=flintmq", "--repeat=1"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + TIMEOUT
        while not list(tmp_path.glob("flintmq-bench-*/data")):
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.terminate()
        assert process.wait(TIMEOUT) == 130
    assert list(tmp_path.glob("flintmq-bench-*")) == []


@measures
@pytest.mark.parametrize("load", ["8", "batch"])
def test_a_small_durable_run_gives_a_rate(
    load: str, go_client: None, environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "durable.json"
    options = ("--quick", "--only=flintmq", f"--loads={load}", f"--json={output}")
    answer = bench(environment, "bench.durable", *options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = read(output)
    [sample] = result["samples"]
    assert sample["rate"] > 0
    assert sample["cpu"] > 0
    assert result["systems"]["flintmq"][2] == "`--durability fsync`"
    assert "messages per second" in answer.stdout


def test_durable_rates_are_not_measured_in_memory(environment: dict[str, str]) -> None:
    from bench.durable import MEMORY_FILE_SYSTEMS, file_system

    memory = Path("/dev/shm")
    if not memory.exists() or file_system(memory) not in MEMORY_FILE_SYSTEMS:
        pytest.skip("/dev/shm is not a file system in memory here")
    answer = bench(environment | {"TMPDIR": str(memory)}, "bench.durable", "--seconds=1")
    assert answer.returncode == 1
    assert "/dev/shm is in memory" in answer.stderr


@measures
@pytest.mark.slow
@needs_compiler
def test_a_small_run_gives_every_point_of_every_curve(environment: dict[str, str], tmp_path: Path) -> None:
    from bench.curves import CURVES, QUICK

    output = tmp_path / "curves.json"
    answer = bench(environment, "bench.curves", "--quick", "--repeat=1", f"--json={output}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    samples = read(output)["samples"]
    for name in CURVES:
        assert [s["x"] for s in samples if s["curve"] == name] == list(getattr(QUICK, name))
        assert f"charts/curves-{name}.svg" in answer.stdout
    assert all(sample["value"] > 0 for sample in samples)


def test_a_curve_that_is_not_flat_is_called_so_with_its_figures() -> None:
    from bench.curves import verdict

    flat = [(1.0, 2.0, 2.0, 2.0), (10.0, 2.5, 2.5, 2.5)]
    assert verdict("flintmq", flat) == "flintmq is flat: 2.00 to 2.50 µs."
    peak = [(1.0, 1.0, 1.0, 1.0), (10.0, 4.0, 4.0, 4.0), (1000.0, 2.0, 2.0, 2.0)]
    assert verdict("flintmq", peak) == (
        "**flintmq is not flat:** it rises from 1.00 µs at 1 to 2.00 µs at 1,000, highest 4.00 at 10."
    )
