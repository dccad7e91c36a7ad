"""Error counts of a campaign, and when they pause it."""

from __future__ import annotations

import pytest

from timebell.features.campaigns.model.health import Health


def test_results_are_counted_and_stored() -> None:
    health = Health.from_json(None)
    assert health == Health.from_json({}) == Health()
    assert (health.sample, health.failed, health.codes) == (0, 0, {})
    health.add(["A", "B", "A"], 10, 2)
    health.add(["B", "A"], 5, 1)
    assert health.to_json() == {"codes": {"A": 3, "B": 2}, "sample": 15, "failed": 3}
    assert Health.from_json(health.to_json()) == health
    health.reset_sample()
    assert health == Health({"A": 3, "B": 2})


def test_the_sample_is_halved_above_1_000_results() -> None:
    health = Health()
    health.add((), 1000, 101)
    assert (health.sample, health.failed) == (1000, 101)
    health.add((), 1, 0)
    assert (health.sample, health.failed) == (500, 50)


@pytest.mark.parametrize(
    ("sample", "failed", "exceeds"), [(99, 99, False), (100, 11, True), (100, 10, False), (1000, 100, False)]
)
def test_more_than_the_share_of_at_least_100_results_exceeds_it(sample: int, failed: int, exceeds: bool) -> None:
    assert Health({}, sample, failed).exceeds(0.1) is exceeds


def test_the_30_most_frequent_codes_are_kept() -> None:
    health = Health()
    health.add([f"C{number}" for number in range(30) for _ in range(2)] + ["RARE"], 0, 0)
    assert len(health.codes) == 30
    assert "RARE" not in health.codes


def test_the_most_frequent_codes_are_described() -> None:
    health = Health({"C": 2, "B": 3, "A": 1480, "D": 1}, 2000, 1234)
    assert health.describe_codes() == "1,480 A, 3 B, 2 C"
    assert health.describe_sample() == "1,234 of the last 2,000 messages refused (A)"
    assert Health().describe_codes() is None
    assert Health().describe_sample() == "0 of the last 0 messages refused"
