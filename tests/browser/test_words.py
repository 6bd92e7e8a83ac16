"""The words and numbers that pages show are whole, right and of some help."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flintmq.client import NodeClient
from support.peers import GO_NSQD, NO_GO_NSQD

from .cluster import Cluster, until
from .views import View

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_text_of_a_dialog_that_opens_in_a_table_is_wrapped(view: View, cluster: Cluster) -> None:
    await view.go(f"/nodes/{cluster.node(0)}")
    await view.button("Tombstone …").first.click()
    await view.says("Consumers stop using")
    box = view.page.locator("dialog .dialog")
    assert await box.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert await box.locator("p").first.evaluate("one => getComputedStyle(one).textAlign") in ("left", "start")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/topics/missing", "There is no such topic"),
        ("/topics/orders/missing", "There is no such channel"),
        ("/nodes/127.0.0.1:1", "There is no such node"),
    ],
)
async def test_a_page_of_nothing_explains_itself(view: View, path: str, words: str) -> None:
    view.allowed.append("404")
    await view.go(path)
    await view.says(words)
    assert "NOT_FOUND" not in await view.text()


async def test_dead_letters_show_the_attempts_that_failed(view: View, cluster: Cluster) -> None:
    await cluster.make_dead(3)
    await view.go("/messages?topic=refunds&channel=bank&state=dead")
    await view.page.wait_for_selector(".message-list li")
    lines = await view.page.locator(".message-list .meta").all_inner_texts()
    assert all("2 attempts" in line for line in lines), lines


async def test_the_first_publish_is_for_a_node_of_the_cluster(view: View, cluster: Cluster) -> None:
    async with cluster.client(0) as node:
        await node.create_topic("bare")
    await cluster.admin.state.sample()
    await view.go("/messages?topic=bare")
    command = view.page.locator(".command code")
    nodes = [cluster.node(number) for number in range(cluster.count)]
    commands = [f"curl -d 'hello' 'http://{node}/pub?topic=bare'" for node in nodes]

    async def is_right() -> bool:
        return await command.inner_text() in commands

    await command.wait_for()
    await until(is_right, f"one of {commands}")


async def test_the_first_channel_is_for_the_nodes_of_the_topic(view: View, cluster: Cluster) -> None:
    async with cluster.client(0) as node:
        await node.create_topic("channelless")
    await cluster.admin.state.sample()
    await view.go("/topics/channelless")
    command = view.page.locator(".command code")
    await command.wait_for()
    wanted = f"flintmq channel create channelless/CHANNEL --nsqd-http-address {cluster.node(0)}"

    async def is_right() -> bool:
        return await command.inner_text() == wanted

    await until(is_right, wanted)


async def test_a_short_topic_is_not_broken_beside_the_id_of_a_query(view: View, cluster: Cluster) -> None:
    await cluster.report_query(id="e548", name="e548a6dc-c9a8-4799-aa0f-ea072e9cd435", topics=["orders"])
    await view.page.set_viewport_size({"width": 1000, "height": 800})
    await view.go("/pipelines")
    row = view.page.get_by_role("table", name="queries").get_by_role("row").filter(has_text="e548a6dc")
    link = row.get_by_role("link", name="orders")
    await link.wait_for()
    assert await link.evaluate("(one) => one.getClientRects().length") == 1


async def test_an_axis_of_few_messages_has_each_number_once(view: View, cluster: Cluster) -> None:
    await cluster.publish("few", [b"1", b"2"])
    await cluster.admin.state.sample()
    await view.go("/topics/few")
    axis = view.page.locator("figure.chart", has_text="Depth").first.locator('.grid text[text-anchor="end"]')

    async def has_two() -> bool:
        return "2" in await axis.all_text_contents()

    await until(has_two, "a number at the axis")
    found = await axis.all_text_contents()
    assert len(found) == len(set(found)), found


async def test_a_notice_counts_nodes_and_no_nsqlookupd(view: View, cluster: Cluster) -> None:
    async with cluster.client(0) as node:
        await node.create_topic("on.one.node")
    await cluster.admin.state.sample()
    await view.go("/topics/on.one.node")
    await view.button("Delete …").click()
    await view.says("It has no messages. No client is connected.")
    await view.button("Delete", "dialog").click()
    await view.says("Deleted topic on.one.node on 1 node.")


async def test_a_search_groups_the_digits_of_a_depth(view: View, cluster: Cluster) -> None:
    await cluster.publish("many.of.them", [b"x"] * 1200)
    await cluster.admin.state.sample()
    await view.go("/")
    await view.page.keyboard.press("/")
    await view.page.keyboard.type("many.of")
    await view.says("depth 1,200")


async def test_a_phone_tells_nodes_apart_by_their_address(browser: Any, cluster: Cluster) -> None:
    async with View.open(browser, cluster.url, viewport={"width": 390, "height": 844}) as view:
        await view.go("/nodes", "tbody tr")
        text = await view.text()
        assert all(cluster.node(number) in text for number in range(cluster.count))
        badge = view.page.locator(".rail .badge")
        await badge.wait_for()
        icon, number = await badge.locator("..").locator("svg").bounding_box(), await badge.bounding_box()
        assert number["x"] >= icon["x"] + icon["width"] / 2


@contextlib.asynccontextmanager
async def go_nsqd(lookupd: str, folder: Path) -> AsyncIterator[None]:
    flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=127.0.0.1"]
    command = [str(GO_NSQD), *flags, f"--lookupd-tcp-address={lookupd}", f"--data-path={folder}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.interop
@pytest.mark.skipif(bool(NO_GO_NSQD), reason=NO_GO_NSQD)
async def test_the_time_line_names_the_nodes_that_it_cannot_move(browser: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "go").mkdir()
    async with Cluster(folder, count=1) as cluster, go_nsqd(cluster.lookupd.tcp_address, tmp_path / "go"):
        nodes = cluster.admin.state.nodes

        async def both() -> bool:
            await cluster.admin.state.sample()
            return sum(node.up for node in nodes.values()) == 2

        await until(both, "both nodes are up")
        theirs = next(node.address for node in nodes.values() if not node.is_flintmq)
        await cluster.publish("orders", [b"1", b"2"])
        async with cluster.client(0) as node:
            await node.create_channel("orders", "archive")
        async with NodeClient(f"http://{theirs}") as node:
            await node.create_topic("orders")
            await node.create_channel("orders", "archive")
        async with View.open(browser, cluster.url) as view:

            async def names_it() -> bool:
                await cluster.admin.state.sample()
                await view.go("/topics/orders/archive?tab=seek")
                return f"NSQ's own nsqd has no log: {theirs}" in await view.text()

            await until(names_it, "the node of NSQ's")
