"""Query plans: pending jobs cost nothing, because every hot statement uses an index however many jobs there are."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, TextClause, func, literal_column, select
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect

from tests.servers import MariaDB, Postgres
from timebell.features import FEATURES
from timebell.model.job import Completion, JobState
from timebell.model.routes import ALL_ROUTES, Routes
from timebell.store.audit import overview
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.cluster import repair
from timebell.store.dialects.batches import job_row
from timebell.store.dialects.mariadb.connections import engine_for
from timebell.store.dialects.mariadb.dialect import MariaDialect
from timebell.store.dialects.mariadb.server import MariaServer
from timebell.store.dialects.mariadb.transaction import MariaTransaction
from timebell.store.dialects.operations import Operations
from timebell.store.dialects.postgres.connections import HOT_SETTINGS, SESSION_SETTINGS
from timebell.store.dialects.postgres.dialect import PostgresDialect
from timebell.store.dialects.postgres.store import PostgresStore
from timebell.store.dialects.sqlite.dialect import SqliteDialect
from timebell.store.dialects.sqlite.store import UNOBSERVED_STEPS, SqliteStore, SqliteTransaction
from timebell.store.jobs import groups, queue_limits, repository, unhandled_topics, waiting
from timebell.store.jobs.recorded_creation import create_recorded
from timebell.store.open import upgrade
from timebell.store.schedules import deployments
from timebell.store.schedules.deployments import Deployment
from timebell.store.sql import SQL, Row
from timebell.store.tenancy import usage
from timebell.store.transaction import Transaction
from timebell.store.types import EPOCH, to_micros

from .helpers import NODE, T0, after
from .helpers import job as new_job

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


def _operations() -> dict[str, Callable[[Any], object]]:
    """Return each hot operation, and a few others, with the arguments that the engine passes."""
    at, lane, routes = after(minutes=1), ("queue1", 1), HANDLED_ROUTES
    running = [(_id(n), 1) for n in range(BATCH)]
    pending = [_id(RUNNING + n) for n in range(BATCH)]
    of_schedules = [_id(n) for n in range(BATCH)]
    tenants = ["default", *(f"tenant{10 * n + 1}" for n in range(9))]
    known = {(f"queue{n % 3}", n % 2): after(days=-1) for n in range(6)}
    waiting = {("queue1", "default", f"group{n}") for n in range(7)}
    new_jobs = [new_job(id=_id(FEW * 2 + n), run_at=at, scheduled_at=at) for n in range(BATCH)]
    completions = [Completion(id_, 1, JobState.COMPLETED, at) for id_, _ in running]
    retries = [Completion(id_, 1, JobState.PENDING, at, run_at=at) for id_, _ in running]
    dispatches = [Completion(id_, 1, JobState.DISPATCHED, at, run_at=at) for id_, _ in running]
    skip = {"finished_at": None, "reason": "missed", "skipped_count": 1, "skipped_to": None, "error": None}
    advance = {"error": None, "tzdata": "2026a", "utc_offset": 0}

    def advance_cursors(tx: Any) -> None:
        instants = {"next_fire_at": tx.dialect.to_db(at), "last_fired_at": tx.dialect.to_db(at)}
        tx.dialect.advance_cursors(tx, [{"id": id_, **instants, **advance} for id_ in of_schedules])

    def insert_skipped(tx: Any) -> None:
        instants = {"finished_at": tx.dialect.to_db(at), "skipped_to": tx.dialect.to_db(at)}
        tx.dialect.insert_skipped(tx, [job_row(job, tx.dialect.to_db) | skip | instants for job in new_jobs])

    record = AuditRecord(id=_id(0), tenant_id="default", at=at, actor="ana", actor_kind="user", action="job.create")
    requested = new_job(id=_id(FEW * 2), request_id="r", run_at=at)

    return {
        "find_tenants": lambda tx: tx.dialect.find_tenants(tx, tenants),
        "reserve_request_ids": lambda tx: tx.dialect.reserve_request_ids(
            tx, [new_job(id=job.id, request_id=job.id) for job in new_jobs]
        ),
        "insert_jobs": lambda tx: tx.dialect.insert_jobs(tx, new_jobs),
        "insert_jobs_returning": lambda tx: tx.dialect.insert_jobs_returning(tx, new_jobs),
        "insert_requested": lambda tx: tx.dialect.insert_requested(
            tx, [new_job(id=job.id, request_id=job.id) for job in new_jobs]
        ),
        "insert_change": lambda tx: usage.record_change(tx, record, "2027-03-14", 100),
        "insert_recorded": lambda tx: create_recorded(tx, requested, record, "2027-03-14", 100),
        "insert_running": lambda tx: tx.dialect.insert_running(tx, new_jobs, NODE, at),
        "insert_skipped": insert_skipped,
        "mark_serial": lambda tx: tx.dialect.mark_serial(tx, of_schedules),
        "find_open_lanes": lambda tx: tx.dialect.find_open_lanes(tx, known, at),
        "scan_lanes": lambda tx: tx.dialect.scan_lanes(tx, routes, at, at, None),
        "scan_given_lanes": lambda tx: tx.dialect.scan_lanes(tx, routes, at, at, known),
        "list_upcoming": lambda tx: tx.dialect.list_upcoming(tx, lane, routes, at, after(days=9), 50),
        "claim": lambda tx: tx.dialect.claim(tx, lane, routes, NODE, at, EPOCH, BATCH, recheck_queue=False),
        "claim_rechecking_queue": lambda tx: tx.dialect.claim(
            tx, lane, routes, NODE, at, EPOCH, BATCH, recheck_queue=True
        ),
        "claim_fair_shares": lambda tx: tx.dialect.claim_fair_shares(tx, lane, routes, NODE, at, tenants, BATCH // 10),
        "rotate_tenants": lambda tx: tx.dialect.rotate_tenants(tx, lane, "tenant500", at, 200),
        "lock_due": lambda tx: tx.dialect.lock_due(tx, lane, routes, at, BATCH),
        "lock_due_shares": lambda tx: tx.dialect.lock_due_shares(tx, lane, routes, at, tenants, BATCH // 10),
        "start_locked": lambda tx: tx.dialect.start_locked(tx, pending, NODE, at),
        "hold_for_group": lambda tx: tx.dialect.hold_for_group(tx, pending),
        "complete": lambda tx: tx.dialect.complete(tx, completions, skip_locked=False),
        "complete_few": lambda tx: tx.dialect.complete(tx, completions[:1], skip_locked=False),
        "complete_unlocked": lambda tx: tx.dialect.complete(tx, completions, skip_locked=True),
        "retry": lambda tx: tx.dialect.retry(tx, retries, skip_locked=False),
        "retry_unlocked": lambda tx: tx.dialect.retry(tx, retries, skip_locked=True),
        "dispatch": lambda tx: tx.dialect.dispatch(tx, dispatches, skip_locked=False),
        "dispatch_unlocked": lambda tx: tx.dialect.dispatch(tx, dispatches, skip_locked=True),
        "renew_leases": lambda tx: tx.dialect.renew_leases(tx, running, skip_locked=False),
        "renew_leases_unlocked": lambda tx: tx.dialect.renew_leases(tx, running, skip_locked=True),
        "find_unchanged": lambda tx: tx.dialect.find_unchanged(
            tx, [(*attempt, JobState.RUNNING) for attempt in running]
        ),
        "prune_finished": lambda tx: tx.dialect.prune_finished(tx, at, BATCH),
        "list_running": lambda tx: tx.dialect.list_running(tx),
        "list_overdue_dispatched": lambda tx: tx.dialect.list_overdue_dispatched(tx, at, BATCH),
        "lock_schedules": lambda tx: tx.dialect.lock_schedules(tx, of_schedules, skip_locked=False),
        "lock_schedules_unlocked": lambda tx: tx.dialect.lock_schedules(tx, of_schedules, skip_locked=True),
        "release_next": lambda tx: tx.dialect.release_next(tx, of_schedules),
        "release_next_of_groups": lambda tx: tx.dialect.release_next_of_groups(tx, waiting),
        "advance_fixed_delays": lambda tx: tx.dialect.advance_fixed_delays(tx, dict.fromkeys(of_schedules, at)),
        "lock_due_schedules": lambda tx: tx.dialect.lock_due_schedules(tx, at, BATCH),
        "find_next_fire_at": lambda tx: tx.dialect.find_next_fire_at(tx),
        "count_live_jobs": lambda tx: tx.dialect.count_live_jobs(tx, of_schedules),
        "are_definitions_applied": lambda tx: deployments.are_definitions_applied(tx, Deployment("shop@1", "shop", 1)),
        "advance_cursors": advance_cursors,
        "count_lane_by_minute": lambda tx: tx.dialect.count_lane_by_minute(
            tx, lane, None, after(days=1, hours=8), after(days=1, hours=9), 1_000_000
        ),
        "count_lane_by_minute_of_tenant": lambda tx: tx.dialect.count_lane_by_minute(
            tx, lane, "tenant1", after(days=1, hours=8), after(days=1, hours=9), 1_000_000
        ),
        "count_lane_by_minute_of_default": lambda tx: tx.dialect.count_lane_by_minute(
            tx, lane, "default", after(days=1, hours=8), after(days=1, hours=9), 1_000_000
        ),
        # The same on all databases.
        "count_in_flight": lambda tx: tx.run_sql(queue_limits.COUNT_IN_FLIGHT, queue="queue1"),
        "count_in_flight_by_group": lambda tx: tx.run_sql(queue_limits.COUNT_IN_FLIGHT_BY_GROUP, queue="queue1"),
        "stuck_groups": lambda tx: tx.run_sql(groups.STUCK_GROUPS, queue="queue1"),
        "list_unhandled": lambda tx: unhandled_topics._list_unhandled(tx, lane, ALL_ROUTES, (), at),
        "release_handled": lambda tx: unhandled_topics.release_handled(tx, ALL_ROUTES),
        "repair_holds": repair.repair_holds,
        "repair_missing_next": lambda tx: repair.repair_missing_next(tx, at, at, BATCH),
    }


OPERATIONS = _operations()
SMALL_TABLES = ("timebell_queues", "timebell_tenants", "timebell_finished")
SMALL_TABLES = ("timebell_queues", "timebell_tenants", "timebell_finished", "timebell_deployments")


class NoRows:
    """The empty result of a statement that is only recorded."""

    rowcount = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def all(self) -> list[Any]:
        return []

    def scalars(self) -> NoRows:
        return self

    def scalar(self) -> None:
        return None

    def scalar_one(self) -> int:
        return 0

    def one(self) -> Any:
        return SimpleNamespace(due_count=0)


def _literal_text(statement: Any, values: Any, dialect: Any) -> str:
    """Return a SQLAlchemy statement as SQL with its values."""
    valued = statement.params(values) if values else statement
    return str(valued.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


# PostgreSQL.


class RecordingTransaction:
    """Records the statements of an operation, each as text with numbered parameters, and their values."""

    def __init__(self) -> None:
        self.dialect = PostgresDialect()
        self.statements: list[tuple[str, list[Any]]] = []

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        text, names = statement.numbered
        self.statements.append((text, [params[name] for name in names]))
        return []

    def execute(self, statement: Any, values: Any = None) -> NoRows:
        if values and isinstance(statement, TextClause):
            self.run_sql(SQL(statement.text), **values)
        else:
            self.statements.append((_literal_text(statement, values, asyncpg_dialect()), []))
        return NoRows()

    def record(self, kind: str, rows: object) -> None:
        """Do nothing."""

    def notify(self, subject: str = "") -> None:
        raise AssertionError


def _recorded(name: str) -> list[tuple[str, list[Any]]]:
    tx = RecordingTransaction()
    OPERATIONS[name](tx)
    return tx.statements


MOST_BUFFERS = {
    "scan_lanes": 600, "claim": 4_000, "rotate_tenants": 2_000, "claim_fair_shares": 4_000, "lock_due": 700,
    "lock_due_shares": 700, "start_locked": 4_000, "hold_for_group": 4_000, "count_in_flight": 700,
    "count_in_flight_by_group": 700, "release_next_of_groups": 4_000, "stuck_groups": 9_000,
    "lock_due_schedules": 500, "find_next_fire_at": 20, "renew_leases": 3_000, "retry": 5_000, "complete": 3_000,
    "list_running": 700, "list_unhandled": 3_000, "release_handled": 20, "repair_holds": 4_040,
    "repair_missing_next": 20, "are_definitions_applied": 20, "count_live_jobs": 1_000,
    "advance_cursors": 3_000, "lock_schedules": 1_000,
    "release_next": 2_000, "list_overdue_dispatched": 20, "dispatch": 5_000, "dispatch_unlocked": 6_000,
    "renew_leases_unlocked": 4_000, "retry_unlocked": 6_000, "complete_unlocked": 4_000, "complete_few": 300,
    "find_unchanged": 1_000, "lock_schedules_unlocked": 1_000, "claim_rechecking_queue": 4_000,
    "list_upcoming": 200, "scan_given_lanes": 600, "find_tenants": 20, "reserve_request_ids": 2_000,
    "insert_jobs": 9_000, "insert_jobs_returning": 9_000, "insert_running": 9_000, "insert_skipped": 5_000,
    "insert_requested": 11_000, "insert_change": 200, "insert_recorded": 300,
    "mark_serial": 2_000, "find_open_lanes": 100, "prune_finished": 20, "advance_fixed_delays": 3_000,
    "count_lane_by_minute": 500, "count_lane_by_minute_of_tenant": 500, "count_lane_by_minute_of_default": 1_000,
}  # fmt: skip


# Operations on connections that cache their plans; other connections plan anew where that is faster.
KEEP_PLANS = (
    "scan_lanes", "scan_given_lanes", "list_upcoming", "rotate_tenants", "claim", "claim_rechecking_queue",
    "renew_leases", "renew_leases_unlocked", "retry", "retry_unlocked", "complete", "complete_unlocked",
    "find_unchanged", "dispatch", "dispatch_unlocked", "list_running", "list_overdue_dispatched",
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
        await upgrade(url, FEATURES)
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


def _explain(url: str, name: str) -> list[dict[str, Any]]:
    """Execute an operation with the engine's connection settings, roll back and return the plans of its statements."""

    async def run() -> list[dict[str, Any]]:
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
    for number, (text, _) in enumerate(_recorded(name)):
        await connection.execute(f"PREPARE {name}_{number} AS {text}")


