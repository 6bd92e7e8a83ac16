"""What somebody without a right could try over TCP: all of it is refused with the right error and has no effect.

The same for HTTP is in test_intruders_http.py.

An attempt is a few words to the daemon and the error that has to come back. All attempts of a group meet one broker,
and afterwards it must hold no topic, no channel and no message that was not there before. That the same words do work
for somebody with the right is shown too, so that a refusal means something.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import FRAME_ERROR, FRAME_RESPONSE, OK_FRAME, encode_command, encode_mpub
from support.secure import (
    PATIENT,
    STRANGERS,
    TLS12,
    AuthServer,
    Certificates,
    Peer,
    auth,
    grants,
    identify,
    pub,
    strangers,
    until,
)

AT_LEAST = 300
AT_A_TIME = 16


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts come from one address, which would wait for longer and longer."""
    monkeypatch.setattr("flintmq.broker.net.guesses.LONGEST_WAIT", 0.0)


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def guarded(topic: bytes = b"t", channel: bytes = b"c") -> dict[str, bytes]:
    """Every command that needs a right."""
    return {
        "PUB": pub(topic),
        "MPUB": encode_mpub(topic, [b"x", b"y"]),
        "DPUB": encode_command(b"DPUB", topic, b"1", body=b"x"),
        "SUB": b"SUB %s %s\n" % (topic, channel),
    }


ID = b"0123456789abcdef"
#: And those that only act on what a right has given.
UNGUARDED = {
    "RDY": b"RDY 1\n",
    "FIN": b"FIN " + ID + b"\n",
    "REQ": b"REQ " + ID + b" 0\n",
    "TOUCH": b"TOUCH " + ID + b"\n",
    "CLS": b"CLS\n",
}
LAYERS: dict[str, dict[str, Any]] = {"plain": {}, "snappy": {"snappy": True}, "deflate": {"deflate": True}}


@dataclass(frozen=True)
class Attempt:
    name: str
    #: What is sent, and a pattern of the error that must come back and be the last word.
    words: bytes
    error: str
    #: An AUTH that succeeds comes before.
    secret: bytes | None = None
    #: So does a publish that is allowed, three times, so that the short way is open.
    allowed: bytes = b""
    #: What IDENTIFY negotiates before all this; None: no IDENTIFY.
    layers: dict[str, Any] | None = None


# --- Who may do what --------------------------------------------------------------------------------------------------

SECRETS: dict[bytes, Any] = {
    b"good": grants("^t$", [".*"]),
    b"publish": grants("^t$", [".*"], ["publish"]),
    b"subscribe": grants("^t$", [".*"], ["subscribe"]),
    b"neither": grants("^t$", [".*"], []),
    b"topic": grants("^t$"),
    b"channel": grants("^t$", ["^c$"], ["subscribe"]),
    b"no channels": grants("^t$", []),
    b"nothing": grants(authorizations=[]),
    b"short": grants("^t$", ttl=1),
    b"refused": (403, b"{}"),
    b"error": (500, b"{}"),
    b"garbage": b"<html>",
    b"no time": grants(ttl=0),
    b"bad pattern": grants("("),
    b"bad word": grants(permissions=["subscribe", "publish", "everything"]),
    b"half": b'{"ttl": 3600, "authorizations": [{"topic": ".*", "channels": [".*"]',
}


