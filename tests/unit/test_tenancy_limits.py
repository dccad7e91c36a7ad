"""Usage limits of a tenant: valid values, and which of them delay jobs."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.tenancy.limits import LimitReached, Limits

NAMES = (
    "requests_per_second", "schedules", "pending_jobs", "payload_bytes_per_day", "jobs_at_once", "starts_per_minute",
    "jobs_per_month",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_is_a_positive_integer_below_2_to_the_53(name: str) -> None:
    for value in (1, 2**53 - 1):
        assert Limits.parse({name: value}).to_json() == {name: value}
    assert Limits.parse({name: None}) == Limits()
    for wrong in (0, -1, 2**53, True, 1.0, "5"):
        with pytest.raises(InvalidInput, match=rf"^Invalid limit {name}: .* for {', '.join(NAMES)}\.$") as refused:
            Limits.parse({name: wrong})
        assert refused.value.code == "INVALID_LIMITS"


@pytest.mark.parametrize("values", [{"jobs": 5}, {"jobs": None}, {5: 5}])
def test_an_unknown_limit_is_refused(values: dict[Any, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Limits.parse(values)
    assert refused.value.code == "INVALID_LIMITS"


@pytest.mark.parametrize("name", NAMES)
def test_limits_of_running_jobs_and_starts_delay_jobs(name: str) -> None:
    assert Limits.parse({name: 5}).has_execution_limits is (name in ("jobs_at_once", "starts_per_minute"))
    assert not Limits().has_execution_limits


def test_a_reached_limit_says_when_to_retry() -> None:
    reached = LimitReached("Too many requests.", retry_after=0.5, fix="Wait.", limit={"requests_per_second": 5})
    assert (reached.code, str(reached)) == ("LIMIT_REACHED", "Too many requests. Wait.")
    assert (reached.retry_after, reached.limit) == (0.5, {"requests_per_second": 5})


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), False), (Limits(schedules=1), True), (Limits(pending_jobs=1), True),
        (Limits(payload_bytes_per_day=1), True), (Limits(schedules=1, pending_jobs=1, payload_bytes_per_day=1), True),
        (Limits(jobs_at_once=1, starts_per_minute=1, jobs_per_month=1), False),
    ],
)  # fmt: skip
def test_usage_limits_are_those_of_schedules_pending_jobs_and_payloads(limits: Limits, expected: bool) -> None:
    assert limits.has_usage_limits == expected
