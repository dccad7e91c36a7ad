"""The form that creates or edits a campaign, with its preview."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import default_timezone, locate_problem, submit, to_problem
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput
from timebell.features.campaigns.pages.audience_rows import OPERATORS, count_rows, list_fields
from timebell.features.campaigns.pages.form_body import (
    ACTION_ROWS,
    EDITABLE_FIELDS,
    EMPTY_FORM,
    FORM_FIELDS,
    count_language_rows,
    is_unfinished,
    to_form,
    to_request_body,
)
from timebell.features.campaigns.pages.preview import build_preview, describe_problem
from timebell.recurrence.zone_names import accepted_names as zone_names

NEW_URL = "/ui/new/campaign"
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/new/campaign")
async def new(request: Request, view: CurrentView) -> Response:
    """Render an empty form, the fields in the URL, or (`copy=ID`) those of a campaign."""
    fields = dict(request.query_params)
    if copied := fields.pop("copy", ""):
        fields = {**to_form(await view.get(f"/campaigns/{quote_segment(copied)}")), "at": "", **fields}
    elif not fields:
        fields["pushOnOff"] = "1"
    return await _render_form(view, {"timezone": default_timezone(request, view), **fields}, None)


@routes.post("/ui/new/campaign")
async def create(view: CurrentView) -> Response:
    """Create a campaign; with a cron expression, a schedule that creates campaigns."""
    if is_unfinished(view.form):
        return await _render_form(view, view.form, None)
    created = await submit(view, "/campaigns", to_request_body, _render_form)
    if isinstance(created, Response):
        return created
    collection = "schedules" if created["scheduleId"] == created["id"] else "campaigns"
    return view.redirect(f"/ui/{collection}/{quote_segment(created['id'])}", "created")


@routes.api_route("/ui/new/campaign/preview", methods=["GET", "POST"])
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the preview of the campaign in the form, as a fragment."""
    fields = view.form or dict(request.query_params)
    return view.render("partials/campaign_preview", preview=await build_preview(view, fields))


@routes.get("/ui/campaigns/{id}/edit")
async def edit_page(id: str, view: CurrentView) -> Response:
    """Render the form with the fields of a campaign."""
    response = view.check_response(await view.call_api("GET", f"/campaigns/{quote_segment(id)}"))
    fields = {**to_form(response.body), "etag": response.headers["etag"]}
    return await _render_form(view, fields, None, record=response.body)


@routes.post("/ui/campaigns/{id}/edit")
async def edit(id: str, view: CurrentView) -> Response:
    """Change a campaign, unless another user has changed it since the form was opened."""
    url = f"/campaigns/{quote_segment(id)}"
    record = await view.get(url)
    if is_unfinished(view.form):
        return await _render_form(view, view.form, None, record=record)
    try:
        body = dict.fromkeys(EDITABLE_FIELDS) | to_request_body(view.form)
    except InvalidInput as error:
        return await _render_form(view, view.form, to_problem(error), 422, record)
    response = await view.call_api("PATCH", url, body, headers={"if-match": view.form.get("etag", "")})
    if response.is_error:
        return await _render_form(view, view.form, response.body, response.status, record)
    return view.redirect(f"/ui/campaigns/{quote_segment(id)}", "saved")


async def _render_form(
    view: View, form: Mapping[str, str], problem: Any, status: int = 200, record: Mapping[str, Any] | None = None
) -> Response:
    fields = {**EMPTY_FORM, "timezone": "", **form}
    return view.render(
        "campaign_form", status, form=fields,
        problem=locate_problem(problem and describe_problem(problem), fields, FORM_FIELDS),
        preview=await build_preview(view, fields), zones=sorted(zone_names()), record=record,
        language_rows=count_language_rows(fields), action_rows=ACTION_ROWS,
        condition_rows=count_rows(fields), operators=OPERATORS, condition_fields=await list_fields(view, fields),
        form_url=NEW_URL if record is None else f"/ui/campaigns/{record['id']}/edit",
    )  # fmt: skip
