"""Payloads, retries, routes and cursors: what goes in comes out, what cannot is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model import page
from timebell.model.payload import MAX_BYTES, MAX_DEPTH, decode, encode, legible
from timebell.model.policy import Retry
from timebell.model.routes import ANYONE, Routes

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same kinds."""
    return repr(a) == repr(b)


@given(values)
def test_json_comes_back_as_it_went_in(value: Any) -> None:
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
def test_whatever_is_given_is_encoded_or_refused_in_words(value: Any) -> None:
    encoded = words = None
    try:
        encoded = encode(value)
    except InvalidPayload as refused:
        words = str(refused)
    if words is not None:
        assert words.startswith("payload")
    else:
        assert encoded is not None
        assert "\x00" not in encoded
        assert "\\u0000" not in encoded
        assert same(json.loads(encoded.encode()), json.loads(json.dumps(value)))


def test_the_limits_are_exact() -> None:
    assert len(encode("x" * (MAX_BYTES - 2))) == MAX_BYTES
    with pytest.raises(InvalidPayload) as large:
        encode("x" * (MAX_BYTES - 1))
    assert large.value.code == "PAYLOAD_TOO_LARGE"
    nested: Any = 0
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert same(decode(encode(nested)), nested)
    with pytest.raises(InvalidPayload) as deep:
        encode([nested])
    assert deep.value.code == "PAYLOAD_TOO_DEEP"


def test_a_refusal_names_the_place() -> None:
    with pytest.raises(InvalidPayload, match=r"payload\.users\.1\.born"):
        encode({"users": [{}, {"born": object()}]})


@given(st.text(), st.integers(0, 50))
def test_legible_text_can_be_stored_and_is_no_longer_than_asked(given_text: str, most: int) -> None:
    kept = legible(given_text, most)
    assert len(kept) <= most
    assert decode(encode(kept)) == kept


@given(text.filter(bool))
def test_legible_text_stays_as_it_is(given_text: str) -> None:
    assert legible(given_text, 20) == given_text


@given(
    st.builds(
        Retry, attempts=st.integers(1, 1000), backoff=st.sampled_from(["fixed", "linear", "exponential"]),
        delay=st.floats(0, 1e9), max_delay=st.floats(0, 1e9), jitter=st.floats(0, 1),
    )
)  # fmt: skip
def test_a_retry_comes_back_from_its_json(retry: Retry) -> None:
    assert Retry.read(decode(encode(retry.to_json()))) == retry
    assert Retry.read(retry) is retry


@pytest.mark.parametrize(
    "fields",
    [{"attempts": 0}, {"attempts": 1001}, {"attempts": True}, {"attempts": 2.0}, {"backoff": "never"}, {"jitter": -0.1},
     {"jitter": 1.1}, {"jitter": float("nan")}, {"delay": -1}, {"delay": float("inf")}, {"max_delay": "long"}],
)  # fmt: skip
def test_a_retry_that_cannot_be_right_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Retry(**fields)
    with pytest.raises(InvalidInput):
        Retry.read(fields)


@pytest.mark.parametrize(
    ("routes", "heard", "unheard"),
    [
        (Routes(frozenset({"a.b"})), ["a.b"], ["a", "a.b.c", "a.bc", "@http"]),
        (Routes(prefixes=frozenset({"a."})), ["a.b", "a.b.c"], ["a", "ab", "@http"]),
        (Routes(everything=True), ["a", "a.b"], ["@http"]),
        (ANYONE, ["a", "@http", "@command"], []),
        (Routes(), [], ["a", "@http"]),
    ],
)
def test_routes_hear_what_they_say(routes: Routes, heard: list[str], unheard: list[str]) -> None:
    assert all(map(routes.hears, heard))
    assert not any(map(routes.hears, unheard))
    assert bool(routes) == bool(heard)


def test_routes_together_hear_what_either_hears() -> None:
    both = Routes(frozenset({"a"})) | Routes(prefixes=frozenset({"b."})) | Routes()
    assert [both.hears(route) for route in ("a", "b.c", "c")] == [True, True, False]


@pytest.mark.parametrize("cursor", ["", "x", 7, "0192f0c1-2345-7abc-8def-0123456789a", b"x", []])
def test_a_cursor_that_is_not_ours_is_refused(cursor: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        page.check(10, cursor)
    assert refused.value.code == "INVALID_CURSOR"


@pytest.mark.parametrize("limit", [0, -1, 501, 1.0, "5", True, None])
def test_a_limit_out_of_range_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        page.check(limit, None)
    assert refused.value.code == "INVALID_LIMIT"