async def _executed(connection: asyncpg.Connection[Any], name: str) -> list[dict[str, Any]]:
    """Execute the prepared statements of an operation and return their plans with statistics."""
    plans: list[dict[str, Any]] = []
    for number, (_, values) in enumerate(_recorded(name)):
        given = f"({', '.join(map(_literal, values))})" if values else ""
        transaction = connection.transaction()
        await transaction.start()
        found = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {name}_{number}{given}")
        await transaction.rollback()
        plans += json.loads(found)
    return plans


def _literal(value: Any) -> str:
    if isinstance(value, list):
        value = "{" + ",".join(f'"{one}"' for one in value) + "}"
    return "NULL" if value is None else "'" + str(value).replace("'", "''") + "'"


def judged(url: str, name: str) -> tuple[int, float, str | None]:
    """Return the buffers touched by an operation, its milliseconds and the problem of its plans or None."""
    return _judged(_explain(url, name), name)


def _judged(explained: list[dict[str, Any]], name: str) -> tuple[int, float, str | None]:
    buffers = sum(one["Plan"]["Shared Hit Blocks"] + one["Plan"]["Shared Read Blocks"] for one in explained)
    faults = [fault for one in explained if (fault := _fault(name, one["Plan"])) is not None]
    if buffers > MOST_BUFFERS[name]:
        faults.append(f"{name} touched {buffers} buffers")
    return buffers, sum(one["Execution Time"] for one in explained), faults[0] if faults else None


