"""Adapter for boards of monday.com, read through its GraphQL API, which reports most errors with HTTP status 200.

The fields of an item are its columns by id, and `name`. Dates are UTC instants, as stored by monday.com (a date without
a time is that day), people are lists of ids, other columns are the JSON of their value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from timebell.errors import InvalidInput, Refused, SourceFailed, SourceGone
from timebell.features.triggers.sources.base import CallBudget, RowPage, TokenProvider
from timebell.features.triggers.sources.call_plan import CallPlan

OPTIONS = (
    "token", "boardId", "url", "everySeconds", "dailyCalls", "columns", "webhooks", "signingSecret", "apiVersion",
)  # fmt: skip
DEFAULT_URL = "https://api.monday.com/v2"
READ_TIMEOUT_SECONDS = 20.0  # maximum time without data from the server
REQUEST_TIMEOUT_SECONDS = 60.0  # limit of the whole request
MAX_RESPONSE_BYTES = 64 * 2**20
MAX_ITEM_IDS = 100  # limit of the API for ids per request
MAX_RETRY_AFTER_SECONDS = 3600.0  # longer delays requested by the server are shortened to this
DEFAULT_API_VERSION = "2026-07"
API_VERSION = re.compile(r"20\d\d-(01|04|07|10)", re.ASCII)
STATUS_BY_ERROR_CODE = {
    "ResourceNotFoundException": 404, "InvalidBoardIdException": 404, "UserUnauthorizedException": 403,
    "USER_UNAUTHORIZED": 403, "USER_ACCESS_DENIED": 403, "ComplexityException": 429,
    "COMPLEXITY_BUDGET_EXHAUSTED": 429, "FIELD_LIMIT_EXCEEDED": 429, "DAILY_LIMIT_EXCEEDED": 429,
    "maxConcurrencyExceeded": 429, "Unauthorized": 401, "NOT_AUTHENTICATED": 401,
}  # fmt: skip
DAILY_LIMIT_CODE = "DAILY_LIMIT_EXCEEDED"
ITEM_FIELDS = "id name state board { id } column_values(ids: $columns) { id value }"  # all columns for null
FIRST_PAGE_QUERY = (
    "query ($board: [ID!], $limit: Int!, $columns: [String!]) { boards(ids: $board) { items_page(limit: $limit)"
    f" {{ cursor items {{ {ITEM_FIELDS} }} }} }} }}"
)
NEXT_PAGE_QUERY = (
    "query ($cursor: String!, $limit: Int!, $columns: [String!]) { next_items_page(cursor: $cursor, limit: $limit)"
    f" {{ cursor items {{ {ITEM_FIELDS} }} }} }}"
)
ITEMS_BY_ID_QUERY = (
    f"query ($ids: [ID!], $limit: Int!, $columns: [String!]) {{ items(ids: $ids, limit: $limit) {{ {ITEM_FIELDS} }} }}"
)
SUBSCRIBE_MUTATION = (
    "mutation ($board: ID!, $url: String!, $event: WebhookEventType!)"
    " { create_webhook(board_id: $board, url: $url, event: $event) { id } }"
)
UNSUBSCRIBE_MUTATION = "mutation ($id: ID!) { delete_webhook(id: $id) { id } }"


class Board:
    """Adapter for a board; `token` provides the token for each request, by default the one in the options.

    Raises InvalidInput (INVALID_SOURCE_OPTIONS).
    """

    page_size = 500  # limit of the API
    daily_calls: int | None

    def __init__(
        self, options: Mapping[str, Any], token: TokenProvider | None = None, budget: CallBudget | None = None
    ) -> None:
        if unknown := options.keys() - set(OPTIONS):
            raise _invalid_options(f"A source of kind monday has no option {min(unknown)!r:.60}.")
        static_token, board, signing = options.get("token"), options.get("boardId"), options.get("signingSecret", "-")
        if token is None and not _is_valid_token(static_token):
            raise _invalid_options("A source of kind monday requires the token of an account.")
        if not isinstance(signing, str) or not signing:
            raise _invalid_options("signingSecret must be a non-empty string.")
        self.board_id = str(board)
        if isinstance(board, bool) or not (self.board_id.isascii() and self.board_id.isdigit()):
            raise _invalid_options(f"boardId is {board!r:.60}.")
        self._token: TokenProvider = token or _StaticToken(str(static_token))
        self._url = options.get("url", DEFAULT_URL)
        if not _is_http_url(self._url):
            raise _invalid_options(f"url is {self._url!r:.60}.")
        self._api_version = options.get("apiVersion", DEFAULT_API_VERSION)
        if not isinstance(self._api_version, str) or not API_VERSION.fullmatch(self._api_version):
            raise _invalid_options(f"apiVersion is {self._api_version!r:.40}; an example is {DEFAULT_API_VERSION}.")
        self._columns = options.get("columns")
        if self._columns is not None and not _is_list_of_names(self._columns):
            raise _invalid_options(f"columns is {self._columns!r:.60}; an example is ['date4', 'person'].")
        self.poll_interval = 0.0
        self.daily_calls, self.full_scan_interval = CallPlan.parse(options)
        self.webhooks_url = options.get("webhooks")
        if self.webhooks_url is not None and not _is_http_url(self.webhooks_url):
            raise _invalid_options(f"webhooks is {self.webhooks_url!r:.60}, not the address of this API.")
        self._budget = budget

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        if after is not None:
            items_page = (await self._query(NEXT_PAGE_QUERY, cursor=after, limit=limit, columns=self._columns))[
                "next_items_page"
            ]
        else:
            data = await self._query(FIRST_PAGE_QUERY, board=[self.board_id], limit=limit, columns=self._columns)
            boards = data.get("boards")
            if not boards:
                raise SourceGone("Board orphaned (404)")
            items_page = boards[0]["items_page"]
        return RowPage(
            dict(_parse_item(item) for item in items_page["items"] if _is_active(item)), items_page["cursor"] or None
        )

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        """Return None: the API cannot list changes."""
        return None

    async def read_rows(self, keys: Sequence[str]) -> RowPage:
        """Return the items with these ids that exist now, excluding archived items and items of other boards."""
        rows: dict[str, dict[str, Any]] = {}
        valid_ids = [key for key in keys if key.isascii() and key.isdigit()]
        for start in range(0, len(valid_ids), MAX_ITEM_IDS):
            ids = valid_ids[start : start + MAX_ITEM_IDS]
            data = await self._query(ITEMS_BY_ID_QUERY, ids=ids, limit=len(ids), columns=self._columns)
            items = data.get("items") or []
            on_board = [
                item
                for item in items
                if _is_active(item) and (item.get("board") or {}).get("id") in (None, self.board_id)
            ]
            rows |= dict(map(_parse_item, on_board))
        if valid_ids and not rows:  # either all items are gone, or the board is: then this raises SourceGone
            await self.read_page(None, 1)
        return RowPage(rows, None)

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """Raise SourceFailed: a board cannot be queried."""
        raise SourceFailed("A board accepts no query.")

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        """Return False: the API has no subscriptions."""
        return False

    async def subscribe(self, event: str, url: str) -> str:
        """Subscribe a webhook to an event of the board; return its id. Raises SourceFailed, SourceGone."""
        data = await self._query(SUBSCRIBE_MUTATION, board=self.board_id, url=url, event=event)
        return str(data["create_webhook"]["id"])

    async def unsubscribe(self, webhook_id: str) -> None:
        """Delete a webhook. It is not an error if it does not exist anymore. Raises SourceFailed."""
        with suppress(SourceGone):
            await self._query(UNSUBSCRIBE_MUTATION, id=webhook_id)

    async def close(self) -> None:
        """Do nothing: connections are not kept open."""

    async def _query(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the data of a response; retries once with a new token. Raises SourceFailed, SourceGone."""
        token = await self._token()
        errors, data = await self._post(token, query, variables)
        if [error for error in errors if error.status == 401]:
            new_token = await self._token(token)
            if new_token != token:
                errors, data = await self._post(new_token, query, variables)
        for error in errors:
            raise _to_source_error(error)
        return data

    async def _post(
        self, token: str, query: str, variables: Mapping[str, Any]
    ) -> tuple[list[_ApiError], dict[str, Any]]:
        try:
            from timebell import http_client
        except ImportError as missing:
            raise Refused(
                "A source of kind monday requires the package httptools, which is not installed.", code="EXTRA_MISSING",
                fix='Run: pip install "timebell[server]".',
            ) from missing  # fmt: skip
        if self._budget is not None:
            await self._budget.take()
        headers = {"authorization": token, "content-type": "application/json", "api-version": self._api_version}
        body = json.dumps({"query": query, "variables": variables}).encode()
        try:
            response = await http_client.send_request(
                "POST",
                self._url,
                headers,
                body,
                timeout=REQUEST_TIMEOUT_SECONDS,
                max_bytes=MAX_RESPONSE_BYTES,
                idle_timeout=READ_TIMEOUT_SECONDS,
            )
        except http_client.HttpClientError as error:
            raise SourceFailed(f"monday.com does not respond: {type(error).__name__}.") from error
        if not response.is_complete:
            raise SourceFailed(f"The response of monday.com exceeds {MAX_RESPONSE_BYTES:,} bytes.")
        content = _parse_json(response.body)
        errors = list(_api_errors(response.status, content, response.header(b"retry-after")))
        if self._budget is not None:
            await _postpone(self._budget, errors)
        return errors, {} if errors else dict(content["data"])


