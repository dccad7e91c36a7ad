"""Push messages: their encoding as FCM documents it, and the checks that FCM would fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.features.campaigns.push.message import (
    Content,
    EncodedContent,
    Message,
    RecipientKind,
    check_content,
    check_recipient,
)
from timebell.features.campaigns.testing import NOW
from timebell_fcm_emulator.rules import Fcm


def encode(kind: RecipientKind, to: str, content: Content) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(Message(kind, to, EncodedContent(content, NOW)).request())
    message: dict[str, Any] = request["message"]
    return message


def error_code(content: Content, kind: RecipientKind = "token") -> str | None:
    try:
        check_content(content, kind)
    except InvalidInput as error:
        return error.code
    return None


def test_all_fields_of_a_message_are_encoded() -> None:
    content = Content("Title", "Body", {"chapter": "0"}, 3600, "news", "n-1")
    assert encode("token", "abc:1", content) == {
        "token": "abc:1",
        "notification": {"title": "Title", "body": "Body"},
        "data": {"chapter": "0"},
        "android": {"ttl": "3600s", "collapse_key": "news", "notification": {"tag": "n-1"}},
        "apns": {"headers": {"apns-expiration": str(int(NOW.timestamp()) + 3600), "apns-collapse-id": "n-1"}},
        "webpush": {"headers": {"TTL": "3600"}},
    }


def test_data_alone_has_no_notification() -> None:
    assert encode("topic", "news", Content(data={"a": "1"})) == {"topic": "news", "data": {"a": "1"}}


def test_a_zero_ttl_means_deliver_now_or_drop() -> None:
    message = encode("token", "t", Content("x", ttl=0))
    assert message["android"]["ttl"] == "0s"
    assert message["apns"]["headers"]["apns-expiration"] == "0"


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (Content("x"), "token", None),
        (Content(), "token", "INVALID_PUSH_MESSAGE"),
        (Content(tag="t", ttl=1), "token", "INVALID_PUSH_MESSAGE"),
        (Content(data={"a": "x" * 4095}), "token", None),
        (Content(data={"a": "x" * 4096}), "token", "PUSH_MESSAGE_TOO_LARGE"),
        (Content(data={"a": "약" * 1365}), "token", None),
        (Content(data={"a": "약" * 1366}), "token", "PUSH_MESSAGE_TOO_LARGE"),
        (Content("x" * 2048), "topic", None),
        (Content("x" * 2049), "condition", "PUSH_MESSAGE_TOO_LARGE"),
        (Content("x", ttl=2_419_200), "token", None),
        (Content("x", ttl=2_419_201), "token", "INVALID_PUSH_MESSAGE"),
        (Content("x", ttl=-1), "token", "INVALID_PUSH_MESSAGE"),
        (Content("x", tag="t" * 64), "token", None),
        (Content("x", tag="t" * 65), "token", "INVALID_PUSH_MESSAGE"),
        *((Content(data={key: "1"}), "token", "INVALID_PUSH_MESSAGE")
          for key in ("from", "notification", "message_type", "google.x", "gcm.notification.x", "gcm.x", "")),
        *((Content(data={key: "1"}), "token", None) for key in ("from_", "fromage", "googly", "notifications", "gcm")),
        (Content(data={"a": 0}), "token", "INVALID_PUSH_MESSAGE"),  # type: ignore[dict-item]
        (Content(data={"a": None}), "token", "INVALID_PUSH_MESSAGE"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_message_limits_are_checked(content: Content, kind: RecipientKind, code: str | None) -> None:
    assert error_code(content, kind) == code


@pytest.mark.parametrize(
    ("kind", "to", "expected"),
    [
        ("token", "fGh-1_x:APA91b", "fGh-1_x:APA91b"),
        ("token", "a b", None),
        ("token", "", None),
        ("token", "tök", None),
        ("token", "x" * 4097, None),
        ("token", 7, None),
        ("topic", "news", "news"),
        ("topic", "/topics/news", "news"),
        ("topic", "a%20b~c.d_e-1", "a%20b~c.d_e-1"),
        ("topic", "a b", None),
        ("topic", "", None),
        ("condition", "'a' in topics", "'a' in topics"),
        ("condition", "'a' in topics && ('b' in topics || !('c' in topics))", ...),
        ("condition", "!'a' in topics", ...),
        ("condition", " || ".join(f"'t{n}' in topics" for n in range(5)), ...),
        ("condition", " || ".join(f"'t{n}' in topics" for n in range(6)), None),
        ("condition", "", None),
        ("condition", "a in topics", None),
        ("condition", "'a' in topics 'b' in topics", None),
        ("condition", "'a' in topics &&", None),
        ("condition", "'a' in topics & 'b' in topics", None),
        ("condition", "('a' in topics", None),
        ("condition", "'a' in topics)", None),
        ("condition", "()", None),
        ("condition", "'a b' in topics", None),
        ("condition", "'a' in topicsx", None),
    ],
)
def test_recipients_are_checked(kind: RecipientKind, to: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(InvalidInput) as error:
            check_recipient(kind, to)
        assert error.value.code == "INVALID_PUSH_MESSAGE"
    else:
        assert check_recipient(kind, to) == (to if expected is ... else expected)


WORDS = st.sampled_from(["'a' in topics", "'b' in topics", "&&", "||", "!", "(", ")", "'c d' in topics", "&"])


@given(st.lists(WORDS, max_size=9).map(" ".join))
def test_conditions_are_parsed_as_the_emulator_parses_them(text: str) -> None:
    """Compare two independent parsers: a left-to-right one, and one that reduces terms."""
    try:
        check_recipient("condition", text)
        is_valid = True
    except InvalidInput:
        is_valid = False
    reply = Fcm("p", lambda: 0.0).send(json.dumps({"message": {"condition": text, "data": {"a": "1"}}}).encode())
    assert (reply.status == 200) is is_valid


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=1500)
CONTENTS = st.builds(
    Content, st.none() | TEXT, st.none() | TEXT,
    st.dictionaries(st.sampled_from(["a", "from", "google.x", "gcm.y", "naïve", "message_type", "z" * 900]), TEXT),
    st.none() | st.integers(-1, 2_419_202), st.none() | st.just("key"), st.none() | st.just("tag"),
)  # fmt: skip


@settings(max_examples=50)
@given(CONTENTS, st.sampled_from([("token", "token-123"), ("topic", "news"), ("condition", "'a' in topics")]))
def test_checked_messages_are_accepted_by_the_emulator(content: Content, recipient: tuple[RecipientKind, str]) -> None:
    reply = Fcm("p", lambda: 0.0).send(Message(*recipient, EncodedContent(content, NOW)).request())
    if error_code(content, recipient[0]) is None:
        assert reply.status == 200
    elif content.title is not None or content.body is not None or content.data:
        assert reply.status == 400, "a message that FCM accepts was refused"
