"""A Timebell server, as commands speak to it: over HTTP, with the key and tenant of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import httpx2

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
        headers = {"Accept": "application/json"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        if self.settings.tenant:
            headers["Timebell-Tenant"] = self.settings.tenant
        self._headers = headers
        self._base = self.settings.url.rstrip("/") + "/api/v1"

    def _client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self._base, headers=self._headers, timeout=PATIENCE, trust_env=False)

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
        given = {name: value for name, value in (params or {}).items() if value is not None}
        for last in (False, True):
            try:
                with self._client() as client:
                    sent = {} if body is None else {"json": body}
                    return read(client.request(method, path, params=given, headers=headers, **sent))
            except httpx2.HTTPError as failed:
                if last or method == "PATCH" or isinstance(failed, httpx2.ConnectError | httpx2.TimeoutException):
                    raise self._unreachable(failed) from failed
        raise AssertionError

    def lines(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[str]:
        """The lines of an answer that does not end."""
        try:
            with self._client() as client, client.stream("GET", path, params=params, timeout=None) as response:
                if response.is_error:
                    response.read()
                    read(response)
                yield from response.iter_lines()
        except httpx2.HTTPError as failed:
            raise self._unreachable(failed) from failed

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


def read(response: httpx2.Response) -> Any:
    """The body of an answer, or the error that it is."""
    if not response.is_error:
        return response.json() if response.content else None
    try:
        said = response.json()
        message, code = str(said["detail"]), str(said["code"])
    except (ValueError, KeyError, TypeError):
        raise ServerError(
            f"The server answered {response.status_code}, and not as Timebell does.", fix="Check TIMEBELL_URL."
        ) from None
    kind = KINDS.get(response.status_code, ServerError)
    raise kind(message, code=code, fix=said.get("fix", ""))