class _ApiError(NamedTuple):
    """An error in a response, with an HTTP status; `retry_after` is in seconds."""

    status: int
    message: str
    code: str = ""
    retry_after: float | None = None


class _StaticToken:
    """Provider of a fixed token."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self, rejected_token: str | None = None) -> str:
        return self._token


async def _postpone(budget: CallBudget, errors: Sequence[_ApiError]) -> None:
    """Keep all nodes from calling the API for the time that these errors require."""
    for error in errors:
        if error.code == DAILY_LIMIT_CODE:
            await budget.postpone(None)
        elif error.retry_after is not None:
            await budget.postpone(error.retry_after)


def _to_source_error(api_error: _ApiError) -> SourceFailed:
    if api_error.status in (403, 404):
        return SourceGone(f"Board orphaned ({api_error.status})", fix=api_error.message)
    if api_error.status == 401:
        return SourceFailed(
            "monday.com rejects the token: re-authorization required.", code="SOURCE_UNAUTHORIZED",
            fix="Set a new token with timebell trigger reauthorize, or replace the secret.",
        )  # fmt: skip
    if "cursor" in api_error.code.lower():
        return SourceFailed(f"The cursor of monday.com has expired: {api_error.message}", code="SOURCE_CURSOR_LOST")
    return SourceFailed(
        f"monday.com rejects the request ({api_error.status}): {api_error.message}",
        retry_after=api_error.retry_after,
    )


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else {}
    except ValueError:  # for example an error page of a proxy; its status describes the error
        return None


def _api_errors(status: int, response: Any, retry_after: str | None = None) -> Iterator[_ApiError]:
    """Yield the errors of a response, from all places where the API reports them."""
    after = _parse_retry_after(retry_after)
    if not isinstance(response, Mapping):
        yield _ApiError(status if status >= 400 else 502, "The response is not an object.", retry_after=after)
        return
    default_status = status if status >= 400 else 400
    if "error_code" in response or "error_message" in response:
        code, error_data = str(response.get("error_code", "")), response.get("error_data")
        error_status = response.get("status_code") or STATUS_BY_ERROR_CODE.get(code)
        delay = _parse_retry_after(error_data.get("retry_in_seconds")) if isinstance(error_data, Mapping) else None
        message = str(response.get("error_message", ""))[:200]
        yield _ApiError(_status_or(error_status, default_status), message, code, delay or after)
    errors = response.get("errors")
    for error in errors if isinstance(errors, list) else ():
        value = error.get("extensions") if isinstance(error, Mapping) else None
        extensions = value if isinstance(value, Mapping) else {}
        code = str(extensions.get("code", ""))
        message = error.get("message", "") if isinstance(error, Mapping) else error
        error_status = extensions.get("status_code") or STATUS_BY_ERROR_CODE.get(code)
        delay = _parse_retry_after(extensions.get("retry_in_seconds")) or after
        yield _ApiError(_status_or(error_status, default_status), str(message)[:200], code, delay)
    if status >= 400:
        yield _ApiError(status, "The response has no details.", retry_after=after)
    if not isinstance(response.get("data"), Mapping):
        yield _ApiError(502, "The response has no data.", retry_after=after)


def _status_or(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def _parse_retry_after(value: Any) -> float | None:
    """Return a delay in seconds from a number or a header; None if it is invalid."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return min(seconds, MAX_RETRY_AFTER_SECONDS) if math.isfinite(seconds) and seconds > 0 else None


def _is_valid_token(token: Any) -> bool:
    return isinstance(token, str) and bool(token) and token.isascii() and token.isprintable()


def _is_http_url(url: Any) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) and name for name in value)


def _is_active(item: Mapping[str, Any]) -> bool:
    return str(item.get("state", "active")) == "active"


def _parse_item(item: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    columns = item.get("column_values") or ()
    fields = {str(column["id"]): parse_column_value(column.get("value")) for column in columns}
    return str(item["id"]), {**fields, "name": item.get("name")}


def parse_column_value(raw: Any) -> Any:
    """Return the value of a column from its JSON text: dates as ISO 8601, people as a list of ids."""
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        return raw
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("date"), str):
        return f"{value['date']}T{value['time']}Z" if value.get("time") else value["date"] or None
    if isinstance(value.get("personsAndTeams"), list):
        return [str(entry["id"]) for entry in value["personsAndTeams"] if entry.get("kind", "person") == "person"]
    return dict(value)


def _invalid_options(message: str) -> InvalidInput:
    return InvalidInput(
        message, code="INVALID_SOURCE_OPTIONS",
        fix='Use {"token": {"secret": "name"}, "boardId": "123"}, and optionally signingSecret, everySeconds.',
    )  # fmt: skip
