"""Recorded states of the audit log: differences, masking of secrets and content, bounded size."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

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


@pytest.mark.parametrize(
    ("before", "after", "recorded"),
    [
        ({"id": "1", "a": 1}, {"id": "1", "b": 2}, {"a": 1, "b": None}),  # other fields of the same object
        ({"name": "x", "a": 1}, {"name": "x"}, {"a": 1}),
        ({"id": "1", "a": 1}, {"id": "2", "b": 2}, None),
        ({"a": 1}, {"b": 2}, None),
        ({"a": 1}, {"a": 2}, {"a": 1}),
    ],
)
def test_two_states_are_compared_if_they_have_the_same_fields_or_id_and_name(
    before: dict[str, Any], after: dict[str, Any], recorded: Any
) -> None:
    assert describe_change(before, after)[0] == recorded


def test_numbers_are_recorded_except_in_content() -> None:
    states = describe_change(
        {"id": "1", "payload": 1, "result": None, "tokenSeconds": 60, "token": None},
        {"id": "1", "payload": 2, "result": True, "tokenSeconds": 90, "token": "s3cret"},
    )
    assert states == (
        {"payload": NOT_RECORDED, "result": None, "tokenSeconds": 60, "token": None},
        {"payload": NOT_RECORDED, "result": NOT_RECORDED, "tokenSeconds": 90, "token": MASK},
    )


def test_differences_are_json_pointers() -> None:
    assert list_changes({"a": {}, "b": None, "c": [1]}, {"a": {"x": 1}, "b": {"y": {}}, "d~/e": 2}) == [
        FieldChange("/a/x", None, 1),
        FieldChange("/b/y", None, {}),
        FieldChange("/c", [1], None),
        FieldChange("/d~0~1e", None, 2),
    ]
    assert list_changes(None, {"a": 1}) == [FieldChange("/a", None, 1)]


def test_the_name_of_an_object_is_its_name_or_title() -> None:
    assert object_name(None, [1], {"title": "t"}, {"name": "a"}) == "t"
    assert object_name({"name": "x" * 201}) == "x" * 200
    assert object_name({"name": 5}, {}) is None


def _recorded(state: dict[str, Any]) -> dict[str, Any]:
    _, after = describe_change(None, state)
    assert after is not None
    return after


def test_long_texts_and_lists_are_cut() -> None:
    state = {"text": "x" * 1000, "long": "y" * 1001, "items": list(range(50)), "many": list(range(51))}
    assert _recorded(state) == {
        "text": "x" * 1000, "long": "y" * 1000 + "...", "items": list(range(50)), "many": [*range(50), "... 1 more"],
    }  # fmt: skip


def _wrapped(value: Any, levels: int, *, in_lists: bool = False) -> Any:
    for _ in range(levels):
        value = [value] if in_lists else {"x": value}
    return value


def test_eight_levels_are_recorded() -> None:
    assert _recorded(_wrapped("a", 7)) == _wrapped("a", 7)
    assert _recorded(_wrapped("a", 8)) == _wrapped(NOT_RECORDED, 8)
    assert _recorded(_wrapped({"y": "a"}, 20)) == _wrapped(NOT_RECORDED, 8)
    assert _recorded({"x": _wrapped("a", 6, in_lists=True)}) == {"x": _wrapped("a", 6, in_lists=True)}
    assert _recorded({"x": _wrapped("a", 7, in_lists=True)}) == {"x": _wrapped(NOT_RECORDED, 7, in_lists=True)}


def test_the_name_of_a_secret_is_recorded_within_an_object() -> None:
    reference = {"token": {"secret": "billing-key"}}
    assert _recorded(reference) == {"token": MASK}
    assert _recorded(_wrapped(reference, 1)) == _wrapped(reference, 1)
    assert _recorded(_wrapped(reference, 6)) == _wrapped(reference, 6)
    assert _recorded(_wrapped(reference, 7)) == _wrapped({"token": {"secret": NOT_RECORDED}}, 7)


@pytest.mark.parametrize(("length", "recorded"), [(156, {"h", "f"}), (157, {"z"})])
def test_fields_are_recorded_until_8_kib(length: int, recorded: set[str]) -> None:
    eight = {f"f{number}": "x" * 1000 for number in range(8)}  # 1004 bytes each: name, text and quotes
    after = _recorded({**eight, "ha": "x" * length, "z": 1})
    assert {name[0] for name, value in after.items() if value != NOT_RECORDED} == {"f"} | recorded


def test_large_states_are_bounded() -> None:
    _, after = describe_change(None, {f"field{n}": ["x" * 5000] * 200 for n in range(50)} | {"deep": _nested(100)})
    assert after is not None
    assert len(orjson.dumps(after)) < MAX_STATE_BYTES + 4096
    assert after["field49"] == NOT_RECORDED


def _nested(depth: int) -> object:
    return {"x": _nested(depth - 1)} if depth else 1
