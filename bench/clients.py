"""``python -m bench.clients``: our client and the other Python clients of NSQ, side by side on one broker.

Each run is a process of its own (`client_drivers/`) against a fresh broker. The runs are interleaved, so that whatever
else slows the machine down hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from flintmq.protocol.wire import MAGIC_V2, OK_FRAME, encode_mpub

from .daemons import Daemon, Side, fresh
from .errors import BenchError

DRIVERS = Path(__file__).parent / "client_drivers"
CLIENTS = ("flintmq", "pynsq", "gnsq", "ansq")
#: What ours is beside the client: Spark's spool, which writes what it consumes to synced files before it is finished.
OWN = ("flintmq", "spool")
TITLES = {
    "consume": "consume, async handler, 1000 in flight",
    "batches": "publish in batches of 200, 10 calls under way",
    "singles": "publish one by one, 100 calls under way",
}
#: Ours is so much faster that the same number would be too short a run for it, or too long for the others.
MESSAGES = {"consume": (400_000, 40_000), "batches": (1_000_000, 100_000), "singles": (200_000, 20_000)}
RUN_TIMEOUT = 300

#: By scenario and client, one for each run.
Figures = dict[tuple[str, str], list[float]]


def main() -> int:
    options = _parse_options()
    side = Side.peer(options.broker, "os") if options.broker else Side.ours(None, "os")
    rates: Figures = {}
    costs: Figures = {}
    for repeat in range(options.repeat):
        for scenario in TITLES:
            for client in options.clients:
                if client == "spool" and scenario != "consume":
                    continue
                try:
                    rate, cost = _run(client, scenario, side, options)
                except BenchError as exc:
                    print(f"{client}, {scenario}: {exc}", file=sys.stderr)
                    continue
                rates.setdefault((scenario, client), []).append(rate)
                costs.setdefault((scenario, client), []).append(cost)
                text = f"{rate:,.0f} messages/s, {cost:.2f} µs of CPU each"
                print(f"run {repeat + 1}, {scenario}, {client}: {text}", file=sys.stderr)
    print(_table("messages per second", rates, options.clients, ",.0f", max))
    print()
    print(_table("CPU of the client per message, µs", costs, options.clients, ".2f", min))
    return 0


def _run(client: str, scenario: str, side: Side, options: argparse.Namespace) -> tuple[float, float]:
    messages = MESSAGES[scenario][client not in OWN] // options.divide
    python = sys.executable if client in OWN else options.peer_python
    with fresh(side) as daemon:
        if scenario == "consume":
            daemon.create_channel("bench", "clients")
            _fill(daemon, messages)
        command = [python, str(DRIVERS / f"{client}_driver.py"), scenario, f"127.0.0.1:{daemon.port}", str(messages)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"not done after {RUN_TIMEOUT} s") from None
        if done.returncode:
            raise BenchError(f"ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
        reading: dict[str, float] = json.loads(done.stdout)
        return messages / reading["seconds"], reading["cpu"] / messages * 1e6


def _fill(daemon: Daemon, messages: int) -> None:
    batch = encode_mpub(b"bench", [b"x" * 200] * 200)
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as connection:
        connection.sendall(MAGIC_V2)
        answers = connection.makefile("rb")
        for _ in range(messages // 200):
            connection.sendall(batch)
            if answers.read(len(OK_FRAME)) != OK_FRAME:
                raise BenchError("the broker refused the messages to consume")


def _table(heading: str, figures: Figures, clients: list[str], form: str, best: Callable[..., float]) -> str:
    others = [client for client in clients if client != "flintmq"]
    lines = [
        f"| {heading} | flintmq | " + " | ".join(others) + " | flintmq / best other |",
        "|---|---:|" + "---:|" * (len(others) + 1),
    ]
    for scenario, title in TITLES.items():
        medians = {client: statistics.median(found) for client in clients if (found := figures.get((scenario, client)))}
        compared = best((medians[client] for client in others if client in medians), default=0.0)
        ratio = f"{medians['flintmq'] / compared:.2f}×" if compared and "flintmq" in medians else "–"
        cells = [format(medians[client], form) if client in medians else "–" for client in ("flintmq", *others)]
        lines.append(f"| {title} | " + " | ".join([*cells, ratio]) + " |")
    return "\n".join(lines)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description="Python clients of NSQ, side by side.")
    parser.add_argument("--clients", type=lambda text: text.split(","), default=list(CLIENTS), metavar="NAME,...")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has pynsq, gnsq and ansq")
    parser.add_argument("--broker", metavar="NSQD", help="another nsqd than ours")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="an Nth of the messages: a smoke test")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
