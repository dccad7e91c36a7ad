"""Skip, move or restore single occurrences of a schedule. Each change is an edit under the schedule's row lock."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from datetime import datetime
from typing import Literal

from timebell.errors import Conflict, InvalidInput, InvalidRecurrence, NotFound
from timebell.model.schedule import Schedule
from timebell.recurrence import Override, Recurrence
from timebell.store.schedules.actions import lock_schedule
from timebell.store.schedules.schedules import JobBuilder, decided_until, edit
from timebell.store.transaction import Transaction

MAX_OVERRIDES = 1_000

OverrideAction = Literal["skip", "move", "undo"]


def override_occurrence(
    tx: Transaction, tenant_id: str, id_: str, action: OverrideAction, at: datetime, to: datetime | None,
    build: JobBuilder, now: datetime,
) -> Schedule | None:  # fmt: skip
    """Skip the occurrence at `at`, move it to `to`, or undo an override; return the schedule.

    A moved occurrence can be specified by its original or its new instant. None for an unknown id. Raises InvalidInput
    (NOT_AN_OCCURRENCE, OCCURRENCE_PAST, TOO_MANY_OVERRIDES), NotFound (OVERRIDE_NOT_FOUND), Conflict
    (OCCURRENCE_EXISTS).
    """
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None:
        return None
    recurrence = schedule.recurrence
    if recurrence.spec.delay is not None:
        raise InvalidInput(
            "A schedule with a fixed delay has no planned occurrences to override.", code="NOT_AN_OCCURRENCE",
            fix="Pause the schedule instead.",
        )  # fmt: skip
    since = decided_until(schedule, now)
    existing = next((override for override in recurrence.overrides if at in (override.at, override.to)), None)
    others = tuple(override for override in recurrence.overrides if override is not existing)
    if action == "undo":
        if existing is None:
            raise NotFound(f"The occurrence at {_format_instant(at)} has no override.", code="OVERRIDE_NOT_FOUND")
        _require_future(existing.at, since)
        changed = others
    else:
        if existing is None and not recurrence.has(at):
            raise _not_an_occurrence(recurrence, at)
        _require_future(at, since)
        changed = (*others, Override(at if existing is None else existing.at, to))
        if to is not None:
            _require_future(to, since)
            if dataclasses.replace(recurrence, overrides=others).has(to):
                raise Conflict(
                    f"The schedule already has an occurrence at {_format_instant(to)}.", code="OCCURRENCE_EXISTS",
                    fix="Move it to another instant, or skip it.",
                )  # fmt: skip
    # Overrides of decided occurrences have no effect and are dropped.
    changed = tuple(override for override in changed if max(override.at, override.to or override.at) > since)
    if set(changed) == set(recurrence.overrides):
        return schedule
    if len(changed) > MAX_OVERRIDES:
        raise InvalidInput(
            f"The schedule already has {MAX_OVERRIDES:,} overrides.",
            code="TOO_MANY_OVERRIDES",
            fix="Change its recurrence.",
        )
    bare = dataclasses.replace(recurrence, overrides=())
    return edit(tx, schedule, dataclasses.replace(schedule, recurrence=bare), build, now, changed)


def _require_future(at: datetime, since: datetime) -> None:
    if at <= since:
        raise InvalidInput(
            f"{_format_instant(at)} has passed.", code="OCCURRENCE_PAST", fix="Specify an instant in the future."
        )


def _not_an_occurrence(recurrence: Recurrence, at: datetime) -> InvalidInput:
    neighbors: list[datetime] = []
    for search in (recurrence.previous, recurrence.next):
        with suppress(InvalidRecurrence):
            neighbors += [instant for instant in [search(at)] if instant is not None]
    nearest = min(neighbors, key=lambda instant: abs(instant - at), default=None)
    return InvalidInput(
        f"The schedule has no occurrence at {_format_instant(at)}.", code="NOT_AN_OCCURRENCE",
        fix="It has no occurrences." if nearest is None else f"The nearest one is at {_format_instant(nearest)}.",
    )  # fmt: skip


def _format_instant(at: datetime) -> str:
    return f"{at.isoformat()}".replace("+00:00", "Z")
