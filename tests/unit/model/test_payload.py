"""Payloads: valid values round-trip, invalid ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidPayload
from timebell.model.payload import MAX_PAYLOAD_BYTES, decode, encode, sanitize_text

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Return whether both values are equal and of the same types."""
    return repr(a) == repr(b)


@given(values)
def test_encoded_json_round_trips(value: Any) -> None:
    encoded = encode(value)
    assert same(decode(encoded), value)
    assert same(json.loads(encoded), value)
    assert encode(decode(encoded)) == encoded


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.dates()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.sets(st.integers()) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(anything)
def test_any_value_is_encoded_or_refused_with_a_message(value: Any) -> None:
    encoded = message = None
    try:
        encoded = encode(value)
    except InvalidPayload as refused:
        message = str(refused)
    if message is not None:
        assert message.startswith("payload")
    else:
        assert encoded is not None
        assert "\x00" not in encoded
        assert "\\u0000" not in encoded
        assert same(json.loads(encoded.encode()), json.loads(json.dumps(value)))


def test_the_size_limit_is_exact() -> None:
    assert len(encode("x" * (MAX_PAYLOAD_BYTES - 2))) == MAX_PAYLOAD_BYTES == 65_536
    with pytest.raises(InvalidPayload) as large:
        encode("x" * (MAX_PAYLOAD_BYTES - 1))
    assert large.value.code == "PAYLOAD_TOO_LARGE"


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner, 1), lambda inner: {"k": inner}])
def test_the_depth_limit_is_exact(wrap: Callable[[Any], Any]) -> None:
    nested: Any = None
    for _ in range(32):
        nested = wrap(nested)
    assert encode(nested) == json.dumps(nested, separators=(",", ":"))
    with pytest.raises(InvalidPayload, match=r"^payload is nested deeper than 32 levels") as deep:
        encode(wrap(nested))
    assert deep.value.code == "PAYLOAD_TOO_DEEP"


@pytest.mark.parametrize(
    ("value", "path"), [("a\0", ""), (["\0"], ".0"), ({"k": "a\0"}, ".k"), ({"a\0": 1}, ""), ({"k": ["é\0"]}, ".k.0")]
)
def test_nul_is_refused_at_any_place(value: Any, path: str) -> None:
    with pytest.raises(InvalidPayload, match=rf"^payload{path} contains a NUL character"):
        encode(value)


def test_integers_have_up_to_64_bits() -> None:
    for fits in (-(2**63), 2**63, 2**64 - 1):
        assert decode(encode({"k": fits})) == {"k": fits}
    for too_large in (-(2**63) - 1, 2**64):
        with pytest.raises(InvalidPayload, match=r"^payload\.k is an integer of more than 64 bits"):
            encode({"k": too_large})


def test_refusal_names_the_path() -> None:
    with pytest.raises(InvalidPayload, match=r"payload\.users\.1\.born"):
        encode({"users": [{}, {"born": object()}]})


@given(st.text(), st.integers(0, 50))
def test_sanitized_text_can_be_stored_and_respects_its_limit(given_text: str, limit: int) -> None:
    sanitized = sanitize_text(given_text, limit)
    assert len(sanitized) <= limit
    assert decode(encode(sanitized)) == sanitized


@given(text.filter(bool))
def test_sanitizing_keeps_valid_text(given_text: str) -> None:
    assert sanitize_text(given_text, 20) == given_text