def _fault(name: str, plan: dict[str, Any]) -> str | None:
    ours = [node for node in _nodes(plan) if str(node.get("Relation Name", "")).startswith("timebell_")]
    if not ours:
        return f"{name} touches no table"
    for node in ours:
        if node["Node Type"] == "Seq Scan" and not node["Relation Name"].startswith(SMALL_TABLES):
            return f"{name} reads all of {node['Relation Name']}"
    sorts = [node for node in _nodes(plan) if node["Node Type"] == "Sort"]
    most = DUE if name == "list_unhandled" else BATCH  # due jobs may be sorted, pending ones may not
    if any(node["Actual Rows"] > most for node in sorts):
        return f"{name} sorts more than its batch"
    if any(node.get("Rows Removed by Join Filter", 0) > 10 * BATCH for node in _nodes(plan)):
        return f"{name} compares each of its batch with each"
    return None


def _check(url: str, name: str) -> None:
    buffers, ms, fault = judged(url, name)
    print(f"\n{name}: {buffers} buffers, {ms:.2f} ms")
    assert fault is None, fault


def test_each_operation_has_a_limit() -> None:
    methods = {name for name in dir(Operations) if not name.startswith("_") and callable(getattr(Operations, name))}
    not_hot = {
        "to_db",
        "from_db",
        "insert_ignoring_duplicates",
        "upsert",
        "on_conflict",
        "json_text",
        "match_keys",
        "terminate_stalled_sessions",
    }
    assert methods - not_hot <= MOST_BUFFERS.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("name", MOST_BUFFERS)
