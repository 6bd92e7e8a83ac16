"""Every page in a real browser, with a live cluster of three nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flintmq.client import NodeClient

from .cluster import Cluster, order, payment, until
from .views import View

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "topic's clients": "/topics/orders?tab=clients",
    "topic's settings": "/topics/orders?tab=settings",
    "channel": "/topics/orders/archive",
    "channel's settings": "/topics/refunds/bank?tab=settings",
    "time line": "/topics/orders/archive?tab=seek&to=earliest",
    "ready messages": "/messages?topic=orders&channel=billing",
    "deferred messages": "/messages?topic=orders&channel=billing&state=deferred",
    "dead messages": "/messages?topic=refunds&channel=bank&state=dead",
    "messages of nobody": "/messages?topic=audit.trail&channel=siem&state=in_flight",
    "log": "/messages?topic=clicks&state=log",
    "tail": "/messages?topic=audit.trail&state=tail",
    "clients": "/clients",
    "nodes": "/nodes",
    "node": "/nodes/{node}",
    "lookup": "/lookup",
    "dead letters": "/dead",
    "pipelines": "/pipelines",
    "actions": "/actions",
    "counter": "/counter",
    "login": "/login",
    "no such page": "/topics/nothing-has-this-name",
}


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_opens_in_light_and_dark_and_on_a_phone_and_axe_finds_nothing_serious(
    browser: Any, cluster: Cluster, axe: str, name: str
) -> None:
    path = PAGES[name].format(node=cluster.node(0))
    async with View.open(browser, cluster.url) as view:
        if name == "no such page":
            view.allowed.append("404")
        await view.go(path)
        if first := await view.page.query_selector(".message-list li > button"):
            await first.click()
            await view.page.wait_for_selector(".detail .body")
        assert await view.problems_found_by(axe) == []
        await view.page.emulate_media(color_scheme="dark")
        await view.page.set_viewport_size({"width": 390, "height": 844})
        assert await view.problems_found_by(axe) == []
        assert await view.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        text = await view.text("body")
        assert "undefined" not in text
        assert "NaN" not in text


async def test_a_chart_and_the_numbers_move_after_publishing(view: View, cluster: Cluster) -> None:
    await view.go("/topics/payments")
    chart = view.page.locator("figure", has_text="Depth").first
    await chart.locator(".line").wait_for(state="attached")
    label = chart.locator("[role=img]")
    await until(lambda: _has(label, "now depth"), "a depth")
    before = sum(broker.topics["payments"].channels["ledger"].depth for broker in cluster.brokers)
    drawn = await chart.locator(".line").get_attribute("d")
    await cluster.publish("payments", [payment(i) for i in range(500)])
    # The depth of the topic: what its one channel has not delivered.
    await until(lambda: _has(label, f"now depth {before + 500:,}"), "the new depth in the chart")
    assert await chart.locator(".line").get_attribute("d") != drawn
    assert f"{before + 500:,}" in await view.text(".stats")


async def _has(locator: Any, text: str) -> bool:
    return text in str(await locator.get_attribute("aria-label"))


async def test_a_channel_is_paused_resumed_and_the_pause_undone(view: View, cluster: Cluster) -> None:
    await view.go("/topics/orders/billing")

    async def is_paused(wanted: bool) -> None:
        channels = [broker.topics["orders"].channels["billing"] for broker in cluster.brokers]
        await until(lambda: {channel.paused for channel in channels} == {wanted}, f"paused: {wanted}")

    await view.button("Pause …").click()
    await view.page.wait_for_selector("dialog[open]")
    assert "no more messages until the channel is resumed" in await view.text("dialog")
    await view.button("Pause", "dialog").click()
    await is_paused(True)
    await view.page.wait_for_selector(".head .label.amber")
    await view.button("Undo").click()
    await is_paused(False)
    await view.page.wait_for_selector(".head .label.amber", state="detached")
    await view.button("Pause …").click()
    await view.button("Pause", "dialog").click()
    await is_paused(True)
    await view.button("Resume …").click()
    await view.button("Resume", "dialog").click()
    await is_paused(False)


async def test_messages_are_decoded_as_json_messagepack_text_and_hex(view: View) -> None:
    await view.go("/messages?topic=clicks&channel=counter")
    await view.page.locator(".message-list li > button").first.click()
    assert '"page"' in await view.text(".detail .body")
    assert "2 bytes: 00 01" in await view.text(".detail .body")
    await view.button("hex", ".detail").click()
    assert "000000  84 a4 70 61 67 65" in await view.text(".detail .body")
    await view.go("/messages?topic=payments&channel=ledger&filter=plain+text")
    await view.page.locator(".message-list li > button").first.click()
    assert await view.text(".detail .body") == "plain text, no JSON at all"
    await view.go("/messages?topic=orders&channel=billing")
    await view.page.locator(".message-list li > button").first.click()
    shown = await view.text(".detail .body")
    assert '"city": "Lisbon"' in shown
    # Folded, an object takes one line.
    await view.page.locator(".detail summary", has_text="customer").click()
    await view.page.wait_for_function("() => !document.querySelector('.detail .body').innerText.includes('Lisbon')")
    # The chosen message is in the address: the link shows it to others.
    await view.page.reload()
    await view.page.wait_for_selector(".detail .body")
    assert await view.text(".detail .body") == shown


async def test_what_matches_a_json_path_is_counted_and_then_finished(view: View, cluster: Cluster) -> None:
    def waiting() -> int:
        return sum(broker.topics["returns"].channels["shop"].depth for broker in cluster.brokers[:2])

    for number in range(2):
        async with cluster.client(number) as client:
            await client.create_topic("returns")
            await client.create_channel("returns", "shop")
        await cluster.publish("returns", [order(i) for i in range(100)], number)
    await cluster.admin.state.sample()
    assert waiting() == 200
    await view.go("/messages?topic=returns&channel=shop")
    await view.page.get_by_label("JSON path").fill("$.customer.city")
    await view.page.get_by_label("Value at the JSON path").fill("Oslo")
    await view.says("40 found, 200 of 200 searched")
    await view.button("All that match …").click()
    await view.page.wait_for_function("() => document.querySelector('dialog .counted').innerText === '40 of 200 match'")
    assert waiting() == 200
    await view.button("Finish", "dialog").click()
    await view.button("Finish 40", "dialog").click()
    await view.says("Finish: 40 messages.")
    assert waiting() == 160
    await view.says("No message matches")
    # Those that are selected by hand, with a delay.
    await view.go("/messages?topic=returns&channel=shop")
    for number in (0, 1):
        await view.page.locator(".message-list input").nth(number).check()
    await view.button("Defer …", ".bulk-bar").click()
    await view.button("Defer 2", "dialog").click()
    await view.says("Defer: 2 messages.")
    assert waiting() == 158


async def test_dead_letters_are_grouped_and_sent_back_with_a_rate_and_progress(view: View, cluster: Cluster) -> None:
    await cluster.make_dead(40, 1)
    await cluster.admin.state.sample()
    channel = cluster.brokers[1].topics["refunds"].channels["bank"]
    assert channel.depth == 0
    await view.go("/dead")
    group = view.page.locator("section", has_text="refunds/bank")
    assert "requeued" in await group.inner_text()
    await group.get_by_role("button", name="Redrive …").click()
    await view.page.get_by_label("Per second").fill("20")
    await view.button("Redrive", "dialog").click()
    progress = view.page.locator("dialog progress")
    await progress.wait_for()
    seen = {await progress.get_attribute("value")}

    async def is_done() -> bool:
        if await progress.count():
            seen.add(await progress.get_attribute("value"))
        return "Done:" in await view.text("dialog")

    await until(is_done, "the end of the redrive")
    assert len(seen) >= 2
    assert channel.depth == 40


async def test_dead_letters_of_one_cause_are_sent_back_until_somebody_stops_it(view: View, cluster: Cluster) -> None:
    await cluster.make_dead(40, 1)
    channel = cluster.brokers[1].topics["refunds"].channels["bank"]
    before = channel.depth
    await cluster.admin.state.sample()
    await view.go("/dead")
    group = view.page.locator("section", has_text="refunds/bank")
    await group.get_by_role("button", name="Redrive those that were requeued").click()
    await view.says("that were requeued go back to this channel only")
    await view.page.get_by_label("Per second").fill("3")
    await view.button("Redrive", "dialog").click()
    await view.button("Stop", "dialog").click()
    await view.says("the others stay dead letters")
    came = channel.depth - before
    assert 0 < came < 40
    await view.page.locator("dialog footer").get_by_text("Close").click()
    # One that somebody else has started is shown, and stopped, too.
    client = NodeClient(cluster.brokers[1].http_address)
    await client.redrive("refunds", "bank", rate=3)
    await view.button("Stop", "section").click()

    async def has_ended() -> bool:
        return not (await client.redrive_progress("refunds", "bank")).running

    await until(has_ended, "the end of the redrive")
    assert (await client.redrive_progress("refunds", "bank")).error == "stopped"
    await client.close()


async def _is_durable(client: NodeClient, topic: str) -> bool:
    info = await client.log_info(topic)
    return info.durable == info.end > info.first


async def _places(view: View) -> list[float]:
    drawn = view.page.locator(".timeline line.now")
    places: list[float] = await drawn.evaluate_all("all => all.map(one => +one.getAttribute('x1'))")
    return places


async def _has_moved_back(view: View, places: list[float]) -> bool:
    """Does a node's channel stand before where it stood? How far depends on when others have published."""
    return min(await _places(view)) < min(places)


