"""What Firebase would answer: the checks of a message, the quota, scripted failures, and the ledger of what arrived.

Written from FCM's documentation and not from `timebell.targets.push`, so that the two check one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

LONGEST_TTL = 2_419_200
KEPT_BODIES = 100_000
FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"
# FcmError code: HTTP status, canonical status, what it says.
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
    """An answer in HTTP, or a `fault` of the line (one of FAULTS) instead of it; `delay` in seconds before either."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    fault: str | None = None
    delay: float = 0.0


@dataclass(slots=True)
class Rule:
    """Do `do` (a code of ERRORS, one of FAULTS, or ACCEPT) to the next `times` messages whose target matches.

    `accepted` says that the message reached the device all the same; `retry_after` is a header, `delay` in seconds.
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
            raise ValueError(f"do is one of {', '.join((*ERRORS, *FAULTS, 'ACCEPT'))}")


@dataclass(slots=True)
class Quota:
    """So many messages in each window of 60 s, which refills whole; windows start with the first message."""

    per_minute: int
    left: int = 0
    until: float = 0.0

    def take(self, now: float) -> float | None:
        """Seconds to wait, when there is none left."""
        if now >= self.until:
            self.left, self.until = self.per_minute, now + 60.0
        if self.left <= 0:
            return self.until - now
        self.left -= 1
        return None


@dataclass(slots=True)
class Fcm:
    """A project of Firebase: give it requests, look at its ledger."""

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
    """When a message was accepted, of `monotonic`."""

    def reset(self) -> None:
        """As new, with the tokens that were issued."""
        self.rules, self.quota = [], None
        self.received, self.bodies, self.answered = {}, {}, {}
        self.requests = self.accepted = 0
        self.first = self.last = None

    def send(self, body: bytes) -> Reply:
        """What `messages:send` answers."""
        self.requests += 1
        if self.quota is not None and (wait := self.quota.take(self.monotonic())) is not None:
            return self._error("QUOTA_EXCEEDED", retry_after=str(max(1, round(wait))))
        try:
            asked = orjson.loads(body)
        except orjson.JSONDecodeError:
            return self._bad("", "Invalid JSON payload received.")
        wrong = _wrong(asked)
        if wrong is not None:
            return self._bad(*wrong)
        message = asked["message"]
        target = message.get("token") or message.get("topic") or message.get("condition") or message.get("fid")
        rule = self._rule(target) if self.rules else None
        if rule is None or rule.do == "ACCEPT":
            reply = self._accept(target, body, bool(asked.get("validate_only")))
            reply.delay = 0.0 if rule is None else rule.delay
            return reply
        if rule.accepted:
            self._accept(target, body, dry=False)
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
        """What a request without a good access token gets."""
        self._count("UNAUTHENTICATED")
        said = "Request had invalid authentication credentials."
        return Reply(401, orjson.dumps({"error": {"code": 401, "message": said, "status": "UNAUTHENTICATED"}}))

    def _rule(self, target: str) -> Rule | None:
        for rule in self.rules:
            if rule.times != 0 and re.search(rule.match, target):
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None

    def _accept(self, target: str, body: bytes, dry: bool) -> Reply:
        self._count("OK")
        if dry:
            return Reply(200, b'{"name":"projects/%b/messages/fake_message_id"}' % self.project.encode())
        self.accepted += 1
        self.last = self.monotonic()
        self.first = self.first or self.last
        made = f"0:{1_700_000_000_000_000 + self.accepted}%31bd1c9631bd1c96"
        self.received.setdefault(target, []).append(made)
        if self.accepted <= KEPT_BODIES:
            self.bodies.setdefault(target, []).append(body)
        return Reply(200, f'{{"name":"projects/{self.project}/messages/{made}"}}'.encode())

    def _count(self, what: str) -> None:
        self.answered[what] = self.answered.get(what, 0) + 1

    def _error(self, code: str, retry_after: str | None = None, details: bool = True) -> Reply:
        self._count(code)
        status, canonical, said = ERRORS[code]
        error: dict[str, Any] = {"code": status, "message": said, "status": canonical}
        if details:
            error["details"] = [{"@type": FCM_ERROR, "errorCode": code}]
        headers = () if retry_after is None else (("retry-after", retry_after),)
        return Reply(status, orjson.dumps({"error": error}), headers)

    def _bad(self, where: str, said: str) -> Reply:
        """INVALID_ARGUMENT. Of a bad token, FCM's own error alone; of anything else, the field that is wrong too."""
        self._count("INVALID_ARGUMENT")
        details: list[dict[str, Any]] = [{"@type": FCM_ERROR, "errorCode": "INVALID_ARGUMENT"}]
        if where != "message.token":
            details = [{"@type": BAD_REQUEST, "fieldViolations": [{"field": where, "description": said}]}, *details]
        error = {"code": 400, "message": said, "status": "INVALID_ARGUMENT", "details": details}
        return Reply(400, orjson.dumps({"error": error}))


