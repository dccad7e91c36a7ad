"""Query plans: pending jobs cost nothing, because every hot statement uses an index however many jobs there are."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from sqlalchemy import func, literal_column, select

from tests.servers import Postgres
from timebell.model.job import JobState
from timebell.model.routes import ALL_ROUTES, COMPLETE_UNHANDLED_JSON, Routes
from timebell.store.cluster import repair
from timebell.store.dialects.postgres.macros import PostgresDialect
from timebell.store.dialects.postgres.store import HOT_SETTINGS, SESSION_SETTINGS, PostgresStore
from timebell.store.dialects.sqlite.macros import SqliteDialect
from timebell.store.dialects.sqlite.store import SqliteStore
from timebell.store.jobs import claim, complete, groups, queue_limits, repository, serial, unhandled_topics
from timebell.store.open import upgrade
from timebell.store.schedules import schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction
from timebell.store.types import EPOCH, to_micros

from .helpers import NODE, T0, after

FEW, MANY = 200_000, 10_000_000
DUE, RUNNING, SCHEDULES = 5_000, 500, 20_000
WAITING = 2_000  # held jobs of groups
BATCH = 100
HANDLED_ROUTES = Routes(frozenset({"topic.1", "topic.2", "@http"}), frozenset({"topic."}))

# Job n has the id 00000000-0000-7000-8000-<n in hex>. The first RUNNING jobs run, the next DUE are due, and each of the
# next SCHEDULES belongs to a schedule.
FILL = """
INSERT INTO timebell_jobs (id, schedule_id, tenant_id, topic, kind, scheduled_at, run_at, timezone, payload, queue,
    priority, serial, state, attempt, attempts_used, created_at, route, shared, group_name, hold)
SELECT {id}, {schedule}, CASE n % 10 WHEN 1 THEN 'tenant' || (n % 1000) ELSE 'default' END, 'topic.' || (n % 20),
     'once', {at}, {at}, 'UTC', '{{"n": 1}}', 'queue' || (n % 3), n % 2,
    {false}, CASE WHEN n < {running} THEN 'running' ELSE 'pending' END, CASE WHEN n < {running} THEN 1 ELSE 0 END,
    0, {t0}, 'topic.' || (n % 20), {true}, CASE WHEN n >= {waiting} THEN 'group' || (n % 7) END,
    CASE WHEN n >= {waiting} THEN 'group' END
