"""Sign-in, sign-out, and display preferences."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from timebell.api.authentication_failures import TooManySignIns
from timebell.dashboard.fields import to_problem
from timebell.dashboard.provider_sign_in import render_sign_in, render_sign_out
from timebell.dashboard.rendering import render_template
from timebell.dashboard.sessions import (
    Sessions,
    SignIn,
    SignInExpired,
    set_code_cookie,
    set_session_cookie,
    set_tenant_cookie,
)
from timebell.dashboard.views import ZONE_CHOICES, CurrentView, PageRoute, local_path
from timebell.errors import StoreError, TimebellError

routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/sign-in")
async def sign_in_page(request: Request, next: str = "/ui/") -> Response:
    """Render the sign-in form."""
    return render_sign_in(request, next)


@routes.post("/ui/sign-in")
async def sign_in(request: Request) -> Response:
    """Start a new session by password or API key. An existing session is replaced, never reused."""
    form: dict[str, str] = request.state.form
    sessions: Sessions = request.app.state.sessions
    next_path = local_path(form.get("next", ""))
    try:
        if form.get("key"):
            token = await sessions.sign_in_with_key(request.app.state.authenticator, request, form["key"].strip())
            signed_in = SignIn(token)
        else:
            name, password = form.get("name", "").strip(), form.get("password", "")
            signed_in = await sessions.sign_in(request.app.state.authenticator, request, name[:401], password[:200])
    except StoreError:  # the error page of all pages, without details of the database
        raise
    except TimebellError as error:
        return render_sign_in(request, next_path, error, 429 if isinstance(error, TooManySignIns) else 401)
    if signed_in.awaits_code:
        response = RedirectResponse(f"/ui/sign-in/code?next={quote(next_path, safe='')}", 303)
        set_code_cookie(response, signed_in.token)
        return response
    response = RedirectResponse(next_path, 303)
    set_session_cookie(response, signed_in.token)
    return response


@routes.get("/ui/sign-in/code")
async def code_page(request: Request, next: str = "/ui/") -> Response:
    """Render the form for the code of the second step."""
    return _render_code_form(request, next)


@routes.post("/ui/sign-in/code")
async def sign_in_with_code(request: Request) -> Response:
    """Complete a sign-in by the code of an authenticator app, or by a recovery code."""
    form: dict[str, str] = request.state.form
    sessions: Sessions = request.app.state.sessions
    next_path = local_path(form.get("next", ""))
    try:
        signed_in = await sessions.sign_in_with_code(request.app.state.authenticator, request, form.get("code", ""))
    except StoreError:
        raise
    except SignInExpired as error:
        return render_sign_in(request, next_path, error)
    except TimebellError as error:
        return _render_code_form(request, next_path, error)
    message = ("&did=" if "?" in next_path else "?did=") + "recovery-code" if signed_in.used_recovery_code else ""
    response = RedirectResponse(next_path + message, 303)
    set_session_cookie(response, signed_in.token)
    set_code_cookie(response, None)
    return response


def _render_code_form(request: Request, next_path: str, error: TimebellError | None = None) -> Response:
    variables = {"next": local_path(next_path), "problem": None if error is None else to_problem(error)}
    status = 200 if error is None else 429 if isinstance(error, TooManySignIns) else 401
    return HTMLResponse(render_template(request, "sign_in_code", None, variables), status)


@routes.post("/ui/sign-out")
async def sign_out(request: Request, view: CurrentView) -> Response:
    """End the session: delete it in the store and in the browser, and at the identity provider of the user."""
    sessions: Sessions = request.app.state.sessions
    await sessions.sign_out(request, view.visitor)
    response = await render_sign_out(request, view.visitor.user) or RedirectResponse("/ui/sign-in", 303)
    set_session_cookie(response, None)
    return response


@routes.post("/ui/shown")
async def save_preferences(request: Request, view: CurrentView) -> Response:
    """Store the zone of displayed times and the selected tenant in cookies."""
    response = RedirectResponse(local_path(view.form.get("back", "")), 303)
    if view.form.get("zone") in ZONE_CHOICES:
        response.set_cookie("timebell-zone", view.form["zone"], max_age=31_536_000, path="/ui", samesite="lax")
    if view.caller.is_platform and view.form.get("tenant"):
        set_tenant_cookie(response, view.form["tenant"])
    return response
