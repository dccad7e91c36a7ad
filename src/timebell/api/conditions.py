"""Conditions as JSON: what is asked before a job is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from timebell.api.route import Let
from timebell.api.schemas import Body, Json, Name, Shown
from timebell.tenancy.roles import Role, require


class ComparisonIn(Body):
    """A comparison of a field, which has to hold when the job is due."""

    field: Name
    op: Annotated[str, Field(max_length=20)]
    value: Json = None


class UnlessIn(Body):
    """A query to a source of kind sql: what it finds speaks against delivery."""

    source: Annotated[str, Field(min_length=1, max_length=100)]
    query: Annotated[str, Field(min_length=1, max_length=10_000)]


class ComparisonOut(Shown):
    """A comparison."""

    field: str
    op: str
    value: Json = None


class UnlessOut(Shown):
    """A query that must find nothing."""

    source: str
    query: str


Condition = Annotated[
    list[ComparisonIn] | dict[str, Json] | None,
    Field(max_length=20, description="Comparisons of what the job carries, or fields and what they have to equal."),
]


def may_ask(let: Let, unless: Mapping[str, Any] | UnlessIn | None) -> None:
    """Only the platform has queries run on somebody's database. Raises Refused (ROLE_TOO_LOW)."""
    if unless is not None:
        require(let.caller.role, Role.PLATFORM)
