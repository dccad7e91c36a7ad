"""Conversion between jobs and JSON with the fields of `POST /jobs`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from timebell import tracing
from timebell.client.job_spec import JobSpec
from timebell.errors import InvalidInput
from timebell.model.job import METADATA_NAMES
from timebell.model.routes import COMPLETE_UNHANDLED

# JSON field -> JobSpec field.
JOB_FIELDS = {
    "topic": "topic", "runAt": "run_at", "timezone": "timezone", "payload": "payload", "key": "key", "queue": "queue",
    "group": "group",
    "priority": "priority", "timeoutSeconds": "timeout", "expiresAfterSeconds": "expires_after", "target": "target",
    "condition": "condition", "unless": "unless",
    "metadata": "metadata", "retry": "retry", "maxRetries": "retry", "onGap": "on_gap", "onFold": "on_fold",
}  # fmt: skip
BACKOFF_FIELDS = {"type": "backoff", "delay": "delay", "max": "max_delay", "maxDelay": "max_delay", "jitter": "jitter"}


def parse_job(fields_json: Mapping[str, Any]) -> JobSpec:
    """Return the job described by these fields; null fields are ignored. Raises InvalidInput."""
    fields: dict[str, Any] = {}
    for name, value in fields_json.items():
        if name not in JOB_FIELDS:
            suggestions = [f"Did you mean {known}?" for known in get_close_matches(name, JOB_FIELDS, 1)]
            raise InvalidInput(f"A job has no field {name!r:.60}.", code="UNKNOWN_FIELD", fix=" ".join(suggestions))
        if value is not None:
            fields[JOB_FIELDS[name]] = value
    if "topic" not in fields:
        raise InvalidInput("A job requires a topic.", code="TOPIC_MISSING")
    if "maxRetries" in fields_json and "retry" in fields_json:
        raise InvalidInput("retry and maxRetries exclude each other.", code="INVALID_RETRY")
    fields |= parse_metadata(fields.pop("metadata", {}))
    if "retry" in fields:
        fields["retry"] = parse_retry(fields["retry"])
    return JobSpec(**fields)


def parse_metadata(metadata: Any) -> dict[str, Any]:
    """Split metadata into labels with their own JobSpec fields, and the rest. Raises InvalidInput."""
    if not isinstance(metadata, Mapping):
        raise InvalidInput("metadata is not a JSON object.", code="INVALID_METADATA")
    labels = {
        METADATA_NAMES[name]: value for name, value in metadata.items() if name in METADATA_NAMES and value is not None
    }
    rest = {name: value for name, value in metadata.items() if name not in METADATA_NAMES}
    return {**labels, "metadata": rest} if rest else labels


def parse_retry(retry: Any) -> dict[str, Any]:
    """Return the arguments of `Retry` for the JSON of `retry` or `maxRetries`. Raises InvalidInput.

    Accepts 3 (retries), `{"attempts": 4, "backoff": {"type": "fixed", "delay": 5}}`, or the flat fields of `Retry`.
    """
    if isinstance(retry, int) and not isinstance(retry, bool):
        return {"attempts": retry + 1}
    if not isinstance(retry, Mapping):
        raise InvalidInput("retry is not a JSON object.", code="INVALID_RETRY")
    flat = {name: value for name, value in retry.items() if name != "backoff"}
    backoff = retry.get("backoff")
    if isinstance(backoff, Mapping):
        flat |= backoff
    elif backoff is not None:
        flat["type"] = backoff
    unknown = flat.keys() - {*BACKOFF_FIELDS, "attempts"}
    if unknown:
        raise InvalidInput(f"retry has no field {min(unknown)!r:.60}.", code="INVALID_RETRY")
    return {BACKOFF_FIELDS.get(name, name): value for name, value in flat.items()}


def metadata_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with the JSON names of labels, without the trace context, which is internal."""
    names = {field: json_name for json_name, field in METADATA_NAMES.items()}
    return {names.get(name, name): value for name, value in metadata.items() if name != tracing.TRACEPARENT}


def target_json(target: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the field that specifies this target: `target`, or `on_unhandled`, or none."""
    if target is None:
        return {}
    if target == COMPLETE_UNHANDLED:
        return {"on_unhandled": "complete"}
    if "name" in target:
        return {"target": {"name": target["name"]}}
    return {"target": {"kind": target["kind"], **target.get("options", {})}}
