"""A board of monday.com, read through its GraphQL API, which says most of what is wrong inside of an HTTP 200.

An item's fields are its columns by their ids, and `name`. Dates are instants in UTC, as monday.com keeps them (a date
without a time is that day), people are lists of ids, other columns are the JSON of their value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from timebell.errors import InvalidInput, Refused, SourceFailed, SourceGone
from timebell.model.policy import seconds
from timebell.triggers.base import Read

OPTIONS = ("token", "boardId", "url", "everySeconds", "sweepEverySeconds")
URL = "https://api.monday.com/v2"
EVERY, SWEEP = 60.0, 3600.0  # seconds
WITHIN = 20.0  # seconds for an answer
MOST = 100  # items a question by id takes
GONE = {
    "ResourceNotFoundException": 404, "InvalidBoardIdException": 404, "UserUnauthorizedException": 403,
    "USER_UNAUTHORIZED": 403, "USER_ACCESS_DENIED": 403,
}  # fmt: skip
ITEM = "id name board { id } column_values { id text value }"
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
    """The adapter. Raises InvalidInput (SOURCE_OPTIONS_INVALID)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - set(OPTIONS):
            raise _unfit(f"A source of kind monday has no option {min(unknown)!r:.60}.")
        token, board = options.get("token"), options.get("boardId")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise _unfit("A source of kind monday needs the token of an account.")
        self.board = str(board)
        if isinstance(board, bool) or not (self.board.isascii() and self.board.isdigit()):
            raise _unfit(f"boardId is {board!r:.60}.")
        self._token, self._url = token, options.get("url", URL)
        if not isinstance(self._url, str) or not self._url.startswith(("https://", "http://")):
            raise _unfit(f"url is {self._url!r:.60}.")
        self.every = seconds(options.get("everySeconds", EVERY), "everySeconds", least=0.1)
        self.sweep = seconds(options.get("sweepEverySeconds", SWEEP), "sweepEverySeconds", least=0.1)
        self._client: Any = None

    async def page(self, after: str | None, most: int) -> Read:
        """As in Adapter."""
        if after is not None:
            found = (await self._ask(NEXT, cursor=after, limit=most))["next_items_page"]
        else:
            boards = (await self._ask(FIRST, board=[self.board], limit=most)).get("boards")
            if not boards:
                raise SourceGone("Board orphaned (404)")
            found = boards[0]["items_page"]
        return Read(dict(map(_item, found["items"])), found["cursor"] or None)

    async def changed(self, since: str | None, most: int) -> Read | None:
        """As in Adapter."""
        return None

    async def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As in Adapter. An item that was moved to another board is there no more."""
        there: dict[str, dict[str, Any]] = {}
        known = [key for key in keys if key.isascii() and key.isdigit()]
        for start in range(0, len(known), MOST):
            ids = known[start : start + MOST]
            items = (await self._ask(THESE, ids=ids, limit=len(ids))).get("items") or []
            here = [one for one in items if (one.get("board") or {}).get("id") in (None, self.board)]
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
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The data of an answer. Raises SourceFailed, SourceGone."""
        try:
            import httpx2
        except ImportError as missing:
            raise Refused(
                "A source of kind monday needs the library httpx2.", code="EXTRA_MISSING",
                fix='Install it: pip install "timebell[server]"',
            ) from missing  # fmt: skip
        if self._client is None:
            self._client = httpx2.AsyncClient(
                headers={"Authorization": self._token, "API-Version": "2024-10"}, timeout=WITHIN, trust_env=False
            )
        try:
            answer = await self._client.post(self._url, json={"query": query, "variables": variables})
            said = answer.json() if answer.content else {}
        except (httpx2.HTTPError, ValueError) as failed:
            raise SourceFailed(f"monday.com does not answer: {type(failed).__name__}.") from failed
        for status, why in _wrong(answer.status_code, said):
            if status in (403, 404):
                raise SourceGone(f"Board orphaned ({status})", fix=why)
            if status == 401:
                raise SourceFailed(
                    "monday.com does not take the token: re-authorization required.", code="SOURCE_UNAUTHORIZED",
                    fix="Replace the secret with a new token.",
                )  # fmt: skip
            raise SourceFailed(f"monday.com refuses ({status}): {why}")
        return dict(said["data"])


def _wrong(status: int, said: Any) -> Iterator[tuple[int, str]]:
    """What is wrong with an answer, as statuses of HTTP, wherever it says so."""
    if not isinstance(said, Mapping):
        yield status if status >= 400 else 502, "The answer is no object."
        return
    for one in said.get("errors") or ():
        extensions = one.get("extensions") or {} if isinstance(one, Mapping) else {}
        inner = extensions.get("status_code") or GONE.get(str(extensions.get("code")))
        message = one.get("message", "") if isinstance(one, Mapping) else one
        yield int(inner or (status if status >= 400 else 400)), str(message)[:200]
    if "error_code" in said or "error_message" in said:
        inner = said.get("status_code") or GONE.get(str(said.get("error_code")))
        yield int(inner or (status if status >= 400 else 400)), str(said.get("error_message", ""))[:200]
    if status >= 400:
        yield status, "It says no more."
    if not isinstance(said.get("data"), Mapping):
        yield 502, "The answer has no data."


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
        fix='{"token": {"secret": "name"}, "boardId": "123"}, and everySeconds, sweepEverySeconds.',
    )  # fmt: skip
