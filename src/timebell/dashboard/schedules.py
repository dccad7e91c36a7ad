"""Pages of schedules: the list with health and next runs, one schedule, and its actions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from timebell.api.schemas import format_utc
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import to_problem
from timebell.dashboard.time_range import parse_local, read_time_range
from timebell.dashboard.views import CurrentView, PageRoute
from timebell.errors import InvalidInput
from timebell.store.schedules import queries

RECENT_RUNS = 28
UPCOMING_FIRES = 6
REVISION_FIELDS = (
    "revision",
    "effectiveAt",
    "summary",
    "changedBy",
)  # of the revision itself, not settings of the schedule

routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/schedules")
async def schedules(
    view: CurrentView, q: str = "", enabled: str = "", sort: str = "name", cursor: str = ""
) -> Response:  # fmt: skip
    """List schedules, filtered by a part of the name or topic and by status."""
    page = await view.get(
        "/schedules", limit=50, recent=RECENT_RUNS, contains=q.strip(), enabled=enabled, sort=sort, cursor=cursor
    )  # fmt: skip
    rows = [record | {"health": health(record)} for record in page["items"]]
    counts = await view.app.store.run(queries.count_schedules, view.caller.tenant_id)
    return view.render(
        "schedules", rows=rows, page=page, q=q, enabled=enabled, sort=sort, active=counts.get(True, 0),
        paused=counts.get(False, 0),
    )  # fmt: skip


@routes.get("/ui/schedules/{id}")
async def schedule(id: str, view: CurrentView, cursor: str = "") -> Response:
    """Show one schedule: recent and next runs, revisions, settings."""
    path = f"/schedules/{quote_segment(id)}"
    record = await view.get(path)
    time_range = read_time_range(view)
    executions, next_runs, revisions = await asyncio.gather(
        view.get(f"{path}/executions", limit=RECENT_RUNS, cursor=cursor, **time_range.parameters),
        view.get(f"{path}/next", count=UPCOMING_FIRES), view.get(f"{path}/revisions"),
    )  # fmt: skip
    items = revisions["items"]
    outcomes = [execution["reason"] or execution["status"] for execution in executions["items"]]
    preview = await view.call_api("POST", "/schedules/preview", revision_body(record["name"], items[0]), count=1)
    return view.render(
        "schedule", 422 if time_range.problem else 200, schedule=record, executions=executions, outcomes=outcomes,
        next_runs=next_runs["items"], time_range=time_range,
        revisions=with_changes(items), health=health(record | {"recent": outcomes}),
        notes=[] if preview.is_error else preview.body["notes"],
    )  # fmt: skip


@routes.post("/ui/schedules/{id}/pause")
async def pause(id: str, view: CurrentView) -> Response:
    """Pause a schedule, optionally with a reason."""
    reason = view.form.get("reason", "").strip()
    await view.change("POST", f"/schedules/{quote_segment(id)}/pause", {"reason": reason} if reason else {})
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "paused")


@routes.post("/ui/schedules/{id}/resume")
async def resume(id: str, view: CurrentView) -> Response:
    """Resume a schedule; with `catchUp`, its catch-up policy applies to the occurrences during the pause."""
    await view.change("POST", f"/schedules/{quote_segment(id)}/resume", {"catchUp": "catchUp" in view.form})
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "resumed")


@routes.post("/ui/schedules/{id}/trigger")
async def trigger(id: str, view: CurrentView) -> Response:
    """Trigger a schedule once, immediately."""
    await view.change("POST", f"/schedules/{quote_segment(id)}/trigger")
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "triggered")


@routes.post("/ui/schedules/{id}/skip-next")
async def skip_next(id: str, view: CurrentView) -> Response:
    """Skip the next run."""
    await view.change("POST", f"/schedules/{quote_segment(id)}/skip-next")
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "skipped")


@routes.post("/ui/schedules/{id}/undo")
async def undo(id: str, view: CurrentView) -> Response:
    """Remove an override, that is a skipped or moved occurrence."""
    response = await view.call_api("DELETE", f"/schedules/{quote_segment(id)}/overrides", at=view.form.get("at", ""))
    view.check_response(response)
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "undone")


@routes.post("/ui/schedules/{id}/revert")
async def revert(id: str, view: CurrentView) -> Response:
    """Restore an earlier revision."""
    number = view.form.get("revision", "")
    await view.change(
        "POST", f"/schedules/{quote_segment(id)}/revert", {"revision": int(number[:9]) if number.isdecimal() else 0}
    )
    return view.redirect(f"/ui/schedules/{quote_segment(id)}", "reverted")


@routes.get("/ui/schedules/{id}/backfill")
async def backfill_page(id: str, view: CurrentView) -> Response:
    """Render the form of a backfill."""
    record = await view.get(f"/schedules/{quote_segment(id)}")
    return view.render("backfill", schedule=record, dry_run=None, problem=None, fields={})


@routes.post("/ui/schedules/{id}/backfill")
async def backfill(id: str, view: CurrentView) -> Response:
    """Ask for confirmation with the occurrences in the range; once confirmed, start the backfill."""
    path, is_confirmed = f"/schedules/{quote_segment(id)}", "sure" in view.form
    record = await view.get(path)
    fields = {name: view.form.get(name, "").strip() for name in ("from", "to", "overlapPolicy")}
    body: dict[str, Any] = {name: text for name, text in fields.items() if text} | {"dryRun": not is_confirmed}
    try:
        for name in ("from", "to"):
            body[name] = format_utc(parse_local(fields[name], record["timezone"], name))
    except InvalidInput as error:
        return view.render(
            "backfill", 400, schedule=record, dry_run=None, problem=to_problem(error), fields=fields
        )  # fmt: skip
    response = await view.call_api("POST", f"{path}/backfill", body)
    if response.is_error:
        return view.render("backfill", 400, schedule=record, dry_run=None, problem=response.body, fields=fields)
    if is_confirmed:
        return view.redirect(f"/ui/schedules/{quote_segment(id)}", "backfilled")
    return view.render("backfill", schedule=record, dry_run=response.body, problem=None, fields=fields)


@routes.get("/ui/schedules/{id}/delete")
async def delete_page(id: str, view: CurrentView) -> Response:
    """Ask for confirmation before a schedule is deleted."""
    return view.render("schedule_delete", schedule=await view.get(f"/schedules/{quote_segment(id)}"))


@routes.post("/ui/schedules/{id}/delete")
async def delete(id: str, view: CurrentView) -> Response:
    """Delete a schedule, unless it has changed since it was displayed."""
    await view.change("DELETE", f"/schedules/{quote_segment(id)}", if_match=view.form.get("etag", ""))
    return view.redirect("/ui/schedules", "deleted")


def health(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the CSS class and label of a schedule's health."""
    last = (record.get("recent") or [None])[0]
    if record["error"]:
        return "bad", "Errored"
    if not record["enabled"]:
        return "paused", "Paused"
    if record.get("warnings"):
        return "bad", "Unhandled"
    if last == "failed":
        return "bad", "Failing"
    if last in ("missed", "expired"):
        return "missed", "Missed"
    if not record["nextFireAt"]:
        return "skip", "Ended"
    return ("ok", "Healthy") if last else ("wait", "Not run yet")


def revision_body(name: str, revision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request body that creates a schedule as of a revision."""
    return {"name": name, **{field: value for field, value in revision.items() if field not in REVISION_FIELDS}}


def with_changes(revisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each revision the fields that it changed (`changed`). The order is newest first."""
    previous_revisions = [*revisions[1:], {}]
    return [
        {**revision, "changed": changed_fields(previous, revision) if previous else []}
        for revision, previous in zip(revisions, previous_revisions, strict=True)
    ]


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the fields that differ between two revisions: (name, old value, new value)."""
    names = [name for name in {**old, **new} if name not in REVISION_FIELDS]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
