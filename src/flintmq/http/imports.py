"""Imports of large modules, when they are first needed and without holding up the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from importlib import import_module

__all__ = ["load"]


async def load(name: str) -> None:
    """Import a large module in a thread: reading so many files would hold up everybody for a third of a second.

    What an import raises is raised, and the next call tries again.
    """
    module = sys.modules.get(name)
    # Another thread may be in the middle of it: then this one waits for that, and not the loop.
    if module is None or getattr(module.__spec__, "_initializing", False):
        await asyncio.get_running_loop().run_in_executor(None, _import, name)


#: Python begins with a module of a package while another thread is in the middle of that package: both can fail.
_importing = threading.Lock()


def _import(name: str) -> None:
    with _importing:
        known = set(sys.modules)
        try:
            import_module(name)
        except BaseException:
            # Python forgets the package that failed, not the modules in it that had succeeded: the next attempt would
            # find them, and not make them known to their package.
            for each in set(sys.modules) - known:
                if each.partition(".")[0] not in sys.modules:
                    sys.modules.pop(each, None)
            raise
