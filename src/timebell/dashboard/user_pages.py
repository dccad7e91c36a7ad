"""Pages of users: list, create, change role and password, disable, enable, delete, and end sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.tenancy.passwords import MAX_LENGTH, MIN_LENGTH
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/users")
async def users(view: CurrentView, cursor: str = "") -> Response:
    """List the users of the tenant."""
    return await _render_users(view, cursor)


@routes.post("/ui/users")
async def create_user(view: CurrentView) -> Response:
    """Create a user."""
    body = {name: view.form.get(name, "") for name in ("name", "role", "password")}
    response = await view.call_api("POST", "/users", {**body, "name": body["name"].strip()})
    if response.status in (409, 422):
        return await _render_users(view, "", problem=response.body, name=body["name"])
    view.check_response(response)
    return view.redirect("/ui/users", "created")


@routes.get("/ui/users/{name}")
async def user(name: str, view: CurrentView) -> Response:
    """Show a user and their sessions."""
    return await _render_user(view, name)


@routes.post("/ui/users/{name}/role")
async def change_role(name: str, view: CurrentView) -> Response:
    """Change the role of a user."""
    return await _change(view, name, "PATCH", "", {"role": view.form.get("role", "")})


@routes.post("/ui/users/{name}/password")
async def change_password(name: str, view: CurrentView) -> Response:
    """Set a new password, which ends all sessions of the user."""
    return await _change(view, name, "PATCH", "", {"password": view.form.get("password", "")})


@routes.post("/ui/users/{name}/totp/reset")
async def reset_totp(name: str, view: CurrentView) -> Response:
    """Let a user who has lost the authenticator app sign in with the password alone."""
    return await _change(view, name, "DELETE", "/totp", None)


@routes.post("/ui/users/{name}/enable")
async def enable(name: str, view: CurrentView) -> Response:
    """Enable a disabled user."""
    return await _change(view, name, "PATCH", "", {"enabled": True})


@routes.post("/ui/users/{name}/disable")
async def disable(name: str, view: CurrentView) -> Response:
    """Disable a user, which ends all sessions of the user."""
    return await _change(view, name, "PATCH", "", {"enabled": False})


@routes.post("/ui/users/{name}/sessions/end")
async def end_sessions(name: str, view: CurrentView) -> Response:
    """End one session of a user, or all of them."""
    session = view.form.get("session", "")
    return await _change(view, name, "DELETE", f"/sessions/{quote_segment(session)}" if session else "/sessions", None)


@routes.post("/ui/users/{name}/delete")
async def delete(name: str, view: CurrentView) -> Response:
    """Delete a user."""
    await view.change("DELETE", f"/users/{quote_segment(name)}")
    return view.redirect("/ui/users", "user-deleted")


async def _change(view: View, name: str, method: str, path: str, body: Any) -> Response:
    response = await view.call_api(method, f"/users/{quote_segment(name)}{path}", body)
    if response.status == 422:
        return await _render_user(view, name, problem=response.body)
    view.check_response(response)
    return view.redirect(f"/ui/users/{quote_segment(name)}{_tenant_query(view)}", "saved")


async def _render_users(view: View, cursor: str, *, problem: dict[str, Any] | None = None, name: str = "") -> Response:
    page = await view.get("/users", limit=50, cursor=cursor)
    return view.render(
        "users", 200 if problem is None else problem["status"], page=page, problem=problem, name=name,
        roles=_roles(view), min_length=MIN_LENGTH, max_length=MAX_LENGTH,
    )  # fmt: skip


async def _render_user(view: View, name: str, *, problem: dict[str, Any] | None = None) -> Response:
    path = f"/users/{quote_segment(name)}"
    user, sessions = await view.get(path), await view.get(f"{path}/sessions")
    is_platform = user["role"] == Role.PLATFORM
    return view.render(
        "user", 200 if problem is None else problem["status"], user=user, sessions=sessions["items"], problem=problem,
        url=f"/ui{path}", query=_tenant_query(view),
        roles=[role for role in _roles(view) if (role == Role.PLATFORM) == is_platform],
        may_change=view.may(user["role"]), min_length=MIN_LENGTH, max_length=MAX_LENGTH,
    )  # fmt: skip


def _tenant_query(view: View) -> str:
    """Return the query that keeps the tenant of a platform user's request, as names are unique within a tenant."""
    return f"?tenant={quote_segment(view.caller.tenant_id)}" if view.caller.specifies_tenant else ""


def _roles(view: View) -> list[str]:
    return [role.value for role in Role if view.caller.role.covers(role)]
