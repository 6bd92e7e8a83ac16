"""What importing the client costs those who do not need all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    ["from flintmq import Consumer, Message, Producer, errors", "import flintmq.sync", "import flintmq.compat.pynsq"],
)
def test_the_tcp_path_imports_no_http_and_no_broker(statement: str) -> None:
    program = (
        f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}), *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    loaded = set(done.stdout.split())
    assert "flintmq.client" in loaded
    assert not loaded & {"aiohttp", "prometheus_client", "opentelemetry", "rich", "tornado", "flintmq.broker"}
