"""What answers of FCM mean, those that are not as documented too; and the pace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.targets.push.fcm_errors import answer_of
from timebell.targets.push.pace import BURST, SHARE, Pace
from timebell.targets.push.provider import Answer, Fate
from timebell.testing.push_providers import NOW

FCM = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
BAD = "type.googleapis.com/google.rpc.BadRequest"


def answer(status: int, error: Any = None, retry_after: str | None = None) -> Answer:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return answer_of(status, headers, json.dumps({"error": error}).encode(), NOW)


def said(code: str, message: str = "no", *more: dict[str, Any]) -> dict[str, Any]:
    return {"message": message, "details": [{"@type": FCM, "errorCode": code}, *more]}


def field(name: str) -> dict[str, Any]:
    return {"@type": BAD, "fieldViolations": [{"field": name, "description": "bad"}]}


@pytest.mark.parametrize(
    ("got", "fate", "code", "remove"),
    [
        (answer(400, said("INVALID_ARGUMENT", "x", field("message.token"))), Fate.REFUSED, "INVALID_ARGUMENT", True),
        (answer(400, said("INVALID_ARGUMENT", "The registration token is not a valid FCM registration token")),
         Fate.REFUSED, "INVALID_ARGUMENT", True),
        (answer(400, said("INVALID_ARGUMENT", "x", field("message.data"))), Fate.REFUSED, "INVALID_ARGUMENT", False),
        (answer(400, {"message": "The registration token ...", "details": [field("message.android.ttl")]}),
         Fate.REFUSED, "INVALID_ARGUMENT", False),
        (answer(400, {"message": "Request contains an invalid argument."}), Fate.REFUSED, "INVALID_ARGUMENT", False),
        (answer(404, said("UNREGISTERED")), Fate.REFUSED, "UNREGISTERED", True),
        (answer(404, {"message": "no such project"}), Fate.REFUSED, "NOT_FOUND", False),
        (answer(403, {"message": "API not enabled"}), Fate.REFUSED, "PERMISSION_DENIED", False),
        (answer(401, {"message": "expired"}), Fate.AGAIN, "UNAUTHENTICATED", False),
        (answer(401, said("THIRD_PARTY_AUTH_ERROR")), Fate.REFUSED, "THIRD_PARTY_AUTH_ERROR", False),
        (answer(500, {"message": "oops"}), Fate.UNKNOWN, "UNEXPLAINED_5XX", False),
        (answer(503, {"status": "UNAVAILABLE"}), Fate.UNKNOWN, "UNEXPLAINED_5XX", False),
        (answer(302, None), Fate.REFUSED, "REFUSED", False),
        (answer(500, said("A_NEW_CODE")), Fate.UNKNOWN, "A_NEW_CODE", False),
        (answer_of(200, {}, b"<html>", NOW), Fate.UNKNOWN, "FCM_ANSWER_UNREADABLE", False),
    ],
)  # fmt: skip
def test_answers(got: Answer, fate: Fate, code: str, remove: bool) -> None:
    assert (got.fate, got.code, got.remove) == (fate, code, remove)


@pytest.mark.parametrize(
    ("got", "after"),
    [
        (answer(429, said("QUOTA_EXCEEDED")), 60),
        (answer(429, said("QUOTA_EXCEEDED"), "7"), 7),
        (answer(429, {}, "7"), 7),
        (answer(503, said("UNAVAILABLE")), 10),
        (answer(503, said("UNAVAILABLE"), "Mon, 01 Mar 2027 12:00:30 GMT"), 30),
        (answer(503, said("UNAVAILABLE"), "soon"), 10),
    ],
)
def test_when_to_try_again(got: Answer, after: float) -> None:
    assert (got.fate, got.after) == (Fate.AGAIN, after)


def test_the_id_is_the_last_part_of_the_name() -> None:
    got = answer_of(200, {}, b'{"name":"projects/p/messages/0:12%3"}', NOW)
    assert (got.fate, got.id) == (Fate.ACCEPTED, "0:12%3")


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
def test_no_answer_breaks_it_and_only_200_is_accepted(status: int, body: bytes) -> None:
    got = answer_of(status, {}, body, NOW)
    assert (got.fate is Fate.ACCEPTED) <= (status == 200)
    assert not got.remove or status != 200
    if status >= 500 and b"FcmError" not in body:
        assert got.fate is Fate.UNKNOWN


STEPS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 2_000), st.none() | st.integers(0, 90)), min_size=1, max_size=40
)


@settings(max_examples=50)
@given(st.integers(60, 60_000), STEPS)
def test_the_pace_never_exceeds_the_quota_nor_goes_while_closed(per_minute: int, steps: Any) -> None:
    pace, now, given_out = Pace(per_minute, 0.0), 0.0, 0
    for passed, wanted, exceeded in steps:
        now += passed
        granted = pace.take(wanted, now)
        assert 0 <= granted <= wanted
        assert not granted or now >= pace.closed_until
        given_out += granted
        assert given_out <= per_minute / 60 * SHARE * (now + BURST) + 1
        if exceeded is not None:
            pace.exceeded(now, exceeded)
            assert pace.take(10, now) == 0 or exceeded == 0
        assert pace.take(0, now) == 0


def test_told_to_slow_down_it_has_no_burst_left() -> None:
    pace = Pace(60_000, 0.0)
    pace.exceeded(0.0, 0.0)
    assert pace.take(1_000, 0.0) <= 1


def test_it_slows_down_by_half_and_recovers_within_a_minute() -> None:
    pace = Pace(60_000, 0.0)
    for _ in range(50):  # that come together
        pace.exceeded(100.0, 5.0)
    assert pace.rate == pace.full / 2
    assert pace.take(10, 104.9) == 0
    assert pace.wait(104.0) == 1.0
    pace.take(10, 105.0)
    pace.take(10, 136.0)
    assert pace.rate == pace.full
