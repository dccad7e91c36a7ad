"""Variants of a message, recipients that are held out, and opens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.experiment import parse_experiment
from timebell.features.campaigns.store import actions, recipients, results

from .test_campaigns import Sender, sender

__all__ = ["sender"]

AB = [{"name": "A", "share": 0.75}, {"name": "B", "share": 0.25, "title": "Hi"}]


def counted(sender: Sender, id_: str) -> dict[str | None, Any]:
    return {each.variant: each for each in sender.run(results.count_results, sender.get(id_))}


def rows(sender: Sender, id_: str) -> list[Any]:
    return list(sender.run(recipients.list_deliveries, id_, 500, None, None))


def test_variants_have_their_shares_and_depend_on_the_user(sender: Sender) -> None:
    for n in range(200):
        sender.register(f"phone-{n}-a", f"phone-{n}-b", user_id=f"user-{n}")
    id_ = sender.make(variants=AB, chunkSize=50)
    sender.send_all(id_)
    found = counted(sender, id_)
    assert list(found) == ["A", "B"]
    assert 60 < found["B"].accepted < 140 and found["A"].accepted + found["B"].accepted == 400
    variants = {(row["user_id"], row["variant"]) for row in rows(sender, id_)}
    assert len(variants) == 200
    again = sender.make(variants=AB)
    sender.send_all(again)
    assert {(row["user_id"], row["variant"]) for row in rows(sender, again)} != variants


@pytest.mark.parametrize("options", [{}, {"quietHours": {"start": "03:00", "end": "04:00"}}])
def test_held_out_recipients_get_nothing_and_are_accounted_for(sender: Sender, options: dict[str, Any]) -> None:
    for n in range(100):
        sender.register(f"phone-{n}", timezone=("Asia/Seoul", "Europe/Berlin", None)[n % 3], age=n)
    id_ = sender.make(holdOut=0.3, filters={"ageMin": 10}, **options)
    sender.run(recipients.count_recipients, id_)
    opened, _ = sender.open(id_)
    sender.run(recipients.count_recipients, id_)
    assert sender.get(id_).expected == 63  # an estimate
    *accepted, last = sender.send(opened)
    sender.close(id_, opened, [*accepted, replace(last, state="refused")])
    sender.send_all(id_)
    campaign = sender.get(id_)
    held = campaign.excluded["holdOut"]
    assert 10 < held < 45
    assert campaign.opened == 90 - held == len(sender.phones)
    assert campaign.excluded == {"filters": 10, "holdOut": held}
    assert campaign.registered == 100
    assert counted(sender, id_)[None].held == held
    held_ids = {row["recipient"] for row in rows(sender, id_) if row["state"] == "held"}
    sender.run(actions.retry_campaign, "default", id_, include_unknown=True, now=sender.now)
    sender.send_all(id_)
    assert {row["recipient"] for row in rows(sender, id_) if row["state"] == "held"} == held_ids
    assert sender.get(id_).registered == 100


def test_a_device_opens_a_message_once(sender: Sender) -> None:
    sender.register("phone-1", "phone-2", "phone-3", user_id="ann")
    id_ = sender.make(variants=[{"name": "A"}, {"name": "B", "body": "?"}])
    sender.send_all(id_)
    sender.register("phone-late")
    campaign = sender.get(id_)
    for token, expected in (
        ("phone-1", True),
        ("phone-1", True),
        ("phone-2", True),
        ("phone-late", False),
        ("?", False),
    ):
        assert sender.run(results.record_open, campaign, token, sender.now) is expected
    (variant,) = {row["variant"] for row in rows(sender, id_)}
    result = counted(sender, id_)[variant]
    assert (result.accepted, result.opened, result.open_rate) == (3, 2, pytest.approx(2 / 3))
    (other,) = {"A", "B"} - {variant}
    assert counted(sender, id_)[other].open_rate is None
    assert sum(row["opened_at"] is not None for row in rows(sender, id_)) == 2


@pytest.mark.parametrize(
    ("variants", "hold_out", "word"),
    [
        ([{"name": "A"}], None, "2 to 10"),
        ([{"name": "A"}, {"name": "A"}], None, "same name"),
        ([{"name": "A", "share": 0.5}, {"name": "B"}], None, "others do not"),
        ([{"name": "A", "share": 0.5}, {"name": "B", "share": 0.4}], None, "add up to 1"),
        ([{"name": "A"}, {"name": "B", "sound": "x"}], None, "has a field 'sound'"),
        ([{"name": "A"}, {"name": ""}], None, "name of a variant"),
        ([{"name": "A"}, "B"], None, "must be like"),
        ("AB", None, "must be like"),
        (None, 1, "from 0 to 0.9"),
        (None, "10 %", "from 0 to 0.9"),
    ],
)
def test_an_invalid_experiment_is_refused(variants: Any, hold_out: Any, word: str) -> None:
    with pytest.raises(InvalidInput, match=word) as caught:
        parse_experiment(variants, hold_out)
    assert caught.value.code == "INVALID_CAMPAIGN"
