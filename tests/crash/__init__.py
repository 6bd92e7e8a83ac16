"""What kill -9 may cost: nothing that was answered with OK.

``broker``     a real nsqd of ours in its own process, to be killed
``keys``       ``python -m tests.crash.keys``: publishes with keys, repeated across kills, are stored once
``deferred``   ``python -m tests.crash.deferred``: deferred messages across crashes, on a clock that is moved
``limits``     ``python -m tests.crash.limits``: how long a start takes after a kill, how much memory a backlog costs
``soak``       ``python -m tests.crash.soak``: a mixed load for a long time; nothing is lost, and nothing grows
``load``       ``python -m tests.crash.load``: many connections, many topics, much that waits
``flow``, ``trickle``, ``gauge``   the load of these two by the C generator and from Python, and what a broker holds
``power``      ``python -m tests.crash.power``: power loss of a real nsqd, by a layer under it (``shim/shim.c``)
``test_deferred``, ``test_keys``, ``test_load``, ``test_power``, ``test_soak``   short runs of them
``test_kill``, ``test_cluster``    short runs of ``flintmq torture``, and what its oracles must notice
"""

import sys
from pathlib import Path

# `support` is found by pytest; it must also be by `python -m tests.crash.keys`.
if (_tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_tests)
