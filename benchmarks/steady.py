"""`python -m benchmarks soak [options]`: check that memory, lag and tables do not grow in a run of twenty minutes.

The load is half of the maximum rate, and retention is on. `python -m benchmarks pinned [options]` holds a REPEATABLE
READ transaction open for ten minutes, so that PostgreSQL cannot remove dead rows, and compares the duration of claims.

Both print a line for each of twenty slices of the time. The exit status is 0 only if nothing grows, or if the p99 of
claims is at most four times the initial one. The result of a run of full length is stored in benchmarks/results and
shown in docs/performance.md; that of other runs is stored only in `--folder`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from benchmarks import machine, performance, processes, report, workloads
from benchmarks.systems import open_systems

SLICES = 20
PINNED_MAX_RATIO = 4.0
FULL_SOAK_MINUTES, FULL_PIN_MINUTES = 20.0, 10.0
GROWTH_LIMITS = {  # allowed growth: factor, and absolute increase
    "mb": (1.1, 5.0), "lag_p99_ms": (1.5, 2.0), "jobs_mb": (1.2, 16.0), "finished_mb": (1.2, 32.0),
}  # fmt: skip
COLUMNS = ("jobs", "lag_p50_ms", "lag_p99_ms", "lag_max_ms", "claim_p50_ms", "claim_p99_ms", "mb", "jobs_mb",
           "finished_mb")  # fmt: skip
SIZES = (
    "SELECT pg_total_relation_size('timebell_jobs') / 1048576.0, (SELECT sum(pg_total_relation_size(relid)) FROM"
    " pg_partition_tree('timebell_finished')) / 1048576.0"
)
PEAK_JOBS = 20_000  # to measure the maximum rate

Sample = dict[str, float]


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Return the medians of a figure in the second and in the last quarter; the first quarter is warm-up."""
    values = [sample[name] for sample in samples]
    quarter = max(1, len(values) // 4)
    return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def find_growth(samples: Sequence[Sample]) -> list[str]:
    """Return a message for each figure that grew more than allowed."""
    messages = []
    for name, (factor, increase) in GROWTH_LIMITS.items():
        before, after = growth(samples, name)
        if after > before * factor + increase:
            messages.append(f"{name} grew from {report.format_number(before)} to {report.format_number(after)}")
    return messages


async def _read_line(process: asyncio.subprocess.Process, timeout: float) -> dict[str, Any]:
    """Read the next JSON line of a measured process."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout)
    if not line:
        raise RuntimeError("a measured process stopped")
    message: dict[str, Any] = json.loads(line)
    return message


async def _table_sizes(url: str) -> dict[str, float]:
    """Return the sizes of the tables in MB; on SQLite those of the WAL file and of the database file."""
    if url.startswith("sqlite"):
        path = url.removeprefix("sqlite:///")
        database, wal = (
            os.path.getsize(file) / 2**20 if os.path.exists(file) else 0.0 for file in (path, f"{path}-wal")
        )
        return {"jobs_mb": wal, "finished_mb": database}
    connection = await asyncpg.connect(url)
    try:
        jobs, finished = await connection.fetchrow(SIZES)
    finally:
        await connection.close()
    return {"jobs_mb": float(jobs), "finished_mb": float(finished)}


async def _run_load(
    system: Any, rate: float, seconds: float, slices: int, pinned: range | None = None
) -> tuple[list[Sample], str]:
    """Run a constant load; print and return a sample for each slice, and a summary.

    During the slices of `pinned`, a snapshot is held open.
    """
    interval, samples, snapshot = seconds / slices, list[Sample](), None
    spec = {"every": interval, "retention": seconds / 10, "tidy": seconds / 100}
    async with processes.child("child_steady", "work", system.url, spec) as node:
        await _read_line(node, 60)
        producer_spec = {"rate": rate, "seconds": seconds + interval}
        async with processes.child("child_steady", "produce", system.url, producer_spec) as producer:
            while not (started := (await _read_line(node, 3 * interval + 60))["jobs"]):
                pass  # the first jobs are not due yet
            for at in range(slices):
                if pinned is not None and at == pinned.start:
                    snapshot = await _hold_snapshot(system.url)
                sample = {**await _read_line(node, 3 * interval + 60), **await _table_sizes(system.url)}
                samples.append(sample)
                print("  ".join(f"{report.format_number(sample[name]):>12}" for name in COLUMNS), flush=True)
                if snapshot is not None and pinned is not None and at == pinned.stop - 1:
                    await snapshot.close()
            produced = await _read_line(producer, 60 + seconds)
        while rest := (await _read_line(node, 3 * interval + 60))["jobs"]:
            started += rest
    started += sum(sample["jobs"] for sample in samples)
    created, behind = produced["made"], produced["behind"]
    summary = f"{created:,} jobs created, {started:,.0f} started; the producer was behind {behind} times"
    print(summary)
    if started != created:
        raise RuntimeError(f"{created - started:,.0f} jobs did not start")
    return samples, summary


async def _hold_snapshot(url: str) -> asyncpg.Connection[Any]:
    """Open a transaction with a snapshot of now; it lasts until the connection is closed."""
    connection = await asyncpg.connect(url)
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await connection.fetchval("SELECT count(*) FROM timebell_nodes")
    return connection


async def _measure_peak(system: Any) -> float:
    """Return the jobs per second of W6."""
    async with system:
        figures = await workloads.w6(system, 1, workloads.Sizes(drain=PEAK_JOBS))
    print(f"{system.store}: {report.format_number(figures['jobs_s'])} jobs/s when {PEAK_JOBS:,} are due", flush=True)
    return float(figures["jobs_s"])


def _sample_table(samples: Sequence[Sample], interval: float) -> list[list[str]]:
    """Return the table of the samples, with the elapsed minutes."""
    rows = [
        [f"{at * interval / 60:.3g}", *(report.format_number(sample[name]) for name in COLUMNS)]
        for at, sample in enumerate(samples, 1)
    ]
    return [["minutes", *COLUMNS], *rows]


def _print_header() -> None:
    print("  ".join(f"{name:>12}" for name in COLUMNS), flush=True)


async def _soak(args: argparse.Namespace) -> bool:
    passed = True
    async with open_systems(args.stores) as systems:
        for system in systems:
            rate = args.rate or await _measure_peak(system) / 2
            async with system:
                output = [f"{system.store}: {rate:,.0f} jobs/s for {args.minutes:g} minutes"]
                print(f"\n{output[0]}")
                _print_header()
                samples, count = await _run_load(system, rate, 60 * args.minutes, SLICES)
            problems = find_growth(samples)
            for name in GROWTH_LIMITS:
                before, after = map(report.format_number, growth(samples, name))
                output.append(f"{name}: {before} in the second quarter, {after} in the last")
            output.append(f"NOT FLAT: {'; '.join(problems)}" if problems else "flat")
            print(*output[1:], sep="\n")
            if folder := args.folder or (performance.RESULTS if args.minutes >= FULL_SOAK_MINUTES else None):
                rows = _sample_table(samples, 60 * args.minutes / SLICES)
                performance.save_long_run(folder, f"soak-{system.store}", [output[0], count, *output[1:]], [rows])
            passed = passed and not problems
    print(machine.summary_line())
    return passed


async def _pinned(args: argparse.Namespace) -> bool:
    async with open_systems("postgres") as (system,), system:
        unpinned_slices = max(3, SLICES // 4)
        interval = 60 * args.minutes / SLICES
        slices = range(unpinned_slices, unpinned_slices + SLICES)
        output = [f"{args.rate:,.0f} jobs/s; pinned in slices {slices.start + 1} to {slices.stop} of {interval:g} s"]
        print(output[0])
        _print_header()
        samples, count = await _run_load(system, args.rate, interval * slices.stop, slices.stop, slices)
    before, after = (
        median(sample["claim_p99_ms"] for sample in samples[:unpinned_slices]),
        median(sample["claim_p99_ms"] for sample in samples[-SLICES // 4 :]),
    )
    ratio = f"{after / before:.1f} times"
    output += [
        count,
        f"claim p99: {report.format_number(before)} ms before, {report.format_number(after)} ms at the end: {ratio}",
    ]
    print(output[-1], machine.summary_line(), sep="\n")
    if folder := args.folder or (performance.RESULTS if args.minutes >= FULL_PIN_MINUTES else None):
        performance.save_long_run(folder, "pinned", output, [_sample_table(samples, interval)])
    return after <= PINNED_MAX_RATIO * before


def soak(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if nothing grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="postgres", help="sqlite, postgres or both")
    parser.add_argument("--minutes", type=float, default=FULL_SOAK_MINUTES)
    parser.add_argument("--rate", type=float, help="jobs per second; default: half of the measured maximum")
    parser.add_argument("--folder", type=Path, help="store the results in this folder")
    return 0 if asyncio.run(_soak(parser.parse_args(argv))) else 1


def pinned(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if claims take at most four times as long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pinned", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=FULL_PIN_MINUTES, help="duration of the snapshot")
    parser.add_argument("--rate", type=float, default=1000.0, help="jobs per second")
    parser.add_argument("--folder", type=Path, help="store the results in this folder")
    return 0 if asyncio.run(_pinned(parser.parse_args(argv))) else 1
