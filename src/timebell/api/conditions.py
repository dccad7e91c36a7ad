"""JSON form of the conditions that are checked before a job is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from timebell.api.route import Context
from timebell.api.schemas import Json, Name, RequestBody, ResponseBody
from timebell.tenancy.roles import Role, require


class ComparisonIn(RequestBody):
    """Comparison of a field that must be true when the job is due."""

    field: Name
    op: Annotated[str, Field(max_length=20)]
    value: Json = None


class UnlessIn(RequestBody):
    """Query to a source of kind sql; the job is not delivered if it returns a row."""

    source: Annotated[str, Field(min_length=1, max_length=100)]
    query: Annotated[str, Field(min_length=1, max_length=10_000)]


class ComparisonOut(ResponseBody):
    """Comparison of a field."""

    field: str
    op: str
    value: Json = None


class UnlessOut(ResponseBody):
    """Query that must return no row."""

    source: str
    query: str


Condition = Annotated[
    list[ComparisonIn] | dict[str, Json] | None,
    Field(max_length=20, description="Comparisons of fields of the job, or a mapping of fields to required values."),
]


def require_query_permission(ctx: Context, unless: Mapping[str, Any] | UnlessIn | None) -> None:
    """Require a platform key for `unless`, because it runs a query on an external database.

    Raises Refused (ROLE_TOO_LOW).
    """
    if unless is not None:
        require(ctx.caller.role, Role.PLATFORM)
