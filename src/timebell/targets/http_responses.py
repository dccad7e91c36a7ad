"""Judge responses: accepted statuses, a check of the body, and the outcome that follows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from timebell import http_client
from timebell.errors import InvalidInput
from timebell.targets.base import STORED_OUTPUT_BYTES, Outcome, decode_text, parse_retry_after
from timebell.targets.http_connections import MAX_RESPONSE_BYTES

STATUS_UNAUTHORIZED = 401
STATUS_GONE = 410
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
DEFAULT_SUCCESS: tuple[int | str, ...] = ("2xx",)
MAX_STATUSES = 50
MAX_EXPECTED_CHARACTERS = 1000
MAX_EXPECTED_MEMBERS = 20
_ABSENT: Any = object()


def check_success(success: Any) -> list[int | str]:
    """Validate accepted statuses, such as [200, "3xx"]. Raises InvalidInput (INVALID_TARGET_OPTIONS)."""
    is_valid = isinstance(success, list) and 0 < len(success) <= MAX_STATUSES and all(
        each in STATUS_CLASSES if isinstance(each, str) else type(each) is int and 200 <= each <= 599
        for each in success
    )  # fmt: skip
    if not is_valid:
        raise InvalidInput(
            f"success cannot be {success!r:.60}.", code="INVALID_TARGET_OPTIONS",
            fix='Use a list of statuses from 200 to 599 and classes: [200, 404, "3xx"].',
        )  # fmt: skip
    return list(success)


def check_expectation(expect: Any) -> dict[str, Any]:
    """Validate `expect`: `contains` (text), and `json` (values by path).

    Raises InvalidInput (INVALID_TARGET_OPTIONS).
    """
    members = expect.get("json", {}) if isinstance(expect, dict) else None
    text = expect.get("contains") if isinstance(expect, dict) else None
    is_valid = (
        isinstance(expect, dict) and expect and expect.keys() <= {"contains", "json"}
        and ("contains" not in expect or (isinstance(text, str) and 0 < len(text) <= MAX_EXPECTED_CHARACTERS))
        and isinstance(members, dict) and ("json" not in expect or 0 < len(members) <= MAX_EXPECTED_MEMBERS)
        and all(isinstance(path, str) and not isinstance(value, dict | list) for path, value in members.items())
    )  # fmt: skip
    if not is_valid:
        raise InvalidInput(
            f"expect cannot be {expect!r:.60}.", code="INVALID_TARGET_OPTIONS",
            fix='Use {"contains": "OK"}, {"json": {"result.status": "done"}}, or both.',
        )  # fmt: skip
    return dict(expect)


def kept_bytes(options: Mapping[str, Any]) -> int:
    """Return how much of the response body is needed to judge it."""
    return MAX_RESPONSE_BYTES if "expect" in options else STORED_OUTPUT_BYTES


def judge_response(response: http_client.HttpResponse, options: Mapping[str, Any], now: datetime) -> Outcome:
    """Return the outcome of a response. Failure codes: HTTP_STATUS, RESPONSE_REJECTED."""
    status = response.status
    result = {"status": status, "body": decode_text(response.body[:STORED_OUTPUT_BYTES])}
    accepted = options.get("success", DEFAULT_SUCCESS)
    if status in accepted or f"{status // 100}xx" in accepted:
        problem = _find_problem(response, options.get("expect", {}))
        return Outcome.ok(result) if problem is None else Outcome.failed("RESPONSE_REJECTED", problem, result=result)
    error = f"The receiver answered {status}."
    if 300 <= status < 400:
        error += " Redirects are not followed: use the final URL."
    retry_after = None
    if status in (429, 503):
        retry_after = parse_retry_after(response.header(b"retry-after"), now)
    outcome = Outcome.failed("HTTP_STATUS", error, status != STATUS_GONE, retry_after, result)
    outcome.receiver_gone = status == STATUS_GONE
    return outcome


def _find_problem(response: http_client.HttpResponse, expect: Mapping[str, Any]) -> str | None:
    """Return why the body is not the expected one; None if it is."""
    if "contains" in expect and expect["contains"].encode() not in response.body:
        return f"The response body does not contain {expect['contains']!r:.100}."
    if "json" not in expect:
        return None
    try:
        document = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        return "The response body is not JSON, or larger than 64 KiB."
    for path, expected in expect["json"].items():
        value = _look_up(document, path.split("."))
        if value is _ABSENT or type(value) is not type(expected) or value != expected:
            return f"{path:.100} of the response body is not {expected!r:.100}."
    return None


def _look_up(document: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(document, dict) and part in document:
            document = document[part]
        elif isinstance(document, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(document):
            document = document[int(part[:9])]
        else:
            return _ABSENT
    return document
