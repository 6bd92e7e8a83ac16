"""What an oracle found: how often each rule was broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Violations"]

#: Of each rule, kept in words.
_MOST_SAMPLES = 20


@dataclass
class Violations:
    """How often each rule was broken, and the first few times in words."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    def add(self, rule: str, text: str) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= _MOST_SAMPLES:
            self.samples.append(f"{rule}: {text}")