FROM {series}
"""
FILL_QUEUES = (
    "INSERT INTO timebell_queues (name, concurrency_per_group) VALUES ('queue0', 1), ('queue1', 1), ('queue2', 1)"
)
FILL_SCHEDULES = """
INSERT INTO timebell_schedules (id, tenant_id, name, recurrence, action, policies, next_fire_at, created_at, updated_at)
SELECT {id}, 'default', 's' || n, '{{}}', '{{}}', '{{}}', {soon}, {t0}, {t0} FROM {series}
"""


def _id(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012x}"


def _statements(to_db: Any) -> dict[str, tuple[Statement, dict[str, Any], list[dict[str, Any]]]]:
    """Return each hot statement with the parameters that the engine passes."""
    at = to_db(after(minutes=1))
    running = [{"id": _id(n), "attempt": 1} for n in range(BATCH)]
    end = {"was": "running", "state": "completed", "at": at, "counts": 1}
    optional = dict.fromkeys(("reason", "error", "code", "result", "errors", "cancel", "replaced_by"))
    retry = {**end, "state": "pending", "run_at": at}
    lane = {"queue": "queue1", "priority": 1}
    start = {**lane, **HANDLED_ROUTES.sql_params(), "node": NODE, "now": at}
    tenants = [{"tenant": "default"}, *({"tenant": f"tenant{10 * n + 1}"} for n in range(9))]
    pending = [{"id": _id(RUNNING + n)} for n in range(BATCH)]
    waiting = [{"queue": "queue1", "tenant_id": "default", "group_name": f"group{n % 7}"} for n in range(BATCH)]
    known = [{"queue": f"queue{n % 3}", "priority": n % 2, "since": to_db(after(days=-1))} for n in range(6)]
    unhandled_params = {**lane, **ALL_ROUTES.sql_params(), "now": at, "completes": COMPLETE_UNHANDLED_JSON}
    of_schedules = [{"id": _id(n)} for n in range(BATCH)]
    dispatched = [{**row, "was": "running", "until": 1, "errors": None} for row in running]
    advance = {"next_fire_at": at, "last_fired_at": at, "error": None, "tzdata": "2026a", "utc_offset": 0}
    return {
        "COUNT_LIVE_JOBS": (schedules.COUNT_LIVE_JOBS, {}, of_schedules),
        "ADVANCE_CURSORS": (schedules.ADVANCE_CURSORS, {}, [{**one, **advance} for one in of_schedules]),
        "LOCK_SCHEDULES": (serial.LOCK_SCHEDULES, {}, of_schedules),
        "RELEASE_NEXT": (serial.RELEASE_NEXT, {}, of_schedules),
        "OVERDUE_DISPATCHED": (claim.OVERDUE_DISPATCHED, {"until": to_micros(after(minutes=1)), "limit": BATCH}, []),
        "DISPATCH": (complete.DISPATCH, {}, dispatched),
        "DISPATCH_UNLOCKED": (complete.DISPATCH_UNLOCKED, {}, dispatched),
        "SCAN_ALL_LANES": (claim.SCAN_ALL_LANES, {"now": at, "late": at, **HANDLED_ROUTES.sql_params()}, []),
        "SCAN_GIVEN_LANES": (claim.SCAN_GIVEN_LANES, {"now": at, "late": at, **HANDLED_ROUTES.sql_params()}, known),
        "CLAIM": (claim.CLAIM, {**start, "since": to_db(EPOCH), "limit": BATCH}, []),
        "UPCOMING_JOBS": (
            claim.UPCOMING_JOBS,
            {**lane, **HANDLED_ROUTES.sql_params(), "now": at, "until": to_db(after(days=9)), "limit": 50},
            [],
        ),
        "CLAIM_IF_UNRESTRICTED": (claim.CLAIM_IF_UNRESTRICTED, {**start, "since": to_db(EPOCH), "limit": BATCH}, []),
        "TENANT_ROTATION": (queue_limits.TENANT_ROTATION, {**lane, "after": "tenant500", "now": at}, []),
        "CLAIM_FAIR_SHARES": (queue_limits.CLAIM_FAIR_SHARES, {**start, "limit": BATCH // 10}, tenants),
        "SCAN_DUE": (queue_limits.SCAN_DUE, {**lane, **HANDLED_ROUTES.sql_params(), "now": at, "limit": BATCH}, []),
        "SCAN_FAIR_SHARES": (
            queue_limits.SCAN_FAIR_SHARES,
            {**lane, **HANDLED_ROUTES.sql_params(), "now": at, "limit": BATCH // 10},
            tenants,
        ),
        "START_SELECTED": (queue_limits.START_SELECTED, {"node": NODE, "now": at}, pending),
        "HOLD_FOR_GROUP": (queue_limits.HOLD_FOR_GROUP, {}, pending),
        "RUNNING_GROUPS": (queue_limits.RUNNING_GROUPS, {"queue": "queue1"}, []),
        "NEXT_IN_GROUP": (groups.NEXT_IN_GROUP, {}, waiting),
        "STUCK_GROUPS": (groups.STUCK_GROUPS, {"queue": "queue1"}, []),
        "SELECT_DUE": (schedules.SELECT_DUE, {"now": at, "most": BATCH}, []),
        "SELECT_NEXT_FIRE": (schedules.SELECT_NEXT_FIRE, {}, []),
        "RENEW_LEASES": (complete.RENEW_LEASES, {}, running),
        "RENEW_LEASES_UNLOCKED": (complete.RENEW_LEASES_UNLOCKED, {}, running),
        "RETRY": (complete.RETRY, {}, [{**row, **optional, **retry} for row in running]),
        "RETRY_UNLOCKED": (complete.RETRY_UNLOCKED, {}, [{**row, **optional, **retry} for row in running]),
        "COMPLETE": (complete.COMPLETE, {}, [{**row, **optional, **end} for row in running]),
        "COMPLETE_UNLOCKED": (complete.COMPLETE_UNLOCKED, {}, [{**row, **optional, **end} for row in running]),
        "UNCHANGED_ATTEMPTS": (complete.UNCHANGED_ATTEMPTS, {}, [{**row, "was": "running"} for row in running]),
        "LOCK_SCHEDULES_UNLOCKED": (serial.LOCK_SCHEDULES_UNLOCKED, {}, of_schedules),
        "RUNNING_ATTEMPTS": (claim.RUNNING_ATTEMPTS, {}, []),
        "HOLD_UNHANDLED": (unhandled_topics.HOLD_UNHANDLED, unhandled_params, []),
        "COMPLETABLE_UNHANDLED": (unhandled_topics.COMPLETABLE_UNHANDLED, unhandled_params, []),
        "STUCK_SCHEDULES": (repair.STUCK_SCHEDULES, {}, []),
        "RELEASE_INVALID_HOLDS": (repair.RELEASE_INVALID_HOLDS, {}, []),
        "COUNT_HOLDS": (repair.COUNT_HOLDS, {"limit": repair.COUNT_LIMIT}, []),
        "SCHEDULES_WITHOUT_NEXT": (repair.SCHEDULES_WITHOUT_NEXT, {"limit": BATCH}, []),
    }


# PostgreSQL.

POSTGRES = PostgresDialect()
MOST_BUFFERS = {
    "SCAN_ALL_LANES": 600, "CLAIM": 4_000, "TENANT_ROTATION": 2_000, "CLAIM_FAIR_SHARES": 4_000, "SCAN_DUE": 700,
    "SCAN_FAIR_SHARES": 700, "START_SELECTED": 4_000, "HOLD_FOR_GROUP": 4_000, "RUNNING_GROUPS": 700,
    "NEXT_IN_GROUP": 4_000, "STUCK_GROUPS": 9_000, "SELECT_DUE": 500, "SELECT_NEXT_FIRE": 20, "RENEW_LEASES": 3_000,
    "RETRY": 5_000, "COMPLETE": 3_000, "RUNNING_ATTEMPTS": 700, "HOLD_UNHANDLED": 3_000,
    "COMPLETABLE_UNHANDLED": 3_000, "STUCK_SCHEDULES": 20, "RELEASE_INVALID_HOLDS": 2_000, "COUNT_HOLDS": 2_000,
    "SCHEDULES_WITHOUT_NEXT": 20, "COUNT_LIVE_JOBS": 1_000, "ADVANCE_CURSORS": 3_000, "LOCK_SCHEDULES": 1_000,
    "RELEASE_NEXT": 2_000, "OVERDUE_DISPATCHED": 20, "DISPATCH": 5_000, "DISPATCH_UNLOCKED": 6_000,
    "RENEW_LEASES_UNLOCKED": 4_000, "RETRY_UNLOCKED": 6_000, "COMPLETE_UNLOCKED": 4_000,
    "UNCHANGED_ATTEMPTS": 1_000, "LOCK_SCHEDULES_UNLOCKED": 1_000, "CLAIM_IF_UNRESTRICTED": 4_000,
    "UPCOMING_JOBS": 200, "SCAN_GIVEN_LANES": 600,
}  # fmt: skip


# Statements of connections that cache their plans; other connections plan anew where that is faster.
KEEP_PLANS = (
    "SCAN_ALL_LANES", "SCAN_GIVEN_LANES", "UPCOMING_JOBS", "TENANT_ROTATION", "CLAIM", "CLAIM_IF_UNRESTRICTED",
    "RENEW_LEASES", "RENEW_LEASES_UNLOCKED", "RETRY", "RETRY_UNLOCKED", "COMPLETE", "COMPLETE_UNLOCKED",
    "UNCHANGED_ATTEMPTS", "DISPATCH", "DISPATCH_UNLOCKED", "RUNNING_ATTEMPTS", "OVERDUE_DISPATCHED",
)  # fmt: skip


async def _fill_postgres(connection: asyncpg.Connection[Any], rows: int, *, analyzed: bool = True) -> None:
    t0 = "TIMESTAMPTZ '2026-01-01T00:00:00Z'"
    words = {
        "id": "('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid",
        "schedule": f"CASE WHEN n >= {RUNNING + DUE} AND n < {RUNNING + DUE + SCHEDULES} THEN"
        f" ('00000000-0000-7000-8000-' || lpad(to_hex(n - {RUNNING + DUE}), 12, '0'))::uuid END",
        "at": f"CASE WHEN n < {RUNNING + DUE} THEN {t0} + n * interval '1 second' ELSE"
        f" TIMESTAMPTZ '{T0 + timedelta(days=1)}' + n * interval '1 second' END",
        "soon": f"CASE WHEN n < 200 THEN {t0} ELSE TIMESTAMPTZ '{T0 + timedelta(days=1)}' + n * interval '1 s' END",
        "false": "false", "true": "true", "t0": t0, "running": RUNNING, "waiting": rows - WAITING,
    }  # fmt: skip
    await connection.execute(FILL.format(series=f"generate_series(0, {rows - 1}) AS n", **words), timeout=900)
    await connection.execute(FILL_SCHEDULES.format(series=f"generate_series(0, {SCHEDULES - 1}) AS n", **words))
    await connection.execute(FILL_QUEUES)
    if analyzed:
        await connection.execute("VACUUM ANALYZE timebell_jobs", timeout=900)
        await connection.execute("VACUUM ANALYZE timebell_schedules")


@pytest.fixture(scope="module")
def few_rows(postgres: Postgres) -> Iterator[str]:
    yield from _filled(postgres, FEW)


@pytest.fixture(scope="module")
def many_rows(postgres: Postgres) -> Iterator[str]:
    yield from _filled(postgres, MANY)


def _filled(postgres: Postgres, rows: int) -> Iterator[str]:
    url = postgres.create_database()

    async def fill() -> None:
        await upgrade(url)
        connection = await asyncpg.connect(url)
        try:
            await _fill_postgres(connection, rows)
        finally:
            await connection.close()

    asyncio.run(fill())
    yield url
    postgres.drop_database(url)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", []):
        yield from _nodes(inner)


def _explain(url: str, name: str) -> dict[str, Any]:
    """Execute a statement with the engine's connection settings, roll back and return its plan."""

    async def run() -> dict[str, Any]:
        connection = await asyncpg.connect(
            url, server_settings=HOT_SETTINGS if name in KEEP_PLANS else SESSION_SETTINGS
        )
        try:
            await _prepare(connection, name)
            return await _executed(connection, name)
        finally:
            await connection.close()

    return asyncio.run(run())


