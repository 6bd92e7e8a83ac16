"""What is sent to a daemon, and what should come back: the TCP protocol V2 as a table.

A case is a sentence, the steps that show it, and the frames that answer them. Whether the Go daemon agrees is not
decided here: ``recorded.json`` holds what it really said, and the recorder refuses to write where it disagrees with a
case.

Two things keep the answers the same in every run: only one connection at a time may receive a message, and where time
decides, the case is about an order (this message before that one), never about a duration.
"""

from __future__ import annotations

from ..notation import Case
from . import connection, delivery, identify, publishing, security

__all__ = ["CASES", "NEWER_IDENTIFY_KEYS"]

#: The recording is of v1.3.0. Ours follows the revision after it, whose answer to a negotiating IDENTIFY ends with two
#: more keys: the region and zone of the server, for topology-aware consumption.
NEWER_IDENTIFY_KEYS = ',"topology_region":"","topology_zone":""'

CASES: tuple[Case, ...] = tuple(
    case
    for module in (connection, identify, publishing, delivery, security)
    for chapter in module.CHAPTERS
    for case in chapter()
)
