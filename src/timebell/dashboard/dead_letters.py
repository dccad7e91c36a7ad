"""Dead letters: what broke, how much, is it safe to replay?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import part
from timebell.dashboard.views import Page, See, View
from timebell.store.audit import overview as rows

FILTERS = {"topic": "topic", "errorCode": "errorCode", "scheduleId": "scheduleId"}
DONE = {"replay": "replaying", "discard": "discarding"}
routes = APIRouter(route_class=Page)


@routes.get("/ui/dead-letters")
async def dead_letters(
    view: See, topic: str = "", errorCode: str = "", scheduleId: str = "", by: str = "error", cursor: str = ""  # noqa: N803 - as in the URL
) -> Response:  # fmt: skip
    """Grouped by what went wrong, or those of a group; and the replays that run."""
    chosen = {"topic": topic, "errorCode": errorCode, "scheduleId": scheduleId}
    groups = await view.get("/dead-letters", groupBy="topic" if by == "topic" else "error", limit=50, **chosen)
    single = any(chosen.values())
    found = await view.get("/dead-letters", limit=50, cursor=cursor, **chosen) if single else None
    running = (await view.get("/operations", limit=10))["items"]
    shown = [group["latest"] for group in groups["items"]] + (found["items"] if found else [])
    names, again = await view.app.store.run(
        rows.about, view.caller.tenant_id, {job["id"] for job in shown},
        {job["scheduleId"] for job in shown if job["scheduleId"]},
    )  # fmt: skip
    return view.page(
        "dead_letters", groups=groups, by=by, found=found, chosen={k: v for k, v in chosen.items() if v}, names=names,
        again=again, operations=[one for one in running if one["kind"] in ("replay", "discard")][:5],
    )  # fmt: skip


@routes.get("/ui/operations/{id}")
async def operation(id: str, view: See) -> Response:
    """How far one is."""
    return view.page("operation", one=await view.get(f"/operations/{part(id)}"))


@routes.post("/ui/operations/{id}/cancel")
async def stop(id: str, view: See) -> Response:
    """Go no further with it."""
    told = await view.send("POST", f"/operations/{part(id)}/cancel")
    return view.back("/ui/triggers" if told["kind"] == "scan" else "/ui/dead-letters", "stopped")


@routes.post("/ui/dead-letters/replay")
async def replay(view: See) -> Response:
    """First how many, then they, at a rate."""
    return await _operate(view, "replay")


@routes.post("/ui/dead-letters/discard")
async def discard(view: See) -> Response:
    """First how many, then they."""
    return await _operate(view, "discard")


async def _operate(view: View, what: str) -> Response:
    chosen = {name: view.form[name] for name in FILTERS if view.form.get(name)}
    rate, sure = view.form.get("rate", "").strip(), "sure" in view.form
    body: dict[str, Any] = {"filter": chosen, "dryRun": not sure}
    if what == "replay" and rate:
        try:
            body["rate"] = float(rate)
        except ValueError:
            body["rate"] = rate
    answer = view.good(await view.ask("POST", f"/dead-letters/{what}", body)).body
    if sure:
        return view.back(f"/ui/operations/{answer['id']}", DONE[what])
    return view.page("dead_sure", what=what, count=answer["count"], chosen=chosen, rate=rate)


@routes.post("/ui/backlogs/{what}")
async def backlogs(what: str, view: See) -> Response:
    """What an outage left: let it run, or rest."""
    chosen = "release" if what == "release" else "discard"
    await view.send("POST", f"/backlogs/{chosen}", {})
    return view.back("/ui/", "released" if chosen == "release" else "discarded")
