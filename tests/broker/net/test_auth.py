"""Authorization against an auth server: what it is asked, what its answers allow, and what a client is told.

Where a test takes ``nsqd``, NSQ's own daemon has to pass it too, so that the expectations are the Go daemon's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker
from test_patterns import MATCHES, REFUSED

from flintmq.broker.daemon import Broker
from flintmq.broker.net import guesses
from flintmq.broker.net.auth import LARGEST_ANSWER, MOST_STEPS, read_grant
from flintmq.errors import AuthError
from flintmq.protocol.wire import FRAME_MESSAGE, FRAME_RESPONSE, decode_message, encode_command, encode_mpub, valid_name
from support.ports import held_port
from support.secure import PATIENT, AuthServer, Certificates, Peer, auth, go_nsqd, grants, pub, run_go, until

OK = b"OK"
SUB = b"SUB t c\n"
DPUB = encode_command(b"DPUB", b"t", b"0", body=b"x")
MPUB = encode_mpub(b"t", [b"x"])
#: Every command that needs a right, by its name.
GUARDED = {"PUB": pub(), "MPUB": MPUB, "DPUB": DPUB, "SUB": SUB}


@pytest.fixture
async def server() -> AsyncIterator[AuthServer]:
    async with AuthServer.start() as server:
        yield server


@pytest.fixture
def start_broker(start_broker: StartBroker) -> StartBroker:
    """As ever, but patient with the auth server."""

    async def start(**options: Any) -> Broker:
        return await start_broker(**{**PATIENT, **options})

    return start


@pytest.fixture(params=["flintmq", pytest.param("go", marks=pytest.mark.interop)])
async def nsqd(request: pytest.FixtureRequest, server: AuthServer, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a daemon that asks the server."""
    if request.param == "go":
        patience = ("--http-client-request-timeout=10m", "--http-client-connect-timeout=10m")
        async with run_go(f"--auth-http-address={server.address}", *patience) as address:
            yield address
    else:
        options = {**PATIENT, "auth_http_addresses": [server.address], "disk_reserve": 0}
        async with Broker(data_path=tmp_path, **options) as broker:
            yield broker.tcp_address


async def asked(address: str, *commands: bytes) -> list[bytes]:
    """What the daemon answers to these commands, each sent when the one before was answered."""
    async with Peer.connect(address) as peer:
        return [await peer.ask(command) for command in commands]


# --- AUTH -------------------------------------------------------------------------------------------------------------


async def test_auth_answers_with_the_identity_and_the_number_of_authorizations(nsqd: str, server: AuthServer) -> None:
    server.answer = grants(identity="<Ä & b>", identity_url="http://x/?a=1&b")
    [answer] = await asked(nsqd, auth(b"s"))
    expected = r'{"identity":"\u003cÄ \u0026 b\u003e","identity_url":"http://x/?a=1\u0026b","permission_count":1}'
    assert answer == expected.encode()


async def test_auth_is_said_to_be_required(nsqd: str) -> None:
    async with Peer.connect(nsqd) as peer:
        assert (await peer.negotiate())["auth_required"] is True


@pytest.mark.parametrize("secret", [b"s", b"a b&c=d+e%/\xc3\xa4~", b"\xff\x00\n", b"x" * 3000])
async def test_the_server_is_asked_in_the_query(nsqd: str, server: AuthServer, secret: bytes) -> None:
    await asked(nsqd, auth(secret))
    [question] = server.questions
    assert question.method == "GET"
    encoded = "".join(
        chr(byte)
        if (chr(byte).isalnum() and byte < 128) or chr(byte) in "-_.~"
        else "+"
        if byte == 32
        else f"%{byte:02X}"
        for byte in secret
    )
    assert question.target == f"/auth?common_name=&remote_ip=127.0.0.1&secret={encoded}&tls=false"
    assert question.headers["accept"] == "application/vnd.nsq; version=1.0"


@pytest.mark.parametrize("verb", GUARDED)
async def test_without_auth_nothing_that_needs_a_right_is_done(nsqd: str, server: AuthServer, verb: str) -> None:
    assert await asked(nsqd, GUARDED[verb]) == [b"E_AUTH_FIRST AUTH required before " + verb.encode()]
    assert server.questions == []


@pytest.mark.parametrize("verb", GUARDED)
async def test_with_the_right_it_is_done(nsqd: str, verb: str) -> None:
    assert (await asked(nsqd, auth(b"s"), GUARDED[verb]))[1] == OK


async def test_auth_comes_once(nsqd: str) -> None:
    answers = await asked(nsqd, auth(b"s"), auth(b"s"))
    assert answers[1] == b"E_INVALID AUTH already set"


