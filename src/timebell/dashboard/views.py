"""Base of all pages: the signed-in user, form parsing, API calls, rendering and error pages.

A page is a route of class `PageRoute`. Its function takes a `CurrentView` and returns `view.render(...)`, or after a
form `view.redirect(...)`. Every error becomes a page with its message, fix and code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute

from timebell.api.admission import ArrivingBodies, BodyTooLarge, TooBusy
from timebell.api.authentication import Authenticator, Caller
from timebell.api.client_address import client_network
from timebell.app import Timebell
from timebell.dashboard.api_client import ApiClient, ApiError, ApiResponse
from timebell.dashboard.overview_data import OverviewCache
from timebell.dashboard.pages import pages_of
from timebell.dashboard.rendering import render_template
from timebell.dashboard.sessions import (
    Sessions,
    Visitor,
    check_origin,
    check_token,
    select_tenant,
    set_tenant_cookie,
)
from timebell.errors import InvalidInput, StoreError, TimebellError
from timebell.store.tenancy.tenants import find_tenant
from timebell.tenancy.roles import Role

log = logging.getLogger("timebell.dashboard")
MAX_FORM_BYTES = 256 * 1024
MAX_FORM_FIELDS = 500
PAGE_TIMEOUT_SECONDS = 5.0  # for all data of one page
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self';"
    " img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Strict-Transport-Security": "max-age=31536000",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ZONE_CHOICES = ("schedule", "mine", "utc")
# Accessible without a session.
PUBLIC_PATHS = ("/ui/sign-in", "/ui/sign-in/code", "/ui/sign-in/start", "/ui/sign-in/callback")


class PageTooSlow(TimebellError):
    """A page exceeded its time limit."""

    code = "PAGE_TOO_SLOW"


@dataclass
class View:
    """One request for a page: its user, form and API client."""

    app: Timebell
    request: Request
    api: ApiClient
    visitor: Visitor
    now: datetime
    form: dict[str, str] = field(default_factory=dict)
    tenant_ids: list[str] = field(default_factory=list)
    """The tenants that the user selects from; empty for users of one tenant."""

    @property
    def caller(self) -> Caller:
        """Identity, role and tenant of the user."""
        return self.visitor.caller

    def may(self, role: str) -> bool:
        """Return whether the user has at least this role. Templates hide actions that are not allowed."""
        return self.caller.role.covers(Role(role))

    @property
    def overview_cache(self) -> OverviewCache:
        """Cached figures of the overview, shared by all requests of this process."""
        cache: OverviewCache = self.request.app.state.overview_cache
        return cache

    @property
    def is_fragment_request(self) -> bool:
        """True if htmx requests a fragment to insert into a page."""
        return self.request.headers.get("hx-request") == "true"

    async def call_api(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None,
                  **query: Any) -> ApiResponse:  # fmt: skip
        """Call the API and return its response, also if it is an error.

        Query parameters are keywords; a trailing underscore is removed (`from_`).
        """
        parameters = {name.rstrip("_"): value for name, value in query.items()}
        return await self.api.request(self.caller, self.request.state.id, method, path, body, parameters, headers)

    async def get(self, path: str, **query: Any) -> Any:
        """GET from the API and return the body. Raises ApiError."""
        return self.check_response(await self.call_api("GET", path, **query)).body

    async def change(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Send a change to the API and return the body of its response. Raises ApiError.

        Headers are keywords; underscores become hyphens (`if_match`).
        """
        header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.check_response(await self.call_api(method, path, body, headers=header_fields)).body

    def check_response(self, response: ApiResponse) -> ApiResponse:
        """Return the response. Raises ApiError if it is an error."""
        if response.is_error:
            raise ApiError(response)
        return response

    def render(self, template: str, code: int = 200, /, **variables: Any) -> HTMLResponse:
        """Render a template with the variables that every page needs."""
        pages, active = pages_of(self.app.features), self.overview_cache.active_counts(self.caller.tenant_id)
        variables["navigation_counts"] = {
            "dead": self.overview_cache.dead_count(self.caller.tenant_id),
            **{pages[feature].navigation.key: count for feature, count in active.items() if feature in pages},
        }
        return HTMLResponse(render_template(self.request, template, self, variables), code)

    def redirect(self, url: str, message: str) -> RedirectResponse:
        """Redirect after a form. `message` is a key of `DONE_MESSAGES`; the next page displays that text."""
        path, _, fragment = url.partition("#")
        location = f"{path}{'&' if '?' in path else '?'}did={message}" + (f"#{fragment}" if fragment else "")
        return RedirectResponse(location, 303)


async def _current_view(request: Request) -> View:
    view: View = request.state.view
    return view


CurrentView = Annotated[View, Depends(_current_view)]
"""Parameter type that injects the `View` into a page function."""


