"""The other NSQ programs, where `scripts/peers` put them: in $FLINTMQ_PEERS, or in .peers of the repository."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["GO_NSQD", "NO_GO_NSQD", "PEERS"]

PEERS = Path(os.environ.get("FLINTMQ_PEERS") or Path(__file__).resolve().parents[2] / ".peers")
GO_NSQD = PEERS / "bin" / "nsqd"
#: Why tests that need it are skipped; empty if it is there.
NO_GO_NSQD = "" if os.access(GO_NSQD, os.X_OK) else "no Go nsqd in $FLINTMQ_PEERS/bin or .peers/bin: run scripts/peers"
