"""Text and JSON to recurrences, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from timebell.errors import InvalidRecurrence, InvalidTimezone
from timebell.recurrence.calendar.business_days import OnCalendar
from timebell.recurrence.core import Override, Recurrence, Spec
from timebell.recurrence.cron.parser import MAX_TEXT
from timebell.recurrence.cron.spec import Cron
from timebell.recurrence.dates import Dates
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.recurrence.interval import Every
from timebell.recurrence.operators import DEEPEST, Except, Union, Within, refuse_size
from timebell.recurrence.rrule.spec import RRule

_ALL: tuple[type[Spec], ...] = (Cron, Every, RRule, Dates, OnCalendar, Union, Except, Within)
KINDS: dict[str, type[Spec]] = {kind.kind: kind for kind in _ALL}

_GO_DURATION = re.compile(r"(?=.)(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)


def parse_cron(text: str) -> Cron | Every:
    """A cron expression; `@every 1h30m` gives the interval that it is. Raises InvalidRecurrence."""
    words = text.split() if isinstance(text, str) and len(text) <= MAX_TEXT else []
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
    """An ISO 8601 repeating interval `R/<anchor>/<duration>`, or a duration alone. Raises InvalidRecurrence.

    The anchor is local, or in UTC with `Z`.
    """
    parts = text.split("/") if isinstance(text, str) and len(text) <= MAX_TEXT else []
    if len(parts) == 1:
        return Every(parts[0])
    if len(parts) != 3 or parts[0] != "R":
        raise InvalidRecurrence(
            f"{str(text)[:64]!r} is not a repeating interval.",
            code="INVALID_INTERVAL",
            fix="Write it like R/2027-03-14T09:00:00/P1D.",
        )
    return Every(parts[2], parse_instant(parts[1], "the anchor"))


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """A spec as JSON-ready fields with its `kind`."""
    return {"kind": spec.kind, **spec.fields()}


def spec_from_json(data: Mapping[str, Any]) -> Spec:
    """The inverse of `spec_to_json`. Raises InvalidRecurrence."""
    if not isinstance(data, Mapping) or "spec" not in data:
        raise InvalidRecurrence("A recurrence is an object with kind and spec.", fix="Give both.")
    kind = KINDS.get(data.get("kind", "")) if isinstance(data.get("kind"), str) else None
    if kind is None:
        raise InvalidRecurrence(
            f"kind is {str(data.get('kind'))[:64]!r}, which is not known.",
            fix=f"Use one of {', '.join(KINDS)}.",
        )
    _check_depth(data)
    return kind.from_fields(data)


def _check_depth(data: Mapping[str, Any]) -> None:
    """Refuses nesting that no spec has before anything descends into it."""
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        inner = [one.get(name) for one in level if isinstance(one, Mapping) for name in ("spec", "except")]
        level = [part for one in inner for part in (one if isinstance(one, list) else [one])]
    if any(isinstance(one, Mapping) for one in level):
        refuse_size("recurrence")


def recurrence_to_json(recurrence: Recurrence) -> dict[str, Any]:
    """A bound recurrence as JSON-ready fields: those of its spec, and timezone, start, end, maxRuns."""
    found = {
        **spec_to_json(recurrence.spec),
        "timezone": recurrence.timezone,
        "start": format_instant(recurrence.start) if recurrence.start else None,
        "end": format_instant(recurrence.end) if recurrence.end else None,
        "maxRuns": recurrence.max_runs,
    }
    if recurrence.overrides:
        found["overrides"] = [one.to_json() for one in recurrence.overrides]
    return found


def recurrence_from_json(data: Mapping[str, Any]) -> Recurrence:
    """The inverse of `recurrence_to_json`. Raises InvalidRecurrence, InvalidTimezone."""
    spec = spec_from_json(data)
    timezone = data.get("timezone")
    if not isinstance(timezone, str):
        raise InvalidTimezone(
            f"Invalid timezone: {timezone!r:.64}. Use IANA format (e.g., America/New_York)",
        )
    start, end = (_bound(data.get(name), name) for name in ("start", "end"))
    overrides = data.get("overrides") or []
    if not isinstance(overrides, list):
        raise InvalidRecurrence(f"overrides are {overrides!r:.60}.", fix="Give a list.")
    found = tuple(Override.from_json(one) for one in overrides)
    return Recurrence(spec, timezone, start, end, data.get("maxRuns"), found)


def _bound(text: object, name: str) -> datetime | None:
    return None if text is None else parse_instant(text, name)
