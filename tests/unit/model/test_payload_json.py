"""JSON from clients is read only if every parser reads it the same way, and is refused quickly otherwise."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu import within
from timebell.errors import InvalidPayload
from timebell.model.payload import MAX_BODY_BYTES, decode, encode, read_json

GOOD: list[tuple[bytes, Any]] = [
    (b"null", None),
    (b" [1, 2.5, -0, 1e3, true]\n", [1, 2.5, 0, 1000.0, True]),
    (b'{"a": {"a": "b"}}', {"a": {"a": "b"}}),
    (b'"\\ud83d\\udd70 \xed\x95\x9c"', "\U0001f570 한"),
    (b'"[[[[\\"[[[[ \\\\"', '[[[["[[[[ \\'),
    (b"18446744073709551615", 2**64 - 1),
    (b"-9223372036854775808", -(2**63)),
    (b'"\\u0001"', "\x01"),
    (b'"' + b"[" * 1000 + b'"', "[" * 1000),
]
BAD: list[tuple[str, bytes]] = [
    # Not JSON, or not UTF-8.
    *(("INVALID_JSON", text) for text in (
        b"", b" ", b"{", b"}", b"]", b"[1,]", b"{'a':1}", b'{"a":1,}', b"01", b"+1", b".5", b"1.", b"0x10", b"nul",
        b'"a', b'"\\', b'"\\x41"', b'"\n"', b'"a\x00b"', b"1 2", b"[1] x", b"// a\n1", b"\xef\xbb\xbf1", b'"\xff"',
        b'"\xed\xa0\x80"', b'"\xc0\x80"', "[1]".encode("utf-16"), "[1]".encode("utf-32"), b"[" * 32, b"nan", b"inf",
    )),
    # Values on which parsers and databases disagree.
    *(("PAYLOAD_NOT_JSON", text) for text in (
        b"NaN", b"[Infinity]", b'{"a":-Infinity}', b"1e999", b"-1e999", b"18446744073709551616",
        b"-9223372036854775809", b"9" * 5000, b"-" + b"9" * 200_000, b"1" + b"0" * 20,
        b'{"a":1,"a":1}', b'[{"b":{"a":1,"\\u0061":2}}]', b'"\\u0000"', b'{"a\\u0000":1}', b'"\\ud800"',
        b'"\\udc00\\ud800"', b'{"\\udfff":1}', b'["\\ud83d\\u0041"]',
    )),
    *(("PAYLOAD_TOO_DEEP", text) for text in (
        b"[" * 33 + b"]" * 33, b'{"a":' * 33 + b"1" + b"}" * 33, b"[" * 200_000, b'[{"a":' * 17, b'{"":' * 60_000,
        b'["\\"",' * 33, b'["",' * 33 + b'"', b"]" * 10 + b"[" * 43,
    )),
    *(("PAYLOAD_TOO_LARGE", text) for text in (b" " * (MAX_BODY_BYTES + 1), b"[" * (MAX_BODY_BYTES + 1))),
]  # fmt: skip


def code_of(text: bytes) -> str | None:
    message = "body "
    code = None
    try:
        read_json(text)
    except InvalidPayload as refused:
        code, message = refused.code, str(refused)
    assert message.startswith(("body ", "body."))
    assert len(message) < 400
    return code


@pytest.mark.parametrize(("text", "value"), GOOD)
def test_json_is_read_exactly(text: bytes, value: Any) -> None:
    found = read_json(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("code", "text"), BAD, ids=lambda given: repr(given)[:40])
def test_ambiguous_or_invalid_json_is_refused(code: str, text: bytes) -> None:
    with within(0.25):
        assert code_of(text) == code


def test_refusal_names_the_path() -> None:
    with pytest.raises(InvalidPayload, match=r"^line\.users\.1\.age is an integer of more than 64 bits"):
        read_json(b'{"users": [{}, {"age": 99999999999999999999}]}', "line")
    with pytest.raises(InvalidPayload, match=r"^line has an object with the duplicate name 'age'"):
        read_json(b'{"users": [{}, {"name": 2, "age": 1, "age": 3}]}', "line")


def test_depth_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_json(b"[" * 32 + b"]" * 32)
    assert read_json(b'"' + b"[" * 100 + b'"') == "[" * 100
    monkeypatch.setattr(json, "loads", None)
    for deep in (b"[" * 33 + b"]" * 33, b"[" * 250_000, b'{"a":' * 40_000):
        assert code_of(deep) == "PAYLOAD_TOO_DEEP"


@pytest.mark.parametrize(
    "text",
    [b"[]" * 131_072, b"[" * 262_144,
     b'"' + b'\\"' * 131_071, b'"' * 262_144, b'""' * 131_071 + b'"\\', b"a[" * 131_072,
     b'{"a":' * 52_000, b"-" * 262_144, b"1" * 262_144, b"1." + b"1" * 262_000, b'["a",' * 52_000, b"\\" * 262_144,
     b"{" + b",".join(b'"%d":1' % n for n in range(25_000)) + b',"24999":1}'],
    ids=lambda text: repr(text[:8]),
)  # fmt: skip
def test_largest_texts_are_checked_quickly(text: bytes) -> None:
    with within(0.25):
        code_of(text)


def test_size_limit_is_exact_and_configurable() -> None:
    assert read_json(b" " * (MAX_BODY_BYTES - 1) + b"1") == 1
    assert MAX_BODY_BYTES == 262_144
    with pytest.raises(InvalidPayload, match="limit is 2"):
        read_json(b"123", limit=2)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@settings(deadline=None, max_examples=500)
@given(values, st.booleans())
def test_values_that_are_read_can_be_stored_and_vice_versa(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    try:
        stored = encode(value)
    except InvalidPayload:
        assert code_of(text) in ("PAYLOAD_NOT_JSON", "INVALID_JSON")
    else:
        assert repr(read_json(text)) == repr(decode(stored)) == repr(value)


SEEDS = [
    b'{"topic": "a.b", "runAt": "2027-01-01T00:00:00Z", "payload": {"n": [1, -2.5e3, null, true, "x\\u00e9\\n"]}}',
    b'[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]',
    b'{"a": "\\ud83d\\udd70", "b": "\xed\x95\x9c", "c": {"a": {}, "b": []}}',
    b"[18446744073709551615, -9223372036854775808, 1e308, 0.1, NaN]",
]  # fmt: skip
ODD = [b"[", b"]", b"{", b"}", b'"', b"\\", b"\\u0000", b"\\ud800", b"\x00", b"\xff", b"\xed\xa0\x80", b"NaN",
       b"Infinity", b"-", b"1e999", b"9" * 25, b",", b":", b'"a":1,', b"\xef\xbb\xbf", b"null", b"\n", b"[" * 40,
       b"\\\"", b"e", b"."]  # fmt: skip


def mutated(rnd: random.Random) -> bytes:
    text = rnd.choice(SEEDS) if rnd.random() < 0.9 else rnd.randbytes(rnd.randint(0, 60))
    for _ in range(rnd.choice([0, 1, 1, 2, 3, 8])):
        at, to = sorted((rnd.randint(0, len(text)), rnd.randint(0, len(text))))
        if (change := rnd.randrange(5)) == 0:
            text = text[:at] + text[at + rnd.randint(1, 4) :]
        elif change == 1:
            text = text[:at] + rnd.choice(ODD) + text[at:]
        elif change == 2:
            text = text[:at] + rnd.randbytes(rnd.randint(1, 3)) + text[at:]
        elif change == 3:
            text = text[:to] + text[at:to] * rnd.choice([1, 2, 40]) + text[to:]
        else:
            text = text[:at] + rnd.choice(SEEDS)[rnd.randint(0, 30) :]
    return text[:4096]


def test_fifty_thousand_mutated_texts_are_read_exactly_or_refused() -> None:
    """Each value that is read equals the one that orjson reads, and can be stored without a change."""
    rnd = random.Random("json")
    read = 0
    for _ in range(50_000):
        text = mutated(rnd)
        value: Any = None
        code = None
        with within(0.25, text):
            try:
                value = read_json(text)
            except InvalidPayload as refused:
                code = refused.code
        assert code in (None, "INVALID_JSON", "PAYLOAD_NOT_JSON", "PAYLOAD_TOO_DEEP")
        if code is None:
            assert repr(orjson.loads(text)) == repr(value) == repr(decode(encode(value)))
            read += 1
    assert read > 5000
