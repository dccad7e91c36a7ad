"""Campaigns: how far, how fast, who was left out; and what may be done with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import part
from timebell.dashboard.overview_data import LATELY, Now
from timebell.dashboard.views import Page, See, View

STATES = {
    "pending": ("wait", "Planned"), "running": ("run", "Sending"), "paused": ("paused", "Paused"),
    "stopped": ("skip", "Stopped"), "completed": ("ok", "Sent"),
}  # fmt: skip
GATES = ("approval", "ceiling", "change", "canary")  # what the reason of a pause begins with where a gate stopped it
FATES = {
    "": "All", "accepted": "Accepted", "refused": "Refused", "unknown": "Not known", "unsent": "Not reached",
    "sending": "On the way", "left": "Not sent to",
}  # fmt: skip
PROVIDER = "FCM takes 600,000 a minute, unless the project has more"
routes = APIRouter(route_class=Page)


@routes.get("/ui/campaigns")
async def campaigns(view: See, state: str = "", cursor: str = "") -> Response:
    """A page of them, newest first."""
    found = await view.get("/campaigns", limit=50, cursor=cursor, state=state)
    return view.page("campaigns", found=found, state=state, states=STATES, look=look)


@routes.get("/ui/campaigns/{id}")
async def campaign(id: str, view: See) -> Response:
    """One: its progress (alone, for htmx), its message and its timetable."""
    one = await view.get(f"/campaigns/{part(id)}")
    facts = {"one": one, "state": look(one), "gated": gated(one), "far": await far(view, one)}
    if view.partial:
        return view.page("_campaign", **facts)
    request = (await view.get(f"/campaigns/{part(id)}/preview"))["request"]
    return view.page("campaign", **facts, request=request)


@routes.get("/ui/campaigns/{id}/timetable")
async def timetable(id: str, view: See) -> Response:
    """When each zone is sent to, and who is left out: apart, as all of the audience has to be counted."""
    one = await view.get(f"/campaigns/{part(id)}")
    return view.page("campaign_timetable", one=one, plan=await view.get(f"/campaigns/{part(id)}/timetable"))


@routes.get("/ui/campaigns/{id}/people")
async def people(id: str, view: See, state: str = "", cursor: str = "") -> Response:
    """Who it was sent to and what became of it, or who it was not sent to."""
    one = await view.get(f"/campaigns/{part(id)}")
    which = {} if state == "left" else {"state": state}
    path = f"/campaigns/{part(id)}/{'left' if state == 'left' else 'deliveries'}"
    found = await view.get(path, limit=50, cursor=cursor, **which)
    return view.page("campaign_people", one=one, found=found, state=state, fates=FATES)


@routes.get("/ui/campaigns/{id}/stop")
async def stop_page(id: str, view: See) -> Response:
    """Whether really."""
    one = await view.get(f"/campaigns/{part(id)}")
    return view.page("campaign_stop", one=one, far=await far(view, one))


@routes.post("/ui/campaigns/{id}/test")
async def test(id: str, view: See) -> Response:
    """Send it to some devices alone, and look at that job."""
    given = re.split(r"[\s,]+", view.form.get("devices", "").strip())
    kind = "userIds" if view.form.get("kind") == "users" else "tokens"
    told = await view.send("POST", f"/campaigns/{part(id)}/test", {kind: [one for one in given if one]})
    return view.back(f"/ui/jobs/{part(told['jobId'])}", "tested")


DONE = {
    "start": "started", "pause": "pausing", "resume": "sending", "approve": "approved", "stop": "stopping",
    "retry": "retrying",
}  # fmt: skip


@routes.post("/ui/campaigns/{id}/{verb}")
async def steer(id: str, verb: str, view: See) -> Response:
    """Start, pause, resume, approve, stop, or send to those who were not reached."""
    reason = view.form.get("reason", "").strip()
    body: dict[str, Any] | None = None
    if verb in ("pause", "stop"):
        body = {"reason": reason} if reason else {}
    if verb == "retry":
        body = {"unknown": "unknown" in view.form}
    await view.send("POST", f"/campaigns/{part(id)}/{part(verb)}", body)
    return view.back(f"/ui/campaigns/{part(id)}", DONE.get(verb, ""))


def gated(one: Mapping[str, Any]) -> bool:
    """Whether a gate stopped it, so that somebody has to approve."""
    return one["state"] == "paused" and str(one["reason"] or "").split(":")[0] in GATES


def look(one: Mapping[str, Any]) -> tuple[str, str]:
    """Colour and word for a campaign."""
    return ("retry", "Waits for approval") if gated(one) else STATES[one["state"]]


async def far(view: View, one: Mapping[str, Any]) -> dict[str, Any]:
    """How far it is: of how many (`all`), how many are dealt with (`past`), how fast a second, and the squares."""
    now: Now = view.request.app.state.now
    seen = await now.campaign(view.caller.tenant_id, one["id"])
    counts = one["counts"]
    past = one["opened"] - counts.get("pending", 0)
    total = one["opened"] if one["state"] == "completed" else max(seen.meant, one["opened"], one["expected"] or 0)
    rate = seen.map.lately / LATELY if one["state"] == "running" else 0.0
    chunks = max(-(-total // one["chunkSize"]), sum(cell.chunks for cell in seen.map.cells))
    return {
        "all": total, "past": past, "left": max(0, total - one["opened"]), "rate": rate, "map": seen.map,
        "chunks": chunks, "rest": max(0, -(-chunks // seen.map.per) - len(seen.map.cells)),
        "seconds": timedelta(seconds=round((total - past) / rate)) if rate else None, "limit": limit(one),
    }  # fmt: skip


def limit(one: Mapping[str, Any]) -> str:
    """What it can be no faster than."""
    pause = one["chunkDelayMs"]
    if not isinstance(pause, int) or not pause:
        return PROVIDER
    rate = 1000 * one["chunkSize"] / pause
    pace = f"{rate:,.0f} a second" if rate >= 1 else f"{60 * rate:,.0f} a minute"
    return f"held to {pace}: {one['chunkSize']:,} every {pause / 1000:g} s"
