"""The progress that a handler reports while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from timebell.errors import InvalidInput
from timebell.model.payload import decode, sanitize_text

MAX_TEXT_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Progress:
    """The last progress of an attempt: a fraction from 0 to 1, a text, or both."""

    fraction: float | None
    text: str | None
    at: datetime
    """When the handler reported it (UTC)."""

    def to_json(self) -> dict[str, Any]:
        """Return it as stored in attempt records."""
        return {"fraction": self.fraction, "text": self.text, "at": self.at.isoformat()}


def check_progress(fraction: object, text: object) -> tuple[float | None, str | None]:
    """Return the fraction as a float, and the text without control characters that no store accepts.

    Raises InvalidInput (INVALID_PROGRESS).
    """
    if fraction is not None and (
        isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1
    ):
        raise InvalidInput(
            f"{fraction!r:.100} is not a progress fraction.", code="INVALID_PROGRESS",
            fix='Pass a number from 0 to 1, such as event.progress(done / total, "page 3").',
        )  # fmt: skip
    if text is not None and (not isinstance(text, str) or len(text) > MAX_TEXT_LENGTH):
        problem = f"has {len(text)} characters" if isinstance(text, str) else f"is a {type(text).__name__}"
        raise InvalidInput(
            f"The progress text {problem}.", code="INVALID_PROGRESS",
            fix=f"Pass a string of at most {MAX_TEXT_LENGTH} characters.",
        )  # fmt: skip
    if fraction is None and text is None:
        raise InvalidInput(
            "event.progress() needs a fraction or a text.", code="INVALID_PROGRESS",
            fix='Write event.progress(0.4), or event.progress(text="page 3").',
        )  # fmt: skip
    return (
        None if fraction is None else float(fraction),
        None if text is None else sanitize_text(text, MAX_TEXT_LENGTH),
    )


def encode_progress(progress: Progress, attempt: int) -> str:
    """Encode the progress of an attempt as stored in the row of its job."""
    return orjson.dumps({"attempt": attempt, **progress.to_json()}).decode()


def decode_progress(stored: str | None, attempt: int) -> Progress | None:
    """Decode the progress stored in the row of a job; None if it belongs to an attempt before this one."""
    if stored is None or (values := decode(stored))["attempt"] != attempt:
        return None
    return progress_from_json(values)


def progress_from_json(values: dict[str, Any]) -> Progress:
    """Convert the progress of an attempt record."""
    return Progress(values["fraction"], values["text"], datetime.fromisoformat(values["at"]))
