"""Error responses: RFC 9457 problems with a stable code, without stack traces."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from logging import DEBUG, WARNING
from math import ceil, inf
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from timebell.api.admission import BodyTooLarge, TooBusy
from timebell.api.authentication import Unauthorized
from timebell.api.authentication_failures import TooManySignIns
from timebell.api.provider_cache import ProviderUnavailable
from timebell.api.route import BodyTooSlow, MediaTypeUnsupported, ReportTooSlow
from timebell.api.schemas import UnknownField
from timebell.clock import Clock
from timebell.errors import (
    Conflict,
    InThePast,
    InvalidInput,
    NotFound,
    Refused,
    RevisionMissing,
    RevisionStale,
    StoreError,
    TimebellError,
)
from timebell.store.unavailability import BY_CODE, UNREACHABLE
from timebell.tenancy.limits import LimitReached

log = logging.getLogger("timebell.api")
OUTAGE_LOG_SECONDS = 60.0  # until a request that fails for the same reason is logged again

STATUS_BY_ERROR: tuple[tuple[type[TimebellError], int], ...] = (
    (Unauthorized, 401), (TooManySignIns, 429), (LimitReached, 429), (BodyTooLarge, 413),
    (BodyTooSlow, 408), (MediaTypeUnsupported, 415),
    (RevisionStale, 412), (RevisionMissing, 428), (InThePast, 400), (NotFound, 404), (Conflict, 409), (Refused, 403),
    (StoreError, 503), (TooBusy, 503), (ReportTooSlow, 503), (ProviderUnavailable, 503), (InvalidInput, 422),
)  # fmt: skip
# JSON pointer of the field that an error code refers to.
POINTERS = {
    "INVALID_CRON": "/cronExpression", "INVALID_RRULE": "/rrule", "INVALID_INTERVAL": "/interval",
    "INVALID_DATES": "/dates", "INVALID_TIMEZONE": "/timezone", "TIMEZONE_MISSING": "/timezone",
    "INVALID_RUN_AT": "/runAt", "RUN_AT_WITHOUT_TIMEZONE": "/timezone", "PAYLOAD_TOO_LARGE": "/payload",
    "INVALID_RETRY": "/retry", "UNKNOWN_TARGET_KIND": "/target", "INVALID_TARGET_OPTIONS": "/target",
    "INVALID_URL": "/target/url", "INVALID_LABELS": "/labels", "INVALID_KEY": "/key", "INVALID_QUEUE": "/queue",
    "INVALID_CALENDAR": "/calendar", "CALENDAR_NOT_FOUND": "/calendar", "NAME_MISSING": "/name",
    "TOPIC_MISSING": "/topic", "INVALID_TOPIC": "/topic", "INVALID_CURSOR": "query cursor",
}  # fmt: skip
PRESERVED_CODES = ("UNKNOWN_FIELD",)
BAD_REQUEST_CODES = ("INVALID_JSON", "KEY_IN_URL")


def problem_response(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **members: Any,
) -> Response:
    """Return a problem response. Members that are None are omitted."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    body |= {name: value for name, value in members.items() if value is not None}
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/problem+json")


