"""Policies: choices, durations, and the pauses of a retry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.model.payload import decode, encode
from timebell.model.policy import Backoff, Overlap, Retry, parse_choice, parse_seconds


def test_a_choice_is_one_of_the_names() -> None:
    assert parse_choice(Overlap, "queue", "overlap") is Overlap.QUEUE
    for wrong in ("never", "QUEUE", None, 5, ["queue"]):
        with pytest.raises(InvalidInput) as refused:
            parse_choice(Overlap, wrong, "overlap")
        assert (refused.value.code, refused.value.message) == ("INVALID_OVERLAP", f"overlap is {wrong!r}.")
        assert refused.value.fix == "Use skip, queue, cancel_previous, allow."


@pytest.mark.parametrize(
    ("value", "minimum", "seconds"),
    [(0, 0.0, 0.0), (0.001, 0.001, 0.001), ("15m", 1.0, 900.0), (timedelta(days=1), 0.0, 86400.0), (9e9, 0.0, 9e9)],
)
def test_durations_are_read_as_seconds(value: Any, minimum: float, seconds: float) -> None:
    result = parse_seconds(value, "timeout", minimum=minimum)
    assert (result, type(result)) == (seconds, float)


@pytest.mark.parametrize("value", [0.9, 1e10, float("nan"), True, "soon", "0s", None, timedelta(seconds=-5)])
def test_other_durations_are_refused(value: Any) -> None:
    message = r"^timeout is .*, which is not a duration of at least 1 seconds\. Use a timedelta"
    with pytest.raises(InvalidInput, match=message) as refused:
        parse_seconds(value, "timeout", minimum=1)
    assert refused.value.code == "INVALID_DURATION"


def test_four_attempts_are_the_default() -> None:
    assert Retry() == Retry(4, Backoff.EXPONENTIAL, 5.0, 600.0, 0.1)
    assert Retry.parse({"attempts": 3, "delay": "1m"}) == Retry(attempts=3, delay=60.0)
    assert Retry(backoff="fixed").backoff is Backoff.FIXED
    assert Retry.parse(None) is None
    for wrong in ({"tries": 3}, 5, "3", [3]):
        with pytest.raises(InvalidInput, match=r"^retry is .* Use a Retry, or a mapping with attempts, ") as refused:
            Retry.parse(wrong)  # type: ignore[arg-type]
        assert refused.value.code == "INVALID_RETRY"


@given(
    st.builds(
        Retry, attempts=st.integers(1, 1000), backoff=st.sampled_from(["fixed", "linear", "exponential"]),
        delay=st.floats(0, 1e9), max_delay=st.floats(0, 1e9), jitter=st.floats(0, 1),
    )
)  # fmt: skip
def test_retry_round_trips_through_json(retry: Retry) -> None:
    assert Retry.parse(decode(encode(retry.to_json()))) == retry
    assert Retry.parse(retry) is retry


@pytest.mark.parametrize(
    "fields",
    [{"attempts": 0}, {"attempts": 1001}, {"attempts": True}, {"attempts": 2.0}, {"backoff": "never"}, {"jitter": -0.1},
     {"jitter": 1.1}, {"jitter": float("nan")}, {"delay": -1}, {"delay": float("inf")}, {"max_delay": "long"}],
)  # fmt: skip
def test_invalid_retry_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Retry(**fields)
    assert refused.value.code == ("INVALID_DURATION" if fields.keys() & {"delay", "max_delay"} else "INVALID_RETRY")
    with pytest.raises(InvalidInput):
        Retry.parse(fields)


def test_the_limits_of_a_retry_are_valid() -> None:
    for attempts, jitter in ((1, 0), (1000, 1)):
        assert Retry(attempts=attempts, jitter=jitter).attempts == attempts


@pytest.mark.parametrize(
    ("attempts_used", "fixed", "linear", "exponential"), [(1, 2.0, 2.0, 2.0), (2, 2.0, 4.0, 4.0), (4, 2.0, 8.0, 10.0)]
)
def test_pauses_grow_up_to_the_maximum(attempts_used: int, fixed: float, linear: float, exponential: float) -> None:
    for backoff, pause in (("fixed", fixed), ("linear", linear), ("exponential", exponential)):
        retry = Retry(backoff=backoff, delay=2, max_delay=10, jitter=0.5)  # type: ignore[arg-type]
        assert retry.pause_seconds(attempts_used, 0.0) == pause
        assert retry.pause_seconds(attempts_used, 0.5) == pause * 1.25


def test_exponential_pauses_stop_growing_after_61_attempts() -> None:
    retry = Retry(attempts=1000, delay=1e-10, max_delay=9e9, jitter=0)
    pauses = [retry.pause_seconds(attempts, 0.0) for attempts in (60, 61, 62, 1000)]
    assert pauses == [1e-10 * 2.0**59, *[1e-10 * 2.0**60] * 3]


@pytest.mark.parametrize(
    ("fields", "retried", "failed"),
    [
        ({}, [OSError(), ValueError()], []),
        ({"retry_on": OSError}, [OSError(), TimeoutError()], [ValueError()]),
        ({"fail_on": [ValueError]}, [OSError()], [ValueError(), UnicodeError()]),
        ({"retry_on": (OSError,), "fail_on": TimeoutError}, [OSError()], [TimeoutError(), ValueError()]),
    ],
)
def test_exceptions_decide_about_a_retry(
    fields: dict[str, Any], retried: list[Exception], failed: list[Exception]
) -> None:
    retry = Retry(**fields)
    assert all(map(retry.is_retryable, retried))
    assert not any(map(retry.is_retryable, failed))
    if fields:
        with pytest.raises(
            InvalidInput, match=r"^retry_on and fail_on cannot be stored .* Specify them for the handler"
        ):
            retry.to_json()


@pytest.mark.parametrize("name", ["retry_on", "fail_on"])
def test_only_exceptions_can_be_listed(name: str) -> None:
    for wrong in ("OSError", int, OSError(), [OSError, 5], None):
        with pytest.raises(InvalidInput, match=rf"^retry {name} is .* Use {name}=\(TimeoutError, OSError\)") as refused:
            Retry(**{name: wrong})  # type: ignore[arg-type]
        assert refused.value.code == "INVALID_RETRY"
