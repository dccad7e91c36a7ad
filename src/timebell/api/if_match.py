"""If-Match: whoever puts what is there already says what they have read."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from timebell.errors import RevisionMissing, RevisionStale

Match = Annotated[
    str | None, Header(alias="If-Match", max_length=200, description="The ETag of what is changed, if it is there.")
]


def expect(match: str | None, etag: str, what: str, existing: str) -> None:
    """Let a change go on if it is of what there is. Raises RevisionMissing, RevisionStale."""
    if match is None:
        raise RevisionMissing(
            f"{what} is there, and a change has to say of which revision.",
            fix=f"Send If-Match: {etag} (or *, to overwrite whatever is).",
        )
    if match != "*" and etag not in [one.strip().removeprefix("W/") for one in match.split(",")]:
        raise RevisionStale(
            f"{what} is {etag} by now, and the change is of {match:.40}.", existing=existing,
            fix="Read it again, and change that.",
        )  # fmt: skip
