"""Exclusions of a campaign by reason, and pinned audiences and content."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from timebell.errors import Conflict
from timebell.features.campaigns.model.campaign_plan import CampaignPlan
from timebell.features.campaigns.store import actions, campaigns, definitions, devices, recipients
from timebell.store.transaction import Transaction

from .test_campaigns import S, Sender, due_at, sender

__all__ = ["sender"]


def test_every_device_is_sent_to_or_excluded_for_one_reason(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)), gender="F", marketing_on=True)
    sender.register("phone-of-muted", gender="F", marketing_on=True, push_on=False)
    sender.register("phone-of-muted-too", gender="F", push_on=False)
    sender.register("phone-of-unasked", gender="F")
    sender.register("phone-of-no", gender="F", marketing_on=False)
    sender.register("phone-of-him", gender="M", marketing_on=True)
    sender.register("phone-of-whom", push_on=False)
    sender.now += S
    id_ = sender.make(filters={"gender": "F", "pushOnOff": "Y", "marketingOnOff": "Y"})
    sender.send_all(id_)
    found = sender.get(id_)
    assert (found.accepted, found.excluded) == (20, {"pushOff": 2, "marketingOff": 2, "filters": 2})
    sender.run(actions.retry_campaign, "default", id_, include_unknown=True, now=sender.now)
    sender.send_all(id_)
    assert sender.get(id_).excluded == found.excluded  # a retry does not count exclusions again


OPTIONS = (
    {"filters": {"pushOnOff": "Y", "platform": "ios"}, "holdOut": 0.2},
    {"filters": {"marketingOnOff": "Y"}, "quietHours": {"start": "21:00", "end": "08:00", "then": "skip"}},
    {"localTime": "2027-03-02T09:00", "expiresAt": "2027-03-02T10:00:00Z", "filters": {"onePerUser": True}},
)
ZONES = ("Asia/Seoul", "Europe/Berlin", "America/New_York", None)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stops", [False, True])
def test_the_numbers_always_add_up(sender: Sender, options: dict[str, object], stops: bool) -> None:
    random = Random(f"{options} {stops}")
    sender.now = datetime(2027, 3, 1, 23, tzinfo=UTC)

    def change(token: str) -> None:
        sender.register(
            token, platform=random.choice(("ios", "android")), push_on=random.random() < 0.8,
            marketing_on=random.choice((True, True, False)), timezone=random.choice(ZONES),
            user_id=f"user-{random.randrange(25)}",
        )  # fmt: skip

    tokens = [f"phone-{n:04}" for n in range(50)]
    for token in tokens:
        change(token)
    id_ = sender.make(**options)
    steps, at_start = 0, 0
    while (found := sender.get(id_)).ended_at is None:
        if found.job_id is not None:
            sender.now = max(sender.now, sender.run(due_at, found.job_id))
        opened, _ = sender.open(id_)
        sender.run(recipients.count_recipients, id_)
        at_start = at_start or sender.get(id_).registered or 0
        if opened.recipients:
            steps += 1
            if stops and steps == 2:  # while a chunk is open
                sender.run(actions.stop_campaign, "default", id_, "enough", sender.now)
            sender.close(id_, opened, sender.send(opened))
        for token in random.sample(tokens, 4):
            change(token)
        sender.delete(random.choice(tokens))
        sender.now += S
    sender.run(recipients.count_recipients, id_)  # the job that a stop inserts
    found = sender.get(id_)
    assert found.state == ("stopped" if stops else "completed")
    assert found.opened + sum(found.excluded.values()) == found.registered == at_start
    left_out = sum(found.excluded.get(reason, 0) for reason in ("quiet", "expired", "stopped"))
    assert found.opened + left_out == found.expected
    assert bool(found.excluded.get("stopped")) is stops


def test_a_device_that_is_deleted_during_the_count_is_counted_once(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(10)))
    id_ = sender.make(chunkSize=5)
    opened, _ = sender.open(id_)
    dead = opened.recipients[0]
    count = devices.count_by_reason

    def count_then_delete(tx: Transaction, *args: Any, **options: Any) -> Any:
        counted = count(tx, *args, **options)
        devices.delete_dead(tx, "default", [(dead.id, dead.token)])  # as another transaction does on a server
        return counted

    monkeypatch.setattr(devices, "count_by_reason", count_then_delete)
    sender.run(recipients.count_recipients, id_)
    assert (sender.get(id_).registered, sender.get(id_).expected) == (10, 10)


def test_a_device_that_meets_all_filters_is_not_excluded(sender: Sender) -> None:
    sender.register("phone-0001", push_on=False)
    id_ = sender.make()
    sender.send_all(id_)
    assert (sender.get(id_).accepted, sender.get(id_).excluded) == (1, {})


def test_zones_are_excluded_by_quiet_hours_and_by_expiry(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 22, 30, tzinfo=UTC)
    sender.register("phone-in-london", "phone-in-leeds", timezone="Europe/London", gender="F")
    sender.register("phone-of-him", timezone="Europe/London", gender="M")
    sender.register("phone-in-berlin", timezone="Europe/Berlin", gender="M")  # matches no filter
    sender.register("phone-of-nowhere", gender="M")
    sender.register("phone-in-new-york", timezone="America/New_York", gender="F")
    quiet = {"start": "21:00", "end": "08:00", "then": "skip"}
    id_ = sender.make(quietHours=quiet, filters={"gender": "F"})
    sender.send_all(id_)
    found = sender.get(id_)
    assert (found.accepted, found.excluded) == (1, {"quiet": 2, "filters": 3})
    assert {each.token for each in sender.run(recipients.list_remaining, found, 10, None)} == {
        "phone-in-london",
        "phone-in-leeds",
    }
    id_ = sender.make(localTime="2027-03-02T01:00", expiresAt="2027-03-02T04:00:00Z", filters={"gender": "F"})
    while sender.get(id_).ended_at is None:
        sender.now = max(sender.now, datetime(2027, 3, 2, 2, tzinfo=UTC))
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
    assert sender.get(id_).excluded == {"expired": 1, "filters": 3}
    assert {each.token for each in sender.run(recipients.list_remaining, sender.get(id_), 10, None)} == {
        "phone-in-new-york"
    }


def test_a_pinned_audience_is_fixed_at_creation_except_for_consent(sender: Sender) -> None:
    sender.register("phone-stays", "phone-moves", "phone-regrets", "phone-goes", age=30, marketing_on=True)
    filters = {"ageMin": 30, "ageMax": 39, "marketingOnOff": True}
    pinned, live = (sender.make(filters=filters, audienceFormat=how) for how in ("pinned", "live"))
    sender.now += S
    sender.register("phone-moves", age=40)
    sender.register("phone-regrets", marketing_on=False)
    sender.register("phone-comes", age=35, marketing_on=True)
    sender.run(devices.delete_by_token, "default", ["phone-goes"])
    for id_, to in ((pinned, {"phone-stays", "phone-moves"}), (live, {"phone-stays", "phone-comes"})):
        sender.phones.clear()
        sender.send_all(id_)
        assert set(sender.phones) == to
    assert sender.get(pinned).excluded == {"marketingOff": 1, "filters": 1}
    assert sender.get(live).pinned_at is None
    sender.run(campaigns.prune_campaigns, sender.now + S, 10)
    assert (
        sender.run(
            devices.count_devices,
            "default",
            CampaignPlan.from_json({"filters": {"audience": f"@{pinned}"}}).filters,
            sender.now,
        )
        == 0
    )


def test_an_edit_pins_the_audience_again(sender: Sender) -> None:
    sender.register("phone-0001", age=30)
    id_ = sender.make(audienceFormat="pinned", filters={"ageMin": 30})
    sender.register("phone-0002", age=20)
    first = sender.get(id_).pinned_at

    def change(found: campaigns.Campaign) -> campaigns.Campaign:
        return replace(found, plan=CampaignPlan.from_json({**found.plan.to_json(), "filters": {"ageMin": 20}}))

    sender.now += S
    sender.run(definitions.edit_campaign, "default", id_, change, None, sender.now)
    assert (first, sender.get(id_).pinned_at) == (sender.now - S, sender.now)
    sender.send_all(id_)
    assert sorted(sender.phones) == ["phone-0001", "phone-0002"]


@pytest.mark.parametrize("how", ["live", "pinned"])
def test_content_is_pinned_after_the_start_unless_it_is_live(sender: Sender, how: str) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(14)))
    id_ = sender.make(contentType=how)
    opened, _ = sender.open(id_)
    sender.close(id_, opened, sender.send(opened))

    def titled(found: campaigns.Campaign, **more: object) -> campaigns.Campaign:
        return replace(found, plan=CampaignPlan.from_json({**found.plan.to_json(), "title": "Mended", **more}))

    def elsewhere(found: campaigns.Campaign) -> campaigns.Campaign:
        return titled(found, filters={"gender": "F"})

    with pytest.raises(Conflict) as refused:
        sender.run(definitions.edit_campaign, "default", id_, elsewhere, None, sender.now)
    assert refused.value.code == "CAMPAIGN_STATE"
    if how == "pinned":
        with pytest.raises(Conflict):
            sender.run(definitions.edit_campaign, "default", id_, titled, None, sender.now)
    else:
        sender.run(definitions.edit_campaign, "default", id_, titled, None, sender.now)
    opened, _ = sender.open(id_)
    assert opened.campaign is not None
    assert opened.campaign.plan.title == ("Mended" if how == "live" else "Hello")
    sender.close(id_, opened, sender.send(opened))
    sender.send_all(id_)
    assert (sender.get(id_).state, sorted(sender.phones.values())) == ("completed", [1] * 14)