def test_a_hot_statement_uses_an_index(few_rows: str, name: str) -> None:
    _check(few_rows, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", MOST_BUFFERS)
def test_a_hot_statement_uses_an_index_at_ten_million_jobs(many_rows: str, name: str) -> None:
    _check(many_rows, name)


def test_a_plan_cached_on_empty_tables_uses_an_index_on_full_ones(postgres: Postgres) -> None:
    """A node caches its plans, and statistics are updated later."""
    url = postgres.create_database()

    async def faults() -> list[str]:
        await upgrade(url, FEATURES)
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
        "scan_lanes",
        "list_upcoming",
        "rotate_tenants",
        "claim",
        "claim_rechecking_queue",
        "claim_fair_shares",
        "lock_due",
        "lock_due_shares",
    ],
)
def test_a_flood_of_one_tenant_is_not_read_completely(flooded: str, name: str) -> None:
    plan = _explain(flooded, name)[0]["Plan"]
    read = [node for node in _nodes(plan) if node.get("Relation Name") == "timebell_jobs"]
    assert read
    assert not [node for node in read if node["Node Type"] == "Seq Scan"]
    assert all(node["Actual Rows"] <= BATCH for node in read)


class PreparingTransaction(RecordingTransaction):
    """Records statements with parameters, as the driver prepares them."""

    def execute(self, statement: Any, values: Any = None) -> NoRows:
        compiled = statement.compile(dialect=asyncpg_dialect(), compile_kwargs={"render_postcompile": True})
        self.statements.append((str(compiled), [compiled.params[name] for name in compiled.positiontup or ()]))
        return NoRows()

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        """Return the only lane."""
        return [{"queue": "queue1", "priority": 1, "paused": False}]


