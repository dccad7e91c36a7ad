"""`python -m benchmarks plans [options]`: cost of ten million pending jobs, and plans of all hot statements.

At each of `--sizes` pending jobs, the benchmark measures the lag as in W3 and the CPU time of the server per job. With
the largest size it then measures the memory of a node (`timebell run`) and, with `--finished` finished jobs, checks the
plan of every hot statement as in `tests/conformance/test_query_plans.py`. The exit status is 1 if a plan scans a table
or a node uses more than 150 MB. With ten million jobs the result is stored in benchmarks/results and shown in
docs/performance.md; otherwise it is stored only in `--folder`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks import machine, performance, report, workloads
from benchmarks.machine import rss_mb
from benchmarks.systems import Server, TimebellOnPostgres
from tests.conformance import test_query_plans as plan_checks
from tests.servers import free_port

# Lower job numbers are reserved for the plans; the pending jobs start here.
FIRST_PENDING = plan_checks.RUNNING + plan_checks.DUE + plan_checks.SCHEDULES
BULK_ROWS = 200_000  # from this number on, indexes are created after the rows
MAX_NODE_MB = 150.0
FULL_SIZE = 10_000_000  # pending jobs
MEMORY_SAMPLES, SAMPLE_INTERVAL_SECONDS = 10, 2.0
FINISHED = """
INSERT INTO timebell_finished (id, tenant_id, topic, kind, scheduled_at, run_at, timezone, payload, queue, priority,
    serial, state, attempt, attempts_used, created_at, started_at, finished_at)
SELECT ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, 'default', 'topic.' || (n % 20), 'once', at, at,
    'UTC', '{"n": 1}', 'queue' || (n % 3), n % 2, false, CASE n % 1000 WHEN 0 THEN 'failed' ELSE 'completed' END, 1,
    1, at, at, at
