"""The logic of the fake FCM: message validation, quota, scripted failures and the record of received messages.

Written from the documentation of FCM and independent of Timebell's FCM client, so that each verifies the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_TTL_SECONDS = 2_419_200
MAX_STORED_BODIES = 100_000
FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"
# FcmError code: HTTP status, canonical status, message.
ERRORS = {
    "UNSPECIFIED_ERROR": (500, "UNKNOWN", "Unknown error."),
    "INVALID_ARGUMENT": (400, "INVALID_ARGUMENT", "Request contains an invalid argument."),
    "UNREGISTERED": (404, "NOT_FOUND", "Requested entity was not found."),
    "SENDER_ID_MISMATCH": (403, "PERMISSION_DENIED", "SenderId mismatch"),
    "QUOTA_EXCEEDED": (429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Requests'."),
    "UNAVAILABLE": (503, "UNAVAILABLE", "The service is currently unavailable."),
    "INTERNAL": (500, "INTERNAL", "Internal error encountered."),
    "THIRD_PARTY_AUTH_ERROR": (401, "UNAUTHENTICATED", "Auth error from APNS or Web Push Service"),
}
FAULTS = ("HANG", "DROP", "REFUSE", "GOAWAY", "HTML")
_FIELDS = {"name", "data", "notification", "android", "webpush", "apns", "fcm_options", "token", "fid", "topic",
           "condition"}  # fmt: skip
_TOKEN = re.compile(r"[\w:.-]{8,4096}", re.ASCII)
_TOPIC = re.compile(r"[a-zA-Z0-9-_.~%]{1,900}")
_TTL = re.compile(r"(\d{1,8})(\.\d{1,9})?s")
_LEXEME = re.compile(r"\s*(?:(\(|\)|&&|\|\||!)|'([a-zA-Z0-9-_.~%]+)'\s+in\s+topics)")


@dataclass(slots=True)
class Reply:
    """An HTTP response, or a connection `fault` (one of FAULTS) instead; either after a `delay` in seconds."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    fault: str | None = None
    delay: float = 0.0


@dataclass(slots=True)
class Rule:
    """The behavior for the next `times` messages whose target matches the regular expression `match`.

    `do` is a code of ERRORS, one of FAULTS, or ACCEPT. With `accepted`, the message reaches the device despite the
    error. `retry_after` is the value of the header, `delay` is in seconds, and `details` adds the FCM error code to
    errors.
    """

    do: str
    match: str = ""
    times: int | None = None
    accepted: bool = False
    retry_after: str | None = None
    delay: float = 0.0
    details: bool = True

    def __post_init__(self) -> None:
        if self.do not in (*ERRORS, *FAULTS, "ACCEPT"):
            raise ValueError(f"do must be one of {', '.join((*ERRORS, *FAULTS, 'ACCEPT'))}")


@dataclass(slots=True)
class Quota:
    """A limit of messages per window of 60 s. A window starts with the first message after the previous window."""

    per_minute: int
    remaining: int = 0
    window_end: float = 0.0

    def take(self, now: float) -> float | None:
        """Count a message; return None, or the seconds to wait if the quota is used up."""
        if now >= self.window_end:
            self.remaining, self.window_end = self.per_minute, now + 60.0
        if self.remaining <= 0:
            return self.window_end - now
        self.remaining -= 1
        return None


