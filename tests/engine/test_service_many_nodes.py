"""Several nodes on one PostgreSQL, in real time: each occurrence becomes one job, each job runs once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from timebell import Arrived, Cron, JobSpec, Retry, Timebell
from timebell.alarm import Alarm
from timebell.engine.service import Service

from .world import Log, jobs

TIMEOUT_SECONDS = 180.0


class Cluster:
    """Nodes of one process on one database, each with its own app, store and clock."""

    def __init__(self, url: str, size: int) -> None:
        self.apps = [Timebell(url, timezone="UTC") for _ in range(size)]
        self.services: list[Service] = []

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            started = [
                stack.enter_async_context(app.running(name=f"n{n}", **options)) for n, app in enumerate(self.apps)
            ]
            self.services = list(await asyncio.gather(*started))
            yield

    async def close(self) -> None:
        for app in self.apps:
            await app.close()


def clustered(test: Callable[[Cluster], Any], url: str, size: int) -> None:
    async def body() -> None:
        cluster = Cluster(url, size)
        try:
            await asyncio.wait_for(test(cluster), TIMEOUT_SECONDS)
        finally:
            await cluster.close()

    asyncio.run(body())


async def eventually(true: Callable[[], Any], app: Timebell) -> None:
    """Poll every few milliseconds until a condition holds, limited by the timeout of the test."""
    alarm = Alarm(app.clock)
    try:
        while True:
            held = true()
            if await held if asyncio.iscoroutine(held) else held:
                return
            await alarm.wait(app.clock.now() + timedelta(milliseconds=20))
    finally:
        alarm.close()


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.slow), 5], ids=["two nodes", "five nodes"])
def size(request: pytest.FixtureRequest) -> int:
    nodes: int = request.param
    return nodes


def test_each_occurrence_of_a_schedule_becomes_one_job(nodes_url: str, size: int) -> None:
    async def test(cluster: Cluster) -> None:
        ran: list[Arrived] = []
        for app in cluster.apps:

            @app.schedule("tick", cron="* * * * * *", overlap="allow")
            async def tick(event: Arrived) -> None:
                ran.append(event)

        async with cluster.running():
            await eventually(lambda: len(ran) >= 5, cluster.apps[0])
        found = await jobs(cluster.apps[0], topic="tick")
        keys = Counter(job.occurrence_key for job in found)
        assert set(keys.values()) == {1}
        assert Counter(event.occurrence_key for event in ran) == Counter(
            job.occurrence_key for job in found if job.attempt
        )
        instants = sorted(job.scheduled_at for job in found)
        assert {b - a for a, b in pairwise(instants)} == {timedelta(seconds=1)}
        assert all(event.fired_at >= event.scheduled_at for event in ran)
        assert len((await cluster.apps[0].schedules.list(None, 9, None)).items) == 1

    clustered(test, nodes_url, size)


def test_each_job_runs_once_and_every_node_takes_a_share(nodes_url: str, size: int) -> None:
    async def test(cluster: Cluster) -> None:
        ran: list[tuple[int, str]] = []
        everyone = asyncio.Event()
        for number, app in enumerate(cluster.apps):

            @app.on("work")
            async def work(event: Arrived, number: int = number) -> None:
                ran.append((number, event.job_id))
                if {one for one, _ in ran} == set(range(len(cluster.apps))):
                    everyone.set()
                await everyone.wait()  # all slots of the first node stay busy until the last node has started a job

        made = await cluster.apps[0].schedule_many([JobSpec(topic="work", payload=n) for n in range(400)])
        async with cluster.running(slots=10):
            await eventually(lambda: len(ran) >= 400, cluster.apps[0])
        assert Counter(id_ for _, id_ in ran) == Counter(job.id for job in made)
        assert {number for number, _ in ran} == set(range(len(cluster.apps)))
        assert {job.state for job in await jobs(cluster.apps[0])} == {"completed"}

    clustered(test, nodes_url, size)


def test_a_job_runs_only_on_nodes_that_handle_its_topic(nodes_url: str, size: int) -> None:
    async def test(cluster: Cluster) -> None:
        ran: list[tuple[int, str]] = []
        for number, app in enumerate(cluster.apps):

            @app.on(f"only.{number}")
            async def mine(event: Arrived, number: int = number) -> None:
                ran.append((number, event.topic))

        topics = [f"only.{n % len(cluster.apps)}" for n in range(60)]
        await cluster.apps[0].schedule_many([JobSpec(topic=topic) for topic in topics])
        async with cluster.running():
            await eventually(lambda: len(ran) >= 60, cluster.apps[0])
        assert all(topic == f"only.{number}" for number, topic in ran)
        assert len(ran) == 60

    clustered(test, nodes_url, size)


def test_a_queue_limit_applies_across_all_nodes(nodes_url: str, size: int) -> None:
    async def test(cluster: Cluster) -> None:
        now_running, most, done = 0, 0, 0
        for app in cluster.apps:
            app.queue("narrow", concurrency=3)

            @app.on("work")
            async def work(_: Arrived) -> None:
                nonlocal now_running, most, done
                now_running += 1
                most = max(most, now_running)
                await asyncio.sleep(0.01)
                now_running -= 1
                done += 1

        await cluster.apps[0].schedule_many([JobSpec(topic="work", queue="narrow") for _ in range(30)])
        async with cluster.running():
            await eventually(lambda: done >= 30, cluster.apps[0])
        assert (done, most <= 3) == (30, True)

    clustered(test, nodes_url, size)


def test_another_node_leads_after_the_leader_leaves(nodes_url: str) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.apps
        async with second.running(heartbeat=0.1, lease=5.0) as staying:
            async with first.running(heartbeat=0.1, lease=5.0) as leaving:
                both = [staying, leaving]
                await eventually(lambda: any(one.leader.fence is not None for one in both), second)
                assert [one.leader.fence is None for one in both].count(False) == 1
            await eventually(lambda: staying.leader.fence is not None, second)

    clustered(test, nodes_url, 2)


def test_a_job_of_an_unresponsive_node_runs_on_another(nodes_url: str) -> None:
    async def test(cluster: Cluster) -> None:
        silent, other = cluster.apps
        stuck, log = asyncio.Event(), Log()

        @silent.on("work")
        async def hang(_: Arrived) -> None:
            stuck.set()
            await asyncio.Event().wait()

        other.on("work")(log)
        job = await silent.schedule_at("work", retry=Retry(attempts=10))  # a busy machine may lose a lease of 1 s, too
        async with silent.running(drain=0.0) as ghost:
            await stuck.wait()
            ghost.heartbeat._renew_leases = _never  # type: ignore[method-assign]  # heartbeats stop
            ghost.node.stopping = True  # and it claims no more jobs
            async with other.running(heartbeat=0.1, lease=1.0) as rescuer:
                await eventually(lambda: bool(log.events), other)

                async def completed() -> bool:
                    return (await other.get(job.id)).state == "completed"

                await eventually(completed, other)
            (event,) = log.events
            assert event.attempt >= 2
            assert event.occurrence_key == job.occurrence_key
        done = await other.get(job.id)
        assert (done.state, done.attempt) == ("completed", event.attempt)
        assert [one["code"] for one in done.attempts] == ["LEASE_LOST"] * (event.attempt - 1)
        lost = done.attempts[0]
        assert (lost["node"], lost["reclaimedBy"]) == (ghost.node.id, rescuer.node.id)
        assert datetime.fromisoformat(lost["startedAt"]) < datetime.fromisoformat(lost["endedAt"])

    clustered(test, nodes_url, 2)


async def _never() -> None:
    await asyncio.Event().wait()


def test_a_node_warns_of_another_with_a_different_secret_key(
    nodes_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.apps[0], cluster.apps[2]
        async with first.running(name="first"), cluster.apps[1].running(name="same"):
            assert "TIMEBELL_SECRET_KEY" not in caplog.text
            async with second.running(name="second"):
                found = [record.getMessage() for record in caplog.records if "TIMEBELL_SECRET_KEY" in record.msg]
                assert sorted(text.split()[1] for text in found) == ["first", "same"]

    keys = iter(("new,old", "old", "other"))

    async def body() -> None:
        cluster = Cluster(nodes_url, 0)
        for key in keys:
            monkeypatch.setenv("TIMEBELL_SECRET_KEY", key)
            cluster.apps.append(Timebell(nodes_url, timezone="UTC"))
        try:
            await asyncio.wait_for(test(cluster), TIMEOUT_SECONDS)
        finally:
            await cluster.close()

    asyncio.run(body())


def test_a_job_created_on_one_node_wakes_another_before_its_next_poll(postgres_url: str) -> None:
    async def test(cluster: Cluster) -> None:
        maker, runner = cluster.apps
        log = Log()
        runner.on("work")(log)
        async with runner.running(heartbeat=30.0, poll=30.0, lease=90.0) as service:
            await eventually(lambda: service.node.receives_notifications, runner)
            await maker.schedule_at("work")
            await eventually(lambda: bool(log.events), runner)
        assert log.events[0].late_by < timedelta(seconds=20)

    clustered(test, postgres_url, 2)


def test_a_client_with_a_wrong_clock_uses_the_time_of_the_database(nodes_url: str) -> None:
    async def test(cluster: Cluster) -> None:
        (client,) = cluster.apps
        true = client.clock.now()
        at = client.clock.monotonic()
        client.clock.discipline(true + timedelta(hours=1), at, at + 1e-3)  # an hour fast
        job = await client.schedule_at("work")
        assert abs(job.run_at - true) < timedelta(minutes=1)
        made = await client.schedule_repeat("work", Cron("* * * * * *"))
        assert made.next_fire_at is not None
        assert abs(made.next_fire_at - true) < timedelta(minutes=1)

    clustered(test, nodes_url, 1)


def test_a_plain_function_is_waited_for_after_a_stop_request(nodes_url: str) -> None:
    async def test(cluster: Cluster) -> None:
        release, ran = threading.Event(), []
        for app in cluster.apps:

            @app.schedule("tick", cron="* * * * * *", overlap="cancel_previous", max_runs=60)
            def tick(event: Arrived) -> str:
                ran.append(event.job_id)
                release.wait(TIMEOUT_SECONDS)
                return "all of it"

        app = cluster.apps[0]

        async def has_superseded_job() -> bool:
            states = [job.state for job in await jobs(app, topic="tick")]
            return "running" in states and "cancelled" in states and states[-1] == "pending"

        async with cluster.running(heartbeat=0.2):
            await eventually(has_superseded_job, app)
            assert len(ran) == 1
            release.set()
            await eventually(lambda: len(ran) > 1, app)
        found = {job.id: job for job in await jobs(app, topic="tick")}
        first = found[ran[0]]
        assert (first.state, first.result) == ("completed", "all of it")
        superseded = [job for job in found.values() if job.state == "cancelled"]
        assert {(job.reason, job.attempt) for job in superseded} == {("superseded", 0)}
        assert not {job.id for job in superseded} & set(ran)

    clustered(test, nodes_url, 2)
