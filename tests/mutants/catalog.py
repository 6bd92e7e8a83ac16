"""The mutants of this folder: their names, their patches and the tests that kill them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
_KILLED_BY = re.compile(r"^# killed by: (\S.*?)\s*$", re.MULTILINE)
_FOUND_BY = re.compile(r"^# found by: (\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One patch. ``tests`` are pytest's names of the tests that fail with it, ``simulations`` modules that find it."""

    path: Path
    tests: tuple[str, ...]
    text: str
    simulations: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def touches_kernel(self) -> bool:
        return "src/flintmq/kernel" in self.text


def mutants() -> list[Mutant]:
    """Return all mutants, by name."""
    found = []
    for path in sorted(FOLDER.glob("*.patch")):
        text = path.read_text()
        head = text.partition("\ndiff ")[0]
        found.append(Mutant(path, tuple(_KILLED_BY.findall(head)), text, tuple(_FOUND_BY.findall(head))))
    return found
