"""Backlogs after an outage: listed, released and discarded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import update

from timebell.model.planned_job import build_job
from timebell.store import schema
from timebell.store.schedules import schedules

from .web import NIGHTLY, Web, is_problem

Make = Callable[..., Any]
ALL = {"policy": "all", "holdAbove": 2, "window": "24h"}


async def outage(web: Web, *names: str, **fields: Any) -> list[str]:
    """Create schedules that fire every minute, simulate minutes without a node, and return their ids."""
    created = []
    for name in names:
        body = {**NIGHTLY, "name": name, "cronExpression": "* * * * *", "catchUp": ALL, **fields}
        answer = await web.post("/schedules", body)
        assert answer.status_code == 201, answer.text
        created.append(answer.json()["id"])
    now = web.app.clock.now()
    since = update(schema.schedules).values(next_fire_at=now.replace(second=0, microsecond=0) - timedelta(minutes=7))
    await web.app.store.run(lambda tx: tx.execute(since) and None)
    await web.app.store.run(schedules.fire_due_schedules, build_job, now, 500)
    return created


async def holds(web: Web, id_: str) -> list[tuple[str, str | None]]:
    rows = (await web.get(f"/jobs?scheduleId={id_}&limit=100")).json()["items"]
    return sorted((row["status"], row.get("hold")) for row in rows)


async def test_a_backlog_is_listed_released_and_discarded(make: Make) -> None:
    async with make() as web:
        one, two = await outage(web, "one", "two", overlapPolicy="allow")
        found = (await web.get("/backlogs")).json()["items"]
        assert {item["scheduleId"] for item in found} == {one, two}
        count = found[0]["jobs"]
        assert count > 2
        summaries = sorted((item["schedule"], item["topic"], item["jobs"]) for item in found)
        assert summaries == [("one", "report.build", count), ("two", "report.build", count)]
        assert all(item["firstAt"] < item["lastAt"] for item in found)
        assert (await web.post("/backlogs/release", {"scheduleId": one})).json() == {"jobs": count}
        assert all(hold is None for _, hold in await holds(web, one))
        assert [item["scheduleId"] for item in (await web.get("/backlogs")).json()["items"]] == [two]
        assert (await web.post("/backlogs/discard")).json() == {"jobs": count}
        ended = (await web.get(f"/schedules/{two}/executions?status=cancelled")).json()["items"]
        assert [row["reason"] for row in ended] == ["discarded"] * count
        assert (await web.get("/backlogs")).json()["items"] == []
        assert (await web.post("/backlogs/release")).json() == {"jobs": 0}
        log = (await web.get("/audit-log")).json()["items"]
        assert {(row["action"], row["subject"]) for row in log} >= {
            ("backlogs.release", one),
            ("backlogs.discard", "*"),
        }


async def test_an_unknown_schedule_releases_nothing(make: Make) -> None:
    async with make() as web:
        await outage(web, "one")
        for id_ in ("one", "0190a000-0000-7000-8000-000000000000"):
            is_problem(await web.post("/backlogs/release", {"scheduleId": id_}), 404, "SCHEDULE_NOT_FOUND")
        assert len((await web.get("/backlogs")).json()["items"]) == 1


async def test_releasing_requires_the_operator_role(make: Make) -> None:
    async with make(open_here=False) as web:
        viewer = await web.key("viewer")
        is_problem(await web.post("/backlogs/release", key=viewer), 403, "ROLE_TOO_LOW")
        assert (await web.get("/backlogs", key=viewer)).json()["items"] == []
