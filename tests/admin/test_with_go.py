"""Go's nsqadmin beside ours, on the same daemons of ours: both answer the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator

import pytest

from support.http_client import HttpClient
from support.nsq_client import NsqClient
from support.peers import PEERS

from .conftest import Cluster
from .test_recorded import corrected

GO_NSQADMIN = PEERS / "bin" / "nsqadmin"
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not GO_NSQADMIN.exists(), reason="no Go nsqadmin in $FLINTMQ_PEERS/bin or .peers/bin"),
]


@contextlib.asynccontextmanager
async def go_nsqadmin(lookupd: str) -> AsyncIterator[HttpClient]:
    command = [str(GO_NSQADMIN), "--http-address=127.0.0.1:0", f"--lookupd-http-address={lookupd}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while (found := re.search(rb"HTTP: listening on (\S+)", await process.stderr.readline())) is None:
            assert process.returncode is None, "it ended"
        address = found[1].decode()
        async with HttpClient.connect(address) as client:
            yield client
    finally:
        process.terminate()
        await process.communicate()


async def test_both_answer_the_same_on_our_daemons(cluster: Cluster) -> None:
    async with (
        NsqClient.to(cluster.brokers[0].tcp_address) as consumer,
        go_nsqadmin(cluster.lookupd.http_address) as theirs,
    ):
        await consumer.subscribe("orders", "billing", ready=3)
        for _ in range(3):
            await consumer.message()
        targets = ["/api/topics", "/api/nodes", "/api/counter", "/api/topics/orders", "/api/topics/orders/billing"]
        targets += ["/api/topics/orders/mail", "/api/topics?inactive=true", "/api/topics/none", "/ping"]
        targets += [f"/api/nodes/{cluster.node(number)}" for number in range(3)]
        for target in targets:
            ours, go = await cluster.get(target), await theirs.get(target)
            if target == "/ping":
                assert ours.body == go.body
            else:
                assert (ours.status, corrected(ours.json)) == (go.status, corrected(json.loads(go.body))), target


async def test_go_s_nsqadmin_acts_on_our_daemons(cluster: Cluster) -> None:
    async with go_nsqadmin(cluster.lookupd.http_address) as theirs:
        answer = await theirs.post("/api/topics/orders/billing", b'{"action":"pause"}')
        assert answer.json == {"message": ""}
    assert all(broker.topics["orders"].channels["billing"].paused for broker in cluster.brokers)