class PageRoute(APIRoute):
    """Route of a page: session and form checks, time limit, error pages, security headers."""

    timeout_seconds: float | None = None  # instead of PAGE_TIMEOUT_SECONDS

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response = await handle_errors(request)
            response.headers.update(SECURITY_HEADERS)
            return response

        async def handle_errors(request: Request) -> Response:
            try:
                async with asyncio.timeout(self.timeout_seconds or PAGE_TIMEOUT_SECONDS):
                    return await _handle(request, inner)
            except ApiError as error:
                return error_page(request, error.response.status, error.response.body)
            except TimeoutError:
                timeout = PageTooSlow(
                    f"The page took longer than {PAGE_TIMEOUT_SECONDS:g} s: too much data, or a slow database.",
                    fix="Request less, such as a shorter range, or try again.",
                )
                return error_page(request, 503, {"detail": timeout.message, "code": timeout.code, "fix": timeout.fix})
            except StoreError as error:
                log.warning("could not render page method=%s path=%s error=%s", request.method, request.url.path, error)
                return error_page(request, 503, {
                    "detail": "The database does not answer.", "code": error.code,
                    "fix": "Nothing is lost: due jobs run when it is back. Try again.",
                })  # fmt: skip
            except TimebellError as error:
                kinds = ((TooBusy, HTTPStatus.SERVICE_UNAVAILABLE), (InvalidInput, HTTPStatus.BAD_REQUEST))
                status = next((code for kind, code in kinds if isinstance(error, kind)), HTTPStatus.FORBIDDEN)
                return error_page(request, status, {"detail": error.message, "code": error.code, "fix": error.fix})

        return handle


async def _handle(request: Request, inner: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
    state = request.app.state
    authenticator: Authenticator = state.authenticator
    app = authenticator.app
    if app.service is None:
        await app.open()
    if not hasattr(state, "api_client"):  # first page of this process
        state.sessions, state.overview_cache, state.tiles_events = Sessions(app), OverviewCache(app), {}
        state.api_client = ApiClient(authenticator)
    sessions: Sessions = state.sessions
    if request.method == "POST":
        check_origin(request)
    is_public = request.url.path in PUBLIC_PATHS
    visitor = None if is_public else await sessions.identify(authenticator, request)
    if visitor is None and not is_public:
        return redirect_to_sign_in(request)
    if visitor is not None:
        view = request.state.view = View(app, request, state.api_client, visitor, app.clock.now())
        if view.caller.is_platform:
            with suppress(StoreError):  # the overview shows its last figures while the database does not answer
                view.tenant_ids = await view.overview_cache.tenant_ids()
    if request.method == "POST":
        form = request.state.form = await read_form(request, authenticator.capacity.bodies)
        if visitor is not None:
            check_token(visitor, form.pop("_token", "") or request.headers.get("timebell-form", ""))
            if (tenant_id := form.pop("_tenant", "")) and view.caller.is_platform:
                view.visitor = replace(visitor, caller=select_tenant(visitor.caller, tenant_id))
            view.form = form
    response = await inner(request)
    if visitor is not None and visitor.caller.is_platform and "tenant" in request.query_params:
        tenant_id = visitor.caller.tenant_id
        with suppress(StoreError):
            if await app.store.run(find_tenant, tenant_id) is not None:
                set_tenant_cookie(response, tenant_id)  # for the parts of the page and the following pages
    return response


async def read_form(request: Request, bodies: ArrivingBodies) -> dict[str, str]:
    """Read the fields of a form, with line breaks as `\\n`. Raises InvalidInput (FORM_TOO_LARGE), TimeoutError."""
    network = client_network(request.client.host if request.client else "")
    try:
        content = await bodies.read(request.stream(), PAGE_TIMEOUT_SECONDS, MAX_FORM_BYTES, network)
    except BodyTooLarge:
        raise InvalidInput("The form is too large.", code="FORM_TOO_LARGE", fix="Use the API.") from None
    try:
        fields = parse_qsl(content.decode(errors="replace"), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError:
        raise InvalidInput("The form has too many fields.", code="FORM_TOO_LARGE", fix="Use the API.") from None
    return {name: text.replace("\r\n", "\n") for name, text in fields}


def redirect_to_sign_in(request: Request) -> Response:
    """Redirect to the sign-in page, which returns to the requested page."""
    if request.headers.get("hx-request") == "true" or "text/event-stream" in request.headers.get("accept", ""):
        return Response(status_code=401, headers={"HX-Refresh": "true"})  # htmx reloads the page, which redirects
    requested = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    next_path = requested if request.method == "GET" else "/ui/"
    return RedirectResponse(f"/ui/sign-in?next={quote(next_path, safe='')}", 303)


def local_path(path: str) -> str:
    """Return `path` if it is a path of the dashboard, else that of the overview; prevents open redirects."""
    is_local = path.startswith("/ui/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if is_local and path.isascii() else "/ui/"


def error_page(request: Request, status: int, problem: Mapping[str, Any]) -> Response:
    """Render an API problem as a page, or as a fragment for htmx."""
    view: View | None = getattr(request.state, "view", None)
    variables = {
        "problem": problem, "status": status, "request_id": getattr(request.state, "id", None), "navigation_counts": {},
    }  # fmt: skip
    return HTMLResponse(render_template(request, "error", view, variables), status)
