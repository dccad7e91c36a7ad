"""Push messages: validation, and encoding as FCM JSON, once for all recipients. Does no I/O.

The limits are those documented by FCM for `projects.messages`: a payload of 4096 bytes, 2048 for topics; data with
string values only and without reserved keys; a TTL of at most 28 days; conditions with at most five topics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

import orjson

from timebell.errors import InvalidInput
from timebell.features.campaigns.push.appearance import apply_appearance, check_appearance

RecipientKind = Literal["token", "topic", "condition"]

MAX_PAYLOAD_BYTES: dict[RecipientKind, int] = {"token": 4096, "topic": 2048, "condition": 2048}
MAX_TTL_SECONDS = 28 * 86_400
MAX_TOKEN_LENGTH = 4096
MAX_TAG_BYTES = 64
"""The limit of `apns-collapse-id`."""
MAX_CONDITION_TOPICS = 5

_TOKEN = re.compile(r"[!-~]+")
_TOPIC = re.compile(r"[a-zA-Z0-9_.~%-]{1,900}")
_RESERVED = re.compile(r"(?:from|notification|message_type)\Z|(?:google|gcm)\.")
_CONDITION_TOKEN = re.compile(r"\s*(?:(?P<sign>&&|\|\||[()!])|'(?P<topic>[^']*)'\s*in\s+topics\b)")


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a message. `ttl` is in seconds; a phone shows only the last message with a given `tag`."""

    title: str | None = None
    body: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    ttl: int | None = None
    collapse_key: str | None = None
    tag: str | None = None
    appearance: Mapping[str, Any] = field(default_factory=dict)
    """See appearance.py."""

    def to_fcm(self, now: datetime) -> dict[str, Any]:
        """Return FCM's `Message` without recipient. `now` (aware) is needed because APNs expects an expiry time."""
        notification = {name: text for name, text in (("title", self.title), ("body", self.body)) if text is not None}
        android: dict[str, Any] = {}
        apns: dict[str, str] = {}
        message: dict[str, Any] = {}
        if notification:
            message["notification"] = notification
        if self.data:
            message["data"] = dict(self.data)
        if self.ttl is not None:
            android["ttl"] = f"{self.ttl}s"
            expires_at = int((now + timedelta(seconds=self.ttl)).timestamp())
            apns["apns-expiration"] = str(expires_at if self.ttl else 0)
            message["webpush"] = {"headers": {"TTL": str(self.ttl)}}
        if self.collapse_key is not None:
            android["collapse_key"] = self.collapse_key
        if self.tag is not None:
            apns["apns-collapse-id"] = self.tag
            if notification:
                android["notification"] = {"tag": self.tag}
        if android:
            message["android"] = android
        if apns:
            message["apns"] = {"headers": apns}
        if self.appearance:
            apply_appearance(message, self.appearance)
        return message

    @property
    def payload_bytes(self) -> int:
        """The size that FCM limits: keys and values of `data`, title, body and platform fields, in UTF-8."""
        texts = [*self.data, *self.data.values(), self.title or "", self.body or ""]
        return sum(len(text.encode()) for text in texts) + (
            len(orjson.dumps(dict(self.appearance))) if self.appearance else 0
        )


