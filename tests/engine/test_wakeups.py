"""Each event that gives a loop something to do wakes it, although polls and heartbeats are an hour apart.

An event is a function of a `Scene`: it prepares, lets the engine fall asleep, causes the event by the public interface
and waits for the effect. The tests run it on each store, and on PostgreSQL also from another app than that of the node,
which only NOTIFY connects with the node.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from timebell import Arrived, Cron, Every, JobSpec, Timebell
from timebell.engine.service import Service
from timebell.engine.wakeups import LOOP_BY_SUBJECT
from timebell.features.triggers.store.sources import SOURCES
from timebell.model.limits import Limits
from timebell.store.jobs import queues
from timebell.store.schema import jobs, schedules
from timebell.store.tenancy import tenants
from timebell.store.transaction import JOBS, OPERATIONS, SCHEDULES, STOPS, Transaction

from .world import QUIET

TIMEOUT_SECONDS = 30.0
ASLEEP_SECONDS = 0.2  # an engine that has not made a step for this time sleeps
HOURLY = Every("PT1H")


class Scene:
    """A running engine, the app that causes the event, and what its handler received."""

    def __init__(self, node: Timebell, client: Timebell, service: Service, folder: Path) -> None:
        self.node, self.client, self.service, self.folder = node, client, service, folder
        self.received: list[Arrived] = []
        self.act: Callable[[Arrived], Awaitable[None]] | None = None
        """What the handler of the topic `t` does."""
        self.act_in_thread: Callable[[Arrived], None] | None = None
        """What the handler of the topic `plain` does."""

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                found = holds()
                if found if not asyncio.iscoroutine(found) else await found:
                    return
                await asyncio.sleep(0.01)

    async def asleep(self) -> None:
        """Wait until every loop sleeps after the first heartbeat, and no notification is on its way."""
        steps: dict[str, float] = {}
        since = 0.0
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                now, seen = self.node.clock.monotonic(), dict(self.service.last_step_at)
                awake = any(alarm._waiter is None for alarm in self.service.node.wakeups.alarms)
                if seen != steps or awake or not self.service.heartbeat.node_record.heartbeat:
                    steps, since = seen, now
                elif now - since > ASLEEP_SECONDS:
                    return
                await asyncio.sleep(0.01)

    async def runs(self, count: int = 1) -> None:
        """Wait until the handler was called this many times."""
        await self.until(lambda: len(self.received) >= count)


Event = Callable[[Scene], Awaitable[None]]
EVENTS: dict[str, tuple[str, Event]] = {}


def notifies(subject: str) -> Callable[[Event], Event]:
    """Register an event and its subject."""

    def register(event: Event) -> Event:
        EVENTS[event.__name__] = subject, event
        return event

    return register


def soon(**spans: float) -> datetime:
    """Return an instant after now."""
    return datetime.now(UTC) + timedelta(**spans)


@notifies(JOBS)
async def a_job_is_created(scene: Scene) -> None:
    await scene.asleep()
    await scene.client.schedule_at("t")
    await scene.runs()


@notifies(JOBS)
async def a_job_is_created_that_is_due_later(scene: Scene) -> None:
    await scene.asleep()
    await scene.client.schedule_at("t", soon(seconds=0.5))
    await scene.runs()


@notifies(JOBS)
async def many_jobs_are_created(scene: Scene) -> None:
    await scene.asleep()
    await scene.client.schedule_many([JobSpec(topic="t", payload=number) for number in range(3)])
    await scene.runs(3)


@notifies(JOBS)
async def a_blocking_call_creates_a_job(scene: Scene) -> None:
    await scene.asleep()
    await asyncio.to_thread(scene.client.sync.schedule_at, "t")
    await asyncio.to_thread(scene.client.sync.close)
    await scene.runs()


@notifies(JOBS)
async def a_request_creates_a_job(scene: Scene) -> None:
    await scene.asleep()
    async with scene.client.store.begin() as connection:
        await scene.client.schedule_at("t", connection=connection)
    await scene.runs()


@notifies(JOBS)
async def a_handler_creates_a_job_in_its_transaction(scene: Scene) -> None:
    async def create(event: Arrived) -> None:
        scene.act = None
        await scene.asleep()
        async with event.transaction() as connection:
            await scene.node.schedule_at("t", connection=connection)

    scene.act = create
    await scene.node.schedule_at("t")
    await scene.runs(2)


@notifies(JOBS)
async def a_plain_handler_completes_its_job_in_its_transaction(scene: Scene) -> None:
    loop = asyncio.get_running_loop()

    def complete(event: Arrived) -> None:
        asyncio.run_coroutine_threadsafe(scene.asleep(), loop).result()
        with event.transaction():
            scene.received.append(event)

    scene.act_in_thread = complete
    schedule = await scene.client.schedule_repeat("plain", HOURLY, overlap="queue")
    for _ in range(2):
        await scene.client.schedules.trigger(schedule.id)
    await scene.runs(2)


@notifies(JOBS)
async def a_job_is_rescheduled(scene: Scene) -> None:
    job = await scene.client.schedule_at("t", soon(days=1))
    await scene.asleep()
    await scene.client.reschedule(job.id)
    await scene.runs()


@notifies(JOBS)
async def an_attempt_is_to_be_retried(scene: Scene) -> None:
    async def fail(event: Arrived) -> None:
        await scene.asleep()
        scene.act = None
        raise RuntimeError("once")

    scene.act = fail
    await scene.client.schedule_at("t", retry={"attempts": 2, "delay": 0.1})
    await scene.runs(2)


@notifies(JOBS)
async def a_failed_job_is_retried(scene: Scene) -> None:
    async def fail(event: Arrived) -> None:
        scene.act = None
        raise RuntimeError("once")

    scene.act = fail
    job = await scene.client.schedule_at("t", retry={"attempts": 1})
    await scene.until(lambda: _has_state(scene.node, job.id, "failed"))
    await scene.asleep()
    await scene.client.retry(job.id)
    await scene.runs(2)


@notifies(JOBS)
async def the_predecessor_of_a_serial_job_completes(scene: Scene) -> None:
    async def work(event: Arrived) -> None:
        scene.act = None
        await scene.client.schedules.trigger(schedule.id)
        await scene.asleep()

    scene.act = work
    schedule = await scene.client.schedule_repeat("t", HOURLY, overlap="queue")
    await scene.client.schedules.trigger(schedule.id)
    await scene.runs(2)


@notifies(JOBS)
async def the_next_job_of_a_group_is_released(scene: Scene) -> None:
    async def work(event: Arrived) -> None:
        scene.act = None
        await scene.asleep()

    scene.act = work
    await scene.client.store.run(queues.set_limits, "q", Limits(concurrency_per_group=1))
    await scene.client.schedule_many([JobSpec(topic="t", queue="q", group="g") for _ in range(2)])
    await scene.runs(2)


@notifies(JOBS)
async def a_schedule_is_triggered(scene: Scene) -> None:
    schedule = await scene.client.schedule_repeat("t", HOURLY)
    await scene.asleep()
    await scene.client.schedules.trigger(schedule.id)
    await scene.runs()


@notifies(JOBS)
async def occurrences_are_backfilled(scene: Scene) -> None:
    schedule = await scene.client.schedule_repeat("t", Cron("0 9 * * *"))
    await scene.asleep()
    await scene.client.schedules.backfill(schedule.id, soon(days=-2), soon(seconds=-1))
    await scene.runs(2)


@notifies(JOBS)
async def a_queue_is_resumed(scene: Scene) -> None:
    await scene.client.pause_queue("default")
    await scene.client.schedule_at("t")
    await scene.asleep()
    await scene.client.resume_queue("default")
    await scene.runs()


@notifies(JOBS)
async def the_limits_of_a_queue_are_raised(scene: Scene) -> None:
    await scene.client.store.run(queues.set_limits, "default", Limits(rate=1, per=3600))
    await scene.client.schedule_many([JobSpec(topic="t") for _ in range(2)])
    await scene.runs()
    await scene.asleep()
    await scene.client.store.run(queues.set_limits, "default", Limits())
    await scene.runs(2)


@notifies(JOBS)
async def the_limits_of_a_tenant_are_removed(scene: Scene) -> None:
    await scene.asleep()  # the first heartbeat would find the limits
    await scene.client.store.run(tenants.upsert_tenant, "default", {"jobs_at_once": 1}, soon())
    job = await scene.client.schedule_at("t", soon(days=1))
    await scene.client.store.run(_hold, job.id, "tenant")
    await scene.asleep()
    await scene.client.store.run(tenants.upsert_tenant, "default", {"jobs_at_once": None}, soon())
    await scene.runs()


@notifies(JOBS)
async def a_backlog_is_released(scene: Scene) -> None:
    job = await scene.client.schedule_at("t", soon(days=1))
    await scene.client.store.run(_hold, job.id, "backlog")
    await scene.asleep()
    await scene.client.schedules.release()
    await scene.runs()


@notifies(JOBS)
async def a_lost_job_is_repaired(scene: Scene) -> None:
    await scene.asleep()  # the leader repairs once at its start
    job = await scene.client.schedule_at("t", soon(days=1))
    await scene.client.store.run(_hold, job.id, "stopping")
    await scene.asleep()
    await scene.client.repair()
    await scene.runs()


@notifies(JOBS)
async def an_item_of_a_source_changes(scene: Scene) -> None:
    await scene.client.triggers.put_source("items")
    await scene.client.triggers.put("reminder", "items", "at", "t")
    await scene.asleep()
    change = {"key": "1", "version": 1, "fields": {"at": soon(seconds=0.3).isoformat()}}
    await scene.client.triggers.put_items("items", [change])
    await scene.runs()


@notifies(SCHEDULES)
async def a_schedule_is_created(scene: Scene) -> None:
    await scene.asleep()
    await scene.client.schedule_repeat("t", Every("PT1S"), overlap="allow")
    await scene.runs()


@notifies(SCHEDULES)
async def a_schedule_is_edited(scene: Scene) -> None:
    await scene.client.schedule_repeat("t", HOURLY, name="s")
    await scene.asleep()
    await scene.client.schedule_repeat("t", Every("PT1S"), name="s", replace=True)
    await scene.runs()


@notifies(SCHEDULES)
async def a_schedule_is_resumed(scene: Scene) -> None:
    schedule = await scene.client.schedule_repeat("t", Every("PT1S"), enabled=False)
    await scene.asleep()
    await scene.client.schedules.resume(schedule.id)
    await scene.runs()


@notifies(SCHEDULES)
async def everything_is_resumed(scene: Scene) -> None:
    await scene.client.schedule_repeat("t", Every("PT2S"))
    await scene.client.pause_all()
    await scene.asleep()
    await scene.client.resume_all()
    await scene.runs()


@notifies(SCHEDULES)
async def an_occurrence_is_moved(scene: Scene) -> None:
    schedule = await scene.client.schedule_repeat("t", HOURLY)
    assert schedule.next_fire_at is not None
    await scene.asleep()
    await scene.client.schedules.move(schedule.id, schedule.next_fire_at, soon(seconds=0.5))
    await scene.runs()


@notifies(SCHEDULES)
async def the_run_of_a_fixed_delay_ends(scene: Scene) -> None:
    async def work(event: Arrived) -> None:
        await scene.asleep()

    scene.act = work
    await scene.client.schedule_repeat("t", Every("PT1S", since="last_end"))
    await scene.runs(2)


@notifies(SCHEDULES)
async def a_lost_next_instant_is_restored(scene: Scene) -> None:
    await scene.asleep()  # the leader repairs once at its start
    schedule = await scene.client.schedule_repeat("t", Every("PT2S"))
    await scene.client.store.run(_forget_next_instant, schedule.id)
    await scene.until(lambda: schedule.next_fire_at is None or soon() > schedule.next_fire_at)
    await scene.asleep()
    await scene.client.repair()
    await scene.runs()


@notifies(STOPS)
async def a_new_occurrence_cancels_the_running_one(scene: Scene) -> None:
    stopped = asyncio.Event()

    async def work(event: Arrived) -> None:
        scene.act = None
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    scene.act = work
    schedule = await scene.client.schedule_repeat("t", HOURLY, overlap="cancel_previous")
    await scene.client.schedules.trigger(schedule.id)
    await scene.runs()
    await scene.asleep()
    await scene.client.schedules.trigger(schedule.id)
    await scene.until(stopped.is_set)
    await scene.runs(2)


@notifies(OPERATIONS)
async def an_operation_is_started(scene: Scene) -> None:
    await scene.client.triggers.put_source("items")
    await scene.client.triggers.put("reminder", "items", "at", "t")
    await scene.asleep()
    operation = await scene.client.triggers.scan("reminder")
    await scene.until(lambda: _is_completed(scene.node, operation.id))


@notifies(SOURCES)
async def a_source_is_created(scene: Scene) -> None:
    file = scene.folder / "theirs.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE shifts (id integer primary key, at text)")
        connection.execute("INSERT INTO shifts VALUES (1, '2030-01-01T00:00:00Z')")
        connection.commit()
    await scene.asleep()
    options = {"url": f"sqlite:///{file}", "table": "shifts", "everySeconds": 3600}
    await scene.client.triggers.put_source("shifts", "sql", options)
    await scene.until(lambda: _has_items(scene.node, "shifts"))


async def _has_state(app: Timebell, job_id: str, state: str) -> bool:
    return (await app.get(job_id)).state == state


async def _is_completed(app: Timebell, operation_id: str) -> bool:
    return (await app.triggers.get_operation(operation_id)).state == "completed"


async def _has_items(app: Timebell, source: str) -> bool:
    return len(await app.triggers.list_items(source)) > 0


def _hold(tx: Transaction, job_id: str, hold: str) -> None:
    tx.execute(update(jobs).where(jobs.c.id == job_id).values(hold=hold, run_at=soon()))


def _forget_next_instant(tx: Transaction, schedule_id: str) -> None:
    tx.execute(update(schedules).where(schedules.c.id == schedule_id).values(next_fire_at=None))


def _perform(event: Event, url: str, folder: Path, *, another_app: bool = False) -> None:
    """Perform an event while an engine runs."""

    async def body() -> None:
        node = Timebell(url, timezone="UTC")
        client = Timebell(url, timezone="UTC") if another_app else node
        scene: Scene

        @node.on("t")
        async def receive(arrived: Arrived) -> None:
            scene.received.append(arrived)
            if scene.act is not None:
                await scene.act(arrived)

        @node.on("plain")
        def receive_in_thread(arrived: Arrived) -> None:
            if scene.act_in_thread is not None:
                scene.act_in_thread(arrived)

        try:
            async with node.running(**QUIET) as service:
                scene = Scene(node, client, service, folder)
                await event(scene)
        finally:
            await client.close()
            await node.close()

    asyncio.run(body())


@pytest.mark.parametrize("name", EVENTS)
def test_a_commit_of_this_process_wakes_the_loop(name: str, store_url: str, tmp_path: Path) -> None:
    _perform(EVENTS[name][1], store_url, tmp_path)


@pytest.mark.parametrize("name", EVENTS)
def test_a_commit_of_another_app_wakes_the_loop_by_notify(name: str, postgres_url: str, tmp_path: Path) -> None:
    _perform(EVENTS[name][1], postgres_url, tmp_path, another_app=True)


def test_a_commit_of_another_process_wakes_the_worker_by_notify(postgres_url: str, tmp_path: Path) -> None:
    script = "import sys, timebell; timebell.Timebell(sys.argv[1]).sync.schedule_at('t', timezone='UTC')"

    async def another_process_creates_a_job(scene: Scene) -> None:
        await scene.asleep()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, postgres_url)
        assert await process.wait() == 0
        await scene.runs()

    _perform(another_process_creates_a_job, postgres_url, tmp_path)


def test_every_subject_has_an_event() -> None:
    assert {subject for subject, _ in EVENTS.values()} == {*LOOP_BY_SUBJECT, SOURCES}


def test_the_table_in_the_documentation_lists_the_loop_of_each_subject() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/one-job.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", page, re.MULTILINE)
    assert dict(rows) == LOOP_BY_SUBJECT | {SOURCES: "sources"}
