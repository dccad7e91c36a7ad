"""Pages of devices: search, import, show and delete."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import text_fields, to_problem
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput
from timebell.features.campaigns.pages.audience_rows import OPERATORS, count_rows, list_fields, parse_rows

PAGE_SIZE = 50
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/devices")
async def devices(request: Request, view: CurrentView, cursor: str = "") -> Response:
    """Search devices by user, the beginning of the token, and conditions."""
    form = {name: value for name, value in request.query_params.items() if name != "cursor"}
    return await _render_devices(view, form, cursor)


@routes.post("/ui/devices")
async def import_devices(view: CurrentView) -> Response:
    """Import devices from CSV text, and show the lines that were refused."""
    lines = view.form.get("csv", "").encode()
    response = await view.call_api("POST", "/devices/bulk", lines, headers={"content-type": "text/csv"})
    return await _render_devices(view, {}, "", imported=view.check_response(response).body)


async def _render_devices(view: View, form: dict[str, str], cursor: str, imported: Any = None) -> Response:
    problem: Any = None
    page: dict[str, Any] = {"items": [], "nextCursor": None}
    try:
        given = text_fields(form, "user", "token")
        query: dict[str, Any] = {"userId": given.get("user"), "tokenPrefix": given.get("token")}
        if conditions := parse_rows(form):
            query["filters"] = json.dumps({"all": conditions})
        response = await view.call_api("GET", "/devices", limit=PAGE_SIZE, cursor=cursor or None, **query)
        page, problem = (page, response.body) if response.is_error else (response.body, None)
    except InvalidInput as error:
        problem = to_problem(error)
    return view.render(
        "devices", form=form, imported=imported, csv=view.form.get("csv", ""), page=page, problem=problem,
        operators=OPERATORS, condition_rows=count_rows(form), condition_fields=await list_fields(view, form),
        form_url="/ui/devices",
    )  # fmt: skip


@routes.get("/ui/devices/{id}")
async def device(id: str, view: CurrentView) -> Response:
    """Show one device."""
    return view.render("device", device=await view.get(f"/devices/{quote_segment(id)}"))


@routes.post("/ui/devices/{id}/delete")
async def delete(id: str, view: CurrentView) -> Response:
    """Delete a device."""
    await view.change("DELETE", f"/devices/{quote_segment(id)}")
    return view.redirect("/ui/devices", "device-deleted")
