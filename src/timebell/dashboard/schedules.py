"""Schedules: which are healthy, when each fires next, with which rules; and what can be done to one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import part
from timebell.dashboard.views import Page, See

RECENT = 28
FIRES = 6

routes = APIRouter(route_class=Page)


@routes.get("/ui/schedules")
async def schedules(view: See, q: str = "", enabled: str = "", cursor: str = "") -> Response:
    """A page of them."""
    found = await view.get(
        "/schedules", limit=50, recent=RECENT, contains=q.strip(), enabled=enabled, cursor=cursor
    )  # fmt: skip
    rows = [one | {"health": health(one)} for one in found["items"]]
    return view.page("schedules", rows=rows, found=found, q=q, enabled=enabled)


@routes.get("/ui/schedules/{id}")
async def schedule(id: str, view: See, cursor: str = "") -> Response:
    """One, with what ran, what comes and all that is set."""
    path = f"/schedules/{part(id)}"
    one = await view.get(path)
    ran, comes, revisions = await asyncio.gather(
        view.get(f"{path}/executions", limit=RECENT, cursor=cursor), view.get(f"{path}/next", count=FIRES),
        view.get(f"{path}/revisions"),
    )  # fmt: skip
    items = revisions["items"]
    outcomes = [each["reason"] or each["status"] for each in ran["items"]]
    notes = await view.ask("POST", "/schedules/preview", body_of_revision(one["name"], items[0]), count=1)
    return view.page(
        "schedule", one=one, ran=ran, comes=comes["items"], revisions=changes(items), health=health(
            one | {"recent": outcomes}), outcomes=outcomes,
        notes=[] if notes.refused else notes.body["notes"], cursor=cursor,
    )  # fmt: skip


@routes.post("/ui/schedules/{id}/pause")
async def pause(id: str, view: See) -> Response:
    """Pause it, with a reason."""
    reason = view.form.get("reason", "").strip()
    await view.send("POST", f"/schedules/{part(id)}/pause", {"reason": reason} if reason else {})
    return view.back(f"/ui/schedules/{part(id)}", "paused")


@routes.post("/ui/schedules/{id}/resume")
async def resume(id: str, view: See) -> Response:
    """Resume it; with `catchUp`, what the pause left out is decided by its catch-up."""
    await view.send("POST", f"/schedules/{part(id)}/resume", {"catchUp": "catchUp" in view.form})
    return view.back(f"/ui/schedules/{part(id)}", "resumed")


@routes.post("/ui/schedules/{id}/trigger")
async def trigger(id: str, view: See) -> Response:
    """Fire it once, now."""
    await view.send("POST", f"/schedules/{part(id)}/trigger")
    return view.back(f"/ui/schedules/{part(id)}", "triggered")


@routes.post("/ui/schedules/{id}/skip-next")
async def skip_next(id: str, view: See) -> Response:
    """Leave out the next fire."""
    await view.send("POST", f"/schedules/{part(id)}/skip-next")
    return view.back(f"/ui/schedules/{part(id)}", "skipped")


@routes.post("/ui/schedules/{id}/undo")
async def undo(id: str, view: See) -> Response:
    """Take a skip or a move back."""
    answer = await view.ask("DELETE", f"/schedules/{part(id)}/overrides", at=view.form.get("at", ""))
    view.good(answer)
    return view.back(f"/ui/schedules/{part(id)}", "undone")


@routes.post("/ui/schedules/{id}/revert")
async def revert(id: str, view: See) -> Response:
    """Make it what it was at a revision."""
    number = view.form.get("revision", "")
    await view.send("POST", f"/schedules/{part(id)}/revert", {"revision": int(number[:9]) if number.isdecimal() else 0})
    return view.back(f"/ui/schedules/{part(id)}", "reverted")


@routes.get("/ui/schedules/{id}/backfill")
async def backfill_page(id: str, view: See) -> Response:
    """Which range."""
    one = await view.get(f"/schedules/{part(id)}")
    return view.page("backfill", one=one, dry=None, problem=None, given={})


@routes.post("/ui/schedules/{id}/backfill")
async def backfill(id: str, view: See) -> Response:
    """First how many those are, then they."""
    path, sure = f"/schedules/{part(id)}", "sure" in view.form
    one = await view.get(path)
    given = {name: view.form.get(name, "").strip() for name in ("from", "to", "overlapPolicy")}
    body = {name: text for name, text in given.items() if text} | {"dryRun": not sure}
    answer = await view.ask("POST", f"{path}/backfill", body)
    if answer.refused:
        return view.page("backfill", 400, one=one, dry=None, problem=answer.body, given=given)
    if sure:
        return view.back(f"/ui/schedules/{part(id)}", "backfilled")
    return view.page("backfill", one=one, dry=answer.body, problem=None, given=given)


@routes.get("/ui/schedules/{id}/delete")
async def delete_page(id: str, view: See) -> Response:
    """Whether really."""
    return view.page("delete", one=await view.get(f"/schedules/{part(id)}"))


@routes.post("/ui/schedules/{id}/delete")
async def delete(id: str, view: See) -> Response:
    """Forget it, at the revision that was looked at."""
    await view.send("DELETE", f"/schedules/{part(id)}", if_match=f'"{view.form.get("revision", "")}"')
    return view.back("/ui/schedules", "deleted")


def health(one: Mapping[str, Any]) -> tuple[str, str]:
    """Colour and word for a schedule."""
    last = (one.get("recent") or [None])[0]
    if one["fault"]:
        return "bad", "Set aside"
    if not one["enabled"]:
        return "paused", "Paused"
    if last == "failed":
        return "bad", "Failing"
    if last in ("missed", "expired"):
        return "missed", "Missed"
    return ("ok", "Healthy") if one["nextFireAt"] else ("skip", "Ended")


def body_of_revision(name: str, revision: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a schedule what it was at a revision."""
    told = ("revision", "effectiveAt", "summary")
    return {"name": name, **{field: value for field, value in revision.items() if field not in told}}


def changes(revisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Revisions, newest first, each with what was other than before."""
    before = [*revisions[1:], {}]
    return [
        {**one, "changed": differences(old, one) if old else []} for one, old in zip(revisions, before, strict=True)
    ]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields that differ: (name, before, now)."""
    left = ("revision", "effectiveAt", "summary")
    names = [name for name in {**old, **new} if name not in left]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
