"""Middleware, lifespan, and the choice of handlers of a topic."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from timebell import Arrived, CallNext, Cancel, Every, JobSpec, Retry, Snooze, Timebell
from timebell.errors import InvalidInput

from .world import Log, World, engine, jobs, raises, virtual

# Middleware.


@virtual
async def test_middleware_is_around_every_call_in_order_of_registration(world: World) -> None:
    app, calls = world.app(), []
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    @app.middleware
    async def outer(event: Arrived, call_next: CallNext) -> Any:
        user.set(event.payload)
        calls.append("outer in")
        result = await call_next(event)
        calls.append(f"outer out {result}")
        return f"<{result}>"

    @app.middleware
    async def inner(event: Arrived, call_next: CallNext) -> Any:
        calls.append("inner in")
        try:
            return await call_next(event)
        finally:
            calls.append("inner out")

    @app.on("plain")
    def plain(event: Arrived) -> str:
        calls.append(f"plain {user.get()}")
        return "done"

    @app.on("async")
    async def not_plain(event: Arrived) -> None:
        calls.append(f"async {user.get()}")

    app.on("*")(Log())
    job = await app.schedule_at("plain", payload="ana")
    async with engine(app):
        await world.advance(seconds=1)
        assert calls == [
            *("outer in", "inner in", "plain ana", "inner out", "outer out done"),
            *("outer in", "inner in", "inner out", "outer out None"),
        ]
        calls.clear()
        await app.schedule_at("async", payload="bo")
        await world.advance(seconds=1)
    assert calls[2] == "async bo"
    assert (await app.get(job.id)).result == "<done>"


@virtual
async def test_middleware_sees_exceptions_of_handlers_and_may_raise_its_own(world: World) -> None:
    app, seen = world.app(), []

    @app.middleware
    async def around(event: Arrived, call_next: CallNext) -> Any:
        try:
            await call_next(event)
        except (Exception, Snooze, Cancel) as raised:
            seen.append(type(raised).__name__)
            if event.topic == "swallowed":
                return "swallowed"
            raise
        if event.topic == "refused":
            raise PermissionError("no")
        return None

    for topic, error in {"swallowed": ValueError(), "cancelled": Cancel("gone"), "later": Snooze(60)}.items():
        app.on(topic)(Log(raises(error)))
    app.on("refused", retry=Retry(attempts=1))(Log())
    made = [await app.schedule_at(topic) for topic in ("swallowed", "cancelled", "later", "refused")]
    async with engine(app):
        await world.advance(seconds=1)
    found = [await app.get(job.id) for job in made]
    assert [(job.state.value, job.attempts_used) for job in found] == [
        ("completed", 1), ("cancelled", 1), ("pending", 0), ("failed", 1),
    ]  # fmt: skip
    assert found[3].attempts[0]["code"] == "PermissionError"
    assert sorted(seen) == ["Cancel", "Snooze", "ValueError"]


def test_middleware_must_be_an_async_function(sqlite_url: str) -> None:
    app: Any = Timebell(sqlite_url)
    for wrong in (lambda event, call_next: None, 7, None):
        with pytest.raises(InvalidInput) as refused:
            app.middleware(wrong)
        assert refused.value.code == "INVALID_MIDDLEWARE"


# The lifespan.


@virtual
async def test_handlers_use_the_lifespan_state_until_the_last_one_has_finished(world: World) -> None:
    app, calls = world.app(), []

    @app.lifespan
    async def resources() -> AsyncIterator[SimpleNamespace]:
        calls.append("open")
        pool = SimpleNamespace(closed=False)
        try:
            yield pool
        finally:
            pool.closed = True
            calls.append("closed")

    @app.on("async")
    async def slow(event: Arrived) -> None:
        await asyncio.sleep(5)
        calls.append(f"async {event.state.closed}")

    @app.on("plain")
    def plain(event: Arrived) -> None:
        calls.append(f"plain {event.state.closed}")

    await app.schedule_at("async")
    await app.schedule_at("plain")
    assert calls == []
    async with engine(app):
        await world.advance(seconds=1)
    assert calls == ["open", "plain False", "async False", "closed"]
    async with engine(app):
        pass
    assert calls[4:] == ["open", "closed"]


@virtual
async def test_a_lifespan_that_cannot_open_keeps_the_engine_from_starting(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)

    @app.lifespan
    @asynccontextmanager
    async def resources() -> AsyncIterator[None]:
        raise ConnectionError("no pool")
        yield

    await app.schedule_at("t")
    with pytest.raises(ConnectionError, match="no pool"):
        async with engine(app):
            pass
    assert (app.service, log.events) == (None, [])


@virtual
async def test_without_a_lifespan_there_is_no_state(world: World) -> None:
    app, seen = world.app(), []
    app.on("t")(lambda event: seen.append(event.state))
    await app.schedule_at("t")
    async with engine(app):
        await world.advance(seconds=1)
    assert seen == [None]


async def _one() -> AsyncIterator[None]:
    yield


def test_a_lifespan_must_be_an_async_generator(sqlite_url: str) -> None:
    async def coroutine() -> None: ...
    def plain() -> Any:
        yield

    app: Any = Timebell(sqlite_url)
    for wrong in (coroutine, plain, print):
        with pytest.raises(InvalidInput) as refused:
            app.lifespan(wrong)
        assert refused.value.code == "INVALID_LIFESPAN"
    app.lifespan(_one)
    with pytest.raises(InvalidInput, match="_one"):
        app.lifespan(_one)


def test_a_fastapi_lifespan_runs_the_engine_inside_the_application(store_url: str) -> None:
    app = Timebell(store_url, timezone="UTC")
    web = FastAPI(lifespan=app.lifespan)
    ran = asyncio.Event()

    @app.on("mail.send")
    async def send(event: Arrived) -> None:
        ran.set()

    @web.post("/blocking")
    def blocking() -> str:
        return app.sync.schedule_at("other").id

    @web.post("/")
    async def make() -> str:
        job = await app.schedule_at("mail.send")
        await asyncio.wait_for(ran.wait(), 60)
        return job.id

    with TestClient(web) as client:
        assert len(client.post("/").json()) == 36
        assert len(client.post("/blocking").json()) == 36
        assert app.service is not None
    assert app.service is None
    assert app.sync.list(status="completed", topic="mail.send").items
    app.sync.close()


# Matching handlers.


@virtual
async def test_every_matching_handler_runs_even_if_the_first_one_fails(world: World) -> None:
    app, prefix, everything = world.app(), Log(), Log(raises(KeyError("second")))
    app.on("a.b", retry=Retry(attempts=1))(Log(raises(ValueError("first"))))
    app.on("a.*")(prefix)
    app.on("*")(everything)
    job = await app.schedule_at("a.b")
    async with engine(app):
        await world.advance(seconds=1)
    assert (len(prefix.events), len(everything.events)) == (1, 1)
    done = await app.get(job.id)
    assert (done.state, done.attempts[0]["code"]) == ("failed", "ValueError")


@virtual
async def test_two_handlers_of_one_topic_both_run_and_the_first_registered_gives_the_result(world: World) -> None:
    app = world.app()
    app.on("t")(Log(lambda _: 1))
    app.on("t")(Log(lambda _: 2))
    job = await app.schedule_at("t")
    async with engine(app):
        await world.advance(seconds=1)
    assert (await app.get(job.id)).result == 1


@virtual
async def test_an_observer_can_snooze_a_job_but_the_most_specific_handler_decides(world: World) -> None:
    app = world.app()
    app.on("*")(Log(raises(Snooze(30))))
    app.on("a")(Log())
    app.on("b")(Log(raises(Cancel("gone"))))
    a, b = await app.schedule_at("a"), await app.schedule_at("b")
    async with engine(app):
        await world.advance(seconds=1)
        assert [(await app.get(job.id)).state for job in (a, b)] == ["pending", "cancelled"]


@virtual
async def test_an_app_can_complete_jobs_that_no_node_handles(world: World) -> None:
    made = world.app(on_unhandled="complete")
    unhandled = await made.schedule_at("fax", payload=1)
    many = await made.schedule_many([JobSpec(topic="fax"), JobSpec(topic="fax")])
    later = await made.schedule_at("fax", "2027-03-02T12:00Z")
    held = await world.app().schedule_at("fax")
    app, log = world.app(), Log()
    app.on("mail")(log)
    mail = await made.schedule_at("mail")
    async with engine(app):
        await world.advance(seconds=30)
    for job in (unhandled, *many):
        done = await app.get(job.id)
        assert (done.state, done.result, done.attempt) == ("completed", {"listeners": 0}, 0)
    assert [(await app.get(job.id)).state for job in (later, held, mail)] == ["pending", "pending", "completed"]
    assert ((await app.get(held.id)).hold, len(log.events)) == ("unhandled", 1)


@virtual
async def test_a_schedule_overrides_on_unhandled_of_its_app(world: World) -> None:
    for default, chosen, states in (("hold", "complete", {"completed"}), ("complete", "hold", {"pending"})):
        app = world.app(on_unhandled=default)
        app.on("mail")(Log())
        await app.schedule_repeat(f"fax.{chosen}", Every("PT10M"), name=chosen, on_unhandled=chosen, overlap="queue")
        async with engine(app, poll=50.0, heartbeat=50.0, lease=150.0):
            await world.advance(minutes=21)
        found = await jobs(app, topic=f"fax.{chosen}")
        assert ({job.state.value for job in found}, len(found)) == (states, 2)


@virtual
async def test_a_handled_job_keeps_the_policy_of_its_handler_under_on_unhandled_complete(world: World) -> None:
    app, log = world.app(on_unhandled="complete"), Log(raises(ValueError()))
    app.on("mail", retry=Retry(attempts=2, backoff="fixed", delay=1, jitter=0))(log)
    await app.schedule_at("mail")
    async with engine(app):
        await world.advance(minutes=1)
    assert log.fired == [0, 1]


def test_on_unhandled_must_be_hold_or_complete(sqlite_url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Timebell(sqlite_url, on_unhandled="drop")
    assert (refused.value.code, refused.value.fix) == ("INVALID_ON_UNHANDLED", "Use hold, complete.")
