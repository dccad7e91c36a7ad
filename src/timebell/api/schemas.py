"""Common parts of request and response bodies: camelCase names, no unknown fields, instants in UTC with `Z`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from timebell.client.secrets import NAME_PATTERN
from timebell.errors import InvalidInput
from timebell.model.page import MAX_LIMIT, Page
from timebell.recurrence.instants import format_instant, parse_instant


class UnknownField(InvalidInput):
    """A request body contains an unknown field."""

    code = "UNKNOWN_FIELD"

    def __init__(self, name: str, fix: str) -> None:
        super().__init__(f"Unknown field {name!r}.", fix=fix)
        self.name = name


def _require_json_types(schema: Any) -> None:
    """Change a schema so that numbers and booleans are not converted from other types; 5.0 is an integer in JSON."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _require_json_types(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("bool", "float"):
            schema["strict"] = True
        elif schema.get("type") == "int":
            integer = dict(schema)
            schema.clear()
            schema |= core_schema.no_info_before_validator_function(_check_is_number, integer)
            return
        for part in schema.values():
            _require_json_types(part)


def _check_is_number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


class RequestBody(BaseModel):
    """Base class of request bodies."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", populate_by_name=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept only the JSON type of each field: no `"5"` or `false` for a number, no `0` for a boolean."""
        schema = handler(source)
        _require_json_types(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, data: Any) -> Any:
        """Reject unknown field names and suggest a similar one. Raises UnknownField."""
        names = [field.alias or name for name, field in cls.model_fields.items()]
        for name in data if isinstance(data, Mapping) else ():
            if name not in names:
                similar = get_close_matches(str(name), names, 1)
                fix = f"Did you mean {similar[0]}?" if similar else f"Valid fields: {', '.join(names)}."
                raise UnknownField(str(name)[:60], fix)
        return data

    def sent_fields(self) -> dict[str, Any]:
        """Return the fields that the client sent, by Python name."""
        return self.model_dump(exclude_unset=True)


class ResponseBody(BaseModel):
    """Base class of response bodies. They define the OpenAPI document; tests compare responses with it."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    code: Annotated[str, Field(description="Stable error code in UPPER_SNAKE_CASE.")]
    detail: str


Instant = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# Rules of these texts in the OpenAPI document only: the checks that refuse other texts return codes and fixes.
ZoneName = Annotated[str, Field(max_length=64, json_schema_extra={"minLength": 1})]
OBJECT_NAME = {"pattern": f"^{NAME_PATTERN.pattern}$"}
ObjectName = Annotated[str, Field(min_length=1, max_length=200, json_schema_extra=OBJECT_NAME)]
NewName = Annotated[str, Path(max_length=200, json_schema_extra=OBJECT_NAME)]
Json = Any
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items.")]
Cursor = Annotated[str | None, Query(max_length=200, description="nextCursor of the previous page.")]
InstantText = Annotated[str | None, Query(max_length=64)]
Id = Annotated[str, Path(max_length=200)]
PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Client error: its cause and how to fix it.", "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}},
    "5XX": {"description": "Server error.", "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}},
}  # fmt: skip


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. `body` must not contain datetimes."""
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/json")


def page_response(page: Page[Any], items: list[dict[str, Any]], **members: Any) -> Response:
    """Return a page of a listing as JSON."""
    return json_response({"items": items, "nextCursor": page.next_cursor, **members})


def format_utc(instant: datetime | None) -> str | None:
    """Format an aware datetime as RFC 3339 text in UTC."""
    return None if instant is None else format_instant(instant)


def parse_period(from_: str | None, to: str | None) -> tuple[datetime | None, datetime | None]:
    """Parse the query parameters `from` and `to`, both optional. Raises InvalidInput (INVALID_INSTANT)."""
    return (
        None if from_ is None else parse_timestamp(from_, "from"),
        None if to is None else parse_timestamp(to, "to"),
    )


def parse_timestamp(text: str, field: str) -> datetime:
    """Parse RFC 3339 text with an offset into an aware datetime. Raises InvalidInput (INVALID_INSTANT)."""
    parsed = parse_instant(text, field)
    if parsed.tzinfo is None:
        raise InvalidInput(
            f"{field} is {text!r:.60}, which has no UTC offset.", code="INVALID_INSTANT",
            fix="Use a format such as 2027-03-14T07:00:00Z.",
        )  # fmt: skip
    if not 1970 <= parsed.year < 2200:
        raise InvalidInput(f"{field} is {text!r:.60}; years must be between 1970 and 2199.", code="INVALID_INSTANT")
    return parsed