FROM (SELECT n, now() - n * interval '100 ms' AS at FROM generate_series(1, $1::int) AS n) AS numbers
"""


def _fill_parameters(waiting: int) -> dict[str, str]:
    """Return the parameters of the FILL statements of the test, with pending jobs that are due in a year."""
    first_of_schedules = plan_checks.RUNNING + plan_checks.DUE
    t0 = "TIMESTAMPTZ '2026-01-01T00:00:00Z'"
    return {
        "id": "('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid",
        "schedule": f"CASE WHEN n >= {first_of_schedules} AND n < {FIRST_PENDING} THEN"
        f" ('00000000-0000-7000-8000-' || lpad(to_hex(n - {first_of_schedules}), 12, '0'))::uuid END",
        "at": f"CASE WHEN n < {first_of_schedules} THEN {t0} + n * interval '1 second' ELSE"
        " now() + interval '1 year' + n * interval '1 second' END",
        "soon": f"CASE WHEN n < 200 THEN {t0} ELSE now() + interval '1 year' + n * interval '1 s' END",
        "false": "false", "true": "true", "t0": t0, "running": str(plan_checks.RUNNING), "waiting": str(waiting),
    }  # fmt: skip


async def _insert_pending(connection: Any, first: int, count: int) -> None:
    """Insert `count` pending jobs; for many, drop the indexes and create them afterwards."""
    select_indexes = (
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'timebell_jobs' AND indexname NOT LIKE '%_pkey'"
    )
    indexes = await connection.fetch(select_indexes) if count >= BULK_ROWS else []
    for name, _ in indexes:
        await connection.execute(f'DROP INDEX "{name}"')
    series = f"generate_series({first}, {first + count - 1}) AS n"
    await connection.execute(plan_checks.FILL.format(series=series, **_fill_parameters(first + count)), timeout=3600)
    await connection.execute("SET maintenance_work_mem = '512MB'")
    for _, definition in indexes:
        await connection.execute(definition, timeout=3600)
    await connection.execute("VACUUM ANALYZE timebell_jobs", timeout=3600)
    await connection.execute("CHECKPOINT", timeout=600)


async def _insert_matching_rows(connection: Any, pending: int, finished: int) -> None:
    """Insert rows that the statements find: running and due jobs, jobs of schedules, and jobs that wait in groups."""
    waiting = FIRST_PENDING + pending
    for first, last in ((0, FIRST_PENDING - 1), (waiting, waiting + plan_checks.WAITING - 1)):
        series = f"generate_series({first}, {last}) AS n"
        await connection.execute(plan_checks.FILL.format(series=series, **_fill_parameters(waiting)), timeout=600)
    series = f"generate_series(0, {plan_checks.SCHEDULES - 1}) AS n"
    await connection.execute(plan_checks.FILL_SCHEDULES.format(series=series, **_fill_parameters(waiting)), timeout=600)
    await connection.execute(plan_checks.FILL_QUEUES)
    await connection.execute(FINISHED, finished, timeout=3600)
    for table in ("timebell_jobs", "timebell_schedules", "timebell_finished"):
        await connection.execute(f"VACUUM ANALYZE {table}", timeout=3600)


async def _measure_steady(system: TimebellOnPostgres, pending: int, sizes: workloads.Sizes) -> list[str]:
    """Return a row of the table with the lag, and the CPU time of the server per job."""
    figures = await workloads.w3(system, 1, sizes)
    number = report.format_number
    each = 1000 * figures["server_cpu_s"] / sizes.steady if system.server_pid else None
    errors = "/".join(str(figures.get(name, 0)) for name in report.SUMMED_FIGURES)
    lags = [number(figures.get(name)) for name in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms")]
    return [f"{pending:,} pending", *lags, number(each), errors, number(figures["foreign_cores"])]


async def _measure_node_mb(url: str) -> float:
    """Return the maximum memory of an idle node in MB."""
    command = [sys.executable, "-m", "timebell.cli.main", "run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    settings = {"TIMEBELL_DATABASE_URL": url, "TIMEBELL_HTTP_PORT": str(free_port()), "TIMEBELL_LOG_LEVEL": "warning"}
    node = await asyncio.create_subprocess_exec(*command, env=environment | settings, stdin=asyncio.subprocess.DEVNULL)
    maximum = 0.0
    try:
        for _ in range(MEMORY_SAMPLES):
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)
            if node.returncode is not None:
                raise RuntimeError(f"timebell run stopped (exit {node.returncode})")
            maximum = max(maximum, rss_mb(node.pid))
    finally:
        with suppress(ProcessLookupError):
            node.terminate()
        try:
            await asyncio.wait_for(node.wait(), 40)
        except TimeoutError:
            node.kill()
            await node.wait()
    return maximum


def _check_plans(url: str) -> tuple[list[list[str]], list[str]]:
    """Return a row for each statement, and the problems found."""
    rows, problems = [["statement", "buffers", "ms", ""]], []
    for name in plan_checks.MOST_BUFFERS:
        buffers, ms, fault = plan_checks.judged(url, name)
        rows.append([name, f"{buffers:,}", f"{ms:.2f}", fault or ""])
        if fault:
            problems.append(fault)
    return rows, problems


async def _main(args: argparse.Namespace) -> bool:
    server, problems = Server(), list[str]()
    await server.start()
    sizes = workloads.Sizes(steady=args.jobs, span=args.seconds)
    lines = [["", "p50 ms", "p99 ms", "max ms", "server CPU ms a job", "lost/dup/early/not completed", "foreign cores"]]
    try:
        async with TimebellOnPostgres(server) as system:
            connection, loaded = await asyncpg.connect(system.url), 0
            for pending in args.sizes:
                began = time.monotonic()
                await _insert_pending(connection, FIRST_PENDING + loaded, pending - loaded)
                loaded = pending
                _log(f"{pending:,} pending after {time.monotonic() - began:.0f} s")
                lines.append(await _measure_steady(system, pending, sizes))
                await connection.execute("TRUNCATE timebell_finished")  # so that the next run counts only its own jobs
            mb = await _measure_node_mb(system.url)
            if mb > MAX_NODE_MB:
                problems.append(f"a node uses {mb:.0f} MB")
            began = time.monotonic()
            await _insert_matching_rows(connection, loaded, args.finished)
            _log(f"{args.finished:,} finished after {time.monotonic() - began:.0f} s")
            await connection.close()
            plans, plan_problems = await asyncio.to_thread(_check_plans, system.url)
            problems += plan_problems
        node = f"a node: {mb:.0f} MB"
        print(machine.summary_line(), report.format_table(lines), node, report.format_table(plans), sep="\n\n")
        if folder := args.folder or (performance.RESULTS if loaded >= FULL_SIZE else None):
            counts = f"plans with {loaded:,} pending and {args.finished:,} finished jobs"
            verdict = [f"WRONG: {problem}" for problem in problems] or ["no plan reads a table"]
            performance.save_long_run(folder, "plans", [node, counts, *verdict], [lines, plans])
    finally:
        await server.close()
    for problem in problems:
        print(f"\nWRONG: {problem}")
    return not problems


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sizes(text: str) -> list[int]:
    return sorted(int(size.replace("_", "")) for size in text.split(","))


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if there are no problems."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plans", description=__doc__, allow_abbrev=False)
    parser.add_argument("--sizes", type=_sizes, default=[10_000, 1_000_000, FULL_SIZE], help="numbers of pending jobs")
    parser.add_argument("--finished", type=int, default=1_000_000, help="finished jobs")
    parser.add_argument("--jobs", type=int, default=4_000, help="due at each size")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration within which they are due")
    parser.add_argument("--folder", type=Path, help="store the results in this folder")
    return 0 if asyncio.run(_main(parser.parse_args(argv))) else 1
