"""Opening a connection, command lines, states, AUTH and heartbeats."""

from __future__ import annotations

from collections.abc import Iterator

from ..notation import (
    CLOSE_WAIT,
    HEARTBEAT,
    NO_SUCH_ID,
    OK,
    SMALL_LIMITS,
    SUB,
    Case,
    Ours,
    a,
    answered,
    b,
    batch,
    c,
    case,
    cut_short,
    dpub,
    error,
    identify,
    message,
    mpub,
    pub,
    refused,
    refused_subscriber,
    size,
    sized,
    time_passes,
)


def opening() -> Iterator[Case]:
    for words, magic in (
        ("of version 1", b"  V1"),
        ("of version 3", b"  V3"),
        ("in lower case", b"  v2"),
        ("with its spaces behind", b"V2  "),
        ("of an HTTP request", b"GET "),
        ("of four zero bytes", bytes(4)),
    ):
        yield case(f"a magic {words} is a bad protocol", a.connects(), a.is_refused(magic, "E_BAD_PROTOCOL"))
    yield case(
        "a bad magic is refused at once, with commands behind it",
        a.connects(),
        a.is_refused(b"ABCD" + SUB, "E_BAD_PROTOCOL"),
    )
    yield case("a magic cut short is closed silently", a.connects(), a.sends(b"  V"), a.ends_input(), a.is_closed())
    yield case("no magic at all is closed silently", a.connects(), a.ends_input(), a.is_closed())
    yield case(
        "a connection may be silent for long before its magic",
        a.connects(),
        time_passes(7),
        a.sends(b"  V2"),
        a.asks(pub(b"m"), OK),
        waits=True,
        ours=Ours("a peer without a magic is dropped after 5 s; for ever would block a clean stop", {"a": ("closed",)}),
    )
    yield case("there is no greeting after the magic", a.sends(b""))
    yield case("the magic may come in pieces", a.connects(), a.sends(b" ", b" V", b"2"), a.asks(pub(b"m"), OK))
    yield refused("a second magic is part of the first command line", b"  V2NOP\n", "E_INVALID invalid command ")
    yield case("the end of input after the magic closes silently", a.sends(b""), a.ends_input(), a.is_closed())
    yield case(
        "half a command line at the end of input is closed silently", a.sends(b"NO"), a.ends_input(), a.is_closed()
    )
    yield case(
        "commands before the end of input are still answered",
        a.sends(pub(b"m")),
        a.ends_input(),
        a.gets(OK),
        a.is_closed(),
    )


