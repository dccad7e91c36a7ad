"""The API and the dashboard inside another ASGI application: `web.mount("/bell", mounted(bell))` of FastAPI or
Starlette, and whatever else mounts the way they do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from timebell.app import Timebell
from timebell.errors import Refused

try:
    from starlette.datastructures import MutableHeaders
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from timebell.api import v1
    from timebell.api.server import Site
    from timebell.dashboard import site
except ModuleNotFoundError as missing:
    raise Refused(
        f"The API and the dashboard need the package {missing.name}, which is not installed.", code="EXTRA_MISSING",
        fix='Run: pip install "timebell[server]".',
    ) from missing  # fmt: skip

COOKIE_PATH = re.compile(r"(;\s*path=)/ui\b", re.IGNORECASE)
ADDRESS = re.compile(rb'(?<!value=)"/ui/')  # what a form says to us stays as it is
TEXTS = ("text/html", "text/event-stream", "text/javascript", "application/javascript")


def mounted(app: Timebell, *, api: bool = True, ui: bool = True) -> ASGIApp:
    """`/api/v1` and `/ui/` of an app, for a prefix of the caller's own application.

    Keys and sign-in are as ever; so is `TIMEBELL_SECRET_KEY`. Pages name their addresses with the prefix, `root_path`
    of a proxy included.
    """
    web = Site(app, [*([v1.routes] if api else []), *([site.routes] if ui else [])])

    async def under_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        inside = dict(scope, root_path="", path=scope["path"].removeprefix(prefix) or "/")
        inside.pop("app", None)  # the outer one's
        inside.pop("router", None)
        inside["state"] = dict(scope.get("state") or {})
        await web(inside, receive, _Outwards(prefix, send).send)

    return under_prefix


class _Outwards:
    """Answers as they are told outside: addresses of ours get the prefix.

    Pages are escaped, so that an address after a plain quotation mark is one of ours and never somebody's text.
    """

    def __init__(self, prefix: str, send: Send) -> None:
        self._prefix, self._send = prefix, send
        self._start: Message | None = None
        self._whole: list[bytes] = []
        self._streams = False

    async def send(self, message: Message) -> None:
        """As ASGI has it."""
        if message["type"] == "http.response.start":
            headers = self._head(message["headers"])
            message = {**message, "headers": headers.raw}
            kind = headers.get("content-type", "").partition(";")[0]
            if self._prefix and kind in TEXTS:
                self._start, self._streams = message, kind == "text/event-stream"
            if self._start is None or self._streams:
                await self._send(message)
        elif self._start is None:
            await self._send(message)
        elif self._streams:  # one message is one event
            await self._send({**message, "body": self._put(message.get("body", b""))})
        else:
            await self._page(message)

    async def _page(self, message: Message) -> None:
        """Gather a page; when it is whole, send it."""
        self._whole.append(message.get("body", b""))
        if message.get("more_body"):
            return
        assert self._start is not None
        body = self._put(b"".join(self._whole))
        headers = MutableHeaders(raw=list(self._start["headers"]))
        if body:
            headers["content-length"] = str(len(body))
        await self._send({**self._start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})

    def _put(self, body: bytes) -> bytes:
        prefix = self._prefix.encode()
        return ADDRESS.sub(lambda _: b'"%s/ui/' % prefix, body).replace(b"path=/ui;", b"path=%s/ui;" % prefix)

    def _head(self, given: Iterable[tuple[bytes, bytes]]) -> MutableHeaders:
        """Where to go on, and where a cookie counts."""
        headers = MutableHeaders(raw=list(given))
        cookies = headers.getlist("set-cookie")
        del headers["set-cookie"]
        for cookie in cookies:
            headers.append("set-cookie", COOKIE_PATH.sub(rf"\g<1>{self._prefix}/ui", cookie))
        if headers.get("location", "").startswith(("/ui/", "/api/")):
            headers["location"] = self._prefix + headers["location"]
        return headers