async def _prepare(connection: asyncpg.Connection[Any], name: str) -> None:
    text, _ = _statements(POSTGRES.to_db)[name][0].numbered_sql(POSTGRES)
    await connection.execute(f"PREPARE hot_{name} AS {text}")


async def _executed(connection: asyncpg.Connection[Any], name: str) -> dict[str, Any]:
    """Execute a prepared statement and return its plan with statistics."""
    statement, params, rows = _statements(POSTGRES.to_db)[name]
    if statement.columns:
        params = {**params, "rows": orjson.dumps(rows).decode()}
    _, names = statement.numbered_sql(POSTGRES)
    given = f"({', '.join(_literal(params[name]) for name in names)})" if names else ""
    transaction = connection.transaction()
    await transaction.start()
    found = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE hot_{name}{given}")
    await transaction.rollback()
    plan: dict[str, Any] = json.loads(found)[0]
    return plan


def _literal(value: Any) -> str:
    if isinstance(value, list):
        value = "{" + ",".join(f'"{one}"' for one in value) + "}"
    return "NULL" if value is None else "'" + str(value).replace("'", "''") + "'"


def judged(url: str, name: str) -> tuple[int, float, str | None]:
    """Return the buffers touched by a statement, its milliseconds and the problem of its plan or None."""
    return _judged(_explain(url, name), name)


