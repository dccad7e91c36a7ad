"""Errors over HTTP: RFC 9457 problems with a stable code, and never a stack trace."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = logging.getLogger("timebell.api")


def problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """One problem as a response."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    return JSONResponse(body, status, headers, media_type="application/problem+json")


def install(web: FastAPI) -> None:
    """Make every error of this application a problem."""

    @web.exception_handler(HTTPException)
    async def _refused(request: Request, refused: HTTPException) -> JSONResponse:
        code = HTTPStatus(refused.status_code).name
        headers = dict(refused.headers or {})
        return problem(refused.status_code, code, f"{request.method} {request.url.path}: {refused.detail}.", headers)

    @web.exception_handler(Exception)
    async def _broken(request: Request, broken: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=broken)
        return problem(500, "INTERNAL_ERROR", "This is a fault of Timebell; its log says more.")
