"""Conditions: comparisons of fields, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model.condition import evaluate, lookup_path, parse_comparisons, parse_query, query_parameters

FIELDS = {"status": "active", "age": 18, "tags": [], "ok": True}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (None, True),
        ({"status": "active"}, True),
        ({"status": "done"}, False),
        ([{"field": "age", "op": "ge", "value": 18}], True),
        ([{"field": "age", "op": "gt", "value": 18}], False),
        ([{"field": "age", "op": "le", "value": 18}], True),
        ([{"field": "age", "op": "lt", "value": 18}], False),
        ([{"field": "age", "op": "lt", "value": "20"}], False),  # numbers and strings are not ordered
        ([{"field": "status", "op": "in", "value": ["active", "late"]}], True),
        ([{"field": "status", "op": "not_in", "value": ["active"]}], False),
        ([{"field": "tags", "op": "empty"}, {"field": "none", "op": "empty"}], True),
        ([{"field": "status", "op": "not_empty"}], True),
        ([{"field": "tags", "op": "not_empty"}], False),
        ([{"field": "status", "op": "not_empty"}, {"field": "status", "op": "ne", "value": "active"}], False),
        ([{"field": "ok", "op": "eq", "value": 1}], False),
        ([{"field": "none", "op": "eq", "value": None}], True),
    ],
)
def test_conditions_are_evaluated(condition: Any, holds: bool) -> None:
    verdict = evaluate(parse_comparisons(condition), FIELDS)
    assert verdict.holds is holds
    assert (verdict.failed is None) is holds
    assert set(verdict.inputs) <= {*FIELDS, "none"}
    assert [one.to_json() for one in parse_comparisons(parse_comparisons(condition))] == [
        one.to_json() for one in parse_comparisons(condition)
    ]


def test_a_verdict_names_the_first_comparison_that_does_not_hold() -> None:
    condition = parse_comparisons([{"field": "status", "op": "empty"}, {"field": "age", "op": "lt", "value": 18}])
    assert evaluate(condition, FIELDS).to_json() == {
        "holds": False, "failed": {"field": "status", "op": "empty"}, "inputs": {"status": "active", "age": 18},
    }  # fmt: skip
    assert evaluate((), FIELDS).to_json() == {"holds": True, "failed": None, "inputs": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("address.city", "Madrid"), ("plan.name", "pro"), ("plan", None), ("address.zip", None), ("plan.name.x", None)],
)
def test_a_name_with_dots_is_a_field_or_a_path(name: str, value: Any) -> None:
    assert lookup_path({"address": {"city": "Madrid"}, "plan.name": "pro"}, name) == value


EXAMPLE = 'E.g. {"field": "status", "op": "eq", "value": "active"}.'
UNARY = "Only empty and not_empty take no value."


@pytest.mark.parametrize(
    ("condition", "message", "fix"),
    [
        ("status", "condition is 'status'.", 'Use {"plan": "pro"}, or a list of at most 20 comparisons.'),
        ([{"field": "a"}], "{'field': 'a'} is not a comparison.", EXAMPLE),
        ([5], "5 is not a comparison.", EXAMPLE),
        ([{"field": "a", "op": "empty", "no": 1}], "{'field': 'a', 'op': 'empty', 'no': 1} is not a comparison.",
         EXAMPLE),
        ([{"field": "a", "op": "like", "value": "x"}], "There is no operator 'like'.",
         "Use eq, ne, lt, le, gt, ge, in, not_in, empty, not_empty."),
        ([{"field": "a", "op": "eq"}], "eq of a has no value.", UNARY),
        ([{"field": "a", "op": "empty", "value": 1}], "empty of a has a value.", UNARY),
        ([{"field": "a", "op": "in", "value": "abc"}], "in of a takes a list.", 'E.g. "value": ["active", "late"].'),
        ([{"field": "a", "op": "lt", "value": True}], "lt of a takes a number or string.", 'E.g. "value": 18.'),
        ([{"field": "", "op": "empty"}], "field is ''.", "Give a field name of 1 to 200 characters."),
    ],
)  # fmt: skip
def test_invalid_condition_is_refused(condition: Any, message: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_comparisons(condition)
    assert (refused.value.code, refused.value.message, refused.value.fix) == ("INVALID_CONDITION", message, fix)


def test_limits_of_a_condition_are_exact() -> None:
    def comparisons(count: int, name: str) -> list[dict[str, str]]:
        return [{"field": name, "op": "empty"}] * count

    assert len(parse_comparisons(comparisons(20, "x" * 200))) == 20
    assert len(parse_comparisons(comparisons(1, "x"))) == 1
    for beyond in (comparisons(21, "x"), comparisons(1, "x" * 201)):
        with pytest.raises(InvalidInput):
            parse_comparisons(beyond)


def test_a_query_has_up_to_10_000_characters_and_no_nul() -> None:
    for query in (None, "x", "x" * 10_000):
        assert parse_query(query) == query
    for wrong in ("", "x" * 10_001, "SELECT '\0'", 5, ["x"]):
        with pytest.raises(InvalidInput) as refused:
            parse_query(wrong)
        assert (refused.value.code, refused.value.fix) == ("INVALID_CONDITION", "Give a query: SELECT 1 FROM ...")
    with pytest.raises(InvalidInput, match=r"^unless is ''\. Give a query"):
        parse_query("")


def test_parameters_of_a_query_are_names_after_a_colon() -> None:
    query = "SELECT 1 FROM duty WHERE item = :item AND at::date = :day AND x = :item AND z = '12:30'"
    assert query_parameters(query) == ["day", "item"]
