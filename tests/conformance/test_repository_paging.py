"""Listing: pages end and have no gaps or duplicates, also while rows are inserted and deleted."""

from __future__ import annotations

import asyncio
from datetime import datetime

import asyncpg
import pytest

from tests.servers import Postgres
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.model.job import Hold, Job, JobState
from timebell.store.jobs import complete as ending_ops
from timebell.store.jobs import next_due, repository
from timebell.store.open import open_store, upgrade
from timebell.store.schedules import queries

from .helpers import (
    T0,
    Cron,
    Store,
    after,
    claim,
    create,
    end,
    ending,
    get,
    job,
    one,
    put,
    schedule,
    started,
    stored,
)


async def _walk(store: Store, limit: int, *, meanwhile: object = None, **equal: object) -> list[str]:
    seen: list[str] = []
    cursor = None
    for _ in range(200):
        page = await store.run(repository.list_jobs, equal, (), limit, cursor)
        assert len(page) <= limit
        seen += [found.id for found in page]
        if meanwhile is not None:
            await meanwhile()  # type: ignore[operator]
        if (cursor := page.next_cursor) is None:
            return seen
    raise AssertionError("the pages do not end")


async def _create_jobs(store: Store, count: int) -> list[str]:
    """Insert jobs in every state; return their ids, oldest first."""
    news = [job() for _ in range(count)]
    await create(store, *news)
    attempts = {attempt.id: attempt for attempt in await claim(store, most=count * 2 // 3)}
    endings = [ending(attempts[new.id]) for new in news[::2] if new.id in attempts]
    await end(store, *endings)
    return [new.id for new in news]


@pytest.mark.parametrize("limit", [1, 3, 7, 30, 31, 500])
@stored
async def test_pages_hold_every_job_once_newest_first(store: Store, limit: int) -> None:
    ids = await _create_jobs(store, 30)
    assert await _walk(store, limit) == ids[::-1]


@stored
async def test_an_empty_store_has_one_empty_page(store: Store) -> None:
    page = await store.run(repository.list_jobs, {}, (), 10, None)
    assert (page.items, page.next_cursor) == ([], None)


@stored
async def test_a_full_last_page_has_no_next_cursor(store: Store) -> None:
    await _create_jobs(store, 6)
    page = await store.run(repository.list_jobs, {}, (), 6, None)
    assert (len(page), page.next_cursor) == (6, None)


@stored
async def test_paging_ends_without_duplicates_while_jobs_are_created(store: Store) -> None:
    ids = await _create_jobs(store, 30)

    async def make() -> None:
        await create(store, job(), job(), job())

    walked = await _walk(store, 4, meanwhile=make)
    assert walked == ids[::-1]


@stored
async def test_paging_has_no_gaps_or_duplicates_while_jobs_finish(store: Store) -> None:
    news = [job() for _ in range(30)]
    await create(store, *news)

    async def finish() -> None:
        await end(store, *(ending(attempt) for attempt in await claim(store, most=3)))

    assert await _walk(store, 4, meanwhile=finish) == [new.id for new in news[::-1]]


@stored
async def test_filters_narrow_the_page_on_both_tables(store: Store) -> None:
    wanted = [await one(store, owner_id="me", tenant_id="acme", topic="a", key=f"k{n}") for n in range(4)]
    for fields in ({"owner_id": "you"}, {"tenant_id": "bolt"}, {"topic": "b"}):
        await one(store, **{"owner_id": "me", "tenant_id": "acme", "topic": "a", **fields})
    mine = [attempt for attempt in await claim(store) if attempt.id in wanted[:2]]
    await end(store, *(ending(attempt) for attempt in mine))
    assert await _walk(store, 3, owner_id="me", tenant_id="acme", topic="a") == wanted[::-1]
    assert await _walk(store, 3, key="k2") == [wanted[2]]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((JobState.PENDING,), {"pending"}),
        ((JobState.RUNNING,), {"running"}),
        ((JobState.COMPLETED, JobState.FAILED), {"completed", "failed"}),
        ((JobState.PENDING, JobState.COMPLETED), {"pending", "completed"}),
        ((JobState.SKIPPED,), set()),
    ],
)
@stored
async def test_states_narrow_the_page(store: Store, states: tuple[JobState, ...], expected: set[str]) -> None:
    await create(store, *(job() for _ in range(4)))
    completed, failed, _ = await claim(store, most=3)
    await end(store, ending(completed), ending(failed, JobState.FAILED))
    page = await store.run(repository.list_jobs, {}, states, 10, None)
    assert {found.state for found in page} == expected


@stored
async def test_the_cursor_of_a_deleted_job_is_still_valid(store: Store) -> None:
    ids = await _create_jobs(store, 10)
    page = await store.run(repository.list_jobs, {}, (), 3, ids[5])
    assert [found.id for found in page] == ids[2:5][::-1]
    page = await store.run(repository.list_jobs, {}, (), 3, new_id(T0))
    assert [found.id for found in page] == ids[7:][::-1]


@stored
async def test_a_job_is_found_live_and_finished_and_only_in_its_tenant(store: Store) -> None:
    attempt = await started(store, tenant_id="acme")
    for tenant, is_there in ((None, True), ("acme", True), ("bolt", False)):
        assert (await store.run(repository.find_job, tenant, attempt.id) is not None) is is_there
    await end(store, ending(attempt))
    for tenant, is_there in ((None, True), ("acme", True), ("bolt", False)):
        assert (await store.run(repository.find_job, tenant, attempt.id) is not None) is is_there
    assert await store.run(repository.find_job, None, new_id(T0)) is None


