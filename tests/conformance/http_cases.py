"""What is asked of a daemon over HTTP. What it answers is not said here: ``recorded_http.json`` holds what the Go
daemon really said.

A case is a sentence and a list of requests, sent one after the other on one connection. ``<topic>`` stands for a topic
of this case alone; in answers, whatever differs from run to run is a placeholder too (see ``http_play``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["HTTP_CASES", "Ask", "HttpCase", "Ours"]


@dataclass(frozen=True)
class Ask:
    method: str
    target: str
    body: bytes | None = None
    headers: tuple[str, ...] = ()
    #: The bytes to send, where they are not a well-formed request.
    raw: bytes = b""


@dataclass(frozen=True)
class Ours:
    """Where our broker answers differently on purpose: the lines that stand instead, by number of request; and why."""

    because: str
    answers: dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class HttpCase:
    name: str
    asks: tuple[Ask, ...]
    flags: tuple[str, ...] = ()
    ours: Ours | None = None


def case(name: str, *asks: Ask, flags: tuple[str, ...] = (), ours: Ours | None = None) -> HttpCase:
    return HttpCase(name, asks, flags, ours)


def get(target: str, *headers: str) -> Ask:
    return Ask("GET", target, None, headers)


def post(target: str, body: bytes | None = b"", *headers: str) -> Ask:
    return Ask("POST", target, body, headers)


def put(target: str, body: bytes) -> Ask:
    return Ask("PUT", target, body)


def raw(data: bytes) -> Ask:
    return Ask("GET", "", raw=data)


def chunked(target: str, *chunks: bytes, trailer: bytes = b"\r\n") -> Ask:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailer
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Ask("POST", target, raw=head.encode() + body)


def sized(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def batch(*bodies: bytes) -> bytes:
    return len(bodies).to_bytes(4, "big") + b"".join(map(sized, bodies))


CREATE = post("/topic/create?topic=<topic>")
CREATE_CHANNEL = post("/channel/create?topic=<topic>&channel=ch")
STATS = get("/stats?format=json&include_mem=false&topic=<topic>")
VERSION = "X-Nsq-Content-Type: nsq; version=1.0"
JSON = "Content-Type: application/json; charset=utf-8"
TEXT = "Content-Type: text/plain; charset=utf-8"
SMALL_LIMITS = ("--max-msg-size=100", "--max-body-size=200", "--max-req-timeout=1s", "--node-id=7")

#: A name, in words and as it stands in a query.
BAD_NAMES = (
    ("that is empty", ""),
    ("with a star", "*"),
    ("with a slash", "a%2Fb"),
    ("with a newline at its end", "a%0A"),
    ("of 65 bytes", "x" * 65),
    ("of #ephemeral alone", "%23ephemeral"),
    ("with a byte that is no UTF-8", "a%ff"),
    ("with a plus, which is a space", "a+b"),
)


def general() -> Iterator[HttpCase]:
    yield case("ping is answered with OK", get("/ping"))
    yield case("ping does not look at its query", get("/ping?x=1;2&%zz"))
    yield case("ping may be asked again on the same connection", get("/ping"), get("/ping"))
    yield case("info tells versions, ports and limits", get("/info"), ours=NEWER_INFO_KEYS)
    yield case("info does not look at its query", get("/info?%zz"), ours=NEWER_INFO_KEYS)
    yield case("a path that is not there", get("/nothing"))
    yield case("the root is not there", get("/"))
    yield case("a path below one that is there", get("/ping/pong"))
    for method in ("PUT", "POST", "DELETE", "HEAD", "PATCH"):
        yield case(f"ping by {method} is not allowed", Ask(method, "/ping"))
    for method in ("GET", "PUT", "HEAD", "DELETE"):
        yield case(f"pub by {method} is not allowed", Ask(method, "/pub?topic=<topic>"))
    for path in ("/mpub", "/topic/create", "/topic/delete", "/channel/create", "/channel/pause"):
        yield case(f"{path} by GET is not allowed", get(f"{path}?topic=<topic>&channel=ch"))
    for path in ("/info", "/stats"):
        yield case(f"{path} by POST is not allowed", post(path))
    yield case("a setting by POST is not allowed", post("/config/log_level", b"info"))
    yield case("OPTIONS of a path tells its methods", Ask("OPTIONS", "/ping"))
    yield case("OPTIONS of a setting tells its methods", Ask("OPTIONS", "/config/log_level"))
    yield case("OPTIONS of pub tells its methods", Ask("OPTIONS", "/pub"))
    yield case("OPTIONS of a path that is not there", Ask("OPTIONS", "/nothing"))
    yield case("OPTIONS of everything", Ask("OPTIONS", "*"))
    yield case("a slash at the end of a path is one too many", get("/ping/"))
    yield case("a slash at the end of a posted path is one too many", post("/pub/?topic=<topic>", b"x"))
    yield case("a path in capitals is found elsewhere", get("/PING"))
    yield case("a posted path in capitals is found elsewhere", post("/Pub?topic=<topic>", b"x"))
    yield case("a setting's path in capitals is found elsewhere", get("/Config/log_level"))
    yield case("a slash at the end of a setting is one too many", get("/config/log_level/"))
    yield case("two slashes are one too many", get("//ping"))
    yield case("dots in a path are taken out", get("/a/../ping"))
    yield case("dots in a path that are escaped are taken out", get("/%2e%2e/ping"))
    yield case("a query goes along to where a path is found", get("/stats/?format=json&x=<>"))
    yield case("a path may have escapes", get("/%70ing"))
    yield case("a slash that is escaped is a slash", get("/ping%2f"))
    yield case("a path with a broken escape is a bad request", get("/p%zzing"))
    yield case("a whole URL may stand for the path", get("http://elsewhere/ping"))
    yield case("a number sign in a path is part of it", get("/info#x"))
    yield case("a request of version 1.0 is answered", raw(b"GET /ping HTTP/1.0\r\n\r\n"))
    yield case(
        "a publish of version 1.0 is answered",
        Ask("POST", "", raw=b"POST /pub?topic=<topic> HTTP/1.0\r\nContent-Length: 1\r\n\r\nx"),
        STATS,
    )
    yield case("a request without its host is bad", raw(b"GET /ping HTTP/1.1\r\n\r\n"))
    yield case("what is no request is bad", raw(b"garbage\r\n\r\n"))
    yield case("a header without its colon is bad", raw(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n"))
    yield case("an expectation nobody knows fails", post("/pub?topic=<topic>", b"x", "Expect: miracles"))


def publishing() -> Iterator[HttpCase]:
    yield case("a message is published", post("/pub?topic=<topic>", b"hello"), STATS)
    yield case("messages are published one after the other", *[post("/pub?topic=<topic>", b"x")] * 3, STATS)
    yield case("a message may have any bytes", post("/pub?topic=<topic>", bytes(range(256))), STATS)
    yield case("a form is a message like any other", post("/pub?topic=<topic>", b"topic=x", FORM), STATS)
    yield case(
        "arguments are not looked for in a form",
        post("/pub", b"topic=x", FORM),
        post("/topic/create", b"x", FORM),
    )
    yield case("an empty message is refused", post("/pub?topic=<topic>", b""), STATS)
    yield case("a message without a length is empty", post("/pub?topic=<topic>", None))
    yield case("an empty message is refused before its topic is looked at", post("/pub"), post("/pub?topic=*"))
    yield case("a topic must be given", post("/pub", b"x"))
    yield case("a topic without a value is not valid", post("/pub?topic", b"x"))
    yield case("of two topics the first counts", post("/pub?topic=<topic>&topic=*", b"x"), STATS)
    yield case("other arguments do not matter", post("/pub?a=b&topic=<topic>&=&&c", b"x"))
    for words, name in BAD_NAMES:
        yield case(f"a message for a topic {words} is refused", post(f"/pub?topic={name}", b"x"))
    yield case("a query with a broken escape is refused", post("/pub?topic=<topic>&x=%zz", b"x"), STATS)
    yield case("a query with half an escape is refused", post("/pub?topic=<topic>&x=%2", b"x"))
    yield case("a query with a semicolon is refused", post("/pub?topic=<topic>;x=1", b"x"))
    yield case(
        "a topic may be written with escapes",
        post("/pub?%74opic=<topic>%2d", b"x"),
    )
    yield case("an ephemeral topic has its sign escaped", post("/pub?topic=<topic>%23ephemeral", b"x"))
    for words, text in (
        ("of zero", "0"),
        ("of a millisecond", "1"),
        ("of an hour", "3600000"),
        ("with a plus that is escaped", "%2B5"),
        ("with zeros in front", "000000000000000005"),
    ):
        yield case(f"a deferral {words} is taken", post(f"/pub?topic=<topic>&defer={text}", b"x"))
    for words, text in (
        ("below zero", "-1"),
        ("beyond the limit", "3600001"),
        ("that is empty", ""),
        ("that is no number", "abc"),
        ("with a plus, which is a space", "+5"),
        ("with a fraction", "1.5"),
        ("beyond 64 bits", "99999999999999999999999"),
        ("with an underscore", "1_0"),
    ):
        yield case(f"a deferral {words} is refused", post(f"/pub?topic=<topic>&defer={text}", b"x"))
    yield case("a deferral that is refused has made the topic", post("/pub?topic=<topic>&defer=x", b"x"), STATS)
    yield case("a message of the limit is taken", post("/pub?topic=<topic>", b"x" * 100), STATS, flags=SMALL_LIMITS)
    yield case("a message beyond the limit is refused", post("/pub?topic=<topic>", b"x" * 101), flags=SMALL_LIMITS)
    yield case("a message beyond the limit is refused before its topic", post("/pub", b"x" * 101), flags=SMALL_LIMITS)
    yield case("the limit of deferrals is a setting", post("/pub?topic=<topic>&defer=1001", b"x"), flags=SMALL_LIMITS)
    yield case("a message may come in chunks", chunked("/pub?topic=<topic>", b"he", b"llo"), STATS)
    yield case("a chunked message may have trailers", chunked("/pub?topic=<topic>", b"a", trailer=b"X-Sum: 1\r\n\r\n"))
    yield case("a chunked message of nothing is empty", chunked("/pub?topic=<topic>"))
    yield case(
        "a chunked message beyond the limit", chunked("/pub?topic=<topic>", b"x" * 60, b"y" * 41), flags=SMALL_LIMITS
    )
    yield case(
        "a chunk without a size breaks the message off",
        raw(
            b"POST /pub?topic=<topic> HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n0\r\n\r\n"
        ),
    )
    yield case("a body that is announced first", post("/pub?topic=<topic>", b"hello", "Expect: 100-continue"), STATS)
    yield case(
        "two publishes in one packet are both answered",
        raw(b"POST /pub?topic=<topic> HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx" * 2),
        raw(b""),
        STATS,
    )
    yield case(
        "two lengths that differ are a bad request",
        raw(b"POST /pub?topic=<topic> HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy"),
    )
    yield case(
        "a length below zero is a bad request",
        raw(b"POST /pub?topic=<topic> HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"),
    )


def batches() -> Iterator[HttpCase]:
    yield case("lines are messages", post("/mpub?topic=<topic>", b"one\ntwo\nthree"), STATS)
    yield case("the last line may end with a newline", post("/mpub?topic=<topic>", b"one\ntwo\n"), STATS)
    yield case("empty lines are no messages", post("/mpub?topic=<topic>", b"\n\none\n\n\ntwo\n\n"), STATS)
    yield case("a carriage return is part of its message", post("/mpub?topic=<topic>", b"one\r\ntwo\r\n"), STATS)
    yield case("a batch of nothing is fine", post("/mpub?topic=<topic>", b""), STATS)
    yield case("a batch of empty lines is fine", post("/mpub?topic=<topic>", b"\n\n\n"), STATS)
    yield case("a batch without a length is fine", post("/mpub?topic=<topic>", None))
    yield case("a batch may come in chunks", chunked("/mpub?topic=<topic>", b"one\nt", b"wo"), STATS)
    yield case("a batch must have its topic", post("/mpub", b"x"))
    yield case("a batch with a broken query is refused", post("/mpub?topic=<topic>&%zz", b"x"))
    for words, name in BAD_NAMES[:4]:
        yield case(f"a batch for a topic {words} is refused", post(f"/mpub?topic={name}", b"x"))
    yield case("a batch cannot be deferred", post("/mpub?topic=<topic>&defer=abc", b"x"), STATS)
    yield case(
        "a batch of the limit is taken", post("/mpub?topic=<topic>", b"x" * 99 + b"\n" + b"y" * 100), flags=SMALL_LIMITS
    )
    yield case("a batch beyond the limit is refused", post("/mpub?topic=<topic>", b"x\n" * 101), flags=SMALL_LIMITS)
    yield case(
        "a chunked batch beyond the limit is refused",
        chunked("/mpub?topic=<topic>", b"x\n" * 60, b"x\n" * 41),
        flags=SMALL_LIMITS,
    )
    yield case(
        "a line beyond the limit is refused, with all others",
        post("/mpub?topic=<topic>", b"one\n" + b"x" * 101),
        STATS,
        flags=SMALL_LIMITS,
    )
    for words, value in (("false", "false"), ("0", "0")):
        yield case(
            f"a batch that is said to be binary={words} is text",
            post(f"/mpub?topic=<topic>&binary={value}", b"one\ntwo"),
            STATS,
        )
    for value in ("true", "1", "yes", "False", "no", ""):
        target = f"/mpub?topic=<topic>&binary={value}"
        yield case(f"a batch with binary={value} is binary", post(target, batch(b"one", b"two")), STATS)
    binary = "/mpub?topic=<topic>&binary=true"
    yield case("a binary message may have newlines", post(binary, batch(b"one\ntwo")), STATS)
    yield case("bytes behind a binary batch do not matter", post(binary, batch(b"one") + b"more"), STATS)
    for words, body in (
        ("of nothing", b""),
        ("with half a count", b"\0\0"),
        ("with a count of zero", bytes(4)),
        ("with a count below zero", b"\xff\xff\xff\xff"),
        ("with a count beyond reason", b"\x7f\xff\xff\xff"),
        ("without its messages", b"\0\0\0\2"),
        ("with half a size", b"\0\0\0\1\0\0"),
        ("with an empty message", batch(b"one", b"")),
        ("with a size below zero", b"\0\0\0\1\xff\xff\xff\xff"),
        ("that is cut short", batch(b"one", b"two")[:-1]),
    ):
        yield case(f"a binary batch {words} is refused", post(binary, body), STATS)
    yield case("a binary message beyond the limit is refused", post(binary, batch(b"x" * 101)), flags=SMALL_LIMITS)
    yield case("a binary batch beyond the limit is refused", post(binary, b"x" * 201), flags=SMALL_LIMITS)
    yield case(
        "a binary batch with more messages than fit", post(binary, b"\0\0\0\x28" + bytes(160)), flags=SMALL_LIMITS
    )


def topics() -> Iterator[HttpCase]:
    yield case("a topic is made", CREATE, STATS)
    yield case("a topic may be made twice", CREATE, CREATE)
    yield case(
        "a topic may be made with a body, which does not matter", post("/topic/create?topic=<topic>", b"x"), STATS
    )
    yield case("a topic is deleted", CREATE, post("/topic/delete?topic=<topic>"), STATS)
    yield case("a topic is emptied", post("/mpub?topic=<topic>", b"a\nb"), post("/topic/empty?topic=<topic>"), STATS)
    yield case("a topic is paused", CREATE, post("/topic/pause?topic=<topic>"), STATS)
    yield case(
        "a topic is let go again",
        CREATE,
        post("/topic/pause?topic=<topic>"),
        post("/topic/unpause?topic=<topic>"),
        STATS,
    )
    yield case("a topic may be paused twice", CREATE, *[post("/topic/pause?topic=<topic>")] * 2)
    for verb in ("create", "delete", "empty", "pause", "unpause"):
        yield case(f"{verb}: a topic must be given", post(f"/topic/{verb}"))
        yield case(f"{verb}: a broken query is refused", post(f"/topic/{verb}?topic=<topic>&%zz"))
        for words, name in BAD_NAMES[:2] if verb != "create" else BAD_NAMES:
            yield case(f"{verb}: a topic {words}", post(f"/topic/{verb}?topic={name}"))
        if verb != "create":
            yield case(f"{verb}: a topic that is not there", post(f"/topic/{verb}?topic=<topic>"))
    yield case(
        "a topic whose name says that it is above",
        post("/topic/create?topic=.."),
        get("/stats?format=json&include_mem=0&topic=.."),
    )


def channels() -> Iterator[HttpCase]:
    channel = "topic=<topic>&channel=ch"
    yield case("a channel is made", CREATE, CREATE_CHANNEL, STATS)
    yield case("a channel may be made twice", CREATE, CREATE_CHANNEL, CREATE_CHANNEL)
    yield case("a channel does not make its topic", CREATE_CHANNEL, STATS)
    yield case("a channel is deleted", CREATE, CREATE_CHANNEL, post(f"/channel/delete?{channel}"), STATS)
    yield case("a channel is paused", CREATE, CREATE_CHANNEL, post(f"/channel/pause?{channel}"), STATS)
    yield case(
        "a channel is let go again",
        CREATE,
        CREATE_CHANNEL,
        post(f"/channel/pause?{channel}"),
        post(f"/channel/unpause?{channel}"),
        STATS,
    )
    yield case("a channel is emptied", CREATE, CREATE_CHANNEL, post(f"/channel/empty?{channel}"))
    for verb in ("create", "delete", "empty", "pause", "unpause"):
        yield case(f"{verb}: a channel's topic must be given", post(f"/channel/{verb}?channel=ch"))
        yield case(f"{verb}: a channel must be given", CREATE, post(f"/channel/{verb}?topic=<topic>"))
        yield case(f"{verb}: a channel with a broken query", post(f"/channel/{verb}?{channel}&%zz"))
        yield case(f"{verb}: a channel's topic is not valid", post(f"/channel/{verb}?topic=*&channel=ch"))
        yield case(f"{verb}: a channel is not valid", CREATE, post(f"/channel/{verb}?topic=<topic>&channel=*"))
        yield case(f"{verb}: a channel's topic is not there", post(f"/channel/{verb}?{channel}"))
        if verb != "create":
            yield case(f"{verb}: a channel is not there", CREATE, post(f"/channel/{verb}?{channel}"))


def stats() -> Iterator[HttpCase]:
    yield case("stats of a topic that is not there", STATS)
    yield case("stats with memory", CREATE, get("/stats?format=json&topic=<topic>"))
    for value in ("true", "1", "false", "0", "maybe"):
        target = f"/stats?format=json&topic=<topic>&include_clients={value}&include_mem=0"
        yield case(f"stats with include_clients={value}", CREATE, CREATE_CHANNEL, get(target))
    for value in ("true", "1", "false", "0", "maybe"):
        yield case(
            f"stats with include_mem={value}", CREATE, get(f"/stats?format=json&topic=<topic>&include_mem={value}")
        )
    one = "/stats?format=json&include_mem=0&topic=<topic>&channel="
    yield case(
        "stats of one channel", CREATE, CREATE_CHANNEL, post("/channel/create?topic=<topic>&channel=b"), get(one + "b")
    )
    yield case("stats of a channel that no topic has", CREATE, CREATE_CHANNEL, get(one + "nothing"))
    yield case(
        "stats of two channels are in order",
        CREATE,
        CREATE_CHANNEL,
        post("/channel/create?topic=<topic>&channel=a"),
        STATS,
    )
    yield case("stats with a broken query are refused", get("/stats?format=json&%zz"))
    yield case("stats with a semicolon are refused", get("/stats?format=json;x"))


def settings() -> Iterator[HttpCase]:
    for key in (
        "max_msg_size max_body_size max_rdy_count mem_queue_size msg_timeout max_msg_timeout max_req_timeout log_level "
        "log_prefix tls_required tls_cert tls_client_auth_policy deflate snappy max_deflate_level sync_every "
        "sync_timeout nsqlookupd_tcp_addresses auth_http_addresses e2e_processing_latency_percentiles statsd_prefix "
        "statsd_address statsd_interval http_client_connect_timeout broadcast_address data_path http_address "
        "queue_scan_selection_count max_heartbeat_interval output_buffer_timeout max_channel_consumers "
        "e2e_processing_latency_window_time"
    ).split():
        yield case(f"the setting {key}", get(f"/config/{key}"))
    yield case("the setting id", get("/config/id"), flags=SMALL_LIMITS)
    yield case("the setting tls_min_version", get("/config/tls_min_version"), ours=TLS_1_2)
    for key in ("nothing", "node_id", "lookupd_tcp_address", "config", "version", "verbose", "MAX_MSG_SIZE"):
        yield case(f"there is no setting {key}", get(f"/config/{key}"))
    yield case("a setting must be named", get("/config/"), get("/config"))
    yield case("a setting has no parts", get("/config/log_level/x"))
    yield case("the level of logs is set", put("/config/log_level", b"warn"), get("/config/log_level"), flags=SETTABLE)
    yield case("a level of logs may be in capitals", put("/config/log_level", b"ERROR"), flags=SETTABLE)
    for words, body in (
        ("in quotes", b'"info"'),
        ("that nobody knows", b"loud"),
        ("with a newline", b"info\n"),
        ("that is a number", b"2"),
    ):
        yield case(f"a level of logs {words} is refused", put("/config/log_level", body))
    yield case(
        "the lookupds are set",
        put("/config/nsqlookupd_tcp_addresses", b'["127.0.0.1:1","127.0.0.1:2"]'),
        get("/config/nsqlookupd_tcp_addresses"),
        put("/config/nsqlookupd_tcp_addresses", b"[]"),
        get("/config/nsqlookupd_tcp_addresses"),
        flags=LOOKUPS,
    )
    yield case(
        "lookupds that are null are none", put("/config/nsqlookupd_tcp_addresses", b"null"), flags=LOOKUPS, ours=NO_NULL
    )
    for words, body in (("no list", b'"x"'), ("numbers", b"[1]"), ("no JSON", b"127.0.0.1:1"), ("an object", b"{}")):
        yield case(f"lookupds that are {words} are refused", put("/config/nsqlookupd_tcp_addresses", body))
    yield case("a setting of nothing is refused", put("/config/log_level", b""))
    yield case("a setting of nothing is refused before its name is looked at", put("/config/nothing", b""))
    yield case("a setting that cannot be set", put("/config/max_msg_size", b"1"), get("/config/max_msg_size"))
    yield case("a setting that is not there cannot be set", put("/config/nothing", b"1"))
    yield case("a setting beyond the limit is refused", put("/config/log_level", b"x" * 101), flags=SMALL_LIMITS)


def debugging() -> Iterator[HttpCase]:
    yield case("the profiles have their page below a slash", get("/debug/pprof"))
    yield case("a profile that is not there", get("/debug/pprof/nothing"))
    yield case("a block rate must be a number", put("/debug/setblockrate", b""))
    yield case("a block rate is set", put("/debug/setblockrate?rate=1", b""), ours=DONE_IS_NO_ERROR)
    yield case("memory is freed", post("/debug/freememory"), ours=DONE_IS_NO_ERROR)


FORM = "Content-Type: application/x-www-form-urlencoded"
# Cases that change a daemon's settings have one of their own.
SETTABLE = ("--log-level=info", "--statsd-interval=61s")
LOOKUPS = ("--statsd-interval=62s",)

NEWER_INFO_KEYS = Ours(
    "the recording is of v1.3.0; ours follows the revision after it, which tells where the node is",
    {
        0: (
            "200",
            JSON,
            VERSION,
            '{"version":"1.3.0","broadcast_address":"<host>","hostname":"<host>","http_port":<http_port>,'
            '"tcp_port":<tcp_port>,"start_time":<time>,"max_heartbeat_interval":60000000000,'
            '"max_output_buffer_size":65536,"max_output_buffer_timeout":30000000000,"max_deflate_level":6,'
            '"topology_zone":"","topology_region":""}',
        )
    },
)
TLS_1_2 = Ours("TLS before 1.2 must be asked for", {0: ("200", JSON, VERSION, "771")})
NO_NULL = Ours("a list is never null", {0: ("200", JSON, VERSION, "[]")})
DONE_IS_NO_ERROR = Ours("the Go daemon trips over its own success", {0: ("200", "")})

CHAPTERS = (general, publishing, batches, topics, channels, stats, settings, debugging)
HTTP_CASES: tuple[HttpCase, ...] = tuple(found for chapter in CHAPTERS for found in chapter())
