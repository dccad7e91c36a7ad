"""Log of the instants that a tzdata release moved: written with each move, read by audits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from sqlalchemy import bindparam, case, or_, update

from timebell.errors import InvalidRecurrence
from timebell.model.schedule import Schedule
from timebell.model.tzdata_change import ChangeTally
from timebell.recurrence import Recurrence, Release
from timebell.recurrence.tzdata_diff import offset_at, relocate
from timebell.store.schema import zone_changes
from timebell.store.transaction import Transaction
from timebell.store.types import Instant

_KEY = ("tzdata", "timezone", "offset_before", "offset_after")
_COUNTS = ("examined", "schedules", "jobs")
_SINCE = bindparam("new_since", type_=Instant)
_ADD_CHANGES = (
    update(zone_changes)
    .where(*(zone_changes.c[name] == bindparam(f"key_{name}") for name in _KEY))
    .values({name: zone_changes.c[name] + bindparam(f"new_{name}") for name in _COUNTS})
    .values(
        recorded_at=bindparam("new_recorded_at"),
        since=case((or_(_SINCE.is_(None), zone_changes.c.since <= _SINCE), zone_changes.c.since), else_=_SINCE),
    )
)


class StoredInstant(Protocol):
    """A schedule's next instant as stored."""

    @property
    def next_fire_at(self) -> datetime | None:
        """The next instant, aware UTC."""

    @property
    def utc_offset(self) -> int | None:
        """The UTC offset in seconds that it was computed with."""


def record_changes(tx: Transaction, release: Release, tally: ChangeTally, now: datetime) -> None:
    """Add `tally` to the log of this release, in the transaction that moved the instants."""
    rows = [
        {
            "tzdata": release.version, "timezone": change.timezone, "offset_before": change.offset_before,
            "offset_after": change.offset_after, "examined": change.examined, "schedules": change.schedules,
            "jobs": change.jobs, "since": change.since, "recorded_at": now,
        }
        for change in tally.changes()
    ]  # fmt: skip
    # Insert missing rows first, because planners on several nodes may insert them simultaneously.
    tx.execute(tx.dialect.insert_ignoring_duplicates(zone_changes), [row | dict.fromkeys(_COUNTS, 0) for row in rows])
    tx.execute(_ADD_CHANGES, [
        {(f"key_{name}" if name in _KEY else f"new_{name}"): value for name, value in row.items()} for row in rows
    ])  # fmt: skip


def record_due_schedules(tx: Transaction, schedules: Iterable[Schedule], now: datetime) -> None:
    """Record the moves of schedules that are decided now by an instant of an earlier tzdata release.

    That instant stays where it is; the following ones are computed with the new release.
    """
    tally, newer = ChangeTally(), None
    for schedule in schedules:
        release = schedule.recurrence.release
        is_current = schedule.tzdata is not None and schedule.tzdata >= release.version
        if is_current or schedule.next_fire_at is None or schedule.next_fire_at > now:
            continue
        plain = dataclasses.replace(schedule.recurrence)  # without the state of `resume_from`
        with suppress(InvalidRecurrence):  # the search reached its limit; the planner marks the schedule errored
            tally_schedule(tally, plain, schedule, relocate(plain, schedule.next_fire_at, schedule.utc_offset))
            newer = release
    if newer is not None:
        record_changes(tx, newer, tally, now)


def tally_schedule(tally: ChangeTally, recurrence: Recurrence, row: StoredInstant, at: datetime | None) -> None:
    """Count a schedule whose stored instant is at `at` according to the tzdata of `recurrence`."""
    previous = row.next_fire_at
    assert previous is not None
    after = offset_at(recurrence, at or previous)
    assert after is not None
    if at == previous:
        tally.add(recurrence.timezone, after, after, None)
        return
    before = row.utc_offset
    if before is None:
        before = after if at is None else after + round((at - previous).total_seconds())
    tally.add(recurrence.timezone, before, after, previous, schedules=1)
