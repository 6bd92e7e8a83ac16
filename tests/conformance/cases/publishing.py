"""PUB, MPUB and DPUB: names, lengths, counts and numbers."""

from __future__ import annotations

from collections.abc import Iterator

from ..notation import (
    NO_MEMORY_QUEUE,
    NO_SUCH_ID,
    OK,
    SMALL_LIMITS,
    TOPIC_LENGTH,
    Case,
    a,
    answered,
    b,
    batch,
    c,
    case,
    cut_short,
    dpub,
    message,
    mpub,
    pub,
    refused,
    refused_subscriber,
    size,
    sized,
)


def names() -> Iterator[Case]:
    rest = 64 - TOPIC_LENGTH
    yield answered("a topic of 64 bytes is valid", pub(b"m", b"<topic>" + b"x" * rest), OK)
    too_long = "x" * (rest + 1)
    yield refused(
        "a topic of 65 bytes is not valid",
        b"PUB <topic>" + too_long.encode() + b"\n",
        f'E_BAD_TOPIC PUB topic name "<topic>{too_long}" is not valid',
    )
    yield answered(
        "#ephemeral counts towards the 64 bytes", pub(b"m", b"<topic>" + b"x" * (rest - 10) + b"#ephemeral"), OK
    )
    too_long = "x" * (rest - 9) + "#ephemeral"
    yield refused(
        "an ephemeral topic of 65 bytes is not valid",
        b"PUB <topic>" + too_long.encode() + b"\n",
        f'E_BAD_TOPIC PUB topic name "<topic>{too_long}" is not valid',
    )
    yield answered(
        "a topic may have dots, dashes, underscores, digits and both cases", pub(b"m", b"<topic>.-_09azAZ"), OK
    )
    yield answered("a topic of one character is valid", pub(b"m", b"x"), OK)
    yield answered("a topic called .. is valid", pub(b"m", b".."), OK)
    for words, name, quoted in (
        ("of #ephemeral alone", b"#ephemeral", "#ephemeral"),
        ("with something behind #ephemeral", b"x#ephemeral2", "x#ephemeral2"),
        ("with #ephemeral twice", b"x#ephemeral#ephemeral", "x#ephemeral#ephemeral"),
        ("with another suffix", b"x#temp", "x#temp"),
        ("with a slash", b"a/b", "a/b"),
        ("with a dollar", b"a$", "a$"),
        ("with a colon", b"a:b", "a:b"),
        ("with a quote", b'a"b', 'a\\"b'),
        ("with a backslash", b"a\\b", "a\\\\b"),
        ("with a tab", b"a\tb", "a\\tb"),
        ("with a carriage return", b"a\rb", "a\\rb"),
        ("with a zero byte", b"a\0b", "a\\x00b"),
        ("with a bell", b"a\ab", "a\\ab"),
        ("with a delete character", b"a\x7fb", "a\\x7fb"),
        ("with a printable letter beyond ASCII", "é".encode(), "é".encode().decode("latin-1")),
        ("with an emoji", "🙂".encode(), "🙂".encode().decode("latin-1")),
        ("with a space that does not break", "\u00a0".encode(), "\\u00a0"),
        ("with a space of no width", "\u200b".encode(), "\\u200b"),
        ("with a character of the private planes", "\U000f0000".encode(), "\\U000f0000"),
        ("with a byte that is no UTF-8", b"a\xffb", "a\\xffb"),
        ("with half a character", b"a\xc3", "a\\xc3"),
    ):
        yield refused(
            f"a topic {words} is not valid",
            b"PUB " + name + b"\n",
            f'E_BAD_TOPIC PUB topic name "{quoted}" is not valid',
        )
    yield refused("DPUB checks the topic", b"DPUB a$ 0\n", 'E_BAD_TOPIC DPUB topic name "a$" is not valid')
    yield refused(
        "DPUB checks the topic before the delay", b"DPUB a$ x\n", 'E_BAD_TOPIC DPUB topic name "a$" is not valid'
    )
    yield refused(
        "MPUB names its error code twice", b"MPUB a$\n", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "a$" is not valid'
    )
    yield refused("SUB checks the topic", b"SUB a$ ch\n", 'E_BAD_TOPIC SUB topic name "a$" is not valid')
    yield refused(
        "SUB checks the topic before the channel", b"SUB a$ b$\n", 'E_BAD_TOPIC SUB topic name "a$" is not valid'
    )
    yield refused("SUB checks the channel", b"SUB <topic> b$\n", 'E_BAD_CHANNEL SUB channel name "b$" is not valid')
    yield answered("a channel of 64 bytes is valid", b"SUB <topic> " + b"x" * 64 + b"\n", OK)
    yield refused(
        "a channel of 65 bytes is not valid",
        b"SUB <topic> " + b"x" * 65 + b"\n",
        f'E_BAD_CHANNEL SUB channel name "{"x" * 65}" is not valid',
    )
    yield refused(
        "a channel of #ephemeral alone is not valid",
        b"SUB <topic> #ephemeral\n",
        'E_BAD_CHANNEL SUB channel name "#ephemeral" is not valid',
    )
    yield answered("a topic and its channel may have the same name", b"SUB <topic> <topic>\n", OK)


