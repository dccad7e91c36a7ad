"""Who a campaign leaves out, counted with the reason on each store; and whom it is pinned to."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from timebell.errors import Conflict
from timebell.model.campaign_plan import Sending
from timebell.store.campaigns import campaigns, devices

from .test_campaigns import S, Sender, sender

__all__ = ["sender"]


def test_everybody_is_sent_to_or_left_out_for_one_reason(sender: Sender) -> None:
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
    assert (found.accepted, found.left_out) == (20, {"pushOff": 2, "marketingOff": 2, "filters": 2})
    sender.run(campaigns.retry, "default", id_, unknown=True, now=sender.now)
    sender.send_all(id_)
    assert sender.get(id_).left_out == found.left_out  # a retry passes over nobody again


def test_who_consents_to_all_that_is_asked_is_left_out_by_nothing(sender: Sender) -> None:
    sender.register("phone-0001", push_on=False)
    id_ = sender.make()
    sender.send_all(id_)
    assert (sender.get(id_).accepted, sender.get(id_).left_out) == (1, {})


def test_zones_are_left_out_by_the_hour_and_by_the_end(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 22, 30, tzinfo=UTC)
    sender.register("phone-in-london", "phone-in-leeds", timezone="Europe/London", gender="F")
    sender.register("phone-of-him", timezone="Europe/London", gender="M")
    sender.register("phone-in-berlin", timezone="Europe/Berlin", gender="M")  # where nobody is meant
    sender.register("phone-of-nowhere", gender="M")
    sender.register("phone-in-new-york", timezone="America/New_York", gender="F")
    quiet = {"start": "21:00", "end": "08:00", "then": "skip"}
    id_ = sender.make(quietHours=quiet, filters={"gender": "F"})
    sender.send_all(id_)
    found = sender.get(id_)
    assert (found.accepted, found.left_out) == (1, {"quiet": 2, "filters": 3})
    assert {each.token for each in sender.run(campaigns.left, found, 10, None)} == {"phone-in-london", "phone-in-leeds"}
    id_ = sender.make(localTime="2027-03-02T01:00", expiresAt="2027-03-02T04:00:00Z", filters={"gender": "F"})
    while sender.get(id_).state != "completed":
        sender.now = max(sender.now, datetime(2027, 3, 2, 2, tzinfo=UTC))
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
    assert sender.get(id_).left_out == {"expired": 1, "filters": 3}
    assert {each.token for each in sender.run(campaigns.left, sender.get(id_), 10, None)} == {"phone-in-new-york"}


def test_pinned_means_those_who_fitted_when_it_was_made_and_still_consent(sender: Sender) -> None:
    sender.register("phone-stays", "phone-moves", "phone-regrets", "phone-goes", age=30, marketing_on=True)
    filters = {"ageMin": 30, "ageMax": 39, "marketingOnOff": True}
    pinned, live = (sender.make(filters=filters, audienceAs=how) for how in ("pinned", "live"))
    sender.now += S
    sender.register("phone-moves", age=40)
    sender.register("phone-regrets", marketing_on=False)
    sender.register("phone-comes", age=35, marketing_on=True)
    sender.run(devices.remove, "default", ["phone-goes"])
    for id_, to in ((pinned, {"phone-stays", "phone-moves"}), (live, {"phone-stays", "phone-comes"})):
        sender.phones.clear()
        sender.send_all(id_)
        assert set(sender.phones) == to
    assert sender.get(pinned).left_out == {"marketingOff": 1, "filters": 1}
    assert sender.get(live).pinned_at is None
    sender.run(campaigns.prune, sender.now + S, 10)
    assert sender.run(devices.count, "default", Sending.read({"filters": {"audience": f"@{pinned}"}}).filters) == 0


def test_an_edit_pins_anew(sender: Sender) -> None:
    sender.register("phone-0001", age=30)
    id_ = sender.make(audienceAs="pinned", filters={"ageMin": 30})
    sender.register("phone-0002", age=20)
    first = sender.get(id_).pinned_at

    def change(found: campaigns.Campaign) -> campaigns.Campaign:
        return replace(found, sending=Sending.read({**found.sending.json(), "filters": {"ageMin": 20}}))

    sender.now += S
    sender.run(campaigns.edit, "default", id_, change, None, sender.now, sender.now)
    assert (first, sender.get(id_).pinned_at) == (sender.now - S, sender.now)
    sender.send_all(id_)
    assert sorted(sender.phones) == ["phone-0001", "phone-0002"]


@pytest.mark.parametrize("how", ["live", "pinned"])
def test_content_is_pinned_once_it_has_begun_unless_it_is_live(sender: Sender, how: str) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(14)))
    id_ = sender.make(contentAs=how)
    opened, _ = sender.open(id_)
    sender.close(id_, opened, sender.send(opened))

    def titled(found: campaigns.Campaign, **more: object) -> campaigns.Campaign:
        return replace(found, sending=Sending.read({**found.sending.json(), "title": "Mended", **more}))

    def elsewhere(found: campaigns.Campaign) -> campaigns.Campaign:
        return titled(found, filters={"gender": "F"})

    with pytest.raises(Conflict) as refused:
        sender.run(campaigns.edit, "default", id_, elsewhere, None, sender.now, sender.now)
    assert refused.value.code == "CAMPAIGN_STATE"
    if how == "pinned":
        with pytest.raises(Conflict):
            sender.run(campaigns.edit, "default", id_, titled, None, sender.now, sender.now)
    else:
        sender.run(campaigns.edit, "default", id_, titled, None, sender.now, sender.now)
    opened, _ = sender.open(id_)
    assert opened.campaign is not None
    assert opened.campaign.sending.title == ("Mended" if how == "live" else "Hello")
    sender.close(id_, opened, sender.send(opened))
    assert (sender.get(id_).state, sorted(sender.phones.values())) == ("completed", [1] * 14)
