"""Signing in and out, and what a browser remembers."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from timebell.api.authentication import TooManyWrongKeys
from timebell.dashboard.rendering import render
from timebell.dashboard.sessions import TENANT, Sessions, give
from timebell.dashboard.views import ZONES, Page, See, inside_only
from timebell.errors import TimebellError

routes = APIRouter(route_class=Page)


@routes.get("/ui/sign-in")
async def sign_in_page(request: Request, next: str = "/ui/") -> Response:
    """The form."""
    return HTMLResponse(render(request, "sign_in", None, {"next": inside_only(next), "problem": None}))


@routes.post("/ui/sign-in")
async def sign_in(request: Request) -> Response:
    """A session, by password or by key: always a new one."""
    form: dict[str, str] = request.state.form
    sessions: Sessions = request.app.state.sessions
    ahead = inside_only(form.get("next", ""))
    try:
        if form.get("key"):
            token = await sessions.sign_in_with_key(request.app.state.door, request, form["key"].strip())
        else:
            name, password = form.get("name", "").strip(), form.get("password", "")
            token = await sessions.sign_in(request.app.state.door, request, name[:200], password[:200])
    except TimebellError as refused:
        facts = {"next": ahead, "problem": {"detail": refused.message, "fix": refused.fix, "code": refused.code}}
        status = 429 if isinstance(refused, TooManyWrongKeys) else 401
        return HTMLResponse(render(request, "sign_in", None, facts), status)
    response = RedirectResponse(ahead, 303)
    give(response, token)
    return response


@routes.post("/ui/sign-out")
async def sign_out(request: Request, view: See) -> Response:
    """No session any more, here and in the store."""
    sessions: Sessions = request.app.state.sessions
    await sessions.sign_out(request)
    response = RedirectResponse("/ui/sign-in", 303)
    give(response, None)
    return response


@routes.post("/ui/shown")
async def shown(request: Request, view: See) -> Response:
    """Remember in which zone times are shown, and which tenant."""
    response = RedirectResponse(inside_only(view.form.get("back", "")), 303)
    if view.form.get("zone") in ZONES:
        response.set_cookie("timebell-zone", view.form["zone"], max_age=31_536_000, path="/ui", samesite="lax")
    if view.caller.everywhere and view.form.get("tenant"):
        response.set_cookie(TENANT, quote(view.form["tenant"], safe=""), path="/ui", samesite="lax", httponly=True)
    return response
