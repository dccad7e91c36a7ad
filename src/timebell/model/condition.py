"""Conditions: comparisons of fields that all have to hold for a job to be delivered. Pure.

The fields are those of a trigger's item, or what the job itself carries. A verdict keeps what it was given, so that a
skip can be explained later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timebell.errors import InvalidInput

OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "in", "not_in", "empty", "not_empty")
UNARY = ("empty", "not_empty")
MOST = 20
LONGEST_QUERY = 10_000
EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True, slots=True)
class Comparison:
    """`field` stands in relation `op` to `value`, which `empty` and `not_empty` do without.

    What is not there is null. Numbers and texts have an order, each among themselves; a comparison of order with
    anything else does not hold.
    """

    field: str
    op: str
    value: Any = None

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Whether it does, of these fields."""
        found = fields.get(self.field)
        match self.op:
            case "eq":
                return same(found, self.value)
            case "ne":
                return not same(found, self.value)
            case "in":
                return any(same(found, one) for one in self.value)
            case "not_in":
                return not any(same(found, one) for one in self.value)
            case "empty":
                return found in EMPTY
            case "not_empty":
                return found not in EMPTY
        return _ordered(self.op, found, self.value)

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        said = {"field": self.field, "op": self.op}
        return said if self.op in UNARY else {**said, "value": self.value}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the comparisons hold, and the values they looked at: the first that does not is `failed`."""

    holds: bool
    failed: Comparison | None
    inputs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As it is kept with a job."""
        failed = None if self.failed is None else self.failed.to_json()
        return {"holds": self.holds, "failed": failed, "inputs": dict(self.inputs)}


def judge(condition: Sequence[Comparison], fields: Mapping[str, Any]) -> Verdict:
    """The verdict on an item; without any comparison it holds."""
    inputs = {one.field: fields.get(one.field) for one in condition}
    failed = next((one for one in condition if not one.holds(fields)), None)
    return Verdict(failed is None, failed, inputs)


def read(given: Any) -> tuple[Comparison, ...]:
    """Comparisons as they are written: `[{"field": "status", "op": "eq", "value": "active"}]`, or a mapping of fields
    to the values they have to equal. Raises InvalidInput (INVALID_CONDITION)."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        given = [{"field": name, "op": "eq", "value": value} for name, value in given.items()]
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MOST:
        raise _invalid(f"condition is {given!r:.60}.", f"Give a list of at most {MOST} comparisons.")
    return tuple(_read(one) for one in given)


def query(given: Any) -> str | None:
    """A query as it is written, or None. Raises InvalidInput (INVALID_CONDITION)."""
    if given is None or (isinstance(given, str) and 0 < len(given) <= LONGEST_QUERY and "\0" not in given):
        return given
    raise _invalid(f"unless is {given!r:.60}.", "Give a query: SELECT 1 FROM ...")


def parameters_of(text: str) -> list[str]:
    """The names that a query gives to its parameters, such as :item."""
    return sorted(set(re.findall(r"(?<![:\w]):([A-Za-z_]\w*)", text)))


def _read(given: Any) -> Comparison:
    if isinstance(given, Comparison):
        given = given.to_json()
    if not isinstance(given, Mapping) or not {"field", "op"} <= given.keys() <= {"field", "op", "value"}:
        raise _invalid(f"{given!r:.60} is no comparison.", 'E.g. {"field": "status", "op": "eq", "value": "active"}.')
    name, op, value = given["field"], given["op"], given.get("value")
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise _invalid(f"field is {name!r:.60}.", "Name a field.")
    if op not in OPERATORS:
        raise _invalid(f"There is no comparison {op!r:.40}.", f"Use {', '.join(OPERATORS)}.")
    if (op in UNARY) == ("value" in given):
        raise _invalid(
            f"{op} of {name} has {'a' if 'value' in given else 'no'} value.", "Only empty and not_empty have none."
        )
    if op in ("in", "not_in") and not isinstance(value, list | tuple):
        raise _invalid(f"{op} of {name} takes a list.", 'E.g. "value": ["active", "late"].')
    if op in ("lt", "le", "gt", "ge") and (isinstance(value, bool) or not isinstance(value, int | float | str)):
        raise _invalid(f"{op} of {name} takes a number or text.", 'E.g. "value": 18.')
    return Comparison(name, op, list(value) if isinstance(value, tuple) else value)


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return bool(one == other)


def _ordered(op: str, one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    if not numbers and not (isinstance(one, str) and isinstance(other, str)):
        return False
    return bool({"lt": one < other, "le": one <= other, "gt": one > other, "ge": one >= other}[op])


def _invalid(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_CONDITION", fix=fix)
