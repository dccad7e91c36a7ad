"""The audit on every store: it finds nothing in clean histories, and every damage in damaged ones."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from timebell.client.audits import Audits
from timebell.clock import VirtualClock
from timebell.engine.leader.continuous_audit import Audit, Continuous, audit
from timebell.ids import new_id
from timebell.recurrence import Every
from timebell.store.schedules import actions
from timebell.store.schema import finished, queues, revisions
from timebell.store.schema import schedules as schedules_table

from .helpers import (
    T0,
    CatchUp,
    Cron,
    Overlap,
    Store,
    after,
    claim,
    end,
    ending,
    execute,
    fire,
    job_of,
    put,
    schedule,
    stored,
    stored_schedule,
)
from .script import Script, grace

EVERY_MINUTE = Cron("* * * * *")


async def audited(store: Store, script: Script, **options: Any) -> Audit:
    """The audit of everything that a script did."""
    return await audit(store.hot, script.began - timedelta(days=2), script.now, grace(script.now), **options)


def told(found: Audit) -> list[str]:
    return [f"{one.schedule} {one.finding} {one.at} .. {one.to} {one.count} {one.detail}" for one in found.differences]


@pytest.mark.parametrize("seed", range(12))
@stored
async def test_a_clean_history_has_no_difference(store: Store, seed: int) -> None:
    script = Script(store, seed)
    await script.run(60)
    found = await audited(store, script)
    assert told(found) == [], "\n".join(script.done)
    assert found.counts.expected > 0


# What the database has is damaged by hand; every damage is found, where it is and nowhere else.


async def _history(store: Store, spec: Any = EVERY_MINUTE, **fields: Any) -> str:
    """Twenty minutes of a schedule whose jobs all ran, each on time; its id."""
    fields.setdefault("overlap", Overlap.ALLOW)
    await put(store, schedule(spec, **fields))
    for minute in range(1, 21):
        await fire(store, after(minutes=minute))
        done = [ending(one, at=after(minutes=minute)) for one in await claim(store, after(minutes=minute))]
        await end(store, *done)
    return (await stored_schedule(store)).id


async def _found(store: Store, until: timedelta = timedelta(minutes=20, seconds=30)) -> list[tuple[Any, ...]]:
    found = await audit(store.hot, T0, T0 + until, T0 + until + timedelta(minutes=1))
    assert not found.more
    return [(one.finding.value, _minute(one.at), _minute(one.to), one.count) for one in found.differences]


def _minute(at: Any) -> float:
    return (at - T0) / timedelta(minutes=1)


def _row(minute: float) -> Any:
    return finished.c.scheduled_at == after(minutes=minute)


@stored
async def test_what_is_whole_has_no_difference(store: Store) -> None:
    await _history(store)
    assert await _found(store) == []
    counts = (await audit(store.hot, T0, after(minutes=20, seconds=30), after(minutes=30))).counts
    assert (counts.schedules, counts.expected, counts.fired) == (1, 20, 20)


@stored
async def test_every_row_that_is_deleted_is_missing(store: Store) -> None:
    await _history(store)
    for minutes in ((1,), (20,), (7,), (8, 9), (3, 5)):
        before = await execute(store, select(finished))
        await execute(
            store, delete(finished).where(finished.c.scheduled_at.in_([after(minutes=one) for one in minutes]))
        )
        runs = [(minutes[0], minutes[-1], 2)] if minutes == (8, 9) else [(one, one, 1) for one in minutes]
        assert await _found(store) == [("missing", *run) for run in runs]
        await execute(store, delete(finished))
        await store.run(_insert, [dict(row._mapping) for row in before])


def _insert(tx: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        tx.execute(insert(finished).values(**row))


async def _copy(store: Store, minute: float, **changed: Any) -> None:
    (row,) = await execute(store, select(finished).where(_row(minute)))
    await store.run(_insert, [dict(row._mapping) | {"id": new_id(T0)} | changed])


@stored
async def test_a_row_that_is_there_twice_is_doubled(store: Store) -> None:
    await _history(store)
    await _copy(store, 6)
    assert await _found(store) == [("doubled", 6, 6, 1)]
    await _copy(store, 9, kind="backfill")
    assert await _found(store) == [("doubled", 6, 6, 1), ("doubled", 9, 9, 1)]


@stored
async def test_a_skip_that_is_there_twice_is_doubled(store: Store) -> None:
    await _history(store)
    skipped = {"state": "skipped", "reason": "missed", "attempt": 0, "started_at": None}
    await execute(store, update(finished).where(_row(6)).values(**skipped))
    assert await _found(store) == []
    await _copy(store, 6)
    assert await _found(store) == [("doubled", 6, 6, 1)]


@stored
async def test_a_row_of_no_occurrence_is_unexpected(store: Store) -> None:
    await _history(store)
    for minute, kind in ((6.5, "planned"), (7.5, "backfill"), (8.5, "manual")):
        await _copy(store, 6, scheduled_at=after(minutes=minute), kind=kind, started_at=None)
    assert await _found(store) == [("unexpected", 6.5, 6.5, 1), ("unexpected", 7.5, 7.5, 1)]


@stored
async def test_a_row_that_is_a_second_off_is_unexpected_where_it_is_and_missing_where_it_is_not(store: Store) -> None:
    await _history(store)
    second = timedelta(seconds=1)
    await execute(store, update(finished).where(_row(6)).values(scheduled_at=after(minutes=6) - second))
    assert await _found(store) == [("unexpected", 6 - 1 / 60, 6 - 1 / 60, 1), ("missing", 6, 6, 1)]


@stored
async def test_what_began_before_its_time_is_early(store: Store) -> None:
    await _history(store)
    early = after(minutes=6) - timedelta(milliseconds=1)
    await execute(store, update(finished).where(_row(6)).values(started_at=early))
    await execute(store, update(finished).where(_row(8)).values(run_at=after(minutes=8, seconds=5)))
    assert await _found(store) == [("early", 6, 6, 1), ("early", 8, 8, 1)]


@stored
async def test_a_cursor_that_was_moved_ahead_leaves_occurrences_missing(store: Store) -> None:
    await _history(store)
    await execute(store, update(schedules_table).values(next_fire_at=after(minutes=25)))
    await fire(store, after(minutes=25))
    assert await _found(store, timedelta(minutes=25, seconds=30)) == [("missing", 21, 24, 4)]


@stored
async def test_a_planner_that_is_dead_leaves_occurrences_missing(store: Store) -> None:
    await _history(store)
    assert await _found(store, timedelta(minutes=24, seconds=30)) == [("missing", 21, 24, 4)]
    await execute(store, insert(queues).values(name="*", paused=True))
    assert await _found(store, timedelta(minutes=24, seconds=30)) == []


@stored
async def test_a_paused_schedule_has_nothing_missing(store: Store) -> None:
    id_ = await _history(store)
    await store.run(actions.pause, "default", id_, None, job_of, after(minutes=20, seconds=30))
    found = await audit(store.hot, T0, after(minutes=60), after(minutes=70))
    assert (told(found), found.counts.due) == ([], 39)
    await store.run(actions.resume, "default", id_, False, job_of, after(minutes=60, seconds=30))
    assert await _found(store, timedelta(minutes=60)) == []


@stored
async def test_a_range_row_counts_what_is_in_it(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=3_000))
    until = timedelta(minutes=3_000, seconds=30)
    assert await _found(store, until) == []
    ranged = finished.c.skipped_to > finished.c.scheduled_at
    await execute(store, update(finished).where(ranged).values(skipped_count=finished.c.skipped_count + 3))
    assert [(one[0], one[3]) for one in await _found(store, until)] == [("miscounted", 3)]
    await execute(store, update(finished).where(ranged).values(skipped_count=1))
    assert [one[0] for one in await _found(store, until)] == ["miscounted"]
    late = await audit(store.hot, after(minutes=1_500), after(minutes=2_000), after(minutes=4_000))
    assert [one.finding.value for one in late.differences] == ["miscounted"]  # it reaches in from before
    assert late.counts.skipped == {"missed": 500}
    await execute(store, delete(finished).where(ranged))
    (gone, *others) = await _found(store, until)
    assert (gone[0], gone[1], others) == ("missing", 1, [])


@stored
async def test_an_occurrence_within_a_range_is_doubled(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=3_000))
    (row,) = await execute(store, select(finished).where(finished.c.skipped_count > 1))
    extra = {"id": new_id(T0), "scheduled_at": after(minutes=2_000), "skipped_count": 1, "skipped_to": None}
    await store.run(_insert, [dict(row._mapping) | extra])
    assert await _found(store, timedelta(minutes=3_000)) == [("doubled", 2_000, 2_000, 1)]


@stored
async def test_rows_of_a_schedule_that_nobody_knows_are_unexpected(store: Store) -> None:
    id_ = await _history(store)
    await execute(store, delete(schedules_table))
    assert await _found(store) == []  # the revisions are there, and nothing says that it ended before
    assert [one[:2] for one in await _found(store, timedelta(minutes=22, seconds=30))] == [("missing", 21)]
    await execute(store, delete(revisions))
    found = await _found(store)
    assert {one[0] for one in found} == {"unexpected"} and len(found) == 20
    assert id_


@stored
async def test_a_revision_that_cannot_be_read_is_said(store: Store) -> None:
    await _history(store)
    await execute(store, update(revisions).values(recurrence='{"kind": "moon"}'))
    assert next(iter(await _found(store)))[0] == "unreadable"


@stored
async def test_a_fixed_delay_has_no_grid_but_is_looked_at(store: Store) -> None:
    await _history(store, Every("PT1M", since="last_start"), overlap=Overlap.SKIP)
    assert await _found(store) == []
    (first, *_) = (await execute(store, select(finished.c.scheduled_at).order_by(finished.c.scheduled_at)))[0]
    await _copy(store, _minute(first))
    assert [one[0] for one in await _found(store)] == ["doubled"]


@pytest.mark.parametrize("took", [timedelta(), timedelta(minutes=5)])
@stored
async def test_what_retention_forgets_meanwhile_is_not_missing(store: Store, took: timedelta) -> None:
    """The nodes prune while an audit of all that is kept goes on: it takes its time, and rows of the edge are gone."""
    await _history(store)
    await execute(store, delete(finished).where(finished.c.scheduled_at < after(minutes=4)))
    now = after(minutes=30) - took

    class Slow(VirtualClock):
        def now(self) -> datetime:
            nonlocal now
            now += took
            return now

    async def opened() -> None: ...

    audits = Audits(store, Slow(T0), opened, (after(minutes=30) - T0).total_seconds())
    found = await audits.audit(T0, after(minutes=21))
    assert [(one.finding, one.count) for one in found.differences] == ([] if took else [("missing", 3)])
    assert found.counts.found.total() == (0 if took else 1)


@stored
async def test_it_goes_on_where_it_ended_and_finds_what_is_new(store: Store) -> None:
    await _history(store)
    watch = Continuous(store.hot, T0)
    assert await watch.step(after(minutes=11)) == []
    assert watch.counts.expected == 9
    await execute(store, delete(finished).where(_row(5)))  # was looked at already
    await execute(store, delete(finished).where(_row(14)))
    assert [(one.finding.value, _minute(one.at)) for one in await watch.step(after(minutes=21))] == [("missing", 14)]
    assert await watch.step(after(minutes=21)) == []
    assert watch.counts.expected == 19
