"""Placeholders in the texts of a campaign, and the choice of a language."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.personalization import (
    check_placeholders,
    choose_language,
    has_placeholders,
    render,
)

VALUES = {"userId": "ana", "attributes.name": "Ana", "attributes.vip": True, "attributes.new": False,
          "attributes.empty": "", "attributes.zero": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "rendered"),
    [
        ("Hello {{attributes.name|there}}!", "Hello Ana!"),
        ("Hello {{ attributes.none | there }}!", "Hello there!"),
        ("{{attributes.empty|x}}{{attributes.zero|x}}", "x0"),
        ("{{attributes.vip|x}} {{attributes.new|x}}", "true false"),
        ("{{campaignId}}", ""),
        ("{{attributes.none|}}", ""),
        ("plain", "plain"),
        ({"a": ["{{userId|x}}", 5, None], "b": {"c": "{{userId|x}}"}}, {"a": ["ana", 5, None], "b": {"c": "ana"}}),
    ],
)
def test_placeholders_are_replaced(document: Any, rendered: Any) -> None:
    check_placeholders(document)
    assert render(document, VALUES) == rendered


def test_documents_with_placeholders_are_found() -> None:
    assert has_placeholders({"a": [{"b": "x {{userId|x}}"}]})
    assert not has_placeholders({"{{a}}": ["x", 5, None, "{a}"]})


NO_FALLBACK = "has no fallback, so recipients without a value would get no text"
FIX = r"\. Use \{\{attributes\.name\|fallback\}\}, or userId"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a {{userId|x", "'a {{userId|x' has an incomplete placeholder"),
        ("userId}}", "'userId}}' has an incomplete placeholder"),
        ("{{user|x}}", "There is no placeholder '{{user|x}}'"),
        ("{{attributes.|x}}", "There is no placeholder '{{attributes.|x}}'"),
        ("{{userId|x}} {{age}}", f"'{{{{age}}}}' {NO_FALLBACK}"),
        ("{{attributes.name}}", f"'{{{{attributes.name}}}}' {NO_FALLBACK}"),
    ],
)  # fmt: skip
def test_a_placeholder_without_a_value_for_everyone_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=FIX) as refused:
        check_placeholders({"title": ["fine", text]})
    assert (refused.value.code, refused.value.message) == ("INVALID_TEMPLATE", f"{problem}.")


@pytest.mark.parametrize("name", ["userId", "platform", "gender", "age", "language", "timezone", "attributes.a-b.c"])
def test_values_of_devices_need_a_fallback_and_ids_do_not(name: str) -> None:
    check_placeholders(f"{{{{{name}|x}}}} {{{{campaignId}}}} {{{{deviceId}}}}")


@pytest.mark.parametrize(
    ("language", "texts"),
    [("pt-BR", "br"), ("pt_br", "br"), ("PT-AO", "pt"), ("pt", "pt"), ("de", {}), (None, {}), ("", {})],
)
def test_the_texts_of_the_closest_language_are_chosen(language: str | None, texts: Any) -> None:
    translations = {"pt": {"title": "pt"}, "pt-BR": {"title": "br"}}
    assert choose_language(translations, language) == ({"title": texts} if texts else {})