def check_content(content: Content, kind: RecipientKind) -> None:
    """Check the content against FCM's rules. Raises InvalidInput (INVALID_PUSH_MESSAGE, PUSH_MESSAGE_TOO_LARGE)."""
    check_appearance(content.appearance)
    if content.title is None and content.body is None and not content.data:
        raise _invalid("title, body and data are empty", "Specify at least one of them.")
    for key, value in content.data.items():
        if not isinstance(value, str):
            raise _invalid(
                f"data.{key:.60} is {value!r:.60}; only strings are allowed", 'Write "{{payload.x|string}}".'
            )
        if not key or _RESERVED.match(key):
            raise _invalid(
                f"data must not have the key {key!r:.60}",
                "FCM reserves from, notification, message_type, google.* and gcm.*.",
            )
    if content.ttl is not None and not 0 <= content.ttl <= MAX_TTL_SECONDS:
        raise _invalid(f"ttl is {content.ttl} s", f"Use 0 to {MAX_TTL_SECONDS:,} (28 days).")
    if content.tag is not None and not 1 <= len(content.tag.encode()) <= MAX_TAG_BYTES:
        raise _invalid(
            f"The notification tag {content.tag!r:.80} is not 1 to {MAX_TAG_BYTES} bytes long",
            "Use a shorter collapseKey or notificationId.",
        )
    if (size := content.payload_bytes) > MAX_PAYLOAD_BYTES[kind]:
        raise InvalidInput(
            f"Title, body and data have {size:,} bytes; the limit for a {kind} is {MAX_PAYLOAD_BYTES[kind]:,}.",
            code="PUSH_MESSAGE_TOO_LARGE", fix="Send an id, and let the app fetch the rest.",
        )  # fmt: skip


def check_recipient(kind: RecipientKind, to: Any) -> str:
    """Return a valid token, topic (without `/topics/`) or condition. Raises InvalidInput (INVALID_PUSH_MESSAGE)."""
    if not isinstance(to, str):
        raise _invalid(f"A {kind} must be text, not {to!r:.60}")
    if kind == "token":
        if len(to) > MAX_TOKEN_LENGTH or not _TOKEN.fullmatch(to):
            raise _invalid(
                f"{to!r:.60} is not a registration token", "Use the token that the app received from FCM, unchanged."
            )
        return to
    if kind == "topic":
        name: str = to.removeprefix("/topics/")
        if not _TOPIC.fullmatch(name):
            raise _invalid(f"{to!r:.60} is not an FCM topic", "Topics consist of letters, digits, -, _, ., ~ and %.")
        return name
    _check_condition(to)
    return to


def _check_condition(text: str) -> None:
    """Check the syntax of a condition such as `'a' in topics && ('b' in topics || !('c' in topics))`."""
    topics, depth, position, wants_topic = 0, 0, 0, True
    while position < len(text.rstrip()):
        match = _CONDITION_TOKEN.match(text, position)
        if match is None:
            raise _invalid_condition(text, f"at {text[position:].strip()!r:.30}")
        position, sign = match.end(), match["sign"]
        if wants_topic is (sign in ("&&", "||", ")")):
            raise _invalid_condition(text, f"at {match[0].strip()!r:.30}")
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0:
            raise _invalid_condition(text, "because of an unmatched )")
        if sign is None:
            check_recipient("topic", match["topic"])
            topics += 1
        wants_topic = sign not in (None, ")")
    if depth or wants_topic:
        raise _invalid_condition(text, "because it is incomplete")
    if topics > MAX_CONDITION_TOPICS:
        raise _invalid_condition(text, f"because it has {topics} topics; the limit is {MAX_CONDITION_TOPICS}")


class Message:
    """One message to one recipient; the encoded `content` is shared by all recipients."""

    __slots__ = ("content", "kind", "to")

    def __init__(self, kind: RecipientKind, to: str, content: EncodedContent) -> None:
        self.kind, self.to, self.content = kind, to, content

    def request(self) -> bytes:
        """Return the body of `messages:send`."""
        return b'{"message":{"%b":%b%b' % (self.kind.encode(), orjson.dumps(self.to), self.content.suffix)


class EncodedContent:
    """The encoded content: from its first field to the end of the request body."""

    __slots__ = ("suffix",)

    def __init__(self, content: Content, now: datetime) -> None:
        fields = orjson.dumps(content.to_fcm(now))[1:]
        self.suffix = (b"," if len(fields) > 1 else b"") + fields + b"}"


def _invalid_condition(text: str, reason: str) -> InvalidInput:
    return _invalid(
        f"{text!r:.200} is not a valid condition, {reason}",
        "Write 'news' in topics && !('sports' in topics || 'dev' in topics).",
    )


def _invalid(reason: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{reason}.", code="INVALID_PUSH_MESSAGE", fix=fix)
