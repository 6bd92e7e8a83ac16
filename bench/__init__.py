"""The benchmark: our broker and another NSQ daemon, side by side in one run. Start with ``python -m bench``."""

import os

# Daemons and Spark's workers would compile their sources at every start, and that would be measured.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
