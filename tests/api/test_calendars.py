"""Calendars over HTTP: versions, and the schedules that follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_calendars_have_versions_and_schedules_follow_them(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, shared, viewer = await web.key("editor", "ours"), await web.key("editor"), await web.key("viewer", "ours")
        days = {"weekend": ["FRI", "SAT"], "holidays": ["2040-01-02"], "years": [2040, 2041]}
        assert (await web.ask("PUT", "/calendars/kr", days, key=shared)).json()["version"] == 1
        assert (await web.get("/calendars/kr", key=viewer)).json()["tenantId"] == "default"
        body = {**NIGHTLY, "calendar": "kr", "roll": "next"}
        assert (await web.post("/schedules", body, key=ours)).status_code == 201
        saved = (await web.ask("PUT", "/calendars/kr", {**days, "holidays": ["2040-01-03"]}, key=ours)).json()
        assert saved == {"name": "kr", "version": 1, "schedules": 1, "errored": []}
        again = (await web.ask("PUT", "/calendars/kr", days, key=ours)).json()
        assert again == {"name": "kr", "version": 2, "schedules": 1, "errored": []}
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
