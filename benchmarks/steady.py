"""`python -m benchmarks soak [options]`: twenty minutes at half the rate at which due jobs go, with retention on; is
memory flat, is the lag, are the tables?

`python -m benchmarks pinned [options]`: the same with a session of REPEATABLE READ that stays open for ten minutes, so
that PostgreSQL keeps every row that goes meanwhile; what becomes of the time of a claim?

Time is cut into twenty slices, with a line for each. The exit status is 0 only if it is flat, or the p99 of claims at
most four times what it was. A run of full length is kept in benchmarks/results and shown in docs/performance.md; any
other only where `--folder` says.
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
from benchmarks.systems import chosen

SLICES = 20
PINNED_MOST = 4.0
SOAKED, HELD = 20.0, 10.0  # minutes of a full run of each
JUDGED = {  # how many times what it was a figure may become, and what more is no growth
    "mb": (1.1, 5.0), "lag_p99_ms": (1.5, 2.0), "jobs_mb": (1.2, 16.0), "finished_mb": (1.2, 32.0),
}  # fmt: skip
COLUMNS = ("jobs", "lag_p50_ms", "lag_p99_ms", "lag_max_ms", "claim_p50_ms", "claim_p99_ms", "mb", "jobs_mb",
           "finished_mb")  # fmt: skip
SIZES = (
    "SELECT pg_total_relation_size('timebell_jobs') / 1048576.0, (SELECT sum(pg_total_relation_size(relid)) FROM"
    " pg_partition_tree('timebell_finished')) / 1048576.0"
)
DRAIN = 20_000  # jobs to find the peak with

Sample = dict[str, float]


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """The median of a figure in the second quarter of the time, and in the last one: what comes first is warming up."""
    values = [sample[name] for sample in samples]
    quarter = max(1, len(values) // 4)
    return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def judged(samples: Sequence[Sample]) -> list[str]:
    """What is not flat."""
    wrong = []
    for name, (times, more) in JUDGED.items():
        was, became = growth(samples, name)
        if became > was * times + more:
            wrong.append(f"{name} grew from {report.number(was)} to {report.number(became)}")
    return wrong


async def _line(process: asyncio.subprocess.Process, patience: float) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), patience)
    if not line:
        raise RuntimeError("a measured process ended")
    found: dict[str, Any] = json.loads(line)
    return found


async def _sizes(url: str) -> dict[str, float]:
    """Of the tables; on SQLite of the whole file, and of what is not in it yet."""
    if url.startswith("sqlite"):
        path = url.removeprefix("sqlite:///")
        file, beside = (os.path.getsize(one) / 2**20 if os.path.exists(one) else 0.0 for one in (path, f"{path}-wal"))
        return {"jobs_mb": beside, "finished_mb": file}
    connection = await asyncpg.connect(url)
    try:
        jobs, finished = await connection.fetchrow(SIZES)
    finally:
        await connection.close()
    return {"jobs_mb": float(jobs), "finished_mb": float(finished)}


async def _steady(
    system: Any, rate: float, seconds: float, slices: int, pinned: range | None = None
) -> tuple[list[Sample], str]:
    """A line printed and kept for each slice, in some of which an old snapshot is pinned."""
    every, samples, holding = seconds / slices, list[Sample](), None
    spec = {"every": every, "retention": seconds / 10, "tidy": seconds / 100}
    async with processes.child("child_steady", "work", system.url, spec) as node:
        await _line(node, 60)
        making = {"rate": rate, "seconds": seconds + every}
        async with processes.child("child_steady", "make", system.url, making) as maker:
            while not (started := (await _line(node, 3 * every + 60))["jobs"]):
                pass  # the first jobs are not due yet
            for at in range(slices):
                if pinned is not None and at == pinned.start:
                    holding = await _pin(system.url)
                sample = {**await _line(node, 3 * every + 60), **await _sizes(system.url)}
                samples.append(sample)
                print("  ".join(f"{report.number(sample[name]):>12}" for name in COLUMNS), flush=True)
                if holding is not None and pinned is not None and at == pinned.stop - 1:
                    await holding.close()
            told = await _line(maker, 60 + seconds)
        while rest := (await _line(node, 3 * every + 60))["jobs"]:
            started += rest
    started += sum(sample["jobs"] for sample in samples)
    count = f"{told['made']:,} jobs made, {started:,.0f} started; the maker was behind {told['behind']} times"
    print(count)
    if started != told["made"]:
        raise RuntimeError(f"{told['made'] - started:,.0f} jobs did not start")
    return samples, count


async def _pin(url: str) -> asyncpg.Connection[Any]:
    """A session whose snapshot is from now on, until it is closed."""
    connection = await asyncpg.connect(url)
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await connection.fetchval("SELECT count(*) FROM timebell_nodes")
    return connection


async def _peak(system: Any) -> float:
    async with system:
        figures = await workloads.w6(system, 1, workloads.Sizes(drain=DRAIN))
    print(f"{system.store}: {report.number(figures['jobs_s'])} jobs/s when {DRAIN:,} are due", flush=True)
    return float(figures["jobs_s"])


def _lines(samples: Sequence[Sample], every: float) -> list[list[str]]:
    """A table of them, with the minutes that had passed."""
    rows = [
        [f"{at * every / 60:.3g}", *(report.number(one[name]) for name in COLUMNS)] for at, one in enumerate(samples, 1)
    ]
    return [["minutes", *COLUMNS], *rows]


def _heading() -> None:
    print("  ".join(f"{name:>12}" for name in COLUMNS), flush=True)


async def _soak(given: argparse.Namespace) -> bool:
    good = True
    async with chosen(given.stores) as systems:
        for system in systems:
            rate = given.rate or await _peak(system) / 2
            async with system:
                said = [f"{system.store}: {rate:,.0f} jobs/s for {given.minutes:g} minutes"]
                print(f"\n{said[0]}")
                _heading()
                samples, count = await _steady(system, rate, 60 * given.minutes, SLICES)
            wrong = judged(samples)
            for name in JUDGED:
                was, became = growth(samples, name)
                said.append(f"{name}: {report.number(was)} in the second quarter, {report.number(became)} in the last")
            said.append(f"NOT FLAT: {'; '.join(wrong)}" if wrong else "flat")
            print(*said[1:], sep="\n")
            if folder := given.folder or (performance.RESULTS if given.minutes >= SOAKED else None):
                lines = _lines(samples, 60 * given.minutes / SLICES)
                performance.keep(folder, f"soak-{system.store}", [said[0], count, *said[1:]], [lines])
            good = good and not wrong
    print(machine.line())
    return good


async def _pinned(given: argparse.Namespace) -> bool:
    async with chosen("postgres") as (system,), system:
        before = max(3, SLICES // 4)
        each = 60 * given.minutes / SLICES
        slices = range(before, before + SLICES)
        said = [f"{given.rate:,.0f} jobs/s; pinned in slices {slices.start + 1} to {slices.stop} of {each:g} s"]
        print(said[0])
        _heading()
        samples, count = await _steady(system, given.rate, each * slices.stop, slices.stop, slices)
    was, became = (
        median(sample["claim_p99_ms"] for sample in samples[:before]),
        median(sample["claim_p99_ms"] for sample in samples[-SLICES // 4 :]),
    )
    times = f"{became / was:.1f} times"
    said += [count, f"claim p99: {report.number(was)} ms before, {report.number(became)} ms at the end: {times}"]
    print(said[-1], machine.line(), sep="\n")
    if folder := given.folder or (performance.RESULTS if given.minutes >= HELD else None):
        performance.keep(folder, "pinned", said, [_lines(samples, each)])
    return became <= PINNED_MOST * was


def soak(given: Sequence[str]) -> int:
    """The exit status: 0 if it is flat."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="postgres", help="sqlite, postgres or both")
    parser.add_argument("--minutes", type=float, default=SOAKED)
    parser.add_argument("--rate", type=float, help="jobs a second, instead of half of what is measured first")
    parser.add_argument("--folder", type=Path, help="keep what was measured there")
    return 0 if asyncio.run(_soak(parser.parse_args(given))) else 1


def pinned(given: Sequence[str]) -> int:
    """The exit status: 0 if claims take at most four times as long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pinned", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=HELD, help="for which the snapshot is pinned")
    parser.add_argument("--rate", type=float, default=1000.0, help="jobs a second")
    parser.add_argument("--folder", type=Path, help="keep what was measured there")
    return 0 if asyncio.run(_pinned(parser.parse_args(given))) else 1
