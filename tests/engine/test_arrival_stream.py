"""Starting jobs are published to other processes: through PostgreSQL, Redis, or within the process of the engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest

from tests.servers import Redis
from timebell import Arrived, Timebell
from timebell.engine import arrival_stream as hints
from timebell.errors import InvalidInput, Refused, StoreUnreachable
from timebell.store import notifications
from timebell.store.notifications import pack_hints, unpack_hints


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    server = Redis(os.environ.get("TIMEBELL_TEST_REDIS_URL"))
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "REQUEST_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(hints, "REQUEST_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(hints, "RECONNECT_DELAY_SECONDS", 0.1)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def node(url: str) -> Timebell:
    """Return an app that handles every topic."""
    app = Timebell(url, timezone="UTC")

    @app.on("*", handles=True)
    async def take(event: Arrived) -> None: ...

    return app


async def first(events: AsyncIterator[Arrived], app: Timebell, topic: str, **fields: Any) -> tuple[str, Arrived]:
    """Create jobs until one is received, as starts before the subscription are not published; return its id too."""
    made = []
    waits = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
    while not waits.done() or waits.result().job_id not in made:  # an event of an earlier job may still arrive
        if waits.done():
            waits = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        made.append((await app.schedule_at(topic, **fields)).id)
        await asyncio.wait([waits], timeout=0.3)
    return waits.result().job_id, waits.result()


def test_a_job_start_is_published_to_another_process(postgres_url: str) -> None:
    """The node is a separate process, started before the first subscription."""
    program = f"""
import asyncio
from timebell import Timebell
app = Timebell({postgres_url!r}, timezone="UTC")
@app.on("billing.invoice-due")
async def take(event): ...
asyncio.run(app.run())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL)

    async def main() -> None:
        app = Timebell(postgres_url, timezone="UTC")
        async with app.arrivals("billing.*") as events:
            given = {"payload": {"n": 0}, "owner_id": "ana", "timezone": "Asia/Seoul"}
            id_, event = await first(events, app, "billing.invoice-due", **given)
        assert (event.job_id, event.topic, event.payload, event.timezone) == (
            id_, "billing.invoice-due", {"n": 0}, "Asia/Seoul",
        )  # fmt: skip
        assert (event.metadata, event.attempt, event.occurrence_key) == ({"owner_id": "ana"}, 1, id_)
        assert event.fired_at.tzinfo is UTC
        assert timedelta(0) <= event.late_by < timedelta(minutes=2)
        await app.close()

    try:
        run(main())
    finally:
        process.terminate()
        process.wait(60)


def test_each_listener_receives_its_topics_and_its_tenant_once(postgres_url: str) -> None:
    async def main() -> None:
        worker, here = node(postgres_url), Timebell(postgres_url, timezone="UTC")
        async with (
            worker.running() as service, here.arrivals("a.*") as ours, here.arrivals("a.b", tenant_id="t2") as theirs,
            here.arrivals() as everything,
        ):  # fmt: skip
            await first(everything, here, "warm.up")
            for topic, tenant in (("a.b", "t1"), ("b.a", "t2"), ("a.b", "t2"), ("a", "t2"), ("a.c", "t2")):
                await here.schedule_at(topic, tenant_id=tenant)
            received = [await anext(ours) for _ in range(3)]
            assert sorted((one.topic, one.metadata["tenant_id"]) for one in received) == [
                ("a.b", "t1"), ("a.b", "t2"), ("a.c", "t2"),
            ]  # fmt: skip
            assert (await anext(theirs)).metadata == {"tenant_id": "t2"}
            await service.wait_until_idle()
            for events in (ours, theirs):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(events), 0.3)
        await worker.close()
        await here.close()

    run(main())


