"""The public API of `Timebell`, call by call. These calls are documented and must continue to work."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import create_engine

import timebell
from tests.docs.pages import DOCS
from timebell import (
    SCHEDULE_ARRIVED,
    Arrived,
    Cancel,
    Cron,
    Every,
    JobSpec,
    Retry,
    RRule,
    Snooze,
    Timebell,
    arrived_event_name,
    errors,
)
from timebell import app as app_module
from timebell.app import INTERNAL_ATTRIBUTES

from .world import QUIET, START, Log, World, after, jobs, raises, virtual

SOON = after(hours=1)


def on_each_store(test: Callable[[Timebell], Awaitable[None]]) -> Callable[[str], None]:
    """Run a test of methods that need no engine on SQLite and on PostgreSQL."""

    def run(store_url: str) -> None:
        async def body() -> None:
            app = Timebell(store_url, timezone="Asia/Seoul")
            try:
                await test(app)
            finally:
                await app.close()

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def later(**spans: float) -> datetime:
    """An instant relative to the real clock."""
    return datetime.now(UTC) + timedelta(**spans)


def test_the_exported_names() -> None:
    assert SCHEDULE_ARRIVED == "schedule.arrived"
    assert arrived_event_name("notifications.task-reminder") == "schedule.notifications.task-reminder.arrived"
    assert set(timebell.__all__) >= {
        "Timebell", "Arrived", "JobSpec", "Retry", "Cron", "Every", "RRule", "Cancel", "Snooze", "errors",
        "SCHEDULE_ARRIVED", "arrived_event_name",
    }  # fmt: skip
    assert issubclass(errors.Conflict, errors.TimebellError)


def test_an_app_takes_its_database_from_the_environment_or_a_file_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Timebell().settings.database_url == "sqlite:///timebell.db"
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", f"sqlite:///{tmp_path}/other.db")
    assert Timebell().settings.database_url == f"sqlite:///{tmp_path}/other.db"
    assert Timebell("postgresql://user@host/db", timezone="Asia/Seoul").settings.default_timezone == "Asia/Seoul"


@virtual
async def test_topics_prefixes_and_the_star(world: World) -> None:
    app = world.app()
    events: list[tuple[str, str]] = []

    @app.on("notifications.task-reminder", retry=Retry(attempts=3, backoff="exponential", delay=5), timeout=30)
    async def remind(event: Arrived) -> None:
        events.append(("remind", event.topic))

    @app.on("notifications.task-reminder")
    def also(event: Arrived) -> None:  # sync functions too
        events.append(("also", event.topic))

    @app.on("billing.*")
    async def billing(event: Arrived) -> None:
        events.append(("billing", event.topic))

    @app.on("*")
    async def every_firing(event: Arrived) -> None:
        events.append(("*", event.topic))

    for topic in ("notifications.task-reminder", "billing.invoice.due"):
        await app.schedule_at(topic)
    async with app.running() as service:
        await service.wait_until_idle()
    assert sorted(events) == [
        ("*", "billing.invoice.due"),
        ("*", "notifications.task-reminder"),
        ("also", "notifications.task-reminder"),
        ("billing", "billing.invoice.due"),
        ("remind", "notifications.task-reminder"),
    ]


@virtual
async def test_an_event_has_the_documented_fields(world: World) -> None:
    app, log = world.app(), Log()
    app.on("*", handles=True)(log)
    job = await app.schedule_at(
        "notifications.task-reminder", datetime(2027, 3, 1, 8, 30), timezone="America/Mexico_City",
        payload={"user": 7}, owner_id="u7", tenant_id="acme", correlation_id="c", client_request_id="r", key="k",
        on_conflict="error", retry=Retry(attempts=2), timeout=10, queue="mail", priority=-1,
        expires_after=timedelta(hours=1), target=None, connection=None,
    )  # fmt: skip
    sched = await app.schedule_repeat("ai.agent-heartbeat", Every("PT1H"), timezone="Asia/Seoul", max_runs=5)
    async with app.running(**QUIET):
        await world.advance(hours=3)
    event = next(event for event in log.events if event.job_id == job.id)
    assert (event.topic, event.payload, event.timezone) == (
        "notifications.task-reminder", {"user": 7}, "America/Mexico_City",
    )  # fmt: skip
    assert event.metadata == {
        "owner_id": "u7", "tenant_id": "acme", "correlation_id": "c", "client_request_id": "r",
    }  # fmt: skip
    assert event.scheduled_at == datetime(2027, 3, 1, 14, 30, tzinfo=UTC)
    assert (event.fired_at, event.late_by) == (event.scheduled_at, timedelta(0))
    assert (event.schedule_id, event.attempt, event.upcoming, event.occurrence_key) == (None, 1, [], job.id)
    first, second = [event for event in log.events if event.schedule_id == sched.id][:2]
    assert (first.schedule_id, first.timezone) == (sched.id, "Asia/Seoul")
    assert first.upcoming == [after(hours=2), after(hours=3), after(hours=4)]
    assert first.occurrence_key != second.occurrence_key


@virtual
async def test_retry_snooze_and_cancel(world: World) -> None:
    app = world.app()
    flaky = Log(lambda event: None if event.attempt == 3 else raises(ConnectionError("away"))(event))
    app.on("flaky", retry=Retry(attempts=3, backoff="exponential", delay=5))(flaky)
    lazy = Log(lambda event: None if event.attempt == 2 else raises(Snooze(timedelta(minutes=5)))(event))
    app.on("lazy", retry=Retry(attempts=1))(lazy)
    app.on("void")(Log(raises(Cancel("the task is done"))))
    app.on("hopeless")(Log(raises(ValueError("never"))))
    made = {topic: await app.schedule_at(topic) for topic in ("flaky", "lazy", "void", "hopeless")}
    async with app.running():
        await world.advance(minutes=10)
    ended = {topic: await app.get(job.id) for topic, job in made.items()}
    assert [(topic, job.state, job.attempt, job.attempts_used) for topic, job in ended.items()] == [
        ("flaky", "completed", 3, 3), ("lazy", "completed", 2, 1), ("void", "cancelled", 1, 1),
        ("hopeless", "failed", 4, 4),
    ]  # fmt: skip
    assert ended["void"].reason == "the task is done"
    assert lazy.fired[1] - lazy.fired[0] == pytest.approx(300, abs=0.1)


@on_each_store
async def test_keys_error_keep_replace(app: Timebell) -> None:
    first = await app.schedule_at("a", later(hours=1), key="tea")
    with pytest.raises(errors.Conflict) as raised:
        await app.schedule_at("a", later(hours=2), key="tea", on_conflict="error")
    assert (raised.value.code, raised.value.existing) == ("KEY_IN_USE", first.id)
    assert (await app.schedule_at("a", later(hours=2), key="tea", on_conflict="keep")).id == first.id
    second = await app.schedule_at("a", later(hours=2), key="tea", on_conflict="replace")
    assert second.replaces == first.id
    assert ((await app.get(first.id)).state, (await app.get(first.id)).replaced_by) == ("cancelled", second.id)


@on_each_store
async def test_client_request_ids_in_both_modes(app: Timebell) -> None:
    first = await app.schedule_at("a", later(hours=1), client_request_id="r1")
    await app.cancel(first.id)
    with pytest.raises(errors.Conflict) as raised:
        await app.schedule_at("a", later(hours=1), client_request_id="r1")
    assert (raised.value.code, raised.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", first.id)
    again = await app.schedule_at("a", later(hours=1), client_request_id="r1", on_conflict="keep")
    assert (again.id, again.state) == (first.id, "cancelled")
    other = await app.schedule_at("a", later(hours=1), client_request_id="r1", tenant_id="other")
    assert other.id != first.id


@on_each_store
async def test_a_request_repeated_after_its_instant_is_known_by_its_id(app: Timebell) -> None:
    first = await app.schedule_at("a", later(hours=1), client_request_id="r1")
    past = later(minutes=-1)
    again = await app.schedule_at("a", past, client_request_id="r1", on_conflict="keep")
    assert again.id == first.id
    with pytest.raises(errors.Conflict) as raised:
        await app.schedule_at("a", past, metadata={"client_request_id": "r1"})
    assert (raised.value.code, raised.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", first.id)
    for stranger in ({"client_request_id": "r2"}, {"client_request_id": "r1", "tenant_id": "other"}, {}):
        with pytest.raises(errors.InThePast):
            await app.schedule_at("a", past, on_conflict="keep", **stranger)
    specs = [JobSpec(topic="a", run_at=at, client_request_id=id_) for at, id_ in ((past, "r1"), (later(hours=1), "r3"))]
    made = await app.schedule_many(specs, on_conflict="keep")
    assert made[0].id == first.id
    assert made[1].id != first.id


@on_each_store
async def test_schedule_many_and_pages(app: Timebell) -> None:
    made = await app.schedule_many([
        JobSpec(topic="a", run_at=later(hours=n + 1), owner_id="u7", tenant_id="acme") for n in range(45)
    ])  # fmt: skip
    seen, cursor = [], None
    while True:
        page = await app.list(owner_id="u7", tenant_id="acme", topic="a", status=["pending"], limit=20, cursor=cursor)
        assert len(page.items) <= 20
        seen += [job.id for job in page]
        if (cursor := page.next_cursor) is None:
            break
    assert seen == [job.id for job in made][::-1]
    words = ("active", "processing", "success", "failure")
    assert [len((await app.list(owner_id="u7", status=word)).items) for word in words] == [
        0, 0, 0, 0,
    ]  # fmt: skip
    assert not (await app.list(owner_id="u8")).items


@on_each_store
async def test_schedules_of_each_kind(app: Timebell) -> None:
    sched = await app.schedule_repeat(
        "ai.agent-heartbeat", Cron("0 9 * * 1-5"), timezone="America/Mexico_City", name="beat", payload={"a": 1},
        overlap="skip", catch_up="latest", catch_up_window=timedelta(hours=24),
    )  # fmt: skip
    assert (sched.timezone, sched.policies.catch_up_window) == ("America/Mexico_City", 86_400.0)
    assert sched.next_fire_at is not None
    assert sched.next_fire_at.astimezone(ZoneInfo("America/Mexico_City")).hour == 9
    for overlap in ("skip", "queue", "cancel_previous", "allow"):
        for catch_up in ("latest", "all", "skip"):
            await app.schedule_repeat("t", RRule("FREQ=DAILY;BYHOUR=9"), overlap=overlap, catch_up=catch_up)
    assert (await app.schedule_repeat("t", Every("PT1M"))).timezone == "Asia/Seoul"


@on_each_store
async def test_time_zones_of_one_time_jobs(app: Timebell) -> None:
    assert (await app.schedule_at("a", later(hours=1))).timezone in ("UTC", "Asia/Seoul")
    bare = Timebell(app.settings.database_url)
    aware = datetime.now(ZoneInfo("Asia/Kolkata")) + timedelta(hours=1)
    assert (await bare.schedule_at("a", aware)).timezone == "Asia/Kolkata"
    assert (await bare.schedule_at("a", later(hours=1))).timezone == "UTC"
    with pytest.raises(errors.InvalidInstant):
        await bare.schedule_at("a", datetime(2099, 1, 1))
    with pytest.raises(errors.InThePast) as raised:
        await bare.schedule_at("a", later(minutes=-1))
    assert raised.value.code == "SCHEDULE_IN_THE_PAST"
    await bare.close()


@virtual
async def test_cancel_returns_its_outcome_and_repeating_it_changes_nothing(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda _: asyncio.sleep(10)))
    pending, running, done = [await app.schedule_at("a", at) for at in (SOON, after(seconds=20), after(seconds=1))]
    async with app.running():
        await world.advance(seconds=25)
        outcomes = [(await app.cancel(job.id)).outcome for job in (pending, running, done)]
        assert outcomes == ["prevented", "in_flight", "already_done"]
        await world.advance(seconds=30)
        again = [await app.cancel(job.id) for job in (pending, running, done)]
    assert [result.outcome for result in again] == outcomes
    assert [result.job.state for result in again] == ["cancelled", "completed", "completed"]
    with pytest.raises(errors.NotFound):
        await app.cancel("0" * 32)


@virtual
async def test_reschedule_creates_a_new_job_linked_to_the_old_one(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(60))
    app.on("a")(log)
    job = await app.schedule_at("a", SOON, payload={"n": 1}, owner_id="u")
    new = await app.reschedule(job.id, run_at=after(minutes=5))
    old = await app.get(job.id)
    assert new.id != job.id
    assert (new.replaces, old.replaced_by, old.state) == (job.id, new.id, "cancelled")
    assert (new.payload, new.owner_id, new.run_at) == ({"n": 1}, "u", after(minutes=5))
    async with app.running():
        await world.advance(minutes=5, seconds=30)
        with pytest.raises(errors.Conflict) as raised:
            await app.reschedule(new.id, run_at=SOON)
        assert raised.value.code == "JOB_IN_FLIGHT"
    assert [event.job_id for event in log.events] == [new.id]


@on_each_store
async def test_connection_joins_the_transaction_of_the_caller(app: Timebell) -> None:
    await app.open()
    job, moved = await app.schedule_at("a", later(hours=1)), await app.schedule_at("a", later(hours=1))
    url = app.settings.database_url.replace("postgresql://", "postgresql+psycopg://")
    url = url.replace("mariadb://", "mariadb+pymysql://")
    try:
        engine = create_engine(url)
    except ModuleNotFoundError:  # only asyncpg is installed: an AsyncConnection works as well
        pytest.skip("no blocking driver for PostgreSQL is installed")
    connection = engine.connect()
    inside = await app.schedule_at("a", later(hours=1), connection=connection)
    await app.cancel(job.id, connection=connection)
    await app.reschedule(moved.id, run_at=later(hours=2), connection=connection)
    connection.rollback()
    with pytest.raises(errors.NotFound):
        await app.get(inside.id)
    assert [(await app.get(one.id)).state for one in (job, moved)] == ["pending", "pending"]
    connection.close()
    engine.dispose()


@virtual
async def test_code_defined_schedules_are_synced_at_start(world: World) -> None:
    app, ran = world.app(), []

    @app.schedule("morning-digest", cron="0 9 * * 1-5", timezone="Asia/Seoul", topic="digest.send")
    async def digest(event: Arrived) -> None:
        ran.append(event.topic)

    async with app.running():
        made = await app.schedules.get(name="morning-digest")
        await app.schedules.pause(made.id, "holidays")
    async with app.running(**QUIET):
        assert (await app.schedules.get(name="morning-digest")).enabled is False  # survives a deploy
        await app.schedules.resume(made.id)
        await world.advance(days=1)
    assert ran == ["digest.send"]


@virtual
async def test_on_unhandled_holds_or_completes_a_job_without_a_handler(world: World) -> None:
    app, loose = world.app(), world.app(on_unhandled="complete")
    held, completed = await app.schedule_at("a"), await loose.schedule_at("a")
    async with app.running():
        await world.advance(seconds=20)
    assert ((await app.get(held.id)).state, (await app.get(held.id)).hold) == ("pending", "unhandled")
    assert ((await app.get(completed.id)).state, (await app.get(completed.id)).result) == (
        "completed",
        {"listeners": 0},
    )


@virtual
async def test_results_erasure_and_pausing_everything(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda event: {"seen": event.payload}))
    job = await app.schedule_at("a", payload="hello", owner_id="u7")
    await app.schedule_at("a", SOON, owner_id="u7", key="u7-tea")
    await app.schedule_at("a", SOON, key="k")
    async with app.running():
        await world.advance(seconds=1)
        assert (await app.get(job.id)).result == {"seen": "hello"}
        assert (await app.cancel_all(key="k")).prevented == 1
        assert (await app.erase("u7")).prevented == 1
        assert (await app.get(job.id)).result is None
        await app.pause_all("a bad release")
        stopped = await app.schedule_at("a")
        await world.advance(minutes=1)
        assert (await app.get(stopped.id)).state == "pending"
        await app.resume_all()
        await world.advance(seconds=5)
        assert (await app.get(stopped.id)).state == "completed"


def test_run_returns_after_sigterm(sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")

    @app.on("stop")
    async def stop(event: Arrived) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    job = app.sync.schedule_at("stop")
    app.sync.close()
    asyncio.run(app.run())
    assert app.sync.get(job.id).state == "completed"
    app.sync.close()


def test_sync_has_the_same_methods(store_url: str) -> None:
    app = Timebell(store_url, timezone="UTC")
    job = app.sync.schedule_at("a", later(hours=1), owner_id="u")
    assert [found.id for found in app.sync.list(owner_id="u")] == [job.id]
    new = app.sync.reschedule(job.id, run_at=later(hours=2))
    assert app.sync.cancel(new.id).outcome == "prevented"
    assert app.sync.get(new.id).state == "cancelled"
    app.sync.schedule_repeat("a", Every("PT1H"), name="hourly")
    app.sync.schedule_many([JobSpec(topic="a")])
    app.sync.close()


def test_the_test_kit(timebell: Any) -> None:
    timebell.freeze("2027-11-06T12:00Z")
    timebell.app.on("a")(lambda event: None)
    timebell.run(timebell.app.schedule_repeat("a", Cron("0 9 * * *"), timezone="America/New_York"))
    runs = timebell.advance(days=2)
    assert [run.fired_at.hour for run in runs] == [13, 14]
    timebell.assert_fired("a", times=2)


@virtual
async def test_job_ids_are_time_ordered_uuids(world: World) -> None:
    app = world.app()
    made = [await app.schedule_at("a", SOON) for _ in range(3)]
    assert [job.id for job in made] == sorted(job.id for job in made)
    assert all(job.id[14] == "7" for job in made)
    assert [job.created_at for job in await jobs(app)] == [START] * 3


def test_a_program_without_an_engine_uses_the_clock_of_the_database(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        clock_reads = 0

        async def ahead() -> datetime:
            nonlocal clock_reads
            clock_reads += 1
            return later(hours=1)

        async def gone() -> datetime:
            raise errors.StoreUnreachable("The database does not answer.")

        try:
            await app.open()
            monkeypatch.setattr(app.store, "read_clock", ahead)
            monkeypatch.setattr(app_module, "CLOCK_MEASUREMENT_TTL_SECONDS", 1e9)  # the cached measurement is valid
            before = await app.schedule_at("a")
            assert clock_reads == 0
            monkeypatch.setattr(app_module, "CLOCK_MEASUREMENT_TTL_SECONDS", 0.0)  # the cached measurement has expired
            after_step = await app.schedule_at("a")
            assert after_step.created_at - before.created_at > timedelta(minutes=59)
            monkeypatch.setattr(app.store, "read_clock", gone)
            assert (await app.schedule_at("a")).created_at >= after_step.created_at
        finally:
            await app.close()

    asyncio.run(body())


def test_dir_lists_what_the_reference_describes() -> None:
    """Completion in a REPL or notebook offers the documented names, and no internals."""
    app = Timebell("postgresql://ana:secret@127.0.0.1/shop", timezone="UTC")
    reference = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in dir(app) if not re.search(rf"\bapp\.{name}\b", reference)] == []
    assert {"schedule_at", "schedules", "campaigns", "triggers", "sync"} <= set(dir(app))
    public = {name for name in vars(app) if not name.startswith("_")}
    assert public - set(dir(app)) == INTERNAL_ATTRIBUTES - {"remote_workers", "require_arrivals"}
    assert repr(app) == "<Timebell postgresql://ana:***@127.0.0.1/shop>"