async def test_a_channel_is_moved_on_the_time_line_after_a_count(view: View, cluster: Cluster) -> None:
    for number in range(3):
        async with cluster.client(number) as client:
            # The log shows what a power failure cannot take.
            await until(lambda client=client: _is_durable(client, "payments"), "the log is on the disk")
            await client.seek("payments", "ledger", "latest")
    channels = [broker.topics["payments"].channels["ledger"] for broker in cluster.brokers]
    assert sum(channel.depth for channel in channels) == 0
    await cluster.admin.state.sample()
    await view.go("/topics/payments/ledger?tab=seek")
    assert await view.page.locator(".timeline rect").count() > 0
    # The channel stands at the end of the log of each node.
    places = await _places(view)
    assert len(places) == 3
    assert min(places) > 900
    await view.page.locator(".timeline svg").click(position={"x": 1, "y": 20})
    words = view.page.locator(".counted")
    await words.wait_for()
    count = int((await words.locator("b").inner_text()).replace(",", ""))
    assert "delivered again" in await words.inner_text()
    assert count > 0
    assert sum(channel.depth for channel in channels) == 0
    await view.button("Move the channel …").click()
    await view.button("Move", "dialog").click()
    await view.says("payments/ledger was moved.")
    moved = sum(channel.depth for channel in channels)
    assert 0 < moved <= count
    # By the keyboard to the end, once the page shows where the channel is now: what was asked for again is skipped.
    await until(lambda: _has_moved_back(view, places), "the channel at its new place")
    assert await view.page.locator("dialog").count() == 0
    await view.page.get_by_label("Move the channel to").focus()
    await view.page.keyboard.press("End")
    await view.says("will be skipped")
    await view.button("Latest").click()
    await view.says("will be skipped")
    await view.button("Move the channel …").click()
    await view.button("Move", "dialog").click()
    await until(lambda: sum(channel.depth for channel in channels) == 0, "nothing waits")


