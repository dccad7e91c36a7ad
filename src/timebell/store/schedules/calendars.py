"""Calendar repository. All versions are kept; a new one is applied to the schedules that follow the calendar."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, exists, insert, select

from timebell.model.page import Page
from timebell.model.schedule import Schedule
from timebell.recurrence import Calendar, OnCalendar
from timebell.store.jobs import repository
from timebell.store.schedules import schedules as schedules_
from timebell.store.schedules.rows import try_schedule_from_row
from timebell.store.schedules.schedules import JobBuilder, edit
from timebell.store.schema import calendars, schedules, tenants
from timebell.store.transaction import Transaction

SHARED_TENANT_ID = "default"  # the tenant whose calendars all others may use


@dataclass(frozen=True, slots=True)
class SavedCalendar:
    """A calendar's newest version, the number of schedules it was applied to, and the ids of those that errored."""

    name: str
    version: int
    schedules: int = 0
    errored_schedules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CalendarVersion:
    """A version of a calendar and the tenant that owns it. `created_at` is aware UTC."""

    tenant_id: str
    calendar: Calendar
    created_at: datetime


def list_versions(tx: Transaction, tenant_id: str, name: str) -> list[CalendarVersion]:
    """Return every version of a calendar, newest first: the tenant's own, otherwise the shared one."""
    for owner in dict.fromkeys((tenant_id, SHARED_TENANT_ID)):
        matches = (calendars.c.tenant_id == owner) & (calendars.c.name == name)
        rows = tx.execute(select(calendars).where(matches).order_by(calendars.c.version.desc())).all()
        if rows:
            return [_version_from_row(row) for row in rows]
    return []


def list_calendars(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[CalendarVersion]:
    """Return the newest version of each calendar that a tenant may use, sorted by name."""
    usable = calendars.c.tenant_id.in_((tenant_id, SHARED_TENANT_ID))
    query = select(calendars.c.name).where(usable).distinct().order_by(calendars.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(calendars.c.name > after)
    names = list(tx.execute(query).scalars())
    newest = [list_versions(tx, tenant_id, name)[0] for name in names[:limit]]
    return Page(newest, names[limit - 1] if len(names) > limit else None)


def _version_from_row(row: Row[Any]) -> CalendarVersion:
    return CalendarVersion(
        row.tenant_id, _calendar_from_json(row.definition).with_name(row.name, row.version), row.created_at
    )


def find_calendar(tx: Transaction, tenant_id: str, name: str, version: int | None = None) -> Calendar | None:
    """Return a calendar by name, the newest version by default; a tenant's own precedes the shared one."""
    for owner in dict.fromkeys((tenant_id, SHARED_TENANT_ID)):
        matches = (calendars.c.tenant_id == owner) & (calendars.c.name == name)
        rows = tx.execute(select(calendars).where(matches).order_by(calendars.c.version.desc())).all()
        if rows:
            row = next((row for row in rows if version in (None, row.version)), None)
            return None if row is None else _calendar_from_json(row.definition).with_name(name, row.version)
    return None


def save_calendar(
    tx: Transaction, tenant_id: str, name: str, calendar: Calendar, build: JobBuilder, now: datetime
) -> SavedCalendar:
    """Store a calendar as the next version, unless it equals the newest, and apply it to the schedules following it.

    Applying it is an edit of each schedule, so it fires nothing by itself and loses no occurrence. A calendar of the
    shared tenant applies to the schedules of all tenants without their own calendar of this name.
    """
    repository.ensure_tenants(tx, {tenant_id}, now)
    tx.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update())
    matches = (calendars.c.tenant_id == tenant_id) & (calendars.c.name == name)
    newest = tx.execute(select(calendars).where(matches).order_by(calendars.c.version.desc()).limit(1)).first()
    bare = calendar.with_name(None)
    if newest is not None and _calendar_from_json(newest.definition) == bare:
        return SavedCalendar(name, newest.version)
    version = 1 if newest is None else newest.version + 1
    definition = orjson.dumps(bare.to_json(), option=orjson.OPT_SORT_KEYS).decode()
    values = {"tenant_id": tenant_id, "name": name, "version": version, "definition": definition, "created_at": now}
    tx.execute(insert(calendars).values(**values))
    return _update_following_schedules(
        tx, tenant_id, calendar.with_name(name, version), SavedCalendar(name, version), build, now
    )


def _update_following_schedules(
    tx: Transaction, tenant_id: str, calendar: Calendar, saved: SavedCalendar, build: JobBuilder, now: datetime
) -> SavedCalendar:
    affected = schedules.c.tenant_id == tenant_id
    if tenant_id == SHARED_TENANT_ID:
        own = (calendars.c.tenant_id == schedules.c.tenant_id) & (calendars.c.name == saved.name)
        affected |= ~exists(select(calendars.c.name).where(own))
    query = select(schedules).where(schedules.c.calendar == saved.name, affected).order_by(schedules.c.id)
    changed, errored = 0, []
    for row in tx.execute(query.with_for_update()).all():
        old = try_schedule_from_row(row)
        if old is None or not isinstance(old.recurrence.spec, OnCalendar):
            errored.append(row.id)
            continue
        edited = edit(tx, old, _with_calendar(old, calendar), build, now)
        changed += 1
        if edited.error is not None:
            errored.append(edited.id)
    return dataclasses.replace(saved, schedules=changed, errored_schedules=tuple(errored))


def _with_calendar(schedule: Schedule, calendar: Calendar) -> Schedule:
    spec = dataclasses.replace(schedule.recurrence.spec, calendar=calendar)  # type: ignore[type-var]
    return dataclasses.replace(schedule, recurrence=dataclasses.replace(schedule.recurrence, spec=spec, overrides=()))


def upsert_schedule_on_calendar(
    tx: Transaction, schedule: Schedule, build: JobBuilder, now: datetime, *, replace: bool, revision: int | None = None
) -> Schedule:  # fmt: skip
    """Call `schedules.upsert_schedule` with the newest version of the calendar that the schedule follows."""
    return schedules_.upsert_schedule(
        tx, _with_newest_calendar(tx, schedule), build, now, replace=replace, revision=revision
    )


def _with_newest_calendar(tx: Transaction, schedule: Schedule) -> Schedule:
    """Return the schedule on its calendar's newest version, which may be newer than the one it was drafted with.

    The shared lock on the tenants orders this with `save_calendar`: a concurrent save either has committed and is
    read here, or waits and then applies its version to this schedule.
    """
    spec = schedule.recurrence.spec
    if not isinstance(spec, OnCalendar) or not spec.follows or spec.calendar.name is None:
        return schedule
    owners = tenants.c.id.in_({schedule.tenant_id, SHARED_TENANT_ID})
    tx.execute(select(tenants.c.id).where(owners).order_by(tenants.c.id).with_for_update(read=True))
    newest = find_calendar(tx, schedule.tenant_id, spec.calendar.name)
    if newest is None or newest == spec.calendar:
        return schedule
    changed = _with_calendar(schedule, newest)
    return dataclasses.replace(changed, next_fire_at=changed.recurrence.next(schedule.created_at))


def _calendar_from_json(definition: str) -> Calendar:
    return Calendar.from_json(orjson.loads(definition))
