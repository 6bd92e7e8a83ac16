"""`flintmq torture`: kill brokers under load on your own disk, and count what that cost.

``ledger``, ``cluster_ledger``   the oracles: what was published and answered, what came, and why it came twice
``load``, ``cluster_load``       producers and consumers on raw connections, and with the project's own client
``node``, ``proxy``              daemons in processes of their own; connections that can be cut and stalled
``front``, ``run``               one broker and what is done to it; the whole run and its report
``display``                      what is shown meanwhile, and at the end

Exit status 1: a message was lost, or another rule was broken; the brokers' files are kept then.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "kill brokers under load on this machine, and count lost messages"


def main(argv: Sequence[str]) -> int:
    # `flintmq --help` imports every tool for its line of help.
    from flintmq.tools.torture import command

    return command.main(argv)
