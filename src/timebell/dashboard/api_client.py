"""In-process client of the HTTP API, used by all pages in the name of the signed-in user.

Pages have no rules of their own: `api/route.py` applies permissions, limits, transactions and the audit log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlencode

import orjson
from fastapi import FastAPI

from timebell.api import v1
from timebell.api.authentication import Authenticator, Caller
from timebell.api.problems import install_handlers
from timebell.api.route import API_PREFIX


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """Response of the API; `body` is decoded JSON."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def is_error(self) -> bool:
        """True if the body is a problem document."""
        return self.status >= 400


class ApiError(Exception):
    """The API returned a problem."""

    def __init__(self, response: ApiResponse) -> None:
        super().__init__(response.body.get("detail", ""))
        self.response = response


@dataclass
class ApiClient:
    """Call the API as an ASGI application, without a socket."""

    authenticator: Authenticator
    _application: FastAPI = field(default_factory=lambda: FastAPI(docs_url=None, redoc_url=None, openapi_url=None))

    def __post_init__(self) -> None:
        self._application.state.authenticator = self.authenticator
        install_handlers(self._application, self.authenticator.app.clock)
        self._application.router.routes.extend(v1.build_routes(self.authenticator.app.features).routes)

    async def request(
        self, caller: Caller, request_id: str, method: str, path: str, body: Any = None,
        query: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None,
    ) -> ApiResponse:  # fmt: skip
        """Send one request.

        `path` is relative to /api/v1 and already quoted. A `body` of bytes is sent as it is, any other as JSON. Query
        parameters that are None or empty are omitted. The scope carries `caller`, so the API does not authenticate
        again.
        """
        content = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        all_headers = {**({"content-type": "application/json"} if content else {}), **(headers or {})}
        parameters = {name: value for name, value in (query or {}).items() if value not in (None, "")}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": API_PREFIX + unquote(path), "raw_path": (API_PREFIX + path).encode(), "root_path": "",
            "query_string": urlencode(parameters, doseq=True).encode(), "server": None, "client": (caller.address, 0),
            "headers": [(name.lower().encode(), text.encode()) for name, text in all_headers.items()],
            "state": {"id": request_id, "headers": {}, "caller": caller},
        }  # fmt: skip
        start: dict[str, Any] = {}
        chunks: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                chunks.append(message.get("body", b""))

        await self._application(scope, receive, send)
        response_headers = {name.decode(): value.decode() for name, value in start["headers"]}
        received = b"".join(chunks)
        return ApiResponse(start["status"], orjson.loads(received) if received else None, response_headers)


def quote_segment(text: str) -> str:
    """Percent-encode one path segment, including slashes."""
    return quote(text, safe="")