PAGES_OF_A_TENANT: dict[str, Callable[[Any, str], object]] = {
    "jobs": lambda tx, tenant: repository.list_jobs(tx, {"tenant_id": tenant}, (), 50, None),
    "jobs_of_queue": lambda tx, tenant: repository.list_jobs(
        tx, {"tenant_id": tenant, "queue": "queue1"}, (), 50, None
    ),
    "jobs_with_key": lambda tx, tenant: repository.list_jobs(tx, {"tenant_id": tenant, "key": "k"}, (), 50, None),
    "jobs_of_topic": lambda tx, tenant: repository.list_jobs(
        tx, {"tenant_id": tenant, "topic": "topic.3"}, (), 50, None
    ),
    "count_due": lambda tx, tenant: overview.count_due(tx, tenant, after(days=1)),
    "list_late_queues": lambda tx, tenant: waiting.list_late_queues(tx, tenant, after(days=1)),
}


@pytest.mark.parametrize("name", PAGES_OF_A_TENANT)
def test_pages_of_a_new_tenant_do_not_read_the_jobs_of_a_large_one(flooded: str, name: str) -> None:
    """PostgreSQL reuses a plan for all tenants, and then assumes that each has as many jobs as the average one."""
    tx = PreparingTransaction()
    PAGES_OF_A_TENANT[name](tx, "new")

    async def explain() -> list[dict[str, Any]]:
        settings = SESSION_SETTINGS | {"plan_cache_mode": "force_generic_plan"}
        connection = await asyncpg.connect(flooded, server_settings=settings)
        plans: list[dict[str, Any]] = []
        for number, (text, values) in enumerate(tx.statements):
            await connection.execute(f"PREPARE page_{number} AS {text}")
            given = f"({', '.join(map(_literal, values))})" if values else ""
            plans += json.loads(
                await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE page_{number}{given}")
            )
        await connection.close()
        return plans

    plans = asyncio.run(explain())
    assert plans
    buffers = sum(one["Plan"]["Shared Hit Blocks"] + one["Plan"]["Shared Read Blocks"] for one in plans)
    assert buffers <= 100, plans


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
    whole, _, _ = judged(remembered, "scan_lanes")
    buffers, _, fault = judged(remembered, "scan_given_lanes")
    assert whole > FEW // 20
    assert fault is None, f"{fault}; {buffers} buffers"


