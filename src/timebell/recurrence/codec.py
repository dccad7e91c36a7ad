"""Conversion of recurrences from and to text and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from timebell.errors import InvalidRecurrence, InvalidTimezone
from timebell.recurrence.cron.parser import MAX_EXPRESSION_LENGTH
from timebell.recurrence.cron.spec import Cron
from timebell.recurrence.dates import Dates
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.interval import Every
from timebell.recurrence.recurrence import Override, Recurrence
from timebell.recurrence.rrule.spec import RRule
from timebell.recurrence.spec import MAX_DEPTH, Except, OnCalendar, Spec, Union, Within, refuse_too_large

_SPEC_CLASSES: tuple[type[Spec], ...] = (Cron, Every, RRule, Dates, OnCalendar, Union, Except, Within)
KINDS: dict[str, type[Spec]] = {spec_class.kind: spec_class for spec_class in _SPEC_CLASSES}

_GO_DURATION = re.compile(r"(?=.)(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)


def parse_cron(text: str) -> Cron | Every:
    """Parse a cron expression; `@every 1h30m` yields an interval. Raises InvalidRecurrence."""
    words = text.split() if isinstance(text, str) and len(text) <= MAX_EXPRESSION_LENGTH else []
    if len(words) != 2 or words[0].lower() != "@every":
        return Cron(text)
    match = _GO_DURATION.fullmatch(words[1])
    if match is None:
        raise InvalidRecurrence(
            f"{words[1]!r} in @every is not a duration.",
            code="INVALID_CRON",
            fix="Write it like @every 1h30m.",
        )
    return Every(
        "PT" + "".join(f"{amount}{unit}" for amount, unit in zip(match.groups(), "HMS", strict=True) if amount)
    )


def parse_interval(text: str) -> Every:
    """Parse an ISO 8601 repeating interval `R/<anchor>/<duration>`, or a duration alone. Raises InvalidRecurrence.

    The anchor is a local time, or UTC if it ends in `Z`.
    """
    parts = text.split("/") if isinstance(text, str) and len(text) <= MAX_EXPRESSION_LENGTH else []
    if len(parts) == 1:
        return Every(parts[0])
    if len(parts) != 3 or parts[0] != "R":
        raise InvalidRecurrence(
            f"{str(text)[:64]!r} is not a repeating interval.",
            code="INVALID_INTERVAL",
            fix="Write it like R/2027-03-14T09:00:00/P1D.",
        )
    return Every(parts[2], parse_instant(parts[1], "the anchor"))


def spec_from_json(data: Mapping[str, Any]) -> Spec:
    """Create a spec from the result of `Spec.to_json`. Raises InvalidRecurrence."""
    if not isinstance(data, Mapping) or "spec" not in data:
        raise InvalidRecurrence("A recurrence is an object with kind and spec.", fix="Specify both.")
    spec_class = KINDS.get(data.get("kind", "")) if isinstance(data.get("kind"), str) else None
    if spec_class is None:
        raise InvalidRecurrence(
            f"kind {str(data.get('kind'))[:64]!r} is unknown.",
            fix=f"Use one of {', '.join(KINDS)}.",
        )
    _check_json_depth(data)
    return spec_class.from_fields(data, spec_from_json)


def _check_json_depth(data: Mapping[str, Any]) -> None:
    """Reject data that is nested deeper than any spec, before the recursive parsing of its parts."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        children = [node.get(name) for node in level if isinstance(node, Mapping) for name in ("spec", "except")]
        level = [part for node in children for part in (node if isinstance(node, list) else [node])]
    if any(isinstance(node, Mapping) for node in level):
        refuse_too_large("recurrence")


def recurrence_from_json(data: Mapping[str, Any]) -> Recurrence:
    """Create a recurrence from the result of `Recurrence.to_json`. Raises InvalidRecurrence, InvalidTimezone."""
    spec = spec_from_json(data)
    timezone = data.get("timezone")
    if not isinstance(timezone, str):
        raise InvalidTimezone(
            f"Invalid timezone: {timezone!r:.64}. Use IANA format (e.g., America/New_York)",
        )
    start, end = (_parse_bound(data.get(name), name) for name in ("start", "end"))
    override_data = data.get("overrides") or []
    if not isinstance(override_data, list):
        raise InvalidRecurrence(f"overrides must be a list, not {override_data!r:.60}.", fix="Specify a list.")
    overrides = tuple(Override.from_json(fields) for fields in override_data)
    return Recurrence(spec, timezone, start, end, data.get("maxRuns"), overrides)


def _parse_bound(text: object, name: str) -> datetime | None:
    return None if text is None else parse_instant(text, name)
