"""Conversion between schedules and database rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import orjson
from sqlalchemy import Row

from timebell.model.policy import CatchUp, Overlap, Retry, WhenLate
from timebell.model.schedule import Action, Policies, Schedule
from timebell.recurrence import OnCalendar, Recurrence
from timebell.recurrence.tzdata_diff import offset_at, resume_from
from timebell.store.schedules.recurrence_column import recurrence_from_json

log = logging.getLogger("timebell.planner")


def schedule_to_row(schedule: Schedule) -> dict[str, Any]:
    """Return the column values of a schedule."""
    action, policies = schedule.action, schedule.policies
    action_values = {name: getattr(action, name) for name in Action.__slots__}
    action_values["retry"] = action.retry.to_json() if action.retry else None
    for name in ("description", "labels", "group", "condition", "unless"):
        if not action_values[name]:
            del action_values[name]
    return {
        "id": schedule.id, "tenant_id": schedule.tenant_id, "name": schedule.name,
        "recurrence": _to_json(schedule.recurrence.to_json()), "calendar": _followed_calendar(schedule),
        "target": None if action.target is None else action.target.get("name"), "action": _to_json(action_values),
        "policies": _to_json(_policies_to_json(policies)),
        "enabled": schedule.enabled, "revision": schedule.revision, "code_hash": schedule.code_hash,
        "error": schedule.error, "next_fire_at": schedule.next_fire_at,
        "last_fired_at": schedule.last_fired_at, "created_at": schedule.created_at,
        "updated_at": schedule.updated_at, "paused_at": schedule.paused_at, "pause_reason": schedule.pause_reason,
        "created_by": schedule.created_by,
        **tzdata_columns(schedule.recurrence, schedule.next_fire_at),
    }  # fmt: skip


def tzdata_columns(recurrence: Recurrence, next_fire_at: datetime | None) -> dict[str, Any]:
    """Return the tzdata release and UTC offset behind `next_fire_at`, so that a newer release can move it."""
    return {"tzdata": recurrence.release.version, "utc_offset": offset_at(recurrence, next_fire_at)}


def updated_tzdata_columns(schedule: Schedule, next_fire_at: datetime | None) -> dict[str, Any]:
    """Return the tzdata columns for `next_fire_at`; the stored ones if that instant is unchanged."""
    if next_fire_at is not None and next_fire_at == schedule.next_fire_at:
        return {"tzdata": schedule.tzdata, "utc_offset": schedule.utc_offset}
    return tzdata_columns(schedule.recurrence, next_fire_at)


_ALWAYS_STORED_POLICIES = ("overlap", "catch_up", "catch_up_window", "catch_up_limit", "missed_after")
_DEFAULT_POLICIES = Policies()


def _policies_to_json(policies: Policies) -> dict[str, Any]:
    """Return policies as JSON. Newer fields are omitted at their default, so that older nodes can read the row."""
    values = {name: getattr(policies, name) for name in Policies.__slots__}
    return {
        name: value
        for name, value in values.items()
        if name in _ALWAYS_STORED_POLICIES or value != getattr(_DEFAULT_POLICIES, name)
    }


def _followed_calendar(schedule: Schedule) -> str | None:
    """Return the name of the calendar whose new versions the schedule adopts; None if it adopts none."""
    spec = schedule.recurrence.spec
    return spec.calendar.name if isinstance(spec, OnCalendar) and spec.follows else None


def _to_json(value: dict[str, Any]) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def try_schedule_from_row(row: Row[Any]) -> Schedule | None:
    """Return a stored row as a Schedule; None (logged) if the row cannot be decoded."""
    try:
        return schedule_from_row(row)
    except Exception:
        log.exception("could not decode schedule %s", row.id)
        return None


def schedule_from_row(row: Row[Any]) -> Schedule:
    """Return a stored row as a Schedule."""
    return schedule_from_columns(row._mapping, lambda instant: instant)


def schedule_from_columns(
    row: Mapping[Any, Any], parse_instant: Callable[[Any], datetime | None], action: Action | None = None
) -> Schedule:
    """Return column values as a Schedule; `parse_instant` converts timestamps.

    If another tzdata release computed `next_fire_at`, the recurrence resumes from that stored instant.
    """
    created_at, updated_at = parse_instant(row["created_at"]), parse_instant(row["updated_at"])
    assert created_at is not None
    assert updated_at is not None
    parts, next_fire_at = spec_from_row(row, action), parse_instant(row["next_fire_at"])
    if row["tzdata"] != parts["recurrence"].release.version:
        parts["recurrence"] = resume_from(parts["recurrence"], next_fire_at, row["utc_offset"])
    return Schedule(
        id=str(row["id"]), tenant_id=row["tenant_id"], name=row["name"], **parts,
        enabled=bool(row["enabled"]), revision=row["revision"], code_hash=row["code_hash"], error=row["error"],
        next_fire_at=next_fire_at, last_fired_at=parse_instant(row["last_fired_at"]),
        created_at=created_at, updated_at=updated_at, paused_at=parse_instant(row["paused_at"]),
        pause_reason=row["pause_reason"], created_by=row["created_by"], tzdata=row["tzdata"],
        utc_offset=row["utc_offset"],
    )  # fmt: skip


def spec_from_row(row: Mapping[Any, Any], action: Action | None = None) -> dict[str, Any]:
    """Return recurrence, action and policies, the fields shared by a schedule and its revisions."""
    return {
        "recurrence": recurrence_from_json(row["recurrence"]), "action": action or _action_from_json(row["action"]),
        "policies": _policies_from_json(row["policies"]),
    }  # fmt: skip


def _action_from_json(text: str) -> Action:
    action = orjson.loads(text)
    action["retry"] = Retry.parse(action["retry"])
    return Action(**action)


@lru_cache(maxsize=10_000)
def cached_action_from_json(text: str) -> Action:
    """Return a stored action from a cache. For the planner, which decodes the same text often and never mutates it."""
    return _action_from_json(text)


@lru_cache(maxsize=1000)
def _policies_from_json(text: str) -> Policies:
    policies = orjson.loads(text)
    for name, enum in (("overlap", Overlap), ("catch_up", CatchUp), ("when_late", WhenLate)):
        if name in policies:
            policies[name] = enum(policies[name])
    if "notify" in policies:
        policies["notify"] = tuple(policies["notify"])
    return Policies(**policies)