def _judged(explained: dict[str, Any], name: str) -> tuple[int, float, str | None]:
    plan = explained["Plan"]
    ours = [node for node in _nodes(plan) if str(node.get("Relation Name", "")).startswith("timebell_")]
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return buffers, explained["Execution Time"], _fault(name, plan, ours, buffers)


def _fault(name: str, plan: dict[str, Any], ours: list[dict[str, Any]], buffers: int) -> str | None:
    if not ours:
        return f"{name} touches no table"
    for node in ours:
        small = node["Relation Name"] == "timebell_queues"
        if node["Node Type"] == "Seq Scan" and not small:
            return f"{name} reads all of {node['Relation Name']}"
    sorts = [node for node in _nodes(plan) if node["Node Type"] == "Sort"]
    most = DUE if name.endswith("_UNHANDLED") else BATCH  # due jobs may be sorted, pending ones may not
    if any(node["Actual Rows"] > most for node in sorts):
        return f"{name} sorts more than its batch"
    if any(node.get("Rows Removed by Join Filter", 0) > 10 * BATCH for node in _nodes(plan)):
        return f"{name} compares each of its batch with each"
    return f"{name} touched {buffers} buffers" if buffers > MOST_BUFFERS[name] else None


def _check(url: str, name: str) -> None:
    buffers, ms, fault = judged(url, name)
    print(f"\n{name}: {buffers} buffers, {ms:.2f} ms")
    assert fault is None, fault


