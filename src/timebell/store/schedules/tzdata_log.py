"""The record of what a release of the zone data moved: written by whoever moves it, read by an audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from timebell.errors import InvalidRecurrence
from timebell.model.schedule import Schedule
from timebell.model.tzdata_change import Tally
from timebell.recurrence import Recurrence, Release
from timebell.recurrence.tzdata_diff import moved_to, offset_at
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

# One statement, as planners on several nodes may be the first to need the row.
RECORD = Statement(
    "WITH $rows INSERT INTO timebell_zone_changes (tzdata, timezone, offset_before, offset_after, looked_at, schedules,"
    " jobs, since, recorded_at) SELECT tzdata, timezone, offset_before, offset_after, looked_at, schedules, jobs,"
    " since, recorded_at FROM d WHERE true ON CONFLICT (tzdata, timezone, offset_before, offset_after) DO UPDATE SET"
    " looked_at = timebell_zone_changes.looked_at + excluded.looked_at,"
    " schedules = timebell_zone_changes.schedules + excluded.schedules,"
    " jobs = timebell_zone_changes.jobs + excluded.jobs, recorded_at = excluded.recorded_at,"
    " since = CASE WHEN excluded.since IS NULL OR timebell_zone_changes.since <= excluded.since"
    " THEN timebell_zone_changes.since ELSE excluded.since END",
    tzdata="text",
    timezone="text",
    offset_before="int",
    offset_after="int",
    looked_at="int",
    schedules="int",
    jobs="int",
    since="instant",
    recorded_at="instant",
)


class Stored(Protocol):
    """What is stored of a schedule's next instant."""

    @property
    def next_fire_at(self) -> datetime | None:
        """The instant."""

    @property
    def utc_offset(self) -> int | None:
        """The offset from UTC it was given with."""


def record(tx: Transaction, release: Release, tally: Tally, now: datetime) -> None:
    """Add to what this release did, in the transaction that did it."""
    to_db = tx.dialect.to_db
    rows = [
        {
            "tzdata": release.version, "timezone": one.timezone, "offset_before": one.offset_before,
            "offset_after": one.offset_after, "looked_at": one.looked_at, "schedules": one.schedules, "jobs": one.jobs,
            "since": to_db(one.since), "recorded_at": to_db(now),
        }
        for one in tally.all()
    ]  # fmt: skip
    tx.fetch(RECORD, rows)


def due(tx: Transaction, schedules: Iterable[Schedule], now: datetime) -> None:
    """Record what newer zone data moves of schedules that are decided now, by instants that earlier data gave: those
    stay, what follows them is where the new data has it."""
    tally, newer = Tally(), None
    for one in schedules:
        release = one.recurrence.release
        ours = one.tzdata is not None and one.tzdata >= release.version
        if ours or one.next_fire_at is None or one.next_fire_at > now:
            continue
        plain = dataclasses.replace(one.recurrence)  # without what was carried over
        with suppress(InvalidRecurrence):  # a search that was given up: there the planner sets it aside
            count_schedule(tally, plain, one, moved_to(plain, one.next_fire_at, one.utc_offset))
            newer = release
    if newer is not None:
        record(tx, newer, tally, now)


def count_schedule(tally: Tally, recurrence: Recurrence, row: Stored, at: datetime | None) -> None:
    """Count a schedule whose stored instant lies at `at` by its recurrence's own zone data."""
    was = row.next_fire_at
    assert was is not None
    after = offset_at(recurrence, at or was)
    assert after is not None
    if at == was:
        tally.add(recurrence.timezone, after, after, None)
        return
    before = row.utc_offset
    if before is None:
        before = after if at is None else after + round((at - was).total_seconds())
    tally.add(recurrence.timezone, before, after, was, schedules=1)
