"""What callers give in the fields of jobs, schedules and the rest, checked: names, labels, payloads, priorities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from timebell.errors import InvalidInput, NotFound
from timebell.model.payload import decode, encode, legible
from timebell.model.routes import COMPLETES
from timebell.targets import bodies
from timebell.targets.payloads import plain
from timebell.targets.push.target import check_fit

PRIORITIES = range(-32_768, 32_768)

Accepted = Callable[[str, Any, dict[str, Any]], tuple[str, dict[str, Any]]]
"""(topic, payload, metadata) of a job for handlers: the payload as JSON, and the metadata to be kept."""


def unknown_options(verb: str, unknown: Iterable[str], known: Iterable[str]) -> InvalidInput:
    """The error for arguments that a verb does not have, with the names they come close to."""
    near = [get_close_matches("timezone" if name == "tz" else name, known, 1) for name in unknown]
    fix = " and ".join(found[0] for found in near if found)
    return InvalidInput(
        f"{verb} has no option {', '.join(sorted(unknown))}.", code="UNKNOWN_OPTION",
        fix=f"Did you mean {fix}?" if fix else "",
    )  # fmt: skip


def text(value: Any, field: str, most: int = 200) -> str:
    """A non-empty name of at most `most` characters. Raises InvalidInput."""
    if type(value) is str and 0 < len(value) <= most and value.isascii() and "\x00" not in value:
        return value
    if not isinstance(value, str) or not 0 < len(value) <= most or legible(value, most) != value:
        raise InvalidInput(
            f"{field} is {value!r:.60}; it is text of 1 to {most} characters.", code=f"INVALID_{field.upper()}"
        )
    return value


def queue_name(value: Any) -> str:
    """The name of a queue. `*`, which stands for all of them, is none. Raises InvalidInput."""
    if value == "*":
        raise InvalidInput("A queue cannot be called *.", code="INVALID_QUEUE", fix="Give it a name.")
    return text(value, "queue", 100)


def group_name(value: Any) -> str | None:
    """The name of a group, or None. Raises InvalidInput."""
    return None if value is None else text(value, "group")


def labelled(metadata: Mapping[str, Any] | None, labels: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with these labels in it, wherever they were given. Raises InvalidInput."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInput(
            f"metadata is {metadata!r:.60}.", code="INVALID_METADATA", fix='Give a mapping, such as {"source": "crm"}.'
        )
    given = {**(metadata or {})}
    for name, value in labels.items():
        value = given.get(name) if value is None else value
        if value is not None:
            given[name] = text(value, name)
    return given


def payload_of(
    topic: str, payload: Any, metadata: dict[str, Any], target: Mapping[str, Any] | None, accepted: Accepted
) -> tuple[str, dict[str, Any]]:
    """A payload as JSON, and the metadata to be kept; checked against what handlers take, or what the target's body
    asks for. Raises InvalidPayload."""
    if target is None or target == COMPLETES:
        return accepted(topic, payload, metadata)
    written = encode(plain(payload))
    known = {"topic": topic, "payload": decode(written), "metadata": metadata}
    if target.get("kind") == "push":
        check_fit(bodies.sample(**known), target["options"])
    else:
        bodies.check_fit(target.get("options", {}), **known)
    return written, metadata


def urgency(priority: Any) -> int:
    """A priority: the lower, the sooner. Raises InvalidInput."""
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
        raise InvalidInput(
            f"priority is {priority!r:.60}; it is a whole number.", code="INVALID_PRIORITY",
            fix=f"Use {PRIORITIES.start} (first) to {PRIORITIES.stop - 1} (last).",
        )  # fmt: skip
    return priority


def uuid_of(given: Any) -> str | None:
    """An id in its one spelling; None for what cannot be an id."""
    try:
        return str(UUID(given))
    except (ValueError, AttributeError, TypeError):
        return None


def job_uuid(given: str) -> str:
    """An id in its one spelling. Raises NotFound for what cannot be an id."""
    id_ = uuid_of(given)
    if id_ is None:
        raise no_such_job(given)
    return id_


def no_such_job(job_id: object) -> NotFound:
    """The error for an unknown id."""
    return NotFound(f"There is no job {job_id!s:.60}.", code="JOB_NOT_FOUND", fix="Finished jobs go after 30 days.")
