"""Pages of API keys: list, create, revoke."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response

from timebell.api.schemas import format_utc
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.rendering import to_datetime
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.tenancy.keys import SCOPES
from timebell.tenancy.roles import Role

LIFETIMES_DAYS = (7, 30, 90, 365)
EXPIRES_SOON = timedelta(days=14)
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/keys")
async def keys(view: CurrentView, cursor: str = "") -> Response:
    """List the keys of the tenant with their restrictions and last use."""
    return await _render_keys(view, cursor)


@routes.post("/ui/keys")
async def create_key(view: CurrentView) -> Response:
    """Create a key and show its text, this once."""
    form = view.form
    days = form.get("days", "")
    body: dict[str, Any] = {"name": form.get("name", "").strip(), "role": form.get("role", "")}
    if networks := form.get("networks", "").replace(",", " ").split():
        body["networks"] = networks
    if scopes := [scope for scope in SCOPES if f"scope-{scope}" in form]:
        body["scopes"] = scopes
    if days.isdigit() and int(days) in LIFETIMES_DAYS:
        body["expiresAt"] = format_utc(view.now + timedelta(days=int(days)))
    response = await view.call_api("POST", "/keys", body)
    if response.is_error and response.status != 422:
        view.check_response(response)
    created = None if response.is_error else response.body
    return await _render_keys(view, "", created=created, problem=response.body if response.is_error else None)


@routes.post("/ui/keys/{id}/revoke")
async def revoke_key(id: str, view: CurrentView) -> Response:
    """Revoke a key."""
    await view.change("DELETE", f"/keys/{quote_segment(id)}")
    return view.redirect("/ui/keys", "revoked")


async def _render_keys(
    view: View, cursor: str, *, created: dict[str, Any] | None = None, problem: dict[str, Any] | None = None
) -> Response:
    page = await view.get("/keys", limit=50, cursor=cursor)
    return view.render(
        "keys", 200 if problem is None else 422, page=page, created=created, problem=problem, scopes=SCOPES,
        roles=[role.value for role in Role if view.caller.role.covers(role)], lifetimes=LIFETIMES_DAYS,
        state_of=lambda key: _state(view, key),
    )  # fmt: skip


def _state(view: View, key: dict[str, Any]) -> tuple[str, str]:
    """Return the CSS class and label of a key's state."""
    if key["revokedAt"]:
        return "skip", "Revoked"
    if key["expiresAt"] is None:
        return "ok", "Valid"
    remaining = to_datetime(key["expiresAt"]) - view.now
    if remaining <= timedelta(0):
        return "skip", "Expired"
    return ("retry", "Expires soon") if remaining < EXPIRES_SOON else ("ok", "Valid")
