"""SUB, RDY, FIN, REQ and TOUCH: who gets a message, when, and who may say what became of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..notation import (
    NO_SUCH_ID,
    OK,
    SMALL_LIMITS,
    SUB,
    Case,
    a,
    answered,
    b,
    c,
    case,
    dpub,
    error,
    identify,
    message,
    mpub,
    negotiate,
    negotiated,
    pub,
    refused,
    refused_subscriber,
    time_passes,
)


def sub() -> Iterator[Case]:
    few = "E_INVALID SUB insufficient number of parameters"
    yield refused("SUB without parameters is refused", b"SUB\n", few)
    yield refused("SUB without a channel is refused", b"SUB <topic>\n", few)
    yield refused("SUB counts parameters before it looks at the topic", b"SUB a$\n", few)
    yield refused(
        "SUB with a space behind the topic has an empty channel",
        b"SUB <topic> \n",
        'E_BAD_CHANNEL SUB channel name "" is not valid',
    )
    yield refused("SUB with a space alone has too few parameters", b"SUB \n", few)
    yield answered("SUB needs no IDENTIFY", SUB, OK)
    yield case(
        "nothing is delivered before RDY", b.publishes(b"m"), a.subscribes(), c.subscribes(1), c.gets(message(1, b"m"))
    )
    yield case(
        "one consumer more than the limit is refused",
        a.subscribes(),
        b.subscribes(),
        c.is_refused(SUB, "E_SUB_FAILED SUB failed consumers for <topic>:ch exceeds limit of 2"),
        flags=SMALL_LIMITS,
    )
    yield case(
        "the limit of consumers is per channel",
        a.subscribes(),
        b.subscribes(),
        c.asks(b"SUB <topic> other\n", OK),
        flags=SMALL_LIMITS,
    )
    yield case(
        "a consumer that was closed makes room",
        a.subscribes(),
        b.subscribes(),
        b.is_refused(b"XXX\n", "E_INVALID invalid command XXX"),
        c.subscribes(),
        flags=SMALL_LIMITS,
    )
    yield case(
        "an ephemeral channel of an ephemeral topic delivers",
        a.asks(b"SUB <topic>#ephemeral ch#ephemeral\n", OK),
        a.sends(b"RDY 2\n"),
        b.asks(pub(b"1", b"<topic>#ephemeral"), OK),
        a.gets(message(1, b"1")),
        b.asks(pub(b"2", b"<topic>#ephemeral"), OK),
        a.gets(message(2, b"2")),
    )
    yield case(
        "an ephemeral channel of a durable topic delivers",
        a.asks(b"SUB <topic> ch#ephemeral\n", OK),
        a.sends(b"RDY 1\n"),
        b.publishes(b"1"),
        a.gets(message(1, b"1")),
    )
    yield case(
        "a durable channel of an ephemeral topic delivers",
        a.asks(b"SUB <topic>#ephemeral ch\n", OK),
        a.sends(b"RDY 1\n"),
        b.asks(pub(b"1", b"<topic>#ephemeral"), OK),
        a.gets(message(1, b"1")),
    )
    yield case(
        "an ephemeral channel and a durable one of the same stem are two",
        a.asks(b"SUB <topic> ch#ephemeral\n", OK),
        b.subscribes(1),
        c.publishes(b"1"),
        b.gets(message(1, b"1")),
        a.sends(b"RDY 1\n"),
        a.gets(message(1, b"1")),
    )
    yield case(
        "a message reaches every channel with the same id and timestamp",
        a.asks(b"SUB <topic> one\n", OK),
        b.asks(b"SUB <topic> two\n", OK),
        c.publishes(b"m"),
        a.sends(b"RDY 1\n"),
        a.gets(message(1, b"m")),
        b.sends(b"RDY 1\n"),
        b.gets(message(1, b"m")),
    )
    yield case(
        "each channel finishes for itself",
        a.asks(b"SUB <topic> one\n", OK),
        b.asks(b"SUB <topic> two\n", OK),
        c.publishes(b"m"),
        a.sends(b"RDY 1\n"),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> 0\n"),
        a.gets(message(1, b"m", attempts=2)),
        a.sends(b"FIN <id1>\n"),
        b.sends(b"RDY 1\n"),
        b.gets(message(1, b"m")),
    )
    yield case(
        "the first channel gets what the topic kept, a later one does not",
        c.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        b.asks(b"SUB <topic> later\n", OK),
        b.sends(b"RDY 2\n"),
        c.publishes(b"2"),
        b.gets(message(2, b"2")),
    )
    yield case(
        "a channel keeps messages while nobody listens",
        a.subscribes(),
        a.is_refused(b"XXX\n", "E_INVALID invalid command XXX"),
        c.publishes(b"1", b"2"),
        b.subscribes(2),
        b.gets(message(1, b"1"), message(2, b"2")),
    )


def settling() -> Iterator[Case]:
    for word, tail in (("FIN", b""), ("REQ", b" 0"), ("TOUCH", b"")):
        command = word.encode() + b" "
        unknown = error(f"E_{word}_FAILED {word} 0123456789abcdef failed ID not in flight")
        few = f"E_INVALID {word} insufficient number of params"
        yield case(
            f"{word} of an unknown id is an error that is not fatal",
            a.subscribes(),
            a.asks(command + NO_SUCH_ID + tail + b"\n", unknown),
            a.asks(pub(b"m"), OK),
        )
        yield refused_subscriber(f"{word} without parameters is refused", word.encode() + b"\n", few)
        for words, text in (
            ("of 15 bytes", b"0123456789abcde"),
            ("of 17 bytes", b"0123456789abcdef0"),
            ("of no bytes", b""),
        ):
            yield refused_subscriber(
                f"{word} with an id {words} is refused", command + text + tail + b"\n", "E_INVALID invalid message ID"
            )
        yield case(
            f"{word} takes any 16 bytes for an id",
            a.subscribes(),
            a.asks(
                command + b"\0\xff0123456789abZ!" + tail + b"\n",
                error(f"E_{word}_FAILED {word} \0\xff0123456789abZ! failed ID not in flight"),
            ),
        )
        yield case(
            f"{word} of another client's message is an error that is not fatal",
            c.publishes(b"m"),
            a.subscribes(1),
            a.gets(message(1, b"m")),
            b.subscribes(1),
            b.asks(
                command + b"<id1>" + tail + b"\n",
                error(f"E_{word}_FAILED {word} <id1> failed client does not own message"),
            ),
            a.sends(b"FIN <id1>\n"),
        )
        yield case(
            f"{word} of a finished message finds nothing",
            b.publishes(b"m"),
            a.subscribes(1),
            a.gets(message(1, b"m")),
            a.sends(b"FIN <id1>\n"),
            a.asks(command + b"<id1>" + tail + b"\n", error(f"E_{word}_FAILED {word} <id1> failed ID not in flight")),
        )
        yield case(
            f"{word} of a deferred message finds nothing",
            b.publishes(b"m"),
            a.subscribes(1),
            a.gets(message(1, b"m")),
            a.sends(b"REQ <id1> 3600000\n"),
            a.asks(command + b"<id1>" + tail + b"\n", error(f"E_{word}_FAILED {word} <id1> failed ID not in flight")),
        )
        yield case(
            f"{word} on another channel finds nothing",
            a.asks(b"SUB <topic> one\n", OK),
            b.asks(b"SUB <topic> two\n", OK),
            c.publishes(b"m"),
            a.sends(b"RDY 1\n"),
            a.gets(message(1, b"m")),
            b.asks(command + b"<id1>" + tail + b"\n", error(f"E_{word}_FAILED {word} <id1> failed ID not in flight")),
        )
    yield refused_subscriber(
        "REQ without a delay is refused", b"REQ " + NO_SUCH_ID + b"\n", "E_INVALID REQ insufficient number of params"
    )
    yield refused_subscriber("REQ checks the id before the delay", b"REQ short x\n", "E_INVALID invalid message ID")
    yield case(
        "an id in upper case is another id",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.asks(b"FIN ABCDEFABCDEFABCD\n", error("E_FIN_FAILED FIN ABCDEFABCDEFABCD failed ID not in flight")),
    )
    yield case(
        "RDY is a window",
        b.publishes(b"1", b"2", b"3"),
        a.subscribes(2),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.is_heard(),
        a.sends(b"FIN <id1>\n"),
        a.gets(message(3, b"3")),
    )
    yield case(
        "REQ frees a place in the window",
        b.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"REQ <id1> 0\n"),
        a.gets(message(1, b"1", attempts=2)),
    )
    yield case(
        "a deferred REQ frees a place in the window",
        b.publishes(b"1", b"2"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"REQ <id1> 3600000\n"),
        a.gets(message(2, b"2")),
    )
    yield case(
        "TOUCH frees no place in the window",
        b.publishes(b"1", b"2"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"TOUCH <id1>\n"),
        a.is_heard(),
        c.subscribes(1),
        c.gets(message(2, b"2")),
    )
    yield case(
        "RDY 0 stops the messages",
        b.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"RDY 0\n", b"FIN <id1>\n"),
        a.is_heard(),
        b.publishes(b"2"),
        c.subscribes(1),
        c.gets(message(2, b"2")),
    )
    yield case(
        "a wider window lets more messages through",
        b.publishes(b"1", b"2"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"RDY 2\n"),
        a.gets(message(2, b"2")),
    )
    yield case(
        "a narrower window waits until it has room",
        b.publishes(b"1", b"2", b"3"),
        a.subscribes(2),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.sends(b"RDY 1\n", b"FIN <id1>\n"),
        a.is_heard(),
        a.sends(b"FIN <id2>\n"),
        a.gets(message(3, b"3")),
    )
    yield case(
        "the same RDY again changes nothing",
        b.publishes(b"1", b"2"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"RDY 1\n"),
        a.is_heard(),
        c.subscribes(1),
        c.gets(message(2, b"2")),
    )
    yield case(
        "attempts count the deliveries",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        *(
            step
            for attempt in range(2, 6)
            for step in (a.sends(b"REQ <id1> 0\n"), a.gets(message(1, b"m", attempts=attempt)))
        ),
    )
    yield case(
        "messages put back come again in the order they were put back",
        b.publishes(b"1", b"2"),
        a.subscribes(2),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.sends(b"RDY 0\n", b"REQ <id2> 0\n", b"REQ <id1> 0\n", b"RDY 2\n"),
        a.gets(message(2, b"2", attempts=2), message(1, b"1", attempts=2)),
    )
    yield case(
        "a message put back may go to another client",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"RDY 0\n", b"REQ <id1> 0\n"),
        c.subscribes(1),
        c.gets(message(1, b"m", attempts=2)),
    )
    yield case(
        "the former owner of a message no longer owns it",
        b.publishes(b"m"),
        a.subscribes(1),
        a.gets(message(1, b"m")),
        a.sends(b"RDY 0\n", b"REQ <id1> 0\n"),
        c.subscribes(1),
        c.gets(message(1, b"m", attempts=2)),
        a.asks(b"FIN <id1>\n", error("E_FIN_FAILED FIN <id1> failed client does not own message")),
        c.sends(b"FIN <id1>\n"),
        c.is_heard(),
        a.asks(b"FIN <id1>\n", error("E_FIN_FAILED FIN <id1> failed ID not in flight")),
    )
    yield case(
        "FIN does not care for the order of delivery",
        b.publishes(b"1", b"2", b"3"),
        a.subscribes(3),
        a.gets(message(1, b"1"), message(2, b"2"), message(3, b"3")),
        a.sends(b"FIN <id3>\nFIN <id1>\nFIN <id2>\n"),
        a.asks(b"FIN <id2>\n", error("E_FIN_FAILED FIN <id2> failed ID not in flight")),
    )
    yield case(
        "a failed FIN among good ones stops nothing",
        b.publishes(b"1", b"2"),
        a.subscribes(2),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.asks(b"FIN <id1>\nFIN <id1>\nFIN <id2>\n", error("E_FIN_FAILED FIN <id1> failed ID not in flight")),
        b.publishes(b"3"),
        a.gets(message(3, b"3")),
    )
    yield case(
        "a failed FIN frees no place in the window",
        b.publishes(b"1", b"2"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.asks(b"FIN " + NO_SUCH_ID + b"\n", error("E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")),
        c.subscribes(1),
        c.gets(message(2, b"2")),
    )
    yield case(
        "sample_rate 99 lets every message through",
        b.asks(mpub(*[b"m"] * 200), OK),
        a.asks(identify(sample_rate=99), OK),
        a.subscribes(200),
        a.gets(*(message(number, b"m") for number in range(1, 201))),
    )
    yield case(
        "a message passes without an output buffer",
        a.asks(identify(output_buffer_size=-1), OK),
        a.subscribes(5),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
    )
    yield case(
        "a message larger than the output buffer passes",
        a.asks(identify(output_buffer_size=64), OK),
        a.subscribes(5),
        b.publishes(b"m" * 150),
        a.gets(message(1, b"m" * 150)),
    )
    yield case(
        "a full window is sent although the flush timer is off",
        a.asks(identify(output_buffer_timeout=-1), OK),
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
    )
    yield case(
        "the longest flush timer does not hold back a full window",
        a.asks(identify(output_buffer_timeout=30000, output_buffer_size=65536), OK),
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
    )
    yield case(
        "a heartbeat flushes what has no flush timer",
        a.asks(identify(output_buffer_timeout=-1, heartbeat_interval=1000), OK),
        a.subscribes(5),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
        waits=True,
    )


def due_times() -> Iterator[Case]:
    one_second = [*a.asks(identify(msg_timeout=1000), OK)]
    yield case(
        "a message that is not finished in time comes again",
        one_second,
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m"), message(1, b"m", attempts=2), message(1, b"m", attempts=3)),
        a.sends(b"FIN <id1>\n"),
        waits=True,
    )
    yield case(
        "the daemon's own timeout holds without IDENTIFY",
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m"), message(1, b"m", attempts=2)),
        a.sends(b"FIN <id1>\n"),
        flags=SMALL_LIMITS,
        waits=True,
    )
    yield case(
        "after a timeout the message belongs to whoever got it last",
        one_second,
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m")),
        a.sends(b"RDY 0\n"),
        c.subscribes(1),
        c.gets(message(1, b"m", attempts=2)),
        a.asks(b"FIN <id1>\n", error("E_FIN_FAILED FIN <id1> failed client does not own message")),
        a.asks(b"TOUCH <id1>\n", error("E_TOUCH_FAILED TOUCH <id1> failed client does not own message")),
        a.asks(b"REQ <id1> 0\n", error("E_REQ_FAILED REQ <id1> failed client does not own message")),
        c.sends(b"FIN <id1>\n"),
        waits=True,
    )
    yield case(
        "messages in flight of a lost client wait for their timeout",
        a.asks(identify(msg_timeout=3000), OK),
        a.subscribes(1),
        b.publishes(b"1"),
        a.gets(message(1, b"1")),
        a.hangs_up(),
        b.publishes(b"2"),
        c.subscribes(2),
        c.gets(message(2, b"2"), message(1, b"1", attempts=2)),
        waits=True,
    )
    yield case(
        "messages in flight of a refused client wait for their timeout",
        a.asks(identify(msg_timeout=3000), OK),
        a.subscribes(1),
        b.publishes(b"1"),
        a.gets(message(1, b"1")),
        a.is_refused(b"XXX\n", "E_INVALID invalid command XXX"),
        b.publishes(b"2"),
        c.subscribes(2),
        c.gets(message(2, b"2"), message(1, b"1", attempts=2)),
        waits=True,
    )
    yield case(
        "a touched message times out after one that was not",
        one_second,
        a.subscribes(2),
        b.publishes(b"1", b"2"),
        a.gets(message(1, b"1"), message(2, b"2")),
        a.sends(b"RDY 0\n"),
        time_passes(0.4),
        a.sends(b"TOUCH <id1>\n"),
        c.subscribes(2),
        c.gets(message(2, b"2", attempts=2), message(1, b"1", attempts=2)),
        waits=True,
    )
    yield case(
        "TOUCH does not carry a message beyond the longest timeout",
        # In seconds: the first message is due at 4, the second at 6.5. Touched at about 3.1, the first would move
        # behind the second, to 7.1, if it were not held at 6.
        a.subscribes(1),
        b.publishes(b"1"),
        a.gets(message(1, b"1")),
        time_passes(0.5),
        c.asks(identify(msg_timeout=6000), OK),
        c.subscribes(1),
        b.publishes(b"2"),
        c.gets(message(2, b"2")),
        time_passes(2.6),
        a.sends(b"TOUCH <id1>\n", b"RDY 0\n"),
        c.sends(b"RDY 3\n"),
        c.gets(message(1, b"1", attempts=2), message(2, b"2", attempts=2)),
        c.sends(b"FIN <id1>\n", b"FIN <id2>\n"),
        flags=SMALL_LIMITS,
        waits=True,
    )
    yield case(
        "the first IDENTIFY sets the timeout of deliveries",
        one_second,
        a.asks(negotiate(msg_timeout=900000), negotiated(msg_timeout=900000)),
        a.subscribes(1),
        b.publishes(b"m"),
        a.gets(message(1, b"m"), message(1, b"m", attempts=2)),
        waits=True,
    )
    yield case(
        "a deferred message comes after one that is not",
        a.subscribes(2),
        b.asks(dpub(b"2000", b"1"), OK),
        b.publishes(b"2"),
        a.gets(message(1, b"2"), message(2, b"1")),
        waits=True,
    )
    yield case(
        "deferred messages come in the order they are due",
        a.subscribes(3),
        b.asks(dpub(b"2000", b"1"), OK),
        b.asks(dpub(b"1400", b"2"), OK),
        b.asks(dpub(b"800", b"3"), OK),
        a.gets(message(1, b"3"), message(2, b"2"), message(3, b"1")),
        waits=True,
    )
    yield case(
        "a deferred message has its attempts to come",
        a.subscribes(1),
        b.asks(dpub(b"200", b"m"), OK),
        a.gets(message(1, b"m")),
        a.sends(b"REQ <id1> 200\n"),
        a.gets(message(1, b"m", attempts=2)),
        waits=True,
    )
    yield case(
        "a deferred message reaches every channel",
        a.asks(b"SUB <topic> one\n", OK),
        b.asks(b"SUB <topic> two\n", OK),
        a.sends(b"RDY 1\n"),
        b.sends(b"RDY 1\n"),
        c.asks(dpub(b"200", b"m"), OK),
        a.gets(message(1, b"m")),
        b.gets(message(1, b"m")),
        waits=True,
    )
    yield case(
        "a message put back for later comes after one that waits",
        b.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"REQ <id1> 2000\n"),
        b.publishes(b"2"),
        a.gets(message(2, b"2")),
        a.sends(b"FIN <id2>\n"),
        a.gets(message(1, b"1", attempts=2)),
        waits=True,
    )
    yield case(
        "REQ beyond the limit is lowered to it",
        b.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"REQ <id1> 3600000\n"),
        a.gets(message(1, b"1", attempts=2)),
        a.sends(b"FIN <id1>\n"),
        flags=SMALL_LIMITS,
        waits=True,
    )
    yield case(
        "a message put back for later may go to another client",
        b.publishes(b"1"),
        a.subscribes(1),
        a.gets(message(1, b"1")),
        a.sends(b"RDY 0\n", b"REQ <id1> 300\n"),
        c.subscribes(1),
        c.gets(message(1, b"1", attempts=2)),
        waits=True,
    )


CHAPTERS = (sub, settling, due_times)
