"""Typed uses of the library, checked by strict mypy in `make check` and never run."""

from __future__ import annotations

from typing import Any, assert_type

from pydantic import BaseModel

from timebell import Arrived, Every, JobSpec, Snooze, Timebell
from timebell.model.job import Job
from timebell.model.page import Page
from timebell.model.schedule import Schedule
from timebell.store.jobs.repository import CancelResult


class Reminder(BaseModel):
    user_id: int


def use(app: Timebell) -> None:
    """Blocking methods have the types of the asynchronous ones."""
    job = app.sync.schedule_at("t", payload=Reminder(user_id=1), key="k")
    assert_type(job, Job)
    assert_type(app.sync.schedule_many([JobSpec(topic="t")]), list[Job])
    assert_type(app.sync.schedule_repeat("t", Every("PT1H")), Schedule)
    assert_type(app.sync.cancel(job.id), CancelResult)
    assert_type(app.sync.list(owner_id="ana"), Page[Job])
    assert_type(app.sync.schedules.pause("id", "lunch"), Schedule)
    app.sync.get()  # type: ignore[call-arg]
    app.sync.cancel(job.id, colour="red")  # type: ignore[call-arg]
    app.sync.list(limit="10")  # type: ignore[arg-type]


def handlers(app: Timebell, reminder: Arrived[Reminder]) -> None:
    """A payload has the type of the handler's annotation; `Arrived` without parameter is complete."""

    @app.on("plain")
    async def plain(event: Arrived) -> None:
        assert_type(event.payload, Any)

    @app.on("typed", version=2, upgrade={1: dict}, executor="process")
    def typed(event: Arrived[Reminder]) -> int:
        assert_type(event.payload, Reminder)
        return event.payload.user_id

    assert_type(typed(reminder), int)
    assert_type(typed.sync.schedule_in("15m", Reminder(user_id=1)), Job)
    assert_type(typed.sync.schedule_repeat(Every(60), Reminder(user_id=1), name="n"), Schedule)

    @app.on("later")
    def later(event: Arrived) -> None:
        app.sync.targets.rotate_secret("crm", overlap="24h")
        app.sync.connections.put("board", "token", expires_in="1h")
        raise Snooze("30s")

    @app.on("wrong")  # type: ignore[arg-type]
    async def wrong(number: int) -> None: ...
