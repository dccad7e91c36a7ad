"""Preconditions of a delivery: fields by path, stored form, and the parameters of the query."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model.condition import Comparison
from timebell.model.preconditions import (
    Preconditions,
    UnlessQuery,
    lookup_field,
    normalize,
    queried_source,
    serialize,
)

QUERY = {"source": "duty", "query": "SELECT 1 FROM off WHERE person = :person AND owner = :owner_id AND x = :none"}


def test_a_condition_field_is_a_payload_field_a_path_or_metadata() -> None:
    payload, metadata = (
        {"a": 1, "b.c": 2, "d": {"e": {"f": 3}}, "metadata": {"x": 4}},
        {"owner_id": "ana", "source": "crm", "extra": {"ownerId": {"x": 5}}},
    )
    for field, found in {
        "a": 1, "b.c": 2, "d.e.f": 3, "payload.d.e": {"f": 3}, "payload": payload, "payload.metadata.x": 4,
        "metadata.ownerId": "ana", "metadata.owner_id": "ana", "metadata.source": "crm", "metadata": {"x": 4},
        "metadata.extra.ownerId": {"x": 5}, "metadata.extra.ownerId.x": 5,
        "d.e.g": None, "a.b": None, "metadata.none": None, "nothing": None,
    }.items():  # fmt: skip
        assert lookup_field(field, payload, metadata) == found, field
    assert lookup_field("payload", "text", {}) == "text"
    assert lookup_field("a", ["a"], {}) is None


def test_stored_preconditions_are_decoded_with_the_values_of_the_job() -> None:
    stored = serialize({"plan.name": "pro"}, QUERY)
    assert stored is not None
    assert queried_source(stored) == "duty"
    decoded = Preconditions.for_job(stored, '{"person": null, "plan": {"name": "free"}}', '{"owner_id": "ana"}')
    assert decoded == Preconditions(
        (Comparison("plan.name", "eq", "pro"),), {"plan.name": "free"},
        UnlessQuery("duty", QUERY["query"], {"person": None, "owner_id": "ana", "none": None}),
    )  # fmt: skip
    only_condition = serialize({"plan": "pro"}, None)
    assert only_condition is not None
    assert queried_source(only_condition) is None
    assert Preconditions.for_job(only_condition, '"text"', None) == Preconditions(
        (Comparison("plan", "eq", "pro"),), {"plan": None}
    )


def test_a_payload_field_is_used_before_metadata_of_that_name() -> None:
    stored = serialize(None, QUERY) or ""
    decoded = Preconditions.for_job(stored, '{"owner_id": "bo"}', '{"owner_id": "ana", "person": "cy"}')
    assert decoded.unless is not None
    assert decoded.unless.parameters == {"person": "cy", "owner_id": "bo", "none": None}


def test_without_preconditions_nothing_is_stored() -> None:
    assert normalize(None, None) == normalize([], None) == {}
    assert serialize({}, None) is None
    assert queried_source(None) is None


@pytest.mark.parametrize(
    "unless",
    ["SELECT 1", {"source": "duty"}, {"source": "", "query": "SELECT 1"}, {"source": 5, "query": "SELECT 1"},
     {"source": None, "query": "SELECT 1"}, {**QUERY, "more": 1}],
)  # fmt: skip
def test_an_invalid_query_is_refused(unless: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^unless is .*Use \{\"source\": \"duty\"") as refused:
        normalize(None, unless)
    assert refused.value.code == "INVALID_CONDITION"


@pytest.mark.parametrize("query", [None, "", 5])
def test_an_empty_query_is_refused(query: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^unless is .*Give a query"):
        normalize(None, {"source": "duty", "query": query})
