"""Bodies, outcomes and the imports of timebell.targets.base."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest

from timebell.errors import InvalidInput
from timebell.targets.base import (
    Delivery,
    Outcome,
    cloudevent,
    decode_text,
    event_fields,
    format_utc,
    parse_retry_after,
    reject_unknown_options,
)

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def test_plain_body_has_the_fields_of_arrived(delivery: Delivery) -> None:
    assert event_fields(delivery) == {
        "topic": "notifications.task-reminder",
        "payload": {"text": "약 먹기 💊", "n": 1},
        "metadata": {"ownerId": "u-7"},
        "timezone": "Asia/Seoul",
        "scheduledAt": "2027-03-14T09:26:52Z",
        "firedAt": "2027-03-14T09:26:52.250000Z",
        "lateBy": 0.25,
        "jobId": "0190-job",
        "scheduleId": "0190-schedule",
        "scheduleName": "pills",
        "occurrenceKey": "occ_2W8c",
        "attempt": 2,
        "upcoming": ["2027-03-15T09:26:52Z"],
    }


def test_cloudevent_has_required_attributes_and_a_stable_id(delivery: Delivery) -> None:
    first = cloudevent(delivery)
    delivery.attempt += 1
    second = cloudevent(delivery)
    assert first["specversion"] == "1.0"
    assert (first["source"], first["type"]) == ("timebell", "timebell.job.due")
    assert (first["subject"], first["time"]) == ("notifications.task-reminder", "2027-03-14T09:26:52Z")
    assert first["datacontenttype"] == "application/json"
    assert first["id"] == second["id"] == "occ_2W8c"
    assert first["data"] == event_fields(delivery) | {"attempt": 2}


def test_instants_are_utc_with_z() -> None:
    assert format_utc(datetime(2027, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))) == "2027-01-01T00:00:00Z"


def test_outcome_constructors() -> None:
    assert Outcome.ok({"a": 1}) == Outcome(delivered=True, result={"a": 1})
    failed = Outcome.failed("TIMEOUT", "late", retry_after=3.0)
    assert (failed.delivered, failed.retryable, failed.code, failed.retry_after) == (
        False,
        True,
        "TIMEOUT",
        3.0,
    )


def test_decoded_text_can_be_stored() -> None:
    assert decode_text(b"a\x00b\xff") == "a\ufffdb\ufffd"


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InvalidInput, match="It takes: body, url") as caught:
        reject_unknown_options({"uri": 1}, ("url", "body"))
    assert caught.value.code == "INVALID_TARGET_OPTIONS"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("9" * 500, 86_400.0),
        ("Fri, 01 Jan 2027 00:00:30 GMT", 30.0),
        ("Fri, 01 Jan 2027 00:00:30 -0000", 30.0),
        ("Friday, 01-Jan-27 00:00:30 GMT", 30.0),
        ("Thu, 31 Dec 2026 00:00:00 GMT", 0.0),
        ("Fri, 01 Jan 2044 00:00:00 GMT", 86_400.0),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("²", None),
        ("Fri, 99 Jan 2027 00:00:30 GMT", None),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds


def test_importing_base_loads_no_heavy_library() -> None:
    heavy = ("h11", "httptools", "timebell.http_client", "cryptography")
    code = f"import sys, timebell.targets.base; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"
