"""The speed of a running campaign, its expected end, and what it waits for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.features.campaigns.store import progress, recipients

from .test_campaigns import Sender, due_at, sender

__all__ = ["sender"]


def forecast(sender: Sender, id_: str) -> Any:
    return sender.run(progress.forecast_campaign, sender.get(id_), sender.now)


def send_for(sender: Sender, id_: str, seconds: float) -> None:
    """Send the chunks that are due in the next seconds, and let the time pass."""
    end = sender.now + timedelta(seconds=seconds)
    while (job_id := sender.get(id_).job_id) is not None and (at := sender.run(due_at, job_id)) <= end:
        sender.now = max(sender.now, at)
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.now += timedelta(milliseconds=300)  # the chunk takes this long
            sender.close(id_, opened, sender.send(opened))
    sender.now = max(sender.now, end)


@pytest.mark.parametrize("delay_ms", [400, 2000])
def test_the_rate_and_the_end_are_right_after_ten_seconds(sender: Sender, delay_ms: int) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(400)))
    id_ = sender.make(chunkSize=10, chunkDelayMs=delay_ms)
    sender.open(id_)
    begin = sender.now
    sender.run(recipients.count_recipients, id_)
    send_for(sender, id_, 10)
    found = forecast(sender, id_)
    interval = timedelta(milliseconds=delay_ms)
    assert found.rate == pytest.approx(10 / interval.total_seconds(), rel=0.2)
    assert abs(found.ends_at - (begin + 40 * interval)) < 0.2 * 40 * interval
    assert (found.waiting_until, found.waiting_for) == (None, None)


def test_a_stalled_campaign_is_slower(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(100)))
    id_ = sender.make(chunkSize=10, chunkDelayMs=1000)
    send_for(sender, id_, 5)
    before = forecast(sender, id_).rate
    sender.now += timedelta(seconds=20)
    assert 0 < forecast(sender, id_).rate < before / 3


def test_a_past_outage_does_not_change_the_expected_end(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(400)))
    id_ = sender.make(chunkSize=10, chunkDelayMs=400)
    sender.open(id_)
    sender.run(recipients.count_recipients, id_)
    send_for(sender, id_, 5)
    before = forecast(sender, id_)
    sender.now += timedelta(seconds=20)  # until the chunks of a dead node are taken over
    send_for(sender, id_, 2)
    after = forecast(sender, id_)
    assert after.rate == pytest.approx(before.rate, rel=0.2)
    assert abs(after.ends_at - before.ends_at - timedelta(seconds=20)) < timedelta(seconds=4)


def test_a_campaign_between_two_zones_says_until_when_it_waits(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 2, tzinfo=UTC)
    for zone in ("Asia/Seoul", "America/New_York", "Europe/Berlin"):
        sender.register(f"phone-in-{zone}", timezone=zone)
    id_ = sender.make(localTime="2027-03-02T09:00")
    assert forecast(sender, id_).waiting_until is None  # it has not started
    send_for(sender, id_, 10)
    found = forecast(sender, id_)
    assert (found.rate, found.waiting_for) == (None, "Europe/Berlin")
    assert found.waiting_until == datetime(2027, 3, 2, 8, tzinfo=UTC)
    assert found.ends_at == datetime(2027, 3, 2, 14, tzinfo=UTC)
