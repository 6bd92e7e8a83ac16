"""Run a file whose top level may await: ``python -m support.run_python FILE``."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path


async def main(path: str) -> None:
    code = compile(Path(path).read_text(), path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, {"__name__": "__main__"})
    if inspect.iscoroutine(result):
        await result


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