class Gatekeeper(AuthServer):
    """Knows what each secret is worth; nothing at all, once it is ``closed``."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.answer = self._decide

    def _decide(self, question: Any) -> Any:
        secret = question.fields["secret"][0].encode()
        if self.closed:
            return (403, b"{}")
        return SECRETS.get(secret, (403, b"{}"))


def unauthorized() -> Iterator[Attempt]:
    """Never asked for a right."""
    for layer, layers in LAYERS.items():
        for verb, words in guarded().items():
            for before, prefix in {
                "": b"",
                " after NOP": b"NOP\n",
                " after IDENTIFY": identify(),
                " after NOP and a carriage return": b"NOP\r\n",
            }.items():
                error = f"E_AUTH_FIRST AUTH required before {verb}"
                yield Attempt(f"{verb} without AUTH{before} ({layer})", prefix + words, error, layers=layers)
        for verb, words in UNGUARDED.items():
            error = f"E_INVALID cannot {verb} in current state"
            yield Attempt(f"{verb} without AUTH ({layer})", words, error, layers=layers)


def refused() -> Iterator[Attempt]:
    """Asked, and was refused; what is sent with the question must go unread."""
    failing = [
        b"refused",
        b"error",
        b"garbage",
        b"no time",
        b"bad pattern",
        b"bad word",
        b"half",
        b"unknown",
        b"\0",
        b"GOOD",
    ]
    for secret in failing:
        for verb, words in guarded().items():
            yield Attempt(f"{verb} behind AUTH {secret!r}", auth(secret) + words, "E_AUTH_FAILED AUTH failed")
    for verb, words in guarded().items():
        error = "E_UNAUTHORIZED AUTH no authorizations found"
        yield Attempt(f"{verb} behind AUTH without authorizations", auth(b"nothing") + words, error)
    # What could be taken for something else on its way to the auth server, or here.
    for secret in (
        *(
            b"x&secret=good",
            b"good&tls=true",
            b"good ",
            b" good",
            b"good\n",
            b"good\r",
            b"goo%64",
            b"g+o+o+d",
            b"good#",
        ),
        *(b"good\0", b'"],"secret":["good', b"good;", b"x\nPUB t\n" + sized(b"x"), b"x" * 4000),
    ):
        yield Attempt(f"AUTH {secret[:20]!r}", auth(secret) + pub(), "E_AUTH_FAILED AUTH failed")
    for length in (0, -1, -2147483648):
        words = b"AUTH\n" + struct.pack(">i", length) + b"good" + pub()
        yield Attempt(f"AUTH of length {length}", words, f"E_BAD_BODY AUTH invalid body size {length}")
    words = b"AUTH\n" + struct.pack(">i", 2147483647) + b"good" + pub()
    yield Attempt("AUTH of 2 GiB", words, "E_BAD_BODY AUTH body too big 2147483647 > 5242880")
    words = b"AUTH\n" + struct.pack(">i", 3) + b"good" + pub()
    yield Attempt("AUTH one byte short", words, "E_AUTH_FAILED AUTH failed")
    for word in (b"x", b"good", b""):
        words = b"AUTH " + word + b"\n" + sized(b"good") + pub()
        yield Attempt(f"AUTH with a parameter {word!r}", words, "E_INVALID AUTH invalid number of parameters")


def out_of_bounds() -> Iterator[Attempt]:
    """Has a right, but not this one. With the short way open for what is allowed, and without."""
    near = [b"u", b"T", b"tt", b"t.", b"t-", b"t#ephemeral", b"xt", b"t0", b"t" * 64]
    for topic in near:
        for verb, words in guarded(topic).items():
            channel = "c" if verb == "SUB" else ""
            error = re.escape(f'E_UNAUTHORIZED AUTH failed for {verb} on "{topic.decode()}" "{channel}"')
            yield Attempt(f"{verb} on {topic!r}", words, error, b"topic")
            yield Attempt(f"{verb} on {topic!r} after publishes", words, error, b"topic", pub())
    for channel in (b"d", b"C", b"cc", b"c#ephemeral", b"xc"):
        error = re.escape(f'E_UNAUTHORIZED AUTH failed for SUB on "t" "{channel.decode()}"')
        yield Attempt(f"SUB to {channel!r}", guarded(b"t", channel)["SUB"], error, b"channel")
    for secret, verbs in (
        (b"publish", ["SUB"]),
        (b"subscribe", ["PUB", "MPUB", "DPUB"]),
        (b"channel", ["PUB", "MPUB", "DPUB"]),
        (b"neither", ["PUB", "MPUB", "DPUB", "SUB"]),
        (b"no channels", ["PUB", "MPUB", "DPUB", "SUB"]),
    ):
        for verb in verbs:
            channel = b"c" if verb == "SUB" else b""
            error = re.escape(f'E_UNAUTHORIZED AUTH failed for {verb} on "t" "{channel.decode()}"')
            for layer, layers in LAYERS.items():
                yield Attempt(
                    f"{verb} with the rights of {secret!r} ({layer})", guarded()[verb], error, secret, layers=layers
                )
    for verb, words in guarded().items():
        yield Attempt(f"AUTH again before {verb}", auth(b"good") + words, "E_INVALID AUTH already set", b"neither")


def expired() -> Iterator[Attempt]:
    """Had the right, until it expired; the auth server does not renew it."""
    for layer, layers in LAYERS.items():
        for verb, words in guarded().items():
            error = "E_AUTH_FAILED AUTH failed"
            yield Attempt(f"{verb} too late ({layer})", words, error, b"short", layers=layers)
            allowed = {"PUB": pub(), "MPUB": guarded()["MPUB"]}.get(verb, pub())
            yield Attempt(f"{verb} too late after publishes ({layer})", words, error, b"short", allowed, layers)


# Words, and the error where nobody has said who he is.
TRICKS: dict[bytes, str] = {
    b"pub t\n" + sized(b"x"): "E_INVALID invalid command pub",
    b"Pub t\n" + sized(b"x"): "E_INVALID invalid command Pub",
    b" PUB t\n" + sized(b"x"): "E_INVALID invalid command ",
    b"\tPUB t\n" + sized(b"x"): "E_INVALID invalid command \tPUB",
    b"PUB\tt\n" + sized(b"x"): "E_INVALID invalid command PUB\tt",
    b"PUB  t\n" + sized(b"x"): 'E_BAD_TOPIC PUB topic name "" is not valid',
    b"PUB t \n" + sized(b"x"): "E_AUTH_FIRST AUTH required before PUB",
    b"PUB t\r\n" + sized(b"x"): "E_AUTH_FIRST AUTH required before PUB",
    b"PUB t t2\n" + sized(b"x"): "E_AUTH_FIRST AUTH required before PUB",
    b"PUB t\r\r\n" + sized(b"x"): 'E_BAD_TOPIC PUB topic name "t\\r" is not valid',
    b"PUB t\0\n" + sized(b"x"): 'E_BAD_TOPIC PUB topic name "t\\x00" is not valid',
    b"PUB ../t\n" + sized(b"x"): 'E_BAD_TOPIC PUB topic name "../t" is not valid',
    b"PUB \xef\xbd\x94\n" + sized(b"x"): 'E_BAD_TOPIC PUB topic name "ｔ" is not valid',
    b"PUB\0 t\n" + sized(b"x"): "E_INVALID invalid command PUB\0",
    b"\0PUB t\n" + sized(b"x"): "E_INVALID invalid command \0PUB",
    b"\rPUB t\n" + sized(b"x"): "E_INVALID invalid command \rPUB",
    b"\nPUB t\n" + sized(b"x"): "E_INVALID invalid command ",
    b"\xef\xbb\xbfPUB t\n" + sized(b"x"): "E_INVALID invalid command \ufeffPUB",
    "ＰＵＢ t\n".encode() + sized(b"x"): "E_INVALID invalid command ＰＵＢ",
    b"  V2PUB t\n" + sized(b"x"): "E_INVALID invalid command ",
    b"sub t c\n": "E_INVALID invalid command sub",
    b"SUB t c \n": "E_AUTH_FIRST AUTH required before SUB",
    b"SUB t  c\n": 'E_BAD_CHANNEL SUB channel name "" is not valid',
    b"SUB t\n": "E_INVALID SUB insufficient number of parameters",
    b"mpub t\n": "E_INVALID invalid command mpub",
    b"MPUB t\r\n": "E_AUTH_FIRST AUTH required before MPUB",
    b"DPUB t 0 0\n" + sized(b"x"): "E_AUTH_FIRST AUTH required before DPUB",
    b"GET /pub?topic=t HTTP/1.1\r\n\r\n": "E_INVALID invalid command GET",
    b"auth\n" + sized(b"good") + pub(): "E_INVALID invalid command auth",
}


def tricks() -> Iterator[Attempt]:
    for words, error in TRICKS.items():
        yield Attempt(f"{words[:24]!r}", words, re.escape(error))


def before_tls() -> Iterator[Attempt]:
    """In the clear, where TLS is required: no command but IDENTIFY is known, however it is written."""
    every = {**guarded(), **UNGUARDED, "AUTH": auth(b"good"), "NOP": b"NOP\n"}
    prefixes: dict[str, dict[str, Any] | None] = {
        "at once": None,
        "after IDENTIFY": {},
        "after IDENTIFY with snappy": {"snappy": True},
        "after IDENTIFY with deflate": {"deflate": True},
    }
    for verb, words in every.items():
        error = re.escape(f"E_INVALID cannot {verb} in current state (TLS required)")
        for when, layers in prefixes.items():
            yield Attempt(f"{verb} {when}", words, error, layers=layers)
        ungranted = encode_command(b"IDENTIFY", body=b'{"tls_v1":true}')
        yield Attempt(f"{verb} after IDENTIFY without negotiation", ungranted + words, error)
        yield Attempt(f"{verb} twice after IDENTIFY", identify() + identify() + words * 2, error)
    for words in TRICKS:
        word = words.split(b"\n")[0].split(b" ")[0].removesuffix(b"\r")
        error = f"E_INVALID cannot {word.decode()} in current state (TLS required)"
        yield Attempt(f"{words[:24]!r}", words, re.escape(error))


def instead_of_tls() -> Iterator[Attempt]:
    """TLS was agreed on, and then came something else."""
    error = "E_IDENTIFY_FAILED IDENTIFY failed tls: .*"
    every = {**guarded(), **UNGUARDED, "AUTH": auth(b"good"), "NOP": b"NOP\n", "IDENTIFY": identify()}
    for verb, words in every.items():
        for more in ({}, {"snappy": True}):
            yield Attempt(f"{verb} instead of a handshake {more}", words, error, layers={"tls_v1": True, **more})
    for version in (0x0300, 0x0301, 0x0302):
        yield Attempt(f"version {version:#x}", old_hello(version) + pub(), error, layers={"tls_v1": True})


GROUPS = {
    "unauthorized": (unauthorized, "auth"),
    "refused": (refused, "auth"),
    "out of bounds": (out_of_bounds, "auth"),
    "tricks": (tricks, "auth"),
    "expired": (expired, "auth"),
    "before TLS": (before_tls, "tls"),
    "instead of TLS": (instead_of_tls, "tls"),
}


def old_hello(version: int) -> bytes:
    """The hello of a client that knows nothing newer."""
    suites = b"".join(struct.pack(">H", suite) for suite in (0xC009, 0xC00A, 0xC013, 0xC014, 0x002F, 0x0035))
    body = struct.pack(">H", version) + os.urandom(32) + b"\0" + struct.pack(">H", len(suites)) + suites + b"\1\0"
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return struct.pack(">BHH", 0x16, 0x0301, len(message)) + message


# --- Trying -----------------------------------------------------------------------------------------------------------


@dataclass
class Target:
    broker: Broker
    keeper: Gatekeeper
    certificates: Certificates

    @property
    def address(self) -> str:
        return self.broker.tcp_address

    def state(self) -> dict[str, tuple[int, list[str]]]:
        return {name: (topic.message_count, list(topic.channels)) for name, topic in self.broker.topics.items()}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a while must not look like a client that does."""
    monkeypatch.setattr("flintmq.broker.net.upgrade.HANDSHAKE_TIMEOUT", 600.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def target(kind: str, certificates: Certificates, path: Path, **options: Any) -> AsyncIterator[Target]:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with Gatekeeper.start() as keeper:
        assert isinstance(keeper, Gatekeeper)
        if kind == "auth":
            options |= {**PATIENT, "auth_http_addresses": [keeper.address]}
        else:
            options |= {**certificates.options, "tls_required": "tcp-https"}
        async with Broker(data_path=path, disk_reserve=0, **options) as broker:
            yield Target(broker, keeper, certificates)
    assert raised == []


@contextlib.asynccontextmanager
async def prepared(target: Target, attempt: Attempt) -> AsyncIterator[Peer]:
    """A connection on which everything that is allowed has happened."""
    async with Peer.connect(target.address) as peer:
        if attempt.layers is not None:
            await peer.negotiate(**attempt.layers)
            inside_tls = attempt.layers.get("tls_v1", False)
            if not inside_tls and (attempt.layers.get("snappy") or attempt.layers.get("deflate")):
                peer.compress(Snappy() if attempt.layers.get("snappy") else Deflate(6))
                assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        if attempt.secret is not None:
            assert b"permission_count" in await peer.ask(auth(attempt.secret))
        if attempt.allowed:
            assert [await peer.ask(attempt.allowed) for _ in range(3)] == [b"OK"] * 3
        yield peer


async def outcome(peer: Peer, attempt: Attempt) -> str:
    """Empty if the attempt was refused as it has to be; else what happened instead."""
    peer.send(attempt.words)
    if attempt.layers is not None and attempt.layers.get("tls_v1"):
        received = await peer.receive_raw()
        # An alert may come before the error; both are in the clear.
        text = received.partition(struct.pack(">I", FRAME_ERROR) + b"E_")[2]
        found = re.fullmatch(attempt.error, "E_" + text.decode("utf-8", "replace"), re.DOTALL)
        return "" if found and OK_FRAME not in received else f"{attempt.name}: {received!r}"
    frames = []
    while (frame := await peer.frame()) is not None:
        frames.append(frame)
    # The answers to an IDENTIFY that was part of the attempt are no success.
    said = [text for kind, text in frames if kind != FRAME_ERROR and b"max_rdy_count" not in text]
    ungranted = b'{"tls_v1":true}' in attempt.words
    errors = [text.decode("utf-8", "replace") for kind, text in frames if kind == FRAME_ERROR]
    if said != ([b"OK"] if ungranted else []) or len(errors) != 1 or frames[-1][0] != FRAME_ERROR:
        return f"{attempt.name}: {frames}"
    return "" if re.fullmatch(attempt.error, errors[0], re.DOTALL) else f"{attempt.name}: {errors[0]!r}"


async def try_all(target: Target, attempts: list[Attempt]) -> list[str]:
    """What did not go as it must."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(attempt: Attempt) -> str:
        async with limit, prepared(target, attempt) as peer:
            return await outcome(peer, attempt)

    return [wrong for wrong in await asyncio.gather(*map(one, attempts)) if wrong]


@pytest.mark.parametrize("group", ["unauthorized", "refused", "tricks", "before TLS", "instead of TLS"])
async def test_nobody_gets_in(group: str, certificates: Certificates, tmp_path: Path) -> None:
    generate, kind = GROUPS[group]
    async with target(kind, certificates, tmp_path) as here:
        assert await try_all(here, list(generate())) == []
        assert here.state() == {}
        await until(lambda: not here.broker.sessions)


async def test_nobody_gets_further_than_his_rights(certificates: Certificates, tmp_path: Path) -> None:
    attempts = list(out_of_bounds())
    async with target("auth", certificates, tmp_path) as here:
        assert await try_all(here, attempts) == []
        # What was allowed, and nothing else.
        assert here.state() == {"t": (3 * sum(bool(attempt.allowed) for attempt in attempts), [])}


async def test_nobody_stays_in_when_his_rights_expire(certificates: Certificates, tmp_path: Path) -> None:
    attempts = list(expired())
    async with target("auth", certificates, tmp_path) as here, contextlib.AsyncExitStack() as stack:
        # Whose second is over while others are still being prepared gets another one.
        peers = [await stack.enter_async_context(prepared(here, attempt)) for attempt in attempts]
        here.keeper.closed = True
        sessions = list(here.broker.sessions.values())
        await until(lambda: all(session.authorization.expiry is None for session in sessions))
        before = here.state()
        assert before["t"][1] == []
        outcomes = await asyncio.gather(*(outcome(peer, a) for peer, a in zip(peers, attempts, strict=True)))
        assert [wrong for wrong in outcomes if wrong] == []
        assert here.state() == before


# --- TLS and certificates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["require", "require-verify"])
async def test_nobody_gets_in_without_a_certificate(policy: str, certificates: Certificates, tmp_path: Path) -> None:
    options = {"tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca}
    async with target("tls", certificates, tmp_path, **options) as here:
        good = certificates.client(signed_by=certificates.authority)
        async with Peer.connect(here.address) as peer:
            await peer.negotiate(tls_v1=True)
            await peer.encrypt(good)
            assert await peer.frame() == (FRAME_RESPONSE, b"OK")
            assert await peer.ask(pub(b"good")) == b"OK"
        before = here.state()
        tried = 0
        for name, context in strangers(certificates):
            for verb, words in guarded().items():
                async with Peer.connect(here.address) as peer:
                    await peer.negotiate(tls_v1=True)
                    with contextlib.suppress(ssl.SSLError, EOFError):
                        # In TLS 1.3 the client learns of it only later.
                        await peer.encrypt(context)
                        peer.send(words)
                    received = await peer.receive_raw()
                    assert OK_FRAME not in received, (name, verb)
                    if peer.tls is not None:
                        # The error stands in the clear behind an alert.
                        assert b"E_IDENTIFY_FAILED IDENTIFY failed tls: " in received, (name, verb)
                tried += 1
        assert tried == STRANGERS * len(guarded())
        assert here.state() == before
        await until(lambda: not here.broker.sessions)


def smuggled() -> dict[str, bytes]:
    every = {**guarded(), **UNGUARDED, "AUTH": auth(b"good"), "NOP": b"NOP\n", "IDENTIFY": identify()}
    return {f"{verb} {times} times": words * times for verb, words in every.items() for times in (1, 2)}


async def test_nothing_is_smuggled_in_before_tls(certificates: Certificates, tmp_path: Path) -> None:
    """Somebody on the way adds words in the clear, in the same packet; inside TLS they must not come to life."""
    async with target("tls", certificates, tmp_path) as here:
        for name, words in smuggled().items():
            async with Peer.connect(here.address) as peer:
                peer.send(identify(tls_v1=True) + words)
                frame = await peer.frame()
                assert frame is not None and frame[0] == FRAME_RESPONSE
                await peer.encrypt(certificates.client())
                assert await peer.frame() == (FRAME_RESPONSE, b"OK"), name
                # The answer to the first word inside is the first answer, and it is the client's.
                assert await peer.error(b"mine\n") == b"E_INVALID invalid command mine", name
        assert here.state() == {}


async def test_nobody_gets_in_with_an_older_version(certificates: Certificates, tmp_path: Path) -> None:
    async with target("tls", certificates, tmp_path, tls_min_version="tls1.3") as here:
        for words in guarded().values():
            async with Peer.connect(here.address) as peer:
                await peer.negotiate(tls_v1=True)
                with pytest.raises((ssl.SSLError, EOFError)):
                    await peer.encrypt(certificates.client(versions=TLS12))
                peer.send_raw(words)
                assert OK_FRAME not in await peer.receive_raw()
        assert here.state() == {}


# --- The attempts mean something --------------------------------------------------------------------------------------


async def test_the_same_words_work_with_the_right(certificates: Certificates, tmp_path: Path) -> None:
    async with target("auth", certificates, tmp_path) as here:
        for layers in LAYERS.values():
            for words in guarded().values():
                async with prepared(here, Attempt("", b"", "", b"good", pub(), layers)) as peer:
                    assert await peer.ask(words) == b"OK"
        assert here.state()["t"] == (3 * 3 * 4 + 3 * 4, ["c"])


async def test_the_same_words_work_inside_tls(certificates: Certificates, tmp_path: Path) -> None:
    async with target("tls", certificates, tmp_path) as here:
        for words in guarded().values():
            async with Peer.connect(here.address) as peer:
                await peer.negotiate(tls_v1=True)
                await peer.encrypt(certificates.client())
                assert await peer.frame() == (FRAME_RESPONSE, b"OK")
                assert await peer.ask(words) == b"OK"
        assert here.state()["t"] == (4, ["c"])


def test_there_are_enough_attempts_and_each_is_another_one() -> None:
    names = [(group, attempt.name) for group, (generate, _) in GROUPS.items() for attempt in generate()]
    assert len(set(names)) == len(names) >= AT_LEAST
