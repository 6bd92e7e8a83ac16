"""`python -m flintmq <command>`."""

import sys

from flintmq.cli import main

sys.exit(main())
