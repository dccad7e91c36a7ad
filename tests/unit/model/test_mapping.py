"""Templates and renamed fields: what a receiver reads, for all payloads."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model import mapping
from timebell.model.mapping import Fields

ROW = {
    "division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": None, "landing_url": "",
    "on": False, "ratio": 1.5, "tags": ["a", {"b": None}], "odd.name": "dotted", "이름": "한글",
}  # fmt: skip
SOURCE = {"payload": ROW, "topic": "push.bible", "attempt": 2, "scheduleName": None}
ROOTS = frozenset(SOURCE)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{{payload.version}}", 0),
        ("{{ payload.version }}", 0),
        ("{{payload.on}}", False),
        ("{{payload.ratio}}", 1.5),
        ("{{payload.section}}", None),
        ("{{payload.tags}}", ["a", {"b": None}]),
        ("{{payload.tags.0}}", "a"),
        ('{{payload."odd.name"}}', "dotted"),
        ("{{payload.이름}}", "한글"),
        ("{{payload.version|string}}", "0"),
        ("{{payload.on | string}}", "false"),
        ("{{payload.landing_url}}", ""),
        ("{{payload.tags|string}}", '["a",{"b":null}]'),
        ("chapter {{payload.chapter}}, version {{payload.version}}", "chapter 22, version 0"),
        ("{{topic}}-{{attempt}}", "push.bible-2"),
        ("{{'{{'}}x{{'}}'}}", "{{x}}"),
        ("{ \"a\": {{payload.version}} }", '{ "a": 0 }'),
        ("", ""),
        (5, 5), (None, None), (True, True),
        ({"a": "{{payload.absent?}}", "b": "{{payload.version?}}"}, {"b": 0}),
        ({"a": "{{payload.section?}}"}, {}),
        ({"a": "{{payload.absent.deeper?|string}}"}, {}),
        ({"a": "id {{payload.absent?}}"}, {}),
        (["{{payload.absent?}}", "{{payload.version?|string}}"], ["0"]),
        ({"a": "{{payload.tags.7?}}", "b": "{{payload.tags.a?}}", "c": "{{payload.division.x?}}"}, {}),
        ({"a": {"b": ["{{payload.chapter}}"]}}, {"a": {"b": [22]}}),
    ],
)  # fmt: skip
def test_placeholders(template: Any, filled: Any) -> None:
    before = copy.deepcopy((template, SOURCE))
    mapping.check(template, ROOTS)
    got = mapping.fill(template, SOURCE)
    assert json.dumps(got) == json.dumps(filled)  # 0 is not False here
    assert (template, SOURCE) == before


def test_the_apps_contract_for_a_push() -> None:
    """The stored row becomes what the app reads: its names, all strings, 0 kept, absent and null left out."""
    contract = {
        "division": "{{payload.division?|string}}",
        "version": "{{payload.version?|string}}",
        "bibleCode": "{{payload.bible_code?|string}}",
        "chapter": "{{payload.chapter?|string}}",
        "section": "{{payload.section?|string}}",
        "landingUrl": "{{payload.landing?|string}}",
    }
    assert mapping.fill(contract, SOURCE) == {"division": "bible", "version": "0", "bibleCode": "3", "chapter": "22"}


def test_strings_of_a_whole_object() -> None:
    assert mapping.fill({"data": "{{payload|strings}}"}, SOURCE)["data"] == {
        "division": "bible", "version": "0", "bible_code": "3", "chapter": "22", "landing_url": "", "on": "false",
        "ratio": "1.5", "tags": '["a",{"b":null}]', "odd.name": "dotted", "이름": "한글",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"a": {"b": ["{{payload.absent}}"]}}, "template.a.b.0 needs {{payload.absent}}, which is absent"),
        ("{{payload.chapter.deeper}}", "absent"),
        ("{{payload.tags.2}}", "absent"),
        ("to {{payload.section}}", "it is null"),
        ("{{payload.section|string}}", "it is null"),
        ("{{payload.division|strings}}", "which is no object"),
    ],
)
def test_what_is_missing_is_named(template: Any, why: str) -> None:
    mapping.check(template, ROOTS)
    with pytest.raises(InvalidPayload, match="The body cannot be made") as caught:
        mapping.fill(template, SOURCE)
    assert why in caught.value.message
    assert caught.value.code == "BODY_UNFIT"


@pytest.mark.parametrize(
    "template",
    [
        "{{payload.a", "payload.a}}", "{{}}", "{{ }}", "{{payload.}}", "{{payload..a}}", "{{payload.a()}}", "{{1+1}}",
        "{{payload.a|upper}}", "{{payload.a??}}", "{{payload[0]}}", "{{payload.a|string|string}}",
        "{% if x %}{{payload.a}", "{{payload.__class__.__mro__()}}", "{{pay load}}", "{{other.a}}", "{{payloads}}",
        "{{payload.a?}}", {"{{payload.a}}": 1}, ["{{nothing}}"], {"a": {"b": "{{"}}, '{{payload."a}}',
    ],
)  # fmt: skip
def test_what_no_template_is_is_refused_when_it_is_made(template: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        mapping.check(template, ROOTS)
    assert caught.value.code == "TEMPLATE_INVALID"


def test_a_name_that_comes_close_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"Did you mean payload\?"):
        mapping.check({"a": "{{paylod.x}}"}, ROOTS)


def test_nothing_but_json_is_reached() -> None:
    """A path is keys and positions: attributes of Python objects are absent, whatever they are called."""
    for path in ("payload.__class__", "payload.keys", "topic.__len__", "payload.tags.__class__", "payload.tags.-1"):
        with pytest.raises(InvalidPayload, match="absent"):
            mapping.fill("{{" + path + "}}", SOURCE)


@given(st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=6))
def test_types_survive_and_text_is_the_value_as_json(payload: dict[str, Any]) -> None:
    for name, value in payload.items():
        if not set(name) & set('"{}'):
            path = f'{{{{payload."{name}"'
            source = {"payload": payload}
            assert mapping.fill(path + "}}", source) == value
            assert type(mapping.fill(path + "}}", source)) is type(value)
            if value is not None:
                text = mapping.fill(path + "|string}}", source)
                assert text == value if isinstance(value, str) else json.loads(text) == value
            assert mapping.fill({"x": path + "?|string}}"}, source).keys() == ({"x"} if value is not None else set())


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=6))
def test_strings_are_all_strings_and_only_nulls_are_left_out(payload: dict[str, Any]) -> None:
    mapped = Fields(strings=True).of(payload)
    assert all(type(value) is str for value in mapped.values())
    assert mapped.keys() == {name for name, value in payload.items() if value is not None}
    assert not set(mapped.values()) & {"undefined", "None", "null"} - set(map(str, payload.values()))


@given(st.text() | st.text(alphabet="{}'\"?|. payload"))
def test_any_text_is_a_template_or_a_clean_refusal(text: str) -> None:
    if "{{" not in text and "}}" not in text:
        mapping.check({"a": text}, ROOTS)
        assert mapping.fill({"a": text}, SOURCE) == {"a": text}
    else:
        with suppress(InvalidInput):
            mapping.check({"a": text}, ROOTS)


@pytest.mark.parametrize(
    ("fields", "payload", "mapped"),
    [
        (Fields({"bible_code": "bibleCode", "landing_url": "landingUrl"}), {"bible_code": 0, "chapter": 1, "x": None},
         {"bibleCode": 0, "chapter": 1, "x": None}),
        (Fields({"a": "b", "b": "a"}), {"a": 1, "b": 2}, {"b": 1, "a": 2}),
        (Fields(omit_null=True), {"a": None, "b": 0, "c": False, "d": "", "e": []},
         {"b": 0, "c": False, "d": "", "e": []}),
        (Fields({"a": "x"}, strings=True), {"a": 0, "b": True, "c": None, "d": 2.5, "e": {"f": [1]}},
         {"x": "0", "b": "true", "d": "2.5", "e": '{"f":[1]}'}),
    ],
)  # fmt: skip
def test_fields(fields: Fields, payload: dict[str, Any], mapped: dict[str, Any]) -> None:
    assert json.dumps(fields.of(payload)) == json.dumps(mapped)


@pytest.mark.parametrize(
    ("fields", "payload"), [(Fields({"a": "b"}), {"a": 1, "b": 2}), (Fields(), [1]), (Fields(), None)]
)
def test_fields_that_do_not_fit(fields: Fields, payload: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        fields.of(payload)
    assert caught.value.code == "BODY_UNFIT"
