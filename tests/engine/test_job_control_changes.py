"""Change jobs from Python: stop, reschedule with other fields, list by more filters, defaults of handlers."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import select

from timebell import Arrived, Cancel, Cron, Timebell
from timebell.errors import InvalidInput, TimebellError
from timebell.recurrence import tzdata_version
from timebell.store.schema import jobs
from timebell.testing.kit import Kit


def test_stop_cancels_an_async_handler(timebell: Kit) -> None:
    ended = []

    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append((timebell.now, event.cancelled))
            raise

    app = timebell.app
    job = timebell.run(app.schedule_in("work", 1))
    timebell.advance(seconds=10)
    assert timebell.run(app.cancel(job.id)).outcome == "in_flight"
    timebell.advance(seconds=50)
    assert ended == []
    assert timebell.run(app.cancel(job.id, stop=True)).outcome == "in_flight"
    timebell.advance(seconds=1)
    assert ended == [(datetime(2027, 1, 1, 0, 1, tzinfo=UTC), True)]
    stopped = timebell.run(app.get(job.id))
    assert (stopped.state, stopped.reason) == ("cancelled", "stopped")
    assert timebell.run(app.cancel(job.id, stop=True)).outcome == "in_flight"


def test_stop_ends_a_job_whose_handler_does_not_react(timebell: Kit) -> None:
    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    app = timebell.app
    job = timebell.run(app.schedule_in("work", 1))
    timebell.advance(seconds=10)
    timebell.run(app.cancel(job.id, stop=True))
    timebell.advance(seconds=9)
    assert timebell.run(app.get(job.id)).state == "running"
    timebell.advance(seconds=6)
    assert timebell.run(app.get(job.id)).state == "cancelled"


@pytest.mark.parametrize("observers", [0, 1])
def test_a_plain_function_reads_that_it_should_stop(tmp_path: Path, observers: int) -> None:
    asyncio.run(_stop_a_plain_function(f"sqlite:///{tmp_path}/bell.db", observers))


async def _stop_a_plain_function(url: str, observers: int) -> None:
    started = threading.Event()
    app = Timebell(url, timezone="UTC")

    @app.on("work")
    def work(event: Arrived) -> None:
        started.set()
        while not event.cancelled:
            threading.Event().wait(0.01)
        raise Cancel("stopped early")

    if observers:
        app.on("*")(lambda event: None)
    async with app.running():
        job = await app.schedule_at("work")
        await asyncio.to_thread(started.wait, 30)
        await app.cancel(job.id, stop=True)
        with pytest.raises(TimebellError):
            await app.wait(job.id, timeout=60)
    ended = await app.get(job.id)
    assert (ended.state, ended.reason) == ("cancelled", "stopped early")
    await app.close()


def test_a_job_is_rescheduled_with_other_fields(timebell: Kit) -> None:
    app = timebell.app
    old = timebell.run(
        app.schedule_in(
            "work", "1h", payload={"n": 1}, owner_id="ana", metadata={"order": 7}, queue="slow", expires_after="5m",
            retry={"attempts": 2},
        )
    )  # fmt: skip
    new = timebell.run(app.reschedule(old.id, payload={"n": 2}, priority=3, correlation_id="c"))
    assert (new.run_at, new.payload, new.priority, new.queue) == (old.run_at, {"n": 2}, 3, "slow")
    assert new.metadata == {"order": 7, "owner_id": "ana", "correlation_id": "c"}
    assert (new.replaces, new.expires_at, new.retry["attempts"]) == (old.id, old.expires_at, 2)
    later = timebell.run(app.reschedule(new.id, timebell.now + timedelta(hours=3), owner_id="ben", expires_after="1m"))
    assert (later.owner_id, later.payload) == ("ben", {"n": 2})
    assert later.expires_at == later.run_at + timedelta(minutes=1)
    at_once = timebell.run(app.reschedule(later.id))
    assert at_once.run_at == timebell.now
    with pytest.raises(InvalidInput, match="Did you mean payload"):
        timebell.run(app.reschedule(at_once.id, paylod=1))  # type: ignore[call-arg]
    with pytest.raises(InvalidInput):
        timebell.run(app.reschedule(at_once.id, timeout="soon"))


def test_a_rescheduled_job_keeps_its_zone(timebell: Kit) -> None:
    """An instant in UTC does not name a place; only `timezone`, or the ZoneInfo of the time, changes it."""
    job = timebell.run(timebell.app.schedule_in("work", "1h", timezone="Asia/Seoul"))
    at = timebell.now + timedelta(hours=2)
    for run_at, timezone, expected in (
        (at, None, "Asia/Seoul"),
        (f"{at:%FT%TZ}", None, "Asia/Seoul"),
        (at.astimezone(ZoneInfo("Europe/Madrid")), None, "Europe/Madrid"),
        (at, "UTC", "UTC"),
    ):
        job = timebell.run(timebell.app.reschedule(job.id, run_at, timezone=timezone))
        assert (job.run_at, job.timezone) == (at, expected)


def test_a_changed_job_follows_new_zone_data_until_its_zone_changes(timebell: Kit) -> None:
    """The release from which the instant was computed stays with the local time."""
    app = timebell.app
    job = timebell.run(app.schedule_at("work", "2027-07-01T09:00", timezone="America/Mexico_City"))
    nine = job.run_at

    def zone_data(job_id: str) -> tuple[str | None, str | None]:
        with timebell.connect() as connection:
            row = connection.execute(select(jobs.c.local_time, jobs.c.tzdata).where(jobs.c.id == job_id)).one()
            return row.local_time, row.tzdata

    assert zone_data(job.id) == ("2027-07-01T09:00:00", tzdata_version())
    job = timebell.run(app.reschedule(job.id, payload=2))
    assert zone_data(job.id) == ("2027-07-01T09:00:00", tzdata_version())
    job = timebell.run(app.reschedule(job.id, priority=1, timezone="America/Mexico_City"))
    assert zone_data(job.id) == ("2027-07-01T09:00:00", tzdata_version())
    job = timebell.run(app.reschedule(job.id, priority=2, timezone="Asia/Seoul"))
    assert (job.run_at, job.timezone, job.payload, zone_data(job.id)) == (nine, "Asia/Seoul", 2, (None, None))


def test_a_job_with_a_target_is_changed(timebell: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_WEBHOOK_SIGNING_SECRET", "whsec_" + "bWVzc2FnZXMgYXJlIHNpZ25lZCB3aXRoIHRoaXM=")
    app = timebell.use(Timebell(timezone="UTC", on_unhandled="complete"))
    webhook = {"kind": "http", "url": "https://example.com/hook"}
    for target in (webhook, None):
        old = timebell.run(app.schedule_in("work", "1h", target=target))
        new = timebell.run(app.reschedule(old.id, payload=2, queue="slow"))
        assert (new.payload, new.queue, new.target) == (2, "slow", old.target)
        assert new.target is not None


def test_jobs_are_listed_by_labels_and_time(timebell: Kit) -> None:
    app = timebell.app
    app.on("work")(lambda event: None)
    first, second, other = (
        timebell.run(app.schedule_in("work", f"{hours}h", **fields))
        for hours, fields in (
            (1, {"correlation_id": "c1", "metadata": {"order": {"id": 7}}}),
            (2, {"correlation_id": "c1", "client_request_id": "r2", "queue": "slow"}),
            (3, {"tenant_id": "b", "client_request_id": "r2", "metadata": {"order": {"id": 8}}}),
        )
    )

    def ids(**filters: Any) -> list[str]:
        return [job.id for job in timebell.run(app.list(**filters))]

    assert ids(correlation_id="c1") == [second.id, first.id]
    assert ids(correlation_id="c1", queue="slow") == [second.id]
    assert ids(client_request_id="r2") == [other.id, second.id]
    assert ids(client_request_id="r2", tenant_id="b") == [other.id]
    assert ids(metadata={"order.id": 7}) == [first.id]
    assert ids(metadata={"order.id": 9}) == []
    timebell.advance(hours=2.5)
    start = datetime(2027, 1, 1, 2, tzinfo=UTC)
    assert ids(start=start) == [other.id, second.id]  # finished at 2, due at 3
    assert ids(start=start, end=start + timedelta(hours=1)) == [second.id]
    assert ids(status="completed", end=start) == [first.id]
    with pytest.raises(InvalidInput, match="time zone"):
        ids(start=datetime(2027, 1, 1))
    with pytest.raises(InvalidInput, match="metadata"):
        ids(metadata="order")


def test_handlers_have_defaults_for_new_jobs(timebell: Kit) -> None:
    app = timebell.app
    app.on("mail.*", queue="bulk", priority=7)(lambda event: None)

    @app.on("mail.send", queue="mail", expires_after="10m")
    def send(event: Arrived) -> None: ...

    job = timebell.run(send.schedule_in("1h"))
    assert (job.queue, job.priority, job.expires_at) == ("mail", 7, job.run_at + timedelta(minutes=10))
    assert timebell.run(app.schedule_in("mail.other", 1)).queue == "bulk"
    own = timebell.run(send.schedule_in("1h", queue="urgent", priority=1, expires_after="1m"))
    assert (own.queue, own.priority, own.expires_at) == ("urgent", 1, own.run_at + timedelta(minutes=1))
    assert timebell.run(app.schedule_in("other", 1)).queue == "default"
    many = timebell.run(app.schedule_many([_spec("mail.send"), _spec("mail.other")]))
    assert [job.queue for job in many] == ["mail", "bulk"]
    repeated = timebell.run(send.schedule_repeat(Cron("0 9 * * *"), timezone="UTC"))
    assert (repeated.action.queue, repeated.action.priority, repeated.action.expires_after) == ("mail", 7, 600)
    for options in ({"queue": ""}, {"priority": "high"}, {"expires_after": -1}):
        with pytest.raises(InvalidInput):
            app.on("mail.send", **options)  # type: ignore[arg-type]


def _spec(topic: str) -> Any:
    from timebell import JobSpec

    return JobSpec(topic=topic)