def _wrong(asked: Any) -> tuple[str, str] | None:
    """The field that FCM would refuse, and what it would say."""
    if not isinstance(asked, dict) or not isinstance(message := asked.get("message"), dict):
        return "message", "Invalid value at 'message'."
    if unknown := (asked.keys() - {"message", "validate_only"}) | (message.keys() - _FIELDS):
        return "message", f"Invalid JSON payload received. Unknown name {sorted(unknown)[0]!r}."
    targets = [name for name in ("token", "fid", "topic", "condition") if name in message]
    if len(targets) != 1:
        return "message", "Recipient of the message is not set."
    return _wrong_target(targets[0], message) or _wrong_content(message, targets[0]) or _wrong_ttl(message)


def _wrong_target(kind: str, message: dict[str, Any]) -> tuple[str, str] | None:
    given = message[kind]
    if not isinstance(given, str):
        return f"message.{kind}", f"Invalid value at 'message.{kind}' (TYPE_STRING)"
    if kind == "token" and not _TOKEN.fullmatch(given):
        return "message.token", "The registration token is not a valid FCM registration token"
    if kind == "topic" and not _TOPIC.fullmatch(given):
        return "message.topic", "Malformed topic name"
    if kind == "condition" and not _is_condition(given):
        return "message.condition", "Invalid condition expression provided."
    return None


def _wrong_content(message: dict[str, Any], kind: str) -> tuple[str, str] | None:
    data, shown = message.get("data", {}), message.get("notification", {})
    size = 0
    for at, (key, value) in enumerate(data.items()):
        if not isinstance(value, str):
            return f"message.data[{at}].value", f"Invalid value at 'message.data[{at}].value' (TYPE_STRING), {value}"
        if key in ("from", "notification", "message_type") or key.startswith(("google.", "gcm.")):
            return "message.data", f"Invalid data payload key: {key}"
        size += len(key.encode()) + len(value.encode())
    size += sum(len(value.encode()) for value in shown.values() if isinstance(value, str))
    if size > (4096 if kind in ("token", "fid") else 2048):
        return "message", "Message is too big"
    return None


def _wrong_ttl(message: dict[str, Any]) -> tuple[str, str] | None:
    ttl = message.get("android", {}).get("ttl", "0s")
    read = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if read is None or float(ttl[:-1]) > LONGEST_TTL:
        return "message.android.ttl", "Invalid value for time to live"
    return None


def _is_condition(text: str) -> bool:
    """`'a' in topics && ('b' in topics || !('c' in topics))`, of at most five topics: read by reducing it."""
    at, topics, shape = 0, 0, ""
    while at < len(text.rstrip()):
        lexeme = _LEXEME.match(text, at)
        if lexeme is None:
            return False
        at, topics = lexeme.end(), topics + (lexeme[2] is not None)
        shape += {"&&": "&", "||": "|"}.get(lexeme[1], lexeme[1]) if lexeme[1] else "t"
    before = None
    while before != shape:
        before, shape = shape, re.sub(r"!t|\(t\)|t[&|]t", "t", shape)
    return shape == "t" and 1 <= topics <= 5
