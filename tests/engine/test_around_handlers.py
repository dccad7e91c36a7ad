"""What surrounds handlers: middleware, what a lifespan opens, and who hears."""

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
    app, told = world.app(), []
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    @app.middleware
    async def outer(event: Arrived, call_next: CallNext) -> Any:
        user.set(event.payload)
        told.append("outer in")
        result = await call_next(event)
        told.append(f"outer out {result}")
        return f"<{result}>"

    @app.middleware
    async def inner(event: Arrived, call_next: CallNext) -> Any:
        told.append("inner in")
        try:
            return await call_next(event)
        finally:
            told.append("inner out")

    @app.on("plain")
    def plain(event: Arrived) -> str:
        told.append(f"plain {user.get()}")
        return "done"

    @app.on("async")
    async def not_plain(event: Arrived) -> None:
        told.append(f"async {user.get()}")

    app.on("*")(Log())
    job = await app.schedule_at("plain", payload="ana")
    async with engine(app):
        await world.advance(seconds=1)
        assert told == [
            *("outer in", "inner in", "plain ana", "inner out", "outer out done"),
            *("outer in", "inner in", "inner out", "outer out None"),
        ]
        told.clear()
        await app.schedule_at("async", payload="bo")
        await world.advance(seconds=1)
    assert told[2] == "async bo"
    assert (await app.get(job.id)).result == "<done>"


@virtual
async def test_middleware_sees_what_a_handler_raises_and_may_raise_itself(world: World) -> None:
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
    assert [(job.state.value, job.tries) for job in found] == [
        ("completed", 1), ("cancelled", 1), ("pending", 0), ("failed", 1),
    ]  # fmt: skip
    assert found[3].attempts[0]["code"] == "PermissionError"
    assert sorted(seen) == ["Cancel", "Snooze", "ValueError"]


def test_middleware_that_is_no_async_function_is_refused(sqlite_url: str) -> None:
    app: Any = Timebell(sqlite_url)
    for wrong in (lambda event, call_next: None, 7, None):
        with pytest.raises(InvalidInput) as refused:
            app.middleware(wrong)
        assert refused.value.code == "MIDDLEWARE_INVALID"


# The lifespan.


@virtual
async def test_handlers_see_what_the_lifespan_opened_until_the_last_is_done(world: World) -> None:
    app, told = world.app(), []

    @app.lifespan
    async def resources() -> AsyncIterator[SimpleNamespace]:
        told.append("open")
        pool = SimpleNamespace(closed=False)
        try:
            yield pool
        finally:
            pool.closed = True
            told.append("closed")

    @app.on("async")
    async def slow(event: Arrived) -> None:
        await asyncio.sleep(5)
        told.append(f"async {event.state.closed}")

    @app.on("plain")
    def plain(event: Arrived) -> None:
        told.append(f"plain {event.state.closed}")

    await app.schedule_at("async")
    await app.schedule_at("plain")
    assert told == []
    async with engine(app):
        await world.advance(seconds=1)
    assert told == ["open", "plain False", "async False", "closed"]
    async with engine(app):
        pass
    assert told[4:] == ["open", "closed"]


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


def test_what_cannot_be_a_lifespan_is_refused(sqlite_url: str) -> None:
    async def coroutine() -> None: ...
    def plain() -> Any:
        yield

    app: Any = Timebell(sqlite_url)
    for wrong in (coroutine, plain, print):
        with pytest.raises(InvalidInput) as refused:
            app.lifespan(wrong)
        assert refused.value.code == "LIFESPAN_INVALID"
    app.lifespan(_one)
    with pytest.raises(InvalidInput, match="_one"):
        app.lifespan(_one)


def test_as_the_lifespan_of_a_fastapi_application_it_runs_the_engine_beside_it(store_url: str) -> None:
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


# Who hears.


@virtual
async def test_S2_14_every_handler_that_hears_runs_even_if_the_first_fails(world: World) -> None:
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
async def test_a_snooze_of_an_observer_counts_too_but_the_most_specific_decides(world: World) -> None:
    app = world.app()
    app.on("*")(Log(raises(Snooze(30))))
    app.on("a")(Log())
    app.on("b")(Log(raises(Cancel("gone"))))
    a, b = await app.schedule_at("a"), await app.schedule_at("b")
    async with engine(app):
        await world.advance(seconds=1)
        assert [(await app.get(job.id)).state for job in (a, b)] == ["pending", "cancelled"]


@virtual
async def test_S2_22_an_app_may_complete_what_nobody_hears(world: World) -> None:
    made = world.app(unheard="complete")
    deaf = await made.schedule_at("fax", payload=1)
    many = await made.schedule_many([JobSpec(topic="fax"), JobSpec(topic="fax")])
    later = await made.schedule_at("fax", "2027-03-02T12:00Z")
    held = await world.app().schedule_at("fax")
    app, log = world.app(), Log()
    app.on("mail")(log)
    mail = await made.schedule_at("mail")
    async with engine(app):
        await world.advance(seconds=30)
    for job in (deaf, *many):
        done = await app.get(job.id)
        assert (done.state, done.result, done.attempt) == ("completed", {"listeners": 0}, 0)
    assert [(await app.get(job.id)).state for job in (later, held, mail)] == ["pending", "pending", "completed"]
    assert ((await app.get(held.id)).hold, len(log.events)) == ("unheard", 1)


@virtual
async def test_a_schedule_may_choose_for_itself_what_becomes_of_the_unheard(world: World) -> None:
    for default, chosen, states in (("hold", "complete", {"completed"}), ("complete", "hold", {"pending"})):
        app = world.app(unheard=default)
        app.on("mail")(Log())
        await app.schedule_repeat(f"fax.{chosen}", Every("PT1H"), name=chosen, unheard=chosen, overlap="queue")
        async with engine(app, poll=50.0, heartbeat=50.0, lease=150.0):
            await world.advance(hours=2, minutes=1)
        found = await jobs(app, topic=f"fax.{chosen}")
        assert ({job.state.value for job in found}, len(found)) == (states, 2)


@virtual
async def test_a_heard_job_that_would_be_completed_keeps_its_handlers_policy(world: World) -> None:
    app, log = world.app(unheard="complete"), Log(raises(ValueError()))
    app.on("mail", retry=Retry(attempts=2, backoff="fixed", delay=1, jitter=0))(log)
    await app.schedule_at("mail")
    async with engine(app):
        await world.advance(minutes=1)
    assert log.fired == [0, 1]


def test_what_becomes_of_the_unheard_is_one_of_two_words(sqlite_url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Timebell(sqlite_url, unheard="drop")
    assert (refused.value.code, refused.value.fix) == ("INVALID_UNHEARD", "Use hold, complete.")
