"""The webhook target: options and settings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.targets.sink import NOW, SECRET, Run
from timebell.errors import InvalidInput, Refused
from timebell.targets.base import Delivery
from timebell.targets.http import HttpTarget


def test_missing_options_get_defaults() -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    assert target.check({"url": "HTTPS://Example.com", "headers": {"X-A": "b"}}) == {
        "url": "https://example.com/",
        "headers": {"x-a": "b"},
        "body": "cloudevents",
    }
    assert target.check({"url": "https://example.com"})["headers"] == {}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "INVALID_URL"),
        ({"url": "https://u:p@example.com/"}, "INVALID_URL"),
        ({"url": "https://example.com/", "body": "template"}, "INVALID_TARGET_OPTIONS"),
        ({"url": "https://example.com/", "template": {"a": "{{nothing}}"}}, "INVALID_TEMPLATE"),
        ({"url": "https://example.com/", "body": ["plain"]}, "INVALID_TARGET_OPTIONS"),
        ({"url": "https://example.com/", "verify": False}, "INVALID_TARGET_OPTIONS"),
        ({"url": "https://example.com/", "headers": ["a"]}, "INVALID_HEADER"),
        ({"url": "https://example.com/", "headers": {f"x-{n}": "1" for n in range(21)}}, "INVALID_HEADER"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(SECRET, now=lambda: NOW).check(options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "x") for name in ("Host", "CONNECTION", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade")]
    + [(name, "x") for name in ("Expect", "Content-Length", "content-type", "Content-Encoding", "Webhook-Id")]
    + [(name, "x") for name in ("webhook-signature", "webhook-other", "Timebell-Attempt", "Proxy-Authorization")]
    + [(name, "x") for name in ("Accept-Encoding", "", "a b", "a:b", "a\r\nb", "é", "-a", "a" * 65, 1)]
    + [("x-a", value) for value in ("", "a\r\nHost: b", "a\nb", "a\x00", "é", " a", "a ", "\ta", "a" * 1025, 1, None)],
)
def test_reserved_or_invalid_headers_are_refused(name: Any, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(SECRET, now=lambda: NOW).check({"url": "https://example.com/", "headers": {name: value}})
    assert caught.value.code == "INVALID_HEADER"


@pytest.mark.parametrize("secret", [None, "", "  "])
def test_missing_signing_secret_refuses_creation_and_delivery(run: Run, delivery: Delivery, secret: str | None) -> None:
    target = HttpTarget(secret, now=lambda: NOW)
    with pytest.raises(Refused) as caught:
        target.check({"url": "https://example.com/"})
    assert caught.value.code == "SIGNING_SECRET_MISSING"
    assert re.search(r"TIMEBELL_WEBHOOK_SIGNING_SECRET.*whsec_", caught.value.fix)
    outcome = run(target.deliver(delivery, {"url": "https://example.com/"}))
    assert (outcome.code, outcome.retryable) == ("SIGNING_SECRET_MISSING", True)


@pytest.mark.parametrize(
    "secret",
    [
        "hunter2hunter2",
        "whsec_",
        "whsec_c2hvcnQ=",
        "whsec_" + "QUJD" * 22,
        "whsec_!!!",
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    ],
)
def test_invalid_signing_secret_is_refused_and_not_printed(secret: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(f"{SECRET} {secret}", now=lambda: NOW)
    assert caught.value.code == "INVALID_SIGNING_SECRET"
    assert secret == "whsec_" or secret not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("timeout", [0, -1, 1800.5, float("nan")])
def test_invalid_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidInput):
        HttpTarget(SECRET, timeout=timeout, now=lambda: NOW)
