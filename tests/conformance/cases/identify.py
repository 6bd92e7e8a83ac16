"""IDENTIFY: its body, every field with its limits, and what is granted."""

from __future__ import annotations

from collections.abc import Iterator

from ..notation import (
    NO_COMPRESSION,
    OK,
    ONLY_DEFLATE,
    SMALL_LIMITS,
    SUB,
    Case,
    a,
    answered,
    b,
    case,
    cut_short,
    error,
    identify,
    message,
    negotiate,
    negotiated,
    pub,
    refused,
    size,
)


def identify_bodies() -> Iterator[Case]:
    yield answered("IDENTIFY with an empty object is OK", identify("{}"), OK)
    yield answered("IDENTIFY negotiates with the defaults", negotiate(), negotiated())
    yield answered("IDENTIFY with null is an empty object", identify("null"), OK)
    yield answered(
        "IDENTIFY allows white space around", identify(' \n{ "feature_negotiation" :\ttrue } \r\n'), negotiated()
    )
    yield answered(
        "IDENTIFY is followed by other commands in the same packet", negotiate() + pub(b"m") + SUB, negotiated(), OK, OK
    )
    bad_json = "E_BAD_BODY IDENTIFY failed to decode JSON body"
    for words, body in (
        ("that is no JSON", b"hello"),
        ("that is an array", b"[]"),
        ("that is a string", b'"x"'),
        ("that is a number", b"1"),
        ("that is true", b"true"),
        ("of one space", b" "),
        ("with a key without quotes", b"{a:1}"),
        ("with single quotes", b"{'a':1}"),
        ("with a comma too many", b'{"a":1,}'),
        ("cut short", b'{"a":1'),
        ("with something behind it", b"{} {}"),
        ("with a byte order mark", b"\xef\xbb\xbf{}"),
        ("with NaN", b'{"a":NaN}'),
        ("with a leading zero", b'{"msg_timeout":01000}'),
        ("with a leading plus", b'{"msg_timeout":+1000}'),
        ("with a line break in a string", b'{"client_id":"a\nb"}'),
    ):
        yield refused(f"IDENTIFY with a body {words} is refused", identify(body), bad_json)
    for key in ("client_id", "hostname", "user_agent"):
        yield answered(f"IDENTIFY takes any string for {key}", negotiate(**{key: 'é <&> \u2028 "x"'}), negotiated())
        yield refused(f"IDENTIFY refuses a number for {key}", identify(**{key: 1}), bad_json)
    for key in (
        "heartbeat_interval",
        "output_buffer_size",
        "output_buffer_timeout",
        "sample_rate",
        "msg_timeout",
        "deflate_level",
    ):
        for words, value in (
            ("a string", '"1000"'),
            ("a fraction", "1000.5"),
            ("a whole number with a point", "1000.0"),
            ("an exponent", "1e3"),
            ("a boolean", "true"),
            ("an array", "[1000]"),
            ("a number beyond its range", "9223372036854775808"),
        ):
            yield refused(f"IDENTIFY refuses {words} for {key}", identify(f'{{"{key}":{value}}}'), bad_json)
    for key in ("feature_negotiation", "tls_v1", "deflate", "snappy"):
        yield refused(f"IDENTIFY refuses a number for {key}", identify(**{key: 1}), bad_json)
        yield refused(f"IDENTIFY refuses a string for {key}", identify(**{key: "true"}), bad_json)
    yield refused("IDENTIFY refuses a sample_rate beyond 32 bits", identify(sample_rate=2**31), bad_json)
    numbers = ("heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "sample_rate", "msg_timeout")
    settings = dict.fromkeys(
        ("client_id", "hostname", "user_agent", *numbers, "deflate_level", "tls_v1", "deflate", "snappy")
    )
    yield answered("IDENTIFY takes null for every field", identify(**settings, feature_negotiation=None), OK)
    yield answered("IDENTIFY takes null for all settings", negotiate(**settings), negotiated())
    yield answered(
        "IDENTIFY ignores unknown fields of any type",
        identify('{"x":{"y":[1,{}]},"z":1.5,"feature_negotiation":true}'),
        negotiated(),
    )
    yield answered(
        "IDENTIFY keys are matched in any case",
        identify('{"Feature_Negotiation":true,"MSG_TIMEOUT":5000}'),
        negotiated(msg_timeout=5000),
    )
    yield answered(
        "IDENTIFY takes the last of two equal keys",
        identify('{"feature_negotiation":true,"msg_timeout":5000,"msg_timeout":6000}'),
        negotiated(msg_timeout=6000),
    )
    yield answered(
        "IDENTIFY takes the last of two keys that differ in case",
        identify('{"feature_negotiation":true,"msg_timeout":5000,"Msg_Timeout":6000}'),
        negotiated(msg_timeout=6000),
    )
    yield answered(
        "IDENTIFY keeps a value when null follows it",
        identify('{"feature_negotiation":true,"msg_timeout":5000,"msg_timeout":null}'),
        negotiated(msg_timeout=5000),
    )
    yield answered(
        "IDENTIFY reads escapes in keys",
        identify('{"feature_negotiation":true,"msg\\u005ftimeout":5000}'),
        negotiated(msg_timeout=5000),
    )
    yield answered(
        "IDENTIFY reads minus zero as zero", identify('{"feature_negotiation":true,"msg_timeout":-0}'), negotiated()
    )
    yield answered("IDENTIFY takes invalid UTF-8 in a string", identify(b'{"client_id":"\xff\xfe"}'), OK)
    yield answered("IDENTIFY takes half a surrogate pair", identify('{"client_id":"\\ud800"}'), OK)


def identify_lengths() -> Iterator[Case]:
    yield refused("IDENTIFY of length 0 is refused", b"IDENTIFY\n" + size(0), "E_BAD_BODY IDENTIFY invalid body size 0")
    yield refused(
        "IDENTIFY of length -1 is refused", b"IDENTIFY\n" + size(-1), "E_BAD_BODY IDENTIFY invalid body size -1"
    )
    yield refused(
        "IDENTIFY of the lowest length is refused",
        b"IDENTIFY\n" + size(-(2**31)),
        "E_BAD_BODY IDENTIFY invalid body size -2147483648",
    )
    yield refused(
        "IDENTIFY of the highest length is refused",
        b"IDENTIFY\n" + size(2**31 - 1),
        "E_BAD_BODY IDENTIFY body too big 2147483647 > 5242880",
    )
    yield refused(
        "IDENTIFY one byte too long is refused",
        b"IDENTIFY\n" + size(5242881),
        "E_BAD_BODY IDENTIFY body too big 5242881 > 5242880",
    )
    yield answered("IDENTIFY at the limit is read", identify(b"{}".ljust(200)), OK, flags=SMALL_LIMITS)
    yield refused(
        "IDENTIFY over a lower limit is refused",
        b"IDENTIFY\n" + size(201),
        "E_BAD_BODY IDENTIFY body too big 201 > 200",
        flags=SMALL_LIMITS,
    )
    yield cut_short(
        "IDENTIFY cut short in its length is refused", b"IDENTIFY\n\0\0", "E_BAD_BODY IDENTIFY failed to read body size"
    )
    yield cut_short(
        "IDENTIFY without its length is refused", b"IDENTIFY\n", "E_BAD_BODY IDENTIFY failed to read body size"
    )
    yield cut_short(
        "IDENTIFY cut short in its body is refused",
        b"IDENTIFY\n" + size(5) + b"{}",
        "E_BAD_BODY IDENTIFY failed to read body",
    )


def identify_settings() -> Iterator[Case]:
    def good(key: str, value: int, **changed: object) -> Case:
        return answered(f"IDENTIFY takes {key} {value}", negotiate(**{key: value}), negotiated(**changed))

    def bad(key: str, value: int, words: str) -> Case:
        return refused(
            f"IDENTIFY refuses {key} {value}",
            negotiate(**{key: value}),
            f"E_BAD_BODY IDENTIFY {words} ({value}) is invalid",
        )

    for value in (-1, 0, 1000, 60000):
        yield good("heartbeat_interval", value)
    for value in (-2, 1, 999, 60001, 2**63 - 1, -(2**63)):
        yield bad("heartbeat_interval", value, "heartbeat interval")
    yield good("output_buffer_size", -1, output_buffer_size=1, output_buffer_timeout=0)
    yield good("output_buffer_size", 0)
    yield good("output_buffer_size", 64, output_buffer_size=64)
    yield good("output_buffer_size", 65536, output_buffer_size=65536)
    for value in (-2, 1, 63, 65537):
        yield bad("output_buffer_size", value, "output buffer size")
    yield good("output_buffer_timeout", -1, output_buffer_timeout=0)
    yield good("output_buffer_timeout", 0)
    yield good("output_buffer_timeout", 25, output_buffer_timeout=25)
    yield good("output_buffer_timeout", 30000, output_buffer_timeout=30000)
    for value in (-2, 1, 24, 30001):
        yield bad("output_buffer_timeout", value, "output buffer timeout")
    for value in (0, 1, 99):
        yield good("sample_rate", value, sample_rate=value)
    for value in (-1, 100, 2**31 - 1):
        yield bad("sample_rate", value, "sample rate")
    yield good("msg_timeout", 0)
    yield good("msg_timeout", 1000, msg_timeout=1000)
    yield good("msg_timeout", 900000, msg_timeout=900000)
    for value in (-1, 1, 999, 900001):
        yield bad("msg_timeout", value, "msg timeout")
    yield answered(
        "IDENTIFY without a buffer overrides the buffer's timeout",
        negotiate(output_buffer_size=-1, output_buffer_timeout=1000),
        negotiated(output_buffer_size=1, output_buffer_timeout=0),
    )
    wrong = {
        "heartbeat_interval": 1,
        "output_buffer_timeout": 1,
        "output_buffer_size": 1,
        "sample_rate": 100,
        "msg_timeout": 1,
    }
    for first, words in (
        ("heartbeat_interval", "heartbeat interval (1)"),
        ("output_buffer_timeout", "output buffer timeout (1)"),
        ("output_buffer_size", "output buffer size (1)"),
        ("sample_rate", "sample rate (100)"),
        ("msg_timeout", "msg timeout (1)"),
    ):
        # Sent in the opposite order: the daemon's own order decides what it complains about.
        fields = dict(reversed(wrong.items()))
        yield refused(
            f"IDENTIFY checks {first} before what follows it",
            negotiate(**fields),
            f"E_BAD_BODY IDENTIFY {words} is invalid",
        )
        del wrong[first]
    yield refused(
        "settings are checked without negotiation too",
        identify(msg_timeout=1),
        "E_BAD_BODY IDENTIFY msg timeout (1) is invalid",
    )
    yield refused(
        "settings are checked before compression",
        negotiate(deflate=True, snappy=True, msg_timeout=1),
        "E_BAD_BODY IDENTIFY msg timeout (1) is invalid",
    )

    small = {
        "max_rdy_count": 5,
        "max_msg_timeout": 6000,
        "msg_timeout": 4000,
        "deflate_level": 4,
        "max_deflate_level": 4,
        "output_buffer_timeout": 100,
    }
    yield answered(
        "IDENTIFY answers with the daemon's own limits", negotiate(), negotiated(**small), flags=SMALL_LIMITS
    )
    yield answered(
        "IDENTIFY takes values at the daemon's own limits",
        negotiate(heartbeat_interval=10000, output_buffer_size=1024, output_buffer_timeout=50, msg_timeout=6000),
        negotiated(**{**small, "output_buffer_size": 1024, "output_buffer_timeout": 50, "msg_timeout": 6000}),
        flags=SMALL_LIMITS,
    )
    for key, value, words in (
        ("heartbeat_interval", 10001, "heartbeat interval"),
        ("output_buffer_size", 1025, "output buffer size"),
        ("output_buffer_timeout", 49, "output buffer timeout"),
        ("output_buffer_timeout", 1001, "output buffer timeout"),
        ("msg_timeout", 6001, "msg timeout"),
    ):
        yield refused(
            f"IDENTIFY refuses {key} {value} beyond the daemon's own limit",
            negotiate(**{key: value}),
            f"E_BAD_BODY IDENTIFY {words} ({value}) is invalid",
            flags=SMALL_LIMITS,
        )


def identify_features() -> Iterator[Case]:
    yield answered("TLS is not granted without a certificate", negotiate(tls_v1=True), negotiated())
    yield case("compression is ignored without negotiation", a.asks(identify(snappy=True), OK), a.asks(pub(b"m"), OK))
    yield answered("both compressions are ignored without negotiation", identify(snappy=True, deflate=True), OK)
    yield refused(
        "deflate and snappy together are refused",
        negotiate(deflate=True, snappy=True),
        "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression",
    )
    yield case(
        "compression that is switched off is not granted",
        a.asks(negotiate(deflate=True, snappy=True), negotiated()),
        a.asks(pub(b"m"), OK),
        flags=NO_COMPRESSION,
    )
    yield answered("deflate_level is ignored when deflate is not granted", negotiate(deflate_level=1), negotiated())
    for words, level, granted in (
        ("-1", -1, 6),
        ("0", 0, 6),
        ("1", 1, 1),
        ("6", 6, 6),
        ("9, which is lowered to the limit", 9, 6),
    ):
        yield case(
            f"deflate takes level {words}",
            a.asks(negotiate(deflate=True, deflate_level=level), negotiated(deflate=True, deflate_level=granted)),
            a.deflates(),
            a.gets(OK),
            a.asks(pub(b"m"), OK),
        )
    yield case(
        "deflate is granted when snappy is switched off",
        a.asks(negotiate(deflate=True, snappy=True), negotiated(deflate=True)),
        a.deflates(),
        a.gets(OK),
        flags=ONLY_DEFLATE,
    )
    yield case(
        "messages and errors go through deflate",
        a.asks(negotiate(deflate=True), negotiated(deflate=True)),
        a.deflates(),
        a.gets(OK),
        a.subscribes(1),
        b.publishes(b"m" * 1000),
        a.gets(message(1, b"m" * 1000)),
        a.sends(b"FIN <id1>\n"),
        a.asks(b"FIN <id1>\n", error("E_FIN_FAILED FIN <id1> failed ID not in flight")),
        a.is_refused(b"XXX\n", "E_INVALID invalid command XXX"),
    )

    yield case(
        "IDENTIFY may be repeated, and each answer shows what is in force",
        a.asks(negotiate(msg_timeout=5000, sample_rate=10), negotiated(msg_timeout=5000, sample_rate=10)),
        a.asks(negotiate(output_buffer_size=128), negotiated(msg_timeout=5000, output_buffer_size=128)),
        a.asks(identify("{}"), OK),
        a.asks(negotiate(), negotiated(msg_timeout=5000, output_buffer_size=128)),
    )
    yield case(
        "settings apply without negotiation",
        a.asks(identify(msg_timeout=5000, output_buffer_timeout=1000), OK),
        a.asks(negotiate(), negotiated(msg_timeout=5000, output_buffer_timeout=1000)),
    )
    yield case("IDENTIFY can come after a publish", a.asks(pub(b"m"), OK), a.asks(negotiate(), negotiated()))
    yield case(
        "SUB without heartbeats is refused",
        a.asks(negotiate(heartbeat_interval=-1), negotiated()),
        a.is_refused(SUB, "E_INVALID cannot SUB with heartbeats disabled"),
    )
    yield case(
        "disabled heartbeats are noticed before missing parameters",
        a.asks(identify(heartbeat_interval=-1), OK),
        a.is_refused(b"SUB\n", "E_INVALID cannot SUB with heartbeats disabled"),
    )
    yield case("publishing needs no heartbeats", a.asks(identify(heartbeat_interval=-1), OK), a.publishes(b"m"))
    yield case(
        "heartbeats can be switched on again",
        a.asks(identify(heartbeat_interval=-1), OK),
        a.asks(identify(heartbeat_interval=1000), OK),
        a.subscribes(),
    )
    yield case(
        "a zero does not switch heartbeats on again",
        a.asks(identify(heartbeat_interval=-1), OK),
        a.asks(identify(heartbeat_interval=0), OK),
        a.is_refused(SUB, "E_INVALID cannot SUB with heartbeats disabled"),
    )


CHAPTERS = (identify_bodies, identify_lengths, identify_settings, identify_features)
