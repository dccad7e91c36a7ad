"""What all bodies have in common: camelCase, no unknown field, instants in UTC with `Z`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from timebell.errors import InvalidInput
from timebell.model.page import MAX_LIMIT, Page
from timebell.recurrence.instants import format_instant, parse_instant


class UnknownField(InvalidInput):
    """A body has a field that nothing reads."""

    code = "UNKNOWN_FIELD"

    def __init__(self, name: str, fix: str) -> None:
        super().__init__(f"There is no field {name!r}.", fix=fix)
        self.name = name


class Body(BaseModel):
    """A body that is sent to us."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Say what was meant by a name that no field has. Raises InvalidInput (UNKNOWN_FIELD)."""
        names = [field.alias or name for name, field in cls.model_fields.items()]
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                near = get_close_matches(str(name), names, 1)
                fix = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
                raise UnknownField(str(name)[:60], fix)
        return given

    def given(self) -> dict[str, Any]:
        """What was sent, by our own names."""
        return self.model_dump(exclude_unset=True)


class Shown(BaseModel):
    """A body that we send; here for the OpenAPI document, which tests compare with what is sent."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Problem(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    code: Annotated[str, Field(description="Stable, UPPER_SNAKE.")]
    detail: str


Instant = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Json = Any
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="At most so many.")]
Cursor = Annotated[str | None, Query(max_length=200, description="nextCursor of the page before.")]
Id = Annotated[str, Path(max_length=200)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What is wrong, and what to do.", "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}},
    "5XX": {"description": "Not the caller's fault.", "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}},
}  # fmt: skip


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON; datetimes have become text before."""
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/json")


def paged(page: Page[Any], shown: list[dict[str, Any]], **more: Any) -> Response:
    """A page of a listing."""
    return answer({"items": shown, "nextCursor": page.next_cursor, **more})


def utc(instant: datetime | None) -> str | None:
    """An aware datetime as RFC 3339 text in UTC."""
    return None if instant is None else format_instant(instant)


def aware(text: str, field: str) -> datetime:
    """RFC 3339 text with an offset as an aware datetime. Raises InvalidInput."""
    found = parse_instant(text, field)
    if found.tzinfo is None:
        raise InvalidInput(
            f"{field} is {text!r:.60}, which has no offset from UTC.", code="INVALID_INSTANT",
            fix="Write it like 2027-03-14T07:00:00Z.",
        )  # fmt: skip
    if not 1970 <= found.year < 2200:
        raise InvalidInput(f"{field} is {text!r:.60}, and 1970 to 2199 count.", code="INVALID_INSTANT")
    return found
