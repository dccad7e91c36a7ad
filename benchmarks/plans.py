"""`python -m benchmarks plans [options]`: what ten million pending jobs cost, and whether more is read than need be.

At each of `--sizes` pending jobs: the lag of some jobs a second as in W3, and the CPU that the server spends on each.
Then, at the last of them: the memory of a node (`timebell run`); and with `--finished` jobs beside, the plan of every
hot statement, as `tests/conformance/test_plans.py` judges it. Exit status 1 if a plan is a scan, or a node takes more
than 150 MB. With ten million it is kept in benchmarks/results and shown in docs/performance.md; else only where
`--folder` says.
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
from tests.conformance import test_plans as judged
from tests.servers import free_port

NUMBERS = judged.RUNNING + judged.DUE + judged.SCHEDULES  # below are those of the plans, above those that wait
MANY = 200_000  # rows from which on indexes are made after them
MOST_MB = 150.0
FULL = 10_000_000  # pending jobs
LOOKS, EVERY = 10, 2.0  # at a node's memory; seconds
FINISHED = """
INSERT INTO timebell_finished (id, tenant_id, topic, kind, scheduled_at, run_at, timezone, payload, queue, priority,
    serial, state, attempt, tries, created_at, started_at, finished_at)
SELECT ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, 'default', 'topic.' || (n % 20), 'once', at, at,
    'UTC', '{"n": 1}', 'queue' || (n % 3), n % 2, false, CASE n % 1000 WHEN 0 THEN 'failed' ELSE 'completed' END, 1,
    1, at, at, at
FROM (SELECT n, now() - n * interval '100 ms' AS at FROM generate_series(1, $1::int) AS n) AS made
"""


def _words(waiting: int) -> dict[str, str]:
    """As the test fills its tables, but what waits does so in the reader's future."""
    t0 = "TIMESTAMPTZ '2026-01-01T00:00:00Z'"
    return {
        "id": "('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid",
        "schedule": f"CASE WHEN n >= {judged.RUNNING + judged.DUE} AND n < {NUMBERS} THEN"
        f" ('00000000-0000-7000-8000-' || lpad(to_hex(n - {judged.RUNNING + judged.DUE}), 12, '0'))::uuid END",
        "at": f"CASE WHEN n < {judged.RUNNING + judged.DUE} THEN {t0} + n * interval '1 second' ELSE"
        " now() + interval '1 year' + n * interval '1 second' END",
        "soon": f"CASE WHEN n < 200 THEN {t0} ELSE now() + interval '1 year' + n * interval '1 s' END",
        "false": "false", "true": "true", "t0": t0, "running": str(judged.RUNNING), "waiting": str(waiting),
    }  # fmt: skip


async def _fill(connection: Any, first: int, count: int) -> None:
    """So many pending jobs more; of many, the indexes are made at the end."""
    made = (
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'timebell_jobs' AND indexname NOT LIKE '%_pkey'"
    )
    indexes = await connection.fetch(made) if count >= MANY else []
    for name, _ in indexes:
        await connection.execute(f'DROP INDEX "{name}"')
    series = f"generate_series({first}, {first + count - 1}) AS n"
    await connection.execute(judged.FILL.format(series=series, **_words(first + count)), timeout=3600)
    await connection.execute("SET maintenance_work_mem = '512MB'")
    for _, definition in indexes:
        await connection.execute(definition, timeout=3600)
    await connection.execute("VACUUM ANALYZE timebell_jobs", timeout=3600)
    await connection.execute("CHECKPOINT", timeout=600)


async def _special(connection: Any, pending: int, finished: int) -> None:
    """What the statements look for: jobs that run, are due, are of schedules, wait for others of their group."""
    waiting = NUMBERS + pending
    for first, last in ((0, NUMBERS - 1), (waiting, waiting + judged.WAITING - 1)):
        series = f"generate_series({first}, {last}) AS n"
        await connection.execute(judged.FILL.format(series=series, **_words(waiting)), timeout=600)
    series = f"generate_series(0, {judged.SCHEDULES - 1}) AS n"
    await connection.execute(judged.FILL_SCHEDULES.format(series=series, **_words(waiting)), timeout=600)
    await connection.execute(judged.FILL_QUEUES)
    await connection.execute(FINISHED, finished, timeout=3600)
    for table in ("timebell_jobs", "timebell_schedules", "timebell_finished"):
        await connection.execute(f"VACUUM ANALYZE {table}", timeout=3600)


