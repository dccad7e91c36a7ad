"""`timebell db zones`: preview which occurrences and jobs new zone data moves. Writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from timebell import settings
from timebell.cli.database import find_schema, redact_url
from timebell.cli.output import DIFFERENT, OK, print_data, print_message, print_records
from timebell.clock import system_now
from timebell.errors import InvalidInput
from timebell.formatting import format_count
from timebell.model.tzdata_change import ChangeTally, OffsetChange
from timebell.recurrence import Release, installed_release, open_release
from timebell.recurrence.instants import format_instant
from timebell.recurrence.tzdata_diff import find_differences, re_resolve_local, relocate
from timebell.store.dialects.base import Store
from timebell.store.open import is_compatible, open_store
from timebell.store.schedules import tzdata_log, tzdata_replan
from timebell.store.version import HEAD, schema_outdated

COMPARED_PERIOD = timedelta(days=365)
PAGE_SIZE = 1000


def preview_changes(database: str | None, against: Path | None, output_format: str | None) -> int:
    """Print the changes and return the exit code: 7 if anything moves.

    `against` is the folder of another zone data release; None compares the stored state with the installed release.
    Raises InvalidInput (ZONE_DATA_NOT_FOUND), SchemaOutdated.
    """
    chosen = settings.load(database_url=database, output=output_format)
    other = None if against is None else open_release(against)
    comparison = asyncio.run(_compare(chosen.database_url, other))
    moved = comparison.tally.effective_changes()
    if chosen.output == "table":
        for change in moved:
            print_data(change.describe())
    else:
        print_records([_change_facts(change) for change in moved], chosen.output)
    print_message(comparison.summary(bool(moved)))
    return DIFFERENT if moved else OK


def _change_facts(change: OffsetChange) -> dict[str, Any]:
    return {
        "timezone": change.timezone, "offset_before": change.offset_before, "offset_after": change.offset_after,
        "occurrences": change.occurrences, "schedules": change.schedules, "jobs": change.jobs,
        "since": None if change.since is None else format_instant(change.since),
    }  # fmt: skip


class _Comparison:
    """Stored schedules and jobs, evaluated under two zone data releases. Without `before`, under the stored state."""

    def __init__(self, before: Release | None, after: Release, now: datetime) -> None:
        self.before, self.after, self.now = before, after, now
        self.tally = ChangeTally()
        self.schedules = self.jobs = 0

    def add_schedule(self, row: Any) -> None:
        """Count moved occurrences of the coming year; without an earlier release, only the next occurrence."""
        self.schedules += 1
        new = tzdata_replan.recurrence_under(self.after, row.recurrence)
        if self.before is None:
            if (row.tzdata is None or row.tzdata < self.after.version) and row.next_fire_at > self.now:
                at = relocate(new, row.next_fire_at, row.utc_offset)
                tzdata_log.tally_schedule(self.tally, new, row, at)
            return
        old = tzdata_replan.recurrence_under(self.before, row.recurrence)
        for difference in find_differences(old, new, self.now, self.now + COMPARED_PERIOD):
            self.tally.add(
                new.timezone,
                difference.offset_before,
                difference.offset_after,
                difference.since,
                schedules=1,
                occurrences=difference.occurrences,
            )

    def add_job(self, row: Any) -> None:
        """Count a job if it moves."""
        self.jobs += 1
        run_at = row.run_at
        if self.before is not None:
            run_at = re_resolve_local(row.local_time, run_at, self.before.zone(row.timezone))
        elif row.tzdata >= self.after.version:
            return
        tzdata_replan.tally_job(self.tally, row.timezone, row.local_time, run_at, self.after)

    def summary(self, has_moves: bool) -> str:
        """Return one line with the releases and the number of compared rows."""
        base = "the stored state" if self.before is None else f"zone data {self.before.version}"
        compared = (
            f"{format_count(self.schedules, 'schedule')} and {format_count(self.jobs, 'job')} at a local time compared"
        )
        return f"From {base} to zone data {self.after.version}: {compared}{'.' if has_moves else ', nothing moves.'}"


async def _compare(url: str, other: Release | None) -> _Comparison:
    version, _ = await find_schema(url)
    if version != HEAD and not await is_compatible(url, version):
        raise schema_outdated(redact_url(url), version)
    installed = installed_release()
    releases = (
        sorted((installed, other), key=lambda release: release.version) if other is not None else [None, installed]
    )
    store = open_store(url, system_now)
    await store.open()
    try:
        comparison = _Comparison(releases[0], releases[1] or installed, await store.read_clock())
        async for row in _iterate_pages(store, tzdata_replan.list_planned_schedules):
            with suppress(InvalidInput):  # an unreadable recurrence never fires, and its schedule is errored
                comparison.add_schedule(row)
        async for row in _iterate_pages(store, tzdata_replan.list_local_time_jobs, comparison.now):
            with suppress(InvalidInput):
                comparison.add_job(row)
    finally:
        await store.close()
    return comparison


async def _iterate_pages(store: Store, list_page: Callable[..., list[Any]], *args: Any) -> AsyncIterator[Any]:
    """Yield the rows of every page of a query that is paginated by id."""
    after: str | None = None
    while True:
        rows = await store.run(list_page, *args, after, PAGE_SIZE)
        for row in rows:
            yield row
        if len(rows) < PAGE_SIZE:
            return
        after = rows[-1].id