@pytest.mark.parametrize("name", MOST_BUFFERS)
def test_a_hot_statement_uses_an_index(few_rows: str, name: str) -> None:
    _check(few_rows, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_BUFFERS)
def test_a_hot_statement_uses_an_index_at_ten_million_jobs(many_rows: str, name: str) -> None:
    _check(many_rows, name)


def test_a_plan_cached_on_empty_tables_uses_an_index_on_full_ones(postgres: Postgres) -> None:
    """A node caches its plans, and statistics are updated later."""
    url = postgres.create_database()

    async def faults() -> list[str]:
        await upgrade(url)
        node, client = await asyncpg.connect(url, server_settings=HOT_SETTINGS), await asyncpg.connect(url)
        try:
            for name in KEEP_PLANS:
                await _prepare(node, name)
                await _executed(node, name)
            await _fill_postgres(client, FEW, analyzed=False)
            judged = [_judged(await _executed(node, name), name) for name in KEEP_PLANS]
            remade = await node.fetchval("SELECT sum(custom_plans) FROM pg_prepared_statements")
            assert remade == 0
            return [fault for _, _, fault in judged if fault is not None]
        finally:
            await asyncio.gather(node.close(), client.close())

    assert asyncio.run(faults()) == []
    postgres.drop_database(url)


def test_no_statement_is_compiled_before_it_runs(few_rows: str) -> None:
    """PostgreSQL would use JIT because of its cost estimate, which takes 20 ms per statement."""

    assert _setting(few_rows, "jit") == {"run": "off", "hot": "off"}


def test_only_hot_statements_keep_their_plans(few_rows: str) -> None:
    assert _setting(few_rows, "plan_cache_mode") == {"run": "auto", "hot": "force_generic_plan"}


def test_consecutive_statements_use_the_connection_that_has_their_plan(few_rows: str) -> None:
    async def backends() -> tuple[set[int], set[int]]:
        store = PostgresStore(few_rows)
        await store.open()
        try:
            at_once = await asyncio.gather(*(store.run(_backend) for _ in range(3)))
            return set(at_once), {await store.run(_backend) for _ in range(3)}
        finally:
            await store.close()

    at_once, one_by_one = asyncio.run(backends())
    assert (len(at_once), len(one_by_one)) == (3, 1)


