"""The API and the dashboard inside another ASGI application: `web.mount("/bell", mounted(bell))` of FastAPI or
Starlette, and whatever else mounts the way they do."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from timebell.api import v1
from timebell.api.server import Site
from timebell.app import Timebell
from timebell.dashboard import site

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
            headers = MutableHeaders(raw=list(message["headers"]))
            for name, value in self._changed(headers):
                headers[name] = value
            cookies = [value.replace("path=/ui", f"path={self._prefix}/ui").replace("Path=/ui", f"Path={self._prefix}/ui")
                       for value in headers.getlist("set-cookie")]  # fmt: skip
            del headers["set-cookie"]
            for cookie in cookies:
                headers.append("set-cookie", cookie)
            message = {**message, "headers": headers.raw}
            kind = headers.get("content-type", "").partition(";")[0]
            if self._prefix and kind in TEXTS:
                self._start, self._streams = message, kind == "text/event-stream"
                if not self._streams:
                    return
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
        return body.replace(b'"/ui/', b'"%s/ui/' % prefix).replace(b"path=/ui;", b"path=%s/ui;" % prefix)

    def _changed(self, headers: MutableHeaders) -> Iterator[tuple[str, str]]:
        for name in ("location", "hx-redirect", "hx-location"):
            if headers.get(name, "").startswith(("/ui/", "/api/")):
                yield name, self._prefix + headers[name]