async def test_pipelines_are_live_and_reached_from_a_topic_by_the_keyboard(view: View, cluster: Cluster) -> None:
    await cluster.report_query(batch=41, rows=9_000, lag=120)
    await cluster.report_query(id="c90f", name="clicks by page", topics=["clicks"], state="failed", error="disk full")
    await view.go("/topics/orders")
    table = view.page.get_by_role("table", name="queries")
    await view.says("orders archive")
    assert "clicks by page" not in await table.inner_text()
    link = view.page.get_by_role("link", name="All about them")
    await link.focus()
    await view.page.keyboard.press("Enter")
    await view.page.wait_for_url("**/pipelines?topic=orders")
    await view.says("Readers of logs")
    row = table.get_by_role("row").filter(has_text="orders archive")
    # One that reports to all nodes is there once, with the reader that it is.
    assert await row.count() == 1

    async def names_all_nodes() -> bool:
        told = await row.locator("b").get_attribute("title")
        return all(cluster.node(number) in told for number in range(3))

    await until(names_all_nodes, "the nodes that it reports to")
    # It may be that of other queries too, in an order that changes when one of them falls silent.
    reader = view.page.get_by_role("region", name="spark-orders-hourly")
    await until(lambda: _says(reader, "of the query", "orders archive"), "the query of the reader")
    assert "clicks by page" not in await view.text()
    await cluster.report_query(0, batch=42, rows=9_500, lag=4_321, batch_seconds=7.0)
    await until(lambda: _says(row, "4,321", "7 s", "running"), "the numbers of the next batch")
    await cluster.report_query(1, state="ended", lag=0)
    await until(lambda: _says(row, "ended"), "the end of the query")
    await view.page.get_by_role("link", name="Show all").click()
    await view.says("clicks by page")
    failed = table.get_by_role("row").filter(has_text="clicks by page")
    assert await _says(failed, "failed", "disk full")
    # Back leads to the topic's own.
    await view.page.go_back()
    await until(lambda: _not(view, "clicks by page"), "the pipelines of the topic alone")
    await cluster.report_query(batch=43, rows=9_600, lag=100)


