"""Nodes, the audit log, calendars and the forecast over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.clock import VirtualClock
from timebell.ids import new_id

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_nodes_and_who_leads(make: Make) -> None:
    async with make(open_here=False) as web:
        everywhere, ours = await web.key("platform", None), await web.key("viewer", "acme")

        @web.app.on("mail.send")
        async def send(event: Any) -> None: ...

        assert (await web.get("/nodes", key=ours)).json() == {
            "items": [], "nextCursor": None, "leader": None, "leaderChanges": 0, "leaderships": [],
        }  # fmt: skip
        async with web.app.running():
            while not (found := (await web.get("/nodes", key=everywhere)).json())["leader"]:
                pass
            (node,) = found["items"]
            assert (node["alive"], node["leader"], node["draining"]) == (True, True, False)
            assert node["routes"]["exact"] == ["@http:named", "mail.send"]
            assert found["leader"]["nodeId"] == node["id"]
            assert (found["leader"]["fence"], found["leaderChanges"]) == (1, 1)
            (led,) = found["leaderships"]
            assert (led["node"], led["endedAt"], led["resigned"]) == (node["name"], None, False)
            assert (node["running"], node["slots"]) == (0, 500)
            assert abs(node["clockAheadMs"]) < 5000
            assert (await web.get("/nodes", key=ours)).json()["items"][0]["routes"] is None
            path = f"/nodes/{node['id']}/drain"
            is_problem(await web.post(path, key=await web.key("admin")), 403, "ROLE_TOO_LOW")
            for id_ in ("nothing", new_id(web.app.clock.now())):
                is_problem(await web.post(f"/nodes/{id_}/drain", key=everywhere), 404, "NODE_NOT_FOUND")
            assert (await web.post(path, key=everywhere)).json() == {"id": node["id"], "draining": True}
            assert (await web.get("/nodes", key=everywhere)).json()["items"][0]["draining"] is True


async def test_s83_the_audit_log_is_for_the_admins_of_a_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        id_ = (await web.post("/schedules", NIGHTLY, key=ours)).json()["id"]
        middle = web.app.clock.now()
        await web.post(f"/schedules/{id_}/pause", key=ours)
        await web.post("/schedules", NIGHTLY, key=theirs)

        async def actions(query: str = "", key: str = ours) -> list[str]:
            return [one["action"] for one in (await web.get(f"/audit-log{query}", key=key)).json()["items"]]

        assert await actions() == ["schedule.pause", "schedule.create"]
        assert await actions(key=theirs) == ["schedule.create"]
        at = middle.isoformat().replace("+00:00", "Z")
        assert await actions(f"?from={at}") == ["schedule.pause"]
        assert await actions(f"?to={at}") == ["schedule.create"]
        assert await actions(f"?subject={id_}&action=schedule.pause") == ["schedule.pause"]
        assert await actions("?actor=nobody") == []
        first = (await web.get("/audit-log?limit=1", key=ours)).json()
        assert await actions(f"?limit=1&cursor={first['nextCursor']}") == ["schedule.create"]
        record = first["items"][0]
        assert (record["subject"], record["keyId"], record["address"]) == (id_, ours.split("_")[2], "127.0.0.1")
        is_problem(await web.get("/audit-log", key=await web.key("editor", "ours")), 403, "ROLE_TOO_LOW")
        everywhere = await web.key("platform", None)
        assert await actions("?tenant=theirs", everywhere) == ["schedule.create"]
        is_problem(await web.get("/audit-log?from=yesterday", key=ours), 422, "INVALID_INSTANT")


async def test_calendars_have_versions_and_schedules_follow_them(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, shared, viewer = await web.key("editor", "ours"), await web.key("editor"), await web.key("viewer", "ours")
        days = {"weekend": ["FRI", "SAT"], "holidays": ["2040-01-02"], "years": [2040, 2041]}
        assert (await web.ask("PUT", "/calendars/kr", days, key=shared)).json()["version"] == 1
        assert (await web.get("/calendars/kr", key=viewer)).json()["tenantId"] == "default"
        body = {**NIGHTLY, "calendar": "kr", "roll": "next"}
        assert (await web.post("/schedules", body, key=ours)).status_code == 201
        saved = (await web.ask("PUT", "/calendars/kr", {**days, "holidays": ["2040-01-03"]}, key=ours)).json()
        assert saved == {"name": "kr", "version": 1, "schedules": 1, "setAside": []}
        again = (await web.ask("PUT", "/calendars/kr", days, key=ours)).json()
        assert again == {"name": "kr", "version": 2, "schedules": 1, "setAside": []}
        assert (await web.ask("PUT", "/calendars/kr", days, key=ours)).json()["version"] == 2
        versions = (await web.get("/calendars/kr/versions", key=viewer)).json()["items"]
        assert [(one["version"], one["holidays"], one["tenantId"]) for one in versions] == [
            (2, ["2040-01-02"], "ours"), (1, ["2040-01-03"], "ours"),
        ]  # fmt: skip
        assert (await web.get("/calendars/kr?version=1", key=viewer)).json() == versions[1]
        is_problem(await web.get("/calendars/kr?version=9", key=viewer), 404, "CALENDAR_NOT_FOUND")
        country = (
            await web.ask(
                "PUT", "/calendars/by", {"country": "DE", "subdivision": "BY", "years": [2027, 2028]}, key=shared
            )
        ).json()
        assert country["version"] == 1
        assert "2027-01-06" in (await web.get("/calendars/by", key=viewer)).json()["holidays"]
        page = (await web.get("/calendars?limit=1", key=viewer)).json()
        assert ([one["name"] for one in page["items"]], page["nextCursor"]) == (["by"], "by")
        assert [one["name"] for one in (await web.get("/calendars?cursor=by", key=viewer)).json()["items"]] == ["kr"]
        for wrong in (
            {"country": "XX"},
            {"country": "DE", "weekend": []},
            {"subdivision": "BY"},
            {"holidays": ["2027-13-01"]},
            {"weekend": ["XYZ"]},
        ):
            assert (await web.ask("PUT", "/calendars/x", wrong, key=ours)).status_code == 422, wrong
        is_problem(await web.get("/calendars/x", key=viewer), 404, "CALENDAR_NOT_FOUND")


async def test_forecast_counts_by_the_minute_and_marks_herds(make: Make) -> None:
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
        minutes = {one["at"]: (one["schedules"], one["jobs"], one["herd"]) for one in found["minutes"]}
        assert minutes == {
            "2027-01-04T07:30:00Z": (1, 0, False), "2027-01-04T08:30:00Z": (1, 0, False),
            "2027-01-04T09:00:00Z": (12, 1, True), "2027-01-04T09:30:00Z": (1, 0, False),
        }  # fmt: skip
        assert (found["total"], found["complete"]) == (16, True)
        assert len(next(one for one in found["minutes"] if one["herd"])["names"]) == 5
        is_problem(await web.get("/forecast?to=2027-02-04T10:00:00Z"), 422, "INVALID_RANGE")
        is_problem(await web.get("/forecast?from=2027-01-05T00:00:00Z&to=2027-01-04T00:00:00Z"), 422, "INVALID_RANGE")


async def test_a_forecast_of_too_much_ends_and_says_so(make: Make) -> None:
    async with make() as web:
        await web.post("/schedules", {**NIGHTLY, "name": "often", "cronExpression": "* * * * * *", "timezone": "UTC"})
        now = web.app.clock.now() + timedelta(minutes=1)
        start, end = (at.isoformat().replace("+00:00", "Z") for at in (now, now + timedelta(days=6)))
        found = (await web.get(f"/forecast?from={start}&to={end}")).json()
        assert found["complete"] is False
        assert 200_000 <= found["total"] <= 200_001
