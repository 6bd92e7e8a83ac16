"""The commands of a client: each checks everything, then acts.

``Commands`` is a Session that knows what the words mean. A command gets the words of its line and where its body
begins, and returns where the next command stands; ``MORE`` if its body is not all there, ``AGAIN`` if it has to wait
and is run again. A command is run again from its beginning, so checks come before any effect. FIN, REQ, RDY and an
authorized PUB never wait.
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
from flintmq.broker.net.session import AGAIN, CLOSING, INIT, MORE, RECEIVE_SLACK, SUBSCRIBED, Session
from flintmq.broker.storage.keys import content_of
from flintmq.errors import AuthError, KeyContentError, ProtocolError, PublishError
from flintmq.kernel import SCAN_BAD, SCAN_MORE, Scan
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import (
    CLOSE_WAIT_FRAME,
    FRAME_ERROR,
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
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.net.auth import Grant

__all__ = ["Commands"]

logger = logging.getLogger(__name__)

_i32 = Struct(">i")
_MS = 1_000_000

_IDENTIFY_FIELDS: dict[str, tuple[str, Any]] = {
    "client_id": ("string", ""),
    "hostname": ("string", ""),
    "user_agent": ("string", ""),
    "feature_negotiation": ("bool", False),
    "heartbeat_interval": ("int", 0),
    "output_buffer_timeout": ("int", 0),
    "output_buffer_size": ("int", 0),
    "sample_rate": ("int32", 0),
    "msg_timeout": ("int", 0),
    "tls_v1": ("bool", False),
    "deflate": ("bool", False),
    "deflate_level": ("int", 0),
    "snappy": ("bool", False),
    "topology_region": ("string", ""),
    "topology_zone": ("string", ""),
    "flintmq": ("bool", False),
}


class Commands(Session):
    """One client connection with all its commands."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        # Before TLS, where it is required, IDENTIFY is the only command.
        self._commands = _COMMANDS if broker.options.tls_required == "false" else _BEFORE_TLS

    def _allow_all(self) -> None:
        self._commands = _COMMANDS

    def _command(self, line: bytes, data: bytearray, at: int, stop: int) -> int:
        """Run one command; where the next one starts."""
        params = (line[:-1] if line.endswith(b"\r") else line).split(b" ")
        handler = self._commands.get(params[0])
        if handler is None:
            if self._commands is _BEFORE_TLS:
                raise ProtocolError("E_INVALID", f"cannot {_text(params[0])} in current state (TLS required)")
            raise ProtocolError("E_INVALID", f"invalid command {_text(params[0])}")
        after = handler(self, params, data, at, stop)
        if after >= 0 and params[0] in (b"PUB", b"MPUB") and len(params) == 2:
            # A producer says the same line again and again: it need not be taken apart each time. The topic is
            # remembered here and nowhere else: a DPUB to another one must not come between a line and its topic.
            # Where an authorization expires, a timer ends all that is short.
            topic = self._publish_topic = self.broker.topics.get(params[1].decode("ascii"))
            self._publish_line = line
            verb = params[0].decode("ascii")
            plain = self.fd >= 0 and self.channel is None and line == b" ".join(params)
            if plain and topic is not None:
                self.lane = self.broker.lane(topic, verb)
        return after

    def _publish_again(self, line: bytes, data: bytearray, at: int, stop: int) -> int:
        topic = self._publish_topic
        if topic is None or topic.exiting:
            self._publish_line = b""
            return self._command(line, data, at, stop)
        if line[0] == 80:
            return self._pub_body(topic, data, at, stop, "PUB", 0)
        return self._mpub_body(topic, data, at, stop)

    def _size(self, data: bytearray, at: int, stop: int) -> int | None:
        return int(_i32.unpack_from(data, at)[0]) if stop - at >= 4 else None

    def _body(self, data: bytearray, at: int, stop: int, verb: str) -> slice | None:
        """Where the body of IDENTIFY or AUTH is, None if it is not all there."""
        limit = self.broker.options.max_body_size
        size = self._size(data, at, stop)
        if size is None:
            self._missing = f"E_BAD_BODY {verb} failed to read body size"
            return None
        if size > limit:
            raise ProtocolError("E_BAD_BODY", f"{verb} body too big {size} > {limit}")
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"{verb} invalid body size {size}")
        if stop - at - 4 < size:
            self._missing = f"E_BAD_BODY {verb} failed to read body"
            return None
        return slice(at + 4, at + 4 + size)

    def _identify(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot IDENTIFY in current state")
        body = self._body(data, at, stop, "IDENTIFY")
        if body is None:
            return MORE
        if self._answers:
            return self._wait(self._when_answered)
        # Not copied once more: it may be large.
        fields = decode_identify(str(memoryview(data)[body], "utf-8", "replace"), _IDENTIFY_FIELDS)
        self._apply_identify(fields)
        options = self.broker.options
        if not fields["feature_negotiation"]:
            self._answer(OK_FRAME)
            return int(body.stop)
        deflate = options.deflate and fields["deflate"]
        snappy = options.snappy and fields["snappy"]
        if deflate and snappy:
            raise ProtocolError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
        tls = self.broker.tls if fields["tls_v1"] else None
        if tls is not None and self.tls_info is not None:
            # NSQ would begin a second handshake beside the first, in the clear.
            raise ProtocolError("E_IDENTIFY_FAILED", "IDENTIFY failed the connection is encrypted already")
        level = min(6, options.max_deflate_level)
        if deflate and fields["deflate_level"] > 0:
            level = min(fields["deflate_level"], options.max_deflate_level)
        response = {
            "max_rdy_count": options.max_rdy_count,
            "version": NSQ_VERSION,
            "max_msg_timeout": options.max_msg_timeout // _MS,
            "msg_timeout": self.msg_timeout // _MS,
            "tls_v1": tls is not None,
            "deflate": deflate,
            "deflate_level": level,
            "max_deflate_level": options.max_deflate_level,
            "snappy": snappy,
            "sample_rate": fields["sample_rate"],
            "auth_required": bool(options.auth_http_addresses),
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": self.output_buffer_timeout,
            "topology_region": options.topology_region,
            "topology_zone": options.topology_zone,
        }
        if self.keyed:
            response["flintmq"] = self.broker.about() | {"http_port": self.broker.http_port}
        self._answer(encode_frame(FRAME_RESPONSE, msgspec.json.encode(response)))
        if tls is None and not deflate and not snappy:
            return int(body.stop)
        self._start_upgrade(tls, Snappy() if snappy else Deflate(level) if deflate else None)
        # What the client sent behind IDENTIFY is dropped, as in NSQ: it must wait for the answer.
        return stop

    def _apply_identify(self, fields: dict[str, Any]) -> None:
        options = self.broker.options
        heartbeat = fields["heartbeat_interval"]
        if heartbeat != 0 and heartbeat != -1 and not 1000 <= heartbeat <= options.max_heartbeat_interval // _MS:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY heartbeat interval ({heartbeat}) is invalid")
        buffer_timeout = fields["output_buffer_timeout"]
        shortest, longest = options.min_output_buffer_timeout // _MS, options.max_output_buffer_timeout // _MS
        if buffer_timeout not in (0, -1) and not shortest <= buffer_timeout <= longest:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY output buffer timeout ({buffer_timeout}) is invalid")
        buffer_size = fields["output_buffer_size"]
        if buffer_size not in (0, -1) and not 64 <= buffer_size <= options.max_output_buffer_size:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY output buffer size ({buffer_size}) is invalid")
        sample_rate = fields["sample_rate"]
        if not 0 <= sample_rate <= 99:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY sample rate ({sample_rate}) is invalid")
        msg_timeout = fields["msg_timeout"]
        if msg_timeout != 0 and not 1000 <= msg_timeout <= options.max_msg_timeout // _MS:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY msg timeout ({msg_timeout}) is invalid")
        self.client_id = fields["client_id"]
        self.hostname = fields["hostname"]
        self.user_agent = fields["user_agent"]
        self.topology_region = fields["topology_region"]
        self.topology_zone = fields["topology_zone"]
        if heartbeat:
            self.heartbeat_interval = max(heartbeat, 0)
        if buffer_timeout:
            self.output_buffer_timeout = max(buffer_timeout, 0)
        if buffer_size == -1:
            self.output_buffer_size, self.output_buffer_timeout = 1, 0
        elif buffer_size:
            self.output_buffer_size = buffer_size
        if msg_timeout:
            self.msg_timeout = msg_timeout * _MS
            self._own_timeout = True
        self.keyed = fields["flintmq"]
        if not self._identified:
            # As in NSQ only the first IDENTIFY reaches deliveries and the heartbeat timer.
            self._identified = True
            self.deliver_timeout = self.msg_timeout
            self._own_deliver_timeout = self._own_timeout
            self.sample_rate = sample_rate
            if self.broker.topology_aware:
                same_region = self.topology_region == options.topology_region
                same_zone = self.topology_zone == options.topology_zone
                self.locality = 0 if same_zone else 1 if same_region else 2
                # A node that does not say where it is prefers nobody, though it counts as NSQ does.
                if same_zone and options.topology_zone:
                    self.nearness = 0
                elif same_region and options.topology_region:
                    self.nearness = 1
            self._start_heartbeats()
        else:
            self._set_timer()

    def _auth(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot AUTH in current state")
        if len(params) != 1:
            raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
        body = self._body(data, at, stop, "AUTH")
        if body is None:
            return MORE
        if self._grant is not None:
            raise ProtocolError("E_INVALID", "AUTH already set")
        if self.broker.auth is None:
            raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
        if self._answers:
            return self._wait(self._when_answered)
        secret = bytes(data[body])
        grant = self._ask_auth_server(secret)
        if grant is None:
            return AGAIN
        if not grant.count:
            raise ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self._secret = secret
        self._take_grant(grant)
        self._answer(encode_frame(FRAME_RESPONSE, grant.response()))
        return int(body.stop)

    def _ask_auth_server(self, secret: bytes) -> Grant | None:
        """What the secret is worth; None while the auth servers are asked: then the command is run again."""
        asked, self._asked = self._asked, None
        if asked is None:
            assert self.broker.auth is not None
            common_name = self.upgrade.common_name if self.upgrade is not None else ""
            asked = self.broker.auth.ask(self._remote_ip, self.tls_info is not None, common_name, secret)
            self._asked = asked
            self._wait(lambda then: asked.add_done_callback(lambda _: then()))
            return None
        try:
            return asked.result()
        except AuthError as exc:
            # The reason is in the log: whoever has not proved who he is, is told nothing.
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed") from exc

    def _must_ask(self, verb: str, topic: str, channel: str = "") -> bool:
        """May the client do this? ProtocolError if not; True if that has to be asked first, and the command waits."""
        if self.broker.auth is None:
            return False
        if self._grant is None:
            raise ProtocolError("E_AUTH_FIRST", f"AUTH required before {verb}")
        if self._expiry is None:
            grant = self._ask_auth_server(self._secret)
            if grant is None:
                return True
            self._take_grant(grant)
        if not self._grant.allows(topic, channel):
            raise ProtocolError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')
        return False

    def _topic(self, name: str, verb: str) -> Topic:
        try:
            return self.broker.topic(name)
        except PublishError as exc:
            raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc

    def _sub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot SUB in current state")
        if self.heartbeat_interval <= 0:
            raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
        topic_name = _name(params[1], "E_BAD_TOPIC", "SUB topic")
        channel_name = _name(params[2], "E_BAD_CHANNEL", "SUB channel")
        if self._must_ask("SUB", topic_name, channel_name):
            return AGAIN
        topic = self._topic(topic_name, "SUB")
        if topic.exiting:
            raise ProtocolError("E_SUB_FAILED", "SUB failed exiting")
        channel, position = topic.channel(channel_name)
        limit = self.broker.options.max_channel_consumers
        if limit and len(channel.sessions) >= limit:
            text = f"SUB failed consumers for {topic_name}:{channel_name} exceeds limit of {limit}"
            raise ProtocolError("E_SUB_FAILED", text)
        channel.add(self)
        self.channel = channel
        self.state = SUBSCRIBED
        self.lane = self.broker.finish_lane(channel) if self.fd >= 0 else None
        if position and topic.settings.durability == "fsync":
            # The channel must be on the device before the client may count on it.
            commit = Commit()
            self._answer_when(commit, "SUB")
            self.broker.journal.when_synced(position, commit.resolve)
        else:
            self.broker.journal.flush()
            self._answer(OK_FRAME)
        return at

    def _pub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
        name = _name(params[1], "E_BAD_TOPIC", "PUB topic")
        return self._pub_body(name, data, at, stop, "PUB", 0, self._key(params, 2))

    def _dpub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
        name = _name(params[1], "E_BAD_TOPIC", "DPUB topic")
        try:
            delay = parse_base10(params[2])
        except ValueError:
            raise ProtocolError("E_INVALID", f"DPUB could not parse timeout {_text(params[2])}") from None
        topic = self.broker.topics.get(name)
        settings = topic.settings if topic is not None else self.broker.settings.topic(name)
        if not 0 <= _signed_ns(delay) <= settings.max_defer:
            raise ProtocolError("E_INVALID", f"DPUB timeout {delay} out of range 0-{settings.max_defer // _MS}")
        return self._pub_body(name, data, at, stop, "DPUB", _signed_ns(delay), self._key(params, 3))

    def _key(self, params: list[bytes], index: int) -> bytes:
        """The key of a publish; empty without one. NSQ ignores words that it does not ask for."""
        if len(params) <= index or not self.keyed:
            return b""
        key = b" ".join(params[index:])
        if not valid_key(key):
            text = f"{_text(params[0])} bad key {_text(go_quote(key[:128]))}: 1 to 128 printable characters, no space"
            raise ProtocolError("E_INVALID", text)
        return key

    def _pub_body(
        self, target: Topic | str, data: bytearray, at: int, stop: int, verb: str, delay: int, key: bytes = b""
    ) -> int:
        limit = self.broker.options.max_msg_size
        if stop - at < 4:
            self._missing = f"E_BAD_MESSAGE {verb} failed to read message body size"
            return MORE
        size = int(_i32.unpack_from(data, at)[0])
        if size <= 0:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}")
        if size > limit:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} message too big {size} > {limit}")
        after = at + 4 + size
        if after > stop:
            self._missing = f"E_BAD_MESSAGE {verb} failed to read message body"
            return MORE
        if isinstance(target, str):
            if self._must_ask(verb, target):
                return AGAIN
            target = self._topic(target, verb)
        if self.broker.store.congested or target.busy:
            return self._wait(target.when_free if target.busy else self.broker.when_relieved)
        try:
            if key:
                publish = partial(_publish, target, data, at, after, 1, delay)
                commit = self._once(target, key, 1, publish, content_of(memoryview(data)[at:after]))
            else:
                commit = target.publish(data, at, after, 1, delay=delay)
                self._count(target, 1)
        except KeyContentError as exc:
            return self._other_content(exc, after)
        except PublishError as exc:
            raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc
        self._answer_when(commit, verb)
        return after

    def _once(
        self, topic: Topic, key: bytes, count: int, publish: Callable[[bytes], Commit | None], content: int
    ) -> Commit | None:
        commit, is_repeat = topic.once(key, publish, content)
        if not is_repeat:
            self._count(topic, count)
        return commit

    def _other_content(self, error: KeyContentError, after: int) -> int:
        """The command was read as a whole, so the connection goes on behind it."""
        logger.error("client(%s): %s %s", self.remote_address, error.code, error)
        self._answer(encode_frame(FRAME_ERROR, f"{error.code} {error}".encode()))
        return after

    def _mpub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
        # NSQ says the code twice here, and clients know it so.
        name = _name(params[1], "E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic")
        key = self._key(params, 2)
        if self._must_ask("MPUB", name):
            return AGAIN
        return self._mpub_body(self._topic(name, "MPUB"), data, at, stop, key)

    def _mpub_body(self, topic: Topic, data: bytearray, at: int, stop: int, key: bytes = b"") -> int:
        """``[body size][count]{[size][body]}``: the sizes inside count, the body size is only held to its limit."""
        options = self.broker.options
        size = self._size(data, at, stop)
        if size is None:
            self._missing = "E_BAD_BODY MPUB failed to read body size"
            return MORE
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > options.max_body_size:
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {size} > {options.max_body_size}")
        count = self._size(data, at + 4, stop)
        if count is None:
            self._missing = "E_BAD_BODY MPUB failed to read message count"
            return MORE
        if not 0 < count <= (options.max_body_size - 4) // 5:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {count}")
        first = at + 8
        passed, index = self._scanned
        scan = Scan(first + passed)
        scan.index = index
        status = scan.run(data, stop, count, options.max_msg_size)
        read = scan.pos - at - 4
        if max(read, stop - at if status == SCAN_MORE else 0) > 2 * options.max_body_size + RECEIVE_SLACK:
            # NSQ would read on as long as messages come; here memory has a limit.
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {read} > {options.max_body_size}")
        if status == SCAN_MORE:
            self._scanned = (scan.pos - first, scan.index)
            whole = stop - scan.pos >= 4
            self._missing = (
                "E_BAD_MESSAGE MPUB failed to read message body"
                if whole
                else f"E_BAD_MESSAGE MPUB failed to read message({scan.index}) body size"
            )
            return MORE
        if status == SCAN_BAD:
            if scan.size <= 0:
                text = f"MPUB invalid message({scan.index}) body size {scan.size}"
            else:
                text = f"MPUB message too big {scan.size} > {options.max_msg_size}"
            raise ProtocolError("E_BAD_MESSAGE", text)
        if self.broker.store.congested or topic.busy:
            return self._wait(topic.when_free if topic.busy else self.broker.when_relieved)
        self._scanned = (0, 0)
        try:
            if key:
                publish = partial(_publish, topic, data, first, scan.pos, count, 0)
                commit = self._once(topic, key, count, publish, content_of(memoryview(data)[first : scan.pos]))
            else:
                self._count(topic, count)
                commit = _publish(topic, data, first, scan.pos, count, 0, b"")
        except KeyContentError as exc:
            return self._other_content(exc, scan.pos)
        except PublishError as exc:
            raise ProtocolError("E_MPUB_FAILED", f"MPUB failed {exc}") from exc
        self._answer_when(commit, "MPUB")
        return scan.pos

    def _count(self, topic: Topic, count: int) -> None:
        counts = self.publish_counts
        counts[topic.name] = counts.get(topic.name, 0) + count

    def _rdy(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state == CLOSING:
            return at
        if self.state != SUBSCRIBED or self.channel is None:
            raise ProtocolError("E_INVALID", "cannot RDY in current state")
        count = 1
        if len(params) > 1:
            try:
                count = parse_base10(params[1])
            except ValueError:
                raise ProtocolError("E_INVALID", f"RDY could not parse count {_text(params[1])}") from None
        limit = self.broker.options.max_rdy_count
        # Go reads it into a signed number.
        count = count - (1 << 64) if count >= 1 << 63 else count
        if not 0 <= count <= limit:
            raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{limit}")
        self.ready_count = count
        self.channel.wake(self)
        return at

    def _message(self, params: list[bytes], verb: str, least: int) -> tuple[Channel, int]:
        """The channel and the seq that FIN, REQ or TOUCH speak of; -1 for an id that no message here can have."""
        if self.state not in (SUBSCRIBED, CLOSING) or self.channel is None:
            raise ProtocolError("E_INVALID", f"cannot {verb} in current state")
        if len(params) < least:
            raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
        if len(params[1]) != 16:
            raise ProtocolError("E_INVALID", "invalid message ID")
        return self.channel, self.channel.topic.ids.seq(params[1])

    def _unknown(self, params: list[bytes], verb: str) -> ProtocolError:
        return ProtocolError(f"E_{verb}_FAILED", f"{verb} {_text(params[1])} failed ID not in flight", fatal=False)

    def _fin(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "FIN", 2)
        if seq < 0:
            raise self._unknown(params, "FIN")
        channel.finish(self, seq)
        return at

    def _req(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "REQ", 3)
        try:
            delay = _signed_ns(parse_base10(params[2]))
        except ValueError:
            raise ProtocolError("E_INVALID", f"REQ could not parse timeout {_text(params[2])}") from None
        longest = channel.settings.max_defer
        if not 0 <= delay <= longest:
            logger.info("client(%s): REQ timeout %d out of range 0-%d, clamped", self.remote_address, delay, longest)
            delay = min(max(delay, 0), longest)
        if seq < 0:
            raise self._unknown(params, "REQ")
        channel.requeue(self, seq, delay)
        return at

    def _touch(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "TOUCH", 2)
        if seq < 0:
            raise self._unknown(params, "TOUCH")
        channel.touch(self, seq)
        return at

    def _cls(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != SUBSCRIBED:
            raise ProtocolError("E_INVALID", "cannot CLS in current state")
        self.ready_count = 0
        self.state = CLOSING
        self._answer(CLOSE_WAIT_FRAME)
        return at

    def _nop(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        return at


def _publish(topic: Topic, data: bytearray, pos: int, stop: int, count: int, delay: int, extra: bytes) -> Commit | None:
    """Append records, very many in slices."""
    if count > SLICED_FROM:
        batch = data[pos:stop]
        return topic.publish_slices(slices(batch, 0, len(batch), count), extra)
    return topic.publish(data, pos, stop, count, delay=delay, extra=extra)


_Handler = Callable[["Commands", list[bytes], bytearray, int, int], int]
_COMMANDS: dict[bytes, _Handler] = {
    b"IDENTIFY": Commands._identify,
    b"AUTH": Commands._auth,
    b"SUB": Commands._sub,
    b"PUB": Commands._pub,
    b"MPUB": Commands._mpub,
    b"DPUB": Commands._dpub,
    b"RDY": Commands._rdy,
    b"FIN": Commands._fin,
    b"REQ": Commands._req,
    b"TOUCH": Commands._touch,
    b"CLS": Commands._cls,
    b"NOP": Commands._nop,
}
_BEFORE_TLS: dict[bytes, _Handler] = {b"IDENTIFY": Commands._identify}


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