async def test_without_pipelines_the_page_says_how_to_start_one(browser: Any, folder: Path) -> None:
    async with Cluster(folder, count=1) as empty, View.open(browser, empty.url) as view:
        await view.go("/pipelines")
        assert "No pipelines yet" in await view.text()
        assert await view.button("Copy").count() == 1
        await empty.report_query(name="the first", readers=[])
        await view.says("the first")


async def _says(locator: Any, *texts: str) -> bool:
    found = str(await locator.inner_text())
    return all(text in found for text in texts)


async def _not(view: View, text: str) -> bool:
    return text not in await view.text()


async def test_deleting_a_topic_with_messages_asks_for_its_name(view: View, cluster: Cluster) -> None:
    await cluster.publish("doomed", [b"1", b"2", b"3"])
    await cluster.admin.state.sample()
    await view.go("/topics/doomed")
    await view.button("Delete …").click()
    await view.says("3 messages will be lost.")
    assert await view.button("Delete", "dialog").is_disabled()
    await view.page.get_by_label("Type doomed to confirm").fill("doom")
    assert await view.button("Delete", "dialog").is_disabled()
    # Escape changes nothing.
    await view.page.keyboard.press("Escape")
    await view.page.wait_for_selector("dialog", state="detached")
    assert "doomed" in cluster.brokers[0].topics
    await view.button("Delete …").click()
    await view.page.get_by_label("Type doomed to confirm").fill("doomed")
    await view.button("Delete", "dialog").click()
    await until(lambda: "doomed" not in cluster.brokers[0].topics, "the topic is deleted")
    await view.page.wait_for_url("**/topics")


async def test_a_message_is_published_after_a_check_and_the_tail_shows_it(
    view: View, browser: Any, cluster: Cluster
) -> None:
    async with View.open(browser, cluster.url) as tail:
        await tail.go("/messages?topic=audit.trail&state=tail")
        await tail.says("live\n")
        channels = set(cluster.brokers[0].topics["audit.trail"].channels)
        await view.go("/topics/audit.trail")
        await view.button("Publish …").click()
        body = view.page.get_by_label("Body")
        await body.fill('{"user": "ann"')
        await view.says("not JSON")
        await body.fill('{"user":"ann", "did": "everything"}')
        await view.says("valid JSON")
        await view.button("Format", "dialog").click()
        assert await body.input_value() == '{\n  "user": "ann",\n  "did": "everything"\n}'
        await view.button("Publish", "dialog").click()
        await view.says("Published to audit.trail")
        await tail.says('"did": "everything"')
        await tail.button("Pause").click()
        await tail.says("Go on")
        await cluster.publish("audit.trail", [b"unseen by those who paused"])
        assert set(cluster.brokers[0].topics["audit.trail"].channels) == channels
        await tail.button("Go on").click()
        await tail.says("live\n")
        assert "unseen by those who paused" not in await tail.text()


