"""The API, asked from within the process in the name of whoever looks at a page.

A page has no rules of its own: what a caller may see and do, the limits, the audit record and the transaction of a
change are those of the API, as its one wall (`api/route.py`) has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlencode

import orjson
from fastapi import FastAPI

from timebell.api import v1
from timebell.api.authentication import Caller, Door
from timebell.api.problems import install
from timebell.api.route import PREFIX


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API answered."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def refused(self) -> bool:
        """Whether the body is a problem."""
        return self.status >= 400


class Refusal(Exception):
    """A problem that the API answered with."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body.get("detail", ""))
        self.answer = answer


@dataclass
class Inside:
    """The API of a door, without a socket between."""

    door: Door
    _web: FastAPI = field(default_factory=lambda: FastAPI(docs_url=None, redoc_url=None, openapi_url=None))

    def __post_init__(self) -> None:
        self._web.state.door = self.door
        install(self._web)
        self._web.router.routes.extend(v1.routes.routes)

    async def ask(
        self, caller: Caller, request_id: str, method: str, path: str, body: Any = None,
        query: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        """One request; `path` is below /api/v1 and quoted already, members of None are left out of the query."""
        content = b"" if body is None else orjson.dumps(body)
        given = {"content-type": "application/json"} if content else {}
        asked = {name: value for name, value in (query or {}).items() if value not in (None, "")}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": PREFIX + unquote(path), "raw_path": (PREFIX + path).encode(), "root_path": "",
            "query_string": urlencode(asked, doseq=True).encode(), "server": None, "client": (caller.address, 0),
            "headers": [(name.lower().encode(), text.encode()) for name, text in {**given, **(headers or {})}.items()],
            "state": {"id": request_id, "headers": {}, "caller": caller},
        }  # fmt: skip
        began: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                began.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._web(scope, receive, send)
        told = {name.decode(): value.decode() for name, value in began["headers"]}
        text = b"".join(parts)
        return Answer(began["status"], orjson.loads(text) if text else None, told)


def part(text: str) -> str:
    """One part of a path, quoted."""
    return quote(text, safe="")
