"""What an HTTP answer of FCM means for a message: every code of its reference, and all that may come instead. Pure.

Only what FCM says itself, in an FcmError, counts as said. A bare 5xx may come from anything on the way, after the
message was taken: nobody knows then, and INTERNAL and UNSPECIFIED_ERROR say no more than that either.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from timebell.targets.base import retry_after
from timebell.targets.push.provider import Answer, Fate

QUOTA_PAUSE = 60.0
"""Seconds after QUOTA_EXCEEDED without Retry-After: the length of FCM's window."""
UNAVAILABLE_PAUSE = 10.0
"""The least that FCM asks for before a retry."""
_SENT_WRONG = "FCM_ANSWER_UNREADABLE"


def answer_of(status: int, headers: Mapping[str, str], body: bytes, now: datetime) -> Answer:
    """`headers` by lower-case name; `now` is aware, for a Retry-After that is a date."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    said = said if isinstance(said, dict) else {}
    if status == 200:
        name = said.get("name")
        if isinstance(name, str):
            return Answer(Fate.ACCEPTED, id=name.rpartition("/")[2])
        return Answer(Fate.UNKNOWN, code=_SENT_WRONG, error="FCM answered 200 without a message's name.")
    error = said.get("error")
    error = error if isinstance(error, dict) else {}
    words = str(error.get("message", ""))[:200]
    code = _fcm_code(error) or _by_status(status)
    wait = retry_after(headers.get("retry-after", "").strip(), now)
    return _answer(code, status, error, f"FCM answered {status}: {words}" if words else f"FCM answered {status}.", wait)


def _answer(code: str, status: int, error: dict[str, Any], words: str, wait: float | None) -> Answer:
    match code:
        case "UNREGISTERED":
            return Answer(Fate.REFUSED, code=code, error=words, remove=True)
        case "INVALID_ARGUMENT":
            return Answer(Fate.REFUSED, code=code, error=words, remove=_is_of_the_token(error))
        case "SENDER_ID_MISMATCH" | "THIRD_PARTY_AUTH_ERROR" | "PERMISSION_DENIED" | "NOT_FOUND" | "REFUSED":
            return Answer(Fate.REFUSED, code=code, error=words)
        case "QUOTA_EXCEEDED":
            pause = QUOTA_PAUSE if wait is None else wait
            return Answer(Fate.AGAIN, code=code, error=words, after=pause, costs_nothing=True)
        case "UNAVAILABLE":
            return Answer(Fate.AGAIN, code=code, error=words, after=UNAVAILABLE_PAUSE if wait is None else wait)
        case "UNAUTHENTICATED":
            return Answer(Fate.AGAIN, code=code, error=words)
    return Answer(Fate.UNKNOWN, code=code, error=words)


def _fcm_code(error: dict[str, Any]) -> str | None:
    for detail in _details(error):
        if str(detail.get("@type", "")).endswith("google.firebase.fcm.v1.FcmError"):
            return str(detail.get("errorCode", "")) or None
    return None


def _by_status(status: int) -> str:
    """Of answers without an FcmError."""
    by = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          429: "QUOTA_EXCEEDED"}  # fmt: skip
    return by.get(status) or ("REFUSED" if 300 <= status < 500 else "UNEXPLAINED_5XX")


def _is_of_the_token(error: dict[str, Any]) -> bool:
    """Whether INVALID_ARGUMENT speaks of the token: a message that is wrong must not cost anybody their token."""
    fields = [
        violation.get("field")
        for detail in _details(error)
        if str(detail.get("@type", "")).endswith("google.rpc.BadRequest")
        for violation in detail.get("fieldViolations", [])
        if isinstance(violation, dict)
    ]
    if fields:
        return fields == ["message.token"]
    return _fcm_code(error) is not None and "registration token" in str(error.get("message", "")).lower()


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    found = error.get("details")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
