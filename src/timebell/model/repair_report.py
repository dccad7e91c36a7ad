"""What a look for lost work found: what was put right, and what rightly waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Healed:
    """A report: of what was `scanned`, so many were `healed` and so many `skipped`, as nothing was wrong with them."""

    what: Mapping[str, int] = field(default_factory=dict)
    """How many were healed: `lease`, `unheard`, `turn`, `hold`, `schedule`, `message`."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """How many were skipped, by why they are fine as they are; the words are in the glossary."""

    @property
    def scanned(self) -> int:
        """How many were looked at."""
        return self.healed + self.skipped

    @property
    def healed(self) -> int:
        """How many were put right."""
        return sum(self.what.values())

    @property
    def skipped(self) -> int:
        """How many were left as they were."""
        return sum(self.reasons.values())

    def __add__(self, other: Healed) -> Healed:
        return Healed(Counter(self.what) + Counter(other.what), Counter(self.reasons) + Counter(other.reasons))

    def __str__(self) -> str:
        text = f"{self.scanned} scanned, {self.healed} healed{_listed(self.what)}"
        return f"{text}, {self.skipped} skipped{_listed(self.reasons)}"


def _listed(counts: Mapping[str, int]) -> str:
    said = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
    return f" ({said})" if said else ""