async def test_auth_comes_before_sub(nsqd: str) -> None:
    answers = await asked(nsqd, auth(b"s"), SUB, auth(b"s"))
    assert answers[2] == b"E_INVALID cannot AUTH in current state"


async def test_commands_behind_auth_wait_for_its_answer(nsqd: str) -> None:
    async with Peer.connect(nsqd) as peer:
        peer.send(auth(b"s") + pub() + MPUB + SUB + b"RDY 5\n")
        frames = [await peer.frame() for _ in range(6)]
        assert frames[0] is not None and b"permission_count" in frames[0][1]
        assert frames[1:4] == [(FRAME_RESPONSE, OK)] * 3
        assert all(frame is not None and frame[0] == FRAME_MESSAGE for frame in frames[4:])


FAILS: dict[str, Any] = {
    "a refusal": (403, b"{}"),
    "an error": (500, b"{}"),
    "nothing there": (404, b""),
    "no content": (200, b""),
    "no JSON": b"hello",
    "an array": [],
    "no ttl": {"authorizations": []},
    "a ttl of 0": grants(ttl=0),
    "a ttl of -1": grants(ttl=-1),
    "a ttl with a fraction": grants(ttl=1.5),
    "a ttl in quotes": grants(ttl="60"),
    "an unknown permission": grants(permissions=["publish", "delete"]),
    "a permission in another case": grants(permissions=["Publish"]),
    "a bad pattern for topics": grants("("),
    "a bad pattern for channels": grants(channels=[".*", "*"]),
    "a number for a topic": {**grants(), "authorizations": [{"topic": 1, "channels": [], "permissions": []}]},
    "a word for channels": {**grants(), "authorizations": [{"topic": "", "channels": "x", "permissions": []}]},
    "an object for authorizations": grants(authorizations={}),
    "a number for an identity": grants(identity=1),
}


@pytest.mark.parametrize("answer", FAILS.values(), ids=FAILS.keys())
async def test_an_answer_that_is_no_good_grants_nothing(nsqd: str, server: AuthServer, answer: Any) -> None:
    server.answer = answer
    async with Peer.connect(nsqd) as peer:
        assert await peer.error(auth(b"s")) == b"E_AUTH_FAILED AUTH failed"


TAKEN: dict[str, Any] = {
    "keys in another case": {
        "TTL": 60,
        "Authorizations": [{"Topic": ".*", "CHANNELS": [".*"], "Permissions": ["publish"]}],
    },
    "null for what is not needed": {**grants(), "identity": None, "identity_url": None},
    "keys that nobody knows": grants(more={"a": [1, 2.5, None]}),
}


@pytest.mark.parametrize("answer", TAKEN.values(), ids=TAKEN.keys())
async def test_an_answer_may_be_written_as_go_reads_it(nsqd: str, server: AuthServer, answer: Any) -> None:
    server.answer = answer
    assert (await asked(nsqd, auth(b"s"), pub()))[1] == OK


@pytest.mark.parametrize("nothing", [[], None], ids=["empty", "null"])
async def test_an_answer_without_authorizations_says_so(nsqd: str, server: AuthServer, nothing: Any) -> None:
    server.answer = grants(authorizations=nothing)
    async with Peer.connect(nsqd) as peer:
        assert await peer.error(auth(b"s")) == b"E_UNAUTHORIZED AUTH no authorizations found"


async def test_a_server_that_is_not_there_grants_nothing(nsqd: str, server: AuthServer) -> None:
    """Its listener is closed: nobody takes the connection."""
    server.listener.close()
    async with Peer.connect(nsqd) as peer:
        assert await peer.error(auth(b"s")) == b"E_AUTH_FAILED AUTH failed"


async def test_another_server_is_asked_when_one_fails(server: AuthServer, start_broker: StartBroker) -> None:
    async with AuthServer.start() as gone:
        pass
    async with AuthServer.start() as broken:
        broken.answer = (500, b"")
        broker = await start_broker(auth_http_addresses=[gone.address, broken.address, server.address])
        rounds = 0
        # Not always from the same one on.
        while not 0 < len(broken.questions) < rounds:
            assert (await asked(broker.tcp_address, auth(b"s"), pub()))[1] == OK
            rounds += 1
            assert len(server.questions) == rounds < 200


# --- What is allowed --------------------------------------------------------------------------------------------------

