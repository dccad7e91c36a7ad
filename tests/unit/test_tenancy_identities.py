"""The map of groups to roles, and the values of claims."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.tenancy.identities import Grant, RoleMap, claim_values
from timebell.tenancy.roles import Role

ADMIN, PLATFORM = Grant(Role.ADMIN, "default"), Grant(Role.PLATFORM, None)


@pytest.mark.parametrize(
    ("text", "values", "grant"),
    [
        ("admins=admin", ["admins"], ADMIN), ("admins=admin", ["admin", "Admins", "admins "], None),
        ("admins=admin", [], None), (" admins = admin , ", ["admins"], ADMIN),
        ("a=viewer, admins=admin", ["admins", "a"], Grant(Role.VIEWER, "default")),
        ("ops=operator@acme", ["ops"], Grant(Role.OPERATOR, "acme")), ("sre=platform", ["sre"], PLATFORM),
        ("ops@example.com=editor@b@c", ["ops@example.com"], Grant(Role.EDITOR, "b@c")),
        ('"cn=ops,dc=example=admin", x=viewer', ["cn=ops,dc=example"], ADMIN),
        ('x=viewer, "cn=ops,dc=example=admin"', ["cn=ops,dc=example"], ADMIN),
        ("ops=admin@t", ["ops"], Grant(Role.ADMIN, "t")),
        (f"ops=admin@{'t' * 200}", ["ops"], Grant(Role.ADMIN, "t" * 200)),
        ("admins=admin\nops=viewer,\r\n\n", ["ops"], Grant(Role.VIEWER, "default")),
        ("ops=viewer, ops=admin", ["ops"], Grant(Role.VIEWER, "default")), ("", ["ops"], None),
    ],
)  # fmt: skip
def test_the_first_entry_that_matches_gives_role_and_tenant(text: str, values: list[str], grant: Grant | None) -> None:
    assert RoleMap(text).find_grant(values) == grant


@pytest.mark.parametrize(
    "text",
    ["admins", "admins=", "=admin", "admins=root", "admins=ADMIN", "cn=ops,dc=example=admin", "x=platform@acme",
     "x=admin@", f"x=admin@{'t' * 201}", "admins=admin\nops", '"' + 'x' * 200_000],
)  # fmt: skip
def test_an_invalid_entry_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="TIMEBELL_OIDC_ROLE_MAP"):
        RoleMap(text)


@pytest.mark.parametrize(
    ("claims", "name", "values"),
    [
        ({"groups": ["a", 1, None, "b"]}, "groups", ["a", "b"]), ({"groups": "a b"}, "groups", ["a b"]),
        ({"groups": {"a": 1}}, "groups", []), ({}, "groups", []), ({"groups": None}, "groups", []),
        ({"realm": {"roles": ["a"]}}, "realm.roles", ["a"]), ({"realm": ["a"]}, "realm.roles", []),
        ({"https://x.example/roles": ["a"]}, "https://x.example/roles", ["a"]),
        ({"a.b": ["flat"], "a": {"b": ["nested"]}}, "a.b", ["flat"]),
    ],
)  # fmt: skip
def test_the_texts_of_a_claim_are_found(claims: dict[str, Any], name: str, values: list[str]) -> None:
    assert claim_values(claims, name) == values
