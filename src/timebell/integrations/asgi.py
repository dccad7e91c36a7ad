"""Mount the API and the dashboard in another ASGI application, such as FastAPI or Starlette.

`web.mount("/bell", asgi_app(bell))`
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from timebell.app import Timebell
from timebell.errors import Refused

try:
    from starlette.datastructures import MutableHeaders
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from timebell.api import v1
    from timebell.api.server import HttpApp
    from timebell.dashboard import site
except ModuleNotFoundError as missing:
    raise Refused(
        f"The API and the dashboard need the package {missing.name}, which is not installed.", code="EXTRA_MISSING",
        fix='Run: pip install "timebell[server]".',
    ) from missing  # fmt: skip

COOKIE_PATH = re.compile(r"(;\s*path=)/ui\b", re.IGNORECASE)
UI_LINK = re.compile(rb'(?<!value=)"/ui/')  # form values are sent back to the dashboard and stay unchanged
REWRITTEN_TYPES = ("text/html", "text/event-stream", "text/javascript", "application/javascript")


def asgi_app(app: Timebell, *, api: bool = True, ui: bool = True) -> ASGIApp:
    """Return an ASGI application with `/api/v1` (if `api`) and `/ui/` (if `ui`), to mount under a prefix.

    API keys, sign-in and `TIMEBELL_SECRET_KEY` work as in a standalone server. Links in pages include the prefix and
    the `root_path` of a proxy.
    """
    web = HttpApp(
        app, [*([v1.build_routes(app.features)] if api else []), *([site.build_routes(app.features)] if ui else [])]
    )

    async def mounted_app(scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        inner_scope = dict(scope, root_path="", path=scope["path"].removeprefix(prefix) or "/")
        inner_scope.pop("app", None)  # these belong to the outer application
        inner_scope.pop("router", None)
        inner_scope["state"] = dict(scope.get("state") or {})
        await web(inner_scope, receive, _PrefixRewriter(prefix, send).send)

    return mounted_app


class _PrefixRewriter:
    """Adds the prefix to URLs of Timebell in responses.

    Pages are HTML-escaped, so a URL after an unescaped quotation mark is always part of a template, never user text.
    """

    def __init__(self, prefix: str, send: Send) -> None:
        self._prefix, self._send = prefix, send
        self._start_message: Message | None = None
        self._body_parts: list[bytes] = []
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message."""
        if message["type"] == "http.response.start":
            headers = self._rewrite_headers(message["headers"])
            message = {**message, "headers": headers.raw}
            kind = headers.get("content-type", "").partition(";")[0]
            if self._prefix and kind in REWRITTEN_TYPES:
                self._start_message, self._is_stream = message, kind == "text/event-stream"
            if self._start_message is None or self._is_stream:
                await self._send(message)
        elif self._start_message is None:
            await self._send(message)
        elif self._is_stream:  # one message is one event
            await self._send({**message, "body": self._rewrite_body(message.get("body", b""))})
        else:
            await self._buffer_page(message)

    async def _buffer_page(self, message: Message) -> None:
        """Buffer a page; send it when it is complete, with the new content length."""
        self._body_parts.append(message.get("body", b""))
        if message.get("more_body"):
            return
        assert self._start_message is not None
        body = self._rewrite_body(b"".join(self._body_parts))
        headers = MutableHeaders(raw=list(self._start_message["headers"]))
        if body:
            headers["content-length"] = str(len(body))
        await self._send({**self._start_message, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})

    def _rewrite_body(self, body: bytes) -> bytes:
        prefix = self._prefix.encode()
        return UI_LINK.sub(lambda _: b'"%s/ui/' % prefix, body).replace(b"path=/ui;", b"path=%s/ui;" % prefix)

    def _rewrite_headers(self, raw_headers: Iterable[tuple[bytes, bytes]]) -> MutableHeaders:
        """Add the prefix to the Location header and to cookie paths."""
        headers = MutableHeaders(raw=list(raw_headers))
        cookies = headers.getlist("set-cookie")
        del headers["set-cookie"]
        for cookie in cookies:
            headers.append("set-cookie", COOKIE_PATH.sub(rf"\g<1>{self._prefix}/ui", cookie))
        if headers.get("location", "").startswith(("/ui/", "/api/")):
            headers["location"] = self._prefix + headers["location"]
        return headers
