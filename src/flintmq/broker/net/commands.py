"""The commands of a client: each checks everything, then acts.

They are functions that act for a session: they and the session alone assign its attributes. A command gets the words of
its line and where its body begins, and returns where the next command stands; ``MORE`` if its body is not all there,
``AGAIN`` if it has to wait and is run again. A command is run again from its beginning, so checks come before any
effect. FIN, REQ, RDY and an authorized PUB never wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.delivery.commit import SLICED_FROM, Commit, slices
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.net.identity import FIELDS
from flintmq.broker.storage.keys import content_of
from flintmq.errors import KeyContentError, ProtocolError, PublishError
from flintmq.kernel import PARSE_BAD, PARSE_MORE, BatchParser
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import (
    CLOSE_WAIT_FRAME,
    FRAME_RESPONSE,
    NSQ_VERSION,
    OK_FRAME,
    decode_identify,
    encode_frame,
    go_quote,
    parse_base10,
    valid_key,
    valid_name,
)

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.net.session import Session

__all__ = [
    "AGAIN",
    "BEFORE_TLS",
    "CLOSING",
    "COMMANDS",
    "INIT",
    "MORE",
    "SUBSCRIBED",
    "publish_again",
    "publish_to",
    "run",
    "take_lane",
]

logger = logging.getLogger(__name__)

_i32 = Struct(">i")
_MS = 1_000_000

#: A batch whose body size lies may be twice the limit, and what one read brings.
RECEIVE_SLACK = 256 << 10

#: Bytes of the body of IDENTIFY or AUTH, which anybody may send and which is held until it is complete.
LONGEST_BODY = 64 << 10

#: The states of a session.
INIT, SUBSCRIBED, CLOSING = 0, 3, 4

#: A command's body is not all there; or it has to wait for something else and is run again then.
MORE, AGAIN = -1, -2


def run(session: Session, line: bytes, data: bytearray, at: int, stop: int) -> int:
    """Run one command; where the next one starts."""
    params = (line[:-1] if line.endswith(b"\r") else line).split(b" ")
    handler = session.allowed.get(params[0])
    if handler is None:
        if session.allowed is BEFORE_TLS:
            raise ProtocolError("E_INVALID", f"cannot {_text(params[0])} in current state (TLS required)")
        raise ProtocolError("E_INVALID", f"invalid command {_text(params[0])}")
    after = handler(session, params, data, at, stop)
    if after >= 0 and params[0] in (b"PUB", b"MPUB") and len(params) == 2:
        # A producer says the same line again and again: it need not be taken apart each time. The topic is
        # remembered here and nowhere else: a DPUB to another one must not come between a line and its topic.
        # Where an authorization expires, a timer ends all that is short.
        topic = session.broker.topics.get(params[1].decode("ascii"))
        if topic is not None and session.may_publish and line == b" ".join(params):
            session.broker.publish_lines[line] = topic
        publish_to(session, line, topic)
    return after


def publish_to(session: Session, line: bytes, topic: Topic | None) -> None:
    """The session publishes to this topic from here on, with this line."""
    session.publish_line, session.publish_topic = line, topic
    if session.channel is None:
        # One that has a topic for each message has no use for a lane.
        session.lane = None
        if session.steady:
            session.steady = False
            take_lane(session, line)


def take_lane(session: Session, line: bytes) -> None:
    """The next publish is probably like the last one: put the session into the lane for that, if there is one."""
    topic = session.publish_topic
    if session.fd >= 0 and session.channel is None and topic is not None and line[-1] != 13:
        session.lane = session.broker.lane(topic, "PUB" if line[0] == 80 else "MPUB")


def publish_again(session: Session, line: bytes, data: bytearray, at: int, stop: int) -> int:
    topic = session.publish_topic
    if topic is None or topic.exiting:
        session.publish_line = b""
        return run(session, line, data, at, stop)
    if line[0] == 80:
        return _pub_body(session, topic, data, at, stop, "PUB", 0)
    return _mpub_body(session, topic, data, at, stop)


def _size(data: bytearray, at: int, stop: int) -> int | None:
    return int(_i32.unpack_from(data, at)[0]) if stop - at >= 4 else None


def _body(session: Session, data: bytearray, at: int, stop: int, verb: str) -> slice | None:
    """Where the body of IDENTIFY or AUTH is, None if it is not all there."""
    limit = session.broker.options.max_body_size
    size = _size(data, at, stop)
    if size is None:
        session.lacks("E_BAD_BODY", f"{verb} failed to read body size")
        return None
    if size > limit:
        raise ProtocolError("E_BAD_BODY", f"{verb} body too big {size} > {limit}")
    if size > LONGEST_BODY:
        raise ProtocolError("E_BAD_BODY", f"{verb} body too big {size} > {LONGEST_BODY}")
    if size <= 0:
        raise ProtocolError("E_BAD_BODY", f"{verb} invalid body size {size}")
    if stop - at - 4 < size:
        session.lacks("E_BAD_BODY", f"{verb} failed to read body")
        return None
    return slice(at + 4, at + 4 + size)


def _identify(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if session.state != INIT:
        raise ProtocolError("E_INVALID", "cannot IDENTIFY in current state")
    body = _body(session, data, at, stop, "IDENTIFY")
    if body is None:
        return MORE
    if session.answers:
        return session.wait(session.when_answered)
    # Not copied once more: it may be large.
    fields = decode_identify(str(memoryview(data)[body], "utf-8", "replace"), FIELDS)
    _apply_identify(session, fields)
    options = session.broker.options
    if not fields["feature_negotiation"]:
        session.answer(OK_FRAME)
        return int(body.stop)
    deflate = options.deflate and fields["deflate"]
    snappy = options.snappy and fields["snappy"]
    if deflate and snappy:
        raise ProtocolError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    tls = session.broker.listeners.tls if fields["tls_v1"] else None
    if tls is not None and session.tls_info is not None:
        # NSQ would begin a second handshake beside the first, in the clear.
        raise ProtocolError("E_IDENTIFY_FAILED", "IDENTIFY failed the connection is encrypted already")
    level = min(6, options.max_deflate_level)
    if deflate and fields["deflate_level"] > 0:
        level = min(fields["deflate_level"], options.max_deflate_level)
    response = {
        "max_rdy_count": options.max_rdy_count,
        "version": NSQ_VERSION,
        "max_msg_timeout": options.max_msg_timeout // _MS,
        "msg_timeout": session.msg_timeout // _MS,
        "tls_v1": tls is not None,
        "deflate": deflate,
        "deflate_level": level,
        "max_deflate_level": options.max_deflate_level,
        "snappy": snappy,
        "sample_rate": fields["sample_rate"],
        "auth_required": bool(options.auth_http_addresses),
        "output_buffer_size": session.identity.output_buffer_size,
        "output_buffer_timeout": session.identity.output_buffer_timeout,
        "topology_region": options.topology_region,
        "topology_zone": options.topology_zone,
    }
    if session.identity.keyed:
        response["flintmq"] = session.broker.about() | {"http_port": session.broker.http_port}
    session.answer(encode_frame(FRAME_RESPONSE, msgspec.json.encode(response)))
    if tls is None and not deflate and not snappy:
        return int(body.stop)
    session.start_upgrade(tls, Snappy() if snappy else Deflate(level) if deflate else None)
    # What the client sent behind IDENTIFY is dropped, as in NSQ: it must wait for the answer.
    return stop


def _apply_identify(session: Session, fields: dict[str, Any]) -> None:
    options = session.broker.options
    session.identity.take(fields, options)
    if fields["heartbeat_interval"]:
        session.heartbeat.interval = max(fields["heartbeat_interval"], 0)
    if fields["msg_timeout"]:
        session.msg_timeout = fields["msg_timeout"] * _MS
    if not session.identified:
        # As in NSQ only the first IDENTIFY reaches deliveries and the heartbeat timer.
        session.identified = True
        session.deliver_timeout = session.msg_timeout
        session.identity.own_deliver_timeout = session.identity.own_timeout
        session.sample_rate = fields["sample_rate"]
        if session.broker.topology_aware:
            same_region = session.identity.topology_region == options.topology_region
            same_zone = session.identity.topology_zone == options.topology_zone
            session.locality = 0 if same_zone else 1 if same_region else 2
            # A node that does not say where it is prefers nobody, though it counts as NSQ does.
            if same_zone and options.topology_zone:
                session.nearness = 0
            elif same_region and options.topology_region:
                session.nearness = 1
        session.heartbeat.start()
    else:
        session.heartbeat.set_timer()


def _auth(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if session.state != INIT:
        raise ProtocolError("E_INVALID", "cannot AUTH in current state")
    if len(params) != 1:
        raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
    body = _body(session, data, at, stop, "AUTH")
    if body is None:
        return MORE
    authorization = session.authorization
    if authorization is None:
        raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
    if authorization.grant is not None:
        raise ProtocolError("E_INVALID", "AUTH already set")
    if session.answers:
        return session.wait(session.when_answered)
    secret = bytes(data[body])
    grant = authorization.ask(secret)
    if grant is None:
        return AGAIN
    if not grant.count:
        raise ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")
    authorization.take(grant, secret)
    session.answer(encode_frame(FRAME_RESPONSE, grant.response()))
    return int(body.stop)


def _must_ask(session: Session, verb: str, topic: str, channel: str = "") -> bool:
    """May the client do this? ProtocolError if not; True if that has to be asked first, and the command waits."""
    return session.authorization is not None and session.authorization.must_ask(verb, topic, channel)


def _topic(session: Session, name: str, verb: str) -> Topic:
    try:
        return session.broker.topic_for_client(name)
    except PublishError as exc:
        raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc


def _sub(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if session.state != INIT:
        raise ProtocolError("E_INVALID", "cannot SUB in current state")
    if session.heartbeat.interval <= 0:
        raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(params) < 3:
        raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "SUB topic")
    channel_name = _name(params[2], "E_BAD_CHANNEL", "SUB channel")
    if _must_ask(session, "SUB", topic_name, channel_name):
        return AGAIN
    topic = _topic(session, topic_name, "SUB")
    if topic.exiting:
        raise ProtocolError("E_SUB_FAILED", "SUB failed exiting")
    try:
        channel, position = session.broker.channel_for_client(topic, channel_name)
    except PublishError as exc:
        raise ProtocolError("E_SUB_FAILED", f"SUB failed {exc}") from exc
    limit = session.broker.options.max_channel_consumers
    if limit and len(channel.sessions) >= limit:
        text = f"SUB failed consumers for {topic_name}:{channel_name} exceeds limit of {limit}"
        raise ProtocolError("E_SUB_FAILED", text)
    channel.add(session)
    session.channel = channel
    session.state = SUBSCRIBED
    session.lane = session.broker.finish_lane(channel) if session.fd >= 0 else None
    if position and topic.settings.durability == "fsync":
        # The channel must be on the device before the client may count on it.
        commit = Commit()
        session.answer_when(commit, "SUB")
        session.broker.journal.when_synced(position, commit.resolve)
    else:
        session.broker.journal.flush()
        session.answer(OK_FRAME)
    return at


def _pub(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if len(params) < 2:
        raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
    name = _name(params[1], "E_BAD_TOPIC", "PUB topic")
    return _pub_body(session, name, data, at, stop, "PUB", 0, _key(session, params, 2))


def _dpub(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if len(params) < 3:
        raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
    name = _name(params[1], "E_BAD_TOPIC", "DPUB topic")
    try:
        delay = parse_base10(params[2])
    except ValueError:
        raise ProtocolError("E_INVALID", f"DPUB could not parse timeout {_text(params[2])}") from None
    topic = session.broker.topics.get(name)
    settings = topic.settings if topic is not None else session.broker.settings.topic(name)
    if not 0 <= _signed_ns(delay) <= settings.max_defer:
        raise ProtocolError("E_INVALID", f"DPUB timeout {delay} out of range 0-{settings.max_defer // _MS}")
    return _pub_body(session, name, data, at, stop, "DPUB", _signed_ns(delay), _key(session, params, 3))


def _key(session: Session, params: list[bytes], index: int) -> bytes:
    """The key of a publish; empty without one. NSQ ignores words that it does not ask for."""
    if len(params) <= index or not session.identity.keyed:
        return b""
    key = b" ".join(params[index:])
    if not valid_key(key):
        text = f"{_text(params[0])} bad key {_text(go_quote(key[:128]))}: 1 to 128 printable characters, no space"
        raise ProtocolError("E_INVALID", text)
    return key


def _pub_body(
    session: Session, target: Topic | str, data: bytearray, at: int, stop: int, verb: str, delay: int, key: bytes = b""
) -> int:
    limit = session.broker.options.max_msg_size
    if stop - at < 4:
        return session.lacks("E_BAD_MESSAGE", f"{verb} failed to read message body size")
    size = int(_i32.unpack_from(data, at)[0])
    if size <= 0:
        raise ProtocolError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}")
    if size > limit:
        raise ProtocolError("E_BAD_MESSAGE", f"{verb} message too big {size} > {limit}")
    after = at + 4 + size
    # Before the body is there, unlike NSQ: a client without the right must not have us hold it.
    if isinstance(target, str) and _must_ask(session, verb, target):
        return AGAIN
    if after > stop:
        return session.lacks("E_BAD_MESSAGE", f"{verb} failed to read message body")
    if isinstance(target, str):
        target = _topic(session, target, verb)
    if session.broker.store.congested or target.busy:
        return session.wait(target.when_free if target.busy else session.broker.turns.when_relieved)
    try:
        if key:
            publish = partial(_publish, target, data, at, after, 1, delay)
            commit = _once(session, target, key, 1, publish, content_of(memoryview(data)[at:after]))
        else:
            commit = target.publish(data, at, after, 1, delay=delay)
            _count(session, target, 1)
    except KeyContentError as exc:
        # Fatal, as every refused publish is: a client expects that the connection ends with it.
        raise ProtocolError(exc.code, str(exc)) from exc
    except PublishError as exc:
        raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc
    session.answer_when(commit, verb)
    return after


def _once(
    session: Session, topic: Topic, key: bytes, count: int, publish: Callable[[bytes], Commit | None], content: int
) -> Commit | None:
    commit, is_repeat = topic.once(key, publish, content)
    if not is_repeat:
        _count(session, topic, count)
    return commit


def _mpub(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if len(params) < 2:
        raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
    # NSQ says the code twice here, and clients know it so.
    name = _name(params[1], "E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic")
    key = _key(session, params, 2)
    if _must_ask(session, "MPUB", name):
        return AGAIN
    return _mpub_body(session, _topic(session, name, "MPUB"), data, at, stop, key)


def _mpub_body(session: Session, topic: Topic, data: bytearray, at: int, stop: int, key: bytes = b"") -> int:
    """``[body size][count]{[size][body]}``: the sizes inside count, the body size is only held to its limit."""
    options = session.broker.options
    size = _size(data, at, stop)
    if size is None:
        return session.lacks("E_BAD_BODY", "MPUB failed to read body size")
    if size <= 0:
        raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}")
    if size > options.max_body_size:
        raise ProtocolError("E_BAD_BODY", f"MPUB body too big {size} > {options.max_body_size}")
    count = _size(data, at + 4, stop)
    if count is None:
        return session.lacks("E_BAD_BODY", "MPUB failed to read message count")
    if not 0 < count <= (options.max_body_size - 4) // 5:
        raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {count}")
    first = at + 8
    passed, index = session.missing.parsed if session.missing is not None else (0, 0)
    batch = BatchParser(first + passed)
    batch.index = index
    status = batch.run(data, stop, count, options.max_msg_size)
    read = batch.pos - at - 4
    if max(read, stop - at if status == PARSE_MORE else 0) > 2 * options.max_body_size + RECEIVE_SLACK:
        # NSQ would read on as long as messages come; here memory has a limit.
        raise ProtocolError("E_BAD_BODY", f"MPUB body too big {read} > {options.max_body_size}")
    if status == PARSE_MORE:
        text = "message body" if stop - batch.pos >= 4 else f"message({batch.index}) body size"
        parsed = (batch.pos - first, batch.index)
        return session.lacks("E_BAD_MESSAGE", f"MPUB failed to read {text}", parsed)
    if status == PARSE_BAD:
        if batch.size <= 0:
            text = f"MPUB invalid message({batch.index}) body size {batch.size}"
        else:
            text = f"MPUB message too big {batch.size} > {options.max_msg_size}"
        raise ProtocolError("E_BAD_MESSAGE", text)
    if session.broker.store.congested or topic.busy:
        return session.wait(topic.when_free if topic.busy else session.broker.turns.when_relieved)
    try:
        if key:
            publish = partial(_publish, topic, data, first, batch.pos, count, 0)
            commit = _once(session, topic, key, count, publish, content_of(memoryview(data)[first : batch.pos]))
        else:
            _count(session, topic, count)
            commit = _publish(topic, data, first, batch.pos, count, 0, b"")
    except KeyContentError as exc:
        raise ProtocolError(exc.code, str(exc)) from exc
    except PublishError as exc:
        raise ProtocolError("E_MPUB_FAILED", f"MPUB failed {exc}") from exc
    session.answer_when(commit, "MPUB")
    return batch.pos


def _count(session: Session, topic: Topic, count: int) -> None:
    counts = session.publish_counts
    counts[topic.name] = counts.get(topic.name, 0) + count


def _rdy(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if session.state == CLOSING:
        return at
    if session.state != SUBSCRIBED or session.channel is None:
        raise ProtocolError("E_INVALID", "cannot RDY in current state")
    count = 1
    if len(params) > 1:
        try:
            count = parse_base10(params[1])
        except ValueError:
            raise ProtocolError("E_INVALID", f"RDY could not parse count {_text(params[1])}") from None
    limit = session.broker.options.max_rdy_count
    # Go reads it into a signed number.
    count = count - (1 << 64) if count >= 1 << 63 else count
    if not 0 <= count <= limit:
        raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{limit}")
    if session.answers and (not session.ready_count or session.readies):
        # Messages come after the answer to SUB, which may still wait for a commit or a sync; and the last RDY counts.
        session.answers.append(count)
        session.readies += 1
    else:
        make_ready(session, count)
    return at


def make_ready(session: Session, count: int) -> None:
    """Let a RDY take effect."""
    if session.state == SUBSCRIBED and session.channel is not None:
        session.ready_count = count
        session.channel.wake(session)


def _message(session: Session, params: list[bytes], verb: str, least: int) -> tuple[Channel, int]:
    """The channel and the seq that FIN, REQ or TOUCH speak of; -1 for an id that no message here can have."""
    if session.state not in (SUBSCRIBED, CLOSING) or session.channel is None:
        raise ProtocolError("E_INVALID", f"cannot {verb} in current state")
    if len(params) < least:
        raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
    if len(params[1]) != 16:
        raise ProtocolError("E_INVALID", "invalid message ID")
    return session.channel, session.channel.topic.ids.seq(params[1])


def _unknown(session: Session, params: list[bytes], verb: str) -> ProtocolError:
    return ProtocolError(f"E_{verb}_FAILED", f"{verb} {_text(params[1])} failed ID not in flight", fatal=False)


def _fin(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    channel, seq = _message(session, params, "FIN", 2)
    if seq < 0:
        raise _unknown(session, params, "FIN")
    channel.finish(session, seq)
    return at


def _req(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    channel, seq = _message(session, params, "REQ", 3)
    try:
        delay = _signed_ns(parse_base10(params[2]))
    except ValueError:
        raise ProtocolError("E_INVALID", f"REQ could not parse timeout {_text(params[2])}") from None
    longest = channel.settings.max_defer
    if not 0 <= delay <= longest:
        logger.info("client(%s): REQ timeout %d out of range 0-%d, clamped", session.remote_address, delay, longest)
        delay = min(max(delay, 0), longest)
    if seq < 0:
        raise _unknown(session, params, "REQ")
    channel.requeue(session, seq, delay)
    return at


def _touch(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    channel, seq = _message(session, params, "TOUCH", 2)
    if seq < 0:
        raise _unknown(session, params, "TOUCH")
    channel.touch(session, seq)
    return at


def _cls(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    if session.state != SUBSCRIBED:
        raise ProtocolError("E_INVALID", "cannot CLS in current state")
    session.ready_count = 0
    session.state = CLOSING
    session.answer(CLOSE_WAIT_FRAME)
    return at


def _nop(session: Session, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
    return at


def _publish(topic: Topic, data: bytearray, pos: int, stop: int, count: int, delay: int, extra: bytes) -> Commit | None:
    """Append records, very many in slices."""
    if count > SLICED_FROM:
        batch = data[pos:stop]
        return topic.publish_slices(slices(batch, 0, len(batch), count), extra)
    return topic.publish(data, pos, stop, count, delay=delay, extra=extra)


_Handler = Callable[["Session", list[bytes], bytearray, int, int], int]
COMMANDS: dict[bytes, _Handler] = {
    b"IDENTIFY": _identify,
    b"AUTH": _auth,
    b"SUB": _sub,
    b"PUB": _pub,
    b"MPUB": _mpub,
    b"DPUB": _dpub,
    b"RDY": _rdy,
    b"FIN": _fin,
    b"REQ": _req,
    b"TOUCH": _touch,
    b"CLS": _cls,
    b"NOP": _nop,
}
BEFORE_TLS: dict[bytes, _Handler] = {b"IDENTIFY": _identify}


def _text(data: bytes) -> str:
    """Bytes of a client inside an error text: they go back as they came."""
    return data.decode("utf-8", "surrogateescape")


def _name(data: bytes, code: str, what: str) -> str:
    if not valid_name(data):
        raise ProtocolError(code, f"{what} name {_text(go_quote(data))} is not valid")
    return data.decode("ascii")


def _signed_ns(milliseconds: int) -> int:
    """Milliseconds as nanoseconds in 64 signed bits: very large ones wrap, as in Go."""
    value = (milliseconds * _MS) & 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >= 1 << 63 else value
