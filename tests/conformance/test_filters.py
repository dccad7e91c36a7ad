"""Filters: SQL selects the same devices on every database as an evaluation in Python that shares no code with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import insert, select

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.device import validate_device
from timebell.features.campaigns.model.device_import import rename_fields
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.store import devices
from timebell.features.campaigns.store.chunk_results import DeliveryResult
from timebell.features.campaigns.store.filters import audience_conditions
from timebell.features.campaigns.store.tables import deliveries, members
from timebell.features.campaigns.store.tables import devices as device_table
from timebell.store.dialects.base import Store
from timebell.store.transaction import Transaction

from .helpers import T0
from .test_campaigns import Sender

CASES, DEPTH = 400, 3
CAMPAIGNS = ("01900000-0000-7000-8000-000000000001", "01900000-0000-7000-8000-000000000002")
FIELDS = {
    "platform": [None, "ios", "android"], "gender": [None, "F", "M"], "language": [None, "ko", "KO", "en"],
    "timezone": [None, "Asia/Seoul", "Europe/Paris"],
}  # fmt: skip
ATTRIBUTES = {
    "tier": ["gold", "silver", 'with "quotes"', "Gold"], "score": [0, 5, -3, 7.5, "5", True, 1e9], "vip": [True, False],
    "a b.c": [1, "x", 'x","tier":"gold'],
}  # fmt: skip
BIRTH_DATES = ["2000-02-29", "2009-01-01", "2009-01-02", "1950-12-31"]


def make_device(random: Random) -> dict[str, Any]:
    """Return the JSON fields of a random device, and when it was seen."""
    device = {name: random.choice(values) for name, values in FIELDS.items()}
    return device | {
        "age": random.choice([None, 17, 18, 40]), "birthDate": random.choice([None, None, *BIRTH_DATES]),
        "pushOnOff": random.random() < 0.7, "marketingOnOff": random.choice([None, True, False]),
        "topics": random.sample(["a", "ab", "A"], random.randrange(3)), "seen": random.randrange(60),
        "attributes": {
            name: random.choice(values) for name, values in ATTRIBUTES.items() if random.random() < 0.7
        },
        "audience": random.sample(["crm", "suppressed"], random.randrange(3)),
        "received": random.sample(CAMPAIGNS, random.randrange(3)),
        "userId": random.choice([None, "ann", "bob", "eve", "kim"]),
    }  # fmt: skip


def make_filter(random: Random, depth: int = DEPTH) -> dict[str, Any]:
    """Return a random filter with up to three members."""
    makers = {
        **{name: lambda name=name: one_or_many(random, FIELDS[name][1:]) for name in FIELDS},
        "ageMin": lambda: random.choice([0, 18, 26, 27, 40]), "ageMax": lambda: random.choice([40, 76, 150]),
        "pushOnOff": lambda: True, "marketingOnOff": lambda: "Y",
        "topic": lambda: one_or_many(random, ["a", "ab", "b"]),
        "seenWithinDays": lambda: random.choice([1, 30]), "notSeenForDays": lambda: random.choice([1, 30]),
        "attributes": lambda: make_attributes(random), "audience": lambda: one_or_many(random, ["crm", "suppressed"]),
        "received": lambda: one_or_many(random, list(CAMPAIGNS)),
    }  # fmt: skip
    if depth:
        makers |= {
            "any": lambda: [make_filter(random, depth - 1) for _ in range(random.randint(1, 3))],
            "all": lambda: [make_filter(random, depth - 1) for _ in range(random.randint(1, 2))],
            "not": lambda: make_filter(random, depth - 1),
        }
    return {name: makers[name]() for name in random.sample(list(makers), random.randint(1, 3 if depth else 1))}


def one_or_many(random: Random, values: list[Any]) -> Any:
    chosen = random.sample(values, random.randint(1, len(values)))
    return chosen[0] if len(chosen) == 1 and random.random() < 0.5 else chosen


def make_attributes(random: Random) -> dict[str, Any]:
    if random.random() < 0.5:
        limits = random.choice([{"min": 0}, {"max": 5}, {"min": -3, "max": 7.5}, {"min": 5.5}])
        return {random.choice(["score", "a b.c", "tier", "unknown"]): limits}
    name = random.choice(list(ATTRIBUTES))
    return {name: one_or_many(random, ATTRIBUTES[name])}


def matches(device: Mapping[str, Any], filters: Mapping[str, Any], at: datetime) -> bool:
    """Evaluate a filter in Python."""
    return all(matches_one(device, name, value, at) for name, value in filters.items())


def matches_one(device: Mapping[str, Any], name: str, value: Any, at: datetime) -> bool:
    values = value if isinstance(value, list) else [value]
    match name:
        case "all":
            return all(matches(device, inner, at) for inner in value)
        case "any":
            return any(matches(device, inner, at) for inner in value)
        case "not":
            return not matches(device, value, at)
        case "pushOnOff" | "marketingOnOff":
            return device[name] is True
        case "ageMin" | "ageMax":
            age = find_age(device, at)
            return age is not None and (age >= value if name == "ageMin" else age <= value)
        case "seenWithinDays":
            return bool(device["seen"] <= value)
        case "notSeenForDays":
            return bool(device["seen"] > value)
        case "topic":
            return bool(set(values) & set(device["topics"]))
        case "audience" | "received":
            return bool(set(values) & set(device[name]))
        case "attributes":
            return all(matches_attribute(device["attributes"].get(key), each) for key, each in value.items())
    return device[name] in values


def find_age(device: Mapping[str, Any], at: datetime) -> int | None:
    if device["birthDate"] is None:
        age: int | None = device["age"]
        return age
    born = date.fromisoformat(device["birthDate"])
    return at.year - born.year - ((at.month, at.day) < (born.month, born.day))


def matches_attribute(stored: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        is_number = isinstance(stored, int | float) and not isinstance(stored, bool)
        return is_number and wanted.get("min", stored) <= stored <= wanted.get("max", stored)
    values = wanted if isinstance(wanted, list) else [wanted]
    return any(type(stored) is type(each) and stored == each for each in values)


@pytest.fixture
def sender(store: Store, runner: asyncio.Runner) -> Sender:
    return Sender(store, runner)


def register(sender: Sender, fields: Mapping[str, Any], token: str) -> str:
    """Register a device with its memberships; return its id."""
    about = {name: value for name, value in fields.items() if name not in ("seen", "audience", "received")}
    seen_at = sender.now - timedelta(days=fields.get("seen", 0))
    registration = (token, validate_device(rename_fields(about)))
    sender.run(devices.register_devices, "default", [registration], seen_at)
    id_: str = sender.run(devices.find_by_token, "default", token).id

    def insert_memberships(tx: Transaction) -> None:
        for name in fields.get("audience", []):
            tx.execute(insert(members).values(tenant_id="default", audience=name, device_id=id_, generation=1))
        for campaign_id in CAMPAIGNS:
            state = "accepted" if campaign_id in fields.get("received", []) else "refused"
            tx.execute(insert(deliveries).values(campaign_id=campaign_id, recipient=id_, chunk=1, state=state))

    sender.run(insert_memberships)
    return id_


def test_random_filters_select_the_same_devices_as_in_python(sender: Sender) -> None:
    random = Random(33)
    sender.now = datetime(2027, 1, 1, 12, tzinfo=T0.tzinfo)  # the birthday of one of them
    stored = {}
    for n in range(40):
        fields = make_device(random)
        stored[register(sender, fields, f"phone-{n:04}")] = fields
    filters = [make_filter(random) for _ in range(CASES)]

    def select_ids(tx: Transaction, filters: Filters) -> set[str]:
        conditions = audience_conditions(tx, "default", filters, sender.now)
        return set(tx.execute(select(device_table.c.id).where(*conditions)).scalars())

    sizes = set()
    for each in filters:
        parsed = Filters.from_json(each)
        assert Filters.from_json(parsed.to_json()) == parsed
        expected = {id_ for id_, fields in stored.items() if matches(fields, each, sender.now)}
        assert sender.run(select_ids, parsed) == expected, each
        sizes.add(len(expected))
    assert len(sizes) > 20  # the cases are not trivial


def test_one_per_user_chooses_the_newest_matching_device(sender: Sender) -> None:
    random = Random(7)
    stored = {}
    for n in range(40):
        fields = make_device(random)
        stored[register(sender, fields, f"phone-{n:04}")] = fields
    for _ in range(30):
        each = make_filter(random, 1)
        candidates = {id_: fields for id_, fields in stored.items() if matches(fields, each, sender.now)}
        newest: dict[str, str] = {}
        for id_, fields in candidates.items():
            key = fields["userId"] or id_
            newest[key] = max(id_, newest.get(key, ""))
        filters = Filters.from_json({**each, "onePerUser": True})
        assert sender.run(devices.count_devices, "default", filters, sender.now) == len(newest), each


def test_a_frequency_cap_counts_recent_messages_of_other_campaigns(sender: Sender) -> None:
    sender.register("phone-0001", "phone-0002", user_id="ann", push_on=True)
    day = timedelta(days=1)
    cap = {"frequencyCap": {"messages": 2, "days": 7}, "onePerUser": False}
    for expected in (2, 2, 0):
        id_ = sender.make(filters=cap)
        sender.send_all(id_)
        found = sender.get(id_)
        assert (found.accepted, found.excluded.get("capped", 0)) == (expected, 2 - expected)
        assert found.opened + sum(found.excluded.values()) == found.registered == 2
        sender.now += day
    sender.now += 5 * day  # the first message is older than a week
    id_ = sender.make(filters=cap)
    sender.send_all(id_)
    assert sender.get(id_).accepted == 2


def test_a_message_whose_result_is_unknown_counts_for_the_frequency_cap(sender: Sender) -> None:
    sender.register("phone-0001")
    first = sender.make()
    opened, _ = sender.open(first)
    sender.close(first, opened, [DeliveryResult(each, "unknown", "TIMEOUT") for each in opened.recipients])
    second = sender.make(filters={"frequencyCap": {"messages": 1, "days": 7}})
    sender.send_all(second)
    assert (sender.phones, sender.get(second).excluded) == ({}, {"capped": 1})


def test_a_device_that_is_registered_during_a_campaign_displaces_no_recipient(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(7)))
    sender.register("phone-of-ann", user_id="ann")
    id_ = sender.make(filters={"onePerUser": True})
    opened, _ = sender.open(id_)
    sender.now += timedelta(seconds=1)
    sender.register("phone-later", user_id="ann")
    sender.close(id_, opened, sender.send(opened))
    sender.send_all(id_)
    assert sender.phones["phone-of-ann"] == 1
    assert len(sender.phones) == 8


def test_the_devices_that_one_per_user_leaves_out_are_counted(sender: Sender) -> None:
    sender.register("phone-0001", "phone-0002", user_id="ann")
    sender.register("phone-0003")
    id_ = sender.make(filters={"onePerUser": True})
    sender.send_all(id_)
    found = sender.get(id_)
    assert sender.phones == {"phone-0002": 1, "phone-0003": 1}
    assert (found.state, found.excluded, found.registered) == ("completed", {"otherDevice": 1}, 3)


def test_recipients_of_a_campaign_are_excluded_from_the_next(sender: Sender) -> None:
    sender.register("phone-0001")
    first = sender.make()
    sender.send_all(first)
    sender.register("phone-0002")
    second = sender.make(filters={"not": {"received": first}})
    sender.send_all(second)
    assert sender.phones == {"phone-0001": 1, "phone-0002": 1}
    assert sender.get(second).excluded == {"filters": 1}
    with pytest.raises(InvalidInput, match="There is no campaign"):
        sender.make(filters={"received": CAMPAIGNS[0]})


@pytest.mark.parametrize(
    "filters",
    [
        {"colour": "red"}, {"platform": "ipad"}, {"any": {"platform": "ios"}}, {"not": "ios"}, {"ageMin": "18"},
        {"seenWithinDays": 0}, {"attributes": {"score": {"min": "1"}}}, {"attributes": {"score": {"over": 1}}},
        {"attributes": {"score": []}}, {"not": {"onePerUser": True}}, {"frequencyCap": {"messages": 1}},
        {"received": "yesterday"}, {"platform": ["ios", 1]}, {"ageMin": 50, "ageMax": 40},
    ],
)  # fmt: skip
def test_invalid_filters_are_refused(filters: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Filters.from_json(filters)
    assert refused.value.code == "INVALID_FILTER"


def test_filters_nest_to_a_limited_depth() -> None:
    nested: dict[str, Any] = {"platform": "ios"}
    for _ in range(20):
        nested = {"not": nested}
    with pytest.raises(InvalidInput, match="levels deep"):
        Filters.from_json(nested)
