"""Schedules as rows: what is written of one, and what is read of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import orjson
from sqlalchemy import Row

from timebell.model.policy import CatchUp, Lateness, Overlap, Retry
from timebell.model.schedule import Action, Policies, Schedule
from timebell.recurrence import OnCalendar, Recurrence
from timebell.recurrence.tzdata_diff import carried, offset_at
from timebell.store.schedules.recurrence_column import recurrence_of

log = logging.getLogger("timebell.planner")


def row_of(schedule: Schedule) -> dict[str, Any]:
    action, policies = schedule.action, schedule.policies
    spoken = {name: getattr(action, name) for name in Action.__slots__}
    spoken["retry"] = action.retry.to_json() if action.retry else None
    for name in ("description", "labels", "group", "condition", "unless"):
        if not spoken[name]:
            del spoken[name]
    return {
        "id": schedule.id, "tenant_id": schedule.tenant_id, "name": schedule.name,
        "recurrence": _dump(schedule.recurrence.to_json()), "calendar": _followed(schedule),
        "target": None if action.target is None else action.target.get("name"), "action": _dump(spoken),
        "policies": _dump(_policies(policies)),
        "enabled": schedule.enabled, "revision": schedule.revision, "code_hash": schedule.code_hash,
        "fault": schedule.fault, "next_fire_at": schedule.next_fire_at,
        "last_fired_at": schedule.last_fired_at, "created_at": schedule.created_at,
        "updated_at": schedule.updated_at, "paused_at": schedule.paused_at, "pause_reason": schedule.pause_reason,
        "created_by": schedule.created_by,
        **stamp(schedule.recurrence, schedule.next_fire_at),
    }  # fmt: skip


def stamp(recurrence: Recurrence, next_fire_at: datetime | None) -> dict[str, Any]:
    """What is kept of the zone data that gave the next instant, so that other data can move it."""
    return {"tzdata": recurrence.release.version, "utc_offset": offset_at(recurrence, next_fire_at)}


def stamped(schedule: Schedule, next_fire_at: datetime | None) -> dict[str, Any]:
    """The stamp of a schedule's next instant: as it was, where that is still the one that other data gave."""
    if next_fire_at is not None and next_fire_at == schedule.next_fire_at:
        return {"tzdata": schedule.tzdata, "utc_offset": schedule.utc_offset}
    return stamp(schedule.recurrence, next_fire_at)


_FIRST_POLICIES = ("overlap", "catch_up", "catch_up_window", "catch_up_limit", "missed_after")
_DEFAULT = Policies()


def _policies(policies: Policies) -> dict[str, Any]:
    """Policies as JSON. Later ones are left out unless they say something: nodes of older releases read the rest."""
    values = {name: getattr(policies, name) for name in Policies.__slots__}
    return {
        name: value for name, value in values.items() if name in _FIRST_POLICIES or value != getattr(_DEFAULT, name)
    }


def _followed(schedule: Schedule) -> str | None:
    """The name of the calendar of which it is given each new version."""
    spec = schedule.recurrence.spec
    return spec.calendar.name if isinstance(spec, OnCalendar) and spec.follows else None


def _dump(value: dict[str, Any]) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def legible(row: Row[Any]) -> Schedule | None:
    """As `read`; None for a row that cannot be read."""
    try:
        return read(row)
    except Exception:
        log.exception("schedule %s cannot be read", row.id)
        return None


def read(row: Row[Any]) -> Schedule:
    """A stored row as a Schedule."""
    return schedule_of(row._mapping, lambda instant: instant)


def schedule_of(
    row: Mapping[Any, Any], instant: Callable[[Any], datetime | None], action: Action | None = None
) -> Schedule:
    """Column values as a Schedule; `instant` reads those of time. If other zone data gave its next instant, its
    recurrence goes on from there."""
    created_at, updated_at = instant(row["created_at"]), instant(row["updated_at"])
    assert created_at is not None
    assert updated_at is not None
    parts, next_fire_at = read_parts(row, action), instant(row["next_fire_at"])
    if row["tzdata"] != parts["recurrence"].release.version:
        parts["recurrence"] = carried(parts["recurrence"], next_fire_at, row["utc_offset"])
    return Schedule(
        id=str(row["id"]), tenant_id=row["tenant_id"], name=row["name"], **parts,
        enabled=bool(row["enabled"]), revision=row["revision"], code_hash=row["code_hash"], fault=row["fault"],
        next_fire_at=next_fire_at, last_fired_at=instant(row["last_fired_at"]),
        created_at=created_at, updated_at=updated_at, paused_at=instant(row["paused_at"]),
        pause_reason=row["pause_reason"], created_by=row["created_by"], tzdata=row["tzdata"],
        utc_offset=row["utc_offset"],
    )  # fmt: skip


def read_parts(row: Mapping[Any, Any], action: Action | None = None) -> dict[str, Any]:
    """What a schedule and each of its revisions have in common: recurrence, action, policies."""
    return {
        "recurrence": recurrence_of(row["recurrence"]), "action": action or _read_action(row["action"]),
        "policies": _read_policies(row["policies"]),
    }  # fmt: skip


def _read_action(text: str) -> Action:
    action = orjson.loads(text)
    action["retry"] = Retry.read(action["retry"])
    return Action(**action)


@lru_cache(maxsize=10_000)
def planned_action(text: str) -> Action:
    """As a planner reads it, again and again: it makes jobs of it and changes nothing in it."""
    return _read_action(text)


@lru_cache(maxsize=1000)
def _read_policies(text: str) -> Policies:
    policies = orjson.loads(text)
    for name, words in (("overlap", Overlap), ("catch_up", CatchUp), ("lateness", Lateness)):
        if name in policies:
            policies[name] = words(policies[name])
    if "notify" in policies:
        policies["notify"] = tuple(policies["notify"])
    return Policies(**policies)