def problem_for(
    error: TimebellError, request_id: str | None, errors: Sequence[Mapping[str, Any]] | None = None
) -> Response:
    """Return the problem response for a TimebellError."""
    status = (
        400
        if error.code in BAD_REQUEST_CODES
        else next((code for kind, code in STATUS_BY_ERROR if isinstance(error, kind)), 500)
    )
    headers = {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="timebell"'
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        headers["Connection"] = "close"  # the rest of the request body is not read
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        after = getattr(error, "retry_after", None)
        headers["Retry-After"] = str(ceil(after or 60))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    detail = error.message
    if isinstance(error, StoreError):  # its message may contain the address of the database
        detail = f"The database {BY_CODE.get(error.code, UNREACHABLE).description}."
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and errors is None:
        fix = {"fix": error.fix} if error.fix else {}
        errors = [{"pointer": POINTERS.get(error.code, ""), "detail": error.message, "code": error.code, **fix}]
    return problem_response(
        status, error.code, detail, headers, fix=error.fix or None, existing=getattr(error, "existing", None),
        limit=getattr(error, "limit", None), errors=errors, requestId=request_id,
    )  # fmt: skip


class _OutageLog:
    """Log an outage of the database once a minute, not once per request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def log(self, request: Request, error: StoreError) -> None:
        now = self._clock.monotonic()
        is_repeated = now - self._logged_at.get(error.code, -inf) < OUTAGE_LOG_SECONDS
        if not is_repeated:
            self._logged_at[error.code] = now
        log.log(DEBUG if is_repeated else WARNING, "%s %s: %s", request.method, request.url.path, error)


def install_handlers(web: FastAPI, clock: Clock) -> None:
    """Install exception handlers that turn every error into a problem response."""
    outages = _OutageLog(clock)

    @web.exception_handler(TimebellError)
    async def _handle_timebell_error(request: Request, error: TimebellError) -> Response:
        if isinstance(error, StoreError):
            outages.log(request, error)
        return problem_for(error, _request_id(request))

    @web.exception_handler(RequestValidationError)
    async def _handle_validation_error(request: Request, invalid: RequestValidationError) -> Response:
        errors = [_render_field_error(error) for error in invalid.errors()[:20]]
        first = errors[0] if errors else {"detail": "The request is invalid.", "pointer": "", "code": ""}
        code = first["code"]
        return problem_response(
            422,
            code if code in PRESERVED_CODES else "INVALID_FIELDS",
            first["detail"],
            fix=first.get("fix"),
            errors=errors,
            requestId=_request_id(request),
        )

    @web.exception_handler(HTTPException)
    async def _handle_http_exception(request: Request, error: HTTPException) -> Response:
        code = HTTPStatus(error.status_code).name
        detail = f"{request.method} {request.url.path}: {error.detail}."
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = allowed_methods(web.router.routes, request.scope)
        is_missing = error.status_code == HTTPStatus.NOT_FOUND
        fix = "Remove the / at the end." if is_missing and request.url.path.endswith("/") else None
        return problem_response(error.status_code, code, detail, headers, fix=fix, requestId=_request_id(request))

    @web.exception_handler(Exception)
    async def _handle_unexpected_error(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(
            500, "INTERNAL_ERROR", "Internal error of Timebell; see its log.", requestId=_request_id(request)
        )


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """Return the methods of a path for `Allow`, comma-separated; empty if there is no such path.

    A literal path such as `/jobs/preview` does not have the methods of `/jobs/{id}`.
    """
    literal: set[str] = set()
    with_parameters: set[str] = set()
    for route in routes:
        if isinstance(route, Route):
            match, child_scope = route.matches(scope)
            if match is not Match.NONE:
                (with_parameters if child_scope.get("path_params") else literal).update(route.methods or ())
    methods = literal or with_parameters
    if not methods:
        return ""
    return ", ".join(sorted({*methods, "OPTIONS", *({"HEAD"} if "GET" in methods else ())}))


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "id", None)


_FIELD_TEXTS = {
    "missing": "is missing.",
    "string_type": "must be text.",
    "string_too_short": "is too short; the minimum length is {min_length}.",
    "string_too_long": "is too long; the maximum length is {max_length}.",
    "string_pattern_mismatch": "does not match {pattern}.",
    "int_type": "must be a whole number.",
    "int_parsing": "must be a whole number.",
    "int_from_float": "must be a whole number.",
    "float_type": "must be a number.",
    "float_parsing": "must be a number.",
    "finite_number": "must be a finite number.",
    "bool_type": "must be true or false.",
    "bool_parsing": "must be true or false.",
    "greater_than": "must be more than {gt}.",
    "greater_than_equal": "must be at least {ge}.",
    "less_than": "must be less than {lt}.",
    "less_than_equal": "must be at most {le}.",
    "literal_error": "must be {expected}.",
    "enum": "must be {expected}.",
    "list_type": "must be a list.",
    "dict_type": "must be an object.",
    "model_type": "must be an object.",
    "model_attributes_type": "must be an object.",
    "too_short": "has too few items; the minimum is {min_length}.",
    "too_long": "has too many items; the maximum is {max_length}.",
}
"""Types of Pydantic's errors -> the rest of a sentence that begins with the name of the field."""


def _describe_field_error(place: str, path: Sequence[str], error: Mapping[str, Any]) -> str:
    name = ".".join(path)
    subject = name or "The body" if place == "body" else f"The {place} parameter {name}"
    context = error.get("ctx", {})
    if isinstance(cause := context.get("error"), ValueError):  # of a validator of ours
        return str(cause)
    if (rest := _FIELD_TEXTS.get(error["type"])) is not None:
        return f"{subject} {rest.format(**context)}"
    return f"{subject}: {error['msg']}."


def _render_field_error(error: Mapping[str, Any]) -> dict[str, str]:
    """Convert a Pydantic error to a pointer, a detail text and a code."""
    location = [str(part) for part in error["loc"]]
    place, rest = location[0], location[1:]
    pointer = "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in rest) if rest else ""
    if place != "body":
        pointer = f"{place} {'.'.join(rest)}"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, UnknownField):
        pointer = f"{pointer.rstrip('/')}/{cause.name}"
    if isinstance(cause, TimebellError):
        fix = {"fix": cause.fix} if cause.fix else {}
        return {"pointer": pointer, "detail": cause.message, "code": cause.code} | fix
    detail = _describe_field_error(place, rest, error)
    return {"pointer": pointer, "detail": detail, "code": str(error["type"]).upper()}
