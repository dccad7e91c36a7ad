"""Cost of each verb: statements, counted where the store runs them, and jobs per second with one client."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.systems import Server
from timebell import Arrived, Every, JobSpec, Timebell
from timebell.features import FEATURES
from timebell.store import transaction
from timebell.store.open import upgrade

PAYLOAD = {"i": 1, "pad": "x" * 80}
SINGLE_JOBS, BULK_JOBS, BATCH, JOBS_PER_TRANSACTION = 500, 20_000, 5_000, 100
Row = dict[str, Any]


async def measure(stores: list[str], server: Server | None) -> list[Row]:
    """Return a row for each verb and store, with statements or jobs per second."""
    rows: list[Row] = []
    for store in stores:
        if store == "postgres":
            assert server is not None
            name = f"timebell_bench_{os.getpid()}"
            try:
                rows += await _measure_store(store, await server.create_database(name))
            finally:
                await server.drop_database(name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                rows += await _measure_store(store, f"sqlite:///{folder}/bench.db")
    return rows


async def _measure_store(store: str, url: str) -> list[Row]:
    await upgrade(url, FEATURES)
    app = Timebell(url, timezone="UTC")
    try:
        await app.schedule_at("bench")  # opens the store, creates the tenant
        counts = [
            {"verb": verb, "store": store, "statements": count}
            for verb, count in (await _count_statements(app)).items()
        ]
        rates = [
            {"verb": verb, "store": store, "jobs_s": rate} for verb, rate in (await _measure_rates(app, url)).items()
        ]
        return counts + rates
    finally:
        await app.close()


async def _count_statements(app: Timebell) -> dict[str, int]:
    """Return the number of statements of each verb, without BEGIN and COMMIT."""
    later = app.clock.now() + timedelta(days=1)
    spec = JobSpec(topic="bench", run_at=later, payload=PAYLOAD)
    job = await app.schedule_at("bench", later)
    moved = await app.schedule_at("bench", later)
    schedule = await app.schedule_repeat("bench", Every("PT1H"), name="bench")
    keyed = {"key": "k", "client_request_id": "r"}
    verbs: dict[str, Callable[[], Awaitable[Any]]] = {
        "schedule_at": lambda: app.schedule_at("bench", later, payload=PAYLOAD),
        "schedule_at(key=, client_request_id=)": lambda: app.schedule_at("bench", later, payload=PAYLOAD, **keyed),
        f"schedule_many, {BATCH:,} jobs": lambda: app.schedule_many([spec] * BATCH),
        "schedule_repeat": lambda: app.schedule_repeat("bench", Every("PT1H")),
        "schedule_repeat(replace=True)": lambda: app.schedule_repeat(
            "bench", Every("PT2H"), name="bench", replace=True
        ),
        "cancel": lambda: app.cancel(job.id),
        "reschedule": lambda: app.reschedule(moved.id, later + timedelta(hours=1)),
        "get": lambda: app.get(job.id),
        "list, 50 jobs": lambda: app.list(topic="bench"),
        "schedules.pause": lambda: app.schedules.pause(schedule.id),
        "schedules.resume": lambda: app.schedules.resume(schedule.id),
        "schedules.trigger": lambda: app.schedules.trigger(schedule.id),
    }
    counts = {}
    for verb, call in verbs.items():
        points: list[str] = []
        transaction.probe = points.append
        try:
            await call()
        finally:
            transaction.probe = None
        counts[verb] = sum(point.rpartition(".")[2].isdigit() for point in points)
    return counts


async def _measure_rates(app: Timebell, url: str) -> dict[str, float]:
    """Return the jobs per second of each way to create and to complete jobs."""
    later = app.clock.now() + timedelta(days=1)

    async def schedule(connection: Any = None) -> None:
        await app.schedule_at("bench", later, payload=PAYLOAD, connection=connection)

    rates: dict[str, float] = {}
    async with _timed(rates, "schedule_at, one after another", SINGLE_JOBS):
        for _ in range(SINGLE_JOBS):
            await schedule()
    async with _timed(rates, f"schedule_many, {BATCH:,} jobs per call", BULK_JOBS):
        for _ in range(BULK_JOBS // BATCH):
            await app.schedule_many([JobSpec(topic="bench", run_at=later, payload=PAYLOAD)] * BATCH)
    for size in (1, JOBS_PER_TRANSACTION):
        async with _timed(rates, f"schedule_at(connection=), {size} per transaction", SINGLE_JOBS):
            for _ in range(SINGLE_JOBS // size):
                async with _transaction(url) as connection:
                    for _ in range(size):
                        await schedule(connection)
    disposal = _engines.pop(url).dispose()
    if disposal is not None:  # of an async engine
        await disposal
    rates |= await _measure_completion(app)
    return rates


async def _measure_completion(app: Timebell) -> dict[str, float]:
    """Return the jobs per second completed by the engine, and in a transaction of the handler that writes a row."""
    rates: dict[str, float] = {}
    await app.store.run(lambda tx: tx.execute(text("CREATE TABLE bench_rows (job VARCHAR(40))")) and None)

    @app.on("bench.plain")
    async def plain(_: Arrived) -> None:
        pass

    @app.on("bench.transactional")
    async def transactional(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text("INSERT INTO bench_rows VALUES (:id)"), {"id": event.job_id})

    for topic, verb in (
        ("bench.plain", "completed by the engine"),
        ("bench.transactional", "completed in event.transaction()"),
    ):
        await app.schedule_many([JobSpec(topic=topic)] * SINGLE_JOBS)
        async with _timed(rates, verb, SINGLE_JOBS), app.running() as service:
            while service.node.counters.ended < SINGLE_JOBS:
                await service.wait_until_idle()
    return rates


@asynccontextmanager
async def _timed(rates: dict[str, float], verb: str, count: int) -> AsyncIterator[None]:
    began = time.perf_counter()
    yield
    rates[verb] = count / (time.perf_counter() - began)


_engines: dict[str, Any] = {}


@asynccontextmanager
async def _transaction(url: str) -> AsyncIterator[Any]:
    """Begin a transaction on a pooled connection of the caller."""
    if url.startswith("postgres"):
        if url not in _engines:
            _engines[url] = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
        async with _engines[url].begin() as connection:
            yield connection
    else:
        if url not in _engines:
            _engines[url] = create_engine(url)
        with _engines[url].begin() as connection:
            yield connection
