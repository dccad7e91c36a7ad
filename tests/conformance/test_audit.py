"""Audit: no differences in clean histories, and every difference in damaged ones."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from timebell.client.audits import Audits
from timebell.clock import VirtualClock
from timebell.engine.leader.continuous_audit import AuditResult, ContinuousAudit, run_audit
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
    build_job,
    claim,
    end,
    ending,
    execute,
    fire,
    put,
    schedule,
    stored,
    stored_schedule,
)
from .random_history import Script, grace

EVERY_MINUTE = Cron("* * * * *")


async def audited(store: Store, script: Script, **options: Any) -> AuditResult:
    """Audit the whole history of a script."""
    return await run_audit(
        store.run_autocommit, script.began - timedelta(days=2), script.now, grace(script.now), **options
    )


def describe_differences(found: AuditResult) -> list[str]:
    return [f"{one.schedule} {one.finding} {one.at} .. {one.to} {one.count} {one.detail}" for one in found.differences]


@pytest.mark.parametrize("seed", range(12))
@stored
async def test_a_clean_history_has_no_difference(store: Store, seed: int) -> None:
    script = Script(store, seed)
    await script.run(60)
    found = await audited(store, script)
    assert describe_differences(found) == [], "\n".join(script.done)
    assert found.counts.expected > 0


# Rows are damaged by SQL; the audit reports exactly the damaged occurrences.


async def _history(store: Store, spec: Any = EVERY_MINUTE, **fields: Any) -> str:
    """Write twenty minutes of a schedule whose jobs all ran on time; return its id."""
    fields.setdefault("overlap", Overlap.ALLOW)
    await put(store, schedule(spec, **fields))
    for minute in range(1, 21):
        await fire(store, after(minutes=minute))
        done = [ending(one, at=after(minutes=minute)) for one in await claim(store, after(minutes=minute))]
        await end(store, *done)
    return (await stored_schedule(store)).id


async def _found(store: Store, until: timedelta = timedelta(minutes=20, seconds=30)) -> list[tuple[Any, ...]]:
    found = await run_audit(store.run_autocommit, T0, T0 + until, T0 + until + timedelta(minutes=1))
    assert not found.truncated
    return [(one.finding.value, _minute(one.at), _minute(one.to), one.count) for one in found.differences]


def _minute(at: Any) -> float:
    return (at - T0) / timedelta(minutes=1)


def _row(minute: float) -> Any:
    return finished.c.scheduled_at == after(minutes=minute)


@stored
async def test_a_complete_schedule_has_no_difference(store: Store) -> None:
    await _history(store)
    assert await _found(store) == []
    counts = (await run_audit(store.run_autocommit, T0, after(minutes=20, seconds=30), after(minutes=30))).counts
    assert (counts.schedules, counts.expected, counts.fired) == (1, 20, 20)


@stored
async def test_every_deleted_row_is_reported_missing(store: Store) -> None:
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
async def test_a_duplicate_row_is_reported(store: Store) -> None:
    await _history(store)
    await _copy(store, 6)
    assert await _found(store) == [("doubled", 6, 6, 1)]
    await _copy(store, 9, kind="backfill")
    assert await _found(store) == [("doubled", 6, 6, 1), ("doubled", 9, 9, 1)]


@stored
async def test_a_duplicate_skip_is_reported(store: Store) -> None:
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
async def test_a_row_shifted_by_a_second_is_both_unexpected_and_missing(store: Store) -> None:
    await _history(store)
    second = timedelta(seconds=1)
    await execute(store, update(finished).where(_row(6)).values(scheduled_at=after(minutes=6) - second))
    assert await _found(store) == [("unexpected", 6 - 1 / 60, 6 - 1 / 60, 1), ("missing", 6, 6, 1)]


@stored
async def test_an_attempt_that_started_before_its_time_is_early(store: Store) -> None:
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
async def test_a_dead_planner_leaves_occurrences_missing(store: Store) -> None:
    await _history(store)
    assert await _found(store, timedelta(minutes=24, seconds=30)) == [("missing", 21, 24, 4)]
    await execute(store, insert(queues).values(name="*", paused=True))
    assert await _found(store, timedelta(minutes=24, seconds=30)) == []


@stored
async def test_a_paused_schedule_has_nothing_missing(store: Store) -> None:
    id_ = await _history(store)
    await store.run(actions.pause_schedule, "default", id_, None, build_job, after(minutes=20, seconds=30))
    found = await run_audit(store.run_autocommit, T0, after(minutes=60), after(minutes=70))
    assert (describe_differences(found), found.counts.due) == ([], 39)
    await store.run(actions.resume_schedule, "default", id_, False, build_job, after(minutes=60, seconds=30))
    assert await _found(store, timedelta(minutes=60)) == []


@stored
async def test_a_range_row_accounts_for_all_its_occurrences(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=3_000))
    until = timedelta(minutes=3_000, seconds=30)
    assert await _found(store, until) == []
    ranged = finished.c.skipped_to > finished.c.scheduled_at
    await execute(store, update(finished).where(ranged).values(skipped_count=finished.c.skipped_count + 3))
    assert [(one[0], one[3]) for one in await _found(store, until)] == [("miscounted", 3)]
    await execute(store, update(finished).where(ranged).values(skipped_count=1))
    assert [one[0] for one in await _found(store, until)] == ["miscounted"]
    late = await run_audit(store.run_autocommit, after(minutes=1_500), after(minutes=2_000), after(minutes=4_000))
    assert [one.finding.value for one in late.differences] == ["miscounted"]  # its range starts earlier
    assert late.counts.skipped == {"missed": 500}
    await execute(store, delete(finished).where(ranged))
    (gone, *others) = await _found(store, until)
    assert (gone[0], gone[1], others) == ("missing", 1, [])


@stored
async def test_a_range_row_of_each_schedule_is_found_from_within_it(store: Store) -> None:
    for name in ("first", "second", "third"):
        await put(store, schedule(name=name, catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=3_000))
    late = await run_audit(store.run_autocommit, after(minutes=1_500), after(minutes=2_000), after(minutes=4_000))
    assert describe_differences(late) == []
    assert late.counts.skipped == {"missed": 3 * 500}


@stored
async def test_a_job_within_a_skipped_range_is_a_duplicate(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=3_000))
    (row,) = await execute(store, select(finished).where(finished.c.skipped_count > 1))
    extra = {"id": new_id(T0), "scheduled_at": after(minutes=2_000), "skipped_count": 1, "skipped_to": None}
    await store.run(_insert, [dict(row._mapping) | extra])
    assert await _found(store, timedelta(minutes=3_000)) == [("doubled", 2_000, 2_000, 1)]


@stored
async def test_rows_of_an_unknown_schedule_are_unexpected(store: Store) -> None:
    id_ = await _history(store)
    await execute(store, delete(schedules_table))
    assert await _found(store) == []  # the revisions exist, and none ends earlier
    assert [one[:2] for one in await _found(store, timedelta(minutes=22, seconds=30))] == [("missing", 21)]
    await execute(store, delete(revisions))
    found = await _found(store)
    assert {one[0] for one in found} == {"unexpected"} and len(found) == 20
    assert id_


@stored
async def test_an_unreadable_revision_is_reported(store: Store) -> None:
    await _history(store)
    await execute(store, update(revisions).values(recurrence='{"kind": "moon"}'))
    assert next(iter(await _found(store)))[0] == "unreadable"


@stored
async def test_a_fixed_delay_is_audited_without_a_grid(store: Store) -> None:
    await _history(store, Every("PT1M", since="last_start"), overlap=Overlap.SKIP)
    assert await _found(store) == []
    (first, *_) = (await execute(store, select(finished.c.scheduled_at).order_by(finished.c.scheduled_at)))[0]
    await _copy(store, _minute(first))
    assert [one[0] for one in await _found(store)] == ["doubled"]


@pytest.mark.parametrize("took", [timedelta(), timedelta(minutes=5)])
@stored
async def test_rows_removed_by_retention_are_not_missing(store: Store, took: timedelta) -> None:
    """Nodes prune while a long audit of the whole retention period runs: rows at its start are deleted."""
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
async def test_the_continuous_audit_resumes_and_reports_new_differences(store: Store) -> None:
    await _history(store)
    watch = ContinuousAudit(store.run_autocommit, T0)
    assert await watch.step(after(minutes=11)) == []
    assert watch.counts.expected == 9
    await execute(store, delete(finished).where(_row(5)))  # already audited
    await execute(store, delete(finished).where(_row(14)))
    assert [(one.finding.value, _minute(one.at)) for one in await watch.step(after(minutes=21))] == [("missing", 14)]
    assert await watch.step(after(minutes=21)) == []
    assert watch.counts.expected == 19
