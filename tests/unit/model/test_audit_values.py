"""Recorded states of the audit log: differences, masking of secrets and content, bounded size."""

from __future__ import annotations

import orjson

from timebell.model.audit_values import (
    MASK,
    MAX_STATE_BYTES,
    NOT_RECORDED,
    FieldChange,
    describe_change,
    list_changes,
    object_name,
)


def test_an_edit_records_only_the_changed_fields() -> None:
    before = {"id": "1", "name": "a", "timezone": "UTC", "labels": {"x": "1"}, "etag": '"1"', "updatedAt": "t"}
    after = {**before, "timezone": "Asia/Seoul", "labels": {"x": "2", "y": "3"}, "etag": '"2"', "updatedAt": "u"}
    states = describe_change(before, after)
    assert states == (
        {"timezone": "UTC", "labels": {"x": "1"}},
        {"timezone": "Asia/Seoul", "labels": {"x": "2", "y": "3"}},
    )
    assert list_changes(*states) == [
        FieldChange("/timezone", "UTC", "Asia/Seoul"),
        FieldChange("/labels/x", "1", "2"),
        FieldChange("/labels/y", None, "3"),
    ]


def test_creation_and_deletion_record_all_fields_that_are_set() -> None:
    state = {"id": "1", "name": "a", "description": None, "labels": {}, "enabled": False}
    recorded = {"id": "1", "name": "a", "enabled": False}
    assert describe_change(None, state) == (None, recorded)
    assert describe_change(state, None) == (recorded, None)


def test_the_result_of_an_action_is_not_compared_with_its_object() -> None:
    assert describe_change({"id": "1", "name": "a"}, {"ended": 2}) == (None, {"ended": 2})
    assert describe_change([1], {"ended": 2}) == (None, {"ended": 2})
    assert object_name({"ended": 2}, {"id": "1", "name": "a"}) == "a"


def test_secrets_are_masked_wherever_they_are() -> None:
    options = {
        "url": "https://user:pa55@example.com/x?token=t0p&page=1",
        "headers": {"Authorization": "Bearer s3cret", "X-Api-Key": {"secret": "billing-key"}, "Accept": "text/html"},
        "auth": [{"clientSecret": "s3cret"}],
    }
    _, after = describe_change(None, {"name": "a", "options": options, "signingSecrets": ["whsec_1"], "password": "p"})
    assert after == {
        "name": "a",
        "options": {
            "url": f"https://{MASK}@example.com/x?token={MASK}&page=1",
            "headers": {"Authorization": MASK, "X-Api-Key": {"secret": "billing-key"}, "Accept": "text/html"},
            "auth": [{"clientSecret": MASK}],
        },
        "signingSecrets": MASK,
        "password": MASK,
    }
    text = orjson.dumps(after)
    assert not [secret for secret in (b"pa55", b"t0p", b"s3cret", b"whsec_1") if secret in text]


def test_content_is_not_recorded_but_its_change_is() -> None:
    states = describe_change({"id": "1", "payload": {"mail": "a@b.c"}}, {"id": "1", "payload": {"mail": "d@e.f"}})
    assert states == ({"payload": NOT_RECORDED}, {"payload": NOT_RECORDED})
    assert list_changes(*states) == [FieldChange("/payload", NOT_RECORDED, NOT_RECORDED)]
    assert describe_change({"id": "1", "payload": 1}, {"id": "1", "payload": 1}) == ({}, {})


def test_large_states_are_bounded() -> None:
    _, after = describe_change(None, {f"field{n}": ["x" * 5000] * 200 for n in range(50)} | {"deep": _nested(100)})
    assert after is not None
    assert len(orjson.dumps(after)) < MAX_STATE_BYTES + 4096
    assert after["field49"] == NOT_RECORDED


def _nested(depth: int) -> object:
    return {"x": _nested(depth - 1)} if depth else 1
