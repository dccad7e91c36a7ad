"""Pages of the audit log, and of the history of one object."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.exports import download
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View

PAGE_SIZE = 50
FILTER_FIELDS = ("subject", "action", "actor", "outcome")
COLUMNS = (
    "at", "actor", "actorKind", "keyId", "address", "action", "subject", "subjectName", "outcome", "code", "suppressed",
    "changes", "requestId", "id",
)  # fmt: skip
# Collections whose objects have a page at /ui/<collection>/<id or name>; the others have one page for all.
OBJECT_PAGES = ("schedules", "jobs", "campaigns", "triggers", "operations", "users")
LIST_PAGES = ("targets", "tenants", "keys")
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/audit-log")
async def audit_log(view: CurrentView, cursor: str = "") -> Response:
    """Show the newest changes and refused requests that match the filter."""
    filters = _read_filter(view)
    time_range = read_time_range(view)
    query: dict[str, Any] = {**filters, **time_range.parameters}
    response = await view.call_api("GET", "/audit-log", limit=PAGE_SIZE, cursor=cursor, **query)
    problem = response.body if response.is_error else time_range.problem
    if response.is_error and response.status != 422:
        view.check_response(response)
    page = {"items": [], "nextCursor": None} if problem else response.body
    fields = {**filters, **time_range.fields}
    return view.render(
        "audit_log", 200 if problem is None else 422, page=page, filters=filters, problem=problem,
        time_range=time_range, fields={name: filters.get(name, "") for name in FILTER_FIELDS},
        older_url=f"/ui/audit-log?{urlencode(fields) + '&' if fields else ''}", object_page=object_page,
    )  # fmt: skip


@routes.get("/ui/audit-log/export")
async def export(view: CurrentView, format: str = "csv") -> Response:
    """Download the first records that match the filter; all of them are in the export of the API."""
    return await download(view, "audit-log", format, "/audit-log", COLUMNS,
                          _read_filter(view) | read_time_range(view).parameters)  # fmt: skip


@routes.get("/ui/{collection}/{id}/history")
async def history(collection: str, id: str, view: CurrentView, cursor: str = "") -> Response:
    """Show the changes of an object with their actors."""
    path = f"/{quote_segment(collection)}/{quote_segment(id)}/history"
    page = await view.get(path, limit=PAGE_SIZE, cursor=cursor)
    found = await view.call_api("GET", f"/{quote_segment(collection)}/{quote_segment(id)}")
    name = id if found.is_error else found.body.get("name") or found.body.get("title") or id
    back = f"/ui/{quote_segment(collection)}"
    return view.render(
        "history", page=page, name=name, collection=collection, url=f"/ui{path}", list_url=back,
        object_url=f"{back}/{quote_segment(id)}" if collection in OBJECT_PAGES and not found.is_error else back,
    )  # fmt: skip


def object_page(record: dict[str, Any]) -> str | None:
    """Return the URL of the page of an audit record's object; None if it has none."""
    parts = (record["url"] or "").split("/")
    if len(parts) != 5:
        return None
    _, _, _, collection, identifier = parts
    if collection in OBJECT_PAGES:
        return f"/ui/{collection}/{identifier}"
    return f"/ui/{collection}" if collection in LIST_PAGES else None


def _read_filter(view: View) -> dict[str, Any]:
    query = view.request.query_params
    return {name: query[name].strip() for name in FILTER_FIELDS if query.get(name, "").strip()}