def command_lines() -> Iterator[Case]:
    yield refused("an empty line is an unknown command", b"\n", "E_INVALID invalid command ")
    yield refused("a line of CR LF is empty too", b"\r\n", "E_INVALID invalid command ")
    yield refused("a line of one space is an unknown command", b" \n", "E_INVALID invalid command ")
    yield refused("an unknown command is named in the error", b"HELLO you\n", "E_INVALID invalid command HELLO")
    yield refused("commands are upper case", b"nop\n", "E_INVALID invalid command nop")
    yield refused("a command in mixed case is unknown", b"Sub <topic> ch\n", "E_INVALID invalid command Sub")
    yield refused("a longer word is not the command it begins with", b"NOPE\n", "E_INVALID invalid command NOPE")
    yield refused("a space in front makes the command empty", b" NOP\n", "E_INVALID invalid command ")
    yield refused("a tab does not separate", b"NOP\tx\n", "E_INVALID invalid command NOP\tx")
    yield refused(
        "an unknown command is echoed byte by byte",
        b"\xff\x00\xc3\xa9 x\n",
        "E_INVALID invalid command \xff\x00\xc3\xa9",
    )
    yield case("one CR before the LF is taken off", a.sends(b"NOP\r\n"), a.asks(b"PUB <topic>\r\n" + sized(b"m"), OK))
    yield refused("only one CR is taken off", b"NOP\r\r\n", "E_INVALID invalid command NOP\r")
    yield refused("a CR inside a line stays", b"NOP\rx\n", "E_INVALID invalid command NOP\rx")
    yield case(
        "SUB and RDY take CR LF",
        a.asks(b"SUB <topic> ch\r\n", OK),
        a.sends(b"RDY 1\r\n"),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
    )
    yield case("NOP has no answer", a.sends(b"NOP\n"), a.asks(pub(b"m"), OK), a.sends(b"NOP\nNOP\n"))
    yield case("NOP ignores parameters", a.sends(b"NOP 1 2 3\n"))
    yield case(
        "NOP is fine in every state",
        a.sends(b"NOP\n"),
        a.subscribes(),
        a.sends(b"NOP\n"),
        a.asks(b"CLS\n", CLOSE_WAIT),
        a.sends(b"NOP\n"),
    )
    yield refused("two spaces make an empty parameter", b"PUB  <topic>\n", 'E_BAD_TOPIC PUB topic name "" is not valid')
    yield refused(
        "two spaces before the channel make it empty",
        b"SUB <topic>  ch\n",
        'E_BAD_CHANNEL SUB channel name "" is not valid',
    )
    yield answered("PUB ignores extra parameters", b"PUB <topic> 1 2\n" + sized(b"m"), OK)
    yield answered("PUB takes a trailing space", b"PUB <topic> \n" + sized(b"m"), OK)
    yield answered("MPUB ignores extra parameters", b"MPUB <topic> 1\n" + sized(batch(b"m")), OK)
    yield answered("DPUB ignores extra parameters", b"DPUB <topic> 0 x\n" + sized(b"m"), OK)
    yield answered("SUB ignores extra parameters", b"SUB <topic> ch more\n", OK)
    yield case(
        "RDY ignores extra parameters",
        a.subscribes(),
        a.sends(b"RDY 1 x\n"),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
    )
    yield case("CLS ignores parameters", a.subscribes(), a.asks(b"CLS now\n", CLOSE_WAIT))
    yield answered("IDENTIFY ignores parameters", b"IDENTIFY me\n" + sized(b"{}"), OK)
    yield case(
        "FIN, REQ and TOUCH ignore extra parameters",
        a.subscribes(),
        a.asks(b"FIN " + NO_SUCH_ID + b" x\n", error("E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")),
        a.asks(b"REQ " + NO_SUCH_ID + b" 0 x\n", error("E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight")),
        a.asks(
            b"TOUCH " + NO_SUCH_ID + b" x\n", error("E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight")
        ),
    )
    yield case("a line of 16384 bytes is read", a.sends(b"NOP " + b"x" * 16379 + b"\n"))
    yield case("a line of 16385 bytes closes without a frame", a.sends(b"NOP " + b"x" * 16380 + b"\n"), a.is_closed())
    yield case("16384 bytes without an end of line close without a frame", a.sends(b"x" * 16384), a.is_closed())
    yield case(
        "a long line behind other commands is measured from its own start",
        a.sends(b"NOP\n" * 10 + b"NOP " + b"x" * 16379 + b"\n"),
        a.asks(pub(b"m"), OK),
    )
    yield answered(
        "pipelined commands are answered in order",
        pub(b"1") + b"NOP\n" + mpub(b"2", b"3") + dpub(b"0", b"4") + SUB,
        OK,
        OK,
        OK,
        OK,
    )
    yield refused("nothing is read behind a fatal error", b"XXX\n" + pub(b"m"), "E_INVALID invalid command XXX")
    yield case(
        "a command may come byte by byte",
        a.sends(*(bytes([byte]) for byte in b"PUB confbytes\n" + sized(b"ab"))),
        a.gets(OK),
    )


def states() -> Iterator[Case]:
    closing = [*a.subscribes(), *a.asks(b"CLS\n", CLOSE_WAIT)]
    fin, req, touch = b"FIN " + NO_SUCH_ID + b"\n", b"REQ " + NO_SUCH_ID + b" 0\n", b"TOUCH " + NO_SUCH_ID + b"\n"
    for word, command in (("RDY", b"RDY 1\n"), ("FIN", fin), ("REQ", req), ("TOUCH", touch), ("CLS", b"CLS\n")):
        yield refused(f"{word} before SUB is refused", command, f"E_INVALID cannot {word} in current state")
    for word, command in (
        ("IDENTIFY", identify("{}")),
        ("AUTH", b"AUTH\n" + sized(b"s")),
        ("SUB", b"SUB <topic> other\n"),
    ):
        text = f"E_INVALID cannot {word} in current state"
        yield refused_subscriber(f"{word} after SUB is refused", command, text)
        yield case(f"{word} after CLS is refused", closing, a.is_refused(command, text))
    yield case("CLS after CLS is refused", closing, a.is_refused(b"CLS\n", "E_INVALID cannot CLS in current state"))
    yield refused("a state is checked before parameters", b"FIN\n", "E_INVALID cannot FIN in current state")
    yield refused("a state is checked before a number", b"RDY x\n", "E_INVALID cannot RDY in current state")
    yield case(
        "PUB, MPUB and DPUB work while subscribed",
        a.subscribes(),
        a.asks(pub(b"1"), OK),
        a.asks(mpub(b"2"), OK),
        a.asks(dpub(b"0", b"3"), OK),
    )
    yield case(
        "PUB, MPUB and DPUB work after CLS",
        closing,
        a.asks(pub(b"1"), OK),
        a.asks(mpub(b"2"), OK),
        a.asks(dpub(b"0", b"3"), OK),
    )
    yield case(
        "RDY after CLS is ignored",
        closing,
        a.sends(b"RDY 1\n"),
        a.is_heard(),
        b.publishes(b"m"),
        c.subscribes(1),
        c.gets(message(1, b"m")),
    )
    yield case("RDY after CLS is not even parsed", closing, a.sends(b"RDY x\n", b"RDY 99999\n", b"RDY -1\n"))
    yield case(
        "FIN, REQ and TOUCH after CLS look for their message",
        closing,
        a.asks(fin, error("E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")),
        a.asks(req, error("E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight")),
        a.asks(touch, error("E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight")),
    )
    yield case(
        "messages in flight can be settled after CLS",
        b.publishes(b"1", b"2"),
        a.subscribes(2),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.asks(b"CLS\n", CLOSE_WAIT),
        a.sends(b"TOUCH <id1>\n", b"FIN <id1>\n", b"REQ <id2> 0\n"),
        c.subscribes(1),
        c.gets(message(2, b"2", attempts=2)),
    )
    yield case(
        "after CLS nothing more is delivered",
        a.subscribes(5),
        a.asks(b"CLS\n", CLOSE_WAIT),
        b.publishes(b"m"),
        c.subscribes(1),
        c.gets(message(1, b"m")),
    )


