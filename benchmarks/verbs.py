"""What each verb costs: its statements, counted where the store runs them; and jobs a second, through one client."""

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
from timebell.store import transaction
from timebell.store.open import upgrade

PAYLOAD = {"i": 1, "pad": "x" * 80}
ONE_BY_ONE, IN_BULK, BATCH, TOGETHER = 500, 20_000, 5_000, 100
Row = dict[str, Any]


async def measure(stores: list[str], server: Server | None) -> list[Row]:
    """A row for each verb and store: statements, or jobs a second."""
    rows: list[Row] = []
    for store in stores:
        if store == "postgres":
            assert server is not None
            name = f"timebell_bench_{os.getpid()}"
            try:
                rows += await _of_store(store, await server.fresh(name))
            finally:
                await server.drop(name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                rows += await _of_store(store, f"sqlite:///{folder}/bench.db")
    return rows


async def _of_store(store: str, url: str) -> list[Row]:
    await upgrade(url)
    app = Timebell(url, timezone="UTC")
    try:
        await app.schedule_at("bench")  # opens the store, makes the tenant
        counted = [{"verb": verb, "store": store, "statements": count} for verb, count in (await _costs(app)).items()]
        rates = [{"verb": verb, "store": store, "jobs_s": rate} for verb, rate in (await _rates(app, url)).items()]
        return counted + rates
    finally:
        await app.close()


async def _costs(app: Timebell) -> dict[str, int]:
    """Statements of each verb, BEGIN and COMMIT left out."""
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
    costs = {}
    for verb, call in verbs.items():
        passed: list[str] = []
        transaction.probe = passed.append
        try:
            await call()
        finally:
            transaction.probe = None
        costs[verb] = sum(point.rpartition(".")[2].isdigit() for point in passed)
    return costs


async def _rates(app: Timebell, url: str) -> dict[str, float]:
    later = app.clock.now() + timedelta(days=1)

    async def one(connection: Any = None) -> None:
        await app.schedule_at("bench", later, payload=PAYLOAD, connection=connection)

    rates = {}
    async with _timed(rates, "schedule_at, one after another", ONE_BY_ONE):
        for _ in range(ONE_BY_ONE):
            await one()
    async with _timed(rates, f"schedule_many, {BATCH:,} at once", IN_BULK):
        for _ in range(IN_BULK // BATCH):
            await app.schedule_many([JobSpec(topic="bench", run_at=later, payload=PAYLOAD)] * BATCH)
    for size in (1, TOGETHER):
        async with _timed(rates, f"schedule_at(connection=), {size} a transaction", ONE_BY_ONE):
            for _ in range(ONE_BY_ONE // size):
                async with _transaction(url) as connection:
                    for _ in range(size):
                        await one(connection)
    closed = _engines.pop(url).dispose()
    if closed is not None:
        await closed
    rates |= await _handled(app)
    return rates


async def _handled(app: Timebell) -> dict[str, float]:
    """Jobs a second that end as ever, and in a transaction of the handler's that writes a row."""
    rates: dict[str, float] = {}
    await app.store.run(lambda tx: tx.execute(text("CREATE TABLE bench_rows (job VARCHAR(40))")) and None)

    @app.on("bench.plain")
    async def plain(_: Arrived) -> None:
        pass

    @app.on("bench.within")
    async def within(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text("INSERT INTO bench_rows VALUES (:id)"), {"id": event.job_id})

    for topic, verb in (
        ("bench.plain", "completed by the engine"),
        ("bench.within", "completed in event.transaction()"),
    ):
        await app.schedule_many([JobSpec(topic=topic)] * ONE_BY_ONE)
        async with _timed(rates, verb, ONE_BY_ONE), app.running() as service:
            while service.node.counters.ended < ONE_BY_ONE:
                await service.idle()
    return rates


@asynccontextmanager
async def _timed(rates: dict[str, float], verb: str, count: int) -> AsyncIterator[None]:
    began = time.perf_counter()
    yield
    rates[verb] = count / (time.perf_counter() - began)


_engines: dict[str, Any] = {}


@asynccontextmanager
async def _transaction(url: str) -> AsyncIterator[Any]:
    """One of the caller's own, on a pool as a program would have it."""
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
