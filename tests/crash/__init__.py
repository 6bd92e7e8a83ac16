"""What kill -9 may cost: nothing that was answered with OK.

``broker``    a real nsqd of ours in its own process, to be killed and started again
``ledger``    the oracle: what was published and answered, what each channel got, what must never be seen
``load``      producers and consumers over raw connections, which tell the ledger everything
``torture``   ``python -m tests.crash.torture`` kills a busy broker again and again; also the way to the limits
``keys``      ``python -m tests.crash.keys``: publishes with keys, repeated across kills, are stored once
``deferred``  ``python -m tests.crash.deferred``: deferred messages across crashes, on a clock that is moved
``limits``    how long a start takes after a kill, and how much memory a backlog or many channels cost
``test_deferred``, ``test_keys``  short runs of them
``test_kill`` a short torture with fixed seeds, and what the oracle itself must notice
"""

import sys
from pathlib import Path

# `support` is found by pytest; it must also be by `python -m tests.crash.torture`.
if (_tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_tests)
