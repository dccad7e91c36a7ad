"""HTTP client of the commands: calls a Timebell server with the key and tenant of the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID, uuid4

from timebell.cli.output import print_message
from timebell.errors import Conflict, InvalidInput, NotFound, Refused, ServerError, ServerUnreachable, TimebellError
from timebell.settings import Settings, load

REQUEST_TIMEOUT_SECONDS = 30.0
DOWNLOAD_BLOCK_BYTES = 65_536
PAGE_SIZE = 200
ERROR_BY_STATUS: dict[int, type[TimebellError]] = {
    400: InvalidInput, 401: Refused, 403: Refused, 404: NotFound, 409: Conflict, 412: Conflict, 413: InvalidInput,
    415: InvalidInput, 422: InvalidInput, 428: InvalidInput, 429: Refused,
}  # fmt: skip


def has_server(settings: Settings) -> bool:
    """Return whether a server is configured: by its address, or by a key."""
    return settings.api_key is not None or settings.url != Settings().url


class ServerClient:
    """Client of one server. `settings` provides its URL, API key and tenant."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load()
        headers = {"Accept": "application/json", "User-Agent": "timebell", "Connection": "close"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        if self.settings.tenant:
            headers["Timebell-Tenant"] = self.settings.tenant
        self._headers = headers

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Any:
        """Send a request and return the decoded body of the response.

        Raises the TimebellError that the server reports, or ServerUnreachable. A request is sent once more when its
        connection is lost, except for PATCH and after a timeout. A POST carries an Idempotency-Key, so this is safe.
        """
        headers = {} if if_match is None else {"If-Match": if_match}
        if method == "POST":
            headers["Idempotency-Key"] = str(uuid4())
        for last in (False, True):
            with self._open_connection() as connection:
                try:
                    response = self._send(connection, method, path, body, params, headers)
                    content = response.read()
                except (OSError, HTTPException, ValueError) as failed:
                    if last or method == "PATCH" or isinstance(failed, TimeoutError | ValueError):
                        raise self._unreachable(failed) from failed
                else:
                    body = parse_response(response.status, content)
                    if method != "GET" and isinstance(body, dict):
                        for warning in body.get("warnings") or ():
                            print_message(f"warning: {warning}")
                    return body
        raise AssertionError

    def upload(self, path: str, content: bytes, content_type: str) -> Any:
        """POST a body that is not JSON, and return the decoded body of the response. Raises as `request`."""
        with self._open_connection() as connection:
            try:
                response = self._send(connection, "POST", path, content, None, {"Content-Type": content_type})
                return parse_response(response.status, response.read())
            except (OSError, HTTPException, ValueError) as failed:
                raise self._unreachable(failed) from failed

    def stream_lines(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the lines of an endless response."""
        with self._open_connection() as connection:
            try:
                sock = connection.sock  # http.client detaches it from a response without a length, so keep a reference
                response = self._send(connection, "GET", path, None, params, {})
                if response.status != 200:
                    parse_response(response.status, response.read())
                sock.settimeout(None)
                for line in response:
                    yield line.decode().rstrip("\r\n")
            except (OSError, HTTPException, ValueError) as failed:
                raise self._unreachable(failed) from failed

    def download(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """Yield the content of a file. Raises as `request`, also if the file is incomplete."""
        with self._open_connection() as connection:
            try:
                response = self._send(connection, "GET", path, None, params, {})
                if response.status != 200:
                    parse_response(response.status, response.read())
                while block := response.read1(DOWNLOAD_BLOCK_BYTES):
                    yield block
            except (OSError, HTTPException, ValueError) as failed:
                raise self._unreachable(failed) from failed

    @contextmanager
    def _open_connection(self) -> Iterator[HTTPConnection]:
        """Open a connection and close it afterwards. Raises ServerUnreachable."""
        try:
            connection = self._create_connection()
            connection.connect()
        except (OSError, ValueError, HTTPException) as failed:
            raise self._unreachable(failed) from failed
        try:
            yield connection
        finally:
            connection.close()

    def _create_connection(self) -> HTTPConnection:
        address = urlsplit(self.settings.url)
        if address.hostname and address.scheme == "http":
            return HTTPConnection(address.hostname, address.port or 80, timeout=REQUEST_TIMEOUT_SECONDS)
        if address.hostname and address.scheme == "https":
            from timebell.http_client import tls_context

            return HTTPSConnection(
                address.hostname, address.port or 443, timeout=REQUEST_TIMEOUT_SECONDS, context=tls_context()
            )
        raise ValueError("the URL is not an http or https address")

    def _send(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: Any,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> HTTPResponse:
        pairs = [(name, value if isinstance(value, str) else json.dumps(value))
                 for name, values in (params or {}).items() if values is not None
                 for value in (values if isinstance(values, list | tuple) else [values])]  # fmt: skip
        base = urlsplit(self.settings.url).path.rstrip("/")
        target = quote(f"{base}/api/v1{path}", safe="%/:?[]@!$&'()*+,;=")  # RFC 3986
        if pairs:
            target += f"{'&' if '?' in path else '?'}{urlencode(pairs)}"
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        content_headers = {} if content is None else {"Content-Type": "application/json"}
        connection.request(method, target, content, self._headers | content_headers | dict(headers))
        return connection.getresponse()

    def list_items(
        self, path: str, params: Mapping[str, Any] | None = None, max_items: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield all items of a listing, or the first `max_items`, page by page."""
        count = 0
        cursor = None
        while max_items is None or count < max_items:
            limit = PAGE_SIZE if max_items is None else min(PAGE_SIZE, max_items - count)
            page = self.request("GET", path, params={**(params or {}), "limit": limit, "cursor": cursor})
            yield from page["items"]
            count += len(page["items"])
            cursor = page["nextCursor"]
            if cursor is None:
                return

    def get_schedule(self, name_or_id: str) -> dict[str, Any]:
        """Return a schedule by id or name. Raises NotFound."""
        try:
            schedule = self.request("GET", f"/schedules/{UUID(name_or_id)}")
        except ValueError:
            items = self.request("GET", "/schedules", params={"name": name_or_id, "limit": 1})["items"]
            if not items:
                raise self._schedule_not_found(name_or_id) from None
            schedule = items[0]
        return dict(schedule)

    def _schedule_not_found(self, name: str) -> NotFound:
        from difflib import get_close_matches

        names = [schedule["name"] for schedule in self.list_items("/schedules", max_items=1000)]
        near = get_close_matches(name, names, 1)
        return NotFound(
            f"There is no schedule {name!r:.80}.", code="SCHEDULE_NOT_FOUND",
            fix=f"Did you mean {near[0]}?" if near else "Try: timebell schedule list.",
        )  # fmt: skip

    def _unreachable(self, error: Exception) -> ServerUnreachable:
        return ServerUnreachable(
            f"The server {self.settings.url} does not answer: {error or type(error).__name__}.",
            fix="Start one with timebell dev or timebell run, or set TIMEBELL_URL.",
        )


def parse_response(status: int, body: bytes) -> Any:
    """Return the decoded body of a response; raise its error unless the status is 2xx."""
    try:
        content: Any = json.loads(body) if body else None
        if 200 <= status < 300:
            return content
        message, code = str(content["detail"]), str(content["code"])
    except (ValueError, KeyError, TypeError):
        raise ServerError(
            f"The response (status {status}) is not from a Timebell server.", fix="Check TIMEBELL_URL."
        ) from None
    kind = ERROR_BY_STATUS.get(status, ServerError)
    raise kind(message, code=code, fix=content.get("fix", ""))
