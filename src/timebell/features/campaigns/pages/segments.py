"""Pages of segments: the list with counts, and the form that creates or changes one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import InvalidField, locate_problem, parse_json, to_problem
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import Conflict, InvalidInput, TimebellError
from timebell.features.campaigns.pages.audience_rows import (
    OPERATORS,
    count_rows,
    describe_filters,
    list_fields,
    parse_rows,
    split_filters,
    to_rows,
)

NEW_URL = "/ui/new/segment"
FORM_FIELDS = {"path name": "name", "CONFLICT": "name"}
"""Form fields by their names or error codes in the API, if they differ."""
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/segments")
async def segments(view: CurrentView, cursor: str = "") -> Response:
    """List segments; their counts are loaded one by one, because each reads all devices."""
    page = await view.get("/segments", limit=50, cursor=cursor)
    return view.render("segments", page=page, describe_filters=describe_filters)


@routes.get("/ui/segments/{name}/count")
async def segment_count(name: str, view: CurrentView) -> Response:
    """Render the number of devices in a segment, as a fragment."""
    segment = await view.get(f"/segments/{quote_segment(name)}")
    return view.render("partials/segment_count", count=segment["count"], problem=None)


@routes.get("/ui/new/segment")
async def new(request: Request, view: CurrentView) -> Response:
    """Render the form of a new segment, or the fields in the URL."""
    return await _render_form(view, dict(request.query_params) or {"conditions": "1"}, None)


@routes.api_route("/ui/new/segment/count", methods=["GET", "POST"])
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the number of devices that match the form, as a fragment."""
    return view.render("partials/segment_count", **await _count_form(view, view.form or dict(request.query_params)))


@routes.get("/ui/segments/{name}")
async def edit_page(name: str, view: CurrentView) -> Response:
    """Render the form with the filters of a segment."""
    response = view.check_response(await view.call_api("GET", f"/segments/{quote_segment(name)}"))
    rest, rows = split_filters(to_rows(response.body["filters"]))
    filters = json.dumps(rest, ensure_ascii=False, indent=2) if rest else ""
    stored = {**rows, "filters": filters, "etag": response.headers["etag"]}
    return await _render_form(view, stored, None, record=response.body)


@routes.post("/ui/new/segment")
async def create(view: CurrentView) -> Response:
    """Create a segment."""
    return await _save(view, view.form.get("name", "").strip(), None)


@routes.post("/ui/segments/{name}")
async def edit(name: str, view: CurrentView) -> Response:
    """Change the filters of a segment, unless another user has changed them since the form was opened."""
    return await _save(view, name, await view.get(f"/segments/{quote_segment(name)}"))


@routes.post("/ui/segments/{name}/delete")
async def delete(name: str, view: CurrentView) -> Response:
    """Delete a segment."""
    await view.change("DELETE", f"/segments/{quote_segment(name)}")
    return view.redirect("/ui/segments", "segment-deleted")


async def _save(view: View, name: str, record: Mapping[str, Any] | None) -> Response:
    if "conditions" in view.form:  # the button that adds a row
        return await _render_form(view, view.form, None, record=record)
    try:
        if not name:
            raise InvalidField(
                "name", "The segment has no name.", code="INVALID_FILTER", fix="Enter one, e.g. Gold customers."
            )
        body = {"filters": _parse_form(view.form)}
    except InvalidInput as error:
        return await _render_form(view, view.form, to_problem(error), 422, record)
    url = f"/segments/{quote_segment(name)}"
    if record is None and not (await view.call_api("GET", url)).is_error:
        exists = Conflict(f"There is a segment {name!r:.60} already.", code="CONFLICT", fix="Choose another name.")
        return await _render_form(view, view.form, to_problem(exists), 409, record)
    headers = {} if record is None else {"if-match": view.form.get("etag", "")}
    response = await view.call_api("PUT", url, body, headers=headers)
    if response.is_error:
        return await _render_form(view, view.form, response.body, response.status, record)
    return view.redirect("/ui/segments", "saved")


def _parse_form(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the filters in the form. Raises InvalidInput."""
    filters = parse_json("filters", form.get("filters", "")) or {}
    rows = parse_rows(form)
    if not isinstance(filters, dict) or not isinstance(filters.get("all", []), list):
        raise InvalidField(
            "filters", "Filters is not an object.", code="INVALID_FILTER", fix='E.g. {"platform": "ios"}'
        )
    return {**filters, "all": [*filters.get("all", []), *rows]} if rows else filters


async def _count_form(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the number of devices that match the form, or its problem."""
    try:
        body = {"filters": _parse_form(form)}
    except TimebellError as error:
        return {"count": None, "problem": to_problem(error)}
    response = await view.call_api("POST", "/audiences/count", body)
    if response.is_error:
        return {"count": None, "problem": response.body}
    return {"count": response.body["count"], "problem": None}


async def _render_form(
    view: View, form: Mapping[str, str], problem: Any, status: int = 200, record: Mapping[str, Any] | None = None
) -> Response:
    return view.render(
        "segment_form", status, form=form, problem=locate_problem(problem, form, FORM_FIELDS), record=record,
        operators=OPERATORS, condition_rows=count_rows(form), condition_fields=await list_fields(view, form),
        form_url=NEW_URL if record is None else f"/ui/segments/{quote_segment(record['name'])}",
        counted=await _count_form(view, form),
    )  # fmt: skip