async def test_a_setting_is_changed_in_place_refused_when_wrong_and_reset(view: View, cluster: Cluster) -> None:
    await view.go("/topics/orders/billing?tab=settings")
    view.allowed.append("400")
    await view.button("Change msg-timeout").click()
    field = view.page.get_by_label("msg-timeout", exact=True)
    assert await field.input_value() == "1m0s"
    await field.fill("long")
    # Numbers that arrive meanwhile leave what is typed alone.
    seen = await view.page.evaluate("performance.now()")
    await cluster.publish("orders", [order(1)])
    await cluster.admin.state.sample()
    await view.page.wait_for_function("seen => performance.now() > seen + 700", arg=seen)
    assert await field.input_value() == "long"
    await field.press("Enter")
    await view.page.wait_for_selector(".failure")
    await field.fill("90s")
    await field.press("Enter")
    await view.says("1m30s")
    row = view.page.locator("tr", has_text="msg-timeout")
    assert "live" in await row.inner_text()
    for broker in cluster.brokers:
        assert broker.topics["orders"].channels["billing"].settings.msg_timeout == 90 * 10**9
    await row.get_by_role("button", name="Reset").click()
    await view.page.wait_for_function("() => !document.querySelector('.settings').innerText.includes('1m30s')")


async def test_search_is_opened_by_a_key_and_used_without_a_mouse(view: View) -> None:
    await view.go("/")
    await view.page.keyboard.press("/")
    await view.page.keyboard.type("billi")
    await view.page.wait_for_selector("#found [role=option]")
    await view.page.keyboard.press("Enter")
    await view.page.wait_for_url("**/topics/orders/billing")
    # Clients are asked for when somebody looks for them.
    await view.page.keyboard.press("/")
    await view.page.keyboard.type("archive-2")
    await view.says("worker-2.example")
    await view.page.locator("#found li", has_text="client").first.click()
    await view.page.wait_for_selector("dialog[open] .facts")
    assert "worker-2.example" in await view.text("dialog")
    await view.page.go_back()
    await view.page.wait_for_url("**/topics/orders/billing")


async def test_lists_keep_filter_and_sorting_in_the_address(view: View) -> None:
    await view.go("/topics", "tbody tr")
    await view.page.get_by_label("Filter topics").fill("PAY")
    await view.says("1 of ")
    assert "filter=PAY" in view.page.url
    await view.page.get_by_label("Filter topics").fill("")
    await view.button("Topic").click()
    await view.page.wait_for_selector("th[aria-sort=ascending]")
    names = await view.page.locator("td.main a").all_inner_texts()
    assert names == sorted(names)
    assert "sort=topic" in view.page.url
    await view.page.reload()
    await view.page.wait_for_selector("th[aria-sort=ascending]")


async def test_a_topic_is_created_and_the_action_log_says_who_did_it(view: View, cluster: Cluster) -> None:
    await view.go("/lookup")
    await view.page.get_by_label("Topic", exact=True).fill("created.here")
    await view.page.get_by_label("Channel (may be left empty)").fill("first")
    await view.button("Create").click()
    await view.says("Created created.here/first.")
    assert "created.here" in cluster.lookupd.registry.topics
    await view.go("/actions", "tbody tr")
    row = view.page.locator("tbody tr", has_text="create channel").first
    assert "created.here/first" in await row.inner_text()
    async with view.page.expect_download() as waiting:
        await view.page.get_by_role("link", name="Export JSON lines").click()
    exported = Path(await (await waiting.value).path()).read_text().splitlines()
    assert any(json.loads(line)["topic"] == "created.here" for line in exported)


async def test_a_hidden_tab_asks_for_nothing_until_it_is_shown_again(view: View, cluster: Cluster) -> None:
    await view.go("/")
    await view.says("live")
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    await view.page.evaluate(hide, True)
    await view.says("paused")
    await until(lambda: cluster.admin.hub.viewer_count == 0, "the stream is closed")
    await view.page.evaluate(hide, False)
    await view.says("live")


async def test_the_files_are_small_and_allow_no_inline_script(view: View) -> None:
    session = await view.page.context.new_cdp_session(view.page)
    await session.send("Network.enable")
    loaded: list[float] = []
    session.on("Network.loadingFinished", lambda event: loaded.append(event["encodedDataLength"]))
    await session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    answer = await view.page.goto(view.url + "/counter")
    await view.page.wait_for_selector(".odometer")
    assert sum(loaded) <= 200_000, loaded
    policy = answer.headers["content-security-policy"]
    assert "unsafe-inline" not in policy
    assert "unsafe-eval" not in policy
    assert await view.page.evaluate("document.querySelectorAll('style, script:not([src])').length") == 0
