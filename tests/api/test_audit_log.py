"""The audit log over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_the_audit_log_is_visible_to_the_admins_of_its_tenant(make: Make) -> None:
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
        assert await actions("?actor=unknown") == []
        first = (await web.get("/audit-log?limit=1", key=ours)).json()
        assert await actions(f"?limit=1&cursor={first['nextCursor']}") == ["schedule.create"]
        record = first["items"][0]
        assert (record["subject"], record["keyId"], record["address"]) == (id_, ours.split("_")[2], "127.0.0.1")
        is_problem(await web.get("/audit-log", key=await web.key("editor", "ours")), 403, "ROLE_TOO_LOW")
        everywhere = await web.key("platform", None)
        assert await actions("?tenant=theirs", everywhere) == ["schedule.create"]
        is_problem(await web.get("/audit-log?from=yesterday", key=ours), 422, "INVALID_INSTANT")