def _backend(tx: Transaction) -> Any:
    return tx.execute(select(func.pg_backend_pid(), func.pg_sleep(0.1))).scalar()


def _setting(url: str, name: str) -> dict[str, Any]:
    """Return a server setting of each kind of connection."""

    def read_setting(tx: Transaction) -> Any:
        return tx.execute(select(literal_column(f"current_setting('{name}')"))).scalar()

    async def each() -> dict[str, Any]:
        store = PostgresStore(url)
        await store.open()
        try:
            return {"run": await store.run(read_setting), "hot": await store.run_autocommit(read_setting)}
        finally:
            await store.close()

    return asyncio.run(each())


@pytest.fixture(scope="module")
def flooded(postgres: Postgres) -> Iterator[str]:
    """Jobs of one tenant, all due at one instant, a third of them deleted: statistics suggest no index."""
    for url in _filled(postgres, FEW):

        async def flood(url: str = url) -> None:
            connection = await asyncpg.connect(url)
            await connection.execute(
                "UPDATE timebell_jobs SET state = 'pending', hold = NULL, tenant_id = 'flood', queue = 'queue1',"
                " priority = 1, run_at = '2026-01-01T00:00:00Z'"
            )
            await connection.execute("VACUUM ANALYZE timebell_jobs")
            await connection.execute("DELETE FROM timebell_jobs WHERE id < $1", _id(FEW // 3))
            await connection.close()

        asyncio.run(flood())
        yield url


@pytest.mark.parametrize(
    "name",
    [
        "SCAN_ALL_LANES",
        "UPCOMING_JOBS",
        "TENANT_ROTATION",
        "CLAIM",
        "CLAIM_IF_UNRESTRICTED",
        "CLAIM_FAIR_SHARES",
        "SCAN_DUE",
        "SCAN_FAIR_SHARES",
    ],
)
def test_a_flood_of_one_tenant_is_not_read_completely(flooded: str, name: str) -> None:
    plan = _explain(flooded, name)["Plan"]
    read = [node for node in _nodes(plan) if node.get("Relation Name") == "timebell_jobs"]
    assert read
    assert not [node for node in read if node["Node Type"] == "Seq Scan"]
    assert all(node["Actual Rows"] <= BATCH for node in read)


@pytest.fixture(scope="module")
def remembered(postgres: Postgres) -> Iterator[str]:
    """Half of the jobs were due and are deleted, but a session holds a snapshot that still contains them."""
    for url in _filled(postgres, FEW):

        async def end(url: str = url) -> asyncpg.Connection[Any]:
            remembering, connection = await asyncpg.connect(url), await asyncpg.connect(url)
            await connection.execute(
                "UPDATE timebell_jobs SET run_at = $1, hold = NULL WHERE id < $2", T0 - timedelta(days=2), _id(FEW // 2)
            )
            await connection.execute("VACUUM ANALYZE timebell_jobs")
            await remembering.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await remembering.fetch("SELECT count(*) FROM timebell_jobs")
            await connection.execute("UPDATE timebell_jobs SET state = 'completed' WHERE id < $1", _id(FEW // 2))
            await connection.close()
            return remembering

        with asyncio.Runner() as runner:
            remembering = runner.run(end())
            yield url
            runner.run(remembering.close())


def test_a_scan_from_its_last_position_skips_dead_rows(remembered: str) -> None:
    whole, _, _ = judged(remembered, "SCAN_ALL_LANES")
    buffers, _, fault = judged(remembered, "SCAN_GIVEN_LANES")
    assert whole > FEW // 20
    assert fault is None, f"{fault}; {buffers} buffers"


# SQLite.

SQLITE = SqliteDialect()
MOST_STEPS = 60_000  # of SQLite's virtual machine; reading each of 200,000 rows takes a million


@pytest.fixture(scope="module")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "timebell.db"
    asyncio.run(upgrade(f"sqlite:///{file}"))
    words = {
        "id": "printf('00000000-0000-7000-8000-%012x', n)",
        "schedule": f"CASE WHEN n >= {RUNNING + DUE} AND n < {RUNNING + DUE + SCHEDULES} THEN"
        f" printf('00000000-0000-7000-8000-%012x', n - {RUNNING + DUE}) END",
        "at": f"CASE WHEN n < {RUNNING + DUE} THEN n * 1000000 ELSE {to_micros(after(days=1))} + n * 1000000 END",
        "soon": f"CASE WHEN n < 200 THEN 0 ELSE {to_micros(after(days=1))} + n * 1000000 END",
        "false": "0", "true": "1", "t0": "0", "running": RUNNING, "waiting": FEW - WAITING,
    }  # fmt: skip
    series = "(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < {} - 1) SELECT n FROM s)"
    with sqlite3.connect(file) as driver:
        driver.execute(FILL.format(series=series.format(FEW), **words))
        driver.execute(FILL_SCHEDULES.format(series=series.format(SCHEDULES), **words))
        driver.execute(FILL_QUEUES)
    driver.close()
    return file


@pytest.mark.parametrize(
    "name",
    [name for name in MOST_BUFFERS if name not in ("COMPLETE", "COMPLETE_UNLOCKED")]
    + ["COPY_COMPLETED", "DELETE_COPIED"],
)
def test_a_hot_statement_uses_an_index_on_sqlite(filled_file: Path, name: str) -> None:
    statements = _statements(SQLITE.to_db)
    _, params, rows = statements.get(name) or statements["COMPLETE"]
    statement: Statement = statements[name][0] if name in statements else getattr(complete, name)
    given = {key: orjson.dumps(value).decode() if isinstance(value, list) else value for key, value in params.items()}
    given["rows"] = orjson.dumps(rows).decode()
    text = statement.named_sql(SQLITE)
    driver = sqlite3.connect(filled_file, isolation_level=None)
    try:
        plan = [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {text}", given)]
        for line in plan:
            small = line.startswith("SCAN timebell_queues")
            whole = line.startswith("SCAN timebell_") and " INDEX " not in line and not small
            assert not whole, f"{name} reads a whole table: {plan}"
        sorts = [line for line in plan if line == "USE TEMP B-TREE FOR ORDER BY"]
        assert not sorts or name == "OVERDUE_DISPATCHED", (
            f"{name} sorts: {plan}"
        )  # which puts in order what runs outside: few
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 100

        driver.execute("BEGIN")
        driver.set_progress_handler(step, 100)
        driver.execute(text, given).fetchall()
        driver.set_progress_handler(None, 0)
        driver.execute("ROLLBACK")
        print(f"\n{name}: about {steps} steps")
        assert steps <= MOST_STEPS, f"{name} took {steps} steps"
    finally:
        driver.close()


@pytest.mark.parametrize(
    ("equal", "states"),
    [
        ({}, ()),
        ({}, (JobState.FAILED,)),
        ({}, (JobState.RUNNING, JobState.DISPATCHED)),
        ({"topic": "none"}, ()),
        ({"topic": "topic.3"}, (JobState.PENDING,)),
        ({"owner_id": "nobody"}, ()),
        ({"key": "none"}, ()),
    ],
)
def test_a_page_of_jobs_uses_an_index_on_sqlite(
    filled_file: Path, equal: dict[str, Any], states: tuple[JobState, ...]
) -> None:
    async def steps() -> int:
        store = SqliteStore(f"sqlite:///{filled_file}", lambda: T0, durable=False)
        await store.open()
        taken = 0

        def step() -> None:
            nonlocal taken
            taken += 100

        def look(tx: Any) -> None:
            tx.driver.set_progress_handler(step, 100)
            repository.list_jobs(tx, {"tenant_id": "default", **equal}, states, 50, None)
            tx.driver.set_progress_handler(None, 0)

        await store.run(look)
        await store.close()
        return taken

    assert asyncio.run(steps()) <= MOST_STEPS
