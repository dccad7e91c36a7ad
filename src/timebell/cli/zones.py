"""`timebell db zones`: what another release of the zone data would move. It writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from timebell import settings
from timebell.cli.database import found_version, shown
from timebell.cli.output import DIFFERENT, OK, emit, say, show
from timebell.clock import wall
from timebell.errors import InvalidInput
from timebell.model.tzdata_change import Change, Tally, many
from timebell.recurrence import Release, installed, open_release
from timebell.recurrence.instants import format_instant
from timebell.recurrence.tzdata_diff import differences, moved_to, resolve_again
from timebell.store.dialects.base import Store
from timebell.store.open import HEAD, open_store, outdated, works
from timebell.store.schedules import tzdata_log, tzdata_replan

YEAR = timedelta(days=365)
PAGE = 1000


def preview(database: str | None, against: Path | None, form: str | None) -> int:
    """Print what moves; the exit code. Raises InvalidInput (ZONE_DATA_NOT_FOUND), SchemaOutdated."""
    chosen = settings.load(database_url=database, output=form)
    other = None if against is None else open_release(against)
    comparison = asyncio.run(_compare(chosen.database_url, other))
    moved = comparison.tally.moved()
    if chosen.output == "table":
        for change in moved:
            show(change.sentence())
    else:
        emit([_row(change) for change in moved], chosen.output)
    say(comparison.summary(bool(moved)))
    return DIFFERENT if moved else OK


def _row(change: Change) -> dict[str, Any]:
    return {
        "timezone": change.timezone, "offset_before": change.offset_before, "offset_after": change.offset_after,
        "occurrences": change.occurrences, "schedules": change.schedules, "jobs": change.jobs,
        "since": None if change.since is None else format_instant(change.since),
    }  # fmt: skip


class _Comparison:
    """Schedules and jobs as they are stored, by one release and by another."""

    def __init__(self, before: Release | None, after: Release, now: datetime) -> None:
        self.before, self.after, self.now = before, after, now
        self.tally = Tally()
        self.schedules = self.jobs = 0

    def add_schedule(self, row: Any) -> None:
        """Count what moves of it: in the coming year, or without an earlier release its next occurrence."""
        self.schedules += 1
        new = tzdata_replan.recurrence_by(self.after, row.recurrence)
        if self.before is None:
            if (row.tzdata is None or row.tzdata < self.after.version) and row.next_fire_at > self.now:
                at = moved_to(new, row.next_fire_at, row.utc_offset)
                tzdata_log.count_schedule(self.tally, new, row, at)
            return
        old = tzdata_replan.recurrence_by(self.before, row.recurrence)
        for one in differences(old, new, self.now, self.now + YEAR):
            self.tally.add(
                new.timezone, one.offset_before, one.offset_after, one.since, schedules=1, occurrences=one.occurrences
            )

    def add_job(self, row: Any) -> None:
        """Count it, if it moves."""
        self.jobs += 1
        run_at = row.run_at
        if self.before is not None:
            run_at = resolve_again(row.local_time, run_at, self.before.zone(row.timezone))
        elif row.tzdata >= self.after.version:
            return
        tzdata_replan.count_job(self.tally, row.timezone, row.local_time, run_at, self.after)

    def summary(self, moves: bool) -> str:
        """What was compared."""
        given = "what is stored" if self.before is None else f"zone data {self.before.version}"
        looked = f"{many(self.schedules, 'schedule')} and {many(self.jobs, 'job')} at a local time looked at"
        return f"From {given} to zone data {self.after.version}: {looked}{'.' if moves else ', nothing moves.'}"


async def _compare(url: str, other: Release | None) -> _Comparison:
    found = await found_version(url)
    if found != HEAD and not await works(url, found):
        raise outdated(shown(url), found)
    ours = installed()
    releases = sorted((ours, other), key=lambda one: one.version) if other is not None else [None, ours]
    store = open_store(url, wall)
    await store.open()
    try:
        comparison = _Comparison(releases[0], releases[1] or ours, await store.reading())
        async for row in _pages(store, tzdata_replan.page_of_schedules):
            with suppress(InvalidInput):  # what cannot be read does not fire either, and its schedule says so
                comparison.add_schedule(row)
        async for row in _pages(store, tzdata_replan.page_of_jobs, comparison.now):
            with suppress(InvalidInput):
                comparison.add_job(row)
    finally:
        await store.close()
    return comparison


async def _pages(store: Store, page: Callable[..., list[Any]], *args: Any) -> AsyncIterator[Any]:
    after: str | None = None
    while True:
        rows = await store.run(page, *args, after, PAGE)
        for row in rows:
            yield row
        if len(rows) < PAGE:
            return
        after = rows[-1].id
