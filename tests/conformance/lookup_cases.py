"""What is sent to an nsqlookupd and what should come back, over TCP and HTTP, as a table.

Whether the Go daemon agrees is not decided here: ``lookup_recorded.json`` holds what it really said. Not here are those
cases in which it dies (a negative length), and those that need time to pass; ``tests/lookup`` has them for ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from .lookup_notation import (
    HTTP,
    INFO,
    JSON,
    OK,
    Ask,
    Case,
    a,
    answered,
    b,
    case,
    get,
    identify,
    node,
    peer,
    post,
    record,
    refused,
    until,
)
from .notation import Ours

__all__ = ["CASES"]

BAD_JSON = "E_BAD_BODY IDENTIFY failed to decode JSON body"
MISSING = "E_BAD_BODY IDENTIFY missing fields"
NO_TOPIC = refused(404, "TOPIC_NOT_FOUND")


def opening() -> Iterator[Case]:
    for words, magic in (
        ("of nsqd", b"  V2"),
        ("of an HTTP request", b"GET / HTTP/1.1\r\n\r\n"),
        ("of zeros", bytes(4)),
    ):
        yield case(f"a magic {words} is a bad protocol", a.connects(), a.is_refused(magic, "E_BAD_PROTOCOL"))
    yield case("a magic cut short is no error", a.connects(), a.sends(b"  V"), a.ends_input(), a.is_closed())
    yield case("a magic and nothing else is no error", a.sends(b""), a.ends_input(), a.is_closed())
    yield case("an unknown command is refused", a.is_refused(b"FOO\n", "E_INVALID invalid command FOO"))
    yield case("an empty command is refused", a.is_refused(b"\n", "E_INVALID invalid command "))
    yield case("a command in lower case is unknown", a.is_refused(b"ping\n", "E_INVALID invalid command ping"))
    yield case(
        "what follows the name of an unknown command is not shown",
        a.is_refused(b"X y z\n", "E_INVALID invalid command X"),
    )
    yield case("a command without an end is no error", a.sends(b"PING"), a.ends_input(), a.is_closed())


def ping() -> Iterator[Case]:
    yield case("PING needs no IDENTIFY", a.asks(b"PING\n", OK))
    yield case("PING after IDENTIFY is OK", a.identifies(), a.asks(b"PING\n", OK))
    yield case("a line may end in CR LF", a.asks(b"PING\r\n", OK))
    yield case("white space around a line is trimmed", a.asks(b" \t PING  \r\n", OK))
    yield case("parameters of PING are ignored", a.asks(b"PING a b c\n", OK))
    yield case("commands in one packet are answered in order", a.asks(b"PING\n" + identify() + b"PING\n", OK, INFO, OK))


def identifying() -> Iterator[Case]:
    yield case("IDENTIFY is answered with the daemon's own ports", a.identifies())
    yield case(
        "IDENTIFY again is refused", a.identifies(), a.is_refused(b"IDENTIFY\n", "E_INVALID cannot IDENTIFY again")
    )
    yield case("parameters of IDENTIFY are ignored", a.asks(b"IDENTIFY a b\n" + identify()[9:], INFO))
    yield case(
        "IDENTIFY without a size is refused",
        a.sends(b"IDENTIFY\n\0\0"),
        a.ends_input(),
        a.is_refused(b"", "E_BAD_BODY IDENTIFY failed to read body size"),
    )
    yield case(
        "IDENTIFY with half a body is refused",
        a.sends(b"IDENTIFY\n\0\0\0\5{"),
        a.ends_input(),
        a.is_refused(b"", "E_BAD_BODY IDENTIFY failed to read body"),
    )
    for words, body in (
        ("nothing", b""),
        ("text", b"hello"),
        ("an array", b"[]"),
        ("half an object", b'{"version":'),
        ("an object and more", b"{}{}"),
    ):
        yield case(f"IDENTIFY with {words} is refused", a.is_refused(identify(body), BAD_JSON))
    yield case("IDENTIFY with null lacks fields", a.is_refused(identify(b"null"), MISSING))
    yield case("IDENTIFY with an empty object lacks fields", a.is_refused(identify(b"{}"), MISSING))
    for key in ("broadcast_address", "tcp_port", "http_port", "version"):
        yield case(f"IDENTIFY without {key} is refused", a.is_refused(identify(**{key: None}), MISSING))
    for key in ("broadcast_address", "version"):
        yield case(f"IDENTIFY with an empty {key} is refused", a.is_refused(identify(**{key: ""}), MISSING))
        yield case(f"IDENTIFY with a number for {key} is refused", a.is_refused(identify(**{key: 1}), BAD_JSON))
    for key in ("tcp_port", "http_port"):
        yield case(f"IDENTIFY with {key} 0 is refused", a.is_refused(identify(**{key: 0}), MISSING))
        yield case(f"IDENTIFY with text for {key} is refused", a.is_refused(identify(**{key: "1"}), BAD_JSON))
        yield case(f"IDENTIFY with a fraction for {key} is refused", a.is_refused(identify(**{key: 1.5}), BAD_JSON))
    yield case("IDENTIFY with a number for hostname is refused", a.is_refused(identify(hostname=1), BAD_JSON))
    yield case(
        "IDENTIFY with a number for remote_address is refused", a.is_refused(identify(remote_address=1), BAD_JSON)
    )
    yield case("IDENTIFY needs no hostname", a.identifies(hostname=None))
    yield case("IDENTIFY may have other keys", a.identifies(other=[1, {"x": None}]))
    yield case("IDENTIFY allows ports that are none", a.identifies(tcp_port=-70000, http_port=99999))
    upper = b'{"BROADCAST_ADDRESS":"<node>","Hostname":"h","Http_Port":4151,"tcp_PORT":4150,"Version":"1.3.0"}'
    yield case(
        "IDENTIFY reads keys in any case",
        a.asks(identify(upper), INFO),
        a.registers("<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": [], "producers": [peer("a")]})),
    )
    yield case(
        "IDENTIFY cannot choose its remote address",
        a.identifies(remote_address="1.2.3.4:5"),
        a.registers("<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": [], "producers": [peer("a")]})),
    )


def registering() -> Iterator[Case]:
    for verb in ("REGISTER", "UNREGISTER"):
        line = f"{verb} ".encode()
        yield case(f"{verb} before IDENTIFY is refused", a.is_refused(line + b"t\n", "E_INVALID client must IDENTIFY"))
        yield case(
            f"{verb} without a topic is refused",
            a.identifies(),
            a.is_refused(line + b"\n", f"E_INVALID {verb} insufficient number of params"),
        )
        for topic in ("*", "a$", "", "#ephemeral", "a#ephemeral2", "x" * 65, "\x01"):
            shown = {"": "of nothing", "x" * 65: "of 65 letters", "\x01": "of a control character"}.get(topic, topic)
            yield case(
                f"{verb} of the topic {shown} is refused",
                a.identifies(),
                a.is_refused(line + topic.encode() + b" c\n", f"E_BAD_TOPIC {verb} topic name '{topic}' is not valid"),
            )
        yield case(
            f"{verb} of an invalid channel is refused",
            a.identifies(),
            a.is_refused(line + b"<topic> *\n", f"E_BAD_CHANNEL {verb} channel name '*' is not valid"),
        )
        yield case(f"{verb} takes an empty channel for none", a.identifies(), a.asks(line + b"<topic>  x\n", OK))
        yield case(f"{verb} ignores more parameters", a.identifies(), a.asks(line + b"<topic> c d e\n", OK))
    yield case("REGISTER allows 64 letters", a.identifies(), a.registers("x" * 64, "y" * 54 + "#ephemeral"))


def registry() -> Iterator[Case]:
    yield case(
        "a registered topic is looked up",
        a.identifies(),
        a.registers("<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": [], "producers": [peer("a")]})),
        get("/channels?topic=<topic>", answered({"channels": []})),
        get("/topics", answered({"topics": ["<topic>"]})),
        get("/nodes", answered({"producers": [node("a", t=False)]})),
    )
    yield case(
        "a channel registers its topic",
        a.identifies(),
        a.registers("<topic> c", "<topic> d"),
        get("/lookup?topic=<topic>", answered({"channels": ["c", "d"], "producers": [peer("a")]})),
        get(
            "/debug",
            answered(
                {
                    "channel:<topic>:c": [record("a")],
                    "channel:<topic>:d": [record("a")],
                    "client::": [record("a")],
                    "topic:<topic>:": [record("a")],
                }
            ),
        ),
    )
    yield case(
        "two connections are two producers",
        a.identifies(),
        b.identifies(http_port=4152),
        a.registers("<topic> c"),
        b.registers("<topic> d"),
        get(
            "/lookup?topic=<topic>",
            answered({"channels": ["c", "d"], "producers": [peer("a"), peer("b", http_port=4152)]}),
        ),
    )
    yield case(
        "an nsqd without topics is a node",
        a.identifies(),
        get("/nodes", answered({"producers": [node("a")]})),
        get("/debug", answered({"client::": [record("a")]})),
    )
    yield case(
        "registering twice is registering once",
        a.identifies(),
        a.registers("<topic> c", "<topic> c", "<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": [peer("a")]})),
    )
    yield case(
        "a channel that is unregistered stays known, and its topic registered",
        a.identifies(),
        a.registers("<topic> c"),
        a.unregisters("<topic> c"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": [peer("a")]})),
        get("/debug", answered({"client::": [record("a")], "topic:<topic>:": [record("a")]})),
    )
    yield case(
        "a topic that is unregistered stays known, and its channels",
        a.identifies(),
        a.registers("<topic> c"),
        a.unregisters("<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": []})),
        get("/nodes", answered({"producers": [node("a")]})),
        get("/debug", answered({"client::": [record("a")]})),
    )
    yield case(
        "only the producer that unregisters is taken off",
        a.identifies(),
        b.identifies(),
        a.registers("<topic> c"),
        b.registers("<topic> c"),
        a.unregisters("<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": [peer("b")]})),
    )
    yield case(
        "unregistering what was never registered is OK",
        a.identifies(),
        a.unregisters("<topic>", "<topic> c"),
        get("/lookup?topic=<topic>", NO_TOPIC),
    )
    yield case(
        "an ephemeral channel goes when it is unregistered",
        a.identifies(),
        a.registers("<topic> c#ephemeral", "<topic> d"),
        a.unregisters("<topic> c#ephemeral"),
        get("/channels?topic=<topic>", answered({"channels": ["d"]})),
    )
    yield case(
        "an ephemeral channel stays while another producer has it",
        a.identifies(),
        b.identifies(),
        a.registers("<topic> c#ephemeral"),
        b.registers("<topic> c#ephemeral"),
        a.unregisters("<topic> c#ephemeral"),
        get("/channels?topic=<topic>", answered({"channels": ["c#ephemeral"]})),
    )
    yield case(
        "an ephemeral topic goes when it is unregistered",
        a.identifies(),
        a.registers("<topic>#ephemeral"),
        get("/lookup?topic=<topic>%23ephemeral", answered({"channels": [], "producers": [peer("a")]})),
        a.unregisters("<topic>#ephemeral"),
        get("/lookup?topic=<topic>%23ephemeral", NO_TOPIC),
    )
    yield case(
        "the channels of an ephemeral topic are left behind when it goes",
        a.identifies(),
        a.registers("<topic>#ephemeral c"),
        a.unregisters("<topic>#ephemeral"),
        get("/channels?topic=<topic>%23ephemeral", answered({"channels": ["c"]})),
        ours=Ours("what nobody can have any more is not listed for ever", {HTTP: (answered({"channels": []}),)}),
    )
    yield case(
        "a connection that ends takes its registrations along, and names stay",
        a.identifies(),
        a.registers("<topic> c", "<topic>2"),
        a.hangs_up(),
        until("/debug", answered({})),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": []})),
        get("/topics", answered({"topics": ["<topic>", "<topic>2"]})),
        get("/nodes", answered({"producers": []})),
    )
    gone = (answered({}), answered({"channels": []}), answered({"topics": ["<topic>"]}))
    yield case(
        "ephemeral names are left behind by a connection that ends",
        a.identifies(),
        a.registers("<topic> c#ephemeral", "<topic>2#ephemeral"),
        a.hangs_up(),
        until("/debug", answered({})),
        get("/channels?topic=<topic>", answered({"channels": ["c#ephemeral"]})),
        get("/topics", answered({"topics": ["<topic>", "<topic>2#ephemeral"]})),
        ours=Ours("an nsqd that crashed leaves nothing ephemeral behind", {HTTP: gone}),
    )
    yield case(
        "a fatal error unregisters too",
        a.identifies(),
        a.registers("<topic> c"),
        a.is_refused(b"nonsense\n", "E_INVALID invalid command nonsense"),
        until("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": []})),
    )


def tombstones() -> Iterator[Case]:
    hide = "/topic/tombstone?topic=<topic>&node=<node>:4151"
    visible = answered({"channels": [], "producers": [peer("a")]})
    hidden = answered({"channels": [], "producers": []})
    lookup = "/lookup?topic=<topic>"
    yield case(
        "a tombstone hides a producer from lookup and shows in nodes",
        a.identifies(),
        a.registers("<topic>", "<topic>2"),
        post(hide),
        get(lookup, hidden),
        get("/lookup?topic=<topic>2", visible),
        get("/nodes", answered({"producers": [node("a", t=True, t2=False)]})),
        get(
            "/debug",
            answered(
                {
                    "client::": [record("a")],
                    "topic:<topic>2:": [record("a")],
                    "topic:<topic>:": [record("a", "<time>")],
                }
            ),
        ),
    )
    yield case(
        "registering again keeps a tombstone",
        a.identifies(),
        a.registers("<topic>"),
        post(hide),
        a.registers("<topic>"),
        get(lookup, hidden),
    )
    yield case(
        "unregistering and registering ends a tombstone",
        a.identifies(),
        a.registers("<topic>"),
        post(hide),
        a.unregisters("<topic>"),
        a.registers("<topic>"),
        get(lookup, visible),
    )
    yield case(
        "a tombstone for another node hides nobody",
        a.identifies(),
        a.registers("<topic>"),
        post("/topic/tombstone?topic=<topic>&node=<node>:4150"),
        post("/topic/tombstone?topic=<topic>&node=other:4151"),
        post("/topic/tombstone?topic=<topic>&node="),
        get(lookup, visible),
    )
    yield case("a tombstone for an unknown topic is no error", post(hide))
    yield case("a tombstone needs a topic", post("/topic/tombstone", refused(400, "MISSING_ARG_TOPIC")))
    yield case("a tombstone needs a node", post("/topic/tombstone?topic=<topic>", refused(400, "MISSING_ARG_NODE")))


def operators() -> Iterator[Case]:
    yield case(
        "a topic is made and deleted",
        get("/lookup?topic=<topic>", NO_TOPIC),
        post("/topic/create?topic=<topic>"),
        post("/topic/create?topic=<topic>"),
        get("/lookup?topic=<topic>", answered({"channels": [], "producers": []})),
        post("/topic/delete?topic=<topic>"),
        get("/lookup?topic=<topic>", NO_TOPIC),
    )
    yield case(
        "a channel is made with its topic, and deleted alone",
        post("/channel/create?topic=<topic>&channel=c"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": []})),
        post("/channel/delete?topic=<topic>&channel=c"),
        get("/lookup?topic=<topic>", answered({"channels": [], "producers": []})),
        post("/channel/delete?topic=<topic>&channel=c", refused(404, "CHANNEL_NOT_FOUND")),
    )
    yield case(
        "deleting a topic deletes its channels",
        post("/channel/create?topic=<topic>&channel=c"),
        post("/topic/delete?topic=<topic>"),
        get("/channels?topic=<topic>", answered({"channels": []})),
        post("/topic/create?topic=<topic>"),
        get("/channels?topic=<topic>", answered({"channels": []})),
    )
    yield case(
        "a deleted topic takes the registrations of connected nsqds along",
        a.identifies(),
        a.registers("<topic> c"),
        post("/topic/delete?topic=<topic>"),
        get("/lookup?topic=<topic>", NO_TOPIC),
        get("/nodes", answered({"producers": [node("a")]})),
        a.registers("<topic> c"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": [peer("a")]})),
    )
    yield case("deleting an unknown topic is no error", post("/topic/delete?topic=<topic>"))
    yield case(
        "a registered channel finds the topic that was made before it",
        post("/topic/create?topic=<topic>"),
        a.identifies(),
        a.registers("<topic> c"),
        get("/lookup?topic=<topic>", answered({"channels": ["c"], "producers": [peer("a")]})),
    )
    for path in ("/topic/create", "/topic/delete", "/channel/create", "/channel/delete"):
        yield case(f"{path} needs a topic", post(path, refused(400, "MISSING_ARG_TOPIC")))
        yield case(f"{path} reads no body", post(path, refused(400, "MISSING_ARG_TOPIC"), b"topic=<topic>&channel=c"))
        yield case(f"{path} refuses a bad query", post(f"{path}?topic=%zz", refused(400, "INVALID_REQUEST")))
    for path in ("/topic/create", "/channel/create", "/channel/delete"):
        for words, name in (("an empty name", ""), ("a star", "*"), ("65 letters", "x" * 65)):
            yield case(f"{path} refuses {words}", post(f"{path}?topic={name}", refused(400, "INVALID_ARG_TOPIC")))
    for path in ("/channel/create", "/channel/delete"):
        yield case(f"{path} needs a channel", post(f"{path}?topic=<topic>", refused(400, "MISSING_ARG_CHANNEL")))
        yield case(
            f"{path} refuses a star for a channel",
            post(f"{path}?topic=<topic>&channel=*", refused(400, "INVALID_ARG_CHANNEL")),
        )
    yield case(
        "of a repeated argument the first counts",
        post("/topic/create?topic=<topic>&topic=<topic>2"),
        get("/topics", answered({"topics": ["<topic>"]})),
    )
    yield case(
        "deleting a topic without a name is no error",
        post("/topic/delete?topic="),
        ours=Ours("what is no name is refused", {HTTP: (refused(400, "INVALID_ARG_TOPIC"),)}),
    )


def questions() -> Iterator[Case]:
    yield case("/ping is plain text", get("/ping", "200 text/plain; charset=utf-8 - - OK"))
    yield case("/info has the version", get("/info", answered({"version": "1.3.0"})))
    yield case("/topics may be empty", get("/topics", answered({"topics": []})))
    yield case("/nodes may be empty", get("/nodes", answered({"producers": []})))
    for path in ("/lookup", "/channels"):
        yield case(f"{path} needs a topic", get(path, refused(400, "MISSING_ARG_TOPIC")))
        yield case(f"{path} refuses a bad query", get(f"{path}?topic=%zz", refused(400, "INVALID_REQUEST")))
    yield case("/lookup of an unknown topic is not found", get("/lookup?topic=<topic>", NO_TOPIC))
    yield case("/lookup of no topic is not found", get("/lookup?topic=", NO_TOPIC))
    yield case("/channels of an unknown topic are none", get("/channels?topic=<topic>", answered({"channels": []})))
    yield case("/ping ignores a query", get("/ping?%zz", "200 text/plain; charset=utf-8 - - OK"))


def routing() -> Iterator[Case]:
    yield case(
        "an unknown path is not found",
        get("/nope", refused(404, "NOT_FOUND")),
        post("/nope", refused(404, "NOT_FOUND")),
    )
    moved = '301 text/html; charset=utf-8 - /topics <a href="/topics">Moved Permanently</a>.\n\n'
    yield case("a slash too many is moved", get("/topics/", moved))
    yield case("a path in other letters is moved", get("/Topics", moved))
    yield case("a request that is no GET is moved with its method", post("/topic/create/", "307 - - /topic/create "))
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        yield case(f"{method} of /topics is not allowed", [Ask(method, "/topics", not_allowed("GET, OPTIONS"))])
    yield case("GET of /topic/create is not allowed", get("/topic/create?topic=x", not_allowed("OPTIONS, POST")))
    yield case("HEAD is not allowed", [Ask("HEAD", "/topics", f"405 {JSON} nsq; version=1.0 GET, OPTIONS ")])
    yield case("OPTIONS tells the methods", [Ask("OPTIONS", "/topics", "200 - - GET, OPTIONS ")])


def not_allowed(methods: str) -> str:
    return f'405 {JSON} nsq; version=1.0 {methods} {{"message":"METHOD_NOT_ALLOWED"}}'


CASES: tuple[Case, ...] = tuple(
    case
    for chapter in (opening, ping, identifying, registering, registry, tombstones, operators, questions, routing)
    for case in chapter()
)