# Answer, what works, what does not.
RIGHTS: list[Any] = [
    pytest.param(grants(permissions=["publish"]), ["PUB", "MPUB", "DPUB"], ["SUB"], id="publish only"),
    pytest.param(grants(permissions=["subscribe"]), ["SUB"], ["PUB", "MPUB", "DPUB"], id="subscribe only"),
    pytest.param(grants(permissions=[]), [], ["SUB", "PUB", "MPUB", "DPUB"], id="neither"),
    pytest.param(grants("^u$"), [], ["SUB", "PUB", "MPUB", "DPUB"], id="another topic"),
    pytest.param(grants(channels=["^d$"]), [], ["SUB", "PUB", "MPUB", "DPUB"], id="another channel"),
    pytest.param(grants(channels=["^c$"]), ["SUB"], ["PUB", "MPUB", "DPUB"], id="the channel by name"),
    pytest.param(grants(channels=["^$"]), ["PUB", "MPUB", "DPUB"], ["SUB"], id="the channel of a publish"),
    pytest.param(grants(channels=["^d$", "c"]), ["SUB"], ["PUB"], id="one of two channels"),
    pytest.param(grants(channels=[]), [], ["SUB", "PUB", "MPUB", "DPUB"], id="no channels"),
    pytest.param(grants("", [""]), ["SUB", "PUB", "MPUB", "DPUB"], [], id="empty patterns"),
    pytest.param({**grants(), "authorizations": [{}]}, [], ["SUB", "PUB"], id="an empty authorization"),
    pytest.param(
        grants(authorizations=grants("^x$")["authorizations"] + grants("^t$", [".*"], ["publish"])["authorizations"]),
        ["PUB"],
        ["SUB"],
        id="the second authorization",
    ),
]


@pytest.mark.parametrize(("answer", "works", "fails"), RIGHTS)
async def test_an_authorization_allows_what_it_says(
    nsqd: str, server: AuthServer, answer: Any, works: list[str], fails: list[str]
) -> None:
    server.answer = answer
    for verb in works:
        assert (await asked(nsqd, auth(b"s"), GUARDED[verb]))[1] == OK
    for verb in fails:
        channel = "c" if verb == "SUB" else ""
        expected = f'E_UNAUTHORIZED AUTH failed for {verb} on "t" "{channel}"'
        async with Peer.connect(nsqd) as peer:
            await peer.ask(auth(b"s"))
            assert await peer.error(GUARDED[verb]) == expected.encode()


async def test_names_and_bodies_are_looked_at_before_rights_as_in_nsq(nsqd: str, server: AuthServer) -> None:
    server.answer = grants("^u$")
    for command, expected in (
        (b"PUB !\n", b'E_BAD_TOPIC PUB topic name "!" is not valid'),
        (b"SUB t !\n", b'E_BAD_CHANNEL SUB channel name "!" is not valid'),
        (b"PUB t\n\0\0\0\0", b"E_BAD_MESSAGE PUB invalid message body size 0"),
        # A batch is not even read.
        (b"MPUB t\n", b'E_UNAUTHORIZED AUTH failed for MPUB on "t" ""'),
        (b"DPUB t x\n", b"E_INVALID DPUB could not parse timeout x"),
    ):
        async with Peer.connect(nsqd) as peer:
            await peer.ask(auth(b"s"))
            assert await peer.error(command) == expected


@pytest.mark.interop
async def test_the_go_daemon_agrees_about_patterns(server: AuthServer) -> None:
    """By publishing to, and by subscribing to channels of, every name that a pattern is tried with."""
    go_nsqd()
    tries = [(source, name, yes) for source, good, bad in MATCHES for names, yes in ((good, True), (bad, False))
             for name in names if valid_name(name)]  # fmt: skip
    patterns = list(dict.fromkeys(source for source, _, _ in MATCHES)) + REFUSED
    server.answer = lambda question: grants(patterns[int(question.fields["secret"][0])])
    limit = asyncio.Semaphore(20)
    async with run_go(f"--auth-http-address={server.address}") as address:

        async def decision(source: str, name: str) -> bytes:
            async with limit, Peer.connect(address) as peer:
                answer = await peer.ask(auth(b"%d" % patterns.index(source)))
                return answer if answer.startswith(b"E_") else await peer.ask(pub(name.encode()))

        answers = await asyncio.gather(*(decision(source, name) for source, name, _ in tries))
        wrong = [
            (t, a) for t, a in zip(tries, answers, strict=True) if (a == OK) is not t[2] or a.startswith(b"E_AUTH")
        ]
        assert wrong == []
        answers = await asyncio.gather(*(decision(source, "t") for source in REFUSED))
        assert [s for s, a in zip(REFUSED, answers, strict=True) if a != b"E_AUTH_FAILED AUTH failed"] == []
    assert len(tries) > 100


