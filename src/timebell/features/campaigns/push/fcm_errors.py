"""Map HTTP responses of FCM to results: all codes of its reference, and unexpected responses. Does no I/O.

Only an FcmError is a definite statement of FCM. A bare 5xx may come from a proxy after FCM accepted the message, so the
outcome is unknown; INTERNAL and UNSPECIFIED_ERROR leave it open as well. A 503 means by definition that the server
could not handle the request, so it is sent again, as FCM's own SDKs do.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from timebell.features.campaigns.push.provider import PushResult, SendOutcome
from timebell.targets.base import parse_retry_after

QUOTA_PAUSE = 60.0
"""Pause in seconds after QUOTA_EXCEEDED without Retry-After: the length of FCM's quota window."""
UNAVAILABLE_PAUSE = 10.0
"""The minimum pause in seconds that FCM requires before a retry."""
UNREADABLE_CODE = "FCM_RESPONSE_UNREADABLE"


def parse_response(status: int, headers: Mapping[str, str], body: bytes, now: datetime) -> PushResult:
    """Convert a response to a result. Header names are in lower case; `now` (aware) is for a Retry-After date."""
    try:
        response = orjson.loads(body)
    except orjson.JSONDecodeError:
        response = None
    response = response if isinstance(response, dict) else {}
    if status == 200:
        name = response.get("name")
        if isinstance(name, str):
            return PushResult(SendOutcome.ACCEPTED, id=name.rpartition("/")[2])
        return PushResult(SendOutcome.UNKNOWN, code=UNREADABLE_CODE, error="FCM answered 200 without a message name.")
    error = response.get("error")
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message", ""))[:200]
    code = _fcm_code(error) or _code_for_status(status)
    retry_after = parse_retry_after(headers.get("retry-after", "").strip(), now)
    return _result_for_code(
        code, status, error, f"FCM answered {status}: {message}" if message else f"FCM answered {status}.", retry_after
    )


def _result_for_code(
    code: str, status: int, error: dict[str, Any], description: str, retry_delay: float | None
) -> PushResult:
    match code:
        case "UNREGISTERED":
            return PushResult(SendOutcome.REFUSED, code=code, error=description, token_is_dead=True)
        case "INVALID_ARGUMENT":
            return PushResult(SendOutcome.REFUSED, code=code, error=description, token_is_dead=_blames_token(error))
        case "PERMISSION_DENIED" | "NOT_FOUND":  # without an FcmError: about the project, not about the token
            return PushResult(SendOutcome.REFUSED, code=code, error=description, blocks_account=True)
        case "SENDER_ID_MISMATCH" | "THIRD_PARTY_AUTH_ERROR" | "REFUSED":
            return PushResult(SendOutcome.REFUSED, code=code, error=description)
        case "QUOTA_EXCEEDED":
            pause = QUOTA_PAUSE if retry_delay is None else retry_delay
            return PushResult(SendOutcome.RETRY, code=code, error=description, retry_after=pause, uncounted=True)
        case "UNAVAILABLE":
            return PushResult(
                SendOutcome.RETRY,
                code=code,
                error=description,
                retry_after=UNAVAILABLE_PAUSE if retry_delay is None else retry_delay,
            )
        case "UNAUTHENTICATED":
            return PushResult(SendOutcome.RETRY, code=code, error=description)
    return PushResult(SendOutcome.UNKNOWN, code=code, error=description)


def _fcm_code(error: dict[str, Any]) -> str | None:
    for detail in _details(error):
        if str(detail.get("@type", "")).endswith("google.firebase.fcm.v1.FcmError"):
            return str(detail.get("errorCode", "")) or None
    return None


def _code_for_status(status: int) -> str:
    """Return the code of a response without an FcmError."""
    codes = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          429: "QUOTA_EXCEEDED", 503: "UNAVAILABLE"}  # fmt: skip
    return codes.get(status) or ("REFUSED" if 300 <= status < 500 else "UNEXPLAINED_5XX")


def _blames_token(error: dict[str, Any]) -> bool:
    """True if INVALID_ARGUMENT is about the token; an invalid message must not cause tokens to be removed."""
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
    details = error.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
