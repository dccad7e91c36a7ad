"""What another release of the zone data moves, counted by zone and change of offset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(slots=True)
class Change:
    """What one change of offset (seconds east of UTC) does in a zone. Of `looked_at` instants, those of so many
    schedules and jobs move; of the schedules' occurrences so many, where these were counted, the first at `since`."""

    timezone: str
    offset_before: int
    offset_after: int
    looked_at: int = 0
    schedules: int = 0
    jobs: int = 0
    occurrences: int = 0
    since: datetime | None = None

    @property
    def moves(self) -> bool:
        """Whether anything moves, or was only looked at."""
        return bool(self.schedules or self.jobs)

    def sentence(self, verb: str = "move") -> str:
        """It in words: `212 occurrences of 14 schedules in America/Mexico_City move by one hour (from ...)`."""
        what = [many(self.schedules, "schedule")] if self.schedules else []
        if self.occurrences:
            what = [f"{many(self.occurrences, 'occurrence')} of {what[0] if what else 'schedules'}"]
        what += [many(self.jobs, "job")] if self.jobs else []
        from_ = "" if self.since is None else f"from {self.since + timedelta(seconds=self.offset_before):%Y-%m-%d}, "
        offsets = f"{utc(self.offset_before)} becomes {utc(self.offset_after)}"
        single = self.schedules + self.jobs == 1 and self.occurrences < 2 and verb == "move"
        how_far = _length(abs(self.offset_after - self.offset_before))
        return f"{' and '.join(what)} in {self.timezone} {verb}{'s' * single} by {how_far} ({from_}{offsets})"


class Tally:
    """Changes as they are found."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, int, int], Change] = {}

    def change(self, timezone: str, before: int, after: int) -> Change:
        """The one of this zone and these offsets."""
        return self._changes.setdefault((timezone, before, after), Change(timezone, before, after))

    def add(
        self, timezone: str, before: int, after: int, since: datetime | None,
        schedules: int = 0, jobs: int = 0, occurrences: int = 0,
    ) -> None:  # fmt: skip
        """Count one thing that was looked at; one that moves has a `since`."""
        change = self.change(timezone, before, after)
        change.looked_at += 1
        if since is not None:
            change.schedules += schedules
            change.jobs += jobs
            change.occurrences += occurrences
            change.since = since if change.since is None else min(change.since, since)

    def all(self) -> Iterable[Change]:
        """Every one, by zone."""
        return [self._changes[key] for key in sorted(self._changes)]

    def moved(self) -> list[Change]:
        """Those that move anything."""
        return [change for change in self.all() if change.moves]


def utc(offset: int) -> str:
    """An offset as it is written: UTC-06:00, with seconds only where there are any."""
    minutes, seconds = divmod(abs(offset), 60)
    return f"UTC{'-' if offset < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}" + (
        f":{seconds:02}" if seconds else ""
    )


def many(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _length(seconds: int) -> str:
    if seconds == 3600:
        return "one hour"
    if seconds % 3600 == 0:
        return f"{seconds // 3600} hours"
    return f"{seconds // 60} minutes" if seconds % 60 == 0 else f"{seconds} seconds"
