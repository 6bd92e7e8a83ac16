"""Ctrl-C while the compiled kernel is imported is heard, although Cython's modules lose exceptions there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flintmq.kernel import COMPILED

#: A signal comes in the middle of each call that Cython's modules make when they are imported.
PROGRAM = """
import abc, asyncio, os, signal

# Whoever runs the tests in the background ignores it for all of them.
signal.signal(signal.SIGINT, signal.default_int_handler)
register = abc.ABCMeta.register
calls = 0

def interrupted(cls, subclass):
    global calls
    calls += 1
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass
    return register(cls, subclass)

abc.ABCMeta.register = interrupted
try:
    import flintmq.kernel
except KeyboardInterrupt:
    print("heard", calls)
else:
    print("lost", calls)
"""


@pytest.mark.skipif(not COMPILED, reason="about the compiled form")
def test_ctrl_c_during_the_import_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    word, calls = done.stdout.split()
    # It waits until all is imported, however many calls there are.
    assert (word, int(calls) > 1, done.stderr) == ("heard", True, "")
