"""The forecast over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from timebell.api import forecast
from timebell.clock import VirtualClock

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_the_forecast_counts_runs_per_minute_and_marks_herds(make: Make) -> None:
    start = datetime(2027, 1, 4, 6, tzinfo=UTC)
    async with make(clock=VirtualClock(start)) as web:
        web.app.clock.step((start - web.app.clock.now()).total_seconds())
        for number in range(12):
            await web.post(
                "/schedules", {**NIGHTLY, "name": f"n{number}", "timezone": "UTC", "cronExpression": "0 9 * * *"}
            )
        hourly = (
            await web.post(
                "/schedules", {**NIGHTLY, "name": "hourly", "timezone": "UTC", "cronExpression": "30 * * * *"}
            )
        ).json()
        paused = (
            await web.post(
                "/schedules", {**NIGHTLY, "name": "paused", "timezone": "UTC", "cronExpression": "* * * * *"}
            )
        ).json()
        await web.post(f"/schedules/{paused['id']}/pause")
        await web.post(f"/schedules/{hourly['id']}/skip-next")
        await web.app.schedule_at("one.shot", start + timedelta(hours=3, seconds=20))
        await web.app.schedule_at("one.shot", start + timedelta(hours=3, seconds=20), tenant_id="other")
        found = (await web.get("/forecast?to=2027-01-04T10:00:00Z")).json()
        minutes = {one["at"]: (one["schedules"], one["jobs"], one["peak"]) for one in found["minutes"]}
        assert minutes == {
            "2027-01-04T07:30:00Z": (1, 0, False), "2027-01-04T08:30:00Z": (1, 0, False),
            "2027-01-04T09:00:00Z": (12, 1, True), "2027-01-04T09:30:00Z": (1, 0, False),
        }  # fmt: skip
        assert (found["total"], found["complete"]) == (16, True)
        assert len(next(one for one in found["minutes"] if one["peak"])["names"]) == 5
        is_problem(await web.get("/forecast?to=2027-02-04T10:00:00Z"), 422, "INVALID_RANGE")
        is_problem(await web.get("/forecast?from=2027-01-05T00:00:00Z&to=2027-01-04T00:00:00Z"), 422, "INVALID_RANGE")


async def test_a_large_forecast_is_marked_incomplete(make: Make) -> None:
    async with make() as web:
        await web.post("/schedules", {**NIGHTLY, "name": "often", "cronExpression": "* * * * * *", "timezone": "UTC"})
        now = web.app.clock.now() + timedelta(minutes=1)
        start, end = (at.isoformat().replace("+00:00", "Z") for at in (now, now + timedelta(days=6)))
        found = (await web.get(f"/forecast?from={start}&to={end}")).json()
        assert found["complete"] is False
        assert 200_000 <= found["total"] <= 200_001


async def test_counting_jobs_ends_after_a_limit_and_reports_until_when(make: Make) -> None:
    start = datetime(2027, 1, 4, 6, tzinfo=UTC)
    async with make(clock=VirtualClock(start)) as web:
        web.app.clock.step((start - web.app.clock.now()).total_seconds())
        for n in range(1, 7):
            await web.app.schedule_at("one.shot", start + timedelta(hours=3 * n))
        with patch.object(forecast, "MAX_SCANNED_JOBS", 2):
            found = (await web.get("/forecast")).json()
        counted_until = datetime.fromisoformat(found["jobsCountedUntil"])
        assert (round((counted_until - start) / timedelta(hours=1)), found["total"], found["complete"]) == (8, 2, False)
        assert (await web.get("/forecast")).json().items() >= {"total": 6, "complete": True}.items()


async def test_upcoming_lists_each_schedule_once_soonest_first(make: Make) -> None:
    start = datetime(2027, 1, 4, 6, tzinfo=UTC)
    async with make(clock=VirtualClock(start)) as web:
        web.app.clock.step((start - web.app.clock.now()).total_seconds())
        for name, cron in (("poll", "* * * * *"), ("nightly", "10 10 * * *"), ("later", "0 9 * * *")):
            body = {"name": name, "cronExpression": cron, "timezone": "UTC", "topic": f"t.{name}"}
            assert (await web.post("/schedules", body)).status_code == 201
        found = (await web.get("/forecast/upcoming")).json()
        listed = [(item["name"], item["runs"]) for item in found["items"]]
        assert found["complete"]
        assert sorted(listed) == [("later", 1), ("nightly", 1), ("poll", 1440)]
        assert listed[0][0] == "poll"
        assert [item["nextAt"] for item in found["items"]] == sorted(item["nextAt"] for item in found["items"])
        assert not (await web.get("/forecast/upcoming?limit=2")).json()["complete"]
        is_problem(await web.get("/forecast/upcoming?to=2020-01-01T00:00:00Z"), 422, "INVALID_RANGE")
