"""Named targets: references to secrets, limits, masking, and what is never shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model.limits import Limits
from timebell.model.target import (
    MASK,
    NamedTarget,
    ResolvedTarget,
    fill_secrets,
    has_password,
    mask_secrets,
    referenced_secret,
    require_secret_references,
    secret_names,
    target_limits,
)

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def test_options_are_filled_and_texts_are_masked() -> None:
    options = {"url": "https://x", "headers": {"a": {"secret": "k"}, "b": "plain"}, "list": [{"secret": "l"}],
               "not": {"secret": "k", "more": 1}}  # fmt: skip
    assert secret_names(options) == {"k", "l"}
    assert fill_secrets(options, {"k": "one", "l": "two"}) == {
        "url": "https://x", "headers": {"a": "one", "b": "plain"}, "list": ["two"], "not": {"secret": "k", "more": 1},
    }  # fmt: skip
    secrets = ('pass"word', "pass", "a-very-long-secret")
    texts = {"a": ['x pass"word y', r'{"k": "pass\"word"}', "pass"], "n": 3, "pass": None}
    assert mask_secrets(texts, secrets) == {"a": [f"x {MASK} y", f'{{"k": "{MASK}"}}', MASK], "n": 3, MASK: None}
    assert mask_secrets("text", ()) == "text"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("cut off at a-very-long-secre", "cut off at ***"),
        ("cut off at a-very-lon", "cut off at ***"),
        ("cut off at a-very-l", "cut off at ***"),
        ("cut off at a-very-", "cut off at a-very-"),  # seven characters may be ordinary text
        ("a-very-long-secret, a-very-long-secret", "***, ***"),
        ("p%C3%A4%22ss%2F1 and p%C3%A4%22ss%2F1+%20", "*** and ***+%20"),
        (r'{"k": "pä\"ss/1"}', '{"k": "***"}'),
    ],
)
def test_quoted_and_truncated_secrets_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text, ("a-very-long-secret", 'pä"ss/1')) == masked


def test_secrets_are_not_in_representations() -> None:
    named = NamedTarget(
        tenant_id="t", name="crm", kind="http", signing_secret="whsec_1", created_at=NOW, updated_at=NOW
    )
    assert (named.revision, "whsec_1" in repr(named)) == (1, False)
    resolved = ResolvedTarget(name="crm", kind="http", revision=3, options={"url": "https://k1"}, secrets=("k2",))
    assert resolved.summary == {"name": "crm", "kind": "http", "revision": 3}
    assert not [secret for secret in ("k1", "k2") if secret in repr(resolved)]


@pytest.mark.parametrize("value", [{"secret": 5}, {"secret": "k", "x": 1}, {}, "k", None, ["secret"]])
def test_other_values_are_no_references(value: Any) -> None:
    assert referenced_secret(value) is None


@pytest.mark.parametrize(
    ("group", "name"),
    [("auth", "token"), ("auth", "password"), ("auth", "clientSecret"), ("auth", "credentials"), ("tls", "key"),
     ("proxy", "password")],
)  # fmt: skip
def test_confidential_options_refer_to_a_secret(group: str, name: str) -> None:
    for accepted in ({}, {group: None}, {group: "text"}, {group: {}}, {group: {name: ""}},
                     {group: {name: {"secret": "k"}}}, {group: {"other": "value"}}):  # fmt: skip
        require_secret_references(accepted)
    for refused_value in ("value", None, {"secret": 5}):
        with pytest.raises(InvalidInput, match=f"^{group}.{name} has to refer to a secret. Store the value") as refused:
            require_secret_references({group: {name: refused_value}})
        assert refused.value.code == "SECRET_REQUIRED"


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, None),
        ({"perSeconds": 5}, None),
        ({"concurrency": 2}, Limits(concurrency=2)),
        ({"rate": 3}, Limits(rate=3, per=1.0)),
        ({"concurrency": 2, "rate": 3, "perSeconds": 60}, Limits(concurrency=2, rate=3, per=60.0)),
    ],
)
def test_limits_are_read_from_the_options(options: dict[str, Any], limits: Limits | None) -> None:
    assert target_limits(options) == limits


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("mysql://ana:pw@host/db", True),
        ("mysql://host/db?password=pw", True),
        ("mysql://host/db?user=ana&passwd=pw", True),
        ("mysql://ana@host/db", False),
        ("mysql://host/db?user=password", False),
        ("mysql://host/db", False),
    ],
)
def test_passwords_are_found_in_urls(url: str, found: bool) -> None:
    assert has_password(url) is found


def test_an_invalid_url_is_an_error() -> None:
    with pytest.raises(ValueError, match="Invalid IPv6"):
        has_password("http://[::1")