@dataclass(slots=True)
class Fcm:
    """A Firebase project that handles requests and records the accepted messages."""

    project: str
    monotonic: Callable[[], float]
    rules: list[Rule] = field(default_factory=list)
    quota: Quota | None = None
    received: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, list[bytes]] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    accepted: int = 0
    first: float | None = None
    last: float | None = None
    """Times of the first and the last accepted message, by `monotonic`."""

    def reset(self) -> None:
        """Remove rules, quota and recorded messages."""
        self.rules, self.quota = [], None
        self.received, self.bodies, self.answered = {}, {}, {}
        self.requests = self.accepted = 0
        self.first = self.last = None

    def send(self, body: bytes) -> Reply:
        """Handle a `messages:send` request."""
        self.requests += 1
        if self.quota is not None and (wait := self.quota.take(self.monotonic())) is not None:
            return self._error("QUOTA_EXCEEDED", retry_after=str(max(1, round(wait))))
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            return self._invalid_argument("", "Invalid JSON payload received.")
        violation = _find_error(request)
        if violation is not None:
            return self._invalid_argument(*violation)
        message = request["message"]
        target = message.get("token") or message.get("topic") or message.get("condition") or message.get("fid")
        rule = self._matching_rule(target) if self.rules else None
        if rule is None or rule.do == "ACCEPT":
            reply = self._accept(target, body, bool(request.get("validate_only")))
            reply.delay = 0.0 if rule is None else rule.delay
            return reply
        if rule.accepted:
            self._accept(target, body, dry_run=False)
        if rule.do in FAULTS:
            self._count(rule.do)
            page = b"<!DOCTYPE html><title>Error 502 (Server Error)!!1</title>"
            return Reply(
                502, page, (("content-type", "text/html"),), None if rule.do == "HTML" else rule.do, rule.delay
            )
        reply = self._error(rule.do, retry_after=rule.retry_after, details=rule.details)
        reply.delay = rule.delay
        return reply

    def unauthenticated(self) -> Reply:
        """Return the response to a request without a valid access token."""
        self._count("UNAUTHENTICATED")
        message = "Request had invalid authentication credentials."
        return Reply(401, orjson.dumps({"error": {"code": 401, "message": message, "status": "UNAUTHENTICATED"}}))

    def _matching_rule(self, target: str) -> Rule | None:
        for rule in self.rules:
            if rule.times != 0 and re.search(rule.match, target):
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None

    def _accept(self, target: str, body: bytes, dry_run: bool) -> Reply:
        self._count("OK")
        if dry_run:
            return Reply(200, b'{"name":"projects/%b/messages/fake_message_id"}' % self.project.encode())
        self.accepted += 1
        self.last = self.monotonic()
        self.first = self.first or self.last
        message_id = f"0:{1_700_000_000_000_000 + self.accepted}%31bd1c9631bd1c96"
        self.received.setdefault(target, []).append(message_id)
        if self.accepted <= MAX_STORED_BODIES:
            self.bodies.setdefault(target, []).append(body)
        return Reply(200, f'{{"name":"projects/{self.project}/messages/{message_id}"}}'.encode())

    def _count(self, code: str) -> None:
        self.answered[code] = self.answered.get(code, 0) + 1

    def _error(self, code: str, retry_after: str | None = None, details: bool = True) -> Reply:
        self._count(code)
        status, canonical, message = ERRORS[code]
        error: dict[str, Any] = {"code": status, "message": message, "status": canonical}
        if details:
            error["details"] = [{"@type": FCM_ERROR, "errorCode": code}]
        headers = () if retry_after is None else (("retry-after", retry_after),)
        return Reply(status, orjson.dumps({"error": error}), headers)

    def _invalid_argument(self, field_name: str, message: str) -> Reply:
        """Return INVALID_ARGUMENT with FCM's error detail, and the invalid field unless it is the token."""
        self._count("INVALID_ARGUMENT")
        details: list[dict[str, Any]] = [{"@type": FCM_ERROR, "errorCode": "INVALID_ARGUMENT"}]
        if field_name != "message.token":
            details = [
                {"@type": BAD_REQUEST, "fieldViolations": [{"field": field_name, "description": message}]},
                *details,
            ]
        error = {"code": 400, "message": message, "status": "INVALID_ARGUMENT", "details": details}
        return Reply(400, orjson.dumps({"error": error}))


def _find_error(request: Any) -> tuple[str, str] | None:
    """Return the field that FCM would refuse and its error message, or None for a valid request."""
    if not isinstance(request, dict) or not isinstance(message := request.get("message"), dict):
        return "message", "Invalid value at 'message'."
    if unknown := (request.keys() - {"message", "validate_only"}) | (message.keys() - _FIELDS):
        return "message", f"Invalid JSON payload received. Unknown name {sorted(unknown)[0]!r}."
    targets = [name for name in ("token", "fid", "topic", "condition") if name in message]
    if len(targets) != 1:
        return "message", "Recipient of the message is not set."
    return (
        _find_target_error(targets[0], message) or _find_content_error(message, targets[0]) or _find_ttl_error(message)
    )


def _find_target_error(kind: str, message: dict[str, Any]) -> tuple[str, str] | None:
    target = message[kind]
    if not isinstance(target, str):
        return f"message.{kind}", f"Invalid value at 'message.{kind}' (TYPE_STRING)"
    if kind == "token" and not _TOKEN.fullmatch(target):
        return "message.token", "The registration token is not a valid FCM registration token"
    if kind == "topic" and not _TOPIC.fullmatch(target):
        return "message.topic", "Malformed topic name"
    if kind == "condition" and not _is_condition(target):
        return "message.condition", "Invalid condition expression provided."
    return None


def _find_content_error(message: dict[str, Any], kind: str) -> tuple[str, str] | None:
    data, notification = message.get("data", {}), message.get("notification", {})
    size = 0
    for index, (key, value) in enumerate(data.items()):
        if not isinstance(value, str):
            return (
                f"message.data[{index}].value",
                f"Invalid value at 'message.data[{index}].value' (TYPE_STRING), {value}",
            )
        if key in ("from", "notification", "message_type") or key.startswith(("google.", "gcm.")):
            return "message.data", f"Invalid data payload key: {key}"
        size += len(key.encode()) + len(value.encode())
    size += sum(len(value.encode()) for value in notification.values() if isinstance(value, str))
    if size > (4096 if kind in ("token", "fid") else 2048):
        return "message", "Message is too big"
    return None


def _find_ttl_error(message: dict[str, Any]) -> tuple[str, str] | None:
    ttl = message.get("android", {}).get("ttl", "0s")
    match = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if match is None or float(ttl[:-1]) > MAX_TTL_SECONDS:
        return "message.android.ttl", "Invalid value for time to live"
    return None


def _is_condition(text: str) -> bool:
    """Return whether a text is a valid condition: `'a' in topics && ('b' in topics || !('c' in topics))`.

    At most five topics are allowed. The expression is replaced by one character per lexeme ("t" for a topic), and then
    reduced until it is a single "t".
    """
    position, topics, shape = 0, 0, ""
    while position < len(text.rstrip()):
        lexeme = _LEXEME.match(text, position)
        if lexeme is None:
            return False
        position, topics = lexeme.end(), topics + (lexeme[2] is not None)
        shape += {"&&": "&", "||": "|"}.get(lexeme[1], lexeme[1]) if lexeme[1] else "t"
    previous = None
    while previous != shape:
        previous, shape = shape, re.sub(r"!t|\(t\)|t[&|]t", "t", shape)
    return shape == "t" and 1 <= topics <= 5
