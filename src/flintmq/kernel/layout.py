"""Where things stand in a message's frame, and in a record of a segment file. ``layout.pxd`` says the same to C.

    frame    size (4) | type (4) | timestamp (8) | attempts (2) | id (16) | body

``size`` counts everything after itself.
"""

from __future__ import annotations

#: Offsets in a frame.
TYPE_AT = 4
TIMESTAMP_AT = 8
ATTEMPTS_AT = 16
ID_AT = 18
BODY_AT = 34
#: Bytes that a message's frame has beside its body.
FRAME_OVERHEAD = BODY_AT
TYPE_MESSAGE = 2
#: Bytes of a record's header in a segment file, without its extra bytes.
RECORD_HEADER = 44
