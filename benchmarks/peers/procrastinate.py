"""Processes of Procrastinate: 20 concurrent jobs, LISTEN/NOTIFY and polling every 0.1 s (default: 5 s).

Jobs are created with `batch_defer_jobs`. Schedules are defined in code.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import procrastinate
from procrastinate.jobs import Job

from benchmarks import child


def _app(url: str) -> procrastinate.App:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=4, max_size=24))

    @app.task(name="bench")
    async def bench(i: int, due: int, pad: str, timestamp: int | None = None) -> None:
        child.record_start(i, due / 1000 if timestamp is None else timestamp)

    return app


async def setup(url: str, _: dict[str, Any]) -> None:
    """Create the tables of an empty database."""
    async with _app(url).open_async() as app:
        await app.schema_manager.apply_schema_async()
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create one-shots."""
    async with _app(url).open_async() as app:

        def job(each: dict[str, Any]) -> Job:
            at = datetime.fromtimestamp(each["due"] / 1000, UTC) if spec["lead"] > 0 else None
            return Job(
                queue="default", lock=None, queueing_lock=None, task_name="bench", task_kwargs=each, scheduled_at=at,
            )  # fmt: skip

        async def write(batch: list[dict[str, Any]]) -> None:
            await app.job_manager.batch_defer_jobs_async([job(each) for each in batch])

        await child.create(spec, write)


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one worker."""
    app = _app(url)
    for number in range(spec.get("schedules", 0)):
        app.periodic_registry.register_task(
            app.tasks["bench"], cron="* * * * *", periodic_id=f"s{number}",
            configure_kwargs={"task_kwargs": child.payload(number, 0)},
        )  # fmt: skip
    async with app.open_async():
        running = asyncio.create_task(
            app.run_worker_async(
                concurrency=20, fetch_job_polling_interval=0.1, install_signal_handlers=False,
                shutdown_graceful_timeout=3,
            )
        )  # fmt: skip
        await asyncio.sleep(1)
        await child.report_until_closed(spec["out"])
        running.cancel()
        await asyncio.wait([running], timeout=5)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "work": work})
