"""Calendars by name: every version stays, the newest counts, and the schedules that follow a name get it."""

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
from timebell.store.schedules.schedules import Build, edit, legible
from timebell.store.schema import calendars, schedules, tenants
from timebell.store.transaction import Transaction

SHARED = "default"  # the tenant whose calendars all others may use


@dataclass(frozen=True, slots=True)
class SavedCalendar:
    """A calendar's version now; how many schedules got it; and the ids of those it leaves without any occurrence."""

    name: str
    version: int
    schedules: int = 0
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a calendar, and whose it is. `created_at` is aware UTC."""

    tenant_id: str
    calendar: Calendar
    created_at: datetime


def versions(tx: Transaction, tenant_id: str, name: str) -> list[Version]:
    """Every version of the calendar that this name is in a tenant, newest first: its own, else the shared."""
    for owner in dict.fromkeys((tenant_id, SHARED)):
        mine = (calendars.c.tenant_id == owner) & (calendars.c.name == name)
        rows = tx.execute(select(calendars).where(mine).order_by(calendars.c.version.desc())).all()
        if rows:
            return [_version(row) for row in rows]
    return []


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Version]:
    """The newest version of each calendar that a tenant may use, by name."""
    usable = calendars.c.tenant_id.in_((tenant_id, SHARED))
    query = select(calendars.c.name).where(usable).distinct().order_by(calendars.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(calendars.c.name > after)
    names = list(tx.execute(query).scalars())
    found = [versions(tx, tenant_id, name)[0] for name in names[:limit]]
    return Page(found, names[limit - 1] if len(names) > limit else None)


def _version(row: Row[Any]) -> Version:
    return Version(row.tenant_id, _read(row.definition).named(row.name, row.version), row.created_at)


def find(tx: Transaction, tenant_id: str, name: str, version: int | None = None) -> Calendar | None:
    """A calendar under its name, the newest version unless one is given; a tenant's own goes before the shared."""
    for owner in dict.fromkeys((tenant_id, SHARED)):
        mine = (calendars.c.tenant_id == owner) & (calendars.c.name == name)
        rows = tx.execute(select(calendars).where(mine).order_by(calendars.c.version.desc())).all()
        if rows:
            row = next((row for row in rows if version in (None, row.version)), None)
            return None if row is None else _read(row.definition).named(name, row.version)
    return None


def save(tx: Transaction, tenant_id: str, name: str, calendar: Calendar, build: Build, now: datetime) -> SavedCalendar:
    """Write a calendar as the next version, unless it is what the newest one is, and give it to every schedule that
    follows the name: an edit of each, so that it fires nothing by itself and loses nothing.

    A calendar of the shared tenant goes to the schedules of all tenants that have none of this name.
    """
    repository.make_tenants(tx, {tenant_id}, now)
    tx.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update())
    mine = (calendars.c.tenant_id == tenant_id) & (calendars.c.name == name)
    newest = tx.execute(select(calendars).where(mine).order_by(calendars.c.version.desc()).limit(1)).first()
    bare = calendar.named(None)
    if newest is not None and _read(newest.definition) == bare:
        return SavedCalendar(name, newest.version)
    version = 1 if newest is None else newest.version + 1
    definition = orjson.dumps(bare.to_json(), option=orjson.OPT_SORT_KEYS).decode()
    values = {"tenant_id": tenant_id, "name": name, "version": version, "definition": definition, "created_at": now}
    tx.execute(insert(calendars).values(**values))
    return _hand_out(tx, tenant_id, calendar.named(name, version), SavedCalendar(name, version), build, now)


def _hand_out(
    tx: Transaction, tenant_id: str, calendar: Calendar, saved: SavedCalendar, build: Build, now: datetime
) -> SavedCalendar:
    theirs = schedules.c.tenant_id == tenant_id
    if tenant_id == SHARED:
        own = (calendars.c.tenant_id == schedules.c.tenant_id) & (calendars.c.name == saved.name)
        theirs |= ~exists(select(calendars.c.name).where(own))
    query = select(schedules).where(schedules.c.calendar == saved.name, theirs).order_by(schedules.c.id)
    changed, set_aside = 0, []
    for row in tx.execute(query.with_for_update()).all():
        old = legible(row)
        if old is None or not isinstance(old.recurrence.spec, OnCalendar):
            set_aside.append(row.id)
            continue
        edited = edit(tx, old, _with(old, calendar), build, now)
        changed += 1
        if edited.fault is not None:
            set_aside.append(edited.id)
    if changed:
        tx.notify()
    return dataclasses.replace(saved, schedules=changed, set_aside=tuple(set_aside))


def _with(schedule: Schedule, calendar: Calendar) -> Schedule:
    spec = dataclasses.replace(schedule.recurrence.spec, calendar=calendar)  # type: ignore[type-var]
    return dataclasses.replace(schedule, recurrence=dataclasses.replace(schedule.recurrence, spec=spec, overrides=()))


def put(
    tx: Transaction, schedule: Schedule, build: Build, now: datetime, *, replace: bool, revision: int | None = None
) -> Schedule:  # fmt: skip
    """As `schedules.put`, with the newest version of the calendar that the schedule follows."""
    return schedules_.put(tx, _current(tx, schedule), build, now, replace=replace, revision=revision)


def _current(tx: Transaction, schedule: Schedule) -> Schedule:
    """Whatever was the newest version when the schedule was drafted; one that is being saved goes first or finds it."""
    spec = schedule.recurrence.spec
    if not isinstance(spec, OnCalendar) or not spec.follows or spec.calendar.name is None:
        return schedule
    both = tenants.c.id.in_({schedule.tenant_id, SHARED})
    tx.execute(select(tenants.c.id).where(both).order_by(tenants.c.id).with_for_update(read=True))
    newest = find(tx, schedule.tenant_id, spec.calendar.name)
    if newest is None or newest == spec.calendar:
        return schedule
    changed = _with(schedule, newest)
    return dataclasses.replace(changed, next_fire_at=changed.recurrence.next(schedule.created_at))


def _read(definition: str) -> Calendar:
    return Calendar.from_json(orjson.loads(definition))