# SQLite.

MOST_STEPS = 60_000  # of SQLite's virtual machine; reading each of 200,000 rows takes a million


@pytest.fixture(scope="module")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "timebell.db"
    asyncio.run(upgrade(f"sqlite:///{file}", FEATURES))
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


class MeasuringTransaction(SqliteTransaction):
    """Executes the statements of an operation, checks their plans and counts their steps."""

    steps_taken = 0  # by the last statement

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        return self._measure(statement.text, params)

    def execute(self, statement: Any, values: Any = None) -> Any:
        if values and isinstance(statement, TextClause):
            self._measure(statement.text, values)
        else:
            self._measure(_literal_text(statement, values, sqlite_dialect()), {})
        return NoRows()

    def _measure(self, text: str, params: Any) -> list[Row]:
        plan = [row[3] for row in self.driver.execute(f"EXPLAIN QUERY PLAN {text}", params)]
        for line in plan:
            small = line.removeprefix("SCAN ").startswith(SMALL_TABLES)
            whole = line.startswith("SCAN timebell_") and " INDEX " not in line and not small
            assert not whole, f"{text} reads a whole table: {plan}"
        sorts = [line for line in plan if line == "USE TEMP B-TREE FOR ORDER BY"]
        # Jobs dispatched to external workers are few, and so are the selected rows of a batch.
        assert not sorts or "'dispatched'" in text or "WHERE timebell_jobs.id IN" in text, f"{text} sorts: {plan}"
        self.steps_taken = 0
        self.driver.set_progress_handler(self._step, 100)
        cursor = self.driver.execute(text, params)
        rows: list[Row] = [
            dict(zip([column[0] for column in cursor.description or ()], row, strict=False)) for row in cursor
        ]
        self.driver.set_progress_handler(None, 0)
        assert self.steps_taken <= MOST_STEPS, f"{text} took {self.steps_taken} steps"
        return rows

    def _step(self) -> None:
        self.steps_taken += 100


