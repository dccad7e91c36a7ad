"""`python -m benchmarks targets [options]`: how many jobs a second a node publishes to each queue, and how late.

The queues run on this machine, durable, with nothing consuming; `handler` is a function that does nothing, to compare.
What answers for Kafka and SQS are emulators: their figures say what a node does, not what those queues do. Each row is
said on stderr when it is known. What a queue has not taken `PATIENCE` after it was due counts as lost.
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
from benchmarks.systems import chosen
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
SLOW = {"sqs": (500, 20)}
"""Jobs at one instant, and a second, that an emulator can bear: that of SQS takes about a hundred a second."""
PATIENCE = 60.0  # seconds


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks targets", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=5_000, help="due at one instant")
    parser.add_argument("--rate", type=int, default=100, help="jobs a second, for the lag")
    parser.add_argument("--seconds", type=int, default=20)
    return parser.parse_args(given)


async def _run(app: Timebell, target: dict[str, Any] | None, number: int, over: float) -> list[Job]:
    """So many jobs, due from 2 s on; those that were done, as they are when all have ended or patience has."""
    begin = app.clock.now() + timedelta(seconds=2 + number / 5_000)
    due = [begin + timedelta(seconds=over * n / number) for n in range(number)]
    specs = [JobSpec(topic="bench", run_at=at, target=target, payload={"n": n}) for n, at in enumerate(due)]
    made = {job.id for job in await app.schedule_many(specs)}
    until = due[-1] + timedelta(seconds=PATIENCE)
    while app.clock.now() < until and (await app.list(status=["pending", "running"], limit=1)).items:
        await asyncio.sleep(0.1)
    found: list[Job] = []
    cursor = None
    while len(found) < number:
        page = await app.list(status=["completed"], limit=500, cursor=cursor)
        found += [job for job in page.items if job.id in made]
        if (cursor := page.next_cursor) is None:
            break
    return found


async def _measure(system: Any, name: str, url: str, given: argparse.Namespace) -> list[str]:
    app = Timebell(system.url, timezone="UTC")
    if name != "handler":
        app.settings = replace(app.settings, **{f"broker_{name.replace('-', '_')}_url": url})

    @app.on("bench")
    async def nothing(event: Arrived) -> None: ...

    jobs, rate = map(min, (given.jobs, given.rate), SLOW.get(name, (given.jobs, given.rate)))
    async with app.running():
        burst = await _run(app, TARGETS[name], jobs, 0.0)
        paced = await _run(app, TARGETS[name], rate * given.seconds, float(given.seconds))
    await app.close()
    lost = jobs + rate * given.seconds - len(burst) - len(paced)
    row = f"{system.store}: {name}"
    if not burst or len(paced) < 2:  # as quantiles need
        return [row, *["-"] * 5, str(lost)]
    begin, end = burst[0].scheduled_at, max(job.finished_at for job in burst if job.finished_at)
    lags = _milliseconds(paced, lambda job: job.scheduled_at)
    own = _milliseconds(paced, lambda job: job.started_at)
    figures = [len(burst) / (end - begin).total_seconds(), _at(lags, 50), _at(lags, 99), _at(own, 50), _at(own, 99)]
    return [row, *map(report.number, figures), str(lost)]


def _milliseconds(jobs: list[Job], since: Any) -> list[float]:
    return [(job.finished_at - since(job)).total_seconds() * 1000 for job in jobs if job.finished_at is not None]


def _at(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


async def _queue(name: str) -> Any:
    """A server for this target, with the place that is published to."""
    from tests.brokers.conformance import Conformance
    from tests.servers import Redis

    if name not in ("rabbitmq", "nats", "kafka", "sqs"):
        return await asyncio.to_thread(Redis)
    module = importlib.import_module(f"tests.brokers.test_{name}")
    tests: type[Conformance] = getattr(module, f"Test{name.capitalize()}")
    server = await asyncio.to_thread(tests.starts)
    await tests().prepare(server)  # type: ignore[abstract]
    return server


async def _main(given: argparse.Namespace) -> bool:
    rows = [["", "published a second", "lag p50 ms", "lag p99 ms", "of it the publish p50", "p99", "lost"]]
    try:
        async with chosen(given.stores) as systems:
            for name in given.targets.split(","):
                for system in systems:
                    print(f"{system.store}: {name} ...", file=sys.stderr, flush=True)
                    queue = await _queue(name)
                    try:
                        async with system:
                            rows.append(await _measure(system, name, queue.url, given))
                            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
                    finally:
                        await asyncio.to_thread(queue.close)
    finally:
        print(machine.line(), report.table(rows), sep="\n\n")
    return all(row[-1] == "0" for row in rows[1:])


def main(given: Sequence[str]) -> int:
    """0 if nothing was lost."""
    return 0 if asyncio.run(_main(_arguments(given))) else 1
