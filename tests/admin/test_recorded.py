"""What our nsqadmin answers is what Go's does, field for field, on the same answers of the same daemons.

``record.py`` says how the recording was made. Where we differ on purpose, ``corrected`` says how and why.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web

from flintmq.admin import aggregate
from flintmq.admin.daemon import Admin
from support.http_client import HttpClient

RECORDING = json.loads(Path(__file__).with_name("recorded.json").read_text())
STATES: dict[str, Any] = RECORDING["states"]
NODES, LOOKUPDS = ("n1", "n2", "n3"), ("l1", "l2")


def with_tcp_ports(text: str) -> str:
    return re.sub(r"@n(\d)t@", r"415\1", text)


class Played:
    """The daemons of a recording, as far as they were asked."""

    def __init__(self, heard: dict[str, list[Any]]) -> None:
        self._heard = heard
        self.ports: dict[str, int] = {}
        self.acted: list[str] = []

    def real(self, text: str) -> str:
        for name, port in self.ports.items():
            text = text.replace(f"@{name}@", str(port))
        return with_tcp_ports(text)

    def placeholders(self, text: str) -> str:
        for name, port in self.ports.items():
            text = re.sub(rf"(?<!\d){port}(?!\d)", f"@{name}@", text)
        return text

    async def start(self, name: str) -> web.AppRunner:
        async def handle(request: web.Request) -> web.Response:
            key = f"{request.method} {name} {self.placeholders(request.raw_path)}"
            if request.method == "POST":
                self.acted.append(key)
            # Whether clients are wanted changes nothing for those who look at the names alone.
            found = self._heard.get(key) or self._heard.get(key.replace("&include_clients=false", ""))
            if request.path == "/nodes" and not any(one.endswith("/nodes") for one in self._heard):
                # Go does not ask whether a node is one of the cluster.
                found = STATES["messages"]["heard"].get(key)
            if found is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            headers = {"X-NSQ-Content-Type": "nsq; version=1.0"}
            return web.Response(status=found[0], text=self.real(found[1]), headers=headers)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.ports[name] = runner.addresses[0][1]
        return runner


@contextlib.asynccontextmanager
async def playing(state: dict[str, Any]) -> AsyncIterator[tuple[Played, Admin]]:
    played = Played(state["heard"])
    runners = [await played.start(name) for name in (*NODES, *LOOKUPDS)]
    names, flag = (NODES, "nsqd") if state.get("mode") == "nsqds" else (LOOKUPDS, "nsqlookupd")
    addresses = [f"127.0.0.1:{played.ports[name]}" for name in names]
    try:
        async with Admin(refresh_interval=0, **{f"{flag}_http_addresses": addresses}) as admin:
            yield played, admin
    finally:
        for runner in runners:
            await runner.cleanup()


#: What NSQ tells since 1.3.0, and its nsqadmin of that version does not know.
LATER = ("delivery_msg_count", "zone_local_msg_count", "region_local_msg_count", "global_msg_count")


def without_nulls(value: Any, name: str = "") -> Any:
    """Lists that are empty are null in Go (trap 14)."""
    if isinstance(value, dict):
        return {key: without_nulls(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    lists = ("topics", "nodes", "channels", "clients", "percentiles", "remote_addresses", "admin_users")
    return [] if value is None and name in lists else value


def corrected(value: Any) -> Any:
    """Go's answer, without what its traps make of it, and ours without what is then left to compare elsewhere."""
    value = without_nulls(copy.deepcopy(value))

    def visit(one: Any) -> None:
        if isinstance(one, list):
            for each in one:
                visit(each)
        if not isinstance(one, dict):
            return
        one.pop("connected", None)
        for name in LATER:
            one.pop(name, None)
        for each in one.values():
            visit(each)
        for percentile in one.get("percentiles", ()):
            # Not a minimum (trap 6), and a value that means nothing in a sum.
            percentile.pop("min", None)
            percentile.pop("value", None)
            percentile["average"] = round(percentile["average"], 3)
        if isinstance(one.get("percentiles"), list):
            one["percentiles"].sort(key=lambda each: each["quantile"])
        if isinstance(one.get("remote_addresses"), list):
            one["remote_addresses"] = sorted(re.sub(r":\d+$", ":9", text) for text in one["remote_addresses"])
        if "remote_address" in one:
            one["remote_address"] = re.sub(r":\d+$", ":9", one["remote_address"])
        if "topic_name" in one and "channels" in one and one.get("node") in ("*", ""):
            # The first node's channels are what everything was added to (trap 5).
            for node in one["nodes"]:
                node["channels"] = []
            for channel in one["channels"]:
                for name in ("nodes", "node", "hostname"):
                    channel.pop(name)
                for name in ("host", "topic", "channel"):
                    channel["e2e_processing_latency"].pop(name)
            one["channels"].sort(key=lambda each: each["channel_name"])
        for name in ("nodes", "clients", "topics"):
            # All on one host: equal names come in any order.
            if isinstance(one.get(name), list):
                one[name].sort(key=lambda each: json.dumps(each, sort_keys=True))

    visit(value)
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        # Daemons are asked at the same time: their errors come in any order.
        value["message"] = sorted(re.split(r"\n|; |: failed to query any nsq\w+: ", value["message"]))
    if isinstance(value, dict) and isinstance(value.get("topics"), dict):
        value["topics"] = {name: channels or [] for name, channels in value["topics"].items()}
    return value


