"""Segments: filters with a name, used in the filters of campaigns and of other segments."""

from __future__ import annotations

import pytest

from timebell.errors import Conflict, InvalidInput
from timebell.features.campaigns.model.filters import Filters, parse_segment
from timebell.features.campaigns.store import devices, segments

from .test_campaigns import Sender, sender

__all__ = ["sender"]


def put(sender: Sender, name: str, tenant: str = "default", **filters: object) -> None:
    sender.run(segments.upsert_segment, tenant, name, parse_segment(filters), "ann", sender.now)


def count(sender: Sender, filters: object) -> int:
    found: int = sender.run(devices.count_devices, "default", Filters.from_json(filters), sender.now)
    return found


@pytest.fixture
def people(sender: Sender) -> Sender:
    sender.register("phone-1", platform="ios", attributes={"tier": "gold"})
    sender.register("phone-2", platform="ios", attributes={"tier": "none"})
    sender.register("phone-3", platform="android", attributes={"tier": "gold"})
    sender.register("phone-4")
    return sender


def test_segments_select_and_exclude_devices(people: Sender) -> None:
    put(people, "gold", attributes={"tier": "gold"})
    put(people, "ios", platform="ios")
    put(people, "other gold", segment="gold", **{"not": {"segment": "ios"}})
    assert count(people, {"segment": "gold"}) == 2
    assert count(people, {"segment": ["gold", "ios"]}) == 3
    assert count(people, {"not": {"segment": "gold"}}) == 2
    assert count(people, {"segment": "gold", "not": {"segment": "ios"}}) == 1
    assert count(people, {"segment": "other gold"}) == 1
    id_ = people.make(filters={"segment": "gold", "not": {"segment": "ios"}})
    people.send_all(id_)
    assert people.phones == {"phone-3": 1}
    assert people.get(id_).excluded == {"filters": 3}
    again = people.make(filters={"segment": "gold", "not": {"received": id_}})
    people.send_all(again)
    assert people.phones == {"phone-3": 1, "phone-1": 1}


def test_a_segment_of_another_tenant_is_unknown(people: Sender) -> None:
    put(people, "gold", tenant="other", attributes={"tier": "gold"})
    for filters in ({"segment": "gold"}, {"not": {"any": [{"segment": "gold"}]}}):
        with pytest.raises(InvalidInput, match="no segment 'gold'") as caught:
            people.make(filters=filters)
        assert caught.value.code == "UNKNOWN_SEGMENT"
    assert people.run(segments.list_segments, "default", 50, None).items == []


def test_segments_cannot_contain_themselves_or_limits_of_a_whole_campaign(people: Sender) -> None:
    put(people, "a", platform="ios")
    put(people, "b", segment="a")
    for name, filters in (("a", {"segment": "b"}), ("c", {"segment": "c"}), ("c", {"onePerUser": True})):
        with pytest.raises(InvalidInput) as caught:
            put(people, name, **filters)
        assert caught.value.code == "INVALID_FILTER"
    assert [each.name for each in people.run(segments.list_segments, "default", 50, None)] == ["a", "b"]
    assert count(people, {"segment": "b"}) == 2


def test_a_segment_in_use_is_not_deleted(people: Sender) -> None:
    put(people, "ios", platform="ios")
    id_ = people.make(filters={"not": {"segment": "ios"}})
    with pytest.raises(Conflict) as caught:
        people.run(segments.delete_segment, "default", "ios")
    assert caught.value.code == "SEGMENT_IN_USE"
    people.send_all(id_)
    assert people.phones == {"phone-3": 1, "phone-4": 1}
    assert people.run(segments.delete_segment, "default", "ios")
    assert not people.run(segments.delete_segment, "default", "ios")


def test_a_changed_segment_applies_to_the_rest_of_a_campaign(people: Sender) -> None:
    put(people, "chosen", platform="ios")
    id_ = people.make(filters={"segment": "chosen"}, chunkSize=1)
    opened, _ = people.open(id_)
    people.close(id_, opened, people.send(opened))
    put(people, "chosen", platform="android")
    people.send_all(id_)
    assert people.phones == {"phone-1": 1, "phone-3": 1}
    found = people.get(id_)
    assert found.registered == found.opened + sum(found.excluded.values()) == 4
