"""A push message: built once for all who get it, checked before it is sent, shown as the JSON a phone reads. Pure.

The limits are those that FCM documents for `projects.messages`: 4096 bytes of payload, 2048 to topics; data of strings
only, under keys it does not keep to itself; a TTL of at most 28 days; conditions of at most five topics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

import orjson

from timebell.errors import InvalidInput

To = Literal["token", "topic", "condition"]

PAYLOAD_BYTES: dict[To, int] = {"token": 4096, "topic": 2048, "condition": 2048}
LONGEST_TTL = 28 * 86_400
LONGEST_TOKEN = 4096
LONGEST_TAG = 64
"""Bytes: the limit of `apns-collapse-id`."""
MOST_TOPICS = 5

_TOKEN = re.compile(r"[!-~]+")
_TOPIC = re.compile(r"[a-zA-Z0-9_.~%-]{1,900}")
_RESERVED = re.compile(r"(?:from|notification|message_type)\Z|(?:google|gcm)\.")
_WORD = re.compile(r"\s*(?:(?P<sign>&&|\|\||[()!])|'(?P<topic>[^']*)'\s*in\s+topics\b)")


@dataclass(frozen=True, slots=True)
class Content:
    """What is sent, whoever gets it. `ttl` in seconds; of messages with one `tag` a phone shows only the last."""

    title: str | None = None
    body: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    ttl: int | None = None
    collapse_key: str | None = None
    tag: str | None = None

    def json(self, now: datetime) -> dict[str, Any]:
        """FCM's `Message` without its target; APNs wants the end of the `ttl` as an instant, hence `now` (aware)."""
        shown = {name: text for name, text in (("title", self.title), ("body", self.body)) if text is not None}
        android: dict[str, Any] = {}
        apns: dict[str, str] = {}
        message: dict[str, Any] = {}
        if shown:
            message["notification"] = shown
        if self.data:
            message["data"] = dict(self.data)
        if self.ttl is not None:
            android["ttl"] = f"{self.ttl}s"
            until = int((now + timedelta(seconds=self.ttl)).timestamp())
            apns["apns-expiration"] = str(until if self.ttl else 0)
            message["webpush"] = {"headers": {"TTL": str(self.ttl)}}
        if self.collapse_key is not None:
            android["collapse_key"] = self.collapse_key
        if self.tag is not None:
            apns["apns-collapse-id"] = self.tag
            if shown:
                android["notification"] = {"tag": self.tag}
        if android:
            message["android"] = android
        if apns:
            message["apns"] = {"headers": apns}
        return message

    @property
    def payload_bytes(self) -> int:
        """What FCM's limit counts: keys and values of `data`, title and body, in UTF-8."""
        texts = [*self.data, *self.data.values(), self.title or "", self.body or ""]
        return sum(len(text.encode()) for text in texts)


def check(content: Content, kind: To) -> None:
    """Raises InvalidInput (PUSH_MESSAGE_INVALID, PUSH_MESSAGE_TOO_LARGE) for what FCM would refuse."""
    if content.title is None and content.body is None and not content.data:
        raise _invalid("The message is empty", "Give a title, a body or data.")
    for key, value in content.data.items():
        if not isinstance(value, str):
            raise _invalid(
                f"data.{key:.60} is {value!r:.60}; a phone reads strings only", 'Write "{{payload.x|string}}".'
            )
        if not key or _RESERVED.match(key):
            raise _invalid(
                f"data cannot have the key {key!r:.60}",
                "FCM keeps from, notification, message_type, google.* and gcm.* to itself.",
            )
    if content.ttl is not None and not 0 <= content.ttl <= LONGEST_TTL:
        raise _invalid(f"ttl is {content.ttl} s", f"It is 0 to {LONGEST_TTL:,} (28 days).")
    if content.tag is not None and not 1 <= len(content.tag.encode()) <= LONGEST_TAG:
        raise _invalid(
            f"What tells this notification from others ({content.tag!r:.80}) is not 1 to {LONGEST_TAG} bytes",
            "Give a shorter collapseKey or notificationId.",
        )
    if (size := content.payload_bytes) > PAYLOAD_BYTES[kind]:
        raise InvalidInput(
            f"The message has {size:,} bytes of title, body and data; to a {kind} it may have {PAYLOAD_BYTES[kind]:,}.",
            code="PUSH_MESSAGE_TOO_LARGE", fix="Send an id, and let the app fetch the rest.",
        )  # fmt: skip


def check_to(kind: To, to: Any) -> str:
    """The token, topic (without `/topics/`) or condition. Raises InvalidInput (PUSH_MESSAGE_INVALID)."""
    if not isinstance(to, str):
        raise _invalid(f"A {kind} is text, not {to!r:.60}")
    if kind == "token":
        if len(to) > LONGEST_TOKEN or not _TOKEN.fullmatch(to):
            raise _invalid(f"{to!r:.60} is no registration token", "It is what the app got from FCM, unchanged.")
        return to
    if kind == "topic":
        name: str = to.removeprefix("/topics/")
        if not _TOPIC.fullmatch(name):
            raise _invalid(f"{to!r:.60} is no topic of FCM", "Topics are of letters, digits, -, _, ., ~ and %.")
        return name
    _check_condition(to)
    return to


def _check_condition(text: str) -> None:
    """`'a' in topics && ('b' in topics || !('c' in topics))`."""
    topics, depth, at, wants_topic = 0, 0, 0, True
    while at < len(text.rstrip()):
        word = _WORD.match(text, at)
        if word is None:
            raise _bad_condition(text, f"at {text[at:].strip()!r:.30}")
        at, sign = word.end(), word["sign"]
        if wants_topic is (sign in ("&&", "||", ")")):
            raise _bad_condition(text, f"at {word[0].strip()!r:.30}")
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0:
            raise _bad_condition(text, "as ) closes nothing")
        if sign is None:
            check_to("topic", word["topic"])
            topics += 1
        wants_topic = sign not in (None, ")")
    if depth or wants_topic:
        raise _bad_condition(text, "as it stops too soon")
    if topics > MOST_TOPICS:
        raise _bad_condition(text, f"with {topics} topics of at most {MOST_TOPICS}")


class Message:
    """One message to one target; `content` is encoded once, however many get it."""

    __slots__ = ("content", "kind", "to")

    def __init__(self, kind: To, to: str, content: Encoded) -> None:
        self.kind, self.to, self.content = kind, to, content

    def request(self) -> bytes:
        """The body of `messages:send`."""
        return b'{"message":{"%b":%b%b' % (self.kind.encode(), orjson.dumps(self.to), self.content.rest)


class Encoded:
    """A content as bytes, from its first field to the end of the request."""

    __slots__ = ("rest",)

    def __init__(self, content: Content, now: datetime) -> None:
        fields = orjson.dumps(content.json(now))[1:]
        self.rest = (b"," if len(fields) > 1 else b"") + fields + b"}"


def _bad_condition(text: str, where: str) -> InvalidInput:
    return _invalid(
        f"{text!r:.200} is no condition, {where}", "Write 'news' in topics && !('sports' in topics || 'dev' in topics)."
    )


def _invalid(why: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{why}.", code="PUSH_MESSAGE_INVALID", fix=fix)
