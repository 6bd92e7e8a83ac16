"""What a client says of itself by IDENTIFY, and the limits that it is held to.

An Identity belongs to one session. It has what is told to others (``/stats``) and what is looked at once per command or
less; what deliveries go by is in the session itself.
"""

from __future__ import annotations

from typing import Any

from flintmq.errors import ProtocolError
from flintmq.options import NsqdOptions

__all__ = ["FIELDS", "Identity"]

_MS = 1_000_000

#: The fields of IDENTIFY: their types in Go, and their defaults.
FIELDS: dict[str, tuple[str, Any]] = {
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

#: Characters that are kept of each text: all of them are in every answer of ``/stats``.
LONGEST_TEXT = 256


class Identity:
    def __init__(self, options: NsqdOptions, connected_at: int) -> None:
        #: Seconds since 1970.
        self.connected_at = connected_at
        #: The peer's IP address; empty on a unix socket.
        self.remote_ip = ""
        self.client_id = self.hostname = self.user_agent = ""
        self.topology_region = self.topology_zone = ""
        self.output_buffer_size = 16_384
        self.output_buffer_timeout = options.output_buffer_timeout // _MS
        #: Has the client asked for a message timeout of its own? And did so its first IDENTIFY, which deliveries go by?
        self.own_timeout = self.own_deliver_timeout = False
        #: The client knows what NSQ does not: a further word of a publish is its key.
        self.keyed = False

    def came_from(self, address: str) -> None:
        """Take the peer's IP address, which also is its name until IDENTIFY gives another."""
        self.client_id = self.hostname = self.remote_ip = address

    def take(self, fields: dict[str, Any], options: NsqdOptions) -> None:
        """Take the fields of an IDENTIFY. ProtocolError if one is out of range; then nothing is taken."""
        check(fields, options)
        self.client_id = fields["client_id"][:LONGEST_TEXT]
        self.hostname = fields["hostname"][:LONGEST_TEXT]
        self.user_agent = fields["user_agent"][:LONGEST_TEXT]
        self.topology_region = fields["topology_region"][:LONGEST_TEXT]
        self.topology_zone = fields["topology_zone"][:LONGEST_TEXT]
        if fields["output_buffer_timeout"]:
            self.output_buffer_timeout = max(fields["output_buffer_timeout"], 0)
        if fields["output_buffer_size"] == -1:
            self.output_buffer_size, self.output_buffer_timeout = 1, 0
        elif fields["output_buffer_size"]:
            self.output_buffer_size = fields["output_buffer_size"]
        if fields["msg_timeout"]:
            self.own_timeout = True
        self.keyed = fields["flintmq"]


def check(fields: dict[str, Any], options: NsqdOptions) -> None:
    """Raise the ProtocolError of the first field that is out of range."""
    heartbeat = fields["heartbeat_interval"]
    if heartbeat not in (0, -1) and not 1000 <= heartbeat <= options.max_heartbeat_interval // _MS:
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
