"""A board of monday.com, read through its GraphQL API, which says most of what is wrong inside of an HTTP 200.

An item's fields are its columns by their ids, and `name`. Dates are instants in UTC, as monday.com keeps them (a date
without a time is that day), people are lists of ids, other columns are the JSON of their value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from timebell.errors import InvalidInput, Refused, SourceFailed, SourceGone
from timebell.model.policy import seconds
from timebell.triggers.base import Read, Token

OPTIONS = ("token", "boardId", "url", "everySeconds", "sweepEverySeconds", "signingSecret")
URL = "https://api.monday.com/v2"
EVERY, SWEEP = 60.0, 3600.0  # seconds
WITHIN = 20.0  # seconds for an answer to begin, or to go on
ALL_WITHIN = 60.0  # seconds for all of it
LONGEST = 64 * 2**20  # bytes of an answer
MOST = 100  # items a question by id takes
LONGEST_PAUSE = 3600.0  # seconds that it may ask to be left alone
VERSION = "2025-10"
CODES = {
    "ResourceNotFoundException": 404, "InvalidBoardIdException": 404, "UserUnauthorizedException": 403,
    "USER_UNAUTHORIZED": 403, "USER_ACCESS_DENIED": 403, "ComplexityException": 429,
    "COMPLEXITY_BUDGET_EXHAUSTED": 429, "FIELD_LIMIT_EXCEEDED": 429, "DAILY_LIMIT_EXCEEDED": 429,
    "maxConcurrencyExceeded": 429, "Unauthorized": 401, "NOT_AUTHENTICATED": 401,
}  # fmt: skip
ITEM = "id name state board { id } column_values { id text value }"
FIRST = (
    "query ($board: [ID!], $limit: Int!) { boards(ids: $board) { items_page(limit: $limit)"
    f" {{ cursor items {{ {ITEM} }} }} }} }}"
)
NEXT = (
    "query ($cursor: String!, $limit: Int!) { next_items_page(cursor: $cursor, limit: $limit)"
    f" {{ cursor items {{ {ITEM} }} }} }}"
)
THESE = f"query ($ids: [ID!], $limit: Int!) {{ items(ids: $ids, limit: $limit) {{ {ITEM} }} }}"


class Board:
    """The adapter; `token` gives the token for each question, if the options do not. Raises InvalidInput
    (SOURCE_OPTIONS_INVALID)."""

    def __init__(self, options: Mapping[str, Any], token: Token | None = None) -> None:
        if unknown := options.keys() - set(OPTIONS):
            raise _unfit(f"A source of kind monday has no option {min(unknown)!r:.60}.")
        given, board, signing = options.get("token"), options.get("boardId"), options.get("signingSecret", "-")
        if token is None and not _sendable(given):
            raise _unfit("A source of kind monday needs the token of an account.")
        if not isinstance(signing, str) or not signing:
            raise _unfit("signingSecret is no text.")
        self.board = str(board)
        if isinstance(board, bool) or not (self.board.isascii() and self.board.isdigit()):
            raise _unfit(f"boardId is {board!r:.60}.")
        self._token: Token = token or _Same(str(given))
        self._url = options.get("url", URL)
        if not _is_http(self._url):
            raise _unfit(f"url is {self._url!r:.60}.")
        self.every = seconds(options.get("everySeconds", EVERY), "everySeconds", least=0.1)
        self.sweep = seconds(options.get("sweepEverySeconds", SWEEP), "sweepEverySeconds", least=0.1)

    async def page(self, after: str | None, most: int) -> Read:
        """As in Adapter."""
        if after is not None:
            found = (await self._ask(NEXT, cursor=after, limit=most))["next_items_page"]
        else:
            boards = (await self._ask(FIRST, board=[self.board], limit=most)).get("boards")
            if not boards:
                raise SourceGone("Board orphaned (404)")
            found = boards[0]["items_page"]
        return Read(dict(_item(one) for one in found["items"] if _alive(one)), found["cursor"] or None)

    async def changed(self, since: str | None, most: int) -> Read | None:
        """As in Adapter."""
        return None

    async def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As in Adapter. An item that was archived, or moved to another board, is there no more."""
        there: dict[str, dict[str, Any]] = {}
        known = [key for key in keys if key.isascii() and key.isdigit()]
        for start in range(0, len(known), MOST):
            ids = known[start : start + MOST]
            items = (await self._ask(THESE, ids=ids, limit=len(ids))).get("items") or []
            here = [one for one in items if _alive(one) and (one.get("board") or {}).get("id") in (None, self.board)]
            there |= dict(map(_item, here))
        if known and not there:  # all of them gone: or the board
            await self.page(None, 1)
        return there

    async def any(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """As in Adapter: there is nothing to query."""
        raise SourceFailed("A board takes no query.")

    async def listen(self, heard: Callable[[str | None], None]) -> bool:
        """As in Adapter."""
        return False

    async def close(self) -> None:
        """As in Adapter."""

    async def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The data of an answer. Raises SourceFailed, SourceGone."""
        token = await self._token()
        wrong, data = await self._post(token, query, variables)
        if [one for one in wrong if one.status == 401]:
            fresh = await self._token(token)
            if fresh != token:
                wrong, data = await self._post(fresh, query, variables)
        for one in wrong:
            raise _error(one)
        return data

    async def _post(self, token: str, query: str, variables: Mapping[str, Any]) -> tuple[list[_Wrong], dict[str, Any]]:
        try:
            from timebell import http_client
        except ImportError as missing:
            raise Refused(
                "A source of kind monday needs the library h11.", code="EXTRA_MISSING",
                fix='Install it: pip install "timebell[server]"',
            ) from missing  # fmt: skip
        headers = {"authorization": token, "content-type": "application/json", "api-version": VERSION}
        body = json.dumps({"query": query, "variables": variables}).encode()
        try:
            answer = await http_client.ask(
                "POST", self._url, headers, body, within=ALL_WITHIN, most=LONGEST, quiet=WITHIN
            )
        except http_client.WireError as failed:
            raise SourceFailed(f"monday.com does not answer: {type(failed).__name__}.") from failed
        if not answer.whole:
            raise SourceFailed(f"monday.com answers with more than {LONGEST:,} bytes.")
        wrong = list(_wrong(answer.status, said := _json(answer.body), answer.header(b"retry-after")))
        return wrong, {} if wrong else dict(said["data"])


class _Wrong(NamedTuple):
    """What is wrong with an answer, as a status of HTTP; `pause` is how long it asks to be left alone (seconds)."""

    status: int
    message: str
    code: str = ""
    pause: float | None = None


class _Same:
    """A token that stays."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self, refused: str | None = None) -> str:
        return self._token


def _error(wrong: _Wrong) -> SourceFailed:
    if wrong.status in (403, 404):
        return SourceGone(f"Board orphaned ({wrong.status})", fix=wrong.message)
    if wrong.status == 401:
        return SourceFailed(
            "monday.com does not take the token: re-authorization required.", code="SOURCE_UNAUTHORIZED",
            fix="Give a new token: timebell trigger reauthorize, or replace the secret.",
        )  # fmt: skip
    if "cursor" in wrong.code.lower():
        return SourceFailed(f"monday.com has forgotten the cursor: {wrong.message}", code="SOURCE_CURSOR_LOST")
    return SourceFailed(f"monday.com refuses ({wrong.status}): {wrong.message}", retry_after=wrong.pause)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else {}
    except ValueError:  # a page of some proxy's; its status says what is wrong
        return None


def _wrong(status: int, said: Any, retry_after: str | None = None) -> Iterator[_Wrong]:
    """What is wrong with an answer, wherever it says so."""
    after = _pause(retry_after)
    if not isinstance(said, Mapping):
        yield _Wrong(status if status >= 400 else 502, "The answer is no object.", pause=after)
        return
    plain = status if status >= 400 else 400
    if "error_code" in said or "error_message" in said:
        code, more = str(said.get("error_code", "")), said.get("error_data")
        inner = said.get("status_code") or CODES.get(code)
        pause = _pause(more.get("retry_in_seconds")) if isinstance(more, Mapping) else None
        yield _Wrong(_status(inner, plain), str(said.get("error_message", ""))[:200], code, pause or after)
    errors = said.get("errors")
    for one in errors if isinstance(errors, list) else ():
        given = one.get("extensions") if isinstance(one, Mapping) else None
        extensions = given if isinstance(given, Mapping) else {}
        code = str(extensions.get("code", ""))
        message = one.get("message", "") if isinstance(one, Mapping) else one
        inner = extensions.get("status_code") or CODES.get(code)
        pause = _pause(extensions.get("retry_in_seconds")) or after
        yield _Wrong(_status(inner, plain), str(message)[:200], code, pause)
    if status >= 400:
        yield _Wrong(status, "It says no more.", pause=after)
    if not isinstance(said.get("data"), Mapping):
        yield _Wrong(502, "The answer has no data.", pause=after)


def _status(inner: Any, otherwise: int) -> int:
    try:
        return int(inner)
    except (TypeError, ValueError):
        return otherwise


def _pause(given: Any) -> float | None:
    """Seconds, from a number or a header; None for what is none."""
    try:
        found = float(given)
    except (TypeError, ValueError):
        return None
    return min(found, LONGEST_PAUSE) if math.isfinite(found) and found > 0 else None


def _sendable(token: Any) -> bool:
    return isinstance(token, str) and bool(token) and token.isascii() and token.isprintable()


def _is_http(url: Any) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _alive(item: Mapping[str, Any]) -> bool:
    return str(item.get("state", "active")) == "active"


def _item(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    fields = {str(one["id"]): value_of(one.get("value")) for one in given.get("column_values") or ()}
    return str(given["id"]), {**fields, "name": given.get("name")}


def value_of(written: Any) -> Any:
    """A column's value, which comes as JSON in a text: dates as ISO 8601, people as a list of their ids."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
    except ValueError:
        return written
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("date"), str):
        return f"{value['date']}T{value['time']}Z" if value.get("time") else value["date"] or None
    if isinstance(value.get("personsAndTeams"), list):
        return [str(one["id"]) for one in value["personsAndTeams"] if one.get("kind", "person") == "person"]
    return dict(value)


def _unfit(message: str) -> InvalidInput:
    return InvalidInput(
        message, code="SOURCE_OPTIONS_INVALID",
        fix='{"token": {"secret": "name"}, "boardId": "123"}, and signingSecret, everySeconds, sweepEverySeconds.',
    )  # fmt: skip
