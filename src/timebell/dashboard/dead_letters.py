"""Pages of dead letters: groups by error or topic, retry and discard with confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.store.audit import overview as rows

FILTER_FIELDS = ("topic", "errorCode", "errorGroup", "scheduleId", "from", "to")
CANCEL_FIELDS = ("topic", "ownerId", "scheduleId", "key", "queue")
DONE_MESSAGES = {"retry": "retry-started", "discard": "discarding", "cancel": "cancelling"}
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/dead-letters")
async def dead_letters(
    view: CurrentView, topic: str = "", error_code: Annotated[str, Query(alias="errorCode")] = "",
    error_group: Annotated[str, Query(alias="errorGroup")] = "",
    schedule_id: Annotated[str, Query(alias="scheduleId")] = "", by: str = "error", cursor: str = "",
) -> Response:  # fmt: skip
    """List groups of dead letters; with a filter also the single jobs. Show the latest retries and discards."""
    filters = {"topic": topic, "errorCode": error_code, "errorGroup": error_group, "scheduleId": schedule_id}
    time_range = read_time_range(view)
    query = filters | time_range.parameters
    groups = await view.get("/dead-letters", groupBy="topic" if by == "topic" else "error", limit=50, **query)
    has_filter = any(filters.values())
    page = await view.get("/dead-letters", limit=50, cursor=cursor, **query) if has_filter else None
    operations = (await view.get("/operations", limit=10))["items"]
    jobs = [group["latest"] for group in groups["items"]] + (page["items"] if page else [])
    schedule_names, retry_counts = await view.app.store.run(
        rows.get_names_and_retry_counts, view.caller.tenant_id, {job["id"] for job in jobs},
        {job["scheduleId"] for job in jobs if job["scheduleId"]},
    )  # fmt: skip
    return view.render(
        "dead_letters", 422 if time_range.problem else 200, groups=groups, by=by, page=page, time_range=time_range,
        filters={name: text for name, text in filters.items() if text},
        schedule_names=schedule_names, retry_counts=retry_counts,
        operations=[operation for operation in operations if operation["kind"] in ("retry", "discard")][:5],
    )  # fmt: skip


@routes.get("/ui/operations/{id}")
async def operation(id: str, view: CurrentView) -> Response:
    """Show the progress of an operation."""
    return view.render("operation", operation=await view.get(f"/operations/{quote_segment(id)}"))


@routes.post("/ui/operations/{id}/cancel")
async def cancel_operation(id: str, view: CurrentView) -> Response:
    """Cancel an operation. Completed steps are not undone."""
    cancelled = await view.change("POST", f"/operations/{quote_segment(id)}/cancel")
    return view.redirect("/ui/triggers" if cancelled["kind"] == "scan" else "/ui/dead-letters", "stopped")


@routes.post("/ui/dead-letters/retry")
async def retry(view: CurrentView) -> Response:
    """Ask for confirmation with the number of jobs; once confirmed, retry them, optionally at a limited rate."""
    return await _start_operation(view, "retry", "dead-letters", FILTER_FIELDS)


@routes.post("/ui/dead-letters/discard")
async def discard(view: CurrentView) -> Response:
    """Ask for confirmation with the number of jobs; once confirmed, discard them."""
    return await _start_operation(view, "discard", "dead-letters", FILTER_FIELDS)


@routes.post("/ui/jobs/cancel")
async def cancel_matching(view: CurrentView) -> Response:
    """Ask for confirmation with the number of live jobs that match a filter; once confirmed, cancel them."""
    return await _start_operation(view, "cancel", "jobs", CANCEL_FIELDS)


async def _start_operation(view: View, action: str, noun: str, fields: Sequence[str]) -> Response:
    filters = {name: view.form[name] for name in fields if view.form.get(name)}
    rate, is_confirmed = view.form.get("rate", "").strip(), "sure" in view.form
    body: dict[str, Any] = {"filter": filters, "dryRun": not is_confirmed}
    if action == "retry" and rate:
        try:
            body["rate"] = float(rate)
        except ValueError:
            body["rate"] = rate
    result = view.check_response(await view.call_api("POST", f"/{noun}/{action}", body)).body
    if is_confirmed:
        return view.redirect(f"/ui/operations/{result['id']}", DONE_MESSAGES[action])
    return view.render(
        "dead_letters_confirm", action=action, noun=noun, count=result["count"], filters=filters, rate=rate
    )


@routes.post("/ui/backlogs/{action}")
async def resolve_backlog(action: str, view: CurrentView) -> Response:
    """Release or discard the jobs that an outage left behind."""
    resolution = "release" if action == "release" else "discard"
    await view.change("POST", f"/backlogs/{resolution}", {})
    return view.redirect("/ui/", "released" if resolution == "release" else "discarded")
