"""Handler objects: called like the function, and creating jobs of their topic."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from zoneinfo import ZoneInfo

import pytest

from timebell import Arrived, Cron, Timebell
from timebell.errors import InvalidInput, InvalidPayload
from timebell.testing.kit import Kit


@dataclass
class Reminder:
    user_id: int


def test_a_handler_creates_jobs_of_its_topic(timebell: Kit) -> None:
    @timebell.app.on("reminders.send")
    async def remind(event: Arrived[Reminder]) -> int:
        return event.payload.user_id

    timebell.run(remind.schedule_in("15m", Reminder(1), owner_id="ana"))
    timebell.run(remind.schedule_in(timedelta(minutes=30), Reminder(2)))
    timebell.run(remind.schedule_at(timebell.now + timedelta(minutes=45), Reminder(3)))
    timebell.run(remind.schedule_repeat(Cron("0 1 * * *"), Reminder(4), timezone=ZoneInfo("UTC"), name="nightly"))
    runs = timebell.advance(hours=1)
    assert runs.outcomes == ["completed"] * 4
    jobs = timebell.run(timebell.app.list(topic="reminders.send"))
    assert sorted(job.result for job in jobs) == [1, 2, 3, 4]
    with pytest.raises(InvalidPayload):
        timebell.run(remind.schedule_in(5, {"user_id": "x"}))  # type: ignore[arg-type]


def test_a_handler_is_called_like_its_function(timebell: Kit) -> None:
    @timebell.app.on("first")
    @timebell.app.on("second")
    def handle(event: str) -> str:
        """Return the event."""
        return event

    assert (handle("x"), handle.__name__, handle.__doc__, handle.topic) == ("x", "handle", "Return the event.", "first")
    timebell.run(timebell.app.schedule_in("second", 1))
    timebell.advance(seconds=2)
    timebell.assert_fired("second", 1)


def test_a_handler_of_a_pattern_creates_no_jobs(timebell: Kit) -> None:
    @timebell.app.on("billing.*")
    def observe(event: Arrived) -> None: ...

    with pytest.raises(InvalidInput, match="not one topic"):
        timebell.run(observe.schedule_in(1))


def test_a_handler_has_blocking_methods(tmp_path: object) -> None:
    app = Timebell(f"sqlite:///{tmp_path}/bell.db", timezone=ZoneInfo("Asia/Seoul"))

    @app.on("reminders.send")
    def remind(event: Arrived[Reminder]) -> None: ...

    job = remind.sync.schedule_in("1h", Reminder(7), key="k")
    assert (job.topic, job.payload, job.key, job.timezone) == ("reminders.send", {"user_id": 7}, "k", "Asia/Seoul")
    assert job.run_at - job.created_at == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=5))
    app.sync.close()


def test_unknown_options_of_running_are_refused() -> None:
    with pytest.raises(InvalidInput, match="running has no option slotz"):
        asyncio.run(Timebell().running(slotz=5).__aenter__())  # type: ignore[call-arg]
