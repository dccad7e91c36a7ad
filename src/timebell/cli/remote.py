"""A Timebell server, as commands speak to it: over HTTP, with the key and tenant of the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID, uuid4

from timebell.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    Refused,
    ServerError,
    ServerUnreachable,
    TimebellError,
)
from timebell.settings import Settings, load

PATIENCE = 30.0  # seconds for an answer
PAGE = 200
KINDS: dict[int, type[TimebellError]] = {
    400: InvalidInput, 401: Refused, 403: Refused, 404: NotFound, 409: Conflict, 412: Conflict, 413: InvalidInput,
    415: InvalidInput, 422: InvalidInput, 428: InvalidInput, 429: Refused,
}  # fmt: skip


class Remote:
    """The server."""

    def __init__(self, chosen: Settings | None = None) -> None:
        self.settings = chosen or load()
        headers = {"Accept": "application/json", "User-Agent": "timebell", "Connection": "close"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        if self.settings.tenant:
            headers["Timebell-Tenant"] = self.settings.tenant
        self._headers = headers

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        match: str | None = None,
    ) -> Any:
        """The body of an answer. Raises TimebellError as the server says it; ServerUnreachable.

        A POST carries an Idempotency-Key, so it is sent again when the connection is lost.
        """
        headers = {} if match is None else {"If-Match": match}
        if method == "POST":
            headers["Idempotency-Key"] = str(uuid4())
        for last in (False, True):
            with self._connected() as connection:
                try:
                    response = self._request(connection, method, path, body, params, headers)
                    said = response.read()
                except (OSError, HTTPException, ValueError) as failed:
                    if last or method == "PATCH" or isinstance(failed, TimeoutError | ValueError):
                        raise self._unreachable(failed) from failed
                else:
                    return read(response.status, said)
        raise AssertionError

    def lines(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[str]:
        """The lines of an answer that does not end."""
        with self._connected() as connection:
            try:
                sock = connection.sock  # an answer that ends with its connection takes it over
                response = self._request(connection, "GET", path, None, params, {})
                if response.status != 200:
                    read(response.status, response.read())
                sock.settimeout(None)
                for line in response:
                    yield line.decode().rstrip("\r\n")
            except (OSError, HTTPException, ValueError) as failed:
                raise self._unreachable(failed) from failed

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """A connection. Raises ServerUnreachable."""
        try:
            connection = self._connection()
            connection.connect()
        except (OSError, ValueError, HTTPException) as failed:
            raise self._unreachable(failed) from failed
        try:
            yield connection
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        at = urlsplit(self.settings.url)
        if at.hostname and at.scheme == "http":
            return HTTPConnection(at.hostname, at.port or 80, timeout=PATIENCE)
        if at.hostname and at.scheme == "https":
            from timebell.http_client import trusted

            return HTTPSConnection(at.hostname, at.port or 443, timeout=PATIENCE, context=trusted())
        raise ValueError("it is no address of http or https")

    def _request(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: Any,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> HTTPResponse:
        given = [(name, value if isinstance(value, str) else json.dumps(value))
                 for name, values in (params or {}).items() if values is not None
                 for value in (values if isinstance(values, list) else [values])]  # fmt: skip
        base = urlsplit(self.settings.url).path.rstrip("/")
        target = quote(f"{base}/api/v1{path}", safe="%/:?[]@!$&'()*+,;=")  # RFC 3986
        if given:
            target += f"{'&' if '?' in path else '?'}{urlencode(given)}"
        sent = None if body is None else json.dumps(body).encode()
        kind = {} if sent is None else {"Content-Type": "application/json"}
        connection.request(method, target, sent, self._headers | kind | dict(headers))
        return connection.getresponse()

    def pages(
        self, path: str, params: Mapping[str, Any] | None = None, most: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Every item of a listing, or the first `most`."""
        count = 0
        cursor = None
        while most is None or count < most:
            limit = PAGE if most is None else min(PAGE, most - count)
            page = self.ask("GET", path, params={**(params or {}), "limit": limit, "cursor": cursor})
            yield from page["items"]
            count += len(page["items"])
            cursor = page["nextCursor"]
            if cursor is None:
                return

    def schedule(self, named: str) -> dict[str, Any]:
        """A schedule by its id or its name. Raises NotFound."""
        try:
            found = self.ask("GET", f"/schedules/{UUID(named)}")
        except ValueError:
            items = self.ask("GET", "/schedules", params={"name": named, "limit": 1})["items"]
            if not items:
                raise self._no_such_schedule(named) from None
            found = items[0]
        return dict(found)

    def _no_such_schedule(self, named: str) -> NotFound:
        from difflib import get_close_matches

        names = [one["name"] for one in self.pages("/schedules", most=1000)]
        near = get_close_matches(named, names, 1)
        return NotFound(
            f"There is no schedule {named!r:.80}.", code="SCHEDULE_NOT_FOUND",
            fix=f"Did you mean {near[0]}?" if near else "timebell schedule list shows them.",
        )  # fmt: skip

    def _unreachable(self, failed: Exception) -> ServerUnreachable:
        return ServerUnreachable(
            f"The server {self.settings.url} does not answer: {failed or type(failed).__name__}.",
            fix="Start one with timebell dev or timebell run, or set TIMEBELL_URL.",
        )


def read(status: int, body: bytes) -> Any:
    """The body of an answer, or the error that it is."""
    try:
        said: Any = json.loads(body) if body else None
        if 200 <= status < 300:
            return said
        message, code = str(said["detail"]), str(said["code"])
    except (ValueError, KeyError, TypeError):
        raise ServerError(
            f"The server answered {status}, and not as Timebell does.", fix="Check TIMEBELL_URL."
        ) from None
    kind = KINDS.get(status, ServerError)
    raise kind(message, code=code, fix=said.get("fix", ""))
