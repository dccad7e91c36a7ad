"""What every page has: who looks, what they may, times in the zone they want, and the API to ask.

A page is a route of class `Page`; its function takes a `See` and answers with `view.page(...)`, or after a form with
`view.back(...)`. Whatever goes wrong on the way becomes a page that says what, why and what to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute

from timebell.api.authentication import Caller, Door
from timebell.app import Timebell
from timebell.dashboard.api_client import Answer, Inside, Refusal
from timebell.dashboard.overview_data import Now
from timebell.dashboard.rendering import render
from timebell.dashboard.sessions import Seen, Sessions, check_origin, check_token
from timebell.errors import InvalidInput, StoreError, TimebellError
from timebell.tenancy.roles import Role

log = logging.getLogger("timebell.dashboard")
MOST_BYTES = 256 * 1024
MOST_FIELDS = 500
PATIENCE = 5.0  # seconds for everything that a page shows
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self';"
    " img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Strict-Transport-Security": "max-age=31536000",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ZONES = ("schedule", "mine", "utc")
OUTSIDE = ("/ui/sign-in",)  # what those see who are not signed in


class PageTooSlow(TimebellError):
    """A page took too long."""

    code = "PAGE_TOO_SLOW"


@dataclass
class View:
    """One request for a page."""

    app: Timebell
    request: Request
    inside: Inside
    seen: Seen
    now: datetime
    form: dict[str, str] = field(default_factory=dict)

    @property
    def caller(self) -> Caller:
        """Who looks."""
        return self.seen.caller

    def may(self, role: str) -> bool:
        """Whether the caller's role covers this one: what they may not do has no button."""
        return self.caller.role.covers(Role(role))

    @property
    def partial(self) -> bool:
        """Whether htmx asks, to put the answer into a page."""
        return self.request.headers.get("hx-request") == "true"

    async def ask(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None,
                  **query: Any) -> Answer:  # fmt: skip
        """Ask the API, whatever it answers."""
        asked = {name.rstrip("_"): value for name, value in query.items()}
        return await self.inside.ask(self.caller, self.request.state.id, method, path, body, asked, headers)

    async def get(self, path: str, **query: Any) -> Any:
        """The body of an answer. Raises Refusal."""
        return self.good(await self.ask("GET", path, **query)).body

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Change something; what came of it. Raises Refusal."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.good(await self.ask(method, path, body, headers=named)).body

    def good(self, answer: Answer) -> Answer:
        """The answer. Raises Refusal where it is none."""
        if answer.refused:
            raise Refusal(answer)
        return answer

    def page(self, template: str, code: int = 200, /, **facts: Any) -> HTMLResponse:
        """A template, filled in."""
        now: Now = self.request.app.state.now
        facts["waiting"] = {"dead": now.dead(self.caller.tenant_id), "campaigns": now.sending(self.caller.tenant_id)}
        return HTMLResponse(render(self.request, template, self, facts), code)

    def back(self, to: str, did: str) -> RedirectResponse:
        """After a form: the page to look at, and what was done."""
        path, _, fragment = to.partition("#")
        joined = f"{path}{'&' if '?' in path else '?'}did={did}" + (f"#{fragment}" if fragment else "")
        return RedirectResponse(joined, 303)


async def _view(request: Request) -> View:
    view: View = request.state.view
    return view


See = Annotated[View, Depends(_view)]
"""The parameter by which a page's function gets its `View`."""


class Page(APIRoute):
    """A route that shows a page."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response = await caught(request)
            response.headers.update(HEADERS)
            return response

        async def caught(request: Request) -> Response:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await _answer(request, inner)
            except Refusal as refusal:
                return trouble(request, refusal.answer.status, refusal.answer.body)
            except TimeoutError:
                slow = PageTooSlow(
                    f"This took longer than {PATIENCE:g} s: it is too much to look at, or the database hardly answers.",
                    fix="Ask for less, such as a shorter range, or try again.",
                )
                return trouble(request, 503, {"detail": slow.message, "code": slow.code, "fix": slow.fix})
            except StoreError as failed:
                log.warning("%s %s: %s", request.method, request.url.path, failed)
                return trouble(request, 503, {
                    "detail": "The database does not answer.", "code": failed.code,
                    "fix": "Nothing is lost: what is due fires when it is back. Try again.",
                })  # fmt: skip
            except TimebellError as failed:
                status = HTTPStatus.BAD_REQUEST if isinstance(failed, InvalidInput) else HTTPStatus.FORBIDDEN
                return trouble(request, status, {"detail": failed.message, "code": failed.code, "fix": failed.fix})

        return handle


async def _answer(request: Request, inner: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
    kept = request.app.state
    door: Door = kept.door
    app = door.app
    if app.service is None:
        await app.open()
    if not hasattr(kept, "inside"):
        kept.inside, kept.sessions, kept.now, kept.fragments = Inside(door), Sessions(app), Now(app), {}
    sessions: Sessions = kept.sessions
    if request.method == "POST":
        check_origin(request)
    seen = await sessions.seen(door, request)
    if seen is None and request.url.path not in OUTSIDE:
        return to_sign_in(request)
    if seen is not None:
        request.state.view = View(app, request, request.app.state.inside, seen, app.clock.now())
    if request.method == "POST":
        form = request.state.form = await read_form(request)
        if seen is not None and request.url.path not in OUTSIDE:
            check_token(seen, form.pop("_token", "") or request.headers.get("timebell-form", ""))
            request.state.view.form = form
    return await inner(request)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises InvalidInput (FORM_TOO_LARGE)."""
    parts, size = [], 0
    async for each in request.stream():
        size += len(each)
        if size > MOST_BYTES:
            raise InvalidInput("The form has too much in it.", code="FORM_TOO_LARGE", fix="Use the API.")
        parts.append(each)
    try:
        given = parse_qsl(b"".join(parts).decode(errors="replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise InvalidInput("The form has too many fields.", code="FORM_TOO_LARGE", fix="Use the API.") from None
    return {name: text.replace("\r\n", "\n") for name, text in given}


def to_sign_in(request: Request) -> Response:
    """Sign in first, and come back."""
    if request.headers.get("hx-request") == "true" or "text/event-stream" in request.headers.get("accept", ""):
        return Response(status_code=401, headers={"HX-Refresh": "true"})  # the page itself, which leads to the form
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    ahead = wanted if request.method == "GET" else "/ui/"
    return RedirectResponse(f"/ui/sign-in?next={quote(ahead, safe='')}", 303)


def inside_only(path: str) -> str:
    """A path of ours to go on to; whatever else was asked, the overview."""
    fine = path.startswith("/ui/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if fine and path.isascii() else "/ui/"


def trouble(request: Request, status: int, body: Mapping[str, Any]) -> Response:
    """A page for what went wrong."""
    view: View | None = getattr(request.state, "view", None)
    facts = {"problem": body, "status": status, "id": getattr(request.state, "id", None), "waiting": {}}
    return HTMLResponse(render(request, "trouble", view, facts), status)
