"""Templates and field mappings of payloads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model import mapping
from timebell.model.mapping import FieldMapping

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
        ("{{payload.tags.000000001}}", {"b": None}),
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
        ({"a": "{{payload.tags.0000000001?}}", "b": "{{payload.tags.٠?}}"}, {}),
        ({"a": "{{payload.tags.7?}}", "b": "{{payload.tags.a?}}", "c": "{{payload.division.x?}}"}, {}),
        ({"a": {"b": ["{{payload.chapter}}"]}}, {"a": {"b": [22]}}),
    ],
)  # fmt: skip
def test_placeholders_are_filled(template: Any, filled: Any) -> None:
    before = copy.deepcopy((template, SOURCE))
    mapping.check_template(template, ROOTS)
    result = mapping.fill_template(template, SOURCE)
    assert json.dumps(result) == json.dumps(filled)  # 0 is not False here
    assert (template, SOURCE) == before


def test_row_is_mapped_to_the_fields_of_a_push() -> None:
    """Fields are renamed, all values become strings, 0 is kept, and absent or null values are omitted."""
    contract = {
        "division": "{{payload.division?|string}}",
        "version": "{{payload.version?|string}}",
        "bibleCode": "{{payload.bible_code?|string}}",
        "chapter": "{{payload.chapter?|string}}",
        "section": "{{payload.section?|string}}",
        "landingUrl": "{{payload.landing?|string}}",
    }
    assert mapping.fill_template(contract, SOURCE) == {
        "division": "bible",
        "version": "0",
        "bibleCode": "3",
        "chapter": "22",
    }


def test_strings_filter_converts_a_whole_object() -> None:
    assert mapping.fill_template({"data": "{{payload|strings}}"}, SOURCE)["data"] == {
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
        ("{{payload.division|strings}}", "and it is not an object"),
    ],
)
def test_missing_value_is_named_in_the_error(template: Any, why: str) -> None:
    mapping.check_template(template, ROOTS)
    with pytest.raises(InvalidPayload, match="The body cannot be built") as caught:
        mapping.fill_template(template, SOURCE)
    assert why in caught.value.message
    assert caught.value.code == "INVALID_BODY"


@pytest.mark.parametrize(
    "template",
    [
        "{{payload.a", "payload.a}}", "{{}}", "{{ }}", "{{payload.}}", "{{payload..a}}", "{{payload.a()}}", "{{1+1}}",
        "{{payload.a|upper}}", "{{payload.a??}}", "{{payload[0]}}", "{{payload.a|string|string}}",
        "{% if x %}{{payload.a}", "{{payload.__class__.__mro__()}}", "{{pay load}}", "{{other.a}}", "{{payloads}}",
        "{{payload.a?}}", {"{{payload.a}}": 1}, ["{{nothing}}"], {"a": {"b": "{{"}}, '{{payload."a}}',
    ],
)  # fmt: skip
def test_invalid_template_is_refused_on_creation(template: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        mapping.check_template(template, ROOTS)
    assert caught.value.code == "INVALID_TEMPLATE"


SYNTAX = "Write {{payload.title}}, {{payload.title?}} where it may be absent, {{payload.count|string}} for text."
KNOWN = "It is one of: attempt, payload, scheduleName, topic."


@pytest.mark.parametrize(
    ("template", "message", "fix"),
    [
        ("{{payload.a?}}", "template is a single string, which cannot be omitted.", "Remove the ?."),
        ({"a": ["{{paylod.x}}"]}, "template.a.0 uses 'paylod', which no delivery has.",
         f"Did you mean payload? {KNOWN}"),
        ({"a": "{{other.x}}"}, "template.a uses 'other', which no delivery has.", KNOWN),
        ({"a": {"{{x}}": 1}}, "template.a has a placeholder in the name '{{x}}'.", "Only values are filled in."),
        ({"a": "{{1+1}}"}, "template.a has '{{1+1}}', which is not a placeholder.", SYNTAX),
        ({"a": "x }}"}, "template.a has unmatched braces.", SYNTAX + " Two literal braces: {{'{{'}}."),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_the_fix(template: Any, message: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        mapping.check_template(template, ROOTS)
    assert (refused.value.message, refused.value.fix) == (message, fix)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_a_template_has_up_to_32_levels(wrap: Callable[[Any], Any]) -> None:
    template: Any = "{{topic}}"
    for _ in range(32):
        template = wrap(template)
    mapping.check_template(template, ROOTS)
    with pytest.raises(InvalidInput, match=r"^template is nested deeper than 32 levels\.$"):
        mapping.check_template(wrap(template), ROOTS)


def test_paths_reach_only_json_values() -> None:
    """A path is keys and positions: attributes of Python objects are absent, whatever they are called."""
    for path in ("payload.__class__", "payload.keys", "topic.__len__", "payload.tags.__class__", "payload.tags.-1"):
        with pytest.raises(InvalidPayload, match="absent"):
            mapping.fill_template("{{" + path + "}}", SOURCE)


@given(st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=6))
def test_values_keep_their_type_and_string_filter_gives_json(payload: dict[str, Any]) -> None:
    for name, value in payload.items():
        if not set(name) & set('"{}'):
            path = f'{{{{payload."{name}"'
            source = {"payload": payload}
            assert mapping.fill_template(path + "}}", source) == value
            assert type(mapping.fill_template(path + "}}", source)) is type(value)
            if value is not None:
                text = mapping.fill_template(path + "|string}}", source)
                assert text == value if isinstance(value, str) else json.loads(text) == value
            assert mapping.fill_template({"x": path + "?|string}}"}, source).keys() == (
                {"x"} if value is not None else set()
            )


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=6))
def test_strings_option_converts_all_values_and_omits_nulls(payload: dict[str, Any]) -> None:
    mapped = FieldMapping(strings=True).apply(payload)
    assert all(type(value) is str for value in mapped.values())
    assert mapped.keys() == {name for name, value in payload.items() if value is not None}
    assert not set(mapped.values()) & {"undefined", "None", "null"} - set(map(str, payload.values()))


@given(st.text() | st.text(alphabet="{}'\"?|. payload"))
def test_any_text_is_a_template_or_is_refused(text: str) -> None:
    if "{{" not in text and "}}" not in text:
        mapping.check_template({"a": text}, ROOTS)
        assert mapping.fill_template({"a": text}, SOURCE) == {"a": text}
    else:
        with suppress(InvalidInput):
            mapping.check_template({"a": text}, ROOTS)


@pytest.mark.parametrize(
    ("fields", "payload", "mapped"),
    [
        (FieldMapping({"bible_code": "bibleCode", "landing_url": "landingUrl"}),
         {"bible_code": 0, "chapter": 1, "x": None},
         {"bibleCode": 0, "chapter": 1, "x": None}),
        (FieldMapping({"a": "b", "b": "a"}), {"a": 1, "b": 2}, {"b": 1, "a": 2}),
        (FieldMapping(omit_null=True), {"a": None, "b": 0, "c": False, "d": "", "e": []},
         {"b": 0, "c": False, "d": "", "e": []}),
        (FieldMapping({"a": "x"}, strings=True), {"a": 0, "b": True, "c": None, "d": 2.5, "e": {"f": [1]}},
         {"x": "0", "b": "true", "d": "2.5", "e": '{"f":[1]}'}),
    ],
)  # fmt: skip
def test_fields_are_renamed_omitted_and_converted(
    fields: FieldMapping, payload: dict[str, Any], mapped: dict[str, Any]
) -> None:
    assert json.dumps(fields.apply(payload)) == json.dumps(mapped)


@pytest.mark.parametrize(
    ("fields", "payload"), [(FieldMapping({"a": "b"}), {"a": 1, "b": 2}), (FieldMapping(), [1]), (FieldMapping(), None)]
)
def test_fields_that_do_not_fit(fields: FieldMapping, payload: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        fields.apply(payload)
    assert caught.value.code == "INVALID_BODY"
