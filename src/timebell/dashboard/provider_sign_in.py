"""Sign-in at an identity provider: to the provider and back, and out again."""

from __future__ import annotations

import logging
from http import HTTPStatus
from urllib.parse import quote, unquote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from timebell.api.admission import TooBusy
from timebell.api.authentication import Authenticator
from timebell.api.authentication_failures import TooManySignIns
from timebell.api.client_address import client_network
from timebell.api.identity_provider import IdentityProvider, NoRole, SignInFailed
from timebell.api.provider_cache import ProviderUnavailable
from timebell.api.refusals import UNKNOWN_ACTOR
from timebell.api.sign_in_attempt import SignInAttempt
from timebell.dashboard.fields import to_problem
from timebell.dashboard.rendering import render_template
from timebell.dashboard.sessions import Sessions, set_session_cookie
from timebell.dashboard.views import PageRoute, local_path
from timebell.errors import NotFound, Refused, StoreError, TimebellError
from timebell.tenancy.identities import Identity
from timebell.tenancy.users import User

log = logging.getLogger("timebell.dashboard")
ATTEMPT_COOKIE = "__Host-timebell-sign-in"  # the prefix keeps other hosts of the domain from planting one
ATTEMPT_MAX_AGE_SECONDS = 600
MAX_NEXT_LENGTH = 1500  # of the page to return to; a cookie has at most 4 KiB
STATUS_BY_ERROR = (
    (TooManySignIns, 429), (TooBusy, 503), (ProviderUnavailable, 503), (NotFound, 404), (Refused, 403),
)  # fmt: skip


class ProviderRoute(PageRoute):
    """Page that waits for up to three responses of the provider."""

    timeout_seconds = 15.0


routes = APIRouter(route_class=ProviderRoute)


@routes.get("/ui/sign-in/start")
async def start_sign_in(request: Request, next: str = "/ui/") -> Response:
    """Send the browser to the provider. A link and not a form: the policy of pages forbids forms to other sites."""
    try:
        attempt = SignInAttempt.begin()
        url = await _provider(request).authorization_url(attempt)
    except TimebellError as error:
        return render_sign_in(request, next, error)
    response = RedirectResponse(url, 303)
    next_path = local_path(next) if len(next) <= MAX_NEXT_LENGTH else "/ui/"
    _set_attempt_cookie(response, f"{attempt.secret}.{quote(next_path, safe='')}")
    return response


@routes.get("/ui/sign-in/callback")
async def finish_sign_in(request: Request) -> Response:
    """Start a session for the identity that the provider confirms. The cookie of the attempt is used once."""
    sessions: Sessions = request.app.state.sessions
    secret, _, encoded_path = request.cookies.get(ATTEMPT_COOKIE, "").partition(".")
    next_path = local_path(unquote(encoded_path))
    address = request.client.host if request.client else ""
    try:
        provider = _provider(request)
        attempt = SignInAttempt(secret)
        if not secret or not attempt.has_state(request.query_params.get("state")):
            raise SignInFailed("the state belongs to no sign-in that this browser started within ten minutes")
        identity = await _confirm(provider, attempt, request)
        token = await sessions.sign_in_identity(request, identity)
    except StoreError:  # the error page of all pages, without details of the database
        raise
    except TimebellError as error:
        await _record_failure(error, request, address)
        response = render_sign_in(request, next_path, error)
    else:
        response = RedirectResponse(next_path, 303)
        set_session_cookie(response, token)
    _set_attempt_cookie(response, None)
    return response


def render_sign_in(
    request: Request, next_path: str, error: TimebellError | None = None, status: int | None = None
) -> Response:
    """Render the sign-in page, with the reason why a sign-in failed."""
    authenticator: Authenticator = request.app.state.authenticator
    provider = authenticator.identity_provider
    variables = {
        "next": local_path(next_path), "problem": None if error is None else to_problem(error),
        "provider": None if provider is None else provider.name,
        "passwords": authenticator.app.settings.password_sign_in,
    }  # fmt: skip
    if status is None:
        known = next((code for kind, code in STATUS_BY_ERROR if isinstance(error, kind)), HTTPStatus.UNAUTHORIZED)
        status = HTTPStatus.OK if error is None else known
    return HTMLResponse(render_template(request, "sign_in", None, variables), status)


async def render_sign_out(request: Request, user: User | None) -> Response | None:
    """Return the page that ends the session of a user at the provider, too; None if it has no such page.

    It is a page with a refresh and not a redirect, because the policy of pages forbids forms that lead to other sites.
    """
    authenticator: Authenticator = request.app.state.authenticator
    provider = authenticator.identity_provider
    if provider is None or user is None or provider.issuer != user.issuer:
        return None
    url = await provider.sign_out_url()
    if url is None:
        return None
    return HTMLResponse(render_template(request, "signed_out", None, {"url": url, "provider": provider.name}))


def _provider(request: Request) -> IdentityProvider:
    authenticator: Authenticator = request.app.state.authenticator
    if authenticator.identity_provider is None:
        raise NotFound("This server has no identity provider.", code="IDENTITY_PROVIDER_MISSING",
                       fix="Set TIMEBELL_OIDC_ISSUER, or sign in another way.")  # fmt: skip
    return authenticator.identity_provider


async def _confirm(provider: IdentityProvider, attempt: SignInAttempt, request: Request) -> Identity:
    """Return the identity that the provider confirms, with limits per address.

    An invented code costs the provider a request, so it counts like a wrong password. A wrong state does not, because
    pages of other sites can cause it; neither does a refused user or an outage, which must not lock passwords out.
    """
    authenticator: Authenticator = request.app.state.authenticator
    address = request.client.host if request.client else ""
    begun_at = authenticator.failures.begin_sign_in(address)
    try:
        async with authenticator.capacity.provider_sign_ins.hold(client_network(address)):
            identity = await provider.finish_sign_in(attempt, request.query_params)
    except (NoRole, ProviderUnavailable, TooBusy):
        authenticator.failures.discard_attempt(address, begun_at)
        raise
    authenticator.failures.discard_attempt(address, begun_at)
    return identity


async def _record_failure(error: TimebellError, request: Request, address: str) -> None:
    """Log, count and record a failed sign-in; end the open sessions of a user who has lost every role."""
    authenticator: Authenticator = request.app.state.authenticator
    sessions: Sessions = request.app.state.sessions
    if isinstance(error, SignInFailed):
        log.warning("could not sign in at identity provider address=%s reason=%s", address, error.reason)
        authenticator.failures.record("wrong_token", address)
    elif isinstance(error, ProviderUnavailable):
        log.warning("could not reach identity provider error=%s", error.reason)
    elif isinstance(error, Refused):
        authenticator.failures.record("refused_identity", address)
    if isinstance(error, SignInFailed | Refused):
        await authenticator.refusals.record(
            tenant_id="default", actor=UNKNOWN_ACTOR, actor_kind="user", network=client_network(address),
            address=address, action="session.begin", code=error.code, request_id=request.state.id,
            authenticated=False,
        )  # fmt: skip
    if isinstance(error, NoRole):
        await sessions.end_sessions_of_identity(error.issuer, error.subject)


def _set_attempt_cookie(response: Response, value: str | None) -> None:
    """Set the cookie of the attempt; None: delete it. SameSite=Lax, because the provider sends the browser back."""
    response.set_cookie(
        ATTEMPT_COOKIE, value or "", max_age=0 if value is None else ATTEMPT_MAX_AGE_SECONDS, path="/", secure=True,
        httponly=True, samesite="lax",
    )  # fmt: skip
