"""What a cluster may cost while its nodes are killed: nothing that was acknowledged, and no duplicate without a reason.

``ledger``       the oracle: what was published and answered, what each channel got, and why it may have come twice
``nodes``        nsqd and nsqlookupd in processes of their own, to be killed and started again at the same addresses
``load``         producers and consumers with the project's own client, which tell the ledger everything
``torture``      ``python -m tests.cluster.torture`` kills nodes of a busy cluster at random and cuts connections
``test_torture`` a short torture, and what the oracle itself must notice
"""

import sys
from pathlib import Path

# `support` is found by pytest; it must also be by `python -m tests.cluster.torture`.
if (_tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_tests)
