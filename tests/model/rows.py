"""Direct reads of database rows, without the engine."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from timebell.sim.world import World

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """A job, live or finished."""

    id: str
    schedule_id: str | None
    kind: str
    scheduled_at: datetime
    run_at: datetime
    created_at: datetime
    state: str
    attempt: int
    attempts_used: int
    serial: bool
    replaces: str | None
    metadata: str | None
    hold: str | None
    cancel_requested: bool
    finished_at: datetime | None
    reason: str | None
    result: str | None
    count: int
    to: datetime | None
    queue: str
    group: str | None


_BOTH = (
    "id, schedule_id, kind, scheduled_at, run_at, created_at, state, attempt, attempts_used, serial, replaces, metadata"
)
_ROWS = (
    f"SELECT {_BOTH}, hold, cancel_requested, NULL, NULL, NULL, 1, NULL, queue, group_name FROM timebell_jobs"
    f" UNION ALL SELECT {_BOTH}, NULL, 0, finished_at, reason, result, skipped_count, skipped_to, queue, group_name"
    " FROM timebell_finished"
)


def instant(micros: int | None) -> Any:
    """Return the instant of a stored timestamp."""
    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def rows_of(world: World) -> list[Row]:
    """Return all jobs."""
    driver = world.database._driver
    assert driver is not None
    found = []
    for row in driver.execute(_ROWS):
        values = list(row)
        for n in (3, 4, 5, 14, 18):
            values[n] = instant(values[n])
        found.append(Row(*values))
    return found


def cursors(world: World) -> dict[str, tuple[datetime | None, bool, str | None]]:
    """Return the next instant, `enabled` and the error of each schedule."""
    driver = world.database._driver
    assert driver is not None
    found = driver.execute("SELECT id, next_fire_at, enabled, error FROM timebell_schedules")
    return {id_: (instant(at), bool(enabled), error) for id_, at, enabled, error in found}


def written(world: World) -> list[str]:
    """Return the jobs whose handlers wrote rows in the completing transaction."""
    driver = world.database._driver
    assert driver is not None
    return [job for (job,) in driver.execute("SELECT job FROM written")]


def starts(world: World, queue: str) -> list[tuple[datetime, int]]:
    """Return the starts that a queue stores for its rate: (instant, number)."""
    driver = world.database._driver
    assert driver is not None
    encoded = [
        text for (text,) in driver.execute("SELECT starts FROM timebell_queues WHERE name = ?", (queue,)) if text
    ]
    return [(instant(at), count) for text in encoded for at, count in json.loads(text)]