def test_nothing_is_published_without_listeners(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    async def publish(self: Any, texts: list[str]) -> None:
        published.extend(texts)

    monkeypatch.setattr(notifications.PostgresChannel, "publish", publish)

    async def main() -> None:
        worker = node(postgres_url)
        async with worker.running() as service:
            await worker.schedule_at("a.b")
            await service.wait_until_idle()
        await worker.close()

    run(main())
    assert published == []


@pytest.mark.heartbeats
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_redis_carries_arrivals_to_other_processes_on_both_stores(
    store: str, request: pytest.FixtureRequest, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_ARRIVALS_URL", redis.url)
    url: str = request.getfixturevalue(f"{store}_url")

    async def main() -> None:
        worker, here = node(url), Timebell(url, timezone="UTC")
        async with worker.running(), here.arrivals("a.b") as events:
            made = await here.schedule_at("a.b", payload=[1])
            event = await anext(events)
            assert (event.job_id, event.payload) == (made.id, [1])
        await worker.close()
        await here.close()

    run(main())


def test_on_sqlite_arrivals_stay_within_the_process_of_the_engine(sqlite_url: str) -> None:
    async def main() -> None:
        app = node(sqlite_url)
        with pytest.raises(Refused) as caught:
            await app.arrivals().__aenter__()
        assert caught.value.code == "ARRIVALS_NOT_SHARED"
        async with app.running(), app.arrivals("a.*") as events:
            made = await app.schedule_at("a.b")
            assert (await anext(events)).job_id == made.id
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 0.1)
            made = await app.schedule_at("a.b")
            assert (await anext(events)).job_id == made.id
        await app.close()

    run(main())


def test_retries_are_not_published(sqlite_url: str) -> None:
    async def main() -> None:
        app, attempts = Timebell(sqlite_url, timezone="UTC"), []

        @app.on("flaky")
        async def flaky(event: Arrived) -> None:
            attempts.append(event.attempt)
            if event.attempt < 3:
                raise ValueError

        async with app.running() as service, app.arrivals() as events:
            await app.schedule_at("flaky", retry={"attempts": 3, "backoff": "fixed", "delay": 0})
            assert (await anext(events)).attempt == 1
            async with asyncio.timeout(40):
                while attempts != [1, 2, 3]:
                    await asyncio.sleep(0.02)
            await service.wait_until_idle()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 0.2)
        await app.close()

    run(main())


@pytest.mark.heartbeats
def test_a_lost_notification_channel_reconnects(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Redis()
    monkeypatch.setenv("TIMEBELL_ARRIVALS_URL", server.url)

    async def main() -> None:
        worker, here = node(sqlite_url), Timebell(sqlite_url, timezone="UTC")
        async with worker.running() as service, here.arrivals() as events:
            await first(events, here, "a.b")
            server.stop()
            lost = await here.schedule_at("a.lost")
            async with asyncio.timeout(40):
                while (await here.get(lost.id)).state != "completed":
                    await asyncio.sleep(0.02)  # jobs run without the notification channel
            await service.wait_until_idle()
            await asyncio.to_thread(server.start)
            await first(events, here, "a.found")
        await worker.close()
        await here.close()

    try:
        run(main())
    finally:
        server.close()
    assert "receiving arrivals again" in caplog.text


@pytest.mark.parametrize(
    ("url", "code"), [("amqp://x", "INVALID_ARRIVALS_URL"), ("redis://127.0.0.1:1", "ARRIVALS_UNREACHABLE")]
)
def test_an_unusable_arrivals_url_is_reported(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, url: str, code: str
) -> None:
    monkeypatch.setenv("TIMEBELL_ARRIVALS_URL", url)

    async def main() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        with pytest.raises((InvalidInput, StoreUnreachable)) as caught:
            await app.arrivals().__aenter__()
        assert caught.value.code == code
        await app.close()

    run(main())


def test_an_unreachable_database_is_reported(postgres_url: str) -> None:
    async def main() -> None:
        with pytest.raises(StoreUnreachable):
            await notifications.PostgresChannel(None, "postgresql://nobody@127.0.0.1:1/x").connect(print)  # type: ignore[arg-type]

    run(main())


def test_hints_fit_into_a_notify() -> None:
    many = [hints.Hint(f"01900000-0000-7000-8000-{n:012}", "약" * 200, "t" * 200, "1" * 16) for n in range(100)]
    texts = pack_hints(many)
    assert all(len(text.encode()) < 8000 for text in texts)
    assert [one for text in texts for one in unpack_hints(text)] == many
    assert unpack_hints("not ours") == unpack_hints('{"a": 1}') == []
