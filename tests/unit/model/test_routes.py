"""Routes: which jobs a node handles, and valid topics and patterns."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model.routes import ALL_ROUTES, COMPLETE_UNHANDLED, Routes, check_pattern, check_topic, route_for


@pytest.mark.parametrize(
    ("routes", "handled", "unhandled"),
    [
        (Routes(frozenset({"a.b"})), ["a.b"], ["a", "a.b.c", "a.bc", "@http"]),
        (Routes(prefixes=frozenset({"a."})), ["a.b", "a.b.c"], ["a", "ab", "@http"]),
        (Routes(all_topics=True), ["a", "a.b"], ["@http"]),
        (ALL_ROUTES, ["a", "@http", "@command"], []),
        (Routes(), [], ["a", "@http"]),
    ],
)
def test_routes_handle_their_topics_and_prefixes(routes: Routes, handled: list[str], unhandled: list[str]) -> None:
    assert all(map(routes.handles, handled))
    assert not any(map(routes.handles, unhandled))
    assert bool(routes) == bool(handled)


def test_union_of_routes_handles_the_topics_of_both() -> None:
    both = Routes(frozenset({"a"})) | Routes(prefixes=frozenset({"b."}))
    assert [both.handles(route) for route in ("a", "b.c", "c")] == [True, True, False]
    everything = Routes(frozenset({"@http"})) | Routes(all_topics=True)
    assert [everything.handles(route) for route in ("@http", "c", "@command")] == [True, True, False]


def test_routes_are_restored_from_json() -> None:
    routes = Routes(frozenset({"b", "a"}), frozenset({"c.", "b."}), True)
    assert routes.to_json() == {"exact": ["a", "b"], "prefixes": ["b.", "c."], "allTopics": True}
    assert Routes.from_json(routes.to_json()) == routes
    assert Routes(tenant_id="acme", exact=frozenset({"a"})).sql_params() == {
        "exact": ["a"], "prefixes": [], "everything": False, "only_tenant": "acme",
    }  # fmt: skip


def test_the_most_similar_topic_is_named() -> None:
    routes = Routes(frozenset({"billing.invoice-due", "billing.invoice-paid", "@http"}))
    assert routes.nearest("biling.invoice-du") == "billing.invoice-due"
    assert routes.nearest("@htp") is None
    assert routes.nearest("weather") is None


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (None, "a.b"),
        (COMPLETE_UNHANDLED, "a.b"),
        ({"kind": "http", "options": {}}, "@http"),
        ({"kind": "http", "name": "crm"}, "@http:named"),
    ],
)
def test_a_job_has_the_route_of_its_target_or_topic(target: dict[str, Any] | None, route: str) -> None:
    assert route_for("a.b", target) == route


@pytest.mark.parametrize("topic", ["a", "billing.invoice-due", "A_1.2", "x" * 200])
def test_valid_topics_and_patterns_are_returned(topic: str) -> None:
    assert check_topic(topic) == check_pattern(topic) == topic
    assert check_pattern("*") == "*"
    assert check_pattern("a.*") == "a.*"


@pytest.mark.parametrize("topic", ["", "x" * 201, "a b", "a..b", ".a", "é", "@http", "a.*", "*", None, 5])
def test_invalid_topic_is_refused(topic: Any) -> None:
    with pytest.raises(InvalidInput, match=r"is not a topic\. Topics are dotted names") as refused:
        check_topic(topic)
    assert refused.value.code == "INVALID_TOPIC"


@pytest.mark.parametrize("pattern", ["", "a*", "**", "a.*.b", "..", None, 5])
def test_invalid_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(InvalidInput, match=r"is not a topic\. Topics are dotted names") as refused:
        check_pattern(pattern)
    assert refused.value.code == "INVALID_TOPIC"


def test_a_pattern_that_ends_with_a_dot_lacks_its_asterisk() -> None:
    with pytest.raises(InvalidInput, match=r'^\'a\.b\.\' is not a topic\. Write "a\.b\.\*" for all topics below it'):
        check_pattern("a.b.")
