"""`/audit` and `/schedules/{id}/why`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell import Every
from timebell.api import audit
from timebell.clock import VirtualClock
from timebell.model.planned_job import build_job
from timebell.recurrence.instants import format_instant
from timebell.store.schedules import schedules

START = datetime(2027, 3, 1, tzinfo=UTC)


class Hour:
    """An hour on a virtual clock, and a schedule that fires every ten minutes."""

    def __init__(self) -> None:
        self.clock = VirtualClock(START)
        self.began = self.clock.now()

    def at(self, minutes: float) -> str:
        return format_instant(self.began + timedelta(minutes=minutes))

    @property
    def query(self) -> str:
        return f"/audit?from={self.at(0)}&to={self.at(60)}"

    async def make(self, web: Any, **options: Any) -> Any:
        every = Every("PT10M", self.began)
        return await web.app.schedule_repeat("t", every, name="ten", timezone="UTC", overlap="allow", **options)

    def set(self, minutes: float) -> None:
        self.clock.step((self.began + timedelta(minutes=minutes) - self.clock.now()).total_seconds())


async def test_an_audit_and_the_explanation_of_an_occurrence(make: Callable[..., Any]) -> None:
    hour = Hour()
    async with make(clock=hour.clock) as web:
        created = await hour.make(web)
        hour.set(30)
        await web.app.store.run(schedules.fire_due_schedules, build_job, hour.clock.now(), 10)
        hour.set(35)
        found = (await web.get(f"{hour.query}&schedule=ten")).json()
        audit.AuditReport.model_validate(found)
        assert (found["differences"], found["found"], found["more"]) == ([], {}, False)
        assert (found["counts"]["expected"], found["skipped"]) == (3, {"coalesced": 2})
        assert found["from"] == hour.at(0) and hour.at(35) <= found["to"] < hour.at(36)  # the end is now

        hour.set(45)
        (missing,) = (await web.get(hour.query)).json()["differences"]
        assert (missing["finding"], missing["at"], missing["schedule"]) == ("missing", hour.at(40), "ten")

        why = (await web.get(f"/schedules/{created.id}/why?at={hour.at(10)}")).json()
        audit.OccurrenceExplanation.model_validate(why)
        assert (why["outcome"], why["occurrence"], why["revision"]) == ("coalesced", True, 1)
        assert why["after"] == hour.at(20)
        assert any("skipped (coalesced)" in sentence for sentence in why["sentences"])


async def test_invalid_audit_ranges_are_refused(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hour = Hour()
    async with make(clock=hour.clock) as web:
        await hour.make(web)
        hour.set(120)
        for path, status, code in (
            (f"/audit?from={hour.at(-50_000)}&to={hour.at(60)}", 422, "AUDIT_TOO_OLD"),
            (f"/audit?from={hour.at(60)}&to={hour.at(0)}", 422, "INVALID_RANGE"),
            (f"/audit?from={hour.at(0).rstrip('Z')}&to={hour.at(60)}", 422, "INVALID_INSTANT"),
            (f"{hour.query}&schedule=none", 404, "SCHEDULE_NOT_FOUND"),
            (f"/schedules/none/why?at={hour.at(10)}", 404, "SCHEDULE_NOT_FOUND"),
        ):
            answer = await web.get(path)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
        monkeypatch.setattr(audit, "MAX_OCCURRENCES", 4)
        answer = await web.get(hour.query)
        assert (answer.status_code, answer.json()["code"]) == (422, "AUDIT_TOO_LARGE")


async def test_a_tenant_audits_only_its_own_schedules(make: Callable[..., Any]) -> None:
    hour = Hour()
    async with make(clock=hour.clock, open_here=False) as web:
        created = await hour.make(web, tenant_id="acme")
        theirs, ours = await web.key("viewer", "acme"), await web.key("viewer", "default")
        hour.set(120)
        assert (await web.get(hour.query, key=theirs)).json()["found"] == {"missing": 1}
        assert (await web.get(hour.query, key=ours)).json()["found"] == {}
        for path in (f"{hour.query}&schedule={created.id}", f"/schedules/{created.id}/why?at={hour.at(10)}"):
            assert (await web.get(path, key=ours)).status_code == 404
            assert (await web.get(path, key=theirs)).status_code == 200
