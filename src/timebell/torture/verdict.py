"""What the checker says of a run: the classes of wrong, and what it found."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

CLASSES = (
    "lost", "lost-unkeyed", "early", "late", "dup-unjustified", "zombie-send", "attempt-order", "key-unstable",
    "key-reused", "phantom", "after-cancel", "stale-generation", "during-pause", "overlap", "out-of-order", "retry",
    "incomplete", "signature", "cross-tenant", "dup-object", "lost-write", "phantom-success", "accounting",
    "transaction", "not-healed", "audit",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise not kept."""

    name: str
    label: str
    at: float
    detail: str


@dataclass(slots=True)
class Verdict:
    """What the checker found. `late` has the lateness of first starts, in seconds, by phase."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    late: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recovery: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    justified: int = 0
    audited: dict[str, int] = field(default_factory=dict)
    targets: list[tuple[str, float, bool]] = field(default_factory=list)
    """(schedule, due, fired) of what had to happen, for the picture."""
