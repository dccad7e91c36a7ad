"""Optimistic locking with If-Match: replacing an existing object requires its current ETag."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from timebell.errors import RevisionMissing, RevisionStale

IfMatch = Annotated[
    str | None, Header(alias="If-Match", max_length=200, description="ETag of the object to change, if it exists.")
]


def require_match(if_match: str | None, etag: str, subject: str, existing: str) -> None:
    """Check If-Match against the current ETag. Raises RevisionMissing, RevisionStale.

    `subject` starts the error message; `existing` is the id of the object.
    """
    if if_match is None:
        raise RevisionMissing(
            f"{subject} exists, so a change must specify its revision.",
            fix=f"Send If-Match: {etag} (or * to overwrite any revision).",
        )
    if if_match != "*" and etag not in [tag.strip().removeprefix("W/") for tag in if_match.split(",")]:
        raise RevisionStale(
            f"{subject} is now {etag}, and the change is based on {if_match:.40}.", existing=existing,
            fix="Read it again and repeat the change.",
        )  # fmt: skip
