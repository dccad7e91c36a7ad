"""Recipients who change their time zone during a campaign: each gets the message once, and every device is counted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from tests.rotation import rotated
from timebell.features.campaigns.store import recipients

from .test_campaigns import Sender, due_at, sender

__all__ = ["sender"]

# Both sides of the date line, half-hour offsets, and zones that change their clocks on 2027-03-14 and 2027-03-28.
ZONES = (
    "Pacific/Kiritimati", "Pacific/Auckland", "Asia/Seoul", "Asia/Kathmandu", "Europe/Berlin", "UTC", "America/Caracas",
    "America/New_York", "America/Los_Angeles", "Pacific/Pago_Pago",
)  # fmt: skip
OPTIONS = (
    {"localTime": "2027-03-14T09:00"},
    {"localTime": "2027-03-14T02:30"},  # skipped by the clocks of New York and Los Angeles
    {"localTime": "2027-03-28T02:30", "filters": {"platform": "ios"}},
    {"localTime": "2027-03-14T20:00", "quietHours": {"start": "21:00", "end": "08:00"}},
    {"quietHours": {"start": "06:00", "end": "22:00"}},
)


def due(sender: Sender, id_: str) -> datetime:
    """Return when the next job of a campaign is due."""
    at: datetime = sender.run(due_at, sender.get(id_).job_id)
    return at


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", rotated(range(3), ["0"]))
def test_every_traveller_gets_one_message(sender: Sender, options: dict[str, object], seed: int) -> None:
    random = Random(f"{seed} {options}")
    sender.now = datetime(2027, 3, 12, 3, tzinfo=UTC)
    home = {f"phone-{n:04}": random.choice(ZONES) for n in range(40)}
    for token, zone in home.items():
        sender.register(token, timezone=zone, platform=random.choice(("ios", "ios", "android")))
    sender.register("phone-of-nowhere", platform="ios")
    expected = set(home) | {"phone-of-nowhere"}
    if "filters" in options:
        expected = {device.token for device in sender.list_devices() if device.platform == "ios"}
    id_ = sender.make(**options)
    while sender.get(id_).ended_at is None:
        if sender.get(id_).job_id is not None:
            sender.now = max(sender.now, due(sender, id_))
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
        for token in random.sample(sorted(home), 8):
            sender.register(token, timezone=random.choice(ZONES))
        sender.now += timedelta(seconds=1)
    assert set(sender.phones) == expected
    assert set(sender.phones.values()) == {1}
    found = sender.get(id_)
    assert found.registered == found.opened + sum(found.excluded.values()) == 41
    assert found.expected == found.opened == len(expected)


@pytest.mark.parametrize(
    ("left_for", "there"), [("America/New_York", "Asia/Seoul"), ("America/New_York", "Asia/Tokyo")]
)
def test_who_travels_to_a_zone_that_is_over_or_was_never_planned_is_reached(
    sender: Sender, left_for: str, there: str
) -> None:
    sender.now = datetime(2027, 3, 12, 3, tzinfo=UTC)
    sender.register("phone-in-seoul", timezone="Asia/Seoul")
    sender.register("phone-in-new-york", "phone-of-traveller", timezone="America/New_York")
    id_ = sender.make(localTime="2027-03-12T13:00")
    while sender.get(id_).ended_at is None:
        sender.now = max(sender.now, due(sender, id_))
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
            sender.register("phone-of-traveller", timezone=there)
    assert sender.phones == {"phone-in-seoul": 1, "phone-in-new-york": 1, "phone-of-traveller": 1}


def test_devices_deleted_before_their_turn_are_counted(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make()
    opened, _ = sender.open(id_)
    sender.close(id_, opened, sender.send(opened))
    sender.run(recipients.count_recipients, id_)
    later = sorted({f"phone-{n:04}" for n in range(20)} - set(sender.phones))
    sender.delete(*later[:3])
    sender.send_all(id_)
    found = sender.get(id_)
    assert (found.opened, found.registered, found.excluded) == (17, 20, {"removed": 3})


def test_a_campaign_by_local_time_starts_when_its_first_zone_is_due(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, tzinfo=UTC)
    sender.register("phone-in-new-york", timezone="America/New_York")
    id_ = sender.make(localTime="2027-03-02T09:00")
    while sender.get(id_).started_at is None:
        sender.now = max(sender.now, due(sender, id_))
        sender.open(id_)
        if sender.get(id_).started_at is None:
            assert sender.get(id_).state == "pending"
        if sender.now == datetime(2027, 3, 2, 12, tzinfo=UTC):
            sender.edit(id_, title="Edited two hours before")
            sender.register("phone-of-late-comer", timezone="America/New_York")
            sender.now += timedelta(minutes=1)
    assert sender.get(id_).started_at == datetime(2027, 3, 2, 14, tzinfo=UTC)
    assert sender.get(id_).opened == 2


def test_a_campaign_that_a_size_check_paused_can_be_edited(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)), age=30)
    sender.register("phone-of-child", age=9)
    id_ = sender.make(maxRecipients=10)
    sender.open(id_)
    assert (sender.get(id_).state, sender.get(id_).started_at) == ("paused", None)
    sender.edit(id_, filters={"ageMin": 20})
    assert (sender.get(id_).state, sender.get(id_).reason) == ("paused", "edited")
    sender.resume(id_, can_approve=False)  # needs no approval: the check is repeated
    sender.open(id_)
    assert sender.get(id_).reason == "ceiling: 20 recipients, at most 10"
    sender.edit(id_, filters={"ageMax": 20})
    sender.resume(id_, can_approve=False)
    sender.send_all(id_)
    assert (sender.get(id_).state, sender.phones) == ("completed", {"phone-of-child": 1})
