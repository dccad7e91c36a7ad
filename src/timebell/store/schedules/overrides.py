"""One occurrence of a schedule skipped, moved, or put back: an edit like any other, under the schedule's lock."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from datetime import datetime
from typing import Literal

from timebell.errors import Conflict, InvalidInput, InvalidRecurrence, NotFound
from timebell.model.schedule import Schedule
from timebell.recurrence import Override, Recurrence
from timebell.store.schedules.actions import locked
from timebell.store.schedules.schedules import Build, decided_until, edit
from timebell.store.transaction import Transaction

MOST = 1_000

Action = Literal["skip", "move", "undo"]


def override(
    tx: Transaction, tenant_id: str, id_: str, action: Action, at: datetime, to: datetime | None, build: Build,
    now: datetime,
) -> Schedule | None:  # fmt: skip
    """The schedule after the occurrence at `at` was skipped, moved to `to`, or put back; None for an unknown id.

    A moved occurrence may be named by either of its instants. Raises InvalidInput (NOT_AN_OCCURRENCE,
    OCCURRENCE_PAST, TOO_MANY_OVERRIDES), NotFound (OVERRIDE_NOT_FOUND), Conflict (OCCURRENCE_EXISTS).
    """
    found = locked(tx, tenant_id, id_)
    if found is None:
        return None
    recurrence = found.recurrence
    if recurrence.spec.delay is not None:
        raise InvalidInput(
            "Each run of a fixed delay sets the next one: it has no occurrences to name.", code="NOT_AN_OCCURRENCE",
            fix="Pause the schedule instead.",
        )  # fmt: skip
    since = decided_until(found, now)
    mine = next((one for one in recurrence.overrides if at in (one.at, one.to)), None)
    others = tuple(one for one in recurrence.overrides if one is not mine)
    if action == "undo":
        if mine is None:
            raise NotFound(f"Nothing overrides the occurrence at {_shown(at)}.", code="OVERRIDE_NOT_FOUND")
        _to_come(mine.at, since)
        changed = others
    else:
        if mine is None and not recurrence.has(at):
            raise _no_occurrence(recurrence, at)
        _to_come(at, since)
        changed = (*others, Override(at if mine is None else mine.at, to))
        if to is not None:
            _to_come(to, since)
            if dataclasses.replace(recurrence, overrides=others).has(to):
                raise Conflict(
                    f"The schedule has an occurrence at {_shown(to)} already.", code="OCCURRENCE_EXISTS",
                    fix="Move it to another instant, or skip it.",
                )  # fmt: skip
    changed = tuple(one for one in changed if max(one.at, one.to or one.at) > since)  # the rest is history
    if set(changed) == set(recurrence.overrides):
        return found
    if len(changed) > MOST:
        raise InvalidInput(
            f"The schedule has {MOST:,} overrides already.", code="TOO_MANY_OVERRIDES", fix="Change its recurrence."
        )
    bare = dataclasses.replace(recurrence, overrides=())
    return edit(tx, found, dataclasses.replace(found, recurrence=bare), build, now, changed)


def _to_come(at: datetime, since: datetime) -> None:
    if at <= since:
        raise InvalidInput(f"{_shown(at)} has passed.", code="OCCURRENCE_PAST", fix="Give an instant in the future.")


def _no_occurrence(recurrence: Recurrence, at: datetime) -> InvalidInput:
    near: list[datetime] = []
    for look in (recurrence.previous, recurrence.next):
        with suppress(InvalidRecurrence):
            near += [found for found in [look(at)] if found is not None]
    nearest = min(near, key=lambda one: abs(one - at), default=None)
    return InvalidInput(
        f"The schedule has no occurrence at {_shown(at)}.", code="NOT_AN_OCCURRENCE",
        fix="It has none at all." if nearest is None else f"The nearest one is at {_shown(nearest)}.",
    )  # fmt: skip


def _shown(at: datetime) -> str:
    return f"{at.isoformat()}".replace("+00:00", "Z")
