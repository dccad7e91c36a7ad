"""Audiences in a database of the customer: only complete definitions with a reading query are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.audience_source import AudienceSource

URL, SELECT = "mysql://ana@db/crm", "SELECT id, token FROM devices"
SPEC = {"url": URL, "query": SELECT, "key": "id"}


def test_a_definition_is_parsed_and_restored() -> None:
    direct = AudienceSource.from_json({**SPEC, "query": f" {SELECT}\n"})
    assert direct == AudienceSource(SELECT, "id", url=URL)
    assert direct.to_json() == SPEC
    secret = AudienceSource.from_json({**SPEC, "url": {"secret": "crm"}})
    assert secret == AudienceSource(SELECT, "id", secret="crm")
    assert secret.to_json() == {**SPEC, "url": {"secret": "crm"}}


def test_each_kind_of_database_is_accepted() -> None:
    for scheme in ("postgresql", "postgres", "sqlite", "mysql", "mariadb"):
        url = f"{scheme}://db:5432/crm"
        assert AudienceSource.from_json({**SPEC, "url": url}).url == url


PROBLEMS = {
    "fields": "An audience has the fields url, query and key only.",
    "url": "url must name a PostgreSQL, MySQL or SQLite database: postgresql://user@host/name.",
    "secret": 'url must be like "postgresql://host/name" or {"secret": "its name"}.',
    "query": "query must be a SELECT of at most 20,000 characters.",
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"other": 1}, "fields"),
        ({"url": None}, "url"), ({"url": 5}, "url"), ({"url": ""}, "url"),
        ({"url": "redis://db"}, "url"), ({"url": "mysql://db:0/crm"}, "url"),
        ({"url": "mysql://db:99999/crm"}, "url"), ({"url": "mysql://[db/crm"}, "url"),
        ({"url": {"secret": "crm", "x": 1}}, "url"), ({"url": {"secret": ""}}, "secret"),
        ({"url": {"secret": 5}}, "secret"),
        ({"query": None}, "query"), ({"query": " \n"}, "query"), ({"query": 5}, "query"),
        ({"query": f"{SELECT} -- {'x' * 20_000}"}, "query"), ({"query": f"{SELECT}\0"}, "query"),
    ],
)  # fmt: skip
def test_an_incomplete_definition_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        AudienceSource.from_json({**SPEC, **change})
    assert (refused.value.code, refused.value.message) == ("INVALID_AUDIENCE", PROBLEMS[problem])


def test_a_query_has_up_to_20_000_characters() -> None:
    query = SELECT + " --" + "x" * (20_000 - len(SELECT) - 3)
    assert AudienceSource.from_json({**SPEC, "query": query}).query == query
    with pytest.raises(InvalidInput):
        AudienceSource.from_json({**SPEC, "query": query + "x"})


@pytest.mark.parametrize("url", ["mysql://ana:pw@db/crm", "mysql://db/crm?password=pw"])
def test_a_password_in_the_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"^The url contains a password.*Store the url in a secret") as refused:
        AudienceSource.from_json({**SPEC, "url": url})
    assert refused.value.code == "INVALID_AUDIENCE"


@pytest.mark.parametrize("key", [None, "", 5, "1st", "a b", "é", "x" * 64])
def test_a_key_is_the_name_of_a_column(key: Any) -> None:
    assert AudienceSource.from_json({**SPEC, "key": "_" + "x" * 62}).key == "_" + "x" * 62
    with pytest.raises(InvalidInput, match=r'^An audience needs a key column.*Set "key" to a column') as refused:
        AudienceSource.from_json({**SPEC, "key": key})
    assert refused.value.code == "AUDIENCE_KEY_MISSING"


@pytest.mark.parametrize(
    "query",
    [
        "select 1", "WITH d AS (SELECT 1) SELECT * FROM d", "SELECT 'drop table; x' FROM d", 'SELECT "update" FROM d',
        "SELECT a -- delete\nFROM d", "SELECT a /* set\n; */ FROM d", "SELECT updated_at FROM d",
        "SELECT `lock` FROM d",
        "SELECT 'it''s; set' FROM d", "/* audience */ SELECT 1",
    ],
)  # fmt: skip
def test_a_query_that_only_reads_is_accepted(query: str) -> None:
    assert AudienceSource.from_json({**SPEC, "query": query}).query == query


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELECT 1; SELECT 2", "is not one SELECT"), ("SELECT 1;", "is not one SELECT"),
        ("DELETE FROM d", "is not one SELECT"), ("selected", "is not one SELECT"), ("'select' x", "is not one SELECT"),
        ("WITH d AS (DELETE FROM x RETURNING *) SELECT * FROM d", "contains 'DELETE'"),
        ("SELECT pg_sleep(9)", "contains 'pg_sleep'"), ("SELECT * INTO x FROM d", "contains 'INTO'"),
        ("SELECT nextval('s')", "contains 'nextval'"), ("SELECT 1 FOR UPDATE", "contains 'UPDATE'"),
        ("SELECT 'x' -- y\n, set FROM d", "contains 'set'"),
    ],
)  # fmt: skip
def test_a_query_that_may_write_is_refused(query: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        AudienceSource.from_json({**SPEC, "query": query})
    assert refused.value.code == "AUDIENCE_QUERY_WRITES"
    assert refused.value.message == f"The query of an audience must be read-only; this one {problem}."
