"""Texts that differ by recipient: placeholders such as `{{attributes.name|there}}`, and languages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from timebell.errors import InvalidInput

_PLACEHOLDER = re.compile(r"\{\{\s*(?P<name>[\w.-]*)\s*(?:\|(?P<fallback>[^{}]*))?\}\}")
ATTRIBUTE_ROOT = "attributes."
ALWAYS_PRESENT = frozenset({"campaignId", "deviceId"})
DEVICE_VALUES = frozenset({"userId", "platform", "gender", "age", "language", "timezone"})


def has_placeholders(document: Any) -> bool:
    """Return whether any text of a JSON document has a placeholder."""
    return any("{{" in text for text in _texts(document))


def check_placeholders(document: Any) -> None:
    """Check that every placeholder has a value for every recipient. Raises InvalidInput (INVALID_TEMPLATE)."""
    for text in _texts(document):
        rest = _PLACEHOLDER.sub("", text)
        if "{{" in rest or "}}" in rest:
            raise _invalid(f"{text!r:.80} has an incomplete placeholder")
        for match in _PLACEHOLDER.finditer(text):
            name, fallback = match["name"], match["fallback"]
            is_known = name in ALWAYS_PRESENT | DEVICE_VALUES or (
                name.startswith(ATTRIBUTE_ROOT) and name != ATTRIBUTE_ROOT
            )
            if not is_known:
                raise _invalid(f"There is no placeholder {match[0]!r:.60}")
            if fallback is None and name not in ALWAYS_PRESENT:
                raise _invalid(f"{match[0]!r:.60} has no fallback, so recipients without a value would get no text")


def attribute_names(document: Any) -> set[str]:
    """Return the names of the attributes in the placeholders of a JSON document."""
    names = {match["name"] for text in _texts(document) for match in _PLACEHOLDER.finditer(text)}
    return {name.removeprefix(ATTRIBUTE_ROOT) for name in names if name.startswith(ATTRIBUTE_ROOT)}


def render(document: Any, values: Mapping[str, Any]) -> Any:
    """Return a JSON document with all placeholders replaced by the values of a recipient, or by their fallbacks."""
    if isinstance(document, str):
        return _PLACEHOLDER.sub(lambda match: _render_one(match, values), document) if "{{" in document else document
    if isinstance(document, Mapping):
        return {name: render(value, values) for name, value in document.items()}
    return [render(value, values) for value in document] if isinstance(document, list) else document


def _render_one(match: re.Match[str], values: Mapping[str, Any]) -> str:
    value = values.get(match["name"])
    if isinstance(value, bool):
        return "true" if value else "false"
    return (match["fallback"] or "").strip() if value is None or value == "" else str(value)


def choose_language(translations: Mapping[str, Any], language: str | None) -> Mapping[str, Any]:
    """Return the texts for a recipient's language: `pt-BR`, otherwise `pt`, otherwise {}."""
    by_tag = {tag.lower(): texts for tag, texts in translations.items()}
    tag = (language or "").replace("_", "-").lower()
    found: Mapping[str, Any] = by_tag.get(tag) or by_tag.get(tag.partition("-")[0]) or {}
    return found


def _texts(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    children = document.values() if isinstance(document, Mapping) else document if isinstance(document, list) else ()
    for child in children:
        yield from _texts(child)


def _invalid(problem: str) -> InvalidInput:
    return InvalidInput(
        f"{problem}.", code="INVALID_TEMPLATE",
        fix="Use {{attributes.name|fallback}}, or userId, deviceId, campaignId, platform, gender, age, language, "
        "timezone.",
    )  # fmt: skip