def publishing() -> Iterator[Case]:
    for word, line in (("PUB", b"PUB\n"), ("MPUB", b"MPUB\n"), ("DPUB", b"DPUB\n")):
        yield refused(
            f"{word} without parameters is refused", line, f"E_INVALID {word} insufficient number of parameters"
        )
    yield refused(
        "DPUB without a delay is refused", b"DPUB <topic>\n", "E_INVALID DPUB insufficient number of parameters"
    )
    for word, line, empty in (
        ("PUB", b"PUB \n", 'E_BAD_TOPIC PUB topic name "" is not valid'),
        ("MPUB", b"MPUB \n", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "" is not valid'),
        ("DPUB", b"DPUB  0\n", 'E_BAD_TOPIC DPUB topic name "" is not valid'),
    ):
        yield refused(f"{word} to a topic without a name is refused", line, empty)
    for word, line in (("PUB", b"PUB <topic>\n"), ("DPUB", b"DPUB <topic> 0\n")):
        for words, length, text in (
            ("length 0", 0, "invalid message body size 0"),
            ("length -1", -1, "invalid message body size -1"),
            ("the lowest length", -(2**31), "invalid message body size -2147483648"),
            ("one byte too many", 1048577, "message too big 1048577 > 1048576"),
            ("the highest length", 2**31 - 1, "message too big 2147483647 > 1048576"),
        ):
            yield refused(f"{word} of {words} is refused", line + size(length), f"E_BAD_MESSAGE {word} {text}")
        yield cut_short(
            f"{word} without its length is refused", line, f"E_BAD_MESSAGE {word} failed to read message body size"
        )
        yield cut_short(
            f"{word} cut short in its length is refused",
            line + b"\0\0\0",
            f"E_BAD_MESSAGE {word} failed to read message body size",
        )
        yield cut_short(
            f"{word} cut short in its body is refused",
            line + size(3) + b"ab",
            f"E_BAD_MESSAGE {word} failed to read message body",
        )
        yield answered(f"{word} at a lower limit is taken", line + sized(b"x" * 100), OK, flags=SMALL_LIMITS)
        yield refused(
            f"{word} over a lower limit is refused",
            line + sized(b"x" * 101),
            f"E_BAD_MESSAGE {word} message too big 101 > 100",
            flags=SMALL_LIMITS,
        )
    yield case(
        "a body cut short leaves no message",
        a.sends(b"PUB <topic>\n" + size(3) + b"ab"),
        a.ends_input(),
        a.is_refused(b"", "E_BAD_MESSAGE PUB failed to read message body"),
        b.publishes(b"m"),
        c.subscribes(1),
        c.gets(message(1, b"m")),
    )
    yield case("a message of one byte is delivered", a.publishes(b"\0"), b.subscribes(1), b.gets(message(1, b"\0")))
    yield case(
        "a body may hold any bytes",
        a.publishes(bytes(range(128))),
        b.subscribes(1),
        b.gets(message(1, bytes(range(128)))),
    )
    yield case(
        "a body that looks like commands is only a body",
        a.publishes(b"\nFIN x\n  V2"),
        b.subscribes(1),
        b.gets(message(1, b"\nFIN x\n  V2")),
    )
    yield case(
        "a message of 1 MiB is delivered",
        a.publishes(b"x" * 1048576),
        b.subscribes(1),
        b.gets(message(1, b"x" * 1048576)),
    )
    yield case(
        "a message may come in pieces",
        a.sends(b"PUB <topic>\n\0\0", b"\0\5he", b"llo"),
        a.gets(OK),
        b.subscribes(1),
        b.gets(message(1, b"hello")),
    )
    yield case(
        "messages come in the order of their publishing",
        a.publishes(b"1", b"2", b"3"),
        b.subscribes(3),
        b.gets(message(1, b"1"), message(2, b"2"), message(3, b"3")),
    )
    yield case("one may get one's own messages", a.publishes(b"m"), a.subscribes(1), a.gets(message(1, b"m")))
    yield case(
        "messages come through without a memory queue",
        a.publishes(b"1", b"2"),
        b.subscribes(1),
        b.gets(message(1, b"1")),
        b.sends(b"FIN <id1>\n"),
        b.gets(message(2, b"2")),
        b.sends(b"REQ <id2> 0\n"),
        b.gets(message(2, b"2", attempts=2)),
        flags=NO_MEMORY_QUEUE,
    )


def mpub_quirks() -> Iterator[Case]:
    yield case(
        "MPUB delivers every message in order",
        a.asks(mpub(b"1", b"22", b"333"), OK),
        b.subscribes(3),
        b.gets(message(1, b"1"), message(2, b"22"), message(3, b"333")),
    )
    yield case("MPUB of one message is fine", a.asks(mpub(b"1"), OK), b.subscribes(1), b.gets(message(1, b"1")))
    for words, length, text in (
        ("0", 0, "invalid body size 0"),
        ("-1", -1, "invalid body size -1"),
        ("the lowest number", -(2**31), "invalid body size -2147483648"),
        ("one byte too many", 5242881, "body too big 5242881 > 5242880"),
        ("the highest number", 2**31 - 1, "body too big 2147483647 > 5242880"),
    ):
        yield refused(
            f"MPUB with a body size of {words} is refused", b"MPUB <topic>\n" + size(length), f"E_BAD_BODY MPUB {text}"
        )
    yield refused(
        "MPUB over a lower limit is refused",
        b"MPUB <topic>\n" + size(201),
        "E_BAD_BODY MPUB body too big 201 > 200",
        flags=SMALL_LIMITS,
    )
    yield case(
        "MPUB with a body size too small is taken as it comes",
        a.asks(b"MPUB <topic>\n" + size(1) + batch(b"1", b"2"), OK),
        b.subscribes(2),
        b.gets(message(1, b"1"), message(2, b"2")),
    )
    yield case(
        "MPUB with a body size too big is taken as it comes",
        a.asks(b"MPUB <topic>\n" + size(1000) + batch(b"1") + pub(b"2"), OK, OK),
        b.subscribes(2),
        b.gets(message(1, b"1"), message(2, b"2")),
    )
    yield answered(
        "MPUB may hold more than its limit when its body size lies",
        b"MPUB <topic>\n" + size(200) + batch(*[b"x" * 100] * 3),
        OK,
        flags=SMALL_LIMITS,
    )
    for words, count in (
        ("0", 0),
        ("-1", -1),
        ("one more than fits the limit", 1048576),
        ("the highest number", 2**31 - 1),
    ):
        yield refused(
            f"MPUB with a count of {words} is refused",
            b"MPUB <topic>\n" + size(100) + size(count),
            f"E_BAD_BODY MPUB invalid message count {count}",
        )
    yield answered("MPUB with as many messages as fit the limit is taken", mpub(*[b"x"] * 39), OK, flags=SMALL_LIMITS)
    yield refused(
        "MPUB with more messages than fit the limit is refused",
        b"MPUB <topic>\n" + size(200) + size(40),
        "E_BAD_BODY MPUB invalid message count 40",
        flags=SMALL_LIMITS,
    )
    yield cut_short(
        "MPUB without its body size is refused", b"MPUB <topic>\n", "E_BAD_BODY MPUB failed to read body size"
    )
    yield cut_short(
        "MPUB without its count is refused", b"MPUB <topic>\n" + size(9), "E_BAD_BODY MPUB failed to read message count"
    )
    yield cut_short(
        "MPUB cut short in its count is refused",
        b"MPUB <topic>\n" + size(9) + b"\0\0",
        "E_BAD_BODY MPUB failed to read message count",
    )
    yield cut_short(
        "MPUB without its first message is refused",
        b"MPUB <topic>\n" + size(9) + size(1),
        "E_BAD_MESSAGE MPUB failed to read message(0) body size",
    )
    yield cut_short(
        "MPUB without its second message is refused",
        b"MPUB <topic>\n" + size(9) + size(2) + sized(b"1"),
        "E_BAD_MESSAGE MPUB failed to read message(1) body size",
    )
    yield cut_short(
        "MPUB cut short in a message is refused",
        b"MPUB <topic>\n" + size(9) + size(1) + size(3) + b"ab",
        "E_BAD_MESSAGE MPUB failed to read message body",
    )
    yield refused(
        "MPUB with an empty message is refused", mpub(b""), "E_BAD_MESSAGE MPUB invalid message(0) body size 0"
    )
    yield refused(
        "MPUB names the place of the empty message",
        mpub(b"1", b"2", b""),
        "E_BAD_MESSAGE MPUB invalid message(2) body size 0",
    )
    yield refused(
        "MPUB with a message of length -1 is refused",
        b"MPUB <topic>\n" + size(9) + size(1) + size(-1),
        "E_BAD_MESSAGE MPUB invalid message(0) body size -1",
    )
    yield refused(
        "MPUB with a message too big is refused",
        b"MPUB <topic>\n" + size(2000000) + size(1) + size(1048577),
        "E_BAD_MESSAGE MPUB message too big 1048577 > 1048576",
    )
    yield refused(
        "MPUB with a message over a lower limit is refused",
        mpub(b"1", b"x" * 101),
        "E_BAD_MESSAGE MPUB message too big 101 > 100",
        flags=SMALL_LIMITS,
    )
    yield case(
        "MPUB that is refused publishes nothing",
        a.is_refused(mpub(b"1", b"2", b""), "E_BAD_MESSAGE MPUB invalid message(2) body size 0"),
        b.publishes(b"3"),
        c.subscribes(1),
        c.gets(message(1, b"3")),
    )
    yield case(
        "MPUB may come in pieces",
        a.sends(b"MPUB <topic>\n\0\0\0\x16\0", b"\0\0\2\0\0\0\5hel", b"lo\0\0\0", b"\5world"),
        a.gets(OK),
        b.subscribes(2),
        b.gets(message(1, b"hello"), message(2, b"world")),
    )


def numbers() -> Iterator[Case]:
    for words, text in (
        ("a minus", "-1"),
        ("a plus", "+1"),
        ("a point", "1.0"),
        ("a letter", "1a"),
        ("a hexadecimal prefix", "0x1"),
        ("a tab", "1\t"),
        ("an underscore", "1_0"),
    ):
        yield refused_subscriber(
            f"RDY with {words} is refused", f"RDY {text}\n".encode(), f"E_INVALID RDY could not parse count {text}"
        )
        yield refused(
            f"DPUB with {words} is refused",
            f"DPUB <topic> {text}\n".encode(),
            f"E_INVALID DPUB could not parse timeout {text}",
        )
        yield refused_subscriber(
            f"REQ with {words} is refused",
            b"REQ " + NO_SUCH_ID + f" {text}\n".encode(),
            f"E_INVALID REQ could not parse timeout {text}",
        )
    yield refused_subscriber(
        "RDY with digits of another script is refused",
        "RDY ١\n".encode(),
        "E_INVALID RDY could not parse count " + "١".encode().decode("latin-1"),
    )
    yield case(
        "RDY without a count is 1",
        b.publishes(b"1", b"2"),
        a.subscribes(),
        a.sends(b"RDY\n"),
        a.gets(message(1, b"1")),
        a.sends(b"FIN <id1>\n"),
        a.gets(message(2, b"2")),
    )
    yield case(
        "RDY with an empty count is 0",
        b.publishes(b"1"),
        a.subscribes(),
        a.sends(b"RDY \n"),
        a.is_heard(),
        c.subscribes(1),
        c.gets(message(1, b"1")),
    )
    yield case(
        "RDY with leading zeros is fine",
        b.publishes(b"1"),
        a.subscribes(),
        a.sends(b"RDY 0001\n"),
        a.gets(message(1, b"1")),
    )
    yield case("RDY at the limit is taken", a.subscribes(2500))
    yield refused_subscriber(
        "RDY over the limit is refused", b"RDY 2501\n", "E_INVALID RDY count 2501 out of range 0-2500"
    )
    yield case("RDY at a lower limit is taken", a.subscribes(5), flags=SMALL_LIMITS)
    yield refused_subscriber(
        "RDY over a lower limit is refused", b"RDY 6\n", "E_INVALID RDY count 6 out of range 0-5", flags=SMALL_LIMITS
    )
    yield refused_subscriber(
        "RDY of 2^63 reads as negative",
        b"RDY 9223372036854775808\n",
        "E_INVALID RDY count -9223372036854775808 out of range 0-2500",
    )
    yield refused_subscriber(
        "RDY of 2^64 - 1 reads as -1", b"RDY 18446744073709551615\n", "E_INVALID RDY count -1 out of range 0-2500"
    )
    yield case(
        "RDY of 2^64 + 1 reads as 1",
        b.publishes(b"1"),
        a.subscribes(),
        a.sends(b"RDY 18446744073709551617\n"),
        a.gets(message(1, b"1")),
    )
    yield answered("DPUB at the limit of delay is taken", dpub(b"3600000", b"m"), OK)
    yield refused(
        "DPUB over the limit of delay is refused",
        b"DPUB <topic> 3600001\n",
        "E_INVALID DPUB timeout 3600001 out of range 0-3600000",
    )
    yield refused(
        "DPUB over a lower limit of delay is refused",
        b"DPUB <topic> 1001\n",
        "E_INVALID DPUB timeout 1001 out of range 0-1000",
        flags=SMALL_LIMITS,
    )
    yield refused(
        "DPUB checks the delay before the body",
        b"DPUB <topic> 3600001\n" + size(-1),
        "E_INVALID DPUB timeout 3600001 out of range 0-3600000",
    )
    yield case(
        "DPUB with an empty delay is a publish", a.asks(dpub(b"", b"m"), OK), b.subscribes(1), b.gets(message(1, b"m"))
    )
    yield case(
        "DPUB with a delay of 0 is a publish", a.asks(dpub(b"0", b"m"), OK), b.subscribes(1), b.gets(message(1, b"m"))
    )
    yield refused(
        "DPUB of 2^64 - 1 is out of range",
        b"DPUB <topic> 18446744073709551615\n",
        "E_INVALID DPUB timeout 18446744073709551615 out of range 0-3600000",
    )
    yield case(
        "DPUB of 2^64 is 0", a.asks(dpub(b"18446744073709551616", b"m"), OK), b.subscribes(1), b.gets(message(1, b"m"))
    )
    yield refused(
        "DPUB whose nanoseconds are negative is out of range",
        b"DPUB <topic> 9223372036855\n",
        "E_INVALID DPUB timeout 9223372036855 out of range 0-3600000",
    )
    yield case(
        "DPUB whose nanoseconds wrap to less than a millisecond is taken",
        a.asks(dpub(b"18446744073710", b"m"), OK),
        b.subscribes(1),
        b.gets(message(1, b"m")),
        waits=True,
    )
    yield case(
        "REQ of 2^64 is 0",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> 18446744073709551616\n"),
        a.gets(message(1, b"m", attempts=2)),
    )
    yield case(
        "REQ whose nanoseconds are negative is 0",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> 9223372036855\n"),
        a.gets(message(1, b"m", attempts=2)),
    )
    yield case(
        "REQ of 2^64 - 1 is 0",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> 18446744073709551615\n"),
        a.gets(message(1, b"m", attempts=2)),
    )
    yield case(
        "REQ with an empty delay is 0",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> \n"),
        a.gets(message(1, b"m", attempts=2)),
    )


CHAPTERS = (names, publishing, mpub_quirks, numbers)
