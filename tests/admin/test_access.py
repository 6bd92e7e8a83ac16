"""Who may do what: every route with every kind of login and every trick that we know of, and logins themselves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flintmq.admin.assets import PAGES
from flintmq.admin.daemon import Admin
from flintmq.admin.pages_api import ACTION_ROLES
from flintmq.options import NsqadminOptions, parse
from support.http_client import HttpClient, request_of

from .conftest import Cluster
from .test_around import server

argon2 = pytest.importorskip("argon2", reason="the extra 'login' is not installed")

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Awaitable[Cluster]]
RANKS = {None: 0, "": 0, "view": 1, "operate": 2, "admin": 3}
USERS = {"vera": "view", "otto": "operate", "ada": "admin"}


@pytest.fixture
def users_file(tmp_path: Path) -> str:
    # Cheap hashes: what is tested is not how long they take.
    hasher = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    path = tmp_path / "users"
    path.write_text("# users\n" + "".join(f"{name} {role} {hasher.hash(name * 2)}\n" for name, role in USERS.items()))
    path.chmod(0o600)
    return str(path)


async def log_in(cluster: Cluster, name: str) -> tuple[str, str]:
    """The cookie and the token of a new session."""
    body = json.dumps({"user": name, "password": name * 2}).encode()
    answer = await cluster.ask("POST", "/api/v2/login", body)
    assert answer.status == 200, answer
    return answer.headers["set-cookie"].partition(";")[0], answer.json["csrf"]


class Call(NamedTuple):
    method: str
    target: str
    body: bytes | None
    role: str
    is_nsq: bool
    is_plain_read: bool


PARTS = {":topic": "none", ":channel": "c", ":node": "127.0.0.1:1", ":opt": "log_level", ":id": "j", ":reader": "r"}
PARTS |= {"*path": "x.js"}


def calls_of(cluster: Cluster) -> list[Call]:
    """Every route, some with several bodies: the role may depend on what is in them."""
    found = []
    for route in cluster.admin.site.guarded:
        if route.path in PAGES:
            continue
        target = route.path
        for part, name in PARTS.items():
            target = target.replace(part, name)
        is_plain = route.method == "GET" and route.role in ("", "view") and not route.is_private
        body = b"{}" if route.method != "GET" else None
        bodies: list[tuple[bytes | None, str, bool]] = [(body, route.role, route.is_nsq)]
        if route.method == "POST" and route.path.startswith("/api/topics/"):
            bodies = [(b'{"action":"pause"}', "operate", True), (b'{"action":"empty"}', "admin", True)]
        elif route.path == "/api/v2/actions" and route.method == "POST":
            node = cluster.node(0)
            bodies = [
                (
                    json.dumps({"action": action, "topic": "none", "channel": "c", "node": node}).encode(),
                    role,
                    action != "drain_node",
                )
                for action, role in ACTION_ROLES.items()
            ]
        elif route.path == "/config/:opt" and route.method == "PUT":
            bodies = [(b"info", "admin", True)]
        found += [Call(route.method, target, body, role, nsq, is_plain) for body, role, nsq in bodies]
    return found


class Trick(NamedTuple):
    name: str
    headers: tuple[str, ...]
    #: What it makes of its sender, by the way of logging in; missing: nothing.
    roles: dict[str, str | None]
    #: May it do what NSQ's nsqadmin does, as in NSQ?
    acl: frozenset[str] = frozenset()
    is_cookie: bool = False
    has_token: bool = False
    is_foreign: bool = False


#: How nsqadmin was started: options, and what somebody without anything is.
WAYS: dict[str, tuple[dict[str, Any], str | None, bool]] = {
    "off": ({}, "admin", True),
    "insecure": ({"http_address": "0.0.0.0:0", "insecure": True}, "admin", True),
    "none": ({"http_address": "0.0.0.0:0"}, "view", True),
    "proxy": ({"admin_users": ["ada"]}, "view", False),
    "proxy of anybody": ({"http_address": "0.0.0.0:0", "admin_users": ["ada"]}, "view", False),
    "proxy elsewhere": (
        {"http_address": "0.0.0.0:0", "admin_users": ["ada"], "trusted_proxy_cidrs": ["10.0.0.0/8"]},
        "view",
        False,
    ),
    "proxy here": (
        {"http_address": "0.0.0.0:0", "admin_users": ["ada"], "trusted_proxy_cidrs": ["127.0.0.0/8"]},
        "view",
        False,
    ),
    "password": ({"http_address": "0.0.0.0:0"}, None, False),
}
_PROXIES = {"proxy": "admin", "proxy here": "admin"}


async def tricks_of(cluster: Cluster, way: str) -> AsyncIterator[Trick]:
    header = "X-Forwarded-User"
    acl = frozenset({"proxy", "proxy of anybody", "proxy here"})
    yield Trick("nothing", (), {})
    yield Trick("the header", (f"{header}: ada",), dict(_PROXIES), acl)
    yield Trick("the header in other case", (f"{header.lower()}: ada",), dict(_PROXIES), acl)
    yield Trick("another user's header", (f"{header}: vera",), {})
    yield Trick("the name in other case", (f"{header}: ADA",), {})
    yield Trick("two headers", (f"{header}: vera", f"{header}: ada"), {})
    yield Trick("two equal headers", (f"{header}: ada", f"{header}: ada"), {})
    yield Trick("a list", (f"{header}: vera, ada",), {})
    yield Trick("underscores", ("X_Forwarded_User: ada",), {})
    yield Trick("a forwarded address", ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"), {})
    yield Trick("an overridden method", ("X-HTTP-Method-Override: GET",), {})
    yield Trick("a cookie out of thin air", ("Cookie: flintmq_session=admin", "X-Flintmq-Csrf: x"), {})
    yield Trick("an empty cookie", ("Cookie: flintmq_session=", "X-Flintmq-Csrf: "), {})
    yield Trick("a bearer token", ("Authorization: Bearer admin",), {})
    yield Trick("another origin", ("Origin: http://evil.example",), {}, is_foreign=True)
    yield Trick("another site", ("Sec-Fetch-Site: cross-site",), {}, is_foreign=True)
    if way == "password":
        for name, role in USERS.items():
            cookie, token = await log_in(cluster, name)
            login = {"password": role}
            with_token = (f"Cookie: {cookie}", f"X-Flintmq-Csrf: {token}")
            yield Trick(f"{name}'s session", with_token, login, is_cookie=True, has_token=True)
            yield Trick(f"{name}'s session, forged", (f"Cookie: {cookie}",), login, is_cookie=True)
            yield Trick(
                f"{name}'s session, wrong token",
                (f"Cookie: {cookie}", f"X-Flintmq-Csrf: {token[:-1]}"),
                login,
                is_cookie=True,
            )
            yield Trick(
                f"{name}'s session from elsewhere",
                (*with_token, "Origin: http://evil.example"),
                login,
                is_cookie=True,
                has_token=True,
                is_foreign=True,
            )
            yield Trick(f"{name}'s password", (basic(name, name * 2),), login)


def may(call: Call, trick: Trick, way: str) -> bool:
    """What must be, by the words of the documents."""
    _, role, acl = WAYS[way]
    if trick.is_foreign and not call.is_plain_read:
        return False
    if call.role == "":
        return True
    if trick.is_cookie and call.method != "GET" and not trick.has_token:
        return False
    role = trick.roles.get(way, role)
    if call.is_nsq and (acl or way in trick.acl):
        return True
    return RANKS[role] >= RANKS[call.role]


async def status_of(cluster: Cluster, call: Call, trick: Trick) -> int:
    if call.target in ("/api/v2/events", "/api/v2/tail"):
        # They have no end if they are allowed.
        async with HttpClient.connect(local(cluster)) as client:
            client.send(request_of(call.method, call.target, call.body, *trick.headers))
            line = await client.reader.readuntil(b"\r\n")
            return int(line.split()[1])
    return (await cluster.ask(call.method, call.target, call.body, *trick.headers)).status


def local(cluster: Cluster) -> str:
    return cluster.admin.http_address.replace("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize("way", list(WAYS))
async def test_nobody_acts_without_a_right(start: Start, way: str, users_file: str) -> None:
    options = dict(WAYS[way][0])
    if way == "password":
        options["users_file"] = users_file
    cluster = await start(1, **options)
    # Requests go to 127.0.0.1 whatever it listens on.
    cluster.clients[cluster.admin.http_address] = await cluster._to(local(cluster))
    await cluster.sample()
    wrong, denied = [], 0
    proven: dict[Call, int] = {}
    tricks = [trick async for trick in tricks_of(cluster, way)]
    calls = calls_of(cluster)
    for trick, call in itertools.product(tricks, calls):
        allowed = may(call, trick, way)
        if allowed and (b"drain_node" in (call.body or b"") or call.target.endswith("/logout")):
            # It would end what the others are tested with.
            continue
        if allowed:
            # That the right ones may do it is soon seen.
            proven[call] = proven.get(call, 0) + 1
            if proven[call] > 2 and not trick.is_cookie:
                continue
        known = len(cluster.admin.actions.entries)
        status = await status_of(cluster, call, trick)
        if (status in (401, 403)) == allowed:
            wrong.append((trick.name, call, status, allowed))
        if not allowed:
            denied += 1
            assert len(cluster.admin.actions.entries) == known, (trick, call)
    assert wrong == []
    assert denied > 50
    assert cluster.brokers[0].draining is False


# --- Logging in -------------------------------------------------------------------------------------------------------


async def test_the_shipped_settings_want_a_login(start: Start, users_file: str, tmp_path: Path) -> None:
    cluster = await start(1)
    text = (ROOT / "deploy" / "nsqadmin.toml").read_text()
    for shipped, here in (
        ("127.0.0.1:4171", "127.0.0.1:0"),
        ("127.0.0.1:4161", cluster.lookupd.http_address),
        ("/etc/nsqadmin/users", users_file),
        ("/var/lib/nsqadmin/", f"{tmp_path}/"),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    (tmp_path / "nsqadmin.toml").write_text(text)
    options = parse(NsqadminOptions, ["--strict-config", f"--config={tmp_path / 'nsqadmin.toml'}"])
    async with Admin(options) as admin, HttpClient.connect(admin.http_address) as client:
        assert (await client.get("/api/v2/session")).json["login"] == "password"
        assert (await client.get("/api/v2/overview")).status == 401
        assert (await client.get("/api/topics")).status == 401
        assert (await client.get("/api/v2/overview", basic("otto", "otto" * 2))).status == 200
        made = await client.ask("POST", "/api/topics", b'{"topic":"made"}', basic("otto", "otto" * 2))
        assert made.status == 200
    assert json.loads((tmp_path / "actions.jsonl").read_text())["user"] == "otto"


@pytest.fixture
async def guarded(start: Start, users_file: str) -> Cluster:
    return await start(1, users_file=users_file)


async def test_a_session_is_a_cookie_that_no_script_and_no_other_site_can_use(guarded: Cluster) -> None:
    body = b'{"user":"otto","password":"ottootto"}'
    cookie = (await guarded.ask("POST", "/api/v2/login", body)).headers["set-cookie"]
    assert "; HttpOnly; SameSite=Strict" in cookie and "Secure" not in cookie
    cookie = (await guarded.ask("POST", "/api/v2/login", body, "X-Forwarded-Proto: https")).headers["set-cookie"]
    assert cookie.endswith("; Secure")


async def test_a_session_ends_with_a_logout_and_with_its_user(guarded: Cluster, users_file: str) -> None:
    cookie, _ = await log_in(guarded, "vera")
    other, _ = await log_in(guarded, "vera")
    assert (await guarded.get("/api/v2/overview", f"Cookie: {cookie}")).status == 200
    await guarded.ask("POST", "/api/v2/logout", b"{}", f"Cookie: {cookie}")
    assert (await guarded.get("/api/v2/overview", f"Cookie: {cookie}")).status == 401
    assert (await guarded.get("/api/v2/overview", f"Cookie: {other}")).status == 200
    path = Path(users_file)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "vera" not in line))
    guarded.admin.reload()
    assert (await guarded.get("/api/v2/overview", f"Cookie: {other}")).status == 401


async def test_a_users_file_that_is_wrong_changes_nothing(guarded: Cluster, users_file: str) -> None:
    cookie, _ = await log_in(guarded, "vera")
    Path(users_file).write_text("vera root x\n")
    guarded.admin.reload()
    assert (await guarded.get("/api/v2/overview", f"Cookie: {cookie}")).status == 200


def login_of(user: str, password: str) -> bytes:
    return json.dumps({"user": user, "password": password}).encode()


async def test_attempts_are_limited_by_address_and_user(guarded: Cluster) -> None:
    statuses = [(await guarded.ask("POST", "/api/v2/login", login_of("vera", f"no {n}"))).status for n in range(6)]
    assert statuses == [401] * 5 + [429]
    right = await guarded.ask("POST", "/api/v2/login", login_of("vera", "veravera"))
    assert right.status == 429 and 0 < right.json["retry_after"] <= 60
    assert (await guarded.get("/api/topics", basic("vera", "veravera"))).status == 429
    # Neither the others of that address are locked out, nor the user elsewhere.
    assert (await guarded.get("/api/topics", basic("ada", "adaada"))).status == 200
    assert await status_from(guarded, "127.0.0.2", "vera", "veravera") == 200


def add_users(users_file: str) -> None:
    """Ten, ``u0`` to ``u9``, whose hashes are cheap, too."""
    path = Path(users_file)
    hashed = path.read_text().split()[-1]
    path.write_text(path.read_text() + "".join(f"u{number} view {hashed}\n" for number in range(10)))


async def test_attempts_are_limited_by_address_over_all_users(guarded: Cluster, users_file: str) -> None:
    add_users(users_file)
    guarded.admin.reload()
    for number in range(50):
        answer = await guarded.ask("POST", "/api/v2/login", login_of(f"u{number // 5}", f"no {number}"))
        assert answer.status == 401, number
    assert (await guarded.get("/api/topics", basic("ada", "adaada"))).status == 429
    assert await status_from(guarded, "127.0.0.2", "ada", "adaada") == 200


async def test_attempts_are_limited_by_user_over_all_addresses(guarded: Cluster) -> None:
    for number in range(50):
        assert await status_from(guarded, f"127.0.0.{2 + number // 5}", "ada", f"no {number}") == 401, number
    assert await status_from(guarded, "127.0.0.99", "ada", "adaada") == 429
    assert await status_from(guarded, "127.0.0.99", "vera", "veravera") == 200


async def test_users_behind_a_trusted_proxy_have_addresses_of_their_own(start: Start, users_file: str) -> None:
    add_users(users_file)
    cluster = await start(1, users_file=users_file, trusted_proxy_cidrs=["127.0.0.0/8"])
    for number in range(51):
        # What stands before the proxy's own word was written by the one who guesses.
        header = f"X-Forwarded-For: 10.9.9.{number}, 10.0.0.1, 127.0.0.5"
        answer = await cluster.ask("POST", "/api/v2/login", login_of(f"u{number // 5}", f"no {number}"), header)
        assert answer.status == (401 if number < 50 else 429), number
    answer = await cluster.ask("POST", "/api/v2/login", login_of("ada", "adaada"), "X-Forwarded-For: 10.0.0.2")
    assert answer.status == 200


def basic(user: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def status_from(cluster: Cluster, source: str, user: str, password: str) -> int:
    """Of a request that comes from another address of this machine."""
    host, _, port = cluster.admin.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        client = HttpClient(reader, writer)
        return (await client.get("/api/topics", basic(user, password))).status
    finally:
        writer.close()


async def test_a_right_password_is_right_however_many_send_it_at_once(guarded: Cluster) -> None:
    async def ask(user: str) -> int:
        async with HttpClient.connect(guarded.admin.http_address) as client:
            return (await client.get("/api/topics", basic(user, user * 2))).status

    assert await asyncio.gather(*(ask(user) for user in USERS for _ in range(10))) == [200] * 30


async def test_attempts_at_the_same_time_are_many_attempts(guarded: Cluster) -> None:
    async def ask(number: int) -> int:
        async with HttpClient.connect(guarded.admin.http_address) as client:
            return (await client.get("/api/topics", basic("vera", f"no {number}"))).status

    assert sorted(await asyncio.gather(*map(ask, range(20)))) == [401] * 5 + [429] * 15


@pytest.mark.parametrize("change", ["removed", "another password", "another role"])
@pytest.mark.parametrize("way", ["cookie", "basic"])
async def test_streams_end_with_the_right_to_see_them(start: Start, users_file: str, change: str, way: str) -> None:
    cluster = await start(1, users_file=users_file)
    await cluster.nsqd(0, "/topic/create?topic=orders")
    await cluster.sample()
    header = f"Cookie: {(await log_in(cluster, 'otto'))[0]}" if way == "cookie" else basic("otto", "ottootto")
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for target in ("/api/v2/tail?topic=orders", "/api/v2/events"):
            client = await stack.enter_async_context(HttpClient.connect(cluster.admin.http_address))
            client.send(request_of("GET", target, None, header))
            await client.reader.readuntil(b"event: hello")
            streams.append(client)
        path = Path(users_file)
        lines = [line.split() for line in path.read_text().splitlines()[1:]]
        hashes = {name: hashed for name, _, hashed in lines}
        new = {
            "removed": "",
            "another password": f"otto operate {hashes['ada']}\n",
            "another role": f"otto view {hashes['otto']}\n",
        }[change]
        path.write_text(f"ada admin {hashes['ada']}\n{new}")
        cluster.admin.reload()
        for number, client in enumerate(streams):
            if number == 1 and change == "another role":
                # That may be seen with the new role, too.
                cluster.admin.hub.tell("action", {})
                await client.reader.readuntil(b"event: action")
                continue
            async with asyncio.timeout(30):
                await client.reader.readuntil(b'{"reason":"logout"}')


async def test_jobs_are_told_to_those_who_may_list_them(guarded: Cluster) -> None:
    await guarded.nsqd(0, "/topic/create?topic=orders")
    await guarded.nsqd(0, "/channel/create?topic=orders&channel=c")
    await guarded.sample()
    async with contextlib.AsyncExitStack() as stack:
        heard = {}
        for name in ("vera", "otto"):
            client = await stack.enter_async_context(HttpClient.connect(guarded.admin.http_address))
            client.send(request_of("GET", "/api/v2/events", None, basic(name, name * 2)))
            await client.reader.readuntil(b"event: snapshot")
            heard[name] = client
        body = b'{"kind":"count","topic":"orders","channel":"c"}'
        job = (await guarded.ask("POST", "/api/v2/jobs", body, basic("otto", "ottootto"))).json["id"].encode()
        await heard["otto"].reader.readuntil(job)
        guarded.admin.hub.tell("action", {})
        assert job not in await heard["vera"].reader.readuntil(b"event: action")


async def test_a_notification_names_who_logged_in(start: Start, users_file: str) -> None:
    heard: list[Any] = []
    async with server(heard) as endpoint:
        cluster = await start(1, users_file=users_file, notification_http_endpoint=f"http://{endpoint}/hook")
        cookie, token = await log_in(cluster, "ada")
        headers = (f"Cookie: {cookie}", f"X-Flintmq-Csrf: {token}", basic("otto", "nonsense"))
        assert (await cluster.ask("POST", "/api/topics", b'{"topic":"made"}', *headers)).status == 200
        await cluster.admin.notified()
    assert json.loads(heard[0][3])["user"] == "ada"


async def test_nobody_takes_all_event_streams(guarded: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.admin.hub.MOST_OF_ONE", 2)
    async with contextlib.AsyncExitStack() as stack:
        lines = []
        for name in ("vera", "vera", "vera", "ada"):
            client = await stack.enter_async_context(HttpClient.connect(guarded.admin.http_address))
            client.send(request_of("GET", "/api/v2/events", None, basic(name, name * 2)))
            lines.append((await client.reader.readuntil(b"\r\n")).split()[1])
            if lines[-1] == b"200":
                await client.reader.readuntil(b"event: hello")
    assert lines == [b"200", b"200", b"429", b"200"]


async def test_an_unknown_user_is_told_what_a_wrong_password_is_told(guarded: Cluster) -> None:
    unknown = await guarded.ask("POST", "/api/v2/login", b'{"user":"mallory","password":"x"}')
    known = await guarded.ask("POST", "/api/v2/login", b'{"user":"vera","password":"x"}')
    assert (unknown.status, unknown.body) == (known.status, known.body) == (401, b'{"message":"INVALID_LOGIN"}')


async def test_scripts_send_name_and_password(guarded: Cluster) -> None:
    otto = basic("otto", "ottootto")
    assert (await guarded.get("/api/topics", otto)).json == {"topics": [], "message": ""}
    assert (await guarded.ask("POST", "/api/topics", b'{"topic":"made"}', otto)).status == 200
    assert (await guarded.ask("DELETE", "/api/topics/made", None, otto)).status == 403
    assert guarded.admin.actions.entries[-1].user == "otto"
