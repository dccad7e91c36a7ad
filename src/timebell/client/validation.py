"""Validation of fields shared by jobs, schedules and other objects: names, labels, payloads, priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from timebell.errors import InvalidInput, NotFound
from timebell.feature import Feature
from timebell.model.job import METADATA_NAMES
from timebell.model.payload import decode, encode, sanitize_text
from timebell.model.routes import COMPLETE_UNHANDLED
from timebell.targets.payloads import to_json_value

PRIORITIES = range(-32_768, 32_768)

PayloadEncoder = Callable[[str, Any, dict[str, Any]], tuple[str, dict[str, Any]]]
"""(topic, payload, metadata) of a job for handlers -> (payload as JSON, metadata to store)."""


def unknown_options(operation: str, unknown: Iterable[str], known: Iterable[str]) -> InvalidInput:
    """Return the error for unknown arguments of an operation; suggests the nearest known names."""
    matches = [get_close_matches("timezone" if name == "tz" else name, known, 1) for name in unknown]
    fix = " and ".join(match[0] for match in matches if match)
    return InvalidInput(
        f"{operation} has no option {', '.join(sorted(unknown))}.", code="UNKNOWN_OPTION",
        fix=f"Did you mean {fix}?" if fix else "",
    )  # fmt: skip


def check_text(value: Any, field: str, max_length: int = 200) -> str:
    """Return a valid text of 1 to `max_length` characters. Raises InvalidInput (INVALID_<FIELD>)."""
    if type(value) is str and 0 < len(value) <= max_length and value.isascii() and "\x00" not in value:
        return value
    if not isinstance(value, str) or not 0 < len(value) <= max_length or sanitize_text(value, max_length) != value:
        raise InvalidInput(
            f"{field} is {value!r:.60}; it must be text of 1 to {max_length} characters.",
            code=f"INVALID_{field.upper()}",
        )
    return value


def check_queue_name(value: Any) -> str:
    """Return a valid queue name; `*` is reserved for all queues. Raises InvalidInput."""
    if value == "*":
        raise InvalidInput("A queue cannot be named *.", code="INVALID_QUEUE", fix="Use another name.")
    return check_text(value, "queue", 100)


def check_group_name(value: Any) -> str | None:
    """Return a valid group name, or None. Raises InvalidInput."""
    return None if value is None else check_text(value, "group")


def merge_labels(metadata: Mapping[str, Any] | None, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with these labels; a label that is None is taken from the metadata.

    Labels in metadata may have their JSON names, such as `ownerId`. Raises InvalidInput.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInput(
            f"metadata is {metadata!r:.60}.", code="INVALID_METADATA", fix='Use a mapping, such as {"source": "crm"}.'
        )
    merged = {METADATA_NAMES.get(name, name): value for name, value in (metadata or {}).items()}
    if metadata and len(merged) < len(metadata):
        raise InvalidInput("metadata has a label in two spellings.", code="INVALID_METADATA", fix="Keep one of them.")
    for name, value in labels.items():
        in_metadata = merged.get(name)
        if value is not None and in_metadata not in (None, value):
            raise InvalidInput(
                f"{name} is {value!r:.60}, but {in_metadata!r:.60} in metadata.", code="INVALID_METADATA",
                fix="Specify it once.",
            )  # fmt: skip
        if (specified := in_metadata if value is None else value) is not None:
            merged[name] = check_text(specified, name)
    return merged


def encode_payload(
    topic: str,
    payload: Any,
    metadata: dict[str, Any],
    target: Mapping[str, Any] | None,
    payload_encoder: PayloadEncoder,
    features: Iterable[Feature],
) -> tuple[str, dict[str, Any]]:
    """Return a payload as JSON, and the metadata to store. Raises InvalidPayload.

    The payload is validated against the type that handlers declare, or by rendering the body of the target.
    """
    if target is None or target == COMPLETE_UNHANDLED:
        return payload_encoder(topic, payload, metadata)
    from timebell.targets import bodies

    encoded = encode(to_json_value(payload))
    known = {"topic": topic, "payload": decode(encoded), "metadata": metadata}
    for feature in features:
        if target.get("kind") in feature.target_kinds:
            feature.check_renders(target["kind"], bodies.sample_delivery(**known), target["options"])
            return encoded, metadata
    bodies.check_renders(target.get("options", {}), **known)
    return encoded, metadata


def check_priority(priority: Any) -> int:
    """Return a valid priority; lower values run first. Raises InvalidInput."""
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
        raise InvalidInput(
            f"priority is {priority!r:.60}; it must be a whole number.", code="INVALID_PRIORITY",
            fix=f"Use {PRIORITIES.start} (first) to {PRIORITIES.stop - 1} (last).",
        )  # fmt: skip
    return priority


def parse_uuid(value: Any) -> str | None:
    """Return an id in canonical form; None if it is not a valid id."""
    try:
        return str(UUID(value))
    except (ValueError, AttributeError, TypeError):
        return None


def parse_job_id(value: str) -> str:
    """Return a job id in canonical form. Raises NotFound for an invalid id."""
    id_ = parse_uuid(value)
    if id_ is None and not isinstance(value, str):
        raise NotFound(
            f"A job id is text, not a {type(value).__name__}.", code="JOB_NOT_FOUND", fix="Pass the id: job.id."
        )
    if id_ is None:
        raise job_not_found(value)
    return id_


def job_not_found(job_id: object) -> NotFound:
    """Return the error for an unknown job id."""
    return NotFound(
        f"There is no job {job_id!s:.60}.", code="JOB_NOT_FOUND",
        fix="Finished jobs are deleted after TIMEBELL_RETENTION_DONE, by default 30 days.",
    )  # fmt: skip


def schedule_not_found(identifier: object) -> NotFound:
    """Return the error for an unknown schedule id."""
    if not isinstance(identifier, str):
        message, fix = f"A schedule id is text, not a {type(identifier).__name__}.", "Pass the id: schedule.id."
    elif parse_uuid(identifier) is None:
        message = f"There is no schedule with the id {identifier!r:.60}."
        fix = "If it is a name, find the id: app.schedules.get(name=...) in Python, GET /schedules?name=... in HTTP."
    else:
        message, fix = f"There is no schedule {identifier}.", "Check the id and the tenant."
    return NotFound(message, code="SCHEDULE_NOT_FOUND", fix=fix)


def schedule_name_not_found(name_or_id: str) -> NotFound:
    """Return the error for an unknown name of a schedule, where an id is accepted, too."""
    return NotFound(
        f"There is no schedule {name_or_id!s:.60}.", code="SCHEDULE_NOT_FOUND", fix="Check the name and the tenant."
    )
