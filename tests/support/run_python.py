"""Run a file whose top level may await: ``python -m support.run_python FILE``. A whole program runs as it is."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path


def main(path: str) -> None:
    code = compile(Path(path).read_text(), path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"__name__": "__main__"}
    if not code.co_flags & inspect.CO_COROUTINE:
        # It has an event loop of its own, or none.
        exec(code, names)
        return

    async def run() -> None:
        await eval(code, names)

    asyncio.run(run())


if __name__ == "__main__":
    main(sys.argv[1])
