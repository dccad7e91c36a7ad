"""Actions on several selected schedules or jobs.

The first request renders a confirmation with their number. The confirmed one applies the action to each item
separately and lists those that failed.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Response

from timebell.client.validation import parse_uuid
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput

ACTION_LABELS = {
    "schedules": {"pause": "Paused", "resume": "Resumed", "delete": "Deleted"},
    "jobs": {"cancel": "Cancelled", "retry": "Retried"},
}
NAME_FIELDS = {"schedules": "name", "jobs": "topic"}
ID_PREFIX = "one-"  # form fields `one-<id>` are the selected items; the value is the ETag that was displayed
MAX_NAMES = 12
routes = APIRouter(route_class=PageRoute)


@routes.post("/ui/schedules/several")
async def change_schedules(view: CurrentView) -> Response:
    """Pause, resume or delete the selected schedules. Raises InvalidInput (NOTHING_SELECTED)."""
    return await _bulk_action(view, "schedules", "/ui/schedules")


@routes.post("/ui/jobs/several")
async def change_jobs(view: CurrentView) -> Response:
    """Cancel or retry the selected jobs, then return to the filtered list. Raises InvalidInput (NOTHING_SELECTED)."""
    fields = {name: text for name in ("q", "sort", "from", "to", "zone") if (text := view.form.get(name))}
    return await _bulk_action(view, "jobs", f"/ui/jobs?{urlencode(fields)}" if fields else "/ui/jobs")


async def _bulk_action(view: View, kind: str, list_url: str) -> Response:
    action = view.form.get("what", "")
    selected = {
        name.removeprefix(ID_PREFIX): etag for name, etag in view.form.items()
        if name.startswith(ID_PREFIX) and parse_uuid(name.removeprefix(ID_PREFIX)) is not None
    }  # fmt: skip
    if action not in ACTION_LABELS[kind] or not selected:
        raise InvalidInput(
            f"No {kind.removesuffix('s')} is selected.", code="NOTHING_SELECTED", fix="Select at least one."
        )
    variables: dict[str, Any] = {"action": action, "selected": selected, "kind": kind, "list_url": list_url}
    if "sure" not in view.form:
        names = [
            (await view.get(f"/{kind}/{quote_segment(id_)}"))[NAME_FIELDS[kind]] for id_ in list(selected)[:MAX_NAMES]
        ]
        return view.render("bulk_action", names=names, failures=[], **variables)
    failures = []
    for id_, etag in selected.items():
        if (reason := await _apply_action(view, kind, action, id_, etag)) is not None:
            failures.append((id_, reason))
    if failures:
        return view.render(
            "bulk_action", 409, names=[], failures=failures, done_label=ACTION_LABELS[kind][action], **variables
        )
    return view.redirect(list_url, f"bulk-{action}")


async def _apply_action(view: View, kind: str, action: str, id_: str, etag: str) -> str | None:
    """Apply the action to one item; returns None, or why it failed."""
    path = f"/{kind}/{quote_segment(id_)}"
    if action == "delete":
        response = await view.call_api("DELETE", path, headers={"if-match": etag})
    else:
        reason = view.form.get("reason", "").strip()
        body = {"reason": reason} if action == "pause" and reason else {}
        response = await view.call_api("POST", f"{path}/{action}", body if kind == "schedules" else None)
    if response.is_error:
        return str(response.body.get("detail", ""))
    if action == "cancel" and response.body["outcome"] == "already_done":
        return f"Already {response.body['job']['status']}."
    return None
