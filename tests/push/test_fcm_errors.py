"""The mapping of FCM responses to outcomes, including undocumented responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.features.campaigns.push.fcm_errors import parse_response
from timebell.features.campaigns.push.provider import PushResult, SendOutcome
from timebell.features.campaigns.testing import NOW

FCM = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
BAD = "type.googleapis.com/google.rpc.BadRequest"


def response(status: int, error: Any = None, retry_after: str | None = None) -> PushResult:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return parse_response(status, headers, json.dumps({"error": error}).encode(), NOW)


def error_body(code: str, message: str = "no", *more: dict[str, Any]) -> dict[str, Any]:
    return {"message": message, "details": [{"@type": FCM, "errorCode": code}, *more]}


def field_violation(name: str) -> dict[str, Any]:
    return {"@type": BAD, "fieldViolations": [{"field": name, "description": "bad"}]}


@pytest.mark.parametrize(
    ("got", "outcome", "code", "remove"),
    [
        (response(400, error_body("INVALID_ARGUMENT", "x", field_violation("message.token"))),
         SendOutcome.REFUSED, "INVALID_ARGUMENT", True),
        (response(400, error_body("INVALID_ARGUMENT", "The registration token is not a valid FCM registration token")),
         SendOutcome.REFUSED, "INVALID_ARGUMENT", True),
        (response(400, error_body("INVALID_ARGUMENT", "x", field_violation("message.data"))),
         SendOutcome.REFUSED, "INVALID_ARGUMENT", False),
        (response(400, {"message": "The registration token ...", "details": [field_violation("message.android.ttl")]}),
         SendOutcome.REFUSED, "INVALID_ARGUMENT", False),
        (response(400, {"message": "Request contains an invalid argument."}),
         SendOutcome.REFUSED, "INVALID_ARGUMENT", False),
        (response(404, error_body("UNREGISTERED")), SendOutcome.REFUSED, "UNREGISTERED", True),
        (response(404, {"message": "no such project"}), SendOutcome.REFUSED, "NOT_FOUND", False),
        (response(403, {"message": "API not enabled"}), SendOutcome.REFUSED, "PERMISSION_DENIED", False),
        (response(401, {"message": "expired"}), SendOutcome.RETRY, "UNAUTHENTICATED", False),
        (response(401, error_body("THIRD_PARTY_AUTH_ERROR")), SendOutcome.REFUSED, "THIRD_PARTY_AUTH_ERROR", False),
        (response(500, {"message": "oops"}), SendOutcome.UNKNOWN, "UNEXPLAINED_5XX", False),
        (response(503, {"status": "UNAVAILABLE"}), SendOutcome.RETRY, "UNAVAILABLE", False),
        (response(502, None), SendOutcome.UNKNOWN, "UNEXPLAINED_5XX", False),
        (response(302, None), SendOutcome.REFUSED, "REFUSED", False),
        (response(500, error_body("A_NEW_CODE")), SendOutcome.UNKNOWN, "A_NEW_CODE", False),
        (parse_response(200, {}, b"<html>", NOW), SendOutcome.UNKNOWN, "FCM_RESPONSE_UNREADABLE", False),
    ],
)  # fmt: skip
def test_responses_are_mapped_to_a_fate(got: PushResult, outcome: SendOutcome, code: str, remove: bool) -> None:
    assert (got.outcome, got.code, got.token_is_dead) == (outcome, code, remove)


@pytest.mark.parametrize(
    ("got", "after"),
    [
        (response(429, error_body("QUOTA_EXCEEDED")), 60),
        (response(429, error_body("QUOTA_EXCEEDED"), "7"), 7),
        (response(429, {}, "7"), 7),
        (response(503, error_body("UNAVAILABLE")), 10),
        (response(503, error_body("UNAVAILABLE"), "Mon, 01 Mar 2027 12:00:30 GMT"), 30),
        (response(503, error_body("UNAVAILABLE"), "soon"), 10),
    ],
)
def test_retry_after_follows_the_response(got: PushResult, after: float) -> None:
    assert (got.outcome, got.retry_after) == (SendOutcome.RETRY, after)


def test_the_message_id_is_the_last_part_of_the_name() -> None:
    got = parse_response(200, {}, b'{"name":"projects/p/messages/0:12%3"}', NOW)
    assert (got.outcome, got.id) == (SendOutcome.ACCEPTED, "0:12%3")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "details", "@type", "errorCode", "fieldViolations", "message"]), inner
        )
    ),
)


@settings(max_examples=40)
@given(st.integers(200, 599), st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_response_is_parsed_and_only_200_is_accepted(status: int, body: bytes) -> None:
    got = parse_response(status, {}, body, NOW)
    assert (got.outcome is SendOutcome.ACCEPTED) <= (status == 200)
    assert not got.token_is_dead or status != 200
    if status >= 500 and status != 503 and b"FcmError" not in body:
        assert got.outcome is SendOutcome.UNKNOWN