@pytest.mark.parametrize(
    ("name", "claims_many"),
    [*((name, False) for name in OPERATIONS), ("claim", True), ("claim_rechecking_queue", True)],
)
def test_a_hot_statement_uses_an_index_on_sqlite(
    filled_file: Path, name: str, claims_many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = SqliteDialect()
    monkeypatch.setattr(dialect, "_last_claim_was_large", claims_many)
    driver = sqlite3.connect(filled_file, isolation_level=None)
    tx = MeasuringTransaction(None, dialect, UNOBSERVED_STEPS, driver)  # type: ignore[arg-type]
    try:
        driver.execute("BEGIN")
        OPERATIONS[name](tx)
        driver.execute("ROLLBACK")
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


# MariaDB.

MARIADB_ROWS = 40_000
MOST_READS = 2_000  # rows read by one operation
# A look-up within a recursive query reads all held jobs of a tenant.
MOST_READS_OF_REPAIR = {"stuck_groups": 150_000, "repair_holds": 450_000}


@pytest.fixture(scope="module")
def filled_mariadb(mariadb: MariaDB) -> Iterator[str]:
    url = mariadb.create_database()
    asyncio.run(upgrade(url, FEATURES))
    words = {
        "id": "CONCAT('00000000-0000-7000-8000-', LPAD(LOWER(HEX(n)), 12, '0'))",
        "schedule": f"CASE WHEN n >= {RUNNING + DUE} AND n < {RUNNING + DUE + SCHEDULES} THEN"
        f" CONCAT('00000000-0000-7000-8000-', LPAD(LOWER(HEX(n - {RUNNING + DUE})), 12, '0')) END",
        "at": f"CASE WHEN n < {RUNNING + DUE} THEN n * 1000000 ELSE {to_micros(after(days=1))} + n * 1000000 END",
        "soon": f"CASE WHEN n < 200 THEN 0 ELSE {to_micros(after(days=1))} + n * 1000000 END",
        "false": "false", "true": "true", "t0": "0", "running": RUNNING, "waiting": MARIADB_ROWS - WAITING,
    }  # fmt: skip
    engine = engine_for(MariaServer(url))
    with engine.connect() as connection:
        connection.exec_driver_sql("SET SESSION sql_mode = 'PIPES_AS_CONCAT'")
        for text in (
            FILL.format(series=f"(SELECT seq AS n FROM seq_0_to_{MARIADB_ROWS - 1}) AS s", **words),
            FILL_SCHEDULES.format(series=f"(SELECT seq AS n FROM seq_0_to_{SCHEDULES - 1}) AS s", **words),
            FILL_QUEUES,
        ):
            connection.exec_driver_sql(text.replace("%", "%%"))
        connection.commit()
    yield url
    engine.dispose()
    mariadb.drop_database(url)


class ExplainingTransaction(MariaTransaction):
    """Checks the plans of the statements of an operation before it executes them."""

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        text, names = statement.formatted
        self._explain(text, tuple(params[name] for name in names))
        return super().run_sql(statement, **params)

    def execute(self, statement: Any, rows: Any = None) -> Any:
        compiled = statement.compile(dialect=self.connection.dialect)
        expanded = compiled.construct_expanded_state(rows)
        processors = {**compiled._bind_processors, **expanded.processors}
        self._explain(expanded.statement, {
            name: processors[name](value) if name in processors else value
            for name, value in expanded.parameters.items()
        })  # fmt: skip
        return super().execute(statement, rows)

    def _explain(self, text: str, values: Any) -> None:
        if text == "SHOW WARNINGS":
            return
        for row in self.connection.exec_driver_sql(f"EXPLAIN {text}", values).mappings():
            is_full_scan = row["type"] in ("ALL", "index") and row["key"] is None
            ours = str(row["table"]) in ("j", "s", "w", "o", "timebell_jobs", "timebell_schedules")
            assert not (ours and is_full_scan), f"{text} reads a whole table: {dict(row)}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_hot_statement_uses_an_index_on_mariadb(filled_mariadb: str, name: str) -> None:
    engine = engine_for(MariaServer(filled_mariadb))
    with engine.connect() as connection:
        tx = ExplainingTransaction(connection, MariaDialect(), UNOBSERVED_STEPS)
        before = _rows_read(connection)
        OPERATIONS[name](tx)
        reads = _rows_read(connection) - before
        connection.rollback()
    engine.dispose()
    print(f"\n{name}: {reads} rows read")
    assert reads <= MOST_READS_OF_REPAIR.get(name, MOST_READS), f"{name} read {reads} rows"


def _rows_read(connection: Connection) -> int:
    counters = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'")
    return sum(int(count) for name, count in counters if name != "Handler_read_rnd_deleted")
