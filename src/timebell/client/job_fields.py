"""Jobs as JSON, with the fields of `POST /jobs`: read, and shown again."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from timebell import tracing
from timebell.client.jobs import JobSpec
from timebell.errors import InvalidInput
from timebell.model.preconditions import SPELT as LABELS
from timebell.model.routes import COMPLETES

# Field of JSON -> field of a JobSpec.
FIELDS = {
    "topic": "topic", "runAt": "run_at", "timezone": "timezone", "payload": "payload", "key": "key", "queue": "queue",
    "group": "group",
    "priority": "priority", "timeoutSeconds": "timeout", "expiresAfterSeconds": "expires_after", "target": "target",
    "condition": "condition", "unless": "unless",
    "metadata": "metadata", "retry": "retry", "maxRetries": "retry", "onGap": "on_gap", "onFold": "on_fold",
}  # fmt: skip
BACKOFF = {"type": "backoff", "delay": "delay", "max": "max_delay", "maxDelay": "max_delay", "jitter": "jitter"}


def spec_of(given: Mapping[str, Any]) -> JobSpec:
    """The job that these fields describe; a null one was not given. Raises InvalidInput."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in FIELDS:
            near = [f"Did you mean {known}?" for known in get_close_matches(name, FIELDS, 1)]
            raise InvalidInput(f"A job has no field {name!r:.60}.", code="UNKNOWN_FIELD", fix=" ".join(near))
        if value is not None:
            fields[FIELDS[name]] = value
    if "topic" not in fields:
        raise InvalidInput("A job has to say its topic.", code="TOPIC_MISSING")
    if "maxRetries" in given and "retry" in given:
        raise InvalidInput("retry and maxRetries say the same: give one.", code="INVALID_RETRY")
    fields |= labels_of(fields.pop("metadata", {}))
    if "retry" in fields:
        fields["retry"] = retry_of(fields["retry"])
    return JobSpec(**fields)


def labels_of(metadata: Any) -> dict[str, Any]:
    """The labels with fields of their own, and the rest of the metadata as it is. Raises InvalidInput."""
    if not isinstance(metadata, Mapping):
        raise InvalidInput("metadata is not a JSON object.", code="INVALID_METADATA")
    named = {LABELS[name]: value for name, value in metadata.items() if name in LABELS and value is not None}
    rest = {name: value for name, value in metadata.items() if name not in LABELS}
    return {**named, "metadata": rest} if rest else named


def retry_of(given: Any) -> dict[str, Any]:
    """`maxRetries: 3`, or `{"attempts": 4, "backoff": {"type": "fixed", "delay": 5}}`, or as `Retry`.

    Raises InvalidInput.
    """
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


def metadata_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with the names that JSON has for labels, without the context of a trace, which nobody wrote."""
    names = {ours: theirs for theirs, ours in LABELS.items()}
    return {names.get(name, name): value for name, value in metadata.items() if name != tracing.TRACEPARENT}


def target_json(target: Mapping[str, Any] | None) -> dict[str, Any]:
    """The field that gives this target: `target`, or `unheard`, or none."""
    if target is None:
        return {}
    if target == COMPLETES:
        return {"unheard": "complete"}
    if "name" in target:
        return {"target": {"name": target["name"]}}
    return {"target": {"kind": target["kind"], **target.get("options", {})}}