def decoded(text: str) -> Any:
    try:
        return json.loads(re.sub(r'":(@\w+@)', r'":"\1"', with_tcp_ports(text)))
    except ValueError:
        return text


def is_elsewhere(case: dict[str, Any]) -> bool:
    """Go sends requests to any address that somebody names; we only to nodes of the cluster."""
    method, target, body = case["ask"]
    return method == "DELETE" and target == "/api/nodes/127.0.0.1:1" and "orders" in body


def expected(case: dict[str, Any]) -> tuple[int, Any]:
    """Status and body that our answer must have."""
    method, target, _ = case["ask"]
    status, _, text = case["answer"]
    body = decoded(text)
    parts = target.split("?")[0].split("/")[2:] or [""]
    if is_elsewhere(case):
        return 404, corrected({"message": "NODE_NOT_FOUND"})
    if method == "GET" and parts[0] == "topics" and isinstance(body, dict):
        is_channel, is_nowhere = len(parts) == 3, text.strip().endswith('any nsqd: "}')
        # A channel that is nowhere has no fields at all in Go, or crashes it (trap 2).
        if is_channel and (is_nowhere or status == 500 or (set(body) == {"message"} and status == 200)):
            return 404, corrected({"message": "CHANNEL_NOT_FOUND"})
        # No node is no error (trap 1).
        if len(parts) == 2 and is_nowhere:
            return 200, corrected(aggregate.new_topic(unquote(parts[1])))
    return status, corrected(body)


@pytest.mark.parametrize("name", list(STATES))
async def test_answers_are_those_of_nsq_s_nsqadmin(name: str) -> None:
    state = STATES[name]
    different = []
    async with playing(state) as (played, admin), HttpClient.connect(admin.http_address) as client:
        for case in state["cases"]:
            method, target, body = case["ask"]
            played.acted.clear()
            answer = await client.ask(method, played.real(target), body.encode() or None)
            ours = answer.status, corrected(decoded(played.placeholders(answer.body.decode())))
            theirs = expected(case)
            acted = [] if is_elsewhere(case) else case["acted"]
            if isinstance(theirs[1], dict) and "message" not in theirs[1]:
                # Go's error has swallowed the warnings.
                ours[1].pop("message")
            if ours != theirs or sorted(played.acted) != acted:
                different.append((case["ask"], theirs, ours, acted, sorted(played.acted)))
    assert different == []


def test_the_recording_has_many_answers_over_several_states() -> None:
    assert sum(len(state["cases"]) for state in STATES.values()) >= 150
    assert {"empty", "messages", "consumers", "paused", "nsqds", "afterwards", "node down", "lookupd down"} <= set(
        STATES
    )
