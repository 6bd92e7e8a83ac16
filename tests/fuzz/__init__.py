"""Bytes that nobody expects, for everything that reads bytes from elsewhere.

``targets``   one function per reader, bytes -> None: it raises where the reader breaks its word
``corpus``    per target a folder of small inputs, each of which reaches something that the others do not
``mutate``    new inputs from old ones, by a seed
``__main__``  ``python -m tests.fuzz TARGET``: with atheris, guided by coverage, where it is installed; else by mutation
``sanitized`` ``python -m tests.fuzz.sanitized TARGET``: the same with the kernel built with sanitizers
``test_fuzz`` the corpus, and some thousand mutations of it, in the suite
"""

import sys
from pathlib import Path

# `support` is found by pytest; it must also be by `python -m tests.fuzz`.
if (_tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_tests)