async def _steady(system: TimebellOnPostgres, pending: int, sizes: workloads.Sizes) -> list[str]:
    """A row of the table: the lag, and what a job costs the server."""
    figures = await workloads.w3(system, 1, sizes)
    number = report.number
    each = 1000 * figures["server_cpu_s"] / sizes.steady if system.server_pid else None
    faults = "/".join(str(figures.get(name, 0)) for name in report.SUMMED)
    lags = [number(figures.get(name)) for name in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms")]
    return [f"{pending:,} pending", *lags, number(each), faults, number(figures["foreign_cores"])]


async def memory(url: str) -> float:
    """MB that a node takes at most while it stands beside all of that."""
    command = [sys.executable, "-m", "timebell.cli.main", "run"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    settings = {"TIMEBELL_DATABASE_URL": url, "TIMEBELL_HTTP_PORT": str(free_port()), "TIMEBELL_LOG_LEVEL": "warning"}
    node = await asyncio.create_subprocess_exec(*command, env=plain | settings, stdin=asyncio.subprocess.DEVNULL)
    most = 0.0
    try:
        for _ in range(LOOKS):
            await asyncio.sleep(EVERY)
            if node.returncode is not None:
                raise RuntimeError(f"timebell run ended (exit {node.returncode})")
            most = max(most, rss_mb(node.pid))
    finally:
        with suppress(ProcessLookupError):
            node.terminate()
        try:
            await asyncio.wait_for(node.wait(), 40)
        except TimeoutError:
            node.kill()
            await node.wait()
    return most


def _plans(url: str) -> tuple[list[list[str]], list[str]]:
    """A row for each statement, and what is wrong."""
    rows, wrong = [["statement", "buffers", "ms", ""]], []
    for name in judged.MOST_BUFFERS:
        buffers, ms, fault = judged.judged(url, name)
        rows.append([name, f"{buffers:,}", f"{ms:.2f}", fault or ""])
        if fault:
            wrong.append(fault)
    return rows, wrong


async def _main(given: argparse.Namespace) -> bool:
    server, wrong = Server(), list[str]()
    await server.start()
    sizes = workloads.Sizes(steady=given.jobs, span=given.seconds)
    lines = [["", "p50 ms", "p99 ms", "max ms", "server CPU ms a job", "lost/dup/early/not completed", "foreign cores"]]
    try:
        async with TimebellOnPostgres(server) as system:
            connection, there = await asyncpg.connect(system.url), 0
            for pending in given.sizes:
                began = time.monotonic()
                await _fill(connection, NUMBERS + there, pending - there)
                there = pending
                _say(f"{pending:,} pending after {time.monotonic() - began:.0f} s")
                lines.append(await _steady(system, pending, sizes))
                await connection.execute("TRUNCATE timebell_finished")  # so that the next run counts its own
            mb = await memory(system.url)
            if mb > MOST_MB:
                wrong.append(f"a node takes {mb:.0f} MB")
            began = time.monotonic()
            await _special(connection, there, given.finished)
            _say(f"{given.finished:,} finished after {time.monotonic() - began:.0f} s")
            await connection.close()
            plans, faults = await asyncio.to_thread(_plans, system.url)
            wrong += faults
        node = f"a node: {mb:.0f} MB"
        print(machine.line(), report.table(lines), node, report.table(plans), sep="\n\n")
        if folder := given.folder or (performance.RESULTS if there >= FULL else None):
            beside = f"plans with {there:,} pending and {given.finished:,} finished jobs"
            verdict = [f"WRONG: {one}" for one in wrong] or ["no plan reads a table"]
            performance.keep(folder, "plans", [node, beside, *verdict], [lines, plans])
    finally:
        await server.close()
    for one in wrong:
        print(f"\nWRONG: {one}")
    return not wrong


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sizes(text: str) -> list[int]:
    return sorted(int(one.replace("_", "")) for one in text.split(","))


def main(given: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plans", description=__doc__, allow_abbrev=False)
    parser.add_argument("--sizes", type=_sizes, default=[10_000, 1_000_000, FULL], help="of pending jobs")
    parser.add_argument("--finished", type=int, default=1_000_000, help="jobs beside them")
    parser.add_argument("--jobs", type=int, default=4_000, help="due at each size")
    parser.add_argument("--seconds", type=float, default=20.0, help="within which they are")
    parser.add_argument("--folder", type=Path, help="keep what was measured there")
    return 0 if asyncio.run(_main(parser.parse_args(given))) else 1