def auth() -> Iterator[Case]:
    yield refused(
        "AUTH without an auth server is refused", b"AUTH\n" + sized(b"secret"), "E_AUTH_DISABLED AUTH disabled"
    )
    yield refused(
        "AUTH takes no parameters", b"AUTH x\n" + sized(b"secret"), "E_INVALID AUTH invalid number of parameters"
    )
    yield refused(
        "AUTH with a trailing space has a parameter",
        b"AUTH \n" + sized(b"secret"),
        "E_INVALID AUTH invalid number of parameters",
    )
    yield refused("AUTH of length 0 is refused", b"AUTH\n" + size(0), "E_BAD_BODY AUTH invalid body size 0")
    yield refused("AUTH of length -1 is refused", b"AUTH\n" + size(-1), "E_BAD_BODY AUTH invalid body size -1")
    yield refused(
        "AUTH one byte too long is refused", b"AUTH\n" + size(5242881), "E_BAD_BODY AUTH body too big 5242881 > 5242880"
    )
    yield refused(
        "AUTH over a lower limit is refused",
        b"AUTH\n" + size(201),
        "E_BAD_BODY AUTH body too big 201 > 200",
        flags=SMALL_LIMITS,
    )
    yield cut_short("AUTH cut short in its length is refused", b"AUTH\n\0", "E_BAD_BODY AUTH failed to read body size")
    yield cut_short(
        "AUTH cut short in its body is refused", b"AUTH\n" + size(9) + b"x", "E_BAD_BODY AUTH failed to read body"
    )


def heartbeats() -> Iterator[Case]:
    yield case(
        "a heartbeat comes every interval",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.asks(b"", HEARTBEAT),
        a.asks(b"NOP\n", HEARTBEAT),
        a.asks(b"NOP\n", HEARTBEAT),
        a.sends(b"NOP\n"),
        heartbeats=True,
        waits=True,
    )
    yield case(
        "a client silent for two intervals is closed",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.is_closed(),
        waits=True,
    )
    yield case(
        "a client silent in the middle of a body is told so",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.is_refused(b"PUB <topic>\n" + size(10) + b"half", "E_BAD_MESSAGE PUB failed to read message body"),
        waits=True,
    )
    yield case(
        "a client silent in the middle of a line is closed",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.sends(b"PUB <top"),
        a.is_closed(),
        waits=True,
    )
    yield case(
        "a second IDENTIFY moves the deadline but not the heartbeats",
        a.asks(identify(heartbeat_interval=30000), OK),
        a.asks(identify(heartbeat_interval=1000), OK),
        a.is_closed(),
        heartbeats=True,
        waits=True,
    )
    yield case(
        "the first IDENTIFY sets the rhythm of the heartbeats",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.asks(identify(heartbeat_interval=60000), OK),
        a.gets(HEARTBEAT, HEARTBEAT, HEARTBEAT),
        heartbeats=True,
        waits=True,
    )
    yield case(
        "a subscriber without messages gets heartbeats",
        a.asks(identify(heartbeat_interval=1000), OK),
        a.subscribes(1),
        a.gets(HEARTBEAT),
        heartbeats=True,
        waits=True,
    )


CHAPTERS = (opening, command_lines, states, auth, heartbeats)
