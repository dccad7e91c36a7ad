"""One line of NDJSON, with the fields of `POST /jobs`, as a `JobSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from hashlib import sha256
from typing import Any

import orjson

from timebell.client.jobs import JobSpec
from timebell.errors import InvalidInput

# Field of a line -> field of a JobSpec.
FIELDS = {
    "topic": "topic", "runAt": "run_at", "timezone": "timezone", "payload": "payload", "key": "key", "queue": "queue",
    "priority": "priority", "timeoutSeconds": "timeout", "expiresAfterSeconds": "expires_after", "target": "target",
    "metadata": "metadata", "retry": "retry", "maxRetries": "retry", "onGap": "on_gap", "onFold": "on_fold",
}  # fmt: skip
LABELS = {
    "ownerId": "owner_id", "tenantId": "tenant_id", "correlationId": "correlation_id",
    "clientRequestId": "client_request_id",
}  # fmt: skip
BACKOFF = {"type": "backoff", "delay": "delay", "max": "max_delay", "maxDelay": "max_delay", "jitter": "jitter"}
LONGEST = 1_048_576
"""Bytes of a line; a payload has 64 KiB at most."""


def read(line: bytes) -> JobSpec:
    """The job of a line. Raises InvalidInput.

    A line without a clientRequestId gets one made of its text: the same line again, in this file or the next
    import, is the same job.
    """
    given = _object(line)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in FIELDS:
            near = [f"Did you mean {known}?" for known in get_close_matches(name, FIELDS, 1)]
            raise InvalidInput(f"A job has no field {name!r:.60}.", code="UNKNOWN_FIELD", fix=" ".join(near))
        if value is not None:
            fields[FIELDS[name]] = value
    if "topic" not in fields:
        raise InvalidInput("A job has to say its topic.", code="TOPIC_MISSING")
    fields |= _labels(fields.pop("metadata", {}))
    if "maxRetries" in given and "retry" in given:
        raise InvalidInput("retry and maxRetries say the same: give one.", code="INVALID_RETRY")
    if "retry" in fields:
        fields["retry"] = _retry(fields["retry"])
    fields.setdefault("client_request_id", f"import-{sha256(line).hexdigest()[:40]}")
    return JobSpec(**fields)


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LONGEST:
        raise InvalidInput(f"The line has more than {LONGEST:,} bytes.", code="LINE_TOO_LONG")
    try:
        given = orjson.loads(line)
    except orjson.JSONDecodeError as bad:
        raise InvalidInput(f"The line is not JSON: {bad}.", code="LINE_NOT_JSON") from bad
    if not isinstance(given, dict):
        raise InvalidInput("The line is not a JSON object.", code="LINE_NOT_JSON")
    return given


def _labels(metadata: Any) -> dict[str, Any]:
    """The labels with fields of their own, and the rest of the metadata as it is."""
    if not isinstance(metadata, dict):
        raise InvalidInput("metadata is not a JSON object.", code="INVALID_METADATA")
    named = {LABELS[name]: value for name, value in metadata.items() if name in LABELS and value is not None}
    rest = {name: value for name, value in metadata.items() if name not in LABELS}
    return {**named, "metadata": rest} if rest else named


def _retry(given: Any) -> dict[str, Any]:
    """`maxRetries: 3`, or `{"attempts": 4, "backoff": {"type": "fixed", "delay": 5}}`, or as `Retry`."""
    if isinstance(given, int) and not isinstance(given, bool):
        return {"attempts": given + 1}
    if not isinstance(given, Mapping):
        raise InvalidInput("retry is not a JSON object.", code="INVALID_RETRY")
    flat = {name: value for name, value in given.items() if name != "backoff"}
    backoff = given.get("backoff")
    if isinstance(backoff, Mapping):
        flat |= backoff
    elif backoff is not None:
        flat["type"] = backoff
    unknown = flat.keys() - {*BACKOFF, "attempts"}
    if unknown:
        raise InvalidInput(f"retry has no field {min(unknown)!r:.60}.", code="INVALID_RETRY")
    return {BACKOFF.get(name, name): value for name, value in flat.items()}
