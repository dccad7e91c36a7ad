"""The typed samples do what their articles promise."""

from __future__ import annotations

from datetime import timedelta

import pytest

from timebell.testing.kit import Kit

from . import ported_samples as samples


@pytest.fixture
def kit(timebell: Kit) -> Kit:
    timebell.freeze("2027-03-01T12:00Z")  # a Monday
    timebell.use(samples.app)
    samples.fired.clear()
    return timebell


def test_the_library(kit: Kit) -> None:
    service, run = samples.ReminderService(samples.app), kit.run
    job = run(service.schedule_task_reminder("ana", kit.now + timedelta(hours=1)))
    beat, poll = run(service.beat("agent-xyz")), run(service.poll())
    assert (beat.timezone, poll.timezone) == ("America/Mexico_City", "UTC")
    new = run(service.postpone(job.id, kit.now + timedelta(hours=2)))
    assert (run(samples.app.get(job.id)).replaced_by, new.replaces) == (new.id, job.id)
    assert [open_job.id for open_job in run(service.open_jobs("ana"))] == [new.id]
    kit.advance(hours=4)
    assert samples.fired == [
        "ana in America/Mexico_City: Your task is due now", "ai.agent-heartbeat c-1 at 09:00",
    ]  # fmt: skip
    done = run(samples.app.get(new.id))
    assert (done.state, done.result) == ("completed", "schedule.notifications.task-reminder.arrived")
    assert run(samples.app.cancel(new.id)).outcome == "already_done"
    unpaused = run(samples.app.schedules.resume(poll.id))
    assert unpaused.enabled


def test_the_service(kit: Kit) -> None:
    kit.outage("2027-04-01T00:00Z", "2027-04-01T12:00Z")
    runs = kit.advance(days=32).of("monthly-billing")
    assert runs.outcomes == ["completed"]
    assert runs[0].scheduled_at.isoformat() == "2027-04-01T06:00:00+00:00"  # 02:00 in New York
    assert f"{runs[0].fired_at:%H}" == "12"  # after the outage


def test_the_trigger(kit: Kit) -> None:
    first = kit.run(samples.set_fire_at("c1", "item-7", kit.now + timedelta(hours=1)))
    second = kit.run(samples.set_fire_at("c1", "item-7", kit.now + timedelta(hours=3)))
    assert second.replaces == first.id
    kit.advance(hours=4)
    assert samples.fired == ["item-7 at 15:00"]


def test_the_reminders(kit: Kit) -> None:
    shifts = [
        samples.Shift(n, user, kit.now + timedelta(hours=1), kit.now + timedelta(hours=9))
        for n, user in enumerate(("ana", "bo"))
    ]
    samples.checked_in = {1}
    for shift in [*shifts, *shifts]:  # found twice
        kit.run(samples.remind(shift))
    kit.advance(hours=10)
    assert samples.fired == [
        "ana: your shift starts in 15 minutes", "ana: your shift has ended", "bo: your shift has ended",
    ]  # fmt: skip
