"""Conditions: field comparisons that must all hold for a job to be delivered. Pure.

The fields are those of a trigger's item, or of the job's own payload and metadata. A verdict stores its inputs, so
that a skip can be explained later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timebell.errors import InvalidInput

OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "in", "not_in", "empty", "not_empty")
UNARY_OPERATORS = ("empty", "not_empty")
MAX_COMPARISONS = 20
MAX_QUERY_LENGTH = 10_000
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison `field op value`; `empty` and `not_empty` take no value.

    A missing field is null. Only two numbers or two strings have an order; any other order comparison is false.
    """

    field: str
    op: str
    value: Any = None

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the comparison holds for these fields."""
        actual = lookup_path(fields, self.field)
        match self.op:
            case "eq":
                return json_equal(actual, self.value)
            case "ne":
                return not json_equal(actual, self.value)
            case "in":
                return any(json_equal(actual, one) for one in self.value)
            case "not_in":
                return not any(json_equal(actual, one) for one in self.value)
            case "empty":
                return actual in EMPTY_VALUES
            case "not_empty":
                return actual not in EMPTY_VALUES
        return _compare_order(self.op, actual, self.value)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        unary = {"field": self.field, "op": self.op}
        return unary if self.op in UNARY_OPERATORS else {**unary, "value": self.value}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of evaluating comparisons: the first one that does not hold, and the compared values."""

    holds: bool
    failed: Comparison | None
    inputs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that is stored with a job."""
        failed = None if self.failed is None else self.failed.to_json()
        return {"holds": self.holds, "failed": failed, "inputs": dict(self.inputs)}


def evaluate(comparisons: Sequence[Comparison], fields: Mapping[str, Any]) -> Verdict:
    """Evaluate comparisons on an item's fields; without any comparison the verdict holds."""
    inputs = {one.field: lookup_path(fields, one.field) for one in comparisons}
    failed = next((one for one in comparisons if not one.holds(fields)), None)
    return Verdict(failed is None, failed, inputs)


def lookup_path(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, or of a path into a nested one: `address.city`."""
    value: Any = fields.get(name)
    if name not in fields and "." in name:
        value = fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def parse_comparisons(condition: Any) -> tuple[Comparison, ...]:
    """Parse a condition such as `[{"field": "status", "op": "eq", "value": "active"}]`.

    Also accepts a mapping of fields to the values that they must equal. Raises InvalidInput (INVALID_CONDITION).
    """
    if condition is None:
        return ()
    if isinstance(condition, Mapping):
        condition = [{"field": name, "op": "eq", "value": value} for name, value in condition.items()]
    if not isinstance(condition, Sequence) or isinstance(condition, str) or len(condition) > MAX_COMPARISONS:
        raise _invalid(
            f"condition is {condition!r:.60}.",
            f'Use {{"plan": "pro"}}, or a list of at most {MAX_COMPARISONS} comparisons.',
        )
    return tuple(_parse_comparison(one) for one in condition)


def parse_query(query: Any) -> str | None:
    """Return a valid query unchanged, or None. Raises InvalidInput (INVALID_CONDITION)."""
    if query is None or (isinstance(query, str) and 0 < len(query) <= MAX_QUERY_LENGTH and "\0" not in query):
        return query
    raise _invalid(f"unless is {query!r:.60}.", "Give a query: SELECT 1 FROM ...")


def query_parameters(query: str) -> list[str]:
    """Return the sorted names of a query's parameters, such as `item` for `:item`."""
    return sorted(set(re.findall(r"(?<![:\w]):([A-Za-z_]\w*)", query)))


def _parse_comparison(comparison: Any) -> Comparison:
    if isinstance(comparison, Comparison):
        comparison = comparison.to_json()
    if not isinstance(comparison, Mapping) or not {"field", "op"} <= comparison.keys() <= {"field", "op", "value"}:
        raise _invalid(
            f"{comparison!r:.60} is not a comparison.", 'E.g. {"field": "status", "op": "eq", "value": "active"}.'
        )
    name, op, value = comparison["field"], comparison["op"], comparison.get("value")
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise _invalid(f"field is {name!r:.60}.", "Give a field name of 1 to 200 characters.")
    if op not in OPERATORS:
        raise _invalid(f"There is no operator {op!r:.40}.", f"Use {', '.join(OPERATORS)}.")
    if (op in UNARY_OPERATORS) == ("value" in comparison):
        raise _invalid(
            f"{op} of {name} has {'a' if 'value' in comparison else 'no'} value.",
            "Only empty and not_empty take no value.",
        )
    if op in ("in", "not_in") and not isinstance(value, list | tuple):
        raise _invalid(f"{op} of {name} takes a list.", 'E.g. "value": ["active", "late"].')
    if op in ("lt", "le", "gt", "ge") and (isinstance(value, bool) or not isinstance(value, int | float | str)):
        raise _invalid(f"{op} of {name} takes a number or string.", 'E.g. "value": 18.')
    return Comparison(name, op, list(value) if isinstance(value, tuple) else value)


def json_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true is not 1."""
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return bool(left == right)


def _compare_order(op: str, left: Any, right: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right))
    if not numbers and not (isinstance(left, str) and isinstance(right, str)):
        return False
    return bool({"lt": left < right, "le": left <= right, "gt": left > right, "ge": left >= right}[op])


def _invalid(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_CONDITION", fix=fix)
