"""The result of checking a run: classes of violations, and the violations that were found."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

VIOLATION_CLASSES = (
    "lost", "lost-unkeyed", "early", "late", "dup-unjustified", "zombie-send", "attempt-order", "key-unstable",
    "key-reused", "phantom", "after-cancel", "stale-generation", "during-pause", "overlap", "out-of-order", "retry",
    "incomplete", "signature", "cross-tenant", "dup-object", "lost-write", "phantom-success", "accounting",
    "transaction", "not-healed", "audit", "loss-report", "server-error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Violation:
    """One violated guarantee. `at` is in seconds since the start of the run."""

    name: str
    label: str
    at: float
    detail: str


@dataclass(slots=True)
class Verdict:
    """The result of the checker. `lateness` has the lateness of first starts, in seconds, by phase."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lateness: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recovery: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    justified: int = 0
    audit_counts: dict[str, int] = field(default_factory=dict)
    targets: list[tuple[str, float, bool]] = field(default_factory=list)
    """(label, due, fired) of the required occurrences, for the timeline of the report."""
