"""Optimistic locking with If-Match: a change based on an old representation is refused."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Any

import orjson
from fastapi import Header

from timebell.errors import RevisionMissing, RevisionStale

IfMatch = Annotated[
    str | None, Header(alias="If-Match", max_length=200, description="ETag of the object to change, if it exists.")
]


def entity_tag(revision: int, *state: Any) -> str:
    """Return the strong ETag of an object: its revision, and a digest of the `state` that is not part of revisions.

    State is what people change without an edit, such as a pause. What changes by itself, such as the time of the next
    run, is excluded: otherwise a schedule that fires every second could not be edited.
    """
    if not any(state):
        return f'"{revision}"'
    return f'"{revision}-{sha256(orjson.dumps(state, default=str)).hexdigest()[:12]}"'


def matches(header: str, tag: str) -> bool:
    """Return whether an If-Match or If-None-Match header contains the current ETag, or is `*`."""
    return header == "*" or tag in [each.strip().removeprefix("W/") for each in header.split(",")]


def require_match(if_match: str | None, tag: str, subject: str, existing: str) -> None:
    """Check If-Match against the current ETag. Raises RevisionMissing, RevisionStale.

    `subject` starts the error message; `existing` is the id of the object.
    """
    if if_match is None:
        raise RevisionMissing(
            f"{subject} exists, so a change must specify its revision.",
            fix=f"Send If-Match: {tag} (or * to overwrite any revision).",
        )
    check_match(if_match, tag, subject, existing)


def check_match(if_match: str | None, tag: str, subject: str, existing: str) -> None:
    """Check If-Match, if it was sent, against the current ETag. Raises RevisionStale."""
    if if_match is not None and not matches(if_match, tag):
        raise RevisionStale(
            f"{subject} is now {tag}, and the change is based on {if_match:.40}.", existing=existing,
            fix="Read it again and repeat the change.",
        )  # fmt: skip


def check_absent(if_match: str | None, subject: str) -> None:
    """Check If-Match, if it was sent, for an object that does not exist. Raises RevisionStale unless it is `*`.

    So a change of an object that was deleted in the meantime does not create it again.
    """
    if if_match not in (None, "*"):
        raise RevisionStale(
            f"{subject} does not exist, and the change is based on {if_match:.40}.",
            fix="Omit If-Match to create it.",
        )