def test_a_decision_is_remembered_and_there_is_an_end_to_that() -> None:
    grant = read_grant(json.dumps(grants("^t")).encode())
    for _ in range(2):
        for number in range(2_000):
            assert grant.allows(f"t{number}", "") and not grant.allows(f"u{number}", "")
    assert len(grant._decided) <= 256


def test_patterns_have_a_limit_all_together() -> None:
    entry = grants("a.b" * 100)["authorizations"][0]
    with pytest.raises(AuthError, match="too large"):
        read_grant(json.dumps(grants(authorizations=[entry] * (MOST_STEPS // 300 + 1))).encode())
    # Plain names cost next to nothing.
    many = [{"topic": f"^topic-{i}$", "channels": [""], "permissions": ["publish"]} for i in range(3_000)]
    assert read_grant(json.dumps(grants(authorizations=many)).encode()).allows("topic-2999", "")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"ttl":NaN}', b"\xff\xfe", b'{"ttl":1e400}', b"null", b"0"])
def test_an_answer_of_garbage_raises_only_an_auth_error(body: bytes) -> None:
    with pytest.raises(AuthError):
        read_grant(body)


# --- Expiry -----------------------------------------------------------------------------------------------------------


async def expired(peer: Peer, command: bytes, server: AuthServer) -> bytes:
    """Ask again and again until the authorization had to be asked for once more; what was answered then."""
    before = len(server.questions)
    while True:
        answer = await peer.ask(command)
        if answer != OK or len(server.questions) > before:
            return answer


@pytest.mark.parametrize("verb", ["PUB", "MPUB", "DPUB"])
async def test_an_authorization_that_has_expired_is_asked_for_again(nsqd: str, server: AuthServer, verb: str) -> None:
    server.answer = grants(ttl=1)
    async with Peer.connect(nsqd) as peer:
        await peer.ask(auth(b"the secret"))
        assert await expired(peer, GUARDED[verb], server) == OK
    assert [question.fields["secret"] for question in server.questions[:2]] == [["the secret"]] * 2


@pytest.mark.parametrize("verb", ["PUB", "MPUB", "DPUB"])
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ((403, b""), "E_AUTH_FAILED AUTH failed"),
        (grants("^u$"), 'E_UNAUTHORIZED AUTH failed for {verb} on "t" ""'),
        (grants(authorizations=[]), 'E_UNAUTHORIZED AUTH failed for {verb} on "t" ""'),
    ],
    ids=["refused", "another topic", "nothing"],
)
async def test_a_right_that_was_taken_away_is_gone_when_it_expires(
    nsqd: str, server: AuthServer, verb: str, later: Any, expected: str
) -> None:
    server.answer = grants(ttl=1)
    async with Peer.connect(nsqd) as peer:
        await peer.ask(auth(b"s"))
        assert await peer.ask(GUARDED[verb]) == OK
        server.answer = later
        assert await expired(peer, GUARDED[verb], server) == expected.format(verb=verb).encode()


async def test_a_subscription_outlives_its_authorization(nsqd: str, server: AuthServer) -> None:
    server.answer = grants(ttl=1)
    async with Peer.connect(nsqd) as consumer, Peer.connect(nsqd) as producer:
        await consumer.ask(auth(b"s"))
        assert await consumer.ask(SUB) == OK
        await producer.ask(auth(b"s"))
        assert await expired(producer, pub(), server) == OK
        server.answer = (403, b"")
        consumer.send(b"RDY 1\n")
        frame = await consumer.frame()
        assert frame is not None and frame[0] == FRAME_MESSAGE
        consumer.send(b"FIN %s\n" % decode_message(frame[1]).id)


async def test_the_short_way_of_publishes_ends_with_the_authorization(
    start_broker: StartBroker, server: AuthServer
) -> None:
    server.answer = grants(ttl=2)
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.ask(auth(b"s"))
        [session] = broker.sessions.values()
        assert await peer.ask(pub()) == OK
        lane = session.lane
        assert lane is not None, "authorized publishers may take the short way"
        assert await peer.ask(pub()) == OK
        server.answer = (403, b"")
        await until(lambda: session.lane is None)
        count = broker.topics["t"].message_count
        assert await peer.error(pub()) == b"E_AUTH_FAILED AUTH failed"
        assert broker.topics["t"].message_count == count


async def test_the_short_way_of_one_topic_is_none_to_another(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = grants("^t$")
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.ask(auth(b"s"))
        assert [await peer.ask(pub()) for _ in range(3)] == [OK] * 3
        assert await peer.ask(b"PUB t\n\0\0\0\1x") == OK
        assert await peer.error(pub(b"u")) == b'E_UNAUTHORIZED AUTH failed for PUB on "u" ""'
    assert list(broker.topics) == ["t"]


async def test_an_empty_line_behind_an_authorized_publish_is_an_unknown_command(
    start_broker: StartBroker, server: AuthServer
) -> None:
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.ask(auth(b"s"))
        assert await peer.ask(pub()) == OK
        assert await peer.error(b"\n") == b"E_INVALID invalid command "


# --- Waiting ----------------------------------------------------------------------------------------------------------


async def test_while_one_client_waits_for_the_server_others_are_served(
    start_broker: StartBroker, server: AuthServer
) -> None:
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as first, Peer.connect(broker.tcp_address) as second:
        server.answer = None
        first.send(auth(b"slow") + pub(b"later"))
        await until(lambda: len(server.questions) == 1)
        server.answer = grants()
        assert b"permission_count" in await second.ask(auth(b"fast"))
        assert await second.ask(pub(b"now")) == OK
        assert list(broker.topics) == ["now"]


async def test_a_server_that_never_answers_is_given_up(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = None
    broker = await start_broker(auth_http_addresses=[server.address], http_client_request_timeout=50_000_000)
    async with Peer.connect(broker.tcp_address) as peer:
        assert await peer.error(auth(b"s") + pub()) == b"E_AUTH_FAILED AUTH failed"
    assert not broker.topics


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(
    start_broker: StartBroker, server: AuthServer
) -> None:
    server.answer = None
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        peer.send(auth(b"s"))
        await until(lambda: len(server.questions) == 1)
        [session] = broker.sessions.values()
        assert session.authorization is not None
        task = session.authorization.asked
        assert task is not None
        session.drop()
        await until(task.done)
        assert task.cancelled()
    await until(lambda: not broker.sessions)


async def test_the_broker_stops_while_somebody_waits_for_the_server(
    start_broker: StartBroker, server: AuthServer
) -> None:
    server.answer = None
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        peer.send(auth(b"s"))
        await until(lambda: len(server.questions) == 1)
        await broker.stop()
        assert await peer.frame() is None


async def test_who_waits_for_the_server_is_not_taken_for_silent(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = None
    broker = await start_broker(auth_http_addresses=[server.address], http_client_request_timeout=600_000_000_000)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(heartbeat_interval=1000)
        peer.send(auth(b"s"))
        await until(lambda: len(server.questions) == 1)
        [session] = broker.sessions.values()
        due = session.heartbeat.next
        # Two heartbeats without a command end any other connection.
        await until(lambda: session.heartbeat.next > due + 1.5 or not broker.sessions)
        assert list(broker.sessions.values()) == [session]


async def test_auth_behind_publishes_is_answered_behind_them(start_broker: StartBroker, server: AuthServer) -> None:
    broker = await start_broker(auth_http_addresses=[server.address], durability="fsync")
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.ask(auth(b"s"))
        peer.send(pub() + pub() + auth(b"again"))
        assert [await peer.frame() for _ in range(2)] == [(FRAME_RESPONSE, OK)] * 2
        assert await peer.error() == b"E_INVALID AUTH already set"


async def test_a_very_large_answer_is_refused(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = grants(identity="x" * LARGEST_ANSWER)
    broker = await start_broker(auth_http_addresses=[server.address])
    assert await asked(broker.tcp_address, auth(b"s")) == [b"E_AUTH_FAILED AUTH failed"]
    server.answer = grants(identity="x" * (LARGEST_ANSWER // 2))
    [answer] = await asked(broker.tcp_address, auth(b"s"))
    assert answer.startswith(b'{"identity":"xxx')


async def test_a_pattern_that_could_run_for_ever_stops_nobody(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = grants("^(([a-z])+.)+[A-Z]([a-z])+$", ["(a|a)*$"])
    broker = await start_broker(auth_http_addresses=[server.address])
    name = b"a" * 63
    answers = await asked(broker.tcp_address, auth(b"s"), pub(name))
    assert answers[1] == b'E_UNAUTHORIZED AUTH failed for PUB on "%s" ""' % name


# --- Who asks, and how ------------------------------------------------------------------------------------------------


async def test_post_sends_every_value_as_a_list(start_broker: StartBroker, server: AuthServer) -> None:
    broker = await start_broker(auth_http_addresses=[server.address], auth_http_request_method="post")
    answers = await asked(broker.tcp_address, auth(b"<s & \xff>"), pub())
    assert answers[1] == OK
    [question] = server.questions
    assert (question.method, question.target) == ("POST", "/auth")
    expected = r'{"common_name":[""],"remote_ip":["127.0.0.1"],"secret":["\u003cs \u0026 �\u003e"],"tls":["false"]}'
    assert question.body == expected.encode()
    assert question.headers["content-type"] == "application/json"
    assert question.headers["accept"] == "application/vnd.nsq; version=1.0"


async def test_a_whole_url_is_used_as_it_is(start_broker: StartBroker, server: AuthServer) -> None:
    broker = await start_broker(auth_http_addresses=[f"http://{server.address}/my/path"])
    await asked(broker.tcp_address, auth(b"s"))
    assert server.questions[0].target.startswith("/my/path?common_name=")


async def test_a_client_on_a_unix_socket_has_no_address(
    start_broker: StartBroker, server: AuthServer, tmp_path: Path
) -> None:
    broker = await start_broker(auth_http_addresses=[server.address], tcp_address=str(tmp_path / "nsqd.sock"))
    await asked(broker.tcp_address, auth(b"s"))
    assert server.questions[0].fields["remote_ip"] == [""]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def test_the_server_learns_of_tls_and_of_the_certificate(
    start_broker: StartBroker, server: AuthServer, certificates: Certificates
) -> None:
    options = {**certificates.options, "tls_client_auth_policy": "require-verify", "tls_root_ca_file": certificates.ca}
    broker = await start_broker(auth_http_addresses=[server.address], **options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        await peer.encrypt(certificates.client(signed_by=certificates.authority, common_name="Some & Body"))
        assert await peer.frame() == (FRAME_RESPONSE, OK)
        await peer.ask(auth(b"s"))
        assert await peer.ask(pub()) == OK
        [session] = broker.sessions.values()
        assert session.lane is None, "encrypted publishes have no short way"
    assert server.questions[0].fields == {
        "common_name": ["Some & Body"],
        "remote_ip": ["127.0.0.1"],
        "secret": ["s"],
        "tls": ["true"],
    }


def server_side(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


async def test_a_server_with_tls_is_trusted_if_the_authority_vouches_for_it(
    start_broker: StartBroker, certificates: Certificates, tmp_path: Path
) -> None:
    async with AuthServer.start(server_side(certificates)) as server:
        address = f"https://{server.address}/auth"
        broker = await start_broker(auth_http_addresses=[address], tls_root_ca_file=certificates.ca)
        assert (await asked(broker.tcp_address, auth(b"s"), pub()))[1] == OK
        await broker.stop()
        # The system's authorities do not know it.
        broker = await start_broker(auth_http_addresses=[address])
        assert await asked(broker.tcp_address, auth(b"s")) == [b"E_AUTH_FAILED AUTH failed"]
        assert len(server.questions) == 1


async def test_a_server_that_wants_tls_may_say_on_which_port(
    start_broker: StartBroker, server: AuthServer, certificates: Certificates
) -> None:
    async with AuthServer.start(server_side(certificates)) as secure:
        port = int(secure.address.rpartition(":")[2])
        server.answer = (403, {"message": "TLS_REQUIRED", "https_port": port})
        broker = await start_broker(auth_http_addresses=[server.address], tls_root_ca_file=certificates.ca)
        assert (await asked(broker.tcp_address, auth(b"s"), pub()))[1] == OK
        assert secure.questions[0].target == server.questions[0].target


async def test_a_session_knows_who_it_is(start_broker: StartBroker, server: AuthServer) -> None:
    broker = await start_broker(auth_http_addresses=[server.address])
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate()
        [session] = broker.sessions.values()
        assert (session.authed, session.auth_identity, session.auth_identity_url) == (False, "", "")
        await peer.ask(auth(b"s"))
        expected = (True, "someone", "http://example")
        assert (session.authed, session.auth_identity, session.auth_identity_url) == expected


async def test_auth_without_a_server_is_disabled(start_broker: StartBroker) -> None:
    broker = await start_broker()
    assert await asked(broker.tcp_address, auth(b"s")) == [b"E_AUTH_DISABLED AUTH disabled"]


async def test_the_secret_is_not_in_the_log(
    start_broker: StartBroker, server: AuthServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "flintmq")
    broker = await start_broker(auth_http_addresses=[server.address])
    for answer in (grants(), (403, b""), (500, b"oops"), b"garbage"):
        server.answer = answer
        await asked(broker.tcp_address, auth(b"very-secret"), pub())
    assert "failed auth against" in caplog.text
    assert "very-secret" not in caplog.text


async def test_the_auth_server_of_the_documents_works(start_broker: StartBroker, tmp_path: Path) -> None:
    document = Path(__file__).resolve().parents[3] / "docs" / "security.md"
    [script] = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    port = held_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(port)), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        broker = await start_broker(auth_http_addresses=[f"127.0.0.1:{port}"])
        while (await asked(broker.tcp_address, auth(b"secret-of-the-shop")))[0].startswith(b"E_"):
            assert process.returncode is None
        shop, billing = auth(b"secret-of-the-shop"), auth(b"secret-of-billing")
        assert (await asked(broker.tcp_address, shop, pub(b"orders")))[1] == OK
        assert (await asked(broker.tcp_address, shop, pub(b"other")))[1].startswith(b"E_UNAUTHORIZED")
        assert (await asked(broker.tcp_address, billing, b"SUB orders billing\n"))[1] == OK
        assert (await asked(broker.tcp_address, billing, b"SUB orders other\n"))[1].startswith(b"E_UNAUTHORIZED")
        assert await asked(broker.tcp_address, auth(b"guess")) == [b"E_AUTH_FAILED AUTH failed"]
    finally:
        process.kill()
        await process.wait()


# --- A busy broker ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [pub(), MPUB, pub() * 50, DPUB, SUB], ids=["PUB", "MPUB", "PUBs", "DPUB", "SUB"])
async def test_nothing_slips_in_before_a_late_timer_ends_an_authorization(
    server: AuthServer, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, command: bytes
) -> None:
    """In a busy loop sockets are read before timers that are due. Whether a right holds is not up to a timer."""
    loop = asyncio.get_running_loop()
    real, later = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + later)
    broker = await start_broker(auth_http_addresses=[server.address])
    server.answer = grants(ttl=2)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.ask(auth(b"secret"))
        for words in (pub(), pub(), MPUB, MPUB) if command == MPUB else (pub(),) * 4:
            assert await peer.ask(words) == OK
        before = broker.topics["t"].message_count
        server.answer = (403, b"{}")
        peer.send(command)
        later = 3.0
        frame = await peer.frame()
        assert frame is not None and frame[1] == b"E_AUTH_FAILED AUTH failed"
        assert broker.topics["t"].message_count == before and not broker.topics["t"].channels


# --- Guessing ---------------------------------------------------------------------------------------------------------


async def attempt(broker: Broker, secret: bytes) -> bytes:
    async with Peer.connect(broker.tcp_address) as peer:
        return await peer.ask(auth(secret))


@pytest.mark.parametrize("method", ["get", "post"])
async def test_no_secret_follows_a_redirect(start_broker: StartBroker, server: AuthServer, method: str) -> None:
    """A server that is asked over https could send it on in the clear, or to somebody else."""
    async with AuthServer.start() as elsewhere:
        broker = await start_broker(auth_http_addresses=(server.address,), auth_http_request_method=method)
        for status in (301, 302, 303, 307, 308):
            server.answer = (status, b"", f"http://{elsewhere.address}/auth")
            assert await attempt(broker, b"s%d" % status) == b"E_AUTH_FAILED AUTH failed"
        assert elsewhere.questions == []
        assert len(server.questions) == 5


async def test_a_secret_that_was_refused_is_not_asked_for_again_at_once(
    start_broker: StartBroker, server: AuthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = (403, b"{}")
    broker = await start_broker(auth_http_addresses=(server.address,))
    for _ in range(4):
        assert await attempt(broker, b"guess") == b"E_AUTH_FAILED AUTH failed"
    assert len(server.questions) == 1
    # Another one is, and the same one later, when it may be known by then.
    server.answer = grants()
    assert b"permission_count" in await attempt(broker, b"other")
    monkeypatch.setattr("flintmq.broker.net.guesses.REFUSED_SECONDS", -1.0)
    server.answer = (403, b"{}")
    assert await attempt(broker, b"late") == b"E_AUTH_FAILED AUTH failed"
    server.answer = grants()
    assert b"permission_count" in await attempt(broker, b"late")


async def test_a_server_that_fails_has_refused_nothing(start_broker: StartBroker, server: AuthServer) -> None:
    broker = await start_broker(auth_http_addresses=(server.address,))
    server.answer = (500, b"{}")
    assert await attempt(broker, b"s") == b"E_AUTH_FAILED AUTH failed"
    server.answer = grants()
    assert b"permission_count" in await attempt(broker, b"s")


def test_an_address_that_guesses_waits_and_nobody_else_does() -> None:
    now = 0.0
    made = guesses.Guesses(lambda: now)
    good, bad = made.key(b"good"), made.key(b"bad")
    made.granted(good)
    waits = []
    for _ in range(20):
        waits.append(made.wait("10.0.0.1", bad) or 0.0)
        now += waits[-1]
        made.refused("10.0.0.1", bad)
    assert waits[: guesses.FREE] == [0.0] * guesses.FREE
    assert all(later >= sooner - 1e-9 for sooner, later in pairwise(waits))
    assert waits[guesses.FREE] == pytest.approx(guesses.FIRST_WAIT)
    assert waits[-1] == pytest.approx(guesses.LONGEST_WAIT)
    # Two at once would wait one after the other, but never for longer than the longest: then there is no question.
    assert made.wait("10.0.0.1", bad) == guesses.LONGEST_WAIT
    assert made.wait("10.0.0.1", bad) is None
    assert made.wait("10.0.0.1", good) == made.wait("10.0.0.2", bad) == made.wait("", bad) == 0.0
    now += guesses.FORGIVEN_SECONDS + 1
    assert made.wait("10.0.0.1", bad) == 0.0


async def test_guesses_in_parallel_are_no_more_guesses(
    start_broker: StartBroker, server: AuthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guesses, "LONGEST_WAIT", 1.0)
    server.answer = (403, b"{}")
    broker = await start_broker(auth_http_addresses=(server.address,))
    answers = await asyncio.gather(*(attempt(broker, b"guess %d" % number) for number in range(100)))
    assert set(answers) == {b"E_AUTH_FAILED AUTH failed"}
    assert len(server.questions) <= guesses.AT_ONCE + 4


async def test_questions_use_up_no_descriptors(
    start_broker: StartBroker, server: AuthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a connection to the auth server, which may take its time; addresses may be as many as there are."""
    monkeypatch.setattr(guesses, "AT_ONCE", 1000)
    broker = await start_broker(auth_http_addresses=(server.address,))
    server.answer = grants()
    assert b"permission_count" in await attempt(broker, b"known")
    server.answer = None
    async with contextlib.AsyncExitStack() as stack:
        for number in range(100):
            peer = await stack.enter_async_context(Peer.connect(broker.tcp_address))
            peer.send(auth(b"%d" % number))
        await until(lambda: len(server.questions) > guesses.AT_ONCE_IN_ALL)
        server.answer = grants()
        assert b"permission_count" in await attempt(broker, b"known")
        assert len(server.questions) == guesses.AT_ONCE_IN_ALL + 2
        assert broker.listeners.descriptors._count() == len(broker.sessions) + guesses.AT_ONCE_IN_ALL


async def test_a_fleet_with_good_secrets_gets_in_at_once(start_broker: StartBroker, server: AuthServer) -> None:
    server.answer = grants()
    broker = await start_broker(auth_http_addresses=(server.address,))
    answers = await asyncio.gather(*(attempt(broker, b"good %d" % number) for number in range(60)))
    assert all(b"permission_count" in answer for answer in answers)


@pytest.mark.parametrize(
    "answer", [b"this is no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"", None]
)
async def test_no_failure_of_an_auth_server_puts_a_secret_into_the_log(
    answer: bytes | None, start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        patience = 10**8 if answer is None else 10**11
        broker = await start_broker(auth_http_addresses=(f"{host}:{port}",), http_client_request_timeout=patience)
        assert await attempt(broker, b"s3cr3t") == b"E_AUTH_FAILED AUTH failed"
    assert f"AUTH: failed auth against {host}:{port} - " in caplog.text
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize("verb", ["PUB", "DPUB", "MPUB"])
async def test_no_body_is_awaited_of_a_client_without_the_right(
    verb: str, start_broker: StartBroker, server: AuthServer
) -> None:
    """It would be held until it is complete."""
    broker = await start_broker(auth_http_addresses=(server.address,))
    beginning = GUARDED[verb][:-1]
    assert await asked(broker.tcp_address, beginning) == [b"E_AUTH_FIRST AUTH required before " + verb.encode()]
    server.answer = grants(topic="^other$")
    [_, refusal] = await asked(broker.tcp_address, auth(b"good"), beginning)
    assert refusal == f'E_UNAUTHORIZED AUTH failed for {verb} on "t" ""'.encode()
    assert not broker.topics


def test_what_is_kept_of_guesses_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "MOST", 10)
    made = guesses.Guesses(lambda: 0.0)
    for number in range(100):
        made.refused(f"10.0.0.{number}", made.key(b"%d" % number))
        made.granted(made.key(b"%d" % number))
    assert max(map(len, (made._refused, made._good, made._addresses))) == 10
