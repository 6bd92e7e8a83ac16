"""Logins and their limits, another base path, a node that goes down, a daemon that is restarted under an open page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from flintmq.admin.access import hash_password

from .cluster import Cluster, payment
from .views import View

pytestmark = pytest.mark.asyncio(loop_scope="session")

PASSWORD = "correct horse"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A cluster with users, behind a base path."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    digest = hash_password(PASSWORD)
    users = folder / "users"
    users.write_text(
        "".join(f"{name} {role} {digest}\n" for name, role in (("vera", "view"), ("otto", "operate"), ("ada", "admin")))
    )
    users.chmod(0o600)
    async with Cluster(folder, count=1, users_file=str(users), base_path="/nsq/admin") as cluster:
        await cluster.publish("payments", [payment(i) for i in range(10)])
        await cluster.admin.state.sample()
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def window(browser: Any, guarded: Cluster) -> AsyncIterator[View]:
    async with View.open(browser, guarded.url) as view:
        yield view


async def log_in(view: View, user: str, password: str = PASSWORD) -> None:
    await view.page.get_by_label("User").fill(user)
    await view.page.get_by_label("Password").fill(password)
    await view.button("Log in").click()


async def test_nobody_sees_anything_before_a_login_and_a_wrong_password_is_refused(window: View) -> None:
    await window.page.goto(window.url + "/topics/payments")
    await window.page.wait_for_selector(".login")
    assert "payments" not in await window.text("body")
    window.allowed.append("401")
    await log_in(window, "ada", "wrong")
    await window.page.wait_for_selector(".login .failure")
    await log_in(window, "ada")
    # What was asked for is shown, under the base path.
    await window.page.wait_for_selector("h1 >> text=payments")
    assert window.page.url == window.url + "/topics/payments"
    await window.says("Log out")
    await window.button("Log out").click()
    await window.page.wait_for_selector(".login")
    answer = await window.page.request.get(window.url + "/api/v2/overview")
    assert answer.status == 401


async def test_each_role_is_offered_what_it_may_do(browser: Any, guarded: Cluster) -> None:
    offered = {}
    for user in ("vera", "otto", "ada"):
        async with View.open(browser, guarded.url) as view:
            await view.page.goto(view.url + "/topics/payments/ledger")
            await log_in(view, user)
            await view.page.wait_for_selector("h1 >> text=ledger")
            offered[user] = await view.page.locator(".head button").all_inner_texts()
            await view.page.get_by_role("link", name="Messages", exact=True).click()
            await view.says("Bodies are not for everybody" if user == "vera" else '"currency": "EUR"')
            # And the daemon does not rely on what pages offer.
            headers = {
                "X-Flintmq-Csrf": (await (await view.page.request.get(view.url + "/api/v2/session")).json())["csrf"]
            }
            target = {"action": "empty_channel", "topic": "payments", "channel": "nothing"}
            answer = await view.page.request.post(view.url + "/api/v2/actions", data=target, headers=headers)
            assert (answer.status == 403) == (user != "ada")
    assert offered == {
        "vera": [],
        "otto": ["Publish …", "Pause …"],
        "ada": ["Publish …", "Pause …", "Empty …", "Delete …"],
    }


async def test_a_forged_request_fails(window: View, guarded: Cluster) -> None:
    await window.page.goto(window.url + "/topics/payments/ledger")
    await log_in(window, "ada")
    await window.page.wait_for_selector("h1 >> text=ledger")
    target = {"action": "pause_channel", "topic": "payments", "channel": "ledger"}
    # From the page itself, with the cookie and without the token.
    window.allowed.append("403")
    ask = """async ([url, target]) => {
        const sent = {method: 'POST', body: JSON.stringify(target), headers: {'Content-Type': 'application/json'}};
        return (await fetch(url, sent)).status;
    }"""
    assert await window.page.evaluate(ask, [window.url + "/api/v2/actions", target]) == 403

    # From a page of somebody else, who sends the visitor's browser there with a form.
    async def trap(_: web.Request) -> web.Response:
        page = f"""<form method="post" enctype="text/plain" action="{window.url}/api/v2/actions">
            <input name='{{"action":"pause_channel","topic":"payments","channel":"ledger","x":"' value='"}}'></form>"""
        return web.Response(text=page, content_type="text/html")

    app = web.Application()
    app.router.add_get("/{any:.*}", trap)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        window.allowed.append("request to http://localhost")
        port = runner.addresses[0][1]
        await window.page.goto(f"http://localhost:{port}/")
        async with window.page.expect_navigation() as going:
            await window.page.evaluate("document.forms[0].submit()")
        assert (await going.value).status in (401, 403)
    finally:
        await runner.cleanup()
    assert not guarded.brokers[0].topics["payments"].channels["ledger"].paused


async def test_a_node_that_is_down_is_named_and_a_restart_of_the_daemon_is_survived(
    browser: Any, tmp_path: Path
) -> None:
    async with Cluster(tmp_path) as cluster, View.open(browser, cluster.url) as view:
        for number in range(3):
            await cluster.publish("payments", [payment(i) for i in range(10)], number)
        await cluster.admin.state.sample()
        await view.go("/")
        await view.says("3/3 nodes")
        down = cluster.node(2)
        await cluster.stop_broker(2)
        await view.says("2/3 nodes")
        await view.says(f"Not in these numbers: {down} does not answer.")
        assert down in await view.text(".problems")
        await view.page.locator(".problems a", has_text=down).click()
        await view.says("does not answer")
        await view.go("/")

        # The daemon goes and comes back while the page is open.
        view.allowed.append("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_EMPTY_RESPONSE|ERR_CONNECTION")
        await view.says("live")
        await cluster.admin.stop()
        await view.says("disconnected for")
        await cluster.start_admin()
        await view.says("nsqadmin was restarted.", 30_000)
        await view.says("live")
        assert "disconnected" not in await view.text(".bar")
        # It goes on as before: what is published now is seen.
        await cluster.publish("payments", [payment(i) for i in range(100)])
        await view.page.wait_for_function("() => document.querySelector('.list tbody').innerText.includes('120')")
