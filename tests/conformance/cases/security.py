"""Where TLS or an authorization is required: what is refused without it, and what TLS changes."""

from __future__ import annotations

from collections.abc import Iterator

from ..notation import (
    AUTH_SERVER_GONE,
    NO_SUCH_ID,
    OK,
    SUB,
    TLS_REQUIRED,
    Case,
    a,
    answered,
    case,
    dpub,
    identify,
    message,
    mpub,
    negotiate,
    negotiated,
    pub,
    refused,
    sized,
)

AUTH = b"AUTH\n" + sized(b"secret")
EVERY_COMMAND = {
    "AUTH": AUTH,
    "SUB": SUB,
    "PUB": pub(b"m"),
    "MPUB": mpub(b"m"),
    "DPUB": dpub(b"0", b"m"),
    "RDY": b"RDY 1\n",
    "FIN": b"FIN " + NO_SUCH_ID + b"\n",
    "REQ": b"REQ " + NO_SUCH_ID + b" 0\n",
    "TOUCH": b"TOUCH " + NO_SUCH_ID + b"\n",
    "CLS": b"CLS\n",
    "NOP": b"NOP\n",
    "identify": b"identify\n",
    "nonsense": b"nonsense\n",
    "": b"\n",
}


def tls_required() -> Iterator[Case]:
    for word, data in EVERY_COMMAND.items():
        text = f"E_INVALID cannot {word} in current state (TLS required)"
        yield refused(f"before TLS {word!r} is refused", data, text, flags=TLS_REQUIRED)
        yield case(
            f"after an IDENTIFY without TLS {word!r} is refused",
            a.asks(negotiate(), negotiated()),
            a.is_refused(data, text),
            flags=TLS_REQUIRED,
        )
    yield case(
        "without negotiation TLS is not granted",
        a.asks(identify(tls_v1=True), OK),
        a.is_refused(b"NOP\n", "E_INVALID cannot NOP in current state (TLS required)"),
        flags=TLS_REQUIRED,
    )
    yield case(
        "compression is no substitute for TLS",
        a.asks(negotiate(deflate=True), negotiated(deflate=True)),
        a.deflates(),
        a.gets(OK),
        a.is_refused(pub(b"m"), "E_INVALID cannot PUB in current state (TLS required)"),
        flags=TLS_REQUIRED,
    )


def tls() -> Iterator[Case]:
    yield case(
        "TLS is granted, and says OK inside",
        a.asks(negotiate(tls_v1=True), negotiated(tls_v1=True)),
        a.encrypts(),
        a.gets(OK),
        a.publishes(b"m", b"n"),
        flags=TLS_REQUIRED,
    )
    yield case(
        "messages go through TLS",
        a.asks(negotiate(tls_v1=True), negotiated(tls_v1=True)),
        a.encrypts(),
        a.gets(OK),
        a.publishes(b"m" * 150_000),
        a.subscribes(1),
        a.gets(message(1, b"m" * 150_000)),
        flags=TLS_REQUIRED,
    )
    yield case(
        "deflate lies inside TLS, and says OK too",
        a.asks(
            negotiate(tls_v1=True, deflate=True, deflate_level=3),
            negotiated(tls_v1=True, deflate=True, deflate_level=3),
        ),
        a.encrypts(),
        a.gets(OK),
        a.deflates(),
        a.gets(OK),
        a.publishes(b"m" * 1_000),
        a.subscribes(1),
        a.gets(message(1, b"m" * 1_000)),
        flags=TLS_REQUIRED,
    )
    yield case(
        "inside TLS an unknown command is an unknown command",
        a.asks(negotiate(tls_v1=True), negotiated(tls_v1=True)),
        a.encrypts(),
        a.gets(OK),
        a.is_refused(b"nonsense\n", "E_INVALID invalid command nonsense"),
        flags=TLS_REQUIRED,
    )
    yield case(
        "IDENTIFY may come again inside TLS",
        a.asks(negotiate(tls_v1=True), negotiated(tls_v1=True)),
        a.encrypts(),
        a.gets(OK),
        a.asks(negotiate(), negotiated()),
        a.publishes(b"m"),
        flags=TLS_REQUIRED,
    )
    yield case(
        "words in the clear instead of a handshake are refused in the clear",
        a.asks(negotiate(tls_v1=True), negotiated(tls_v1=True)),
        a.is_refused(
            pub(b"m"), "E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like a TLS handshake"
        ),
        flags=TLS_REQUIRED,
    )


def auth_required() -> Iterator[Case]:
    yield answered(
        "IDENTIFY says that AUTH is required", negotiate(), negotiated(auth_required=True), flags=AUTH_SERVER_GONE
    )
    for word in ("SUB", "PUB", "MPUB", "DPUB"):
        text = f"E_AUTH_FIRST AUTH required before {word}"
        yield refused(f"before AUTH {word} is refused", EVERY_COMMAND[word], text, flags=AUTH_SERVER_GONE)
    yield refused(
        "before AUTH the batch of an MPUB is not even read",
        b"MPUB <topic>\n",
        "E_AUTH_FIRST AUTH required before MPUB",
        flags=AUTH_SERVER_GONE,
    )
    yield refused(
        "before AUTH the body of a PUB is looked at first",
        b"PUB <topic>\n" + sized(b""),
        "E_BAD_MESSAGE PUB invalid message body size 0",
        flags=AUTH_SERVER_GONE,
    )
    for word in ("RDY", "FIN", "REQ", "TOUCH", "CLS"):
        text = f"E_INVALID cannot {word} in current state"
        yield refused(f"before AUTH {word} is out of place", EVERY_COMMAND[word], text, flags=AUTH_SERVER_GONE)
    yield refused("AUTH fails without a server to ask", AUTH, "E_AUTH_FAILED AUTH failed", flags=AUTH_SERVER_GONE)
    yield refused(
        "what follows an AUTH that fails is not read",
        AUTH + pub(b"m"),
        "E_AUTH_FAILED AUTH failed",
        flags=AUTH_SERVER_GONE,
    )


CHAPTERS = (tls_required, tls, auth_required)
