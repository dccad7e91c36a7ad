"""`python -m benchmarks targets [options]`: jobs per second that a node publishes to each queue, and their lag.

The queues run on this machine, durable and without consumers; `handler` is an empty function, for comparison. Kafka and
SQS are emulators: their figures show the speed of the node, not of those queues. Each row is also printed to stderr
when it is known. Jobs that a queue has not accepted PUBLISH_TIMEOUT_SECONDS after they were due count as lost.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from benchmarks import machine, report
from benchmarks.systems import open_systems
from timebell import Arrived, JobSpec, Timebell
from timebell.model.job import Job

TARGETS: dict[str, dict[str, Any] | None] = {
    "handler": None,
    "bullmq": {"kind": "bullmq", "queue": "bench"},
    "celery": {"kind": "celery"},
    "redis-stream": {"kind": "redis-stream", "stream": "bench"},
    "rabbitmq": {"kind": "rabbitmq", "queue": "mails"},
    "nats": {"kind": "nats", "subject": "mails.send"},
    "kafka": {"kind": "kafka", "topic": "mails"},
    "sqs": {"kind": "sqs", "queue": "mails"},
}
LIMITED = {"sqs": (500, 20)}
"""Maximum jobs at one instant and per second by target: the SQS emulator accepts about a hundred per second."""
PUBLISH_TIMEOUT_SECONDS = 60.0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks targets", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=5_000, help="jobs due at one instant")
    parser.add_argument("--rate", type=int, default=100, help="jobs per second, for the lag")
    parser.add_argument("--seconds", type=int, default=20)
    return parser.parse_args(argv)


async def _run(app: Timebell, target: dict[str, Any] | None, count: int, span: float) -> list[Job]:
    """Run jobs that are due over `span` seconds; return those that completed before the timeout."""
    begin = app.clock.now() + timedelta(seconds=2 + count / 5_000)
    due = [begin + timedelta(seconds=span * n / count) for n in range(count)]
    specs = [JobSpec(topic="bench", run_at=at, target=target, payload={"n": n}) for n, at in enumerate(due)]
    ids = {job.id for job in await app.schedule_many(specs)}
    until = due[-1] + timedelta(seconds=PUBLISH_TIMEOUT_SECONDS)
    while app.clock.now() < until and (await app.list(status=["pending", "running"], limit=1)).items:
        await asyncio.sleep(0.1)
    completed: list[Job] = []
    cursor = None
    while len(completed) < count:
        page = await app.list(status=["completed"], limit=500, cursor=cursor)
        completed += [job for job in page.items if job.id in ids]
        if (cursor := page.next_cursor) is None:
            break
    return completed


async def _measure(system: Any, name: str, url: str, args: argparse.Namespace) -> list[str]:
    """Return the row of one store and target."""
    app = Timebell(system.url, timezone="UTC")
    if name != "handler":
        app.settings = replace(app.settings, **{f"broker_{name.replace('-', '_')}_url": url})

    @app.on("bench")
    async def do_nothing(event: Arrived) -> None: ...

    jobs, rate = map(min, (args.jobs, args.rate), LIMITED.get(name, (args.jobs, args.rate)))
    async with app.running():
        burst = await _run(app, TARGETS[name], jobs, 0.0)
        paced = await _run(app, TARGETS[name], rate * args.seconds, float(args.seconds))
    await app.close()
    lost = jobs + rate * args.seconds - len(burst) - len(paced)
    row = f"{system.store}: {name}"
    if not burst or len(paced) < 2:  # quantiles need two values
        return [row, *["-"] * 5, str(lost)]
    begin, end = burst[0].scheduled_at, max(job.finished_at for job in burst if job.finished_at)
    lags = _milliseconds(paced, lambda job: job.scheduled_at)
    publish_ms = _milliseconds(paced, lambda job: job.started_at)
    figures = [len(burst) / (end - begin).total_seconds(), _percentile(lags, 50), _percentile(lags, 99)]
    figures += [_percentile(publish_ms, 50), _percentile(publish_ms, 99)]
    return [row, *map(report.format_number, figures), str(lost)]


def _milliseconds(jobs: list[Job], since: Any) -> list[float]:
    return [(job.finished_at - since(job)).total_seconds() * 1000 for job in jobs if job.finished_at is not None]


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


async def _start_queue(name: str) -> Any:
    """Start the server of a target, with the queue or topic to publish to."""
    from tests.brokers.conformance import Conformance
    from tests.servers import Redis

    if name not in ("rabbitmq", "nats", "kafka", "sqs"):
        return await asyncio.to_thread(Redis)
    module = importlib.import_module(f"tests.brokers.test_{name}")
    tests: type[Conformance] = getattr(module, f"Test{name.capitalize()}")
    server = await asyncio.to_thread(tests.starts)
    await tests().prepare(server)  # type: ignore[abstract]
    return server


async def _main(args: argparse.Namespace) -> bool:
    rows = [["", "published per second", "lag p50 ms", "lag p99 ms", "of which publish p50", "p99", "lost"]]
    try:
        async with open_systems(args.stores) as systems:
            for name in args.targets.split(","):
                for system in systems:
                    print(f"{system.store}: {name} ...", file=sys.stderr, flush=True)
                    queue = await _start_queue(name)
                    try:
                        async with system:
                            rows.append(await _measure(system, name, queue.url, args))
                            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
                    finally:
                        await asyncio.to_thread(queue.close)
    finally:
        print(machine.summary_line(), report.format_table(rows), sep="\n\n")
    return all(row[-1] == "0" for row in rows[1:])


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if no job was lost."""
    return 0 if asyncio.run(_main(_parse_arguments(argv))) else 1
