"""Errors over HTTP: RFC 9457 problems with a stable code, and never a stack trace."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from timebell.api.authentication import TooManyWrongKeys, Unauthorized
from timebell.api.route import BodyTooLarge, BodyTooSlow, MediaTypeUnsupported
from timebell.api.schemas import UnknownField
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
from timebell.tenancy.limits import LimitReached

log = logging.getLogger("timebell.api")

STATUS: tuple[tuple[type[TimebellError], int], ...] = (
    (Unauthorized, 401), (TooManyWrongKeys, 429), (LimitReached, 429), (BodyTooLarge, 413),
    (BodyTooSlow, 408), (MediaTypeUnsupported, 415),
    (RevisionStale, 412), (RevisionMissing, 428), (InThePast, 400), (NotFound, 404), (Conflict, 409), (Refused, 403),
    (StoreError, 503), (InvalidInput, 422),
)  # fmt: skip
# The field that an error of ours is about, where its code says so.
POINTERS = {
    "INVALID_CRON": "/cronExpression", "INVALID_RRULE": "/rrule", "INVALID_INTERVAL": "/interval",
    "INVALID_DATES": "/dates", "INVALID_TIMEZONE": "/timezone", "TIMEZONE_MISSING": "/timezone",
    "RUN_AT_INVALID": "/runAt", "RUN_AT_WITHOUT_TIMEZONE": "/timezone", "PAYLOAD_TOO_LARGE": "/payload",
    "INVALID_RETRY": "/retry", "TARGET_UNKNOWN": "/target", "TARGET_OPTIONS_INVALID": "/target",
    "URL_INVALID": "/target/url", "INVALID_LABELS": "/labels", "INVALID_KEY": "/key", "INVALID_QUEUE": "/queue",
    "INVALID_CALENDAR": "/calendar", "CALENDAR_NOT_FOUND": "/calendar", "NAME_MISSING": "/name",
    "TOPIC_MISSING": "/topic", "TOPIC_INVALID": "/topic", "INVALID_CURSOR": "query cursor",
}  # fmt: skip
OURS = ("UNKNOWN_FIELD",)
UNPARSED = ("JSON_INVALID", "KEY_IN_URL")


def problem(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    """One problem as a response; members of None are left out."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    body |= {name: value for name, value in more.items() if value is not None}
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/problem+json")


def of(error: TimebellError, request_id: str | None, errors: Sequence[Mapping[str, Any]] | None = None) -> Response:
    """The problem that an error of ours is."""
    status = 400 if error.code in UNPARSED else next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    headers = {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="timebell"'
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        headers["Connection"] = "close"  # the rest of the body is not read
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        after = getattr(error, "retry_after", None)
        headers["Retry-After"] = str(math.ceil(after or 60))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
        detail = "The database does not answer."
    else:
        detail = error.message
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and errors is None:
        fix = {"fix": error.fix} if error.fix else {}
        errors = [{"pointer": POINTERS.get(error.code, ""), "detail": error.message, "code": error.code, **fix}]
    return problem(
        status, error.code, detail, headers, fix=error.fix or None, existing=getattr(error, "existing", None),
        limit=getattr(error, "limit", None), errors=errors, requestId=request_id,
    )  # fmt: skip


def install(web: FastAPI) -> None:
    """Make every error of this application a problem."""

    @web.exception_handler(TimebellError)
    async def _ours(request: Request, error: TimebellError) -> Response:
        if isinstance(error, StoreError):
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return of(error, _id(request))

    @web.exception_handler(RequestValidationError)
    async def _unfit(request: Request, unfit: RequestValidationError) -> Response:
        errors = [_field(error) for error in unfit.errors()[:20]]
        first = errors[0] if errors else {"detail": "It does not fit.", "pointer": "", "code": ""}
        said = f"{first['pointer'] or 'The request'}: {first['detail']}"
        code = first["code"]
        return problem(
            422,
            code if code in OURS else "FIELDS_INVALID",
            said,
            fix=first.get("fix"),
            errors=errors,
            requestId=_id(request),
        )

    @web.exception_handler(HTTPException)
    async def _refused(request: Request, refused: HTTPException) -> Response:
        code = HTTPStatus(refused.status_code).name
        detail = f"{request.method} {request.url.path}: {refused.detail}."
        return problem(refused.status_code, code, detail, dict(refused.headers or {}), requestId=_id(request))

    @web.exception_handler(Exception)
    async def _broken(request: Request, broken: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=broken)
        return problem(500, "INTERNAL_ERROR", "This is a fault of Timebell; its log says more.", requestId=_id(request))


def _id(request: Request) -> str | None:
    return getattr(request.state, "id", None)


def _field(error: Mapping[str, Any]) -> dict[str, str]:
    """What pydantic says of one field: where, in words, and a code."""
    where = [str(part) for part in error["loc"]]
    place, rest = where[0], where[1:]
    pointer = "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in rest) if rest else ""
    if place != "body":
        pointer = f"{place} {'.'.join(rest)}"
    ours = error.get("ctx", {}).get("error")
    if isinstance(ours, UnknownField):
        pointer = f"{pointer.rstrip('/')}/{ours.name}"
    if isinstance(ours, TimebellError):
        return {"pointer": pointer, "detail": ours.message, "code": ours.code} | ({"fix": ours.fix} if ours.fix else {})
    return {"pointer": pointer, "detail": error["msg"], "code": str(error["type"]).upper()}
