"""The effect of a tzdata change on schedules and jobs, counted by zone and change of UTC offset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from timebell.formatting import format_count


@dataclass(slots=True)
class OffsetChange:
    """The effect of one change of UTC offset (seconds east) in a zone.

    Of `examined` schedules and jobs, `schedules` and `jobs` move. `occurrences` counts the moved occurrences of the
    schedules, where they were counted. `since` is the earliest moved instant.
    """

    timezone: str
    offset_before: int
    offset_after: int
    examined: int = 0
    schedules: int = 0
    jobs: int = 0
    occurrences: int = 0
    since: datetime | None = None

    @property
    def has_effect(self) -> bool:
        """True if any schedule or job moves."""
        return bool(self.schedules or self.jobs)

    def describe(self, verb: str = "move") -> str:
        """Return text such as `212 occurrences of 14 schedules in America/Mexico_City move by one hour (from ...)`."""
        subjects = [format_count(self.schedules, "schedule")] if self.schedules else []
        if self.occurrences:
            subjects = [f"{format_count(self.occurrences, 'occurrence')} of {subjects[0] if subjects else 'schedules'}"]
        subjects += [format_count(self.jobs, "job")] if self.jobs else []
        from_ = "" if self.since is None else f"from {self.since + timedelta(seconds=self.offset_before):%Y-%m-%d}, "
        offsets = f"{format_offset(self.offset_before)} becomes {format_offset(self.offset_after)}"
        single = self.schedules + self.jobs == 1 and self.occurrences < 2 and verb == "move"
        shift = _format_duration(abs(self.offset_after - self.offset_before))
        return f"{' and '.join(subjects)} in {self.timezone} {verb}{'s' * single} by {shift} ({from_}{offsets})"


class ChangeTally:
    """Collects offset changes by zone and offsets."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, int, int], OffsetChange] = {}

    def entry(self, timezone: str, before: int, after: int) -> OffsetChange:
        """Return the change for a zone and its offsets; create it if missing."""
        return self._changes.setdefault((timezone, before, after), OffsetChange(timezone, before, after))

    def add(
        self, timezone: str, before: int, after: int, since: datetime | None,
        schedules: int = 0, jobs: int = 0, occurrences: int = 0,
    ) -> None:  # fmt: skip
        """Count one examined schedule or job; `since` is its first moved instant, None if it does not move."""
        change = self.entry(timezone, before, after)
        change.examined += 1
        if since is not None:
            change.schedules += schedules
            change.jobs += jobs
            change.occurrences += occurrences
            change.since = since if change.since is None else min(change.since, since)

    def changes(self) -> Iterable[OffsetChange]:
        """Return all changes, sorted by zone and offsets."""
        return [self._changes[key] for key in sorted(self._changes)]

    def effective_changes(self) -> list[OffsetChange]:
        """Return the changes that move a schedule or job."""
        return [change for change in self.changes() if change.has_effect]


def format_offset(offset: int) -> str:
    """Format a UTC offset in seconds, such as UTC-06:00; seconds are included only if not zero."""
    minutes, seconds = divmod(abs(offset), 60)
    return f"UTC{'-' if offset < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}" + (
        f":{seconds:02}" if seconds else ""
    )


def _format_duration(seconds: int) -> str:
    if seconds == 3600:
        return "one hour"
    if seconds % 3600 == 0:
        return f"{seconds // 3600} hours"
    return f"{seconds // 60} minutes" if seconds % 60 == 0 else f"{seconds} seconds"