@stored
async def test_recently_finished_jobs_come_first(store: Store) -> None:
    await create(store, *(job() for _ in range(3)))
    a, b, c = await claim(store)
    await end(store, ending(a, at=after(seconds=2)), ending(b, at=after(seconds=3)), ending(c, at=after(seconds=1)))
    assert [found.id for found in await store.run(repository.list_recently_finished, 2)] == [b.id, a.id]


@stored
async def test_pending_jobs_are_listed_by_due_time_over_all_lanes(store: Store) -> None:
    for minute, queue in ((5, "a"), (1, "b"), (3, "a"), (2, "c"), (4, "b"), (4, "b")):
        await one(store, run_at=after(minutes=minute), queue=queue, priority=minute)
        await one(store, run_at=after(minutes=minute), queue=queue, priority=minute, tenant_id="other")
    await one(store, hold=Hold.UNHANDLED)
    await started(store, queue="d")

    async def listed(tenant_id: str, queue: str | None, limit: int) -> list[datetime]:
        found: list[Job] = []
        cursor = None
        while True:
            page = await store.run(next_due.list_next_due, tenant_id, queue, limit, cursor)
            found += page
            if (cursor := page.next_cursor) is None:
                assert len({job.id for job in found}) == len(found)
                return [job.run_at for job in found]

    due = [after(minutes=minute) for minute in (1, 2, 3, 4, 4, 5)]
    for tenant_id in ("default", "other"):
        assert await listed(tenant_id, None, 1) == await listed(tenant_id, None, 100) == due
        assert await listed(tenant_id, "b", 2) == [due[0], due[3], due[4]]


@stored
async def test_a_job_that_finishes_during_a_page_is_listed_once(store: Store) -> None:
    attempt = await started(store)
    row = await get(store, attempt.id)

    def page_while_it_moves(tx: object) -> list[Job]:
        """Finish the job between the query of live jobs and the query of finished ones."""
        looks = iter((None, row))

        class Moving:
            dialect = tx.dialect  # type: ignore[attr-defined]

            def execute(self, statement: object, rows: object = None) -> object:
                found = tx.execute(statement)  # type: ignore[attr-defined]
                if next(looks) is None:
                    return list(found)
                ending_ops.complete_jobs(tx, [ending(attempt)])  # type: ignore[arg-type]
                return tx.execute(statement)  # type: ignore[attr-defined]

        return repository.list_jobs(Moving(), {}, (), 5, None).items  # type: ignore[arg-type]

    (seen,) = await store.run(page_while_it_moves)
    assert (seen.id, seen.state) == (row.id, JobState.COMPLETED)


@stored
async def test_schedules_are_paged_the_same_way(store: Store) -> None:
    made = [(await put(store, schedule(name=f"s{n}", tenant_id=f"t{n % 2}"))).id for n in range(9)]
    seen: list[str] = []
    cursor = None
    for _ in range(9):
        page = await store.run(queries.list_schedules, None, 2, cursor)
        seen += [found.id for found in page]
        await put(store, schedule(name=f"new{len(seen)}"))
        if (cursor := page.next_cursor) is None:
            break
    assert seen == made[::-1]
    page = await store.run(queries.list_schedules, "t1", 50, None)
    assert [found.id for found in page] == made[1::2][::-1]
    assert page.items == (await store.run(queries.list_schedules, "t1", 50, None, contains="s")).items
    first = await store.run(queries.list_schedules, "t1", 3, None)
    assert (first.items, first.next_cursor) == (page.items[:3], page.items[2].id)


@stored
async def test_only_schedules_that_fire_are_listed_soonest_first(store: Store) -> None:
    await put(store, schedule(Cron("30 12 * * *"), name="b"))
    await put(store, schedule(Cron("15 12 * * *"), name="a"))
    await put(store, schedule(name="off", enabled=False))
    assert [found.name for found in await store.run(queries.list_next_to_fire, 5)] == ["a", "b"]


def test_paging_is_complete_in_a_database_with_icu_collation(postgres: Postgres, runner: asyncio.Runner) -> None:
    """In Danish, aa sorts after z."""
    name = "dansk"
    locale = "LOCALE_PROVIDER icu ICU_LOCALE 'da' LOCALE 'C.UTF-8' ENCODING 'UTF8'"

    async def execute_sql(statement: str) -> None:
        connection = await asyncpg.connect(postgres.url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    try:
        runner.run(execute_sql(f"CREATE DATABASE {name} TEMPLATE template0 {locale}"))
    except (asyncpg.FeatureNotSupportedError, asyncpg.PostgresSyntaxError, asyncpg.InvalidParameterValueError):
        pytest.skip("a server without ICU, or before 15")

    async def walked() -> tuple[list[str], list[str]]:
        await upgrade(postgres.named(name), FEATURES)
        store = open_store(postgres.named(name), lambda: T0, server_clock=False)
        await store.open()
        ids = [f"0199{number:02x}00-0000-7000-8000-000000000000" for number in range(0xA0, 0xC0)]
        await create(store, *(job(id=id_) for id_ in ids))
        await claim(store, most=len(ids))
        found = await _walk(store, 5, tenant_id="default")
        await store.close()
        return found, sorted(ids, reverse=True)

    try:
        found, expected = runner.run(walked())
        assert found == expected
    finally:
        runner.run(execute_sql(f"DROP DATABASE {name} WITH (FORCE)"))
