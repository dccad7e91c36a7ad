"""Attempt records: what an attempt leaves in its job, in bounded size."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.errors import InvalidPayload
from timebell.model.attempts import (
    FIRST_RECORD_PREFIX_LENGTH,
    describe_error,
    encode_recent,
    finalize_completion,
    first_start,
    last_progress,
    mark_retried,
    merge_delivery,
)
from timebell.model.job import Attempt, Completion, JobState
from timebell.model.progress import Progress, encode_progress

DUE = datetime(2027, 3, 1, 12, tzinfo=UTC)
STARTED, ENDED, LATER = (DUE + timedelta(seconds=seconds) for seconds in (1, 3, 60))
# With spaces, which show whether the stored text was encoded again.
EARLIER = '[{"attempt": 1, "error": "x", "progress": {"page": 1}}]'


def attempt(**fields: Any) -> Attempt:
    values: dict[str, Any] = {
        "id": "1", "tenant_id": "t", "topic": "a", "schedule_id": None, "scheduled_at": DUE, "kind": "planned",
        "timezone": "UTC", "payload": "null", "metadata": None, "target": None, "queue": "default", "retry": None,
        "timeout": None, "expires_at": None, "number": 2, "attempts_used": 0, "serial": False, "errors": None,
        "revision": None, "run_at": DUE, "started_at": STARTED,
    }  # fmt: skip
    return Attempt(**(values | fields))


def finalized(state: JobState, given: Attempt | None = None, **fields: Any) -> Completion:
    return finalize_completion(given or attempt(), Completion("1", 2, state, ENDED, **fields), "node-1")


def records(state: JobState, given: Attempt | None = None, **fields: Any) -> Any:
    errors = finalized(state, given, **fields).errors
    return None if errors is None else json.loads(errors)


RECORD = {
    "attempt": 2, "due": "2027-03-01T12:00:00+00:00", "startedAt": "2027-03-01T12:00:01+00:00",
    "endedAt": "2027-03-01T12:00:03+00:00", "node": "node-1", "code": None, "error": None,
}  # fmt: skip


def test_a_completed_attempt_without_details_leaves_no_record() -> None:
    assert finalized(JobState.COMPLETED, result="5").errors is None
    assert finalized(JobState.SKIPPED, reason="condition").errors is None
    assert finalized(JobState.SKIPPED, attempt(verdict={"holds": False})).errors is None


def test_fence_order_and_group_come_from_the_attempt() -> None:
    plain = finalized(JobState.COMPLETED, attempt(schedule_id="s"))
    assert (plain.schedule_id, plain.group_queue, plain.expected_state) == (None, None, JobState.RUNNING)
    other = finalized(
        JobState.COMPLETED, attempt(schedule_id="s", serial=True, group="g", queue="q", state=JobState.DISPATCHED)
    )
    assert (other.schedule_id, other.group_queue, other.expected_state) == ("s", "q", JobState.DISPATCHED)


def test_a_failed_attempt_is_recorded_with_its_details() -> None:
    reported = Progress(0.5, "page 3", STARTED)
    given = attempt(target_used={"name": "crm"}, source_read={"source": "duty"}, verdict={"holds": True},
                    progress=reported)  # fmt: skip
    assert records(
        JobState.FAILED, given, code="TIMEOUT", error="slow", traceback="Traceback\x00", attempts_allowed=4,
        delivery_record={"status": 500, "node": "node-2"},
    ) == [{
        **RECORD, "code": "TIMEOUT", "error": "slow", "status": 500, "node": "node-2", "target": {"name": "crm"},
        "condition": {"holds": True}, "source": {"source": "duty"}, "reportedProgress": reported.to_json(),
        "traceback": "Traceback\N{REPLACEMENT CHARACTER}", "attemptsAllowed": 4,
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"source_read": {"source": "duty"}}, {}),
        ({"progress": Progress(None, "x", STARTED)}, {}),
        ({}, {"error": ""}),
        ({}, {"delivery_record": {}}),
        ({}, {"progress": 0}),
    ],
)
def test_each_detail_is_enough_for_a_record(given: dict[str, Any], fields: dict[str, Any]) -> None:
    for state in (JobState.COMPLETED, JobState.CANCELLED):
        assert len(records(state, attempt(**given), **fields)) == 1


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.DISPATCHED])
def test_a_delivery_is_recorded_with_the_verdict_of_its_condition(state: JobState) -> None:
    assert records(state, attempt(verdict={"holds": True})) == [{**RECORD, "condition": {"holds": True}}]


def test_a_postponed_attempt_is_recorded_with_its_reason_and_next_time() -> None:
    postponed = finalized(JobState.PENDING, run_at=LATER, reason="target is full")
    assert json.loads(postponed.errors or "") == [
        {**RECORD, "code": "POSTPONED", "error": "target is full", "retryAt": "2027-03-01T12:01:00+00:00"}
    ]
    assert records(JobState.PENDING) == [{**RECORD, "code": "POSTPONED", "error": "The attempt was postponed."}]
    failed = records(JobState.PENDING, run_at=LATER, code="X", error="e")
    assert failed == [{**RECORD, "code": "X", "error": "e", "retryAt": "2027-03-01T12:01:00+00:00"}]


def test_a_retry_is_not_before_the_scheduled_time() -> None:
    early = DUE - timedelta(seconds=5)
    assert finalized(JobState.PENDING, run_at=early).run_at == DUE
    assert finalized(JobState.PENDING, run_at=LATER).run_at == LATER
    assert finalized(JobState.DISPATCHED, run_at=early, error="x").run_at == early


def test_texts_are_cut_and_valid() -> None:
    done = finalized(
        JobState.FAILED, reason="r" * 201, code="c" * 101, error="\x00" + "e" * 4000, traceback="t" * 10_001
    )
    assert (done.reason, done.code) == ("r" * 200, "c" * 100)
    assert done.error == "\N{REPLACEMENT CHARACTER}" + "e" * 3999
    (record,) = json.loads(done.errors or "")
    assert (len(record["error"]), record["traceback"]) == (1000, "t" * 10_000)


def test_progress_of_earlier_attempts_is_kept_until_newer_progress_or_the_result() -> None:
    given = attempt(errors=EARLIER)
    earlier, bare = json.loads(EARLIER)[0], {"attempt": 1, "error": "x"}
    assert records(JobState.PENDING, given)[0] == earlier
    assert records(JobState.PENDING, given, progress={"page": 2}) == [
        bare, {**RECORD, "code": "POSTPONED", "error": "The attempt was postponed.", "progress": {"page": 2}},
    ]  # fmt: skip
    assert records(JobState.FAILED, given, error="e")[0] == earlier
    assert records(JobState.COMPLETED, given) == [bare]
    assert finalized(JobState.CANCELLED, given, reason="x").errors == EARLIER
    without = EARLIER.replace("progress", "other")
    assert finalized(JobState.COMPLETED, attempt(errors=without)).errors == without


def test_a_report_is_merged_with_the_record_of_its_dispatch() -> None:
    dispatched = json.dumps([{"attempt": 1}, {"attempt": 2, "status": 202, "error": "x"}])
    assert records(JobState.COMPLETED, attempt(errors=dispatched), delivery_record={"seconds": 1}) == [
        {"attempt": 1}, {**RECORD, "status": 202, "seconds": 1},
    ]  # fmt: skip


def test_the_first_record_and_the_newest_nineteen_are_kept() -> None:
    def numbers(count: int) -> list[int]:
        return [one["attempt"] for one in json.loads(encode_recent([{"attempt": n + 1} for n in range(count)]))]

    assert numbers(20) == list(range(1, 21))
    assert numbers(21) == [1, *range(3, 22)]
    assert numbers(30) == [1, *range(12, 31)]


def test_too_large_records_lose_their_details_except_the_newest() -> None:
    large = {"response": "r" * 160_000, "traceback": "t" * 1000}
    kept = json.loads(encode_recent([{"attempt": 1, **large}, {"attempt": 2}, {"attempt": 3, **large}]))
    assert kept == [{"attempt": 1, **large}, {"attempt": 2}, {"attempt": 3, **large}]
    large = {"response": "r" * 170_000, "traceback": "t" * 1000}
    traced = {"attempt": 2, "traceback": "t"}
    cut = json.loads(encode_recent([{"attempt": 1, **large}, traced, {"attempt": 3, **large}]))
    assert cut == [{"attempt": 1}, {"attempt": 2}, {"attempt": 3, **large}]


def test_records_have_up_to_320_kib() -> None:
    frame = len('[{"error":""}]')
    assert len(encode_recent([{"error": "x" * (327_680 - frame)}])) == 327_680
    with pytest.raises(InvalidPayload, match=r"^attempts is 327,681 bytes") as refused:
        encode_recent([{"error": "x" * (327_681 - frame)}])
    assert refused.value.code == "PAYLOAD_TOO_LARGE"


def test_the_first_record_has_the_due_time_and_first_start_of_the_job() -> None:
    stored = finalized(JobState.PENDING).errors or ""
    assert first_start(LATER, ENDED, stored[:FIRST_RECORD_PREFIX_LENGTH]) == (DUE, STARTED)
    assert first_start(LATER, ENDED, None) == first_start(LATER, ENDED, "[]") == (LATER, ENDED)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (None, None, ""),
        ("TIMEOUT", None, "TIMEOUT"),
        ("TIMEOUT", "", "TIMEOUT"),
        (None, "slow", "slow"),
        ("", "slow", "slow"),
        ("TIMEOUT", "slow", "TIMEOUT: slow"),
        ("ValueError", "ValueError: no", "ValueError: no"),
    ],
)
def test_an_error_begins_with_its_code_once(code: str | None, error: str | None, text: str) -> None:
    assert describe_error(code, error) == text


def test_the_last_progress_is_in_the_record_or_in_the_row() -> None:
    recorded, running = Progress(1.0, "done", ENDED), Progress(0.5, None, STARTED)
    attempts = [
        {"attempt": 1, "reportedProgress": running.to_json()}, {"attempt": 2, "reportedProgress": recorded.to_json()},
    ]  # fmt: skip
    assert last_progress(2, attempts, encode_progress(running, 2)) == recorded
    assert last_progress(3, attempts, encode_progress(running, 3)) == running
    assert last_progress(2, [{"attempt": 2}], encode_progress(running, 2)) == running
    assert last_progress(1, [], None) is None


def test_a_manual_retry_is_marked_in_the_newest_record() -> None:
    marked = mark_retried('[{"attempt": 1}, {"attempt": 2}]', LATER, "ana")
    at = "2027-03-01T12:01:00+00:00"
    assert json.loads(marked or "") == [{"attempt": 1}, {"attempt": 2, "retriedAt": at, "retriedBy": "ana"}]
    assert json.loads(mark_retried('[{"attempt": 1}]', LATER, None) or "") == [{"attempt": 1, "retriedAt": at}]
    assert mark_retried(None, LATER, "ana") is None
    assert mark_retried("[]", LATER, "ana") == "[]"


def test_a_delivery_is_merged_into_the_records_in_order() -> None:
    delivery = {"attempt": 2, "status": 200, "error": "from the delivery"}
    assert merge_delivery([{"attempt": 3}, {"attempt": 1}], delivery) == [{"attempt": 1}, delivery, {"attempt": 3}]
    assert merge_delivery([{"attempt": 2, "x": 1}, {"attempt": 2, "error": "kept"}], delivery) == [
        {"attempt": 2, "status": 200, "error": "kept"}
    ]
    assert merge_delivery([{"other": 1}], {"attempt": 1}) == [{"other": 1}, {"attempt": 1}]
    assert merge_delivery([{"attempt": 1}, {"other": 1}], {"attempt": 2}) == [
        {"other": 1}, {"attempt": 1}, {"attempt": 2},
    ]  # fmt: skip
