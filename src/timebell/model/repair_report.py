"""The result of a repair scan: items repaired, and items skipped because nothing was wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Numbers of scanned items: each was either repaired or skipped."""

    repairs: Mapping[str, int] = field(default_factory=dict)
    """Repaired items by kind: `lease`, `unhandled`, `turn`, `hold`, `schedule`, `message`."""
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    """Skipped items by the reason why they are in order; the reasons are in the glossary."""

    @property
    def scanned(self) -> int:
        """The number of scanned items."""
        return self.repaired + self.skipped

    @property
    def repaired(self) -> int:
        """The number of repaired items."""
        return sum(self.repairs.values())

    @property
    def skipped(self) -> int:
        """The number of skipped items."""
        return sum(self.skip_reasons.values())

    def __add__(self, other: RepairReport) -> RepairReport:
        return RepairReport(
            Counter(self.repairs) + Counter(other.repairs), Counter(self.skip_reasons) + Counter(other.skip_reasons)
        )

    def __str__(self) -> str:
        text = f"{self.scanned} scanned, {self.repaired} repaired{_format_counts(self.repairs)}"
        return f"{text}, {self.skipped} skipped{_format_counts(self.skip_reasons)}"


def _format_counts(counts: Mapping[str, int]) -> str:
    text = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
    return f" ({text})" if text else ""
